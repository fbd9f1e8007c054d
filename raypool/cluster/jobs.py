"""Jobs on a cluster: commands that its head runs, independently of this machine.

Ray's `JobSubmissionClient` hands them in, asks for them and stops them, through the dashboard: the
one port of a cluster that has to be reachable from elsewhere, as a rule through a tunnel.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from raypool.cluster.connect import runtime_env
from raypool.errors import CloudError, InvalidValueError
from raypool.profiles import LOOPBACK, Profile
from raypool.worker.folders import make_private

if TYPE_CHECKING:
    from ray.job_submission import JobDetails


TIMEOUTS_S = {"GET": 8.0, "POST": 120.0, "DELETE": 120.0, "PUT": 1800.0}
"""How long the dashboard may take for a request [s]. GET is a question; POST starts a job, for
which an agent has to be found; PUT may send half a gigabyte through a tunnel."""

OUTPUTS_TIMEOUT_S, PAUSE_S = 600, 30.0
"""The limits for outputs [s]: from another node to the dashboard, and of a pause on the way here.
"""

HEAD_TIMEOUT_S = 20.0
"""The time that a new head may need after its dashboard has started [s]."""

AUTOSCALER_TIMEOUT_S = 6.0
"""An autoscaler says what it does every five seconds [s]."""

OUTPUTS_FOLDER = "raypool-outputs"
"""The folder for outputs in that of Ray's session, and the link to it among Ray's logs."""

KEY = "raypool_key"
"""The entry of a job's metadata with the key of its outputs' checksum: it allows forging them."""

STATES = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "cancelled",
}
"""What Ray calls the states of a job, and what futures call them."""

ENDED = ("finished", "failed", "cancelled")

LOOK_S = 0.5
"""The interval of questions about a job or a cluster [s]."""

PATIENCE_S = 60.0
"""The time for which a known cluster may be unreachable [s]: tunnels break, and laptops sleep."""

STOP_TIMEOUT_S = 30.0
"""The time for a job to end [s]: three seconds between the two signals, and some for the news."""

STOPPING = "raypool_stop_"
"""The beginning of the ids of jobs that stop others; each is deleted afterwards if possible."""

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
    """The state of a job.

    Attributes:
        id: Its id, which is one for all that ever ran on its cluster.
        name: What it was called, its id if nothing.
        state: "queued" (it waits for a machine, or for its packages), "running", "finished",
            "failed" or "cancelled".
        command: What runs.
        message: What Ray says of its state.
        exit_code: With what its command has ended, negative after a signal; None before, and if it
            never began.
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
        """Whether the state is final."""
        return self.state in ENDED

    @property
    def exit_status(self) -> int:
        """The exit status of a command that stands for the job; 1 for a failure without one.

        Example:
            >>> at = {"submitted_at": None, "finished_at": None, "node": None, "metadata": {}}
            >>> told = {"id": "a", "name": "a", "state": "failed", "command": "sh", "message": ""}
            >>> JobInfo(**told, **at, exit_code=-9).exit_status
            137
        """
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


OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables by which Ray's client goes to another cluster than the one that it is told."""

_environment_lock = threading.Lock()


