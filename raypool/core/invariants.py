"""Invariants of the scheduler: what holds between any two events.

Tests and simulations check them after each event, at the cost of a look at everything.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from raypool.core.model import Group, Lane, PoolState, Slice, Task, Worker, WorkerState
from raypool.core.policy import MAX_IN_FLIGHT, Pace
from raypool.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError` naming the first rule that is broken."""
    _check_pool(scheduler)
    _check_groups(scheduler)
    _check_lanes(scheduler)
    for worker in scheduler.workers.by_id.values():
        _check_worker(scheduler, worker)
    flying = _in_flight(scheduler)
    for task_id, task in scheduler.backlog.tasks.items():
        _check_task(task, flying.get(task_id, []))
        _check_gang(scheduler, task)
    outcomes = scheduler.outcomes
    known = (
        scheduler.backlog.waiting_gangs,
        scheduler.workers.waiting_gangs,
        outcomes.broken_up,
        outcomes.thinned,
    )
    assert all(number in scheduler.backlog.tasks for numbers in known for number in numbers), (
        "a gang that has ended is kept"
    )
    _check_attempts(scheduler)
    _check_queue(scheduler)
    _check_paces(scheduler)
    if scheduler.state in (PoolState.OPEN, PoolState.CLOSING):
        _check_work_conserving(scheduler)


def _check_pool(scheduler: Scheduler) -> None:
    counts, tasks, is_closing = (
        scheduler.counts,
        scheduler.backlog.tasks,
        scheduler.state is PoolState.CLOSING,
    )
    if scheduler.state in (PoolState.OPEN, PoolState.CLOSING):
        assert scheduler.workers.places or not tasks, "tasks wait for a pool without places"
        assert tasks or not is_closing, "a pool has nothing more to do and is not closed"
    else:
        assert not tasks, "a pool that has ended keeps tasks"
        assert not scheduler.workers.places, "a pool that has ended keeps places"
    missing = sum(task.size - task.settled for task in tasks.values())
    ended = counts.finished + counts.failed + counts.cancelled
    assert counts.submitted == ended + missing, (
        f"{counts} do not add up with {missing} items to come"
    )


def _check_groups(scheduler: Scheduler) -> None:
    workers = scheduler.workers
    occupied = {place.worker_id: place.place for place in workers.places.values()}
    assert occupied == {w.worker_id: w.place for w in workers.by_id.values()}, (
        "not one live worker in each place"
    )
    for marked in (workers.retiring, workers.spent, *_groups(scheduler)):
        assert marked.keys() <= workers.by_id.keys(), "a group names a worker that is gone"
    assert workers.streaks.keys() <= workers.places.keys(), (
        "failures are remembered of a place that is gone"
    )
    assert not workers.check_lanes, "a free worker whose lanes may have work was not asked"
    assert not workers.lanes_to_check, "a lane that may have work for somebody was not asked"
    assert not workers.lanes_lost, "nobody has looked after the tasks of a lane without places"
    assert not workers.parked or not scheduler.backlog.tasks, (
        "workers are parked although there is work"
    )
    for heap, free in [
        (workers.idle_heap, list(workers.idle)),
        *((lane.idle_heap, _idle_in(scheduler, lane)) for lane in workers.lanes.values()),
    ]:
        assert all(number in heap for number in free), "an idle worker can't be found"
        listed = Counter(number for _, number in heap._heap)
        assert listed == dict.fromkeys(heap._seated, 1), "a heap has two workers on one seat"


def _idle_in(scheduler: Scheduler, lane: Lane) -> list[int]:
    places = scheduler.workers.places
    return [
        places[place].worker_id
        for place in lane.places
        if places[place].worker_id in scheduler.workers.idle
    ]


