"""The rules of the package's structure."""

from __future__ import annotations

from tests import house

PACKAGE = house.HERE / "raypool"
MODULES = house.modules(PACKAGE)


def test_no_modules_import_each_other() -> None:
    assert house.cycles(MODULES, PACKAGE) == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert house.classes_named_twice(MODULES) == []


def test_a_file_has_a_name_of_its_own() -> None:
    assert house.files_named_twice(MODULES) == []


def test_private_names_of_ray_are_in_one_file() -> None:
    """Others get them from `raypool.ray_private`, which imports them by name."""
    assert house.files_with_private_ray(MODULES, PACKAGE) == []
