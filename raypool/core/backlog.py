"""The tasks that have not ended, by priority, then submission, and how they become calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from raypool.core import policy
from raypool.core.model import Attempt, Flight, Order, Queue, Rest, Slice, Task, TaskSpec
from raypool.core.policy import Pace

MAX_IDLE_PACES = 256
"""The number of functions without tasks that keep their measured times, the latest ones."""


class Aside(NamedTuple):
    """Work set aside for other workers: whole tasks, or items of one."""

    tasks: list[Task]
    task: Task
    piece: Slice | None


class Backlog:
    """The tasks that have not ended, the pool's queue, and the pace of each function."""

    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}
        self.queue = Queue()
        self.paces: dict[int, Pace] = {}  # of functions that have tasks
        self.idle_paces: dict[int, Pace] = {}  # of others, the newest last
        self.waiting_gangs: dict[int, None] = {}  # those that have not started

    def admit(self, spec: TaskSpec) -> Task:
        """Add a new task, which still has to be queued."""
        pace = self.paces.get(spec.fn_id)
        if pace is None:
            pace = self.idle_paces.pop(spec.fn_id) if spec.fn_id in self.idle_paces else Pace()
            self.paces[spec.fn_id] = pace
        pace.num_tasks += 1
        pace.waiting += spec.size
        task = self.tasks[spec.task_id] = Task(spec, pace, spec.size, spec.is_open)
        if spec.is_gang:
            self.waiting_gangs[spec.task_id] = None
        return task

    def discard(self, task: Task) -> None:
        """Forget a task that has ended."""
        del self.tasks[task.spec.task_id]
        if self.waiting_gangs:
            self.waiting_gangs.pop(task.spec.task_id, None)
        if task.settled < task.size:
            task.pace.waiting -= task.waiting
        task.pace.num_tasks -= 1
        if task.pace.num_tasks == 0:
            self.idle_paces[task.spec.fn_id] = self.paces.pop(task.spec.fn_id)
            if len(self.idle_paces) > MAX_IDLE_PACES:
                del self.idle_paces[next(iter(self.idle_paces))]

    def extend(self, task: Task, count: int) -> None:
        """Add items to an open task."""
        task.size += count
        task.pace.waiting += count

    def push(self, task: Task, queue: Queue) -> None:
        """Put a task into a queue, if it can be dispatched and is not there already."""
        if not task.is_queued and task.is_ready:
            task.is_queued = True
            queue.push(task.order)

    def unqueue(self, task: Task) -> None:
        """Remove a task from its queue if it cannot be dispatched any more."""
        if task.is_queued and not task.is_ready:
            (self.queue if task.lane is None else task.lane.queue).remove(task.order)
            task.is_queued = False

    def head(self, queue: Queue) -> Task | None:
        """Return the task whose turn it is."""
        while (order := queue.first()) is not None:
            task = self.tasks.get(order[1])
            if task is not None:
                return task
            queue.pop()  # its task has ended
        return None

    def pop(self, queue: Queue) -> Task:
        """Remove the head of a queue."""
        task = self.tasks[queue.pop()[1]]
        task.is_queued = False
        return task

    def land(self, piece: Slice, attempt_id: int) -> Task | None:
        """Take a slice out of flight; return its task, or None: it has ended, or timed out."""
        task = self.tasks.get(piece.task_id)
        if task is None or not task.flights or task.flights.pop(attempt_id, None) is None:
            return None
        task.items_in_flight -= piece.stop - piece.start
        return task

    def fly(self, task: Task, piece: Slice, flight: Flight) -> None:
        """Note that a slice is in flight."""
        task.items_in_flight += piece.stop - piece.start
        attempt_id, worker_id = flight
        if task.flights is None:
            task.flights = {attempt_id: worker_id}
        else:
            task.flights[attempt_id] = worker_id

    def run_again(self, task: Task, pieces: list[Slice]) -> None:
        """Queue slices that were in flight, before the rest of the task."""
        if task.again is None:
            task.again = deque()
        task.again.extendleft(reversed(pieces))
        task.pace.waiting += sum(piece.stop - piece.start for piece in pieces)

    def rest(self, task: Task, pieces: list[Slice], until: float) -> None:
        """Keep slices that were in flight until they may run again."""
        if task.rests is None:
            task.rests = []
        heappush(task.rests, Rest(until, task.num_rests, tuple(pieces)))
        task.num_rests += 1
        task.items_resting += sum(piece.stop - piece.start for piece in pieces)

    def rouse(self, task: Task) -> None:
        """Queue the slices of a task whose rest ends first."""
        if task.rests:
            pieces = heappop(task.rests).pieces
            task.items_resting -= sum(piece.stop - piece.start for piece in pieces)
            self.run_again(task, list(pieces))

    def give_up(self, task: Task) -> list[Slice]:
        """Remove all waiting slices of a task."""
        while task.rests:
            self.rouse(task)
        task.pace.waiting -= task.waiting
        pieces = list(task.again or ())
        if task.cursor < task.size:
            pieces.append(Slice(task.spec.task_id, task.cursor, task.size, 1))
        task.again, task.cursor = None, task.size
        return pieces

    def withdraw(self, task: Task, item: int) -> Slice | None:
        """Remove an item from those that wait or rest; None: it does neither."""
        if task.cursor <= item < task.size:  # what comes before it still runs before the rest
            whole = Slice(task.spec.task_id, task.cursor, item + 1, 1)
            task.again = deque([*(task.again or ()), whole])
            task.cursor = item + 1
        for piece in task.again or ():
            if piece.start <= item < piece.stop:
                task.again = deque(_without(item, task.again or ()))
                task.pace.waiting -= 1
                return piece._replace(start=item, stop=item + 1)
        for at, rest in enumerate(task.rests or ()):
            for piece in rest.pieces:
                if piece.start <= item < piece.stop:
                    assert task.rests is not None
                    task.rests[at] = rest._replace(pieces=tuple(_without(item, rest.pieces)))
                    task.items_resting -= 1
                    return piece._replace(start=item, stop=item + 1)
        return None

    def set_aside(self, task: Task, queue: Queue, count: int) -> Aside:
        """Keep up to `count` items at the head of a queue for other workers, but not the last."""
        if task.waiting > 1:
            return Aside([], task, self._next(task, min(count, task.waiting - 1)))
        skipped: list[Task] = []
        while (head := self.head(queue)) is not None:
            is_alike = head.spec.fn_id == task.spec.fn_id and not head.spec.is_gang
            if len(skipped) == count or not is_alike or head.waiting != 1:
                break
            skipped.append(self.pop(queue))
        aside = Aside(skipped, task, None)
        if head is not None and is_alike:
            return aside
        self.put_back(aside, queue)
        return Aside([], task, None)

    def _next(self, task: Task, room: int) -> Slice:
        """Remove the next slice of at most `room` items from what waits."""
        if task.again:
            piece = task.again.popleft()
            if piece.stop - piece.start > room:
                task.again.appendleft(piece._replace(start=piece.start + room))
                piece = piece._replace(stop=piece.start + room)
            return piece
        start = task.cursor
        task.cursor = min(start + room, task.size)
        return Slice(task.spec.task_id, start, task.cursor, 1)

    def put_back(self, aside: Aside, queue: Queue) -> None:
        """Queue what was set aside, as the next."""
        for task in aside.tasks:
            self.push(task, queue)
        if aside.piece is not None:
            if aside.task.again is None:
                aside.task.again = deque()
            aside.task.again.appendleft(aside.piece)

    def wants_look_ahead(self, task: Task, num_workers: int) -> bool:
        """Whether the next slice of a task may wait behind a running call."""
        spec = task.spec
        if spec.runs_alone() or spec.max_workers is not None or task.is_suspect:
            return False
        return policy.should_look_ahead(task.pace, num_workers)

    def take(
        self,
        task: Task,
        queue: Queue,
        flight: Flight,
        num_workers: int,
        before: Order | None = None,
        is_on_trial: bool = False,
    ) -> Attempt:
        """Cut the next call from the head of a queue and its followers, for one of `num_workers`.

        Short consecutive tasks of one function share the call, each with one slice, up to the order
        `before`, which another queue of the worker has next. A worker on trial gets one item,
        unless the user wants more.
        """
        if task.again and task.is_suspect:
            piece = self._cut(task, queue, flight, room=task.size)
            return Attempt((piece,), task.pace, True, task.spec.is_fresh)
        runs_alone = task.spec.runs_alone()
        room = 1 if runs_alone else task.spec.chunk_size or (1 if is_on_trial else 0)
        room = room or policy.chunk_size(task.pace, num_workers)
        piece = self._cut(task, queue, flight, room)
        slices = [piece]
        while room := room - (piece.stop - piece.start):
            following = self.head(queue)
            if (
                following is None
                or following.spec.task_id == piece.task_id
                or not _may_share(task, following)
            ):
                break
            if before is not None and before < following.order:
                break
            piece = self._cut(following, queue, flight, room)
            slices.append(piece)
        return Attempt(tuple(slices), task.pace, runs_alone, task.spec.is_fresh)

    def take_rank(self, gang: Task, flight: Flight) -> Attempt:
        """Cut the next rank from a gang."""
        piece = self._cut(gang, None, flight, room=1)
        return Attempt((piece,), gang.pace, runs_alone=True, is_loan=gang.spec.is_loan)

    def _cut(self, task: Task, queue: Queue | None, flight: Flight, room: int) -> Slice:
        """Cut a slice of at most `room` items; a task that can give no more leaves its queue."""
        piece = self._next(task, room)
        task.pace.waiting -= piece.stop - piece.start
        self.fly(task, piece, flight)
        if queue is not None and not task.is_ready:
            queue.pop()
            task.is_queued = False
        return piece


def _without(item: int, pieces: Iterable[Slice]) -> Iterator[Slice]:
    for piece in pieces:
        yield from piece.without((item,)) if piece.start <= item < piece.stop else (piece,)


def _may_share(task: Task, following: Task) -> bool:
    """Whether the next slice of `following` may join a call that begins with `task`."""
    spec, other = task.spec, following.spec
    return (
        spec.fn_id == other.fn_id
        and spec.max_workers is None
        and other.max_workers is None
        and spec.chunk_size == other.chunk_size
        and not other.runs_alone()
        and not other.is_gang
        and not following.is_suspect
    )
