"""What a model is trained on: taken from the user here, and dealt out in mini-batches on the ranks.

It imports torch: whoever imports it holds a model, or data, of torch's anyway.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.train.samples import TARGET_NAMES, Named, changed, floats_of, in_tensors, leaves

LOADER_SETTINGS = ("collate_fn", "num_workers", "prefetch_factor", "timeout", "worker_init_fn")

MEMORY_PART = 4
"""Arrays that take less than this part of a GPU's free memory are put there as a whole."""


@dataclass(frozen=True)
class Column:
    """An input, or a target, of all samples. An array's numbers become those that the model has; a tensor's stay as they are."""

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


@dataclass(frozen=True, kw_only=True)
class ArraySamples:
    """Samples whose inputs and targets are arrays.

    Args:
        inputs, targets: A `Column`, or a tuple or dict of several.
        sampler: What says which samples make up an epoch, and their order. None: all of them.
    """

    inputs: Any
    targets: Any
    sampler: Any = None

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0].values) if self.sampler is None else len(self.sampler)

    def open(self, device: torch.device, dtype: torch.dtype, loader_processes: int) -> ArraySource:
        """Return what deals them out on a device."""
        inputs = changed(lambda column: column.tensor(dtype, False), self.inputs, Column)
        targets = changed(lambda column: column.tensor(dtype, True), self.targets, Column)
        size = sum(tensor.nbytes for tensor in leaves((inputs, targets)))
        if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] / MEMORY_PART:
            inputs, targets = _moved((inputs, targets), device)
        return ArraySource(inputs, targets, device)


@dataclass(frozen=True, kw_only=True)
class DatasetSamples:
    """Samples of a map-style data set.

    Args:
        dataset: What has them.
        target: The target of a sample that is a dict: its name, or several. None: see `TARGET_NAMES`.
        sampler: As above.
        settings: What a `DataLoader` was told about loading them, its `collate_fn` for one.
    """

    dataset: Any
    target: str | tuple[str, ...] | None = None
    sampler: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset if self.sampler is None else self.sampler)

    def open(self, device: torch.device, dtype: torch.dtype, loader_processes: int) -> DatasetSource:
        """Return what deals them out on a device."""
        settings = {**self.settings, **({"num_workers": loader_processes} if loader_processes else {})}
        settings["collate_fn"] = partial(_paired, settings.get("collate_fn", default_collate), self.target)
        return DatasetSource(self.dataset, device, dtype, settings)


Samples = ArraySamples | DatasetSamples
Batch = tuple[Any, Any]
"""Inputs and targets of some samples, on the device."""


