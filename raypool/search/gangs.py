"""`pool.search(..., workers_per_trial=2)`: each trial is a training on a gang of workers.

A part of a trial is one `pool.train`, which waits for free workers like any other. Its reports and
its outcome enter the loop of the search as those of an item.
"""

from __future__ import annotations

import functools
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raypool.channel.by_value import share_left
from raypool.channel.feed import Row as ReportRow
from raypool.channel.records import NOBODY, Failure, LocalValues, SliceResult, WorkerInfo
from raypool.channel.users_code import generators_of
from raypool.core.model import TaskSpec
from raypool.engine.in_flight import Call
from raypool.errors import (
    InvalidValueError,
    ResourceError,
    TrainingError,
    checked_count,
)
from raypool.results import Results
from raypool.search.parts import TrialEndedError, epochs_of, score_of
from raypool.search.run import POOL_ENDED, Search, SearchOptions, SearchResults, run_search
from raypool.search.study import Trial
from raypool.spmd.call import SpmdFuture
from raypool.train.checkpoints import plain_metrics
from raypool.train.runs import RunOptions, TrainingRun
from raypool.train.verbs import check_loop, check_names_in, train
from raypool.worker.runner import finished, seed_everything
from raypool.worker.running import item_seed, note_here, this_process

if TYPE_CHECKING:
    from raypool.engine.loop import CallItems
    from raypool.journal.live import Request
    from raypool.pool import PoolView


def search_in_gangs(
    view: PoolView,
    fn: Callable[[dict[str, Any]], Any],
    space: Mapping[str, Any],
    wanted: SearchOptions,
    size: int,
) -> SearchResults:
    """Search with trainings on `size` workers each; see `PoolView.search`."""
    __tracebackhide__ = True
    check_loop(fn)
    check_names_in(fn)
    size = checked_count("workers_per_trial", size, least=1)
    available = size if view._target()._is_serial else len(view._numbers())
    if size > available:
        raise ResourceError(
            f"workers_per_trial={size}: requested {size} workers, available {available}. Ask for"
            " fewer, or open a larger pool.",
            requested=size,
            available=available,
        )
    if "://" in str(view._options.checkpoints):
        raise InvalidValueError(
            "workers_per_trial= needs a folder for checkpoints that all machines see, not"
            f" checkpoints={view._options.checkpoints!r}. Pass run_dir=."
        )
    return run_search(view, fn, space, wanted, functools.partial(GangSearch, fn, size))


