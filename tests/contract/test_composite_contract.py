"""What an spmd call returns: values that stay on their workers until they are read, passed back or
dropped.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raypool import (
    Composite,
    CompositeError,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    SerializationError,
    SpmdError,
    current_task,
)
from raypool.spmd import composite
from raypool.testing import sim_pool

pytestmark = pytest.mark.semantics

LARGE = 1_000_000
ON_TOP = 6_000
"""What a call costs besides its values, at most [bytes]."""


def make(context: Any) -> dict[str, Any]:
    return {"rank": context.rank, "calls": 0}


class Watched:
    """Something large that notes down when it is freed."""

    def __init__(self, marks: Any, name: str = "freed") -> None:
        self.marks, self.name, self.array = marks, name, np.ones(LARGE, np.uint8)
        self.itself: Watched | None = None

    def __del__(self) -> None:
        self.marks.add(self.name)


def bump(context: Any, part: dict[str, Any]) -> int:
    part["calls"] += 1
    return part["calls"]


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_each_rank_is_read_by_its_number(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    assert type(composite) is Composite
    assert len(composite) == 3
    assert composite.workers == tuple(worker.index for worker in pool.workers)
    assert composite[1] == {"rank": 1, "calls": 0}
    assert composite[-1] == composite[np.int64(2)] == {"rank": 2, "calls": 0}
    assert [part["rank"] for part in composite[1:]] == [1, 2]
    assert [part["rank"] for part in composite[::-1]] == [2, 1, 0]
    assert [part["rank"] for part in composite] == [0, 1, 2]
    assert [part["rank"] for part in reversed(composite)] == [2, 1, 0]
    assert composite[3:] == []


@pytest.mark.everywhere
def test_any_value_comes_back_equal(pool: ParallelPool) -> None:
    for value in (None, 3, 2.5, True, "text", b"bytes", (), [], {}, ["a", None]):
        composite = pool.spmd(lambda context, value=value: value)
        assert all(composite.exists(rank) for rank in range(3))
        assert list(composite) == [value] * 3


@pytest.mark.everywhere
def test_a_read_brings_what_the_part_is_now(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    before = [part["calls"] for part in composite]
    pool.spmd(bump, composite)
    assert before == [0, 0, 0]
    assert [part["calls"] for part in composite] == [1, 1, 1]


@pytest.mark.processes
def test_small_values_that_cannot_change_cost_nothing_to_read(pool: ParallelPool) -> None:
    composite = pool.spmd(lambda context: (None, context.rank, "x" * 500)[context.rank])
    with pool.transfer_bytes() as moved:
        assert list(composite) == [None, 1, "x" * 500]
    assert moved.total == (0, 0)


@pytest.mark.processes
def test_a_value_that_cannot_travel_says_so_when_it_is_read(pool: ParallelPool) -> None:
    composite = pool.spmd(lambda context: threading.Lock())
    assert "lock" in repr(composite)
    with pytest.raises(SerializationError, match="lock"):
        composite[0]
    assert (
        list(pool.spmd(lambda context, lock: lock.acquire(blocking=False), composite)) == [True] * 3
    )


def test_in_this_process_reading_gives_the_object_itself(pool: ParallelPool) -> None:
    torch = pytest.importorskip("torch")

    class OnGpu(torch.Tensor):
        """Claims to be there; in tests/gpu one is."""

        is_cuda = True

    for value in ({}, torch.ones(2).as_subclass(OnGpu)):
        assert pool.spmd(lambda context, value=value: value)[0] is value


@pytest.mark.arguments
def test_there_is_no_such_rank(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    uses = (
        composite.__getitem__,
        composite.exists,
        composite.__delitem__,
        lambda rank: composite.__setitem__(rank, 1),
    )
    for use in uses:
        for rank in (3, -4):
            with pytest.raises(
                CompositeError, match=f"no rank {rank}: this Composite has 3 ranks, 0 to 2"
            ) as caught:
                use(rank)
            assert caught.value.rank == rank
            assert isinstance(caught.value, IndexError)
        for other in ("0", 1.0, None, True, (0, 1)):
            with pytest.raises(InvalidTypeError, match="A rank is a number from 0 to"):
                use(other)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="A rank is a number from 0 to"):
        composite[:2] = [1, 2]


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_the_text_says_what_each_part_is_and_moves_nothing(pool: ParallelPool) -> None:
    def mixed(context: Any) -> Any:
        return [np.zeros((3, 4)), {"a": 1}, None][context.rank]

    composite = pool.spmd(mixed)
    del composite[1]
    with pool.transfer_bytes() as moved:
        text = repr(composite)
    assert text == "<Composite of 3 ranks>\n  0: ndarray (3, 4) float64\n  1: missing\n  2: None"
    assert moved.total == (0, 0)


def test_tensors_and_models_are_named_with_their_size(pool: ParallelPool) -> None:
    torch = pytest.importorskip("torch")

    def build(context: Any) -> Any:
        return torch.nn.Linear(4, 4) if context.rank else torch.zeros(3, 4)

    lines = repr(pool.spmd(build, workers=2)).splitlines()
    assert lines == [
        "<Composite of 2 ranks>",
        "  0: Tensor (3, 4) float32",
        "  1: Linear, 20 parameters",
    ]


def test_of_many_ranks_the_first_have_a_line() -> None:
    with sim_pool(18) as pool:
        lines = repr(pool.spmd(lambda context: context.rank)).splitlines()
    assert lines[:2] == ["<Composite of 18 ranks>", "  0: int"]
    assert lines[-2:] == ["  15: int", "  ... and 2 more"]
    assert len(lines) == 18


# --- passing back ---------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_each_rank_gets_its_very_own_part_back(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    assert list(pool.spmd(lambda context, part: part["rank"], composite)) == [0, 1, 2]
    identities = [list(pool.spmd(lambda context, part: id(part), composite)) for _ in range(2)]
    assert identities[0] == identities[1]
    assert list(pool.spmd(lambda context, a, b: a is b, composite, composite)) == [True] * 3


@pytest.mark.everywhere
def test_a_model_that_was_loaded_once_serves_many_calls(pool: ParallelPool, marks: Any) -> None:
    def load(context: Any) -> dict[str, Any]:
        marks.add("loaded")
        return make(context)

    models = pool.spmd(load)
    for _ in range(10):
        counts = pool.spmd(bump, models)
    assert list(counts) == [10] * 3
    assert marks.count("loaded") == 3
    assert models[1] == {"rank": 1, "calls": 10}


@pytest.mark.everywhere
def test_a_call_with_a_composite_runs_on_its_workers(pool: ParallelPool) -> None:
    composite = pool.spmd(make, workers=[1, 2])
    again = pool.spmd(lambda context, part: [part["rank"], current_task().worker], composite)
    assert again.workers == (1, 2)
    assert list(again) == [[0, 1], [1, 2]]
    assert list(pool.spmd(bump, composite, workers=[1, 2])) == [1, 1]
    assert list(pool.spmd(bump, composite, workers=[1])) == [2], "of two ranks the first"


@pytest.mark.processes
def test_reading_moves_a_value_and_passing_it_back_does_not(pool: ParallelPool) -> None:
    with pool.transfer_bytes() as moved:
        composite = pool.spmd(lambda context: np.full(LARGE, context.rank, np.uint8))
    assert moved.total.received_bytes <= 3 * ON_TOP
    with pool.transfer_bytes() as moved:
        pool.spmd(lambda context, part: None, composite)
    assert moved.total.sent_bytes <= 3 * ON_TOP
    assert moved.total.received_bytes <= 3 * ON_TOP
    with pool.transfer_bytes() as moved:
        assert composite[2].tolist() == [2] * LARGE
    assert LARGE <= moved.to_frame().loc[2, "received_bytes"] <= LARGE + ON_TOP
    others = moved.to_frame().loc[[0, 1]]
    assert others.to_numpy().max() <= ON_TOP, (
        "no value, at most the word that a Composite of before may go"
    )


@pytest.mark.arguments
def test_on_other_workers_it_is_an_error_before_anything_starts(
    pool: ParallelPool, make_pool: Any, marks: Any
) -> None:
    composite = pool.spmd(make, workers=[0, 1])
    note = lambda context, part: marks.add(context.rank)  # noqa: E731
    with pytest.raises(
        InvalidValueError,
        match=r"ranks are on workers 0, 1; this call runs on 1, 2. Pass workers=\[0, 1\]",
    ):
        pool.spmd(note, composite, workers=[1, 2])
    with pytest.raises(InvalidValueError, match="on workers 0, 1; this call runs on 1, 0"):
        pool.spmd(note, composite, workers=[1, 0])
    with pytest.raises(InvalidValueError, match="on workers 0, 1; this call runs on 0, 1, 2"):
        pool.spmd(note, composite, workers=[0, 1, 2])
    with pytest.raises(InvalidValueError, match="on workers 1; this call runs on 0, 1"):
        pool.spmd(lambda context, a, b: marks.add("two"), composite, pool.spmd(make, workers=[1]))
    with make_pool(2) as other, pytest.raises(InvalidValueError, match="another pool"):
        other.spmd(note, composite)
    assert marks.all() == []


def test_a_missing_part_is_an_error_before_anything_starts(pool: ParallelPool, marks: Any) -> None:
    composite = pool.spmd(make)
    del composite[1]
    for workers in (None, [0, 1, 2]):
        with pytest.raises(CompositeError, match="rank 1 is missing") as caught:
            pool.spmd(lambda context, part: marks.add(context.rank), composite, workers=workers)
        assert caught.value.rank == 1
    assert marks.all() == []


# --- one part -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_value_is_sent_to_one_rank(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    composite[1] = {"calls": 10}
    composite[-1] = {"calls": 20}
    assert repr(composite).splitlines()[2] == "  1: dict of 1"
    assert list(pool.spmd(bump, composite)) == [1, 11, 21]
    assert composite[1] == {"calls": 11}
    composite[0] = None
    assert composite[0] is None
    assert composite.exists(0)


@pytest.mark.everywhere
def test_a_part_that_was_deleted_is_missing_until_it_is_assigned(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    del composite[1]
    assert [composite.exists(rank) for rank in range(3)] == [True, False, True]
    for use in (
        lambda: composite[1],
        lambda: list(composite),
        lambda: composite[:2],
        lambda: composite.__delitem__(1),
    ):
        with pytest.raises(CompositeError, match=r"rank 1 is missing.*Assign c\[1\]") as caught:
            use()
        assert caught.value.rank == 1
    assert composite[0]["rank"] == 0
    composite[1] = {"rank": 1, "calls": 5}
    assert list(pool.spmd(bump, composite)) == [1, 6, 1]


@pytest.mark.processes
def test_what_cannot_be_sent_changes_nothing(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    with pytest.raises(SerializationError):
        composite[0] = threading.Lock()
    assert composite[0] == {"rank": 0, "calls": 0}


# --- freeing --------------------------------------------------------------------------------------


@pytest.fixture
def without_collector(pool: ParallelPool) -> Iterator[None]:
    """Keep Python from collecting garbage by itself, here and on the workers."""
    pool.spmd(make)  # the first call imports torch, which leaves frames that refer to each other
    gc.collect()
    gc.disable()
    pool.parfeval_on_all(gc.disable).result(300)
    yield
    gc.enable()
    pool.parfeval_on_all(gc.enable).result(300)


@pytest.mark.everywhere
@pytest.mark.usefixtures("without_collector")
def test_parts_that_nobody_holds_are_freed(pool: ParallelPool, marks: Any, eventually: Any) -> None:
    composite, other = (
        pool.spmd(lambda context: Watched(marks, "one")),
        pool.spmd(lambda context: Watched(marks, "other")),
    )
    pool.parfeval_on_all(abs, 1).result(300)
    assert marks.all() == []
    del composite
    assert eventually(
        lambda: pool.parfeval_on_all(abs, 1).result(300) and marks.all() == ["one"] * 3
    )
    del other[1]
    pool.parfeval_on_all(abs, 1).result(300)
    assert marks.count("other") == 1, "a part that is deleted goes at once"
    del other
    assert eventually(
        lambda: pool.parfeval_on_all(abs, 1).result(300) and marks.count("other") == 3
    )


def make_cycle(context: Any, marks: Any) -> list[Watched]:
    value = Watched(marks)
    value.itself = value
    return [value]


@pytest.mark.processes
@pytest.mark.usefixtures("without_collector")
def test_a_part_in_a_cycle_is_freed_with_the_others(
    pool: ParallelPool, marks: Any, eventually: Any
) -> None:
    """As a Lightning module and its trainer are, which else stay on the GPU."""
    composite = pool.spmd(make_cycle, marks)
    del composite
    assert eventually(
        lambda: pool.parfeval_on_all(abs, 1).result(300) and marks.count("freed") == 3
    )


@pytest.mark.processes
def test_numbers_are_freed_too(pool: ParallelPool, eventually: Any) -> None:
    """Many at once, since a call for each would take as long as the call that returned it."""

    def num_kept() -> int:
        from raypool.spmd import composite

        return len(composite._parts)

    before = pool.parfeval_on_all(num_kept).result(300)
    for _ in range(composite.MOST_SMALL * 5 // 2):
        pool.spmd(lambda context: context.rank)
    assert eventually(
        lambda: max(pool.parfeval_on_all(num_kept).result(300)) < max(before) + composite.MOST_SMALL
    )


@pytest.mark.semantics
@pytest.mark.processes
def test_a_call_holds_what_it_was_given(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    jobs = [pool.spmd_async(bump, composite) for _ in range(5)]
    del composite
    gc.collect()
    assert list(jobs[-1].result(300)) == [5] * 3
    assert list(pool.spmd(bump, pool.spmd(make))) == [1] * 3


@pytest.mark.semantics
@pytest.mark.processes
def test_nothing_stays_of_a_call_that_failed(
    pool: ParallelPool, marks: Any, eventually: Any
) -> None:
    def fail(context: Any) -> Any:
        value = Watched(marks)
        context.barrier()
        if context.rank == 2:
            raise ArithmeticError
        return value

    with pytest.raises(SpmdError, match="Rank 2"):
        pool.spmd(fail)
    assert eventually(
        lambda: (
            gc.collect() >= 0
            and pool.parfeval_on_all(gc.collect).result(300)
            and marks.count("freed") == 3
        )
    )


@pytest.mark.processes
def test_who_cancels_everything_does_not_keep_the_parts(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any
) -> None:
    composite = pool.spmd(lambda context: Watched(marks))
    jobs = [pool.options(worker=number).parfeval(gate.wait) for number in range(3)]
    assert eventually(lambda: all(job.running() for job in jobs))
    del composite
    gc.collect()
    assert eventually(
        lambda: [job.name for job in pool.queue.queued] == ["freeing a Composite"] * 3
    )
    pool.cancel_all()
    assert eventually(lambda: marks.count("freed") == 3)


# --- the end --------------------------------------------------------------------------------------


def test_after_the_end_of_the_pool(make_pool: Any) -> None:
    with make_pool(2) as pool:
        composite, plain = pool.spmd(make), pool.spmd(lambda context: 1)
        pool.delete()
    for use in (
        lambda: composite[0],
        lambda: composite[:],
        lambda: list(composite),
        lambda: plain[0],
        lambda: composite.__setitem__(0, 1),
        lambda: composite.__delitem__(0),
    ):
        with pytest.raises(PoolClosedError, match="parts of this Composite are gone"):
            use()
    assert repr(composite) == "<Composite of 2 ranks> (the pool is closed)"
    assert not composite.exists(0)
    assert len(composite) == 2
    assert composite.workers == (0, 1)
    with (
        make_pool(2) as other,
        pytest.raises(PoolClosedError, match="parts of this Composite are gone"),
    ):
        other.spmd(bump, composite)


@pytest.mark.threads
def test_a_reader_is_told_when_the_pool_ends_meanwhile(make_pool: Any, make_gate: Any) -> None:
    started, gate = make_gate(), make_gate()
    with make_pool(1) as pool:
        composite = pool.spmd(make)
        job = pool.parfeval(lambda: (started.open(), gate.wait()))
        started.wait()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                composite[0]
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        while not pool.queue.queued:
            reader.join(0.01)
        pool.shutdown(wait=False, cancel_futures=True)
        gate.open()
        reader.join(300)
    assert job.done()
    assert [type(error) for error in errors] == [PoolClosedError]


@pytest.mark.processes
def test_the_part_of_a_killed_worker_is_lost_and_the_others_live(
    pool: ParallelPool, marks: Any, check_pool: Callable[[ParallelPool], None]
) -> None:
    composite, numbers = pool.spmd(make), pool.spmd(lambda context: 1)
    victim = pool.workers[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(
        CompositeError,
        match=r"Worker 1 was lost.*part of rank 1 with it.*Create it again.*assign c\[1\]",
    ) as caught:
        composite[1]
    assert caught.value.rank == 1
    assert isinstance(caught.value, IndexError)

    assert repr(composite).splitlines()[1:] == [
        "  0: dict of 2",
        "  1: lost with worker 1",
        "  2: dict of 2",
    ]
    assert [composite.exists(rank) for rank in range(3)] == [True, False, True]
    assert composite[0] == {"rank": 0, "calls": 0}
    assert composite[2] == {"rank": 2, "calls": 0}
    with pytest.raises(CompositeError, match="part of rank 1"):
        list(composite)
    with pytest.raises(CompositeError, match="part of rank 1"):
        numbers[1]
    with pytest.raises(CompositeError, match="part of rank 1"):
        pool.spmd(lambda context, part: marks.add(context.rank), composite)
    assert marks.all() == []

    composite[1] = {"rank": 1, "calls": 7}
    assert composite.exists(1)
    assert list(pool.spmd(bump, composite)) == [1, 8, 1]
    del numbers[1]
    assert repr(numbers).splitlines()[2] == "  1: missing"
    check_pool(pool)


@pytest.mark.processes
def test_a_part_is_lost_where_its_worker_dies_while_it_is_read(pool: ParallelPool) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return Deadly, ()

    composite = pool.spmd(lambda context: Deadly() if context.rank == 2 else None)
    with pytest.raises(CompositeError, match="Worker 2 was lost"):
        composite[2]
    assert composite[0] is None


def test_of_a_pool_that_has_become_smaller_the_parts_are_lost_with_their_workers(
    make_pool: Any, marks: Any
) -> None:
    with make_pool(2) as pool:
        composite = pool.spmd(make)
        pool.resize(1)
        assert not composite.exists(1)
        with pytest.raises(CompositeError, match=r"Worker 1 is no longer in the pool.*another"):
            pool.spmd(lambda context, part: marks.add(context.rank), composite)
        with pytest.raises(CompositeError, match="no longer in the pool"):
            composite[1] = 1
        assert composite[0] == {"rank": 0, "calls": 0}
    assert marks.all() == []


@pytest.mark.concurrent
def test_the_parts_end_with_workers_that_had_nothing_to_do(
    make_pool: Any, gate: Any, eventually: Any
) -> None:
    with make_pool(2, idle_timeout_s=0.2) as pool:
        composite, forgotten = pool.spmd(make), pool.spmd(make)
        assert eventually(lambda: {worker.state for worker in pool.workers} == {"parked"})
        assert "  0: lost with worker 0" in repr(composite)
        assert not composite.exists(0)
        with pytest.raises(CompositeError, match="idle_timeout_s"):
            composite[0]
        del forgotten
        gc.collect()
        pool._engine.driver.barrier()
        assert {worker.state for worker in pool.workers} == {"parked"}, (
            "nobody is started to be told to forget"
        )
        busy = pool.options(worker=1).parfeval(gate.wait)  # so that nobody is sent away meanwhile
        composite[0] = "again"
        assert composite[0] == "again"
        gate.open()
        busy.result(300)


def test_a_pool_of_one(make_pool: Any) -> None:
    with make_pool(1) as pool:
        composite = pool.spmd(make)
        assert list(pool.spmd(bump, composite)) == [1]
        assert repr(composite) == "<Composite of 1 rank>\n  0: dict of 2"
        with pytest.raises(CompositeError, match="has 1 rank, 0 to 0"):
            composite[1]
        assert composite[0]["calls"] == 1


# --- where it can't be used -----------------------------------------------------------------------


@pytest.mark.arguments
def test_it_does_not_travel(pool: ParallelPool) -> None:
    composite = pool.spmd(make)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(
            InvalidTypeError,
            match=r"pass it to pool.spmd as a separate argument, or send c\[rank\]",
        ):
            use(composite)


@pytest.mark.everywhere
def test_a_task_cannot_read_it(pool: ParallelPool) -> None:
    composite = pool.spmd(make)

    def read(use: Callable[[], Any]) -> None:
        with pytest.raises(
            (InvalidTypeError, SerializationError), match="parts stay on their workers"
        ):
            pool.parfeval(use).result(300)

    read(lambda: composite[0])
    read(lambda: list(composite))
    read(lambda: composite.__setitem__(0, 1))
    read(lambda: composite.__delitem__(0))


@pytest.mark.semantics
@pytest.mark.processes
def test_a_task_can_read_one_that_it_has_made(pool: ParallelPool) -> None:
    def task() -> Any:
        composite = pool.spmd(make)
        pool.spmd(bump, composite)
        return len(composite), composite[0], composite.exists(0)

    assert pool.parfeval(task).result(300) == (1, {"rank": 0, "calls": 1}, True)


def test_without_workers_it_is_in_this_process(pool: ParallelPool) -> None:
    composite = pool.spmd(make, workers=0)
    assert list(pool.spmd(bump, composite, workers=0)) == [1]
    assert composite[0] == {"rank": 0, "calls": 1}
    with pytest.raises(InvalidValueError, match="another pool"):
        pool.spmd(bump, composite)


@pytest.mark.concurrent
def test_a_callback_cannot_wait_for_it(pool: ParallelPool, call_back: Any) -> None:
    composite = pool.spmd(make)
    error = call_back(lambda _: composite[0])
    assert type(error) is InvalidValueError
    assert "wait for itself" in str(error)
    assert composite[0] == {"rank": 0, "calls": 0}


@pytest.mark.concurrent
def test_several_threads_read_at_once(pool: ParallelPool) -> None:
    composite = pool.spmd(lambda context: np.full(LARGE, context.rank, np.uint8))
    sums: list[int] = []

    def read() -> None:
        sums.extend(int(part[-1]) for part in composite)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(sums) == [0] * 4 + [1] * 4 + [2] * 4
