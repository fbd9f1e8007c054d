"""Peers side by side: each workload by each way that a system has, in turns, with the answers
checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring import Line, in_turns, timed

WAYS = {"map": "at once", "submit": "call by call", "unordered": "as they come"}
"""How a system is given work (see `Peer`), in words."""


@dataclass(frozen=True)
class Workload:
    """Items for a function, by the way in which they are given to a system.

    `key` makes an answer comparable where it does not compare by itself (an array, say). `bound_s`
    is the least that any system could take for all [s], and `target` how many times that raypool
    may take. `warm_ups` rounds come before those that count.
    """

    name: str
    fn: Callable[[Any], Any]
    items: dict[str, list[Any]]
    key: Callable[[Any], Any] = lambda answer: answer
    bound_s: float | None = None
    target: float | None = None
    warm_ups: int = 1


class WrongAnswersError(Exception):
    """A system has not returned what a plain loop returns."""


def contest(peers, workloads, rounds=5):
    """Measure each workload by each way with all peers that have it; return a line for each of
    these, against raypool.
    """
    return [
        line
        for workload in workloads
        for way in workload.items
        for line in _turns(peers, workload, way, rounds)
    ]


def _turns(peers, workload, way, rounds):
    items = workload.items[way]
    expected = [workload.key(workload.fn(item)) for item in items]
    calls = {name: call for name, peer in peers.items() if (call := getattr(peer, way)) is not None}
    turns = {name: _turn(name, call, workload, way, expected) for name, call in calls.items()}
    values = in_turns(turns, rounds, workload.warm_ups)
    ours = values.pop("raypool")
    area = WAYS[way]
    lines = [
        Line(area, workload.name, name, "us", ours, others, is_speedup=True)
        for name, others in values.items()
    ]
    if workload.bound_s is not None:
        bound = [workload.bound_s * 1e6 / len(items)] * rounds
        lines.append(
            Line(area, workload.name, "the least possible", "us", ours, bound, workload.target)
        )
    return lines


def _turn(name, call, workload, way, expected):
    """Return a function that measures an item [us], and makes sure that the answers are those of a
    plain loop.
    """
    items, answers = workload.items[way], []
    measure = timed(lambda: answers.extend(call(workload.fn, items)), len(items))
    in_order = (lambda found: sorted(found, key=repr)) if way == "unordered" else list

    def turn():
        answers.clear()
        took = measure()
        found = [workload.key(answer) for answer in answers]
        if in_order(found) != in_order(expected):
            raise WrongAnswersError(
                f"{name}, {workload.name}, {WAYS[way]}: {found[:3]} ... and not {expected[:3]} ..."
            )
        answers.clear()
        return took

    return turn


def checked(name, call, expected, per=1):
    """Return a function that measures a call [us], as `timed` does, and makes sure that it answers
    what is expected.
    """
    answers = []
    measure = timed(lambda: answers.append(call()), per)

    def turn():
        answers.clear()
        took = measure()
        found = list(answers.pop())
        if found != expected:
            wrong = (
                f"{len(found)} answers, {found[:3]} ..., and not {len(expected)},"
                f" {expected[:3]} ..."
            )
            raise WrongAnswersError(f"{name}: {wrong}")
        return took

    return turn


SAME = 1e-4
"""So far apart may numbers be that are the same but for the order in which they were added up."""


def check_same(found):
    """Make sure that all have come to the same numbers, but for the order in which they have added
    up.

    Raises:
        WrongAnswersError: One has not.
    """
    for name, theirs in found.items():
        _check_same(f"{name} has trained something else than raypool", theirs, found["raypool"])


def note_same(found, name, numbers):
    """Note what somebody has come to, and make sure that it was the same before.

    Raises:
        WrongAnswersError: It was not.
    """
    _check_same(
        f"{name} has trained something else than before", numbers, found.setdefault(name, numbers)
    )


def _check_same(wrong, theirs, ours):
    apart = max((abs(mine - other) for mine, other in zip(ours, theirs, strict=True)), default=0.0)
    if not apart <= SAME:
        raise WrongAnswersError(f"{wrong}: numbers are up to {apart:g} apart")
