"""How everything here is measured: in turns, so that whatever else the machine does falls on all of
them alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Line:
    """One line of the table: something measured, and what it is to be held against.

    `values` are raypool's, one for each round; `others` those of the other party in the same rounds
    (None: `values` are held against the target as they are). The line says how many times `values`
    is of `others`, or with `is_speedup` the other way round. Without a target it is there to be
    known. `reason` says why a target is missed, where it is known.
    """

    area: str
    what: str
    against: str
    unit: str
    values: list[float]
    others: list[float] | None = None
    target: float | None = None
    is_speedup: bool = False
    note: str = ""
    reason: str = ""

    @classmethod
    def of_record(cls, entry):
        """Return the line that a record was made of."""
        return cls(
            **{field.name: entry[field.name] for field in fields(cls) if field.name in entry}
        )

    def ratios(self):
        """Return the number that the target is about, for each round."""
        if self.others is None:
            return self.values
        pairs = zip(self.values, self.others, strict=True)
        return [other / value if self.is_speedup else value / other for value, other in pairs]

    def shares(self):
        """Return how many times as much as the other party raypool takes, in each round: below 1 it
        is ahead.
        """
        return [value / other for value, other in zip(self.values, self.others, strict=True)]

    def is_met(self):
        """Whether the median meets the target; None without one."""
        if self.target is None:
            return None
        ratio = median(self.ratios())
        return ratio >= self.target if self.is_speedup else ratio <= self.target

    def record(self):
        """Return all of it as plain values."""
        return {
            **asdict(self),
            "ratios": self.ratios(),
            "median_ratio": median(self.ratios()),
            "is_met": self.is_met(),
        }


def in_turns(parties, rounds=5, warm_ups=1):
    """Call each of the parties (name -> function that returns a list of numbers or one) once a
    round; return name -> values.
    """
    values = {name: [] for name in parties}
    for number in range(-warm_ups, rounds):
        for name in order_of(list(parties), number):
            value = parties[name]()
            if number >= 0:
                values[name].append(value)
    return values


def order_of(names, number):
    """Return the order of a round: in as many rounds as there are names each comes first once, and
    hardly twice after the same.

    So whatever somebody leaves to be cleaned up does not always fall on the same party.

    Example:
        >>> order_of(["a", "b", "c", "d"], 0), order_of(["a", "b", "c", "d"], 1)
        (['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'])
    """
    # 0, 1, -1, 2, -2, ...
    to_and_fro = [(at + 1) // 2 * (1 if at % 2 else -1) for at in range(len(names))]
    return [names[(at + number) % len(names)] for at in to_and_fro]


def in_turns_within(budget_s, parties, rounds=5, slow_s=60.0, clock=time.monotonic):
    """Do as `in_turns`, without warm-ups, in `budget_s` [s] unless the first round alone takes
    longer.

    Who has taken more than `slow_s` [s] has that one turn only, and a round has only those whose
    turns would end in time, by what their last ones took: the first of the parties before all
    others, so nobody has more turns than it. What somebody has belongs to the first rounds, so
    ratios are taken with as many of the others' values.
    """
    first, *_ = left = list(parties)
    values = {name: [] for name in parties}
    took_s = {}
    ends = clock() + budget_s
    for number in range(rounds):
        if number > 0:
            left = _in_time(
                [name for name in left if took_s[name] <= slow_s], took_s, ends - clock()
            )
        if left[:1] != [first]:
            break
        for name in order_of(left, number):
            started = clock()
            values[name].append(parties[name]())
            took_s[name] = clock() - started
    return values


def _in_time(names, took_s, left_s):
    """Return those who can have a turn in the time that is left [s]."""
    chosen = []
    for name in names:
        if took_s[name] <= left_s:
            left_s -= took_s[name]
            chosen.append(name)
    return chosen


def timed(call, per=1):
    """Return a function that measures a call [us], divided by the number of things that it does."""

    def measure():
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) / per * 1e6

    return measure


def percentile(values, percent):
    """Return the value that `percent` of them do not exceed."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)]


def search_path():
    """Return `PYTHONPATH` for processes that import from here too."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def fresh_process(program, *arguments):
    """Run a program in a new interpreter; return the last line that it prints.

    Modules are compiled once, as those of an installed package are, whatever the shell says.
    """
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.strip().splitlines()[-1]