def _check_lanes(scheduler: Scheduler) -> None:
    workers, tasks = scheduler.workers, scheduler.backlog.tasks
    for key, lane in workers.lanes.items():
        wanted = (
            key
            if isinstance(key, tuple)
            else tuple(place.place for place in workers.places.values() if place.worker_id == key)
        )
        there = {
            number
            for number in wanted
            if number in workers.places and workers.places[number].worker_id not in workers.retiring
        }
        assert lane.key == key, f"lane {key}: under a wrong key"
        assert lane.places.keys() == there, f"lane {key}: wrong places"
        assert lane.places, f"lane {key}: without places"
        assert lane.lost is None, f"lane {key}: lost, but has places"
        assert lane.tasks, f"lane {key}: without tasks"
    for number, place in workers.places.items():
        assert place.leaving is None or place.worker_id in workers.retiring, (
            f"place {number}: is to go, and its worker is not"
        )
        lanes = {key: lane for key, lane in workers.lanes.items() if number in lane.places}
        assert place.lanes == lanes, f"place {number}: does not know its lanes"
    for number, task in tasks.items():
        is_special = task.spec.place is not None or task.spec.places is not None
        assert is_special == (task.lane is not None), f"task {number}: in a wrong queue"
        if task.lane is not None:
            assert number in task.lane.tasks, f"task {number}: its lane does not know it"
            assert (task.lane.lost is None) == (workers.lanes.get(task.lane.key) is task.lane), (
                f"task {number}: lane not known"
            )
            assert task.lane.lost is None or not task.lane.places, (
                f"task {number}: lane lost, but has places"
            )
            assert task.lane.tasks.keys() <= tasks.keys(), (
                f"lane {task.lane.key}: keeps a task that has ended"
            )


def _check_worker(scheduler: Scheduler, worker: Worker) -> None:
    workers, number = scheduler.workers, worker.worker_id
    groups = [group for group in _groups(scheduler) if number in group]
    is_ahead, is_retiring = number in workers.prefetch, number in workers.retiring
    may_have = (worker.state is WorkerState.BUSY, _is_reserved(worker))
    assert any(may_have) == bool(worker.attempts), f"worker {number}: busy without an attempt"
    has_fresh = any(attempt.is_fresh for attempt in worker.attempts.values())
    assert not (has_fresh and worker.has_delivered), f"worker {number}: not fresh"
    assert len(groups) < 2, f"worker {number}: in two groups"
    assert worker.group is next(iter(groups), None), f"worker {number}: does not know its group"
    is_free = bool(groups) and not is_ahead and number not in workers.parked
    assert is_free == (worker.state is WorkerState.IDLE), f"worker {number}: in a wrong group"
    assert (number in workers.parked) == (worker.state is WorkerState.PARKED), (
        f"worker {number}: parked, or not"
    )
    assert not is_retiring or worker.attempts, f"worker {number}: stays without an attempt"
    assert not (is_retiring and is_ahead), f"worker {number}: is to take one more, and to go"
    assert not (is_ahead and number in workers.spent), (
        f"worker {number}: is to take one more, and to be replaced"
    )
    is_bound = bool(worker.attempts) or number in workers.lanes
    assert number not in workers.spent or is_bound, (
        f"worker {number}: is spent, and was not replaced"
    )
    assert not (is_ahead and workers.places[worker.place].lanes), (
        f"worker {number}: look-ahead past its lanes"
    )
    assert len(worker.attempts) <= MAX_IN_FLIGHT, (
        f"worker {number}: more than one call of look-ahead"
    )
    assert not is_ahead or len(worker.attempts) == 1, (
        f"worker {number}: look-ahead without a call that runs"
    )
    assert not (is_ahead and any(attempt.lasts for attempt in worker.attempts.values())), (
        f"worker {number}: look-ahead for long"
    )
    if is_ahead or len(worker.attempts) == MAX_IN_FLIGHT:
        assert not any(attempt.runs_alone for attempt in worker.attempts.values()), (
            f"worker {number}: not alone"
        )


def _is_reserved(worker: Worker) -> bool:
    """Whether a worker is started for one call that has to be in a process of its own."""
    attempts = list(worker.attempts.values())
    return worker.state is WorkerState.STARTING and len(attempts) == 1 and attempts[0].is_fresh


def _in_flight(scheduler: Scheduler) -> dict[int, list[tuple[int, int, Slice]]]:
    """Return what is in flight of each task: attempt, worker and slice; not the slices that have
    timed out.
    """
    flying: dict[int, list[tuple[int, int, Slice]]] = {}
    for worker in scheduler.workers.by_id.values():
        for attempt_id, attempt in worker.attempts.items():
            for piece in attempt.slices:
                task = scheduler.backlog.tasks.get(piece.task_id)
                if task is None or (
                    task.spec.timeout_s is not None and attempt_id not in (task.flights or ())
                ):
                    continue
                flying.setdefault(piece.task_id, []).append((attempt_id, worker.worker_id, piece))
    return flying


