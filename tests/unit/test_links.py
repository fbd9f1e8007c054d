"""Which links NCCL is told to use."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from raypool import InvalidTypeError, Profile
from raypool.gpus.devices import FAST_LINKS, prefer_fast_links
from raypool.profile_files import resolve_profile
from raypool.spmd import group

FAST = {FAST_LINKS: "1"}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Ethernet, three InfiniBand interfaces, of which two are of use, and one that
    is called much like them.
    """
    import psutil

    v4 = {
        "lo": "127.0.0.1",
        "eth0": "10.0.0.7",
        "ib1": "10.1.0.8",
        "ib0": "10.1.0.7",
        "ibdown": "10.1.0.9",
        "vib0": "10.2.0.1",
    }
    there = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in v4.items()
    }
    there["ibnoip"] = [SimpleNamespace(family=socket.AF_PACKET, address="00:11")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(
        psutil,
        "net_if_stats",
        lambda: {name: SimpleNamespace(isup=name != "ibdown") for name in there},
    )


def test_infiniband_is_named_where_it_is_wanted(interfaces: None) -> None:
    environ = dict(FAST)
    prefer_fast_links(environ)
    assert environ == {**FAST, "NCCL_SOCKET_IFNAME": "=ib0,ib1"}


def test_nothing_is_named_unasked_or_over_somebody(interfaces: None) -> None:
    for before in ({}, {**FAST, "NCCL_SOCKET_IFNAME": "eth0"}, {FAST_LINKS: "0"}):
        environ = dict(before)
        prefer_fast_links(environ)
        assert environ == before


def test_a_machine_without_infiniband_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {"eth0": [SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")]},
    )
    environ = dict(FAST)
    prefer_fast_links(environ)
    assert environ == FAST


def test_the_interface_of_a_group_gives_way_to_one_that_was_named(
    interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert group.interfaces_for("10.0.0.7") == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0,ib1")
    assert group.interfaces_for("10.0.0.7") == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert group.interfaces_for("10.0.0.7") == {}


def test_the_environment_of_workers() -> None:
    assert Profile().worker_env == {}
    assert Profile(env={"A": "b"}).worker_env == {"A": "b"}
    assert Profile(fast_multinode=True).worker_env == {"NCCL_IB_DISABLE": "0", FAST_LINKS: "1"}
    own = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "bond0"}
    assert Profile(fast_multinode=True, env=own).worker_env == {**own, FAST_LINKS: "1"}


def test_it_is_said_in_a_call_or_in_a_file(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_profile("local", {"fast_multinode": True}).fast_multinode
    (tmp_path / "raypool.toml").write_text(
        '[profiles.lab]\nfast_multinode = true\nenv = {NCCL_IB_HCA = "mlx5"}\n'
    )
    monkeypatch.chdir(tmp_path)
    assert resolve_profile("lab", {}).worker_env == {
        "NCCL_IB_DISABLE": "0",
        FAST_LINKS: "1",
        "NCCL_IB_HCA": "mlx5",
    }


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_it_is_a_yes_or_a_no(value: object) -> None:
    with pytest.raises(InvalidTypeError, match=f"fast_multinode={value!r} is not True or False"):
        Profile(fast_multinode=value)
