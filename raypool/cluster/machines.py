"""Catalogues of machines for rent and their GPUs, each with its date; and the choice of zones.

Each catalogue is a TOML file in `catalogues` that names its sources: "ai-platform-2021" (what
Google's AI Platform Training had in 2021, with its legacy names such as `complex_model_m_gpu`),
"gce" (Google Compute Engine) and "aws" (Amazon EC2).

Where GPUs are attached to a machine, their kind and number limit its vCPUs and memory. Other
machines have a fixed set of GPUs.
"""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from raypool.cluster.documents import nearest
from raypool.errors import CloudError

NAMES = ("ai-platform-2021", "gce", "aws")
OF_PROVIDERS = {"gcp": "gce", "aws": "aws"}
"""The catalogue of the machines that a provider has today."""

CPUS_PER_GPU = 4  # to load and prepare data for a GPU


@dataclass(frozen=True)
class Machine:
    """A machine type."""

    name: str  # the provider's name for it
    vcpus: int
    memory_gb: float
    # The kind of its built-in GPUs; None: it has none, but some may be attached.
    gpu: str | None = None
    gpus: int = 0
    # For a legacy name of AI Platform Training, the Compute Engine machine that it stands for; else
    # "".
    compute: str = ""


class Limit(NamedTuple):
    """GPUs that may be attached to a machine of at most this many vCPUs and this memory [GB]."""

    gpus: int
    vcpus: int
    memory_gb: float


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str  # Ray's name for it, "T4"
    accelerator: str | None = None  # the provider's name for it, "nvidia-tesla-t4"; None on AWS
    # The machines that it may be attached to, for each number of GPUs.
    limits: tuple[Limit, ...] = ()
    # The zones that have it; AWS, where they have other names in each account: none.
    zones: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    retired: datetime.date | None = None  # the day since which the provider no longer has it


