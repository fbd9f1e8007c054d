"""Ray without the processes that have nothing to do; with them where this Ray cannot leave them
out.
"""

from __future__ import annotations

import sys

import pytest

from raypool.backends.ray.session import SWITCHES, without_helpers

node = pytest.importorskip("ray._private.node")
parameter = pytest.importorskip("ray._private.parameter")
utils = pytest.importorskip("ray._private.utils")


def test_everything_is_as_before_afterwards() -> None:
    before = node.Node.start_api_server, parameter.RayParams, utils.get_dashboard_dependency_error
    with without_helpers():
        settings = parameter.RayParams()
        assert {name: getattr(settings, name) for name in SWITCHES} == SWITCHES
        assert node.Node.start_api_server is not before[0]
        assert utils.get_dashboard_dependency_error() is not None
    assert (
        node.Node.start_api_server,
        parameter.RayParams,
        utils.get_dashboard_dependency_error,
    ) == before


def test_a_ray_without_these_switches_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter, "RayParams", lambda include_dashboard: None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before


@pytest.mark.parametrize(
    ("place", "name"), [(node.Node, "start_api_server"), (utils, "get_dashboard_dependency_error")]
)
def test_a_ray_without_such_a_name_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str
) -> None:
    monkeypatch.delattr(place, name)
    before = parameter.RayParams
    with without_helpers():
        assert parameter.RayParams is before


def test_a_ray_whose_names_are_elsewhere_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before