class Dashboard(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client for jobs, for the dashboard of a profile's cluster.

    Every request has a time limit. The token goes along as a header, so that one process can ask
    several clusters; never in a URL or a message, unencrypted to another machine, or to where a
    redirect leads.

    Args:
        profile: `jobs_address` says where it is, `token_file` and `tls` how to be let in.

    Raises:
        CloudError: Nobody answers there, or not to this token; or the token would travel there for
            all to read.
        InvalidValueError: The profile does not say where it is.
    """

    def __init__(self, profile: Profile) -> None:
        own = _own_dashboard() if profile.address is None and profile.jobs_address is None else None
        self.url = (own or profile.jobs_url).rstrip("/")
        self._is_here = urllib.parse.urlsplit(self.url).hostname in LOOPBACK
        self._token_from, token = _token(profile)
        # `own` is in a network that Ray trusts
        if token and own is None and self.url.startswith("http:") and not self._is_here:
            raise CloudError(
                f"The token would travel to {self.url} unencrypted, for all on the way to read."
                " Open a tunnel (raypool cluster connect, kubectl port-forward) and name its end"
                " here as jobs_address (http://127.0.0.1:8265), or an address with https.",
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
            except (KeyError, TypeError, ValueError):  # what answers has no version of Ray
                raise self._stranger() from None
            except RuntimeError as error:
                raise CloudError(
                    f"Ray's client for jobs cannot be used here: {error} Try: pip install"
                    " raypool[cluster]"
                ) from None
            finally:
                os.environ.update(kept)
        if profile.tls is None:
            self._ssl_context = True  # Ray's None, for the same, is deprecated

    def get(self, path: str, **query: object) -> Any:
        """Return what is answered there.

        Raises:
            CloudError: Nobody answers, or not so; `.status` is the number of the answer, None if
                there was none.
        """
        answer = self._do_request("GET", path, params=query)
        try:
            return answer.json()
        except ValueError:
            raise self._stranger() from None

    def outputs(self, node: str, name: str) -> bytes:
        """Return a file of the folder for outputs on a node, see `make_outputs_folder`.

        Raises:
            FileNotFoundError: It is not there.
            CloudError: As for `get`.
        """
        query = {
            "node_id": node,
            "filename": f"{OUTPUTS_FOLDER}/{name}",
            "lines": -1,
            "timeout": OUTPUTS_TIMEOUT_S,
        }
        # where there is no such file, an answer may also be empty: then Ray has missed that message
        for _ in range(3):
            try:
                if data := self._do_request(
                    "GET", "/api/v0/logs/file", params=query, timeout=PAUSE_S
                ).content:
                    return bytes(data)
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
            alive = [
                node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"
            ]
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
            report = (self.get("/api/cluster_status")["data"]["clusterStatus"] or {}).get(
                "autoscalerReport"
            )
            if report is not None:
                return any(
                    kind.replace("_", "").lower() not in own_kinds for kind in report["activeNodes"]
                )
            time.sleep(LOOK_S)
        return False

    def tail(self, job_id: str) -> Iterator[str]:
        """Yield a job's output until the stream ends, and "" whenever nothing comes for a while.

        The thread must have no running event loop, as that of a notebook has.
        """
        with asyncio.Runner() as runner:
            # it would tell that Ray's client leaves its connection open
            runner.get_loop().set_exception_handler(lambda *_: None)
            pieces = self.tail_job_logs(job_id)

            async def next_piece() -> str | None:
                return await anext(pieces, None)

            while True:
                task = runner.get_loop().create_task(next_piece())
                while not runner.run(asyncio.wait([task], timeout=LOOK_S))[0]:
                    yield ""
                if (piece := task.result()) is None:
                    return
                yield piece

    def _do_request(self, method: str, endpoint: str, **request: Any) -> Any:
        """Ask the dashboard: every request of Ray's client comes through here.

        Raises:
            CloudError: Nobody answers, or not so.
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
            if self._has_token:
                status, said = (
                    403,
                    f"does not know the token in {self._token_from}: it may be another cluster's.",
                )
            else:
                status, said = 401, f"asks for a token, and there is none in {self._token_from}."
            raise CloudError(
                f"The cluster at {self.url} {said} Copy ~/.ray/auth_token of its head, and name the"
                " copy with token_file=.",
                status=status,
            ) from None
        except OSError as error:  # all of requests' own are
            raise CloudError(
                f"No dashboard of Ray answers at {self.url} ({_root(error)}). Is the tunnel open"
                " (raypool cluster connect)? On this machine `ray start --head` starts a Ray that"
                " has one; the Ray that a pool starts for itself has none.",
                status=None,
            ) from None
        status = answer.status_code
        if 300 <= status < 400:
            raise CloudError(
                f"{self.url} sends on to another address ({status}), and the token goes nowhere"
                " else. Name the dashboard itself as jobs_address.",
                status=status,
            )
        # the client asks whether an upload is needed
        is_a_no = status == 404 and endpoint.startswith("/api/packages/")
        if status >= 400 and not is_a_no:
            raise CloudError(f"{self.url} answers: {answer.text.strip() or status}", status=status)
        return answer

    def _stranger(self) -> CloudError:
        return CloudError(
            f"What answers at {self.url} is no dashboard of Ray. Check jobs_address, and the"
            " tunnel.",
            status=None,
        )


def _token(profile: Profile) -> tuple[Path | str, str | None]:
    """Return where the token of a cluster is looked for, and the token, None if there is none."""
    if profile.token_file is None and "RAY_AUTH_TOKEN" in os.environ:
        return "RAY_AUTH_TOKEN", os.environ["RAY_AUTH_TOKEN"].strip()
    path = Path(
        profile.token_file or os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    ).expanduser()
    try:
        return path, path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if profile.token_file is None:
            return path, None
        raise CloudError(
            f"There is no token in {path}. It is the file ~/.ray/auth_token of the cluster's head."
        ) from None


def _own_dashboard() -> str | None:
    """Return the URL of the dashboard of the Ray that runs in this process, if it has one."""
    import ray

    from raypool.ray_private import worker

    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    # the public way to it is the answer of ray.init, which another has got
    url = worker.get_dashboard_url()
    return f"http://{url}" if url else None


def _root(error: BaseException) -> BaseException:
    """Return the original error."""
    # requests wraps that of the system in three others, with addresses of objects.
    while error.__context__ is not None:
        error = error.__context__
    return error


def make_outputs_folder() -> Path:
    """Make the folder on this node for what jobs leave, from where `Dashboard.outputs` reads it.

    Only this user can enter it. It lies in the folder of Ray's session, and goes with it. Among
    Ray's logs there is only a link to it, which Ray follows, and which those who collect logs do
    not.
    """
    from raypool.ray_private import worker

    session = Path(worker._global_node.get_session_dir_path())
    with suppress(FileExistsError):
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


class Jobs:
    """The jobs of a cluster.

    Args:
        profile: `jobs_address` is where the cluster's dashboard is; `token_file` and `tls` let us
            in; `working_dir` and `packages` go along with each job, for its workers too.

    Raises:
        CloudError: Nobody answers there, or not to this token.
        InvalidValueError: The profile does not say where.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.dashboard = Dashboard(profile)

    @property
    def python(self) -> str:
        """The Python of the cluster: where the head is this machine, the one that runs here, which
        need not be on its PATH.
        """
        if self._profile.packages:
            return "python"  # of the environment that they are installed into
        session = self.dashboard.get("/api/version")["session_name"]
        lines = (
            " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
        )
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

        It runs on the head, unless it asks for CPUs or GPUs for itself. A pool that it opens takes
        its own; a job that keeps some for itself has them beside its pool.

        Args:
            command: The words of the command; each arrives as it is. "python" is the Python of the
                cluster.
            name: What to call it.
            env: Environment variables of the job and its workers. Whoever may look at the dashboard
                can read them.
            cpus: Cores that are kept for the command itself, all on one node.
            gpus: GPUs likewise.
            call: What goes along besides.

        Raises:
            CloudError: No node could ever run it, or the cluster refuses it.
        """
        if not command:
            raise InvalidValueError(
                "There is no command to run. Give one, such as ['python', 'train.py']."
            )
        self._check_room(cpus, gpus)
        environment = runtime_env(self._profile)
        if call is not None:
            environment["py_modules"] = [call.module]
        if env:
            environment["env_vars"] = dict(env)
        job_id = call.job_id if call is not None else new_id()
        return self._hand_in(
            entrypoint=shlex.join(command),
            submission_id=job_id,
            runtime_env=environment,
            metadata={**(call.metadata if call is not None else {}), "job_name": name or job_id},
            entrypoint_num_cpus=cpus or None,
            entrypoint_num_gpus=gpus or None,
        )

    def _hand_in(self, *, submission_id: str, **request: Any) -> str:
        """Hand in a job, also to a head that has just been started: it answers before it can take
        any.
        """
        deadline = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            try:
                return str(self.dashboard.submit_job(submission_id=submission_id, **request))
            except (CloudError, RuntimeError, ValueError, OSError) as error:
                if getattr(error, "status", 0) is None:
                    raise CloudError(
                        f"{error} Whether it has taken job {submission_id} is not known; once it"
                        f" answers, `raypool job status {submission_id}` says so.",
                        status=None,
                    ) from None
                if "No available agent" not in str(error):
                    raise CloudError(
                        f"{self.dashboard.url} has not taken the job: {_last_line(error)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise CloudError(
                        f"The head at {self.dashboard.url} answers, but has taken no job for"
                        f" {HEAD_TIMEOUT_S:g} s: its dashboard agent is not there. Is another Ray"
                        " on that machine, which has its port (52365)? See dashboard_agent.log."
                    ) from None

    def look(self, job_id: str) -> JobInfo:
        """Return how a job is doing.

        Raises:
            CloudError: There is no such job on the cluster.
        """
        try:
            return JobInfo.of(self.dashboard.get_job_info(_quoted(job_id)))
        except CloudError as error:
            if getattr(error, "status", None) == 404:
                raise CloudError(
                    f"There is no job {job_id!r} on the cluster at {self.dashboard.url}. A cluster"
                    " that was started anew does not know those that were there before; `raypool"
                    " job status` lists the ones it knows.",
                    status=404,
                ) from None
            raise

    def all(self) -> list[JobInfo]:
        """Return how all jobs are doing that were handed in, the newest last; but for those that
        have stopped others.
        """
        known = self.dashboard.list_jobs()
        submitted = [
            job
            for job in known
            if job.type == "SUBMISSION" and not job.submission_id.startswith(STOPPING)
        ]
        return [JobInfo.of(job) for job in sorted(submitted, key=lambda job: job.start_time or 0)]

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobInfo:
        """Wait for a job's end, at most so long; return how it is doing then.

        Raises:
            CloudError: There is no such job, or its cluster has not answered for a minute, or when
                the time is up.
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
        return str(self.dashboard.get_job_logs(_quoted(job_id)))

    def follow(self, job_id: str, seen: int = 0) -> Iterator[str]:
        """Return what a job prints, as it comes, until it has ended; a connection that breaks is
        made again.

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
                        f"The log of job {job_id} cannot be followed any more: {_last_line(error)}"
                    ) from None
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
            self.dashboard.stop_job(_quoted(job_id))
            info = self.wait(job_id, STOP_TIMEOUT_S)
        if not info.has_ended:
            raise CloudError(
                f"Job {job_id} has not ended within {STOP_TIMEOUT_S:g} s: {info.message} Look again"
                " later."
            )
        return info

    def _stop_waiting(self, job_id: str) -> None:
        """End a waiting job by another job: Ray's own stop does not."""
        command = shlex.join([self.python, "-c", STOPPER, job_id])
        stopper = self._hand_in(
            entrypoint=command, submission_id=f"{STOPPING}{uuid.uuid4().hex[:12]}"
        )
        if self.wait(stopper, STOP_TIMEOUT_S).has_ended:
            with suppress(CloudError):  # it may be deleted already
                self.dashboard.delete_job(stopper)

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
                f"The job would wait forever: {words}. Its command runs on one node. Ask for less,"
                " or for nothing: the pool that it opens takes its own."
            )


def _is_answer(error: Exception) -> bool:
    """Whether an error is the cluster's answer, so that a retry does not help."""
    return getattr(error, "status", None) is not None


def new_id() -> str:
    """Return an id for a job, which is one for all that ever ran on its cluster."""
    return f"raypool_{uuid.uuid4().hex[:16]}"


def _quoted(job_id: str) -> str:
    """Return a job's id for Ray's client, which puts it into a URL as it is."""
    return urllib.parse.quote(job_id, safe="")


def _last_line(error: BaseException) -> str:
    """Return what an error says in the end: the cluster sends whole tracebacks."""
    lines = [line for line in str(error).strip().splitlines() if line.strip(" .")]
    return lines[-1].strip() if lines else type(error).__name__
