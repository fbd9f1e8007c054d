"""The pool of `raypool.interop.multiprocessing`: what `multiprocessing.Pool` promises, on every
kind of pool.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import multiprocessing
import multiprocessing.pool
import operator
import os
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raypool import InvalidValueError, ParallelPool, SerializationError, current_task
from raypool.interop.multiprocessing import LOOK_AHEAD, AsyncResult, IMapIterator, Pool

pytestmark = pytest.mark.semantics


class Refused(Exception):
    """An exception of a user's."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Let nothing be freed but what nobody refers to."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def refuse(number: int) -> int:
    if number % 3 == 1:
        raise Refused(number)
    return number


# --- the verbs ------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_maps_do_as_the_built_in_map_does(mp: Pool) -> None:
    offset = 3
    numbers = range(50)
    expected = [number + offset for number in numbers]
    for chunksize in (None, 4):
        assert mp.map(lambda x: x + offset, numbers, chunksize) == expected
        assert mp.map(lambda x: x + offset, iter(numbers), chunksize) == expected
        assert mp.starmap(operator.mul, zip(numbers, expected, strict=True), chunksize) == [
            x * (x + 3) for x in numbers
        ]
        assert list(mp.imap(lambda x: x + offset, numbers, chunksize or 1)) == expected
        assert (
            sorted(mp.imap_unordered(lambda x: x + offset, iter(numbers), chunksize or 1))
            == expected
        )
    assert mp.map(refuse, []) == list(mp.imap(refuse, [])) == []


def test_calls_take_arguments_by_name_too(mp: Pool) -> None:
    assert mp.apply(divmod, (7, 2)) == (3, 1)
    assert mp.apply(dict, kwds={"self": 1, "func": 2, "callback": 3}) == {
        "self": 1,
        "func": 2,
        "callback": 3,
    }
    assert mp.apply_async(dict, [[(1, 2)]], {"a": 3}).get(300) == {1: 2, "a": 3}


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_errors_are_raised_as_themselves(mp: Pool, make_pool: Any) -> None:
    with pytest.raises(Refused) as single:
        mp.apply(refuse, (1,))
    with pytest.raises(Refused) as first:
        mp.map(refuse, range(10), 1)
    assert first.value.args == (1,), "the first in the order of the items"
    assert "refuse" in first.value.__notes__[0]
    for caught in (single, first):
        if make_pool.is_in_processes:
            assert type(caught.value.__cause__) is multiprocessing.pool.RemoteTraceback
            assert "raise Refused(number)" in str(caught.value.__cause__)
        else:
            assert caught.value.__cause__ is None


def test_a_failed_item_keeps_only_its_chunk_from_going_on(mp: Pool, marks: Any) -> None:
    def note(number: int) -> None:
        marks.add(number)
        refuse(number)

    with pytest.raises(Refused):
        mp.map(note, range(9), 3)
    assert marks.all() == ["0", "1", "3", "4", "6", "7"]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_iterators_go_on_after_an_error(mp: Pool, verb: str) -> None:
    results, outcomes = getattr(mp, verb)(refuse, iter(range(6))), []
    while True:
        try:
            outcomes.append(next(results))
        except Refused as error:
            outcomes.append(-error.args[0])
        except StopIteration:
            break
    assert sorted(outcomes) == [-4, -1, 0, 2, 3, 5]
    assert verb != "imap" or outcomes == [0, -1, 2, 3, -4, 5]
    with pytest.raises(StopIteration):
        next(results)


