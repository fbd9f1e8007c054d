"""`raypool submit`: from a job's file to machines, to a script that runs on them, and to its exit
code.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from raypool.cli.main import main
from raypool.cluster import begin, launcher, packages
from raypool.cluster.checks import check_file
from raypool.cluster.job_files import Training
from raypool.cluster.jobs import JobInfo, Jobs
from raypool.cluster.training_jobs import Submission, find_script, run_on_own
from raypool.errors import CloudError
from raypool.profiles import Profile
from tests.cloud import fake_gce
from tests.cloud.fake_gce import FakeGce
from tests.cloud.ray_provider import Cluster
from tests.cloud.test_spec import DOCUMENTED
from tests.conftest import Started

DOCUMENTED_OPTIONS = [
    *("--scale-tier", "custom"),
    *(
        "--master-machine-type",
        "n1-highcpu-16",
        "--master-accelerator",
        "count=4,type=nvidia-tesla-t4",
    ),
    *(
        "--worker-count",
        "9",
        "--worker-machine-type",
        "n1-highcpu-16",
        "--worker-accelerator",
        "count=4,type=nvidia-tesla-t4",
    ),
    *("--parameter-server-count", "3", "--parameter-server-machine-type", "n1-highmem-8"),
]
"""The same job, in options."""

HERE = ["--region", "us-central1", "--project", fake_gce.PROJECT]
OUT = ["--out", "train-cluster.yaml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the documented file, a script and a package."""
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    (work / "trainer").mkdir(parents=True)
    monkeypatch.chdir(work)
    (work / "config.yaml").write_text(DOCUMENTED)
    (work / "train.py").touch()
    (work / "trainer/task.py").touch()
    return work


def submit(*words: str) -> Result:
    return CliRunner().invoke(main, ["submit", *words], prog_name="raypool")


# --- the cluster's file ---------------------------------------------------------------------------


def test_the_documented_job_gets_thirteen_machines_with_forty_gpus(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Any, providers: None
) -> None:
    done = submit("--config", "config.yaml", *HERE, "--dry-run", *OUT, "train.py")
    assert done.exit_code == 0, done.output
    assert "Wrote train-cluster.yaml: 13 machine(s) with 40 GPU(s) in all." in done.output
    check_file("train-cluster.yaml")

    gce = fake_gce.install(monkeypatch, tmp_path)
    content = yaml.safe_load((folder / "train-cluster.yaml").read_text())
    cluster = Cluster(content)
    (tmp_path / ".ray").mkdir(exist_ok=True)
    (tmp_path / ".ray/auth_token").write_text("secret")
    packages.make_wheel()
    cluster.up(folder / "train-cluster.yaml", shell)
    for name, kind in content["available_node_types"].items():
        if name != content["head_node_type"]:
            assert kind["min_workers"] == kind["max_workers"], (
                "Ray makes all of them at once, and keeps them"
            )
            cluster.add_workers(name, kind["min_workers"])
    assert_made(gce)


def assert_made(gce: FakeGce) -> None:
    assert len(gce.instances) == 13
    assert gce.gpus == 40
    assert sorted(gce.machine_types()) == ["n1-highcpu-16"] * 10 + ["n1-highmem-8"] * 3


def test_options_alone_say_the_same_as_the_file(folder: Path) -> None:
    assert (
        submit(
            "--config", "config.yaml", *HERE, "--out", "a.yaml", "--dry-run", "train.py"
        ).exit_code
        == 0
    )
    one = yaml.safe_load(Path("a.yaml").read_text())
    Path("a.yaml").unlink()
    assert (
        submit(*DOCUMENTED_OPTIONS, *HERE, "--out", "a.yaml", "--dry-run", "train.py").exit_code
        == 0
    )
    other = yaml.safe_load(Path("a.yaml").read_text())
    assert one == {**other, "cluster_name": one["cluster_name"]}


