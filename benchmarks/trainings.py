"""The trainings that are timed, importable by whoever runs them."""

import itertools
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.contest import WrongAnswersError

LEARNING_RATE = 0.01
MOMENTUM = 0.9
WARM_UP = 10
KILLED_AFTER = 50
PAUSE_S = 0.1
CLASSES = 10


class Size(NamedTuple):
    """A model and what it is trained on; a step takes `batch` samples, all ranks together."""

    width: int
    hidden: int
    batch: int
    steps_per_epoch: int
    epochs: int

    def network(self):
        """Return the model."""
        return torch.nn.Sequential(
            torch.nn.Linear(self.width, self.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(self.hidden, self.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(self.hidden, CLASSES),
        )

    def samples(self):
        """Return all inputs and targets."""
        generator = torch.Generator().manual_seed(0)
        number = self.batch * self.steps_per_epoch
        return (
            torch.randn(number, self.width, generator=generator),
            torch.randint(CLASSES, (number,), generator=generator),
        )


SIZES = {"small": Size(32, 64, 64, 100, 5), "big": Size(512, 1024, 128, 8, 5)}


def network_of(size):
    """Return its model, with the same weights each time."""
    torch.manual_seed(0)
    return size.network()


def weights_of(model):
    """Return all numbers of a model."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)


def prepared(model):
    from ray.train.torch import prepare_model

    return prepare_model(model)


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def first_step():
    """Train one step of a tiny model; return when that was done."""
    model = prepared(torch.nn.Linear(8, 2))
    step(model, optimizer_of(model), torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    return time.time()


def killed_once(config):
    """Report each step of a small model; in the first attempt rank 1 kills itself after a while.

    Return how long it took from then until the first report of the next attempt [us].
    `config["killed_at"]` is a file for that moment.
    """
    import ray.train

    file = Path(config["killed_at"])
    killed_at = float(file.read_text()) if file.exists() else None
    size = SIZES["small"]
    model = prepared(network_of(size))
    optimizer, (inputs, targets) = optimizer_of(model), size.samples()
    for number in itertools.count(1):
        step(model, optimizer, inputs[: size.batch], targets[: size.batch])
        ray.train.report({"step": number})
        if killed_at is not None:
            return (time.time() - killed_at) * 1e6
        time.sleep(PAUSE_S)
        if number == KILLED_AFTER and ray.train.get_context().get_world_rank() == 1:
            file.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def steady(name, num_steps, prepare):
    """Train on one batch, again and again; return what a step takes [us], and of the cores [us],
    and the loss in the end.
    """
    size, num_ranks = SIZES[name], dist.get_world_size() if dist.is_initialized() else 1
    model = network_of(size)
    model, optimizer, backward = prepare(model, optimizer_of(model))
    inputs, targets = (column[: size.batch // num_ranks] for column in size.samples())
    for number in range(WARM_UP + num_steps):
        if number == WARM_UP:
            if num_ranks > 1:
                dist.barrier()
            started, cpu_before = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        backward(loss)
        optimizer.step()
    took, of_cores = time.perf_counter() - started, time.process_time() - cpu_before
    return took / num_steps * 1e6, of_cores / num_steps * 1e6, loss.item()


def in_ray(model, optimizer):
    """Prepare a model as loops for Ray Train do."""
    return prepared(model), optimizer, torch.Tensor.backward


def steady_in_ray(config):
    return steady(config["size"], config["num_steps"], in_ray)


def reduced(num_bytes, repeats, all_reduce=dist.all_reduce):
    """Return what it takes to add up tensors of so many bytes, the median of some [us], alone in a
    list.
    """
    x = torch.empty(num_bytes // 4)
    return [median(sum_us(x, all_reduce) for _ in range(repeats))]


def sum_us(x, all_reduce):
    """Return what it takes to add up tensors like this one [us]; make sure that every number is the
    sum over the ranks.

    Raises:
        WrongAnswersError: One is not.
    """
    size = dist.get_world_size()
    x.fill_(dist.get_rank() + 1)
    dist.barrier()
    started = time.perf_counter()
    all_reduce(x)
    took = (time.perf_counter() - started) * 1e6
    least, most = (edge.item() for edge in x.aminmax())
    if not least == most == size * (size + 1) / 2:
        raise WrongAnswersError(
            f"an all_reduce of the ranks' numbers 1 to {size} gives {least:g} to {most:g}"
        )
    return took


def reduced_in_context(context, num_bytes, repeats):
    return reduced(num_bytes, repeats, context.all_reduce)


def reduced_by_torch(context, num_bytes, repeats):
    return reduced(num_bytes, repeats)


def by_hand(config):
    """Train as `pool.fit` does, the shortest way: a fresh order in each epoch, each rank its part
    of every batch, one report.

    Return the weights in the end: the orders are those of `pool.fit`, so the weights have to be,
    too.
    """
    import ray.train

    from raypool.train.data import order_of

    size = SIZES[config["size"]]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    inputs, targets = size.samples()
    model = prepared(network_of(size))
    optimizer = optimizer_of(model)
    for epoch in range(size.epochs + 1):
        order = order_of(len(inputs), "every-epoch", 0, epoch)
        total = torch.zeros(())
        for batch in order.split(size.batch):
            mine = batch.chunk(world_size)[rank]
            total += step(model, optimizer, inputs[mine], targets[mine]).detach()
        ray.train.report({"epoch": epoch, "loss": total.item() / size.steps_per_epoch})
    return weights_of(model)


def by_loader(config):
    """Train the same as Ray Train's examples do: with a DataLoader, and a loss that is looked at in
    every step.
    """
    import ray.train
    from ray.train.torch import prepare_data_loader
    from torch.utils.data import DataLoader, TensorDataset

    size = SIZES[config["size"]]
    dataset = TensorDataset(*size.samples())
    world_size = ray.train.get_context().get_world_size()
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=size.batch // world_size, shuffle=True)
    )
    model = prepared(size.network())
    optimizer = optimizer_of(model)
    for epoch in range(size.epochs + 1):
        if world_size > 1:
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            total += step(model, optimizer, inputs, targets).item()
        ray.train.report({"epoch": epoch, "loss": total / size.steps_per_epoch})


def reports(config):
    """Report with checkpoints from rank 0; `config["counts"]` has pairs of how many bytes (0:
    none), and how often.

    Return what a report takes [us] for each of these: the median, without the first.
    """
    return [median(_report_us(num_bytes, count)[1:]) for num_bytes, count in config["counts"]]


def _report_us(num_bytes, count):
    import ray.train

    costs = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if num_bytes and ray.train.get_context().get_world_rank() == 0:
                Path(folder, "state").write_bytes(bytes(num_bytes))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            started = time.perf_counter()
            ray.train.report({"number": number}, checkpoint=checkpoint)
            costs.append((time.perf_counter() - started) * 1e6)
    return costs


def heavy():
    """Return a model of images that is small to send and takes long to use: 38 million
    multiplications for each image.
    """
    convolution = torch.nn.Conv2d
    middle = [
        layer for _ in range(4) for layer in (convolution(64, 64, 3, padding=1), torch.nn.ReLU())
    ]
    head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, CLASSES))
    return torch.nn.Sequential(
        convolution(3, 64, 3, padding=1), torch.nn.ReLU(), *middle, *head
    ).eval()


def images(number):
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def forwards(context, num_samples, batch):
    """Use that model on this rank's part of so many images, by hand; return what it took [us]."""
    model, inputs = heavy(), images(batch)
    context.barrier()
    started = time.perf_counter()
    with torch.inference_mode():
        for _ in range(num_samples // batch // context.world_size):
            model(inputs)
    context.barrier()
    return (time.perf_counter() - started) * 1e6
