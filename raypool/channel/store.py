"""The value store (`pool.store`): values by name, for the pool's owner and all its tasks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from raypool.channel.queues import Listener, check_timeout, sources
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    WorkerLostError,
    explains_calls,
    whole_number,
)
from raypool.worker.running import ExchangeClient, note_here, this_process

logger = logging.getLogger("raypool")

FindWay = Callable[[], ExchangeClient]


class ValueStore:
    """Values by name, of one pool: `pool.store`, and in its tasks `current_task().store`.

    Every task, and the process that opened the pool, may put, read and remove at any time; the last
    `put` wins. On Ray, a value is kept as it is at `put`, and each reader gets a copy; in pools of
    this process it is the value itself. One process beside the workers keeps the values in memory
    until the pool ends. Outside a pool `current_task().store` is a store of this process, so that a
    function runs unchanged by itself.

    Keys are strings, integers, or tuples of them. Every method may raise `PoolClosedError` (the
    pool has ended) or `WorkerLostError` (the process with the values was lost).

    Source:
        MATLAB R2025b, ValueStore.

    Example:
        >>> from raypool import current_task, parpool
        >>> def train(config):
        ...     current_task().store[config] = {"weights": [config] * 2}
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     results = pool.parfor(train, ["a", "b"])
        ...     sorted(pool.store.keys())
        ...     pool.store["b"]
        ['a', 'b']
        {'weights': ['b', 'b']}
    """

    def __init__(self, way: ExchangeClient, key: str | None = None) -> None:
        self._way = way
        # by which one store is told from others; None: the only one
        self._key = key

    # --- single values ----------------------------------------------------------------------------

    def put(self, key: Any, value: Any) -> None:
        """Put a value in, in place of an older one, as does `store[key] = value`.

        Raises:
            SerializationError: The value cannot be sent; it names the variable.
            InvalidTypeError: The key is of another type.
        """
        key = _checked_key(key)
        self._ask("put", key, self._way.pack(value, f"the value {key!r} of the store"))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value under this key, or the default if there is none.

        Example:
            >>> from raypool import current_task
            >>> current_task().store.get("none such", default=0)
            0
        """
        key = _checked_key(key)
        is_there, packed = self._ask("get", key)
        return self._way.unpack(packed) if is_there else default

    def __getitem__(self, key: Any) -> Any:
        key = _checked_key(key)
        is_there, packed = self._ask("get", key)
        if not is_there:
            raise KeyError(key)
        return self._way.unpack(packed)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def remove(self, key: Any) -> None:
        """Remove a key and its value, as does `del store[key]`.

        Raises:
            KeyError: There is no such key.
        """
        key = _checked_key(key)
        if not self._ask("remove", key):
            raise KeyError(key)

    def __delitem__(self, key: Any) -> None:
        self.remove(key)

    @explains_calls
    def wait(self, key: Any, timeout_s: float | None = None) -> Any:
        """Wait for a value under this key, and return it.

        Args:
            key: The key.
            timeout_s: How long to wait [s]; None waits forever.

        Raises:
            TimeoutError: No value was put there in this time.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     store = pool.store
            ...     future = pool.parfeval(lambda: store.wait("start", timeout_s=10))
            ...     store["start"] = "now"
            ...     future.result()
            'now'
        """
        key = _checked_key(key)
        check_timeout(timeout_s)
        is_there, packed = self._ask("wait", key, timeout_s)
        if not is_there:
            raise TimeoutError(f"Nothing was stored under {key!r} within {timeout_s:g} s.")
        return self._way.unpack(packed)

    # --- keys -------------------------------------------------------------------------------------

    def keys(self) -> list[Any]:
        """Return all keys, in the order of their first `put`."""
        return list(self._ask("keys"))

    def __contains__(self, key: Any) -> bool:
        key = _checked_key(key)
        return bool(self._ask("has", key))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __repr__(self) -> str:
        try:
            return f"<ValueStore: {len(self)} value{'s' if len(self) != 1 else ''}>"
        except (PoolClosedError, WorkerLostError):
            return "<ValueStore: closed>"

    # --- changes ----------------------------------------------------------------------------------

    def on_change(self, fn: Callable[[ValueStore, Any], object]) -> Listener:
        """Call `fn(store, key)` here after each `put` and each removal, by any process.

        `key in store` tells which it was. Another thread calls `fn`, in the order of the changes; a
        value may have changed again by then. Exceptions are logged and otherwise ignored.

        Returns:
            The listener; its `remove()` ends it, and so does the end of the pool.

        Raises:
            InvalidTypeError: `fn` cannot be called.

        Source:
            MATLAB R2025b, ValueStore, KeyUpdatedFcn and KeyRemovedFcn.

        Example:
            >>> from raypool import DataQueue, parpool
            >>> changes = DataQueue()
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     listener = pool.store.on_change(
            ...         lambda store, key: changes.put((key, key in store))
            ...     )
            ...     pool.store["model"] = 1
            ...     changes.get()
            ...     listener.remove()
            ('model', True)
        """
        if not callable(fn):
            raise InvalidTypeError(
                f"{fn!r} is not callable. Pass a function of the store and a key."
            )
        number = self._ask("watch")
        listener = Listener(fn, lambda _: self._unwatch(number))
        threading.Thread(
            target=self._pass_on, args=(number, listener), name="raypool-store", daemon=True
        ).start()
        return listener

    def _pass_on(self, number: int, listener: Listener) -> None:
        try:
            while (keys := self._ask("changes", number)) is not None:
                for key in keys:
                    if listener.is_removed:
                        return
                    listener.call(self, key)
            why = "it handles changes more slowly than they arrive. Do less in it, or add it again."
        except PoolClosedError:  # the end of the store ends its listeners
            return
        except WorkerLostError:
            why = "the process that held the values was lost, and the values with it. Add it again."
        if not listener.is_removed:
            logger.warning("A listener of pool.store was removed, because %s", why)

    def _unwatch(self, number: int) -> None:
        with contextlib.suppress(PoolClosedError, WorkerLostError):  # the store has ended
            self._ask("unwatch", number)

    # --- connection to the exchange ---------------------------------------------------------------

    def _ask(self, verb: str, *args: Any) -> Any:
        answer = self._way.ask("store", self._key, verb, *args)
        if answer is None:
            this_process.check_connected("The store")
            raise InvalidValueError(
                "This store belongs to another pool than this task. Use current_task().store, or"
                " send the value."
            )
        return answer[0]

    def __reduce__(self) -> Any:
        """Travel to the tasks of its pool, as a key."""
        if self._key is None:
            self._key = self._ask("identify")
        _known[self._key] = self
        return _arrived, (self._key,)


