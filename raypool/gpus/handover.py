"""Devices by name, and moving or copying tensors, models and containers of them to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from raypool.errors import InvalidTypeError, InvalidValueError, whole_number

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


def cpu() -> torch.device:
    """Return the CPU, all cores of it, with the main memory: where tensors are unless they are told
    otherwise.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), computing devices.

    Example:
        >>> cpu()
        device(type='cpu')
    """
    import torch

    return torch.device("cpu")


def gpu(i: int = 0) -> torch.device:
    """Return a GPU: one card with its own memory, of those that this process sees.

    A worker of a pool sees its own and no other, so that it is `gpu()` in each of them, whatever
    its number on the machine (`current_task().gpu`). What is to run without a GPU too takes
    `current_task().device`. No CUDA context is made.

    Args:
        i: Its number among those that this process sees, from 0, in CUDA's order.

    Raises:
        InvalidTypeError: `i` is not a whole number.
        InvalidValueError: This process sees no such GPU.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), computing devices.
    """
    import torch

    number = whole_number(i)
    if number is None:
        raise InvalidTypeError(f"gpu({i!r}) is not a number of a GPU. They are numbered from 0.")
    _check_seen(number, f"gpu({number})")
    return torch.device("cuda", number)


def as_device(
    x: T, device: torch.device | str, *, pinned: bool = False, non_blocking: bool = False
) -> T:
    """Return `x` on a device: the very object if all of it is there already, else a copy of what is
    not.

    All operands of an operation have to be on one device, and so has its result: torch does not
    move them by itself, as nobody would see what that costs. So a function that begins with `x =
    as_device(x, device)` works whatever it is given, and costs nothing if it was given the right
    thing. In containers, however nested (dicts, lists, tuples, named tuples, dataclasses), only
    what has to change is new: a dict of which one tensor moves is a new dict with the other tensors
    as they were. A tensor that is in it twice is moved once. Gradients flow back through the move,
    as with `Tensor.to`: so a tensor that is to be optimized is made where it is to be
    (`as_device(x.detach(), device).requires_grad_()`), for what was moved is no leaf.

    A model (`torch.nn.Module`) is not copied but moved itself, as torch does: optimizers hold its
    parameters. NumPy arrays, numbers, texts, sets and objects of other types stay as they are.

    Args:
        x: A tensor, a model, or containers of these.
        device: `cpu()`, `gpu(1)`, `current_task().device`, or torch's name for it ("cuda:1").
        pinned: Main memory that is locked in its place, so that the GPU can fetch from it, or write
            to it, by itself. Tensors that come to the CPU lie in it then, also those that are there
            already; those that leave the CPU go through it. To lock memory costs more than it gains
            if it is for one move: let what moves again and again lie in it. Without a GPU it means
            nothing.
        non_blocking: Do not wait for the end of a move between pinned memory and a GPU. What comes
            after it on that GPU does wait. The CPU does not: call `torch.cuda.synchronize()` before
            you read what has come to the CPU, or change what has left it.

    Raises:
        InvalidValueError: `device` is not the name of one, or is a GPU that this process does not
            see.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), storage on the GPU,
        and its `as_in_ctx` of MXNet. PyTorch tutorial, "A guide on good usage of non_blocking and
        pin_memory() in PyTorch".

    Example:
        >>> import torch
        >>> x = torch.ones(2)
        >>> as_device(x, cpu()) is x
        True
        >>> batch = as_device({"images": x, "names": ["a", "b"]}, "meta")
        >>> batch["images"].device, batch["names"]
        (device(type='meta'), ['a', 'b'])
    """
    return _Move(_checked(device), pinned, non_blocking).of(x)  # type: ignore[no-any-return]


def copy_to(
    x: T, device: torch.device | str, *, pinned: bool = False, non_blocking: bool = False
) -> T:
    """Return a copy of `x` on a device, in memory of its own, also if `x` is there already.

    What is done to the copy is not done to `x`: for weights that are to be kept as they are now,
    say. Containers are copied too, and so are models and NumPy arrays; numbers, texts, sets and
    objects of other types are the same in both. A tensor that is in `x` twice is copied once.
    Gradients flow back through the copy, as with `Tensor.clone`, but a model's parameters become
    parameters of the copy.

    Args:
        x: A tensor, a model, an array, or containers of these.
        device: As for `as_device`.
        pinned: As for `as_device`.
        non_blocking: As for `as_device`.

    Raises:
        InvalidValueError: `device` is not the name of one, or is a GPU that this process does not
            see.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), copying, and its
        `copyto` of MXNet.

    Example:
        >>> import torch
        >>> x = torch.zeros(2)
        >>> y = copy_to(x, cpu())
        >>> y += 1
        >>> x.tolist(), y.tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    return _Copy(_checked(device), pinned, non_blocking).of(x)  # type: ignore[no-any-return]


