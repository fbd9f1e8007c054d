"""What is wrong with the pods of a RayCluster's groups, and what they have to give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from raypool.cloud.documents import Findings, Keys
from raypool.cloud.kubernetes import DRAIN

RAY = "template", "spec", "containers", 0
"""Where a group says what Ray runs in: the first container of its pods."""

NODE_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")  # what both rayStartParams and resources of a group can say
WHOLE = ("num-cpus", "num-gpus", "memory", "object-store-memory")  # numbers in rayStartParams
OWN_COMMAND = "ray.io/overwrite-container-cmd"
"""The annotation by which a pod starts Ray itself."""

TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")

LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE]-?\d{1,2})?", re.ASCII)
UNITS = dict(zip("numkMGTPE", (Decimal(10) ** power for power in (-9, -6, -3, 3, 6, 9, 12, 15, 18)), strict=True))
UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)}
LITTLE_MEMORY = 64 * 2**20  # no Python with Ray starts in less [bytes]


class Part:
    """A part of a manifest: what stands there, if it is of the kind that belongs there, and what is wrong with it."""

    def __init__(self, findings: Findings, *keys: str | int) -> None:
        self.findings = findings
        self.keys: Keys = keys

    def __getitem__(self, key: str | int) -> Any:
        return self.findings.at((*self.keys, key))

    def part(self, *keys: str | int) -> Part:
        """Return a part of this part."""
        return Part(self.findings, *self.keys, *keys)

    def parts(self, *keys: str | int) -> list[Part]:
        """Return the parts of a list."""
        entries = self.part(*keys).there
        return [self.part(*keys, number) for number in range(len(entries))] if isinstance(entries, list) else []

    @property
    def there(self) -> Any:
        """What stands there, None if nothing does."""
        return self.findings.at(self.keys)

    @property
    def mapping(self) -> dict[str, Any]:
        """The entries by their names, none if it is no mapping."""
        entries = self.there
        return {str(name): value for name, value in entries.items()} if isinstance(entries, Mapping) else {}

    def text(self, key: str) -> str:
        """Return the text of an entry, "" if there is none."""
        value = self[key]
        return value if isinstance(value, str) else ""

    def whole(self, key: str) -> int | None:
        """Return the number of an entry, None if there is none."""
        value = self[key]
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def words(self, key: str) -> list[str]:
        """Return the texts of a list, those that are none as they are written."""
        value = self[key]
        return [str(each) for each in value] if isinstance(value, list) else []

    def wrong(self, text: str, *keys: str | int) -> None:
        """Note what is wrong here, or with an entry of it."""
        self.findings.add((*self.keys, *keys), text)


def release(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, None if it is none.

    Example:
        >>> release("2.60.0"), release("latest")
        ((2, 60), None)
    """
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def amount(value: object) -> Decimal | None:
    """Return the number that Kubernetes reads an amount as, None if it is none.

    Source: Kubernetes, apimachinery's `resource.Quantity`.

    Example:
        >>> amount("16Gi") == 16 * 2**30, float(amount("500m")), amount("16 GB")
        (True, 0.5, None)
    """
    found = AMOUNT.fullmatch(str(value))
    if found is None:
        return None
    number, unit = Decimal(found[1]), found[2] or ""
    return Decimal(f"{found[1]}{unit}") if unit[:1] in "eE" and unit[1:].lstrip("-").isdigit() else number * UNITS.get(unit, 1)


def variables(container: Part) -> dict[str, Part]:
    """Return the environment variables of a container, by name."""
    return {entry.text("name"): entry for entry in container.parts("env")}


