"""Loops that are shown without a terminal: as lines, in a notebook, by bars of others; and which of
them it is, and how often.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from raypool import (
    InvalidTypeError,
    ParallelPool,
    current_task,
    load_checkpoint,
    parpool,
    report,
    save_checkpoint,
    search,
)
from raypool.channel.records import GpuReading
from raypool.core.model import TaskState
from raypool.errors import WorkerLostError
from raypool.views import notebook, progress
from raypool.views.console import SafeConsole
from raypool.views.lines import LogLines, line
from raypool.views.notebook import NotebookView, page
from raypool.views.progress import FactoryBar, LoopWatch
from raypool.views.status import LoopStatus
from raypool.views.terminal import TerminalView
from raypool.views.words import CONTROLS
from tests.unit.fake_loop import FakeLoop


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop([{"network": "cnn", "lr": 0.01 * i} for i in range(13)])


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Give a way to ask for the lines on standard error, since it was asked last."""
    return lambda: capsys.readouterr().err.splitlines()


# --- how long it will take ------------------------------------------------------------------------


def test_the_first_results_of_many_workers_tell_how_long_the_rest_takes(loop: FakeLoop) -> None:
    """By how long each item takes: one of eight that work at once has come back, and not an eighth
    of the work is done.
    """
    for worker in range(8):
        piece = loop.run(worker, worker)
    loop.now += 10
    loop.finish(7, piece, took_s=10.0)
    loop.run(7, 8)
    assert loop.look(10).left_s() == pytest.approx((12 * 10 - 7 * 10) / 8)


def test_later_it_is_told_by_how_fast_they_come_back(loop: FakeLoop) -> None:
    for index in range(4):
        loop.finish(0, loop.run(0, index), took_s=0.001)
    loop.run(0, 4)
    assert loop.look(8).left_s() == pytest.approx(8 / 4 * 9)


def test_what_an_earlier_run_has_left_took_no_time(loop: FakeLoop) -> None:
    loop.work.restored = dict.fromkeys(range(10))  # type: ignore[arg-type]
    loop.work.num_settled = 10
    assert loop.look(5).left_s() is None
    loop.finish(0, loop.run(0, 10))
    assert loop.look(6).left_s() == pytest.approx(6 * 2)
    assert (
        line(loop.status) == "train: 11 of 13 done, 10 restored, 10/min, after 6 s, about 12 s left"
    )


# --- lines ----------------------------------------------------------------------------------------


def lines_at(loop: FakeLoop, view: LogLines, *seconds: float) -> None:
    for now in seconds:
        view.show(loop.look(now))


def test_a_short_loop_has_no_lines(loop: FakeLoop, errors: Callable[[], list[str]]) -> None:
    view = LogLines(is_asked_for=False)
    lines_at(loop, view, 0, 1, 9.9)
    view.end(loop.end())
    assert errors() == []


def test_lines_come_at_growing_intervals_and_at_the_end(
    loop: FakeLoop, errors: Callable[[], list[str]]
) -> None:
    view = LogLines(is_asked_for=False)
    loop.finish(0, loop.run(0, 0), ValueError("bad"))
    lines_at(loop, view, *range(100))
    loop.finish(0, loop.run(0, 1, 13))
    loop.now = 1000 + 100
    view.end(loop.end())
    assert errors() == [
        "raypool: train: 1 of 13 done, 1 failed, 6/min, after 10 s, about 2:00 left",
        "raypool: train: 1 of 13 done, 1 failed, 3/min, after 20 s, about 4:00 left",
        "raypool: train: 1 of 13 done, 1 failed, 1.5/min, after 40 s, about 8:00 left",
        "raypool: train: 1 of 13 done, 1 failed, 45/h, after 1:20, about 16:00 left",
        "raypool: train: 13 of 13 done, 1 failed, 7.8/min, in 1:40",
    ]


