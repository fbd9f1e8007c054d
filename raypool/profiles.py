"""Where a pool runs, and what each of its workers gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from raypool.devices.links import FAST_LINKS
from raypool.errors import InvalidTypeError, InvalidValueError

PINNING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables by which a worker is pinned to its GPU."""

BACKENDS = ("ray", "threads", "inline")

FAST_MULTINODE = {"NCCL_IB_DISABLE": "0", FAST_LINKS: "1"}
"""What `fast_multinode` sets for all workers; the second lets each worker look for the interfaces of its own machine."""


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker gets of a machine.

    Args:
        gpus: GPUs for each worker. A fraction puts several workers on one GPU, which the pool then holds whole. None: one,
            where there are GPUs, else none.
        cpus: CPU cores, as Ray counts them. None: one for a worker without a GPU, none for one with.
        memory_bytes: Main memory that Ray sets aside, and that the worker may use, with all that it has started [bytes]: one that
            uses more is ended and replaced, as one that has died. Values in Ray's object store and other shared memory do not
            count. None: as much as there is.
        accelerator_type: Only on nodes with this kind of accelerator, by Ray's name for it ("T4", "H100", ...).

    Raises:
        InvalidValueError: A count is negative, or a GPU count above 1 is not whole.

    Example:
        >>> WorkerResources(gpus=0.5).workers_per_gpu
        2
    """

    gpus: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    accelerator_type: str | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "cpus", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InvalidTypeError(f"WorkerResources({name}={value!r}) is not a number.")
            if value is not None and not value >= 0:
                raise InvalidValueError(f"WorkerResources({name}={value!r}) is negative. Give 0 or more, or leave it out.")
        if self.accelerator_type is not None and not isinstance(self.accelerator_type, str):
            raise InvalidTypeError(f"WorkerResources(accelerator_type={self.accelerator_type!r}) is not a name, such as 'H100'.")
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidValueError(
                f"WorkerResources(gpus={self.gpus}) would share a second GPU in part, which Ray cannot do. "
                "Give a whole number, or a fraction below 1."
            )

    @property
    def workers_per_gpu(self) -> int:
        """How many such workers one GPU takes."""
        return int(1 / self.gpus + 1e-9) if self.gpus and self.gpus < 1 else 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where a pool runs and what its workers get; `parpool` takes one, or its name (see `raypool.profile_files`).

    Args:
        backend: "ray" (processes), "threads" or "inline" (both in this process, without Ray).
        address: A Ray cluster to connect to. None: the Ray that runs in this process, else a new one on this machine.
        resources: What each worker gets; or a list of that, one for each worker, in the order of the workers. The pool then has
            exactly so many: `[WorkerResources(gpus=0)] * 6 + [WorkerResources(gpus=1)] * 2`.
        gpus: Only these GPUs of this machine, by index. None: any.
        env: Environment variables of the workers; they are set before anything else happens there.
        fast_multinode: Set up the workers for machines that are joined by InfiniBand: NCCL may use it (NCCL_IB_DISABLE=0), and
            where a machine has IP interfaces over it, NCCL uses these (NCCL_SOCKET_IFNAME), not the one by which rank 0 is
            reached. What `env` says counts first, and so does an NCCL_SOCKET_IFNAME of the machine's. It changes nothing on
            machines without InfiniBand; see docs/several_gpus.md.
        setup: A function without arguments that runs once in each worker process, before its first task; also in one that
            replaces another. If it raises, the worker does not start.
        teardown: A function without arguments that runs once in each worker process at its orderly end: not in one that was
            killed.
        start_timeout_s: Longest wait for resources, and for a worker to come up [s].
        idle_timeout_s: After so long without work the workers end and their memory is free; the next call starts them again
            [s]. None: never.
        cancel_grace_s: So long a task that was cancelled has to end; then its process is killed and replaced [s].
        retries: How often an item runs again after its worker was lost.
        quiet: Do not print the line that says what was started.
        trace: Record the scheduler's events in this file (JSON lines), for `raypool.testing.replay`.

    Raises:
        InvalidTypeError: A field is of a wrong kind.
        InvalidValueError: A field has a value that cannot work.

    Source:
        MATLAB R2025b, parcluster and the properties of its cluster profiles; IdleTimeout of parallel.ProcessPool [there in min];
        PARALLEL_SERVER_FAST_MULTINODE_GPU_COMMUNICATION. NVIDIA NCCL, Environment Variables.

    Example:
        >>> Profile(gpus=(0, 2), start_timeout_s=10).gpus
        (0, 2)
    """

    backend: str = "ray"
    address: str | None = None
    resources: WorkerResources | Sequence[WorkerResources] = field(default_factory=WorkerResources)
    gpus: tuple[int, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fast_multinode: bool = False
    setup: Callable[[], object] | None = None
    teardown: Callable[[], object] | None = None
    start_timeout_s: float = 60.0
    idle_timeout_s: float | None = None
    cancel_grace_s: float = 5.0
    retries: int = 2
    quiet: bool = False
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidValueError(f"Backend {self.backend!r} is none of {', '.join(BACKENDS)}.")
        if not isinstance(self.resources, WorkerResources):
            object.__setattr__(self, "resources", _checked_list(self.resources))
        if self.gpus is not None:
            object.__setattr__(self, "gpus", _checked_gpus(self.gpus))
            _check_chosen(self.kinds)
        _check_kinds(self)
        pinning = [name for name in self.env if name in PINNING]
        if pinning:
            raise InvalidValueError(f"env sets {pinning[0]}, which the pool sets for each worker. Choose GPUs with gpus=[...].")
        if not self.start_timeout_s > 0:
            raise InvalidValueError(f"start_timeout_s={self.start_timeout_s!r} leaves no time to start. Give seconds above 0.")
        if self.idle_timeout_s is not None and not self.idle_timeout_s > 0:
            raise InvalidValueError(
                f"idle_timeout_s={self.idle_timeout_s!r} would end workers that were just started. "
                "Give seconds above 0, or None to keep them."
            )
        if not self.cancel_grace_s >= 0:
            raise InvalidValueError(
                f"cancel_grace_s={self.cancel_grace_s!r} is negative. Give 0 to kill what is cancelled at once."
            )
        if self.retries < 0:
            raise InvalidValueError(f"retries={self.retries!r} is negative. Give 0 to run every item at most once.")

    @property
    def worker_env(self) -> dict[str, str]:
        """The environment variables that worker processes start with, besides those of their machine.

        Example:
            >>> Profile(fast_multinode=True, env={"NCCL_IB_HCA": "mlx5"}).worker_env["NCCL_IB_DISABLE"]
            '0'
        """
        return {**(FAST_MULTINODE if self.fast_multinode else {}), **self.env}

    @property
    def listed(self) -> tuple[WorkerResources, ...]:
        """What each worker gets, one after the other, where `resources` is a list; else nothing."""
        return () if isinstance(self.resources, WorkerResources) else tuple(self.resources)

    @property
    def kinds(self) -> tuple[WorkerResources, ...]:
        """The kinds of worker that there are, each once.

        Example:
            >>> len(Profile(resources=[WorkerResources(gpus=0)] * 6 + [WorkerResources(gpus=1)] * 2).kinds)
            2
        """
        return (self.resources,) if isinstance(self.resources, WorkerResources) else tuple(dict.fromkeys(self.resources))

    def sized(self, least: int | None, most: int | None) -> tuple[int | None, int | None]:
        """Return how many workers a pool has that is to have between `least` and `most` (None: not said).

        Raises:
            InvalidValueError: `resources` names another number of them.

        Example:
            >>> Profile(resources=[WorkerResources()] * 3).sized(None, None)
            (3, 3)
        """
        if not self.listed:
            return least, most
        number = len(self.listed)
        if least is not None and most is not None and not least <= number <= most:
            asked = f"{least}" if least == most else f"{least} to {most}"
            raise InvalidValueError(
                f"num_workers asks for {asked}, but resources=[...] says what each of {number} workers gets. "
                "Leave num_workers out, or give one WorkerResources for all."
            )
        return number, number


def _check_kinds(profile: Profile) -> None:
    """Refuse fields of a kind that cannot work, before they are compared with numbers."""
    if profile.address is not None and not isinstance(profile.address, str):
        raise InvalidTypeError(f"address={profile.address!r} is not the address of a Ray cluster, such as '10.0.0.7:6379'.")
    for name in ("quiet", "fast_multinode"):
        if not isinstance(getattr(profile, name), bool):
            raise InvalidTypeError(f"{name}={getattr(profile, name)!r} is neither True nor False.")
    _check_env(profile.env)
    for name in ("start_timeout_s", "idle_timeout_s", "cancel_grace_s"):
        value = getattr(profile, name)
        is_left_out = value is None and name == "idle_timeout_s"
        if not is_left_out and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise InvalidTypeError(f"{name}={value!r} is not a number of seconds.")
    for name in ("setup", "teardown"):
        _check_plain_call(name, getattr(profile, name))
    if isinstance(profile.retries, bool) or not isinstance(profile.retries, int):
        raise InvalidTypeError(f"retries={profile.retries!r} is not a whole number.")
    if profile.trace is not None and not isinstance(profile.trace, (str, PathLike)):
        raise InvalidTypeError(f"trace={profile.trace!r} is not the path of a file.")


def _check_plain_call(name: str, fn: Any) -> None:
    """Refuse what cannot be called without arguments, as far as that can be known without calling it."""
    if fn is None:
        return
    if not callable(fn):
        raise InvalidTypeError(f"{name}={fn!r} is not callable. Give a function without arguments.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins do not say what they take
        return
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidTypeError(
            f"{name}={getattr(fn, '__name__', fn)} cannot be called without arguments: {error}. Bind them with functools.partial."
        ) from None


def _check_env(env: Any) -> None:
    if not isinstance(env, Mapping):
        raise InvalidTypeError(f"env={env!r} is not a mapping of names to texts.")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidTypeError(f"env has {name!r}: {value!r}. Names and values of environment variables are texts.")


def _checked_list(resources: Any) -> tuple[WorkerResources, ...]:
    if not isinstance(resources, Sequence) or isinstance(resources, (str, bytes)):
        raise InvalidTypeError(f"resources={resources!r} is not a WorkerResources, nor a list of them, one for each worker.")
    for entry in resources:
        if not isinstance(entry, WorkerResources):
            raise InvalidTypeError(f"resources has {entry!r} in it, which is not a WorkerResources.")
    if not resources:
        raise InvalidValueError("resources=[] names no worker. Give one WorkerResources for all workers, or one for each.")
    return tuple(resources)


def _check_chosen(kinds: Sequence[WorkerResources]) -> None:
    """Refuse kinds of worker that cannot have single GPUs that were chosen."""
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if kind.gpus != 0]
        if len(kinds) != 1:
            raise InvalidValueError(
                f"gpus= chooses single GPUs, but resources=[...] names {len(kinds)} kinds of worker with a GPU. "
                "Name one such kind, beside workers with gpus=0."
            )
    wanted = kinds[0].gpus
    if wanted is not None and not 0 < wanted <= 1:
        raise InvalidValueError(
            f"gpus= chooses single GPUs, but each worker is to have {wanted:g} (resources.gpus). Set one of the two."
        )


def _checked_gpus(gpus: Any) -> tuple[int, ...]:
    try:
        indices = tuple(gpus)
    except TypeError:
        raise InvalidTypeError(f"gpus={gpus!r} is not a list of GPU indices, such as [0, 2].") from None
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool):
            raise InvalidTypeError(f"GPU index {index!r} is not an integer. GPUs are numbered from 0.")
        if index < 0:
            raise InvalidValueError(f"GPU index {index} is negative. GPUs are numbered from 0.")
        if indices.count(index) > 1:
            raise InvalidValueError(f"GPU {index} is named twice in gpus={list(indices)}. Name each GPU once.")
    if not indices:
        raise InvalidValueError("gpus=[] names no GPU. For workers without one, use resources=WorkerResources(gpus=0).")
    return indices
