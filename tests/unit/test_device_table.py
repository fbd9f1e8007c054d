"""How many GPUs there are, and the table of them: simulated ones, none at all, and those that only
Ray knows of.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypool import InvalidValueError, gpu_device_count, gpu_device_table
from raypool.gpus.devices import GpuDevice, GpuProcess
from raypool.gpus.nvml import NvmlInventory
from raypool.gpus.simulated import SimulatedGpus
from raypool.gpus.table import COLUMNS, NVIDIAS, gpus_here, known_to_ray, manager_of_gpus
from tests.unit.fake_nvml import FakeCard, FakeNvml, error

GIB = 2**30
DTYPES = {**COLUMNS, "is_selected": "boolean"}


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    """Three cards, of which this process may see all."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    return SimulatedGpus(tmp_path / "gpus", 3)


def test_a_row_for_each_card_as_it_is_now(gpus: SimulatedGpus) -> None:
    gpus.change(
        1,
        used_bytes=5 * GIB,
        utilization=0.75,
        processes=[{"pid": 7, "used_bytes": 5 * GIB}],
        mig=["MIG-1"],
    )
    gpus.change(2, temperature_c=None, processes=None, compute_capability=None)
    table = gpu_device_table(inventory=gpus)
    assert table.dtypes.astype(str).to_dict() == DTYPES
    first, second, third = (table.iloc[i].to_dict() for i in range(3))
    assert first == {
        "index": 0,
        "name": "Simulated GPU",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "total_bytes": 16 * GIB,
        "used_bytes": 0,
        "free_bytes": 16 * GIB,
        "utilization": 0.0,
        "temperature_c": 30.0,
        "processes": {},
        "mig": (),
        "compute_mode": "default",
        "compute_capability": (9, 0),
        "is_selected": False,  # the divided card hides it
    }
    changed = {
        "free_bytes": 11 * GIB,
        "utilization": 0.75,
        "processes": {7: 5 * GIB},
        "mig": ("MIG-1",),
        "is_selected": True,
    }
    assert {name: second[name] for name in changed} == changed
    assert pd.isna(third["temperature_c"])
    assert third["processes"] is third["compute_capability"] is None


