"""Clusters on Amazon's cloud: writes the file for Ray's launcher, and checks one.

Two of Ray's defaults are always replaced: an image of Ubuntu 18.04, and a security group that opens
SSH to the whole internet, whatever rules it is given.

Source: the reference of EC2's RunInstances, its pages "Spot Instances" and "Use the Instance
Metadata Service"; Ray's `autoscaler/_private/aws/config.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from raypool.cluster import launcher_file, software
from raypool.cluster.documents import PLACEHOLDER, Findings, Keys, nearest
from raypool.cluster.machines import catalogue
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

SECURITY_GROUP = "<your security group>"
IMAGE = "<your image>"
KEY = "<your key pair>"

SUBNETS = "SubnetIds"  # of node_config, Ray's own: it tries them in turn
MARKETS = ("spot", "capacity-block")

FIND_IMAGE = "aws ssm get-parameter --region {} --query Parameter.Value --output text"
"""The command that prints the image to fill in, but for the parameter's name."""


def header(plan: ClusterPlan) -> list[str]:
    """Return the comment at the top of the file, on the entries to fill in."""
    image = software.image("aws", [group.gpu for group in plan.groups if group.gpu])
    parameter = image["name"] if image.get("install_driver") else f"{image['name']}/latest/ami-id"
    has = "without" if image.get("install_driver") else "with"
    key = [f"{KEY}: the name that EC2 knows {plan.ssh_key} by."] if plan.ssh_key else []
    return [
        (
            f"{SECURITY_GROUP}: its ID (sg-...). It lets its own members in at every port, and your"
            " address at port 22: nothing"
        ),
        "else. Were it left out, Ray would make one that opens SSH to the whole internet.",
        (
            f"{IMAGE}: the ID (ami-...) of an Ubuntu {has} NVIDIA's driver, of the region. This"
            " prints the newest:"
        ),
        f"    {FIND_IMAGE.format(plan.region)} \\",
        f"        --name /aws/service/{parameter}",
        *key,
        (
            "Workers have no role: for s3://, put `IamInstanceProfile: {Name: ...}` into their"
            " node_config."
        ),
    ]


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan does not say where, or a machine cannot have its GPUs.

    Example:
        >>> head = NodeGroup(name="head", machine="m6i.xlarge")
        >>> worker = NodeGroup(name="worker", machine="g5.12xlarge", gpu="A10G", gpus=4, most=4)
        >>> here = {"name": "lab", "provider": "aws", "zone": "us-west-2a"}
        >>> file = write(ClusterPlan(**here, head=head, workers=(worker,)))
        >>> file["provider"]["region"], file["available_node_types"]["worker"]["resources"]
        ('us-west-2', {'CPU': 48, 'GPU': 4, 'accelerator_type:A10G': 1})
    """
    if plan.zone is None:
        raise CloudError(
            f"The plan of {plan.name} does not say in which zone. Give one, such as us-west-2a."
        )
    provider = {
        "type": "aws",
        "region": plan.region,
        "availability_zone": plan.zone,
        "cache_stopped_nodes": False,  # machines that end are deleted, and cost nothing
    }
    return launcher_file.launcher_file(plan, provider, lambda group: _instance(plan, group))


def _instance(plan: ClusterPlan, group: NodeGroup) -> dict[str, Any]:
    instance: dict[str, Any] = {
        "InstanceType": group.machine,
        "ImageId": IMAGE,
        "SecurityGroupIds": [SECURITY_GROUP],
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": group.disk_gb, "VolumeType": "gp3"}}
        ],
        # the machine's credentials take two requests, which a tricked web client cannot make
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
    }
    if plan.ssh_key:
        instance["KeyName"] = KEY
    if group.spot:
        instance["InstanceMarketOptions"] = {"MarketType": "spot"}
    return instance


def rented(config: dict[str, Any]) -> tuple[str, str | None, int, bool]:
    """Return what a node_config rents: machine, kind and number of GPUs, and if it is spot."""
    shape = catalogue("aws").shape(str(config.get("InstanceType")))  # else a template has it
    return shape.name, shape.gpu, shape.gpus, "InstanceMarketOptions" in config


def check(findings: Findings) -> None:
    """Note what EC2 would refuse, and what would silently cost money or safety."""
    findings.check_form(
        ("cluster_name",),
        r"[A-Za-z0-9][-\w.]{0,99}",
        "cluster_name is {}; the names of machines begin with it, so it may have letters, digits"
        " and - _ . only, and not more than 100 of them.",
    )
    findings.check_form(
        ("provider", "region"),
        r"[a-z]{2}(-[a-z]+)+-\d",
        "region is {}; one is named like us-west-2.",
    )
    region = str(findings.at(("provider", "region")))
    for zone in (findings.at(("provider", "availability_zone")) or "").split(","):
        is_elsewhere = not zone.strip().startswith((region, PLACEHOLDER))
        if zone and is_elsewhere and not region.startswith(PLACEHOLDER):
            text = (
                f"the zone {zone.strip()} is not in the region, which is {region}: its zones are"
                f" {region}a and so on."
            )
            findings.add(("provider", "availability_zone"), text)
    if findings.at(("provider", "security_group")) is not None:
        text = (
            "Ray opens SSH to the whole internet in the security group that it makes, whatever"
            " rules stand here. Make one yourself and give its ID in each node_config, as"
            " SecurityGroupIds."
        )
        findings.doubt(("provider", "security_group"), text)
    if _validator() is None:
        findings.doubt(
            ("provider",),
            "boto3 is not installed here, so the names of EC2's settings were not checked.",
        )
    for name in findings.at(("available_node_types",)) or ():
        keys: Keys = ("available_node_types", name)
        _check_machine(findings, keys)
        _check_entries(findings, (*keys, "node_config"))
        _check_instance(findings, (*keys, "node_config"))


def _check_machine(findings: Findings, keys: Keys) -> None:
    """Check a node type's machine, and its description for Ray."""
    at = (*keys, "node_config", "InstanceType")
    machine = findings.at(at)
    if not isinstance(machine, str):
        findings.add(
            (*keys, "node_config"),
            "InstanceType is missing in node_config: the kind of machine, such as g5.xlarge.",
        )
    elif not machine.startswith(PLACEHOLDER):
        try:
            shape = catalogue("aws").machine(machine)
            # Ray asks EC2 for numbers that the file leaves out
            launcher_file.check_resources(
                findings, keys, shape, shape.gpu, shape.gpus, is_filled_in=True
            )
            gpus = [shape.gpu] if shape.gpu else []
            catalogue("aws").check_place(str(findings.at(("provider", "region"))), *gpus)
        except CloudError as error:
            findings.unlisted(at, str(error))


