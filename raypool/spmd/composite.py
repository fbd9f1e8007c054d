"""`Composite`, the values of an spmd call, each on its worker; and the parts that workers keep."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, Generic, NamedTuple, TypeVar, overload

from raypool.channel.feed import as_html
from raypool.core.model import WorkerState
from raypool.engine.engine import Engine, submit_call
from raypool.errors import (
    CompositeError,
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    RaypoolError,
    WorkerLostError,
)
from raypool.futures import Future
from raypool.gpus.memory import kept
from raypool.options import Options, Where
from raypool.worker.running import PLAIN, in_task

# --- parts: the values of Composites that live in this process, by key and rank -------------------
#
# On Ray a process has one rank; with "threads" and "inline" it has them all. There is no lock:
# every change is a single step of a dict, so a finalizer may drop a Composite at any point.


PLAIN_BYTES = 1024
"""An immutable value up to this size [bytes] is also kept in the Composite itself."""

MOST_TRACES = 1000
"""Of the values in a dict, list or tuple that is freed, only so many are watched."""

MAX_TEXT = 100
"""A description has at most this length [characters]: it is one line of several."""

T = TypeVar("T")

_parts: dict[str, dict[int, Any]] = {}


class Description(NamedTuple):
    """A part, as the holder of the Composite knows it.

    `text`: its type, and its shape or size. `plain`: the value itself if it is small and cannot
    change, else empty.
    """

    text: str
    plain: tuple[Any, ...] = ()


class Gone(NamedTuple):
    """The answer of a worker that does not have the part."""


class PartOf(NamedTuple):
    """A Composite in the arguments of an spmd call; each rank replaces it with its own part."""

    key: str


def keep(key: str, rank: int, value: Any) -> Description:
    """Keep a value as the part of a rank; return its description."""
    _parts.setdefault(key, {})[rank] = value
    description = describe(value)
    if not description.plain:  # a plain value is in the description already
        # its GPU memory is kept on purpose, not left over by the call
        kept.treasures[key] = None
        kept.all()
    return description


def find(key: str, rank: int) -> Any:
    """Return the part itself, or raise a CompositeError."""
    try:
        return _parts[key][rank]
    except KeyError:
        raise CompositeError(
            f"The part of rank {rank} of a Composite is no longer on this worker: the worker was"
            " replaced, or the part deleted, after the call was submitted. Create it again in an"
            " spmd call, or assign it.",
            rank=rank,
        ) from None


def read(key: str, rank: int, *, travels: bool = True) -> Any:
    """Return the part, or `Gone`; if it travels, a GPU's tensor as a copy on the CPU."""
    try:
        value = _parts[key][rank]
    except KeyError:  # deleted, or this is a new process: the caller raises the error
        return Gone()
    torch = sys.modules.get("torch")
    if travels and torch is not None and issubclass(type(value), torch.Tensor) and value.is_cuda:
        return value.detach().cpu().requires_grad_(value.requires_grad)
    return value


def remove(key: str, rank: int) -> None:
    """Forget the part of one rank, if it is here, and release its memory."""
    own = _parts.get(key, {})
    traces = _traces(own.pop(rank, None))
    if not own:
        drop(key)
    _release(traces)


def drop(key: str) -> None:
    """Forget all parts that this process has of a Composite."""
    _parts.pop(key, None)
    kept.treasures.pop(key, None)


def forget(*keys: str) -> None:
    """Drop all parts of Composites in a worker's own process, and release their memory."""
    values = itertools.chain.from_iterable(_parts.get(key, {}).values() for key in keys)
    traces = [trace for value in values for trace in _traces(value)]
    for key in keys:
        drop(key)
    _release(traces)


def _traces(value: Any) -> list[weakref.ref[Any]]:
    """Return weak references to a value, and to what is in it if it is a dict, list or tuple."""
    traces = []
    with contextlib.suppress(Exception):  # of a user's own class, which may raise anything
        inner = value.values() if isinstance(value, dict) else value
        inner = inner if isinstance(value, (dict, list, tuple)) else ()
        for each in (value, *itertools.islice(inner, MOST_TRACES)):
            with contextlib.suppress(TypeError):  # a number, say, cannot be in a cycle
                traces.append(weakref.ref(each))
    return traces


_outliving: dict[int, weakref.ref[Any]] = {}
"""Objects that were there after a collection, by the id of the reference: others hold them."""


