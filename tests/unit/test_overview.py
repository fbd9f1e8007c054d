"""The table of a pool's GPUs, made of what nodes have answered."""

from __future__ import annotations

from pathlib import Path

from raypool.channel.records import NodeDevices, WorkerInfo
from raypool.engine.overview import COLUMNS, device_table
from raypool.gpus.devices import GpuDevice, GpuProcess
from raypool.gpus.simulated import SimulatedGpus
from raypool.testing import sim_pool

GIBIBYTE = 2**30


def test_rows_of_several_machines(tmp_path: Path) -> None:
    """An index counts on its own machine only; two workers may share a GPU, and one may have
    two. Workers are in order, whichever started first.
    """
    nodes = [
        NodeDevices(
            "a",
            SimulatedGpus(tmp_path / "a", 2).devices(),
            [WorkerInfo(2, "a", 2, (0,)), WorkerInfo(0, "a", 1, (0,))],
        ),
        NodeDevices(
            "b", SimulatedGpus(tmp_path / "b", 2).devices(), [WorkerInfo(1, "b", 1, (0, 1))]
        ),
    ]
    table = device_table(nodes, {2: "item 3 of train", 1: "fold"}, [0, 1, 2])
    assert table[["host", "index", "workers", "running"]].to_numpy().tolist() == [
        ["a", 0, (0, 2), (None, "item 3 of train")],
        ["a", 1, (), ()],
        ["b", 0, (1,), ("fold",)],
        ["b", 1, (1,), ("fold",)],
    ]
    assert device_table(nodes, {}, [1])["host"].tolist() == ["b", "b"]


def test_a_machine_that_does_not_answer_has_what_its_workers_have_said() -> None:
    """A worker may know fewer UUIDs than GPUs; then nobody can tell whose they are."""
    workers = [
        WorkerInfo(0, "a", 1, (3,), ("GPU-3",), "NVIDIA H200"),
        WorkerInfo(1, "a", 2, (3,), ("GPU-3",), "NVIDIA H200"),
        WorkerInfo(2, "a", 3, (0, 1), ("GPU-1",)),
        WorkerInfo(3, "a", 4),
    ]
    table = device_table([NodeDevices("a", None, workers)], {0: "fold"}, range(4))
    assert table["index"].tolist() == [0, 1, 3]
    assert table["uuid"].fillna("").tolist() == ["", "", "GPU-3"]
    assert table["name"].fillna("").tolist() == ["", "", "NVIDIA H200"]
    assert table["workers"].tolist() == [(2,), (2,), (0, 1)]
    assert table["running"].tolist() == [(None,), (None,), ("fold", None)]
    assert (
        table[
            ["total_bytes", "used_bytes", "free_bytes", "utilization", "temperature_c", "processes"]
        ]
        .isna()
        .all(axis=None)
    )


def test_what_is_known_in_part_keeps_the_types_of_the_columns() -> None:
    """Integers stay integers beside what is not known: 2**60 + 1 bytes are not a float."""
    cards = [
        GpuDevice(
            index=0,
            total_bytes=2**60 + 1,
            used_bytes=0,
            processes=(GpuProcess(pid=7), GpuProcess(pid=8)),
        ),
        GpuDevice(index=1, utilization=0.5),
    ]
    table = device_table([NodeDevices("a", cards, [WorkerInfo(0, "a", 1)])], {}, [0])
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == COLUMNS
    assert table["free_bytes"].iloc[0] == 2**60 + 1
    assert table["processes"].isna().tolist() == [False, True]
    assert table["processes"].iloc[0] == {7: None, 8: None}
    assert table["utilization"].isna().tolist() == [True, False]


def test_a_simulated_pool_has_no_machine_to_be_asked() -> None:
    with sim_pool(2) as pool:
        assert pool.device_table().empty
