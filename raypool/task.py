"""What a function can do in a task: `current_task`, `report`, checkpoints, `MetricBuffer`."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    checked_count,
    explains_calls,
)
from raypool.worker.running import (
    TaskContext,
    in_task,
    item_seed,
    note_here,
    notes_here,
    secure_reports,
    uninterruptible,
)

if TYPE_CHECKING:
    import torch

    from raypool.channel.store import ValueStore


@dataclass(frozen=True, slots=True)
class CurrentTask:
    """The running task: its item, attempt, seed and worker.

    Attributes:
        index: The item's number in its loop, from 0; 0 for a single call.
        attempt: The number of this attempt at the item, from 1; above 1 only after a worker was
            lost or with `retry_on`.
        seed: The item's own 64-bit seed if the loop has one; the same on any number of workers.
        worker: The worker's number in its pool, from 0.
        gpu: The GPU's index on its machine, None without one.
        name: The caller's name for the work, None if there is none.
    """

    index: int = 0
    attempt: int = 1
    seed: int | None = None
    worker: int = 0
    gpu: int | None = None
    name: str | None = None
    _note: TaskContext | None = field(default=None, repr=False, compare=False)

    @property
    def should_stop(self) -> bool:
        """Whether to end early: after `request_stop`, or before the machine is taken back.

        After `future.request_stop()` the value that you return counts. Before the machine is taken
        back it does not: the item runs again elsewhere, which does not count as a retry, and
        resumes from its `checkpoint_dir` if other machines see that (`run_dir=`,
        `options(checkpoints=...)`). This applies to items that have read this property since the
        notice; others that end are finished.

        Reading it costs next to nothing. In a loop of `pool.train` it becomes true for all ranks at
        once, at a `ray.train.report`, so that none continues without the others. An item that may
        run only once (`retries=0`) is not notified that its machine is to be taken back.
        """
        note = self._note
        if note is None:
            return False
        is_asked = (
            (note.should_stop or note.is_leaving) if note.agreed_stop is None else note.agreed_stop
        )
        if is_asked and note.is_leaving:
            note.has_heard = True
        return is_asked

    def on_preempt(self, fn: Callable[[], object]) -> None:
        """Register a function to be called once, before this machine is taken back (spot
        preemption).

        For code whose loop cannot check `should_stop`: save a checkpoint, or let the loop end. It
        is called in the thread of the task, between two lines of Python, as a signal's handler is
        (never in the midst of `save_checkpoint` or of an import); so it may find a model in the
        middle of an optimizer's step. Time is short: about 20 seconds on Compute Engine, two
        minutes on EC2. An exception in it is printed and otherwise ignored. Afterwards the item
        runs again elsewhere, whatever it returns; that does not count as a retry.

        If the notice has already arrived, the function is called at once. It is never called
        without a pool, with "threads" or "inline", or with `retries=0`.

        Args:
            fn: Takes no arguments.

        Raises:
            InvalidTypeError: It can't be called.

        Source:
            Python's `signal.signal`, for what may be done in a handler.

        Example:
            >>> import time
            >>> from raypool import current_task, parpool, save_checkpoint
            >>> def train(steps):
            ...     state = {"step": 0}
            ...     current_task().on_preempt(lambda: save_checkpoint(state))
            ...     for state["step"] in range(steps):
            ...         time.sleep(0.01)
            ...     return state["step"]
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     pool.parfeval(train, 3).result()
            2
        """
        if not callable(fn):
            raise InvalidTypeError(
                f"on_preempt got a {type(fn).__name__}, which can't be called. Pass it a function."
            )
        note = self._note
        if note is not None:
            # without those of earlier items of this call
            note.on_leave = [
                *(each for each in note.on_leave if each[0] == note.index),
                (note.index, fn),
            ]
            if note.is_leaving:
                note.leave()

    @property
    def store(self) -> ValueStore:
        """The values that all tasks of the pool share; outside a pool, a store of this process.

        Raises:
            InvalidValueError: This is a rank of a training with lane="managed", which has none.
        """
        from raypool.channel.store import store_here

        return store_here()

    @property
    def checkpoint_dir(self) -> Path:
        """The item's own folder for checkpoints, which exists: the next attempt finds its files.

        In a loop with a `run_dir` it is in that folder, and stays; with `options(checkpoints=...)`
        it is at that location. If that is a URL, this is a local copy, which `save_checkpoint` and
        the end of the item upload. Without either it is a temporary folder of the machine, deleted
        with the pool; outside a pool, one of this process.

        Raises:
            InvalidValueError: The `run_dir` (or `checkpoints=...`) is a folder that this machine
                does not share with the one that opened the pool.
        """
        from raypool.worker.folders import folder_of_process

        note = self._note
        return (
            folder_of_process()
            if note is None or note.folders is None
            else note.folders.folder(note, self.index)
        )

    @property
    def device(self) -> torch.device:
        """The `torch.device` to train on: the worker's GPU if CUDA can use it, else the CPU."""
        import torch

        if (self.gpu is not None or not in_task()) and torch.cuda.is_available():
            # Ray Train shows a rank all GPUs of a training
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def current_task() -> CurrentTask:
    """Return the task that is running here.

    Outside a pool this is item 0, attempt 1, on the best device of this machine, so that a function
    runs unchanged by itself.

    Example:
        >>> current_task().index, current_task().attempt
        (0, 1)
    """
    note = note_here()
    if note is None:
        return CurrentTask()
    seed = None if note.seed is None else item_seed(note.seed, note.index)
    return CurrentTask(note.index, note.attempt, seed, note.worker, note.gpu, note.name, note)