def train_part(fn: Callable[[Any], Any], metric: str | None, part: Mapping[str, Any]) -> Any:
    """Run the loop of a trial in one rank, until rank 0 has trained for `until` epochs.

    All ranks agree on that in the report of the last epoch. A loop that does not look at
    `should_stop` ends after the next report, which may have a checkpoint.
    """
    from raypool.train.ray_train import session_here

    note, session = note_here(), session_here()
    assert note is not None
    report, num_reports, is_over = session.report, part["num_reports"], note.agreed_stop

    def count(metrics: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_reports, is_over
        was_over = is_over
        score = score_of(metrics.get(metric)) if isinstance(metrics, Mapping) else None
        if note.index == 0 and score is not None:
            num_reports += 1
            note.should_stop |= epochs_of(metrics, num_reports) >= part["until"]
        report(metrics, *args, **kwargs)
        # not if a machine is about to go: a loop that ignores that may still finish in time
        is_over = note.agreed_stop and note.should_stop
        if was_over:
            raise TrialEndedError

    session.report = count
    if part["listen"] is not None:
        note.say = functools.partial(_say_twice, note.say, part["listen"])
    if part["seed"] is not None:
        note.seed = part["seed"]
        # in threads, the generators are those of the user's process
        if this_process.is_worker:
            seed_everything(item_seed(note.seed, note.index), generators_of(fn))
    share_left(fn)
    try:
        return finished(fn(part["config"]))
    except TrialEndedError:  # raised by `count`: the loop went on after its end
        return None


def _say_twice(say: Any, listen: Any, note: Any, kind: str, payload: Any) -> bool | None:
    if kind == "metrics":
        listen([(payload[0], note.index, note.attempt, payload[1])])
    told: bool | None = say(note, kind, payload)
    return told


class GangSearch(Search):
    """A search in progress whose trials are trainings."""

    def __init__(self, fn: Callable[[dict[str, Any]], Any], size: int, *given: Any) -> None:
        super().__init__(*given)
        self._size = size
        self._study.note_workers(size)
        self._loop = functools.partial(train_part, fn, self._metric)
        self._temporary = Path()
        self._trainings: dict[int, TrainingRun] = {}  # by part
        self._calls: dict[int, list[Call]] = {}  # of parts that are shown as running
        self._ended: deque[int] = deque()  # parts

    def run(self, items: Sequence[Any] | Iterator[Any], spec: TaskSpec) -> Results[Any]:
        """Run all trials."""
        with tempfile.TemporaryDirectory(prefix="raypool-", ignore_cleanup_errors=True) as folder:
            self._temporary = Path(folder)
            return super().run(items, spec)

    def cancel(self) -> None:
        """Let no further trials start, and end the running ones."""
        super().cancel()
        for training in list(self._trainings.values()):
            training.cancel()

    # --- parts of trials --------------------------------------------------------------------------

    @property
    def _group(self) -> int:
        return 1

    @property
    def _limit(self) -> int:
        most = self._options.max_in_flight
        return max(len(self._view._numbers()) // self._size, 1) if most is None else most

    def _send(self) -> None:
        while self._num_sent < self._num_parts:
            part, self._num_sent = self._num_sent, self._num_sent + 1
            self._start_training(part, self._work.numbers(self._piece(part))[0])

    def _start_training(self, part: int, index: int) -> None:
        work, trial, seed = self._work, self.trials[index], self._options.seed
        listen = functools.partial(self._take_reports, index)
        sent = {
            "config": trial.config,
            "until": trial.until,
            "num_reports": trial.num_reports,
            "seed": None if seed is None else item_seed(seed, index),
            # inline, the training has ended before anybody can subscribe to it
            "listen": listen if self._is_inline else None,
        }
        folder = (
            self._temporary / str(index)
            if work.home is None
            else Path(work.home, work.checkpoint_name(index))
        )
        training = self._trainings[part] = train(
            self._view.options(name=f"trial {trial.number} of {work.label}"),
            self._loop,
            sent,
            workers=self._size,
            lane="warm",
            # the next part of the trial continues from the last one, and from no other
            run_options=RunOptions(run_dir=folder, keep_checkpoints=1),
            trainer=None,
            datasets=None,
            trainer_args={},
        )
        if not self._is_inline:
            training._subscribe(listen)
        training.add_done_callback(lambda _: self._note_end(part))

    def _take_reports(self, index: int, rows: list[ReportRow]) -> None:
        for moment, rank, attempt, metrics in rows:
            if rank == 0:
                self._work.feed.add_row((moment, index, attempt, plain_metrics(metrics)))

    def _is_queued(self, trial: Trial) -> bool:
        training = None if trial.part is None else self._trainings.get(trial.part)
        return training is not None and training.started_at is None

    def _ask_to_stop(self, trial: Trial) -> None:
        assert trial.part is not None
        if (training := self._trainings.get(trial.part)) is not None:
            training.request_stop()
        else:
            super()._ask_to_stop(trial)  # inline, in the training

    def _cancel_trial(self, trial: Trial) -> None:
        assert trial.part is not None
        if (training := self._trainings.get(trial.part)) is not None:
            training.cancel()

    def act(self, request: Request) -> str | None:
        """Carry out what a watcher asks for; see `LoopRun.act`."""
        if request.action == "cancel":
            return "a trial on several workers can be stopped, but not cancelled"
        return super().act(request)

    def _stop_item(self, item: int, task_id: int, share: CallItems) -> None:
        self._stop_trial(self.trials[item], "a watcher")

    # --- what arrives -----------------------------------------------------------------------------

    def _note_end(self, part: int) -> None:
        # in the training's thread; `_absorb` takes it in the search's, which alone may decide
        self._ended.append(part)
        self._wake()

    @property
    def _has_news(self) -> bool:
        return bool(self._ended) or super()._has_news

    def _absorb(self) -> None:
        while self._ended:
            self._settle(self._ended.popleft())
        super()._absorb()

    def _settle(self, part: int) -> None:
        """Pass the outcome of a training on, as that of an item."""
        training, work = self._trainings.pop(part), self._work
        for call in self._calls.pop(part, ()):
            call.is_over = True
        if training.cancelled():
            if self.trials[work.numbers(self._piece(part))[0]].stopped_by:  # it ended too late
                work.drop(self._piece(part))
            else:  # by `cancel_all`, say
                self.cancel()
            return
        error, piece = training.exception(), self._piece(part)
        if isinstance(error, POOL_ENDED):
            raise error
        if isinstance(error, TrainingError) and error.first_rank is not None:
            error = error.failures[error.first_rank]
        index, text = work.numbers(piece)[0], training.diary
        if text:
            work.feed.add_text(text, 0, index, part)
        ended_at = time.time()
        began_at = ended_at if training.started_at is None else training.started_at.timestamp()
        result = SliceResult(
            part,
            1,
            LocalValues([None if error is not None else training.result().values[0]]),
            0,
            {} if error is None else {part: Failure(error, None)},
            array("d", [ended_at - began_at]),
            began_at,
        )
        workers = members_of(training) or [NOBODY]
        work.settle(piece._replace(attempt=training.attempts), result, workers[0])

    def _show(self) -> None:
        for part, training in self._trainings.items():
            for worker in () if part in self._calls else members_of(training):
                call = Call(part, time.time())
                self._calls.setdefault(part, []).append(call)
                self._work.begin(self._piece(part), worker, call)
        super()._show()


def members_of(training: TrainingRun) -> Sequence[WorkerInfo]:
    """Return the workers of a training's newest attempt, by rank; none if it waits for them."""
    return cast("SpmdFuture", training.tries[-1]).members
