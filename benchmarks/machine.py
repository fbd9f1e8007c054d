"""What something was measured on, for the records."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.measuring import ROOT
from raypool.gpus.nvml import NvmlInventory, nvml

PACKAGES = ("raypool", "ray", "torch", "numpy", "pandas")
PEERS = (
    "joblib",
    "scikit-learn",
    "loky",
    "mpire",
    "dask",
    "distributed",
    "accelerate",
    "lightning-fabric",
)
"""Those that raypool is measured beside, and what they train, as they are installed."""


def machine():
    """Return where and when this is, and of what versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "is_changed": bool(_git("status", "--porcelain", "raypool")),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "peers": {name: found for name in PEERS if (found := _version_of(name)) is not None},
        "load": os.getloadavg(),
    }


def cards():
    """Return what GPUs there are, and what drives them; no CUDA context is made."""
    import torch

    with nvml() as library:
        driver = None if library is None else library.nvmlSystemGetDriverVersion()
    gpus = [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in NvmlInventory().devices()]
    return {
        "gpus": gpus,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def why_not():
    """Return why no GPU can be used here, None if one can."""
    import torch

    there = NvmlInventory().devices()
    if torch.cuda.is_available():
        return None
    if not there:
        return "There is no GPU here: NVIDIA's driver knows of none."
    if torch.version.cuda is None:
        return (
            f"There is a GPU here ({there[0].name}), but torch {torch.__version__} was built"
            " without CUDA. Install one with it: https://pytorch.org/get-started/locally."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        f"There is a GPU here ({there[0].name}), but torch cannot use it. CUDA_VISIBLE_DEVICES is"
        f" {visible!r}."
    )


def slug(name):
    """Return the name of a GPU as it can stand in the name of a file.

    Example:
        >>> slug("NVIDIA H200 NVL")
        'nvidia_h200_nvl'
    """
    return re.sub(r"[^a-z0-9]+", "_", (name or "unknown gpu").lower()).strip("_")


def _version_of(package):
    """Return the version of a package that need not be there, None if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor():
    """Return what the kernel calls the processor, "" if it does not say."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def _git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=False
    ).stdout.strip()
