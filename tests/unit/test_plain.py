"""Plain data comes back exactly; what would not is not plain."""

from __future__ import annotations

import collections
import json
import math
import sys
import threading
from typing import Any

import numpy as np

from raypool.journal.plain import decode, encode


def shape(value: Any) -> Any:
    """Return a value with the types of all that is in it."""
    if isinstance(value, dict):
        return dict, [(name, shape(entry)) for name, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(entry) for entry in value]
    return type(value), repr(value)


PLAIN = [
    None,
    True,
    0,
    -(2**200),
    1.5,
    -0.0,
    0.1 + 0.2,
    math.nan,
    math.inf,
    "",
    "é\u2028\x00\N{GRINNING FACE}",
    [],
    [1, 1.0, True, None],
    {},
    {"b": 1, "a": [2, {"c": ()}]},
    (),
    (1, (2, [3])),
    {"~tuple": [1]},
    {"~dict": 1, "~numpy": ["float32", 1.0]},
    {"~": "~"},
    "~tuple",
    np.float64(0.1),
    np.float32(0.1),
    np.float16(0.1),
    np.float64("nan"),
    np.int64(2**62),
    np.uint8(255),
    np.bool_(True),
    {"loss": np.float32(0.25), "layers": (np.int32(1), 2)},
]


def test_it_comes_back_exactly():
    for value in PLAIN:
        text = encode(value)
        assert text is not None
        assert shape(decode(text)) == shape(value)
        assert "\n" not in text


NOT_PLAIN = [
    b"",
    1j,
    {1},
    {1: 2},
    {None: 2},
    {("a",): 2},
    collections.OrderedDict(a=1),
    collections.namedtuple("Point", "x")(1),
    type("Text", (str,), {})("a"),
    type("Number", (int,), {})(1),
    "\ud83d\ude00",
    {"\ud800": 1},
    10**5000,
    np.longdouble(1),
    np.complex64(1),
    np.str_("a"),
    np.arange(2),
    np.datetime64("2026-01-01"),
    [object()],
]


def test_what_would_not_come_back_exactly_is_not_plain():
    for value in NOT_PLAIN:
        assert encode(value) is None
        assert encode([value]) is None


def test_what_has_no_end_is_not_plain():
    cycle: list[Any] = []
    cycle.append(cycle)
    assert encode(cycle) is None
    wide: list[Any] = []
    for _ in range(40):
        wide = [wide, wide]
    assert encode(wide) is None


def test_a_plain_dict_reads_like_json():
    assert json.loads(encode({"lr": 0.1, "tags": ["a"]}) or "") == {"lr": 0.1, "tags": ["a"]}


def test_what_another_thread_changes_meanwhile_is_no_error():
    values = dict.fromkeys(map(str, range(50_000)))
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            values["more"] = None
            is_over.is_set()  # a call, at which Python may switch to the other thread
            del values["more"]

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(20):
            encode(values)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
