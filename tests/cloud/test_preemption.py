"""What the clouds say of machines that they are about to take away, asked of a server that keeps to
their rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raypool.cluster import preemption
from raypool.cluster.preemption import Ec2, Gce, Notice, find_ray, main, watch
from raypool.cluster.slurm_job import UNTOLD_S, deadline
from raypool.errors import CloudError
from tests.cloud.fake_metadata import FakeMetadata, in_iso, in_mail, serving


@pytest.fixture
def metadata() -> Iterator[FakeMetadata]:
    with serving() as fake:
        yield fake


def event(after_s: float, **entries: str) -> dict[str, str]:
    return {
        "Code": "instance-stop",
        "NotBefore": in_mail(after_s),
        "EventId": "instance-event-1",
        "State": "active",
        **entries,
    }


def is_in(notice: Notice, seconds: float) -> bool:
    """Whether a machine is to go so many seconds from now; the test may have stood still for a
    while since it has heard of it.
    """
    return seconds - 30 < notice.gone_at - time.time() < seconds + 5


# --- what is a notice -----------------------------------------------------------------------------


def test_of_a_machine_that_stays_nothing_is_said(metadata: FakeMetadata) -> None:
    assert Gce(metadata.url).find_notice() is None
    assert Ec2(metadata.url).find_notice() is None


def test_a_node_of_slurm_has_a_deadline_while_the_controller_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray takes no infinite one."""
    monkeypatch.setenv("PATH", "")  # scontrol fails
    assert is_in(Notice("Slurm is about to take this node back", deadline("7")), UNTOLD_S)


def test_a_spot_machine_of_compute_engine(metadata: FakeMetadata) -> None:
    metadata.preempted = "TRUE"
    # an hour's notice is not what counts now
    metadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    notice = Gce(metadata.url).find_notice()
    assert notice is not None
    assert notice.words == "Compute Engine is about to preempt this spot machine"
    assert is_in(notice, 25)


@pytest.mark.parametrize(("has_gpus", "seconds"), [(True, 3600), (False, 60)])
def test_maintenance_of_compute_engine(
    metadata: FakeMetadata,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_gpus: bool,
    seconds: float,
) -> None:
    monkeypatch.setattr(preemption, "NVIDIA", tmp_path if has_gpus else tmp_path / "nvidiactl")
    metadata.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"  # moved while it runs
    assert Gce(metadata.url).find_notice() is None
    metadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    notice = Gce(metadata.url).find_notice()
    assert notice is not None
    assert is_in(notice, seconds)


def test_a_spot_machine_of_ec2(metadata: FakeMetadata) -> None:
    metadata.action = json.dumps({"action": "hibernate", "time": in_iso(120)})
    metadata.events = "broken"  # is not looked at any more
    notice = Ec2(metadata.url).find_notice()
    assert notice is not None
    assert notice.words == "Amazon EC2 is about to hibernate this spot machine"
    assert is_in(notice, 120)


def test_of_the_events_of_ec2_those_are_notices_that_are_near(metadata: FakeMetadata) -> None:
    metadata.events = json.dumps(
        [event(14 * 24 * 3600), event(600, State="completed"), event(600, State="canceled")]
    )
    assert Ec2(metadata.url).find_notice() is None
    metadata.events = json.dumps([event(3000), event(1800, Code="system-reboot"), event(3400)])
    notice = Ec2(metadata.url).find_notice()
    assert notice is not None
    assert notice.words == "Amazon EC2 has scheduled system-reboot for this machine"
    assert is_in(notice, 1800)


def test_a_proxy_is_not_asked(metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    metadata.preempted = "TRUE"
    assert Gce(metadata.url).find_notice() is not None


# --- what is made of it ---------------------------------------------------------------------------


class Node:
    """Stands for Ray's node: as long as the test has something to look at."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self._is_alive = is_alive
        self.told: list[Notice] = []
        self.refusals = 0

    @property
    def is_alive(self) -> bool:
        return self._is_alive()

    def drain(self, notice: Notice) -> None:
        if self.refusals:
            self.refusals -= 1
            raise CloudError("the head restarts")
        self.told.append(notice)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gce, "look_s", 0.01)
    monkeypatch.setattr(Ec2, "look_s", 0.01)
    monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", 60.0)


def steps(metadata: FakeMetadata, *changes: Callable[[], None]) -> Callable[[], bool]:
    """Change something after every three looks; the node is gone after the last."""
    todo = iter(changes)
    looks = 0

    def is_alive() -> bool:
        nonlocal looks
        looks += 1
        if looks % 3:
            return True
        change = next(todo, None)
        if change is not None:
            change()
        return change is not None

    return is_alive


def test_ray_is_told_once_and_again_if_it_ends_sooner(metadata: FakeMetadata) -> None:
    node = Node(
        steps(
            metadata,
            lambda: setattr(metadata, "maintenance", "TERMINATE_ON_HOST_MAINTENANCE"),
            lambda: setattr(metadata, "preempted", "TRUE"),
            lambda: None,
        )
    )
    watch(Gce(metadata.url), node)  # type: ignore[arg-type]
    later, sooner = node.told
    assert later.gone_at > sooner.gone_at


@pytest.mark.parametrize("cloud", [Gce, Ec2])
def test_a_metadata_server_in_trouble_is_asked_on(
    metadata: FakeMetadata,
    cloud: type[Gce | Ec2],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that fails, is silent, or says what nobody understands; said once, not with every
    look.
    """

    def slow() -> None:
        metadata.status, metadata.delay_s = None, 300
        monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", 0.2)

    def nonsense() -> None:
        monkeypatch.setattr(preemption, "ANSWER_TIMEOUT_S", 60)
        metadata.delay_s, metadata.preempted, metadata.action, metadata.maintenance = (
            0,
            "<html>",
            "<html>",
            "<html>",
        )

    def well() -> None:
        metadata.preempted = "TRUE"
        metadata.take_back(120)

    metadata.status = 503
    node = Node(steps(metadata, lambda: None, slow, nonsense, well, lambda: None))
    watch(cloud(metadata.url), node)  # type: ignore[arg-type]
    assert len(node.told) == 1
    said = [record.getMessage() for record in caplog.records]
    assert sum("503" in words for words in said) == 1
    assert sum("timed out" in words for words in said) == 1
    assert said.count("Preemption notices work again.") == 1


def test_without_a_metadata_server_it_waits_for_one(
    metadata: FakeMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(steps(metadata, lambda: None, lambda: None))
    watch(Gce("http://127.0.0.1:9"), node)  # type: ignore[arg-type]
    assert node.told == []
    assert len(caplog.records) == 1


def test_a_head_that_does_not_hear_is_told_again(metadata: FakeMetadata) -> None:
    metadata.preempted = "TRUE"
    node = Node(steps(metadata, lambda: None))
    node.refusals = 2
    watch(Gce(metadata.url), node)  # type: ignore[arg-type]
    assert len(node.told) == 1


# --- where there is no Ray ------------------------------------------------------------------------


def test_a_machine_without_ray(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preemption, "RAY_TIMEOUT_S", 0.0)
    with pytest.raises(CloudError, match="did not start on this machine within 0 s"):
        find_ray("no such node")
    assert main(["--cloud", "gcp", "--node", "no such node"]) == 1
    assert "Start it first" in caplog.text


def test_a_cloud_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--cloud", "azure"])
    assert "invalid choice: 'azure'" in capsys.readouterr().err
