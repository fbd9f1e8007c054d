"""Devices by name, and moving or copying tensors, models and containers of them to a device."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from raypool.errors import InvalidTypeError, InvalidValueError, explains_calls, whole_number

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


def cpu() -> torch.device:
    """Return the CPU with the main memory, the default device of tensors.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), computing devices.

    Example:
        >>> cpu()
        device(type='cpu')
    """
    import torch

    return torch.device("cpu")


@explains_calls
def gpu(i: int = 0) -> torch.device:
    """Return a GPU of this process: one card with its own memory.

    In a worker of a pool, `gpu()` is its own GPU, whatever its number on the machine
    (`current_task().gpu`). Code that should also run without a GPU uses `current_task().device`. No
    CUDA context is made.

    Args:
        i: Its number among the GPUs that this process sees, from 0, in CUDA's order.

    Raises:
        InvalidTypeError: `i` is not an integer.
        InvalidValueError: This process sees no such GPU.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), computing devices.
    """
    import torch

    number = whole_number(i)
    if number is None:
        raise InvalidTypeError(f"gpu() takes the number of a GPU, from 0, not {i!r}.")
    _check_seen(number, f"gpu({number})")
    return torch.device("cuda", number)


@explains_calls
def as_device(
    x: T, device: torch.device | str, *, pinned: bool = False, non_blocking: bool = False
) -> T:
    """Return `x` on a device: `x` itself if it is already there, else with moved parts.

    torch does not move the operands of an operation to one device. A function that begins with
    `x = as_device(x, device)` takes any `x`, at no cost if it is on the device. In nested
    containers (dicts, lists, tuples, named tuples, dataclasses), only changed parts are new. A
    tensor that occurs twice is moved once. Gradients flow back through the move, as with
    `Tensor.to`; a moved tensor is not a leaf, so create one that you optimize on its device:
    `as_device(x.detach(), device).requires_grad_()`.

    A model (`torch.nn.Module`) is moved in place, since optimizers hold its parameters.
    NumPy arrays, numbers, texts, sets and objects of other types stay as they are.

    Args:
        x: A tensor, a model, or containers of these.
        device: `cpu()`, `gpu(1)`, `current_task().device`, or torch's name for it ("cuda:1").
        pinned: Use locked main memory, which the GPU reads and writes by itself, for tensors on the
            CPU (including those already there) and for those that leave it. For a single move,
            locking costs more than it gains. No effect without a GPU.
        non_blocking: Do not wait for the end of a move between pinned memory and a GPU. Later work
            on that GPU does wait; the CPU does not: call `torch.cuda.synchronize()` before you read
            a tensor that moved to the CPU, or change one that left it.

    Raises:
        InvalidValueError: `device` is not a device, or is a GPU that this process does not see.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), storage on the GPU,
        and `as_in_ctx` of MXNet. PyTorch tutorial, "A guide on good usage of non_blocking and
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


@explains_calls
def copy_to(
    x: T, device: torch.device | str, *, pinned: bool = False, non_blocking: bool = False
) -> T:
    """Return a copy of `x` on a device, even if `x` is already there.

    Containers, models and NumPy arrays are copied, too; numbers, texts, sets and objects of other
    types are shared. A tensor that occurs twice is copied once. Gradients flow back through the
    copy, as with `Tensor.clone`, but a model's parameters become parameters of the copy.

    Args:
        x: A tensor, a model, an array, or containers of these.
        device: As for `as_device`.
        pinned: As for `as_device`.
        non_blocking: As for `as_device`.

    Raises:
        InvalidValueError: `device` is not a device, or is a GPU that this process does not see.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), copying, and
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
            f"{device!r} is not a device. Use cpu(), gpu(1), current_task().device, or torch's name"
            " of one, such as 'cuda:1'."
        ) from error
    if made.type == "cuda":
        _check_seen(made.index or 0, str(made))
    return made


def _check_seen(i: int, name: str) -> None:
    import torch

    # torch itself would fail later, with an error of CUDA or an assertion
    count = torch.cuda.device_count()
    if not 0 <= i < count:
        seen = {0: "no GPU that torch can use", 1: "1 GPU, gpu(0)"}.get(
            count, f"{count} GPUs, gpu(0) to gpu({count - 1})"
        )
        raise InvalidValueError(
            f"{name} does not exist: this process sees {seen}. A worker of a pool sees only its"
            " own, as gpu(). current_task().device is the best device available."
        )


class _Move:
    """One call of `as_device`: moves each object once."""

    def __init__(self, device: torch.device, pinned: bool, non_blocking: bool) -> None:
        import torch

        self._device = device
        self._pinned = pinned and torch.cuda.is_available()
        self._non_blocking = non_blocking
        # by id, with the original: while it lives, no other object gets its id
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, x: Any) -> Any:
        """Return the moved `x`."""
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
        """Whether a container with unchanged parts is returned itself."""
        return True

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        if self._pinned and x.is_cuda and self._device.type == "cpu" and x.layout == torch.strided:
            # straight into pinned memory; only strided tensors can be made there
            return torch.empty_like(x, device=self._device, pin_memory=True).copy_(
                x, non_blocking=self._non_blocking
            )
        if self._pinned and x.device.type == "cpu":
            x = x.pin_memory()  # itself if it is pinned already
        return x.to(self._device, non_blocking=self._non_blocking)

    def _module(self, x: torch.nn.Module) -> torch.nn.Module:
        return x.to(self._device, non_blocking=self._non_blocking)

    def _other(self, x: Any) -> Any:
        return x


class _Copy(_Move):
    """One call of `copy_to`: copies each object once."""

    def _stays(self, x: Any) -> bool:
        return isinstance(x, tuple)  # nobody can change it

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        made = super()._tensor(x)
        if made is not x:
            return made
        if self._pinned and self._device.type == "cpu":  # a plain copy would not be pinned
            return torch.empty_like(x, pin_memory=True).copy_(x)
        return x.to(self._device, copy=True)

    def _module(self, x: torch.nn.Module) -> torch.nn.Module:
        return super()._module(copy.deepcopy(x))

    def _other(self, x: Any) -> Any:
        import numpy as np

        return x.copy() if isinstance(x, np.ndarray) else x


def _opened(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return a container's parts and a function that rebuilds it; None if it is not one."""
    import torch

    # its batch sizes stay on the CPU, where torch wants them
    if isinstance(x, torch.nn.utils.rnn.PackedSequence):
        data, batch_sizes, *indices = x
        return [data, *indices], lambda parts: type(x)(parts[0], batch_sizes.clone(), *parts[1:])
    # named ones take each part by itself, torch's own take all as one, as tuples do
    if isinstance(x, tuple):
        return list(x), x._make if hasattr(x, "_make") else type(x)
    get: Callable[[Any, Any], Any] = operator.getitem
    put: Callable[[Any, Any, Any], None] = operator.setitem
    names: list[Any]
    if isinstance(x, (MutableMapping, list)):
        names = list(x) if isinstance(x, MutableMapping) else list(range(len(x)))
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
        get, put = getattr, object.__setattr__  # a frozen one refuses `setattr`
    else:
        return None

    def rebuilt(parts: list[Any]) -> Any:
        made = copy.copy(x)  # keeps the type and all other attributes; no `__init__` runs again
        for name, part in zip(names, parts, strict=True):
            put(made, name, part)
        return made

    return [get(x, name) for name in names], rebuilt
