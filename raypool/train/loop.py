"""The loop of `pool.fit`, as each rank runs it: a loop of Ray Train's, as a user could have written it. For workers only."""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ray.train
import torch

from raypool.errors import InvalidValueError
from raypool.task import current_task
from raypool.train import snapshot
from raypool.train.data import Batch, Samples, mixed_seed, order_of
from raypool.train.job import FitJob
from raypool.train.learner import Learner
from raypool.train.measure import Measure
from raypool.train.ranks import Ranks, own_random_state, seed_all
from raypool.train.shares import share_of
from raypool.train.snapshot import Progress
from raypool.train.spread import whole_state
from raypool.worker.running import note_here

LOOK_S = 1.0
"""How often the ranks ask each other whether the machine of any is about to go [s]: that waits for the device."""

PREEMPTED = "preempted"
"""What has ended an attempt that has kept all, to go on elsewhere."""

LOST = "loss is nan"
"""What has ended a training that nothing can be made of any more."""


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model by the options; return how that ended, on rank 0 with the model's state, saved by torch."""
    job: FitJob = config["fit"]
    ranks = ranks_here(job)
    with own_random_state(ranks.device):
        return Training(job, ranks).run()


def ranks_here(job: FitJob) -> Ranks:
    """Return the ranks of the training that this process is one of."""
    context = ray.train.get_context()
    device = torch.device("cpu") if job.is_on_cpu else current_task().device
    return Ranks(context.get_world_rank(), context.get_world_size(), device)


