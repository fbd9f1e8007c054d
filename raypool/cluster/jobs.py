"""Jobs on a cluster: commands that its head runs, independently of this machine.

Ray's `JobSubmissionClient` hands them in, asks for them and stops them, through the dashboard: the
one port of a cluster that must be reachable from elsewhere, usually through a tunnel.
`Dashboard` adds what that client lacks: a time limit for every request, and care that nobody else
sees the token.

Source: Ray's documentation, "Ray Jobs Overview" and "Python SDK". Checked on Ray 2.60:
`dashboard/modules/dashboard_sdk.py` (all requests of the client go through `_do_request`), `job/`
(job_manager.py: what a stop does, and where a job runs; common.py: the states),
`state/state_head.py` and `reporter/reporter_head.py` (nodes, files, the autoscaler),
`log/log_agent.py` (_resolve_filename follows links on purpose).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shlex
import sys
import threading
import time
import urllib.parse
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from raypool.cluster.connect import bad_token, runtime_env, token_path
from raypool.errors import CloudError, InvalidValueError
from raypool.profiles import LOOPBACK, Profile
from raypool.worker.folders import make_private

if TYPE_CHECKING:
    from ray.job_submission import JobDetails


# For a request [s]. GET is a question; POST starts a job, which needs an agent; PUT may send half a
# gigabyte through a tunnel.
TIMEOUTS_S = {"GET": 8.0, "POST": 120.0, "DELETE": 120.0, "PUT": 1800.0}
OUTPUTS_TIMEOUT_S, PAUSE_S = 600, 30.0  # for outputs of another node, and for a pause in between
HEAD_TIMEOUT_S = 20.0  # for a new head, after its dashboard has started
AUTOSCALER_TIMEOUT_S = 6.0  # an autoscaler reports every five seconds
LOOK_S = 0.5  # between questions about a job or a cluster
PATIENCE_S = 60.0  # a known cluster may be unreachable so long: tunnels break, and laptops sleep
STOP_TIMEOUT_S = 30.0  # for a job to end: three seconds between two signals, and time for the news

OUTPUTS_FOLDER = "raypool-outputs"  # in the folder of Ray's session, and the link to it in its logs

KEY = "raypool_key"
"""The entry of a job's metadata with the key of its outputs' checksum: it allows forging them."""

STATES = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "cancelled",
}
"""Ray's names of the states of a job, and those of futures."""

ENDED = ("finished", "failed", "cancelled")

STOPPING = "raypool_stop_"  # begins the ids of jobs that stop others

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
"""Ends a waiting job: Ray's own stop has no effect, since the job's supervisor is not up yet."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """The state of a job."""

    id: str  # its id, unique on its cluster
    name: str  # its name, by default the id
    # "queued" (it waits for a machine, or for its packages), "running", "finished", "failed" or
    # "cancelled".
    state: str
    command: str  # the command
    message: str  # Ray's message about the state
    # The exit code of the command, negative after a signal; None before the end, and if it never
    # began.
    exit_code: int | None
    submitted_at: datetime | None  # when it was submitted
    finished_at: datetime | None  # when it ended, None before
    node: str | None  # Ray's id of its node
    metadata: Mapping[str, str]  # the metadata that were submitted with it

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED

    @property
    def exit_status(self) -> int:
        """The exit status of a command that follows the job (128 + n for signal n)."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return 0 if self.state == "finished" else 1

    @staticmethod
    def of(details: JobDetails) -> JobInfo:
        """Convert Ray's details of a job."""
        metadata = details.metadata or {}
        job_id = details.submission_id or details.job_id
        return JobInfo(
            id=job_id,
            name=metadata.get("job_name") or job_id,
            state=STATES[details.status],
            command=details.entrypoint,
            message=details.message or "",
            exit_code=details.driver_exit_code,
            submitted_at=_time_of(details.start_time),
            finished_at=_time_of(details.end_time),
            node=details.driver_node_id,
            metadata=metadata,
        )


