"""How much memory a process uses with all that it has started.

It is asked of processes that do nothing else: this one may have a Ray whose workers come and go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from raypool.backends.ray.node_agent import family, is_over, memory_used

MB = 1_000_000

Process = subprocess.Popen[bytes]


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    """Start Python on some code, whose steps end with `step()`: it goes on when it is told to."""
    prelude = "def step():\n    print('there', flush=True)\n    input()\n"
    with ExitStack() as started:

        def begin(code: str) -> Process:
            process = subprocess.Popen(
                [sys.executable, "-c", prelude + code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            started.enter_context(process)
            started.callback(process.kill)
            wait_for(process)
            return process

        yield begin


def wait_for(process: Process) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"


def go_on(process: Process) -> None:
    """Let it take its next step."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_for(process)


def test_what_is_used_is_counted(start: Callable[[str], Process]) -> None:
    process = start(f"step(); held = bytearray({80 * MB}); step()")
    before = memory_used(process.pid)
    go_on(process)
    used = memory_used(process.pid) - before
    assert 70 * MB < used < 110 * MB
    assert is_over(process.pid, before + 40 * MB)
    assert not is_over(process.pid, before + 400 * MB)


def test_children_and_theirs_count(start: Callable[[str], Process]) -> None:
    grandchild = f"held = bytearray({80 * MB}); print('there', flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    started = start(f"step(); {child}")
    before = memory_used(started.pid)
    go_on(started)
    assert started.pid in family(os.getpid())
    assert len(family(started.pid)) == 2
    assert memory_used(started.pid) - before > 70 * MB
    started.communicate(b"\n")
    assert started.pid not in family(os.getpid())


def test_what_forked_processes_share_counts_once(start: Callable[[str], Process]) -> None:
    process = start(
        f"import os; held = bytearray({120 * MB}); step()\n"
        "if os.fork():\n    step()\n"
        "else:\n    os.read(0, 1)  # until all ends\n"
    )
    before = memory_used(process.pid)
    go_on(process)
    assert len(family(process.pid)) == 2
    assert memory_used(process.pid) - before < 60 * MB
    assert not is_over(process.pid, before + 60 * MB), (
        "what is cheap counts it twice, and is not believed"
    )


def test_a_process_that_has_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert family(gone.pid) == [gone.pid]
    assert memory_used(gone.pid) == 0