# --- metrics --------------------------------------------------------------------------------------


NUMBERS = frozenset({int, float, bool, type(None)})
"""Types of metrics that need no closer look."""

MAX_METRIC_TEXT = 256
"""The most characters of a metric that is a text: it goes into a table, not into a log."""


MAX_INT = 2**1023
"""Integers from here on are refused: none is a float, and the longest cannot be written as text."""


def report(**metrics: float | str | None) -> None:
    """Report metrics of the task: values by name, as often as you like.

    A moment later they appear in the table `metrics` of the task's future, or of the loop's
    `Results`; the display of a loop shows the last ones. A call takes a few microseconds and never
    waits. Outside a pool, and in the forked processes of a DataLoader, it only checks the values,
    so that a function runs unchanged by itself.

    Args:
        metrics: Numbers (Python's or NumPy's) and short strings (at most 256 characters), in your
            own units. None is a missing value.

    Raises:
        InvalidTypeError: A value is neither. A tensor: pass it to a `MetricBuffer`, or report
            `tensor.item()`, which waits for the GPU.
        InvalidValueError: A string is too long, or an integer of more than 1,023 bits.

    Source:
        Ray 2.60, ray.train.report, without its barrier over the workers.

    Example:
        >>> from raypool import parpool
        >>> def train(epochs):
        ...     for epoch in range(epochs):
        ...         report(epoch=epoch, loss=1 / (epoch + 1))
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     future = pool.parfeval(train, 2)
        >>> future.metrics[["epoch", "loss"]].to_dict("list")
        {'epoch': [0, 1], 'loss': [1.0, 0.5]}
    """
    value: Any
    for value in metrics.values():
        kind = type(value)
        if kind not in NUMBERS or (kind is int and not -MAX_INT < value < MAX_INT):
            metrics = {name: checked_metric(name, value) for name, value in metrics.items()}
            break
    report_of(time(), metrics)


def report_of(moment: float, metrics: Mapping[str, float | str | None]) -> None:
    """Report checked metrics of some moment [Unix time, s]."""
    note = next(notes_here(), None)
    if note is not None:
        note.say(note, "metrics", (moment, metrics))


def checked_metric(name: str, value: Any) -> float | str | None:
    """Return a metric as a plain number or text, or None for a missing value."""
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > MAX_METRIC_TEXT:
            raise InvalidValueError(
                f"report({name}=...) got a string of {len(value):,} characters, but at most"
                f" {MAX_METRIC_TEXT} fit. print() it instead."
            )
        return str.__str__(value)  # NumPy's texts become plain ones, as numbers below
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        if not -MAX_INT < value < MAX_INT:
            raise InvalidValueError(
                f"report({name}=...) got an integer of {value.bit_length():,} bits, but at most"
                " 1,023 fit. Report its logarithm, or print() it instead."
            )
        return value if isinstance(value, bool) else int(value)
    # who has not imported NumPy or torch has no values of theirs
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and isinstance(value, (numpy.generic, numpy.ndarray))
        and value.ndim == 0
        and value.dtype.kind in "biuf"
    ):
        # the item() of a longdouble is one again
        return float(value) if value.dtype.kind == "f" else value.item()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        step = (
            f"Pass it to a raypool.MetricBuffer, or report {name}.item(), which waits for the GPU."
        )
    else:
        step = "Report single numbers or short strings."
    raise InvalidTypeError(
        f"report({name}=...) got a {type(value).__name__}, which is neither a number nor a string."
        f" {step}"
    )


