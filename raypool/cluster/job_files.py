"""Training jobs: reads and checks `config.yaml` of AI Platform Training, and options that override
it.

The service no longer exists, but its files still describe machines. The master becomes the head of
a Ray cluster, where the job's script runs; workers, parameter servers and evaluators become groups
of machines beside it, of fixed size.

Source:
    Google Cloud, AI Platform Training: "Using GPUs for training models in the cloud", and
    TrainingInput in the discovery document of its API (ml.v1), which google-api-python-client has.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jsonschema import Draft7Validator

from raypool.cluster.documents import Document, Findings, Keys
from raypool.cluster.machines import Catalogue, catalogue
from raypool.cluster.packages import default_packages
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

INPUT = "trainingInput"
GROUPS = {
    "master": "head",
    "worker": "worker",
    "parameterServer": "parameter-server",
    "evaluator": "evaluator",
}
"""The group of machines for each role of a job; nodes have it in the label "raypool/role"."""

TIERS = {"BASIC": ("n1-standard-4", None, 0), "BASIC_GPU": ("n1-standard-8", "K80", 1)}
"""The scale tiers that are one machine: its type and GPUs. CUSTOM lists machines."""

UNUSED = {
    "runtimeVersion": "machines get the versions installed here",
    "pythonVersion": "machines get the Python that runs here",
    "enableWebAccess": "`raypool cluster connect` opens the dashboard",
}
"""Settings that have no effect, and why."""

ADD = "Write the cluster's file with --dry-run, and add"
UNABLE = {
    "hyperparameters": (
        "In the script, call raypool.parfor with a function that trains one configuration."
    ),
    "packageUris": "--package-path uploads your package, and --package installs its dependencies.",
    "scheduling": "`raypool job stop` stops a job.",
    "encryptionConfig": f"{ADD} it to the disks there.",
    "network": f"{ADD} networkInterfaces to each node_config there.",
    "serviceAccount": f"{ADD} serviceAccounts to each node_config there.",
    "tpuTfVersion": "There are no machines with TPUs.",
}
"""Settings that are not supported, and what to do instead."""


def _count(least: int) -> dict[str, Any]:
    # the API takes whole numbers as strings, too
    number = {"type": ["integer", "string"], "minimum": least, "pattern": "^[0-9]+$"}
    return {**number, "must": f"be a whole number, {least} or more"}


def _mapping(**settings: Any) -> dict[str, Any]:
    return {"type": "object", "properties": settings, "additionalProperties": False}


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {
    "type": "array",
    "items": {"type": "string", "must": 'be text: numbers need quotes, as in ["--steps", "100"]'},
}
_ACCELERATOR = _mapping(count=_count(1), type=_TEXT) | {"required": ["count", "type"]}
ROLE = _mapping(
    acceleratorConfig=_ACCELERATOR,
    diskConfig=_mapping(bootDiskSizeGb=_count(1), bootDiskType=_TEXT),
    imageUri=_TEXT,
    containerCommand=_TEXTS,
    containerArgs=_TEXTS,
    tpuTfVersion={},
)
FOLDER = {
    "type": "string",
    "pattern": r"^(/|(gs|s3)://[a-z0-9][a-z0-9._-]+[a-z0-9](/|$))",
    "must": "be gs://BUCKET/..., s3://BUCKET/... or an absolute path",
}
TRAINING = _mapping(
    scaleTier={
        "enum": ["CUSTOM", *TIERS],
        "must": f"be CUSTOM, with a list of machines, or one of {', '.join(TIERS)}",
    },
    region=_TEXT,
    jobDir=FOLDER,
    pythonModule=_TEXT,
    args=_TEXTS,
    useChiefInTfConfig={"type": "boolean"},
    **{f"{role}Type": _TEXT for role in GROUPS},
    **{f"{role}Count": _count(0) for role in GROUPS if role != "master"},
    **{f"{role}Config": ROLE for role in GROUPS},
    **{name: {} for name in (*UNUSED, *UNABLE) if name != "tpuTfVersion"},
) | {"required": ["scaleTier"]}
SCHEMA = Draft7Validator(
    _mapping(trainingInput=TRAINING, jobId=_TEXT, labels={}) | {"required": [INPUT]}
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training job that has been checked; None: the file does not say."""

    # Its machines, the master first. Each other group always has its `most` machines.
    groups: tuple[NodeGroup, ...]
    region: str | None = None  # the region of the machines ("us-central1")
    name: str | None = None  # the name of the job
    job_dir: str | None = None  # the folder for its outputs
    module: str | None = None  # the Python module to run
    args: tuple[str, ...] = ()  # the arguments of the module
    # The Docker image that everything runs in; None: the machines themselves.
    image: str | None = None
    container_command: tuple[str, ...] = ()  # the command to run in the image if there is no module
    # TensorFlow's name of the master in TF_CONFIG; None: TF_CONFIG is not set.
    chief: str | None = None
    notes: tuple[str, ...] = ()  # the settings that have no effect, and why

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of GPU, each once."""
        return tuple(dict.fromkeys(group.gpu for group in self.groups if group.gpu is not None))

    @property
    def machines(self) -> int:
        """The number of machines."""
        return 1 + sum(group.most for group in self.groups[1:])

    @property
    def gpus(self) -> int:
        """The number of GPUs of all machines together."""
        head, *workers = self.groups
        return head.gpus + sum(group.gpus * group.most for group in workers)

    def plan(
        self,
        *,
        name: str,
        project: str | None,
        zone: str,
        spot: bool,
        packages: tuple[str, ...],
        is_kept: bool,
    ) -> ClusterPlan:
        """Return the plan of the cluster of the job; the master is never a spot machine.

        With `is_kept` it does not delete itself when it is unused.
        """
        head, *workers = self.groups
        return ClusterPlan(
            name=name,
            provider="gcp",
            head=head,
            workers=tuple(replace(group, spot=spot) for group in workers),
            project=project,
            zone=zone,
            packages=default_packages("gcp", packages, is_image=self.image is not None),
            image=self.image,
            idle_shutdown_minutes=0 if is_kept else ClusterPlan.idle_shutdown_minutes,
        )


def is_training(content: Any) -> bool:
    """Whether the content of a file describes a training job, perhaps a wrong one."""
    return isinstance(content, dict) and not content.keys().isdisjoint(
        (INPUT, *TRAINING["properties"])
    )


def read(document: Document, *, trust: bool = False) -> Training:
    """Return the training job that a file describes.

    Machines and GPUs are those of AI Platform Training; in a file that names others, today's of
    Compute Engine.

    Raises:
        CloudError: The file has mistakes; the message lists all, with their places.
    """
    findings = Findings(document, trust)
    content = document.content
    findings.check_schema(SCHEMA)
    inputs = findings.within(INPUT)
    entries = inputs.at()
    if not isinstance(entries, dict):
        findings.finish()
    # The other checks rely on the types of entries, so they leave out those with a mistake.
    wrong = {problem.keys[1] for problem in findings.problems if len(problem.keys) > 1}
    settings = {name: value for name, value in entries.items() if name not in wrong}
    groups = _groups(inputs, settings, wrong)
    _check_roles(inputs, settings)
    for name, why in UNUSED.items():
        if name in settings:
            inputs.doubt(f"{name} is not used: {why}.", name)
    master = settings.get("masterConfig", {})
    chief = settings.get("useChiefInTfConfig")
    training = Training(
        groups=groups,
        region=settings.get("region"),
        name=content.get("jobId"),
        job_dir=settings.get("jobDir"),
        module=settings.get("pythonModule"),
        args=tuple(settings.get("args", ())),
        image=master.get("imageUri"),
        container_command=(
            *master.get("containerCommand", ()),
            *master.get("containerArgs", ()),
        ),
        chief=None if chief is None else "chief" if chief else "master",
    )
    if training.region is not None:
        try:
            catalogue("gce").check_place(training.region, *training.kinds)
        except CloudError as error:
            inputs.unlisted(str(error), "region")
    return replace(training, notes=findings.finish())


def _check_roles(inputs: Findings, settings: Mapping[str, Any]) -> None:
    """Note settings that are not supported, and containers of other roles than the master."""
    master, *others = (settings.get(f"{role}Config", {}) for role in GROUPS)
    image = master.get("imageUri")
    for role, config in zip(list(GROUPS)[1:], others, strict=True):
        if (other := config.get("imageUri", image)) != image:
            text = f"imageUri is {other!r}, but the master's is {image!r}: all must be the same."
            inputs.add(text, f"{role}Config", "imageUri")
        for name in {"containerCommand", "containerArgs"} & config.keys():
            text = f"{name} is not used: the job runs on the master only."
            inputs.doubt(text, f"{role}Config", name)
    for part in (inputs, *(inputs.within(f"{role}Config") for role in GROUPS)):
        for name, instead in UNABLE.items():
            if part.at(name) is not None:
                part.add(f"{name} is not supported. {instead}", name)


def check_today(training: Training) -> None:
    """Make sure that a job's machines still exist.

    Raises:
        CloudError: Some do not; the message ends with options that replace all machines.
    """
    gce, why = catalogue("gce"), None
    roles = {group: role for role, group in GROUPS.items()}
    words = ["--scale-tier", "custom"]
    for group in training.groups:
        machine, gpu, gpus = group.machine, group.gpu, group.gpus
        if machine not in gce.machines:
            continue  # a newer one
        try:
            gce.check(machine, gpu, gpus)
        except CloudError as error:
            why = why or f"{group.name}: {error}"
            gpu, gpus = "T4", next((n for n in (1, 2, 4) if n >= gpus), 4)
            if gpus not in gce.allowed(machine, gpu):
                machine = gce.smallest(gpu, gpus).name
        role = re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", roles[group.name])
        words += [f"--{role}-machine-type", machine]
        if gpu and (accelerator := gce.gpu(gpu).accelerator):
            words += [f"--{role}-accelerator", f"count={gpus},type={accelerator}"]
    if why is not None:
        raise CloudError(f"{why} Options override the file: {shlex.join(words)}")


# --- machines -------------------------------------------------------------------------------------


def _groups(
    inputs: Findings, settings: Mapping[str, Any], wrong: set[Any]
) -> tuple[NodeGroup, ...]:
    """Return a job's groups of machines, the master's first; note those that cannot exist."""
    tier = settings.get("scaleTier")
    if tier == "CUSTOM":
        known = _catalogue(settings)
        groups = (_group(inputs, settings, role, known, wrong) for role in GROUPS)
        return tuple(group for group in groups if group is not None)
    if tier is None:
        return ()
    machine, gpu, gpus = TIERS[tier]
    for name in settings:
        if re.fullmatch(f"({'|'.join(GROUPS)})(Type|Count|Config)", name):
            inputs.add(f"{name} needs scaleTier CUSTOM; {tier} is a single {machine}.", name)
    return (NodeGroup(name=GROUPS["master"], machine=machine, gpu=gpu, gpus=gpus),)


def _catalogue(settings: Mapping[str, Any]) -> Catalogue:
    """Return the old catalogue, or today's if only that has all machines of the file."""

    def has_all(known: Catalogue) -> bool:
        for role in GROUPS:
            if settings.get(f"{role}Type", "n1-standard-4") not in known.machines:
                return False
            gpus = settings.get(f"{role}Config", {}).get("acceleratorConfig")
            try:
                known.gpu(gpus["type"] if gpus else "T4")
            except CloudError:  # unknown there, or retired
                return False
        return True

    then, today = catalogue("ai-platform-2021"), catalogue("gce")
    return today if has_all(today) and not has_all(then) else then


