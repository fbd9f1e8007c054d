"""The body of `PoolView.parfor` (`run_loop`), and one loop in progress (`LoopRun`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import numbers
import os
import re
import reprlib
import threading
import time
from collections import deque
from collections.abc import (
    Callable,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Union

from raypool.channel.feed import MetricsReport, report_of_row
from raypool.channel.feed import Row as FeedRow
from raypool.channel.gpu_usage import FIRST_LOOK_S, GpuLog, samples_in
from raypool.channel.records import Function, Missing
from raypool.core.messages import (
    CancelRequested,
    DrainRequested,
    FirstRequested,
    ItemsAdded,
    Signal,
    StopRequested,
)
from raypool.core.model import TaskSpec, TaskState
from raypool.engine.engine import Engine
from raypool.engine.loop import CallItems, LoopOptions, LoopWork, Lost, Segment, Tail
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    add_note,
    optional_count,
    whole_number,
)
from raypool.options import check_callable, check_name, takes
from raypool.results import FrameRows, Miss, Results, Row, run_name
from raypool.worker.running import PLAIN, in_task

if TYPE_CHECKING:
    from raypool.backends.base import Backend
    from raypool.channel.records import NodeGpus
    from raypool.journal.live import Request
    from raypool.loggers import SweepLogger
    from raypool.pool import PoolView


RERUNS = ("failed", "missing", "all")


# --- types of the arguments, for type checkers ----------------------------------------------------


T = TypeVar("T")
Item = TypeVar("Item")

MaybeAsync = Union[Coroutine[Any, Any, T], T]  # noqa: UP007 - mypy takes no `| T` here
"""What a function returns whose value is a T: workers run the coroutine of an `async def`."""


class Frame(Protocol):
    """A DataFrame of pandas or polars: each row is an item, as a dict."""

    @property
    def columns(self) -> Any:
        """The names of its columns."""


class Array(Protocol):
    """An array of NumPy or torch, or a Series; its rows are of a type that no checker knows."""

    def tolist(self) -> Any:
        """Return nested lists."""


Items = Iterable[Item] | int | Frame | Array


class LoopArguments(TypedDict, total=False):
    """The arguments of `parfor` that do not affect the type of its result."""

    on_error: Literal["stop", "raise", "collect"] | None
    cost: Sequence[float] | Callable[[Any], float] | None
    max_workers: int | None
    chunk_size: int | None
    seed: int | None
    progress: bool | Callable[..., Any] | None
    echo: bool | None
    name: str | None
    run_dir: str | os.PathLike[str] | None
    rerun: Literal["failed", "missing", "all"]
    on_report: Callable[[MetricsReport], object] | None
    on_end: Callable[[Results[Any]], object] | str | None
    loggers: Sequence[SweepLogger]
    watch: bool


# --- the verb -------------------------------------------------------------------------------------


def run_loop(  # noqa: PLR0913 - the arguments of the verb
    view: PoolView,
    fn: Callable[[Any], Any],
    items: Items[Any],
    *,
    on_error: Literal["stop", "raise", "collect"] | None,
    reduce: Callable[[Any, Any], Any] | None,
    init: Any,
    cost: Sequence[float] | Callable[[Any], float] | None,
    max_workers: int | None,
    chunk_size: int | None,
    seed: int | None,
    progress: bool | Callable[..., Any] | None,
    echo: bool | None,
    name: str | None,
    run_dir: str | os.PathLike[str] | None,
    rerun: Literal["failed", "missing", "all"],
    on_report: Callable[[MetricsReport], object] | None,
    on_end: Callable[[Results[Any]], object] | str | None,
    loggers: Sequence[SweepLogger],
    watch: bool,
) -> Any:
    """Run a loop on the workers of a view; see `PoolView.parfor`."""
    __tracebackhide__ = True
    check_callable(fn, [items])
    if on_error is None:
        on_error = "stop" if run_dir is None else "raise"
    if on_error not in ("stop", "raise", "collect"):
        raise InvalidValueError(f"on_error must be 'stop', 'raise' or 'collect', not {on_error!r}.")
    check_progress(progress)
    if not (echo is None or isinstance(echo, bool)):
        raise InvalidTypeError(f"echo must be True, False or None, not {echo!r}.")
    check_name(name)
    max_workers = optional_count("max_workers", max_workers, least=0)
    chunk_size = optional_count("chunk_size", chunk_size, least=1)
    seed = optional_count("seed", seed, least=0)
    check_saved(run_dir, rerun, watch)
    if run_dir is not None:
        check_no_search(run_dir)
    check_on_report(on_report)
    check_on_end(on_end)
    if loggers:
        from raypool.loggers import check_loggers  # imported late: few loops have any

        check_loggers(loggers)
    check_reduce(reduce)
    sequence = listed(items)
    order = None if cost is None else longest_first(sequence, cost)
    # 0: in this process, with the pool's store
    target = view._serial(view._engine.find_way) if max_workers == 0 else view._target()
    engine, options = target._engine, target._options
    if seed is not None and engine.profile.backend == "threads":
        # its items take turns: in a worker, one that waits would use up its `timeout_s`
        max_workers = 1
    function = engine.function(fn)
    if seed is None:  # with a seed each item has its own numbers
        engine.warn_of_generators(fn)
    label = name or options.name or function.name
    where = target._where()
    home = None if options.checkpoints is None else (str(options.checkpoints), checkpoint_owner(fn))
    how = LoopOptions(
        label, options.retry_on, seed, on_error == "stop", chunk_size is not None, order, home
    )

    spec = options.spec(function.fn_id, where, fail_fast=on_error == "stop")._replace(
        max_workers=max_workers or None, chunk_size=chunk_size
    )
    if watch:  # first: what it raises leaves no folder in use
        view.watch(run_dir).show()
    work = new_loop(fn, function, how, run_dir, rerun)
    del function  # the traceback of an error would keep it in workers
    view._engine.run_dir = work.run_dir or view._engine.run_dir
    with EndNotice(on_end, work) as notice:
        with (
            contextlib.closing(work),
            watched(progress, label, engine) as display,
            echoed(echo, work, engine) as lines,
            logged(loggers, work) as log,
        ):
            watchers = [watcher for watcher in (log, lines, display) if watcher is not None]
            loop = LoopRun(engine, work, watchers, on_report, reduce, init)
            notice.find_results = loop.results
            results = loop.run(sequence, spec)
        raise_if_failed(work, results, on_error)
    return results if reduce is None else loop.folded(results)


def checkpoint_owner(fn: Callable[[Any], Any]) -> str:
    """Return the prefix of checkpoint folders, which differs between functions."""
    from raypool.journal.keys import content_key, function_key
    from raypool.journal.plain import encode

    given = []  # in partials, other values make it another function
    inner: Any = fn
    while isinstance(inner, functools.partial):
        # values that are no plain data do not count: their key may differ after a restart
        given.append(encode([list(inner.args), dict(sorted(inner.keywords.items()))]))
        inner = inner.func
    return f"{content_key((function_key(fn), given), 'a function')[:8]}-"


def check_reduce(reduce: Any) -> None:
    """Make sure that `reduce` can be called with two values."""
    # `sum` takes two arguments, but the first of them is a sequence
    if reduce is sum or (reduce is not None and not (callable(reduce) and takes(reduce, (0, 0)))):
        raise InvalidTypeError(
            f"reduce={getattr(reduce, '__name__', repr(reduce))} does not fold two values into one."
            " Pass a function of two values, such as operator.add."
        )


def check_saved(run_dir: Any, rerun: str, watch: bool) -> None:
    """Make sure that the arguments that need a folder have one."""
    if rerun not in RERUNS:
        raise InvalidValueError(f"rerun must be 'failed', 'missing' or 'all', not {rerun!r}.")
    if rerun != "failed" and run_dir is None:
        raise InvalidValueError(
            f"rerun={rerun!r} needs run_dir, the folder of the run to continue."
        )
    if watch and run_dir is None:
        raise InvalidValueError("watch=True needs run_dir, the folder that the page shows.")


def check_no_search(run_dir: Any) -> None:
    """Make sure that a folder has no search, whose items are numbered as its trials."""
    from raypool.journal.trials import STUDY  # imported late, as in `new_loop`

    check_run_dir(run_dir)
    folder = Path(run_dir).expanduser()
    there = False
    with contextlib.suppress(OSError):  # too long a name, say: opening the journal says so
        there = (folder / STUDY).exists()
    if there:
        raise JournalError(
            f"{folder} has a search, whose items are its trials. Use another run_dir.",
            run_dir=str(folder),
        )


def new_loop(
    fn: Callable[[Any], Any],
    function: Function,
    how: LoopOptions,
    run_dir: Any,
    rerun: Literal["failed", "missing", "all"],
) -> LoopWork:
    """Return a loop, which keeps the outcomes of its items in the folder, if there is one.

    Raises:
        InvalidTypeError, InvalidValueError: `check_run_dir` refuses it.
        JournalError: The folder cannot be used.
    """
    if run_dir is None:
        return LoopWork(function, (), how)
    from raypool.engine.durable import DurableLoop  # imported late, since it imports sqlite3

    check_run_dir(run_dir)
    return DurableLoop.open(fn, function, how, run_dir, rerun)


def check_run_dir(run_dir: Any) -> None:
    """Make sure that a run can have this folder, as far as its name tells.

    Raises:
        InvalidTypeError: It is not a path.
        InvalidValueError: It is empty, a URL or a file.
    """
    if not isinstance(run_dir, (str, os.PathLike)):
        raise InvalidTypeError(f"run_dir={run_dir!r} is not a path. Pass the name of a folder.")
    path = os.fspath(run_dir)
    if not path:
        raise InvalidValueError(
            "run_dir is empty. Pass the name of a folder; it need not exist yet."
        )
    try:
        os.fsencode(path)
    except ValueError as error:  # half of a character
        raise InvalidValueError(
            f"run_dir={path!r} cannot be the name of a folder: {error}."
        ) from error
    if "\0" in path:
        raise InvalidValueError(f"run_dir={path!r} cannot be the name of a folder: it has a NUL.")
    if "://" in path:
        raise InvalidValueError(
            f"run_dir={path!r} is a URL. The journal needs a folder of this machine;"
            " options(checkpoints=...) takes URLs."
        )
    if os.path.isfile(os.path.expanduser(path)):  # noqa: PTH111, PTH113
        raise InvalidValueError(
            f"run_dir={path!r} is a file. Pass a folder; it need not exist yet."
        )


# --- one loop in the calling thread ---------------------------------------------------------------


LOOK_AHEAD = 16
"""Items per worker that are drawn ahead of a generator: enough to share calls, few to stay lazy."""

TICK_S = 0.1
"""How often a progress display is updated [s]."""

DONE = "done"
"""The outcome of a watcher's action that was carried out."""

