"""Corners of the catalogue (test_catalogue.py): functions, arguments and results that do their
worst, many of them at once.

Each gets its error, and the pool goes on with the same devices.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from raypool import (
    LossReason,
    ParallelPool,
    RemoteTraceback,
    SerializationError,
    TaskError,
    TaskTimeoutError,
    WorkerLostError,
    WorkerResources,
    parpool,
)

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("as_good_as_new")]


def die(how: str) -> None:
    if how == "os._exit":
        os._exit(4)
    os.kill(os.getpid(), getattr(signal, how))


class FailsToOpen:
    """Travels well, and explodes when it is unpickled anywhere but here."""

    home = os.getpid()

    def __init__(self, only_away: bool) -> None:
        self.only_away = only_away

    def __reduce__(self) -> Any:
        return explode, (os.getpid(),)


def explode(home: int) -> str:
    if os.getpid() != home:
        raise OSError("cannot be opened here")
    return "opened at home"


# --- exceptions -----------------------------------------------------------------------------------


class Sealed(Exception):
    """Refuses attributes: no notes, no cause, no results."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses them too, as frozen dataclasses do, so that pickle cannot rebuild it either."""

    code: int


def test_an_exception_that_cannot_be_annotated(pool: ParallelPool) -> None:
    def fn(i: int) -> int:
        if i == 2:
            raise Sealed("wax")
        if i == 3:
            raise Frozen(5)
        return i

    assert type(pool.parfeval(fn, 2).exception(300)) is Sealed
    results = pool.parfor(fn, range(5), on_error="collect")
    assert results[:] == [0, 1, None, None, 4]
    assert type(results.errors[2]) is Sealed
    assert isinstance(results.errors[3], TaskError)
    assert "Frozen" in str(results.errors[3])
    with pytest.raises(Sealed, match="wax"):
        pool.parfor(fn, range(5))


class Unready(Exception):
    """Has attributes that raise."""

    @property
    def results(self) -> None:
        raise KeyError("not yet")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_exception_whose_attributes_raise(pool: ParallelPool) -> None:
    def fn(i: int) -> None:
        if i == 0:
            raise Unready("a")
        if i == 1:
            raise SyntaxError("bad", ("file", "3", "a", 5))  # type: ignore[arg-type]  # a text that is none
        error = ValueError("b")
        error.__notes__ = None  # type: ignore[assignment]
        raise error

    errors = pool.parfor(fn, range(3), on_error="collect").errors
    names = [type(error).__name__ for error in errors.values()]
    assert names[1:] == ["SyntaxError", "ValueError"]
    assert "Unready" in f"{names[0]} {errors[0]}"


def test_an_error_of_pythons_own_stays_one_without_what_cannot_travel(pool: ParallelPool) -> None:
    def fn() -> None:
        error = RecursionError("deep")
        error.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        raise error

    error = pool.parfeval(fn).exception(300)
    assert (type(error), str(error)) == (RecursionError, "deep")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Aside(BaseException):
    """Not an Exception, so that `except Exception` does not see it."""


def test_an_exception_without_words(pool: ParallelPool) -> None:
    def fn(i: int) -> None:
        raise Wordless

    results = pool.parfor(fn, range(2), on_error="collect")
    assert [type(error) for error in results.errors.values()] == [Wordless] * 2
    assert "Wordless" in results.to_frame()["error"][0]


def recurse(i: int) -> int:
    return recurse(i + 1)


def refer_to_itself() -> None:
    error = ValueError("cycle")
    error.me = error  # type: ignore[attr-defined]
    raise error


def fail_while_failing() -> None:
    try:
        raise ZeroDivisionError("the first")
    except ZeroDivisionError as error:
        raise LookupError("the second") from error


def raise_aside() -> None:
    raise Aside("by the way")


def say_a_lot() -> None:
    raise ValueError("x" * 3_000_000)


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (lambda: recurse(0), RecursionError, "recursion depth"),
        (refer_to_itself, ValueError, "cycle"),
        (fail_while_failing, LookupError, "the second"),
        (raise_aside, Aside, "by the way"),
        (say_a_lot, ValueError, "xxx"),
    ],
    ids=["recursion", "cycle", "chain", "BaseException", "long text"],
)
def test_exceptions_of_all_kinds(
    pool: ParallelPool, fn: Any, error: type[BaseException], words: str
) -> None:
    caught = pool.parfeval(fn).exception(300)
    assert type(caught) is error
    assert words in str(caught)
    assert isinstance(caught.__cause__, RemoteTraceback)
    if error is LookupError:
        assert "the first" in str(caught.__cause__)


