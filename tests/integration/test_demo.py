"""The main job, from the command line: real images in, a table, a CSV file and a picture out."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread

from raypool.cli import demo
from raypool.cli.main import main

COLUMNS = [
    "index",
    "network",
    "width",
    "lr",
    "accuracy",
    "loss",
    "parameters",
    "seconds",
    "status",
    "duration_s",
]
COLUMNS += ["started_at", "worker", "gpu", "attempts", "peak_memory_bytes", "reason", "error"]


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    """Let torch have as many threads after a test as before: in this process the demo sets their
    number for all.
    """
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def check_files(folder: Path) -> list[dict[str, str]]:
    """Check what the demo wrote, and return the rows of its table."""
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert len(rows) == len(demo.CONFIGS) >= 10
    assert {row["network"] for row in rows} == {"mlp", "cnn"}
    *finished, failed = rows
    assert failed["status"] == "failed"
    assert failed["error"] == "ValueError: num_channels (36) must be divisible by num_groups (8)"
    assert failed["accuracy"] == ""
    assert all(
        row["status"] == "finished" and row["error"] == "" and int(row["parameters"]) > 1000
        for row in finished
    )
    accuracies = [float(row["accuracy"]) for row in finished]
    assert accuracies == sorted(accuracies, reverse=True)
    assert 0.96 <= accuracies[0] <= 1
    height, width, _ = imread(folder / "learning_curves.png").shape
    assert width > height > 500
    return rows


def test_trains_all_networks_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 15)
    out = tmp_path / "made" / "when missing"
    result = CliRunner().invoke(
        main, ["demo", "--workers", "2", "--profile", "threads", "--out", str(out)]
    )
    assert result.exception is None, result.output
    rows = check_files(out)
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert lines[:2] == [
        "13 networks learn to read 1,437 images of handwritten digits.",
        "raypool: 2 workers (threads of this process)",
    ]
    table = [line.split() for line in lines if line.endswith(("finished", "failed"))]
    assert [words[:2] for words in table[:-1]] == [
        [str(rank), row["network"]] for rank, row in enumerate(rows[:-1], 1)
    ]
    assert table[-1][:3] == ["cnn", "36", "0.001"]
    assert all(len(line) <= 80 for line in lines if line.endswith(("finished", "failed")))
    best, failed = rows[0], rows[-1]
    assert lines[-3:] == [
        f"Failed: cnn, width 36, lr 0.001: {failed['error']}",
        (
            f"Best: cnn, width {best['width']}, lr {best['lr']}: {float(best['accuracy']):.1%} of"
            " 360 other images read correctly."
        ),
        f"Wrote {out / 'results.csv'} and {out / 'learning_curves.png'}",
    ]


@pytest.mark.long
def test_trains_all_networks_on_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from raypool.cli.demo import run; run(2,"
        " out=Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    # how it goes, after 10 s
    assert all(line.startswith("raypool: training: ") for line in done.stderr.splitlines()), (
        done.stderr
    )
    assert "raypool: 2 workers on " in done.stdout
    rows = check_files(tmp_path)
    assert {row["worker"] for row in rows} == {"0", "1"}
    assert float(rows[0]["accuracy"]) >= 0.98


def test_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "raypool.errors.find_spec", lambda module: None if module == "sklearn" else module
    )
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert (
        result.output == "Error: The demo needs scikit-learn, which is not installed: pip install"
        ' "raypool[demo]"\n'
    )
    assert not (tmp_path / "out").exists()


def test_raises_what_all_networks_failed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CONFIGS", [demo.CONFIGS[-1]] * 2)
    with pytest.raises(ValueError, match="must be divisible"):
        demo.run(profile="inline", out=tmp_path)


def test_the_test_images_are_set_aside_fairly() -> None:
    digits: Any = demo.load_digits()
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.test_labels.bincount().tolist() == pytest.approx([36] * 10, abs=1)
    assert digits.train_images.max() == 1
    assert torch.equal(digits.test_images, demo.load_digits().test_images)