def test_options_win_over_the_file(folder: Path) -> None:
    options = [
        "--worker-count",
        "2",
        "--worker-accelerator",
        "count=1,type=NVIDIA_TESLA_T4",
        "--spot",
        "--zone",
        "us-central1-b",
    ]
    done = submit("--config", "config.yaml", *HERE, *options, "--dry-run", *OUT, "train.py")
    assert done.exit_code == 0, done.output
    content = yaml.safe_load(Path("train-cluster.yaml").read_text())
    worker = content["available_node_types"]["worker"]
    assert (worker["max_workers"], worker["resources"]["GPU"]) == (2, 1)
    assert worker["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    assert (
        "provisioningModel"
        not in content["available_node_types"]["head"]["node_config"]["scheduling"]
    ), "the master stays"
    assert content["provider"]["availability_zone"] == "us-central1-b"


def test_machines_know_their_roles(folder: Path) -> None:
    submit("--config", "config.yaml", *HERE, "--dry-run", *OUT, "train.py")
    kinds = yaml.safe_load(Path("train-cluster.yaml").read_text())["available_node_types"].values()
    assert [kind["labels"]["raypool/role"] for kind in kinds] == [
        "head",
        "worker",
        "parameter-server",
    ]


def test_the_file_says_how_it_was_made_but_not_what_is_for_the_script(folder: Path) -> None:
    assert (
        submit(
            "--config",
            "config.yaml",
            *HERE,
            "--dry-run",
            *OUT,
            "train.py",
            "--",
            "--password",
            "hunter2",
        ).exit_code
        == 0
    )
    text = Path("train-cluster.yaml").read_text()
    assert "raypool submit --config config.yaml --region us-central1" in text
    assert "hunter2" not in text


def test_a_project_may_be_filled_in_later_but_not_when_machines_are_made(folder: Path) -> None:
    assert (
        submit(
            "--config", "config.yaml", "--region", "us-east1", "--dry-run", *OUT, "train.py"
        ).exit_code
        == 0
    )
    with pytest.raises(CloudError, match="<your project>"):
        check_file("train-cluster.yaml")
    assert "There is no project to bill" in refused(
        "--config", "config.yaml", "--region", "us-east1", "train.py"
    )


@pytest.mark.parametrize("words", [(), ("--keep",)])
def test_only_a_cluster_that_is_kept_does_not_delete_itself(
    folder: Path, words: tuple[str, ...]
) -> None:
    submit(*FILE, *HERE, *words, "--dry-run", *OUT, "train.py")
    is_watched = "raypool.cluster.idle" in Path("train-cluster.yaml").read_text()
    assert is_watched == (not words)


def test_packages_come_on_top_of_raypool_and_ray(folder: Path) -> None:
    submit("--config", "config.yaml", *HERE, "--package", "timm>=1", "--dry-run", *OUT, "train.py")
    lines = Path("train-cluster.lock.txt").read_text().splitlines()
    assert "timm>=1" in lines
    assert any(line.startswith("torch==") for line in lines)


PASTED = [
    *("my_job", "--package-path", "trainer", "--module-name", "trainer.task"),
    *("--region", "us-central1", "--scale-tier", "custom", "--master-machine-type"),
    *("n1-highcpu-16", "--master-accelerator", "count=4,type=nvidia-tesla-t4"),
    *("--runtime-version", "2.1", "--python-version", "3.7", "--project", fake_gce.PROJECT),
]
"""What stood behind `gcloud ai-platform jobs submit training`."""


def test_a_line_for_gcloud_can_be_pasted(folder: Path) -> None:
    done = submit(*PASTED, "--dry-run", "--", "--epochs", "3")
    assert done.exit_code == 0, done.output
    assert len(list(folder.glob("my-job-*.yaml"))) == 1
    assert "runtimeVersion is not used: machines get the versions installed" in done.output
    assert "pythonVersion is not used" in done.output


OLD_MACHINES = [
    "{scaleTier: BASIC_GPU}",
    (
        "{scaleTier: CUSTOM, masterType: complex_model_l_gpu, workerType: standard_gpu,"
        " workerCount: 2, parameterServerType: large_model, parameterServerCount: 1}"
    ),
    (
        "{scaleTier: CUSTOM, masterType: n1-standard-4, workerType: n1-standard-8, workerCount: 1,"
        " masterConfig: {acceleratorConfig: {count: 2, type: NVIDIA_TESLA_K80}},"
        " workerConfig: {acceleratorConfig: {count: 1, type: NVIDIA_TESLA_P100}}}"
    ),
]


