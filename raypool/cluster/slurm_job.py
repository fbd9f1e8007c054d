"""Ray on all nodes of a Slurm job: `python -m raypool.cluster.slurm_job -- python train.py`.

The first process of the job runs `main`. One step of `srun` runs `serve_node` on each node, which
starts Ray there. Then `main` runs the command, or serves drivers elsewhere, and exits with the
command's exit code. Everything belongs to this job alone: token, ports and folders. Nothing calls
`ray stop`, which would end the Ray of another job on the same node.

Slurm's signals:

- USR1 reaches only `main` (`--signal=B:USR1@N`, `scancel --batch --signal=USR1`): the job's time is
  nearly over. Without `B:` Slurm would signal every process of Ray, and end it all.
- TERM reaches every process of a step when Slurm preempts or cancels the job. Ray's processes have
  it blocked, so that they live on while tasks save their work.

Both become a drain of Ray's nodes: tasks see `should_stop`, and the pool ends with
`PoolPreemptedError`. With `--requeue` the job then goes back into the queue.

Source: the manuals of sbatch, srun, scancel and slurm.conf (KillWait, PreemptMode, GraceTime),
checked on Slurm 22.05.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from raypool.cluster.begin import machines_there, wait_until
from raypool.cluster.connect import listens
from raypool.cluster.launcher_file import HEALTH_CHECKS
from raypool.cluster.preemption import Notice, drain
from raypool.errors import CloudError
from raypool.worker.folders import hold, make_private, remove_unheld, write_file

JOIN_S = 300.0
"""The time for all nodes to join [s]."""

SPARE_S = 10.0
"""How long before Slurm ends the job its command must have ended [s]: `main` needs the rest."""

END_S = 5.0
"""The time from SIGTERM to SIGKILL for the command [s]."""

STEP_S = 30.0
"""The time for the step to end [s]: srun waits for nodes that are gone."""

LOOK_S = 0.2
"""The interval of checks [s]."""

UNUSED_S = 60.0
"""How long an allocation for drivers elsewhere is kept when none is connected [s]."""

FIRST_DRIVER_S = 600.0
"""How long the first driver may take to connect [s]."""

UNTOLD_S = 30.0
"""The time to save if Slurm does not say when it takes a node back [s]: its usual KillWait."""

ANSWER_S = 10.0
"""The time for Ray to answer a question [s]."""

STARTS = 3
"""How often `ray start` is tried on a node: a head that comes up slowly ends itself."""

LINES = 12
"""How many of Ray's last lines are shown when it ends."""

PREEMPTED = os.EX_TEMPFAIL
"""The exit code of a command that was ended early: EX_TEMPFAIL of sysexits.h."""

SETUP = "RAYPOOL_SLURM"
"""The environment variable that tells `serve_node` about its job; workers see it too."""

NOT_FOR_TASKS = re.compile(
    "(SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASKS_PER_NODE|STEP|TASK_PID|GTIDS|SRUN|LAUNCH"
    "|CPU_BIND|OPEN_MODE)|PMI)"
)
"""Lightning, Accelerate and MPI would take a worker with these variables for a task of srun.

Source:
    github.com/ray-project/ray/issues/10995.
"""

NOT_FOR_SRUN = re.compile(
    "SLURM_(NTASKS|NPROCS|TASKS_PER_NODE|MEM_PER_|GPUS|GPU_BIND|TRES_PER_TASK|CPU_BIND"
    "|DISTRIBUTION|EXACT|EXCLUSIVE)"
)
"""srun takes options from these; its step has one task on each node, with all of the job there."""

OF_USERS = re.compile("(SQUEUE|SCANCEL|SINFO|SCONTROL)_")
"""Slurm's commands take options from these, which would hide jobs, or show them otherwise."""

TOKEN, CONNECTION, STATUS = "token", "connection.json", "status.json"
"""Files in a job's folder: Ray's token, its addresses, and how the command has ended."""

STORE_SHARE = 0.3
"""Ray's own share of the memory for its object store."""


def environment_without(names: re.Pattern[str]) -> dict[str, str]:
    """Return the environment of this process without some variables."""
    return {name: value for name, value in os.environ.items() if not names.match(name)}


