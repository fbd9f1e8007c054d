"""A real sweep from the prompt to the scores: 24 networks on handwritten digits, the same script written for each system.

The scripts are in `benchmarks/sweeps`; the networks are the fully connected ones of `raypool demo`, with its data and epochs,
four of each, with seeds of their own. All is the same in each script, and so have the scores to be, in each turn. Each runs in
a fresh process, in turns: what counts is the whole of it, until it is over, the processor time of all its processes (as seen
four times a second: what one does in its last moments is missed), and the most memory that they had together (PSS). Lines of
code are those of the script, without docstrings and empty lines. All of it takes six minutes: there are as many turns, up to
five, as fit into these, and who takes more than a minute has one.
"""

from __future__ import annotations

import ast
import contextlib
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
from benchmarks.measuring import ROOT, Line, fresh_process, in_turns_within, search_path
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
NO_RAY = {"joblib", "multiprocessing", "dask.distributed"}
"""Those for which no Ray has to start."""

LOOK_S = 0.25
RESTS = 20
"""To weigh a process takes the kernel 10 ms; weighing all rests so many times as long, or it would slow down who has many."""

BUDGET_S = 6 * 60.0
LIMIT_S = 240.0
"""No script may take longer [s]."""

WHATS = (("until all is over", "us"), ("processor time", "us"), ("most memory", "MB"))
REASON = (
    "Ray's own processes have to come up before the first training, and to end after the last: without them nothing can be "
    "shipped, cancelled or replaced."
)


def run():
    names = [name for name, (package, _) in SCRIPTS.items() if find_spec(package) is not None]
    fresh_process("import benchmarks.sweeps.digits, ray; print()")  # from here on, the files are in memory
    scores = {name: [] for name in names}
    runs = in_turns_within(BUDGET_S, {name: lambda name=name: _run(name, scores[name]) for name in names})
    check_same(scores)
    return _lines(runs)


def check_same(scores):
    """Make sure that all systems have come to the same scores in all turns: name -> for each turn, a score for each network."""
    first = scores["raypool"][0]
    wrong = [f"{name}, turn {turn + 1}" for name, turns in scores.items() for turn, found in enumerate(turns) if found != first]
    if wrong:
        raise WrongAnswersError(f"other scores than raypool's in its first turn: {'; '.join(wrong)}")


def _lines(runs):
    ours = runs.pop("raypool")
    area = "24 networks"
    lines = []
    for at, (what, unit) in enumerate(WHATS):
        is_whole = what == "until all is over"
        for name, theirs in runs.items():
            mine, others = [run[at] for run in ours[: len(theirs)]], [run[at] for run in theirs]
            note = "" if len(theirs) == len(ours) else f"turns: {len(theirs)}"
            target, reason = (1.0 if is_whole else None), (REASON if is_whole and name in NO_RAY else "")
            lines.append(Line(area, what, name, unit, mine, others, target, is_speedup=True, note=note, reason=reason))
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
    """Run a script in its own process, note its scores; return how long it took, its processor time [us], its peak [MB]."""
    with tempfile.TemporaryDirectory(prefix="raypool-benchmark-") as folder:
        users = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}  # none of what we set for Ray
        environment = {**users, "PYTHONPATH": search_path(), "HOME": folder}
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.sweeps.{SCRIPTS[name][1]}"]
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        seen = Seen()
        watcher = threading.Thread(target=seen.watch, args=(psutil.Process(process.pid),))
        watcher.start()
        try:
            said, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # what Ray has started ends with it
            raise
        finally:
            took = time.perf_counter() - started
            watcher.join()
    if process.returncode:
        raise RuntimeError(f"{name} has ended with {process.returncode}: {errors[-2000:]}")
    scores.append(json.loads(said.strip().splitlines()[-1]))
    return took * 1e6, sum(seen.cpu_s.values()) * 1e6, seen.peak / 1e6


class Seen:
    """What was seen of a process and all its descendants: the processor time of each [s], and the most memory of all [bytes]."""

    def __init__(self):
        self.cpu_s = {}
        self.peak = 0
        self._next_weighing = 0.0

    def watch(self, root):
        """Look now and then, until the process ends."""
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._look([root, *root.children(recursive=True)])
            time.sleep(LOOK_S)

    def _look(self, processes):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self.cpu_s[process.pid] = times.user + times.system
        started = time.perf_counter()
        if started > self._next_weighing:
            self.peak = max(self.peak, sum(map(_weight, processes)))
            ended = time.perf_counter()
            self._next_weighing = ended + RESTS * (ended - started)


def _weight(process):
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0