def capacity(group: Part) -> tuple[Decimal | None, Decimal]:
    """Return how many CPUs and GPUs Ray will have in a pod of a group; CPUs None if that cannot be known.

    Source: Ray 2.60, `autoscaler/_private/kuberay/autoscaling_config.py`.
    """
    asked, parameters = group.part("resources").mapping, group.part("rayStartParams").mapping
    resources = group.part(*RAY, "resources")
    given = {**resources.part("requests").mapping, **resources.part("limits").mapping}
    cpus = asked.get("CPU", parameters.get("num-cpus", given.get("cpu")))
    gpus = asked.get("GPU", parameters.get("num-gpus", next((given[name] for name in given if _is_gpu(name)), "0")))
    return amount(cpus), amount(gpus) or Decimal(0)


def _is_gpu(name: str) -> bool:
    """Say whether a resource is a GPU, or a part of one that NVIDIA's device plugin gives away as a GPU of its own."""
    return re.search(r"gpu$|^nvidia\.com/mig-\d+g\.\d+gb$", name) is not None


def check_group(spec: Part, group: Part) -> None:
    """Note what is wrong with a group of pods, the head's or workers'.

    Args:
        spec: The cluster.
        group: The group.
    """
    pod, container = group.part("template", "spec"), group.part(*RAY)
    _check_told(group, group.part("rayStartParams"))
    _check_doors(pod)
    for each in pod.parts("containers"):
        for kind in ("requests", "limits"):
            _check_amounts(each.part("resources", kind))
        _check_both(each.part("resources"))
    _check_image(spec, container)
    _check_variables(spec, container)
    _check_command(group, container)
    _check_end(pod, container)


def _check_told(group: Part, parameters: Part) -> None:
    """Note what is wrong with what Ray is told of a pod."""
    for name in WHOLE:
        if isinstance(parameters[name], str) and not re.fullmatch(r"\d+", parameters[name], re.ASCII):
            parameters.wrong(f"{name} is {parameters[name]!r}; a whole number would do, as text.", name)
    _check_amounts(group.part("resources"))
    twice = [name for name in NODE_RESOURCES if parameters[name]]
    if twice and group.part("resources").mapping:
        group.wrong(f"resources and {twice[0]} of rayStartParams exclude each other; keep the former.", "resources")
    _check_gpus(group, parameters)
    if parameters["labels"] is not None:
        parameters.wrong("labels belong beside rayStartParams: labels: {name: value}.", "labels")
    for name, value in group.part("labels").mapping.items():
        if not LABEL.fullmatch(name) or not LABEL_VALUE.fullmatch(str(value)):
            text = f"{name}: {value} is no label; letters, digits, -, _ and . would do, 63 of them at most."
            group.wrong(text, "labels", name)


def _check_gpus(group: Part, parameters: Part) -> None:
    """Note another number of GPUs than the pod has: with more, work waits for them for ever; with fewer, they idle."""
    limits = group.part(*RAY, "resources", "limits").mapping
    has = sum((amount(value) or Decimal(0)) for name, value in limits.items() if _is_gpu(name))
    for part, name in ((group.part("resources"), "GPU"), (parameters, "num-gpus")):
        told = amount(part[name])
        if told is not None and told != has:
            part.wrong(
                f"Ray is told of {told:g} GPUs, and the pod has {has:g} by its limits; leave it out, Ray is told of those.", name
            )


def _check_doors(pod: Part) -> None:
    """Note what opens ports on the machine's own addresses."""
    if pod["hostNetwork"] is True:
        pod.wrong("hostNetwork opens Ray's ports on the machine's own addresses; leave it out.", "hostNetwork")
    for container in pod.parts("containers"):
        for port in container.parts("ports"):
            if port["hostPort"] is not None:
                port.wrong("hostPort opens the port on the machine's own addresses; leave it out.", "hostPort")


def _check_amounts(amounts: Part) -> None:
    for name, value in amounts.mapping.items():
        number = amount(value)
        if number is None:
            amounts.wrong(f"{name} is {value!r}, which is no amount; 500m, 4 or 16Gi are some.", name)
        elif _is_gpu(name) and number != number.to_integral_value():
            text = f"{name} is {value}; a whole number would do. Workers share a GPU by workers_per_gpu of the pool's profile."
            amounts.wrong(text, name)
        elif name == "memory" and number < LITTLE_MEMORY:
            amounts.wrong(f"memory is {value}, which is {number:g} bytes; {str(value).rstrip('m')}Gi may be meant.", name)


