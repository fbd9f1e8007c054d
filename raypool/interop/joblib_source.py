"""Where joblib's backend gets its pool from."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.pool import ParallelPool, gcp, parpool
from raypool.profile_files import resolve_profile
from raypool.view import PoolView


class PoolSource:
    """Where a backend's pool comes from: it is the one given, else the current one, else one that is opened, and kept."""

    def __init__(self, pool: PoolView | None, opening: dict[str, Any]) -> None:
        if pool is not None and not isinstance(pool, PoolView):
            raise InvalidTypeError(f"pool={pool!r} is not a pool. Give what parpool() returns, or a part or view of it.")
        if pool is not None and opening:
            raise InvalidValueError(
                f"The backend raypool was given a pool, and {', '.join(opening)} to open another. Give one or the other."
            )
        self._given = pool
        self._opening = opening
        self._opened: ParallelPool | None = None
        self._has_noted = False
        self._lock = threading.Lock()

    def find(self, n_jobs: int) -> PoolView:
        """Return the pool; one that is opened here has no more workers than `n_jobs` asks for.

        Raises:
            PoolClosedError: The one given was shut down.
            ResourceError: It is a part without workers.
            Exception: What `parpool` raises.
        """
        if self._given is not None:
            self._given._engine_here()
            return self._given
        with self._lock:
            if not self._opening and (current := gcp(create=False)) is not None:
                return current
            if self._opened is None or self._opened.is_closed:
                opening = {"num_workers": (1, n_jobs) if n_jobs > 1 else None, **self._opening}
                self._opened = parpool(**opening)
            return self._opened

    def close(self) -> None:
        """End the pool that was opened here, if one was; nobody waits for it, since this may be called by a finalizer."""
        pool, self._opened = self._opened, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_on_ray(self) -> bool:
        """Whether the workers are processes; nothing is opened to find out."""
        pool = self._given or self._opened or (None if self._opening else gcp(create=False))
        if pool is not None:
            return pool._engine.profile.backend == "ray"
        opening = {"profile": "local", **self._opening}
        opening.pop("num_workers", None)
        return resolve_profile(opening.pop("profile"), opening).backend == "ray"

    def note_too_many(self, n_jobs: int, size: int) -> None:
        """Say, once, that there are fewer workers than `n_jobs` asks for: no result depends on it, so it is no error."""
        if not self._has_noted:
            self._has_noted = True
            warnings.warn(
                f"n_jobs={n_jobs} is more than the number of workers that the pool has, {size}: all of them are used. "
                "Open the pool with more, or leave n_jobs out.",
                stacklevel=5,
            )