@pytest.mark.parametrize("chunksize", [3])
def test_what_the_iterable_raises_comes_after_what_it_gave(mp: Pool, chunksize: int) -> None:
    def broken() -> Iterator[int]:
        yield from range(6)
        raise Refused("no more")

    results = mp.imap(abs, broken(), chunksize)
    assert list(itertools.islice(results, 6)) == list(range(6))
    with pytest.raises(Refused, match="no more"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    for verb in (mp.map, mp.map_async, mp.starmap):
        with pytest.raises(Refused, match="no more"):
            verb(abs, broken())


def test_a_stop_iteration_of_a_call_does_not_end_the_loop(mp: Pool) -> None:
    results = mp.imap(next, [iter("a"), iter(""), iter("b")])
    assert next(results) == "a"
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(results)
    assert list(results) == ["b"]


def test_a_cancelled_error_of_a_function_is_raised_as_it_is(mp: Pool) -> None:
    def wait() -> None:
        raise concurrent.futures.CancelledError("by the function")

    with pytest.raises(concurrent.futures.CancelledError, match="by the function"):
        mp.apply(wait)


@pytest.mark.processes
def test_a_value_that_cannot_be_sent_back(mp: Pool) -> None:
    heard: list[Any] = []
    with pytest.raises(multiprocessing.pool.MaybeEncodingError, match="lock"):
        mp.apply_async(threading.Lock, error_callback=heard.append).get(300)
    assert type(heard[0]) is multiprocessing.pool.MaybeEncodingError
    assert isinstance(heard[0].__cause__, SerializationError)
    assert mp.apply(threading.active_count) > 0


def _send(verb: str, mp: Pool, fn: Callable[..., Any], item: Any) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "apply": lambda: mp.apply(fn, (item,)),
        "apply_async": lambda: mp.apply_async(fn, (item,)),
        "map": lambda: mp.map(fn, [1, item]),
        "map_async": lambda: mp.map_async(fn, [1, item], 1),
        "starmap": lambda: mp.starmap(fn, [(1,), (item,)]),
        "starmap_async": lambda: mp.starmap_async(fn, [(1,), (item,)]),
        "imap": lambda: mp.imap(fn, [item]),
        "imap_unordered": lambda: mp.imap_unordered(fn, [item], 2),
    }
    return calls[verb]()


def _send_and_take(verb: str, mp: Pool, item: Any) -> None:
    results = _send(verb, mp, print, item)
    next(results)  # an iterator is drawn from by and by


VERBS = [
    "apply",
    "apply_async",
    "map",
    "map_async",
    "starmap",
    "starmap_async",
    "imap",
    "imap_unordered",
]


@pytest.mark.processes
def test_what_cannot_be_sent_fails_at_the_call(
    mp: Pool, check_pool: Any, pool: ParallelPool
) -> None:
    guard = threading.Lock()

    def guarded(x: object) -> None:
        with guard:
            print(x)

    for verb in VERBS:
        with pytest.raises(SerializationError, match="'guard'") as caught:
            _send(verb, mp, guarded, 1)
        assert isinstance(caught.value, (TypeError, pickle.PicklingError)), "as the standard pool's"
        with pytest.raises(SerializationError, match="lock"):
            _send_and_take(verb, mp, {"guard": guard})
    check_pool(pool)


@pytest.mark.arguments
def test_what_cannot_be_called_fails_at_the_call(mp: Pool) -> None:
    for verb in VERBS:
        with pytest.raises(TypeError, match="not callable"):
            _send(verb, mp, 3, 1)  # type: ignore[arg-type]


# --- results that are not there yet ---------------------------------------------------------------


@pytest.mark.threads
def test_a_result_that_is_not_there_yet(mp: Pool, gate: Any) -> None:
    result = mp.apply_async(gate.wait)
    assert not result.ready()
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(0.01)
    result.wait(0.01)
    gate.open()
    result.wait(300)
    assert result.ready()
    assert result.successful()
    assert result.get(0) is None

    failed = mp.map_async(refuse, range(3))
    failed.wait(300)
    assert not failed.successful()


@pytest.mark.semantics
@pytest.mark.threads
def test_callbacks_are_called_one_after_the_other_before_anybody_wakes(mp: Pool) -> None:
    heard: list[Any] = []
    threads: set[int] = set()

    def hear(value: Any) -> None:
        threads.add(threading.get_ident())
        heard.append(value)

    results = [
        mp.apply_async(abs, (-number,), callback=hear, error_callback=heard.clear)
        for number in range(20)
    ]
    for result in results:
        result.wait(300)
    assert sorted(heard) == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    for submit, expected in [
        (lambda: mp.map_async(abs, [-1, -2], callback=hear), [1, 2]),
        (lambda: mp.starmap_async(pow, [(2, 3)], callback=hear), [8]),
        (lambda: mp.map_async(abs, [], callback=hear), []),
    ]:
        submit().wait(300)
        assert heard[-1] == expected
    mp.starmap_async(refuse, [(1,)], callback=heard.clear, error_callback=hear).wait(300)
    assert type(heard[-1]) is Refused


