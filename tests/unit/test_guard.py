"""Who is interrupted, when, and who is not."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from raypool.channel.records import Part, WorkerInfo
from raypool.core.messages import Signal
from raypool.errors import InvalidTypeError, TaskCancelled
from raypool.task import current_task
from raypool.worker import interrupts as guard_module
from raypool.worker import runner
from raypool.worker.interrupts import (
    AT_HAND,
    NOTHING,
    SIGNALS,
    STOP_SIGNAL,
    WHOLE,
    WISH,
    Interrupts,
    ProcessGuard,
    ThreadGuard,
)
from raypool.worker.runner import RawResult, Surroundings, run_parts
from raypool.worker.running import TaskContext, environment, note_here, uninterruptible

HERE = WorkerInfo(0, "here", 1)


def say_nothing(note: TaskContext, kind: str, payload: Any) -> None:
    pass


def note() -> TaskContext:
    return TaskContext(0, 1, None, 0, None, None)


def calls(*functions: Callable[[], Any]) -> list[Part]:
    """Return a call of single tasks, numbered from 0."""
    return [
        Part(task_id, task_id, [((), {})], 1, 0, 1, is_call=True)
        for task_id, _ in enumerate(functions)
    ]


def run(guard: Interrupts, *functions: Callable[[], Any], attempt_id: int = 7) -> list[RawResult]:
    """Run tasks, numbered from 0, in one call."""
    here = Surroundings(HERE, functions.__getitem__, lambda items: items, guard, say_nothing)
    return run_parts(attempt_id, calls(*functions), here)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes all its items, however long one waits to be interrupted."""
    monkeypatch.setattr(runner, "CALL_LIMIT_S", math.inf)


@pytest.fixture
def guard() -> Iterator[ProcessGuard]:
    before = signal.getsignal(STOP_SIGNAL)
    yield ProcessGuard()
    signal.signal(STOP_SIGNAL, before)


def wish(
    guard: ProcessGuard,
    attempt_id: int,
    task_id: int,
    kind: Signal = Signal.CANCEL,
    is_signalled: bool = True,
) -> None:
    """Do what the node agent does."""
    descriptor = os.open(f"/proc/self/fd/{guard.pipe}", os.O_WRONLY)
    os.write(descriptor, WISH.pack(attempt_id, task_id, SIGNALS.index(kind)))
    os.close(descriptor)
    if is_signalled:
        os.kill(os.getpid(), STOP_SIGNAL)


def at_hand(guard: ProcessGuard) -> tuple[Any, ...]:
    return AT_HAND.unpack(os.pread(guard.board, AT_HAND.size, 0))


def test_what_is_at_hand_is_interrupted(guard: ProcessGuard) -> None:
    went_on = []

    def task() -> None:
        assert at_hand(guard) == (7, 0)
        wish(guard, 7, 0)
        went_on.append(0)

    cancelled, other = run(guard, task, lambda: "a value")
    assert (cancelled.done, cancelled.values, cancelled.errors) == (0, [], {})
    assert other.values == ["a value"]
    assert not went_on
    assert at_hand(guard) == (7, WHOLE), "until the answer is with Ray"
    guard.end_call()
    assert at_hand(guard) == NOTHING


@pytest.mark.parametrize("key", [(6, 0), (8, 0), (7, 1)])
def test_a_wish_for_something_else_interrupts_nothing(
    guard: ProcessGuard, key: tuple[int, int]
) -> None:
    def task() -> str:
        wish(guard, *key)
        return "a value"

    assert run(guard, task)[0].values == ["a value"]


def test_what_has_not_begun_never_begins(guard: ProcessGuard) -> None:
    def task() -> str:
        wish(guard, 7, 1)
        return "a value"

    first, second, third = run(guard, task, lambda: pytest.fail("it was begun"), lambda: 3)
    assert (first.values, second.done, third.values) == (["a value"], 0, [3])


def test_a_wish_for_the_call_behind_this_one(guard: ProcessGuard) -> None:
    wish(guard, 8, 0)
    assert run(guard, lambda: 1, attempt_id=7)[0].values == [1]
    assert run(guard, lambda: pytest.fail("it was begun"), attempt_id=8)[0].done == 0
    assert run(guard, lambda: 3, attempt_id=9)[0].values == [3]


