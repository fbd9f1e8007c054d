"""A future is one of the standard library's in all but its size, whoever uses it, and however many
at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from raypool import Future, futures


def test_nothing_is_missing_that_the_base_makes() -> None:
    """A Python whose futures have more than these would go unnoticed otherwise: the base's
    constructor is not called.
    """
    lean: Future[int] = Future("lean")
    for name, value in vars(concurrent.futures.Future()).items():
        own = getattr(lean, name)
        assert own == value or name == "_condition", f"{name}: {own!r} and not {value!r}"


def test_of_whoever_is_first_there_is_one() -> None:
    """Threads that come to new futures at the same time have the same lock of each."""
    count, interval = 200, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(count):
            lean: Future[int] = Future("lean")
            start, found = threading.Barrier(4), []

            def come(
                lean: Future[int] = lean, start: threading.Barrier = start, found: list[Any] = found
            ) -> None:
                start.wait(300)
                found.append(lean._condition)

            threads = [threading.Thread(target=come) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
            assert len(found) == 4
            assert len(set(map(id, found))) == 1
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("is_running", [False, True])
def test_one_that_has_ended_says_when(is_running: bool) -> None:
    """Another thread may look at it while any line of `cancel` runs."""
    lean: Future[int] = Future("lean", on_ask=lambda _: None)
    if is_running:
        lean.start()
    seen = set()

    def look(frame: Any, event: str, arg: object) -> Any:
        seen.add((lean.done(), lean.finished_at is not None))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        lean.cancel()
    finally:
        sys.settrace(before)
    assert seen == {(False, False), (False, True), (True, True)}


def in_a_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def is_waited_for(future: Future[Any]) -> bool:
    meeting = future._meeting
    return meeting is not None and meeting._awaited is not None


def test_several_threads_wait_for_it(eventually: Callable[..., bool]) -> None:
    future: Future[int] = Future("lean")
    found: list[int] = []
    threads = [in_a_thread(lambda: found.append(future.result(300))) for _ in range(3)]
    assert eventually(lambda: is_waited_for(future))
    future.set_running_or_notify_cancel()
    future.set_result(7)
    for thread in threads:
        thread.join(300)
    assert found == [7, 7, 7]


def test_who_waits_in_vain_is_told_in_time() -> None:
    future: Future[int] = Future("lean")
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert time.monotonic() - started >= 0.05


def test_a_callback_comes_before_and_after_the_end() -> None:
    future: Future[int] = Future("lean")
    found: list[Any] = []
    future.add_done_callback(found.append)
    future.set_result(1)
    future.add_done_callback(found.append)
    assert found == [future, future]


def test_beside_those_of_others(eventually: Callable[..., bool]) -> None:
    """`wait` and `as_completed` take the locks of all of them at once, and leave a note with
    each.
    """
    lean: list[Future[int]] = [Future("lean") for _ in range(3)]
    others: list[concurrent.futures.Future[int]] = [concurrent.futures.Future() for _ in range(3)]
    both = [future for pair in zip(lean, others, strict=True) for future in pair]
    found: list[Any] = []
    thread = in_a_thread(
        lambda: found.extend(
            future.result() for future in concurrent.futures.as_completed(both, 60)
        )
    )
    assert eventually(lambda: all(future._waiters for future in both))  # type: ignore[attr-defined]
    for number, future in enumerate(both):
        future.set_result(number)
    thread.join(300)
    assert found == list(range(6))
    assert not any(future._waiters for future in both)  # type: ignore[attr-defined]
    assert concurrent.futures.wait(both, 60).done == set(both)


def test_awaited_by_asyncio() -> None:
    future: Future[int] = Future("lean")

    async def wait_for_it() -> int:
        wrapped = asyncio.wrap_future(future)
        asyncio.get_running_loop().call_soon(future.set_result, 5)
        return await wrapped

    assert asyncio.run(wait_for_it()) == 5


def test_a_forked_child_need_not_wait_for_a_thread_of_its_parent() -> None:
    """Whoever is at a new future just then does not come along, and would never be done there."""
    with futures._making:
        pid = in_child(lambda: Future[int]("lean").cancel())
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def in_child(call: Callable[[], object]) -> int:
    """Make a call in a thread of a forked child, which has ten seconds; return its process."""
    pid = os.fork()
    if pid == 0:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(300)
        os._exit(int(thread.is_alive()))
    return pid
