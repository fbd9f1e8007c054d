"""Pools and jobs with pretended commands of Slurm, which fail, time out, and serve two clusters."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool import CloudError, InvalidValueError, Profile, Slurm, WorkerResources, batch
from raypool.cli.main import main
from raypool.cluster import slurm, slurm_job
from raypool.cluster.slurm import allocation_for, size_of
from raypool.cluster.slurm_job import CONNECTION, STATUS, deadline
from raypool.cluster.slurm_jobs import SlurmJobs

SBATCH = """
echo "$*" >>submitted
case "$*" in *--parsable*) echo "7;$CLUSTER" ;; esac
"""

TIMES_OUT = "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1"

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CLUSTER", "")
    monkeypatch.setattr(slurm, "LOOK_S", 0.0)
    for name in ("SLURM_JOB_ID", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    command("sbatch", SBATCH)
    return tmp_path


def command(name: str, script: str) -> None:
    """Make a command of Slurm; its script has the number of calls in $calls."""
    file = Path(name)
    count = f"calls=$(($(cat {name}.calls 2>/dev/null || echo 0) + 1)); echo $calls >{name}.calls"
    file.write_text(f'#!/bin/sh\ncd {Path.cwd()}\n{count}\necho "$*" >>{name}.log\n{script}\n')
    file.chmod(0o755)


def calls(name: str) -> list[str]:
    file = Path(f"{name}.log")
    return file.read_text().splitlines() if file.exists() else []


def profile(**fields: object) -> Profile:
    return Profile(slurm=Slurm(folder="jobs"), quiet=True, **fields)  # type: ignore[arg-type]


def status(code: int, *, is_cancelled: bool = False) -> str:
    """Return what a job that has ended leaves in its folder."""
    return json.dumps({"exit_code": code, "is_cancelled": is_cancelled, "ended_at": 0.0})


def connects_at(call: int, *, otherwise: str) -> str:
    """Return the script of a squeue at whose call the job has Ray running."""
    connection = json.dumps({"address": "n1:1", "client": "ray://n1:2"})
    return f"""
    if [ $calls -ge {call} ]; then
        for job in jobs/pool_*; do echo '{connection}' >$job/{CONNECTION}; done
        echo 'RUNNING|None|N/A'
    else {otherwise}
    fi
    """


def test_a_pool_waits_on_while_slurm_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """And its job is cancelled, though the first try of that fails, too."""
    command("squeue", connects_at(3, otherwise=TIMES_OUT))
    command("scancel", f"[ $calls -gt 1 ] || {{ {TIMES_OUT}; }}")
    allocation = allocation_for(profile(), (1, 1))
    assert allocation is not None
    assert allocation.address == "ray://n1:2"
    assert len([each for each in caplog.messages if "Socket timed out" in each]) == 1
    allocation.release()
    assert calls("scancel") == ["--batch --signal=TERM 7"] * 2


def test_a_job_that_may_be_left_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "CANCEL_S", 0.0)
    command("squeue", connects_at(1, otherwise=":"))
    command("scancel", TIMES_OUT)
    allocation = allocation_for(profile(), (1, 1))
    assert allocation is not None
    with caplog.at_level(logging.WARNING):
        allocation.release()
    assert "`scancel 7` ends it" in caplog.messages[-1]
    command(
        "scancel", "echo 'scancel: error: Kill job error on job id 7: Invalid job id' >&2; exit 1"
    )
    caplog.clear()
    allocation.release()
    assert caplog.messages == []


def test_a_job_on_another_cluster_is_asked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "other")
    command("squeue", f"echo 'CLUSTER: other'; {connects_at(1, otherwise=':')}")
    command("scancel", "")
    allocation = allocation_for(profile(), (1, 1))
    assert allocation is not None
    allocation.release()
    assert calls("scancel") == ["--batch --signal=TERM --clusters=other 7"]
    assert "--clusters=other --jobs=7" in calls("squeue")[0]


def test_submit_with_dry_run_submits_nothing() -> None:
    Path("train.py").touch()
    done = CliRunner().invoke(main, ["submit", "--slurm", "--dry-run", "train.py"])
    assert done.exit_code == 0, done.output
    assert calls("sbatch") == []


def test_a_requeued_job_has_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code comes from its last run alone."""
    jobs = SlurmJobs(profile(), is_requeued=True)
    job_id = jobs.submit(["python", "train.py"])
    here = folder / "jobs" / job_id
    words = ["--requeue", f"--folder={here}", "--", "python", "train.py"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def runs(job: slurm_job.SlurmJob) -> int:
        assert not (here / STATUS).exists()
        job.is_requeued = is_early
        return slurm_job.PREEMPTED if is_early else 3

    monkeypatch.setattr(slurm_job.SlurmJob, "run", runs)
    is_early = True
    slurm_job.main(words)
    states = []
    for state in ("COMPLETING", "PENDING", "RUNNING"):
        command("squeue", f"echo '{state}|None|N/A'")
        states.append(jobs.look(job_id).state)
    assert states == ["running", "queued", "running"]
    is_early = False
    slurm_job.main(words)
    assert (jobs.look(job_id).state, jobs.look(job_id).exit_code) == ("failed", 3)
    slurm_job.main(words)  # begins without the earlier end


def test_a_job_that_was_cancelled_in_the_queue_is_known_later() -> None:
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    command("squeue", "[ -e scancel.log ] && echo 'CANCELLED|None|N/A' || echo 'PENDING|None|N/A'")
    command("scancel", "")
    assert jobs.stop(job_id).state == "cancelled"
    command("squeue", FORGOTTEN)
    assert jobs.look(job_id).state == "cancelled"


def test_stopping_a_job_fails_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "CANCEL_S", 0.0)
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    command("scancel", TIMES_OUT)
    with pytest.raises(CloudError, match="Socket timed out"):
        jobs.stop(job_id)


