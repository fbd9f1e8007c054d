"""`pool.fit` in the user's process: from its arguments to a loop, from the result to a model.

This module imports torch: its callers hold a model of torch's anyway.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raypool.channel.records import WorkerInfo
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError
from raypool.train.data import Samples, is_shuffled, loader_of, take_samples
from raypool.train.fit_loop import LOST, FitJob, check_module, fit, own_random_state
from raypool.train.runs import TrainingResult
from raypool.train.shares import Division, LearningRates, default_warmup, divide, split_batch
from raypool.train.training_options import TrainingOptions

logger = logging.getLogger("raypool")

MINI_BATCH_SIZE = 128
"""The default size of a mini-batch [samples], as in MATLAB."""


@dataclass(frozen=True)
class FitCall:
    """A training that `pool.train` can run, on the workers of these numbers.

    `notes`: remarks for the user, a line each. `finish`: turns its result into the user's.
    """

    loop: Callable[[dict[str, Any]], Any]
    config: dict[str, Any]
    ranks: list[int]
    notes: list[str]
    finish: Callable[[TrainingResult], TrainingResult]


def prepare_fit(
    model: Any,
    data: Any,
    loss: Callable[..., Any],
    options: TrainingOptions,
    workers: Sequence[WorkerInfo],
    start_from: str | None = None,
) -> FitCall:
    """Check the arguments of `pool.fit`, and return the training that they describe.

    `start_from`: see `FitJob`.
    """
    _check_model(model)
    _check_loss(loss)
    samples = take_samples(data)
    validation = (
        None
        if options.validation_data is None
        else take_samples(options.validation_data, "validation_data")
    )
    options = _completed(options, data, samples)
    chosen = _chosen(options, workers)
    notes = _notes_on_workers(chosen, workers, options)
    scale = len(chosen) if options.scale_batch == "per_worker" else 1
    batch_size = (options.mini_batch_size or MINI_BATCH_SIZE) * scale
    division = divide(len(samples), batch_size, options.accumulate_steps)
    _check_shares(division, batch_size, chosen)
    model = _copied(model)
    notes += _notes_on_samples(division, batch_size, options)
    course = _course(options, division, scale)
    rate_scale = scale if options.scale_learning_rate == "linear" else 1
    if rate_scale > 1 and not callable(options.schedule):
        notes.append(
            f"The learning rate is {options.learning_rate:g} x {rate_scale} ="
            f" {options.learning_rate * rate_scale:g}, reached after {course.warmup_steps} steps."
        )
    if options.validation_data is not None:  # it travels as samples
        options = replace(options, validation_data=())
    job = FitJob(
        model=model,
        samples=samples,
        validation=validation,
        loss=loss,
        options=options,
        loads=tuple(load for _, load in chosen),
        division=division,
        course=course,
        rate_scale=rate_scale,
        is_on_cpu=options.execution == "cpu",
        start_from=start_from,
    )
    finish = functools.partial(_finished, model)
    return FitCall(fit, {"fit": job}, [worker.index for worker, _ in chosen], notes, finish)


def gradient_bytes(config: dict[str, Any]) -> int:
    """Return the size of a model's gradients [bytes], which the ranks add up at each step."""
    job: FitJob = config["fit"]
    module = job.model if isinstance(job.model, nn.Module) else _make(job.model)
    return sum(
        each.numel() * each.element_size() for each in module.parameters() if each.requires_grad
    )


def _finished(model: Any, result: TrainingResult) -> TrainingResult:
    """Return the ranks' result with the trained model, on the CPU and in evaluation mode."""
    ends = [dict(end) for end in result.values]
    # only rank 0 sends it
    (saved,) = [end.pop("model") for end in ends if "model" in end]
    # Safe: it comes from our own worker, like all values. A model may hold more than tensors.
    state = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=False)
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else _make(model)
    module.to("cpu").load_state_dict(state)
    module.eval()
    ended_by = ends[0]["ended_by"]
    if not ends[0]["is_mean"]:
        logger.warning(
            "The loss is not the plain mean over its samples (it weighs them, leaves some out, or"
            " compares them with each other), and each of %d workers computed it over its own"
            " share: the result differs from that of one worker.",
            len(ends),
        )
    if ended_by == LOST:
        logger.warning(
            "The training stopped after %d steps, because its loss is NaN. Check the data for NaN,"
            " lower learning_rate, or set clip_gradient_norm.",
            ends[0]["steps"],
        )
    if ends[0]["is_overdue"]:
        logger.warning(
            "No epoch was trained: the checkpoint of start_from has %d epochs already, and"
            " max_epochs counts those, too. Set max_epochs higher.",
            ends[0]["epochs"],
        )
    for end in ends:
        del end["is_mean"], end["is_overdue"]
    return replace(result, values=ends, model=module, ended_by=ended_by)


