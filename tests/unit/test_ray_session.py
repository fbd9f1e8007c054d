"""Joining Ray while another thread leaves one that has died, and what is known of claims there."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from raypool.backends.ray import claims, session
from raypool.backends.ray.claims import Claim, locate
from raypool.gpus.nvml import NvmlInventory
from raypool.worker.folders import hold, remove_unheld
from tests.unit.fake_nvml import FakeCard, FakeNvml


class JoinedError(Exception):
    """The next Ray is about to start."""


def test_a_pool_that_is_opened_while_a_dead_ray_is_left_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    someone_waits, is_given_up = threading.Event(), threading.Event()

    class Lock(threading.Condition):
        def wait_for(self, *args: Any) -> bool:
            someone_waits.set()
            return super().wait_for(*args)

    def wake() -> list[int]:
        is_given_up.set()
        someone_waits.wait(300)
        return []

    def join(*_: Any) -> None:
        raise JoinedError

    monkeypatch.setattr(session, "_lock", Lock(threading.Lock()))
    monkeypatch.setattr(session, "_wake", wake)
    monkeypatch.setattr(session, "_is_initialized", lambda: False)
    monkeypatch.setattr(session, "_prepare", join)
    leaving = threading.Thread(target=session.give_up_ray, args=[None])
    leaving.start()
    try:
        assert is_given_up.wait(300)
        with pytest.raises(JoinedError):
            session.join_ray()
    finally:
        someone_waits.set()
        leaving.join()


def test_the_files_of_a_ray_that_somebody_else_has_shut_down_go_with_its_last_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    held = hold(folder)
    monkeypatch.setattr(session, "_files", (folder, held))
    monkeypatch.setattr(session, "_is_initialized", lambda: False)
    session.leave_ray(pytest.fail, "the connection that was")
    assert not folder.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)


def test_logs_that_an_error_names_stay_and_nobody_waits_for_their_ray(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """Neither a descriptor nor the process that ends what is left of that Ray."""
    folder, held = session._make_files()
    monkeypatch.setattr(session, "_files", (folder, held))
    monkeypatch.setattr(session, "_is_initialized", lambda: False)
    logs = session.keep_logs()
    session.leave_ray(pytest.fail, "the connection that was")
    assert logs == folder / "session_latest" / "logs"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    assert eventually(lambda: not processes_about(folder))
    remove_unheld(folder)  # as the next Ray does
    assert folder.exists()
    shutil.rmtree(folder)


def processes_about(folder: Path) -> list[int]:
    """Return the processes whose commands name a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if str(folder) in process.cmdline():
                found.append(process.pid)
    return found


def test_only_the_users_of_this_ray_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of one that the user has shut down may still be there, and may end later."""
    copied: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(session, "is_forked", lambda: False)
    monkeypatch.setattr(session, "_users", 0)
    monkeypatch.setattr(session, "_used", None)
    for connection in ("the first", "the second"):
        monkeypatch.setattr(session, "connection", lambda connection=connection: connection)
        session.join_ray()
        session.join_ray()
    session.leave_ray(copied.append, "the first")
    session.leave_ray(copied.append, "the second")
    assert copied == []
    session.leave_ray(copied.append, "the second")
    assert copied == [True], "the user may shut Ray down now"


def test_where_a_claim_was_is_known_when_its_node_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {"state": "CREATED", "bundles_to_node_id": {0: "first"}}
    monkeypatch.setattr(claims, "placement_group_table", lambda _: table)
    claim = Claim(None, SimpleNamespace(first_workers=1))  # type: ignore[arg-type]
    assert locate(claim) == claim.last_node_id == "first"
    table["state"] = "RESCHEDULING"
    assert locate(claim) is None is locate(claim)
    assert claim.last_node_id == "first"
    table |= {"state": "CREATED", "bundles_to_node_id": {0: "second"}}
    assert locate(claim) == claim.last_node_id == "second"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("-1", 0),
        ("0,1,", 2),
        ("1,1", 0),
        ("2", 0),
        ("0,1", 2),
        ("GPU-a, GPU-b", 1),
        ("MIG-a, MIG-b", 2),
        ("MIG-b,MIG-b,MIG-c", 1),
        ("MIG-c", None),
        (None, None),
    ],
)
def test_ray_has_as_many_gpus_as_cuda_sees(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    visible: str | None,
    count: int | None,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    divided = FakeCard(uuid="GPU-a", mig_mode=[1, 1], instances={0: "MIG-a", 1: "MIG-b"})
    nvml = FakeNvml(divided, FakeCard(uuid="GPU-b"))
    monkeypatch.setattr(session, "NVIDIAS", NvmlInventory(nvml))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert session.count_gpus(None) == count
    assert not caplog.text
    nvml.cards.clear()  # no NVIDIA GPU: the variable may be for others
    assert session.count_gpus(None) is None


def test_numbers_that_cuda_may_count_otherwise_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml(FakeCard(name="NVIDIA L4"), FakeCard(name="NVIDIA H200", uuid="GPU-b"))
    monkeypatch.setattr(session, "NVIDIAS", NvmlInventory(nvml))
    for order, warnings in ("PCI_BUS_ID", 0), ("FASTEST_FIRST", 1):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
        for visible, count in ("1", 1), ("0,1", 2), ("GPU-b", 1):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert session.count_gpus(None) == count
        assert caplog.text.count("Set CUDA_DEVICE_ORDER=PCI_BUS_ID") == warnings
