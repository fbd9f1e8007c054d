"""`TrainingOptions`: how `pool.fit` trains a model, and the checks of its fields."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    checked_count,
    explains_calls,
    optional_count,
)

OPTIMIZERS = ("sgdm", "adam", "adamw")
SCHEDULES = ("none", "piecewise", "cosine", "linear")
EXECUTIONS = ("auto", "cpu", "gpu", "multi-gpu")
PRECISIONS = ("float32", "bf16", "fp16")
SHUFFLES = ("every-epoch", "once", "never")
OUTPUT_MODELS = ("last", "best")
STRATEGIES = ("ddp", "fsdp")

OPTIMIZER_ARGUMENTS = {
    "lr": "learning_rate",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
}
"""The arguments of torch's optimizers, and the options that set them."""

REPORTED = ("epoch", "step", "loss", "learning_rate", "samples_per_s", "dropped_samples")
"""The metrics of every training by `fit`; with validation data there is "validation_loss"."""

PLAIN: dict[str, dict[bool | None, str | None]] = {
    "shuffle": {True: "every-epoch", False: "never"},
    "scale_batch": {True: "per_worker", False: None},
    "scale_learning_rate": {True: "linear", False: None},
    "schedule": {None: "none"},
}
"""Python's words (True, None, ...) for MATLAB's choices."""


