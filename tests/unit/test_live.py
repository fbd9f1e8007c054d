"""The files through which a driver and those who watch its run meet (`raypool/journal/live.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import InvalidValueError, JournalError
from raypool.channel.records import Function
from raypool.core.model import Slice
from raypool.engine.loop import LoopOptions, LoopWork
from raypool.journal.live import Request, WatchedRun, actions_in, ask, live_of, want


class Driver(WatchedRun):
    """One whose time passes when the test says so."""

    def __init__(self, run_dir: Path, act: Callable[[Request], str | None]) -> None:
        self.now, self.num_described = 100.0, 0
        super().__init__(run_dir, self.describe, act, lambda: self.now)

    def describe(self) -> dict[str, Any]:
        self.num_described += 1
        return {"running": [], "last": float("nan")}

    def look_later(self, seconds: float) -> bool:
        self.now += seconds
        return self.look()


def outcomes(run: Path) -> list[str]:
    return [entry["outcome"] for entry in actions_in(run)]


def test_a_state_is_written_as_long_as_somebody_looks(tmp_path: Path) -> None:
    driver = Driver(tmp_path, lambda _: "done")
    assert not driver.look_later(5.0)
    want(tmp_path)
    assert not driver.look_later(0.5)  # one look in a second
    assert driver.look_later(0.5)
    live = live_of(tmp_path)
    assert live is not None
    assert live["pid"] == os.getpid()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "watch").rglob("*")]
    assert modes == [0o600] * len(modes)
    assert (tmp_path / "watch").stat().st_mode & 0o777 == 0o700
    assert driver.look_later(0.5)
    assert driver.num_described == 1, "one state in a second"
    assert driver.look_later(8.0)
    assert driver.num_described == 2
    assert not driver.look_later(2.0), "the watcher is gone"
    assert driver.num_described == 2
    driver.close()
    assert live_of(tmp_path) is None


def test_a_watcher_that_left_before_the_driver_began_is_none(tmp_path: Path) -> None:
    want(tmp_path)
    os.utime(tmp_path / "watch" / "wanted", (1e9, 1e9))
    assert not Driver(tmp_path, lambda _: "done").look()


def test_nothing_is_known_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    want(tmp_path)
    Driver(tmp_path, lambda _: "done").look()
    path = tmp_path / "watch" / "live.json"
    live = json.loads(path.read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    for change in ({"pid": gone.pid}, {"time": live["time"] - 60, "host": "elsewhere"}):
        path.write_text(json.dumps({**live, **change}))
        assert live_of(tmp_path) is None
    path.write_text("[")
    assert live_of(tmp_path) is None
    gone.wait()


def test_two_watchers_ask_at_once_and_one_has_to_wait(tmp_path: Path) -> None:
    answers = iter(["done", None, None, "item 2 has ended"])
    driver = Driver(tmp_path, lambda _: next(answers))
    ids = [ask(tmp_path, "cancel", 1), ask(tmp_path, "cancel", 2)]
    driver.look()
    assert [(each["id"], each["outcome"]) for each in actions_in(tmp_path)] == [(ids[0], "done")]
    driver.look()
    assert len(actions_in(tmp_path)) == 1
    driver.look()
    assert [each["id"] for each in actions_in(tmp_path)] == ids
    assert outcomes(tmp_path) == ["done", "item 2 has ended"]
    with (tmp_path / "actions.jsonl").open("a") as file:
        file.write('[]\n{"id": 3}\n{"id"')
    assert outcomes(tmp_path) == ["done", "item 2 has ended"], "other lines are left out"


def test_what_comes_at_the_end_of_a_loop_or_between_two_is_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path, lambda _: None)
    ask(tmp_path, "stop", 1)
    driver.look()
    ask(tmp_path, "stop_all")
    driver.close()
    ask(tmp_path, "cancel", 1)
    Driver(tmp_path, lambda _: "done").look()
    assert outcomes(tmp_path) == ["the loop has ended"] * 3


def test_files_that_are_no_requests_are_recorded_and_removed(tmp_path: Path) -> None:
    asked: list[Request] = []
    driver = Driver(tmp_path, lambda request: asked.append(request) or "done")
    ask(tmp_path, "cancel", 0)
    requests = tmp_path / "watch" / "requests"
    (good,) = requests.iterdir()
    entry = json.loads(good.read_text())
    bad: dict[str, Any] = {
        "1": "{",
        "2": "[1]",
        "3": json.dumps({**entry, "more": 1}),
        "4": json.dumps({**entry, "action": "delete"}),
        "5": json.dumps({**entry, "item": -1}),
        "6": json.dumps({**entry, "item": None}),
        "7": " " * 100_000,
    }
    for name, text in bad.items():
        (requests / f"{name}.json").write_text(text)
    os.mkfifo(requests / "8.json")  # a read would wait for ever
    (requests / "9.json").symlink_to(good)
    if os.getuid() == 0:
        (requests / "91.json").write_text(good.read_text())
        os.chown(requests / "91.json", 12345, 12345)
    driver.look()
    assert [request.item for request in asked] == [0]
    assert not list(requests.iterdir())
    assert sum("is no request" in outcome for outcome in outcomes(tmp_path)) >= len(bad) + 2
    assert os.getuid() != 0 or "91.json is no request: it belongs to user 12345" in outcomes(
        tmp_path
    )


@pytest.mark.parametrize("name", ["watch", "watch/requests"])
def test_a_folder_that_others_may_write_to_is_not_looked_at(tmp_path: Path, name: str) -> None:
    driver = Driver(tmp_path, lambda _: "done")
    ask(tmp_path, "cancel", 0)
    (tmp_path / name).chmod(0o777)
    driver.look()
    assert actions_in(tmp_path) == []


def test_a_full_disk_disturbs_nothing(tmp_path: Path) -> None:
    asked: list[Request] = []
    driver = Driver(tmp_path, lambda request: asked.append(request) or "done")
    ask(tmp_path, "cancel", 0)
    (tmp_path / "actions.jsonl").mkdir()  # neither of them can be written
    (tmp_path / "watch" / "live.json").mkdir()
    assert driver.look()
    assert driver.look()
    driver.close()
    assert len(asked) == 1


def test_a_watcher_is_told_what_it_cannot_ask_for(tmp_path: Path) -> None:
    for action, item in (("delete", 1), ("cancel", None), ("stop_all", 1), ("stop", True)):
        with pytest.raises(InvalidValueError, match="is none of stop, cancel"):
            ask(tmp_path, action, item)
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(JournalError, match="belongs to user 12345"):
            ask(tmp_path, "cancel", 1)
        with pytest.raises(JournalError, match="belongs to user 12345"):
            want(tmp_path)


def test_a_user_without_a_name_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", fail)
    asked: list[Request] = []
    driver = Driver(tmp_path, lambda request: asked.append(request) or "done")
    ask(tmp_path, "cancel", 0)
    driver.look()
    driver.close()
    assert [request.user for request in asked] == [f"user {os.getuid()}"]


def test_an_item_that_is_added_while_another_is_repeated_is_kept() -> None:
    class Order(list[int]):
        """One to which another thread adds an item at the end of a copy."""

        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            work.add("c")

    order = Order([1, 0])
    work = LoopWork(Function(0, None, "train"), ["a", "b"], LoopOptions("train", order=order))
    work.run_again(0)
    work.add("d")
    queued = work.numbers(Slice(0, 0, 9, 1))
    assert sorted(queued) == [0, *range(len(work.items))]
