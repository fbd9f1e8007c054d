"""What predicts in a worker: the model on its device, mini-batch by mini-batch, and what is made of its outputs.

Imports torch, and is imported by what needs it anyway.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.gpus.memory import kept
from raypool.train.samples import Piece, batch_of, call_model, changed, mapped
from raypool.worker.running import notes_here


class Predictor:
    """A model with all that belongs to it; shipped to each worker once, and called there with pieces.

    Args:
        key: Under which a model that had to be moved to a GPU is kept there, until `let_go`.
        model: In `eval` mode, on the CPU; or a function of a mini-batch.
        dataset: What workers read for themselves, None if the samples come in the pieces.
        mini_batch_size: How many samples the model sees at once.
        output: What to make of the outputs of a mini-batch, None to leave them as they are.
    """

    __name__ = "predict"

    def __init__(self, key: str, model: Any, dataset: Any, mini_batch_size: int, output: Callable[[Any], Any] | None) -> None:
        self._key = key
        self._model = model
        self._dataset = dataset
        self._size = mini_batch_size
        self._output = output

    def __call__(self, piece: Piece) -> Any:
        """Return the outputs of the samples of a piece, on the CPU, joined.

        Raises:
            Exception: What the model, the Dataset or `output` has raised, with a note of the samples.
        """
        device = device_here() if isinstance(self._model, nn.Module) else torch.device("cpu")
        if device.type != "cpu":
            self._move(device)
        model, dtype = self._model, _floating_dtype(self._model)
        outputs = []
        with torch.inference_mode():
            for first in range(piece.start, piece.stop, self._size) or [piece.start]:
                last = min(first + self._size, piece.stop)
                try:
                    batch = batch_of(piece, first, last, self._dataset)
                    outputs.append(self._outputs(model, _moved(batch, device, dtype), last - first))
                except Exception as error:
                    error.add_note(f"raypool: samples {first} to {last - 1} of the data")
                    raise
            return joined(outputs)

    def _move(self, device: torch.device) -> None:
        """Put the model on a GPU, unless it is there, until `let_go`."""
        with _lock:
            if self._key not in _on_gpu:
                with kept.on_purpose():
                    self._model.to(device)
                _on_gpu[self._key] = self

    def drop(self) -> None:
        """Let go of the model: this object itself is kept for as long as its worker knows the function."""
        self._model = None

    def _outputs(self, model: Any, batch: Any, count: int) -> Any:
        """Return what is to be told of a mini-batch."""
        outputs = call_model(model, model, batch)
        if self._output is None:
            _check_rows(outputs, count)
        else:
            outputs = self._output(outputs)
        return _moved(outputs, torch.device("cpu"), None)


def device_here() -> torch.device:
    """Return the device of this worker: its GPU, also for work that one of its tasks has called for."""
    has_gpu = any(note.gpu is not None for note in notes_here())
    return torch.device("cuda:0" if has_gpu and torch.cuda.is_available() else "cpu")


_on_gpu: dict[str, Predictor] = {}
_lock = threading.Lock()


def let_go(key: str) -> None:
    """Free the GPU of a model, if it is on one."""
    with _lock:
        predictor = _on_gpu.pop(key, None)
    if predictor is not None:
        predictor.drop()
        torch.cuda.empty_cache()


def still(model: Any) -> Any:
    """Return a copy of a model to predict with, in `eval` mode and on the CPU; its weights are shared where they can be.

    Raises:
        InvalidTypeError: It is no model, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        if isinstance(model, type) or not callable(model):
            raise InvalidTypeError(
                f"model={model!r} is not a model. Give a torch.nn.Module (not its class), or a function of a mini-batch."
            )
        _check_takes_one(model)
        return model
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise InvalidTypeError("The model has parameters without a shape yet. Call it once with a mini-batch before.")
    try:
        known = {id(tensor): _shared(tensor) for tensor in tensors}
        return copy.deepcopy(model, known).eval()
    except Exception as error:
        raise InvalidTypeError(
            f"The model cannot be copied ({type(error).__name__}: {error}), which it has to be to travel. "
            "Keep tensors in it as parameters or buffers, and make files, locks and the like at their first use."
        ) from error


