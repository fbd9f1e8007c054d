"""What runs inside a Ray worker's process."""

from __future__ import annotations

import functools
import os
import pickle
import platform
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from raypool.devices.inventory import gpu_identity
from raypool.engine.backend import Part, WorkerInfo
from raypool.engine.packing import Packed, Parcel, dump, join, keep, load, unpack
from raypool.engine.runner import Surroundings, run_parts
from raypool.results import Results
from raypool.task import mark_worker_process

Sendable = tuple[int, int, bytes, float, dict[int, bytes]]
"""Of a `RawResult`: start, done, durations, start, errors (each pickled by itself, since each may fail to)."""


def pack_call(parts: Sequence[Part], functions: dict[int, Packed], stale: Sequence[int]) -> Parcel:
    """Pack what a worker is to run, the functions that it does not have yet, and those that it may forget.

    One pickle of plain tuples: Ray would take each argument, and each tuple with a name, by itself.
    """
    call = ([tuple(part) for part in parts], functions, stale)
    if all(isinstance(part.items, bytes) for part in parts) and all(isinstance(fn, bytes) for fn in functions.values()):
        return Parcel(pickle.dumps(call, protocol=5), [], [])
    return dump(call)


class PoolWorker:
    """The actor of one worker. Its methods run in the process's main thread, one after the other."""

    def __init__(self, index: int) -> None:
        mark_worker_process()
        self._packed: dict[int, Packed] = {}  # functions that were not called yet
        self._functions: dict[int, Callable[..., Any]] = {}
        self._info = WorkerInfo(index, platform.node(), os.getpid())

    def introduce(self) -> WorkerInfo | str:
        """Check that this process sees the GPUs that it was given, and no other; return who it is, or what is wrong."""
        given = [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
        problem = pin(given, os.environ)
        if problem is not None:
            return problem
        identities = [gpu_identity(device) for device in given]
        gpus = tuple(index for index, _ in identities)
        uuids = tuple(uuid for _, uuid in identities if uuid is not None)
        self._info = WorkerInfo(self._info.index, self._info.host, self._info.pid, gpus, uuids)
        return self._info

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def run(self, call: bytes, refs: Sequence[Any] = ()) -> tuple[bytes, tuple[Any, ...] | None]:
        """Run a call, packed by `pack_call`.

        Returns:
            A small status (with the values in it, if they are small) and the values, if they are not. They are separate
            objects, so that the driver reads the status only and a large value stays in the object store until somebody asks.
        """
        fields, functions, stale = load(Parcel(call, [], list(refs)))
        parts = [Part(*entries) for entries in fields]
        self.forget(stale)
        self._packed.update(functions)
        is_single = sum(part.num_items for part in parts) == 1
        results = run_parts(parts, Surroundings(self._info, self._function, unpack, functools.partial(keep, is_last=is_single)))
        parcel = join([value for result in results for value in result.values])
        sendables: list[Sendable] = [
            (
                result.start,
                result.done,
                result.durations_s.tobytes(),
                result.started_at,
                {index: _packed_error(error) for index, error in result.errors.items()},
            )
            for result in results
        ]
        if parcel.is_small:
            return pickle.dumps((sendables, parcel.header), protocol=5), None
        return pickle.dumps((sendables, None), protocol=5), tuple(parcel)

    def _function(self, fn_id: int) -> Callable[..., Any]:
        fn = self._functions.get(fn_id)
        if fn is None:
            fn = self._functions[fn_id] = unpack(self._packed[fn_id])
            del self._packed[fn_id]
        return fn

    def forget(self, fn_ids: Sequence[int]) -> None:
        """Let go of functions that nobody will call again, and of what they hold."""
        for fn_id in fn_ids:
            self._functions.pop(fn_id, None)
            self._packed.pop(fn_id, None)


def pin(given: Sequence[str], environ: MutableMapping[str, str]) -> str | None:
    """Make sure, before anything touches CUDA, that these devices are the visible ones; return what is wrong, if anything."""
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA would count the fastest first, Ray and nvidia-smi do not
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if not given or not visible:
        # Ray lets a worker without a GPU see them all, and sets nothing where it was told to set nothing.
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)
    elif list(given) != visible:
        return f"it was given GPU {', '.join(given)}, but something has set CUDA_VISIBLE_DEVICES={','.join(visible)} there"
    return None


def _packed_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback as text; its text stands in where it can't be pickled or unpickled."""
    if isinstance(getattr(error, "results", None), Results):
        del error.results  # type: ignore[attr-defined]  # of a loop within the task; whoever is outside gets those of his own
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        body = cloudpickle.dumps(error)
        pickle.loads(body)
    except BaseException:  # it runs code of the user's
        body = None
    return pickle.dumps((body, summary, text, [str(note) for note in getattr(error, "__notes__", ())]), protocol=5)
