"""`batch`: a function that a cluster runs as a job; `find_job` and `Job` give its outputs later.

**To the cluster** the call goes as a module of the job's runtime environment: submitted through the
dashboard with the job, like the user's own code, and not in its command or its variables, which the
dashboard shows.

**Back** comes one file, named after the job: a line with a checksum, and the pickled value or
exception, so only what the job has written is unpickled. The checksum is an HMAC; its key is known
to those who may look at the job, by the cluster's token. The file is at `outputs`, or else on the
disk of the job's node, from where the dashboard (the only port that can be reached for certain)
hands it to those with the token. The job's log would show it to everybody who reads logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import importlib.resources
import os
import pickle
import secrets
import sys
import tempfile
import traceback
import urllib.parse
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel.records import function_name
from raypool.errors import (
    CloudError,
    InvalidTypeError,
    InvalidValueError,
    RemoteTraceback,
    ResourceError,
    SerializationError,
    TaskError,
    explains_calls,
    without_own_frames,
)
from raypool.pool import checked_range, parpool
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.views.words import one_line

if TYPE_CHECKING:
    from raypool.cluster.jobs import JobInfo, Jobs
    from raypool.cluster.slurm_jobs import SlurmJobs

MOST_BYTES = 512 * 2**20
"""The greatest size of a job's call [bytes]: Ray takes no larger package."""

CALL = "raypool_call"
"""The name of the module that carries a call to its job, and of the file in it."""

OUTPUTS = "raypool_outputs"
"""The metadata key of a job whose outputs are not on its cluster."""

Workers = int | tuple[int, int]