def test_a_loop_of_a_day_has_some_hundred_lines(
    loop: FakeLoop, errors: Callable[[], list[str]]
) -> None:
    view = LogLines(is_asked_for=False)
    lines_at(loop, view, *range(0, 24 * 3600, 10))
    assert 100 < len(errors()) < 200


def test_who_asks_for_lines_has_them_at_once(
    loop: FakeLoop, errors: Callable[[], list[str]]
) -> None:
    view = LogLines(is_asked_for=True)
    lines_at(loop, view, 0, 1, 2, 9, 10, 11)
    view.end(loop.end(TaskState.CANCELLED))
    assert errors() == [
        "raypool: train: 0 of 13 done, after 0 s",
        "raypool: train: 0 of 13 done, after 10 s",
        "raypool: train: 0 of 13 done, stopped, in 11 s",
    ]


def test_a_generator_has_no_number_until_it_ends(loop: FakeLoop) -> None:
    loop.total = None
    loop.finish(0, loop.run(0, 0, 5))
    assert line(loop.look(1)) == "train: 5 done, 5/s, after 1 s"
    loop.total = 5
    loop.look(2)
    assert line(loop.end()) == "train: 5 of 5 done, 2.5/s, in 2 s"


def test_a_line_is_written_in_one_piece_and_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Log())
    loop = FakeLoop(label="a\nname\x1b[2J\rof two")
    LogLines(is_asked_for=True).show(loop.look(0))
    assert written == ["raypool: a name?[2J of two: 0 of 13 done, after 0 s\n"]


