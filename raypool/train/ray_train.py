"""One rank of a training, in a worker: Ray Train's functions, over the group of the ranks.

The first training imports this module, in workers only: it needs torch and Ray Train.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.fs
import ray
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.context import LocalTrainContext
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus

from raypool.backends.ray.fork_server import prepare_successors
from raypool.backends.ray.nodes import look
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.ray_private import (
    LocalTrainFnUtils,
    StorageContext,
    get_train_fn_utils,
    set_train_fn_utils,
)
from raypool.spmd import collectives
from raypool.spmd.collectives import all_values, meet
from raypool.spmd.context import SpmdContext
from raypool.task import NUMBERS, checked_metric
from raypool.train.checkpoints import (
    CheckpointCommit,
    RankContribution,
    RankEnd,
    TrainingAttempt,
    check_name,
    list_kept,
    remove_partials,
)
from raypool.worker.runner import finished
from raypool.worker.running import TaskContext, environment, note_here, running, secure_reports

logger = logging.getLogger("raypool")

BEGINNING, REPORT = "the beginning of the training", "ray.train.report"
"""The names of meetings, as messages show them."""


def run_loop(
    context: SpmdContext, loop: Callable[..., Any], config: Any, plan: TrainingAttempt
) -> RankEnd:
    """Run a loop as Ray Train's local mode does, as one rank of several."""
    session = Session(context, plan, note_here())
    session.begin()
    with _entered(session):
        value = _Trainer(session, with_config(loop, config)).fit()
    return RankEnd(value, session.metrics)


def with_config(loop: Callable[..., Any], config: Any) -> Callable[[], Any]:
    """Return a loop with its argument; without a config, one that needs it gets an empty dict."""
    # Ray Train would call a loop whose argument has a default without the config.
    signature = inspect.signature(loop)
    choices: list[tuple[Any, ...]] = [(), ({},)] if config is None else [(config,)]
    for arguments in choices:
        with contextlib.suppress(TypeError):  # it cannot be called with these
            signature.bind(*arguments)
            return functools.partial(loop, *arguments)
    return loop  # it takes none


class _Trainer(TorchTrainer):  # type: ignore[misc]  # Ray is not typed
    """Ray's trainer in its local mode: it checks the loop, and calls it in this thread."""

    # Ray's own controller would make torch's default group, and set the functions of ray.train for
    # the whole process. But the ranks have a group already, and two trainings may run in two
    # threads. So this class replaces it. (Private: there is no public way.)

    def __init__(self, session: Session, loop: Callable[[], Any]) -> None:
        super().__init__(
            loop,
            scaling_config=_local_mode(),
            run_config=RunConfig(name=session.get_context().get_experiment_name()),
        )

    def _get_local_controller(self) -> _Trainer:
        return self

    def run(self, train_func: Callable[[], Any]) -> Any:
        """Call the loop, which may be a coroutine; `fit` returns what this returns."""
        return finished(train_func())


@functools.cache
def _local_mode() -> ScalingConfig:
    logger = logging.getLogger("ray.train.v2.api.config")
    # it would warn of a single process
    before, logger.disabled = logger.disabled, True
    try:
        return ScalingConfig(num_workers=0)
    finally:
        logger.disabled = before


# --- connection of ray.train to a training --------------------------------------------------------

_here: ContextVar[Session | None] = ContextVar("raypool_training", default=None)

_lock = threading.Lock()  # trainings in threads begin and end at the same time
_sessions: list[Session] = []  # the trainings in this process
_before: Any = None  # what was set before the first one


class _Switch:
    """The functions of ray.train while trainings run: passes each call to the caller's training."""

    def __getattr__(self, name: str) -> Any:
        return getattr(session_here(), name)


def session_here() -> Any:
    """Return the training that this thread belongs to."""
    session = _here.get()
    with _lock:
        there = list(_sessions)
    # a thread that Python did not start (autograd's, for a GPU) has no context
    if (
        session is None
        and len(there) == 1
        and running.get() is None
        and threading.current_thread() is not threading.main_thread()
    ):
        session = there[0]
    if session in there:
        return session
    if _before is not None:
        return _before
    raise RuntimeError(
        "Functions of ray.train were called in a thread that belongs to no training, while one runs"
        " in this process. They work in a loop that pool.train or trainer.fit() runs."
    )


