"""Clusters on AWS: Ray's own provider makes what we write, on moto's EC2, and what is wrong with a file is said before."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.loaders import Loader
from moto import mock_aws

from raypool.cloud import aws, aws_checks, launcher_checks
from raypool.cloud.documents import documents_of
from raypool.cloud.machines import catalogue
from raypool.cloud.nodes import default_packages
from raypool.cloud.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

REGION = "us-west-2"
GROUP, IMAGE = "sg-0123456789abcdef0", "ami-0123456789abcdef0"


def a_plan(**changes: Any) -> ClusterPlan:
    groups = (
        NodeGroup(name="worker", machine="g5.12xlarge", gpu="A10G", gpus=4, least=1, most=4, spot=True),
        NodeGroup(name="big", machine="p4d.24xlarge", gpu="A100", gpus=8, most=2),
    )
    fields: dict[str, Any] = {
        "name": "lab",
        "provider": "aws",
        "zone": "us-west-2a",
        "head": NodeGroup(name="head", machine="m6i.xlarge", disk_gb=100),
        "workers": groups,
        "packages": default_packages(),
    }
    return ClusterPlan(**fields | changes)


def filled_in(content: dict[str, Any], group: str = GROUP, image: str = IMAGE) -> dict[str, Any]:
    content = copy.deepcopy(content)
    for node_type in content["available_node_types"].values():
        node_type["node_config"] |= {"SecurityGroupIds": [group], "ImageId": image}
    return content


def with_a_role(content: dict[str, Any]) -> dict[str, Any]:
    """Give the head a role that is there already, so that Ray makes none."""
    content["available_node_types"]["head"]["node_config"]["IamInstanceProfile"] = {"Name": "mine"}
    return content


# --- Ray's provider, on moto's EC2 ---------------------------------------------------------------------------------------


ANSWERS: list[Any] = []


def asked_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """All machines that EC2 has: moto takes seconds to answer, and answers the same in each test."""

    def asked(*args: Any) -> Any:
        if not ANSWERS:
            ANSWERS.append(ask(*args))
        return ANSWERS[0]

    return asked


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, providers: None) -> Iterator[Any]:
    """An EC2 of this test's own, and a home for the keys that Ray makes."""
    from ray.autoscaler._private.aws import config, node_provider, utils

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "pretended")
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config, "time", types.SimpleNamespace(sleep=lambda _: None))  # twice 15 s for Amazon to spread a role
    monkeypatch.setattr(node_provider, "list_ec2_instances", asked_once(node_provider.list_ec2_instances))
    caches = (utils.resource_cache, utils.client_cache, config._get_subnets_or_die)
    with mock_aws():
        for cache in caches:
            cache.cache_clear()
        yield boto3.resource("ec2", region_name=REGION)
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def security_group(ec2: Any) -> Any:
    """A group as the header of the file asks for: its members reach each other, and one address gets in by SSH."""
    [vpc] = [vpc for vpc in ec2.vpcs.all() if vpc.is_default]
    group = ec2.create_security_group(GroupName="mine", Description="mine", VpcId=vpc.id)
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]}
    group.authorize_ingress(IpPermissions=[inside, ssh])
    return group


def an_image(ec2: Any) -> str:
    image: str = next(iter(ec2.images.filter(Owners=["amazon"]))).id
    return image


def write(content: dict[str, Any], tmp_path: Path) -> str:
    (tmp_path / ".ray").mkdir(exist_ok=True)
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def bootstrapped(content: dict[str, Any]) -> dict[str, Any]:
    from ray.autoscaler._private import commands

    config: dict[str, Any] = commands._bootstrap_config(copy.deepcopy(content), no_config_cache=True)
    return config


def start_head(config: dict[str, Any], path: str, shell: Any) -> None:
    from ray.autoscaler._private import commands

    commands.get_or_create_head_node(
        config, path, no_restart=False, restart_only=False, yes=True, override_cluster_name=None, _runner=shell
    )


