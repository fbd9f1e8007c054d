"""The managed lane in Ray Train's own processes: ranks, controller hooks, and a coordinator.

This module imports Ray Train, and with it torch. It is used in these processes, and by `managed`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import platform
import time
import uuid
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint

from raypool.backends.ray.packing import Packed, pack_error, snapshot, unpack
from raypool.channel import capture
from raypool.channel.hub import Outbox
from raypool.errors import CollectiveError, InvalidValueError, did_you_mean
from raypool.ray_private import (
    ControllerCallback,
    DistributedTrainFnUtils,
    ReportCallback,
    WorkerGroupCallback,
    device_manager,
    set_train_fn_utils,
)
from raypool.spmd.failures import is_disconnect
from raypool.spmd.wire import ordinal
from raypool.train.checkpoints import (
    TrainingAttempt,
    add_reports,
    forget_deleted,
    next_index,
    note_down,
)
from raypool.train.ray_train import checked
from raypool.worker.running import (
    TaskContext,
    let_notes_travel,
    running,
    this_process,
)

TASK = 0
"""The task number under which the ranks' output reaches the pool."""

DRAIN_TIMEOUT_S = 5.0

CULPRIT_S = 1.0
"""A rank whose connection broke waits this long before it fails [s].

Ray Train names the rank that fails first, which should be the one that broke the connection."""


class Coordinator:
    """An actor without resources: passes messages to the pool, and lets ranks meet at reports."""

    def __init__(self) -> None:
        self._messages: list[tuple[Any, ...]] = []
        # an actor with async methods has one thread, so this is only to wait with
        self._changed = asyncio.Condition()
        self._should_stop = False
        self._num_reports: dict[int, int] = {}  # by rank
        self._returned: set[int] = set()
        self._stops: list[bool] = []  # by report: whether all ranks were told to stop

    async def send(self, *message: Any) -> None:
        """Leave a message for the pool."""
        async with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    async def receive(self) -> list[tuple[Any, ...]]:
        """Wait for messages, and take them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._messages)
            messages, self._messages = self._messages, []
            return messages

    async def ask_to_stop(self) -> None:
        """Ask for an early end; the ranks learn of it at their next report."""
        self._should_stop = True

    async def begin_group(self) -> None:
        """Note that all ranks begin, perhaps again."""
        self._num_reports, self._returned, self._stops = {}, set(), []

    async def begin(self, rank: int, host: str, pid: int, gpus: tuple[int, ...]) -> bool:
        """Note a rank's identity; return whether an early end is wanted."""
        if not self._stops:  # the first rank asks, and the answer is the same for all
            self._stops.append(self._should_stop)
        await self.send("rank", rank, host, pid, gpus)
        return self._stops[0]

    async def end(self, rank: int, value: bytes, metrics: dict[str, Any] | None) -> None:
        """Take a rank's return value; ranks that wait for it in a report stop waiting."""
        self._returned.add(rank)
        await self.send("end", rank, value, metrics)

    async def meet(self, rank: int, size: int) -> tuple[bool, list[int]]:
        """Wait for all ranks at a report; return whether to stop, and who has returned."""
        async with self._changed:
            number = self._num_reports[rank] = self._num_reports.get(rank, 0) + 1
            if sum(count >= number for count in self._num_reports.values()) == size:
                self._stops.append(self._should_stop)
                self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._stops) > number or self._missing(number))
            missing = [] if len(self._stops) > number else self._missing(number)
            return not missing and self._stops[number], missing

    def _missing(self, number: int) -> list[int]:
        return sorted(rank for rank in self._returned if self._num_reports.get(rank, 0) < number)


class ControllerHooks(
    ControllerCallback,  # type: ignore[misc]  # Ray is not typed
    WorkerGroupCallback,  # type: ignore[misc]
    ReportCallback,  # type: ignore[misc]
):
    """Callbacks of Ray Train's controller, in its own process.

    `run_dir`: the folder of the run; None if its checkpoints are in other storage.
    """

    def __init__(self, coordinator: Any, run_dir: str | None, plan: TrainingAttempt) -> None:
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._name, self._attempt = plan.name, plan.attempt

    def after_controller_start(self, train_run_context: Any) -> None:
        """Send the controller's handle to the pool, which can abort it by this."""
        ray.get(
            self._coordinator.send.remote("controller", ray.get_runtime_context().current_actor)
        )

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Say that all ranks begin."""
        ray.get(self._coordinator.begin_group.remote())

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Note a checkpoint that Ray Train has kept, so that the run can resume in either lane."""
        if training_report.checkpoint is not None and self._run_dir is not None:
            add_reports(self._run_dir, self._name, [(time.time(), self._attempt, metrics[0])])
            note_down(
                Path(training_report.checkpoint.path),
                next_index(self._run_dir),
                metrics[0],
                self._attempt,
            )
            forget_deleted(self._run_dir)


