"""Which losses are means over their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from raypool.errors import InvalidValueError
from raypool.train import fit_loop


def is_mean_over_samples(
    loss_fn: Any, outputs: Any, targets: Any, loss: torch.Tensor, num_samples: int | None = None
) -> bool:
    num_samples = len(targets) if num_samples is None else num_samples
    return fit_loop.is_mean_over_samples(loss_fn, outputs, targets, loss, num_samples)


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


def per_positive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As the losses of detectors: few samples are positive."""
    loss = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
    return loss / targets.sum().clamp(min=1)


def per_unlike(value: int) -> Any:
    """Return the mean over the samples whose target is another one."""

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(outputs, targets, reduction="none")
        return each.sum() / (targets != value).sum().clamp(min=1)

    return loss_fn


def against_each_other(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """As contrastive losses."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def test_some_losses_only_look_like_sums() -> None:
    outputs = torch.linspace(-1, 1, 16)
    for num_positives in (0, 1, 2):
        targets = torch.zeros(16)
        targets[:num_positives] = 1
        loss = per_positive(outputs, targets)
        assert not is_mean_over_samples(per_positive, outputs, targets, loss)
    alike, targets = torch.ones(4, 3), torch.arange(4)
    loss = against_each_other(alike, targets)
    assert not is_mean_over_samples(against_each_other, alike, targets, loss)


@pytest.mark.parametrize("value", [0, 1])
def test_a_mean_over_chosen_samples_of_which_a_share_has_none(value: int) -> None:
    loss_fn, targets = per_unlike(value), torch.full((7,), value)
    loss = loss_fn(OUTPUTS, targets)
    assert not is_mean_over_samples(loss_fn, OUTPUTS, targets, loss)


def test_samples_may_be_in_another_dimension() -> None:
    """As sequences whose steps come first."""

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed(outputs.flatten(0, 1), targets.flatten()) / outputs.shape[1]

    outputs, targets = OUTPUTS[:, None].repeat(1, 4, 1), CLASSES[:, None].repeat(1, 4)
    assert not is_mean_over_samples(loss_fn, outputs, targets, loss_fn(outputs, targets), 4)


def test_a_sum_of_tiny_losses_is_refused_and_their_mean_is_not() -> None:
    outputs, targets = OUTPUTS[:, 0] * 1e-6, OUTPUTS[:, 1] * 1e-6

    def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum()

    with pytest.raises(InvalidValueError, match="returns the sum over its samples"):
        is_mean_over_samples(squares, outputs, targets, squares(outputs, targets))
    mean = functional.mse_loss
    assert is_mean_over_samples(mean, outputs, targets, mean(outputs, targets))


def test_losses_that_cancel_each_other_have_a_mean() -> None:
    def signed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * targets).mean()

    outputs, signs = torch.full((6,), 0.1), torch.tensor([1.0, 1, 1, -1, -1, -1])
    assert is_mean_over_samples(signed, outputs, signs, signed(outputs, signs))


def test_a_loss_that_takes_no_other_targets_is_no_mean_either() -> None:
    def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.unique().numel() == 1:
            raise ValueError
        return summed(outputs, targets)

    assert not is_mean_over_samples(picky, OUTPUTS, CLASSES, picky(OUTPUTS, CLASSES))


def test_what_cannot_be_told() -> None:
    one = OUTPUTS[:1]
    assert is_mean_over_samples(summed, one, CLASSES[:1], summed(one, CLASSES[:1]))
    assert is_mean_over_samples(summed, {"logits": OUTPUTS}, CLASSES, summed(OUTPUTS, CLASSES))
    own = OUTPUTS.mean()  # the model returns its loss
    assert is_mean_over_samples(lambda outputs, targets: outputs, own, CLASSES, own)