def _check_both(resources: Part) -> None:
    """Note what does not agree between what a container asks for and what it may use."""
    limits = resources.part("limits").mapping
    for name, value in resources.part("requests").mapping.items():
        asked, allowed = amount(value), amount(limits.get(name))
        if _is_gpu(name) and asked != allowed:
            resources.wrong(
                f"{name} is {value} here and {limits.get(name, 'missing')} in limits; GPUs have to be the same in both.",
                "requests",
                name,
            )
        elif asked is not None and allowed is not None and asked > allowed:
            resources.wrong(f"{name} is {value} here and {limits[name]} in limits; no more than that would do.", "requests", name)


def _check_image(spec: Part, container: Part) -> None:
    found = re.match(r"(?:docker\.io/)?rayproject/ray:(\d+\.\d+\.\d+)", container.text("image"))
    if found and spec.text("rayVersion") not in ("", found[1]):
        container.wrong(
            f"the image has Ray {found[1]}, and rayVersion is {spec['rayVersion']}; the same in both would do.", "image"
        )


def _check_variables(spec: Part, container: Part) -> None:
    there = variables(container)
    if "RAY_AUTH_MODE" in there and there["RAY_AUTH_MODE"].text("value") != "token":
        there["RAY_AUTH_MODE"].wrong("RAY_AUTH_MODE takes back what authOptions say; leave it out.")
    if "RAY_AUTH_TOKEN" in there and there["RAY_AUTH_TOKEN"]["value"] is not None:
        text = "the token stands here for everybody who reads the file; leave it out, the operator makes one."
        there["RAY_AUTH_TOKEN"].wrong(text)
    if spec["tlsOptions"] is not None and spec.part("tlsOptions")["enabled"] is True:
        for name in TLS:
            if name in there:
                there[name].wrong(f"{name} is set by the operator where tlsOptions are enabled; leave it out.")
        for mount in container.parts("volumeMounts"):
            if mount["name"] == "ray-tls" or mount["mountPath"] == "/etc/ray/tls":
                mount.wrong("the operator mounts ray-tls at /etc/ray/tls where tlsOptions are enabled; leave it out.")


def _check_command(group: Part, container: Part) -> None:
    """Note a command of the user's that leaves Ray without its token, or does not start it."""
    words = [(key, number, word) for key in ("command", "args") for number, word in enumerate(container.words(key))]
    for key, number, word in words:
        if re.search(r"\bRAY_AUTH_MODE=(?![\"']?token\b)|\bunset\b[^;&|]*\bRAY_AUTH_", word):
            container.wrong("this takes back what authOptions say; leave RAY_AUTH_MODE out.", key, number)
    text = " ".join(word for _, _, word in words)
    is_own = str(group.part("template", "metadata", "annotations")[OWN_COMMAND]).lower() == "true"
    if is_own and "ray start" not in text and "KUBERAY_GEN_RAY_START_CMD" not in text:
        container.wrong(f"Ray is never started: {OWN_COMMAND} leaves that to args ($KUBERAY_GEN_RAY_START_CMD).", "args")


def _check_end(pod: Part, container: Part) -> None:
    """Note a pod that is killed before Ray has told what runs there that it will be."""
    grace_s, variable = pod.whole("terminationGracePeriodSeconds"), variables(container).get(DRAIN)
    drain = amount(variable["value"]) if variable is not None else None
    if variable is None or drain is None:
        return
    if drain >= (allowed_s := 30 if grace_s is None else grace_s):
        text = f"{DRAIN} is {drain:g}, and the pod is killed after {allowed_s} s (terminationGracePeriodSeconds); less would do."
        variable.wrong(text, "value")
