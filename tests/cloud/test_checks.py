"""Mistakes planted in files of every kind: each is refused before anything is made, with its line and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool.cli import main
from raypool.cloud import checks, files, nodes
from raypool.cloud.documents import documents_of
from raypool.cloud.drafts import Draft
from raypool.errors import CloudError

GCP = files.text_of(Draft(provider="gcp", project="my-project", gpu="T4", gpus=4).plan(), "raypool", "gcp.yaml")
AWS = files.text_of(Draft(provider="aws", gpu="T4").plan(), "raypool", "aws.yaml")
AWS = AWS.replace("<your image>", "ami-0123456789abcdef0").replace("<your security group>", "sg-0123456789abcdef0")
HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
LOCAL = files.text_of(Draft(provider="on-prem", hosts=HOSTS).plan(), "raypool", "on_prem.yaml")
KUBERNETES = files.text_of(Draft(provider="kubernetes", gpu="T4").plan(), "raypool", "kubernetes.yaml")
TRAINING = """\
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-highcpu-16
  masterConfig:
    acceleratorConfig:
      count: 4
      type: NVIDIA_TESLA_T4
  workerCount: 9
  workerType: n1-highcpu-16
  workerConfig:
    acceleratorConfig: {count: 4, type: NVIDIA_TESLA_T4}
  parameterServerCount: 3
  parameterServerType: n1-highmem-8
