"""Ray Train's trainers, set up so that their workers are guests of the pool's; and what goes with them into their controller.

Imports Ray Train, and with it torch: for the controller's process, and for what is imported by the verb only.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer

# Private: the only way to hear who the controller is, when it starts workers, and whether it is to try again. Ray's own comment
# provides for such callbacks in RunConfig. tests/integration/test_train_managed.py fails with a Ray that lacks them.
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from raypool.errors import InvalidTypeError
from raypool.train.checkpoints import next_index, note_down, prune
from raypool.train.guests import Guest, Seat, take_seat
from raypool.train.plan import Plan

POLL_S = 0.2
"""So often Ray Train's controller looks at its workers: by itself every 2 s, and so slow are its reports and its end [s]."""

CONTROLLER_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_S),
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what is printed is the diary's
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # likewise; a loop logs as in a worker of the pool's
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a loop is where the pool's workers are
}
"""Ray Train's settings, which it reads in the environment of whoever calls `fit`. What the user has set counts."""

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


class NotTriedAgain(Exception):
    """Raised in the controller where Ray Train would try again after an exception of the user's, which nobody has asked for."""


class GuestBackend(Backend):  # type: ignore[misc]
    """What a backend of Ray Train's does with its workers, with each of them pinned first."""

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: GuestConfig) -> None:
        """Give each guest its seat, on the node where it is, and connect them."""
        nodes = worker_group.execute(_node_here)
        seats = seated(nodes, backend_config.seats)
        self._take(worker_group, seats, backend_config.inner)
        backend_config.inner.backend_cls().on_start(worker_group, backend_config.inner)
        self._take(worker_group, seats, backend_config.inner)  # JAX's sets CUDA_VISIBLE_DEVICES to what Ray has assigned: none

    def _take(self, worker_group: Any, seats: Sequence[Seat], inner: Any) -> None:
        seeing = ray.get([worker_group.execute_single_async(rank, take_seat, seat) for rank, seat in enumerate(seats)])
        if isinstance(inner, TorchConfig):
            inner.backend = "nccl" if all(seeing) else "gloo"

    def on_training_start(self, worker_group: Any, backend_config: GuestConfig) -> None:
        """Do what the backend does."""
        backend_config.inner.backend_cls().on_training_start(worker_group, backend_config.inner)

    def on_shutdown(self, worker_group: Any, backend_config: GuestConfig) -> None:
        """Do what the backend does."""
        backend_config.inner.backend_cls().on_shutdown(worker_group, backend_config.inner)


class GuestConfig(BackendConfig):  # type: ignore[misc]
    """The configuration of a backend of Ray Train's, with the seats of its guests; else it is like the one inside."""

    def __init__(self, inner: Any, seats: Sequence[Seat]) -> None:
        self.inner = inner
        self.seats = tuple(seats)

    @property
    def backend_cls(self) -> type[GuestBackend]:
        """The backend."""
        return GuestBackend

    @property
    def train_func_context(self) -> Any:
        """What a loop runs in."""
        return self.inner.train_func_context

    @property
    def framework(self) -> Any:
        """Which framework it is."""
        return self.inner.framework

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that may be shown."""
        return self.inner.to_dict()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def _node_here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def seated(nodes: Sequence[str], seats: Sequence[Seat]) -> list[Seat]:
    """Return a seat for each guest, by rank: Ray Train keeps the ranks of a node together, so they may be in another order.

    Raises:
        RuntimeError: A guest is on a node where no seat is left.

    Example:
        >>> here, there = Seat(0, 4, None, "here", {}), Seat(1, 5, None, "there", {})
        >>> [seat.worker for seat in seated(["there", "here"], [here, there])]
        [5, 4]
    """
    left = list(seats)
    found = []
    for rank, node in enumerate(nodes):
        seat = next((each for each in left if each.node_id == node), None)
        if seat is None:
            raise RuntimeError(f"Rank {rank} is on node {node}, where no worker of the pool is left for it.")
        left.remove(seat)
        found.append(seat)
    return found


class Watcher(ControllerCallback, WorkerGroupCallback, ReportCallback):  # type: ignore[misc]
    """What Ray Train's controller calls, in its own process."""

    def __init__(self, letterbox: Any, plan: Plan) -> None:
        self._letterbox = letterbox
        self._plan = plan
        self._num_groups = 0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Say who the controller is: whoever holds it can abort it."""
        ray.get(self._letterbox.put.remote("controller", ray.get_runtime_context().current_actor))

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Say that guests are started, perhaps again."""
        self._num_groups += 1
        ray.get(self._letterbox.begin_group.remote())

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Let it end, where Ray Train would try again after any exception of the loop's.

        Raises:
            NotTriedAgain: There is one after which nobody wants another try.
        """
        if failure_decision.value == "RETRY" and not ray.get(self._letterbox.may_try_again.remote()):
            raise NotTriedAgain("The loop has failed by itself, and retry_on does not name its exception.")

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Make a checkpoint of the run's of what Ray Train has just taken up, and delete those that are not to be kept.

        One rule for both lanes: a run may go on in the other one.
        """
        if training_report.checkpoint is None:
            return
        plan, folder = self._plan, Path(training_report.checkpoint.path)
        number = folder.name.removeprefix("checkpoint_")
        index = int(number) if number.isdigit() else next_index(plan.run_dir)
        note_down(folder, index, metrics[0], plan.attempt + self._num_groups - 1)
        prune(plan.run_dir, plan.keep, plan.best_metric, plan.best_mode)


