"""The managed lane without Ray: how ranks meet, who sits where, which trainers there are, what is said of a failure."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray.train")

from ray import exceptions as rx
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raypool.engine.answers import pack_error
from raypool.engine.backend import WorkerInfo
from raypool.errors import InvalidTypeError, LossReason, ResourceError, SpmdError, TrainingError, WorkerLostError
from raypool.train import outcome
from raypool.train.guests import Seat, num_required
from raypool.train.letterbox import Letterbox, Verdict, Words
from raypool.train.outcome import Case, Said
from raypool.train.trainers import (
    CONTROLLER_ENVIRONMENT,
    GuestConfig,
    Settings,
    _config_parameter,
    check_trainer,
    seated,
)

# --- the letterbox ----------------------------------------------------------------------------------------------------


def words(*names: str, has_checkpoint: bool = False) -> Words:
    return Words(names, has_checkpoint)


async def drained(box: Letterbox) -> list[Any]:
    await box.close()
    return await box.take(1)


def test_ranks_meet_and_hear_the_same() -> None:
    async def run() -> list[Verdict]:
        box = Letterbox()
        await box.begin_group()
        first = asyncio.gather(*(box.meet(1, 1, rank, 3, words("loss", has_checkpoint=rank == 2)) for rank in range(3)))
        await first
        early = asyncio.ensure_future(box.meet(1, 2, 0, 3, words("loss")))
        await asyncio.sleep(0)
        await box.ask_to_stop()
        late = await asyncio.gather(*(box.meet(1, 2, rank, 3, words()) for rank in (1, 2)))
        assert {await early} == set(late)
        return [*first.result(), late[0]]

    *first, second = asyncio.run(run())
    assert {verdict.should_stop for verdict in first} == {False}
    assert [each.has_checkpoint for each in first[0].words] == [False, False, True]
    assert second.should_stop
    assert second.words == (words("loss"), words(), words())


def test_who_waits_for_a_rank_that_has_returned_hears_of_it() -> None:
    async def run(is_early: bool) -> Verdict:
        box = Letterbox()
        await box.begin_group()
        if is_early:
            await box.end(1, 1, b"", None)
        waiting = asyncio.ensure_future(box.meet(1, 1, 0, 2, words("loss")))
        await asyncio.sleep(0)
        if not is_early:
            await box.end(1, 1, b"", None)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(run(True)) == asyncio.run(run(False)) == Verdict(False, (), (1,))


def test_letters_come_in_order_and_to_their_end() -> None:
    async def run() -> list[Any]:
        box = Letterbox()
        assert await box.take(0.01) == []
        taking = asyncio.ensure_future(box.take(5))
        await asyncio.sleep(0)
        await box.begin_group()
        assert await taking == [("group", 1)]
        await box.push(1, 0, 1, b"batch")
        await box.push(1, 0, 2, b"")
        await box.end(1, 0, b"value", {"loss": 1})
        await box.end(0, 1, b"of a group that is gone", None)
        return await drained(box)

    assert asyncio.run(run()) == [("batch", 1, 0, 1, b"batch"), ("end", 0, b"value", {"loss": 1}), ("closed",)]


def test_a_wish_to_stop_counts_from_the_first_line_on_in_the_next_group() -> None:
    async def run() -> list[tuple[int, bool]]:
        box = Letterbox()
        await box.begin_group()
        await box.ask_to_stop()
        before = await box.greet("host", 1)
        await box.begin_group()
        return [before, await box.greet("host", 1)]

    assert asyncio.run(run()) == [(1, False), (2, True)]


@pytest.mark.parametrize(
    ("kinds", "may"),
    [
        ([], True),
        (["cut off"], True),
        (["again", "cut off"], True),
        (["cut off", "for good"], False),
        (["again", "for good"], False),
    ],
)
def test_what_may_be_tried_again(kinds: list[str], may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.train.letterbox.MAY_BE_LATE_S", 0.0)

    async def run() -> bool:
        box = Letterbox()
        await box.begin_group()
        for rank, kind in enumerate(kinds):
            await box.fail(1, rank, kind, b"", 0.0)
        return await box.may_try_again()

    assert asyncio.run(run()) is may


def test_who_has_failed_first_may_say_so_late() -> None:
    async def run() -> bool:
        box = Letterbox()
        await box.begin_group()
        await box.fail(1, 1, "cut off", b"", 0.0)
        asking = asyncio.ensure_future(box.may_try_again())
        await asyncio.sleep(0.02)
        await box.fail(1, 0, "for good", b"", 0.0)
        return await asking

    assert asyncio.run(run()) is False


# --- seats and trainers -----------------------------------------------------------------------------------------------


def seat(rank: int, node: str) -> Seat:
    return Seat(rank, 10 + rank, rank, node, {"CUDA_VISIBLE_DEVICES": str(rank)})


def test_each_guest_sits_on_its_node() -> None:
    seats = [seat(0, "a"), seat(1, "b"), seat(2, "a")]
    assert [each.rank for each in seated(["a", "a", "b"], seats)] == [0, 2, 1]
    assert seated(["a", "b", "a"], seats) == seats
    with pytest.raises(RuntimeError, match="Rank 1 is on node b"):
        seated(["b", "b"], seats)


class Mine(Backend):
    pass


class MineConfig(BackendConfig):
    answer = 42

    @property
    def backend_cls(self) -> type[Backend]:
        return Mine


def test_the_config_of_guests_is_like_the_one_inside() -> None:
    config = GuestConfig(MineConfig(), [seat(0, "a")])
    assert config.answer == 42
    assert config.train_func_context is MineConfig().train_func_context
    assert not config.backend_cls.share_cuda_visible_devices
    with pytest.raises(AttributeError):
        config.nothing  # noqa: B018
    copy = pickle.loads(pickle.dumps(GuestConfig(TorchConfig(backend="gloo"), [seat(0, "a")])))
    assert (copy.backend, copy.seats) == ("gloo", (seat(0, "a"),))


class Framework(DataParallelTrainer):
    """As `TensorflowTrainer` and `JaxTrainer` are made."""

    def __init__(self, loop: Any, *, train_loop_config: Any = None, framework_config: Any = None, **others: Any) -> None:
        super().__init__(loop, train_loop_config=train_loop_config, backend_config=framework_config, **others)


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        (TorchTrainer, "torch_config"),
        (Framework, "framework_config"),
        (DataParallelTrainer, "backend_config"),
    ],
)
def test_trainers(trainer: Any, name: str) -> None:
    assert check_trainer(trainer) is trainer
    assert _config_parameter(trainer) == name


class TwoConfigs(DataParallelTrainer):
    def __init__(self, loop: Any, a_config: Any = None, b_config: Any = None) -> None:
        pass


def test_no_trainers() -> None:
    for trainer in [int, "torch", TorchTrainer.fit, object(), TwoConfigs]:
        with pytest.raises(InvalidTypeError, match="trainer="):
            check_trainer(trainer)


def test_loops_take_their_config_or_nothing() -> None:
    assert num_required(lambda *args, **kwargs: 0) == 0
    assert num_required(lambda config, *, other=1: 0) == 1
    with pytest.raises(InvalidTypeError, match="takes 2 arguments"):
        num_required(lambda config, other: 0)


def test_ray_has_the_decision_by_which_it_is_held_back() -> None:
    assert FailureDecision.RETRY.value == "RETRY"


def test_settings_are_there_for_as_long_as_anybody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name, other, *_ = CONTROLLER_ENVIRONMENT
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(other, "the user's")
    settings = Settings()
    leave_first, leave_second = settings.enter(60.0), settings.enter(60.0)
    leave_first()
    leave_first()
    assert os.environ[name] == CONTROLLER_ENVIRONMENT[name]
    assert os.environ[other] == "the user's"
    leave_second()
    assert name not in os.environ
    assert os.environ[other] == "the user's"


# --- what is said of a failure ----------------------------------------------------------------------------------------

CASE = Case("mine", 3, {rank: WorkerInfo(10 + rank, "host", 1) for rank in range(3)}, 2, 60.0)


def said(kind: str, error: BaseException, at: float = 1.0) -> Said:
    return Said(kind, pack_error(error), at)


def test_the_exception_of_the_users_is_in_front() -> None:
    words = {1: said("cut off", RuntimeError("Connection closed by peer"), 1.0), 2: said("for good", KeyError("x"), 2.0)}
    error = outcome.failure(CASE, ControllerError(RuntimeError("not tried again")), words)
    assert isinstance(error, SpmdError)
    assert (error.first_rank, set(error.failures)) == (2, {2})
    assert isinstance(error.__cause__, KeyError)
    assert "Rank 2 of mine (worker 12, host) failed: KeyError: 'x'" in str(error)


def test_a_process_that_has_gone_is_a_lost_worker() -> None:
    gone = WorkerHealthCheckFailedError("No answer.", rx.ActorDiedError())
    words = {0: said("cut off", RuntimeError("Connection closed by peer"))}
    error = outcome.failure(CASE, WorkerGroupError("", {0: RuntimeError(), 1: gone}), words)
    assert isinstance(error, SpmdError)
    assert (error.first_rank, set(error.failures)) == (1, {1})
    lost = error.failures[1]
    assert isinstance(lost, WorkerLostError)
    assert (lost.reason, lost.attempts) == (LossReason.EXIT, 2)


def test_no_room_for_the_guests() -> None:
    error = outcome.failure(CASE, ControllerError(WorkerGroupStartupTimeoutError(3)), {})
    assert isinstance(error, ResourceError)
    assert "start_timeout_s=60" in str(error)
    assert error.requested == 3


@pytest.mark.parametrize("is_controllers", [True, False])
def test_ray_trains_own_mistake(is_controllers: bool) -> None:
    cause = ValueError("odd")
    error = outcome.failure(CASE, ControllerError(cause) if is_controllers else cause, {})
    assert isinstance(error, TrainingError)
    assert error.__cause__ is cause
    assert "mine was ended by Ray Train itself: ValueError: odd." in str(error)


def test_all_are_lost_with_their_controller() -> None:
    error = outcome.failure(CASE, rx.ActorDiedError(), {})
    assert isinstance(error, SpmdError)
    assert all(isinstance(each, WorkerLostError) for each in error.failures.values())
    assert len(error.failures) == 3


def test_who_was_late() -> None:
    error = outcome.late(CASE, 1.5, [1])
    assert (error.first_rank, set(error.failures)) == (0, {0, 2})
    assert "timeout_s=1.5" in str(error)
