"""All errors of raypool, in one tree; reasons of failures; checks of extras and whole numbers.

::

    RaypoolError
    ├── InvalidValueError (+ ValueError)    an argument has an invalid value
    ├── InvalidTypeError  (+ TypeError)     an argument has an invalid type
    ├── ResourceError        more was requested than is available
    ├── StartupError         (+ BrokenExecutor)  a worker did not start
    ├── PoolClosedError      (+ RuntimeError)    used after shutdown
    ├── PoolBrokenError      (+ BrokenExecutor)  no worker is left, and none can be restarted
    │   └── PoolPreemptedError    all nodes are about to be taken back, and no others can come
    ├── QueueClosedError     (+ RuntimeError)    a queue was closed, or read to its end
    ├── JournalError         a run's folder is in use, belongs to another run, or is not writable
    ├── TaskError            a task ended without a value and without an exception of the user's
    │   ├── WorkerLostError       its worker's process or node died
    │   ├── SerializationError    (+ PicklingError)  something could not travel between processes
    │   └── TaskTimeoutError      its time limit was reached and it was stopped
    ├── SpmdError            some ranks of an spmd call failed
    ├── CollectiveError      ranks called different collectives, or some did not take part
    ├── CompositeError       (+ IndexError)      a part of a Composite is missing
    ├── RankInterrupted      a rank of an spmd call was ended because another one failed
    ├── TrainingError        a training has failed
    ├── MissingExtraError    (+ ModuleNotFoundError)  a package of an extra is not installed
    ├── CloudError           a cluster file, job or node request was refused
    └── InternalError        a bug in raypool

`TaskCancelled` is not in the tree: it is raised inside a task that is cancelled while it runs, and
is a `BaseException`, so that ``except Exception`` does not catch it.

Exceptions of the user's own are raised as themselves, never wrapped. `TaskTimeoutError` is
deliberately not a `TimeoutError`, which means that a *wait* ran out while the task continues.

A message states the fact with its numbers, then the likely cause, then the next step. Fields are
keyword-only and survive pickling.
"""

from __future__ import annotations

import bdb
import contextlib
import copyreg
import errno
import functools
import inspect
import itertools
import linecache
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from enum import Enum
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from pickle import PicklingError
from typing import Any, ParamSpec, TypeVar, cast


class LossReason(Enum):
    """Why a worker is gone, as far as can be known."""

    OUT_OF_MEMORY = "out of memory"
    NODE = "node lost"
    EXIT = "process ended"
    PREEMPTED = "node preempted"
    START = "failed to start"
    STOPPED = "stopped"
    FAULTY = "fails every task"
    UNKNOWN = "unknown"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception once, unless its class refuses attributes, as a user's may."""
    with contextlib.suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception; none if its class does not give them, as a user's may."""
    with contextlib.suppress(Exception):
        return [str(note) for note in getattr(error, "__notes__", None) or ()]
    return []


class RaypoolError(Exception):
    """Base of all errors of raypool; catch it to catch them all."""

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self._fields)


def _rebuild(cls: type[RaypoolError], message: str, fields: dict[str, object]) -> RaypoolError:
    return cls(message, **fields)


class InvalidValueError(RaypoolError, ValueError):
    """An argument has an invalid value; raised at the call, before anything happens."""


class InvalidTypeError(RaypoolError, TypeError):
    """An argument has an invalid type; raised at the call, before anything happens."""


class ResourceError(RaypoolError):
    """Too little is available: `.requested`, `.available`, `.holders` (who has the rest)."""

    requested: float
    available: float
    holders: tuple[str, ...] = ()


class StartupError(RaypoolError, BrokenExecutor):
    """A worker did not start in time, or failed its first check; nothing of the pool is left."""


class PoolClosedError(RaypoolError, RuntimeError):
    """The pool was used after `shutdown`: the caller's mistake, unlike `PoolBrokenError`."""


class PoolBrokenError(RaypoolError, BrokenExecutor):
    """No worker is left or can be restarted; every pending future gets this error at once."""


