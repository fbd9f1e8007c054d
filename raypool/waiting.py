"""Functions over several futures: wait for them, read them as they end, and go on with what they gave."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.futures import Future

T = TypeVar("T")


def fetch_next(futures: Sequence[Future[T]], timeout_s: float | None = None) -> tuple[int, T]:
    """Return the next result that has not been read, in the order in which they end, with its place in `futures`.

    Args:
        futures: Futures of any pools.
        timeout_s: Longest wait [s]; None waits for ever.

    Raises:
        ValueError: All have been read.
        TimeoutError: None has ended in time; nothing is marked as read.
        Exception: The task's own exception, or `CancelledError`; the future counts as read.

    Source:
        MATLAB R2025b, fetchNext.

    Example:
        >>> from raypool import parpool
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     fetch_next([pool.parfeval(abs, -3)])
        (0, 3)
    """
    unread = [future for future in _checked(futures) if not future.read]
    if not unread:
        raise InvalidValueError("There is no future left to read.")
    finished = concurrent.futures.wait(unread, timeout_s, concurrent.futures.FIRST_COMPLETED).done
    if not finished:
        raise TimeoutError(f"None of {len(unread)} futures has ended within {timeout_s} s; they go on.")
    first = min(finished, key=_ended_at)
    first.read = True  # type: ignore[attr-defined]
    return next(i for i, future in enumerate(futures) if future is first), first.result()


def _ended_at(future: Any) -> datetime:
    return future.finished_at or datetime.now(UTC)


def fetch_outputs(futures: Sequence[Future[T]], stack: bool = False) -> Any:
    """Wait for all, mark them as read, and return their results in the order of `futures`.

    Args:
        futures: Futures of any pools.
        stack: Return one NumPy array, the results one below the other, instead of a list.

    Raises:
        InvalidValueError: The results have shapes that do not stack; each is still there in its future.
        Exception: The first exception among them.

    Source:
        MATLAB R2025b, fetchOutputs.
    """
    for future in _checked(futures):
        future.read = True
    results = [future.result() for future in futures]
    if not stack:
        return results
    import numpy as np

    rows = [np.atleast_2d(np.asarray(result)) for result in results]
    widths = {row.shape[1:] for row in rows}
    if len(widths) > 1:
        raise InvalidValueError(
            f"The results do not stack: their rows have the shapes {sorted(widths)}. Use stack=False for a list."
        )
    return np.concatenate(rows)


def wait(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
    """Wait until all have ended, in whatever way; return whether they have, after at most `timeout_s` seconds. Never raises.

    Source:
        MATLAB R2025b, wait.
    """
    return not concurrent.futures.wait(_checked(futures), timeout_s).not_done


def _checked(futures: Iterable[Future[T]]) -> list[Future[T]]:
    checked = list(futures)
    for future in checked:
        if not isinstance(future, Future):
            raise InvalidTypeError(f"{future!r} is not a future of a pool.")
    return checked