@pytest.mark.parametrize("stream", ["closed", "full", "ascii"])
def test_a_log_that_takes_no_lines_stops_nothing(
    stream: str, loop: FakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Any = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    if stream == "closed":
        log.close()
    if stream == "full":
        log = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", log)
    loop = FakeLoop(label="漢字")
    LogLines(is_asked_for=True).show(loop.look(0))
    if stream == "full":
        with pytest.raises(OSError, match="No space left"):
            log.close()


# --- a notebook -----------------------------------------------------------------------------------


def words_of(html: str) -> str:
    """The words of a page."""
    return " ".join(re.sub(r"<[^>]*>|&nbsp;", " ", html).split())


def test_a_page_has_all_that_the_terminal_has(loop: FakeLoop) -> None:
    loop.memory = {0: GpuReading(2**31, 2**34)}
    loop.finish(0, loop.run(0, 0), ValueError("bad"))
    loop.run(0, 1, attempt=2)
    loop.report(1, attempt=2, epoch=3, loss=0.41234567)
    loop.finish(1, loop.run(1, 3))
    loop.work.about = ["best loss=<1 (trial 3)", "rungs: 9 at 1"]  # of a search
    status = loop.look(4)
    html = page(status, status.rows(16))
    assert (
        words_of(html)
        == "train 2 of 13 , 1 failed 4 s, about 22 s left best loss=&lt;1 (trial 3) rungs: 9 at 1"
        " worker 0 1 done 2.0 of 16.0 GiB 4 s item 1, attempt 2 epoch=3, loss=0.4123 network=cnn, lr=0.01 worker 1 1 done idle item 0"
        " failed: ValueError: bad"
    )
    assert 'max="13" value="2"' in html


def test_a_page_has_no_markup_of_the_users() -> None:
    loop = FakeLoop(["<script>alert(1)</script>", "</td>&amp;"], label="<b>&train</b>")
    for index in range(2):
        loop.run(index, index)
    loop.report(0, **{"<i>": '"<img src=x>'})
    loop.finish(2, loop.run(2, 0), ValueError("<script>"))
    status = loop.look(1)
    html = page(status, status.rows(16))
    assert "&lt;b&gt;&amp;train" in html
    assert not re.search(r"<(script|img|b|i)\b", html)


def test_many_workers_share_a_line_of_the_page() -> None:
    loop = FakeLoop(range(100))
    for worker in range(40):
        loop.run(worker, worker)
    status = loop.look(1)
    html = page(status, status.rows(sys.maxsize))
    assert html.count("<tr>") == 15
    assert "and 25 more workers, 25 of them busy" in html


class Notebook:
    """The output of cells, as a notebook has it: by display id."""

    def __init__(self) -> None:
        self.outputs: dict[str, Any] = {}
        self.num_messages = 0

    def display(self, content: Any, *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = content
        self.num_messages += 1


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    import IPython.display

    cells = Notebook()
    monkeypatch.setattr(IPython.display, "display", cells.display)
    return cells


def test_each_loop_has_a_place_in_the_notebook_and_its_end_stays_there(
    loop: FakeLoop, cells: Notebook
) -> None:
    first, second = NotebookView(), NotebookView()
    first.show(loop.look(0))
    second.show(loop.look(0))
    loop.finish(0, loop.run(0, 0, 13))
    first.show(loop.look(1))
    first.end(loop.end())
    assert len(cells.outputs) == 2
    ended, other = cells.outputs.values()
    assert ended["text/plain"] == "train: 13 of 13 done, 13/s, in 1 s"
    assert words_of(ended["text/html"]) == "train 13 of 13 1 s", "the rows of the workers are gone"
    assert other["text/plain"] == "train: 0 of 13 done, after 0 s"


def test_what_is_the_same_is_not_sent_again(loop: FakeLoop, cells: Notebook) -> None:
    view = NotebookView()
    for hundredths in range(40):
        view.show(loop.look(hundredths / 100))
    assert cells.num_messages == 1


def test_a_loop_that_never_began_leaves_the_cell_empty(loop: FakeLoop, cells: Notebook) -> None:
    loop.status.end()
    NotebookView().end(loop.status)
    assert cells.outputs == {}


# --- bars of others -------------------------------------------------------------------------------


class Bar:
    """What a user may write: as little as is asked for."""

    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, total: int | None, desc: str) -> None:
        self.total, self.desc, self.steps = total, desc, [0][:0]
        self.postfix: dict[str, int] = {}
        self.is_closed = False
        Bar.made.append(self)

    def update(self, step: int) -> None:
        assert not self.is_closed
        self.steps.append(step)

    def set_postfix(self, **values: int) -> None:
        self.postfix = values

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars() -> list[Bar]:
    Bar.made = []
    return Bar.made


def test_a_bar_is_made_moved_and_closed(loop: FakeLoop, bars: list[Bar]) -> None:
    view = FactoryBar(Bar)
    view.show(loop.look(0))
    (bar,) = bars
    assert (bar.total, bar.desc, bar.steps) == (13, "train", [])
    loop.finish(0, loop.run(0, 0, 4), ValueError())
    view.show(loop.look(1))
    view.show(loop.look(2))
    loop.finish(0, loop.run(0, 4, 13))
    view.end(loop.end())
    assert (bar.steps, bar.postfix, bar.is_closed) == ([4, 9], {"failed": 1}, True)


def test_a_bar_hears_how_many_a_generator_had(loop: FakeLoop, bars: list[Bar]) -> None:
    view = FactoryBar(Bar)
    loop.total = None
    view.show(loop.look(0))
    assert bars[0].total is None
    loop.total = 7
    view.show(loop.look(1))
    assert bars[0].total == 7


def test_a_bar_may_do_no_more_than_move(loop: FakeLoop) -> None:
    class Least:
        moved = 0

        def update(self, step: int) -> None:
            self.moved += step

    least = Least()
    view = FactoryBar(lambda total, desc: least)
    loop.finish(0, loop.run(0, 0), ValueError())
    view.show(loop.look(1))
    view.end(loop.end())
    assert least.moved == 1


def test_tqdm(loop: FakeLoop) -> None:
    stream = io.StringIO()
    view = FactoryBar(functools.partial(tqdm, file=stream, ncols=60, mininterval=0))
    view.show(loop.look(0))
    loop.finish(0, loop.run(0, 0, 13), ValueError())
    view.end(loop.end())
    shown = stream.getvalue().split("\r")[-1]
    assert shown.startswith("train: 100%")
    assert "13/13" in shown
    assert "failed=1" in stream.getvalue()


# --- how often, and what goes wrong ---------------------------------------------------------------


class Slow:
    """A view that takes so much of the processor, and counts."""

    interval_s = 0.25

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_shown = self.num_ends = 0

    def show(self, status: LoopStatus) -> None:
        self.num_shown += 1
        if self.error is not None:
            raise self.error

    def end(self, status: LoopStatus) -> None:
        self.num_ends += 1


def test_it_is_shown_no_more_often_than_eyes_see(
    loop: FakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SPARING", 0)
    now = [0.0]
    view = Slow()
    watch = LoopWatch(view, loop.status, clock=lambda: now[0])
    for hundredths in range(100):
        now[0] = hundredths / 100
        watch.update(loop.work, 13)
    assert view.num_shown == 4
    watch.close()
    assert view.num_ends == 1


def test_a_slow_view_rests(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes 10 ms is shown every two seconds, and one that takes a second every five."""
    now, spent = [0.0], [0.0]
    took_s = 0.01

    class Busy(Slow):
        def show(self, status: LoopStatus) -> None:
            super().show(status)
            spent[0] += took_s

    monkeypatch.setattr(progress.time, "thread_time", lambda: spent[0])
    for took_s, expected in ((0.01, 11), (1.0, 5)):  # noqa: B007 - Busy takes it
        now[0] = 0.0
        view = Busy()
        watch = LoopWatch(view, loop.status, clock=lambda: now[0])
        for tenths in range(200):
            now[0] = tenths / 10
            watch.update(loop.work, 13)
        assert view.num_shown == pytest.approx(expected, abs=1)


def test_a_view_that_fails_goes_and_the_loop_goes_on(
    loop: FakeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    view = Slow(ZeroDivisionError("none"))
    watch = LoopWatch(view, loop.status, clock=functools.partial(next, iter(range(100))))
    with caplog.at_level(logging.WARNING, "raypool"):
        for _ in range(5):
            watch.update(loop.work, 13)
        watch.close()
    assert [record.message for record in caplog.records] == [
        "train is no longer shown: ZeroDivisionError: none. The loop itself continues."
    ]
    assert (view.num_shown, view.num_ends) == (1, 1), "what it has open is closed"


# --- which of them --------------------------------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def threads() -> Any:
    with parpool(2, profile="threads", quiet=True) as pool:
        yield pool


def test_a_second_loop_on_a_terminal_has_lines(
    threads: ParallelPool, monkeypatch: pytest.MonkeyPatch, gate: Any
) -> None:
    """Above the picture of the first."""
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)

    def second() -> None:
        assert list(threads.parfor(abs, [-1], progress=True, name="second")) == [1]

    def first() -> Any:
        yield 1
        second()
        yield 2

    assert list(threads.parfor(abs, first(), name="first")) == [1, 2]
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    assert "raypool: second: 1 of 1 done" in shown
    assert "first" in shown
    assert "2 of 2" in shown
    assert list(threads.parfor(abs, [-3], name="third")) == [3]
    assert "third" in screen.getvalue(), "the terminal is free again"


def test_a_search_shows_its_best_trial_its_rungs_and_why_trials_ended(
    threads: ParallelPool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    eventually: Callable[..., bool],
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(TerminalView, "interval_s", 0.0)
    monkeypatch.setattr(progress, "SPARING", 0)

    def shows(words: str) -> bool:
        return re.search(words, re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())) is not None

    def train(config: dict[str, Any]) -> float:
        first = load_checkpoint() or 0
        for epoch in range(first, 9):
            if epoch == 8:
                assert eventually(lambda: shows("  rungs: [3-9] at 1, [1-9] at 3, 0 at 9 epochs"))
            report(epoch=epoch, score=config["x"] * (epoch + 1))
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break
        return config["x"] * (epoch + 1)

    found = threads.search(
        train,
        {"x": search.uniform(0, 1)},
        metric="score",
        num_trials=9,
        stop=search.halving(max_epochs=9),
        run_dir=tmp_path,
    )
    best = f"best score={found.best.score:.4g} (trial {found.best.number})"
    num_pruned = (found.to_frame()["state"] == "pruned").sum()
    assert shows(f"  {re.escape(best)}, {num_pruned} pruned by halving\n$")


def test_nothing_that_users_have_named_gives_the_terminal_orders() -> None:
    """Only rich's own escape sequences are in the picture."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    loop = FakeLoop([evil, {evil: evil}, evil], label=evil)
    for index in range(2):
        loop.run(0, index)
        loop.report(index, **{evil: evil})
    loop.finish(1, loop.run(1, 2), type(evil, (Exception,), {})(evil))
    loop.work.about = [evil]
    screen = Screen()
    console = SafeConsole(file=screen, force_terminal=True, width=200, height=20)
    view = TerminalView(console)
    view.show(loop.look(1.0))
    console.print(Table(evil), Text(evil))
    view.end(loop.look(2.0))

    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", screen.getvalue())
    assert shown.count("owned") >= 7
    assert not CONTROLS.search(shown)


@pytest.mark.parametrize("terminal", ["dumb", "unknown"])
def test_a_terminal_that_moves_no_cursor_has_lines(
    threads: ParallelPool, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    threads.parfor(abs, [-1], progress=True)
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue().endswith(
        "raypool: abs: 1 of 1 done, " + screen.getvalue().rpartition("done, ")[2]
    )


@pytest.mark.parametrize("max_workers", [0, None])
def test_what_runs_serially_has_lines_so_that_a_debugger_can_ask(
    max_workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with parpool(profile="inline", quiet=True) as pool:
        assert list(pool.parfor(abs, [-1, -2], progress=True, max_workers=max_workers)) == [1, 2]
    assert "\x1b" not in screen.getvalue()
    last = screen.getvalue().splitlines()[-1]
    assert last.startswith("raypool: abs: 2 of 2 done")


def test_what_runs_serially_is_shown_while_it_runs(
    bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.parallel_for.TICK_S", 0.0)
    monkeypatch.setattr(FactoryBar, "interval_s", 0.0)
    monkeypatch.setattr(progress, "SPARING", 0)
    seen = []

    def work(item: int) -> None:
        seen.append(sum(bars[0].steps) if bars else 0)

    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(work, range(4), progress=Bar, chunk_size=1)
    assert seen == sorted(seen)
    assert seen[-1] > 0
    assert bars[0].is_closed


def test_results_do_not_hold_what_showed_the_loop() -> None:
    """Nor is it left for the garbage collector."""
    made: list[weakref.ref[Bar]] = []

    def factory(total: int | None, desc: str) -> Bar:
        bar = Bar(total, desc)
        made.append(weakref.ref(bar))
        Bar.made.clear()
        return bar

    with parpool(profile="inline", quiet=True) as pool:
        gc.disable()
        try:
            results = pool.parfor(abs, [-1, -2], progress=factory)
            assert [bar() for bar in made] == [None]
        finally:
            gc.enable()
    assert list(results) == [1, 2]


def test_no_lines_of_short_loops_by_default(
    threads: ParallelPool, errors: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.views.lines.FIRST_S", 1000.0)
    threads.parfor(abs, range(100))
    assert errors() == []
    threads.parfor(abs, range(100), progress=True)
    assert errors()[-1].startswith("raypool: abs: 100 of 100 done, ")
    threads.parfor(abs, range(100), progress=False)
    assert errors() == []


def test_a_process_without_standard_error(
    threads: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(threads.parfor(abs, [-1], progress=True)) == [1]


class Plain:
    """A stream of a user's that passes on what is written, and can do nothing else."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is kept back."""


def test_a_stream_that_can_do_little(
    threads: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Plain()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(threads.parfor(abs, [-1])) == [1]
    assert list(threads.parfor(abs, [-1], progress=True)) == [1]
    assert stream.text.splitlines()[-1].startswith("raypool: abs: 1 of 1 done")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert list(threads.parfor(abs, [-1], progress=True)) == [1]


def test_a_terminal_without_standard_output(
    threads: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", None)
    assert list(threads.parfor(abs, [-1])) == [1]
    assert "1 of 1" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_in_a_notebook_it_is_a_picture(
    threads: ParallelPool, cells: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    threads.parfor(abs, [-1, -2])
    (output,) = cells.outputs.values()
    assert "2 of 2" in output["text/html"]
    threads.parfor(abs, [-1], progress=False)
    assert len(cells.outputs) == 1


def test_a_test_is_no_notebook() -> None:
    assert not notebook.in_notebook()


@pytest.mark.parametrize(
    ("shell", "is_one"),
    [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)],
)
def test_only_a_kernel_is_a_notebook(
    shell: Any, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert notebook.in_notebook() is is_one


def test_tasks_show_nothing(
    threads: ParallelPool, bars: list[Bar], errors: Callable[[], list[str]]
) -> None:
    def outer(item: int) -> list[int]:
        assert current_task().worker is not None
        return list(threads.parfor(abs, [-item], progress=True)) + list(
            threads.parfor(abs, [-item], progress=Bar)
        )

    assert list(threads.parfor(outer, [1, 2], progress=False)) == [[1, 1], [2, 2]]
    assert bars == []
    assert errors() == []


@pytest.mark.parametrize(
    "factory", [Bar, functools.partial(Bar), lambda total, desc: Bar(total, desc)]
)
def test_bars_of_real_loops(
    threads: ParallelPool, bars: list[Bar], factory: Callable[..., Any]
) -> None:
    threads.parfor(abs, range(50), progress=factory, name="sizes")
    (bar,) = bars
    assert (bar.total, bar.desc, sum(bar.steps), bar.is_closed) == (50, "sizes", 50, True)


def test_the_bar_of_a_loop_that_fails_is_closed(threads: ParallelPool, bars: list[Bar]) -> None:
    def fail(item: int) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        threads.parfor(fail, [0], progress=Bar)
    assert bars[0].is_closed
    assert bars[0].postfix == {"failed": 1}


asked: list[str] = []


def raise_at_once(total: int, desc: str) -> None:
    asked.append(desc)
    raise RuntimeError("no bar today")


@pytest.mark.parametrize("factory", [raise_at_once, print, dict, lambda total, desc: None])
def test_a_factory_that_fails_does_not_end_the_loop(
    threads: ParallelPool, factory: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "raypool"):
        results = threads.parfor(abs, [-1, -2], progress=factory)
    assert list(results) == [1, 2]
    (record,) = caplog.records
    assert record.message.startswith("abs is no longer shown: ")
    assert len(asked) <= 1, "who has refused is not asked again"


def test_a_name_that_is_no_text_is_refused(threads: ParallelPool) -> None:
    ran: list[int] = []
    with pytest.raises(InvalidTypeError, match="name must be a string, not 5"):
        threads.parfor(ran.append, [1], name=5, progress=True)  # type: ignore[arg-type]
    assert ran == []


def test_what_is_no_way_to_show_anything_is_refused(threads: ParallelPool) -> None:
    for given in [1, 0, "tqdm", [], 0.5]:
        ran: list[int] = []
        with pytest.raises(
            InvalidTypeError, match=f"progress must be .*not {re.escape(repr(given))}"
        ):
            threads.parfor(ran.append, [1], progress=given)
        assert ran == []


def test_lost_items_count_as_failed(loop: FakeLoop) -> None:
    loop.work.fail(loop.run(0, 0), WorkerLostError("Worker 0 died."))
    assert line(loop.look(60)).startswith("train: 1 of 13 done, 1 failed, 1/min, after 1:00")
