"""Mistakes planted in files of every kind: each is refused before anything is made, with its line
and what would be right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import aws, checks, cluster_file, gcp, kubernetes, launcher_file, skypilot
from raypool.cluster.documents import documents_of
from raypool.cluster.plan import draft
from raypool.errors import CloudError

GCP = cluster_file.text_of(
    draft("gcp", project="my-project", gpu="T4", gpus=4), "raypool", "gcp.yaml"
)
AWS = cluster_file.text_of(draft("aws", gpu="T4"), "raypool", "aws.yaml")
AWS = AWS.replace("<your image>", "ami-0123456789abcdef0").replace(
    "<your security group>", "sg-0123456789abcdef0"
)
HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
LOCAL = cluster_file.text_of(draft("on-prem", hosts=HOSTS), "raypool", "on_prem.yaml")
KUBERNETES = cluster_file.text_of(
    draft("kubernetes", gpu="T4"), "raypool", "kubernetes.yaml"
).replace(kubernetes.RAYPOOL, "https://example.org/raypool.whl#sha256=1a")
JOB = cluster_file.text_of(
    draft("kubernetes", gpu="T4", job="python train.py"), "raypool", "job.yaml"
)
JOB = JOB.replace(kubernetes.CODE, "https://example.org/code.zip").replace(
    kubernetes.RAYPOOL, "https://example.org/raypool.whl#sha256=1a"
)
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
SKY = cluster_file.text_of(draft("sky", gpu="T4"), "raypool", "sky.yaml")
TEXTS = {
    "sky": SKY,
    "gcp": GCP,
    "aws": AWS,
    "local": LOCAL,
    "kubernetes": KUBERNETES,
    "job": JOB,
    "training": TRAINING,
}


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
HEAD_START = "- " + launcher_file.head_commands()[1].replace("=3; ", "=3;\n  ")
OPEN_START = (
    "- ray stop; ray start --head --port=6379 --dashboard-host=0.0.0.0 --autoscaling-config=x"
)
EXPORT = "export RAY_AUTH_MODE=token RAY_health"

# What stands there, what is put there instead, the words by which its line is found, and what is
# said.
LAUNCHER = {
    "a misspelt name": (
        "max_workers: 4\n\n",
        "max_worker: 4\n\n",
        "max_worker:",
        "no setting 'max_worker'. Did you mean max_w",
    ),
    "a misspelt name in a node type": (
        "min_workers",
        "min_worker",
        "min_worker:",
        "no setting 'min_worker'. Did you mean min_w",
    ),
    "no provider": (
        "provider:\n",
        "providers:\n",
        "providers:",
        "no setting 'providers'. Did you mean provider",
    ),
    "an unknown provider": (
        "type: gcp",
        "type: gpc",
        "type: gpc",
        "no provider 'gpc'. Did you mean gcp",
    ),
    "half a GPU": ("GPU: 4", "GPU: 0.5", "GPU: 0.5", "GPU: 0.5 is not of type 'integer'"),
    "GPUs below zero": ("GPU: 4", "GPU: -1", "GPU: -1", "GPU: -1 is less than the minimum of 0"),
    "more at least than at most": (
        "min_workers: 0\n    max_workers: 4",
        "min_workers: 5\n    max_workers: 4",
        "min_workers: 5",
        "more",
    ),
    "all together too few": (
        "\nmax_workers: 4",
        "\nmax_workers: -1",
        "max_workers: -1",
        "less than the minimum of 0",
    ),
    "nobody who logs in": (
        "  ssh_user: ubuntu",
        "  {}",
        "auth:",
        "ssh_user is missing",
    ),
    "a key that is not there": (
        "ssh_user: ubuntu",
        "ssh_user: ubuntu\n  ssh_private_key: /no/key",
        "/no/key",
        "/no/key, which does not exist",
    ),
    "a key for everybody": (
        "ssh_user: ubuntu",
        "ssh_user: ubuntu\n  ssh_private_key: /etc/hosts",
        "/etc/hosts",
        "chmod 600 /etc/hosts",
    ),
    "a token from elsewhere": (
        ": ~/.ray/auth_token",
        ": ~/no_token",
        "~/.ray/auth_token:",
        "which does not exist here",
    ),
    "a folder that is not there": (
        TOKEN_MOUNT,
        TOKEN_MOUNT + "  /data: ./no-folder\n",
        "/data:",
        "which does not exist here",
    ),
    "a command that is no list": (
        "worker_setup_commands: []",
        "worker_setup_commands: ls",
        "worker_setup_commands: ls",
        "'ls' is not of type 'array'",
    ),
    "a token that is not copied": (
        TOKEN_MOUNT,
        "file_mounts:\n",
        "- ulimit",
        "none is copied to the machines",
    ),
    "no autoscaler": (
        " --autoscaling-config=~/ray_bootstrap_config.yaml",
        "",
        "- ulimit",
        "it never starts a worker",
    ),
    "ports that differ": (
        "$RAY_HEAD_IP:6379",
        "$RAY_HEAD_IP:6380",
        "worker_start_ray_commands",
        "port 6380, but the head listens on port 6379",
    ),
    "raypool from an index": (
        "--reinstall-package raypool",
        "-U raypool>=0.1",
        "--python ~/raypool-venv",
        "anybody who registers the name could run code",
    ),
    "something left open": (
        "my-project",
        "<your project>",
        "<your project>",
        "<your project> must be filled in",
    ),
}


ON_GCP = {
    "a name for people": (
        "cluster_name: raypool",
        "cluster_name: My Cluster",
        "My Cluster",
        "lower-case letters, digits and dashes",
    ),
    "a name that is too long": (
        "cluster_name: raypool",
        f"cluster_name: {'a' * 36}",
        "aaa",
        "at most 35",
    ),
    "a project with a space": ("my-project", "My Project", "My Project", "gcloud projects list"),
    "no zone": (
        "  availability_zone: us-central1-a\n",
        "",
        "provider:",
        "availability_zone is missing",
    ),
    "a region for a zone": (
        "availability_zone: us-central1-a",
        "availability_zone: us-central1",
        "zone: us-c",
        "must be a zone, such as us-central1-a",
    ),
    "a zone of another region": (
        "region: us-central1",
        "region: us-west1",
        "region: us-west1",
        "zone us-central1-a is in us-central1",
    ),
    "a node type in capitals": ("  worker:\n", "  Worker:\n", "  Worker:", "lower-case letters"),
    "three T4": (
        "acceleratorCount: 4",
        "acceleratorCount: 3",
        "guestAccelerators",
        "n1-standard-16 cannot have 3 T4, only 1, 2 or 4",
    ),
    "a GPU that is gone": (
        "nvidia-tesla-t4",
        "nvidia-tesla-k80",
        "nvidia-tesla-k80",
        "have not been available since",
    ),
    "a GPU by another name": (
        "acceleratorType: nvidia-tesla-t4",
        "acceleratorType: T4",
        "Type: T4",
        "Compute Engine's name is nvidia-tesla-t4",
    ),
    "no count": (
        "        acceleratorCount: 4\n",
        "",
        "- acceleratorType",
        "acceleratorCount is missing",
    ),
    "GPUs that Ray is not told of": (
        "GPU: 4",
        "GPU: 2",
        "GPU: 2",
        "told of 2 GPUs, but the machine has 4 T4: it must be `GPU: 4`",
    ),
    "GPUs that are not there": (
        "CPU: 0\n",
        "CPU: 0\n      GPU: 1\n",
        "GPU: 1",
        "the machine has none",
    ),
    "another label": (
        "accelerator-type: T4",
        "accelerator-type: L4",
        "accelerator-type: L4",
        "it must be T4",
    ),
    "no end at maintenance": (
        "        onHostMaintenance: TERMINATE\n",
        "",
        "scheduling:",
        'need `onHostMaintenance: "TERMINATE"` under scheduling',
    ),
    "a spot machine that restarts": (
        "automaticRestart: false",
        "automaticRestart: true",
        "scheduling:",
        "automaticRestart: false",
    ),
    "a kind of spot": ("Model: SPOT", "Model: SPOTS", "Model: SPOTS", "Did you mean SPOT"),
    "a misspelt setting": (
        "guestAccelerators",
        "guestAccelerator",
        "guestAccelerator:",
        "Did you mean guestAccelerators",
    ),
    "a misspelt setting of a disk": (
        "autoDelete",
        "autodelete",
        "autodelete:",
        "Did you mean autoDelete",
    ),
    "a disk elsewhere": (
        "zones/us-central1-a",
        "zones/us-central1-b",
        "diskType",
        "diskType is in us-central1-b, but the cluster is in us-central1-a",
    ),
    "no machine": (
        "      machineType: n2-standard-4\n",
        "",
        "node_config:",
        "machineType is missing",
    ),
}


DISK = (
    "BlockDeviceMappings:\n      - DeviceName: /dev/sda1\n        Ebs:\n          VolumeSize: 200\n"
    "          VolumeType: gp3\n"
)
GROUP = "      SecurityGroupIds:\n      - sg-0123456789abcdef0\n"

ON_AWS = {
    "a name with more than letters": (
        "name: raypool",
        "name: a b; rm -rf /",
        "cluster_name:",
        "letters, digits and - _ .",
    ),
    "GPUs that are not there": (
        "GPU: 1",
        "GPU: 4",
        "GPU: 4",
        "told of 4 GPUs, but the machine has 1 T4",
    ),
    "the label of another GPU": (
        "accelerator-type: T4",
        "accelerator-type: L4",
        "accelerator-type",
        "it must be T4",
    ),
    "no region": (
        "  region: us-west-2\n",
        "",
        "provider:",
        "region is missing",
    ),
    "a misspelt setting": (
        "InstanceType",
        "instanceType",
        "instanceType",
        "Did you mean InstanceType",
    ),
    "a misspelt setting of a disk's": (
        "VolumeSize",
        "VolumSize",
        "VolumSize",
        "Did you mean VolumeSize",
    ),
    "a size with a unit": (
        "VolumeSize: 200",
        "VolumeSize: 200GB",
        "VolumeSize",
        "VolumeSize, value: 200GB",
    ),
    "a disk that is no list": (
        DISK,
        "BlockDeviceMappings: {DeviceName: x}\n",
        "BlockDevice",
        "valid types: <class 'list'>",
    ),
    "interfaces that are no list": (
        GROUP,
        "      NetworkInterfaces: {SubnetId: subnet-1}\n",
        "NetworkInterfaces",
        "Invalid type for parameter NetworkInterfaces",
    ),
    "a key that Ray would not take": (
        GROUP,
        GROUP + "      KeyName: mine\n",
        "KeyName",
        "so Ray uses its own key",
    ),
}


ON_PREMISES = {
    "no head": ("  head_ip: 10.0.0.1\n", "", "provider:", "head_ip is missing"),
    "no list": (
        "  worker_ips:\n  - 10.0.0.2\n  - 10.0.0.3\n",
        "",
        "provider:",
        "worker_ips is missing",
    ),
    "no address": (
        "- 10.0.0.2",
        "- 10.0.0.256",
        "10.0.0.256",
        "not an address, such as 10.0.0.7, or a host name",
    ),
    "a machine twice": ("- 10.0.0.3", "- 10.0.0.2", "- 10.0.0.2\n\n", "appears twice"),
    "the loopback": (
        "head_ip: 10.0.0.1",
        "head_ip: 127.0.0.1",
        "head_ip",
        "the address that the others see",
    ),
    "too many": (
        "max_workers: 2",
        "max_workers: 3",
        "max_workers: 3",
        "worker_ips has 2: it must not be more",
    ),
    "too few": (
        "max_workers: 2",
        "max_workers: 1",
        "max_workers: 1",
        "the others would remain unused",
    ),
    "node types": (
        "\nauth:",
        "\nhead_node_type: head\nauth:",
        "head_node_type",
        "head_node_type is for rented machines",
    ),
    "a setting of others": (
        "type: local",
        "type: local\n  region: x",
        "region: x",
        "no setting 'region'",
    ),
}

OF_TRAINING = {
    "a misspelt name": ("workerCount", "workersCount", "workersCount", "workerCount"),
    "three T4": ("      count: 4\n", "      count: 3\n", "acceleratorConfig", "3 T4"),
    "half a worker": ("workerCount: 9", "workerCount: 1.5", "workerCount: 1.5", "1.5"),
    "a tier that there is not": ("CUSTOM", "CUSTM", "CUSTM", "CUSTOM"),
}


ON_KUBERNETES = {
    "more at least than at most": (
        "minReplicas: 0",
        "minReplicas: 9",
        "maxReplicas",
        "minReplicas (9) is more than maxReplicas (4)",
    ),
    "GPUs that a pod has not": (
        "rayStartParams: {}",
        "rayStartParams: {num-gpus: '4'}",
        "rayStartParams: {num-gpus",
        "Ray is told of 4 GPUs, but the pod's limits allow 1",
    ),
    "a name for people": (
        "name: raypool",
        "name: My Cluster",
        "name: My Cluster",
        "lower-case letters, digits and -",
    ),
    "something left open": (
        "name: raypool",
        "name: <your name>",
        "name: <your name>",
        "must be filled in",
    ),
}

OF_JOBS = {
    "no command": ("  entrypoint: python train.py\n", "", "spec:", "entrypoint is missing"),
    "code that is on the laptop": (
        "https://example.org/code.zip",
        "./src",
        "runtimeEnvYAML",
        "which pods do not have",
    ),
    "no address yet": (
        "https://example.org/code.zip",
        kubernetes.CODE,
        "runtimeEnvYAML",
        "must be filled in",
    ),
}


PLANTED = [
    ("gcp", LAUNCHER),
    ("gcp", ON_GCP),
    ("aws", ON_AWS),
    ("local", ON_PREMISES),
    ("training", OF_TRAINING),
    ("kubernetes", ON_KUBERNETES),
    ("job", OF_JOBS),
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
        if not any(
            said in each and f"file.yaml, line {line_of(text, part)}: " in each
            for each in why.splitlines()
        ):
            wrong[name] = why
    assert not wrong


OPEN = {
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
        "in the same command",
    ),
    "a token that comes too late": (
        "export RAY_AUTH_MODE=token; ray start --disable-usage-stats --address=$RAY_HEAD_IP:6379",
        (
            "ray start --address=$RAY_HEAD_IP:6379; echo RAY_AUTH_MODE=token; export"
            " RAY_AUTH_MODE=token"
        ),
        "- ulimit -n 65536; ray start",
        "without a token",
    ),
    "a token that is not exported": (
        "export RAY_AUTH_MODE=token; ray",
        "RAY_AUTH_MODE=token; ray",
        "- ulimit -n 65536; RAY",
        "without a token",
    ),
    "no token": (EXPORT, "export RAY_health", "- ulimit", "without a token"),
    "no token on workers": (
        "export RAY_AUTH_MODE=token; ray",
        "ray",
        "- ulimit -n 65536; ray start",
        "without a token",
    ),
    "a dashboard for everybody": (
        HEAD_START,
        OPEN_START,
        "- ray stop; ray start --head",
        "without a token",
    ),
    "no commands": (
        "\nsetup_commands:",
        "\ncluster_synced_files:",
        "cluster_name",
        "setup_commands is missing, so Ray uses its defaults",
    ),
    "a dashboard that listens to all": (
        "--dashboard-host=127.0.0.1",
        "--dashboard-host=0.0.0.0",
        "- ulimit",
        "is open to the network",
    ),
}
OPEN_ON_GCP = {
    "a list for a mapping": (
        (
            "scheduling:\n        provisioningModel: SPOT\n        instanceTerminationAction:"
            " DELETE\n        onHostMaintenance: TERMINATE\n        automaticRestart: false\n"
        ),
        "scheduling:\n      - preemptible: true\n",
        "scheduling:",
        "without the dash",
    ),
}
OPEN_ON_PREMISES = {
    "the autoscaler that leaves one out": (
        "RAY_enable_autoscaler_v2=0 ",
        "",
        "head_start",
        "RAY_enable_autoscaler_v2=0",
    ),
}
OPEN_ON_AWS = {
    "SSH for everybody": (GROUP, "", "node_config:", "SSH to the whole internet"),
    "rules that Ray widens": (
        "type: aws",
        "type: aws\n  security_group: {GroupName: x}",
        "security_group",
        "opens SSH to the whole",
    ),
    "no image": (
        "      ImageId: ami-0123456789abcdef0\n",
        "",
        "node_config:",
        "ImageId is missing",
    ),
    "an image of Ray's": (
        "ami-0123456789abcdef0",
        "latest_dlami",
        "node_config:",
        "Ubuntu 18.04 from 2022",
    ),
}


@pytest.mark.parametrize(
    ("kind", "doubts"),
    [("gcp", OPEN | OPEN_ON_GCP), ("aws", OPEN_ON_AWS), ("local", OPEN_ON_PREMISES)],
)
def test_what_works_and_is_open_or_odd_is_warned_of_with_its_line(
    kind: str, doubts: dict[str, tuple[str, str, str, str]]
) -> None:
    """Ray's own examples are such files."""
    wrong = {}
    for name, (old, new, part, said) in doubts.items():
        assert old in TEXTS[kind], "the doubt is planted somewhere"
        text = TEXTS[kind].replace(old, new)
        [document] = documents_of(text, "file.yaml")
        warnings = checks.check(document)
        if not any(said in each and f", line {line_of(text, part)}: " in each for each in warnings):
            wrong[name] = warnings
    assert not wrong


