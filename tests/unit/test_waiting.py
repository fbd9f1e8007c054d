"""Functions over futures, without a pool: what they do in the corners."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raypool import (
    Future,
    InvalidTypeError,
    InvalidValueError,
    after_all,
    after_each,
    fetch_next,
    fetch_outputs,
    wait,
)
from raypool.channel.records import Missing
from raypool.futures import Deferred


def ended(value: Any) -> Future[Any]:
    future: Future[Any] = Future("ended")
    future.set_result(value)
    return future


class Arrived:
    """Values of a call."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def get(self) -> list[Any]:
        return self.values


def test_a_value_that_cannot_be_opened_is_an_error() -> None:
    lost = OSError("no such class here")
    future = ended(Deferred(Arrived(Missing(lost)), 0))
    good = ended(Deferred(Arrived(1, 2), 1))

    (follower,) = after_each([future], pytest.fail)
    assert follower.exception(300) is lost
    assert after_all([future, good], list).result(300) == [2]


def test_two_threads_never_read_the_same_result() -> None:
    futures = [ended(number) for number in range(500)]

    def read() -> list[int]:
        values = []
        while True:
            try:
                values.append(fetch_next(futures)[1])
            except InvalidValueError:
                return values

    with ThreadPoolExecutor(4) as threads:
        read_by_all = [
            value
            for future in [threads.submit(read) for _ in range(4)]
            for value in future.result(300)
        ]
    assert sorted(read_by_all) == list(range(500))


class Interrupted(Arrived):
    """Values of a call; Ctrl-C comes while they are fetched for the first time."""

    is_first = True

    def get(self) -> list[Any]:
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return super().get()


def test_what_ctrl_c_has_kept_from_being_read_can_be_read() -> None:
    futures = [ended(1), ended(Deferred(Interrupted(2), 0))]
    with pytest.raises(KeyboardInterrupt):
        fetch_outputs(futures)
    assert [future.read for future in futures] == [False, False]

    late = [ended(Deferred(Interrupted(3), 0))]
    with pytest.raises(KeyboardInterrupt):
        fetch_next(late)
    assert fetch_next(late) == (0, 3)


def test_nothing_to_stack() -> None:
    with pytest.raises(InvalidValueError, match="has nothing to stack"):
        fetch_outputs([], stack=True)


def test_one_that_ends_in_this_instant_has_no_time_yet() -> None:
    without_time, with_time = ended(1), ended(2)
    with_time.finished_at = with_time.submitted_at
    assert fetch_next([without_time, with_time]) == (1, 2), "the one without ends now"
    assert fetch_next([without_time, with_time]) == (0, 1)


def test_a_future_may_stand_in_a_list_twice() -> None:
    future = ended(3)
    assert fetch_outputs(after_each([future, future], str)) == ["3", "3"]
    assert after_all([future, future], sum).result(300) == 6
    assert fetch_next([future, future]) == (0, 3)
    with pytest.raises(InvalidValueError):
        fetch_next([future, future])


def test_any_iterable_of_futures_will_do() -> None:
    assert fetch_next(ended(x) for x in (5, 6))[1] in (5, 6)  # type: ignore[arg-type]
    assert wait({ended(1), ended(2)})  # type: ignore[arg-type]
    assert fetch_outputs(after_each(iter([ended(1)]), str)) == ["1"]  # type: ignore[arg-type]


def test_many_futures_end_in_another_thread_each() -> None:
    futures: list[Future[int]] = [Future(str(number)) for number in range(200)]
    order: list[int] = []
    followers = after_each(futures, order.append)
    total = after_all(futures, sum)

    with ThreadPoolExecutor(8) as threads:
        for number, future in enumerate(futures):
            threads.submit(future.set_result, number)

    assert wait(followers, 60)
    assert sorted(order) == list(range(200))
    assert total.result(300) == sum(range(200))


def test_ctrl_c_in_the_function_ends_nothing_else() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    (follower,) = after_each([ended(1)], interrupt)
    assert type(follower.exception(300)) is KeyboardInterrupt
    assert after_each([ended(1)], str)[0].result(300) == "1"