def _check_task(task: Task, flights: list[tuple[int, int, Slice]]) -> None:
    name, spec, again = f"task {task.spec.task_id}", task.spec, list(task.again or ())
    resting = [piece for rest in task.rests or () for piece in rest.pieces]
    assert task.items_resting == sum(p.stop - p.start for p in resting), (
        f"{name}: wrong count of items that rest"
    )
    assert all(piece.attempt > 1 for piece in resting), (
        f"{name}: something rests that has never run"
    )
    again += resting
    flying = [piece for _, _, piece in flights]
    assert task.is_open or task.settled < task.size, f"{name} is complete and has not ended"
    assert (task.flights or {}) == {number: worker for number, worker, _ in flights}, (
        f"{name}: wrong attempts in flight"
    )
    assert len(task.flights or ()) == len(flying), f"{name}: two slices in one call"
    assert task.items_in_flight == sum(p.stop - p.start for p in flying), (
        f"{name}: wrong count of items in flight"
    )
    assert spec.max_workers is None or len(flying) <= spec.max_workers, f"{name}: too wide"
    edges = sorted((piece.start, piece.stop) for piece in flying + again)
    assert all(start < stop <= task.cursor for start, stop in edges), (
        f"{name}: a slice that cannot be"
    )
    assert all(one[1] <= two[0] for one, two in pairwise(edges)), f"{name}: an item is doubled"
    pending = sum(stop - start for start, stop in edges) + task.size - task.cursor
    assert pending + task.settled == task.size, f"{name}: an item is lost or doubled"
    assert all(1 <= piece.attempt <= spec.retries + 1 for piece in flying + again), (
        f"{name}: an attempt too many"
    )


def _check_gang(scheduler: Scheduler, task: Task) -> None:
    number = task.spec.task_id
    if not task.spec.is_gang:
        assert number not in scheduler.outcomes.broken_up, (
            f"task {number} is no gang, and is broken up"
        )
        return
    assert task.cursor in (0, task.size), f"gang {number} has started by half"
    assert not task.again, f"gang {number}: a rank is to run by itself"
    assert (number in scheduler.backlog.waiting_gangs) == (not task.flights), (
        f"gang {number} waits and runs, or neither"
    )
    assert (number in scheduler.workers.waiting_gangs) == (
        not task.flights and not task.is_queued
    ), f"gang {number} waits nowhere"
    assert number not in scheduler.outcomes.broken_up or task.flights, (
        f"gang {number} is broken up, and does not run"
    )


def _check_attempts(scheduler: Scheduler) -> None:
    for worker in scheduler.workers.by_id.values():
        for attempt_id, attempt in worker.attempts.items():
            tasks = [scheduler.backlog.tasks.get(piece.task_id) for piece in attempt.slices]
            for piece, task in zip(attempt.slices, tasks, strict=True):
                if task is None:
                    continue
                is_single = len(attempt.slices) == 1 and attempt.runs_alone
                is_last = piece.attempt > task.spec.retries
                assert is_single or piece.attempt == 1, (
                    f"attempt {attempt_id}: a suspect in company"
                )
                is_delicate = is_last or task.spec.runs_alone()
                assert not is_delicate or (is_single and piece.stop - piece.start == 1), (
                    f"{attempt_id}: last, not alone"
                )
                has_lost_its_lane = task.lane is not None and task.lane.lost is not None
                may_run = task.lane is None or has_lost_its_lane or worker.place in task.lane.places
                assert may_run or worker.worker_id in scheduler.workers.retiring, (
                    f"attempt {attempt_id}: in a wrong place"
                )


