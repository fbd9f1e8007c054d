"""What `parfor` with a `run_dir` promises, on every kind of pool: what somebody was told of is
there, and never runs again.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
import pickle
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import (
    InternalError,
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    ParallelPool,
    SerializationError,
    current_task,
    report,
)
from raypool.journal.reading import load_results

pytestmark = pytest.mark.semantics


class Unlucky(ValueError):
    """An exception of a user's, with a field of its own."""

    def __init__(self, item: int) -> None:
        super().__init__(f"item {item} is unlucky")
        self.item = item

    def __reduce__(self) -> Any:
        return Unlucky, (self.item,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def noted(marks: Any) -> Callable[[Any], Any]:
    """Give a function that notes each call, and fails on 3 as long as there is no file that
    forgives it.
    """
    return functools.partial(note_and_square, marks)


def note_and_square(marks: Any, x: int) -> int:
    marks.add(x)
    if x == 3 and not (marks.folder.parent / "forgiven").exists():
        raise Unlucky(x)
    return x * x


# --- a function that has changed ------------------------------------------------------------------


SCRIPT = """
import functools

LR = 0.1
LAYERS = {"a", "b"}
DATA = list(range(2000))
SEEN, HITS = [], {}


class Net:
    width = 8

    def forward(self, x):
        return x in {"one", "two", 3}


def loss(x, power=1):
    return x**power


def logged(fn):
    @functools.wraps(fn)
    def call(x):
        return fn(x)

    return call


def unused():
    return 1


@logged
def train(x):
    'Train.'
    SEEN.append(x)
    HITS[x] = HITS.get(x, 0) + len(DATA)
    return sum(LR * loss(x) + Net().forward(x) for _ in LAYERS)
"""


def defined(script: str) -> Any:
    variables: dict[str, Any] = {"__name__": "script"}
    exec(script, variables)
    return variables["train"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "LR = 0.1",
            "LR = 0.01",
            "train reads the global LR, which was 0.1 when they were computed and is 0.01 now",
        ),
        ('"b"}', '"c"}', "reads the global LAYERS, which was {"),
        ("width = 8", "width = 9", "reads the global Net.width, which was 8 when"),
        ("return x in", "return x not in", "uses Net, whose code has changed"),
        ("x**power", "x*power", "uses loss, whose code has changed"),
        ("power=1", "power=2", "uses loss, whose code has changed"),
        ("sum(", "max(", "train has different code"),
        ("return 1", "return 2", None),
        ("'Train.'", "'Trains.'", None),
        ("def train", "\n# more\ndef train", None),
        ("range(2000)", "range(2001)", None),
        ("for _ in", "for y in", None),
    ],
)
def test_a_function_that_has_changed_is_pointed_out_once(
    pool: ParallelPool,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    old: str,
    new: str,
    words: str | None,
) -> None:
    """Only results that count matter, whichever call has made them."""
    assert SCRIPT.count(old) == 1
    train, other = defined(SCRIPT), defined(SCRIPT.replace(old, new))
    for items in ([1, 2], [1, 2, 3]):  # the function itself has filled SEEN and HITS by then
        pool.parfor(train, items, run_dir=folder)
    pool.parfor(other, [1], run_dir=folder, rerun="all")
    assert not caplog.records

    pool.parfor(other, (x for x in range(5)), run_dir=folder)

    messages = [record.message for record in caplog.records]
    assert len(messages) == (words is not None)
    assert all(words in message for message in messages if words is not None)


