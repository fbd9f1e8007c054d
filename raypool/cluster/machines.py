"""Catalogues of machines for rent and their GPUs, each with its date; and the choice of zones.

There are three catalogues, each a TOML file in `catalogues` that names its sources:

- "ai-platform-2021": what Google's AI Platform Training had in 2021, its legacy names
  (`complex_model_m_gpu`) among them;
- "gce": Google Compute Engine;
- "aws": Amazon EC2.

Where GPUs are attached to a machine, limits say how many: a number of GPUs of a kind allows at most
so many vCPUs and so much memory. Other machines have fixed shapes, with their GPUs.
"""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from raypool.cluster.documents import nearest
from raypool.errors import CloudError

NAMES = ("ai-platform-2021", "gce", "aws")
"""The catalogues there are."""

WITH_ZONES = ("gce", "ai-platform-2021")
"""Where zones are looked up: what either has is believed, since no list is ever complete, and
today's go first.
"""

OF_PROVIDERS = {"gcp": "gce", "aws": "aws"}
"""Which catalogue has the machines of a provider today."""


@dataclass(frozen=True)
class Machine:
    """A kind of machine.

    Attributes:
        name: The provider's name for it.
        vcpus: How many vCPUs it has.
        memory_gb: Its main memory [GB].
        gpu: The kind of the GPUs that it always comes with; None: GPUs may be attached to it, or
            cannot.
        gpus: How many it always comes with.
        compute: For a legacy name of AI Platform Training, the Compute Engine machine that it
            stands for; else "".
    """

    name: str
    vcpus: int
    memory_gb: float
    gpu: str | None = None
    gpus: int = 0
    compute: str = ""


