"""`pool.predict` and `pool.classify`: a model on all workers, over data of any size.

Imports torch, and is imported by what needs it anyway.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np

from raypool.channel.records import Function
from raypool.counts import checked_count
from raypool.engine.calls import Where, submit_call, submit_function
from raypool.engine.engine import Engine
from raypool.errors import InvalidTypeError, InvalidValueError, RaypoolError
from raypool.futures import Future
from raypool.gathered import cancel_each
from raypool.options import Options, check_callable
from raypool.train.predictor import Classes, Predictor, as_arrays, joined, let_go, still
from raypool.train.samples import Elsewhere, Samples, samples_of

AHEAD = 3
"""So many calls for each worker are under way: enough that none waits for the driver, few enough that memory stays flat."""

CALL_S = 0.1
"""Mini-batches share calls until one takes about this long [s]: long beside the millisecond that a call costs."""

PIECE_BYTES = 32 * 1024 * 1024
"""Mini-batches that are sent share calls up to this size."""


def predict_with(  # noqa: PLR0913 - where to run, then the arguments of the verb
    engine: Engine,
    options: Options,
    where: Where,
    model: Any,
    data: Any,
    *,
    mini_batch_size: int = 128,
    output: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a model gives for data, computed on all workers; see `PoolView.predict`.

    Raises:
        InvalidTypeError, InvalidValueError: An argument cannot work.
        SerializationError: The model, the data or `output` cannot be sent.
        Exception: What the model has raised, with a note of the samples.
    """
    mini_batch_size = checked_count("mini_batch_size", mini_batch_size, least=1)
    if output is not None:
        check_callable(output)
    if engine.driver.is_own_thread:
        raise InvalidValueError(
            "predict cannot be waited for in the callback of a future: the pool would wait for itself. Use a thread."
        )
    samples = samples_of(data)
    key = uuid.uuid4().hex
    dataset = samples.dataset if isinstance(samples, Elsewhere) else None
    options = replace(options, name=options.name or "predict")
    with contextlib.closing(_Run(engine, options, where, key)) as run:
        function = engine.function(Predictor(key, still(model), dataset, mini_batch_size, output))
        if len(samples) == 0:
            outputs = _of_nothing(run, function, samples)
        else:
            outputs = joined(run.outputs(function, samples, mini_batch_size))
    return as_arrays(outputs) if samples.gives_arrays else outputs


def classify_with(  # noqa: PLR0913 - likewise
    engine: Engine,
    options: Options,
    where: Where,
    model: Any,
    data: Any,
    *,
    labels: Any = None,
    mini_batch_size: int = 128,
) -> np.ndarray[Any, Any]:
    """Return the class to which a model gives the highest score, for each sample; see `PoolView.classify`.

    Raises:
        InvalidTypeError, InvalidValueError: An argument cannot work, or the outputs are no scores of classes.
    """
    names = None if labels is None else _checked_labels(labels)
    classes = Classes(None if names is None else len(names))
    numbers = predict_with(engine, options, where, model, data, mini_batch_size=mini_batch_size, output=classes)
    numbers = np.asarray(numbers).astype(np.int64, copy=False)
    return numbers if names is None else names[numbers]


def _checked_labels(labels: Any) -> np.ndarray[Any, Any]:
    """Return the names of classes as an array with one dimension."""
    if isinstance(labels, (str, bytes)) or not hasattr(labels, "__len__"):
        raise InvalidTypeError(f"labels={labels!r} is not a list of the names of the classes.")
    names = np.asarray(labels)
    if names.ndim != 1 or len(names) == 0:
        raise InvalidValueError(f"labels has the shape {names.shape}. Give one name for each class, in the order of the classes.")
    return names


def _of_nothing(run: _Run, function: Function, samples: Samples) -> Any:
    """Return the outputs for no samples: with the shape and type that they would have, if the model says so."""
    import torch

    nothing = torch.empty(0)
    if samples.piece(0, 0).columns is None:
        return nothing  # nobody knows what an input looks like
    try:
        return run.submit(function, samples, 0, 0).result()
    except RaypoolError:
        raise
    except Exception:  # not every model can do that, and nothing is what was asked for
        return nothing


class _Run:
    """One prediction in progress: hands in pieces, some ahead, and takes their outputs in order."""

    def __init__(self, engine: Engine, options: Options, where: Where, key: str) -> None:
        self._engine = engine
        self._options = options
        self._where = where
        self._key = key
        self._pending: deque[tuple[Future[Any], int]] = deque()  # with how many mini-batches it has
        self._workers: set[int] = set()

    def outputs(self, function: Function, samples: Samples, size: int) -> list[Any]:
        """Return the outputs, piece by piece."""
        outputs: list[Any] = []
        total = len(samples)
        first, batches = 0, 1
        while first < total or self._pending:
            width = self._width()
            while first < total and len(self._pending) < AHEAD * width:
                share = math.ceil((total - first) / (size * 2 * width))
                count = max(1, min(batches, share))
                stop = min(first + count * size, total)
                self._pending.append((self.submit(function, samples, first, stop), count))
                first = stop
            future, count = self._pending[0]
            outputs.append(_result(future))
            self._pending.popleft()
            self._note(future)
            batches = _batches_per_call(future.duration_s, count, batches, samples.bytes_each * size)
        return outputs

    def submit(self, function: Function, samples: Samples, start: int, stop: int) -> Future[Any]:
        """Hand in a piece."""
        piece = samples.piece(start, stop)
        return submit_function(self._engine, function, (piece,), {}, self._options, self._where)

    def _width(self) -> int:
        """Return how many workers there are for it now."""
        places = self._where.places
        return 1 if self._where.place is not None else max(len(places) if places else self._engine.driver.scheduler.crew.size, 1)

    def _note(self, future: Future[Any]) -> None:
        if future.worker is not None:
            self._workers.add(future.worker)

    def close(self) -> None:
        """Cancel what is left, and free the GPUs of the model, waiting for nobody."""
        futures = [future for future, _ in self._pending]
        cancel_each(futures)
        for future in futures:
            self._note(future)
        if self._engine.profile.backend != "ray":
            let_go(self._key)
            return
        infos = self._engine.driver.infos
        for place in self._workers:
            info = infos.get(place)
            if info is not None and info.gpus and not self._engine.is_over:
                with contextlib.suppress(RaypoolError):  # the pool has ended meanwhile
                    options = Options(retries=0, name="freeing a model")
                    submit_call(self._engine, let_go, (self._key,), {}, options, Where(place))


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except CancelledError:
        raise CancelledError("The prediction was cancelled: somebody has called cancel_all(), or closed the pool.") from None


def _batches_per_call(duration_s: float | None, count: int, before: int, batch_bytes: int) -> int:
    """Return how many mini-batches the next call should have, after one of `count` that took so long.

    Example:
        >>> _batches_per_call(0.001, 1, 1, 1000), _batches_per_call(0.5, 1, 1, 1000), _batches_per_call(0.001, 1, 64, 1_000_000)
        (4, 1, 33)
    """
    if not duration_s:
        return before
    wanted = int(CALL_S / (duration_s / count))
    by_size = PIECE_BYTES // batch_bytes if batch_bytes else wanted
    return max(1, min(wanted, by_size, 4 * before))
