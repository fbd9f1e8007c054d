"""`pool.predict` and `pool.classify`: a model on all workers, over data of any size.

This module imports torch, and is imported only where torch is needed anyway.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from raypool.channel.records import Function
from raypool.engine.engine import Engine, submit_call
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    RaypoolError,
    add_note,
    checked_count,
)
from raypool.futures import Future, cancel_each
from raypool.gpus.memory import kept
from raypool.options import Options, Where, check_callable
from raypool.train.data import (
    Elsewhere,
    Inputs,
    Piece,
    batch_of,
    call_model,
    changed,
    mapped,
    samples_of,
)
from raypool.worker.running import notes_here

if TYPE_CHECKING:
    from raypool.pool import PoolView

AHEAD = 3
"""The calls under way for each worker: none waits for the driver, and memory stays flat."""

CALL_S = 0.1
"""Mini-batches share calls until one takes about this long [s]; a call costs about 1 ms."""

PIECE_BYTES = 32 * 1024 * 1024
"""Mini-batches that travel to workers share calls up to this size [bytes]."""


def predict(
    view: PoolView,
    model: Any,
    data: Any,
    mini_batch_size: int,
    output: Callable[[Any], Any] | None,
) -> Any:
    """Return the outputs of a model for data; see `PoolView.predict`."""
    mini_batch_size = checked_count("mini_batch_size", mini_batch_size, least=1)
    if output is not None:
        check_callable(output)
    engine = view._engine
    if engine.driver.is_own_thread:
        raise InvalidValueError(
            "predict() cannot be called in the callback of a future: the pool would wait for"
            " itself. Use a thread."
        )
    samples = samples_of(data)
    key = uuid.uuid4().hex
    dataset = samples.items if isinstance(samples, Elsewhere) else None
    options = replace(view._options, name=view._options.name or "predict")
    with contextlib.closing(_Run(engine, options, view._where(), key)) as run:
        function = engine.function(Predictor(key, still(model), dataset, mini_batch_size, output))
        if len(samples) == 0:
            outputs = _of_nothing(run, function, samples)
        else:
            outputs = joined_packs(run.packs(function, samples, mini_batch_size))
    return as_arrays(outputs) if samples.gives_arrays else outputs


def classify(
    view: PoolView, model: Any, data: Any, labels: Any, mini_batch_size: int
) -> np.ndarray[Any, Any]:
    """Return the class with the highest score for each sample; see `PoolView.classify`."""
    names: np.ndarray[Any, Any] | None = None
    if labels is not None:
        if isinstance(labels, (str, bytes)) or not hasattr(labels, "__len__"):
            raise InvalidTypeError(f"labels must be a list of class names, not {labels!r}.")
        names = np.asarray(labels)
        if names.ndim != 1 or len(names) == 0:
            raise InvalidValueError(
                f"labels has the shape {names.shape}. Pass one name for each class, in the order of"
                " the classes."
            )
    classes = functools.partial(class_numbers, None if names is None else len(names))
    numbers = np.asarray(predict(view, model, data, mini_batch_size, classes))
    numbers = numbers.astype(np.int64, copy=False)  # of no samples they are floats
    return numbers if names is None else names[numbers]


def _of_nothing(run: _Run, function: Function, samples: Inputs) -> Any:
    """Return the outputs for no samples, of the right shape if the model says it."""
    nothing = torch.empty(0)
    if samples.piece(0, 0).columns is None:
        return nothing  # the shape of an input is unknown
    try:
        return joined_packs([run.submit(function, samples, 0, 0).result()])
    except RaypoolError:
        raise
    except Exception:  # not every model takes an empty mini-batch
        return nothing


class _Run:
    """One prediction in progress."""

    def __init__(self, engine: Engine, options: Options, where: Where, key: str) -> None:
        self._engine = engine
        self._options = options
        self._where = where
        self._key = key
        self._pending: deque[tuple[Future[Any], int]] = deque()  # with the number of mini-batches
        self._workers: set[int] = set()  # that may have the model on their GPU

    def packs(self, function: Function, samples: Inputs, size: int) -> list[Pack]:
        """Return the outputs, piece by piece."""
        packs: list[Pack] = []
        total = len(samples)
        first, batches = 0, 1
        while first < total or self._pending:
            width = 1  # the number of workers available now
            if self._where.place is None:
                places = self._where.places or range(self._engine.driver.scheduler.workers.size)
                width = max(len(places), 1)
            while first < total and len(self._pending) < AHEAD * width:
                # the last pieces get smaller, so that the workers end together
                share = math.ceil((total - first) / (size * 2 * width))
                count = max(1, min(batches, share))
                stop = min(first + count * size, total)
                self.submit(function, samples, first, stop, count)
                first = stop
            future, count = self._pending[0]  # still pending: `close` cancels it after Ctrl-C
            try:
                packs.append(future.result())
            except CancelledError:
                raise CancelledError(
                    "The prediction was cancelled, by cancel_all() or because the pool was closed."
                ) from None
            self._pending.popleft()
            self._note(future)
            batches = _batches_per_call(
                future.duration_s, count, batches, samples.bytes_each * size
            )
        return packs

    def submit(
        self, function: Function, samples: Inputs, start: int, stop: int, count: int = 1
    ) -> Future[Any]:
        """Submit a piece of `count` mini-batches; it is pending until somebody takes it."""
        args = (samples.piece(start, stop),)
        future: Future[Any] = submit_call(
            self._engine, function, args, {}, self._options, self._where
        )
        self._pending.append((future, count))
        return future

    def _note(self, future: Future[Any]) -> None:
        if future.worker is not None:
            self._workers.add(future.worker)

    def close(self) -> None:
        """Cancel the remaining calls, and free the model's GPU memory, without waiting."""
        futures = [future for future, _ in self._pending]
        cancel_each(futures)
        for future in futures:
            self._note(future)
        if self._engine.profile.backend != "ray":  # the model is in this process
            let_go(self._key)
            return
        infos = self._engine.driver.infos
        for place in self._workers:
            info = infos.get(place)
            if info is not None and info.gpus and not self._engine.is_over:
                with contextlib.suppress(RaypoolError):  # the pool has ended meanwhile
                    options = Options(retries=0, name="freeing a model")
                    submit_call(self._engine, let_go, (self._key,), {}, options, Where(place))


