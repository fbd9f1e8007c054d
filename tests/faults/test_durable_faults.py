"""A sweep with a `run_dir` whose driver, disk, folder or user does what it must not (scenario
44).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import JournalError, ParallelPool, current_task, parpool
from raypool.engine import durable
from raypool.journal.reading import load_results

long = [pytest.mark.long, pytest.mark.timeout(900)]


def num_finished(folder: Path) -> int:
    """Return how many items are done, by the journal; none while there is no run in it yet."""
    try:
        return int((load_results(folder).to_frame()["status"] == "finished").sum())
    except JournalError:
        return 0


# --- the driver is killed -------------------------------------------------------------------------

SWEEP = """
import os, sys, time, uuid
from pathlib import Path
from raypool import parpool, report

FOLDER = Path({folder!r})

def train(item):
    (FOLDER / "marks" / f"{{item}}#{{uuid.uuid4().hex}}").touch()
    print("item", item)
    report(loss=1 / (item + 1))
    time.sleep(0.02)
    return {{"square": item * item, "history": [item] * 1_000}}

with parpool(2, quiet=True, **{where!r}) as pool:
    print("begun", flush=True)
    results = pool.parfor(train, range(60), run_dir=FOLDER / "run", chunk_size=1)
    print([value["square"] for value in results] == [x * x for x in range(60)], len(results.metrics), flush=True)
