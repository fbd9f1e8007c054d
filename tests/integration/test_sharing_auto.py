"""As many workers to a GPU as fit, on Ray, with a card that does not exist."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import ResourceError, WorkerResources, current_task, parpool
from raypool.gpus.simulated import SimulatedGpus

GIBIBYTE = 2**30

pytestmark = [pytest.mark.usefixtures("ray_session")]


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    """Return three cards of 16 GiB."""
    return SimulatedGpus(tmp_path / "gpus", 3)


@pytest.mark.parametrize("retries", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_card_is_filled_and_an_item_that_needs_it_whole_gets_it(
    gpus: SimulatedGpus,
    retries: int,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    """Items of 3 GiB: four workers share the card. Then one of 14 GiB : it runs again alone, and
    all have results.
    """
    caplog.set_level(logging.INFO, "raypool")

    def train(gibibytes: int) -> tuple[int, int, int]:
        import time

        held = gpus.allocate(gibibytes * GIBIBYTE)
        task = current_task()
        time.sleep(0.05)
        return held.num_bytes // GIBIBYTE, task.worker, task.attempt

    with parpool(1, inventory=gpus, workers_per_gpu="auto", quiet=True) as pool:
        first = pool.parfor(train, [3] * 8)
        assert [value[0] for value in first] == [3] * 8
        assert eventually(lambda: pool.parfor(train, [3] * 8) and pool.num_workers == 4)
        assert eventually(lambda: all(worker.state == "idle" for worker in pool.workers))
        assert {worker.gpu for worker in pool.workers} == {0}

        items = [3] * 6 + [14] + [3] * 9
        results = pool.options(retries=retries).parfor(train, items)
        assert [value[0] for value in results] == items
        assert {attempt for _, _, attempt in results} == {1}
        assert "it runs again, alone" in caplog.text
        assert eventually(lambda: pool.num_workers == 1)
        assert [value[0] for value in pool.parfor(train, [3, 3])] == [3, 3]


def test_where_nothing_is_known_each_card_keeps_one_worker(
    gpus: SimulatedGpus, caplog: pytest.LogCaptureFixture
) -> None:
    """NVML gives no answer: the pool works, stays as it is, and says so once."""
    gpus.break_down()

    def train(_: int) -> int:
        return gpus.allocate(GIBIBYTE).num_bytes

    with parpool(1, inventory=gpus, workers_per_gpu="auto", quiet=True) as pool:
        assert list(pool.parfor(train, range(6))) == [GIBIBYTE] * 6
        pool.parfor(train, range(2))
        assert pool.num_workers == 1
    assert caplog.text.count("GPUs is unknown") == 1


def is_somebody_in_the_door() -> bool:
    """Whether an item waits to be alone on a card: it holds a lock in the pool's folder for
    temporary files.
    """
    # what else is there may be removed meanwhile
    with contextlib.suppress(FileNotFoundError):
        for path in Path(tempfile.gettempdir()).rglob("gpu-*.door"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


def test_waiting_for_the_card_can_be_cancelled(
    gpus: SimulatedGpus, make_gate: Callable[[], Any], eventually: Callable[..., bool]
) -> None:
    """An item that is to run alone waits for its neighbour; it is cancelled there, and neither
    worker is lost for that.
    """

    def train(gibibytes: int) -> int:
        return gpus.allocate(gibibytes * GIBIBYTE).num_bytes

    held, gate = make_gate(), make_gate()

    def hold() -> int:
        kept = gpus.allocate(GIBIBYTE)
        held.open()
        gate.wait()
        return kept.num_bytes

    with parpool(1, inventory=gpus, workers_per_gpu="auto", quiet=True) as pool:
        assert eventually(lambda: pool.parfor(train, [3] * 4) and pool.num_workers == 4)
        assert eventually(lambda: [worker.state for worker in pool.workers] == ["idle"] * 4)
        neighbour = pool.parfeval(hold)
        held.wait()
        large = pool.parfeval(train, 14)
        assert eventually(is_somebody_in_the_door)
        assert large.cancel()
        assert eventually(lambda: large.worker_replaced is not None)
        assert large.worker_replaced is False
        gate.open()
        assert neighbour.result() == GIBIBYTE
        # alone again, in a process that began with a fourth of the memory
        assert pool.options(fresh_process=True).parfeval(train, 14).result() == 14 * GIBIBYTE


def test_a_user_who_wants_more_workers_gets_them_on_the_same_gpus_too(gpus: SimulatedGpus) -> None:
    """First the GPUs that are free, then room beside the workers that are there."""
    with parpool(1, inventory=gpus, workers_per_gpu="auto", quiet=True) as pool:
        pool.resize(5)
        numbers = Counter(worker.gpu for worker in pool.workers)
        assert sorted(numbers.values()) == [1, 2, 2]
        pool.resize(48)  # sixteen each
        assert pool.num_workers == 48
        with pytest.raises(ResourceError, match="GPU: requested 1, available 0"):
            pool.resize(49)
        assert pool.num_workers == 48


def test_listed_workers_share_the_same_gpus_too(gpus: SimulatedGpus) -> None:
    kinds = [WorkerResources()] * 3
    with parpool(inventory=gpus, workers_per_gpu="auto", resources=kinds, quiet=True) as pool:
        pool.resize(1)
        with parpool(2, inventory=gpus, quiet=True):
            pool.resize(3)
            assert len({worker.gpu for worker in pool.workers}) == 1


def test_chosen_gpus_are_shared(gpus: SimulatedGpus) -> None:
    """Two workers on each of the GPUs that were named, and none on the other."""
    with parpool(gpus=[0, 2], inventory=gpus, workers_per_gpu=2, quiet=True) as pool:
        assert sorted(worker.gpus for worker in pool.workers) == [(0,), (0,), (2,), (2,)]