@contextlib.contextmanager
def _entered(session: Session) -> Iterator[None]:
    """Connect the functions of ray.train to a training, in this thread and those it starts."""
    global _before
    interrupts = None if session.note is None else session.note.interrupts
    if interrupts is not None:
        interrupts.pause()  # an interruption between these steps would leave half of them done
    token = _here.set(session)
    with _lock:
        if not _sessions:
            with contextlib.suppress(RuntimeError):  # Ray has none
                _before = get_train_fn_utils()
            set_train_fn_utils(_Switch())
        _sessions.append(session)
    variables = contextlib.ExitStack()
    try:
        variables.enter_context(environment(session.variables()))
        if interrupts is not None:
            interrupts.resume()
        yield
    finally:
        try:
            if interrupts is not None:
                interrupts.pause()
        finally:  # an interruption comes only once, so the rest is safe
            variables.close()
            session.end()
            with _lock:
                _sessions.remove(session)
                if not _sessions:
                    set_train_fn_utils(_before)
                    _before = None
            _here.reset(token)
    if interrupts is not None:
        interrupts.resume()  # not after an error: an interruption would hide it


# --- functions of ray.train in a rank -------------------------------------------------------------


class _Told(NamedTuple):
    """What a rank tells the others in a report."""

    names: tuple[str, ...]
    has_checkpoint: bool
    should_stop: bool
    is_leaving: bool


