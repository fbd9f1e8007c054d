"""What a model is to predict from: arrays, tables, lists and Datasets, of which workers get a piece at a time.

Imports torch, and is imported by what needs it anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from raypool.errors import InvalidTypeError, InvalidValueError

TARGET_NAMES = ("labels", "label")
"""What the target of a sample that is a dict is called unless the user names it, as in Hugging Face's data sets."""

ARRAYS = (np.ndarray, torch.Tensor)

KINDS = (
    "a NumPy array, a tensor, a DataFrame, a tuple or dict of those (several inputs), a Dataset with a length, or a list of "
    "samples"
)


class Samples(Protocol):
    """The inputs of a model, sample by sample.

    Attributes:
        gives_arrays: Whether whoever gave them expects NumPy arrays back.
        bytes_each: How much one sample takes on its way to a worker, as far as that is known without looking.
    """

    gives_arrays: bool
    bytes_each: int

    def __len__(self) -> int:
        """How many there are."""

    def piece(self, start: int, stop: int) -> Piece:
        """Return some of them, ready to travel."""


class Piece(NamedTuple):
    """The samples from `start` on, before `stop`: as columns (see `Columns`) or as items; None: read there."""

    start: int
    stop: int
    columns: Any = None
    items: list[Any] | None = None


class Columns:
    """Samples in arrays or tensors: one, or a tuple or dict with one for each input of the model."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns
        self.gives_arrays = all(isinstance(column, np.ndarray) for column in leaves(columns))
        self.bytes_each = sum(column.nbytes for column in leaves(columns)) // max(len(self), 1)

    def __len__(self) -> int:
        return len(leaves(self._columns)[0])

    def piece(self, start: int, stop: int) -> Piece:
        """Return rows. A tensor travels as an array of the same memory: pickled by torch, it would take all rows with it."""
        return Piece(start, stop, changed(lambda column: _detached(column[start:stop]), self._columns, ARRAYS))


class Items:
    """Samples in memory, one by one: a list, or a part of a `TensorDataset`."""

    gives_arrays = False
    bytes_each = 0

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def piece(self, start: int, stop: int) -> Piece:
        """Return items, without their targets."""
        return Piece(start, stop, items=[input_of(self._items[index]) for index in range(start, stop)])


class Elsewhere:
    """Samples that workers read for themselves, each from its own copy of the Dataset."""

    gives_arrays = False
    bytes_each = 0

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def piece(self, start: int, stop: int) -> Piece:
        """Return nothing but the numbers."""
        return Piece(start, stop)


def samples_of(data: Any) -> Samples:
    """Return the samples that are in what a user gives.

    Raises:
        InvalidTypeError: It is nothing of the kind.
        InvalidValueError: Several inputs have different lengths.
    """
    if isinstance(data, (DataLoader, IterableDataset)) or (hasattr(data, "__next__") and not hasattr(data, "__getitem__")):
        raise InvalidTypeError(
            f"data is a {type(data).__name__}, which has no samples by number. Give {KINDS}; of a DataLoader its .dataset."
        )
    if isinstance(data, TensorDataset):
        return Columns(_checked_column(input_of(data.tensors)))
    if isinstance(data, list) or (isinstance(data, Subset) and isinstance(data.dataset, TensorDataset)):
        return Items(data)
    if isinstance(data, tuple) or (isinstance(data, Mapping) and data and all(map(_is_column, data.values()))):
        columns = mapped(_checked_column, data)
        lengths = [len(column) for column in leaves(columns)]
        if not lengths:
            raise InvalidValueError("data=() names no input. Give an array for each input of the model.")
        if len(set(lengths)) > 1:
            raise InvalidValueError(
                f"The inputs have {', '.join(map(str, lengths))} samples. A {type(data).__name__} is one array for each input of "
                "the model, all of the same length; targets do not belong there."
            )
        return Columns(columns[0] if isinstance(columns, tuple) and len(columns) == 1 else columns)
    if _is_column(data):
        return Columns(_checked_column(data))
    is_plain = isinstance(data, (str, bytes, Mapping, Set))
    if is_plain or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidTypeError(f"data is a {type(data).__name__}. Give {KINDS}.")
    return Elsewhere(in_tensors(data))


def _is_column(data: Any) -> bool:
    return isinstance(data, (np.ndarray, torch.Tensor)) or hasattr(data, "to_numpy")


def _checked_column(data: Any) -> np.ndarray[Any, Any] | torch.Tensor:
    """Return an array or tensor of which torch can make sense."""
    if not _is_column(data):
        raise InvalidTypeError(f"An input is a {type(data).__name__}. Give a NumPy array, a tensor or a DataFrame for each.")
    if hasattr(data, "columns"):
        bad = [str(name) for name, dtype in data.dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]
        if bad:
            raise InvalidTypeError(
                f"The table has columns that are not numbers: {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}. "
                "Leave them out, or encode them first."
            )
        data = floats_of(data)
    column = data if isinstance(data, torch.Tensor) else np.asarray(data.to_numpy() if hasattr(data, "to_numpy") else data)
    if column.ndim == 0:
        raise InvalidValueError("data is a single number. The first dimension of an input is that of the samples.")
    if isinstance(column, np.ndarray):
        try:
            torch.from_numpy(column[:0].copy())
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"data is an array of {column.dtype}, of which torch makes no tensor: {error}") from None
    return column


def floats_of(table: Any) -> np.ndarray[Any, Any]:
    """Return the columns of a table as one array: of floats always, for training as for predicting."""
    is_single = all(kind == "float32" for kind in table.dtypes)
    array: np.ndarray[Any, Any] = table.to_numpy(dtype="float32" if is_single else "float64")
    return array


def _detached(rows: Any) -> Any:
    """Return rows as an array, if there is such a type of array; else as a tensor of memory of its own."""
    if isinstance(rows, np.ndarray):
        return rows
    rows = rows.detach().cpu()
    try:
        return rows.numpy()
    except (TypeError, RuntimeError):  # bfloat16, say; or sparse
        return rows.clone()


def in_tensors(dataset: Any) -> Any:
    """Return a data set of Hugging Face that gives tensors, unless its user has chosen a format; any other as it is.

    Without a format its samples are lists of numbers, of which torch would make a mini-batch column by column.
    """
    form = getattr(dataset, "format", None)
    if isinstance(form, Mapping) and "type" in form and form["type"] is None and hasattr(dataset, "with_format"):
        return dataset.with_format("torch")
    return dataset


class Named(dict[Any, Any]):
    """The inputs of samples that are dicts themselves, not of one that is a dict: see `call_model`."""


def input_of(sample: Any) -> Any:
    """Return what of a sample goes into the model: of a pair (input, target) the input, of a dict all but the label.

    Raises:
        InvalidValueError: It is a tuple of more than two.

    Example:
        >>> input_of((1.5, "cat")), input_of(1.5), input_of((1.5,)), input_of({"x": 1.5, "label": "cat"})
        (1.5, 1.5, 1.5, {'x': 1.5})
    """
    if isinstance(sample, Mapping):
        return Named((name, value) for name, value in sample.items() if name not in TARGET_NAMES)
    if not isinstance(sample, (tuple, list)):
        return sample
    if not 1 <= len(sample) <= 2:
        raise InvalidValueError(
            f"A sample is a tuple of {len(sample)}. Make it the input, or a pair (input, target); several inputs are a tuple in "
            "place of the input."
        )
    return sample[0]


def batch_of(piece: Piece, first: int, last: int, dataset: Any) -> Any:
    """Return the inputs of a mini-batch, as `call_model` takes them, from a piece that has it."""
    if piece.columns is not None:
        rows = slice(first - piece.start, last - piece.start)
        return changed(lambda column: _tensor(column[rows]), piece.columns, ARRAYS)
    if piece.items is not None:
        inputs = piece.items[first - piece.start : last - piece.start]
    else:
        inputs = [input_of(dataset[index]) for index in range(first, last)]
    batch = default_collate(inputs)
    return tuple(batch) if isinstance(inputs[0], tuple) else batch


def _tensor(rows: Any) -> torch.Tensor:
    """Return rows as a tensor with memory of its own: theirs may be the caller's, or read-only, and models work in place."""
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows.copy())


