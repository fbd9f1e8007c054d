"""The data of models: mini-batches of samples to train on, and pieces of inputs to predict from.

This module imports torch, and is imported only where the user's model or data have done so.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from raypool.errors import InvalidTypeError, InvalidValueError

LOADER_SETTINGS = ("collate_fn", "num_workers", "prefetch_factor", "timeout", "worker_init_fn")

MEMORY_PART = 4
"""Arrays that take less than this part of a GPU's free memory are put there as a whole."""


@dataclass(frozen=True)
class Column:
    """An input, or a target, of all samples.

    Arrays, and 64-bit floats of a data set, get the model's dtype; tensors keep theirs.
    """

    values: np.ndarray[Any, Any] | torch.Tensor
    is_array: bool

    def tensor(self, dtype: torch.dtype, is_target: bool) -> torch.Tensor:
        """Return it as a tensor, whose memory may be the caller's."""
        if isinstance(self.values, torch.Tensor):
            return self.values
        with warnings.catch_warnings():  # it is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(self.values)
        if self.is_array and tensor.is_floating_point():
            return tensor.to(dtype)
        is_short = tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.uint8)
        if self.is_array and is_target and is_short:
            return tensor.to(torch.int64)  # the only integers that torch's losses take for classes
        return tensor


@dataclass(frozen=True, kw_only=True)
class ArraySamples:
    """Samples whose inputs and targets are arrays: a `Column`, or a tuple or dict of several.

    `sampler`: chooses and orders the samples of an epoch. None: all of them.
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
        # on the GPU as a whole a mini-batch costs no copy
        if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] / MEMORY_PART:
            inputs, targets = _moved((inputs, targets), device)
        return ArraySource(inputs, targets, device)


@dataclass(frozen=True, kw_only=True)
class DatasetSamples:
    """Samples of a map-style data set.

    `target`: of samples that are dicts: its name, or several. None: see `TARGET_NAMES`. `settings`:
    what a `DataLoader` was told about loading them.
    """

    dataset: Any
    target: str | tuple[str, ...] | None = None
    sampler: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset if self.sampler is None else self.sampler)

    def open(
        self, device: torch.device, dtype: torch.dtype, loader_processes: int
    ) -> DatasetSource:
        """Return what deals them out on a device."""
        settings = dict(self.settings)
        if loader_processes:
            settings["num_workers"] = loader_processes
        settings["collate_fn"] = partial(
            _paired, settings.get("collate_fn", default_collate), self.target
        )
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

    def __init__(
        self, dataset: Any, device: torch.device, dtype: torch.dtype, settings: dict[str, Any]
    ) -> None:
        self._dataset, self._device, self._dtype, self._settings = dataset, device, dtype, settings

    def batches(self, order: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield mini-batches: for each piece the samples in these positions of an order."""
        numbers = order.tolist()
        chosen = [numbers[start:stop] for start, stop in pieces]
        for batch in DataLoader(
            self._dataset,
            batch_sampler=chosen,
            pin_memory=self._device.type == "cuda",  # copies need not wait, see `_moved`
            **self._settings,
        ):
            yield _moved(batch, self._device, self._dtype)


def _paired(
    collate: Callable[[Any], Any], target: str | tuple[str, ...] | None, samples: Any
) -> Batch:
    """Return the inputs and the targets of a mini-batch, in plain dicts."""
    # A loading process could not send a class of the user's script, and torch would wait for it
    # forever: `changed` makes plain dicts of all mappings.
    batch = collate(samples)
    if isinstance(batch, Mapping):
        inputs, targets = _split(batch, target)
    elif target is not None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        number = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        what = "a pair" if target is None else f"a dict with {target!r} in it"
        raise InvalidTypeError(
            f"A mini-batch of the data set is a {type(batch).__name__}{number}, not {what}. Each"
            " sample must be a pair of an input and a target, or a dict; an input may be a tuple"
            " or a dict of several."
        )
    else:
        inputs, targets = batch[0], batch[1]
    if collate is default_collate and isinstance(inputs, list):
        inputs = tuple(inputs)  # torch makes a list of samples' tuples; the user's own is one input
    pair: Batch = changed(lambda tensor: tensor, (inputs, targets), torch.Tensor)
    return pair