def test_what_happens_while_a_value_is_let_go_harms_nothing(pool: ParallelPool) -> None:
    class Sour:
        def __del__(self) -> None:
            raise RuntimeError("in __del__")

    def fn(i: int) -> int:
        Sour()
        return i

    assert pool.parfor(fn, range(5)) == list(range(5))


# --- what cannot be opened ------------------------------------------------------------------------


def test_a_result_that_cannot_be_unpickled_here_fails_its_item_only(pool: ParallelPool) -> None:
    """Also when it came in one message with others."""

    def fn(i: int) -> Any:
        return FailsToOpen(only_away=True) if i == 150 else i

    pool.parfor(fn, range(100))  # now it is known to be short
    expected = [i for i in range(300) if i != 150]

    results = pool.parfor(fn, range(300), on_error="collect")

    assert isinstance(results.errors[150], SerializationError)
    assert "cannot be opened here" in str(results.errors[150])
    assert list(results.errors) == [150]
    assert [value for i, value in enumerate(results) if i != 150] == expected
    assert list(results.to_frame()["status"]).count("finished") == 299
    with pytest.raises(SerializationError, match="cannot be unpickled here") as caught:
        pool.parfor(fn, range(300))
    assert caught.value.results[:100] == list(range(100))


def test_a_result_that_cannot_be_unpickled_here_fails_its_future_only(pool: ParallelPool) -> None:
    def fn(i: int) -> Any:
        return FailsToOpen(only_away=True) if i == 50 else i

    pool.parfor(fn, range(40))
    futures = [pool.parfeval(fn, i) for i in range(100)]
    assert isinstance(futures[50].exception(300), SerializationError)
    assert futures[50].state == "failed"
    assert [future.result(300) for i, future in enumerate(futures) if i != 50] == [
        i for i in range(100) if i != 50
    ]


