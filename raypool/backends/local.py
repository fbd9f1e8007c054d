"""The backends "inline" and "threads": they run user code in this process, without Ray.

"inline" runs a task in the thread that submits it, and ranks of a gang at the same time: the first
in that thread, the others in threads of their own. With "threads" each worker is a thread: results
as on Ray, a start in milliseconds, and a debugger stops in the function.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.backends.base import Post
from raypool.channel.capture import listening
from raypool.channel.records import (
    Failure,
    Function,
    LocalValues,
    NodeDevices,
    NodeGpus,
    Part,
    Refusal,
    SliceResult,
    WorkerInfo,
)
from raypool.channel.store import FindWay, way_finder_here
from raypool.core.messages import (
    AttemptFinished,
    AttemptNarrowed,
    CancelRequested,
    Signal,
    TimerFired,
    WorkerLost,
    WorkerReady,
)
from raypool.errors import LossReason, ResourceError, told
from raypool.gpus.table import gpus_here
from raypool.profiles import Profile
from raypool.worker.folders import CheckpointFolders, TemporaryFolder, temporary_here
from raypool.worker.interrupts import ThreadGuard, TimeLimit, ctrl_c
from raypool.worker.runner import (
    HandBack,
    NarrowedCall,
    OpenCall,
    RawResult,
    Surroundings,
    Watch,
    run_parts,
    set_up,
)
from raypool.worker.running import ExchangeClient, Say, end_thread, in_task

if TYPE_CHECKING:
    from raypool.channel.exchange import LocalExchange


KEPT_INTERRUPTS = 64
"""How many tasks ended by Ctrl-C are remembered: each only until the driver handles its post."""

NOT_STOPPED = (
    "%s has run longer than its timeout_s=%g and does not stop: it runs native code, or continues"
    " after TaskCancelled. It has failed, but nothing in this process can end it, so the call"
    " returns when it does. On Ray its worker would be replaced (profile='local')."
)

LOOK_S = 0.1
"""The interval at which a call that waits for its turn looks whether it is to end [s]."""

MOST_WORKERS = 1024
"""The most workers of a pool in this process: each takes a thread, and thousands halt a machine."""

logger = logging.getLogger("raypool")


class SeededTurns:
    """Gives seeded calls of this process, of whatever pool, their turns at its random generators.

    Reentrant: a seeded item may run a seeded loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None  # a thread
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._holder not in (None, me):
                # in slices: a cancellation arrives between them
                self._changed.wait(LOOK_S)
                if ctrl_c.is_due and threading.current_thread() is threading.main_thread():
                    return  # it ends the call, before that seeds anything
            self._holder = me
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            if self.is_held_here():
                self._depth -= 1
                if self._depth == 0:
                    self._holder = None
                    self._changed.notify_all()

    def is_held_here(self) -> bool:
        """Whether this thread has the turn."""
        return self._holder == threading.get_ident()

    def take_from(self, thread: threading.Thread) -> None:
        """End the turn of a thread that is given up: its call may never return."""
        with self._changed:
            if self._holder == thread.ident:
                self._holder, self._depth = None, 0
                self._changed.notify_all()


_turns = SeededTurns()


def _renew_turns() -> None:
    # in a forked child: another thread of the parent may have had the turn
    global _turns
    _turns = SeededTurns()


os.register_at_fork(after_in_child=_renew_turns)


def _turn(parts: Sequence[Part]) -> contextlib.AbstractContextManager[Any]:
    is_seeded = any(part.seed is not None for part in parts)
    return _turns if is_seeded else contextlib.nullcontext()


class Rank(NamedTuple):
    """A running rank; the first of a gang has no thread of its own."""

    worker_id: int
    attempt_id: int
    thread: threading.Thread | None


