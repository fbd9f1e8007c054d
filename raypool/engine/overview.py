"""The table of a pool's GPUs (`pool.device_table`): their state, workers, and what these run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raypool.channel.records import NodeDevices, WorkerInfo
from raypool.core.model import Attempt, WorkerState
from raypool.engine.driver import Driver
from raypool.gpus import table as devices
from raypool.gpus.devices import GpuDevice

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {"host": "string", **devices.COLUMNS, "workers": "object", "running": "object"}
"""Of `PoolView.device_table`, with their kinds."""


def device_table(
    nodes: Iterable[NodeDevices], running: dict[int, str], shown: Collection[int]
) -> pd.DataFrame:
    """Return a table with a row for each GPU.

    Args:
        nodes: The machines; those without any of the workers that are shown are left out.
        running: What workers run, by number.
        shown: The numbers of the workers that the table is for.
    """
    rows = [
        _row(node.host, card, [worker for worker in node.workers if worker.index in shown], running)
        for node in nodes
        if any(worker.index in shown for worker in node.workers)
        for card in _cards(node)
    ]
    return devices.frame_of(rows, COLUMNS)


def _cards(node: NodeDevices) -> Sequence[GpuDevice]:
    if node.cards is not None:
        return node.cards
    known: dict[int, GpuDevice] = {}
    for worker in node.workers:
        uuids: Sequence[str | None] = (
            worker.gpu_uuids
            if len(worker.gpu_uuids) == len(worker.gpus)
            else (None,) * len(worker.gpus)
        )
        known |= {
            gpu: GpuDevice(index=gpu, name=worker.gpu_name, uuid=uuid)
            for gpu, uuid in zip(worker.gpus, uuids, strict=True)
        }
    return [known[gpu] for gpu in sorted(known)]


def _row(
    host: str, card: GpuDevice, workers: Sequence[WorkerInfo], running: dict[int, str]
) -> dict[str, Any]:
    on_it = [worker.index for worker in workers if card.index in worker.gpus]
    texts = tuple(running.get(index) for index in on_it)
    return {"host": host, **devices.row_of(card), "workers": tuple(on_it), "running": texts}


def running(driver: Driver) -> dict[int, str]:
    """Return what each worker runs now, by number."""
    found: dict[int, str] = {}

    def look() -> None:
        for worker in driver.scheduler.workers.by_id.values():
            if worker.state is WorkerState.BUSY:
                attempt = next(iter(worker.attempts.values()))  # what follows it only waits
                found[worker.place] = _described(driver, attempt)

    if driver.is_own_thread:
        look()
    else:
        driver.do(look)
        driver.barrier()
    return found


def _described(driver: Driver, attempt: Attempt) -> str:
    piece, *others = attempt.slices
    work = driver.works.get(piece.task_id)
    if work is None:
        return "something that was cancelled"
    return work.describe(piece) + (f" and {len(others)} more" if others else "")
