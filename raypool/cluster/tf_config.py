"""Sets TF_CONFIG as AI Platform Training did, and becomes a job's script: `python -m
raypool.cluster.tf_config --chief chief -- train.py`.

Source: AI Platform Training, "Using TF_CONFIG for distributed training": `cluster` has the
addresses of each role, `task` is this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

from raypool.cluster.launcher_file import ROLE

PORT = 2222
"""The port in the addresses. Nothing listens there until the script starts a server."""

NAMES = {"worker": "worker", "parameter-server": "ps", "evaluator": "evaluator"}
"""TensorFlow's names of groups of machines."""


def tf_config(machines: Iterable[tuple[str, str]], chief: str) -> str:
    """Return the TF_CONFIG of the master of a job.

    Args:
        machines: Group and address of each machine, "head" for the master.
        chief: TensorFlow's name of the master: "chief", or once "master".

    Example:
        >>> tf_config([("worker", "10.0.0.2"), ("head", "10.0.0.1")], "chief")
        '{"cluster": {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}, "task": {"type":...
    """
    names = {"head": chief, **NAMES}
    cluster: dict[str, list[str]] = {chief: []}
    for group, address in sorted(machines):
        if group in names:
            cluster.setdefault(names[group], []).append(f"{address}:{PORT}")
    return json.dumps({"cluster": cluster, "task": {"type": chief, "index": 0}})


def main(words: Sequence[str]) -> None:
    """Set the variable, and become the script."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    from raypool.ray_private import GcsClient

    _, chief, _, *script = words
    nodes = GcsClient(address=os.environ["RAY_ADDRESS"]).get_all_node_info().values()
    machines = [
        (node.labels.get(ROLE, "head" if node.is_head_node else ""), node.node_manager_address)
        for node in nodes
        if node.state == GcsNodeInfo.ALIVE
    ]
    os.environ["TF_CONFIG"] = tf_config(machines, chief)
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main(sys.argv[1:])
