"""Pools and jobs on a real Slurm with two nodes: `parpool`, `batch`, `raypool submit`, signals, lost
nodes, and what is left behind.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.slurm_lab import HAS_ALL, REASON, UP_S, SlurmLab, until
from tests.documents import blocks_of

pytestmark = [pytest.mark.long, pytest.mark.skipif(not HAS_ALL, reason=REASON)]

PROFILES = """
[profiles.hpc]
kind = "slurm"
gpus_per_node = 2
time = 30
notice_s = 120
folder = "jobs"
start_timeout_s = 300

[profiles.both]
kind = "slurm"
gpus_per_node = 2
nodes = 2
folder = "jobs"
start_timeout_s = 300

[profiles.one]
kind = "slurm"
gpus_per_node = 1
sbatch = ["--nodelist=n1", "--cpus-per-task=1"]
folder = "jobs"

[profiles.full]
kind = "slurm"
gpus_per_node = 2
nodes = 3
folder = "jobs"

[profiles.unknown]
kind = "slurm"
partition = "lov"
folder = "jobs"
"""

TASKS = """
import os, platform, sys, time
from pathlib import Path
import raypool
from raypool import current_task, load_checkpoint, parpool, save_checkpoint

HERE = Path(__file__).parent

def look(x):
    is_fork = b"fork_server.py" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    gpu, task = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SLURM_PROCID")
    return platform.node(), gpu, task, is_fork

def seen():
    # on every worker once
    return sorted(raypool.gcp().parfeval_on_all(look, 0).result(300))

