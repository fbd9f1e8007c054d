"""The core is a function of its events: it imports nothing that could tell it more, and hash seeds
do not change its mind.
"""

import ast
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import raypool.core

CORE = Path(raypool.core.__file__).parent
MODULES = sorted(CORE.glob("*.py"))
PLAIN = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "heapq",
    "itertools",
    "math",
    "typing",
}
OURS = ("raypool.core", "raypool.errors")


def imported(tree):
    """Return the names of the modules that some code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import by full name"
            yield node.module


def test_the_core_imports_plain_data_modules_only():
    names = {
        (path.name, name)
        for path in MODULES
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not [
        (file, name) for file, name in names if name not in PLAIN and not name.startswith(OURS)
    ]


def test_the_core_iterates_no_set():
    """As far as can be seen: no loop, and no list, tuple or dict, is made over what is written as a
    set.
    """
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sources = []
            if isinstance(node, ast.For | ast.comprehension):
                sources = [node.iter]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"list", "tuple", "iter", "next"}
            ):
                sources = node.args
            for source in sources:
                is_call = isinstance(source, ast.Call) and isinstance(source.func, ast.Name)
                if isinstance(source, ast.Set | ast.SetComp) or (
                    is_call and source.func.id in {"set", "frozenset"}
                ):
                    found.append(f"{path.name}:{source.lineno}")
    assert not found


def test_the_scheduler_asks_nobody_for_the_time_or_for_chance(pool_of, monkeypatch):
    here = threading.get_ident()

    def others_only(ask):
        def answer():
            assert threading.get_ident() != here, "the scheduler has asked"
            return ask()

        return answer

    for module, name in (
        (time, "time"),
        (time, "monotonic"),
        (time, "perf_counter"),
        (random, "random"),
    ):
        monkeypatch.setattr(module, name, others_only(getattr(module, name)))
    pool = pool_of(1)
    pool.submit(0)
    pool.finish(0)
    pool.lose(0)


SCRIPT = """
import heapq, random
from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason

chance, scheduler, agenda, trace = random.Random(7), Scheduler(), [], []

def later(delay_s, event):
    heapq.heappush(agenda, (now + delay_s, len(trace) + len(agenda) / 1e6, repr(event), event))

now = 0.0
later(0, m.ResizeRequested(add=tuple(range(6))))
for task_id in range(150):
    kind = chance.randrange(5)
    place = chance.randrange(6) if kind == 1 else None
    size = chance.randrange(1, 5) if kind in (2, 3) else 1
    places = tuple(range(6)) if kind == 3 and chance.random() < 0.5 else None
    spec = TaskSpec(task_id, kind, size, priority=chance.randrange(2), place=place, is_gang=kind == 3, places=places)
    later(task_id * 0.002, m.TaskSubmitted(spec))

def carry_out(command):
    if isinstance(command, m.StartWorker):
        later(0.1, m.WorkerReady(command.worker_id))
    elif isinstance(command, m.SetTimer):
        later(command.at - now, m.TimerFired(command.kind, command.worker_id))
    elif isinstance(command, m.RunGang):
        for call in command.runs:
            carry_out(call)
    elif isinstance(command, m.RunTasks) and chance.random() < 0.1:
        later(0.01, m.WorkerLost(command.worker_id, LossReason.EXIT))
    elif isinstance(command, m.RunTasks):
        reports = tuple(Report(piece.stop - piece.start, busy_s=0.01) for piece in command.slices)
        later(0.01, m.AttemptFinished(command.worker_id, command.attempt_id, reports))

while agenda and now < 1000:
    now, _, _, event = heapq.heappop(agenda)
    for command in scheduler.handle(event, now):
        trace.append(command)
        carry_out(command)
assert not scheduler.backlog.tasks
print(len(trace))
for command in trace:
    print(command)
"""


def test_the_same_events_give_the_same_commands_whatever_the_hash_seed():
    traces = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(CORE.parent.parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert int(traces[0].split()[0]) > 500