def _batches_per_call(duration_s: float | None, count: int, before: int, batch_bytes: int) -> int:
    """Return how many mini-batches the next call has, after one of `count` that took this long.

    Example:
        >>> [_batches_per_call(s, 1, n, 1_000_000) for s, n in ((0.001, 1), (0.5, 1), (0.001, 64))]
        [4, 1, 33]
    """
    if not duration_s:
        return before
    wanted = int(CALL_S / (duration_s / count))
    by_size = PIECE_BYTES // batch_bytes if batch_bytes else wanted
    return max(1, min(wanted, by_size, 4 * before))


# --- in a worker: the model on its device, mini-batch by mini-batch, and its outputs --------------


class Predictor:
    """A model with its settings; shipped to each worker once, and called there with pieces.

    `key`: under which a model that was moved to a GPU is kept there, until `let_go`. `dataset`:
    that workers read themselves, None if the pieces carry the samples. `output`: converts the
    outputs of a mini-batch.
    """

    __name__ = "predict"

    def __init__(
        self,
        key: str,
        model: Any,
        dataset: Any,
        mini_batch_size: int,
        output: Callable[[Any], Any] | None,
    ) -> None:
        self._key = key
        self._model = model
        self._dataset = dataset
        self._size = mini_batch_size
        self._output = output

    def __call__(self, piece: Piece) -> Pack:
        """Return the outputs of the mini-batches of a piece, on the CPU."""
        device = device_here() if isinstance(self._model, nn.Module) else torch.device("cpu")
        if device.type != "cpu":
            with _lock:  # on the GPU once, also where several threads predict
                if self._key not in _on_gpu:
                    with kept.on_purpose():
                        self._model.to(device)
                    _on_gpu[self._key] = self
        model, dtype = self._model, None  # without weights inputs keep their type
        if isinstance(model, nn.Module):
            tensors = (*model.parameters(), *model.buffers())
            dtype = next((each.dtype for each in tensors if each.is_floating_point()), None)
        outputs = []
        with torch.no_grad():  # in pools of this process the user gets these very tensors
            # an empty piece is one empty mini-batch: its outputs have the right shape
            for first in range(piece.start, piece.stop, self._size) or [piece.start]:
                last = min(first + self._size, piece.stop)
                try:
                    batch = batch_of(piece, first, last, self._dataset)
                    outputs.append(self._outputs(model, _moved(batch, device, dtype), last - first))
                except Exception as error:
                    add_note(error, f"raypool: samples {first} to {last - 1} of the data")
                    raise
            return packed(outputs)

    def drop(self) -> None:
        """Let go of the model."""
        self._model = None  # its worker keeps this object for as long as it knows the function

    def _outputs(self, model: Any, batch: Any, count: int) -> Any:
        outputs = call_model(model, model, batch)
        if self._output is None:
            _check_rows(outputs, count)
        else:
            outputs = self._output(outputs)
        return _moved(outputs, torch.device("cpu"), None)