@pytest.mark.parametrize("text", OLD_MACHINES)
def test_the_advice_for_machines_that_are_gone_works_as_it_is(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(f"trainingInput: {text}")
    why = refused("--config", "config.yaml", *HERE, "--dry-run", *OUT, "train.py")
    assert "K80 GPUs have not been available since" in why
    advice = shlex.split(why.partition("Options override the file: ")[2])
    done = submit("--config", "config.yaml", *HERE, *advice, "--dry-run", *OUT, "train.py")
    assert done.exit_code == 0, done.output
    check_file("train-cluster.yaml")


def test_a_container_runs_on_all_machines_with_its_own_packages(folder: Path) -> None:
    image = "us-docker.pkg.dev/p/r/train:1"
    config = (
        f"trainingInput: {{scaleTier: CUSTOM, masterType: n1-standard-4, workerType: n1-standard-8,"
        f" workerCount: 1, masterConfig: {{imageUri: '{image}', containerCommand: [run, fast]}},"
        f" workerConfig: {{imageUri: '{image}'}}}}"
    )
    (folder / "config.yaml").write_text(config)
    done = submit("--config", "config.yaml", *HERE, "--dry-run", *OUT)
    assert done.exit_code == 0, done.output
    check_file("train-cluster.yaml")
    content = yaml.safe_load(Path("train-cluster.yaml").read_text())
    assert content["docker"]["image"] == image
    assert "us-docker.pkg.dev" in content["initialization_commands"][-1]
    assert content["setup_commands"][0].startswith("python -m pip install ")
    lock = Path("train-cluster.lock.txt").read_text()
    assert "ray[client,default,train]==" in lock
    assert "torch" not in lock, "the image has its own"
    (folder / "config.yaml").write_text(config.replace(", containerCommand: [run, fast]", ""))
    assert "for an image, its containerCommand" in refused(
        "--config", "config.yaml", *HERE, "--dry-run"
    )


# --- what is refused ------------------------------------------------------------------------------


def refused(*words: str) -> str:
    """Return what is said where a command is refused, before anything is made."""
    before = sorted(path.name for path in Path.cwd().iterdir())
    done = submit(*words)
    assert done.exit_code == 2, done.output
    assert sorted(path.name for path in Path.cwd().iterdir()) == before
    return done.output


FILE = ("--config", "config.yaml")


CANNOT_WORK: list[tuple[tuple[str, ...], str]] = [
    (
        (*FILE, *HERE, "--worker-accelerator", "count=3,type=nvidia-tesla-t4", "train.py"),
        "--worker-accelerator: n1-highcpu-16",
    ),
    (
        (*FILE, *HERE, "--worker-accelerator", "4xT4", "train.py"),
        "'4xT4' must have the form count=4,type=nvidia-tesla-t4",
    ),
    (
        (*FILE, *HERE, "--worker-count", "-1", "train.py"),
        "--worker-count: workerCount is -1; it must be a whole number, 0 or more",
    ),
    (
        (*FILE, *HERE, "--job-dir", "bucket/run", "train.py"),
        "--job-dir: jobDir is 'bucket/run'; it must be gs://BUCKET/...",
    ),
    (
        (*FILE, *HERE, "--job-dir", "/mnt/run", "train.py"),
        "/mnt/run is on a disk of the cluster, which is deleted with it",
    ),
    (
        (*FILE, *HERE, "--scale-tier", "basic-gpu", "train.py"),
        "workerCount needs scaleTier CUSTOM",
    ),
    (
        (*FILE, *HERE, "--region", "us-central9", "train.py"),
        "No zone of us-central9 is known to have these GPUs",
    ),
    (
        (*FILE, *HERE, "--zone", "us-east1-c", "train.py"),
        "us-east1-c is not in the region us-central1",
    ),
    (
        (*FILE, *HERE, "--project", "p", "train.py"),
        "project_id is 'p'; it must be an ID of 6 to 30 lower-case letters",
    ),
    (
        (*FILE, *HERE, "--project", "p\nq: r", "train.py"),
        r"project_id is 'p\nq: r'; it must be an ID",
    ),
    (
        (*FILE, "--project", "my-project", "train.py"),
        "No region is set",
    ),
    ((*FILE, *HERE), "There is nothing to run. Pass a script"),
    ((*FILE, *HERE, "trian.py"), "There is no file trian.py"),
    ((*FILE, *HERE, "trainer.tusk"), "There is no module trainer.tusk to run in"),
    (
        (*FILE, *HERE, "no-module"),
        "'no-module' must be a file that ends with .py or a module",
    ),
    (
        (*FILE, *HERE, "--package-path", "train.py", "trainer.task"),
        "--package-path train.py is not a folder",
    ),
    (
        (*FILE, *HERE, "--out", "config.yaml", "train.py"),
        "config.yaml already exists, perhaps for a running cluster",
    ),
    (
        (*HERE, "--scale-tier", "basic-gpu", "train.py"),
        (
            "--scale-tier custom --master-machine-type n1-standard-8 --master-accelerator"
            " count=1,type=nvidia-tesla-t4"
        ),
    ),
    (
        ("--project", "p", "train.py"),
        "The command line: scaleTier is missing in trainingInput; it must be CUSTOM",
    ),
    (("--config", "no.yaml", "train.py"), "no.yaml"),
    (("--profile", "nowhere", "train.py"), "There is no profile 'nowhere'"),
]


def test_what_cannot_work_is_refused_before_anything_is_made(folder: Path) -> None:
    wrong = {
        words: said
        for words, right in CANNOT_WORK
        if right not in (said := " ".join(refused(*words).split()))
    }
    assert not wrong


def test_a_file_with_two_documents_is_refused(folder: Path) -> None:
    (folder / "config.yaml").write_text(f"{DOCUMENTED}---\n{DOCUMENTED}")
    assert "config.yaml has 2 YAML documents" in refused(*FILE, *HERE, "train.py")


def test_a_module_of_an_installed_package_is_taken_and_its_name_may_stand_in_the_file(
    folder: Path,
) -> None:
    assert find_script("json.tool").words == ("-m", "json.tool")
    (folder / "config.yaml").write_text(DOCUMENTED + "  pythonModule: trainer.task\n")
    assert submit(*FILE, *HERE, "--dry-run").exit_code == 0
    assert len(list(folder.glob("trainer-task-*.yaml"))) == 1


def test_two_jobs_of_one_script_share_no_cluster(folder: Path) -> None:
    for _ in range(2):
        assert submit(*FILE, *HERE, "--dry-run", "--name", "sweep", "train.py").exit_code == 0
    files = list(folder.glob("sweep-*.yaml"))
    names = {yaml.safe_load(file.read_text())["cluster_name"] for file in files}
    assert names == {file.stem for file in files}
    assert len(names) == 2


def test_a_package_elsewhere_goes_along_with_the_folder_around_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "trainer")
    assert find_script("trainer.task", folder / "trainer").folder == folder
    assert find_script(str(folder / "train.py")).folder == folder


