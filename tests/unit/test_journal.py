"""What is written into a journal is there again, whatever happens; who may not write there is
told.
"""

from __future__ import annotations

import concurrent.futures
import copyreg
import functools
import json
import logging
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import load_results
from raypool.errors import (
    JournalError,
    LossReason,
    RemoteTraceback,
    SerializationError,
    TaskError,
    WorkerLostError,
)
from raypool.journal import schema
from raypool.journal.files import Damaged, dump, load
from raypool.journal.journal import Journal
from raypool.journal.keys import FunctionSource
from raypool.journal.opening import connect
from raypool.journal.replay import replaying
from raypool.journal.rows import MAX_PICKLE_BYTES, Outcome, to_row
from raypool.parallel_for import checkpoint_owner


def open_one(folder: Path, function: str = "sweeps.train", seed: int | None = None) -> Journal:
    return Journal.open(folder, function, seed)


def keep(folder: Path, *outcomes: Outcome) -> None:
    with open_one(folder) as journal:
        assert journal.write(outcomes) == []


def files_of(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777
        for path in sorted(folder.rglob("*"))
    }


class Unlucky(Exception):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")

    def __reduce__(self):
        return Unlucky, self.args


class Stubborn(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    def __reduce__(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [None, 0.5, {"loss": 0.5}, "x" * 10_000, {1, 2}, list(range(5000)), b"x" * 10_000],
    ids=["none", "number", "dict", "long text", "pickle", "long list", "long pickle"],
)
def test_a_value_comes_back(tmp_path, value):
    keep(
        tmp_path / "run",
        Outcome(
            "a",
            1,
            "finished",
            value=value,
            started_at=5.0,
            duration_s=2.0,
            worker=3,
            gpu=1,
            host="h",
        ),
    )
    with open_one(tmp_path / "run") as journal:
        stored = journal.stored()["a"]
        back = journal.value(stored)
    assert back == value
    assert type(back) is type(value)
    assert (stored.run, stored.attempt, stored.status, stored.started_at, stored.duration_s) == (
        1,
        1,
        "finished",
        5.0,
        2.0,
    )
    assert (stored.worker, stored.gpu, stored.host) == (3, 1, "h")


def test_an_array_and_a_tensor_come_back(tmp_path):
    import torch

    keep(
        tmp_path,
        Outcome("a", 1, "finished", value=np.arange(5000)),
        Outcome("b", 1, "finished", value=torch.ones(3)),
    )
    with open_one(tmp_path) as journal:
        stored = journal.stored()
        assert np.array_equal(journal.value(stored["a"]), np.arange(5000))
        assert torch.equal(journal.value(stored["b"]), torch.ones(3))


def test_a_function_and_a_local_class_come_back(tmp_path):
    class Local:
        x = 3

    keep(
        tmp_path,
        Outcome("a", 1, "finished", value=lambda x: x + 1),
        Outcome("b", 1, "finished", value=Local()),
    )
    with open_one(tmp_path) as journal:
        stored = journal.stored()
        assert journal.value(stored["a"])(1) == 2
        assert journal.value(stored["b"]).x == 3


def test_only_what_is_large_has_a_file_and_only_the_owner_may_read_it(tmp_path):
    folder = tmp_path / "deep" / "run"
    with open_one(folder) as journal:
        journal.note_items([("a", 0, {"lr": 1}), ("b", 1, b"x" * 5000)])
        journal.write(
            [Outcome("a", 1, "finished", value=1), Outcome("b", 2, "finished", value="y" * 5000)]
        )
    assert files_of(folder) == {
        "items": 0o700,
        "items/b": 0o700,
        "items/b/item.pkl": 0o600,
        "items/b/value-1-2.json": 0o600,
        "journal.lock": 0o600,
        "journal.sqlite": 0o600,
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700


def test_the_newest_outcome_counts_and_attempts_that_run_again_do_not(tmp_path):
    keep(
        tmp_path,
        Outcome("a", 1, "failed", error=ValueError("first")),
        Outcome("b", 1, "finished", value=1),
    )
    keep(
        tmp_path,
        Outcome("a", 1, "lost", words="out of memory"),
        Outcome("a", 2, "retried", error=OSError("busy")),
    )
    with open_one(tmp_path) as journal:
        assert journal.stored()["a"].run == 1
    # the clock was set back meanwhile
    keep(tmp_path, Outcome("a", 1, "finished", value=7, started_at=-1e9))
    with open_one(tmp_path) as journal:
        assert journal.run == 5
        assert journal.value(journal.stored()["a"]) == 7
        assert journal.stored()["b"].run == 1


def test_an_exception_comes_back_as_itself_with_its_notes_and_remote_traceback(tmp_path):
    error = ValueError("too large")
    error.add_note("item 3")
    error.__cause__ = RemoteTraceback("Traceback: in the worker\n")
    lost = WorkerLostError("worker 1 died", reason=LossReason.EXIT, attempts=3)
    keep(tmp_path, Outcome("a", 1, "failed", error=error), Outcome("b", 1, "failed", error=lost))
    with open_one(tmp_path) as journal:
        back = journal.error(journal.stored()["a"])
        lost_back = journal.error(journal.stored()["b"])
    assert repr(back) == "ValueError('too large')"
    assert back.__notes__ == ["item 3"]
    assert str(back.__cause__) == str(error.__cause__)
    assert (type(lost_back), lost_back.reason, lost_back.attempts) == (
        WorkerLostError,
        LossReason.EXIT,
        3,
    )


@pytest.mark.parametrize(
    "error", [Unlucky(3, "bad luck"), Stubborn()], ids=["cannot be made again", "cannot be pickled"]
)
def test_an_exception_that_pickle_does_not_bring_back_is_a_task_error_with_its_text(
    tmp_path, error, monkeypatch
):
    # dask's tblib teaches pickle all exceptions
    monkeypatch.delitem(copyreg.dispatch_table, type(error), raising=False)
    error.add_note("item 3 of train")
    try:
        raise error
    except Exception:
        keep(tmp_path, Outcome("a", 1, "failed", error=error))
    with open_one(tmp_path) as journal:
        back = journal.error(journal.stored()["a"])
    assert type(back) is TaskError
    assert type(error).__name__ in str(back)
    assert "bad luck (3)" in str(back) or "cannot be made: RuntimeError" in str(back)
    assert back.__notes__ == ["item 3 of train"]
    assert "test_journal.py" in str(back.__cause__)


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, "é\x00\n" * 50_000, "\ud800" * 9000],
    ids=["long", "long when written", "halves"],
)
def test_an_error_of_any_length_fits(tmp_path, text):
    error = ValueError(text)
    error.__cause__ = RemoteTraceback(text)
    error.__notes__ = [text] * 20
    keep(tmp_path, Outcome("a", 1, "failed", error=error), Outcome("a", 1, "lost", words=text))
    with open_one(tmp_path) as journal:
        assert journal.error(journal.stored()["a"]).args == (text,)
    for path in (tmp_path / "items" / "a").iterdir():
        path.unlink()
    with open_one(tmp_path) as journal:
        back = journal.error(journal.stored()["a"])
    assert type(back) is TaskError
    assert str(back).startswith(
        f"builtins.ValueError: {text[:3]}"
        if text[0] != "\ud800"
        else "builtins.ValueError: \\ud800"
    )


