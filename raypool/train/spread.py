"""A model over several ranks: by DDP, or by FSDP2. For workers only."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raypool.train.ranks import Ranks

LISTS = (nn.ModuleList, nn.ModuleDict)
"""Layers that are never called, only those in them."""


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Leave each rank a part of every parameter (FSDP2): layer by layer, so that one is gathered at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for unit in _units(module):
        fully_shard(unit, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _units(module: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered by themselves: not those that share parameters, which belong to the whole then."""
    layers = list(_layers(module))
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    owners = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    for owner in set(module.modules()).difference(*(layer.modules() for layer in layers)):
        owners.update(id(each) for each in owner.parameters(recurse=False) if id(each) in in_layers)
    return [layer for layer in layers if all(owners[id(parameter)] == 1 for parameter in layer.parameters())]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what stands in its outermost lists of layers (`Sequential` too); others may have parts that are never called."""
    for child in module.children():
        if isinstance(module, (nn.Sequential, *LISTS)) and not isinstance(child, LISTS):
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _layers(child)


def connect(module: nn.Module, ranks: Ranks, has_unused: bool) -> DistributedDataParallel:
    """Let gradients be averaged over the ranks while they are computed. The parameters have to be the same already."""
    # Buffers are merged when they are looked at. Torch 2.13 has another name for this, and warns of the old one.
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    not_buffers: dict[str, Any] = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    return DistributedDataParallel(
        module,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        **not_buffers,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=has_unused,
    )


def has_unused(loss: torch.Tensor, module: nn.Module) -> bool:
    """Whether a loss leaves out parameters that are to be trained: DDP would wait for their gradients for ever."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return any(parameter.requires_grad and id(parameter) not in found for parameter in module.parameters())


def whole(tensor: Any) -> Any:
    """Return a tensor on the CPU as a whole; all ranks have to ask for it. What is no tensor, as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().cpu()


def whole_state(module: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Return a model's state on the CPU, as one process would have it; all ranks have to ask for it, and rank 0 gets it."""
    state: dict[str, Any] = {}
    for name, tensor in module.state_dict().items():
        if ranks.rank == 0:
            state[name] = whole(tensor)
        elif hasattr(tensor, "full_tensor"):
            tensor.full_tensor()  # rank 0 needs this rank's part
    return state
