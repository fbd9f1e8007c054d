"""What a worker measures of its GPU's memory, and when it gives something back."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool.channel.records import Part, WorkerInfo
from raypool.gpus.memory import kept
from raypool.gpus.simulated import SimulatedAllocator, SimulatedGpus
from raypool.spmd import composite
from raypool.worker import runner
from raypool.worker.gpu_memory import GpuMemoryCare, LeftoverMemory
from raypool.worker.gpu_turns import GpuTurns
from raypool.worker.interrupts import Interrupts
from raypool.worker.runner import RawResult, Surroundings, run_parts

MIB = 2**20
WORKER = WorkerInfo(3, "here", 1, gpus=(0,))


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    """Give one simulated card of 16 GiB, which is this process's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return SimulatedGpus(tmp_path / "gpus", 1)


@pytest.fixture
def allocator(gpus: SimulatedGpus) -> SimulatedAllocator:
    """Give what manages this process's memory on it."""
    return gpus.allocator()


@pytest.fixture
def upkeep(allocator: SimulatedAllocator) -> Iterator[GpuMemoryCare]:
    """Give what looks after that, of which 1.6 GiB may be left over."""
    yield GpuMemoryCare(allocator, WORKER, 16 * 1024 * MIB)
    kept.__init__()  # type: ignore[misc]  # nobody watches any more


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes all its items, however slow the machine."""
    monkeypatch.setattr(runner, "CALL_LIMIT_S", math.inf)


def run(
    upkeep: GpuMemoryCare | None,
    *functions: Callable[[], Any],
    turns: GpuTurns | None = None,
    turn: tuple[float, bool] | None = None,
) -> list[RawResult]:
    """Run tasks, numbered from 0, in one call."""
    here = Surroundings(
        WORKER,
        functions.__getitem__,
        list,
        Interrupts(),
        lambda *_: None,
        upkeep=upkeep,
        turns=turns,
    )
    calls = [
        Part(task_id, task_id, [((), {})], 1, 0, 1, is_call=True, turn=turn)
        for task_id, _ in enumerate(functions)
    ]
    return run_parts(7, calls, here)


class Cycle:
    """Something that only the garbage collector gets rid of."""

    def __init__(self, tensor: object) -> None:
        self.tensor, self.me = tensor, self


# --- how much a task had --------------------------------------------------------------------------


def test_the_peak_is_that_of_the_task(upkeep: GpuMemoryCare, allocator: SimulatedAllocator) -> None:
    """Two tensors at once count together, what came after them does not; what was given back does
    not count for the next.
    """

    def two_at_once() -> None:
        held = allocator.allocate(300 * MIB), allocator.allocate(200 * MIB)
        del held
        allocator.allocate(100 * MIB)

    functions = (two_at_once, allocator.empty_cache, lambda: allocator.allocate(50 * MIB))
    peaks = [run(upkeep, function)[0].peak_memory_bytes for function in functions]
    assert peaks == [500 * MIB, 500 * MIB, 50 * MIB]


def test_nothing_is_said_where_the_gpu_was_not_used(
    upkeep: GpuMemoryCare, allocator: SimulatedAllocator
) -> None:
    """Neither of a worker that has a GPU and leaves it alone, nor of one that has none."""
    assert run(upkeep, lambda: None)[0].peak_memory_bytes is None
    assert upkeep.settle("nothing") is None
    assert not allocator.is_in_use
    assert run(None, lambda: allocator.allocate(MIB))[0].peak_memory_bytes is None


@pytest.mark.parametrize(
    ("total_bytes", "share", "said"),
    [
        (16_000_000_000, 1.0, "up to 0.52 GB of the memory of here, GPU 0, which has 16.00 GB"),
        (
            16_000_000_000,
            0.25,
            (
                "up to 0.52 GB of the memory of here, GPU 0, which has 16.00 GB, of which 4.00 GB"
                " are its part"
            ),
        ),
        (None, 1.0, "up to 0.52 GB of the memory of here, GPU 0"),
    ],
)
def test_a_gpu_that_is_full_says_who_had_what(
    allocator: SimulatedAllocator, total_bytes: int | None, share: float, said: str
) -> None:
    """The exception stays what it is, and gets a note with the peak and with what there is."""

    def need_too_much() -> None:
        held = allocator.allocate(500 * MIB)
        allocator.allocate(100 * 1024 * MIB)
        del held

    upkeep = GpuMemoryCare(allocator, WORKER, total_bytes)
    upkeep.share = share
    (result,) = run(upkeep, need_too_much)
    error = result.errors[0]
    assert type(error).__name__ == "OutOfMemoryError"
    assert error.__notes__[-1] == f"raypool: its process had {said}"
    assert result.peak_memory_bytes == 500 * MIB


def test_an_item_that_has_the_gpu_to_itself_is_told_so(
    gpus: SimulatedGpus, upkeep: GpuMemoryCare, allocator: SimulatedAllocator, tmp_path: Path
) -> None:
    """In an "auto" pool, whose worker had a quarter of it before that."""
    turns = GpuTurns(gpus, "0", 0.25, lambda: tmp_path)
    upkeep.share = 0.25
    (result,) = run(
        upkeep, lambda: allocator.allocate(100 * 1024 * MIB), turns=turns, turn=(1.0, True)
    )
    assert result.errors[0].__notes__[-1].endswith("of here, GPU 0, which has 17.18 GB")


def test_a_machine_that_is_full_says_so_too() -> None:
    """Without any GPU; other exceptions get no such note."""

    def fill() -> None:
        raise MemoryError

    def fail() -> None:
        raise KeyError("a")

    full, other = run(None, fill, fail)
    assert "of memory since it began; the machine has" in full.errors[0].__notes__[0]
    assert not hasattr(other.errors[0], "__notes__")


# --- what a task leaves ---------------------------------------------------------------------------


def test_what_is_only_kept_for_later_is_given_back(
    upkeep: GpuMemoryCare, gpus: SimulatedGpus, allocator: SimulatedAllocator
) -> None:
    """Others see it as free then; a little that is left over is nobody's concern."""
    tensors = [allocator.allocate(1000 * MIB) for _ in range(4)]
    del tensors[1:]
    before = gpus.devices()[0].used_bytes
    assert upkeep.settle("train") is None
    assert before is not None
    assert gpus.devices()[0].used_bytes == before - 3000 * MIB


