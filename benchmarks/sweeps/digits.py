"""The training of the sweeps: networks that read handwritten digits, 24 of them, each with its own seed."""

from __future__ import annotations

import functools
import itertools
import json

import torch
from sklearn.datasets import load_digits

EPOCHS = 8
BATCH_SIZE = 64
WIDTHS = (16, 32, 64, 128)
RATES = (0.0003, 0.001, 0.01)
DEPTHS = (1, 2)

CONFIGS = [
    {"width": width, "lr": lr, "depth": depth, "seed": number}
    for number, (width, lr, depth) in enumerate(itertools.product(WIDTHS, RATES, DEPTHS))
]


@functools.cache
def digits():
    """Return the images (N, 64), brightness 0 to 1, and what digit each is (N); once in a process."""
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images, dtype=torch.float32) / 16, torch.as_tensor(labels)


def network(width, depth):
    """Return a network with so many hidden layers of this width."""
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU()]
    for _ in range(depth - 1):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def train(config):
    """Train one network; return the share of the digits that it reads right, of those that it was not trained on."""
    torch.set_num_threads(1)  # the other cores are for the other workers
    torch.manual_seed(config["seed"])
    images, labels = digits()
    is_test = torch.arange(len(images)) % 5 == 0
    model = network(config["width"], config["depth"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for _ in range(EPOCHS):
        for batch in torch.nonzero(~is_test)[:, 0][torch.randperm(int((~is_test).sum()))].split(BATCH_SIZE):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = model(images[is_test]).argmax(dim=1) == labels[is_test]
    return right.float().mean().item()


def show(scores):
    """Print the scores, in the order of the configurations."""
    print(json.dumps(list(scores)))
