"""The verbs that train one model on all workers: `train` and `fit`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypool.channel.records import function_name
from raypool.engine.engine import say
from raypool.errors import InvalidTypeError, InvalidValueError, did_you_mean
from raypool.options import check_callable
from raypool.parallel_for import check_progress

if TYPE_CHECKING:
    from raypool.pool import PoolView, Workers
    from raypool.train.controller import Finish, RankPlaces
    from raypool.train.managed import ManagedLane
    from raypool.train.runs import RunOptions, TrainingRun
    from raypool.train.training_options import TrainingOptions


LANES = ("warm", "managed")

MANAGED_ONLY = ("get_dataset_shard", "ValidationTaskConfig")
"""Names of `ray.train` whose use in a loop requires Ray Train's controller."""


def train(  # noqa: PLR0913, PLR0917 - the arguments of the verb
    view: PoolView,
    loop: Callable[..., Any],
    config: Mapping[str, Any] | None,
    workers: Workers,
    lane: str,
    run_options: RunOptions | None,
    trainer: type | None,
    datasets: Mapping[str, Any] | None,
    trainer_args: Mapping[str, Any],
) -> TrainingRun:
    """Train a model by a loop written for Ray Train; see `PoolView.train`."""
    check_loop(loop)
    if config is not None and not isinstance(config, Mapping):
        raise InvalidTypeError(
            f"config={config!r} is a {type(config).__name__}. Pass a dict, or leave it out."
        )
    if lane == "warm":
        _check_warm({"trainer": trainer, "datasets": datasets}, trainer_args)
        check_names_in(loop)
    kept = _checked_run_options(run_options)
    places = _rank_places(view, workers, kept.min_workers)
    given = trainer_args if datasets is None else {"datasets": datasets, **trainer_args}
    name = view._options.name or function_name(loop)
    return _started(view, places, lane, loop, config, kept, name, None, trainer, given)


def fit(  # noqa: PLR0913, PLR0917 - the arguments of the verb
    view: PoolView,
    model: Any,
    data: Any,
    loss: Callable[..., Any],
    options: TrainingOptions | None,
    workers: Workers,
    lane: str,
    run_options: RunOptions | None,
    progress: bool | Callable[..., Any] | None,
) -> TrainingRun:
    """Train a model without a loop of the user's; see `PoolView.fit`."""
    from raypool.train.checkpoints import latest
    from raypool.train.fit import prepare_fit
    from raypool.train.scaling import Recipe
    from raypool.train.training_options import TrainingOptions

    options = TrainingOptions() if options is None else options
    if not isinstance(options, TrainingOptions):
        hint = (
            "Inputs and targets are one argument, a pair: fit(model, (x, y), loss)."
            if callable(options)
            else "Pass TrainingOptions(...); RunOptions(...) is for run_options=."
        )
        raise InvalidTypeError(f"options={options!r} is a {type(options).__name__}. {hint}")
    check_progress(progress)
    kept = _checked_run_options(run_options)
    wants_checkpoints = (kept.run_dir, kept.keep_checkpoints, kept.best_metric) != (None,) * 3
    if options.checkpoint_every is None and wants_checkpoints:
        options = replace(options, checkpoint_every=1)
        if kept.keep_checkpoints is None:  # all of them would fill the disk
            kept = replace(kept, keep_checkpoints=1)
    _check_best_metric(kept, options, lane)
    target, size, only = view._ranks(workers)
    there = target._numbers()  # without workers that are about to leave
    by_number = {worker.index: worker for worker in target._workers() if worker.index in there}
    numbers = by_number if only is None else [place for place in only if place in by_number]
    candidates = [by_number[number] for number in list(numbers)[:size]]
    # read only if it matters: a folder that cannot be read gets its error below
    begins = kept.start_from is not None and (kept.run_dir is None or not latest(kept.run_dir))
    start = str(kept.start_from) if begins else None
    call = prepare_fit(model, data, loss, options, candidates, start)
    if progress is not False:
        for note in call.notes:
            say(note)
    # a training on all of them is not bound to these: their replacements will do
    is_of_all = call.ranks == there
    chosen: Workers = len(call.ranks) if is_of_all else call.ranks
    if target._is_serial:  # its only rank is in this process; the pool has another worker 0
        chosen = workers
    places = _rank_places(view, chosen, kept.min_workers)
    name = view._options.name or "fit"
    run = _started(view, places, lane, call.loop, call.config, kept, name, call.finish)
    run.recipe = Recipe(places.engine, places.size, places.places, call.config)
    run.progress = progress
    return run


def _checked_run_options(given: Any) -> RunOptions:
    from raypool.train.runs import RunOptions

    if given is not None and not isinstance(given, RunOptions):
        raise InvalidTypeError(
            f"run_options={given!r} is a {type(given).__name__}. Pass RunOptions(...)."
        )
    return given or RunOptions()


