"""The managed lane: Ray Train runs the training, on the resources of the pool's workers.

A loan (a gang whose ranks are never called) waits for the workers and ends their processes. Their
claims go back to Ray, where Ray Train's own placement finds them. `fit` runs in a thread.
Afterwards the pool claims the same GPUs again, and starts its workers. Importing Ray Train imports
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import logging
import os
import pickle
import platform
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow.fs
import ray
import ray.data
import ray.train
import torch
import torch.distributed as dist
from ray import exceptions as rx
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raypool.backends.ray import shortages
from raypool.backends.ray.backend import RayBackend
from raypool.backends.ray.calls import UNRECORDED, given_gpus, later, loss_reason, loss_text
from raypool.backends.ray.fork_server import prepare_successors
from raypool.backends.ray.packing import Packed, pack, pack_error, snapshot, unpack, unpack_failure
from raypool.channel import capture
from raypool.channel.hub import Hub, Outbox
from raypool.channel.records import NOBODY, WorkerInfo, function_name, where
from raypool.channel.users_code import Follower, Snapshot
from raypool.core.messages import PlaceLost
from raypool.core.model import Slice, TaskState
from raypool.engine import explanations
from raypool.engine.engine import Engine, say
from raypool.engine.work import described
from raypool.errors import (
    CollectiveError,
    InternalError,
    InvalidTypeError,
    InvalidValueError,
    LossReason,
    PoolClosedError,
    RankInterrupted,
    ResourceError,
    SpmdError,
    TaskError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
    did_you_mean,
)
from raypool.futures import Future
from raypool.options import Options
from raypool.profiles import for_ray
from raypool.ray_private import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,
    ControllerCallback,
    DistributedTrainFnUtils,
    ReportCallback,
    WorkerGroupCallback,
    device_manager,
    set_train_fn_utils,
)
from raypool.spmd.call import SpmdFuture, SpmdWork, submit_gang
from raypool.spmd.failures import RankFailure, is_disconnect, joint_error, spmd_error
from raypool.spmd.wire import ordinal
from raypool.train.checkpoints import (
    RankEnd,
    TrainingAttempt,
    add_reports,
    check_name,
    forget_deleted,
    latest,
    next_index,
    note_down,
    plain_metrics,
    ranked,
)
from raypool.train.ray_train import checked, with_config
from raypool.train.runs import RunOptions, TrainingResult
from raypool.worker.runner import finished
from raypool.worker.running import (
    TaskContext,
    let_notes_travel,
    running,
    this_process,
)

ABORT_S = 3.0
"""The time for the controller to end by itself [s]: it is deaf while it starts its workers."""

LAST_MESSAGES_S = 5.0

CORES_S = 5.0
"""The time that Ray may take to notice returned cores [s]."""

POLL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
POLL_S = "0.1"
"""The interval at which Ray Train's controller polls its ranks [s].

Ray's default of 2 s would delay each report, and the end, by as much."""

IN_RANKS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as in the pool's workers; CUDA counts the fastest first
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # raypool captures printed text for the diary
    # likewise; a loop logs as in a worker of the pool's
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}

LEFT_OUT = ("PlacementGroupCleanerCallback", "WorkingDirectorySetupCallback")
"""Callbacks of Ray Train that are left out.

The first starts a detached actor that cleans up after a dead controller. It needs Ray's dashboard,
and stays forever without one; raypool cleans up itself. The second would move a loop from the
folder of the pool's workers into one of Ray's."""

_marks = itertools.count(1)


