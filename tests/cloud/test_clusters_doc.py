"""What docs/clusters.md says is true: its Python runs, its commands exist, its files are taken."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import checks
from raypool.cluster.documents import documents_of
from raypool.profile_files import resolve_profile
from tests.documents import blocks_of, commands_of

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


COMMANDS = commands_of("docs/clusters.md")


def blocks(language: str) -> list[str]:
    """Return what can be tried without a cluster: the rest is for
    tests/integration/test_guides.py.
    """
    return [
        block.code
        for block in blocks_of("docs/clusters.md", language)
        if 'profile="raypool"' not in block.code
    ]


def test_the_python_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "clusters.md", "exec"), {"__name__": "clusters"})
    printed = capsys.readouterr().out
    for line in re.findall(
        r"# (cluster\.yaml, line .*|\(1, 2, 4\)|\[3, 5\])$",
        "\n".join(blocks("python")),
        re.MULTILINE,
    ):
        assert line in printed
    assert "line 2" in printed


def test_what_writes_and_lists_does_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, line in enumerate(COMMANDS):
        if "cluster init" in line or "cluster machines" in line:
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
            done = CliRunner().invoke(main, shlex.split(line, comments=True)[1:])
            assert done.exit_code == 0, done.output


def test_the_example_of_google_cloud_has_nothing_left_to_fill_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = next(number for number, line in enumerate(COMMANDS) if "--provider gcp" in line)
    init, validate = COMMANDS[first : first + 2]
    for line in (init, validate):
        done = CliRunner().invoke(main, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output


def test_what_is_said_of_mistakes_is_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    runner.invoke(main, ["cluster", "init", "--provider", "gcp", "--gpu", "V100", "--gpus", "2"])
    text = Path("cluster.yaml").read_text()
    Path("cluster.yaml").write_text(
        text.replace("n1-standard-8", "n1-standard-32").replace("GPU: 2", "GPU: 4")
    )
    done = runner.invoke(main, ["cluster", "validate", "cluster.yaml"])
    assert done.exit_code == 2
    assert f"```\n{done.stderr}```\n" in TEXT


def test_the_profile_and_the_training_job_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [profile], [job] = blocks("toml"), blocks("yaml")
    Path("raypool.toml").write_text(profile)
    resolved = resolve_profile("raypool", {})
    assert resolved.is_remote
    assert resolved.jobs_url == "http://127.0.0.1:8265"
    [document] = documents_of(job, "config.yaml")
    checks.check(document)
    assert yaml.safe_load(job)["trainingInput"]["workerCount"] == 9