@pytest.mark.parametrize(
    ("visible", "selected", "count"),
    [
        (None, [True, True, True], 3),
        ("", [False, False, False], 0),
        ("2,0", [True, False, True], 2),
        ("2,-1,0", [False, False, True], 1),
        ("1,1", [False, False, False], 0),
        ("GPU-00000000-0000-0000-0000-000000000001", [False, True, False], 1),
        ("GPU-0", [False, False, False], 0),  # it may be any
    ],
)
def test_what_this_process_sees_is_selected(
    gpus: SimulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    selected: list[bool],
    count: int,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_device_table(inventory=gpus)["is_selected"].tolist() == selected
    assert gpu_device_count(inventory=gpus) == count
    assert gpu_device_count("all", inventory=gpus) == 3


def test_cards_that_may_not_be_used_are_not_available(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.change(0, compute_mode="prohibited")
    assert (gpu_device_count(inventory=gpus), gpu_device_count("all", inventory=gpus)) == (2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_device_count(inventory=gpus) == 1
    gpus.change(2, mig=["MIG-1", "MIG-2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2,MIG-1")
    assert gpu_device_count(inventory=gpus) == 1  # a process has one instance


def test_which_card_is_selected_is_not_guessed(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.break_down()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000-0000-0000-0000-000000000001")
    table = gpu_device_table(inventory=gpus)
    assert table["index"].tolist() == [0, 1, 2]
    assert table.drop(columns="index").isna().all(axis=None)
    assert gpu_device_count(inventory=gpus) == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_device_table(inventory=gpus)["is_selected"].tolist() == [True, True, True]


def test_a_machine_without_a_gpu_has_an_empty_table_with_all_columns(tmp_path: Path) -> None:
    none = SimulatedGpus(tmp_path, 0)
    table = gpu_device_table(inventory=none)
    assert (
        len(table)
        == gpu_device_count(inventory=none)
        == gpu_device_count("all", inventory=none)
        == 0
    )
    assert table.dtypes.astype(str).to_dict() == DTYPES


def test_there_are_two_ways_to_count(gpus: SimulatedGpus) -> None:
    with pytest.raises(
        InvalidValueError, match="which must be 'available' or 'all', not 'selected'"
    ):
        gpu_device_count("selected", inventory=gpus)  # type: ignore[arg-type]


def test_the_table_says_unknown_when_nvml_fails_in_mid_run(gpus: SimulatedGpus) -> None:
    nvml = FakeNvml(FakeCard())
    assert gpu_device_table(inventory=NvmlInventory(nvml))["used_bytes"].tolist() == [2 * GIB]
    nvml.broken = error("UNKNOWN")
    table = gpu_device_table(inventory=NvmlInventory(nvml))
    assert table["name"].tolist() == ["NVIDIA H200"]
    assert table[["used_bytes", "utilization", "processes", "mig"]].isna().all(axis=None)


# --- what only Ray knows of -----------------------------------------------------------------------


def manager(name: str, count: Any, kind: Any = None, ids: Any = None) -> Any:
    """Make what Ray knows GPUs of a maker by; an answer that is an error is raised."""

    def answering(answer: Any) -> Any:
        def answered() -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return staticmethod(answered)

    fields = {
        "get_current_node_num_accelerators": answering(count),
        "get_current_node_accelerator_type": answering(kind),
        "get_current_process_visible_accelerator_ids": answering(ids),
    }
    return type(f"{name}GPUAcceleratorManager", (), fields)


def test_of_amds_gpus_it_is_known_that_they_are_there() -> None:
    amd = manager(
        "AMD", 3, "AMD-Instinct-MI300X-OAM", ids=RuntimeError("Please use HIP_VISIBLE_DEVICES")
    )
    names = ["AMD Instinct MI300X OAM", "AMD GPU", "AMD GPU"]  # Ray tells only of the first
    cards = [GpuDevice(index=index, name=name) for index, name in enumerate(names)]
    assert known_to_ray(amd, {}) == (cards, (0, 1, 2))
    assert known_to_ray(amd, {"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "0"}) == (
        cards,
        (2,),
    )
    assert known_to_ray(amd, {"ROCR_VISIBLE_DEVICES": "GPU-DEADBEEF"}) == (cards, [None] * 3)


OTHERS = [
    (manager("Apple", 1, "M3-Max"), [GpuDevice(index=0, name="Apple M3 Max")], [0]),
    (
        manager("Intel", 2, None, ["1"]),
        [GpuDevice(index=0, name="Intel GPU"), GpuDevice(index=1, name="Intel GPU")],
        [1],
    ),
    (
        manager("Metax", 1, ImportError("no driver"), ["gpu:0"]),
        [GpuDevice(index=0, name="Metax GPU")],
        [None],
    ),
    (manager("NVIDIA", OSError("no tool")), [], []),
]


def test_others_have_their_makers_names() -> None:
    for maker, cards, seen in OTHERS:
        assert known_to_ray(maker, {}) == (cards, seen)


def test_rays_managers_answer_what_they_are_asked() -> None:
    """They are private to Ray: a Ray that renames them would make GPUs of other makers unknown, and
    this fail.
    """
    from ray._private.accelerators import amd_gpu, apple_gpu, intel_gpu, metax_gpu

    assert manager_of_gpus() is not None
    for maker, module in (
        ("AMD", amd_gpu),
        ("Apple", apple_gpu),
        ("Intel", intel_gpu),
        ("Metax", metax_gpu),
    ):
        cards, seen = known_to_ray(getattr(module, f"{maker}GPUAcceleratorManager"), {})
        assert len(cards) == len(seen)
        assert all(card.name is not None and card.name.startswith(maker) for card in cards)


def test_the_machine_itself_is_asked_by_default() -> None:
    devices, seen = gpus_here(NVIDIAS)
    assert gpu_device_count("all") == len(gpu_device_table()) == len(devices)
    assert gpu_device_count() <= len(seen)


def test_no_cuda_context_is_made_and_no_torch_imported() -> None:
    code = (
        "import sys\n"
        "from raypool import gpu_device_count, gpu_device_table\n"
        "gpu_device_count('all'), gpu_device_table()\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "False"


def test_processes_are_in_the_table_by_their_numbers(tmp_path: Path) -> None:
    card = GpuDevice(
        index=0, processes=(GpuProcess(pid=3, used_bytes=None), GpuProcess(pid=4, used_bytes=8))
    )
    assert gpu_device_table(inventory=SimulatedGpus(tmp_path, [card]))["processes"].tolist() == [
        {3: None, 4: 8}
    ]
