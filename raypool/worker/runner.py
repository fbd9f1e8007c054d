"""Runs the slices of a call: every backend calls user code here, and nowhere else.

Also here: reports about calls that last (`HandBack`, `Watch`, `OpenCall`), torch's modes, and
functions with `async def`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import queue
import random
import sys
import threading
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from math import inf
from time import monotonic, perf_counter, time
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel import capture
from raypool.channel.records import Part, WorkerInfo
from raypool.channel.users_code import Generator, generators_of
from raypool.errors import TaskCancelled, TaskError, add_note, notes_of
from raypool.options import takes
from raypool.worker.folders import CheckpointFolders
from raypool.worker.gpu_memory import GpuMemoryCare, note_shortage
from raypool.worker.gpu_turns import GpuTurns
from raypool.worker.interrupts import NOW, Interrupts, Terminated, ctrl_c
from raypool.worker.running import (
    PLAIN,
    Say,
    TaskContext,
    is_cancelled,
    is_interrupt,
    item_seed,
    running,
    this_process,
    uninterruptible,
)

if TYPE_CHECKING:
    import asyncio

    from raypool.backends.ray.packing import ParcelKeeper  # which imports Ray

CALL_LIMIT_S = 0.2
"""After this time a short call hands back what it has not begun [s]: others may be free by now."""

logger = logging.getLogger("raypool")


class Surroundings(NamedTuple):
    """What the runner needs from a worker.

    `functions` finds a function by its id, `unpack` opens the items of a part. `guard` interrupts
    cancelled slices. `say` takes reports and output. `keeper` has the values until they travel
    (None: they stay here). `find_way` finds the pool's exchange if that is in this process.
    `folders` are those for checkpoints. `upkeep` watches the memory of the worker's GPU, `turns`
    lets items wait for their turn on it. `early` reports calls that last. `is_users_thread`: what
    interrupts an item means the whole call; in a worker it is an error like any other. `has_turn`:
    whether no other thread of this process runs seeded items.
    """

    worker: WorkerInfo
    functions: Callable[[int], Callable[..., Any]]
    unpack: Callable[[Any], list[Any]]
    guard: Interrupts
    say: Say
    keeper: ParcelKeeper | None = None
    find_way: Callable[[], Any] | None = None
    folders: CheckpointFolders | None = None
    upkeep: GpuMemoryCare | None = None
    turns: GpuTurns | None = None
    is_users_thread: bool = False
    early: HandBack | None = None
    has_turn: Callable[[], bool] = lambda: True

    def is_interrupt(self, error: BaseException) -> bool:
        """Whether this ends the call, and not only its item."""
        return self.is_users_thread and is_interrupt(error)


def run_parts(attempt_id: int, parts: Sequence[Part], here: Surroundings) -> list[RawResult]:
    """Run the slices of a call one after the other.

    Every exception becomes an error of its item. No item of a cancelled slice counts as done.
    """
    here.guard.begin_call(attempt_id)
    call = OpenCall(attempt_id, parts, here.upkeep)
    early = None if parts[0].is_rank else here.early
    if early is not None:
        early.begin(call)
    try:
        deadline = perf_counter() + CALL_LIMIT_S
        for number, part in enumerate(parts):
            result = RawResult(part.start)
            if not part.is_fixed:
                result.deadline = deadline
            has_time = number == 0 or (perf_counter() < deadline and not this_process.is_retired)
            if not call.begin(result) or not has_time:
                continue
            if here.upkeep is not None:
                here.upkeep.begin()
            _run_part(attempt_id, part, here, result)
            if here.upkeep is not None:
                result.peak_memory_bytes = here.upkeep.peak()
            if result.is_interrupted:
                deadline = -inf
        return call.results
    finally:
        if early is not None:
            early.end(call)


def _run_part(attempt_id: int, part: Part, here: Surroundings, result: RawResult) -> None:
    if here.keeper is not None and not here.keeper.secure():
        return
    try:
        here.guard.approach(part.task_id)
    except TaskCancelled:
        here.guard.end()
        return
    is_known = False
    try:
        fn = here.functions(part.fn_id)
        is_known = True
        items = here.unpack(part.items)
    except BaseException as error:  # a module is missing here, say: all its items fail
        here.guard.end()
        note_shortage(error, here.upkeep)
        result.is_interrupted = here.is_interrupt(error)
        what = "function" if not is_known else "call's arguments" if part.is_call else "item"
        add_note(error, f"raypool: worker {here.worker.index} could not unpickle the {what}.")
        result.fail(part.num_items, as_error(error))
        # one of the items may be at fault, and the others may not
        result.is_unopened = is_known and part.num_items > 1
        return
    note = _context_of(attempt_id, part, here)
    own = generators_of(fn) if part.seed is not None else []
    if part.is_call:
        fn = _as_calls(fn)
    if part.checkpoints is not None and here.folders is not None:
        place, names = part.checkpoints
        note.checkpoints = place, dict(zip(_numbers(part), names, strict=True))
        fn = _with_folders(fn, note, here.folders)
    token, modes, streams = running.set(note), torch_modes(), capture.streams()
    try:
        with (
            _generators_kept(own, here.has_turn)
            if part.seed is not None
            else contextlib.nullcontext()
        ):
            _run_guarded(fn, items, own, part, here, result)
    except TaskCancelled:
        result.discard()
    else:
        if result.is_cancelled and result.done and not part.is_rank:
            # the user's code went on after it: the items may be about to run elsewhere
            result.take_back_last()
            result.discard()
    finally:
        running.reset(token)
        capture.mend(streams)
        if result.is_cancelled:
            modes.put_back()


def _context_of(attempt_id: int, part: Part, here: Surroundings) -> TaskContext:
    note = TaskContext(
        part.start,
        part.attempt,
        part.seed,
        here.worker.index,
        here.worker.gpu,
        part.name,
        part.task_id,
        part.should_stop,
    )
    note.say, note.find_way, note.outer = here.say, here.find_way, running.get()
    note.interrupts, note.folders, note.call_id = here.guard, here.folders, attempt_id
    return note


def _as_calls(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda call: fn(*call[0], **call[1])


def _numbers(part: Part) -> Sequence[int]:
    return range(part.start, part.start + part.num_items) if part.numbers is None else part.numbers


def _with_folders(
    fn: Callable[[Any], Any], note: TaskContext, folders: CheckpointFolders
) -> Callable[[Any], Any]:
    """Save the checkpoints of each item before its outcome is reported."""

    def call(item: Any) -> Any:
        try:
            value = finished(fn(item))
        except BaseException as error:
            try:
                with uninterruptible(note):
                    folders.end(note, note.index)
            except Exception as why:  # must not hide the item's own error
                add_note(
                    error,
                    f"raypool: its checkpoints could not be uploaded: {type(why).__name__}: {why}",
                )
            raise
        with uninterruptible(note):
            folders.end(note, note.index)
        return value

    return call


def _run_guarded(
    fn: Callable[[Any], Any],
    items: list[Any],
    own: Sequence[Generator],
    part: Part,
    here: Surroundings,
    result: RawResult,
) -> None:
    """Run the items in their turn on the GPU; they can be interrupted until this returns."""
    note = running.get()
    assert note is not None
    try:
        here.guard.begin(note, result)
        if here.turns is not None:
            if here.upkeep is not None and part.turn is not None:
                here.upkeep.share = part.turn[0]
            here.turns.begin(part)
        _run_items(fn, items, own, part, here, result)
    finally:
        # first: whatever else is put in order here must not be interrupted
        try:
            here.guard.end()
        except TaskCancelled:  # it came as this began, and comes only once
            here.guard.end()
        finally:
            if here.turns is not None:
                here.turns.end()


def _run_items(
    fn: Callable[[Any], Any],
    items: list[Any],
    own: Sequence[Generator],
    part: Part,
    here: Surroundings,
    result: RawResult,
) -> None:
    """Run the items until the deadline has passed, or one has failed in a loop that stops then.

    Raises:
        TaskCancelled: By the guard, between any two lines.
    """
    values, durations_s, seed, keeper = result.values, result.durations_s, part.seed, here.keeper
    loose = () if keeper is None else keeper.loose
    note = running.get()
    assert note is not None
    out, err = streams = capture.streams()
    find = vars(sys).get  # a task may have deleted them
    result.started_at = time()
    before = perf_counter()
    __tracebackhide__ = True  # notebooks and pytest: only the user's own lines
    # this loop is the cost of an item: it holds nothing that it need not
    for index, item in zip(_numbers(part), items, strict=True):
        if loose and keeper is not None and not keeper.secure():
            break
        note.index = index
        try:
            if seed is not None and not _seed(item_seed(seed, index), own, is_first=not values):
                break
            value = _call(fn, item)
            values.append(value if keeper is None or type(value) in PLAIN else keeper.keep(value))
        except BaseException as error:
            if isinstance(error, TaskCancelled) and result.is_cancelled:
                # the guard's own; one that user code has raised is an error like any other
                raise
            _explain_call(error, here.functions(part.fn_id), item, part.is_call)
            capture.note_last_lines(error, note)
            note_shortage(error, here.upkeep)
            result.errors[part.start + len(values)] = as_error(error)
            values.append(None)
            result.is_interrupted = here.is_interrupt(error)
            if part.stops_on_error or result.is_interrupted:
                result.deadline = NOW
        if find("stdout") is not out or find("stderr") is not err:
            capture.mend(streams)
        now = perf_counter()
        durations_s.append(now - before)
        before = now
        if now > result.deadline:
            break
    result.done = len(values)
    if note.has_heard and not note.should_stop:
        # it may have ended early because its machine is about to go: not at the user's wish
        result.take_back_last()


def _seed(seed: int, own: Sequence[Generator], is_first: bool) -> bool:
    """Seed an item; return False if that fails because of what an earlier one has left.

    Torch raises once an item has caused a lasting error on the GPU, which ends this process: the
    item can begin in another. The first item of a call fails, so that none is handed back forever.
    """
    if ctrl_c.is_due and ctrl_c.take():  # the call waited for its turn, and may have had none
        raise KeyboardInterrupt
    try:
        seed_everything(seed, own)
    except Exception:
        if is_first:
            raise
        return False
    return True


@ctrl_c.enters
def _call(fn: Callable[[Any], Any], item: Any) -> Any:
    __tracebackhide__ = True
    if ctrl_c.is_due and ctrl_c.take():  # it came before the item, and ends it
        raise KeyboardInterrupt
    value = fn(item)
    return _run(value) if type(value) is CoroutineType else value


def _explain_call(error: BaseException, fn: Callable[..., Any], item: Any, is_call: bool) -> None:
    """Note in an error how to write the call, if the function cannot be called like this."""
    if not isinstance(error, TypeError):
        return
    args, kwargs = item if is_call else ((item,), {})
    if takes(fn, args, kwargs):  # it was raised within the function
        return
    name, kind = getattr(fn, "__name__", "the function"), type(item).__name__
    hint = None
    if is_call:
        if args and type(args[0]) is int and takes(fn, args[1:], kwargs):
            hint = (
                f"The function can be called without its first argument, {args[0]}. If that is"
                " MATLAB's number of outputs, leave it out."
            )
    elif isinstance(item, (tuple, list)) and takes(fn, item, {}):
        hint = f"Change {name} to take one argument, or call pool.map({name}, *zip(*items))."
    elif isinstance(item, dict) and takes(fn, (), item):
        hint = f"Change {name} to take the dict, or pass lambda item: {name}(**item)."
    if hint is not None:
        what = (
            "" if is_call else f"parfor calls {name} with one argument, the item, here a {kind}. "
        )
        add_note(error, f"raypool: {what}{hint}")


def as_error(error: BaseException) -> BaseException:
    """Return the error of an item: a `TaskError` for a `SystemExit`, which would end the driver.

    Raises:
        Terminated: That was raised: it ends this process.
    """
    if isinstance(error, Terminated):
        raise error
    if not isinstance(error, SystemExit):
        return error
    failed = TaskError(
        f"The task called sys.exit({'' if error.code is None else repr(error.code)})."
    )
    failed.__cause__ = error
    for note in notes_of(error):
        failed.add_note(note)
    return failed


@ctrl_c.enters
def set_up(
    setups: Iterable[Callable[[], Any]],
    worker: WorkerInfo,
    find_way: Callable[[], Any] | None = None,
) -> None:
    """Call functions that a worker begins or ends with; `find_way` is that of `Surroundings`."""
    note = TaskContext(0, 1, None, worker.index, worker.gpu, "setup", find_way=find_way)
    token = running.set(note)
    try:
        for setup in setups:
            setup()
    finally:
        running.reset(token)


def seed_everything(seed: int, own: Sequence[Generator]) -> None:
    """Seed the generators of Python, NumPy and torch, and a function's own, all differently."""
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
    """Return torch if it is installed; else None."""
    try:  # imported now: a function that imports it later would draw unseeded numbers
        return importlib.import_module("torch")
    except ImportError:
        return None