def test_a_value_that_cannot_be_pickled_is_given_back_with_the_reason(tmp_path):
    lock = concurrent.futures.Future()
    with open_one(tmp_path) as journal:
        ((outcome, error),) = journal.write(
            [Outcome("a", 1, "finished", value=lock), Outcome("b", 1, "finished", value=1)]
        )
        assert outcome.key == "a"
        assert isinstance(error, SerializationError)
        assert "a Future cannot be pickled" in str(error)
        assert list(journal.stored()) == ["b"]


@pytest.mark.parametrize(
    "damage", ["gone", "changed", "longer", "a stranger's", "writable by others"]
)
def test_a_file_that_is_not_what_was_written_is_not_opened(tmp_path, damage):
    keep(tmp_path, Outcome("a", 1, "finished", value=b"x" * 5000))
    path = tmp_path / "items" / "a" / "value-1-1.pkl"
    if damage == "gone":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes().replace(b"xxx", b"yyy", 1))
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "a stranger's":
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, 12345)
    else:
        path.chmod(0o666)
    with (
        open_one(tmp_path) as journal,
        pytest.raises(Damaged, match=r"The saved value of item a cannot be used: .*value-1-1\.pkl"),
    ):
        journal.value(journal.stored()["a"])


def test_another_function_and_another_seed_are_refused(tmp_path):
    keep(tmp_path, Outcome("a", 1, "finished"))
    with pytest.raises(
        JournalError, match=r"belongs to sweeps\.train; this call runs sweeps\.test"
    ):
        open_one(tmp_path, "sweeps.test")
    with pytest.raises(
        JournalError, match=r"was made with seed=None; this call has seed=3"
    ) as caught:
        open_one(tmp_path, seed=3)
    assert caught.value.run_dir == str(tmp_path)
    keep(tmp_path, Outcome("b", 1, "finished"))  # nothing of that holds the lock


