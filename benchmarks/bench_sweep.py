"""A real sweep from the prompt to the scores: 24 networks on handwritten digits, the same script written for each system.

The scripts are in `benchmarks/sweeps`; model, data and seeds are the same, and so have the scores to be. Each runs in a fresh
process, in turns: what counts is the whole of it, until it is over, and the most memory that all its processes had (PSS). Lines
of code are those of the script, without its docstrings and empty lines.
"""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, in_turns
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


def run():
    names = [name for name, (package, _) in SCRIPTS.items() if find_spec(package) is not None]
    scores = {}
    runs = in_turns({name: lambda name=name: _run(name, scores) for name in names}, rounds=5)
    ours = runs.pop("raypool")
    wrong = [name for name in runs if scores[name] != scores["raypool"]]
    if wrong:
        raise WrongAnswersError(f"other scores than raypool's: {', '.join(wrong)}")
    area = "24 networks"
    lines = []
    for at, (what, unit) in enumerate((("until all is over", "us"), ("most memory", "MB"))):
        target = 1.0 if what == "until all is over" else None
        for name, theirs in runs.items():
            mine, others = [run[at] for run in ours], [run[at] for run in theirs]
            lines.append(Line(area, what, name, unit, mine, others, target, is_speedup=True))
    count = [float(_lines("raypool"))]
    lines += [Line(area, "lines", name, "", count, [float(_lines(name))], 1.0, is_speedup=True) for name in runs]
    return lines


def _run(name, scores):
    """Run a script; return how long it took [us], and the most memory of its processes [MB]."""
    done = run_script(name, ["-m", f"benchmarks.sweeps.{SCRIPTS[name][1]}"])
    scores[name] = done.said
    return done.took_us, done.peak_mb


def _lines(name):
    return float(lines_of(f"sweeps.{SCRIPTS[name][1]}"))
