"""`optimize`: an Optuna objective, unchanged, on the workers of a pool.

The trial that an objective gets is in a worker, and its study in your process. Calls with an answer
(`suggest_float`, `should_prune`) go through a queue and are answered through the pool's store;
`report` and `set_user_attr` only go through the queue. All calls of Optuna are made in the thread
that called `optimize`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution

from raypool.channel.queues import DataQueue
from raypool.errors import InvalidTypeError, InvalidValueError, checked_count, optional_count
from raypool.futures import Future, cancel_each
from raypool.options import check_callable
from raypool.pool import PoolView, gcp
from raypool.search.study import stoppable
from raypool.task import current_task

Callback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]


class RemoteTrial:
    """The trial of an objective in a worker: `suggest_*`, `report`, `should_prune`, attributes.

    A suggestion takes one round trip to your process, or none if `optimize` was given the space.

    Attributes:
        number: Its number in the study.
        params: The parameters suggested so far.
        user_attrs: The attributes set by `set_user_attr`.
    """

    def __init__(
        self, queue: DataQueue[Any], key: str, number: int, params: dict[str, Any]
    ) -> None:
        self.number, self.params = number, params
        self.user_attrs: dict[str, Any] = {}
        self._queue, self._key = queue, key

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Suggest a real number."""
        value: float = self._suggest("suggest_float", name, low, high, step=step, log=log)
        return value

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Suggest a whole number."""
        value: int = self._suggest("suggest_int", name, low, high, step=step, log=log)
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Suggest one of these values."""
        return self._suggest("suggest_categorical", name, choices)

    def report(self, value: float, step: int) -> None:
        """Report the objective's value at a step, for `should_prune`."""
        self._tell("report", float(value), step)

    def should_prune(self) -> bool:
        """Whether the study's pruner would end the trial here."""
        return bool(self._ask("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Attach a named value to the trial."""
        self.user_attrs[key] = value
        self._tell("set_user_attr", key, value)

    def _suggest(self, verb: str, name: str, *arguments: Any, **options: Any) -> Any:
        if name not in self.params:
            self.params[name] = self._ask(verb, name, *arguments, **options)
        return self.params[name]

    def _tell(self, verb: str, *arguments: Any) -> None:
        self._queue.put((self.number, None, verb, arguments, {}))

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> Any:
        key = f"{self._key}/{uuid.uuid4().hex}"
        self._queue.put((self.number, key, verb, arguments, options))
        store = current_task().store
        # without a limit: a sampler may take long, and the end of `optimize` cancels the trial
        answer, error = store.wait(key)
        store.remove(key)  # nobody asks for it again, and it takes memory in the user's process
        if error is not None:
            raise error
        return answer


def run_objective(
    objective: Callable[[Any], Any],
    queue: DataQueue[Any],
    key: str,
    number: int,
    params: dict[str, Any],
) -> Any:
    """Call an objective in a worker; return its value, or None and the error that pruned it."""
    try:
        return objective(RemoteTrial(queue, key, number, params)), None
    except optuna.TrialPruned as pruned:  # an outcome of the trial, not a failure of the task
        return None, pruned


def optimize(  # noqa: PLR0913 - those of `Study.optimize`
    study: optuna.Study,
    objective: Callable[[Any], Any],
    n_trials: int,
    *,
    pool: PoolView | None = None,
    timeout: float | None = None,
    catch: type[Exception] | Iterable[type[Exception]] = (),
    callbacks: Iterable[Callback] | None = None,
    space: Mapping[str, BaseDistribution] | None = None,
    max_in_flight: int | None = None,
) -> None:
    """Optimize an objective as `study.optimize` does, with a trial on each worker of a pool.

    The objective runs unchanged, with `suggest_*`, `report`, `should_prune`, `set_user_attr`, and
    parameters that depend on others. A trial whose worker is lost runs again with the same
    parameters.

    Args:
        study: The study, with any sampler, pruner and storage.
        objective: Called as `objective(trial)`, in a worker, where `trial` is a `RemoteTrial`.
        n_trials: How many trials to run.
        pool: The pool, or a view of one. None: the current pool.
        timeout: Start no trial after this time [s].
        catch: Errors after which a trial has failed and the others continue; any other is raised.
            An error of `report` or `set_user_attr` counts as the objective's.
        callbacks: Called as `callback(study, trial)` after each trial; they may call
            `study.stop()`.
        space: Parameters to suggest before a trial starts, which saves their round trips.
        max_in_flight: Run at most this many trials at once. None: one for each worker.

    Raises:
        InvalidValueError: This is the callback of a future of the pool, which would wait for
            itself.
        Exception: An objective's exception, unless `catch` names it.

    Source:
        Optuna 5, Study.optimize.

    Example:
        >>> import optuna
        >>> from raypool import parpool
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> study = optuna.create_study()
        >>> def objective(trial):
        ...     x = trial.suggest_float("x", -5, 5)
        ...     return (x - 1) ** 2
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     optimize(study, objective, n_trials=10, pool=pool)
        >>> len(study.trials)
        10
    """
    if not isinstance(study, optuna.Study):
        raise InvalidTypeError(f"study={study!r} must be a study of Optuna's.")
    check_callable(objective)
    n_trials = checked_count("n_trials", n_trials, least=1)
    max_in_flight = optional_count("max_in_flight", max_in_flight, least=1)
    callbacks = list(callbacks or ())
    view = gcp() if pool is None else pool
    assert view is not None
    target = view._target()
    # the objective would run in this thread, which has to answer its questions
    if target._engine.profile.backend == "inline":
        study.optimize(objective, n_trials, timeout, catch=catch, callbacks=callbacks)
        return
    if target._engine.driver.is_own_thread:
        raise InvalidValueError(
            "optimize() cannot be called in the callback of a future: the pool would wait for"
            " itself. Use a thread."
        )
    catch = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    run = _Run(study, view, objective, dict(space or {}))
    until = None if timeout is None else time.monotonic() + timeout
    with stoppable(study):
        try:
            num_begun = 0
            while True:
                is_open = num_begun < n_trials and not study._stop_flag
                has_room = len(run) < (max_in_flight or target._capacity())
                if is_open and (until is None or time.monotonic() < until) and has_room:
                    run.begin()
                    num_begun += 1
                elif not len(run):
                    return
                else:
                    run.take(catch, callbacks)
        finally:
            run.end()


class _Run:
    """The trials of one `optimize` that have not ended."""

    def __init__(
        self,
        study: optuna.Study,
        view: PoolView,
        objective: Callable[[Any], Any],
        space: dict[str, BaseDistribution],
    ) -> None:
        self._study, self._view, self._objective, self._space = study, view, objective, space
        self._queue: DataQueue[Any] = DataQueue()
        self._key = uuid.uuid4().hex
        self._running: dict[int, tuple[optuna.Trial, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self) -> None:
        """Begin a trial."""
        trial = self._study.ask(self._space)
        arguments = self._objective, self._queue, self._key, trial.number, trial.params
        try:
            future = self._view.parfeval(run_objective, *arguments)
        except BaseException:
            self._fail(trial)
            raise
        self._running[trial.number] = trial, future
        future.add_done_callback(functools.partial(self._note, trial.number, "end"))

    def _note(self, number: int, verb: str, _: Any = None) -> None:
        self._queue.put((number, None, verb, (), {}))

    def take(self, catch: tuple[type[Exception], ...], callbacks: Sequence[Callback]) -> None:
        """Wait for the next thing that a trial wants, and do it."""
        number, key, verb, arguments, options = self._queue.get()
        if number not in self._running:
            return  # an attempt that was lost
        trial, future = self._running[number]
        if verb == "end":
            self._queue.backlog  # noqa: B018 - waits for the trial's last messages
            self._note(number, "told all")  # behind those messages in the queue
            return
        if verb == "told all":
            self._take_end(number, catch, callbacks)
            return
        answer, error = None, None
        try:
            answer = getattr(trial, verb)(*arguments, **options)
        except Exception as raised:
            error = raised
        if key is not None:
            self._view._engine.store.put(key, (answer, error))
        elif error is not None:  # `Study.optimize` raises it in the objective
            future.cancel()
            self._take_end(number, catch, callbacks, error)

    def _take_end(
        self,
        number: int,
        catch: tuple[type[Exception], ...],
        callbacks: Sequence[Callback],
        error: BaseException | None = None,
    ) -> None:
        states = optuna.trial.TrialState
        trial, future = self._running[number]
        error = future.exception() if error is None else error
        if error is None:
            value, pruned = future.result()
            state = None if pruned is None else states.PRUNED
        else:
            value, state = None, states.FAIL
        frozen = self._study.tell(trial, value, state, skip_if_finished=True)
        del self._running[number]  # now: `end` tells the study of those that are left
        if error is not None and not isinstance(error, catch):
            raise error
        for callback in callbacks:
            callback(self._study, frozen)

    def end(self) -> None:
        """Cancel what still runs after an error."""
        running = list(self._running.values())
        cancel_each([future for _, future in running])
        try:
            for trial, _ in running:
                self._fail(trial)
        finally:
            self._queue.close()

    def _fail(self, trial: optuna.Trial) -> None:
        """Tell the study that a trial failed: Optuna would count it as running forever."""
        with contextlib.suppress(Exception):  # another error is on its way to the user
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
