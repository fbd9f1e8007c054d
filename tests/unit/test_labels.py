"""Labels of machines: what may be asked of them, and which machines have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypool import InvalidTypeError, InvalidValueError, WorkerResources
from raypool.profiles import has_labels

WORDS = st.from_regex(r"[a-z0-9]([a-z_.-]{0,3}[a-z0-9])?", fullmatch=True)


WANTED = [
    ("spot", ["spot"]),
    ("!spot", ["reserved", None]),
    ("in(spot, reserved)", ["spot", "reserved"]),
    ("in(spot,reserved)", ["spot", "reserved"]),
    ("in(spot)", ["spot"]),
    ("!in(spot, reserved)", [None]),
    ("other", []),
    ("!other", ["spot", "reserved", None]),
    ("", []),
]


def test_who_has_a_label() -> None:
    """As Ray sees it (test_choice.py shows that); None stands for a machine that has no such
    label.
    """
    machines: list[str | None] = ["spot", "reserved", None]
    for wanted, which in WANTED:
        assert [
            value
            for value in machines
            if has_labels({} if value is None else {"market": value}, {"market": wanted})
        ] == which


def test_all_labels_are_wanted_at_once() -> None:
    assert has_labels({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "!3"})
    assert not has_labels({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    assert has_labels({}, {})


@given(st.lists(WORDS, min_size=1, max_size=4), st.none() | WORDS)
def test_what_is_not_so_is_the_rest(values: list[str], value: str | None) -> None:
    """Any set of values divides all machines in two; and all of it can be asked."""
    labels = {} if value is None else {"kind": value}
    wanted = f"in({', '.join(values)})"
    assert has_labels(labels, {"kind": wanted}) == (value in values)
    assert has_labels(labels, {"kind": f"!{wanted}"}) == (value not in values)
    assert WorkerResources(labels={"kind": wanted}).labels == {"kind": wanted}
    assert WorkerResources(labels={"kind": f"!{values[0]}"}).labels == {"kind": f"!{values[0]}"}


def test_names_that_no_label_can_have() -> None:
    for name in ["", "a b", "-a", "a-", "a/", "/a", "x" * 64, "ä"]:
        with pytest.raises(InvalidValueError, match="is not a valid name"):
            WorkerResources(labels={name: "x"})


def test_values_that_no_label_can_have() -> None:
    for value in [
        "-spot",
        "spot_",
        "in()",
        "in(a",
        "in(a,)",
        "in(a;b)",
        "!",
        "!!a",
        "!in(a, b!)",
        "a b",
        "x" * 64,
    ]:
        with pytest.raises(InvalidValueError, match="is not a valid value"):
            WorkerResources(labels={"market": value})


def test_what_is_no_mapping_of_texts() -> None:
    for labels in ["spot", ["spot"], {"market": 3}, {3: "spot"}]:
        with pytest.raises(InvalidTypeError):
            WorkerResources(labels=labels)  # type: ignore[arg-type]


def test_names_of_ray_itself() -> None:
    assert WorkerResources(labels={"ray.io/accelerator-type": "H100", "my.lab/room-2": ""}).labels