def _split(batch: Mapping[Any, Any], target: str | tuple[str, ...] | None) -> Batch:
    """Return a mini-batch of dicts as its inputs and its target, or a dict of its targets."""
    names = target if isinstance(target, tuple) else (target,)
    if target is None:
        names = tuple(name for name in TARGET_NAMES if name in batch)[:1] or TARGET_NAMES[-1:]
    missing = [name for name in names if name not in batch]
    left_out = names if target is not None else TARGET_NAMES
    if missing or not set(batch).difference(left_out):
        fact = f"no {missing[0]!r}" if missing else "nothing but targets"
        raise InvalidValueError(
            f"The samples are dicts of {', '.join(map(repr, batch))}, with {fact}. Pass the target,"
            ' (data, "NAME"), or several, (data, ["NAME", "NAME"]); the others are the inputs of'
            " the model."
        )
    inputs = Named((name, value) for name, value in batch.items() if name not in left_out)
    if isinstance(target, tuple):
        return inputs, {name: batch[name] for name in names}
    return inputs, batch[names[0]]


def _moved(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return nested tensors on a device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # Python's numbers become 64-bit floats; a model seldom has them
        kind = dtype if tensor.dtype == torch.float64 else None
        return tensor.to(device, kind, non_blocking=True)

    return changed(move, values, torch.Tensor)


def order_of(num_samples: int, shuffle: str, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the samples in an epoch, the same on every rank."""
    if shuffle == "never":
        return torch.arange(num_samples)
    # "once": every epoch draws the order of the first
    generator = torch.Generator().manual_seed(mixed_seed(seed, 0 if shuffle == "once" else epoch))
    return torch.randperm(num_samples, generator=generator)


def mixed_seed(*numbers: int) -> int:
    """Return a 63-bit seed made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


# --- training data from the user ------------------------------------------------------------------

FORMS = (
    "Pass a tuple (inputs, targets) of arrays or tensors, a DataFrame whose last column is the"
    " target, or a map-style Dataset (or a DataLoader of one) of pairs or dicts."
)


def take_samples(data: Any, what: str = "data") -> Samples:
    """Return a user's training data; `what` is the argument's name, for errors."""
    data, target = _with_target(data)
    samples: Samples
    if isinstance(data, DataLoader):
        samples = _from_loader(data, target, what)
    elif (pandas := sys.modules.get("pandas")) and isinstance(data, pandas.DataFrame):
        samples = _from_frame(data, data.columns[-1:] if target is None else target, what)
    elif type(data) is TensorDataset and len(data.tensors) == 2 and target is None:
        samples = _from_tensors(data, what)
    elif (
        isinstance(data, (tuple, list))
        and not isinstance(data, Dataset)
        and len(data) == 2
        # a list of two may be two samples
        and (isinstance(data, tuple) or not isinstance(data[0], (tuple, list, Mapping)))
        and target is None
    ):
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
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(loader.dataset)
    )


def _with_target(data: Any) -> tuple[Any, str | tuple[str, ...] | None]:
    """Return data, and the name of their target (or of several) if it is given."""
    if not isinstance(data, tuple) or len(data) != 2:
        return data, None
    first, names = data
    is_named = isinstance(names, str) or (
        isinstance(names, (tuple, list))
        and len(names) > 0
        and all(isinstance(name, str) for name in names)
    )
    # texts beside an array, or a list of anything but dicts, are no names but (wrong) targets
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
            f"{what} has {has[0]} inputs and {has[1]} targets. The first axis of both is the"
            " samples: pass equal numbers. Several inputs are a tuple, ((x1, x2), y); a list is"
            " one array."
        )
    return ArraySamples(inputs=columns[0], targets=columns[1])


