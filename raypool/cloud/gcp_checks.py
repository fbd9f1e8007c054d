"""What Compute Engine would refuse of a file for Ray's launcher, or would take although it cannot work.

Source: as `gcp`; the rules for names are those of the pages "Naming resources" and "Label resources".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jsonschema import Draft7Validator

from raypool.cloud import resource_checks, schema_checks
from raypool.cloud.documents import PLACEHOLDER, Findings, Keys
from raypool.cloud.machines import Gpu, Machine, catalogue
from raypool.cloud.zones import region_of
from raypool.errors import CloudError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PROVIDER = _words("type project_id region availability_zone use_internal_ips gcp_credentials cache_stopped_nodes")

# What Ray and Compute Engine know; a test compares them with Google's own description of its API.
INSTANCE = _words("""
    advancedMachineFeatures canIpForward confidentialInstanceConfig deletionProtection description disks displayDevice
    guestAccelerators hostname instanceEncryptionKey keyRevocationActionType labels localSsdEncryptionMode machineType metadata
    minCpuPlatform networkInterfaces networkPerformanceConfig params privateIpv6GoogleAccess reservationAffinity resourcePolicies
    scheduling serviceAccounts shieldedInstanceConfig shieldedInstanceIntegrityPolicy sourceMachineImage
    sourceMachineImageEncryptionKey tags workloadIdentityConfig
""")
TEMPLATE = "sourceInstanceTemplate"  # Ray takes it out of the instance and hands it on apart
DISK = _words("""
    autoDelete boot deviceName diskEncryptionKey diskSizeGb forceAttach guestOsFeatures initializeParams interface mode source
    type
""")
SCHEDULING = _words("""
    automaticRestart availabilityDomain exposeHostTopology gracefulShutdown hostErrorTimeoutSeconds instanceTerminationAction
    localSsdRecoveryTimeout locationHint maxRunDuration minNodeCpus nodeAffinities onHostMaintenance onInstanceStopAction
    preemptible preemptionNoticeDuration protectionTier provisioningModel skipGuestOsShutdown terminationTime
