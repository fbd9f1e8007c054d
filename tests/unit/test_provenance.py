"""What each call with a `run_dir` records about its code, command and packages; and replays."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raypool import load_results, parpool
from raypool.cli.main import main
from raypool.journal import provenance
from raypool.journal.provenance import MAX_DIFF_BYTES, masked

MODULE = """
from pathlib import Path

def helper(x):
    return x + 1

def train(x):
    Path(__file__).with_name("begun").touch()
    return helper(x)

def train_with(factor, x):
    return factor * x
"""


def git(*words: str) -> str:
    identity = ["-c", "user.name=me", "-c", "user.email=me@here"]
    return subprocess.run(
        ["git", *identity, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a repository with a module; the module does not stay imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(provenance, "GIT_S", 300.0)
    Path("of_provenance.py").write_text(MODULE)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    yield tmp_path
    sys.modules.pop("of_provenance", None)


def edit(old: str, new: str) -> None:
    """Change the module, and let it be imported again."""
    file = Path("of_provenance.py")
    file.write_text(file.read_text().replace(old, new))
    shutil.rmtree("__pycache__", ignore_errors=True)
    sys.modules.pop("of_provenance", None)


def sweep(run_dir: Path | str, fn: Any = None, **options: Any) -> dict[str, Any]:
    """Run two items; return what the call has recorded."""
    with parpool(profile="inline", quiet=True) as pool:
        fn = fn or import_module("of_provenance").train
        pool.parfor(fn, [1, 2], run_dir=run_dir, **options)
    done = CliRunner().invoke(main, ["show", str(run_dir), "--provenance", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)[-1]  # type: ignore[no-any-return]


def test_each_call_records_its_commit_changes_packages_and_command(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--token", "abc"])
    import_module("dateutil")
    first = sweep("run", seed=3)
    assert first["code"]["commit"] == git("rev-parse", "HEAD").strip()
    assert (first["code"]["changed"], first["code"]["diff"]) == ([], "")
    edit("x + 1", "x + 2")
    Path("notes.txt").touch()
    second = sweep("run", seed=3)
    code = second["code"]
    assert (code["folder"], code["changed"]) == (str(repository), ["of_provenance.py"])
    assert {"notes.txt", "run/"} <= set(code["untracked"])
    diff = Path("run/provenance", f"{code['diff']}.diff")
    assert diff.read_text() == git("diff", "HEAD")
    assert diff.stat().st_mode & 0o777 == 0o600
    assert (second["run"], second["seed"], second["pid"]) == (2, 3, os.getpid())
    assert second["command"] == ["python", "train.py", "--token", "***"]
    assert second["python"] == platform.python_version()
    names = ("pytest", "ray", "python_dateutil")
    assert {name: second["packages"].get(name) for name in names} == {
        name: metadata.version(name) for name in names
    }
    shown = CliRunner().invoke(main, ["show", "run", "--provenance"]).stdout
    assert CliRunner().invoke(main, ["show", "run", "--provenance", "--failed"]).exit_code == 2
    page = load_results("run").report("page.html").read_text()
    for text in (code["commit"], "train.py --token", "notes.txt", f"{code['diff']}.diff"):
        assert text in shown
        assert text in page


def test_a_partial_belongs_to_the_code_of_its_function(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its script, or the command line, was called in another folder."""
    train = functools.partial(import_module("of_provenance").train_with, 2)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(repository)])
    assert sweep("run", train)["code"]["folder"] == str(repository)
    sys.modules.pop("of_provenance")
    assert CliRunner().invoke(main, ["replay", "run", "1"]).stdout == "4\n"


def test_long_changes_are_cut() -> None:
    edit("x + 1", f"x + 1  # {'long' * MAX_DIFF_BYTES}")
    code = sweep("run")["code"]
    assert code["is_cut"]
    assert Path("run/provenance", f"{code['diff']}.diff").stat().st_size == MAX_DIFF_BYTES


def fake_git(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `git` be a script for the shell, in which $GIT is the real one."""
    monkeypatch.setenv("GIT", str(shutil.which("git")))
    script = Path("bin/git")
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{script.parent.absolute()}:{os.environ['PATH']}")


def test_no_item_waits_for_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = f"while [ ! -e {repository}/begun ]; do sleep 0.01; done"
    fake_git(f'{waits}; exec "$GIT" "$@"', monkeypatch)
    assert sweep("run")["code"] is not None


@pytest.mark.parametrize("hangs", ["status", "diff"])
def test_a_git_that_hangs_is_given_up(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_git(f'case "$*" in *{hangs}*) sleep 1000;; *) exec "$GIT" "$@";; esac', monkeypatch)
    monkeypatch.setattr(provenance, "GIT_S", 1.0)
    code = sweep("run")["code"]
    assert code is None or code["changed"] is None  # a slow machine may not even get the commit


def test_without_git_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert sweep("run")["code"] is None
    assert CliRunner().invoke(main, ["show", "run", "--provenance"]).exit_code == 0
    assert not caplog.records


def test_a_replay_of_other_code_warns(caplog: pytest.LogCaptureFixture) -> None:
    def replayed() -> str:
        caplog.clear()
        sys.modules.pop("of_provenance", None)
        assert CliRunner().invoke(main, ["replay", "run", "0"]).exit_code == 0
        return " ".join(record.message for record in caplog.records)

    caplog.set_level(logging.WARNING, "raypool")
    commit = sweep("run")["code"]["commit"][:10]
    assert not replayed()
    edit("x + 1", "x + 2")
    assert f"commit {commit}, not commit {commit} with uncommitted changes;" in replayed()
    assert "uses helper, whose code has changed" in replayed()
    git("commit", "-q", "-a", "-m", "second")
    now = git("rev-parse", "HEAD")[:10]
    assert f"they are from commit {commit}, not commit {now};" in replayed()
    # the code is the same, the repository is not
    edit("x + 2", "x + 1  # again")
    assert replayed().endswith(f"not commit {now} with uncommitted changes.")
    sweep("run", rerun="all")
    assert not replayed()
    edit("again", "and again")
    assert replayed().endswith(
        f"from commit {now} with uncommitted changes, and those changes are different now."
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--notify https://hooks.example/T0/B1", "--notify ***"),
        ("--wandb-api-key=1a API_KEY='2b' ok=1", "--wandb-api-key=*** API_KEY='***' ok=1"),
        ("s3://me:pass@bucket/a", "s3://***@bucket/a"),
        ("hf_abcdefghijklmnop --x ghp_0123456789abcdef", "*** --x ***"),
        (f"{'0a' * 20} --sha 1234abcd", "*** --sha 1234abcd"),
        ("--secret --force", "--secret --force"),
        (
            "--tokenizer bert --max-tokens 512 --keys a.csv",
            "--tokenizer bert --max-tokens 512 --keys a.csv",
        ),
    ],
)
def test_what_looks_like_a_secret_is_masked(command: str, shown: str) -> None:
    assert masked(command.split()) == shown.split()


def test_results_outlive_their_folder() -> None:
    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(abs, [-1], run_dir="run")
    shutil.rmtree("run")
    assert pickle.loads(pickle.dumps(results)) == [1]
