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

from jsonschema import Draft7Validator

from raypool.cluster import launcher_file, software
from raypool.cluster.documents import NO_CLIENT, PLACEHOLDER, Findings, form, nearest
from raypool.cluster.launcher_file import Rented
from raypool.cluster.machines import catalogue
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

SECURITY_GROUP = "<your security group>"
IMAGE = "<your image>"
KEY = "<your key pair>"

SUBNETS = "SubnetIds"  # Ray's own setting in node_config: it tries them in turn

_NAME = form(
    r"[A-Za-z0-9][-\w.]{0,99}",
    "have at most 100 letters, digits and - _ . only: machine names begin with it",
)
_REGION = form(r"[a-z]{2}(-[a-z]+)+-\d", "be a region, such as us-west-2")
_PROVIDER = {"required": ["region"], "properties": {"region": _REGION}}
FILE = Draft7Validator({"properties": {"cluster_name": _NAME, "provider": _PROVIDER}})
"""The rules for names."""


def header(plan: ClusterPlan) -> list[str]:
    """Return the comment at the top of the file, on the entries to fill in."""
    image = software.image("aws", plan.gpus)
    parameter = image["name"] if image.get("install_driver") else f"{image['name']}/latest/ami-id"
    has = "without" if image.get("install_driver") else "with"
    key = [f"{KEY}: the name of {plan.ssh_key} in EC2."] if plan.ssh_key else []
    return [
        (
            f"{SECURITY_GROUP}: its ID (sg-...). It must admit its own members at every port and"
            " your address at"
        ),
        "port 22, nothing else. Without it, Ray makes one that opens SSH to the whole internet.",
        (
            f"{IMAGE}: the ID (ami-...) of an Ubuntu image {has} NVIDIA's driver, in the region."
            " This prints the newest:"
        ),
        (
            f"    aws ssm get-parameter --region {plan.region} --query Parameter.Value --output"
            " text \\"
        ),
        f"        --name /aws/service/{parameter}",
        *key,
        (
            "Workers have no role: for s3://, add `IamInstanceProfile: {Name: ...}` to their"
            " node_config."
        ),
    ]


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan has no zone, or a machine cannot have its GPUs.
    """
    provider = {
        "type": "aws",
        "region": plan.region,
        "availability_zone": plan.zone,
        "cache_stopped_nodes": False,  # machines that end are deleted, and cost nothing
    }

    def instance(group: NodeGroup) -> dict[str, Any]:
        disk = {"VolumeSize": group.disk_gb, "VolumeType": "gp3"}
        return {
            "InstanceType": group.machine,
            "ImageId": IMAGE,
            "SecurityGroupIds": [SECURITY_GROUP],
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
            # The machine's credentials take two requests, which a tricked web client cannot make.
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            **({"KeyName": KEY} if plan.ssh_key else {}),
            **({"InstanceMarketOptions": {"MarketType": "spot"}} if group.spot else {}),
        }

    return launcher_file.launcher_file(plan, provider, instance)


def rented(config: dict[str, Any]) -> Rented:
    """Return what a `node_config` rents."""
    shape = catalogue("aws").shape(str(config.get("InstanceType")))  # else a template names it
    return Rented(shape.name, shape.gpu, shape.gpus, "InstanceMarketOptions" in config)


def check(findings: Findings) -> None:
    """Note what EC2 would refuse, and what would silently cost money or safety."""
    findings.check_schema(FILE)
    provider = findings.within("provider")
    if provider.at("security_group") is not None:
        provider.doubt(
            "despite these rules, Ray opens SSH to the whole internet in the security group that"
            " it makes. Make one yourself and set its ID in each node_config, as"
            " SecurityGroupIds.",
            "security_group",
        )
    validator = _validator()
    if validator is None:
        provider.doubt(NO_CLIENT.format("boto3"))
    for name in findings.at("available_node_types") or ():
        node = findings.within("available_node_types", name)
        config = node.within("node_config")
        _check_machine(node)
        if validator is not None:
            _check_entries(config, validator)
        _check_instance(config)


def _check_machine(node: Findings) -> None:
    """Check a node type's machine, and its description for Ray."""
    at = ("node_config", "InstanceType")
    machine = node.at(*at)
    if not isinstance(machine, str):
        text = "InstanceType is missing in node_config. Set the machine type, such as g5.xlarge."
        node.add(text, "node_config")
    elif not machine.startswith(PLACEHOLDER):
        try:
            shape = catalogue("aws").machine(machine)
            launcher_file.check_resources(node, shape.gpu, shape.gpus, is_filled_in=True)
            region = str(node.whole().at("provider", "region"))
            catalogue("aws").check_place(region, *filter(None, [shape.gpu]))
        except CloudError as error:
            node.unlisted(str(error), *at)


def _check_entries(config: Findings, validator: Callable[[dict[str, Any]], str]) -> None:
    """Let boto3 check names and types of the entries, as it does when Ray passes them on."""
    # With one misspelled name in a worker, the head would request it again and again, in vain.
    entries = config.at() or {}
    report = validator({name: value for name, value in entries.items() if name != SUBNETS})
    for line in report.splitlines():
        # 'Unknown parameter in Placement: "Zone", must be one of: ...', 'Invalid type for parameter
        # Placement.Zone, value: ...'
        where, _, known = line.partition(", must be one of: ")
        way = re.sub(
            "^.*(parameter in input|parameter in|parameter)", "", where.partition(", value")[0]
        )
        names = re.findall(r"\w+", way)
        at = (int(name) if name.isdecimal() else name for name in names)
        config.add(f"{where}{nearest(names[-1], known.split(', '))}" if known else f"{line}.", *at)


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


def _check_instance(config: Findings) -> None:
    """Check settings that Ray would replace by its defaults, or leave open."""
    if config.at("LaunchTemplate") is not None:
        return  # Amazon keeps it, and it may have the following
    name = config.at("KeyName")
    if name is not None and config.whole().at("auth", "ssh_private_key") is None:
        text = (
            f"KeyName is {name!r}, but auth has no ssh_private_key, so Ray uses its own key. Set"
            " ssh_private_key to the key's file."
        )
        config.add(text, "KeyName")
    if config.at("ImageId") in (None, "latest_dlami"):
        config.doubt(
            "ImageId is missing in node_config, so Ray uses Ubuntu 18.04 from 2022. `raypool"
            " cluster init --provider aws` writes the command that finds an image."
        )
    if not config.at("SecurityGroupIds") and config.at("NetworkInterfaces") is None:
        config.doubt(
            "SecurityGroupIds is missing in node_config, so Ray makes a group that opens SSH to"
            " the whole internet. Set a group that admits its own members, and your address at"
            " port 22."
        )