NEEDED = {
    "stop": ("is running",),
    "cancel": ("waits", "is running"),
    "rerun": ("has ended", "was cancelled"),
    "first": ("waits",),
}
"""In which states of an item (`LoopWork.newest_run`) a watcher's action makes sense."""

IN_COMPANY = "shares its call with others, which can end only together (see chunk_size)"


class Watcher(Protocol):
    """A display of a loop's progress."""

    def update(self, work: LoopWork, total: int | None) -> None:
        """Look at the loop; called every tenth of a second and at the end."""


def listed(items: Any) -> Sequence[Any] | Iterator[Any]:
    """Return the items of a loop as a sequence, or as an iterator if their number is not known.

    Raises:
        InvalidTypeError: They are not iterable, or a text or dict.
        InvalidValueError: A number is negative, or two columns have the same name.
    """
    number = whole_number(items)
    if number is not None:
        if number < 0:
            raise InvalidValueError(f"items must be at least 0, not {number}.")
        return range(number)
    if (rows := _table_rows(items)) is not None:
        return rows
    if isinstance(items, (list, tuple, range)):
        # a copy: the user may sort or extend a list before the results are read
        return list(items) if isinstance(items, list) else items
    if isinstance(items, (str, bytes, Mapping)):
        pairs = ".items()" if isinstance(items, Mapping) else ""
        raise InvalidTypeError(
            f"items={reprlib.repr(items)} is a single {type(items).__name__}. Pass [items] for one"
            f" item, or list(items{pairs}) for its {'pairs' if pairs else 'parts'}."
        )
    if isinstance(items, float) and items.is_integer():
        raise InvalidTypeError(f"items must be an integer, not {items!r}. Pass items={int(items)}.")
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidTypeError(
            f"items={items!r} is not iterable. Pass a list, a DataFrame, a generator or a number of"
            " items."
        ) from None
    # a set or an array has an end: then the number of items is known from the beginning
    return list(iterator) if hasattr(items, "__len__") else iterator


