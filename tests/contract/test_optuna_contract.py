"""`raypool.interop.optuna.optimize`: objectives of Optuna's run unchanged on a pool."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

from raypool import InvalidTypeError, InvalidValueError, ParallelPool, PoolClosedError
from raypool.channel.hub import Hub
from raypool.interop.optuna import optimize

pytestmark = pytest.mark.concurrent


def quadratic(trial: Any) -> float:
    x = trial.suggest_float("x", -10, 10)
    return float((x - 2) ** 2)


def conditional(trial: Any) -> float:
    """A classifier with its own parameters, and one that is asked for twice."""
    if trial.suggest_categorical("classifier", ["svc", "forest"]) == "svc":
        c = trial.suggest_float("svc_c", 1e-5, 1e5, log=True)
        assert trial.suggest_float("svc_c", 1e-5, 1e5, log=True) == c
        trial.set_user_attr("kind", "svc")
        return float(c)
    depth = trial.suggest_int("forest_depth", 2, 32, log=True)
    width = trial.suggest_int("forest_width", 10, 50, step=10)
    assert trial.params == {"classifier": "forest", "forest_depth": depth, "forest_width": width}
    return float(depth * width)


def pruned(trial: Any) -> float:
    slope = trial.suggest_float("slope", 0.0, 1.0)
    for step in range(20):
        trial.report(slope * step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(slope * 20)


def pareto(trial: Any) -> tuple[float, float]:
    x, y = trial.suggest_float("x", 0, 5), trial.suggest_float("y", 0, 3)
    return 4 * x**2 + 4 * y**2, (x - 5) ** 2 + (y - 5) ** 2


def fragile(trial: Any) -> float:
    if trial.suggest_int("number", 0, 3) % 2:
        raise ArithmeticError(trial.params["number"])
    return 0.0


def states(study: optuna.Study) -> Counter[TrialState]:
    return Counter(trial.state for trial in study.trials)


@pytest.mark.quick
@pytest.mark.everywhere
def test_objectives_run_unchanged(pool: ParallelPool) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"x": 2.0})
    optimize(study, quadratic, 8, pool=pool)
    assert study.best_value == 0
    assert states(study) == {TrialState.COMPLETE: 8}

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for classifier in ("svc", "forest"):
        study.enqueue_trial({"classifier": classifier})
    optimize(study, conditional, 10, pool=pool)
    assert {len(trial.params) for trial in study.trials} == {2, 3}
    assert all(
        trial.user_attrs == ({"kind": "svc"} if len(trial.params) == 2 else {})
        for trial in study.trials
    )

    study = optuna.create_study(directions=["minimize", "minimize"])
    optimize(study, pareto, 6, pool=pool)
    assert study.best_trials
    assert all(len(trial.values) == 2 for trial in study.trials)


def test_pruners_see_every_report(pool: ParallelPool) -> None:
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    optimize(study, pruned, 12, pool=pool, max_in_flight=1)
    assert set(states(study)) == {TrialState.COMPLETE, TrialState.PRUNED}
    for trial in study.trials:
        steps = len(trial.intermediate_values)
        assert list(trial.intermediate_values) == list(range(steps))
        assert (steps == 20) or trial.state is TrialState.PRUNED


def test_errors_are_caught_or_raised(pool: ParallelPool) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    optimize(study, fragile, 10, pool=pool, catch=[ArithmeticError], callbacks=None)
    assert set(states(study)) == {TrialState.COMPLETE, TrialState.FAIL}
    with pytest.raises(ArithmeticError):
        optimize(study, fragile, 50, pool=pool)
    assert TrialState.RUNNING not in states(study)

    def wrong(trial: Any) -> float:
        return float(trial.suggest_float("x", 1, 0))

    with pytest.raises(ValueError, match="low"):
        optimize(study, wrong, 1, pool=pool)
    with pytest.raises(InvalidTypeError, match="must be a study of Optuna's"):
        optimize(3, quadratic, 1, pool=pool)  # type: ignore[arg-type]


@pytest.mark.threads
@pytest.mark.quick
def test_a_report_that_the_study_cannot_take_is_an_error_of_its_trial(pool: ParallelPool) -> None:
    def misreport(trial: Any) -> float:
        trial.report(0.0, step=-(trial.number % 2))
        return 0.0

    study = optuna.create_study()
    ended: list[TrialState] = []
    optimize(
        study,
        misreport,
        6,
        pool=pool,
        catch=ValueError,
        callbacks=[lambda _, trial: ended.append(trial.state)],
    )
    assert states(study) == Counter(ended) == {TrialState.COMPLETE: 3, TrialState.FAIL: 3}
    with pytest.raises(ValueError, match="negative"):
        optimize(study, misreport, 6, pool=pool)
    assert TrialState.RUNNING not in states(study)


@pytest.mark.threads
@pytest.mark.quick
@pytest.mark.parametrize("kind", ["part", "worker"])
def test_on_one_worker_of_three_one_trial_runs_at_a_time(pool: ParallelPool, kind: str) -> None:
    running: list[int] = []

    def note(study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        running.append(states(study)[TrialState.RUNNING])

    view = pool.partition(workers=[0])[0] if kind == "part" else pool.options(worker=0)
    optimize(optuna.create_study(), quadratic, 3, pool=view, callbacks=[note])
    assert running == [0, 0, 0]


@pytest.mark.threads
@pytest.mark.quick
def test_in_the_callback_of_a_future_it_is_refused(pool: ParallelPool, call_back: Any) -> None:
    error = call_back(lambda _: optimize(optuna.create_study(), quadratic, 1, pool=pool))
    assert type(error) is InvalidValueError
    assert "callback of a future" in str(error)


def test_callbacks_storage_and_a_space_that_is_known(pool: ParallelPool, tmp_path: Path) -> None:
    seen: list[int] = []

    def note(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(trial.number)

    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    space = {"x": optuna.distributions.FloatDistribution(-10, 10)}
    optimize(
        study,
        quadratic,
        50,
        pool=pool,
        space=space,
        callbacks=[note, MaxTrialsCallback(5, states=(TrialState.COMPLETE,))],
        max_in_flight=1,
    )
    assert seen == [0, 1, 2, 3, 4]
    optimize(study, quadratic, 2, pool=pool, timeout=0.0)
    assert len(study.trials) == 5


def test_no_trial_runs_on_where_the_study_cannot_be_told(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch, make_gate: Any, marks: Any, eventually: Any
) -> None:
    have_begun, never = make_gate(), make_gate()

    def objective(trial: Any) -> float:
        if trial.number == 0:
            have_begun.wait()
            return 0.0
        marks.add("begun")
        try:
            never.wait()
        except BaseException:
            marks.add("cancelled")
            raise
        return 1.0

    study = optuna.create_study()
    tell, locked = study.tell, {0, 1}

    def tell_later(trial: optuna.Trial, *args: Any, **kwargs: Any) -> Any:
        if trial.number in locked:
            locked.remove(trial.number)
            raise StorageInternalError("database is locked")
        return tell(trial, *args, **kwargs)

    def open_when_all_run() -> None:
        if eventually(lambda: marks.count("begun") == 2):
            have_begun.open()

    monkeypatch.setattr(study, "tell", tell_later)
    opener = threading.Thread(target=open_when_all_run)
    opener.start()
    with pytest.raises(StorageInternalError):
        optimize(study, objective, 3, pool=pool)
    opener.join()
    assert eventually(lambda: marks.count("cancelled") == 2)
    found = [trial.state for trial in study.trials]
    assert found == [TrialState.FAIL, TrialState.RUNNING, TrialState.FAIL], "1 could not be told"


@pytest.mark.threads
def test_a_trial_that_cannot_be_submitted_has_failed(pool: ParallelPool) -> None:
    study = optuna.create_study()
    with pytest.raises(PoolClosedError):
        optimize(
            study, quadratic, 2, pool=pool, callbacks=[lambda *_: pool.shutdown()], max_in_flight=1
        )
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.FAIL]


@pytest.mark.processes
def test_the_last_messages_of_a_trial_count_also_if_its_result_arrives_first(
    pool: ParallelPool, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, catch_up = Hub.deliver, Hub.catch_up
    held: list[tuple[int, int, bytes]] = []

    def hold_back(hub: Hub, worker_id: int, number: int, batch: bytes) -> None:
        if b"set_user_attr" in batch:
            held.append((worker_id, number, batch))
            gate.open()
        else:
            deliver(hub, worker_id, number, batch)

    def bring(hub: Hub) -> None:
        for batch in held:
            deliver(hub, *batch)
        catch_up(hub)

    def objective(trial: Any) -> float:
        trial.set_user_attr("kind", "svc")
        gate.wait()
        return 0.0

    study = optuna.create_study()
    monkeypatch.setattr(Hub, "deliver", hold_back)
    monkeypatch.setattr(Hub, "catch_up", bring)
    optimize(study, objective, 1, pool=pool)
    assert held
    assert study.trials[0].user_attrs == {"kind": "svc"}
