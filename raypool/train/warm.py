"""The warm lane: loops for Ray Train on the pool's own workers, which run already."""

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
        # called as in functools.partial, so that messages have its name
        self.func = self.__wrapped__ = loop

    def __call__(self, context: Any, config: Any, plan: TrainingAttempt) -> RankEnd:
        """Run the loop as Ray Train would."""
        from raypool.train.ray_train import run_loop

        return run_loop(context, self.func, config, plan)


class WarmRank(RankFunction):
    """A rank whose value travels back: a training's result outlives the pool."""

    def answer(self, assignment: Assignment, value: Any) -> Any:
        """Return the value itself."""
        return value


class Ends:
    """The ends of the ranks, fetched when they are iterated over."""

    def __init__(self, ends: Sequence[Deferred]) -> None:
        self._ends = ends

    def __iter__(self) -> Iterator[RankEnd]:
        return (end.fetch() for end in self._ends)


class WarmWork(SpmdWork):
    """A call whose outcome is the ends of its ranks."""

    def answer_of(self, result: SliceResult) -> Deferred:
        """Note the place of a rank's value, which may be large."""
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

    def begin(
        self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options
    ) -> Future[Any]:
        """Start an attempt."""
        self._engine.check_open()  # else cancelled, which would hide the last attempt's error
        return submit_gang(
            self._engine, self._loop, (self._config, plan), options, size, places, kind=WarmWork
        )
