"""`check_invariants` notices when the scheduler's books do not agree."""

from dataclasses import replace

import pytest

from raypool.core.invariants import check_invariants
from raypool.core.model import Lane, PoolState, Slice, TaskState, WorkerState
from raypool.errors import LossReason


@pytest.fixture
def pool(pool_of):
    """Return a pool in the middle of everything: two calls, two waiting tasks, a gang that holds one of four workers."""
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
    attempts = scheduler.crew.workers[2].attempts
    attempt_id, attempt = next(iter(attempts.items()))
    attempts[attempt_id] = attempt._replace(slices=(*attempt.slices, piece))
    scheduler.backlog.tasks[piece.task_id].flights = {attempt_id: 2}


def make_fresh(worker):
    """Let a worker that has run something run what wants a process of its own."""
    worker.has_delivered = True
    worker.attempts = {number: attempt._replace(is_fresh=True) for number, attempt in worker.attempts.items()}


def settle(scheduler, count):
    """Count items of the first task as finished, and forget to end it."""
    scheduler.backlog.tasks[0].settled = scheduler.counts.finished = count


def collect_in(scheduler, places):
    """Let the gang collect in certain places, after it has begun to do so anywhere."""
    gathering = scheduler.crew.gatherings[2]
    gathering.gang = replace(gathering.gang, lane=Lane(places, places=dict.fromkeys(places)))


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("lost or doubled", lambda s: setattr(s.backlog.tasks[0], "cursor", 5)),
        ("wrong count of items in flight", lambda s: setattr(s.backlog.tasks[0], "items_in_flight", 3)),
        ("wrong attempts in flight", lambda s: s.backlog.tasks[0].flights.popitem()),
        ("an item is doubled", lambda s: s.backlog.run_again(s.backlog.tasks[0], [Slice(0, 1, 2, 1)])),
        ("a slice that cannot be", lambda s: s.backlog.run_again(s.backlog.tasks[0], [Slice(0, 4, 4, 1)])),
        ("complete and has not ended", lambda s: settle(s, 5)),
        ("started by half", lambda s: s.backlog.take_rank(s.backlog.tasks[2], (1, 2)) and fly(s, Slice(2, 0, 1, 1))),
        ("wrong mark of being queued", lambda s: setattr(s.backlog.tasks[3], "is_queued", False)),
        ("waits in no queue", lambda s: s.backlog.pop(s.backlog.queue)),
        ("twice in a queue", lambda s: s.backlog.queue.push(s.backlog.queue.first())),
        ("wrong count of what waits", lambda s: setattr(s.backlog.paces[0], "waiting", 0)),
        ("wrong count of tasks", lambda s: setattr(s.backlog.paces[0], "num_tasks", 9)),
        ("not known as such", lambda s: s.backlog.paces.pop(0)),
        ("its lane does not know it", lambda s: s.crew.lanes[2].tasks.pop(4)),
        ("keeps a task that has ended", lambda s: s.crew.lanes[2].tasks.setdefault(9)),
        ("does not know its lanes", lambda s: s.crew.places[2].lanes.clear()),
        ("wrong places", lambda s: s.crew.lanes[2].places.setdefault(1)),
        ("under a wrong key", lambda s: setattr(s.crew.lanes[2], "key", 3)),
        ("lost, but has places", lambda s: setattr(s.crew.lanes[2], "lost", LossReason.EXIT)),
        ("lane not known", lambda s: setattr(s.backlog.tasks[4], "lane", replace(s.crew.lanes[2]))),
        ("in a wrong queue", lambda s: setattr(s.backlog.tasks[4], "lane", None)),
        ("waits in no queue", lambda s: s.crew.lanes[2].queue.pop() and setattr(s.backlog.tasks[4], "is_queued", False)),
        ("was not asked", lambda s: s.crew.calling.setdefault(2, s.crew.lanes[2])),
        ("nobody has looked after", lambda s: s.crew.deserted.append(s.crew.lanes[2])),
        ("parked although there is work", lambda s: s.crew.parked.setdefault(3)),
        (
            "parked, or not",
            lambda s: setattr(s.crew.workers[3], "state", WorkerState.PARKED) or s.crew.gatherings[2].members.clear(),
        ),
        ("not fresh", lambda s: make_fresh(s.crew.workers[0])),
        ("look-ahead past its lanes", lambda s: s.crew.ahead.setdefault(2)),
        ("two workers on one seat", lambda s: s.crew.bench._seated.add(99)),
        ("busy without an attempt", lambda s: s.crew.workers[0].attempts.clear()),
        ("in a wrong group", lambda s: setattr(s.crew.workers[3], "state", WorkerState.STARTING)),
        ("in a wrong group", lambda s: s.crew.gatherings[2].members.clear()),
        ("a worker that is gone", lambda s: s.crew.idle.setdefault(9)),
        ("not asked", lambda s: s.crew.torn.setdefault(3)),
        ("a gang that has ended is kept", lambda s: s.backlog.waiting_gangs.setdefault(9)),
        ("a gang that has ended is kept", lambda s: s.ledger.broken_up.setdefault(9)),
        ("waits and runs, or neither", lambda s: s.backlog.waiting_gangs.pop(2)),
        ("is no gang, and is broken up", lambda s: s.ledger.broken_up.setdefault(0)),
        ("is broken up, and does not run", lambda s: s.ledger.broken_up.setdefault(2)),
        ("waits although task 3 could run", lambda s: s.crew.bar(s.crew.workers[3])),
        ("not one live worker", lambda s: setattr(s.crew.places[0], "worker_id", 1)),
        ("stays without an attempt", lambda s: s.crew.retiring.setdefault(3)),
        ("look-ahead without a call", lambda s: s.crew.ahead.setdefault(3)),
        ("waits for workers that there are not", lambda s: collect_in(s, (3,))),
        ("can't use it", lambda s: collect_in(s, (0, 1, 2))),
        ("do not add up", lambda s: setattr(s.counts, "finished", 1)),
        ("not closed", lambda s: (s.backlog.tasks.clear(), setattr(s, "state", PoolState.CLOSING))),
        ("keeps tasks", lambda s: setattr(s, "state", PoolState.CLOSED)),
        ("without places", lambda s: s.crew.places.clear()),
    ],
)
def test_a_broken_rule_is_named(pool, rule, spoil):
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
    gangs.crew.collect(gang)
    gangs.crew.join(gangs.crew.workers[2], gangs.crew.gatherings[2])
    gangs.crew.torn.clear()
    with pytest.raises(AssertionError, match="collects what another one does"):
        check_invariants(gangs)


def test_a_gang_that_waits_for_nothing_is_noticed(gangs):
    gangs.ledger.end(gangs.backlog.tasks[1], TaskState.CANCELLED)
    gangs.crew.bar(gangs.crew.workers[2])
    with pytest.raises(AssertionError, match="gang 2 waits although it could collect"):
        check_invariants(gangs)
