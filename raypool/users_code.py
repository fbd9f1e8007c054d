"""Tells the user's own modules, which a pool may look into, from installed packages and the standard library."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, wherever they are."""


def is_users(module: str | None) -> bool:
    """Return whether a module, by name, is of the user's project; a script, a notebook and what is not imported here are."""
    if module is None or module in ("__main__", "__mp_main__") or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return isinstance(file, str) and not _is_installed(file)


@functools.lru_cache(4096)
def _is_installed(file: str) -> bool:
    path = Path(file).resolve()
    return not INSTALLED.isdisjoint(path.parts) or not _libraries().isdisjoint(path.parents)


@functools.cache
def _libraries() -> frozenset[Path]:
    """Return the folders of the standard library, of installed packages and of raypool itself."""
    folders: list[str | Path] = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(Path(folder).resolve() for folder in [*folders, Path(__file__).parent])
