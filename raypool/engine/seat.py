"""A place of a pool on Ray, as the backend knows it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from raypool.channel.logs import Levels
from raypool.engine import outside
from raypool.engine.claims import Claim
from raypool.engine.pulse import Pulse
from raypool.engine.ray_session import is_up


class Seat:
    """A place: a claim, and the actor in it."""

    __slots__ = (
        "__weakref__",
        "actor",
        "calls",
        "claim",
        "filters",
        "is_ending",
        "is_spent",
        "known",
        "levels",
        "lock",
        "place",
        "project",
        "pulse",
        "run",
        "stale",
        "told_of",
        "worker_id",
    )

    def __init__(self, place: int, claim: Claim) -> None:
        self.place = place
        self.claim = claim
        self.actor: Any = None
        self.run: Any = None  # its method, ready to be called
        self.lock = threading.Lock()  # held by whoever tells the worker which functions to forget, or calls it
        self.take_in(-1)

    def take_in(self, worker_id: int) -> None:
        """Begin anew, with another worker."""
        self.worker_id = worker_id
        self.known: set[int] = set()  # functions that the worker has
        self.levels: Levels | None = None  # of the driver's loggers, as the worker knows them
        self.filters: tuple[bytes, ...] = ()  # for warnings, likewise
        self.stale: deque[int] = deque()  # those of them that nobody will call again
        self.project = -1  # the number of the newest snapshot of the driver's modules that the worker has
        self.calls: dict[int, int | None] = {}  # in flight, each with the one that it waits behind
        self.told_of = -1  # the last that lasted: what was sent behind it is refused, and runs elsewhere
        self.pulse: Pulse | None = None  # if its process is on this machine
        self.is_ending = False  # the worker is lost, or about to be killed
        self.is_spent = False  # the worker is to be replaced, and has said so

    def take_stale(self) -> list[int]:
        """Return the functions that the worker is to forget now; whoever asks tells it."""
        stale = [self.stale.popleft() for _ in range(len(self.stale))]
        self.known.difference_update(stale)
        return stale

    @property
    def is_idle(self) -> bool:
        """Whether the worker runs nothing, and will not either."""
        return all(behind == self.told_of for behind in list(self.calls.values()))

    def is_dead(self) -> bool:
        """Whether the worker is dead already, as far as is known here: what is sent to it now would never begin."""
        if not is_up() or self.actor is None:
            return True
        if self.pulse is not None and self.pulse.has_ended:
            return True  # Ray hears of it some tenths of a second later
        return outside.is_dead(self.actor)


def note_stale(seat_ref: weakref.ref[Seat], fn_id: int) -> None:
    """Note that nobody will call a function again that the worker in a place has."""
    seat = seat_ref()
    if seat is not None:
        seat.stale.append(fn_id)
