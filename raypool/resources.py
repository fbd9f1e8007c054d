"""What each worker of a pool gets of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypool.counts import whole_number
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.labels import check_labels

SLACK = -0.01, 0.02
"""From too much to too little of a GPU that fractions may take which were rounded: 0.33 is a third, 0.167 a sixth."""

LEAST_GPUS = 0.0001
"""Ray counts no smaller parts."""


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker gets of a machine.

    Args:
        gpus: GPUs for each worker. A fraction puts several workers on one GPU, which the pool then holds whole, so that it has to
            divide it: 0.5, 0.33, 0.25. None: one, where there are GPUs, else none.
        cpus: CPU cores, as Ray counts them. None: one for a worker without a GPU, none for one with.
        memory_bytes: Main memory that Ray sets aside, and that the worker may use, with all that it has started [bytes]: one that
            uses more is ended and replaced, as one that has died. Values in Ray's object store and other shared memory do not
            count. None: as much as there is.
        accelerator_type: Only on nodes with this kind of accelerator, by Ray's name for it ("T4", "H100", ...).
        labels: Only on nodes with these labels, such as `{"market-type": "spot"}`; a value may be one of Ray's operators: "!spot"
            (also where there is no such label), "in(a, b)" or "!in(a, b)".

    Raises:
        InvalidValueError: A count is negative, a GPU count above 1 is not whole, one below 1 does not divide a GPU, or a label is
            none that a node can have.

    Example:
        >>> WorkerResources(gpus=0.5).workers_per_gpu
        2
    """

    gpus: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    accelerator_type: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("gpus", "cpus", "memory_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            number = value if isinstance(value, float) else whole_number(value)
            if number is None:
                raise InvalidTypeError(f"WorkerResources({name}={value!r}) is not a number.")
            object.__setattr__(self, name, number)
            if not number >= 0:
                raise InvalidValueError(f"WorkerResources({name}={value!r}) is negative. Give 0 or more, or leave it out.")
        if self.accelerator_type is not None and not isinstance(self.accelerator_type, str):
            raise InvalidTypeError(f"WorkerResources(accelerator_type={self.accelerator_type!r}) is not a name, such as 'H100'.")
        check_texts("labels", self.labels, "labels")
        check_labels(self.labels)
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidValueError(
                f"WorkerResources(gpus={self.gpus}) would share a second GPU in part, which Ray cannot do. "
                "Give a whole number, or a fraction below 1."
            )
        if self.gpus is not None and 0 < self.gpus < 1:
            _check_fraction(self.gpus)

    @property
    def workers_per_gpu(self) -> int:
        """How many such workers one GPU takes."""
        return round(1 / self.gpus) if self.gpus and self.gpus < 1 else 1


def _check_fraction(gpus: float) -> None:
    """Refuse a part of a GPU by which it cannot be divided up: the rest would be held, and lie idle.

    Raises:
        InvalidValueError: It is such.
    """
    if gpus < LEAST_GPUS:
        raise InvalidValueError(f"WorkerResources(gpus={gpus!r}) is less than {LEAST_GPUS}, the least that Ray counts.")
    if SLACK[0] <= 1 - round(1 / gpus) * gpus <= SLACK[1]:
        return
    share = int(1 / gpus)
    rest = 1 - share * gpus
    workers = f"{share} such workers take {share * gpus:.3g} of it" if share > 1 else f"one such worker takes {gpus:.3g} of it"
    raise InvalidValueError(
        f"WorkerResources(gpus={gpus!r}) does not divide a GPU: {workers}, and {rest:.2g} would lie idle. "
        f"The nearest that do are {_part(share)} and {_part(share + 1)}."
    )


def _part(share: int) -> str:
    return f"{1 / share:.3g} ({share} worker{'s' if share > 1 else ''})"


def check_texts(name: str, mapping: Any, kind: str) -> None:
    """Refuse what does not map texts to texts; `kind` says what these are.

    Raises:
        InvalidTypeError: It does not.
    """
    if not isinstance(mapping, Mapping):
        raise InvalidTypeError(f"{name}={mapping!r} is not a mapping of names to texts.")
    for key, value in mapping.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidTypeError(f"{name} has {key!r}: {value!r}. Names and values of {kind} are texts.")
