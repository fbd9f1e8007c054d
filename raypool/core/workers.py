"""The places of a pool and their workers: free, busy, parked, or held for a lane or a gang."""

from __future__ import annotations

from collections import OrderedDict

from raypool.core import policy
from raypool.core.messages import Command, DropPlace, ParkWorker, SetTimer, StartWorker, Vacate
from raypool.core.model import (
    Attempt,
    Departure,
    FailureStreak,
    IdleHeap,
    Lane,
    Place,
    Task,
    TaskSpec,
    WaitingGang,
    WaitingList,
    Worker,
    WorkerState,
)
from raypool.errors import LossReason

IDLE = WorkerState.IDLE  # looking up a member of an enum is slow in Python 3.11


class Workers:
    """The workers, on waiting lists by what each could do next.

    A worker is on one list at most, its `waiting_list`; only `move` changes that. The lists are
    `idle`, `check_lanes`, `wait_for_gang`, `held`, `prefetch`, `parked` and the members of each
    waiting gang. A worker on no list takes nothing now.

    Args:
        start_timeout_s: A worker that is not ready after this time [s] is lost.
    """

    def __init__(self, start_timeout_s: float) -> None:
        self.places: dict[int, Place] = {}
        self.by_id: dict[int, Worker] = {}
        self.idle: WaitingList = {}  # free for any task
        # free, but something in the lanes of their place may come first
        self.check_lanes: WaitingList = {}
        # free, but what comes first for them is a gang that can't collect yet
        self.wait_for_gang: WaitingList = {}
        # free, but in a place of `holds`
        self.held: WaitingList = {}
        # Running one call, could take the next. Ordered: the first key of a plain dict is found
        # slowly after many removals at its front.
        self.prefetch: WaitingList = OrderedDict()
        self.parked: WaitingList = {}  # without a process, until there is work
        # beside the lists: end after what they are running; whether a larger pool keeps them
        self.retiring: dict[int, bool] = {}
        # likewise: to be replaced, as soon as they run nothing and nothing is bound to them
        self.spent: dict[int, None] = {}
        # gangs that collect their workers, by task; no two want one place
        self.waiting_gangs: dict[int, WaitingGang] = {}
        self.lanes: dict[tuple[int, ...] | int, Lane] = {}  # that have places, by key
        # lanes that may have a task for an idle worker
        self.lanes_to_check: dict[tuple[int, ...] | int, Lane] = {}
        # lanes that have lost their last place, until their tasks are failed
        self.lanes_lost: list[Lane] = []
        self.idle_heap = IdleHeap()  # of all idle workers
        # by place: what has failed there since the last success
        self.streaks: dict[int, list[FailureStreak]] = {}
        # by place: until when it gets no calls, because it may be faulty
        self.holds: dict[int, float] = {}
        self.next_worker_id = 0
        self.next_attempt_id = 0
        self._start_timeout_s = start_timeout_s

    @property
    def size(self) -> int:
        """The number of workers without those that retire, but with those to be replaced."""
        return len(self.places) - len(self.retiring)

    def move(self, worker: Worker, waiting_list: WaitingList | None) -> None:
        """Put a worker on a waiting list, or on none, and take it off its last."""
        if worker.waiting_list is waiting_list:
            return  # it keeps its position there
        if worker.waiting_list is not None:
            del worker.waiting_list[worker.worker_id]
        worker.waiting_list = waiting_list
        if waiting_list is not None:
            waiting_list[worker.worker_id] = None

    # --- starts and ends --------------------------------------------------------------------------

    def open_place(self, place_id: int, now: float) -> list[Command]:
        """Add a place and start a worker there."""
        place = self.places[place_id] = Place(place_id)
        worker = self._hire(place)
        self._join_lanes(place)
        return self.launch(worker, now)

    def launch(self, worker: Worker, now: float) -> list[Command]:
        """Start a worker's process, with a time limit."""
        return [
            StartWorker(worker.worker_id, worker.place),
            SetTimer(now + self._start_timeout_s, "ready", worker.worker_id),
        ]

    def replace(self, worker: Worker, reason: LossReason, now: float) -> list[Command]:
        """Replace a lost worker, unless its place was to go or no worker starts there."""
        place = self.places[worker.place]
        is_retiring = worker.worker_id in self.retiring
        if worker.state is WorkerState.STARTING:
            place.failed_starts += 1
        elif reason in policy.FORGIVEN:
            place.losses = 0  # these losses are not the place's fault
        else:
            place.losses = 1 if worker.has_delivered else place.losses + 1
        self._dismiss(worker, WorkerState.LOST)
        if not is_retiring and place.failed_starts >= policy.MAX_FAILED_STARTS:
            place.leaving = Departure(reason)
        if is_retiring or place.leaving is not None:
            return self._vacate(place, reason)
        successor = self._succeed(worker, reason)
        delay_s = policy.restart_delay_s(place.failed_starts + place.losses)
        if delay_s > 0:
            return [SetTimer(now + delay_s, "start", successor.worker_id)]
        return self.launch(successor, now)

    def renew(self, worker: Worker) -> Worker:
        """Replace a free worker; its successor still has to be launched."""
        self._dismiss(worker, WorkerState.STOPPED)
        return self._succeed(worker, LossReason.EXIT)

    def lend(self, worker: Worker) -> Worker:
        """Replace a free worker by one that starts after the loan."""
        place = self.places[worker.place]
        # tasks bound to the worker wait for its successor: they keep their lane, under a new key
        lane = self.lanes.pop(worker.worker_id, None)
        if lane is not None:
            self.lanes_to_check.pop(lane.key, None)
            place.lanes.pop(lane.key, None)
        successor = self.renew(worker)
        if lane is not None:
            lane.key = successor.worker_id
            self.lanes[lane.key] = place.lanes[lane.key] = lane
        return successor

    def note_spent(self, worker: Worker, is_spent: bool) -> None:
        """Note whether a worker is to be replaced; its last answer decides."""
        self.spent.pop(worker.worker_id, None)
        if is_spent:
            self.spent[worker.worker_id] = None

    def renew_spent(self, now: float) -> list[Command]:
        """Replace the spent workers, unless they run something or have tasks bound to them."""
        commands: list[Command] = []
        for worker in [self.by_id[number] for number in self.spent]:
            if not worker.attempts and worker.worker_id not in self.lanes:
                commands += self.launch(self.renew(worker), now)
        return commands

    def retire(
        self, worker: Worker, leaving: Departure | None = None, *, may_stay: bool = False
    ) -> None:
        """Give a worker no more calls; `leaving`: the reason, unless the user wants it."""
        place = self.places[worker.place]
        self.move(worker, None)
        self.retiring[worker.worker_id] = may_stay
        place.leaving = leaving
        self._withdraw(place, LossReason.EXIT if leaving is None else leaving.reason)

    def keep(self, count: int) -> None:
        """Keep up to this many workers that were to go, and still have calls."""
        going = [number for number, may_stay in self.retiring.items() if may_stay]
        for worker in [self.by_id[number] for number in going[:count]]:
            del self.retiring[worker.worker_id]
            self._join_lanes(self.places[worker.place])
            self.offer_ahead(worker, next(reversed(worker.attempts.values())))

    def stop(self, worker: Worker) -> list[Command]:
        """End a worker, and give its place back."""
        self._dismiss(worker, WorkerState.STOPPED)
        return self._vacate(self.places[worker.place], LossReason.EXIT)

    def remove(self, worker: Worker, leaving: Departure) -> list[Command]:
        """Remove a worker that is lost together with its place."""
        place = self.places[worker.place]
        if worker.worker_id not in self.retiring:
            place.leaving = leaving
        self._dismiss(worker, WorkerState.LOST)
        return self._vacate(place, leaving.reason)

    def least_needed(self, count: int) -> list[Worker]:
        """Return the workers to remove: first unbound ones, then free ones, then by place."""
        staying = [w for w in self.by_id.values() if w.worker_id not in self.retiring]
        staying.sort(key=lambda w: (w.worker_id in self.lanes, bool(w.attempts), -w.place))
        return staying[:count]

    def _hire(self, place: Place) -> Worker:
        worker = Worker(self.next_worker_id, place.place)
        self.next_worker_id += 1
        self.by_id[worker.worker_id] = worker
        place.worker_id = worker.worker_id
        return worker

    def _succeed(self, worker: Worker, reason: LossReason) -> Worker:
        """Create a worker in the place of one that is gone, and close the lane of that one."""
        place = self.places[worker.place]
        if worker.worker_id in self.lanes:
            self._leave_lane(self.lanes[worker.worker_id], place, reason)
        return self._hire(place)

    def _dismiss(self, worker: Worker, state: WorkerState) -> None:
        worker.state = state
        del self.by_id[worker.worker_id]
        self.move(worker, None)
        self.retiring.pop(worker.worker_id, None)
        self.spent.pop(worker.worker_id, None)

    def _vacate(self, place: Place, reason: LossReason) -> list[Command]:
        self._withdraw(place, reason)
        del self.places[place.place]
        self.streaks.pop(place.place, None)
        self.holds.pop(place.place, None)
        leaving = place.leaving
        if leaving is None:  # the user has asked for it
            return [Vacate(place.place)]
        drop = DropPlace(place.place, leaving.reason, leaving.failed, leaving.finished)
        return [Vacate(place.place), drop]

    def _withdraw(self, place: Place, reason: LossReason) -> None:
        """Remove a place from all lanes."""
        for lane in list(place.lanes.values()):
            self._leave_lane(lane, place, reason)

    # --- parking ----------------------------------------------------------------------------------

    @property
    def is_awake(self) -> bool:
        """Whether any worker is not parked."""
        return len(self.parked) < len(self.by_id)

    @property
    def is_at_rest(self) -> bool:
        """Whether no worker is busy or starting."""
        return all(w.state in (IDLE, WorkerState.PARKED) for w in self.by_id.values())

    def park(self) -> list[Command]:
        """End all workers, and keep their places."""
        awake = [worker for worker in self.by_id.values() if worker.waiting_list is not self.parked]
        for worker in awake:
            self._dismiss(worker, WorkerState.STOPPED)
            successor = self._hire(self.places[worker.place])
            successor.state = WorkerState.PARKED
            self.move(successor, self.parked)
        return [ParkWorker(worker.place) for worker in awake]

    def wake(self, now: float) -> list[Command]:
        """Start all workers that are parked."""
        commands: list[Command] = []
        for worker in [self.by_id[number] for number in self.parked]:
            self.move(worker, None)
            worker.state = WorkerState.STARTING
            commands += self.launch(worker, now)
        return commands

    # --- busy and idle workers --------------------------------------------------------------------

    def first_idle(self, idle_heap: IdleHeap) -> Worker:
        """Return the idle worker in the lowest place."""
        # a pool with little to do keeps using the same few warm workers, and the others stay
        # together for a gang
        number = idle_heap.first(self.idle)
        assert number is not None
        return self.by_id[number]

    def free(self, worker: Worker) -> None:
        """Put a worker that has no calls on its waiting list."""
        worker.state = IDLE
        if worker.place in self.holds:
            self.move(worker, self.held)
            return
        lanes = self.places[worker.place].lanes.values() if self.lanes else ()
        if lanes and any(lane.queue for lane in lanes):
            self.move(worker, self.check_lanes)
        elif self.waiting_gangs and (gathering := self.gathering_for(worker)) is not None:
            self.move(worker, gathering.members)
        else:
            self.move(worker, self.idle)
            self.idle_heap.seat(worker)
            for lane in lanes:
                lane.idle_heap.seat(worker)

    def engage(self, worker: Worker, attempt: Attempt) -> None:
        """Give a worker a call, under the next number."""
        attempt.pace.running += 1
        worker.attempts[self.next_attempt_id] = attempt
        self.next_attempt_id += 1
        self.offer_ahead(worker, attempt)

    def offer_ahead(self, worker: Worker, last: Attempt) -> None:
        """Decide whether a busy worker takes one more call; `last`: the last that it has."""
        worker_id = worker.worker_id
        if (
            last.pace.is_brief
            # nothing is to wait behind something long
            and not (last.runs_alone or last.lasts)
            and len(worker.attempts) < policy.MAX_IN_FLIGHT
            # else it may have gone by then
            and worker_id not in self.retiring
            and worker_id not in self.spent
            and worker.place not in self.holds
            # else something in its lanes may come before what is next in the pool's queue
            and not (self.lanes and self.places[worker.place].lanes)
        ):
            self.move(worker, self.prefetch)
        else:
            self.move(worker, None)

    # --- lanes ------------------------------------------------------------------------------------

    def lane_for(self, spec: TaskSpec) -> Lane:
        """Return the lane of a task that is bound to places; one that is lost, if none is left."""
        places = spec.places or ()
        key: tuple[int, ...] | int = places
        if spec.place is not None:
            places = (spec.place,)
            key = self.places[spec.place].worker_id if spec.place in self.places else -1
        lane = self.lanes.get(key)
        if lane is None:
            lane = Lane(key)
            for number in places:
                place = self.places.get(number)
                if place is not None and place.worker_id not in self.retiring:
                    self._join_lane(lane, place)
            if lane.places:
                self.lanes[key] = lane
            else:
                lane.lost = LossReason.UNKNOWN
        return lane

    def leave(self, task: Task) -> None:
        """Remove an ended task from its lane, and close the lane if it was the last."""
        lane = task.lane
        assert lane is not None
        del lane.tasks[task.spec.task_id]
        if not lane.tasks and lane.lost is None:
            for place in lane.places:
                del self.places[place].lanes[lane.key]
            del self.lanes[lane.key]

    def _join_lanes(self, place: Place) -> None:
        for lane in self.lanes.values():
            if isinstance(lane.key, tuple) and place.place in lane.key:
                self._join_lane(lane, place)

    def _join_lane(self, lane: Lane, place: Place) -> None:
        lane.places[place.place] = None
        place.lanes[lane.key] = lane
        worker = self.by_id[place.worker_id]
        if worker.waiting_list is self.prefetch:
            self.move(worker, None)
        elif worker.waiting_list is self.idle:
            lane.idle_heap.seat(worker)

    def _leave_lane(self, lane: Lane, place: Place, reason: LossReason) -> None:
        del lane.places[place.place], place.lanes[lane.key]
        if not lane.places:
            lane.lost = reason
            self.lanes_lost.append(lane)
            del self.lanes[lane.key]

    # --- gangs ------------------------------------------------------------------------------------

    def gathering_for(self, worker: Worker) -> WaitingGang | None:
        """Return the waiting gang that wants a worker's place and has too few yet."""
        # two workers may become free in one event, and a gang needs only the first
        gatherings = [each for each in self.waiting_gangs.values() if not each.is_complete]
        return next((each for each in gatherings if each.wants(worker.place)), None)

    @property
    def is_reserved(self) -> bool:
        """Whether a waiting gang wants every worker that becomes free."""
        return any(gathering.gang.lane is None for gathering in self.waiting_gangs.values())

    def has_enough(self, gang: Task) -> bool:
        """Whether there are enough places for a gang, free or not."""
        return gang.size <= (self.size if gang.lane is None else len(gang.lane.places))

    def collect(self, gang: Task) -> None:
        """Hold free workers for a gang; workers that become free later join in `free`."""
        gathering = self.waiting_gangs[gang.spec.task_id] = WaitingGang(gang)
        self.tear()
        if gang.lane is None:
            while self.idle and len(gathering.members) < gang.size:
                self.join(self.first_idle(self.idle_heap), gathering)
            return
        for place in gang.lane.places:
            worker = self.by_id[self.places[place].worker_id]
            if worker.waiting_list is self.idle and len(gathering.members) < gang.size:
                self.join(worker, gathering)

    def join(self, worker: Worker, gathering: WaitingGang) -> None:
        """Move a free worker to a gang that collects."""
        self.move(worker, gathering.members)

    def assemble(self, gathering: WaitingGang) -> list[Worker]:
        """Stop collecting for a gang: return its workers in the order of their ranks."""
        del self.waiting_gangs[gathering.gang.spec.task_id]
        self.tear()
        members = [self.by_id[worker_id] for worker_id in gathering.members]
        places = enumerate(gathering.gang.spec.places or ())
        # reversed: of a place that is named twice, the first rank counts
        rank = {place: number for number, place in reversed(list(places))}
        return sorted(members, key=lambda worker: (rank.get(worker.place, 0), worker.place))

    def give_up(self, gang: Task) -> None:
        """Free the workers that are held for a gang, if there are any."""
        gathering = self.waiting_gangs.get(gang.spec.task_id)
        if gathering is not None:
            for worker in self.assemble(gathering):
                self.free(worker)

    def tear(self) -> None:
        """Let workers that wait for a gang check again what comes first for them."""
        for worker in [self.by_id[number] for number in self.wait_for_gang]:
            self.move(worker, self.check_lanes)

    def recall(self, gang: Task) -> None:
        """Keep tasks behind a gang that can't collect yet from the free workers that it wants."""
        wanted = self.places if gang.lane is None else gang.lane.places
        for place in wanted if self.idle else ():
            worker = self.by_id[self.places[place].worker_id]
            if worker.waiting_list is self.idle:
                self.move(worker, self.check_lanes)
