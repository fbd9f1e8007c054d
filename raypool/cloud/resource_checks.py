"""What a file for Ray's launcher tells Ray of a kind of machine, against what the provider says that it has."""

from __future__ import annotations

from raypool.cloud import nodes
from raypool.cloud.documents import Findings, Keys
from raypool.cloud.machines import Machine


def check(findings: Findings, keys: Keys, shape: Machine | None, gpu: str | None, gpus: int, is_filled_in: bool = False) -> None:
    """Note what is wrong with the resources and labels of a type of node.

    Ray believes what is written there: with too many GPUs, work waits for ever for the last ones; with too few, they idle.

    Args:
        findings: The file.
        keys: Where the type of node stands.
        shape: Its machine; None: made to measure.
        gpu: The kind of its GPUs by Ray's name, None if it has none.
        gpus: How many it has.
        is_filled_in: Whether Ray asks the provider for what is not said, and so need not be told.
    """
    resources = findings.at((*keys, "resources"))
    told = resources.get("GPU", gpus if is_filled_in else 0)
    if told != gpus:
        at = (*keys, "resources", "GPU") if "GPU" in resources else (*keys, "resources")
        has = f"{gpus} {gpu}" if gpus else "none"
        findings.add(at, f"Ray is told of {told} GPUs, and the machine has {has}: it must be `GPU: {gpus}`.")
    if shape and resources.get("CPU", 0) > shape.vcpus:
        text = f"Ray is told of {resources['CPU']} CPUs, and {shape.name} has {shape.vcpus} vCPUs; that many at most."
        findings.add((*keys, "resources", "CPU"), text)
    label = findings.at((*keys, "labels", nodes.ACCELERATOR))
    if label is not None and label != gpu:
        right = f"it must be {gpu}" if gpu else "the machine has no GPU"
        findings.add((*keys, "labels", nodes.ACCELERATOR), f"the label is {label!r}; {right}.")
