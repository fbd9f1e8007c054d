"""`pool.search`: a loop whose items are trials, added one by one as Optuna suggests them.

A trial is an item of the loop. It may run in several parts: at a rung it returns, and if it is
promoted the same item runs again, from its checkpoint. `Search` decides in the thread that waits
for the loop, where reports and results arrive.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import numbers
import time
from bisect import bisect, bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raypool.channel.feed import MetricsReport, report_of_row
from raypool.channel.records import Missing, function_name
from raypool.core.messages import CancelRequested, ItemsAdded, StopRequested
from raypool.core.model import Slice, TaskSpec
from raypool.engine.engine import Engine
from raypool.engine.loop import CallItems, LoopOptions, LoopWork
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    PoolBrokenError,
    PoolClosedError,
    add_note,
    check_installed,
    checked_count,
    optional_count,
)
from raypool.journal.trials import METRIC, NAME, OWNER, PARENT, RUNG, STATES, STUDY, Trials
from raypool.loggers import SweepLogger, check_loggers
from raypool.options import check_callable, check_name, check_seconds
from raypool.parallel_for import (
    TICK_S,
    EndNotice,
    LoopRun,
    Watcher,
    check_on_end,
    check_on_report,
    check_progress,
    checkpoint_owner,
    durable_loop,
    logged,
    raise_if_failed,
    watched,
)
from raypool.results import Results, Row, best_first
from raypool.search import STORABLE, Halving, Population, Until, check_choices
from raypool.search.rungs import Members, Rungs
from raypool.search.storage import check_space, patient, stoppable, undoing
from raypool.worker.folders import checkpoint_time, copy_checkpoint, remove_checkpoint
from raypool.worker.running import TaskContext, item_seed, note_here

if TYPE_CHECKING:
    import optuna
    import pandas as pd

    from raypool.journal.live import Request
    from raypool.pool import PoolView

logger = logging.getLogger("raypool")

SHORT_S = 0.05
"""While trials take less than this [s], each worker has the next one already."""

TINY_S = 0.005
"""Trials that take less than this [s] are sent in groups: a call costs half a millisecond."""

GROUP = 4
"""Tiny trials of a group; each worker has two groups."""

POOL_ENDED = (PoolBrokenError, PoolClosedError)
"""Errors after which a trial has not failed: a later call continues it."""

KEPT = "-kept"
"""After the name of a checkpoint: its copy, from which others continue while its trial runs."""

CHANGE = 0.2
"""By this part a population changes numbers, up or down."""

NEW_CHOICE = 0.25
"""The probability with which a population draws a choice again."""


# --- in the worker --------------------------------------------------------------------------------


class TrialEndedError(BaseException):
    """Raised in `report` if the function of a trial continues after it was asked to stop."""


class TrialPart(NamedTuple):
    """What a worker gets of a trial: it trains for `until` epochs, of which some came before.

    `num_reports` and `num_epochs` are known of those. `is_again`: whether the part began before,
    and may have come to its end.
    """

    config: dict[str, Any]
    until: float
    num_reports: int
    num_epochs: int
    is_again: bool


def run_part(fn: Callable[[Any], Any], metric: str | None, part: TrialPart) -> Any:
    """Run a trial until it has trained for this many epochs; return its function's value."""
    num_reports = part.num_reports
    note = note_here()
    assert note is not None
    say = note.say

    def count(note: TaskContext, kind: str, payload: Any) -> bool | None:
        nonlocal num_reports
        if kind == "metrics" and metric in payload[1]:
            if note.should_stop and not note.is_leaving:
                raise TrialEndedError
            if part.is_again and epochs_of(payload[1], 0) > part.until:
                # it was interrupted between its last epoch and its pause: it pauses now, with the
                # checkpoint of that epoch, whose report may be lost
                if part.num_epochs < part.until:
                    say(note, kind, (payload[0], {**payload[1], "epoch": part.until - 1}))
                raise TrialEndedError
            num_reports += 1
            if epochs_of(payload[1], num_reports) >= part.until:
                note.should_stop = True
        return say(note, kind, payload)

    note.say = count
    value = None
    try:
        with contextlib.suppress(TrialEndedError):
            value = fn(part.config)
    finally:
        if not inspect.iscoroutine(value):
            note.say = say
    if not inspect.iscoroutine(value):
        return value

    async def wait() -> Any:  # the worker runs it, in its own event loop
        try:
            with contextlib.suppress(TrialEndedError):
                return await value
        finally:
            note.say = say

    return wait()


def epochs_of(metrics: Mapping[str, Any], num_reports: int) -> int:
    """Return how many epochs a trial has behind it: by its `epoch`, else by its reports."""
    epoch = metrics.get("epoch")
    is_number = isinstance(epoch, (int, float)) and math.isfinite(epoch)
    return int(epoch) + 1 if is_number else num_reports  # type: ignore[arg-type]


def score_of(value: Any) -> float | None:
    """Return a value as a score; None: it is not a number."""
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# --- what a search returns ------------------------------------------------------------------------


class BestTrial(NamedTuple):
    """The best trial of a search: its number, its configuration, its score and its value.

    A trial that was cancelled has the value of its last part that ended, and its last score.
    """

    number: int
    config: dict[str, Any]
    score: float
    value: Any


@dataclass(slots=True)
class Trial:
    """A trial: its place in the study, and how far it has come.

    `index`: the number of its item; `number`: its number in the study. `part`: the position of its
    newest part in the loop's order. `until`: the epochs at which that part ends. `is_again`:
    whether that part began in an earlier call, and left a checkpoint. `state`: "running", "waiting"
    at a rung, "complete", "pruned", "failed", or "unfinished" if a watcher cancelled it.
    `stopped_by`: why it was asked to stop. `at_rungs`: its scores at the rungs, in an earlier call.
    `lineage`: the trials that it took over from and replaced, and the rung of the checkpoint; empty
    for one that began by itself.
    """

    index: int
    number: int
    handle: optuna.trial.Trial | None  # dropped when it is told: it takes more memory than the rest
    config: dict[str, Any]
    state: str = "running"
    score: float | None = None
    epochs: int = 0
    noted_epochs: int = 0
    num_reports: int = 0
    rung: int = 0
    until: float = math.inf
    part: int | None = None
    is_again: bool = False
    stopped_by: str = ""
    at_rungs: list[float] = field(default_factory=list)
    lineage: Sequence[int] = ()


