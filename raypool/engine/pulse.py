"""Whether a process of this machine has ended, found out in a microsecond: it is asked before each call to a worker."""

from __future__ import annotations

import os
import select
import weakref


class Pulse:
    """Feels whether a process lives, which need not be a child of this one; a zombie has ended, once its last thread has.

    Raises:
        ProcessLookupError: There is none of this number.
    """

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)  # it can be read once the process has ended
        weakref.finalize(self, os.close, self._handle)

    @property
    def has_ended(self) -> bool:
        """Whether it has; any thread may ask."""
        ends = select.poll()  # one that two threads use raises an error
        ends.register(self._handle, select.POLLIN)
        return bool(ends.poll(0))
