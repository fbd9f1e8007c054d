"""A run can be looked at by anybody, at any time, without changing it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool import current_task, load_results, parpool, report
from raypool.cli.main import main
from raypool.errors import JournalError
from raypool.journal import reading
from raypool.journal.journal import Journal
from raypool.journal.rows import Outcome


def run(folder: Path, items: list[tuple[str, object]], *outcomes: Outcome) -> None:
    with Journal.open(folder, "sweeps.train", None) as journal:
        journal.note_items((key, position, item) for position, (key, item) in enumerate(items))
        assert journal.write(outcomes) == []


def finished(key: str, value: object) -> Outcome:
    return Outcome(
        key, 1, "finished", value=value, started_at=100.0, duration_s=2.0, worker=1, gpu=0
    )


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_each_item_is_there_once_those_of_the_newest_call_first(tmp_path):
    run(
        tmp_path,
        [("a", 1), ("b", 2), ("c", 3)],
        finished("a", 10),
        finished("b", 20),
        finished("c", 30),
    )
    run(tmp_path, [("d", 4), ("c", 3), ("a", 1)], finished("d", 40), finished("a", 11))
    results = load_results(tmp_path)
    assert list(results) == [40, 30, 11, 20]
    assert results.to_frame()["item"].tolist() == [4, 3, 1, 2]


def test_a_folder_in_ones_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with parpool(1, profile="inline", quiet=True) as pool:
        pool.parfor(abs, [-1], run_dir="~/run")
    assert list(load_results("~/run")) == [1]
    done = CliRunner().invoke(main, ["report", "~/run", "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output


def test_the_table_says_what_is_known(tmp_path):
    failed = Outcome(
        "b", 2, "failed", error=ValueError("too large"), started_at=101.0, duration_s=1.0, worker=0
    )
    run(
        tmp_path,
        [("a", {"lr": 1}), ("b", {"lr": 2}), ("c", {"lr": 3})],
        finished("a", {"loss": 0.5}),
        failed,
    )
    results = load_results(str(tmp_path))
    frame = results.to_frame()
    assert frame["status"].tolist() == ["finished", "failed", "missing"]
    assert frame["lr"].tolist() == [1, 2, 3]
    assert frame["attempts"].tolist() == [1, 2, 0]
    assert frame["duration_s"].tolist()[:2] == [2.0, 1.0]
    assert frame["error"].tolist()[1] == "ValueError: too large"
    assert list(results) == [{"loss": 0.5}, None, None]
    assert {index: repr(error) for index, error in results.errors.items()} == {
        1: "ValueError('too large')"
    }
    assert repr(results) == "<Results of 3 items: 1 finished, 1 failed, 1 missing>"
    assert list(pickle.loads(pickle.dumps(results))) == list(results)


def test_the_table_keeps_its_columns_while_items_are_missing(tmp_path):
    """An item or a value that is not there (yet) leaves its cells empty, whether it is a dict or
    not.
    """
    run(tmp_path, [("a", {"lr": 1}), ("b", {"lr": 2, "name": "x" * 5000})])
    assert load_results(tmp_path).to_frame()["value"].tolist() == [None, None]
    run(
        tmp_path,
        [("a", {"lr": 1}), ("b", {"lr": 2, "name": "x" * 5000})],
        finished("b", {"loss": 0.5}),
    )
    (tmp_path / "items" / "b" / "item.json").unlink()
    frame = load_results(tmp_path).to_frame()
    assert frame["lr"].isna().tolist() == [False, True]
    assert frame["loss"].isna().tolist() == [True, False]


def test_what_items_reported_is_there_and_what_is_lost_of_it_is_said(tmp_path, caplog):
    run(tmp_path, [("a", 1), ("b", 2)], finished("a", 1))
    lines = [
        {
            "time": 100.0 + i,
            "run": 1,
            "attempt": 1,
            "metrics": {"loss": 1 / (i + 1), "nan": float("nan")},
        }
        for i in range(3)
    ]
    folder = tmp_path / "items" / "b"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"time": 103.0, "ru'
    )
    metrics = load_results(tmp_path).metrics
    assert "damaged and were left out: 1, " in caplog.text
    assert metrics["item"].tolist() == [1, 1, 1]
    assert metrics["loss"].tolist() == [1.0, 0.5, 1 / 3]
    assert metrics["attempt"].tolist() == [1, 1, 1]


def test_reports_are_those_of_the_run_whose_outcome_counts(tmp_path):
    """Of a failed or finished item that ran again, only the new ones; also if that was killed."""
    loss = {1: 0.1, 2: 0.2}

    def train(item):
        for epoch in range(2):
            report(epoch=epoch, loss=loss[item])
        if loss[item] == 0.3:
            raise KeyboardInterrupt
        if loss[item] < 1 and (item == 2 or current_task().attempt == 1):
            raise ValueError

    with parpool(1, profile="inline", quiet=True) as pool:
        twice = pool.options(retry_on=ValueError, retries=1)
        twice.parfor(train, [1, 2], run_dir=tmp_path, on_error="collect")
        loss[2] = 2.0
        for rerun in ("failed", "all"):
            live = twice.parfor(train, [1, 2], run_dir=tmp_path, rerun=rerun)
            assert load_results(tmp_path).metrics.equals(live.metrics)
            loss[1] = 5.0
        assert live.metrics["loss"].tolist() == [5.0, 5.0, 2.0, 2.0]
        loss[1] = 0.3
        with pytest.raises(KeyboardInterrupt):
            twice.parfor(train, [1, 2], run_dir=tmp_path, rerun="all")
    assert load_results(tmp_path).metrics.equals(live.metrics)


def test_reports_before_an_interruption_come_first(tmp_path):
    """Also if the interrupted run was at its second attempt."""

    def train(item):
        epoch = len(epochs)
        epochs.append(epoch)
        report(epoch=epoch)
        if epoch < 2:
            raise [ValueError, KeyboardInterrupt][epoch]

    epochs = []
    with parpool(1, profile="inline", quiet=True) as pool:
        twice = pool.options(retry_on=ValueError)
        with pytest.raises(KeyboardInterrupt):
            twice.parfor(train, [1], run_dir=tmp_path)
        assert load_results(tmp_path).metrics["epoch"].tolist() == [0, 1]
        twice.parfor(train, [1], run_dir=tmp_path)
    assert load_results(tmp_path).metrics["epoch"].tolist() == [0, 1, 2]


def test_a_run_without_reports_has_an_empty_table_of_them(tmp_path):
    run(tmp_path, [("a", 1)])
    assert load_results(tmp_path).metrics.empty


def test_whole_numbers_stay_exact_beside_gaps(tmp_path):
    """Half of all seeds have 64 bits."""
    big = [2**63 + 5, 2**53 + 1, 2**64 + 1]

    def train(item):
        if item == 1:
            raise ValueError
        report(seed=big[0], small=1, low=-big[1], huge=big[2])
        report(loss=0.5)
        return {"seed": big[0], "low": -big[1], "mixed": (-1) ** item * big[0], "huge": big[2]}

    with parpool(1, profile="inline", quiet=True) as pool:
        live = pool.parfor(train, range(4), run_dir=tmp_path, on_error="collect")
    exact = {"seed": big[0], "low": -big[1], "huge": big[2]}
    for results in (live, load_results(tmp_path)):
        frame, metrics = results.to_frame(), results.metrics
        for name, value in exact.items():
            assert frame[name].dropna().tolist() == [value] * 3
            assert metrics[name].dropna().tolist() == [value] * 3
        assert frame["mixed"].dropna().tolist() == [big[0], big[0], -big[0]]
        assert [str(frame[name].dtype) for name in exact] == ["UInt64", "Int64", "object"]
        assert str(metrics["small"].dtype) == "float64", "as pandas has it"
    shown = json.loads(CliRunner().invoke(main, ["show", str(tmp_path), "--json"]).stdout)
    assert [row["seed"] for row in shown] == [big[0], None, big[0], big[0]]


def test_nothing_in_the_folder_changes(tmp_path):
    run(tmp_path, [("a", {1}), ("b", 2)], finished("a", "x" * 5000))
    before = contents(tmp_path)
    load_results(tmp_path)
    assert contents(tmp_path) == before


def test_a_run_that_goes_on_is_read_while_it_does(tmp_path):
    with Journal.open(tmp_path, "sweeps.train", None) as journal:
        journal.note_items((f"k{i}", i, i) for i in range(50))
        for i in range(50):
            journal.write([finished(f"k{i}", i)])
            if i % 10 == 0:
                results = load_results(tmp_path)
                assert list(results)[: i + 1] == list(range(i + 1))
                assert len(results) == 50
    assert list(load_results(tmp_path)) == list(range(50))


def test_a_run_that_was_killed_is_read_with_all_that_was_written(tmp_path):
    with Journal.open(tmp_path / "run", "sweeps.train", None) as journal:
        journal.note_items([("a", 0, 1), ("b", 1, 2)])
        journal.write([finished("a", 5)])
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    (tmp_path / "killed" / "journal.sqlite-shm").unlink()
    before = contents(tmp_path / "killed")
    assert list(load_results(tmp_path / "killed")) == [5, None]
    assert {
        name: data
        for name, data in contents(tmp_path / "killed").items()
        if not name.endswith("-shm")
    } == {name: data for name, data in before.items() if not name.endswith("-shm")}


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_a_folder_that_is_read_only_can_be_read(tmp_path, is_killed):
    with Journal.open(tmp_path / "run", "sweeps.train", None) as journal:
        journal.note_items([("a", 0, {1})])
        journal.write([finished("a", 5)])
        if is_killed:
            shutil.copytree(
                tmp_path / "run", tmp_path / "look", ignore=shutil.ignore_patterns("*-shm")
            )
    if not is_killed:
        shutil.copytree(tmp_path / "run", tmp_path / "look")
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "--bind", tmp_path / "look", tmp_path / "look"], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path / "look"], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "look" / "x").touch()
        results = load_results(tmp_path / "look")
        assert (list(results), results._items) == ([5], [{1}])
        with pytest.raises(JournalError, match="cannot be written"):
            Journal.open(tmp_path / "look", "sweeps.train", None)
    finally:
        subprocess.run(["umount", tmp_path / "look"], check=True)


def test_where_there_is_no_run_it_says_so(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(JournalError, match="There is no run in"):
            load_results(folder)
    (tmp_path / "journal.sqlite").touch()
    with pytest.raises(JournalError, match="There is no run in"):
        load_results(tmp_path)


def looked_at(folder: Path) -> int | str:
    try:
        return len(load_results(folder))
    except JournalError as error:
        return "no run yet" if "There is no run in" in str(error) else str(error)


def test_a_run_that_just_begins_is_no_damage(tmp_path, caplog, start_python):
    caplog.set_level(logging.WARNING, "raypool")
    process = start_python(f"""
        from raypool.journal.journal import Journal
        for number in range(30):
            Journal.open({str(tmp_path)!r} + f"/{{number}}", "sweeps.train", None).close()
        """)
    while process.process.poll() is None:
        for number in range(30):
            if (tmp_path / str(number)).exists():
                assert looked_at(tmp_path / str(number)) in (0, "no run yet")
    assert process.process.returncode == 0
    assert not caplog.records


def test_a_run_that_ends_as_it_is_read_is_no_damage(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "raypool")
    run(tmp_path, [("a", 1)], finished("a", 2))
    path = tmp_path / "journal.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])

    def end_meanwhile(folder):
        path.write_bytes(whole)
        return False

    monkeypatch.setattr(reading, "is_in_use", end_meanwhile)
    assert list(load_results(tmp_path)) == [2]
    assert not caplog.records


def test_a_value_that_is_gone_is_missing_and_that_is_said(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "raypool")
    run(tmp_path, [("a", 1), ("b", 2)], finished("a", "x" * 5000), finished("b", 3))
    (tmp_path / "items" / "a" / "value-1-1.json").unlink()
    results = load_results(tmp_path)
    assert list(results) == [None, 3]
    assert results.to_frame()["status"].tolist() == ["missing", "finished"]
    assert "1 of 2 values cannot be read" in caplog.text


def test_a_damaged_run_gives_what_is_left(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "raypool")
    run(
        tmp_path,
        [(f"k{i}", i) for i in range(300)],
        *(finished(f"k{i}", "v" * 100 + str(i)) for i in range(300)),
    )
    path = tmp_path / "journal.sqlite"
    data = bytearray(path.read_bytes())
    start = data.index(b"v" * 100 + b"150") // 8192 * 8192
    data[start : start + 8192] = bytes(8192)
    path.write_bytes(data)
    results = load_results(tmp_path)
    statuses = results.to_frame()["status"].value_counts()
    assert len(results) == 300
    assert 200 < statuses["finished"] == 300 - statuses["missing"]
    assert all(value in (None, "v" * 100 + str(i)) for i, value in enumerate(results))
    assert f"at least {statuses['missing']} results are lost" in caplog.text
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda data: bytes(len(data)), "it does not begin like a journal"),
        (lambda data: data[:99], "cut off after 99 of "),
    ],
)
def test_an_unreadable_run_has_0_results_and_says_what_to_do(tmp_path, caplog, damage, cause):
    run(tmp_path, [("a", 1)], finished("a", 2))
    path = tmp_path / "journal.sqlite"
    path.write_bytes(damage(path.read_bytes()))
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert cause in caplog.text
    assert "0 results of 0 items could be read" in caplog.text
    assert "Call parfor with this run_dir again" in caplog.text

    path.unlink()
    (tmp_path / "items").mkdir()
    with pytest.raises(
        JournalError, match=r"0 results could be read: .*journal\.sqlite is missing.*call parfor"
    ):
        load_results(tmp_path)


def test_a_damaged_part_of_a_run_gives_what_is_left(tmp_path, caplog):
    run(tmp_path, [("a", 1)])
    run(tmp_path / "parts" / "0", [("a", 1)], finished("a", 2))
    path = tmp_path / "parts" / "0" / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:99])
    assert list(load_results(tmp_path)) == [None]
    assert "Call parfor with this run_dir again: it runs the missing items." in caplog.text
    Journal.open(tmp_path, "sweeps.train", None).close()
    assert not path.exists(), "as was said, it is not kept"


@pytest.mark.parametrize(
    ("size", "lost"), [(None, 0), (0, 3), (-8192, 1)], ids=["whole", "missing", "cut off"]
)
def test_a_lost_log_is_said_with_how_many_results_went_with_it(tmp_path, caplog, size, lost):
    """A run that was killed has its last results in the log beside its journal, which a copy may
    lack.
    """
    with Journal.open(tmp_path / "run", "sweeps.train", None) as journal:
        journal.note_items([("a", 0, 1), ("b", 1, 2), ("c", 2, 3)])
        for key in "abc":
            journal.write([finished(key, 5)])
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    (tmp_path / "killed" / "journal.sqlite-shm").unlink()
    log = tmp_path / "killed" / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:size])
    if lost == 3:
        with pytest.raises(
            JournalError, match=r"0 results could be read: 3 of 3 results of the run in .* are lost"
        ):
            load_results(tmp_path / "killed")
    else:
        assert list(load_results(tmp_path / "killed")) == [5, 5, None if lost else 5]
        assert (f"{lost} of 3 results of the run in" in caplog.text) is bool(lost)
    caplog.clear()
    for is_said in (bool(lost), False):
        Journal.open(tmp_path / "killed", "sweeps.train", None).close()
        assert (f"{lost} of 3 results of the run in" in caplog.text) is is_said
        caplog.clear()


def test_neither_ray_nor_torch_is_needed(tmp_path, run_python):
    run(tmp_path, [("a", {"lr": 1})], finished("a", 3))
    done = run_python(f"""
        import sys
        from raypool import load_results
        results = load_results({str(tmp_path)!r})
        print(list(results), sorted({{"ray", "torch", "pandas"}} & set(sys.modules)))
        """)
    assert done.stdout.strip() == "[3] []"


def test_a_large_run_is_read(tmp_path):
    with Journal.open(tmp_path, "sweeps.train", None) as journal:
        journal.note_items((f"{i:024x}", i, {"lr": i}) for i in range(20_000))
        for start in range(0, 20_000, 1000):
            journal.write(
                [finished(f"{i:024x}", {"loss": i / 2}) for i in range(start, start + 1000)]
            )
    results = load_results(tmp_path)
    assert [value["loss"] for value in results] == [i / 2 for i in range(20_000)]