def _from_tensors(dataset: Any, what: str) -> ArraySamples:
    """Return the samples of a `TensorDataset` of two, whose floats are those of any data set."""

    def marked(column: Column) -> Column:
        return replace(column, is_array=column.values.dtype == np.float64)

    inputs, targets = dataset.tensors
    samples = _from_pair(inputs, targets, what)
    return replace(samples, inputs=marked(samples.inputs), targets=marked(samples.targets))


def _from_frame(frame: Any, target: Any, what: str) -> ArraySamples:
    names = [target] if isinstance(target, str) else list(target)
    for name in names or ["target"]:
        if name not in frame.columns:
            raise InvalidValueError(
                f"{what} has no column {name!r}. It has:"
                f" {', '.join(map(str, frame.columns)) or 'none'}."
            )
    inputs = frame.drop(columns=names)
    if inputs.columns.empty:
        raise InvalidValueError(
            f"{what} has no columns but {', '.join(map(repr, names))}, the target. Add the inputs."
        )
    _check_numbers(inputs, what)
    if len(names) > 1:
        _check_numbers(frame[names], what)
        return ArraySamples(inputs=_column(inputs, what), targets=_column(frame[names], what))
    column = frame[names[0]]
    if getattr(column.dtype, "name", "") == "category":
        column = column.cat.codes.astype("int64")
    values = _column(column.to_numpy(), f"the targets of {what}")
    # a target of floats has one column, as the output of a model has; classes have none
    if values.values.dtype.kind == "f":  # type: ignore[union-attr]
        values = replace(values, values=values.values.reshape(-1, 1))
    return ArraySamples(inputs=_column(inputs, what), targets=values)


def _is_number(dtype: Any) -> bool:
    return getattr(dtype, "kind", "O") in "biuf"


def _check_numbers(table: Any, what: str) -> None:
    for name, kind in table.dtypes.items():
        if not _is_number(kind):
            raise InvalidTypeError(
                f"The column {name!r} of {what} is of type {kind}, not of numbers. Encode it, or"
                " drop it."
            )


def _columns(values: Any, name: str) -> Any:
    """Return inputs or targets as they travel: one column, or a tuple or dict of several."""
    if isinstance(values, tuple):
        return tuple(_column(part, name) for part in values)
    if isinstance(values, Mapping):
        return {key: _column(part, name) for key, part in values.items()}
    return _column(values, name)


def _column(values: Any, name: str) -> Column:
    """Return inputs or targets as they travel: as an array if it can be one."""
    start = f"{name[0].upper()}{name[1:]}"
    single = f"{start} are a single number. The first axis is the samples."
    # all workers of a machine share the memory of an array
    if isinstance(values, torch.Tensor):
        if values.ndim == 0:
            raise InvalidValueError(single)
        plain = values.detach().cpu().contiguous()
        try:
            return Column(plain.numpy(), is_array=False)
        except TypeError:  # NumPy has no such type: bfloat16, say
            return Column(plain, is_array=False)
    try:
        array = floats_of(values) if hasattr(values, "columns") else np.asarray(values)
    except ValueError as error:
        raise InvalidValueError(f"{start} are not an array: {error}.") from error
    if array.dtype.kind not in "biufc":
        raise InvalidTypeError(
            f"{start} are of type {array.dtype}, not numbers. Pass arrays or tensors of numbers;"
            " for class names pass pandas.factorize(names)[0]."
        )
    if array.ndim == 0:
        raise InvalidValueError(single)
    return Column(np.ascontiguousarray(in_torch_type(array)), is_array=True)


