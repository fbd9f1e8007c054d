"""`pool.search`: a loop whose items are trials, added one by one as Optuna suggests them.

A trial is an item of the loop. It may run in several parts: at a rung it returns, and if it is
promoted the same item runs again, from its checkpoint. `Search` decides in the thread that waits
for the loop, where reports and results arrive.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raypool.channel.feed import MetricsReport, report_of_row
from raypool.channel.records import Missing, function_name
from raypool.core.messages import CancelRequested, ItemsAdded, StopRequested
from raypool.core.model import Slice, TaskSpec
from raypool.engine.engine import Engine
from raypool.engine.loop import CallItems, LoopOptions, LoopWork, Restored
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
from raypool.journal.trials import Trials
from raypool.loggers import SweepLogger, check_loggers
from raypool.options import Options, check_callable, check_name, checked_seconds
from raypool.parallel_for import (
    TICK_S,
    EndNotice,
    LoopRun,
    Watcher,
    check_on_end,
    check_on_report,
    check_progress,
    checkpoint_owner,
    logged,
    new_loop,
    raise_if_failed,
    watched,
)
from raypool.results import Results, best_first, direction
from raypool.search import Halving, Population, Until
from raypool.search.parts import TrialPart, epochs_of, run_part
from raypool.search.resume import has_gone_on, has_paused, place, replay, reports_before, waited
from raypool.search.rungs import Members, Rungs
from raypool.search.space import Space, check_space
from raypool.search.study import (
    Trial,
    TrialStudy,
    check_direction,
    check_metric,
    open_study,
    patient,
    pruned_by,
    quiet_optuna,
    stoppable,
)
from raypool.worker.folders import checkpoint_time, copy_checkpoint, remove_checkpoint
from raypool.worker.running import item_seed, note_here

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

BEGINS = 0
"""In place of a report's attempt: a part of the trial begins, perhaps not for the first time."""


# --- what a search returns ------------------------------------------------------------------------


