"""The same systems when something ends before its time, or never: cancelled, killed, or a list
without end. One worker each.

"Cancelled": a call that would run for 60 s is ended, until the next one has run. Only raypool stops
the call itself; the actor is killed and another started, all others end their pool and open
another. concurrent.futures cannot before Python 3.14: its `cancel` refuses what runs, and so it has
no value.

"Killed": a worker gets SIGKILL while it runs a call, until the next one has run. The lost call is
checked: raypool and dask.distributed run it again; a bare actor, Ray's Pool, concurrent.futures,
loky and MPIRE raise an error and must be opened again; multiprocessing never answers.

"Without end": a generator that never ends goes through a pool with two workers, and the first 200
results are taken. concurrent.futures (before Python 3.14), loky, dask.distributed and Ray's
ActorPool draw all items before they give the first result; they have no values. Bare actors have a
loop of ours round them, with as many calls on their way as raypool's `map`. What has no calls of
its own is left out; see `benchmarks/systems.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, in_turns
from benchmarks.peers import installed, on_one_ray
from benchmarks.session import WORKERS
from benchmarks.streams import AHEAD, STREAMS, Drawn
from benchmarks.systems import SYSTEMS, open_warm
from benchmarks.tasks import begin_and_rest

ROUNDS = 5
LONG_S = 60.0
BEGUN_WITHIN_S = 300.0  # more than 30 s were needed once, on a slow machine
DEADLINE_S = 30.0
LOST_S = 1.0  # who has nothing to say of a call by then never will
TAKEN = 200

FATES = {
    "raypool": "again",
    "bare actors of Ray": "ActorDiedError",
    "Ray's Pool": "ActorDiedError",
    "concurrent.futures": "BrokenProcessPool",
    "multiprocessing": "nothing",
    "loky": "TerminatedWorkerError",
    "MPIRE": "RuntimeError",
    "dask.distributed": "again",
}
"""What whoever waits for a call gets whose worker was killed."""


AS_MANY_AS_SAID = f"As many as `buffersize` says: {AHEAD * WORKERS}."
"""Why raypool draws more items ahead than another system, where it does."""


def run():
    names = [name for name in SYSTEMS if name in installed()]
    with on_one_ray(WORKERS):
        return [
            *_ended("cancelled", cancelled, names),
            *_ended("killed", killed, names),
            *_streams(),
        ]


def _ended(what, measure, names):
    """Return a line for each system that can go on after a call was ended in this way."""
    with contextlib.ExitStack() as stack:
        parties = {}
        for name in names:
            if measure is killed or SYSTEMS[name].stop is not None:
                system = open_warm(name, 1)
                stack.callback(system.close)
                parties[name] = lambda name=name, system=system: measure(name, system)
        values = in_turns(parties, ROUNDS, warm_ups=0)
    ours = values.pop("raypool")
    area = "until the next has run, on one worker"
    return [
        Line(area, what, name, "us", ours, theirs, is_speedup=True)
        for name, theirs in values.items()
    ]


def cancelled(name, system):
    """Return how long it takes from the end of a call until the next has run [us]."""
    with tempfile.TemporaryDirectory() as folder:
        call, _ = _begun(system, folder)
        started = time.perf_counter()
        system.stop(call)
        return _until_next(name, system, started)


def killed(name, system):
    """Return how long it takes from the death of a worker until the next call has run [us]; see to
    what becomes of the first.
    """
    with tempfile.TemporaryDirectory() as folder:
        call, pid = _begun(system, folder)
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        if FATES[name] in ("again", "nothing"):
            took = _until_next(name, system, started)
            fate = _fate(system, call)
        else:
            fate = _fate(system, call)
            system.renew()
            took = _until_next(name, system, started)
    if fate != FATES[name]:
        raise WrongAnswersError(
            f"{name}: of a call whose worker was killed there is {fate}, and not {FATES[name]}"
        )
    return took


def _begun(system, folder):
    """Begin a long call; return it, and the process that runs it."""
    path = Path(folder, "begun")
    call = system.submit(begin_and_rest, str(path), LONG_S)
    deadline = time.monotonic() + BEGUN_WITHIN_S
    while not (path.exists() and path.read_text().endswith("\n")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"A call has not begun within {BEGUN_WITHIN_S:g} s.")
        time.sleep(0.001)
    return call, int(path.read_text())


def _until_next(name, system, started):
    found = system.result(system.submit(abs, -7), DEADLINE_S)
    took = (time.perf_counter() - started) * 1e6
    if found != 7:
        raise WrongAnswersError(f"{name}: {found!r} after a call that was ended, and not 7")
    return took


def _fate(system, call):
    """Return what is said of a call whose worker was killed: its answer, the name of its error, or
    "nothing".
    """
    try:
        return system.result(
            call, LOST_S if isinstance(system, SYSTEMS["multiprocessing"]) else DEADLINE_S
        )
    except (TimeoutError, multiprocessing.TimeoutError):
        return "nothing"
    except Exception as error:
        return type(error).__name__


def _streams():
    """Return lines about a list without end."""
    names = [name for name in STREAMS if name in installed()]
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(STREAMS[name](WORKERS)) for name in names}
        values = in_turns(
            {name: lambda name=name: streamed(name, opened[name]) for name in names}, ROUNDS
        )
    whats = ("the first result", "200 results", "items drawn ahead")
    return [line for at, what in enumerate(whats) for line in _stream_lines(what, values, at)]


def _stream_lines(what, values, at):
    """Return a line for each other system about one of the numbers of a stream."""
    found = {name: [run[at] for run in runs] for name, runs in values.items()}
    ours = found.pop("raypool")
    unit, reason = ("", AS_MANY_AS_SAID) if what == "items drawn ahead" else ("us", "")
    return [
        Line("without end", what, name, unit, ours, theirs, is_speedup=True, reason=reason)
        for name, theirs in found.items()
    ]


def streamed(name, stream):
    """Return how long the first result of a generator took, and the first 200 [us], and how many
    more items were drawn then.
    """
    drawn = Drawn()
    started = time.perf_counter()
    with contextlib.closing(stream(abs, drawn)) as results:
        found = [next(results)]
        first = (time.perf_counter() - started) * 1e6
        found += itertools.islice(results, TAKEN - 1)
        took, ahead = (time.perf_counter() - started) * 1e6, drawn.count - TAKEN
        drawn.stop()
    if found != list(range(TAKEN)):
        raise WrongAnswersError(f"{name}: {found[:3]} ... of a list without end")
    return first, took, max(1, ahead)
