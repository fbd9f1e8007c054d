"""Jobs on a cluster: commands that its head runs, which go on when this machine does not.

Source: Ray's documentation, "Ray Jobs Overview" and "Python SDK", and `dashboard/modules/job/` (job_manager.py: what a stop
does, and where a job runs; common.py: the states).
"""

from __future__ import annotations

import functools
import math
import shlex
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from raypool.cloud.dashboard import HEAD_TIMEOUT_S, Dashboard
from raypool.cloud.pieces import pieces_of
from raypool.cloud.shipping import runtime_env
from raypool.errors import CloudError, InvalidValueError

if TYPE_CHECKING:
    from raypool.profiles import Profile

STATES = {"PENDING": "queued", "RUNNING": "running", "SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "cancelled"}
"""What Ray calls the states of a job, and what futures call them."""

ENDED = ("finished", "failed", "cancelled")

LOOK_S = 0.5
"""How often to look how a job is doing [s]."""

PATIENCE_S = 60.0
"""So long a cluster that has answered before may be out of reach: tunnels break, and laptops sleep [s]."""

STOP_TIMEOUT_S = 30.0
"""A job has three seconds between the signals that ask it and make it end; more go by until the cluster says so [s]."""

STOPPING = "raypool_stop_"
"""What the ids of jobs begin with that stop others; each is deleted after it, where Ray lets it be."""

STOPPER = """
import asyncio, sys
import ray
from ray.dashboard.modules.job import common

async def stop(job_id):
    jobs = common.JobInfoStorageClient(ray._private.worker.global_worker.gcs_client)
    if await jobs.get_status(job_id) == common.JobStatus.PENDING:
        await jobs.put_status(job_id, common.JobStatus.STOPPED)
        name = common.JOB_ACTOR_NAME_TEMPLATE.format(job_id=job_id)
        ray.kill(ray.get_actor(name, namespace=common.SUPERVISOR_ACTOR_RAY_NAMESPACE))

ray.init(log_to_driver=False, logging_level="ERROR")
asyncio.run(stop(sys.argv[1]))
"""
"""Ends a job that waits: Ray's own stop lets it wait on, since the one who would be told is not there yet."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """How a job is doing.

    Attributes:
        id: Its id, which is one for all that ever ran on its cluster.
        name: What it was called, its id if nothing.
        state: "queued" (it waits for a machine, or for its packages), "running", "finished", "failed" or "cancelled".
        command: What runs.
        message: What Ray says of its state.
        exit_code: With what its command has ended, negative after a signal; None before, and if it never began.
        submitted_at: When it was handed in.
        finished_at: When it ended, None before.
        node: Ray's id of the node on which it runs, or ran.
        metadata: What was noted with it.
    """

    id: str
    name: str
    state: str
    command: str
    message: str
    exit_code: int | None
    submitted_at: datetime | None
    finished_at: datetime | None
    node: str | None
    metadata: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ENDED

    @property
    def exit_status(self) -> int:
        """What a command that stands for the job ends with: what the job has ended with, 1 where there is no such number.

        Example:
            >>> at = {"submitted_at": None, "finished_at": None, "node": None, "metadata": {}}
            >>> job = JobInfo(id="a", name="a", state="failed", command="sh", message="", exit_code=-9, **at)
            >>> job.exit_status
            137
        """
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return 0 if self.state == "finished" else 1

    @staticmethod
    def of(answer: Mapping[str, Any]) -> JobInfo:
        """Return what an answer of the dashboard says of a job."""
        metadata = answer.get("metadata") or {}
        job_id = answer["submission_id"] or answer["job_id"]
        return JobInfo(
            id=job_id,
            name=metadata.get("job_name") or job_id,
            state=STATES[answer["status"]],
            command=answer["entrypoint"],
            message=answer.get("message") or "",
            exit_code=answer.get("driver_exit_code"),
            submitted_at=_time_of(answer.get("start_time")),
            finished_at=_time_of(answer.get("end_time")),
            node=answer.get("driver_node_id"),
            metadata=metadata,
        )


def _time_of(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


class PackedCall(NamedTuple):
    """What goes along with a job: a folder that it can import as a module, and what is noted with the job."""

    module: str
    metadata: Mapping[str, str]


class Jobs:
    """The jobs of a cluster.

    Args:
        profile: `jobs_address` is where the cluster's dashboard is; `token_file` and `tls` let us in; `working_dir` and
            `packages` go along with each job, for its workers too.

    Raises:
        CloudError: Nobody answers there, or not to this token.
        InvalidValueError: The profile does not say where.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.dashboard = Dashboard(profile)

    @property
    def python(self) -> str:
        """The Python of the cluster: where the head is this machine, the one that runs here, which need not be on its PATH."""
        session = self.dashboard.version["session_name"]
        if self._profile.packages:
            return "python"  # of the environment that they are installed into
        lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        return sys.executable if any(session in line for line in lines) else "python"

    def submit(
        self,
        command: Sequence[str],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cpus: float = 0,
        gpus: float = 0,
        call: PackedCall | None = None,
    ) -> str:
        """Hand in a job; return its id.

        It runs on the head, unless it asks for CPUs or GPUs for itself. A pool that it opens takes its own; a job that keeps some
        for itself has them beside its pool.

        Args:
            command: The words of the command; each arrives as it is. "python" is the Python of the cluster.
            name: What to call it.
            env: Environment variables of the job and its workers. Whoever may look at the dashboard can read them.
            cpus: Cores that are kept for the command itself, all on one node.
            gpus: GPUs likewise.
            call: What goes along besides.

        Raises:
            CloudError: No node could ever run it, or the cluster refuses it.
        """
        if not command:
            raise InvalidValueError("There is no command to run. Give one, such as ['python', 'train.py'].")
        self._check_room(cpus, gpus)
        environment = runtime_env(self._profile)
        if call is not None:
            environment["py_modules"] = [call.module]
        if env:
            environment["env_vars"] = {**environment.get("env_vars", {}), **env}
        job_id = f"raypool_{uuid.uuid4().hex[:16]}"
        return self._hand_in(
            entrypoint=shlex.join(command),
            submission_id=job_id,
            runtime_env=environment,
            metadata={**(call.metadata if call is not None else {}), "job_name": name or job_id},
            entrypoint_num_cpus=cpus or None,
            entrypoint_num_gpus=gpus or None,
        )

    def _hand_in(self, **request: Any) -> str:
        """Hand in a job, also to a head that has just been started: it answers before it can take any."""
        deadline = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            try:
                with self.dashboard.client() as client:
                    return str(client.submit_job(**request))
            except (RuntimeError, ValueError, OSError) as error:
                if "No available agent" not in str(error):
                    raise CloudError(f"{self.dashboard.url} has not taken the job: {_last_line(error)}") from error
                if time.monotonic() > deadline:
                    raise CloudError(
                        f"The head at {self.dashboard.url} answers, but has taken no job for {HEAD_TIMEOUT_S:g} s: its dashboard "
                        "agent is not there. Is another Ray on that machine, which has its port (52365)? See dashboard_agent.log."
                    ) from error

    def look(self, job_id: str) -> JobInfo:
        """Return how a job is doing.

        Raises:
            CloudError: There is no such job on the cluster.
        """
        try:
            return JobInfo.of(self.dashboard.get(_path(job_id)))
        except CloudError as error:
            if getattr(error, "status", None) == 404:
                raise CloudError(
                    f"There is no job {job_id!r} on the cluster at {self.dashboard.url}. A cluster that was started anew does "
                    "not know those that were there before; `raypool job status` lists the ones it knows.",
                    status=404,
                ) from None
            raise

    def all(self) -> list[JobInfo]:
        """Return how all jobs are doing that were handed in, the newest last; but for those that have stopped others."""
        known = self.dashboard.get("/api/jobs/")
        answers = [job for job in known if job["type"] == "SUBMISSION" and not job["submission_id"].startswith(STOPPING)]
        return [JobInfo.of(answer) for answer in sorted(answers, key=lambda answer: answer["start_time"] or 0)]

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobInfo:
        """Wait for a job's end, at most so long; return how it is doing then.

        Raises:
            CloudError: There is no such job, or its cluster has not answered for a minute, or when the time is up.
        """
        answered = time.monotonic()
        deadline = math.inf if timeout_s is None else answered + timeout_s
        while True:
            now = time.monotonic()
            try:
                info, answered = self.look(job_id), now
                if info.has_ended or now >= deadline:
                    return info
            except CloudError as error:
                if _is_answer(error) or now >= min(deadline, answered + PATIENCE_S):
                    raise
            time.sleep(max(0.0, min(LOOK_S, deadline - time.monotonic())))

    def log(self, job_id: str) -> str:
        """Return what a job has printed so far, after some lines of Ray's own."""
        self.look(job_id)
        return str(self.dashboard.get(f"{_path(job_id)}/logs")["logs"])

    def follow(self, job_id: str, seen: int = 0) -> Iterator[str]:
        """Return what a job prints, as it comes, until it has ended; a connection that breaks is made again.

        Args:
            job_id: The job.
            seen: So many characters of it were seen, and are left out.

        Raises:
            CloudError: There is no such job, or its cluster does not answer any more.
        """
        self.look(job_id)
        answered = time.monotonic()
        while True:
            skip = seen  # it is sent from the beginning each time
            try:
                for piece in pieces_of(functools.partial(self.dashboard.listen, f"{_path(job_id)}/logs/tail")):
                    new = piece[skip:]
                    skip -= len(piece) - len(new)
                    seen += len(new)
                    if new:
                        yield new
                    elif self.look(job_id).has_ended:
                        break  # what is sent is seconds behind
                    answered = time.monotonic()
                if self.look(job_id).has_ended:
                    yield self.log(job_id)[seen:]
                    return
            except Exception as error:  # aiohttp's own, a ConnectionError or a CloudError
                if _is_answer(error) or time.monotonic() > answered + PATIENCE_S:
                    raise CloudError(f"The log of job {job_id} cannot be followed any more: {_last_line(error)}") from error
                time.sleep(LOOK_S)

    def stop(self, job_id: str) -> JobInfo:
        """End a job, also one that waits; return how it is doing then.

        One that runs is asked to end (SIGTERM), and made to three seconds later.

        Raises:
            CloudError: There is no such job, or it goes on.
        """
        info = self.look(job_id)
        if info.state == "queued":
            self._stop_waiting(job_id)
            info = self.look(job_id)
        if not info.has_ended:
            with self.dashboard.client() as client:
                client.stop_job(job_id)
            info = self.wait(job_id, STOP_TIMEOUT_S)
        if not info.has_ended:
            raise CloudError(f"Job {job_id} has not ended within {STOP_TIMEOUT_S:g} s: {info.message} Look again later.")
        return info

    def _stop_waiting(self, job_id: str) -> None:
        """Let another job end one that waits."""
        command = shlex.join([self.python, "-c", STOPPER, job_id])
        stopper = self._hand_in(entrypoint=command, submission_id=f"{STOPPING}{uuid.uuid4().hex[:12]}")
        if self.wait(stopper, STOP_TIMEOUT_S).has_ended:
            with suppress(RuntimeError), self.dashboard.client() as client:  # somebody else may have tidied up
                client.delete_job(stopper)

    def _check_room(self, cpus: float, gpus: float) -> None:
        """Refuse a command for which no node could ever have room."""
        wanted = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        if not wanted:
            return
        nodes = [node["resources_total"] for node in self.dashboard.nodes()]
        if any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            return
        if not self.dashboard.may_grow():
            words = "; ".join(
                f"{name}: requested {amount:g}, the largest node has {max((node.get(name, 0) for node in nodes), default=0):g}"
                for name, amount in wanted.items()
            )
            raise CloudError(
                f"The job would wait for ever: {words}. Its command runs on one node. Ask for less, or for nothing: "
                "the pool that it opens takes its own."
            )


def _is_answer(error: Exception) -> bool:
    """Whether it is the cluster that says so: then it does not help to ask again."""
    return getattr(error, "status", None) is not None


def _path(job_id: str) -> str:
    return f"/api/jobs/{urllib.parse.quote(job_id, safe='')}"


def _last_line(error: BaseException) -> str:
    """Return what an error says in the end: the cluster sends whole tracebacks."""
    lines = [line for line in str(error).strip().splitlines() if line.strip(" .")]
    return lines[-1].strip() if lines else type(error).__name__
