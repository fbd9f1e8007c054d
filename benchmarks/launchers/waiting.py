"""Ranks that wait to be asked, under each launcher: run as a program this is one of them."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import contextmanager

import torch

from benchmarks.trainings import reduced, steady


def serve(port, prepare):
    """Do what is asked for, until nothing is: train, or put numbers together."""
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        connection.makefile("rw") as asked,
    ):
        while words := asked.readline().split():
            match words:
                case ["train", name, num_steps]:
                    answer = steady(name, int(num_steps), prepare)
                case ["reduce", num_bytes, repeats]:
                    answer = reduced(int(num_bytes), int(repeats))
            print(*answer, file=asked, flush=True)


@contextmanager
def torchrun():
    """Be a rank of torch's own launcher, or one that was started by hand with the same
    variables.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield lambda model, optimizer: (
        torch.nn.parallel.DistributedDataParallel(model),
        optimizer,
        torch.Tensor.backward,
    )
    dist.destroy_process_group()


@contextmanager
def accelerate():
    """Be a rank of Accelerate's."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    yield lambda model, optimizer: (*accelerator.prepare(model, optimizer), accelerator.backward)
    accelerator.end_training()


@contextmanager
def fabric():
    """Be a rank of Lightning Fabric's."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["RANKS"]))
    fabric.launch()
    yield lambda model, optimizer: (*fabric.setup(model, optimizer), fabric.backward)


if __name__ == "__main__":
    with {"torchrun": torchrun, "accelerate": accelerate, "fabric": fabric}[
        sys.argv[1]
    ]() as prepare:
        serve(int(sys.argv[2]), prepare)
