"""What NVML tells of GPUs, and what becomes of it when NVML does not: the library is a fake one
that is handed in.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raypool.gpus.devices import GpuDevice, GpuProcess, index_of
from raypool.gpus.nvml import NvmlInventory
from tests.unit.fake_nvml import GIB, FakeCard, FakeNvml, error

FIRST, SECOND = (
    "GPU-11111111-0000-0000-0000-000000000000",
    "GPU-11112222-0000-0000-0000-000000000000",
)
WELL = GpuDevice(
    index=0,
    name="NVIDIA H200",
    uuid=FIRST,
    total_bytes=140 * GIB,
    used_bytes=2 * GIB,
    utilization=0.25,
    temperature_c=41,
    processes=(),
    mig=(),
    compute_mode="default",
    compute_capability=(9, 0),
)


def missing() -> Any:
    """Be a module that is not there."""
    raise ModuleNotFoundError("No module named 'pynvml'")


def without_driver() -> Any:
    """Be a module that finds no driver."""
    nvml = FakeNvml()
    nvml.broken = error("LIBRARY_NOT_FOUND")
    return nvml


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_all_that_is_known_of_a_card() -> None:
    nvml = FakeNvml(
        FakeCard(computing=[process(7, GIB), process(8, None)], mode=3),
        FakeCard(uuid=SECOND.encode(), name=b"L4"),
    )
    first, second = NvmlInventory(nvml).devices()
    processes = (GpuProcess(pid=7, used_bytes=GIB), GpuProcess(pid=8))
    assert first == GpuDevice(
        **{**vars(WELL), "compute_mode": "exclusive_process", "processes": processes}
    )
    assert first.free_bytes == 138 * GIB
    assert (second.index, second.name, second.uuid) == (1, "L4", SECOND)  # older modules give bytes


def test_who_computes_and_draws_stands_there_once() -> None:
    card = FakeCard(
        computing=[process(7, None), process(9, 0)],
        mps=[process(7, 5), process(8, 6)],
        drawing=[process(8, 1)],
    )
    (device,) = NvmlInventory(FakeNvml(card)).devices()
    assert device.processes == (
        GpuProcess(pid=7, used_bytes=5),
        GpuProcess(pid=9, used_bytes=0),
        GpuProcess(pid=8, used_bytes=6),
    )
    card.drawing = error("NOT_SUPPORTED")
    card.mps = error("FUNCTION_NOT_FOUND")
    assert [entry.pid for entry in NvmlInventory(FakeNvml(card)).devices()[0].processes or ()] == [
        7,
        9,
    ]


def test_a_divided_card_names_its_instances() -> None:
    card = FakeCard(
        mig_mode=[1, 1], instances={0: "MIG-a", 3: "MIG-b"}, rates=error("NOT_SUPPORTED")
    )
    nvml = FakeNvml(FakeCard(uuid=SECOND), card)
    inventory = NvmlInventory(nvml)
    assert [device.mig for device in inventory.devices()] == [(), ("MIG-a", "MIG-b")]
    assert inventory.devices()[1].utilization is None  # of a divided card NVML does not say
    for name in ("MIG-b", f"MIG-{FIRST}/3/0"):
        found = inventory.find(name)
        assert found is not None
        assert found.index == 1  # not the number of the instance, which NVML would say
    memory = SimpleNamespace(total=20 * GIB, used=3 * GIB)
    for answer, known in (memory, (20 * GIB, 3 * GIB)), (error("NO_PERMISSION"), (None, None)):
        card.instance_memory = answer
        found = inventory.find("MIG-b")
        assert found is not None
        assert (found.total_bytes, found.used_bytes) == known, "not that of the GPU"
    card.instances[5] = "MIG-c"  # it is divided anew
    assert index_of("MIG-c", inventory.find("MIG-c")) == 1
    card.mig_mode = error("NOT_SUPPORTED")
    assert inventory.devices()[1].mig == ()
    card.mig_mode = error("UNKNOWN")
    assert inventory.devices()[1].mig is None


def test_a_card_is_found_by_its_names() -> None:
    inventory = NvmlInventory(FakeNvml(FakeCard(), FakeCard(uuid=SECOND)))
    names = ("0", FIRST, SECOND, "GPU-11112", "GPU-1111", "2", "GPU-3", "", "MIG-nobody")
    assert [index_of(name, inventory.find(name)) for name in names if name] == [
        0,
        0,
        1,
        1,
        -1,
        2,
        -1,
        -1,
    ]
    assert [name for name in names if inventory.find(name) is None] == [
        "GPU-1111",
        "2",
        "GPU-3",
        "",
        "MIG-nobody",
    ]


def test_the_load_is_all_that_is_asked_for_when_it_is_asked_for() -> None:
    nvml = FakeNvml(FakeCard(), FakeCard(uuid=SECOND))
    inventory = NvmlInventory(nvml)
    for _ in range(2):
        nvml.asked.clear()
        busy = GpuDevice(index=1, total_bytes=140 * GIB, used_bytes=2 * GIB, utilization=0.25)
        assert inventory.load([1, 2]) == [busy, GpuDevice(index=2)]
    assert nvml.asked.count("nvmlInit") == 0
    assert nvml.asked.count("nvmlDeviceGetMemoryInfo") == 1
    # memory and utilization of the one, and twice whether the other is there
    assert len(nvml.asked) == 4
    assert inventory.memory_used([0, 1]) == 4 * GIB
    assert inventory.memory_used([0, 2]) is None
    assert inventory.memory_used([]) == 0


def test_nvml_is_initialised_once_and_names_are_asked_for_once() -> None:
    nvml = FakeNvml(FakeCard(), FakeCard(uuid=SECOND))
    inventory = NvmlInventory(nvml)
    first = inventory.devices()
    assert NvmlInventory(nvml).devices() == first
    assert inventory.find(SECOND) == first[1]
    assert {
        name: nvml.asked.count(name)
        for name in ("nvmlInit", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlShutdown")
    } == {"nvmlInit": 1, "nvmlDeviceGetUUID": 2, "nvmlDeviceGetName": 2, "nvmlShutdown": 0}


def test_after_a_fork_nvml_begins_anew() -> None:
    nvml = FakeNvml(FakeCard())
    inventory = NvmlInventory(nvml)
    inventory.devices()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if inventory.devices() == [WELL] and nvml.asked.count("nvmlInit") == 2 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nvml.asked.count("nvmlInit") == 1


@pytest.mark.parametrize("load", [missing, without_driver])
def test_where_there_is_no_nvml_there_are_no_cards(load: Callable[[], Any]) -> None:
    inventory = pickle.loads(pickle.dumps(NvmlInventory(load)))
    for _ in range(2):
        assert inventory.devices() == []
        assert inventory.find("0") is inventory.find(FIRST) is inventory.memory_used([0]) is None
        assert inventory.load([0]) == [GpuDevice(index=0)]
        assert not inventory.allocator().is_in_use


def test_what_lasts_is_still_known_when_nvml_fails_in_mid_run() -> None:
    for name in ["UNKNOWN", "DRIVER_NOT_LOADED", "UNINITIALIZED", "TIMEOUT"]:
        nvml = FakeNvml(FakeCard(), FakeCard(uuid=SECOND))
        inventory = NvmlInventory(nvml)
        assert inventory.devices()[0] == WELL
        nvml.broken = error(name)
        for _ in range(2):
            known = {"name": "NVIDIA H200", "compute_capability": (9, 0)}
            left = [
                GpuDevice(index=0, uuid=FIRST, **known),
                GpuDevice(index=1, uuid=SECOND, **known),
            ]
            assert inventory.devices() == left
            assert inventory.find("GPU-11112") == left[1]
            assert inventory.load([0]) == [GpuDevice(index=0)]
            assert inventory.memory_used([0]) is None
        nvml.broken = None
        del nvml.cards[1]  # it came back with one card less
        assert inventory.devices() == [WELL]


def test_a_lost_card_leaves_the_others_as_they_are() -> None:
    lost = FakeCard(uuid=SECOND)
    nvml = FakeNvml(FakeCard(), lost)
    inventory = NvmlInventory(nvml)
    assert inventory.devices()[1].used_bytes == 2 * GIB
    for field in ("memory", "rates", "temperature", "mode", "computing", "mig_mode"):
        setattr(lost, field, error("GPU_IS_LOST"))
    assert inventory.devices() == [
        WELL,
        GpuDevice(index=1, name="NVIDIA H200", uuid=SECOND, compute_capability=(9, 0)),
    ]


FIELDS = [
    ("uuid", {"uuid"}),
    ("name", {"name"}),
    ("memory", {"total_bytes", "used_bytes"}),
    ("rates", {"utilization"}),
    ("temperature", {"temperature_c"}),
    ("mode", {"compute_mode"}),
    ("capability", {"compute_capability"}),
    ("computing", {"processes"}),
    ("mig_mode", {"mig"}),
]


FAILURES = [error("UNKNOWN"), RuntimeError("not of NVML at all"), AttributeError("an old pynvml")]


def test_each_answer_may_fail_alone() -> None:
    for failure in FAILURES:
        for field, unknown in FIELDS:
            nvml = FakeNvml(FakeCard(**{field: failure}))
            assert NvmlInventory(nvml).devices() == [
                GpuDevice(**{**vars(WELL), **dict.fromkeys(unknown)})
            ]


def test_the_real_module_has_all_that_is_asked_for() -> None:
    import pynvml

    from raypool.gpus.nvml import COMPUTE_MODES, NOT_SUPPORTED, TEMPERATURE_OF_GPU

    nvml = FakeNvml(FakeCard(mig_mode=[1, 1], instances={0: "MIG-a"}))
    NvmlInventory(nvml).devices()
    assert [name for name in nvml.asked if not callable(getattr(pynvml, name, None))] == []
    assert (NOT_SUPPORTED, TEMPERATURE_OF_GPU) == (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_TEMPERATURE_GPU,
    )
    assert {
        number: name
        for number, name in COMPUTE_MODES.items()
        if getattr(pynvml, f"NVML_COMPUTEMODE_{name.upper()}") != number
    } == {}
