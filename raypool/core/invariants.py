"""Invariants of the scheduler, which hold between any two events; tests check them after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from raypool.core.backlog import Backlog
from raypool.core.model import Lane, PoolState, Slice, Task, WaitingList, Worker, WorkerState
from raypool.core.policy import MAX_IN_FLIGHT
from raypool.core.scheduler import GOING_ON, Scheduler
from raypool.core.workers import Workers


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError` naming the first rule that is broken."""
    workers, backlog, outcomes = scheduler.workers, scheduler.backlog, scheduler.outcomes
    _check_pool(scheduler)
    _check_waiting_lists(workers, backlog)
    # while nothing may start, nobody is asked
    if scheduler.leaving is None:
        assert not workers.check_lanes, "a free worker whose lanes may have work was not asked"
        assert not workers.lanes_to_check, "a lane that may have work for somebody was not asked"
    _check_lanes(workers, backlog.tasks)
    for worker in workers.by_id.values():
        _check_worker(workers, worker)
    flying = _in_flight(workers, backlog.tasks)
    for task_id, task in backlog.tasks.items():
        _check_task(task, flying.get(task_id, []))
        _check_gang(scheduler, task)
    known = (backlog.waiting_gangs, workers.waiting_gangs, outcomes.broken_up, outcomes.thinned)
    assert all(number in backlog.tasks for numbers in known for number in numbers), (
        "a gang that has ended is kept"
    )
    _check_attempts(workers, backlog.tasks)
    _check_queue(workers, backlog)
    _check_paces(workers, backlog)
    if scheduler.state in GOING_ON and scheduler.leaving is None:
        _check_work_conserving(workers, backlog)
        _check_gatherings(workers)
        _check_called_gangs(workers, backlog)


def _check_pool(scheduler: Scheduler) -> None:
    counts, tasks, places = scheduler.counts, scheduler.backlog.tasks, scheduler.workers.places
    leaving = scheduler.leaving
    if scheduler.state in GOING_ON:
        assert places or not tasks, "tasks wait for a pool without places"
        assert tasks or scheduler.state is PoolState.OPEN, "a pool is done, but not closed"
        is_busy = any(worker.attempts for worker in scheduler.workers.by_id.values())
        assert is_busy or leaving is None or not leaving.is_final, "a pool waits for nobody"
    else:
        assert not tasks, "a pool that has ended keeps tasks"
        # nobody needs them any more; they are given back when it closes
        is_left = scheduler.state is PoolState.BROKEN and leaving is not None and leaving.is_final
        assert not places or is_left, "a pool that has ended keeps places"
    missing = sum(task.size - task.settled for task in tasks.values())
    ended = counts.finished + counts.failed + counts.cancelled
    assert counts.submitted == ended + missing, (
        f"{counts} do not add up with {missing} items to come"
    )


def _check_waiting_lists(workers: Workers, backlog: Backlog) -> None:
    occupied = {place.worker_id: place.place for place in workers.places.values()}
    assert occupied == {w.worker_id: w.place for w in workers.by_id.values()}, (
        "not one live worker in each place"
    )
    marked = [workers.retiring.keys(), workers.spent.keys()]
    for numbers in (*marked, *(each.keys() for each in _waiting_lists(workers))):
        assert numbers <= workers.by_id.keys(), "a list names a worker that is gone"
    assert workers.streaks.keys() <= workers.places.keys(), "a place is gone, its failures are not"
    assert workers.holds.keys() <= workers.streaks.keys(), "a place is held without a failure"
    for number in workers.held:
        assert workers.by_id[number].place in workers.holds, "a worker is held without a reason"
        is_busy_elsewhere = any(w.attempts for w in workers.by_id.values() if w.worker_id != number)
        assert is_busy_elsewhere, "a worker is held, and nothing runs elsewhere"
    for place in workers.holds:
        number = workers.places[place].worker_id
        is_free = workers.by_id[number].state is WorkerState.IDLE
        assert not is_free or number in workers.held, "a held place offers its worker"
    assert not workers.lanes_lost, "the tasks of a lane without places have not failed"
    assert not workers.parked or not backlog.tasks, "workers are parked although there is work"
    for heap, free in [
        (workers.idle_heap, list(workers.idle)),
        *((lane.idle_heap, _idle_in(workers, lane)) for lane in workers.lanes.values()),
    ]:
        assert all(number in heap for number in free), "an idle worker can't be found"
        listed = Counter(number for _, number in heap._heap)
        assert listed == dict.fromkeys(heap._seated, 1), "a heap has a worker twice"


