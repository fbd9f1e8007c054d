"""Scripts as users run them: each in a fresh process with nothing set for it, watched from outside
until it is over.

Processor time is that of all its processes, as seen four times a second: what one does in its last
moments is missed. Memory is the most that they had together (PSS).
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
from typing import Any, NamedTuple

import psutil

from benchmarks.measuring import ROOT, search_path
from raypool.backends.ray.session import ENVIRONMENT

LOOK_S = 0.25
RESTS = 20
"""To weigh a process takes the kernel 10 ms; weighing all rests so many times as long, or it would
slow down who has many.
"""

LIMIT_S = 1200.0
"""No script may take longer [s]."""


class Finished(NamedTuple):
    """What has come of a script: when it was started (Unix time [s]), and what its last line
    says.
    """

    started_at: float
    took_us: float
    cpu_us: float
    peak_mb: float
    said: Any


def run_script(name, arguments, more=()):
    """Run a program in a process of its own; `arguments` are Python's, `more` variables that it is
    to have.
    """
    # the path is short, for Ray's sockets; Ray finds no other cluster in this folder
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        # none of what we set for Ray
        users = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        places = {"HOME": folder, "TMPDIR": folder, "RAY_TMPDIR": folder}
        environment = {**users, "PYTHONPATH": search_path(), **places, **dict(more)}
        command = [sys.executable, "-W", "ignore", *arguments]
        started, started_at = time.perf_counter(), time.time()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        seen = Seen()
        watcher = threading.Thread(target=seen.watch, args=(psutil.Process(process.pid),))
        watcher.start()
        try:
            said, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # what it has started ends with it
            raise
        finally:
            took = time.perf_counter() - started
            watcher.join()
    if process.returncode:
        raise RuntimeError(f"{name} has ended with {process.returncode}: {errors[-2000:]}")
    last = json.loads(said.strip().splitlines()[-1])
    return Finished(started_at, took * 1e6, sum(seen.cpu_s.values()) * 1e6, seen.peak / 1e6, last)


class Seen:
    """What was seen of a process and all its descendants: the processor time of each [s], and the
    most memory of all [bytes].
    """

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


def lines_of(module):
    """Return how many lines of code a module of the benchmarks has, without its docstrings and
    empty lines.
    """
    source = (ROOT / "benchmarks" / f"{module.replace('.', '/')}.py").read_text()
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    told = {number for node in texts for number in range(node.lineno, node.end_lineno + 1)}
    return sum(
        bool(line.strip()) and number not in told
        for number, line in enumerate(source.splitlines(), start=1)
    )
