"""Sharing of GPUs in an "auto" pool, the driver's side: how many workers each GPU gets.

Each GPU starts with one worker, so that its first items run alone and are measured. An item that
runs out of memory beside others runs again, alone on its GPU; if it does so again, it fails. The
worker's side is `raypool.worker.gpu_turns`, the rule is in `raypool.gpus.sharing`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from raypool.backends.base import Post
from raypool.backends.ray.claims import Claim
from raypool.backends.ray.placement import Placement
from raypool.channel.records import Part, SliceResult
from raypool.core.messages import ResizeRequested
from raypool.errors import is_gpu_out_of_memory
from raypool.gpus.sharing import CONTEXT_BYTES, MOST, Load, fitting, fraction_for, workers_for
from raypool.worker.gpu_turns import GpuLoad, Sharing

if TYPE_CHECKING:
    from raypool.backends.ray.backend import Slot

REMEMBERED = 32
"""How many of a GPU's last items decide how many workers share it."""

TRIES_ALONE = 2
"""How often an item may run alone; after the first time, idle workers, which hold memory, leave."""

ALONE = (1.0, True)
"""The turn of an item that runs alone; see `Part`."""

ASK_S = 1.0
"""How long a GPU that was busy is not asked again [s]."""

logger = logging.getLogger("raypool")

AskUsage = Callable[[int, float, float, Callable[[float | None], object]], object]
"""Passes the use of a worker's GPU between two times [s since the epoch] to the last argument."""


class Flight(NamedTuple):
    """A call: its parts, GPU and share of its memory, and whether it shared that when sent."""

    parts: Sequence[Part]
    claim: Claim
    share: float
    is_crowded: bool


