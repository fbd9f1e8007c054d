"""How values travel between Ray processes: pickled once, large buffers beside the pickle so that they are not copied on the way.

Ray's own cloudpickle is used. Object references are taken out of the pickle and travel beside it too, so that Ray can count them:
inside it they would keep their objects alive for ever.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
from ray import cloudpickle

from raypool.channel import by_value
from raypool.engine.culprits import find_culprit, kind_of
from raypool.engine.own_memory import own
from raypool.errors import RaypoolError, SerializationError, reduced

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose pickles need nothing from the module that they are in."""

BESIDE_BYTES = 64 * 1024
"""Buffers (of arrays and tensors) from this size on travel beside the pickle: into the object store they are copied, once."""

MAPPED_BYTES = 1024 * 1024
"""Buffers from this size on are not copied out of the object store either, but mapped: only pages that are changed are copied."""

SCRATCH_BYTES = 32 * 1024 * 1024
"""So much memory for copies a worker holds on to, once it was used: the first touch of a page takes longer than the copy."""

INLINE_BYTES = 64 * 1024
"""What is smaller than this in all travels in the message itself, the rest through the object store."""

Packed: TypeAlias = bytes | ray.ObjectRef
"""A pickled value: itself if it is small, else a reference to its parcel in the object store."""


class Parcel(NamedTuple):
    """A pickled value with what travels beside the pickle."""

    header: Any  # bytes; on arrival the memory that holds them
    buffers: list[Any]
    refs: list[Any]

    @property
    def is_small(self) -> bool:
        """Whether the header alone is the value, and fits into a message."""
        return not self.buffers and not self.refs and len(self.header) < INLINE_BYTES

    @property
    def num_bytes(self) -> int:
        """How much travels, without what the references stand for."""
        return sum(memoryview(buffer).nbytes for buffer in (self.header, *self.buffers))

    def for_ray(self) -> tuple[Any, list[Any], list[Any]]:
        """Return what to put into the object store: Ray pickles it once more, and would copy a long pickle in there."""
        return _beside(self.header), self.buffers, self.refs


def _beside(header: bytes) -> bytes | pickle.PickleBuffer:
    return header if len(header) < BESIDE_BYTES else pickle.PickleBuffer(header)


INHERITANCE = "only be shared between processes through inheritance"
"""What multiprocessing says of its locks, queues and values."""


class _Nowhere:
    """A file for pickles that nobody reads."""

    def write(self, data: Any) -> int:
        """Take it and let it go."""
        return memoryview(data).nbytes


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Takes references and the memory of CPU tensors out of the pickle."""

    def __init__(self, file: io.BytesIO | _Nowhere, refs: list[Any], keep_inside: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_inside)
        self._refs = refs

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            self._refs.append(value)
            return _arrived_ref, (len(self._refs) - 1,)
        if isinstance(value, BaseException):
            way = reduced(value)
            return super().reducer_override(value) if way is NotImplemented else way
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _is_plain(value, torch):
            memory = value.detach().reshape(-1).view(torch.uint8).numpy()
            return _arrived_tensor, (memory, value.dtype, tuple(value.shape), value.requires_grad)
        if torch is not None and isinstance(value, torch.nn.Module):
            _warn_if_shared(value)
        if type(value).__module__ == "multiprocessing.connection":  # it would arrive with the number of a file of this process
            raise RuntimeError(f"{type(value).__name__} objects should {INHERITANCE}")
        way = by_value.reduced(value)
        return super().reducer_override(value) if way is NotImplemented else way


def _warn_if_shared(module: Any) -> None:
    parameter = next(module.parameters(recurse=False), None)
    if parameter is not None and parameter.device.type == "cpu" and parameter.is_shared():
        warnings.warn(
            "A model under share_memory() is sent to another process, which gets a copy: what one changes in it, the other does "
            "not see. Return what was trained, or train one model on all workers with pool.train, pool.fit or pool.spmd.",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Whether a tensor is nothing but large memory of this process."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.nbytes >= BESIDE_BYTES
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.is_leaf
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


_arriving: ContextVar[list[Any]] = ContextVar("raypool_arriving")


def _arrived_ref(position: int) -> Any:
    return _arriving.get()[position]


def _arrived_tensor(memory: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """Make a tensor; a function may change what it was given, and torch knows no read-only tensors."""
    import torch

    own = memory if memory.flags.writeable else memory.copy()
    return torch.from_numpy(own).view(dtype).reshape(shape).requires_grad_(requires_grad)


def dump(value: Any, beside_bytes: int = BESIDE_BYTES) -> Parcel:
    """Pickle a value; buffers from this size on stay beside the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    refs: list[Any] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < beside_bytes:
            return True
        buffers.append(buffer)
        return False

    file = io.BytesIO()
    _Pickler(file, refs, keep_inside).dump(value)
    return Parcel(file.getvalue(), buffers, refs)


