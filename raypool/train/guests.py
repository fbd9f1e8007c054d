"""What runs in the processes of a training in the managed lane: a host in each of the pool's workers, a guest in each of Ray's.

A guest is a process that asks Ray for no GPU. It doubles a worker of the pool's, its host, which holds the GPU and does nothing
meanwhile. Imports Ray Train, and with it torch: for these processes, and for what is imported by the verb only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
from ray.train import Checkpoint

# Private: Ray has no public way to be asked by `ray.train.report` first. Its own docstring says that the class may be replaced.
# tests/integration/test_train_managed.py fails with a Ray that lacks these.
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils

from raypool.engine import diary
from raypool.engine.answers import pack_error
from raypool.engine.outbox import Outbox
from raypool.engine.packing import Packed, snapshot, unpack
from raypool.errors import CollectiveError, InvalidTypeError
from raypool.profile_checks import PINNING
from raypool.queues import DataQueue
from raypool.spmd.failures import is_disconnect
from raypool.spmd.group import Assignment, leave_other
from raypool.spmd.parts import Description
from raypool.spmd.wire import ordinal
from raypool.task import (
    Running,
    current_task,
    let_notes_travel,
    mark_worker_process,
    note_in_process,
    running,
)
from raypool.train.checkpoints import check_name, free_name, next_index
from raypool.train.letterbox import Verdict, Words
from raypool.train.metrics import check_names, checked
from raypool.train.plan import Plan

TASK = 0
"""A letterbox is of one training: what is said there is about this task."""

DRAIN_TIMEOUT_S = 5.0

SAME_AS_HOST = (*PINNING, "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
"""A guest has these environment variables as its host does, beside those of the profile."""


class Seat(NamedTuple):
    """What a guest has of its host: its number in the pool, its GPU, its node, and some of its environment (None: not set)."""

    rank: int
    worker: int
    gpu: int | None
    node_id: str
    environment: Mapping[str, str | None]


class Host:
    """What each rank of the gang runs that holds the workers: it says who it is, and waits until it is cancelled."""

    def __init__(self, loop: Callable[..., Any], seats: DataQueue[Seat], names: Sequence[str]) -> None:
        self.func = loop  # called as in functools.partial, so that messages have its name
        self._seats = seats
        self._names = tuple(names)

    def __call__(self, assignment: Assignment, open_args: Callable[[], Sequence[Any]]) -> Description:
        """Give the memory of this worker's GPU to the guest, as far as that goes, and wait."""
        leave_other(assignment)  # the connections of a group of NCCL's take memory of the GPU
        _empty_cache()
        task = current_task()
        names = (*self._names, *(name for name in os.environ if name.startswith("NCCL_")))
        environment = {name: os.environ.get(name) for name in names}
        self._seats.put(Seat(assignment.rank, task.worker, task.gpu, ray.get_runtime_context().get_node_id(), environment))
        while True:
            time.sleep(3600)  # ends with the TaskCancelled that a signal raises here

    def __reduce__(self) -> Any:
        # The loop itself does not go to the hosts, only its name.
        return _host_again, (getattr(self.func, "__name__", type(self.func).__name__), self._seats, self._names)


def _host_again(name: str, seats: DataQueue[Seat], names: Sequence[str]) -> Host:
    return Host(functools.partial(print, name), seats, names)


def _empty_cache() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


_seat: Seat | None = None


def take_seat(seat: Seat) -> bool:
    """Make this process the guest of a worker, before anything touches CUDA; return whether it sees a GPU.

    Raises:
        RuntimeError: CUDA has been touched.
    """
    global _seat
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and os.environ.get(PINNING[0]) != seat.environment.get(PINNING[0]):
        raise RuntimeError("CUDA was in use in a guest before it was pinned to its GPU.")
    for name, value in seat.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _seat = seat
    num_threads = seat.environment.get("OMP_NUM_THREADS")
    if torch is None:
        return seat.gpu is not None
    if num_threads is not None and num_threads.isdigit():
        torch.set_num_threads(int(num_threads))  # it was imported before the variable was set
    if seat.gpu is None or not torch.cuda.is_available():
        return False
    # Private: Ray Train goes by the GPUs that Ray has assigned, none here, and would say "cpu". Checked in tests/gpu.
    import ray.air._internal.device_manager as managers

    managers._torch_device_manager = managers.CUDATorchDeviceManager()
    return True


