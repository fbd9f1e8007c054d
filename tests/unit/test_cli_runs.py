"""`raypool ls` and `raypool show`: saved runs, found again and read on a terminal."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from raypool import RunOptions, parpool
from raypool.cli.main import main
from raypool.views.words import CONTROLS
from raypool.watch.run_reader import RunReader


def train(config: dict[str, Any]) -> dict[str, Any]:
    if config["lr"] == 3:
        raise ValueError("diverged")
    return {
        "loss": abs(config["lr"] - 5),
        "acc": {"val": config["lr"] / 10},
        "note": "good" if config["lr"] == 10 else "bad",
        "curve": [0.5, 0.4],
        "took": timedelta(minutes=60 - config["lr"]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with two runs, one of them of 60 items."""
    folder = tmp_path_factory.mktemp("runs")
    with parpool(profile="inline", quiet=True) as pool:
        for name, count in (("older", 2), ("deep/newer", 60)):
            items = [{"lr": lr} for lr in range(count)]
            pool.parfor(train, items, run_dir=folder / name, on_error="collect")
    return folder


@pytest.fixture(autouse=True)
def run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)


def raypool(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def rows(*words: str) -> list[list[str]]:
    done = raypool(*words)
    assert done.exit_code == 0, done.output
    return [line.split() for line in done.stdout.splitlines()]


def test_runs_are_listed_the_newest_first(saved: Path) -> None:
    heading, *runs = rows("ls")
    assert heading == ["run", "function", "items", "state", "started", "size"]
    assert [row[0] for row in runs] == ["deep/newer", "older"]
    assert runs[0][1].endswith("train")
    assert runs[0][2:6] == ["60", "finished,", "1", "failed"]
    assert runs[1][2:4] == ["2", "finished"]
    objects = json.loads(raypool("ls", "older", "--json").stdout)
    assert [(run["folder"], run["finished"]) for run in objects] == [(str(saved / "older"), 2)]


def test_a_file_that_goes_while_runs_are_listed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, lstat = saved / "older/new.tmp", Path.lstat

    def lstat_late(path: Path) -> Any:
        if path == file:
            file.unlink()
        return lstat(path)

    before = rows("ls")
    file.touch()
    monkeypatch.setattr(Path, "lstat", lstat_late)
    assert rows("ls") == before
    assert not file.exists()


def test_the_state_of_a_run_that_goes_on_or_was_stopped(tmp_path: Path) -> None:
    def listed() -> tuple[str, bool]:
        [line] = raypool("ls", str(tmp_path)).stdout.splitlines()[1:]
        [run] = json.loads(raypool("ls", str(tmp_path), "--json").stdout)
        return line, run["is_running"]

    def look(number: int) -> tuple[str, bool]:
        if number == 1:
            raise ValueError("diverged")
        if number == 2:
            raise KeyboardInterrupt
        return listed()

    with parpool(profile="inline", quiet=True) as pool, pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(look, 4, run_dir=tmp_path / "run", on_error="collect")
    line, is_running = caught.value.results[0]  # type: ignore[attr-defined]
    assert ("  running, 0 of 4 done  " in line, is_running) == (True, True)
    line, is_running = listed()
    assert ("  stopped after 2 of 4, 1 failed  " in line, is_running) == (True, False)


def loop(config: dict[str, Any]) -> None:
    """Train: odd epochs end with a checkpoint."""
    import ray.train

    for epoch in config["epochs"]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights").touch()
            checkpoint = ray.train.Checkpoint.from_directory(folder) if epoch % 2 else None
            metrics = {"epoch": epoch, "loss": 0.5**epoch, "report": "text"}
            ray.train.report(metrics, checkpoint=checkpoint)


def test_a_training_is_listed_with_its_last_metrics_and_shown_up_to_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    """It resumes after a crash in the midst of a line."""
    kept = RunOptions(run_dir=tmp_path / "net", keep_checkpoints=1)
    with parpool(profile="inline", quiet=True) as pool:
        for epochs in ([0, 1, 2], [2, 3]):
            run = pool.train(loop, {"epochs": epochs}, run_options=kept)
            assert run.exception() is None
            with (tmp_path / "net" / "training_reports.jsonl").open("a") as file:
                file.write('\n{"name": "lo')
    (line,) = rows("ls", str(tmp_path))[1:]
    assert line[:5] == ["net", "loop", "training", "epoch=3,", "loss=0.125"]
    (listed,) = json.loads(raypool("ls", str(tmp_path), "--json").stdout)
    last = {"epoch": 3, "loss": 0.125, "report": "text"}
    assert (listed["items"], listed["last"]) == (4, last)
    heading, *reports = rows("show", str(tmp_path / "net"))
    assert heading == ["report", "epoch", "loss", "reported_report"]
    assert [report[1] for report in reports] == ["0", "1", "2", "3"]
    assert "is a training" in raypool("show", str(tmp_path / "net"), "--failed").stderr
    for name, *words in (["report"], ["replay", "0"], ["export", "--to", "wandb", "--output", "x"]):
        done = raypool(name, str(tmp_path / "net"), *words)
        assert "net is a training, which has no items. `raypool show` prints" in done.stderr


class Shy:
    """Its `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_values_that_have_no_text_are_told_by_their_class(tmp_path: Path) -> None:
    """Python writes no integer of more than 4,300 digits."""
    run = str(tmp_path / "run")
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(answer_oddly, [{"x": Shy()}, {"x": 10**5000}], run_dir=run)
    for words in (["--json"], ["--csv", "-"], []):
        done = raypool("show", run, *words)
        assert (done.exit_code, "Shy" in done.stdout) == (0, True), done.output
    shown = json.loads(raypool("show", run, "--json").stdout)
    assert shown[1]["x"] == hex(10**5000)
    for item in "01":
        again = raypool("replay", run, item)
        assert (again.exit_code, again.stdout) == (0, "a Shy\n"), again.output


def answer_oddly(config: dict[str, Any]) -> Shy:
    return Shy()


def test_output_suits_a_terminal_without_colors_and_an_encoding_without_the_characters(
    saved: Path, tmp_path: Path
) -> None:
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {}):
        done = CliRunner().invoke(main, ["doctor"], color=True, env=env)
        assert ("\x1b" in done.stdout) == (env == {})
    listed = CliRunner().invoke(main, ["ls", "--json"], color=True)
    assert json.loads(listed.stdout)
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(len, ["\N{GREEK SMALL LETTER ALPHA}"], run_dir=tmp_path / "run")
    command = [sys.executable, "-m", "raypool", "show", tmp_path / "run"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "\\u03b1" in shown.stdout


def test_runs_are_found_behind_links_once(tmp_path: Path) -> None:
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(abs, [1], run_dir=tmp_path / "scratch" / "big")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "up").symlink_to(tmp_path / "runs")
    for name in ("big", "same"):
        (runs / name).symlink_to(tmp_path / "scratch" / "big")
    assert len(rows("ls", str(runs))) == 2


def test_what_is_no_run_is_said(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert raypool("ls", "..").stderr == f"There are no saved runs below {tmp_path}.\n"
    shutil.copytree(saved / "older", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.sqlite").touch()
    done = raypool("ls", str(tmp_path))
    assert "good" in done.stdout
    assert f"{tmp_path / 'bad'} was skipped: " in done.stderr
    for place in (tmp_path, tmp_path / "bad"):
        done = raypool("show", str(place))
        assert done.exit_code == 2
        assert f"There is no run in {place}: it has no journal" in done.stderr
    assert "The runs below it are: bad, good." in raypool("show", str(tmp_path)).stderr
    for command in (["show"], ["report"], ["replay", "--", "0"]):
        done = raypool(command[0], str(tmp_path / "goood"), *command[2:])
        assert done.exit_code == 2
        assert f"in {tmp_path / 'goood'}: it does not exist. Did you mean good?" in done.stderr


def test_values_of_a_class_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read in its folder; elsewhere an item has at least finished."""
    source = "import dataclasses\n@dataclasses.dataclass\nclass Outcome:\n    score: float\n"
    (tmp_path / "their_outcomes.py").write_text(source)
    before = [*sys.path]
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("their_outcomes")
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda x: module.Outcome(x / 4), [1, 2], run_dir=tmp_path / "run")
    monkeypatch.delitem(sys.modules, "their_outcomes")
    monkeypatch.setattr(sys, "path", before)
    (headings, first, _) = rows("show", str(tmp_path / "run"))
    assert "finished" in first
    assert "duration_s" in headings
    assert "2 of 2 values cannot be read. " in caplog.text
    assert "No module named 'their_outcomes'" in caplog.text
    assert "again" not in caplog.text
    assert RunReader(tmp_path / "run").look()["counts"] == {"finished": 2}
    caplog.clear()
    monkeypatch.chdir(tmp_path)
    (shown, _) = json.loads(raypool("show", "run", "--json").stdout)
    assert shown["score"] == 0.25
    assert caplog.text == ""


