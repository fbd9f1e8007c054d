"""Kinds of machines that can be rented, as a table on a terminal, or as JSON.

::

      machine         vCPUs  memory  GPUs
      n1-standard-8       8   30 GB  1, 2 or 4 T4
      a2-highgpu-1g      12   85 GB  1 A100
"""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from raypool.cloud.machines import Catalogue, Gpu, one_of


def as_table(catalogue: Catalogue, gpu: str | None) -> Table:
    """Return a table of machines.

    Args:
        catalogue: What there is.
        gpu: Only machines that may have GPUs of this kind, and how many of these; None: all.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("machine", "vCPUs", "memory", "GPUs"):
        table.add_column(heading, justify="right" if heading in ("vCPUs", "memory") else "left")
    for name, choices in _choices(catalogue, gpu).items():
        machine = catalogue.machine(name)
        gpus = "; ".join(f"{one_of(counts)} {kind}" for kind, counts in choices.items())
        table.add_row(*map(Text, (name, str(machine.vcpus), f"{machine.memory_gb:g} GB", gpus)))
    return table


def where(catalogue: Catalogue, gpu: str | None) -> str:
    """Return what is to be said below the table: where a kind of GPU is to be had, and of which day all this is."""
    lines = [f"This is catalogue {catalogue.name} as of {catalogue.date}: providers change what they have."]
    if gpu is not None:
        kind = catalogue.gpu(gpu)
        places = ", ".join(kind.zones or kind.regions) or "places that are not known here"
        lines.insert(0, f"{kind.name} GPUs are in {places}.")
    return "\n".join(lines)


def as_json(catalogue: Catalogue, gpu: str | None) -> str:
    """Return the same as JSON."""
    kinds = [catalogue.gpu(gpu)] if gpu is not None else list(catalogue.gpus.values())
    machines = [
        {"name": name, "vcpus": machine.vcpus, "memory_gb": machine.memory_gb, "gpus": choices}
        for name, choices in _choices(catalogue, gpu).items()
        for machine in [catalogue.machine(name)]
    ]
    said = {"catalogue": catalogue.name, "date": str(catalogue.date), "sources": catalogue.sources, "machines": machines}
    return json.dumps({**said, "gpus": [_gpu(kind) for kind in kinds if kind.retired is None]}, indent=2)


def _gpu(gpu: Gpu) -> dict[str, object]:
    return {"name": gpu.name, "accelerator": gpu.accelerator, "zones": gpu.zones, "regions": gpu.regions}


def _choices(catalogue: Catalogue, gpu: str | None) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return which GPUs each machine may have, by kind."""
    if gpu is None:
        return {name: catalogue.choices(name) for name in catalogue.machines}
    kind = catalogue.gpu(gpu).name
    counts = {name: catalogue.allowed(name, kind) for name in catalogue.machines}
    return {name: {kind: allowed} for name, allowed in counts.items() if allowed}
