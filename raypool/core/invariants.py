"""What must hold between two events, whatever has happened. On in tests and simulations; costs a look at everything."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from raypool.core.model import PoolState, Slice, Task, Worker, WorkerState
from raypool.core.policy import MAX_IN_FLIGHT
from raypool.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError` naming the first rule that is broken."""
    _check_pool(scheduler)
    _check_groups(scheduler)
    _check_bindings(scheduler)
    for worker in scheduler.crew.workers.values():
        _check_worker(scheduler, worker)
    flying = _in_flight(scheduler)
    for task_id, task in scheduler.backlog.tasks.items():
        _check_task(task, flying.get(task_id, []))
        _check_gang(scheduler, task)
    _check_attempts(scheduler)
    _check_queue(scheduler)
    _check_paces(scheduler)
    if scheduler.state in (PoolState.OPEN, PoolState.CLOSING):
        _check_work_conserving(scheduler)


def _check_pool(scheduler: Scheduler) -> None:
    counts, tasks, is_closing = scheduler.counts, scheduler.backlog.tasks, scheduler.state is PoolState.CLOSING
    if scheduler.state in (PoolState.OPEN, PoolState.CLOSING):
        assert scheduler.crew.places or not tasks, "tasks wait for a pool without places"
        assert tasks or not is_closing, "a pool has nothing more to do and is not closed"
    else:
        assert not tasks, "a pool that has ended keeps tasks"
        assert not scheduler.crew.places, "a pool that has ended keeps places"
    missing = sum(task.size - task.settled for task in tasks.values())
    ended = counts.finished + counts.failed + counts.cancelled
    assert counts.submitted == ended + missing, f"{counts} do not add up with {missing} items to come"


def _check_groups(scheduler: Scheduler) -> None:
    crew = scheduler.crew
    occupied = {place.worker_id: place.place for place in crew.places.values()}
    assert occupied == {w.worker_id: w.place for w in crew.workers.values()}, "not one live worker in each place"
    for group in (crew.idle, crew.ahead, crew.members, crew.retiring):
        assert group.keys() <= crew.workers.keys(), "a group names a worker that is gone"
    assert not crew.torn, "a free worker with tasks of its own was not asked"
    assert crew.gang is not None or not crew.members, "workers are held for no gang"
    listed = Counter(worker_id for _, worker_id in crew._idle_heap if worker_id in crew.workers)
    assert not listed or max(listed.values()) == 1, "a worker is listed twice as idle"
    assert listed.keys() == {w.worker_id for w in crew.workers.values() if w.is_listed}, "wrong mark of being listed"
    assert crew.idle.keys() <= listed.keys(), "an idle worker can't be found"


def _check_bindings(scheduler: Scheduler) -> None:
    workers, tasks = scheduler.crew.workers, scheduler.backlog.tasks
    bound = {(number, worker.worker_id) for worker in workers.values() for number in worker.bound}
    binding = {(number, task.worker_id) for number, task in tasks.items() if task.worker_id is not None}
    assert bound == binding, "a task and its worker do not know of each other"


def _check_worker(scheduler: Scheduler, worker: Worker) -> None:
    crew, number = scheduler.crew, worker.worker_id
    is_idle, is_member, is_ahead, is_retiring = (
        number in group for group in (crew.idle, crew.members, crew.ahead, crew.retiring)
    )
    assert (worker.state is WorkerState.BUSY) == bool(worker.attempts), f"worker {number}: busy without an attempt"
    assert is_idle + is_member == (worker.state is WorkerState.IDLE), f"worker {number}: in a wrong group"
    assert not is_idle or not worker.own, f"worker {number}: idle, but has tasks of its own"
    assert not is_retiring or worker.attempts, f"worker {number}: stays without an attempt"
    assert not (is_retiring and is_ahead), f"worker {number}: is to take one more, and to go"
    assert len(worker.attempts) <= MAX_IN_FLIGHT, f"worker {number}: more than one call of look-ahead"
    assert not is_ahead or len(worker.attempts) == 1, f"worker {number}: look-ahead without a call that runs"
    if is_ahead or len(worker.attempts) == MAX_IN_FLIGHT:
        assert not any(attempt.runs_alone for attempt in worker.attempts.values()), f"worker {number}: not alone"


def _in_flight(scheduler: Scheduler) -> dict[int, list[Slice]]:
    flying: dict[int, list[Slice]] = {}
    for worker in scheduler.crew.workers.values():
        for attempt in worker.attempts.values():
            for piece in attempt.slices:
                flying.setdefault(piece.task_id, []).append(piece)
    return flying


