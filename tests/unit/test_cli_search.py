"""`raypool search`: what it reads, prints, and how it ends."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raypool import load_results
from raypool.cli.main import main
from raypool.journal.lock import is_in_use

MODULE = """
from raypool import current_task, report

def train(config):
    for epoch in range(9):
        report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
        if current_task().should_stop:
            break
    return {"accuracy": config["x"] * (epoch + 1)}

def forget(config):
    return {} if current_task().index == 1 else {"accuracy": config["x"]}

def interrupted(config):
    if current_task().index == 2:
        raise KeyboardInterrupt
    return train(config)

def fail(config):
    raise LookupError("no data")

def named_as_columns(config):
    return {"error": config["x"], "trial": config["x"]}

def diverge(config):
    return float("inf")
"""

SPACE = """
x = {uniform = [0, 1]}
rate = {log_uniform = [1e-5, 1e-1]}
kind = {choice = ["mlp", "cnn"]}
width = {int_uniform = [16, 512], log = true}
epochs = 9
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with a module and a space; the module does not stay imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "module_of_search.py").write_text(MODULE)
    (tmp_path / "space.toml").write_text(SPACE)
    yield tmp_path
    sys.modules.pop("module_of_search", None)


def raypool(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def search(*options: str, function: str = "train", space: str = "space.toml") -> Result:
    target = f"module_of_search:{function}"
    return raypool("search", target, space, "--run-dir", "run", "--profile", "inline", *options)


def test_the_best_trials_are_the_table_and_a_second_call_continues(folder: Path) -> None:
    options = ("--metric", "accuracy", "--halving", "9", "--seed", "1", "--num-trials")
    done = search(*options, "12")
    assert done.exit_code == 0, done.output
    heading, best, *others = (line.split() for line in done.stdout.splitlines())
    assert heading[:4] == ["trial", "state", "accuracy", "epochs"]
    assert (best[1], best[3]) == ("complete", "9")
    assert len(others) == 9
    assert "The 10 best, of 12 trials." in done.stderr
    assert done.stderr.splitlines()[-1].endswith("The trials are in run.")
    assert len(load_results("run")) == 12
    ended = search(*options, "99", "--until-score", "0", "--until-seconds", "1e9", "--json")
    assert len(json.loads(ended.stdout)) == 12, "it has that score already"
    more = search(*options, "15", "--json")
    assert more.exit_code == 0, more.output
    trials = json.loads(more.stdout)
    assert sorted(trial["trial"] for trial in trials) == list(range(15))
    assert {trial["item_epochs"] for trial in trials} == {9}, "beside those that it has trained"
    line = rf"\d complete, \d+ pruned; best accuracy {trials[0]['accuracy']:.6g} \(trial"
    assert re.search(f"^15 trials: {line}", raypool("show", "run").stderr)
    assert re.search(rf"search\.train +15 +{line}", raypool("ls").stdout)


@pytest.mark.parametrize("metric", ["error", "trial"])
def test_a_metric_with_the_name_of_another_column_keeps_its_scores(metric: str) -> None:
    options = ("--metric", metric, "--mode", "min", "--num-trials", "3", "--seed", "1", "--json")
    done = search(*options, function="named_as_columns")
    assert done.exit_code == 0, done.output
    for table in (done.stdout, raypool("show", "run", "--json").stdout):
        trials = json.loads(table)
        assert [trial[f"score_{metric}"] for trial in trials] == [trial["x"] for trial in trials]
        assert (sorted(trial["trial"] for trial in trials), trials[0]["error"]) == ([0, 1, 2], None)


def test_after_ctrl_c_trials_that_wait_at_a_rung_have_not_finished() -> None:
    options = ("--metric", "accuracy", "--halving", "9", "--num-trials", "9")
    done = search(*options, function="interrupted")
    assert done.exit_code == 130
    assert "Interrupted: 0 of 9 items finished" in done.stderr


def test_a_trial_that_returned_no_score_is_shown_as_failed() -> None:
    search("--metric", "accuracy", "--num-trials", "3", function="forget")
    [heading, failed] = (
        line.split() for line in raypool("show", "run", "--failed").stdout.splitlines()
    )
    assert (heading[0], failed[0]) == ("trial", "1")


def test_failures_and_mistakes(folder: Path) -> None:
    for _ in range(2):  # also if they failed in an earlier call
        failed = search("--num-trials", "2", function="fail")
        assert failed.exit_code == 1
        assert "LookupError: no data" in failed.stderr
    diverged = raypool(
        *("search", "module_of_search:diverge", "space.toml", "--run-dir", "other"),
        *("--profile", "inline", "--num-trials", "2"),
    )
    assert diverged.exit_code == 1, "there is no best trial"
    for space, words in [
        ("x = {unifrm = [0, 1]}", "x must be a plain value or a range.*Did you mean uniform"),
        ("\ufeffx = {uniform = [1, 0]}", "x: The range from 1 to 0 is empty"),
        ("x = {uniform = [1]}", "x: .*missing 1 required"),
        ("x = {uniform = [0, 1], stp = 3}", "x: .*'stp'"),
        ("x = [1, 2]", r"search\.choice"),
        ("x =", "is not TOML"),
        ("x = 1\ny = 2\nx = {uniform = [0, 1]}", "bad.toml defines x twice"),
    ]:
        (folder / "bad.toml").write_text(space)
        done = search("--num-trials", "2", function="fail", space="bad.toml")
        assert done.exit_code in (1, 2)
        assert re.search(words, done.stderr.replace("\n", " ")), (words, done.stderr)
    hurried = search("--num-trials", "2", "--cancel-grace", "-1", function="fail")
    assert "cancel_grace_s=-1.0 leaves no time" in hurried.stderr
    both = search("--num-trials", "2", "--halving", "9", "--median")
    assert both.exit_code == 2
    assert "Choose one" in both.stderr
    assert search("--num-trials", "2", space="none.toml").exit_code == 2
    assert '\n  kind = {choice = ["mlp", "cnn"]}\n' in search("--help").stdout
    gangs = search("--num-trials", "2", "--workers-per-trial", "2", function="fail")
    assert gangs.exit_code != 0
    assert "workers_per_trial=2: requested 2 workers, available 1." in gangs.stderr
    assert not is_in_use(folder / "run")


def test_a_search_without_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.errors.find_spec", lambda name: None)
    done = search("--num-trials", "2")
    assert (done.exit_code, done.stderr) == (
        1,
        "Error: A search space needs optuna, which is not installed: pip install"
        ' "raypool[search]"\n',
    )