# What stands there, what is put there instead, the words by which its line is found, and what is
# said.
DATED = [
    (
        "sky",
        "T4: 1",
        "V100: 1",
        "setup: |",
        "the newest torch has no kernels for V100 GPUs. Use --torch-backend=cu126",
    ),
    (
        "gcp",
        "n1-standard-16",
        "a4x-highgpu-4g",
        "a4x-highgpu-4g",
        "There is no machine 'a4x-highgpu-4g' in the catalogue of 2026-",
    ),
    (
        "gcp",
        "nvidia-tesla-t4",
        "nvidia-t5",
        "nvidia-t5",
        "There is no GPU 'nvidia-t5' in the catalogue of 2026-",
    ),
    (
        "gcp",
        "us-central1",
        "us-east5",
        "zone: us-east5-a",
        "As of 2026-11-22, us-east5-a has no T4 GPUs.",
    ),
    (
        "aws",
        "g4dn.xlarge",
        "g99.xlarge",
        "g99.xlarge",
        "There is no machine 'g99.xlarge' in the catalogue of 2026-",
    ),
    ("aws", "us-west-2", "mx-central-1", "InstanceType: g4dn", "mx-central-1 has no T4 GPUs."),
    ("gcp", "type: gcp", "type: azure", "type: azure", "raypool has no rules for azure"),
    (
        "training",
        "n1-highmem-8",
        "n1-highmem-9",
        "n1-highmem-9",
        "There is no machine 'n1-highmem-9' in the catalogue of 2021-",
    ),
    (
        "training",
        "  scaleTier",
        "  region: us-east5\n  scaleTier",
        "region",
        "As of 2026-11-22, us-east5 has no T4 GPUs.",
    ),
]


