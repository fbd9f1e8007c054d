"""The managed lane: Ray Train's own controller, its workers guests of the pool's.

Imports Ray Train, and with it torch: it is imported by the verb only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypool.engine import packing
from raypool.engine.backend import function_name
from raypool.engine.engine import Engine
from raypool.options import Options
from raypool.train.guests import num_required
from raypool.train.plan import Plan
from raypool.train.trainers import check_trainer
from raypool.train.visit import ManagedAttempt, Visit


class ManagedLane:
    """Runs a training's ranks as workers of Ray Train's.

    Args:
        engine: The pool's.
        loop: The training loop.
        config: What it is called with.
        trainer: A class of Ray Train's trainers; None for `TorchTrainer`.
        datasets: Data sets of Ray Data's, by name, for `ray.train.get_dataset_shard`.
        release_workers: Whether the pool's processes are to be ended first, so that their memory is free.

    Raises:
        InvalidTypeError: The workers of such a trainer cannot be guests; or the loop takes several arguments.
        SerializationError: The loop or its configuration cannot be sent; it names the variable.
    """

    def __init__(
        self,
        engine: Engine,
        loop: Callable[..., Any],
        config: Any,
        trainer: Any = None,
        datasets: Mapping[str, Any] | None = None,
        release_workers: bool = False,
    ) -> None:
        num_required(loop)
        self.engine = engine
        self.loop = loop
        self.trainer = check_trainer(trainer)
        self.datasets = datasets
        self.release_workers = release_workers
        name = function_name(loop)
        self.packed = packing.pack((loop, config), f"the loop {name} and its config")

    def begin(self, plan: Plan, size: int, places: tuple[int, ...] | None, options: Options) -> ManagedAttempt:
        """Start an attempt; its result is a `RankEnd` for each rank, and its failure an `SpmdError` where ranks have failed."""
        self.engine.check_open()  # what is handed in to a pool that is being closed would be cancelled
        return Visit(self, plan, size, options).begin(places)
