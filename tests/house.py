"""How much there is of raypool, and how it hangs together: `python -m tests.house [folder of
another checkout]`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1]

TRACED = """
import os, sys, tempfile, threading
import raypool
from raypool import parpool

HOME = os.path.dirname(raypool.__file__)
seen = set()

def note(frame, event, _):
    if event == "call":
        seen.add(frame.f_code.co_filename)

def files(call):
    call()
    seen.clear()
    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else None
    sys.setprofile(note)
    call()
    sys.setprofile(None)
    return sum(file.startswith(HOME) for file in seen)

threading.setprofile(note)  # the threads of the pool that is opened now
folder = tempfile.mkdtemp()
number = iter(range(100))
with parpool(2, profile="threads", quiet=True) as pool:
    def cancel():
        future = pool.parfeval(threading.Event().wait, 60)
        while not future.running():
            pass
        future.cancel()
        future.exception() if not future.cancelled() else None
    calls = {
        "parfor": lambda: pool.parfor(abs, range(4)),
        "parfeval": lambda: pool.parfeval(abs, -1).result(),
        "run_dir": lambda: pool.parfor(abs, range(4), run_dir=f"{folder}/{next(number)}"),
        "cancel": cancel,
    }
    for name, call in calls.items():
        print(name, files(call), sep="=", end=" ")
"""
"""Counts the files of the package that a warm call enters, in all threads."""


class Module(NamedTuple):
    """A file of the package."""

    path: Path
    text: str
    tree: ast.Module


def modules(package: Path) -> list[Module]:
    return [
        Module(path, text, ast.parse(text))
        for path in sorted(package.rglob("*.py"))
        for text in [path.read_text()]
    ]


def lines_of_code(text: str) -> tuple[int, int]:
    """Return how many lines have code, and how many comments there are."""
    code, comments = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            code.add(token.start[0])
    return len(code), comments


def definitions(tree: ast.Module, kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def length(node: ast.AST) -> int:
    """Return how many lines a definition has, without its docstring."""
    body = node.body  # type: ignore[attr-defined]
    doc = (
        body[0]
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        else None
    )
    return node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)  # type: ignore[attr-defined]


def uses_private_ray(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(re.match(r"ray\.(.*\.)?_[a-z]", name) for name in names):
            return True
    return False


def used_once(all_modules: list[Module]) -> tuple[int, int]:
    """Return how many private functions stand in one place besides their own, and how many
    functions there are.
    """
    once = functions = 0
    for module in all_modules:
        words = Counter(re.findall(r"\w+", module.text))
        names = [
            node.name
            for node in ast.walk(module.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        functions += len(names)
        once += sum(
            words[name] == 2 for name in names if name.startswith("_") and not name.startswith("__")
        )
    return once, functions


def cycles(all_modules: list[Module], package: Path) -> list[list[str]]:
    """Return the sets of modules that import each other, at whatever place in the code."""
    names = {module_name(module.path, package): module for module in all_modules}
    edges = {
        name: {found for found in imported(module.tree, names) if found != name}
        for name, module in names.items()
    }
    edges.pop("raypool", None)  # the face of the package imports everything
    return [group for group in components(edges) if len(group) > 1]


def module_name(path: Path, package: Path) -> str:
    parts = ("raypool", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported(tree: ast.AST, names: dict[str, Module]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [name for name in (inner, str(node.module)) if name in names][:1]
        yield from imported(node, names)


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components (Tarjan)."""
    numbers: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = low[name] = len(numbers)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in numbers:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], numbers[other])
        if low[name] == numbers[name]:
            at = stack.index(name)
            found.append(stack[at:])
            del stack[at:]

    for name in edges:
        if name not in numbers:
            visit(name)
    return found


def classes_named_twice(all_modules: list[Module]) -> list[str]:
    names = Counter(
        node.name
        for module in all_modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1 and not name.startswith("_"))


def files_named_twice(all_modules: list[Module]) -> list[str]:
    names = Counter(module.path.name for module in all_modules)
    return sorted(
        name
        for name, count in names.items()
        if count > 1 and name not in ("__init__.py", "base.py")
    )


def files_with_private_ray(all_modules: list[Module], package: Path) -> list[str]:
    return [
        module_name(module.path, package) for module in all_modules if uses_private_ray(module.tree)
    ]


def measure(checkout: Path) -> Iterator[tuple[str, object]]:
    package = checkout / "raypool"
    found = modules(package)
    yield (
        "text without indentation [MB]",
        round(sum(len(line.strip()) for m in found for line in m.text.splitlines()) / 1e6, 3),
    )
    yield "modules", len(found)
    yield "modules at the top level", sum(module.path.parent == package for module in found)
    yield "sets of modules that import each other", len(cycles(found, package))
    yield "public class names defined twice", len(classes_named_twice(found))
    yield "file names used twice", len(files_named_twice(found))
    yield "files that use private names of Ray", len(files_with_private_ray(found, package))
    once, functions = used_once(found)
    yield "private functions used once, of all [%]", round(100 * once / functions, 1)
    code, comments = (
        sum(numbers)
        for numbers in zip(*(lines_of_code(module.text) for module in found), strict=True)
    )
    yield "comments per 100 lines of code", round(100 * comments / code, 1)
    design = (checkout / "DESIGN.md").read_text()
    yield "DESIGN.md, lines and longest", (design.count("\n"), max(map(len, design.splitlines())))
    yield "longest line", max(len(line) for module in found for line in module.text.splitlines())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    yield (
        "functions over 60 lines",
        sum(length(node) > 60 for module in found for node in definitions(module.tree, kinds)),
    )
    yield (
        "classes over 400 lines",
        sum(
            length(node) > 400
            for module in found
            for node in definitions(module.tree, (ast.ClassDef,))
        ),
    )
    traced = subprocess.run(
        [sys.executable, "-c", TRACED],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    yield "files that a warm call enters", traced.stdout.strip() + traced.stderr[-300:]


if __name__ == "__main__":
    for what, value in measure(Path(sys.argv[1]) if sys.argv[1:] else HERE):
        print(f"{what:45} {value}")