def test_the_second_driver_is_refused(tmp_path):
    with open_one(tmp_path), pytest.raises(JournalError, match="is in use by another call"):
        open_one(tmp_path)


def test_where_nothing_can_be_written_it_says_so_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot be written \(Not a directory\)"):
        open_one(tmp_path / "file" / "run")
    (tmp_path / "run" / "journal.sqlite").mkdir(parents=True)
    with pytest.raises(JournalError, match="cannot be written"):
        open_one(tmp_path / "run")


class Departure:
    """Ends the process when it is pickled, or opened again."""

    def __init__(self, at_opening: bool) -> None:
        self.at_opening = at_opening

    def __reduce__(self) -> Any:
        return (sys.exit, (3,)) if self.at_opening else sys.exit(3)


def test_code_of_values_that_wants_to_leave_ends_nothing(tmp_path):
    with open_one(tmp_path) as journal:
        journal.note_items([("a", 0, Departure(at_opening=False))])
        ((_, error),) = journal.write(
            [
                Outcome("a", 1, "finished", value=Departure(at_opening=False)),
                Outcome("b", 1, "finished", value=Departure(at_opening=True)),
            ]
        )
        assert isinstance(error, SerializationError)
        with pytest.raises(Damaged, match=r"it cannot be opened here \(SystemExit: 3\)"):
            journal.value(journal.stored()["b"])


class NeedsFile:
    def __reduce__(self) -> Any:
        raise FileNotFoundError("no such data set")


def test_a_value_whose_own_code_misses_a_file_is_no_full_disk(tmp_path):
    with open_one(tmp_path) as journal:
        ((_, error),) = journal.write([Outcome("a", 1, "finished", value=NeedsFile())])
    assert isinstance(error, SerializationError)
    assert "FileNotFoundError: no such data set" in str(error)


