"""The loop of `pool.fit` on each rank: a loop for Ray Train that a user could have written.

A `Learner` takes one step after the other. The ranks average their gradients, merge the statistics
of normalization layers, and write checkpoints. The module also shards models (DDP, FSDP2), checks
losses, and measures steps for `scaling_report`. It imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import math
import pickle
import random
import tempfile
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raypool.errors import InvalidTypeError, InvalidValueError, add_note
from raypool.task import current_task, forbidden
from raypool.train.data import Batch, Samples, call_model, mixed_seed, order_of
from raypool.train.shares import Division, LearningRates, Share, share_of
from raypool.train.training_options import TrainingOptions, optimizer_arguments
from raypool.worker.running import note_here

LOOK_S = 1.0  # each check waits for the device
"""The interval at which ranks check for machines about to go [s]."""

LEFT_OUT = (
    "On several workers each step needs all parameters, unless the first mini-batch leaves some"
    " out. If the model leaves layers out now and then (LayerDrop, experts), give it a parameter"
    " that it never uses, such as self.unused = torch.nn.Parameter(torch.zeros(())), or train on"
    " one worker."
)
"""What to do where a step leaves out a parameter that DDP waits for."""

LOST = "loss is nan"
"""The end of a training whose loss is NaN."""


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model; return how that ended, on rank 0 with the model's state, saved by torch."""
    job: FitJob = config["fit"]
    ranks = ranks_here(job)
    with own_random_state(ranks.device):
        return RankTraining(job, ranks).run()


def ranks_here(job: FitJob) -> Ranks:
    """Return the ranks of this process's training."""
    context = ray.train.get_context()
    device = torch.device("cpu") if job.is_on_cpu else current_task().device
    return Ranks(context.get_world_rank(), context.get_world_size(), device)


