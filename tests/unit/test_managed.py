"""The managed lane without Ray: how ranks meet, what Ray Train is told of earlier checkpoints, what
is said of a failure.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pickle
import types
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray.train")

from ray import exceptions as rx
from ray.train import Result
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raypool import parpool
from raypool.backends.ray.packing import pack_error
from raypool.errors import (
    InvalidValueError,
    LossReason,
    PoolPreemptedError,
    ResourceError,
    SpmdError,
    TrainingError,
    WorkerLostError,
)
from raypool.journal.reading import reports_in
from raypool.options import Options
from raypool.spmd.call import submit_gang
from raypool.train import managed
from raypool.train.checkpoints import TrainingAttempt, commit, list_kept, open_partial
from raypool.train.managed import Coordinator, LoanWork, ManagedAttempt, tell_ray
from raypool.worker.running import TaskContext

# --- the coordinator ------------------------------------------------------------------------------


def test_ranks_hear_of_a_wish_to_stop_at_the_same_report() -> None:
    """Else one would return, and the others wait for it in a collective."""

    async def run() -> list[Any]:
        coordinator = Coordinator()
        await coordinator.begin_group()
        first = [await coordinator.begin(0, "host", 1, ())]
        await coordinator.ask_to_stop()
        first.append(await coordinator.begin(1, "host", 2, ()))
        early = asyncio.ensure_future(coordinator.meet(0, 2))
        await asyncio.sleep(0)
        return [first, await coordinator.meet(1, 2), await early]

    assert asyncio.run(run()) == [[False, False], (True, []), (True, [])]


@pytest.mark.parametrize("is_early", [False, True])
def test_who_waits_for_a_rank_that_has_returned_hears_of_it(is_early: bool) -> None:
    async def run() -> Any:
        coordinator = Coordinator()
        if is_early:
            await coordinator.end(1, b"", None)
        waiting = asyncio.ensure_future(coordinator.meet(0, 2))
        await asyncio.sleep(0)
        if not is_early:
            await coordinator.end(1, b"", None)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(run()) == (False, [1])


# --- what Ray Train is told -----------------------------------------------------------------------


def test_ray_train_is_told_of_checkpoints_that_it_does_not_know(tmp_path: Path) -> None:
    """The best comes last, as its own list has it; what it knows better is left alone."""
    for loss in (3.0, 1.0, 2.0):
        commit(open_partial(tmp_path, None, "x"), {"loss": loss}, 1)
    plan = TrainingAttempt("mine", 1, str(tmp_path), best_metric="loss")
    tell_ray(plan)
    file = tmp_path / "checkpoint_manager_snapshot.json"
    state = json.loads(file.read_text())
    assert [each["metrics"]["loss"] for each in state["checkpoint_results"]] == [3.0, 2.0, 1.0]
    assert state["latest_checkpoint_result"]["checkpoint_dir_name"] == "checkpoint_000003"
    file.write_text(json.dumps({**state, "validated_checkpoint_dir_names": ["checkpoint_000002"]}))
    tell_ray(plan)
    assert json.loads(file.read_text())["validated_checkpoint_dir_names"] == ["checkpoint_000002"]
    os.rename(tmp_path / "checkpoint_000001", tmp_path / "gone")
    tell_ray(plan)
    assert len(json.loads(file.read_text())["checkpoint_results"]) == len(list_kept(tmp_path)) == 2


def test_a_checkpoint_to_resume_from_needs_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `fit` keeps at a stop; one with others than the best is judged by is refused."""
    reported: list[Any] = []
    base = managed._Utils.__mro__[1]
    monkeypatch.setattr(base, "report", lambda self, *args: reported.append(args))
    context = types.SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    monkeypatch.setattr(base, "get_context", lambda self: context)
    monkeypatch.setattr(managed.ray, "get", lambda answer: answer)
    agree = types.SimpleNamespace(remote=lambda rank, size: (False, []))
    plan = TrainingAttempt("mine", 1, "/nowhere", keep=1, best_metric="loss")
    note = TaskContext(1, 1, None, 1, None, "mine", "task", False, lambda *said: True)
    utils = managed._Utils(types.SimpleNamespace(meet=agree), plan, note)
    with pytest.raises(InvalidValueError, match="without best_metric='loss'"):
        utils.report({"los": 1.0}, checkpoint="a checkpoint")
    utils.report({}, checkpoint="a checkpoint")
    assert reported == [({}, "a checkpoint", None)]


