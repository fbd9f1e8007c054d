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
from raypool.cluster.documents import NO_CLIENT, PLACEHOLDER, Findings, form, texts
from raypool.cluster.launcher_file import Rented
from raypool.cluster.machines import catalogue, region_of
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

HEAD_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
GPU_IMAGES = "projects/deeplearning-platform-release/global/images/family/"

# Families of machines that boot from these disks only. Others get pd-balanced: Compute Engine's own
# default is a spinning disk, which takes minutes to read, and which newer machines do not have.
HYPERDISK_ONLY = ("a3-ultragpu-", "a4-", "a4x-", "g4-", "n4-", "c4-", "c4a-", "c4d-")

OS_LOGIN = (
    "If SSH is refused, the project may enforce OS Login, which ignores the key that Ray makes."
    " Add `metadata: {items: [{key: enable-oslogin, value: 'FALSE'}]}` to each node_config."
)

STORAGE = "https://www.googleapis.com/auth/devstorage.read_write"

# Compute Engine takes 63 letters; Ray makes "ray-NAME-worker-12345678-compute" of the name
NAME_LIMIT = 35

_NAME = form(
    rf"[a-z][-a-z0-9]{{0,{NAME_LIMIT - 1}}}",
    f"begin with a letter and have at most {NAME_LIMIT} lower-case letters, digits and dashes:"
    " machine names begin with it",
)
_PROJECT = form(
    "([a-z.]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
    "be an ID of 6 to 30 lower-case letters, digits and dashes (`gcloud projects list`)",
)
_ZONE = form(r"[a-z]+-[a-z]+\d+-[a-z]", "be a zone, such as us-central1-a")
_PROVIDER = {
    "required": ["project_id", "region", "availability_zone"],
    "properties": {"project_id": _PROJECT, "availability_zone": _ZONE},
}
FILE = Draft7Validator({"properties": {"cluster_name": _NAME, "provider": _PROVIDER}})
"""The rules for names."""

SHAPE = Draft7Validator(
    {
        "type": "object",
        "required": ["machineType"],
        "properties": {
            "machineType": {"type": "string"},
            "guestAccelerators": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "required": ["acceleratorType", "acceleratorCount"],
                    "properties": {
                        "acceleratorType": {"type": "string"},
                        "acceleratorCount": {"type": "integer", "minimum": 1},
                    },
                },
            },
            "scheduling": {"type": "object"},
        },
    }
)
"""Rules that the checks of a `node_config` need, and Google's description lacks."""