@dataclass(frozen=True)
class Catalogue:
    """A provider's machines and GPUs.

    Example:
        >>> catalogue("gce").machine("a2-highgpu-8g")
        Machine(name='a2-highgpu-8g', vcpus=96, memory_gb=680, gpu='A100', gpus=8, compute='')
    """

    name: str  # one of `NAMES`
    date: datetime.date  # the day for which the catalogue holds: providers change what they have
    sources: tuple[str, ...]  # the sources of the data
    machines: Mapping[str, Machine]  # the machine types, by name
    gpus: Mapping[str, Gpu]  # the kinds of GPUs, by Ray's name
    prices: Mapping[str, Any]  # the prices of some of them, in one region on one day

    def machine(self, name: str) -> Machine:
        """Return the machine of that name, or raise a CloudError."""
        if name not in self.machines:
            end = nearest(name, self.machines)
            if not end.startswith(". Did"):  # there are hundreds
                end = ". `raypool cluster machines` lists them."
            raise CloudError(f"There is no machine {name!r} in the catalogue of {self.date}{end}")
        return self.machines[name]

    def shape(self, name: str) -> Machine:
        """Return the machine of that name; an unlisted one is inferred from its name.

        Example:
            >>> catalogue("gce").shape("n9-standard-16").vcpus
            16
        """
        number = re.search(r"-(\d+)$", name)  # Google's names end with the number of vCPUs
        return self.machines.get(name) or Machine(name, int(number[1]) if number else 0, 0)

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of that name, in any of its spellings.

        Raises:
            CloudError: There is none, or no longer.
        """
        available = [gpu.name for gpu in self.gpus.values() if gpu.retired is None]
        for gpu in self.gpus.values():
            if _plain(name) in (_plain(gpu.name), _plain(gpu.accelerator or "")):
                if gpu.retired is None:
                    return gpu
                raise CloudError(
                    f"{gpu.name} GPUs have not been available since {gpu.retired}. Choose"
                    f" from: {', '.join(available)}."
                )
        raise CloudError(
            f"There is no GPU {name!r} in the catalogue of {self.date}{nearest(name, available)}"
        )

    def allowed(self, machine: str, gpu: str) -> tuple[int, ...]:
        """Return the numbers of GPUs of that kind that the machine can have.

        Raises:
            CloudError: There is no such machine, or no such GPU.
        """
        shape, kind = self.machine(machine), self.gpu(gpu)
        if shape.gpu is not None:
            return (shape.gpus,) if shape.gpu == kind.name else ()
        if not shape.name.startswith("n1-"):  # Compute Engine attaches GPUs to its N1 machines only
            return ()
        return tuple(
            each.gpus
            for each in kind.limits
            if shape.vcpus <= each.vcpus and shape.memory_gb <= each.memory_gb
        )

    def check(self, machine: str, gpu: str | None, gpus: int) -> None:
        """Make sure that a machine can have this number of GPUs of this kind (None: no GPUs).

        Raises:
            CloudError: It cannot; the message has the possible numbers.

        Example:
            >>> catalogue("ai-platform-2021").check("n1-standard-32", "V100", 2)
            Traceback (most recent call last):
            raypool.errors.CloudError: n1-standard-32 cannot have 2 V100, only 4 or 8. ...
        """
        shape = self.machine(machine)
        always = f"always comes with {shape.gpus} {shape.gpu}"
        if gpu is None or gpus == 0:
            if shape.gpu is not None:
                raise CloudError(f"{machine} {always}, but none is requested.")
            return
        kind = self.gpu(gpu)
        counts = self.allowed(machine, kind.name)
        if gpus not in counts:
            some = f", only {one_of(counts)}" if counts else ""
            instead = f": it {always}" if shape.gpu else some
            raise CloudError(
                f"{machine} cannot have {gpus} {kind.name}{instead}. {self._which(kind, gpus)}"
            )

    def _which(self, kind: Gpu, gpus: int) -> str:
        """Return a sentence about the machines that can have this many GPUs of a kind."""
        built_in = [machine for machine in self.machines.values() if machine.gpu == kind.name]
        for limit in kind.limits:
            if limit.gpus == gpus:
                return (
                    f"Machines with {gpus} {kind.name} have up to {limit.vcpus} vCPUs and"
                    f" {limit.memory_gb:g} GB."
                )
        if names := [machine.name for machine in built_in if machine.gpus == gpus]:
            return f"Machines with {gpus} {kind.name}: {', '.join(names)}."
        numbers = {limit.gpus for limit in kind.limits} | {machine.gpus for machine in built_in}
        return f"No machine has {gpus} {kind.name}; {one_of(sorted(numbers))} are possible."

    def smallest(self, gpu: str, gpus: int) -> Machine:
        """Return the smallest machine with this many GPUs and, if possible, four vCPUs for each.

        Raises:
            CloudError: No machine has this many.
        """
        kind = self.gpu(gpu)
        fit = [each for each in self.machines.values() if gpus in self.allowed(each.name, gpu)]
        if not fit:
            raise CloudError(self._which(kind, gpus))
        good = [machine for machine in fit if machine.vcpus >= CPUS_PER_GPU * gpus]
        return min(
            good or fit,
            key=lambda machine: (machine.vcpus, "standard" not in machine.name, machine.memory_gb),
        )

    def price(self, machine: str, gpu: str | None, gpus: int, is_spot: bool) -> float | None:
        """Return the price of a machine with these GPUs [USD/h], None if it is not known.

        Example:
            >>> price = catalogue("gce").price("n1-standard-4", "T4", 1, is_spot=False)
            >>> round(price, 2), catalogue("aws").price("g4dn.xlarge", "T4", 1, is_spot=True)
            (0.54, None)
        """

        def price_of(table: str, name: str) -> float | None:
            both = self.prices.get(table, {}).get(name)
            if not isinstance(both, list):  # on demand only
                return None if is_spot else both
            return float(both[is_spot])

        if (whole := price_of("machines", machine)) is not None:
            return whole
        family, shape = machine.partition("-")[0], self.shape(machine)
        parts = [
            (price_of("vcpus", family), shape.vcpus),
            (price_of("gb", family), shape.memory_gb),
        ]
        parts += [(price_of("gpus", gpu), gpus)] if gpu else []
        known = [price * count for price, count in parts if price is not None]
        return sum(known) if len(known) == len(parts) else None

    def check_place(self, place: str, *gpus: str) -> None:
        """Make sure that a zone or region has GPUs of all these kinds, as far as is known.

        Raises:
            CloudError: It does not; the message has the places that do.
        """
        regions = {region for gpu in self.gpus.values() for region in gpu.regions}
        for kind in map(self.gpu, gpus):
            known = kind.regions if place in regions or not kind.zones else kind.zones
            if known and place not in known:
                near = [each for each in known if each[:-2] == place[:-2]]
                command = f"raypool cluster machines --catalogue {self.name} --gpu {kind.name}"
                where = (
                    f"Nearby: {', '.join(near)}" if near else f"`{command}` shows where they are"
                )
                raise CloudError(f"As of {self.date}, {place} has no {kind.name} GPUs. {where}.")


def one_of(values: Iterable[object]) -> str:
    """Return the values as a sentence lists them: "1, 2 or 4"."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def _plain(name: str) -> str:
    return re.sub(r"^nvidia-|tesla-", "", name.lower().replace("_", "-").replace(" ", "-"))


