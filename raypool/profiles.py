"""`Profile`: where a pool runs, and what each worker gets; checked before anything starts.

Also here: `WorkerResources` of one worker, `Tls` of a cluster, `Slurm` of an allocation, and labels
of machines.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from types import NoneType
from typing import Any, Literal

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    checked_count,
    explains_calls,
    optional_count,
    real_number,
    whole_number,
)
from raypool.gpus.devices import FAST_LINKS, Inventory
from raypool.gpus.nvml import NvmlInventory

FAST_MULTINODE = {"NCCL_IB_DISABLE": "0", FAST_LINKS: "1"}
"""What `fast_multinode` sets; by the second, each worker looks for its machine's interfaces."""

CLIENT = "ray://"
"""The beginning of an address of Ray Client."""

LOOPBACK = ("127.0.0.1", "localhost")

DASHBOARD_PORT = 8265  # Ray's default

PINNING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables by which a worker is pinned to its GPU."""

BACKENDS = ("ray", "threads", "inline")

SLACK = -0.01, 0.02
"""How far rounded fractions may be over or under a whole GPU: 0.33 is a third, 0.167 a sixth."""

LEAST_SHARE = 0.0001
"""The smallest part of a GPU or a core that Ray counts."""

LABEL_WORD = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
"""A name or a value; a name may have a prefix, a domain and a slash."""

LABEL_PREFIX = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,251}[a-zA-Z0-9])?")

LABEL_VALUE = re.compile(r"(?P<no>!?)(in\((?P<several>[^()]+)\)|(?P<one>[^()!]*))")
"""What may be asked of a value: that it is this one, one of some, or none of them."""


@explains_calls
@dataclass(frozen=True, kw_only=True)
class Tls:
    """The certificates of a cluster with encrypted connections: each side checks the other's.

    Args:
        certificate: The file with this machine's certificate, PEM.
        key: The file with its private key.
        authority: The file with the certificate of the authority that has signed all others.

    Raises:
        InvalidTypeError: One of them is not the path of a file.

    Source:
        Ray, TLS Authentication: RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT.

    Example:
        >>> Tls(certificate="laptop.crt", key="laptop.key", authority="ca.crt").authority
        'ca.crt'
    """

    certificate: str | PathLike[str]
    key: str | PathLike[str]
    authority: str | PathLike[str]

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            if not isinstance(getattr(self, name), (str, PathLike)):
                raise InvalidTypeError(f"{name}={getattr(self, name)!r} is not the path of a file.")


@explains_calls
@dataclass(frozen=True, kw_only=True)
class Slurm:
    """An allocation of a Slurm cluster, as requested from `sbatch`.

    Args:
        partition: The partition. None: the cluster's default.
        account: The account to bill. None: the user's default.
        time: The time limit as Slurm writes it ("30", "4:00:00", "1-12:00:00"), or in minutes.
            None: the partition's default.
        nodes: The number of nodes. None: as many as the workers need, at least one.
        gpus_per_node: GPUs of each node, a number or "KIND:NUMBER" ("a100:4"). None: no GPUs, and
            as many cores as the workers need.
        cpus_per_gpu: Cores for each GPU. None: the cluster's default.
        constraint: Features that each node must have.
        sbatch: More options of `sbatch`, such as ["--qos=long", "--mem=64G"].
        notice_s: How long before the end tasks are notified, so that they can save [s].
        folder: Where jobs keep their files; this machine and all nodes must share it.

    Raises:
        InvalidTypeError: A value has the wrong type.
        InvalidValueError: A value is invalid.

    Source:
        The manual of sbatch. Names are those of submitit and dask-jobqueue where these agree.

    Example:
        >>> Slurm(partition="gpu", gpus_per_node="a100:4").gpus
        4
    """

    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    nodes: int | None = None
    gpus_per_node: int | str | None = None
    cpus_per_gpu: int | None = None
    constraint: str | None = None
    sbatch: Sequence[str] = ()
    notice_s: float = 120.0
    folder: str | PathLike[str] = "~/.raypool/slurm"

    def __post_init__(self) -> None:
        for name in ("partition", "account", "constraint"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidTypeError(f"{name}={value!r} is not a string.")
        for name in ("nodes", "cpus_per_gpu"):
            object.__setattr__(self, name, optional_count(name, getattr(self, name), least=1))
        what, one = "a list of options, such as ['--qos=long']", "an option, such as '--qos=long'"
        options = _checked_list("sbatch", self.sbatch, str, what, one, re.compile(r"-.*\Z").match)
        object.__setattr__(self, "sbatch", options)
        if isinstance(self.time, bool) or not isinstance(self.time, (str, int, NoneType)):
            raise InvalidTypeError(
                "time must be a time limit, such as '4:00:00', or a number of minutes, not"
                f" {self.time!r}."
            )
        notice_s = real_number(self.notice_s)
        if notice_s is None:
            raise InvalidTypeError(f"notice_s={self.notice_s!r} is not a number of seconds.")
        object.__setattr__(self, "notice_s", notice_s)
        if not isinstance(self.folder, (str, PathLike)):
            raise InvalidTypeError(f"folder={self.folder!r} is not the path of a folder.")
        if not 0 < self.notice_s < math.inf:
            raise InvalidValueError(
                f"notice_s={self.notice_s!r} is no time to save in. Use a finite number above 0."
            )
        if self.gpus < 0:
            raise InvalidValueError(f"gpus_per_node={self.gpus_per_node!r} is negative.")

    @property
    def gpus(self) -> int:
        """The number of GPUs of each node."""
        given = self.gpus_per_node or 0
        if isinstance(given, str):
            _, _, given = given.rpartition(":")
        number = int(given) if str(given).isdecimal() else whole_number(given)
        if number is None:
            raise InvalidTypeError(
                f"gpus_per_node={self.gpus_per_node!r} must be a number or 'KIND:NUMBER', such as"
                " 'a100:4'."
            )
        return number


@explains_calls
@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker gets of a machine.

    Args:
        gpus: GPUs for each worker. A fraction puts several workers on one GPU, which the pool then
            holds whole, so the fraction must divide it: 0.5, 0.33, 0.25. None: one if there are
            GPUs, else none.
        cpus: CPU cores, as Ray counts them. None: one for a worker without a GPU, none for one
            with.
        memory_bytes: Main memory that Ray reserves, and that the worker and the processes that it
            started may use [bytes]; a worker that uses more is ended and replaced, like one that
            died. Values in Ray's object store and other shared memory do not count. None: no limit.
        accelerator_type: Only on nodes with this kind of accelerator, by Ray's name for it ("T4",
            "H100", ...).
        labels: Only on nodes with these labels, such as `{"market-type": "spot"}`; a value may be
            one of Ray's operators: "!spot" (also without such a label), "in(a, b)" or "!in(a, b)".

    Raises:
        InvalidValueError: A count is negative, a GPU count above 1 is not whole, one below 1 does
            not divide a GPU, or no node can have such a label.

    Example:
        >>> WorkerResources(gpus=0.5).workers_per_gpu
        2
    """

    gpus: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    accelerator_type: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)  # a dict has no hash

    def __post_init__(self) -> None:
        for name in ("gpus", "cpus", "memory_bytes"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checked_amount(name, value))
        if self.accelerator_type is not None and not isinstance(self.accelerator_type, str):
            raise InvalidTypeError(
                f"WorkerResources(accelerator_type={self.accelerator_type!r}) is not a name, such"
                " as 'H100'."
            )
        _check_texts("labels", self.labels, "labels")
        _check_labels(self.labels)
        gpus = self.gpus or 0
        if gpus > 1 and gpus != int(gpus):
            raise InvalidValueError(
                f"WorkerResources(gpus={gpus}) would take part of a second GPU, which Ray cannot"
                " do. Use an integer, or a fraction below 1."
            )
        # the rest of a GPU would be held, and idle
        if 0 < gpus < 1 and not SLACK[0] <= 1 - round(1 / gpus) * gpus <= SLACK[1]:
            share = int(1 / gpus)
            raise InvalidValueError(
                f"WorkerResources(gpus={gpus!r}) does not divide a GPU:"
                f" {1 - share * gpus:.2g} of it would lie idle. The nearest that do are"
                f" {1 / share:.3g} ({share} on a GPU) and {1 / (share + 1):.3g} ({share + 1})."
            )

    @property
    def workers_per_gpu(self) -> int:
        """How many such workers one GPU takes."""
        return round(1 / self.gpus) if self.gpus and self.gpus < 1 else 1