def test_the_table_of_a_run() -> None:
    done = raypool("show", "deep/newer")
    assert len(done.stdout.splitlines()) == 51
    assert "and 10 more: --top 60 shows them all." in done.stderr
    assert len(rows("show", "deep/newer", "--top", "60")) == 61
    best = rows("show", "deep/newer", "--sort", "loss", "--top", "3", "--columns", "lr,loss")
    assert best == [["index", "lr", "loss"], ["5", "5", "0"], ["4", "4", "1"], ["6", "6", "1"]]
    # what has no number goes last, whichever way
    for key in ("loss", "-loss"):
        assert rows("show", "deep/newer", "--sort", key, "--top", "60")[60][0] == "3"
    [_, failed] = rows("show", "deep/newer", "--failed")
    assert (failed[0], failed[-2:]) == ("3", ["ValueError:", "diverged"])
    done = raypool("show", "older", "--failed")
    assert (done.stdout, done.stderr) == ("", "None of the 2 items of older failed.\n")


def test_a_run_without_items_says_so(tmp_path: Path) -> None:
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(abs, [], run_dir=tmp_path / "run")
    done = raypool("show", str(tmp_path / "run"))
    assert (done.stdout, done.stderr) == ("", f"The table of {tmp_path / 'run'} is still empty.\n")


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("-acc.val", "59"),
        ("-index", "59"),
        ("started_at", "0"),
        ("-started_at", "59"),
        ("status", "3"),  # failed, before finished
        ("-note", "10"),  # good, after bad
        ("took", "59"),
    ],
)
def test_a_table_is_sorted_by_numbers_texts_times_and_durations(key: str, first: str) -> None:
    assert rows("show", "deep/newer", "--sort", key, "--top", "1")[1][0] == first


