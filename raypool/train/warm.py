"""The warm lane: Ray Train's loops on the pool's own workers, which are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raypool.channel.records import SliceResult, WorkerInfo
from raypool.engine.engine import Engine
from raypool.futures import Deferred, Future
from raypool.options import Options
from raypool.spmd.call import SpmdWork, submit_gang
from raypool.spmd.group import Assignment
from raypool.spmd.rank import RankFunction
from raypool.train.checkpoints import RankEnd, TrainingAttempt


class WarmLoop:
    """A loop as each rank calls it."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        self.func = loop  # called as in functools.partial, so that messages have its name

    def __call__(self, context: Any, config: Any, plan: TrainingAttempt) -> RankEnd:
        """Run it, as Ray Train would."""
        from raypool.train.ray_train import run_loop

        return run_loop(context, self.func, config, plan)


class WarmRank(RankFunction):
    """A rank whose value travels back: a training's result is there when the pool is not any more."""

    def answer(self, assignment: Assignment, value: Any) -> Any:
        """Return the value itself."""
        return value


class Ends:
    """What the ranks have brought back, fetched when somebody goes through it."""

    def __init__(self, ends: Sequence[Deferred]) -> None:
        self._ends = ends

    def __iter__(self) -> Iterator[RankEnd]:
        return (end.fetch() for end in self._ends)


class WarmWork(SpmdWork):
    """A call whose outcome is the ends of its ranks."""

    def answer_of(self, result: SliceResult) -> Deferred:
        """Note where a rank's value is; it may be large."""
        return Deferred(result.values, result.offset)

    def outcome(self, members: Sequence[tuple[int, WorkerInfo]], answers: Sequence[Any]) -> Ends:
        """Return the ends, by rank."""
        return Ends(answers)


class WarmLane:
    """Runs a training's ranks as one call on all of them."""

    def __init__(self, engine: Engine, loop: Callable[..., Any], config: Any) -> None:
        self._engine = engine
        self._loop = WarmRank(WarmLoop(loop))
        self._config = config

    def begin(self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options) -> Future[Any]:
        """Start an attempt."""
        self._engine.check_open()  # a pool that is about to end would cancel it, and the error of the one before were lost
        return submit_gang(self._engine, self._loop, (self._config, plan), options, size, places, kind=WarmWork)
