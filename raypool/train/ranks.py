"""The ranks of a training by `pool.fit`, as one of them sees them: who it is, and what they agree on. For workers only."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from raypool.train.data import mixed_seed


class Ranks:
    """All ranks, as one of them sees them; a single one needs no process group.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        device: Where it computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def add(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Return the sums of numbers over all ranks, the same to the last bit on each. It waits for the device, once."""
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        together = torch.stack(numbers)
        if self.size > 1:
            dist.all_reduce(together)
        return [float(value) for value in together.tolist()]

    def any(self, wish: bool) -> bool:
        """Whether any rank says so."""
        return wish if self.size == 1 else self.add([float(wish)])[0] > 0

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give these tensors of all ranks the values that rank 0 has."""
        if self.size == 1:
            return
        for tensor in tensors:
            if tensor.numel():
                values = tensor.detach().contiguous()
                dist.broadcast(values.reshape(-1).view(torch.uint8), src=0)  # as bytes: gloo does not know all types
                tensor.detach().copy_(values)

    def wait(self) -> None:
        """Wait for all ranks, and for what the device still does."""
        self.any(False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seed(self, seed: int, *others: int) -> None:
        """Seed what a model or data set may draw from, differently on each rank."""
        seed_all(mixed_seed(seed, *others, self.rank))


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were: the worker, or with "inline" the user's process, has other uses for them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