# --- checkpoint files -----------------------------------------------------------------------------


FILE = "checkpoint.pt"

PathLike = str | os.PathLike[str]


@explains_calls
def save_checkpoint(state: Any, path: PathLike | None = None) -> Path:
    """Save a state with `torch.save`, atomically: the old file stays until the new one is complete.

    A task that is cancelled meanwhile ends after saving. Earlier reports are sent first, so that
    they survive a crash of this process, too.

    Args:
        state: Values that `torch.load(weights_only=True)` accepts: tensors, numbers, strings, and
            lists and dicts of those, such as any `state_dict()`. Anything else is refused here, not
            when it is needed.
        path: The file; None: "checkpoint.pt" in the task's `current_task().checkpoint_dir`.

    Returns:
        The file.

    Raises:
        InvalidTypeError: `state` contains something else. The old file stays.
        OSError: It cannot be written (a full disk, say). The old file stays.

    Source:
        torch.save, torch.load; the order of temporary file, fsync and rename is that of LWN 457667,
        "Ensuring data reaches disk".

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = save_checkpoint({"epoch": 3}, folder + "/model.pt")
        ...     load_checkpoint(file)
        {'epoch': 3}
    """
    file = current_task().checkpoint_dir / FILE if path is None else Path(path)
    note = note_here()
    secure_reports()
    with uninterruptible(note):
        _write(state, file)
        if path is None and note is not None and note.folders is not None:
            note.folders.upload(note, note.index)
    return file


@explains_calls
def load_checkpoint(path: PathLike | None = None, map_location: Any = "cpu") -> Any:
    """Return the state saved with `save_checkpoint`; None if there is no such file.

    Nothing in the file is executed: it is read with `weights_only=True`.

    Args:
        path: The file; None: "checkpoint.pt" in the task's `current_task().checkpoint_dir`.
        map_location: The device of its tensors; see `torch.load`.

    Raises:
        InvalidValueError: The file is damaged, or contains something that is not loaded for safety.
    """
    import torch

    file = current_task().checkpoint_dir / FILE if path is None else Path(path)
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):  # no fault of the file's
        raise
    except Exception as error:  # whatever a damaged file makes torch do
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL " in str(error):
            raise InvalidValueError(
                f"The checkpoint {file} contains more than tensors, numbers, strings, and lists and"
                f" dicts of those ({forbidden(error)}): save_checkpoint did not write it, and"
                " loading it could run code. If you trust its author: torch.load(file,"
                " weights_only=False)."
            ) from error
        if "map_location" in str(error):  # it was saved on a device that is not here
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".") or "it ends too early"
        raise InvalidValueError(
            f"The checkpoint {file} ({file.stat().st_size:,} bytes) is damaged, or was not written"
            f" by torch: {reason}. Delete it to start over, or replace it with a complete copy."
        ) from error


def _write(state: Any, file: Path) -> None:
    """Write a complete file, or leave the old one unchanged."""
    from raypool.worker.folders import sync_folder

    # beside the file: a rename does not cross file systems
    spare = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        descriptor = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            _dump(state, stream, file)
            stream.flush()
            os.fsync(descriptor)  # before the rename: else a crash may leave an empty file
        _check_loads(spare, file)
        spare.replace(file)
    except BaseException:
        spare.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)  # so that the rename is on the disk, too


class _Watched:
    """A stream that remembers why it could not be written: torch raises a bare RuntimeError."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write something."""
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Write buffered data."""
        self._stream.flush()


def _dump(state: Any, stream: IO[bytes], file: Path) -> None:
    import torch

    watched = _Watched(stream)
    try:
        # it only writes and flushes
        torch.save(state, watched)  # type: ignore[arg-type]
    except RuntimeError:
        if watched.error is not None:
            raise watched.error from None
        raise
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidTypeError(
            f"The checkpoint {file} cannot be saved: {error}. Save state_dict(), tensors, numbers"
            " and strings."
        ) from error


def _check_loads(spare: Path, file: Path) -> None:
    """Make sure that `load_checkpoint` will take a file."""
    import torch

    try:
        # on "meta", mapped: the tensors are not read
        torch.load(spare, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InvalidTypeError(
            f"The checkpoint {file} was not saved: it contains an object ({forbidden(error)}) that"
            " load_checkpoint refuses, because loading it could run code. Save only tensors,"
            " numbers and strings, in lists and dicts: float(x) for a NumPy number,"
            " torch.from_numpy(x) for an array, state_dict() for a model."
        ) from error


def forbidden(error: Exception) -> str:
    """Return the name of the object that torch refuses to load for safety."""
    words = str(error).split()
    return words[words.index("GLOBAL") + 1].strip(".,") if "GLOBAL" in words else "of unknown type"


# --- metrics on the GPU ---------------------------------------------------------------------------


Place = tuple[int, str]
"""Where a tensor's value belongs: the number of its step, and its name."""


