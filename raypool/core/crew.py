"""The places of a pool, the workers that come and go in them, and which of these are free."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from raypool.core import policy
from raypool.core.messages import Command, DropPlace, SetTimer, StartWorker, Vacate
from raypool.core.model import Attempt, Place, Task, Worker, WorkerState
from raypool.errors import LossReason


class Crew:
    """Workers by what they could do next: one that is not in `idle`, `torn`, `members` or `ahead` takes nothing now.

    Args:
        start_timeout_s: A worker that has not come up after this time [s] is lost.
    """

    def __init__(self, start_timeout_s: float) -> None:
        self.places: dict[int, Place] = {}
        self.workers: dict[int, Worker] = {}
        self.idle: dict[int, None] = {}  # free for any task
        self.torn: dict[int, None] = {}  # free, but tasks bound to them may come first
        self.ahead: OrderedDict[int, None] = OrderedDict()  # running one call, could take the next
        self.retiring: dict[int, None] = {}  # end after what they are running
        self.gang: Task | None = None  # the one that collects its workers
        self.members: dict[int, None] = {}  # free, and held for it
        self.wanted: dict[int, None] | None = None  # the places that it may use; None means all
        self.next_worker_id = 0
        self.next_attempt_id = 0
        self._start_timeout_s = start_timeout_s
        self._idle_heap: list[tuple[int, int]] = []  # (place, worker id); an entry that is not in `idle` is stale

    @property
    def size(self) -> int:
        """How many workers the pool has, or is about to have again."""
        return len(self.places) - len(self.retiring)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def open_place(self, place_id: int, now: float) -> list[Command]:
        """Take in a new place and start a worker there."""
        place = self.places[place_id] = Place(place_id)
        return self._hire(place, 0.0, now)

    def launch(self, worker: Worker, now: float) -> list[Command]:
        """Start a worker's process, and give it its time."""
        number = worker.worker_id
        return [StartWorker(number, worker.place), SetTimer(now + self._start_timeout_s, "ready", number)]

    def replace(self, worker: Worker, reason: LossReason, now: float) -> list[Command]:
        """Put another worker in the place of one that is lost; give the place back if it was to go, or is of no use."""
        place = self.places[worker.place]
        is_retiring = worker.worker_id in self.retiring
        if worker.state is WorkerState.STARTING:
            place.failed_starts += 1
        else:
            place.losses = 1 if worker.has_delivered else place.losses + 1
        self._dismiss(worker, WorkerState.LOST)
        if is_retiring:
            return [self._vacate(place)]
        if place.failed_starts >= policy.MAX_FAILED_STARTS:
            return [self._vacate(place), DropPlace(place.place, reason)]
        return self._hire(place, policy.restart_delay_s(place.failed_starts + place.losses), now)

    def retire(self, worker: Worker) -> None:
        """Let a worker take nothing more."""
        self._set_aside(worker)
        self.retiring[worker.worker_id] = None
        if self.wanted is not None:
            self.wanted.pop(worker.place, None)

    def stop(self, worker: Worker) -> Vacate:
        """End a worker, and give its place back."""
        self._dismiss(worker, WorkerState.STOPPED)
        return self._vacate(self.places[worker.place])

    def least_needed(self, count: int) -> list[Worker]:
        """Return the workers to part with: first those that nothing is bound to, then the free ones, then by place."""
        staying = [worker for worker in self.workers.values() if worker.worker_id not in self.retiring]
        staying.sort(key=lambda worker: (bool(worker.bound), bool(worker.attempts), -worker.place))
        return staying[:count]

    def _hire(self, place: Place, delay_s: float, now: float) -> list[Command]:
        worker = Worker(self.next_worker_id, place.place)
        self.next_worker_id += 1
        self.workers[worker.worker_id] = worker
        place.worker_id = worker.worker_id
        return [SetTimer(now + delay_s, "start", worker.worker_id)] if delay_s > 0 else self.launch(worker, now)

    def _dismiss(self, worker: Worker, state: WorkerState) -> None:
        worker.state = state
        del self.workers[worker.worker_id]
        self._set_aside(worker)
        self.retiring.pop(worker.worker_id, None)

    def _set_aside(self, worker: Worker) -> None:
        for group in (self.idle, self.torn, self.ahead, self.members):
            group.pop(worker.worker_id, None)

    def _vacate(self, place: Place) -> Vacate:
        del self.places[place.place]
        if self.wanted is not None:
            self.wanted.pop(place.place, None)
        return Vacate(place.place)

    # --- busy and free ------------------------------------------------------------------------------------------------

    def first_idle(self) -> Worker:
        """Return the idle worker in the lowest place.

        A pool that has little to do so keeps to the same few warm workers, and the others stay together for a gang.
        """
        heap = self._idle_heap
        while heap[0][1] not in self.idle:
            self._drop_stale()
        return self.workers[heap[0][1]]

    def free(self, worker: Worker) -> None:
        """Note that a worker has nothing in flight any more."""
        worker.state = WorkerState.IDLE
        self.ahead.pop(worker.worker_id, None)
        if worker.own:
            self.torn[worker.worker_id] = None
        elif self.gang is not None and self.may_join(worker):
            self.members[worker.worker_id] = None
        else:
            self.idle[worker.worker_id] = None
            if not worker.is_listed:
                worker.is_listed = True
                heappush(self._idle_heap, (worker.place, worker.worker_id))

    def claim(self, worker: Worker) -> None:
        """Note that a task is bound to this worker and could be dispatched."""
        self.ahead.pop(worker.worker_id, None)
        if worker.worker_id in self.idle:
            del self.idle[worker.worker_id]
            self.torn[worker.worker_id] = None

    def engage(self, worker: Worker, attempt: Attempt) -> int:
        """Note that a worker is sent a call; return the number of the attempt."""
        attempt_id = self.next_attempt_id
        self.next_attempt_id += 1
        worker.attempts[attempt_id] = attempt
        worker.state = WorkerState.BUSY
        self.idle.pop(worker.worker_id, None)
        self.offer_ahead(worker, attempt)
        return attempt_id

    def offer_ahead(self, worker: Worker, last: Attempt) -> None:
        """Let a busy worker take one more call or not, now that `last` is the last that it has."""
        is_short = last.pace.is_short and not last.runs_alone  # nothing is to wait behind something long
        if is_short and len(worker.attempts) < policy.MAX_IN_FLIGHT and not worker.own and worker.worker_id not in self.retiring:
            self.ahead[worker.worker_id] = None
        else:
            self.ahead.pop(worker.worker_id, None)

    def _drop_stale(self) -> None:
        _, worker_id = heappop(self._idle_heap)
        if worker_id in self.workers:
            self.workers[worker_id].is_listed = False

    # --- gangs --------------------------------------------------------------------------------------------------------

    def may_join(self, worker: Worker) -> bool:
        """Whether a worker could be one of the gang that collects."""
        return self.wanted is None or worker.place in self.wanted

    @property
    def has_enough(self) -> bool:
        """Whether there are places enough for the gang that collects, free or not."""
        assert self.gang is not None
        return self.gang.size <= (self.size if self.wanted is None else len(self.wanted))

    def collect(self, gang: Task) -> None:
        """Hold free workers for a gang until there are enough; those that become free later join it by themselves."""
        self.gang = gang
        places = gang.spec.places
        if places is None:
            self.wanted = None
            while self.idle and len(self.members) < gang.size:
                self.join(self.first_idle())
            return
        self.wanted = {place: None for place in sorted(places) if self._stays(place)}
        for place in self.wanted:
            worker = self.workers[self.places[place].worker_id]
            if worker.worker_id in self.idle and len(self.members) < gang.size:
                self.join(worker)

    def join(self, worker: Worker) -> None:
        """Move a free worker to the gang that collects."""
        self._set_aside(worker)
        self.members[worker.worker_id] = None

    def start_gang(self) -> list[Worker]:
        """Let the gang go: return its workers in the order of their places."""
        members = [self.workers[worker_id] for worker_id in self.members]
        self.gang = None
        self.members.clear()
        return sorted(members, key=lambda worker: worker.place)

    def release_gang(self) -> None:
        """Give up collecting."""
        for worker in self.start_gang():
            self.free(worker)

    def _stays(self, place_id: int) -> bool:
        place = self.places.get(place_id)
        return place is not None and place.worker_id not in self.retiring
