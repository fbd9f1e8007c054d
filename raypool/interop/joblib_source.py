"""Where joblib's backend gets its pool from."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from typing import Any

from raypool.engine.ray_session import is_forked
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError
from raypool.pool import ParallelPool, gcp, open_pool
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.view import PoolView

BESIDE_THE_PROFILE = frozenset({"num_workers", "initializer", "initargs"})
"""What `parpool` takes that is no field of a profile."""


class PoolSource:
    """Where a backend's pool comes from: it is the one given, else the current one, else one that is opened, and kept.

    Attributes:
        is_said: Which pool is meant, or how to open one, was said; else the current one will do.
    """

    def __init__(self, pool: PoolView | None, opening: dict[str, Any]) -> None:
        if pool is not None and not isinstance(pool, PoolView):
            raise InvalidTypeError(f"pool={pool!r} is not a pool. Give what parpool() returns, or a part or view of it.")
        if pool is not None and opening:
            raise InvalidValueError(
                f"The backend raypool was given a pool, and {', '.join(opening)} to open another. Give one or the other."
            )
        self.is_said = pool is not None or bool(opening)
        self._given = pool
        self._opening = opening
        self._opened: ParallelPool | None = None
        self._most_asked = 0  # the largest `n_jobs` for which workers were looked for
        self._has_noted = False
        self._lock = threading.Lock()

    def find(self, n_jobs: int) -> PoolView:
        """Return the pool; one that is opened here has as many workers as the largest `n_jobs` asks for, if there is room.

        Raises:
            PoolClosedError: The one given was shut down.
            ResourceError: It is a part without workers.
            Exception: What `parpool` raises, or `pool.resize`.
        """
        if self._given is not None:
            self._given._engine_here()
            return self._given
        with self._lock:
            if not self._opening and (current := gcp(create=False)) is not None:
                return current
            if self._opened is None or self._opened.is_closed:
                self._opened = open_pool(**{"num_workers": self._wanted(n_jobs), **self._opening})
            elif n_jobs > self._most_asked and "num_workers" not in self._opening:
                _grow(self._opened, n_jobs)
            self._most_asked = max(n_jobs, self._most_asked)
            return self._opened

    def _wanted(self, n_jobs: int) -> int | tuple[int, int] | None:
        """Return how many workers a pool is to have that is opened: in this process there is room for any number."""
        settings = self._settings()
        if n_jobs <= 1 or settings.listed:
            return None
        return (1, n_jobs) if settings.backend == "ray" else n_jobs

    def _settings(self) -> Profile:
        """Return the profile of the pool that would be opened."""
        fields = {name: value for name, value in self._opening.items() if name not in BESIDE_THE_PROFILE}
        return resolve_profile(fields.pop("profile", "local"), fields)

    def close(self) -> None:
        """End the pool that was opened here, if one was; nobody waits for it, since this may be called by a finalizer."""
        pool, self._opened = self._opened, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one with the pool, or from one that uses Ray: there is no pool to be had."""
        if self._given is not None:
            return self._given._engine.is_forked
        if not self._opening and gcp(create=False) is not None:
            return False
        return self._settings().backend == "ray" and is_forked()

    @property
    def is_on_ray(self) -> bool:
        """Whether the workers are processes; nothing is opened to find out."""
        pool = self._given or self._opened or (None if self._opening else gcp(create=False))
        if pool is not None:
            return pool._engine.profile.backend == "ray"
        return self._settings().backend == "ray"

    def note_forked(self) -> None:
        """Say that everything runs in turn, as joblib's own backends do in such a process."""
        warnings.warn(
            "Loops on raypool cannot run in a process that was forked from one that uses Ray, or from the one with the pool: "
            "setting n_jobs=1. Start the process by spawn, or use joblib's threading backend in it.",
            stacklevel=_level_of_the_user(),
        )

    def note_too_many(self, n_jobs: int, size: int) -> None:
        """Say, once, that there are fewer workers than `n_jobs` asks for: no result depends on it, so it is no error."""
        if not self._has_noted:
            self._has_noted = True
            warnings.warn(
                f"n_jobs={n_jobs} is more than the number of workers that the pool has, {size}: all of them are used. "
                "Open the pool with more, or leave n_jobs out.",
                stacklevel=_level_of_the_user(),
            )


def _grow(pool: ParallelPool, num_workers: int) -> None:
    """Give a pool so many workers if it has fewer, or as many as there is room for; none where each was told what it gets."""
    if not pool._engine.profile.listed:
        with contextlib.suppress(ResourceError):
            pool._engine.grow(num_workers)


def _level_of_the_user() -> int:
    """Return the `stacklevel` for the caller's warnings that names the line which called joblib, or what is built on it."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("raypool", "joblib"):
        frame, level = frame.f_back, level + 1
    return level