def _table_rows(items: Any) -> list[Any] | None:
    """Return the rows of a table or a tensor; None if it is neither."""
    if hasattr(items, "columns"):
        if hasattr(items, "to_dicts"):  # of polars
            return items.to_dicts()  # type: ignore[no-any-return]
        if hasattr(items, "to_dict"):  # of pandas
            return FrameRows(items)
    if hasattr(items, "untyped_storage") and items.ndim:  # of torch
        return [row.clone() for row in items]  # else each would travel with the whole tensor
    return None


def longest_first(items: Sequence[Any] | Iterator[Any], cost: Any) -> list[int] | None:
    """Return the numbers of the items, the most expensive first; None if that is their own order.

    Raises:
        InvalidValueError: The items come from a generator; there are not as many numbers as items,
            or one is NaN.
        InvalidTypeError: `cost` is neither numbers nor a function that gives them.
        Exception: What a function has raised, with a note of the item.
    """
    if isinstance(items, Iterator):
        raise InvalidValueError(
            "cost= needs all items before the first one runs: pass a list instead of a generator."
        )
    costs: list[Any] = []
    if callable(cost):
        for index, item in enumerate(items):
            try:
                costs.append(cost(item))
            except Exception as error:
                add_note(error, f"raypool: cost= was asked for item {index}")
                raise
    elif isinstance(cost, (str, bytes, Mapping)) or not (
        hasattr(cost, "__len__") and hasattr(cost, "__getitem__")
    ):
        raise InvalidTypeError(
            f"cost must be a number for each item, or a function that returns one, not {cost!r}."
        )
    else:
        costs = list(cost)
    if len(costs) != len(items):
        raise InvalidValueError(
            f"cost= has {len(costs)} numbers for {len(items)} items. Pass one for each."
        )
    for index, value in enumerate(costs):
        if not isinstance(value, numbers.Real):
            raise InvalidTypeError(f"The cost of item {index} is {value!r}, which is not a number.")
        if not value <= math.inf:  # sorting with a NaN would give any order
            raise InvalidValueError(f"The cost of item {index} is NaN, which cannot be compared.")
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    return None if order == list(range(len(costs))) else order


