"""Which losses are means over their samples."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from raypool.errors import InvalidValueError
from raypool.train.fit_loop import is_mean_over_samples

OUTPUTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 0, 1, 2])


def some_ignored(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=2)


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 5.0, 1.0], dtype=outputs.dtype)
    return functional.cross_entropy(outputs, targets, weight=weight)


def in_one_half(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over chosen samples, all of which are in the first half."""
    chosen = outputs[:, 0] == OUTPUTS[0, 0]
    each = functional.cross_entropy(outputs, targets, reduction="none")
    return (each * chosen).sum() / chosen.sum().clamp(min=1)


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


def compared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.pdist(outputs).mean()


def by_all_seven(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.reshape(7, 3), targets)


def test_means() -> None:
    means = {
        functional.cross_entropy: True,
        some_ignored: False,
        weighted: False,
        in_one_half: False,
        compared: False,
        by_all_seven: True,
    }
    for loss_fn, is_mean in means.items():
        assert (
            is_mean_over_samples(loss_fn, OUTPUTS, CLASSES, loss_fn(OUTPUTS, CLASSES)) is is_mean
        ), loss_fn
    for loss_fn, is_mean in ((functional.cross_entropy, True), (weighted, False)):
        outputs = OUTPUTS.to(torch.float64)
        assert is_mean_over_samples(loss_fn, outputs, CLASSES, loss_fn(outputs, CLASSES)) is is_mean


def test_a_sum_is_refused() -> None:
    for outputs in (OUTPUTS, OUTPUTS.double(), OUTPUTS.bfloat16()):
        with pytest.raises(InvalidValueError, match="returns the sum over its samples"):
            is_mean_over_samples(summed, outputs, CLASSES, summed(outputs, CLASSES))


def test_what_cannot_be_told() -> None:
    one = OUTPUTS[:1]
    assert is_mean_over_samples(summed, one, CLASSES[:1], summed(one, CLASSES[:1]))
    assert is_mean_over_samples(summed, {"logits": OUTPUTS}, CLASSES, summed(OUTPUTS, CLASSES))
