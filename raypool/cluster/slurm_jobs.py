"""Jobs of Slurm, with the methods of `jobs.Jobs`: for `batch`, `raypool job` and `raypool submit`.

Each job has a folder on the file system that login nodes and compute nodes share. It keeps the file
for `sbatch`, the output and the exit code, so that a job is known after Slurm has forgotten it.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raypool.cluster.jobs import ENDED, JobInfo, JobQueue, JobRequest, Jobs
from raypool.cluster.slurm import (
    FILE,
    GONE,
    MOST_LOOK_S,
    OUTPUT,
    PATIENCE_S,
    JobState,
    cancel,
    folder_of_jobs,
    is_there,
    job_file,
    look,
    look_at_all,
    named,
    new_folder,
    size_of,
    submit,
)
from raypool.cluster.slurm_job import STATUS
from raypool.errors import CloudError, InvalidValueError
from raypool.profiles import Profile, Slurm
from raypool.worker.folders import make_private, write_file

INFO = "job.json"
"""The file in a job's folder with its name, command and number."""

STATES = {
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED"), "running"),
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"), "queued"
    ),
}
"""Slurm's names of the states of a job, and those of futures; all others: "failed"."""

LOOK_S = 0.5
"""The interval of looks at a job's folder [s]; Slurm is asked less often the longer it takes."""

STOP_TIMEOUT_S = 60.0
"""The time for a cancelled job to end [s]; Slurm kills it after its KillWait."""


def jobs_of(profile: Profile) -> Jobs | SlurmJobs:
    """Return the jobs of a profile's cluster: those of Slurm, or those of Ray."""
    return Jobs(profile) if profile.slurm is None else SlurmJobs(profile)