def finish(x):
    (HERE / f"on-{platform.node()}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.1)
    return x

def train(x):
    "Counts to a hundred, from where it was; the first time it stops at four, as soon as it may."
    state = load_checkpoint() or {"step": 0, "from": []}
    state["from"].append(state["step"])
    while state["step"] < 100:
        if state["step"] == 4 and state["from"] == [0]:
            (HERE / f"running-{x}").touch()
            while not current_task().should_stop:
                time.sleep(0.05)
        if current_task().should_stop:
            save_checkpoint(state)
            return None
        state["step"] += 1
    return state["from"]
"""


class User:
    """Somebody on the login node, in a folder of their own."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab
        self.folder = Path(tempfile.mkdtemp(dir=lab.folder))
        self.write("raypool.toml", PROFILES)
        self.write("tasks.py", TASKS)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *command: str, host: str = "login") -> subprocess.Popen[str]:
        return self.lab.start("env", "-C", str(self.folder), *command, host=host)

    def run(self, *command: str, code: int = 0) -> tuple[str, str]:
        """Run a command to its end; return what it has printed."""
        process = self.start(*command)
        out, err = process.communicate(timeout=UP_S)
        assert process.returncode == code, f"{command}: {process.returncode}\n{out}\n{err}"
        return out, err

    def script(self, text: str, code: int = 0) -> tuple[str, str]:
        """Run a script on the login node."""
        return self.run("python", self.write("script.py", text), code=code)

    def submit(self, text: str, *options: str) -> str:
        """Submit a file as `raypool cluster init` writes it, for a script; return its number."""
        self.write("job.py", text)
        self.run("raypool", "cluster", "init", "--provider", "slurm", "--profile", "hpc", "--force")
        file = self.folder / "job.sbatch"
        file.write_text(file.read_text().replace("python train.py", "python job.py"))
        return self.run("sbatch", "--parsable", "--nodes=2", *options, "job.sbatch")[0].strip()

    def run_plain(self, text: str, script: str, *options: str) -> str:
        """Run a job file of the user's own to its end; return its output."""
        self.write("job.py", script)
        self.write("plain.sh", f"#!/bin/bash\nexport HOME={self.folder}\n{text}\n")
        words = ("sbatch", "--parsable", "--output=out", *options, "plain.sh")
        number = self.run(*words)[0].strip()
        until(lambda: self.shown(number, "JobState") in ("COMPLETED", "FAILED"))
        return (self.folder / "out").read_text()

    def has(self, *names: str) -> bool:
        """Whether files are there that tasks make."""
        return all((self.folder / name).exists() for name in names)

    def shown(self, number: str, field: str) -> str:
        """Return an entry of a job, as Slurm shows it."""
        text = self.lab.run("scontrol", "show", "job", number)
        found = re.search(rf"\b{field}=(\S+)", text)
        assert found is not None, text
        return found[1]

    def wait_for(self, number: str, state: str) -> None:
        until(lambda: self.shown(number, "JobState") == state)

    def output(self, number: str) -> str:
        return (self.folder / f"raypool-{number}.out").read_text()


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Start Slurm; its files are not in /tmp, which each host has for itself."""
    yield from slurm("")


def slurm(extra: str) -> Iterator[SlurmLab]:
    folder = Path(tempfile.mkdtemp(prefix="raypool-slurm-", dir="/var/tmp"))
    lab = SlurmLab(folder, extra)
    try:
        yield lab
    finally:
        lab.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def user(lab: SlurmLab) -> Iterator[User]:
    """Give somebody who leaves nothing behind: no job, no process, and no folder of Ray."""
    yield User(lab)
    lab.run("scancel", "--user=root")
    until(lambda: lab.run("squeue", "-h") == "")
    for name in ("n1", "n2"):
        until(lambda name=name: not rays(lab.run("ps", "-e", "-o", "args", host=name)))
        assert lab.run("find", "/tmp", "-path", "*/ray-0/*", "-name", "session_*", host=name) == ""


def rays(processes: str) -> list[str]:
    return re.findall(r"raylet|gcs_server|ray::|slurm_job|fork_server", processes)


# --- from the login node --------------------------------------------------------------------------


def test_a_pool_on_an_allocation_of_its_own(user: User) -> None:
    """It says how it stands in the queue, has the GPUs of two nodes, and releases them; its workers
    are no tasks of Slurm; and the second pool of a process shares the allocation.
    """
    out, err = user.script("""if True:
        from raypool import parpool
        from tasks import seen
        with parpool(3, profile="hpc") as pool:
            print(seen())
            with parpool(1, profile="hpc", quiet=True) as other:
                print(other.parfeval(abs, -1).result(300))
        print(pool.is_closed)
    """)
    lines = out.splitlines()
    nodes = [row[:2] for row in ast.literal_eval(lines[1])]
    assert len(set(nodes)) == 3
    assert {host for host, _ in nodes} == {"n1", "n2"}
    assert [row[2:] for row in ast.literal_eval(lines[1])] == [(None, True)] * 3
    assert lines[2:] == ["1", "True"]
    assert re.search(r"^raypool: Slurm job \d+ is (pending|running)", err)
    until(lambda: user.lab.run("squeue", "-h") == "")


ARRAY = """
from tasks import HERE, train
def run(config):
    if config["x"] == 4 and not (HERE / "mended").exists():
        raise ValueError("not yet")
    return train(config["x"]) if config["x"] in (0, 3) else config["x"]
