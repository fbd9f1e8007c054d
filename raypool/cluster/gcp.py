"""Clusters on Google Cloud: writes the file for Ray's launcher, and checks one.

Source: the reference of Compute Engine's `instances.insert`, its pages "GPU machine types", "Spot
VMs" and "Choose a disk type"; Ray's `autoscaler/_private/gcp`; the rules for names are those of the
pages "Naming resources" and "Label resources".
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator

from raypool.cluster import launcher_file, software
from raypool.cluster.documents import PLACEHOLDER, Findings, Keys, texts
from raypool.cluster.machines import Gpu, catalogue, region_of
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

HEAD_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
GPU_IMAGES = "projects/deeplearning-platform-release/global/images/family/"

# Families of machines that boot from these disks only. Others get pd-balanced: Compute Engine's own
# default is a spinning disk, which takes minutes to read, and which newer machines do not have.
HYPERDISK_ONLY = ("a3-ultragpu-", "a4-", "a4x-", "g4-", "n4-", "c4-", "c4a-", "c4d-")

OS_LOGIN = (
    "If SSH is refused, the project may enforce OS Login, which ignores the key that Ray makes: add"
    " `metadata: {items: [{key: enable-oslogin, value: 'FALSE'}]}` to each node_config."
)

STORAGE = "https://www.googleapis.com/auth/devstorage.read_write"

# Compute Engine takes 63 letters; Ray makes "ray-NAME-worker-12345678-compute" of the name
NAME_LIMIT = 35

_ACCELERATOR = {
    "type": "object",
    "required": ["acceleratorType", "acceleratorCount"],
    "properties": {
        "acceleratorType": {"type": "string"},
        "acceleratorCount": {"type": "integer", "minimum": 1},
    },
}
_ACCELERATORS = {"type": "array", "minItems": 1, "maxItems": 1, "items": _ACCELERATOR}
SHAPE = Draft7Validator(
    {
        "type": "object",
        "required": ["machineType"],
        "properties": {
            "machineType": {"type": "string"},
            "guestAccelerators": _ACCELERATORS,
            "scheduling": {"type": "object"},
        },
    }
)
"""What the checks of GPUs rely on, and Google's description lacks."""


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan does not say where, or a machine cannot have its GPUs.

    Example:
        >>> head = NodeGroup(name="head", machine="n2-standard-4")
        >>> worker = NodeGroup(name="worker", machine="n1-standard-8", gpu="T4", gpus=1, most=4)
        >>> here = {"name": "lab", "provider": "gcp", "zone": "us-central1-a"}
        >>> file = write(ClusterPlan(**here, head=head, workers=(worker,)))
        >>> file["available_node_types"]["worker"]["resources"]
        {'CPU': 8, 'GPU': 1, 'accelerator_type:T4': 1}
    """
    if plan.zone is None:
        raise CloudError(
            f"The plan of {plan.name} does not say in which zone. `raypool cluster machines --gpu"
            " T4` lists zones."
        )
    if "," in plan.zone:
        raise CloudError(
            f"{plan.zone} names several zones, and Ray's launcher puts all machines of a cluster on"
            " Google Cloud into one. Name one, or use --provider sky, which tries several."
        )
    provider = {
        "type": "gcp",
        "project_id": plan.project or "<your project>",
        "region": plan.region,
        "availability_zone": plan.zone,
    }
    return launcher_file.launcher_file(plan, provider, lambda group: _instance(plan, group))


def _instance(plan: ClusterPlan, group: NodeGroup) -> dict[str, Any]:
    kind = "hyperdisk-balanced" if group.machine.startswith(HYPERDISK_ONLY) else "pd-balanced"
    disk = {
        "diskSizeGb": group.disk_gb,
        "diskType": f"zones/{plan.zone}/diskTypes/{kind}",
        "sourceImage": (
            f"{GPU_IMAGES}{software.image('gcp', [group.gpu or ''])['name']}"
            if group.gpus or plan.image  # these have Docker, too
            else HEAD_IMAGE
        ),
    }
    instance: dict[str, Any] = {
        "machineType": group.machine,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
    }
    shape = catalogue("gce").machines.get(group.machine)
    if group.gpu and shape and shape.gpu is None:
        accelerator = catalogue("gce").gpu(group.gpu).accelerator
        instance["guestAccelerators"] = [
            {"acceleratorType": accelerator, "acceleratorCount": group.gpus}
        ]
    if group.spot:
        instance["scheduling"] = {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
        }
    elif group.gpus:  # a machine with GPUs cannot move elsewhere
        instance["scheduling"] = {"onHostMaintenance": "TERMINATE"}
    if group is not plan.head:  # Ray gives the head an account that may make machines
        instance["serviceAccounts"] = [{"email": "default", "scopes": [STORAGE]}]
    return instance


def rented(config: dict[str, Any]) -> tuple[str, str | None, int, bool]:
    """Return what a node_config rents: machine, kind and number of GPUs, and if it is spot."""
    machine = str(config.get("machineType")).rpartition("/")[2]
    scheduling = config.get("scheduling") or {}
    spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True
    for attached in config.get("guestAccelerators") or ():
        kind = catalogue("gce").gpu(attached["acceleratorType"].rpartition("/")[2])
        return machine, kind.name, attached["acceleratorCount"], spot
    shape = catalogue("gce").shape(machine)
    return machine, shape.gpu, shape.gpus, spot


def check(findings: Findings) -> None:
    """Note entries that Compute Engine would refuse, or accept although they cannot work."""
    findings.check_form(
        ("cluster_name",),
        rf"[a-z][-a-z0-9]{{0,{NAME_LIMIT - 1}}}",
        "cluster_name is {}; the names of machines begin with it, so it may have lower-case"
        f" letters, digits and dashes, a letter first, {NAME_LIMIT} at most.",
    )
    zone = _check_place(findings)
    if _schema() is None:
        text = (
            "google-api-python-client is not installed here, so the names of Google's settings were"
            " not checked."
        )
        findings.doubt(("provider",), text)
    for name in findings.at(("available_node_types",)) or ():
        keys: Keys = ("available_node_types", name)
        if not re.fullmatch(r"[a-z0-9_-]{1,63}", name):
            findings.add(
                keys,
                f"{name!r} becomes a label of machines, which has lower-case letters, digits, - and"
                " _ only.",
            )
        _check_type(findings, keys, zone)


def _check_place(findings: Findings) -> str | None:
    """Check project and zone; return the zone, None if not filled in."""
    names = ("project_id", "region", "availability_zone")
    project, region, zone = given = [findings.at(("provider", name)) for name in names]
    for name in (name for name, value in zip(names, given, strict=True) if not value):
        findings.add(("provider",), f"{name} is missing in provider.")
    is_given = isinstance(project, str) and not project.startswith(PLACEHOLDER)
    if is_given and (wrong := why_no_project(project)):
        findings.add(("provider", "project_id"), f"project_id is {wrong}")
    if not isinstance(zone, str) or zone.startswith(PLACEHOLDER):
        return None
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone):
        findings.add(
            ("provider", "availability_zone"),
            f"{zone!r} is no zone; one is named like us-central1-a.",
        )
        return None
    if region is not None and region_of(zone) != region:
        findings.add(
            ("provider", "region"),
            f"region is {region!r}, and the zone {zone} lies in {region_of(zone)}.",
        )
    return zone


def why_no_project(project: str) -> str | None:
    """Return why a project's name is invalid, None if it is valid.

    Example:
        >>> why_no_project("my-project"), why_no_project("p")
        (None, "'p'; an ID has 6 to 30 lower-case letters, digits and dashes (`gcloud projects...
    """
    if re.fullmatch("([a-z.]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", project):
        return None
    return (
        f"{project!r}; an ID has 6 to 30 lower-case letters, digits and dashes (`gcloud projects"
        " list`)."
    )


def _check_type(findings: Findings, keys: Keys, zone: str | None) -> None:
    """Check a node type."""
    config = (*keys, "node_config")
    scheduling = findings.at((*config, "scheduling"))
    if isinstance(scheduling, list):  # as in Ray's own examples
        text = "Google describes scheduling as a mapping, not a list; write it without the dash."
        findings.doubt((*config, "scheduling"), text)
        return
    findings.check_schema(_schema() or SHAPE, config)
    if not SHAPE.is_valid(findings.at(config)):
        return  # the next checks rely on it
    for at, text in texts(findings.at(config)):
        place = re.match(r"(?:https?://.*/)?(?:projects/[^/]+/)?zones/([^/]+)/", text)
        if place is not None and zone not in (None, place[1]):
            findings.add(
                (*config, *at),
                f"{at[-1]} is in {place[1]}, and the cluster is in {zone}: it must be the same"
                " zone.",
            )
    _check_gpus(findings, keys, zone)


@functools.cache
def _schema() -> Draft7Validator | None:
    """Return Google's schema of an instance, from its client library; None without."""
    client = importlib.util.find_spec("googleapiclient")
    if client is None or client.origin is None:
        return None
    file = Path(client.origin).with_name("discovery_cache") / "documents" / "compute.v1.json"
    known = json.loads(file.read_text(encoding="utf-8"))["schemas"]
    # Ray hands it on apart from the instance
    known["Instance"]["properties"]["sourceInstanceTemplate"] = {"type": "string"}
    schemas = {name: _strict(schema) for name, schema in known.items()}
    return Draft7Validator(
        {"allOf": [{"$ref": "#/schemas/Instance"}, SHAPE.schema], "schemas": schemas}
    )


def _strict(described: dict[str, Any]) -> dict[str, Any]:
    """Return a part of Google's description as a schema that refuses unknown settings."""
    if "$ref" in described:
        return {"$ref": f"#/schemas/{described['$ref']}"}
    # "any" is Google's word for a value of any type, and no type of JSON schemas
    schema: dict[str, Any] = {
        name: described[name] for name in ("type", "enum") if described.get(name, "any") != "any"
    }
    if described.get("format") in ("int64", "uint64"):
        schema["type"] = ["string", "integer"]  # JSON has no whole numbers of 64 bits
    if "items" in described:
        schema["items"] = _strict(described["items"])
    if "properties" in described:
        schema["properties"] = {
            name: _strict(each) for name, each in described["properties"].items()
        }
        schema["additionalProperties"] = False
    return schema


def _check_gpus(findings: Findings, keys: Keys, zone: str | None) -> None:
    """Check a node type's machine, its GPUs, and related settings."""
    config, gce = (*keys, "node_config"), catalogue("gce")
    machine = findings.at((*config, "machineType")).rpartition("/")[2]
    attached = (findings.at((*config, "guestAccelerators")) or [None])[0]
    shape, kind, gpus = gce.machines.get(machine), None, 0
    if attached is not None:
        at = (*config, "guestAccelerators", 0, "acceleratorType")
        kind = _gpu(findings, at, attached["acceleratorType"].rpartition("/")[2])
        gpus = attached["acceleratorCount"]
    elif shape is not None and shape.gpu is not None:
        kind, gpus = gce.gpu(shape.gpu), shape.gpus
    is_made_to_measure = re.fullmatch(r"([a-z]\w*-)?custom-\d+-\d+(-ext)?", machine) is not None
    try:
        if not is_made_to_measure:  # these are in no catalogue
            gce.machine(machine)
        if kind is not None and zone is not None:
            gce.check_place(zone, kind.name)
    except CloudError as error:
        place: Keys = ("provider", "availability_zone")
        findings.unlisted((*config, "machineType") if shape is None else place, str(error))
    if shape is not None and kind is not None:
        try:
            gce.check(machine, kind.name, gpus)
        except CloudError as error:
            findings.add((*config, "guestAccelerators"), str(error))
    if (shape is not None or is_made_to_measure) and (attached is None or kind is not None):
        launcher_file.check_resources(findings, keys, shape, kind.name if kind else None, gpus)
    if kind is not None:
        _check_images(findings, config, kind.name)
    _check_scheduling(findings, config, gpus > 0)


def _check_images(findings: Findings, config: Keys, gpu: str) -> None:
    """Note a boot image whose driver does not go with a GPU."""
    for at, text in texts(findings.at((*config, "disks"))):
        driver = re.search(r"/images/.*-nvidia-(\d+)", text)
        if driver and (why := software.why_no_driver(gpu, int(driver[1]))):
            right = software.image("gcp", [gpu])["name"]
            findings.add((*config, "disks", *at), f"{why}. The family {right} has one.")
        elif "ubuntu-os-cloud" in text:
            findings.doubt((*config, "disks", *at), f"this image has no driver for {gpu} GPUs.")


def _gpu(findings: Findings, keys: Keys, accelerator: str) -> Gpu | None:
    """Return the GPU with Compute Engine's name; None if unknown."""
    try:
        gpu = catalogue("gce").gpu(accelerator)
    except CloudError as error:
        # one that the catalogue has as gone is a mistake; any other may be newer than the catalogue
        is_gone = any(each.accelerator == accelerator for each in catalogue("gce").gpus.values())
        (findings.add if is_gone else findings.unlisted)(keys, str(error))
        return None
    if gpu.accelerator != accelerator:
        findings.add(
            keys, f"acceleratorType is {accelerator!r}; Compute Engine calls it {gpu.accelerator}."
        )
    return gpu


def _check_scheduling(findings: Findings, config: Keys, has_gpus: bool) -> None:
    scheduling = findings.at((*config, "scheduling")) or {}
    is_spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True
    at = (*config, "scheduling") if scheduling else config
    if (is_spot or has_gpus) and scheduling.get("onHostMaintenance") != "TERMINATE":
        which = "a spot machine" if is_spot else "a machine with GPUs"
        findings.add(
            at,
            f"{which} cannot move elsewhere: scheduling must say `onHostMaintenance: TERMINATE`.",
        )
    if is_spot and scheduling.get("automaticRestart") is not False:
        findings.add(
            at,
            "a spot machine does not start again by itself: scheduling must say `automaticRestart:"
            " false`.",
        )
