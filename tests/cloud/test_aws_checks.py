"""Mistakes in files for AWS: each is refused with its line, and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader
from hypothesis import given, settings
from hypothesis import strategies as st

from raypool.cloud import aws, aws_checks, launcher_checks
from raypool.cloud.documents import Findings, documents_of
from raypool.cloud.machines import catalogue
from raypool.cloud.plan import NodeGroup
from raypool.errors import CloudError
from tests.cloud.aws_files import GROUP, a_plan, filled_in

FILE = aws.write(a_plan())

Change = Callable[[dict[str, Any]], object]


def worker(content: dict[str, Any]) -> dict[str, Any]:
    node_type: dict[str, Any] = content["available_node_types"]["worker"]
    return node_type


def config(content: dict[str, Any]) -> dict[str, Any]:
    node_config: dict[str, Any] = worker(content)["node_config"]
    return node_config


PLANTED: dict[str, tuple[Change, str, str]] = {
    "a name with more than letters": (
        lambda c: c.update(cluster_name="a b; rm -rf /"),
        "cluster_name:",
        "cluster_name is 'a b; rm -rf /'; the names of machines begin with it,",
    ),
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
    "a misspelt entry of a disk's": (
        lambda c: config(c)["BlockDeviceMappings"][0]["Ebs"].update(VolumSize=100),
        "worker:/VolumSize:",
        "there is no setting 'VolumSize'. Did you mean VolumeSize",
    ),
    "a size with a unit": (
        lambda c: config(c)["BlockDeviceMappings"][0]["Ebs"].update(VolumeSize="200GB"),
        "worker:/VolumeSize:",
        "VolumeSize is '200GB'; it must be a whole number of GB, such as 200.",
    ),
    "a disk that is no list": (
        lambda c: config(c).update(BlockDeviceMappings={"DeviceName": "/dev/sda1"}),
        "worker:/BlockDeviceMappings:",
        "BlockDeviceMappings is {'DeviceName': '/dev/sda1'}; it must be a list of disks.",
    ),
    "a market that is none": (
        lambda c: config(c).update(InstanceMarketOptions={"MarketType": "Spot"}),
        "worker:/InstanceMarketOptions:",
        "MarketType is 'Spot'; it must be `MarketType: spot`, or capacity-block.",
    ),
    "no metadata": (
        lambda c: config(c)["MetadataOptions"].update(HttpEndpoint="disabled"),
        "worker:/HttpEndpoint:",
        "without the service for metadata the head may make no machines,",
    ),
    "a key that Ray would not take": (
        lambda c: config(c).update(KeyName="mine"),
        "worker:/KeyName:",
        "KeyName is 'mine', and auth names no ssh_private_key, so Ray takes a key of its own.",
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
    "interfaces that are none": (
        lambda c: (config(c).pop("SecurityGroupIds"), config(c).update(NetworkInterfaces={"SubnetId": "subnet-1"})),
        "worker:/NetworkInterfaces:",
        "NetworkInterfaces is {'SubnetId': 'subnet-1'}; it must be a list of interfaces.",
    ),
    "an interface without groups": (
        lambda c: (config(c).pop("SecurityGroupIds"), config(c).update(NetworkInterfaces=[{"SubnetId": "subnet-1"}])),
        "worker:/- SubnetId",
        "Groups is missing: Ray wants the security groups of each interface.",
    ),
    "nobody to log in": (lambda c: c["auth"].pop("ssh_user"), "auth:", "auth says no ssh_user;"),
}


def line_of(text: str, way: str) -> int:
    """The line, from 1, that the way leads to: a piece of text in it, below one in an earlier line."""
    lines, number = text.splitlines(), -1
    for word in way.split("/") if not way.startswith("worker:/ray.io") else ["worker:", "ray.io/accelerator-type:"]:
        number = next(each for each in range(number + 1, len(lines)) if word in lines[each])
    return number + 1


def test_planted_errors_are_refused_where_they_stand() -> None:
    wrong = {}
    for planted, (change, way, said) in PLANTED.items():
        content = filled_in(FILE)
        content["auth"]["ssh_user"] = "ubuntu"
        change(content)
        text = yaml.safe_dump(content, sort_keys=False)
        with pytest.raises(CloudError) as caught:
            launcher_checks.check(documents_of(text, "aws.yaml")[0])
        problems = str(caught.value).splitlines()
        if len(problems) != 1 or not problems[0].startswith(f"aws.yaml, line {line_of(text, way)}: {said}"):
            wrong[planted] = problems
    assert not wrong


def test_each_machine_with_gpus_passes_in_a_region_that_has_them() -> None:
    wrong = {}
    for shape in catalogue("aws").machines.values():
        if not shape.gpu:
            continue
        zone = f"{catalogue('aws').regions(shape.gpu)[0]}a"
        worker = NodeGroup(name="worker", machine=shape.name, gpu=shape.gpu, gpus=shape.gpus, most=1, spot=True)
        [document] = documents_of(yaml.safe_dump(filled_in(aws.write(a_plan(zone=zone, workers=(worker,))))), "aws.yaml")
        findings = Findings(document)
        aws_checks.check(findings)
        wrong[shape.name] = list(findings)
    assert len(wrong) > 50
    assert not any(wrong.values()), wrong


RIGHT: dict[str, Change] = {
    "as written": lambda c: None,
    "resources that Ray finds out": lambda c: worker(c).update(resources={}),
    "a machine that only boto3 knows": lambda c: config(c).update(InstanceType="c7gn.large"),
    "interfaces written out": lambda c: (
        config(c).pop("SecurityGroupIds"),
        config(c).update(NetworkInterfaces=[{"SubnetId": "subnet-0123456789abcdef0", "Groups": [GROUP]}]),
    ),
    "a template that lies with Amazon": lambda c: (
        config(c).clear(),
        config(c).update(LaunchTemplate={"LaunchTemplateName": "mine", "Version": "1"}, InstanceType="g5.12xlarge"),
    ),
}


def test_what_is_unusual_and_right_passes() -> None:
    for change in RIGHT.values():
        content = filled_in(FILE)
        change(content)
        launcher_checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])


def test_a_key_needs_the_name_that_amazon_knows_it_by(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch(mode=0o600)
    content = filled_in(aws.write(a_plan()))
    content["auth"]["ssh_private_key"] = str(key)
    with pytest.raises(CloudError) as caught:
        launcher_checks.check(documents_of(yaml.safe_dump(content), "aws.yaml")[0])
    problems = str(caught.value).splitlines()
    assert len(problems) == 3, "one for each kind of machine"
    assert all("KeyName is missing in node_config" in problem for problem in problems)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([GROUP, "<image>", "ami-1"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["Groups", "MarketType", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=40)
@given(
    entries=st.dictionaries(
        st.sampled_from([*aws_checks.ENTRIES["node_config"].split(), aws_checks.SUBNETS, "x"]), ANYTHING, max_size=4
    )
)
def test_whatever_stands_there_is_looked_at(entries: dict[str, Any]) -> None:
    """Amazon's own entries are of any kind for Ray's schema: nothing of them is taken for granted."""
    content = filled_in(FILE)
    config(content).update(entries)
    [document] = documents_of(yaml.safe_dump(content), "aws.yaml")
    findings = Findings(document)
    aws_checks.check(findings)
    for problem in findings:
        assert document.line_of(problem.keys) > 1
        assert problem.text.endswith((".", "?"))


def amazons_entries(shapes: dict[str, Any], name: str, shape: str) -> Iterator[tuple[str, set[str]]]:
    """The names that Amazon knows in an entry, and in those below it."""
    said = shapes[shape]
    if said["type"] == "list":
        yield from amazons_entries(shapes, name, said["member"]["shape"])
    elif said["type"] == "structure":
        yield name, set(said["members"])
        for member, below in said["members"].items():
            yield from amazons_entries(shapes, member, below["shape"])


def test_entries_of_an_instance_are_amazons_own() -> None:
    shapes = Loader().load_service_model("ec2", "service-2")["shapes"]
    known: dict[str, set[str]] = {}
    for name, names in amazons_entries(shapes, "node_config", "RunInstancesRequest"):
        if name in aws_checks.ENTRIES:
            assert known.setdefault(name, names) == names, "one name, one meaning"
    known["node_config"] -= {"MinCount", "MaxCount", "SubnetId", "ClientToken", "DryRun"}  # Ray says them, or they make no sense
    assert {name: set(text.split()) for name, text in aws_checks.ENTRIES.items()} == known
