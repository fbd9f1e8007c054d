"""What a Ray worker answers to a call: how the outcomes of slices travel, but for their values."""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ray import cloudpickle

from raypool.channel.records import Failure, SliceResult, Values
from raypool.engine.open_call import Narrowed, RawResult
from raypool.engine.packing import INLINE_BYTES, Parcel, dump, join
from raypool.engine.ray_values import MessageValues
from raypool.errors import TaskError
from raypool.results import Results

Sendable = tuple[int, int, bytes, float, dict[int, bytes], int | None]
"""Of a `RawResult`: start, done, durations, start, errors (each pickled by itself: it may fail to be), peak memory [bytes]."""


def pack_results(results: Sequence[RawResult]) -> list[Sendable]:
    """Make the outcomes of slices ready to travel."""
    return [
        (
            result.start,
            result.done,
            result.durations_s.tobytes(),
            result.started_at,
            {index: pack_error(error) for index, error in result.errors.items()},
            result.peak_memory_bytes,
        )
        for result in results
    ]


def unpack_results(packed: Sequence[Sendable], values: Values, catch_up: Callable[[], None] | None) -> list[SliceResult]:
    """Return the outcomes of the slices of a call, whose values follow each other in `values`."""
    results = []
    offset = 0
    for start, done, durations, started_at, errors, peak_memory_bytes in packed:
        failures = {index: unpack_failure(error) for index, error in errors.items()}
        result = SliceResult(start, done, values, offset, failures, array("d", durations), started_at, catch_up)
        result.peak_memory_bytes = peak_memory_bytes
        results.append(result)
        offset += done
    return results


def pack_narrowed(narrowed: Narrowed) -> bytes:
    """Make what is done of a call that goes on ready to travel; values that are large come with its answer only."""
    values = [value for result in narrowed.results for value in result.values]
    parcel = join(values) if sum(map(_num_bytes, values)) < INLINE_BYTES else None
    if parcel is None or not parcel.is_small:
        narrowed, parcel = narrowed.without_values(), join([])
    return pickle.dumps((narrowed.attempt_id, narrowed.kept, pack_results(narrowed.results), parcel.header), protocol=5)


def _num_bytes(value: Any) -> int:
    """Return how much a value is, without pickling it: of what need not be kept as a parcel, only these can be large."""
    return len(value) if type(value) in (bytes, str) else value.num_bytes if type(value) is Parcel else 0


def unpack_narrowed(packed: bytes) -> tuple[int, tuple[int, ...], list[SliceResult]]:
    """Return the attempt, how much of each part is kept, and what is done."""
    attempt_id, kept, results, header = pickle.loads(packed)
    return attempt_id, kept, unpack_results(results, MessageValues(header), None)


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback as text; its text stands in where it can't be pickled or unpickled."""
    if isinstance(getattr(error, "results", None), Results):
        del error.results  # type: ignore[attr-defined]  # of a loop within the task; whoever is outside gets those of his own
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        parcel = dump(error, sys.maxsize)
        body = cloudpickle.dumps(error) if parcel.refs else bytes(parcel.header)
        pickle.loads(body)
    except BaseException:  # it runs code of the user's
        body = None
    return pickle.dumps((body, summary, text, [str(note) for note in getattr(error, "__notes__", ())]), protocol=5)


def unpack_failure(packed: bytes) -> Failure:
    """Return what an item has raised; of what cannot be unpickled, what was said of it."""
    body, summary, text, notes = pickle.loads(packed)
    try:
        error = pickle.loads(body)
    except BaseException:  # it runs code of the user's
        error = None
    if not isinstance(error, BaseException):
        error = TaskError(f"{summary} (the exception itself could not travel; the remote traceback is its cause)")
    with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
    return Failure(error, text)
