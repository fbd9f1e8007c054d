"""The backend on Ray: one actor for each worker, pinned to what its place has claimed."""

from __future__ import annotations

import contextlib
import functools
import pickle
import platform
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray

from raypool.core.messages import AttemptFinished, WorkerLost, WorkerReady
from raypool.engine import packing
from raypool.engine.backend import Failure, Function, Part, Post, SliceResult, WorkerInfo
from raypool.engine.claims import Claim
from raypool.engine.ray_failures import loss_reason, loss_text
from raypool.engine.ray_session import leave_ray
from raypool.engine.ray_values import MessageValues, StoredValues, bring_home
from raypool.engine.seating import Seating
from raypool.engine.worker import PoolWorker, pack_call
from raypool.errors import LossReason, TaskError
from raypool.futures import Values
from raypool.profiles import Profile

CLOSE_TIMEOUT_S = 5.0

WATCH_S = 1.0
"""How soon a worker that dies while it is idle is replaced, and an end of Ray is noticed [s]."""

ACTOR_DEAD = 4  # ray.core.generated.gcs_pb2.ActorTableData.DEAD


RAY_ENDED = "Ray was shut down while the pool was open"


class Seat:
    """A place: a claim, and the actor in it."""

    __slots__ = ("__weakref__", "actor", "calls", "claim", "known", "process", "run", "stale", "worker_id")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.worker_id = -1
        self.actor: Any = None
        self.run: Any = None  # its method, ready to be called
        self.known: set[int] = set()  # functions that the worker has
        self.process: psutil.Process | None = None  # if it is on this machine
        self.calls = 0  # in flight
        self.stale: list[int] = []  # those of them that nobody will call again


