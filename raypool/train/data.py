"""What a model is trained on: taken from the user here, and dealt out in mini-batches on the ranks.

It imports torch: whoever imports it holds a model, or data, of torch's anyway.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.train.samples import floats_of

MEMORY_PART = 4
"""Arrays that take less than this part of a GPU's free memory are put there as a whole."""


class Column(NamedTuple):
    """Inputs, or targets, of all samples. An array's numbers become those that the model has; a tensor's stay as they are."""

    values: np.ndarray[Any, Any] | torch.Tensor
    is_array: bool

    def tensor(self, dtype: torch.dtype, is_target: bool) -> torch.Tensor:
        """Return it as a tensor, which is not to be changed: its memory may be the caller's."""
        if isinstance(self.values, torch.Tensor):
            return self.values
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(self.values)
        if self.is_array and tensor.is_floating_point():
            return tensor.to(dtype)
        if self.is_array and is_target and tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
            return tensor.to(torch.int64)  # the only integers that torch's losses take for classes
        return tensor


@dataclass(frozen=True)
class ArraySamples:
    """Samples whose inputs and targets are two arrays."""

    inputs: Column
    targets: Column

    def __len__(self) -> int:
        return len(self.inputs.values)

    def open(self, device: torch.device, dtype: torch.dtype, loader_processes: int) -> ArraySource:
        """Return what deals them out on a device."""
        inputs, targets = self.inputs.tensor(dtype, False), self.targets.tensor(dtype, True)
        if device.type == "cuda" and inputs.nbytes + targets.nbytes < torch.cuda.mem_get_info(device)[0] / MEMORY_PART:
            inputs, targets = inputs.to(device), targets.to(device)
        return ArraySource(inputs, targets, device)


