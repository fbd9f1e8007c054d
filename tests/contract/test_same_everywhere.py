"""The same small programs give the same on every backend: docs/integrations.md lists what must
differ.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import (
    ParallelPool,
    TaskCancelled,
    TaskError,
    TaskTimeoutError,
    current_task,
    load_results,
    parpool,
    report,
)
from raypool.worker.interrupts import STOP_SIGNAL
from tests.conftest import Gate
from tests.contract.conftest import PoolMaker

pytestmark = pytest.mark.everywhere


@pytest.fixture
def reference() -> Iterator[ParallelPool]:
    """Give a pool of three workers in this process and thread, to compare with."""
    with parpool(3, profile="inline", quiet=True) as pool:
        yield pool


# --- results, output, seeds, metrics --------------------------------------------------------------


def work(x: int) -> dict[str, Any]:
    task = current_task()
    print("item", x)
    report(x=x, attempt_was=task.attempt)
    if x == 2 and task.attempt == 1:
        raise ConnectionError("once")
    if x == 3:
        raise KeyError(x)
    print("error of", x, file=sys.stderr)
    return {
        "index": task.index,
        "attempt": task.attempt,
        "name": task.name,
        "seed": task.seed,
        "random": (random.random(), float(np.random.random())),
    }


def account(pool: ParallelPool) -> dict[str, Any]:
    """Return all that must not depend on the backend of some calls."""
    retrying = pool.options(retries=2, retry_on=ConnectionError, name="work")
    loop = retrying.parfor(work, range(6), seed=11, on_error="collect", progress=False)
    future = retrying.parfeval(work, 2)
    failed = retrying.parfeval(work, 3)
    with pytest.raises(KeyError):
        failed.result(300)
    frame = loop.to_frame()
    value = future.result(300)
    return {
        "values": list(loop),
        "errors": {
            index: (type(error), str(error), error.args) for index, error in loop.errors.items()
        },
        "diary": list(loop.diary),
        "metrics": loop.metrics[["item", "attempt", "x", "attempt_was"]].values.tolist(),
        "table": frame[["status", "attempts", "reason", "error"]].values.tolist(),
        "attempts": loop.attempts[["item", "attempt", "status", "error"]].values.tolist(),
        "future": (
            {key: value[key] for key in ("index", "attempt", "name", "seed")},
            future.diary,
            future.attempts,
            future.state,
        ),
        "failed": (failed.state, failed.reason, failed.diary, failed.metrics["x"].tolist()),
        "map": list(pool.map(divmod, [7, 8], [2, 3])),
        "reduced": pool.parfor(float, range(50), reduce=lambda a, b: a / 3 + b, progress=False),
        "all": pool.parfeval_on_all(lambda: current_task().worker).result(300),
    }


def test_calls_give_the_same(pool: ParallelPool, reference: ParallelPool) -> None:
    assert account(pool) == account(reference)


# --- exceptions -----------------------------------------------------------------------------------


class TwoArguments(Exception):
    """Python would call it with one argument."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.sum = a + b


class Described(ValueError):
    """Python would call it with its whole text, and make another text of that."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no {name}")


class WithSlots(Exception):
    """It has something that is not in its `__dict__`, and takes keywords only."""

    __slots__ = ("code",)

    def __init__(self, *, code: int) -> None:
        self.code = code


class OfTheSystem(OSError):
    """Its base reads its arguments."""

    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)


class OfText(UnicodeDecodeError):
    """So does this one's."""

    def __init__(self) -> None:
        super().__init__("utf-8", b"\xff", 0, 1, "bad")


