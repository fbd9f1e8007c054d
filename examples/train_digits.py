"""A convolutional network that reads digits, trained by Ray Train's own functions on all workers of
a pool.

`train_loop` is an ordinary loop for Ray Train: a `TorchTrainer` would run it unchanged.
`pool.train` runs it in the pool's workers, which are running already. After each epoch it saves a
checkpoint, from which the training resumes if a worker is lost, or if this script is run again with
the same folder:

    python examples/train_digits.py [FOLDER]

on two workers: CPUs here, and GPUs, unchanged, if there are two. It needs scikit-learn.
"""

import sys
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from ray.train import Checkpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raypool import RunOptions, parpool

BATCH_SIZE = 64  # of all workers together


def load_data():
    """Return the images and digits to train on, and those to test with: every sixth."""
    images, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images, is_test = images.float().reshape(-1, 1, 8, 8) / 16, torch.arange(len(images)) % 6 == 0
    return (images[~is_test], digits[~is_test]), (images[is_test], digits[is_test])


def make_net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(net, images, digits):
    """Return which part of the images the network reads right."""
    with torch.no_grad():
        return (net(images).argmax(dim=1) == digits).float().mean().item()


def train_loop(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are for the other ranks
    context = ray.train.get_context()
    train_set, test_set = load_data()
    test_set = [part.to(ray.train.torch.get_device()) for part in test_set]
    net = make_net()
    # on this rank's device, and in DistributedDataParallel
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    batch_size = BATCH_SIZE // context.get_world_size()
    loader = DataLoader(TensorDataset(*train_set), batch_size, shuffle=True, drop_last=True)
    loader = ray.train.torch.prepare_data_loader(loader)  # gives each rank its share

    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # else every epoch has the same order
        for images, digits in loader:
            loss = torch.nn.functional.cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(net, *test_set)}
        with tempfile.TemporaryDirectory() as folder:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder, "state.pt"))
            # all ranks have the same: one of them keeps it
            is_first = context.get_world_rank() == 0
            ray.train.report(
                metrics, checkpoint=Checkpoint.from_directory(folder) if is_first else None
            )


def main(folder=None, epochs=10):
    with parpool(2) as pool:
        options = RunOptions(
            run_dir=folder, keep_checkpoints=2, best_metric="accuracy", best_mode="max"
        )
        result = pool.train(
            train_loop, {"lr": 0.05, "epochs": epochs}, run_options=options
        ).result()
    print(result.metrics_frame.drop(columns=["time", "attempt"]))
    print(f"The last checkpoint is {result.checkpoint.path}")

    net = make_net()  # here, from the best checkpoint
    net.load_state_dict(
        torch.load(Path(result.best_checkpoint.path, "state.pt"), weights_only=True)["net"]
    )
    _, test_set = load_data()
    print(f"The best network reads {accuracy(net, *test_set):.1%} of the images right.")


if __name__ == "__main__":
    main(*sys.argv[1:])
