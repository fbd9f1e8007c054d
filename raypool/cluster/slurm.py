"""Allocations of Slurm: `parpool(8, profile="hpc")` submits a job, waits for it, and releases it.

On a login node the job holds the nodes and runs Ray on them, and this process connects by Ray
Client. Inside an allocation of several nodes, a child of this process does what the job would do.
`slurm_job` is the part that runs in the job; `job_file` writes the file for `sbatch`, the same for
pools, batch jobs and people.

Source: the manuals of sbatch, squeue and scontrol, checked on Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from raypool.channel.users_code import is_installed
from raypool.cluster.slurm_job import CONNECTION, JOIN_S, TOKEN, ask
from raypool.errors import CloudError, InvalidValueError, StartupError, did_you_mean
from raypool.profiles import Profile, Slurm
from raypool.worker.folders import make_private, write_file

LOOK_S = 1.0
"""The interval of questions about a job in the queue [s]; it doubles up to `MOST_LOOK_S`."""

MOST_LOOK_S = 15.0

LINES = 15
"""How many of a job's last lines an error shows."""

FILE, OUTPUT = "job.sbatch", "output.log"
"""More files in a job's folder."""

GONE = "GONE"
"""The state of a job that Slurm no longer knows."""

GONE_WORDS = ("Invalid job id", "already completing or completed")
"""Words of Slurm's errors about a job that has ended."""

PATIENCE_S = 600.0
"""How long Slurm may not answer while somebody waits for a job [s]."""

CANCEL_S = 5.0
"""How long Slurm may not answer when a job is cancelled [s]."""

logger = logging.getLogger("raypool")


class Size(NamedTuple):
    """The size of an allocation: a range of nodes, and cores of each (None: the default)."""

    least: int
    most: int
    cpus: int | None


def size_of(profile: Profile, least: int | None, most: int | None) -> Size:
    """Return the size of the allocation for a pool of `least` to `most` workers (None: any).

    Raises:
        InvalidValueError: The nodes that `profile.slurm` names are too few for `least` workers.

    Example:
        >>> size_of(Profile(slurm=Slurm(gpus_per_node=4, cpus_per_gpu=6)), 2, 8)
        Size(least=1, most=2, cpus=24)
        >>> size_of(Profile(slurm=Slurm()), 16, 16)
        Size(least=1, most=1, cpus=16)
    """
    slurm = profile.slurm or Slurm()
    if not slurm.gpus:
        given, number = slurm.nodes or 1, most or least
        cores = _of_each(profile, number or 1, "cpus")
        loads = [0.0] * given
        for amount in sorted(cores, reverse=True):
            loads[loads.index(min(loads))] += amount
        is_asked = number is not None or max(cores) > 1
        return Size(given, given, math.ceil(max(loads)) if is_asked else None)
    cpus = slurm.cpus_per_gpu and slurm.cpus_per_gpu * slurm.gpus
    fewest, most_nodes = (
        _nodes_for(_of_each(profile, number, "gpus"), slurm.gpus)
        for number in (least or 1, most or least or 1)
    )
    if slurm.nodes is None:
        return Size(fewest, most_nodes, cpus)
    if fewest > slurm.nodes:
        raise InvalidValueError(
            f"{least} workers need {sum(_of_each(profile, least or 1, 'gpus')):g} GPUs, on"
            f" {fewest} nodes with gpus_per_node={slurm.gpus_per_node}, but nodes={slurm.nodes}."
            " Increase nodes, or leave it out."
        )
    return Size(slurm.nodes, slurm.nodes, cpus)


def _of_each(profile: Profile, number: int, field: Literal["gpus", "cpus"]) -> list[float]:
    """Return the GPUs or cores of each of this many workers: one, or what the profile says."""
    if not profile.listed and field == "gpus" and isinstance(profile.workers_per_gpu, int):
        return number * [1 / profile.workers_per_gpu]
    each = [getattr(kind, field) for kind in profile.listed or number * profile.kinds]
    # a rounded part of a GPU is meant as the nearest that divides it
    parts = [1 / round(1 / amount) if amount and amount < 1 else amount for amount in each]
    return [1 if amount is None else amount for amount in (parts if field == "gpus" else each)]