class Training:
    """A training on one rank, from its start or a checkpoint to its end."""

    def __init__(self, job: FitJob, ranks: Ranks) -> None:
        options = job.options
        self._job, self._ranks, self._options = job, ranks, options
        self._learner = Learner(job, ranks)
        dtype, loaders = self._learner.dtype, options.loader_processes
        self._source = job.samples.open(ranks.device, dtype, loaders)
        self._tests = None if job.validation is None else job.validation.open(ranks.device, dtype, loaders)
        self._best: dict[str, Any] | None = None  # the model's state at the best validation, on rank 0, if that is what is wanted
        self._progress = self._start()
        self._reason = "max_epochs"
        self._is_lost = False
        self._reported_at = self._looked_at = time.perf_counter()
        self._reported_step = self._looked_step = self._progress.step
        self._look_step = self._progress.step + 1  # after this one all ranks look

    def _start(self) -> Progress:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return Progress()
        with checkpoint.as_directory() as folder:
            state = snapshot.read(folder)
        self._best = state["best"]
        return snapshot.restore(self._learner, state, checkpoint.path)

    def run(self) -> dict[str, Any]:
        """Train to the end."""
        for epoch in range(self._progress.epoch, self._options.max_epochs):
            if self._has_no_patience_left():
                self._reason = "patience"
            if self._reason != "max_epochs" or self._train_epoch(epoch):
                break
        if self._reason == PREEMPTED:
            return {}  # for nobody: all there is was kept
        self._learner.settle()
        progress, dropped = self._progress, self._job.division.dropped
        end: dict[str, Any] = {
            "epochs": progress.epoch,
            "steps": progress.step,
            "dropped_samples": dropped,
            "ended_by": self._reason,
            "is_mean": not self._ranks.any(not self._learner.is_mean),
        }
        is_best = self._options.output_model == "best" and self._best is not None
        state = self._best if is_best else whole_state(self._learner.module, self._ranks)
        if self._ranks.rank == 0:
            file = io.BytesIO()
            torch.save(state, file)
            end["model"] = file.getvalue()
        return end

    def _train_epoch(self, epoch: int) -> bool:
        """Train through what is left of the data in this epoch; return whether it is to end here."""
        options, division = self._options, self._job.division
        done = self._progress.step - epoch * division.steps
        self._ranks.seed(options.seed, 1, epoch, *([done] if done else []))
        batches = self._batches(epoch, done)
        for number in range(done + 1, division.steps + 1):
            chosen = [next(batches) for _ in range(division.accumulate)]
            self._learner.iterate(self._progress.step, chosen)
            self._progress = self._progress._replace(step=self._progress.step + 1)
            is_due = options.report_every is not None and number % options.report_every == 0
            if number < division.steps:
                if is_due and self._report(self._metrics(epoch), None):
                    return True
                if self._has_left():
                    return True
        return self._end_epoch(epoch)

    def _batches(self, epoch: int, done: int) -> Iterator[Batch]:
        """Return this rank's shares of an epoch's mini-batches, but for those of the steps that are done."""
        job, options = self._job, self._options
        order = ordered(job.samples, str(options.shuffle), options.seed, epoch, self._ranks)
        return self._source.batches(order, job.pieces(self._learner.share)[done * job.division.accumulate :])

    def _has_left(self) -> bool:
        """Keep all there is if the machine of any rank is about to go, to go on elsewhere from this very step."""
        if self._progress.step < self._look_step:
            return False
        info = preemption_info()
        (seconds,) = self._ranks.add([time.perf_counter() - self._looked_at])
        steps = self._progress.step - self._looked_step
        self._look_step = self._progress.step + max(int(LOOK_S * steps * self._ranks.size / seconds), 1)
        self._looked_at, self._looked_step = time.perf_counter(), self._progress.step
        if info is None:
            return False
        self._report_state({}, self._state())
        self._reason = PREEMPTED
        return True

    # --- what happens between epochs ----------------------------------------------------------------------------------

    def _end_epoch(self, epoch: int) -> bool:
        """Validate, keep a checkpoint and report, as is due; return whether somebody has asked for an end."""
        options, learner = self._options, self._learner
        done = epoch + 1
        is_last = done == options.max_epochs
        self._progress = self._progress._replace(epoch=done)
        metrics = self._metrics(epoch)
        metrics["dropped_samples"] = self._job.division.dropped
        if self._tests is not None and (is_last or done % options.validation_frequency == 0):
            metrics["validation_loss"] = self._validate()
            self._judge(metrics["validation_loss"])
        learner.end_epoch(metrics.get("validation_loss") if self._tests is not None else metrics["loss"])
        every = options.checkpoint_every
        state = None
        if every is not None and not self._is_lost and (is_last or done % every == 0 or self._has_no_patience_left()):
            state = self._state()
        is_to_end = self._report(metrics, state)
        if is_to_end and every is not None and state is None and not self._is_lost:
            self._report_state({}, self._state())  # it can go on from where it was stopped; all else was said
        return is_to_end

    def _state(self) -> dict[str, Any]:
        self._learner.settle()
        return snapshot.take(self._learner, self._progress, self._best)

    def _judge(self, loss: float) -> None:
        """Note whether the loss of a validation is below all before."""
        progress = self._progress
        if not loss < progress.best_loss:
            self._progress = progress._replace(worse_in_a_row=progress.worse_in_a_row + 1)
            return
        self._progress = progress._replace(best_loss=loss, worse_in_a_row=0)
        if self._options.output_model == "best":
            state = whole_state(self._learner.module, self._ranks)
            self._best = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def _has_no_patience_left(self) -> bool:
        patience = self._options.patience
        return patience is not None and self._progress.worse_in_a_row >= patience

    def _validate(self) -> float:
        """Return the mean loss over all samples to validate on, which the ranks share out.

        All ranks call the model equally often, as FSDP needs it: one with fewer samples takes any, with a weight of 0.
        """
        assert self._tests is not None
        assert self._job.validation is not None
        num_samples, ranks = len(self._job.validation), self._ranks
        loads = (1,) * ranks.size
        share, largest = share_of(ranks.rank, num_samples, loads), share_of(0, num_samples, loads).size
        size = max(self._job.division.batch_size // ranks.size, 1)
        counts = [max(min(size, share.size - start), 0) for start in range(0, largest, size)]
        starts = [share.start + number * size for number in range(len(counts))]
        pieces = [(start, start + count) if count else (0, 1) for start, count in zip(starts, counts, strict=True)]
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._learner.settle()
        self._learner.module.eval()
        with torch.no_grad():
            order = ordered(self._job.validation, "never", self._options.seed, 0, ranks)
            batches = self._tests.batches(order, pieces)
            for batch, count in zip(batches, counts, strict=True):
                total += self._learner.loss_on(batch) * count
        self._learner.module.train()
        return ranks.add([total])[0] / num_samples

    def _metrics(self, epoch: int) -> dict[str, Any]:
        """Return what there is to say since the last report; it waits for the device."""
        progress, division = self._progress, self._job.division
        loss = self._learner.take_loss()
        self._is_lost = math.isnan(loss)
        now = time.perf_counter()
        num_samples = (progress.step - self._reported_step) * division.batch_size * division.accumulate
        speed = num_samples / (now - self._reported_at)
        self._reported_at, self._reported_step = now, progress.step
        rate = self._learner.learning_rate
        return {"epoch": epoch, "step": progress.step - 1, "loss": loss, "learning_rate": rate, "samples_per_s": speed}

    def _report(self, metrics: dict[str, Any], state: dict[str, Any] | None) -> bool:
        """Report to whoever looks on, with a checkpoint if there is one; return whether somebody has asked for an end."""
        if state is None:
            ray.train.report(metrics)
        else:
            self._report_state(metrics, state)
        return self._is_to_end(metrics)

    def _report_state(self, metrics: dict[str, Any], state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="raypool-fit-") as folder:
            checkpoint = None
            if self._ranks.rank == 0:
                snapshot.write(state, folder)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)

    def _is_to_end(self, metrics: dict[str, Any]) -> bool:
        """Whether the training was asked to end, from outside or by the user's function, or is lost; the same on all ranks."""
        output_fn = self._options.output_fn
        has_said_so = output_fn is not None and self._ranks.rank == 0 and bool(output_fn(dict(metrics)))
        note = note_here()  # `should_stop` of the task would also be true where a machine is about to go
        wishes = [float(note is not None and note.should_stop), float(has_said_so)]
        asked, said = self._ranks.add(wishes) if self._ranks.size > 1 else wishes
        if asked or said:
            self._reason = "request_stop" if asked else "output_fn"
        elif self._is_lost:
            self._reason = LOST
        return bool(asked or said or self._is_lost)


