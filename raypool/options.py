"""Options of work submitted to a pool, and checks of arguments that come with it."""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from raypool.core.model import TaskSpec
from raypool.core.policy import LONGEST_RETRY_DELAY_S
from raypool.errors import (
    POOL_FIRST,
    InvalidTypeError,
    InvalidValueError,
    checked_count,
    optional_count,
    real_number,
    whole_number,
)

GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Where(NamedTuple):
    """The worker in one place now, or any in these places; with neither, any at all."""

    place: int | None = None
    places: tuple[int, ...] | None = None
    is_fresh: bool = False  # in a process of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of work that is submitted through a view of the pool; see `PoolView.options`."""

    retries: int = 2
    retry_on: tuple[type[BaseException], ...] = ()
    retry_delay_s: float = 0.0
    timeout_s: float | None = None
    mismatch_timeout_s: float | None = 600.0
    fresh_process: bool = False
    priority: int = 0
    worker: int | None = None
    name: str | None = None
    checkpoints: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.retries is None:
            raise InvalidTypeError(
                "retries must be an integer, not None. Use 0 to run every item at most once."
            )
        # by object's method, as the class is frozen
        object.__setattr__(self, "retries", checked_count("retries", self.retries, least=0))
        object.__setattr__(self, "worker", optional_count("worker", self.worker, least=0))
        for name in ("timeout_s", "mismatch_timeout_s"):
            object.__setattr__(self, name, checked_seconds(name, getattr(self, name)))
        object.__setattr__(self, "retry_delay_s", _checked_delay(self.retry_delay_s))
        if not isinstance(self.fresh_process, bool):
            raise InvalidTypeError(
                f"fresh_process must be True or False, not {self.fresh_process!r}."
            )
        priority = whole_number(self.priority)
        if priority is None:
            raise InvalidTypeError(f"priority must be an integer, not {self.priority!r}.")
        object.__setattr__(self, "priority", priority)
        check_name(self.name)
        kinds = (self.retry_on,) if isinstance(self.retry_on, type) else self.retry_on
        kinds = tuple(kinds) if isinstance(kinds, Iterable) else (kinds,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise InvalidTypeError(
                "retry_on must be an exception type, or a list or tuple of them, not"
                f" {self.retry_on!r}."
            )
        object.__setattr__(self, "retry_on", kinds)
        object.__setattr__(self, "checkpoints", checked_home(self.checkpoints))

    def spec(self, fn_id: int, where: Where, size: int = 1, fail_fast: bool = True) -> TaskSpec:
        """Return a task with these options for `Driver.submit`, which gives it its number."""
        # by position, as it is made for each call: names would take three times as long
        return TaskSpec(
            -1,
            fn_id,
            size,
            False,
            self.priority,
            self.retries,
            None,
            where.place,
            False,
            where.places,
            fail_fast,
            None,
            self.timeout_s,
            where.is_fresh,
            self.retry_delay_s,
        )


def checked_home(home: Any) -> str | None:
    """Return where checkpoints are kept: the absolute path of a folder, or a URL as it is.

    Raises:
        InvalidTypeError: It is not a string or path.
        InvalidValueError: It is the path of a file, or names no location.

    Example:
        >>> checked_home("gs://bucket/sweep"), checked_home("/data/./sweep")
        ('gs://bucket/sweep', '/data/sweep')
    """
    if home is None:
        return None
    if not isinstance(home, (str, os.PathLike)):
        raise InvalidTypeError(f"checkpoints must be the path of a folder or a URL, not {home!r}.")
    text = os.fspath(home)
    scheme, _, place = text.partition("://")
    if not scheme or ("://" in text and not place.strip("/")):
        raise InvalidValueError(
            f"checkpoints={text!r} is incomplete. Pass the path of a folder, or a URL with a"
            ' bucket: "s3://bucket/sweep".'
        )
    if isinstance(home, str) and "://" in text:
        return text.rstrip("/")
    folder = Path(text).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidValueError(
            f"checkpoints={text!r} is a file. Pass a folder; it need not exist yet."
        )
    return str(folder)


def check_callable(fn: Any, others: Iterable[Any] = ()) -> None:
    """Raise an error if this cannot be called; `others` came after it."""
    if not callable(fn):
        hint = "Pass the function itself, and its arguments after it."
        if isinstance(fn, Executor):
            hint = POOL_FIRST
        elif any(map(callable, others)):
            hint = "The function comes first, and its arguments or items after it."
        raise InvalidTypeError(f"{reprlib.repr(fn)} is not callable. {hint}")
    # quick for plain functions, as this is done for each call
    is_plain = type(fn) is FunctionType and not fn.__code__.co_flags & GENERATOR
    if is_plain or type(fn) is BuiltinFunctionType:
        return
    for code in fn, type(fn).__call__:
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise InvalidTypeError(
                f"{getattr(fn, '__qualname__', fn)!r} has a yield in it: a call runs nothing and"
                " returns a generator, which cannot leave the worker. Return a list, or send"
                " values while it runs with raypool.report or a DataQueue."
            )


def takes(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> bool:
    """Whether a function can be called with these arguments, as far as can be known."""
    try:
        # not what a decorator wraps: it may pass on other arguments
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # of some functions in C nobody knows it
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def check_name(name: Any) -> None:
    """Raise an error unless this is a string or None."""
    if name is not None and not isinstance(name, str):
        raise InvalidTypeError(f"name must be a string, not {name!r}.")


def checked_seconds(name: str, value: Any) -> float | None:
    """Return a time [s] (or None) as Python's number.

    Raises:
        InvalidTypeError: It is not a number.
        InvalidValueError: It is not above zero.
    """
    if value is None:
        return None
    number = real_number(value)
    if number is None:
        raise InvalidTypeError(f"{name}={value!r} is not a number of seconds.")
    if not number > 0:  # not <=, which NaN would pass
        raise InvalidValueError(
            f"{name}={value!r} leaves no time. Use a number above 0, or None for no limit."
        )
    return number


def _checked_delay(value: Any) -> float:
    """Return a delay [s] as Python's number; refuse one below zero or too long."""
    number = real_number(value)
    if number is None:
        raise InvalidTypeError(
            f"retry_delay_s={value!r} is not a number of seconds. Use 0 for no wait."
        )
    if not 0 <= number <= LONGEST_RETRY_DELAY_S:  # refuses NaN too
        raise InvalidValueError(
            f"retry_delay_s={value!r} is not between 0 and {LONGEST_RETRY_DELAY_S:g} s, the longest"
            " possible wait."
        )
    return number


def worker_numbers(workers: Any, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of these workers, which must exist, each once."""
    try:
        named = list(workers)
    except TypeError:
        raise InvalidTypeError(
            "workers must be a list of workers, such as pool.workers[:2], or of their numbers, not"
            f" {workers!r}."
        ) from None
    wanted: list[int] = []
    for worker in named:
        number = whole_number(worker)
        if number is None:  # a `WorkerInfo`, then
            number = whole_number(getattr(worker, "index", None))
        if number is None:
            raise InvalidTypeError(
                f"workers contains {worker!r}, which is neither a worker nor a worker's number."
            )
        if number not in numbers:
            raise InvalidValueError(
                f"There is no worker {number} here, only {', '.join(map(str, numbers)) or 'none'}."
            )
        if number in wanted:
            raise InvalidValueError(f"Worker {number} is listed twice. List each worker once.")
        wanted.append(number)
    return wanted