def _make(model: Callable[[], Any]) -> nn.Module:
    # the user's process has other uses for its random generators
    with own_random_state(torch.device("cpu")):
        module = model()
    check_module(module)
    return module  # type: ignore[no-any-return]


def _copied(model: Any) -> Any:
    """Return a model as it is now: the user may change it before the result is there."""
    if not isinstance(model, nn.Module):
        return model
    try:
        return copy.deepcopy(model).to("cpu")
    except Exception as error:
        raise InvalidTypeError(
            f"The model cannot be copied ({type(error).__name__}: {error}), as is needed to train"
            " it. Keep its tensors as parameters or buffers, create files, locks and the like on"
            " first use, or pass a function that makes the model."
        ) from error


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        check_module(model)
        return
    if not callable(model):
        raise InvalidTypeError(
            f"model={model!r} is a {type(model).__name__}. Pass a torch.nn.Module, or a function"
            " without arguments that makes one."
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        name = getattr(model, "__name__", repr(model))
        raise InvalidTypeError(
            f"model={name} cannot be called without arguments: {error}. Pass a model, or bind them:"
            f" functools.partial({name}, ...)."
        ) from None
    except ValueError:  # some builtins do not say what they take
        return


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise InvalidTypeError(
            f"loss={loss.__name__} is a class. Pass an instance: loss={loss.__name__}()."
        )
    if not callable(loss):
        raise InvalidTypeError(
            f"loss={loss!r} is not callable. Pass a function of outputs and targets, such as"
            " torch.nn.functional.cross_entropy."
        )
    if isinstance(loss, nn.Module):
        trained = [name for name, each in loss.named_parameters() if each.requires_grad]
        if trained:
            raise InvalidValueError(
                f"loss, a {type(loss).__name__}, has {len(trained)} parameters that require"
                f" gradients, such as {trained[0]!r}, but only those of the model are trained. Put"
                " them into the model, or freeze them: loss.requires_grad_(False)."
            )
    # of a functools.partial
    given = getattr(loss, "keywords", {}).get("reduction", getattr(loss, "reduction", "mean"))
    if given in ("sum", "none"):
        raise InvalidValueError(
            f"loss has reduction={given!r}. It must return the mean over its samples, from which"
            " raypool combines the losses of the workers: reduction='mean'."
        )


def _completed(options: TrainingOptions, data: Any, samples: Samples) -> TrainingOptions:
    """Return the options with mini-batch size and order, by default as in the `DataLoader`."""
    loader, shuffle = loader_of(data), options.shuffle
    if samples.sampler is not None and shuffle is not None:
        raise InvalidValueError(
            f"shuffle={shuffle!r} cannot be combined with a sampler, which sets the order of the"
            " samples itself. Leave one of them out."
        )
    if shuffle is None:
        shuffle = loader is None or is_shuffled(loader)
    size = options.mini_batch_size or (MINI_BATCH_SIZE if loader is None else loader.batch_size)
    return replace(options, mini_batch_size=size, shuffle=shuffle)


# --- workers that train ---------------------------------------------------------------------------

Chosen = list[tuple[WorkerInfo, float]]
"""The workers that train, each with its load."""


def _chosen(options: TrainingOptions, workers: Sequence[WorkerInfo]) -> Chosen:
    able = _able(options.execution, workers)
    loads = options.worker_load or (1,) * len(able)
    if len(loads) != len(able):
        numbers = ", ".join(str(worker.index) for worker in able)
        raise InvalidValueError(
            f"worker_load={list(loads)} has {len(loads)} numbers, but {len(able)} workers may train"
            f" with execution={options.execution!r}: {numbers}. Pass one for each."
        )
    chosen = [(worker, load) for worker, load in zip(able, loads, strict=True) if load > 0]
    return chosen[:1] if options.execution == "gpu" else chosen  # MATLAB's "gpu" is one GPU


def _able(execution: str, workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Return the workers that can train: of several on one GPU, the first."""
    if execution == "cpu":
        return list(workers)
    by_gpu: dict[Any, WorkerInfo] = {}
    for worker in workers:
        if worker.gpu is not None:
            by_gpu.setdefault((worker.host, worker.gpu), worker)  # others would share its GPU
    if by_gpu:
        return list(by_gpu.values())
    if execution == "auto":
        return list(workers)
    raise ResourceError(
        f"execution={execution!r} needs a worker with a GPU: requested 1, available 0, of"
        f" {len(workers)} workers. Use execution='cpu', or a pool on GPUs.",
        requested=1,
        available=0,
    )


def _notes_on_workers(
    chosen: Chosen, workers: Sequence[WorkerInfo], options: TrainingOptions
) -> list[str]:
    """Return a note on workers that do not train, and how to open a pool without them."""
    training = [worker for worker, _ in chosen]
    idle = [worker for worker in workers if worker not in training]
    if not idle:
        return []
    able = _able(options.execution, workers)
    why = "one GPU was requested" if options.execution == "gpu" else "its load is 0"
    names = ", ".join(
        f"worker {each.index} ({why if each in able else 'no GPU of its own'})" for each in idle
    )
    is_on_gpus = options.execution != "cpu" and all(worker.gpu is not None for worker in training)
    advice = f"gpus={[worker.gpu for worker in training]}" if is_on_gpus else f"{len(training)}"
    return [
        f"Idle while this model trains: {names}. Choose what to train on when you open the pool:"
        f" parpool({advice})."
    ]


# --- samples and mini-batches ---------------------------------------------------------------------


def _check_shares(division: Division, batch_size: int, chosen: Chosen) -> None:
    """Refuse mini-batches that are too small to give every worker a sample."""
    shares = split_batch(division.batch_size, [load for _, load in chosen])
    if all(shares):
        return
    if division.num_samples < len(chosen):
        count = division.num_samples
        there = "is 1 sample" if count == 1 else f"are {count} samples"
        fact = f"There {there} for {len(chosen)} workers"
    elif division.batch_size < len(chosen):
        fact = (
            f"A mini-batch of {division.batch_size} is less than one sample for each of"
            f" {len(chosen)} workers"
        )
    else:
        idle = [
            worker.index for (worker, _), share in zip(chosen, shares, strict=True) if not share
        ]
        fact = (
            f"A mini-batch of {division.batch_size}, split by worker_load, leaves nothing for"
            f" worker {idle[0]}"
        )
    more = "pass more samples" if division.batch_size < batch_size else "raise mini_batch_size"
    raise InvalidValueError(f"{fact}. Use fewer workers (workers=[0] for one), or {more}.")


def _notes_on_samples(division: Division, batch_size: int, options: TrainingOptions) -> list[str]:
    """Return notes on where the training differs from the options."""
    notes = []
    if division.batch_size < batch_size:
        notes.append(
            f"There are {division.num_samples:,} samples, so a mini-batch has as many, not"
            f" {batch_size:,}."
        )
    if division.accumulate < options.accumulate_steps:
        notes.append(
            f"The samples make {division.accumulate} mini-batches, so a step takes as many, not"
            f" {options.accumulate_steps}."
        )
    if division.dropped:
        size = division.batch_size * division.accumulate
        other = ", different ones each time" if options.shuffle == "every-epoch" else ""
        notes.append(
            f"Each epoch leaves out {division.dropped:,} of {division.num_samples:,}"
            f" samples{other}: they do not fill a step of {size:,}."
        )
    return notes


def _course(options: TrainingOptions, division: Division, scale: int) -> LearningRates:
    num_steps = division.steps * options.max_epochs
    is_scaled = options.scale_learning_rate is not None and scale > 1
    warmup = options.warmup_steps or 0
    if options.warmup_steps is None and is_scaled:
        warmup = default_warmup(division.steps, num_steps)
    return LearningRates(
        kind=options.schedule if isinstance(options.schedule, str) else "none",
        steps_per_epoch=division.steps,
        num_steps=num_steps,
        warmup_steps=warmup,
        warmup_from=1 / scale if is_scaled else 0.0,
        drop_every=options.drop_every,
        drop_factor=options.drop_factor,
    )
