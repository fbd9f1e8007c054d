"""`LoopWork`, a loop for the driver: many items in one task, whose outcomes arrive in segments."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from raypool.channel.feed import Feed, LoopFeed
from raypool.channel.feed import Row as ReportRow
from raypool.channel.gpu_usage import GpuSample
from raypool.channel.records import Function, Part, SliceItems, SliceResult, WorkerInfo, named
from raypool.core.model import Slice, TaskState
from raypool.engine.in_flight import Call
from raypool.engine.work import Pack, described
from raypool.errors import TaskError, told
from raypool.results import Miss, Row, Span

if TYPE_CHECKING:
    from raypool.journal.live import Request

T = TypeVar("T")

MOST_SHOWN = 16
"""Of a call with more items than this, watchers see the first ones."""


COPIES = {
    **dict.fromkeys(
        ["builtins.dict", "builtins.list", "builtins.set", "builtins.bytearray", "numpy.ndarray"],
        "copy",
    ),
    "torch.Tensor": "clone",
}
"""The method that copies an object of a type, though not what a container has in it."""

CALLS_KEPT = 3
"""Of each worker: the call that has just come back, the one that it is at, and the next one."""


class Segment(NamedTuple):
    """Outcomes of a slice of a loop that came back together."""

    items: Slice
    result: SliceResult
    worker: WorkerInfo


class Lost(NamedTuple):
    """Items that never got an outcome; `span`: the call that they were in at that time, if any."""

    items: Slice
    error: TaskError
    span: Span | None


class CallItems(NamedTuple):
    """The items of a loop in one call; which of them is running is unknown until it comes back."""

    items: Slice
    worker: WorkerInfo
    call: Call

    def span(self) -> Span | None:
        """Return where it ran, until now; None if it has not begun."""
        began_at, worker = self.call.began_at, self.worker
        return (
            None
            if began_at is None
            else Span(worker.index, worker.gpu, worker.host, began_at, max(time() - began_at, 0.0))
        )


class Restored(NamedTuple):
    """The outcome of an item from an earlier run: its value or error, and how it ran."""

    value: Any
    error: BaseException | None
    row: Row


class Tail(Sequence[T]):
    """A list that grows at its end; released entries become None, and take no memory."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self._kept.get(number) for number in range(*key.indices(self._size))]
        return self._kept.get(range(self._size)[key])

    def append(self, entry: T) -> None:
        """Add an entry, in one thread; any other may read."""
        self._kept[self._size] = entry
        self._size += 1

    def release(self, number: int) -> None:
        """Forget an entry."""
        del self._kept[number]


class LoopOptions(NamedTuple):
    """How a loop is run.

    `is_fixed`: the user has set `chunk_size`. `order`: the numbers of the items in the order of
    submission; None: as they are. `checkpoints`: a path or URL for checkpoints of items, and the
    prefix of the names there.
    """

    label: str
    retry_on: tuple[type[BaseException], ...] = ()
    seed: int | None = None
    stops_on_error: bool = False
    is_fixed: bool = False
    order: Sequence[int] | None = None
    checkpoints: tuple[str, str] | None = None


