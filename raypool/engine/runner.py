"""Runs the slices of a call: user code is called here and nowhere else, in every backend."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.captured import Generator, generators_of
from raypool.engine import diary
from raypool.engine.backend import Part, WorkerInfo
from raypool.engine.checkpoint_folders import CheckpointFolders
from raypool.engine.coroutines import finished
from raypool.engine.early import Early
from raypool.engine.guard import NOW, Guard, Terminated
from raypool.engine.open_call import OpenCall, RawResult
from raypool.engine.sharing import Turns
from raypool.engine.torch_modes import torch_modes
from raypool.engine.upkeep import Upkeep, note_shortage
from raypool.errors import TaskCancelled, TaskError
from raypool.task import Running, Say, is_retired, item_seed, running, unbroken

if TYPE_CHECKING:
    from raypool.engine.packing import ParcelKeeper  # which imports Ray

UNCHANGEABLE = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose values stay what they are."""

CALL_LIMIT_S = 0.2
"""A call that was meant to be short hands back what it has not begun after this time [s]: others may be free by now."""


class Surroundings(NamedTuple):
    """What a worker has to run slices with.

    `functions` finds a function by its id, `unpack` opens the items of a part. `guard` stops a slice that somebody cancels. `say`
    takes what a task reports and prints. `keeper` has the values until they travel (None: they stay here). `find_way` finds the
    pool's exchange if that is in this process. `folders` gives items their folders for checkpoints. `upkeep` watches over the
    memory of the worker's GPU, if it has one. `turns` lets items wait for their turn on that GPU, where workers take turns.
    `is_users_thread`: a `KeyboardInterrupt` in here is Ctrl-C; in a worker's thread or process it is an error like any other.
    `early` tells what is done of a call that lasts.
    """

    worker: WorkerInfo
    functions: Callable[[int], Callable[..., Any]]
    unpack: Callable[[Any], list[Any]]
    guard: Guard
    say: Say
    keeper: ParcelKeeper | None = None
    find_way: Callable[[], Any] | None = None
    folders: CheckpointFolders | None = None
    upkeep: Upkeep | None = None
    turns: Turns | None = None
    is_users_thread: bool = False
    early: Early | None = None

    def is_interrupt(self, error: BaseException) -> bool:
        """Whether this is Ctrl-C."""
        return self.is_users_thread and isinstance(error, KeyboardInterrupt)


def run_parts(attempt_id: int, parts: Sequence[Part], here: Surroundings) -> list[RawResult]:
    """Run the slices of a call one after the other.

    Every exception becomes an error of its item. Of a slice that was cancelled nothing counts as done.
    """
    here.guard.begin_call(attempt_id)
    call = OpenCall(attempt_id, parts, here.upkeep)
    if here.early is None or parts[0].is_rank:
        return _run_all(call, parts, here)
    here.early.begin(call)
    try:
        return _run_all(call, parts, here)
    finally:
        here.early.end(call)


def _run_all(call: OpenCall, parts: Sequence[Part], here: Surroundings) -> list[RawResult]:
    deadline = perf_counter() + CALL_LIMIT_S
    for number, part in enumerate(parts):
        result = RawResult(part.start)
        if not part.is_fixed:
            result.deadline = deadline
        has_time = (perf_counter() < deadline and not is_retired()) or number == 0
        if not call.begin(result) or not has_time:
            continue
        if here.upkeep is None:
            _run_part(call.attempt_id, part, here, result)
        else:
            here.upkeep.begin()
            _run_part(call.attempt_id, part, here, result)
            result.peak_memory_bytes = here.upkeep.peak()
        if result.is_interrupted:
            deadline = -inf
    return call.results


def _run_part(attempt_id: int, part: Part, here: Surroundings, result: RawResult) -> None:
    if here.keeper is not None and not here.keeper.secure():
        return
    try:
        here.guard.approach(part.task_id)
    except TaskCancelled:
        here.guard.end()
        return
    try:
        fn = here.functions(part.fn_id)
        items = here.unpack(part.items)
    except BaseException as error:
        here.guard.end()
        # What was sent can't be opened here (a module that is missing, say): so much for all its items.
        note_shortage(error, here.upkeep)
        result.is_interrupted = here.is_interrupt(error)
        result.errors = dict.fromkeys(range(part.start, part.start + part.num_items), as_error(error))
        result.values = [None] * part.num_items
        result.durations_s = array("d", bytes(8 * part.num_items))
        result.started_at = time()
        result.done = part.num_items
        return
    worker = here.worker
    note = Running(part.start, part.attempt, part.seed, worker.index, worker.gpu, part.name, part.task_id, part.should_stop)
    note.say, note.find_way, note.outer = here.say, here.find_way, running.get()
    note.shelter, note.folders, note.call_id = here.guard, here.folders, attempt_id
    own = generators_of(fn) if part.seed is not None else []
    if part.is_call:
        fn = _as_calls(fn)
    if part.checkpoints is not None and here.folders is not None:
        home, names = part.checkpoints
        note.checkpoints = home, dict(zip(_numbers(part), names, strict=True))
        fn = _with_folders(fn, note, here.folders)
    token, modes = running.set(note), torch_modes()
    streams = diary.streams()
    try:
        with _generators_kept(own) if part.seed is not None else contextlib.nullcontext():
            try:
                here.guard.begin(note, result)
                if here.turns is not None:
                    here.turns.begin(part)
                _run_items(fn, items, own, part, here, result)
            finally:
                here.guard.end()
                if here.turns is not None:
                    here.turns.end()
    except TaskCancelled:
        result.discard()
    finally:
        running.reset(token)
        diary.mend(streams)
        if result.is_cancelled:
            modes.put_back()


