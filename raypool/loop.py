"""Runs one `parfor` in the thread that called it: feeds items, shows progress, waits, and puts the results together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import math
import numbers
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from raypool.channel.records import Missing
from raypool.core.messages import CancelRequested, ItemsAdded
from raypool.core.model import TaskSpec, TaskState
from raypool.counts import whole_number
from raypool.engine.engine import Engine
from raypool.engine.loop_work import LoopWork, Lost, Segment
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.results import Results, Row
from raypool.worker.running import in_task

if TYPE_CHECKING:
    from raypool.backends.base import Backend

LOOK_AHEAD = 16
"""So many items per worker are drawn from a generator before their turn: enough to share calls, few enough to draw lazily."""

TICK_S = 0.1
"""How often a progress display is brought up to date [s]."""

PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Types whose values can always be pickled, so that nobody need try."""


class Watcher(Protocol):
    """Somebody who is shown how a loop goes on."""

    def update(self, work: LoopWork, total: int | None) -> None:
        """Look at the loop; called every tenth of a second and at the end."""


def listed(items: Any) -> Sequence[Any] | Iterator[Any]:
    """Return the items of a loop as a sequence, or as an iterator where their number is not known.

    Raises:
        InvalidTypeError: They are not iterable.
    """
    if isinstance(items, bool):
        raise InvalidTypeError(f"items={items!r} is not iterable. Give a list, a DataFrame, a generator or a number of items.")
    number = whole_number(items)
    if number is not None:
        if number < 0:
            raise InvalidValueError(f"items={number} is less than 0.")
        return range(number)
    if hasattr(items, "to_dicts") and hasattr(items, "columns"):  # of polars
        rows: list[Any] = items.to_dicts()
        return rows
    if hasattr(items, "to_dict") and hasattr(items, "columns"):  # of pandas
        rows = items.to_dict("records")
        return rows
    if isinstance(items, (list, tuple, range)):
        return items
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidTypeError(
            f"items={items!r} is not iterable. Give a list, a DataFrame, a generator or a number of items."
        ) from None
    return list(iterator) if hasattr(items, "__len__") else iterator


def longest_first(items: Sequence[Any] | Iterator[Any], cost: Any) -> list[int] | None:
    """Return the numbers of the items, the one that costs most first, equal ones as they are; None if that is their order.

    Raises:
        InvalidValueError: The items come from a generator; there are not as many numbers as items, or one is NaN.
        InvalidTypeError: `cost` is neither numbers nor a function that gives them.
        Exception: What a function has raised, with a note of the item.
    """
    if isinstance(items, Iterator):
        raise InvalidValueError("cost= needs to know all items before the first one runs: give a list instead of a generator.")
    costs = [_cost(cost, index, item) for index, item in enumerate(items)] if callable(cost) else _listed_costs(cost)
    if len(costs) != len(items):
        raise InvalidValueError(f"cost= has {len(costs)} numbers for {len(items)} items. Give one for each.")
    for index, value in enumerate(costs):
        if not isinstance(value, numbers.Real):
            raise InvalidTypeError(f"The cost of item {index} is {value!r}, which is not a number.")
        if not value <= math.inf:
            raise InvalidValueError(f"The cost of item {index} is NaN, which is neither more nor less than others.")
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    return None if order == list(range(len(costs))) else order


def _cost(cost: Callable[[Any], Any], index: int, item: Any) -> Any:
    try:
        return cost(item)
    except Exception as error:
        error.add_note(f"raypool: cost= was asked for item {index}")
        raise


def _listed_costs(cost: Any) -> list[Any]:
    if isinstance(cost, (str, bytes, Mapping)) or not (hasattr(cost, "__len__") and hasattr(cost, "__getitem__")):
        raise InvalidTypeError(f"cost={cost!r} is neither a number for each item nor a function that returns one.")
    return list(cost)


def check_travels(items: Sequence[Any], backend: Backend, label: str, first: int = 0) -> None:
    """Make sure, here and now, that the items can be sent; the first of them has this number.

    Raises:
        SerializationError: One of them cannot; the message says which, and what of it.
    """
    if isinstance(items, range) or PLAIN.issuperset(map(type, items)):
        return
    for index, item in enumerate(items, first):
        if type(item) not in PLAIN:
            backend.pack(item, f"item {index} of {label}", is_trial=True)


