"""How one can tell that an error is no fault of this rank's: the connection to another one broke."""

from __future__ import annotations

import sys

MARKS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Application timeout caused pair closure",  # a group that was closed here while another thread waited in it
    "NCCL communicator was aborted",
)
"""What gloo and NCCL say, as a plain RuntimeError, when a rank has gone."""


def is_disconnect(error: BaseException | None) -> bool:
    """Whether an error means that the connection to other ranks broke: in raypool's collectives, or in the user's own of torch.

    An error that was raised because of such a one, or while it was handled, is one too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _is_itself(error):
            return True
        error = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__
    return False


def _is_itself(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    base = getattr(distributed, "DistError", None)
    if base is not None and isinstance(error, base):
        return "failed to listen" not in str(error)  # its own port is taken, which is no other rank's fault
    return type(error) is RuntimeError and any(mark in str(error) for mark in MARKS)
