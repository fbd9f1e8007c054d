"""Training jobs: reads and checks `config.yaml` of AI Platform Training, and options that override
it.

::

    trainingInput:
      scaleTier: CUSTOM
      masterType: n1-highcpu-16
      masterConfig:
        acceleratorConfig: {count: 4, type: NVIDIA_TESLA_T4}
      workerCount: 9
      workerType: n1-highcpu-16
      ...

The service no longer exists, but its files still describe machines. The master becomes the head of
a Ray cluster, where the job's script runs; workers, parameter servers and evaluators become groups
of machines beside it, of fixed size.

Source:
    Google Cloud, AI Platform Training: "Using GPUs for training models in the cloud", and
    TrainingInput in the discovery document of its API (ml.v1), which google-api-python-client has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raypool.cluster.documents import Document, Findings, Keys, documents_of, nearest
from raypool.cluster.drafts import smallest
from raypool.cluster.launcher_file import default_packages
from raypool.cluster.machines import Catalogue, Machine, catalogue, why_no_zone
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

GROUPS = {
    "master": "head",
    "worker": "worker",
    "parameterServer": "parameter-server",
    "evaluator": "evaluator",
}
"""The groups of machines for the roles of a job; nodes have the label "raypool/role" with it."""

INPUT = "trainingInput"
OUTSIDE = (INPUT, "jobId", "labels")

TYPES = tuple(f"{role}Type" for role in GROUPS)
COUNTS = tuple(f"{role}Count" for role in GROUPS if role != "master")
CONFIGS = tuple(f"{role}Config" for role in GROUPS)

TIERS = {"BASIC": ("n1-standard-4", None, 0), "BASIC_GPU": ("n1-standard-8", "K80", 1)}
"""The scale tiers that are one machine each: its kind, and its GPUs. CUSTOM says its machines
itself.
"""

UNUSED = {
    "runtimeVersion": "machines get the versions that are installed here",
    "pythonVersion": "machines get the Python that runs here",
    "enableWebAccess": "`raypool cluster connect` opens the dashboard",
}
"""Settings that change nothing, and why."""

UNABLE = {
    "hyperparameters": (
        "Let the script call raypool.parfor with a function that trains for one setting."
    ),
    "packageUris": "--package-path sends your package along, and --package installs what it needs.",
    "scheduling": "`raypool job stop` ends a job.",
    "encryptionConfig": "Write the cluster's file with --dry-run, and add it to the disks there.",
    "network": (
        "Write the cluster's file with --dry-run, and add networkInterfaces to each node_config"
        " there."
    ),
    "serviceAccount": (
        "Write the cluster's file with --dry-run, and add serviceAccounts to each node_config"
        " there."
    ),
}
"""Settings that cannot be supported, and what to do instead."""

UNABLE_OF_ROLES = {"tpuTfVersion": "There are no TPUs here."}
OF_CONTAINERS = ("imageUri", "containerCommand", "containerArgs")

KNOWN = frozenset(
    {
        "scaleTier",
        "region",
        "jobDir",
        "pythonModule",
        "args",
        "useChiefInTfConfig",
        *TYPES,
        *COUNTS,
        *CONFIGS,
        *UNUSED,
        *UNABLE,
    }
)
"""All settings of a training job."""

EXAMPLE = "{count: 4, type: NVIDIA_TESLA_T4}"

BUCKETS = {
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
}
"""How buckets may be called.

