"""Pipeline parallel: each worker of a pool holds some layers of one model, by
`torch.distributed.pipelining`.

A batch goes through in pieces, so that the stages compute at the same time: while the second stage
has the first piece, the first stage has the next one. Run it with

    python examples/spmd_pipeline.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.
"""

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from raypool import parpool

LAYERS = 4
PIECES = 8


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).double()


def make_batch():
    inputs = torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.roll(1, dims=1).sin()


def train(ctx):
    """Go forward and back on every rank of an spmd call; return the loss (of the last rank) and the
    gradients of its layers.
    """
    torch.set_num_threads(1)  # the other cores are for the other ranks
    inputs, targets = make_batch()
    first, last = (LAYERS * rank // ctx.world_size for rank in (ctx.rank, ctx.rank + 1))
    layers = make_model()[first:last].to(ctx.device)
    stage = PipelineStage(layers, ctx.rank, ctx.world_size, ctx.device)
    schedule = Schedule1F1B(stage, PIECES, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    batch = (inputs.to(ctx.device),) if stage.is_first else ()
    schedule.step(
        *batch, **({"target": targets.to(ctx.device), "losses": losses} if stage.is_last else {})
    )
    gradients = [weights.grad.cpu() for weights in layers.parameters()]
    return torch.stack(losses).mean().item() if stage.is_last else None, gradients


def train_alone():
    """Do the same in one process, with all layers and the batch in one piece."""
    inputs, targets = make_batch()
    model = make_model()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.item(), [weights.grad for weights in model.parameters()]


def main():
    with parpool(2) as pool:
        results = list(pool.spmd(train))
    loss_alone, gradients_alone = train_alone()
    print(f"Loss {results[-1][0]:.9f} in {len(results)} stages, {loss_alone:.9f} in one process.")
    for rank, (_, gradients) in enumerate(results):
        print(f"Rank {rank} held {sum(gradient.numel() for gradient in gradients):,} parameters.")
    gradients = [gradient for _, part in results for gradient in part]
    difference = max(
        (ours - theirs).abs().max().item()
        for ours, theirs in zip(gradients, gradients_alone, strict=True)
    )
    print(f"The gradients differ by {difference:.0e} at most.")


if __name__ == "__main__":
    main()
