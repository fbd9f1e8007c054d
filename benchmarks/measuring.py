"""How everything here is measured: in turns, so that whatever else the machine does falls on all of them alike."""

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

    `values` are raypool's, one for each round; `others` those of the other party in the same rounds (None: `values` are held
    against the target as they are). The line says how many times `values` is of `others`, or with `is_speedup` the other way
    round. Without a target it is there to be known. `reason` says why a target is missed, where it is known.
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
        return cls(**{field.name: entry[field.name] for field in fields(cls) if field.name in entry})

    def ratios(self):
        """Return the number that the target is about, for each round."""
        if self.others is None:
            return self.values
        pairs = zip(self.values, self.others, strict=True)
        return [other / value if self.is_speedup else value / other for value, other in pairs]

    def shares(self):
        """Return how many times as much as the other party raypool takes, in each round: below 1 it is ahead."""
        return [value / other for value, other in zip(self.values, self.others, strict=True)]

    def is_met(self):
        """Whether the median meets the target; None without one."""
        if self.target is None:
            return None
        ratio = median(self.ratios())
        return ratio >= self.target if self.is_speedup else ratio <= self.target

    def record(self):
        """Return all of it as plain values."""
        return {**asdict(self), "ratios": self.ratios(), "median_ratio": median(self.ratios()), "is_met": self.is_met()}


def in_turns(parties, rounds=5, warm_ups=1):
    """Call each of the parties (name -> function that returns a list of numbers or one) once a round; return name -> values."""
    values = {name: [] for name in parties}
    for number in range(-warm_ups, rounds):
        for name, measure in parties.items():
            value = measure()
            if number >= 0:
                values[name].append(value)
    return values


def in_turns_within(budget_s, parties, rounds=5, slow_s=60.0, clock=time.monotonic):
    """Do as `in_turns`, without warm-ups, in `budget_s` [s] unless the first round alone takes longer.

    Who has taken more than `slow_s` [s] has that one turn only; and nobody has one that would not end in time. What somebody has
    belongs to the first rounds, so ratios are taken with as many of the others' values.
    """
    values = {name: [] for name in parties}
    took_s = {}
    ends = clock() + budget_s
    for number in range(rounds):
        for name, measure in parties.items():
            started = clock()
            is_left_out = number > 0 and (took_s[name] > slow_s or started + took_s[name] > ends or len(values[name]) < number)
            if not is_left_out:
                values[name].append(measure())
                took_s[name] = clock() - started
    return values


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
    """Run a program in a new interpreter; return the last line that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.strip().splitlines()[-1]