def test_it_is_pointed_out_also_when_the_loop_has_ended(
    pool: ParallelPool,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    pool.parfor(defined(SCRIPT), [1], run_dir=folder)

    def items() -> Iterator[int | None]:
        yield None  # it fails, which ends the loop
        assert eventually(lambda: not pool.busy)
        yield 1

    other = defined(SCRIPT.replace("LR = 0.1", "LR = 0.2"))
    with pytest.raises(TypeError):
        pool.parfor(other, items(), run_dir=folder, on_error="stop")
    assert "train reads the global LR" in caplog.text


class Model:
    def __init__(self, size: int) -> None:
        self.size = size

    def train(self, x: int) -> int:
        return x * self.size


def closed_over(n: int) -> Any:
    def inner(x: int) -> int:
        return x + n

    return inner


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (closed_over(1), closed_over(1), closed_over(2)),
        (Model(1).train, Model(1).train, Model(2).train),
        (
            functools.partial(operator.mul, np.arange(3)),
            functools.partial(operator.mul, np.arange(3)),
            functools.partial(operator.mul, np.arange(4)),
        ),
    ],
    ids=["closure", "method", "partial that is no plain data"],
)
def test_a_function_that_holds_something_else_is_pointed_out(
    pool: ParallelPool,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    one: Any,
    same: Any,
    other: Any,
) -> None:
    for fn in (one, same):
        pool.parfor(fn, [1], run_dir=folder)
    assert not caplog.records
    pool.parfor(other, [1], run_dir=folder)
    assert "holds different values" in caplog.text