_known: weakref.WeakValueDictionary[str, ValueStore] = weakref.WeakValueDictionary()
"""Stores that have left this process."""


def _arrived(key: str) -> ValueStore:
    known = _known.get(key)
    if known is not None:
        return known
    for pool in tuple(sources):  # a task has sent it here
        with contextlib.suppress(PoolClosedError, WorkerLostError):
            if pool.ask("store", key, "identify") is not None:
                return ValueStore(pool, key)
    return ValueStore(way_finder_here()(), key)


def store_here() -> ValueStore:
    """Return the store of this task's pool; outside a pool, one of this process."""
    find_way = way_finder_here()
    if find_way is _link_or_own:  # else this is a task of a pool in this process
        this_process.check_connected("The store")
    return ValueStore(find_way())


def way_finder_here() -> FindWay:
    """Return what finds the exchange of this task's pool; outside a pool, one of this process."""
    note = note_here()
    return _link_or_own if note is None or note.find_way is None else note.find_way


def _link_or_own() -> ExchangeClient:
    return this_process.link or _own_exchange()


@functools.cache
def _own_exchange() -> ExchangeClient:
    from raypool.channel.exchange import LocalExchange  # late: it imports asyncio

    return LocalExchange()


# a forked child needs another one: the thread of this one stays behind
os.register_at_fork(after_in_child=_own_exchange.cache_clear)


def _checked_key(key: Any) -> Any:
    """Return a key with Python's integers in place of others."""
    parts = [
        part if isinstance(part, str) else whole_number(part)  # not of True, which would be 1
        for part in (key if type(key) is tuple else (key,))
    ]
    if None in parts:
        raise InvalidTypeError(
            f"A key must be a string, an integer, or a tuple of them, not {key!r}."
        )
    return tuple(parts) if type(key) is tuple else parts[0]
