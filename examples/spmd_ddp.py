"""Data parallel training: torch's DistributedDataParallel on all workers of a pool.

Each rank trains on its share of every batch, and DDP averages the gradients, so that all keep the
same model: the one that a single process would get from the whole batch. Run it with

    python examples/spmd_ddp.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from raypool import parpool

BATCH_SIZE = 64


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).double()


def make_batches(steps):
    inputs = torch.randn(
        steps, BATCH_SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return inputs, inputs.sum(dim=-1, keepdim=True).sin()


def train(ctx, steps):
    """Train on every rank of an spmd call; return the loss at each step, and the parameters at the
    end.
    """
    torch.set_num_threads(1)  # the other cores are for the other ranks
    device_ids = [ctx.device] if ctx.device.type == "cuda" else None
    model = DistributedDataParallel(make_model().to(ctx.device), device_ids=device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in zip(*make_batches(steps), strict=True):
        # of two ranks one takes the even rows, the other one the odd
        share = slice(ctx.rank, None, ctx.world_size)
        loss = torch.nn.functional.mse_loss(
            model(inputs[share].to(ctx.device)), targets[share].to(ctx.device)
        )
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all ranks here
        optimizer.step()
        losses.append(ctx.all_reduce(loss.detach(), "mean").item())
    return losses, [weights.detach().cpu() for weights in model.parameters()]


def train_alone(steps):
    """Do the same in one process, with whole batches."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in zip(*make_batches(steps), strict=True):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [weights.detach() for weights in model.parameters()]


def main(steps=200):
    with parpool(2) as pool:
        losses, parameters = pool.spmd(train, steps)[0]
    losses_alone, parameters_alone = train_alone(steps)
    for step in range(0, steps, 50):
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
