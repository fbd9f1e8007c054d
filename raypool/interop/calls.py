"""The calls that the pool of `raypool.interop.multiprocessing` makes on workers."""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, TypeVar

from raypool.counts import whole_number
from raypool.engine.calls import submit_function
from raypool.engine.coroutines import finished
from raypool.engine.engine import Engine
from raypool.errors import InvalidTypeError, InvalidValueError, SerializationError
from raypool.futures import Future
from raypool.gathered import cancel_each
from raypool.interop.async_results import AsyncResult
from raypool.loop import is_serial
from raypool.mapping import unless_interrupted
from raypool.options import check_callable
from raypool.task import retire_process
from raypool.view import PoolView

T = TypeVar("T")


class UnpicklableError(SerializationError, TypeError, AttributeError, RuntimeError):
    """Work cannot be sent to a worker; it names the variable. It is of each type of which the standard pool's error may be."""


@dataclass(frozen=True)
class TaskLimit:
    """After how many tasks of a pool a worker's process is to be replaced; several pools may use the same workers."""

    max_tasks: int
    pool: str

    def count(self) -> None:
        """Count a task that has ended."""
        if next(_tasks[self.pool]) >= self.max_tasks:
            retire_process()


_tasks: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))  # of this process


def task_limit(maxtasksperchild: int | None) -> TaskLimit | None:
    """Return the limit of a new pool.

    Raises:
        InvalidValueError: It is no whole number from 1 on; of whatever type it is, as of the standard pool.
    """
    if maxtasksperchild is None:
        return None
    number = whole_number(maxtasksperchild)
    if number is None or number < 1:
        raise InvalidValueError(f"maxtasksperchild={maxtasksperchild!r} is neither a whole number from 1 on nor None.")
    return TaskLimit(number, uuid.uuid4().hex)


def call(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function once."""
    return func(*args, **kwargs)


def call_each(func: Callable[..., Any], chunk: Iterable[Any]) -> list[Any]:
    """Call the function with each item of a chunk."""
    return [finished(func(item)) for item in chunk]


def call_each_starred(func: Callable[..., Any], chunk: Iterable[Iterable[Any]]) -> list[Any]:
    """Call the function with the arguments in each item of a chunk."""
    return [finished(func(*arguments)) for arguments in chunk]


@dataclass(frozen=True)
class Work:
    """What a worker calls: a user's function, how, and after how many tasks its process is to be replaced."""

    func: Callable[..., Any]
    how: Callable[..., Any]
    limit: TaskLimit | None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.func

    @property
    def bare(self) -> Callable[..., Any]:
        """This, or if it adds nothing the function itself, which may travel by its name alone."""
        return self.func if self.how is call and self.limit is None else self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do it, and count it."""
        try:
            return self.how(self.func, *args, **kwargs)
        finally:
            if self.limit is not None:
                self.limit.count()


def chunks(items: Iterator[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Draw so many items at a time; the last ones may be fewer."""
    while chunk := tuple(itertools.islice(items, size)):
        yield chunk


def check_context(context: Any) -> None:
    """Refuse what is none of `multiprocessing`'s contexts, by which somebody would want to say something."""
    if context is not None and not isinstance(context, BaseContext):
        raise InvalidTypeError(
            f"context={context!r} is no context of multiprocessing. Leave it out: Ray starts the workers, whatever it is."
        )


def waited_for(hand_in: Callable[..., AsyncResult[T]], *arguments: Any) -> T:
    """Return a result that nobody else can get: if handing in or waiting is broken off (Ctrl-C), its calls are cancelled."""
    futures: list[Future[Any]] = []
    try:
        return hand_in(futures, *arguments).get()
    except BaseException:
        cancel_each(futures)
        raise
    finally:
        del futures  # the traceback of the error would hold them


def ready(view: PoolView, work: Work) -> Callable[..., Future[Any]]:
    """Return what hands in calls of this work, which is packed once.

    Raises:
        InvalidTypeError: The function is none.
        UnpicklableError: It cannot be sent; what is returned raises this for an argument.
    """
    return _ready(view, view._engine_here(), work)


def ready_for_many(view: PoolView, work: Work) -> Callable[..., Future[Any]]:
    """Do as `ready` does, for the calls of a map: where they run while they are handed in, Ctrl-C in one of them ends that."""
    engine = view._engine_here()
    submit = _ready(view, engine, work)
    engine.warn_of_generators(work.func)
    return unless_interrupted(submit) if is_serial(engine) else submit


def _ready(view: PoolView, engine: Engine, work: Work) -> Callable[..., Future[Any]]:
    check_callable(work.func)
    try:
        function = engine.function(work.bare)
    except SerializationError as error:
        _raise_unpicklable(error)
    where = view._where(engine)

    def submit(*args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return submit_function(engine, function, args, kwargs, view._options, where)
        except SerializationError as error:
            _raise_unpicklable(error)

    return submit


def _raise_unpicklable(error: SerializationError) -> NoReturn:
    raise UnpicklableError(str(error), what=error.what) from error.__cause__