def check_travels(items: Sequence[Any], backend: Backend, label: str, first: int = 0) -> None:
    """Make sure, here and now, that the items can be sent; the first of them has this number.

    Raises:
        SerializationError: One of them cannot; the message names it, and the part that cannot.
    """
    if isinstance(items, range) or PLAIN.issuperset(map(type, items)):
        return
    for index, item in enumerate(items, first):
        if type(item) not in PLAIN:
            backend.pack(item, f"item {index} of {label}", is_trial=True)


def _most_workers(spec: TaskSpec, there: int) -> int:
    """Return how many of the pool's workers a loop may use at once, at least 1."""
    if spec.places is not None:
        there = len(spec.places)
    most = there if spec.max_workers is None else min(there, spec.max_workers)
    return max(1 if spec.place is not None else most, 1)


class LoopRun:
    """One `parfor` in progress."""

    def __init__(
        self,
        engine: Engine,
        work: LoopWork,
        watchers: Sequence[Watcher],
        on_report: Callable[[MetricsReport], object] | None,
        reduce: Callable[[Any, Any], Any] | None = None,
        init: Any = None,
    ) -> None:
        self._driver = engine.driver
        self._find_workers = engine.workers
        self._backend = engine.backend
        self._records = engine.hub.records
        self._work = work
        self._watchers = watchers
        self._thread = threading.get_ident()
        if watchers and is_inline(engine):  # nobody waits in `_wait` while items run here
            work.on_settled = self._show_here
        self._fold = None if reduce is None else Fold(work, reduce, init)
        self._fold_at = 0.0
        self._on_report = on_report
        self._new_rows: deque[FeedRow] = deque()
        self._is_inline = is_inline(engine)
        self._report_error: BaseException | None = None
        if on_report is not None:
            work.feed.subscribe(self._note_rows)
        self._show_at = 0.0
        # else only the GPUs are looked at before the loop changes
        self._tick_s = TICK_S if watchers or reduce is not None else FIRST_LOOK_S
        self._gpus = GpuLog(engine.backend.gpu_readings, work.keep_gpus, work.run)
        self._total: int | None = None  # not known before a generator has ended
        self._readings: dict[tuple[str, int], dict[str, Any]] = {}  # of GPUs, for watchers
        self._read_at = -math.inf
        self._repeated: set[str] = set()  # requests of items that were queued again
        if work.run_dir is not None:
            work.find_live, work.act = self.live, self.act

    def run(self, items: Sequence[Any] | Iterator[Any], spec: TaskSpec) -> Results[Any]:
        """Run all items and return their results; a first failure is not raised here.

        Interrupted (Ctrl-C, here or in an item that runs inline, or an error in the generator), it
        cancels the queued items and raises; the exception's `results` has the finished ones.
        """
        work = self._work
        if self._driver.is_own_thread:
            raise InvalidValueError(
                "parfor() cannot be called in the callback of a future: the pool would wait for "
                "itself. Use a thread."
            )
        try:
            if isinstance(items, Iterator):
                self._feed(items, spec)
            else:
                check_travels(items, self._backend, work.label)
                size = work.take(items)
                self._total = size + len(work.restored)
                self._driver.submit(work, spec._replace(size=size))
            self._wait(lambda: work.is_done)
            if work.broken_by is not None:
                self.cancel()  # the journal's writer may have given up while items run
            work.catch_up()
            self._pass_reports_on()
            if self._report_error is not None:
                raise self._report_error
            self._records.wait()  # records of items come before those that the caller logs next
            self._show()
            if work.interrupt is not None:
                raise work.interrupt
            if self._fold is not None:
                self._fold.open(len(work.segments))
        except BaseException as error:
            self.cancel()
            if work.run_dir is not None:  # what has finished is not to run again
                self._write_rest(error)
            attach(error, self.results())
            if isinstance(error, KeyboardInterrupt):
                self._note_rest(error)
            raise
        finally:
            # the results hold the work for as long as they live, and need none of what showed it
            work.on_settled = None
        return self.results()

    def _write_rest(self, error: BaseException) -> None:
        """Let the recorder write the results until now; give up if interrupted again."""
        try:
            self._driver.barrier()  # outcomes that have arrived are with the recorder then
            self._work.close()
        except BaseException as again:
            attach(again, self.results())
            raise
        if self._work.trouble is not None:
            add_note(error, f"raypool: {self._work.trouble}")

    def _feed(self, items: Iterator[Any], spec: TaskSpec) -> None:
        """Draw from a generator, at most the look-ahead before the first item without a result."""
        work, driver = self._work, self._driver
        work.take([] if self._fold is None else Tail())
        task_id = driver.submit(work, spec._replace(size=0, is_open=True))
        # one by one: the next item may take long to come, or even wait for the result of this one
        for item in items:
            check_travels((item,), self._backend, work.label, first=len(work.items))
            if work.add(item):
                driver.post(ItemsAdded(task_id, 1, is_open=True))
            self._wait(
                lambda: (
                    work.is_done
                    or len(work.items) - work.num_settled
                    < LOOK_AHEAD * _most_workers(spec, driver.scheduler.workers.size)
                )
            )
            self._fold_in_time()
            if work.is_done:
                return
        self._total = len(work.items)
        driver.post(ItemsAdded(task_id, 0, is_open=False))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        work = self._work
        while not is_over():
            with work.lock:
                work.changed.wait_for(lambda: is_over() or self._new_rows, self._tick_s)
            self._pass_reports_on()
            self._gpus.look()
            self._show_in_time()
            self._fold_in_time()

    def _note_rows(self, rows: list[FeedRow]) -> None:
        self._new_rows += rows
        if self._is_inline:  # this is the loop's own thread, in an item
            try:
                self._pass_reports_on()
            except BaseException as error:  # it must not be raised in the item
                self._report_error = error
                self.cancel()
        else:
            # not here: in a task's own thread, which may be cancelled at any moment, the condition
            # could stay locked
            self._driver.do(self._wake)

    def _wake(self) -> None:
        with self._work.lock:
            self._work.changed.notify_all()

    def _pass_reports_on(self) -> None:
        while self._new_rows and self._report_error is None and self._on_report is not None:
            self._on_report(report_of_row(self._new_rows.popleft()))

    def _show_here(self) -> None:
        # Not in another thread, such as the one that writes the journal or that of another loop in
        # this pool: `_wait` may be showing meanwhile.
        if threading.get_ident() == self._thread:
            self._show_in_time()

    def _show_in_time(self) -> None:
        if time.monotonic() >= self._show_at:
            self._show()

    def _show(self) -> None:
        for watcher in self._watchers:
            watcher.update(self._work, self._total)
        self._show_at = time.monotonic() + TICK_S

    def _fold_in_time(self) -> None:
        # only in the thread that called `parfor`, outside of the driver: `reduce` may use the pool
        if self._fold is not None and time.monotonic() >= self._fold_at:
            num_segments = len(self._work.segments)
            self._show()  # watchers look at what is about to be released
            self._fold.open(num_segments)
            self._fold.fold()
            self._fold_at = time.monotonic() + TICK_S

    def cancel(self) -> None:
        """Let no further items start."""
        driver = self._driver

        def cancel() -> None:
            if (task_id := self._find_task()) is not None:
                driver.post(CancelRequested(task_id))

        # The driver would post it behind results that have come since, and let more items start.
        if self._find_task() is not None:
            cancel()
        else:  # it may be about to begin
            driver.do(cancel)

    def _find_task(self) -> int | None:
        # inline, the loop may still be inside `submit`, which would return the number
        works = self._driver.works.copy().items()
        return next((task_id for task_id, work in works if work is self._work), None)

    # --- for those who watch (the thread that writes the journal calls these) ---------------------

    def live(self) -> dict[str, Any]:
        """Return the state of the loop for watchers; see `journal/live.py`."""
        if time.monotonic() - self._read_at >= FIRST_LOOK_S:
            self._read_at = time.monotonic()
            self._backend.gpu_readings(self._take_readings)
        work = self._work
        running = work.live()
        at_work = {entry["worker"]: entry["item"] for entry in reversed(running)}
        num_items = len(work.items) if self._total is None else self._total
        return {
            "total": self._total,
            "waiting": max(num_items - work.num_settled - len(running), 0),
            "running": running,
            "workers": [
                {
                    "worker": worker.index,
                    "host": worker.host,
                    "gpu": worker.gpu,
                    "state": worker.state,
                    "item": at_work.get(worker.index),
                }
                for worker in self._find_workers()
            ],
            "gpus": list(self._readings.copy().values()),
        }

    def _take_readings(self, node: NodeGpus) -> None:
        for gpu, reading in node.readings.items():
            about = {"host": node.host, "gpu": gpu, "time": time.time()}
            self._readings[node.host, gpu] = about | reading._asdict()

    def act(self, request: Request) -> str | None:
        """Carry out what a watcher asks for.

        Returns:
            `DONE`, a sentence why not, or None: it is to be asked again a little later. The loop
            may not have begun, or be about to end.
        """
        task_id = self._find_task()
        is_late = self._work.stopped_by is not None and request.id not in self._repeated
        if is_late and request.action in ("rerun", "first"):
            return "the sweep is stopping"
        if request.item is not None:
            return self._act_on(request.item, request, task_id)
        if task_id is None:
            return None
        self._work.stopped_by = request.user
        self._stop_all(task_id)
        return DONE

    def _act_on(self, item: int, request: Request, task_id: int | None) -> str | None:
        work, action = self._work, request.action
        if item >= len(work.items):
            return f"there is no item {item}"
        position, state = work.newest_run(item)
        has_run_again = request.id in self._repeated and (state != "waits" or task_id is not None)
        if has_run_again or (action == "cancel" and state == "was cancelled"):
            return DONE
        if task_id is None or state not in NEEDED[action]:
            return None if task_id is None else f"not possible: item {item} {state}"
        if action == "rerun":
            return self._repeat(item, state, task_id, request.id)
        if action == "first":
            self._driver.leave(FirstRequested(task_id, position))
            return DONE
        return self._end_item(item, position, task_id, is_asked=action == "stop")

    def _repeat(self, item: int, state: str, task_id: int, request_id: str) -> str | None:
        if state == "has ended" and item not in self._work.errors:
            return f"item {item} has not failed"
        if self._fold is not None:
            return f"item {item} cannot run again: reduce= no longer accepts its result"
        self._work.run_again(item)
        self._repeated.add(request_id)
        self._driver.leave(ItemsAdded(task_id, 1, is_open=None))
        return None

    def _end_item(self, item: int, position: int, task_id: int, is_asked: bool) -> str | None:
        work = self._work
        for share in work.shares_of(position):
            if len(work.numbers(share.items)) > 1:
                # one that lasts goes on with the running item alone, unless the user chose its size
                stays = work.is_fixed or self._is_inline
                return f"item {item} {IN_COMPANY}" if stays else None
            if is_asked:
                self._stop_item(item, task_id, share)
                return DONE
        if not is_asked:
            self._driver.leave(CancelRequested(task_id, position))
        return None  # it is known to be cancelled a little later

    def _stop_all(self, task_id: int) -> None:
        self._driver.leave(DrainRequested(task_id))

    def _stop_item(self, item: int, task_id: int, share: CallItems) -> None:
        self._work.stopping.add(item)  # first: its attempt may be lost before it hears of it
        if self._is_inline:  # the driver's thread is in the item
            place = self._driver.scheduler.workers.places[share.worker.index]
            call = place.worker_id, share.call.attempt_id, task_id
            self._backend.signal(*call, Signal.STOP)
        else:
            self._driver.leave(StopRequested(task_id, share.items.start))

    def _note_rest(self, error: KeyboardInterrupt) -> None:
        """Note in the exception that it has the finished results, where nobody expects them."""
        work = self._work
        count = work.num_settled - (work.interrupt is not None)  # without the item of the Ctrl-C
        of = f"of {self._total} items" if self._total is not None else "items"
        places = []
        if self._fold is None:
            places.append("in the exception's .results (interactively: sys.last_value.results)")
        if work.run_dir is not None and work.trouble is None:
            places.append(f"in {work.run_dir}: run the same call again to continue from there")
        where = f"; they are {', and '.join(places)}" if places else ""
        add_note(error, f"raypool: {count} {of} of {work.label} had finished{where}.")

    def results(self) -> Results[Any]:
        """Join the results that have arrived so far."""
        work = self._work
        items, values = work.items, [None] * len(work.items)
        # Copies: after a Ctrl-C the driver may still add to them. It adds the error of an item
        # before its segment, so errors are copied last, or a failed item would count as finished.
        errors: dict[int, BaseException] = {}
        segments: list[Segment] = []
        lost: list[Lost] = []
        # made only when somebody looks: for short items the rows cost more than the items do
        if self._fold is not None:
            rows = self._fold.rows(errors)
            errors |= work.errors
        else:
            segments, lost = list(work.segments), list(work.lost)
            errors |= work.errors
            self._fill(values, segments, errors)
            rows = functools.partial(_rows, work, segments, lost, errors)
        return Results(
            items,
            values,
            rows,
            errors,
            work.caught_up,
            functools.partial(_misses, work, segments, lost, errors),
            work.diary,
            run_name(work.label, work.run_dir),
            functools.partial(list, self._gpus.samples)
            if work.run_dir is None
            else functools.partial(samples_in, work.run_dir),
            work.calls,
            work.folder,
        )

    def folded(self, results: Results[Any]) -> Any:
        """Return the folded value, after the loop; an error of `reduce` gets the results."""
        assert self._fold is not None
        try:
            return self._fold.fold()
        except Exception as error:
            attach(error, results)
            raise

    def _fill(
        self, values: list[Any], segments: list[Segment], errors: dict[int, BaseException]
    ) -> None:
        work = self._work
        for index, entry in work.restored.copy().items():  # as above
            values[index] = entry.value
        for piece, result, _ in segments:
            arrived = result.values_of(piece.start, piece.stop)
            indices = work.numbers(piece)
            if isinstance(indices, range):
                values[piece.start : piece.stop] = arrived
            else:
                for index, value in zip(indices, arrived, strict=True):
                    values[index] = value
        for index, value in enumerate(values):
            if type(value) is Missing:
                values[index] = None
                errors.setdefault(index, value.error)


