"""Ray without the processes that have nothing to do; with them where this Ray cannot leave them
out.
"""

from __future__ import annotations

import sys

import pytest

from raypool.backends.ray.session import SWITCHES, without_helpers

node = pytest.importorskip("ray._private.node")
parameter = pytest.importorskip("ray._private.parameter")
services = pytest.importorskip("ray._private.services")
utils = pytest.importorskip("ray._private.utils")

PATCHED = [
    (node.Node, "start_api_server"),
    (parameter, "RayParams"),
    (services, "get_node"),
    (services, "_build_python_executable_command_memory_profileable"),
    (utils, "get_dashboard_dependency_error"),
]


def patched() -> list[object]:
    return [getattr(place, name) for place, name in PATCHED]


def test_everything_is_as_before_afterwards() -> None:
    before = patched()
    with without_helpers():
        settings = parameter.RayParams()
        assert {name: getattr(settings, name) for name in SWITCHES} == SWITCHES
        assert not set(patched()) & set(before)
        assert utils.get_dashboard_dependency_error() is not None
    assert patched() == before


def test_a_ray_without_these_switches_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter, "RayParams", lambda include_dashboard: None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before


@pytest.mark.parametrize(("place", "name"), PATCHED)
def test_a_ray_without_such_a_name_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str
) -> None:
    monkeypatch.delattr(place, name)
    others = [other for other in PATCHED if other != (place, name)]
    before = [getattr(*other) for other in others]
    with without_helpers():
        assert [getattr(*other) for other in others] == before


def test_a_ray_whose_names_are_elsewhere_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before
