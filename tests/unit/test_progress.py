"""The picture on a terminal of text: what is on it, in every state of a loop and on terminals of
every size.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from raypool.channel.capture import listening
from raypool.channel.records import Function, GpuReading
from raypool.core.model import TaskState
from raypool.engine.loop import LoopOptions, LoopWork
from raypool.errors import LossReason, WorkerLostError
from raypool.views.lines import line
from raypool.views.progress import watched
from raypool.views.status import LoopStatus, TrainingStatus
from raypool.views.terminal import TerminalView, terminal_view
from raypool.views.words import describe_error, describe_item
from raypool.worker.running import TaskContext, running
from tests.unit.fake_loop import FakeLoop


class Terminal(FakeLoop):
    """A terminal and a loop: `at` shows the loop at a time, `lines` is what stands on the terminal
    then.
    """

    def __init__(self, items: Any = range(13), width: int = 100, height: int = 30) -> None:
        super().__init__(items)
        self.stream = io.StringIO()
        console = Console(
            file=self.stream,
            force_terminal=True,
            color_system=None,
            width=width,
            height=height,
            _environ={},
        )
        self.view = TerminalView(console)

    def at(self, seconds: float) -> list[str]:
        """Show the loop so many seconds after its start."""
        self.view.show(self.look(seconds))
        return self.lines

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.end()
        self.view.end(self.status)

    @property
    def lines(self) -> list[str]:
        """What stands on the terminal, as a terminal would read what was written to it."""
        lines, row = [""], 0
        for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", self.stream.getvalue()):
            if part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part[0] not in "\x1b\r":
                lines[row] += part
        assert row >= 0
        return [line.rstrip() for line in lines if line]

    @property
    def is_cursor_shown(self) -> bool:
        return self.stream.getvalue().rfind("\x1b[?25h") >= self.stream.getvalue().rfind(
            "\x1b[?25l"
        )


@pytest.fixture
def terminal() -> Any:
    terminal = Terminal([{"network": "cnn", "lr": 0.01 * i} for i in range(13)])
    with terminal:
        yield terminal


def text_of(line: str) -> str:
    """The words of a line, without the bar."""
    return " ".join(re.sub("[━╸╺]+", "", line).split())


def test_says_how_far_the_loop_is_and_how_long_it_will_take(terminal: Terminal) -> None:
    assert [text_of(line) for line in terminal.at(0)] == ["train 0 of 13 0 s"]
    for index in range(3):
        terminal.finish(0, terminal.run(0, index), ValueError("bad") if index == 1 else None)
    assert text_of(terminal.at(30)[0]) == "train 3 of 13, 1 failed 30 s, about 1:40 left"
    assert "━━━" in terminal.lines[0]


def test_an_estimate_that_was_overtaken_is_not_shown(terminal: Terminal) -> None:
    """Eleven items were quick, the last two are not."""
    for index in range(11):
        terminal.finish(0, terminal.run(0, index))
    assert text_of(terminal.at(11)[0]) == "train 11 of 13 11 s, about 2 s left"
    assert text_of(terminal.at(60)[0]) == "train 11 of 13 1:00"


def test_shows_what_each_worker_is_at(terminal: Terminal) -> None:
    terminal.finish(0, terminal.run(0, 0))
    terminal.run(0, 2)
    terminal.run(1, 1, attempt=2)
    assert [" ".join(line.split()) for line in terminal.at(2.5)[1:]] == [
        "worker 0 1 done 2.5 s item 2 network=cnn, lr=0.02",
        "worker 1 0 done 2.5 s item 1, attempt 2 network=cnn, lr=0.01",
    ]


def test_shows_what_was_reported_last(terminal: Terminal) -> None:
    first = terminal.run(0, 0)
    terminal.run(1, 1, attempt=2)
    terminal.report(0, epoch=3, loss=0.41234567, phase="train")
    terminal.report(0, loss=1e-7)
    terminal.report(1, attempt=1, loss=9.0)  # of an attempt that was lost
    assert [" ".join(line.split()[6:]) for line in terminal.at(1)[1:]] == [
        "item 0 network=cnn, lr=0 epoch=3, loss=1e-07, phase=train",
        "item 1, attempt 2 network=cnn, lr=0.01",
    ]
    terminal.finish(0, first)
    piece = terminal.run(0, 2, 5)
    terminal.report(2, loss=1.0)
    assert terminal.at(2)[1].endswith("items 2 to 4")
    terminal.finish(0, piece)
    assert terminal.at(3)[1].endswith("idle")


@pytest.mark.parametrize("width", [30, 60, 80])
def test_what_was_reported_has_room_before_what_the_item_is(width: int) -> None:
    terminal = Terminal([{"a long name": "x" * 500}], width=width)
    with terminal:
        terminal.run(0, 0)
        terminal.report(0, loss=0.5)
        line = terminal.at(1)[1]
    assert len(line) <= width
    assert line.endswith("loss=0.5") or width == 30
    assert ("a long" in line) == (width > 30)


def test_whatever_was_reported_fits_on_a_line() -> None:
    terminal = Terminal(range(2))
    with terminal:
        terminal.run(0, 0)
        terminal.report(0, big=10**5000, nan=float("nan"), text="[red]\n\x1b[2J" * 20, flag=True)
        line = terminal.at(1)[1]
    assert len(line) <= 100
    assert "nan=nan" in line


def test_shows_the_memory_of_the_gpus_where_there_is_room(terminal: Terminal) -> None:
    terminal.memory = {0: GpuReading(33_500_000_000, 80 * 2**30), 1: GpuReading(0, None)}
    terminal.run(0, 0)
    terminal.finish(2, terminal.run(2, 2))
    terminal.finish(1, terminal.run(1, 1))
    assert [line.split("  item")[0] for line in terminal.at(1)[1:]] == [
        "  worker 0    0 done  31.2 of 80.0 GiB    1.0 s",
        "  worker 1    1 done           0.0 GiB     idle",
        "  worker 2    1 done                       idle",
    ]
    assert terminal.num_asked == 1
    terminal.at(2)
    assert terminal.num_asked == 1, "the agents are asked every two seconds"
    terminal.at(4)
    assert terminal.num_asked == 2
    terminal.memory = {}
    assert "GiB" in terminal.at(13)[1]
    assert "GiB" not in terminal.at(24)[1], "what nobody says any more is not known"


def test_the_memory_makes_way_on_a_narrow_terminal() -> None:
    terminal = Terminal(width=60)
    terminal.memory = {0: GpuReading(1, 2)}
    with terminal:
        terminal.run(0, 0)
        assert "GiB" not in terminal.at(1)[1]


def test_says_what_has_failed_last_and_why(terminal: Terminal) -> None:
    terminal.finish(0, terminal.run(0, 3), ValueError("no such\n\x1b[31mnetwork"))
    assert terminal.at(1)[-1] == "  item 3 failed: ValueError: no such ?[31mnetwork"
    lost = terminal.run(0, 4)
    terminal.work.fail(lost, WorkerLostError("Worker 0 died.", reason=LossReason.EXIT))
    assert terminal.at(2)[-1] == "  item 4 failed: WorkerLostError: Worker 0 died."


def test_a_worker_without_work_is_idle(terminal: Terminal) -> None:
    terminal.run(0, 0)
    piece = terminal.run(1, 1, 4)
    assert [" ".join(line.split()) for line in terminal.at(1)[2:]] == [
        "worker 1 0 done 1.0 s items 1 to 3"
    ]
    terminal.finish(1, piece)
    assert [" ".join(line.split()) for line in terminal.at(2)[2:]] == ["worker 1 3 done idle"]


def test_what_waits_in_a_worker_behind_another_call_is_not_what_it_is_at(
    terminal: Terminal,
) -> None:
    first = terminal.run(0, 0, 4)
    terminal.run(0, 4, 9)
    assert [" ".join(line.split()) for line in terminal.at(1.5)[1:]] == [
        "worker 0 0 done 1.5 s items 0 to 3"
    ]
    terminal.finish(0, first)
    assert [" ".join(line.split())[:35] for line in terminal.at(2.5)[1:2]] == [
        "worker 0 4 done 1.0 s items 4 to 8"
    ]


def test_a_generator_has_no_end_until_it_is_known(terminal: Terminal) -> None:
    terminal.total = None
    terminal.finish(0, terminal.run(0, 0))
    assert text_of(terminal.at(9)[0]) == "train 1 done 9 s"
    terminal.total = 2
    assert text_of(terminal.at(10)[0]) == "train 1 of 2 10 s, about 10 s left"


def test_an_item_that_is_only_its_number_is_not_named_twice() -> None:
    terminal = Terminal(range(3))
    with terminal:
        terminal.run(0, 2)
        assert terminal.at(0)[1].endswith("item 2")


def test_only_the_first_line_stays() -> None:
    terminal = Terminal()
    with terminal:
        terminal.run(0, 0)
        terminal.run(1, 1)
        assert len(terminal.at(1)) == 3
        assert not terminal.is_cursor_shown
        for index in range(13):
            terminal.finish(0, terminal.run(0, index))
        terminal.work.end(TaskState.FINISHED, None)
        terminal.now += 75
    assert [text_of(line) for line in terminal.lines] == ["train 13 of 13 1:16"]
    assert terminal.stream.getvalue().endswith("\n\x1b[?25h")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_an_exception_leaves_the_terminal_as_it_was(error: BaseException) -> None:
    terminal = Terminal()

    def run_and_fail() -> None:
        with terminal:
            piece = terminal.run(0, 0)
            terminal.at(1)
            terminal.finish(0, piece)
            raise error

    with pytest.raises(type(error)):
        run_and_fail()
    assert [text_of(line) for line in terminal.lines] == ["train 1 of 13, stopped 1 s"], (
        "nothing is left to wait for"
    )
    assert terminal.is_cursor_shown


def test_a_loop_that_never_begins_shows_nothing() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="early"), terminal:
        raise ValueError("early")
    assert terminal.stream.getvalue() == ""


def test_many_workers_share_the_last_line() -> None:
    terminal = Terminal(range(100))
    with terminal:
        for worker in range(40):
            piece = terminal.run(worker, worker)
        terminal.finish(39, piece)
        lines = terminal.at(1)
    assert len(lines) == 1 + 16
    assert lines[15].split()[:2] == ["worker", "14"]
    assert lines[16] == "  and 25 more workers, 24 of them busy"


def test_fits_on_a_low_terminal() -> None:
    for height in [1, 3, 8, 12]:
        terminal = Terminal(range(100), height=height)
        with terminal:
            for worker in range(40):
                terminal.run(worker, worker)
            assert len(terminal.at(1)) <= height
            assert text_of(terminal.lines[0]).startswith("train 0 of 100") or height == 1


@pytest.mark.parametrize(
    ("width", "total"), [(12, 1_000_000), (25, None), (40, 1_000_000), (60, 1_000_000), (80, None)]
)
def test_fits_on_a_narrow_terminal(width: int, total: int | None) -> None:
    terminal = Terminal([{"a long name": "x" * 500, "漢字": "漢字" * 50}] * 20, width=width)
    terminal.total = total
    with terminal:
        terminal.finish(1, terminal.run(1, 1), ValueError())
        terminal.finish(1, terminal.run(1, 2))
        terminal.run(0, 0)
        lines = terminal.at(3600)
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)
    if width >= 60:
        assert "2 of 1,000,000, 1 failed" in lines[0] or total is None


def test_goes_on_when_the_clock_is_set_back(terminal: Terminal) -> None:
    terminal.run(0, 0)
    terminal.at(100)
    assert "0.0 s" in terminal.at(-100)[1]
    assert text_of(terminal.lines[0]) == "train 0 of 13 0 s"


def test_a_terminal_that_goes_away_does_not_stop_the_loop() -> None:
    terminal = Terminal()

    def fail(_: str) -> int:
        raise OSError(5, "Input/output error")

    with terminal:
        terminal.at(1)
        terminal.stream.write = fail  # type: ignore[method-assign]
        terminal.at(2)
        terminal.at(3)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def look_at(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that is written go to this terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)


def test_what_tasks_print_meanwhile_is_theirs_and_the_picture_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    look_at(screen, monkeypatch)
    said: list[str] = []
    token = running.set(
        TaskContext(0, 1, None, 0, None, None, 7, say=lambda note, kind, text: said.append(text))
    )
    work = LoopWork(Function(0, None, "train"), range(3), LoopOptions("train"))
    with listening():
        print("before")
        view = terminal_view()
        assert view is not None
        status = LoopStatus("train")
        status.look(work, 3)
        view.show(status)
        print("meanwhile")
        sys.stderr.write("a warning\n")
        view.end(status)
        print("after")
    running.reset(token)
    assert (sys.stdout, sys.stderr) == (screen, screen)
    assert "".join(said) == "before\nmeanwhile\na warning\nafter\n"
    shown = screen.getvalue()
    assert all(shown.count(text) == 1 for text in ("before", "meanwhile", "a warning", "after"))
    assert "0 of 3" in shown


@pytest.mark.parametrize("is_captured", [False, True])
def test_log_records_appear_above_the_picture(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next picture would erase them: their handler was made before."""
    screen = Screen()
    look_at(screen, monkeypatch)
    logger = logging.Logger("train")
    monkeypatch.setitem(logging.root.manager.loggerDict, "train", logger)
    with listening():
        handler = logging.StreamHandler(sys.stderr if is_captured else screen)
        before = handler.stream
        logger.addHandler(handler)
        view = terminal_view()
        assert view is not None
        loop = FakeLoop()
        view.show(loop.look(0))
        logger.warning("a record")
        assert "of 13" in screen.getvalue().partition("a record")[2]  # drawn again below it
        view.end(loop.end())
        assert handler.stream is before


