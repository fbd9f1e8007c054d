"""The trials of a search in progress, and Optuna's study of them: where it is kept, what samplers
see of it, and storages that cannot be reached for a while.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.channel.feed import MetricsReport
from raypool.errors import InvalidValueError, JournalError
from raypool.journal.trials import (
    METRIC,
    NAME,
    OWNER,
    PARENT,
    PART,
    STATES,
    STUDY,
    WORKERS,
)
from raypool.search.parts import epochs_of, score_of
from raypool.search.space import Space
from raypool.worker.running import item_seed

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

logger = logging.getLogger("raypool")

WAIT_S = 60.0
"""How long the storage of a study may be out of reach [s]."""

PAUSE_S = 0.2


@dataclass(slots=True)
class Trial:
    """A trial: its place in the study, and how far it has come.

    `index`: the number of its item; `number`: its number in the study. `part`: the position of its
    newest part in the loop's order. `until`: the epochs at which that part ends. `is_again`:
    whether that part began in an earlier call, and left a checkpoint. `state`: "running", "waiting"
    at a rung, "complete", "pruned", "failed", or "unfinished" if a watcher cancelled it.
    `num_before`: its reports before that part; `attempt`: the newest attempt at the part.
    `stopped_by`: why it was asked to stop. `at_rungs`: its scores at the rungs, in an earlier call.
    `lineage`: the trials that it took over from and replaced, and the rung of the checkpoint; empty
    for one that began by itself. `noted_part`: of the newest part that the study knows, the reports
    before it and its last epoch (infinite: that of the trial); None: it knows of none. `peak`: the
    best of its scores, as `TrialStudy.good` returns it; `has_reached_score`: whether that ends the
    search.
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
    num_before: int = 0
    attempt: int = 1
    rung: int = 0
    until: float = math.inf
    part: int | None = None
    is_again: bool = False
    stopped_by: str = ""
    at_rungs: list[float] = field(default_factory=list)
    lineage: Sequence[int] = ()
    noted_part: tuple[int, float] | None = None
    peak: float = -math.inf
    has_reached_score: bool = False