@pytest.mark.semantics
@pytest.mark.threads
def test_what_a_callback_raises_harms_nothing(mp: Pool, caplog: pytest.LogCaptureFixture) -> None:
    for error in (Refused, SystemExit, KeyboardInterrupt):

        def fail(_: Any, error: type[BaseException] = error) -> None:
            raise error("of a callback")

        assert mp.apply_async(abs, (-1,), callback=fail).get(300) == 1
        assert "of a callback" in caplog.text
        caplog.clear()
        with pytest.raises(Refused):
            mp.apply_async(refuse, (1,), error_callback=fail).get(300)
        assert mp.map(abs, [-1]) == [1]


def test_a_callback_may_hand_in_more(mp: Pool) -> None:
    more: queue.SimpleQueue[Any] = queue.SimpleQueue()
    mp.apply_async(abs, (-1,), callback=lambda value: more.put(mp.map_async(abs, [-value - 1])))
    assert more.get(timeout=300).get(300) == [2]


@pytest.mark.semantics
@pytest.mark.threads
def test_a_callback_cannot_wait_for_its_own_pool(
    mp: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    mp.apply_async(abs, (-1,), callback=lambda _: mp.map(abs, [-1])).wait(300)
    assert "would wait for itself" in caplog.text
    assert mp.map(abs, [-1]) == [1]


@pytest.mark.threads
@pytest.mark.quick
def test_the_callback_of_a_future_cannot_wait_for_it(mp: Pool, call_back: Any) -> None:
    def join(_: Any) -> None:
        mp.close()
        mp.join()

    for wait in (lambda _: mp.map(abs, [-1]), lambda _: next(mp.imap(abs, [-1])), join):
        error = call_back(wait)
        assert type(error) is InvalidValueError
        assert "would wait for itself" in str(error)


def test_a_callback_may_look_whether_something_is_there(
    mp: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def look(_: int) -> None:
        other = mp.apply_async(abs, (-2,))
        other.wait(0)
        seen.put(other.ready())
        with pytest.raises(multiprocessing.TimeoutError):
            other.get(-1)
        seen.put(other)

    mp.apply_async(abs, (-1,), callback=look).wait(300)
    assert not caplog.text
    assert seen.get_nowait() is False, "its callbacks come after this one"
    assert seen.get_nowait().get(300) == 2


@pytest.mark.semantics
@pytest.mark.threads
def test_arguments_and_results_are_not_kept(mp: Pool, eventually: Any) -> None:
    class Thing:
        pass

    things = [Thing() for _ in range(4)]
    seen = [weakref.ref(thing) for thing in things]
    assert len(mp.map(lambda thing: thing, things)) == 4
    assert len(list(mp.imap(lambda thing: thing, things))) == 4
    del things
    assert eventually(lambda: gc.collect() >= 0 and not any(ref() for ref in seen))


@pytest.mark.semantics
@pytest.mark.threads
def test_what_an_iterable_has_raised_is_not_kept(mp: Pool, eventually: Any) -> None:
    def refusing() -> Iterator[int]:
        yield 1
        raise Refused

    with without_collection():
        results = mp.imap(abs, refusing())
        assert next(results) == 1
        with pytest.raises(Refused) as caught:
            next(results)
        seen = weakref.ref(caught.value)
        del caught
        assert eventually(lambda: seen() is None)


# --- iterators ------------------------------------------------------------------------------------


def test_a_generator_without_end_is_drawn_as_it_is_used(mp: Pool, pool: ParallelPool) -> None:
    for verb, chunksize in (("imap", 5), ("imap_unordered", 1)):
        drawn = itertools.count()
        results = getattr(mp, verb)(abs, drawn, chunksize)
        assert sorted(itertools.islice(results, 20)) == list(range(20)) or verb == "imap_unordered"
        most_ahead = pool.num_workers * max(LOOK_AHEAD, 2 * chunksize)
        assert next(drawn) <= 20 + most_ahead + chunksize


@pytest.mark.parametrize("buffersize", [1, 3])
def test_so_many_are_drawn_ahead_as_is_wanted(mp: Pool, buffersize: int, eventually: Any) -> None:
    drawn: list[int] = []
    results = mp.imap(
        abs, (drawn.append(number) or number for number in range(100)), buffersize=buffersize
    )
    assert eventually(lambda: len(drawn) == buffersize)
    assert next(results) == 0
    assert eventually(lambda: len(drawn) == buffersize + 1)
    assert list(results) == list(range(1, 100))


def test_a_list_is_done_to_its_end_whether_or_not_anybody_looks(mp: Pool, marks: Any) -> None:
    mp.imap_unordered(marks.add, list(range(100)))
    mp.close()
    mp.join()
    assert len(marks.all()) == 100


def test_join_waits_for_what_a_generator_has_left(mp: Pool) -> None:
    results = mp.imap(abs, iter(range(300)))
    mp.close()
    mp.join()
    assert list(results) == list(range(300))


def test_a_generator_may_wait_for_results(mp: Pool) -> None:
    may_go = threading.Semaphore(2)

    def slowly() -> Iterator[int]:
        for number in range(10):
            assert may_go.acquire(timeout=300)
            yield number

    for position, number in enumerate(mp.imap(abs, slowly())):
        assert position == number
        may_go.release()


@pytest.mark.threads
def test_next_waits_so_long(mp: Pool, gate: Any) -> None:
    def late(number: int) -> int:
        if number == 1:
            gate.wait()
        return number

    results = mp.imap(late, range(3))
    assert results.next(300) == 0
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(0.01)
    unordered = mp.imap_unordered(late, range(3))
    assert {unordered.next(300), unordered.next(300)} == {0, 2}
    gate.open()
    assert [results.next(300), results.next(timeout=300), unordered.next(300)] == [1, 2, 1]
    with pytest.raises(StopIteration):
        results.next(300)


# --- its end --------------------------------------------------------------------------------------


def test_after_its_end(mp: Pool, pool: ParallelPool, check_pool: Any) -> None:
    with pytest.raises(ValueError, match="still running"):
        mp.join()
    result = mp.map_async(abs, [-1])
    mp.close()
    mp.close()
    for verb in VERBS:
        with pytest.raises(ValueError, match="not running"):
            _send(verb, mp, abs, 1)
    with pytest.raises(ValueError, match="not running"), mp:
        pass
    mp.join()
    assert result.get(0) == [1]
    check_pool(pool)


@pytest.mark.concurrent
def test_terminate_cancels_what_runs(
    mp: Pool, pool: ParallelPool, gate: Any, eventually: Any, check_pool: Any
) -> None:
    other = pool.parfeval(abs, -1)
    running = mp.apply_async(gate.wait)
    queued = mp.map_async(lambda _: gate.wait(), range(20), 1)
    endless = mp.imap(lambda _: gate.wait(), itertools.count())
    assert eventually(lambda: len(pool.queue.running) == pool.num_workers)

    mp.terminate()
    mp.terminate()
    mp.join()

    for get in (running.get, queued.get, endless.next):
        with pytest.raises(concurrent.futures.CancelledError):
            get(300)
    assert other.result(300) == 1, "what others have handed in goes on"
    check_pool(pool)


def test_an_iterable_that_never_answers_does_not_hold_up_the_end(mp: Pool) -> None:
    silence: queue.SimpleQueue[int] = queue.SimpleQueue()
    silence.put(-1)
    results = mp.imap(abs, iter(silence.get, None))
    assert next(results) == 1
    mp.terminate()
    mp.join()
    with pytest.raises(concurrent.futures.CancelledError):
        next(results)
    silence.put(-2)  # the thread that waits for it can end


def test_leaving_the_block_terminates(pool: ParallelPool) -> None:
    with Pool(pool=pool) as mp:
        assert mp.map(abs, [-1]) == [1]
    with pytest.raises(ValueError, match="not running"):
        mp.map(abs, [-1])
    mp.join()
    assert not pool.is_closed


@pytest.mark.arguments
def test_it_stays_where_it_is(mp: Pool) -> None:
    with pytest.raises(NotImplementedError, match="cannot be passed between processes or pickled"):
        pickle.dumps(mp)
    assert repr(mp) == "<raypool.interop.multiprocessing.Pool state=RUN pool_size=3>"


@pytest.mark.semantics
@pytest.mark.processes
def test_a_pool_within_a_task_is_serial(mp: Pool) -> None:
    def inner(number: int) -> list[int]:
        with Pool(4) as inside:
            return inside.map(lambda x: x * number, range(3))

    assert mp.map(inner, [1, 2]) == [[0, 1, 2], [0, 2, 4]]


# --- what it is made with -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"processes": 0}, ValueError, "processes must be at least 1, not 0"),
        ({"processes": "2"}, TypeError, "processes must be an integer, not '2'"),
        ({"initializer": 3}, TypeError, "initializer=3"),
        (
            {"maxtasksperchild": 0},
            ValueError,
            "maxtasksperchild must be an integer of at least 1 or None, not 0",
        ),
        (
            {"maxtasksperchild": 2.5},
            ValueError,
            "maxtasksperchild must be an integer of at least 1 or None, not 2.5",
        ),
        ({"pool": 4}, TypeError, "pool must be a pool, .* not 4"),
        ({"context": "spawn"}, TypeError, "context='spawn' is not a multiprocessing context"),
        ({"workers": 3, "profile": "threads"}, TypeError, "workers"),
    ],
)
def test_arguments_that_cannot_work(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Pool(**arguments)


@pytest.mark.arguments
def test_it_takes_the_arguments_of_the_standard_pool(pool: ParallelPool) -> None:
    for context in (None, multiprocessing.get_context(), multiprocessing.get_context("spawn")):
        with Pool(None, None, (), None, context, pool=pool) as mp:
            assert mp.map(abs, [-1]) == [1]


@pytest.mark.arguments
def test_results_have_no_other_methods_than_the_standard_ones(mp: Pool) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AsyncResult) == public(multiprocessing.pool.AsyncResult)
    assert public(IMapIterator) == public(multiprocessing.pool.IMapIterator)


