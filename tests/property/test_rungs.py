"""Successive halving: only the best known trials continue, and none waits that may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypool.search.rungs import Rungs


@given(
    scores=st.lists(st.integers(0, 20), max_size=60),
    factor=st.integers(2, 4),
    turns=st.lists(st.booleans(), max_size=200),
)
def test_any_order_of_arrivals_and_promotions(
    scores: list[int], factor: int, turns: list[bool]
) -> None:
    rungs = Rungs([1, 3, 9, 27], factor)
    reached: list[dict[int, int]] = [{}, {}, {}, {}]
    promoted: list[set[int]] = [set(), set(), set()]
    running: list[tuple[int, int]] = []  # trial, and the rung that it will reach

    def is_best(trial: int, rung: int) -> bool:
        better = sum((-s, t) < (-scores[trial], trial) for t, s in reached[rung].items())
        return better < len(reached[rung]) // factor

    new = iter(range(len(scores)))
    for wants_promotion in [*turns, *[True, False] * 300]:
        if wants_promotion:
            if (promotion := rungs.promote()) is None:
                assert not any(
                    is_best(trial, rung)
                    for rung in range(3)
                    for trial in reached[rung].keys() - promoted[rung]
                ), "a trial waits that may continue"
                if (trial := next(new, None)) is not None:
                    running.append((trial, 0))
            else:
                trial, rung = promotion
                assert trial not in promoted[rung - 1]
                assert is_best(trial, rung - 1)
                promoted[rung - 1].add(trial)
                running.append((trial, rung))
        elif running:
            trial, rung = running.pop(len(running) // 2)
            reached[rung][trial] = scores[trial]
            rungs.reach(trial, rung, scores[trial])
    assert len(reached[0]) == len(scores)
    for rung in range(3):
        assert len(promoted[rung]) >= len(reached[rung]) // factor