# --- its beginning on the head --------------------------------------------------------------------


def test_machines_are_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begin, "LOOK_S", 0.01)
    counts = iter([1, 1, 2, 3])
    begin.wait_until(3, counts.__next__, timeout_s=10)
    assert capsys.readouterr().out.splitlines() == [
        f"raypool: {number} of 3 machines have joined." for number in (1, 2, 3)
    ]


def test_machines_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin, "LOOK_S", 0.01)
    with pytest.raises(CloudError, match=r"^1 of 3 machines have joined the Ray at"):
        begin.wait_until(3, lambda: 1, timeout_s=0.05)


def test_a_head_that_does_not_answer_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the only machine, and the script does not run."""
    monkeypatch.setattr(begin, "LOOK_S", 0.01)
    monkeypatch.setattr(begin, "MACHINES_TIMEOUT_S", 0.05)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nobody listens there
    with pytest.raises(SystemExit, match=r"Ray did not answer at 127\.0\.0\.1:1 within 0\.05 s"):
        begin.main(["--", "-c", "print('it runs')"])
    assert capsys.readouterr().out == "raypool: 0 of 1 machines have joined.\n"


# --- on a real cluster ----------------------------------------------------------------------------

HEAD = """
import signal, socket
from ray.cluster_utils import Cluster

