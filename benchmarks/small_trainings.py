"""Trainings that are too small to fill a GPU, and what is timed of them; importable by workers. On
a CPU all of it runs too.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from raypool import MetricBuffer, as_device, cpu, current_task, report
from raypool.backends.ray.mps import PIPES, USUAL, runs_in

CLASSES = 10
SAMPLES = 4096
WARM_UP = 20


def mlp():
    """Return a network of three layers: 335 thousand parameters."""
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(
        linear(784, 256), relu(), linear(256, 512), relu(), linear(512, CLASSES)
    )


def cnn():
    """Return a small convolutional network for images of 28 by 28."""
    layer, relu, pool = torch.nn.Conv2d, torch.nn.ReLU, torch.nn.MaxPool2d
    body = (
        layer(1, 16, 3, padding=1),
        relu(),
        pool(2),
        layer(16, 32, 3, padding=1),
        relu(),
        pool(2),
    )
    return torch.nn.Sequential(*body, torch.nn.Flatten(), torch.nn.Linear(32 * 7 * 7, CLASSES))


@dataclass(frozen=True)
class Training:
    """A network, what a sample of its is, and how much is trained."""

    network: object
    shape: tuple[int, ...]
    batch: int
    steps: int


TRAININGS = {
    "MLP": Training(mlp, (784,), 128, 500),
    "small CNN": Training(cnn, (1, 28, 28), 128, 400),
}


def train(seed, name, steps=None, log=None):
    """Train one network on the worker's device; return its first loss, its last loss, and how much
    memory it took [bytes].

    `log(step, loss)` is called in each step.
    """
    training, device = TRAININGS[name], current_task().device
    torch.manual_seed(seed)
    inputs, targets, network = as_device((*samples(training.shape), training.network()), device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    losses = torch.zeros(2, device=device)
    steps = training.steps if steps is None else steps
    for step in range(steps):
        first = step * training.batch % SAMPLES
        batch = slice(first, first + training.batch)
        loss = cross_entropy(network(inputs[batch]), targets[batch])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if log is not None:
            log(step, loss)
        if step in (0, steps - 1):
            losses[min(step, 1)] = loss.detach()
    before, after = losses.tolist()  # waits until all is done
    return before, after, torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


@functools.lru_cache
def samples(shape):
    """Return inputs and targets, on the CPU: each class has a pattern of its own, under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, *shape, generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return patterns[targets] + torch.randn(SAMPLES, *shape, generator=generator), targets


def has_mps():
    """Whether this worker's CUDA goes through NVIDIA's Multi-Process Service."""
    return PIPES in os.environ or runs_in(USUAL)


# --- what a log costs -----------------------------------------------------------------------------


def nothing(name, steps):
    """Return what a step takes without a log [us]."""
    return step_us(name, steps, None)


def by_item(name, steps):
    """Return what a step takes if its loss is asked for in each [us]."""
    return step_us(name, steps, lambda step, loss: report(step=step, loss=loss.item()))


def by_buffer(name, steps):
    """Return what a step takes if its loss waits on the device for 99 others [us]."""
    with MetricBuffer(100) as metrics:
        return step_us(name, steps, lambda step, loss: metrics.add(step=step, loss=loss))


def step_us(name, steps, log):
    """Return what a step takes [us]."""
    train(0, name, min(WARM_UP, steps))
    started = time.perf_counter()
    train(0, name, steps, log)
    return (time.perf_counter() - started) / steps * 1e6


# --- what a transfer costs ------------------------------------------------------------------------


def transfer_us(num_bytes, kind, device=None):
    """Return what it takes to bring so many bytes to the device [us]: the mean of as many as take a
    while.

    The kinds: "pageable" memory, as tensors are by default; "pinned", in which they lie already,
    and several are on their way at once; "through pinned", which they are copied into first.
    """
    device = current_task().device if device is None else device
    x = torch.ones(num_bytes // 4)
    if kind == "pinned":
        x = as_device(x, cpu(), pinned=True)
    count = max(4, min(100, 2**28 // num_bytes))

    def bring():
        for _ in range(count):
            as_device(x, device, pinned=kind == "through pinned", non_blocking=kind == "pinned")
        synchronize(device)

    bring()
    started = time.perf_counter()
    bring()
    return (time.perf_counter() - started) / count * 1e6


def synchronize(device):
    """Wait until a GPU has done all that it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
