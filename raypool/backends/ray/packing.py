"""How values travel between Ray processes: pickled once, with large buffers beside the pickle.

The buffers are not copied on the way. Object references travel beside the pickle too, so that Ray
can count them: inside it they would keep their objects alive forever. Also here: stored return
values, packed results of calls, the search for a variable that cannot be pickled, and private
mappings of arrays in the object store.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import io
import itertools
import mmap
import os
import pickle
import re
import reprlib
import sys
import threading
import traceback
import types
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil
import ray
from ray import cloudpickle
from ray import exceptions as rx

from raypool import ray_private
from raypool.backends.ray import client
from raypool.backends.ray.calls import loss_text
from raypool.channel import by_value, tensors
from raypool.channel.records import Failure, Missing, SliceItems, SliceResult, Values
from raypool.channel.users_code import is_users
from raypool.errors import (
    RaypoolError,
    SerializationError,
    TaskError,
    add_note,
    notes_of,
    reduced,
    traceback_text,
)
from raypool.results import Results
from raypool.worker.runner import NarrowedCall, RawResult
from raypool.worker.running import PLAIN

BESIDE_BYTES = 64 * 1024
"""Buffers of arrays and tensors from this size on travel beside the pickle, copied once."""

MAPPED_BYTES = 1024 * 1024
"""Buffers from this size on are mapped, not copied, on arrival: only changed pages are copied."""

SCRATCH_BYTES = 32 * 1024 * 1024
"""How much memory for copies a worker keeps: touching a page first takes longer than copying it."""

APART_BYTES = 256 * 1024
"""What items of a call share, besides arrays, is sent with each of them, as long as that adds no
more than this to an item on average: 0.3 ms."""

FIRST_LOOK = 2
"""After pickling so many items of a call, raypool first looks whether they share much."""

INLINE_BYTES = 64 * 1024
"""Smaller values travel in the message itself, others through the object store."""

Packed: TypeAlias = bytes | ray.ObjectRef
"""A pickled value: itself if it is small, else a reference to its parcel in the object store."""


class Parcel(NamedTuple):
    """A pickled value, with large buffers and references beside it."""

    header: Any  # bytes; on arrival the memory that holds them
    buffers: list[Any]
    refs: list[Any]

    @property
    def is_small(self) -> bool:
        """Whether the header alone is the value, and fits into a message."""
        return not self.buffers and not self.refs and len(self.header) < INLINE_BYTES

    @property
    def num_bytes(self) -> int:
        """Its size [bytes], without the objects of its references."""
        return sum(memoryview(buffer).nbytes for buffer in (self.header, *self.buffers))

    def for_ray(self) -> tuple[Any, list[Any], list[Any]]:
        """Return the form to put into the object store."""
        return _beside(self.header), self.buffers, self.refs


def _beside(header: bytes) -> bytes | pickle.PickleBuffer:
    # Ray pickles it once more, and would copy a long pickle in there
    return header if len(header) < BESIDE_BYTES else pickle.PickleBuffer(header)


INHERITANCE = "only be shared between processes through inheritance"
"""In multiprocessing's errors about its locks, queues and values."""


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Takes references and the memory of CPU tensors out of the pickle."""

    def __init__(
        self,
        file: Any,
        refs: list[Any],
        keep_inside: Callable[[pickle.PickleBuffer], bool],
        memory: _ArrayMemory | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_inside)
        self._refs = refs
        self._memory = memory

    def reducer_override(self, value: Any) -> Any:
        if type(value) in by_value.CODE:  # most values: a function consists of such
            return super().reducer_override(value)
        if self._memory is not None:
            way = self._memory.reduced(value)
            if way is not NotImplemented:
                return way
        if isinstance(value, ray.ObjectRef):
            self._refs.append(value)
            return _arrived_ref, (len(self._refs) - 1,)
        if isinstance(value, BaseException):
            way = reduced(value)
            return super().reducer_override(value) if way is NotImplemented else way
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _is_plain(value, torch):
            return tensors.as_memory(value)
        if torch is not None and isinstance(value, torch.nn.Module):
            _warn_if_shared(value)
        # it would arrive with the number of a file of this process
        if type(value).__module__ == "multiprocessing.connection":
            raise RuntimeError(f"{type(value).__name__} objects should {INHERITANCE}")
        way = by_value.reduced(value)
        if way is NotImplemented:
            way = tensors.reduced(value)
        return super().reducer_override(value) if way is NotImplemented else way


def _warn_if_shared(module: Any) -> None:
    parameter = next(module.parameters(recurse=False), None)
    if parameter is not None and parameter.device.type == "cpu" and parameter.is_shared():
        warnings.warn(
            "A model under share_memory() arrives in another process as a copy: neither process"
            " sees the other's changes. Return the trained model, or train one model on"
            " all workers with pool.train, pool.fit or pool.spmd.",
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


_arriving: ContextVar[Parcel] = ContextVar("raypool_arriving")


def _arrived_ref(position: int) -> Any:
    return _arriving.get().refs[position]


def dump(value: Any, beside_bytes: int = BESIDE_BYTES) -> Parcel:
    """Pickle a value; buffers from this size on stay beside the pickle."""
    buffers: list[Any] = []
    refs: list[Any] = []
    if type(value) is SliceItems:
        value = _apart(value, buffers, refs, beside_bytes)
    return Parcel(_pickled(value, buffers, refs, beside_bytes), buffers, refs)


def _pickled(
    value: Any,
    buffers: list[Any],
    refs: list[Any],
    beside_bytes: int,
    memory: _ArrayMemory | None = None,
) -> bytes:
    """Pickle a value; its large buffers and its references go into these lists."""

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        is_small = buffer.raw().nbytes < beside_bytes
        if not is_small:
            buffers.append(buffer)
        return is_small

    file = io.BytesIO()
    _Pickler(file, refs, keep_inside, memory).dump(value)
    return file.getvalue()


def _apart(items: SliceItems, buffers: list[Any], refs: list[Any], beside_bytes: int) -> Any:
    """Return what unpickles as a list of these items, of which no two share an object.

    An item may change its argument, and which items share a call is a matter of time. The memory of
    an array is sent once, and each item gets its own view of it. Where items share much else,
    several are in one pickle, and it is opened for each of them.
    """
    if len(items) < 2 or _are_apart(items):
        return list(items)
    own_buffers: list[Any] = []  # of all items; one that several share is in it several times
    own_refs: list[Any] = []
    memory = _ArrayMemory()
    parts: list[tuple[bytes, list[int], int]] = []
    start, size, look_at = 0, 1, FIRST_LOOK
    while start < len(items):
        group = items[start : start + size]
        num_before = len(own_buffers)
        data = _pickled(group, own_buffers, own_refs, beside_bytes, memory)
        parts.append((data, list(range(num_before, len(own_buffers))), len(group)))
        start += size
        if size == 1 and start == look_at:
            look_at *= 4  # not more often: to look is to pickle them all once more
            joint_buffers: list[Any] = []
            joint = _pickled(items[:start], joint_buffers, [], beside_bytes, memory)
            alone = sum(len(data) for data, _, _ in parts)
            if alone - len(joint) > APART_BYTES * start:
                size = _group_size(
                    alone + _total_bytes(own_buffers),
                    len(joint) + _total_bytes(joint_buffers),
                    start,
                )
                start = 0  # the first ones, too
                for lists in own_buffers, own_refs, parts:
                    lists.clear()
    # the list keeps their memory, so that no address is used again
    places = [_place(buffer) for buffer in own_buffers]
    different = dict(zip(places, own_buffers, strict=True))
    positions = {place: number for number, place in enumerate(different)}
    buffers.extend(different.values())
    refs.extend(own_refs)
    return _Together(
        (data, [positions[places[number]] for number in numbers], size)
        for data, numbers, size in parts
    )


def _total_bytes(buffers: Sequence[pickle.PickleBuffer]) -> int:
    return sum(buffer.raw().nbytes for buffer in buffers)


def _group_size(alone: int, joint: int, num_items: int) -> int:
    """Return how many items go into one pickle, so that opening it takes four times as long as
    opening one of them, at most.

    `alone`, `joint`: the bytes of so many items in pickles of their own, and in one.
    """
    own = max((joint - alone / num_items) / (num_items - 1), 1.0)
    shared = alone / num_items - own
    return max(int(3 * shared / own), 1)


def _place(buffer: pickle.PickleBuffer) -> tuple[int, int]:
    """Return the address and size of a buffer [bytes]."""
    memory = np.frombuffer(buffer.raw(), np.uint8)
    return memory.__array_interface__["data"][0], memory.nbytes


class _ArrayMemory:
    """Lets arrays that pickle would copy each time leave it as the same memory each time."""

    def __init__(self) -> None:
        # with the array itself, so that nothing else gets its address
        self._known: dict[Any, tuple[Any, Any]] = {}

    def reduced(self, value: Any) -> Any:
        """Return what a pickler's `reducer_override` does for an array, or `NotImplemented`."""
        if type(value) is np.ndarray:
            return self._of_array(value)
        extensions = sys.modules.get("pandas.api.extensions")
        kind = getattr(extensions, "ExtensionArray", None)
        # not others', whose `__reduce_ex__` may return what can be used once
        if (
            kind is None
            or not isinstance(value, kind)
            or not type(value).__module__.startswith("pandas.")
        ):
            return NotImplemented
        if id(value) not in self._known:  # strings of Arrow's are put together for each pickle
            self._known[id(value)] = value, value.__reduce_ex__(5)
        return self._known[id(value)][1]

    def _of_array(self, array: np.ndarray[Any, Any]) -> Any:
        is_dense = array.flags.c_contiguous or array.flags.f_contiguous
        has_dates = array.dtype.kind in "mM"  # such memory cannot leave a pickle
        if array.nbytes < BESIDE_BYTES or array.dtype.hasobject or (is_dense and not has_dates):
            return NotImplemented
        address = array.__array_interface__["data"][0]
        key = address, array.shape, array.strides, array.dtype
        if key not in self._known:
            # as after any other journey, it can be changed
            dense = array if is_dense and array.flags.writeable else array.copy()
            way = _viewed, (dense.view(np.int64) if has_dates else dense, array.dtype)
            self._known[key] = array, way
        return self._known[key][1]


