"""The table of a pool's GPUs (`pool.device_table`): their state, workers, and running tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from raypool.channel.records import NodeDevices
from raypool.core.model import WorkerState
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
    rows = []
    for node in nodes:
        workers = sorted(
            (worker for worker in node.workers if worker.index in shown),
            key=lambda worker: worker.index,
        )
        for card in _cards(node) if workers else ():
            on_it = tuple(worker.index for worker in workers if card.index in worker.gpus)
            texts = tuple(running.get(index) for index in on_it)
            row = devices.row_of(card)
            rows.append({"host": node.host, **row, "workers": on_it, "running": texts})
    return devices.frame_of(rows, COLUMNS)


def _cards(node: NodeDevices) -> Sequence[GpuDevice]:
    # those that its workers reported at their start, if the machine does not answer now
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


def running(driver: Driver) -> dict[int, str]:
    """Return what each worker runs now, by number."""
    found: dict[int, str] = {}

    def look() -> None:
        for worker in driver.scheduler.workers.by_id.values():
            if worker.state is WorkerState.BUSY:
                attempt = next(iter(worker.attempts.values()))  # what follows it only waits
                piece, *others = attempt.slices
                work = driver.works.get(piece.task_id)
                found[worker.place] = (
                    "a cancelled task"
                    if work is None
                    else work.describe(piece) + (f" and {len(others)} more" if others else "")
                )

    if driver.is_own_thread:
        look()
    else:  # in the driver's thread: no other may look into the scheduler
        driver.do(look)
        driver.barrier()
    return found
