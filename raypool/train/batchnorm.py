"""Running statistics of normalization layers, merged over the ranks, each of which has seen its own samples. For workers only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from raypool.train.ranks import Ranks


def merge_buffers(module: nn.Module, ranks: Ranks, weight: float) -> None:
    """Give all ranks the same buffers, to the last bit.

    Running means and variances become those of all ranks' samples together: with the weights w, means m and variances v of the
    ranks, the mean is M = sum(w m), the variance sum(w (v + (m - M)^2)). All other buffers become those of rank 0.

    Args:
        module: The model.
        ranks: The ranks.
        weight: This rank's part of each mini-batch.

    Source:
        Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances", for parts of
        any sizes.
    """
    if ranks.size == 1:
        return
    layers = list(_layers(module))
    statistics = {id(tensor) for layer in layers for tensor in layer}
    for dtype in sorted({mean.dtype for mean, _ in layers}, key=str):
        same = [layer for layer in layers if layer[0].dtype is dtype]
        _merge([mean for mean, _ in same], [variance for _, variance in same], ranks, weight)
    ranks.broadcast([buffer for buffer in module.buffers() if id(buffer) not in statistics])


def _layers(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the running mean and variance of each layer that keeps them: BatchNorm, and InstanceNorm that tracks them."""
    for layer in module.modules():
        mean, variance = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
        if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor):
            yield mean, variance


@torch.no_grad()
def _merge(means: list[torch.Tensor], variances: list[torch.Tensor], ranks: Ranks, weight: float) -> None:
    own_mean = torch.cat([mean.flatten() for mean in means]).double()
    own_variance = torch.cat([variance.flatten() for variance in variances]).double()
    mean = own_mean * weight
    dist.all_reduce(mean)
    variance = (own_variance + (own_mean - mean) ** 2) * weight
    dist.all_reduce(variance)
    ranks.broadcast([mean, variance])  # torch does not promise that a sum has the same bits everywhere
    _put(mean, means)
    _put(variance, variances)


def _put(values: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Cut values into what belongs to each target."""
    for target, part in zip(targets, values.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view_as(target))