"""


@pytest.mark.parametrize(
    ("profile", "num_kills"),
    [
        ("threads", 4),
        pytest.param("threads", 30, marks=long),
        pytest.param("local", 30, marks=long),
    ],
    ids=["threads-4", "threads-30", "local-30"],
)
def test_a_driver_killed_at_random_moments_loses_nothing_that_was_done(
    profile: str,
    num_kills: int,
    tmp_path: Path,
    marks: Any,
    start_python: Any,
    eventually: Callable[..., bool],
    request: pytest.FixtureRequest,
) -> None:
    """Whatever the moment: what the journal has is never run again, and in the end every item is
    there once, with its value.
    """
    where = {"profile": profile}
    if profile == "local":  # on a Ray that stays, so that a driver is there in two seconds
        request.getfixturevalue("ray_session")
        where = {"address": ray_address()}
    moments, num_sweeps = random.Random(44), 0
    while num_kills > 0:
        home = tmp_path / f"sweep-{num_sweeps}"
        (home / "marks").mkdir(parents=True)
        sweep = Sweep(home, type(marks)(home / "marks"), where, start_python, eventually)
        num_kills -= sweep.kill(num_kills, moments)
        sweep.finish()
        num_sweeps += 1


class Sweep:
    """A sweep of 60 items in drivers that are killed, one after the other."""

    def __init__(
        self,
        home: Path,
        marks: Any,
        where: dict[str, str],
        start_python: Any,
        eventually: Callable[..., bool],
    ) -> None:
        self.run_dir = home / "run"
        self.marks = marks
        self.code = SWEEP.format(folder=str(home), where=where)
        self.start_python = start_python
        self.eventually = eventually
        # items in the journal after a kill, and how often they had run by then
        self.done: dict[int, int] = {}

    def kill(self, most: int, moments: random.Random) -> int:
        """Kill drivers until one gets to its end; return how many."""
        for kill in range(most):
            num_marks = len(self.marks.all()) + moments.randint(0, 25)
            started = self.start_python(self.code)
            assert self.eventually(
                functools.partial(has_gone_so_far, self.marks, num_marks, started)
            ), "it does not go on"
            time.sleep(moments.uniform(0, 0.02))  # in the midst of whatever it is at
            if started.process.poll() is not None:
                assert started.finish().returncode == 0, started.finish().stderr
                return kill
            os.kill(started.pid, signal.SIGKILL)
            started.process.wait(300)
            assert self.eventually(functools.partial(is_gone, started)), (
                "what the driver had started lives on"
            )
            self.check()
        return most

    def check(self) -> None:
        if not self.done and not num_finished(self.run_dir):
            return
        results = load_results(self.run_dir)
        counts = {item: self.marks.count(item) for item in range(60)}
        assert all(counts[item] == count for item, count in self.done.items()), (
            "what was done has run again"
        )
        statuses = results.to_frame()["status"]
        there = [
            item
            for item, status in zip(items_of(results), statuses, strict=True)
            if status == "finished"
        ]
        assert set(self.done) <= set(there), "what was there is gone"
        assert len(set(there)) == len(there)
        self.done = {item: counts[item] for item in there}

    def finish(self) -> None:
        last = self.start_python(self.code).finish()
        assert last.stdout.splitlines()[-1:] == ["True 60"], last.stderr
        self.check()
        results = load_results(self.run_dir)
        assert items_of(results) == list(range(60))
        assert [value["square"] for value in results] == [x * x for x in range(60)]
        assert set(results.to_frame()["status"]) == {"finished"}


def ray_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def is_gone(started: Any) -> bool:
    return not started.family()


def has_gone_so_far(marks: Any, num_marks: int, started: Any) -> bool:
    return len(marks.all()) >= num_marks or started.process.poll() is not None


def items_of(results: Any) -> list[int]:
    return list(results.to_frame()["item"])


def test_the_folder_of_a_driver_that_was_killed_is_free(
    tmp_path: Path, gate: Any, start_python: Any, eventually: Callable[..., bool]
) -> None:
    """While it lives nobody else gets in, and hears who has it; what it had done is there
    afterwards.
    """
    started = start_python(f"""
        import time
        from pathlib import Path
        from raypool import parpool
        def work(item):
            while item == 3 and not Path({str(gate.path)!r}).exists():
                time.sleep(0.01)
            return -item
        with parpool(2, profile="threads", quiet=True) as pool:
            pool.parfor(work, range(4), run_dir={str(tmp_path / "run")!r}, chunk_size=1)
    """)
    assert eventually(lambda: num_finished(tmp_path / "run") == 3)
    with parpool(2, profile="threads", quiet=True) as pool:
        with pytest.raises(JournalError, match=rf"in use by process {started.pid} on .*, since 2"):
            pool.parfor(abs, range(4), run_dir=tmp_path / "run")
        os.kill(started.pid, signal.SIGKILL)
        started.process.wait(300)

        with pytest.raises(JournalError, match="this call runs "):
            pool.parfor(abs, range(4), run_dir=tmp_path / "run")
    assert num_finished(tmp_path / "run") == 3


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["inline", "threads", "local"])
def test_ctrl_c_leaves_what_was_done_and_says_so(
    profile: str, tmp_path: Path, make_gate: Any, start_python: Any, eventually: Any
) -> None:
    ready = make_gate()
    started = start_python(f"""
        import time
        from pathlib import Path
        from raypool import parpool
        def work(item):
            if item == 3 and not Path({str(ready.path)!r}).exists():
                Path({str(ready.path)!r}).touch()
                while True:
                    time.sleep(0.01)
            return -item
        with parpool(1, profile={profile!r}, quiet=True, start_timeout_s=300) as pool:
            try:
                pool.parfor(work, range(6), run_dir={str(tmp_path / "run")!r}, chunk_size=1)
            except KeyboardInterrupt as interrupt:
                print(list(interrupt.results))
                print("".join(getattr(interrupt, "__notes__", [])))
            print(list(pool.parfor(work, range(6), run_dir={str(tmp_path / "run")!r})))
    """)
    ready.wait()
    # What a worker has done is known a moment later; "inline" has nobody who could write it down
    # meanwhile.
    assert profile == "inline" or eventually(lambda: num_finished(tmp_path / "run") == 3)

    os.killpg(started.pid, signal.SIGINT)

    done = started.finish()
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "[0, -1, -2, None, None, None]"
    assert (
        f"and in {tmp_path / 'run'}: run the same call again to continue from there" in lines[1]
        or profile == "inline"
    )
    assert lines[-1] == "[0, -1, -2, -3, -4, -5]"
    with_rows = load_results(tmp_path / "run").to_frame()
    assert list(with_rows["status"]) == ["finished"] * 6


# --- the disk is full -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no room in a file system."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


@pytest.fixture
def pool() -> Iterator[ParallelPool]:
    with parpool(2, profile="threads", quiet=True) as pool:
        yield pool


def test_a_loop_goes_on_where_the_disk_is_full_and_writes_when_there_is_room(
    pool: ParallelPool,
    small_disk: Path,
    make_gate: Any,
    marks: Any,
    eventually: Callable[..., bool],
    caplog: Any,
) -> None:
    begin, end = make_gate(), make_gate()

    def work(item: int) -> str:
        marks.add(item)
        if item == 1:
            begin.wait()
        if item == 19:
            end.wait()
        return f"{item} " * 5_000

    found: list[Any] = []
    loop = functools.partial(pool.parfor, work, range(20), run_dir=small_disk / "run", chunk_size=1)
    thread = threading.Thread(target=lambda: found.append(loop()))
    thread.start()
    # before the first item the journal itself needs room
    assert eventually(lambda: marks.count(1) == 1)
    filler = fill(small_disk)
    begin.open()
    assert eventually(lambda: "cannot be written" in caplog.text and len(marks.all()) == 20)
    assert "No space left on device" in caplog.text or "full" in caplog.text
    assert num_finished(small_disk / "run") < 20

    filler.unlink()

    assert eventually(lambda: "can be written again" in caplog.text)
    end.open()
    thread.join(300)
    assert [value.split()[0] for value in found[0]] == [str(item) for item in range(20)]
    assert num_finished(small_disk / "run") == 20
    assert loop() == found[0]
    assert len(marks.all()) == 20, "what was done has run again"


@pytest.mark.parametrize("reduce", [None, operator.add])
def test_what_finds_no_room_in_the_end_is_an_error_that_has_all_values(
    pool: ParallelPool,
    small_disk: Path,
    marks: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    reduce: Any,
) -> None:
    """One value is larger than the disk: all others are written, and only that one runs again.

    With `reduce=`, the values are folded and released, so the error has none.
    """
    monkeypatch.setattr(durable, "PATIENCE_S", 0.7)

    def work(item: int) -> bytes:
        marks.add(item)
        return bytes(3_000_000 if item == 2 and marks.count(2) == 1 else 10_000)

    with pytest.raises(
        JournalError, match=r"1 outcome of .* could not be written to .*0\.7 s"
    ) as caught:
        pool.parfor(work, range(8), run_dir=small_disk / "run", reduce=reduce)

    assert ("This error's .results has all values" in str(caught.value)) is (reduce is None)
    lengths = [len(value or b"") for value in caught.value.results]  # type: ignore[attr-defined]
    expected = [10_000, 10_000, 3_000_000, *[10_000] * 5]
    assert lengths == (expected if reduce is None else [0] * 8)
    assert caught.value.run_dir == str(small_disk / "run")
    assert num_finished(small_disk / "run") == 7
    assert [len(value) for value in pool.parfor(work, range(8), run_dir=small_disk / "run")] == [
        10_000
    ] * 8
    assert [marks.count(item) for item in range(8)] == [1, 1, 2, 1, 1, 1, 1, 1]


def test_an_error_while_the_disk_is_full_says_what_is_not_kept(
    pool: ParallelPool, small_disk: Path, caplog: Any, eventually: Callable[..., bool]
) -> None:
    """As Ctrl-C would: nobody waits for room then, and nobody says that all is kept."""

    def items() -> Iterator[int]:
        yield from range(10)
        fill(small_disk)
        yield from range(10, 30)
        assert eventually(lambda: "cannot be written" in caplog.text)
        assert eventually(lambda: pool.statistics().finished == 30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(
            lambda item: f"{item} " * 2_000, items(), run_dir=small_disk / "run", chunk_size=1
        )

    notes = " ".join(caught.value.__notes__)
    assert "could not be written to" in notes
    assert "to continue from there" not in notes
    num_there = num_finished(small_disk / "run")
    num_had = sum(value is not None for value in caught.value.results)  # type: ignore[attr-defined]
    assert num_there < num_had
    assert f"{num_had - num_there} outcomes of" in notes


def test_what_items_say_waits_for_room_too(
    pool: ParallelPool, small_disk: Path, gate: Any, eventually: Callable[..., bool], caplog: Any
) -> None:
    def talk(item: int) -> int:
        print("begun")
        gate.wait()
        print("x" * 1_000)
        return item

    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(pool.parfor(talk, [5], run_dir=small_disk / "run"))
    )
    thread.start()
    assert eventually(lambda: len(list(small_disk.glob("run/items/*/diary.txt"))) == 1)
    filler = fill(small_disk)
    gate.open()
    assert eventually(lambda: "cannot be written" in caplog.text)
    filler.unlink()
    thread.join(300)

    assert list(found[0]) == [5]
    (diary,) = small_disk.glob("run/items/*/diary.txt")
    assert diary.read_text() == "begun\n" + "x" * 1_000 + "\n"


def test_a_disk_that_is_full_at_the_start_is_an_error_before_anything_runs(
    pool: ParallelPool, small_disk: Path, marks: Any
) -> None:
    (small_disk / "run").mkdir()
    fill(small_disk)

    with pytest.raises(JournalError, match="cannot be written") as caught:
        pool.parfor(marks.add, range(3), run_dir=small_disk / "run")
    assert caught.value.run_dir == str(small_disk / "run")
    assert marks.all() == []


def test_a_file_system_that_is_read_only_is_an_error_before_anything_runs(
    pool: ParallelPool, small_disk: Path, marks: Any
) -> None:
    pool.parfor(abs, [-1], run_dir=small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    with pytest.raises(JournalError, match="Read-only file system"):
        pool.parfor(abs, [-1], run_dir=small_disk / "run")
    assert list(load_results(small_disk / "run")) == [1]


LIMITED = """
import resource, sys
from raypool import JournalError, parpool
from raypool.engine import durable
durable.PATIENCE_S = 0.5