class ManagedLane:
    """Runs a training's ranks by a class of Ray Train's trainers, `TorchTrainer` if None is given.

    `kept`: where checkpoints are kept. `given`: the other arguments of the trainer.
    """

    def __init__(
        self,
        engine: Engine,
        loop: Callable[..., Any],
        config: Any,
        kept: RunOptions,
        trainer: Any,
        given: Mapping[str, Any],
    ) -> None:
        self.engine = engine
        self.backend = cast("RayBackend", engine.backend)
        self.kept = kept
        self.trainer = _checked_trainer(trainer, given)
        self.given = dict(given)
        self.scaling = self.given.pop("scaling_config", None) or ScalingConfig()
        self.running = self.given.pop("run_config", None)
        self.result: Result | None = None  # Ray Train's own, of the last attempt
        _check_configs(self.scaling, self.running, kept)
        # without them the GPUs are simulated, and Ray Train would choose NCCL for them
        has_cards = dist.is_nccl_available() or any(worker.gpu_name for worker in engine.workers())
        if not has_cards and "torch_config" in inspect.signature(self.trainer).parameters:
            self.given.setdefault("torch_config", TorchConfig(backend="gloo"))
        if engine.profile.workers_per_gpu == "auto" or any(
            each.workers_per_claim > 1 for each in self.backend.demands
        ):
            raise InvalidValueError(
                'lane="managed" gives whole GPUs to Ray Train, but the workers of this pool share'
                ' theirs. Use lane="warm", or a pool with one worker per GPU.'
            )
        self.packed = pack((loop, config), f"the loop {function_name(loop)} and its config")
        self.project = engine.project()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the user has named other storage than a folder of this machine's."""
        return self.running is not None and _has_storage(self.running)

    def begin(
        self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options
    ) -> Future[Any]:
        """Start an attempt; its result is a `RankEnd` for each rank."""
        self.engine.check_open()  # a pool that is being closed would cancel the attempt
        others = self.engine.driver.scheduler.workers.size - size  # these keep their cores
        cores = ray.cluster_resources().get("CPU", 0.0) - others * self.bundle().get("CPU", 0.0)
        self.check_cores(size, cores)
        return ManagedAttempt(self, plan, size, options).begin(places)

    def check_cores(self, size: int, there: float) -> None:
        """Raise a `ResourceError` unless Ray Data gets one of `there` free cores."""
        taken = size * self.bundle().get("CPU", 0.0)
        # Ray Data would wait for a core, silently and forever
        if self.given.get("datasets") and there - taken < 1:
            raise ResourceError(
                f"CPU: requested {taken + 1:g}, available {there:g}: the ranks take {taken:g}, and"
                " Ray Data needs one more to read datasets=, and would wait for it silently."
                " Train with fewer ranks (workers=...), request less for each"
                " (resources=WorkerResources(cpus=0.5)), or open a smaller pool."
                f" {shortages.held_by(())}",
                requested=taken + 1,
                available=there,
                holders=shortages.holders(),
            )

    def bundle(self) -> dict[str, float]:
        """Return the resources of each rank: the least that any worker has."""
        bundles = [demand.bundle for demand in self.backend.demands]
        least = {name: min(bundle.get(name, 0.0) for bundle in bundles) for name in bundles[0]}
        return {name: amount for name, amount in least.items() if amount}

    def finish(self, result: TrainingResult) -> TrainingResult:
        """Add the checkpoints that are kept in other storage to a result."""
        if not self.is_elsewhere or self.result is None:
            return result
        metric, mode = self.kept.best_metric, self.kept.best_mode
        best = None if metric is None else self.result.get_best_checkpoint(metric, mode)
        return replace(result, checkpoint=self.result.checkpoint, best_checkpoint=best)

    def make_trainer(
        self, plan: TrainingAttempt, size: int, bundle: dict[str, float], coordinator: Any
    ) -> Any:
        """Return a trainer for `size` ranks, each of which asks Ray for `bundle`."""
        running = self.running or RunConfig()
        run_dir, keep = Path(plan.run_dir), CheckpointConfig()
        labels = dict(
            set.intersection(*({*demand.labels.items()} for demand in self.backend.demands))
        )
        least = self.kept.min_workers or size
        scaling = replace(
            self.scaling,
            num_workers=(least, size) if least < size else size,
            use_gpu=bundle.get("GPU", 0) > 0,
            resources_per_worker=bundle,
            label_selector=self.scaling.label_selector or for_ray(labels) or None,
        )
        if plan.keep is not None or plan.best_metric is not None:
            keep = CheckpointConfig(plan.keep, plan.best_metric, cast("Any", plan.best_mode))
        environment = {  # the user's own variables come last, and win
            **IN_RANKS,
            **self.engine.profile.worker_env,
            **running.worker_runtime_env.get("env_vars", {}),
        }
        hooks = ControllerHooks(coordinator, None if self.is_elsewhere else plan.run_dir, plan)
        changed: dict[str, Any] = {
            "callbacks": [*running.callbacks, hooks],
            "worker_runtime_env": {**running.worker_runtime_env, "env_vars": environment},
        }
        if not self.is_elsewhere:
            changed |= {"name": run_dir.name, "storage_path": str(run_dir.parent)}
        if running.checkpoint_config == CheckpointConfig():
            changed["checkpoint_config"] = keep
        if running.failure_config == FailureConfig():  # further attempts are the pool's
            changed["failure_config"] = FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            )
        if running.logging_config == LoggingConfig():
            changed["logging_config"] = LoggingConfig(log_level="ERROR")
        made = self.trainer(
            ManagedLoop(self.packed, self.project, coordinator, plan),
            scaling_config=scaling,
            run_config=replace(running, **changed),
            **self.given,
        )
        make = made._create_default_callbacks  # private: there is no public way
        made._create_default_callbacks = lambda: [
            each for each in make() if type(each).__name__ not in LEFT_OUT
        ]
        return made


