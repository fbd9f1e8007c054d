"""The pool: `parpool`, `ParallelPool`, its views and parts, and the current pool (`gcp`)."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from raypool.channel.constants import Constant, call_once, content_of, new_constant
from raypool.channel.feed import MetricsReport, as_html
from raypool.channel.records import WorkerInfo, function_name
from raypool.channel.store import FindWay, ValueStore
from raypool.channel.traffic import TransferBytes
from raypool.channel.users_code import check_not_importing
from raypool.core.messages import CancelRequested
from raypool.engine.engine import (
    Engine,
    open_engine,
    say,
    serial_engine,
    submit_call,
)
from raypool.engine.work import Work
from raypool.equivalents import ARGUMENTS
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    ResourceError,
    checked_count,
    did_you_mean,
    explains_calls,
    no_such_attribute,
    optional_count,
    without_own_frames,
)
from raypool.futures import (
    Future,
    MapResults,
    cancel_each,
    checked_buffersize,
    futures_frame,
    gather,
    unless_interrupted,
)
from raypool.options import Options, Where, check_callable, takes, worker_numbers
from raypool.parallel_for import (
    Array,
    Frame,
    Item,
    Items,
    LoopArguments,
    MaybeAsync,
    check_run_dir,
    check_saved,
    is_inline,
    run_loop,
)
from raypool.profile_files import BUILT_IN, resolve_profile
from raypool.profiles import Profile
from raypool.task import current_task
from raypool.worker.running import in_task

if TYPE_CHECKING:
    import os

    import pandas as pd
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study

    from raypool.loggers import SweepLogger
    from raypool.results import Results
    from raypool.search import Halving, Population, Until
    from raypool.search.run import SearchResults
    from raypool.spmd.composite import Composite
    from raypool.train.runs import RunOptions, TrainingRun
    from raypool.train.training_options import TrainingOptions
    from raypool.watch.watch_page import WatchPage

T = TypeVar("T")
P = ParamSpec("P")
Folded = TypeVar("Folded")

Workers = int | Iterable[int | WorkerInfo] | None
"""How many workers, or which; None for all."""

Verb = TypeVar("Verb", bound=Callable[..., Any])


def _explains(verb: Verb) -> Verb:
    """Explain wrong calls; an unknown argument may be one of another call, such as `options`."""

    def places() -> dict[str, Iterable[str]]:
        from raypool.train.runs import RunOptions
        from raypool.train.training_options import TrainingOptions

        return {
            "options=TrainingOptions": TrainingOptions.__annotations__,
            "run_options=RunOptions": RunOptions.__annotations__,
            "pool.options": Options.__slots__,
            "parpool": ["num_workers", *Profile.__annotations__],
        }

    return explains_calls(verb, places)


# --- verbs of a pool ------------------------------------------------------------------------------


class PoolView(concurrent.futures.Executor):
    """The verbs of a pool, with given options. `ParallelPool` is one; `options` returns others."""

    def __init__(
        self,
        engine: Engine,
        options: Options,
        pool: PoolView | None = None,
        places: tuple[int, ...] | None = None,
    ) -> None:
        self._engine = engine
        self._options = options
        self._pool = pool  # a reference, so that the pool is not collected, which would end it
        if places is None and pool is not None:  # a view of a part has the part's workers
            places = pool._places
        self._places: tuple[int, ...] | None = places  # of its workers; None: of all
        self._is_serial = False

    if not TYPE_CHECKING:
        __getattr__ = no_such_attribute

    def options(self, **changes: Any) -> PoolView:
        """Return a view of this pool whose verbs use other options.

        Args:
            **changes: `retries`: how often an item runs again after its worker was lost; 0: it
                never runs twice. `retry_on`: exception types after which an item runs again too,
                perhaps on the same worker. `retry_delay_s`: the wait before the second run [s],
                doubled before each further one, up to 300 s. `timeout_s`: an item that runs longer
                [s] is stopped as by `Future.cancel`, fails with `TaskTimeoutError` and does not run
                again. With `workers_per_gpu="auto"` an item that found too little GPU memory beside
                others runs again whatever `retries` says, and its wait for the GPU is part of its
                time.
                `mismatch_timeout_s`: ranks (`spmd`, `train` and `fit` in the warm lane) that have
                waited for each other this long [s] in places where they cannot meet fail with a
                `CollectiveError`; None: never. Computing may take any time. `fresh_process`: each
                item runs in a new process that ends after it (this costs a worker's start, and has
                no effect in pools of this process). `priority`: higher goes first; equal ones in
                the order of submission. `worker`: run only on the worker with this number; if it is
                lost, so is the task. `name`: its name in messages and displays. `checkpoints`: a
                folder that all machines of the pool see, or a URL ("gs://..."), that keeps
                `current_task().checkpoint_dir` of each item, also for equal calls later (same
                function, equal arguments); equal calls at the same time share it.

        Raises:
            InvalidTypeError: There is no such option.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     pool.options(name="sum").parfeval(sum, [1, 2]).name
            'sum'
        """
        known = Options.__slots__
        for name in changes:
            if name not in known:
                raise InvalidTypeError(
                    f"options() has no argument {name!r}.{did_you_mean(name, known)}"
                )
        return PoolView(self._engine, replace(self._options, **changes), pool=self)

    def __reduce__(self) -> Any:
        # a function that refers to its pool can travel: on the worker it finds a serial one
        return _serial_view, (PoolView,)

    def _target(self) -> PoolView:
        """Return the view that takes work submitted here: this one, but in a task a serial one."""
        __tracebackhide__ = True
        if in_task():
            return self._serial()
        self._check_open()
        if self._places is not None and not self._numbers():
            raise ResourceError(
                "This part of the pool has no workers: requested 1, available 0. partition() found"
                " none for it, or they were lost or removed since. Use the whole pool, or the other"
                " part.",
                requested=1,
                available=0,
            )
        return self

    def _serial(self, find_way: FindWay | None = None) -> PoolView:
        """Return a view with these options that runs everything at once, in the calling thread."""
        view = PoolView(serial_engine(find_way), self._options)
        view._is_serial = True
        return view

    def _check_open(self) -> None:
        """Raise an error if the pool takes no more work."""
        __tracebackhide__ = True
        if self._pool is not None:
            self._pool._check_open()
        else:
            self._engine.check_open()

    def _numbers(self) -> list[int]:
        """Return the numbers of this view's workers, in order, without those that are to end."""
        workers = self._engine.driver.scheduler.workers
        there = [
            place.place
            for place in list(workers.places.values())  # a copy: the driver's thread adds places
            if place.worker_id not in workers.retiring
        ]
        return sorted(there if self._places is None else set(there).intersection(self._places))

    def _capacity(self) -> int:
        """Return how many calls of this view can run at once, at least one."""
        return 1 if self._options.worker is not None else max(len(self._numbers()), 1)

    def _workers(self) -> list[WorkerInfo]:
        """Return this view's workers, in order."""
        places = self._places
        return [
            worker for worker in self._engine.workers() if places is None or worker.index in places
        ]

    def _where(self) -> Where:
        """Return on which workers work may run."""
        if self._is_serial:
            return Where()  # where it is: without a process of its own, and whatever `worker` says
        number = self._options.worker
        is_fresh = self._options.fresh_process and self._engine.profile.backend == "ray"
        if number is None:
            return Where(None, self._places, is_fresh)
        numbers = self._numbers()
        if number not in numbers:
            raise InvalidValueError(
                f"There is no worker {number}, only {', '.join(map(str, numbers))}."
            )
        # `place` is the worker that is there now; a fresh process is another one
        return Where(None, (number,), is_fresh) if is_fresh else Where(number)

    def device_table(self) -> pd.DataFrame:
        """Return a table of the GPUs of the workers' machines, as they are now.

        No CUDA context is made: the nodes' agents ask the GPUs' driver. Unknown values are NA, and
        so are memory, utilization, temperature and processes on a node that does not answer within
        3 s. With "threads" and "inline", and in a task, it is the table of this machine.

        Returns:
            A table with the column `host`, those of `gpu_device_table` except the last (`index`,
            `name`, `uuid`, `total_bytes`, `used_bytes`, `free_bytes`, `utilization`,
            `temperature_c`, `processes`, ...), `workers` (the numbers of this pool's or part's
            workers on the GPU) and `running` (the task of each of these, None for an idle one).
            Without a GPU it is empty.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     list(pool.device_table().columns)[:3]
            ['host', 'index', 'name']
        """
        from raypool.engine.overview import device_table, running

        if in_task():
            return device_table(serial_engine().backend.devices(), {}, [0])
        self._check_open()
        return device_table(
            self._engine.backend.devices(), running(self._engine.driver), self._numbers()
        )

    # --- loops ------------------------------------------------------------------------------------

    # For type checkers. A coroutine function counts as what it returns in the end. mypy cannot
    # infer that from `MaybeAsync`; it takes the overload with `Coroutine`.
    @overload
    def parfor(
        self,
        fn: Callable[[int], MaybeAsync[T]],
        items: int,
        *,
        reduce: None = None,
        **how: Unpack[LoopArguments],
    ) -> Results[T]: ...
    @overload
    def parfor(
        self,
        fn: Callable[[dict[str, Any]], MaybeAsync[T]],
        items: Frame,
        *,
        reduce: None = None,
        **how: Unpack[LoopArguments],
    ) -> Results[T]: ...
    @overload
    def parfor(
        self,
        fn: Callable[[Any], MaybeAsync[T]],
        items: Array,
        *,
        reduce: None = None,
        **how: Unpack[LoopArguments],
    ) -> Results[T]: ...
    @overload
    def parfor(
        self,
        fn: Callable[[Item], MaybeAsync[T]],
        items: Iterable[Item],
        *,
        reduce: None = None,
        **how: Unpack[LoopArguments],
    ) -> Results[T]: ...
    @overload
    def parfor(
        self,
        fn: Callable[[Item], Coroutine[Any, Any, T]],
        items: Items[Item],
        *,
        reduce: None = None,
        **how: Unpack[LoopArguments],
    ) -> Results[T]: ...
    @overload
    def parfor(
        self,
        fn: Callable[[Item], T],
        items: Items[Item],
        *,
        reduce: Callable[[T, T], T],
        **how: Unpack[LoopArguments],
    ) -> T: ...
    @overload
    def parfor(
        self,
        fn: Callable[[Item], T],
        items: Items[Item],
        *,
        reduce: Callable[[Folded, T], Folded],
        init: Folded,
        **how: Unpack[LoopArguments],
    ) -> Folded: ...
    @_explains
    def parfor(  # noqa: PLR0913 - each argument is asked for by users, all are named
        self,
        fn: Callable[[Any], Any],
        items: Items[Any],
        *,
        on_error: Literal["stop", "raise", "collect"] | None = None,
        reduce: Callable[[Any, Any], Any] | None = None,
        init: Any = None,
        cost: Sequence[float] | Callable[[Any], float] | None = None,
        max_workers: int | None = None,
        chunk_size: int | None = None,
        seed: int | None = None,
        progress: bool | Callable[..., Any] | None = None,
        echo: bool | None = None,
        name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        rerun: Literal["failed", "missing", "all"] = "failed",
        on_report: Callable[[MetricsReport], object] | None = None,
        on_end: Callable[[Results[Any]], object] | str | None = None,
        loggers: Sequence[SweepLogger] = (),
        watch: bool = False,
    ) -> Any:
        """Call `fn(item)` for every item, on all workers at once; return the results in item order.

        Each worker takes the next item when it is free. Items that take milliseconds share calls,
        and those below 0.25 s may queue up behind the item that their worker runs; so items must
        not wait for one another (use `spmd` for that). An item runs at least once, and again if its
        worker is lost (up to `retries` times); its result counts exactly once. Inside a task the
        loop runs serially, in the task.

        Args:
            fn: Any function of one argument, also with `async def`. It is shipped to each worker
                once, with the variables that it captures, which all items there share: copy a
                captured model or array before changing it (`copy.deepcopy(model)`).
            items: A list or other iterable, also an endless generator (at most a few items per
                worker are drawn ahead), a DataFrame of pandas or polars (each row a dict), or a
                number `n` for `range(n)`. pandas itself turns an int column with None into floats
                with NaN; with dtype "Int64" the ints stay, and None is `pd.NA`.
            on_error: "stop": the first failure ends the loop and is raised. "raise": all items run,
                then the first failure is raised. "collect": all items run; failures are in the
                table. None: "raise" with `run_dir`, else "stop".
            reduce: Fold the values with this function of two arguments, in item order, as they
                arrive; the result is the same on any number of workers, to the last bit. Folded
                values are released: `Results` then has the number of items, their status and their
                errors, but no values and times.
            init: The first operand of `reduce`; None begins with the first value.
            cost: How long each item will take, roughly and in any unit: a number for each, or a
                function of the item. The most expensive items go first, so that no long one
                starts when the others are nearly done. It needs a list of items.
            max_workers: Use at most this many workers; 0 runs serially in this process.
            chunk_size: Send this many items in a call, however long they take. None: by measured
                time.
            seed: Give every item its own random numbers, which depend only on the seed and the
                item's number: those of Python's, NumPy's and torch's global generators, of all
                generators in global variables, the closure, default arguments or a partial of `fn`,
                and `current_task().seed`. In this process (profiles "inline" and "threads")
                generators are restored afterwards.
            progress: Show the progress of the loop. None: a live display below the cell of a
                notebook, or on a terminal; elsewhere lines on standard error, the first after ten
                seconds. True: the same, but lines from the beginning. False: nothing. Or a function
                like `tqdm`, called as `progress(total=..., desc=...)`; the bar has `update(n)` and
                optionally `set_postfix(failed=...)` and `close()`.
            echo: Show the output of items on standard output as it arrives, each line after the
                number of its item. None: in a notebook, unless the items run in this process.
                `Results.diary` has all output in any case.
            name: The loop's name in messages and displays.
            run_dir: Save the result of each item in this folder, before it is reported. The same
                call later, with the same items in any order, more of them or fewer, resumes from
                there. Items are identified by their content, `fn` by its name; a warning says if
                its code, or a plain global value that it reads, has changed. The folder also has
                the reports, output and `current_task().checkpoint_dir` of each item; if items use
                the last, all machines of the pool must see this folder, or
                `pool.options(checkpoints=...)` names a URL for it. Of each call it has the git
                commit, uncommitted changes, command line and packages.
            rerun: Which items run if `run_dir` has results: "failed": failed and missing items;
                "missing": only items without an outcome; "all": all items. Checkpoints stay in any
                case.
            on_report: Called with each `raypool.report` of the items as it arrives, as a
                `MetricsReport`, in the thread that called `parfor` and in order for each item. The
                workers do not wait for it. What it raises ends the loop, and is raised here.
            on_end: Called with the `Results` when the loop has ended, also if `parfor` raises; then
                they hold the items that ended before. Or the URL of a webhook, such as Slack's: it
                gets a JSON object by POST, with `text` (a sentence), `label`, `state` ("finished",
                "failed", or "cancelled" by Ctrl-C), the numbers `items`, `finished` and `failed`,
                `duration_s` [s], `run_dir`, and the first `error` in a line, and has 10 s to
                answer. If this fails, a warning is logged, and the loop ends as it would have.
            loggers: Loggers of `raypool.loggers`, which get the items, reports and outcomes while
                the loop runs, in the thread that called `parfor`. A logger that raises is dropped
                with a warning; the loop continues.
            watch: Show the loop on a live page, as `pool.watch()` does, and print its address on
                standard error. Needs `run_dir`.

        Returns:
            `Results`: the values in order, and a table of them; with `reduce` the folded value.

        Raises:
            Exception: The exception that `fn` raised, with a note of the item, worker and attempt,
                the remote traceback as its cause, and the finished results as `.results`.
            WorkerLostError: An item lost its worker more than `retries` times.
            SerializationError: `fn` or an item cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.
            PoolPreemptedError: All nodes of the pool are about to be taken back, and no others can
                come.
            JournalError: `run_dir` is in use by another process, belongs to another function or
                seed, or cannot be written; if that fails only at the end, `.results` has all
                values.

        Source:
            MATLAB R2025b, parfor; concurrent.futures.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     list(pool.parfor(lambda x: x * x, range(4)))
            ...     pool.parfor(lambda x: x * x, range(4), reduce=max)
            [0, 1, 4, 9]
            9
            >>> import tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> with folder, parpool(2, profile="threads", quiet=True) as pool:
            ...     _ = pool.parfor(abs, [-1, -2], run_dir=folder.name)
            ...     list(pool.parfor(abs, [-3, -2, -1], run_dir=folder.name))  # only -3 runs
            [3, 2, 1]
        """
        __tracebackhide__ = True  # notebooks and pytest: only the user's own line
        return run_loop(
            self,
            fn,
            items,
            on_error=on_error,
            reduce=reduce,
            init=init,
            cost=cost,
            max_workers=max_workers,
            chunk_size=chunk_size,
            seed=seed,
            progress=progress,
            echo=echo,
            name=name,
            run_dir=run_dir,
            rerun=rerun,
            on_report=on_report,
            on_end=on_end,
            loggers=loggers,
            watch=watch,
        )

    @_explains
    def watch(self, run_dir: str | os.PathLike[str] | None = None) -> WatchPage:
        """Serve a live page of a run: its table, curves, workers, GPUs, output and errors.

        The page can also stop, cancel and rerun items while the run goes on, or let them run next.
        A separate process reads the run's folder and serves it on the loopback only. It ends with
        the pool or this process. `raypool watch` shows runs of other processes, too.

        Args:
            run_dir: The folder of the run, which may begin later. None: that of the newest loop or
                search of this pool with a `run_dir`, also while it runs in another thread.

        Returns:
            The page. It has `.url` and `.close()`; a notebook shows it in a frame. A second call
            for the same folder returns the same page.

        Raises:
            InvalidValueError: No loop of this pool has a `run_dir`.
            JournalError: The folder belongs to another user.
            ModuleNotFoundError: A package is missing; it comes with `raypool[watch]`.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     page = pool.watch("runs/lr")
            ...     page.url.startswith("http://127.0.0.1:")
            True
        """
        from raypool.watch.watch_page import WatchPage

        if not in_task():
            self._check_open()
        engine = self._engine  # in a task, too: that of `_target` has nobody who closes its pages
        run_dir = engine.run_dir if run_dir is None else run_dir
        if run_dir is None:
            raise InvalidValueError(
                "pool.watch() needs run_dir: no loop or search of this pool has one so far."
            )
        check_run_dir(run_dir)
        folder = Path(run_dir).expanduser().absolute()
        page = engine.pages.get(folder)
        if page is None or page.is_closed:
            page = engine.pages[folder] = WatchPage(folder)
        return page

    @_explains
    def search(  # noqa: PLR0913 - each argument is asked for by users, all are named
        self,
        fn: Callable[[dict[str, Any]], Any],
        space: Mapping[str, Any],
        *,
        metric: str | None = None,
        mode: Literal["max", "min"] | None = None,
        num_trials: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        stop: Halving | Population | BasePruner | Callable[[dict[str, Any]], bool] | None = None,
        stop_when: Until | None = None,
        cancel_grace_s: float | None = None,
        sampler: BaseSampler | None = None,
        study: Study | None = None,
        seed: int | None = None,
        max_in_flight: int | None = None,
        max_failures: int | None = None,
        progress: bool | Callable[..., Any] | None = None,
        name: str | None = None,
        on_report: Callable[[MetricsReport], object] | None = None,
        on_end: Callable[[SearchResults], object] | str | None = None,
        loggers: Sequence[SweepLogger] = (),
        watch: bool = False,
        workers_per_trial: int | None = None,
    ) -> SearchResults:
        """Call `fn(config)` for the configurations that Optuna suggests; return the trials.

        Each worker trains one trial at a time. As soon as one ends, or waits at a rung, its worker
        gets the next. The score of a trial is `metric` in the dict that `fn` returns, else what it
        reported last as `metric`, else the number that it returned.

        Args:
            fn: A function of one configuration, a dict, as for `parfor`.
            space: By name, a range or a choice (`raypool.search`, or an Optuna distribution),
                or a plain value for all trials.
            metric: The name of the score. None: `fn` returns it.
            mode: "max" if more is better, else "min". None: the direction of `study`; without one,
                as the name of the metric says ("val_loss": "min", "accuracy": "max"); "max" if
                `fn` returns the score.
            num_trials: The number of trials, including those of earlier calls in `run_dir`. Leave
                it out with a population, which has a size.
            run_dir: Save each trial in this folder, also Optuna's study ("study.log"). The same
                call later resumes: interrupted trials continue from their checkpoints, and
                `load_results`, `raypool show` and `report()` read it as they read a sweep.
            stop: When trials end early: `search.halving(...)`, `search.population(...)`,
                `search.median()`, an Optuna pruner, or a function of the reported metrics that
                returns True to stop. A stopped trial finds `current_task().should_stop`, and ends
                at its next report at the latest.
            stop_when: When the search ends before all trials: `search.until(...)`. The same call
                without it runs the remaining trials.
            cancel_grace_s: Cancel a stopped trial that still runs after this time [s]; it is pruned
                with its last score. None: wait for its end. Not in inline pools.
            sampler: An Optuna sampler. None: TPE; with halving or a population, random samples.
            study: An Optuna study to continue. It brings its own sampler and storage.
            seed: Seed the sampler, and every trial as `parfor` does. Which configurations are tried
                is repeatable with one worker, or with a sampler that does not look at results.
            max_in_flight: Run at most this many trials at once. None: one for each worker.
            max_failures: Raise the first error once more trials than this have failed. None: failed
                trials are recorded, and the search continues.
            progress: As for `parfor`.
            name: As for `parfor`.
            on_report: As for `parfor`.
            on_end: As for `parfor`; a function gets the `SearchResults`.
            loggers: As for `parfor`; for them a trial ends when it is complete, pruned or failed.
            watch: As for `parfor`.
            workers_per_trial: Train each trial on this many workers at once, as `train` does in the
                warm lane: `fn` is a loop for Ray Train, the reports of rank 0 are those of the
                trial, and so is its return value. A trial starts when this many workers are free.

        Raises:
            ModuleNotFoundError: Optuna is missing; it comes with `raypool[search]`.
            InvalidValueError: The first trial has no score; `mode` is missing, and the name of the
                metric does not say it; the study has another direction; `stop=halving(...)` or
                `stop=population(...)` lacks `run_dir`.
            Exception: The exception of the first trial, if all trials failed.
            ResourceError: There are fewer workers than `workers_per_trial`.
            JournalError: As for `parfor`.

        Source:
            Optuna 5, ask and tell; Li et al. 2020, asynchronous successive halving.

        Example:
            >>> from raypool import parpool, search
            >>> def train(config):
            ...     return {"loss": (config["x"] - 1) ** 2}
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     space = {"x": search.uniform(-5, 5)}
            ...     found = pool.search(train, space, metric="loss", mode="min", num_trials=30)
            >>> found.best.score < 1
            True
        """
        # imported late: most programs do not search
        from raypool.search.run import SearchOptions, run_search

        __tracebackhide__ = True
        wanted = SearchOptions(
            metric,
            mode,
            num_trials,
            run_dir,
            stop,
            stop_when,
            cancel_grace_s,
            sampler,
            study,
            seed,
            max_in_flight,
            max_failures,
            progress,
            name,
            on_report,
            on_end,
            loggers,
        )
        check_saved(run_dir, "failed", watch)
        if watch:
            self.watch(run_dir).show()
        if workers_per_trial is None:
            return run_search(self, fn, space, wanted)
        from raypool.search.gangs import search_in_gangs

        return search_in_gangs(self, fn, space, wanted, workers_per_trial)

    # --- single calls -----------------------------------------------------------------------------

    @overload
    def parfeval(
        self, fn: Callable[P, MaybeAsync[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def parfeval(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def parfeval(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn(*args, **kwargs)` on the next free worker; return a future at once.

        Arguments are sent as they are now: later changes have no effect. Inside a task the call
        runs at once. A coroutine that `fn` returns (`async def`) runs on the worker, in its own
        event loop.

        Raises:
            InvalidTypeError: `fn` cannot be called, or is a generator function.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            MATLAB R2025b, parfeval; concurrent.futures.Executor.submit.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.parfeval(pow, 2, 10).result()
            1024
        """
        check_callable(fn, args)
        target = self._target()
        return submit_call(target._engine, fn, args, kwargs, target._options, target._where())

    @overload
    def submit(
        self, fn: Callable[P, MaybeAsync[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `parfeval` by its name in `concurrent.futures`."""
        return self.parfeval(fn, *args, **kwargs)

    @_explains
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> MapResults[T]:
        """Call `fn` with the first of each iterable, then the second of each; return values lazily.

        The values come in the order of the calls. A call that fails raises its error where its
        value would be; the next value follows. When the iterator is dropped after its first value,
        at `close()`, or when the time is up, the other calls are cancelled, running ones included.

        Args:
            fn: Any function; it is shipped to each worker once.
            *iterables: The arguments. The shortest iterable sets the number of calls.
            timeout: How long to wait for values, from now on [s]; then `TimeoutError` is raised.
                None: as long as it takes.
            chunksize: Has no effect: short calls travel together by measured time.
            buffersize: The most calls that are submitted ahead of the values taken, so the
                iterables may be endless. None: all are submitted now.

        Returns:
            An iterator over the values, with a method `close`.

        Raises:
            InvalidValueError, InvalidTypeError: `chunksize` or `buffersize` is not a number above
                0.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            concurrent.futures.Executor.map of Python 3.14; like the built-in `map` it continues
            after an error.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     list(pool.map(pow, [2, 3, 4], [5, 2, 3]))
            [32, 9, 64]
        """
        buffersize = checked_buffersize(chunksize, buffersize)
        check_callable(fn, iterables)
        target = self._target()
        engine, where = target._engine, target._where()
        function = engine.function(fn)  # once for all calls
        engine.warn_of_generators(fn)

        def submit(args: tuple[Any, ...]) -> Future[T]:
            if not target._is_serial:
                target._check_open()  # calls are handed in one by one; it may be closed by now
            # the key of the checkpoints is made of the function itself
            if self._options.checkpoints is not None:
                return submit_call(engine, fn, args, {}, self._options, where)
            return submit_call(engine, function, args, {}, self._options, where)

        # inline, calls run while they are handed in: Ctrl-C in one of them ends that
        hand_in = unless_interrupted(submit) if is_inline(engine) else submit
        return MapResults(hand_in, zip(*iterables, strict=False), timeout, buffersize)

    @property
    def _max_workers(self) -> int:
        """How many workers there are; dask and others read this attribute of an executor."""
        return len(self._numbers())

    def parfeval_on_all(
        self, fn: Callable[..., T], /, *args: Any, sticky: bool = False, **kwargs: Any
    ) -> Future[list[T]]:
        """Call `fn(*args, **kwargs)` once on every worker; return a future of all values.

        Args:
            fn: Any function. Its values are in the order of the workers.
            *args: Its arguments.
            sticky: Also call it on every later worker before anything else runs there: one that
                replaces another, is started again after `idle_timeout_s`, or makes the pool larger.
            **kwargs: Its arguments by name.

        Source:
            MATLAB R2025b, parfevalOnAll.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.parfeval_on_all(pow, 2, 3).result()
            [8, 8]
        """
        check_callable(fn, args)
        target = self._target()
        name = self._options.name or function_name(fn)
        forget = None
        if sticky:
            fn = functools.partial(call_once, uuid.uuid4().hex, fn)
            # first: a worker that starts now gets both, and makes one
            forget = self._begin_with(functools.partial(fn, *args, **kwargs))
        # bound to the place, not to the worker that is there now: its replacement will do as well
        options = replace(self._options, worker=None, name=name, checkpoints=None)
        futures: list[Future[T]] = []
        try:
            futures.extend(
                PoolView(target._engine, options, self, (number,)).parfeval(fn, *args, **kwargs)
                for number in target._numbers()
            )
            called = gather(futures, name)
        except BaseException:  # Ctrl-C: nobody could cancel those that were handed in
            cancel_each(futures)
            if forget is not None:
                forget()
            raise
        if forget is not None:  # no later worker makes a call that has failed
            called.add_done_callback(
                lambda _: forget() if called.cancelled() or called.error is not None else None
            )
        return called

    def _begin_with(self, fn: Callable[[], object]) -> Callable[[], None]:
        """Let every later worker call a function first; return a function that undoes this."""
        engine = self._target()._engine
        setup = engine.function(
            fn if self._places is None else functools.partial(_call_in, self._places, fn)
        )
        engine.driver.setups.append(setup)
        return functools.partial(engine.driver.setups.remove, setup)

    # --- spmd -------------------------------------------------------------------------------------

    @_explains
    def spmd(
        self,
        fn: Callable[..., T],  # not Concatenate: mypy would refuse every lambda
        /,
        *args: Any,
        workers: int | Iterable[int | WorkerInfo] | None = None,
    ) -> Composite[T]:
        """Call `fn(context, *args)` on all workers at the same time, each of which is a rank.

        The ranks are in one process group. They communicate through `context` (an `SpmdContext`):
        `context.all_reduce(x)` and the like, or `torch.distributed`, so DDP, FSDP and tensor
        parallel work. The group stays open for the next call. All ranks begin together, when all
        their workers are free, and later work waits for them; none ever runs twice. Inside a task
        there is one rank, the task itself.

        Args:
            fn: Any function whose first argument is the context.
            *args: Its other arguments, the same for each rank; each rank gets its own part of a
                `Composite`, which is not moved.
            workers: The ranks: how many, or which, by number or as in `pool.workers`, rank 0 first.
                0: a single rank, in this process. None: the workers of the first `Composite` among
                `args`; without one, all.

        Returns:
            A `Composite` of the ranks' values, each still on its worker. `composite[rank]` fetches
            one.

        Raises:
            SpmdError: A rank failed or was lost, ranks waited for each other in different places
                (`options(mismatch_timeout_s=...)`), or the time was up (`options(timeout_s=...)`).
                The other ranks were ended; their workers continue.
            ResourceError: There are fewer workers than requested.
            InvalidValueError: A `Composite` is on other workers than the call.
            CompositeError: An argument is a `Composite` with a missing part.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            MATLAB R2025b, spmd; PyTorch 2.13, torch.distributed.

        Example:
            >>> from raypool import parpool
            >>> with parpool(3, profile="threads", quiet=True) as pool:
            ...     list(pool.spmd(lambda context, x: context.all_reduce(x + context.rank), 10))
            [33, 33, 33]
        """
        future = self.spmd_async(fn, *args, workers=workers)
        # the driver's thread calls callbacks: if it waits, nothing ends any more
        if self._engine.driver.is_own_thread and not future.done():
            future.cancel()
            raise InvalidValueError(
                "spmd() cannot be called in the callback of a future: the pool would wait for "
                "itself. Use spmd_async."
            )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C, say; one that has ended stays as it is
            raise

    @_explains
    def spmd_async(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        workers: int | Iterable[int | WorkerInfo] | None = None,
    ) -> Future[Composite[T]]:
        """Call `spmd` without waiting; return a future of the `Composite`.

        Its `metrics` have a column `rank`; cancelling it ends all ranks.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     job = pool.spmd_async(lambda context: context.world_size)
            ...     job.result()[1]
            2
        """
        # imported late: it would add a fifth to the time of `import raypool`
        from raypool.spmd.call import submit_gang
        from raypool.spmd.composite import check_located, workers_of
        from raypool.spmd.context import RankFunction

        check_callable(fn, args)
        if not takes(fn, (None, *args)):
            signature = inspect.signature(fn, follow_wrapped=False)
            raise InvalidTypeError(
                f"spmd calls {function_name(fn)} with the context and {len(args)} other arguments,"
                f" but its parameters are {signature}. The first is for the context."
            )
        if self._options.fresh_process:
            raise InvalidValueError(
                "fresh_process=True cannot be used with spmd, whose workers stay in one group "
                "from call to call."
            )
        target, size, places = self._ranks(workers_of(args) if workers is None else workers)
        engine = target._engine
        engine.warn_of_generators(fn)
        check_located(args, engine, size, places)
        function = engine.function(RankFunction(fn), fn)
        return submit_gang(engine, function, args, target._options, size, places)

    def _ranks(self, workers: Any) -> tuple[PoolView, int, tuple[int, ...] | None]:
        """Return where ranks run, how many, and in which places (None: any), rank 0 first."""
        from raypool.spmd.call import choose_ranks

        target = self._target()
        if target._is_serial:
            return target, 1, (0,)
        if workers is None and self._options.worker is not None:
            workers = [self._options.worker]
        size, places = choose_ranks(workers, self._numbers(), self._places)
        if size == 0:  # in this process, with the pool's store
            return self._serial(self._engine.find_way), 1, (0,)
        return target, size, places

    # --- training ---------------------------------------------------------------------------------

    def train(  # noqa: PLR0913 - likewise
        self,
        loop: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: Workers = None,
        lane: Literal["warm", "managed"] = "warm",
        run_options: RunOptions | None = None,
        trainer: type | None = None,
        datasets: Mapping[str, Any] | None = None,
        **trainer_args: Any,
    ) -> TrainingRun:
        """Train one model on all workers at once with a loop for Ray Train; return a future.

        In the loop Ray Train's functions work: `ray.train.report`, `get_checkpoint`,
        `get_all_reported_checkpoints`, `get_context()` with its ranks, name and `get_storage()`
        (the folder of the run), `get_preemption_info`, `ray.train.collective`,
        `ray.train.torch.prepare_model` and `prepare_data_loader`. `get_dataset_shard` and
        `report(validation=...)` need the managed lane. The metrics that rank 0 reports are kept. A
        lost worker is replaced on the same GPU, and all ranks begin again from the last checkpoint,
        up to `retries` times.

        With "threads" and "inline", and inside a task, there is one rank.

        Args:
            loop: A function of one argument, or of none, also with `async def`, that every rank
                calls: `train_loop_per_worker` of a `TorchTrainer`.
            config: The argument of the loop, whether or not it has a default.
            workers: Those that train: how many, or which, by number or as in `pool.workers`, rank 0
                first. 0: a single rank, in this process. None: all.
            lane: "warm": the pool's workers run the loop, by Ray Train's local mode, at once.
                "managed": Ray Train runs it, in its own processes; it takes some seconds to start,
                supports Ray Data (`datasets`), other frameworks (`trainer`) and everything else
                that Ray's trainers offer, and numbers its ranks itself. Meanwhile the workers'
                processes end, with the constants and Composites in them; other work for them waits.
                Afterwards the pool claims the same GPUs again. A worker whose GPU somebody else has
                taken by then, and keeps for `start_timeout_s`, is lost; a warning says who has it.
            run_options: Where checkpoints are kept, how many, and from which one to begin. In the
                managed lane `min_workers` is also the minimum of Ray's elastic number of ranks.
            trainer: A Ray trainer to use instead of `TorchTrainer`, such as `TensorflowTrainer`;
                needs the managed lane.
            datasets: Ray Data datasets by name, for `ray.train.get_dataset_shard`; needs the
                managed lane, and a free core.
            **trainer_args: In the managed lane, the trainer's other arguments: `torch_config`,
                `dataset_config`, `validation_config`, `run_config` (with `callbacks`,
                `storage_filesystem`, `checkpoint_config`, ...) and `scaling_config`, except for the
                number of ranks and their resources, which the pool sets.

        Returns:
            A `TrainingRun`. Its result is a `TrainingResult`; or it fails with a `TrainingError`
            that names the rank, or with a `TaskTimeoutError` (`pool.options(timeout_s=...)`); both
            have `.result` with everything reached so far.

        Raises:
            ResourceError: There are fewer workers than requested, or no core for Ray Data.
            InvalidValueError, InvalidTypeError: An argument is invalid.
            JournalError: The `run_dir` cannot be written.
            SerializationError: The loop or its configuration cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            Ray 2.60, TorchTrainer, with its local mode as the warm lane.

        Example:
            >>> from raypool import parpool
            >>> def loop(config):
            ...     import ray.train
            ...     for epoch in range(config["epochs"]):
            ...         ray.train.report({"loss": 1 / (epoch + 1)})
            ...     return ray.train.get_context().get_world_size()
            >>> with parpool(1, profile="threads", quiet=True) as pool:
            ...     result = pool.train(loop, {"epochs": 4}).result()
            >>> result.values, result.metrics["loss"], len(result.metrics_frame)
            ([1], 0.25, 4)
        """
        from raypool.train.verbs import train

        return train(
            self, loop, config, workers, lane, run_options, trainer, datasets, trainer_args
        )

    @_explains
    def fit(  # noqa: PLR0913 - likewise
        self,
        model: Any,
        data: Any,
        loss: Callable[..., Any],
        options: TrainingOptions | None = None,
        *,
        workers: Workers = None,
        lane: Literal["warm", "managed"] = "warm",
        run_options: RunOptions | None = None,
        progress: bool | Callable[..., Any] | None = None,
    ) -> TrainingRun:
        """Train a model on all workers at once, without writing a loop; return a future.

        Each mini-batch is split across the ranks, and their gradients are weighted by their shares:
        the result is that of one process with the whole mini-batch.

        Args:
            model: A `torch.nn.Module`, or a function without arguments that makes one. Yours is not
                changed.
            data: (inputs, targets), two arrays or tensors of equal length, each of which may be a
                tuple or dict of several; a DataFrame whose last column is the target; a list of
                samples or a map-style `Dataset`; or a `DataLoader` of one, whose `collate_fn` and
                sampler are used, and, unless `options` set others, its batch size and shuffling. A
                sample is a pair (input, target), or a dict as in Hugging Face's data sets, whose
                target is called "labels" or "label". (data, "name") names another target of a
                DataFrame or of dicts, (data, ["name", "name"]) several: columns of one array, or a
                dict. The model gets inputs in a tuple as positional arguments, inputs in a dict as
                arguments by name (if it has none of these names, the dict, or the only input of
                samples that are dicts); a list that your `collate_fn` returns is one argument.
                Floating-point arrays, tables and Python numbers, and 64-bit floats of a `Dataset`,
                become the type of the model's parameters, and integer targets in arrays int64;
                everything else stays as it is.
            loss: A function of outputs and targets, such as `torch.nn.functional.cross_entropy`. It
                returns the mean over its samples; one that weighs them (class weights,
                `ignore_index`) is exact on one worker only, and a warning says so. A sum over them
                is an error on several workers, if outputs and targets are tensors.
            options: How to train; see `TrainingOptions`.
            workers: Those that train, as for `train`. None: all.
            lane: As for `train`.
            run_options: Where checkpoints are kept; see `RunOptions`.
            progress: Whether `result` shows epochs, losses and samples per second while it waits;
                None, True, False or a function like `tqdm`, as for `parfor`. Unless it is False,
                `fit` also says which workers do not train, which samples each epoch leaves out, and
                where mini-batch and learning rate are not those of `options`.

        Returns:
            A `TrainingRun`. Its result's `model` is the trained model, on the CPU.

        Raises:
            InvalidValueError, InvalidTypeError: An argument is invalid.
            ResourceError: There are too few workers, or none with a GPU where one is asked for.
            JournalError: The `run_dir` cannot be written.

        Source:
            MATLAB R2025b, trainnet and trainingOptions.

        Example:
            >>> import torch
            >>> from raypool import TrainingOptions, parpool
            >>> x = torch.linspace(-1, 1, 64)[:, None]
            >>> model, loss = torch.nn.Linear(1, 1), torch.nn.functional.mse_loss
            >>> options = TrainingOptions(max_epochs=30, mini_batch_size=16, optimizer="adam",
            ...                           learning_rate=0.1)
            >>> with parpool(1, profile="threads", quiet=True) as pool:
            ...     result = pool.fit(model, (x, 3 * x), loss, options).result()
            >>> round(result.model.weight.item())
            3
        """
        from raypool.train.verbs import fit

        return fit(self, model, data, loss, options, workers, lane, run_options, progress)

    @_explains
    def predict(
        self,
        model: Any,
        data: Any,
        *,
        mini_batch_size: int = 128,
        output: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return a model's outputs for data, in its order, computed on all workers at once.

        Args:
            model: A `torch.nn.Module`, or a function of a mini-batch. Each worker gets it once, a
                module on its device and in evaluation mode; yours is not changed. (A function gets
                its mini-batches on the CPU.)
            data: A NumPy array, a tensor or a DataFrame, with a row for each sample; a tuple or
                dict of those, if the model has several inputs; a list of samples; or a map-style
                `Dataset`. Samples that are pairs (input, target) give their input; dicts give
                everything but "labels" or "label", as the model's arguments by name. Each worker
                reads its own copy of a `Dataset` other than `TensorDataset`. Floating-point numbers
                become the type of the model's weights.
            mini_batch_size: The number of samples that go through the model at once. A call to a
                worker has one mini-batch, or several that take milliseconds; `timeout_s` and
                `retries` of `options` are for one call.
            output: Called on the worker with the model's output for a mini-batch; what it returns
                comes back instead. Arrays and lists are concatenated, also those in tuples, and in
                dicts that all have the same keys; other values form a list with an entry for each
                mini-batch.

        Returns:
            The outputs of all samples, in order, on the CPU: tensors; NumPy arrays if `data` is
            arrays or a DataFrame. Tuples and mappings of tensors keep their form; a list has an
            entry for each sample.

        Raises:
            InvalidValueError, InvalidTypeError: An argument is invalid.
            Exception: The exception that the model raised, with a note of the samples.

        Source:
            MATLAB R2025b, minibatchpredict.

        Example:
            >>> import torch
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.predict(torch.nn.Identity(), torch.arange(5.0), mini_batch_size=2)
            tensor([0., 1., 2., 3., 4.])
        """
        from raypool.train.predict import predict

        return predict(self._target(), model, data, mini_batch_size, output)

    @_explains
    def classify(
        self,
        model: Any,
        data: Any,
        *,
        labels: Sequence[Any] | None = None,
        mini_batch_size: int = 128,
    ) -> Any:
        """Return the class that a model gives each sample: the number of its largest output.

        Args:
            model: As for `predict`; its output has a column for each class.
            data: As for `predict`.
            labels: The names of the classes, in the order of the columns. None: their numbers.
            mini_batch_size: As for `predict`.

        Returns:
            An array with the number, or the label, of each sample's class.

        Raises:
            InvalidValueError, InvalidTypeError: An argument is invalid, or the output has no
                column for each class.

        Source:
            MATLAB R2025b, minibatchpredict and scores2label.

        Example:
            >>> import torch
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.classify(torch.nn.Identity(), torch.eye(3), labels=["a", "b", "c"])
            array(['a', 'b', 'c'], dtype='<U1')
        """
        from raypool.train.predict import classify

        return classify(self._target(), model, data, labels, mini_batch_size)


def _call_in(places: tuple[int, ...], fn: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Call a function if this is the worker of one of these places."""
    return fn(*args, **kwargs) if current_task().worker in places else None


def _serial_view(kind: type[PoolView]) -> PoolView:
    return kind(serial_engine(), Options())


# --- workers, queue and parts of a pool -----------------------------------------------------------


Works = list[tuple[int, Work]]
"""Tasks by id, in the order of their submission."""


class TaskQueue:
    """The calls of a pool or a part that have not ended (`parfeval`, `spmd_async`), as of now."""

    def __init__(self, works: Callable[[], Works]) -> None:
        self._works = works

    @property
    def queued(self) -> list[Future[Any]]:
        """The calls that wait for a worker, in the order of their submission."""
        return self._in_state("queued")

    @property
    def running(self) -> list[Future[Any]]:
        """The calls that run."""
        return self._in_state("running")

    def __repr__(self) -> str:
        return f"<TaskQueue: {len(self.running)} running, {len(self.queued)} queued>"

    def _repr_html_(self) -> str:
        return as_html(repr(self), futures_frame([*self.running, *self.queued]))

    def _in_state(self, state: str) -> list[Future[Any]]:
        shown: dict[Future[Any], None] = {}
        for _, work in self._works():
            future = work.holder
            if isinstance(future, Future):
                while future.whole is not None:  # of an attempt the user holds the training
                    future = future.whole
                shown[future] = None
        return [future for future in shown if future.state == state]


class StaffedView(PoolView):
    """A view that shows its workers: the pool's (`ParallelPool`), or some of them (`PoolPart`)."""

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers as they are now, in order."""
        return self._workers()

    @property
    def num_workers(self) -> int:
        """How many workers there are, including those that are being replaced."""
        return len(self._numbers())

    @property
    def idle_workers(self) -> int:
        """How many workers are free to start something now."""
        return sum(worker.state == "idle" for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Whether anything is queued or running, or a cancelled task has not stopped yet."""
        return bool(self._works()) or any(worker.state == "busy" for worker in self.workers)

    @property
    def queue(self) -> TaskQueue:
        """The single calls that have not ended."""
        return TaskQueue(self._works)

    @property
    def is_closed(self) -> bool:
        """Whether the pool takes no more work: it was shut down (or is broken beyond repair)."""
        return self._engine.is_over

    def _works(self) -> Works:
        """Return all work that has not ended and is bound to these workers."""
        self._engine.driver.barrier()  # what was submitted before is in `works` then
        works = list(self._engine.driver.works.items())
        if self._places is None:
            return works
        own, tasks = set(self._places), self._engine.driver.scheduler.backlog.tasks
        bound = []
        for task_id, work in works:
            task = tasks.get(task_id)  # None: it has ended meanwhile
            if task is not None:
                spec = task.spec
                places = spec.places if spec.place is None else (spec.place,)
                if places is not None and own.issuperset(places):
                    bound.append((task_id, work))
        return bound

    @property
    def store(self) -> ValueStore:
        """The value store, shared by the process that opened the pool, its tasks and its parts."""
        return self._engine.store

    @_explains
    def constant(
        self, source: T | Callable[[], T], cleanup: Callable[[T], object] | None = None
    ) -> Constant[T]:
        """Return a value that every worker receives, or builds, once, however many tasks use it.

        Args:
            source: The value; or a function without arguments (or a class) that makes it, called on
                each worker at the first use there.
            cleanup: Called with the value when a worker that has used it ends: with the pool, when
                the pool gets smaller, or after `idle_timeout_s`. A process that dies cannot call
                it.

        Raises:
            SerializationError: The value or the function cannot be sent.

        Source:
            MATLAB R2025b, parallel.pool.Constant.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     squares = pool.constant([0, 1, 4, 9])
            ...     list(pool.parfor(lambda i: squares.value[i], [3, 2]))
            [9, 4]
        """
        self._check_open()
        constant: Constant[T] = new_constant(
            self._engine.opener(content_of(source, cleanup), "the constant")
        )
        self._engine.constants.append(constant.key)
        if cleanup is not None:
            self._engine.backend.has_cleanups = True
        return constant

    def transfer_bytes(self) -> TransferBytes:
        """Count the bytes sent to and received from each worker while a `with` block runs.

        Functions, arguments and results are counted, as they travel (pickled). A large one (from 64
        KiB on) goes through Ray's object store: it counts as sent when the worker has opened it,
        which for a function or a constant is once, and as received when somebody asks for the
        result. Values of queues and the store, and Ray's own messages, are not counted. With
        "threads" and "inline" nothing is moved.

        Returns:
            A context manager; its value has `to_frame()`, a table with the columns `sent_bytes` and
            `received_bytes` and a row for each worker, and `total`, the sums of both. They can be
            read at any time, and no longer change after the block.

        Source:
            MATLAB R2025b, ticBytes, tocBytes.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     with pool.transfer_bytes() as moved:
            ...         results = pool.parfor(abs, [-1, -2])
            >>> moved.total.sent_bytes
            0
            >>> moved.to_frame().shape
            (2, 2)
        """
        return TransferBytes(self._engine.traffic, self._numbers)  # workers may change meanwhile

    def cancel_all(self) -> None:
        """Cancel everything that is queued or running, loops included.

        Source:
            MATLAB R2025b, cancelAll.
        """
        for task_id, work in reversed(self._works()):  # as `cancel_each` does
            self._cancel(task_id, work)

    def _cancel(self, task_id: int, work: Work) -> None:
        if isinstance(work.holder, Future):
            work.holder.cancel()
        else:
            self._engine.driver.post(CancelRequested(task_id))

    def delete(self) -> None:
        """Cancel queued calls and unfinished loops, wait for running calls, and release everything.

        Calling it again has no effect.
        """
        self.shutdown(cancel_futures=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def __repr__(self) -> str:
        count = f"{self.num_workers} worker" + ("s" if self.num_workers != 1 else "")
        return (
            f"<{type(self).__name__}:"
            f" {'closed' if self.is_closed else f'{count}, {self.idle_workers} idle'}>"
        )

    def _repr_html_(self) -> str:
        import pandas as pd

        from raypool.engine.overview import running

        workers = [] if self.is_closed else self._workers()
        work = running(self._engine.driver)
        table = pd.DataFrame(
            {
                "host": [worker.host for worker in workers],
                "gpu": [", ".join(map(str, worker.gpus)) or "-" for worker in workers],
                "state": [worker.state for worker in workers],
                "running": [work.get(worker.index) or "-" for worker in workers],
            },
            index=pd.Index([worker.index for worker in workers], name="worker"),
        )
        return as_html(repr(self), table)

    # --- partition --------------------------------------------------------------------------------

    @_explains
    def partition(
        self,
        *,
        per_gpu: int | None = None,
        per_host: int | None = None,
        workers: Iterable[int | WorkerInfo] | None = None,
    ) -> tuple[PoolPart, PoolPart]:
        """Return some of the workers as one part of the pool, and the others as another.

        Each part has the verbs of a pool, for its own workers. Parts and pool can be used at the
        same time, and parts can be partitioned again. A replaced worker stays in its part; those
        that `resize` adds are in neither. If nothing fits, for example without a GPU, the part is
        empty (`num_workers` is 0); only work for it is an error.

        Args:
            per_gpu: At most this many workers for each GPU: 1 gives each GPU to a single worker.
            per_host: At most this many workers for each machine.
            workers: These workers, by number or as in `workers`.

        Raises:
            InvalidTypeError: Not exactly one of the three was passed, or it has the wrong type.
            InvalidValueError: A number is below 1, or there is no such worker here.

        Source:
            MATLAB R2025b, partition (MaxNumWorkersPerGPU, MaxNumWorkersPerHost, Workers).

        Example:
            >>> from raypool import parpool
            >>> with parpool(3, profile="threads", quiet=True) as pool:
            ...     part, rest = pool.partition(workers=[0])
            ...     slow = part.parfeval(pow, 2, 10)
            ...     list(rest.parfor(abs, [-1, -2])), slow.result()
            ...     pool.partition(per_gpu=1)[0].num_workers
            ([1, 2], 1024)
            0
        """
        given = {
            name: value
            for name, value in (("per_gpu", per_gpu), ("per_host", per_host), ("workers", workers))
            if value is not None
        }
        if len(given) != 1:
            raise InvalidTypeError(
                "partition() takes one of per_gpu=, per_host= and workers=, but got"
                f" {' and '.join(given) or 'none'}."
            )
        per_gpu = optional_count("per_gpu", per_gpu, least=1)
        per_host = optional_count("per_host", per_host, least=1)
        self._check_open()
        numbers = self._numbers()
        there = [worker for worker in self.workers if worker.index in numbers]  # none that ends
        if workers is not None:
            chosen = worker_numbers(workers, numbers)
        elif per_gpu is not None:
            chosen = _picked(
                there,
                # without UUIDs: each machine counts its GPUs from 0
                lambda worker: worker.gpu_uuids or [(worker.host, gpu) for gpu in worker.gpus],
                per_gpu,
            )
        else:
            chosen = _picked(there, lambda worker: [worker.host], per_host or 0)
        others = [number for number in numbers if number not in chosen]
        return PoolPart(self, sorted(chosen)), PoolPart(self, others)


class PoolPart(StaffedView):
    """Some of the workers of a pool, with the verbs of a pool; made by `partition`.

    Its `queue`, `busy` and `cancel_all` cover all work that may run only on its own workers.
    """

    def __init__(self, pool: StaffedView, places: Sequence[int]) -> None:
        super().__init__(pool._engine, pool._options, pool, tuple(places))
        self._whole = pool
        self._is_over = False

    @property
    def is_closed(self) -> bool:
        """Whether this part takes no more work: it, or what it is a part of, was shut down."""
        return self._is_over or self._whole.is_closed

    def _check_open(self) -> None:
        if self._is_over:
            raise PoolClosedError(
                "This part of the pool was shut down. Make another with partition()."
            )
        super()._check_open()

    @_explains
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work here. The workers stay with the pool, which stays open.

        Args:
            wait: Return when the single calls that were submitted here have ended.
            cancel_futures: Cancel queued work. An unfinished loop counts as queued.
        """
        self._is_over = True
        works = self._works()
        driver = self._engine.driver
        tasks = driver.scheduler.backlog.tasks
        for task_id, work in works if cancel_futures else ():
            task = tasks.get(task_id)  # None: it has not arrived there yet
            if not isinstance(work.holder, Future) or task is None or task.has_more:
                self._cancel(task_id, work)
        # a task, or the callback of a future, would wait for itself
        if wait and not (in_task() or driver.is_own_thread or driver.is_forked):
            concurrent.futures.wait(
                [work.holder for _, work in works if isinstance(work.holder, Future)]
            )

    def __reduce__(self) -> Any:
        return _serial_view, (StaffedView,)  # as a view


def _picked(
    workers: Iterable[WorkerInfo], names: Callable[[WorkerInfo], Sequence[Hashable]], limit: int
) -> list[int]:
    """Return the first workers, at most `limit` of any one name, none without a name."""
    counts: Counter[Hashable] = Counter()
    picked = []
    for worker in workers:
        own = names(worker)
        if own and all(counts[name] < limit for name in own):
            counts.update(own)
            picked.append(worker.index)
    return picked


# --- pool -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a pool has done so far; see `ParallelPool.statistics`.

    Attributes:
        submitted, finished, failed, cancelled: Items (a single call is one).
        queued, running: Items right now.
        attempts: Calls to workers; fewer than items where short ones share a call.
        workers_lost: Processes that died and were replaced.
    """

    submitted: int
    finished: int
    failed: int
    cancelled: int
    queued: int
    running: int
    attempts: int
    workers_lost: int


class ParallelPool(StaffedView):
    """Workers that each hold a GPU (or a core) while the pool lives. Open one with `parpool`.

    A `concurrent.futures.Executor`, with MATLAB's verbs beside the standard ones. As a context
    manager it waits for its work at the end; if the block ends with an error, queued work is
    cancelled. Safe to use from several threads.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Options(retries=engine.profile.retries))
        # A forgotten pool ends. Not at exit: then the engine gives submitted work some seconds.
        weakref.finalize(self, engine.shutdown, wait=False).atexit = False

    def statistics(self) -> Statistics:
        """Return what the pool has done so far.

        Example:
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     values = pool.parfor(abs, [-1, -2])
            ...     pool.statistics().finished
            2
        """
        scheduler = self._engine.driver.scheduler
        counts = scheduler.counts
        tasks = list(scheduler.backlog.tasks.values())  # a copy, as in `_numbers`
        return Statistics(
            counts.submitted,
            counts.finished,
            counts.failed,
            counts.cancelled,
            sum(task.waiting + task.items_resting for task in tasks),
            sum(task.items_in_flight for task in tasks),
            counts.attempts,
            counts.workers_lost,
        )

    @_explains
    def resize(self, num_workers: int) -> None:
        """Give the pool this many workers.

        New workers are running on return. A smaller pool releases idle workers first; a busy one
        ends after its current work, unless the pool is to be larger again by then.

        Raises:
            ResourceError: Too few are available; the pool is not changed.
            StartupError: A new worker did not start; those that did stay.
        """
        num_workers = checked_count("num_workers", num_workers, least=1)
        self._engine.check_open()
        self._engine.resize(num_workers)

    @_explains
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and release everything when all work is done.

        Args:
            wait: Return only then.
            cancel_futures: Cancel queued work. An unfinished loop counts as queued: its running
                items are given up.
        """
        self._engine.shutdown(wait, cancel_queued=cancel_futures)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C: running work ends, too
            self._engine.shutdown(wait=True, cancel_queued=True, cancel_running=True)
        else:
            super().__exit__(kind, error, traceback)

    def __reduce__(self) -> Any:
        return _serial_pool, ()  # as a view


@without_own_frames
@functools.partial(explains_calls, check=lambda *args, **_: checked_range(*args[:1]))
def parpool(
    num_workers: int | tuple[int, int] | None = None,
    *,
    profile: str | Profile | None = None,
    initializer: Callable[..., object] | None = None,
    initargs: Iterable[Any] = (),
    **changes: Any,
) -> ParallelPool:
    """Open a pool of workers, each with its own GPU (or core), and print one line about it.

    Inside a task the pool has one worker, the task's own thread, and uses only `initializer`,
    `setup` and `teardown`: those passed here or in a `Profile`, but not those of a profile by name,
    whose file may be missing there.

    Args:
        num_workers: The exact number, or `(least, most)` for as many as possible in that range.
            None: one for each GPU that this process may use; without a GPU, one for each physical
            core; one for each entry if the profile's `resources` is a list.
        profile: "local" (the Ray that this process uses, else a new one on this machine), "threads"
            or "inline" (in this process, without Ray); the name of a table in raypool.toml
            (`[profiles.NAME]`) or pyproject.toml (`[tool.raypool.profiles.NAME]`), in this folder
            or the nearest parent that has one; or a `Profile`. None: the profile that this file
            names (`default = "NAME"`), else "local".
        initializer: The standard library's form of `setup=functools.partial(initializer,
            *initargs)`: it runs once in each worker before anything else.
        initargs: Its arguments.
        **changes: Single fields of the profile, such as `gpus=[0, 2]` or
            `resources=WorkerResources(gpus=0.5)`.

    Raises:
        ResourceError: Too little is available; the message says what was requested, what is
            available and who holds the rest.
        StartupError: A worker did not start, or its `setup` or `initializer` failed; it is a
            `BrokenExecutor` too.
        InvalidValueError, InvalidTypeError: An argument is invalid.

    Source:
        MATLAB R2025b, parpool; concurrent.futures.ProcessPoolExecutor for `initializer` and
        `initargs`.

    Example:
        >>> with parpool(2, profile="threads") as pool:
        ...     pool.num_workers
        raypool: 2 workers (threads of this process)
        2
    """
    pool = open_pool(
        num_workers, profile=profile, initializer=initializer, initargs=initargs, **changes
    )
    if not in_task():
        with _current_lock:
            _opened[:] = [
                reference
                for reference in _opened
                if (other := reference()) is not None and not other.is_closed
            ]
            _opened.append(weakref.ref(pool))  # weak: a pool that is forgotten ends
    return pool


def open_pool(
    num_workers: int | tuple[int, int] | None = None,
    *,
    profile: str | Profile | None = None,
    initializer: Callable[..., object] | None = None,
    initargs: Iterable[Any] = (),
    **changes: Any,
) -> ParallelPool:
    """Open a pool as `parpool` does, but never make it the current one: the caller closes it."""
    asked = checked_range(num_workers)
    if initializer is not None:
        changes = _with_setup(initializer, initargs, changes)
    if in_task():
        # a name is not looked up: its file may not be on this machine
        given = profile if isinstance(profile, Profile) else Profile()
        setup, teardown = (
            changes.get(name, getattr(given, name)) for name in ("setup", "teardown")
        )
        return ParallelPool(serial_engine(setup=setup, teardown=teardown))
    check_not_importing()
    settings = resolve_profile(profile, changes)
    least, most = settings.sized(*asked)
    started = time.monotonic()
    engine = open_engine(settings, workers=(least, most))
    try:
        engine.add_workers(least, most)
    except BaseException:  # Ctrl-C, too: no process may stay on a GPU
        engine.shutdown(wait=True, cancel_queued=True, cancel_running=True)
        raise
    pool = ParallelPool(engine)
    if not settings.quiet:
        is_ray = settings.backend == "ray"
        took = f", ready in {time.monotonic() - started:.1f} s" if is_ray else ""
        say(f"{_described(engine)}{took}")
    return pool


def _with_setup(initializer: Any, initargs: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a profile, with `initializer` as its `setup`."""
    check_callable(initializer)
    if "setup" in changes:
        raise InvalidValueError(
            "setup and initializer mean the same. Pass one function that calls both."
        )
    if not isinstance(initargs, Iterable):
        raise InvalidTypeError(
            f"initargs={initargs!r} is not a list or tuple of arguments. For one argument write"
            " (argument,)."
        )
    return {**changes, "setup": functools.partial(initializer, *initargs)}


@explains_calls
def gcp(create: bool = True) -> ParallelPool | None:
    """Return the current pool: the one that was opened last and is still open.

    Args:
        create: If there is none, open one with `parpool()`; otherwise return None.

    Source:
        MATLAB R2025b, gcp.

    Example:
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     gcp() is pool
        True
    """
    if not isinstance(create, bool):
        raise InvalidTypeError(
            f'create must be True or False, not {create!r}. MATLAB\'s gcp("nocreate") is'
            " gcp(create=False)."
        )
    if in_task():
        return _serial_pool()
    if (pool := _newest()) is not None or not create:
        return pool
    with _making_lock:
        if (pool := _newest()) is None:
            global _made_here
            pool = _made_here = parpool()  # keeps the pool alive: nobody else holds it
        return pool


def _newest() -> ParallelPool | None:
    with _current_lock:
        for reference in reversed(_opened):
            pool = reference()
            if pool is not None and not pool.is_closed:
                return pool
    return None


def _of_current_pool(verb: Callable[[PoolView], Verb]) -> Callable[[Callable[..., Any]], Verb]:
    """Turn a function, of which only the docstring counts, into a verb of the current pool."""

    def decorate(described: Callable[..., Any]) -> Verb:
        @functools.wraps(described)
        def on_current_pool(*args: Any, **kwargs: Any) -> Any:
            return verb(cast("PoolView", gcp()))(*args, **kwargs)

        method = inspect.signature(getattr(PoolView, described.__name__))
        _, *parameters = method.parameters.values()  # without `self`
        vars(on_current_pool)["__signature__"] = method.replace(parameters=parameters)
        return cast("Verb", on_current_pool)

    return decorate


@_of_current_pool(lambda pool: pool.parfor)
def parfor(*args: Any, **kwargs: Any) -> Any:
    """Call `PoolView.parfor` on the current pool, which is opened if there is none.

    Example:
        >>> import raypool
        >>> with parpool(2, profile="threads", quiet=True):
        ...     list(raypool.parfor(abs, [-1, -2]))
        [1, 2]
    """


@_of_current_pool(lambda pool: pool.parfeval)
def parfeval(*args: Any, **kwargs: Any) -> Any:
    """Call `PoolView.parfeval` on the current pool, which is opened if there is none.

    Example:
        >>> import raypool
        >>> with parpool(2, profile="threads", quiet=True):
        ...     raypool.parfeval(pow, 2, 10).result()
        1024
    """


@_of_current_pool(lambda pool: pool.fit)
def fit(*args: Any, **kwargs: Any) -> Any:
    """Call `PoolView.fit` on the current pool, which is opened if there is none.

    Example:
        >>> import torch
        >>> from raypool import fit
        >>> model, loss = torch.nn.Linear(2, 1), torch.nn.functional.mse_loss
        >>> with parpool(1, profile="threads", quiet=True):
        ...     fit(model, (torch.rand(256, 2), torch.rand(256, 1)), loss).result().model
        Linear(in_features=2, out_features=1, bias=True)
    """


@_of_current_pool(lambda pool: pool.predict)
def predict(*args: Any, **kwargs: Any) -> Any:
    """Call `PoolView.predict` on the current pool, which is opened if there is none.

    Example:
        >>> import torch
        >>> from raypool import predict
        >>> with parpool(2, profile="threads", quiet=True):
        ...     predict(torch.nn.Identity(), torch.arange(3.0))
        tensor([0., 1., 2.])
    """


@_of_current_pool(lambda pool: pool.classify)
def classify(*args: Any, **kwargs: Any) -> Any:
    """Call `PoolView.classify` on the current pool, which is opened if there is none.

    Example:
        >>> import torch
        >>> from raypool import classify
        >>> with parpool(2, profile="threads", quiet=True):
        ...     classify(torch.nn.Identity(), torch.eye(3))
        array([0, 1, 2])
    """


_made_here: ParallelPool | None = None
_opened: list[weakref.ref[ParallelPool]] = []
_current_lock = threading.Lock()  # several threads may open pools
_making_lock = threading.RLock()  # several may be the first to need one


def _serial_pool() -> ParallelPool:
    return ParallelPool(serial_engine())


def _described(engine: Engine) -> str:
    workers = engine.workers()
    count = f"{len(workers)} worker" + ("s" if len(workers) != 1 else "")
    if engine.profile.backend != "ray":
        kind = "threads of" if engine.profile.backend == "threads" else "inline in"
        return f"{count} ({kind} this process)"
    hosts = []
    for host in dict.fromkeys(worker.host for worker in workers):  # each once, in order
        gpus_of = [worker.gpus for worker in workers if worker.host == host]
        names = ", ".join(dict.fromkeys(str(gpu) for gpus in gpus_of for gpu in gpus))
        num_without = sum(not gpus for gpus in gpus_of)
        beside = f" and {num_without} without" if names and num_without else ""
        hosts.append(f"{host}: GPU {names}{beside}" if names else f"{host}: CPU")
    return f"{count} on {'; '.join(hosts)}"


def checked_range(num_workers: Any, name: str = "num_workers") -> tuple[int | None, int | None]:
    """Return the least and the most of a number of workers that may be a range.

    Raises:
        InvalidValueError, InvalidTypeError: It is neither.
    """
    if num_workers is None:
        return None, None
    # parpool("Threads"), as MATLAB takes it
    if name == "num_workers" and isinstance(num_workers, str) and num_workers[:1].isalpha():
        lower = num_workers.lower()
        meant = (lower, *ARGUMENTS.get(lower, ()))
        profile = next((each for each in meant if each in BUILT_IN), num_workers)
        raise InvalidTypeError(
            f"{name}={num_workers!r} is not a number of workers. Did you mean profile={profile!r}?"
        )
    if isinstance(num_workers, (tuple, list)):
        if len(num_workers) != 2:
            raise InvalidValueError(f"{name}={num_workers!r} is not a pair (minimum, maximum).")
        least, most = (checked_count(name, value, least=1) for value in num_workers)
        if least > most:
            raise InvalidValueError(
                f"{name}={num_workers!r}: the minimum is more than the maximum. Pass"
                f" ({most}, {least})."
            )
        return least, most
    number = checked_count(name, num_workers, least=1)
    return number, number