def test_a_signal_between_two_tasks_does_nothing(guard: ProcessGuard) -> None:
    run(guard, lambda: 1)
    wish(guard, 7, 0)
    os.kill(os.getpid(), STOP_SIGNAL)
    assert run(guard, lambda: 2, attempt_id=8)[0].values == [2]


def test_nothing_is_interrupted_twice(guard: ProcessGuard) -> None:
    told = []

    def task() -> None:
        try:
            wish(guard, 7, 0)
        except TaskCancelled:
            wish(guard, 7, 0)
            told.append("tidied up")
            raise

    assert run(guard, task)[0].done == 0
    assert told == ["tidied up"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_that_goes_on_ends_its_slice(
    guard: ProcessGuard, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    """It has caught what was raised; what it returns or raises is worth nothing, and no item
    follows.
    """
    seen = []

    def item(number: int) -> int:
        seen.append(number)
        if number == 1:
            try:
                wish(guard, 7, 0)
            except BaseException:
                if fails:
                    raise ValueError("as it tidied up") from None
                return -1
        return number

    result = run_loop(guard, item)
    assert seen == [0, 1]
    assert (result.done, result.values, result.errors) == (0, [], {})
    assert ("ValueError: as it tidied up" in capsys.readouterr().err) == fails


def test_a_wish_for_an_early_end(guard: ProcessGuard) -> None:
    def task() -> list[bool]:
        before = current_task().should_stop
        wish(guard, 7, 0, Signal.STOP)
        return [before, current_task().should_stop]

    assert run(guard, task)[0].values == [[False, True]]
    assert run(guard, lambda: current_task().should_stop, attempt_id=8)[0].values == [False]


# --- whose machine is about to go -----------------------------------------------------------------


def run_loop(
    guard: Interrupts, fn: Callable[[int], Any], size: int = 4, *, is_fixed: bool = True
) -> RawResult:
    """Run a slice of a loop."""
    here = Surroundings(HERE, lambda _: fn, lambda items: items, guard, say_nothing)
    (result,) = run_parts(
        7, [Part(0, 0, list(range(size)), size, 0, 1, is_call=False, is_fixed=is_fixed)], here
    )
    return result


def test_what_has_looked_and_ends_runs_again(guard: ProcessGuard) -> None:
    """It, and what has not begun; what had ended counts."""
    seen = []

    def fn(number: int) -> int:
        seen.append(number)
        if number == 1:
            wish(guard, 7, 0, Signal.LEAVE)
            assert current_task().should_stop
        return number

    result = run_loop(guard, fn)
    assert seen == [0, 1]
    assert (result.done, result.values, len(result.durations_s)) == (1, [0], 1)


def test_what_has_not_looked_and_ends_has_ended(guard: ProcessGuard) -> None:
    result = run_loop(
        guard, lambda number: wish(guard, 7, 0, Signal.LEAVE) if number == 1 else number
    )
    assert (result.done, result.values) == (2, [0, None])


def test_what_has_looked_and_fails_runs_again(guard: ProcessGuard) -> None:
    def task() -> None:
        wish(guard, 7, 0, Signal.LEAVE)
        if current_task().should_stop:
            raise RuntimeError("out of a deep loop")

    (result,) = run(guard, task)
    assert (result.done, result.errors) == (0, {})


@pytest.mark.parametrize("order", [(Signal.LEAVE, Signal.STOP), (Signal.STOP, Signal.LEAVE)])
def test_what_the_user_has_stopped_too_counts(
    guard: ProcessGuard, order: tuple[Signal, Signal]
) -> None:
    def task() -> bool:
        for each in order:
            wish(guard, 7, 0, each)
        return current_task().should_stop

    assert run(guard, task)[0].values == [True]


def test_what_has_not_begun_need_not_be_told(guard: ProcessGuard) -> None:
    told = []
    first, second = run(
        guard, lambda: wish(guard, 7, 1, Signal.LEAVE), lambda: told.append("began")
    )
    assert (first.done, second.done, told) == (1, 0, [])


def test_what_is_registered_is_called_in_the_tasks_thread_once(guard: ProcessGuard) -> None:
    """Of the item at hand; what is registered afterwards, at once."""
    called = []

    def fn(number: int) -> None:
        current_task().on_preempt(lambda: called.append((number, threading.get_ident())))
        if number == 2:
            wish(guard, 7, 0, Signal.LEAVE)
            wish(guard, 7, 0, Signal.LEAVE)
            current_task().on_preempt(lambda: called.append((-1, threading.get_ident())))

    result = run_loop(guard, fn)
    assert called == [(2, threading.get_ident()), (-1, threading.get_ident())]
    assert result.done == 2, "who was called may have ended early"


def test_what_fails_there_is_printed_and_changes_nothing(
    guard: ProcessGuard, capsys: pytest.CaptureFixture[str]
) -> None:
    def task() -> None:
        current_task().on_preempt(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        current_task().on_preempt(lambda: called.append("the next"))
        wish(guard, 7, 0, Signal.LEAVE)
        called.append("went on")

    called: list[str] = []
    run(guard, task)
    assert called == ["the next", "went on"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_is_not_to_be_interrupted_hears_of_it_at_its_end(guard: ProcessGuard) -> None:
    told = []

    def task() -> None:
        current_task().on_preempt(lambda: told.append("called"))
        with uninterruptible(note_here()):
            wish(guard, 7, 0, Signal.LEAVE)
            told.append("in it")
        told.append("after it")

    run(guard, task)
    assert told == ["in it", "called", "after it"]


def test_what_has_heard_of_it_may_be_interrupted_while_it_saves(guard: ProcessGuard) -> None:
    told = []

    def save() -> None:
        wish(guard, 7, 0)
        told.append("went on")

    def task() -> None:
        current_task().on_preempt(save)
        wish(guard, 7, 0, Signal.LEAVE)
        told.append("went on")

    assert run(guard, task)[0].done == 0
    assert told == []


def test_only_functions_can_be_registered() -> None:
    with pytest.raises(InvalidTypeError, match=r"on_preempt got a int, which can't be called"):
        current_task().on_preempt(3)  # type: ignore[arg-type]
    current_task().on_preempt(print)  # no machine goes here


def test_an_import_is_let_to_its_end(guard: ProcessGuard) -> None:
    told = []

    def task() -> None:
        code = compile("wish(guard, 7, 0)", "<frozen importlib._bootstrap>", "exec")
        exec(code, {"wish": wish, "guard": guard})
        told.append("imported")
        os.kill(os.getpid(), STOP_SIGNAL)  # as the agent does while the wish has not been read
        told.append("went on")

    assert run(guard, task)[0].done == 0
    assert told == ["imported"]


def test_as_the_task_ends_it_leaves_nothing_as_it_was(guard: ProcessGuard) -> None:
    """Python calls the handler of a signal even before the first line of a function."""
    turns: list[str] = []

    class Turns:
        def begin(self, part: Part) -> None:
            turns.append("begun")

        def end(self) -> None:
            turns.append("ended")

    class Late(ProcessGuard):
        def end(self) -> None:
            if self.pause():
                self.resume()
                wish(self, 7, 0)
            super().end()

    late = Late()
    here = Surroundings(
        HERE, lambda _: abs, lambda items: items, late, say_nothing, turns=cast("Any", Turns())
    )
    (result,) = run_parts(7, [Part(0, 0, [-1], 1, 0, 1, is_call=False)], here)
    assert result.done == 0
    assert turns == ["begun", "ended"]
    assert at_hand(late) == (7, WHOLE)
    assert note_here() is None


def test_requests_arrive_while_those_of_earlier_calls_are_forgotten() -> None:
    """A signal, or another thread, brings them at any moment."""
    guard = Interrupts()

    class Earlier(int):
        def __lt__(self, attempt_id: int) -> bool:
            guard.take(Signal.CANCEL, 8, attempt_id)
            return int(self) < attempt_id

        def __ge__(self, attempt_id: int) -> bool:
            return not self < attempt_id

    guard.take(Signal.CANCEL, Earlier(6), 0)
    guard.take(Signal.CANCEL, Earlier(7), 0)
    guard.begin_call(8)
    with pytest.raises(TaskCancelled):
        guard.approach(8)


def test_no_variable_is_left_in_the_environment() -> None:
    class Values(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            if name == "RAYPOOL_TEST_SECOND":
                raise TaskCancelled
            return super().__getitem__(name)

    values = Values(RAYPOOL_TEST_FIRST="1", RAYPOOL_TEST_SECOND="2")
    with pytest.raises(TaskCancelled), environment(values):
        pytest.fail("it was interrupted before")
    assert not values.keys() & os.environ.keys()


def test_a_task_may_raise_it_by_itself(guard: ProcessGuard) -> None:
    def task() -> None:
        raise TaskCancelled("mine")

    (result,) = run(guard, task)
    assert result.done == 1
    assert str(result.errors[0]) == "mine"


def test_many_wishes_at_once(guard: ProcessGuard) -> None:
    def task() -> str:
        for number in range(1, 1000):
            wish(guard, 7, number, is_signalled=False)
        os.kill(os.getpid(), STOP_SIGNAL)
        return "a value"

    results = run(guard, task, *[lambda: pytest.fail("it was begun")] * 999)
    assert results[0].values == ["a value"]
    assert all(result.done == 0 for result in results[1:])


def test_a_thread_is_interrupted(eventually: Any) -> None:
    guard = ThreadGuard()
    running = threading.Event()
    results: list[RawResult] = []

    def task() -> None:
        running.set()
        while True:
            pass

    thread = threading.Thread(target=lambda: results.extend(run(guard, task, lambda: "a value")))
    thread.start()
    assert running.wait(300)
    assert guard.is_at_hand(7, 0)
    guard.request(Signal.CANCEL, 7, 0)
    thread.join(300)
    assert [result.done for result in results] == [0, 1]
    assert guard.is_free


def test_a_thread_that_begins_others_is_interrupted_and_they_are_not() -> None:
    """Python 3.11 interrupts the one that is just being made, for which its maker then waits for
    ever.
    """
    for attempt_id in range(100):
        guard = ThreadGuard()
        running = threading.Event()
        results: list[RawResult] = []

        def task(running: threading.Event = running) -> None:
            while True:
                threading.Thread(target=running.set).start()

        def work(
            guard: Interrupts = guard,
            attempt_id: int = attempt_id,
            results: list[RawResult] = results,
        ) -> None:
            results.extend(run(guard, task, attempt_id=attempt_id))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert running.wait(300)
        guard.request(Signal.CANCEL, attempt_id, 0)
        thread.join(300)
        assert [result.done for result in results] == [0], f"attempt {attempt_id}"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="There it is interrupted at once.")
def test_a_thread_that_never_has_begun_another_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "THREAD_START_S", 0.1)
    guard = ThreadGuard()
    begins, goes_on = threading.Event(), threading.Event()
    results: list[RawResult] = []

    class Slow(threading.Thread):
        def _bootstrap(self) -> None:
            begins.set()
            goes_on.wait(300)
            super()._bootstrap()  # type: ignore[misc]

    def task() -> None:
        Slow(target=bool).start()

    thread = threading.Thread(target=lambda: results.extend(run(guard, task, lambda: "a value")))
    thread.start()
    assert begins.wait(300)
    guard.request(Signal.CANCEL, 7, 0)
    goes_on.set()
    thread.join(300)
    assert [result.is_cancelled for result in results] == [
        True,
        False,
    ], "it ends by itself, and nobody wants what it returns"


def test_what_has_not_reached_a_thread_does_not_hit_what_comes_next() -> None:
    """It was asked for in the last moment: whatever the thread does next is not meant."""
    guard = ThreadGuard()
    for _ in range(200):
        guard.begin_call(7)
        limit = RawResult(0)
        try:
            try:
                guard.approach(0)
                guard.begin(note(), limit)
                guard.request(Signal.CANCEL, 7, 0)
            finally:
                guard.end()
        except TaskCancelled:
            pass
        assert limit.is_cancelled
        sum(range(1000))
        guard = ThreadGuard()


@pytest.mark.parametrize("profile", ["inline", "threads"])
def test_a_profiler_works_after_tasks_in_this_process(
    run_python: Callable[..., Any], profile: str
) -> None:
    """Python 3.11 waits for ever in the next traced call after an exception for a thread was taken
    back.
    """
    code = f"""
        import cProfile
        from raypool import parpool

        with parpool(1, profile={profile!r}, quiet=True) as pool:
            pool.parfeval(pow, 2, 3).result()
            job = pool.parfeval(abs, -1)
            job.cancel()
        print(cProfile.Profile().runcall(lambda: sum(range(3))))
    """
    assert run_python(code).stdout == "3\n"
