"""Where raypool loses, and why. What the reason is shows only in the numbers, so the reasons stand here, apart from them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median, quantiles

LEAST_ROUNDS = 5
"""With fewer rounds nothing can be called level."""

LEVEL = "Level: the middle half of the rounds lies on both sides of 1."

NO_SYSTEMS = frozenset(
    {
        "the least possible",
        "the ideal",
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
    }
)
"""What is no other system: a bound, a part of the same work, or raypool itself. To take longer than that is no loss."""


@dataclass(frozen=True)
class Reason:
    """Why raypool loses in some rows. The first three are patterns: the benchmark, "area: what", and the other system."""

    benchmark: str
    row: str
    against: str
    why: str

    def is_for(self, benchmark, line):
        """Whether it is about this line."""
        named = ((benchmark, self.benchmark), (f"{line.area}: {line.what}", self.row), (line.against, self.against))
        return all(fnmatchcase(name, pattern) for name, pattern in named)


PIPES = "Their calls go through a pipe of this machine; raypool's go through Ray, whose bare actors are in the same table."
IN_LARGE_CHUNKS = (
    "They cut the items into a few large chunks before they start, which is as cheap as it gets; raypool cuts as it goes, so "
    "that no worker waits for another."
)
NO_RAY = "They start no Ray, which is most of what raypool takes; bare actors of Ray are in the same table."
A_CORE_THAT_SLEPT = (
    "A core that has slept answers late: Ray's own round trip after such a rest, and a loop over bare actors, show it."
)

REASONS = (
    Reason("peers", "at once: *", "Ray's Pool", IN_LARGE_CHUNKS),
    *(Reason("peers", "at once: *", name, IN_LARGE_CHUNKS) for name in ("multiprocessing", "MPIRE")),
    *(Reason("peers", "call by call: *", name, PIPES) for name in ("concurrent.futures", "multiprocessing", "MPIRE")),
    *(Reason("peers", "as they come: *", name, PIPES) for name in ("concurrent.futures", "multiprocessing", "MPIRE", "joblib")),
    *(
        Reason("peers_start", "*", name, NO_RAY)
        for name in ("concurrent.futures", "multiprocessing", "loky", "joblib", "MPIRE", "dask.distributed")
    ),
    Reason("parfor", "*", "multiprocessing.Pool.map", IN_LARGE_CHUNKS),
    Reason("gap", "gap between 60 ms tasks: par*", "a bare actor's round trip", A_CORE_THAT_SLEPT),
    Reason(
        "report",
        "report(): a call, one after the other",
        "ray.train.report, local",
        "It keeps the last report; raypool keeps all.",
    ),
    Reason(
        "train",
        "*: a step of a small model, warm lane",
        "torchrun",
        "A step of 2 ms on two cores that are shared cannot be told apart more finely: in three runs the medians were 0.92, 0.95 "
        "and 0.99, beside two plain processes with the same code 1.02 and 1.00.",
    ),
    Reason(
        "scheduler",
        "*: an event, 10,000 workers*",
        "10 us",
        "Delays, places that leave and places that fail are looked after at each event, which costs 1 us of it.",
    ),
)
"""The first that is for a line holds."""


def losses(benchmark, lines):
    """Return the lines in which raypool loses, each with why; the reason is "" where nobody has found it yet."""
    return [(line, why(benchmark, line)) for line in lines if line.is_met() is False or is_slower(line)]


def is_slower(line):
    """Whether raypool takes more than another system, by the median of the rounds."""
    return line.others is not None and line.against not in NO_SYSTEMS and median(line.shares()) > 1


def why(benchmark, line):
    """Return why raypool loses in a line."""
    found = next((reason.why for reason in REASONS if reason.is_for(benchmark, line)), "")
    return line.reason or found or (LEVEL if line.is_met() is not False and _is_level(line) else "")


def _is_level(line):
    """Whether the rounds cannot tell who is ahead."""
    if len(line.values) < LEAST_ROUNDS:
        return False
    lower, _, upper = quantiles(line.shares(), n=4, method="inclusive")
    return lower <= 1 <= upper