@pytest.mark.arguments
def test_a_pool_that_is_there_has_its_workers(pool: ParallelPool) -> None:
    for arguments in ({"processes": 2}, {"profile": "threads"}, {"gpus": [0]}):
        with pytest.raises(ValueError, match="pool= already has workers"):
            Pool(pool=pool, **arguments)


@pytest.mark.arguments
def test_chunks_have_items(mp: Pool) -> None:
    for verb in ("map", "starmap", "imap", "imap_unordered"):
        for chunksize in (0, -1):
            with pytest.raises(ValueError, match="chunksize"):
                getattr(mp, verb)(abs, [1], chunksize)
    with pytest.raises(ValueError, match="buffersize"):
        mp.imap(abs, [1], buffersize=0)


def test_a_view_with_options_will_do(pool: ParallelPool) -> None:
    with Pool(pool=pool.options(name="mine")) as mp:
        assert mp.apply(lambda: current_task().name) == "mine"
        with pytest.raises(Refused) as caught:
            mp.apply(refuse, (1,))
        assert "mine" in caught.value.__notes__[0]


@pytest.mark.processes
def test_a_worker_that_dies_is_replaced_and_its_items_run_again(mp: Pool, marks: Any) -> None:
    def work(number: int) -> int:
        if number == 5 and not marks.count("died"):
            marks.add("died")
            os._exit(1)
        return number

    assert mp.map(work, range(10), 2) == list(range(10))


def test_what_takes_a_pool_takes_this_one(mp: Pool) -> None:
    emcee = pytest.importorskip("emcee")
    first = np.random.default_rng(1).normal(size=(8, 2))

    def chain(pool: Any) -> Any:
        sampler = emcee.EnsembleSampler(8, 2, lambda x: -0.5 * float(x @ x), pool=pool)
        sampler.random_state = np.random.RandomState(3).get_state()
        sampler.run_mcmc(first, 5)
        return sampler.get_chain()

    assert np.array_equal(chain(mp), chain(None))
