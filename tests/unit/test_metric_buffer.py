"""Metrics wait where they are; what is reported in the end is the same as if each had been asked
for at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypool import MetricBuffer, parpool, report
from raypool.core.messages import Signal
from raypool.errors import InvalidTypeError, InvalidValueError, TaskCancelled
from raypool.worker.interrupts import Interrupts
from raypool.worker.runner import RawResult
from raypool.worker.running import TaskContext, running


@pytest.fixture
def said() -> Iterator[list[Any]]:
    """Give what the task that this test plays has reported: (time, metrics) each."""
    heard: list[Any] = []
    token = running.set(
        TaskContext(
            0, 1, None, 0, None, None, say=lambda note, kind, payload: heard.append(payload)
        )
    )
    yield heard
    running.reset(token)


def fail(buffer: MetricBuffer, loss: torch.Tensor) -> None:
    """Be a training that fails after a step."""
    with buffer:
        buffer.add(loss=loss)
        raise ZeroDivisionError


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"), st.tuples(st.sampled_from(DTYPES), st.integers(0, 255))
        ),
        max_size=20,
    )
)
def test_the_same_numbers_as_item(steps: list[dict[str, tuple[torch.dtype, int]]]) -> None:
    """Whatever dtypes come together, of whatever steps: neither is converted into the other."""
    buffer, expected = MetricBuffer(size=100), []
    for step in steps:
        metrics = {
            name: (
                torch.tensor(value, dtype=dtype) / 3
                if dtype.is_floating_point
                else torch.tensor(value, dtype=dtype)
            )
            for name, (dtype, value) in step.items()
        }
        expected.append({name: value.item() for name, value in metrics.items()})
        buffer.add(**metrics)
    rows = buffer.flush()
    assert rows == expected
    assert [list(map(type, row.values())) for row in rows] == [
        list(map(type, row.values())) for row in expected
    ]
    assert [list(row) for row in rows] == [list(row) for row in expected]


def test_a_training_reports_the_same_as_with_item(said: list[Any]) -> None:
    """Scenario 48: the same training, with `.item()` in each step and with a buffer."""

    def train(metrics: MetricBuffer | None) -> None:
        torch.manual_seed(0)
        model, x, y = torch.nn.Linear(8, 1), torch.randn(64, 8), torch.randn(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(25):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if metrics is None:
                report(step=step, loss=loss.item(), kind="train")
            else:
                metrics.add(step=step, loss=loss, kind="train")

    train(None)
    one_by_one = [metrics for _, metrics in said]
    said.clear()
    with MetricBuffer(size=10) as metrics:
        train(metrics)
    assert [metrics for _, metrics in said] == one_by_one
    assert len(one_by_one) == 25
    assert [list(metrics) for _, metrics in said] == [["step", "loss", "kind"]] * 25, (
        "in the order in which they were given"
    )


def test_nothing_is_brought_before_it_is_full(said: list[Any]) -> None:
    buffer = MetricBuffer(size=3)
    for step in range(2):
        buffer.add(loss=torch.tensor(float(step)))
    assert not said
    assert len(buffer) == 2
    buffer.add(loss=torch.tensor(2.0))
    assert [metrics["loss"] for _, metrics in said] == [0, 1, 2]
    assert len(buffer) == 0
    assert buffer.flush() == []


def test_steps_have_the_time_at_which_they_were_added(said: list[Any]) -> None:
    report(loss=0.0)
    buffer = MetricBuffer()
    buffer.add(loss=torch.tensor(1.0))
    report(loss=2.0)
    buffer.flush()
    moments = {metrics["loss"]: moment for moment, metrics in said}
    assert moments[0] <= moments[1] <= moments[2]


def test_a_value_is_what_it_was_when_it_was_added() -> None:
    total = torch.zeros(())
    buffer = MetricBuffer()
    for _ in range(3):
        total += 1
        buffer.add(total=total)
    assert [row["total"] for row in buffer.flush()] == [1, 2, 3]


def test_no_graph_is_kept_and_one_element_is_enough() -> None:
    weights = torch.ones(3, requires_grad=True)
    buffer = MetricBuffer()
    buffer.add(loss=weights.sum(), first=weights[:1], nothing=torch.tensor([[math.nan]]))
    (row,) = buffer.flush()
    assert (row["loss"], row["first"]) == (3, 1)
    assert math.isnan(float(row["nothing"]))


def test_after_an_error_the_last_steps_are_reported(said: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(MetricBuffer(), torch.tensor(7.0))
    assert [metrics for _, metrics in said] == [{"loss": 7.0}]


def add_all(*steps: dict[str, Any]) -> None:
    """Be a training of these steps."""
    with MetricBuffer() as buffer:
        for step in steps:
            buffer.add(**step)


def test_a_cancellation_as_a_step_is_added_loses_none_before(said: list[Any]) -> None:
    class Late(torch.Tensor):
        def clone(self) -> Any:  # type: ignore[override]
            raise TaskCancelled

    late = torch.zeros(()).as_subclass(Late)
    with pytest.raises(TaskCancelled):
        add_all({"loss": torch.tensor(0.0)}, {"loss": torch.tensor(1.0), "late": late})
    assert [metrics for _, metrics in said] == [{"loss": 0.0}, {"loss": 1.0, "late": None}]


def test_a_cancellation_as_they_are_reported_loses_none(said: list[Any]) -> None:
    def hear(note: TaskContext, kind: str, payload: Any) -> None:
        said.append(payload)
        if guard.take(Signal.CANCEL, 7, 0):
            raise TaskCancelled

    note, guard = running.get(), Interrupts()
    assert note is not None
    note.say, note.interrupts = hear, guard
    guard.begin_call(7)
    guard.approach(0)
    guard.begin(note, RawResult(0))
    with pytest.raises(TaskCancelled):
        add_all({"step": 0}, {"step": 1}, {"step": 2})
    assert [metrics["step"] for _, metrics in said] == [0, 1, 2]


def test_a_device_that_fails_hides_no_error() -> None:
    """A meta tensor has no value, as one of a GPU that has failed: the training's own error is what
    comes out.
    """
    buffer = MetricBuffer()
    with pytest.raises(ZeroDivisionError):
        fail(buffer, torch.ones((), device="meta"))
    buffer.add(loss=torch.ones((), device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        buffer.flush()
    assert buffer.flush() == [], "what could not be brought is not tried again"


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.complex64)]
)
def test_what_is_no_single_number_is_an_error(value: torch.Tensor) -> None:
    buffer = MetricBuffer()
    with pytest.raises(
        InvalidTypeError, match=r"add\(loss=...\) got a tensor that is (complex|of \d elements)"
    ):
        buffer.add(step=1, loss=value)
    with pytest.raises(InvalidTypeError, match="neither a number nor a string"):
        buffer.add(loss=[1])
    assert len(buffer) == 0


def test_a_size_that_cannot_be() -> None:
    for size in (0, -1):
        with pytest.raises(InvalidValueError, match="at least 1, not"):
            MetricBuffer(size)
    with pytest.raises(InvalidTypeError, match="an integer, not 1"):
        MetricBuffer(1.5)


def test_in_a_pool_each_item_has_its_own() -> None:
    def train(item: int) -> None:
        with MetricBuffer(size=4) as metrics:
            for step in range(item):
                metrics.add(step=step, loss=torch.tensor(float(10 * item + step)))

    with parpool(2, profile="threads", quiet=True) as pool:
        frame = pool.parfor(train, [1, 6, 0, 3]).metrics
    assert sorted(zip(frame["item"], frame["step"], frame["loss"], strict=True)) == [
        (item, step, 10.0 * steps + step)
        for item, steps in enumerate([1, 6, 0, 3])
        for step in range(steps)
    ]
