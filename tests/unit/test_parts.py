"""The parts of Composites in a process: kept, found, freed, and described without being sent."""

from __future__ import annotations

import gc
import pickle
import uuid
import weakref
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raypool import CompositeError, RaypoolError
from raypool.spmd import composite
from raypool.spmd.composite import Description, Gone, PartOf, describe


@pytest.fixture
def key() -> Iterator[str]:
    key = uuid.uuid4().hex
    yield key
    composite.drop(key)


class Thing:
    """Something that can be referred to weakly."""


# --- keeping --------------------------------------------------------------------------------------


def test_what_is_kept_is_found_as_itself_by_key_and_rank(key: str) -> None:
    here, there = Thing(), Thing()
    assert composite.keep(key, 0, here) == Description("Thing")
    composite.keep(key, 1, there)

    assert composite.find(key, 0) is composite.read(key, 0) is here
    assert composite.find(key, 1) is there


def test_a_value_takes_the_place_of_the_one_before(key: str) -> None:
    before = Thing()
    gone = weakref.ref(before)
    composite.keep(key, 0, before)
    del before
    composite.keep(key, 0, [1])
    assert composite.find(key, 0) == [1]
    assert gone() is None


def test_the_collector_runs_once_for_what_lives_on(key: str) -> None:
    """A class, say, that each call returns; a collection takes long in a large process."""

    def num_collections() -> int:
        return int(gc.get_stats()[2]["collections"])

    gc.disable()
    try:
        before = num_collections()
        for number in range(5):
            composite.keep(key, 0, {"kind": Thing, "number": number})
            composite.forget(key)
        assert num_collections() - before <= 1
    finally:
        gc.enable()


def test_none_is_a_value(key: str) -> None:
    composite.keep(key, 0, None)
    assert composite.find(key, 0) is None
    assert composite.read(key, 0) is None


def test_what_is_not_here_is_an_error_or_an_answer(key: str) -> None:
    with pytest.raises(CompositeError, match=r"rank 2 .*no longer on this worker.*spmd") as caught:
        composite.find(key, 2)
    assert caught.value.rank == 2
    assert isinstance(caught.value, RaypoolError)
    assert type(composite.read(key, 2)) is Gone
    composite.keep(key, 0, 1)
    with pytest.raises(CompositeError):
        composite.find(key, 1)
    assert type(composite.read(key, 1)) is Gone


def test_an_answer_and_a_marker_travel() -> None:
    assert type(pickle.loads(pickle.dumps(Gone()))) is Gone
    assert pickle.loads(pickle.dumps(PartOf("a"))) == PartOf("a")


def test_removing_one_leaves_the_others(key: str) -> None:
    thing = Thing()
    gone = weakref.ref(thing)
    composite.keep(key, 0, thing)
    composite.keep(key, 1, 1)
    del thing
    composite.remove(key, 0)

    assert gone() is None
    assert type(composite.read(key, 0)) is Gone
    assert composite.find(key, 1) == 1
    composite.remove(key, 0)
    composite.remove("no such key", 0)


@pytest.mark.parametrize("forget", [composite.drop, composite.forget])
def test_forgetting_takes_all_ranks_and_no_other_composite(key: str, forget: Any) -> None:
    things = [Thing(), Thing()]
    gone = [weakref.ref(thing) for thing in things]
    for rank, thing in enumerate(things):
        composite.keep(key, rank, thing)
    other = uuid.uuid4().hex
    composite.keep(other, 0, "other")
    del things, thing
    forget(key)

    assert [ref() for ref in gone] == [None, None]
    assert type(composite.read(key, 0)) is type(composite.read(key, 1)) is Gone
    assert composite.find(other, 0) == "other"
    forget(other)
    forget(other)
    assert key not in composite._parts
    assert other not in composite._parts


def test_a_part_may_have_a_finalizer_that_drops_another(key: str) -> None:
    other = uuid.uuid4().hex
    thing = Thing()
    weakref.finalize(thing, composite.drop, other)
    composite.keep(key, 0, thing)
    composite.keep(other, 0, 1)
    del thing
    composite.keep(key, 0, 2)
    assert type(composite.read(other, 0)) is Gone


# --- describing -----------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class OrderedWords(list):  # type: ignore[type-arg]
    pass