class TrialStudy:
    """The trials of a search, how good they are, and what Optuna knows of them.

    Attributes:
        trials: All of them, by the number of their item.
        waiting: The numbers of those that wait at a rung.
        num_failed: How many have failed.
        best: The best score so far, after however many epochs; see `good`.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        metric: str | None,
        mode: str,
        *,
        run_dir: Path | None,
        is_shared: bool,
    ) -> None:
        self.trials: list[Trial] = []
        self.waiting: set[int] = set()
        self.num_failed = 0
        self.best, self._best_trial = -math.inf, -1
        self._since_best: set[int] = set()  # the trials of which parts have ended since then
        self._study, self._space, self._metric = study, space, metric
        self._sign = 1.0 if mode == "max" else -1.0
        self._run_dir, self._is_shared = run_dir, is_shared
        self._sampler_for: Callable[[int], BaseSampler] | None = None
        self._leader = False, -math.inf, -1  # whether it is complete, how good, and which trial

    def choose_sampler(
        self, sampler: BaseSampler | None, kind: Callable[..., BaseSampler], seed: int | None
    ) -> None:
        """Use the user's sampler, or one of this kind, seeded for each trial by its number.

        So an interrupted search tries the same configurations as an uninterrupted one, if the
        sampler does not look at results.
        """
        if sampler is not None:
            self._study.sampler = sampler
        elif self._is_shared:
            pass  # the user's study brings its own
        elif seed is None:
            self._study.sampler = kind()
        else:
            self._sampler_for = lambda number: kind(seed=item_seed(seed, number) % 2**32)

    def note_workers(self, num_workers: int) -> None:
        """Note that each trial is a training on so many workers, for `raypool replay`."""
        if self._run_dir is not None and not self._is_shared:
            self._study.set_user_attr(WORKERS, num_workers)

    # --- trials come ------------------------------------------------------------------------------

    @property
    def is_exhausted(self) -> bool:
        """Whether the sampler has nothing more to suggest, or a callback has stopped the study."""
        return bool(self._study._stop_flag)

    @property
    def name(self) -> str:
        """The name of the study."""
        return self._study.study_name

    def note_exhausted(self) -> None:
        """Let the study stop if its sampler has suggested everything, also in earlier calls.

        By itself a sampler stops at the end of a trial, and suggests those that run again before.
        """
        from optuna.samplers import BruteForceSampler, GridSampler
        from optuna.trial import TrialState

        sampler = self._study.sampler
        if not isinstance(sampler, (BruteForceSampler, GridSampler)) or not self.trials:
            return
        storage: Any = self._study._storage
        with storage.showing({trial.number for trial in self.trials}):
            if isinstance(sampler, GridSampler):
                if sampler.is_exhausted(self._study):
                    self._study.stop()
                return
            states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
            for ended in self._study.get_trials(deepcopy=False, states=states)[-1:]:
                sampler.after_trial(self._study, ended, ended.state, ended.values)

    def ask(self) -> Trial:
        """Return a new trial that Optuna suggests."""
        if self._sampler_for is not None:
            self._study.sampler = self._sampler_for(len(self.trials))
        with self._study._storage.showing(self.waiting):  # type: ignore[attr-defined]
            handle = self._study.ask(self._space.distributions)
        if self._is_shared and self._run_dir is not None:
            handle.set_user_attr(OWNER, str(self._run_dir))
        trial = self._add(handle.number, handle, handle.params)
        self.note_exhausted()
        return trial

    def add_child(self, params: dict[str, Any], lineage: Sequence[int]) -> Trial:
        """Return a new trial with these parameters, which takes over from another."""
        from optuna.trial import TrialState, create_trial

        made = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=self._space.distributions,
            user_attrs={PARENT: list(lineage), OWNER: str(self._run_dir)},
        )
        # private: the public ways take several steps, or may return a trial that a user enqueued
        storage, study_id = self._study._storage, self._study._study_id
        trial_id = storage.create_new_trial(study_id, template_trial=made)
        return self.restore(storage.get_trial(trial_id))

    def earlier(self) -> Iterator[FrozenTrial]:
        """Find the trials of earlier calls with the same folder."""
        for frozen in self._study.get_trials(deepcopy=False) if self._run_dir is not None else ():
            # a study of the user's has other trials, too; `ask` takes those that users enqueue
            is_own = not self._is_shared or is_owned_by(self._run_dir, frozen)
            if is_own and frozen.state.name != "WAITING":
                yield frozen

    def restore(self, frozen: FrozenTrial) -> Trial:
        """Take a trial that the study has already."""
        import optuna

        handle, params = None, frozen.params
        if not frozen.state.is_finished():
            # private, but there is no other way to the handle of a trial
            handle = optuna.trial.Trial(self._study, frozen._trial_id)
            # its process may have died in the middle of the suggestions
            if self._sampler_for is not None:
                self._study.sampler = self._sampler_for(len(self.trials))
            params = {
                name: handle._suggest(name, each)
                for name, each in self._space.distributions.items()
            }
        trial = self._add(frozen.number, handle, params)
        trial.noted_epochs = max(frozen.intermediate_values, default=0)
        trial.lineage = frozen.user_attrs.get(PARENT, ())
        if (part := frozen.user_attrs.get(PART)) is not None:
            trial.noted_part = part[0], math.inf if part[1] is None else part[1]
        if handle is None:
            trial.state = STATES[frozen.state.name]
            if frozen.value is not None and math.isfinite(frozen.value):
                trial.score = frozen.value
        return trial

    def _add(
        self, number: int, handle: optuna.trial.Trial | None, params: Mapping[str, Any]
    ) -> Trial:
        trial = Trial(len(self.trials), number, handle, self._space.config(params))
        self.trials.append(trial)
        return trial

    # --- scores come ------------------------------------------------------------------------------

    @property
    def num_since_best(self) -> int:
        """How many other trials have had scores since the best one, however many each."""
        return len(self._since_best - {self._best_trial})

    def good(self, score: float) -> float:
        """Return a score of which more is better; NaN and infinity are the worst."""
        return self._sign * score if math.isfinite(score) else -math.inf

    def comparable(self, score: float) -> float:
        """Return a score for Optuna, in which NaN and infinity are the worst score."""
        return self._sign * self.good(score)

    def note_report(self, report: MetricsReport) -> float | None:
        """Note the score in a report of a trial, and return it; None: it has none."""
        trial = self.trials[report.item]
        value = report.metrics.get(self._metric) if self._metric is not None else None
        if (score := score_of(value)) is None:
            return None
        trial.num_reports += 1
        epochs = epochs_of(report.metrics, trial.num_reports)
        # an attempt after a lost worker repeats epochs
        trial.epochs = max(trial.epochs, epochs)
        trial.score = score
        trial.peak = max(trial.peak, self.good(score))
        return score

    def score_of_part(self, value: Any, trial: Trial) -> float | None:
        """Return the score of a part: what its function returned, else what it reported last."""
        own = value.get(self._metric) if isinstance(value, Mapping) else None
        if own is None and (self._metric is None or trial.score is None):
            own = value
        score = score_of(own)
        return trial.score if score is None else score

    def compare(self, trial: Trial) -> float:
        """Compare the score after a part with the best one so far; return it as `good` does."""
        assert trial.score is not None
        good = self.good(trial.score)
        trial.peak = max(trial.peak, good)
        if good > self.best:
            self.best, self._best_trial = good, trial.number
            self._since_best.clear()
        else:
            self._since_best.add(trial.number)
        return good

    def note_leader(self, trial: Trial) -> None:
        """Compare a trial whose part has ended with the one that leads."""
        assert trial.score is not None
        found = trial.state == "complete", self.good(trial.score)
        if found > self._leader[:2]:  # a score after a few epochs is no match
            self._leader = (*found, trial.number)

    def summary(self, score_name: str) -> str:
        """Return the best score, and how many trials were pruned by what, in a line."""
        _, good, number = self._leader
        pruned = Counter(trial.stopped_by for trial in self.trials if trial.state == "pruned")
        parts = [f"{count:,} pruned by {why}" for why, count in pruned.items()]
        if good > -math.inf:
            parts.insert(0, f"best {score_name}={self._sign * good:.4g} (trial {number})")
        return ", ".join(parts)

    # --- trials end -------------------------------------------------------------------------------

    def pass_on(self, trial: Trial, score: float) -> optuna.trial.Trial:
        """Note the score in the study, as that of the trial's epoch; return the trial's handle."""
        assert trial.handle is not None
        if trial.epochs > trial.noted_epochs:  # Optuna takes one score for each
            trial.noted_epochs = trial.epochs
            trial.handle.report(score, step=trial.epochs)
        return trial.handle

    def note_part(self, trial: Trial) -> None:
        """Note the part that a trial begins in the study, for later calls with its folder."""
        is_whole = trial.until == math.inf
        if self._run_dir is None or trial.handle is None or (is_whole and not trial.noted_part):
            return
        trial.noted_part = trial.num_before, trial.until
        trial.handle.set_user_attr(PART, [trial.num_before, None if is_whole else trial.until])

    def tell(self, trial: Trial, state: str) -> None:
        """Tell Optuna how a trial has ended."""
        from optuna.trial import TrialState

        trial.state = state
        if trial.has_reached_score and state != "failed":
            trial.score = self._sign * trial.peak
        tell = functools.partial(self._study.tell, trial.number, skip_if_finished=True)
        if state == "failed":
            self.num_failed += 1
            tell(state=TrialState.FAIL)
        elif (score := trial.score) is None:  # it was stopped before its first report
            tell(state=TrialState.PRUNED)
        else:
            if not math.isfinite(score):
                logger.warning(
                    "Trial %d has the score %s, which counts as the worst.", trial.number, score
                )
            score = self.comparable(score)
            self.pass_on(trial, score)  # Optuna takes it for the score of a pruned trial
            if state == "pruned":
                if trial.epochs == 0 and trial.handle is not None:  # it returned its first score
                    trial.handle.report(score, step=0)
                tell(state=TrialState.PRUNED)
            else:
                tell(score)
        trial.handle = None


# --- where the study is kept ----------------------------------------------------------------------


def open_study(run_dir: Path | None, mode: str, pruner: BasePruner | None) -> optuna.Study:
    """Return a new study in memory, or that of the run's folder.

    Raises:
        JournalError: The study there is damaged.
    """
    import optuna

    storage = None
    if run_dir is not None:
        from optuna.storages.journal import JournalStorage

        from raypool.search.study_log import StudyLog

        # left by a driver that was killed while it wrote; Optuna would wait 30 s for it
        (run_dir / f"{STUDY}.lock").unlink(missing_ok=True)
        try:
            storage = JournalStorage(StudyLog(run_dir / STUDY))
        except (ValueError, KeyError) as error:  # a line is no record
            raise JournalError(
                f"{run_dir / STUDY} is damaged ({error}). Use another run_dir; load_results still"
                " reads the finished trials in this one.",
                run_dir=str(run_dir),
            ) from error
    with quiet_optuna():
        study = optuna.create_study(
            storage=storage,
            study_name=NAME,
            pruner=pruner,
            direction="maximize" if mode == "max" else "minimize",
            load_if_exists=True,
        )
    return study


def check_metric(
    study: optuna.Study, score_name: str, run_dir: Path | None, *, is_shared: bool
) -> None:
    """Note the name of the score in a study, or make sure that it is the same as before.

    Raises:
        JournalError: It is another one, and trials of this folder have scores.
    """
    if run_dir is None:
        return
    name = f"{METRIC} in {os.path.realpath(run_dir)}" if is_shared else METRIC
    known = study.user_attrs.get(name)
    if known == score_name:
        return
    for trial in study.get_trials(deepcopy=False) if known is not None else ():
        is_own = not is_shared or is_owned_by(run_dir, trial)
        if is_own and (trial.values or trial.intermediate_values):
            raise JournalError(
                f"{run_dir} holds trials of another metric: it was {known!r} there, and is"
                f" {score_name!r} in this call. Use the same metric, or another run_dir.",
                run_dir=str(run_dir),
            )
    study.set_user_attr(name, score_name)


def is_owned_by(run_dir: Path | None, frozen: FrozenTrial) -> bool:
    """Whether a trial in a user's study belongs to the search in a folder."""
    owner = str(frozen.user_attrs.get(OWNER, ""))
    if run_dir is None or not owner:
        return False
    # one of them may be a link
    return owner == str(run_dir) or os.path.realpath(owner) == os.path.realpath(run_dir)


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
        if len(found) > 1:
            raise InvalidValueError(f"A search needs a study with one direction, not {len(found)}.")
        other = "min" if mode == "max" else "max"
        raise InvalidValueError(
            f"mode={mode!r}, but the study (study=, or the one in run_dir) was created for"
            f" mode={other!r}. Pass that mode, or use another study or run_dir."
        )