def open_to_all(ec2: Any) -> list[str]:
    """Which security groups let the whole internet in."""
    everybody = "0.0.0.0/0"
    return [
        group.group_name
        for group in ec2.security_groups.all()
        for rule in group.ip_permissions
        if any(each["CidrIp"] == everybody for each in rule["IpRanges"])
    ]


def described(instance: Any) -> dict[str, Any]:
    client = boto3.client("ec2", region_name=REGION)
    [reservation] = client.describe_instances(InstanceIds=[instance.id])["Reservations"]
    [said] = reservation["Instances"]
    return dict(said)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies that Amazon has made: Ray gives two of them to the head. They take moto seconds."""
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")


@pytest.mark.slow
def test_ray_makes_the_cluster_that_was_planned(
    policies: None, ec2: Any, security_group: Any, shell: Any, tmp_path: Path
) -> None:
    from ray.autoscaler import tags
    from ray.autoscaler._private.providers import _get_node_provider

    content = filled_in(aws.write(a_plan()), security_group.id, an_image(ec2))
    path = write(content, tmp_path)
    launcher_checks.check(documents_of(Path(path).read_text(), path)[0])
    config = bootstrapped(content)

    start_head(config, path, shell)
    [head] = ec2.instances.all()
    assert head.instance_type == "m6i.xlarge"
    assert head.instance_lifecycle is None, "the head is not to be taken back"
    assert head.iam_instance_profile is not None, "it makes the workers"
    assert [group["GroupId"] for group in head.security_groups] == [security_group.id]
    assert described(head)["MetadataOptions"]["HttpTokens"] == "required"
    [volume] = head.volumes.all()
    assert (volume.size, volume.volume_type) == (100, "gp3")
    said = {tag["Key"]: tag["Value"] for tag in head.tags}
    assert said[tags.TAG_RAY_CLUSTER_NAME] == "lab"
    assert said[tags.TAG_RAY_USER_NODE_TYPE] == "head"

    # What is run on it, in this order.
    wanted = ["auth_token", "uv venv", "raypool==", "boto3", "ray stop", "ray start --disable-usage-stats --head"]
    places = [next(number for number, command in enumerate(shell.commands) if word in command) for word in wanted]
    assert places == sorted(places), shell.commands
    start = shell.commands[places[-1]]
    assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in start

    # What the autoscaler on the head makes, by the same provider.
    provider = _get_node_provider(config["provider"], config["cluster_name"])
    for name in ("worker", "big"):
        kind = {
            tags.TAG_RAY_NODE_KIND: "worker",
            tags.TAG_RAY_USER_NODE_TYPE: name,
            tags.TAG_RAY_NODE_NAME: "ray-lab-worker",
            tags.TAG_RAY_NODE_STATUS: "uninitialized",
            tags.TAG_RAY_LAUNCH_CONFIG: "launch",
        }
        provider.create_node(config["available_node_types"][name]["node_config"], kind, 1)
    workers = provider.non_terminated_nodes({tags.TAG_RAY_NODE_KIND: "worker"})
    made = {node.instance_type: node for node in map(provider._get_node, workers)}
    assert set(made) == {"g5.12xlarge", "p4d.24xlarge"}
    assert made["g5.12xlarge"].instance_lifecycle == "spot"
    assert made["p4d.24xlarge"].instance_lifecycle is None
    for worker in made.values():
        assert worker.iam_instance_profile is None, "what runs there cannot make machines"
        assert [group["GroupId"] for group in worker.security_groups] == [security_group.id]
        assert described(worker)["MetadataOptions"]["HttpTokens"] == "required"
    assert not open_to_all(ec2)

    provider.terminate_nodes(provider.non_terminated_nodes({}))
    assert {instance.state["Name"] for instance in ec2.instances.all()} == {"terminated"}, "nothing is only stopped, and costs"


@pytest.mark.slow
def test_ray_finds_no_other_resources_than_we_write(ec2: Any, security_group: Any, tmp_path: Path) -> None:
    """It asks EC2 for what a machine has; of our machines nothing it says is left out or other."""
    content = with_a_role(filled_in(aws.write(a_plan()), security_group.id, an_image(ec2)))
    for node_type in content["available_node_types"].values():
        del node_type["resources"]["CPU"]
        node_type["resources"].pop("GPU", None)
    found = {name: each["resources"] for name, each in bootstrapped(content)["available_node_types"].items()}
    for name, machine in {"worker": "g5.12xlarge", "big": "p4d.24xlarge", "head": "m6i.xlarge"}.items():
        shape = catalogue("aws").machine(machine)
        assert (found[name]["CPU"], found[name].get("GPU", 0)) == (shape.vcpus, shape.gpus)
        assert shape.gpu is None or f"accelerator_type:{shape.gpu}" in found[name]


@pytest.mark.slow
def test_without_a_group_ray_would_open_ssh_to_everybody(ec2: Any, tmp_path: Path) -> None:
    """Why a file without SecurityGroupIds is refused: also where it gives Ray a narrower rule."""
    content = with_a_role(filled_in(aws.write(a_plan()), image=an_image(ec2)))
    for node_type in content["available_node_types"].values():
        del node_type["node_config"]["SecurityGroupIds"]
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]}
    content["provider"]["security_group"] = {"GroupName": "narrow", "IpPermissions": [ssh]}
    bootstrapped(content)
    assert open_to_all(ec2) == ["narrow"]


@pytest.mark.slow
def test_a_key_of_the_users_own(ec2: Any, security_group: Any, shell: Any, tmp_path: Path) -> None:
    key = tmp_path / "mine.pem"
    key.write_text("a key")
    boto3.client("ec2", region_name=REGION).create_key_pair(KeyName="mine")
    boto3.client("iam").create_instance_profile(InstanceProfileName="mine")
    content = with_a_role(filled_in(aws.write(a_plan(ssh_key=str(key))), security_group.id, an_image(ec2)))
    for node_type in content["available_node_types"].values():
        assert node_type["node_config"]["KeyName"] == aws.KEY
        node_type["node_config"]["KeyName"] = "mine"
    start_head(bootstrapped(content), write(content, tmp_path), shell)
    [head] = ec2.instances.all()
    assert head.key_name == "mine"
    assert any(f"-i {key}" in command for command in shell.commands)


# --- what is written -----------------------------------------------------------------------------------------------------


def test_what_is_to_be_filled_in_is_named_and_told_how() -> None:
    content = aws.write(a_plan())
    text = yaml.safe_dump(content)
    names = {word for word in (aws.SECURITY_GROUP, aws.IMAGE, aws.KEY) if word in text}
    assert names == {aws.SECURITY_GROUP, aws.IMAGE}
    header = "\n".join(aws.header(a_plan()))
    assert all(name in header for name in names)
    assert "--region us-west-2 " in header
    with pytest.raises(CloudError) as caught:
        launcher_checks.check(documents_of(text, "aws.yaml")[0])
    said = str(caught.value).splitlines()
    assert len(said) == 6, "a group and an image for each of three kinds"
    assert all(line.endswith("is still to be filled in.") for line in said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zone": None}, "The plan of lab does not say in which zone."),
        (
            {"workers": (NodeGroup(name="worker", machine="g5.12xlarge", gpu="A10G", gpus=3, most=1),)},
            "worker: g5.12xlarge cannot have 3 A10G: it always comes with 4 A10G.",
        ),
        (
            {"workers": (NodeGroup(name="worker", machine="g5.13xlarge", gpu="A10G", gpus=4, most=1),)},
            "worker: There is no machine 'g5.13xlarge'. Did you mean g5.16xlarge or g5.12xlarge?",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CloudError) as caught:
        aws.write(a_plan(**changes))
    assert str(caught.value).startswith(said)


# --- planted errors ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def worker(content: dict[str, Any]) -> dict[str, Any]:
    node_type: dict[str, Any] = content["available_node_types"]["worker"]
    return node_type


def config(content: dict[str, Any]) -> dict[str, Any]:
    node_config: dict[str, Any] = worker(content)["node_config"]
    return node_config


PLANTED: dict[str, tuple[Change, str, str]] = {
    "a region that is none": (
        lambda c: c["provider"].update(region="us-west"),
        "region:",
        "'us-west' is no region; one is named like us-west-2.",
    ),
    "no region": (lambda c: c["provider"].pop("region"), "provider:", "region is missing in provider, such as us-west-2."),
    "a zone elsewhere": (
        lambda c: c["provider"].update(availability_zone="us-west-2a,us-east-1a"),
        "availability_zone:",
        "the zone us-east-1a is not in the region, which is us-west-2: its zones are us-west-2a and so on.",
    ),
    "a misspelt entry of the provider": (
        lambda c: c["provider"].update(regoin="us-west-2"),
        "regoin:",
        "there is no setting 'regoin'. Did you mean region?",
    ),
    "rules for Ray's own group": (
        lambda c: c["provider"].update(security_group={"GroupName": "mine"}),
        "security_group:",
        "Ray opens SSH to the whole internet in the security group that it makes",
    ),
    "no group": (
        lambda c: config(c).pop("SecurityGroupIds"),
        "worker:/node_config:",
        "SecurityGroupIds is missing in node_config: Ray would make a group that opens SSH to the whole internet.",
    ),
    "a group by its name": (
        lambda c: config(c).update(SecurityGroupIds=["default"]),
        "worker:/- default",
        "'default' is no ID of a security group; one is like sg-0123456789abcdef0 (its name does not do).",
    ),
    "a group that is no list": (
        lambda c: config(c).update(SecurityGroupIds=GROUP),
        "worker:/SecurityGroupIds:",
        f"SecurityGroupIds is '{GROUP}'; it must be a list with an ID, `- sg-...`.",
    ),
    "a machine that is none": (
        lambda c: config(c).update(InstanceType="g5.13xlarge"),
        "worker:/InstanceType:",
        "There is no machine 'g5.13xlarge'. Did you mean g5.16xlarge or g5.12xlarge?",
    ),
    "no machine": (
        lambda c: config(c).pop("InstanceType"),
        "worker:/node_config:",
        "InstanceType is missing in node_config: the kind of machine, such as g5.xlarge.",
    ),
    "a GPU that the region lacks": (
        lambda c: (c["provider"].update(region="eu-west-3", availability_zone="eu-west-3a"),),
        "big:/InstanceType:",
        "eu-west-3 has no A100 GPUs.",
    ),
    "more GPUs than there are": (
        lambda c: worker(c)["resources"].update(GPU=8),
        "worker:/GPU:",
        "Ray is told of 8 GPUs, and the machine has 4 A10G: it must be `GPU: 4`.",
    ),
    "a GPU where there is none": (
        lambda c: c["available_node_types"]["head"]["resources"].update(GPU=1),
        "head:/GPU:",
        "Ray is told of 1 GPUs, and the machine has none: it must be `GPU: 0`.",
    ),
    "more CPUs than there are": (
        lambda c: worker(c)["resources"].update(CPU=64),
        "worker:/CPU:",
        "Ray is told of 64 CPUs, and g5.12xlarge has 48 vCPUs; that many at most.",
    ),
    "the label of another GPU": (
        lambda c: worker(c)["labels"].update({"ray.io/accelerator-type": "T4"}),
        "worker:/ray.io/accelerator-type:",
        "the label is 'T4'; it must be A10G.",
    ),
    "a misspelt entry of EC2's": (
        lambda c: config(c).update(InstanceMarketOption={"MarketType": "spot"}),
        "worker:/InstanceMarketOption:",
        "there is no setting 'InstanceMarketOption'. Did you mean InstanceMarketOptions or MaintenanceOptions?",
    ),
    "a market that is none": (
        lambda c: config(c).update(InstanceMarketOptions={"MarketType": "Spot"}),
        "worker:/InstanceMarketOptions:",
        "the market is 'Spot'; it must be `MarketType: spot`",
    ),
    "no image": (
        lambda c: config(c).pop("ImageId"),
        "worker:/node_config:",
        "ImageId is missing in node_config: Ray would take an Ubuntu 18.04 of 2022;",
    ),
    "an image by another name": (
        lambda c: config(c).update(ImageId="latest_dlami"),
        "worker:/ImageId:",
        "'latest_dlami' is no image; one is named like ami-0123456789abcdef0",
    ),
    "a group beside interfaces": (
        lambda c: config(c).update(NetworkInterfaces=[{"SubnetId": "subnet-0123456789abcdef0", "Groups": [GROUP]}]),
        "worker:/SecurityGroupIds:",
        "SecurityGroupIds cannot stand beside NetworkInterfaces: put it into each of these.",
    ),
    "nobody to log in": (lambda c: c["auth"].pop("ssh_user"), "auth:", "auth says no ssh_user;"),
}


def line_of(text: str, way: str) -> int:
    """The line, from 1, that the way leads to: a piece of text in it, below one in an earlier line."""
    lines, number = text.splitlines(), -1
    for word in way.split("/") if not way.startswith("worker:/ray.io") else ["worker:", "ray.io/accelerator-type:"]:
        number = next(each for each in range(number + 1, len(lines)) if word in lines[each])
    return number + 1


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_refused_where_it_stands(planted: str) -> None:
    change, way, said = PLANTED[planted]
    content = filled_in(aws.write(a_plan()))
    content["auth"]["ssh_user"] = "ubuntu"
    change(content)
    text = yaml.safe_dump(content, sort_keys=False)
    with pytest.raises(CloudError) as caught:
        launcher_checks.check(documents_of(text, "aws.yaml")[0])
    problems = str(caught.value).splitlines()
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"aws.yaml, line {line_of(text, way)}: {said}")


def test_a_file_without_errors_passes() -> None:
    text = yaml.safe_dump(filled_in(aws.write(a_plan())), sort_keys=False)
    launcher_checks.check(documents_of(text, "aws.yaml")[0])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: worker(c).update(resources={}), id="resources that Ray finds out"),
        pytest.param(lambda c: config(c).update(InstanceType="c7gn.large"), id="a machine that only boto3 knows"),
        pytest.param(
            lambda c: (
                config(c).pop("SecurityGroupIds"),
                config(c).update(NetworkInterfaces=[{"SubnetId": "subnet-0123456789abcdef0", "Groups": [GROUP]}]),
            ),
            id="interfaces written out",
        ),
        pytest.param(
            lambda c: (
                config(c).clear(),
                config(c).update(LaunchTemplate={"LaunchTemplateName": "mine", "Version": "1"}, InstanceType="g5.12xlarge"),
            ),
            id="a template that lies with Amazon",
        ),
    ],
)
def test_what_is_unusual_and_right_passes(change: Change) -> None:
    content = filled_in(aws.write(a_plan()))
    change(content)
    launcher_checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])


def test_a_key_needs_the_name_that_amazon_knows_it_by(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()
    content = filled_in(aws.write(a_plan()))
    content["auth"]["ssh_private_key"] = str(key)
    with pytest.raises(CloudError) as caught:
        launcher_checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])
    problems = str(caught.value).splitlines()
    assert len(problems) == 3, "one for each kind of machine"
    assert all("KeyName is missing in node_config" in problem for problem in problems)


def test_entries_of_an_instance_are_amazons_own() -> None:
    model = Loader().load_service_model("ec2", "service-2")["shapes"]["RunInstancesRequest"]
    rays = {"MinCount", "MaxCount", "SubnetId", "ClientToken", "DryRun"}  # it fills these in itself, or they make no sense
    assert set(aws_checks.RUN_INSTANCES.split()) == set(model["members"]) - rays