class LoopWork:
    """The items of one `parfor`, whose outcomes the waiting thread joins from segments.

    Slices are cut from the order of submission; to the user, items have their own numbers.
    """

    def __init__(self, function: Function, items: Sequence[Any], options: LoopOptions) -> None:
        self.function = function
        self.items = items
        self.label = options.label
        self._options = options
        self._order = options.order
        self.can_rerun = True  # whether users can have everything run again
        self.num_saved = 0  # outcomes of earlier calls
        self.is_fixed = options.is_fixed
        self.home: str | None = None  # the path or URL for checkpoints
        self._owner = ""
        if options.checkpoints is not None:
            self.home, self._owner = options.checkpoints
        self.keys: list[str] = []  # of the items, where something is kept of them
        self._counts: Counter[str] = Counter()  # of equal items
        self.run_dir: Path | None = None  # the folder for results
        self.trouble: BaseException | None = None  # why not all of it could be kept
        self.restored: dict[int, Restored] = {}  # items that need not run
        self.segments: list[Segment] | Tail[Segment] = []
        self.errors: dict[int, BaseException] = {}
        self.replaced_errors: dict[int, list[BaseException]] = {}  # of items that ran again
        self.first_error: BaseException | None = None
        # what an inline item raised to end the whole loop: Ctrl-C, or a cancellation around it
        self.interrupt: BaseException | None = None
        self.lost: list[Lost] = []
        self.misses: list[Miss] = []
        self.run = 1  # the number of this call, among those with the same folder
        self._shares: dict[int, tuple[CallItems, ...]] = {}  # by worker: what was sent there last
        self.state = TaskState.QUEUED
        self.broken_by: BaseException | None = None
        self.num_settled = 0
        # Entered instead of the condition: Ctrl-C within Condition.__enter__ would leave it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        # what travels in place of an item, by its number
        self.sent_as: Callable[[int], Any] | None = None
        # whether an item with an outcome may run once more; None: none does
        self.may_run_again: Callable[[int], bool] | None = None
        self.is_pruned: Callable[[int], bool] = lambda index: False
        # called instead, where no thread can wait for `changed`
        self.on_settled: Callable[[], object] | None = None
        # for those who watch: the state of the loop, and what becomes of a request
        self.find_live: Callable[[], dict[str, Any]] = dict
        self.act: Callable[[Request], str | None] = lambda _: None
        self.dropped: list[int] = []  # positions in the order that were cancelled alone
        # whether `reduce=` has passed an item, whose segment may be gone
        self.is_folded: Callable[[int], bool] = lambda _: False
        self.stopped_by: str | None = None  # who asked that nothing more starts
        # items that were asked to stop; another attempt at one knows it from its first line on
        self.stopping: set[int] = set()
        self.feed = LoopFeed()
        self.about: Sequence[str] = ()  # lines for the display, about the whole
        # by worker: waits for what it said before it answered last
        self._catch_ups: dict[int, Callable[[], None]] = {}

    def catch_up(self) -> None:
        """Wait for all messages of items that have come back. From any thread."""
        for catch_up in list(self._catch_ups.values()):
            catch_up()

    def caught_up(self) -> Feed:
        """Return the feed, complete for items that have come back. From any thread."""
        self.catch_up()
        return self.feed

    def diary(self, index: int) -> str:
        """Return what an item printed when it ran last. From any thread."""
        self.catch_up()
        return self.feed.diary(index)

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.state.is_final

    @property
    def holder(self) -> LoopWork:
        """The loop itself."""
        return self

    def take(self, items: Sequence[Any]) -> int:
        """Take the items before the loop is submitted; return how many of them are to run."""
        self.items = items
        if self.home is not None:
            self.keys = [self._name(item, index) for index, item in enumerate(items)]
        return len(items)

    def add(self, item: Any) -> int:
        """Take one more item, of a generator; return how many are to run: one or none."""
        index = self.append(item)
        if index in self.restored:
            return 0
        self.queue(index)
        return 1

    def append(self, item: Any) -> int:
        """Take one more item, without queueing it; return its number."""
        items = cast("list[Any]", self.items)
        # a copy: a generator may yield the same object again, changed
        how = COPIES.get(f"{type(item).__module__}.{type(item).__name__}")
        if how is not None:
            item = getattr(item, how)()
        if self.home is not None:
            self.keys.append(self._name(item, len(items)))
        items.append(item)
        return len(items) - 1

    def queue(self, index: int, *, has_run: bool = False) -> None:
        """Queue an item; if it has run before, its last outcome will count."""
        if has_run:
            self.stopping.discard(index)
            with self.lock:
                self.num_settled -= 1
        if self._order is not None:
            cast("list[int]", self._order).append(index)

    def run_again(self, index: int) -> None:
        """Queue an item once more that has failed or was cancelled."""
        # an order is never copied: a generator may be adding items to it in another thread
        if self._order is None:
            self._order = list(range(len(self.items)))
        self.queue(index, has_run=True)

    @property
    def cancelled_items(self) -> set[int]:
        """The items that were cancelled alone."""
        order = self._order
        return {*self.dropped} if order is None else {order[position] for position in self.dropped}

    def newest_run(self, index: int) -> tuple[int, str]:
        """Return the position at which an item was queued last, and its state there.

        That is "waits", "is running", "has ended" or "was cancelled". From any thread. A restored
        item has no position (-1). One whose outcome is on its way "waits" for a moment.
        """
        order = self._order
        position = index
        if order is not None:
            found = (at for at in reversed(range(len(order))) if order[at] == index)
            position = next(found, -1)
        if position in self.dropped:
            return position, "was cancelled"
        if self.shares_of(position):
            return position, "is running"
        # those that were folded are None
        pieces = [segment.items for segment in [*self.segments] if segment]
        pieces += [lost.items for lost in [*self.lost]]
        has_ended = (
            position < 0
            or self.is_folded(index)
            or any(piece.start <= position < piece.stop for piece in pieces)
        )
        return position, "has ended" if has_ended else "waits"

    def shares_of(self, position: int) -> list[CallItems]:
        """Return the running calls that have the item at a position. From any thread."""
        return [
            share
            for share in self._running_shares()
            if share.items.start <= position < share.items.stop
        ]

    def live(self) -> list[dict[str, Any]]:
        """Return the running items, for those who watch; of a long call the first ones."""
        return [
            {
                "item": index,
                "attempt": share.items.attempt,
                "worker": share.worker.index,
                "started_at": share.call.began_at,
                "last": dict(self.feed.last(index, share.items.attempt)),
            }
            for share in self._running_shares()
            for index in self.numbers(share.items)[:MOST_SHOWN]
        ]

    def earlier_reports(self, index: int) -> Iterator[tuple[int, ReportRow]]:
        """Yield what an item reported in earlier calls with the same folder, with their runs."""
        return iter(())

    def calls(self) -> list[dict[str, Any]]:
        """Return what is known about each call with the same folder."""
        return []

    def folder(self, index: int) -> Path | None:
        """Return the folder of an item, if the loop has a `run_dir`. From any thread."""
        return None

    def write_reports(self) -> None:
        """Write reports that have arrived now, if there is a place for them. From any thread."""

    def keep_gpus(self, sample: GpuSample) -> None:
        """Keep a sample of a GPU on the disk, if there is a place for it. From any thread."""

    def close(self) -> None:
        """Close the files of the loop. From any thread, when nobody waits for it."""

    def _name(self, item: Any, index: int) -> str:
        """Return the name of the next item, by its content; equal items get a count.

        Raises:
            InvalidTypeError: Nobody can tell whether another item is equal to it.
        """
        from raypool.journal.keys import content_key  # imported late: few loops name their items

        key = content_key(item, f"item {index} of {self.label}")
        self._counts[key] += 1
        count = self._counts[key]
        return key if count == 1 else f"{key}-{count}"

    def numbers(self, piece: Slice) -> Sequence[int]:
        """Return the numbers of the items of a slice. From any thread."""
        order = self._order
        return range(piece.start, piece.stop) if order is None else order[piece.start : piece.stop]

    def begin(self, piece: Slice, worker: WorkerInfo, call: Call) -> bool:
        """Note what the worker runs now, or next."""
        self.state = TaskState.RUNNING
        before = self._shares.get(worker.index, ())
        self._shares[worker.index] = (*before[1 - CALLS_KEPT :], CallItems(piece, worker, call))
        return True

    @property
    def running(self) -> dict[int, tuple[Slice, float]]:
        """What each worker runs, by its index, and since when. From any thread."""
        return {
            share.worker.index: (share.items, share.call.began_at or 0.0)
            for share in self._running_shares()
        }

    def _running_shares(self) -> list[CallItems]:
        # one copy: the driver's thread changes it meanwhile
        shares = itertools.chain.from_iterable(self._shares.copy().values())
        return [share for share in shares if share.call.is_running]

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return these items, packed."""
        numbers = None if self._order is None else self.numbers(piece)
        items = (
            self.items[piece.start : piece.stop]
            if numbers is None
            else [self.items[index] for index in numbers]
            if self.sent_as is None
            else [self.sent_as(index) for index in numbers]
        )
        packed = pack(SliceItems(items), self.describe(piece))
        checkpoints = None
        if self.home is not None:
            checkpoints = self.home, tuple(map(self.checkpoint_name, self.numbers(piece)))
        return Part(
            piece.task_id,
            self.function.fn_id,
            packed,
            len(items),
            piece.start,
            piece.attempt,
            is_call=False,
            seed=self._options.seed,
            name=self.label,
            stops_on_error=self._options.stops_on_error and not self._options.retry_on,
            is_fixed=self.is_fixed,
            should_stop=bool(self.stopping) and self.stopping.issuperset(self.numbers(piece)),
            numbers=numbers,
            checkpoints=checkpoints,
        )

    def checkpoint_name(self, index: int) -> str:
        """Return the name of an item's checkpoint, below `home`."""
        return f"items/{self._owner}{self.keys[index]}/checkpoint"

    def wants_retry(self, error: BaseException) -> bool:
        """Whether `retry_on` names this."""
        return isinstance(error, self._options.retry_on)

    def describe(self, piece: Slice) -> str:
        """Return the numbers of the items, and the name of the loop."""
        return f"{named(self.numbers(piece))} of {self.label}"

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Keep the outcomes."""
        if result.catch_up is not None:
            self._catch_ups[worker.index] = result.catch_up
        self._keep(Segment(piece, result, worker), self._errors_of(piece, result, worker))

    def _errors_of(
        self, piece: Slice, result: SliceResult, worker: WorkerInfo
    ) -> dict[int, BaseException]:
        """Return the exceptions of the items of a slice, by their numbers."""
        numbers = self.numbers(piece)
        errors = {}
        for position, failure in result.failures.items():
            if piece.start <= position < piece.stop:
                index = numbers[position - piece.start]
                errors[index] = described(failure, f"item {index} of {self.label}", piece, worker)
        return errors

    def _keep(self, segment: Segment, errors: dict[int, BaseException]) -> None:
        self._forget_earlier(segment.items)
        for index, error in errors.items():
            self._note_error(index, error)
            if segment.result.is_interrupt(error):
                self.interrupt = error
        self.segments.append(segment)
        self._note_settled(segment.items)

    def _forget_earlier(self, piece: Slice) -> None:
        """Forget earlier outcomes of items that ran again."""
        is_trial = self.may_run_again is not None  # whose parts count together
        for index in self.numbers(piece) if self.errors or self.restored else ():
            error = self.errors.pop(index, None)
            if error is not None:
                self.replaced_errors.setdefault(index, []).append(error)
            if not is_trial:
                self.restored.pop(index, None)

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Keep the error for each of these items."""
        self._keep_failed(Lost(piece, error, self._let_go(piece)))

    def _keep_failed(self, lost: Lost) -> None:
        self._forget_earlier(lost.items)
        for index in self.numbers(lost.items):
            self._note_error(index, lost.error)
        self.lost.append(lost)
        self._note_settled(lost.items)

    def drop(self, piece: Slice) -> None:
        """Note that an item was cancelled alone: it gets no outcome."""
        for share in self.shares_of(piece.start):
            self._note_missed(piece, None, self._where(piece, share.worker))
        self._let_go(piece)
        self.dropped.append(piece.start)
        self._note_settled(piece)

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Note where the items ran that run again."""
        self._note_missed(piece, why, self._where(piece, worker))

    def _note_missed(
        self, piece: Slice, why: str | BaseException | None, where: dict[str, Any]
    ) -> None:
        """Note an attempt that was lost (a text says how), is repeated for an error, or stopped."""
        status = "cancelled" if why is None else "lost" if isinstance(why, str) else "retried"
        row = Row(status, attempts=piece.attempt, run=self.run, **where)
        words = told(why) if isinstance(why, BaseException) else why
        self.misses += (Miss(index, row, words) for index in self.numbers(piece))

    def _where(self, piece: Slice, worker: WorkerInfo) -> dict[str, Any]:
        """Return where, and if it has begun when, the newest call ran that had this attempt."""
        share = self._newest(piece, self._shares.get(worker.index, ()))
        span = None if share is None else share.span()
        return (
            {"worker": worker.index, "gpu": worker.gpu, "host": worker.host}
            if span is None
            else span._asdict()
        )

    def _let_go(self, piece: Slice) -> Span | None:
        """Forget where items were sent; return where and when they ran last."""
        share = self._newest(piece, itertools.chain.from_iterable(self._shares.values()))
        if share is None:
            return None
        index = share.worker.index
        self._shares[index] = tuple(each for each in self._shares[index] if each is not share)
        return share.span()

    def _newest(self, piece: Slice, shares: Iterable[CallItems]) -> CallItems | None:
        fitting = [
            share
            for share in shares
            if share.items.attempt == piece.attempt
            and share.items.start <= piece.start < share.items.stop
        ]
        # Of a call that lasts, the last one is what it goes on with.
        return max(reversed(fitting), key=lambda share: share.call.attempt_id, default=None)

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Wake the waiting threads; results that still arrive are dropped."""
        # whoever holds the loop, as the traceback of its error does, need not keep it in workers
        del self.function
        self._note_cancelled(state)
        self._wake(state, error)

    def _note_cancelled(self, state: TaskState) -> None:
        # only running calls: what waits in a worker behind one never begins
        for share in self._running_shares() if state is not TaskState.FINISHED else ():
            self._note_missed(share.items, None, self._where(share.items, share.worker))

    def _wake(self, state: TaskState, error: BaseException | None) -> None:
        with self.lock:
            self.broken_by = error
            self.state = state
            self.changed.notify_all()

    def _note_error(self, index: int, error: BaseException) -> None:
        self.errors[index] = error
        if self.first_error is None:
            self.first_error = error

    def _note_settled(self, piece: Slice) -> None:
        with self.lock:
            self.num_settled += piece.stop - piece.start
            self.changed.notify_all()
        self._tell_settled()

    def _tell_settled(self) -> None:
        if (tell := self.on_settled) is not None:  # another thread may set it to None meanwhile
            tell()