def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]

def node(**more):  # each with an agent at a port of its own: other tests have theirs at Ray's
    return {"num_cpus": 1, "object_store_memory": 80_000_000, "dashboard_agent_listen_port": free_port(), **more}

cluster = Cluster(initialize_head=True, head_node_args=node(include_dashboard=True, dashboard_port=free_port()))
cluster.add_node(**node(num_gpus=2))
print(cluster.head_node.webui_url.rpartition(":")[2], flush=True)  # somebody else may have had that port by then
signal.pause()
"""

SCRIPT = """
import json, os, sys
import helper
print("it runs with", json.dumps(sys.argv[1:]), helper.WORD)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Profile]:
    """A head with a dashboard, and a node with two GPUs that do not exist."""
    cluster = Started(HEAD, {})
    assert cluster.process.stdout is not None
    try:
        port = cluster.process.stdout.readline().strip()
        assert port, cluster.process.communicate()[1]
        yield Profile(jobs_address=f"http://127.0.0.1:{port}")
    finally:
        cluster.clean_up()


@pytest.fixture
def on_lab(lab: Profile, folder: Path) -> list[str]:
    """Words by which a job goes to the lab."""
    (folder / "raypool.toml").write_text(f'[profiles.lab]\njobs_address = "{lab.jobs_address}"\n')
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("WORD = 'and with what lies beside it'\n")
    return ["--profile", "lab"]


ODD = ["--x", "a b", "--", "$HOME", "'", "", "ü", "-h", "{}"]


def run(*words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after some code of ours."""
    code = f"from raypool.cli.main import main\n{textwrap.dedent(first)}\nmain(prog_name='raypool')"
    return subprocess.run(
        [sys.executable, "-c", code, "submit", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_a_script_on_a_cluster_that_is_there_gets_its_folder_and_its_exit_code_comes_back(
    on_lab: list[str], tmp_path: Path
) -> None:
    done = run(*on_lab, "--job-dir", f"{tmp_path}/out", "train.py", "--", *ODD)
    words = ["--job-dir", f"{tmp_path}/out", *ODD]
    assert f"it runs with {json.dumps(words)} and with what lies beside it" in done.stdout, (
        done.stderr
    )
    assert done.returncode == 7
    assert (tmp_path / "out").is_dir(), "it was tried out"


@pytest.mark.long
def test_a_folder_that_cannot_be_written_to_ends_the_job_before_the_script_begins(
    on_lab: list[str], folder: Path
) -> None:
    done = run(*on_lab, "--job-dir", f"{folder}/train.py/out", "train.py")
    assert done.returncode == 1
    assert "cannot be written to from this machine" in done.stdout, done.stderr
    assert "it runs" not in done.stdout


@pytest.mark.long
def test_machines_that_a_script_leaves_idle_are_named(on_lab: list[str], folder: Path) -> None:
    (folder / "train.py").write_text("print('alone')")
    work = """
        import ray

        @ray.remote(num_gpus=1)
        def one():
            return [1]

        print(ray.get(one.remote()))
    """
    (folder / "work.py").write_text(textwrap.dedent(work))
    machines = ["--scale-tier", "custom", "--master-machine-type", "n1-standard-4"]
    machines += ["--worker-machine-type", "n1-standard-4", "--worker-count", "1"]
    machines += ["--worker-accelerator", "count=1,type=nvidia-tesla-t4", *HERE]
    alone, busy = (run(*on_lab, *machines, script) for script in ("train.py", "work.py"))
    assert "Nothing ran on 1 other machine(s)" in alone.stderr, alone.stderr
    assert "[1]" in busy.stdout, busy.stderr
    assert "Nothing ran on" not in busy.stderr


@pytest.mark.long
def test_a_job_that_wants_more_gpus_than_a_cluster_has_is_refused_at_once(
    on_lab: list[str],
) -> None:
    done = run(*on_lab, *FILE, *HERE, "train.py")
    assert done.returncode == 1
    assert "The job needs 40 GPUs, but the cluster has 2." in done.stderr


# --- a cluster of its own -------------------------------------------------------------------------


class Log(list[str]):
    """What is done, in turn, with a cluster that is the lab's."""

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, profile: Profile) -> None:
        """Let the launcher, which would rent machines, only note what it is to do."""

        @contextmanager
        def tunnel(file: Path) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(profile=profile)

        monkeypatch.setattr(launcher, "up", lambda file: self.append(f"up {file}"))
        monkeypatch.setattr(launcher, "down", lambda file: self.append(f"down {file}"))
        monkeypatch.setattr(launcher, "tunnel", tunnel)


