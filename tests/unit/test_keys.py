"""What is the same has the same key, what differs another one."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import json
import operator
import pathlib
import threading
import uuid
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from raypool.errors import InvalidTypeError
from raypool.journal.keys import content_key, function_key

T = TypeVar("T")


def key(value: Any) -> str:
    return content_key(value, "item 3")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Config:
    lr: float
    layers: tuple[int, ...] = ()
    name: str = "a"


@dataclasses.dataclass
class Derived:
    """Its attributes are more than its fields."""

    lr: float
    width: dataclasses.InitVar[int] = 1

    def __post_init__(self, width: int) -> None:
        self.layers = [width] * 2


class Named(Config):
    """A class without a decorator, so that `label` is no field."""

    def __init__(self, label: str) -> None:
        super().__init__(0.1)
        self.label = label


@dataclasses.dataclass
class Listed(list):
    lr: float = 0.1


class Labeled(Point):
    pass


@dataclasses.dataclass
class OtherConfig:
    lr: float
    layers: tuple[int, ...] = ()
    name: str = "a"


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Text(str):
    __slots__ = ()


class Names(list):
    pass


class Tags(set):
    pass


def scale(x: float, by: float = 1.0) -> float:
    return x * by


def adder(n: int) -> Any:
    return lambda x: x + n


def changed(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def times(factor: Any) -> Any:
    def decorate(fn: Any) -> Any:
        return functools.wraps(fn)(lambda x: factor * fn(x))

    return decorate


@times(threading.Lock())
def found_by_name(x: float) -> float:
    """A function whose captured values have no key."""
    return x


DIFFERENT: list[Any] = [
    None,
    ...,
    True,
    False,
    1,
    1.0,
    1 + 0j,
    "1",
    b"1",
    bytearray(b"1"),
    0,
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    2**70,
    "",
    "é",
    "\ud800",
    [],
    [1],
    (),
    (1,),
    [[1], 2],
    [[1, 2]],
    ["ab", "c"],
    ["a", "bc"],
    {},
    {1: 2},
    {"1": 2},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    set(),
    {1},
    frozenset({1}),
    {"x", "y"},
    Tags({1}),
    changed(Tags({1}), owner="a"),
    changed(Tags({1}), owner="b"),
    Colour.RED,
    Colour.BLUE,
    Point(1, 2),
    (1, 2),
    Config(0.1),
    Config(0.2),
    OtherConfig(0.1),
    Derived(0.1, 1),
    Derived(0.1, 2),
    Named("a"),
    Named("b"),
    Listed(),
    operator.iadd(Listed(), [1]),
    Labeled(1, 2),
    changed(Labeled(1, 2), label="a"),
    changed(Labeled(1, 2), label="b"),
    {"lr": 0.1, "layers": (), "name": "a"},
    pathlib.Path("a"),
    "a",
    datetime.date(2026, 1, 1),
    datetime.datetime(2026, 1, 1),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.time(1),
    datetime.timedelta(1),
    decimal.Decimal("0.1"),
    fractions.Fraction(1, 10),
    uuid.UUID(int=1),
    range(3),
    range(1, 3),
    slice(3),
    slice(0, 3),
    Plain(x=1),
    Plain(x=2),
    Plain(y=1),
    Slotted(1),
    Slotted(2),
    Text("a"),
    Names([1]),
    collections.OrderedDict(a=1, b=2),
    collections.OrderedDict(b=2, a=1),
    collections.defaultdict(int, a=1),
    collections.Counter("a"),
    collections.deque([1]),
    scale,
    adder,
    adder(1),
    adder(2),
    times(2)(scale),
    times(3)(scale),
    found_by_name,
    lambda x: x,
    lambda x: -x,
    lambda x: x.real,
    lambda x: x.imag,
    lambda x: (lambda y: y.real)(x),
    lambda x: (lambda y: y.imag)(x),
    functools.partial(scale, by=2),
    functools.partial(scale, by=3),
    Config,
    int,
    operator,
    np.arange(3),
    np.arange(3.0),
    np.arange(3).reshape(1, 3),
    np.array([1, "a"], dtype=object),
    np.array([[1, "a"]], dtype=object),
    np.timedelta64(1, "D"),
    np.timedelta64(1, "Y"),
    np.array(["a", "b"]),
    np.datetime64("2026-01-01"),
    np.datetime64("2026-01-02"),
    np.zeros(2, dtype=[("a", "f4")]),
    np.zeros(2, dtype=[("b", "f4")]),
    np.dtype("f4"),
    pd.DataFrame({"a": [1, 2]}),
    pd.DataFrame({"a": [1, 3]}),
    pd.DataFrame({"b": [1, 2]}),
    pd.DataFrame({"a": [1, 2]}, index=[1, 2]),
    pd.DataFrame({"a": ["x", None]}),
    pd.Series([1, 2]),
    pd.Series([1, 2], name="a"),
    pd.Index([1, 2]),
    pd.Index([1, 2], name="a"),
    pd.Series(["x", "y"], dtype="category"),
    pd.Series(pd.Categorical(["x", "y"], categories=["y", "x"])),
    pd.Series(pd.Categorical(["x", "y"], ordered=True)),
    pd.Timestamp("2026-01-01"),
    pd.Timestamp("2026-01-01", tz="UTC"),
    pd.NA,
    pd.NaT,
]


def test_all_that_differs_has_a_key_of_its_own():
    by_key: dict[str, Any] = {}
    for value in DIFFERENT:
        assert key(value) not in by_key, f"{value!r} and {by_key[key(value)]!r}"
        by_key[key(value)] = value


def test_a_copy_has_the_same_key():
    for value in DIFFERENT:
        copied = cloudpickle.loads(cloudpickle.dumps(value))
        assert key(copied) == key(value)
        assert len(key(value)) == 24
        int(key(value), 16)


EQUAL = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1, 2, 3}, {3, 2, 1}),
    (np.float64(1.5), 1.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.float32(0.5), 0.5),
    ([np.int32(1)], [1]),
    (np.arange(6)[::2], np.array([0, 2, 4])),
    (np.asfortranarray(np.eye(2)), np.eye(2)),
    (collections.defaultdict(int, a=1, b=2), collections.defaultdict(int, b=2, a=1)),
    (Plain(x=1, y=2), Plain(y=2, x=1)),
    (float("nan"), -float("nan")),
    (pathlib.Path("a"), pathlib.PurePosixPath("a")),
]


def test_what_is_the_same_has_the_same_key():
    for one, other in EQUAL:
        assert key(one) == key(other)


@dataclasses.dataclass
class Size(Generic[T]):
    width: int

    @functools.cached_property
    def area(self) -> int:
        return self.width**2


def test_what_is_derived_from_the_fields_of_a_dataclass_does_not_count():
    size = Size(3)
    before = key(size)
    assert size.area == 9
    assert key(size) == before == key(Size[int](3))


KEYS_ON_DISK = {
    "config": "48fa1f160051c591cf8afb43",
    "function": "0db1f48e1c56a05e2d14db49",
    "plain": "f38c74f50c32dbd025ca47f9",
    "dict": "6834fe3692caab829468fa02",
    "set": "1af57a6328fdf85cab0aa313",
    "enum": "94d1d6c4b8bc9203cd570838",
    "namedtuple": "0df4c62fb8f724a267bebc14",
    "times": "20b41ed16f1be63c1f031f3a",
    "numbers": "5d8439c94b653e90761e45ff",
    "path": "a86223d13092047d6021deb5",
    "partial": "9e7f623d3df3163c618248b9",
    "class": "a1d1d83ff0f2341081ff2ad2",
    "object": "b61bbf9626b9e041f93d02c7",
    "collections": "9a0c4f13a2278c0cc006e9a9",
    "numpy": "fcd1633b6b3ea4d770f77c2f",
    "array of objects": "de23b4d865c5929f4d7ea24d",
    "frame": "2cb9bc379d6f4fa804574100",
    "series": "9c266fbf6ff1e7799fed0345",
    "index": "619af924460876acb7451e34",
    "tensors": "28a7aa3193343031ed206faf",
    "parameter": "ef091a617c1b4d1505ee7626",
}


def values_on_disk() -> dict[str, Any]:
    """Return values of all kinds; their classes are in a module that the tests do not name."""
    import torch

    config = dataclasses.make_dataclass("Config", ["lr", "layers"])
    config.__module__ = "sweep"
    plain = type("Plain", (), {"__module__": "sweep"})
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    return {
        "config": config(0.1, (1,)),
        "function": json.dumps,
        "plain": [None, True, 1, -(2**70), 1.5, -0.0, float("nan"), 1 + 2j, "ü", b"b", (1,)],
        "dict": {"b": 1, "a": [2]},
        "set": {1, 2, frozenset({"x"})},
        "enum": enum.Enum("Colour", "RED BLUE", module="sweep").BLUE,
        "namedtuple": collections.namedtuple("Point", "x y", module="sweep")(1, 2),
        "times": [day, day.date(), day.time(), datetime.timedelta(1, 2, 3)],
        "numbers": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=1)],
        "path": pathlib.PurePosixPath("a/b"),
        "partial": functools.partial(json.dumps, 1, indent=2),
        "class": plain,
        "object": changed(plain(), x=1, y=[2]),
        "collections": [collections.OrderedDict(b=1, a=2), collections.Counter("aab")],
        "numpy": [np.float32(1.5), np.arange(4)[::2], np.datetime64("2026-01-02")],
        "array of objects": np.array(["a", None], dtype=object),
        "frame": pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=["r", "s"]),
        "series": pd.Series(["x", "y"], dtype="category", name="s"),
        "index": pd.Index([1, 2], name="i"),
        "tensors": [torch.arange(3), torch.eye(2).to_sparse(), torch.tensor(1.5)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_keys_stay_as_they_are_on_disks():
    """Else all items of a run would run again after an update of raypool."""
    assert {name: key(value) for name, value in values_on_disk().items()} == KEYS_ON_DISK


def test_tensors_are_known_by_what_is_in_them():
    import torch

    tensors = [
        torch.arange(3),
        torch.arange(3.0),
        torch.arange(3).reshape(1, 3),
        torch.zeros(0),
        torch.tensor(1.5),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.eye(3).to_sparse(),
        torch.eye(3),
    ]
    keys = [key(tensor) for tensor in tensors]
    assert len(set(keys)) == len(keys)
    assert keys == [
        key(tensor.detach().clone() if not isinstance(tensor, torch.nn.Parameter) else tensor)
        for tensor in tensors
    ]
    assert key(torch.arange(6)[::2]) == key(torch.tensor([0, 2, 4]))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(0)
    assert key(model) == key(torch.nn.Linear(2, 2))
    assert key(model) != key(torch.nn.Linear(2, 2))
    assert key(torch.float32) != key(torch.float64)


def family(name: str, *children: str) -> Plain:
    """Return a parent whose children know it."""
    parent = Plain(name=name)
    parent.children = [Plain(name=child, parent=parent) for child in children]
    return parent


def test_a_child_may_know_its_parent():
    """What it refers to counts by where that is, so that two of a kind are the same, and others are
    not.
    """
    assert key(family("a", "b", "c")) == key(family("a", "b", "c"))
    keys = [key(family(*names)) for names in ("abc", "abd", "ab", "bbc")]
    to_a_sibling = family("a", "b", "c")
    to_a_sibling.children[1].parent = to_a_sibling.children[0]
    assert len({*keys, key(to_a_sibling)}) == 5
    own: list[Any] = [1]
    own.append(own)
    other: list[Any] = [1, [1]]
    other[1].append(other[1])
    assert key(own) != key(other)


def test_a_configuration_of_hydras_is_what_it_holds():
    whole = {"seed": 1, "optim": {"lr": "${..rate}", "steps": [1, 2]}, "rate": 0.1}
    config = OmegaConf.create(whole)
    assert (
        key(config)
        == key(OmegaConf.create(whole))
        == key(OmegaConf.to_container(config, resolve=True))
    )
    assert key(config.optim) == key({"lr": 0.1, "steps": [1, 2]})
    config.rate = 0.2
    assert key(config) != key(OmegaConf.create(whole))


def test_what_cannot_be_pickled_is_an_error_that_names_the_part():
    with pytest.raises(
        InvalidTypeError,
        match=r"item 3\['lock'\]\[0\] is a lock that cannot be pickled .*Create it inside",
    ):
        key({"lr": 1, "lock": [threading.Lock()]})
    with pytest.raises(InvalidTypeError, match=r"item 3\.x is a generator"):
        key(Plain(x=(i for i in ())))


def test_what_is_nested_too_deeply_is_an_error():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidTypeError, match="nested too deeply"):
        key(deep)
    while deep:
        deep = deep[0]


def test_the_same_list_twice_is_no_cycle():
    inner = [1]
    assert key([inner, inner]) == key([[1], [1]])


class Callable:
    def __call__(self, x: int) -> int:
        return x

    def method(self, x: int) -> int:
        return x


def test_a_function_is_known_by_its_name():
    here = __name__
    assert function_key(scale) == f"{here}.scale"
    assert function_key(functools.partial(functools.partial(scale, by=2), by=3)) == f"{here}.scale"
    assert function_key(Callable()) == f"{here}.Callable"
    assert function_key(Callable().method) == f"{here}.Callable.method"
    assert function_key(Callable) == f"{here}.Callable"
    assert function_key(len) == "builtins.len"
    assert (
        function_key(lambda: 0) == f"{here}.test_a_function_is_known_by_its_name.<locals>.<lambda>"
    )


def test_a_function_may_capture_what_has_no_value_yet():
    """As one that is defined before the function that it calls."""

    def inner():
        return later()

    key = content_key([inner], "item 0")

    def later():
        return 1

    assert key != content_key([inner], "item 0")


def test_a_script_has_the_name_of_its_file(tmp_path, run_python):
    script = tmp_path / "sweep.py"
    script.write_text(
        "from raypool.journal.keys import *\ndef train(): pass\nclass C:"
        " pass\nprint(function_key(train), content_key(C(), 'it'))"
    )
    as_script = run_python(
        f"import subprocess, sys; print(subprocess.check_output([sys.executable, {str(script)!r}],"
        " text=True))"
    )
    as_module = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sweep")
    assert as_script.stdout.split() == as_module.stdout.split()
    assert as_module.stdout.startswith("sweep.train ")
