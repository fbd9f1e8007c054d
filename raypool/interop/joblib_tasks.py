"""The tasks of joblib: what of them travels, and how a worker runs them."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from joblib.parallel import ParallelBackendBase, parallel_config

from raypool.engine.backend import function_name
from raypool.engine.coroutines import finished
from raypool.engine.engine import Engine
from raypool.interop.joblib import register_joblib
from raypool.left_globals import share_left
from raypool.loop import PLAIN

Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Manner(NamedTuple):
    """How the tasks of a `Parallel` are run.

    Attributes:
        nested: joblib's backend for a `Parallel` in one of them, and its `n_jobs`.
        max_threads: How many threads BLAS and OpenMP may use; None: as the worker has it.
    """

    nested: tuple[ParallelBackendBase, int | None]
    max_threads: int | None


def run_tasks(tasks: list[Task], manner: Manner, limit_s: float) -> list[Any]:
    """Run tasks on a worker, beginning none when the time is over [s]; return the values of those that ran."""
    register_joblib()  # a task may name the backend too
    for fn in {id(task[0]): task[0] for task in tasks}.values():
        share_left(fn)
    backend, n_jobs = manner.nested
    values: list[Any] = []
    until = perf_counter() + limit_s
    own = copy.copy(backend)  # one serves a single Parallel at a time, and with threads all workers have the same
    with parallel_config(backend=own, n_jobs=n_jobs), _threads_limited(manner.max_threads):
        for fn, args, kwargs in tasks:
            values.append(finished(fn(*args, **kwargs)))
            if perf_counter() > until:
                break
    return values


@contextlib.contextmanager
def _threads_limited(most: int | None) -> Iterator[None]:
    """Limit the threads of native libraries, those that are loaded and those that a task loads."""
    if most is None:
        yield
        return
    from threadpoolctl import threadpool_limits

    before = {name: os.environ.get(name) for name in ParallelBackendBase.MAX_NUM_THREADS_VARS}
    os.environ.update(dict.fromkeys(before, str(most)))
    try:
        with threadpool_limits(most):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Shared:
    """Stands for an argument in the calls that take it; a worker gets the argument itself, once for a call."""

    __slots__ = ("_open",)

    def __init__(self, open_: Callable[[], Any]) -> None:
        self._open = open_

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open, ()


class SharedArguments:
    """The large arguments of one `Parallel` call: each travels once, however many tasks take it.

    An argument is known again by its identity, for as long as it lives; joblib's own processes share arrays in the same way.

    Args:
        engine: Whose workers they go to.
        least_bytes: What is smaller travels with each task.
    """

    def __init__(self, engine: Engine, least_bytes: int) -> None:
        self._engine = engine
        self._least_bytes = least_bytes
        self._known: dict[int, tuple[weakref.ref[Any], Shared]] = {}

    def replace_in(self, tasks: list[Task]) -> None:
        """Let tasks have stand-ins for large arguments.

        Raises:
            SerializationError: Such an argument cannot be sent.
        """
        for position, (fn, args, kwargs) in enumerate(tasks):
            if not kwargs and PLAIN.issuperset(map(type, args)):
                continue
            large = [value for value in (*args, *kwargs.values()) if type(value) not in PLAIN and self._is_large(value)]
            if not large:
                continue
            stand_ins = {id(value): self._stand_in(value, fn) for value in large}
            tasks[position] = (
                fn,
                tuple(stand_ins.get(id(value), value) for value in args),
                {name: stand_ins.get(id(value), value) for name, value in kwargs.items()},
            )

    def forget(self) -> None:
        """Let go of them."""
        self._known.clear()

    def _is_large(self, value: Any) -> bool:
        return id(value) in self._known or _num_bytes(value) >= self._least_bytes

    def _stand_in(self, value: Any, fn: Callable[..., Any]) -> Shared:
        key = id(value)
        reference, shared = self._known.get(key, (None, None))
        if shared is None or reference is None or reference() is not value:
            shared = Shared(self._engine.opener(value, f"an argument of {function_name(fn)}"))
            self._known[key] = weakref.ref(value, lambda _: self._known.pop(key, None)), shared
        return shared


def _num_bytes(value: Any) -> float:
    """Return how large an array, a tensor, a table or a sparse matrix is [bytes], as far as that is known at once; else 0."""
    if isinstance(value, type) or type(value).__weakrefoffset__ == 0:
        return 0
    try:
        nbytes: Any = getattr(value, "nbytes", None)
        if nbytes is None and (measure := getattr(value, "memory_usage", None)) is not None:
            nbytes = measure().sum()
        if nbytes is None:
            nbytes = getattr(getattr(value, "data", None), "nbytes", 0)
        return float(nbytes)
    except Exception:  # it is something else that has such a name
        return 0


def check_travels(tasks: list[Task], engine: Engine) -> None:
    """Raise the error that names the argument of a user's function which cannot be sent, if there is one.

    Raises:
        SerializationError: There is.
    """
    for fn, args, kwargs in tasks:
        name = function_name(fn)
        engine.backend.pack(fn, f"the function {name}", is_trial=True)
        for key, value in [*enumerate(args), *kwargs.items()]:
            engine.backend.pack(value, f"argument {key!r} of {name}", is_trial=True)
