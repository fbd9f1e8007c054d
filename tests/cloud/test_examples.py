"""The files that come with raypool are what the generator writes, and what is left to be filled in
is all that they lack.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import checks
from raypool.cluster.cluster_file import render
from raypool.cluster.documents import documents_of, texts
from raypool.errors import CloudError
from tests.cloud import examples

FILLED_IN = {
    "<your project>": "my-project",
    "<your image>": "ami-0123456789abcdef0",
    "<your security group>": "sg-0123456789abcdef0",
    "<address of the head>": "10.0.0.1",
    "<address of a worker>": "10.0.0.2",
    "<address of a zip of your code: https://...>": "https://example.org/code.zip",
    "<address of a wheel of raypool: https://...#sha256=...>": "https://example.org/a.whl#sha256=1a",
}


def test_files_are_what_the_generator_writes() -> None:
    texts = examples.texts()
    there = {name: (examples.ROOT / name).read_text() for name in texts}
    assert there == texts, "python -m tests.cloud.examples writes them anew"


def test_there_are_no_other_files() -> None:
    there = {
        str(path.relative_to(examples.ROOT))
        for path in examples.ROOT.glob("cloud_examples/**/*.yaml")
    }
    assert {*there, "cluster.yaml"} == set(examples.PLANS)


@pytest.mark.parametrize("name", examples.PLANS)
def test_the_command_that_it_names_writes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (examples.ROOT / name).read_text()
    command = re.search(r"^# +raypool (cluster init .*)$", text, re.MULTILINE)
    assert command
    file = Path(name).name
    done = CliRunner().invoke(main, [*shlex.split(command[1]), "--python", "3.11", "--out", file])
    assert done.exit_code == 0, done.output
    assert Path(file).read_text().replace(" --python 3.11", "", 1) == text


@pytest.mark.parametrize("name", examples.PLANS)
def test_nothing_is_wrong_with_it_but_what_is_to_be_filled_in(name: str) -> None:
    text = (examples.ROOT / name).read_text()
    [document] = documents_of(text, name)
    places = [
        document.line_of(keys)
        for keys, value in texts(document.content)
        if re.search("<[a-z]", value)
    ]
    if places:
        with pytest.raises(CloudError) as caught:
            checks.check_file(examples.ROOT / name)
        assert [
            int(line) for line in re.findall(r"line (\d+): .*<[^>]+>", str(caught.value))
        ] == places
        assert len(str(caught.value).splitlines()) == len(places)
    [document] = documents_of(filled_in(text), name)
    checks.check(document)


def filled_in(text: str) -> str:
    for name, value in FILLED_IN.items():
        text = text.replace(name, value)
    return text


def test_cluster_yaml_is_what_it_is_said_to_be() -> None:
    content = yaml.safe_load((examples.ROOT / "cluster.yaml").read_text())
    head, worker = (content["available_node_types"][name] for name in ("head", "worker"))
    assert content["provider"]["type"] == "gcp"
    assert "GPU" not in head["resources"]
    assert "guestAccelerators" not in head["node_config"]
    assert (
        worker["resources"]["GPU"]
        == worker["node_config"]["guestAccelerators"][0]["acceleratorCount"]
        > 0
    )
    assert worker["max_workers"] > worker["min_workers"] == 0
    assert worker["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    head_start, worker_start = (
        "\n".join(content[f"{role}_start_ray_commands"]) for role in ("head", "worker")
    )
    assert "RAY_AUTH_MODE=token" in head_start
    assert "RAY_AUTH_MODE=token" in worker_start
    assert "--dashboard-host=127.0.0.1" in head_start
    assert "RAY_health_check_period_ms=1000" in head_start
    assert "python -m raypool.cluster.preemption --cloud gcp" in worker_start
    assert content["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_what_stands_in_the_header_stays_there() -> None:
    for end in ("\n", "\r", "\r\n", "\x85", "\u2028"):
        text = render({"cluster_name": "lab"}, [f"a{end}cluster_name: other{end}{end}---"])
        assert yaml.safe_load(text) == {"cluster_name": "lab"}


def test_a_file_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("mine")
    done = CliRunner().invoke(main, ["cluster", "init", "--provider", "gcp"])
    assert done.exit_code == 2
    assert "cluster.yaml already exists" in done.stderr
    assert Path("cluster.yaml").read_text() == "mine"
    assert (
        CliRunner().invoke(main, ["cluster", "init", "--provider", "gcp", "--force"]).exit_code == 0
    )
    assert Path("cluster.yaml").read_text() != "mine"


IMPOSSIBLE = [
    ("--provider gcp --gpu T5", "There is no GPU 'T5'"),
    ("--provider gcp --gpu K80", "have not been available since"),
    ("--provider gcp --gpu T4 --gpus 3", "No machine has 3 T4; 1, 2 or 4 are possible."),
    (
        "--provider gcp --machine n1-standard-32 --gpu V100 --gpus 2",
        "n1-standard-32 cannot have 2 V100, only 4 or 8",
    ),
    ("--provider gcp --machine n1-standard-33", "There is no machine 'n1-standard-33'"),
    ("--provider aws --gpu H100 --gpus 3", "No machine has 3 H100"),
    (
        "--provider gcp --zone us-central1-a,us-central1-b",
        "puts all machines of a cluster on Google",
    ),
    ("--provider gcp --fallback --on-demand", "--fallback is for spot machines"),
    (
        "--provider gcp --min 5 --max 4",
        "The minimum number of workers (5) is more than the maximum (4)",
    ),
    ("--provider sky --min 1", "--min cannot be used with --provider sky"),
    (
        "--provider slurm --profile hpc --gpus 4 --max 8",
        "--gpus, --max cannot be used with --profile",
    ),
    ("--provider gcp --job x", "--job cannot be used with --provider gcp"),
    ("--provider gcp --host a", "--host cannot be used with --provider gcp"),
    (
        "--provider on-prem --host a --gpu T4 --max 5 --on-demand",
        "--gpu, --max, --spot cannot be used with --provider on-prem",
    ),
    (
        "--provider kubernetes --project p --machine m",
        "--project, --machine cannot be used with --provider kubernetes",
    ),
    (
        "--provider gcp --out no/such/dir/a.yaml",
        "no/such/dir/a.yaml could not be written: No such file or directory",
    ),
    ("--provider azure", "'azure' is not one of"),
    (
        "--provider gcp --name 'a b; rm -rf /'",
        "cluster_name is 'a b; rm -rf /'; it must begin with a letter",
    ),
    ("--provider aws --name 'a b; rm -rf /'", "cluster_name is 'a b; rm -rf /'"),
    ("--provider on-prem --name 'a b; rm -rf /'", "cluster_name is 'a b; rm -rf /'"),
    ("--provider kubernetes --name 'a b; rm -rf /'", "name is 'a b; rm -rf /'"),
    ("--provider gcp --project 'p\nq: r'", r"project_id is 'p\nq: r'"),
    ("--provider gcp --zone moon", "availability_zone is 'moon'; it must be a zone"),
    ("--provider aws --zone moon", "moon"),
    ("--provider on-prem --host '10.0.0.1 -oProxyCommand=x'", "is not an address"),
    ("--provider on-prem --host -oProxyCommand=x", "is not an address"),
    ("--provider gcp --ssh-user '-l root'", "ssh_user is '-l root'; it must be a user name"),
    ("--provider gcp --ssh-key /no/key", "/no/key, which does not exist"),
    ("--provider gcp --python '3.11; rm -rf /'", "'3.11; rm -rf /' is not a Python version"),
]


def test_what_cannot_be_had_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for words, said in IMPOSSIBLE:
        done = CliRunner().invoke(main, ["cluster", "init", *shlex.split(words)])
        if done.exit_code != 2 or said not in done.stderr or list(tmp_path.iterdir()):
            wrong[words] = done.stderr
    assert not wrong


def test_what_may_not_be_had_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        main, ["cluster", "init", "--provider", "gcp", "--zone", "us-central1-d"]
    )
    assert done.exit_code == 0
    assert done.stderr.startswith(
        "warning: cluster.yaml, line 16: As of 2026-11-22, us-central1-d has no T4 GPUs. Nearby:"
        " us-"
    )
    assert Path("cluster.yaml").exists()


NEWER = [
    ("--provider gcp --zone us-central1-b --gpu RTX-PRO-6000", "g4-standard-48", None),
    (
        "--provider gcp --zone us-central1-b --machine a9-standard-96 --gpu X1 --gpus 8",
        "a9-sta",
        96,
    ),
    (
        "--provider gcp --zone us-central1-b --machine a9-highgpu-2g --gpu T4 --gpus 2",
        "a9-highgpu",
        8,
    ),
    ("--provider aws --zone us-west-2a --machine g99.xlarge --gpu X1 --gpus 1", "g99.xlarge", 4),
]


def test_a_machine_newer_than_the_catalogue_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, machine, cpus in NEWER:
        done = CliRunner().invoke(main, ["cluster", "init", "--force", *words.split()])
        assert done.exit_code == 0, done.output
        text = Path("cluster.yaml").read_text()
        assert machine in text
        if cpus is not None:
            assert "in the catalogue of 2026-" in done.stderr
            worker = yaml.safe_load(text)["available_node_types"]["worker"]
            assert worker["resources"]["CPU"] == cpus
        trusting = CliRunner().invoke(
            main, ["cluster", "init", "--force", "--trust", *words.split()]
        )
        assert "catalogue" not in trusting.stderr


@pytest.mark.parametrize("provider", ["gcp", "aws"])
def test_ray_makes_machines_on_demand_only_while_no_spot_machine_can_be_had(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    monkeypatch.chdir(tmp_path)
    words = ["cluster", "init", "--provider", provider, "--fallback", "--max", "3"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    content = yaml.safe_load(filled_in(Path("cluster.yaml").read_text()))
    assert content["max_workers"] == 3
    assert not checks.check(documents_of(yaml.safe_dump(content), "cluster.yaml")[0])
    configs = AutoscalingConfig(content, skip_content_hash=True).get_node_type_configs()
    gpus = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make({"GPU": 1})] * 2)

    def made(**availability: float) -> dict[str, int]:
        request = SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=configs,
            max_num_nodes=4,
            resource_requests=gpus,
            recoverable_resource_availabilities=availability,
        )
        scheduler = ResourceDemandScheduler(AutoscalerEventLogger(None))
        launched = scheduler.schedule(request).to_launch
        return {each.instance_type: each.count for each in launched if each.instance_type != "head"}

    assert made() == {"worker": 2}
    assert made(worker=0.0) == {"worker-on-demand": 2}


def test_several_zones_are_written_where_ray_tries_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zones = "us-east-1a,us-east-1b"
    done = CliRunner().invoke(main, ["cluster", "init", "--provider", "aws", "--zone", zones])
    assert done.exit_code == 0, done.output
    provider = yaml.safe_load(Path("cluster.yaml").read_text())["provider"]
    assert (provider["region"], provider["availability_zone"]) == ("us-east-1", zones)


def test_code_of_a_job_and_slow_networks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--provider", "kubernetes", "--job", "python a.py", "--working-dir", "gs://b/code.zip"]
    done = CliRunner().invoke(main, ["cluster", "init", *words])
    assert done.exit_code == 0, done.output
    job = yaml.safe_load(Path("cluster.yaml").read_text())
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]) == {"working_dir": "gs://b/code.zip"}
    for words in ("--provider aws --gpu H100 --gpus 8", "--provider gcp --machine a3-highgpu-8g"):
        CliRunner().invoke(main, ["cluster", "init", "--force", *words.split()])
        assert "EFA and GPUDirect are not configured" in Path("cluster.yaml").read_text()
    CliRunner().invoke(main, ["cluster", "init", "--force", "--provider", "gcp"])
    assert "EFA" not in Path("cluster.yaml").read_text()


SMALLEST = [
    ("--provider gcp", "n1-standard-4", 1),
    ("--provider gcp --gpus 4", "n1-standard-16", 4),
    ("--provider gcp --gpu nvidia-l4 --gpus 2", "g2-standard-24", 2),
    ("--provider gcp --machine a2-highgpu-4g", "a2-highgpu-4g", 4),
    ("--provider gcp --gpu H100 --gpus 8", "a3-highgpu-8g", 8),
    ("--provider aws --gpu A10G --gpus 4", "g5.12xlarge", 4),
    ("--provider aws --machine p4d.24xlarge", "p4d.24xlarge", 8),
]


def test_the_smallest_machine_that_does_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, machine, gpus in SMALLEST:
        done = CliRunner().invoke(main, ["cluster", "init", "--force", *words.split()])
        assert done.exit_code == 0, done.output
        worker = yaml.safe_load(Path("cluster.yaml").read_text())["available_node_types"]["worker"]
        config = worker["node_config"]
        assert (
            config.get("machineType") or config["InstanceType"],
            worker["resources"]["GPU"],
        ) == (machine, gpus)