class RayBackend:
    """Workers as Ray actors; `join_ray` was called for it, and it will call `leave_ray`.

    Everything but `claim` is called by the driver's thread; Ray's own threads post what comes back.
    """

    def __init__(self, profile: Profile, post: Post) -> None:
        self._profile = profile
        self._post = post
        self._seating = Seating(profile)
        self._seats: dict[int, Seat] = {}
        self._by_worker: dict[int, Seat] = {}
        self._actor_class = ray.remote(PoolWorker)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="raypool-watch", daemon=True).start()

    # --- places -------------------------------------------------------------------------------------------------------

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim what so many workers stand on."""
        claims = self._seating.claim(least, most)
        self._seats.update((place, Seat(claim)) for place, claim in claims.items())
        return list(claims)

    def vacate(self, place: int) -> None:
        """Kill the worker in a place; the last one to leave a claim gives it back."""
        seat = self._seats.pop(place, None)
        if seat is None:
            return
        left = self._seating.leave(place)
        self._dismiss(seat)
        if left is not None and ray.is_initialized():
            self._seating.give_back(left)

    def _dismiss(self, seat: Seat) -> None:
        self._by_worker.pop(seat.worker_id, None)
        if seat.actor is not None and ray.is_initialized():
            ray.kill(seat.actor)
        seat.actor = None

    # --- workers ------------------------------------------------------------------------------------------------------

    def start_worker(self, worker_id: int, place: int) -> None:
        """Start an actor in a place; it is ready when it has introduced itself."""
        seat = self._seats[place]
        self._dismiss(seat)
        if not ray.is_initialized():  # asking anything of it would start a new one
            self._post(WorkerLost(worker_id, LossReason.START), RAY_ENDED)
            return
        demand = seat.claim.demand
        options: dict[str, Any] = {
            "num_cpus": demand.worker_cpus,
            "num_gpus": demand.worker_gpus,
            "scheduling_strategy": seat.claim.strategy(),
            "max_restarts": 0,
        }
        if demand.worker_memory_bytes:
            options["memory"] = demand.worker_memory_bytes
        if self._profile.env:
            options["runtime_env"] = {"env_vars": dict(self._profile.env)}
        seat.worker_id, seat.known, seat.stale, seat.calls = worker_id, set(), [], 0
        seat.process = None
        seat.actor = self._actor_class.options(**options).remote(place)
        seat.run = seat.actor.run.remote
        self._by_worker[worker_id] = seat
        self._answered(worker_id, seat.actor.introduce.remote(), functools.partial(self._on_introduced, worker_id))

    def _answered(self, worker_id: int, ref: Any, take: Callable[[Any], None]) -> None:
        """Let `take` have the answer to a call, in a thread of Ray's; whatever goes wrong there, the driver is told."""

        def take_safely(answer: Any) -> None:
            try:
                take(answer)
            except BaseException as error:
                self._post(WorkerLost(worker_id, LossReason.UNKNOWN), f"its answer could not be read: {error!r}")

        _when_done(ref, take_safely)

    def _on_introduced(self, worker_id: int, answer: Any) -> None:
        if isinstance(answer, WorkerInfo):
            self._note_process(worker_id, answer)
            self._post(WorkerReady(worker_id), answer)
        else:
            self._post(WorkerLost(worker_id, LossReason.START), answer if isinstance(answer, str) else loss_text(answer))

    def _note_process(self, worker_id: int, info: WorkerInfo) -> None:
        seat = self._by_worker.get(worker_id)
        if seat is not None and info.host == platform.node():
            with contextlib.suppress(psutil.NoSuchProcess):
                seat.process = psutil.Process(info.pid)

    # --- calls --------------------------------------------------------------------------------------------------------

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Pickle a value; a large one is put into the object store once, however many workers will read it."""
        return packing.pack(value, what, is_trial=is_trial)

    def run(self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function]) -> None:
        """Call the actor."""
        seat = self._by_worker[worker_id]
        if self._is_dead(seat):
            self._post(WorkerLost(worker_id, LossReason.EXIT, was_idle=seat.calls == 0), "its process ended while it was idle")
            return
        seat.calls += 1
        new = {}
        for function in functions:
            if function.fn_id not in seat.known:
                seat.known.add(function.fn_id)
                new[function.fn_id] = function.packed
                weakref.finalize(function, _note_stale, weakref.ref(seat), function.fn_id).atexit = False
        stale, seat.stale = seat.stale, []
        seat.known.difference_update(stale)
        call = pack_call(parts, new, stale)
        status, values = seat.run(call.header, call.refs) if call.refs else seat.run(call.header)
        self._answered(worker_id, status, functools.partial(self._on_status, worker_id, attempt_id, values))

    def _is_dead(self, seat: Seat) -> bool:
        """Whether the worker is dead already: what is sent to it now would never begin.

        By the state that this process has heard of, without asking anybody; private, checked on Ray 2.60.
        """
        if not ray.is_initialized() or seat.actor is None:
            return True
        if seat.process is not None and not _lives(seat.process):
            return True  # on this machine; Ray hears of it some tenths of a second later
        worker = ray._private.worker.global_worker
        return bool(worker.core_worker.get_local_actor_state(seat.actor._actor_id) == ACTOR_DEAD)

    def _watch(self) -> None:
        """Report workers that die while nothing runs in them, and an end of Ray: no call comes back to tell of these."""
        while not self._closed.wait(WATCH_S):
            for worker_id, seat in list(self._by_worker.items()):
                with contextlib.suppress(Exception):  # the seat may change hands meanwhile; the next look sees
                    self._look_after(worker_id, seat)

    def _look_after(self, worker_id: int, seat: Seat) -> None:
        if not ray.is_initialized():
            self._post(WorkerLost(worker_id, LossReason.NODE), RAY_ENDED)
        elif seat.calls == 0 and seat.actor is not None and self._is_dead(seat):
            self._post(WorkerLost(worker_id, LossReason.EXIT, was_idle=True), "its process ended while it was idle")

    def _on_status(self, worker_id: int, attempt_id: int, values_ref: Any, answer: Any) -> None:
        seat = self._by_worker.get(worker_id)
        if seat is not None:
            seat.calls -= 1
        if not isinstance(answer, bytes):
            self._post(WorkerLost(worker_id, loss_reason(answer)), loss_text(answer))
            return
        sendables, header = pickle.loads(answer)
        values: Values = MessageValues(header) if header is not None else StoredValues(values_ref)
        results = []
        offset = 0
        for start, done, durations, started_at, errors in sendables:
            failures = {index: _unpacked_failure(packed) for index, packed in errors.items()}
            results.append(SliceResult(start, done, values, offset, failures, array("d", durations), started_at))
            offset += done
        self._post(AttemptFinished(worker_id, attempt_id, ()), results)

    def close(self) -> None:
        """End all workers, give back all claims, and end Ray if it was started for this pool; values stay within reach."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._seating.stop_claiming()
            for place in list(self._seats):
                self.vacate(place)
            if ray.is_initialized():
                self._seating.close(CLOSE_TIMEOUT_S)
        finally:
            leave_ray(bring_home)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _note_stale(seat_ref: weakref.ref[Seat], fn_id: int) -> None:
    seat = seat_ref()
    if seat is not None:
        seat.stale.append(fn_id)


def _when_done(ref: Any, callback: Callable[[Any], None]) -> None:
    """Call back, in a thread of Ray's, with the object or Ray's exception.

    What `ObjectRef.future()` is made of, without the future: 4 % of a round trip. Private, checked on Ray 2.60. The reference has
    to live until then, or Ray forgets the object that it is to call back about.
    """
    ref._on_completed(lambda answer, _ref=ref: callback(answer))


def _unpacked_failure(packed: bytes) -> Failure:
    body, summary, text, notes = pickle.loads(packed)
    try:
        error = pickle.loads(body)
    except BaseException:  # it runs code of the user's
        error = None
    if not isinstance(error, BaseException):
        error = TaskError(f"{summary} (the exception itself could not travel; the remote traceback is its cause)")
    with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
    return Failure(error, text)
