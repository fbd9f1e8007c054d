"""The exchange of a pool: its processes ask it about queues, the store, and meetings of ranks.

`Exchange` runs in an event loop: of a node agent on Ray, or of a thread of this process
(`LocalExchange`). Its methods return expected failures (no such key, a closed queue) and raise
nothing. It knows keys and packed values only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from raypool.channel.queues import LOOK_AGAIN_S
from raypool.errors import PoolClosedError
from raypool.worker.running import note_here, uninterruptible

END_TIMEOUT_S = 2.0
"""How long the end of a queue waits for its workers, of which one may have been killed [s]."""

MAX_CHANGES = 100_000
"""When this many changes of the store wait for a listener, it has gone with its process."""

POOL_ENDED = "The pool was shut down, and the values that its tasks shared are gone."

PassOn = Callable[[str, int, bytes], object]


class Exchange:
    """The one place where all processes of a pool ask.

    Args:
        pass_on: Hands a value that is offered to a queue to the process that has opened the pool:
            queue, ticket, value. That process calls `answer(ticket, outcome)`.
        store_key: The key of the pool's store, the same for an exchange that replaces this one.
    """

    def __init__(self, pass_on: PassOn, store_key: str) -> None:
        self._pass_on = pass_on
        self._tickets = itertools.count()
        self._offers: dict[int, asyncio.Future[str]] = {}
        self._workers: dict[str, set[int]] = {}  # by queue: those that put into it
        self._ended: set[str] = set()  # queues
        self._news: dict[int, list[str]] = {}  # by worker: queues of whose end it is to hear
        self._rung: dict[int, asyncio.Event] = {}  # by worker
        # of queues that are being closed: the workers that do not know yet
        self._unaware: dict[str, set[int]] = {}
        self._numbers: dict[str, dict[int, int]] = {}
        self._all_know: dict[str, asyncio.Event] = {}
        self._shelf = Shelf(store_key)
        self._new_groups: dict[int, NewGroup] = {}

    # --- queues with a limit ----------------------------------------------------------------------

    async def offer(self, queue: str, value: bytes) -> str:
        """Offer a value to a queue with a limit; return the outcome, when there was room."""
        ticket = next(self._tickets)
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._offers[ticket] = waiting
        self._pass_on(queue, ticket, value)
        del value  # it may take long
        return await waiting

    async def answer(self, ticket: int, outcome: str) -> None:
        """Tell the outcome of an offer."""
        waiting = self._offers.pop(ticket, None)
        if waiting is not None and not waiting.done():  # done: the sender was cancelled
            waiting.set_result(outcome)

    # --- ends of other queues: with a limit, workers ask each time --------------------------------

    async def join_queue(self, queue: str, worker_id: int) -> bool:
        """Note that a worker puts into a queue; return whether that was closed already."""
        if queue in self._ended:
            return True
        self._workers.setdefault(queue, set()).add(worker_id)
        return False

    async def queue_ends(self, worker_id: int, known: list[str], number: int) -> list[str]:
        """Wait for ends of queues that a worker puts into; return these queues.

        It puts nothing more into the ended queues `known`; the newest batch of what it had put
        before is `number`.
        """
        for queue in known:
            if worker_id in self._unaware.get(queue, ()):
                self._numbers[queue][worker_id] = number
                self._now_knows(queue, worker_id)
        rung = self._rung.setdefault(worker_id, asyncio.Event())
        # without a limit: the thread of the worker that asks does nothing else
        await rung.wait()
        rung.clear()
        return self._news.pop(worker_id, [])

    async def end_queue(self, queue: str) -> dict[int, int]:
        """End a queue; return each worker's last batch of values for it, when all know the end."""
        self._ended.add(queue)
        workers = self._workers.pop(queue, set())
        if not workers:
            return {}
        self._unaware[queue] = set(workers)
        numbers = self._numbers[queue] = {}
        all_know = self._all_know[queue] = asyncio.Event()
        for worker_id in sorted(workers):
            self._news.setdefault(worker_id, []).append(queue)
            self._rung.setdefault(worker_id, asyncio.Event()).set()
        with contextlib.suppress(TimeoutError):  # a worker that was killed never answers
            await asyncio.wait_for(all_know.wait(), END_TIMEOUT_S)
        del self._unaware[queue], self._numbers[queue], self._all_know[queue]
        return numbers

    async def forget(self, worker_id: int) -> None:
        """Note that a worker has gone: nobody need wait for it."""
        for workers in self._workers.values():
            workers.discard(worker_id)
        for queue in list(self._unaware):
            self._now_knows(queue, worker_id)
        self._news.pop(worker_id, None)
        if rung := self._rung.pop(worker_id, None):
            rung.set()  # else its last call would wait here until the pool closes

    def _now_knows(self, queue: str, worker_id: int) -> None:
        unaware = self._unaware[queue]
        unaware.discard(worker_id)
        if not unaware:
            self._all_know[queue].set()

    # --- the store --------------------------------------------------------------------------------

    async def store(self, key: str | None, verb: str, *args: Any) -> Any:
        """Ask the store with this key (None: any); return a list of its answer, None if absent."""
        if key not in (None, self._shelf.key):
            return None
        return [await getattr(self._shelf, verb)(*args)]

    # --- ranks ------------------------------------------------------------------------------------

    async def meet(self, number: int, rank: int, world_size: int, said: Any) -> list[Any]:
        """Wait until all ranks of a new group have called this; return their messages, by rank."""
        group = self._new_groups.setdefault(number, NewGroup())
        group.said[rank] = said
        try:
            if len(group.said) == world_size:
                group.is_complete.set()
            await group.is_complete.wait()
            return [group.said[other] for other in range(world_size)]
        finally:  # also where this rank was cancelled: then the others are, too
            self._new_groups.pop(number, None)