class LoopRun:
    """One `parfor` in progress."""

    def __init__(self, engine: Engine, work: LoopWork, watchers: Sequence[Watcher]) -> None:
        self._driver = engine.driver
        self._backend = engine.backend
        self._records = engine.hub.records
        self._work = work
        self._watchers = watchers
        if watchers and is_serial(engine):
            work.on_settled = self._show_in_time
        self._task_id = -1
        self._show_at = 0.0
        self._total: int | None = None  # not known before a generator has ended

    def run(self, items: Sequence[Any] | Iterator[Any], make_spec: Callable[[int, int, bool], TaskSpec]) -> Results:
        """Run all items and return their results; a first failure is not raised here.

        Interrupted (Ctrl-C, here or in an item that runs inline, or an error in the generator), it cancels what is queued and
        raises; what had finished is in the exception's `results`.
        """
        work = self._work
        if self._driver.is_own_thread:
            raise InvalidValueError(
                "A loop cannot run in the callback of a future: the pool would wait for itself. Use a thread."
            )
        try:
            if isinstance(items, Iterator):
                self._feed(items, make_spec)
            else:
                check_travels(items, self._backend, work.label)
                size = work.take(items)
                self._total = len(items)
                self._task_id = self._driver.submit(work, lambda task_id: make_spec(task_id, size, False))
            self._wait(lambda: work.is_done)
            work.catch_up()
            self._records.wait()  # what items have logged stands before what the caller logs next
            self._show()
            if work.interrupt is not None:
                raise work.interrupt
        except BaseException as error:
            self.cancel()
            if work.run_dir is not None:
                self._write_rest(error)
            attach(error, self.results())
            if isinstance(error, KeyboardInterrupt):
                self._note_rest(error)
            raise
        finally:
            work.on_settled = None  # the results hold the work for as long as they live, and need none of what showed it
        return self.results()

    def _write_rest(self, error: BaseException) -> None:
        """Have what was brought back until now written down; interrupted again, leave it."""
        try:
            self._driver.barrier()
            self._work.close()
        except BaseException as again:
            attach(again, self.results())
            raise
        if self._work.trouble is not None:
            error.add_note(f"raypool: {self._work.trouble}")

    def _feed(self, items: Iterator[Any], make_spec: Callable[[int, int, bool], TaskSpec]) -> None:
        """Draw from a generator, never more than the look-ahead before the first item without a result."""
        work, driver = self._work, self._driver
        work.take([])
        self._task_id = driver.submit(work, lambda task_id: make_spec(task_id, 0, True))
        # One by one: the next item may take long to come, or even wait for what becomes of this one.
        for item in items:
            check_travels((item,), self._backend, work.label, first=len(work.items))
            if work.add(item):
                driver.post(ItemsAdded(self._task_id, 1, is_open=True))
            self._wait(lambda: work.is_done or len(work.items) - work.num_settled < self._look_ahead())
            if work.is_done:
                return
        self._total = len(work.items)
        driver.post(ItemsAdded(self._task_id, 0, is_open=False))

    def _look_ahead(self) -> int:
        return LOOK_AHEAD * max(self._driver.scheduler.crew.size, 1)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        work = self._work
        while not is_over():
            with work.changed:
                work.changed.wait_for(is_over, TICK_S if self._watchers else None)
            self._show_in_time()

    def _show_in_time(self) -> None:
        if time.monotonic() >= self._show_at:
            self._show()

    def _show(self) -> None:
        for watcher in self._watchers:
            watcher.update(self._work, self._total)
        self._show_at = time.monotonic() + TICK_S

    def cancel(self) -> None:
        """Let nothing more of the loop start."""
        if self._task_id >= 0:
            self._driver.post(CancelRequested(self._task_id))

    def _note_rest(self, error: KeyboardInterrupt) -> None:
        """Say where what had finished can be found: nobody expects it in the exception."""
        work = self._work
        count = work.num_settled - (work.interrupt is not None)
        of = f"of {self._total} items" if self._total is not None else "items"
        is_kept = work.run_dir is not None and work.trouble is None
        kept = f", and in {work.run_dir}: the same call goes on from there" if is_kept else ""
        error.add_note(
            f"raypool: {count} {of} of {work.label} had finished; they are in the exception's .results "
            f"(at a prompt: sys.last_value.results){kept}."
        )

    def results(self) -> Results:
        """Put together what has come back so far."""
        work = self._work
        segments, lost, errors = list(work.segments), list(work.lost), dict(work.errors)
        items = work.items
        values: list[Any] = [None] * len(items)
        for index, entry in work.restored.items():
            values[index] = entry.value
        for piece, result, _ in segments:
            first = result.offset + piece.start - result.start
            arrived = result.values.get()[first : first + piece.stop - piece.start]
            indices = work.numbers(piece)
            if isinstance(indices, range):
                values[piece.start : piece.stop] = arrived
            else:
                for index, value in zip(indices, arrived, strict=True):
                    values[index] = value
        if any(type(value) is Missing for value in values):
            _move_missing(values, errors)
        rows = functools.partial(_rows, work, segments, lost, errors)
        return Results(items, values, rows, errors, work.caught_up, lambda: [*work.misses], work.diary)