# --- what is kept of its reports ------------------------------------------------------------------


def test_a_checkpoint_brings_all_reports_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the warm lane. Ranks that begin again report again what came after it."""
    monkeypatch.setattr(managed.ray, "get", lambda answer: answer)
    begin: Any = types.SimpleNamespace(remote=lambda: None)
    plan = TrainingAttempt("mine", 1, str(tmp_path))
    hooks = managed.ControllerHooks(types.SimpleNamespace(begin_group=begin), str(tmp_path), plan)
    (tmp_path / "model").mkdir()
    model = types.SimpleNamespace(path=str(tmp_path / "model"))
    for group in ([(0, None), (1, model), (2, None)], [(2, None), (3, model), (4, None)]):
        hooks.before_worker_group_start(None)
        for step, checkpoint in group:
            hooks.after_report(types.SimpleNamespace(checkpoint=checkpoint), [{"step": step}])
    name, rows = reports_in(tmp_path)
    assert (name, [metrics["step"] for *_, metrics in rows]) == ("mine", [0, 1, 2, 3])


# --- the workers ----------------------------------------------------------------------------------


def test_workers_that_a_cancelled_loan_still_gets_are_heard_of_before_its_end() -> None:
    """Else nobody would give them back, and the end of the pool would wait for them."""
    got: list[Any] = []

    class Cancelled(LoanWork):
        def assemble(self, members: Any) -> None:
            assert self.future.cancel()
            super().assemble(members)

    with parpool(1, profile="threads", quiet=True) as pool:
        engine = pool._engine
        driver = engine.driver

        def take(members: Any) -> None:
            got.append(members)
            if members is not None:
                driver.end_loan([worker_id for worker_id, _ in members])

        kind = functools.partial(Cancelled, take)
        loan = submit_gang(
            engine, engine.function(id), (), Options(), 1, None, is_loan=True, kind=kind
        )
        with pytest.raises(CancelledError):
            loan.result(300)
        assert pool.parfeval(abs, -1).result(300) == 1
    assert [members is None for members in got] == [False, True]


# --- what is said of a failure --------------------------------------------------------------------


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give an attempt of three ranks, whose pool is not there."""
    monkeypatch.setattr(managed.shortages, "holders", lambda: ("a notebook (1 GPU)",))
    lane: Any = types.SimpleNamespace(bundle=lambda: {"GPU": 1.0})
    made = ManagedAttempt(lane, TrainingAttempt("mine", 2, "/nowhere"), 3, Options(timeout_s=1.5))
    for rank in range(3):
        made._take(("rank", rank, "host", 1, ()))
    return made


def test_the_exception_of_the_users_is_in_front(attempt: Any) -> None:
    attempt._failures = {
        1: (True, pack_error(RuntimeError("Connection closed by peer")), 1.0),
        2: (False, pack_error(KeyError("x")), 2.0),
    }
    error = attempt._error(WorkerGroupError("", {1: RuntimeError()}))
    assert isinstance(error, SpmdError)
    assert (error.first_rank, set(error.failures)) == (2, {2})
    assert isinstance(error.__cause__, KeyError)
    assert "Rank 2 of mine (host) failed: KeyError: 'x'" in str(error), "no worker of the pool's"
    assert error.__cause__.__notes__[0] == "raypool: rank 2 of mine, attempt 2, host"