def _check_task(task: Task, flying: list[Slice]) -> None:
    name, spec, again = f"task {task.spec.task_id}", task.spec, list(task.again or ())
    assert task.is_open or task.settled < task.size, f"{name} is complete and has not ended"
    assert task.in_flight == len(flying), f"{name}: wrong count of slices in flight"
    assert task.items_in_flight == sum(p.stop - p.start for p in flying), f"{name}: wrong count of items in flight"
    assert spec.max_workers is None or task.in_flight <= spec.max_workers, f"{name}: too wide"
    edges = sorted((piece.start, piece.stop) for piece in flying + again)
    assert all(start < stop <= task.cursor for start, stop in edges), f"{name}: a slice that cannot be"
    assert all(one[1] <= two[0] for one, two in pairwise(edges)), f"{name}: an item is doubled"
    pending = sum(stop - start for start, stop in edges) + task.size - task.cursor
    assert pending + task.settled == task.size, f"{name}: an item is lost or doubled"
    assert all(1 <= piece.attempt <= spec.retries + 1 for piece in flying + again), f"{name}: an attempt too many"


def _check_gang(scheduler: Scheduler, task: Task) -> None:
    if task.spec.is_gang:
        assert task.cursor in (0, task.size), f"gang {task.spec.task_id} has started by half"
        assert not task.again, f"gang {task.spec.task_id}: a rank is to run by itself"


def _check_attempts(scheduler: Scheduler) -> None:
    for worker in scheduler.crew.workers.values():
        for attempt_id, attempt in worker.attempts.items():
            tasks = [scheduler.backlog.tasks.get(piece.task_id) for piece in attempt.slices]
            for piece, task in zip(attempt.slices, tasks, strict=True):
                if task is None:
                    continue
                is_single = len(attempt.slices) == 1 and attempt.runs_alone
                is_last = piece.attempt > task.spec.retries
                assert is_single or piece.attempt == 1, f"attempt {attempt_id}: a suspect in company"
                assert not is_last or (is_single and piece.stop - piece.start == 1), f"{attempt_id}: last, not alone"
                assert task.worker_id in (None, worker.worker_id), f"attempt {attempt_id}: on the wrong worker"


def _check_queue(scheduler: Scheduler) -> None:
    crew, backlog = scheduler.crew, scheduler.backlog
    entries: Counter[tuple[int, int | None]] = Counter((task_id, None) for _, task_id in backlog.heap)
    for worker in crew.workers.values():
        entries.update((task_id, worker.worker_id) for _, task_id in worker.own)
    assert not entries or max(entries.values()) == 1, "a task stands twice in a heap"
    for task_id, task in backlog.tasks.items():
        assert task.is_queued == ((task_id, task.worker_id) in entries), f"task {task_id}: wrong mark of being queued"
        assert task.is_queued == (task.is_ready and task is not crew.gang), f"task {task_id}: waits in no queue"


def _check_paces(scheduler: Scheduler) -> None:
    backlog = scheduler.backlog
    waiting, num_tasks = Counter[int](), Counter[int]()
    for task in backlog.tasks.values():
        waiting[task.spec.fn_id] += task.waiting
        num_tasks[task.spec.fn_id] += 1
    assert num_tasks.keys() == backlog.paces.keys(), "a function in use is not known as such"
    for fn_id, pace in backlog.paces.items():
        assert pace.waiting == waiting[fn_id], f"function {fn_id}: wrong count of what waits"
        assert pace.num_tasks == num_tasks[fn_id], f"function {fn_id}: wrong count of tasks"
    assert all(pace.waiting == 0 for pace in backlog.idle_paces.values()), "something waits for a function not in use"


def _check_work_conserving(scheduler: Scheduler) -> None:
    crew, backlog = scheduler.crew, scheduler.backlog
    head = backlog.head(backlog.heap)
    if head is not None and head.spec.is_gang:
        assert crew.gang is not None, "a gang waits that nobody collects for"
    elif head is not None:
        assert not crew.idle, f"task {head.spec.task_id} waits although workers are free"
    if crew.gang is not None:
        assert len(crew.members) < crew.gang.size, "a gang is complete and has not started"
        assert crew.has_enough, "a gang waits for workers that there are not"
        for number in crew.idle:
            assert not crew.may_join(crew.workers[number]), f"worker {number} is free and not with the gang"
        for number in crew.members:
            assert crew.may_join(crew.workers[number]), f"worker {number} is held for a gang that can't use it"