def undoing(undo: Callable[..., Any], *args: Any) -> contextlib.ExitStack:
    """Return a context that calls `undo(*args)` at its end."""
    # a generator of `contextmanager` would set attributes of the user's exceptions: some refuse
    stack = contextlib.ExitStack()
    stack.callback(undo, *args)
    return stack


def patient(study: optuna.Study, run_dir: Path | None) -> contextlib.ExitStack:
    """Let all calls of a study's storage wait while that is locked or out of reach."""
    storage = study._storage  # private, but samplers, pruners and trials use it as well
    study._storage = PatientStorage(storage, study.study_name, run_dir)  # type: ignore[assignment]
    return undoing(setattr, study, "_storage", storage)


def stoppable(study: optuna.Study) -> contextlib.ExitStack:
    """Let `study.stop()`, which callbacks and some samplers call, only set the study's flag."""
    # private: there is no public way outside of `Study.optimize`
    local = study._thread_local
    local.in_optimize_loop, study._stop_flag = True, False
    return undoing(setattr, local, "in_optimize_loop", False)


def pruned_by(study: optuna.Study, pruner: BasePruner | None) -> contextlib.ExitStack:
    """Let a study use the pruner of this call, if there is one, instead of its own."""
    before = study.pruner
    study.pruner = before if pruner is None else pruner
    return undoing(setattr, study, "pruner", before)