Source: Google Cloud Storage, "About Cloud Storage buckets"; Amazon S3, "General purpose bucket
    naming rules".
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training job that has been checked.

    Args:
        groups: Its machines, the master first; the others are always as many as their `most`.
        region: Where they are to be ("us-central1"); None: nobody has said.
        name: What it is called; None: nobody has said.
        job_dir: Where its outputs go; None: nobody has said.
        module: The Python module to run; None: nobody has said.
        args: What that is given.
        image: The Docker image that everything runs in; None: the machines themselves.
        container_command: What to run in it, if no module is said.
        chief: TensorFlow's name of the master in TF_CONFIG; None: that is not set.
        notes: Which of its settings change nothing, and why.
    """

    groups: tuple[NodeGroup, ...]
    region: str | None = None
    name: str | None = None
    job_dir: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    image: str | None = None
    container_command: tuple[str, ...] = ()
    chief: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of GPU that are asked for, each once.

        Example:
            >>> workers = NodeGroup(name="worker", gpu="T4", gpus=2, least=3, most=3)
            >>> training = Training(groups=(NodeGroup(name="head"), workers))
            >>> training.kinds, training.machines, training.gpus
            (('T4',), 4, 6)
        """
        return tuple(dict.fromkeys(group.gpu for group in self.groups if group.gpu is not None))

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return 1 + sum(group.most for group in self.groups[1:])

    @property
    def gpus(self) -> int:
        """How many GPUs they have together."""
        head, *workers = self.groups
        return head.gpus + sum(group.gpus * group.most for group in workers)

    def plan(
        self,
        *,
        name: str,
        project: str | None,
        zone: str,
        spot: bool = False,
        packages: tuple[str, ...] = (),
    ) -> ClusterPlan:
        """Return the cluster that the job runs on.

        Args:
            name: What to call the cluster.
            project: The project that pays; None: to be filled in.
            zone: Where; see `raypool.cluster.machines.choose_zone`.
            spot: Whether the provider may take machines back; never the master's.
            packages: What is installed on every machine besides raypool and what it needs.
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
        )


def is_training(content: Any) -> bool:
    """Say whether what stands in a file is a training job, if perhaps a wrong one.

    Example:
        >>> is_training({"trainingInput": {}}), is_training({"scaleTier": "BASIC_GPU"})
        (True, True)
        >>> is_training({"provider": {}})
        False
    """
    return isinstance(content, dict) and (INPUT in content or not KNOWN.isdisjoint(content))


def read(document: Document, *, trust: bool = False) -> Training:
    """Return the training job that a file describes.

    Machines and GPUs are those of AI Platform Training; in a file that names any which it never
    had, today's of Compute Engine.

    Raises:
        CloudError: Something is wrong with it; says all that is, where, and what would be right.

    Example:
        >>> from raypool.cluster.documents import documents_of
        >>> master = "scaleTier: CUSTOM, masterType: complex_model_m_p100"
        >>> text = f"trainingInput: {{{master}, workerCount: 2, workerType: standard}}"
        >>> training = read(documents_of(text, "config.yaml")[0])
        >>> [(group.name, group.machine, group.gpus, group.most) for group in training.groups]
        [('head', 'n1-standard-16', 4, 0), ('worker', 'n1-standard-4', 0, 2)]
    """
    findings = Findings(document, trust)
    _check_outside(findings)
    findings.finish()  # what is not where it belongs says nothing
    findings.check_keys((INPUT,), KNOWN)
    _check_unable(findings, (INPUT,), UNABLE)
    training = Training(
        groups=tuple(_groups(findings)),
        region=_text(findings, (INPUT, "region")),
        name=_text(findings, ("jobId",)),
        job_dir=_text(findings, (INPUT, "jobDir")),
        module=_text(findings, (INPUT, "pythonModule")),
        args=_texts(findings, (INPUT, "args")),
        image=_image(findings),
        container_command=(
            *_texts(findings, (INPUT, "masterConfig", "containerCommand")),
            *_texts(findings, (INPUT, "masterConfig", "containerArgs")),
        ),
        chief=_chief(findings),
    )
    if (why := why_no_zone(training.kinds, training.region)) is not None:
        findings.unlisted((INPUT, "region") if training.region is not None else (INPUT,), why)
    if training.job_dir is not None and (wrong := _why_no_job_dir(training.job_dir)) is not None:
        findings.add((INPUT, "jobDir"), wrong)
    for name, why in UNUSED.items():
        if name in findings.at((INPUT,)):
            findings.doubt((INPUT, name), f"{name} is not used: {why}.")
    return replace(training, notes=findings.finish())


def _check_outside(findings: Findings) -> None:
    """Note mistakes outside the settings of the job."""
    content = findings.at(())
    if not isinstance(content, dict):
        findings.add(
            (), f"{_shown(content)} stands here. A training job is a mapping with trainingInput."
        )
    elif INPUT not in content and is_training(content):
        first = next(name for name in content if name in KNOWN)
        findings.add(
            (first,),
            f"{first} belongs into trainingInput: write `trainingInput:` above it, and indent what"
            " that has.",
        )
    else:
        findings.check_keys((), OUTSIDE)
        if INPUT not in content:
            findings.add((), "there is no trainingInput, which says what machines the job has.")
        elif not isinstance(content[INPUT], dict):
            findings.add(
                (INPUT,),
                f"trainingInput is {_shown(content[INPUT])}; it should have settings, such as"
                " scaleTier.",
            )


def _check_unable(findings: Findings, keys: Keys, unable: dict[str, str]) -> None:
    for name, instead in unable.items():
        if findings.at((*keys, name)) is not None:
            findings.add((*keys, name), f"{name} is nothing that raypool can keep. {instead}")


def _why_no_job_dir(job_dir: str) -> str | None:
    """Return what is wrong with a job's folder, None if nothing can be seen to be from here.

    Example:
        >>> _why_no_job_dir("gs://my-bucket/run-1"), _why_no_job_dir("/mnt/shared/run-1")
        (None, None)
        >>> _why_no_job_dir("gs:/my-bucket/run-1").partition(", ")[2]
        's3://BUCKET/... nor a path that begins with /.'
    """
    scheme, colon, rest = job_dir.partition("://")
    if colon and scheme in BUCKETS:
        bucket = rest.partition("/")[0]
        if BUCKETS[scheme].fullmatch(bucket):
            return None
        return (
            f"{bucket!r} cannot be a bucket's name: three or more of a-z, 0-9, '-' and '.', a"
            " letter or digit at both ends."
        )
    if job_dir.startswith("/"):
        return None
    return f"{job_dir!r} is neither gs://BUCKET/..., s3://BUCKET/... nor a path that begins with /."


def todays_options(training: Training) -> list[str]:
    """Return the options that give each machine of a job, of those that can be had today.

    Example:
        >>> head = NodeGroup(name="head", machine="n1-standard-8", gpu="K80", gpus=1)
        >>> " ".join(todays_options(Training(groups=(head,)))[2:])
        '--master-machine-type n1-standard-8 --master-accelerator count=1,type=nvidia-tesla-t4'
    """
    gce = catalogue("gce")
    roles = {group: role for role, group in GROUPS.items()}
    words = ["--scale-tier", "custom"]
    for group in training.groups:
        machine, gpu, gpus = group.machine, group.gpu, group.gpus
        try:
            gce.check(machine, gpu, gpus)
        except CloudError:
            gpu, gpus = "T4", next((n for n in (1, 2, 4) if n >= gpus), 4)
            if machine not in gce.machines or gpus not in gce.allowed(machine, gpu):
                machine = smallest(gce, gpu, gpus).name
        role = re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", roles[group.name])
        words += [f"--{role}-machine-type", machine]
        if gpu and (accelerator := gce.gpu(gpu).accelerator):
            words += [f"--{role}-accelerator", f"count={gpus},type={accelerator}"]
    return words


# --- machines -------------------------------------------------------------------------------------


def _groups(findings: Findings) -> Iterator[NodeGroup]:
    """Yield a job's groups of machines, the master's first, and note what is wrong with them."""
    tier = findings.at((INPUT, "scaleTier"))
    if tier == "CUSTOM":
        have = _catalogue(findings)
        for role in GROUPS:
            yield from _group(findings, role, have)
        _check_legacy(findings, have)
    elif isinstance(tier, str) and tier in TIERS:
        machine, gpu, gpus = TIERS[tier]
        yield NodeGroup(name=GROUPS["master"], machine=machine, gpu=gpu, gpus=gpus)
        for name in (*TYPES, *COUNTS, *CONFIGS):
            if findings.at((INPUT, name)) is not None:
                findings.add(
                    (INPUT, name),
                    f"{name} goes with scaleTier CUSTOM only; {tier} is one {machine}.",
                )
    elif tier is None:
        findings.add(
            (INPUT,),
            "scaleTier is missing: CUSTOM, where the machines are said, or one of"
            f" {', '.join(TIERS)}.",
        )
    else:
        findings.add(
            (INPUT, "scaleTier"),
            f"there is no scaleTier {_shown(tier)} here{nearest(str(tier), ('CUSTOM', *TIERS))}",
        )


def _catalogue(findings: Findings) -> Catalogue:
    """Return the old catalogue, or today's if only that has all machines of the file."""
    then, today = catalogue("ai-platform-2021"), catalogue("gce")
    machines = [findings.at((INPUT, name)) for name in TYPES]
    gpus = [findings.at((INPUT, name, "acceleratorConfig", "type")) for name in CONFIGS]
    return today if not _knows(then, machines, gpus) and _knows(today, machines, gpus) else then