def test_what_raypool_does_not_know_is_warned_of_and_not_refused() -> None:
    """A catalogue is of a day, which is said, and machines, GPUs and zones may be newer."""
    wrong = {}
    for kind, old, new, part, said in DATED:
        text = TEXTS[kind].replace(old, new)
        [document] = documents_of(text, "file.yaml")
        warnings = checks.check(document)
        if not any(
            said in each and each.startswith(f"file.yaml, line {line_of(text, part)}: ")
            for each in warnings
        ):
            wrong[new] = warnings
        if kind != "sky" and "azure" not in new:
            assert checks.check(document, trust=True) == ()
    assert not wrong


def test_without_the_clients_of_clouds_it_is_said_that_names_were_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(skypilot, "find_spec", lambda name: None)
    monkeypatch.setattr(aws, "_validator", lambda: None)
    monkeypatch.setattr(gcp, "_schema", lambda: None)
    clients = ((AWS, "boto3"), (GCP, "google-api-python-client"), (SKY, "skypilot"))
    for text, client in clients:
        [document] = documents_of(text, "file.yaml")
        [said] = checks.check(document)
        assert f"{client} is not installed here" in said


def test_all_mistakes_are_told_at_once_in_the_order_of_lines() -> None:
    text = (
        GCP.replace("GPU: 4", "GPU: 3")
        .replace("accelerator-type: T4", "accelerator-type: L4")
        .replace("zones/us-central1-a", "zones/a")
    )
    lines = [int(each.split("line ")[1].split(":")[0]) for each in why_refused(text).splitlines()]
    assert len(lines) >= 4
    assert lines == sorted(lines)


