"""The verbs of a pool for one model on all workers: `train`, `fit`, `predict` and `classify`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raypool.channel.records import WorkerInfo
from raypool.engine.engine import Engine
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.options import Options, Where, check_callable

if TYPE_CHECKING:
    from raypool.train.controller import Finish, RankPlaces, TrainingBackend
    from raypool.train.runs import RunOptions, TrainingRun
    from raypool.train.training_options import TrainingOptions


Workers = int | Iterable[int | WorkerInfo] | None
"""How many workers, or which; None for all."""

LANES = ("warm", "managed")

MANAGED_ONLY = ("get_dataset_shard", "ValidationTaskConfig")
"""Names of `ray.train` whose use in a loop requires Ray Train's controller."""


class TrainingVerbs:
    """The verbs of a pool that train one model, or use one, on all workers; part of `PoolView`."""

    _engine: Engine
    _options: Options

    def train(  # noqa: PLR0913 - what is said of a training is said at once, all of it by name
        self,
        loop: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: Workers = None,
        lane: Literal["warm", "managed"] = "warm",
        options: RunOptions | None = None,
        trainer: type | None = None,
        datasets: Mapping[str, Any] | None = None,
        **trainer_args: Any,
    ) -> TrainingRun:
        """Train one model on all workers at once by a loop written for Ray Train; return a future
        of what comes out.

        In the loop Ray Train's functions work: `ray.train.report`, `get_checkpoint`,
        `get_all_reported_checkpoints`, `get_context()` with its ranks, name and `get_storage()`
        (the folder of the run), `get_preemption_info`, `ray.train.collective`,
        `ray.train.torch.prepare_model` and `prepare_data_loader`. Two need Ray Train's controller,
        hence the managed lane: `get_dataset_shard` and `report(validation=...)`. Of metrics what
        rank 0 reports is kept. The pool has the GPUs already, so nothing is asked of Ray. When a
        worker is lost it is replaced on the same GPU, and all ranks begin again from the last
        checkpoint, `retries` times.

        With "threads" and "inline", and inside a task, there is one rank: torch has one default
        group for a process.

        Args:
            loop: A function of one argument, or of none, that every rank calls:
                `train_loop_per_worker` of a `TorchTrainer`.
            config: The argument of the loop.
            workers: Those that train: how many, or which, by number or as they stand in
                `pool.workers`, rank 0 first. None: all.
            lane: "warm": the pool's workers run the loop, by Ray Train's local mode; it begins at
                once. "managed": Ray Train runs it as it is, in processes of its own; it takes some
                seconds to begin, and has Ray Data (`datasets`), other frameworks (`trainer`), and
                all else that Ray's trainers take. The workers' processes end meanwhile, with the
                constants and Composites in them, and what they had goes to Ray Train, which numbers
                its ranks itself; other work for them waits. Afterwards the pool claims the same
                GPUs again. A worker whose GPU somebody else has taken by then, and keeps for
                `start_timeout_s`, is lost; a warning says who has it.
            options: Where checkpoints are kept, how many, and from which one to begin. In the
                managed lane `min_workers` is the least of Ray's elastic number of ranks, too.
            trainer: A trainer of Ray's instead of `TorchTrainer`, `TensorflowTrainer` for one;
                needs the managed lane.
            datasets: Ray Data datasets by name, for `ray.train.get_dataset_shard`; needs the
                managed lane, and a free core.
            **trainer_args: In the managed lane, what else the trainer takes: `torch_config`,
                `dataset_config`, `validation_config`, `run_config` (with `callbacks`,
                `storage_filesystem`, `checkpoint_config`, ...) and `scaling_config`, without what
                the pool says itself: how many ranks there are, and what each gets.

        Returns:
            A `TrainingRun`. Its result is a `TrainingResult`; or it fails with a `TrainingError`
            that names the rank, or with a `TaskTimeoutError` (`pool.options(timeout_s=...)`); both
            have `.result`, what there is all the same.

        Raises:
            ResourceError: There are fewer workers than were asked for, or no core for Ray Data.
            InvalidValueError, InvalidTypeError: An argument cannot work.
            SerializationError: The loop or its configuration cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            Ray 2.60, TorchTrainer, with its local mode as the warm lane.

        Example:
            >>> from raypool import parpool
            >>> def loop(config):
            ...     import ray.train
            ...     for epoch in range(config["epochs"]):
            ...         ray.train.report({"loss": 1 / (epoch + 1)})
            ...     return ray.train.get_context().get_world_size()
            >>> with parpool(1, profile="threads", quiet=True) as pool:
            ...     result = pool.train(loop, {"epochs": 4}).result()
            >>> result.values, result.metrics["loss"], len(result.metrics_frame)
            ([1], 0.25, 4)
        """
        _check_loop(loop)
        if config is not None and not isinstance(config, Mapping):
            raise InvalidTypeError(
                f"config={config!r} is a {type(config).__name__}. Give the loop a dict, or nothing."
            )
        if lane not in LANES:
            raise InvalidValueError(f"lane={lane!r} is neither 'warm' nor 'managed'.")
        if lane == "warm":
            _check_warm({"trainer": trainer, "datasets": datasets}, trainer_args)
            _check_names_in(loop)
        from raypool.train.runs import RunOptions

        kept = RunOptions() if options is None else options
        if not isinstance(kept, RunOptions):
            raise InvalidTypeError(
                f"options={options!r} is a {type(options).__name__}. Give RunOptions(...)."
            )
        engine, crew = self._crew(workers, kept.min_workers)
        given = trainer_args if datasets is None else {"datasets": datasets, **trainer_args}
        made, finish = self._lane(engine, lane, loop, config, kept, trainer, given)
        return self._run(engine, made, crew, kept, self._options.name or _name_of(loop), finish)

    def fit(  # noqa: PLR0913 - as above
        self,
        model: Any,
        data: Any,
        loss: Callable[..., Any],
        options: TrainingOptions | None = None,
        *,
        workers: Workers = None,
        lane: Literal["warm", "managed"] = "warm",
        run_options: RunOptions | None = None,
    ) -> TrainingRun:
        """Train a model on all workers at once, without a loop of one's own; return a future of
        what comes out.

        Each mini-batch is shared out among the ranks, and their gradients are weighted by their
        shares: the result is that of one process with the whole mini-batch.

        Args:
            model: A `torch.nn.Module`, or a function without arguments that makes one. The caller's
                own stays as it is.
            data: (inputs, targets), two arrays or tensors of equal length, each of which may be a
                tuple or dict of several; a DataFrame whose last column is the target; a list of
                samples or a map-style `Dataset`; or a `DataLoader` of one, whose `collate_fn` and
                sampler are used, and whose batch size and shuffling unless `options` say others. A
                sample is a pair (input, target), or a dict as in Hugging Face's data sets, whose
                target is called "labels" or "label". (data, "name") names another target of a
                DataFrame or of dicts, (data, ["name", "name"]) several: columns of one array, or a
                dict. The model gets inputs in a tuple as its arguments in order, in a dict as its
                arguments by name (if it has none of these names, the dict; of samples that are
                dicts an only input itself). Arrays, tables and Python's numbers become the type of
                the model's parameters, and so do 64-bit floats of a `Dataset`; other tensors stay
                as they are.
            loss: A function of outputs and targets: `torch.nn.functional.cross_entropy`, say. It
                returns the mean over its samples; one that weighs them (class weights,
                `ignore_index`) is exact on one worker only, and a warning says so.
            options: How to train; see `TrainingOptions`.
            workers: Those that may train: how many, or which. None: all.
            lane: As for `train`.
            run_options: Where checkpoints are kept; see `RunOptions`.

        Returns:
            A `TrainingRun`. Its result's `model` is the trained model, on the CPU.

        Raises:
            InvalidValueError, InvalidTypeError: An argument cannot work.
            ResourceError: There are too few workers, or none with a GPU where one is asked for.

        Source:
            MATLAB R2025b, trainnet and trainingOptions.

        Example:
            >>> import torch
            >>> from raypool import TrainingOptions, parpool
            >>> x = torch.linspace(-1, 1, 64)[:, None]
            >>> options = TrainingOptions(max_epochs=30, mini_batch_size=16, optimizer="adam", learning_rate=0.1)
            >>> with parpool(1, profile="threads", quiet=True) as pool:
            ...     run = pool.fit(torch.nn.Linear(1, 1), (x, 3 * x), torch.nn.functional.mse_loss, options)
            ...     result = run.result()
            >>> round(result.model.weight.item())
            3
        """
        from raypool.train.fit import prepare_fit
        from raypool.train.runs import RunOptions
        from raypool.train.scaling import Recipe
        from raypool.train.training_options import TrainingOptions

        options = TrainingOptions() if options is None else options
        if not isinstance(options, TrainingOptions):
            raise InvalidTypeError(
                f"options={options!r} is a {type(options).__name__}. Give TrainingOptions(...)."
            )
        kept = RunOptions() if run_options is None else run_options
        engine, candidates = self._candidates(workers)
        call = prepare_fit(model, data, loss, options, candidates)
        if not engine.profile.quiet:
            for note in call.notes:
                sys.stdout.write(f"raypool: {note}\n")
        is_of_all = engine is self._engine and call.ranks == self._numbers()  # replacements will do
        engine, crew = self._crew(len(call.ranks) if is_of_all else call.ranks, kept.min_workers)
        made, _ = self._lane(engine, lane, call.loop, call.config, kept, None, {})
        run = self._run(engine, made, crew, kept, self._options.name or "fit", call.finish)
        run.recipe = Recipe(engine, crew.size, crew.places, call.config)
        return run

    def predict(
        self,
        model: Any,
        data: Any,
        *,
        mini_batch_size: int = 128,
        output: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return what a model makes of data, computed on all workers at once, in the order of the
        data.

        Args:
            model: A `torch.nn.Module`, or a function of a mini-batch. Each worker gets it once, a
                module on its device and in evaluation mode; the caller's stays as it is. (A
                function gets its mini-batches on the CPU.)
            data: A NumPy array, a tensor or a DataFrame, with a row for each sample; a tuple or
                dict of those, if the model has several inputs; a list of samples; or a map-style
                `Dataset`. Of samples that are pairs (input, target) the input is taken; of dicts
                all but "labels" or "label", as the model's arguments by name. A `Dataset` other
                than `TensorDataset` is read by the workers, each with a copy of its own. Numbers of
                floating point become the type of the model's weights.
            mini_batch_size: So many samples go through the model at once. Calls to workers have one
                or, where these take milliseconds, several mini-batches; `timeout_s` and `retries`
                of `options` are for one call.
            output: Called on the worker with what the model gives for a mini-batch; what it returns
                comes back instead. Arrays and lists are put end to end, of anything else the result
                is a list with an entry for each mini-batch.

        Returns:
            The outputs of all samples, in order, on the CPU: tensors; NumPy arrays if `data` is
            arrays or a DataFrame. Tuples and mappings of tensors stay that; a list has an entry for
            each sample.

        Raises:
            InvalidValueError, InvalidTypeError: An argument cannot work.
            Exception: What the model has raised, as itself, with a note of the samples.

        Source:
            MATLAB R2025b, minibatchpredict.

        Example:
            >>> import torch
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.predict(torch.nn.Identity(), torch.arange(5.0), mini_batch_size=2)
            tensor([0., 1., 2., 3., 4.])
        """
        from raypool.train.predict import predict_with

        engine = self._engine_here()
        return predict_with(
            engine,
            self._options,
            self._where(engine),
            model,
            data,
            mini_batch_size=mini_batch_size,
            output=output,
        )

    def classify(
        self,
        model: Any,
        data: Any,
        *,
        labels: Sequence[Any] | None = None,
        mini_batch_size: int = 128,
    ) -> Any:
        """Return the class that a model gives each sample: the number of its largest output.

        Args:
            model: As for `predict`; its output has a column for each class.
            data: As for `predict`.
            labels: What the classes are called, in the order of the columns. None: their numbers.
            mini_batch_size: As for `predict`.

        Returns:
            An array with the number, or the label, of each sample's class.

        Raises:
            InvalidValueError, InvalidTypeError: An argument cannot work, or the output has no
                column for each class.

        Source:
            MATLAB R2025b, minibatchpredict and scores2label.

        Example:
            >>> import torch
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.classify(torch.nn.Identity(), torch.eye(3), labels=["a", "b", "c"])
            array(['a', 'b', 'c'], dtype='<U1')
        """
        from raypool.train.predict import classify_with

        engine = self._engine_here()
        return classify_with(
            engine,
            self._options,
            self._where(engine),
            model,
            data,
            labels=labels,
            mini_batch_size=mini_batch_size,
        )

    # --- implementation ---------------------------------------------------------------------------

    def _ranks(self, workers: Any) -> tuple[Engine, int, tuple[int, ...] | None]:
        raise NotImplementedError

    def _engine_here(self) -> Engine:
        raise NotImplementedError

    def _where(self, engine: Engine) -> Where:
        raise NotImplementedError

    def _numbers(self) -> list[int]:
        raise NotImplementedError

    def _workers(self) -> list[WorkerInfo]:
        raise NotImplementedError

    def _crew(self, workers: Workers, least: int | None) -> tuple[Engine, RankPlaces]:
        """Return the engine of a training, and the places of its ranks."""
        from raypool.train.controller import RankPlaces

        if self._options.fresh_process:
            raise InvalidValueError(
                "fresh_process=True does not go with a training, whose ranks stay together. With"
                " lane='managed' they are new."
            )
        engine, size, places = self._ranks(workers)
        if engine.profile.backend != "ray":
            size = 1
        if least is not None and least > size:
            raise InvalidValueError(
                f"min_workers={least} is more than the {size} workers that train."
            )
        return engine, RankPlaces(
            size, places, self._numbers if engine is self._engine else lambda: (0,), engine
        )

    def _candidates(self, workers: Workers) -> tuple[Engine, list[WorkerInfo]]:
        """Return the workers that may train."""
        engine, size, places = self._ranks(workers)
        if engine is not self._engine:
            return engine, engine.workers()
        by_number = {worker.index: worker for worker in self._workers()}
        numbers = (
            list(by_number) if places is None else [place for place in places if place in by_number]
        )
        return engine, [by_number[number] for number in numbers[:size]]

    def _lane(  # noqa: PLR0913, PLR0917 - it only passes them on
        self,
        engine: Engine,
        lane: str,
        loop: Callable[..., Any],
        config: Mapping[str, Any] | None,
        kept: RunOptions,
        trainer: type | None,
        given: Mapping[str, Any],
    ) -> tuple[TrainingBackend, Finish | None]:
        """Return the backend of the ranks, and a function that completes the result."""
        if lane == "warm":
            from raypool.train.warm import WarmLane

            return WarmLane(engine, loop, config), None
        if engine.profile.backend != "ray":
            raise InvalidValueError(
                'lane="managed" is run by Ray, and this pool is of the kind'
                f' {engine.profile.backend!r}. Use lane="warm", or a pool with profile="local".'
            )
        from raypool.train.managed import ManagedLane

        managed = ManagedLane(engine, loop, config, kept, trainer, given)
        return managed, managed.finish

    def _run(
        self,
        engine: Engine,
        lane: TrainingBackend,
        crew: RankPlaces,
        kept: RunOptions,
        name: str,
        finish: Finish | None = None,
    ) -> TrainingRun:
        from raypool.train.controller import Controller, start_run
        from raypool.train.runs import TrainingRun, run_folder

        run = TrainingRun(name, run_folder(kept, name))
        return start_run(run, Controller(run, lane, crew, self._options, kept, finish), engine)


def _check_loop(loop: Any) -> None:
    """Refuse a loop that Ray Train could not call."""
    check_callable(loop)
    try:
        signature = inspect.signature(loop)
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"The loop {_name_of(loop)} does not say what it takes, as some builtins do not. Give a"
            " function of one argument, or of none."
        ) from None
    for arguments in ((), (None,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return
    raise InvalidTypeError(
        f"The loop {_name_of(loop)}({', '.join(signature.parameters)}) takes more than one"
        " argument. Put what it needs into `config`, a dict, or bind it with functools.partial."
    )


def _check_names_in(loop: Any) -> None:
    """Refuse a loop whose code names functions that need Ray Train's controller."""
    while isinstance(loop, functools.partial):
        loop = loop.func
    function = inspect.unwrap(loop if inspect.isroutine(loop) else type(loop).__call__)
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        if code is None:
            continue
        codes += [each for each in code.co_consts if inspect.iscode(each)]
        for name in MANAGED_ONLY:
            if name in code.co_names:
                raise InvalidValueError(
                    f"The loop {_name_of(loop)} uses ray.train.{name}, which needs Ray Train's"
                    ' controller: lane="managed". With the warm lane a loop reads and validates'
                    " its data itself, with ray.train.torch.prepare_data_loader say."
                )


def _check_warm(given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse arguments that need Ray Train's controller, and unknown ones."""
    if os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() not in ("1", "true"):
        raise InvalidValueError(
            f"RAY_TRAIN_V2_ENABLED={os.environ['RAY_TRAIN_V2_ENABLED']} in the environment chooses"
            " the first version of Ray Train. pool.train needs the second: remove the variable."
        )
    for name, value in given.items():
        if value:
            raise InvalidValueError(
                f'{name}= is for Ray Train\'s controller: give lane="managed" with it.'
            )
    for name in others:
        raise InvalidValueError(
            f"{name}= is no argument of pool.train. If it is one of Ray's trainers, give"
            ' lane="managed" with it.'
        )


def _name_of(loop: Any) -> str:
    return getattr(loop, "__name__", None) or type(loop).__name__
