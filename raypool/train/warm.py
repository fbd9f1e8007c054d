"""The warm lane: Ray Train's loops on the pool's own workers, which are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypool.engine.engine import Engine
from raypool.futures import Future
from raypool.options import Options
from raypool.spmd.run import submit_spmd
from raypool.train.plan import Plan, RankEnd


class WarmLoop:
    """A loop as each rank calls it."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        self.func = loop  # called as in functools.partial, so that messages have its name

    def __call__(self, context: Any, config: Any, plan: Plan) -> RankEnd:
        """Run it, as Ray Train would."""
        from raypool.train.session import run_loop

        return run_loop(context, self.func, config, plan)


class WarmLane:
    """Runs a training's ranks as one spmd call."""

    def __init__(self, engine: Engine, loop: Callable[..., Any], config: Any) -> None:
        self._engine = engine
        self._loop = WarmLoop(loop)
        self._config = config

    def begin(self, plan: Plan, size: int, places: tuple[int, ...] | None, options: Options) -> Future[Any]:
        """Start an attempt."""
        return submit_spmd(self._engine, self._loop, (self._config, plan), options, size, places)
