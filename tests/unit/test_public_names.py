"""One namespace for the user, in order, and every name explained."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raypool

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_and_complete() -> None:
    public = sorted(
        name
        for name, value in vars(raypool).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    )
    assert [name for name in public if name not in raypool.__all__] == []
    assert all(hasattr(raypool, name) for name in raypool.__all__)  # some are imported only now
    assert raypool.__all__ == sorted(raypool.__all__, key=lambda name: (name[0].islower(), name))


def test_a_name_is_the_same_for_type_checkers_and_when_it_runs() -> None:
    (seen,) = (
        node
        for node in ast.parse(Path(raypool.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == raypool._HOMES
    assert sorted(raypool._HOMES) == sorted(raypool.__all__)
    assert {*raypool.__all__} <= {*dir(raypool)}


def test_the_errors_are_where_tracebacks_say(run_python: Callable[..., Any]) -> None:
    run_python("""
        import raypool
        assert raypool.errors.TaskError is raypool.TaskError
        try:
            raypool.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        else:
            raise AssertionError
    """)


def test_every_public_name_is_explained() -> None:
    silent = []
    for name in raypool.__all__:
        value = getattr(raypool, name)
        entries = {name: value}
        if inspect.isclass(value) and not issubclass(value, BaseException):
            members = {
                f"{name}.{member}": entry
                for member, entry in vars(value).items()
                if not member.startswith("_")
            }
            entries |= {
                key: entry
                for key, entry in members.items()
                if inspect.isfunction(entry) or isinstance(entry, property)
            }
        silent += [key for key, entry in entries.items() if not inspect.getdoc(entry)]
    assert not silent


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert raypool.__version__ == project["version"]
    assert re.search(
        rf"^## \[?{re.escape(project['version'])}",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    said = subprocess.run(
        [sys.executable, "-m", "raypool", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said == f"raypool, version {raypool.__version__}\n"
