"""The code of docs/integrations.md, with the libraries that it names; at the prompt as well."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import Block, blocks_of, commands_of

DOCUMENT = "docs/integrations.md"
TRAIN, *SCRIPTS = sorted(
    blocks_of(DOCUMENT, "python"), key=lambda block: block.heading != "Command line"
)


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=500
    )


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_the_code_runs(block: Block, tmp_path: Path) -> None:
    """What it prints is what the comments say."""
    skip_without_keras(block)
    done = run("-c", block.code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", block.code, re.MULTILINE)
    assert [line for line in printed if line in expected] == expected
    for name in re.findall(r"\"(sweep\.\w+)\"", block.code):
        assert (tmp_path / name).stat().st_size > 1000


def test_a_keras_model_resumes_after_its_last_epoch(tmp_path: Path) -> None:
    """It comes to what an uninterrupted training comes to."""
    (block,) = (each for each in SCRIPTS if each.heading == "Keras")
    skip_without_keras(block)
    more = """
with parpool(1, profile="inline", quiet=True) as pool:
    whole = pool.parfeval(train, {"lr": 0.3, "epochs": 4}).result()
first, second = (train({"lr": 0.3, "epochs": epochs}) for epochs in (2, 4))
assert first > second == whole, (first, second, whole)
"""
    done = run("-c", block.code + more, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def skip_without_keras(block: Block) -> None:
    if "import keras" in block.code and importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")


def raypool(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what a line of the document calls, without what it is piped to."""
    words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
    return run("-c", "from raypool.cli.main import main; main()", *words, folder=folder)


def test_the_prompt(tmp_path: Path) -> None:
    """A sweep, again for what is missing, one item of it, and a page; with the status that the
    table says.
    """
    texts = [block.code for block in blocks_of(DOCUMENT, "") if block.heading == TRAIN.heading]
    configs, recorded = texts
    (tmp_path / "train.py").write_text(TRAIN.code)
    (tmp_path / "configs.csv").write_text(configs)
    sweep, again, replay, report, doctor, *exports = commands_of(DOCUMENT)
    first = raypool(sweep, tmp_path)
    assert first.returncode == 1
    assert shape(
        first.stderr.splitlines()[0], *first.stdout.splitlines(), *first.stderr.splitlines()[1:]
    ) == shape(recorded)
    second = raypool(again, tmp_path)
    assert second.returncode == 1
    losses = [row["loss"] for row in json.loads(second.stdout)]
    assert losses == [pytest.approx(0.9**20), pytest.approx(0.7**20), None]
    assert "0.000797" in raypool(replay, tmp_path).stdout
    assert raypool(report, tmp_path).returncode == 0
    assert (tmp_path / "sweep.html").stat().st_size > 100_000
    for line in exports:
        if line.split()[4] in ("tensorboard", "optuna", "csv"):  # the others may not be installed
            assert raypool(line, tmp_path).returncode == 0
    assert raypool(sweep.replace("train:train", "train:trian"), tmp_path).returncode == 2
    assert " ports " in raypool(doctor, tmp_path).stdout


def shape(*lines: str) -> list[str]:
    """Return what is printed without what is another each time: times, the machine, the worker, and
    the widths of columns.
    """
    text = re.sub(r"^raypool: .*|(?<=  )\d\S+ +\d$", "*", "\n".join(lines), flags=re.MULTILINE)
    return [re.sub(r" +", " ", line) for line in text.split("\n") if line]