def test_a_process_that_has_gone_is_a_lost_worker(attempt: Any) -> None:
    attempt._failures = {0: (True, pack_error(RuntimeError("Connection closed by peer")), 1.0)}
    gone = WorkerHealthCheckFailedError("No answer.", rx.ActorDiedError())
    error = attempt._error(WorkerGroupError("", {0: RuntimeError(), 1: gone}))
    assert (error.first_rank, set(error.failures)) == (1, {1})
    lost = error.failures[1]
    assert isinstance(lost, WorkerLostError)
    assert (lost.reason, lost.attempts) == (LossReason.EXIT, 2)


def test_who_has_taken_the_room_for_the_ranks_is_named(attempt: Any) -> None:
    error = attempt._error(ControllerError(WorkerGroupStartupTimeoutError(3)))
    assert isinstance(error, ResourceError)
    assert "could not start the 3 ranks of mine" in str(error)
    assert "Held by: a notebook (1 GPU)." in str(error)
    assert (error.requested, error.holders) == (3, ("a notebook (1 GPU)",))


def test_ray_trains_own_mistake_is_its_cause(attempt: Any) -> None:
    cause = ValueError("odd")
    error = attempt._error(ControllerError(cause))
    assert isinstance(error, TrainingError)
    assert error.__cause__ is cause
    assert "mine was ended by Ray Train itself: ValueError: odd." in str(error)


def test_all_are_lost_with_their_controller(attempt: Any) -> None:
    attempt._failures = {0: (False, pack_error(rx.ActorDiedError()), 1.0)}
    error = attempt._error(rx.ActorDiedError())
    assert all(isinstance(each, WorkerLostError) for each in error.failures.values())
    assert len(error.failures) == 3


def test_who_was_late(attempt: Any) -> None:
    attempt._ends = {1: None}
    error = attempt._late()
    assert (error.first_rank, set(error.failures)) == (0, {0, 2})
    assert "timeout_s=1.5" in str(error)
    attempt._ends = dict.fromkeys(range(3))
    assert set(attempt._late().failures) == {0, 1, 2}, "if all have ended, the training has not"


def test_what_ends_because_all_nodes_go_has_the_error_of_the_pool(attempt: Any) -> None:
    """Unless a rank has failed by itself."""
    gone = PoolPreemptedError("The pool has ended.")
    attempt._managed.engine = types.SimpleNamespace(
        driver=types.SimpleNamespace(preempted_error=lambda: gone)
    )
    attempt._outcome = ControllerError(rx.ActorDiedError())
    with pytest.raises(PoolPreemptedError):
        attempt._result()
    attempt._failures = {2: (False, pack_error(KeyError("x")), 2.0)}
    with pytest.raises(SpmdError, match="KeyError"):
        attempt._result()


def test_of_a_group_that_begins_again_only_the_last_counts(attempt: Any) -> None:
    """Ray Train starts a group again by itself if its user asks for that."""
    for rank in range(3):
        attempt._take(("rank", rank, "host", 1, ()))
    attempt._take(("failure", 1, False, pack_error(ValueError("recovered")), 1.0))
    attempt._take(("group",))
    for rank in range(2):
        attempt._take(("rank", rank, "host", 1, ()))
    attempt._take(("failure", 0, False, pack_error(KeyError("for good")), 2.0))
    error = attempt._error(WorkerGroupError("", {0: KeyError("for good")}))
    assert (error.first_rank, set(error.failures)) == (0, {0})
    attempt._outcome = object.__new__(Result)
    for rank in range(2):
        attempt._take(("end", rank, pickle.dumps(rank), None))
    assert [end.value for end in attempt._result()] == [0, 1]


def test_a_model_may_take_long_to_come(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, the last messages are waited for only for a while."""
    limits: list[float | None] = []
    attempt._has_all_messages = types.SimpleNamespace(wait=limits.append)
    attempt._coordinator = types.SimpleNamespace(send=types.SimpleNamespace(remote=lambda *_: None))
    there = types.SimpleNamespace(is_initialized=lambda: True, kill=lambda _: None)
    monkeypatch.setattr(managed, "ray", there)
    attempt._outcome = object.__new__(Result)
    attempt._clean_up()
    assert limits == [None]
