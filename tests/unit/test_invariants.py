"""`check_invariants` notices when the scheduler's books do not agree."""

from dataclasses import replace

import pytest

from raypool.core.invariants import check_invariants
from raypool.core.model import Lane, PoolState, Slice, TaskState, WorkerState


def a_busy(pool_of):
    """Return a pool in the middle of everything: two calls, two waiting tasks, a gang that holds
    one of four workers.
    """
    pool = pool_of(4)
    pool.submit(0, size=5, max_workers=2, chunk_size=2)
    pool.submit(1, place=2)
    pool.submit(2, size=3, is_gang=True)
    pool.submit(3)
    pool.submit(4, place=2)
    check_invariants(pool.scheduler)
    return pool


def fly(scheduler, piece):
    """Put a slice into a call that is in flight, and into the books."""
    attempts = scheduler.workers.by_id[2].attempts
    attempt_id, attempt = next(iter(attempts.items()))
    attempts[attempt_id] = attempt._replace(slices=(*attempt.slices, piece))
    scheduler.backlog.tasks[piece.task_id].flights = {attempt_id: 2}


def make_fresh(worker):
    """Let a worker that has run something run what wants a process of its own."""
    worker.has_delivered = True
    worker.attempts = {
        number: attempt._replace(is_fresh=True) for number, attempt in worker.attempts.items()
    }


def settle(scheduler, count):
    """Count items of the first task as finished, and forget to end it."""
    scheduler.backlog.tasks[0].settled = scheduler.counts.finished = count


def collect_in(scheduler, places):
    """Let the gang collect in certain places, after it has begun to do so anywhere."""
    gathering = scheduler.workers.waiting_gangs[2]
    gathering.gang = replace(gathering.gang, lane=Lane(places, places=dict.fromkeys(places)))


def let_wait(scheduler, worker_id):
    """Put a worker on the list of those that wait for a gang."""
    workers = scheduler.workers
    workers.move(workers.by_id[worker_id], workers.wait_for_gang)


BROKEN = [
    ("lost or doubled", lambda s: setattr(s.backlog.tasks[0], "cursor", 5)),
    ("wrong count of items in flight", lambda s: setattr(s.backlog.tasks[0], "items_in_flight", 3)),
    ("an item is doubled", lambda s: s.backlog.run_again(s.backlog.tasks[0], [Slice(0, 1, 2, 1)])),
    ("complete and has not ended", lambda s: settle(s, 5)),
    ("wrong mark of being queued", lambda s: setattr(s.backlog.tasks[3], "is_queued", False)),
    ("waits in no queue", lambda s: s.backlog.pop(s.backlog.queue)),
    ("its lane does not know it", lambda s: s.workers.lanes[2].tasks.pop(4)),
    ("wrong places", lambda s: s.workers.lanes[2].places.setdefault(1)),
    ("parked although there is work", lambda s: s.workers.parked.setdefault(3)),
    ("not fresh", lambda s: make_fresh(s.workers.by_id[0])),
    ("busy without an attempt", lambda s: s.workers.by_id[0].attempts.clear()),
    ("on a wrong list", lambda s: setattr(s.workers.by_id[3], "state", WorkerState.STARTING)),
    ("does not know its list", lambda s: setattr(s.workers.by_id[3], "waiting_list", None)),
    ("not asked", lambda s: s.workers.check_lanes.setdefault(3)),
    ("waits although task 3 could run", lambda s: let_wait(s, 3)),
    ("not one live worker", lambda s: setattr(s.workers.places[0], "worker_id", 1)),
    ("do not add up", lambda s: setattr(s.counts, "finished", 1)),
    ("keeps tasks", lambda s: setattr(s, "state", PoolState.CLOSED)),
]


def test_a_broken_rule_is_named(pool_of):
    for rule, spoil in BROKEN:
        pool = a_busy(pool_of)
        spoil(pool.scheduler)
        with pytest.raises(AssertionError, match=rule):
            check_invariants(pool.scheduler)


@pytest.fixture
def gangs(pool_of):
    """Return a scheduler with a gang that collects and one that waits, since both want place 1."""
    pool = pool_of(3)
    pool.submit(0, place=1)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    pool.submit(2, size=2, is_gang=True, places=(1, 2))
    return pool.scheduler


def test_two_gangs_that_could_take_each_others_workers_are_noticed(gangs):
    gang = gangs.backlog.tasks[2]
    gangs.backlog.pop(gang.lane.queue)
    gangs.workers.collect(gang)
    gangs.workers.join(gangs.workers.by_id[2], gangs.workers.waiting_gangs[2])
    with pytest.raises(AssertionError, match="collects what another one does"):
        check_invariants(gangs)


def test_a_gang_that_waits_for_nothing_is_noticed(gangs):
    gangs.outcomes.end(gangs.backlog.tasks[1], TaskState.CANCELLED)
    let_wait(gangs, 2)
    with pytest.raises(AssertionError, match="gang 2 waits although it could collect"):
        check_invariants(gangs)
