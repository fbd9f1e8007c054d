"""One attempt in the managed lane: Ray Train's guests visit the pool's workers.

A gang holds the pool's workers, which do nothing meanwhile: so their GPUs are the pool's all the time, nobody else gets them, and
Ray is never asked for one. `fit` runs in a thread. Everything that happens comes as a message to another thread, which conducts;
it lets the workers go when nothing of Ray Train's is left.

Imports Ray Train, and with it torch: it is imported by the verb only.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import InvalidStateError
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import ray
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

from raypool.engine import packing
from raypool.engine.backend import WorkerInfo
from raypool.engine.engine import Engine
from raypool.engine.hub import Hub
from raypool.engine.ray_calls import UNRECORDED, when_done
from raypool.errors import InternalError, PoolClosedError, TaskError
from raypool.futures import Future
from raypool.options import Options
from raypool.queues import DataQueue
from raypool.spmd.run import submit_gang
from raypool.train import outcome
from raypool.train.guests import SAME_AS_HOST, TASK, Guest, Host, Seat
from raypool.train.letterbox import Letterbox
from raypool.train.outcome import Said
from raypool.train.plan import Plan, RankEnd
from raypool.train.trainers import SETTINGS, Guests, make_trainer, remove_groups

if TYPE_CHECKING:
    import pandas as pd

ABORT_S = 3.0
"""So long the controller has to end by itself; while it starts its workers it does not listen [s]."""

LAST_LETTERS_S = 5.0

GONE_S = 5.0

TAKE_S = 30.0

_marks = itertools.count(1)


class ManagedAttempt(Future[list[RankEnd]]):
    """The future of an attempt in the managed lane."""

    @property
    def metrics(self) -> pd.DataFrame:
        """What was reported so far; see `SpmdFuture.metrics`."""
        return self._caught_up().metrics("rank")


class Visited(Protocol):
    """What a visit is for: a pool, the loop (also packed, with its configuration), and what Ray Train is given."""

    engine: Engine
    loop: Callable[..., Any]
    packed: packing.Packed
    trainer: Any
    datasets: Mapping[str, Any] | None
    release_workers: bool


class Visit:
    """An attempt, conducted by a thread of its own."""

    def __init__(self, host: Visited, plan: Plan, size: int, options: Options) -> None:
        self._host = host
        self._plan = plan
        self._size = size
        self._options = options
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._future = ManagedAttempt(plan.name, on_ask=lambda _: self._inbox.put(("ask",)))
        self._hub = Hub()
        self._hub.watch(TASK, self._future)
        self._hold: Future[Any] | None = None
        self._seats: dict[int, Seat] = {}
        self._mark = next(_marks)
        self._letterbox: Any = None
        self._controller: Any = None
        self._leave_settings: Callable[[], None] = lambda: None
        self._group = 1
        self._ends: dict[int, RankEnd] = {}
        self._said: dict[int, Said] = {}
        self._outcome: Any = None  # what `fit` has returned or raised
        self._deadline: float | None = None
        self._kill_at: float | None = None
        self._is_ending = False
        self._is_over = False
        self._is_late = False
        self._mistake: BaseException | None = None
        self._has_told_stop = False
        self._guests_here: list[psutil.Process] = []

    def begin(self, places: tuple[int, ...] | None) -> ManagedAttempt:
        """Ask for the workers; return the future."""
        engine = self._host.engine
        seats: DataQueue[Seat] = DataQueue()
        names = (*SAME_AS_HOST, *engine.profile.worker_env)
        # Who waits for the workers is patient; the time counts from when there are all.
        options = replace(self._options, timeout_s=None, name=self._plan.name)
        self._hold = submit_gang(
            engine, Host(self._host.loop, seats, names), (), options, self._size, places, is_fresh=self._host.release_workers
        )
        self._hold.whole = self._future
        listener = seats.after_each(lambda seat: self._inbox.put(("seat", seat)))
        self._hold.add_done_callback(self._note_end_of_hold)
        thread = threading.Thread(
            target=self._conduct, args=(listener.remove,), name=f"raypool-managed-{self._plan.name}", daemon=True
        )
        engine.helpers.add(thread)
        thread.start()
        return self._future

    def _note_end_of_hold(self, hold: Any) -> None:
        """Take it that the workers are held no more: one was lost, or the pool has cancelled what runs."""
        if hold.cancelled() and not self._is_over:
            self._future.cancel()
        self._inbox.put(("hold",))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _conduct(self, stop_listening: Callable[[], None]) -> None:
        assert self._hold is not None
        try:
            if self._has_workers() and self._start():
                self._train()
        except BaseException as error:
            self._mistake = error
        finally:
            with contextlib.suppress(Exception):
                self._sweep()
            self._is_over = True
            self._hold.cancel()
            stop_listening()
            self._resolve()

    def _has_workers(self) -> bool:
        """Wait until all hosts have said who they are; return whether they have."""
        while len(self._seats) < self._size:
            kind, *rest = self._inbox.get()
            if kind == "seat":
                self._seats[rest[0].rank] = rest[0]
            elif kind == "hold" or self._future.cancelled():
                return False
        return True

    def _start(self) -> bool:
        """Begin, unless nobody wants it any more."""
        if not self._future.start():
            return False
        self._future.started_at, self._future.attempts = datetime.now(UTC), 1
        if self._options.timeout_s is not None:
            self._deadline = time.monotonic() + self._options.timeout_s
        return True

    def _train(self) -> None:
        if not ray.is_initialized():  # asking anything of it would start a new one
            raise PoolClosedError("Ray was shut down before the training began.")
        self._letterbox = ray.remote(Letterbox).options(num_cpus=0, max_concurrency=1000, **UNRECORDED).remote()
        self._listen()
        self._tell_stop()
        with contextlib.suppress(FileNotFoundError):
            # Ray Train would begin with the last checkpoint that is listed there; this run begins with the plan's.
            (Path(self._plan.run_dir) / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).unlink()
        host, plan = self._host, self._plan
        guest = Guest(host.packed, self._letterbox, plan, self._options.retry_on)
        trainer = make_trainer(host.trainer, guest, plan, self._guests(), host.datasets)
        self._leave_settings = SETTINGS.enter(host.engine.profile.start_timeout_s)
        threading.Thread(target=self._fit, args=(trainer,), name=f"raypool-fit-{plan.name}", daemon=True).start()
        while self._outcome is None:
            self._take(self._next())
        self._take_last_letters()

    def _guests(self) -> Guests:
        seats = [self._seats[rank] for rank in range(self._size)]
        shared = set.intersection(*({*seat.environment.items()} for seat in seats))
        environment = {name: value for name, value in shared if value is not None and name in self._shared_names()}
        restarts = max(self._options.retries - (self._plan.attempt - 1), 0)
        return Guests(seats, self._mark, environment, restarts, self._letterbox)

    def _shared_names(self) -> set[str]:
        return {"CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", *self._host.engine.profile.worker_env}

    def _fit(self, trainer: Any) -> None:
        """Run Ray Train, in a thread: in the main thread it would take Ctrl-C for itself, for good."""
        try:
            result = trainer.fit()
        except BaseException as error:
            self._inbox.put(("fit", error))
        else:
            self._inbox.put(("fit", result))
        finally:
            self._leave_settings()

    def _listen(self) -> None:
        """Have letters brought, when there are some."""
        when_done(self._letterbox.take.remote(TAKE_S), lambda letters: self._inbox.put(("letters", letters)))

    def _next(self) -> tuple[Any, ...]:
        """Return the next message, or what the clock says."""
        limits = [each for each in (self._deadline, self._kill_at) if each is not None]
        try:
            return self._inbox.get(timeout=max(min(limits) - time.monotonic(), 0.0) if limits else None)
        except queue.Empty:
            return ("clock",)

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "letters":
            self._take_letters(rest[0])
        elif kind == "fit":
            self._outcome = rest[0]
        elif kind == "ask":
            if self._future.cancelled():
                self._end()
            self._tell_stop()
        elif kind == "hold":
            self._end()
        elif kind == "clock":
            self._look_at_clock()

    def _take_letters(self, letters: Any) -> bool:
        """Take what has come; return whether it was the last."""
        if isinstance(letters, BaseException):  # the letterbox has gone, and without it nobody gets on
            if self._outcome is None:
                self._end()
            return True
        is_last = False
        for kind, *rest in letters:
            if kind == "closed":
                is_last = True
            else:
                self._take_letter(kind, rest)
        if not is_last:
            self._listen()
        return is_last

    def _take_letter(self, kind: str, rest: list[Any]) -> None:
        if kind == "batch":
            group, rank, number, batch = rest
            self._hub.deliver(group * self._size + rank, number, batch)
        elif kind == "group":
            self._group = self._future.attempts = rest[0]
            self._ends, self._said = {}, {}
        elif kind == "end":
            self._ends[rest[0]] = RankEnd(rest[1], rest[2])
        elif kind == "failure":
            self._said[rest[0]] = Said(*rest[1:])
        elif kind == "guest":
            self._note_guest(*rest)
        elif kind == "controller":
            self._controller = rest[0]
            self._leave_settings()
            if self._is_ending:
                self._abort()

    def _note_guest(self, host: str, pid: int) -> None:
        if host == platform.node():
            with contextlib.suppress(psutil.Error):
                self._guests_here.append(psutil.Process(pid))

    def _tell_stop(self) -> None:
        if self._future.stop_requested and self._letterbox is not None and not self._has_told_stop:
            self._has_told_stop = True
            self._letterbox.ask_to_stop.remote()

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if not self._is_ending:
                self._is_late = True
                self._end()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            ray.kill(self._controller)

    def _end(self) -> None:
        """Let Ray Train come to its end, now."""
        if not self._is_ending:
            self._is_ending = True
            if self._controller is not None:
                self._abort()

    def _abort(self) -> None:
        self._controller.abort.remote()
        self._kill_at = time.monotonic() + ABORT_S

    def _take_last_letters(self) -> None:
        """Take what was said before the end."""
        self._letterbox.close.remote()
        deadline = time.monotonic() + LAST_LETTERS_S
        with contextlib.suppress(queue.Empty):
            while (left := deadline - time.monotonic()) > 0:
                kind, *rest = self._inbox.get(timeout=left)
                if kind == "letters" and self._take_letters(rest[0]):
                    return

    # --- its end ------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Leave nothing behind: Ray Train does, where its controller was killed."""
        if not ray.is_initialized():
            return
        if self._letterbox is not None:
            ray.kill(self._letterbox)
        if self._controller is not None and self._outcome is None:
            ray.kill(self._controller)
        if self._letterbox is not None and not isinstance(self._outcome, ray.train.Result):
            remove_groups(self._mark)
        self._tidy_folder()
        psutil.wait_procs(self._guests_here, GONE_S)  # they have been killed; their memory is on the GPU until they are gone

    def _tidy_folder(self) -> None:
        """Leave no folder in which nothing is kept: Ray Train makes it, and a file in it, to see that it can write there."""
        folder = Path(self._plan.run_dir)
        with contextlib.suppress(OSError):
            (folder / ".validate_storage_marker").unlink(missing_ok=True)
            folder.rmdir()

    def _resolve(self) -> None:
        future, hold = self._future, self._hold
        assert hold is not None
        future.finished_at = future.finished_at or datetime.now(UTC)
        if future.cancelled():
            future.worker_replaced = False
            future.notify_cancelled()
            return
        if not future.running() and not future.start():
            future.notify_cancelled()
            return
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            try:
                future.set_result(self._result())
            except BaseException as error:
                future.set_exception(error)

    def _result(self) -> list[RankEnd]:
        """Return what the ranks have returned.

        Raises:
            SpmdError, ResourceError, TrainingError: They have failed.
        """
        hold = self._hold
        assert hold is not None
        if self._mistake is not None:
            raise self._mistake
        case = outcome.Case(
            self._plan.name,
            self._size,
            self._workers(),
            self._plan.attempt + self._group - 1,
            self._host.engine.profile.start_timeout_s,
        )
        if len(self._ends) == self._size and not isinstance(self._outcome, BaseException):
            if any(end.value is None for end in self._ends.values()):
                raise outcome.left(case)
            return [self._opened(rank) for rank in range(self._size)]
        if self._is_late:
            assert self._options.timeout_s is not None
            raise outcome.late(case, self._options.timeout_s, list(self._ends))
        if hold.done() and not hold.cancelled() and (error := hold.exception()) is not None:
            raise error
        if isinstance(self._outcome, BaseException):
            raise outcome.failure(case, self._outcome, self._said)
        raise InternalError(f"{self._plan.name} has ended, but not all ranks have said how.", story=())

    def _opened(self, rank: int) -> RankEnd:
        packed, metrics = self._ends[rank]
        try:
            return RankEnd(pickle.loads(packed), metrics)
        except Exception as error:
            raise TaskError(
                f"What rank {rank} of {self._plan.name} has returned cannot be unpickled here ({type(error).__name__}: {error}). "
                "Its class must be importable in this process too."
            ) from error

    def _workers(self) -> dict[int, WorkerInfo]:
        infos = {worker.index: worker for worker in self._host.engine.workers()}
        return {rank: infos[seat.worker] for rank, seat in self._seats.items() if seat.worker in infos}
