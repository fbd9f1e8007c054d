"""What each worker of a pool gets of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker gets of a machine.

    Args:
        gpus: GPUs for each worker. A fraction puts several workers on one GPU, which the pool then holds whole. None: one,
            where there are GPUs, else none.
        cpus: CPU cores, as Ray counts them. None: one for a worker without a GPU, none for one with.
        memory_bytes: Main memory that Ray sets aside, and that the worker may use, with all that it has started [bytes]: one that
            uses more is ended and replaced, as one that has died. Values in Ray's object store and other shared memory do not
            count. None: as much as there is.
        accelerator_type: Only on nodes with this kind of accelerator, by Ray's name for it ("T4", "H100", ...).
        labels: Only on nodes with these labels, such as `{"market-type": "spot"}`; a value may be one of Ray's operators, such as
            "!spot" or "in(a, b)".

    Raises:
        InvalidValueError: A count is negative, or a GPU count above 1 is not whole.

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
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise InvalidTypeError(f"WorkerResources({name}={value!r}) is not a number.")
            if value is not None and not value >= 0:
                raise InvalidValueError(f"WorkerResources({name}={value!r}) is negative. Give 0 or more, or leave it out.")
        if self.accelerator_type is not None and not isinstance(self.accelerator_type, str):
            raise InvalidTypeError(f"WorkerResources(accelerator_type={self.accelerator_type!r}) is not a name, such as 'H100'.")
        check_texts("labels", self.labels, "labels")
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidValueError(
                f"WorkerResources(gpus={self.gpus}) would share a second GPU in part, which Ray cannot do. "
                "Give a whole number, or a fraction below 1."
            )

    @property
    def workers_per_gpu(self) -> int:
        """How many such workers one GPU takes."""
        return int(1 / self.gpus + 1e-9) if self.gpus and self.gpus < 1 else 1


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