class SlurmJobs(JobQueue):
    """The jobs that this user has submitted to Slurm with raypool.

    Args:
        profile: `slurm` has the resources to request; the job starts in `working_dir`, or in this
            folder.
        is_requeued: Put a job back into the queue when its time is over or it is preempted.
    """

    python = "python"

    def __init__(self, profile: Profile, *, is_requeued: bool = False) -> None:
        self._profile = profile
        self._is_requeued = is_requeued
        self._slurm = profile.slurm or Slurm()

    @property
    def outputs(self) -> Path:
        """The folder for the outputs of `batch`."""
        return make_private(folder_of_jobs(self._slurm) / "outputs")

    def _submit(self, request: JobRequest) -> None:
        if request.cpus or request.gpus:
            raise InvalidValueError(
                "cpus and gpus reserve parts of a Ray cluster for a command. A Slurm job uses its"
                " whole allocation: set gpus_per_node and cpus_per_gpu in the profile."
            )
        if self._profile.packages:
            raise InvalidValueError(
                "packages are for jobs on a Ray cluster. A Slurm job has the environment of this"
                f" raypool: install {', '.join(self._profile.packages)} there instead."
            )
        directory = Path(self._profile.working_dir or "").expanduser().absolute()
        if not directory.is_dir():
            raise InvalidValueError(f"working_dir={str(directory)!r} is not a folder.")
        env, call = dict(request.env), request.call
        # before the folder is made, which an error would leave behind
        size = size_of(self._profile, *((None, None) if call is None else call.workers))
        folder = new_folder(self._slurm, request.job_id)
        if call is not None:
            shutil.copytree(call.module, folder / Path(call.module).name)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        text = job_file(
            self._slurm,
            size,
            request.command,
            name=request.name,
            folder=folder,
            requeue=self._is_requeued,
            env=env,
        )
        write_file(folder / FILE, text.encode())
        info = {
            "name": request.name,
            "command": " ".join(request.command),
            "number": submit(folder / FILE, f"--chdir={directory}"),
            "submitted_at": time.time(),
            "metadata": dict(request.metadata),
        }
        write_file(folder / INFO, json.dumps(info).encode())

    def look(self, job_id: str) -> JobInfo:
        """Return the state of a job, by its id or Slurm's number.

        Raises:
            CloudError: There is no such job.
        """
        return self._look(job_id, 0.0)

    def _look(self, job_id: str, patience_s: float) -> JobInfo:
        folder, info = self._find(job_id)
        return _job_info(folder, info, look(info["number"], patience_s))

    def all(self) -> list[JobInfo]:
        """Return the states of all jobs, the newest last."""
        files = folder_of_jobs(self._slurm).glob(f"*/{INFO}")
        known = [(file.parent, json.loads(file.read_text())) for file in files]
        states = look_at_all(info["number"] for _, info in known)
        return sorted(
            (
                _job_info(folder, info, states.get(info["number"], JobState(GONE)))
                for folder, info in known
            ),
            key=lambda info: info.submitted_at or datetime.min.replace(tzinfo=UTC),
        )

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobInfo:
        """Wait for a job's end, at most this long; return its state then."""
        return deque(self._looks(job_id, timeout_s), maxlen=1).pop()

    def log(self, job_id: str) -> str:
        """Return a job's output so far."""
        folder, _ = self._find(job_id)
        try:
            # without the beginning of a letter that is being written
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return decoder.decode((folder / OUTPUT).read_bytes())
        except FileNotFoundError:  # it waits in the queue
            return ""

    def follow(self, job_id: str, seen: int = 0) -> Iterator[str]:
        """Yield a job's output after its first `seen` characters, until it ends."""
        for _ in self._looks(job_id, None):
            text = self.log(job_id)
            if len(text) > seen:
                yield text[seen:]
                seen = len(text)

    def stop(self, job_id: str) -> JobInfo:
        """Cancel a job, queued or running; return its state then.

        Raises:
            CloudError: There is no such job, or it does not end.
        """
        folder, info = self._find(job_id)
        cancel(info["number"])
        stopped = self._wait_stopped(job_id, STOP_TIMEOUT_S)
        if stopped.state == "cancelled" and not is_there(folder / STATUS):
            # it never began, and Slurm forgets it in a few minutes
            status = {"exit_code": None, "is_cancelled": True, "ended_at": time.time()}
            write_file(folder / STATUS, json.dumps(status).encode())
        return stopped

    def _looks(self, job_id: str, timeout_s: float | None) -> Iterator[JobInfo]:
        """Yield the last known state of a job, until it has ended or the time is over."""
        folder, _ = self._find(job_id)
        deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
        pause_s, ask_at = LOOK_S, 0.0
        while True:
            now = time.monotonic()
            # a job that has ended says so in its folder; one that was killed does not
            if now >= ask_at or is_there(folder / STATUS):
                info = self._look(job_id, min(PATIENCE_S, max(0.0, deadline - now)))
                pause_s = min(2 * pause_s, MOST_LOOK_S)
                ask_at = min(time.monotonic() + pause_s, deadline)
            yield info
            if info.has_ended or now >= deadline:
                return
            time.sleep(max(0.0, min(LOOK_S, deadline - time.monotonic())))

    def _find(self, job_id: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder of a job, and the notes there."""
        root = folder_of_jobs(self._slurm)
        files = [root / job_id / INFO] if not job_id.isdecimal() else list(root.glob(f"*/{INFO}"))
        for file in files:
            # there is no such job, or its folder was just removed
            with suppress(FileNotFoundError):
                info = json.loads(file.read_text())
                if not job_id.isdecimal() or named(info["number"])[-1] == job_id:
                    return file.parent, info
        raise CloudError(
            f"There is no job {job_id!r} in {root}. `raypool job status`, with the same --profile,"
            " lists the jobs there."
        )


def _job_info(folder: Path, info: Mapping[str, Any], at: JobState) -> JobInfo:
    """Return the state of a job, from the notes in its folder and from what Slurm has just said."""
    status: dict[str, Any] = {}
    if is_there(folder / STATUS):  # only now: a job writes it before it ends
        with suppress(FileNotFoundError):  # a job that begins again removes it
            status = json.loads((folder / STATUS).read_text())
    state = STATES.get(at.state, "failed")
    # A job that is preempted is told to end, too, and says so; then Slurm queues it once more.
    is_in_doubt = state == "queued" or (state == "running" and status.get("is_cancelled"))
    # the job's own word counts, so that its state is the same when Slurm has forgotten it
    if at.state == GONE or (status and not is_in_doubt):
        state = "finished" if status.get("exit_code") == 0 else "failed"
        state = "cancelled" if status.get("is_cancelled") else state
    has_ended = state in ENDED
    return JobInfo(
        id=folder.name,
        name=info["name"],
        state=state,
        command=info["command"],
        message=f"Slurm job {info['number']}: {at}.",
        exit_code=status.get("exit_code") if has_ended else None,
        submitted_at=datetime.fromtimestamp(info["submitted_at"], UTC),
        finished_at=(
            datetime.fromtimestamp(status["ended_at"], UTC) if status and has_ended else None
        ),
        node=None,
        metadata=info["metadata"],
    )
