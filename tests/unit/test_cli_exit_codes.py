"""How commands end: 0 all well, 1 something has failed, 2 wrong use."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    PoolBrokenError,
    PoolPreemptedError,
    ResourceError,
    Results,
    StartupError,
)
from raypool.cli import demo
from raypool.cli.main import main
from raypool.cli.output import errors_said

ENDS = [
    (InvalidValueError("no"), 2),
    (InvalidTypeError("no"), 2),
    (ResourceError("no", requested=2, available=1, holders=()), 2),
    (JournalError("no", run_dir="run"), 2),
    # met when all was done
    (JournalError("no", run_dir="run", results=Results([], [], list, {})), 1),
    (StartupError("no"), 1),
    (PoolBrokenError("no"), 1),
    (PoolPreemptedError("no"), 75),
]


def test_what_was_asked_wrongly_is_told_from_what_has_failed() -> None:
    @click.command()
    def command() -> None:
        with errors_said():
            raise errors.pop()

    errors: list[Exception] = []
    for error, status in ENDS:
        errors.append(error)
        done = CliRunner().invoke(command)
        assert (done.exit_code, done.stdout) == (status, "")
        assert done.stderr.endswith("Error: no\n")


@pytest.mark.parametrize(("is_as_meant", "status"), [(True, 0), (False, 1)])
def test_the_demo_ends_with_1_if_more_failed_than_its_mistake(
    monkeypatch: pytest.MonkeyPatch, is_as_meant: bool, status: int
) -> None:
    monkeypatch.setattr(demo, "run", lambda **_: is_as_meant)
    assert CliRunner().invoke(main, ["demo"]).exit_code == status


def test_ctrl_c_ends_a_command_as_shells_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    done = CliRunner().invoke(main, ["demo"])
    assert (done.exit_code, done.stderr) == (130, "Interrupted.\n")


@pytest.mark.ci
def test_the_demo_knows_its_mistake(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [{"network": network, "width": 8, "lr": 0.001} for network in ("mlp", "cnn")]
    monkeypatch.setattr(demo, "EPOCHS", 2)
    # it would count for all tests in this process
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(demo, "CONFIGS", [*good, demo.MISTAKE])
    assert demo.run(profile="inline", out=tmp_path)
    monkeypatch.setattr(demo, "CONFIGS", [*good, demo.MISTAKE, {**good[0], "width": -1}])
    assert not demo.run(profile="inline", out=tmp_path)


def test_wrong_use_ends_with_2() -> None:
    for line in (
        "demo --profile nowhere",
        "demo --workers 0",
        "replay nowhere 0",
        "gpus all",
        "swep",
    ):
        done = CliRunner().invoke(main, line.split())
        assert done.exit_code == 2, done.output
        assert "Error: " in done.stderr