def _waiting_lists(workers: Workers) -> list[WaitingList]:
    """Return the lists that may have workers between two events."""
    gangs = [gathering.members for gathering in workers.waiting_gangs.values()]
    free = [workers.idle, workers.check_lanes, workers.wait_for_gang, workers.held]
    return [*free, workers.prefetch, workers.parked, *gangs]


def _idle_in(workers: Workers, lane: Lane) -> list[int]:
    held = (workers.places[place].worker_id for place in lane.places)
    return [number for number in held if number in workers.idle]


def _check_lanes(workers: Workers, tasks: dict[int, Task]) -> None:
    places = workers.places
    for key, lane in workers.lanes.items():
        if isinstance(key, tuple):
            wanted = set(places.keys() & key)
        else:
            wanted = {place.place for place in places.values() if place.worker_id == key}
        there = {number for number in wanted if places[number].worker_id not in workers.retiring}
        assert lane.key == key, f"lane {key}: under a wrong key"
        assert lane.places.keys() == there, f"lane {key}: wrong places"
        assert lane.places, f"lane {key}: without places"
        assert lane.lost is None, f"lane {key}: lost, but has places"
        assert lane.tasks, f"lane {key}: without tasks"
    for number, place in places.items():
        assert place.leaving is None or place.worker_id in workers.retiring, (
            f"place {number}: is to go, and its worker is not"
        )
        lanes = {key: lane for key, lane in workers.lanes.items() if number in lane.places}
        assert place.lanes == lanes, f"place {number}: does not know its lanes"
    for number, task in tasks.items():
        name, own = f"task {number}", task.lane
        is_special = task.spec.place is not None or task.spec.places is not None
        assert is_special == (own is not None), f"{name}: in a wrong queue"
        if own is not None:
            assert number in own.tasks, f"{name}: its lane does not know it"
            is_known = workers.lanes.get(own.key) is own
            assert (own.lost is None) == is_known, f"{name}: lane not known"
            assert own.lost is None or not own.places, f"{name}: lane lost, but has places"
            assert own.tasks.keys() <= tasks.keys(), f"{name}: its lane keeps an ended task"


def _check_worker(workers: Workers, worker: Worker) -> None:
    number, name, attempts = worker.worker_id, f"worker {worker.worker_id}", worker.attempts
    lists = [each for each in _waiting_lists(workers) if number in each]
    is_ahead, is_parked = number in workers.prefetch, number in workers.parked
    has_fresh = any(attempt.is_fresh for attempt in attempts.values())
    # a starting worker may have the one call that needs a new process
    is_reserved = worker.state is WorkerState.STARTING and len(attempts) == 1 and has_fresh
    is_engaged = worker.state is WorkerState.BUSY or is_reserved
    assert is_engaged == bool(attempts), f"{name}: busy without an attempt"
    assert not (has_fresh and worker.has_delivered), f"{name}: not fresh"
    assert len(lists) < 2, f"{name}: on two lists"
    assert worker.waiting_list is next(iter(lists), None), f"{name}: does not know its list"
    is_free = bool(lists) and not is_ahead and not is_parked
    assert is_free == (worker.state is WorkerState.IDLE), f"{name}: on a wrong list"
    assert is_parked == (worker.state is WorkerState.PARKED), f"{name}: parked, or not"
    assert number not in workers.retiring or attempts, f"{name}: stays without an attempt"
    assert number not in workers.spent or attempts or number in workers.lanes, (
        f"{name}: is spent, and was not replaced"
    )
    assert len(attempts) <= MAX_IN_FLIGHT, f"{name}: more than one call of look-ahead"
    if is_ahead:
        assert number not in workers.retiring, f"{name}: is to take one more, and to go"
        assert number not in workers.spent, f"{name}: is to take one more, and to be replaced"
        assert not workers.places[worker.place].lanes, f"{name}: look-ahead past its lanes"
        assert len(attempts) == 1, f"{name}: look-ahead without a call that runs"
        assert not any(each.lasts for each in attempts.values()), f"{name}: look-ahead for long"
    if is_ahead or len(attempts) == MAX_IN_FLIGHT:
        assert not any(each.runs_alone for each in attempts.values()), f"{name}: not alone"


