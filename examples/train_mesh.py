"""Tensor and data parallelism at once, on a mesh of two dimensions: four workers hold two halves of
each layer, twice, and each half of the batch goes to one of the two copies.

`parallelize_module` splits the layers over the rows of the mesh, `fully_shard` (FSDP2) shards the
pieces over its columns and averages their gradients. Run it with

    python examples/train_mesh.py

on four workers: CPUs here, and GPUs without a change where there are four.
"""

import ray.train
import ray.train.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raypool import parpool


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
    return torch.nn.Sequential(*layers).double()


def make_batches(steps):
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, 32, 16, dtype=torch.float64, generator=draw)
    return inputs, inputs.mean(dim=-1, keepdim=True).sin()


def train_loop(config):
    torch.set_num_threads(1)  # the other cores are for the other ranks
    device = ray.train.torch.get_device()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model().to(device), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    held = sum(weights.to_local().numel() for weights in model.parameters())
    share = slice(mesh["data"].get_local_rank(), None, 2)  # every second row of each batch
    for step, loss in enumerate(fit(model, config["steps"], share, device)):
        ray.train.report({"step": step, "loss": loss})
    return held, [weights.full_tensor().detach().cpu() for weights in model.parameters()]


def fit(model, steps, share, device):
    """Train on some rows of each batch; yield the losses. Nothing here knows of ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, targets in zip(*make_batches(steps), strict=True):
        outputs = model(inputs[share].to(device))
        loss = torch.nn.functional.mse_loss(outputs, targets[share].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train_alone(steps):
    """Do the same in one process, with the whole model and whole batches."""
    model = make_model()
    losses = list(fit(model, steps, slice(None), torch.device("cpu")))
    return losses, [weights.detach() for weights in model.parameters()]


def main(steps=30):
    with parpool(4) as pool:
        values = pool.train(train_loop, {"steps": steps}).result().values
    _, alone = train_alone(steps)
    for rank, (held, _) in enumerate(values):
        print(f"Rank {rank} held {held:,} of {sum(each.numel() for each in alone):,} parameters.")
    difference = max((a - b).abs().max() for a, b in zip(values[0][1], alone, strict=True))
    print(f"After {steps} steps the parameters differ by {difference:.0e} at most.")


if __name__ == "__main__":
    main()