def device_here() -> torch.device:
    """Return the device of this worker: its GPU, also for work that a task has called for."""
    has_gpu = any(note.gpu is not None for note in notes_here())
    return torch.device("cuda:0" if has_gpu and torch.cuda.is_available() else "cpu")


_on_gpu: dict[str, Predictor] = {}
_lock = threading.Lock()  # workers in threads share the table, and the model that is moved


def let_go(key: str) -> None:
    """Free the GPU of a model, if it is on one."""
    with _lock:
        predictor = _on_gpu.pop(key, None)
    if predictor is not None:
        predictor.drop()
        torch.cuda.empty_cache()


def still(model: Any) -> Any:
    """Return a copy of a model to predict with, in `eval` mode and on the CPU."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type) or not callable(model):
            raise InvalidTypeError(
                f"model={model!r} is not a model. Pass a torch.nn.Module (not its class), or a"
                " function of a mini-batch."
            )
        try:
            inspect.signature(model).bind(None)
        except TypeError:  # it may make a model, as `fit` takes it, and would fail on a worker
            name = getattr(model, "__name__", repr(model))
            raise InvalidTypeError(
                f"model={name} is a function that cannot be called with a mini-batch alone. If it"
                f" makes the model, pass {name}()."
            ) from None
        except ValueError:  # some builtins do not say what they take
            pass
        return model
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise InvalidTypeError(
            "The model has parameters without a shape yet. Call it once with a mini-batch first."
        )
    try:
        # the same values in objects that may be moved without the caller's being moved too
        known = {}
        for tensor in tensors:
            values = tensor.detach().cpu()
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = (
                nn.Parameter(values, requires_grad=False) if is_parameter else values
            )
        return copy.deepcopy(model, known).eval()
    except Exception as error:
        raise InvalidTypeError(
            f"The model cannot be copied ({type(error).__name__}: {error}), as is needed to send"
            " it. Keep its tensors as parameters or buffers, and create files, locks and the like"
            " on first use."
        ) from error


def _moved(values: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return values with their tensors on a device, those of floating point as `dtype`."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return changed(move, values, torch.Tensor)


def _check_rows(outputs: Any, count: int) -> None:
    """Check that a model has given a row for each sample."""
    if isinstance(outputs, (torch.Tensor, np.ndarray, list)):
        rows = len(outputs) if isinstance(outputs, list) or outputs.ndim else None
        if rows != count:
            what = f"{rows} entries"
            if not isinstance(outputs, list):
                what = f"an output of shape {tuple(outputs.shape)}"
            raise InvalidValueError(
                f"The model returns {what} for {count} samples, which should be the first"
                " dimension. If it reduces over them, pass output=, which may return anything for"
                " a mini-batch."
            )
    elif isinstance(outputs, (tuple, Mapping)) and outputs:
        for output in outputs.values() if isinstance(outputs, Mapping) else outputs:
            _check_rows(output, count)
    else:
        raise InvalidTypeError(
            f"The model returns a {type(outputs).__name__}, not tensors. Convert it with output=."
        )


class PackedRows(NamedTuple):
    """Tensors that fit together, as one; `sizes`: their rows, None if they have no dimension."""

    tensor: torch.Tensor
    sizes: list[int] | None


class PackedColumns(NamedTuple):
    """Tuples or dicts that are alike, entry by entry; `form`: see `_form`."""

    form: Any
    packs: list[Any]


Pack = PackedRows | PackedColumns | list[Any]
"""The outputs of some mini-batches, to travel; a list has one for each.