def _check_queue(scheduler: Scheduler) -> None:
    workers, backlog = scheduler.workers, scheduler.backlog
    queues = [(None, backlog.queue), *((lane, lane.queue) for lane in workers.lanes.values())]
    entries = Counter((task_id, id(lane)) for lane, queue in queues for _, task_id in queue)
    assert not entries or max(entries.values()) == 1, "a task stands twice in a queue"
    for task_id, task in backlog.tasks.items():
        is_here = (task_id, id(task.lane)) in entries
        if task.lane is not None and task.lane.lost is not None:
            assert task.waiting == task.is_open == 0, f"task {task_id}: waits for nobody"
        else:
            assert task.is_queued == is_here, f"task {task_id}: wrong mark of being queued"
            assert is_here == (task.is_ready and task_id not in workers.waiting_gangs), (
                f"task {task_id}: waits in no queue"
            )


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
        assert pace.running == _num_running(scheduler, pace), (
            f"function {fn_id}: wrong count of calls in flight"
        )
    assert all(pace.waiting == 0 for pace in backlog.idle_paces.values()), (
        "something waits for a function not in use"
    )


def _num_running(scheduler: Scheduler, pace: Pace) -> int:
    return sum(
        attempt.pace is pace
        for worker in scheduler.workers.by_id.values()
        for attempt in worker.attempts.values()
    )


def _check_work_conserving(scheduler: Scheduler) -> None:
    workers, backlog = scheduler.workers, scheduler.backlog
    head = backlog.head(backlog.queue)
    assert head is None or not workers.idle, (
        f"task {head.spec.task_id} waits although workers are free"
    )
    for lane in workers.lanes.values():
        waiting = backlog.head(lane.queue)
        assert waiting is None or not _idle_in(scheduler, lane), (
            f"lane {lane.key} waits although workers are free"
        )
    for worker_id in workers.wait_for_gang:
        first = min((task.order for task in _heads_for(scheduler, worker_id)), default=None)
        assert first is not None, f"worker {worker_id} waits for nothing"
        assert backlog.tasks[first[1]].spec.is_gang, (
            f"worker {worker_id} waits although task {first[1]} could run"
        )
    _check_gatherings(scheduler)
    _check_called_gangs(scheduler)


def _heads_for(scheduler: Scheduler, worker_id: int) -> list[Task]:
    """Return what comes first in each of the queues that a worker looks into."""
    workers, backlog = scheduler.workers, scheduler.backlog
    lanes = workers.places[workers.by_id[worker_id].place].lanes.values()
    heads = [backlog.head(queue) for queue in (backlog.queue, *(lane.queue for lane in lanes))]
    return [head for head in heads if head is not None]


def _check_gatherings(scheduler: Scheduler) -> None:
    workers = scheduler.workers
    gatherings = list(workers.waiting_gangs.values())
    for gathering in gatherings:
        gang, members = gathering.gang, gathering.members
        name = f"gang {gang.spec.task_id}"
        assert workers.waiting_gangs[gang.spec.task_id] is gathering, f"{name}: under a wrong key"
        assert len(members) < gang.size, f"{name} is complete and has not started"
        assert workers.has_enough(gang), f"{name} waits for workers that there are not"
        others = [other.gang.spec for other in gatherings if other is not gathering]
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


def _check_called_gangs(scheduler: Scheduler) -> None:
    """Whatever keeps the gang that is first in its queue from collecting comes before it."""
    workers, backlog = scheduler.workers, scheduler.backlog
    heads = [
        backlog.head(queue)
        for queue in (backlog.queue, *(lane.queue for lane in workers.lanes.values()))
    ]
    called = [head for head in heads if head is not None and head.spec.is_gang]
    collecting = [gathering.gang for gathering in workers.waiting_gangs.values()]
    for gang in called:
        before = [*collecting, *(other for other in called if other.order < gang.order)]
        is_early = heads[0] is not None and heads[0].order < gang.order
        is_in_the_way = any(other.spec.may_meet(gang.spec) for other in before)
        assert is_early or is_in_the_way, (
            f"gang {gang.spec.task_id} waits although it could collect"
        )


def _groups(scheduler: Scheduler) -> list[Group]:
    """Return the groups of workers that outlast an event."""
    workers = scheduler.workers
    gangs = [gathering.members for gathering in workers.waiting_gangs.values()]
    return [workers.idle, workers.wait_for_gang, workers.prefetch, workers.parked, *gangs]
