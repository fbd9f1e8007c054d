"""Cards that do not exist behave as real ones would: for memory, for processes that end, and for
what nobody knows.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from raypool.gpus.devices import GpuDevice, GpuProcess
from raypool.gpus.memory import TorchAllocator, fraction_of, set_fraction
from raypool.gpus.simulated import CONTEXT_BYTES, SimulatedGpus

GIB = 2**30


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    """Two cards of 16 GiB; this process is on the second."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return SimulatedGpus(tmp_path / "gpus", 2)


def used(gpus: SimulatedGpus) -> list[int | None]:
    return [card.used_bytes for card in gpus.devices()]


def test_what_is_allocated_is_seen_on_the_card_by_everybody(
    gpus: SimulatedGpus, tmp_path: Path
) -> None:
    assert used(gpus) == [0, 0]
    tensor = gpus.allocate(3 * GIB)
    assert tensor.num_bytes == gpus.allocator().allocated() == gpus.allocator().peak() == 3 * GIB
    for eyes in (gpus, SimulatedGpus(tmp_path / "gpus"), pickle.loads(pickle.dumps(gpus))):
        assert used(eyes) == [0, 3 * GIB + CONTEXT_BYTES]
    (process,) = gpus.devices()[1].processes or ()
    assert process.used_bytes == 3 * GIB + CONTEXT_BYTES


def test_memory_is_kept_for_later_until_the_cache_is_emptied(gpus: SimulatedGpus) -> None:
    allocator = gpus.allocator()
    allocator.empty_cache()
    assert not allocator.is_in_use  # to ask does not make it so
    assert used(gpus) == [0, 0]
    first, second = gpus.allocate(2 * GIB), gpus.allocate(GIB)
    del first
    assert (allocator.allocated(), allocator.peak(), used(gpus)[1]) == (
        GIB,
        3 * GIB,
        3 * GIB + CONTEXT_BYTES,
    )
    third = gpus.allocate(GIB)  # of what was kept
    assert used(gpus)[1] == 3 * GIB + CONTEXT_BYTES
    allocator.empty_cache()
    allocator.reset_peak()
    assert (allocator.peak(), used(gpus)[1]) == (2 * GIB, 2 * GIB + CONTEXT_BYTES)
    del second, third
    allocator.empty_cache()
    assert used(gpus) == [0, CONTEXT_BYTES]


def test_a_full_card_has_no_more(gpus: SimulatedGpus) -> None:
    gpus.change(1, used_bytes=10 * GIB)
    with pytest.raises(torch.OutOfMemoryError, match="of which"):
        gpus.allocate(6 * GIB)
    tensor = gpus.allocate(6 * GIB - CONTEXT_BYTES)
    assert gpus.devices()[1].free_bytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        gpus.allocate(1)
    assert tensor.num_bytes == gpus.allocator().allocated()  # what failed took nothing


def test_a_process_may_have_a_part_of_its_card(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,per_process_memory_fraction:0.25")
    tensor = gpus.allocate(3 * GIB)
    with pytest.raises(torch.OutOfMemoryError, match="4294967296 are allowed"):
        gpus.allocate(2 * GIB)
    gpus.allocator().limit(1.0)
    more = gpus.allocate(2 * GIB)
    gpus.allocator().limit(0.5)
    with pytest.raises(torch.OutOfMemoryError):
        gpus.allocate(4 * GIB)
    assert tensor.num_bytes + more.num_bytes == gpus.allocator().allocated()


def test_the_environment_is_read_when_the_card_is_first_used(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = gpus.allocator()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.5")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(9 * GIB)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:1.0")
    with pytest.raises(torch.OutOfMemoryError):  # torch reads it once, too
        allocator.allocate(9 * GIB)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.3"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.9, backend:native"},
            {"PYTORCH_CUDA_ALLOC_CONF": " backend:native,per_process_memory_fraction:0.3"},
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"},
            {
                "PYTORCH_CUDA_ALLOC_CONF": "a:1,per_process_memory_fraction:0.3",
                "PYTORCH_ALLOC_CONF": "b:2",
            },
        ),
    ],
)
def test_a_part_is_granted_beside_what_else_is_set(
    before: dict[str, str], after: dict[str, str]
) -> None:
    set_fraction(before, 0.3)
    assert before == after
    assert fraction_of(before) == 0.3