def test_the_table_in_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / "table.csv"), str(tmp_path / "table.parquet")]
    done = raypool("show", "deep/newer", "--csv", paths[0], "--parquet", paths[1])
    assert (done.exit_code, done.stdout) == (0, "")
    with open(paths[0], newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 60
    assert read == list(
        csv.DictReader(raypool("show", "deep/newer", "--csv", "-").stdout.split("\n"))
    )
    # an integer, although another item has none
    row = read[7]
    assert (row["index"], row["loss"], json.loads(row["acc"])) == ("7", "2", {"val": 0.7})
    assert read[3]["error"] == "ValueError: diverged"
    frame = pd.read_parquet(paths[1])
    assert frame["loss"].tolist()[:3] == [5, 4, 3]
    assert json.loads(frame["acc"][7]) == {"val": 0.7}
    [first] = json.loads(
        raypool("show", "deep/newer", "--json", "--sort", "loss", "--top", "1").stdout
    )
    assert (first["index"], first["acc"]) == (5, {"val": 0.5})


def test_csv_in_a_pipe_has_the_values_and_on_a_terminal_no_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\u200bb\r\nc\x0cd\x1b[31m"
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(str, [text], run_dir=tmp_path / "run")
    for words in (
        ["show", str(tmp_path / "run"), "--csv", "-"],
        ["export", str(tmp_path / "run"), "--to", "csv", "--output", "-"],
    ):
        piped = raypool(*words).stdout_bytes.decode()
        [row] = csv.DictReader(io.StringIO(piped, newline=""))
        assert (row["item"], row["value"]) == (text, text)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
    assert not CONTROLS.search(raypool(*words).stdout)


def broken(config: dict[str, str]) -> dict[str, Any]:
    if config["n"] == 1:
        raise ValueError(config["name"])
    return {"file": config["name"], "z": 1 + 2j, "wide": np.longdouble(1.5)}


def test_values_that_files_cannot_have(tmp_path: Path) -> None:
    """Names of files that are not UTF-8, and numbers that Parquet lacks."""
    items = [{"n": n, "name": f"caf{half}.png"} for n, half in enumerate(("\udce9", "\udce9", "e"))]
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(broken, items, run_dir=tmp_path / "run", on_error="collect")
    paths = [str(tmp_path / "table.csv"), str(tmp_path / "table.parquet")]
    done = raypool("show", str(tmp_path / "run"), "--csv", paths[0], "--parquet", paths[1])
    assert (done.exit_code, done.output) == (0, "")
    with open(paths[0], newline="") as file:
        written = [*csv.DictReader(file)]
    for rows in (written, pd.read_parquet(paths[1]).to_dict("records")):
        assert [rows[0][name] for name in ("name", "file", "z")] == [
            *["caf\\udce9.png"] * 2,
            "(1+2j)",
        ]
        assert float(rows[0]["wide"]) == 1.5
        assert rows[1]["error"] == "ValueError: caf\\udce9.png"
        assert rows[2]["file"] == "cafe.png"


def test_booleans_beside_a_failed_item_stay_booleans(tmp_path: Path) -> None:
    run, file = str(tmp_path / "run"), str(tmp_path / "table.parquet")
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda x: {"ok": 1 / x > 0}, [1, 0], run_dir=run, on_error="collect")
    written = csv.DictReader(io.StringIO(raypool("show", run, "--csv", "-").stdout))
    assert [row["ok"] for row in written] == ["True", ""]
    assert raypool("show", run, "--parquet", file).exit_code == 0
    assert pd.read_parquet(file)["ok"].dtype.kind == "b"


def test_values_in_files_are_whole(tmp_path: Path) -> None:
    run, path, layers = str(tmp_path / "run"), Path("/data") / ("deep/" * 60), list(range(60))
    leaf = SimpleNamespace()
    leaf.tree = [leaf]
    values = {
        "leaf": leaf,
        "path": path,
        "net": SimpleNamespace(name="cnn", layers=layers, data=path),
        "tags": {"b", "a"},
        "raw": bytes(300),
    }
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda _: values, [1], run_dir=run)
    [item] = json.loads(raypool("show", run, "--json").stdout)
    [row] = csv.DictReader(io.StringIO(raypool("show", run, "--csv", "-").stdout))
    assert item["path"] == row["path"] == str(path)
    assert item["net"] == {"name": "cnn", "layers": layers, "data": str(path)}
    assert (item["tags"], item["raw"]) == (["a", "b"], repr(bytes(300)))
    assert item["leaf"] == {"tree": [repr(leaf)]}
    assert [json.loads(row[name]) for name in ("net", "tags")] == [item["net"], item["tags"]]


def test_a_class_of_numpy_in_a_configuration_is_a_text(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(str, [{"dtype": np.float32}], run_dir=run)
    [item] = json.loads(raypool("show", run, "--json").stdout)
    [row] = csv.DictReader(io.StringIO(raypool("show", run, "--csv", "-").stdout))
    assert item["dtype"] == row["dtype"] == "<class 'numpy.float32'>"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sort", "los"], "There is no column 'los'. Did you mean loss?"),
        (["--sort", "curve"], "The table cannot be sorted by 'curve', which holds list."),
        (["--csv", "-", "--json"], "--csv - and --json both write to standard output."),
        (["--columns", "lr,accc"], "There is no column 'accc'. Did you mean acc?"),
    ],
)
def test_a_wrong_column_is_wrong_use(words: list[str], said: str) -> None:
    done = raypool("show", "deep/newer", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_file_that_cannot_be_written_is_said() -> None:
    done = raypool("show", "older", "--csv", "/proc/nowhere/table.csv")
    assert done.exit_code == 1
    assert "/proc/nowhere/table.csv could not be written" in done.stderr
