"""`scaling_report`: where the time of a training's step goes, and what one worker would need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.engine.engine import Engine
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_installed,
    checked_count,
    explains_calls,
)
from raypool.options import Options
from raypool.train.checkpoints import TrainingAttempt
from raypool.train.controller import WarmLane
from raypool.train.runs import TrainingRun

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from raypool.train.fit_loop import Measure

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
    """The times of a training's step on 1, 2, 4, ... and all workers; made by `scaling_report`.

    Attributes:
        times: For one worker, 2, 4, ... and all of them: their number, the time of a step [s],
            and the time without adding up the gradients, on the slowest worker [s]. All have the
            same global mini-batch; all times are medians.
        gradient_bytes: The size of the gradients [bytes]; each worker sends and receives nearly
            twice as much in a step.
        num_steps: How many steps were measured.

    Example:
        >>> times = ((1, 0.4, 0.4), (2, 0.22, 0.2), (4, 0.125, 0.11))  # workers, step, computation
        >>> report = ScalingReport(times=times, gradient_bytes=100_000_000, num_steps=20)
        >>> report.speed_up, report.efficiency, round(report.communication_s, 3)
        (3.2, 0.8, 0.015)
    """

    times: Sequence[tuple[int, float, float]]
    gradient_bytes: int
    num_steps: int

    @property
    def num_workers(self) -> int:
        """How many workers trained."""
        return self.times[-1][0]

    @property
    def step_s(self) -> float:
        """A step on all workers [s]."""
        return self.times[-1][1]

    @property
    def compute_s(self) -> float:
        """A step on all workers without adding up the gradients, on the slowest worker [s]."""
        return self.times[-1][2]

    @property
    def one_worker_s(self) -> float:
        """A step with the same global mini-batch on one worker [s]."""
        return self.times[0][1]

    @property
    def communication_s(self) -> float:
        """The part of a step that is neither computation nor hidden behind it [s]."""
        # both are measured, so noise may make the difference negative
        return max(self.step_s - self.compute_s, 0.0)

    @property
    def speed_up(self) -> float:
        """How many times faster all workers are than one of them."""
        return self.one_worker_s / self.step_s

    @property
    def efficiency(self) -> float:
        """The speed-up for each worker; 1 is perfect."""
        return self.speed_up / self.num_workers

    @property
    def advice(self) -> str:
        """Advice in a sentence or two."""
        if self.num_workers == 1:
            return "There is only one worker, so there is nothing to compare: train on several."
        if self.efficiency >= GOOD_EFFICIENCY:
            return f"{self.num_workers} workers are worth it."
        frame = self.to_frame()
        good = frame[(frame["workers"] > 1) & (frame["efficiency"] >= GOOD_EFFICIENCY)]
        until = f" Up to {good['workers'].max()} workers are worth it." if len(good) else ""
        if self.communication_s > MUCH * self.step_s:
            return self._links_advice() + until
        return (
            f"The computation takes {_ms(self.compute_s)} for a share of the mini-batch and"
            f" {_ms(self.one_worker_s)} for all of it: a share is too small to fill a device, or"
            " the workers share cores. A larger mini_batch_size helps in the first case, fewer"
            f" workers in the second.{until}"
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
        """Return a row for each number of workers."""
        import pandas as pd

        frame = pd.DataFrame(self.times, columns=["workers", "step_s", "compute_s"])
        frame["communication_s"] = (frame["step_s"] - frame["compute_s"]).clip(lower=0.0)
        frame["speed_up"] = self.one_worker_s / frame["step_s"]
        frame["efficiency"] = frame["speed_up"] / frame["workers"]
        return frame

    def plot(self) -> Figure:
        """Return a figure: the speed-up against the number of workers, beside the ideal.

        Raises:
            ModuleNotFoundError: matplotlib is missing; it comes with `raypool[plots]`.
        """
        check_installed("plots", "A plot", "matplotlib")
        from matplotlib.figure import Figure  # not pyplot, which would keep it and choose a backend

        frame = self.to_frame()
        figure = Figure(figsize=(5, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="workers", ylabel="speed-up", xticks=frame["workers"])
        axes.plot(frame["workers"], frame["workers"], color="0.7", linestyle="--", label="ideal")
        axes.plot(frame["workers"], frame["speed_up"], marker="o", label="measured")
        for row in frame.itertuples():
            axes.annotate(
                f"{row.efficiency:.0%}",
                (row.workers, row.speed_up),
                (6, -12),
                textcoords="offset points",
            )
        axes.legend(frameon=False)
        return figure

    def __str__(self) -> str:
        """Return the report in a few lines."""
        lines = [
            f"{workers} worker{'s' if workers != 1 else ''}: {_ms(step_s)} a step"
            f" ({_ms(compute_s)} computation, {_ms(communication_s)} communication); speed-up"
            f" {speed_up:.2f}, efficiency {efficiency:.0%}"
            for workers, step_s, compute_s, communication_s, speed_up, efficiency in (
                self.to_frame().itertuples(index=False)
            )
        ]
        size = f"{_size(self.gradient_bytes)} of gradients; medians of {self.num_steps} steps"
        return "\n".join([*lines, size, self.advice])


@explains_calls
def scaling_report(run: TrainingRun, *, num_steps: int = 20, num_warm_up: int = 5) -> ScalingReport:
    """Measure what the workers of a training are worth: some steps on 1, 2, 4, ... and all.

    The steps are those of the training, from its first weights on: forward, backward and update,
    without reading the data, and with the same global mini-batch each time. Several workers also
    make them without adding up their gradients. The training and its model are not touched. If the
    training is still running, this waits for its end.

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
        >>> x, options = torch.linspace(-1, 1, 128)[:, None], TrainingOptions(max_epochs=1)
        >>> with parpool(1, profile="inline", quiet=True) as pool:
        ...     loss = torch.nn.functional.mse_loss
        ...     run = pool.fit(torch.nn.Linear(1, 1), (x, 3 * x), loss, options)
        ...     scaling_report(run, num_steps=3).speed_up
        1.0
    """
    if not isinstance(run, TrainingRun):
        raise InvalidTypeError(
            f"run={run!r} is a {type(run).__name__}. Pass what pool.fit returned."
        )
    num_steps = checked_count("num_steps", num_steps, least=1)
    num_warm_up = checked_count("num_warm_up", num_warm_up, least=0)
    if run.recipe is None:
        raise InvalidValueError(
            f"{run.name} was trained by a loop of your own, whose steps raypool does not know."
            " scaling_report measures trainings by pool.fit. In a loop, measure steps with"
            " time.perf_counter, and report them."
        )
    # they import Ray Train
    from raypool.train.fit import gradient_bytes
    from raypool.train.fit_loop import Measure

    recipe: Recipe = run.recipe
    measure = Measure(num_steps, num_warm_up, is_synchronized=True)
    times = []
    for size in [*(2**n for n in range((recipe.size - 1).bit_length())), recipe.size]:
        step_s = compute_s = _typical(_steps(recipe, size, measure))
        if size > 1:
            # without adding up the gradients no rank waits for another
            apart = measure._replace(is_synchronized=False)
            compute_s = _typical(_steps(recipe, size, apart))
        times.append((size, step_s, compute_s))
    return ScalingReport(
        times=times, gradient_bytes=gradient_bytes(recipe.config), num_steps=num_steps
    )


def _steps(recipe: Recipe, size: int, measure: Measure) -> list[list[float]]:
    """Return the time of each step on each rank [s]."""
    from raypool.train.fit_loop import measure_loop

    places = recipe.places and recipe.places[:size]
    backend = WarmLane(recipe.engine, measure_loop, {"config": recipe.config, "measure": measure})
    plan = TrainingAttempt("scaling_report", 1, run_dir="")
    options = Options(retries=0, name="scaling_report")
    attempt = backend.begin(plan, size, places, options)
    try:
        return [end.value for end in attempt.result()]
    except BaseException:  # after Ctrl-C nobody else could end it
        attempt.cancel()
        raise


def _typical(steps: Sequence[Sequence[float]]) -> float:
    # a step ends with its slowest rank
    return float(statistics.median(max(times) for times in zip(*steps, strict=True)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes < 1e5 else f"{num_bytes / 1e6:,.1f} MB"
