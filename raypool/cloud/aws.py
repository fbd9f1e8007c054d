"""Clusters on Amazon's cloud: the file for Ray's launcher.

What Ray would otherwise take is never left to it: an image of Ubuntu 18.04, and a security group that opens SSH to the whole
internet, whatever rules it is given.

Source: the reference of EC2's RunInstances, its pages "Spot Instances" and "Use the Instance Metadata Service"; Ray's
`autoscaler/_private/aws/config.py`.
"""

from __future__ import annotations

from typing import Any

from raypool.cloud import nodes
from raypool.cloud.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

SECURITY_GROUP = "<your security group>"
IMAGE = "<your image>"
KEY = "<your key pair>"

FIND_IMAGE = (
    "aws ssm get-parameter --region REGION --query Parameter.Value --output text",
    "--name /aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
)
"""The command, in two lines, that prints the image to fill in: Ubuntu with NVIDIA's driver."""


def header(plan: ClusterPlan) -> list[str]:
    """Return what the comment at the top of the file says of what is to be filled in."""
    ask, name = FIND_IMAGE
    key = [f"{KEY}: the name that EC2 knows {plan.ssh_key} by."] if plan.ssh_key else []
    return [
        f"{SECURITY_GROUP}: its ID (sg-...). It lets its own members in at every port, and your address at port 22: nothing",
        "else. Were it left out, Ray would make one that opens SSH to the whole internet.",
        f"{IMAGE}: the ID (ami-...) of an Ubuntu with NVIDIA's driver, of the region. This prints the newest:",
        f"    {ask.replace('REGION', plan.region or 'REGION')} \\",
        f"        {name}",
        *key,
        "Workers have no role: for s3://, put `IamInstanceProfile: {Name: ...}` into their node_config.",
    ]


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan does not say where, or a machine cannot have the GPUs that it is to have.

    Example:
        >>> head = NodeGroup(name="head", machine="m6i.xlarge")
        >>> worker = NodeGroup(name="worker", machine="g5.12xlarge", gpu="A10G", gpus=4, most=4, spot=True)
        >>> plan = ClusterPlan(name="lab", provider="aws", zone="us-west-2a", head=head, workers=(worker,))
        >>> file = write(plan)
        >>> file["provider"]["region"], file["available_node_types"]["worker"]["resources"]
        ('us-west-2', {'CPU': 48, 'GPU': 4, 'accelerator_type:A10G': 1})
    """
    if plan.zone is None:
        raise CloudError(f"The plan of {plan.name} does not say in which zone. Give one, such as us-west-2a.")
    provider = {
        "type": "aws",
        "region": plan.region,
        "availability_zone": plan.zone,
        "cache_stopped_nodes": False,  # what is ended is gone, and costs nothing any more
    }
    return nodes.launcher_file(plan, provider, lambda group: _instance(plan, group))


def _instance(plan: ClusterPlan, group: NodeGroup) -> dict[str, Any]:
    """Return what EC2 is told of an instance."""
    instance: dict[str, Any] = {
        "InstanceType": group.machine,
        "ImageId": IMAGE,
        "SecurityGroupIds": [SECURITY_GROUP],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": group.disk_gb, "VolumeType": "gp3"}}],
        # Credentials of the machine are given to those only who can ask for them in two steps: not to a tricked web client.
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
    }
    if plan.ssh_key:
        instance["KeyName"] = KEY
    if group.spot:
        instance["InstanceMarketOptions"] = {"MarketType": "spot"}
    return instance