def _checked_amount(name: str, value: Any) -> float:
    number = real_number(value)
    if number is None:
        raise InvalidTypeError(f"WorkerResources({name}={value!r}) is not a number.")
    if not number >= 0:  # not `< 0`: NaN is refused, too
        raise InvalidValueError(
            f"WorkerResources({name}={value!r}) is negative. Use 0 or more, or leave it out."
        )
    if number == math.inf:
        raise InvalidValueError(
            f"WorkerResources({name}={value!r}) is infinite. Use a number, or leave it out."
        )
    if 0 < number < LEAST_SHARE:
        raise InvalidValueError(
            f"WorkerResources({name}={value!r}) is less than {LEAST_SHARE}, the least that Ray"
            " counts. Use more, or 0."
        )
    return number


def _check_texts(name: str, mapping: Any, kind: str) -> None:
    """Refuse anything but a mapping of strings to strings; `kind` names them."""
    if not isinstance(mapping, Mapping):
        raise InvalidTypeError(f"{name}={mapping!r} is not a mapping of names to strings.")
    for key, value in mapping.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidTypeError(
                f"{name} has {key!r}: {value!r}. Names and values of {kind} are strings."
            )


@explains_calls
@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where a pool runs and what its workers get; `parpool` takes one, or its name.

    Args:
        backend: "ray" (processes), "threads" or "inline" (both in this process, without Ray; at
            most 1,024 workers).
        address: A Ray cluster: "ray://HOST:10001" from any machine that reaches it (Ray Client),
            "HOST:6379" on one of its nodes. None: the Ray that runs in this process, else a new one
            on this machine.
        token_file: The file with the cluster's token. None: as Ray finds it (RAY_AUTH_TOKEN,
            RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
        tls: The certificates for a cluster with encrypted connections.
        slurm: The allocation of a Slurm cluster that the pool waits for, uses, and releases at its
            end; `kind = "slurm"` in a file, with the fields of `Slurm` beside the others. Inside a
            Slurm job: the nodes of that job.
        working_dir: A folder whose copy is the workers' working directory, so that they can import
            its modules; without the files in its .gitignore and .rayignore.
        packages: Packages that `pip` installs for the workers, as in a requirements file.
        jobs_address: Where jobs are submitted: the URL of the cluster's dashboard. None: see
            `jobs_url`.
        resources: The resources of each worker; or a list, one entry for each worker in order,
            which sets their number:
            `[WorkerResources(gpus=0)] * 6 + [WorkerResources(gpus=1)] * 2`.
        gpus: Only these GPUs of this machine, by index; on a cluster a mapping of machines (their
            names, addresses or Ray's node ids) to such lists, `{"lab-3": [0, 2]}`. None: any.
        min_free_memory_bytes: Only GPUs with this much free memory [bytes]; others are left out,
            and named. None: any.
        workers_per_gpu: The most workers that share a GPU, each with its part of the GPU's memory,
            which it cannot exceed through torch; workers are spread evenly over the GPUs. "auto":
            one on each at first (`num_workers` then counts GPUs), then as many as fit, judged by
            the last items, 16 at most; an item that finds too little memory beside others runs
            again alone, which does not count as a retry. None: by the `gpus` of `resources`. It has
            no effect without a GPU.
        mps: Let workers that share a GPU compute at the same time, by NVIDIA's Multi-Process
            Service, which starts and stops with the pool where possible; elsewhere they take turns.
        max_leftover_bytes: How much more of a GPU's memory a worker may use after a task than
            before it, not counting `pool.constant`, `setup` and `Composite` values; a worker above
            it is replaced before the next task [bytes]. None: a tenth of its part of the GPU's
            memory.
        env: Environment variables of the workers, set before anything else happens there.
        fast_multinode: Set up the workers for machines connected by InfiniBand: NCCL may use it
            (NCCL_IB_DISABLE=0), and its IP interfaces (NCCL_SOCKET_IFNAME) instead of the one by
            which rank 0 is reached. `env` takes precedence, and so does an NCCL_SOCKET_IFNAME of
            the machine. Nothing changes without InfiniBand; see docs/several_gpus.md.
        fork_server: Fork workers from one process that has imported what they need, where raypool
            starts Ray 2.60 itself, on Linux, also on the nodes of a Slurm job: they start in a
            fraction of the time and share memory. False: each worker is a process that imports them
            itself.
        preload: Modules that this process imports, where they are installed, beside raypool's and
            Ray's; for `fork_server`. Workers are plain processes if one of them imports Ray,
            starts threads, or uses a GPU. On the nodes of a Slurm job it is torch, whatever this
            says.
        setup: A function without arguments that runs once in each worker process, before its first
            task; also in a replacement. If it raises, the worker does not start. Tasks see the
            global variables that it sets, even in functions of a script or a notebook; if a
            variable has changed in this process since, they see the new value.
        teardown: A function without arguments that runs once in each worker process at its normal
            end, not in one that was killed, as one whose cancelled task did not stop.
        start_timeout_s: Longest wait for resources, and for a worker to start [s].
        idle_timeout_s: After this time without work the workers exit and free their memory; the
            next call starts them again [s]. None: never.
        cancel_grace_s: Time for a cancelled task to end [s]; then its process is killed and
            replaced.
        retries: How often an item runs again after its worker was lost.
        quiet: Do not print the line about what was started.
        trace: Record the scheduler's events in this file (JSON lines), for
            `raypool.testing.replay`.
        inventory: The source of facts about a machine's GPUs; for tests, and for GPUs that NVML
            does not know.

    Raises:
        InvalidTypeError: A field has the wrong type.
        InvalidValueError: A field has an invalid value.

    Source:
        MATLAB R2025b, parcluster and the properties of its cluster profiles; IdleTimeout of
        parallel.ProcessPool [there in min]; PARALLEL_SERVER_FAST_MULTINODE_GPU_COMMUNICATION.
        NVIDIA NCCL, Environment Variables.

    Example:
        >>> Profile(gpus=(0, 2), start_timeout_s=10).gpus
        (0, 2)
    """

    backend: str = "ray"
    address: str | None = None
    token_file: str | PathLike[str] | None = None
    tls: Tls | None = None
    slurm: Slurm | None = None
    working_dir: str | PathLike[str] | None = None
    packages: Sequence[str] = ()
    jobs_address: str | None = None
    resources: WorkerResources | Sequence[WorkerResources] = field(default_factory=WorkerResources)
    gpus: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    min_free_memory_bytes: int | None = None
    workers_per_gpu: int | Literal["auto"] | None = None
    mps: bool = False
    max_leftover_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fast_multinode: bool = False
    fork_server: bool = True
    preload: Sequence[str] = ("torch",)
    setup: Callable[[], object] | None = None
    teardown: Callable[[], object] | None = None
    start_timeout_s: float = 60.0
    idle_timeout_s: float | None = None
    cancel_grace_s: float = 5.0
    retries: int = 2
    quiet: bool = False
    trace: str | PathLike[str] | None = None
    inventory: Inventory = field(default_factory=NvmlInventory)

    def __post_init__(self) -> None:
        # the class is frozen: converted fields are set around it
        if not isinstance(self.resources, WorkerResources):
            what = "a WorkerResources, or a list of them, one for each worker"
            listed = _checked_list(
                "resources", self.resources, WorkerResources, what, "a WorkerResources"
            )
            if not listed:
                raise InvalidValueError(
                    "resources=[] describes no worker. Pass one WorkerResources for all workers,"
                    " or one for each."
                )
            object.__setattr__(self, "resources", listed)
        what = "a list of packages for pip, such as ['scikit-learn>=1.5']"
        packages = _checked_list(
            "packages", self.packages, str, what, "a package for pip", str.strip
        )
        object.__setattr__(self, "packages", packages)
        what = "a list of modules, such as ['torch', 'lightning']"
        preload = _checked_list("preload", self.preload, str, what, "a module", str.strip)
        object.__setattr__(self, "preload", preload)
        if self.gpus is not None:
            object.__setattr__(self, "gpus", _checked_gpus(self.gpus, self.kinds))
        _check(self)

    @property
    def worker_env(self) -> dict[str, str]:
        """The environment variables of worker processes, besides those of their machine.

        Example:
            >>> Profile(fast_multinode=True, env={"A": "b"}).worker_env["NCCL_IB_DISABLE"]
            '0'
        """
        return {**(FAST_MULTINODE if self.fast_multinode else {}), **self.env}

    @property
    def is_remote(self) -> bool:
        """Whether this process is outside of the cluster, and uses Ray Client.

        Example:
            >>> Profile(address="ray://head:10001").is_remote
            True
        """
        return self.address is not None and self.address.startswith(CLIENT)

    @property
    def jobs_url(self) -> str:
        """Where jobs are submitted: `jobs_address`, else port 8265 here (a dashboard, or a tunnel).

        Raises:
            InvalidValueError: The cluster is on another machine, whose dashboard, as a rule, only
                that machine itself reaches.

        Example:
            >>> Profile(address="ray://127.0.0.1:10001").jobs_url
            'http://127.0.0.1:8265'
        """
        if self.jobs_address is not None:
            return self.jobs_address
        if (
            self.address in (None, "auto")
            or str(self.address).removeprefix(CLIENT).partition(":")[0] in LOOPBACK
        ):
            return f"http://127.0.0.1:{DASHBOARD_PORT}"
        raise InvalidValueError(
            f"The dashboard for jobs of {self.address} is unknown: it listens only on its own"
            " machine. Open a tunnel (raypool cluster connect) and set jobs_address to its local"
            f" end, http://127.0.0.1:{DASHBOARD_PORT}."
        )

    @property
    def listed(self) -> tuple[WorkerResources, ...]:
        """The resources of each worker, in order, if `resources` is a list; else nothing."""
        return () if isinstance(self.resources, WorkerResources) else tuple(self.resources)

    @property
    def kinds(self) -> tuple[WorkerResources, ...]:
        """The different kinds of worker.

        Example:
            >>> kinds = [WorkerResources(gpus=0)] * 6 + [WorkerResources(gpus=1)] * 2
            >>> len(Profile(resources=kinds).kinds)
            2
        """
        return (
            (self.resources,)
            if isinstance(self.resources, WorkerResources)
            else tuple(dict.fromkeys(self.resources))
        )

    def sized(self, least: int | None, most: int | None) -> tuple[int | None, int | None]:
        """Return the number of workers of a pool that asks for `least` to `most` (None: any).

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
                f"num_workers asks for {asked}, but resources=[...] describes {number} workers."
                " Leave num_workers out, or pass one WorkerResources for all."
            )
        return number, number


