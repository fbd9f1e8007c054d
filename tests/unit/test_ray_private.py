"""The Ray that is installed has all private names that raypool uses, and raypool uses all that are
listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from raypool import ray_private


def used() -> Iterator[str]:
    for path in Path(ray_private.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "raypool.ray_private":
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ray_private":
                yield node.attr


def test_ray_has_every_private_name() -> None:
    assert {*used()} == {*ray_private.NAMES}
    for name, place in ray_private.NAMES.items():
        assert getattr(ray_private, name) is not None
        assert place.reason