class Fold:
    """Folds the values of a loop, in the order of the items, and releases what it has folded.

    Only the thread that called `parfor` uses it.
    """

    def __init__(self, work: LoopWork, reduce: Callable[[Any, Any], Any], init: Any) -> None:
        self._work = work
        self._segments = work.segments = Tail[Segment]()
        self._reduce = reduce
        self._value = init
        self._is_begun = init is not None
        self._num_segments = 0  # those that were opened
        self._num_items = 0  # the first items, which are folded or have failed
        self._ahead: dict[int, Any] = {}  # the values of items behind one that is still missing
        work.is_folded = lambda index: index < self._num_items or index in self._ahead

    def open(self, num_segments: int) -> None:
        """Take the values of the first segments, and release these."""
        errors = self._work.errors
        while self._num_segments < num_segments:
            piece, result, _ = self._segments[self._num_segments]
            values = result.values_of(piece.start, piece.stop)
            found = dict(zip(self._work.numbers(piece), values, strict=True))
            if Missing in map(type, values):
                lost = {i: each.error for i, each in found.items() if type(each) is Missing}
                errors |= {i: error for i, error in lost.items() if i not in errors}
            if errors:
                found = {i: each for i, each in found.items() if i not in errors}
            self._ahead.update(found)
            self._segments.release(self._num_segments)
            self._num_segments += 1

    def fold(self) -> Any:
        """Fold the values up to the first item without an outcome; return the folded value."""
        items, ahead, restored = self._work.items, self._ahead, self._work.restored
        drawn = items if isinstance(items, Tail) else None  # from a generator
        cancelled = self._work.cancelled_items
        while True:
            index = self._num_items
            if index in ahead:
                value = ahead.pop(index)
            elif index in self._work.errors or index in cancelled:
                self._num_items += 1
                continue
            elif index in restored:
                value = restored[index].value
            else:
                return self._value
            self._num_items += 1
            if drawn is not None:
                drawn.release(index)
            self._value = self._reduce(self._value, value) if self._is_begun else value
            self._is_begun = True

    def rows(self, errors: Container[int]) -> Callable[[], list[Row]]:
        """Return what makes a row for each item, which has only its status."""
        num_items, size = self._num_items, len(self._work.items)
        others = {*self._ahead, *self._work.restored}  # these have finished too
        for segment in self._segments[self._num_segments :]:
            others.update(self._work.numbers(segment.items))
        failed, finished, cancelled = map(Row, ("failed", "finished", "cancelled"))
        alone = self._work.cancelled_items

        def row(index: int) -> Row:
            if index in errors:
                return failed
            is_there = (index < num_items or index in others) and index not in alone
            return finished if is_there else cancelled

        return lambda: [*map(row, range(size))]