# --- checks of a profile --------------------------------------------------------------------------

TYPES: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("address", (str, NoneType), "the address of a Ray cluster, such as '10.0.0.7:6379'"),
    ("jobs_address", (str, NoneType), "a URL, such as 'http://127.0.0.1:8265'"),
    ("tls", (Tls, NoneType), "a Tls(certificate=, key=, authority=)"),
    ("slurm", (Slurm, NoneType), "a Slurm(partition=, time=, nodes=, ...)"),
    ("token_file", (str, PathLike, NoneType), "the path of a file"),
    ("working_dir", (str, PathLike, NoneType), "the path of a folder"),
    ("trace", (str, PathLike, NoneType), "the path of a file"),
    ("quiet", bool, "True or False"),
    ("fast_multinode", bool, "True or False"),
    ("mps", bool, "True or False"),
    ("fork_server", bool, "True or False"),
    ("start_timeout_s", Real, "a number of seconds"),
    ("idle_timeout_s", (Real, NoneType), "a number of seconds"),
    ("cancel_grace_s", Real, "a number of seconds"),
)
"""The types of fields, also in words."""

LEAST = {"retries": 0, "min_free_memory_bytes": 1, "max_leftover_bytes": 0, "workers_per_gpu": 1}
"""The least values of counts."""