def _check_entries(findings: Findings, config: Keys) -> None:
    """Let boto3 check names and types of the entries, as it does when Ray passes them on."""
    validator = _validator()
    if validator is None:
        return
    entries = findings.at(config) or {}
    # with one misspelled name in a worker, the head would request it again and again, in vain
    report = validator({name: value for name, value in entries.items() if name != SUBNETS})
    for line in report.splitlines():
        # 'Unknown parameter in Placement: "Zone", must be one of: ...', 'Invalid type for parameter
        # Placement.Zone, value: ...'
        where, _, known = line.partition(", must be one of: ")
        way = re.sub(
            "^.*(parameter in input|parameter in|parameter)", "", where.partition(", value")[0]
        )
        names = re.findall(r"\w+", way)
        at = (*config, *(int(name) if name.isdecimal() else name for name in names))
        findings.add(at, f"{where}{nearest(names[-1], known.split(', '))}" if known else f"{line}.")


@functools.cache
def _validator() -> Callable[[dict[str, Any]], str] | None:
    """Return a function for boto3's report on an instance's settings, None without boto3."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
        from botocore.validate import ParamValidator
    except ImportError:
        return None
    service = ServiceModel(Loader().load_service_model("ec2", "service-2"))
    wanted = service.operation_model("RunInstances").input_shape
    counts = {"MinCount": 1, "MaxCount": 1}  # Ray adds them
    return lambda config: str(ParamValidator().validate(config | counts, wanted).generate_report())


def _check_instance(findings: Findings, config: Keys) -> None:
    """Check settings that Ray would replace by its defaults, or leave open."""

    def there(*keys: str | int) -> Any:
        return findings.at((*config, *keys))

    market = there("InstanceMarketOptions")
    if market is not None and there("InstanceMarketOptions", "MarketType") not in MARKETS:
        findings.add(
            (*config, "InstanceMarketOptions"),
            f"{market!r} is no market; it must be `MarketType: spot`.",
        )
    if there("MetadataOptions", "HttpEndpoint") == "disabled":
        text = (
            "without the service for metadata the head may make no machines, and nobody learns that"
            " a spot machine is taken back. It must be enabled; `HttpTokens: required` makes it"
            " safe."
        )
        findings.add((*config, "MetadataOptions", "HttpEndpoint"), text)
    if there("LaunchTemplate") is not None:
        return  # it may say what follows, and lies with Amazon
    has_file, name = findings.at(("auth", "ssh_private_key")) is not None, there("KeyName")
    if has_file and name is None and there("UserData") is None:
        text = (
            "KeyName is missing in node_config: the name that EC2 knows the key by that auth says"
            " to log in with."
        )
        findings.add(config, text)
    elif name is not None and not has_file:
        text = (
            f"KeyName is {name!r}, and auth names no ssh_private_key, so Ray takes a key of its"
            " own. Name its file there."
        )
        findings.add((*config, "KeyName"), text)
    if there("ImageId") in (None, "latest_dlami"):
        find = "`raypool cluster init --provider aws` writes the command that finds one"
        findings.doubt(
            config,
            f"ImageId is missing in node_config: Ray takes an Ubuntu 18.04 of 2022; {find}.",
        )
    if not there("SecurityGroupIds") and there("NetworkInterfaces") is None:
        text = (
            "SecurityGroupIds is missing in node_config: Ray makes a group that opens SSH to"
            " the whole internet. Give one that lets in its own members, and your address at"
            " port 22."
        )
        findings.doubt(config, text)