def test_too_much_left_over_is_told_with_its_name(
    upkeep: GpuMemoryCare, allocator: SimulatedAllocator
) -> None:
    """It adds up over calls, so that a small leak is found in time, and blamed on who has left most
    of it.
    """
    left = [allocator.allocate(900 * MIB)]
    assert upkeep.settle("train") is None
    left.append(allocator.allocate(100 * MIB))
    assert upkeep.settle("plot") is None
    left.append(allocator.allocate(900 * MIB))
    leftover = upkeep.settle("train")
    assert leftover == LeftoverMemory("train", leftover.words if leftover else "", is_spent=True)
    assert leftover.words.startswith(
        "Worker 3 (here, GPU 0) is replaced: 1.99 GB are left on its GPU, but"
        " max_leftover_bytes allows 1.72 GB"
    )
    assert "train left 1.89 GB of that" in leftover.words
    assert "pool.constant" in leftover.words


def test_what_is_freed_again_is_forgotten(
    upkeep: GpuMemoryCare, allocator: SimulatedAllocator
) -> None:
    """Also what only the garbage collector frees; that is asked when there is too much, and not
    before.
    """
    left = [allocator.allocate(1500 * MIB)]
    assert upkeep.settle("train") is None
    left.clear()
    assert upkeep.settle("train") is None
    gc.disable()
    try:
        Cycle(allocator.allocate(1500 * MIB))
        assert upkeep.settle("train") is None
        assert allocator.allocated() == 1500 * MIB
        Cycle(allocator.allocate(1500 * MIB))
        assert upkeep.settle("train") is None
        assert allocator.allocated() == 0

        Cycle(allocator.allocate(4000 * MIB))  # beside what is kept on purpose, too
        composite.keep("model", 0, allocator.allocate(100 * MIB))
        assert upkeep.settle("spmd") is None
        assert allocator.allocated() == 100 * MIB
    finally:
        composite.drop("model")
        gc.enable()


