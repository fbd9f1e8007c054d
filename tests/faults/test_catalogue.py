"""The catalogue of faults on real Ray, a row each: the error, its words, in a loop and in a call;
and the pool works afterwards.

What a user sees of each stands in docs/faults.md. Corners of the same faults, and many of them at
once, are in test_hostile.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import pytest

from raypool import (
    LossReason,
    ParallelPool,
    RemoteTraceback,
    SerializationError,
    StartupError,
    TaskError,
    TaskTimeoutError,
    WorkerLostError,
    WorkerResources,
    parpool,
)

pytestmark = [pytest.mark.usefixtures("as_good_as_new")]

HOME = os.getpid()


# --- what functions do ----------------------------------------------------------------------------


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class NeedsTwo(Exception):
    """Its arguments are not those of its constructor."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class NeverMade(NeedsTwo):
    """Pickles, and fails to unpickle."""

    def __reduce__(self) -> Any:
        return NeverMade, self.args


class Parcel:
    """Travels well, and does something when it is opened."""

    def __init__(self, opens: Callable[..., Any], *args: Any) -> None:
        self.opens, self.args = opens, args

    def __reduce__(self) -> Any:
        return self.opens, self.args


class DiesWhenPickled:
    def __reduce__(self) -> Any:
        os._exit(5)


class DiesWhenLetGo:
    def __del__(self) -> None:
        os._exit(6)


def fail_at_home() -> None:
    if os.getpid() == HOME:
        raise OSError("cannot be opened here")


def fail_away() -> None:
    if os.getpid() != HOME:
        raise OSError("cannot be opened there")


def die_away() -> None:
    if os.getpid() != HOME:
        os._exit(7)


def raise_it(error: Any, *args: Any) -> None:
    raise error(*args)


def let_go() -> str:
    DiesWhenLetGo()
    return "returned"


# --- functions ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What an item does, and what is heard of it."""

    name: str
    does: Callable[[], Any]
    error: type[BaseException]
    words: str


ROWS = [
    Row("raises", lambda: raise_it(KeyError, "missing", 3), KeyError, "missing"),
    Row(
        "raises what cannot be pickled",
        lambda: raise_it(HoldsALock),
        TaskError,
        "HoldsALock: holds a lock",
    ),
    Row("raises what fails to pickle itself", lambda: raise_it(BadReduce), TaskError, "BadReduce"),
    Row("raises what takes other arguments", lambda: raise_it(NeedsTwo, 1, 2), NeedsTwo, "1 and 2"),
    Row(
        "raises what cannot be rebuilt",
        lambda: raise_it(NeverMade, 1, 2),
        TaskError,
        "NeverMade: 1 and 2",
    ),
    Row("returns what cannot be pickled", threading.Lock, SerializationError, "a result.*lock"),
    Row(
        "returns what cannot be opened here",
        lambda: Parcel(fail_at_home),
        SerializationError,
        "cannot be opened here",
    ),
    Row(
        "calls sys.exit",
        lambda: raise_it(SystemExit, 3),
        TaskError,
        r"^The task called sys\.exit\(3\)\.",
    ),
    Row("calls os._exit", lambda: os._exit(4), WorkerLostError, "killed or crashed|exit code 4"),
    Row("is killed", lambda: os.kill(os.getpid(), signal.SIGKILL), WorkerLostError, "killed"),
    Row(
        "is told to end",
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        WorkerLostError,
        "exit code 1|killed",
    ),
    Row("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV), WorkerLostError, "crashed"),
    Row(
        "dies while its value is pickled",
        DiesWhenPickled,
        WorkerLostError,
        "killed or crashed|exit code 5",
    ),
    Row("dies while something is let go", let_go, WorkerLostError, "killed or crashed|exit code 6"),
]


def check(
    error: BaseException | None, expected: type[BaseException], words: str, what: str
) -> None:
    """Check an error: its class, its words, and what makes it of use."""
    assert type(error) is expected, repr(error)
    assert re.search(words, str(error), re.DOTALL), str(error)
    if isinstance(error, WorkerLostError):
        assert (error.attempts, error.reason) == (1, LossReason.EXIT), (
            error.attempts,
            error.reason,
        )
        for part in (what, "attempt 1", "Worker", "GPU", "raypool replay"):
            assert part in str(error), str(error)
    elif expected is not SerializationError:
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "in raise_it" in str(error.__cause__)
        assert "raypool/worker/" not in str(error.__cause__)


def lane_of(row: Row) -> list[pytest.MarkDecorator]:
    """Let one worker be killed by the quick tests: another one takes a second or two to start."""
    return [
        (
            pytest.mark.ci
            if row.error is WorkerLostError and row.name != "is killed"
            else pytest.mark.quick
        )
    ]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=lane_of(row)) for row in ROWS]
)
def test_a_function_that(pool: ParallelPool, row: Row) -> None:
    """Of a loop only this item fails, of two calls only this one."""
    does = row.does  # the table itself stays here

    def fn(i: int) -> Any:
        return does() if i == 1 else i

    once = pool.options(retries=0)
    bad, good = once.parfeval(fn, 1), once.parfeval(fn, 2)

    results = once.parfor(fn, range(4), on_error="collect")

    check(bad.exception(300), row.error, row.words, "fn")
    assert (bad.state, good.result(300)) == ("failed", 2)
    assert list(results.errors) == [1]
    check(results.errors[1], row.error, row.words, "item 1 of")
    assert results[:] == [0, None, 2, 3]
    assert list(results.to_frame()["status"]) == ["finished", "failed", "finished", "finished"]