class BatchCall(NamedTuple):
    """A job: `fn(*args)`, with a pool of `pool` workers (None: without one), as `profile` says."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    pool: Workers | None
    profile: Profile


@without_own_frames
@explains_calls
def batch(
    fn: Callable[..., Any],
    *args: Any,
    pool: Workers | None = None,
    profile: str | Profile | None = None,
    name: str | None = None,
    outputs: str | None = None,
) -> Job:
    """Call `fn(*args)` on a cluster, with its own pool, as a job that outlives this process.

    The call is submitted as a Ray job through the dashboard of the cluster. It runs on the head, in
    its own process; `raypool.gcp()` is its pool there, whose workers are wherever the cluster has
    room. Its printed output goes to the job's log. Functions of modules that are not installed
    there have to be in the profile's `working_dir`.

    Args:
        fn: The function. Use `functools.partial` for keyword arguments.
        *args: Its arguments. They travel with the job, to all its nodes: for large data, pass its
            location.
        pool: The number of workers, or `(least, most)`, of the pool that is open during the call.
            None: no pool is opened; `fn` can open one itself.
        profile: The cluster (`jobs_address`, `token_file`) and what the workers get; its name, or a
            `Profile`. "local": the Ray of this machine that has a dashboard, as `ray start --head`
            starts one.
        name: The name of the job. None: that of the function.
        outputs: A folder or URL ("gs://bucket/folder", "s3://...", a path that all machines share)
            for the outputs, where they stay. None: the disk of the job's node; they stay there as
            long as the cluster's Ray runs, and only the cluster's token gives access.

    Returns:
        The job. `raypool.find_job(job.id)` gives it to another process.

    Raises:
        ResourceError: The cluster could never have room for the pool. If an autoscaler could make
            room, the job itself reports that it did not.
        CloudError: The cluster does not answer, or refuses the job.
        SerializationError: The function or its arguments cannot travel.
        InvalidValueError, InvalidTypeError: An argument is invalid.

    Source:
        MATLAB R2025b, batch.

    Example:
        >>> import raypool
        >>> def sweep(widths):
        ...     return list(raypool.gcp().parfor(train, widths))
        >>> job = raypool.batch(sweep, [8, 32, 128], pool=3, profile="lab")  # doctest: +SKIP
        >>> job.id  # doctest: +SKIP
        'raypool_4f0c21a8b6e94d13'
        >>> job = raypool.find_job("raypool_4f0c21a8b6e94d13", profile="lab")  # doctest: +SKIP
        >>> job.fetch_outputs()  # doctest: +SKIP
        [0.71, 0.93, 0.95]
    """
    from raypool.backends.ray.packing import snapshot
    from raypool.cluster.jobs import KEY, Jobs, PackedCall, new_id
    from raypool.cluster.slurm_jobs import jobs_of

    if not callable(fn):
        raise InvalidTypeError(f"{fn!r} cannot be called. Pass a function first: batch(fn, *args).")
    checked_range(pool, "pool")  # mistakes are raised here, not hours later on the cluster
    settings = _checked_profile(profile)
    outputs = _checked_place(outputs)
    # the job is on the cluster already, and so is everything that is shipped
    as_there = dataclasses.replace(
        settings,
        address=None,
        jobs_address=None,
        token_file=None,
        tls=None,
        slurm=None,
        working_dir=None,
        packages=(),
        trace=None,
    )
    body = snapshot(BatchCall(fn, args, pool, as_there), "a call to a cluster")
    if len(body) >= MOST_BYTES:
        raise CloudError(
            f"The function and its arguments are {len(body) / 2**20:.0f} MiB; a job can carry"
            f" {MOST_BYTES / 2**20:.0f} MiB. Store the data where the cluster can read them, and"
            " pass their location."
        )
    jobs = jobs_of(settings)
    if isinstance(jobs, Jobs):
        _check_room(jobs, pool, settings)
    elif outputs is None:  # a node's disk cannot be read later
        outputs = str(jobs.outputs)
    job_id, key = new_id(), secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="raypool-") as folder:
        module = Path(folder) / CALL
        module.mkdir()
        (module / "__init__.py").touch()
        (module / CALL).write_bytes(pickle.dumps((_versions(), job_id, key, outputs, body)))
        metadata = {KEY: key} | ({OUTPUTS: outputs} if outputs is not None else {})
        workers = settings.sized(*checked_range(pool, "pool"))
        call = PackedCall(job_id, str(module), metadata, workers)
        jobs.submit(
            [jobs.python, "-m", "raypool.batches"], name=name or function_name(fn), call=call
        )
    return Job(jobs, jobs.look(job_id))


@without_own_frames
@explains_calls
def find_job(job_id: str, *, profile: str | Profile | None = None) -> Job:
    """Return a job that any process has submitted.

    Args:
        job_id: Its `id`.
        profile: The cluster that it was submitted to.

    Raises:
        CloudError: The cluster does not answer, or knows no such job.

    Source:
        MATLAB R2025b, findJob.
    """
    from raypool.cluster.slurm_jobs import jobs_of

    jobs = jobs_of(_checked_profile(profile))
    return Job(jobs, jobs.look(job_id))


def _checked_profile(profile: str | Profile | None) -> Profile:
    settings = resolve_profile(profile, {})
    if settings.backend != "ray":
        raise InvalidValueError(
            f"profile={profile!r} runs in this process, which a job must outlive. Use a profile of"
            " a cluster, or of a Ray with a dashboard on this machine (`ray start --head`)."
        )
    return settings


def _checked_place(outputs: str | None) -> str | None:
    """Return a place for outputs, without a slash at its end."""
    from raypool.worker.folders import filesystem

    if outputs is None:
        return None
    if not isinstance(outputs, str):
        raise InvalidTypeError(
            f"outputs must be a folder or URL, such as 'gs://bucket/folder', not {outputs!r}."
        )
    if "://" not in outputs and not outputs.startswith("/"):
        raise InvalidValueError(
            "outputs must be a URL, such as 'gs://bucket/folder', or an absolute path, not"
            f" {outputs!r}."
        )
    if urllib.parse.urlsplit(outputs).password is not None:
        raise InvalidValueError(
            "outputs contains a password, which the dashboard would show. Use the machines'"
            " account instead."
        )
    filesystem(outputs, "outputs")  # it raises the error for a place that cannot be reached
    return outputs.rstrip("/")


def _check_room(jobs: Jobs, pool: Workers | None, profile: Profile) -> None:
    """Make sure that the cluster, when empty, has room for a pool, or could get it."""
    from raypool.backends.ray.demand import demand_of

    least, _ = profile.sized(*checked_range(pool, "pool")) if pool is not None else (None, None)
    if least is None:  # no pool is opened
        return
    nodes = [
        {"Resources": node["resources_total"], "Labels": node["labels"]}
        for node in jobs.dashboard.nodes()
    ]
    # all that the nodes have, whoever uses it now: the job may wait for that
    for kind in profile.kinds:
        demand = demand_of(kind, profile.gpus is not None, profile.workers_per_gpu, nodes)
        number = profile.listed.count(kind) or least
        room = sum(map(demand.fits, nodes)) * demand.first_workers
        if number > room and not jobs.dashboard.may_grow():
            there = sum(node["Resources"].get(demand.kind, 0) for node in nodes)
            each = ", ".join(f"{amount:g} {name}" for name, amount in demand.bundle.items())
            where = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}, no autoscaler"
            raise ResourceError(
                f"The job's pool could never open. Workers: requested {number}, and the cluster has"
                f" room for {room} ({each} for each; {there:g} {demand.kind} on {where}). Request"
                f" at most {room}, or fewer resources for each.",
                requested=number,
                available=room,
            )


class Job:
    """A job on a cluster, from `batch` or `find_job`. Its properties are read from the cluster."""

    def __init__(self, jobs: Jobs | SlurmJobs, info: JobInfo) -> None:
        self._jobs = jobs
        self._info = info
        self._outcome: tuple[Any, BaseException | None] | None = None

    @property
    def id(self) -> str:
        """Its id, by which (and the profile) another process finds it."""
        return self._info.id

    @property
    def name(self) -> str:
        """Its name."""
        return self._info.name

    @property
    def state(self) -> str:
        """Its state: "queued", "running", "finished", "failed" or "cancelled"."""
        return self._look().state

    @property
    def submitted_at(self) -> datetime | None:
        """When it was submitted."""
        return self._info.submitted_at

    @property
    def finished_at(self) -> datetime | None:
        """When it ended, None before."""
        return self._look().finished_at

    @property
    def exit_code(self) -> int | None:
        """Its process's exit code, negative after a signal; None before, or if it never began."""
        return self._look().exit_code

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with; None before, or if it ended well."""
        return self._fetch()[1] if self.state == "failed" else None

    @property
    def diary(self) -> str:
        """The output of its process so far; what workers print is in their futures.

        Source:
            MATLAB R2025b, diary of a parallel.Job.
        """
        # Two lines are Ray's own; the second is written late: a quick job may print before it.
        text = self._jobs.log(self.id).replace(
            f"Running entrypoint for job {self.id}: {self._info.command}\n", "", 1
        )
        first, _, rest = text.partition("\n")
        return rest if first.endswith("-- Runtime env is setting up.") else text

    @property
    def outputs_at(self) -> str:
        """Where its outputs are, or will be: the given folder or URL, else where on its node."""
        from raypool.cluster.jobs import OUTPUTS_FOLDER

        self._key()  # raises the error for a job without outputs
        place = self._info.metadata.get(OUTPUTS)
        if place is not None:
            return f"{place}/{self.id}"
        return (
            f"{OUTPUTS_FOLDER}/{self.id} in the folder of Ray's session on node"
            f" {self._look().node or 'of the head'}"
        )

    @explains_calls
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds for its end; return whether it has ended."""
        if not self._info.has_ended:
            self._info = self._jobs.wait(self.id, timeout_s)
        return self._info.has_ended

    @explains_calls
    def fetch_outputs(self, timeout_s: float | None = None) -> Any:
        """Return the function's value, waiting for it at most `timeout_s` seconds.

        Raises:
            TimeoutError: It has not ended by then; it keeps running.
            concurrent.futures.CancelledError: It was cancelled.
            Exception: The exception that the function raised; its cause is the remote traceback.
            TaskError: It ended otherwise: its process was killed, or never began.
            SerializationError: Its value cannot be opened here.
            CloudError: Its cluster does not answer, or no longer has the outputs.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"Job {self.id} ({self.name}) has not ended after timeout_s={timeout_s:g}; it keeps"
                " running."
            )
        if self._info.state == "cancelled":
            raise CancelledError(f"Job {self.id} ({self.name}) was cancelled.")
        value, error = self._fetch()
        if error is not None:
            raise error
        return value

    def cancel(self) -> bool:
        """End it, queued or running; return False if it had already ended by itself.

        Raises:
            CloudError: The cluster does not answer, or the job does not end.
        """
        if not self._look().has_ended:
            self._info = self._jobs.stop(self.id)
        return self._info.state == "cancelled"

    def __repr__(self) -> str:
        return f"<Job {self.id} ({one_line(self.name)}): {self._info.state}>"

    def _look(self) -> JobInfo:
        if not self._info.has_ended:  # else nothing changes any more
            self._info = self._jobs.look(self.id)
        return self._info

    def _key(self) -> str:
        from raypool.cluster.jobs import KEY

        key = self._info.metadata.get(KEY)
        if key is None:
            raise CloudError(
                f"Job {self.id} has no outputs: it was not submitted by raypool.batch. Its diary"
                " has what it printed."
            )
        return key

    def _fetch(self) -> tuple[Any, BaseException | None]:
        """Return the outcome: a value, or an exception."""
        if self._outcome is None:
            key = self._key()
            try:
                data = self._read()
            except FileNotFoundError:
                if self._info.exit_code == 0:  # then it had left them
                    raise CloudError(
                        f"The outputs of job {self.id} no longer exist, or this machine does not"
                        f" see them. The job wrote them to {self.outputs_at}."
                    ) from None
                self._outcome = None, self._unsaid()
            else:
                if (opened := _opened(key, data)) is None:
                    raise CloudError(
                        f"The file at {self.outputs_at} ({len(data)} bytes) is not the one that job"
                        f" {self.id} wrote: its checksum differs, so it was not opened. Either it"
                        " is incomplete (try again), or it was changed."
                    )
                self._outcome = self._unpickled(*opened)
        return self._outcome

    def _read(self) -> bytes:
        """Read the outputs; raise FileNotFoundError if there are none."""
        from raypool.cluster.jobs import Jobs
        from raypool.worker.folders import filesystem

        place = self._info.metadata.get(OUTPUTS)
        not_there: OSError = FileNotFoundError(self.id)
        if place is not None:
            files, root = filesystem(place, "outputs")
            try:
                with files.open_input_stream(f"{root}/{self.id}") as stream:
                    return bytes(stream.read())
            except OSError as error:
                not_there = error
        # also with a place: a job that cannot write there leaves them on its node
        if self._info.node is not None and isinstance(self._jobs, Jobs):
            with contextlib.suppress(FileNotFoundError):
                return self._jobs.dashboard.outputs(self._info.node, self.id)
        if isinstance(not_there, FileNotFoundError):
            raise not_there
        raise CloudError(
            f"The outputs at {self.outputs_at} cannot be read from here: {not_there}."
        ) from not_there

    def _unpickled(self, kind: str, body: memoryview) -> tuple[Any, BaseException | None]:
        from raypool.backends.ray.packing import unpack_failure

        if kind == "error":
            error, text = unpack_failure(bytes(body))
            # it is the user's class, and may refuse attributes
            with contextlib.suppress(Exception):
                error.add_note(f"raypool: job {self.id} ({self.name})")
                if error.__cause__ is None and text is not None:
                    error.__cause__ = RemoteTraceback(text)
            return None, error
        try:
            return pickle.loads(body), None
        except Exception as error:
            raise SerializationError(
                f"The outputs of job {self.id} have arrived but cannot be unpickled here"
                f" ({type(error).__name__}: {error}). This process must be able to import their"
                " classes, and must have the same version of Python.",
                what="the outputs of a job",
            ) from error

    def _unsaid(self) -> TaskError:
        """Return the error for a job that has left no outcome."""
        printed = self.diary.strip().splitlines()
        if self._info.exit_code is None:
            return TaskError(
                f"Job {self.id} ({self.name}) could not be started: {self._info.message.strip()}"
            )
        # Python writes it with and without quotes
        if any(
            "No module named 'raypool'" in line or "No module named raypool" in line
            for line in printed
        ):
            hint = (
                "raypool is not installed in its environment. Install it on the cluster, or add a"
                " pinned source to the profile's packages (raypool @ git+https://...@COMMIT). Never"
                " add the bare name: raypool is on no package index, and anybody may register it."
            )
        else:
            hint = "It was killed, or ended its own process. Its last output: " + " / ".join(
                printed[-3:]
            )
        return TaskError(
            f"Job {self.id} ({self.name}) ended with exit code {self._info.exit_code} and without a"
            f" result. {hint}"
        )


def _sealed(key: str, kind: str, body: bytes) -> bytes:
    """Return a job's file: a line with the kind ("value" or "error") and the checksum; the body.

    Example:
        >>> _opened("key", _sealed("key", "value", b"abc"))[0]
        'value'
        >>> _opened("key", _sealed("key", "value", b"abc")[:-1])
        >>> _opened("key", _sealed("another key", "value", b"abc"))
    """
    return f"{kind} {_checksum(key, kind, body)}\n".encode() + body


def _opened(key: str, data: bytes) -> tuple[str, memoryview] | None:
    """Return the kind and the body; None if this was not sealed with this key."""
    line = data[: data.find(b"\n") + 1]
    kind, body = line.partition(b" ")[0].decode(errors="replace"), memoryview(data)[len(line) :]
    expected = f"{kind} {_checksum(key, kind, body)}\n"
    # the same time for all: it tells nobody how much of a checksum was right
    return (kind, body) if hmac.compare_digest(line, expected.encode()) else None


def _checksum(key: str, kind: str, body: bytes | memoryview) -> str:
    # of the kind, too: nobody can make an error of a value
    checksum = hmac.new(key.encode(), kind.encode(), "sha256")
    checksum.update(body)
    return checksum.hexdigest()


# --- part that runs on the cluster ----------------------------------------------------------------


def run() -> Any:
    """Run the call that came with this job, and store its outcome; return the exit code."""
    from raypool.backends.ray.packing import pack_error, snapshot
    from raypool.backends.ray.session import join_ray
    from raypool.worker.runner import finished

    join_ray(None)
    versions, job_id, key, outputs, body = pickle.loads(
        importlib.resources.files(CALL).joinpath(CALL).read_bytes()
    )
    place: str | None = None  # until it has been tried out, outcomes go to this node's disk
    code: Any = 1
    try:
        call = _loaded(body, versions)
        if outputs is not None:
            _try_out(outputs, job_id)
        place = outputs
        with (
            parpool(call.pool, profile=call.profile)
            if call.pool is not None
            else contextlib.nullcontext()
        ):
            value = finished(call.fn(*call.args))
        outcome, code = _sealed(key, "value", snapshot(value, "a result back")), 0
    except SystemExit as error:
        told = TaskError(f"The function ended its process with exit code {error.code or 0}.")
        outcome = _sealed(key, "error", pack_error(told))
        # the job ends with its exit code, but not with 0: it has no value, so it has not finished
        code = error.code or 1
    except BaseException as error:
        traceback.print_exc()  # into the job's log, which is its diary
        outcome = _sealed(key, "error", pack_error(error))
    _leave(outcome, job_id, place)
    return code


def _versions() -> dict[str, str]:
    """Return the versions that must be the same on both sides."""
    return {  # functions travel as code of one version of Python
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "raypool": version("raypool"),
    }


def _loaded(body: bytes, theirs: dict[str, str]) -> BatchCall:
    """Return a call that was packed by these versions."""
    ours = _versions()
    words = ", ".join(
        f"{name} {theirs[name]} there and {ours[name]} here"
        for name in ours
        if theirs[name] != ours[name]
    )
    if words:
        raise CloudError(
            "A job needs the same versions on the cluster and on this machine, but has"
            f" {words}. Install matching versions."
        )
    try:
        return pickle.loads(body)  # type: ignore[no-any-return]
    except ImportError as error:
        raise CloudError(
            f"The function cannot be loaded on the cluster: {error}. Send the module's folder with"
            " the profile's working_dir, or add the package to its packages."
        ) from error


def _try_out(place: str, job_id: str) -> None:
    """Check that the place is writable, before hours of work depend on it."""
    try:
        files, name = _put(b"raypool tries whether it can write here\n", f"{job_id}.trial", place)
        files.delete_file(name)
    except Exception as error:
        raise CloudError(
            f"The function was not called: the cluster cannot write its outputs to {place}:"
            f" {error}. Make sure that this location exists, and that the machines' account may"
            " write there."
        ) from None


def _leave(data: bytes, job_id: str, place: str | None) -> None:
    """Store the outcome at its place; if that fails, on the disk of this node."""
    from raypool.cluster.jobs import make_outputs_folder
    from raypool.worker.folders import write_file

    if place is not None:
        try:
            _put(data, job_id, place)
        except Exception:
            traceback.print_exc()
            sys.stderr.write(
                f"raypool: {place} is no longer writable; the outputs stay on this node\n"
            )
        else:
            return
    write_file(make_outputs_folder() / job_id, data, is_lasting=False)


def _put(data: bytes, name: str, place: str) -> tuple[Any, str]:
    """Write a file in a folder or at a URL; return its file system and path."""
    from raypool.worker.folders import filesystem

    files, root = filesystem(place, "outputs")
    with contextlib.suppress(NotImplementedError):  # of a storage without folders
        files.create_dir(root, recursive=True)
    draft = f"{root}/{name}.{os.getpid()}"  # moved when it is whole
    with files.open_output_stream(draft) as stream:
        stream.write(data)
    files.move(draft, f"{root}/{name}")
    return files, f"{root}/{name}"


if __name__ == "__main__":
    raise SystemExit(run())