class RankTraining:
    """A training on one rank, from its start or a checkpoint to its end."""

    def __init__(self, job: FitJob, ranks: Ranks) -> None:
        options = job.options
        self._job, self._ranks, self._options = job, ranks, options
        self._learner = Learner(job, ranks)
        dtype, loaders = self._learner.dtype, options.loader_processes
        self._source = job.samples.open(ranks.device, dtype, loaders)
        self._tests = (
            None if job.validation is None else job.validation.open(ranks.device, dtype, loaders)
        )
        self._best: dict[str, Any] | None = None  # on rank 0: the state at the best validation
        self._progress = Progress()
        self._is_overdue = False  # it starts from a checkpoint that has all its epochs
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state = read(folder)
            self._best = state["best"]
            self._progress = restore(self._learner, state, checkpoint.path)
            start = job.start_from
            # else it is a checkpoint of the run itself, which resumes
            if start is not None and Path(start).resolve() == Path(checkpoint.path).resolve():
                # what was the best on other data, or before, says nothing of this training
                self._best = None
                self._progress = self._progress._replace(best_loss=math.inf, worse_in_a_row=0)
                self._is_overdue = self._progress.epoch >= options.max_epochs
            if options.output_model == "best" and self._best is None:
                # the model of that loss was not kept: a later one can be the best only without it
                self._progress = self._progress._replace(best_loss=math.inf)
        self._reason = "max_epochs"
        self._is_lost = self._has_saved = False
        self._reported_at = self._looked_at = time.perf_counter()
        self._reported_step = self._looked_step = self._progress.step
        self._look_step = self._progress.step + 1  # after this one all ranks look

    def run(self) -> dict[str, Any]:
        """Train to the end."""
        for epoch in range(self._progress.epoch, self._options.max_epochs):
            if self._has_no_patience_left():
                self._reason = "patience"
            if self._reason != "max_epochs" or self._train_epoch(epoch):
                break
        self._learner.settle()
        progress, dropped = self._progress, self._job.division.dropped
        end: dict[str, Any] = {
            "epochs": progress.epoch,
            "steps": progress.step,
            "dropped_samples": dropped,
            "ended_by": self._reason,
            "is_mean": not self._ranks.any(not self._learner.is_mean),
            "is_overdue": self._is_overdue,
        }
        is_best = self._options.output_model == "best" and self._best is not None
        state = self._best if is_best else whole_state(self._learner.module, self._ranks)
        if self._ranks.rank == 0:
            file = io.BytesIO()
            torch.save(state, file)
            end["model"] = file.getvalue()
        return end

    def _train_epoch(self, epoch: int) -> bool:
        """Train the rest of an epoch; return whether the training is to end here."""
        job, options, division = self._job, self._options, self._job.division
        done = self._progress.epoch_steps
        # checkpoints have no states of generators: each epoch is seeded anew, and a resumed one
        # must not draw again what it has drawn before
        begun = [done] if done else []
        seed_all(mixed_seed(options.seed, 1, epoch, *begun, self._ranks.rank))
        order = ordered(job.samples, str(options.shuffle), options.seed, epoch, self._ranks)
        pieces = job.pieces(self._learner.share)[done * division.accumulate :]
        batches = self._source.batches(order, pieces)
        for number in range(done + 1, division.steps + 1):
            chosen = [next(batches) for _ in range(division.accumulate)]
            # not `progress.step`: earlier steps may have had other mini-batches
            self._learner.iterate(epoch * division.steps + number - 1, chosen)
            self._progress = self._progress._replace(
                step=self._progress.step + 1, epoch_steps=number
            )
            is_due = options.report_every is not None and number % options.report_every == 0
            if number < division.steps and (
                (is_due and self._report(self._metrics(epoch), None)) or self._has_left()
            ):
                return True
        return self._end_epoch(epoch)

    def _has_left(self, is_kept: bool = False) -> bool:
        """Keep a checkpoint, unless it is kept, if any rank's machine is about to go.

        Returns:
            Whether the training is to end here.
        """
        if self._progress.step < self._look_step:
            return False
        step = self._progress.step
        ask = getattr(ray.train, "get_preemption_info", None)  # Ray 2.52 has none
        info = None if ask is None else ask()
        # all ranks have to look after the same step, so it follows from the sum of their times
        (seconds,) = self._ranks.add([time.perf_counter() - self._looked_at])
        rate = (step - self._looked_step) * self._ranks.size / seconds
        self._look_step = step + max(int(LOOK_S * rate), 1)
        self._looked_at, self._looked_step = time.perf_counter(), step
        if info is None or self._has_saved:
            return False
        if not is_kept:
            self._report_state({}, self._state())
        self._has_saved = True
        note = note_here()
        if note is None or not note.has_heard:  # Ray Train's own workers: it ends them itself
            return False
        # this end counts only after such a request: else the ranks are run again elsewhere
        self._reason = "request_stop"
        return True

    # --- end of an epoch --------------------------------------------------------------------------

    def _end_epoch(self, epoch: int) -> bool:
        """Validate, keep a checkpoint and report, as due; return whether the training is to end."""
        options, learner = self._options, self._learner
        done = epoch + 1
        is_last = done == options.max_epochs
        self._progress = self._progress._replace(epoch=done, epoch_steps=0)
        metrics = self._metrics(epoch)
        metrics["dropped_samples"] = self._job.division.dropped
        loss: float | None = learner.take_epoch_loss()
        state = None
        if self._tests is not None:
            loss = None
            if is_last or done % options.validation_frequency == 0:
                loss = metrics["validation_loss"] = self._validate()
                self._judge(loss)
        learner.end_epoch(loss)
        is_last = is_last or self._has_no_patience_left()
        # from a loss of nan nothing could go on
        every = None if self._is_lost else options.checkpoint_every
        if every is not None and (is_last or done % every == 0):
            state = self._state()
        if not self._report(metrics, state):
            return not is_last and self._has_left(is_kept=state is not None)
        if every is not None and state is None:
            # lets the run resume from here; metrics were reported
            self._report_state({}, self._state())
        return True

    def _state(self) -> dict[str, Any]:
        self._learner.settle()
        return take(self._learner, self._progress, self._best)

    def _judge(self, loss: float) -> None:
        progress = self._progress
        if not loss < progress.best_loss:
            self._progress = progress._replace(worse_in_a_row=progress.worse_in_a_row + 1)
            return
        self._progress = progress._replace(best_loss=loss, worse_in_a_row=0)
        if self._options.output_model == "best":
            state = whole_state(self._learner.module, self._ranks)
            self._best = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }

    def _has_no_patience_left(self) -> bool:
        patience = self._options.patience
        return patience is not None and self._progress.worse_in_a_row >= patience

    def _validate(self) -> float:
        """Return the mean loss over all samples to validate on, which the ranks share out."""
        assert self._tests is not None
        assert self._job.validation is not None
        num_samples, ranks = len(self._job.validation), self._ranks
        loads = (1,) * ranks.size
        share = share_of(ranks.rank, num_samples, loads)
        size = max(self._job.division.batch_size // ranks.size, 1)
        starts = range(0, share_of(0, num_samples, loads).size, size)  # rank 0 has the most
        counts = [max(min(size, share.size - start), 0) for start in starts]
        # All ranks call the model equally often, as FSDP needs it: one with fewer samples takes
        # any, which does not count.
        pieces = [
            (share.start + start, share.start + start + count) if count else (0, 1)
            for start, count in zip(starts, counts, strict=True)
        ]
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._learner.settle()
        self._learner.module.eval()
        with torch.no_grad():
            order = ordered(self._job.validation, "never", self._options.seed, 0, ranks)
            batches = self._tests.batches(order, pieces)
            for batch, count in zip(batches, counts, strict=True):
                loss = self._learner.loss_of(self._learner.module, batch)
                if count:  # 0 * nan is nan
                    total += loss * count
        self._learner.module.train()
        return ranks.add([total])[0] / num_samples

    def _metrics(self, epoch: int) -> dict[str, Any]:
        """Return the metrics since the last report; waits for the device."""
        progress, division = self._progress, self._job.division
        loss = self._learner.take_loss()
        self._is_lost = math.isnan(loss)
        now = time.perf_counter()
        num_batches = (progress.step - self._reported_step) * division.accumulate
        speed = num_batches * division.batch_size / (now - self._reported_at)
        self._reported_at, self._reported_step = now, progress.step
        return {
            "epoch": epoch,
            "step": progress.step - 1,
            "loss": loss,
            "learning_rate": float(self._learner.optimizer.param_groups[0]["lr"]),
            "samples_per_s": speed,
        }

    def _report(self, metrics: dict[str, Any], state: dict[str, Any] | None) -> bool:
        """Report; return whether to end: by request, by `output_fn`, or as lost."""
        if state is None:
            ray.train.report(metrics)
        else:
            self._report_state(metrics, state)
        output_fn, ranks = self._options.output_fn, self._ranks
        is_enough = output_fn is not None and ranks.rank == 0 and bool(output_fn(dict(metrics)))
        # not `should_stop` of the task, which is also true where a machine is about to go
        note = note_here()
        wishes = [float(note is not None and note.should_stop), float(is_enough)]
        asked, said = ranks.add(wishes) if ranks.size > 1 else wishes
        if asked or said:
            self._reason = "request_stop" if asked else "output_fn"
        elif self._is_lost:
            self._reason = LOST
        return bool(asked or said or self._is_lost)

    def _report_state(self, metrics: dict[str, Any], state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="raypool-fit-") as folder:
            checkpoint = None
            if self._ranks.rank == 0:
                torch.save(state, Path(folder) / FILE)
                check_loads(Path(folder) / FILE)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def ordered(samples: Samples, shuffle: str, seed: int, epoch: int, ranks: Ranks) -> torch.Tensor:
    """Return the order of an epoch's samples, the same on every rank."""
    if samples.sampler is None:
        return order_of(len(samples), shuffle, seed, epoch)
    order = torch.zeros(len(samples), dtype=torch.int64)
    if ranks.rank == 0:
        with own_random_state(ranks.device):  # what the model draws does not depend on it
            own = mixed_seed(seed, 2, epoch)
            seed_all(own)
            if isinstance(getattr(samples.sampler, "generator", None), torch.Generator):
                # so that an epoch that is resumed has the same order
                samples.sampler.generator.manual_seed(own)
            if hasattr(samples.sampler, "set_epoch"):
                samples.sampler.set_epoch(epoch)
            numbers = [int(number) for number in samples.sampler]
        if len(numbers) != len(order):
            raise InvalidValueError(
                f"The sampler, a {type(samples.sampler).__name__}, has given {len(numbers):,}"
                f" samples in epoch {epoch}, and its length is {len(order):,}. They must be equal."
            )
        order = torch.tensor(numbers, dtype=torch.int64)
    order = order.to(ranks.device)
    ranks.broadcast([order])
    return order


# --- measurement for `scaling_report` -------------------------------------------------------------


def measure_loop(config: dict[str, Any]) -> list[float]:
    """Take some steps with a new model; return how long each took on this rank [s]."""
    job: FitJob = config["config"]["fit"]
    measure: Measure = config["measure"]
    ranks = ranks_here(job)
    seconds = []
    with own_random_state(ranks.device):
        learner = Learner(job, ranks)
        source = job.samples.open(ranks.device, learner.dtype, 0)
        order, pieces = (
            ordered(job.samples, "never", job.options.seed, 0, ranks),
            job.pieces(learner.share),
        )
        batches = (batch for _ in itertools.count() for batch in source.batches(order, pieces))
        for step in range(measure.num_warm_up + measure.num_steps):
            chosen = [next(batches) for _ in range(job.division.accumulate)]
            ranks.wait()  # else the time of a step would include that of ranks behind this one
            start = time.perf_counter()
            learner.iterate(
                step % job.course.num_steps, chosen, is_synchronized=measure.is_synchronized
            )
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            seconds.append(time.perf_counter() - start)
    return seconds[measure.num_warm_up :]


# --- learner: a model, step by step ---------------------------------------------------------------


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A rank's model, with its optimizer.

    Gradients are averaged over the ranks, with equal weights: so each rank's mean loss is weighted
    by the number of ranks times its share of the mini-batch. The result is the gradient of the mean
    loss over the whole mini-batch, for any shares.

    Attributes:
        module: The model itself, by whose names its state is known.
        scheduler: The user's own schedule, if there is one.
        scaler: Of the loss, with fp16.
        is_mean: Whether the loss is the mean over its samples, as far as seen.
        strategy: "ddp" or "fsdp": how its state is kept.
        is_sharded: Whether this rank has only a part of the model.
    """

    def __init__(self, job: FitJob, ranks: Ranks) -> None:
        options = job.options
        self._job, self.ranks, self._options = job, ranks, options
        self.share = job.share(ranks.rank, ranks.size)
        self.steps_per_epoch = job.division.steps
        self.is_mean = True
        seed_all(mixed_seed(options.seed))
        model = job.model
        # a copy: the next attempt, or a measurement, may be given the same object
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        check_module(module)
        self.module = module.to(ranks.device).train()
        self._loss_fn = job.loss.to(ranks.device) if isinstance(job.loss, nn.Module) else job.loss
        # a function may make another model on each rank, in spite of the seed
        ranks.broadcast([*self.module.parameters(), *self.module.buffers()])
        self.strategy = options.strategy
        self.is_sharded = self.strategy == "fsdp" and ranks.size > 1
        if self.is_sharded:
            shard(self.module, ranks)
        self.optimizer = _optimizer(
            options, [each for each in self.module.parameters() if each.requires_grad]
        )
        self._base_rates = [group["lr"] * job.rate_scale for group in self.optimizer.param_groups]
        self.scheduler: Any = None
        if callable(options.schedule):
            for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate
            self.scheduler = options.schedule(self.optimizer)
            if not hasattr(self.scheduler, "step"):
                raise InvalidTypeError(
                    f"schedule={options.schedule!r} returned a {type(self.scheduler).__name__}, not"
                    " an LRScheduler."
                )
        is_scaled = options.precision == "fp16"
        self.scaler = torch.amp.GradScaler(ranks.device.type) if is_scaled else None
        self._call: Any = None  # the wrapped model, once it is connected
        self._awaited: list[tuple[str, nn.Parameter]] = []  # each step has to have their gradients
        self._weight: torch.Tensor | None = None  # of a loss, once its type is known
        self._factor: float | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._num_losses = 0
        self._epoch_sum, self._num_in_epoch = 0.0, 0  # of those that were taken
        self._is_settled = True

    @property
    def dtype(self) -> torch.dtype:
        """That of the model's first floating-point parameter."""
        kinds = (each.dtype for each in self.module.parameters() if each.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    # --- one step ---------------------------------------------------------------------------------

    def iterate(self, step: int, batches: Sequence[Batch], *, is_synchronized: bool = True) -> None:
        """Take one step by the mean gradient of mini-batches, of which this rank has a share."""
        self._is_settled = False
        if self._call is None:
            self._begin(batches[0])
        if self.scheduler is None and (factor := self._job.course.factor(step)) != self._factor:
            self._factor = factor
            for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate * factor
        last = len(batches) - 1
        for number, batch in enumerate(batches):
            with self._reduction(number == last and is_synchronized), _explained():
                if self._weight is None:
                    loss = self._first_loss_of(self._call, batch)
                    weight = self.ranks.size * self.share.weight / self._job.division.accumulate
                    self._weight = torch.full_like(loss, weight, requires_grad=False)
                else:
                    loss = self.loss_of(self._call, batch)
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                scaled.backward(self._weight)
            self._loss_sum += loss.detach()
        self._num_losses += len(batches)
        for name, parameter in self._awaited:
            if parameter.grad is None:  # DDP has not added up the others either
                raise InvalidValueError(f"A step has left out the parameter {name!r}. {LEFT_OUT}")
        self._update()

    def loss_of(self, call: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of a mini-batch; `call`: the model, or a wrapper around it."""
        inputs, targets = batch
        with self._precision():
            loss: torch.Tensor = self._loss_fn(call_model(call, self.module, inputs), targets)
        return loss

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        precision = self._options.precision
        if precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.ranks.device.type, AUTOCAST[precision])

    def _first_loss_of(self, call: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of the first mini-batch, and check it."""
        outputs: list[Any] = []

        def noting(*inputs: Any, **named: Any) -> Any:
            outputs.append(call(*inputs, **named))
            return outputs[-1]

        with warnings.catch_warnings():
            # torch only warns if the shapes of outputs and targets differ, and broadcasts them
            warnings.filterwarnings("error", message="Using a target size")
            try:
                loss = self.loss_of(noting, batch)
            except UserWarning as warning:
                if "target size" not in str(warning):
                    raise  # another one, which the user's filters make an error
                raise InvalidValueError(
                    "The loss was given outputs and targets of different shapes:"
                    f" {str(warning).split('. ')[0]}. Reshape the targets to the shape of the"
                    " outputs, such as targets[:, None]."
                ) from None
        check_loss(loss)
        if self.ranks.size > 1:
            with self._precision():  # else the loss would refuse outputs of half precision
                self.is_mean = self.is_mean and is_mean_over_samples(
                    self._loss_fn, outputs[0], batch[1], loss, self.share.size
                )
        return loss

    def _reduction(self, is_due: bool) -> contextlib.AbstractContextManager[Any]:
        """Let this backward pass reduce gradients, or defer it."""
        if self.is_sharded:
            # FSDP2 has this instead of no_sync()
            self.module.set_requires_gradient_sync(is_due)  # type: ignore[operator]
        elif self.ranks.size > 1 and not is_due:
            return self._connected.no_sync()
        return contextlib.nullcontext()

    def _update(self) -> None:
        clip = self._options.clip_gradient_norm
        if clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)  # the norm is that of the true gradients
            nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def _begin(self, batch: Batch) -> None:
        """Connect the ranks; the first mini-batch shows which parameters the loss depends on."""
        self._call = self.module
        if self.ranks.size > 1 and not self.is_sharded:
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            # the first step is to find buffers and generators as if nothing had been tried
            devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                loss = self._first_loss_of(self.module, batch)
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])
            is_unused = self.ranks.any(has_unused(loss, self.module))
            self._call = self._connected = connect(self.module, self.ranks, is_unused)
            if not is_unused:
                named = self.module.named_parameters()
                self._awaited = [each for each in named if each[1].requires_grad]
        if self._options.compile:
            self._call = torch.compile(self._call)

    # --- between steps ----------------------------------------------------------------------------

    def take_loss(self) -> float:
        """Return the mean loss of the mini-batches since the last call, over all ranks."""
        (total,) = self.ranks.add([self._loss_sum * self.share.weight])
        count, self._num_losses = max(self._num_losses, 1), 0
        self._loss_sum.zero_()
        self._epoch_sum += total
        self._num_in_epoch += count
        return total / count

    def take_epoch_loss(self) -> float:
        """Return the mean of the losses that were taken since the last call."""
        mean = self._epoch_sum / max(self._num_in_epoch, 1)
        self._epoch_sum, self._num_in_epoch = 0.0, 0
        return mean

    def settle(self) -> None:
        """Make the model the same on all ranks, its buffers too: before it is used or kept."""
        if not self._is_settled:
            merge_buffers(self.module, self.ranks, self.share.weight)
            self._is_settled = True

    def end_epoch(self, loss: float | None) -> None:
        """Step the user's own schedule; `loss` is that of the epoch, None if there is none."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if loss is not None:
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):  # DDP's: nobody can pass that to `fit`
            add_note(error, f"raypool: {LEFT_OUT}")
        raise


def check_module(module: Any) -> None:
    """Raise the error for a module that cannot be trained."""
    if not isinstance(module, nn.Module):
        raise InvalidTypeError(
            f"The function given as model has returned a {type(module).__name__}, not a"
            " torch.nn.Module."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidValueError(
                f"The parameter {name!r} of the model has no size yet. Call the model on some"
                " samples first."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        count = sum(1 for _ in module.parameters())
        reason = (
            f"all its {count} parameters are frozen (requires_grad=False)"
            if count
            else "it has no parameters"
        )
        raise InvalidValueError(
            f"The model, a {type(module).__name__}, cannot be trained: {reason}."
        )


def _optimizer(options: TrainingOptions, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    asked: Any = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.optimizer == "sgdm":
        return torch.optim.SGD(parameters, momentum=options.momentum, **asked)
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, **asked)
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **asked)
    assert callable(options.optimizer)
    optimizer = options.optimizer(parameters, **optimizer_arguments(options))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(
            f"optimizer={options.optimizer!r} returned a {type(optimizer).__name__}, not a torch"
            " Optimizer."
        )
    return optimizer


# --- what travels to the ranks --------------------------------------------------------------------


class FitJob(NamedTuple):
    """A training, as it was prepared.

    `loads`: of the ranks. `division`: of an epoch. `course`: of the learning rate, which is
    multiplied by `rate_scale` before. `is_on_cpu`: train on the CPU, even on workers with a GPU.
    `start_from`: the checkpoint that a new run starts from; None if it resumes, or has none.
    """

    model: Any
    samples: Samples
    validation: Samples | None
    loss: Callable[..., Any]
    options: TrainingOptions
    loads: tuple[float, ...]
    division: Division
    course: LearningRates
    rate_scale: float
    is_on_cpu: bool
    start_from: str | None = None

    def share(self, rank: int, size: int) -> Share:
        """Return a rank's share of each mini-batch; equal shares with fewer ranks than planned."""
        # fewer: in pools of this process, and after workers were lost for good; the mini-batch
        # stays the same
        loads = self.loads if size == len(self.loads) else (1,) * size
        return share_of(rank, self.division.batch_size, loads)

    def pieces(self, share: Share) -> list[tuple[int, int]]:
        """Return the positions of a rank's part of each mini-batch in the order of an epoch."""
        size, count = self.division.batch_size, self.division.steps * self.division.accumulate
        starts = range(share.start, share.start + count * size, size)
        return [(start, start + share.size) for start in starts]