def _nodes_for(workers: Sequence[float], gpus: int) -> int:
    """Return how many nodes with this many GPUs hold workers that need so many of them each.

    Raises:
        InvalidValueError: A worker needs more.
    """
    if max(workers) > gpus:
        raise InvalidValueError(
            f"A worker needs {max(workers):g} GPUs of one node, but gpus_per_node={gpus}. Increase"
            " it, or request less for each worker: resources=WorkerResources(...)."
        )
    left: list[float] = []
    # the largest first, each on the first node with room: small ones then fill the gaps
    for amount in sorted(workers, reverse=True):
        for node, free in enumerate(left):
            if amount <= free + 1e-6:
                left[node] -= amount
                break
        else:
            left.append(gpus - amount)
    return max(1, len(left))


def job_file(  # noqa: PLR0913 - all are named
    slurm: Slurm,
    size: Size,
    command: Sequence[str],
    *,
    name: str,
    folder: Path | None = None,
    requeue: bool = False,
    env: Mapping[str, str] | None = None,
) -> str:
    r"""Return the file for `sbatch`.

    Args:
        slurm: The allocation.
        size: Its size.
        command: What runs when Ray is up. Nothing: drivers elsewhere use the allocation.
        name: The name of the job.
        folder: The folder of the job. None: it has none, and its output goes where it is submitted.
        requeue: Put the job back into the queue when it was ended early.
        env: Environment variables.

    Example:
        >>> text = job_file(Slurm(time=60), Size(2, 2, 4), ["python", "train.py"], name="a\nb")
        >>> "#SBATCH --nodes=2" in text, text.splitlines()[-1].endswith("-- python train.py")
        (True, True)
        >>> "#SBATCH --job-name='a b'" in text
        True
    """
    nodes = f"{size.least}-{size.most}" if size.most > size.least else f"{size.least}"
    wanted: dict[str, object] = {
        "job-name": " ".join(name.split()),  # sbatch reads no option behind a line that is none
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": size.cpus,
        "constraint": slurm.constraint,
        "output": "%x-%j.out" if folder is None else folder / OUTPUT,
        # append: a job that runs again keeps its output
        "open-mode": "append",
        # B: only the first process gets the signal; Ray's processes must not
        "signal": f"B:USR1@{slurm.notice_s:.0f}",
    }
    lines = [
        *(f"--{key}={shlex.quote(str(value))}" for key, value in wanted.items() if value),
        "--requeue" if requeue else "--no-requeue",
        *slurm.sbatch,  # last: they count before the others
    ]
    launcher = [
        *(sys.executable, "-m", "raypool.cluster.slurm_job", f"--notice-s={slurm.notice_s:g}"),
        *([] if folder is None else [f"--folder={folder}"]),
        *(["--requeue"] if requeue else []),
        *(["--", *command] if command else []),
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            *(f"export {key}={shlex.quote(value)}" for key, value in (env or {}).items()),
            # a notice that comes before Python can take it would end the job
            "trap '' USR1",
            # exec: the signal is for this process, not for the shell
            f"exec {shlex.join(launcher)}",
            "",
        ]
    )


def submit(file: Path, *options: str) -> str:
    """Submit a job; return its number, and its cluster if there are several: "17;gpu-cluster".

    If this is interrupted, the folder of the job's file is removed.

    Raises:
        CloudError: Slurm refuses it, or could never run it.
    """
    # sbatch itself accepts jobs that the partition can never run, and they wait forever
    for kind in ("--test-only", "--parsable"):
        try:
            printed = ask("sbatch", kind, *options, str(file), without=_not_for_sbatch(file))
        except CloudError as error:
            raise CloudError(f"{error}{_hint(str(error), file)}") from error
        except BaseException:  # Ctrl-C: if the job was accepted, it ends without its folder
            shutil.rmtree(file.parent)
            raise
    return printed.strip()