def test_what_is_kept_on_purpose_does_not_count(
    upkeep: GpuMemoryCare, allocator: SimulatedAllocator
) -> None:
    """Not what the setup has made, nor a constant, also one that needs another; when it has gone,
    neither does its place.
    """
    from_setup = allocator.allocate(3000 * MIB)
    upkeep.begin_anew()
    with kept.on_purpose():
        constant = [allocator.allocate(2000 * MIB)]
        with kept.on_purpose():
            constant.append(allocator.allocate(2000 * MIB))
    assert upkeep.settle("train") is None
    constant.clear()
    assert upkeep.settle("train") is None
    left = allocator.allocate(2000 * MIB)
    assert upkeep.settle("train") is not None
    del from_setup, left


def test_parts_of_composites_stay_and_keep_their_worker(
    upkeep: GpuMemoryCare, allocator: SimulatedAllocator
) -> None:
    """They cannot be made again: who holds some is told of, and not replaced; a small plain value
    is with its holder too.
    """
    composite.keep("loss", 0, 0.5)
    composite.keep("model", 0, allocator.allocate(4000 * MIB))
    assert upkeep.settle("spmd") is None
    left = allocator.allocate(4000 * MIB)
    leftover = upkeep.settle("train")
    assert leftover is not None
    assert not leftover.is_spent
    assert "stays, because it keeps parts of Composites" in leftover.words
    composite.drop("model")
    assert upkeep.settle("train") is None, (
        "as far as anybody can tell, it was what is left over that has gone"
    )
    left = [left, allocator.allocate(4000 * MIB)]
    leftover = upkeep.settle("train")
    assert leftover is not None
    assert leftover.is_spent
    composite.drop("loss")
    del left


ALLOWANCES = [
    (None, 1.0, None, False),
    (None, 1.0, 1000 * MIB, True),
    (16_000 * MIB, 1.0, None, False),
    (16_000 * MIB, 0.5, None, True),
    (16_000 * MIB, 0.5, 1000 * MIB, True),
    (16_000 * MIB, 0.5, 2000 * MIB, False),
]


def test_how_much_may_be_left_over(allocator: SimulatedAllocator) -> None:
    """So much as is said; else a tenth of the worker's part of the GPU; anything if nothing is
    known of that.
    """
    for total_bytes, share, max_leftover_bytes, is_too_much in ALLOWANCES:
        upkeep = GpuMemoryCare(allocator, WORKER, total_bytes, max_leftover_bytes)
        upkeep.share = share
        left = allocator.allocate(1200 * MIB)
        assert (upkeep.settle("train") is not None) is is_too_much
        del left


def test_a_gpu_that_fails_takes_its_process_with_it(
    gpus: SimulatedGpus, allocator: SimulatedAllocator
) -> None:
    """An error of CUDA's (a failed assertion on the device, say) lasts as long as the process: the
    next task gets another.
    """

    class Failing:
        is_in_use = True

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    upkeep = GpuMemoryCare(Failing(), WORKER, 16_000 * MIB)
    (result,) = run(upkeep, lambda: None)
    assert result.done == 1
    leftover = upkeep.settle("train")
    assert leftover is not None
    assert leftover.is_spent
    assert (
        "its GPU has failed since train ran (RuntimeError: CUDA error: device-side assert"
        in leftover.words
    )


def test_an_exception_holds_no_memory(upkeep: GpuMemoryCare, allocator: SimulatedAllocator) -> None:
    """What the functions had that it went through is free when the next item of the call begins,
    also of what it came from.
    """

    def fail() -> None:
        held = allocator.allocate(500 * MIB)
        raise ValueError(held.num_bytes)

    def fail_twice() -> None:
        more = allocator.allocate(300 * MIB)
        try:
            fail()
        except ValueError as error:
            raise KeyError(more.num_bytes) from error

    (result,) = run(upkeep, fail_twice)
    assert isinstance(result.errors[0].__cause__, ValueError)
    assert result.errors[0].__traceback__ is not None
    assert allocator.allocated() == 0