class ArraySource:
    """Deals out samples by indexing whole tensors."""

    def __init__(self, inputs: Any, targets: Any, device: torch.device) -> None:
        self._tensors, self._device = (inputs, targets), device

    def batches(self, order: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield mini-batches: for each piece the samples in these positions of an order."""
        here = leaves(self._tensors)[0].device
        order = order.to(here)
        for start, stop in pieces:
            select = partial(torch.index_select, dim=0, index=order[start:stop])
            batch = changed(select, self._tensors, torch.Tensor)
            yield batch if here == self._device else _moved(batch, self._device)


class DatasetSource:
    """Deals out samples by a `DataLoader`."""

    def __init__(self, dataset: Any, device: torch.device, dtype: torch.dtype, settings: dict[str, Any]) -> None:
        self._dataset, self._device, self._dtype, self._settings = dataset, device, dtype, settings

    def batches(self, order: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield mini-batches: for each piece the samples in these positions of an order."""
        numbers = order.tolist()
        chosen = [numbers[start:stop] for start, stop in pieces]
        for batch in DataLoader(self._dataset, batch_sampler=chosen, pin_memory=self._device.type == "cuda", **self._settings):
            yield _moved(batch, self._device, self._dtype)


def _paired(collate: Callable[[Any], Any], target: str | tuple[str, ...] | None, samples: Any) -> Batch:
    """Return the inputs and the targets of a mini-batch, in plain dicts.

    A process that loads could not send a class of the user's script, and torch would wait for that mini-batch for ever.
    """
    return changed(lambda tensor: tensor, _as_pair(collate(samples), target), torch.Tensor)  # type: ignore[no-any-return]


def _as_pair(batch: Any, target: str | tuple[str, ...] | None) -> Batch:
    if isinstance(batch, Mapping):
        return _split(batch, target)
    if target is not None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        number = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        what = "a pair" if target is None else f"a dict with {target!r} in it"
        raise InvalidTypeError(
            f"A mini-batch of the data set is a {type(batch).__name__}{number}, not {what}. Let each sample be a pair of an "
            "input and a target, or a dict; an input may be a tuple or a dict of several."
        )
    inputs, targets = batch
    return (tuple(inputs) if isinstance(inputs, list) else inputs), targets  # torch makes a list of samples' tuples


def _split(batch: Mapping[Any, Any], target: str | tuple[str, ...] | None) -> Batch:
    """Return a mini-batch of samples that are dicts as its inputs and its target, or a dict of its targets."""
    names = target if isinstance(target, tuple) else (target,)
    if target is None:
        names = tuple(name for name in TARGET_NAMES if name in batch)[:1] or TARGET_NAMES[-1:]
    missing = [name for name in names if name not in batch]
    left_out = names if target is not None else TARGET_NAMES
    if missing or not set(batch).difference(left_out):
        fact = f"no {missing[0]!r}" if missing else "nothing but targets"
        raise InvalidValueError(
            f'The samples are dicts of {", ".join(map(repr, batch))}, with {fact}. Name the target, (data, "NAME"), or several, '
            '(data, ["NAME", "NAME"]); the others are the inputs of the model.'
        )
    inputs = Named((name, value) for name, value in batch.items() if name not in left_out)
    return inputs, {name: batch[name] for name in names} if isinstance(target, tuple) else batch[names[0]]


def _moved(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return nested tensors on a device; 64-bit floats, which Python's numbers become, in the model's type if that is said."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.dtype == torch.float64 else None, non_blocking=True)

    return changed(move, values, torch.Tensor)


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

FORMS = (
    "Give a tuple (inputs, targets) of arrays or tensors, a DataFrame whose last column is the target, or a map-style Dataset "
    "(or a DataLoader of one) of pairs or dicts."
)


def take_samples(data: Any, what: str = "data") -> Samples:
    """Return what a user gives to train on, in one of two forms.

    Raises:
        InvalidTypeError: It is nothing of the kind, which `PoolView.fit` lists; `what` is the argument's name.
        InvalidValueError: Inputs and targets are not of equal length, or there are none.
    """
    data, target = _with_target(data)
    samples: Samples
    if isinstance(data, DataLoader):
        samples = _from_loader(data, target, what)
    elif _is_frame(data):
        samples = _from_frame(data, data.columns[-1:] if target is None else target, what)
    elif type(data) is TensorDataset and len(data.tensors) == 2 and target is None:
        samples = _from_pair(*data.tensors, what)
    elif _is_pair(data) and target is None:
        samples = _from_pair(data[0], data[1], what)
    else:
        samples = DatasetSamples(dataset=in_tensors(_checked_dataset(data, what)), target=target)
    if len(samples) == 0:
        raise InvalidValueError(f"{what} has no samples in it.")
    return samples


def loader_of(data: Any) -> Any:
    """Return the `DataLoader` that a user gives, None if it is something else."""
    data, _ = _with_target(data)
    return data if isinstance(data, DataLoader) else None


def is_shuffled(loader: Any) -> bool:
    """Whether a `DataLoader` goes through all its samples in random order."""
    sampler = loader.sampler
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)


def _is_frame(data: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def _is_pair(data: Any) -> bool:
    """Whether these are inputs and targets: a tuple of two; a list of two is two samples, if they may be samples."""
    if isinstance(data, Dataset) or not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    return isinstance(data, tuple) or not isinstance(data[0], (tuple, list, Mapping))


def _with_target(data: Any) -> tuple[Any, str | tuple[str, ...] | None]:
    """Return data, and the name of their target (or of several) where it is given beside them."""
    if not isinstance(data, tuple) or len(data) != 2:
        return data, None
    first, names = data
    is_named = isinstance(names, str) or (
        isinstance(names, (tuple, list)) and len(names) > 0 and all(isinstance(name, str) for name in names)
    )
    is_array = isinstance(first, (np.ndarray, torch.Tensor, tuple)) or (
        isinstance(first, list) and not all(isinstance(sample, Mapping) for sample in first[:1])
    )
    if not is_named or is_array:
        return data, None
    return first, names if isinstance(names, str) else tuple(names)


def _from_pair(inputs: Any, targets: Any, what: str) -> ArraySamples:
    columns = _columns(inputs, f"the inputs of {what}"), _columns(targets, f"the targets of {what}")
    lengths = [sorted({len(column.values) for column in leaves(part)}) for part in columns]
    if not all(lengths) or len({*lengths[0], *lengths[1]}) > 1:
        has = [" and ".join(f"{length:,}" for length in part) or "no" for part in lengths]
        raise InvalidValueError(
            f"{what} has {has[0]} inputs and {has[1]} targets. The first axis of all is the samples: give as many. Several "
            "inputs are a tuple, ((x1, x2), y); a list is one array."
        )
    return ArraySamples(inputs=columns[0], targets=columns[1])


def _from_frame(frame: Any, target: Any, what: str) -> ArraySamples:
    """Return a table's samples. A target of floats has one column, as the output of a model has; classes have none."""
    names = [target] if isinstance(target, str) else list(target)
    for name in names or ["target"]:
        if name not in frame.columns:
            raise InvalidValueError(f"{what} has no column {name!r}. It has: {', '.join(map(str, frame.columns)) or 'none'}.")
    inputs = frame.drop(columns=names)
    if inputs.columns.empty:
        raise InvalidValueError(f"{what} has no columns but {', '.join(map(repr, names))}, the target. Give it inputs too.")
    _check_numbers(inputs, what)
    if len(names) > 1:
        _check_numbers(frame[names], what)
        return ArraySamples(inputs=_column(inputs, what), targets=_column(frame[names], what))
    column = frame[names[0]]
    if getattr(column.dtype, "name", "") == "category":
        column = column.cat.codes.astype("int64")
    values = _column(column.to_numpy(), f"the targets of {what}")
    if values.values.dtype.kind == "f":  # type: ignore[union-attr]
        values = replace(values, values=values.values.reshape(-1, 1))
    return ArraySamples(inputs=_column(inputs, what), targets=values)


def _check_numbers(table: Any, what: str) -> None:
    for name, kind in table.dtypes.items():
        if getattr(kind, "kind", "O") not in "biuf":
            raise InvalidTypeError(f"The column {name!r} of {what} is of type {kind}, not of numbers. Encode it, or drop it.")


def _columns(values: Any, name: str) -> Any:
    """Return inputs or targets as they travel: one column, or a tuple or dict of several."""
    if isinstance(values, tuple):
        return tuple(_column(part, name) for part in values)
    if isinstance(values, Mapping):
        return {key: _column(part, name) for key, part in values.items()}
    return _column(values, name)


def _column(values: Any, name: str) -> Column:
    """Return inputs or targets as they travel: as an array if it can be one, whose memory all workers of a machine share."""
    start = f"{name[0].upper()}{name[1:]}"
    if isinstance(values, torch.Tensor):
        if values.ndim == 0:
            raise InvalidValueError(f"{start} are a single number. The first axis is the samples.")
        plain = values.detach().cpu().contiguous()
        try:
            return Column(plain.numpy(), is_array=False)
        except TypeError:  # NumPy has no such type: bfloat16, say
            return Column(plain, is_array=False)
    try:
        array = floats_of(values) if hasattr(values, "columns") else np.asarray(values)
    except ValueError as error:
        raise InvalidValueError(f"{start} are no array: {error}.") from error
    if array.dtype.kind not in "biufc":
        raise InvalidTypeError(
            f"{start} are of type {array.dtype}, not numbers. Give arrays or tensors of numbers; for names "
            "of classes their numbers, pandas.factorize(names)[0]."
        )
    if array.ndim == 0:
        raise InvalidValueError(f"{start} are a single number. The first axis is the samples.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch knows these types in name only
    return Column(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")), is_array=True)


def _checked_dataset(data: Any, what: str) -> Any:
    """Return data of which samples can be had by number, and raise the error for others."""
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:5]))
        raise InvalidTypeError(f"{what} is a {type(data).__name__} of {names}. Give one of its parts, {what}[NAME], say. {FORMS}")
    if isinstance(data, (str, bytes, np.ndarray, torch.Tensor)) or hasattr(data, "to_numpy"):
        raise InvalidTypeError(f"{what} is of type {type(data).__name__}, without targets. {FORMS}")
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise InvalidTypeError(
            f"{what} is of type {type(data).__name__}, whose samples come one after the other. raypool takes them by number, to "
            "share each mini-batch out among the workers and to resume within an epoch. Give list(data) if it fits into memory, "
            "or a Dataset with __len__ and __getitem__; else write a loop for pool.train, in which each rank reads its own part."
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise InvalidTypeError(f"{what} is of type {type(data).__name__}, which has no samples by number. {FORMS}")
    return data


def _from_loader(loader: Any, target: Any, what: str) -> Samples:
    """Return the samples of a `DataLoader`: raypool makes the mini-batches, by its `collate_fn`, in the order of its sampler."""
    dataset, sampler = _checked_dataset(loader.dataset, what), loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        raise InvalidTypeError(
            f"{what} is a DataLoader with a batch_sampler of its own, or without mini-batches. raypool shares mini-batches of "
            "one size out among the workers. Give the DataLoader a batch_size, and a sampler if the order matters."
        )
    if isinstance(sampler, DistributedSampler):
        raise InvalidTypeError(
            f"{what} is a DataLoader with a DistributedSampler, by which each rank would read its own part. raypool shares out "
            "each mini-batch itself. Leave the sampler out."
        )
    is_in_order = type(sampler) is SequentialSampler and len(sampler) == len(dataset)
    own = None if is_in_order or is_shuffled(loader) else sampler
    if own is not None and not hasattr(own, "__len__"):
        raise InvalidTypeError(
            f"The sampler of {what}, a {type(own).__name__}, has no length. Give it __len__, the number of samples of an epoch: "
            "the schedule of the learning rate depends on it."
        )
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and loader.collate_fn is default_collate:
        return replace(_from_pair(*dataset.tensors, what), sampler=own)
    if loader.collate_fn is default_collate:
        dataset = in_tensors(dataset)
    settings = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    if loader.multiprocessing_context is not None:
        settings["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    return DatasetSamples(dataset=dataset, target=target, sampler=own, settings=settings)
