"""A folder has one driver at a time, and is free when that has ended, however it did."""

from __future__ import annotations

import json
import os
import signal

import pytest

from raypool.errors import JournalError
from raypool.journal.lock import RunLock, is_in_use, is_running

TAKE = """
import sys, time, pathlib
from raypool.journal.lock import RunLock
lock = RunLock(pathlib.Path({folder!r}))
print("taken", flush=True)
sys.stdin = open({folder!r} + "/wait")  # a pipe: until the test lets it end
sys.stdin.read()
"""


def test_the_second_is_told_who_the_first_is(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(
        JournalError,
        match=r"is in use by another call in this process, since 20\d\d-",
    ) as caught:
        RunLock(tmp_path)
    assert caught.value.run_dir == str(tmp_path)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


def test_a_lock_that_nobody_refers_to_is_released(tmp_path):
    lock = RunLock(tmp_path)
    assert is_in_use(tmp_path)
    del lock
    assert not is_in_use(tmp_path)
    RunLock(tmp_path).release()


def test_locks_of_other_names_and_folders_do_not_meet(tmp_path):
    (tmp_path / "b").mkdir()
    locks = [RunLock(tmp_path), RunLock(tmp_path, "training.lock"), RunLock(tmp_path / "b")]
    for lock in locks:
        lock.release()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_holds_nothing(tmp_path, start_python, how):
    os.mkfifo(tmp_path / "wait")
    other = start_python(TAKE.format(folder=str(tmp_path)))
    assert other.process.stdout.readline() == "taken\n"
    with pytest.raises(JournalError, match=f"process {other.pid} on"):
        RunLock(tmp_path)
    os.kill(other.pid, how)
    other.process.wait(300)
    RunLock(tmp_path).release()


def test_a_forked_child_does_not_hold_it(tmp_path):
    lock = RunLock(tmp_path)
    from_child, to_test = os.pipe()
    from_test, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(to_test, b"x")
        os.read(from_test, 1)
        os._exit(0)
    try:
        os.read(from_child, 1)
        lock.release()
        RunLock(tmp_path).release()
    finally:
        os.write(to_child, b"x")
        os.waitpid(child, 0)
        for descriptor in (from_child, to_test, from_test, to_child):
            os.close(descriptor)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(JournalError, match=r"cannot be written \(No such file"):
        RunLock(tmp_path / "missing")


def test_what_stands_in_the_file_harms_nobody(tmp_path):
    (tmp_path / "journal.lock").write_bytes(b"\xff{]")
    lock = RunLock(tmp_path)
    (tmp_path / "journal.lock").write_bytes(b"[]")
    with pytest.raises(JournalError, match="in use by another process"):
        RunLock(tmp_path)
    lock.release()


def test_a_process_that_began_later_with_the_same_number_does_not_use_it(tmp_path):
    lock = RunLock(tmp_path)
    note = json.loads((tmp_path / "journal.lock").read_bytes())
    assert is_running(tmp_path)
    note["since"] = "2020-01-01 00:00:00+00:00"
    (tmp_path / "journal.lock").write_text(json.dumps(note))
    assert not is_running(tmp_path)
    lock.release()


def test_it_is_for_the_owner_only(tmp_path):
    lock = RunLock(tmp_path)
    assert (tmp_path / "journal.lock").stat().st_mode & 0o777 == 0o600
    lock.release()
