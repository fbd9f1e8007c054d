"""What travels to the workers of a cluster: a folder with the user's code, and packages from an index."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from raypool.errors import InvalidValueError
from raypool.profiles import Profile

MIB = 2**20

LARGE_BYTES = 100 * MIB
"""A folder that is larger than this takes its time on the way from a laptop."""

NAMED = 3
"""So many of its largest entries are named where a folder is too large."""

logger = logging.getLogger("raypool")


def runtime_env(profile: Profile) -> dict[str, Any]:
    """Return what Ray is to ship to the workers of a profile (its `runtime_env`), and warn of a large folder.

    Raises:
        InvalidValueError: `working_dir` is no folder, or more than Ray takes.

    Example:
        >>> runtime_env(Profile(packages=["scikit-learn>=1.5"]))
        {'pip': ['scikit-learn>=1.5']}
    """
    shipped: dict[str, Any] = {}
    if profile.packages:
        shipped["pip"] = list(profile.packages)
    if profile.working_dir is not None:
        folder = Path(profile.working_dir).expanduser().absolute()
        _check(folder)
        shipped["working_dir"] = str(folder)
    return shipped


def _check(folder: Path) -> None:
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE  # 512 MiB, if nobody has said otherwise

    if not folder.is_dir():
        raise InvalidValueError(f"working_dir: {folder} is no folder.")
    sizes = sizes_of(folder)
    total = sum(sizes.values())
    if total < min(LARGE_BYTES, GCS_STORAGE_MAX_SIZE):
        return
    largest = ", ".join(f"{name} ({size / MIB:.0f} MiB)" for name, size in Counter(sizes).most_common(NAMED))
    words = f"working_dir: {folder} has {total / MIB:.0f} MiB in {len(sizes)} entries; the largest: {largest}."
    step = "What need not travel can be named in a file .rayignore there, which is written like a .gitignore."
    if total >= GCS_STORAGE_MAX_SIZE:
        raise InvalidValueError(f"{words} Ray takes {GCS_STORAGE_MAX_SIZE / MIB:.0f} MiB at most. {step}")
    logger.warning("%s All of it travels to the cluster. %s", words, step)


def sizes_of(folder: Path) -> dict[str, int]:
    """Return how much of each entry of a folder would travel [bytes]: Ray packs files as they are.

    What its .gitignore and .rayignore files name is left out; who reads these is private to Ray, checked on Ray 2.60.
    """
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
    from ray._private.runtime_env.packaging import _dir_travel

    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    reads_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    silent = logging.getLogger("raypool.shipping")
    _dir_travel(folder, [], add, include_gitignore=reads_gitignore, logger=silent)
    return dict(sizes)