@pytest.fixture
def log() -> Log:
    return Log()


LAUNCHER = """
    import contextlib
    from types import SimpleNamespace
    from raypool.cluster import launcher
    from raypool.profiles import Profile

    launcher.up = lambda file: print("up", file, flush=True)
    launcher.down = lambda file: print("down", file, flush=True)
    lab = SimpleNamespace(profile=Profile(jobs_address={address!r}))
    launcher.tunnel = lambda file: contextlib.nullcontext(lab)
"""
"""Ray's launcher would rent machines; the lab's are there."""


@pytest.mark.long
def test_a_cluster_is_made_for_a_job_whose_script_waits_for_all_machines_and_goes_with_it(
    on_lab: list[str], lab: Profile
) -> None:
    machines = [
        "--master-machine-type",
        "n1-standard-4",
        "--worker-machine-type",
        "n1-standard-4",
        "--worker-count",
        "1",
    ]
    words = ["--scale-tier", "custom", *machines, *HERE, *OUT, "train.py", "--", *ODD]
    done = run(*words, first=LAUNCHER.format(address=lab.jobs_address))
    assert done.returncode == 7, done.stderr
    assert (
        f"raypool: 2 of 2 machines have joined.\nit runs with {json.dumps(ODD)} and with what lies"
        " beside it" in done.stdout
    )
    assert done.stdout.startswith("up train-cluster.yaml\n")
    assert done.stdout.endswith("\ndown train-cluster.yaml\n")


@pytest.fixture
def submission(folder: Path, log: Log) -> Submission:
    training = Training(groups=())
    return Submission(
        name="a",
        training=training,
        script=find_script("train.py"),
        args=(),
        say=log.append,
        show=log.append,
    )


