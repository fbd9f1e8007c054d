"""Who gets what."""

from __future__ import annotations

from raypool.core import messages as m
from raypool.core.backlog import Backlog
from raypool.core.crew import Crew
from raypool.core.ledger import Ledger
from raypool.core.model import Attempt, Lane, Order, Task, TaskState, Worker, WorkerState

BUSY = WorkerState.BUSY  # Python 3.11 takes its time to look these up


class Dispatcher:
    """Gives work to the free: the first, in order of priority and submission, of what each of them may take."""

    def __init__(self, backlog: Backlog, crew: Crew, ledger: Ledger) -> None:
        self._backlog = backlog
        self._crew = crew
        self._ledger = ledger
        self._now = 0.0
        self._out: list[m.Command] = []

    def give_out(self, now: float) -> list[m.Command]:
        """Give out work until nobody is free or nothing is left that may start.

        One gang collects at a time: two could each hold what the other needs. The next one holds up what stands behind it.
        """
        backlog, crew, heap = self._backlog, self._crew, self._backlog.heap
        self._now = now
        self._out = []
        while True:
            if crew.gang is not None:
                self._try_gang(crew.gang)
            head = backlog.head(heap)
            if head is not None and crew.gang is not None and head.spec.is_gang:
                head = None
            lane = self._calling_lane() if crew.calling else None
            if lane is not None and (head is None or lane.heap[0] < heap[0]):
                self._send(crew.first_idle(lane.bench), lane)
            elif head is not None and head.spec.is_gang:
                crew.collect(backlog.pop(heap))
            elif head is not None and crew.idle:
                self._send(crew.first_idle(crew.bench))
            elif crew.torn:
                self._offer(crew.workers[next(iter(crew.torn))], head)
            elif head is not None and crew.ahead and crew.gang is None and backlog.wants_look_ahead(head, crew.size):
                self._send(crew.workers[next(iter(crew.ahead))])
            else:
                return self._out

    def _calling_lane(self) -> Lane | None:
        """Return a lane that has both a task and somebody idle; there are no two, since no event adds to two lanes."""
        crew = self._crew
        for lane in list(crew.calling.values()):
            if self._backlog.head(lane.heap) is not None and lane.bench.first(crew.idle) is not None:
                return lane
            del crew.calling[lane.key]  # whoever becomes free there will look by himself
        return None

    def _offer(self, worker: Worker, head: Task | None) -> None:
        """Let a free worker do what comes first: something in its lanes, the pool's next, or the gang that collects."""
        crew = self._crew
        del crew.torn[worker.worker_id]
        lanes = [lane for lane in crew.places[worker.place].lanes.values() if self._backlog.head(lane.heap) is not None]
        lane = min(lanes, key=lambda lane: lane.heap[0], default=None)
        if lane is None:
            crew.free(worker)
        elif crew.gang is not None and crew.gang.order < lane.heap[0] and crew.may_join(worker):
            crew.join(worker)
        else:
            self._send(worker, lane if head is None or lane.heap[0] < head.order else None)

    def _send(self, worker: Worker, lane: Lane | None = None) -> None:
        """Send a worker the next call from a lane, or from the pool's queue."""
        heap, num_workers = (self._backlog.heap, self._crew.size) if lane is None else (lane.heap, len(lane.places))
        if worker.has_delivered and self._backlog.tasks[heap[0][1]].spec.is_fresh:
            worker = self._crew.renew(worker)
            self._out += self._crew.launch(worker, self._now)
        before = self._first_elsewhere(worker, heap) if self._crew.lanes else None
        attempt_id = self._crew.next_attempt_id
        attempt = self._backlog.take(heap, (attempt_id, worker.worker_id), num_workers, before)
        self._crew.engage(worker, attempt)
        if not attempt.is_fresh or worker.state is not WorkerState.STARTING:  # else `begin` follows when it is ready
            self._call(worker, attempt_id, attempt)

    def _first_elsewhere(self, worker: Worker, heap: list[Order]) -> Order | None:
        """Return what comes first in the other queues that a worker has to look into."""
        heaps = [self._backlog.heap, *(lane.heap for lane in self._crew.places[worker.place].lanes.values())]
        return min((other[0] for other in heaps if other is not heap and self._backlog.head(other) is not None), default=None)

    def _try_gang(self, gang: Task) -> None:
        """Let a gang go if it has all its workers, and give it up if it never can."""
        if not self._crew.has_enough:
            self._ledger.end(gang, TaskState.FAILED)
        elif len(self._crew.members) == gang.size:
            for worker in self._crew.start_gang():
                attempt_id = self._crew.next_attempt_id
                attempt = self._backlog.take_rank(gang, (attempt_id, worker.worker_id))
                self._crew.engage(worker, attempt)
                self._call(worker, attempt_id, attempt)

    def begin(self, worker: Worker, now: float) -> list[m.Command]:
        """Send a worker that has come up the call that it was started for, unless nobody wants that any more."""
        ((attempt_id, attempt),) = worker.attempts.items()
        self._now, self._out = now, []
        if attempt.slices[0].task_id in self._backlog.tasks:
            self._call(worker, attempt_id, attempt)
        else:
            del worker.attempts[attempt_id]
        return self._out

    def _call(self, worker: Worker, attempt_id: int, attempt: Attempt) -> None:
        worker.state = BUSY
        self._ledger.counts.attempts += 1
        self._out.append(m.RunTasks(worker.worker_id, attempt_id, attempt.slices))
        if attempt.runs_alone:
            timeout_s = self._backlog.tasks[attempt.slices[0].task_id].spec.timeout_s
            if timeout_s is not None:
                self._out.append(m.SetTimer(self._now + timeout_s, "timeout", worker.worker_id, attempt_id))