@pytest.mark.parametrize(
    ("opens", "error", "words"),
    [
        (fail_away, OSError, "cannot be opened there"),
        (die_away, WorkerLostError, "killed or crashed|exit code 7"),
    ],
)
def test_an_argument_that_cannot_be_opened_by_the_worker(
    pool: ParallelPool, opens: Any, error: type[BaseException], words: str
) -> None:
    once = pool.options(retries=0)
    bad = once.parfeval(print, Parcel(opens))

    results = once.parfor(
        lambda item: item, [0, Parcel(opens), 2, 3], on_error="collect", chunk_size=1
    )

    for caught in (bad.exception(300), results.errors[1]):
        assert type(caught) is error
        assert re.search(words, str(caught)), str(caught)
    assert results[:] == [0, None, 2, 3]


def test_a_function_that_hangs(pool: ParallelPool) -> None:
    """It is interrupted; what cannot be, because it is in native code, is killed."""
    with parpool(1, quiet=True, cancel_grace_s=0.3, resources=WorkerResources(gpus=0)) as strict:
        late = strict.options(timeout_s=2).parfeval(lambda: sum(range(10**14)))

        # those that do not hang need some of it on a busy machine
        results = strict.options(timeout_s=10).parfor(
            lambda i: time.sleep(600) if i == 1 else i, range(3), on_error="collect"
        )

        for error, timeout_s in ((late.exception(300), 2), (results.errors[1], 10)):
            assert type(error) is TaskTimeoutError
            assert f"timeout_s={timeout_s}" in str(error)
            assert "stopped on worker 0" in str(error)
        assert results[:] == [0, None, 2]
        assert strict.parfeval(abs, -1).result(300) == 1


# --- workers --------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    """Return whether all of it is: a killed process is called a zombie while its last threads end,
    0.1 s at times.
    """
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def test_a_worker_that_is_killed_while_it_is_idle(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    """It costs nobody anything, not even who allows no second attempt."""
    victim = pool.workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert eventually(lambda: is_gone(victim.pid))
    once = pool.options(retries=0)

    futures = [once.parfeval(abs, -i) for i in range(4)]

    assert once.parfor(lambda i: i, range(8)) == list(range(8))
    assert [future.result(300) for future in futures] == [0, 1, 2, 3]
    assert eventually(lambda: pool.workers[0].pid != victim.pid)


def test_a_worker_that_is_killed_while_it_starts(pool: ParallelPool, marks: Any) -> None:
    """Another is started in its place, and the call waits for that."""

    def die_once() -> None:
        marks.add("started")
        if marks.count("started") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with parpool(1, setup=die_once, quiet=True, resources=WorkerResources(gpus=0)) as other:
        assert other.options(retries=0).parfeval(abs, -1).result(300) == 1
        assert other.options(retries=0).parfor(abs, [-2]) == [2]
    assert marks.count("started") == 2


class Snare:
    """A value whose worker dies when its call has been answered for, before Ray has sent the
    answer, or in the midst of it.
    """

    def __init__(self, marks: Any, size: int) -> None:
        self.marks, self.value = marks, bytes(size)

    def __reduce__(self) -> Any:
        if os.getpid() != HOME and not self.marks.all():
            self.marks.add("set")
            main = threading.main_thread().ident
            threading.Thread(target=self.spring, args=(main,), daemon=True).start()
        return bytes, (self.value,)

    def spring(self, main: int) -> None:
        """Die as soon as the main thread is out of all code of raypool's."""
        while True:
            frame, names = sys._current_frames().get(main), set()
            while frame is not None:
                names.add(frame.f_code.co_filename)
                frame = frame.f_back
            if not any(name.endswith("raypool/backends/ray/worker.py") for name in names):
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("verb", "size"),
    [("parfor", 10), ("parfeval", 10**6)],
    ids=["in the answer", "in the object store"],
)
def test_a_worker_that_is_killed_between_its_result_and_the_answer(
    pool: ParallelPool, marks: Any, verb: str, size: int
) -> None:
    """It may have run twice; its value is there once, and right. One item of the loop sets it: two
    workers would set two.
    """

    def fn(i: int) -> Any:
        return bytes(size) if i else Snare(marks, size)

    if verb == "parfeval":
        values = [pool.parfeval(fn, 0).result(300)]
    else:
        results = pool.parfor(fn, range(3))
        values = list(results)
        assert list(results.to_frame()["status"]) == ["finished"] * 3
    assert all(value == bytes(size) for value in values)
    assert marks.all() == ["set"]