def _not_for_sbatch(file: Path) -> re.Pattern[str]:
    """Return the variables that would count before options in a job's file, and a job's own.

    A job inherits the environment: inside another job, it would take itself for that one.
    """
    options = re.findall(r"^#SBATCH --([a-z-]+)", file.read_text("utf-8"), re.MULTILINE)
    names = [option.upper().replace("-", "_") for option in options]
    names += [*(["TIMELIMIT"] if "time" in options else []), "REQUEUE", "NO_REQUEUE", "ARRAY_INX"]
    own = "SLURM_(?!CONF$|CLUSTERS$)"
    return re.compile(f"SBATCH_({'|'.join(names)})$|{own}")


def named(job: str) -> list[str]:
    """Return the arguments that name a job to Slurm's commands.

    Example:
        >>> named("17"), named("17;gpu-cluster")
        (['17'], ['--clusters=gpu-cluster', '17'])
    """
    number, _, cluster = job.partition(";")
    return [*([f"--clusters={cluster}"] if cluster else []), number]


def _hint(words: str, file: Path) -> str:
    """Return what may help after an error of sbatch."""
    words = words.lower()
    if "invalid partition" in words:
        names = ask("sinfo", "--noheader", "--format=%R").split()
        asked = re.search(r"--partition=(\S+)", file.read_text())
        return f".{did_you_mean(asked[1] if asked else '', names)} Partitions: {', '.join(names)}."
    if "account" in words:
        return (
            ". Choose an account that may use this partition; `sacctmgr show associations"
            " user=$USER format=account,partition,qos` lists yours."
        )
    if "not available" in words:
        return (
            ". No node of the partition has the requested resources; `sinfo --Node --long` and"
            " `sinfo --format='%R %D %c %m %G'` list the available ones."
        )
    if "array" in words:
        return (
            ". `scontrol show config` shows the maximum number of tasks of an array"
            " (MaxArraySize). Run more items per task: --array N."
        )
    return f". The job file is {file}."


class JobState(NamedTuple):
    """The state of a job by Slurm's name, and the reason for which it waits."""

    state: str
    reason: str = ""
    starts: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason not in ("", "None") else ""
        is_known = self.state == "PENDING" and self.starts not in ("", "N/A")
        expected = f", expected to start at {self.starts}" if is_known else ""
        return f"{self.state.lower()}{why}{expected}"


def look(job: str, patience_s: float = 0.0) -> JobState:
    """Return the state of a job; ask again, for this long, while Slurm does not answer."""
    lines = _in_queue(job, "--states=all", "--format=%T|%r|%S", patience_s=patience_s)
    return JobState(*lines[0].split("|")) if lines else JobState(GONE)


