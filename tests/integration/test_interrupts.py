"""Ctrl-C: what it gives back, and that nothing stays (scenario 9). A terminal sends it to the whole
group of processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.leaks import name_of

GONE_WITHIN_S = 300.0


def press_ctrl_c(started: Any) -> None:
    os.killpg(started.pid, signal.SIGINT)


def check_nothing_is_left(started: Any, eventually: Callable[..., bool]) -> None:
    left = [(process.pid, name_of(process)) for process in started.family()]
    assert eventually(lambda: not started.family(), GONE_WITHIN_S), left


LOOP = """
import os, subprocess, sys, time
from pathlib import Path
from raypool import parpool

def work(number, ready={ready!r}):
    if number < 3:
        # so that each goes by itself, and none is sent ahead: 3 begins when the driver has had 2
        time.sleep(0.4)
        return number
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as a data loader's processes
    Path(ready).touch()
    time.sleep(600)
"""


def test_once_in_a_loop_and_once_in_a_wait_for_a_future(
    start_python: Any, make_gate: Any, eventually: Any
) -> None:
    """What the loop has finished is there, the workers stop, and the pool can be used. A future
    goes on: only who waits for it is interrupted.
    """
    ready, ready_again, waits = make_gate(), make_gate(), make_gate()
    started = start_python(
        LOOP.format(ready=str(ready.path))
        + f"""
with parpool(2, quiet=True, cancel_grace_s=60) as pool:
    pids = pool.parfeval_on_all(os.getpid).result()
    try:
        pool.parfor(work, 12, max_workers=1)
    except KeyboardInterrupt as interrupt:
        print(list(interrupt.results)[:4], interrupt.results.to_frame()["status"].value_counts().to_dict())
        print(interrupt.__notes__)
    print(pool.parfor(abs, [-1, -2])[:], pool.parfeval_on_all(os.getpid).result() == pids)
    future = pool.parfeval(work, 3, {str(ready_again.path)!r})
    try:
        Path({str(waits.path)!r}).touch()
        future.result()
    except KeyboardInterrupt:
        print(future.state, future.cancel(), future.state)
    value = pool.parfeval(abs, -1).result()
    while future.worker_replaced is None:
        time.sleep(0.01)
    print(value, future.worker_replaced)
"""
    )
    for gates in ((ready,), (ready_again, waits)):
        for gate in gates:
            gate.wait()
        assert eventually(lambda: len(started.family()) > 3)
        press_ctrl_c(started)

    done = started.finish()
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "[0, 1, 2, None] {'cancelled': 9, 'finished': 3}"
    assert "3 of 12 items" in lines[1]
    assert lines[2:] == ["[1, 2] True", "running True cancelled", "1 False"]
    check_nothing_is_left(started, eventually)


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 2])
def test_in_a_script_that_does_not_expect_it(
    start_python: Any, make_gate: Any, eventually: Any, times: int
) -> None:
    """The script ends with the usual traceback; the second time, it does not wait for anything any
    more.
    """
    ready = make_gate()
    started = start_python(
        LOOP.format(ready=str(ready.path))
        + """
def stubborn(number):
    while True:
        try:
            work(number + 3)
        except BaseException:
            continue

with parpool(2, quiet=True) as pool:
    pool.parfor(stubborn, 5)
"""
    )
    ready.wait()

    for _ in range(times):
        press_ctrl_c(started)

    done = started.finish()
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    check_nothing_is_left(started, eventually)
