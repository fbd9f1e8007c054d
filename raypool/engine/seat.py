"""A place of a pool on Ray, as the backend knows it."""

from __future__ import annotations

import weakref
from typing import Any

import ray

from raypool.engine import outside
from raypool.engine.claims import Claim
from raypool.engine.pulse import Pulse


class Seat:
    """A place: a claim, and the actor in it."""

    __slots__ = (
        "__weakref__",
        "actor",
        "calls",
        "claim",
        "is_ending",
        "is_spent",
        "known",
        "place",
        "pulse",
        "run",
        "stale",
        "worker_id",
    )

    def __init__(self, place: int, claim: Claim) -> None:
        self.place = place
        self.claim = claim
        self.worker_id = -1
        self.actor: Any = None
        self.run: Any = None  # its method, ready to be called
        self.known: set[int] = set()  # functions that the worker has
        self.pulse: Pulse | None = None  # if its process is on this machine
        self.calls = 0  # in flight
        self.is_ending = False  # the worker is lost, or about to be killed
        self.is_spent = False  # the worker is to be replaced, and has said so
        self.stale: list[int] = []  # those of them that nobody will call again

    def is_dead(self) -> bool:
        """Whether the worker is dead already, as far as is known here: what is sent to it now would never begin."""
        if not ray.is_initialized() or self.actor is None:
            return True
        if self.pulse is not None and self.pulse.has_ended:
            return True  # Ray hears of it some tenths of a second later
        return outside.is_dead(self.actor)


def note_stale(seat_ref: weakref.ref[Seat], fn_id: int) -> None:
    """Note that nobody will call a function again that the worker in a place has."""
    seat = seat_ref()
    if seat is not None:
        seat.stale.append(fn_id)