# --- ranks, as one of them sees them --------------------------------------------------------------


class Ranks:
    """All ranks, as one of them sees them; a single one needs no process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def add(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Return the sums of numbers over all ranks, the same to the last bit on each."""
        together = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        )
        if self.size > 1:
            dist.all_reduce(together)
        return [float(value) for value in together.tolist()]  # waits for the device, once

    def any(self, wish: bool) -> bool:
        """Whether `wish` is true on any rank."""
        return wish if self.size == 1 else self.add([float(wish)])[0] > 0

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give these tensors the values that rank 0 has, on all ranks."""
        if self.size == 1:
            return
        for tensor in tensors:
            if tensor.numel():
                values = tensor.detach().contiguous()
                # as bytes: gloo does not know all types
                dist.broadcast(values.reshape(-1).view(torch.uint8), src=0)
                tensor.detach().copy_(values)

    def wait(self) -> None:
        """Wait for all ranks, and for the device."""
        self.any(False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes no more bits
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were."""
    # The worker, or with "inline" the user's process, has other uses for the generators.
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# --- running statistics of normalization layers ---------------------------------------------------


@torch.no_grad()
def merge_buffers(module: nn.Module, ranks: Ranks, weight: float) -> None:
    """Give all ranks the same buffers, to the last bit; `weight` is this rank's share.

    Running means and variances become those of all ranks' samples together: with the weights w,
    means m and variances v of the ranks, the mean is M = sum(w m), the variance sum(w (v + (m -
    M)^2)). All other buffers become those of rank 0.

    Source:
        Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances".
    """
    if ranks.size == 1:
        return
    norms = [
        (getattr(layer, "running_mean", None), getattr(layer, "running_var", None))
        for layer in module.modules()
    ]
    layers = [
        (mean, variance)
        for mean, variance in norms
        if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor)
    ]
    statistics = {id(tensor) for layer in layers for tensor in layer}
    for dtype in sorted({mean.dtype for mean, _ in layers}, key=str):  # in one order on all ranks
        same = [layer for layer in layers if layer[0].dtype is dtype]
        kinds = [mean for mean, _ in same], [variance for _, variance in same]
        own_mean, own_variance = (
            torch.cat([each.flatten() for each in tensors]).double() for tensors in kinds
        )
        mean = own_mean * weight
        dist.all_reduce(mean)
        variance = (own_variance + (own_mean - mean) ** 2) * weight
        dist.all_reduce(variance)
        # torch does not promise that a sum has the same bits everywhere
        ranks.broadcast([mean, variance])
        for values, tensors in zip((mean, variance), kinds, strict=True):
            parts = values.split([each.numel() for each in tensors])
            for each, part in zip(tensors, parts, strict=True):
                each.copy_(part.view_as(each))
    ranks.broadcast([buffer for buffer in module.buffers() if id(buffer) not in statistics])