def _rows(
    work: LoopWork,
    segments: list[Segment],
    lost: list[Lost],
    errors: Mapping[int, BaseException],
) -> list[Row]:
    """Return a row for each item."""
    rows = [Row() for _ in work.items]
    for index, row in _rows_of(work, segments):
        rows[index] = dataclasses.replace(row, status="failed" if index in errors else row.status)
    for piece, error, span in lost:
        where = {} if span is None else span._asdict()
        for index in work.numbers(piece):
            if errors.get(index) is error:  # else it has run again
                rows[index] = Row("failed", attempts=piece.attempt, run=work.run, **where)
    return rows


def _rows_of(work: LoopWork, segments: list[Segment]) -> Iterator[tuple[int, Row]]:
    """Yield a row for each outcome of an item, in the order of their arrival."""
    for index, entry in work.restored.copy().items():
        yield index, entry.row
    for piece, result, worker in segments:
        # items of a call ran one after the other
        starts = list(itertools.accumulate(result.durations_s, initial=result.started_at))
        for position, index in enumerate(work.numbers(piece), piece.start - result.start):
            yield (
                index,
                Row(
                    "finished",
                    result.durations_s[position],
                    starts[position],
                    worker.index,
                    worker.gpu,
                    piece.attempt,
                    result.peak_memory_bytes,
                    worker.host,
                    work.run,
                ),
            )


