"""Where machines with certain GPUs can stand: all of a cluster's machines stand in one zone."""

from __future__ import annotations

from raypool.cloud.documents import nearest
from raypool.cloud.machines import Catalogue, catalogue
from raypool.errors import CloudError

CATALOGUES = ("gce", "ai-platform-2021")
"""Where zones are looked up: what either has is believed, since no list is ever complete, and today's go first."""


def zones(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the zones that have GPUs of all these kinds, those first that are known to have them today.

    Args:
        kinds: Kinds of GPUs, by Ray's names; none: every zone that has any.

    Example:
        >>> "us-central1-a" in zones(("T4", "V100")), zones(("K80", "H100"))
        (True, ())
    """
    return tuple(dict.fromkeys(zone for name in CATALOGUES for zone in _zones_of(catalogue(name), kinds)))


def _zones_of(have: Catalogue, kinds: tuple[str, ...]) -> tuple[str, ...]:
    if not kinds:
        return tuple(sorted({zone for gpu in have.gpus.values() for zone in gpu.zones}))
    try:
        return have.zones(*kinds)
    except CloudError:  # it has not all of them, or no longer
        return ()


def region_of(zone: str) -> str:
    """Return the region that a zone lies in: "us-central1" for "us-central1-a"."""
    return zone.rpartition("-")[0]


def regions(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the regions with a zone that has GPUs of all these kinds."""
    return tuple(sorted({region_of(zone) for zone in zones(kinds)}))


def check(kinds: tuple[str, ...], region: str | None) -> None:
    """Make sure that machines with all these kinds of GPUs can stand in one zone.

    Args:
        kinds: Kinds of GPUs.
        region: The region; None: any.

    Raises:
        CloudError: There is no such zone; says where there is one.

    Example:
        >>> check(("P4", "K80"), None)
        >>> check(("K80", "H100"), None)
        Traceback (most recent call last):
        raypool.errors.CloudError: No zone has K80 and H100, and all machines stand in one zone. Use one kind for all of them.
    """
    having = regions(kinds)
    if not having:
        raise CloudError(f"No zone has {' and '.join(kinds)}, and all machines stand in one zone. Use one kind for all of them.")
    if region is None or region in having:
        return
    if region not in regions(()):
        raise CloudError(f"There is no region {region!r} with GPUs{nearest(region, having)}")
    if lacks := [kind for kind in kinds if region not in regions((kind,))]:
        fact = f"{region} has no {' and no '.join(lacks)}"
    else:
        fact = f"{region} has {' and '.join(kinds)}, but none of its zones has all of them"
    raise CloudError(f"{fact}. These regions have: {', '.join(having)}.")


def choose(kinds: tuple[str, ...], region: str | None, zone: str | None) -> str:
    """Return the zone for machines with these kinds of GPUs.

    Args:
        kinds: Kinds of GPUs.
        region: The region that was asked for; None: none was.
        zone: The zone that was asked for; None: the first one of the region that has all kinds.

    Raises:
        CloudError: The zone lacks a kind of GPU, or is not of the region; or neither was said.

    Example:
        >>> choose(("T4",), "us-central1", None)
        'us-central1-a'
        >>> choose(("P100",), None, "us-central1-a")
        Traceback (most recent call last):
        raypool.errors.CloudError: us-central1-a has no P100. These zones of us-central1 have P100: us-central1-c, us-central1-f.
    """
    check(kinds, region)
    having = zones(kinds)
    if zone is None and region is None:
        raise CloudError(f"Neither region nor zone is said. Give --region; these have all: {', '.join(regions(kinds))}.")
    if zone is None:
        return next(each for each in having if region_of(each) == region)
    if region is not None and region_of(zone) != region:
        raise CloudError(f"{zone} is no zone of {region}, which was asked for, too. Leave one of them out.")
    if zone in having:
        return zone
    near = [each for each in having if region_of(each) == region_of(zone)]
    where = f"These zones of {region_of(zone)} have" if near else "These zones have"
    lacks = " and no ".join(kind for kind in kinds if zone not in zones((kind,)))
    fact = f"{zone} has no {lacks}" if zone in zones(()) else f"There is no zone {zone!r} with GPUs"
    raise CloudError(f"{fact}. {where} {' and '.join(kinds) or 'GPUs'}: {', '.join(near or having)}.")
