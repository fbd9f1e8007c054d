"""Where a pool runs, and what each of its workers gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal

from raypool import profile_checks
from raypool.errors import InvalidValueError
from raypool.gpus.devices import FAST_LINKS, Inventory
from raypool.gpus.nvml import NvmlInventory
from raypool.resources import WorkerResources
from raypool.tls import Tls

FAST_MULTINODE = {"NCCL_IB_DISABLE": "0", FAST_LINKS: "1"}
"""What `fast_multinode` sets for all workers; the second lets each worker look for the interfaces of its own machine."""

CLIENT = "ray://"
"""What an address begins with by which Ray Client is meant."""

LOOPBACK = ("127.0.0.1", "localhost")

DASHBOARD_PORT = 8265


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where a pool runs and what its workers get; `parpool` takes one, or its name (see `raypool.profile_files`).

    Args:
        backend: "ray" (processes), "threads" or "inline" (both in this process, without Ray; at most 1,024 workers).
        address: A Ray cluster to connect to: "ray://HOST:10001" from any machine that reaches it (Ray Client), "HOST:6379" on a
            machine that is one of its nodes. None: the Ray that runs in this process, else a new one on this machine.
        token_file: The file with the token that the cluster asks for. None: as Ray finds it (RAY_AUTH_TOKEN,
            RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
        tls: The certificates for a cluster whose connections are encrypted.
        working_dir: A folder that all workers have as a copy, and as their working directory, so that they can import its
            modules. What its .gitignore and .rayignore name stays here.
        packages: What `pip` is to install for the workers, as in a requirements file.
        jobs_address: Where jobs are handed in: the URL of the cluster's dashboard. None: see `jobs_url`.
        resources: What each worker gets; or a list of that, one for each worker, in the order of the workers. The pool then has
            exactly so many: `[WorkerResources(gpus=0)] * 6 + [WorkerResources(gpus=1)] * 2`.
        gpus: Only these GPUs of this machine, by index; on a cluster a mapping of machines (their names, addresses or Ray's node
            ids) to such lists, `{"lab-3": [0, 2]}`. None: any.
        min_free_memory_bytes: Only GPUs of which nobody uses so much: those that somebody else fills are left out, and named
            [bytes]. None: any.
        workers_per_gpu: How many workers share a GPU at most, each with its part of the GPU's memory, which it cannot exceed
            through torch; workers are spread over the GPUs evenly. "auto": one on each at first (a number of workers that is
            asked for is a number of GPUs), then as many as fit, by what the last items have needed, 16 at most; an item that
            finds too little memory beside others runs again alone, at no charge to its `retries`. None: by the `gpus` of
            `resources`. It means nothing where there is no GPU.
        mps: Let the workers that share a GPU compute at the same time, by NVIDIA's Multi-Process Service, which is started and
            stopped with the pool where it can be; elsewhere they take turns.
        max_leftover_bytes: How much more of a GPU's memory a worker may use after a task than before it, but for what was built
            for `pool.constant`, by `setup`, or is kept in a `Composite`; above it is replaced before the next task [bytes]. None:
            a tenth of its part of the GPU's memory.
        env: Environment variables of the workers; they are set before anything else happens there.
        fast_multinode: Set up the workers for machines that are joined by InfiniBand: NCCL may use it (NCCL_IB_DISABLE=0), and
            where a machine has IP interfaces over it, NCCL uses these (NCCL_SOCKET_IFNAME), not the one by which rank 0 is
            reached. What `env` says counts first, and so does an NCCL_SOCKET_IFNAME of the machine's. It changes nothing on
            machines without InfiniBand; see docs/several_gpus.md.
        setup: A function without arguments that runs once in each worker process, before its first task; also in one that
            replaces another. If it raises, the worker does not start. What it leaves in global variables is there for tasks that
            travel by value (of a script or a notebook) too, but for a variable that has changed in this process since: of that
            they see the new value.
        teardown: A function without arguments that runs once in each worker process at its orderly end: not in one that was
            killed.
        start_timeout_s: Longest wait for resources, and for a worker to come up [s].
        idle_timeout_s: After so long without work the workers end and their memory is free; the next call starts them again
            [s]. None: never.
        cancel_grace_s: So long a task that was cancelled has to end; then its process is killed and replaced [s].
        retries: How often an item runs again after its worker was lost.
        quiet: Do not print the line that says what was started.
        trace: Record the scheduler's events in this file (JSON lines), for `raypool.testing.replay`.
        inventory: Who knows the GPUs of a machine; for tests, and for cards of which NVML knows nothing.

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
    token_file: str | PathLike[str] | None = None
    tls: Tls | None = None
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
        if not isinstance(self.resources, WorkerResources):
            object.__setattr__(self, "resources", profile_checks.checked_list(self.resources))
        object.__setattr__(self, "packages", profile_checks.checked_packages(self.packages))
        if self.gpus is not None:
            object.__setattr__(self, "gpus", profile_checks.checked_gpus(self.gpus))
            profile_checks.check_chosen(self.kinds)
        profile_checks.check(self)

    @property
    def worker_env(self) -> dict[str, str]:
        """The environment variables that worker processes start with, besides those of their machine.

        Example:
            >>> Profile(fast_multinode=True, env={"NCCL_IB_HCA": "mlx5"}).worker_env["NCCL_IB_DISABLE"]
            '0'
        """
        return {**(FAST_MULTINODE if self.fast_multinode else {}), **self.env}

    @property
    def is_remote(self) -> bool:
        """Whether this process stands outside of the cluster, and speaks with it through Ray Client.

        Example:
            >>> Profile(address="ray://head:10001").is_remote, Profile(address="10.0.0.7:6379").is_remote
            (True, False)
        """
        return self.address is not None and self.address.startswith(CLIENT)

    @property
    def jobs_url(self) -> str:
        """Where jobs are handed in: `jobs_address`, else port 8265 of this machine, where the dashboard or a tunnel to it is.

        Raises:
            InvalidValueError: The cluster is on another machine, whose dashboard, as a rule, only that machine itself reaches.

        Example:
            >>> Profile(address="ray://127.0.0.1:10001").jobs_url
            'http://127.0.0.1:8265'
        """
        if self.jobs_address is not None:
            return self.jobs_address
        if self.address in (None, "auto") or str(self.address).removeprefix(CLIENT).partition(":")[0] in LOOPBACK:
            return f"http://127.0.0.1:{DASHBOARD_PORT}"
        raise InvalidValueError(
            f"Where jobs for {self.address} are handed in is not known: a dashboard listens on its own machine only. "
            f"Open a tunnel (raypool cluster connect) and set jobs_address to its end here, http://127.0.0.1:{DASHBOARD_PORT}."
        )

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
