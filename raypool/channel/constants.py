"""Constants of a pool (`pool.constant`): one value per worker, received or built at first use."""

from __future__ import annotations

import functools
import os
import threading
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from raypool.errors import InvalidTypeError
from raypool.gpus.memory import kept
from raypool.worker.running import note_here

T = TypeVar("T")

BUILDERS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)
"""Types that count as builders. A model is callable too, but it is a value."""


class Content(NamedTuple):
    """The source of a constant: a value, or a function that builds it; and its clean-up."""

    source: Any
    is_builder: bool
    cleanup: Callable[[Any], object] | None


class Constant(Generic[T]):
    """A value that each worker receives or builds once, when it first uses `value`.

    `pool.constant` makes it. It travels in closures and arguments at the cost of a name. A worker
    that replaces a lost one receives or builds it anew. Changes that an item makes to it stay on
    its worker, where later items see them: train a copy of a model.

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     table = pool.constant(lambda: {"a": 1})
        ...     list(pool.parfor(lambda key: table.value[key], ["a", "a"]))
        [1, 1]
    """

    key: str
    _open_content: Callable[[], Content]

    def __init__(self, *_: object, **__: object) -> None:
        raise InvalidTypeError(
            "A constant is made by the pool that it belongs to: write pool.constant(...) instead of"
            " Constant(...)."
        )

    @property
    def value(self) -> T:
        """The value, as it is in this process.

        Raises:
            Exception: What the builder raised; the next use tries again.
        """
        with _lock:
            own_lock = _locks.setdefault(self.key, threading.RLock())
        # a lock for each: a builder may use other constants, and other threads theirs meanwhile
        with own_lock:
            if self.key not in _kept:
                with kept.on_purpose():  # else its GPU memory would count as left over
                    content = self._open_content()
                    _kept[self.key] = (
                        content.source() if content.is_builder else content.source,
                        content.cleanup,
                    )
            held: T = _kept[self.key][0]
            return held

    def __repr__(self) -> str:
        return f"<Constant {self.key[:8]}: {'here' if self.key in _kept else 'not used here yet'}>"


def new_constant(open_content: Callable[[], Content]) -> Constant[Any]:
    """Return a constant with this content."""
    constant: Constant[Any] = Constant.__new__(Constant)  # its __init__ refuses users
    constant.key = uuid.uuid4().hex
    constant._open_content = open_content
    return constant


_kept: dict[str, tuple[Any, Callable[[Any], object] | None]] = {}
_locks: dict[str, threading.RLock] = {}
_lock = threading.Lock()  # for these two; never held while the user's code runs


def _renew_locks() -> None:
    # in a forked child: another thread of the parent may have held them
    global _lock
    _lock = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_renew_locks)


def content_of(source: Any, cleanup: Callable[[Any], object] | None) -> Content:
    """Return the content of a constant.

    Raises:
        InvalidTypeError: `cleanup` cannot be called.
    """
    if cleanup is not None and not callable(cleanup):
        raise InvalidTypeError(
            f"cleanup={cleanup!r} is not callable. Pass a function of the value."
        )
    return Content(source, isinstance(source, BUILDERS), cleanup)


def discard(keys: Sequence[str]) -> None:
    """Remove constants from this process, and clean up those that were used here.

    Raises:
        Exception: That of the first cleanup that failed; the others are called all the same.
    """
    errors = []
    for key in keys:
        with _lock:
            held = _kept.pop(key, None)
            _locks.pop(key, None)
        try:  # without the lock: it runs the user's code
            if held is not None and held[1] is not None:
                held[1](held[0])
        except Exception as error:  # the other constants are cleaned up all the same
            errors.append(error)
    if errors:
        raise errors[0]


def is_any_here() -> bool:
    """Return whether a constant has been used in this process."""
    return bool(_kept)


def discard_all() -> None:
    """Remove all constants from this process."""
    discard(list(_kept))


_called = threading.local()  # a worker is a thread: of its own process, or of this one


def call_once(key: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function once per key in this worker; later return the same value."""
    results: dict[tuple[str, int], T] = _called.__dict__.setdefault("results", {})
    note = note_here()
    place = (key, 0 if note is None else note.worker)  # "inline", several workers share a thread
    if place not in results:
        # late: it imports multiprocessing, which few pools need
        from raypool.channel.by_value import call_setup

        results[place] = call_setup(fn, *args, **kwargs)
    return results[place]