class BestTrial(NamedTuple):
    """The best trial of a search: its number, its configuration, its score and its value.

    A trial that was cancelled has the value of its last part that ended, and its last score.
    """

    number: int
    config: dict[str, Any]
    score: float
    value: Any


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
            f"None of the {len(self)} trials has a finite score. to_frame() shows the score and"
            " error of each."
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each trial, the best first: number, state, score, epochs, configuration.

        Then come the columns of `Results.to_frame`. The score has the name of the metric, or is in
        "score_NAME" if that is another column's. Complete trials come before pruned ones. With a
        population, `parent` is the trial that the trial took over from.
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
    mode: Any
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

    @property
    def pruner(self) -> optuna.pruners.BasePruner | None:
        """Optuna's pruner that stops trials; None: something else does, or nothing."""
        import optuna

        return self.stop if isinstance(self.stop, optuna.pruners.BasePruner) else None

    def checked(self) -> SearchOptions:
        """Return them with a definite mode, and plain counts.

        Raises:
            InvalidTypeError, InvalidValueError: One of them is wrong.
        """
        check_progress(self.progress)
        check_name(self.name)
        check_on_report(self.on_report)
        check_on_end(self.on_end)
        check_loggers(self.loggers)
        cancel_grace_s = checked_seconds("cancel_grace_s", self.cancel_grace_s)
        self._check_kinds()
        mode = self.mode
        if mode is None and self.study is not None:
            mode = "min" if self.study.directions[0].name == "MINIMIZE" else "max"
        elif mode is None:
            mode = "max" if self.metric is None else direction(self.metric)
        if mode not in ("max", "min"):
            raise InvalidValueError(f"mode={mode!r} must be 'max' or 'min'.")
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
            mode=mode,
            num_trials=checked_count("num_trials", num_trials, least=1),
            seed=optional_count("seed", self.seed, least=0),
            max_in_flight=optional_count("max_in_flight", self.max_in_flight, least=1),
            max_failures=optional_count("max_failures", self.max_failures, least=0),
            cancel_grace_s=cancel_grace_s,
        )

    def _check_kinds(self) -> None:
        import optuna

        if self.study is not None and not isinstance(self.study, optuna.Study):
            raise InvalidTypeError(f"study={self.study!r} must be a study of Optuna's.")
        base = optuna.samplers.BaseSampler
        if self.sampler is not None and not isinstance(self.sampler, base):
            raise InvalidTypeError(
                f"sampler={self.sampler!r} must be a sampler of Optuna's, such as"
                " optuna.samplers.TPESampler()."
            )
        if self.stop_when is not None and not isinstance(self.stop_when, Until):
            raise InvalidTypeError(
                f"stop_when={self.stop_when!r} must be made by search.until(...)."
            )
        rules = Halving, Population, optuna.pruners.BasePruner, type(None)
        # `search.median`, say, makes a rule and is none
        is_maker = getattr(self.stop, "__module__", None) == Halving.__module__
        is_function = callable(self.stop) and not isinstance(self.stop, type) and not is_maker
        if not (isinstance(self.stop, rules) or is_function):
            raise InvalidTypeError(
                f"stop={self.stop!r} must be search.median(), search.halving(...),"
                " search.population(...), a pruner of Optuna's, such as"
                " optuna.pruners.MedianPruner(), or a function of the reported metrics."
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
    if wanted.seed is not None and engine.profile.backend == "threads":
        wanted = wanted._replace(max_in_flight=1)  # its trials take turns, as items of `parfor` do
    pauses = isinstance(wanted.stop, (Halving, Population))
    if pauses and wanted.run_dir is None and options.checkpoints is None:
        raise InvalidValueError(
            f"{type(wanted.stop).__name__.lower()}() needs run_dir: trials that wait without a"
            " worker leave their checkpoints there."
        )
    if isinstance(wanted.stop, Halving):
        warn_of_few(wanted.stop, wanted.num_trials)
    where = target._where()  # first: what it raises leaves no folder in use
    work = search_work(engine, options, fn, wanted)
    spec = options.spec(work.function.fn_id, where, fail_fast=False)
    if wanted.stop is not None or wanted.stop_when is not None:
        spec = spec._replace(chunk_size=1)  # nobody can stop the second of a call before it begins
    view._engine.run_dir = work.run_dir or view._engine.run_dir
    with EndNotice(wanted.on_end, work) as notice:
        with (
            contextlib.closing(work),
            watched(wanted.progress, work.label, engine) as display,
            logged(wanted.loggers, work) as log,
        ):
            is_shared = wanted.study is not None
            study = wanted.study or open_study(work.run_dir, wanted.mode, wanted.pruner)
            with (
                patient(study, work.run_dir),
                stoppable(study),
                pruned_by(study, wanted.pruner),
            ):
                check_direction(study, wanted.mode)
                if work.run_dir is not None:
                    check_space(work.run_dir, *searched)
                check_metric(study, wanted.score_name, work.run_dir, is_shared=is_shared)
                watchers = [watcher for watcher in (log, display) if watcher is not None]
                search = (kind or Search)(target, work, watchers, wanted, study, searched)

                def results() -> SearchResults:
                    made = search.results()
                    return SearchResults(study, made, wanted.metric, wanted.mode, search.ended_by)

                notice.find_results = results
                search.run(iter(()), spec)
        raise_if_failed(work, search.results(), "collect")
    return results()


def warn_of_few(stop: Halving, num_trials: int) -> None:
    """Warn of a search that may train no trial to the end."""
    num_rungs = len(stop.levels) - 1
    if num_trials < (enough := stop.factor**num_rungs):
        logger.warning(
            "halving() may train none of %d trials to the end: it compares them %d times, and 1 of"
            " %d continues each time. Use at least %d trials, or a larger min_epochs.",
            num_trials,
            num_rungs,
            stop.factor,
            enough,
        )


# --- checkpoints of a population ------------------------------------------------------------------


class CheckpointCopies:
    """Copies of checkpoints, made in another thread; trials are held until theirs is there."""

    def __init__(self, is_inline: bool, wake: Callable[[], None]) -> None:
        self._is_inline, self._wake = is_inline, wake
        # one thread: a copy of a copy comes after it
        self._thread = ThreadPoolExecutor(1, "raypool-copies")
        self._newest: dict[int, Future[None]] = {}  # from or to the checkpoint of a trial
        self._held: list[tuple[Future[None], Trial]] = []

    @property
    def num_held(self) -> int:
        """How many trials are held."""
        return len(self._held)

    @property
    def has_news(self) -> bool:
        """Whether a held trial may begin."""
        return any(copied.done() for copied, _ in self._held)

    def make(self, copy: Callable[[], None], *trials: int) -> None:
        """Make a copy, which these trials wait for."""
        if self._is_inline:
            copy()
            return
        copied = self._thread.submit(copy)
        self._newest |= dict.fromkeys(trials, copied)
        copied.add_done_callback(lambda _: self._wake())

    def hold(self, trial: Trial) -> bool:
        """Hold a trial that is about to begin, if it has to wait; return whether it has."""
        if (copied := self._newest.pop(trial.index, None)) is None:
            return False
        self._held.append((copied, trial))
        return True

    def take_ready(self) -> Iterator[Trial]:
        """Find the held trials that may begin; raise the error of a copy that failed."""
        for copied, trial in [held for held in self._held if held[0].done()]:
            self._held.remove((copied, trial))
            copied.result()
            yield trial

    def close(self) -> None:
        """Make no further copies."""
        self._thread.shutdown(cancel_futures=True)


def search_work(
    engine: Engine, options: Options, fn: Callable[[Any], Any], wanted: SearchOptions
) -> LoopWork:
    """Return the loop of a search, without items."""
    part = functools.partial(run_part, fn, wanted.metric)
    part.__wrapped__ = fn  # type: ignore[attr-defined]  # what setups have set is for this one
    function = engine.function(part)
    function.name = function_name(fn)
    if wanted.seed is None:
        engine.warn_of_generators(fn)
    label = wanted.name or options.name or function.name
    home = None if options.checkpoints is None else (str(options.checkpoints), checkpoint_owner(fn))
    how = LoopOptions(label, options.retry_on, wanted.seed, False, True, [], home)
    work = new_loop(fn, function, how, wanted.run_dir, "missing")
    work.can_rerun = False
    return work


# --- one search -----------------------------------------------------------------------------------


class Search(LoopRun):
    """One search in progress."""

    def __init__(
        self,
        view: PoolView,
        work: LoopWork,
        watchers: Sequence[Watcher],
        options: SearchOptions,
        study: optuna.Study,
        space: Space,
    ) -> None:
        from optuna.samplers import RandomSampler, TPESampler

        super().__init__(view._engine, work, watchers, self._judge)
        self._view = view
        self._study = TrialStudy(
            study,
            space,
            options.metric,
            options.mode,
            run_dir=work.run_dir,
            is_shared=options.study is not None,
        )
        self.trials = self._study.trials
        self._options, self._space = options, space
        self._metric, self._stop = options.metric, options.stop
        self._rungs: Rungs | Members | None = None
        self._members: Members | None = None
        if isinstance(self._stop, Halving):
            self._rungs = Rungs(self._stop.levels, self._stop.factor)
        elif isinstance(self._stop, Population):
            self._rungs = self._members = Members(self._stop.levels, self._stop.size)
        self._levels = self._rungs.levels if self._rungs is not None else []
        self._task_id = -1
        self._num_parts = self._num_sent = self._num_ended = 0
        self._num_seen = [0, 0, 0]  # segments, losses and cancelled trials of the loop
        self._last_s = math.inf  # how long the last part took
        self._first_error: BaseException | None = None
        self._interrupted: deque[Trial] = deque()  # those of an earlier call that have to go on
        self._copies = CheckpointCopies(self._is_inline, self._wake)
        self._early: set[int] = set()  # running trials that were promoted early
        self._is_score_reached = False  # that of `stop_when`
        self._has_warned = False  # that a trial repeats epochs
        self._began_at = time.monotonic()
        self.ended_by = ""  # why `stop_when` has ended it
        # trials that were asked to stop: when, and in which part
        self._asked: deque[tuple[float, Trial, int | None]] = deque()
        if options.stop_when is not None or options.cancel_grace_s is not None:
            self._tick_s = TICK_S
        self._rule = "stop_when"
        if self._stop is not None:
            is_function, kind = callable(self._stop), type(self._stop).__name__
            self._rule = (
                function_name(self._stop) if is_function else kind.removesuffix("Pruner").lower()
            )
        # with halving most trials never complete, and TPE would learn from the few that do
        sampler = TPESampler if self._rungs is None else RandomSampler
        self._study.choose_sampler(options.sampler, sampler, options.seed)
        work.sent_as = self._sent
        work.may_run_again = lambda index: self.trials[index].handle is not None
        work.is_pruned = lambda index: self.trials[index].state == "pruned"

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, items: Sequence[Any] | Iterator[Any], spec: TaskSpec) -> Results[Any]:
        """Run all trials."""
        try:
            return super().run(items, spec)
        finally:
            self._copies.close()
            del self._view  # the results hold this search, which must not keep a forgotten pool

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
        # only members of a running population begin at these copies
        if self._members is not None and work.home is not None:
            for trial in self.trials:
                remove_checkpoint(work.home, work.checkpoint_name(trial.index) + KEPT)
        driver.post(ItemsAdded(self._task_id, 0, is_open=False))
        self._raise_if_none_is_good()

    def _has_work(self) -> bool:
        """Whether there is anything to do; cancels trials that were to stop, and still run."""
        until = time.monotonic() - (self._options.cancel_grace_s or 0.0)
        while self._asked and self._asked[0][0] <= until:
            _, trial, part = self._asked.popleft()
            if trial.state == "running" and trial.part == part:  # it may be in its next part
                self._cancel_trial(trial)
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
        return self._view._capacity() * (2 * self._group if waits else 1)

    @property
    def _num_running(self) -> int:
        return self._num_parts + self._copies.num_held - self._num_ended

    @property
    def _num_due(self) -> int:
        """How many running parts the search waits for; trials promoted early are not among them."""
        assert isinstance(self._rungs, Rungs)
        return self._num_running - sum(map(self._rungs.is_early, self._early))

    @property
    def _has_news(self) -> bool:
        work = self._work
        num_ended = len(work.segments) + len(work.lost) + len(work.dropped)
        return num_ended > sum(self._num_seen) or self._copies.has_news

    def _resume(self) -> None:
        """Take the trials of earlier calls with this folder: told ones count, others continue."""
        for frozen in self._study.earlier():
            trial = self._join(self._study.restore(frozen))
            if trial.state == "pruned":
                trial.stopped_by = self._rule
            elif trial.state == "failed":
                self._study.num_failed += 1
                if self._members is not None:
                    self._members.leave(trial.index)
        for trial in self.trials:
            self._fit_to_levels(trial)
            self._continue(trial)
        self._study.note_exhausted()
        if not self.trials and (num_saved := self._work.num_saved):
            logger.warning(
                "%s has the results of %s trials, but study %r has no trial of this folder, so all"
                " trials run again. A folder that was moved is another one for a study.",
                self._work.run_dir,
                f"{num_saved:,}",
                self._study.name,
            )

    def _fit_to_levels(self, trial: Trial) -> None:
        """Let a trial of a call with more rungs be at one that there is."""
        if not self._levels:
            return
        last = len(self._levels) - 1
        trial.rung, fits = min(trial.rung, last), True
        if trial.noted_part is not None:
            fits = trial.noted_part[1] in self._levels
            trial.rung = self._levels.index(int(trial.noted_part[1])) if fits else 0
        if self._members is not None and (
            any(each.lineage for each in self.trials)
            if not fits
            else trial.lineage and trial.lineage[2] >= last
        ):
            raise InvalidValueError(
                f"{self._work.run_dir} holds a population that pauses at other epochs. Use the same"
                " every= and max_epochs=, or another run_dir."
            )

    def _continue(self, trial: Trial) -> None:
        """Bring a trial of an earlier call to where it was."""
        if self._members is not None and trial.lineage:
            self._take_over(trial, self._members)
        rows = self._work.earlier_reports(trial.index)
        reports = [(run, report_of_row(row)) for run, row in rows]
        reported_at = reports[-1][1].time.timestamp() if reports else -math.inf
        replay(trial, self._study, reports, self._levels)
        kept = self._kept(trial, reported_at)
        has_waited = kept is not None and kept.error is None and waited(trial)
        if has_waited and (not self._levels or trial.epochs < self._levels[0]):
            kept = None  # this call has no rung where it could wait
        is_interrupted = trial.state == "running" and kept is None
        if self._rungs is not None:
            place(trial, self._rungs, is_interrupted=is_interrupted)
        saved_at = None
        if is_interrupted and self._work.home is not None:
            saved_at = checkpoint_time(self._work.home, self._work.checkpoint_name(trial.index))
            trial.is_again = saved_at is not None
        if saved_at is not None and has_paused(trial, saved_at, reported_at, self._levels):
            self._end_part(trial, None, None)
        elif is_interrupted:
            if not any("epoch" in each.metrics for _, each in reports):
                # what came after its last rung runs again
                trial.num_reports = reports_before(trial, self._levels, has_waited=has_waited)
            self._interrupted.append(trial)
        elif trial.state == "running" and kept is not None:
            self._end_part(trial, kept.value, kept.error)
        elif trial.state != "running":
            self._recall(trial, kept)

    def _kept(self, trial: Trial, reported_at: float) -> Restored | None:
        """Return the outcome of a trial's newest part; None: it has none."""
        kept = self._work.restored.get(trial.index)
        if kept is None or isinstance(kept.error, POOL_ENDED):
            return None
        if trial.state == "failed":
            return kept
        return None if has_gone_on(trial, kept.row, reported_at, self._levels) else kept

    def _recall(self, trial: Trial, kept: Restored | None) -> None:
        """Let a trial that Optuna was told of in an earlier call count."""
        study = self._study
        if trial.state == "failed":
            self._first_error = self._first_error or (kept.error if kept is not None else None)
            return
        if kept is not None and (trial.score is None or not math.isfinite(trial.score)):
            trial.score = study.score_of_part(kept.value, trial)
        if trial.score is not None:
            study.compare(trial)
            study.note_leader(trial)
            self._note_peak(trial)

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
            trial = self._join(self._study.ask())
        elif (early := self._promote_early()) is not None:
            trial = early
        else:
            return False
        if self._rungs is not None:
            trial.until = self._levels[trial.rung]
        if not self._copies.hold(trial):
            self._begin(trial)
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
        self._study.waiting.discard(trial.number)

    def _end_early_parts(self) -> None:
        """Cancel the trials that were promoted early, once nothing else is left to do."""
        if not self._early or self._num_due or self._work.stopped_by is not None:
            return
        for index in self._early:
            trial = self.trials[index]
            if not trial.stopped_by:
                trial.stopped_by = self._rule
                self._cancel_trial(trial)

    def _piece(self, part: int) -> Slice:
        return Slice(self._task_id, part, part + 1, 1)

    def _begin(self, trial: Trial) -> None:
        """Queue the next part of a trial."""
        has_run = trial.part is not None or trial.index in self._work.restored
        trial.part = self._num_parts
        trial.num_before, trial.attempt = trial.num_reports, 1
        self._study.note_part(trial)  # before it changes its checkpoint
        self._num_parts += 1
        self._work.queue(trial.index, has_run=has_run)
        if self._num_parts - self._num_sent >= self._group:
            self._send()

    def _join(self, trial: Trial) -> Trial:
        """Make a trial of the study an item of the loop."""
        self._work.append(trial.config)
        if self._members is not None:
            self._members.join(trial.index)
        return trial

    @property
    def _num_missing(self) -> int:
        if self._members is not None:
            return self._members.num_missing
        if self._study.is_exhausted:
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
        elif when.score is not None and self._is_score_reached:
            why = f"score {when.score:g} is reached"
        elif when.patience is not None and self._study.num_since_best >= when.patience:
            why = f"{when.patience} trials without a new best score"
        if not why:
            return False
        unended = [trial for trial in self.trials if trial.state in ("running", "waiting")]
        if self._num_missing <= 0 and not unended:
            return False  # all have run
        self.ended_by = why
        logger.info("%s ends after %d trials: %s.", self._work.label, len(self.trials), why)
        begun = [trial for trial in unended if trial.state == "running" and trial.part is not None]
        # first those in the queue: they would begin where others stop
        for trial in sorted(begun, key=self._is_queued, reverse=True):
            if trial.stopped_by:
                continue
            if self._is_queued(trial):
                trial.stopped_by = "stop_when"
                self._cancel_trial(trial)
            else:
                self._stop_trial(trial, "stop_when")
        return True

    def _is_queued(self, trial: Trial) -> bool:
        return self._work.newest_run(trial.index)[1] == "waits"

    def _sent(self, index: int) -> TrialPart:
        trial = self.trials[index]
        # behind all reports that have come: an attempt may run again without being counted
        self._new_rows.append((0.0, index, BEGINS, {}))
        is_again = trial.is_again or trial.epochs >= trial.until
        return TrialPart(trial.config, trial.until, trial.num_before, trial.epochs, is_again)

    def _show(self) -> None:
        parts = [self._study.summary(self._options.score_name)]
        if self.ended_by:
            parts.append(f"ended by stop_when: {self.ended_by}")
        self._work.about = [", ".join(filter(None, parts))]
        if self._rungs is not None:
            self._work.about.append(self._rungs.summary)
        super()._show()

    def results(self) -> Results[Any]:
        """Join the results that have arrived so far, and how the trials have ended."""
        made, trials = super().results(), self.trials
        trials = trials[: len(made)]  # after Ctrl-C in `_join`
        made._trials = Trials(
            self._options.score_name,
            self._options.mode,
            [trial.number for trial in trials],
            ["unfinished" if trial.state == "running" else trial.state for trial in trials],
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
        parents = members.parents(trial.index)
        if not parents:
            if members.keep(trial.index):
                copy = self._work.checkpoint_name(trial.index) + KEPT
                self._copy_checkpoint(trial, trial.rung, copy, trial)
            return trial
        seed, space = self._options.seed, self._space
        random = Random(None if seed is None else item_seed(seed, len(self.trials)))
        parent = self.trials[random.choice(parents)]
        params = {name: parent.config[name] for name in space.distributions}
        lineage = parent.number, trial.number, members.rung(parent.index)
        new = space.perturbed(params, self._stop.perturb, random)
        child = self._join(self._study.add_child(new, lineage))
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
            replaced.stopped_by = self._rule
            self._tell(replaced, "pruned")

    def _copy_checkpoint(self, trial: Trial, rung: int, copy: str, for_trial: Trial) -> None:
        """Copy the checkpoint that a trial had when it waited at a rung, in another thread."""
        name, home = self._work.checkpoint_name(trial.index), self._work.home
        if trial.state != "waiting" or trial.rung != rung:
            name += KEPT  # it has gone on since

        def make() -> None:
            assert home is not None
            if checkpoint_time(home, name) is None:
                raise InvalidValueError(
                    f"Trial {trial.number} of {self._work.label} left no checkpoint after"
                    f" {trial.epochs} epochs, so that no other trial can continue from it. Call"
                    " save_checkpoint(...) before it returns."
                )
            copy_checkpoint(home, name, copy)

        self._copies.make(make, trial.index, for_trial.index)

    # --- what arrives -----------------------------------------------------------------------------

    def _judge(self, report: MetricsReport) -> None:
        trial = self.trials[report.item]
        if report.attempt == BEGINS:
            trial.attempt = BEGINS  # so the next report is the first of an attempt
            return
        if report.attempt > trial.attempt:  # it counts again from where the part began
            trial.attempt, trial.num_reports = report.attempt, trial.num_before
        # after it was cancelled and told, its last reports may still come
        value = self._study.note_report(report) if trial.state == "running" else None
        if value is not None and not self._has_warned:
            self._warn_of_repeats(trial, report.metrics)
        if trial.epochs == trial.until:
            self._work.write_reports()  # before it saves the checkpoint at which it pauses
        if value is not None:
            self._note_peak(trial)
        if value is not None and not trial.stopped_by:
            self._stop_if_hopeless(trial, value, report.metrics)
            self._end_early()
        if self._options.on_report is not None:
            self._options.on_report(report)

    def _note_peak(self, trial: Trial) -> None:
        """Note whether a trial has the score at which `stop_when` ends the search."""
        when = self._options.stop_when
        if when is not None and when.score is not None:
            trial.has_reached_score |= trial.peak >= self._study.good(when.score)
            self._is_score_reached |= trial.has_reached_score

    def _warn_of_repeats(self, trial: Trial, metrics: dict[str, Any]) -> None:
        if self._rungs is None or trial.rung == 0 or trial.is_again:
            return
        paused_after = int(self._levels[trial.rung - 1])
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

    def _stop_if_hopeless(self, trial: Trial, value: float, metrics: dict[str, Any]) -> None:
        if self._stop is None or self._rungs is not None:
            return
        if self._options.pruner is not None:
            is_hopeless = self._study.pass_on(trial, value).should_prune()
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
        self._work.stopping.add(trial.index)  # first, as in `LoopRun._stop_item`
        if not self._is_inline:
            self._driver.post(StopRequested(self._task_id, trial.part))
        elif (note := note_here()) is not None:  # this is the trial's own thread
            note.should_stop = True

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
            values = result.values_of(piece.start, piece.stop)
            for index, value in zip(work.numbers(piece), values, strict=True):
                if not self.trials[index].stopped_by:  # else the others may take far longer
                    self._last_s = result.durations_s[piece.start - result.start]
                work_error = work.errors.get(index)
                if work_error is None and type(value) is Missing:
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
        for trial in self._copies.take_ready():
            if self.ended_by or self._work.stopped_by is not None:
                trial.state = "waiting"
            else:
                self._begin(trial)

    def _note_cancelled(self, part: int) -> None:
        self._pass_reports_on()
        (index,) = self._work.numbers(self._piece(part))
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
            num_failed = self._study.num_failed
            if most is not None and num_failed > most:
                add_note(
                    self._first_error,
                    f"raypool: {num_failed} trials failed, more than max_failures={most}.",
                )
                raise self._first_error
            return
        trial.score = self._study.score_of_part(value, trial)
        if trial.score is None:
            if trial.stopped_by:  # by `stop_when`, before its first report
                self._tell(trial, "pruned")
            else:
                self._note_missing(trial, value)
            return
        good = self._study.compare(trial)
        self._note_peak(trial)
        # else it has ended by itself, perhaps without a report: its checkpoint was that far
        is_there = trial.until <= trial.epochs and not is_cancelled
        if self._rungs is not None and is_there and trial.epochs < self._levels[-1]:
            trial.state = "waiting"
            self._study.waiting.add(trial.number)
            self._study.pass_on(trial, self._study.comparable(trial.score))
            self._rungs.reach(trial.index, trial.rung, good)
        else:
            if isinstance(self._rungs, Rungs) and is_there:
                self._rungs.reach(trial.index, trial.rung, good, is_waiting=False)
            self._tell(trial, "pruned" if trial.stopped_by else "complete")
        self._study.note_leader(trial)

    def _tell(self, trial: Trial, state: str) -> None:
        """Tell Optuna how a trial has ended."""
        if state == "failed" and self._members is not None:
            self._members.leave(trial.index)
        if state == "pruned" and trial.has_reached_score:
            state, trial.stopped_by = "complete", ""  # it did what was asked for
        self._study.tell(trial, state)

    # --- failures ---------------------------------------------------------------------------------

    def _note_missing(self, trial: Trial, value: Any) -> None:
        self._tell(trial, "failed")
        own = value.get(self._metric) if isinstance(value, Mapping) else None
        if self._metric is None:
            what = (
                f"returned {value!r}, which is not a number. Return the score, or pass metric= with"
                " the name of a value that the function reports or returns"
            )
        elif own is None:
            what = (
                f"neither reported nor returned {self._metric!r}. Call"
                f" raypool.report({self._metric}=...), or return a dict with this entry"
            )
        else:
            what = f"returned {own!r} as {self._metric!r}, which is not a number"
        error = InvalidValueError(f"Trial {trial.number} of {self._work.label} {what}.")
        if not any(each.state == "complete" or each.score is not None for each in self.trials):
            raise error
        logger.warning("%s It counts as failed.", error)

    def _raise_if_none_is_good(self) -> None:
        if not self.trials or self._study.num_failed < len(self.trials):
            return
        if self._first_error is None:
            with quiet_optuna():
                for index, kept in self._work.restored.items():  # those without a score
                    self._note_missing(self.trials[index], kept.value)
            return
        note = f"raypool: all {len(self.trials)} trials failed."
        if self._num_parts == 0:
            note += (
                " They failed in an earlier call, and do not run again. Pass a larger num_trials,"
                " or another run_dir."
            )
        add_note(self._first_error, note)
        raise self._first_error
