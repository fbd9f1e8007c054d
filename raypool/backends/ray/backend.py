"""The backend on Ray: one actor for each worker, pinned to the claim of its place.

`RayBackend` is the backend, `Slot` a place as it sees it; `Pulse` notices the end of a local
process before Ray does.
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
from raypool.backends.ray.calls import (
    UNRECORDED,
    aside,
    loss_reason,
    loss_text,
    unless_ended,
    when_done,
)
from raypool.backends.ray.card_sharing import SharedGpus
from raypool.backends.ray.claims import Claim, locate
from raypool.backends.ray.client import is_outside, note_deaths
from raypool.backends.ray.nodes import CutOff, Nodes, NodeWatch, look, why_cut_off
from raypool.backends.ray.packing import (
    MessageValues,
    StoredValues,
    bring_home,
    map_again,
    send_script_by_value,
    unpack_narrowed,
    unpack_results,
)
from raypool.backends.ray.placement import Placement
from raypool.backends.ray.session import (
    connection,
    environment_of,
    give_up_ray,
    is_up,
    leave_ray,
)
from raypool.backends.ray.worker import (
    CallAnswer,
    Introduction,
    News,
    PoolWorker,
    filters_here,
    pack_call,
)
from raypool.channel.capture import Levels, levels_here
from raypool.channel.hub import Hub
from raypool.channel.queues import sources
from raypool.channel.records import Function, Part, Values, WorkerInfo
from raypool.channel.traffic import Traffic
from raypool.channel.users_code import Snapshot, changed_model, different_module
from raypool.core.messages import AttemptFinished, AttemptNarrowed, Signal, WorkerLost, WorkerReady
from raypool.errors import LossReason
from raypool.profiles import Profile
from raypool.worker.gpu_turns import Sharing
from raypool.worker.running import ExchangeClient

CLOSE_TIMEOUT_S = 5.0
"""How long closing a pool waits for the ends of its workers, and then for its resources [s]."""

GIVEN_UP_S = 60.0
"""How long closing a pool waits at most after its Ray was given up [s]."""

WIND_UP_TIMEOUT_S = 10.0
"""How long the teardown of workers may take, and before it the end of cancelled calls [s]."""

WOUND_UP_LATE = (
    "The teardown of worker %d (with the cleanup of constants) did not end within %g s; the worker"
    " is killed."
)

NOT_WOUND_UP = (
    "The teardown of worker %d (with the cleanup of constants) is skipped: a cancelled call did not"
    " stop within cancel_grace_s=%g, so the worker is killed. Raise cancel_grace_s if such calls"
    " need longer to stop."
)

logger = logging.getLogger("raypool")

DIED_IDLE = "its process ended while it was idle"

WATCH_S = 1.0
"""How soon the death of an idle worker and the end of Ray are noticed [s]."""

RAY_ENDED = "Ray was shut down while the pool was open"


class RayBackend:
    """Workers as Ray actors; `join_ray` was called before, and it will call `leave_ray`.

    The driver's thread calls everything but `claim`; Ray's threads post the answers.
    """

    def __init__(self, profile: Profile, post: Post, hub: Hub, traffic: Traffic) -> None:
        # first: it may fail, and what follows starts threads. None or one, and in a tuple: Ray
        # would open a large one if it were an argument itself.
        teardowns = () if profile.teardown is None else (profile.teardown,)
        self._teardowns = tuple(packing.pack(each, "the teardown") for each in teardowns)
        self._profile = profile
        self.has_cleanups = False
        self._post = post
        self._hub = hub
        self._traffic = traffic
        hub.on_early = self._on_early
        # the user may shut it down, and join another Ray or the same one again
        self._joined = connection()
        self._is_up = functools.partial(is_up, self._joined)
        map_again()
        send_script_by_value()
        self._placement = Placement(profile)
        self.may_move, self.demands = self._placement.may_move, self._placement.demands
        self._slots: dict[int, Slot] = {}
        self._by_worker: dict[int, Slot] = {}
        # held while a slot is looked at for one worker, so that it gets no other meanwhile
        self._replacing = threading.Lock()
        self._actor_class = ray.remote(PoolWorker)
        self._nodes = NodeWatch(self, post, profile.cancel_grace_s)
        self._agents = Agents(
            hub, profile.cancel_grace_s, self._nodes.stays, profile.inventory, self._is_up
        )
        sources.append(self._agents)
        self.devices, self.gpu_readings = self._agents.devices, self._agents.gpu_readings
        self._cards: SharedGpus | None = None
        if profile.workers_per_gpu == "auto":

            def ask(*args: Any) -> None:  # from any thread
                self._agents.later(functools.partial(self._agents.utilization, *args))

            self._cards = SharedGpus(
                self._placement, self.take_in, post, None if profile.mps else ask
            )
        # the newest of the driver's modules that a function came with
        self._project: Snapshot | None = None
        self._warned: set[tuple[str, ...]] = set()
        # workers that are ending, and what to do once they have ended
        self._retiring: dict[int, tuple[Any, Chore]] = {}
        self._retired = threading.Condition()  # notified when one has ended
        self._nodes.start()
        self._is_outside = is_outside()
        self._ending = RAY_ENDED  # what to say of an end of Ray
        self._closed = threading.Event()
        self._is_cut_off = threading.Event()
        self._left = threading.Event()  # set once nothing needs the watch on Ray any more
        threading.Thread(target=self._watch, name="raypool-watch", daemon=True).start()

    def find_way(self) -> ExchangeClient:
        """Return the way to the pool's exchange."""
        return self._agents

    # --- places -----------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the pool takes no more work; see `Backend`."""
        return self._placement.is_ending

    @is_ending.setter
    def is_ending(self, is_ending: bool) -> None:
        self._placement.is_ending = is_ending

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim resources for this many workers."""
        claims = self._placement.claim(least, most)
        self.take_in(claims)
        return list(claims)

    def take_in(self, claims: dict[int, Claim]) -> None:
        """Add new places and their claims."""
        self._slots.update((place, Slot(place, claim)) for place, claim in claims.items())

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """Keep the pool's size as it is set meanwhile."""
        cards = contextlib.nullcontext() if self._cards is None else self._cards.sizing()
        with self._nodes.sizing(), cards:
            yield

    def look(self) -> Nodes:
        """Return the nodes of the cluster."""
        note_deaths([slot.actor for slot in list(self._by_worker.values())])
        return look()

    def places(self) -> dict[int, str | None]:
        """Return which node each place is on."""
        return {place: slot.claim.node_id for place, slot in list(self._slots.items())}

    def node_of(self, place: int) -> str | None:
        """Return which node a place was claimed on."""
        return slot.claim.node_id if (slot := self._slots.get(place)) is not None else None

    def find(self, place: int) -> str | None:
        """Return which node a place is on now."""
        return locate(slot.claim) if (slot := self._slots.get(place)) is not None else None

    def grow(self, most: int) -> list[int]:
        """Claim up to this many places, for machines that have come back."""
        if isinstance(self._profile.gpus, tuple):  # chosen GPUs of this machine, which never left
            return []
        claim = functools.partial(self.claim, 0)
        return claim(most) if self._cards is None else self._cards.regain(most, claim)

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """End the worker in a place, with its teardown; what it still runs is cancelled."""
        slot = self._slots.get(place)
        if slot is None:
            return
        if keep:
            self._retire(slot)
            return
        del self._slots[place]
        left = self._placement.leave(place)  # None while another place uses the claim
        if self._cards is not None:
            is_lost = not self._nodes.stays(str(slot.claim.last_node_id))
            self._cards.left(place, slot.claim, is_lost=is_lost)

        def give_back() -> None:
            if left is not None and self._is_up():
                aside(functools.partial(self._give_back, left))

        self._retire(slot, give_back)

    def _give_back(self, claim: Claim) -> None:
        with unless_ended(self._is_up):
            self._placement.give_back(claim)

    def lend(self, places: Sequence[int]) -> None:
        """Give the claims of a loan's workers back, and wait until others can have them."""
        slots = [self._slots[place] for place in places if place in self._slots]
        # their workers were vacated just before, and still use the claims until they have ended
        with self._retired:
            self._retired.wait_for(
                lambda: all(slot.worker_id not in self._retiring for slot in slots),
                self._stop_s + WIND_UP_TIMEOUT_S + END_TIMEOUT_S,
            )
        if self._is_up():
            self._placement.lend([slot.claim for slot in slots])

    def take_back(self, workers: Sequence[WorkerInfo]) -> dict[int, str]:
        """Claim lent resources again: the same GPUs, or cores of the same nodes.

        Waits for them as the start of the pool does.

        Returns:
            By place, why it cannot be had: who has the GPU.
        """
        lent = [
            (worker, self._slots[worker.index]) for worker in workers if worker.index in self._slots
        ]
        claims = self._placement.take_back(
            {worker.index: (slot.claim, worker.gpu) for worker, slot in lent}
        )
        for worker, slot in lent:
            slot.claim = claims.get(worker.index, slot.claim)
        return {
            worker.index: self._placement.why_taken(worker.gpu)
            for worker, _ in lent
            if worker.index not in claims
        }

    @property
    def _stop_s(self) -> float:
        """How long cancelled calls may keep a worker from its teardown [s]."""
        return min(self._profile.cancel_grace_s, WIND_UP_TIMEOUT_S)

    def _retire(self, slot: Slot, then: Chore = lambda: None) -> None:
        """End the worker of a slot; `then` is called when all its processes have ended."""
        with self._replacing:
            actor, worker_id = slot.actor, slot.worker_id
            is_sound = slot.is_set_up and not slot.is_ending
            running = [] if slot.is_idle else slot.running()
            self._by_worker.pop(worker_id, None)
            slot.actor = None
        if actor is None or not self._is_up():
            then()
            return
        self._retiring[worker_id] = actor, then

        def finish() -> None:
            then()  # first: those who are notified rely on it
            with self._retired:
                self._retiring.pop(worker_id, None)
                self._retired.notify_all()

        limit_s = WIND_UP_TIMEOUT_S + (self._stop_s if running else 0.0)
        is_over = False

        def end(*warning: Any) -> None:
            nonlocal is_over
            if not is_over:  # its calls and its teardown may both be late
                is_over = True
                if warning:
                    logger.warning(*warning)
                self._agents.end(worker_id, actor, finish)

        def take(answer: Any) -> None:
            if isinstance(answer, str):
                end("The teardown of worker %d failed:\n%s", slot.place, answer)
            elif isinstance(answer, TimeoutError):
                end(WOUND_UP_LATE, slot.place, limit_s)
            else:
                end()

        # a busy worker without a teardown is killed at once: nobody waits for its result
        if is_sound and (not running or self._teardowns or self.has_cleanups):
            stuck = functools.partial(end, NOT_WOUND_UP, slot.place, self._profile.cancel_grace_s)
            with unless_ended(self._is_up):
                self._cancel(worker_id, running, stuck)
                # behind the calls: an actor takes one after the other
                self._agents.within(limit_s, actor.wind_up.remote(self._teardowns), take)
                return
        end()

    def _cancel(self, worker_id: int, running: Sequence[tuple[int, int]], stuck: Chore) -> None:
        for attempt_id, task_id in running:
            self._agents.signal(worker_id, attempt_id, task_id, Signal.CANCEL, stuck)

    # --- workers ----------------------------------------------------------------------------------

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start an actor in a place; it introduces itself, and then calls the setups."""
        slot = self._slots[place]
        self._retire(slot)
        if self._is_up():
            with unless_ended(self._is_up):
                self._start_actor(worker_id, slot, setups)
                return
        self._by_worker.pop(worker_id, None)
        self._post(WorkerLost(worker_id, LossReason.START), self._ending)

    def _start_actor(self, worker_id: int, slot: Slot, setups: Sequence[Function]) -> None:
        demand = slot.claim.demand
        options: dict[str, Any] = {
            "num_cpus": demand.worker_cpus,
            "num_gpus": demand.worker_gpus,
            "scheduling_strategy": slot.claim.strategy(),
            "max_restarts": 0,  # the scheduler decides what is restarted
            **UNRECORDED,
        }
        if demand.worker_memory_bytes:
            options["memory"] = demand.worker_memory_bytes
        if env := environment_of(self._profile):
            options["runtime_env"] = {"env_vars": env}
        slot.take_in(worker_id)
        if self._cards is not None:
            sharing = self._cards.moved_in(slot.place, slot.claim)
        else:
            sharing = Sharing(demand.workers_per_claim) if demand.workers_per_claim > 1 else None
        slot.actor = self._actor_class.options(**options).remote(
            slot.place,
            worker_id,
            self._profile.inventory,
            sharing,
            self._profile.max_leftover_bytes,
        )
        slot.run = slot.actor.run.remote
        self._by_worker[worker_id] = slot
        # with none, the worker is ready one call earlier
        packed = tuple(packing.dump([setup.packed for setup in setups])) if setups else None
        agent = self._agents.for_mps(slot.claim) if self._profile.mps else None
        project = self._news(slot, setups)
        # a setup was packed long ago: a worker that replaces an outdated one would be so itself
        if self._project is not None:
            project, slot.project = self._project, self._project.number
        introduction = slot.actor.introduce.remote(agent, project)
        self._answered(
            worker_id,
            introduction,
            functools.partial(self._on_introduced, worker_id, packed),
        )

    def _answered(self, worker_id: int, ref: Any, take: Callable[[Any], None]) -> None:
        """Pass the answer to a call to `take`, in a thread of Ray's."""

        def take_safely(answer: Any) -> None:
            try:
                take(answer)
            except BaseException as error:  # Ray would only log it, and the driver wait forever
                words = f"its answer could not be read: {error!r}"
                self._lose(worker_id, LossReason.UNKNOWN, words)

        when_done(ref, take_safely)

    def _on_introduced(self, worker_id: int, setups: Sequence[Any] | None, answer: Any) -> None:
        if not isinstance(answer, Introduction):
            words = answer if isinstance(answer, str) else loss_text(answer)
            self._lose(worker_id, LossReason.START, words)
            return
        self._agents.later(functools.partial(self._settle_in, worker_id, setups, answer))

    def _settle_in(
        self, worker_id: int, setups: Sequence[Any] | None, introduction: Introduction
    ) -> None:
        """Let a worker be watched over, and call its setups."""
        with self._replacing:
            slot = self._by_worker.get(worker_id)
            if slot is None:
                return  # the worker was given up meanwhile
            actor = slot.actor
        limit = slot.claim.demand.worker_memory_bytes

        def on_over(used: int) -> None:
            words = (
                f"it used {used / 1e9:.2f} GB of memory, and its memory_bytes allows"
                f" {limit / 1e9:.2f} GB"
            )
            self._lose(worker_id, LossReason.OUT_OF_MEMORY, words)

        slot.claim.node_id = introduction.node_id
        memory = MemoryLimit(limit, on_over) if limit else None
        self._agents.attach(worker_id, introduction, actor, memory)
        take = functools.partial(self._on_set_up, worker_id, introduction.info)
        if setups is None:
            take(None)
        else:  # only now: they may use the pool's store and queues
            self._answered(worker_id, actor.set_up.remote(setups), take)

    def _on_set_up(self, worker_id: int, info: WorkerInfo, problem: Any) -> None:
        """Let a worker take calls, unless a setup has failed."""
        if problem is not None:
            words = problem if isinstance(problem, str) else loss_text(problem)
            self._lose(worker_id, LossReason.START, words)
            return
        with self._replacing:
            slot = self._by_worker.get(worker_id)
            if slot is None:
                return  # the worker was given up meanwhile
            slot.is_set_up = True
            if info.host == platform.node():
                # it has gone, or this process has too many files open: Ray will say
                with contextlib.suppress(OSError):
                    slot.pulse = Pulse(info.pid)
        self._post(WorkerReady(worker_id), info)

    def _lose(
        self,
        worker_id: int,
        reason: LossReason,
        words: str,
        was_idle: bool = False,
        during: int | None = None,
    ) -> None:
        """End a worker, unless it has ended the attempt `during`; from any thread."""
        with self._replacing:
            slot = self._by_worker.get(worker_id)
            if slot is None or slot.is_ending or (during is not None and during not in slot.calls):
                return
            slot.is_ending = True  # so that the driver is told once
            slot.doomed = during
            actor = slot.actor
        lost = WorkerLost(worker_id, reason, was_idle)
        tell = functools.partial(self._nodes.tell_lost, lost, words, slot.claim.last_node_id)
        # told when nothing is left of it: its replacement needs the GPU's memory
        self._agents.later(functools.partial(self._agents.end, worker_id, actor, tell))

    # --- calls ------------------------------------------------------------------------------------

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Pickle a value; a large one goes into the object store once, for all workers."""
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
        slot = self._by_worker[worker_id]
        if not self._is_up():
            self._lose(worker_id, LossReason.NODE, self._ending)
            return
        if slot.is_dead():
            self._lose(worker_id, LossReason.EXIT, DIED_IDLE, was_idle=slot.is_idle)
            return
        if self._cards is not None:
            parts = self._cards.sent(slot.place, slot.claim, attempt_id, parts)
        if self._agents.is_far:
            for part in parts:
                if part.checkpoints is not None and "://" not in part.checkpoints[0]:
                    self._agents.share(part.checkpoints[0])
        levels, filters = levels_here(), filters_here()
        with slot.lock:
            slot.calls[attempt_id] = behind
            slot.tasks[attempt_id] = {part.task_id for part in parts}
            stale = slot.take_stale()
            news = News(
                {each.fn_id: each.packed for each in functions if slot.learn(each)},
                stale,
                self._news(slot, functions),
                None if levels is slot.levels else levels,
                None if filters is slot.filters else filters,
            )
            slot.levels, slot.filters = levels, filters
            # the driver does not know it yet if it sends this behind the call that said so
            is_known = slot.is_spent and behind is None
            call = pack_call(attempt_id, parts, news, is_known, behind)
            with unless_ended(self._is_up):  # `_watch` will tell of the loss
                status, values = (
                    slot.run(call.header, call.refs) if call.refs else slot.run(call.header)
                )
                take = functools.partial(self._on_status, worker_id, slot.place, attempt_id, values)
                self._answered(worker_id, status, take)
        self._traffic.add(slot.place, len(call.header), 0)

    def _news(self, slot: Slot, functions: Sequence[Function]) -> Snapshot | None:
        """Return the newest snapshot of functions, if the worker does not have it yet."""
        newest = None
        for function in functions:
            if function.project is not None and function.project.number > slot.project:
                newest, slot.project = function.project, function.project.number
        if newest is not None and (self._project is None or newest.number > self._project.number):
            self._project = newest
        return newest

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Let the agent of the worker's node interrupt it; one that does not stop is killed."""
        stopped = functools.partial(
            self._lose,
            worker_id,
            LossReason.STOPPED,
            "a cancelled task did not stop",
            during=attempt_id,
        )
        self._agents.signal(worker_id, attempt_id, task_id, wish, stopped)

    def _watch(self) -> None:
        """Notice dead idle workers, and an end of Ray: no call comes back to tell of these."""
        while not self._left.wait(WATCH_S):
            silent_s = self._nodes.silent_s(WATCH_S)
            cut_off = None
            # if the user has joined another Ray, its troubles are not this pool's
            if not ray.is_initialized() or connection() is self._joined:
                cut_off = why_cut_off(silent_s, self._nodes.is_adrift, self._is_outside)
            if cut_off is not None:
                self._let_go(cut_off)
            if self._closed.is_set():
                continue  # Ray is still watched: its end would keep `close` waiting
            for worker_id, slot in list(self._by_worker.items()):
                # the slot may get another worker meanwhile; the next look sees
                with contextlib.suppress(Exception):
                    self._look_after(worker_id, slot)

    def _let_go(self, cut_off: CutOff) -> None:
        """Leave a Ray that no longer answers: any call to it would hang."""
        if self._ending != RAY_ENDED or (self._closed.is_set() and not self._is_up()):
            return  # it is known
        self._ending = cut_off.why
        logger.error("%s; the pool is closed.", cut_off.why)
        self._nodes.lose_all(cut_off.why)
        self._is_cut_off.set()
        # else Ray would end this process; asking a dead raylet for a value ends it at once
        give_up_ray(bring_home if cut_off.has_values else None)

    def _look_after(self, worker_id: int, slot: Slot) -> None:
        if not self._is_up():
            self._lose(worker_id, LossReason.NODE, self._ending)
        elif not slot.calls and slot.actor is not None and slot.is_dead():
            self._lose(worker_id, LossReason.EXIT, DIED_IDLE, was_idle=True)
        elif slot.stale:
            with slot.lock:  # else it would keep what they hold until it is called again
                if not slot.calls and slot.actor is not None and (stale := slot.take_stale()):
                    slot.actor.forget.remote(stale)

    def _on_status(
        self, worker_id: int, place: int, attempt_id: int, values_ref: Any, status: Any
    ) -> None:
        slot = self._by_worker.get(worker_id)
        if slot is not None and not slot.take_back(attempt_id):
            return
        if not isinstance(status, bytes):
            self._lose(worker_id, loss_reason(status), loss_text(status))
            return
        answer = CallAnswer._make(pickle.loads(status))
        self._traffic.add(place, answer.fetched_bytes, len(status))
        for number, batch in answer.said:
            self._hub.deliver(worker_id, number, batch)
        # up to the newest batch; there is always one, though it may be empty
        catch_up = self._hub.waiter(worker_id, number)
        values: Values
        if answer.header is None:
            values = StoredValues(values_ref, functools.partial(self._traffic.add, place, 0))
        else:
            values = MessageValues(answer.header)
        results = unpack_results(answer.slices, values, catch_up)
        if self._cards is not None and slot is not None:
            self._cards.came_back(worker_id, slot, attempt_id, results, answer.load)
        leftover = answer.leftover
        is_spent = leftover is not None and leftover.is_spent
        if slot is not None:
            slot.is_spent = is_spent
        if leftover is not None and leftover.words is not None:
            self._warn_once(("leftover", leftover.name), leftover.words)
        for name, file, host in answer.other_modules:
            self._warn_once(("module", name, host), different_module(name, file, host))
        for name, model in answer.changed_models:
            self._warn_once(("model", name, model), changed_model(name, model))
        self._post(AttemptFinished(worker_id, attempt_id, (), is_spent), results)

    def _on_early(self, worker_id: int, message: bytes) -> None:
        attempt_id, kept, results = unpack_narrowed(message)
        if (slot := self._by_worker.get(worker_id)) is not None:
            slot.told_of = attempt_id
        self._post(AttemptNarrowed(worker_id, attempt_id, (), kept), results)

    def _warn_once(self, about: tuple[str, ...], words: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", words)

    def close(self) -> None:
        """End all workers, give back all claims, and end Ray if it was started for this pool.

        A Ray that does not answer is waited for until `_watch` gives it up, then for `GIVEN_UP_S`.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        # in a thread of its own: any question to a Ray that does not answer may hang forever
        ending = threading.Thread(target=self._end_all, name="raypool-close", daemon=True)
        ending.start()
        while ending.is_alive() and not self._is_cut_off.is_set():
            ending.join(WATCH_S)
        ending.join(GIVEN_UP_S)

    def _end_all(self) -> None:
        with contextlib.ExitStack() as last:  # done backwards, each whatever the others raise
            last.callback(leave_ray, bring_home, self._joined)
            last.callback(self._left.set)
            last.callback(sources.remove, self._agents)
            last.callback(self._hub.close)
            last.callback(self._agents.close)
            last.callback(self._nodes.close)
            self._placement.stop_claiming()
            for place in list(self._slots):
                self.vacate(place)
            with self._retired:
                limit_s = self._stop_s + WIND_UP_TIMEOUT_S + CLOSE_TIMEOUT_S
                self._retired.wait_for(lambda: not self._retiring, limit_s)
            if self._is_up():
                # their node's agent answers nobody
                for actor, then in list(self._retiring.values()):
                    self._agents.kill([actor], then)
                self._placement.close(CLOSE_TIMEOUT_S)


# --- slots ----------------------------------------------------------------------------------------


class Slot:
    """A place of the pool for the backend: a claim, and the actor in it."""

    __slots__ = (
        "__weakref__",
        "actor",
        "calls",
        "claim",
        "doomed",
        "filters",
        "is_ending",
        "is_set_up",
        "is_spent",
        "known",
        "levels",
        "lock",
        "place",
        "project",
        "pulse",
        "run",
        "stale",
        "tasks",
        "told_of",
        "watched",
        "worker_id",
    )

    def __init__(self, place: int, claim: Claim) -> None:
        self.place = place
        self.claim = claim
        self.actor: Any = None
        self.run: Any = None  # its method, ready to be called
        # held while the worker is called, or told which functions to forget
        self.lock = threading.Lock()
        # functions whose end is noted here, whichever worker has them
        self.watched: weakref.WeakSet[Function] = weakref.WeakSet()
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
        self.tasks: dict[int, set[int]] = {}  # the tasks of each of these calls
        # the last that lasted: what was sent behind it is refused, and runs elsewhere
        self.told_of = -1
        self.pulse: Pulse | None = None  # if its process is on this machine
        self.is_set_up = False  # its setups have returned
        self.is_ending = False  # the worker is lost, or about to be killed
        self.doomed: int | None = None  # the call for which it is killed
        self.is_spent = False  # the worker is to be replaced, and has said so

    def take_back(self, attempt_id: int) -> bool:
        """Note that a call has come back; return whether it counts.

        It does not if its worker is about to be killed for it: the worker is lost.
        """
        self.calls.pop(attempt_id, None)
        self.tasks.pop(attempt_id, None)
        return attempt_id != self.doomed

    def learn(self, function: Function) -> bool:
        """Note that the worker gets a function; return False if it has it."""
        if function.fn_id in self.known:
            return False
        self.known.add(function.fn_id)
        if function not in self.watched:
            self.watched.add(function)
            end = weakref.finalize(function, note_stale, weakref.ref(self), function.fn_id)
            end.atexit = False  # nobody is told of it then
        return True

    def take_stale(self) -> list[int]:
        """Return the functions that the worker is to forget now; the caller tells it."""
        # one by one: a finalizer may add another at any moment
        stale = [self.stale.popleft() for _ in range(len(self.stale))]
        self.known.difference_update(stale)
        return stale

    @property
    def is_idle(self) -> bool:
        """Whether the worker runs nothing, and has nothing left to run."""
        return all(behind == self.told_of for behind in list(self.calls.values()))

    def running(self) -> list[tuple[int, int]]:
        """Return the calls in flight, each with every task in it."""
        return [(call, task) for call, tasks in list(self.tasks.items()) for task in tasks]

    def is_dead(self) -> bool:
        """Whether the worker is known to be dead, so that a call to it would never begin."""
        if self.actor is None:
            return True
        if self.pulse is not None and self.pulse.has_ended:
            return True  # Ray hears of it some tenths of a second later
        return client.is_dead(self.actor)


def note_stale(slot_ref: weakref.ref[Slot], fn_id: int) -> None:
    """Note that a function will not be called again."""
    # a weak reference: a function lives longer than many slots
    if (slot := slot_ref()) is not None:
        slot.stale.append(fn_id)


# --- end of a process -----------------------------------------------------------------------------


class Pulse:
    """Tells whether a process, not necessarily a child, is alive; a zombie has ended.

    Raises:
        ProcessLookupError: There is no such process.
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