def load(parcel: Parcel) -> Any:
    """Return the value. Its memory is its own: what is done to it changes nothing in the object store."""
    buffers = map(_arrived_buffer, parcel.buffers)
    if not parcel.refs:
        return pickle.loads(parcel.header, buffers=buffers)
    token = _arriving.set(parcel.refs)
    try:
        return pickle.loads(parcel.header, buffers=buffers)
    finally:
        _arriving.reset(token)


def _arrived_buffer(buffer: Any) -> Any:
    """Return memory that whoever has it may change: a private mapping of a large buffer, a copy of a smaller one."""
    view = memoryview(buffer)
    return own(buffer) if view.nbytes >= MAPPED_BYTES else bytearray(view)


class Unloadable(NamedTuple):
    """Stands for a value that could not be unpickled here."""

    error: BaseException


class ParcelKeeper:
    """Keeps the values of a call as they are when they are returned, whatever happens to them later.

    Their large buffers stay where they are (`loose`) until something else is about to run: `secure` copies them then. So the
    last value of a call is not copied, nor is the only one. Copies are made in memory that the process has had before
    (`SCRATCH_BYTES`), as long as they fit.
    """

    def __init__(self) -> None:
        self.loose: list[Parcel] = []
        self._scratch: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        self._used = 0

    def keep(self, value: Any) -> Parcel:
        """Pickle a value.

        Raises:
            SerializationError: It cannot be pickled.
        """
        if _is_plain_data(value):
            return Parcel(pickle.dumps(value, protocol=5), [], [])
        try:
            parcel = dump(value)
        except Exception as error:
            raise unpicklable(value, "a result back", error) from error
        if parcel.buffers:
            self.loose.append(parcel)
        return parcel

    def secure(self) -> bool:
        """Copy the buffers of what was kept, each once: what runs next may change them. False if there is no memory for that."""
        try:
            for parcel in self.loose:
                parcel.buffers[:] = [self._copied(buffer) for buffer in parcel.buffers]
        except MemoryError:
            return False
        self.loose.clear()
        return True

    def _copied(self, buffer: pickle.PickleBuffer) -> pickle.PickleBuffer:
        source = np.frombuffer(buffer.raw(), np.uint8)
        start, stop = self._used, self._used + len(source)
        if stop > SCRATCH_BYTES:
            return pickle.PickleBuffer(source.copy().data)
        if not len(self._scratch):
            self._scratch = np.empty(SCRATCH_BYTES, np.uint8)  # the system gives what is touched
        self._scratch[start:stop] = source
        self._used = stop
        return pickle.PickleBuffer(self._scratch[start:stop].data)

    def release(self) -> None:
        """Take it that what was kept has travelled before the next value is kept."""
        self.loose.clear()
        self._used = 0


def join(values: list[Any]) -> Parcel:
    """Put values together, those that were kept as parcels among those that need not be, for `load_each`.

    Each parcel is opened by itself, so that one that cannot be opened does not take the others with it.
    """
    plain = [None if type(value) is Parcel else value for value in values]
    others: list[tuple[int, Any, int, int]] = []  # position, pickle, how many buffers and references belong to it
    buffers: list[Any] = []
    refs: list[Any] = []
    for position, value in enumerate(values):
        if type(value) is Parcel:
            others.append((position, _beside(value.header), len(value.buffers), len(value.refs)))
            buffers.extend(value.buffers)
            refs.extend(value.refs)
    long_pickles: list[Any] = []
    header = pickle.dumps((plain, others), protocol=5, buffer_callback=long_pickles.append)
    return Parcel(header, long_pickles + buffers, refs)


def load_each(parcel: Parcel) -> list[Any]:
    """Return the values that `join` has put together; an `Unloadable` for each that cannot be unpickled here."""
    values: list[Any]
    buffers, refs = iter(parcel.buffers), iter(parcel.refs)
    values, others = pickle.loads(parcel.header, buffers=buffers)  # takes those that are pickles
    for position, header, num_buffers, num_refs in others:
        own = Parcel(header, list(islice(buffers, num_buffers)), list(islice(refs, num_refs)))
        try:
            values[position] = load(own)
        except (Exception, SystemExit) as error:  # it runs code of the user's, which may not end this process
            values[position] = Unloadable(error)
    return values