def _check_best_metric(kept: RunOptions, options: TrainingOptions, lane: str) -> None:
    """Refuse a metric that `fit` does not report: no checkpoint would be the best."""
    from raypool.train.training_options import REPORTED

    name, every, validated = (
        kept.best_metric,
        options.checkpoint_every,
        options.validation_frequency,
    )
    has_validation = options.validation_data is not None
    known = {*REPORTED, *(["validation_loss"] if has_validation else [])}
    if name is not None and name not in known:
        more = "" if has_validation else " There is validation_loss with validation_data=."
        raise InvalidValueError(
            f"best_metric={name!r} is not reported by fit.{did_you_mean(name, sorted(known))}{more}"
        )
    is_rated = name != "validation_loss" or not every or every % validated == 0
    if lane == "managed" and kept.keep_checkpoints is not None and not is_rated:
        raise InvalidValueError(
            f"best_metric='validation_loss' is known every {validated} epochs, but a checkpoint is"
            f" saved every {every}. With lane='managed' each needs it: set"
            f" checkpoint_every={validated}, or validation_frequency=1."
        )


def _rank_places(view: PoolView, workers: Workers, least: int | None) -> RankPlaces:
    from raypool.train.controller import RankPlaces

    if view._options.fresh_process:
        raise InvalidValueError(
            "fresh_process=True cannot be used with a training, whose ranks stay together. With"
            " lane='managed' they are new processes."
        )
    target, size, places = view._ranks(workers)
    if target._engine.profile.backend != "ray":
        size = 1  # torch has one default process group for each process
    if least is not None and least > size:
        raise InvalidValueError(f"min_workers={least} is more than the {size} workers that train.")
    return RankPlaces(size, places, target._numbers, target._engine)


def _started(  # noqa: PLR0913, PLR0917 - it only passes them on
    view: PoolView,
    places: RankPlaces,
    lane: str,
    loop: Callable[..., Any],
    config: Mapping[str, Any] | None,
    kept: RunOptions,
    name: str,
    finish: Finish | None,
    trainer: type | None = None,
    given: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """Start a training in its lane; `finish` completes the result."""
    from raypool.train.controller import Controller, WarmLane, start_run
    from raypool.train.runs import TrainingRun, run_folder

    if lane not in LANES:
        raise InvalidValueError(f"lane must be 'warm' or 'managed', not {lane!r}.")
    engine = places.engine
    if lane == "warm":
        chosen: WarmLane | ManagedLane = WarmLane(engine, loop, config)
    elif engine.profile.backend == "ray":
        from raypool.train.managed import ManagedLane

        chosen = managed = ManagedLane(engine, loop, config, kept, trainer, given or {})
        finish = finish or managed.finish
    else:
        raise InvalidValueError(
            'lane="managed" is run by Ray, but this pool has the backend'
            f' {engine.profile.backend!r}. Use lane="warm", or a pool with profile="local".'
        )
    run = TrainingRun(name, run_folder(kept, name))
    controller = Controller(run, chosen, places, view._options, kept, finish)
    return start_run(run, controller, engine)


def check_loop(loop: Any) -> None:
    """Refuse a loop that Ray Train could not call."""
    check_callable(loop)
    try:
        signature = inspect.signature(loop)
    except (TypeError, ValueError):  # not every builtin has a signature
        raise InvalidTypeError(
            f"The loop {function_name(loop)} has no readable signature, like some builtins. Pass a"
            " function of one argument, or of none."
        ) from None
    for arguments in ((), (None,)):  # Ray Train calls it with the config, or with nothing
        try:
            signature.bind(*arguments)
        except TypeError:  # it does not take these
            continue
        return
    raise InvalidTypeError(
        f"The loop {function_name(loop)}({', '.join(signature.parameters)}) takes more than one"
        " argument. Put what it needs into `config`, a dict, or bind it with functools.partial."
    )


def check_names_in(loop: Any) -> None:
    """Refuse a loop whose code names functions that need Ray Train's controller."""
    while isinstance(loop, functools.partial):  # its code is that of the function in it
        loop = loop.func
    function = inspect.unwrap(loop if inspect.isroutine(loop) else type(loop).__call__)
    code = getattr(function, "__code__", None)
    codes = [] if code is None else [code]
    for code in codes:  # it grows: functions within functions are constants of the outer one
        codes += [each for each in code.co_consts if inspect.iscode(each)]
        for name in MANAGED_ONLY:
            if name in code.co_names:
                raise InvalidValueError(
                    f"The loop {function_name(loop)} uses ray.train.{name}, which needs Ray Train's"
                    ' controller: lane="managed". With the warm lane a loop reads and validates'
                    " its data itself, for example with ray.train.torch.prepare_data_loader."
                )


def _check_warm(given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse arguments that need Ray Train's controller, and unknown ones."""
    from raypool.train.runs import RunOptions

    if os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() not in ("1", "true"):
        raise InvalidValueError(
            f"RAY_TRAIN_V2_ENABLED={os.environ['RAY_TRAIN_V2_ENABLED']} in the environment chooses"
            " the first version of Ray Train. pool.train needs the second: remove the variable."
        )
    for name, value in given.items():
        if value:
            raise InvalidValueError(f'{name}= is for Ray Train\'s controller: add lane="managed".')
    for name in others:
        raise InvalidValueError(
            f"{name}= is no argument of pool.train. "
            + (
                f"Did you mean run_options=RunOptions({name}=...)?"
                if name in RunOptions.__annotations__
                else "Did you mean run_options=?"
                if name == "options"
                else 'If it is one of Ray\'s trainers, add lane="managed".'
            )
        )