""")
ACCELERATOR = _words("acceleratorType acceleratorCount")


def _mapping(known: Iterable[str], required: Iterable[str] = (), **kinds: object) -> dict[str, object]:
    """Return the schema of a mapping that has some of the known entries, of which some are of certain kinds."""
    properties = {**dict.fromkeys(known, True), **kinds}
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


_TEXT = {"type": "string"}
_PARAMETERS = {"type": "object", "properties": {"diskType": _TEXT, "sourceImage": _TEXT}}
_ACCELERATOR = _mapping((), ACCELERATOR, acceleratorType=_TEXT, acceleratorCount={"type": "integer", "minimum": 1})
_MODELS = ["STANDARD", "SPOT", "FLEX_START", "RESERVATION_BOUND"]

NODE_CONFIG = Draft7Validator(
    _mapping(
        {*INSTANCE, TEMPLATE},
        ["machineType"],
        machineType=_TEXT,
        disks={"type": "array", "minItems": 1, "items": _mapping(DISK, initializeParams=_PARAMETERS)},
        guestAccelerators={"type": "array", "maxItems": 1, "minItems": 1, "items": _ACCELERATOR},
        scheduling=_mapping(SCHEDULING, provisioningModel={"enum": _MODELS}),
    )
)

NAME_LIMIT = 35  # Compute Engine takes 63 letters; Ray makes "ray-NAME-worker-12345678-compute" of the name


def check(findings: Findings) -> None:
    """Note what is wrong with a file whose entries are of the right kinds."""
    _check_name(findings)
    _check_place(findings)
    for name in findings.at(("available_node_types",)) or ():
        _check_type(findings, name)


def _check_name(findings: Findings) -> None:
    name = findings.at(("cluster_name",))
    if not re.fullmatch(rf"[a-z][-a-z0-9]{{0,{NAME_LIMIT - 1}}}", name) and not name.startswith(PLACEHOLDER):
        right = f"lower-case letters, digits and dashes, a letter first, {NAME_LIMIT} at most"
        findings.add(("cluster_name",), f"cluster_name is {name!r}; the names of machines begin with it, so it may have {right}.")


def why_no_project(project: str) -> str | None:
    """Return why a project cannot be called so, None if it can.

    Example:
        >>> why_no_project("my-project"), why_no_project("p")
        (None, "'p'; an ID has 6 to 30 lower-case letters, digits and dashes (`gcloud projects list`).")
    """
    if re.fullmatch("([a-z.]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", project):
        return None
    return f"{project!r}; an ID has 6 to 30 lower-case letters, digits and dashes (`gcloud projects list`)."


def _check_place(findings: Findings) -> None:
    findings.check_keys(("provider",), PROVIDER)
    for name in ("project_id", "region", "availability_zone"):
        if not findings.at(("provider", name)):
            findings.add(("provider",), f"{name} is missing in provider.")
    project = findings.at(("provider", "project_id"))
    if isinstance(project, str) and not project.startswith(PLACEHOLDER) and (wrong := why_no_project(project)) is not None:
        findings.add(("provider", "project_id"), f"project_id is {wrong}")
    region, zone = (findings.at(("provider", name)) for name in ("region", "availability_zone"))
    if _is_open(zone):
        return
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone):
        findings.add(("provider", "availability_zone"), f"{zone!r} is no zone; one is named like us-central1-a.")
    elif region is not None and region_of(zone) != region:
        findings.add(("provider", "region"), f"region is {region!r}, and the zone {zone} lies in {region_of(zone)}.")


def _is_open(text: Any) -> bool:
    """Say whether something is missing, or still to be filled in."""
    return not isinstance(text, str) or text.startswith(PLACEHOLDER)


def _check_type(findings: Findings, name: str) -> None:
    """Look at a type of node."""
    keys: Keys = ("available_node_types", name)
    if not re.fullmatch(r"[a-z0-9_-]{1,63}", name):
        findings.add(keys, f"{name!r} becomes a label of machines, which has lower-case letters, digits, - and _ only.")
    config: Keys = (*keys, "node_config")
    if not schema_checks.check(findings, NODE_CONFIG, config):
        return
    _check_disks(findings, config)
    found = _check_gpus(findings, config, findings.at((*config, "machineType")).rpartition("/")[2])
    if found is not None:
        shape, kind, gpus = found
        _check_scheduling(findings, config, gpus > 0)
        resource_checks.check(findings, keys, shape, kind.name if kind else None, gpus)


def _check_disks(findings: Findings, config: Keys) -> None:
    disks = findings.at((*config, "disks"))
    if disks is None:
        if findings.at((*config, TEMPLATE)) is None:
            findings.add(config, "disks is missing in node_config: a list, with the disk that the machine boots from.")
        return
    if not any(disk.get("boot") is True for disk in disks):
        findings.add((*config, "disks"), "the machine boots from none of its disks: one must have `boot: true`.")
    for number, disk in enumerate(disks):
        _check_disk(findings, (*config, "disks", number), disk)


def _check_disk(findings: Findings, keys: Keys, disk: dict[str, Any]) -> None:
    parameters = disk.get("initializeParams", {})
    if disk.get("boot") and not disk.get("source") and not parameters.get("sourceImage"):
        findings.add(keys, "the disk says no sourceImage under initializeParams: what the machine is to boot.")
    zone = findings.at(("provider", "availability_zone"))
    kind = parameters.get("diskType")
    if kind is None or _is_open(zone):
        return
    at = (*keys, "initializeParams", "diskType")
    place = re.search(r"zones/([^/]+)/diskTypes/", kind)
    if place is None:
        right = f"zones/{zone}/diskTypes/{kind.rpartition('/')[2]}"
        findings.add(at, f"diskType is {kind!r}; it must say the zone: {right}.")
    elif place[1] != zone:
        findings.add(at, f"the disk is to be in {place[1]}, and the cluster is in {zone}: it must be the same zone.")


def _check_gpus(findings: Findings, config: Keys, machine: str) -> tuple[Machine | None, Gpu | None, int] | None:
    """Look at the machine and its GPUs.

    Returns:
        What it is, the kind of its GPUs and how many there are; None if that cannot be known.
    """
    gce = catalogue("gce")
    try:
        shape = None if _is_custom(machine) else gce.machine(machine)
    except CloudError as error:
        findings.add((*config, "machineType"), str(error))
        return None
    attached = findings.at((*config, "guestAccelerators"))
    if attached is None:
        kind = gce.gpu(shape.gpu) if shape and shape.gpu else None
        gpus = shape.gpus if shape else 0
    else:
        found = _attached(findings, (*config, "guestAccelerators", 0), attached[0])
        if found is None:
            return None
        kind, gpus = found
        if shape:
            _note(findings, (*config, "guestAccelerators"), gce.check, machine, kind.name, gpus)
    if kind is not None:
        _check_zone(findings, kind)
    return shape, kind, gpus


def _check_zone(findings: Findings, kind: Gpu) -> None:
    zone = findings.at(("provider", "availability_zone"))
    if not _is_open(zone) and zone not in kind.zones:
        near = [each for each in kind.zones if region_of(each) == region_of(zone)] or kind.zones
        findings.add(("provider", "availability_zone"), f"{zone} has no {kind.name}. These have: {', '.join(near)}.")


def _is_custom(machine: str) -> bool:
    """Say whether a machine is made to measure: "n1-custom-8-16384"."""
    return re.fullmatch(r"([a-z]\w*-)?custom-\d+-\d+(-ext)?", machine) is not None


def _note(findings: Findings, keys: Keys, ask: Any, *arguments: object) -> None:
    try:
        ask(*arguments)
    except CloudError as error:
        findings.add(keys, str(error))


def _attached(findings: Findings, keys: Keys, attached: dict[str, Any]) -> tuple[Gpu, int] | None:
    """Return the GPUs that are attached, None if there are none of that kind."""
    try:
        return _gpu(attached["acceleratorType"].rpartition("/")[2]), attached["acceleratorCount"]
    except CloudError as error:
        findings.add((*keys, "acceleratorType"), str(error))
        return None


def _gpu(accelerator: str) -> Gpu:
    """Return the GPU that Compute Engine calls so; it knows no other spelling.

    Raises:
        CloudError: There is none.
    """
    gpu = catalogue("gce").gpu(accelerator)
    if gpu.accelerator != accelerator:
        raise CloudError(f"acceleratorType is {accelerator!r}; Compute Engine calls it {gpu.accelerator}.")
    return gpu


def _check_scheduling(findings: Findings, config: Keys, has_gpus: bool) -> None:
    keys = (*config, "scheduling")
    scheduling = findings.at(keys) or {}
    is_spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True
    at = keys if findings.at(keys) is not None else config
    if (is_spot or has_gpus) and scheduling.get("onHostMaintenance") != "TERMINATE":
        which = "a spot machine" if is_spot else "a machine with GPUs"
        findings.add(at, f"{which} cannot move elsewhere: scheduling must say `onHostMaintenance: TERMINATE`.")
    if is_spot and scheduling.get("automaticRestart") is not False:
        findings.add(at, "a spot machine does not start again by itself: scheduling must say `automaticRestart: false`.")
