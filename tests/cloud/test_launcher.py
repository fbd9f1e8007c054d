"""What is said of clusters that cannot be started, and of those that are not there. With real machines: test_on_premises.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool.cli import main
from raypool.cloud import files, kubernetes, launcher
from raypool.cloud.drafts import Draft
from raypool.cloud.tokens import make_token, token_path
from raypool.errors import CloudError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the token, and what Ray's launcher notes down of a cluster, out of the home of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / ".ray" / "auth_token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write the file of a cluster on machines that nobody has."""
    path = tmp_path / "cluster.yaml"
    path.write_text(files.text_of(Draft(provider="on-prem", hosts=("192.0.2.1", "192.0.2.2")).plan(), "raypool", path.name))
    return path


def test_a_bad_file_is_refused_before_anything_is_made(file: Path, home: Path) -> None:
    file.write_text(file.read_text().replace("head_ip: 192.0.2.1", "head_ip: 192.0.2.2"))
    done = CliRunner().invoke(main, ["cluster", "up", str(file)])
    assert done.exit_code == 2
    assert "192.0.2.2 is here for the second time" in done.output
    assert not (home / ".ray").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # Ray leaves files open
@pytest.mark.parametrize("command", ["status", "connect"])
def test_of_a_cluster_that_does_not_run(file: Path, command: str) -> None:
    done = CliRunner().invoke(main, ["cluster", command, str(file)])
    assert done.exit_code == 1
    assert "Ray's launcher has failed" in done.output
    assert "not found" in done.output


@pytest.mark.parametrize("function", [launcher.up, launcher.down, launcher.status])
def test_files_that_are_not_for_the_launcher(tmp_path: Path, function: object) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text(files.render([kubernetes.write(Draft(provider="kubernetes", gpu="T4").plan())], []))
    assert callable(function)
    with pytest.raises(CloudError, match=r"is no file for Ray's launcher.*A cluster on Kubernetes is made by"):
        function(path)


def test_the_token_is_its_owners_only() -> None:
    make_token()
    token = token_path().read_text()
    assert len(token) == 64
    assert token_path().stat().st_mode & 0o777 == 0o600
    assert token_path().parent.stat().st_mode & 0o777 == 0o700
    token_path().chmod(0o644)
    make_token()
    assert token_path().stat().st_mode & 0o777 == 0o600
    assert token_path().read_text() == token
