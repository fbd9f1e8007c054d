"""The space of a search: what its trials are drawn from, and the file that keeps it."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from raypool.errors import InvalidTypeError, InvalidValueError, JournalError
from raypool.search import STORABLE, check_choices
from raypool.worker.folders import write_file

SPACE = "space.json"
"""The file in the folder of a search with its space."""

CHANGE = 0.2
"""By this part a population changes numbers, up or down."""

NEW_CHOICE = 0.25
"""The probability with which a population draws a choice again."""


class Space(NamedTuple):
    """A search space: distributions of Optuna's, and values that are the same in all trials."""

    distributions: dict[str, Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, space: Any, metric: str | None) -> Space:
        """Check a space of the user's.

        Raises:
            InvalidTypeError, InvalidValueError: It is none.
        """
        import optuna

        if not isinstance(space, Mapping):
            raise InvalidTypeError(
                f"space={space!r} must be a dict of names and ranges, such as"
                ' {"lr": search.log_uniform(1e-5, 1e-1)}.'
            )
        made = cls({}, {})
        for name, value in space.items():
            if not isinstance(name, str):
                raise InvalidTypeError(f"The name {name!r} in space= must be a string.")
            if name == metric:
                raise InvalidValueError(f"{name!r} is both the metric and a name in space=.")
            if isinstance(value, optuna.distributions.BaseDistribution):
                made.distributions[name] = value
                check_choices(getattr(value, "choices", ()))
            elif isinstance(value, STORABLE):
                made.constants[name] = value
            else:
                raise InvalidTypeError(
                    f"space[{name!r}] is {value!r}. Use search.choice(...) for a choice of values,"
                    " search.uniform(low, high) for a range, or a plain value for all trials."
                )
        if not made.distributions:
            raise InvalidValueError("space= has nothing to search: all values in it are fixed.")
        return made

    def config(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a trial."""
        return {**params, **self.constants}

    def perturbed(self, params: dict[str, Any], perturb: Any, random: Random) -> dict[str, Any]:
        """Return new values for these: from the user's function, else by `changed`.

        Raises:
            InvalidValueError: The user's function returned something else.
        """
        known = self.distributions
        if perturb is not None:
            new = perturb(dict(params), random)
        else:
            new = {name: changed(params[name], each, random) for name, each in known.items()}
        if not isinstance(new, Mapping) or new.keys() != known.keys():
            raise InvalidValueError(
                f"perturb= returned {new!r}. Return a dict with {', '.join(params)}."
            )
        return {name: fitted(name, new[name], each) for name, each in known.items()}


def changed(value: Any, distribution: Any, random: Random) -> Any:
    """Return a value near this one, perhaps beyond the range."""
    if hasattr(distribution, "choices"):
        return random.choice(distribution.choices) if random.random() < NEW_CHOICE else value
    change = value * random.choice((-CHANGE, CHANGE))
    # by a step at least: small integers would stay what they are
    return value + math.copysign(max(abs(change), distribution.step or 0), change)


def fitted(name: str, value: Any, distribution: Any) -> Any:
    """Return the value of a distribution that is closest to this one.

    Raises:
        InvalidValueError: There is none.
    """
    if hasattr(distribution, "choices"):
        if value in distribution.choices:
            return value
    elif isinstance(value, numbers.Real) and not math.isnan(value):
        low, high, step = distribution.low, distribution.high, distribution.step
        value = min(max(value, low), high)
        return float(value) if step is None else min(low + round((value - low) / step) * step, high)
    raise InvalidValueError(f"perturb= returned {name}={value!r}, which is not in {distribution}.")


def check_space(
    run_dir: Path, distributions: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Note the space of a search in its folder, or make sure that it is the same as before.

    Raises:
        JournalError: It is another one.
    """
    from optuna.distributions import distribution_to_json

    space = {name: json.loads(distribution_to_json(each)) for name, each in distributions.items()}
    space = {name: json.dumps(value) for name, value in {**space, **constants}.items()}
    path = run_dir / SPACE
    try:
        known = {name: json.dumps(value) for name, value in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        text = ",\n ".join(f"{json.dumps(name)}: {value}" for name, value in space.items())
        write_file(path, f"{{{text}}}\n".encode())
        return
    for name in {**known, **space}:
        before, now = (described(given.get(name)) for given in (known, space))
        if before != now:
            raise JournalError(
                f"{run_dir} holds a search over a different space: {name!r} was {before} there, and"
                f" is {now} in this call. Use the same space, or a different run_dir.",
                run_dir=str(run_dir),
            )


def described(text: str | None) -> str:
    """Return a range as raypool's functions take it, or a value, or "missing"."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        json_to_distribution,
    )

    if text is None or not text.startswith("{"):
        return text or "missing"
    made: Any = json_to_distribution(text)
    if isinstance(made, CategoricalDistribution):
        return f"choice({', '.join(map(repr, made.choices))})"
    is_real = isinstance(made, FloatDistribution)
    name = ("log_uniform" if made.log else "uniform") if is_real else "int_uniform"
    step = "" if made.step == (None if is_real else 1) else f", step={made.step}"
    log = ", log=True" if made.log and not is_real else ""
    return f"{name}({made.low!r}, {made.high!r}{step}{log})"