@dataclass(frozen=True)
class Limit:
    """GPUs that may be attached to a machine of at most this many vCPUs and this memory [GB]."""

    gpus: int
    vcpus: int
    memory_gb: float


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: Ray's name for it, "T4".
        accelerator: The provider's name for it, "nvidia-tesla-t4"; None where only machines have
            names, as on AWS.
        limits: With how many it may be attached to which machines, fewest first; none if it comes
            with its machines only.
        zones: Where it is to be had.
        regions: The regions of these; on AWS, whose zones have other names in each account, only
            they are known.
        retired: The day since which the provider has it no more.
    """

    name: str
    accelerator: str | None = None
    limits: tuple[Limit, ...] = ()
    zones: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    retired: datetime.date | None = None


@dataclass(frozen=True)
class Catalogue:
    """A provider's machines and GPUs.

    Attributes:
        name: One of `NAMES`.
        date: The day that it is of, as far as its sources knew: providers change what they have.
        sources: Where it is from.
        machines: Kinds of machines, by name.
        gpus: Kinds of GPUs, by Ray's name.
        prices: What some of them cost, in one region on one day.

    Example:
        >>> gce = catalogue("gce")
        >>> gce.allowed("n1-standard-16", "T4")
        (1, 2, 4)
        >>> gce.machine("a2-highgpu-8g")
        Machine(name='a2-highgpu-8g', vcpus=96, memory_gb=680, gpu='A100', gpus=8, compute='')
    """

    name: str
    date: datetime.date
    sources: tuple[str, ...]
    machines: Mapping[str, Machine]
    gpus: Mapping[str, Gpu]
    prices: Mapping[str, Any] = field(default_factory=dict)

    def machine(self, name: str) -> Machine:
        """Return the machine of that name.

        Raises:
            CloudError: There is none.
        """
        if name not in self.machines:
            end = nearest(name, self.machines)
            if not end.startswith(". Did"):  # without the hundreds that there are
                end = ". `raypool cluster machines` lists those that there are."
            raise CloudError(f"There is no machine {name!r} in the catalogue of {self.date}{end}")
        return self.machines[name]

    def shape(self, name: str) -> Machine:
        """Return the machine of that name; one that is not listed has what its name says.

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

        Example:
            >>> gce = catalogue("gce")
            >>> {gce.gpu(name).name for name in ("T4", "nvidia-tesla-t4", "NVIDIA_TESLA_T4")}
            {'T4'}
        """
        plain = _plain(name)
        there = [gpu.name for gpu in self.gpus.values() if gpu.retired is None]
        for gpu in self.gpus.values():
            if plain in (_plain(gpu.name), _plain(gpu.accelerator or "")):
                if gpu.retired is not None:
                    raise CloudError(
                        f"{gpu.name} GPUs cannot be had any more since {gpu.retired}. There are:"
                        f" {', '.join(there)}."
                    )
                return gpu
        raise CloudError(
            f"There is no GPU {name!r} in the catalogue of {self.date}{nearest(name, there)}"
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

    def choices(self, machine: str) -> dict[str, tuple[int, ...]]:
        """Return which GPUs a machine may have, or has, by kind: how many.

        Raises:
            CloudError: There is no such machine.

        Example:
            >>> catalogue("ai-platform-2021").choices("n1-highmem-32")
            {'K80': (4, 8), 'P4': (2, 4), 'P100': (2, 4), 'T4': (2, 4), 'V100': (4, 8)}
        """
        counts = {
            gpu.name: self.allowed(machine, gpu.name)
            for gpu in self.gpus.values()
            if gpu.retired is None
        }
        return {name: allowed for name, allowed in counts.items() if allowed}

    def check(self, machine: str, gpu: str | None, gpus: int) -> None:
        """Make sure that a machine can have these GPUs.

        Args:
            machine: The machine.
            gpu: The kind of GPU, None for none.
            gpus: How many.

        Raises:
            CloudError: It cannot; says what would do.

        Example:
            >>> catalogue("ai-platform-2021").check("n1-standard-32", "V100", 2)
            Traceback (most recent call last):
            raypool.errors.CloudError: n1-standard-32 cannot have 2 V100, but 4 or 8. ...
        """
        shape = self.machine(machine)
        if gpu is None or gpus == 0:
            if shape.gpu is not None:
                raise CloudError(
                    f"{machine} always comes with {shape.gpus} {shape.gpu}, and none is asked for."
                )
            return
        kind = self.gpu(gpu)
        counts = self.allowed(machine, kind.name)
        if gpus not in counts:
            raise CloudError(
                f"{machine} cannot have {gpus}"
                f" {kind.name}{self._instead(shape, kind, gpus, counts)}"
            )

    def _instead(self, shape: Machine, kind: Gpu, gpus: int, counts: tuple[int, ...]) -> str:
        """Return the end of the sentence that says what would do."""
        if shape.gpu is not None:
            return f": it always comes with {shape.gpus} {shape.gpu}. {self._with(kind, gpus)}"
        if counts:
            return f", but {one_of(counts)}. {self._with(kind, gpus)}"
        others = self.choices(shape.name)
        return f". {self._with(kind, gpus)}" + (
            f" {shape.name} may have {one_of(others)}." if others else ""
        )

    def _with(self, kind: Gpu, gpus: int) -> str:
        """Return a sentence on where so many of a kind are to be had."""
        fixed = [machine for machine in self.machines.values() if machine.gpu == kind.name]
        ending = "es" if gpus == 1 else ""
        for limit in kind.limits:
            if limit.gpus == gpus:
                return (
                    f"{gpus} {kind.name} go{ending} with up to {limit.vcpus} vCPUs and"
                    f" {limit.memory_gb:g} GB."
                )
        if same := [machine.name for machine in fixed if machine.gpus == gpus]:
            return f"{gpus} {kind.name} come{ending[1:]} with {one_of(same)}."
        numbers = sorted(
            {limit.gpus for limit in kind.limits} | {machine.gpus for machine in fixed}
        )
        return f"No machine has {gpus} {kind.name}; {one_of(numbers)} can be had."

    def price(self, machine: str, gpu: str | None, gpus: int, is_spot: bool) -> float | None:
        """Return what a machine with these GPUs costs [USD/h], None if that is not known.

        Example:
            >>> price = catalogue("gce").price("n1-standard-4", "T4", 1, is_spot=False)
            >>> round(price, 2), catalogue("aws").price("g4dn.xlarge", "T4", 1, is_spot=True)
            (0.54, None)
        """

        def of(table: str, name: str) -> float | None:
            both = self.prices.get(table, {}).get(name)
            if not isinstance(both, list):  # on demand only
                return None if is_spot else both
            return float(both[is_spot])

        if (whole := of("machines", machine)) is not None:
            return whole
        family, shape = machine.partition("-")[0], self.shape(machine)
        parts = [(of("vcpus", family), shape.vcpus), (of("gb", family), shape.memory_gb)]
        parts += [(of("gpus", gpu), gpus)] if gpu else []
        known = [price * count for price, count in parts if price is not None]
        return sum(known) if len(known) == len(parts) else None

    def zones(self, *gpus: str) -> tuple[str, ...]:
        """Return the zones that have GPUs of all these kinds.

        Example:
            >>> catalogue("ai-platform-2021").zones("T4", "P100")[-3:]
            ('us-east1-c', 'us-west1-a', 'us-west1-b')
        """
        return _common(self.gpu(gpu).zones for gpu in gpus)

    def regions(self, *gpus: str) -> tuple[str, ...]:
        """Return the regions that have GPUs of all these kinds, perhaps in different zones."""
        return _common(self.gpu(gpu).regions for gpu in gpus)

    def check_place(self, place: str, *gpus: str) -> None:
        """Make sure that a zone or region has GPUs of all these kinds, as far as is known.

        Raises:
            CloudError: It has not; says where they are.

        Example:
            >>> catalogue("gce").check_place("us-west1-c", "T4")
            Traceback (most recent call last):
            raypool.errors.CloudError: As of 2026-11-22, us-west1-c has no T4 GPUs. Near it are ...
        """
        regions = {region for gpu in self.gpus.values() for region in gpu.regions}
        for kind in map(self.gpu, gpus):
            known = kind.regions if place in regions or not kind.zones else kind.zones
            if known and place not in known:
                near = [each for each in known if each[:-2] == place[:-2]]
                # all of them are dozens
                command = f"raypool cluster machines --catalogue {self.name} --gpu {kind.name}"
                where = f"Near it are {', '.join(near)}" if near else f"`{command}` lists where"
                raise CloudError(f"As of {self.date}, {place} has no {kind.name} GPUs. {where}.")


def _common(places: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    sets = [set(each) for each in places]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def one_of(values: Iterable[object]) -> str:
    """Return the values as a sentence has them: "1, 2 or 4"."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def _plain(name: str) -> str:
    """Return a GPU's name without what differs between its spellings."""
    return re.sub(r"^nvidia-|tesla-", "", name.lower().replace("_", "-").replace(" ", "-"))


