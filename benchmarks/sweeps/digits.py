"""The training of the sweeps: the demo's fully connected networks, on its data, for as many epochs;
four of each.

With `SHORT_SWEEP` set, it is 16 of them, for a quarter of the epochs. It is written out here, without raypool, so that no other system imports that; a test holds it
against the demo's own. The demo's convolutional networks are left out: with them there would be no
time for five turns.
"""

from __future__ import annotations

import functools
import itertools
import json
import os

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

IS_SHORT = "SHORT_SWEEP" in os.environ
EPOCHS = 6 if IS_SHORT else 25
BATCH_SIZE = 64
WIDTHS = (32, 128)
RATES = (0.0003, 0.001, 0.01)
TIMES = 4

CONFIGS = [
    {"width": width, "lr": lr, "seed": number}
    for number, (width, lr, _) in enumerate(itertools.product(WIDTHS, RATES, range(TIMES)))
][: 16 if IS_SHORT else None]


@functools.cache
def digits():
    """Return the images (N, 1, 8, 8) to train on and to test with, and what digit each is (N); once
    in a process.
    """
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return [torch.as_tensor(part) for part in parts]


def network(width):
    """Return a network with two hidden layers of this width."""
    hidden = [
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
    ]
    return torch.nn.Sequential(torch.nn.Flatten(), *hidden, torch.nn.Linear(width, 10))


def train(config):
    """Train one network; return the share of the digits that it reads right, of those that it was
    not trained on.
    """
    torch.set_num_threads(1)  # the other cores are for the other workers
    torch.manual_seed(config["seed"])
    images, test_images, labels, test_labels = digits()
    model = network(config["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return int((model(test_images).argmax(dim=1) == test_labels).sum()) / len(test_labels)


def show(scores):
    """Print the scores, in the order of the configurations."""
    print(json.dumps(list(scores)))