class Guest:
    """The user's loop, as Ray Train calls it in each guest (in a thread).

    Args:
        packed: The loop and its configuration.
        letterbox: The training's.
        plan: The attempt.
        retry_on: Exceptions of the loop's after which it is to be tried again.
    """

    def __init__(self, packed: Packed, letterbox: Any, plan: Plan, retry_on: tuple[type[BaseException], ...]) -> None:
        self._packed = packed
        self._letterbox = letterbox
        self._plan = plan
        self._retry_on = retry_on

    def __call__(self) -> None:
        """Run it; what it returns, and what it fails with, goes into the letterbox."""
        assert _seat is not None
        rank = ray.train.get_context().get_world_rank()
        group, should_stop = ray.get(self._letterbox.greet.remote(platform.node(), os.getpid()))
        outbox = Outbox(lambda number, batch: ray.get(self._letterbox.push.remote(group, rank, number, batch)))
        attempt = self._plan.attempt + group - 1
        note = Running(rank, attempt, None, _seat.worker, _seat.gpu, self._plan.name, TASK, should_stop, outbox.say)
        note.agreed_stop = should_stop
        _become_worker(note)
        utils = GuestUtils(self._letterbox, self._plan, group, note)
        set_train_fn_utils(utils)
        try:
            loop, config = unpack(self._packed)
            value = loop(config if config is not None else {}) if num_required(loop) else loop()
            is_early = note.has_heard and not note.should_stop  # nobody has wished for that: it goes on elsewhere
            packed_value = None if is_early else snapshot(value, f"what rank {rank} returns back")
        except BaseException as error:
            diary.note_last_lines(error, note)
            outbox.drain(DRAIN_TIMEOUT_S)
            said = self._letterbox.fail.remote(group, rank, self._kind(error), pack_error(error), time.time())
            ray.get(said)
            raise
        outbox.drain(DRAIN_TIMEOUT_S)
        ray.get(self._letterbox.end.remote(group, rank, packed_value, utils.metrics))

    def _kind(self, error: BaseException) -> str:
        """Return how a failure is to be taken."""
        if is_disconnect(error):
            return "cut off"
        return "again" if isinstance(error, self._retry_on) else "for good"


def _become_worker(note: Running) -> None:
    """Let code of the user's find here what it finds in a worker of the pool's."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # Ray Train notes each report, in what would be the diary
    mark_worker_process()
    let_notes_travel()
    diary.install()
    note_in_process(note)
    running.set(note)


def num_required(loop: Callable[..., Any]) -> int:
    """Return how many arguments a loop must be called with, which Ray Train goes by.

    Raises:
        InvalidTypeError: More than one.

    Example:
        >>> num_required(lambda: 0), num_required(lambda config: 0), num_required(lambda config=None: 0)
        (0, 1, 0)
    """
    try:
        parameters = inspect.signature(loop).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say what they take
        return 0
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.default is each.empty and each.kind in plain]
    if len(required) > 1:
        raise InvalidTypeError(
            f"{getattr(loop, '__name__', loop)} takes {len(required)} arguments. The loop of a training takes its config, or "
            "nothing; bind the others with functools.partial."
        )
    return len(required)


def _is_leaving() -> bool:
    """Whether Ray Train has told this guest that a machine of the training is about to go; older ones can't."""
    told = getattr(get_train_context(), "preemption_context", None)
    return getattr(told, "preemption_info", None) is not None


class GuestUtils(DistributedTrainFnUtils):  # type: ignore[misc]
    """What the functions of `ray.train` do in a guest: what Ray's own do, and at a report the ranks meet first."""

    def __init__(self, letterbox: Any, plan: Plan, group: int, note: Running) -> None:
        self._letterbox = letterbox
        self._plan = plan
        self._group = group
        self._note = note
        self._num_reports = 0
        self.metrics: dict[str, Any] | None = None

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Agree with the other ranks, then report.

        Ray Train's own report takes as long as its controller's next look. It is left out where no rank has a checkpoint: then
        nobody would do anything with it.

        Raises:
            InvalidTypeError: `metrics` is no dict, or has tensors in it.
            InvalidValueError: The ranks report different metrics.
            CollectiveError: A rank has ended.
        """
        metrics = checked(metrics)
        check_name(checkpoint_dir_name)
        note = self._note
        verdict = self._meet(Words(tuple(sorted(metrics)), checkpoint is not None, _is_leaving()))
        note.should_stop = note.should_stop or verdict.should_stop
        note.is_leaving = any(each.is_leaving for each in verdict.words)
        note.agreed_stop = bool(note.agreed_stop) or note.should_stop or note.is_leaving
        self.metrics = metrics
        if note.index == 0:
            note.say(note, "metrics", (time.time(), metrics))
        if not any(each.has_checkpoint for each in verdict.words):
            return
        if note.index == 0:  # what rank 0 says counts for all
            index = next_index(self._plan.run_dir)
            name = checkpoint_dir_name or f"checkpoint_{index:06d}"
            checkpoint_dir_name = free_name(self._plan.run_dir, name, index)
        super().report(metrics, checkpoint, checkpoint_dir_name, *args, **kwargs)

    def _meet(self, words: Words) -> Verdict:
        """Hear what all ranks say at this report.

        Raises:
            CollectiveError: One has ended.
            InvalidValueError: They report different metrics.
        """
        self._num_reports += 1
        context = self.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
        verdict: Verdict = ray.get(self._letterbox.meet.remote(self._group, self._num_reports, rank, size, words))
        if verdict.missing:
            raise CollectiveError(
                f"Rank {rank} is in its {ordinal(self._num_reports)} ray.train.report, but rank {verdict.missing[0]} has "
                "returned. All ranks have to report equally often.",
                missing=verdict.missing,
            )
        check_names([each.names for each in verdict.words])
        return verdict

    def get_preemption_info(self) -> Any:
        """Return what Ray Train knows of machines that are about to go."""
        info = super().get_preemption_info()
        self._note.is_leaving = self._note.has_heard = self._note.has_heard or info is not None
        return info

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint of this run, or the one to begin with."""
        last = super().get_checkpoint()
        if last is not None or self._plan.start is None:
            return last
        return Checkpoint.from_directory(str(Path(self._plan.start)))
