"""Where raypool loses, and why. What the reason is shows only in the numbers, so the reasons stand
here, apart from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median, quantiles

LEAST_ROUNDS = 5
"""With fewer rounds nothing can be called level."""

LEVEL = "Level: the middle half of the rounds lies on both sides of 1."
UNDECIDED = (
    "The median misses the target, but the middle half of the rounds lies on both sides of it: the"
    " noise is larger."
)

NO_SYSTEMS = frozenset(
    {
        "the least possible",
        "the ideal",
        "the bound",
        "list scheduling's guarantee",
        "the simulation",
        "none lost",
        "no workers, a memcpy",
        "no workers, ray.put and get",
        "1 worker",
        "100 workers",
        "without it",
        "without a run_dir",
        "one after another",
        "pageable",
        "no log",
        "one ray.put",
        "a bare queue.put",
        "a commit of SQLite's",
        "itself, in eight chunks",
        "itself, by torch's own",
        "Optuna's study alone",
        "the first 1,000",
    }
)
"""What is no other system: a bound, a part of the same work, or raypool itself. To take longer than
that is no loss.
"""


@dataclass(frozen=True)
class Reason:
    """Why raypool loses in some rows. The first three are patterns: the benchmark, "area: what",
    and the other system.

    What a reason says of a third party has to be seen in the same table, or it is not said:
    `slower` takes more than the other system there.
    """

    benchmark: str
    row: str
    against: str
    why: str
    slower: str | None = None

    def is_for(self, benchmark, line, lines):
        """Whether it is about this line, of all these, and they show it."""
        named = (
            (benchmark, self.benchmark),
            (f"{line.area}: {line.what}", self.row),
            (line.against, self.against),
        )
        return all(fnmatchcase(name, pattern) for name, pattern in named) and self._is_shown(
            line, lines
        )

    def _is_shown(self, line, lines):
        if self.slower is None:
            return True
        times = _times_of(self.slower, line, lines)
        return times is not None and times > 1


def _times_of(name, line, lines):
    """Return how many times as much as the other system of a line a third one takes for the same,
    by the median of the rounds.

    None if that was not measured.
    """
    found = next(
        (one for one in lines if (one.area, one.what, one.against) == (line.area, line.what, name)),
        None,
    )
    if found is None or found.others is None or line.others is None:
        return None
    return median(third / other for third, other in zip(found.others, line.others, strict=False))


BARE = "bare actors of Ray"
BY_PIPES = (
    "Its calls go through pipes of this machine, raypool's through Ray: bare actors of Ray take"
    " longer than it, too."
)
IN_FEW_CHUNKS = (
    "It cuts the items into four chunks for each worker before it starts; raypool cuts as it goes."
)
NO_RAY = (
    "It starts no Ray. Bare actors of Ray, for which Ray is started too, take more than it as well."
)
NO_RAY_FOR_RANKS = (
    "It starts its ranks without Ray. Ray's own TorchTrainer takes more than it, too."
)

OVERSEEN = (
    "Beside its workers raypool starts a process on each machine that watches over them, and it has"
    " closed only when all of them have gone. For a pool that is open for two seconds that counts."
)
PICKLED_AT_ONCE = (
    "A call is pickled as it is handed in, so what cannot be sent is said there; and who hands in"
    " many lets the thread that starts them go ahead now and then."
)
MPIRE_AGAIN = (
    "The four records of 2026-11-22 to 11-29 lie between 0.97 and 1.01 times: about level, with a"
    " lead of 10 to 20 us for MPIRE in two of them."
)
BY_HAND_AGAIN = (
    "The nine records of 2026-11-22 to 11-29 lie between 0.91 and 1.09 times: steps of 1.5 ms"
    " differ more between runs than the two loops do."
)
FABRIC_AGAIN = "The three records of 2026-11-22 to 11-29 lie between 0.98 and 1.02 times."
ONE_AT_A_TIME = (
    "Here each worker gets its next item when raypool has heard of the one before; the bare calls"
    " are all sent at once."
)
ALONE = (
    "Alone, a worker of raypool trains without DistributedDataParallel, as a step of one worker"
    " shows: so two are worth less."
)
SAID_FIRST = (
    "The ranks say first what they are about to do, so one that does something else is found and"
    " named. What raypool's ranks take by torch's own all_reduce stands beside it."
)
RAY_COMES_AND_GOES = (
    "Ray's own processes have to come up before the first training, and to end after the last:"
    " without them nothing can be shipped, cancelled or replaced."
)
ANOTHER_PROCESS = (
    "Another process of Ray's has to start. With bare actors of Ray the next call runs later than"
    " with it, too."
)
NOTHING_LEFT = (
    "Another worker starts when nothing is left of the one that was killed, nor of what it had"
    " started."
)
DRAWN_FIRST = (
    "As many items as `buffersize` says are handed in before the first result is asked for; it"
    " draws fewer, as the table shows."
)
EACH_BY_ITSELF = (
    "Each item is timed by itself, and may fail by itself; all of them are kept, with their times,"
    " for `.results`."
)
OWN_THREAD = (
    "A call goes through raypool's own thread, which has to wake when it is handed in, and again"
    " when its answer is there. Python code ran for a tenth of a trip's time (sampled once)."
)
CALLS_TOO = (
    "Eight calls come after the put. With eight bare calls it takes more than by itself, too."
)
LARGE = (
    "What is as large goes through Ray's store: of the time to hand in a call with 1 MB five sixths"
    " are `ray.put` (a profile of 100 calls). The rest is raypool's own: its thread, through which"
    " each call and each answer goes."
)
GIVEN_WHEN_FREE = (
    "Where few items are left, a worker gets its next one when raypool has heard that it is free,"
    " so that none stands behind one that takes long: for each item that is a millisecond or two"
    " more."
)
TWO_CORES = (
    "Two workers gain less still where predict is written by hand (the next row): two processes do"
    " not compute twice as much on these two cores."
)
AROUND = "The managed lane is that trainer, with raypool's own reports and checks around it."
TO_A_WORKER = (
    "A random value is drawn in a tenth of a millisecond, so a trial takes as long as its way to a"
    " worker through Ray and back. Optuna's threads send nothing."
)
OTHER_DRAWS = "The samplers draw other values."
OWN_MODULES = "A worker has raypool's modules in memory, beside Ray's."
BETWEEN_PARTS = (
    "Between two parts of a trial a worker waits 5 to 8 ms for the next one (measured once), and an"
    " epoch takes 50 ms."
)
FIRST_DRAWS = "By then each has trained a network or two: the samplers draw other ones."
THROUGH_RAY = (
    "Its messages go through a pipe of this machine, raypool's through a process of Ray's, from"
    " any machine: Ray's own queue takes longer than it, too."
)
KEPT_FOR_EACH = (
    "Of each item raypool keeps the worker, the times and the outcome, and tells the progress bar;"
    " the other loop keeps its value."
)
IN_SECONDS = (
    "The target is in seconds, and the machine computed at less than half of its speed: on a"
    " faster one, the same page was written in 1.3 s instead of 3.1 s."
)

REASONS = (
    *(
        Reason("peers", "at once: *", name, IN_FEW_CHUNKS)
        for name in ("Ray's Pool", "multiprocessing")
    ),
    *(
        Reason("peers", f"{way}: *", name, BY_PIPES, slower=BARE)
        for way in ("call by call", "as they come")
        for name in ("concurrent.futures", "multiprocessing", "MPIRE", "loky", "joblib")
    ),
    *(
        Reason("peers_faults", "*: killed", name, ANOTHER_PROCESS, slower=BARE)
        for name in ("concurrent.futures", "multiprocessing", "loky", "MPIRE", "dask.distributed")
    ),
    *(Reason("peers_faults", "*: killed", name, NOTHING_LEFT) for name in (BARE, "Ray's Pool")),
    *(
        Reason("peers_faults", "without end: the first result", name, DRAWN_FIRST)
        for name in ("Ray's Pool", "MPIRE")
    ),
    *(
        Reason("peers_faults", "without end: *", name, BY_PIPES, slower=BARE)
        for name in ("multiprocessing", "MPIRE")
    ),
    *(
        Reason("sweep", "* networks*: *", name, RAY_COMES_AND_GOES)
        for name in ("joblib", "multiprocessing", "dask.distributed")
    ),
    Reason("peers_long", "*", "*", GIVEN_WHEN_FREE),
    Reason("peers_setup", "*", "*", OVERSEEN),
    Reason("many", "a queued no-op: to hand it in", "*", PICKLED_AT_ONCE),
    Reason("ray_limits", "one driver: a call*", "a call of a bare actor", ONE_AT_A_TIME),
    Reason("start", "start: memory of a worker", "a bare actor", OWN_MODULES),
    *(
        Reason("peers_start", "a process: memory", name, OWN_MODULES)
        for name in (BARE, "Ray's ActorPool")
    ),
    Reason("train", "*: predict, 2 workers", "*", TWO_CORES),
    Reason("train", "*: to the first step, managed lane", "TorchTrainer.fit", AROUND),
    Reason("train", "*: a report *, managed lane", "TorchTrainer's", AROUND),
    Reason("report_page", "report, *", "2 s", IN_SECONDS),
    Reason("watch", "the live page, *", "2 s", IN_SECONDS),
    *(
        Reason("peers_start", "*", name, NO_RAY, slower=BARE)
        for name in (
            "concurrent.futures",
            "multiprocessing",
            "loky",
            "joblib",
            "MPIRE",
            "dask.distributed",
        )
    ),
    Reason("parfor", "*: an item", "multiprocessing.Pool.map", EACH_BY_ITSELF),
    Reason("futures", "*: round trip*", "*", OWN_THREAD),
    Reason(
        "closure",
        "*: parfor, an array",
        "one ray.put",
        CALLS_TOO,
        slower="one ray.put, and 8 bare calls with it",
    ),
    *(
        Reason("peers_data", "call by call: *", name, BY_PIPES, slower=BARE)
        for name in ("concurrent.futures", "multiprocessing", "loky", "MPIRE")
    ),
    Reason("peers_data", "*", "*", LARGE),
    Reason(
        "gap",
        "gap between 60 ms tasks: par*",
        "a bare actor's round trip",
        "After 60 ms of rest such a trip takes longer, too: a part of it, as the row against that"
        " one shows.",
        slower="such a trip after 60 ms of rest",
    ),
    Reason(
        "gap",
        "gap between 60 ms tasks: par*",
        "such a trip after 60 ms of rest",
        "A loop over bare actors, which waits for whichever is the first, has longer gaps than such"
        " a trip, too.",
        slower="a loop over bare actors",
    ),
    Reason(
        "report",
        "report(): a call, one after the other",
        "ray.train.report, local",
        "It keeps the last report only, raypool all: a bare queue.put takes longer than it, too.",
        slower="a bare queue.put",
    ),
    *(
        Reason(
            "launchers", f"from the prompt: {what}", name, NO_RAY_FOR_RANKS, slower="TorchTrainer"
        )
        for what in ("to the first step", "until all is over", "most memory")
        for name in ("torchrun", "Accelerate", "Lightning Fabric")
    ),
    *(
        Reason("launchers", row, name, NO_RAY_FOR_RANKS, slower="TorchTrainer")
        for row in ("a step: * model, 2 workers", "CPU time of a step, *")
        for name in ("torchrun", "Accelerate", "Lightning Fabric", "by hand")
    ),
    *(
        Reason("launchers", "what 2 workers take of one's time: *", name, ALONE)
        for name in ("torchrun", "Accelerate", "Lightning Fabric", "by hand")
    ),
    Reason("launchers", "all_reduce, *", "*", SAID_FIRST),
    *(
        Reason("search", "a trial that does nothing, random: *", name, TO_A_WORKER)
        for name in ("ProcessPoolExecutor", "Optuna's threads")
    ),
    Reason("search", "*: best loss", "Tune's ASHA, actors reused", OTHER_DRAWS),
    Reason("search", "successive halving, *: workers idle*", "nothing", BETWEEN_PARTS),
    Reason("search_digits", "*: after 1 s", "*", FIRST_DRAWS),
    Reason("search_digits", "*: after 1.5 s", "Optuna's Hyperband", FIRST_DRAWS),
    Reason("peers", "at once: 1 ms", "MPIRE", MPIRE_AGAIN),
    Reason("train", "training, 2 workers: a step of a small model, *", "*", BY_HAND_AGAIN),
    Reason("launchers", "a step: big model, 1 worker", "Lightning Fabric", FABRIC_AGAIN),
    Reason(
        "queue",
        "DataQueue, *: a message, by get",
        "multiprocessing.Queue",
        THROUGH_RAY,
        slower="ray.util.queue.Queue",
    ),
    Reason("live_view", "the driver, *", "a loop over bare actors", KEPT_FOR_EACH),
)
"""The first that is for a line holds. What nobody has measured yet has none: the page says so."""


def losses(benchmark, lines):
    """Return the lines in which raypool loses, each with why; the reason is "" where nobody has
    found it yet.
    """
    return [
        (line, why(benchmark, line, lines))
        for line in lines
        if line.is_met() is False or is_slower(line)
    ]


def is_slower(line):
    """Whether raypool takes more than another system, by the median of the rounds."""
    return line.others is not None and line.against not in NO_SYSTEMS and median(line.shares()) > 1


def why(benchmark, line, lines):
    """Return why raypool loses in one of these lines."""
    is_missed = line.is_met() is False
    if line.reason:
        return line.reason
    if not is_missed and _is_around(1, line.shares()):
        return LEVEL
    found = next((reason.why for reason in REASONS if reason.is_for(benchmark, line, lines)), "")
    return found or (UNDECIDED if is_missed and _is_around(line.target, line.ratios()) else "")


def _is_around(limit, ratios):
    """Whether the rounds cannot tell on which side of a limit they are."""
    if len(ratios) < LEAST_ROUNDS:
        return False
    lower, _, upper = quantiles(ratios, n=4, method="inclusive")
    return lower <= limit <= upper