def _release(traces: Sequence[weakref.ref[Any]]) -> None:
    global _outliving
    # A Lightning module and its trainer refer to each other, and both to the GPU: only the
    # collector frees these. It takes 0.1 s and more, so not for a tensor that has gone already, or
    # for a class, which lives on.
    left = [trace for trace in traces if trace() is not None and id(trace) not in _outliving]
    if left:
        gc.collect()
        known = (*_outliving.values(), *left)
        _outliving = {id(trace): trace for trace in known if trace() is not None}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes on this GPU see the cache as taken


# --- descriptions of values -----------------------------------------------------------------------


def describe(value: Any) -> Description:
    """Describe a value."""
    try:
        text = _text_of(value)
    except Exception:  # of the user's class, whose methods may raise anything
        text = type(value).__name__
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT - 3]}..."
    is_plain = type(value) in PLAIN and sys.getsizeof(value) <= PLAIN_BYTES
    return Description(text, (value,) if is_plain else ())


def _text_of(value: Any) -> str:
    kind, name = type(value), "None" if value is None else type(value).__name__
    torch = sys.modules.get("torch")
    if kind is str:
        return f"str of {_count(len(value), 'character')}"
    if issubclass(kind, (dict, list, tuple, set, frozenset, bytes, bytearray)):
        return f"{name} of {len(value)}"
    if torch is not None and issubclass(kind, torch.nn.Module):
        parameters = list(value.parameters())
        count = _count(sum(parameter.numel() for parameter in parameters), "parameter")
        return f"{name}, {count}{_device_of(parameters[0]) if parameters else ''}"
    # an array, a tensor, a table, or an object of the user's that has a shape of another kind
    shape = value.shape if hasattr(kind, "shape") else None
    if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
        return name
    dtype = str(value.dtype).removeprefix("torch.") if hasattr(kind, "dtype") else ""
    if dtype == name:  # a number of NumPy's
        return name
    device = _device_of(value) if torch is not None and issubclass(kind, torch.Tensor) else ""
    return f"{name} {tuple(shape)} {dtype}".rstrip() + device


def _device_of(tensor: Any) -> str:
    return "" if tensor.device.type == "cpu" else f" on {tensor.device}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


MAX_LINES = 16
"""The text of a Composite lists at most this many ranks."""


class PartInfo(NamedTuple):
    """The worker of a rank's part (its number, and its process), and the description, if any."""

    place: int
    worker_id: int
    description: Description | None


