"""The verb for many items: what can be asked of a pool about a loop."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raypool.core.model import TaskSpec
from raypool.counts import optional_count
from raypool.engine.backend import Function
from raypool.engine.engine import Engine, serial_engine
from raypool.engine.loop_work import LoopOptions, LoopWork
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.loop import LoopRun, check_progress, echoed, folded, listed, longest_first, raise_if_failed, watched
from raypool.options import Options, check_callable, check_name

if TYPE_CHECKING:
    from raypool.engine.calls import Where

RERUNS = ("failed", "missing", "all")


class LoopVerbs:
    """The verb of a pool that runs a loop; part of `PoolView`."""

    _engine: Engine
    _options: Options

    def parfor(  # noqa: PLR0913 - the verb of the package: each argument is asked for by users, all are named
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any] | int,
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
    ) -> Any:
        """Call `fn(item)` for every item, on all workers at once, and return the results in the order of the items.

        Each worker takes the next item when it is free. Items that take milliseconds share calls; longer ones go one by one.
        While many wait, one below 0.25 s may stand behind the item that its worker runs (for items that wait for one another:
        `spmd`). An item runs at least once, and again if its worker is lost (up to `retries` times); its result counts exactly
        once. Inside a task the loop runs serially, in the task.

        Args:
            fn: Any function of one argument, also with `async def`. It is shipped to each worker once, with what it closes over,
                which the items of a worker share: copy a model or an array from outside before changing it
                (`copy.deepcopy(model)`), or later items on that worker see the change, and nobody else does.
            items: A list or other iterable, also a generator without end (of which only a few items per worker are drawn
                ahead), a DataFrame of pandas or polars (each row a dict), or a number `n` for `range(n)`.
            on_error: "stop": the first failure ends the loop and is raised. "raise": all items run, then the first is raised.
                "collect": all items run; failures are in the table. None: "raise" with `run_dir`, else "stop".
            reduce: Fold the values with this function of two arguments, in the order of the items, and return what comes out
                instead: the same on any number of workers, to the last bit.
            init: The first operand of `reduce`; None begins with the first value.
            cost: How long each item will take, roughly and in any unit: a number for each, or a function of the item. Those with
                the largest go first, so that no long one begins when the others are done. Nothing else changes. It takes a
                list of items, not a generator.
            max_workers: Use at most so many workers; 0 runs serially in this process.
            chunk_size: Send so many items in a call, whatever they take. None: by measured time.
            seed: Give every item its own random numbers, which depend on the seed and the item's number only: those of Python's,
                NumPy's and torch's global generators, of all generators that `fn` finds in global variables, its closure,
                default arguments or a partial (`rng = np.random.default_rng(0)` of a script, say), and `current_task().seed`.
                In this process (profiles "inline" and "threads") generators are put back afterwards.
            progress: Show how the loop goes on, on standard error. None: in a notebook as a picture below the cell; on a terminal
                as a picture there; else as lines in a log file, the first after ten seconds. True: lines from the beginning, too.
                False: nothing. Or `tqdm`, or what else makes a progress bar: it is called as `progress(total=..., desc=...)`,
                and what it returns has `update(n)` and, if it likes, `set_postfix(failed=...)` and `close()`.
            echo: Show what the items print, as it comes, on standard output: each line behind the number of its item. None: in a
                notebook, unless the items run in this process, which shows what they print anyway. `Results.diary` has what each
                item has printed in any case.
            name: What to call the loop in messages and displays.
            run_dir: Keep what becomes of each item in this folder, before anybody hears of it. The same call later, with the same
                items in any order, more of them or fewer, goes on from there: also after the machine went down. An item is known
                again by what it is; `fn` by its name. Beside the journal are, for each item, what it reported and printed, and
                its `current_task().checkpoint_dir`; if items use that, all machines of the pool have to see this folder, or
                `pool.options(checkpoints=...)` names a URL for it.
            rerun: What of a `run_dir` runs again: "failed": what failed, and what is missing; "missing": only what has no outcome
                yet; "all": everything. Checkpoints of the items stay in any case.

        Returns:
            `Results`: the values in order, and a table of them; with `reduce` the folded value.

        Raises:
            Exception: What `fn` raised, as itself, with a note of the item, worker and attempt, the remote traceback as its
                cause, and `.results`, everything that has finished.
            WorkerLostError: An item has lost its worker too often.
            SerializationError: `fn` or an item cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.
            JournalError: `run_dir` is in use by somebody else, was made by another function or with another seed, or cannot be
                written; if only at the end, `.results` has all values.

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
            >>> with parpool(2, profile="threads", quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
            ...     _ = pool.parfor(abs, [-1, -2], run_dir=folder)
            ...     list(pool.parfor(abs, [-3, -2, -1], run_dir=folder))  # only -3 runs
            [3, 2, 1]
        """
        check_callable(fn)
        if on_error is None:
            on_error = "stop" if run_dir is None else "raise"
        if on_error not in ("stop", "raise", "collect"):
            raise InvalidValueError(f"on_error={on_error!r} is none of 'stop', 'raise' and 'collect'.")
        check_progress(progress)
        if not (echo is None or isinstance(echo, bool)):
            raise InvalidTypeError(f"echo={echo!r} is neither True, False nor None.")
        check_name(name)
        max_workers = optional_count("max_workers", max_workers, least=0)
        chunk_size = optional_count("chunk_size", chunk_size, least=1)
        seed = optional_count("seed", seed, least=0)
        if rerun not in RERUNS:
            raise InvalidValueError(f"rerun={rerun!r} is none of 'failed', 'missing' and 'all'.")
        if rerun != "failed" and run_dir is None:
            raise InvalidValueError(f"rerun={rerun!r} needs run_dir, the folder of the run that is to go on.")
        if reduce is not None and not callable(reduce):
            raise InvalidTypeError(f"reduce={reduce!r} is not callable. Give a function of two values.")
        sequence = listed(items)
        order = None if cost is None else longest_first(sequence, cost)
        if max_workers == 0:
            engine, max_workers = serial_engine(self._engine.find_way), None
        else:
            engine = self._engine_here()
        function = engine.function(fn)
        if seed is None:
            engine.warn_of_generators(fn)
        fn_id, label = function.fn_id, name or self._options.name or function.name
        options, where = self._options, self._where(engine)
        home = None if options.checkpoints is None else (str(options.checkpoints), checkpoint_owner(fn))
        how = LoopOptions(label, options.retry_on, seed, on_error == "stop", chunk_size is not None, order, home)

        def make_spec(task_id: int, size: int, is_open: bool) -> TaskSpec:
            return TaskSpec(
                task_id,
                fn_id,
                size,
                is_open,
                options.priority,
                options.retries,
                max_workers,
                place=where.place,
                places=where.places,
                timeout_s=options.timeout_s,
                is_fresh=where.is_fresh,
                retry_delay_s=options.retry_delay_s,
                fail_fast=on_error == "stop",
                chunk_size=chunk_size,
            )

        work = LoopWork(function, (), how) if run_dir is None else durable_loop(fn, function, how, run_dir, rerun)
        del function  # the traceback of an error would keep it in workers
        with contextlib.closing(work), watched(progress, label, engine) as view, echoed(echo, work, engine) as lines:
            watchers = [watcher for watcher in (lines, view) if watcher is not None]
            results = LoopRun(engine, work, watchers).run(sequence, make_spec)
        raise_if_failed(work, results, on_error)
        return results if reduce is None else folded(results, reduce, init)

    def _engine_here(self) -> Engine:
        """Return the engine for work that is called for here."""
        raise NotImplementedError

    def _where(self, engine: Engine) -> Where:
        """Return where work is to run."""
        raise NotImplementedError


def checkpoint_owner(fn: Callable[[Any], Any]) -> str:
    """Return what the names of folders for checkpoints begin with: others for other functions, and for other values in a partial.

    Values that are no plain data do not count: they may have another key after a restart.
    """
    from raypool.journal.keys import content_key, function_key
    from raypool.journal.plain import encode

    given = []
    inner: Any = fn
    while isinstance(inner, functools.partial):
        given.append(encode([list(inner.args), inner.keywords]))
        inner = inner.func
    return f"{content_key((function_key(fn), given), 'a function')[:8]}-"


def durable_loop(
    fn: Callable[[Any], Any], function: Function, how: LoopOptions, run_dir: Any, rerun: Literal["failed", "missing", "all"]
) -> LoopWork:
    """Return a loop that keeps what becomes of its items in a folder.

    Raises:
        InvalidTypeError: `run_dir` is not a path.
        InvalidValueError: It is empty, a URL or a file.
        JournalError: The folder cannot be used.
    """
    from raypool.engine.durable import DurableLoop  # which imports sqlite3, for those who need it

    if not isinstance(run_dir, (str, os.PathLike)):
        raise InvalidTypeError(f"run_dir={run_dir!r} is not a path. Give the name of a folder.")
    path = os.fspath(run_dir)
    if not path:
        raise InvalidValueError("run_dir='' is empty. Give the name of a folder, which need not be there yet.")
    try:
        os.fsencode(path)
    except ValueError as error:  # half of a character
        raise InvalidValueError(f"run_dir={path!r} cannot be the name of a folder: {error}.") from error
    if "\0" in path:
        raise InvalidValueError(f"run_dir={path!r} cannot be the name of a folder: it has a NUL.")
    if "://" in path:
        raise InvalidValueError(
            f"run_dir={path!r} is a URL. The journal needs a folder of this machine; options(checkpoints=...) takes URLs."
        )
    if os.path.isfile(os.path.expanduser(path)):  # noqa: PTH111, PTH113
        raise InvalidValueError(f"run_dir={path!r} is a file. Name a folder, which need not be there yet.")
    return DurableLoop.open(fn, function, how, run_dir, rerun)