class PatientStorage:
    """A storage of Optuna's whose calls are repeated, for a minute, while they fail."""

    def __init__(self, storage: Any, name: str, run_dir: Path | None) -> None:
        self._storage, self._name, self._run_dir = storage, name, run_dir
        self._waiting: Container[int] = ()

    @contextlib.contextmanager
    def showing(self, waiting: Container[int]) -> Iterator[None]:
        """Show a sampler the trials with these numbers as pruned: those that wait at a rung.

        It learns nothing from the scores of running trials.
        """
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = ()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of the study, or those in these states."""
        from optuna.trial import TrialState

        call = functools.partial(self._call, self._storage.get_all_trials, study_id, deepcopy)
        found: list[FrozenTrial]
        if not self._waiting or (states is not None and TrialState.PRUNED not in states):
            found = call(states)
            return found
        shown = []
        for trial in call():
            if trial.number in self._waiting:
                trial = copy.copy(trial)
                trial.state = TrialState.PRUNED
            if states is None or trial.state in states:
                shown.append(trial)
        return shown

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from optuna.exceptions import StorageInternalError

        gives_up_at = None
        while True:
            try:
                return method(*args, **kwargs)
            except (StorageInternalError, OSError) as error:
                reason = getattr(error.__cause__, "orig", None) or error.__cause__ or error
                if gives_up_at is None:
                    gives_up_at = time.monotonic() + WAIT_S
                    logger.warning(
                        "The storage of study %r cannot be used (%s). raypool tries again for"
                        " %g s; running trials continue.",
                        self._name,
                        reason,
                        WAIT_S,
                    )
                if time.monotonic() >= gives_up_at:
                    step = "Then call again."
                    if self._run_dir is not None:
                        step = "Then call again with the same run_dir: no finished trial is lost."
                    raise JournalError(
                        f"The storage of study {self._name!r} could not be used for {WAIT_S:g} s"
                        f" ({reason}). Another process may hold a lock, or the file or server may"
                        f" be gone. {step}",
                        run_dir=str(self._run_dir or ""),
                    ) from error
            time.sleep(PAUSE_S)
