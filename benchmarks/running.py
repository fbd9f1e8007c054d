"""One benchmark after the other: what comes next and how long it may take is said, and one that
fails does not end the others.
"""

from __future__ import annotations

import sys
import time
import traceback
from importlib import import_module

from benchmarks.machine import machine
from benchmarks.records import described_by, duration_s, keep
from benchmarks.session import WORKERS, session
from benchmarks.suite import ON_RAY, SUITE


class Run:
    """The benchmarks of one call: what they have found, and which of them have failed.

    Attributes:
        found: The lines of all that have ended, in order.
        failed: What was wrong with the others, by their name.
    """

    def __init__(self, names):
        self.names = list(names)
        self.found = []
        self.failed = {}
        self._num_begun = 0

    def measure_all(self):
        """Measure first what is in processes of its own, then what takes part in a session on
        Ray.
        """
        known = [took for name in self.names if (took := duration_s(name)) is not None]
        if known:
            say(
                f"{len(self.names)} benchmarks, of which {len(known)} took {minutes(sum(known))}"
                " when they were last measured"
            )
        for name in self.names:
            if name not in ON_RAY:
                try:
                    self.measure(name, SUITE[name])
                except Exception as error:
                    self._note(name, error)
        self._measure_on_ray([name for name in self.names if name in ON_RAY])

    def _measure_on_ray(self, left):
        """Measure in one session; in a new one after a failure, as nobody knows what that has left
        behind.
        """
        while left:
            try:
                with session() as parties:
                    while left:
                        self.measure(left[0], SUITE[left[0]], parties)
                        left.pop(0)
            except Exception as error:
                self._note(left.pop(0) if left else "the end of the session", error)

    def measure(self, name, title, *arguments, described=None, kept_as=None):
        """Run a benchmark, and keep what it has found."""
        self._num_begun += 1
        before = duration_s(kept_as or name)
        expected = "" if before is None else f": {minutes(before)} the last time"
        say(f"[{self._num_begun}/{len(self.names)}] {name}{expected} ...")
        started, here = time.perf_counter(), machine()
        lines = import_module(f"benchmarks.bench_{name}").run(*arguments)
        took = round(time.perf_counter() - started, 1)
        keep(
            kept_as or name,
            title,
            described_by(name),
            lines,
            {**here, **(described or {}), "workers": WORKERS},
            took,
        )
        say(f"[{self._num_begun}/{len(self.names)}] {name}: took {minutes(took)}")
        self.found += lines

    def _note(self, name, error):
        self.failed[name] = f"{type(error).__name__}: {error}"
        traceback.print_exception(error)
        say(f"{name} has failed; the others go on")


def say(text):
    """Say how it goes, at once, and not among the numbers."""
    print(text, file=sys.stderr, flush=True)


def minutes(seconds):
    """Return how long something takes, in words.

    Example:
        >>> minutes(35.2), minutes(150.0)
        ('35 s', '2.5 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
