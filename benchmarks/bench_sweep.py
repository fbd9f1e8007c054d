"""A real sweep from the prompt to the scores: 24 networks on handwritten digits, the same script
written for each system.

The scripts are in `benchmarks/sweeps`; the networks are the fully connected ones of `raypool demo`,
with its data and epochs, four of each, with seeds of their own. All is the same in each script, and
so have the scores to be, in each turn. Each runs in a fresh process, in turns: what counts is the
whole of it, until it is over, with the processor time of all its processes and the most memory that
they had together (PSS). Lines of code are those of the script, without docstrings and empty lines.
All of it takes six minutes: there are as many turns, up to five, as fit into these, and who takes
more than a minute has one.

A short sweep is 16 of these networks, for a quarter of the epochs: there the beginning and the end
of a system count most.
"""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, fresh_process, in_turns, in_turns_within
from benchmarks.scripts import lines_of, run_script

SCRIPTS = {
    "raypool": ("raypool", "with_raypool"),
    "joblib": ("joblib", "with_joblib"),
    "multiprocessing": ("multiprocessing", "with_processes"),
    "Ray's ActorPool": ("ray", "with_actor_pool"),
    "Ray's Pool": ("ray", "with_ray_pool"),
    "Ray Tune": ("ray", "with_tune"),
    "dask.distributed": ("distributed", "with_dask"),
}
BUDGET_S = 6 * 60.0
SHORT = ("raypool", "joblib", "multiprocessing")
SHORT_ROUNDS = 5

WHATS = (("until all is over", "us"), ("processor time", "us"), ("most memory", "MB"))


def run():
    names = [name for name, (package, _) in SCRIPTS.items() if find_spec(package) is not None]
    # from here on, the files are in memory
    fresh_process("import benchmarks.sweeps.digits, ray; print(0)")
    scores = {name: [] for name in names}
    runs = in_turns_within(
        BUDGET_S, {name: lambda name=name: _run(name, scores[name]) for name in names}
    )
    check_same(scores)
    return [*_lines(runs), *_short()]


def _short():
    scores = {name: [] for name in SHORT}
    runs = in_turns(
        {name: lambda name=name: _run(name, scores[name], {"SHORT_SWEEP": "1"}) for name in SHORT},
        rounds=SHORT_ROUNDS,
        warm_ups=0,
    )
    check_same(scores)
    whole = {name: [took for took, *_ in runs[name]] for name in SHORT}
    ours = whole.pop("raypool")
    return [
        Line(
            "16 networks, a quarter of the epochs",
            WHATS[0][0],
            name,
            "us",
            ours,
            theirs,
            1 / 1.1 if name == "joblib" else None,
            is_speedup=True,
        )
        for name, theirs in whole.items()
    ]


def check_same(scores):
    """Make sure that all systems have come to the same scores in all turns: name -> for each turn,
    a score for each network.
    """
    first = scores["raypool"][0]
    wrong = [
        f"{name}, turn {turn + 1}"
        for name, turns in scores.items()
        for turn, found in enumerate(turns)
        if found != first
    ]
    if wrong:
        raise WrongAnswersError(
            f"other scores than raypool's in its first turn: {'; '.join(wrong)}"
        )


def _lines(runs):
    ours = runs.pop("raypool")
    area = "24 networks"
    lines = []
    for at, (what, unit) in enumerate(WHATS):
        is_whole = what == "until all is over"
        for name, theirs in runs.items():
            mine, others = [run[at] for run in ours[: len(theirs)]], [run[at] for run in theirs]
            note = "" if len(theirs) == len(ours) else f"turns: {len(theirs)}"
            lines.append(
                Line(
                    area,
                    what,
                    name,
                    unit,
                    mine,
                    others,
                    1.0 if is_whole else None,
                    is_speedup=True,
                    note=note,
                )
            )
    count = [float(lines_of(script("raypool")))]
    lines += [
        Line(area, "lines", name, "", count, [float(lines_of(script(name)))], 1.0, is_speedup=True)
        for name in runs
    ]
    return lines


def script(name):
    """Return the script for a system, as a module of the benchmarks."""
    return f"sweeps.{SCRIPTS[name][1]}"


def _run(name, scores, more=()):
    """Run a script in its own process, note its scores; return how long it took, its processor time
    [us], its peak [MB].
    """
    done = run_script(name, ["-m", f"benchmarks.{script(name)}"], more)
    scores.append(done.said)
    return done.took_us, done.cpu_us, done.peak_mb