def _move_missing(values: list[Any], errors: dict[int, BaseException]) -> None:
    for index, value in enumerate(values):
        if type(value) is Missing:
            values[index] = None
            errors[index] = value.error


def _rows(work: LoopWork, segments: list[Segment], lost: list[Lost], errors: Container[int]) -> list[Row]:
    """Tell what is known of each item. Made only when somebody looks: for short items it costs more than they do."""
    rows = [Row() if index not in work.restored else work.restored[index].row for index in range(len(work.items))]
    for piece, result, worker in segments:
        starts = list(itertools.accumulate(result.durations_s, initial=result.started_at))
        for position, index in enumerate(work.numbers(piece), piece.start - result.start):
            row = rows[index]
            row.status = "failed" if index in errors else "finished"
            row.duration_s, row.started_at = result.durations_s[position], starts[position]
            row.worker, row.gpu, row.attempts = worker.index, worker.gpu, piece.attempt
            row.peak_memory_bytes = result.peak_memory_bytes
            row.host, row.run = worker.host, work.run
    for piece, _, span in lost:
        where = {} if span is None else span._asdict()
        for index in work.numbers(piece):
            rows[index] = Row("failed", attempts=piece.attempt, run=work.run, **where)
    return rows


def attach(error: BaseException, results: Results) -> None:
    """Give an exception the results that were there before it, if it can carry them."""
    try:
        error.results = results  # type: ignore[attr-defined]
    except AttributeError:
        return


def is_serial(engine: Engine) -> bool:
    """Whether a loop runs in the thread that waits for it."""
    return engine.profile.backend == "inline"


def watched(
    progress: bool | Callable[..., Any] | None, label: str, engine: Engine
) -> contextlib.AbstractContextManager[Watcher | None]:
    """Show how a loop goes on while the context lasts, if that is wanted; in a task nobody would see it."""
    if progress is False or in_task():
        return contextlib.nullcontext()
    from raypool.views.progress import watched as watched_by_somebody

    return watched_by_somebody(progress, label, engine.backend, is_serial(engine))


@contextlib.contextmanager
def echoed(echo: bool | None, work: LoopWork, engine: Engine) -> Iterator[Watcher | None]:
    """Show what items print while the context lasts, if that is wanted; in a task nobody would see it."""
    if in_task() or not (_is_unseen_in_notebook(engine) if echo is None else echo):
        yield None
        return
    from raypool.views.item_lines import ItemLines

    lines = ItemLines(is_direct=is_serial(engine))
    work.feed.on_text = lines.add
    try:
        yield lines
    finally:
        work.catch_up()
        work.feed.on_text = None
        lines.end()


def _is_unseen_in_notebook(engine: Engine) -> bool:
    """Whether this is a notebook that shows nothing of what items print; in this process, what they print is shown anyway."""
    from raypool.views.kernel import notebook_shell

    return engine.profile.backend == "ray" and notebook_shell() is not None


def check_progress(progress: Any) -> None:
    """Make sure that `progress` is one of those things that it may be.

    Raises:
        InvalidTypeError: It is none of them.
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidTypeError(
            f"progress={progress!r} is neither True, False nor None, nor something that makes a progress bar. Give tqdm, say: "
            "progress=tqdm."
        )


def raise_if_failed(work: LoopWork, results: Results, on_error: str) -> None:
    """Raise what ended the loop before its time, or its first failure if that is wanted."""
    is_complete = work.state is TaskState.FINISHED
    if is_complete and (on_error == "collect" or not results.errors):
        return
    error = work.first_error if on_error == "stop" else None
    if error is None:  # not `or`: an error may be false
        error = work.broken_by
    if error is None and is_complete:
        error = next(iter(results.errors.values()))
        with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
            error.add_note(f"raypool: {len(results.errors):,} of {len(results):,} items failed; .results has the others.")
    if error is None:
        error = concurrent.futures.CancelledError(f"The loop {work.label} was cancelled; what had finished is in .results.")
    attach(error, results)
    raise error


def folded(results: Results, reduce: Callable[[Any, Any], Any], init: Any) -> Any:
    """Fold the values of the items that have one, in their order."""
    errors = results.errors
    values = [value for index, value in enumerate(results) if index not in errors]
    try:
        if init is not None:
            return functools.reduce(reduce, values, init)
        return functools.reduce(reduce, values) if values else None
    except Exception as error:
        attach(error, results)
        raise
