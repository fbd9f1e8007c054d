"""`scaling_report`: where the time of a training's step goes, and what one worker would need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.engine.engine import Engine
from raypool.errors import InvalidTypeError, InvalidValueError, checked_count
from raypool.options import Options
from raypool.train.checkpoints import TrainingAttempt
from raypool.train.fit import gradient_bytes
from raypool.train.fit_loop import Measure, measure_loop
from raypool.train.runs import TrainingRun
from raypool.train.warm import WarmLane

if TYPE_CHECKING:
    import pandas as pd

GOOD_EFFICIENCY = 0.8
"""From this efficiency on there is no advice."""

SHORT_STEP_S = 0.02
"""A shorter step has too little computation to hide communication behind [s]."""

MUCH = 0.25
"""The share of a step from which communication is worth reducing."""


class Recipe(NamedTuple):
    """How to repeat the steps of a training: engine, number of workers, and places (None: any)."""

    engine: Engine
    size: int
    places: tuple[int, ...] | None
    config: Any


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """The times of a training's step, on all workers and on one; made by `scaling_report`.

    Attributes:
        num_workers: How many have trained.
        step_s: A step on all of them [s]; all times are medians.
        compute_s: The same without putting the gradients together, on the slowest worker [s].
        one_worker_s: A step with the same global mini-batch on one worker [s].
        gradient_bytes: The size of the gradients [bytes]; each worker sends and receives nearly
            twice as much in a step.
        num_steps: How many steps were measured.

    Example:
        >>> times = dict(step_s=0.125, compute_s=0.11, one_worker_s=0.4)
        >>> report = ScalingReport(num_workers=4, gradient_bytes=100_000_000, num_steps=20, **times)
        >>> report.speed_up, report.efficiency, round(report.communication_s, 3)
        (3.2, 0.8, 0.015)
    """

    num_workers: int
    step_s: float
    compute_s: float
    one_worker_s: float
    gradient_bytes: int
    num_steps: int

    @property
    def communication_s(self) -> float:
        """The part of a step that is neither computation nor hidden behind it [s]."""
        # both are measured, so noise may make the difference negative
        return max(self.step_s - self.compute_s, 0.0)

    @property
    def speed_up(self) -> float:
        """How many times faster the workers are than one of them."""
        return self.one_worker_s / self.step_s

    @property
    def efficiency(self) -> float:
        """The speed-up for each worker; 1 is perfect."""
        return self.speed_up / self.num_workers

    @property
    def advice(self) -> str:
        """Advice in a sentence or two."""
        if self.num_workers == 1:
            return (
                "There is only one worker, so there is nothing to compare: train on more of them"
                " first."
            )
        if self.efficiency >= GOOD_EFFICIENCY:
            return f"{self.num_workers} workers are worth it."
        if self.communication_s > MUCH * self.step_s:
            return self._links_advice()
        return (
            f"The computation takes {_ms(self.compute_s)} for a share of the mini-batch and"
            f" {_ms(self.one_worker_s)} for all of it: a share is too small to fill a device, or"
            " the workers share cores. A larger mini_batch_size helps in the first case, fewer"
            " workers in the second."
        )

    def _links_advice(self) -> str:
        # a ring: each worker sends all but one of as many pieces as there are workers, twice
        sent = 2 * self.gradient_bytes * (self.num_workers - 1) / self.num_workers
        rate = sent / self.communication_s
        if self.compute_s < SHORT_STEP_S:
            return (
                f"The step is too short: {_ms(self.compute_s)} of computation cannot hide"
                f" {_ms(self.communication_s)} of communication. A larger mini_batch_size (with a"
                " learning rate to match) or accumulate_steps make it longer."
            )
        return (
            f"The links are too slow for the model: {_size(self.gradient_bytes)} of gradients at"
            f" about {rate / 1e9:.1f} GB/s. Larger mini-batches, accumulate_steps, workers on one"
            " machine, and between machines fast_multinode=True help (docs/several_gpus.md)."
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for one worker and one for all, with the same global mini-batch."""
        import pandas as pd

        one = (1, self.one_worker_s, self.one_worker_s, 0.0, 1.0, 1.0)
        every = (
            self.num_workers,
            self.step_s,
            self.compute_s,
            self.communication_s,
            self.speed_up,
            self.efficiency,
        )
        columns = ["workers", "step_s", "compute_s", "communication_s", "speed_up", "efficiency"]
        return pd.DataFrame([one, every] if self.num_workers > 1 else [one], columns=columns)

    def __str__(self) -> str:
        """Return the report in a few lines."""
        return (
            f"{self.num_workers} worker{'s' if self.num_workers != 1 else ''}: {_ms(self.step_s)} a"
            f" step ({_ms(self.compute_s)} computation, {_ms(self.communication_s)} communication);"
            f" one worker: {_ms(self.one_worker_s)}\nspeed-up {self.speed_up:.2f}, efficiency"
            f" {self.efficiency:.0%}; {_size(self.gradient_bytes)} of gradients; medians of"
            f" {self.num_steps} steps\n{self.advice}"
        )


