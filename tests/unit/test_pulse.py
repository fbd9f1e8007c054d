"""A process is dead from the moment of its end, whoever has started it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypool.backends.ray.backend import Pulse


def test_it_stops_with_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pulse = Pulse(process.pid)
        assert not pulse.has_ended
        process.communicate(b"\n")
        assert pulse.has_ended


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pulse = Pulse(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert pulse.has_ended
    process.communicate()


def test_nobody_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        Pulse(process.pid)


def handles() -> int:
    """Return how many handles of processes are open here; of other descriptors some may be another
    thread's.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            count += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return count


def test_its_handle_goes_with_it() -> None:
    before = handles()
    kept = Pulse(os.getpid())
    assert handles() == before + 1
    del kept
    for _ in range(10):
        Pulse(os.getpid())
    assert handles() == before


def test_any_number_of_threads_may_ask() -> None:
    pulse = Pulse(os.getpid())
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lambda: [pulse.has_ended for _ in range(20_000)]) for _ in range(4)]
        assert not any(any(future.result()) for future in asked)
