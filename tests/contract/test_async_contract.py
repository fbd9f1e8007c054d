"""Functions with `async def` as tasks, and `await` for futures."""

from __future__ import annotations

import asyncio
import operator
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from raypool import InvalidTypeError, ParallelPool, TaskTimeoutError, current_task, parpool
from raypool.errors import TaskCancelled

pytestmark = pytest.mark.everywhere


async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


class Doubles:
    async def __call__(self, x: int) -> int:
        return await double(x)


def test_the_result_is_what_the_coroutine_returns(pool: ParallelPool, tmp_path: Any) -> None:
    """Each verb runs it to its end, also behind a lambda; its errors are the item's, and its
    checkpoints are kept.
    """

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("two")

    async def leave_a_file(x: int) -> int:
        await asyncio.sleep(0)
        (current_task().checkpoint_dir / "left").write_text(str(x))
        return current_task().index

    assert list(pool.parfor(double, range(3))) == [0, 2, 4]
    assert list(pool.map(lambda x: double(x), range(3))) == [0, 2, 4]
    assert pool.parfeval(Doubles(), 3).result(300) == 6
    assert list(pool.spmd(lambda context: double(context.rank))) == [0, 2, 4]
    assert list(pool.parfor(leave_a_file, [5, 6], run_dir=tmp_path / "run")) == [0, 1]
    assert sorted(path.read_text() for path in tmp_path.rglob("left")) == ["5", "6"]
    with pytest.raises(LookupError, match="two"):
        pool.parfeval(fail).result(300)


@pytest.mark.semantics
def test_it_also_runs_where_an_event_loop_has_this_thread(pool: ParallelPool) -> None:
    async def main() -> int:
        return await pool.parfeval(double, 4)

    assert asyncio.run(main()) == 8


@pytest.mark.parametrize("how", ["timeout_s", "Ctrl-C"])
def test_there_too_it_can_be_stopped(how: str, eventually: Any) -> None:
    """As in a cell of a notebook, where a loop always runs."""
    did = []

    async def run() -> None:
        try:
            if how == "Ctrl-C":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            did.append("tidied up")

    async def main() -> None:
        with parpool(1, profile="inline", quiet=True) as pool:
            pool.options(timeout_s=None if how == "Ctrl-C" else 0.1).parfeval(run).result(300)

    error = KeyboardInterrupt if how == "Ctrl-C" else TaskTimeoutError
    with asyncio.Runner() as runner, pytest.raises(error):
        # not `runner.run`, which handles Ctrl-C itself; the loop of a notebook does not
        runner.get_loop().run_until_complete(main())
    # Ctrl-C may come while the coroutine's thread is being started: then nobody waits for that
    assert eventually(lambda: did == ["tidied up"])


@pytest.mark.concurrent
@pytest.mark.parametrize("is_in_child", [False, True])
def test_one_that_waits_or_computes_is_stopped(
    pool: ParallelPool, patience: None, marks: Any, eventually: Any, is_in_child: bool
) -> None:
    """Cancellation and a time limit end it where it is, after its `finally`; the worker goes on."""

    async def run() -> None:
        try:
            marks.add("begun")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            marks.add("tidied up")

    async def run_child() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run())

    train = run_child if is_in_child else run
    job = pool.parfeval(train)
    assert eventually(lambda: marks.count("begun"))
    assert job.cancel()
    assert eventually(lambda: job.worker_replaced is not None)
    assert not job.worker_replaced
    with pytest.raises(TaskTimeoutError):
        pool.options(timeout_s=0.1).parfeval(train).result(300)
    assert eventually(lambda: marks.count("tidied up") == marks.count("begun"))


@pytest.mark.semantics
@pytest.mark.threads
def test_an_interruption_within_a_callback_of_the_loop_arrives(pool: ParallelPool) -> None:
    """The loop lets no other exception than Python's own out of a callback."""

    def interrupt() -> None:
        raise TaskCancelled

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        await asyncio.sleep(600)

    with pytest.raises(asyncio.CancelledError):
        pool.parfeval(work).result(300)


@pytest.mark.concurrent
def test_a_coroutine_may_wait_for_a_future(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    """The event loop goes on meanwhile; to cancel the one that waits cancels the task, and the
    other way round.
    """

    async def main() -> None:
        waiting = asyncio.ensure_future(
            asyncio.gather(pool.parfeval(gate.wait), pool.parfeval(operator.mul, "a", 10**6))
        )
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        assert [len(value or "") for value in await waiting] == [0, 10**6]
        with pytest.raises(ZeroDivisionError):
            await pool.parfeval(operator.truediv, 1, 0)

    async def cancel(gate: Any, by_job: bool) -> None:
        job = pool.parfeval(gate.wait)
        waiting = asyncio.ensure_future(asyncio.wait_for(job, 3600))
        await asyncio.sleep(0)
        assert job.cancel() if by_job else waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert job.cancelled()

    asyncio.run(main())
    shut = type(gate)(gate.path.with_name("shut"))
    for by_job in (False, True):
        asyncio.run(cancel(shut, by_job))
    shut.open()
    assert eventually(lambda: not pool.busy)


@pytest.mark.arguments
def test_a_generator_function_is_refused_with_what_to_do_instead(pool: ParallelPool) -> None:
    def train(x: int) -> Iterator[int]:
        yield x

    async def train_too(x: int) -> AsyncIterator[int]:
        yield x

    class Trains:
        def __call__(self, x: int) -> Iterator[int]:
            yield x

    for fn in (train, train_too, Trains()):
        for verb in (
            lambda fn: pool.parfeval(fn, 1),
            lambda fn: pool.parfor(fn, [1]),
            lambda fn: pool.map(fn, [1]),
            pool.spmd,
        ):
            with pytest.raises(InvalidTypeError, match=r"yield in it.* Return a list"):
                verb(fn)