# --- making one -------------------------------------------------------------------------------------------------------


class Guests(NamedTuple):
    """What a trainer is made for.

    `mark`: so many bytes of memory a guest asks Ray for. It is the number of the training in this process, by which its placement
    groups are known, also those that nobody else knows of. `environment`: of all guests from their start on. `max_restarts`: how
    often Ray Train may start the guests again.
    """

    seats: Sequence[Seat]
    mark: int
    environment: Mapping[str, str]
    max_restarts: int
    letterbox: Any


def check_trainer(trainer: Any) -> type[DataParallelTrainer]:
    """Return the class of trainer to use.

    Raises:
        InvalidTypeError: It is none whose workers can be guests.
    """
    if trainer is None:
        return TorchTrainer  # type: ignore[no-any-return]
    if isinstance(trainer, type) and issubclass(trainer, DataParallelTrainer):
        _config_parameter(trainer)
        return trainer
    raise InvalidTypeError(
        f"trainer={trainer!r} is not a class of trainers whose workers can be guests of the pool's. Give one that is derived "
        "from Ray Train's DataParallelTrainer, such as ray.train.tensorflow.TensorflowTrainer."
    )


def _config_parameter(trainer: type[DataParallelTrainer]) -> str:
    """Return what a class of trainers calls the configuration of its backend: `torch_config`, `backend_config`, ..."""
    others = {"train_loop_config", "scaling_config", "run_config", "dataset_config", "validation_config", "data_config"}
    names = [name for name in inspect.signature(trainer).parameters if name.endswith("_config") and name not in others]
    if len(names) != 1:
        raise InvalidTypeError(
            f"trainer={trainer.__name__} does not say which of its arguments is the configuration of its backend: "
            f"{', '.join(names) or 'none of them'} could be. Give TorchTrainer, TensorflowTrainer, JaxTrainer or one like these."
        )
    return names[0]


def make_trainer(
    trainer: type[DataParallelTrainer], guest: Guest, plan: Plan, guests: Guests, datasets: Mapping[str, Any] | None
) -> Any:
    """Return a trainer whose workers are guests in these seats."""
    run_dir = Path(plan.run_dir)
    given: dict[str, Any] = {
        "scaling_config": ScalingConfig(
            num_workers=len(guests.seats),
            use_gpu=False,
            resources_per_worker={"memory": guests.mark},
            label_selector=[{"ray.io/node-id": seat.node_id} for seat in guests.seats],
        ),
        "run_config": RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir.parent),
            checkpoint_config=CheckpointConfig(),
            failure_config=FailureConfig(max_failures=guests.max_restarts, controller_failure_limit=0),
            worker_runtime_env={"env_vars": dict(guests.environment)},
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[Watcher(guests.letterbox, plan)],
        ),
        "datasets": dict(datasets or {}),
    }
    inner = trainer(guest, **given).backend_config
    if hasattr(inner, "use_gpu"):  # JAX's
        inner.use_gpu = all(seat.gpu is not None for seat in guests.seats)
    made = trainer(guest, **given, **{_config_parameter(trainer): GuestConfig(inner, guests.seats)})
    _leave_out_cleaner(made)
    return made


def _leave_out_cleaner(trainer: Any) -> None:
    """Let Ray Train make no detached actor that would clean up after its controller.

    Without Ray's dashboard it cannot know when that is gone, and stays for ever; raypool cleans up itself. Private: there is no
    public way; a test kills a controller and looks what is left.
    """
    make = trainer._create_default_callbacks
    trainer._create_default_callbacks = lambda: [
        each for each in make() if type(each).__name__ != "PlacementGroupCleanerCallback"
    ]


# --- leftovers and settings ---------------------------------------------------------------------------------------------


def remove_groups(mark: int) -> None:
    """Remove the placement groups of a training: those in which each bundle is so many bytes of memory, and nothing else."""
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    job = ray.get_runtime_context().get_job_id()
    for number, group in placement_group_table().items():
        bundles = list(group["bundles"].values())
        is_own = number.endswith(job) and all(bundle == {"memory": float(mark)} for bundle in bundles)
        if is_own and bundles and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


class Settings:
    """Ray Train's settings in the environment of this process, for as long as any training needs them there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._own: list[str] = []

    def enter(self, start_timeout_s: float) -> Callable[[], None]:
        """Set them; return a function that undoes it, once."""
        with self._lock:
            self._num_users += 1
            wanted = {**CONTROLLER_ENVIRONMENT, START_TIMEOUT: str(start_timeout_s)}
            for name, value in wanted.items():
                if name not in os.environ:
                    os.environ[name] = value
                    self._own.append(name)
        left = iter([None])

        def leave() -> None:
            if next(left, self) is None:
                self._leave()

        return leave

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                for name in self._own:
                    os.environ.pop(name, None)
                self._own = []


SETTINGS = Settings()
