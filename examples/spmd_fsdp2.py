"""Sharded training: torch's FSDP2 (`fully_shard`) on all workers of a pool.

Each rank holds only its part of every parameter, gradient and state of the optimizer, and gathers a
layer while it computes with it: for models that are too large for one GPU. Each trains on its share
of the batch. Run it with

    python examples/spmd_fsdp2.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from raypool import parpool

BATCH_SIZE = 64


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)).double()


def make_batches(steps):
    inputs = torch.randn(
        steps, BATCH_SIZE, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return inputs, inputs.mean(dim=-1, keepdim=True).sin()


def train(ctx, steps):
    """Train on every rank of an spmd call; return the losses, the whole parameters, and how many of
    them this rank held.
    """
    torch.set_num_threads(1)  # the other cores are for the other ranks
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    model = make_model().to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(weights.to_local().numel() for weights in model.parameters())
    losses = fit(model, steps, slice(ctx.rank, None, ctx.world_size), ctx.device)
    losses = ctx.all_reduce(torch.tensor(losses, dtype=torch.float64), "mean").tolist()
    return losses, [weights.full_tensor().detach().cpu() for weights in model.parameters()], held


def fit(model, steps, share, device):
    """Train on some rows of every batch; return the loss at each step. Nothing here knows of
    ranks.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in zip(*make_batches(steps), strict=True):
        loss = torch.nn.functional.mse_loss(
            model(inputs[share].to(device)), targets[share].to(device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(steps):
    """Do the same in one process, with the whole model and whole batches."""
    model = make_model()
    losses = fit(model, steps, slice(None), torch.device("cpu"))
    return losses, [weights.detach() for weights in model.parameters()]


def main(steps=60):
    with parpool(2) as pool:
        (losses, parameters, *_), *_ = results = list(pool.spmd(train, steps))
    losses_alone, parameters_alone = train_alone(steps)
    total = sum(weights.numel() for weights in parameters)
    for rank, (_, _, held) in enumerate(results):
        print(f"Rank {rank} held {held:,} of {total:,} parameters.")
    for step in range(0, steps, 20):
        print(
            f"step {step:3}: loss {losses[step]:.6f} on two ranks, {losses_alone[step]:.6f} in one"
            " process"
        )
    difference = max(
        (ours - theirs).abs().max().item()
        for ours, theirs in zip(parameters, parameters_alone, strict=True)
    )
    print(f"After {steps} steps the parameters differ by {difference:.0e} at most.")


if __name__ == "__main__":
    main()