@functools.cache
def catalogue(name: str) -> Catalogue:
    """Return a catalogue of machines for rent.

    Args:
        name: "ai-platform-2021", "gce" or "aws".

    Raises:
        CloudError: There is no such catalogue.

    Example:
        >>> catalogue("gce").allowed("n1-standard-16", "T4")
        (1, 2, 4)
    """
    if name not in NAMES:
        raise CloudError(f"There is no catalogue {name!r}{nearest(name, NAMES)}")
    file = resources.files("raypool.cluster").joinpath("catalogues", f"{name}.toml")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    machines = {}
    for each, entry in data["machines"].items():
        if isinstance(entry, dict):
            machines[each] = Machine(each, **entry)
            continue
        gb_per_vcpu, *sizes = entry  # a family: `m5 = [4, 2, 4]` is m5.large and m5.xlarge
        for vcpus in sizes:
            size = {1: "medium", 2: "large", 4: "xlarge"}.get(vcpus, f"{vcpus // 4}xlarge")
            machine = f"{each}.{size}" if name == "aws" else f"{each}-{vcpus}"
            memory_gb = round(gb_per_vcpu * vcpus, 2)
            whole = int(memory_gb)  # 30 GB are shown as 30, not 30.0
            machines[machine] = Machine(machine, vcpus, whole if whole == memory_gb else memory_gb)
    gpus = {}
    for kind, entry in data["gpus"].items():
        # the zones of a region are written as letters: {us-central1 = "abf"}
        places = entry.get("zones", {})
        gpus[kind] = Gpu(
            kind,
            accelerator=entry.get("accelerator"),
            limits=tuple(Limit(*limit) for limit in entry.get("limits", ())),
            zones=tuple(f"{region}-{zone}" for region, zones in places.items() for zone in zones),
            regions=tuple(entry.get("regions", places)),
            retired=entry.get("retired"),
        )
    return Catalogue(
        name,
        data["date"],
        tuple(data["sources"]),
        machines,
        gpus,
        data.get("prices", {}),
    )


def region_of(zone: str) -> str:
    """Return the region of one of Google's zones."""
    return zone.rpartition("-")[0]


def choose_zone(kinds: tuple[str, ...], region: str | None, zone: str | None) -> str:
    """Return the zone of Google for machines with these kinds of GPUs: all must be in one.

    The default is the first zone of the region that is known to have all kinds.

    Raises:
        CloudError: The zone is not in the region, or there is none to choose.
    """
    if zone is not None:
        if region is not None and region_of(zone) != region:
            raise CloudError(
                f"The zone {zone} is not in the region {region}. Leave one of them out."
            )
        return zone
    gce = catalogue("gce")
    # without GPUs any zone would do: T4 are almost everywhere
    having = [set(gce.gpu(kind).zones) for kind in kinds or ("T4",)]
    zones = sorted(set.intersection(*having))
    for each in zones:
        if region_of(each) == region:
            return each
    regions = ", ".join(sorted({region_of(each) for each in zones})) or "none"
    fact = f"No zone of {region} is known to have these GPUs" if region else "No region is set"
    raise CloudError(
        f"{fact}. As of {gce.date}, these regions have a zone with"
        f" {' and '.join(kinds) or 'GPUs'}: {regions}. Choose one of them with --region, or"
        " another zone with --zone."
    )