class SearchResults:
    """The trials of a search.

    Attributes:
        study: The Optuna study, for Optuna's plots and `optuna-dashboard`.
        results: The trials as the `Results` of a loop, in the order of their numbers: values,
            metrics, output, `report()`.
        metric: The name of the score; None: the number that the function returned.
        mode: "max" or "min".
        ended_by: Why `stop_when` ended the search before all its trials; empty if it did not.
    """

    def __init__(
        self,
        study: optuna.Study,
        results: Results[Any],
        metric: str | None,
        mode: Literal["max", "min"],
        ended_by: str,
    ) -> None:
        self.study, self.results, self.metric, self.mode = study, results, metric, mode
        self.ended_by = ended_by
        trials = results._trials
        assert trials is not None
        self._trials = trials

    @property
    def best(self) -> BestTrial:
        """The complete trial with the best score; if none is complete, the best of all trials.

        Raises:
            InvalidValueError: No trial has a score.
        """
        for item, score in self._trials.ranked().items():
            config, value = self.results._items[item], self.results[item]
            return BestTrial(self._trials.numbers[item], config, score, value)
        raise InvalidValueError(
            f"None of the {len(self)} trials has a score. The table (to_frame()) has their errors."
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each trial, the best first: number, state, score, epochs, configuration.

        Then come the columns of `Results.to_frame`. The score has the name of the metric. Complete
        trials come before pruned ones. With a population, `parent` is the trial that the trial took
        over from.
        """
        return best_first(self.results)[0].reset_index(drop=True)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def summary(self) -> str:
        """How many trials ended how, the best score, and why the search ended early, in a line."""
        ended = f"; ended early by stop_when: {self.ended_by}" if self.ended_by else ""
        return f"{len(self)} trials: {self._trials.summary}{ended}"

    def __repr__(self) -> str:
        return f"<SearchResults of {self.summary}>"

    def _repr_html_(self) -> str:
        from raypool.channel.feed import as_html

        return as_html(repr(self), self.to_frame().head(10))


# --- the verb -------------------------------------------------------------------------------------


class SearchOptions(NamedTuple):
    """The arguments of `PoolView.search`, except for the function and the space."""

    metric: str | None
    mode: Literal["max", "min"]
    num_trials: Any
    run_dir: Any
    stop: Any
    stop_when: Until | None
    cancel_grace_s: float | None
    sampler: optuna.samplers.BaseSampler | None
    study: optuna.Study | None
    seed: int | None
    max_in_flight: int | None
    max_failures: int | None
    progress: bool | Callable[..., Any] | None
    name: str | None
    on_report: Callable[[MetricsReport], object] | None
    on_end: Callable[[SearchResults], object] | str | None
    loggers: Sequence[SweepLogger]

    @property
    def score_name(self) -> str:
        """The name of the score in tables."""
        return self.metric or "score"

    def checked(self) -> SearchOptions:
        """Return them with plain counts.

        Raises:
            InvalidTypeError, InvalidValueError: One of them is wrong.
        """
        check_progress(self.progress)
        check_name(self.name)
        check_on_report(self.on_report)
        check_on_end(self.on_end)
        check_loggers(self.loggers)
        check_seconds("cancel_grace_s", self.cancel_grace_s)
        if self.mode not in ("max", "min"):
            raise InvalidValueError(f"mode={self.mode!r} must be 'max' or 'min'.")
        if self.stop_when is not None and not isinstance(self.stop_when, Until):
            raise InvalidTypeError(
                f"stop_when={self.stop_when!r} must be made by search.until(...)."
            )
        if self.stop is not None and self.metric is None:
            raise InvalidValueError(
                "stop= needs metric, the name of the reported value by which running trials are"
                " compared."
            )
        num_trials = self.num_trials
        if isinstance(self.stop, Population):
            if num_trials not in (None, self.stop.size):
                raise InvalidValueError(
                    f"num_trials={num_trials!r} does not fit population(size={self.stop.size})."
                    " Leave num_trials out: trials that take over from others come on top."
                )
            num_trials = self.stop.size
        return self._replace(
            num_trials=checked_count("num_trials", num_trials, least=1),
            seed=optional_count("seed", self.seed, least=0),
            max_in_flight=optional_count("max_in_flight", self.max_in_flight, least=1),
            max_failures=optional_count("max_failures", self.max_failures, least=0),
        )


def run_search(
    view: PoolView,
    fn: Callable[[dict[str, Any]], Any],
    space: Mapping[str, Any],
    wanted: SearchOptions,
    kind: Callable[..., Search] | None = None,
) -> SearchResults:
    """Search on the workers of a view; see `PoolView.search`. `kind` makes another `Search`."""
    __tracebackhide__ = True
    check_installed("search", "pool.search", "optuna")
    check_callable(fn)
    wanted = wanted.checked()
    searched = Space.of(space, wanted.metric)
    target = view._target()
    engine, options = target._engine, target._options
    pauses = isinstance(wanted.stop, (Halving, Population))
    if pauses and wanted.run_dir is None and options.checkpoints is None:
        raise InvalidValueError(
            f"{type(wanted.stop).__name__.lower()}() needs run_dir: trials that wait without a"
            " worker leave their checkpoints there."
        )
    part = functools.partial(run_part, fn, wanted.metric)
    part.__wrapped__ = fn  # type: ignore[attr-defined]  # what setups have set is for this one
    function = engine.function(part)
    function.name = function_name(fn)
    if wanted.seed is None:
        engine.warn_of_generators(fn)
    label = wanted.name or options.name or function.name
    home = None if options.checkpoints is None else (str(options.checkpoints), checkpoint_owner(fn))
    how = LoopOptions(label, options.retry_on, wanted.seed, False, True, [], home)
    spec = options.spec(function.fn_id, target._where(), fail_fast=False)
    if wanted.stop is not None:
        spec = spec._replace(chunk_size=1)
    work = (
        LoopWork(function, (), how)
        if wanted.run_dir is None
        else durable_loop(fn, function, how, wanted.run_dir, "missing")
    )
    del function  # the traceback of an error would keep it in workers
    engine.run_dir = work.run_dir or engine.run_dir
    with EndNotice(wanted.on_end, work) as notice:
        with (
            contextlib.closing(work),
            watched(wanted.progress, label, engine) as display,
            logged(wanted.loggers, work) as log,
        ):
            study = wanted.study or open_study(wanted, work)
            with patient(study, work.run_dir), stoppable(study):
                check_direction(study, wanted.mode)
                if work.run_dir is not None:
                    check_space(work.run_dir, *searched)
                watchers = [watcher for watcher in (log, display) if watcher is not None]
                search = (kind or Search)(engine, work, watchers, wanted, study, searched)

                def results() -> SearchResults:
                    made = search.results()
                    return SearchResults(study, made, wanted.metric, wanted.mode, search.ended_by)

                notice.find_results = results
                search.run(iter(()), spec)
        raise_if_failed(work, search.results(), "collect")
    return results()


class Space(NamedTuple):
    """A search space: distributions of Optuna's, and values that are the same in all trials."""

    distributions: dict[str, Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, space: Any, metric: str | None) -> Space:
        """Check a space of the user's.

        Raises:
            InvalidTypeError, InvalidValueError: It is none.
        """
        import optuna

        if not isinstance(space, Mapping):
            raise InvalidTypeError(
                f"space={space!r} must be a dict of names and ranges, such as"
                ' {"lr": search.log_uniform(1e-5, 1e-1)}.'
            )
        made = cls({}, {})
        for name, value in space.items():
            if not isinstance(name, str):
                raise InvalidTypeError(f"The name {name!r} in space= must be a string.")
            if name == metric:
                raise InvalidValueError(f"{name!r} is both the metric and a name in space=.")
            if isinstance(value, optuna.distributions.BaseDistribution):
                made.distributions[name] = value
                check_choices(getattr(value, "choices", ()))
            elif isinstance(value, STORABLE):
                made.constants[name] = value
            else:
                raise InvalidTypeError(
                    f"space[{name!r}] is {value!r}. Use search.choice(...) for a choice of values,"
                    " search.uniform(low, high) for a range, or a plain value for all trials."
                )
        if not made.distributions:
            raise InvalidValueError("space= has nothing to search: all values in it are fixed.")
        return made

    def config(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a trial."""
        return {**params, **self.constants}

    def perturbed(self, params: dict[str, Any], perturb: Any, random: Random) -> dict[str, Any]:
        """Return new values for these: from the user's function, else by `changed`.

        Raises:
            InvalidValueError: The user's function returned something else.
        """
        known = self.distributions
        if perturb is not None:
            new = perturb(dict(params), random)
        else:
            new = {name: changed(params[name], each, random) for name, each in known.items()}
        if not isinstance(new, Mapping) or new.keys() != known.keys():
            raise InvalidValueError(
                f"perturb= returned {new!r}. Return a dict with {', '.join(params)}."
            )
        return {name: fitted(name, new[name], each) for name, each in known.items()}


def changed(value: Any, distribution: Any, random: Random) -> Any:
    """Return a value near this one, perhaps beyond the range."""
    if hasattr(distribution, "choices"):
        return random.choice(distribution.choices) if random.random() < NEW_CHOICE else value
    change = value * random.choice((-CHANGE, CHANGE))
    # by a step at least: small integers would stay what they are
    return value + math.copysign(max(abs(change), distribution.step or 0), change)


def fitted(name: str, value: Any, distribution: Any) -> Any:
    """Return the value of a distribution that is closest to this one.

    Raises:
        InvalidValueError: There is none.
    """
    if hasattr(distribution, "choices"):
        if value in distribution.choices:
            return value
    elif isinstance(value, numbers.Real) and not math.isnan(value):
        low, high, step = distribution.low, distribution.high, distribution.step
        value = min(max(value, low), high)
        return float(value) if step is None else min(low + round((value - low) / step) * step, high)
    raise InvalidValueError(f"perturb= returned {name}={value!r}, which is not in {distribution}.")


def open_study(wanted: SearchOptions, work: LoopWork) -> optuna.Study:
    """Return a new study in memory, or that of the run's folder."""
    import optuna

    storage = None
    if work.run_dir is not None:
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        # left by a driver that was killed while it wrote; Optuna would wait 30 s for it
        (work.run_dir / f"{STUDY}.lock").unlink(missing_ok=True)
        storage = JournalStorage(JournalFileBackend(str(work.run_dir / STUDY)))
    with quiet_optuna():
        study = optuna.create_study(
            storage=storage,
            study_name=NAME,
            pruner=wanted.stop if isinstance(wanted.stop, optuna.pruners.BasePruner) else None,
            direction="maximize" if wanted.mode == "max" else "minimize",
            load_if_exists=True,
        )
        if study.user_attrs.get(METRIC) != wanted.score_name:  # for reports
            study.set_user_attr(METRIC, wanted.score_name)
    return study


def quiet_optuna() -> contextlib.ExitStack:
    """Let Optuna not announce each study and trial: raypool shows them."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    return undoing(optuna.logging.set_verbosity, before)


def check_direction(study: optuna.Study, mode: str) -> None:
    """Make sure that a study has the wanted direction.

    Raises:
        InvalidValueError: It has the opposite one, or several.
    """
    wanted = "MAXIMIZE" if mode == "max" else "MINIMIZE"
    found = [direction.name for direction in study.directions]
    if found != [wanted]:
        raise InvalidValueError(
            f"mode={mode!r} does not fit the study {study.study_name!r}, whose direction is"
            f" {' and '.join(found).lower()}."
        )


# --- one search -----------------------------------------------------------------------------------


class Search(LoopRun):
    """One search in progress."""

    def __init__(
        self,
        engine: Engine,
        work: LoopWork,
        watchers: Sequence[Watcher],
        options: SearchOptions,
        study: optuna.Study,
        space: Space,
    ) -> None:
        super().__init__(engine, work, watchers, self._judge)
        self.trials: list[Trial] = []  # by the number of their item
        self._options, self._study, self._space = options, study, space
        self._metric, self._stop = options.metric, options.stop
        self._sign = 1.0 if options.mode == "max" else -1.0
        self._rungs: Rungs | Members | None = None
        self._members: Members | None = None
        if isinstance(self._stop, Halving):
            self._rungs = Rungs(self._stop.levels, self._stop.factor)
        elif isinstance(self._stop, Population):
            self._rungs = self._members = Members(self._stop.levels, self._stop.size)
        self._task_id = -1
        self._num_parts = self._num_sent = self._num_ended = 0
        self._num_seen = [0, 0, 0]  # segments, losses and cancelled trials of the loop
        self._last_s = math.inf  # how long the last part took
        self._num_failed = 0
        self._first_error: BaseException | None = None
        self._interrupted: deque[Trial] = deque()  # those of an earlier call that have to go on
        # one thread: a copy of a copy comes after it
        self._copier = ThreadPoolExecutor(1, "raypool-copies")
        self._copies: dict[int, Future[None]] = {}  # the last one from or to a trial's checkpoint
        self._held: list[tuple[Future[None], Trial]] = []  # until its copies are made
        self._waiting: set[int] = set()  # numbers of trials that wait at a rung
        self._early: set[int] = set()  # running trials that were promoted early
        self._has_warned = False  # that a trial repeats epochs
        self._sampler_for: Callable[[int], optuna.samplers.BaseSampler] | None = None
        self._owner = str(work.run_dir)
        self._began_at = time.monotonic()
        self.ended_by = ""  # why `stop_when` has ended it
        self._best, self._num_worse = -math.inf, 0  # the trials since the best one
        self._leader = False, -math.inf, -1  # whether it is complete, how good, and which trial
        # trials that were asked to stop: when, and in which part
        self._asked: deque[tuple[float, Trial, int | None]] = deque()
        if options.stop_when is not None or options.cancel_grace_s is not None:
            self._tick_s = TICK_S
        self._num_pruned: Counter[str] = Counter()  # by what has stopped them
        self._rule = "stop_when"
        if self._stop is not None:
            is_function, kind = callable(self._stop), type(self._stop).__name__
            self._rule = (
                function_name(self._stop) if is_function else kind.removesuffix("Pruner").lower()
            )
        self._choose_sampler()
        work.sent_as = self._sent
        work.may_run_again = lambda index: self.trials[index].handle is not None

    def _choose_sampler(self) -> None:
        """Use the user's sampler, or raypool's choice, seeded for each trial by its number.

        So an interrupted search tries the same configurations as an uninterrupted one, if the
        sampler does not look at results.
        """
        from optuna.samplers import RandomSampler, TPESampler

        seed = self._options.seed
        # with halving most trials never complete, and TPE would learn from the few that do
        kind = TPESampler if self._rungs is None else RandomSampler
        if self._options.sampler is not None:
            self._study.sampler = self._options.sampler
        elif self._options.study is not None:
            pass  # it brings its own
        elif seed is None:
            self._study.sampler = kind()
        else:
            self._sampler_for = lambda number: kind(seed=item_seed(seed, number) % 2**32)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, items: Sequence[Any] | Iterator[Any], spec: TaskSpec) -> Results[Any]:
        """Run all trials."""
        try:
            return super().run(items, spec)
        finally:
            self._copier.shutdown(cancel_futures=True)

    def _feed(self, items: Iterator[Any], spec: TaskSpec) -> None:
        work, driver = self._work, self._driver
        work.take([])
        self._total = self._options.num_trials
        self._task_id = driver.submit(work, spec._replace(size=0, is_open=True))
        with quiet_optuna():
            self._resume()
            while True:
                self._absorb()
                while self._num_running < self._limit and self._start_next():
                    self._absorb()  # inline, it has ended by now
                self._send()
                self._end_early_parts()
                if not self._num_running and work.stopped_by is not None:
                    self.cancel()  # its waiting trials continue in the next call
                    self._wait(lambda: work.is_done)
                    return
                if not self._num_running:
                    break
                self._wait(self._has_work)
                if work.is_done:
                    return
            for trial in self.trials:
                if trial.state == "waiting":
                    trial.stopped_by = "stop_when" if self.ended_by else self._rule
                    self._tell(trial, "pruned")
        if self._members is not None and work.home is not None:
            for trial in self.trials:
                remove_checkpoint(work.home, work.checkpoint_name(trial.index) + KEPT)
        driver.post(ItemsAdded(self._task_id, 0, is_open=False))
        self._raise_if_none_is_good()

    def _has_work(self) -> bool:
        self._cancel_late()
        return self._work.is_done or self._has_news or self._end_early()

    @property
    def _group(self) -> int:
        is_plain = self._stop is None and self._options.seed is None and not self._is_inline
        return GROUP if is_plain and self._last_s < TINY_S else 1

    @property
    def _limit(self) -> int:
        if self._options.max_in_flight is not None:
            return self._options.max_in_flight
        # a short trial would end before the next one has come: that waits in the worker. With a
        # seed, what the sampler knows must not depend on times
        waits = self._last_s < SHORT_S and self._rungs is None and self._options.seed is None
        return max(self._driver.scheduler.workers.size, 1) * (2 * self._group if waits else 1)

    @property
    def _num_running(self) -> int:
        return self._num_parts + len(self._held) - self._num_ended

    @property
    def _num_due(self) -> int:
        """How many running parts the search waits for; trials promoted early are not among them."""
        assert isinstance(self._rungs, Rungs)
        return self._num_running - sum(map(self._rungs.is_early, self._early))

    @property
    def _has_news(self) -> bool:
        work = self._work
        num_ended = len(work.segments) + len(work.lost) + len(work.dropped)
        return num_ended > sum(self._num_seen) or any(copied.done() for copied, _ in self._held)

    def _resume(self) -> None:
        """Take the trials of earlier calls with this folder: told ones count, others continue."""
        for frozen in self._study.get_trials(deepcopy=False) if self._work.run_dir else ():
            # a study of the user's has other trials, too
            if self._options.study is None or frozen.user_attrs.get(OWNER) == self._owner:
                self._take_known(frozen)
        for trial in self.trials:
            self._continue(trial)

    def _continue(self, trial: Trial) -> None:
        """Bring a trial of an earlier call to where it was."""
        if self._members is not None and trial.lineage:
            self._take_over(trial, self._members)
        kept = self._work.restored.get(trial.index)
        reports = [report_of_row(row) for row in self._work.earlier_reports(trial.index)]
        reported_at = reports[-1].time.timestamp() if reports else -math.inf
        self._replay(trial, reports)
        if kept is not None and (
            isinstance(kept.error, POOL_ENDED) or self._has_gone_on(trial, kept.row, reported_at)
        ):
            kept = None
        is_interrupted = trial.state == "running" and kept is None
        if self._rungs is not None:
            self._place(trial, self._rungs, is_interrupted=is_interrupted)
        saved_at = None
        if is_interrupted and self._work.home is not None:
            saved_at = checkpoint_time(self._work.home, self._work.checkpoint_name(trial.index))
            trial.is_again = saved_at is not None
        if saved_at is not None and self._has_paused(trial, saved_at, reported_at):
            self._end_part(trial, None, None)
        elif is_interrupted:
            self._interrupted.append(trial)
        elif trial.state == "running" and kept is not None:
            self._end_part(trial, kept.value, kept.error)
        elif kept is not None and kept.error is None:
            self._recall(trial, kept.value)

    def _recall(self, trial: Trial, value: Any) -> None:
        """Let a trial that Optuna was told of in an earlier call count."""
        if trial.score is None or not math.isfinite(trial.score):
            trial.score = self._score(value, trial)
        if trial.score is not None:
            self._note_score(trial.score)
            self._note_best(trial, trial.score)

    def _has_paused(self, trial: Trial, saved_at: float, reported_at: float) -> bool:
        """Whether an interrupted trial saved a checkpoint after the last epoch before a rung."""
        if self._rungs is None or trial.score is None:
            return False
        return trial.until == trial.epochs < self._rungs.levels[-1] and saved_at > reported_at

    def _has_gone_on(self, trial: Trial, row: Row, reported_at: float) -> bool:
        """Whether another part of a trial of an earlier call began after this outcome."""
        # its reports may be lost: those of a killed process are written a little later
        is_promoted = trial.rung > 0 and trial.state == "running"
        if is_promoted and self._rungs and trial.epochs < self._rungs.levels[trial.rung]:
            return True
        if row.started_at is None or row.duration_s is None:
            return False
        return row.started_at + row.duration_s < reported_at

    def _replay(self, trial: Trial, reports: list[MetricsReport]) -> None:
        """Note earlier reports of a trial, and its scores at the rungs that it reached."""
        levels = self._rungs.levels if self._rungs is not None else []
        told = trial.score
        for report in reports:
            value = self._note_report(report)
            if value is not None:
                num_reached = bisect(levels, trial.epochs) - len(trial.at_rungs)
                trial.at_rungs += [self._good(value)] * num_reached
        if told is not None:  # a cancelled trial may have reported more after it was told
            trial.score, trial.epochs = told, trial.noted_epochs

    @staticmethod
    def _place(trial: Trial, rungs: Rungs | Members, *, is_interrupted: bool) -> None:
        """Find the rung of a trial of an earlier call, and compare others with it at those below.

        An interrupted part ends at the next rung; it may have been about to end at this one.
        """
        levels, epochs = rungs.levels, trial.epochs
        rung = bisect_left(levels, epochs) if is_interrupted else bisect(levels, epochs) - 1
        trial.rung = max(trial.rung, min(rung, len(levels) - 1))
        trial.until = levels[trial.rung]
        last = trial.at_rungs[-1] if trial.at_rungs else -math.inf
        trial.at_rungs += [last] * (trial.rung - len(trial.at_rungs))  # whose reports are lost
        for rung, score in enumerate(trial.at_rungs):
            if trial.state != "running" or rung < trial.rung:
                rungs.reach(trial.index, rung, score, is_waiting=False)

    def _take_known(self, frozen: optuna.trial.FrozenTrial) -> Trial:
        import optuna

        # private, but there is no other way to the handle of a trial
        handle = optuna.trial.Trial(self._study, frozen._trial_id)
        params, is_told = frozen.params, frozen.state.is_finished()
        if not is_told:  # its process may have died in the middle of the suggestions
            params = {
                name: handle._suggest(name, each)
                for name, each in self._space.distributions.items()
            }
        trial = self._add(handle, params)
        trial.noted_epochs = max(frozen.intermediate_values, default=0)
        trial.lineage = frozen.user_attrs.get(PARENT, ())
        trial.rung = frozen.user_attrs.get(RUNG, 0)
        if is_told:
            trial.state, trial.handle = STATES[frozen.state.name], None
            if frozen.value is not None and math.isfinite(frozen.value):
                trial.score = frozen.value
            if trial.state == "pruned":
                self._num_pruned[self._rule] += 1
            elif trial.state == "failed" and self._members is not None:
                self._members.leave(trial.index)
        return trial

    def _start_next(self) -> bool:
        """Start a trial, or the next part of one; False if there is none."""
        if self._end_early() or self.ended_by or self._work.stopped_by is not None:
            return False
        if self._interrupted:
            trial = self._interrupted.popleft()
        elif self._rungs is not None and (promoted := self._rungs.promote()) is not None:
            trial = self.trials[promoted[0]]
            if self._members is not None:
                trial = self._select(trial, self._members)
            if trial.state == "waiting":  # else it is new, and may begin at a higher rung
                self._leave_rung(trial, promoted[1])
        elif self._num_missing > 0:
            trial = self._ask()
        elif (early := self._promote_early()) is not None:
            trial = early
        else:
            return False
        if self._rungs is not None:
            trial.until = self._rungs.levels[trial.rung]
        if (copied := self._copies.pop(trial.index, None)) is None:
            self._begin(trial)
        else:
            self._held.append((copied, trial))
        return True

    def _promote_early(self) -> Trial | None:
        """Let a trial continue that would wait while a worker is idle; None: there is none."""
        if not isinstance(self._rungs, Rungs) or not self._num_due:
            return None
        if (promoted := self._rungs.promote_early()) is None:
            return None
        trial = self.trials[promoted[0]]
        self._leave_rung(trial, promoted[1])
        self._early.add(trial.index)
        return trial

    def _leave_rung(self, trial: Trial, rung: int) -> None:
        trial.rung, trial.state = rung, "running"
        self._waiting.discard(trial.number)

    def _end_early_parts(self) -> None:
        """Cancel the trials that were promoted early, once nothing else is left to do."""
        if not self._early or self._num_due or self._work.stopped_by is not None:
            return
        for index in self._early:
            trial = self.trials[index]
            if not trial.stopped_by:
                trial.stopped_by = self._rule
                self._cancel_trial(trial)

    def _begin(self, trial: Trial) -> None:
        """Queue the next part of a trial."""
        if self._work.run_dir is not None and trial.handle is not None and trial.rung > 0:
            trial.handle.set_user_attr(RUNG, trial.rung)  # before it changes its checkpoint
        has_run = trial.part is not None or trial.index in self._work.restored
        trial.part = self._num_parts
        self._num_parts += 1
        self._work.queue(trial.index, has_run=has_run)
        if self._num_parts - self._num_sent >= self._group:
            self._send()

    def _ask(self) -> Trial:
        """Return a new trial that Optuna suggests."""
        if self._sampler_for is not None:
            self._study.sampler = self._sampler_for(len(self.trials))
        with self._study._storage.showing(self._waiting):  # type: ignore[attr-defined]
            handle = self._study.ask(self._space.distributions)
        if self._options.study is not None and self._work.run_dir is not None:
            handle.set_user_attr(OWNER, self._owner)
        return self._add(handle, handle.params)

    @property
    def _num_missing(self) -> int:
        if self._members is not None:
            return self._members.num_missing
        if self._study._stop_flag:  # the sampler has nothing more to suggest
            return 0
        return int(self._options.num_trials) - len(self.trials)

    def _send(self) -> None:
        if self._num_sent < self._num_parts:
            added, self._num_sent = self._num_parts - self._num_sent, self._num_parts
            self._driver.post(ItemsAdded(self._task_id, added, is_open=True))
            # the sampler computes next: else the driver would wait for Python's lock meanwhile
            time.sleep(0)

    def _end_early(self) -> bool:
        """End the search, once, if `stop_when` says so; return whether this was the moment."""
        when = self._options.stop_when
        if when is None or self.ended_by:
            return False
        why = ""
        if when.seconds is not None and time.monotonic() - self._began_at >= when.seconds:
            why = f"{when.seconds:g} s have passed"
        elif when.score is not None and self._best >= self._sign * when.score:
            why = f"score {when.score:g} is reached"
        elif when.patience is not None and self._num_worse >= when.patience:
            why = f"{when.patience} trials without a new best score"
        if not why:
            return False
        unended = [trial for trial in self.trials if trial.state in ("running", "waiting")]
        if self._num_missing <= 0 and not unended:
            return False  # all have run
        self.ended_by = why
        logger.info("%s ends after %d trials: %s.", self._work.label, len(self.trials), why)
        for trial in unended:
            if trial.state == "running" and trial.part is not None and not trial.stopped_by:
                self._stop_trial(trial, "stop_when")
        return True

    def _add(self, handle: optuna.trial.Trial, params: dict[str, Any]) -> Trial:
        config = self._space.config(params)
        trial = Trial(len(self.trials), handle.number, handle, config)
        self.trials.append(trial)
        self._work.append(config)
        if self._members is not None:
            self._members.join(trial.index)
        return trial

    def _sent(self, index: int) -> TrialPart:
        trial = self.trials[index]
        is_again = trial.is_again or trial.epochs >= trial.until
        return TrialPart(trial.config, trial.until, trial.num_reports, trial.epochs, is_again)

    def _show(self) -> None:
        _, good, number = self._leader
        parts = [f"{count:,} pruned by {why}" for why, count in self._num_pruned.items()]
        if good > -math.inf:
            name = self._options.score_name
            parts.insert(0, f"best {name}={self._sign * good:.4g} (trial {number})")
        if self.ended_by:
            parts.append(f"ended by stop_when: {self.ended_by}")
        self._work.about = [", ".join(parts)]
        if self._rungs is not None:
            self._work.about.append(self._rungs.summary)
        super()._show()

    def results(self) -> Results[Any]:
        """Join the results that have arrived so far, and how the trials have ended."""
        made, trials = super().results(), self.trials
        trials = trials[: len(made)]  # after Ctrl-C in `_add`
        made._trials = Trials(
            self._options.score_name,
            self._options.mode,
            [trial.number for trial in trials],
            [trial.state for trial in trials],
            [trial.score for trial in trials],
            [trial.epochs for trial in trials],
            [trial.lineage[0] if trial.lineage else None for trial in trials]
            if self._members is not None
            else (),
        )
        return made

    # --- for those who watch ----------------------------------------------------------------------

    def act(self, request: Request) -> str | None:
        """Carry out what a watcher asks for; see `LoopRun.act`."""
        item = request.item
        if request.action in ("rerun", "first"):
            return "a search chooses by itself which trial runs next"
        if item is not None and item < len(self.trials) and self.trials[item].state == "waiting":
            return f"trial {self.trials[item].number} waits at a rung"
        return super().act(request)

    def _stop_all(self, task_id: int) -> None:
        """Do nothing: the search starts no other trial, and ends with the last running one."""

    def _stop_item(self, item: int, task_id: int, share: CallItems) -> None:
        self.trials[item].stopped_by = "a watcher"
        super()._stop_item(item, task_id, share)

    # --- a population -----------------------------------------------------------------------------

    def _select(self, trial: Trial, members: Members) -> Trial:
        """Return a member that continues, or the new trial in its place."""
        from optuna.trial import TrialState, create_trial

        parents = members.parents(trial.index)
        if not parents:
            if members.keep(trial.index):
                copy = self._work.checkpoint_name(trial.index) + KEPT
                self._copy_checkpoint(trial, trial.rung, copy, trial)
            return trial
        seed, study, space = self._options.seed, self._study, self._space
        random = Random(None if seed is None else item_seed(seed, len(self.trials)))
        parent = self.trials[random.choice(parents)]
        params = {name: parent.config[name] for name in space.distributions}
        made = create_trial(
            state=TrialState.RUNNING,
            params=space.perturbed(params, self._stop.perturb, random),
            distributions=space.distributions,
            user_attrs={
                PARENT: [parent.number, trial.number, members.rung(parent.index)],
                OWNER: self._owner,
            },
        )
        # private: the public ways take several steps, or may return a trial that a user enqueued
        trial_id = study._storage.create_new_trial(study._study_id, template_trial=made)
        child = self._take_known(study._storage.get_trial(trial_id))
        self._take_over(child, members)
        return child

    def _take_over(self, child: Trial, members: Members) -> None:
        """Put a new trial in a member's place; in a later call, finish what was interrupted."""
        parent_number, replaced_number, rung = child.lineage
        trials = {trial.number: trial for trial in self.trials}
        parent, replaced = trials[parent_number], trials[replaced_number]
        child.rung = max(child.rung, rung + 1)
        child.at_rungs = members.replace(replaced.index, child.index, parent.index, rung)
        child.epochs = child.num_reports = members.levels[rung]
        self._total = len(self.trials)
        name = self._work.checkpoint_name(child.index)
        assert self._work.home is not None
        if child.state == "running" and checkpoint_time(self._work.home, name) is None:
            self._copy_checkpoint(parent, rung, name, child)
        if replaced.state == "waiting":
            self._tell(replaced, "pruned")

    def _copy_checkpoint(self, trial: Trial, rung: int, copy: str, for_trial: Trial) -> None:
        """Copy the checkpoint that a trial had when it waited at a rung, in another thread."""
        name = self._work.checkpoint_name(trial.index)
        if trial.state != "waiting" or trial.rung != rung:
            name += KEPT  # it has gone on since
        if self._is_inline:
            self._copy(trial, name, copy)
            return
        copied = self._copier.submit(self._copy, trial, name, copy)
        self._copies[trial.index] = self._copies[for_trial.index] = copied
        copied.add_done_callback(lambda _: self._wake())

    def _copy(self, trial: Trial, name: str, copy: str) -> None:
        home = self._work.home
        assert home is not None
        if checkpoint_time(home, name) is None:
            raise InvalidValueError(
                f"Trial {trial.number} of {self._work.label} left no checkpoint after"
                f" {trial.epochs} epochs, so that no other trial can continue from it. Call"
                " save_checkpoint(...) before it returns."
            )
        copy_checkpoint(home, name, copy)

    # --- what arrives -----------------------------------------------------------------------------

    def _judge(self, report: MetricsReport) -> None:
        trial = self.trials[report.item]
        # after it was cancelled and told, its last reports may still come
        value = self._note_report(report) if trial.state == "running" else None
        if value is not None and not self._has_warned:
            self._warn_of_repeats(trial, report.metrics)
        if trial.epochs == trial.until:
            self._work.write_reports()  # before it saves the checkpoint at which it pauses
        if value is not None and not trial.stopped_by:
            self._stop_if_hopeless(trial, value, report.metrics)
            self._end_early()
        if self._options.on_report is not None:
            self._options.on_report(report)

    def _warn_of_repeats(self, trial: Trial, metrics: dict[str, Any]) -> None:
        if self._rungs is None or trial.rung == 0 or trial.is_again:
            return
        paused_after = int(self._rungs.levels[trial.rung - 1])
        if epochs_of(metrics, paused_after + 1) <= paused_after:
            self._has_warned = True
            logger.warning(
                "Trial %d of %s paused after epoch %d and now reports epoch %d: it trains these"
                " epochs again. Call save_checkpoint(...) when current_task().should_stop is true,"
                " and start from load_checkpoint().",
                trial.number,
                self._work.label,
                paused_after - 1,
                metrics["epoch"],
            )

    def _note_report(self, report: MetricsReport) -> float | None:
        trial = self.trials[report.item]
        value = report.metrics.get(self._metric) if self._metric is not None else None
        if (score := score_of(value)) is None:
            return None
        trial.num_reports += 1
        epochs = epochs_of(report.metrics, trial.num_reports)
        # an attempt after a lost worker repeats epochs
        trial.epochs = max(trial.epochs, epochs)
        trial.score = score
        return score

    def _stop_if_hopeless(self, trial: Trial, value: float, metrics: dict[str, Any]) -> None:
        import optuna

        if self._stop is None or self._rungs is not None:
            return
        if isinstance(self._stop, optuna.pruners.BasePruner):
            is_hopeless = self._pass_to_study(trial, value).should_prune()
        else:
            is_hopeless = bool(self._stop(metrics))
        if is_hopeless:
            self._stop_trial(trial, self._rule)

    def _stop_trial(self, trial: Trial, why: str) -> None:
        trial.stopped_by = why
        if self._options.cancel_grace_s is not None:
            self._asked.append((time.monotonic(), trial, trial.part))
        self._ask_to_stop(trial)

    def _ask_to_stop(self, trial: Trial) -> None:
        if not self._is_inline:
            self._driver.post(StopRequested(self._task_id, trial.part))
        elif (note := note_here()) is not None:  # this is the trial's own thread
            note.should_stop = True

    def _cancel_late(self) -> None:
        """Cancel trials that still run some time after they were asked to stop."""
        until = time.monotonic() - (self._options.cancel_grace_s or 0.0)
        while self._asked and self._asked[0][0] <= until:
            _, trial, part = self._asked.popleft()
            if trial.state == "running" and trial.part == part:
                self._cancel_trial(trial)

    def _cancel_trial(self, trial: Trial) -> None:
        self._driver.post(CancelRequested(self._task_id, trial.part))

    def _absorb(self) -> None:
        """Process the parts that have ended, and begin those whose copies are there."""
        work = self._work
        self._begin_held()
        while self._num_seen[0] < len(work.segments):
            piece, result, _ = work.segments[self._num_seen[0]]
            self._num_seen[0] += 1
            if result.catch_up is not None:
                result.catch_up()  # its last reports may still be on their way
            self._pass_reports_on()
            if work.interrupt is not None:  # Ctrl-C, inline: the trial has not failed
                raise work.interrupt
            self._last_s = result.durations_s[piece.start - result.start]
            values = result.values_of(piece.start, piece.stop)
            for index, value in zip(work.numbers(piece), values, strict=True):
                work_error = work.errors.get(index)
                if type(value) is Missing:
                    work_error = value.error
                self._end_part(self.trials[index], value, work_error)
        while self._num_seen[1] < len(work.lost):
            lost = work.lost[self._num_seen[1]]
            self._num_seen[1] += 1
            for index in work.numbers(lost.items):
                self._end_part(self.trials[index], None, lost.error)
        for part in work.dropped[self._num_seen[2] :]:
            self._num_seen[2] += 1
            self._note_cancelled(part)

    def _begin_held(self) -> None:
        for copied, trial in [held for held in self._held if held[0].done()]:
            self._held.remove((copied, trial))
            copied.result()
            if self.ended_by or self._work.stopped_by is not None:
                trial.state = "waiting"
            else:
                self._begin(trial)

    def _note_cancelled(self, part: int) -> None:
        self._pass_reports_on()
        (index,) = self._work.numbers(Slice(self._task_id, part, part + 1, 1))
        trial = self.trials[index]
        if trial.stopped_by:
            self._end_part(trial, None, None, is_cancelled=True)
            return
        self._num_ended += 1
        self._early.discard(index)
        trial.state = "unfinished"
        if self._members is not None:
            self._members.leave(index)

    def _end_part(
        self, trial: Trial, value: Any, error: BaseException | None, is_cancelled: bool = False
    ) -> None:
        self._num_ended += trial.part is not None  # else it is of an earlier call
        trial.is_again = False
        if trial.index in self._early:
            self._early.remove(trial.index)
            if not is_cancelled and trial.stopped_by == self._rule:  # it ended by itself before
                trial.stopped_by = ""
        if isinstance(error, POOL_ENDED):
            raise error
        if error is not None:
            self._first_error = self._first_error or error
            self._tell(trial, "failed")
            most = self._options.max_failures
            if most is not None and self._num_failed > most:
                add_note(
                    self._first_error,
                    f"raypool: {self._num_failed} trials failed, more than max_failures={most}.",
                )
                raise self._first_error
            return
        trial.score = self._score(value, trial)
        if trial.score is None:
            if trial.stopped_by:  # by `stop_when`, before its first report
                self._tell(trial, "pruned")
            else:
                self._note_missing(trial, value)
            return
        good = self._note_score(trial.score)
        # else it has ended by itself, perhaps without a report: its checkpoint was that far
        is_there = trial.until <= trial.epochs and not is_cancelled
        if self._rungs is not None and is_there and trial.epochs < self._rungs.levels[-1]:
            trial.state = "waiting"
            self._waiting.add(trial.number)
            self._pass_to_study(trial, self._sign * good)
            self._rungs.reach(trial.index, trial.rung, good)
        else:
            if isinstance(self._rungs, Rungs) and is_there:
                self._rungs.reach(trial.index, trial.rung, good, is_waiting=False)
            self._tell(trial, "pruned" if trial.stopped_by else "complete")
        self._note_best(trial, trial.score)

    def _note_best(self, trial: Trial, score: float) -> None:
        found = trial.state == "complete", self._good(score)
        if found > self._leader[:2]:  # a score after a few epochs is no match
            self._leader = (*found, trial.number)

    def _note_score(self, score: float) -> float:
        """Compare the score of a part with the best one so far; return it as `_good` does."""
        good = self._good(score)
        self._num_worse = 0 if good > self._best else self._num_worse + 1
        self._best = max(self._best, good)
        return good

    def _good(self, score: float) -> float:
        """Return a score of which more is better; NaN and infinity are the worst."""
        return self._sign * score if math.isfinite(score) else -math.inf

    def _score(self, value: Any, trial: Trial) -> float | None:
        """Return the score of a part: what its function returned, else what it reported last."""
        own = value.get(self._metric) if isinstance(value, Mapping) else None
        if own is None and (self._metric is None or trial.score is None):
            own = value
        score = score_of(own)
        return trial.score if score is None else score

    def _tell(self, trial: Trial, state: str) -> None:
        """Tell Optuna how a trial has ended."""
        from optuna.trial import TrialState

        trial.state = state
        tell = functools.partial(self._study.tell, trial.number, skip_if_finished=True)
        if state == "pruned":
            self._num_pruned[trial.stopped_by or self._rule] += 1
        if state == "failed":
            self._num_failed += 1
            if self._members is not None:
                self._members.leave(trial.index)
            tell(state=TrialState.FAIL)
        elif (score := trial.score) is None:  # it was stopped before its first report
            tell(state=TrialState.PRUNED)
        else:
            if not math.isfinite(score):
                logger.warning(
                    "Trial %d has the score %s, which counts as the worst.", trial.number, score
                )
                score = -self._sign * math.inf
            self._pass_to_study(trial, score)  # Optuna takes it for the score of a pruned trial
            if state == "pruned":
                tell(state=TrialState.PRUNED)
            else:
                tell(score)
        trial.handle = None

    def _pass_to_study(self, trial: Trial, score: float) -> optuna.trial.Trial:
        """Note the score in the study, as that of the trial's epoch; return the trial's handle."""
        assert trial.handle is not None
        if trial.epochs > trial.noted_epochs:  # Optuna takes one score for each
            trial.noted_epochs = trial.epochs
            trial.handle.report(score, step=trial.epochs)
        return trial.handle

    # --- failures ---------------------------------------------------------------------------------

    def _note_missing(self, trial: Trial, value: Any) -> None:
        self._tell(trial, "failed")
        own = value.get(self._metric) if isinstance(value, Mapping) else None
        if self._metric is None:
            what = f"returned {value!r}, which is not a number"
        elif own is None:
            what = f"neither reported nor returned {self._metric!r}"
        else:
            what = f"returned {own!r} as {self._metric!r}, which is not a number"
        error = InvalidValueError(f"Trial {trial.number} of {self._work.label} {what}.")
        if not any(each.state == "complete" or each.score is not None for each in self.trials):
            raise error
        logger.warning("%s It counts as failed.", error)

    def _raise_if_none_is_good(self) -> None:
        if self._first_error is not None and self._num_failed == len(self.trials):
            add_note(self._first_error, f"raypool: all {len(self.trials)} trials failed.")
            raise self._first_error
