"""What tasks print passes on as ever, and is noted for the task that has printed it, and for no
other.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool.channel import capture
from raypool.channel.capture import CapturedStream, add_last_lines, listening, note_last_lines
from raypool.worker.running import TaskContext, running, this_process


class Listener:
    """Hears what one task says."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.note = TaskContext(0, 1, None, 0, None, None, 7, say=self.hear)

    def hear(self, note: TaskContext, kind: str, text: str) -> None:
        assert note is self.note
        assert kind == "text"
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @contextlib.contextmanager
    def in_task(self) -> Iterator[None]:
        token = running.set(self.note)
        try:
            yield
        finally:
            running.reset(token)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_what_a_task_prints_is_heard_and_passes_on(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening():
        print("before")
        with listener.in_task():
            print("in", "it", 1, sep="-")
            sys.stderr.write("a warning\n")
            sys.stdout.writelines(["two ", "pieces\n"])
        print("after")
    assert listener.text == "in-it-1\na warning\ntwo pieces\n"
    assert capsys.readouterr() == ("before\nin-it-1\ntwo pieces\nafter\n", "a warning\n")


def test_the_streams_are_as_they_were_when_nothing_runs() -> None:
    before = sys.stdout, sys.stderr
    with listening():
        with listening():
            assert isinstance(sys.stdout, CapturedStream)
            assert sys.stdout.original is before[0]
        assert isinstance(sys.stderr, CapturedStream)
    assert (sys.stdout, sys.stderr) == before


def test_a_stream_is_what_it_was_in_all_else() -> None:
    before = sys.stdout
    with listening():
        assert sys.stdout.encoding == before.encoding
        assert sys.stdout.isatty() == before.isatty()
        assert sys.stdout.write("abc") == 3
        with pytest.raises(TypeError):
            sys.stdout.write(b"abc")  # type: ignore[arg-type]
        sys.stdout.flush()


def test_a_stream_that_travels_is_the_one_of_that_name_there() -> None:
    before = sys.stderr
    with listening():
        packed = pickle.dumps([sys.stdout, sys.stderr])
        assert pickle.loads(packed) == [sys.stdout, sys.stderr]
        assert copy.copy(sys.stderr) is sys.stderr
    assert pickle.loads(packed)[1] is before


def test_threads_are_told_apart(listener: Listener) -> None:
    others = [Listener() for _ in range(4)]

    def work(one: Listener, number: int) -> None:
        with listening(), one.in_task():
            for _ in range(500):
                print(number)

    threads = [
        threading.Thread(target=work, args=(one, number)) for number, one in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.text for one in others] == [f"{number}\n" * 500 for number in range(4)]
    assert listener.text == ""
    assert not isinstance(sys.stdout, CapturedStream)


def test_in_a_worker_process_all_threads_belong_to_the_task(listener: Listener) -> None:
    inner = Listener()
    inner.note.outer = listener.note
    this_process.running = listener.note
    try:
        with listening():
            thread = threading.Thread(target=print, args=("from a thread",))
            thread.start()
            thread.join()
            with inner.in_task():
                print("from a loop in the task")
    finally:
        this_process.running = None
    assert listener.text == "from a thread\nfrom a loop in the task\n"
    assert inner.text == "from a loop in the task\n"


def test_somebody_elses_streams_are_left_alone(listener: Listener) -> None:
    theirs = io.StringIO()
    with listening(), listener.in_task(), contextlib.redirect_stdout(theirs):
        print("theirs")
    assert (theirs.getvalue(), listener.text) == ("theirs\n", "")
    with contextlib.redirect_stdout(theirs), listening(), listener.in_task():
        print("both")
    assert (theirs.getvalue(), listener.text) == ("theirs\nboth\n", "both\n")
    with contextlib.ExitStack() as stack:
        with listening():
            stack.enter_context(contextlib.redirect_stdout(theirs))
        assert sys.stdout is theirs


def test_listens_again_on_top_of_what_has_taken_its_place(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.put_on_top()
    assert not isinstance(sys.stdout, CapturedStream)
    with listening():
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        capture.put_on_top()
        with listener.in_task():
            print("here")
    assert listener.text == "here\n"


def test_a_process_without_streams_is_no_problem(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with listening(), listener.in_task():
        print("nowhere")
    assert sys.stdout is None


class Failing(io.StringIO):
    """A stream into a file that cannot be written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))

    def write(self, text: str) -> int:
        raise self._error


def test_a_stream_is_a_context_that_stays_open(listener: Listener) -> None:
    stream = CapturedStream("stdout", io.StringIO())
    for text in ("one", "two"):
        with listener.in_task(), stream as out:
            print(text, file=out)
    assert listener.text == "one\ntwo\n"


def test_what_is_printed_after_a_stream_was_closed_beneath_is_heard_and_no_error(
    listener: Listener,
) -> None:
    """Its file or its descriptor: another task has done that. A disk that is full is an error, as
    ever.
    """
    closed, detached = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    closed.close()
    buffer = detached.detach()
    for original in (closed, detached, Failing(errno.EBADF)):
        with listener.in_task():
            print("heard", file=CapturedStream("stdout", original), flush=True)
    assert listener.text == "heard\n" * 3
    with listener.in_task(), pytest.raises(OSError, match="No space"):
        print("lost", file=CapturedStream("stdout", Failing(errno.ENOSPC)))
    assert buffer is not None


def test_what_is_logged_is_heard(listener: Listener) -> None:
    with listening(), listener.in_task():
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "epoch 3"}))
    assert listener.text == "epoch 3\n"


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_an_error_carries_the_last_lines_of_its_own_item(listener: Listener) -> None:
    error = ValueError("bad")
    with listening(), listener.in_task():
        print("item 0")
        listener.note.index = 1
        for number in range(100):
            print("line", number)
    note_last_lines(error, listener.note)
    assert notes(error) == [
        "\n  ".join(["raypool: its last output:", *(f"line {number}" for number in range(90, 100))])
    ]


def test_the_last_lines_are_read_while_a_thread_of_the_task_prints(listener: Listener) -> None:
    class Printing(int):
        """The number of an item: looking for its lines lets the thread print another."""

        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            print("meanwhile")
            return int(self) == other

    error = ValueError("bad")
    with listening(), listener.in_task():
        print("before")
        listener.note.index = Printing()
        note_last_lines(error, listener.note)
    assert notes(error) == ["raypool: its last output:\n  before"]


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_error_after_nothing_has_no_note(listener: Listener, text: str) -> None:
    error = ValueError("bad")
    note_last_lines(error, listener.note)
    with listening(), listener.in_task():
        sys.stdout.write(text)
    note_last_lines(error, listener.note)
    assert notes(error) == []


def test_lines_are_cut_and_progress_bars_show_their_last_state() -> None:
    error = ValueError("bad")
    add_last_lines(
        error, "x" * 10**6 + "\n" + "\r".join(f"{percent} %" for percent in range(101)) + "\n"
    )
    (note,) = notes(error)
    assert note.splitlines()[-1] == "  100 %"
    assert len(note) < 1000


def test_an_error_that_takes_no_notes_stays_as_it_is() -> None:
    class Refuses(Exception):
        def add_note(self, note: str) -> None:
            raise RuntimeError("no")

    add_last_lines(Refuses(), "text")


def test_memory_for_the_last_lines_is_bounded(listener: Listener) -> None:
    with listening(), listener.in_task():
        for _ in range(3000):
            sys.stdout.write("x" * 10_000)
    assert listener.note.printed is not None
    assert (
        sum(len(text) for _, text in listener.note.printed)
        <= capture.KEPT_WRITES * capture.KEPT_TEXT
    )


def test_a_stream_can_be_taken_away_from_under_a_print(run_python: Callable[..., Any]) -> None:
    """What one thread prints while the last task ends in another: `print` itself holds no reference
    to the stream.
    """
    run_python("""
        import gc, sys
        from raypool.channel import capture
        class Stream:
            def write(self, text):
                if text != "\\n":
                    capture.remove()
                    gc.collect()
                    self.others = [bytearray(size) for size in range(1, 1000) for _ in range(10)]
        for _ in range(20):
            sys.stdout = Stream()
            capture.install()
            print("text")
        sys.stdout = sys.__stdout__
    """)