DESCRIBED = [
    (None, "None"),
    (3, "int"),
    (2.5, "float"),
    (True, "bool"),
    (1j, "complex"),
    ("twelve chars", "str of 12 characters"),
    ("a", "str of 1 character"),
    ("", "str of 0 characters"),
    (b"abc", "bytes of 3"),
    ({"a": 1, "b": 2, "c": 3}, "dict of 3"),
    ([1, 2, 3, 4, 5], "list of 5"),
    ((), "tuple of 0"),
    ({1}, "set of 1"),
    (Point(1, 2), "Point of 2"),
    (OrderedWords(["a"]), "OrderedWords of 1"),
    (Thing(), "Thing"),
    (Thing, "type"),
    (len, "builtin_function_or_method"),
]


def test_a_value_is_described_by_type_and_size() -> None:
    for value, text in DESCRIBED:
        assert describe(value).text == text


def test_arrays_and_tables() -> None:
    assert describe(np.zeros((3, 4))).text == "ndarray (3, 4) float64"
    assert describe(np.zeros(5, np.int32)).text == "ndarray (5,) int32"
    assert describe(np.array(1.0)).text == "ndarray () float64"
    assert describe(np.float32(1)).text == "float32"
    assert describe(pd.DataFrame({"a": range(10), "b": range(10)})).text == "DataFrame (10, 2)"
    assert describe(pd.DataFrame({"shape": [1], "dtype": [2]})).text == "DataFrame (1, 2)", (
        "the columns have these names"
    )
    assert describe(pd.Series([1.0])).text == "Series (1,) float64"


def test_tensors_and_models() -> None:
    torch = pytest.importorskip("torch")
    assert describe(torch.zeros(3, 4)).text == "Tensor (3, 4) float32"
    assert describe(torch.zeros(3, dtype=torch.int64)).text == "Tensor (3,) int64"
    assert describe(torch.tensor(1.5)).text == "Tensor () float32"
    assert describe(torch.nn.Parameter(torch.zeros(2))).text == "Parameter (2,) float32"
    assert describe(torch.zeros(3, 4, device="meta")).text == "Tensor (3, 4) float32 on meta"
    assert describe(torch.nn.Linear(4, 4)).text == "Linear, 20 parameters"
    assert describe(torch.nn.Linear(1, 1, bias=False)).text == "Linear, 1 parameter"
    assert describe(torch.nn.ReLU()).text == "ReLU, 0 parameters"
    assert describe(torch.nn.Linear(4, 4, device="meta")).text == "Linear, 20 parameters on meta"
    assert describe(torch.nn.LazyLinear(3)).text.startswith("LazyLinear")


class Broken(Exception):
    pass


class RaisingShape:
    @property
    def shape(self) -> Any:
        raise Broken


class OddShape:
    shape = "round"


class ShapeOfThings:
    shape = (1, None)


class RaisingDtype:
    shape = (1,)

    @property
    def dtype(self) -> Any:
        raise Broken


class RaisingLen(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise Broken


class RaisingAll:
    def __getattribute__(self, name: str) -> Any:
        raise Broken

    def __repr__(self) -> str:
        raise Broken

    def __eq__(self, other: object) -> bool:
        raise Broken

    __hash__ = None  # type: ignore[assignment]


class AnswersAll:
    def __getattr__(self, name: str) -> Any:
        return self

    def __str__(self) -> str:
        raise Broken


@pytest.mark.parametrize(
    "kind",
    [RaisingShape, OddShape, ShapeOfThings, RaisingDtype, RaisingLen, RaisingAll, AnswersAll],
)
def test_of_one_that_refuses_only_the_type_is_said(key: str, kind: Any) -> None:
    value = kind()
    assert composite.keep(key, 0, value) == Description(kind.__name__)
    assert composite.read(key, 0) is value


def test_a_description_is_one_short_line() -> None:
    table = np.zeros(2, [(f"column {i}", "f8") for i in range(50)])
    text = describe(table).text
    assert text.startswith("ndarray (2,) [(")
    assert text.endswith("...")
    assert len(text) <= composite.MAX_TEXT
    assert "\n" not in text


def test_small_values_that_cannot_change_come_along() -> None:
    for value in [None, 0, 3, -2.5, True, "text", b"bytes", "", "x" * 900, 10**300]:
        (plain,) = describe(value).plain
        assert plain is value


def test_others_stay_where_they_are() -> None:
    for value in [
        "x" * 2000,
        b"x" * 2000,
        10**5000,
        [],
        {},
        (1, 2),
        np.float64(1),
        np.zeros(1),
        Point(1, 2),
        Thing(),
    ]:
        assert describe(value).plain == (), type(value)


def test_a_subclass_of_a_plain_type_stays_where_it_is() -> None:
    class Word(str):
        __slots__ = ("note",)

    assert describe(Word("a")).plain == ()
    assert describe(Word("a")).text == "Word"
