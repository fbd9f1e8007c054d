"""All that users can name: classes, functions, their arguments and defaults, and the options of the
command line.

`python -m tests.golden.public_api` writes public_api.txt anew; what differs is what users lose or
gain.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import click

from raypool.cli.main import main

FILE = Path(__file__).parent / "public_api.txt"

MODULES = ("raypool", "raypool.testing", "raypool.interop.multiprocessing")

MADE_BY_USERS = {
    "DataQueue",
    "FaultPlan",
    "GpuDevice",
    "MetricBuffer",
    "Pool",
    "Profile",
    "RunOptions",
    "SimulatedGpus",
    "Tls",
    "TrainingOptions",
    "WorkerResources",
}
"""Classes whose constructors are public. Users get objects of the other classes from raypool."""


def described() -> str:
    lines: list[str] = []
    for module in MODULES:
        lines += [f"# {module}"]
        for name in importlib.import_module(module).__all__:
            lines += of_value(name, getattr(importlib.import_module(module), name))
    return "\n".join([*lines, "# command line", *of_command("raypool", main)]) + "\n"


def of_value(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}"
    elif issubclass(value, Enum):
        yield f"{name}: {', '.join(value.__members__)}"
    else:
        others = [
            base.__name__
            for base in value.__mro__[1:-1]
            if not base.__module__.startswith("raypool")
        ]
        yield (
            f"{name}{signature(value) if name in MADE_BY_USERS else ''}{': ' * bool(others)}{', '.join(others)}"
        )
        own = [base for base in value.__mro__ if base.__module__.startswith("raypool")]
        for member in sorted(
            {member for base in own for member in vars(base) if not member.startswith("_")}
        ):
            yield from of_member(f"    {name}.{member}", inspect.getattr_static(value, member))


def of_member(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, property) or type(member).__name__ == "cached_property":
        getter = member.fget if isinstance(member, property) else member.func  # type: ignore[attr-defined]
        yield f"{name}: {getter.__annotations__.get('return')}"
    elif callable(member):
        yield f"{name}{signature(member)}"
    else:
        yield name


def signature(value: Any) -> str:
    try:
        return re.sub(r"'| at 0x\w+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


def of_command(name: str, command: click.Command) -> Iterator[str]:
    parameters = [
        f"{'/'.join([*each.opts, *each.secondary_opts])}{f'={each.default}' if isinstance(each.default, (str, int)) else ''}"
        for each in command.params
        if not getattr(each, "hidden", False)
    ]
    yield " ".join([name, *parameters])
    if isinstance(command, click.Group):
        for sub in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), sub)
            assert found is not None
            yield from of_command(f"{name} {sub}", found)


if __name__ == "__main__":
    FILE.write_text(described())