def in_torch_type(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in a type that torch can use, the same one if it has it."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)  # torch knows these types in name only
    # torch takes the machine's own byte order only
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _checked_dataset(data: Any, what: str) -> Any:
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:5]))
        raise InvalidTypeError(
            f"{what} is a {type(data).__name__} of {names}. Pass one of its parts, such as"
            f" {what}[NAME]. {FORMS}"
        )
    if isinstance(data, (str, bytes, np.ndarray, torch.Tensor)) or hasattr(data, "to_numpy"):
        raise InvalidTypeError(f"{what} is of type {type(data).__name__}, without targets. {FORMS}")
    if isinstance(data, IterableDataset) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    ):
        raise InvalidTypeError(
            f"{what} is of type {type(data).__name__}, which can only be iterated. raypool reads"
            " samples by number, to split mini-batches across the workers and to resume within an"
            " epoch. Pass list(data) if it fits into memory, or a Dataset with __len__ and"
            " __getitem__; else write a loop for pool.train, in which each rank reads its own"
            " part."
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise InvalidTypeError(
            f"{what} is of type {type(data).__name__}, which has no samples by number. {FORMS}"
        )
    return data


def _from_loader(loader: Any, target: Any, what: str) -> Samples:
    dataset, sampler = _checked_dataset(loader.dataset, what), loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        raise InvalidTypeError(
            f"{what} is a DataLoader with its own batch_sampler, or without mini-batches. raypool"
            " splits mini-batches of one size across the workers. Set the DataLoader's batch_size,"
            " and a sampler if the order matters."
        )
    if isinstance(sampler, DistributedSampler):
        raise InvalidTypeError(
            f"{what} is a DataLoader with a DistributedSampler, with which each rank would read its"
            " own part. raypool splits each mini-batch itself. Leave the sampler out."
        )
    # of the plain samplers only the kind counts: raypool orders the samples itself
    is_in_order = type(sampler) is SequentialSampler and len(sampler) == len(dataset)
    own = None if is_in_order or is_shuffled(loader) else sampler
    if own is not None and not hasattr(own, "__len__"):
        raise InvalidTypeError(
            f"The sampler of {what}, a {type(own).__name__}, has no length. Define its __len__, the"
            " number of samples of an epoch: the schedule of the learning rate depends on it."
        )
    if loader.collate_fn is default_collate:
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
            return replace(_from_tensors(dataset, what), sampler=own)
        dataset = in_tensors(dataset)
    settings = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    if loader.multiprocessing_context is not None:
        settings["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    return DatasetSamples(dataset=dataset, target=target, sampler=own, settings=settings)


# --- inputs for predictions, piece by piece -------------------------------------------------------


TARGET_NAMES = ("labels", "label")  # as in Hugging Face's data sets
"""The names of a target in samples that are dicts, unless the user names it."""

ARRAYS = (np.ndarray, torch.Tensor)

KINDS = (
    "a NumPy array, a tensor, a DataFrame, a tuple or dict of those (several inputs), a Dataset"
    " with a length, or a list of samples"
)


class Piece(NamedTuple):
    """The samples from `start` to before `stop`: as columns (see `Columns`), items, or neither."""

    start: int
    stop: int
    columns: Any = None
    items: list[Any] | None = None


class Columns:
    """Samples in arrays or tensors: one, or a tuple or dict of one for each input."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns
        every = leaves(columns)
        self.gives_arrays = all(isinstance(column, np.ndarray) for column in every)  # back, too
        self.bytes_each = sum(column.nbytes for column in every) // max(len(self), 1)

    def __len__(self) -> int:
        return len(leaves(self._columns)[0])

    def piece(self, start: int, stop: int) -> Piece:
        """Return rows."""

        def rows(column: Any) -> Any:
            part = column[start:stop]
            if isinstance(part, np.ndarray):
                return part
            part = part.detach().cpu()
            try:
                return part.numpy()  # torch would pickle all rows with it, not only these
            except (TypeError, RuntimeError):  # bfloat16, say; or sparse
                return part.clone()

        return Piece(start, stop, changed(rows, self._columns, ARRAYS))


class Items:
    """Samples in memory, one by one: a list, or a part of a `TensorDataset`."""

    gives_arrays = False
    bytes_each = 0  # unknown

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def piece(self, start: int, stop: int) -> Piece:
        """Return items, without their targets."""
        inputs = [input_of(self.items[index]) for index in range(start, stop)]
        return Piece(start, stop, items=inputs)


class Elsewhere(Items):
    """Samples that workers read for themselves, each from its own copy of the Dataset."""

    def piece(self, start: int, stop: int) -> Piece:
        """Return the numbers only."""
        return Piece(start, stop)


Inputs = Columns | Items


def samples_of(data: Any) -> Inputs:
    """Return the samples in a user's data."""
    if isinstance(data, (DataLoader, IterableDataset)) or (
        hasattr(data, "__next__") and not hasattr(data, "__getitem__")
    ):
        raise InvalidTypeError(
            f"data is a {type(data).__name__}, which has no samples by number. Pass {KINDS}; for a"
            " DataLoader, its .dataset."
        )
    if isinstance(data, TensorDataset):
        return Columns(_checked_column(input_of(data.tensors)))
    if isinstance(data, list) or (
        isinstance(data, Subset) and isinstance(data.dataset, TensorDataset)
    ):
        return Items(data)
    if isinstance(data, tuple) or (
        isinstance(data, Mapping) and data and all(map(_is_column, data.values()))
    ):
        columns = mapped(_checked_column, data)
        lengths = [len(column) for column in leaves(columns)]
        if not lengths:
            raise InvalidValueError(
                "data=() has no input. Pass an array for each input of the model."
            )
        if len(set(lengths)) > 1:
            raise InvalidValueError(
                f"The inputs have {', '.join(map(str, lengths))} samples. A {type(data).__name__}"
                " is one array for each input of the model, all of the same length; targets do not"
                " belong there."
            )
        return Columns(columns[0] if isinstance(columns, tuple) and len(columns) == 1 else columns)
    if _is_column(data):
        return Columns(_checked_column(data))
    # these have a length and entries, but no samples
    is_plain = isinstance(data, (str, bytes, Mapping, Set))
    if is_plain or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidTypeError(f"data is a {type(data).__name__}. Pass {KINDS}.")
    return Elsewhere(in_tensors(data))


def _is_column(data: Any) -> bool:
    return isinstance(data, (np.ndarray, torch.Tensor)) or hasattr(data, "to_numpy")


def _checked_column(data: Any) -> np.ndarray[Any, Any] | torch.Tensor:
    """Return an array or tensor, of a type that torch can use."""
    if not _is_column(data):
        raise InvalidTypeError(
            f"An input is a {type(data).__name__}. Pass a NumPy array, a tensor or a DataFrame for"
            " each."
        )
    if hasattr(data, "columns"):
        bad = [str(name) for name, kind in data.dtypes.items() if not _is_number(kind)]
        if bad:
            names = f"{', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}"
            raise InvalidTypeError(
                f"The table has columns that are not numbers: {names}. Leave them out, or encode"
                " them first."
            )
        data = floats_of(data)
    if not isinstance(data, torch.Tensor):
        data = in_torch_type(np.asarray(data.to_numpy() if hasattr(data, "to_numpy") else data))
    column: np.ndarray[Any, Any] | torch.Tensor = data
    if column.ndim == 0:
        raise InvalidValueError(
            "data is a single number. The first dimension of an input is that of the samples."
        )
    if isinstance(column, np.ndarray):
        try:
            torch.from_numpy(column[:0].copy())  # torch itself says which types it takes
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(
                f"data is an array of {column.dtype}, which torch cannot convert to a tensor:"
                f" {error}"
            ) from None
    return column


def floats_of(table: Any) -> np.ndarray[Any, Any]:
    """Return the columns of a table as one array of floats."""
    # of integers too, so that training and predicting see the same
    is_single = all(kind == "float32" for kind in table.dtypes)
    array: np.ndarray[Any, Any] = table.to_numpy(dtype="float32" if is_single else "float64")
    return array


def in_tensors(dataset: Any) -> Any:
    """Return a data set of Hugging Face that gives tensors; any other as it is."""
    form = getattr(dataset, "format", None)
    # its user has chosen no format: samples would be lists of numbers, of which torch would make a
    # mini-batch column by column
    has_none = isinstance(form, Mapping) and form.get("type", "") is None
    return dataset.with_format("torch") if has_none and hasattr(dataset, "with_format") else dataset


class Named(dict[Any, Any]):
    """The inputs of samples that are dicts, unlike one that is a dict: see `call_model`."""


def input_of(sample: Any) -> Any:
    """Return a sample's input: of a pair the first entry, of a dict all but the label.

    Example:
        >>> input_of((1.5, "cat")), input_of((1.5,)), input_of({"x": 1.5, "label": "cat"})
        (1.5, 1.5, {'x': 1.5})
    """
    if isinstance(sample, Mapping):
        return Named((name, value) for name, value in sample.items() if name not in TARGET_NAMES)
    if not isinstance(sample, (tuple, list)):
        return sample
    if not 1 <= len(sample) <= 2:
        raise InvalidValueError(
            f"A sample is a tuple of {len(sample)}. Make it the input, or a pair (input, target);"
            " several inputs are a tuple in place of the input."
        )
    return sample[0]


def batch_of(piece: Piece, first: int, last: int, dataset: Any) -> Any:
    """Return the inputs of a mini-batch in a piece, as `call_model` takes them."""
    if piece.columns is not None:
        rows = slice(first - piece.start, last - piece.start)

        def tensor(column: Any) -> torch.Tensor:
            part = column[rows]
            # a new one of an array: models work in place, and the memory may be the caller's
            return part if isinstance(part, torch.Tensor) else torch.from_numpy(part.copy())

        return changed(tensor, piece.columns, ARRAYS)
    if piece.items is not None:
        inputs = piece.items[first - piece.start : last - piece.start]
    else:
        inputs = [input_of(dataset[index]) for index in range(first, last)]
    batch = default_collate(inputs)
    return tuple(batch) if isinstance(inputs[0], tuple) else batch


# --- calls of a model -----------------------------------------------------------------------------


def call_model(call: Callable[..., Any], model: Any, inputs: Any) -> Any:
    """Call a model, or a wrapper around it (`call`), with the inputs of a mini-batch.

    Those in a tuple are its arguments in order. Those in a dict are its arguments by name, without
    those that it does not have; if it has no arguments of such names it gets the dict, or the only
    input that samples have beside their label.
    """
    if isinstance(inputs, tuple):
        return call(*inputs) if _takes(model, inputs, {}) else call(inputs)
    if isinstance(inputs, Mapping):
        parameters: Mapping[str, inspect.Parameter]
        try:
            parameters = inspect.signature(_called(model)).parameters
        except (TypeError, ValueError):  # some builtins do not say what they take
            parameters = {}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        named = {name: value for name, value in inputs.items() if takes_any or name in parameters}
        if named and _takes(model, (), named):
            return call(**named)
        if isinstance(inputs, Named) and len(inputs) == 1:
            return call(*inputs.values())
    return call(inputs)


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
    if isinstance(values, tuple) and hasattr(values, "_fields"):  # a namedtuple
        return type(values)(*(change(value) for value in values))
    if type(values) in (tuple, list):
        return type(values)(change(value) for value in values)
    return values


def changed(change: Callable[[Any], Any], values: Any, kind: type | tuple[type, ...]) -> Any:
    """Return nested tuples, lists and mappings, with all values of a kind changed."""
    if isinstance(values, kind):
        return change(values)
    return mapped(lambda value: changed(change, value, kind), values)


def leaves(values: Any) -> list[Any]:
    """Return the values in nested tuples and mappings, one after the other."""
    if not isinstance(values, (tuple, Mapping)):
        return [values]
    parts = values.values() if isinstance(values, Mapping) else values
    return [leaf for part in parts for leaf in leaves(part)]
