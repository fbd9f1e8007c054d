"""Clusters on AWS: Ray's own provider makes what we write, on moto's EC2, and what is wrong with a
file is said before.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypool.cluster import aws, checks, packages
from raypool.cluster.documents import documents_of
from raypool.cluster.machines import catalogue
from raypool.cluster.plan import NodeGroup
from raypool.errors import CloudError
from tests.cloud.aws_files import GROUP, a_plan, filled_in, with_a_role
from tests.cloud.ray_provider import Cluster

REGION = "us-west-2"


ANSWERS: list[Any] = []


def asked_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """All machines that EC2 has: moto takes seconds to answer, and answers the same in each
    test.
    """

    def asked(*args: Any) -> Any:
        if not ANSWERS:
            ANSWERS.append(ask(*args))
        return ANSWERS[0]

    return asked


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, providers: None) -> Iterator[Any]:
    """An EC2 of this test's own, and a home for the keys that Ray makes."""
    import boto3
    from moto import mock_aws
    from ray.autoscaler._private.aws import config, node_provider, utils

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "pretended")
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # twice 15 s for Amazon to spread a role
    monkeypatch.setattr(config, "time", types.SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(
        node_provider, "list_ec2_instances", asked_once(node_provider.list_ec2_instances)
    )
    caches = (utils.resource_cache, utils.client_cache, config._get_subnets_or_die)
    with mock_aws():
        for cache in caches:
            cache.cache_clear()
        yield boto3.resource("ec2", region_name=REGION)
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def security_group(ec2: Any) -> Any:
    """A group as the header of the file asks for: its members reach each other, and one address
    gets in by SSH.
    """
    [vpc] = [vpc for vpc in ec2.vpcs.all() if vpc.is_default]
    group = ec2.create_security_group(GroupName="mine", Description="mine", VpcId=vpc.id)
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    ssh = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": "203.0.113.7/32"}],
    }
    group.authorize_ingress(IpPermissions=[inside, ssh])
    return group


def an_image(ec2: Any) -> str:
    image: str = next(iter(ec2.images.filter(Owners=["amazon"]))).id
    return image