ENDS = {"onHostMaintenance": "TERMINATE"}  # spot machines and machines with GPUs cannot move
SPOT = {
    "provisioningModel": "SPOT",
    "instanceTerminationAction": "DELETE",
    **ENDS,
    "automaticRestart": False,
}
"""The scheduling of spot machines."""


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    Raises:
        CloudError: The plan does not name one zone, or a machine cannot have its GPUs.
    """
    if "," in (plan.zone or ""):
        raise CloudError(
            f"{plan.zone} names several zones, but Ray's launcher puts all machines of a cluster"
            " on Google Cloud into one. Choose one, or use --provider sky, which tries several."
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
            if group.gpus or plan.image  # these images have Docker, too
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
    if group.spot or group.gpus:
        instance["scheduling"] = dict(SPOT if group.spot else ENDS)
    if group is not plan.head:  # Ray gives the head an account that may make machines
        instance["serviceAccounts"] = [{"email": "default", "scopes": [STORAGE]}]
    return instance


def rented(config: dict[str, Any]) -> Rented:
    """Return what a `node_config` rents; raise a CloudError for an unknown GPU."""
    machine = str(config.get("machineType")).rpartition("/")[2]  # else a template names it
    spot = _is_spot(config.get("scheduling") or {})
    for attached in config.get("guestAccelerators") or ():
        kind = catalogue("gce").gpu(attached["acceleratorType"].rpartition("/")[2])
        return Rented(machine, kind.name, attached["acceleratorCount"], spot)
    shape = catalogue("gce").shape(machine)
    return Rented(machine, shape.gpu, shape.gpus, spot)


def _is_spot(scheduling: dict[str, Any]) -> bool:
    return scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True


def check(findings: Findings) -> None:
    """Note entries that Compute Engine would refuse, or accept although they cannot work."""
    findings.check_schema(FILE)
    provider = findings.within("provider")
    region, zone = provider.at("region"), provider.at("availability_zone")
    if not isinstance(zone, str) or zone.startswith(PLACEHOLDER):
        zone = None
    elif region not in (None, region_of(zone)):
        provider.add(f"region is {region!r}, but zone {zone} is in {region_of(zone)}.", "region")
    if _schema() is None:
        provider.doubt(NO_CLIENT.format("google-api-python-client"))
    for name in findings.at("available_node_types") or ():
        node = findings.within("available_node_types", name)
        if not re.fullmatch(r"[a-z0-9_-]{1,63}", name):
            node.add(
                f"{name!r} becomes a label of machines: use only lower-case letters, digits, -"
                " and _."
            )
        _check_type(node, zone)


def _check_type(node: Findings, zone: str | None) -> None:
    """Check a node type: its settings, and the machine and GPUs that they ask for."""
    config = node.within("node_config")
    if isinstance(config.at("scheduling"), list):  # as in Ray's own examples
        text = "scheduling must be a mapping, not a list. Write it without the dash."
        config.doubt(text, "scheduling")
        return
    config.check_schema(_schema() or SHAPE)
    settings = config.at()
    if not SHAPE.is_valid(settings):
        return  # the next checks rely on it
    for at, text in texts(settings):
        place = re.match(r"(?:https?://.*/)?(?:projects/[^/]+/)?zones/([^/]+)/", text)
        if place is not None and zone not in (None, place[1]):
            config.add(
                f"{at[-1]} is in {place[1]}, but the cluster is in {zone}: both must be the same.",
                *at,
            )
    gpu, gpus = _check_machine(node, zone)
    scheduling = config.at("scheduling") or {}
    is_spot = _is_spot(scheduling)
    which = "spot machines" if is_spot else "machines with GPUs"
    wanted = {**ENDS, "automaticRestart": False} if is_spot else ENDS if gpus else {}
    for name, value in wanted.items():
        if scheduling.get(name) != value:
            text = f"{which} need `{name}: {json.dumps(value)}` under scheduling."
            config.add(text, *(["scheduling"] if scheduling else []))
    for at, text in texts(settings.get("disks")):
        driver = re.search(r"/images/.*-nvidia-(\d+)", text)
        if gpu and driver and (why := software.why_no_driver(gpu, int(driver[1]))):
            family = software.image("gcp", [gpu])["name"]
            config.add(f"{why}. The family {family} has one.", "disks", *at)
        elif gpu and "ubuntu-os-cloud" in text:
            config.doubt(f"this image has no driver for {gpu} GPUs.", "disks", *at)


def _check_machine(node: Findings, zone: str | None) -> tuple[str | None, int]:
    """Check a node type's machine and GPUs; return the kind of GPU, None if unknown, and number."""
    config, gce = node.within("node_config"), catalogue("gce")
    machine = config.at("machineType").rpartition("/")[2]
    shape = gce.machines.get(machine)
    accelerator = ("guestAccelerators", 0, "acceleratorType")
    name = config.at(*accelerator)
    try:
        _, gpu, gpus, _ = rented(config.at())
    except CloudError as error:
        # a retired GPU is a mistake; another may be newer than the catalogue
        is_gone = name in (each.accelerator for each in gce.gpus.values())
        (config.add if is_gone else config.unlisted)(str(error), *accelerator)
        return None, 1  # some GPU: the rules for scheduling hold for all
    right = gce.gpu(gpu).accelerator if gpu else None
    if name and name.rpartition("/")[2] != right:
        text = f"acceleratorType is {name!r}; Compute Engine's name is {right}."
        config.add(text, *accelerator)
    is_custom = re.fullmatch(r"([a-z]\w*-)?custom-\d+-\d+(-ext)?", machine) is not None
    try:
        if not is_custom:  # these are in no catalogue
            gce.machine(machine)
        if gpu and zone:
            gce.check_place(zone, gpu)
    except CloudError as error:
        if shape:
            config.whole().unlisted(str(error), "provider", "availability_zone")
        else:
            config.unlisted(str(error), "machineType")
    if shape or is_custom:
        launcher_file.check_resources(node, gpu, gpus)
    try:
        if shape and gpu:
            gce.check(machine, gpu, gpus)
    except CloudError as error:
        config.add(str(error), "guestAccelerators")
    return gpu, gpus


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
