"""Metrics that stay on the GPU until there are enough of them to be worth a transfer."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raypool.counts import whole_number
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.task import checked_metric, report_of

if TYPE_CHECKING:
    import torch

Place = tuple[int, str]
"""Where a tensor's value belongs: in which of the steps that wait, and under which name."""


class MetricBuffer:
    """Collects the metrics of each step where they are, and reports many steps at once.

    `report(loss=loss.item())` in each step makes the CPU wait until the GPU has done all that it was told, and the GPU wait
    until the CPU has thought of more. A buffer takes the tensor itself, and neither waits. When it is full, the values of all its
    steps come to the CPU in one transfer (one for each dtype and device that they are of), and each step is reported by itself,
    with the time at which it was added. They are the same numbers as of `.item()`.

    It is a context manager, which flushes at its end: what is left in it would not be reported else. Outside a pool nobody
    listens to reports; `flush` returns what it has brought.

    Args:
        size: After so many steps it flushes by itself. What is shown while a task runs is so many steps old at most.

    Raises:
        InvalidValueError: `size` is not a count of at least 1.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), side notes, and its exercise 3: a log that is
        kept on the GPU, and moved as a whole.

    Example:
        >>> import torch
        >>> from raypool import parpool
        >>> def train(steps):
        ...     with MetricBuffer() as metrics:
        ...         for step in range(steps):
        ...             loss = torch.ones(()) / (step + 1)
        ...             metrics.add(step=step, loss=loss)
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     future = pool.parfeval(train, 2)
        >>> future.metrics[["step", "loss"]].to_dict("list")
        {'step': [0, 1], 'loss': [1.0, 0.5]}
    """

    def __init__(self, size: int = 100) -> None:
        number = whole_number(size)
        if number is None or number < 1:
            raise InvalidValueError(f"MetricBuffer(size={size!r}) holds no step. Give the number of steps that it is to hold.")
        self._size = number
        self._moments: list[float] = []
        self._steps: list[dict[str, Any]] = []
        self._tensors: defaultdict[tuple[torch.device, torch.dtype], list[tuple[Place, torch.Tensor]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, **metrics: Any) -> None:
        """Take the metrics of a step, as they are now.

        Args:
            metrics: Tensors of one element, on any device, or what `report` takes.

        Raises:
            InvalidTypeError: A value is neither.
            InvalidValueError: A text is too long.
        """
        tensors = {name: value for name, value in metrics.items() if _is_tensor(value)}
        for name, tensor in tensors.items():
            _check(name, tensor)
        # A tensor leaves a gap, so that all metrics of the step are in the order in which they were given.
        step = {name: None if name in tensors else checked_metric(name, value) for name, value in metrics.items()}
        for name, tensor in tensors.items():
            # A copy, also on the device: `total += loss` in the next step must not change what was added in this one.
            value = tensor.detach().reshape(()).clone()
            self._tensors[value.device, value.dtype].append(((len(self._steps), name), value))
        self._steps.append(step)
        self._moments.append(time())
        if len(self._steps) >= self._size:
            self.flush()

    def flush(self) -> list[dict[str, float | str | None]]:
        """Bring to the CPU what waits here, and report it; return it, one dict for each step, from the oldest on."""
        import torch

        moments, steps, tensors = self._moments, self._steps, self._tensors
        self._moments, self._steps, self._tensors = [], [], defaultdict(list)  # what fails below is not tried again
        for entries in tensors.values():
            values = torch.stack([value for _, value in entries]).tolist()
            for ((number, name), _), value in zip(entries, values, strict=True):
                steps[number][name] = value
        for moment, step in zip(moments, steps, strict=True):
            report_of(moment, step)
        return steps

    def __enter__(self) -> MetricBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error the last steps are what one wants to see most; but a GPU that has failed gives nothing any more.
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.flush()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has not imported it has no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() != 1 or tensor.is_complex():
        kind = "complex" if tensor.is_complex() else f"of {tensor.numel():,} elements, shape {tuple(tensor.shape)}"
        raise InvalidTypeError(
            f"add({name}=...) got a tensor that is {kind}. Add single numbers: its mean(), its norm(), or each by its own name."
        )