class ManagedLoop:
    """The user's loop, packed with its configuration, as Ray Train calls it in each rank."""

    def __init__(self, packed: Packed, coordinator: Any, plan: TrainingAttempt) -> None:
        self._packed = packed
        self._coordinator = coordinator
        self._plan = plan

    def __call__(self) -> None:
        """Run the loop; its output, its return value and its error go into the coordinator."""
        coordinator, rank = self._coordinator, ray.train.get_context().get_world_rank()
        # Ray says a GPU's UUID where CUDA_VISIBLE_DEVICES does
        gpus = tuple(int(gpu) if str(gpu).isdecimal() else 0 for gpu in ray.get_gpu_ids())
        should_stop = ray.get(coordinator.begin.remote(rank, platform.node(), os.getpid(), gpus))
        key = uuid.uuid4().int
        # `get`: the next batch is sent when this one has arrived, so they stay in order
        outbox = Outbox(
            lambda number, batch: ray.get(coordinator.send.remote("batch", key, number, batch))
        )
        gpu = gpus[0] if gpus else None
        note = TaskContext(
            rank,
            self._plan.attempt,
            None,
            rank,
            gpu,
            self._plan.name,
            TASK,
            should_stop,
            outbox.say,
        )
        note.agreed_stop = should_stop
        _become_worker(note)
        utils = _Utils(coordinator, self._plan, note)
        set_train_fn_utils(utils)
        try:
            loop, config = unpack(self._packed)
            try:
                inspect.signature(loop).bind()
            except TypeError:  # as Ray Train does: a loop that needs it gets the configuration
                loop = functools.partial(loop, {} if config is None else config)
            value = snapshot(loop(), f"what rank {rank} returns back")
        except BaseException as error:
            is_cut_off, at = is_disconnect(error), time.time()  # before anything that takes time
            capture.note_last_lines(error, note)
            outbox.drain(DRAIN_TIMEOUT_S)
            ray.get(coordinator.send.remote("failure", rank, is_cut_off, pack_error(error), at))
            if is_cut_off:
                time.sleep(CULPRIT_S)
            raise
        outbox.drain(DRAIN_TIMEOUT_S)
        ray.get(coordinator.end.remote(rank, value, utils.metrics))


def _become_worker(note: TaskContext) -> None:
    """Let user code find here what it finds in a worker of the pool."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it logs each report, into the diary
    this_process.is_worker = True
    let_notes_travel()
    capture.install()
    this_process.running = note
    running.set(note)
    # simulated GPUs, in a test
    if note.gpu is not None and not torch.version.cuda and not torch.version.hip:
        # private: else it would say "cuda:0"
        device_manager._torch_device_manager = device_manager.CPUTorchDeviceManager()


class _Utils(DistributedTrainFnUtils):  # type: ignore[misc]
    """The functions of `ray.train` in a rank: Ray's, with an agreement on stopping in `report`."""

    def __init__(self, coordinator: Any, plan: TrainingAttempt, note: TaskContext) -> None:
        self._coordinator = coordinator
        self._plan = plan
        self._note = note
        self._num_reports = 0
        self.metrics: dict[str, Any] | None = None

    def report(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Agree with the other ranks, then report."""
        metrics = checked(metrics)
        context, note = self.get_context(), self._note
        self._num_reports += 1
        rank = context.get_world_rank()
        should_stop, missing = ray.get(
            self._coordinator.meet.remote(rank, context.get_world_size())
        )
        if missing:
            raise CollectiveError(
                f"Rank {rank} is in its {ordinal(self._num_reports)} ray.train.report, but rank"
                f" {missing[0]} has returned. All ranks must report equally often.",
                missing=tuple(missing),
            )
        note.should_stop = note.agreed_stop = should_stop or note.should_stop
        self.metrics = metrics
        if rank == 0:
            note.say(note, "metrics", (time.time(), metrics))
        self._check_rated(args[0] if args else kwargs.get("checkpoint"), metrics)
        super().report(metrics, *args, **kwargs)

    def _check_rated(self, checkpoint: Any, metrics: dict[str, Any]) -> None:
        """Refuse a checkpoint without the metric by which the best are kept."""
        # Ray Train would delete it, and the metric's name may be misspelled
        wanted, keep = self._plan.best_metric, self._plan.keep
        if checkpoint is not None and keep is not None and wanted not in {None, *metrics}:
            raise InvalidValueError(
                f"A checkpoint was reported without best_metric={wanted!r}."
                f"{did_you_mean(str(wanted), metrics)} Report it with each checkpoint:"
                f" keep_checkpoints={keep} keeps the best."
            )

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint of this run, or the one to begin with."""
        last, start = super().get_checkpoint(), self._plan.start
        return Checkpoint.from_directory(start) if last is None and start is not None else last
