"""The backend on Ray: one actor for each worker, pinned to the claim of its place.

`RayBackend` is the backend, `Slot` a place as it knows it, and `Pulse` notices the end of a process
of this machine, before Ray does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import platform
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from raypool.backends.base import Post
from raypool.backends.ray import client, packing
from raypool.backends.ray.agents import END_TIMEOUT_S, Agents, Chore, MemoryLimit
from raypool.backends.ray.calls import UNRECORDED, aside, loss_reason, loss_text, when_done
from raypool.backends.ray.card_sharing import SharedGpus
from raypool.backends.ray.claims import Claim, locate
from raypool.backends.ray.client import is_outside, note_deaths
from raypool.backends.ray.demand import Demand
from raypool.backends.ray.nodes import CutOff, Nodes, NodeWatch, look, why_cut_off
from raypool.backends.ray.packing import (
    MessageValues,
    StoredValues,
    bring_home,
    unpack_narrowed,
    unpack_results,
)
from raypool.backends.ray.placement import Placement
from raypool.backends.ray.session import connection, give_up_ray, is_up, leave_ray
from raypool.backends.ray.warning_filters import filters_here
from raypool.backends.ray.worker import Introduction, News, PoolWorker, pack_call
from raypool.channel.captured import changed_model
from raypool.channel.hub import Hub
from raypool.channel.logs import Levels, levels_here
from raypool.channel.queues import add_source, drop_source
from raypool.channel.records import Function, NodeDevices, Part, Values, WorkerInfo
from raypool.channel.traffic import Traffic
from raypool.channel.users_code import Snapshot, different_module
from raypool.core.messages import AttemptFinished, AttemptNarrowed, Signal, WorkerLost, WorkerReady
from raypool.errors import LossReason
from raypool.profiles import Profile
from raypool.worker.gpu_memory import LeftoverMemory
from raypool.worker.gpu_turns import Sharing
from raypool.worker.running import ExchangeClient

CLOSE_TIMEOUT_S = 5.0

GIVEN_UP_S = 60.0
"""How long closing a pool waits at most once its Ray was given up [s]."""

WIND_UP_TIMEOUT_S = 10.0
"""How long the teardown of workers may take [s]."""

WOUND_UP_LATE = (
    "What worker %d ends with (teardown, cleanup of constants) had not ended after %g s; it is"
    " killed."
)

logger = logging.getLogger("raypool")

WATCH_S = 1.0
"""How soon a worker that dies while it is idle is replaced, and an end of Ray is noticed [s]."""

RAY_ENDED = "Ray was shut down while the pool was open"


class RayBackend:
    """Workers as Ray actors; `join_ray` was called for it, and it will call `leave_ray`.

    Everything but `claim` is called by the driver's thread; Ray's own threads post what comes back.
    """

    def __init__(self, profile: Profile, post: Post, hub: Hub, traffic: Traffic) -> None:
        self._profile = profile
        self._post = post
        self._hub = hub
        self._traffic = traffic
        hub.on_early = self._on_early
        self._seating = Placement(profile)
        self._seats: dict[int, Slot] = {}
        self._by_worker: dict[int, Slot] = {}
        self._actor_class = ray.remote(PoolWorker)
        self._nodes = NodeWatch(self, post, profile.cancel_grace_s)
        self._agents = Agents(hub, profile.cancel_grace_s, self._nodes.stays, profile.inventory)
        add_source(self._agents)
        self.gpu_memory = self._agents.gpu_memory
        self._cards: SharedGpus | None = None
        if profile.workers_per_gpu == "auto":
            self._cards = SharedGpus(
                self._seating, self.take_in, post, None if profile.mps else self._ask_usage
            )
        self._teardown = (
            packing.pack(profile.teardown, "the teardown") if profile.teardown is not None else None
        )
        # functions of which it was said that they leave too much on a GPU
        self._leaky: set[str] = set()
        # the newest of the driver's modules that a function came with
        self._project: Snapshot | None = None
        # functions of which it was said that they change a model
        self._changing: set[tuple[str, str]] = set()
        # modules, and machines of which it was said that they have other versions
        self._different: set[tuple[str, str]] = set()
        # workers that have not quite ended, and what is to be done then
        self._retiring: dict[int, tuple[Any, Chore]] = {}
        self._retired = threading.Condition()
        self._nodes.start()
        self._joined = connection()
        self._is_outside = is_outside()
        self._ending = RAY_ENDED  # what to say of an end of Ray
        self._closed = threading.Event()
        self._is_cut_off = threading.Event()
        self._left = threading.Event()  # set once nothing needs the watch on Ray any more
        threading.Thread(target=self._watch, name="raypool-watch", daemon=True).start()

    def find_way(self) -> ExchangeClient:
        """Return the way to the pool's exchange."""
        return self._agents

    def devices(self) -> list[NodeDevices]:
        """Ask the agents of the pool's nodes."""
        return self._agents.devices()

    # --- places -----------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the pool takes no more work; see `Backend`."""
        return self._seating.is_ending

    @is_ending.setter
    def is_ending(self, is_ending: bool) -> None:
        self._seating.is_ending = is_ending

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim resources for so many workers."""
        claims = self._seating.claim(least, most)
        self.take_in(claims)
        return list(claims)

    def take_in(self, claims: dict[int, Claim]) -> None:
        """Take note of new places and their claims."""
        self._seats.update((place, Slot(place, claim)) for place, claim in claims.items())

    def _ask_usage(self, *args: Any) -> None:
        """Do as `Agents.usage`, from any thread."""
        self._agents.later(functools.partial(self._agents.usage, *args))

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """Let somebody set the size of the pool, which it keeps then."""
        with self._nodes.sizing():
            yield
            if self._cards is not None:
                self._cards.settle()

    def look(self) -> Nodes:
        """Ask for the nodes of the cluster."""
        note_deaths([seat.actor for seat in list(self._by_worker.values())])
        return look()

    def places(self) -> dict[int, str | None]:
        """Return which node each place is on."""
        return {place: seat.claim.node_id for place, seat in list(self._seats.items())}

    def find(self, place: int) -> str | None:
        """Ask where a place is now."""
        return locate(seat.claim) if (seat := self._seats.get(place)) is not None else None

    def grow(self, most: int) -> list[int]:
        """Claim up to so many places; chosen GPUs of machines that have come back, but those of
        this machine cannot.
        """
        if isinstance(self._profile.gpus, tuple):
            return []
        claim = functools.partial(self.claim, 0)
        return claim(most) if self._cards is None else self._cards.regain(most, claim)

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """End the worker in a place, in good order if it is free; the last one to leave a claim
        gives it back.
        """
        seat = self._seats.get(place)
        if seat is None:
            return
        left = None
        if not keep:
            del self._seats[place]
            left = self._seating.leave(place)
            if self._cards is not None:
                self._cards.left(
                    place, seat.claim, is_lost=not self._nodes.stays(str(seat.claim.node_id))
                )
        self._retire(seat, functools.partial(self._give_back, left))

    def _give_back(self, left: Claim | None) -> None:
        if left is not None and is_up():
            aside(functools.partial(self._seating.give_back, left))

    @property
    def demands(self) -> list[Demand]:
        """What each kind of the pool's workers takes."""
        return self._seating.demands

    def lend(self, places: Sequence[int]) -> None:
        """Give the claims of a loan's workers back, once these have ended; wait until others can
        have them.
        """
        seats = [self._seats[place] for place in places if place in self._seats]
        with self._retired:
            ended = lambda: all(seat.worker_id not in self._retiring for seat in seats)  # noqa: E731
            self._retired.wait_for(ended, WIND_UP_TIMEOUT_S + END_TIMEOUT_S)
        if is_up():
            self._seating.lend([seat.claim for seat in seats])

    def take_back(self, workers: Sequence[WorkerInfo]) -> dict[int, str]:
        """Claim again what was lent: the same GPUs, or cores of the same nodes. Waits for them as
        the start of the pool does.

        Returns:
            By place, why it cannot be had: who has the GPU.
        """
        lent = [
            (worker, self._seats[worker.index]) for worker in workers if worker.index in self._seats
        ]
        claims = self._seating.take_back(
            {worker.index: (seat.claim, worker.gpu) for worker, seat in lent}
        )
        for worker, seat in lent:
            seat.claim = claims.get(worker.index, seat.claim)
        return {
            worker.index: self._seating.why_taken(worker.gpu)
            for worker, _ in lent
            if worker.index not in claims
        }

    def _retire(self, seat: Slot, then: Chore) -> None:
        """End the worker of a slot; `then` is called when nothing of it is left."""
        actor, worker_id, is_free = seat.actor, seat.worker_id, seat.is_idle and not seat.is_ending
        self._by_worker.pop(worker_id, None)
        seat.actor = None
        if actor is None or not is_up():
            then()
            return
        self._retiring[worker_id] = actor, then

        def finish() -> None:
            then()
            with self._retired:
                self._retiring.pop(worker_id, None)
                self._retired.notify_all()

        def end(words: Any = None) -> None:
            if isinstance(words, str):
                logger.warning("What worker %d ends with has failed:\n%s", seat.place, words)
            elif isinstance(words, TimeoutError):
                logger.warning(WOUND_UP_LATE, seat.place, WIND_UP_TIMEOUT_S)
            self._agents.end(worker_id, actor, finish)

        if is_free and self._agents.knows(worker_id):
            self._agents.within(WIND_UP_TIMEOUT_S, actor.wind_up.remote(self._teardown), end)
        else:
            end()

    # --- workers ----------------------------------------------------------------------------------

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start an actor in a place; it is ready when it has introduced itself."""
        seat = self._seats[place]
        self._retire(seat, functools.partial(self._give_back, None))
        if not is_up():  # asking Ray anything would start a new one
            self._post(WorkerLost(worker_id, LossReason.START), self._ending)
            return
        demand = seat.claim.demand
        options: dict[str, Any] = {
            "num_cpus": demand.worker_cpus,
            "num_gpus": demand.worker_gpus,
            "scheduling_strategy": seat.claim.strategy(),
            "max_restarts": 0,
            **UNRECORDED,
        }
        if demand.worker_memory_bytes:
            options["memory"] = demand.worker_memory_bytes
        if env := self._profile.worker_env:
            options["runtime_env"] = {"env_vars": env}
        seat.take_in(worker_id)
        seat.actor = self._actor_class.options(**options).remote(
            place,
            worker_id,
            self._profile.inventory,
            self._sharing(seat),
            self._profile.max_leftover_bytes,
        )
        seat.run = seat.actor.run.remote
        self._by_worker[worker_id] = seat
        packed = tuple(packing.dump([setup.packed for setup in setups]))
        agent = self._agents.for_mps(seat.claim) if self._profile.mps else None
        project = self._news(seat, setups)
        # a setup was packed long ago: a worker that replaces an outdated one would be so itself
        if self._project is not None:
            project, seat.project = self._project, self._project.number
        introduction = seat.actor.introduce.remote(packed, agent, project)
        self._answered(worker_id, introduction, functools.partial(self._on_introduced, worker_id))

    def _sharing(self, seat: Slot) -> Sharing | None:
        """Return how the worker in a place shares its GPU, None if it shares none."""
        if self._cards is not None:
            return self._cards.moved_in(seat.place, seat.claim)
        num_workers = seat.claim.demand.workers_per_claim
        return Sharing(num_workers) if num_workers > 1 else None

    def _answered(self, worker_id: int, ref: Any, take: Callable[[Any], None]) -> None:
        """Let `take` have the answer to a call, in a thread of Ray's; whatever goes wrong there,
        the driver is told.
        """

        def take_safely(answer: Any) -> None:
            try:
                take(answer)
            except BaseException as error:
                self._lose(
                    worker_id, LossReason.UNKNOWN, f"its answer could not be read: {error!r}"
                )

        when_done(ref, take_safely)

    def _on_introduced(self, worker_id: int, answer: Any) -> None:
        if isinstance(answer, Introduction):
            self._note_process(worker_id, answer.info)
            self._agents.later(functools.partial(self._settle_in, worker_id, answer))
        else:
            self._lose(
                worker_id,
                LossReason.START,
                answer if isinstance(answer, str) else loss_text(answer),
            )

    def _settle_in(self, worker_id: int, introduction: Introduction) -> None:
        """Let a worker be watched over, and take calls."""
        seat = self._by_worker.get(worker_id)
        if seat is None or seat.actor is None:
            return  # the worker was given up meanwhile
        limit = seat.claim.demand.worker_memory_bytes
        memory = (
            MemoryLimit(limit, functools.partial(self._on_memory, worker_id, limit))
            if limit
            else None
        )
        seat.claim.node_id = introduction.node_id
        self._agents.attach(worker_id, introduction, seat.actor, memory)
        self._post(WorkerReady(worker_id), introduction.info)

    def _on_memory(self, worker_id: int, limit: int, used: int) -> None:
        words = (
            f"it used {used / 1e9:.2f} GB of memory, and its memory_bytes allows"
            f" {limit / 1e9:.2f} GB"
        )
        self._lose(worker_id, LossReason.OUT_OF_MEMORY, words)

    def _lose(
        self,
        worker_id: int,
        reason: LossReason,
        words: str,
        was_idle: bool = False,
        during: int | None = None,
    ) -> None:
        """End a worker, unless it has ended the attempt `during`, and tell the driver, once, when
        nothing is left; any thread.
        """
        seat = self._by_worker.get(worker_id)
        if seat is None or seat.is_ending or (during is not None and during not in seat.calls):
            return
        seat.is_ending = True
        tell = functools.partial(
            self._nodes.tell_lost,
            WorkerLost(worker_id, reason, was_idle),
            words,
            seat.claim.node_id,
        )
        self._agents.later(lambda: self._agents.end(worker_id, seat.actor, tell))

    def _note_process(self, worker_id: int, info: WorkerInfo) -> None:
        seat = self._by_worker.get(worker_id)
        if seat is not None and info.host == platform.node():
            # it has gone, or this process has too many files open: Ray will say
            with contextlib.suppress(OSError):
                seat.pulse = Pulse(info.pid)

    # --- calls ------------------------------------------------------------------------------------

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Pickle a value; a large one is put into the object store once, however many workers will
        read it.
        """
        return packing.pack(value, what, is_trial=is_trial)

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Call the actor."""
        seat = self._by_worker[worker_id]
        if seat.is_dead():
            self._lose(
                worker_id,
                LossReason.EXIT,
                "its process ended while it was idle",
                was_idle=seat.is_idle,
            )
            return
        if self._cards is not None:
            parts = self._cards.sent(seat.place, seat.claim, attempt_id, parts)
        levels, filters = levels_here(), filters_here()
        with seat.lock:
            seat.calls[attempt_id] = behind
            stale, new = seat.take_stale(), {}
            for function in functions:
                if function.fn_id not in seat.known:
                    seat.known.add(function.fn_id)
                    new[function.fn_id] = function.packed
                    weakref.finalize(
                        function, note_stale, weakref.ref(seat), function.fn_id
                    ).atexit = False
            news = News(
                new,
                stale,
                self._news(seat, functions),
                None if levels is seat.levels else levels,
                None if filters is seat.filters else filters,
            )
            seat.levels, seat.filters = levels, filters
            call = pack_call(attempt_id, parts, news, seat.is_spent, behind)
            status, values = (
                seat.run(call.header, call.refs) if call.refs else seat.run(call.header)
            )
        self._traffic.add(seat.place, len(call.header), 0)
        self._answered(
            worker_id,
            status,
            functools.partial(self._on_status, worker_id, seat.place, attempt_id, values),
        )

    def _news(self, seat: Slot, functions: Sequence[Function]) -> Snapshot | None:
        """Return the newest snapshot among those of functions, if the worker in a place does not
        have it yet.
        """
        newest = None
        for function in functions:
            if function.project is not None and function.project.number > seat.project:
                newest, seat.project = function.project, function.project.number
        if newest is not None and (self._project is None or newest.number > self._project.number):
            self._project = newest
        return newest

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Let the agent of the worker's node interrupt it; if that has not helped in time, the
        worker is killed.
        """
        stopped = functools.partial(
            self._lose,
            worker_id,
            LossReason.STOPPED,
            "a cancelled task did not stop",
            during=attempt_id,
        )
        self._agents.signal(worker_id, attempt_id, task_id, wish, stopped)

    def _watch(self) -> None:
        """Look after workers in which nothing runs, and notice an end of Ray: no call comes back to
        tell of these.
        """
        while not self._left.wait(WATCH_S):
            cut_off = why_cut_off(
                self._nodes.silent_s(WATCH_S), self._nodes.is_adrift, self._is_outside
            )
            if cut_off is not None:
                self._let_go(cut_off)
            for worker_id, seat in (
                list(self._by_worker.items()) if not self._closed.is_set() else ()
            ):
                # the slot may get another worker meanwhile; the next look sees
                with contextlib.suppress(Exception):
                    self._look_after(worker_id, seat)

    def _let_go(self, cut_off: CutOff) -> None:
        """Let go of a Ray that no longer answers: any question to it would hang, and in the end Ray
        ends this process.
        """
        if self._ending != RAY_ENDED or (self._closed.is_set() and not is_up()):
            return  # it is known
        self._ending = cut_off.why
        logger.error("%s; the pool ends.", cut_off.why)
        self._nodes.lose_all(cut_off.why)
        self._is_cut_off.set()
        # asking a dead raylet for a value ends the process
        give_up_ray(bring_home if cut_off.has_values else None)

    def _look_after(self, worker_id: int, seat: Slot) -> None:
        if not is_up():
            self._lose(worker_id, LossReason.NODE, self._ending)
        elif not seat.calls and seat.actor is not None and seat.is_dead():
            self._lose(
                worker_id, LossReason.EXIT, "its process ended while it was idle", was_idle=True
            )
        elif seat.stale:
            with seat.lock:  # else it would keep what they hold until it is called again
                if not seat.calls and seat.actor is not None and (stale := seat.take_stale()):
                    seat.actor.forget.remote(stale)

    def _on_status(
        self, worker_id: int, place: int, attempt_id: int, values_ref: Any, answer: Any
    ) -> None:
        seat = self._by_worker.get(worker_id)
        if seat is not None:
            seat.calls.pop(attempt_id, None)
        if not isinstance(answer, bytes):
            self._lose(worker_id, loss_reason(answer), loss_text(answer))
            return
        sendables, (number, batch), fetched_bytes, weight, header, leftover, others, changed = (
            pickle.loads(answer)
        )
        self._traffic.add(place, fetched_bytes, len(answer))
        catch_up = None
        if number:  # it has said something, now or before
            self._hub.deliver(worker_id, number, batch)
            catch_up = self._hub.waiter(worker_id, number)
        stored = functools.partial(
            StoredValues, values_ref, functools.partial(self._traffic.add, place, 0)
        )
        values: Values = stored() if header is None else MessageValues(header)
        results = unpack_results(sendables, values, catch_up)
        if self._cards is not None and seat is not None:
            self._cards.came_back(worker_id, seat, attempt_id, results, weight)
        is_spent = leftover is not None and leftover.is_spent
        if seat is not None:
            seat.is_spent = is_spent
        if leftover is not None:
            self._note_leftover(leftover)
        if others:
            self._note_others(others)
        for name, model in changed:
            self._note_changed(name, model)
        self._post(AttemptFinished(worker_id, attempt_id, (), is_spent), results)

    def _on_early(self, worker_id: int, message: bytes) -> None:
        """Take what a worker tells of a call that lasts."""
        attempt_id, kept, results = unpack_narrowed(message)
        if (seat := self._by_worker.get(worker_id)) is not None:
            seat.told_of = attempt_id
        self._post(AttemptNarrowed(worker_id, attempt_id, (), kept), results)

    def _note_leftover(self, leftover: LeftoverMemory) -> None:
        """Say that something has left too much on a GPU, once for each function."""
        if leftover.words is not None and leftover.name not in self._leaky:
            self._leaky.add(leftover.name)
            logger.warning("%s", leftover.words)

    def _note_others(self, others: Sequence[tuple[str, str, str]]) -> None:
        """Say, once for each machine, that its workers have another version of a module than this
        process.
        """
        for name, file, host in others:
            if (name, host) not in self._different:
                self._different.add((name, host))
                logger.warning("%s", different_module(name, file, host))

    def _note_changed(self, name: str, model: str) -> None:
        """Say, once for each function, that it has changed a model that it captures."""
        if (name, model) not in self._changing:
            self._changing.add((name, model))
            logger.warning("%s", changed_model(name, model))

    def close(self) -> None:
        """End all workers, give back all claims, and end Ray if it was started for this pool;
        values stay within reach.

        A Ray that does not answer is waited for until `_watch` gives it up, and then for
        `GIVEN_UP_S`.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        ending = threading.Thread(target=self._end_all, name="raypool-close", daemon=True)
        ending.start()
        while ending.is_alive() and not self._is_cut_off.is_set():
            ending.join(WATCH_S)
        ending.join(GIVEN_UP_S)

    def _end_all(self) -> None:
        try:
            self._seating.stop_claiming()
            for place in list(self._seats):
                self.vacate(place)
            with self._retired:
                self._retired.wait_for(
                    lambda: not self._retiring, WIND_UP_TIMEOUT_S + CLOSE_TIMEOUT_S
                )
            if is_up():
                # their node's agent answers nobody
                for actor, then in list(self._retiring.values()):
                    ray.kill(actor)
                    then()
                self._seating.close(CLOSE_TIMEOUT_S)
        finally:
            self._nodes.close()
            self._agents.close()
            self._hub.close()
            drop_source(self._agents)
            self._left.set()
            leave_ray(bring_home, self._joined)


# --- slots ----------------------------------------------------------------------------------------


class Slot:
    """A place of the pool for the backend: a claim, and the actor in it."""

    __slots__ = (
        "__weakref__",
        "actor",
        "calls",
        "claim",
        "filters",
        "is_ending",
        "is_spent",
        "known",
        "levels",
        "lock",
        "place",
        "project",
        "pulse",
        "run",
        "stale",
        "told_of",
        "worker_id",
    )

    def __init__(self, place: int, claim: Claim) -> None:
        self.place = place
        self.claim = claim
        self.actor: Any = None
        self.run: Any = None  # its method, ready to be called
        # held while the worker is called, or told which functions to forget
        self.lock = threading.Lock()
        self.take_in(-1)

    def take_in(self, worker_id: int) -> None:
        """Begin anew, with another worker."""
        self.worker_id = worker_id
        self.known: set[int] = set()  # functions that the worker has
        self.levels: Levels | None = None  # of the driver's loggers, as the worker knows them
        self.filters: tuple[bytes, ...] = ()  # for warnings, likewise
        self.stale: deque[int] = deque()  # those of them that nobody will call again
        # the number of the newest snapshot of the driver's modules that the worker has
        self.project = -1
        self.calls: dict[int, int | None] = {}  # in flight, each with the one that it waits behind
        # the last that lasted: what was sent behind it is refused, and runs elsewhere
        self.told_of = -1
        self.pulse: Pulse | None = None  # if its process is on this machine
        self.is_ending = False  # the worker is lost, or about to be killed
        self.is_spent = False  # the worker is to be replaced, and has said so

    def take_stale(self) -> list[int]:
        """Return the functions that the worker is to forget now; whoever asks tells it."""
        stale = [self.stale.popleft() for _ in range(len(self.stale))]
        self.known.difference_update(stale)
        return stale

    @property
    def is_idle(self) -> bool:
        """Whether the worker runs nothing, and will not either."""
        return all(behind == self.told_of for behind in list(self.calls.values()))

    def is_dead(self) -> bool:
        """Whether the worker is dead already, as far as is known here: what is sent to it now would
        never begin.
        """
        if not is_up() or self.actor is None:
            return True
        if self.pulse is not None and self.pulse.has_ended:
            return True  # Ray hears of it some tenths of a second later
        return client.is_dead(self.actor)


def note_stale(seat_ref: weakref.ref[Slot], fn_id: int) -> None:
    """Note that nobody will call a function again that the worker in a place has."""
    seat = seat_ref()
    if seat is not None:
        seat.stale.append(fn_id)


# --- end of a process -----------------------------------------------------------------------------


class Pulse:
    """Tells whether a process is alive, which need not be a child of this one; a zombie has ended.

    Raises:
        ProcessLookupError: There is none of this number.
    """

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)  # it can be read once the process has ended
        weakref.finalize(self, os.close, self._handle)

    @property
    def has_ended(self) -> bool:
        """Whether it has; any thread may ask."""
        ends = select.poll()  # one that two threads use raises an error
        ends.register(self._handle, select.POLLIN)
        return bool(ends.poll(0))