class SharedGpu:
    """A GPU of the pool, and its measurements."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.peaks: deque[int] = deque(maxlen=REMEMBERED)  # of its last items [bytes]
        self.weight = GpuLoad()
        self.others_bytes = 0
        self.overhead_bytes: int | None = None
        self.num_done = 0  # items, since the number of workers has changed
        self.since = 0.0  # when the first of them began
        self.most = MOST
        self.planned = 0  # the next number of workers: calls sent from now on leave room for them
        self.ask_at = 0.0  # not before then [s, `time.monotonic`]
        self.is_asking = False

    @property
    def num_workers(self) -> int:
        """How many workers may be on it at once, including those that are leaving or starting."""
        return max(self.claim.room, self.claim.num_workers, self.planned)

    @property
    def load(self) -> Load:
        """The measurements for the rules in `raypool.gpus.sharing`."""
        return Load(
            self.claim.room,
            self.weight.total_bytes,
            self.others_bytes,
            max(self.peaks) if self.peaks else None,
            CONTEXT_BYTES if self.overhead_bytes is None else self.overhead_bytes,
            self.weight.utilization,
        )

    @property
    def share(self) -> float:
        """The part of its memory that each of its workers may use."""
        load = self.load
        return fraction_for(
            self.num_workers, load.total_bytes, load.others_bytes, load.overhead_bytes
        )

    def note(
        self, results: Sequence[SliceResult], weight: GpuLoad | None, share: float, was_alone: bool
    ) -> None:
        """Add the needs of a call, which had this share of the memory, or all of it if alone."""
        if weight is not None and weight.total_bytes is not None:
            self.weight = weight
            if weight.overhead_bytes:
                self.overhead_bytes = max(self.overhead_bytes or 0, weight.overhead_bytes)
            if (
                self.claim.num_workers == 1
                and weight.own_bytes is not None
                and weight.used_bytes is not None
            ):
                self.others_bytes = max(weight.used_bytes - weight.own_bytes, 0)
        # on the GPU, perhaps by other means than torch
        has_own = weight is not None and bool(weight.own_bytes)
        for result in results:
            is_shared = share < 1 and not was_alone
            if result.crowded_out and is_shared:  # it needs more than it may have had
                limit_bytes = int(share * (self.weight.total_bytes or 0))
                self.peaks.append(max(result.peak_memory_bytes or 0, limit_bytes + 1))
            if result.crowded_out or not (result.peak_memory_bytes is not None or has_own):
                continue
            is_too_large = not is_shared and any(
                is_gpu_out_of_memory(failure.error) for failure in result.failures.values()
            )
            peak = result.peak_memory_bytes or 0
            self.peaks.append(max(peak, self.weight.total_bytes or 0) if is_too_large else peak)
            self.since = self.since or result.started_at
            self.num_done += result.done

    def begin_anew(self) -> None:
        """Count from now: its number of workers has changed."""
        self.num_done, self.since, self.planned = 0, 0.0, 0


class SharedGpus:
    """The GPUs of an "auto" pool; its methods may be called from any thread.

    Args:
        placement: Tells the claim of each place.
        take_in: Takes new places and their claims.
        post: Tells the driver.
        ask_usage: Asks how busy a GPU was; None where workers compute at the same time (MPS), and
            that limits nothing.
    """

    def __init__(
        self,
        placement: Placement,
        take_in: Callable[[dict[int, Claim]], object],
        post: Post,
        ask_usage: AskUsage | None,
    ) -> None:
        self._placement = placement
        self._take_in = take_in
        self._post = post
        self._ask_usage = ask_usage
        self._gpus: dict[Claim, SharedGpu] = {}
        self._flights: dict[int, dict[int, Flight]] = {}  # by place and attempt
        # how often items were told to run alone, by task and number
        self._alone: Counter[tuple[int, int]] = Counter()
        self._asked: set[int] = set()  # places that were asked to leave
        self._num_gone = 0  # claims that were lost with machines
        self._is_settled = False  # the user has said how many workers there are to be
        self._has_complained = False
        self._has_warned = False
        self._lock = threading.RLock()  # `_consider` may call `_grow` while it holds it

    # --- places -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """Let the user set the pool's size: from now on, unless that fails, it stays as it is."""
        with self._lock:
            was_settled, num_gone = self._is_settled, self._num_gone
            self._is_settled, self._num_gone = True, 0
        try:
            yield
        except BaseException:
            with self._lock:
                self._is_settled = was_settled
                self._num_gone += num_gone
            raise

    def regain(self, most: int, claim: Callable[[int], list[int]]) -> list[int]:
        """Claim as many GPUs as were lost with machines, whatever the number of their workers."""
        places = claim(min(most, self._num_gone)) if self._num_gone else []
        self._num_gone -= len(places)
        return places

    def moved_in(self, place: int, claim: Claim) -> Sharing | None:
        """Add a worker; return how it shares its GPU, None if it has none."""
        if claim.demand.kind != "GPU":
            return None
        with self._lock:
            self._flights[place] = {}
            return Sharing(
                self._gpus.setdefault(claim, SharedGpu(claim)).num_workers, takes_turns=True
            )

    def left(self, place: int, claim: Claim, *, is_lost: bool) -> None:
        """Note that a place is gone; if `is_lost`, with its machine."""
        with self._lock:
            self._flights.pop(place, None)
            gpu = self._gpus.get(claim)
            if claim.is_released:
                self._gpus.pop(claim, None)
                self._num_gone += is_lost
            elif gpu is not None and place not in self._asked:
                # the user has wished it, or nothing can start there
                gpu.most = claim.room = max(claim.num_workers, 1)
            self._asked.discard(place)

    # --- calls ------------------------------------------------------------------------------------

    def sent(
        self, place: int, claim: Claim, attempt_id: int, parts: Sequence[Part]
    ) -> Sequence[Part]:
        """Return the parts of a call to be sent, with their turns on the GPU."""
        with self._lock:
            gpu = self._gpus.get(claim)
            if gpu is None:
                return parts
            share = gpu.share
            parts = [
                part._replace(turn=ALONE if self._is_to_run_alone(part) else (share, False))
                for part in parts
            ]
            is_crowded = share < 1 or claim.num_workers > 1
            flight = Flight(parts, claim, share, is_crowded)
            self._flights.setdefault(place, {})[attempt_id] = flight
            return parts

    def _is_to_run_alone(self, part: Part) -> bool:
        numbers = range(part.start, part.start + part.num_items) if self._alone else ()
        return any((part.task_id, number) in self._alone for number in numbers)

    def came_back(
        self,
        worker_id: int,
        slot: Slot,
        attempt_id: int,
        results: Sequence[SliceResult],
        weight: GpuLoad | None,
    ) -> None:
        """Learn from a call, and mark items that ran out of memory to run again, alone."""
        place, claim = slot.place, slot.claim
        with self._lock:
            flight = self._flights.get(place, {}).pop(attempt_id, None)
            gpu = self._gpus.get(claim)
            if flight is None or gpu is None:
                return
            is_crowded = flight.is_crowded or claim.num_workers > 1
            for part, result in zip(flight.parts, results, strict=True):
                self._look_for_shortage(gpu, part, result, is_crowded)
            was_alone = any(part.turn == ALONE for part in flight.parts)
            gpu.note(results, weight, flight.share, was_alone)
            if weight is not None and weight.total_bytes is None and not self._has_complained:
                self._has_complained = True
                logger.warning(
                    "The memory of the pool's GPUs is unknown, so workers_per_gpu='auto' keeps one"
                    " worker on each. Pass a number (workers_per_gpu=2), or check that nvidia-smi"
                    " works there."
                )
            self._consider(gpu, worker_id)

    def _look_for_shortage(
        self, gpu: SharedGpu, part: Part, result: SliceResult, is_crowded: bool
    ) -> None:
        if is_crowded and not part.is_rank:
            again = [
                index
                for index, failure in sorted(result.failures.items())
                if is_gpu_out_of_memory(failure.error)
                and self._alone[part.task_id, index] < TRIES_ALONE
            ]
            self._alone.update((part.task_id, index) for index in again)
            result.crowded_out = tuple(again)
        for index in range(part.start, part.start + result.done) if self._alone else ():
            if index not in result.crowded_out:
                self._alone.pop((part.task_id, index), None)
        if not result.crowded_out:
            return
        logger.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "%s ran out of memory on a GPU that %d workers share; it runs again, alone on a GPU.",
            f"Item {result.crowded_out[0]} of {part.name}" if not part.is_call else part.name,
            gpu.num_workers,
        )
        self._has_warned = True
        if part.turn == ALONE:  # the idle workers beside it held too much memory
            self._set_room(gpu, 1)

    # --- number of workers ------------------------------------------------------------------------

    def _consider(self, gpu: SharedGpu, worker_id: int) -> None:
        """Give a GPU the number of workers that fits now."""
        fit = fitting(gpu.load)
        if fit is not None and fit < gpu.claim.room:
            self._set_room(gpu, fit)
        elif fit is not None and fit > gpu.claim.room and self._may_grow(gpu):
            gpu.planned = min(fit, 2 * gpu.claim.room, self._limit(gpu))
            shares = [
                flight.share
                for flights in self._flights.values()
                for flight in flights.values()
                if flight.claim is gpu.claim
            ]
            if max(shares, default=0.0) > gpu.share:
                return  # what runs might take what is meant for others; what follows it will not
            gpu.is_asking = True
            if self._ask_usage is None:
                self._grow(gpu, None)
            else:
                grow = functools.partial(self._grow, gpu)
                self._ask_usage(worker_id, gpu.since, time.time(), grow)
        elif not gpu.is_asking:
            gpu.planned = 0  # an item that was still running then needed more

    def _limit(self, gpu: SharedGpu) -> int:
        return min(gpu.most, gpu.claim.demand.workers_per_claim)

    def _may_grow(self, gpu: SharedGpu) -> bool:
        is_free = not (self._is_settled or gpu.is_asking or gpu.claim.is_released)
        is_time = gpu.num_done >= gpu.claim.room and time.monotonic() > gpu.ask_at
        return is_free and is_time and gpu.claim.room < self._limit(gpu)

    def _grow(self, gpu: SharedGpu, utilization: float | None) -> None:
        with self._lock:
            gpu.is_asking = False
            if not self._may_grow(gpu):
                gpu.planned = 0
                return
            load = gpu.load
            if self._ask_usage is None:
                load = load._replace(utilization=None)
            elif utilization is not None:
                load = load._replace(utilization=utilization)
            room = min(workers_for(load), self._limit(gpu))
            if room > gpu.claim.room:
                self._set_room(gpu, room)
            else:
                gpu.begin_anew()
                gpu.ask_at = time.monotonic() + ASK_S

    def _set_room(self, gpu: SharedGpu, room: int) -> None:
        before = gpu.claim.room
        if room > before:
            places = self._placement.widen(gpu.claim, room)
            self._take_in(places)
            event = ResizeRequested(add=tuple(places))
        else:
            leaving = self._placement.narrow(gpu.claim, room)
            self._asked.update(leaving)
            event = ResizeRequested(leave=leaving)
        if event != ResizeRequested():
            logger.info("Workers per GPU: %d so far, %d from now on.", before, gpu.claim.room)
            self._post(event, None)
        gpu.begin_anew()
