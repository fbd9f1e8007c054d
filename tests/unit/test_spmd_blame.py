"""What is said of an spmd call that has failed."""

from __future__ import annotations

import pytest

from raypool.channel.records import WorkerInfo
from raypool.errors import (
    CollectiveError,
    LossReason,
    RankInterrupted,
    SpmdError,
    TaskTimeoutError,
    WorkerLostError,
)
from raypool.spmd.call import WarmGroups
from raypool.spmd.failures import RankFailure, is_disconnect, spmd_error


def end(rank: int, error: BaseException, at: float = 0.0) -> RankFailure:
    return RankFailure(rank, error, at, WorkerInfo(rank + 10, "lab", 1, gpus=(rank,)))


def interrupted(
    operation: str | None = None, place: str = "train.py:12 in step"
) -> RankInterrupted:
    at_hand = None if operation is None else (operation, 3, None)
    return RankInterrupted("interrupted", at_hand=at_hand, place=place)


def killed() -> WorkerLostError:
    return WorkerLostError("killed", reason=LossReason.STOPPED, attempts=1)


def test_the_first_in_time_is_named_and_the_rest_is_counted():
    ends = [
        end(0, interrupted("all_reduce")),
        end(1, KeyError("b"), at=2.0),
        end(2, ValueError("boom"), at=1.0),
        end(3, killed()),
    ]
    error = spmd_error("train", ends, None)
    assert isinstance(error, SpmdError)
    assert str(error).startswith(
        "Rank 2 of train (worker 12, lab, GPU 2) failed: ValueError: boom. "
    )
    assert "1 more failed, and 2 were interrupted" in str(error)
    assert error.first_rank == 2
    assert error.__cause__ is error.failures[2]
    assert set(error.failures) == {1, 2}


def test_a_port_that_is_taken_is_the_fault_of_the_rank_itself():
    dist = pytest.importorskip("torch.distributed")
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(dist.DistError) as raised:
        dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)
    assert not is_disconnect(raised.value)


def test_a_lost_rank_is_named_with_the_reason():
    lost = WorkerLostError(
        "Worker 11 was lost while it ran rank 1 of train: SIGKILL.",
        reason=LossReason.EXIT,
        attempts=1,
    )
    error = spmd_error("train", [end(0, interrupted("barrier")), end(1, lost)], None)
    assert "Rank 1 of train" in str(error)
    assert "SIGKILL" in str(error)
    assert "1 was interrupted because of it" in str(error)
    assert error.failures == {1: lost}


def test_nobody_else_no_rest():
    assert "interrupted" not in str(spmd_error("train", [end(0, ValueError("x"))], None))


def test_connections_that_broke_by_themselves_name_the_first_who_noticed():
    ends = [end(0, interrupted("all_reduce"), at=5.0), end(1, interrupted("all_reduce"), at=4.0)]
    error = spmd_error("train", ends, None)
    assert error.first_rank == 1
    assert "no rank is known to have failed. Rank 1 (worker 11, lab, GPU 1) was" in str(error)


def test_ranks_that_did_not_meet_are_told_what_each_wanted():
    text = "Rank 0 is in all_reduce, rank 1 in barrier."
    ends = [end(rank, CollectiveError(text, missing=())) for rank in (0, 1)]
    error = spmd_error("train", ends, None)
    assert text in str(error)
    assert isinstance(error.__cause__, CollectiveError)


def test_of_late_ranks_the_one_that_the_others_wait_for_is_named():
    ends = [
        end(0, interrupted("all_reduce")),
        end(1, interrupted()),
        end(2, interrupted("all_reduce")),
    ]
    error = spmd_error("train", ends, 2.5)
    assert error.first_rank == 1
    assert isinstance(error.failures[1], TaskTimeoutError)
    assert set(error.failures) == {1}
    for words in (
        "timeout_s=2.5",
        "rank 1 was at train.py:12 in step",
        "ranks 0 and 2 waited in all_reduce (the 3rd operation",
    ):
        assert words in str(error)


def test_a_late_rank_that_had_to_be_killed_is_named():
    error = spmd_error("train", [end(0, interrupted("barrier")), end(1, killed())], 1.0)
    assert error.first_rank == 1
    assert "rank 1 did not answer, and was killed with its worker" in str(error)


def test_if_all_wait_all_are_named():
    error = spmd_error("train", [end(0, interrupted("receive")), end(1, interrupted("send"))], 1.0)
    assert set(error.failures) == {0, 1}
    assert "rank 0 was in receive (the 3rd operation of the call); rank 1 was in send" in str(error)


CALLS = [
    ([(1, 2), (1, 2)], [0, 0]),
    ([(1, 2), (2, 1)], [0, 1]),
    ([(1, 2), (3, 4), (1, 2)], [0, 1, 0]),
    ([(1, 2), (2,), (1, 2), (2,)], [0, 1, 2, 3]),
    ([(1, 2), (1, 2, 3), (1, 2)], [0, 1, 2]),
]


def test_a_group_serves_again_while_its_workers_were_in_no_other():
    for calls, numbers in CALLS:
        groups = WarmGroups()
        assert [groups.number_for(call) for call in calls] == numbers


def test_a_group_that_was_forgotten_does_not_serve_again():
    groups = WarmGroups()
    first = groups.number_for((1, 2))
    groups.forget((2,))
    assert groups.number_for((1, 2)) != first