NO_CLUSTERS = [
    ("", "is empty"),
    ("# only a comment\n", "is empty"),
    ("- a\n- b\n", "line 1: this is not a cluster or job"),
    ("something: else\n", "this is not a cluster or job"),
    ("provider: {type: gcp}\n  auth: x\n", "this is not valid YAML"),
    ("provider: [gcp]\ncluster_name: x\n", "line 1: provider: ['gcp'] is not of type 'object'"),
    ("provider:\ncluster_name: x\n", "line 1: provider: None is not of type 'object'"),
    ("cluster_name: x\n", "provider is missing"),
    (
        "cluster_name: x\nprovider: {type: gcp}\navailable_node_types: {a: }\n",
        "line 3: a: None is not of type 'object'",
    ),
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
    (tmp_path / "file.yaml").write_text(
        "apiVersion: v1\nkind: Secret\nmetadata: {name: x}\n---\n" + KUBERNETES
    )
    checks.check_file(tmp_path / "file.yaml")


def test_the_command_says_which_file_and_ends_with_2(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GCP)
    (tmp_path / "gcp.lock.txt").touch()
    bad.write_text(GCP.replace("GPU: 4", "GPU: 0.5"))
    done = CliRunner().invoke(main, ["cluster", "validate", str(good), str(bad)])
    assert done.exit_code == 2
    assert f"{good}: no mistakes found." in done.stdout
    assert "GPU: 0.5 is not of type 'integer'" in done.stderr
    good.write_text(GCP.replace("us-central1", "us-east5"))
    done = CliRunner().invoke(main, ["cluster", "validate", str(good)])
    assert done.exit_code == 0
    assert f"warning: {good}, line 15: As of 2026-11-22, us-east5-a has no T4 GPUs." in done.stderr