def _check_takes_one(model: Any) -> None:
    """Refuse a function that makes a model, which `fit` takes: called with a mini-batch it would fail on a worker."""
    try:
        inspect.signature(model).bind(None)
    except TypeError:
        name = getattr(model, "__name__", repr(model))
        raise InvalidTypeError(
            f"model={name} is a function that cannot be called with a mini-batch alone. If it makes the model, pass {name}()."
        ) from None
    except ValueError:  # some builtins do not say what they take
        return


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in an object that may be moved without the caller's being moved too."""
    values = tensor.detach().cpu()
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _floating_dtype(model: Any) -> torch.dtype | None:
    """Return the type of number that a model computes with, None if it has no weights."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def _moved(values: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return values with their tensors on a device, those of floating point as this type (None: as they are)."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return changed(move, values, torch.Tensor)


def _check_rows(outputs: Any, count: int) -> None:
    """Make sure that a model has given a row for each sample.

    Raises:
        InvalidValueError, InvalidTypeError: It has not.
    """
    if isinstance(outputs, (torch.Tensor, np.ndarray, list)):
        rows = len(outputs) if isinstance(outputs, list) or outputs.ndim else None
        if rows != count:
            what = f"{rows} entries" if isinstance(outputs, list) else f"an output of shape {tuple(outputs.shape)}"
            raise InvalidValueError(
                f"The model gives {what} for {count} samples, which should stand in the first dimension. "
                "If it sums over them, say so with output=, which may give anything for a mini-batch."
            )
    elif isinstance(outputs, (tuple, Mapping)) and outputs:
        for output in outputs.values() if isinstance(outputs, Mapping) else outputs:
            _check_rows(output, count)
    else:
        raise InvalidTypeError(
            f"The model gives a {type(outputs).__name__}, not tensors. Turn it into something else with output=."
        )


def joined(parts: Sequence[Any]) -> Any:
    """Return what stands for all parts, each of one or several mini-batches: arrays and lists end to end, the rest as a list.

    Raises:
        InvalidValueError: They do not fit together.

    Example:
        >>> joined([["a", "b"], ["c"]]), joined([("x", 1), ("y", 2)]), joined([0.5, 0.25])
        (['a', 'b', 'c'], (['x', 'y'], [1, 2]), [0.5, 0.25])
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return list(parts)
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _end_to_end(parts)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        columns = [joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return list(parts)


def _end_to_end(parts: Sequence[Any]) -> Any:
    """Return arrays or tensors as one; numbers become an array of them."""
    is_tensor = isinstance(parts[0], torch.Tensor)
    rows = [part.reshape(1) if part.ndim == 0 else part for part in parts]
    shapes = list(dict.fromkeys(tuple(part.shape[1:]) for part in rows))
    if len(shapes) > 1:
        raise InvalidValueError(
            f"The outputs of two mini-batches do not fit together: a sample has the shape {shapes[0]} in one, {shapes[1]} in "
            "another. Bring them to one shape with output=, or return a list with an entry for each sample there."
        )
    return torch.cat(rows) if is_tensor else np.concatenate(rows)


def as_arrays(outputs: Any) -> Any:
    """Return outputs with NumPy arrays in place of tensors; those of a type that NumPy lacks become float32."""
    if isinstance(outputs, torch.Tensor):
        return (outputs.float() if outputs.dtype == torch.bfloat16 else outputs).numpy()
    return mapped(as_arrays, outputs)


class Classes:
    """Makes class numbers of scores, on the worker.

    Args:
        num_labels: How many classes there have to be; None: any number.
    """

    def __init__(self, num_labels: int | None) -> None:
        self._num_labels = num_labels

    def __call__(self, scores: Any) -> torch.Tensor:
        """Return the class with the highest score for each sample.

        Raises:
            InvalidValueError, InvalidTypeError: These are not scores of classes.
        """
        if not isinstance(scores, torch.Tensor):
            raise InvalidTypeError(
                f"The model gives a {type(scores).__name__}, not a tensor of scores. Use predict with output=."
            )
        if scores.ndim < 2 or scores.shape[1] < 2:
            raise InvalidValueError(
                f"The model gives an output of shape {tuple(scores.shape)}, not a score for each class in dimension 1. "
                "For a single score use predict(model, data, output=lambda y: y > 0), with the threshold that fits it."
            )
        if self._num_labels not in (None, scores.shape[1]):
            raise InvalidValueError(f"labels has {self._num_labels} entries, and the model {scores.shape[1]} classes.")
        return scores.argmax(1)