def _knows(have: Catalogue, machines: list[Any], gpus: list[Any]) -> bool:
    try:
        for gpu in gpus:
            if isinstance(gpu, str):
                have.gpu(gpu)
    except CloudError:
        return False
    return all(machine in have.machines for machine in machines if isinstance(machine, str))


def _group(findings: Findings, role: str, have: Catalogue) -> Iterator[NodeGroup]:
    """Yield the machines of a role, if it has any that can be."""
    size = 1 if role == "master" else _size(findings, role)
    name = findings.at((INPUT, f"{role}Type"))
    if size == 0:
        return
    if name is None:
        at = (INPUT,) if role == "master" else (INPUT, f"{role}Count")
        findings.add(at, f"{role}Type is missing: the kind of machine, such as n1-highcpu-16.")
        return
    _check_config(findings, role)
    if not isinstance(name, str):
        findings.add((INPUT, f"{role}Type"), f"{role}Type is {_shown(name)}, not a text.")
        return
    machine = have.shape(name)
    try:
        have.machine(name)
    except CloudError as error:
        findings.unlisted((INPUT, f"{role}Type"), str(error))
    gpu, gpus = _gpus(findings, role, machine, have)
    always = 0 if role == "master" else size
    kind = machine.compute or machine.name
    group = NodeGroup(
        name=GROUPS[role], machine=kind, gpu=gpu, gpus=gpus, least=always, most=always
    )
    yield (
        group if (disk_gb := _disk_gb(findings, role)) is None else replace(group, disk_gb=disk_gb)
    )