def _check(profile: Profile) -> None:
    """Refuse invalid types and values of single fields, then fields that contradict each other."""
    for name, kind, what in TYPES:
        value = getattr(profile, name)
        # a bool is an int to Python
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidTypeError(f"{name}={value!r} is not {what}.")
    for name in ("start_timeout_s", "idle_timeout_s", "cancel_grace_s"):
        object.__setattr__(profile, name, real_number(getattr(profile, name)))  # Python's, or None
    if not callable(getattr(profile.inventory, "devices", None)):
        raise InvalidTypeError(
            f"inventory={profile.inventory!r} is not an inventory, which has a method devices()."
        )
    _check_texts("env", profile.env, "environment variables")
    for name in ("setup", "teardown"):
        _check_plain_call(name, getattr(profile, name))
    for name, least in LEAST.items():
        value = getattr(profile, name)
        is_left_out = value is None and name != "retries"
        if not is_left_out and (name, value) != ("workers_per_gpu", "auto"):
            object.__setattr__(profile, name, checked_count(name, value, least))
    for name, is_wrong, why in _rules(profile):
        if is_wrong:
            raise InvalidValueError(f"{name}={getattr(profile, name)!r} {why}")


def _rules(profile: Profile) -> Iterable[tuple[str, bool, str]]:
    """Return fields, whether their values are wrong, also beside others, and the reasons."""
    address, slurm, per_gpu = profile.address, profile.slurm, profile.workers_per_gpu
    is_url = str(profile.jobs_address or "http://").startswith(("http://", "https://"))
    pinning = [name for name in profile.env if name in PINNING]
    parts = [kind.gpus for kind in profile.kinds if kind.gpus]  # neither None nor 0
    # `not ... > 0` and the like refuse NaN, too
    return (
        ("backend", profile.backend not in BACKENDS, f"is not one of {', '.join(BACKENDS)}."),
        (
            "start_timeout_s",
            not profile.start_timeout_s > 0,
            "leaves no time to start. Use a number above 0.",
        ),
        (
            "idle_timeout_s",
            profile.idle_timeout_s is not None and not profile.idle_timeout_s > 0,
            "would end workers that were just started. Use a number above 0, or None to keep them.",
        ),
        (
            "cancel_grace_s",
            not profile.cancel_grace_s >= 0,
            "is negative. Use 0 to kill cancelled tasks at once.",
        ),
        (
            "env",
            bool(pinning),
            f"sets {', '.join(pinning)}, which the pool sets for each worker. Choose GPUs with"
            " gpus=[...].",
        ),
        (
            "address",
            slurm is not None and address is not None,
            "is that of a running cluster, but slurm requests a new one. Pass only one of them.",
        ),
        (
            "backend",
            slurm is not None and profile.backend != "ray",
            "is this process, but slurm requests machines. Leave one of them out.",
        ),
        (
            "address",
            address is not None and "://" in address and not profile.is_remote,
            "must be 'ray://HOST:10001' or 'HOST:6379'.",
        ),
        ("jobs_address", not is_url, "is not a URL, such as 'http://127.0.0.1:8265'."),
        (
            "gpus",
            profile.is_remote and isinstance(profile.gpus, tuple),  # a mapping names machines
            f"are GPUs of this machine, which is not a node of {address}. Specify the machine:"
            " gpus={'lab-3': [0, 2]}.",
        ),
        (
            "workers_per_gpu",
            per_gpu is not None and bool(parts),
            f"sets how many workers share a GPU, and so does gpus={max(parts, default=0):g} in"
            " resources. Leave one out.",
        ),
    )


