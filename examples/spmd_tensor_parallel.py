"""Tensor parallel: one layer computed by all workers of a pool at once, by
`torch.distributed.tensor.parallel`.

Each rank holds some columns of the first matrix and the matching rows of the second, computes with
them on the whole batch, and the ranks add up the results. Run it with

    python examples/spmd_tensor_parallel.py

on two workers: CPUs here, and GPUs, unchanged, if there are two.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raypool import parpool


def make_model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {"up": torch.nn.Linear(16, 64), "down": torch.nn.Linear(64, 16)}
    ).double()


def make_batch():
    return torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compute(model, inputs):
    """Go forward and back; return what comes out. Nothing here knows of ranks."""
    outputs = model["down"](torch.nn.functional.gelu(model["up"](inputs)))
    outputs.square().mean().backward()
    return outputs.detach().cpu()


def train(ctx):
    """Compute on every rank of an spmd call; return the outputs, the whole gradients, and the
    shapes that this rank held.
    """
    torch.set_num_threads(1)  # the other cores are for the other ranks
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(make_model().to(ctx.device), mesh, plan)
    outputs = compute(model, make_batch().to(ctx.device))
    gradients = {
        name: weights.grad.full_tensor().cpu() for name, weights in model.named_parameters()
    }
    return (
        outputs,
        gradients,
        {name: tuple(weights.to_local().shape) for name, weights in model.named_parameters()},
    )


def train_alone():
    """Do the same in one process."""
    model = make_model()
    outputs = compute(model, make_batch())
    return outputs, {name: weights.grad for name, weights in model.named_parameters()}


def main():
    with parpool(2) as pool:
        outputs, gradients, held = pool.spmd(train)[0]
    outputs_alone, gradients_alone = train_alone()
    print(
        "The outputs differ from those of one process by"
        f" {(outputs - outputs_alone).abs().max():.0e} at most."
    )
    for name, gradient in gradients.items():
        difference = (gradient - gradients_alone[name]).abs().max()
        print(
            f"{name}: rank 0 held {held[name]} of {tuple(gradient.shape)}; the gradient differs by"
            f" {difference:.0e} at most."
        )


if __name__ == "__main__":
    main()
