"""Scripts as users run them: each in a fresh process with nothing set for it, watched from outside until it is over."""

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
from raypool.engine.ray_session import ENVIRONMENT

LOOK_S = 0.25
RESTS = 20
"""To weigh a process takes the kernel 10 ms; weighing all rests so many times as long, or it would slow down who has many."""

LIMIT_S = 240.0
"""No script may take longer [s]."""


class Finished(NamedTuple):
    """What has come of a script: when it was started (Unix time [s]), and what its last line says."""

    started_at: float
    took_us: float
    peak_mb: float
    said: Any


def run_script(name, arguments, more=()):
    """Run a program in a process of its own; `arguments` are Python's, `more` variables that it is to have."""
    with tempfile.TemporaryDirectory(prefix="raypool-benchmark-") as folder:
        users = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}  # none of what we set for Ray
        places = {"HOME": folder, "TMPDIR": folder, "RAY_TMPDIR": tempfile.gettempdir()}  # Ray's sockets need short names
        environment = {**users, "PYTHONPATH": search_path(), **places, **dict(more)}
        command = [sys.executable, "-W", "ignore", *arguments]
        started, started_at = time.perf_counter(), time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        peaks = [0]
        watcher = threading.Thread(target=_watch, args=(psutil.Process(process.pid), peaks))
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
    return Finished(started_at, took * 1e6, max(peaks) / 1e6, json.loads(said.strip().splitlines()[-1]))


def _watch(root, peaks):
    """Note the memory of a process and its descendants now and then, until it ends."""
    next_weighing = 0.0
    while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
        started = time.perf_counter()
        if started > next_weighing:
            with contextlib.suppress(psutil.NoSuchProcess):
                peaks.append(sum(map(_weight, [root, *root.children(recursive=True)])))
            ended = time.perf_counter()
            next_weighing = ended + RESTS * (ended - started)
        time.sleep(LOOK_S)


def _weight(process):
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def lines_of(module):
    """Return how many lines of code a module of the benchmarks has, without its docstrings and empty lines."""
    source = (ROOT / "benchmarks" / f"{module.replace('.', '/')}.py").read_text()
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    told = {number for node in texts for number in range(node.lineno, node.end_lineno + 1)}
    return sum(bool(line.strip()) and number not in told for number, line in enumerate(source.splitlines(), start=1))
