"""The software that each kind of GPU needs: an image with a driver, and a CUDA build of torch.

The table is `catalogues/software.toml`; each row has its source and date.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import Any

from packaging.version import Version

from raypool.errors import CloudError

AUTO = "auto"  # the build of torch for unknown GPUs: the installer asks the driver on the machine


@functools.cache
def _table() -> dict[str, Any]:
    file = resources.files("raypool.cluster").joinpath("catalogues", "software.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def image(provider: str, gpus: Iterable[str]) -> dict[str, Any]:
    """Return the row of the image for machines with GPUs of all these kinds (none: any image).

    Raises:
        CloudError: No image drives them all.

    Example:
        >>> image("aws", ["V100"])["install_driver"], image("aws", ["T4"])["driver"]
        (True, 595)
    """
    table = _table()
    kinds = [gpu for gpu in gpus if gpu in table["gpus"]] or ["T4"]
    names = {table["gpus"][gpu].get(provider) for gpu in kinds}
    for name in sorted(filter(None, names)):
        row: dict[str, Any] = table["images"][name]
        if not any(why_no_driver(gpu, row["driver"]) for gpu in kinds):
            return row
    raise CloudError(f"No image on {provider} has a driver for {' and '.join(kinds)}.")


def why_no_driver(gpu: str, driver: int) -> str | None:
    """Return why a GPU does not work with a branch of NVIDIA's driver, None if it does.

    Example:
        >>> why_no_driver("V100", 595)
        'V100 GPUs need driver 580 or older, but the image has 595'
    """
    last = _table()["gpus"].get(gpu, {}).get("last_driver")
    if last is None or driver <= last:
        return None
    return f"{gpu} GPUs need driver {last} or older, but the image has {driver}"


def torch_build(gpus: Iterable[str], torch: str) -> str:
    """Return the newest CUDA build of a version of torch that has kernels for all these GPUs.

    Raises:
        CloudError: That version has none.

    Example:
        >>> torch_build(["V100"], "2.13.0"), torch_build(["T4", "B200"], "2.13.0")
        ('cu126', 'cu130')
        >>> torch_build(["V100"], "2.15.0")
        Traceback (most recent call last):
        raypool.errors.CloudError: torch 2.15.0 has no build for V100 GPUs. torch 2.6 to before ...
    """
    kinds = [gpu for gpu in dict.fromkeys(gpus) if gpu in _table()["gpus"]]
    if not kinds:
        return AUTO
    fitting: list[str] = []
    for name, row in reversed(_table()["builds"].items()):
        if any(why_no_kernels(gpu, name) for gpu in kinds):
            continue
        first, *end = row["torch"]
        if Version(first) <= Version(torch) and not (end and Version(torch) >= Version(end[0])):
            return str(name)
        fitting.insert(0, f"{first} to before {end[0]}" if end else f"{first} or newer")
    advice = "No version has one: use a separate cluster for each kind"
    if fitting:
        advice = f"torch {' or '.join(fitting)} has one: install such a version here, too"
    raise CloudError(f"torch {torch} has no build for {' and '.join(kinds)} GPUs. {advice}.")


def why_no_kernels(gpu: str, build: str) -> str | None:
    """Return why a build of torch cannot use a GPU, None if it can or either is unknown.

    Example:
        >>> why_no_kernels("P100", "cu130")
        'torch for cu130 has kernels for compute capability 7.5 to 12.0, but P100 GPUs have 6.0'
    """
    table = _table()
    if gpu not in table["gpus"] or build not in table["builds"]:
        return None
    capability = table["gpus"][gpu]["capability"]
    low, high = table["builds"][build]["capabilities"]
    # Kernels run on newer GPUs of the same generation: those for 10.0 on 10.3.
    if low <= capability <= max(high, int(high) + 0.9):
        return None
    return (
        f"torch for {build} has kernels for compute capability {low} to {high}, but {gpu} GPUs"
        f" have {capability}"
    )