"""
TEXTS = {"gcp": GCP, "aws": AWS, "local": LOCAL, "kubernetes": KUBERNETES, "training": TRAINING}


def line_of(text: str, part: str) -> int:
    """Return the line in which a part of a text stands for the first time."""
    assert part in text
    return text[: text.index(part)].count("\n") + 1


def why_refused(text: str) -> str:
    [document] = documents_of(text, "file.yaml")
    with pytest.raises(CloudError) as caught:
        checks.check(document)
    return str(caught.value)


def test_what_is_right_is_taken() -> None:
    for text in TEXTS.values():
        for document in documents_of(text, "file.yaml"):
            checks.check(document)


TOKEN_MOUNT = "file_mounts:\n  ~/.ray/auth_token: ~/.ray/auth_token\n"
HEAD_START = "- " + nodes.head_commands()[1].replace("=3; ", "=3;\n  ")
OPEN_START = "- ray stop; ray start --head --port=6379 --dashboard-host=0.0.0.0 --autoscaling-config=x"
EXPORT = "export RAY_AUTH_MODE=token RAY_health"

# What stands there, what is put there instead, the words by which its line is found, and what is said.
LAUNCHER = {
    "a misspelt name": (
        "max_workers: 4\n\n",
        "max_worker: 4\n\n",
        "max_worker:",
        "no setting 'max_worker'. Did you mean max_w",
    ),
    "a misspelt name in a node type": ("min_workers", "min_worker", "min_worker:", "no setting 'min_worker'. Did you mean min_w"),
    "no provider": ("provider:\n", "providers:\n", "providers:", "no setting 'providers'. Did you mean provider"),
    "an unknown provider": ("type: gcp", "type: gpc", "type: gpc", "no provider 'gpc'. Did you mean gcp"),
    "half a GPU": ("GPU: 4", "GPU: 0.5", "GPU: 0.5", "GPU is 0.5; it must be a whole number"),
    "GPUs below zero": ("GPU: 4", "GPU: -1", "GPU: -1", "GPU is -1; 0 is the least"),
    "more at least than at most": (
        "min_workers: 0\n    max_workers: 4",
        "min_workers: 5\n    max_workers: 4",
        "min_workers: 5",
        "more",
    ),
    "less than none": (
        "min_workers: 0\n    max_workers: 4",
        "min_workers: -2\n    max_workers: 4",
        "min_workers: -2",
        "0 is the least",
    ),
    "all together too few": ("\nmax_workers: 4", "\nmax_workers: -1", "max_workers: -1", "0 is the least"),
    "the sum of the least": (
        "min_workers: 0\n    max_workers: 4",
        "min_workers: 5\n    max_workers: 6",
        "max_workers: 4\n\n",
        "max_workers is 4, and the min_workers of all node types sum up to 5",
    ),
    "a head that is not there": ("head_node_type: head", "head_node_type: haed", "head_node_type: haed", "Did you mean head"),
    "nobody who logs in": ("  ssh_user: ubuntu", "  {}", "auth:", "no ssh_user"),
    "a key that is not there": ("ssh_user: ubuntu", "ssh_user: ubuntu\n  ssh_private_key: /no/key", "/no/key", "no such file"),
    "a key for everybody": (
        "ssh_user: ubuntu",
        "ssh_user: ubuntu\n  ssh_private_key: /etc/hosts",
        "/etc/hosts",
        "chmod 600 /etc/hosts",
    ),
    "a token that is disabled after all": (
        EXPORT,
        EXPORT.replace(" RAY_h", " RAY_AUTH_MODE=disabled RAY_h"),
        "- ulimit",
        "without a token",
    ),
    "a token in a shell of its own": (
        "export RAY_AUTH_MODE=token; ray",
        "ray stop\n- export RAY_AUTH_MODE=token\n- ray",
        "- ray start",
        "into the same command",
    ),
    "a token that comes too late": (
        "export RAY_AUTH_MODE=token; ray start --disable-usage-stats --address=$RAY_HEAD_IP:6379",
        "ray start --address=$RAY_HEAD_IP:6379; echo RAY_AUTH_MODE=token; export RAY_AUTH_MODE=token",
        "- ulimit -n 65536; ray start",
        "without a token",
    ),
    "a token that is not exported": (
        "export RAY_AUTH_MODE=token; ray",
        "RAY_AUTH_MODE=token; ray",
        "- ulimit -n 65536; RAY",
        "without a token",
    ),
    "a token from elsewhere": (": ~/.ray/auth_token", ": ~/no_token", "~/.ray/auth_token:", "no such file or folder"),
    "half a quotation": (
        "- ray stop\n",
        '- "echo \'ray stop"\n',
        '- "echo',
        "no shell can read this command: No closing quotation",
    ),
    "a folder that is not there": (TOKEN_MOUNT, TOKEN_MOUNT + "  /data: ./no-folder\n", "/data:", "no such file or folder"),
    "a command that is no list": (
        "worker_setup_commands: []",
        "worker_setup_commands: ls",
        "worker_setup_commands: ls",
        "a list",
    ),
    "no token": (EXPORT, "export RAY_health", "- ulimit", "without a token"),
    "no token on workers": ("export RAY_AUTH_MODE=token; ray", "ray", "- ulimit -n 65536; ray start", "without a token"),
    "a token that is not copied": (TOKEN_MOUNT, "file_mounts: {}\n", "- ulimit", "none is copied to the machines"),
    "a dashboard for everybody": (
        HEAD_START,
        OPEN_START,
        "- ray stop; ray start --head",
        "the dashboard listens at 0.0.0.0 without a",
    ),
    "no autoscaler": (
        " --autoscaling-config=~/ray_bootstrap_config.yaml",
        "",
        "- ulimit",
        "no worker is ever made",
    ),
    "ports that differ": (
        "$RAY_HEAD_IP:6379",
        "$RAY_HEAD_IP:6380",
        "worker_start_ray_commands",
        "port 6380, and it listens at 6379",
    ),
    "no commands": ("\nsetup_commands:", "\ncluster_synced_files:", "cluster_name", "setup_commands is missing: Ray would take"),
    "something left open": ("my-project", "<your project>", "<your project>", "<your project> is still to be filled in"),
}


ON_GCP = {
    "a name for people": (
        "cluster_name: raypool",
        "cluster_name: My Cluster",
        "My Cluster",
        "lower-case letters, digits and dashes",
    ),
    "a name that is too long": ("cluster_name: raypool", f"cluster_name: {'a' * 36}", "aaa", "35 at most"),
    "a project with a space": ("my-project", "My Project", "My Project", "gcloud projects list"),
    "no zone": ("  availability_zone: us-central1-a\n", "", "provider:", "availability_zone is missing"),
    "a region for a zone": (
        "availability_zone: us-central1-a",
        "availability_zone: us-central1",
        "zone: us-c",
        "no zone; one is named",
    ),
    "a zone of another region": (
        "region: us-central1",
        "region: us-west1",
        "region: us-west1",
        "us-central1-a lies in us-central1",
    ),
    "a setting of others": ("type: gcp", "type: gcp\n  namespace: x", "namespace: x", "no setting 'namespace'"),
    "a node type in capitals": ("  worker:\n", "  Worker:\n", "  Worker:", "lower-case letters"),
    "a machine that there is not": ("n1-standard-16", "n1-standard-12", "n1-standard-12", "There is no machine 'n1-standard-12'"),
    "three T4": (
        "acceleratorCount: 4",
        "acceleratorCount: 3",
        "guestAccelerators",
        "n1-standard-16 cannot have 3 T4, but 1, 2 or 4",
    ),
    "a GPU that there is not": ("nvidia-tesla-t4", "nvidia-tesla-t5", "nvidia-tesla-t5", "There is no GPU 'nvidia-tesla-t5'"),
    "a GPU that is gone": ("nvidia-tesla-t4", "nvidia-tesla-k80", "nvidia-tesla-k80", "cannot be had any more since"),
    "a GPU by another name": ("acceleratorType: nvidia-tesla-t4", "acceleratorType: T4", "Type: T4", "calls it nvidia-tesla-t4"),
    "no count": ("        acceleratorCount: 4\n", "", "- acceleratorType", "acceleratorCount is missing in guestAccelerators"),
    "a zone without the GPU": (
        "us-central1-a",
        "us-central1-d",
        "availability_zone",
        "us-central1-d has no T4. These have: us-central1-a",
    ),
    "GPUs that Ray is not told of": (
        "GPU: 4",
        "GPU: 2",
        "GPU: 2",
        "told of 2 GPUs, and the machine has 4 T4: it must be `GPU: 4`",
    ),
    "GPUs that are not there": ("CPU: 0\n", "CPU: 0\n      GPU: 1\n", "GPU: 1", "the machine has none"),
    "CPUs that are not there": ("CPU: 16", "CPU: 32", "CPU: 32", "n1-standard-16 has 16 vCPUs"),
    "another label": ("accelerator-type: T4", "accelerator-type: L4", "accelerator-type: L4", "it must be T4"),
    "a list for a mapping": (
        "scheduling:\n        provisioningModel: SPOT\n        instanceTerminationAction: DELETE\n"
        "        onHostMaintenance: TERMINATE\n        automaticRestart: false\n",
        "scheduling:\n      - preemptible: true\n",
        "scheduling:",
        "must be a mapping",
    ),
    "no end at maintenance": ("        onHostMaintenance: TERMINATE\n", "", "scheduling:", "onHostMaintenance: TERMINATE"),
    "a spot machine that restarts": (
        "automaticRestart: false",
        "automaticRestart: true",
        "scheduling:",
        "automaticRestart: false",
    ),
    "a kind of spot": ("Model: SPOT", "Model: SPOTS", "Model: SPOTS", "Did you mean SPOT"),
    "a misspelt setting": ("guestAccelerators", "guestAccelerator", "guestAccelerator:", "Did you mean guestAccelerators"),
    "a misspelt setting of a disk": ("autoDelete", "autodelete", "autodelete:", "Did you mean autoDelete"),
    "a disk elsewhere": ("zones/us-central1-a", "zones/us-central1-b", "diskType", "the disk is to be in us-central1-b"),
    "a disk without its zone": (
        "zones/us-central1-a/diskTypes/pd-balanced",
        "pd-ssd",
        "pd-ssd",
        "zones/us-central1-a/diskTypes/pd-ssd",
    ),
    "no disk to boot from": ("boot: true", "boot: false", "disks:", "must have `boot: true`"),
    "no image": ("sourceImage:", "image:", "- boot", "no sourceImage"),
    "no machine": ("      machineType: n2-standard-4\n", "", "node_config:", "machineType is missing"),
}


ON_AWS = {
    "SSH for everybody": (
        "      SecurityGroupIds:\n      - sg-0123456789abcdef0\n",
        "",
        "node_config:",
        "SSH to the whole internet",
    ),
    "rules that Ray widens": (
        "type: aws",
        "type: aws\n  security_group: {GroupName: x}",
        "security_group",
        "opens SSH to the whole",
    ),
    "a machine that there is not": ("g4dn.xlarge", "g4dn.xxlarge", "g4dn.xxlarge", "There is no machine 'g4dn.xxlarge'"),
    "GPUs that are not there": ("GPU: 1", "GPU: 4", "GPU: 4", "told of 4 GPUs, and the machine has 1 T4"),
    "no image": ("      ImageId: ami-0123456789abcdef0\n", "", "node_config:", "ImageId is missing"),
    "a name for an ID": ("- sg-0123456789abcdef0", "- my-group", "- my-group", "no ID of a security group"),
    "a market that there is not": (
        "MarketType: spot",
        "MarketType: cheap",
        "InstanceMarketOptions",
        "it must be `MarketType: spot`",
    ),
    "a zone of another region": ("us-west-2a", "us-east-1a", "availability_zone", "not in the region, which is us-west-2"),
    "a misspelt setting": ("InstanceType", "instanceType", "instanceType", "Did you mean InstanceType"),
    "nobody who logs in": ("  ssh_user: ubuntu", "  {}", "auth:", "no ssh_user"),
}


ON_PREMISES = {
    "no head": ("  head_ip: 10.0.0.1\n", "", "provider:", "head_ip is missing"),
    "no list": ("  worker_ips:\n  - 10.0.0.2\n  - 10.0.0.3\n", "", "provider:", "worker_ips is missing"),
    "no address": ("- 10.0.0.2", "- 10.0.0.256", "10.0.0.256", "neither an address, such as 10.0.0.7, nor the name"),
    "a machine twice": ("- 10.0.0.3", "- 10.0.0.2", "- 10.0.0.2\n\n", "second time"),
    "the loopback": ("head_ip: 10.0.0.1", "head_ip: 127.0.0.1", "head_ip", "as the others see it"),
    "too many": ("max_workers: 2", "max_workers: 3", "max_workers: 3", "worker_ips names 2: that many at most"),
    "too few": ("max_workers: 2", "max_workers: 1", "max_workers: 1", "the others would never be used"),
    "node types": ("\nauth:", "\nhead_node_type: head\nauth:", "head_node_type", "machines that are made"),
    "the autoscaler that leaves one out": ("RAY_enable_autoscaler_v2=0 ", "", "head_start", "RAY_enable_autoscaler_v2=0"),
    "a setting of others": ("type: local", "type: local\n  region: x", "region: x", "no setting 'region'"),
}

OF_TRAINING = {
    "a misspelt name": ("workerCount", "workersCount", "workersCount", "workerCount"),
    "three T4": ("      count: 4\n", "      count: 3\n", "acceleratorConfig", "3 T4"),
    "half a worker": ("workerCount: 9", "workerCount: 1.5", "workerCount: 1.5", "1.5"),
    "a tier that there is not": ("CUSTOM", "CUSTM", "CUSTM", "CUSTOM"),
    "a machine that there is not": ("n1-highmem-8", "n1-highmem-9", "n1-highmem-9", "n1-highmem-8"),
}


ON_KUBERNETES = {
    "a misspelt name": ("maxReplicas", "maxReplica", "maxReplica:", "maxReplicas"),
    "more at least than at most": ("minReplicas: 0", "minReplicas: 9", "maxReplicas", "minReplicas is 9 and maxReplicas 4"),
    "half a GPU": ("nvidia.com/gpu: '1'", "nvidia.com/gpu: '0.5'", "nvidia.com/gpu: '0.5'", "0.5"),
    "something left open": ("name: raypool", "name: <your name>", "name: <your name>", "still to be filled in"),
}


PLANTED = [
    ("gcp", LAUNCHER),
    ("gcp", ON_GCP),
    ("aws", ON_AWS),
    ("local", ON_PREMISES),
    ("training", OF_TRAINING),
    ("kubernetes", ON_KUBERNETES),
]


@pytest.mark.parametrize(("kind", "mistakes"), PLANTED)
def test_a_mistake_is_refused_with_its_line_and_what_would_be_right(
    kind: str, mistakes: dict[str, tuple[str, str, str, str]]
) -> None:
    wrong = {}
    for name, (old, new, part, said) in mistakes.items():
        assert old in TEXTS[kind], "the mistake is planted somewhere"
        text = TEXTS[kind].replace(old, new)
        why = why_refused(text)
        if not any(said in each and f"file.yaml, line {line_of(text, part)}: " in each for each in why.splitlines()):
            wrong[name] = why
    assert not wrong


def test_all_mistakes_are_told_at_once_in_the_order_of_lines() -> None:
    text = GCP.replace("n2-standard-4", "n2-standard-5").replace("CPU: 16", "CPU: 32").replace("zones/us-central1-a", "zones/a")
    lines = [int(each.split("line ")[1].split(":")[0]) for each in why_refused(text).splitlines()]
    assert len(lines) >= 4
    assert lines == sorted(lines)


NO_CLUSTERS = [
    ("", "there is nothing in it"),
    ("# only a comment\n", "there is nothing in it"),
    ("- a\n- b\n", "line 1: a mapping is wanted"),
    ("something: else\n", "what this is cannot be seen"),
    ("provider: {type: gcp}\n  auth: x\n", "this is not YAML"),
    ("provider: [gcp]\ncluster_name: x\n", "line 1: provider is ['gcp']; it must be a mapping"),
    ("provider:\ncluster_name: x\n", "line 1: provider is empty; it must be a mapping"),
    ("cluster_name: x\n", "provider is missing"),
    ("cluster_name: x\nprovider: {type: gcp}\navailable_node_types: {a: }\n", "line 3: a is empty"),
]


def test_what_is_no_file_of_a_cluster_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    for text, said in NO_CLUSTERS:
        file.write_text(text)
        with pytest.raises(CloudError, match=r"file\.yaml") as caught:
            checks.check_file(file)
        assert said in str(caught.value)


def test_ray_is_asked_too_and_its_raw_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    text = GCP + "docker: {image: 'rayproject/ray:2.60.0'}\n"
    assert "Ray refuses this file" in why_refused(text)


def test_a_secret_may_stand_beside_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: x}\n---\n" + KUBERNETES)
    checks.check_file(tmp_path / "file.yaml")


def test_the_command_says_which_file_and_ends_with_2(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GCP)
    bad.write_text(GCP.replace("GPU: 4", "GPU: 0.5"))
    done = CliRunner().invoke(main, ["cluster", "validate", str(good), str(bad)])
    assert done.exit_code == 2
    assert f"{good}: nothing is wrong with it." in done.stdout
    assert "GPU is 0.5" in done.stderr
    assert CliRunner().invoke(main, ["cluster", "validate", str(good)]).exit_code == 0