# --- losses ---------------------------------------------------------------------------------------


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The relative difference that rounding may cause between a mean over parts and one over all.

For other types it is a hundredth."""


def check_loss(loss: Any) -> None:
    """Raise the error for a loss that a model cannot be trained by."""
    if not isinstance(loss, torch.Tensor):
        raise InvalidTypeError(
            f"The loss function has returned a {type(loss).__name__}. It must return a tensor with"
            " one number."
        )
    if loss.ndim:
        raise InvalidValueError(
            f"The loss function has returned a tensor of shape {tuple(loss.shape)}. It must return"
            " one number, the mean over its samples: reduction='mean'."
        )
    if loss.grad_fn is None:
        raise InvalidValueError(
            "The loss does not depend on the model's parameters: is there a detach(), or an"
            " argmax()?"
        )


def is_mean_over_samples(
    loss_fn: Callable[..., Any], outputs: Any, targets: Any, loss: torch.Tensor, num_samples: int
) -> bool:
    """Whether a loss equals the mean over its halves, as it does if all samples count the same.

    Raises:
        InvalidValueError: It equals their sum: each rank would train by a part of the gradient.
    """
    are_tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if not are_tensors or min(outputs.ndim, targets.ndim) == 0 or len(outputs) < 2:
        return True  # samples that cannot be halved: it cannot be told
    num_all, half = len(outputs), len(outputs) // 2
    tolerance = TOLERANCE.get(loss.dtype, 1e-2)

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = loss_fn(outputs, targets).double()
        return value

    def of_halves(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_of(outputs[:half], targets[:half]), loss_of(outputs[half:], targets[half:])

    def is_near(value: torch.Tensor, other: torch.Tensor, *halves: torch.Tensor) -> bool:
        # losses may be tiny, and halves that cancel each other leave rounding errors
        allowed = tolerance * max([each.abs() for each in (value, other, *halves)])
        return bool(torch.isclose(value, other, rtol=0, atol=float(allowed), equal_nan=True))

    def is_added_up(targets: torch.Tensor) -> bool:
        halves = of_halves(targets)
        return is_near(halves[0] + halves[1], loss_of(outputs, targets), *halves)

    is_mean = True
    try:
        with torch.no_grad():
            whole = loss.double()
            first, second = of_halves(targets)
            mean = (first * half + second * (num_all - half)) / num_all
            is_mean = is_near(mean, whole, first, second)
            if is_mean:
                return True
            twice = [each.repeat_interleave(2, 0) for each in (outputs, targets)]
            is_sum = (
                # else another dimension may be that of the samples
                num_all == num_samples
                and is_near(first + second, whole, first, second)
                # a mean over chosen samples equals one half if the other has none of them
                and not (is_near(first, whole) or is_near(second, whole))
                # one that divides by the number of chosen ones may have found none
                and is_added_up(torch.ones_like(targets))
                and is_added_up(torch.zeros_like(targets))
                # one that compares samples with each other: of n equal ones it may be log n
                and is_near(loss_of(*twice), 2 * whole)
            )
    except Exception:  # the user's function may fail for half of the samples, or other targets
        return is_mean
    if is_sum:
        raise InvalidValueError(
            "The loss function returns the sum over its samples. It must return the mean, from"
            " which raypool combines the losses of the workers: divide the sum by the number of"
            " samples, or set reduction='mean'."
        )
    return False


# --- a model over several ranks: by DDP, or by FSDP2 ----------------------------------------------


LISTS = (nn.ModuleList, nn.ModuleDict)
"""Containers that are never called, only the layers in them."""


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Leave each rank a part of every parameter (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = list(_outermost_layers(module))
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    owners = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    for owner in set(module.modules()).difference(*(layer.modules() for layer in layers)):
        owners.update(id(each) for each in owner.parameters(recurse=False) if id(each) in in_layers)
    # found before the first is sharded, which replaces its parameters
    unshared = [
        layer
        for layer in layers
        if all(owners[id(parameter)] == 1 for parameter in layer.parameters())
    ]
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    # layer by layer, so that only one is gathered at a time; the rest together
    for layer in unshared:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    # Entries of a list (`Sequential` too) are called as a whole; those in them are not looked at.
    for child in module.children():
        if isinstance(module, (nn.Sequential, *LISTS)) and not isinstance(child, LISTS):
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _outermost_layers(child)


def connect(module: nn.Module, ranks: Ranks, has_unused: bool) -> DistributedDataParallel:
    """Let gradients be averaged over the ranks, whose parameters are the same already."""
    # Buffers are merged when they are looked at. Torch 2.13 has another name for this, and warns of
    # the old one.
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
    not_buffers: dict[str, Any] = {name: False}
    return DistributedDataParallel(
        module,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        **not_buffers,
        init_sync=False,
        gradient_as_bucket_view=True,  # saves a copy of all gradients
        find_unused_parameters=has_unused,
    )


def has_unused(loss: torch.Tensor, module: nn.Module) -> bool:
    """Whether a loss leaves out parameters to train: DDP would wait for these forever.

    What is behind a reentrant checkpoint cannot be seen, and DDP that looks for unused parameters
    fails with one: it counts as used.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return False
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        # the graph may be deeper than Python's stack, so this is no recursion
        waiting.extend(following for following, _ in node.next_functions)
    return any(
        parameter.requires_grad and id(parameter) not in found for parameter in module.parameters()
    )


