"""What a loss has to be for the ranks of a training to share it out. For workers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raypool.errors import InvalidTypeError, InvalidValueError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By so much the mean over parts may differ from the mean over all, for no other reason than rounding; else by a hundredth."""


def check_loss(loss: Any) -> None:
    """Raise the error for what a loss function has returned, if nothing can be learnt from it.

    Raises:
        InvalidTypeError: It is no tensor.
        InvalidValueError: It is not one number, or does not depend on the model.
    """
    if not isinstance(loss, torch.Tensor):
        raise InvalidTypeError(f"The loss function has returned a {type(loss).__name__}. It is to return a tensor, one number.")
    if loss.ndim:
        raise InvalidValueError(
            f"The loss function has returned a tensor of shape {tuple(loss.shape)}. It is to return one number, the mean over "
            "the samples it was given: reduction='mean'."
        )
    if loss.grad_fn is None:
        raise InvalidValueError("The loss does not depend on the model's parameters: is there a detach(), or an argmax()?")


def is_mean_over_samples(loss_fn: Callable[..., Any], outputs: Any, targets: Any, loss: torch.Tensor) -> bool:
    """Whether a loss of all samples is the mean of those of its two halves, as it is where each sample counts the same.

    What cannot be cut into halves counts as one: nobody can tell.
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or len(outputs) < 2:
        return True
    num_all, half = len(outputs), len(outputs) // 2
    try:
        with torch.no_grad():
            first, second = loss_fn(outputs[:half], targets[:half]), loss_fn(outputs[half:], targets[half:])
            mean = (first * half + second * (num_all - half)) / num_all
        return bool(torch.isclose(mean, loss.detach(), rtol=TOLERANCE.get(loss.dtype, 1e-2), atol=1e-7, equal_nan=True))
    except Exception:  # the function is the user's, and need not take halves
        return True