class MetricBuffer:
    """Collects the metrics of each step on their device, and reports many steps at once.

    `report(loss=loss.item())` in each step makes CPU and GPU wait for each other. A buffer takes
    the tensor itself, and neither waits. When it is full, the values of all its steps go to the CPU
    in one transfer (for each dtype and device), and each step is reported by itself, with the time
    at which it was added. The numbers are those of `.item()`.

    Use it as a context manager, which flushes at its end: otherwise the last steps are not
    reported. Outside a pool there is no receiver; `flush` returns the reports.

    Args:
        size: It flushes by itself after this many steps, so the display of a running task is at
            most this many steps old.

    Raises:
        InvalidTypeError, InvalidValueError: `size` is not a count of at least 1.

    Source:
        Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 6.7 (GPUs), side notes, and its
        exercise 3: a log that is kept on the GPU, and moved as a whole.

    Example:
        >>> import torch
        >>> from raypool import parpool
        >>> def train(steps):
        ...     with MetricBuffer() as metrics:
        ...         for step in range(steps):
        ...             loss = torch.ones(()) / (step + 1)
        ...             metrics.add(step=step, loss=loss)
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     future = pool.parfeval(train, 2)
        >>> future.metrics[["step", "loss"]].to_dict("list")
        {'step': [0, 1], 'loss': [1.0, 0.5]}
    """

    def __init__(self, size: int = 100) -> None:
        self._size = checked_count("size", size, least=1)
        self._steps: list[tuple[float, dict[str, Any]]] = []
        self._tensors: defaultdict[
            tuple[torch.device, torch.dtype], list[tuple[Place, torch.Tensor]]
        ] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, **metrics: Any) -> None:
        """Take the metrics of a step, as they are now.

        Args:
            metrics: Tensors of one element, on any device, or values that `report` takes.

        Raises:
            InvalidTypeError: A value is neither.
            InvalidValueError: A string is too long, or an integer of more than 1,023 bits.
        """
        torch = sys.modules.get("torch")  # who has not imported it has no tensors
        tensors = {
            name: value
            for name, value in metrics.items()
            if torch is not None and isinstance(value, torch.Tensor)
        }
        for name, tensor in tensors.items():
            if tensor.numel() != 1 or tensor.is_complex():
                kind = (
                    "complex"
                    if tensor.is_complex()
                    else f"of {tensor.numel():,} elements, shape {tuple(tensor.shape)}"
                )
                raise InvalidTypeError(
                    f"add({name}=...) got a tensor that is {kind}. Add single numbers: its mean(),"
                    " its norm(), or each by its own name."
                )
        # a tensor leaves a gap, so that the metrics of the step stay in their order
        step = {
            name: None if name in tensors else checked_metric(name, value)
            for name, value in metrics.items()
        }
        number = len(self._steps)
        self._steps.append((time(), step))  # first: `flush` fails on a tensor without a step
        for name, tensor in tensors.items():
            # a copy, also on the device: `total += loss` in the next step must not change this one
            value = tensor.detach().reshape(()).clone()
            self._tensors[value.device, value.dtype].append(((number, name), value))
        if len(self._steps) >= self._size:
            self.flush()

    def flush(self) -> list[dict[str, float | str | None]]:
        """Report all buffered steps; return them, one dict each, the oldest first."""
        import torch

        with uninterruptible(note_here()):
            steps, tensors = self._steps, self._tensors
            # emptied first: what fails below is not tried again
            self._steps, self._tensors = [], defaultdict(list)
            for entries in tensors.values():
                values = torch.stack([value for _, value in entries]).tolist()
                for ((number, name), _), value in zip(entries, values, strict=True):
                    steps[number][1][name] = value
            for moment, step in steps:
                report_of(moment, step)
        return [step for _, step in steps]

    def __enter__(self) -> MetricBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the last steps matter most, but a GPU that has failed gives nothing more.
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.flush()