def _group(
    inputs: Findings,
    settings: Mapping[str, Any],
    role: str,
    known: Catalogue,
    wrong: set[Any],
) -> NodeGroup | None:
    """Return the machines of a role; None if it has none, or a mistake was noted."""
    name_type, name_count, name_config = (f"{role}{each}" for each in ("Type", "Count", "Config"))
    given = [name for name in (name_type, name_config) if name in settings]
    if role == "master" or name_count in wrong:
        count = 1
    elif (count := int(settings.get(name_count, 0))) == 0:
        if given and name_count not in settings:
            inputs.add(f"{given[0]} is set, but {name_count} is not.", given[0])
        return None
    if {name_type, name_config} & wrong:
        return None
    if name_type not in settings:
        text = f"{name_type} is missing. Set the machine type, such as n1-highcpu-16."
        inputs.add(text, *([] if role == "master" else [name_count]))
        return None
    machine, config = known.shape(settings[name_type]), settings.get(name_config, {})
    gpu, gpus = machine.gpu, machine.gpus
    keys: Keys = (name_type,)
    try:
        known.machine(machine.name)
    except CloudError as error:
        inputs.unlisted(str(error), *keys)
    if attached := config.get("acceleratorConfig"):
        gpu, gpus = attached["type"], int(attached["count"])
        keys = (name_config, "acceleratorConfig")
    try:
        gpu = known.gpu(gpu).name if gpu else None
        if machine.name in known.machines:
            known.check(machine.name, gpu, gpus)
    except CloudError as error:
        inputs.add(str(error), *keys)
        return None
    size = 0 if role == "master" else count
    group = NodeGroup(
        name=GROUPS[role],
        machine=machine.compute or machine.name,
        gpu=gpu,
        gpus=gpus,
        least=size,
        most=size,
    )
    disk = config.get("diskConfig", {}).get("bootDiskSizeGb")
    return group if disk is None else replace(group, disk_gb=int(disk))


# --- options of the command line that override entries of a file ----------------------------------


def overridden(document: Document, options: Mapping[str, tuple[Keys, Any]]) -> Document:
    """Return a document with some of its entries replaced.

    Args:
        document: The file's.
        options: The options that are set, each with the path to its entry and the value.
    """
    content = copy.deepcopy(document.content)
    for (*above, last), value in options.values():
        entry = content
        for key in above:
            if isinstance(entry, dict) and entry.get(key) is None:
                entry[key] = {}
            entry = entry[key] if isinstance(entry, dict) else None
        if isinstance(entry, dict):  # else `read` reports it
            entry[last] = value
    places = {keys: option for option, (keys, _) in options.items()}
    return replace(document, content=content, options=places)
