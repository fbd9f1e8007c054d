"""A cluster on AWS for tests: its plan, and its file as it is when somebody has filled it in."""

from __future__ import annotations

import copy
from typing import Any

from raypool.cluster.packages import default_packages
from raypool.cluster.plan import ClusterPlan, NodeGroup

GROUP, IMAGE = "sg-0123456789abcdef0", "ami-0123456789abcdef0"


def a_plan(**changes: Any) -> ClusterPlan:
    groups = (
        NodeGroup(
            name="worker", machine="g5.12xlarge", gpu="A10G", gpus=4, least=1, most=4, spot=True
        ),
        NodeGroup(name="big", machine="p4d.24xlarge", gpu="A100", gpus=8, most=2),
    )
    fields: dict[str, Any] = {
        "name": "lab",
        "provider": "aws",
        "zone": "us-west-2a",
        "head": NodeGroup(name="head", machine="m6i.xlarge", disk_gb=100),
        "workers": groups,
        "packages": default_packages("aws"),
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