def _size(findings: Findings, role: str) -> int:
    """Return the number of machines of a role; 1, and a note, if it is invalid."""
    keys = (INPUT, f"{role}Count")
    given = findings.at(keys)
    count = _whole(given)
    if given is None:
        named = [
            name
            for name in (f"{role}Type", f"{role}Config")
            if findings.at((INPUT, name)) is not None
        ]
        if not named:
            return 0
        findings.add(
            (INPUT, named[0]),
            f"{named[0]} is given, but no {role}Count: there would be none. Say how many there"
            " are.",
        )
        return 1
    if count is None or count < 0:
        findings.add(keys, f"{role}Count is {_shown(given)}; a whole number, 0 or more, would do.")
        return 1
    return count


def _check_config(findings: Findings, role: str) -> None:
    """Note what is wrong with how the machines of a role are equipped, but for their GPUs."""
    keys = (INPUT, f"{role}Config")
    config = findings.at(keys)
    if config is not None and not isinstance(config, dict):
        findings.add(
            keys, f"{role}Config is {_shown(config)}; it should have acceleratorConfig: {EXAMPLE}."
        )
        return
    known = ("acceleratorConfig", "diskConfig", *OF_CONTAINERS, *UNABLE_OF_ROLES)
    findings.check_keys(keys, known)
    _check_unable(findings, keys, UNABLE_OF_ROLES)
    if isinstance(findings.at((*keys, "diskConfig")), dict):
        findings.check_keys((*keys, "diskConfig"), ("bootDiskSizeGb", "bootDiskType"))


