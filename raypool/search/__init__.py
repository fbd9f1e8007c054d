"""Search spaces and stopping rules for `pool.search`; Optuna suggests configurations (extra
`search`).

>>> from raypool import parpool, search
>>> space = {"lr": search.log_uniform(1e-4, 1e-1), "kind": search.choice("mlp", "cnn")}
>>> with parpool(2, profile="threads", quiet=True) as pool:
...     found = pool.search(lambda config: -config["lr"], space, num_trials=8, seed=1)
>>> len(found.to_frame()), found.best.config["lr"] < 0.1
(8, True)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_installed,
    checked_count,
    optional_count,
    whole_number,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner

__all__ = [
    "Halving",
    "Population",
    "Until",
    "choice",
    "halving",
    "int_uniform",
    "log_uniform",
    "median",
    "population",
    "uniform",
    "until",
]

STORABLE = (bool, int, float, str, type(None))
"""Types of values that Optuna can store."""


def uniform(low: float, high: float, *, step: float | None = None) -> BaseDistribution:
    """Return a range of real numbers, all equally likely; with `step`, of `low`, `low + step`, ...

    Example:
        >>> uniform(0.0, 0.5)
        FloatDistribution(high=0.5, log=False, low=0.0, step=None)
    """
    _check_range(low, high)
    made: BaseDistribution = _distributions().FloatDistribution(low, high, step=step)
    return made


def log_uniform(low: float, high: float) -> BaseDistribution:
    """Return a range of positive real numbers whose logarithms are equally likely.

    Example:
        >>> log_uniform(1e-5, 1e-1)
        FloatDistribution(high=0.1, log=True, low=1e-05, step=None)
    """
    _check_range(low, high, log=True)
    made: BaseDistribution = _distributions().FloatDistribution(low, high, log=True)
    return made


def int_uniform(low: int, high: int, *, step: int = 1, log: bool = False) -> BaseDistribution:
    """Return a range of integers, both ends included; with `log`, equally likely logarithms.

    Example:
        >>> int_uniform(16, 512, log=True)
        IntDistribution(high=512, log=True, low=16, step=1)
    """
    _check_range(low, high, log=log)
    if None in (whole_number(low), whole_number(high)):
        raise InvalidTypeError(
            f"The range from {low!r} to {high!r} must begin and end at integers."
        )
    made: BaseDistribution = _distributions().IntDistribution(low, high, step=step, log=log)
    return made


def choice(*values: Any) -> BaseDistribution:
    """Return a choice of these values: numbers, strings, True, False or None.

    Example:
        >>> choice("mlp", "cnn")
        CategoricalDistribution(choices=('mlp', 'cnn'))
    """
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        raise InvalidValueError(
            f"choice({values[0]!r}) has one value, a list. Use choice(*values)."
        )
    check_choices(values)
    if not values:
        raise InvalidValueError("choice() has no values to choose from.")
    made: BaseDistribution = _distributions().CategoricalDistribution(values)
    return made


class Halving(NamedTuple):
    """Successive halving; made by `halving`."""

    min_epochs: int
    max_epochs: int
    factor: int

    @property
    def levels(self) -> list[int]:
        """The epochs after which trials are compared, then the last epoch.

        Example:
            >>> Halving(1, 27, 3).levels, Halving(2, 10, 2).levels
            ([1, 3, 9, 27], [2, 4, 8, 10])
        """
        levels = [self.min_epochs]
        while levels[-1] * self.factor < self.max_epochs:
            levels.append(levels[-1] * self.factor)
        return [*levels, self.max_epochs]


def halving(*, min_epochs: int = 1, max_epochs: int, factor: int = 3) -> Halving:
    """Return the rule of asynchronous successive halving.

    Every trial trains for `min_epochs`, then waits without a worker. As soon as it is among the
    best third (with `factor=3`) of those that have come this far, it continues from its checkpoint
    until it has three times as many epochs, and so on up to `max_epochs`. The others are pruned.
    Where a worker would be idle, the best waiting trial continues without being among the best
    third; it is cancelled if it is still running when everything else has ended.

    A trial's epoch is what it reports as `epoch`, counted from 0; if it reports none, every report
    with the metric is one. At the end of its epochs `current_task().should_stop` becomes true:
    save a checkpoint, and return. A function that does not look at it ends at its next report.

    A function that also saves checkpoints in between, as when its machine is taken back, must
    report `epoch`: without it, a trial that runs again counts from its last rung.

    Example:
        >>> halving(max_epochs=27).levels
        [1, 3, 9, 27]
    """
    min_epochs = checked_count("min_epochs", min_epochs, least=1)
    max_epochs = checked_count("max_epochs", max_epochs, least=1)
    factor = checked_count("factor", factor, least=2)
    if max_epochs <= min_epochs:
        raise InvalidValueError(
            f"max_epochs={max_epochs} must be more than min_epochs={min_epochs}: there would be no"
            " rung at which to compare trials."
        )
    return Halving(min_epochs, max_epochs, factor)


class Population(NamedTuple):
    """Population-based training; made by `population`."""

    size: int
    every: int
    max_epochs: int
    perturb: Callable[[dict[str, Any], Random], Mapping[str, Any]] | None

    @property
    def levels(self) -> list[int]:
        """The epochs after which members pause, then the last epoch.

        Example:
            >>> Population(16, 5, 18, None).levels
            [5, 10, 15, 18]
        """
        return [*range(self.every, self.max_epochs, self.every), self.max_epochs]


def population(
    *,
    size: int,
    every: int,
    max_epochs: int,
    perturb: Callable[[dict[str, Any], Random], Mapping[str, Any]] | None = None,
) -> Population:
    """Return the rule of population-based training, which changes configurations as they train.

    `size` members begin with random configurations. After every `every` epochs each of them pauses,
    without a worker, like a trial at a rung of `halving`: save a checkpoint when
    `current_task().should_stop` is true, and return. A member in the worst quarter is replaced by a
    new trial, which continues from the last checkpoint of a member in the best quarter, with a
    perturbed copy of its configuration. All others continue. Members are compared by their scores
    at the same epoch, which is that of `halving`; one that has not come so far counts with its last
    score. No worker waits for a member, and the search ends when all members have `max_epochs`
    epochs.

    Args:
        size: The number of members, at least 4. It takes the place of `num_trials`.
        every: The number of epochs between two pauses.
        max_epochs: The number of epochs of each member.
        perturb: `perturb(config, random)` returns the new configuration. `config` has the parent's
            values of all ranges and choices in `space`; take random numbers from `random`, a
            `random.Random`. Numbers beyond a range are moved to its end. None: numbers are
            multiplied by 0.8 or 1.2, and choices are drawn again with probability 0.25.

    Raises:
        InvalidTypeError, InvalidValueError: One of them is wrong.

    Source:
        Jaderberg et al. 2017, Population Based Training of Neural Networks, truncation selection.

    Example:
        >>> population(size=16, every=5, max_epochs=18).levels
        [5, 10, 15, 18]
    """
    size = checked_count("size", size, least=4)
    every = checked_count("every", every, least=1)
    max_epochs = checked_count("max_epochs", max_epochs, least=1)
    if max_epochs <= every:
        raise InvalidValueError(
            f"max_epochs={max_epochs} must be more than every={every}: members would never be"
            " compared."
        )
    if perturb is not None and not callable(perturb):
        raise InvalidTypeError(
            f"perturb={perturb!r} is not callable. Pass a function of a configuration and a"
            " random.Random."
        )
    return Population(size, every, max_epochs, perturb)


def median(*, num_startup_trials: int = 5, num_warmup_epochs: int = 0) -> BasePruner:
    """Return the rule that stops a trial whose best score is worse than the others' median.

    It compares scores at the same epoch, not before `num_startup_trials` have completed, and not in
    the first `num_warmup_epochs`. Any other Optuna pruner can be used in its place.
    """
    from optuna.pruners import MedianPruner

    return MedianPruner(num_startup_trials, num_warmup_epochs)


class Until(NamedTuple):
    """When a search ends early; made by `until`."""

    seconds: float | None
    score: float | None
    patience: int | None


def until(
    *, seconds: float | None = None, score: float | None = None, patience: int | None = None
) -> Until:
    """Return the rule that ends a search before all its trials: whichever of these comes first.

    Then no trial starts, and running ones are asked to stop, like pruned ones.

    Args:
        seconds: After this time [s], counted from the call.
        score: As soon as a trial has this score or a better one.
        patience: After this many trials in a row without a new best score.

    Example:
        >>> until(score=0.99, patience=50)
        Until(seconds=None, score=0.99, patience=50)
    """
    for name, value in (("seconds", seconds), ("score", score)):
        if value is not None and not isinstance(value, Real):
            raise InvalidTypeError(f"until({name}={value!r}) is not a number.")
    if score is not None and not math.isfinite(score):
        raise InvalidValueError(f"until(score={score!r}) is not finite.")
    if seconds is not None and not seconds > 0:
        raise InvalidValueError(f"until(seconds={seconds!r}) must be more than 0.")
    patience = optional_count("patience", patience, least=1)
    if seconds is None and score is None and patience is None:
        raise InvalidValueError("until() needs seconds=, score= or patience=.")
    return Until(seconds, score, patience)


def check_choices(values: Sequence[Any]) -> None:
    """Make sure that Optuna can store each value of a choice.

    Raises:
        InvalidValueError: It cannot.
    """
    for value in values:
        if not isinstance(value, STORABLE):
            raise InvalidValueError(
                f"A choice cannot store {value!r}, a {type(value).__name__}. Use names for such"
                " values, and look them up in the function."
            )


def _check_range(low: float, high: float, *, log: bool = False) -> None:
    if not (isinstance(low, Real) and isinstance(high, Real)):
        raise InvalidTypeError(
            f"The range from {low!r} to {high!r} must have numbers at both ends."
        )
    if not low < high:  # also NaN
        raise InvalidValueError(f"The range from {low!r} to {high!r} is empty.")
    if high - low > sys.float_info.max:
        raise InvalidValueError(f"The range from {low!r} to {high!r} is not finite.")
    if log and low <= 0:
        raise InvalidValueError(
            f"The range from {low!r} to {high!r} has no logarithm: it must begin above 0."
        )


def _distributions() -> ModuleType:
    check_installed("search", "A search space", "optuna")
    import optuna.distributions

    return optuna.distributions
