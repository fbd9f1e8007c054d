"""`pool.map` is the standard one, that of Python 3.14, on every kind of pool."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import ParallelPool, PoolClosedError, SerializationError, current_task
from raypool.interop import multiprocessing

pytestmark = pytest.mark.semantics


@pytest.mark.everywhere
def test_iterables_are_taken_together_and_the_shortest_counts(pool: ParallelPool) -> None:
    assert list(pool.map(pow, range(10), itertools.repeat(2))) == [
        number**2 for number in range(10)
    ]
    assert list(pool.map(max, [1, 2, 3], [3, 1], (0, 9, 9))) == [3, 9]
    assert list(pool.map(abs)) == []
    assert list(pool.options(retries=0, name="squares").map(pow, [2, 3], [2, 2], chunksize=7)) == [
        4,
        9,
    ]


@pytest.mark.everywhere
def test_it_goes_on_after_an_error(pool: ParallelPool) -> None:
    """As the built-in `map` does."""
    results = pool.map(divmod, [5, 5, 5, 5], [2, 0, 3, 0], chunksize=3)

    assert next(results) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert next(results) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        next(results)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(results)


def test_a_call_that_raises_stop_iteration_does_not_end_the_loop_in_silence(
    pool: ParallelPool,
) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(pool.map(next, [iter([1]), iter([])]))


def test_a_timeout_of_the_calls_own_is_an_error_like_any_other(pool: ParallelPool) -> None:
    def late(number: int) -> int:
        if number == 1:
            raise TimeoutError("the camera does not answer")
        return number

    results = pool.map(late, range(3), timeout=300)
    assert next(results) == 0
    with pytest.raises(TimeoutError, match="camera"):
        next(results)
    assert list(results) == [2]


@pytest.mark.concurrent
def test_when_the_time_is_up_what_is_left_is_cancelled(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    results = pool.map(lambda number: number or gate.wait(), [1, 0, 0, 0, 0], timeout=0.5)

    assert eventually(lambda: len([*pool.queue.running, *pool.queue.queued]) == 4)
    assert next(results) == 1, "what is there needs no time"
    with pytest.raises(TimeoutError, match=r"0\.5 s after its call"):
        next(results)
    assert list(results) == []
    assert eventually(lambda: not pool.busy), "what ran is stopped"


# --- as much as is asked for ----------------------------------------------------------------------


def test_with_a_buffer_the_results_are_the_same(pool: ParallelPool) -> None:
    for buffersize in (1, 2, 4, 8):
        assert list(pool.map(pow, range(4), [2] * 4, buffersize=buffersize)) == [0, 1, 4, 9]
        assert list(pool.map(abs, [], buffersize=buffersize)) == []


@pytest.mark.everywhere
def test_endless_iterables_are_drawn_as_far_as_the_buffer_goes(pool: ParallelPool) -> None:
    numbers = itertools.count()
    results = pool.map(max, numbers, itertools.count(), buffersize=3)
    assert next(numbers) == 3
    assert list(itertools.islice(results, 5)) == [0, 1, 2, 4, 5]
    results.close()
    assert next(numbers) <= 10


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("sizes", "kind", "words"),
    [
        ({"chunksize": 0}, ValueError, "chunksize must be >= 1"),
        ({"chunksize": "two"}, TypeError, "chunksize must be an integer"),
        ({"buffersize": 0}, ValueError, "buffersize must be None or > 0"),
        ({"buffersize": -1}, ValueError, "buffersize must be None or > 0"),
        ({"buffersize": 2.0}, TypeError, "buffersize must be an integer or None"),
    ],
)
def test_sizes_that_cannot_work(
    pool: ParallelPool, sizes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        pool.map(abs, [1], **sizes)


def failing(*values: int) -> Iterator[int]:
    yield from values
    raise LookupError("the file ends in the midst of a row")


@pytest.mark.concurrent
def test_an_iterable_that_fails_at_once_leaves_no_call_behind(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    with pytest.raises(LookupError):
        pool.map(lambda _: gate.wait(), failing(1, 2))
    assert eventually(lambda: not pool.busy), "what ran is stopped"


def test_an_iterable_that_is_interrupted_leaves_no_gap(pool: ParallelPool) -> None:
    """Ctrl-C may come after arguments were drawn and before they were handed in: whoever goes on
    must not miss one unawares.
    """

    def interrupted() -> Iterator[int]:
        yield -1
        raise KeyboardInterrupt

    results = pool.map(abs, interrupted(), buffersize=1)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("end", ["close", "all"])
def test_iterables_are_let_go_when_nothing_more_is_drawn(pool: ParallelPool, end: str) -> None:
    is_open = True

    def lines() -> Iterator[int]:
        nonlocal is_open
        try:
            yield from itertools.count()
        finally:
            is_open = False

    results = pool.map(max, lines(), [5, 6, 7], buffersize=2)
    assert next(results) == 5
    assert is_open
    if end == "close":
        results.close()
    assert list(results) == ([] if end == "close" else [6, 7])
    assert not is_open


def test_an_iterable_that_fails_later_gives_what_came_before(pool: ParallelPool) -> None:
    results = pool.map(abs, failing(-1, -2, -3), buffersize=2)
    assert list(itertools.islice(results, 3)) == [1, 2, 3]
    with pytest.raises(LookupError, match="in the midst"):
        next(results)
    assert list(results) == []


@pytest.mark.processes  # in one process nothing is pickled
def test_what_cannot_be_sent_is_named(pool: ParallelPool) -> None:
    lock = threading.Lock()
    for buffersize in (None, 2):
        with pytest.raises(SerializationError, match="lock"):
            pool.map(lambda number: (number, lock), range(3), buffersize=buffersize)
        with pytest.raises(SerializationError, match="argument 0 of abs"):
            list(pool.map(abs, [1, lock, 3], buffersize=buffersize))


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.concurrent
@pytest.mark.parametrize("end", ["close", "drop"])
def test_what_nobody_wants_any_more_is_cancelled(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any, end: str
) -> None:
    def work(number: int) -> int:
        marks.add(number)
        if number:
            gate.wait()
        return number

    results = pool.map(work, range(20))
    assert next(results) == 0
    if end == "close":
        results.close()
        assert list(results) == []
    del results
    assert eventually(lambda: not pool.busy)
    assert marks.count("19") == 0


def _leave_a_map(pool: ParallelPool, work: Callable[[int], None]) -> Callable[[], object]:
    return pool.map(work, range(9)).close


def _cancel_all(pool: ParallelPool, work: Callable[[int], None]) -> Callable[[], object]:
    for number in range(9):
        pool.parfeval(work, number)
    return pool.cancel_all


def _terminate(pool: ParallelPool, work: Callable[[int], None]) -> Callable[[], object]:
    mp = multiprocessing.Pool(pool=pool)
    for number in range(9):
        mp.apply_async(work, (number,))
    return mp.terminate


@pytest.mark.concurrent
@pytest.mark.parametrize("begin", [_leave_a_map, _cancel_all, _terminate])
def test_nothing_begins_while_all_is_cancelled(
    pool: ParallelPool,
    gate: Any,
    marks: Any,
    eventually: Any,
    begin: Callable[..., Callable[[], object]],
) -> None:
    """However long each cancellation takes: what runs is cancelled last, as its worker takes what
    waits then.
    """

    def work(number: int) -> None:
        marks.add(number)
        gate.wait()

    end = begin(pool, work)
    assert eventually(lambda: len(marks.all()) == 3)
    pool.queue.queued[0].add_done_callback(lambda _: eventually(lambda: len(marks.all()) > 3, 0.5))
    end()
    assert eventually(lambda: not pool.busy)
    assert len(marks.all()) == 3


@pytest.mark.concurrent
def test_an_error_that_ends_the_loop_over_the_results_cancels_what_is_left(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    """Also while somebody holds the error, and with its traceback all frames that it came
    through.
    """

    def work(number: int) -> int:
        return 1 // number if number < 2 else gate.wait()

    with pytest.raises(ZeroDivisionError) as caught:
        list(pool.map(work, [1, 0, 2, 2, 2, 2]))
    assert eventually(lambda: not pool.busy)
    with pytest.raises(ZeroDivisionError) as again:
        for _ in pool.map(work, [1, 0, 2, 2, 2, 2]):
            pass
    assert eventually(lambda: not pool.busy)
    assert caught.value is not again.value


@pytest.mark.semantics
@pytest.mark.threads
def test_calls_whose_results_nobody_asks_for_run(make_pool: Any, marks: Any) -> None:
    pool = make_pool(2)
    pool.map(marks.add, range(10))
    pool.shutdown()
    assert len(marks.all()) == 10


@pytest.mark.semantics
@pytest.mark.concurrent
def test_results_outlive_the_pool(make_pool: Any) -> None:
    """Of what is drawn by and by those that are in the buffer."""
    with make_pool(2) as pool:
        everything = pool.map(abs, range(-5, 5))
        results = pool.map(abs, range(-5, 5), buffersize=3)
        assert next(results) == 5
    assert list(everything) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]
    assert list(itertools.islice(results, 3)) == [4, 3, 2]
    with pytest.raises(PoolClosedError):
        next(results)
    assert list(results) == []


@pytest.mark.semantics
@pytest.mark.threads
def test_a_forgotten_pool_lives_until_the_last_call_is_handed_in(make_pool: Any) -> None:
    assert list(make_pool(1).map(abs, range(-3, 3), buffersize=1)) == [3, 2, 1, 0, 1, 2]


@pytest.mark.semantics
@pytest.mark.processes
def test_in_a_task_it_runs_serially(pool: ParallelPool) -> None:
    def fn(number: int) -> list[int]:
        return list(pool.map(pow, range(number), [2] * number, buffersize=2))

    assert list(pool.map(fn, [0, 3])) == [[], [0, 1, 4]]


def test_a_part_of_a_pool_maps_on_its_own_workers(pool: ParallelPool) -> None:
    part, _ = pool.partition(workers=[1])
    assert set(part.map(lambda _: current_task().worker, range(6))) == {1}


def test_checkpoints_of_each_call_are_kept(pool: ParallelPool, tmp_path: Any) -> None:
    def count(_: str) -> int:
        path = current_task().checkpoint_dir / "count"
        number = int(path.read_text()) + 1 if path.exists() else 1
        path.write_text(str(number))
        return number

    keeping: Callable[..., Any] = pool.options(checkpoints=tmp_path).map
    assert list(keeping(count, ["a", "b"])) == [1, 1]
    assert list(keeping(count, ["b", "c"])) == [2, 1]
