"""Reports, output and log records of tasks, on their way from an outbox to the hub.

The outbox of a worker collects entries and sends them in batches. Adding one takes about a
microsecond. A thread sends them, at once after a pause and then every `INTERVAL_S`; what is left
when a call ends travels with its answer.

The hub, in the process that opened the pool, delivers them to their feeds, queues and loggers.
Batches arrive by themselves or with the answers to calls, so the hub first puts them in order by
their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from raypool.channel import queues
from raypool.channel.capture import Records
from raypool.channel.feed import TEXT_BYTES, Feed, Holder, Last, Row, feed_of
from raypool.errors import InternalError, InvalidValueError
from raypool.worker.running import TaskContext

INTERVAL_S = 0.02
"""The shortest pause between two batches [s]: entries of that time share one."""

MAX_ENTRIES = 100_000
MAX_BYTES = 64 * 1024 * 1024
"""When more than this waits to be sent, threads that add entries wait."""

RETRY_S = 1.0
"""The pause before a batch that could not be sent is tried again [s]."""

LINE_S = 0.001
"""How long to wait for the end of a line, which `print` writes separately [s]: else lines of others
would come between.
"""

LOOK_AGAIN_S = 0.002

CATCH_UP_S = 5.0
"""How long a reader waits for messages that were sent before a task ended [s]."""

MAX_EARLY = 100
"""When this many batches wait for an earlier one, they wait no longer."""

MAX_AGAIN_BYTES = 64 * 1024
"""The size of a batch that is sent again with an answer while it is on its way [bytes]."""

Entry = tuple[Any, ...]

logger = logging.getLogger("raypool")


class Outbox:
    """Sends entries from any thread of this process.

    Args:
        send: Sends a batch with its number, from 1, and returns when it may have another: until
            then entries wait, and once `MAX_ENTRIES` or `MAX_BYTES` wait, threads that add some.
            After an exception it is called again.
    """

    def __init__(self, send: Callable[[int, bytes], object]) -> None:
        self._send = send
        # Simple queues and locks in C only: a signal may interrupt a thread that adds an entry,
        # and raise there.
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[str] = queue.SimpleQueue()  # what the first entry is
        self._is_resting = False  # the thread waits for the bell
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()  # ends a pause of the thread
        self._num_bytes = 0
        # reentrant: a finalizer that happens to run while it is locked may print
        self._counting = threading.RLock()
        # by queue: of those that keep only the newest few
        self._latest: dict[str, deque[bytes]] = {}
        self._number = 0
        self._taking = threading.Lock()  # the thread and `flush` take batches, by number
        self._gets_through = True
        self._sending = 0, b""  # the batch that the thread sends, with its number
        self._is_here = True  # not in a forked child, which has no such thread
        self._closed = threading.Event()
        _outboxes.add(self)
        threading.Thread(target=self._work, name="raypool-outbox", daemon=True).start()

    def say(self, note: TaskContext, kind: str, payload: Any) -> None:
        """Add "metrics" or "text" of a task."""
        if kind == "metrics":
            self._put((kind, note.task_id, note.index, note.attempt, *payload), 0)
        else:
            self._put((kind, note.task_id, note.index, note.call_id, payload), len(payload))

    def send(self, kind: str, key: Any, payload: Any) -> None:
        """Add something else, which arrives as it is, in order.

        Raises:
            InvalidValueError: This is a forked child of the process that the outbox belongs to.
        """
        self._check_here()
        self._put((kind, key, payload), len(payload))

    def send_latest(self, key: str, maxsize: int, payload: bytes) -> None:
        """Add a value of a queue that keeps the newest: older ones are dropped; it never waits.

        Raises:
            InvalidValueError: This is a forked child of the process that the outbox belongs to.
        """
        self._check_here()
        kept: deque[bytes] = deque(maxlen=maxsize)
        with self._counting:
            if key not in self._latest:
                # first: if a signal interrupts here, an entry for nothing does no harm
                self._entries.put(("latest", key, b""))
            self._latest.setdefault(key, kept).append(payload)
        self._ring("latest")

    def _check_here(self) -> None:
        if not self._is_here:
            raise InvalidValueError(
                "A forked child of a worker cannot send anything to the pool. Send it from the task"
                " itself, or start the child with multiprocessing's method 'spawn' and a pipe."
            )

    def _put(self, entry: Entry, size: int) -> None:
        if not self._is_here:
            return
        while self._num_bytes >= MAX_BYTES or self._entries.qsize() >= MAX_ENTRIES:
            if not self._gets_through or self._closed.is_set():
                return  # nothing gets through, and the training must not stall: it is dropped
            time.sleep(LOOK_AGAIN_S)
        # first: if a signal interrupts after it, too few bytes count, not too many forever
        self._entries.put(entry)
        if size:
            with self._counting:
                self._num_bytes += size
        self._ring(entry[0])

    def _ring(self, kind: str) -> None:
        if self._is_resting:
            self._is_resting = False
            self._bell.put(kind)

    def flush(self) -> tuple[int, bytes]:
        """Return the newest batch's number, and that batch, or b"" if the thread has sent it."""
        with self._taking:
            return self._take()

    def answer(self) -> list[tuple[int, bytes]]:
        """Do the same; before it, return the batch that the thread sends, if it is short."""
        # They travel with the answer to a call: so a short task that reports costs no message, and
        # none of its reports is lost if this process is killed right after the answer.
        with self._taking:
            sent = [self._sending] if 0 < len(self._sending[1]) <= MAX_AGAIN_BYTES else []
            return [*sent, self._take()]

    def send_now(self) -> int:
        """Send what waits now; return the number of the newest batch."""
        number, batch = self.flush()
        if batch:
            self._deliver(number, batch)
        return number

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was added has arrived: this process may be about to end."""
        deadline = time.monotonic() + timeout_s
        if self._is_waiting():
            self._hurry.put(None)
        while self._is_waiting() and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)

    def _is_waiting(self) -> bool:
        with self._taking:
            return bool(self._sending[1]) or not self._entries.empty()

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()
        self._hurry.put(None)
        self._bell.put("closed")

    def _take(self) -> tuple[int, bytes]:
        entries: list[Entry] = []
        size = 0
        # not until it is empty: a thread that prints without pause would keep this from ending
        for _ in range(self._entries.qsize()):
            entry = self._entries.get_nowait()  # nobody else takes any
            if entry[0] == "latest":
                with self._counting:
                    payloads = self._latest.pop(entry[1], ())
                entries.extend(("queue", entry[1], payload) for payload in payloads)
                continue
            entries.append(entry)
            if entry[0] != "metrics":
                size += len(entry[-1])
        if not entries:
            return self._number, b""
        with self._counting:
            self._num_bytes -= size
        self._number += 1
        return self._number, packed(entries)

    def _work(self) -> None:
        while not self._closed.is_set():
            # first: an entry that is added right after the look at them rings
            self._is_resting = True
            if self._entries.empty() and self._bell.get() == "text":
                time.sleep(LINE_S)
            self._is_resting = False
            with self._taking:
                number, batch = self._sending = self._take()
            if batch:
                self._deliver(number, batch)
                self._sending = 0, b""
                with contextlib.suppress(queue.Empty):
                    self._hurry.get(timeout=INTERVAL_S)

    def _deliver(self, number: int, batch: bytes) -> None:
        while not self._closed.is_set():
            try:
                self._send(number, batch)
            except Exception as error:
                # first: what is logged here goes through here too
                is_new, self._gets_through = self._gets_through, False
                if is_new:
                    logger.warning(
                        "Reports and output of tasks could not be sent: %r. Retrying.", error
                    )
                self._closed.wait(RETRY_S)  # not a sleep, which `close` could not end
            else:
                self._gets_through = True
                return


_outboxes: weakref.WeakSet[Outbox] = weakref.WeakSet()


def _forget_all() -> None:
    # a forked child has no thread that would send anything
    for outbox in list(_outboxes):
        outbox._is_here = False


os.register_at_fork(after_in_child=_forget_all)


def packed(entries: list[Entry]) -> bytes:
    """Return entries as a batch: each task's metrics pickled apart, each item's text joined.

    Example:
        >>> a, b = ("text", 7, 0, 1, "a"), ("text", 7, 0, 1, "b")
        >>> batch = packed([a, ("metrics", 7, 0, 1, 12.5, {"loss": 2}), b])
        >>> [entry[0] for entry in pickle.loads(batch)]
        ['metrics', 'text']
        >>> pickle.loads(batch)[1]
        ('text', 7, 'ab', 0, 0, 1)
    """
    rows: dict[int, list[Row]] = {}
    texts: dict[tuple[int, int, int], list[str]] = {}
    batch: list[Entry] = []
    for entry in entries:
        kind, key, *rest = entry
        if kind == "metrics":
            item, attempt, time_, values = rest
            rows.setdefault(key, []).append((time_, item, attempt, values))
        elif kind == "text":
            texts.setdefault((key, rest[0], rest[1]), []).append(rest[2])
        else:
            batch.append(entry)
    for task_id, its_rows in rows.items():
        # the hub passes these pickles on as they are
        batch.append(("metrics", task_id, pickle.dumps(its_rows, protocol=5), last_of(its_rows)))
    for (task_id, item, call_id), pieces in texts.items():
        text = "".join(pieces)
        num_missing = max(len(text) - TEXT_BYTES, 0)
        batch.append(("text", task_id, text[num_missing:], num_missing, item, call_id))
    return pickle.dumps(batch, protocol=5)


def last_of(rows: list[Row]) -> Last:
    """Return the newest values in rows, by item."""
    last: Last = {}
    for _, item, attempt, values in rows:
        there = {name: value for name, value in values.items() if value is not None}
        known = last.get(item)
        if known is not None and known[0] == attempt:
            known[1].update(there)
        else:
            last[item] = (attempt, there)
    return last


class Hub:
    """Delivers messages of tasks; those for a holder that is gone are dropped.

    `on_early` takes reports about calls that last: worker, message.
    """

    on_early: Callable[[int, bytes], object] | None = None

    def __init__(self) -> None:
        # by task
        self._holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
        # not the condition: a task that is cancelled while it takes that could leave it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # by worker: the newest batch before which none is missing
        self._arrived: dict[int, int] = {}
        # by worker and number: batches that wait for one before them
        self._early: dict[int, dict[int, bytes]] = {}
        # by worker: batches that the others no longer wait for
        self._late: defaultdict[int, set[int]] = defaultdict(set)
        self._awaited: dict[int, int] = {}  # by worker: the newest batch that somebody may wait for
        self._gone: set[int] = set()  # workers for which nobody waits
        self._is_closed = False
        self.records = Records()

    def watch(self, task_id: int, holder: Holder) -> None:
        """Note the holder of a task, which gets its messages."""
        self._holders[task_id] = holder

    def say(self, note: TaskContext, kind: str, payload: Any) -> bool:
        """Take "metrics" or "text" of a task in this process; see `TaskContext`."""
        feed = self._feed_of(note.task_id)
        if feed is None:
            return False
        if kind == "metrics":
            time_, values = payload
            feed.add_row((time_, note.index, note.attempt, values))
            return False
        feed.add_text(payload, 0, note.index, note.call_id)
        return feed.on_text is not None

    def deliver(self, worker_id: int, number: int, batch: bytes) -> None:
        """Take a batch of another process's `Outbox`; b"" is none."""
        with self._changed:
            if not batch:
                return
            if number <= self._arrived.get(worker_id, 0):
                if number in self._late[worker_id]:
                    self._late[worker_id].remove(number)
                    self._open(worker_id, batch)
                return
            early = self._early.setdefault(worker_id, {})
            early[number] = batch
            if self._has_come(worker_id, number):  # nobody waits for those before it
                self._advance(worker_id, number)
            else:
                self._advance(worker_id, min(early) if len(early) > MAX_EARLY else 0)

    def waiter(self, worker_id: int, number: int) -> Callable[[], None] | None:
        """Return a function that waits for a worker's batches up to this one; None if all came."""
        with self._changed:
            if self._has_come(worker_id, number):
                return None
            self._awaited[worker_id] = max(number, self._awaited.get(worker_id, 0))
        return functools.partial(self._wait, worker_id, number)

    def catch_up(self) -> None:
        """Wait for all messages of calls that have ended."""
        for worker_id, number in list(self._awaited.items()):
            self._wait(worker_id, number)

    def forget(self, worker_id: int) -> None:
        """Note that a worker has gone: no thread waits for it, but late messages count."""
        with self._changed:
            self._gone.add(worker_id)
            self._advance(worker_id, max(self._early.get(worker_id, ()), default=0))

    def close(self) -> None:
        """Note that no more messages will arrive."""
        with self._changed:
            self._is_closed = True
            for worker_id, early in self._early.items():
                self._advance(worker_id, max(early, default=0))
            self._changed.notify_all()
        # the last log lines come before the end of the pool; a handler may need the lock
        self.records.wait()

    def _has_come(self, worker_id: int, number: int) -> bool:
        return (
            self._arrived.get(worker_id, 0) >= number or worker_id in self._gone or self._is_closed
        )

    def _wait(self, worker_id: int, number: int) -> None:
        with self._changed:
            # bounded: a batch may be lost, and then those behind it count without it
            if not self._changed.wait_for(lambda: self._has_come(worker_id, number), CATCH_UP_S):
                self._advance(worker_id, number)
            if self._awaited.get(worker_id, 0) <= number:
                self._awaited.pop(worker_id, None)

    def _advance(self, worker_id: int, number: int) -> None:
        """Take the batches up to this one that are here, and those that follow without a gap."""
        early = self._early.get(worker_id, {})
        arrived = self._arrived.get(worker_id, 0)
        try:
            while arrived < number or arrived + 1 in early:
                arrived += 1
                batch = early.pop(arrived, None)
                if batch is None:
                    self._late[worker_id].add(arrived)
                else:
                    self._open(worker_id, batch)
        finally:  # also after an error in a batch, which counts as arrived then
            self._arrived[worker_id] = arrived
            self._changed.notify_all()

    def _open(self, worker_id: int, batch: bytes) -> None:
        for entry in pickle.loads(batch):
            self._take(worker_id, *entry)

    def _take(self, worker_id: int, kind: str, key: Any, *rest: Any) -> None:
        if kind == "queue":
            queues.deliver(key, *rest)
        elif kind == "log":
            self.records.put(rest[-1])
        elif kind == "warning":
            logger.warning("%s", *rest)
        elif kind == "early":
            if self.on_early is not None:
                self.on_early(worker_id, *rest)
        elif kind in ("metrics", "text"):
            feed = self._feed_of(key)
            if feed is not None:
                (feed.add_rows if kind == "metrics" else feed.add_text)(*rest)
        else:
            raise InternalError(f"A worker sent a message of an unknown kind: {kind!r}.")

    def _feed_of(self, task_id: int) -> Feed | None:
        holder = self._holders.get(task_id)
        return None if holder is None else feed_of(holder)
