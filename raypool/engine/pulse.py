"""Whether a process of this machine has ended, found out in a microsecond: it is asked before each call to a worker."""

from __future__ import annotations

import os
import select
import weakref


class Pulse:
    """Feels whether a process lives, which need not be a child of this one; a zombie has ended.

    Raises:
        ProcessLookupError: There is none of this number.
    """

    __slots__ = ("__weakref__", "_ends")

    def __init__(self, pid: int) -> None:
        handle = os.pidfd_open(pid)  # it can be read once the process has ended
        self._ends = select.poll()
        self._ends.register(handle, select.POLLIN)
        weakref.finalize(self, os.close, handle)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return bool(self._ends.poll(0))