def _disk_gb(findings: Findings, role: str) -> int | None:
    keys = (INPUT, f"{role}Config", "diskConfig", "bootDiskSizeGb")
    given = findings.at(keys)
    size = _whole(given)
    if given is not None and (size is None or size < 1):
        findings.add(
            keys, f"bootDiskSizeGb is {_shown(given)}; a whole number of GB would do, such as 200."
        )
    return size


def _gpus(
    findings: Findings, role: str, machine: Machine, have: Catalogue
) -> tuple[str | None, int]:
    """Return kind and number of the GPUs of a role's machines; note impossible ones."""
    keys = (INPUT, f"{role}Config", "acceleratorConfig")
    given = findings.at(keys)
    if machine.compute:
        if given is not None:
            has = f"{machine.gpus} {machine.gpu}" if machine.gpu else "no GPUs"
            findings.add(
                keys,
                f"{machine.name} always has {has}. GPUs are attached to machines such as"
                f" {machine.compute}.",
            )
        return machine.gpu, machine.gpus
    if given is None:
        gpu, gpus = None, 0
    else:
        gpu, gpus = _accelerator(findings, keys, given)
        if gpu is None:
            return None, 0
    try:
        if machine.name in have.machines:
            have.check(machine.name, gpu, gpus)
    except CloudError as error:
        findings.add((INPUT, f"{role}Type") if given is None else keys, str(error))
        return None, 0
    return (None, 0) if gpu is None else (have.gpu(gpu).name, gpus)


def _accelerator(findings: Findings, keys: Keys, given: Any) -> tuple[str | None, int]:
    """Return type and count of an acceleratorConfig; (None, 0), and a note, if it is wrong."""
    if not isinstance(given, dict):
        findings.add(keys, f"acceleratorConfig is {_shown(given)}; {EXAMPLE} would do.")
        return None, 0
    findings.check_keys(keys, ("count", "type"))
    gpu, gpus = given.get("type"), _whole(given.get("count"))
    if not isinstance(gpu, str):
        findings.add(keys, f"the type of GPU is {_shown(gpu)}; {EXAMPLE} would do.")
    if gpus is None or gpus < 1:
        findings.add(
            (*keys, "count"),
            f"the count of GPUs is {_shown(given.get('count'))}; a whole number, 1 or more,"
            " would do.",
        )
    elif isinstance(gpu, str):
        return gpu, gpus
    return None, 0


def _check_legacy(findings: Findings, have: Catalogue) -> None:
    """Note roles that mix legacy machines with others."""
    # The API refuses a legacy worker beside another sort of master, and the reverse.
    named = {name: findings.at((INPUT, name)) for name in TYPES}
    legacy = {
        name: bool(have.machines[kind].compute)
        for name, kind in named.items()
        if isinstance(kind, str) and kind in have.machines
    }
    for name, is_legacy in legacy.items():
        if is_legacy != legacy.get("masterType", is_legacy):
            kinds = ("one of the legacy machines", "one of Compute Engine's")
            mine, masters = kinds if is_legacy else kinds[::-1]
            findings.add(
                (INPUT, name),
                f"{named[name]} is {mine}, the master's {named['masterType']} {masters}. Use one"
                " sort for all.",
            )


# --- values ---------------------------------------------------------------------------------------