@contextlib.contextmanager
def _generators_kept(own: Sequence[Generator], has_turn: Callable[[], bool]) -> Iterator[None]:
    """Restore all generators afterwards: in this process they may be the user's own."""
    import numpy as np

    torch = _torch()
    ways: list[tuple[Callable[[], Any], Callable[[Any], Any]]]
    ways = [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]
    if torch is not None:
        # a CUDA that is not in use yet will begin with the last seed, by default that of the CPU
        cuda = (
            (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
            if torch.cuda.is_initialized()
            else (torch.initial_seed, torch.cuda.manual_seed_all)
        )
        ways += [(torch.get_rng_state, torch.set_rng_state), cuda]
    ways += [(generator.get_state, generator.set_state) for generator in own]
    states = []
    for get_state, set_state in ways:
        # one on a GPU raises once an item has caused a lasting error there
        with contextlib.suppress(Exception):
            states.append((set_state, get_state()))
    try:
        yield
    finally:
        # not beneath another item: this thread may have been given up, and have lost its turn
        for set_state, state in states if has_turn() else ():
            with contextlib.suppress(Exception):  # as above
                set_state(state)


class RawResult:
    """The outcome of one slice, before it travels; no item begins after its `deadline`.

    `is_cancelled`: it is no longer wanted. `is_unopened`: see `SliceResult`. `is_interrupted`:
    Ctrl-C, or a cancellation of the task around it, ended an item, and so all later ones.
    """

    __slots__ = (
        "deadline",
        "done",
        "durations_s",
        "errors",
        "is_cancelled",
        "is_interrupted",
        "is_unopened",
        "peak_memory_bytes",
        "start",
        "started_at",
        "values",
    )

    def __init__(self, start: int) -> None:
        self.start = start
        self.done = 0
        self.values: list[Any] = []
        self.errors: dict[int, BaseException] = {}
        self.durations_s = array("d")
        self.started_at = 0.0
        self.deadline = inf
        self.peak_memory_bytes: int | None = None
        self.is_cancelled = False
        self.is_unopened = False
        self.is_interrupted = False

    def fail(self, num_items: int, error: BaseException) -> None:
        """Let all items have failed with one error."""
        self.errors = dict.fromkeys(range(self.start, self.start + num_items), error)
        self.values = [None] * num_items
        self.durations_s = array("d", bytes(8 * num_items))
        self.started_at = time()
        self.done = num_items

    def take_back_last(self) -> None:
        """Let the last item count as not begun."""
        self.done -= 1
        self.values.pop()
        self.durations_s.pop()
        error = self.errors.pop(self.start + self.done, None)
        if error is not None:
            traceback.print_exception(error)  # otherwise this error would be lost

    def discard(self) -> None:
        """Let all items count as not begun."""
        self.done = 0
        self.values = []
        self.errors = {}
        self.durations_s = array("d")

    def so_far(self, done: int) -> RawResult:
        """Return a copy of the first items' outcomes, from any thread.

        It has fewer values if the slice is cancelled in this instant.
        """
        # the thread that runs the items appends the value of each, then its duration
        copy = RawResult(self.start)
        copy.done, copy.values, copy.durations_s = done, self.values[:done], self.durations_s[:done]
        copy.errors = {
            index: error for index, error in list(self.errors.items()) if index < self.start + done
        }
        copy.started_at, copy.peak_memory_bytes = self.started_at, self.peak_memory_bytes
        copy.is_unopened = self.is_unopened
        return copy

    def let_go(self, done: int) -> None:
        """Drop the outcomes of the first items, which were reported."""
        self.values[:done] = [None] * done
        for index in range(self.start, self.start + done):
            self.errors.pop(index, None)


# --- calls that last ------------------------------------------------------------------------------
#
# Short items share a call, and the next call waits at its worker. If one item takes long after all,
# the worker reports the items that are done before the call ends, and hands back those that it has
# not begun: somebody may wait for them, perhaps the long item itself.


LASTS_S = 0.5
"""A call lasts after this time [s]: ten times what a shared one is meant to take."""

LOOK_S = 0.125
"""The pause between two looks for such calls [s]."""


class HandBack:
    """Reports the calls of one worker that last, and knows which calls behind them were withdrawn.

    The thread of `watch` looks at the calls, and passes the reports to `tell`.
    """

    def __init__(self, watch: Watch, tell: Callable[[OpenCall, NarrowedCall], object]) -> None:
        self._watch = watch
        self._tell = tell
        self._told_of = -1  # the last call that was reported

    def begin(self, call: OpenCall) -> None:
        """Note that a call begins."""
        self._watch.add(call, self)

    def end(self, call: OpenCall) -> None:
        """Note that it is over; it is not reported after that."""
        call.end()
        self._watch.drop(call)

    def narrow(self, call: OpenCall) -> None:
        """Report a call that lasts."""

        def tell(narrowed: NarrowedCall) -> None:
            # first: the driver, once told, sends elsewhere what waits behind this call
            self._told_of = call.attempt_id
            self._tell(call, narrowed)

        call.narrow(tell)

    def is_behind(self, attempt_id: int | None) -> bool:
        """Whether a call that waited behind this one was withdrawn, since this one was reported."""
        return attempt_id is not None and attempt_id == self._told_of


class Watch:
    """Finds calls that last, in a thread of its own, and reports each once."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[OpenCall, HandBack]] = {}  # by attempt
        self._is_resting = False  # the thread waits for the bell
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="raypool-early", daemon=True).start()

    def add(self, call: OpenCall, early: HandBack) -> None:
        """Look at a call, until it has lasted or is dropped."""
        self._calls[call.attempt_id] = call, early
        if self._is_resting:
            self._is_resting = False
            self._bell.put(None)

    def drop(self, call: OpenCall) -> None:
        """Look at a call no more."""
        self._calls.pop(call.attempt_id, None)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._bell.put(None)

    def _work(self) -> None:
        while not self._closed.is_set():
            # before the look at the calls: `add` rings if it comes in between
            self._is_resting = True
            if not self._calls:
                self._bell.get()
            self._is_resting = False
            self._closed.wait(LOOK_S)  # not a sleep, so that `close` ends it
            self._look()

    def _look(self) -> None:
        # not in the loop above: its variables would keep the last call, with all that it has
        before = monotonic() - LASTS_S
        for call, early in list(self._calls.values()):
            if call.began_at <= before:
                self.drop(call)
                try:
                    early.narrow(call)
                except Exception:  # the answer to the call has all of it once more
                    logger.exception("This is a bug in raypool; the call continues.")


class NarrowedCall(NamedTuple):
    """The finished part of a running call, and how many of the later items its worker keeps."""

    attempt_id: int
    results: list[RawResult]
    kept: tuple[int, ...]

    def without_values(self) -> NarrowedCall:
        """Return a copy in which the worker keeps the finished items for the call's answer."""
        return NarrowedCall(
            self.attempt_id,
            [RawResult(result.start) for result in self.results],
            tuple(kept + result.done for kept, result in zip(self.kept, self.results, strict=True)),
        )


class OpenCall:
    """A running call: a worker's thread begins its parts; another thread may narrow it."""

    __slots__ = (
        "_is_cut",
        "_is_over",
        "_lock",
        "_parts",
        "_upkeep",
        "attempt_id",
        "began_at",
        "results",
    )

    def __init__(
        self, attempt_id: int, parts: Sequence[Part], upkeep: GpuMemoryCare | None = None
    ) -> None:
        self.attempt_id = attempt_id
        self.began_at = monotonic()
        self.results: list[RawResult] = []  # of the parts that have begun or were passed over
        self._parts = parts
        self._upkeep = upkeep
        self._lock = threading.Lock()
        self._is_cut = False  # nothing more begins
        self._is_over = False

    def begin(self, result: RawResult) -> bool:
        """Note that the next part is about to begin; False if it must not."""
        with self._lock:
            self.results.append(result)
            return not self._is_cut

    def end(self) -> None:
        """Note that the call is over: from here on only its answer is sent."""
        with self._lock:
            self._is_over = True

    def narrow(self, tell: Callable[[NarrowedCall], object]) -> None:
        """Begin no more items (unless the user has set `chunk_size`); report those that are done.

        Nothing is reported of a call that is about to end.
        """
        # locked while it is told: else a report could come behind the call's answer
        with self._lock:
            narrowed = None if self._is_over else self._narrowed()
            if narrowed is not None:
                tell(narrowed)

    def let_go(self, narrowed: NarrowedCall) -> None:
        """Drop what was reported."""
        for result, told in zip(self.results, narrowed.results, strict=False):
            result.let_go(told.done)

    def _narrowed(self) -> NarrowedCall | None:
        if not self.results or self.results[-1].deadline <= NOW:
            return None  # it was told to end
        number, last = len(self.results) - 1, self.results[-1]
        part = self._parts[number]
        if not part.is_fixed:
            # first: then at most one more item begins, after those that are counted
            last.deadline, self._is_cut = NOW, True
        done = len(last.durations_s)
        if done >= part.num_items:
            return None
        told = [*(result.so_far(result.done) for result in self.results[:-1]), last.so_far(done)]
        if len(told[-1].values) < done:  # cancelled just now
            return None
        if self._upkeep is not None:
            told[-1].peak_memory_bytes = self._upkeep.peak()
        later = self._parts[number + 1 :]
        told += [RawResult(other.start) for other in later]
        rest = part.num_items - done if part.is_fixed else 1
        kept = [0] * number + [rest] + [other.num_items if part.is_fixed else 0 for other in later]
        return NarrowedCall(self.attempt_id, told, tuple(kept))


# --- torch's modes of a thread --------------------------------------------------------------------
#
# Torch leaves `no_grad` or `autocast` by Python code, which an interruption may hit too: no later
# task of the worker would train.


DEVICES = ("cpu", "cuda")


class TorchModes(NamedTuple):
    """Whether a thread records gradients, and its autocast by device; defaults of a new thread."""

    is_grad_enabled: bool = True
    autocast: tuple[tuple[bool, Any], ...] = ()
    is_cache_enabled: bool = True
    autocast_depth: int = 0

    def put_back(self) -> None:
        """Restore these modes in this thread."""
        torch = _imported_torch()
        if torch is None:
            return
        torch.set_grad_enabled(self.is_grad_enabled)
        for device, (is_enabled, dtype) in zip(
            DEVICES, self.autocast or [(False, None)] * len(DEVICES), strict=True
        ):
            torch.set_autocast_enabled(device, is_enabled)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.is_cache_enabled)
        # torch tells the depth only when it changes, so one goes in before one goes out
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > self.autocast_depth:
            pass
        if self.autocast_depth == 0:
            torch.clear_autocast_cache()  # of weights as they were then