class _Storage(StorageContext):  # type: ignore[misc]
    """The folder of the run; a report checks that all see it, instead of Ray's marker file."""

    def _create_validation_file(self) -> None:
        Path(self.experiment_fs_path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _check_validation_file(self) -> None:
        """Check nothing."""


class _Context(LocalTrainContext):  # type: ignore[misc]
    run_dir: Path

    def get_storage(self) -> StorageContext:
        """Return the folder of the run; it is made now if it does not exist."""
        return _Storage(self.run_dir.parent, self.run_dir.name, pyarrow.fs.LocalFileSystem())


def _draining() -> dict[str, int | None]:
    """Return the nodes about to go, and when they will be gone, if that is known [Unix ms]."""
    if not ray.is_initialized():  # asking would start one
        return {}
    since = time.time() - time.monotonic()
    return {
        node_id: round((at + since) * 1000) if at < math.inf else None
        for node_id, at in look().draining.items()
    }


class Session(LocalTrainFnUtils):  # type: ignore[misc]
    """One rank of a training."""

    def __init__(
        self, context: SpmdContext, plan: TrainingAttempt, note: TaskContext | None
    ) -> None:
        super().__init__(plan.name)
        self.plan = plan
        self.note = note
        self.metrics: dict[str, Any] | None = None
        self._reports: list[tuple[float, int, Any]] = []  # of rank 0, since the last checkpoint
        self._spmd = context
        self._checkpoint = None if plan.start is None else Checkpoint.from_directory(plan.start)
        self._commit = CheckpointCommit(plan, context.rank, self._tell)
        self._attempt_before = 1 if note is None else note.attempt
        self._has_warned = False

    # --- beginning and end ------------------------------------------------------------------------

    def begin(self) -> None:
        """Meet the others: who is on which machine, and whether an early end is wanted."""
        plan, note, spmd = self.plan, self.note, self._spmd
        if spmd.rank == 0 and plan.run_dir:
            remove_partials(plan.run_dir)
        is_seen = plan.start is None or os.path.isdir(plan.start)  # noqa: PTH112 - never raises
        told = self._tell(
            (platform.node(), is_seen, note is not None and note.should_stop), BEGINNING
        )
        hosts = list(dict.fromkeys(host for host, _, _ in told))
        self._context = _Context(
            Path(plan.run_dir).name,  # as in Ray, where the folder of a run is called like it
            world_size=spmd.world_size,
            world_rank=spmd.rank,
            local_rank=spmd.local_rank,
            local_world_size=spmd.local_world_size,
            node_rank=hosts.index(platform.node()),
        )
        self._context.run_dir = Path(plan.run_dir)
        blind = [rank for rank, (_, is_seen, _) in enumerate(told) if not is_seen]
        if blind:
            raise InvalidValueError(
                f"Rank {blind[0]}, on {told[blind[0]][0]}, does not see the checkpoint {plan.start}"
                " that the training is to begin with. All machines must see its folder at the same"
                " path: put it into a folder that they share."
            )
        if note is not None:
            note.attempt = plan.attempt
            note.agreed_stop = any(should_stop for _, _, should_stop in told)

    def variables(self) -> dict[str, str]:
        """Return the variables that Ray sets for a rank; none where ranks share a process."""
        if not self._spmd._group.assignment.has_process:
            return {}
        return {
            "NODE_RANK": str(self._context.get_node_rank()),
            "ACCELERATE_TORCH_DEVICE": str(self._spmd.device),
        }

    def end(self) -> None:
        """Leave the note as it was."""
        if self.note is not None:
            self.note.attempt, self.note.agreed_stop = self._attempt_before, None

    def _tell(self, value: Any, operation: str = REPORT) -> list[Any]:
        """Exchange a value with all ranks; return the values of all."""
        group = self._spmd._group
        with group.operation(operation):
            headers, packed = meet(group, value, operation)
            return all_values(group, headers, packed)

    # --- report -----------------------------------------------------------------------------------

    def report(  # noqa: PLR0913, PLR0917 - as Ray calls it
        self,
        metrics: dict[str, Any],
        checkpoint: Any = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Any, str], Any] | None = None,
        validation: Any = False,
    ) -> None:
        """Meet the others, keep a checkpoint with them, and pass on the metrics of rank 0.

        Names of metrics other than strings become strings in tables and checkpoints.
        """
        if validation:
            raise InvalidValueError(
                'ray.train.report(validation=...) needs lane="managed" and'
                " validation_config=ValidationConfig(fn): there Ray Train validates checkpoints"
                " beside the training. Here validate in the loop, and report the result as a"
                " metric."
            )
        is_dict = isinstance(metrics, Mapping)
        said = checked({str(key): metrics[key] for key in metrics} if is_dict else metrics)
        check_name(checkpoint_dir_name)
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise InvalidTypeError(
                f"report(checkpoint=...) got a {type(checkpoint).__name__}. Save it to a folder,"
                " and pass ray.train.Checkpoint.from_directory(folder)."
            )
        note = self.note
        wishes = (False, False) if note is None else (note.should_stop, note.is_leaving)
        told = self._tell(_Told(tuple(sorted(said)), checkpoint is not None, *wishes))
        prepare_successors()  # now that the ranks have imported it all
        is_silent = self._spmd.rank != 0 or self._has_warned
        if not is_silent and (text := how_they_differ([each.names for each in told])):
            self._has_warned = True
            logger.warning(
                "%s. Only rank 0's metrics are kept; raypool.report keeps those of each rank.",
                text,
            )
        self.metrics = {name: said[str(name)] for name in metrics}
        if note is not None:
            is_asked = any(each.should_stop for each in told)
            is_going = any(each.is_leaving for each in told)
            note.should_stop |= is_asked  # so that what it returns counts, on all ranks
            note.is_leaving |= is_going
            note.agreed_stop = bool(note.agreed_stop) or is_asked or is_going
            if said and self._spmd.rank == 0:
                moment = time.time()
                note.say(note, "metrics", (moment, said))
                self._reports.append((moment, self.plan.attempt, said))
        if any(each.has_checkpoint for each in told):
            own = RankContribution(
                checkpoint,
                checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD,
                bool(delete_local_checkpoint_after_upload),
                checkpoint_upload_fn,
            )
            brought = None if checkpoint is None else own
            secure_reports(0.0)  # they leave while the files are copied
            path = self._commit.keep(brought, checkpoint_dir_name, said, self._reports)
            self._reports.clear()
            self._checkpoint = Checkpoint.from_directory(path)

    # --- other functions --------------------------------------------------------------------------

    def get_checkpoint(self) -> Any:
        """Return the last reported checkpoint, or the one that the training begins with."""
        return self._checkpoint

    def get_all_reported_checkpoints(
        self, consistency_mode: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Return all that are kept, also of earlier attempts, with the metrics of rank 0."""
        return [
            ReportedCheckpoint(
                checkpoint=Checkpoint.from_directory(str(kept.path)),
                metrics=kept.metrics,
                status=ReportedCheckpointStatus.COMMITTED,
            )
            for kept in list_kept(self.plan.run_dir)
        ]

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """Refuse: data sets of Ray Data need Ray Train's controller."""
        raise InvalidValueError(
            f"ray.train.get_dataset_shard({dataset_info.dataset_name!r}) needs a training with"
            ' datasets=..., which is one with lane="managed". Here a loop reads its data itself,'
            " for example with prepare_data_loader."
        )

    def get_preemption_info(self) -> Any:
        """Meet the others; return the machines that are about to go."""
        note = self.note
        draining = {} if note is None or not note.is_leaving else _draining()
        # without Ray, in a pool of this process, asking would start one
        node_id = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        told = self._tell(
            (note is not None and note.is_leaving, str(node_id), draining),
            "ray.train.get_preemption_info",
        )
        if note is None or not any(is_leaving for is_leaving, _, _ in told):
            return None
        # here, because only a Ray that can ask for it has it
        from ray.train import PreemptionInfo

        note.is_leaving = note.has_heard = True
        going = {node_id: at_ms for _, _, draining in told for node_id, at_ms in draining.items()}
        ranks = {
            node_id: [rank for rank, (_, its, _) in enumerate(told) if its == node_id]
            for node_id in going
        }
        deadlines = [at_ms for node_id, at_ms in going.items() if at_ms and ranks[node_id]]
        return PreemptionInfo(
            min(deadlines, default=None), {node_id: its for node_id, its in ranks.items() if its}
        )

    def is_distributed(self) -> bool:
        """Say no, as in Ray's local mode."""
        # Then ray.train asks torch for the device, and a worker sees its own GPU and no other. Else
        # it would ask Ray for the GPUs of this actor, which torch may not see: simulated ones.
        return False

    def barrier(self) -> None:
        """Wait for all ranks."""
        collectives.barrier(self._spmd._group)

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        """Return what rank 0 has passed."""
        return collectives.broadcast(self._spmd._group, data if self._spmd.rank == 0 else None, 0)


# --- checks of reported metrics -------------------------------------------------------------------


MAX_NAMES = 8
"""The greatest number of metrics that an error names."""


def checked(metrics: Any) -> dict[str, Any]:
    """Return a snapshot of metrics that can travel."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise InvalidTypeError(
            f"report(metrics={metrics!r}) got a {type(metrics).__name__}. Metrics are a dict from"
            ' names to values, such as {"loss": 0.5}.'
        )
    if NUMBERS.issuperset(map(type, metrics.values())):
        return dict(metrics)
    return {name: _checked_value(name, value) for name, value in metrics.items()}


def _checked_value(name: str, value: Any) -> Any:
    # what raypool.report refuses may travel all the same, but for tensors
    try:
        return checked_metric(name, value)
    except (InvalidTypeError, InvalidValueError):
        if _has_tensor(value):
            raise
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise InvalidTypeError(
            f"report({name}=...) got a {type(value).__name__}, which cannot be pickled ({error})."
            " Report numbers, strings, or containers of them."
        ) from error


def _has_tensor(value: Any) -> bool:
    import torch

    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def how_they_differ(names: Sequence[tuple[str, ...]]) -> str:
    """Name the first rank whose metrics differ from rank 0's, and these; empty if none does."""
    first = set(names[0])
    for rank, own in enumerate(names):
        if set(own) == first or (rank and not own):
            continue
        missing, other = _listed(first.difference(own)), _listed(set(own) - first)
        facts = [f"{missing} is missing"] if missing else []
        if other:
            facts.append(f"{other} is not among those of rank 0")
        return f"Rank {rank} has reported other metrics than rank 0: {', '.join(facts)}"
    return ""


def _listed(names: set[str]) -> str:
    shown = [repr(name) for name in sorted(names)]
    if len(shown) > MAX_NAMES:
        shown = [*shown[:MAX_NAMES], f"and {len(shown) - MAX_NAMES} more"]
    return ", ".join(shown)
