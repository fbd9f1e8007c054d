"""Work that a cluster does by itself: `batch` hands in a function, and its outputs are there when somebody asks for them."""

from __future__ import annotations

import dataclasses
import tempfile
import urllib.parse
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.cloud.sealed import seal
from raypool.engine.backend import function_name
from raypool.errors import CloudError, InvalidTypeError, InvalidValueError, ResourceError
from raypool.job import CALL, OUTPUTS, Job
from raypool.pool import checked_range
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile

if TYPE_CHECKING:
    from raypool.cloud.jobs import Jobs

MOST_BYTES = 512 * 2**20
"""So much can be handed in with a job at most: Ray takes no larger package."""

Workers = int | tuple[int, int]


class Call(NamedTuple):
    """What a job is to do: call `fn(*args)`, with a pool of so many workers open (None: without one), as the profile says.

    Where its outcome goes: `outputs`, a folder or URL; None: to the disk of its node.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    pool: Workers | None
    profile: Profile
    outputs: str | None


def batch(
    fn: Callable[..., Any],
    *args: Any,
    pool: Workers | None = None,
    profile: str | Profile = "local",
    name: str | None = None,
    outputs: str | None = None,
) -> Job:
    """Let a cluster call `fn(*args)` by itself, with a pool of its own; this process, and this machine, need not stay.

    The call is handed in as a job of Ray's through the dashboard of the cluster. It runs on the head, in a process of its own;
    `raypool.gcp()` is its pool there, whose workers are wherever the cluster has room. What it prints goes to the job's log.
    The functions of modules that are not installed there have to be in the profile's `working_dir`.

    Args:
        fn: What to call. Use `functools.partial` for keyword arguments.
        *args: What with. They travel with the job, to all its nodes: give large data by the address of where they lie.
        pool: So many workers, or `(least, most)`, are opened before the call and end after it. None: no pool is opened; `fn` can
            open one itself.
        profile: Which cluster (`jobs_address`, `token_file`), and what the workers get; its name, or a `Profile`. "local": the
            Ray of this machine that has a dashboard, as `ray start --head` starts one.
        name: What to call the job. None: as the function.
        outputs: A folder or URL ("gs://bucket/folder", "s3://...", a path that all machines share) for what it returns, which
            then is there as long as that place. None: the disk of the node that it ran on; there they are as long as the
            cluster's Ray runs, and can be read with the cluster's token only.

    Returns:
        The job. `raypool.find_job(job.id)` gives it to another process.

    Raises:
        ResourceError: The cluster could never have room for the pool. Where an autoscaler could make room, the job itself says so
            if it could not.
        CloudError: The cluster does not answer, or refuses the job.
        SerializationError: The function or its arguments cannot travel.
        InvalidValueError, InvalidTypeError: An argument cannot work.

    Source:
        MATLAB R2025b, batch.

    Example:
        >>> import raypool
        >>> def sweep(widths):
        ...     return list(raypool.gcp().parfor(train, widths))
        >>> job = raypool.batch(sweep, [8, 32, 128], pool=3, profile="my-cluster")  # doctest: +SKIP
        >>> job.id  # doctest: +SKIP
        'raypool_4f0c21a8b6e94d13'
        >>> raypool.find_job("raypool_4f0c21a8b6e94d13", profile="my-cluster").fetch_outputs()  # doctest: +SKIP
        [0.71, 0.93, 0.95]
    """
    from raypool.cloud.jobs import Jobs, PackedCall

    if not callable(fn):
        raise InvalidTypeError(f"{fn!r} is not a function, so that it cannot be called. Give it first: batch(fn, *args).")
    checked_range(pool, "pool")
    settings = _checked_profile(profile)
    outputs = _checked_place(outputs)
    call = Call(fn, args, pool, _as_there(settings), outputs)
    body = _packed(call)
    jobs = Jobs(settings)
    _check_room(jobs, pool, settings)
    key = uuid.uuid4().hex[:16]
    metadata = {CALL: key} | ({OUTPUTS: outputs} if outputs is not None else {})
    with tempfile.TemporaryDirectory(prefix="raypool-") as folder:
        module = Path(folder) / f"{CALL}_{key}"
        module.mkdir()
        (module / "__init__.py").write_text(f"# {key}\n")  # Ray takes modules for the same whose files say the same
        (module / "call").write_bytes(b"".join(seal("call", body)))
        command = [jobs.python, "-m", "raypool.batch_run", key]
        job_id = jobs.submit(command, name=name or function_name(fn), call=PackedCall(str(module), metadata))
    return Job(jobs, jobs.look(job_id))


def find_job(job_id: str, *, profile: str | Profile = "local") -> Job:
    """Return a job that was handed in before, by whatever process.

    Args:
        job_id: Its `id`.
        profile: The cluster that it was handed in to.

    Raises:
        CloudError: The cluster does not answer, or knows no such job.

    Source:
        MATLAB R2025b, findJob.
    """
    from raypool.cloud.jobs import Jobs

    jobs = Jobs(_checked_profile(profile))
    return Job(jobs, jobs.look(job_id))


def _checked_profile(profile: str | Profile) -> Profile:
    settings = resolve_profile(profile, {})
    if settings.backend != "ray":
        raise InvalidValueError(
            f"profile={profile!r} is this process itself, which a job is to outlive. It needs a Ray with a dashboard: that of a "
            "cluster, or of `ray start --head` on this machine."
        )
    return settings


def _as_there(profile: Profile) -> Profile:
    """Return a profile as it counts on the cluster itself: it is there already, and so is what is shipped to it."""
    nothing: dict[str, Any] = {"address": None, "jobs_address": None, "token_file": None, "tls": None, "working_dir": None}
    return dataclasses.replace(profile, packages=(), trace=None, **nothing)


def _checked_place(outputs: str | None) -> str | None:
    """Return a place for outputs without a slash at its end."""
    from raypool.engine.checkpoint_folders import filesystem

    if outputs is None:
        return None
    if not isinstance(outputs, str):
        raise InvalidTypeError(f"outputs={outputs!r} is not a folder or URL, such as 'gs://bucket/folder'.")
    if "://" not in outputs and not outputs.startswith("/"):
        raise InvalidValueError(f"outputs={outputs!r} is neither a URL, such as 'gs://bucket/folder', nor a path from / on.")
    if urllib.parse.urlsplit(outputs).password is not None:
        raise InvalidValueError("outputs= has a password in it, which the dashboard would show. Let the machines' account do.")
    filesystem(outputs, "outputs")
    return outputs.rstrip("/")


def _packed(call: Call) -> bytes:
    from raypool.engine.packing import snapshot

    body = snapshot(call, "a call to a cluster")
    if len(body) >= MOST_BYTES:
        raise CloudError(
            f"The function and its arguments are {len(body) / 2**20:.0f} MiB, and at most {MOST_BYTES / 2**20:.0f} MiB can be "
            "handed in with a job. Put the data where the cluster can read them, and give their address."
        )
    return body


def _check_room(jobs: Jobs, pool: Workers | None, profile: Profile) -> None:
    """Make sure that a cluster that is empty has room for a pool, or could get it.

    Raises:
        ResourceError: It could never have.
    """
    from raypool.engine.demands import demand_of

    least, _ = profile.sized(*checked_range(pool, "pool")) if pool is not None else (None, None)
    if least is None:
        return
    nodes = [{"Resources": node["resources_total"], "Labels": node["labels"]} for node in jobs.dashboard.nodes()]
    for kind in profile.kinds:
        demand = demand_of(kind, profile.gpus is not None, profile.workers_per_gpu, nodes)
        number = profile.listed.count(kind) or least
        room = sum(map(demand.fits, nodes)) * demand.first_workers
        if number > room and not jobs.dashboard.may_grow():
            there = sum(node["Resources"].get(demand.kind, 0) for node in nodes)
            each = ", ".join(f"{amount:g} {name}" for name, amount in demand.bundle.items())
            where = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}, no autoscaler"
            raise ResourceError(
                f"The job's pool could never open: {number} workers are asked for, and the cluster has room for {room} "
                f"({each} for each; {there:g} {demand.kind} on {where}). "
                f"Ask for at most {room}, or for less for each worker.",
                requested=number,
                available=room,
                holders=(),
            )