def _checked_trainer(trainer: Any, given: Mapping[str, Any]) -> type[Any]:
    """Return the class of trainer to use; it takes these arguments."""
    made = TorchTrainer if trainer is None else trainer
    if not (isinstance(made, type) and issubclass(made, DataParallelTrainer)):
        raise InvalidTypeError(
            f"trainer={trainer!r} is not a class of Ray Train's trainers. Pass one that is derived"
            " from its DataParallelTrainer, such as ray.train.tensorflow.TensorflowTrainer."
        )
    taken = [
        name
        for name in inspect.signature(made).parameters
        if name not in ("train_loop_per_worker", "train_loop_config")
    ]
    if unknown := [name for name in given if name not in taken]:
        raise InvalidTypeError(
            f"{made.__name__} does not take {', '.join(unknown)}. It takes {', '.join(taken)}."
        )
    datasets = given.get("datasets", {})
    is_dict = isinstance(datasets, Mapping)
    wrong = [
        f"a {type(value).__name__}"
        for value in (datasets.values() if is_dict else [datasets])
        if not (is_dict and (isinstance(value, ray.data.Dataset) or callable(value)))
    ]
    if datasets is not None and wrong:
        kinds = f"a dict with {', '.join(wrong)} in it" if is_dict else wrong[0]
        raise InvalidTypeError(
            f"datasets= is {kinds}. Pass a dict of Ray Data datasets, by their names for"
            ' ray.train.get_dataset_shard: {"train": ray.data.read_parquet(...)}.'
        )
    return made


def _has_storage(running: RunConfig) -> bool:
    return (
        running.storage_filesystem is not None or running.storage_path != RunConfig().storage_path
    )


def _check_configs(scaling: ScalingConfig, running: RunConfig | None, kept: RunOptions) -> None:
    """Refuse settings of a wrong type, and those that are given twice."""
    for given, kind in ((scaling, ScalingConfig), (running or RunConfig(), RunConfig)):
        if not isinstance(given, kind):
            raise InvalidTypeError(
                f"{given!r} is a {type(given).__name__}. Pass a ray.train.{kind.__name__}."
            )
    if (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker) != (1, False, None):
        raise InvalidValueError(
            "scaling_config= sets the number of ranks or their resources, and so does the pool."
            " Leave num_workers, use_gpu and resources_per_worker out; use workers=, and"
            " RunOptions(min_workers=...) for an elastic number."
        )
    if running is None:
        return
    if kept.run_dir is not None and _has_storage(running):
        raise InvalidValueError(
            f"Both run_dir={kept.run_dir} and run_config= say where the training is kept. Leave"
            " run_dir out, or storage_path and storage_filesystem."
        )
    has_own = running.checkpoint_config != CheckpointConfig()
    if has_own and (kept.keep_checkpoints, kept.best_metric) != (None, None):
        raise InvalidValueError(
            "Both RunOptions and run_config= say which checkpoints are kept. Leave keep_checkpoints"
            " and best_metric out, or checkpoint_config."
        )


