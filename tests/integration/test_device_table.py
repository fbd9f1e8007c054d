"""The GPUs of a pool's machines, live: on Ray, with simulated cards whose state the tests
change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypool import ParallelPool, PoolClosedError, WorkerResources, parpool
from raypool.gpus.devices import GpuDevice
from raypool.gpus.simulated import CONTEXT_BYTES, SimulatedGpus

pytestmark = pytest.mark.usefixtures("ray_session", "by_value")

GIBIBYTE = 2**30
LIVE = ["total_bytes", "used_bytes", "free_bytes", "utilization", "temperature_c", "processes"]


class Cards(SimulatedGpus):
    """Simulated cards whose driver can hang."""

    def devices(self) -> list[GpuDevice]:
        deadline = time.monotonic() + 60
        while (self._folder / "hangs").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().devices()

    def hang(self, does_hang: bool = True) -> None:
        if does_hang:
            (self._folder / "hangs").touch()
        else:
            (self._folder / "hangs").unlink()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory, by_value: None) -> Cards:
    return Cards(tmp_path_factory.mktemp("gpus"), 4)


@pytest.fixture(scope="module")
def pool(free_gpus: None, gpus: Cards) -> Iterator[ParallelPool]:
    """Give a pool of three workers on two of Ray's three GPUs; the machine has a fourth of which
    Ray knows nothing.
    """
    with parpool(
        3, gpus=[0, 1], resources=WorkerResources(gpus=0.5), inventory=gpus, quiet=True
    ) as pool:
        yield pool


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than 3 s for the agents of a busy machine, but where one is to be silent."""
    if "holds_up_nobody" not in request.node.name:
        monkeypatch.setattr("raypool.backends.ray.agents.ANSWER_S", 300.0)


def by_index(pool: Any) -> pd.DataFrame:
    return pool.device_table().set_index("index")


def test_every_gpu_of_the_machine_and_who_is_on_it(pool: ParallelPool, gpus: Cards) -> None:
    """Also those that the pool has nothing on: whoever looks for room wants to see these too."""
    table = pool.device_table()
    assert table["index"].tolist() == [0, 1, 2, 3]
    assert table["uuid"].tolist() == [card.uuid for card in gpus.devices()]
    assert set(table["host"]) == {os.uname().nodename}
    by_gpu = [
        tuple(worker.index for worker in pool.workers if worker.gpu == gpu) for gpu in range(4)
    ]
    assert table["workers"].tolist() == by_gpu
    assert sorted(map(len, by_gpu)) == [0, 0, 1, 2]
    assert table["running"].tolist() == [(None,) * len(workers) for workers in by_gpu]


def test_what_changes_is_as_it_is_now(pool: ParallelPool, gpus: Cards) -> None:
    gpus.change(3, utilization=0.25, used_bytes=3 * GIBIBYTE, temperature_c=71.0)
    row = by_index(pool).loc[3]
    assert [row[name] for name in LIVE] == [
        16 * GIBIBYTE,
        3 * GIBIBYTE,
        13 * GIBIBYTE,
        0.25,
        71.0,
        {},
    ]
    gpus.change(3, utilization=0.5)
    assert by_index(pool).loc[3, "utilization"] == 0.5


def test_what_runs_and_what_it_takes(
    pool: ParallelPool, gpus: Cards, make_gate: Callable[[], Any]
) -> None:
    """A single call by its name, an item of a loop by its number; its memory counts, and its
    process.
    """
    started, end = make_gate(), make_gate()

    def hold(_: int) -> None:
        held = gpus.allocate(2 * GIBIBYTE)
        started.open()
        end.wait()
        del held

    future = pool.options(name="training A", worker=0).parfeval(hold, 0)
    started.wait()
    ((gpu, pid),) = ((worker.gpu, worker.pid) for worker in pool.workers if worker.index == 0)
    row = by_index(pool).loc[gpu]
    assert dict(zip(row["workers"], row["running"], strict=True))[0] == "training A"
    assert row["used_bytes"] == 2 * GIBIBYTE + CONTEXT_BYTES
    assert row["processes"] == {pid: 2 * GIBIBYTE + CONTEXT_BYTES}
    end.open()
    future.result(300)

    begun, go_on = make_gate(), make_gate()

    def wait(_: int) -> None:
        begun.open()
        go_on.wait()

    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(pool.options(worker=1).parfor, wait, [10])
        begun.wait()
        told = [text for texts in pool.device_table()["running"] for text in texts if text]
        go_on.open()
        assert results.result(300).errors == {}
    assert told == ["item 0 of wait"]