def test_text_printed_meanwhile_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    look_at(screen, monkeypatch)
    view = terminal_view()
    assert view is not None
    loop = FakeLoop()
    view.show(loop.look(0))
    print("[/INST] a [bold] token :smile:", end="", flush=True)
    view.end(loop.end())
    assert "[/INST] a [bold] token :smile:" in screen.getvalue()


def test_a_training_shows_epochs_metrics_and_speed_also_at_its_end() -> None:
    """It resumed after one of ten epochs of five steps."""
    terminal, now = Terminal(), 1000.0
    status = TrainingStatus("fit", 10, 5, started=now, clock=lambda: now)
    terminal.view.show(status)
    assert text_of(terminal.lines[0]) == "fit 0 of 10 epochs 0 s"
    now += 30
    last = {"epoch": 3, "step": 21, "loss": 0.5, "learning_rate": 0.01, "samples_per_s": 26151.3}
    status.look(last, first_step=9)
    terminal.view.show(status)
    now += 3
    terminal.view.show(status)
    first, *others = terminal.lines
    assert text_of(first) == "fit 4 of 10 epochs, 1 restored 33 s, about 57 s left"
    assert others == ["  loss=0.5, learning_rate=0.01, 26,151 samples/s"]
    assert "4 of 10 epochs done, 1 restored, loss=0.5, " in line(status)
    status.end()
    terminal.view.end(status)
    assert text_of(terminal.lines[0]) == "fit 4 of 10 epochs, 1 restored 33 s"
    assert terminal.lines[1:] == others


