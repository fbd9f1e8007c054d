"""Clusters on Google Cloud: the file for Ray's launcher, and what Compute Engine would refuse of one.

Source: the reference of Compute Engine's `instances.insert`, its pages "GPU machine types", "Spot VMs" and "Choose a disk type";
Ray's `autoscaler/_private/gcp`.
"""

from __future__ import annotations

from typing import Any

from raypool.cloud import nodes
from raypool.cloud.machines import catalogue
from raypool.cloud.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

HEAD_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
"""Ubuntu with NVIDIA's driver installed; it does for all GPUs but K80, which newer drivers do not know any more."""

# The families of machines that boot from these disks only. Others get pd-balanced: Compute Engine's own default are spinning
# disks, which take minutes to read what is installed, and which newer machines do not have.
HYPERDISK_ONLY = ("a3-ultragpu-", "a4-", "a4x-", "g4-", "n4-", "c4-", "c4a-", "c4d-")

STORAGE = "https://www.googleapis.com/auth/devstorage.read_write"


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan does not say where, or a machine cannot have the GPUs that it is to have.

    Example:
        >>> head = NodeGroup(name="head", machine="n2-standard-4")
        >>> worker = NodeGroup(name="worker", machine="n1-standard-8", gpu="T4", gpus=1, most=4, spot=True)
        >>> plan = ClusterPlan(name="lab", provider="gcp", zone="us-central1-a", head=head, workers=(worker,))
        >>> file = write(plan)
        >>> file["available_node_types"]["worker"]["resources"]
        {'CPU': 8, 'GPU': 1, 'accelerator_type:T4': 1}
    """
    if plan.zone is None:
        raise CloudError(f"The plan of {plan.name} does not say in which zone. `raypool cluster machines --gpu T4` lists zones.")
    provider = {
        "type": "gcp",
        "project_id": plan.project or "<your project>",
        "region": plan.region,
        "availability_zone": plan.zone,
    }
    return nodes.launcher_file(plan, provider, lambda group: _instance(plan, group))


def _instance(plan: ClusterPlan, group: NodeGroup) -> dict[str, Any]:
    """Return what Compute Engine is told of an instance."""
    instance: dict[str, Any] = {"machineType": group.machine, "disks": [_disk(plan, group)]}
    gpu = catalogue("gce").gpu(group.gpu) if group.gpu else None
    if gpu and catalogue("gce").machine(group.machine).gpu is None:
        instance["guestAccelerators"] = [{"acceleratorType": gpu.accelerator, "acceleratorCount": group.gpus}]
    if scheduling := _scheduling(group):
        instance["scheduling"] = scheduling
    if group is not plan.head:  # Ray gives the head an account that may make machines
        instance["serviceAccounts"] = [{"email": "default", "scopes": [STORAGE]}]
    return instance


def _disk(plan: ClusterPlan, group: NodeGroup) -> dict[str, Any]:
    kind = "hyperdisk-balanced" if group.machine.startswith(HYPERDISK_ONLY) else "pd-balanced"
    return {
        "boot": True,
        "autoDelete": True,
        "initializeParams": {
            "diskSizeGb": group.disk_gb,
            "diskType": f"zones/{plan.zone}/diskTypes/{kind}",
            "sourceImage": GPU_IMAGE if group.gpus else HEAD_IMAGE,
        },
    }


def _scheduling(group: NodeGroup) -> dict[str, Any]:
    """Return what is to happen when the machine below the instance is needed otherwise: those with GPUs cannot move elsewhere."""
    if group.spot:
        spot = {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"}
        return {**spot, "onHostMaintenance": "TERMINATE", "automaticRestart": False}
    return {"onHostMaintenance": "TERMINATE"} if group.gpus else {}