def test_output_is_read_up_to_the_last_whole_letter(folder: Path) -> None:
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    output = folder / "jobs" / job_id / "output.log"
    output.write_bytes("läuft ö".encode()[:-1])
    assert jobs.log(job_id) == "läuft "


def test_the_users_format_of_times_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    command(
        "scontrol",
        '[ "$SLURM_TIME_FORMAT" = standard ] && echo "EndTime=2099-01-02T03:04:05" || echo "EndTime=03:04:05"',
    )
    assert deadline("7") == time.mktime((2099, 1, 2, 3, 4, 5, 0, 0, -1)) - slurm_job.SPARE_S


def test_no_variable_counts_before_the_profile_or_hides_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those of the job in which this one is submitted stay with that."""
    for name in (
        *("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_REQUEUE", "SBATCH_QOS", "SBATCH_ACCOUNT"),
        *("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CONF", "SQUEUE_PARTITION"),
    ):
        monkeypatch.setenv(name, "x")
    command("sbatch", f"env >sbatch.env; {SBATCH}")
    command("squeue", "env >squeue.env; echo 'RUNNING|None|N/A'")
    jobs = SlurmJobs(Profile(slurm=Slurm(folder="jobs", partition="low", time=5)))
    assert jobs.look(jobs.submit(["python", "train.py"])).state == "running"
    seen = {line.partition("=")[0] for line in Path("sbatch.env").read_text().splitlines()}
    assert {name for name in seen if name.startswith(("SBATCH", "SLURM"))} == {
        *("SBATCH_QOS", "SBATCH_ACCOUNT"),  # of these the profile says nothing
        *("SLURM_CONF", "SLURM_TIME_FORMAT"),
    }
    assert "SQUEUE" not in Path("squeue.env").read_text()


@pytest.mark.parametrize(
    ("slurm", "each", "workers", "size"),
    [
        ({"nodes": 2}, {"cpus": 2}, 3, (2, 2, 4)),
        ({}, {"cpus": 4}, None, (1, 1, 4)),
        ({"gpus_per_node": 3}, {"gpus": 2}, 3, (3, 3, None)),
        ({"gpus_per_node": 2}, {"gpus": 0.5}, 5, (2, 2, None)),
        ({"gpus_per_node": 1}, {"gpus": 0.334}, 3, (1, 1, None)),
    ],
)
def test_each_worker_fits_on_a_node(
    slurm: dict[str, int],
    each: dict[str, float],
    workers: int | None,
    size: tuple[int, int, int | None],
) -> None:
    wanted = Profile(slurm=Slurm(**slurm), resources=WorkerResources(**each))
    assert size_of(wanted, workers, workers) == size


def test_a_worker_that_fits_on_no_node_is_refused() -> None:
    """Before a folder is made for its job."""
    slurm = Slurm(gpus_per_node=2, folder="jobs")
    wanted = Profile(slurm=slurm, resources=WorkerResources(gpus=4))
    with pytest.raises(InvalidValueError, match="needs 4 GPUs of one node, but gpus_per_node=2"):
        allocation_for(wanted, (1, 1))
    assert not list(Path("jobs").glob("*"))


def test_folders_beside_and_below_an_environment_are_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, below = f"{sys.prefix}-experiments", f"{sys.prefix}/code"
    monkeypatch.setattr(sys, "path", [beside, below, os.path.dirname(pytest.__path__[0])])
    command("squeue", connects_at(1, otherwise=":"))
    assert allocation_for(profile(), (1, 1)) is not None
    [file] = folder.glob("jobs/pool_*/job.sbatch")
    assert f"export PYTHONPATH={beside}:{below}\n" in file.read_text()


# --- what a job's folder says, and what Slurm says ------------------------------------------------


def test_a_job_that_ends_while_slurm_is_asked_has_its_exit_code() -> None:
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    command("squeue", f"echo '{status(3)}' >jobs/{job_id}/{STATUS}; echo 'FAILED|None|N/A'")
    info = jobs.look(job_id)
    assert (info.state, info.exit_code) == ("failed", 3)
    assert jobs.wait(job_id) == info
    assert len(calls("squeue")) == 2


@pytest.mark.parametrize(
    ("by_slurm", "is_cancelled", "state"),
    [("PREEMPTED", True, "cancelled"), ("CANCELLED", False, "failed")],
)
def test_the_state_of_a_job_stays_the_same_when_slurm_forgets_it(
    by_slurm: str, is_cancelled: bool, state: str
) -> None:
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    Path("jobs", job_id, STATUS).write_text(status(1, is_cancelled=is_cancelled))
    for answer in (f"echo '{by_slurm}|None|N/A'", FORGOTTEN):
        command("squeue", answer)
        assert jobs.look(job_id).state == state


def test_a_preempted_job_that_is_queued_again_was_not_cancelled() -> None:
    """It is told to end like a cancelled one, and Slurm knows better a moment later."""
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["python", "train.py"])
    Path("jobs", job_id, STATUS).write_text(status(143, is_cancelled=True))
    for by_slurm, state in (("COMPLETING", "running"), ("PENDING", "queued")):
        command("squeue", f"echo '{by_slurm}|None|N/A'")
        assert jobs.look(job_id).state == state


def test_all_jobs_of_a_cluster_are_asked_for_at_once() -> None:
    """Also those that Slurm has forgotten."""
    jobs = SlurmJobs(profile())
    for number in ("2", "2;other", "1"):
        command("sbatch", f"echo '{number}'")
        jobs.submit(["python", "train.py"])
    other = "echo 'CLUSTER: other'; echo '2|PENDING|Priority|N/A'"
    command(
        "squeue",
        f"case $* in *--clusters=other*) {other} ;; *) echo '2|RUNNING|None|N/A' ;; esac",
    )
    assert [info.state for info in jobs.all()] == ["running", "queued", "failed"]
    assert len(calls("squeue")) == 2


# --- what is refused, and what is left ------------------------------------------------------------


def test_a_working_dir_that_is_no_folder_is_refused() -> None:
    jobs = SlurmJobs(profile(working_dir="missing"))
    with pytest.raises(InvalidValueError, match=r"working_dir='.*/missing' is not a folder"):
        jobs.submit(["python", "train.py"])
    assert calls("sbatch") == []


def test_an_option_that_does_not_exist_is_no_part_of_the_command() -> None:
    words = ["job", "submit", "--slurm", "--nowait", "--", "python", "train.py"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "Did you mean '--no-wait'" in done.output) == (2, True), done.output
    assert calls("sbatch") == []


def test_what_is_printed_at_ctrl_c_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("raypool.toml").write_text('[profiles.hpc]\nkind = "slurm"\nfolder = "jobs"\n')

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SlurmJobs, "follow", interrupt)
    done = CliRunner().invoke(main, ["job", "submit", "--profile", "hpc", "true", "--slurm"])
    assert done.exit_code == 130
    assert "`raypool job logs --follow --profile hpc raypool_" in done.output
    [file] = Path("jobs").glob("*/job.sbatch")
    assert file.read_text().splitlines()[-1].endswith("-- true --slurm")


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_folder_may_be_a_link_of_the_users(folder: Path, *, is_ours: bool) -> None:
    (folder / "disk").mkdir()
    Path("jobs").symlink_to(folder / "disk")
    if not is_ours:
        os.chown("jobs", 12345, -1, follow_symlinks=False)
        with pytest.raises(CloudError, match="it is a link, and others could change its contents"):
            SlurmJobs(profile()).submit(["true"])
        return
    job_id = SlurmJobs(profile()).submit(["true"])
    assert (folder / "disk" / job_id).is_dir()


def test_packages_are_refused_for_a_job() -> None:
    """Nothing would install them."""
    Path("raypool.toml").write_text('[profiles.hpc]\nkind = "slurm"\nfolder = "jobs"\n')
    Path("train.py").touch()
    with pytest.raises(InvalidValueError, match="install timm there"):
        batch(abs, -1, profile=profile(packages=["timm"]))
    options = ["--profile", "hpc", "--package", "timm"]
    for words in (["submit", *options, "train.py"], ["job", "submit", *options, "--", "true"]):
        done = CliRunner().invoke(main, words)
        assert (done.exit_code, "install timm there" in done.output) == (2, True), done.output
    assert calls("sbatch") == []


def test_ctrl_c_while_a_job_is_submitted_leaves_no_folder() -> None:
    """Without it, a job that was accepted nevertheless ends."""
    command("sbatch", "kill -INT $PPID")
    jobs = SlurmJobs(profile())
    for submit in (
        lambda: allocation_for(profile(), (1, 1)),
        lambda: jobs.submit(["python", "train.py"]),
    ):
        with pytest.raises(KeyboardInterrupt):
            submit()
        assert list(Path("jobs").iterdir()) == []


# --- in a job -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o644, 126)])
def test_a_command_that_cannot_be_run_has_the_exit_code_of_shells(
    mode: int | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if mode is not None:
        Path("run.sh").touch(mode)
    jobs = SlurmJobs(profile())
    job_id = jobs.submit(["./run.sh"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # without Ray
    monkeypatch.setattr(slurm_job.SlurmJob, "run", lambda job: job._run_command(None))
    assert slurm_job.main([f"--folder=jobs/{job_id}", "--", "./run.sh"]) == code
    assert "raypool: ./run.sh cannot be run: " in capsys.readouterr().out
    command("squeue", "echo 'FAILED|NonZeroExitCode|N/A'")
    assert jobs.look(job_id).exit_code == code


NODE = """
case $* in
*"show job"*) echo ' Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=' ;;
*hostnames*) echo n1 ;;
*) echo 'NodeName=n1 NodeAddr=127.0.0.1' ;;
esac
"""


@pytest.mark.parametrize(
    ("variable", "mebibytes"), [("SLURM_MEM_PER_NODE", 1000), ("SLURM_MEM_PER_CPU", 4000)]
)
def test_ray_has_only_the_memory_of_its_job(
    variable: str, mebibytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first process of a job sees how much that is; a node has four cores here."""
    command("scontrol", NODE)
    command("srun", f'echo "${slurm_job.SETUP}" >setup')
    subprocess.run(
        [sys.executable, "-m", "raypool.cluster.slurm_job", "--", "true"],
        env={**os.environ, "SLURM_JOB_ID": "7", variable: "1000"},
        check=False,  # Ray does not start
    )
    setup = slurm_job.RaySetup(*json.loads(Path("setup").read_text()))
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    start = slurm_job._ray_start(setup, "n1", "127.0.0.1", folder)
    sizes = dict(option.split("=") for option in start if "memory=" in option)
    assert set(sizes) == {"--object-store-memory", "--memory"}
    assert sum(map(int, sizes.values())) == mebibytes * 2**20