class SaysHow(Exception):
    """It says itself how it is pickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)

    def __reduce__(self) -> Any:
        return type(self), self.args


def several() -> Exception:
    return ExceptionGroup("several", [TwoArguments(1, 2), Described("x")])


def noted() -> Exception:
    error = TwoArguments(3, 4)
    error.add_note("mine")
    return error


RAISED = [
    lambda: TwoArguments(1, 2),
    lambda: Described("file"),
    lambda: WithSlots(code=5),
    lambda: OfTheSystem("/nowhere"),
    OfText,
    lambda: SaysHow(1, 2),
    several,
    noted,
    lambda: StopIteration(3),
    CancelledError,
]


def told(error: BaseException) -> tuple[Any, ...]:
    fields = {
        name: value for name, value in vars(error).items() if name not in ("__notes__", "results")
    }
    inner = [told(each) for each in error.exceptions] if isinstance(error, ExceptionGroup) else []
    system = (error.errno, error.strerror, error.filename) if isinstance(error, OSError) else ()
    args = error.args if not inner else error.args[:1]
    return type(error), str(error), args, fields, getattr(error, "code", None), system, inner


def test_exceptions_keep_their_type_and_what_they_hold(pool: ParallelPool, tmp_path: Path) -> None:
    """Also where their class takes other arguments than they hold: those that are raised, kept in a
    run, or returned.
    """

    def fail(index: int) -> None:
        raise RAISED[index]()

    errors = pool.parfor(
        fail, len(RAISED), on_error="collect", run_dir=tmp_path, progress=False
    ).errors
    kept = load_results(tmp_path).errors
    returned = pool.parfor(lambda make: make(), RAISED, progress=False)
    for index, make in enumerate(RAISED):
        assert told(errors[index]) == told(kept[index]) == told(returned[index]) == told(make())
    assert errors[RAISED.index(noted)].__notes__[0] == "mine"


def test_an_exit_is_a_failure(pool: ParallelPool) -> None:
    future = pool.parfeval(sys.exit, "enough")
    assert (type(future.exception(300)), str(future.error)) == (
        TaskError,
        "The task called sys.exit('enough').",
    )


# --- time limits ----------------------------------------------------------------------------------


@pytest.mark.arguments
@pytest.mark.concurrent
def test_a_call_that_cannot_be_says_how_to_write_it(pool: ParallelPool) -> None:
    def train(lr: float, width: int = 3) -> float:
        if width == 0:
            raise TypeError("no width")
        return lr * width

    def half(x: int) -> float:
        return x / 2

    def notes(call: Callable[[], object]) -> str:
        with pytest.raises(TypeError) as caught:
            call()
        return "\n".join(caught.value.__notes__)

    assert "without its first argument, 1." in notes(pool.parfeval(half, 1, 3).result)
    assert "without its first argument, 0." in notes(pool.parfeval_on_all(half, 0, 3).result)
    tuples = notes(lambda: pool.parfor(half_of_two, [(0.1, 2), (0.2, 3)]))
    assert (
        "here a tuple. Change half_of_two to take one argument, or call pool.map(half_of_two"
        in tuples
    )
    dicts = notes(lambda: pool.parfor(half_of_two, [{"lr": 0.1, "width": 2}]))
    assert "or pass lambda item: half_of_two(**item)" in dicts
    # raised within, or not to be mended like this
    assert "parfor calls" not in notes(lambda: pool.parfor(lambda item: train(*item), [(0.1, 0)]))
    assert "its first argument" not in notes(pool.parfeval(half, "1", 3).result)


def half_of_two(lr: float, width: int) -> float:
    return lr * width / 2


@pytest.mark.arguments
@pytest.mark.concurrent
def test_an_item_that_takes_too_long_fails(
    pool: ParallelPool,
    make_pool: PoolMaker,
    gate: Gate,
    eventually: Callable[..., bool],
    let_time_pass: Callable[[float], None],
) -> None:
    """Once, whatever `retry_on` names; what was beside it and comes after it runs."""
    before = pool.statistics().finished
    heard = threading.Event()  # with a report, what was printed before it has come

    def is_alone() -> bool:
        now = pool.statistics()
        return (now.finished, now.running) == (before + 2, 1)

    def be_late(by_s: float) -> None:
        """Let it be late only when the others have ended, which may take them long."""
        if make_pool.is_concurrent:
            assert eventually(is_alone)
            assert heard.wait(300)
            let_time_pass(by_s)

    def wait(x: int) -> int:
        if x == 1:
            print("waiting")
            report(waits=1)
            gate.wait()
        return x

    timeout_s = 1000 if make_pool.is_concurrent else 0.5
    limited = pool.options(timeout_s=timeout_s, retries=2, retry_on=Exception)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(be_late, 2000)
        results = limited.parfor(
            wait, 3, on_error="collect", progress=False, on_report=lambda _: heard.set()
        )
        late.result()
    assert list(results) == [0, None, 2]
    assert {index: type(error) for index, error in results.errors.items()} == {1: TaskTimeoutError}
    # its end is known before all that it had said has come
    assert eventually(lambda: results.diary[1] == "waiting\n")
    assert results.to_frame()["reason"].tolist()[1] == "timeout"
    future = limited.parfeval(wait, 1)
    be_late(4000)
    assert type(future.exception(300)) is TaskTimeoutError
    assert limited.parfeval(wait, 2).result(300) == 2


@pytest.mark.arguments
def test_also_in_a_thread_that_calls_inline(pool: ParallelPool, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(lambda: pool.options(timeout_s=0.1).parfeval(gate.wait).exception())
        assert type(call.result(300)) is TaskTimeoutError


@pytest.mark.arguments
def test_what_does_not_stop_inline_has_failed_and_a_warning_says_so_once(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on after `TaskCancelled`, until the warning is there."""

    def go_on(_: int) -> str:
        # it comes once, and anywhere: also between two rounds of a loop
        with contextlib.suppress(TaskCancelled):
            while True:
                threading.Event().wait(0.01)
        while "does not stop" not in caplog.text:
            threading.Event().wait(0.01)
        return "came back"

    with make_pool(1, cancel_grace_s=0.1) as pool:
        errors = (
            pool.options(timeout_s=2).parfor(go_on, 1, on_error="collect", progress=False).errors
        )
    assert type(errors[0]) is TaskTimeoutError
    assert caplog.text.count("go_on has run longer than its timeout_s=2 and does not stop") == 1
    assert signal.getsignal(STOP_SIGNAL) is signal.SIG_DFL