def look_at_all(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of those of this user's jobs that Slurm knows; ask each cluster once."""
    states = {}
    for cluster in {job.partition(";")[2] for job in jobs}:
        where = [f"--clusters={cluster}"] if cluster else []
        shown = ask("squeue", "--noheader", "--me", "--states=all", "--format=%i|%T|%r|%S", *where)
        for line in _without_header(shown):
            number, *state = line.split("|")
            states[f"{number};{cluster}" if cluster else number] = JobState(*state)
    return states


def num_left(job: str) -> int:
    """Return how many tasks of a job array have not ended."""
    return len(_in_queue(job, "--array"))


def cancel(job: str, *options: str) -> None:
    """Cancel a job, unless it has ended.

    Raises:
        CloudError: Slurm does not answer, so that the job may still be queued or running.
    """
    with contextlib.suppress(JobGoneError):
        _ask_patiently(CANCEL_S, "scancel", *options, *named(job))


class JobGoneError(Exception):
    """Slurm says that a job has ended, or that it does not know it anymore."""


def _in_queue(job: str, *options: str, patience_s: float = 0.0) -> list[str]:
    """Return the lines of squeue for a job, none if Slurm no longer knows it."""
    *cluster, number = named(job)
    try:
        shown = _ask_patiently(
            patience_s, "squeue", "--noheader", *options, *cluster, f"--jobs={number}"
        )
    except JobGoneError:
        return []
    return _without_header(shown)


def _without_header(shown: str) -> list[str]:
    """Return the lines of squeue about jobs, without the name of another cluster."""
    return [line for line in shown.strip().splitlines() if not line.startswith("CLUSTER:")]


def _ask_patiently(patience_s: float, *command: str) -> str:
    """Return the output of a command of Slurm about a job, which may fail for some time.

    Controllers are restarted, and busy ones answer "Socket timed out".
    """
    gives_up_at = time.monotonic() + patience_s
    has_warned = False
    while True:
        try:
            return ask(*command)
        except CloudError as error:
            if any(words in str(error) for words in GONE_WORDS):
                raise JobGoneError from error
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            if is_missing or time.monotonic() >= gives_up_at:
                raise
            if not has_warned:
                logger.warning("%s. raypool asks again, for %g s.", error, patience_s)
                has_warned = True
        time.sleep(LOOK_S)


# --- the allocation of a pool ---------------------------------------------------------------------


@dataclass
class Allocation:
    """Nodes on which Ray runs for this process, until `release`."""

    address: str
    token_file: Path
    release: Callable[[], None]

    def joined(self, profile: Profile) -> Profile:
        """Return a profile with the address of this Ray, unless it has one."""
        if profile.address is not None:
            return profile
        return replace(profile, slurm=None, address=self.address, token_file=self.token_file)


def allocation_for(profile: Profile, workers: tuple[int | None, int | None]) -> Allocation | None:
    """Return the allocation that a pool needs; None if it needs none.

    Raises:
        CloudError: Slurm refuses the job, or it has ended.
        StartupError: Ray does not start on the nodes.
    """
    if os.environ.get("RAY_ADDRESS") or profile.address is not None:
        return None  # there is a cluster already: in a job, that of `slurm_job`
    if "SLURM_JOB_ID" in os.environ:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1" and os.environ.get("SLURM_PROCID") == "0":
            logger.warning(
                "srun started this script %s times, and each process opens its own pool. One pool"
                " uses all GPUs: start the script once, without srun or with srun --ntasks=1.",
                tasks,
            )
        is_one = os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
        return None if is_one and "SLURMD_NODENAME" in os.environ else _inside(profile)
    if profile.slurm is None:
        return None
    return _outside(profile, workers)


def _outside(profile: Profile, workers: tuple[int | None, int | None]) -> Allocation:
    """Submit a job that holds the nodes, and wait until Ray runs there."""
    slurm = profile.slurm or Slurm()
    size = size_of(profile, *workers)  # first: what it raises leaves no folder
    folder = new_folder(slurm)
    connection = folder / CONNECTION
    # Ray tells workers where a driver finds its modules, but not for a client
    env = {"PYTHONPATH": os.pathsep.join(_own_paths())}
    text = job_file(slurm, size, [], name="raypool", folder=folder, env=env)
    write_file(folder / FILE, text.encode())
    job = submit(folder / FILE)

    def release(*options: str) -> None:
        try:
            cancel(job, *options)
        except CloudError as error:
            logger.warning(
                "Slurm job %s may still be queued or running: %s. `scancel %s` ends it.",
                *(job, error, shlex.join(named(job))),
            )

    try:
        _wait(job, connection, folder / OUTPUT, is_quiet=profile.quiet)
        address = json.loads(connection.read_text())["client"]
    except BaseException:  # Ctrl-C, too
        release()
        raise
    # a signal for the first process only: it ends the rest in good order
    release_all = functools.partial(release, "--batch", "--signal=TERM")
    return Allocation(address, folder / TOKEN, release_all)


def _wait(number: str, connection: Path, output: Path, *, is_quiet: bool) -> None:
    """Wait until a job runs Ray; print its state whenever that changes."""
    told: JobState | None = None
    pause_s, deadline = LOOK_S, math.inf
    while not is_there(connection):
        state = look(number, PATIENCE_S)
        if state != told and not is_quiet:
            sys.stderr.write(f"raypool: Slurm job {number} is {state}\n")
            sys.stderr.flush()
            told, pause_s = state, LOOK_S
        if state.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"):
            deadline = math.inf
        elif state.state == "RUNNING":
            # twice: the job itself gives up after JOIN_S, and its output says why
            deadline = min(deadline, time.monotonic() + 2 * JOIN_S)
            pause_s = LOOK_S
        elif not is_there(connection):  # it may have come since the look above
            raise StartupError(f"Slurm job {number} ended before Ray started: {_last(output)}")
        if time.monotonic() > deadline:
            raise StartupError(
                f"Ray did not answer from Slurm job {number} within {2 * JOIN_S:.0f} s:"
                f" {_last(output)}"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_LOOK_S)


def is_there(file: Path) -> bool:
    """Whether a file is there; on a network, a folder that is read anew tells sooner."""
    return any(entry.name == file.name for entry in file.parent.iterdir())


def _last(output: Path) -> str:
    """Return the last lines of a job's output."""
    try:
        lines = output.read_text(errors="replace").strip().splitlines()
    except OSError:
        return f"it left no output in {output}. Do the nodes share that folder?"
    return "\n".join(["its last output:", *lines[-LINES:]])


def _inside(profile: Profile) -> Allocation:
    """Start Ray on all nodes of the allocation around this process, as a child of it."""
    number = os.environ["SLURM_JOB_ID"]
    folder = new_folder(profile.slurm or Slurm())
    connection = folder / CONNECTION
    with (folder / OUTPUT).open("wb") as output:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "raypool.cluster.slurm_job"),
                *("--child", f"--folder={folder}"),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_own_paths())},
            start_new_session=True,  # Ctrl-C is for the driver
        )

    def release() -> None:
        if child.stdin is not None:
            child.stdin.close()
        child.terminate()  # a process forked from this one may hold the other end of the pipe
        child.wait()  # it ends Ray on all nodes first

    try:
        while not is_there(connection):
            if child.poll() is not None:
                raise StartupError(
                    f"Ray did not start on the nodes of Slurm job {number}:"
                    f" {_last(folder / OUTPUT)}"
                )
            time.sleep(LOOK_S / 5)
        # on a node of its cluster a driver joins it; elsewhere (salloc) it is a client
        kind = "address" if "SLURMD_NODENAME" in os.environ else "client"
        return Allocation(json.loads(connection.read_text())[kind], folder / TOKEN, release)
    except BaseException:
        release()
        raise


def _own_paths() -> list[str]:
    """Return where this process finds modules, besides those that are installed."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    return [path for path in paths if not is_installed(path)]


def new_folder(slurm: Slurm, name: str | None = None) -> Path:
    """Make the folder of a new job, for this user only."""
    return make_private(folder_of_jobs(slurm) / (name or f"pool_{uuid.uuid4().hex[:16]}"))


def folder_of_jobs(slurm: Slurm) -> Path:
    """Return the folder of all jobs, for this user only."""
    folder = Path(slurm.folder).expanduser().absolute()
    if folder.is_symlink() and folder.lstat().st_uid == os.getuid():
        folder = folder.resolve()  # such as ~/scratch
    try:
        return make_private(folder)
    except PermissionError as error:
        raise CloudError(
            f"{folder} cannot keep the files of Slurm's jobs: {error.strerror}. Set another folder"
            " in the profile."
        ) from error