def _in_flight(workers: Workers, tasks: dict[int, Task]) -> dict[int, list[tuple[int, int, Slice]]]:
    """Return (attempt, worker, slice) of each task, without single items that were given up."""
    flying: dict[int, list[tuple[int, int, Slice]]] = {}
    for worker in workers.by_id.values():
        for attempt_id, attempt in worker.attempts.items():
            for piece in attempt.slices:
                task = tasks.get(piece.task_id)
                if task is not None and (
                    piece.stop - piece.start > 1 or attempt_id in (task.flights or ())
                ):
                    entry = (attempt_id, worker.worker_id, piece)
                    flying.setdefault(piece.task_id, []).append(entry)
    return flying


def _check_task(task: Task, flights: list[tuple[int, int, Slice]]) -> None:
    name, spec = f"task {task.spec.task_id}", task.spec
    resting = [piece for rest in task.rests or () for piece in rest.pieces]
    flying = [piece for _, _, piece in flights]
    pieces = [*flying, *(task.again or ()), *resting]
    assert task.items_resting == _count(resting), f"{name}: wrong count of items that rest"
    assert all(piece.attempt > 1 for piece in resting), f"{name}: rests, but has never run"
    assert task.is_open or task.settled < task.size, f"{name} is complete and has not ended"
    assert task.flights or not task.is_draining, f"{name} is to end, and waits for nothing"
    assert (task.flights or {}) == {number: worker for number, worker, _ in flights}, (
        f"{name}: wrong attempts in flight"
    )
    assert len(task.flights or ()) == len(flying), f"{name}: two slices in one call"
    assert task.items_in_flight == _count(flying), f"{name}: wrong count of items in flight"
    assert spec.max_workers is None or len(flying) <= spec.max_workers, f"{name}: too wide"
    edges = sorted((piece.start, piece.stop) for piece in pieces)
    assert all(start < stop <= task.cursor for start, stop in edges), f"{name}: a wrong slice"
    assert all(one[1] <= two[0] for one, two in pairwise(edges)), f"{name}: an item is doubled"
    pending = _count(pieces) + task.size - task.cursor
    assert pending + task.settled == task.size, f"{name}: an item is lost or doubled"
    assert all(1 <= p.attempt <= spec.retries + 1 for p in pieces), f"{name}: an attempt too many"


