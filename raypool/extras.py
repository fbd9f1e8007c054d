"""What only some of raypool needs, and pip installs with an extra: whether it is there."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {"jinja2": "Jinja2"}
"""How pip calls modules that have another name there."""


def check_installed(extra: str, what: str, *modules: str) -> None:
    """Make sure that the modules of an extra are installed; they are not imported.

    Args:
        extra: The extra that brings them.
        what: What needs them.
        modules: Their names.

    Raises:
        ModuleNotFoundError: One is missing; the message says how to get it.

    Example:
        >>> check_installed("plots", "A page", "json", "no_such_module")
        Traceback (most recent call last):
        ...
        ModuleNotFoundError: A page needs no_such_module, which is not installed: pip install "raypool[plots]"
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        names = " and ".join(PACKAGES.get(name, name) for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise ModuleNotFoundError(
            f'{what} needs {names}, which {verb} not installed: pip install "raypool[{extra}]"', name=missing[0]
        )
