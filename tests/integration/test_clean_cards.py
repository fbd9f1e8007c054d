"""Workers that leave their GPU as they found it, on Ray with simulated cards."""

from __future__ import annotations

import builtins
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raypool import ParallelPool, WorkerLostError, parpool
from raypool.gpus.simulated import CONTEXT_BYTES, SimulatedGpus

MIB = 2**20


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    return SimulatedGpus(tmp_path_factory.mktemp("gpus"), 3)


@pytest.fixture(scope="module")
def pool(free_gpus: None, gpus: SimulatedGpus, by_value: None) -> Iterator[ParallelPool]:
    """Give a pool of one worker, whose card has 16 GiB: so 1.6 GiB may be left over."""
    with parpool(1, inventory=gpus, cancel_grace_s=8, quiet=True) as pool:
        yield pool


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Find what was said with some words in it."""
    caplog.set_level(logging.WARNING, logger="raypool")
    return lambda words: [
        record.getMessage() for record in caplog.records if words in record.getMessage()
    ]


def keep_for_ever(thing: object) -> None:
    """Leave something lying about in this process."""
    builtins.__dict__.setdefault("left_over", []).append(thing)


# --- how much a task had --------------------------------------------------------------------------


def test_the_peak_of_each_item_is_in_the_table(pool: ParallelPool, gpus: SimulatedGpus) -> None:
    """One column for the loop, one attribute for the future; what one item had does not count for
    the next.
    """

    def use(mebibytes: int) -> int:
        gpus.allocate(mebibytes * MIB)
        return mebibytes

    results = pool.parfor(use, [10, 300, 20], chunk_size=1)
    assert results.to_frame()["peak_memory_bytes"].tolist() == [10 * MIB, 300 * MIB, 20 * MIB]
    future = pool.parfeval(use, 500)
    assert future.result() == 500
    assert future.peak_memory_bytes == 500 * MIB


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    with parpool(profile="inline", quiet=True) as pool:
        frame = pool.parfor(abs, [1, 2]).to_frame()
    assert frame["peak_memory_bytes"].isna().all()
    assert str(frame["peak_memory_bytes"].dtype) == "Int64"


def test_why_something_has_failed(pool: ParallelPool, gpus: SimulatedGpus) -> None:
    """A GPU that is full is told from a machine that is, and both from all else; the first with the
    peak in the message.
    """

    def work(how: str) -> str:
        held = gpus.allocate(1024 * MIB)
        if how == "gpu":
            gpus.allocate(20_000 * MIB)
        elif how == "machine":
            raise MemoryError
        elif how == "wrong":
            raise KeyError(how)
        del held
        return how

    results = pool.parfor(work, ["fine", "gpu", "machine", "wrong"], on_error="collect")
    frame = results.to_frame()
    assert frame["reason"].fillna("").tolist() == [
        "",
        "gpu out of memory",
        "out of memory",
        "error",
    ]
    assert frame["peak_memory_bytes"].tolist()[1] == 1024 * MIB
    assert "its process had up to 1.07 GB of the memory of " in str(results.errors[1].__notes__)
    assert "which has 17.18 GB" in str(results.errors[1].__notes__)
    assert "of memory since it began; the machine has" in str(results.errors[2].__notes__)

    futures = [pool.parfeval(work, how) for how in ("fine", "gpu")]
    assert [future.exception() is None for future in futures] == [True, False]
    assert [future.reason for future in futures] == [None, "gpu out of memory"]
    future = pool.options(retries=0).parfeval(os._exit, 1)
    assert isinstance(future.exception(), WorkerLostError)
    assert future.reason == "process ended"


# --- what a task leaves ---------------------------------------------------------------------------


def test_what_is_kept_for_later_is_free_for_others_between_tasks(
    pool: ParallelPool, gpus: SimulatedGpus
) -> None:
    """Also what a task had that has failed: its exception comes back, and keeps nothing there."""
    (worker,) = pool.workers
    pid = pool.parfeval(os.getpid).result()

    def use(fails: bool) -> int | None:
        held = gpus.allocate(3000 * MIB)
        if fails:
            raise ValueError(held.num_bytes)
        return gpus.devices()[worker.gpus[0]].used_bytes

    assert pool.parfeval(use, False).result() == 3000 * MIB + CONTEXT_BYTES
    assert gpus.memory_used(worker.gpus) == CONTEXT_BYTES
    assert isinstance(pool.parfeval(use, True).exception(300), ValueError)
    assert pool.parfeval(gpus.memory_used, worker.gpus).result() == CONTEXT_BYTES
    assert pool.parfeval(os.getpid).result() == pid


def test_a_task_that_leaves_much_costs_its_worker(
    pool: ParallelPool, gpus: SimulatedGpus, warnings: Callable[[str], list[str]]
) -> None:
    """The next task, which is queued already, finds a new process and all of the card; it is said
    once which function it was.
    """
    (worker,) = pool.workers

    def leave() -> int:
        keep_for_ever(gpus.allocate(2000 * MIB))
        return os.getpid()

    def look() -> tuple[int, int | None]:
        return os.getpid(), gpus.memory_used(worker.gpus)

    pids = []
    for _ in range(2):
        leaving, looking = pool.parfeval(leave), pool.parfeval(look)
        pids.append(leaving.result())
        pid, used = looking.result()
        assert pid != pids[-1]
        assert used == 0
    assert pids[0] != pids[1]
    (said,) = warnings("left on its GPU")
    assert (
        "2.10 GB are left on its GPU, but max_leftover_bytes allows 1.72 GB; leave"
        " left 2.10 GB of that" in said
    )
    assert "pool.constant" in said


def test_what_was_sent_ahead_runs_in_the_next_process(
    pool: ParallelPool, gpus: SimulatedGpus
) -> None:
    """Short items share calls, of which a worker has two; none runs where one before it has left
    too much, and none is lost.
    """

    def leave_now_and_then(index: int) -> tuple[int, int]:
        left = len(builtins.__dict__.get("left_over", ()))
        if index == 300:
            keep_for_ever(gpus.allocate(2000 * MIB))
        return index, left

    results = pool.parfor(leave_now_and_then, 600, chunk_size=20)
    assert [index for index, _ in results] == list(range(600))
    assert [left for index, left in results if index > 319] == [0] * 280
    assert set(results.to_frame()["attempts"]) == {1}


def test_what_is_kept_on_purpose_stays(
    pool: ParallelPool, gpus: SimulatedGpus, eventually: Any
) -> None:
    """A constant is built once, and its worker goes on; so is a part of a Composite, which keeps
    its worker.
    """
    model = pool.constant(lambda: gpus.allocate(6000 * MIB))
    before = pool.parfeval(os.getpid).result()

    def use() -> tuple[int, int]:
        return os.getpid(), model.value.num_bytes

    assert [pool.parfeval(use).result() for _ in range(3)] == [(before, 6000 * MIB)] * 3

    def make(_: Any) -> Any:
        return gpus.allocate(3000 * MIB)

    held = pool.spmd(make)
    assert pool.parfeval(os.getpid).result() == before
    assert "SimulatedTensor" in repr(held)
    with_both = gpus.memory_used(pool.workers[0].gpus)
    del held
    gc.collect()

    def is_freed_by_a_call() -> bool:
        assert pool.parfeval(os.getpid).result() == before
        return gpus.memory_used(pool.workers[0].gpus) == with_both - 3000 * MIB

    assert eventually(is_freed_by_a_call)


@pytest.mark.long
def test_max_leftover_bytes_says_how_much_may_stay(
    ray_session: None, gpus: SimulatedGpus, by_value: None
) -> None:
    """What `setup` has made does not count."""

    def prepare() -> None:
        keep_for_ever(gpus.allocate(5000 * MIB))

    def leave(mebibytes: int) -> int:
        keep_for_ever(gpus.allocate(mebibytes * MIB))
        return os.getpid()

    with parpool(
        1, inventory=gpus, max_leftover_bytes=100 * MIB, setup=prepare, quiet=True
    ) as pool:
        first = pool.parfeval(leave, 60).result()
        assert pool.parfeval(leave, 60).result() == first
        assert pool.parfeval(os.getpid).result() != first, "120 MiB in all"


# --- what a task that was ended leaves (scenario 19) ----------------------------------------------


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_memory_is_back_before_the_next_task(
    pool: ParallelPool, gpus: SimulatedGpus, gate: Any, eventually: Any, is_stubborn: bool
) -> None:
    """A task that was cancelled, and one that had to be killed for it: the card is empty again, and
    it is the same card.
    """
    (worker,) = pool.workers
    before = gpus.memory_used(worker.gpus) or 0

    def hold() -> None:
        held = gpus.allocate(4000 * MIB)
        while True:
            try:
                gate.open()
                time.sleep(600)
            except BaseException:
                if not is_stubborn:
                    del held
                    raise

    def look(path: Path) -> tuple[int | None, str]:
        return gpus.memory_used(worker.gpus), os.environ["CUDA_VISIBLE_DEVICES"]

    future = pool.parfeval(hold)
    gate.wait()
    assert gpus.memory_used(worker.gpus) == before + 4000 * MIB + (0 if before else CONTEXT_BYTES)
    looking = pool.parfeval(look, gate.path)
    assert future.cancel()
    used, visible = looking.result()
    assert eventually(lambda: future.worker_replaced is not None)
    assert future.worker_replaced is is_stubborn
    assert future.reason == "cancelled"
    assert used == (0 if is_stubborn else max(before, CONTEXT_BYTES))
    assert visible == str(worker.gpus[0])


class SlowToFree(SimulatedGpus):
    """Cards that free the memory of a process that has ended in as many steps as a file says."""

    @property
    def steps(self) -> Path:
        return self._folder / "steps"

    def memory_used(self, indices: Sequence[int]) -> int | None:
        left = int(self.steps.read_text()) if self.steps.exists() else 0
        if left:
            self.steps.write_text(str(left - 1))
        return (super().memory_used(indices) or 0) + left * MIB


def test_a_replacement_waits_for_the_memory_of_a_setup(
    free_gpus: None, tmp_path: Path, by_value: None
) -> None:
    slow = SlowToFree(tmp_path / "slow", 3)

    def fill() -> None:
        keep_for_ever(slow.allocate(9000 * MIB))

    def die() -> None:
        slow.steps.write_text("3")
        os._exit(1)

    with parpool(1, inventory=slow, setup=fill, quiet=True) as pool:
        assert isinstance(pool.parfeval(die).exception(), WorkerLostError)
        assert pool.parfeval(slow.steps.read_text).result() == "0"