def test_other_arguments_of_a_partial_are_taken_only_by_a_call_that_runs_everything(
    pool: ParallelPool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two, three, four = (functools.partial(operator.mul, factor) for factor in (2, 3, 4))
    pool.parfor(two, [1, 2], run_dir=folder)
    assert list(pool.parfor(three, [1], run_dir=folder, rerun="all")) == [3]  # as if interrupted
    with pytest.raises(JournalError, match=r"with 3 from functools.partial; this call passes 4"):
        pool.parfor(four, [1], run_dir=folder)
    assert not caplog.records

    assert list(pool.parfor(three, [1, 2], run_dir=folder)) == [3, 4]
    assert "mul has 3 from functools.partial, and had 2 when they were computed" in caplog.text


DECORATED = """
import functools

def logged(fn):
    @functools.wraps(fn)
    def call(x):
        return fn(x)
    return call

@logged
def train(x):
    return x
"""


def test_a_decorated_function_may_get_a_docstring(
    pool: ParallelPool,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "decorated.py"
    file.write_text(DECORATED)
    module = importlib.import_module("decorated")
    monkeypatch.setitem(sys.modules, "decorated", module)
    pool.parfor(module.train, [1], run_dir=folder)
    file.write_text(DECORATED.replace("    return x\n", '    "What it does."\n    return x\n'))
    pool.parfor(importlib.reload(module).train, [1], run_dir=folder)
    assert not caplog.records


def test_a_function_is_the_same_in_another_process(run_python: Any, folder: Path) -> None:
    call = "from raypool import parpool\nparpool(profile='inline').parfor(train, [1], run_dir=RUN)"
    for seed in ("1", "2"):
        done = run_python(f"{SCRIPT}\nRUN = {str(folder)!r}\n{call}", PYTHONHASHSEED=seed)
        assert "raypool" not in done.stderr
    changed = SCRIPT.replace("LR = 0.1", "LR = 0.2")
    done = run_python(f"{changed}\nRUN = {str(folder)!r}\n{call}")
    assert "which was 0.1 when they were computed and is 0.2 now" in done.stderr


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_what_is_there_does_not_run_again(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    assert list(pool.parfor(noted, [0, 1, 2], run_dir=folder)) == [0, 1, 4]

    results = pool.parfor(noted, [5, 2, 0, 4], run_dir=folder)

    assert list(results) == [25, 4, 0, 16]
    assert marks.all() == ["0", "1", "2", "4", "5"]
    frame = results.to_frame()
    assert list(frame["status"]) == ["finished"] * 4
    assert list(frame["item"]) == [5, 2, 0, 4]
    assert frame["duration_s"].notna().all()
    assert frame["worker"].notna().all()
    assert (frame["attempts"] == 1).all()


def test_a_run_that_is_complete_is_read_and_nothing_runs(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    items = list(range(10, 310))
    first = pool.parfor(noted, items, run_dir=str(folder))

    again = pool.parfor(noted, items, run_dir=str(folder))

    assert again == first
    assert len(marks.all()) == 300


def test_equal_items_are_items_of_their_own(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    pool.parfor(noted, [7, 7], run_dir=folder)

    assert list(pool.parfor(noted, [7, 7, 7, 1], run_dir=folder)) == [49, 49, 49, 1]
    assert marks.count(7) == 3


def test_a_generator_goes_on_where_it_was(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    def broken() -> Iterator[int]:
        yield from range(10, 200)
        raise OSError("the list of experiments has gone")

    with pytest.raises(OSError, match="experiments") as caught:
        pool.parfor(noted, broken(), run_dir=folder)
    num_ran = sum(value is not None for value in caught.value.results)  # type: ignore[attr-defined]
    assert 100 < num_ran <= 190

    results = pool.parfor(noted, (x for x in range(10, 230)), run_dir=folder)

    assert list(results) == [x * x for x in range(10, 230)]
    counts = [marks.count(x) for x in range(10, 230)]
    assert all(count >= 1 for count in counts)
    assert sum(counts) - len(counts) <= 190 - num_ran, "what was in .results has run again"


def test_items_that_had_another_number_are_pointed_out_where_there_is_a_seed(
    make_pool: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_pool(1) as pool:
        pool.parfor(abs, [-1, -2], run_dir=folder, seed=1)
        pool.parfor(abs, [-1, -2, -3], run_dir=folder, seed=1)
        assert "another number" not in caplog.text
        pool.parfor(abs, [-4, -1, -2], run_dir=folder, seed=1)
    assert "2 saved results of abs were computed at other positions in the list" in caplog.text


@pytest.mark.semantics
@pytest.mark.threads
@pytest.mark.quick
def test_what_a_generator_changes_later_is_kept_as_it_was(pool: ParallelPool, folder: Path) -> None:
    def configurations() -> Iterator[dict[str, int]]:
        config = {"x": -1}
        for x in range(6):
            config["x"] = x
            yield config

    assert list(pool.parfor(lambda config: config["x"], configurations(), run_dir=folder)) == list(
        range(6)
    )
    assert list(
        pool.parfor(lambda config: config["x"], [{"x": x} for x in range(6)], run_dir=folder)
    ) == list(range(6))

    other = folder / "other"
    pool.parfor(lambda config: config.pop("x"), ({"x": x} for x in range(6)), run_dir=other)
    assert list(load_results(other).to_frame()["x"]) == list(range(6))


def test_a_list_of_which_nothing_is_known_is_pointed_out(
    pool: ParallelPool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.parfor(abs, [-1, -2], run_dir=folder)
    assert list(pool.parfor(abs, [-1.0, -2.0, -3.0], run_dir=folder)) == [1.0, 2.0, 3.0]

    assert "None of the 3 items of abs is among the 2" in caplog.text
    assert "the type of a value in them" in caplog.text
    caplog.clear()
    pool.parfor(len, [{"lr": 0.1, "width": 8}, {"lr": 0.2, "width": 8}], run_dir=folder / "fields")
    pool.parfor(len, [{"rate": 0.1, "width": "8"}], run_dir=folder / "fields")
    said = "rate is new, lr is missing, width has new values (such as '8'; saved: 8). If this is"
    assert said in caplog.text
    assert len(caplog.records) == 1
    pool.parfor(len, [{"n": 10**5000}], run_dir=folder / "long")
    pool.parfor(len, [{"n": 1}], run_dir=folder / "long")
    assert "n has new values (such as 1; saved: a int)" in caplog.text


@pytest.mark.everywhere
def test_an_outcome_is_in_the_journal_before_anybody_hears_of_it(
    pool: ParallelPool, folder: Path
) -> None:
    """The next item of a generator is drawn when an earlier one counts: by then that one has to be
    on the disk.
    """
    missed: list[str] = []
    most_ahead = 16 * pool.num_workers

    def items() -> Iterator[int]:
        for number in range(100):
            if number % 10 == 9:
                there = load_results(folder)
                num_there = sum(there.to_frame()["status"] == "finished")
                if num_there < number - most_ahead:
                    missed.append(f"{num_there} outcomes when item {number} was drawn")
            yield number

    pool.parfor(operator.neg, items(), run_dir=folder)
    assert not missed


def test_the_items_that_cost_most_go_first_among_those_that_run(
    pool: ParallelPool, folder: Path
) -> None:
    pool.parfor(operator.neg, [1, 5, 3], run_dir=folder)

    results = pool.parfor(
        operator.neg, [1, 2, 3, 4, 5, 6], cost=abs, run_dir=folder, max_workers=1, chunk_size=1
    )

    assert list(results) == [-1, -2, -3, -4, -5, -6]
    starts = results.to_frame()["started_at"]
    assert starts[5] <= starts[3] <= starts[1]


def test_reduce_takes_what_was_there(pool: ParallelPool, folder: Path) -> None:
    pool.parfor(str, [2, 0], run_dir=folder)

    assert pool.parfor(str, range(4), run_dir=folder, reduce=operator.add) == "0123"


@pytest.mark.semantics
@pytest.mark.processes
def test_seeds_are_those_of_a_run_in_one_go(pool: ParallelPool, tmp_path: Path, marks: Any) -> None:
    def draw(marks: Any, item: int) -> float:
        if item == 2 and not marks.all():
            marks.add("failed")
            raise Unlucky(2)
        return random.random() + float(np.random.random())

    function = functools.partial(draw, marks)
    parts = pool.parfor(function, range(5), seed=7, run_dir=tmp_path / "a", on_error="collect")
    assert list(parts.errors) == [2]
    in_two_goes = pool.parfor(function, range(5), seed=7, run_dir=tmp_path / "a")

    assert in_two_goes == pool.parfor(function, range(5), seed=7)


@pytest.mark.everywhere
def test_values_come_back_as_they_were(pool: ParallelPool, folder: Path) -> None:
    values = [
        None,
        "text",
        1.5,
        (1, [2]),
        np.arange(3.0),
        np.float32(1.5),
        {"big": "x" * 20_000},
        np.zeros((300, 300)),
        {1, 2},
    ]
    pool.parfor(values.__getitem__, len(values), run_dir=folder)
    again = pool.parfor(values.__getitem__, len(values), run_dir=folder)

    for value, restored in zip(values, again, strict=True):
        assert type(restored) is type(value)
        assert (
            np.array_equal(restored, value) if isinstance(value, np.ndarray) else restored == value
        )


def test_tensors_come_back_that_torch_cannot_unpickle(pool: ParallelPool, folder: Path) -> None:
    import torch

    class Holder:
        """It has a second pickle, for processes without the script."""

        def __init__(self, value: Any) -> None:
            self.value = value

    weight = torch.ones(3).to(torch.float8_e4m3fn)
    column = torch.arange(4).reshape(2, 2).to(torch.uint16)[:, 0]
    values = [column, {"w": weight}, Holder(weight)]
    pool.parfor(values.__getitem__, 3, run_dir=folder)
    counts, weights, held = load_results(folder)
    assert torch.equal(counts, values[0])
    assert torch.equal(weights["w"], weight)
    assert torch.equal(held.value, weight)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_what_has_failed_runs_again(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    first = pool.parfor(noted, range(5), run_dir=folder, on_error="collect")
    assert list(first.errors) == [3]
    (marks.folder.parent / "forgiven").touch()

    results = pool.parfor(noted, range(5), run_dir=folder)

    assert list(results) == [0, 1, 4, 9, 16]
    assert [marks.count(x) for x in range(5)] == [1, 1, 1, 2, 1]


class Hostile(Exception):
    """Has attributes that raise, and takes none."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(name)


def test_an_exception_whose_attributes_raise_is_that_of_its_item(
    pool: ParallelPool, folder: Path
) -> None:
    def fail(item: int) -> int:
        if item == 1:
            raise Hostile("no")
        return item

    results = pool.parfor(fail, range(3), run_dir=folder, on_error="collect")
    assert list(results) == [0, None, 2]
    assert type(results.errors[1]) is Hostile
    assert list(load_results(folder).to_frame()["status"]) == ["finished", "failed", "finished"]
    with pytest.raises(Hostile):
        pool.parfor(fail, range(3), run_dir=folder)


@pytest.mark.threads
@pytest.mark.quick
def test_a_loop_whose_journal_breaks_is_cancelled(
    pool: ParallelPool,
    folder: Path,
    gate: Any,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., bool],
) -> None:
    """Should raypool have such a bug, no worker computes for nobody."""
    monkeypatch.setattr("raypool.journal.journal.to_row", None)
    with pytest.raises(InternalError, match="The journal's writer has failed"):
        pool.parfor(lambda item: item and gate.wait(), range(9), run_dir=folder, chunk_size=1)
    assert eventually(lambda: not pool.busy)


def test_a_folder_that_is_moved_while_its_loop_runs_can_be_put_back(
    pool: ParallelPool, folder: Path, marks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other folder, without a journal, is left in its place."""
    monkeypatch.setattr("raypool.engine.durable.PATIENCE_S", 0.0)
    elsewhere = folder.with_name("moved")

    def work(item: int) -> int:
        marks.add(item)
        if item == 0 and marks.count(0) == 1:
            folder.rename(elsewhere)
        report(item=item)
        return item

    with pytest.raises(JournalError, match="Put the folder back where it was, then repeat"):
        pool.parfor(work, 3, run_dir=folder)
    assert not folder.exists()
    elsewhere.rename(folder)
    assert list(pool.parfor(work, 3, run_dir=folder)) == [0, 1, 2]


def test_only_what_is_missing_runs(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    pool.parfor(noted, [1, 3], run_dir=folder, on_error="collect")

    results = pool.parfor(noted, [1, 2, 3], run_dir=folder, on_error="collect", rerun="missing")

    assert list(results) == [1, 4, None]
    assert marks.count(3) == 1
    error = results.errors[2]
    assert type(error).__name__ == "Unlucky"
    assert error.item == 3
    assert "unlucky" in str(error)
    assert any("item 1 of" in note for note in error.__notes__), "the number that it had then"
    assert list(results.to_frame()["status"]) == ["finished", "finished", "failed"]

    with pytest.raises(ValueError, match="unlucky") as caught:
        pool.parfor(noted, [1, 2, 3], run_dir=folder, rerun="missing")
    assert list(caught.value.results) == [1, 4, None]  # type: ignore[attr-defined]


def test_all_of_it_runs_again_if_that_is_wanted(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    pool.parfor(noted, [1, 2], run_dir=folder)
    pool.parfor(noted, [1, 2], run_dir=folder, rerun="all")

    assert (marks.count(1), marks.count(2)) == (2, 2)


@pytest.mark.semantics
@pytest.mark.parametrize("is_durable", [True, False])
def test_a_failure_does_not_stop_the_others(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path, is_durable: bool
) -> None:
    """The first one is raised when all have run; with `run_dir` that is the default."""
    options: dict[str, Any] = {"run_dir": folder} if is_durable else {"on_error": "raise"}
    with pytest.raises(ValueError, match="unlucky") as caught:
        pool.parfor(noted, range(40), chunk_size=1, **options)

    assert caught.value.__notes__[-1] == "raypool: 1 of 40 items failed; .results has the others."
    assert list(caught.value.results) == [None if x == 3 else x * x for x in range(40)]  # type: ignore[attr-defined]
    assert [marks.count(x) for x in range(40)] == [1] * 40


def test_the_first_failure_ends_the_loop_and_leaves_what_was_done(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, folder: Path
) -> None:
    with pytest.raises(ValueError, match="unlucky") as caught:
        pool.parfor(noted, range(40), run_dir=folder, chunk_size=1, on_error="stop")
    assert None in caught.value.results  # type: ignore[attr-defined]
    done = {i for i, value in enumerate(caught.value.results) if value is not None}  # type: ignore[attr-defined]
    (marks.folder.parent / "forgiven").touch()

    assert list(pool.parfor(noted, range(40), run_dir=folder)) == [x * x for x in range(40)]
    assert all(marks.count(x) == 1 for x in done)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_value_that_cannot_be_kept_is_a_failure_of_its_item(
    pool: ParallelPool, folder: Path
) -> None:
    def lock_or_not(item: int) -> Any:
        return threading.Lock() if item == 1 else item

    results = pool.parfor(lock_or_not, range(3), run_dir=folder, on_error="collect")

    assert list(results) == [0, None, 2]
    assert isinstance(results.errors[1], SerializationError)
    assert list(results.to_frame()["status"]) == ["finished", "failed", "finished"]


@pytest.mark.semantics
@pytest.mark.processes
def test_lost_and_retried_attempts_are_in_the_journal(
    pool: ParallelPool, folder: Path, marks: Any
) -> None:
    def fail_once(marks: Any, item: int) -> int:
        marks.add(item)
        if marks.count(item) == 1:
            raise ConnectionError("the data are somewhere else")
        return current_task().attempt

    view = pool.options(retry_on=ConnectionError, retries=2)
    assert list(view.parfor(functools.partial(fail_once, marks), [8], run_dir=folder)) == [2]

    frame = load_results(folder).to_frame()
    assert list(frame["attempts"]) == [2]
    assert rows_of(folder) == [(1, "retried"), (2, "finished")]


def rows_of(folder: Path) -> list[tuple[int, str]]:
    import contextlib
    import sqlite3

    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as connection:
        return connection.execute("SELECT attempt, status FROM attempts ORDER BY n").fetchall()


@dataclass
class Net:
    lr: float
    width: InitVar[int] = 1

    def __post_init__(self, width: int) -> None:
        self.layers = [width] * 2


def test_items_that_differ_in_what_is_no_field_keep_their_results(
    pool: ParallelPool, folder: Path
) -> None:
    def work(net: Net) -> int:
        return sum(net.layers)

    for widths in ([1, 2], [2, 1], [9]):
        nets = [Net(0.1, width) for width in widths]
        assert list(pool.parfor(work, nets, run_dir=folder)) == [2 * width for width in widths]


def test_what_cannot_be_had_back_runs_again(
    pool: ParallelPool, folder: Path, marks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def large(marks: Any, item: int) -> str:
        marks.add(item)
        return str(item) * 50_000

    function = functools.partial(large, marks)
    pool.parfor(function, [1, 2], run_dir=folder)
    for path in folder.glob("items/*/value-*"):
        if b"2" in path.read_bytes():
            path.write_bytes(b"something else")

    assert list(pool.parfor(function, [1, 2], run_dir=folder)) == ["1" * 50_000, "2" * 50_000]
    assert (marks.count(1), marks.count(2)) == (1, 2)
    assert "runs again" in caplog.text


# --- what items say -------------------------------------------------------------------------------


def say(item: int) -> int:
    print(f"item {item}")
    for epoch in range(2):
        report(epoch=epoch, loss=item / (epoch + 1), phase="train")
    print("done")
    return item


@pytest.mark.everywhere
def test_what_items_report_is_there_again(pool: ParallelPool, folder: Path) -> None:
    first = pool.parfor(say, [4, 2], run_dir=folder)
    columns = ["item", "attempt", "epoch", "loss", "phase"]
    assert first.metrics[columns].to_dict("list") == {
        "item": [0, 0, 1, 1],
        "attempt": [1] * 4,
        "epoch": [0, 1, 0, 1],
        "loss": [4.0, 2.0, 2.0, 1.0],
        "phase": ["train"] * 4,
    }

    results = pool.parfor(say, [2, 6, 4], run_dir=folder)

    for metrics in (results.metrics, pickle.loads(pickle.dumps(results)).metrics):
        assert list(metrics["item"]) == [0, 0, 1, 1, 2, 2]
        assert list(metrics["loss"]) == [2.0, 1.0, 6.0, 3.0, 4.0, 2.0]
        assert str(metrics["time"].dtype) == "datetime64[ns, UTC]"
    assert list(pickle.loads(pickle.dumps(results))) == [2, 6, 4]


def test_what_items_print_is_there_again(pool: ParallelPool, folder: Path) -> None:
    """In a later call, and where the folder is only read."""
    assert list(pool.parfor(say, [4, 2], run_dir=folder).diary) == [
        "item 4\ndone\n",
        "item 2\ndone\n",
    ]
    assert list(pool.parfor(say, [2, 6], run_dir=folder).diary) == [
        "item 2\ndone\n",
        "item 6\ndone\n",
    ]
    assert list(load_results(folder).diary) == [
        "item 2\ndone\n",
        "item 6\ndone\n",
        "item 4\ndone\n",
    ]


@pytest.mark.semantics
@pytest.mark.processes
def test_each_item_has_its_own_files_for_its_owner_only(pool: ParallelPool, folder: Path) -> None:
    pool.parfor(say, range(20), run_dir=folder)

    diaries = sorted(path.read_text() for path in folder.glob("items/*/diary.txt"))
    assert diaries == sorted(f"item {item}\ndone\n" for item in range(20))
    for path in folder.glob("items/*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["run"], line["attempt"], line["metrics"]["epoch"]) for line in lines] == [
            (1, 1, 0),
            (1, 1, 1),
        ]
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.concurrent
def test_what_an_item_says_is_in_its_files_while_it_runs(
    pool: ParallelPool, folder: Path, gate: Any, eventually: Callable[..., bool]
) -> None:
    def train(gate: Any, item: int) -> int:
        print("begun")
        report(step=1)
        gate.wait()
        return item

    runs = threading.Thread(
        target=pool.parfor, args=(functools.partial(train, gate), [1]), kwargs={"run_dir": folder}
    )
    runs.start()
    try:
        assert eventually(
            lambda: [path.read_text() for path in folder.glob("items/*/diary.txt")] == ["begun\n"]
        )
        assert eventually(lambda: len(list(folder.glob("items/*/metrics.jsonl"))) == 1)
    finally:
        gate.open()
        runs.join()


def test_nothing_is_kept_of_an_item_that_has_nothing_to_keep(
    pool: ParallelPool, folder: Path
) -> None:
    pool.parfor(operator.neg, range(100), run_dir=folder)

    assert not (folder / "items").exists()


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.arguments
def test_a_folder_is_of_one_function_and_one_seed(pool: ParallelPool, folder: Path) -> None:
    pool.parfor(say, [1], run_dir=folder, seed=1)

    with pytest.raises(JournalError, match=r"say.*operator|operator.*say") as caught:
        pool.parfor(operator.neg, [1], run_dir=folder, seed=1)
    assert caught.value.run_dir == str(folder)
    with pytest.raises(JournalError, match="seed"):
        pool.parfor(say, [1], run_dir=folder, seed=2)
    assert list(pool.parfor(say, [1], run_dir=folder, seed=1)) == [1]


@pytest.mark.threads
def test_a_folder_is_of_one_loop_at_a_time(
    pool: ParallelPool, folder: Path, gate: Any, eventually: Callable[..., bool]
) -> None:
    def wait(gate: Any, item: int) -> int:
        gate.wait()
        return item

    function = functools.partial(wait, gate)
    first = threading.Thread(target=pool.parfor, args=(function, [1]), kwargs={"run_dir": folder})
    first.start()
    try:
        assert eventually(lambda: (folder / "journal.lock").exists() and pool.busy)
        with pytest.raises(JournalError, match="in use by another call in this process"):
            pool.parfor(function, [1], run_dir=folder)
    finally:
        gate.open()
        first.join()
    assert list(pool.parfor(function, [1, 2], run_dir=folder)) == [1, 2]


@pytest.mark.arguments
def test_ctrl_c_while_a_folder_is_opened_leaves_it_free(
    pool: ParallelPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("raypool.engine.durable.Recorder", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.parfor(abs, range(3), run_dir=folder)
    assert list(pool.parfor(abs, range(3), run_dir=folder)) == [0, 1, 2], caught  # has references


@pytest.mark.arguments
def test_a_folder_that_cannot_be_used_is_an_error_before_anything_runs(
    pool: ParallelPool, noted: Callable[..., Any], marks: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidValueError, match="is a file"):
        pool.parfor(noted, range(3), run_dir=tmp_path / "file")
    for folder in (tmp_path / "file" / "below", tmp_path / ("long" * 99)):
        with pytest.raises(JournalError, match="cannot be written"):
            pool.parfor(noted, range(3), run_dir=folder)
    assert marks.all() == []


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"run_dir": 7}, InvalidTypeError, "run_dir=7"),
        ({"run_dir": ""}, InvalidValueError, "is empty"),
        ({"run_dir": "s3://bucket/run"}, InvalidValueError, "is a URL.*checkpoints"),
        ({"run_dir": "a\0b"}, InvalidValueError, "has a NUL"),
        ({"run_dir": "a\ud800b"}, InvalidValueError, "cannot be the name of a folder"),
        (
            {"run_dir": "unused", "rerun": "some"},
            InvalidValueError,
            "rerun must be 'failed', 'missing' or 'all', not 'some'",
        ),
        ({"rerun": "all"}, InvalidValueError, "rerun='all' needs run_dir"),
    ],
)
def test_arguments_that_cannot_work(
    pool: ParallelPool, arguments: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        pool.parfor(abs, [1], **arguments)


@pytest.mark.arguments
def test_an_item_that_cannot_be_told_from_others_is_named(pool: ParallelPool, folder: Path) -> None:
    with pytest.raises(InvalidTypeError, match="item 1 of"):
        pool.parfor(len, [[], [threading.Lock()]], run_dir=folder)
    assert list(pool.parfor(len, [[], [1]], run_dir=folder)) == [0, 1], "the folder is free again"


@pytest.mark.semantics
@pytest.mark.processes
def test_inside_a_task_and_in_this_process_it_is_the_same(
    pool: ParallelPool, folder: Path, noted: Any, marks: Any
) -> None:
    def sweep(pool: ParallelPool, function: Any, folder: Path) -> list[int]:
        return list(pool.parfor(function, [1, 2], run_dir=folder))

    assert pool.parfeval(sweep, pool, noted, folder).result() == [1, 4]
    assert list(pool.parfor(noted, [1, 2, 4], run_dir=folder, max_workers=0)) == [1, 4, 16]
    assert marks.all() == ["1", "2", "4"]


@pytest.mark.semantics
@pytest.mark.processes
def test_what_an_item_has_kept_is_there_for_its_next_attempt(
    pool: ParallelPool, folder: Path
) -> None:
    def go_on(item: int) -> str:
        state = current_task().checkpoint_dir / "state"
        if not state.exists():
            state.write_text("half")
            raise Unlucky(item)
        return state.read_text()

    pool.parfor(go_on, [1, 2], run_dir=folder, on_error="collect")

    assert list(pool.parfor(go_on, [0, 2, 1], run_dir=folder, on_error="collect")) == [
        None,
        "half",
        "half",
    ]