class InlineBackend:
    """Runs each call at once, in the calling thread; further ranks in threads of their own.

    Args:
        profile: How long a cancelled task has to end, and the teardown.
        post: Passes events to the driver.
        say: Takes the reports and output of tasks.
        default_workers: The default number of workers.
        find_way: Finds another pool's exchange, to be used instead of a new one.
    """

    is_ending = False
    _is_users_thread = True
    _limits_time = True
    _has_warned = False  # of what does not stop
    # a setup that raises another ends the user's call: Ctrl-C, or a task's cancellation
    _setup_errors: tuple[type[BaseException], ...] = (Exception, SystemExit)

    def __init__(
        self,
        profile: Profile,
        post: Post,
        say: Say,
        default_workers: int = 1,
        find_way: FindWay | None = None,
    ) -> None:
        self._profile = profile
        self.has_cleanups = False
        self._post = post
        self._say = say
        self._default_workers = min(default_workers, MOST_WORKERS)
        self._next_place = 0
        self._places: set[int] = set()  # claimed, with a worker or without
        self._workers: dict[int, WorkerInfo] = {}  # by worker id
        self._guards: dict[int, ThreadGuard] = {}
        # by worker id, where calls run while others may be told of them
        self._early: dict[int, HandBack] = {}
        # workers whose setup has succeeded, so that they have something to tear down
        self._set_ups: set[int] = set()
        # of gangs whose first rank has not come back, by task
        self._ranks: dict[int, list[Rank]] = {}
        self._broken_up: set[int] = set()  # those of them of which a rank has failed
        # tasks that Ctrl-C has ended in an item: the driver ends each soon after this call
        self._interrupted: deque[int] = deque(maxlen=KEPT_INTERRUPTS)
        self._exchange: LocalExchange | None = None  # made when somebody asks for the store
        self._making = threading.Lock()  # any thread may be the first to ask for it
        self._is_closed = False
        self._temporary = TemporaryFolder()
        self._folders = CheckpointFolders(temporary_here(self._temporary))
        self._find_way = find_way or (way_finder_here() if in_task() else self._way_of_own)

    def find_way(self) -> ExchangeClient:
        """Return the way to the exchange: of the pool in whose task this was made, or its own."""
        return self._find_way()

    def devices(self) -> list[NodeDevices]:
        """Return the GPUs of this machine; any worker may use any of them."""
        return [
            NodeDevices(
                platform.node(), gpus_here(self._profile.inventory)[0], list(self._workers.values())
            )
        ]

    def node_of(self, place: int) -> str | None:
        """Return None: there is only this machine."""
        return None

    def gpu_readings(self, take: Callable[[NodeGpus], object]) -> None:
        """Do nothing: it is unknown which GPU a worker uses."""

    def _way_of_own(self) -> ExchangeClient:
        # it imports asyncio, and few need it
        from raypool.channel.exchange import LocalExchange

        with self._making:
            if self._exchange is None:
                self._exchange = LocalExchange()
                if self._is_closed:
                    self._exchange.close()
            return self._exchange

    sizing = contextlib.nullcontext  # nobody else changes the size of the pool

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim the requested number of places, up to `MOST_WORKERS`.

        Raises:
            ResourceError: More were requested; nothing is claimed.
        """
        if least is None or most is None:
            count = self._default_workers
        else:
            count = most if least == most else max(least, min(most, self._default_workers))
        available = MOST_WORKERS - len(self._places)
        if count > available:
            raise ResourceError(
                f"Workers: requested {count}, available {available}. A pool in this process can"
                f" have {MOST_WORKERS}, since each takes a thread. Ask for fewer, or use"
                ' processes: profile="local", or address= of a cluster.',
                requested=count,
                available=available,
            )
        places = list(range(self._next_place, self._next_place + count))
        self._next_place += count
        self._places.update(places)
        return places

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Set up a worker."""
        self._set_up(worker_id, self._note(worker_id, place), setups)

    def _note(self, worker_id: int, place: int) -> WorkerInfo:
        info = self._workers[worker_id] = WorkerInfo(place, platform.node(), os.getpid())
        self._guards[worker_id] = ThreadGuard()
        return info

    def _set_up(self, worker_id: int, info: WorkerInfo, setups: Sequence[Function]) -> bool:
        """Call the setups in the worker's thread, and post the result."""
        try:
            set_up([setup.packed for setup in setups], info, self.find_way)
        except self._setup_errors as error:
            self._post(
                WorkerLost(worker_id, LossReason.START),
                Refusal(f"setup= or initializer= raised {told(error)}"),
            )
        else:
            self._set_ups.add(worker_id)
            self._post(WorkerReady(worker_id), info)
        return True

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """Forget the worker in this place."""
        if not keep:
            self._places.discard(place)
        for worker_id in self._workers_in(place):
            self._forget(worker_id)

    def _workers_in(self, place: int) -> list[int]:
        return [number for number, info in self._workers.items() if info.index == place]

    def _forget(self, worker_id: int) -> None:
        del self._guards[worker_id]
        self._tear_down(worker_id, self._workers.pop(worker_id))

    def _tear_down(self, worker_id: int, worker: WorkerInfo) -> bool:
        if self._profile.teardown is None or worker_id not in self._set_ups:
            return True
        self._set_ups.remove(worker_id)
        try:
            set_up([self._profile.teardown], worker, self.find_way)
        except self._setup_errors:
            logger.exception("The teardown of worker %d failed.", worker.index)
        return True

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Return the value: it does not travel."""
        return value

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Run the call now; a gang's first rank has to come last, and waits for the others."""
        part = parts[0]
        is_late_rank = part.is_rank and part.start > 0
        limit: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if part.timeout_s is not None and self._limits_time and not is_late_rank:
            limit = self._limit(worker_id, attempt_id, part, part.timeout_s)
        here = self._surroundings(worker_id, functions)
        call = (worker_id, attempt_id, parts, here)
        if not part.is_rank:
            with _turn(parts), limit:
                self._call(*call)
            return
        thread = None
        if is_late_rank:
            # a daemon: nothing can end a function that does not stop, and Python would wait for it
            thread = threading.Thread(
                target=self._call, args=call, name=f"raypool-rank-{part.start}", daemon=True
            )
        self._ranks.setdefault(part.task_id, []).append(Rank(worker_id, attempt_id, thread))
        if part.task_id in self._broken_up:  # an earlier rank has failed before this one came
            self._break_up(part.task_id)
        if thread is not None:
            thread.start()
            return
        try:
            with limit:
                self._call(*call)
                self._wait_for_ranks(part.task_id)
        finally:
            del self._ranks[part.task_id]
            self._broken_up.discard(part.task_id)

    def _limit(self, worker_id: int, attempt_id: int, part: Part, timeout_s: float) -> TimeLimit:
        """Return a time limit of its own for a call: the driver's thread is busy with the call."""
        guard = self._guards[worker_id]
        is_main = threading.current_thread() is threading.main_thread()

        def interrupt() -> None:
            # posted first, so that an answer after it counts as late
            self._post(TimerFired("timeout", worker_id, attempt_id), None)
            if part.is_rank:
                self._break_up(part.task_id)
            elif not is_main:  # there the signal does it
                guard.request(Signal.CANCEL, attempt_id, part.task_id)

        def warn() -> None:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(NOT_STOPPED, part.name or "A task", timeout_s)

        def on_signal(frame: FrameType | None) -> None:
            if not part.is_rank:
                guard.interrupt_here(attempt_id, part.task_id, frame)

        return TimeLimit(timeout_s, self._profile.cancel_grace_s, interrupt, warn, on_signal)

    @ctrl_c.enters
    def _wait_for_ranks(self, task_id: int) -> None:
        for rank in self._ranks[task_id]:
            while rank.thread is not None and rank.thread.is_alive():
                try:
                    rank.thread.join()
                except KeyboardInterrupt:  # it means the gang
                    self._post(CancelRequested(task_id), None)
                    self._break_up(task_id)

    def _break_up(self, task_id: int) -> None:
        """Stop all ranks of a gang: the driver cannot, since its thread runs the first."""
        ranks = self._ranks.get(task_id, [])
        if ranks:
            self._broken_up.add(task_id)  # for those that have still to come
        for rank in list(ranks):  # a copy: the driver's thread may add one meanwhile
            guard = self._guards.get(rank.worker_id)
            if guard is not None:
                guard.request(Signal.CANCEL, rank.attempt_id, task_id)

    def _surroundings(self, worker_id: int, functions: Sequence[Function]) -> Surroundings:
        """Return what a call needs, in the driver's thread: its worker may be forgotten later."""
        return Surroundings(
            self._workers[worker_id],
            {function.fn_id: function.packed for function in functions}.__getitem__,
            lambda items: items,
            self._guards[worker_id],
            self._say,
            find_way=self.find_way,
            folders=self._folders,
            is_users_thread=self._is_users_thread,
            early=self._early.get(worker_id),
            has_turn=_turns.is_held_here,
        )

    def _call(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        here: Surroundings,
    ) -> bool:
        """Run a call and post the result; False if raypool failed, and the worker with it."""
        try:
            with listening():
                # no slice of a task that Ctrl-C has ended begins, even if it was dealt out before
                if any(part.task_id in self._interrupted for part in parts):
                    raw = [RawResult(part.start) for part in parts]
                else:
                    raw = run_parts(attempt_id, parts, here)
                    self._interrupted.extend(
                        part.task_id
                        for part, result in zip(parts, raw, strict=True)
                        if result.is_interrupted and not part.is_rank
                    )
        except Exception as error:
            # raypool's own mistake, not the user's: nobody may be left waiting
            self._post(
                WorkerLost(worker_id, LossReason.UNKNOWN),
                f"raypool itself failed, {type(error).__name__}: {error}",
            )
            self._break_up(parts[0].task_id)
            return False
        is_broken_up = parts[0].is_rank and (bool(raw[0].errors) or not raw[0].done)
        self._post(AttemptFinished(worker_id, attempt_id, ()), [result_of(part) for part in raw])
        if is_broken_up:
            self._break_up(parts[0].task_id)
        return True

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Pass on a wish for a slice; inline, only its own thread can have one while it runs."""
        guard = self._guards.get(worker_id)
        if guard is not None:
            guard.request(wish, attempt_id, task_id)

    def close(self) -> None:
        """Forget all workers, the store and temporary files."""
        for worker_id in list(self._workers):
            self._forget(worker_id)
        with self._making:  # an exchange that is made just now is seen below
            self._is_closed = True
        if self._exchange is not None:
            self._exchange.close()
        self._temporary.remove()


def result_of(raw: RawResult) -> SliceResult:
    """Return the outcome of a slice."""
    # The errors leave `raw`: their tracebacks hold the frames that hold `raw`, a cycle.
    failures = {index: Failure(raw.errors.pop(index), None) for index in list(raw.errors)}
    result = SliceResult(
        raw.start, raw.done, LocalValues(raw.values), 0, failures, raw.durations_s, raw.started_at
    )
    result.is_interrupted = raw.is_interrupted
    return result


# --- backend "threads" ----------------------------------------------------------------------------


TEARDOWN_TIMEOUT_S = 10.0
"""How long the teardown of a worker may take [s]."""

END_TIMEOUT_S = 1.0
"""How long a closing pool waits for running functions after it has cancelled them [s]."""


class ThreadsBackend(InlineBackend):
    """Runs each worker as a thread of this process."""

    _is_users_thread = False
    _setup_errors = (BaseException,)

    def __init__(self, profile: Profile, post: Post, say: Say, default_workers: int) -> None:
        super().__init__(profile, post, say, default_workers)
        self._calls: dict[int, queue.SimpleQueue[Callable[[], bool] | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._ended: list[tuple[WorkerInfo, ThreadGuard, threading.Thread]] = []  # see `_forget`
        # by attempt: they give up workers that do not stop
        self._graces: dict[int, list[threading.Timer]] = {}
        self._watch = Watch()

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start a thread."""
        for other in self._workers_in(place):
            self._forget(other)
        calls = self._calls[worker_id] = queue.SimpleQueue()
        thread = self._threads[worker_id] = threading.Thread(
            target=_work, args=(calls,), name=f"raypool-worker-{place}", daemon=True
        )
        thread.start()

        def tell_early(call: OpenCall, narrowed: NarrowedCall) -> None:
            kept, results = narrowed.kept, [result_of(result) for result in narrowed.results]
            self._post(AttemptNarrowed(worker_id, narrowed.attempt_id, (), kept), results)
            call.let_go(narrowed)  # the user may want the finished items freed

        self._early[worker_id] = HandBack(self._watch, tell_early)
        info = self._note(worker_id, place)  # in this thread: the worker can be ended from now on
        calls.put(lambda: self._set_up(worker_id, info, setups))

    def _forget(self, worker_id: int) -> None:
        """End a thread, and cancel what it runs; wait for its teardown if it is free.

        While the pool closes, `close` does the waiting: a worker may wait for another.
        """
        worker, guard = self._workers.pop(worker_id), self._guards.pop(worker_id)
        calls, thread = self._calls.pop(worker_id), self._threads.pop(worker_id)
        del self._early[worker_id]
        guard.give_up()
        calls.put(lambda: self._tear_down(worker_id, worker))
        calls.put(None)
        if self.is_ending:
            self._ended.append((worker, guard, thread))
        elif guard.is_free:
            self._wait_for_teardown(worker, thread)
        else:
            _turns.take_from(thread)

    def _wait_for_teardown(self, worker: WorkerInfo, thread: threading.Thread) -> None:
        if self._profile.teardown is None:
            return
        thread.join(TEARDOWN_TIMEOUT_S)
        if thread.is_alive():
            logger.warning(
                "The teardown of worker %d did not end within %g s; raypool no longer waits for"
                " it.",
                worker.index,
                TEARDOWN_TIMEOUT_S,
            )

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Interrupt a thread, and give it up if that has not helped in time."""
        super().signal(worker_id, attempt_id, task_id, wish)
        guard = self._guards.get(worker_id)
        if guard is None or wish is not Signal.CANCEL or not guard.is_at_hand(attempt_id, task_id):
            return

        def give_up() -> None:
            if guard.is_at_hand(attempt_id, task_id) and worker_id in self._guards:
                self._post(
                    WorkerLost(worker_id, LossReason.STOPPED), "a cancelled task did not stop"
                )

        # an infinite grace is longer than a timer can wait
        timer = threading.Timer(min(self._profile.cancel_grace_s, threading.TIMEOUT_MAX), give_up)
        timer.daemon = True
        self._graces.setdefault(attempt_id, []).append(timer)
        timer.start()

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Hand the call to the thread."""
        here, early = self._surroundings(worker_id, functions), self._early[worker_id]

        def call() -> bool:
            if early.is_behind(behind):
                nothing = [result_of(RawResult(part.start)) for part in parts]
                self._post(AttemptFinished(worker_id, attempt_id, ()), nothing)
                return True
            try:
                with _turn(parts):
                    return self._call(worker_id, attempt_id, parts, here)
            finally:
                for timer in self._graces.pop(attempt_id, ()):
                    timer.cancel()

        self._calls[worker_id].put(call)

    def close(self) -> None:
        """Forget all workers, the store and temporary files."""
        self._watch.close()
        self.is_ending = True
        for worker_id in list(self._workers):
            self._forget(worker_id)
        busy = []
        for worker, guard, thread in self._ended:
            if guard.is_free:
                self._wait_for_teardown(worker, thread)
            else:
                busy.append((guard, thread))
        super().close()
        give_up_at = time.monotonic() + END_TIMEOUT_S
        # a daemon thread in native code can abort the process when the interpreter shuts down
        for guard, thread in busy:
            is_free = guard.is_free
            thread.join(TEARDOWN_TIMEOUT_S if is_free else max(0.0, give_up_at - time.monotonic()))
            if thread.is_alive():
                _turns.take_from(thread)


def _work(calls: queue.SimpleQueue[Callable[[], bool] | None]) -> None:
    try:
        while (call := calls.get()) is not None:
            is_alive = call()
            del call  # while it waits for the next, it holds nothing
            if not is_alive:
                return
    finally:
        end_thread()