class RaySetup(NamedTuple):
    """Settings for the node processes of a job."""

    head: str
    address: str  # where Ray's control store listens
    client_address: str  # where Ray Client's server listens
    name: str  # for folders
    memory: int  # of each node in this job [MiB]; 0: all of it
    memory_per_cpu: int  # likewise, for each core


def say(text: str) -> None:
    """Print a line into the output of the job."""
    sys.stdout.write(f"raypool: {text}\n")
    sys.stdout.flush()


def _set_at_end_of_input(event: threading.Event) -> None:
    def read() -> None:
        sys.stdin.buffer.read()
        event.set()

    threading.Thread(target=read, daemon=True).start()


# --- questions to Slurm ---------------------------------------------------------------------------


def ask(*command: str, without: re.Pattern[str] = OF_USERS) -> str:
    """Return the output of a command of Slurm.

    Args:
        command: The command.
        without: The environment variables that it must not see.

    Raises:
        CloudError: It is not installed, or fails.
    """
    try:
        # the user's may name another format for times
        environment = {**environment_without(without), "SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise CloudError(
            f"There is no command {command[0]} on this machine. Run this where Slurm is"
            " installed: on a login node of the cluster, or in a job."
        ) from error
    if done.returncode:
        # of several lines the last is the verdict
        words = re.sub(rf"^{command[0]}: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise CloudError(f"{command[0]}: {words or f'exit code {done.returncode}'}")
    return done.stdout


def own_job() -> str:
    """Return Slurm's id of this job."""
    # one task of an array has the id of the whole array as its SLURM_JOB_ID
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return os.environ["SLURM_JOB_ID"]
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"


def gpus_of_nodes(job: str) -> dict[str, int]:
    """Return the number of GPUs that a job has on each of its nodes, by name."""
    # srun's own idea of it is wrong for jobs with --gpus or --gpus-per-task
    found = {}
    shown = ask("scontrol", "show", "job", "--details", job)
    for names, gres in re.findall(r"^ *Nodes=(\S+) CPU_IDs=.*?GRES=(\S*)", shown, re.MULTILINE):
        gpus = sum(int(number) for number in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        for name in ask("scontrol", "show", "hostnames", names).split():
            found[name] = gpus
    return found


def address_of(node: str) -> str:
    """Return the IP address of a node, as Slurm knows it."""
    # its own name may be 127.0.1.1 in its /etc/hosts
    shown = ask("scontrol", "show", "node", node, "--oneliner")
    name = re.search(r"NodeAddr=(\S+)", shown)
    return socket.gethostbyname(name[1] if name else node)


def deadline(job: str, notice_s: float = math.inf) -> float:
    """Return the time by which a command must have ended, after a signal now [Unix time, s]."""
    at = time.time() + notice_s
    with contextlib.suppress(CloudError):  # the controller may be down: the notice still counts
        # a preemption brings the end forward; without a time limit it is "Unknown"
        if shown := re.search(r"EndTime=(\d\S+)", ask("scontrol", "show", "job", job)):
            at = min(at, datetime.fromisoformat(shown[1]).timestamp() - SPARE_S)
    return at if at < math.inf else time.time() + UNTOLD_S


# --- on each node, as the only task of a step there -----------------------------------------------


def serve_node() -> None:
    """Run Ray on this node until standard input ends: srun connects it to that of `main`."""
    setup = RaySetup(*json.loads(os.environ[SETUP]))
    name = os.environ["SLURMD_NODENAME"]
    over, told = threading.Event(), threading.Event()
    # a handler in Python: Ray and its children do not inherit it
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    _set_at_end_of_input(over)
    folders = make_private(Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ray-{os.getuid()}")
    for folder in folders.iterdir():  # of jobs that were killed
        remove_unheld(folder)
    # short: the names of sockets below it have 107 letters at most
    own = folders / f"{setup.name}.{os.environ.get('SLURM_NODEID', '0')}"
    held = hold(own)
    try:
        _run_ray(setup, name, own, over, told)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all(own)
        shutil.rmtree(own, ignore_errors=True)
        os.close(held)
    say(f"{name}: Ray ended.")
    os._exit(0)  # the thread still reads standard input


def _run_ray(
    setup: RaySetup, name: str, own: Path, over: threading.Event, told: threading.Event
) -> None:
    """Run Ray until `over`, and drain this node when it is `told`."""
    address = address_of(name)
    command = _ray_start(setup, name, address, own)
    environment = environment_without(NOT_FOR_TASKS)
    environment["RAY_TMPDIR"] = str(own)  # it also marks Ray's processes for `_kill_all`
    # the head comes first: the others join it
    while name != setup.head and not _listens(setup.address) and not over.wait(LOOK_S):
        pass
    gone_at = math.inf
    for _ in range(STARTS):
        with (own / "start.log").open("wb") as log:
            ray = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Slurm sends it to all of a step; a pool's workers unblock it for users' programs
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
            )
        # to `gone_at` only: the folder must be removed before Slurm kills this process, too
        while ray.poll() is None and not over.wait(LOOK_S) and time.time() < gone_at:
            if told.is_set() and gone_at == math.inf:
                gone_at = deadline(own_job())
                _drain(setup, Notice("Slurm is about to take this node back", gone_at), address)
        if ray.poll() is None:
            return
        if told.is_set():  # Ray ends a drained node that has nothing to do
            over.wait()
            return
        printed = (own / "start.log").read_text(errors="replace").strip().splitlines()
        last = "\n  ".join(printed[-LINES:])
        say(f"{name}: Ray ended with exit code {ray.returncode}. Its last output:\n  {last}")


def _ray_start(setup: RaySetup, name: str, address: str, own: Path) -> list[str]:
    """Return the command that starts Ray on this node."""
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    # Slurm sets it to the GPUs of this step; "NoDevFiles" is its word for none
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    else:
        gpus = sum(entry not in ("", "NoDevFiles") for entry in visible.split(","))
    command = [
        *(sys.executable, "-m", "raypool.backends.ray.ray_start", "--block"),
        *(f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
        # any free port: two jobs may share a node
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--temp-dir={own}/r",  # Ray lets everybody write into its folder; nobody else enters `own`
    ]
    if name == setup.head:
        command += [
            "--head",
            f"--port={setup.address.rpartition(':')[2]}",
            f"--ray-client-server-port={setup.client_address.rpartition(':')[2]}",
            "--include-dashboard=false",
        ]
    else:
        command.append(f"--address={setup.address}")
    if given := 2**20 * (setup.memory or setup.memory_per_cpu * int(cpus)):
        # without this, Ray counts all memory of the machine
        free = shutil.disk_usage("/dev/shm").free  # where Ray's store is
        store = min(int(given * STORE_SHARE), free)
        command += [f"--object-store-memory={store}", f"--memory={given - store}"]
    return command


def _listens(address: str) -> bool:
    try:
        listens(address, 2)
    except OSError:
        return False
    return True


def _drain(setup: RaySetup, notice: Notice, address: str | None = None) -> None:
    """Drain the node at an address, or all nodes, unless the time is up."""
    if notice.gone_at < time.time():
        return  # the job is cancelled
    try:
        drained = drain(setup.address, notice, address)
    except Exception as error:  # Ray is at its end
        say(f"Ray could not be notified ({notice.words}): {type(error).__name__}: {error}")
        return
    left_s = notice.gone_at - time.time()
    say(f"{notice.words}: {', '.join(drained)} in {left_s:.0f} s.")


def _kill_all(own: Path) -> None:
    """Kill the processes of Ray here, and what tasks have started."""
    processes = psutil.Process().children(recursive=True)
    # and those that have lost their parent
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or hides its variables
            is_ours = process.uids().real == os.getuid() and process.pid != os.getpid()
            if is_ours and process.environ().get("RAY_TMPDIR") == str(own):
                processes.append(process)
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)  # `serve_node` deletes their folder next


# --- in the job's first process -------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Start Ray on all nodes, run the command, and return its exit code."""
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.slurm_job",
        description="Start Ray on all nodes of a Slurm job, and run a command there.",
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="requeue the job if the command was ended early",
    )
    parser.add_argument(
        "--notice-s",
        type=float,
        default=120.0,
        help="time from SIGUSR1 to the end of the command [s]",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for the job's exit code; without a command, also for Ray's address and"
        " token, for drivers elsewhere",
    )
    parser.add_argument(
        "--child", action="store_true", help="exit when standard input, the driver's, closes"
    )
    options = parser.parse_args(words[:at])
    command = words[at + 1 :]
    if not command and options.folder is None:
        parser.error("nothing to run: pass `-- COMMAND`, or --folder FOLDER")
    keeps_status = command and options.folder is not None
    if keeps_status:
        (options.folder / STATUS).unlink(missing_ok=True)  # of the time before a requeue
    job = SlurmJob(options, command)
    try:
        code = job.run()
    except CloudError as error:
        say(str(error))
        code = 1
    if keeps_status and not job.is_requeued:
        is_cancelled = job.ended.is_set()
        status = {"exit_code": code, "is_cancelled": is_cancelled, "ended_at": time.time()}
        write_file(options.folder / STATUS, json.dumps(status).encode())
    return code


class SlurmJob:
    """A job of Slurm: Ray on its nodes, and the command."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self._options = options
        self._command = command
        self._job = own_job()
        self._told = threading.Event()  # the time is nearly over
        self.ended = threading.Event()  # Slurm, or the user, ends the job
        self.is_requeued = False
        self._steps: list[subprocess.Popen[bytes]] = []
        self._is_early = False  # nodes drain, so the command ends early
        self._look_at = 0.0  # when to ask Ray next

    def run(self) -> int:
        """Run the command on a cluster of all nodes; return its exit code."""
        signal.signal(signal.SIGUSR1, lambda *_: self._told.set())
        signal.signal(signal.SIGTERM, lambda *_: self.ended.set())
        gpus = gpus_of_nodes(self._job)
        head = os.environ.get("SLURMD_NODENAME") or next(iter(gpus))
        host = address_of(head)
        address, client_address = (f"{host}:{port}" for port in _free_ports(2))
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        # the steps of srun do not have these variables; users may set them for srun, as "64G"
        given = (os.environ.get(f"SLURM_MEM_PER_{each}", "") for each in ("NODE", "CPU"))
        memory = (int(each) if each.isdigit() else 0 for each in given)
        setup = RaySetup(head, address, client_address, f"{self._job}.{restarts}", *memory)
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **dict(setting.split("=") for setting in HEALTH_CHECKS),
        }
        code = 1
        try:
            self._start_ray(setup, gpus)
            code = self._run_command(setup) if self._command else self._serve_drivers(setup)
        finally:
            self._end_ray()
        # not after success, nor if Slurm or the user has ended the job
        if self._is_early and code and not self.ended.is_set():
            if self._options.requeue:
                say("The job is requeued; the same command resumes it.")
                ask("scontrol", "requeue", self._job)
                self.is_requeued = True
            return PREEMPTED
        return code

    def _start_ray(self, setup: RaySetup, gpus: Mapping[str, int]) -> None:
        """Start Ray on all nodes, and wait until they have joined."""
        environment = environment_without(NOT_FOR_SRUN)
        environment[SETUP] = json.dumps(setup)
        # one step for each number of GPUs: --gres is the same on all nodes of a step
        for number in sorted(set(gpus.values())):
            nodes = [name for name, gpus_there in gpus.items() if gpus_there == number]
            step = [
                *("srun", "--overlap", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
                "--export=ALL",  # else an --export of sbatch holds for this step, too
                *(f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--mem=0"),
                # -c would hold the step to that many cores; without, it has all of the job's
                "--cpu-bind=none",
                # a node that fails must not end the others
                *("--kill-on-bad-exit=0", "--no-kill"),
                *([f"--gres=gpu:{number}"] if number else []),
                *(sys.executable, "-m", "raypool.cluster.slurm_job", "node"),
            ]
            self._steps.append(subprocess.Popen(step, stdin=subprocess.PIPE, env=environment))
        os.environ["RAY_ADDRESS"] = setup.address
        wait_until(len(gpus), functools.partial(self._count, setup), JOIN_S)

    def _count(self, setup: RaySetup) -> int:
        """Return how many nodes have joined."""
        if self.ended.is_set() or all(step.poll() is not None for step in self._steps):
            raise CloudError(
                "Ray is not running on the nodes of this job: "
                + ("Slurm has ended the job." if self.ended.is_set() else "see the lines above.")
            )
        # the server for drivers elsewhere starts last
        return machines_there() if self._command or _listens(setup.client_address) else 0

    def _run_command(self, setup: RaySetup) -> int:
        """Run the command; return its exit code, 128 and the signal's number after a signal."""
        program, *arguments = self._command
        try:
            command = subprocess.Popen(
                [sys.executable if program == "python" else program, *arguments],
                env=environment_without(NOT_FOR_TASKS),
            )
        except OSError as error:
            say(f"{program} cannot be run: {error.strerror}.")
            return 127 if isinstance(error, FileNotFoundError) else 126  # as in shells
        gone_at = math.inf
        while command.poll() is None:
            gone_at = self._pass_on_notice(setup, gone_at)
            if self.ended.is_set() or time.time() > gone_at:
                why = "the job is cancelled" if self.ended.is_set() else "its time is over"
                say(f"Stopping the command: {why}.")
                command.terminate()
                try:
                    command.wait(END_S)
                except subprocess.TimeoutExpired:
                    command.kill()
                    command.wait()  # without a limit: SIGKILL cannot be ignored
            time.sleep(LOOK_S)
        code = command.returncode if command.returncode >= 0 else 128 - command.returncode
        say(f"The command ended with exit code {code}.")
        return code

    def _serve_drivers(self, setup: RaySetup) -> int:
        """Let drivers elsewhere use the cluster, as long as there are any; return the exit code."""
        folder = self._options.folder
        write_file(folder / TOKEN, os.environ["RAY_AUTH_TOKEN"].encode())
        addresses = {
            "address": setup.address,
            "client": f"ray://{setup.client_address}",
        }
        write_file(folder / CONNECTION, json.dumps(addresses).encode())  # a driver waits for it
        is_child = self._options.child
        over = threading.Event()
        if is_child:
            _set_at_end_of_input(over)
        gone_at, unused_at = math.inf, time.monotonic() + FIRST_DRIVER_S
        try:
            while not over.wait(LOOK_S):  # only a child's is ever set, else this is a pause
                gone_at = self._pass_on_notice(setup, gone_at)
                if self.ended.is_set():
                    break  # the pool is closed, as a rule
                if time.time() > gone_at:
                    say("Ending the allocation: the job's time is over.")
                    break
                if is_child or _has_drivers(setup):
                    unused_at = time.monotonic() + UNUSED_S
                elif time.monotonic() > unused_at:
                    say("Ending the allocation: no driver is connected.")
                    break
        finally:
            # in this order: a driver that finds the addresses finds the token, too
            (folder / CONNECTION).unlink(missing_ok=True)
            (folder / TOKEN).unlink(missing_ok=True)
        return 0

    def _pass_on_notice(self, setup: RaySetup, gone_at: float) -> float:
        """Drain all nodes once the notice has come; return when the command must have ended."""
        # Slurm's notice may have come to the nodes only. Asked while they are there: a drained
        # node ends as soon as it has nothing to do.
        if not self._is_early and time.monotonic() > self._look_at:
            from raypool.ray_private import GcsClient

            self._look_at = time.monotonic() + 1
            with contextlib.suppress(Exception):  # Ray is busy, or at its end
                self._is_early = bool(GcsClient(address=setup.address).get_draining_nodes())
        if not self._told.is_set() or gone_at < math.inf:
            return gone_at
        self._is_early = True
        gone_at = deadline(self._job, self._options.notice_s)
        _drain(setup, Notice("This Slurm job is almost out of time", gone_at))
        return gone_at

    def _end_ray(self) -> None:
        """End Ray on all nodes."""
        for step in self._steps:
            if step.stdin is not None:
                step.stdin.close()  # `serve_node` sees the end of its input
        for step in self._steps:
            try:
                step.wait(STEP_S)
            except subprocess.TimeoutExpired:
                say("A node does not answer; Slurm ends the rest.")
                step.terminate()
                step.wait()


def _free_ports(number: int) -> list[int]:
    """Return ports that are free here."""
    # all are open at once: a port that is closed may be given out again
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(number)]
        for holder in holders:
            holder.bind(("", 0))
        return [int(holder.getsockname()[1]) for holder in holders]


def _has_drivers(setup: RaySetup) -> bool:
    """Whether a driver is connected; true if Ray does not say."""
    from raypool.ray_private import GcsClient

    try:
        jobs = GcsClient(address=setup.address).get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=ANSWER_S
        )
    except Exception:  # it is busy; when it has ended, so have its steps
        return True
    return any(not job.is_dead for job in jobs.values())


if __name__ == "__main__":
    if sys.argv[1:] == ["node"]:
        serve_node()
    else:
        sys.exit(main(sys.argv[1:]))