class EndsWhoOpensIt:
    """Ends the process in which it is unpickled, as it would in an orderly way."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_a_result_that_would_end_this_process_is_an_error(pool: ParallelPool) -> None:
    future = pool.parfeval(EndsWhoOpensIt)
    with pytest.raises(SerializationError, match=r"cannot be unpickled here \(SystemExit: 3"):
        future.result(300)
    assert future.state == "failed"
    results = pool.parfor(lambda i: EndsWhoOpensIt() if i == 1 else i, range(3), on_error="collect")
    assert list(results.errors) == [1]


def test_a_function_that_cannot_be_unpickled_there(pool: ParallelPool) -> None:
    bomb = FailsToOpen(only_away=True)
    with pytest.raises(OSError, match="cannot be opened here") as caught:
        pool.parfeval(lambda: bomb).result(300)
    assert "could not unpickle the function." in caught.value.__notes__[0]
    results = pool.parfor(lambda i: bomb, range(20), chunk_size=20, on_error="collect")
    assert len(results.errors) == 20


def test_an_item_that_cannot_be_unpickled_there_fails_alone(pool: ParallelPool) -> None:
    """Also when it went there in one message with others."""
    items = [*range(5), FailsToOpen(only_away=True), *range(6, 10)]
    results = pool.parfor(str, items, chunk_size=10, on_error="collect")
    assert list(results.errors) == [5]
    assert isinstance(results.errors[5], OSError)
    assert "could not unpickle the item." in results.errors[5].__notes__[0]
    assert [value for value in results if value is not None] == [
        str(i) for i in range(10) if i != 5
    ]
    assert set(results.to_frame()["attempts"]) == {1}
    bomb = FailsToOpen(only_away=True)
    with pytest.raises(OSError, match="cannot be opened here"):
        pool.options(retries=2).parfor(str, [bomb, bomb, bomb], chunk_size=3)


class Hangs:
    """Hangs when it is opened, packed, put in words or let go, away from home."""

    home = os.getpid()

    def __init__(self, when: str) -> None:
        self.when = when

    def hang(self, when: str) -> None:
        if self.when == when and os.getpid() != self.home:
            time.sleep(600)

    def __reduce__(self) -> Any:
        self.hang("packed")
        return (time.sleep, (600,)) if self.when == "opened" else (Hangs, ("nowhere",))

    def __del__(self) -> None:
        self.hang("let go")


class HangingError(Exception):
    """Hangs when it is put in words."""

    def __str__(self) -> str:
        time.sleep(600)
        return "late"


def raise_hanging() -> None:
    raise HangingError


@pytest.mark.ci
def test_what_hangs_outside_the_function(pool: ParallelPool, eventually: Any) -> None:
    """Time limits, cancel and the grace period hold from the opening of what was sent to the
    packing of the answer.
    """
    with parpool(1, quiet=True, cancel_grace_s=0.3, resources=WorkerResources(gpus=0)) as strict:
        short = strict.options(timeout_s=0.5, retries=0)
        calls: list[tuple[Any, ...]] = [
            (print, Hangs("opened")),
            (Hangs, "packed"),
            (Hangs, "let go"),
            (raise_hanging,),
        ]
        for call in calls:
            with pytest.raises(TaskTimeoutError):
                short.parfeval(*call).result()
            assert strict.parfeval(abs, -1).result(300) == 1
        for call in calls:
            future = strict.parfeval(*call)
            assert eventually(lambda future=future: future.state == "running")
            assert future.cancel()
            assert strict.parfeval(abs, -1).result(300) == 1


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "words"), [("os._exit", "exit code 4|crashed"), ("SIGKILL", "killed")]
)
def test_a_function_that_ends_its_process(pool: ParallelPool, how: str, words: str) -> None:
    """It runs again up to `retries` times, then fails alone; the others go on."""
    view = pool.options(retries=1)
    results = view.parfor(lambda i: die(how) if i == 1 else i, range(6), on_error="collect")
    assert results[:] == [0, None, 2, 3, 4, 5]
    error = results.errors[1]
    assert isinstance(error, WorkerLostError)
    assert error.attempts == 2
    assert error.reason in (LossReason.EXIT, LossReason.UNKNOWN)
    assert re.search(words, str(error)), str(error)
    assert "item 1 of" in str(error)
    assert list(results.to_frame()["attempts"])[1] == 2


@pytest.mark.ci
def test_a_killer_among_short_items_that_share_calls(pool: ParallelPool, marks: Any) -> None:
    """Nobody knows which of the items of a call has killed the worker: it is found, and only it is
    blamed.
    """

    def fn(i: int) -> int:
        if i == 1234:
            marks.add("killer")
            os._exit(1)
        return i

    results = pool.parfor(fn, range(3000), on_error="collect")
    assert list(results.errors) == [1234]
    assert isinstance(results.errors[1234], WorkerLostError)
    assert [value for i, value in enumerate(results) if i != 1234] == [
        i for i in range(3000) if i != 1234
    ]
    assert marks.count("killer") == 3, "retries=2: three attempts"


@pytest.mark.ci
def test_a_killer_among_futures_that_share_calls(pool: ParallelPool, marks: Any) -> None:
    def fn(i: int) -> int:
        if i == 33:
            marks.add("killer")
            os._exit(1)
        return i

    pool.parfor(fn, range(33))
    before = pool.statistics()
    futures = [pool.options(retries=1).parfeval(fn, i) for i in range(200)]
    error = futures[33].exception(300)
    assert isinstance(error, WorkerLostError)
    assert (error.attempts, futures[33].attempts, marks.count("killer")) == (2, 2, 2)
    assert [future.result(300) for i, future in enumerate(futures) if i != 33] == [
        i for i in range(200) if i != 33
    ]
    after = pool.statistics()
    counted = [
        after.submitted - before.submitted,
        after.finished - before.finished,
        after.failed - before.failed,
    ]
    assert counted == [200, 199, 1], "each is counted exactly once"


@pytest.mark.long
def test_several_killers_and_several_that_fail(pool: ParallelPool) -> None:
    def fn(i: int) -> int:
        if i in (20, 21, 150):
            os._exit(1)
        if i % 10 == 3:
            raise ValueError(i)
        return i

    results = pool.options(retries=1).parfor(fn, range(200), on_error="collect")
    killed = [i for i, error in results.errors.items() if isinstance(error, WorkerLostError)]
    failed = [i for i, error in results.errors.items() if isinstance(error, ValueError)]
    assert killed == [20, 21, 150]
    assert failed == list(range(3, 200, 10))
    assert len(results.errors) == 23
    assert all(results[i] == i for i in range(200) if i not in results.errors)


@pytest.mark.ci
def test_with_no_retries_no_item_runs_twice(pool: ParallelPool, marks: Any) -> None:
    def fn(i: int) -> int:
        marks.add(i)
        if i == 7:
            os._exit(1)
        return i

    results = pool.options(retries=0).parfor(fn, range(20), on_error="collect")
    assert list(results.errors) == [7]
    assert marks.all() == sorted(str(i) for i in range(20))


def test_an_item_that_fails_its_first_attempt_only(pool: ParallelPool) -> None:
    def fn(i: int) -> int:
        from raypool import current_task

        if i == 3 and current_task().attempt == 1:
            os._exit(1)
        return current_task().attempt

    results = pool.parfor(fn, range(6))
    assert results[3] == 2
    assert results.to_frame().loc[3, "attempts"] == 2


@pytest.mark.ci
def test_a_worker_killed_while_it_is_idle_is_replaced_unasked(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    before = pool.workers[1]
    os.kill(before.pid, signal.SIGKILL)
    assert eventually(lambda: pool.workers[1].pid != before.pid and pool.workers[1].state == "idle")
    assert pool.workers[1].gpu == before.gpu


@pytest.mark.ci
def test_kills_at_random_moments(pool: ParallelPool, eventually: Callable[..., bool]) -> None:
    """Scenario 45 in small: workers are killed from outside while they run; every result is there
    once, and right.
    """
    chance = random.Random(5)
    lost = pool.statistics().workers_lost

    def fn(i: int) -> int:
        threading.Event().wait(0.004)
        return i * i

    def kill() -> None:
        # Twice each: a worker that dies again and again while others finish is removed. And a slow
        # machine may start workers no faster than an endless series would kill them.
        left = [0, 1, 2] * 2
        while left and not is_over.wait(chance.uniform(0.1, 0.5)):
            worker = pool.workers[chance.choice(left)]
            if worker.state == "busy":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.append(worker.pid)
                    left.remove(worker.index)

    killed: list[int] = []
    is_over = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while not killed:  # or the test shows nothing
            results = pool.options(retries=20).parfor(fn, range(400))
            futures = [pool.options(retries=20).parfeval(fn, i) for i in range(200)]
            values = [future.result(300) for future in futures]
            assert results == [i * i for i in range(400)]
            assert values == [i * i for i in range(200)]
    finally:
        is_over.set()
        killer.join()
    assert eventually(lambda: pool.statistics().workers_lost > lost)


@pytest.mark.ci
def test_kills_at_random_moments_with_no_retries(pool: ParallelPool, marks: Any) -> None:
    """No item runs twice; each is either there or lost."""

    def fn(i: int) -> int:
        marks.add(i)
        threading.Event().wait(0.005)
        if i % 23 == 0:
            # at some moment soon: in this item, in another one, or between
            threading.Timer(0.01, os._exit, [1]).start()
        return i

    results = pool.options(retries=0).parfor(fn, range(100), on_error="collect")

    assert all(isinstance(error, WorkerLostError) for error in results.errors.values())
    assert all(value == i for i, value in enumerate(results) if i not in results.errors)
    begun = marks.all()
    assert len(begun) == len(set(begun)), "an item ran twice"
    assert {str(i) for i in range(100) if i not in results.errors} <= set(begun)


@pytest.mark.ci
def test_a_worker_killed_while_it_runs(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Callable[..., bool]
) -> None:
    def fn() -> int:
        marks.add(os.getpid())
        if len(marks.all()) == 1:
            gate.wait()
        return len(marks.all())

    future = pool.parfeval(fn)
    assert eventually(lambda: len(marks.all()) == 1)
    os.kill(int(marks.all()[0]), signal.SIGKILL)
    assert future.result(300) == 2
    assert future.attempts == 2
    assert pool.statistics().workers_lost > 0


@pytest.mark.ci
def test_a_function_that_closes_what_is_open(pool: ParallelPool) -> None:
    """Its worker has lost all connections, and cannot even say so."""
    error = pool.options(retries=0).parfeval(os.closerange, 3, 4000).exception(300)
    assert isinstance(error, WorkerLostError)


@pytest.mark.ci
def test_a_function_may_have_processes_of_its_own(pool: ParallelPool) -> None:
    def fork_and_wait() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def load() -> float:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        return float(
            sum(
                batch.sum()
                for (batch,) in DataLoader(TensorDataset(torch.arange(100.0)), 10, num_workers=2)
            )
        )

    assert pool.parfeval(fork_and_wait).result(300) == 7
    assert pool.parfeval(load).result(300) == 4950


@pytest.mark.ci
def test_a_task_bound_to_a_worker_fails_with_it(pool: ParallelPool) -> None:
    with pytest.raises(WorkerLostError, match=r"^Worker 1 "):
        pool.options(worker=1).parfeval(die, "os._exit").result(300)


@pytest.mark.long
def test_all_workers_at_once(pool: ParallelPool) -> None:
    lost = pool.statistics().workers_lost
    results = pool.parfor(lambda i: die("SIGKILL"), range(3), on_error="collect")
    assert len(results.errors) == 3
    assert pool.statistics().workers_lost == lost + 9


def test_errors_of_the_tree_survive_the_way_to_here(pool: ParallelPool) -> None:
    def fn() -> None:
        raise WorkerLostError("Raised by hand.", reason=LossReason.NODE, attempts=9)

    with pytest.raises(WorkerLostError, match="Raised by hand") as caught:
        pool.parfeval(fn).result(300)
    assert caught.value.attempts == 9
    assert pickle.loads(pickle.dumps(caught.value)).reason is LossReason.NODE