"""


def test_a_job_array_is_one_run(user: User) -> None:
    """Two tasks, both of which are told to save and go on after a requeue; then the failed item,
    alone; then nothing is left.
    """
    user.write("sweeps.py", ARRAY)
    user.write("many.csv", "x\n" + "\n".join(map(str, range(1100))))
    user.write("few.csv", "x\n0\n1\n2\n3\n4\n")
    words = ("raypool", "sweep", "--run-dir", "run", "--profile", "hpc", "sweeps.py:run")
    _, err = user.run(*words, "many.csv", "--run-dir", "many", "--array", "1", code=1)
    assert "MaxArraySize" in err

    _, err = user.run(*words, "few.csv", "--array", "3")
    [number] = re.findall(r"Slurm job (\d+) for 5 of 5 items", err)
    until(lambda: user.has("running-0", "running-3"))
    _, err = user.run(*words, "few.csv", "--array", "3", code=1)
    assert f"Slurm job {number} has not ended: 2 of its tasks for {user.folder}/run are" in err
    tasks = [f"{number}_{task}" for task in (0, 1)]
    for task in tasks:
        user.run("scancel", "--batch", "--signal=USR1", task)
    for task in tasks:
        restart(user, task)
    until(lambda: user.lab.run("squeue", "-h") == "")
    assert [user.shown(task, "JobState") for task in tasks] == ["COMPLETED", "FAILED"]
    out, _ = user.run("raypool", "show", "run", "--failed", "--json")
    assert [item["error"] for item in json.loads(out)] == ["ValueError: not yet"]

    user.write("mended", "")
    _, err = user.run(*words, "few.csv", "--array")
    assert "for 1 of 5 items" in err
    until(lambda: user.lab.run("squeue", "-h") == "")
    user.run(*words, "few.csv", "--array")
    user.write("look.py", "from raypool import load_results; print(list(load_results('run')))")
    out, _ = user.run("python", "look.py")
    assert ast.literal_eval(out) == [[0, 4], 1, 2, [0, 4], 4]


def test_what_slurm_cannot_give_is_refused_at_once(user: User) -> None:
    """With its own words and a hint; also what it would accept, and let wait forever."""
    for words, hint in (
        ("parpool(profile='unknown')", "Invalid partition name specified. Did you mean low?"),
        ("parpool(profile='full')", "Requested node configuration is not available."),
        ("parpool(5, profile=Profile(slurm=Slurm(nodes=2, gpus_per_node=2)))", "5 workers need 5"),
    ):
        _, err = user.script(f"from raypool import Profile, Slurm, parpool; {words}", code=1)
        assert hint in err.splitlines()[-1]
    assert user.lab.run("squeue", "-h") == ""


def test_a_full_queue_is_waited_for_until_ctrl_c(user: User) -> None:
    user.run("sbatch", "-N2", "--exclusive", "--wrap=sleep 1000")
    user.write("script.py", "from raypool import parpool; parpool(1, profile='hpc')")
    process = user.start("python", "script.py")
    assert process.stderr is not None
    assert "is pending" in process.stderr.readline()
    line = process.stderr.readline()
    assert "is pending: Resources" in line or "is pending: Priority" in line
    user.lab.interrupt(process)
    process.communicate(timeout=UP_S)
    until(lambda: user.lab.run("squeue", "-h", "--name=raypool") == "")


def test_batch_and_jobs(user: User) -> None:
    """A call and a command; their outputs, exit codes and output are known afterwards."""
    out, _ = user.script("""if True:
        import raypool
        from tasks import seen
        job = raypool.batch(seen, pool=3, profile="hpc")
        rows = job.fetch_outputs(1000)
        print(len({row[:2] for row in rows}), job.state, job.exit_code)
        print(raypool.find_job(job.id, profile="hpc").fetch_outputs() == rows)
    """)
    assert out.splitlines() == ["3 finished 0", "True"]
    user.write("ends.py", "import sys; print('here'); sys.exit(int(sys.argv[1]))")
    out, err = user.run("raypool", "submit", "--profile", "hpc", "ends.py", "--", "4", code=4)
    assert "\nhere\n" in out
    job_id = re.search(r"Submitted job (\S+)\.", err)
    assert job_id is not None
    out, _ = user.run("raypool", "job", "status", "--profile", "hpc")
    assert [line.split()[1].strip(",") for line in out.splitlines()] == ["finished", "failed"]


def test_the_page_runs(user: User) -> None:
    """docs/slurm.md: its profile, and its programs; what it prints is what it says."""
    [profile] = [block.code for block in blocks_of("docs/slurm.md", "toml")]
    user.write("raypool.toml", profile + 'folder = "jobs"\nstart_timeout_s = 300\n')
    first, second = [block.code for block in blocks_of("docs/slurm.md", "python")]
    out, _ = user.script(first)
    assert re.search(r"^raypool: 3 workers on n\d: GPU 0.*; n\d: GPU 0.*, ready in", out)
    assert "0.01" in out.splitlines()[1]
    out, _ = user.script(second)
    assert out.splitlines()[1] == "[(0, 1000), (1, 1000), (2, 1000), (3, 1000)]"


# --- in a job -------------------------------------------------------------------------------------


def test_a_script_of_a_plain_job_uses_all_its_nodes(user: User) -> None:
    script = """if True:
        from raypool import parpool
        from tasks import seen
        with parpool(quiet=True):
            print(seen())
    """
    options = ("-N2", "--gpus-per-node=2", "--export=LR=0.1,PATH")  # sites have this in templates
    out = user.run_plain("python job.py", script, *options)
    rows = [row[:2] for row in ast.literal_eval(out)]
    assert rows == [("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")]


def test_ctrl_c_and_forked_processes_of_a_script_leave_ray_alone(user: User) -> None:
    """Ctrl-C goes to the script's whole process group; a forked process has the script's pipes."""
    script = """if True:
        import multiprocessing, os, signal
        from raypool import parpool
        from tasks import HERE, finish
        with parpool(quiet=True) as pool:
            future = pool.parfeval(finish, 7)
            try:
                os.killpg(os.getpgrp(), signal.SIGINT)
                signal.pause()
            except KeyboardInterrupt:
                (HERE / "go").touch()
            print(future.result(300), flush=True)
            forked = multiprocessing.get_context("fork").Process(target=signal.pause)
            forked.start()
        print(pool.is_closed)
        forked.kill()
    """
    out = user.run_plain("trap : INT; python job.py", script, "-N2", "--gpus-per-node=2")
    assert out.split() == ["7", "True"]


def test_a_script_that_srun_starts_several_times_is_told(user: User) -> None:
    script = "from raypool import parpool\nwith parpool(1): pass"
    text = "srun --ntasks=2 --overlap python job.py"
    out = user.run_plain(text, script, "-N1", "--ntasks=2")
    assert out.count("srun started this script 2 times") == 1


def test_two_jobs_share_a_node(user: User) -> None:
    """At the same time: each waits for the other, on a GPU of its own."""
    text = """if True:
        import sys, time
        from pathlib import Path
        from raypool import parpool
        from tasks import seen
        with parpool() as pool:
            Path(f"at-{sys.argv[1]}").write_text(str(seen()))
            while not Path("at-0").exists() or not Path("at-1").exists():
                time.sleep(0.1)
    """
    user.write("job.py", text)
    options = ["--profile", "one", "job.py", "--"]
    processes = [user.start("raypool", "submit", *options, str(number)) for number in (0, 1)]
    for process in processes:
        out, err = process.communicate(timeout=UP_S)
        assert process.returncode == 0, out + err
    rows = [ast.literal_eval((user.folder / f"at-{number}").read_text()) for number in (0, 1)]
    assert sorted(row[0][:2] for row in rows) == [("n1", "0"), ("n1", "1")]


# --- a job whose time is nearly over --------------------------------------------------------------

SWEEP = """if True:
    from raypool import parpool
    from tasks import train
    with parpool() as pool:
        print(sorted(pool.parfor(train, range(4), run_dir="run")))