def stop_at(stage: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a job fail at a stage: "jobs", where the cluster is asked for the first time, "hand_in",
    or "follow".
    """

    def fail(*_: object) -> Any:
        raise error

    for each in ("jobs", "hand_in", "follow"):
        answer = "job_1" if each == "hand_in" else 0
        monkeypatch.setattr(
            Submission, each, fail if each == stage else lambda *_, answer=answer: answer
        )


FILE_OF_CLUSTER = Path("a-cluster.yaml")
LEFT = "The cluster keeps running, and costs money, until `raypool cluster down a-cluster.yaml`"


@pytest.mark.parametrize("stage", ["jobs", "hand_in"])
def test_a_cluster_goes_that_has_not_begun_its_job(
    stage: str, submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())
    stop_at(stage, CloudError("no"), monkeypatch)
    with pytest.raises(CloudError, match="no"):
        run_on_own(FILE_OF_CLUSTER, submission, is_kept=False)
    assert log == ["up a-cluster.yaml", "down a-cluster.yaml"]


def test_a_cluster_that_does_not_come_up_in_whole_goes(
    submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())

    def fail(file: Path) -> None:
        raise CloudError("no room")

    monkeypatch.setattr(launcher, "up", fail)
    with pytest.raises(CloudError, match="no room"):
        run_on_own(FILE_OF_CLUSTER, submission, is_kept=False)
    assert log == ["down a-cluster.yaml"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), CloudError("there is no such job", status=404)]
)
def test_a_cluster_stays_whose_job_may_still_be_running(
    error: BaseException, submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())
    stop_at("follow", error, monkeypatch)
    with pytest.raises(type(error)):
        run_on_own(FILE_OF_CLUSTER, submission, is_kept=False)
    first, how, last = log
    assert (first, last) == (
        "up a-cluster.yaml",
        f"{LEFT}, or until it has been unused for 60 minutes.",
    )
    assert "`raypool job logs --profile raypool --follow job_1` shows its output" in how


def test_a_connection_that_is_lost_is_made_again_and_nothing_is_shown_twice(
    submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())
    stop_at("nowhere", CloudError("no"), monkeypatch)
    monkeypatch.setattr("raypool.cluster.training_jobs.RETRY_S", 0.0)
    asked_from = []

    def follow(submission: Submission, jobs: object, job_id: str, seen: int) -> int:
        asked_from.append(seen)
        submission.show("step\n")
        if len(asked_from) < 3:
            raise CloudError("No Ray dashboard answers", status=None)
        return 0

    monkeypatch.setattr(Submission, "follow", follow)
    assert run_on_own(FILE_OF_CLUSTER, submission, is_kept=False) == 0
    assert asked_from == [0, 5, 10]
    assert log.count("step\n") == 3
    assert log[-1] == "down a-cluster.yaml"


def test_an_answer_of_the_cluster_is_no_lost_connection(
    submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())

    def fail(*_: object) -> None:
        raise CloudError("Internal Server Error", status=500)

    def say(text: str) -> None:
        assert "reconnecting" not in text

    jobs = Jobs.__new__(Jobs)  # it would ask for a dashboard
    jobs.dashboard = SimpleNamespace(tail=fail)
    monkeypatch.setattr(Jobs, "look", lambda *_: None)
    monkeypatch.setattr(Submission, "jobs", lambda *_: jobs)
    monkeypatch.setattr(Submission, "hand_in", lambda *_: "job_1")
    with pytest.raises(CloudError, match="can no longer be followed: Internal Server Error"):
        run_on_own(FILE_OF_CLUSTER, replace(submission, say=say), is_kept=False)


def test_a_hint_that_fails_hides_no_exit_status(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of machines that did nothing: Ray's dashboard fails in the end."""
    now = datetime.now(UTC)
    over = JobInfo(
        id="job_1",
        name="job",
        state="finished",
        command="",
        message="",
        exit_code=0,
        submitted_at=now,
        finished_at=now,
        node=None,
        metadata={},
    )

    def fail(*_: object, **__: object) -> None:
        raise CloudError("no answer", status=500)

    monkeypatch.setattr(Jobs, "follow", lambda *_: iter(["it runs"]))
    monkeypatch.setattr(Jobs, "wait", lambda *_: over)
    monkeypatch.setattr(Training, "machines", 2)
    jobs = Jobs.__new__(Jobs)  # it would ask for a dashboard
    jobs.dashboard = SimpleNamespace(get=fail)
    assert submission.follow(jobs, "job_1") == 0


def test_a_cluster_that_does_not_go_away_hides_no_exit_status(
    submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())
    stop_at("nowhere", CloudError("no"), monkeypatch)

    def fail(file: Path) -> None:
        raise CloudError("quota")

    monkeypatch.setattr(launcher, "down", fail)
    with pytest.raises(CloudError, match=r"exit status 0, but the cluster may still exist\. quota"):
        run_on_own(FILE_OF_CLUSTER, submission, is_kept=False)


def test_a_cluster_stays_that_is_to_be_kept(
    submission: Submission, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.stand_in(monkeypatch, Profile())
    stop_at("nowhere", CloudError("no"), monkeypatch)
    assert run_on_own(FILE_OF_CLUSTER, submission, is_kept=True) == 0
    assert log == ["up a-cluster.yaml", f"{LEFT}."]