class PoolPreemptedError(PoolBrokenError):
    """All nodes of the pool are about to be taken back, and no others can come.

    Running tasks were notified and could save. When the last one has ended, every unfinished future
    fails with this error, and so does each later call; the same call with the same `run_dir`
    continues on other nodes. `raypool sweep` then exits with status 75: try again later.
    """


class QueueClosedError(RaypoolError, RuntimeError):
    """A `DataQueue` was closed: nothing more can be put into it, and nothing is left to be read."""


class JournalError(RaypoolError):
    """A run's folder (`.run_dir`) is in use, belongs to another run, or cannot be written.

    Also: the storage of a search's study cannot be used.
    """

    run_dir: str


class TaskError(RaypoolError):
    """A task ended without a value, and without an exception that could be brought back."""


class WorkerLostError(TaskError):
    """The worker died in the task, with no retry left: `.reason` (a `LossReason`), `.attempts`."""

    reason: LossReason
    attempts: int


class SerializationError(TaskError, PicklingError):
    """A function, argument, result or exception could not travel; `.what` names the culprit."""

    what: str


class TaskTimeoutError(TaskError):
    """The task's own time limit was reached and the task was stopped."""


class SpmdError(RaypoolError):
    """Some ranks of an spmd call failed: `.failures` maps rank to exception.

    `.first_rank` failed first, and its exception is the `__cause__`. Ranks that were ended because
    of it are not among the failures.
    """

    failures: dict[int, BaseException]
    first_rank: int | None


class CollectiveError(RaypoolError):
    """Ranks called different collectives, or some (`.missing`) did not take part."""

    missing: tuple[int, ...] = ()


class CompositeError(RaypoolError, IndexError):
    """The part of rank `.rank` of a `Composite` is missing: never set, or its worker is gone."""

    rank: int


class RankInterrupted(RaypoolError):
    """A rank of an spmd call was ended because another one had failed, or the time was up.

    `.at_hand` is the operation that it was in (None: none): its name, its number among the
    context's (0: none of these), and the other rank (None: all). `.place` is its line of code.
    """

    at_hand: tuple[str, int, int | None] | None = None
    place: str = ""


class TrainingError(RaypoolError):
    """A training has failed: `.failures` maps rank to exception.

    `.first_rank` failed first, and its exception is the `__cause__`. `.result` is a
    `TrainingResult` with everything reported and the last checkpoint, from which another
    run can resume (`RunOptions(start_from=error.result.checkpoint)`).
    """

    failures: dict[int, BaseException]
    first_rank: int | None = None
    result: Any = None


class CloudError(RaypoolError):
    """A cluster file, a job or a request for nodes was refused."""


class InternalError(RaypoolError):
    """A bug in raypool; report it with `.story`, the last events about the task or worker."""

    story: tuple[str, ...] = ()


class TaskCancelled(BaseException):
    """Raised in a task, anywhere in its Python code, when it is cancelled or its time is up.

    A task may tidy up in a ``finally`` clause. One that catches this and continues is killed with
    its worker after `cancel_grace_s`.
    """


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as text; the `__cause__` of the exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{_with_sources(self.text)}"""'


def _with_sources(text: str) -> str:
    """Add the source lines that only this process has: those of notebook cells."""
    lines = text.splitlines(keepends=True)
    shown = []
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        shown.append(line)
        place = re.match(r'  File "(.+)", line (\d+), in ', line)
        if place is not None and not following.startswith("    "):
            source = linecache.getline(place[1], int(place[2])).strip()
            shown.append(f"    {source}\n" if source else "")
    return "".join(shown)


# --- pickling of exceptions -----------------------------------------------------------------------

IS_HEAP_TYPE = 1 << 9
"""Set in `__flags__` of classes that are not built into Python (Py_TPFLAGS_HEAPTYPE)."""


def reduced(error: BaseException) -> Any:
    """Return what to pickle of an exception (`object.__reduce__`); `NotImplemented`: Python's way.

    Python's way is right for its own classes, and for those that say how they are pickled.
    """
    # Python would call the class with `error.args`: a constructor with other arguments fails then,
    # or makes another text of the one that exists.
    kind = type(error)
    if not kind.__flags__ & IS_HEAP_TYPE or kind in copyreg.dispatch_table:
        return NotImplemented
    for name in ("__reduce__", "__reduce_ex__"):
        # a class of the user's has its own way
        if next(each for each in kind.__mro__ if name in vars(each)).__flags__ & IS_HEAP_TYPE:
            return NotImplemented
    way: Any = error.__reduce__()  # class, arguments and, if there are any, fields
    args, fields = way[1], dict(way[2] or {}) if len(way) > 2 else {}
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]  # as pickle does it
    fields |= {name: getattr(error, name) for name in slots if hasattr(error, name)}
    return (remade, (kind, args), fields) if fields else (remade, (kind, args))


def remade(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an exception of a class without calling the class."""
    base: Any = kind
    while base.__flags__ & IS_HEAP_TYPE:
        base = base.__base__
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)  # it fills the fields that Python's own class has beside `args`
    return error