@explains_calls
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How `pool.fit` trains.

    A step of the optimizer takes the gradient of the mean loss over `mini_batch_size` samples,
    whatever the number of workers. Samples after the last whole mini-batch of an epoch are left
    out; a data set that is smaller than a mini-batch is one mini-batch.

    Args:
        optimizer: "sgdm", "adam", "adamw", or a class or function that makes an optimizer from the
            parameters. If it takes `lr`, it is called with `learning_rate`; with
            `weight_decay` and `momentum`, if they are set here.
        learning_rate: The learning rate at the start, after the warm-up.
        momentum: The momentum of "sgdm".
        weight_decay: As torch's optimizers take it: part of the gradient with "sgdm" and "adam",
            apart from it with "adamw".
        schedule: How the learning rate changes. "none" or None: not at all. "piecewise": times
            `drop_factor` every `drop_every` epochs. "cosine", "linear": down to 0 at the last step.
            Or a function that makes a torch `LRScheduler` from the optimizer: its `step` is called
            after each epoch (`ReduceLROnPlateau` is given the validation loss, without one the
            mean loss of the epoch).
        drop_every: Epochs between two drops of "piecewise".
        drop_factor: The factor of each drop.
        warmup_steps: The steps over which the learning rate rises evenly: from 0, or from
            `learning_rate` if that is scaled. None: 0; if the learning rate is scaled, five epochs,
            and at most a tenth of all steps.
        mini_batch_size: Samples of a step, on all workers together, split as evenly as possible:
            130 on four workers are 33, 33, 32 and 32. None: as in the `DataLoader` that is trained
            on; without one 128.
        scale_batch: "per_worker" or True: `mini_batch_size` is that of each worker.
        scale_learning_rate: "linear" or True: the learning rate is multiplied as the mini-batch is
            by `scale_batch`, with a warm-up. Neither is automatic.
        max_epochs: The number of passes through the data.
        execution: "auto": on the workers with their own GPU; if none has one, on all. "cpu":
            on the CPUs of all. "gpu": on one worker with a GPU. "multi-gpu": on all that have one.
        worker_load: How much of each mini-batch each worker takes, relative to the others: a number
            for each worker that may train by `execution`, in their order. [2, 1] splits 96 samples
            into 64 and 32. A worker with 0 does not train. None: equal shares.
        precision: "float32": the parameters' own types. "bf16", "fp16": with autocast; "fp16" with
            scaling of the loss.
        clip_gradient_norm: Gradients are scaled down to this norm, of all parameters together, if
            theirs is larger.
        accumulate_steps: A step takes the mean gradient of this many mini-batches.
        validation_data: As the data to train on. Its loss is "validation_loss" of the metrics.
        validation_frequency: Epochs between two validations; one always follows the last epoch.
        patience: The training ends after this many validations in a row without a new lowest loss.
        output_model: "last": the model as it is at the end. "best": as at the validation with the
            lowest loss.
        shuffle: "every-epoch" or True, "once" (before the first), "never" or False. None: as the
            `DataLoader` does that is trained on; without one "every-epoch".
        seed: The seed of the first parameters (if `model` is a function), the order of the samples,
            and the model's random numbers; at least 0. With "threads" the generators are those of
            the whole process: other trainings or draws at the same time change the numbers.
        checkpoint_every: Epochs between two checkpoints. None: 1 if `run_options` of `fit` has a
            `run_dir`, `keep_checkpoints` or `best_metric`; else none, except before a preemption.
        strategy: "ddp": each worker has the whole model. "fsdp": each holds a part of every
            parameter, gradient and state of the optimizer (torch's FSDP2), for models too large for
            one GPU.
        output_fn: Called with each report, a dict; if it returns True, the training ends there. It
            runs in the worker of rank 0, so its variables are not in this process: use
            `run.metrics`.
        compile: Whether the model is compiled by `torch.compile`.
        report_every: Steps between two reports; at each the training checks whether to stop. There
            is always one at the end of an epoch; None: only that. A stop within an epoch saves no
            checkpoint, so a resumed run repeats that epoch. Reported are `epoch` and `step`, from 0
            on; `loss`, the mean since the last report; `learning_rate`, of the last step;
            `samples_per_s`; after an epoch `dropped_samples`, the number of samples left out, and
            `validation_loss`.
        loader_processes: Processes on each worker that load the samples of a `Dataset` ahead. 0: as
            the `DataLoader` says; without one the worker itself does.

    Raises:
        InvalidTypeError: A field has the wrong type.
        InvalidValueError: A field has an invalid value.

    Source:
        MATLAB R2025b, trainingOptions. The linear scaling with a warm-up of five epochs: Goyal et
        al. 2017, "Accurate, Large Minibatch SGD".

    Example:
        >>> TrainingOptions(optimizer="adam", max_epochs=5, worker_load=[2, 1]).worker_load
        (2, 1)
    """

    optimizer: str | Callable[..., Any] = "sgdm"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str | Callable[..., Any] | None = "none"
    drop_every: int = 10
    drop_factor: float = 0.1
    warmup_steps: int | None = None
    mini_batch_size: int | None = None
    scale_batch: str | bool | None = None
    scale_learning_rate: str | bool | None = None
    max_epochs: int = 30
    execution: str = "auto"
    worker_load: Sequence[float] | None = None
    precision: str = "float32"
    clip_gradient_norm: float | None = None
    accumulate_steps: int = 1
    # arrays are long to print, and have no plain equality
    validation_data: Any = field(default=None, repr=False, compare=False)
    validation_frequency: int = 1
    patience: int | None = None
    shuffle: str | bool | None = None
    seed: int = 0
    checkpoint_every: int | None = None
    output_model: str = "last"
    strategy: str = "ddp"
    output_fn: Callable[[dict[str, Any]], Any] | None = None
    compile: bool = False
    report_every: int | None = None
    loader_processes: int = 0

    def __post_init__(self) -> None:
        # object.__setattr__, because the class is frozen
        for name, words in PLAIN.items():
            value = getattr(self, name)
            if value is None or isinstance(value, bool):
                object.__setattr__(self, name, words.get(value, value))
        self._check_choices()
        self._check_counts()
        self._check_numbers()
        if self.worker_load is not None:
            object.__setattr__(self, "worker_load", _checked_load(self.worker_load))
        if self.output_fn is not None and not callable(self.output_fn):
            raise InvalidTypeError(
                f"output_fn={self.output_fn!r} is not callable. Pass a function of one argument, a"
                " dict."
            )
        if not isinstance(self.compile, bool):
            raise InvalidTypeError(f"compile must be True or False, not {self.compile!r}.")
        self._check_together()

    def _check_choices(self) -> None:
        _check_choice("execution", self.execution, EXECUTIONS)
        _check_choice("precision", self.precision, PRECISIONS)
        if self.shuffle is not None:
            _check_choice("shuffle", self.shuffle, SHUFFLES, "True or False")
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("output_model", self.output_model, OUTPUT_MODELS)
        if self.output_model == "best" and self.validation_data is None:
            raise InvalidValueError(
                "output_model='best' is the model with the lowest validation loss, but there is no"
                " validation. Pass validation_data=."
            )
        if self.scale_batch is not None:
            _check_choice("scale_batch", self.scale_batch, ("per_worker",))
        if self.scale_learning_rate is not None:
            _check_choice("scale_learning_rate", self.scale_learning_rate, ("linear",))
        if not callable(self.optimizer):
            other = "a function that makes an optimizer of parameters"
            _check_choice("optimizer", self.optimizer, OPTIMIZERS, other)
        if not callable(self.schedule):
            other = "a function that makes an LRScheduler of an optimizer"
            _check_choice("schedule", self.schedule, SCHEDULES, other)

    def _check_counts(self) -> None:
        for name in ("drop_every", "max_epochs", "accumulate_steps", "validation_frequency"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), least=1))
        for name in ("seed", "loader_processes"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), least=0))
        for name in ("mini_batch_size", "patience", "checkpoint_every", "report_every"):
            object.__setattr__(self, name, optional_count(name, getattr(self, name), least=1))
        steps = optional_count("warmup_steps", self.warmup_steps, least=0)
        object.__setattr__(self, "warmup_steps", steps)
        if self.seed >= 2**63:
            raise InvalidValueError(f"seed={self.seed} is not below 2**63.")

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "momentum", "weight_decay", "drop_factor"):
            object.__setattr__(self, name, _checked_number(name, getattr(self, name)))
        if self.learning_rate <= 0:
            raise InvalidValueError(f"learning_rate={self.learning_rate} is not above 0.")
        if not 0 <= self.momentum < 1:
            raise InvalidValueError(
                f"momentum={self.momentum} is not in the range from 0 to below 1."
            )
        if self.weight_decay < 0:
            raise InvalidValueError(f"weight_decay={self.weight_decay} is below 0.")
        if not 0 < self.drop_factor <= 1:
            raise InvalidValueError(
                f"drop_factor={self.drop_factor} is not in the range from above 0 to 1."
            )
        if self.clip_gradient_norm is not None:
            norm = _checked_number("clip_gradient_norm", self.clip_gradient_norm)
            object.__setattr__(self, "clip_gradient_norm", norm)
            if self.clip_gradient_norm <= 0:
                raise InvalidValueError(
                    f"clip_gradient_norm={self.clip_gradient_norm} is not above 0: None does not"
                    " clip."
                )

    def _check_together(self) -> None:
        if self.patience is not None and self.validation_data is None:
            raise InvalidValueError(
                f"patience={self.patience} counts validations, but there are none. Pass"
                " validation_data=, or leave patience out."
            )
        if self.scale_learning_rate is not None and self.scale_batch is None:
            raise InvalidValueError(
                "scale_learning_rate='linear' multiplies the learning rate as the mini-batch grows"
                " with the workers, but mini_batch_size is that of all workers together. Add"
                " scale_batch='per_worker', or set the learning rate itself."
            )
        optimizer_arguments(self)
        if self.warmup_steps and callable(self.schedule):
            raise InvalidValueError(
                f"warmup_steps={self.warmup_steps} cannot be combined with your own schedule. Put"
                " the warm-up into the schedule, for example with torch's SequentialLR."
            )


def optimizer_arguments(options: TrainingOptions) -> dict[str, float]:
    """Return the named arguments for the user's own optimizer.

    Raises:
        InvalidValueError: It does not take one that the options set.
    """
    make = options.optimizer
    if not callable(make):
        return {}
    try:
        taken = inspect.signature(make).parameters.keys() - getattr(make, "keywords", {}).keys()
    except (TypeError, ValueError):  # not every builtin has a signature
        taken = set()
    given = {}
    for argument, name in OPTIMIZER_ARGUMENTS.items():
        value = getattr(options, name)
        is_default = value == getattr(TrainingOptions, name)
        if argument in taken and not (is_default and argument != "lr"):
            given[argument] = value
        elif not is_default:
            raise InvalidValueError(
                f"{name}={value:g} would be ignored: optimizer={make!r} sets {argument!r} itself."
                f" Set it there, or let the function take an argument {argument!r}."
            )
    return given


def _check_choice(name: str, value: Any, choices: Sequence[str], other: str = "") -> None:
    listed = f"{', '.join(map(repr, choices))}{f', or {other}' if other else ''}"
    if not isinstance(value, str):
        raise InvalidTypeError(
            f"{name}={value!r} is a {type(value).__name__}. Use one of: {listed}."
        )
    if value not in choices:
        raise InvalidValueError(f"{name}={value!r} is unknown. Use one of: {listed}.")


def _checked_number(name: str, value: Any) -> float:
    """Return a finite number as one of Python's: no checkpoint could be loaded with NumPy's."""
    if isinstance(value, bool) or not isinstance(value, Real):  # True is an int
        raise InvalidTypeError(f"{name}={value!r} is not a number.")
    if not math.isfinite(value):
        raise InvalidValueError(f"{name}={value} is not finite.")
    return value if isinstance(value, int) else float(value)


def _checked_load(load: Any) -> tuple[float, ...]:
    if isinstance(load, (str, bytes)) or not hasattr(load, "__iter__"):
        raise InvalidTypeError(
            f"worker_load={load!r} is not a list of numbers, one for each worker."
        )
    loads = [each.item() if hasattr(each, "item") else each for each in load]  # NumPy's numbers
    for each in loads:
        _checked_number("worker_load", each)
        if each < 0:
            raise InvalidValueError(
                f"worker_load={loads} has {each} in it, which is below 0. Use 0 for a worker that"
                " should idle."
            )
    if not any(loads):
        raise InvalidValueError(
            f"worker_load={loads} gives no worker anything. Set at least one number above 0."
        )
    return tuple(loads)
