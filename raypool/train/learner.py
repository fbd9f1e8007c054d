"""A model that learns: one step after the other. For workers only."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.train.batchnorm import merge_buffers
from raypool.train.data import Batch, mixed_seed
from raypool.train.job import FitJob
from raypool.train.losses import check_loss, is_mean_over_samples
from raypool.train.options import TrainingOptions
from raypool.train.ranks import Ranks, seed_all
from raypool.train.samples import call_model
from raypool.train.spread import connect, has_unused, shard

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A rank's model, with its optimizer.

    Gradients are averaged over the ranks, with equal weights: so each rank's mean loss is weighted by the number of ranks times
    its share of the mini-batch. What comes out is the gradient of the mean loss over the whole mini-batch, for any shares.

    Attributes:
        module: The model itself, by whose names its state is known.
        optimizer: Its optimizer.
        scheduler: The user's own schedule, if there is one.
        scaler: Of the loss, with fp16.
        ranks: All ranks, as this one sees them.
        share: What this rank takes of each mini-batch.
        is_mean: Whether the loss is the mean over its samples, as far as was seen. Only then the ranks' shares make the whole.
        strategy: "ddp" or "fsdp": how its state is kept.
        is_sharded: Whether it has a part of the model only.
    """

    def __init__(self, job: FitJob, ranks: Ranks) -> None:
        options = job.options
        self._job, self.ranks, self._options = job, ranks, options
        self.share = job.share(ranks.rank, ranks.size)
        self.is_mean = True
        self.module = _made(job.model, options.seed).to(ranks.device).train()
        self._loss_fn = job.loss.to(ranks.device) if isinstance(job.loss, nn.Module) else job.loss
        ranks.broadcast([*self.module.parameters(), *self.module.buffers()])
        self.strategy = options.strategy
        self.is_sharded = self.strategy == "fsdp" and ranks.size > 1
        if self.is_sharded:
            shard(self.module, ranks)
        self.optimizer = _optimizer(options, [each for each in self.module.parameters() if each.requires_grad])
        self._base_rates = [group["lr"] * job.rate_scale for group in self.optimizer.param_groups]
        self.scheduler = self._own_schedule()
        self.scaler = torch.amp.GradScaler(ranks.device.type) if options.precision == "fp16" else None
        self._call: Any = None  # the model as it is called, once that is known
        self._weight: torch.Tensor | None = None  # of a loss, once its type is known
        self._factor: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._num_losses = 0
        self._is_settled = True

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return dtype_of(self.module)

    def _own_schedule(self) -> Any:
        if not callable(self._options.schedule):
            return None
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate
        scheduler = self._options.schedule(self.optimizer)
        if not hasattr(scheduler, "step"):
            raise InvalidTypeError(
                f"schedule={self._options.schedule!r} has made a {type(scheduler).__name__} of the optimizer, not an LRScheduler."
            )
        return scheduler

    # --- one step ----------------------------------------------------------------------------------------------------------

    def iterate(self, step: int, batches: Sequence[Batch], *, is_synchronised: bool = True) -> None:
        """Take one step: by the mean gradient of these mini-batches, of which this rank has its share."""
        self._is_settled = False
        if self._call is None:
            self._begin(batches[0])
        self._set_rate(step)
        last = len(batches) - 1
        for number, batch in enumerate(batches):
            with self._reduction(number == last and is_synchronised):
                if self._weight is None:
                    loss = self._first_loss_of(self._call, batch)
                    self._weight = self._weight_of(loss)
                else:
                    loss = self._loss_of(self._call, batch)
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                scaled.backward(self._weight)
            self._loss_sum += loss.detach()
        self._num_losses += len(batches)
        self._update()

    def _loss_of(self, call: Any, batch: Batch) -> torch.Tensor:
        if self._options.precision == "float32":
            loss: torch.Tensor = self._loss_fn(call_model(call, self.module, batch[0]), batch[1])
            return loss
        with torch.autocast(self.ranks.device.type, AUTOCAST[self._options.precision]):
            loss = self._loss_fn(call_model(call, self.module, batch[0]), batch[1])
        return loss

    def _first_loss_of(self, call: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of a mini-batch, and see that it is one.

        Torch only warns where the shapes of outputs and targets differ, and compares each with each.
        """
        outputs: list[Any] = []

        def noting(*inputs: Any, **named: Any) -> Any:
            outputs.append(call(*inputs, **named))
            return outputs[-1]

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            try:
                loss = self._loss_of(noting, batch)
            except UserWarning as warning:
                if "target size" not in str(warning):
                    raise  # another one, which the user's filters make an error
                raise InvalidValueError(
                    "The loss was given outputs and targets of different shapes: "
                    f"{str(warning).split('. ')[0]}. Give targets the shape of the outputs, targets[:, None] for one."
                ) from None
        check_loss(loss)
        if self.ranks.size > 1:
            self.is_mean = self.is_mean and is_mean_over_samples(self._loss_fn, outputs[0], batch[1], loss)
        return loss

    def _reduction(self, is_due: bool) -> contextlib.AbstractContextManager[Any]:
        """Let this backward pass reduce gradients, or not yet."""
        if self.ranks.size > 1 and self.is_sharded:
            self.module.set_requires_gradient_sync(is_due)  # type: ignore[operator]
        elif self.ranks.size > 1 and not is_due:
            return self._connected.no_sync()
        return contextlib.nullcontext()

    def _update(self) -> None:
        clip = self._options.clip_gradient_norm
        if self.scaler is not None and clip is not None:
            self.scaler.unscale_(self.optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def _set_rate(self, step: int) -> None:
        if self.scheduler is not None:
            return
        factor = self._job.course.factor(step)
        if factor == self._factor:
            return
        self._factor = factor
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor

    def _begin(self, batch: Batch) -> None:
        """Connect the ranks, now that there is a mini-batch by which to see what the loss depends on."""
        self._call = self.module
        if self.ranks.size > 1 and not self.is_sharded:
            is_unused = self.ranks.any(has_unused(self._tried(batch), self.module))
            self._call = self._connected = connect(self.module, self.ranks, is_unused)
        if self._options.compile:
            self._call = torch.compile(self._call)

    def _tried(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a mini-batch; buffers stay as they were, and nothing is drawn."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with torch.random.fork_rng([self.ranks.device] if self.ranks.device.type == "cuda" else []):
            loss = self._first_loss_of(self.module, batch)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        return loss

    def _weight_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the gradient of a loss is multiplied by on this rank."""
        weight = self.ranks.size * self.share.weight / self._job.division.accumulate
        return torch.full_like(loss, weight, requires_grad=False)

    # --- what is asked of it in between -------------------------------------------------------------------------------

    def take_loss(self) -> float:
        """Return the mean loss of the mini-batches since the last time: of whole ones, of all ranks' shares together."""
        (total,) = self.ranks.add([self._loss_sum * self.share.weight])
        mean = total / max(self._num_losses, 1)
        self._loss_sum.zero_()
        self._num_losses = 0
        return mean

    @property
    def learning_rate(self) -> float:
        """Of the last step, of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def loss_on(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a mini-batch with the model as it would be used."""
        return self._loss_of(self.module, batch)

    def settle(self) -> None:
        """Make the model the same on all ranks, its buffers too: before it is used or kept."""
        if not self._is_settled:
            merge_buffers(self.module, self.ranks, self.share.weight)
            self._is_settled = True

    def end_epoch(self, loss: float | None) -> None:
        """Let the user's own schedule go on; `loss` is what it may go by, None if there is none of this epoch."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if loss is not None:
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the type of a model's numbers, by its first parameter that has one with a fraction."""
    kinds = (each.dtype for each in module.parameters() if each.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def _made(model: Any, seed: int) -> nn.Module:
    """Return a model of this rank's own."""
    seed_all(mixed_seed(seed))
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    check_module(module)
    return module


def check_module(module: Any) -> None:
    """Raise the error for what cannot be trained.

    Raises:
        InvalidTypeError: It is no module.
        InvalidValueError: It has no parameters that can be trained, or some without a size yet.
    """
    if not isinstance(module, nn.Module):
        raise InvalidTypeError(f"The function given as model has returned a {type(module).__name__}, not a torch.nn.Module.")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidValueError(f"The parameter {name!r} of the model has no size yet. Call the model on some samples first.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        count = sum(1 for _ in module.parameters())
        reason = f"all its {count} parameters are frozen (requires_grad=False)" if count else "it has no parameters"
        raise InvalidValueError(f"The model, a {type(module).__name__}, cannot be trained: {reason}.")


def _optimizer(options: TrainingOptions, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "sgdm":
        return torch.optim.SGD(parameters, lr=rate, momentum=options.momentum, weight_decay=decay)
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    assert callable(options.optimizer)
    optimizer = options.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(
            f"optimizer={options.optimizer!r} has made a {type(optimizer).__name__} of the parameters, not a torch Optimizer."
        )
    return optimizer