def work(item):
    if item == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    return "x" * (100_000 if item == 6 else 2_000)

with parpool(1, profile="threads", quiet=True) as pool:
    try:
        pool.parfor(work, range(30), run_dir=sys.argv[1], chunk_size=1)
    except JournalError as error:
        print(sum(value is not None for value in error.results))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(len(pool.parfor(work, range(5), run_dir=sys.argv[1])))
"""


def test_a_limit_of_file_sizes_is_like_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), tmp_path / "run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert done.stdout.split() == ["30", "5"], done.stderr
    assert "cannot be written" in done.stderr


# --- a worker is lost -----------------------------------------------------------------------------


def test_an_item_that_has_lost_its_worker_has_both_attempts_in_the_journal(
    shared_pool: ParallelPool, tmp_path: Path
) -> None:
    def die_once(item: int) -> int:
        if item == 1 and current_task().attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return current_task().attempt

    loop = functools.partial(
        shared_pool.parfor, die_once, [0, 1, 2], run_dir=tmp_path / "run", chunk_size=1
    )
    assert list(loop(max_workers=1)) == [1, 2, 1]

    assert list(load_results(tmp_path / "run").to_frame()["attempts"]) == [1, 2, 1]
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as connection:
        rows = connection.execute("SELECT attempt, status FROM attempts ORDER BY n").fetchall()
    assert sorted(rows) == [(1, "finished"), (1, "finished"), (1, "lost"), (2, "finished")]


def test_a_damaged_journal_stays_if_there_is_no_room_for_the_repaired_one(
    pool: ParallelPool, small_disk: Path
) -> None:
    run = small_disk / "run"
    pool.parfor(str, range(800), run_dir=run)
    journal = run / "journal.sqlite"
    data = bytearray(journal.read_bytes())
    data[40_000:4800] = bytes(2_000)
    journal.write_bytes(data)
    filler = fill(small_disk)
    num_refused = 0
    for size in range(filler.stat().st_size, 0, -32_768):  # at last, there is room
        os.truncate(filler, size)
        try:
            results = pool.parfor(str, range(800), run_dir=run)
            break
        except JournalError as error:
            assert "Free some space" in str(error)  # noqa: PT017
            num_refused += 1
            assert journal.stat().st_size == len(data)
    assert num_refused
    assert list(results) == list(map(str, range(800)))
    assert sum(results.to_frame()["status"] == "finished") == 800