class Composite(Generic[T]):
    """The return value of each rank of an spmd call, still on its worker. Made by `pool.spmd`.

    `c[rank]` returns the current value of a rank, `c[1:]` a list of several; both wait until those
    workers are free, except for small values that cannot change (a number, a short text, None).
    `c[rank] = value` sends a value to the worker of that rank and keeps it there, even if there was
    none; `del c[rank]` frees the memory of one part. Iteration yields all values in rank order.

    Passed as a separate argument to another spmd call, it gives each rank its own part, and nothing
    is moved: a model that was loaded once serves any number of calls. Changes that a call makes to
    the part persist.

    The parts live as long as this object, their workers and the pool. With "threads" and "inline"
    they are objects of this process, and reading one returns the object itself. On Ray it returns a
    copy: a tensor on a GPU arrives on the CPU, but a model stays on its device, so move it to the
    CPU first if there is no GPU here.

    Source:
        MATLAB R2025b, Composite.

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     models = pool.spmd(lambda context: {"bias": context.rank})
        ...     models
        ...     models[1] = {"bias": 10}
        ...     biases = pool.spmd(lambda context, model: model["bias"], models)
        ...     list(biases), models[-1]
        <Composite of 2 ranks>
          0: dict of 1
          1: dict of 1
        ([0, 10], {'bias': 10})
    """

    def __init__(self, engine: Engine, key: str, entries: Sequence[PartInfo]) -> None:
        self._engine = engine
        self._key = key
        self._entries = list(entries)  # by rank; changed one by one, never in length
        self._is_in_task = in_task()  # made by a call within a task, which then may read it
        # not at exit, when the workers end with all that they keep
        weakref.finalize(self, _free, weakref.ref(engine), key, self._entries).atexit = False

    # --- queries that ask no worker ---------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def workers(self) -> tuple[int, ...]:
        """The number of the worker of each rank."""
        return tuple(entry.place for entry in self._entries)

    def exists(self, rank: int) -> bool:
        """Return whether this rank has a value and its worker lives, without asking the worker.

        Raises:
            CompositeError: There is no such rank.
        """
        entry = self._entries[self._index(rank)]
        return (
            not self._engine.is_over
            and entry.description is not None
            and _lives(self._engine, entry.worker_id)
        )

    def __repr__(self) -> str:
        lines = [f"<Composite of {_count(len(self), 'rank')}>"]
        if self._engine.is_over:
            return f"{lines[0]} (the pool is closed)"
        lines += [
            f"  {rank}: {self._state_of(entry)}"
            for rank, entry in enumerate(self._entries[:MAX_LINES])
        ]
        if len(self) > MAX_LINES:
            lines.append(f"  ... and {len(self) - MAX_LINES} more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import pandas as pd

        parts = {
            "worker": self.workers,
            "value": [self._state_of(entry) for entry in self._entries],
        }
        index = pd.RangeIndex(len(self), name="rank")
        title = f"<Composite of {_count(len(self), 'rank')}>"
        return as_html(title, pd.DataFrame(parts, index))

    def _state_of(self, entry: PartInfo) -> str:
        if entry.description is None:
            return "missing"
        if _lives(self._engine, entry.worker_id):
            return entry.description.text
        return f"lost with worker {entry.place}"

    def __reduce__(self) -> Any:
        raise InvalidTypeError(
            "A Composite's parts stay on their workers: pass it to pool.spmd as a separate"
            " argument, or send c[rank]."
        )

    # --- reading ----------------------------------------------------------------------------------

    @overload
    def __getitem__(self, rank: int) -> T: ...
    @overload
    def __getitem__(self, rank: slice) -> list[T]: ...
    def __getitem__(self, rank: int | slice) -> T | list[T]:
        """Return the value of a rank; for a slice, a list of several.

        Raises:
            CompositeError: There is no rank `.rank`, its part is missing, or its worker is lost.
            PoolClosedError: The pool was shut down.
            SerializationError: The value cannot travel.
            InvalidTypeError: `rank` is not a number or slice, or this is called in a task.
            InvalidValueError: This is the callback of a future, which would wait for itself.
        """
        if isinstance(rank, slice):
            return list(self._read(range(len(self))[rank]))
        return next(self._read([self._index(rank)]))

    def __iter__(self) -> Iterator[T]:
        return self._read(range(len(self)))

    def _read(self, ranks: Sequence[int]) -> Iterator[T]:
        """Ask the workers of all these ranks at once, then yield their answers."""
        self._check_usable()
        entries = [self._present(rank) for rank in ranks]
        travels = self._engine.profile.backend == "ray"
        asked = [
            None
            if entry.description.plain
            else self._call(read, rank, "reading rank {} of a Composite", travels=travels)
            for rank, entry in zip(ranks, entries, strict=True)
        ]
        return (
            entry.description.plain[0] if future is None else self._answer(rank, entry, future)
            for rank, entry, future in zip(ranks, entries, asked, strict=True)
        )

    def _answer(self, rank: int, entry: PartInfo, future: Future[Any]) -> Any:
        value = self._wait(rank, entry, future)
        if type(value) is Gone:
            raise self._lost(rank, entry)
        return value

    # --- changes ----------------------------------------------------------------------------------

    def __setitem__(self, rank: int, value: Any) -> None:
        """Send a value to the worker of a rank, and keep it there; return once it has arrived.

        Raises:
            CompositeError: There is no such rank, or its worker was lost meanwhile or has left the
                pool.
            SerializationError: The value cannot be sent.
            PoolClosedError: The pool was shut down.
        """
        rank = self._index(rank)
        self._check_usable()
        place = self._entries[rank].place
        now_there = self._engine.driver.scheduler.workers.places.get(place)
        if now_there is None:
            raise CompositeError(
                f"Worker {place} of rank {rank} is no longer in the pool, so nothing can be kept"
                " there. Create another Composite in an spmd call.",
                rank=rank,
            )
        before = now_there.worker_id
        future = self._call(keep, rank, "assigning rank {} of a Composite", value=value)
        description = self._wait(rank, self._entries[rank], future)
        entry = self._entries[rank] = PartInfo(place, before, description)
        # the worker may have been replaced before the call, or after it
        if not _lives(self._engine, entry.worker_id):
            raise self._lost(rank, entry)

    def __delitem__(self, rank: int) -> None:
        """Free the memory of the part of a rank; from then on it is missing.

        Raises:
            CompositeError: There is no such rank, or its part is missing already.
        """
        rank = self._index(rank)
        self._check_usable()
        entry = self._entries[rank]
        if entry.description is None:
            raise self._missing(rank)
        self._entries[rank] = entry._replace(description=None)
        if _lives(self._engine, entry.worker_id):
            with contextlib.suppress(CompositeError):  # lost meanwhile: it is gone all the same
                self._wait(rank, entry, self._call(remove, rank, "deleting rank {} of a Composite"))

    # --- requests to workers ----------------------------------------------------------------------

    def _call(self, fn: Any, rank: int, name: str, **more: Any) -> Future[Any]:
        # no retries: the worker that replaces a lost one does not have the part
        options = Options(retries=0, name=name.format(rank))
        where = Where(self._entries[rank].place)
        return submit_call(self._engine, fn, (self._key, rank), more, options, where)

    def _wait(self, rank: int, entry: PartInfo, future: Future[Any]) -> Any:
        try:
            return future.result()
        except WorkerLostError as error:
            self._check_open()  # a pool's end ends its workers, too, and is the better reason
            raise self._lost(rank, entry) from error
        except CancelledError:
            self._check_open()
            raise
        except BaseException:
            future.cancel()  # Ctrl-C, say: the answer is no longer wanted
            raise

    def _index(self, rank: Any) -> int:
        """Return the number of a rank, counted from the front."""
        try:
            if isinstance(rank, bool):  # an index to Python, a mistake here
                raise TypeError
            number = operator.index(rank)
        except TypeError:
            raise InvalidTypeError(
                f"A rank is a number from 0 to {len(self) - 1}, not {rank!r}."
            ) from None
        if not -len(self) <= number < len(self):
            raise CompositeError(
                f"There is no rank {number}: this Composite has {_count(len(self), 'rank')}, 0 to"
                f" {len(self) - 1}.",
                rank=number,
            )
        return number % len(self)

    def _check_usable(self) -> None:
        """Check that the workers can be asked from here."""
        self._check_open()
        if in_task() and not self._is_in_task:
            raise InvalidTypeError(
                "A Composite cannot be used within a task: its parts stay on their workers. Pass"
                " it to pool.spmd as a separate argument, or send c[rank]."
            )
        if self._engine.driver.is_own_thread:
            raise InvalidValueError(
                "A Composite cannot be used here: this is the thread of its own pool (which runs"
                " callbacks of futures), and it would wait for itself. Use another thread, or"
                " raypool.after_each."
            )

    def _check_open(self) -> None:
        try:
            self._engine.check_open()
        except PoolClosedError:
            raise PoolClosedError(
                "The pool was shut down, and the parts of this Composite are gone."
            ) from None

    def _present(self, rank: int) -> Any:
        entry = self._entries[rank]
        if entry.description is None:
            raise self._missing(rank)
        if not _lives(self._engine, entry.worker_id):
            raise self._lost(rank, entry)
        return entry

    def _missing(self, rank: int) -> CompositeError:
        return CompositeError(
            f"The part of rank {rank} is missing: it was deleted. Assign c[{rank}] = ... first.",
            rank=rank,
        )

    def _lost(self, rank: int, entry: PartInfo) -> CompositeError:
        if entry.place in self._engine.driver.scheduler.workers.places:
            what = "was lost, or replaced (idle_timeout_s, fresh_process)"
            how = f"Create it again in an spmd call, or assign c[{rank}] = ..."
        else:
            what, how = "is no longer in the pool", "Create another Composite in an spmd call."
        return CompositeError(
            f"Worker {entry.place} {what}, and the part of rank {rank} with it. {how}",
            rank=rank,
        )

    # --- checks for spmd calls --------------------------------------------------------------------

    def check_complete(self, num_ranks: int) -> None:
        """Check, for the pool, that each of the first `num_ranks` ranks has a part.

        Raises:
            PoolClosedError: The pool was shut down.
            CompositeError: A part is missing, or its worker is lost.
        """
        self._check_open()
        for rank in range(num_ranks):
            self._present(rank)

    def check_for(self, engine: Engine, places: tuple[int, ...]) -> None:
        """Check, for the pool, that each rank of a call on these workers finds its part.

        Raises:
            PoolClosedError: The pool was shut down.
            InvalidValueError: The Composite is of another pool, or on other workers.
            CompositeError: A part is missing, or its worker is lost.
        """
        self._check_open()
        if self._engine is not engine and not (_is_serial(self._engine) and _is_serial(engine)):
            raise InvalidValueError(
                "A Composite belongs to another pool. Pass it to spmd of that pool, or send"
                " c[rank]."
            )
        if places != self.workers[: len(places)]:
            raise InvalidValueError(
                "A Composite is not where this call runs: its ranks are on workers"
                f" {_listed(self.workers)}; this call runs on {_listed(places)}. Pass"
                f" workers=[{_listed(self.workers)}]."
            )
        self.check_complete(len(places))


def workers_of(args: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the workers of the first Composite among these, None without; check its parts."""
    for arg in args:
        if isinstance(arg, Composite):
            arg.check_complete(len(arg))
            return arg.workers
    return None


def check_located(
    args: Sequence[Any], engine: Engine, size: int, places: tuple[int, ...] | None
) -> None:
    """Check that the Composites among the arguments of a call have their parts where it runs.

    `places`: the workers of the call, rank 0 first; None for any.
    """
    if places is None:
        places = tuple(sorted(engine.driver.scheduler.workers.places))
    for composite in (arg for arg in args if isinstance(arg, Composite)):
        if len(places) != size:
            raise InvalidValueError(
                f"A Composite has its ranks on workers {_listed(composite.workers)}, and this call"
                f" may run on any {size}. Pass workers=[{_listed(composite.workers)}], or leave"
                " workers out."
            )
        composite.check_for(engine, places)


def marked(arg: Any) -> Any:
    """Return an argument of an spmd call as it is sent: a `PartOf` for a Composite."""
    return PartOf(arg._key) if isinstance(arg, Composite) else arg


# --- release of parts -----------------------------------------------------------------------------


def _is_serial(engine: Engine) -> bool:
    # it may be of a single call (in a task, or for workers=0); such engines share their parts
    return engine.profile.backend == "inline" and engine.driver.scheduler.workers.size == 1


def _lives(engine: Engine, worker_id: int) -> bool:
    worker = engine.driver.scheduler.workers.by_id.get(worker_id)
    return worker is not None and worker.state is not WorkerState.PARKED


MOST_SMALL = 100
"""So many Composites of small plain values are freed together."""

# by engine, then by the workers' ids and places: the keys of those that are to be freed
_small: weakref.WeakKeyDictionary[Engine, dict[tuple[tuple[int, int], ...], list[str]]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()  # drivers of several pools share the table, each with its own thread


def _free(engine_ref: weakref.ref[Engine], key: str, entries: list[PartInfo]) -> None:
    """Free the parts of a collected Composite."""
    # a finalizer, which may run at any point: no lock
    engine = engine_ref()
    if engine is None or engine.profile.backend != "ray":
        drop(key)
    elif not engine.is_over:
        seats = tuple((entry.worker_id, entry.place) for entry in entries)
        is_large = any(entry.description and not entry.description.plain for entry in entries)
        engine.driver.do(functools.partial(_forget_soon, engine, key, seats, is_large))


def _forget_soon(
    engine: Engine, key: str, seats: tuple[tuple[int, int], ...], is_large: bool
) -> None:
    # A loop of short spmd calls frees as many Composites of numbers: a call to forget each of them
    # would take as long as the spmd call.
    with _lock:
        small = _small.setdefault(engine, {})
    keys = small.setdefault(seats, [])
    keys.append(key)
    if is_large or len(keys) >= MOST_SMALL:
        del small[seats]
        forget_on(engine, keys, seats)


def forget_on(engine: Engine, keys: Sequence[str], seats: Sequence[tuple[int, int]]) -> None:
    """Let workers (id, place) forget their parts; in the driver's thread, without waiting."""
    if engine.profile.backend != "ray":
        for key in keys:
            drop(key)  # in one process nobody else could use torch's cache, which stays
        return
    for worker_id, place in seats:
        if engine.is_over or not _lives(engine, worker_id):
            continue  # the parts went with their process: none is started for this
        # the pool has ended meanwhile, and its workers with it
        with contextlib.suppress(RaypoolError):
            options = Options(retries=0, name="freeing a Composite")
            future = submit_call(engine, forget, tuple(keys), {}, options, Where(place))
            again = functools.partial(forget_on, engine, keys, [(worker_id, place)])
            future.add_done_callback(functools.partial(_not_cancelled, engine, again))


def _not_cancelled(engine: Engine, again: Callable[[], None], future: Future[None]) -> None:
    """Free the parts even if the call was cancelled: `cancel_all` must not apply to it."""
    if future.cancelled() and not engine.is_over:
        engine.driver.do(again)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