def write(content: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / ".ray").mkdir(exist_ok=True)
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    (tmp_path / "cluster.lock.txt").touch()
    packages.make_wheel()
    return path


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
    import boto3

    client = boto3.client("ec2", region_name=REGION)
    [reservation] = client.describe_instances(InstanceIds=[instance.id])["Reservations"]
    [said] = reservation["Instances"]
    return dict(said)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies that Amazon has made: Ray gives two of them to the head. They take moto
    seconds.
    """
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")


@pytest.mark.ci
def test_ray_makes_the_cluster_that_was_planned(
    policies: None, ec2: Any, security_group: Any, shell: Any, tmp_path: Path
) -> None:
    from ray.autoscaler import tags

    content = filled_in(aws.write(a_plan()), security_group.id, an_image(ec2))
    path = write(content, tmp_path)
    checks.check(documents_of(path.read_text(), str(path))[0])
    cluster = Cluster(content)

    cluster.up(path, shell)
    [head] = ec2.instances.all()
    assert head.instance_type == "m6i.xlarge"
    assert head.instance_lifecycle is None, "the head is not to be taken back"
    assert head.iam_instance_profile is not None, "it makes the workers"
    assert [group["GroupId"] for group in head.security_groups] == [security_group.id]
    assert described(head)["MetadataOptions"]["HttpTokens"] == "required"
    [volume] = head.volumes.all()
    assert (volume.size, volume.volume_type) == (100, "gp3")
    said = {tag["Key"]: tag["Value"] for tag in head.tags}
    assert (said[tags.TAG_RAY_CLUSTER_NAME], said[tags.TAG_RAY_USER_NODE_TYPE]) == ("lab", "head")

    # What is run on it, in this order.
    wanted = [
        "auth_token",
        "cluster.lock.txt",
        ".cache/raypool/raypool-",
        "uv venv",
        "uv pip install",
        "ray stop",
        "ray start --disable-usage-stats --head",
        "raypool.cluster.idle",
    ]
    places = [
        next(number for number, line in enumerate(shell.commands) if word in line)
        for word in wanted
    ]
    assert places == sorted(places), shell.commands
    start = shell.commands[places[-2]]
    assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in start

    # What the autoscaler on the head makes, by the same provider.
    for node_type in ("worker", "big"):
        cluster.add_workers(node_type, 1)
    made = {node.instance_type: node for node in map(cluster.provider._get_node, cluster.workers())}
    assert set(made) == {"g5.12xlarge", "p4d.24xlarge"}
    assert made["g5.12xlarge"].instance_lifecycle == "spot"
    assert made["p4d.24xlarge"].instance_lifecycle is None
    for worker in made.values():
        assert worker.iam_instance_profile is None, "what runs there cannot make machines"
        assert [group["GroupId"] for group in worker.security_groups] == [security_group.id]
        assert described(worker)["MetadataOptions"]["HttpTokens"] == "required"
    assert not open_to_all(ec2)

    cluster.provider.terminate_nodes(cluster.provider.non_terminated_nodes({}))
    assert {instance.state["Name"] for instance in ec2.instances.all()} == {"terminated"}, (
        "nothing is only stopped, and costs"
    )


@pytest.mark.long
def test_ray_finds_no_other_resources_than_we_write(ec2: Any, security_group: Any) -> None:
    """It asks EC2 for what is not said."""
    plan = a_plan()
    content = with_a_role(filled_in(aws.write(plan), security_group.id, an_image(ec2)))
    for node_type in content["available_node_types"].values():
        node_type["resources"] = {}
    found = {
        name: each["resources"]
        for name, each in Cluster(content).config["available_node_types"].items()
    }
    for group in plan.groups:
        shape = catalogue("aws").machine(group.machine)
        assert (found[group.name]["CPU"], found[group.name].get("GPU", 0)) == (
            shape.vcpus,
            shape.gpus,
        )
        assert shape.gpu is None or found[group.name][f"accelerator_type:{shape.gpu}"] == 1


@pytest.mark.ci
def test_without_a_group_ray_would_open_ssh_to_everybody(ec2: Any) -> None:
    """Why a file without SecurityGroupIds is refused: also where it gives Ray a narrower rule."""
    content = with_a_role(filled_in(aws.write(a_plan()), image=an_image(ec2)))
    for node_type in content["available_node_types"].values():
        del node_type["node_config"]["SecurityGroupIds"]
    ssh = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": "203.0.113.7/32"}],
    }
    content["provider"]["security_group"] = {"GroupName": "narrow", "IpPermissions": [ssh]}
    Cluster(content)
    assert open_to_all(ec2) == ["narrow"]


@pytest.mark.long
def test_a_key_of_the_users_own(ec2: Any, security_group: Any, shell: Any, tmp_path: Path) -> None:
    import boto3

    key = tmp_path / "mine.pem"
    key.write_text("a key")
    boto3.client("ec2", region_name=REGION).create_key_pair(KeyName="mine")
    boto3.client("iam").create_instance_profile(InstanceProfileName="mine")
    content = with_a_role(
        filled_in(aws.write(a_plan(ssh_key=str(key))), security_group.id, an_image(ec2))
    )
    for node_type in content["available_node_types"].values():
        assert node_type["node_config"]["KeyName"] == aws.KEY
        node_type["node_config"]["KeyName"] = "mine"
    Cluster(content).up(write(content, tmp_path), shell)
    [head] = ec2.instances.all()
    assert head.key_name == "mine"
    assert any(f"-i {key}" in line for line in shell.commands)


@pytest.mark.long
def test_ray_would_not_take_a_key_whose_file_it_is_not_told(ec2: Any, security_group: Any) -> None:
    """Why a KeyName without ssh_private_key is refused."""
    content = with_a_role(filled_in(aws.write(a_plan()), security_group.id, an_image(ec2)))
    for node_type in content["available_node_types"].values():
        node_type["node_config"]["KeyName"] = "mine"
    taken = {
        each["node_config"]["KeyName"]
        for each in Cluster(content).config["available_node_types"].values()
    }
    assert taken == {f"ray-autoscaler_{REGION}"}


# --- what is written ------------------------------------------------------------------------------


def test_beside_each_worker_runs_the_watcher_for_amazons_notices() -> None:
    content = aws.write(a_plan())
    assert "raypool.cluster.preemption --cloud aws " in content["worker_start_ray_commands"][-1]
    assert not any("preemption" in command for command in content["head_start_ray_commands"])


def test_what_is_to_be_filled_in_is_named_and_told_how() -> None:
    content = aws.write(a_plan())
    text = yaml.safe_dump(content)
    names = {word for word in (aws.SECURITY_GROUP, aws.IMAGE, aws.KEY) if word in text}
    assert names == {aws.SECURITY_GROUP, aws.IMAGE}
    header = "\n".join(aws.header(a_plan()))
    assert all(name in header for name in names)
    assert "--region us-west-2 " in header
    with pytest.raises(CloudError) as caught:
        checks.check(documents_of(text, "aws.yaml")[0])
    said = str(caught.value).splitlines()
    assert len(said) == 6, "a group and an image for each of three kinds"
    assert all(line.endswith("must be filled in.") for line in said)


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(CloudError, match=r"Choose one with --zone"):
        aws.write(a_plan(zone=None))
    worker = NodeGroup(name="worker", machine="g5.12xlarge", gpu="A10G", gpus=3, most=1)
    with pytest.raises(
        CloudError, match=r"worker: g5.12xlarge cannot have 3 A10G: it always comes with 4 A10G\."
    ):
        aws.write(a_plan(workers=(worker,)))


# --- what is taken --------------------------------------------------------------------------------


def test_each_machine_with_gpus_passes_in_a_region_that_has_them() -> None:
    wrong = {}
    for shape in catalogue("aws").machines.values():
        if shape.gpu:
            zone = f"{sorted(catalogue('aws').gpu(shape.gpu).regions)[0]}a"
            worker = NodeGroup(
                name="worker", machine=shape.name, gpu=shape.gpu, gpus=shape.gpus, most=1, spot=True
            )
            content = filled_in(
                aws.write(
                    a_plan(zone=zone, head=replace(worker, name="head", most=0), workers=(worker,))
                )
            )
            wrong[shape.name] = checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])
    assert len(wrong) > 50
    assert not any(wrong.values()), wrong


def test_what_is_unusual_and_right_passes() -> None:
    content = filled_in(aws.write(a_plan()))
    worker, big = (content["available_node_types"][name] for name in ("worker", "big"))
    worker["resources"] = {}  # Ray finds them out
    del worker["node_config"]["SecurityGroupIds"]
    worker["node_config"]["NetworkInterfaces"] = [
        {"SubnetId": "subnet-0123456789abcdef0", "Groups": [GROUP]}
    ]
    # lies with Amazon, and may say the rest
    template = {"LaunchTemplateName": "mine", "Version": "1"}
    big["node_config"] = {"LaunchTemplate": template, "InstanceType": "p4d.24xlarge"}
    assert not checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])