def whole_state(module: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Return a model's whole state on the CPU, on rank 0; called on all ranks together."""
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # on all ranks
        if ranks.rank == 0:
            state[name] = whole.detach().cpu() if isinstance(whole, torch.Tensor) else whole
    return state


# --- checkpoints ----------------------------------------------------------------------------------


FILE = "training.pt"
"""The name of the one file of a checkpoint."""

VERSION = 3

ASKED = ("momentum", "weight_decay")
"""Options of an optimizer that hold even if a checkpoint was made with others.

The momentum only without a schedule of the user's."""


class Progress(NamedTuple):
    """How far a training has come, and what patience has seen.

    `epoch`: the completed epochs; `step`: all steps; `epoch_steps`: those since the last epoch.
    """

    epoch: int = 0
    step: int = 0
    epoch_steps: int = 0
    best_loss: float = float("inf")
    worse_in_a_row: int = 0


def take(learner: Learner, progress: Progress, best: dict[str, Any] | None) -> dict[str, Any]:
    """Return the content of a checkpoint, on rank 0; called on all ranks together."""
    scheduler, scaler = learner.scheduler, learner.scaler
    model = whole_state(learner.module, learner.ranks)  # all ranks meet here
    optimizer: dict[str, Any]
    if learner.strategy == "fsdp":
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = get_optimizer_state_dict(
            learner.module, learner.optimizer, options=_whole_options()
        )
    else:
        optimizer = learner.optimizer.state_dict()
    state = {
        "raypool": VERSION,
        "progress": progress._asdict(),
        "steps_per_epoch": learner.steps_per_epoch,
        "strategy": learner.strategy,
        "model": model,
        "best": best,
        "optimizer_class": type(learner.optimizer).__name__,
        "optimizer": optimizer,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    return _in_plain_numbers(state)  # type: ignore[no-any-return]


def _in_plain_numbers(values: Any) -> Any:
    """Return nested values with Python's numbers in place of NumPy's, which `read` would refuse."""
    if isinstance(values, np.generic):
        return values.item()
    if type(values) in (dict, OrderedDict, Counter):  # not mere mappings: `MultiStepLR` counts
        pairs = values.items()
        return type(values)({_in_plain_numbers(k): _in_plain_numbers(v) for k, v in pairs})
    if type(values) in (list, tuple):
        return type(values)(map(_in_plain_numbers, values))
    return values


def check_loads(path: Path) -> None:
    """Make sure that `read` will take a file."""
    try:
        # on "meta", mapped: the tensors are not read
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InvalidTypeError(
            "The training cannot save checkpoints: the state of the model, the optimizer or the"
            f" schedule has something in it that could not be loaded again ({forbidden(error)}),"
            " because loading runs no code. Keep tensors, numbers and strings there, in lists and"
            " dicts (get_extra_state() of a module, state_dict() of a schedule)."
        ) from error


def read(folder: str) -> dict[str, Any]:
    """Return the content of a checkpoint, without running any code in it."""
    path = Path(folder) / FILE
    advice = "Pass one that pool.fit has made."
    if not path.is_file():
        found = ", ".join(sorted(each.name for each in Path(folder).iterdir())[:5]) or "nothing"
        raise InvalidValueError(
            f"{folder} is not a checkpoint of pool.fit: it has no {FILE} in it, but {found}."
            f" {advice}"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a truncated file torch may raise anything, even an IndexError
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidValueError(
            f"{path} is not a checkpoint of pool.fit: it cannot be read ({reason}). {advice}"
        ) from error
    if not isinstance(state, dict) or state.get("raypool") != VERSION:
        raise InvalidValueError(
            f"{path} is not a checkpoint of pool.fit, but something else that torch has saved."
            f" {advice}"
        )
    return state


def restore(learner: Learner, state: dict[str, Any], folder: str) -> Progress:
    """Restore a model from a checkpoint; return its progress."""
    check_same_model(state["model"], learner.module, folder)
    if state["strategy"] != learner.strategy:
        raise InvalidValueError(
            f"{folder} was made with strategy={state['strategy']!r}, but this training uses"
            f" {learner.strategy!r}, which stores the optimizer's state differently. Use the same"
            " strategy."
        )
    before, now = state["optimizer_class"], type(learner.optimizer).__name__
    if before != now:
        raise InvalidValueError(
            f"{folder} was made with the optimizer {before}, but this training uses {now}. Use the"
            " same optimizer, or start over."
        )
    if learner.is_sharded:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(learner.module, state["model"], options=_whole_options())
    else:
        learner.module.load_state_dict(state["model"])
    _restore_rest(learner, state, folder)
    progress = Progress(**state["progress"])
    # other mini-batches, ranks or data: the same part of the epoch is done
    done = progress.epoch_steps * learner.steps_per_epoch // state["steps_per_epoch"]
    return progress._replace(epoch_steps=done)


def _restore_rest(learner: Learner, state: dict[str, Any], folder: str) -> None:
    # the user's own schedule may move the momentum, as OneCycleLR does
    names = ASKED if learner.scheduler is None else ("weight_decay",)
    asked = [
        {name: group[name] for name in names if name in group}
        for group in learner.optimizer.param_groups
    ]
    try:
        if learner.strategy == "fsdp":
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(
                learner.module, learner.optimizer, state["optimizer"], options=_whole_options()
            )
        else:
            learner.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(learner.optimizer.param_groups, asked, strict=True):
            group.update(own)
        for name, part in (("scheduler", learner.scheduler), ("scaler", learner.scaler)):
            if (part is None) != (state[name] is None):
                raise ValueError(f"it has {'no' if state[name] is None else 'a'} {name}")
            if part is not None:
                part.load_state_dict(state[name])
    except (ValueError, KeyError) as error:
        raise InvalidValueError(
            f"{folder} was made with other options: {error}. Use the optimizer, schedule and"
            " precision that it was made with, or start over."
        ) from error


def check_same_model(state: dict[str, Any], module: nn.Module, folder: str) -> None:
    """Raise the error for the first key in which a checkpoint is not of this model."""
    own = module.state_dict()
    for name in [*own, *state]:
        there, here = (tuple(getattr(each.get(name), "shape", ())) for each in (state, own))
        if name not in state:
            fact = f"it has no {name!r}"
        elif name not in own:
            fact = f"it has {name!r}, which is not here"
        elif there != here:
            fact = f"{name!r} has the shape {there} in it, and {here} here"
        else:
            continue
        raise InvalidValueError(
            f"{folder} is a checkpoint of another model: {fact}. Pass one of this model, or start"
            " over."
        )


def _whole_options() -> Any:
    """Return the options for whole states, as in a single process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


# --- measurement of steps -------------------------------------------------------------------------


class Measure(NamedTuple):
    """How many steps to measure, after how many others, and whether the ranks add gradients."""

    num_steps: int
    num_warm_up: int
    is_synchronized: bool