@functools.cache
def catalogue(name: str) -> Catalogue:
    """Return a catalogue.

    Args:
        name: "ai-platform-2021", "gce" or "aws".

    Raises:
        CloudError: There is no such catalogue.
    """
    if name not in NAMES:
        raise CloudError(f"There is no catalogue {name!r}{nearest(name, NAMES)}")
    text = (
        resources.files("raypool.cluster")
        .joinpath("catalogues", f"{name}.toml")
        .read_text(encoding="utf-8")
    )
    data = tomllib.loads(text)
    machines = {each: Machine(each, **entry) for each, entry in data["machines"].items()}
    gpus = {each: _gpu(each, entry) for each, entry in data["gpus"].items()}
    prices = data.get("prices", {})
    return Catalogue(name, data["date"], tuple(data["sources"]), machines, gpus, prices)


def _gpu(name: str, entry: dict[str, Any]) -> Gpu:
    zones = tuple(
        f"{region}-{letter}"
        for region, letters in entry.get("zones", {}).items()
        for letter in letters
    )
    return Gpu(
        name,
        accelerator=entry.get("accelerator"),
        limits=tuple(Limit(*limit) for limit in entry.get("limits", ())),
        zones=zones,
        regions=tuple(entry.get("regions", entry.get("zones", ()))),
        retired=entry.get("retired"),
    )


# --- zones: one for all machines of a cluster -----------------------------------------------------


def zones_with(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return Google's zones with GPUs of all these kinds (Ray's names); none: of any kind.

    Example:
        >>> "us-central1-a" in zones_with(("T4", "V100")), zones_with(("K80", "H100"))
        (True, ())
    """
    zones: dict[str, None] = {}
    for known in map(catalogue, WITH_ZONES):
        if not kinds:
            zones |= dict.fromkeys(
                sorted({zone for gpu in known.gpus.values() for zone in gpu.zones})
            )
        elif all(kind in known.gpus and known.gpus[kind].retired is None for kind in kinds):
            zones |= dict.fromkeys(known.zones(*kinds))
    return tuple(zones)


def region_of(zone: str) -> str:
    """Return the region that a zone lies in: "us-central1" for "us-central1-a"."""
    return zone.rpartition("-")[0]


def why_no_zone(kinds: tuple[str, ...], region: str | None) -> str | None:
    """Return why no zone is known for machines with all these kinds of GPUs, None if one is.

    Args:
        kinds: Kinds of GPUs.
        region: The region; None: any.

    Example:
        >>> why_no_zone(("P4", "K80"), None)
        >>> why_no_zone(("K80", "H100"), None)
        'the catalogues of 2026-11-22 and 2021-03-18 have no zone with K80 and H100...
    """
    having = sorted({region_of(zone) for zone in zones_with(kinds)})
    if having and region in (None, *having):
        return None
    dates = " and ".join(str(catalogue(name).date) for name in WITH_ZONES)
    where = f" of {region}" if region else ""
    regions = f"These regions have one: {', '.join(having)}" if having else "No region has one"
    return (
        f"the catalogues of {dates} have no zone{where} with {' and '.join(kinds) or 'GPUs'}."
        f" {regions}."
    )


def choose_zone(kinds: tuple[str, ...], region: str | None, zone: str | None) -> str:
    """Return the zone for machines with these kinds of GPUs.

    Args:
        kinds: Kinds of GPUs.
        region: The region that was asked for; None: none was.
        zone: The zone that was asked for, which is taken; None: the first one of the region that is
            known to have all kinds.

    Raises:
        CloudError: The zone is not of the region; or none was said, and none can be chosen.

    Example:
        >>> choose_zone(("T4",), "us-central1", None)
        'us-central1-a'
        >>> choose_zone(("T4",), "us-east1", "us-central1-a")
        Traceback (most recent call last):
        raypool.errors.CloudError: us-central1-a is no zone of us-east1, which was asked for...
    """
    if zone is not None:
        if region is not None and region_of(zone) != region:
            raise CloudError(
                f"{zone} is no zone of {region}, which was asked for, too. Leave one of them out."
            )
        return zone
    having = zones_with(kinds)
    if region is None:
        regions = sorted({region_of(each) for each in having})
        raise CloudError(
            "Neither region nor zone is said. Give --region; these have all:"
            f" {', '.join(regions) or 'none'}."
        )
    if (why := why_no_zone(kinds, region)) is not None:
        raise CloudError(f"No zone can be chosen: {why} If you know one, give --zone.")
    return next(each for each in having if region_of(each) == region)