def _misses(
    work: LoopWork,
    segments: list[Segment],
    lost: list[Lost],
    errors: Mapping[int, BaseException],
) -> list[Miss]:
    """Return the attempts that gave no outcome, or not the last one of their item."""
    from raypool.views.words import describe_error

    misses = [*work.misses]
    is_search = work.may_run_again is not None
    if not (is_search or work.replaced_errors):
        return misses
    own_words = {id(error): describe_error(error) for _, error, _ in lost}
    words = {
        index: iter([describe_error(error) for error in found if id(error) not in own_words])
        for index, found in work.replaced_errors.items()
    }

    def miss(index: int, row: Row) -> Miss:
        if is_search:  # a part of a trial before the last
            return Miss(index, row)
        # in a loop, only failed items run again
        return Miss(
            index, dataclasses.replace(row, status="failed"), next(words.get(index, iter(())), None)
        )

    newest: dict[int, Row] = {}
    for index, row in _rows_of(work, segments):
        if index in newest:
            misses.append(miss(index, newest[index]))
        newest[index] = row
    for piece, error, span in lost:
        where = {} if span is None else span._asdict()
        for index in work.numbers(piece):
            if errors.get(index) is not error:
                row = Row("lost", attempts=piece.attempt, run=work.run, **where)
                misses.append(Miss(index, row, own_words[id(error)]))
            elif index in newest:
                misses.append(miss(index, newest[index]))
    return misses


def attach(error: BaseException, results: Results[Any]) -> None:
    """Attach the results so far to an exception, if it can carry them."""
    with contextlib.suppress(Exception):  # the user's class may refuse attributes
        error.results = results  # type: ignore[attr-defined]


def is_inline(engine: Engine) -> bool:
    """Whether a loop runs in the thread that waits for it."""
    return engine.profile.backend == "inline"