def _check_plain_call(name: str, fn: Any) -> None:
    """Refuse functions that, by their signature, cannot be called without arguments."""
    if fn is None:
        return
    if not callable(fn):
        raise InvalidTypeError(f"{name}={fn!r} is not callable. Pass a function without arguments.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind()  # it is not called for this: `setup` is for workers
    except TypeError as error:
        raise InvalidTypeError(
            f"{name}={getattr(fn, '__name__', fn)} cannot be called without arguments: {error}."
            " Bind them with functools.partial."
        ) from None


def _checked_list(
    name: str, values: Any, kind: type, what: str, one: str, is_right: Callable[[Any], Any] = bool
) -> tuple[Any, ...]:
    """Return a list as a tuple, if its entries have the right type and are right."""
    # a text is a sequence, of its characters
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidTypeError(f"{name} must be {what}, not {values!r}.")
    for value in values:
        if not isinstance(value, kind) or not is_right(value):
            wrong = InvalidValueError if isinstance(value, kind) else InvalidTypeError
            raise wrong(f"{name} contains {value!r}, which is not {one}.")
    return tuple(values)


def _checked_gpus(
    gpus: Any, kinds: Sequence[WorkerResources]
) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """Return chosen GPUs as tuples, if these kinds of worker can have single GPUs."""
    if isinstance(gpus, Mapping):
        for machine in gpus:
            if not isinstance(machine, str):
                raise InvalidTypeError(
                    f"gpus contains {machine!r}, which is not the name of a machine."
                )
    each = gpus if isinstance(gpus, Mapping) else {"": gpus}
    chosen = {machine: _checked_indices(indices) for machine, indices in each.items()}
    if not all(chosen.values()) or not chosen:
        raise InvalidValueError(
            f"gpus={gpus!r} selects no GPU. For workers without one, use"
            " resources=WorkerResources(gpus=0)."
        )
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if kind.gpus != 0]  # the others need none of the GPUs
        if len(kinds) != 1:  # which of them has which GPU could not be said
            raise InvalidValueError(
                f"gpus= chooses single GPUs, but resources=[...] has {len(kinds)} kinds of workers"
                " with a GPU. Use one such kind, beside workers with gpus=0."
            )
    wanted = kinds[0].gpus
    if wanted is not None and not 0 < wanted <= 1:
        raise InvalidValueError(
            f"gpus= chooses single GPUs, but resources.gpus gives each worker {wanted:g}. Set only"
            " one of the two."
        )
    return chosen if isinstance(gpus, Mapping) else chosen[""]