@pytest.mark.parametrize("how", ["chmod", "chown"])
@pytest.mark.parametrize("name", ["", "journal.sqlite", "journal.sqlite-wal"])
def test_a_journal_that_others_may_have_written_is_not_opened(tmp_path, how, name):
    """Whichever of its files, or the folder, they can write to. It stays as it is."""
    run = tmp_path / "copy"
    with open_one(tmp_path / "run") as journal:
        journal.note_items([("a", 0, {1}), ("b", 1, {2})])
        journal.write(
            [
                Outcome("a", 1, "finished", value={1}),
                Outcome("b", 1, "finished", value={"x" * MAX_PICKLE_BYTES}),
            ]
        )
        shutil.copytree(tmp_path / "run", run)  # as if its driver had been killed: with a log
    if how == "chmod":
        (run / name).chmod(0o775)
    elif os.getuid() == 0:
        os.chown(run / name, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")
    before = {
        path.name: path.read_bytes()
        for path in run.iterdir()
        if path.is_file() and not path.name.endswith("-shm")
    }
    with pytest.raises(JournalError, match=r"if you trust it, ch(mod go-w|own) it"):
        open_one(run)
    with (
        pytest.raises(JournalError, match=r"if you trust it, ch(mod go-w|own) it"),
        replaying(run, "a"),
    ):
        pass
    assert load_results(run).to_frame()["status"].tolist() == ["missing"] * 2, (
        "sets are pickles, in the journal and in files"
    )
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (run := tmp_path / "run").mkdir()
    (precious := tmp_path / "thesis").write_text("of five years")
    (run / "journal.lock").symlink_to(precious)
    with pytest.raises(JournalError, match="cannot be written"):
        open_one(run)
    assert precious.read_text() == "of five years"


def test_a_folder_that_is_removed_while_it_is_in_use_is_noticed(tmp_path):
    with open_one(tmp_path / "run") as journal:
        assert journal.write([Outcome("a", 1, "finished", value=1)]) == []
        shutil.rmtree(tmp_path / "run")
        failed = journal.write(
            [Outcome("b", 1, "finished", value=2), Outcome("c", 1, "finished", value=2)]
        )
        assert [outcome.key for outcome, _ in failed] == ["b", "c"]
        assert "was removed, or replaced, while it was in use" in str(failed[0][1])
        with pytest.raises(OSError, match="was removed"):
            journal.note_items([("d", 0, 1)])


LOOK = (
    "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM"
    " attempts').fetchall(); c.close()"
)


@pytest.mark.parametrize("before", ["nothing", "load_results", "a copy"])
def test_whoever_looks_at_the_journal_with_other_programs_takes_nothing_from_it(tmp_path, before):
    path = tmp_path / "journal.sqlite"
    with open_one(tmp_path) as journal:
        journal.note_items((f"k{i}", i, i) for i in range(10))
        assert journal.write([Outcome("k0", 1, "finished", value=0)]) == []
        for i in range(1, 10):
            if before == "load_results":
                assert len(load_results(tmp_path)) == 10
            elif before == "a copy":
                path.read_bytes()  # drops this process's locks
            subprocess.run([sys.executable, "-c", LOOK, path], check=True)
            assert (tmp_path / "journal.sqlite-wal").exists() is (before != "a copy")
            assert journal.write([Outcome(f"k{i}", 1, "finished", value=i)]) == []
        shutil.copytree(tmp_path, tmp_path / "killed")
    for folder in (tmp_path, tmp_path / "killed"):
        assert list(load_results(folder)) == list(range(10))
        with open_one(folder) as journal:
            assert len(journal.stored()) == 10


def test_a_log_that_is_removed_in_the_midst_costs_nothing(tmp_path, caplog):
    with open_one(tmp_path) as journal:
        journal.note_items([("a", 0, 1), ("b", 1, 2)])
        assert journal.write([Outcome("a", 1, "finished", value=1)]) == []
        (tmp_path / "journal.sqlite").read_bytes()
        subprocess.run([sys.executable, "-c", LOOK, tmp_path / "journal.sqlite"], check=True)
        # nobody sees that
        journal._insert(
            {"attempts": [(2, *to_row(Outcome("b", 1, "finished", value=2), 1, tmp_path))]}
        )
        journal._renew()
        journal._insert_missing(
            {"attempts": [(2, *to_row(Outcome("b", 1, "finished", value=2), 1, tmp_path))]}
        )
    assert list(load_results(tmp_path)) == [1, 2]
    assert "is reopened" in caplog.text


def multiply(x: int, by: int = 2) -> int:
    return x * by


def sourced(folder: Path, fn: Any) -> None:
    source = FunctionSource.of(fn)
    Journal.open(folder, source.function, None, source).close()


def test_the_order_of_a_partials_keywords_does_not_count(tmp_path):
    one, other = (
        functools.partial(multiply, 2, by=3, to=1),
        functools.partial(multiply, 2, to=1, by=3),
    )
    assert checkpoint_owner(one) == checkpoint_owner(other)
    sourced(tmp_path, one)
    sourced(tmp_path, other)


def test_other_arguments_of_a_partial_are_refused(tmp_path):
    sourced(tmp_path, functools.partial(multiply, by=3))
    sourced(tmp_path, functools.partial(multiply, by=3))
    with pytest.raises(
        JournalError,
        match=r"made by .*multiply with by=3 from functools.partial; this call passes by=4",
    ):
        sourced(tmp_path, functools.partial(multiply, by=4))
    with pytest.raises(JournalError, match="this call passes none"):
        sourced(tmp_path, multiply)


def test_what_a_large_function_holds_is_not_kept():
    large = np.ones(5_000_000)
    source = FunctionSource.of(lambda x: x + large)
    assert source.pickled is None
    assert source.held is not None


def test_a_relative_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with open_one(Path("run")) as journal:
        monkeypatch.chdir("/")
        journal.write([Outcome("a", 1, "finished", value="x" * 5000)])
    assert (tmp_path / "run" / "items" / "a" / "value-1-1.json").exists()


def test_items_that_are_known_are_not_stored_again(tmp_path):
    for _ in range(3):
        with open_one(tmp_path) as journal:
            journal.note_items([("b", 0, 2), ("a", 1, 1), ("b", 2, 2)])
            journal.note_items([("c", 3, 3)])
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        assert connection.execute("SELECT key, body FROM items").fetchall() == [
            ("b", "2"),
            ("a", "1"),
            ("c", "3"),
        ]
        orders = connection.execute("SELECT run, first, items FROM orders").fetchall()
    connection.close()
    assert orders == [
        (run, first, items) for run in (1, 2, 3) for first, items in ((0, "1-2,1"), (3, "3"))
    ]


def test_long_orders_are_cut_into_rows():
    import random

    numbers = list(range(1, 5001))
    random.Random(0).shuffle(numbers)
    rows = list(schema.order_rows(1, enumerate(numbers)))
    assert max(len(text) for _, _, text in rows) <= schema.MAX_TEXT_BYTES
    assert [number for _, first, text in rows for number in schema.numbers_of(text)] == numbers
    assert [first for _, first, _ in rows] == sorted(first for _, first, _ in rows)
    assert len(list(schema.order_rows(1, enumerate(range(1, 1_000_000))))) == 1


def test_threads_may_write_at_the_same_time(tmp_path):
    with open_one(tmp_path) as journal, concurrent.futures.ThreadPoolExecutor(8) as threads:
        jobs = [
            threads.submit(journal.write, [Outcome(f"{i}-{j}", 1, "finished", value=i)])
            for i in range(8)
            for j in range(20)
        ]
        assert all(job.result() == [] for job in jobs)
    with open_one(tmp_path) as journal:
        assert len(journal.stored()) == 160


def test_what_is_written_when_the_process_is_killed_is_there(tmp_path, start_python):
    code = f"""
    import os
    from raypool.journal.journal import Journal, Outcome
    journal = Journal.open({str(tmp_path / "run")!r}, "sweeps.train", None)
    journal.note_items([("a", 0, 1)])
    journal.write([Outcome("a", 1, "finished", value="x" * 5000), Outcome("b", 1, "finished", value=2)])
    os.kill(os.getpid(), 9)
    """
    start_python(code).finish()
    with open_one(tmp_path / "run") as journal:
        assert {key: len(str(journal.value(one))) for key, one in journal.stored().items()} == {
            "a": 5000,
            "b": 1,
        }
        assert journal.run == 2


def test_a_forked_child_leaves_the_journal_alone(tmp_path):
    with open_one(tmp_path) as journal:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert journal.write([Outcome("a", 1, "finished")]) == []


# --- versions -------------------------------------------------------------------------------------


def test_an_older_journal_is_brought_up_to_date_and_keeps_its_rows(tmp_path):
    keep(tmp_path, Outcome("a", 1, "finished", value=1))
    connection = connect(tmp_path / "journal.sqlite")
    before = schema.read(connection, "attempts")

    def second(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE extras (n INTEGER PRIMARY KEY)")

    schema.migrate(connection, [*schema.MIGRATIONS, second])
    assert connection.in_transaction
    connection.execute("COMMIT")
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert schema.read(connection, "attempts") == before
    schema.migrate(connection, [*schema.MIGRATIONS, second])
    assert not connection.in_transaction
    connection.close()


def test_a_newer_journal_is_refused(tmp_path):
    keep(tmp_path, Outcome("a", 1, "finished"))
    connection = connect(tmp_path / "journal.sqlite")
    row = (9, "sweeps.train", "null", None, schema.SCHEMA + 1, 0.0, "h", 1, "9.0")
    schema.insert(connection, "runs", [row])
    connection.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    connection.close()
    with pytest.raises(
        JournalError,
        match=r"made by a newer raypool \(version 2, this one knows 1\)\. Update raypool",
    ):
        open_one(tmp_path)


def test_a_journal_whose_version_is_only_damaged_is_read(tmp_path):
    keep(tmp_path, Outcome("a", 1, "finished", value=5))
    connection = connect(tmp_path / "journal.sqlite")
    connection.execute("PRAGMA user_version = 77")
    connection.close()
    with open_one(tmp_path) as journal:
        assert journal.value(journal.stored()["a"]) == 5


def test_a_database_of_somebody_elses_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("INSERT INTO mine VALUES (1)")
    connection.close()
    with pytest.raises(JournalError, match="is not a raypool journal"):
        open_one(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        assert connection.execute("SELECT x FROM mine").fetchall() == [(1,)]
    connection.close()


# --- salvage --------------------------------------------------------------------------------------


def test_a_damaged_journal_is_kept_and_what_is_left_goes_on(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "raypool")
    with open_one(tmp_path) as journal:
        journal.note_items((f"k{i}", i, i) for i in range(300))
        journal.write(
            [Outcome(f"k{i}", 1, "finished", value="v" * 100 + str(i)) for i in range(300)]
        )
    path = tmp_path / "journal.sqlite"
    data = bytearray(path.read_bytes())
    start = data.index(b"v" * 100 + b"150") // schema.PAGE_BYTES * schema.PAGE_BYTES
    data[start : start + schema.PAGE_BYTES] = bytes(schema.PAGE_BYTES)
    path.write_bytes(data)
    with open_one(tmp_path) as journal:
        stored = journal.stored()
        assert 200 < len(stored) < 300
        assert "k150" not in stored
        assert all(journal.value(one) == "v" * 100 + key[1:] for key, one in stored.items())
        journal.write(
            [Outcome(f"k{i}", 1, "finished", value=i) for i in range(300) if f"k{i}" not in stored]
        )
    (message,) = (record.message for record in caplog.records)
    assert (
        f"{len(stored)} results of 300 items could be read, at least {300 - len(stored)} results"
        " are lost." in message
    )
    assert message.endswith("journal.damaged-1.sqlite.")
    assert (tmp_path / "journal.damaged-1.sqlite").read_bytes() == data
    with open_one(tmp_path) as journal:
        assert len(journal.stored()) == 300
    assert len(caplog.records) == 1


def test_rows_of_all_kinds_are_found_without_sqlite(tmp_path, caplog):
    values = [None, "naïve", 2**70, np.arange(9.0), {1, 2}, np.zeros(100_000)]
    numbers = [0, 1, -2, 200, 40_000, 2**30, 2**40, 2**60]
    outcomes = [
        Outcome(f"v{i}", 1, "finished", value=value, host="größe") for i, value in enumerate(values)
    ]
    outcomes += [
        Outcome(
            f"n{i}", 1 + i, "finished", value=i, started_at=float(n), duration_s=n / 8, worker=n
        )
        for i, n in enumerate(numbers)
    ]
    outcomes += [Outcome("e", 2, "failed", error=ValueError("no"))]
    keep(tmp_path, *outcomes)
    with open_one(tmp_path) as journal:
        before = journal.stored()
    path = tmp_path / "journal.sqlite"
    path.write_bytes(bytes(100) + path.read_bytes()[100:])
    with open_one(tmp_path) as journal:
        assert journal.stored() == before
        assert len(before) == len(outcomes)
        for i, value in enumerate(values):
            np.testing.assert_equal(journal.value(before[f"v{i}"]), value)
        assert str(journal.error(before["e"])) == "no"
    assert "it does not begin like a journal" in caplog.text


def test_items_keep_their_order_where_others_were_lost(tmp_path):
    keys = [f"k{i}" for i in range(600)]
    for order in (keys, random.Random(0).sample(keys, 600)):
        with open_one(tmp_path) as journal:
            journal.note_items((key, i, key + "v" * 100) for i, key in enumerate(order))
    with open_one(tmp_path) as journal:
        before = [journal.positions(run) for run in (1, 2)]
    assert before[1] == {key: i for i, key in enumerate(order)}
    path = tmp_path / "journal.sqlite"
    data = bytearray(path.read_bytes())
    start = data.index(b"k150v") // schema.PAGE_BYTES * schema.PAGE_BYTES
    data[start : start + schema.PAGE_BYTES] = bytes(schema.PAGE_BYTES)
    path.write_bytes(data)
    with open_one(tmp_path) as journal:
        after = [journal.positions(run) for run in (1, 2)]
    lost = {*keys} - {*after[0]}
    assert "k150" in lost
    assert len(lost) < 100
    for old, new in zip(before, after, strict=True):
        assert new == {key: place for key, place in old.items() if key not in lost}


def test_a_salvage_that_was_interrupted_is_finished(tmp_path):
    keep(tmp_path / "whole", Outcome("a", 1, "finished", value=1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.salvaged.sqlite").write_bytes(
        (tmp_path / "whole" / "journal.sqlite").read_bytes()
    )
    (tmp_path / "run" / "journal.sqlite").write_bytes(b"damaged")
    (tmp_path / "run" / "journal.sqlite-wal").write_bytes(b"of the damaged one")
    with open_one(tmp_path / "run") as journal:
        assert list(journal.stored()) == ["a"]


def test_what_is_no_journal_at_all_is_kept_beside_a_new_one(tmp_path, caplog):
    (tmp_path / "journal.sqlite").write_bytes(b"nonsense" * 1000)
    with open_one(tmp_path) as journal:
        assert journal.stored() == {}
    assert (tmp_path / "journal.damaged-1.sqlite").read_bytes() == b"nonsense" * 1000
    assert "is damaged" in caplog.text


# --- where the function is ------------------------------------------------------------------------


def test_a_source_says_where_a_function_stands():
    source = FunctionSource.of(json.dumps)
    assert (source.function, source.module, source.qualname, source.pickled) == (
        "json.dumps",
        "json",
        "dumps",
        None,
    )
    assert FunctionSource.from_text(source.to_text()) == source


def test_a_function_without_a_name_is_pickled():
    n = 3
    source = FunctionSource.of(lambda x: x + n)
    assert source.qualname is None
    assert pickle.loads(source.pickled)(1) == 4
    assert FunctionSource.from_text(source.to_text()) == source._replace(pickled=None)


def test_a_pickle_needs_no_script_to_be_opened(run_python, tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        "import sys, pathlib\nfrom raypool.journal.files import dump\nclass Config:\n    x = 3\n"
        "pathlib.Path(sys.argv[1]).write_bytes(dump([Config(), 4]))\n"
    )
    run_python(
        f"import subprocess, sys; subprocess.check_call([sys.executable, {str(script)!r},"
        f" {str(tmp_path / 'pickle')!r}])"
    )
    config, number = load((tmp_path / "pickle").read_bytes())
    assert (config.x, number) == (3, 4)
    assert load(dump({1, 2})) == {1, 2}