def _time_of(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


# By these, Ray's client would go to another cluster.
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_environment_lock = threading.Lock()  # else another thread may put a variable back early


class Dashboard(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client for jobs, for the dashboard of a profile's cluster.

    Every request has a time limit. The token is sent as a header, so that one process can ask
    several clusters; never in a URL or a message, unencrypted to another machine, or to the target
    of a redirect.

    Args:
        profile: `jobs_address`, `token_file` and `tls` say how to reach it.

    Raises:
        CloudError: Nothing answers there; or the token is refused, or would be sent unencrypted.
        InvalidValueError: The profile has no address for jobs.
    """

    def __init__(self, profile: Profile) -> None:
        own = _own_dashboard() if profile.address is None and profile.jobs_address is None else None
        self.url = (own or profile.jobs_url).rstrip("/")
        self._is_here = urllib.parse.urlsplit(self.url).hostname in LOOPBACK
        self._token_from, token = _token(profile)
        # `own` is in a network that Ray trusts
        if token and own is None and self.url.startswith("http:") and not self._is_here:
            raise CloudError(
                f"The token would be sent to {self.url} unencrypted. Open a tunnel (raypool"
                " cluster connect, kubectl port-forward) and set jobs_address to its local end"
                " (http://127.0.0.1:8265), or use an https address.",
                status=None,
            )
        self._has_token = bool(token)
        # empty: Ray adds no token that it has read before
        headers = {"Authorization": f"Bearer {token}" if token else ""}
        authority = True if profile.tls is None else str(Path(profile.tls.authority).expanduser())
        for name in (
            "dashboard.modules.dashboard_sdk",
            "dashboard.modules.job.sdk",
            "_private.runtime_env.packaging",
        ):
            # they tell of every upload, and of each log's end
            logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
        with _environment_lock:
            kept = {name: os.environ.pop(name) for name in OVERRIDING if name in os.environ}
            try:
                super().__init__(self.url, headers=headers, verify=authority)
            except (KeyError, TypeError, ValueError):  # the answer has no version of Ray
                raise self._stranger() from None
            except RuntimeError as error:
                raise CloudError(
                    f"Ray's job client cannot be used here: {error} Try: pip install"
                    " raypool[cluster]"
                ) from None
            finally:
                os.environ.update(kept)
        if profile.tls is None:
            self._ssl_context = True  # Ray's None, for the same, is deprecated

    def get(self, path: str, **query: object) -> Any:
        """Return the answer for a path.

        Raises:
            CloudError: Nothing answers, or the request is refused; `.status` is the HTTP status of
                the answer, None without an answer.
        """
        answer = self._do_request("GET", path, params=query)
        try:
            return answer.json()
        except ValueError:
            raise self._stranger() from None

    def outputs(self, node: str, name: str) -> bytes:
        """Return a file of the folder for outputs on a node, see `make_outputs_folder`.

        Raises:
            FileNotFoundError: There is no such file.
            CloudError: As for `get`.
        """
        file = f"{OUTPUTS_FOLDER}/{name}"
        query = {"node_id": node, "filename": file, "lines": -1, "timeout": OUTPUTS_TIMEOUT_S}
        # For a missing file, an answer may also be empty: then Ray has missed its own message.
        for _ in range(3):
            try:
                answer = self._do_request("GET", "/api/v0/logs/file", params=query, timeout=PAUSE_S)
                if answer.content:
                    return bytes(answer.content)
            except CloudError as error:
                if getattr(error, "status", None) == 500 and "not found" in str(error):
                    break
                raise
        raise FileNotFoundError(name)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes of the cluster, as Ray's state API describes them."""
        # There is at least the head, which a new dashboard may not list yet.
        deadline = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            answer = self.get("/api/v0/nodes", detail=1, limit=10_000)
            nodes = answer["data"]["result"]["result"]
            alive = [node for node in nodes if node["state"] == "ALIVE"]
            if alive or time.monotonic() > deadline:
                return alive
            time.sleep(LOOK_S)

    def may_grow(self) -> bool:
        """Return whether the cluster has an autoscaler, so that more nodes may join."""
        nodes = self.nodes()
        if any("ray.io/node-group" in node["labels"] for node in nodes):
            return True
        # without an autoscaler each node is of a kind of its own
        own_kinds = {f"node{node['node_id']}" for node in nodes}
        deadline = time.monotonic() + AUTOSCALER_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self.get("/api/cluster_status")["data"]["clusterStatus"] or {}
            if (report := status.get("autoscalerReport")) is not None:
                kinds = {kind.replace("_", "").lower() for kind in report["activeNodes"]}
                return not kinds <= own_kinds
            time.sleep(LOOK_S)
        return False

    def tail(self, job_id: str) -> Iterator[str]:
        """Yield a job's output until the stream ends, and "" whenever there is none for a while.

        The thread must not have a running event loop, as a notebook's does.
        """
        with asyncio.Runner() as runner:
            # it would tell that Ray's client leaves its connection open
            runner.get_loop().set_exception_handler(lambda *_: None)
            pieces = self.tail_job_logs(job_id)

            async def next_piece() -> str | None:
                return await anext(pieces, None)

            while True:
                task = runner.get_loop().create_task(next_piece())
                # not `wait_for`, whose time limit would cancel the task, and so end the stream
                while not runner.run(asyncio.wait([task], timeout=LOOK_S))[0]:
                    yield ""
                if (piece := task.result()) is None:
                    return
                yield piece

    def _do_request(self, method: str, endpoint: str, **request: Any) -> Any:
        """Ask the dashboard: every request of Ray's client comes through here.

        Raises:
            CloudError: Nothing answers, or the request fails.
        """
        request = {
            "timeout": TIMEOUTS_S[method],
            "allow_redirects": False,  # the token would go along
            "auth": lambda prepared: prepared,  # else an entry of ~/.netrc replaces the token
            # none reaches a tunnel's end
            "proxies": {"http": None, "https": None, "all": None} if self._is_here else None,
            **request,
        }
        try:
            answer = super()._do_request(method, endpoint, **request)
        except AuthenticationError:
            raise CloudError(
                bad_token(self.url, self._token_from, self._has_token),
                status=403 if self._has_token else 401,
            ) from None
        except OSError as error:  # all of requests' own are
            cause: BaseException = error
            while cause.__context__ is not None:  # three wrappers, with addresses of objects
                cause = cause.__context__
            raise CloudError(
                f"No Ray dashboard answers at {self.url} ({cause}). Is the tunnel open (raypool"
                " cluster connect)? On this machine, `ray start --head` starts a Ray with a"
                " dashboard; the Ray that a pool starts has none.",
                status=None,
            ) from None
        status = answer.status_code
        if 300 <= status < 400:
            raise CloudError(
                f"{self.url} redirects to another address ({status}), and the token is not sent"
                " there. Set jobs_address to the dashboard itself.",
                status=status,
            )
        # the client asks whether an upload is needed
        is_a_no = status == 404 and endpoint.startswith("/api/packages/")
        if status >= 400 and not is_a_no:
            raise CloudError(f"{self.url} answers: {answer.text.strip() or status}", status=status)
        return answer

    def _stranger(self) -> CloudError:
        return CloudError(
            f"{self.url} is not a Ray dashboard. Check jobs_address and the tunnel.", status=None
        )


def _token(profile: Profile) -> tuple[Path | str, str | None]:
    """Return the source of the token of a cluster, and the token, None if there is none."""
    if profile.token_file is None and "RAY_AUTH_TOKEN" in os.environ:
        return "RAY_AUTH_TOKEN", os.environ["RAY_AUTH_TOKEN"].strip()
    path = Path(profile.token_file or token_path()).expanduser()
    try:
        return path, path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if profile.token_file is None:
            return path, None
        raise CloudError(
            f"There is no token in {path}. Copy ~/.ray/auth_token from the cluster's head."
        ) from None


def _own_dashboard() -> str | None:
    """Return the URL of the dashboard of this process's Ray, None without one."""
    import ray

    from raypool.ray_private import worker

    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    # the public source is the return value of ray.init, which another caller has
    url = worker.get_dashboard_url()
    return f"http://{url}" if url else None


def make_outputs_folder() -> Path:
    """Make the folder on this node for outputs of jobs, from where `Dashboard.outputs` reads them.

    Only this user can enter it. It is in the folder of Ray's session, and is deleted with it. Among
    Ray's logs there is only a link, which Ray follows, and which collectors of logs do not.
    """
    from raypool.ray_private import worker

    session = Path(worker._global_node.get_session_dir_path())
    with suppress(FileExistsError):  # an earlier job made it
        (session / "logs" / OUTPUTS_FOLDER).symlink_to(
            f"../{OUTPUTS_FOLDER}", target_is_directory=True
        )
    return make_private(session / OUTPUTS_FOLDER)


class PackedCall(NamedTuple):
    """The call of a job: its id, from `new_id`; a folder that it can import as a module; metadata;
    and the least and the greatest number of workers of its pool, for Slurm.
    """

    job_id: str
    module: str
    metadata: Mapping[str, str]
    workers: tuple[int | None, int | None] = (None, None)


class JobRequest(NamedTuple):
    """A command to run as a job, and the function to run, if any."""

    job_id: str
    command: Sequence[str]
    name: str
    env: Mapping[str, str]
    cpus: float
    gpus: float
    call: PackedCall | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of the call."""
        return {} if self.call is None else self.call.metadata


class JobQueue(ABC):
    """Where jobs are submitted: a cluster of Ray, or Slurm."""

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
        """Submit a job; return its id.

        On a cluster of Ray it runs on the head, unless it asks for CPUs or GPUs for itself. A pool
        that it opens reserves its own.

        Args:
            command: The words of the command; each arrives unchanged. "python" is the Python of the
                cluster.
            name: The name of the job.
            env: Environment variables of the job and its workers. Anyone who can open the
                dashboard can read them.
            cpus: Cores to reserve for the command itself, all on one node.
            gpus: GPUs likewise.
            call: The function to run, see `PackedCall`.

        Raises:
            InvalidValueError: The command is empty; or `cpus`, `gpus` or the profile's `packages`
                are set on Slurm.
            CloudError: No node could ever run it, or the cluster refuses it.
        """
        if not command:
            raise InvalidValueError(
                "There is no command to run. Pass one, such as ['python', 'train.py']."
            )
        job_id = new_id() if call is None else call.job_id
        self._submit(JobRequest(job_id, command, name or job_id, env or {}, cpus, gpus, call))
        return job_id

    @abstractmethod
    def _submit(self, request: JobRequest) -> None:
        """Hand a request to the cluster, or to Slurm."""

    @abstractmethod
    def wait(self, job_id: str, timeout_s: float | None = None) -> JobInfo:
        """Wait for a job's end, or for the time limit, and return its state."""

    def _wait_stopped(self, job_id: str, timeout_s: float) -> JobInfo:
        """Wait for the end of a job that was told to stop, and return its state."""
        info = self.wait(job_id, timeout_s)
        if not info.has_ended:
            raise CloudError(
                f"Job {job_id} did not end within {timeout_s:g} s: {info.message} Check again"
                " later."
            )
        return info


class Jobs(JobQueue):
    """The jobs of a cluster.

    Every method raises a CloudError if the cluster does not answer, or there is no such job.

    Args:
        profile: `jobs_address`, `token_file` and `tls` say how to reach the cluster's dashboard;
            `working_dir` and `packages` are for each job and its workers.

    Raises:
        InvalidValueError: The profile has no address for jobs.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.dashboard = Dashboard(profile)

    @property
    def python(self) -> str:
        """The Python of the cluster; this one (which need not be on the PATH) if this machine is
        the head.
        """
        if self._profile.packages:
            return "python"  # of the environment that they are installed into
        session = self.dashboard.get("/api/version")["session_name"]
        # Ray's processes have the folder of their session on their command lines
        lines = (
            " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
        )
        return sys.executable if any(session in line for line in lines) else "python"

    def _submit(self, request: JobRequest) -> None:
        self._check_room(request.cpus, request.gpus)
        environment = runtime_env(self._profile)
        if request.call is not None:
            environment["py_modules"] = [request.call.module]
        if request.env:
            environment["env_vars"] = dict(request.env)
        self._hand_in(
            entrypoint=shlex.join(request.command),
            submission_id=request.job_id,
            runtime_env=environment,
            metadata={**request.metadata, "job_name": request.name},
            entrypoint_num_cpus=request.cpus or None,
            entrypoint_num_gpus=request.gpus or None,
        )

    def _hand_in(self, *, submission_id: str, **request: Any) -> str:
        # A head that has just been started answers before it can take a job.
        deadline = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            try:  # again without a pause: Ray has waited for an agent before it says so
                return str(self.dashboard.submit_job(submission_id=submission_id, **request))
            except (CloudError, RuntimeError, ValueError, OSError) as error:
                if getattr(error, "status", 0) is None:
                    raise CloudError(
                        f"{error} It may have accepted job {submission_id}; once it answers,"
                        f" `raypool job status {submission_id}`, with the same --profile, shows the"
                        " job.",
                        status=None,
                    ) from None
                if "No available agent" not in str(error):
                    raise CloudError(
                        f"{self.dashboard.url} did not accept the job: {_last_line(error)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise CloudError(
                        f"The head at {self.dashboard.url} answers, but accepted no job for"
                        f" {HEAD_TIMEOUT_S:g} s: its dashboard agent is not running. Does another"
                        " Ray on that machine use its port (52365)? See dashboard_agent.log."
                    ) from None

    def look(self, job_id: str) -> JobInfo:
        """Return the state of a job."""
        try:
            return JobInfo.of(self.dashboard.get_job_info(_quoted(job_id)))
        except CloudError as error:
            if getattr(error, "status", None) == 404:
                raise CloudError(
                    f"There is no job {job_id!r} on the cluster at {self.dashboard.url}. A"
                    " restarted cluster forgets its jobs; `raypool job status`, with the same"
                    " --profile, lists the known ones.",
                    status=404,
                ) from None
            raise

    def all(self) -> list[JobInfo]:
        """Return the states of all submitted jobs, the newest last."""
        known = self.dashboard.list_jobs()
        submitted = [
            job
            for job in known
            if job.type == "SUBMISSION" and not job.submission_id.startswith(STOPPING)
        ]
        return [JobInfo.of(job) for job in sorted(submitted, key=lambda job: job.start_time or 0)]

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobInfo:
        """Wait for a job's end, or for the time limit, and return its state.

        A cluster that does not answer is an error after a minute, or at the time limit.
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
        """Return a job's output so far, which begins with some lines from Ray."""
        self.look(job_id)
        return str(self.dashboard.get_job_logs(_quoted(job_id)))

    def follow(self, job_id: str, seen: int = 0) -> Iterator[str]:
        """Yield a job's output after its first `seen` characters, until it ends; broken connections
        are reopened.
        """
        self.look(job_id)
        answered = time.monotonic()
        while True:
            skip = seen  # it is sent from the beginning each time
            try:
                for piece in self.dashboard.tail(_quoted(job_id)):
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
            except Exception as error:
                # aiohttp's own, a RuntimeError of Ray's client or a CloudError
                if _is_answer(error) or time.monotonic() > answered + PATIENCE_S:
                    raise CloudError(
                        f"The log of job {job_id} can no longer be followed: {_last_line(error)}",
                        status=getattr(error, "status", None),
                    ) from None
            time.sleep(LOOK_S)

    def stop(self, job_id: str) -> JobInfo:
        """Stop a job, queued or running, and return its state.

        A running job gets SIGTERM, and SIGKILL three seconds later.

        Raises:
            CloudError: It did not end in time.
        """
        info = self.look(job_id)
        if info.state == "queued":  # another job ends it
            stopper = self._hand_in(
                entrypoint=shlex.join([self.python, "-c", STOPPER, job_id]),
                submission_id=f"{STOPPING}{uuid.uuid4().hex[:12]}",
            )
            if self.wait(stopper, STOP_TIMEOUT_S).has_ended:
                with suppress(CloudError):  # it may be deleted already
                    self.dashboard.delete_job(stopper)
            info = self.look(job_id)
        if not info.has_ended:
            self.dashboard.stop_job(_quoted(job_id))
        return self._wait_stopped(job_id, STOP_TIMEOUT_S)

    def _check_room(self, cpus: float, gpus: float) -> None:
        """Refuse a command for which no node could ever have room."""
        wanted = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        if not wanted:
            return
        nodes = [node["resources_total"] for node in self.dashboard.nodes()]
        if any(
            all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes
        ):
            return
        if not self.dashboard.may_grow():
            words = "; ".join(
                f"{name}: requested {amount:g}, the largest node has"
                f" {max((node.get(name, 0) for node in nodes), default=0):g}"
                for name, amount in wanted.items()
            )
            raise CloudError(
                f"The job would wait forever: {words}. Its command runs on one node. Request"
                " less, or nothing: the pool that it opens reserves its own."
            )


def _is_answer(error: Exception) -> bool:
    """Whether an error is the cluster's answer, so that a retry does not help."""
    return getattr(error, "status", None) is not None


def new_id() -> str:
    """Return a unique id for a job."""
    return f"raypool_{uuid.uuid4().hex[:16]}"


def _quoted(job_id: str) -> str:
    """Return a job's id for Ray's client, which puts it into a URL as it is."""
    return urllib.parse.quote(job_id, safe="")


def _last_line(error: BaseException) -> str:
    """Return the last line of an error: the cluster sends whole tracebacks."""
    lines = [line for line in str(error).strip().splitlines() if line.strip(" .")]
    return lines[-1].strip() if lines else type(error).__name__
