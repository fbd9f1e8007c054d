"""The training of the launchers: a small network on made-up data, in the same order for all."""

from __future__ import annotations

import json
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trainings import SIZES
from benchmarks.trainings import optimizer_of as optimizer_of

SIZE = SIZES["small"]
RANKS = 2


def network():
    """Return the network, with the same weights on all ranks."""
    torch.manual_seed(0)
    return SIZE.network()


def loader():
    """Return all that there is, in batches as a rank takes them; whoever launches gives each rank
    its share of these.
    """
    return DataLoader(TensorDataset(*SIZE.samples()), batch_size=SIZE.batch // RANKS)


def train(model, optimizer, batches, backward=torch.Tensor.backward):
    """Train; return when the first step was done (Unix time [s]), and the weights in the end."""
    first_step_at = None
    for _ in range(SIZE.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            first_step_at = first_step_at or time.time()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"first_step_at": first_step_at, "weights": weights.tolist()}


def show(outcome):
    """Print what has come of it."""
    print(json.dumps(outcome), flush=True)