def watched(
    progress: bool | Callable[..., Any] | None, label: str, engine: Engine
) -> contextlib.AbstractContextManager[Watcher | None]:
    """Show the progress of a loop while the context lasts, if wanted."""
    if progress is False or in_task():  # nobody sees a display in a task
        return contextlib.nullcontext()
    from raypool.views.progress import watched as watched_by_somebody
    from raypool.views.status import LoopStatus

    status = LoopStatus(label, engine.backend.gpu_readings)
    return watched_by_somebody(progress, status, is_inline(engine))


@contextlib.contextmanager
def echoed(echo: bool | None, work: LoopWork, engine: Engine) -> Iterator[Watcher | None]:
    """Show the output of items while the context lasts, if wanted; not in a task, as above."""
    from raypool.views.lines import ItemLines
    from raypool.views.notebook import in_notebook

    if echo is None:
        echo = is_unseen(engine) and in_notebook()
    if in_task() or not echo:
        yield None
        return
    lines = ItemLines(is_direct=is_inline(engine))
    work.feed.on_text = lines.add
    try:
        yield lines
    finally:
        work.catch_up()  # the last lines may still be on their way
        work.feed.on_text = None
        lines.end()


def logged(
    loggers: Sequence[SweepLogger], work: LoopWork
) -> contextlib.AbstractContextManager[Watcher | None]:
    """Feed loggers while the context lasts."""
    if not loggers:
        return contextlib.nullcontext()
    from raypool.loggers import LiveLog

    return contextlib.closing(LiveLog(loggers, work))


def is_unseen(engine: Engine) -> bool:
    """Whether tasks' output is not shown: they run in other processes, and Ray is quiet."""
    # Ray's own thread, where the user has called `ray.init` without log_to_driver=False
    is_shown = any(thread.name == "ray_print_logs" for thread in threading.enumerate())
    return engine.profile.backend == "ray" and not is_shown


def check_on_report(on_report: Any) -> None:
    """Make sure that `on_report` can be called, or is None.

    Raises:
        InvalidTypeError: It cannot.
    """
    if on_report is not None and not callable(on_report):
        raise InvalidTypeError(
            f"on_report={on_report!r} is not callable. Pass a function of one report."
        )


WEBHOOK = re.compile(r"(?ai)https?://([\w.-]+|\[[\da-f:]+\])(:\d+)?([/?#][!-~]*)?")


def check_on_end(on_end: Any) -> None:
    """Make sure that `on_end` is a function, a URL of a webhook, or None.

    Raises:
        InvalidTypeError, InvalidValueError: It is not.
    """
    if on_end is None or callable(on_end):
        return
    if not isinstance(on_end, str):
        raise InvalidTypeError(f"on_end={on_end!r} is neither a function of the results nor a URL.")
    if WEBHOOK.fullmatch(on_end) is None:
        # it is not repeated: it may contain a token
        raise InvalidValueError(
            "The URL to notify must begin with http:// or https:// and contain no user, password or"
            " spaces, as in https://hooks.example.com/services/T1."
        )


class EndNotice:
    """Calls `on_end` when the loop in this context has ended, also with an error.

    Not a generator: `contextlib` would set attributes of the error, which may refuse that.

    Attributes:
        find_results: Returns the results; None as long as nothing has begun.
    """

    def __init__(self, on_end: Callable[[Any], object] | str | None, work: LoopWork) -> None:
        self._on_end, self._work = on_end, work
        self._began_at = time.monotonic()
        self.find_results: Callable[[], Any] | None = None

    def __enter__(self) -> EndNotice:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._on_end is None or self.find_results is None:
            return
        from raypool.views.notice import notify  # imported late: few loops need urllib.request

        duration_s = time.monotonic() - self._began_at
        label, run_dir = self._work.label, self._work.run_dir
        notify(self._on_end, self.find_results(), label, run_dir, duration_s, error)


def check_progress(progress: Any) -> None:
    """Make sure that `progress` has a valid type.

    Raises:
        InvalidTypeError: It has another type.
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidTypeError(
            "progress must be True, False, None, or a function that makes a progress bar, such as"
            f" tqdm, not {progress!r}."
        )


def raise_if_failed(work: LoopWork, results: Results[Any], on_error: str) -> None:
    """Raise the error that ended the loop early, or its first failure if that is wanted."""
    __tracebackhide__ = True
    is_complete = work.state is TaskState.FINISHED
    if is_complete and (on_error == "collect" or not results.errors):
        return
    has_values = not isinstance(work.segments, Tail)
    error = work.first_error if on_error == "stop" else None
    if error is None:  # not `or`: an error may be false
        error = work.broken_by
    if error is None and is_complete:
        error = next(iter(results.errors.values()))
        add_note(
            error,
            f"raypool: {len(results.errors):,} of {len(results):,} items failed"
            f"{'; .results has the others' if has_values else ''}.",
        )
    if error is None:
        how, again = "cancelled", ""
        if work.stopped_by is not None:
            how = f"stopped by a watcher ({work.stopped_by})"
            again = " Call it again to run the others."
        error = concurrent.futures.CancelledError(
            f"The loop {work.label} was {how}"
            f"{'; .results has the finished items' if has_values else ''}.{again}"
        )
    attach(error, results)
    raise error  # the item's own, if one has failed
