"""Only the best known trials continue or are copied, and none waits that may continue."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from raypool.search.rungs import Members, Rungs


@given(
    scores=st.lists(st.integers(0, 20), max_size=60),
    factor=st.integers(2, 4),
    turns=st.lists(st.sampled_from(["start", "start early", "end"]), max_size=200),
)
def test_any_order_of_arrivals_and_promotions(
    scores: list[int], factor: int, turns: list[str]
) -> None:
    rungs = Rungs([1, 3, 9, 27], factor)
    reached: list[dict[int, int]] = [{}, {}, {}, {}]
    promoted: list[set[int]] = [set(), set(), set()]
    early: list[set[int]] = [set(), set(), set()]  # those that have not become one of the best
    running: list[tuple[int, int]] = []  # trial, and the rung that it will reach

    def is_best(trial: int, rung: int) -> bool:
        better = sum((-s, t) < (-scores[trial], trial) for t, s in reached[rung].items())
        num_counted = len(reached[rung].keys() - (early[rung - 1] if rung else set()))
        return better < num_counted // factor

    new = iter(range(len(scores)))
    for turn in [*turns, *["start", "end"] * 300]:
        if turn == "end":
            if running:
                trial, rung = running.pop(len(running) // 2)
                reached[rung][trial] = scores[trial]
                rungs.reach(trial, rung, scores[trial])
            continue
        promotion = rungs.promote()
        for rung in range(3):
            early[rung] -= {trial for trial in early[rung] if is_best(trial, rung)}
        if promotion is not None:
            trial, rung = promotion
            assert is_best(trial, rung - 1)
        else:
            waiting = [(rung, reached[rung].keys() - promoted[rung]) for rung in range(3)]
            assert not any(is_best(trial, rung) for rung, trials in waiting for trial in trials), (
                "a trial waits that may continue"
            )
            if turn == "start early" and (promotion := rungs.promote_early()) is not None:
                trial, rung = promotion
                assert rung - 1 == max(rung for rung, trials in waiting if trials)
                assert scores[trial] == max(scores[each] for each in waiting[rung - 1][1])
                early[rung - 1].add(trial)
            elif (fresh := next(new, None)) is not None:
                running.append((fresh, 0))
        if promotion is not None:
            assert trial not in promoted[rung - 1]
            promoted[rung - 1].add(trial)
            running.append((trial, rung))
        for trial, rung in running:
            assert rungs.is_early(trial) == (rung > 0 and trial in early[rung - 1])
    assert len(reached[0]) == len(scores)
    for rung in range(3):
        counted = reached[rung].keys() - (early[rung - 1] if rung else set())
        assert len(promoted[rung]) >= len(counted) // factor


# trial 0 gets ahead and becomes the worst, while the best one still runs to where it is
AHEAD = [*[(True, 0)] * 4, *((False, score) for score in (8, 12, 4, 3)), *[(True, 0)] * 4]


@example(size=4, num_rungs=2, turns=[*AHEAD, (False, 0), (True, 0)])
@given(
    size=st.integers(4, 13),
    num_rungs=st.integers(1, 4),
    turns=st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=150),
)
def test_any_course_of_a_population(
    size: int, num_rungs: int, turns: list[tuple[bool, int]]
) -> None:
    members = Members([*range(1, num_rungs + 2)], size)
    quarter = size // 4
    places: dict[int, int] = {}  # of the members that have not been replaced, in the population
    scores: list[list[int]] = [[] for _ in range(size)]  # by place and rung
    waiting: set[int] = set()
    kept: dict[int, int] = {}  # the rung of the checkpoint that can be copied
    running: list[tuple[int, int]] = []  # trial, and the rung that it will reach
    num_trials = num_ended = num_parts = 0

    def place_at(trial: int, rung: int) -> tuple[float, int]:
        known = scores[places[trial]][: rung + 1]
        return (-known[-1] if known else math.inf, trial)

    def num_better(trial: int, rung: int) -> int:
        return sum(place_at(each, rung) < place_at(trial, rung) for each in places)

    for is_start, score in [*turns, *[(True, 3), (False, 7)] * size * (num_rungs + 1)]:
        if not is_start and running:
            trial, rung = running.pop(score % len(running))
            if rung == num_rungs:
                num_ended += 1
                continue
            scores[places[trial]].append(score)
            members.reach(trial, rung, score)
            waiting.add(trial)
            kept[trial] = rung
        elif is_start and num_trials < size:
            assert members.promote() is None, "new members begin first"
            members.join(num_trials)
            places[num_trials] = num_trials
            running.append((num_trials, 0))
            num_trials += 1
            num_parts += 1
        elif is_start and (promotion := members.promote()) is None:
            assert not waiting, "a member waits that may continue"
        elif is_start and promotion is not None:
            trial, rung = promotion[0], promotion[1] - 1
            waiting.remove(trial)
            assert rung == kept.pop(trial) == len(scores[places[trial]]) - 1
            assert all(kept[each] >= rung for each in waiting), "first those that are behind"
            expected = {
                each
                for each in places
                if num_better(trial, rung) >= size - quarter
                and num_better(each, rung) < quarter
                and kept.get(each, -1) >= rung
                and scores[places[each]][rung] > scores[places[trial]][rung]
            }
            assert set(members.parents(trial)) == expected
            if expected:
                parent = sorted(expected)[score % len(expected)]
                assert members.rung(parent) == kept[parent]
                members.join(num_trials)
                members.replace(trial, num_trials, parent, kept[parent])
                place = places[num_trials] = places.pop(trial)
                scores[place] += scores[places[parent]][rung + 1 : kept[parent] + 1]
                trial, rung = num_trials, kept[parent]
                num_trials += 1
            else:
                assert members.keep(trial) == (num_better(trial, rung) < quarter)
                if num_better(trial, rung) < quarter:
                    kept[trial] = rung
            running.append((trial, rung + 1))
            num_parts += 1
        assert members.num_missing == size - len(places) == max(0, size - num_trials)
    assert num_ended == size, "each member comes to its end"
    assert num_parts <= size * (num_rungs + 1)
