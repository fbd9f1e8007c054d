"""Workers that leave their GPU as they found it, on Ray with simulated cards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raypool import ParallelPool, parpool
from raypool.devices.simulated import SimulatedGpus

MIB = 2**20


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    return SimulatedGpus(tmp_path_factory.mktemp("gpus"), 3)


@pytest.fixture(scope="module")
def pool(ray_session: None, gpus: SimulatedGpus, by_value: None) -> Iterator[ParallelPool]:
    with parpool(1, inventory=gpus, quiet=True) as pool:
        yield pool


def test_the_peak_of_each_item_is_in_the_table(pool: ParallelPool, gpus: SimulatedGpus) -> None:
    """One column for the loop, one attribute for the future; items that use no GPU have none."""

    def use(mebibytes: int) -> int:
        gpus.allocate(mebibytes * MIB)
        return mebibytes

    assert pool.parfeval(abs, -1).peak_memory_bytes is None
    results = pool.parfor(use, [10, 300, 20], chunk_size=1)
    assert results.to_frame()["peak_memory_bytes"].tolist()[1] == 300 * MIB
    future = pool.parfeval(use, 500)
    assert future.result() == 500
    assert future.peak_memory_bytes == 500 * MIB


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    with parpool(profile="inline", quiet=True) as pool:
        frame = pool.parfor(abs, [1, 2]).to_frame()
    assert frame["peak_memory_bytes"].isna().all()
    assert str(frame["peak_memory_bytes"].dtype) == "Int64"
