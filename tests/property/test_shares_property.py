"""What holds for all ways to share samples out."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from raypool.train.shares import divide, share_of, split_batch

loads = st.lists(
    st.one_of(st.integers(0, 10**6), st.floats(0, 1e9, allow_nan=False, allow_infinity=False)),
    min_size=1,
    max_size=9,
).filter(any)
sizes = st.integers(0, 10**7)


@given(sizes, loads)
def test_every_sample_goes_to_one_rank_and_no_rank_is_off_by_one(
    size: int, loads: list[float]
) -> None:
    shares = split_batch(size, loads)
    assert sum(shares) == size
    total = sum(Fraction(load) for load in loads)
    for share, load in zip(shares, loads, strict=True):
        assert abs(share - size * Fraction(load) / total) < 1
        assert load or share == 0


@given(sizes, st.integers(1, 64))
def test_equal_loads_differ_by_one_and_the_first_have_more(size: int, ranks: int) -> None:
    shares = split_batch(size, [1] * ranks)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@given(sizes, loads, st.integers(1, 1000))
def test_only_proportions_count(size: int, loads: list[float], factor: int) -> None:
    assert split_batch(size, loads) == split_batch(
        size, [Fraction(load) * factor for load in loads]
    )


@given(st.integers(1, 10**5), loads)
def test_shares_lie_end_to_end(size: int, loads: list[float]) -> None:
    shares = [share_of(rank, size, loads) for rank in range(len(loads))]
    ends = [0, *(share.start + share.size for share in shares)]
    assert ends[:-1] == [share.start for share in shares]
    assert ends[-1] == size


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 100))
def test_an_epoch_has_iterations_and_loses_less_than_one(
    num_samples: int, batch_size: int, accumulate: int
) -> None:
    division = divide(num_samples, batch_size, accumulate)
    assert division.steps >= 1
    assert 1 <= division.batch_size <= batch_size
    assert 1 <= division.accumulate <= accumulate
    assert 0 <= division.dropped < division.batch_size * division.accumulate
    if num_samples >= batch_size * accumulate:
        assert (division.batch_size, division.accumulate) == (batch_size, accumulate)