def _whole(value: Any) -> int | None:
    """Return a whole number, which the API takes as a text, too; None if it is none."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(findings: Findings, keys: Keys) -> str | None:
    given = findings.at(keys)
    if given is None or (isinstance(given, str) and given):
        return given
    findings.add(keys, f"{keys[-1]} is {_shown(given)}, not a text.")
    return None


def _image(findings: Findings) -> str | None:
    """Return the image of the master, which all machines run."""
    image = _text(findings, (INPUT, "masterConfig", "imageUri"))
    for role in GROUPS:
        other = findings.at((INPUT, f"{role}Config", "imageUri"))
        if other is not None and other != image:
            text = f"imageUri is {_shown(other)}, and the master's {_shown(image)}: it must be one."
            findings.add((INPUT, f"{role}Config", "imageUri"), text)
        for name in OF_CONTAINERS[1:] if role != "master" else ():
            if findings.at((INPUT, f"{role}Config", name)) is not None:
                text = f"{name} is not used: the job runs on the master, and reaches the others."
                findings.doubt((INPUT, f"{role}Config", name), text)
    return image


def _chief(findings: Findings) -> str | None:
    given = findings.at((INPUT, "useChiefInTfConfig"))
    if given is not None and not isinstance(given, bool):
        findings.add((INPUT, "useChiefInTfConfig"), f"it is {_shown(given)}, not true or false.")
    return None if given is None else "chief" if given else "master"


def _texts(findings: Findings, keys: Keys) -> tuple[str, ...]:
    given = findings.at(keys)
    if given is not None and (
        not isinstance(given, list) or not all(isinstance(each, str) for each in given)
    ):
        findings.add(
            keys,
            f'{keys[-1]} is {_shown(given)}, not a list of texts. Numbers need quotes: ["--steps",'
            ' "100"].',
        )
        return ()
    return tuple(given or ())


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- options of the command line that win over entries of a file ----------------------------------


@dataclass(frozen=True)
class Overridden(Document):
    """A document with entries replaced by options of the command line.

    Attributes:
        options: The ways to these entries, with the options that gave them.
    """

    options: Mapping[Keys, str] = field(default_factory=dict)

    def place_of(self, keys: Keys) -> str:
        """Return the place of an entry: its option, its line, or "The command line" (no file)."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.options:
                return self.options[keys[:length]]
        return super().place_of(keys) if self.name else "The command line"


def overridden(document: Document | None, options: Mapping[str, tuple[Keys, Any]]) -> Overridden:
    """Return a document with some of its entries replaced.

    Args:
        document: The file's; None: there is none, and options say everything.
        options: The options that were given, each with the way to its entry and the value.

    Example:
        >>> text = "trainingInput: {scaleTier: CUSTOM, workerCount: 9}"
        >>> [document] = documents_of(text, "config.yaml")
        >>> count, tier = ("trainingInput", "workerCount"), ("trainingInput", "scaleTier")
        >>> changed = overridden(document, {"--worker-count": (count, -1)})
        >>> changed.content["trainingInput"]
        {'scaleTier': 'CUSTOM', 'workerCount': -1}
        >>> changed.place_of(count), changed.place_of(tier)
        ('--worker-count', 'config.yaml, line 1')
    """
    if document is None:
        [document] = documents_of("{}", "")
    content = document.content
    for keys, value in options.values():
        content = _replaced(content, keys, value)
    return Overridden(
        document.name,
        content,
        document.node,
        {keys: option for option, (keys, _) in options.items()},
    )


def _replaced(content: Any, keys: Keys, value: Any) -> Any:
    """Return a copy of `content` with one entry replaced."""
    if not keys:
        return value
    if not isinstance(content, dict) and content is not None:
        return content  # `check` reports it
    inner = {} if content is None else content
    return {**inner, keys[0]: _replaced(inner.get(keys[0]), keys[1:], value)}
