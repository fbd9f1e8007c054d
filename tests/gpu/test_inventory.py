"""On a real GPU: what NVML tells agrees with CUDA, without touching CUDA, and quickly. `pytest -m
gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest

from raypool import gpu_device_count, gpu_device_table
from raypool.gpus.devices import visible_gpus
from raypool.gpus.nvml import NvmlInventory

pytestmark = [pytest.mark.gpu]

LOOK = """
import json
import torch
from raypool import gpu_device_count, gpu_device_table
before = gpu_device_table(), gpu_device_count(), gpu_device_count("all")
is_untouched = not torch.cuda.is_initialized()
here = torch.ones(2**28, device="cuda")
seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
table = gpu_device_table()
mine = table[table["uuid"] == f"GPU-{seen[0].uuid}"].iloc[0]
print(json.dumps({
    "is_untouched": is_untouched,
    "count": before[1],
    "devices": [[f"GPU-{card.uuid}", card.name, [card.major, card.minor]] for card in seen],
    "selected": table.loc[table["is_selected"], "uuid"].tolist(),
    "grown": int(mine["used_bytes"] - before[0].set_index("uuid").loc[mine["uuid"], "used_bytes"]),
}))
"""

COUNT = """
import json
import torch
count = torch._C._cuda_getDeviceCount()
print(json.dumps([f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]))
"""


@pytest.fixture(autouse=True)
def needs_a_whole_gpu() -> None:
    cards = NvmlInventory().devices()
    if not cards:
        pytest.skip("no GPU")
    if any(card.mig for card in cards):
        pytest.skip("a GPU is divided: CUDA shows a process its first instance only")


def said(program: str, **environ: str | None) -> Any:
    """Run a program in a process with this environment; return what it prints last."""
    full = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=full,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_nvml_and_cuda_tell_the_same_and_cuda_is_not_touched() -> None:
    seen = said(LOOK, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    cards = {card.uuid: card for card in NvmlInventory().devices()}
    assert seen["is_untouched"]
    assert seen["count"] == len(seen["devices"])
    assert seen["selected"] == [uuid for uuid, *_ in seen["devices"]]
    for uuid, name, capability in seen["devices"]:
        assert (cards[uuid].name, cards[uuid].compute_capability) == (name, tuple(capability))
    assert seen["grown"] >= 2**30  # the tensor, and CUDA's own memory


def test_the_load_is_that_of_the_card() -> None:
    inventory = NvmlInventory()
    cards = inventory.devices()
    for card, load in zip(cards, inventory.load([card.index for card in cards]), strict=True):
        assert load.total_bytes == card.total_bytes
        assert load.utilization is None or 0 <= load.utilization <= 1
        assert inventory.find(str(card.uuid)) is not None


def test_the_environment_is_read_as_cuda_reads_it() -> None:
    cards = NvmlInventory().devices()
    first, last = str(cards[0].uuid), str(cards[-1].uuid)
    texts = [
        "",
        "-1",
        "0",
        "0,0",
        "0,-1",
        "0,99",
        "99,0",
        " 0",
        "0 ",
        "0gpu",
        "x",
        first,
        f"{first},{first}",
        f"{first},GPU-nobody",
    ]
    texts += [last[:12], f"{len(cards) - 1},0", f"{first},0", f"0,{first}", "GPU-nobody"]
    environs = [{"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for text in texts]
    with ThreadPoolExecutor(8) as threads:  # each process takes seconds to start
        cudas = threads.map(lambda environ: said(COUNT, **environ), environs)
        wrong = {
            environ["CUDA_VISIBLE_DEVICES"]: (ours, theirs)
            for environ, theirs in zip(environs, cudas, strict=True)
            if (
                ours := [
                    cards[gpu.index].uuid
                    for gpu in visible_gpus(environ, cards)
                    if gpu.index is not None
                ]
            )
            != theirs
        }
    assert wrong == {}


def test_the_inventory_takes_less_than_50_ms() -> None:
    inventory, times_s = NvmlInventory(), []
    for _ in range(20):
        started = time.perf_counter()
        inventory.devices()
        times_s.append(time.perf_counter() - started)
    assert median(times_s) < 0.05, sorted(times_s)


def test_the_table_has_a_row_for_each_card() -> None:
    table = gpu_device_table()
    assert len(table) == gpu_device_count("all")
    known = [
        "name",
        "uuid",
        "total_bytes",
        "used_bytes",
        "compute_mode",
        "compute_capability",
        "mig",
        "is_selected",
    ]
    assert not table[known].isna().any(axis=None)