def _as_calls(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda call: finished(fn(*call[0], **call[1]))


def _numbers(part: Part) -> Sequence[int]:
    return range(part.start, part.start + part.num_items) if part.numbers is None else part.numbers


def _with_folders(fn: Callable[[Any], Any], note: Running, folders: CheckpointFolders) -> Callable[[Any], Any]:
    """Let the checkpoints of each item be where they are kept before its outcome is known."""

    def call(item: Any) -> Any:
        try:
            value = finished(fn(item))
        except BaseException as error:
            try:
                with unbroken(note):
                    folders.end(note, note.index)
            except Exception as why:
                error.add_note(f"raypool: its checkpoints could not be uploaded: {type(why).__name__}: {why}")
            raise
        with unbroken(note):
            folders.end(note, note.index)
        return value

    return call


def _run_items(
    fn: Callable[[Any], Any], items: list[Any], own: Sequence[Generator], part: Part, here: Surroundings, result: RawResult
) -> None:
    """Run the items until the deadline has passed, or one has failed in a loop that stops then.

    `own`: the generators that the function uses besides the global ones.

    The loop in here is the cost of an item: it holds nothing that it need not.

    Raises:
        TaskCancelled: By the guard, between any two lines.
    """
    values, durations_s, seed, keeper = result.values, result.durations_s, part.seed, here.keeper
    loose = () if keeper is None else keeper.loose
    note = running.get()
    assert note is not None
    out, err = streams = diary.streams()
    find = vars(sys).get  # a task may have deleted them
    result.started_at = time()
    before = perf_counter()
    for index, item in zip(_numbers(part), items, strict=True):
        if loose and keeper is not None and not keeper.secure():
            break
        note.index = index
        if seed is not None:
            seed_everything(item_seed(seed, index), own)
        try:
            value = finished(fn(item))
            values.append(value if keeper is None or type(value) in UNCHANGEABLE else keeper.keep(value))
        except BaseException as error:
            if isinstance(error, TaskCancelled) and result.is_cancelled:
                raise  # the guard's own; one that the user's code has raised by itself is an error like any other
            _take_error(error, part, here, note, result)
        if find("stdout") is not out or find("stderr") is not err:
            diary.mend(streams)
        now = perf_counter()
        durations_s.append(now - before)
        before = now
        if now > result.deadline:
            break
    result.done = len(values)
    if note.has_heard and not note.should_stop:
        result.take_back_last()  # it may have ended early since its machine is about to go; nobody has wished for that


def as_error(error: BaseException) -> BaseException:
    """Return the error of an item. A `SystemExit` becomes a `TaskError`: it would end the process that asks for the value.

    Raises:
        Terminated: That is what was raised: it ends this process.
    """
    if isinstance(error, Terminated):
        raise error
    if not isinstance(error, SystemExit):
        return error
    failed = TaskError(f"The task called sys.exit({'' if error.code is None else repr(error.code)}).")
    failed.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        failed.add_note(note)
    return failed


def _take_error(error: BaseException, part: Part, here: Surroundings, note: Running, result: RawResult) -> None:
    """Take what an item has raised for its outcome."""
    diary.note_last_lines(error, note)
    note_shortage(error, here.upkeep)
    result.errors[part.start + len(result.values)] = as_error(error)
    result.values.append(None)
    result.is_interrupted = here.is_interrupt(error)
    if part.stops_on_error or result.is_interrupted:
        result.deadline = NOW


def set_up(setups: Iterable[Callable[[], Any]], worker: WorkerInfo) -> None:
    """Call functions that a worker begins with (or ends with)."""
    token = running.set(Running(0, 1, None, worker.index, worker.gpu, "setup"))
    try:
        for setup in setups:
            setup()
    finally:
        running.reset(token)


def seed_everything(seed: int, own: Sequence[Generator]) -> None:
    """Seed Python's, NumPy's and torch's global generators (torch only where it is installed), and those of a function.

    Each of these gets other numbers than the rest.
    """
    random.seed(seed)
    import numpy as np

    np.random.seed(np.random.SeedSequence(seed).generate_state(4))
    torch = _torch()
    if torch is not None:
        torch.manual_seed(seed % 2**63)
    for number, generator in enumerate(own):
        generator.reseed(np.random.SeedSequence(seed, spawn_key=(number,)))


@functools.cache
def _torch() -> Any:
    """Return torch if it is installed, imported or not: a function that imports it later would draw unseeded numbers."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


@contextlib.contextmanager
def _generators_kept(own: Sequence[Generator]) -> Iterator[None]:
    """Give the global generators, and those of a function, back as they were: in this process they are the user's own."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch = _torch()
    torch_state = torch.get_rng_state() if torch is not None else None
    own_states = [generator.get_state() for generator in own]
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
        for generator, state in zip(own, own_states, strict=True):
            generator.set_state(state)
