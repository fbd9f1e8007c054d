"""How much memory a worker uses, with all that it has started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_used(pid: int) -> int:
    """Return how much memory of their own a process and its descendants use [bytes].

    What is in files and in shared memory (values in Ray's object store) is not counted, and what a forked child shares with its
    parent is counted once.

    Source:
        Linux, proc(5): the difference of "resident" and "shared" in statm, which is cheap; where it matters "Pss_Anon" in
        smaps_rollup.
    """
    return sum(map(_own, family(pid)))


def is_over(pid: int, limit: int) -> bool:
    """Return whether a process and its descendants use more memory than this [bytes]; what is cheap is asked first."""
    return sum(map(_resident, family(pid))) > limit and memory_used(pid) > limit


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    members = [pid]
    for member in members:  # it grows meanwhile
        with contextlib.suppress(OSError):  # it has just ended
            for thread in Path(f"/proc/{member}/task").iterdir():
                members += map(int, (thread / "children").read_text().split())
    return members


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * PAGE_BYTES
    return 0


def _own(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