To pickle a tensor takes as long as a small model does for a mini-batch.
"""


def packed(outputs: Sequence[Any]) -> Pack:
    """Return the outputs of some mini-batches in one; `unpacked` takes them apart again."""
    first, forms = outputs[0], set(map(_form, outputs))
    if len(forms) > 1 or None in forms:
        return list(outputs)
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            return PackedRows(torch.stack(list(outputs)), None)
        return PackedRows(torch.cat(list(outputs)), [len(output) for output in outputs])
    entries = [tuple(each.values()) if isinstance(each, dict) else each for each in outputs]
    return PackedColumns(_form(first), [packed(column) for column in zip(*entries, strict=True)])


def unpacked(pack: Pack) -> list[Any]:
    """Return the output of each mini-batch."""
    if isinstance(pack, PackedRows):
        parts = pack.tensor.unbind() if pack.sizes is None else pack.tensor.split(pack.sizes)
        return [part.clone() for part in parts]  # a view would keep all of it in memory
    if isinstance(pack, PackedColumns):
        columns = map(unpacked, pack.packs)
        return [_formed(pack.form, entries) for entries in zip(*columns, strict=True)]
    return pack


def joined_packs(packs: Sequence[Pack]) -> Any:
    """Join the outputs of all mini-batches, whichever of them share a pack."""
    first = packs[0]
    if isinstance(first, PackedColumns) and all(
        isinstance(pack, PackedColumns) and pack.form == first.form for pack in packs
    ):
        columns = zip(*(pack.packs for pack in packs), strict=True)  # type: ignore[union-attr]
        return _formed(first.form, [joined_packs(column) for column in columns])
    tensors = [pack.tensor for pack in packs if isinstance(pack, PackedRows)]
    if len(tensors) == len(packs) and len(set(map(_form, tensors))) == 1:
        return torch.cat(tensors)
    return joined([output for pack in packs for output in unpacked(pack)])


def _form(output: Any) -> tuple[Any, ...] | None:
    """Return what outputs have in common that share a pack; None: nothing does."""
    kind = type(output)
    if kind is torch.Tensor and output.layout is torch.strided:
        return kind, output.dtype, output.shape[1:] if output.ndim else None
    if isinstance(output, dict) and output:
        return dict, tuple(output)
    if (kind is tuple or hasattr(output, "_fields")) and output:
        return kind, len(output)
    return None


def _formed(form: tuple[Any, ...], entries: Sequence[Any]) -> Any:
    kind, names = form
    if kind is dict:
        return dict(zip(names, entries, strict=True))
    return tuple(entries) if kind is tuple else kind(*entries)


def joined(parts: Sequence[Any]) -> Any:
    """Join the outputs of all mini-batches: arrays and lists end to end, others as a list.

    Example:
        >>> joined([["a", "b"], ["c"]]), joined([("x", 1), ("y", 2)]), joined([0.5, 0.25])
        (['a', 'b', 'c'], (['x', 'y'], [1, 2]), [0.5, 0.25])
    """
    first = parts[0]
    is_dict, is_tuple = isinstance(first, Mapping), isinstance(first, tuple)
    if any(
        type(part) is not type(first)
        or (is_dict and part.keys() != first.keys())
        or (is_tuple and len(part) != len(first))
        for part in parts
    ):
        return list(parts)
    if isinstance(first, (torch.Tensor, np.ndarray)):
        rows = [part.reshape(1) if part.ndim == 0 else part for part in parts]
        shapes = list(dict.fromkeys(tuple(part.shape[1:]) for part in rows))
        if len(shapes) > 1:
            raise InvalidValueError(
                "The outputs of two mini-batches do not fit together: a sample has the shape"
                f" {shapes[0]} in one, {shapes[1]} in another. Convert them to one shape with"
                " output=, or return a list with an entry for each sample there."
            )
        return torch.cat(rows) if isinstance(first, torch.Tensor) else np.concatenate(rows)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        columns = [joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return list(parts)


def as_arrays(outputs: Any) -> Any:
    """Return outputs with NumPy arrays in place of tensors."""
    if isinstance(outputs, torch.Tensor):
        # NumPy has no such type
        return (outputs.float() if outputs.dtype == torch.bfloat16 else outputs).numpy()
    return mapped(as_arrays, outputs)


def class_numbers(num_labels: int | None, scores: Any) -> torch.Tensor:
    """Return the class with the highest score for each sample, on the worker; of so many labels."""
    if not isinstance(scores, torch.Tensor):
        raise InvalidTypeError(
            f"The model returns a {type(scores).__name__}, not a tensor of scores. Use predict"
            " with output=."
        )
    if scores.ndim < 2 or scores.shape[1] < 2:
        raise InvalidValueError(
            f"The model returns an output of shape {tuple(scores.shape)}, not a score for each"
            " class in dimension 1. For a single score use predict(model, data, output=lambda"
            " y: y > 0), with the threshold that fits it."
        )
    if num_labels not in (None, scores.shape[1]):
        raise InvalidValueError(
            f"labels has {num_labels} entries, but the model has {scores.shape[1]} classes."
        )
    return scores.argmax(1)