"""

CONTINUED = "[[0, 4], [0, 4], [0, 4], [0, 4]]"
"""Each of four items: it ran twice, and the second time from where it had saved."""


def begin(user: User, *options: str) -> str:
    """Submit a sweep; return its number when all items are in the middle."""
    number = user.submit(SWEEP, *options)
    until(lambda: user.has(*(f"running-{item}" for item in range(4))))
    return number


def restart(user: User, number: str) -> None:
    """Check that a job is put back into the queue, and start it; Slurm lets it wait for two
    minutes.
    """
    until(lambda: user.shown(number, "Restarts") == "1")
    user.wait_for(number, "PENDING")
    # not in the second of its requeue: its nodes would refuse it ("Job credential revoked")
    user.run("scontrol", "update", f"jobid={number}", "StartTime=now+2", "TimeLimit=30")


def assert_continued(user: User, number: str) -> None:
    """Check that a job is put back into the queue and ends well."""
    restart(user, number)
    until(lambda: user.shown(number, "JobState") in ("COMPLETED", "FAILED"))
    assert CONTINUED in user.output(number), user.output(number)


def test_scancel_leaves_nothing(user: User) -> None:
    number = begin(user)
    user.run("scancel", number)
    user.wait_for(number, "CANCELLED")


def test_a_told_job_saves_and_continues_after_its_requeue(user: User) -> None:
    """The signal is Slurm's when the time limit is near; the script ends as soon as all have saved,
    and does not sit out the rest.
    """
    number = begin(user)
    user.run("scancel", "--batch", "--signal=USR1", number)
    until(lambda: "is almost out of time" in user.output(number))
    assert_continued(user, number)
    assert "PoolPreemptedError" in user.output(number)
    assert "its time is over" not in user.output(number)


def test_a_submitted_job_is_followed_through_its_requeue(user: User) -> None:
    user.write("job.py", SWEEP)
    process = user.start("raypool", "submit", "--profile", "both", "--requeue", "job.py")
    until(lambda: user.has(*(f"running-{item}" for item in range(4))))
    [number] = user.lab.run("squeue", "-h", "--format=%i").split()
    user.run("scancel", "--batch", "--signal=USR1", number)
    restart(user, number)
    out, err = process.communicate(timeout=UP_S)
    assert process.returncode == 0, out + err
    assert CONTINUED in out


def test_a_real_time_limit(user: User) -> None:
    """Slurm itself sends the signal, at most a minute too early; the job ends before its limit."""
    number = begin(user)
    hours, minutes, _ = map(int, user.shown(number, "RunTime").split(":"))
    # only now: on a busy machine the start may take any time
    user.run("scontrol", "update", f"jobid={number}", f"TimeLimit={60 * hours + minutes + 4}")
    until(lambda: "is almost out of time" in user.output(number))
    assert_continued(user, number)


def test_preemption(user: User) -> None:
    """Slurm sends TERM to every process of Ray at once; all four items save in the grace time, and
    Ray's own processes do not end.
    """
    number = begin(user)
    user.run("sbatch", "-p", "high", "-N2", "--exclusive", "--wrap=sleep 1")
    until(lambda: user.output(number).count("Slurm is about to take this node back") == 2)
    assert_continued(user, number)


@pytest.fixture(scope="module")
def signaling() -> Iterator[SlurmLab]:
    """Start a Slurm that tells the first process of a job before it preempts the job."""
    yield from slurm("SlurmctldParameters=preempt_send_user_signal")


def test_preemption_with_a_signal(signaling: SlurmLab) -> None:
    user = User(signaling)
    number = begin(user)
    user.run("sbatch", "-p", "high", "-N2", "--exclusive", "--wrap=sleep 1")
    until(lambda: "is almost out of time" in user.output(number))
    assert_continued(user, number)


def test_a_job_without_requeue_says_that_it_was_ended_early(user: User) -> None:
    """By exit code 75, also of a script that does not stop."""
    user.write("job.py", SWEEP)
    process = user.start("raypool", "submit", "--profile", "hpc", "job.py")
    until(lambda: user.has("running-0", "running-1"))
    number = user.lab.run("squeue", "-h", "--name=job", "-o", "%i")
    user.run("scancel", "--batch", "--signal=USR1", number)
    out, err = process.communicate(timeout=UP_S)
    assert process.returncode == 75, out + err


def test_an_allocation_ends_with_a_driver_that_is_killed(user: User) -> None:
    user.write("script.py", "from raypool import parpool; parpool(1, profile='hpc'); input()")
    process = user.start("python", "script.py")
    assert process.stdout is not None
    assert "1 worker" in process.stdout.readline()
    user.lab.interrupt(process, signal.SIGKILL)
    process.communicate(timeout=UP_S)
    until(lambda: user.lab.run("squeue", "-h") == "")


def test_a_node_that_loses_its_power(signaling: SlurmLab) -> None:
    """The pool goes on with the rest, and the job has the exit code of its script."""
    user = User(signaling)  # of a cluster that nobody needs afterwards
    number = user.submit("""if True:
        from pathlib import Path
        from raypool import parpool
        from tasks import finish
        with parpool() as pool:
            print(sorted(pool.parfor(finish, range(6))))
    """)
    until(lambda: user.has(*(f"on-n{host}" for host in (1, 2))))
    assert user.lab.lab is not None
    batch_host = user.shown(number, "BatchHost")
    other = "n2" if batch_host == "n1" else "n1"
    user.lab.lab.kill(other)
    user.write("go", "")
    until(lambda: "ended with exit code 0" in user.output(number))
    assert "[0, 1, 2, 3, 4, 5]" in user.output(number)
