"""Imports point downwards, and each kind of foreign package is imported only where DESIGN.md
says.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "raypool"

# From the top down; a module may import from its own floor and from those below. No modules import
# each other: test_house.py.
FLOORS = [
    "__main__ cli",
    "interop testing batches",
    "pool",
    "parallel_for search train spmd",
    "engine",
    "backends",
    "results views journal loggers watch",
    "task futures cluster",
    "channel worker options profiles profile_files",
    "core gpus",
    "errors equivalents ray_private",
]

# the last asks Ray of GPUs that are not NVIDIA's
RAY_MAY_STAND_IN = ("backends.ray.", "cluster.", "train.", "gpus.table")


IN_WORKERS = {
    "train.data",
    "train.fit",
    "train.fit_loop",
    "train.managed",
    "train.predict",
    "train.ray_train",
}
"""They are imported by what needs torch or Ray Train anyway, and by nothing else."""

HEAVY = {"torch", "pandas", "sklearn", "matplotlib"}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found.append((name.removesuffix(".__init__"), ast.parse(path.read_text())))
    return found


@functools.cache
def floor_of(module: str) -> int:
    levels = [
        (len(entry), level)
        for level, floor in enumerate(FLOORS)
        for entry in floor.split()
        if f"{module}.".startswith(f"{entry}.")
    ]
    assert levels, f"raypool.{module} stands on no floor: add it to FLOORS and to DESIGN.md"
    return max(levels)[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """All that is imported, also inside functions, but not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(ast.Module([node], []))


def test_imports_point_downwards() -> None:
    """The face of the package names everything; all other modules know only what is below them."""
    upward = [
        f"{module}: {name}"
        for module, tree in modules()
        if module != "__init__"
        for name in imports(tree)
        if name.startswith("raypool.")
        and floor_of(name.removeprefix("raypool.")) < floor_of(module)
    ]
    assert not upward


def test_the_design_has_the_same_floors() -> None:
    rows = re.findall(
        r"^\| (\d+) \| `([^`]+)` \|", (PACKAGE.parent / "DESIGN.md").read_text(), re.MULTILINE
    )
    assert rows == [(str(len(FLOORS) - level), floor) for level, floor in enumerate(FLOORS)]


def test_ray_and_torch_are_imported_only_where_they_may() -> None:
    wrong = []
    for module, tree in modules():
        if not module.startswith(RAY_MAY_STAND_IN):
            wrong += [
                f"{module}: {name}" for name in imports(tree) if name.partition(".")[0] == "ray"
            ]
        if module != "cli.demo" and module not in IN_WORKERS:
            wrong += [
                f"{module}: {name}"
                for name in top_level_imports(tree)
                if name.partition(".")[0] in HEAVY
            ]
    assert not wrong


def test_users_and_workers_do_not_wait_for_imports_that_they_do_not_need() -> None:
    heavy = """ray torch pandas numpy rich click psutil cloudpickle argparse asyncio hashlib html http
        importlib.metadata multiprocessing socket sqlite3 ssl subprocess tomllib urllib.request"""
    for needed, unneeded in (
        ("from raypool import parpool", heavy),
        ("from raypool import *", "ray torch pandas numpy matplotlib sklearn"),
        ("import raypool.backends.ray.worker", "raypool.pool raypool.core.scheduler"),
    ):
        code = f"{needed}; import sys; print(sorted(set({unneeded.split()}) & set(sys.modules)))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"