def ordered(samples: Samples, shuffle: str, seed: int, epoch: int, ranks: Ranks) -> torch.Tensor:
    """Return the order of the samples in an epoch, the same on every rank; a sampler draws it on rank 0.

    Raises:
        InvalidValueError: The sampler has given more or fewer than it said.
    """
    if samples.sampler is None:
        return order_of(len(samples), shuffle, seed, epoch)
    order = torch.zeros(len(samples), dtype=torch.int64)
    if ranks.rank == 0:
        with own_random_state(ranks.device):  # what the model draws does not depend on it
            own = mixed_seed(seed, 2, epoch)
            seed_all(own)
            if isinstance(getattr(samples.sampler, "generator", None), torch.Generator):
                samples.sampler.generator.manual_seed(own)  # so that an epoch that is resumed has the same order
            if hasattr(samples.sampler, "set_epoch"):
                samples.sampler.set_epoch(epoch)
            numbers = [int(number) for number in samples.sampler]
        if len(numbers) != len(order):
            raise InvalidValueError(
                f"The sampler, a {type(samples.sampler).__name__}, has given {len(numbers):,} samples in epoch {epoch}, and its "
                f"length is {len(order):,}. Let both be equal."
            )
        order = torch.tensor(numbers, dtype=torch.int64)
    order = order.to(ranks.device)
    ranks.broadcast([order])
    return order


def preemption_info() -> Any:
    """Return which machines are about to go, the same on all ranks, which have to ask together; Ray 2.52 can't tell."""
    ask = getattr(ray.train, "get_preemption_info", None)
    return None if ask is None else ask()


# --- measured for `scaling_report` ------------------------------------------------------------------------------------


def measure_loop(config: dict[str, Any]) -> list[float]:
    """Take some steps of a training with a model of its own, and return how long each took on this rank [s].

    Args:
        config: "config": that of `fit`. "measure": how many steps to measure, how many to take before, and whether the
            ranks reduce their gradients.
    """
    job: FitJob = config["config"]["fit"]
    measure: Measure = config["measure"]
    ranks = ranks_here(job)
    seconds = []
    with own_random_state(ranks.device):
        learner = Learner(job, ranks)
        batches = _endless_batches(job, ranks, learner)
        for step in range(measure.num_warm_up + measure.num_steps):
            chosen = [next(batches) for _ in range(job.division.accumulate)]
            ranks.wait()
            start = time.perf_counter()
            learner.iterate(step % job.course.num_steps, chosen, is_synchronised=measure.is_synchronised)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            seconds.append(time.perf_counter() - start)
    return seconds[measure.num_warm_up :]


def _endless_batches(job: FitJob, ranks: Ranks, learner: Learner) -> Iterator[Batch]:
    """Yield this rank's shares of the mini-batches of one epoch, again and again."""
    source = job.samples.open(ranks.device, learner.dtype, 0)
    order = ordered(job.samples, "never", job.options.seed, 0, ranks)
    while True:
        yield from source.batches(order, job.pieces(learner.share))
