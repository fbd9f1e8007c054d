"""What ranks say of themselves in a meeting, and how it is judged."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypool import CollectiveError
from raypool.spmd.wire import (
    BEGIN,
    END,
    SIGNATURE_BYTES,
    SLOT_BYTES,
    Header,
    Packer,
    find_disagreement,
    ordinal,
    signed,
)

SECRET = b"of this group"

TENSOR = Header(3, "all_reduce", "tensor", "float32", (3, 4), "cpu", op="sum")

shapes = st.lists(st.integers(0, 2**62), max_size=64).map(tuple)
words = st.builds(
    Header,
    number=st.integers(0, 2**40),
    operation=st.sampled_from(["all_reduce", "scatter", BEGIN, END]),
    kind=st.sampled_from(["tensor", "array", "value", ""]),
    dtype=st.text(max_size=20),
    shape=shapes,
    device=st.sampled_from(["cpu", "cuda", ""]),
    peer=st.integers(-1, 10**6),
    op=st.text(max_size=10),
    size=st.just(0),
    payload=st.none(),
)


@given(words)
def test_a_word_is_read_as_it_was_written(word: Header) -> None:
    slot = word.write(SECRET)
    assert len(slot) == SLOT_BYTES
    assert Header.read(slot, SECRET) == word


@given(words, st.binary(max_size=2 * SLOT_BYTES))
def test_a_value_rides_along_if_it_fits(word: Header, payload: bytes) -> None:
    word = word._replace(size=len(payload), payload=payload)
    read = Header.read(word.write(SECRET), SECRET)
    assert read in (word, word._replace(payload=None))
    if len(payload) <= 100 and len(word.shape) < 10:
        assert read.payload == payload


class Trap:
    """What a stranger would send: opening it does something."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was opened",)


@pytest.mark.parametrize("key", [b"", b"another"])
def test_what_no_rank_has_signed_is_not_opened(key: bytes) -> None:
    forged = signed(pickle.dumps(Trap()).ljust(SLOT_BYTES - SIGNATURE_BYTES, b"\0"), key)
    with pytest.raises(CollectiveError, match="no rank of this group has sent"):
        Header.read(forged, SECRET)
    with pytest.raises(CollectiveError, match="no rank of this group has sent"):
        Packer(SECRET).unpack(forged, 1, "gather")


@given(words, st.integers(1, 5))
def test_ranks_that_say_the_same_agree(word: Header, size: int) -> None:
    if word.operation != "scatter":  # whose ranks do not say the same
        assert find_disagreement([word] * size) is None


def told(*said: Header) -> tuple[str, tuple[int, ...]]:
    found = find_disagreement(said)
    assert found is not None
    return found


def test_different_operations() -> None:
    text, missing = told(TENSOR, Header(3, "barrier"), TENSOR, TENSOR)
    assert text.startswith(
        "Ranks 0, 2 and 3 are in all_reduce, rank 1 is in barrier (the 3rd collective of this"
        " call). "
    )
    assert missing == ()


def test_a_rank_that_has_ended() -> None:
    text, missing = told(TENSOR, Header(3, END), TENSOR)
    assert text.startswith(
        "Rank 1 has ended, ranks 0 and 2 wait for it in all_reduce (the 3rd collective of this"
        " call). "
    )
    assert missing == (1,)


def test_several_ranks_that_have_ended() -> None:
    text, missing = told(Header(12, END), Header(12, END), TENSOR._replace(number=12))
    assert text.startswith(
        "Ranks 0 and 1 have ended, rank 2 waits for them in all_reduce (the 12th collective of this"
        " call). "
    )
    assert missing == (0, 1)


def test_a_rank_that_has_ended_and_others_in_different_operations() -> None:
    text, missing = told(Header(1, "barrier"), Header(1, END), TENSOR._replace(number=1))
    assert text.startswith(
        "Rank 0 is in barrier, rank 1 has ended, rank 2 is in all_reduce (the 1st collective of"
        " this call). "
    )
    assert missing == (1,)


def test_ranks_that_are_out_of_step() -> None:
    text, _ = told(TENSOR, TENSOR._replace(number=4))
    assert text.startswith(
        "Rank 0 is in all_reduce (its 3rd collective), rank 1 is in all_reduce (its 4th"
        " collective) "
    )


OTHERS = [
    (TENSOR._replace(shape=(4, 3)), "a float32 tensor (4, 3)"),
    (TENSOR._replace(dtype="int64"), "an int64 tensor (3, 4)"),
    (TENSOR._replace(kind="array", device=""), "a float32 array (3, 4)"),
    (TENSOR._replace(device="cuda"), "a float32 tensor (3, 4) on a GPU"),
    (Header(3, "all_reduce", "value", op="sum"), "a Python value"),
]


def test_different_values_in_a_reduction() -> None:
    for other, what in OTHERS:
        text, missing = told(TENSOR, other, TENSOR)
        assert text.startswith(
            "Ranks 0 and 2 are in all_reduce of a float32 tensor (3, 4), rank 1 is in all_reduce"
            f" of {what} (the 3rd"
        )
        assert missing == ()


def test_different_values_in_a_gather_are_well() -> None:
    gather = TENSOR._replace(operation="all_gather", op="")
    assert (
        find_disagreement([gather, gather._replace(shape=()), Header(3, "all_gather", "value")])
        is None
    )


def test_different_ranks_are_named() -> None:
    text, _ = told(*(TENSOR._replace(operation="gather", peer=rank) for rank in range(2)))
    assert text.startswith("Rank 0 is in gather to rank 0, rank 1 is in gather to rank 1 (")


def test_different_ops() -> None:
    text, _ = told(TENSOR, TENSOR._replace(op="max"), TENSOR._replace(op="function"))
    assert "all_reduce with op='sum'" in text
    assert "all_reduce with op='max'" in text
    assert "all_reduce with a function" in text


def test_a_broadcast_into_something_else() -> None:
    source = Header(2, "broadcast", "tensor", "float32", (3,), "cpu", peer=1)
    nothing = Header(2, "broadcast", peer=1)
    assert find_disagreement([nothing, source, source]) is None
    four, five = source._replace(shape=(4,)), source._replace(shape=(5,))
    text, _ = told(nothing, source, four, five, four)
    assert text.startswith(
        "Rank 1 broadcasts a float32 tensor (3,), but ranks 2 and 4 passed a float32 tensor (4,),"
        " rank 3 passed a float32 tensor (5,) (the 2nd collective"
    )
    text, _ = told(source, source._replace(kind="value", dtype="", shape=()), nothing)
    assert text.startswith(
        "Rank 1 broadcasts a Python value, but rank 0 passed a float32 tensor (3,) "
    )


@pytest.mark.parametrize(
    ("shape", "has"), [((2,), "2 parts"), ((4,), "4 parts"), ((), "no list of parts")]
)
def test_a_scatter_of_too_few_or_too_many(shape: tuple[int, ...], has: str) -> None:
    other = Header(1, "scatter", peer=0)
    assert find_disagreement([other._replace(shape=(3,)), other, other]) is None
    text, _ = told(other._replace(shape=shape), other, other)
    assert text.startswith(f"Rank 0 scatters {has} to 3 ranks (the 1st collective of this call). ")


def test_of_many_ranks_some_are_named() -> None:
    text, _ = told(*[TENSOR] * 100, TENSOR._replace(op="max"))
    assert text.startswith("Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others are in ")


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 111, 122)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "111th", "122nd",
    ]  # fmt: skip
