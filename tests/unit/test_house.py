"""The rules of the package's structure, with those who break them today: these lists may only get shorter."""

from __future__ import annotations

from tests import house

PACKAGE = house.HERE / "raypool"
MODULES = house.modules(PACKAGE)

CYCLES: list[list[str]] = []

CLASSES_NAMED_TWICE = """
    Call Driver
"""

FILES_NAMED_TWICE = """
    failures submit
"""

PRIVATE_NAMES_OF_RAY = """

"""


def test_no_modules_import_each_other() -> None:
    found = [sorted(name.removeprefix("raypool.") for name in group) for group in house.cycles(MODULES, PACKAGE)]
    assert found == CYCLES


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert house.classes_named_twice(MODULES) == CLASSES_NAMED_TWICE.split()


def test_a_file_has_a_name_of_its_own() -> None:
    assert [name.removesuffix(".py") for name in house.files_named_twice(MODULES)] == FILES_NAMED_TWICE.split()


def test_private_names_of_ray_are_in_few_files() -> None:
    found = house.files_with_private_ray(MODULES, PACKAGE)
    assert [name.removeprefix("raypool.") for name in found] == PRIVATE_NAMES_OF_RAY.split()