@dataclass(frozen=True)
class DatasetSamples:
    """Samples of a map-style data set."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self, device: torch.device, dtype: torch.dtype, loader_processes: int) -> DatasetSource:
        """Return what deals them out on a device."""
        return DatasetSource(self.dataset, device, loader_processes)


Samples = ArraySamples | DatasetSamples
Batch = tuple[Any, Any]
"""Inputs and targets of some samples, on the device."""


class ArraySource:
    """Deals out samples by indexing whole tensors."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device) -> None:
        self._inputs, self._targets, self._device = inputs, targets, device

    def batches(self, order: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield mini-batches: for each piece the samples in these positions of an order."""
        inputs, targets, device = self._inputs, self._targets, self._device
        order = order.to(inputs.device)
        for start, stop in pieces:
            chosen = order[start:stop]
            batch = inputs.index_select(0, chosen), targets.index_select(0, chosen)
            yield batch if inputs.device == device else _moved(batch, device)


class DatasetSource:
    """Deals out samples by a `DataLoader`."""

    def __init__(self, dataset: Any, device: torch.device, loader_processes: int) -> None:
        self._dataset, self._device, self._processes = dataset, device, loader_processes

    def batches(self, order: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield mini-batches: for each piece the samples in these positions of an order."""
        numbers = order.tolist()
        chosen = [numbers[start:stop] for start, stop in pieces]
        is_cuda = self._device.type == "cuda"
        loader = DataLoader(self._dataset, batch_sampler=chosen, num_workers=self._processes, pin_memory=is_cuda)
        for batch in loader:
            yield _moved(_as_pair(batch), self._device)


def _as_pair(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        number = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
        raise InvalidTypeError(
            f"A mini-batch of the data set is a {type(batch).__name__}{number}, not a pair. Let each sample be a pair of an "
            "input and a target; an input may be a tuple or a dict of several."
        )
    return batch[0], batch[1]


def _moved(value: Any, device: torch.device) -> Any:
    """Return nested tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(part, device) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(part, device) for part in value)
    return value


def order_of(num_samples: int, shuffle: str, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the samples in an epoch, the same on every rank."""
    if shuffle == "never":
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(mixed_seed(seed, 0 if shuffle == "once" else epoch))
    return torch.randperm(num_samples, generator=generator)


def mixed_seed(*numbers: int) -> int:
    """Return a 63-bit seed made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


# --- taken from the user ----------------------------------------------------------------------------------------------


def take_samples(data: Any, what: str = "data") -> Samples:
    """Return what a user gives to train on, in one of two forms.

    Args:
        data: A pair of arrays or tensors; a DataFrame, whose last column is the target, or a pair of one and the target's name;
            a map-style data set of pairs.
        what: The name of the argument, for errors.

    Raises:
        InvalidTypeError: It is none of these.
        InvalidValueError: Inputs and targets are not of equal length, or there are none.
    """
    pandas = sys.modules.get("pandas")
    is_pair = isinstance(data, (tuple, list)) and len(data) == 2 and not isinstance(data[0], (tuple, list))
    samples: Samples
    if pandas is not None and isinstance(data, pandas.DataFrame):
        samples = _from_frame(data, data.columns[-1] if len(data.columns) else None, what)
    elif is_pair and pandas is not None and isinstance(data[0], pandas.DataFrame) and isinstance(data[1], str):
        samples = _from_frame(data[0], data[1], what)
    elif type(data) is TensorDataset and len(data.tensors) == 2:
        samples = _from_pair(*data.tensors, what)
    elif is_pair and not isinstance(data, Dataset):
        samples = _from_pair(data[0], data[1], what)
    else:
        samples = _from_dataset(data, what)
    if len(samples) == 0:
        raise InvalidValueError(f"{what} has no samples in it.")
    return samples


def _from_pair(inputs: Any, targets: Any, what: str) -> ArraySamples:
    columns = _column(inputs, f"the inputs of {what}"), _column(targets, f"the targets of {what}")
    lengths = [len(column.values) for column in columns]
    if lengths[0] != lengths[1]:
        raise InvalidValueError(
            f"{what} has {lengths[0]:,} inputs and {lengths[1]:,} targets. The first axis of both is the samples: give as many."
        )
    return ArraySamples(*columns)


def _from_frame(frame: Any, target: Any, what: str) -> ArraySamples:
    """Return a table's samples. A target of floats has one column, as the output of a model has; classes have none."""
    if target not in frame.columns:
        raise InvalidValueError(f"{what} has no column {target!r}. It has: {', '.join(map(str, frame.columns)) or 'none'}.")
    if len(frame.columns) < 2:
        raise InvalidValueError(f"{what} has the column {target!r} only, the target. Give it columns of inputs too.")
    inputs = frame.drop(columns=target)
    for name, kind in inputs.dtypes.items():
        if getattr(kind, "kind", "O") not in "biuf":
            raise InvalidTypeError(f"The column {name!r} of {what} is of type {kind}, not of numbers. Encode it, or drop it.")
    column = frame[target]
    if getattr(column.dtype, "name", "") == "category":
        column = column.cat.codes.astype("int64")
    values = _column(column.to_numpy(), f"the targets of {what}")
    if values.values.dtype.kind == "f":  # type: ignore[union-attr]
        values = values._replace(values=values.values.reshape(-1, 1))
    return ArraySamples(_column(floats_of(inputs), f"the inputs of {what}"), values)


def _column(values: Any, name: str) -> Column:
    """Return inputs or targets as they travel: as an array if it can be one, whose memory all workers of a machine share."""
    if isinstance(values, torch.Tensor):
        if values.ndim == 0:
            raise InvalidValueError(f"{name[0].upper()}{name[1:]} are a single number. The first axis is the samples.")
        plain = values.detach().cpu().contiguous()
        try:
            return Column(plain.numpy(), is_array=False)
        except TypeError:  # NumPy has no such type: bfloat16, say
            return Column(plain, is_array=False)
    try:
        array = floats_of(values) if hasattr(values, "columns") else np.asarray(values)
    except ValueError as error:
        raise InvalidValueError(f"{name[0].upper()}{name[1:]} are no array: {error}.") from error
    if array.dtype.kind not in "biufc":
        raise InvalidTypeError(
            f"{name[0].upper()}{name[1:]} are of type {array.dtype}, not numbers. Give arrays or tensors of numbers; for names "
            "of classes their numbers, pandas.factorize(names)[0]."
        )
    if array.ndim == 0:
        raise InvalidValueError(f"{name[0].upper()}{name[1:]} are a single number. The first axis is the samples.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch knows these types in name only
    return Column(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")), is_array=True)


def _from_dataset(data: Any, what: str) -> DatasetSamples:
    forms = (
        "Give a pair (inputs, targets) of arrays or tensors, a DataFrame whose last column is the target, or a map-style Dataset "
        "of pairs."
    )
    if isinstance(data, DataLoader):
        raise InvalidTypeError(f"{what} is a DataLoader. Give its data set, {what}.dataset: raypool makes the mini-batches.")
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise InvalidTypeError(f"{what} is of type {type(data).__name__}, which has no samples by number. {forms}")
    if isinstance(data, (str, bytes, dict, np.ndarray, torch.Tensor)):
        raise InvalidTypeError(f"{what} is of type {type(data).__name__}, without targets. {forms}")
    return DatasetSamples(data)