# --- one attempt ----------------------------------------------------------------------------------


class LoanWork(SpmdWork):
    """The task that holds the workers' places; passes worker ids and workers to `lent`."""

    def __init__(
        self, lent: Callable[[Sequence[tuple[int, WorkerInfo]] | None], object], *args: Any
    ) -> None:
        super().__init__(*args)
        self._lent = lent

    def assemble(self, members: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Pass the workers on, by rank."""
        super().assemble(members)
        self._lent(members)

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Pass None on: no workers come any more."""
        super().end(state, error)
        self._lent(None)

    def outcome(self, members: Sequence[tuple[int, WorkerInfo]], answers: Sequence[Any]) -> Any:
        """Return None: the ranks deliver the training's outcome."""


class ManagedAttempt:
    """One attempt of a training: a thread for `fit`, and one for the messages of the ranks."""

    def __init__(
        self, managed: ManagedLane, plan: TrainingAttempt, size: int, options: Options
    ) -> None:
        self._managed = managed
        self._plan = plan
        self._size = size
        self._options = options
        self._future = SpmdFuture(plan.name, on_ask=lambda _: self._hear())
        self._hub = Hub()
        self._hub.watch(TASK, self._future)
        bundle = managed.bundle()
        # a few bytes of memory mark the placement groups of this attempt: they have no name
        self._bundle = {**bundle, "memory": bundle.get("memory", 0.0) + next(_marks)}
        self._loan: Future[Any]
        self._coordinator: Any = None
        self._controller: Any = None
        self._has_all_messages = threading.Event()
        self._workers: dict[int, WorkerInfo] = {}
        self._ends: dict[int, RankEnd] = {}
        self._failures: dict[int, tuple[bool, bytes, float]] = {}
        self._outcome: Any = None  # the return value of `fit`, or its exception
        self._is_lent = False
        self._is_ending = False
        self._is_late = False

    def begin(self, places: tuple[int, ...] | None) -> SpmdFuture:
        """Request the workers; return the future of the attempt."""
        engine = self._managed.engine
        lent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loan = submit_gang(
            engine,
            engine.function(id),  # nobody calls it
            (),
            # its time starts once all workers are free
            replace(self._options, timeout_s=None, name=self._plan.name),
            self._size,
            places,
            is_loan=True,
            kind=functools.partial(LoanWork, lent.put),
        )
        self._loan.whole = self._future
        self._loan.add_done_callback(lambda _: self._on_loan_over())
        thread = threading.Thread(
            target=self._run, args=(lent,), name=f"raypool-managed-{self._plan.name}", daemon=True
        )
        engine.helpers.add(thread)  # the end of the pool waits for it
        thread.start()
        return self._future

    def _on_loan_over(self) -> None:
        if self._loan.cancelled():  # by the user, or by the end of the pool
            self._future.cancel()
        elif self._loan.exception() is not None:  # the pool's nodes are about to go
            self._end()

    def _run(self, lent: queue.SimpleQueue[Any]) -> None:
        members = lent.get()
        if members is not None:
            try:
                if self._future.start():
                    self._future.started_at, self._future.attempts = datetime.now(UTC), 1
                    self._train([worker for _, worker in members])
            except BaseException as error:
                self._outcome = error
            self._return(members)
        self._resolve()

    def _train(self, workers: Sequence[WorkerInfo]) -> None:
        managed, plan = self._managed, self._plan
        self._is_lent = True  # first: what was lent before an error is taken back, too
        managed.backend.lend([worker.index for worker in workers])
        if not ray.is_initialized():  # a call to Ray would start a new cluster
            raise PoolClosedError("Ray was shut down before the training began.")
        if not managed.engine.profile.quiet:
            numbers = ", ".join(map(str, sorted(worker.index for worker in workers)))
            say(
                f"{plan.name} uses the GPUs or cores of"
                f" worker{'s' * (len(workers) > 1)} {numbers}. Their processes were stopped, and"
                " their constants and Composites are gone. They restart when the training ends;"
                " other tasks for them wait until then."
            )
        self._await_cores()
        self._coordinator = (
            # one concurrent call for each rank that waits in `meet`, and some more
            ray.remote(Coordinator).options(num_cpus=0, max_concurrency=1000, **UNRECORDED).remote()
        )
        threading.Thread(
            target=self._take_messages, name=f"raypool-messages-{plan.name}", daemon=True
        ).start()
        timer = None
        try:
            if self._options.timeout_s is not None:
                timer = later(self._options.timeout_s, functools.partial(self._end, is_late=True))
            self._hear()  # a wish from before the coordinator existed
            if self._is_ending:
                return
            os.environ.setdefault(POLL, POLL_S)  # Ray Train passes it to its controller
            if not managed.is_elsewhere:
                tell_ray(plan)
            trainer = managed.make_trainer(plan, self._size, self._bundle, self._coordinator)
            managed.result = self._outcome = trainer.fit()
        except BaseException as error:
            self._outcome = error
        finally:
            if timer is not None:
                timer.cancel()
            with contextlib.suppress(rx.RayError):  # Ray may have ended meanwhile
                self._clean_up()

    def _await_cores(self) -> None:
        """Wait until Ray has noticed the returned cores."""
        deadline = time.monotonic() + CORES_S
        while True:
            try:
                cores = ray.available_resources().get("CPU", 0.0)
                return self._managed.check_cores(self._size, cores)
            except ResourceError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _take_messages(self) -> None:
        try:
            while not self._has_all_messages.is_set():
                for message in ray.get(self._coordinator.receive.remote()):
                    self._take(message)
        except Exception:  # Ray has ended, or the actor was killed; the ranks fail then, too
            self._has_all_messages.set()

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case "batch", key, number, batch:
                self._hub.deliver(key, number, batch)
            case ("group",):  # what there is of an earlier one no longer counts
                self._workers.clear()
                self._ends.clear()
                self._failures.clear()
            case "rank", rank, host, pid, gpus:
                # Ray Train has placed it: it is none of the pool's workers
                self._workers[rank] = WorkerInfo(-1, host, pid, gpus)
            case "end", rank, value, metrics:
                self._ends[rank] = RankEnd(value, metrics)
            case "failure", rank, is_cut_off, packed, at:
                self._failures[rank] = is_cut_off, packed, at
            case "controller", controller:
                self._controller = controller
                if self._is_ending:  # it was to end before it existed
                    self._abort()
            case ("closed",):
                self._has_all_messages.set()

    # --- cancellation, early stop and time limit --------------------------------------------------

    def _hear(self) -> None:
        if self._future.cancelled():
            if self._coordinator is None:
                self._loan.cancel()
            self._end()
        elif self._future.stop_requested and self._coordinator is not None and ray.is_initialized():
            self._coordinator.ask_to_stop.remote()

    def _end(self, is_late: bool = False) -> None:
        self._is_late |= is_late and not self._is_ending  # the first reason to end counts
        self._is_ending = True
        if self._controller is not None:
            self._abort()

    def _abort(self) -> None:
        def kill() -> None:
            # by now the controller has mostly ended by itself, or Ray has
            if ray.is_initialized() and self._outcome is None:
                ray.kill(self._controller)

        if ray.is_initialized() and self._outcome is None:
            self._controller.abort.remote()
            later(ABORT_S, kill)

    # --- cleanup and outcome ----------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Take the last messages, and remove what a killed controller has left."""
        if not ray.is_initialized():
            return
        self._coordinator.send.remote("closed")
        # a model may take longer to come than any limit; if Ray or the actor dies, it is set too
        self._has_all_messages.wait(None if isinstance(self._outcome, Result) else LAST_MESSAGES_S)
        ray.kill(self._coordinator)
        if not isinstance(self._outcome, Result):
            job = ray.get_runtime_context().get_job_id()  # ids of groups end with it
            for number, group in placement_group_table().items():
                is_own = number.endswith(job) and all(
                    bundle == self._bundle for bundle in group["bundles"].values()
                )
                if is_own and group["state"] != "REMOVED":  # the table keeps removed ones
                    remove_placement_group(
                        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
                    )
        with contextlib.suppress(OSError):  # removes it only if empty: Ray made it
            folder = Path(self._plan.run_dir)
            (folder / ".validate_storage_marker").unlink(missing_ok=True)
            folder.rmdir()

    def _return(self, members: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Give the workers back to the pool; those whose GPU is taken by now are lost."""
        driver, lost = self._managed.engine.driver, {}
        try:
            # nothing can be claimed on nodes that are about to go
            if self._is_lent and driver.preempted_error() is None:
                lost = self._managed.backend.take_back([worker for _, worker in members])
        except Exception as error:
            if not ray.is_initialized():  # Ray has ended, and the pool with it
                return
            words = f"its GPU could not be claimed again: {error}"
            lost = {worker.index: words for _, worker in members}
        for place, words in lost.items():
            driver.post(PlaceLost(place, LossReason.UNKNOWN), words)
        driver.end_loan([worker_id for worker_id, worker in members if worker.index not in lost])

    def _resolve(self) -> None:
        future = self._future
        future.finished_at = datetime.now(UTC)
        if future.cancelled() or not (future.running() or future.start()):
            future.worker_replaced = False
            future.notify_cancelled()
            return
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            try:
                future.set_result(self._result())
            except BaseException as error:
                future.set_exception(error)

    def _result(self) -> list[RankEnd]:
        outcome, name = self._outcome, self._plan.name
        if isinstance(outcome, Result):
            if len(self._ends) < len(self._workers) or not self._ends:
                raise InternalError(f"{name} ended, but not all ranks have reported how.")
            return [self._opened(rank) for rank in sorted(self._ends)]
        if self._is_late:
            raise self._late()
        preempted = self._managed.engine.driver.preempted_error()
        if preempted is not None and not self._failures:
            raise preempted
        if outcome is None:
            raise self._loan.exception() or InternalError(f"{name} ended before it began.")
        if isinstance(outcome, (WorkerGroupError, ControllerError, PreemptionError, rx.RayError)):
            raise self._error(outcome)
        raise outcome

    def _opened(self, rank: int) -> RankEnd:
        packed, metrics = self._ends[rank]
        try:
            return RankEnd(pickle.loads(packed), metrics)
        except Exception as error:
            raise TaskError(
                f"The value that rank {rank} of {self._plan.name} returned cannot be unpickled here"
                f" ({type(error).__name__}: {error}). Its class must be importable in this process"
                " too."
            ) from error

    # --- errors -----------------------------------------------------------------------------------

    def _late(self) -> SpmdError:
        name, limit = self._plan.name, f"timeout_s={self._options.timeout_s:g}"
        missing = [rank for rank in range(self._size) if rank not in self._ends]
        failures: dict[int, BaseException] = {
            rank: TaskTimeoutError(f"{name}: rank {rank} had not ended after {limit}.")
            for rank in missing or range(self._size)  # all have ended, but not the training
        }
        text = f"{name} had not ended after {limit}. Raise timeout_s, or check what it does."
        return joint_error(text, failures, min(failures))

    def _error(self, error: BaseException) -> BaseException:
        name, ends = self._plan.name, []
        if not isinstance(error, rx.RayError):  # with a lost controller, all ranks fail
            ends = [self._failure(rank, *said) for rank, said in self._failures.items()]
        if isinstance(error, WorkerGroupError):
            ends += [
                RankFailure(rank, self._lost(rank, reason), 0.0, self._who(rank))
                for rank, reason in error.worker_failures.items()
                if rank not in self._failures
            ]
        # ranks that only lost a connection do not explain why the controller failed
        if ends and not (
            isinstance(error, ControllerError)
            and all(isinstance(end.error, RankInterrupted) for end in ends)
        ):
            return spmd_error(name, ends, None)
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        kind = type(cause).__name__  # by name: the class is private to Ray
        if kind == "WorkerGroupStartupTimeoutError":
            return ResourceError(
                f"Ray Train could not start the {self._size} ranks of {name} within"
                " RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S (60 s if not set): another program took"
                f" the GPUs or cores that the pool had released. {shortages.held_by(())} Wait until"
                " that program ends, or end it, and train again.",
                requested=self._size,
                available=0,
                holders=shortages.holders(),
            )
        if isinstance(cause, rx.RayTaskError):  # raised before the loop began
            cause = cause.cause or cause
        elif (
            isinstance(cause, (rx.RayError, PreemptionError))
            or kind == "WorkerGroupStartupFailedError"
        ):
            is_preempted = isinstance(cause, PreemptionError)
            loss = self._loss(
                f"The processes of {name} were lost",
                _first_line(cause),
                LossReason.PREEMPTED if is_preempted else loss_reason(cause),
            )
            loss.__cause__ = cause
            return joint_error(str(loss), dict.fromkeys(range(self._size), loss), 0)
        what = f"{type(cause).__name__}: {_first_line(cause)}"
        text = (
            f"{name} was ended by Ray Train itself: {what}. The cause of this error has the"
            " details."
        )
        made = TrainingError(text, failures={})
        made.__cause__ = cause
        return made

    def _failure(self, rank: int, is_cut_off: bool, packed: bytes, at: float) -> RankFailure:
        who = self._who(rank)
        error: BaseException
        if is_cut_off:
            text = "It was interrupted, because the connection to another rank broke."
            error = RankInterrupted(text)
        else:
            piece = Slice(TASK, rank, rank + 1, self._plan.attempt)
            name = f"rank {rank} of {self._plan.name}"
            error = described(unpack_failure(packed), name, piece, who)
        return RankFailure(rank, error, at, who)

    def _lost(self, rank: int, reason: BaseException) -> WorkerLostError:
        cause = getattr(reason, "health_check_failure", reason)
        why, words = LossReason.UNKNOWN, str(cause)
        if isinstance(cause, rx.RayError):
            why, words = loss_reason(cause), loss_text(cause)
        who = where(self._who(rank))
        fact = f"The process of rank {rank} of {self._plan.name} ({who}) was lost"
        return self._loss(fact, _first_line(words), why)

    def _loss(self, fact: str, words: str, reason: LossReason) -> WorkerLostError:
        attempt = self._plan.attempt
        text = f"{fact} in attempt {attempt}: {words}. {explanations.HINTS[reason]}"
        return WorkerLostError(text, reason=reason, attempts=attempt)

    def _who(self, rank: int) -> WorkerInfo:
        return self._workers.get(rank, NOBODY)


def _first_line(text: Any) -> str:
    lines = str(text).strip().splitlines()  # Ray's messages go on with traces and advice
    return lines[0].rstrip(".") if lines else "nothing is known"


def tell_ray(plan: TrainingAttempt) -> None:
    """Tell Ray Train which checkpoints a run has: its own record lacks those of the warm lane."""
    run_dir = Path(plan.run_dir)
    file, last = run_dir / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, latest(run_dir)
    kept = ranked(run_dir, plan.best_metric, plan.best_mode)
    # elsewhere: `start` names it
    if last is None or any(each.path.parent != run_dir for each in kept):
        file.unlink(missing_ok=True)
        return
    # it may be missing, damaged, or of another Ray: then it is written anew
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(file.read_text(encoding="utf-8"))
        names = {each["checkpoint_dir_name"] for each in known["checkpoint_results"]}
        if (
            names == {each.path.name for each in kept}
            and known["latest_checkpoint_result"]["checkpoint_dir_name"] == last.path.name
        ):
            return
    states = {
        each.index: {"checkpoint_dir_name": each.path.name, "metrics": each.metrics}
        for each in kept
    }
    state = {
        "ray_version": ray.__version__,
        "checkpoint_results": list(states.values()),
        "checkpoint_report_indices": list(states),
        "latest_checkpoint_result": states[last.index],
        "current_report_index": last.index + 1,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
    file.write_text(json.dumps(state), encoding="utf-8")


# --- in Ray Train's own processes: ranks, controller hooks, and a coordinator ---------------------

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
        await self.send("group")

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
        self._reports: list[tuple[float, int, Any]] = []  # of rank 0, since the last checkpoint

    def after_controller_start(self, train_run_context: Any) -> None:
        """Send the controller's handle to the pool, which can abort it by this."""
        ray.get(
            self._coordinator.send.remote("controller", ray.get_runtime_context().current_actor)
        )

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Say that all ranks begin, perhaps again from the last checkpoint."""
        self._reports.clear()
        ray.get(self._coordinator.begin_group.remote())

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Note a checkpoint that Ray Train has kept, so that the run can resume in either lane."""
        if self._run_dir is None:
            return
        self._reports.append((time.time(), self._attempt, metrics[0]))
        if training_report.checkpoint is not None:
            add_reports(self._run_dir, self._name, self._reports)
            self._reports.clear()
            note_down(
                Path(training_report.checkpoint.path),
                next_index(self._run_dir),
                metrics[0],
                self._attempt,
            )
            forget_deleted(self._run_dir)


class ManagedLoop:
    """The user's loop, packed with its configuration, as Ray Train calls it in each rank.

    `project`: the modules of the process that packed it.
    """

    def __init__(
        self, packed: Packed, project: Snapshot | None, coordinator: Any, plan: TrainingAttempt
    ) -> None:
        self._packed = packed
        self._project = project
        self._coordinator = coordinator
        self._plan = plan

    def __call__(self) -> None:
        """Run the loop; its output, its return value and its error go into the coordinator."""
        coordinator, rank = self._coordinator, ray.train.get_context().get_world_rank()
        # Ray says a GPU's UUID where CUDA_VISIBLE_DEVICES does
        gpus = tuple(int(gpu) if gpu.isdecimal() else 0 for gpu in given_gpus())
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
            if self._project is not None:
                Follower().follow(self._project)
            loop = with_config(*unpack(self._packed))
            value = snapshot(finished(loop()), f"what rank {rank} returns back")
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
    this_process.is_worker = this_process.is_managed = True
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
        self._names: set[str] = set()  # of checkpoints, as rank 0 has reported them
        self.metrics: dict[str, Any] | None = None

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Agree with the other ranks, then report."""
        metrics = checked(metrics)
        check_name(checkpoint_dir_name)
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
        prepare_successors()
        if checkpoint is not None:  # Ray Train writes them down as JSON, and fails on an array
            metrics = plain_metrics(metrics)
        self._check_rated(checkpoint, metrics)
        if rank == 0 and checkpoint_dir_name is not None:  # the name that counts is rank 0's
            checkpoint_dir_name = self._free_name(checkpoint_dir_name)
        super().report(metrics, checkpoint, checkpoint_dir_name, *args, **kwargs)

    def _free_name(self, name: str) -> str:
        """Return the name for a checkpoint, with a number added if the name was used."""
        # Ray Train would overwrite the earlier one, and then delete both as outdated
        storage = self.get_context().get_storage()

        def is_free(name: str) -> bool:
            path = storage.build_checkpoint_path_from_name(name)
            found = storage.storage_filesystem.get_file_info(path)
            return found.type is pyarrow.fs.FileType.NotFound

        numbered = (f"{name}-{number:06d}" for number in itertools.count(2))
        name = next(
            each
            for each in itertools.chain([name], numbered)
            if each not in self._names and is_free(each)
        )
        self._names.add(name)
        return name

    def _check_rated(self, checkpoint: Any, metrics: dict[str, Any]) -> None:
        """Refuse a checkpoint without the metric by which the best are kept."""
        # Ray Train would delete it, and the metric's name may be misspelled; one without any metric
        # is only to resume from: Ray Train keeps it until the next
        wanted, keep = self._plan.best_metric, self._plan.keep
        is_unrated = checkpoint is not None and metrics and wanted not in {None, *metrics}
        if is_unrated and keep is not None:
            raise InvalidValueError(
                f"A checkpoint was reported without best_metric={wanted!r}."
                f"{did_you_mean(str(wanted), metrics)} Report it with each checkpoint:"
                f" keep_checkpoints={keep} keeps the best."
            )

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint of this run, or the one to begin with."""
        last, start = super().get_checkpoint(), self._plan.start
        return Checkpoint.from_directory(start) if last is None and start is not None else last
