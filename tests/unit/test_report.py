"""What can be reported, and what not."""

from __future__ import annotations

import enum
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from raypool import InvalidTypeError, InvalidValueError, report
from raypool.worker.running import TaskContext, running


@pytest.fixture
def said() -> Any:
    said: list[tuple[Any, ...]] = []
    token = running.set(
        TaskContext(
            3,
            1,
            None,
            0,
            None,
            None,
            7,
            say=lambda note, kind, payload: said.append((kind, *payload)),
        )
    )
    yield said
    running.reset(token)


class Phase(enum.StrEnum):
    TRAIN = "train"


PLAIN = [
    (1, 1),
    (0.5, 0.5),
    (True, True),
    (float("nan"), float("nan")),
    ("train", "train"),
    (Phase.TRAIN, "train"),
    ("x" * 256, "x" * 256),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (2**1023 - 1, 2**1023 - 1),
    (np.int16(7), 7),
    (np.bool_(True), True),
    (np.array(2.5), 2.5),
    (np.str_("a"), "a"),
    (enum.IntEnum("Level", "LOW").LOW, 1),
    (None, None),
]


def test_numbers_and_short_texts_are_plain_when_they_travel(said: list[Any]) -> None:
    for value, plain in PLAIN:
        said.clear()
        report(value=value, step=1)
        ((kind, when, metrics),) = said
        assert kind == "metrics"
        assert when > 1e9
        assert repr(metrics) == repr({"value": plain, "step": 1})
        assert type(metrics["value"]) is type(plain)


def test_all_else_is_an_error_at_the_call(said: list[Any]) -> None:
    for value in (
        1j,
        b"x",
        [1],
        (1, 2),
        {"a": 1},
        Decimal(1),
        np.array("a"),
        np.complex64(1),
        object(),
        len,
    ):
        with pytest.raises(
            InvalidTypeError, match=r"report\(loss=...\) got a .*neither a number nor a string"
        ):
            report(step=1, loss=value)
    with pytest.raises(InvalidTypeError, match="a ndarray"):
        report(loss=np.arange(3))
    assert not said


def test_a_tensor_is_asked_for_its_number() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidTypeError, match=r"loss\.item\(\).*waits for the GPU"):
        report(loss=torch.tensor(0.5))


def test_a_long_text_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="257 characters, but at most 256 fit"):
        report(note="x" * 257)


def test_a_huge_integer_is_an_error() -> None:
    """Those of more than 4,300 digits cannot be written as text."""
    for value in (2**1023, -(10**5000)):
        with pytest.raises(InvalidValueError, match=r"of [\d,]+ bits, but at most 1,023 fit"):
            report(step=1, loss=value)


def test_outside_a_pool_nothing_happens() -> None:
    assert report(step=1, loss=0.5) is None  # type: ignore[func-returns-value]


def test_what_is_reported_is_what_it_was(said: list[Any]) -> None:
    metrics = {"loss": 1.0}
    report(**metrics)
    metrics["loss"] = 2.0
    assert said[0][2] == {"loss": 1.0}