def has_no_thread() -> bool:
    return not any(thread.name == "raypool-callbacks" for thread in threading.enumerate())


def test_its_thread_goes_when_there_is_nothing_to_do(eventually: Any) -> None:
    assert wait(after_each([ended(number) for number in range(100)], str), 60)
    assert eventually(has_no_thread)


def test_without_a_thread_the_call_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """As at the end of the interpreter, or where the system has no thread left."""

    here, start = threading.current_thread(), threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if threading.current_thread() is here:
            raise RuntimeError("can't start new thread")
        start(self)  # of a pool beside this test

    def nest(value: int) -> Future[int]:
        return after_each([ended(value)], lambda x: x + 1)[0]

    assert wait(after_each([ended(0)], str), 60)
    assert eventually(has_no_thread)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    (follower,) = after_each([ended(1)], nest)
    assert follower.result(0).result(0) == 2
    monkeypatch.undo()
    assert after_each([ended(1)], str)[0].result(300) == "1"


def run(code: str) -> list[bytes]:
    """Run a program; return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.split()


def test_in_a_forked_child_there_is_a_thread_again() -> None:
    code = """
        import os, threading, warnings
        from raypool import Future, after_each, wait
        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of any fork beside threads
        def ended():
            future = Future("ended")
            future.set_result(1)
            return future
        busy, end = threading.Event(), threading.Event()
        (follower,) = after_each([ended()], lambda _: busy.set() or end.wait(300))
        busy.wait(300)
        child = os.fork()
        if child == 0:  # the thread that was busy did not come along
            os._exit(0 if wait(after_each([ended()], str), 300) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        print(follower.result(300))
    """
    assert run(code) == [b"0", b"True"]


def test_a_forked_child_chooses_while_a_thread_of_the_parent_was_choosing() -> None:
    code = """
        import os, threading, time, warnings
        from raypool import Future, fetch_next
        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of any fork beside threads
        choosing, end = threading.Event(), threading.Event()
        class Looked(Future):
            def _look(self):
                choosing.set()
                end.wait(300)
            finished_at = property(_look, lambda self, value: None)
        looked, other = Looked("looked"), Future("other")
        for future in looked, other:
            future.set_result(1)
        thread = threading.Thread(target=fetch_next, args=[[looked]])
        thread.start()
        choosing.wait(300)
        child = os.fork()
        if child == 0:
            os._exit(0 if fetch_next([other]) == (0, 1) else 1)
        began = time.monotonic()
        while not (over := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < began + 100:
            time.sleep(0.01)
        print(over[0] == child and os.waitstatus_to_exitcode(over[1]))
        if not over[0]:
            os.kill(child, 9)
        end.set()
        thread.join()
    """
    assert run(code) == [b"0"]


def test_what_has_come_in_is_called_before_the_interpreter_ends() -> None:
    code = """
        import threading
        from raypool import after_each, parpool
        begun = threading.Event()
        with parpool(2, profile="threads", quiet=True) as pool:
            after_each([pool.parfeval(begun.wait) for _ in range(3)], lambda _: print("called", flush=True))
            begun.set()
    """
    assert run(code) == [b"called"] * 3


def test_times_that_cannot_pass() -> None:
    for verb in (fetch_next, wait):
        for timeout_s in ("x", True, [1]):
            with pytest.raises(InvalidTypeError, match="number of seconds"):
                verb([Future("f")], timeout_s)
        for timeout_s in (-1, float("nan")):
            with pytest.raises(InvalidValueError, match="must be at least 0, not"):
                verb([Future("f")], timeout_s)


def test_a_time_may_be_longer_than_python_can_wait(eventually: Any) -> None:
    """And it may be NumPy's."""

    def end_once_awaited(future: Future[Any]) -> None:
        assert eventually(lambda: bool(future._waiters))
        future.set_result(1)

    with ThreadPoolExecutor(1) as thread:
        for verb in (fetch_next, wait):
            for timeout_s in (math.inf, 1e10, np.float32(3000)):
                future: Future[Any] = Future("f")
                ending = thread.submit(end_once_awaited, future)
                assert verb([future], timeout_s) in [(0, 1), True]
                ending.result(300)