class Portable:
    """Is pickled as the exception in it, so that the pickle can be opened; see `reduced`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        way = reduced(self._error)
        if way is NotImplemented:
            return self._error.__reduce_ex__(5)
        (kind, args), fields = way[1], way[2:]
        return (
            remade,
            (kind, _portable(args)),
            *({name: _portable(value) for name, value in each.items()} for each in fields),
        )


def _portable(value: Any) -> Any:
    """Return a value with the exceptions in it, such as those of a group, as `Portable`."""
    if isinstance(value, BaseException):
        return Portable(value)
    return type(value)(map(_portable, value)) if type(value) in (list, tuple) else value


# --- reasons of failures --------------------------------------------------------------------------

GPU_OUT_OF_MEMORY = "gpu out of memory"
OUT_OF_MEMORY = LossReason.OUT_OF_MEMORY.value
TIMEOUT = "timeout"
CANCELLED = "cancelled"
ERROR = "error"

REASONS: dict[type[BaseException], str] = {
    TaskTimeoutError: TIMEOUT,
    CancelledError: CANCELLED,
    TaskCancelled: CANCELLED,
    RankInterrupted: LossReason.STOPPED.value,
    PoolPreemptedError: LossReason.PREEMPTED.value,
}
"""The reasons that follow from the type."""

GPU_LIBRARIES = ("torch", "cupy")
"""Their OutOfMemoryError is about a GPU."""

GPU_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_ENOUGH",
)
"""Texts of CUDA's and ROCm's libraries for a GPU without free memory, in other exceptions."""

HOST_WORDS = ("DefaultCPUAllocator: ", "Cannot allocate memory")
"""Texts of torch and the operating system for a machine without free memory."""


def reason_of(error: BaseException) -> str:
    """Return why a task that raised this has failed.

    "gpu out of memory", "out of memory" (of the machine, or by `memory_bytes`), "timeout",
    "cancelled"; a value of `LossReason` for a lost worker ("process ended", "node lost" and so on);
    for anything else "error". A call on several ranks has the reason of the rank that failed first.

    Example:
        >>> reason_of(MemoryError()), reason_of(KeyError("a"))
        ('out of memory', 'error')
        >>> reason_of(RuntimeError("CUDA error: out of memory"))
        'gpu out of memory'
    """
    if isinstance(error, (SpmdError, TrainingError)) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    if isinstance(error, WorkerLostError):
        return error.reason.value
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return reason
    if is_gpu_out_of_memory(error):
        return GPU_OUT_OF_MEMORY
    return OUT_OF_MEMORY if is_out_of_memory(error) else ERROR


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a GPU had no memory left."""
    for kind in type(error).__mro__:  # by name: torch is not imported for this
        if (
            kind.__name__ == "OutOfMemoryError"
            and kind.__module__.partition(".")[0] in GPU_LIBRARIES
        ):
            return True
    return isinstance(error, RuntimeError) and _says(error, GPU_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine had no memory left."""
    if isinstance(error, MemoryError):
        return not is_gpu_out_of_memory(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _says(error, HOST_WORDS)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    try:
        text = str(error)
    except Exception:  # the user's own __str__
        return False
    return any(word in text for word in words)


# --- extras of the package ------------------------------------------------------------------------

PACKAGES = {"jinja2": "Jinja2", "sklearn": "scikit-learn"}
"""The names of modules in pip, where they differ."""


class MissingExtraError(RaypoolError, ModuleNotFoundError):
    """A package of an extra is not installed."""


def check_installed(extra: str, what: str, *modules: str) -> None:
    """Make sure that the modules of an extra are installed; they are not imported.

    Args:
        extra: The extra that brings them.
        what: What needs them.
        modules: Their names.

    Raises:
        MissingExtraError: One is missing; the message says how to get it.

    Example:
        >>> check_installed("plots", "It", "json", "no_such")
        Traceback (most recent call last):
        ...
        raypool.errors.MissingExtraError: It needs no_such, which is not installed: ...
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        names = " and ".join(PACKAGES.get(name, name) for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f'{what} needs {names}, which {verb} not installed: pip install "raypool[{extra}]"',
            name=missing[0],
        )


# --- files --------------------------------------------------------------------------------------


def read_text(path: Path, kind: type[RaypoolError]) -> str:
    """Return the text of a file, or raise an error of this kind."""
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a BOM
    except OSError as error:
        raise kind(f"{path} could not be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not UTF-8: {error}.") from None


# --- whole numbers --------------------------------------------------------------------------------


def whole_number(value: Any) -> int | None:
    """Return a whole number (Python's, NumPy's, any index but a bool) as `int`; else None.

    Example:
        >>> import numpy as np
        >>> whole_number(np.int64(3)), whole_number(True), whole_number(3.0), whole_number("3")
        (3, None, None, None)
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    # torch takes bools and [3] for an index
    if isinstance(value, bool) or str(dtype).endswith("bool") or shape != ():
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real_number(value: Any) -> float | None:
    """Return a number (Python's, NumPy's, any real one but a bool) as `int` or `float`; else None.

    Example:
        >>> import numpy as np
        >>> real_number(np.float32(0.5)), real_number(np.int64(3)), real_number(True)
        (0.5, 3, None)
    """
    number = whole_number(value)
    if number is not None or isinstance(value, bool) or not isinstance(value, Real):
        return number
    return float(value)


def checked_count(name: str, value: Any, least: int) -> int:
    """Return a count as Python's `int`.

    Raises:
        InvalidTypeError: It is not a whole number.
        InvalidValueError: It is less than `least`.
    """
    number = whole_number(value)
    if number is None:
        raise InvalidTypeError(f"{name} must be an integer, not {value!r}.")
    if number < least:
        raise InvalidValueError(f"{name} must be at least {least}, not {number}.")
    return number


def optional_count(name: str, value: Any, least: int) -> int | None:
    """Return a count as Python's `int`, or None for None; see `checked_count`."""
    return None if value is None else checked_count(name, value, least)


# --- tracebacks -----------------------------------------------------------------------------------

SAYING_ALL = (InvalidValueError, InvalidTypeError, ResourceError, StartupError, CloudError)
"""Errors whose text says everything."""

# `raypool replay --debug` runs a function in bdb
OWN_FILES = (str(Path(__file__).parent), bdb.__file__)

P = ParamSpec("P")
T = TypeVar("T")


def without_own_frames(fn: Callable[P, T]) -> Callable[P, T]:
    """Leave raypool's own lines out of the tracebacks of such errors."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # notebooks and pytest: only the user's own line
        try:
            return fn(*args, **kwargs)
        except SAYING_ALL as error:
            raise error.with_traceback(None)  # noqa: B904 - it keeps its cause

    return call


def told(error: BaseException) -> str:
    """Return the type and text of an exception, as they appear in the table of results."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the user's own __str__
        return type(error).__name__


def traceback_text(error: BaseException) -> str:
    """Return a traceback as text, from the first line that is not raypool's own."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:  # also in its causes
        users = itertools.dropwhile(lambda frame: frame.filename.startswith(OWN_FILES), part.stack)
        part.stack[:] = list(users) or part.stack
        part = part.__cause__ or part.__context__
    return "".join(whole.format())


# --- what was meant ------------------------------------------------------------------------------

MAX_NAMES = 40
"""With more names than this, an error lists none of them."""

POOL_FIRST = "The pool comes before the dot: pool.parfor(fn, items), pool.parfeval(fn, x)."


def did_you_mean(given: str, known: Iterable[str], places: Mapping[str, Iterable[str]] = {}) -> str:
    """Return the sentence of an error about an unknown name: names that resemble it, or all names.

    Args:
        given: What the user typed.
        known: The names that there are.
        places: Calls that have further names, such as "pool.options".

    Example:
        >>> did_you_mean("timeout", ["retries", "timeout_s"])
        ' Did you mean timeout_s?'
        >>> did_you_mean("retries", ["seed"], {"pool.options": ["retries"]})
        ' Did you mean pool.options(retries=...)?'
        >>> did_you_mean("x", ["retries", "timeout_s"])
        ' Choose from: retries, timeout_s.'
        >>> did_you_mean("autodelete", ["autoDelete"])
        ' Did you mean autoDelete?'
    """
    import difflib  # imported late: most programs never need them

    from raypool.equivalents import ARGUMENTS

    names = {name.lower(): name for name in known}
    meant = [given, *ARGUMENTS.get(given.lower(), ())]
    near = [names.get(name, name) for name in meant if name.partition("=")[0] in names][:2]
    there = {name: place for place, others in reversed([*places.items()]) for name in others}
    elsewhere = [name for name in meant if name in there]
    if not near and not elsewhere:
        near = [names[name] for name in difflib.get_close_matches(given.lower(), names, 2)]
        elsewhere = [] if near else difflib.get_close_matches(given, there, 1)
    near += [f"{there[name]}({name}=...)" for name in elsewhere[:1]]
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" Choose from: {', '.join(names.values())}." if 0 < len(names) <= MAX_NAMES else ""


def attribute_hint(name: str) -> str:
    """Return a sentence with the counterpart of a name from MATLAB or another library, else "".

    Example:
        >>> attribute_hint("fetchNext")
        ' In raypool, use fetch_next(fs).'
    """
    from raypool.equivalents import MATLAB, METHODS

    here = MATLAB.get(name) or METHODS.get(name)
    if here is None:
        return ""
    where = " in a function that pool.spmd calls" if here.startswith("context") else ""
    return f" In raypool, use {here}{where}."


def no_such_attribute(self: object, name: str) -> Any:
    """Raise an error that names raypool's counterpart; for use as `__getattr__` of a class."""
    if hint := attribute_hint(name):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")
    return object.__getattribute__(self, name)  # Python's own error, or that of a property


F = TypeVar("F", bound=Callable[..., Any])


def explains_calls(
    verb: F,
    places: Callable[[], Mapping[str, Iterable[str]]] = dict,
    check: Callable[..., object] | None = None,
) -> F:
    """Let a function or class say what was meant when it is called with wrong arguments.

    Calls that Python accepts are not looked at.

    Args:
        verb: The function or class.
        places: Returns the `places` of `did_you_mean`.
        check: Takes the same arguments, and may raise an error that says more.
    """
    if isinstance(verb, type):
        verb.__init__ = explains_calls(verb.__init__)  # type: ignore[misc]
        return verb

    @functools.wraps(verb)
    def explained(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return verb(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from within
        if check is not None:
            check(*args, **kwargs)
        raise InvalidTypeError(_wrong_call(verb, args, kwargs, places()))

    return cast("F", explained)


def _wrong_call(
    verb: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[str, Iterable[str]],
) -> str:
    signature = inspect.signature(verb)
    parameters = {name: each for name, each in signature.parameters.items() if name != "self"}
    title = verb.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    for name in kwargs:
        if name not in parameters:
            # "options=TrainingOptions" is for verbs that have options
            near = {
                place: names
                for place, names in places.items()
                if "=" not in place or place.partition("=")[0] in parameters
            }
            return f"{title}() has no argument {name!r}.{did_you_mean(name, parameters, near)}"
    by_position = [name for name, each in parameters.items() if each.kind < each.VAR_POSITIONAL]
    rest = "; pass the others by name" if len(by_position) < len(parameters) else ""
    fact = (
        f"Positional arguments: {', '.join(by_position)}{rest}."
        if by_position
        else "Pass all arguments by name."
    )
    if any(isinstance(each, Executor) for each in args[1:]):
        fact = POOL_FIRST
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fact = f"{error}. {fact}"
    return f"{title}(): {fact}"