def _imported_torch() -> Any:
    """Return torch if it is completely imported; else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "autocast_decrement_nesting") else None


def torch_modes() -> TorchModes:
    """Return the modes of this thread."""
    torch = _imported_torch()
    if torch is None:
        return TorchModes()
    torch.autocast_increment_nesting()
    return TorchModes(
        torch.is_grad_enabled(),
        tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in DEVICES
        ),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )


# --- functions with `async def` -------------------------------------------------------------------


TICK_S = 0.1
"""How often a waiting event loop runs Python code in a thread, where interruptions arrive [s]."""


def finished(value: Any) -> Any:
    """Return a function's return value; for a coroutine, the result of running it to its end.

    Raises:
        TaskCancelled: The task was cancelled meanwhile, however the coroutine handled that.
    """
    return _run(value) if type(value) is CoroutineType else value


def _run(coroutine: CoroutineType[Any, Any, Any]) -> Any:
    import asyncio  # imported late: most programs do not need it

    tasks: list[asyncio.Task[Any]] = []
    is_over = threading.Event()
    try:
        if asyncio._get_running_loop() is None:
            return _run_here(coroutine, tasks, is_over)
        # a task that runs inline was submitted by a coroutine, whose loop has this thread
        with ThreadPoolExecutor(1) as other:
            try:
                run = copy_context().run
                done, pending = wait([other.submit(run, _run_here, coroutine, tasks, is_over)], 0)
                while pending:  # in slices: an interruption of this thread arrives between them
                    done, pending = wait(pending, TICK_S)
                return done.pop().result()  # which no name here holds: its error holds this frame
            finally:
                is_over.set()  # first: a task that begins looks for it
                for task in tasks:
                    with contextlib.suppress(RuntimeError):  # its loop has ended
                        task.get_loop().call_soon_threadsafe(task.cancel)
    except BaseException as error:
        if isinstance(error, TaskCancelled) or not is_cancelled():
            raise
        raise TaskCancelled from error  # asyncio has turned it into an error of its own


def _run_here(
    coroutine: CoroutineType[Any, Any, Any],
    tasks: list[asyncio.Task[Any]],
    is_over: threading.Event,
) -> Any:
    """Run a coroutine in a new loop, as the task that `tasks` gets, unless it `is_over` already."""
    import asyncio

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if is_over.is_set():
            task.cancel()
        if threading.current_thread() is threading.main_thread():  # a signal wakes it up
            return await coroutine
        ticking = asyncio.create_task(tick())
        # it may be interrupted in place of the other
        ticking.add_done_callback(lambda _: task.cancel())
        try:
            return await coroutine
        finally:
            ticking.cancel()

    def heed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if tasks and isinstance(context.get("exception"), TaskCancelled):
            tasks[0].cancel()  # it came while the loop ran a callback, and goes no further
        else:
            loop.default_exception_handler(context)

    with ctrl_c.left_alone(), asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(heed)
        try:
            return runner.run(main())
        except TaskCancelled:
            # the coroutine still waits: what it waits for is cancelled first, as after Ctrl-C
            if tasks and tasks[0].cancel():
                with contextlib.suppress(asyncio.CancelledError):
                    runner.get_loop().run_until_complete(tasks[0])
            raise
