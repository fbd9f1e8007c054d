"""How much memory a process uses with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from raypool.backends.ray.node_agent import family, is_over, memory_used

MB = 1_000_000


@pytest.fixture
def grow() -> Callable[[int], bytearray]:
    """Use so much memory [MB], as long as it is held."""
    return lambda size: bytearray(size * MB)


def test_what_is_used_is_counted(grow: Callable[[int], bytearray]) -> None:
    before = memory_used(os.getpid())
    held = grow(80)
    used = memory_used(os.getpid()) - before
    assert 70 * MB < used < 110 * MB
    assert is_over(os.getpid(), before + 40 * MB)
    assert not is_over(os.getpid(), before + 400 * MB)
    del held


def test_children_and_theirs_count() -> None:
    grandchild = f"held = bytearray({80 * MB}); print('there', flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    before = memory_used(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"there\n"
        assert started.pid in family(os.getpid())
        assert len(family(started.pid)) == 2
        assert memory_used(os.getpid()) - before > 70 * MB
        started.communicate(b"\n")
    assert started.pid not in family(os.getpid())


def test_what_forked_processes_share_counts_once(grow: Callable[[int], bytearray]) -> None:
    held = grow(120)
    before = memory_used(os.getpid())
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        os.read(here, 1)  # until the test closes its end
        os._exit(0)
    assert child in family(os.getpid())
    assert memory_used(os.getpid()) - before < 60 * MB
    assert not is_over(os.getpid(), before + 60 * MB), (
        "what is cheap counts it twice, and is not believed"
    )
    os.close(there)
    os.close(here)
    assert os.waitpid(child, 0)[0] == child
    del held


def test_a_process_that_has_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert family(gone.pid) == [gone.pid]
    assert memory_used(gone.pid) == 0