def test_a_setup_that_fails_on_one_worker_and_on_all(pool: ParallelPool) -> None:
    """One place of two, tried again and again: a fixed size is not content with less. Nothing of
    the pool is kept.
    """

    def fail(worker: int | None) -> None:
        from raypool import current_task

        if worker in (None, current_task().worker):
            raise LookupError("no such data set")

    light = WorkerResources(gpus=0, cpus=0.1)
    for worker, how_many in ((1, "1 of 2"), (None, "2 of 2")):
        with pytest.raises(
            StartupError,
            match=f"(?s){how_many} workers did not start.*LookupError: no such data set",
        ):
            parpool(2, setup=lambda worker=worker: fail(worker), quiet=True, resources=light)
    with parpool(2, quiet=True, resources=light) as other:
        assert other.parfeval(abs, -1).result(300) == 1
        assert other.parfor(abs, [-2]) == [2]


# --- pools ----------------------------------------------------------------------------------------


def test_two_pools_at_once(pool: ParallelPool, gate: Any, eventually: Callable[..., bool]) -> None:
    """What befalls one does not concern the other."""
    with parpool(1, quiet=True, resources=WorkerResources(gpus=0)) as other:
        held = other.parfeval(gate.wait)
        assert eventually(held.running)
        with pytest.raises(WorkerLostError):
            pool.options(retries=0).parfeval(os._exit, 1).result(300)
        assert pool.parfor(abs, [-1, -2]) == [1, 2]
        pids = [worker.pid for worker in other.workers]
        gate.open()
        assert held.exception(300) is None
        assert [worker.pid for worker in other.workers] == pids
    assert pool.parfeval(abs, -3).result(300) == 3


@pytest.mark.quick
def test_a_pool_inside_a_worker_that_fails(pool: ParallelPool) -> None:
    """`parpool()` in a task is a pool in that process; an error in it is the task's."""

    def fn(i: int) -> list[int]:
        from raypool import parpool

        with parpool(3) as inner:
            return list(inner.parfor(lambda k: 6 // (k - i), range(3)))

    future = pool.parfeval(fn, 1)
    results = pool.parfor(fn, [5, 1], on_error="collect")
    for error in (future.exception(300), results.errors[1]):
        assert type(error) is ZeroDivisionError
    assert results[0] == [6 // (k - 5) for k in range(3)]


# --- memory ---------------------------------------------------------------------------------------


def fill_memory(size: int) -> None:
    """Use so much memory [bytes], and keep it."""
    held = bytearray(size)
    time.sleep(600)
    del held


def fill_in_a_child(size: int) -> None:
    import subprocess

    subprocess.run(
        [sys.executable, "-c", f"import time; held = bytearray({size}); time.sleep(600)"],
        check=False,
    )


@pytest.mark.quick
def test_a_function_that_uses_more_memory_than_it_may(pool: ParallelPool) -> None:
    """Itself, or in a child."""
    small = WorkerResources(gpus=0, memory_bytes=600_000_000)
    with parpool(1, quiet=True, resources=small) as limited:
        once = limited.options(retries=0)
        bad = once.parfeval(fill_in_a_child, 900_000_000)

        results = once.parfor(
            lambda i: fill_memory(900_000_000) if i == 1 else i, range(3), on_error="collect"
        )

        for error in (bad.exception(300), results.errors[1]):
            assert type(error) is WorkerLostError
            assert error.reason is LossReason.OUT_OF_MEMORY
            words = r"it used (0\.[6-9]|1\.)\d* GB of memory, and its memory_bytes allows 0\.60 GB"
            assert re.search(words, str(error)), str(error)
            assert "smaller batches" in str(error)
        assert results[:] == [0, None, 2]
        assert limited.parfeval(lambda: len(bytearray(200_000_000))).result(300) == 200_000_000


def test_a_machine_that_runs_out_of_memory(
    pool: ParallelPool, run_python: Callable[..., Any]
) -> None:
    """Ray ends the worker before the kernel would have to; that is known, and not taken for a
    crash.
    """
    if psutil.virtual_memory().available < 7e9:
        pytest.skip("needs 7 GB of memory")
    done = run_python(
        """
        import os, time
        import psutil
        from raypool import parpool

        machine = psutil.virtual_memory()
        # tests in other processes may take some of it
        enough = (machine.total - machine.available + 4.5e9) / machine.total
        os.environ["RAY_memory_usage_threshold"] = str(enough)

        def fill(i):
            held = []
            while i == 1:
                held.append(bytearray(100_000_000))
                time.sleep(0.02)
            return i

        with parpool(1, quiet=True, start_timeout_s=300) as pool:
            once = pool.options(retries=0)
            error = once.parfeval(fill, 1).exception(300)
            results = once.parfor(fill, range(3), on_error="collect")
            for error in (error, results.errors[1]):
                print(type(error).__name__, error.reason.name, str(error))
            print(results[:], pool.parfeval(abs, -1).result(300))
        """,
        timeout_s=500,
        RAY_memory_monitor_refresh_ms="100",
    )
    *errors, values = done.stdout.splitlines()
    assert len(errors) == 2
    for line in errors:
        assert re.match(
            "WorkerLostError OUT_OF_MEMORY Worker 0 .*running low on memory.*smaller batches", line
        ), line
    assert values == "[0, None, 2] 1"