def _is_plain_data(value: Any) -> bool:
    """Whether a value is of plain types only, down to one level: then its pickle needs nothing and cannot fail."""
    kind = type(value)
    if kind is dict:
        return PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values()))
    return kind in PLAIN or (kind in (list, tuple) and PLAIN.issuperset(map(type, value)))


def snapshot(value: Any, what: str) -> bytes:
    """Pickle a value as it is now, all in one piece that belongs to nobody, so that it outlives whoever sends it.

    Raises:
        SerializationError: It cannot be pickled, or has object references of Ray's in it, which end with their owner.
    """
    if _is_plain_data(value):
        return pickle.dumps(value, protocol=5)
    try:
        parcel = dump(value, sys.maxsize)
    except Exception as error:
        raise unpicklable(value, what, error) from error
    if parcel.refs:
        raise SerializationError(
            f"Cannot send {what}: there is an ObjectRef in it, whose object ends with this process. Send ray.get() of it.",
            what="an ObjectRef",
        )
    return bytes(parcel.header)


def pack(value: Any, what: str, *, is_trial: bool = False) -> Packed:
    """Make a value ready to travel, to any number of workers; in a trial, only make sure that it can.

    Raises:
        SerializationError: It cannot be pickled; the message names the variable that is to blame.
    """
    quick = _pickled_by_name(value)
    if quick is not None:
        return quick
    try:
        if is_trial:
            _try(value)
            return b""
        parcel = dump(value)
    except Exception as error:
        raise unpicklable(value, f"{what} to a worker", error) from error
    packed: Packed = parcel.header if parcel.is_small else ray.put(parcel.for_ray())
    return packed


def _try(value: Any) -> None:
    """Pickle a value for nobody: its buffers are not looked at."""
    _Pickler(_Nowhere(), [], lambda _: False).dump(value)


def _pickled_by_name(value: Any) -> bytes | None:
    """Return the pickle of a function that workers can import, or of a call with plain arguments; None for all else.

    What cloudpickle would do with them, in a tenth of its time: for a future that is most of what it costs.
    """
    if isinstance(value, FunctionType) and (
        value.__module__ in (None, "__main__") or cloudpickle.list_registry_pickle_by_value()
    ):
        return None
    if isinstance(value, FunctionType) or (isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType)):
        try:
            return pickle.dumps(value, protocol=5)
        except (pickle.PicklingError, AttributeError):
            return None  # it cannot be found under its name: a lambda, or a function in a function
    if type(value) is list and len(value) == 1 and type(value[0]) is tuple and len(value[0]) == 2:
        args, kwargs = value[0]
        if type(args) is tuple and not kwargs and PLAIN.issuperset(map(type, args)):
            quick = pickle.dumps(value, protocol=5)
            return bytes(memoryview(quick)) if len(quick) < INLINE_BYTES else None  # a pickle lies in a block for larger ones
    return None


class Fetched:
    """How many bytes this process has got from the object store to open what was packed for it."""

    num_bytes = 0
    lock = threading.Lock()


def unpack(packed: Packed) -> Any:
    """Return the value that was packed."""
    if isinstance(packed, bytes):
        return pickle.loads(packed)
    parcel = Parcel(*ray.get(packed))
    with Fetched.lock:
        Fetched.num_bytes += parcel.num_bytes
    return load(parcel)


def unpicklable(value: Any, what: str, error: BaseException) -> SerializationError:
    """Return the error that says which variable can't travel."""
    if isinstance(error, RaypoolError):  # something of raypool's own, which says what to do instead
        return SerializationError(f"Cannot send {what}: {error}", what=type(value).__name__)
    try:
        named = str(find_culprit(value, _Pickler(_Nowhere(), [], lambda _: False), error))
    except Exception:  # it runs code of the user's
        named = kind_of(value)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    advice = "Make it inside the function, or pass what it is made from."
    if INHERITANCE in reason:
        advice = (
            "Ray starts the workers, so they inherit nothing. Pass a raypool.DataQueue for values that come and go, and keep "
            "what all share in pool.store; or take it from a multiprocessing.Manager(), which workers of its own machine reach."
        )
    return SerializationError(f"Cannot send {what}: {named} cannot be pickled ({reason}). {advice}", what=named)