def _checked(device: torch.device | str) -> torch.device:
    import torch

    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidValueError(
            f"{device!r} is not a device. Give cpu(), gpu(1), current_task().device, or torch's"
            " name of one, such as 'cuda:1'."
        ) from error
    if made.type == "cuda":
        _check_seen(made.index or 0, str(made))
    return made


def _check_seen(i: int, name: str) -> None:
    """Refuse a GPU that this process does not see; torch would say so in the words of CUDA, or of
    its own assertions.
    """
    import torch

    count = torch.cuda.device_count()
    if not 0 <= i < count:
        seen = {0: "no GPU that torch can use", 1: "1 GPU, gpu(0)"}.get(
            count, f"{count} GPUs, gpu(0) to gpu({count - 1})"
        )
        raise InvalidValueError(
            f"{name} does not exist: this process sees {seen}. A worker of a pool sees only its"
            " own, as gpu(). current_task().device is the best device that there is."
        )


class _Move:
    """One call of `as_device`: brings all that it finds to a device, each thing once."""

    def __init__(self, device: torch.device, pinned: bool, non_blocking: bool) -> None:
        import torch

        self._device = device
        self._pinned = pinned and torch.cuda.is_available()
        self._non_blocking = non_blocking
        # by id, with the original, so that its id is given to nothing else
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, x: Any) -> Any:
        """Return what `x` becomes."""
        done = self._done.get(id(x))
        if done is None:
            done = self._done[id(x)] = (x, self._made(x))
        return done[1]

    def _made(self, x: Any) -> Any:
        import torch

        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, torch.nn.Module):
            return self._module(x)
        opened = _opened(x)
        if opened is None:
            return self._other(x)
        parts, rebuilt = opened
        moved = [self.of(part) for part in parts]
        is_same = all(new is part for new, part in zip(moved, parts, strict=True))
        return x if is_same and self._stays(x) else rebuilt(moved)

    def _stays(self, x: Any) -> bool:
        """Whether a container of which nothing has changed is given back itself."""
        return True

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self._pinned_move(x)
            if self._pinned
            else x.to(self._device, non_blocking=self._non_blocking)
        )

    def _pinned_move(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that lies in pinned memory on the CPU, or has come by it."""
        import torch

        if self._device.type == "cpu" and x.is_cuda and x.layout == torch.strided:
            return torch.empty_like(x, device=self._device, pin_memory=True).copy_(
                x, non_blocking=self._non_blocking
            )
        if x.device.type == "cpu":
            x = x.pin_memory()  # itself if it is there already
        return x.to(self._device, non_blocking=self._non_blocking)

    def _module(self, x: torch.nn.Module) -> torch.nn.Module:
        return x.to(self._device, non_blocking=self._non_blocking)

    def _other(self, x: Any) -> Any:
        return x


class _Copy(_Move):
    """One call of `copy_to`: makes all that it finds anew."""

    def _stays(self, x: Any) -> bool:
        return isinstance(x, tuple)  # nobody can change it

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        made = super()._tensor(x)
        return made if made is not x else self._again(x)

    def _again(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is where it is to be."""
        import torch

        if self._pinned and self._device.type == "cpu":
            return torch.empty_like(x, pin_memory=True).copy_(x)
        return x.to(self._device, copy=True)

    def _module(self, x: torch.nn.Module) -> torch.nn.Module:
        return super()._module(copy.deepcopy(x))

    def _other(self, x: Any) -> Any:
        import numpy as np

        return x.copy() if isinstance(x, np.ndarray) else x


def _opened(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return what is in a container, and what makes one of its type of other parts; None for what
    is no container.
    """
    import torch

    # its batch sizes stay on the CPU, where torch wants them
    if isinstance(x, torch.nn.utils.rnn.PackedSequence):
        data, batch_sizes, *indices = x
        return [data, *indices], lambda parts: type(x)(parts[0], batch_sizes.clone(), *parts[1:])
    # named ones take each part by itself, torch's own take all as one, as tuples do
    if isinstance(x, tuple):
        return list(x), x._make if hasattr(x, "_make") else type(x)
    if isinstance(x, (MutableMapping, list)):
        keys = list(x) if isinstance(x, MutableMapping) else range(len(x))
        return [x[key] for key in keys], lambda parts: _with_items(x, zip(keys, parts, strict=True))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
        return [getattr(x, name) for name in names], lambda parts: _with_fields(
            x, zip(names, parts, strict=True)
        )
    return None


def _with_items(x: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a list or a mapping of the same type, with all that it has beside its items."""
    made = copy.copy(x)
    for key, value in items:
        made[key] = value
    return made


def _with_fields(x: Any, fields: Iterable[tuple[str, Any]]) -> Any:
    """Return a dataclass of the same type, also if it is frozen; nothing of its `__init__` runs
    again.
    """
    made = copy.copy(x)
    for name, value in fields:
        object.__setattr__(made, name, value)
    return made