class NewGroup:
    """The ranks of a new group that have arrived."""

    def __init__(self) -> None:
        self.said: dict[int, Any] = {}
        self.is_complete = asyncio.Event()


class StoreWatcher:
    """A listener for changes of the store."""

    def __init__(self) -> None:
        self.changed: list[Any] = []
        self.rung = asyncio.Event()


class Shelf:
    """The packed values of a store, in the order of their keys' first `put`."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._values: dict[Any, Any] = {}
        self._awaited: dict[Any, list[asyncio.Future[Any]]] = {}
        self._watchers: dict[int, StoreWatcher] = {}
        self._watcher_ids = itertools.count()

    async def identify(self) -> str:
        """Return the key of this store."""
        return self.key

    async def put(self, key: Any, packed: Any) -> None:
        """Put a value in, in place of an older one."""
        self._values[key] = packed
        for waiting in self._awaited.pop(key, ()):
            if not waiting.done():
                waiting.set_result(packed)
        self._note_change(key)

    async def get(self, key: Any) -> tuple[bool, Any]:
        """Return whether there is such a key, and its value."""
        return (True, self._values[key]) if key in self._values else (False, None)

    async def remove(self, key: Any) -> bool:
        """Remove a key; return whether it was there."""
        if key not in self._values:
            return False
        del self._values[key]
        self._note_change(key)
        return True

    async def keys(self) -> list[Any]:
        """Return all keys."""
        return list(self._values)

    async def has(self, key: Any) -> bool:
        """Return whether there is such a key."""
        return key in self._values

    async def wait(self, key: Any, timeout_s: float | None) -> tuple[bool, Any]:
        """Return whether there was such a key in time, and its value."""
        if key in self._values:
            return True, self._values[key]
        waiting = asyncio.get_running_loop().create_future()
        awaited = self._awaited.setdefault(key, [])
        awaited.append(waiting)
        try:
            return True, await asyncio.wait_for(waiting, timeout_s)
        except TimeoutError:
            return False, None
        finally:
            if waiting in awaited:
                awaited.remove(waiting)
            # the key may have been put, and be awaited anew: then the list is another's
            if not awaited and self._awaited.get(key) is awaited:
                del self._awaited[key]

    async def watch(self) -> int:
        """Record changes for a listener from now on; return its number."""
        number = next(self._watcher_ids)
        self._watchers[number] = StoreWatcher()
        return number

    async def unwatch(self, number: int) -> None:
        """Record no more changes for a listener."""
        watcher = self._watchers.pop(number, None)
        if watcher is not None:
            watcher.rung.set()

    async def changes(self, number: int) -> list[Any] | None:
        """Wait for keys that were put or removed since the last call; None after `unwatch`."""
        watcher = self._watchers.get(number)
        if watcher is None:
            return None
        # without a limit: `unwatch` rings, too
        await watcher.rung.wait()
        watcher.rung.clear()
        changed, watcher.changed = watcher.changed, []
        return changed if changed or number in self._watchers else None

    def _note_change(self, key: Any) -> None:
        for number, watcher in list(self._watchers.items()):
            watcher.changed.append(key)
            watcher.rung.set()
            if len(watcher.changed) > MAX_CHANGES:
                # a watcher that is only slow learns of it at its next call: see `ValueStore`
                del self._watchers[number]


class LocalExchange:
    """An exchange in a thread of this process, for pools whose tasks run here.

    Values stay as they are; queues do not need it.
    """

    def __init__(self, pass_on: PassOn = lambda queue, ticket, value: None) -> None:
        self._lock = threading.Lock()  # the thread starts once, and never after `close`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._closed: str | None = None  # why, if it is
        self._exchange = Exchange(pass_on, uuid.uuid4().hex)
        _all_local.add(self)

    def pack(self, value: Any, what: str) -> Any:
        """Return the value."""
        return value

    def unpack(self, packed: Any) -> Any:
        """Return the value."""
        return packed

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the exchange, and wait for its answer.

        Raises:
            PoolClosedError: The pool was shut down.
        """
        with self._lock:
            if self._closed is not None:
                raise PoolClosedError(self._closed)
            if self._loop is None:
                # a task that is cancelled in between would leave a thread that nobody ends
                with uninterruptible(note_here()):
                    self._start()
            assert self._loop is not None
            # The coroutine is made no earlier: a task that is cancelled while it waits for the lock
            # would leave it without anybody.
            future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(
                getattr(self._exchange, method)(*args), self._loop
            )
        try:
            # in pieces, so that a task that waits here can be cancelled
            while not concurrent.futures.wait([future], LOOK_AGAIN_S).done:
                pass
            return future.result()
        except concurrent.futures.CancelledError:
            raise PoolClosedError(self._closed or POOL_ENDED) from None
        finally:
            future.cancel()

    def _start(self) -> None:
        loop, ended = asyncio.new_event_loop(), asyncio.Event()

        def live() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                # then the runner cancels all calls that still wait: see `ask`
                runner.run(ended.wait())

        threading.Thread(target=live, name="raypool-exchange", daemon=True).start()
        # not set by the thread: Ctrl-C while somebody waited for that would start a second one
        self._loop, self._ended = loop, ended

    def close(self) -> None:
        """End it; waiting threads get `PoolClosedError`."""
        with self._lock:
            self._closed = POOL_ENDED
            if self._loop is not None and self._ended is not None:
                self._loop.call_soon_threadsafe(self._ended.set)
                self._loop = None


_all_local: weakref.WeakSet[LocalExchange] = weakref.WeakSet()


def _leave_all() -> None:
    # a forked child has no thread that would answer
    for exchange in list(_all_local):
        exchange._lock = threading.Lock()  # the parent may have held the old one
        exchange._closed = (
            "A forked child process (of a DataLoader, say) cannot use the store of a pool. Use it"
            " in the task itself."
        )


os.register_at_fork(after_in_child=_leave_all)
