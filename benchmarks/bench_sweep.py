"""A real sweep from the prompt to the scores: 24 networks on handwritten digits, the same script written for each system.

The scripts are in `benchmarks/sweeps`; model, data and seeds are the same, and so have the scores to be. Each runs in a fresh
process, in turns: what counts is the whole of it, until it is over, and the most memory that all its processes had (PSS). Lines
of code are those of the script, without its docstrings and empty lines.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec

import psutil

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import ROOT, Line, in_turns, search_path
from raypool.engine.ray_session import ENVIRONMENT

SCRIPTS = {
    "raypool": ("raypool", "with_raypool"),
    "joblib": ("joblib", "with_joblib"),
    "multiprocessing": ("multiprocessing", "with_processes"),
    "Ray's ActorPool": ("ray", "with_actor_pool"),
    "Ray's Pool": ("ray", "with_ray_pool"),
    "Ray Tune": ("ray", "with_tune"),
    "dask.distributed": ("distributed", "with_dask"),
}
LOOK_S = 0.25


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
    count = [float(lines_of(SCRIPTS["raypool"][1]))]
    lines += [Line(area, "lines", name, "", count, [float(lines_of(SCRIPTS[name][1]))], 1.0, is_speedup=True) for name in runs]
    return lines


def lines_of(script):
    """Return how many lines of code a script has."""
    source = (ROOT / "benchmarks" / "sweeps" / f"{script}.py").read_text()
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    told = {number for node in texts for number in range(node.lineno, node.end_lineno + 1)}
    return sum(bool(line.strip()) and number not in told for number, line in enumerate(source.splitlines(), start=1))


def _run(name, scores):
    """Run a script in a process of its own; return how long it took [us], and the most memory of its processes [MB]."""
    with tempfile.TemporaryDirectory(prefix="raypool-benchmark-") as folder:
        users = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}  # none of what we set for Ray
        environment = {**users, "PYTHONPATH": search_path(), "HOME": folder}
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.sweeps.{SCRIPTS[name][1]}"]
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        peaks = []
        watcher = threading.Thread(target=_watch, args=(psutil.Process(process.pid), peaks))
        watcher.start()
        said, errors = process.communicate(timeout=300)
        took = time.perf_counter() - started
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"{name} has ended with {process.returncode}: {errors[-2000:]}")
    scores[name] = json.loads(said.strip().splitlines()[-1])
    return took * 1e6, max(peaks) / 1e6


def _watch(root, peaks):
    """Note the memory of a process and its descendants, until it ends."""
    while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
        total = 0
        for process in (root, *root.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        peaks.append(total)
        time.sleep(LOOK_S)