def _viewed(memory: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return memory.view(dtype)


class _Together(list[tuple[bytes, list[int], int]]):
    """Pickles of items, the numbers of their buffers, and how many items are in each; unpickled,
    the list of the items.
    """

    def __reduce__(self) -> Any:
        return _together, (list(self),)


def _together(parts: list[tuple[bytes, list[int], int]]) -> list[Any]:
    def own_buffer(number: int) -> Any:
        return _arrived_buffer(_arriving.get().buffers[number])

    return [
        pickle.loads(data, buffers=map(own_buffer, numbers))[position]
        for data, numbers, size in parts
        for position in range(size)
    ]


def _are_apart(items: SliceItems) -> bool:
    """Whether items are plain data that can share nothing, as in nearly all loops of short ones."""
    changeable = [id(item) for item in items if type(item) in (dict, list)]
    return len(set(changeable)) == len(changeable) and all(map(_is_plain_data, items))


def load(parcel: Parcel) -> Any:
    """Return the value, with memory of its own: it can be changed, the object store cannot."""
    buffers = map(_arrived_buffer, parcel.buffers)
    token = _arriving.set(parcel)
    try:
        return pickle.loads(parcel.header, buffers=buffers)
    finally:
        _arriving.reset(token)


def _arrived_buffer(buffer: Any) -> Any:
    view = memoryview(buffer)
    return own(buffer) if view.nbytes >= MAPPED_BYTES else bytearray(view)


class Unloadable(NamedTuple):
    """Stands for a value that could not be unpickled here."""

    error: BaseException


class ParcelKeeper:
    """Keeps the values of a call as they were when they were returned.

    Their large buffers stay in place (`loose`) until other code is about to run; then `secure`
    copies them. So a call's last value is never copied. The copies reuse memory, up to
    `SCRATCH_BYTES`.
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
        """Copy all loose buffers, before other code changes them; False if memory runs out."""
        try:
            for parcel in self.loose:
                parcel.buffers[:] = [self._copied(buffer) for buffer in parcel.buffers]
        except MemoryError:  # the values of a call may be larger than what is left
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
        """Reuse the memory: all kept values have been sent."""
        self.loose.clear()
        self._used = 0


def join(values: list[Any]) -> Parcel:
    """Put the values of a call, kept as parcels or plain, together for `load_each`."""
    plain = [None if type(value) is Parcel else value for value in values]
    # each parcel is opened by itself, so that one that fails does not take the others with it:
    # position, pickle, how many buffers and references belong to it
    others: list[tuple[int, Any, int, int]] = []
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
    """Return the joined values, with an `Unloadable` for each that cannot be unpickled here."""
    values: list[Any]
    buffers, refs = iter(parcel.buffers), iter(parcel.refs)
    values, others = pickle.loads(parcel.header, buffers=buffers)  # takes those that are pickles
    for position, header, num_buffers, num_refs in others:
        own = Parcel(header, list(islice(buffers, num_buffers)), list(islice(refs, num_refs)))
        try:
            values[position] = load(own)
        except (Exception, SystemExit) as error:
            # it runs the user's code, which may not end this process
            values[position] = Unloadable(error)
    return values


def _is_plain_data(value: Any) -> bool:
    """Whether a value, down to one level, is of plain types: its pickle cannot fail."""
    kind = type(value)
    if kind is dict:
        return PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values()))
    return kind in PLAIN or (kind in (list, tuple) and PLAIN.issuperset(map(type, value)))


def snapshot(value: Any, what: str) -> bytes:
    """Pickle a value as it is now, outside the object store, so that it outlives its sender.

    Raises:
        SerializationError: It cannot be pickled, or holds Ray's object references, which end with
            their owner.
    """
    if _is_plain_data(value):
        return pickle.dumps(value, protocol=5)
    try:
        parcel = dump(value, sys.maxsize)
    except Exception as error:
        raise unpicklable(value, what, error) from error
    if parcel.refs:
        raise SerializationError(
            f"Cannot send {what}: there is an ObjectRef in it, whose object ends with this process."
            " Send ray.get() of it.",
            what="an ObjectRef",
        )
    return bytes(parcel.header)


def pack(value: Any, what: str, *, is_trial: bool = False) -> Packed:
    """Make a value ready to travel to any number of workers; in a trial, only check that it can.

    Raises:
        SerializationError: It cannot be pickled; the message names the variable at fault.
    """
    quick = _pickled_by_name(value)
    if quick is not None:
        return quick
    try:
        if is_trial:
            _tester().dump(value)
            return b""
        parcel = dump(value)
    except Exception as error:
        raise unpicklable(value, f"{what} to a worker", error) from error
    packed: Packed = parcel.header if parcel.is_small else ray.put(parcel.for_ray())
    return packed


def _tester() -> _Pickler:
    """Return a pickler that discards its output, and does not read buffers."""
    return _Pickler(types.SimpleNamespace(write=len), [], lambda _: False)


def _pickled_by_name(value: Any) -> bytes | None:
    """Return the pickle of an importable function, or of a call with plain arguments, else None.

    As cloudpickle's, in a tenth of its time: most of the cost of a future.
    """
    # pickle would import a module that is not loaded
    if isinstance(value, FunctionType) and (
        value.__module__ not in sys.modules or by_value.goes_by_value(value.__module__)
    ):
        return None
    if isinstance(value, FunctionType) or (
        isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType)
    ):
        place = value.__module__, value.__qualname__
        module = sys.modules.get(place[0])
        # in its dict: a module may import others when it is asked for a name that it lacks
        is_there = isinstance(module, ModuleType) and vars(module).get(place[1]) is value
        packed = _by_name.get(place) if is_there else None
        if packed is None:
            try:
                packed = pickle.dumps(value, protocol=5)
            except (pickle.PicklingError, AttributeError):
                # it cannot be found under its name: a lambda, or a function in a function
                return None
            if is_there:
                _by_name[place] = packed
        return packed
    if type(value) is list and len(value) == 1 and type(value[0]) is tuple and len(value[0]) == 2:
        args, kwargs = value[0]
        if type(args) is tuple and not kwargs and PLAIN.issuperset(map(type, args)):
            quick = pickle.dumps(value, protocol=5)
            # a pickle lies in a block for larger ones
            return bytes(memoryview(quick)) if len(quick) < INLINE_BYTES else None
    return None


_by_name: dict[tuple[str, str], bytes] = {}
"""Pickles of functions that are variables of their module, by its name and theirs."""


class Fetched:
    """How many bytes this process has fetched from the object store to unpack."""

    num_bytes = 0
    lock = threading.Lock()  # `+=` from several threads


def unpack(packed: Packed) -> Any:
    """Return the value that was packed."""
    if isinstance(packed, bytes):
        return pickle.loads(packed)
    parcel = Parcel(*ray.get(packed))
    with Fetched.lock:
        Fetched.num_bytes += parcel.num_bytes
    return load(parcel)


def unpicklable(value: Any, what: str, error: BaseException) -> SerializationError:
    """Return the error that names the variable that cannot travel."""
    if isinstance(error, RaypoolError):  # something of raypool's own, which says what to do instead
        return SerializationError(f"Cannot send {what}: {error}", what=type(value).__name__)
    try:
        named = str(find_culprit(value, _tester(), error))
    except Exception:  # it runs the user's code
        named = kind_of(value)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    advice = "Create it inside the function, or pass the values that it is made from."
    if INHERITANCE in reason:
        advice = (
            "Ray starts the workers, so they inherit nothing. Pass a raypool.DataQueue for"
            " messages, and keep shared values in pool.store; or use a multiprocessing.Manager(),"
            " which workers on its machine can reach."
        )
    return SerializationError(
        f"Cannot send {what}: {named} cannot be pickled ({reason}). {advice}", what=named
    )


# --- return values --------------------------------------------------------------------------------


_stored: weakref.WeakSet[StoredValues] = weakref.WeakSet()
_stored_lock = threading.Lock()  # a set may not change while it is listed


def bring_home(stays: bool) -> None:
    """Fetch values whose futures are still held, before they are lost with this process's Ray.

    `stays`: the object store stays, and will use the memory of present values for others.
    """
    if stays:
        with _looking:
            _store.is_left = True
            for mapping in list(_mappings):
                mapping.copy()
    with _stored_lock:
        stored = list(_stored)
    for values in stored:
        with contextlib.suppress(Exception):  # whoever asks for the value gets the error
            values.get()


def send_script_by_value() -> None:
    """Let functions of a script travel, also in a process that `multiprocessing` has spawned.

    There the script is the module `__mp_main__`, which workers do not have.
    """
    script = sys.modules.get("__mp_main__")
    if script is not None:
        cloudpickle.register_pickle_by_value(script)


def map_again() -> None:
    """Map values of the object store again: a pool uses it, although another has left it."""
    with _looking:
        _store.is_left = False


class StoredValues:
    """Large values of a call: they stay in Ray's object store until they are read.

    `note_bytes` is told their size then.
    """

    __slots__ = ("__weakref__", "_lock", "_note_bytes", "_ref", "_values")

    def __init__(self, ref: ray.ObjectRef[Any], note_bytes: Callable[[int], object]) -> None:
        self._ref: ray.ObjectRef[Any] | None = ref
        self._note_bytes = note_bytes
        self._values: list[Any] = []
        self._lock = threading.Lock()  # any thread may be the first to ask
        with _stored_lock:
            _stored.add(self)

    def get(self) -> list[Any]:
        """Return them; the first call maps them into this process."""
        with self._lock:
            if self._ref is not None:
                if not ray.is_initialized():  # asking would start a new one
                    raise TaskError(
                        "A result is lost: Ray was shut down before the result was read."
                    )
                try:
                    parcel = Parcel(*client.fetched(self._ref))
                except (rx.RayError, ValueError) as error:
                    raise TaskError(f"A stored result is lost: {loss_text(error)}.") from error
                self._note_bytes(parcel.num_bytes)
                self._values = loaded(parcel)
                self._ref = None
            return self._values


class MessageValues:
    """Values of a call that came in the message."""

    __slots__ = ("_header", "_values")

    def __init__(self, header: bytes) -> None:
        self._header: bytes | None = header
        self._values: list[Any] = []

    def get(self) -> list[Any]:
        """Return them; the first call unpickles them."""
        header = self._header
        if header is not None:
            self._values = loaded(Parcel(header, [], []))
            self._header = None
        return self._values


def loaded(parcel: Parcel) -> list[Any]:
    """Unpickle the values of a call, each by itself."""
    values = load_each(parcel)
    for position, value in enumerate(values):
        if type(value) is Unloadable:
            error = SerializationError(
                f"A result has arrived but cannot be unpickled here ({type(value.error).__name__}:"
                f" {value.error}). Its class must be importable in this process too.",
                what="a result",
            )
            error.__cause__ = value.error
            values[position] = Missing(error)
    return values


# --- results of calls -----------------------------------------------------------------------------


Sendable = tuple[int, int, bytes, float, dict[int, bytes], int | None, bool]
"""A `RawResult` without its values: start, done, durations, start time, errors (each pickled by
itself, as that may fail), peak memory [bytes], and whether the items could not be unpickled.
"""


def pack_results(results: Sequence[RawResult]) -> list[Sendable]:
    """Make the outcomes of slices ready to travel."""
    return [
        (
            result.start,
            result.done,
            result.durations_s.tobytes(),
            result.started_at,
            {index: pack_error(error) for index, error in result.errors.items()},
            result.peak_memory_bytes,
            result.is_unopened,
        )
        for result in results
    ]


def unpack_results(
    packed: Sequence[Sendable], values: Values, catch_up: Callable[[], None] | None
) -> list[SliceResult]:
    """Return the outcomes of a call's slices, whose values follow each other in `values`."""
    results = []
    offset = 0
    for start, done, durations, started_at, errors, peak_memory_bytes, is_unopened in packed:
        failures = {index: unpack_failure(error) for index, error in errors.items()}
        result = SliceResult(
            start, done, values, offset, failures, array("d", durations), started_at, catch_up
        )
        result.peak_memory_bytes, result.is_unopened = peak_memory_bytes, is_unopened
        results.append(result)
        offset += done
    return results


def pack_narrowed(narrowed: NarrowedCall) -> bytes:
    """Make the finished part of a running call ready to travel."""
    values = [value for result in narrowed.results for value in result.values]
    size = sum(_num_bytes(value) for value in values)
    parcel = join(values) if size < INLINE_BYTES else None
    if parcel is None or not parcel.is_small:
        # large values come with the call's answer only
        narrowed, parcel = narrowed.without_values(), join([])
    return pickle.dumps(
        (narrowed.attempt_id, narrowed.kept, pack_results(narrowed.results), parcel.header),
        protocol=5,
    )


def _num_bytes(value: Any) -> int:
    # of values that are not kept as parcels, only these can be large
    if type(value) in (bytes, str):
        return len(value)
    return value.num_bytes if type(value) is Parcel else 0


def unpack_narrowed(packed: bytes) -> tuple[int, tuple[int, ...], list[SliceResult]]:
    """Return the attempt, how much of each part is kept, and the finished results."""
    attempt_id, kept, results, header = pickle.loads(packed)
    return attempt_id, kept, unpack_results(results, MessageValues(header), None)


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception and its traceback; its text alone if that fails."""
    text = summary = type(error).__name__
    with contextlib.suppress(Exception):  # the user's attributes, which may raise anything
        if isinstance(getattr(error, "results", None), Results):
            # of a loop within the task; the outer loop's error gets its own results
            del error.results  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):  # it calls `__str__`, which is the user's, too
        text = traceback_text(error)
    with contextlib.suppress(Exception):  # as above
        summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        parcel = dump(error, sys.maxsize)
        body = cloudpickle.dumps(error) if parcel.refs else bytes(parcel.header)
        pickle.loads(body)  # it may be an exception that cannot be unpickled
    except BaseException:  # it runs the user's code
        body = None
        if type(error).__module__ == "builtins":  # a RecursionError may have deep attributes
            with contextlib.suppress(BaseException):  # its arguments may be the user's objects
                body = pickle.dumps(type(error)(*error.args), protocol=5)
    return pickle.dumps((body, summary, text, notes_of(error)), protocol=5)


def unpack_failure(packed: bytes) -> Failure:
    """Return an item's exception, or its text where it cannot be unpickled."""
    body, summary, text, notes = pickle.loads(packed)
    try:
        error = pickle.loads(body)
    except BaseException:  # it runs the user's code
        error = None
    if not isinstance(error, BaseException):
        error = TaskError(
            f"{summary} (the exception could not be unpickled here; its remote traceback is the"
            " cause)"
        )
    for note in notes:
        add_note(error, note)
    return Failure(error, text)


# --- variables that cannot be pickled -------------------------------------------------------------


PATH_LENGTH = 60
"""The longest path that is shown; of a longer one, the end."""

METHODS = (types.MethodType, types.BuiltinMethodType)


class Culprit(NamedTuple):
    """A part of a value: the path to it, where the path begins, and the part itself."""

    path: str
    origin: str
    value: Any

    def __str__(self) -> str:
        # as torch names parts of a model
        kind, path = kind_of(self.value), re.sub(r"_modules\['(\w+)'\]", r"\1", self.path)
        if len(path) > PATH_LENGTH:
            path = f"…{path[-PATH_LENGTH:]}"
        shown = (
            f"{path!r} ({kind})" if path.isidentifier() else f"{path} ({kind})" if path else kind
        )
        return f"{shown} {self.origin}" if path and self.origin else shown


class _Tracer(pickle._Pickler):
    """Pickles in Python into nothing, and records the path to the part that failed."""

    def __init__(self, pickler: Any) -> None:
        super().__init__(
            types.SimpleNamespace(write=len), protocol=5, buffer_callback=lambda _: False
        )
        self.dispatch_table = pickler.dispatch_table
        self._pickler = pickler
        self.chain: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Do as the other pickler."""
        return self._pickler.reducer_override(obj)

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        """Record the object if it fails."""
        try:
            super().save(obj, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.chain.insert(0, obj)
            raise


def find_culprit(value: Any, pickler: Any, error: BaseException) -> Culprit:
    """Return the innermost part of a value that raised this error and that the user can name.

    Not a private part of another package's object (the lock of a `threading.Event`), but its owner.
    """
    tracer = _Tracer(pickler)
    try:
        tracer.dump(value)
    except Exception as again:
        if type(again) is type(error):
            return _walk(tracer.chain)
    return Culprit("", "", value)


def _walk(chain: list[Any]) -> Culprit:
    here = named = _beginning(chain[0])
    is_own = True
    while len(chain := chain[1:]):
        # the pickler has made objects between two that have names: these are skipped
        steps = ((number, _step(here, part)) for number, part in enumerate(chain))
        functions = (
            (number, _beginning(part))
            for number, part in enumerate(chain)
            if isinstance(part, types.FunctionType)
        )
        named_steps = (pair for pair in itertools.chain(steps, functions) if pair[1] is not None)
        number, step = next(named_steps, (0, None))
        if step is None:
            break
        is_own = _is_own(here.value, step, is_own)
        here, chain = step, chain[number:]
        if is_own:
            named = here
    return named


def _beginning(value: Any) -> Culprit:
    """Return the beginning of a path."""
    if isinstance(value, types.FunctionType):
        return Culprit("", f"used by {_name(value)}", value)
    if isinstance(value, functools.partial):
        return Culprit("", f"of a partial of {_name(value.func)}", value)
    if isinstance(value, (list, tuple, dict, collections.deque, *METHODS)):
        return Culprit("", "", value)
    return Culprit("", f"of {_name(value if isinstance(value, type) else type(value))}", value)


def _step(here: Culprit, part: Any) -> Culprit | None:
    """Return a part of an object under its name; None if it has none there."""
    owner = here.value
    if isinstance(owner, (types.FunctionType, type)):
        here = _beginning(owner)
        names = _variables(owner) if isinstance(owner, types.FunctionType) else _attributes(owner)
    elif isinstance(owner, functools.partial):
        here = _beginning(owner)
        arguments = ((f"args[{number}]", value) for number, value in enumerate(owner.args))
        names = itertools.chain([("func", owner.func)], arguments, owner.keywords.items())
    elif isinstance(owner, dict):
        names = itertools.chain(
            ((f"[{reprlib.repr(key)}]", value) for key, value in owner.items()),
            ((f"[key {reprlib.repr(key)}]", key) for key in owner),
            _attributes(owner),
        )
    elif isinstance(owner, (list, tuple, collections.deque)):
        fields = getattr(owner, "_fields", None) or [f"[{number}]" for number in range(len(owner))]
        names = itertools.chain(zip(fields, owner, strict=True), _attributes(owner))
    else:
        names = _attributes(owner)
    for name, value in names:
        if value is part:
            # around a user's function; a call has names that help
            made_by = owner.func if isinstance(owner, functools.partial) else owner
            if _package(made_by) == "raypool" and not isinstance(owner, tuple):
                return _beginning(part)
            joint = "" if name.startswith("[") or not here.path else "."
            return here._replace(path=f"{here.path}{joint}{name}", value=part)
    if type(owner) is part or (isinstance(owner, METHODS) and part is owner.__self__):
        return _beginning(part)
    if isinstance(owner, (set, frozenset)) and any(part is value for value in owner):
        return here._replace(value=part)
    return None


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function takes along when it travels by value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
    yield from function.__globals__.items()


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for base in type(owner).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, types.MemberDescriptorType) and not name.startswith("__"):
                try:
                    yield name, descriptor.__get__(owner)
                except AttributeError:  # it is not set
                    continue


def _is_own(owner: Any, step: Culprit, was_own: bool) -> bool:
    """Whether the user knows the name of a part: their own class has it, or it is public."""
    if isinstance(
        owner, (list, tuple, dict, set, frozenset, collections.deque, functools.partial, *METHODS)
    ):
        return was_own
    package = _package(owner)
    if package in sys.stdlib_module_names:
        # those of `types` and `argparse` have the user's names
        return type(owner).__name__.endswith("Namespace")
    return is_users(package) or not step.path.rpartition(".")[2].startswith("_")


def _package(value: Any) -> str:
    """Return the package of a function, a class or an object's class."""
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(getattr(named, "__module__", None) or "").partition(".")[0]


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.rpartition("<locals>.")[2]


def kind_of(value: Any) -> str:
    """Return words for a value: "a threading.Event", "the function train"."""
    if isinstance(value, (type, types.FunctionType)):
        return f"the {'class' if isinstance(value, type) else 'function'} {_name(value)}"
    kind = type(value)
    package = kind.__module__
    is_library = package.partition(".")[0] in sys.stdlib_module_names and package != "builtins"
    name = f"{package}.{_name(kind)}" if is_library and not package.startswith("_") else _name(kind)
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


# --- private mappings -----------------------------------------------------------------------------
#
# All processes of a machine share the store's memory, and torch writes to it even through a
# read-only array. Of a private mapping the system copies only the pages that somebody writes to:
# who reads pays for no copy.


FAILED = ctypes.c_void_p(-1).value
"""What `mmap` returns when it fails."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

MADV_POPULATE_WRITE = 23
"""Python has no name for it."""


def own(buffer: Any) -> Any:
    """Return a buffer's content as memory that can be changed and that nobody else sees."""
    shared = np.frombuffer(buffer, np.uint8)
    address: int = shared.__array_interface__["data"][0]
    with _looking:
        piece = _store.find(address, shared.nbytes)
        mapping = _Mapping.make(piece, address, shared) if piece is not None else None
        if piece is not None and not piece.lasts:
            os.close(piece.descriptor)  # it would keep the file's disk space
    return bytearray(shared) if mapping is None else np.asarray(mapping)


class FileRange(NamedTuple):
    """A part of this process's memory that maps a file; descriptor -1: it cannot be opened.

    `lasts`: it does so until this process leaves Ray.
    """

    start: int
    stop: int
    offset: int
    descriptor: int
    lasts: bool


class _Mapping:
    """A private mapping of a buffer, which ends with the last array on it."""

    def __init__(self, start: int, length: int, address: int, shared: np.ndarray[Any, Any]) -> None:
        self._start, self._length = start, length
        self._shared = shared  # keeps the buffer in the store
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shared.shape,
            "typestr": "|u1",
            "version": 3,
        }
        _mappings.add(self)

    def copy(self) -> None:
        """Have the system copy all pages that it has not copied yet."""
        if _libc.madvise(self._start, self._length, MADV_POPULATE_WRITE):  # before Linux 5.14
            pages = (ctypes.c_ubyte * self._length).from_address(self._start)
            for place in range(0, self._length, mmap.PAGESIZE):
                pages[place] = pages[place]

    @staticmethod
    def make(piece: FileRange, address: int, shared: np.ndarray[Any, Any]) -> _Mapping | None:
        """Return it; None if the system gives no more mappings."""
        place = address - piece.start + piece.offset
        ahead = place % mmap.PAGESIZE
        length = shared.nbytes + ahead
        # Python's mmap would keep a descriptor for each.
        start = _libc.mmap(
            None,
            length,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE,
            piece.descriptor,
            place - ahead,
        )
        return None if start == FAILED else _Mapping(start, length, start + ahead, shared)

    # a default value, since the module's own names may be gone when Python ends
    def __del__(self, _unmap: Any = _libc.munmap) -> None:
        _unmap(self._start, self._length)