def _checked_indices(gpus: Any) -> tuple[int, ...]:
    try:
        given = tuple(gpus)
    except TypeError:
        raise InvalidTypeError(
            f"gpus must be a list of GPU indices, such as [0, 2], not {gpus!r}."
        ) from None
    # NumPy's integers, too, but not True
    indices = tuple(checked_count("a GPU's index", entry, 0) for entry in given)
    if twice := [index for index in indices if indices.count(index) > 1]:
        raise InvalidValueError(f"GPU {twice[0]} is listed twice. List each GPU once.")
    return indices


# --- labels of machines ---------------------------------------------------------------------------


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a machine with these labels has all that are wanted.

    Example:
        >>> has_labels({"market": "spot"}, {"market": "in(spot, reserved)", "region": "!eu"})
        True
    """
    return all(  # a machine without a label has no value of it: "!eu" is true there
        (labels.get(name) in _label_values(value)) != value.startswith("!")
        for name, value in wanted.items()
    )


def for_ray(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return wanted labels as Ray understands them.

    Example:
        >>> for_ray({"market": "in(spot, reserved)"})
        {'market': 'in(spot,reserved)'}
    """
    # to Ray (2.60) the blank of "in(a, b)" is part of the value, which none has
    return {name: value.replace(" ", "") for name, value in wanted.items()}


def _check_labels(wanted: Mapping[str, str]) -> None:
    """Refuse labels that no machine can have, and conditions that Ray would not understand."""
    for name, value in wanted.items():
        prefix, slash, word = name.rpartition("/")
        if not LABEL_WORD.fullmatch(word) or (slash and not LABEL_PREFIX.fullmatch(prefix)):
            raise InvalidValueError(
                f"{name!r} in labels is not a valid name. A name has letters and digits, with - _ ."
                " between them, and perhaps a domain and a slash before it."
            )
        values = _label_values(value)  # a label may have an empty value, a list may not
        if not values or not all(
            entry == value == "" or LABEL_WORD.fullmatch(entry) for entry in values
        ):
            raise InvalidValueError(
                f"{name}: {value!r} in labels is not a valid value. Use one"
                ' ("spot"), an excluded one ("!spot"), or several ("in(a, b)", "!in(a, b)").'
            )


def _label_values(wanted: str) -> list[str]:
    """Return the values in a condition; none if this is not one."""
    found = LABEL_VALUE.fullmatch(wanted)
    if found is None:
        return []
    return (
        [found["one"]]
        if found["several"] is None
        else [entry.removeprefix(" ") for entry in found["several"].split(",")]
    )