def is_free() -> bool:
    """Whether the next loop would have the terminal."""
    view = terminal_view()
    if view is not None:
        view.end(LoopStatus("next"))
    return view is not None


def test_one_loop_at_a_time_has_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at(Screen(), monkeypatch)
    view = terminal_view()
    assert view is not None
    assert not is_free()
    view.end(LoopStatus("train"))
    assert is_free()


def test_a_picture_that_cannot_be_made_does_not_keep_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    look_at(Screen(), monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypool.views.terminal.Live", fail)
        with (
            pytest.raises(MemoryError, match="no room"),
            watched(None, LoopStatus("train"), is_serial=False),
        ):
            raise AssertionError("it has begun")
    assert is_free()


class Faulty(Screen):
    """A terminal that can fail in two ways, each the user's own."""

    fault = ""

    def write(self, text: str) -> int:
        if self.fault == "write":
            raise RuntimeError("no more of that")
        return super().write(text)

    def flush(self) -> None:
        if self.fault == "flush":
            raise RuntimeError("no more of that")


@pytest.mark.parametrize("fault", ["write", "flush"])
def test_a_picture_that_cannot_be_ended_does_not_keep_the_terminal(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Faulty()
    look_at(screen, monkeypatch)
    view = terminal_view()
    assert view is not None
    loop = FakeLoop()
    view.show(loop.look(0))
    screen.fault = fault
    with pytest.raises(RuntimeError, match="no more of that"):
        view.end(loop.end())
    screen.fault = ""
    assert is_free()


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


DESCRIBED = [
    ({"network": "cnn", "lr": 0.001, "shape": (3, 4)}, "network=cnn, lr=0.001, shape=(3, 4)"),
    ({"text": "two\nlines", "colour": "[red]"}, r"text='two\nlines', colour=[red]"),
    ({1: 2}, "{1: 2}"),
    ("[bold]x", "'[bold]x'"),
    (None, "None"),
    (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    ({"n": 10**5000}, "n=a int"),
    (
        {"lr": np.float32(0.1), "n": np.int64(3), "is_deep": np.True_, "w": np.array(0.5)},
        "lr=0.1, n=3, is_deep=True, w=0.5",
    ),
    (np.float32(0.1), "0.1"),
    (
        {"from": np.datetime64("2026-11-22", "ns")},
        "from=np.datetime64('2026-11-22T00:00:00.000000000')",
    ),
]


def test_describes_an_item_in_one_line() -> None:
    for item, text in DESCRIBED:
        assert describe_item(item) == text


def test_describes_whatever_it_is_given() -> None:
    for item in [
        Broken(),
        {"model": Broken()},
        "x" * 10**6,
        b"x" * 10**6,
        {str(i): i for i in range(10**4)},
    ]:
        assert 0 < len(describe_item(item)) <= 200


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("a\nb"), "ValueError: a b"), (KeyError(), "KeyError"), (Unsayable(), "Unsayable")],
)
def test_describes_an_error_in_one_line(error: Exception, text: str) -> None:
    assert describe_error(error) == text
    assert len(describe_error(ValueError("x" * 10**6))) < 300


def test_text_of_the_users_is_no_markup() -> None:
    terminal = Terminal(["[bold]a[/bold]", "[/]"])
    with terminal:
        terminal.run(0, 0)
        terminal.run(1, 1)
        assert [line.split("  ")[-1] for line in terminal.at(1)[1:]] == [
            "'[bold]a[/bold]'",
            "'[/]'",
        ]


def test_items_that_are_not_in_order_are_called_by_their_own_numbers(terminal: Terminal) -> None:
    order = [1, 3, 2, 0, *range(4, 13)]
    terminal.work = LoopWork(
        Function(0, None, "train"), terminal.work.items, LoopOptions("train", order=order)
    )
    terminal.run(0, 1)
    terminal.run(1, 2, 5)
    terminal.report(3, loss=0.5)

    assert [" ".join(line.split()[6:]) for line in terminal.at(1)[1:]] == [
        "item 3 network=cnn, lr=0.03 loss=0.5",
        "items 2, 0 and 1 more",
    ]
