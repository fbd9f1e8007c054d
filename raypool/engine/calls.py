"""A single call of a function on a worker: how it is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from raypool.channel.records import Function
from raypool.core.model import TaskSpec
from raypool.engine.engine import Engine
from raypool.engine.work import CallWork
from raypool.errors import SerializationError
from raypool.futures import Future
from raypool.options import Options

T = TypeVar("T")


class Where(NamedTuple):
    """Where a call may run: on the worker that is in this place now, or in any of these; anywhere, if neither is said."""

    place: int | None = None
    places: tuple[int, ...] | None = None
    is_fresh: bool = False  # in a process of its own


def submit_call(
    engine: Engine, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, where: Where
) -> Future[T]:
    """Hand in a call; return its future.

    Raises:
        SerializationError: The function or an argument cannot be sent; it names the variable.
        PoolClosedError: The pool was shut down.
    """
    work = _call_work(engine, engine.function(fn), args, kwargs, options)
    if options.checkpoints is not None:
        from raypool.journal.keys import content_key  # which those who keep nothing need not wait for

        key = content_key((fn, args, kwargs), f"the call of {work.function.name}")
        work.checkpoints = str(options.checkpoints), (f"calls/{key}/checkpoint",)
    return _hand_in(engine, work, options, where)


def submit_function(
    engine: Engine, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, where: Where
) -> Future[Any]:
    """Hand in a call of a function that was made ready before: for many calls of one that is large.

    Raises:
        SerializationError: An argument cannot be sent; it names the variable.
        PoolClosedError: The pool was shut down.
    """
    return _hand_in(engine, _call_work(engine, function, args, kwargs, options), options, where)


def _call_work(engine: Engine, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> CallWork:
    call = _packed_call(engine, function.name, args, kwargs)
    return CallWork(function, call, Future(options.name or function.name), options.retry_on)


def _hand_in(engine: Engine, work: CallWork, options: Options, where: Where) -> Future[Any]:
    future, function = work.future, work.function
    driver = engine.driver

    def make_spec(task_id: int) -> TaskSpec:
        future.task_id, future.on_ask, future.owners = task_id, driver.ask_call, driver.as_owner
        return TaskSpec(
            task_id,
            function.fn_id,
            priority=options.priority,
            retries=options.retries,
            place=where.place,
            places=where.places,
            timeout_s=options.timeout_s,
            is_fresh=where.is_fresh,
            retry_delay_s=options.retry_delay_s,
            fail_fast=True,
        )

    driver.submit(work, make_spec)
    return future


def _packed_call(engine: Engine, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pack = engine.backend.pack
    try:
        return pack([(args, kwargs)], f"the arguments of {name}")
    except SerializationError:
        for key, value in [*enumerate(args), *kwargs.items()]:
            pack(value, f"argument {key!r} of {name}")  # raises the error that names it
        raise
