"""The pool of `raypool.interop.multiprocessing`: what is still open when it, or a result of it, is
left.
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import InvalidValueError, ParallelPool
from raypool.interop.multiprocessing import LOOK_AHEAD, CallGroup, Collector, Pool

pytestmark = pytest.mark.threads


class Refused(Exception):
    """An exception of a user's."""


# --- work that is handed in while it ends ---------------------------------------------------------


@pytest.mark.parametrize(("end", "is_lent"), [(Pool.close, False), (Pool.terminate, True)])
def test_one_that_ends_while_an_iterable_is_drawn_takes_nothing(
    pool: ParallelPool, end: Callable[[Pool], None], is_lent: bool, check_pool: Any
) -> None:
    mp = Pool(pool=pool) if is_lent else Pool(1, profile="threads")

    def items() -> Iterator[int]:
        yield -1
        end(mp)
        mp.join()
        yield -2

    with pytest.raises(ValueError, match="not running"):
        mp.map_async(abs, items())
    check_pool(pool)


def test_a_call_that_comes_in_as_the_last_thread_leaves_is_cancelled(
    pool: ParallelPool, gate: Any, check_pool: Any
) -> None:
    collector = Collector(pool._engine.driver)
    collector.close(lambda: None)
    future = pool.parfeval(gate.wait)
    with pytest.raises(ValueError, match="not running"):
        CallGroup(pool, collector, [future], lambda values: values, None, None)
    assert future.cancelled() or future.done()
    check_pool(pool)


# --- iterators that nobody holds any more ---------------------------------------------------------


def raypool_threads() -> set[threading.Thread]:
    """Return the threads of all pools."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("raypool-")}


def drawing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "raypool-imap"]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_nothing_is_drawn_for_a_loop_that_was_left(mp: Pool, eventually: Any, verb: str) -> None:
    drawn: list[int] = []
    endless = (drawn.append(number) or number for number in itertools.count())  # type: ignore[func-returns-value]
    for _ in getattr(mp, verb)(abs, endless):
        break
    assert eventually(lambda: not drawing_threads())
    so_many = len(drawn)
    mp.close()
    mp.join()
    assert len(drawn) == so_many


def test_join_ends_when_the_iterator_is_left_meanwhile(mp: Pool, eventually: Any) -> None:
    drawn: list[int] = []
    iterators = [mp.imap(abs, (drawn.append(number) or number for number in itertools.count()))]  # type: ignore[func-returns-value]
    next(iterators[0])
    mp.close()
    joining = threading.Thread(target=mp.join)
    joining.start()
    assert eventually(lambda: len(drawn) > 10 * LOOK_AHEAD), (
        "it draws for somebody who may still want it"
    )
    iterators.clear()
    joining.join(300)  # what was drawn has still to run
    assert not joining.is_alive()


@pytest.mark.parametrize("chunksize", [1, 3])
def test_what_is_done_for_its_effect_alone_is_done_to_its_end(
    mp: Pool, eventually: Any, chunksize: int
) -> None:
    done: list[int] = []
    mp.imap_unordered(done.append, iter(range(300)), chunksize)
    assert eventually(lambda: len(done) == 300), "also before anybody joins"
    mp.imap_unordered(done.append, iter(range(300)), chunksize)
    mp.close()
    mp.join()
    assert len(done) == 600


def test_a_list_is_done_to_its_end_when_the_loop_was_left(mp: Pool) -> None:
    done: list[int] = []
    for _ in mp.imap(done.append, list(range(300))):
        break
    mp.close()
    mp.join()
    assert len(done) == 300


def test_results_that_nobody_takes_are_not_kept(mp: Pool, gate: Any, eventually: Any) -> None:
    class Thing:
        pass

    seen: list[weakref.ref[Thing]] = []

    def make(number: int) -> Thing:
        thing = Thing()
        seen.append(weakref.ref(thing))
        return thing

    def numbers() -> Iterator[int]:
        yield from range(20)
        gate.wait()  # not in the last call: that would hold the answers of those that share it

    mp.imap(make, numbers())
    assert eventually(
        lambda: (
            len(seen) == 20 and gc.collect() >= 0 and sum(ref() is not None for ref in seen) <= 1
        )
    ), "but for one that the pool may have in its hand"


def test_a_pool_that_is_forgotten_with_its_iterator_ends(eventually: Any) -> None:
    before = raypool_threads()
    mp = Pool(1, profile="threads")
    results = mp.imap(abs, itertools.count())
    next(results)
    assert raypool_threads() - before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del results, mp
        assert eventually(lambda: gc.collect() >= 0 and not raypool_threads() - before)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunksize", [1, 2])
def test_the_error_of_an_iterable_is_freed_with_its_last_reference(
    mp: Pool, eventually: Any, chunksize: int
) -> None:
    def refusing() -> Iterator[int]:
        yield -1
        raise Refused

    results = mp.imap(abs, refusing(), chunksize)
    assert chunksize == 2 or next(results) == 1
    gc.disable()
    try:
        with pytest.raises(Refused) as caught:
            next(results)
        error = weakref.ref(caught.value)
        caught = None  # type: ignore[assignment]
        assert eventually(lambda: error() is None), "not by the next collection of garbage"
    finally:
        gc.enable()


def test_an_error_that_is_kept_keeps_no_iterator(mp: Pool, eventually: Any) -> None:
    def refuse(number: int) -> None:
        raise Refused(number)

    with pytest.raises(Refused) as kept:
        for _ in mp.imap(refuse, itertools.count()):
            pass
    assert eventually(lambda: not drawing_threads())
    assert kept.value.args == (0,)


# --- callbacks ------------------------------------------------------------------------------------


def test_a_callback_cannot_join_its_own_pool(mp: Pool) -> None:
    caught: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def join(_: int) -> None:
        mp.close()
        try:
            mp.join()
        except Exception as error:
            caught.put(error)

    mp.apply_async(abs, (-1,), callback=join)
    error = caught.get(timeout=300)
    assert isinstance(error, InvalidValueError)
    assert "would wait for itself" in str(error)
    mp.join()


def test_a_callback_may_terminate_its_own_pool(eventually: Any) -> None:
    before = raypool_threads()
    mp = Pool(1, profile="threads")
    mp.apply_async(abs, (-1,), callback=lambda _: mp.terminate())
    assert eventually(lambda: not raypool_threads() - before)
    mp.join()
