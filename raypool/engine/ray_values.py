"""The return values of a call to a Ray worker: in the message, or still in Ray's object store."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray import exceptions as rx

from raypool.channel.records import Missing
from raypool.engine import outside, packing
from raypool.engine.ray_failures import loss_text
from raypool.errors import SerializationError, TaskError

_stored: weakref.WeakSet[StoredValues] = weakref.WeakSet()
_stored_lock = threading.Lock()


def bring_home() -> None:
    """Fetch the values that somebody still holds a future of: with Ray they would go too."""
    with _stored_lock:
        stored = list(_stored)
    for values in stored:
        with contextlib.suppress(Exception):  # it says so to whoever asks for it
            values.get()


class StoredValues:
    """Values of a call that are too large for a message: they stay in Ray's object store until somebody asks.

    `note_bytes` is told then how many bytes they are.
    """

    __slots__ = ("__weakref__", "_lock", "_note_bytes", "_ref", "_values")

    def __init__(self, ref: ray.ObjectRef[Any], note_bytes: Callable[[int], object]) -> None:
        self._ref: ray.ObjectRef[Any] | None = ref
        self._note_bytes = note_bytes
        self._values: list[Any] = []
        self._lock = threading.Lock()
        with _stored_lock:
            _stored.add(self)

    def get(self) -> list[Any]:
        """Map them into this process, at the first call."""
        with self._lock:
            if self._ref is not None:
                if not ray.is_initialized():  # asking would start a new one
                    raise TaskError("A result is lost: Ray was shut down before anybody asked for it.")
                try:
                    parcel = packing.Parcel(*outside.fetched(self._ref))
                except (rx.RayError, ValueError) as error:
                    raise TaskError(f"A result that was there is lost: {loss_text(error)}.") from error
                self._note_bytes(parcel.num_bytes)
                self._values = loaded(parcel)
                self._ref = None
            return self._values


class MessageValues:
    """Values of a call that came in the message: they are unpickled by whoever asks first."""

    __slots__ = ("_header", "_values")

    def __init__(self, header: bytes) -> None:
        self._header: bytes | None = header
        self._values: list[Any] = []

    def get(self) -> list[Any]:
        """Unpickle them, at the first call."""
        header = self._header
        if header is not None:
            self._values = loaded(packing.Parcel(header, [], []))
            self._header = None
        return self._values


def loaded(parcel: packing.Parcel) -> list[Any]:
    """Unpickle the values of a call, each by itself."""
    values = packing.load_each(parcel)
    for position, value in enumerate(values):
        if type(value) is packing.Unloadable:
            error = SerializationError(
                f"A result has arrived but cannot be unpickled here ({type(value.error).__name__}: {value.error}). "
                "Its class must be importable in this process too.",
                what="a result",
            )
            error.__cause__ = value.error
            values[position] = Missing(error)
    return values
