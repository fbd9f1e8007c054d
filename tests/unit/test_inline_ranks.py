"""The ranks of a gang "inline": the first in the thread that asks, each other in one of its own,
all at the same time.
"""

import threading

import pytest

from raypool.backends.local import InlineBackend
from raypool.channel.records import Function, Part
from raypool.core.messages import AttemptFinished, WorkerLost
from raypool.profiles import Profile

WAIT_S = 300.0


@pytest.fixture
def run_gang():
    """Run a function as three ranks; return what was posted, in order: the worker and how many
    ranks it has done, or None.
    """

    def run(fn):
        posted = []
        backend = InlineBackend(
            Profile(backend="inline"), lambda event, payload: posted.append((event, payload)), print
        )
        function = Function(0, fn, "fn")
        for worker_id in range(3):
            backend.start_worker(worker_id, worker_id, ())
        for rank in (2, 1, 0):
            backend.run(
                rank,
                rank,
                [Part(0, 0, [((rank,), {})], 1, rank, 1, is_call=True, is_rank=True)],
                [function],
                None,
            )
        backend.close()
        answers = [
            (event, payload)
            for event, payload in posted
            if isinstance(event, (AttemptFinished, WorkerLost))
        ]
        return [
            (e.worker_id, p[0].done if isinstance(e, AttemptFinished) else None) for e, p in answers
        ]

    return run


def wait_until_stopped():
    """Run until somebody interrupts it."""
    stopped = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        stopped.wait(0.01)


def test_all_ranks_run_at_the_same_time_and_the_first_in_this_thread(run_gang):
    meeting, threads = threading.Barrier(3), {}

    def meet(rank):
        threads[rank] = threading.current_thread()
        meeting.wait(WAIT_S)

    assert sorted(run_gang(meet)) == [(0, 1), (1, 1), (2, 1)]
    assert threads[0] is threading.current_thread()
    assert len(set(threads.values())) == 3
    assert not threads[1].is_alive()
    assert not threads[2].is_alive()


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_fails_stops_the_others(run_gang, culprit):
    meeting = threading.Barrier(3)

    def fail(rank):
        meeting.wait(WAIT_S)
        if rank == culprit:
            raise ValueError(rank)
        wait_until_stopped()

    first, *others = run_gang(fail)
    assert first == (culprit, 1)
    assert sorted(others) == [(rank, 0) for rank in range(3) if rank != culprit]


def test_a_rank_that_fails_before_the_others_begin_stops_them_too(run_gang):
    def fail(rank):
        if rank == 2:
            raise ValueError(rank)
        wait_until_stopped()

    assert sorted(run_gang(fail)) == [(0, 0), (1, 0), (2, 1)]