def scaling_report(run: TrainingRun, *, num_steps: int = 20, num_warm_up: int = 5) -> ScalingReport:
    """Measure what the workers of a training are worth, by some steps on all of them and on one.

    The steps are those of the training, from its first weights on: forward, backward and update,
    without reading the data. They are made on all its workers with and without putting their
    gradients together, then on the first one alone with the same global mini-batch. The training
    and its model are not touched. While the training goes on, this waits.

    Args:
        run: What `pool.fit` has returned, of a pool that is still open.
        num_steps: How many steps are measured in each case.
        num_warm_up: How many steps go before, and do not count.

    Raises:
        InvalidTypeError: `run` is no training.
        InvalidValueError: It is a training by `pool.train`; or there are too few steps.
        PoolClosedError: The pool was shut down.
        SpmdError: A step has failed: one worker may lack the memory for the whole mini-batch.

    Source:
        MATLAB R2025b, Scale Up Deep Learning in Parallel, on GPUs, and in the Cloud: what it says
        of the mini-batch size.

    Example:
        >>> import torch
        >>> from raypool import TrainingOptions, parpool
        >>> x, options = torch.linspace(-1, 1, 64)[:, None], TrainingOptions(max_epochs=1)
        >>> with parpool(1, profile="inline", quiet=True) as pool:
        ...     loss = torch.nn.functional.mse_loss
        ...     run = pool.fit(torch.nn.Linear(1, 1), (x, 3 * x), loss, options)
        ...     scaling_report(run, num_steps=3).speed_up
        1.0
    """
    if not isinstance(run, TrainingRun):
        raise InvalidTypeError(
            f"run={run!r} is a {type(run).__name__}. Give what pool.fit has returned."
        )
    num_steps = checked_count("num_steps", num_steps, least=1)
    num_warm_up = checked_count("num_warm_up", num_warm_up, least=0)
    if run.recipe is None:
        raise InvalidValueError(
            f"{run.name} was trained by a loop of your own, in which nobody else knows what a step"
            " is. scaling_report measures trainings by pool.fit; in a loop, measure steps with"
            " time.perf_counter, and report them."
        )
    recipe: Recipe = run.recipe
    measure = Measure(num_steps, num_warm_up, is_synchronised=True)
    together = apart = alone = _steps(recipe, recipe.size, measure)
    if recipe.size > 1:
        # without an exchange of gradients no rank waits for another
        apart = _steps(recipe, recipe.size, measure._replace(is_synchronised=False))
        alone = _steps(recipe, 1, measure)
    return ScalingReport(
        num_workers=recipe.size,
        step_s=_typical(together),
        compute_s=_typical(apart),
        one_worker_s=_typical(alone),
        gradient_bytes=gradient_bytes(recipe.config),
        num_steps=num_steps,
    )


def _steps(recipe: Recipe, size: int, measure: Measure) -> list[list[float]]:
    """Return the time of each step on each rank [s]."""
    places = recipe.places and recipe.places[:size]
    backend = WarmLane(recipe.engine, measure_loop, {"config": recipe.config, "measure": measure})
    plan = TrainingAttempt("scaling_report", 1, run_dir="")
    options = Options(retries=0, name="scaling_report")
    return [end.value for end in backend.begin(plan, size, places, options).result()]


def _typical(steps: Sequence[Sequence[float]]) -> float:
    # a step ends with its slowest rank
    return float(statistics.median(max(times) for times in zip(*steps, strict=True)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes < 1e5 else f"{num_bytes / 1e6:,.1f} MB"