def test_a_part_shows_its_own_workers(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[1])
    assert [index for workers in part.device_table()["workers"] for index in workers] == [1]
    assert sorted(index for workers in rest.device_table()["workers"] for index in workers) == [
        0,
        2,
    ]
    assert len(pool.options(retries=0).device_table()) == 4
    everybody, nobody = pool.partition(per_host=3)
    assert (len(everybody.device_table()), len(nobody.device_table())) == (4, 0)


def test_a_driver_that_fails_in_mid_run(pool: ParallelPool, gpus: Cards) -> None:
    """The pool goes on; the table says what is still known, and all of it when the driver is well
    again.
    """
    try:
        gpus.break_down()
        table = pool.device_table()
        assert table["index"].tolist() == [0, 1, 2, 3]
        assert table[["name", "uuid", *LIVE]].isna().all(axis=None)
        assert sorted(index for workers in table["workers"] for index in workers) == [0, 1, 2]
        assert list(pool.parfor(abs, [-1, -2, -3])) == [1, 2, 3]
    finally:
        gpus.break_down(is_broken=False)
    assert pool.device_table()[LIVE].notna().all(axis=None)


@pytest.mark.long
def test_a_node_that_does_not_answer_holds_up_nobody(pool: ParallelPool, gpus: Cards) -> None:
    """Its rows are those of the workers, with what these have said when they came up."""
    gpus.hang()
    try:
        table = pool.device_table()
        assert sorted(table["index"]) == sorted({worker.gpu for worker in pool.workers})
        assert table[LIVE].isna().all(axis=None)
        assert table[["name", "uuid"]].notna().all(axis=None)
        assert list(pool.parfor(abs, [-1, -2, -3])) == [1, 2, 3]
    finally:
        gpus.hang(does_hang=False)
    assert pool.device_table()[LIVE].notna().all(axis=None)


@pytest.mark.long
def test_workers_that_rest_still_have_their_gpus(
    gpus: Cards, eventually: Callable[..., bool]
) -> None:
    """They have ended, and their claims have not; when the pool is closed, nobody is asked."""
    with parpool(1, idle_timeout_s=0.2, inventory=gpus, quiet=True) as pool:
        assert eventually(lambda: pool.workers[0].state == "parked")
        assert [workers for workers in pool.device_table()["workers"] if workers] == [(0,)]
    with pytest.raises(PoolClosedError):
        pool.device_table()


@pytest.mark.parametrize("profile", ["threads", "inline"])
def test_without_ray_it_is_the_table_of_this_machine(profile: str, gpus: Cards) -> None:
    with parpool(2, profile=profile, inventory=gpus, quiet=True) as pool:
        table = pool.device_table()
        assert table["uuid"].tolist() == [card.uuid for card in gpus.devices()]
        assert table["workers"].tolist() == [()] * 4
        # a rank in a thread of its own does not wait
        assert pool.spmd(lambda context: len(pool.device_table()) >= 0)[1]


def test_without_a_gpu_it_is_empty_and_has_its_columns(tmp_path: Path) -> None:
    with parpool(2, profile="threads", inventory=SimulatedGpus(tmp_path, 0), quiet=True) as pool:
        table = pool.device_table()
    assert len(table) == 0
    assert [*table.columns[:3], *table.columns[-2:]] == [
        "host",
        "index",
        "name",
        "workers",
        "running",
    ]
    assert str(table["used_bytes"].dtype) == "Int64"