def test_torch_can_be_limited_before_it_uses_cuda() -> None:
    before = len(torch.cuda._queued_calls)
    TorchAllocator().limit(0.5)
    assert len(torch.cuda._queued_calls) == before + 1 or torch.cuda.is_initialized()
    del torch.cuda._queued_calls[before:]
    code = (
        "import os\n"
        "from raypool.gpus.memory import TorchAllocator\n"
        "TorchAllocator().limit(0.5)\n"
        "print(os.environ['PYTORCH_ALLOC_CONF'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "per_process_memory_fraction:0.5"


def test_what_a_process_had_goes_when_it_ends(gpus: SimulatedGpus, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from raypool.gpus.simulated import SimulatedGpus\n"
        f"gpus = SimulatedGpus(Path({str(tmp_path / 'gpus')!r}))\n"
        f"tensor = gpus.allocate({GIB})\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert used(gpus) == [0, GIB + CONTEXT_BYTES]
        process.kill()
        process.stdout.read()  # to its end; now it is a zombie, or about to be one
        process.wait()
        assert used(gpus) == [0, 0]
    assert list((tmp_path / "gpus").glob("held-*")) == []


def test_many_at_once_never_have_more_than_there_is(gpus: SimulatedGpus) -> None:
    had = []

    def take() -> None:
        try:
            had.append(gpus.allocate(GIB))
        except torch.OutOfMemoryError:
            had.append(None)

    threads = [Thread(target=take) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(tensor is not None for tensor in had), had.count(None)) == (15, 5)
    assert used(gpus)[1] == 15 * GIB + CONTEXT_BYTES


def test_a_card_is_as_busy_as_all_its_processes_make_it(gpus: SimulatedGpus) -> None:
    gpus.change(1, utilization=0.5)
    with gpus.computing(0.25):
        assert [card.utilization for card in gpus.devices()] == [0.0, 0.75]
        with gpus.computing(0.5):
            assert gpus.devices()[1].utilization == 1.0
        assert gpus.devices()[1].utilization == 0.75
    assert gpus.devices()[1].utilization == 0.5
    gpus.change(1, utilization=None)
    with gpus.computing(0.25):
        assert gpus.devices()[1].utilization is None


def test_what_others_do_is_said_as_it_is_shown(gpus: SimulatedGpus) -> None:
    others = (GpuProcess(pid=1, used_bytes=GIB), GpuProcess(pid=2))
    gpus.change(0, processes=others, used_bytes=GIB)
    assert gpus.devices()[0].processes == others
    assert gpus.devices()[0].free_bytes == 15 * GIB


def test_a_card_is_found_by_all_its_names(gpus: SimulatedGpus) -> None:
    gpus.change(0, mig=["MIG-1", "MIG-2"])
    first, second = gpus.devices()
    for name, card in (("0", first), ("MIG-2", first), ("1", second), (str(second.uuid), second)):
        assert gpus.find(name) == card
    assert gpus.find("2") is gpus.find("GPU-nobody") is None


def test_nothing_is_known_of_broken_cards(gpus: SimulatedGpus) -> None:
    gpus.break_down()
    assert gpus.devices() == [GpuDevice(index=0), GpuDevice(index=1)]
    assert gpus.memory_used([0]) is None
    assert gpus.load([1]) == [GpuDevice(index=1)]
    tensor = gpus.allocate(GIB)  # they work all the same
    with pytest.raises(torch.OutOfMemoryError):
        gpus.allocate(16 * GIB)
    gpus.break_down(is_broken=False)
    assert gpus.memory_used([0, 1]) == tensor.num_bytes + CONTEXT_BYTES
    assert gpus.memory_used([0, 2]) is None
    busy = GpuDevice(index=1, total_bytes=16 * GIB, used_bytes=GIB + CONTEXT_BYTES, utilization=0.0)
    assert gpus.load([1, 7]) == [busy, GpuDevice(index=7)]


def test_a_machine_that_does_not_see_the_folder_has_no_cards(
    gpus: SimulatedGpus, tmp_path: Path
) -> None:
    (tmp_path / "gpus").rename(tmp_path / "elsewhere")
    assert gpus.devices() == []
    assert gpus.find("0") is gpus.memory_used([0]) is None
    assert gpus.load([0]) == [GpuDevice(index=0)]


def test_a_process_that_sees_no_card_cannot_use_one(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for visible in ["", "-1", "2", "1,1", "GPU-nobody"]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        for use in (lambda: gpus.allocate(1), gpus.computing(0.5).__enter__):
            with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
                use()
        assert not gpus.allocator().is_in_use


def test_a_card_is_the_same_by_index_and_uuid(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{gpus.devices()[1].uuid},0")
    tensor = gpus.allocate(GIB)
    gpus.break_down()
    more = gpus.allocate(GIB)  # what nobody can ask for is still so
    gpus.break_down(is_broken=False)
    assert used(gpus) == [0, tensor.num_bytes + more.num_bytes + CONTEXT_BYTES]


def test_a_card_of_which_little_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = SimulatedGpus(tmp_path, [GpuDevice(index=0, name="A card")])
    assert gpus.allocate(64 * GIB).num_bytes == 64 * GIB
    assert gpus.devices() == [GpuDevice(index=0, name="A card")]
    gpus.change(0, total_bytes=16 * GIB)
    assert gpus.devices()[0].total_bytes == 16 * GIB


def test_whoever_tests_pools_has_them_at_hand() -> None:
    from raypool import testing

    assert testing.SimulatedGpus is SimulatedGpus
    assert testing.GpuDevice is GpuDevice