# --- given to a model -------------------------------------------------------------------------------------------------


def call_model(call: Callable[..., Any], model: Any, inputs: Any) -> Any:
    """Call a model with the inputs of a mini-batch.

    Those in a tuple are its arguments in order. Those in a dict are its arguments by name, without those that it does not have;
    if it has no arguments of such names it gets the dict, or the only input that samples have beside their label.

    Args:
        call: What is called: the model, or what was put around it (DDP).
        model: The model itself, whose arguments count.
        inputs: A tensor, or a tuple or dict of several.
    """
    if isinstance(inputs, tuple):
        return call(*inputs) if _takes(model, inputs, {}) else call(inputs)
    if isinstance(inputs, Mapping):
        named = _named(model, inputs)
        if named and _takes(model, (), named):
            return call(**named)
        if isinstance(inputs, Named) and len(inputs) == 1:
            return call(*inputs.values())
    return call(inputs)


def _named(model: Any, inputs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the inputs that are called like arguments of a model."""
    parameters = _parameters(model)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(_called(model)).parameters
    except (TypeError, ValueError):  # some builtins do not say what they take
        return {}


def _takes(model: Any, arguments: tuple[Any, ...], named: Mapping[Any, Any]) -> bool:
    try:
        inspect.signature(_called(model)).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # some builtins do not say what they take
        return True
    return True


def _called(model: Any) -> Any:
    return model.forward if isinstance(model, nn.Module) else model


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Return a tuple, list or mapping with all its entries changed; anything else as it is."""
    if isinstance(values, Mapping):
        kind = Named if isinstance(values, Named) else dict
        return kind((key, change(value)) for key, value in values.items())
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(change(value) for value in values))
    return type(values)(change(value) for value in values) if type(values) in (tuple, list) else values


def changed(change: Callable[[Any], Any], values: Any, kind: type | tuple[type, ...]) -> Any:
    """Return nested tuples, lists and mappings with all changed in them that is of a kind."""
    return change(values) if isinstance(values, kind) else mapped(lambda value: changed(change, value, kind), values)


def leaves(values: Any) -> list[Any]:
    """Return what is in nested tuples and mappings, one after the other."""
    if not isinstance(values, (tuple, Mapping)):
        return [values]
    parts = values.values() if isinstance(values, Mapping) else values
    return [leaf for part in parts for leaf in leaves(part)]