def _count(pieces: list[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _check_gang(scheduler: Scheduler, task: Task) -> None:
    number, name = task.spec.task_id, f"gang {task.spec.task_id}"
    is_broken_up = number in scheduler.outcomes.broken_up
    if not task.spec.is_gang:
        assert not is_broken_up, f"task {number} is no gang, and is broken up"
        return
    assert task.cursor in (0, task.size), f"{name} has started by half"
    assert not task.again, f"{name}: a rank is to run by itself"
    assert (number in scheduler.backlog.waiting_gangs) == (not task.flights), (
        f"{name} waits and runs, or neither"
    )
    is_collecting = number in scheduler.workers.waiting_gangs
    assert is_collecting == (not task.flights and not task.is_queued), f"{name} waits nowhere"
    assert not is_broken_up or task.flights, f"{name} is broken up, and does not run"


def _check_attempts(workers: Workers, tasks: dict[int, Task]) -> None:
    for worker in workers.by_id.values():
        for attempt_id, attempt in worker.attempts.items():
            name = f"attempt {attempt_id}"
            is_single = len(attempt.slices) == 1 and attempt.runs_alone
            for piece in attempt.slices:
                task = tasks.get(piece.task_id)
                if task is None:
                    continue
                assert is_single or piece.attempt == 1, f"{name}: a suspect in company"
                if piece.attempt > task.spec.retries or task.spec.runs_alone():
                    assert is_single, f"{name}: last, not alone"
                    assert piece.stop - piece.start == 1, f"{name}: last, not alone"
                lane = task.lane
                may_run = lane is None or lane.lost is not None or worker.place in lane.places
                assert may_run or worker.worker_id in workers.retiring, f"{name}: in a wrong place"


def _check_queue(workers: Workers, backlog: Backlog) -> None:
    queues = [(None, backlog.queue), *((lane, lane.queue) for lane in workers.lanes.values())]
    entries = Counter((task_id, id(lane)) for lane, queue in queues for _, task_id in queue)
    assert not entries or max(entries.values()) == 1, "a task stands twice in a queue"
    for task_id, task in backlog.tasks.items():
        name, is_here = f"task {task_id}", (task_id, id(task.lane)) in entries
        if task.lane is not None and task.lane.lost is not None:
            assert task.waiting == task.is_open == 0, f"{name}: waits for nobody"
        else:
            assert task.is_queued == is_here, f"{name}: wrong mark of being queued"
            is_due = task.is_ready and task_id not in workers.waiting_gangs
            assert is_here == is_due, f"{name}: waits in no queue"


def _check_paces(workers: Workers, backlog: Backlog) -> None:
    waiting, num_tasks = Counter[int](), Counter[int]()
    for task in backlog.tasks.values():
        waiting[task.spec.fn_id] += task.waiting
        num_tasks[task.spec.fn_id] += 1
    running = Counter(id(a.pace) for w in workers.by_id.values() for a in w.attempts.values())
    assert num_tasks.keys() == backlog.paces.keys(), "a function in use is not known as such"
    for fn_id, pace in backlog.paces.items():
        name = f"function {fn_id}"
        assert pace.waiting == waiting[fn_id], f"{name}: wrong count of what waits"
        assert pace.num_tasks == num_tasks[fn_id], f"{name}: wrong count of tasks"
        assert pace.running == running[id(pace)], f"{name}: wrong count of calls in flight"
    assert all(pace.waiting == 0 for pace in backlog.idle_paces.values()), (
        "something waits for a function not in use"
    )


def _check_work_conserving(workers: Workers, backlog: Backlog) -> None:
    head = backlog.head(backlog.queue)
    assert head is None or not workers.idle, (
        f"task {head.spec.task_id} waits although workers are free"
    )
    for lane in workers.lanes.values():
        assert backlog.head(lane.queue) is None or not _idle_in(workers, lane), (
            f"lane {lane.key} waits although workers are free"
        )
    for number in workers.wait_for_gang:
        lanes = workers.places[workers.by_id[number].place].lanes.values()
        heads = _heads(backlog, lanes)
        assert heads, f"worker {number} waits for nothing"
        first = min(heads, key=lambda task: task.order)
        assert first.spec.is_gang, (
            f"worker {number} waits although task {first.spec.task_id} could run"
        )


def _heads(backlog: Backlog, lanes: Iterable[Lane]) -> list[Task]:
    """Return the first tasks of the pool's queue and of these lanes."""
    queues = [backlog.queue, *(lane.queue for lane in lanes)]
    return [head for queue in queues if (head := backlog.head(queue)) is not None]


def _check_gatherings(workers: Workers) -> None:
    gatherings = workers.waiting_gangs
    for key, gathering in gatherings.items():
        gang, members = gathering.gang, gathering.members
        name = f"gang {gang.spec.task_id}"
        assert key == gang.spec.task_id, f"{name}: under a wrong key"
        assert len(members) < gang.size, f"{name} is complete and has not started"
        assert workers.has_enough(gang), f"{name} waits for workers that do not exist"
        others = [other.gang.spec for other in gatherings.values() if other is not gathering]
        assert not any(gang.spec.may_meet(other) for other in others), (
            f"{name} collects what another one does"
        )
        for number in (*workers.idle, *workers.wait_for_gang):
            assert not gathering.wants(workers.by_id[number].place), (
                f"worker {number} is free and not with {name}"
            )
        for number in members:
            assert gathering.wants(workers.by_id[number].place), (
                f"worker {number} is held for a gang that can't use it"
            )


def _check_called_gangs(workers: Workers, backlog: Backlog) -> None:
    """Check that a gang at the head of its queue waits only for what comes before it."""
    heads = _heads(backlog, workers.lanes.values())
    first = backlog.head(backlog.queue)
    collecting = [gathering.gang for gathering in workers.waiting_gangs.values()]
    for gang in heads:
        earlier = [other for other in heads if other.spec.is_gang and other.order < gang.order]
        is_early = first is not None and first.order < gang.order
        is_in_the_way = any(gang.spec.may_meet(each.spec) for each in (*collecting, *earlier))
        assert not gang.spec.is_gang or is_early or is_in_the_way, (
            f"gang {gang.spec.task_id} waits although it could collect"
        )