class _Store:
    """Knows which memory of this process is the object store's, and has that open."""

    def __init__(self) -> None:
        self.is_left = False  # nothing more is mapped
        self._connection: object = None
        self._memory: FileRange | None = None

    def find(self, address: int, length: int) -> FileRange | None:
        """Return the file range of this memory, if it is the store's and can be opened."""
        worker = ray_private.worker.global_worker
        if not worker.connected:  # so with Ray Client, which has no store here
            return None
        # Another Ray's store may be where that of the last one was. A driver's id alone is the same
        # in each new Ray.
        connection = worker.worker_id, worker.current_node_id
        known = self._memory
        if connection != self._connection:
            if known is not None and known.descriptor >= 0:
                os.close(known.descriptor)
            self._connection, self._memory, known = connection, None, None
            self.is_left = False
        if self.is_left:
            return None
        if known is not None and known.start <= address and address + length <= known.stop:
            return known
        found = _look(address, length)
        if found is not None and found.lasts:
            self._memory = found
        return found


def _look(address: int, length: int) -> FileRange | None:
    """Return the file range of this memory, opened, if it is the store's now."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, device, inode, *name = line.split(maxsplit=5)
        start, stop = (int(number, 16) for number in span.split("-"))
        file = Path(name[0].removesuffix(" (deleted)") if name else "")
        is_here = start <= address and address + length <= stop
        if is_here and "s" in access and file.name.startswith("plasma"):
            major, minor = (int(number, 16) for number in device.split(":"))
            descriptor = _open(os.makedev(major, minor), int(inode))
            # A full store puts each object into its own file on disk. The file is unmapped with
            # the object, and the next one may get the same address.
            lasts = file.parent == Path("/dev/shm")
            if lasts or descriptor >= 0:
                return FileRange(start, stop, int(offset, 16), descriptor, lasts)
    return None


def _open(device: int, inode: int) -> int:
    """Open a file without a name through the raylet that holds it; -1: in vain."""
    for process in _raylets():
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            for path in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it may be closed meanwhile
                    found = path.stat()
                    if (found.st_dev, found.st_ino) == (device, inode):
                        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _raylets() -> Iterator[psutil.Process]:
    here = psutil.Process()
    # the parent of a worker, or the child of a driver that has started Ray, is tried first
    with contextlib.suppress(psutil.Error):
        yield from filter(None, [here.parent(), *here.children()])
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            yield process


_store = _Store()
_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()
_looking = threading.Lock()  # values are unpacked in many threads
