"""Torch's modes, which belong to a thread: put back where a task was interrupted in the midst of `with torch.no_grad():`.

Torch leaves such a block by Python code of its own, which an interruption may hit too: no later task of the worker would train.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

DEVICES = ("cpu", "cuda")


class TorchModes(NamedTuple):
    """Whether gradients are recorded, and what autocast does on each kind of device; at first: what it is in a new thread."""

    is_grad_enabled: bool = True
    autocast: tuple[tuple[bool, Any], ...] = ()
    is_cache_enabled: bool = True
    autocast_depth: int = 0

    def put_back(self) -> None:
        """Let everything in this thread be as it was."""
        torch = _torch()
        if torch is None:
            return
        torch.set_grad_enabled(self.is_grad_enabled)
        for device, (is_enabled, dtype) in zip(DEVICES, self.autocast or [(False, None)] * len(DEVICES), strict=True):
            torch.set_autocast_enabled(device, is_enabled)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.is_cache_enabled)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > self.autocast_depth:
            pass
        if self.autocast_depth == 0:
            torch.clear_autocast_cache()  # of weights as they were then


def _torch() -> Any:
    """Return torch where somebody has imported it, all of it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "autocast_decrement_nesting") else None


def torch_modes() -> TorchModes:
    """Return how it is now in this thread."""
    torch = _torch()
    if torch is None:
        return TorchModes()
    torch.autocast_increment_nesting()
    return TorchModes(
        torch.is_grad_enabled(),
        tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )
