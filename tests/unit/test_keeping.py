"""How the ranks of a training keep a checkpoint together, where one of them does not get to the end of it. Without torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raypool.train import checkpoints
from raypool.train.keeping import Delivery, Keeper
from raypool.train.plan import Plan

WAIT_S = 20.0


class Interrupted(BaseException):
    """As a rank is whose peer has failed."""


class Meetings:
    """Two ranks in threads that tell each other things; rank 1 is interrupted in its third meeting, while rank 0 commits."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.said: list[Any] = [None, None]
        self.counts = [0, 0]
        self.is_committing = threading.Event()
        self.is_interrupted = threading.Event()

    def tell(self, rank: int, value: Any) -> list[Any]:
        self.counts[rank] += 1
        if self.counts[rank] == 3:
            if rank == 0:
                return [value, None]
            assert self.is_committing.wait(WAIT_S)
            raise Interrupted
        self.said[rank] = value
        self.barrier.wait(WAIT_S)
        said = list(self.said)
        self.barrier.wait(WAIT_S)
        return said


def test_a_rank_that_is_interrupted_deletes_nothing_of_what_another_commits(tmp_path: Path, monkeypatch: Any) -> None:
    from ray.train import Checkpoint

    meetings, write = Meetings(), checkpoints._write

    def write_slowly(file: Path, text: str) -> None:
        write(file, text)
        meetings.is_committing.set()
        assert meetings.is_interrupted.wait(WAIT_S)

    monkeypatch.setattr(checkpoints, "_write", write_slowly)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"file-{number}").touch()
    plan = Plan("fit", 1, str(tmp_path / "run"))

    def rank_1() -> None:
        with pytest.raises(Interrupted):
            Keeper(plan, 1, lambda value: meetings.tell(1, value)).keep(None, None, {})
        meetings.is_interrupted.set()

    other = threading.Thread(target=rank_1)
    other.start()
    delivery = Delivery(Checkpoint.from_directory(str(source)), False, False, None)
    path = Keeper(plan, 0, lambda value: meetings.tell(0, value)).keep(delivery, None, {"loss": 1.0})
    other.join(WAIT_S)
    (kept,) = checkpoints.list_kept(plan.run_dir)
    assert str(kept.path) == path
    assert len(list(kept.path.iterdir())) == 20
