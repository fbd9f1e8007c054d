"""How many workers share a GPU: the policy, what the driver makes of it, and the turns that workers
take.
"""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypool.backends.ray.card_sharing import TRIES_ALONE, SharedGpus
from raypool.channel.records import Failure, LocalValues, Part, SliceResult
from raypool.core.messages import ResizeRequested
from raypool.errors import ResourceError
from raypool.gpus.sharing import (
    CONTEXT_BYTES,
    MARGIN,
    MOST,
    Load,
    fitting,
    fraction_for,
    workers_for,
    worthwhile,
)
from raypool.gpus.simulated import CONTEXT_BYTES as SIMULATED_CONTEXT
from raypool.gpus.simulated import SimulatedGpus
from raypool.worker.gpu_turns import GpuLoad, GpuTurns

GIBIBYTE = 2**30

CARD = 16 * GIBIBYTE

# --- the policy -----------------------------------------------------------------------------------

loads = st.builds(
    Load,
    seats=st.integers(1, MOST),
    total_bytes=st.none() | st.integers(GIBIBYTE, 200 * GIBIBYTE),
    others_bytes=st.integers(0, 100 * GIBIBYTE),
    peak_bytes=st.none() | st.integers(0, 150 * GIBIBYTE),
    overhead_bytes=st.integers(0, 2 * GIBIBYTE),
    utilization=st.none() | st.floats(0, 1),
)


@given(loads)
def test_never_more_than_fit(load: Load) -> None:
    """Two or more workers together need less than the GPU has free, with the margin; and there is
    always one.
    """
    seats = workers_for(load)
    assert 1 <= seats <= MOST
    if load.total_bytes is None or load.peak_bytes is None:
        assert seats == load.seats
    elif seats > 1:
        assert (
            seats * (load.peak_bytes + load.overhead_bytes)
            <= load.total_bytes * (1 - MARGIN) - load.others_bytes
        )


@given(loads)
def test_who_fits_has_memory_enough(load: Load) -> None:
    """Each of the workers that share a GPU may have what its items were seen to need, and all of
    them have room at once.
    """
    fit = fitting(load)
    if fit is None or fit == 1:
        return
    share = fraction_for(fit, load.total_bytes, load.others_bytes, load.overhead_bytes)
    assert load.total_bytes is not None
    assert load.peak_bytes is not None
    assert share * load.total_bytes >= load.peak_bytes - 1
    assert fit * (
        share * load.total_bytes + load.overhead_bytes
    ) + load.others_bytes <= load.total_bytes * (1 + 1e-9)


@given(loads)
def test_it_grows_by_steps_and_only_as_far_as_that_is_of_use(load: Load) -> None:
    """Twice as many at most, and none that would find the GPU busy; those that fit are not sent
    away for that.
    """
    seats = workers_for(load)
    if seats > load.seats:
        assert seats <= 2 * load.seats
        assert seats <= worthwhile(load)
    elif seats < load.seats:
        assert seats == fitting(load)


def test_items_of_three_gibibytes_find_their_number() -> None:
    """One, two, four, and no more: the fifth would not fit with its context and the margin."""
    seats = [1]
    for _ in range(4):
        seats.append(
            workers_for(
                Load(seats[-1], CARD, peak_bytes=3 * GIBIBYTE, overhead_bytes=SIMULATED_CONTEXT)
            )
        )
    assert seats == [1, 2, 4, 4, 4]


def test_a_busy_gpu_gets_no_more() -> None:
    """By how busy each of the workers that are there keeps it."""
    for busy, seats, expected in [
        (1.0, 1, 1),
        (0.5, 1, 2),
        (0.5, 2, 3 + 1),
        (0.0, 1, 2),
        (None, 4, 8),
    ]:
        assert (
            workers_for(Load(seats, CARD, peak_bytes=GIBIBYTE // 4, utilization=busy)) == expected
        )


def test_without_knowledge_of_the_size_a_tenth_is_left_for_contexts() -> None:
    """And a GPU of one worker is its own."""
    assert fraction_for(4, None) * 4 == pytest.approx(0.9)
    assert fraction_for(1, None) == fraction_for(1, CARD) == 1.0
    assert fraction_for(4, CARD) == (CARD - 4 * CONTEXT_BYTES) / 4 / CARD


def test_torch_is_told_its_part_before_it_is_there() -> None:
    """The limit stands where torch looks for it, beside what the user has set; nothing is imported
    for that.
    """
    code = """
import os, sys
from raypool.gpus.memory import TorchAllocator

TorchAllocator().limit(0.25)
print(os.environ["PYTORCH_CUDA_ALLOC_CONF"], "torch" in sys.modules)
"""
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        timeout=300,
        check=True,
    )
    assert done.stdout == "max_split_size_mb:256,per_process_memory_fraction:0.25 False\n"


# --- the cards of a pool --------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """Torch's, by its name and module, which is all that counts."""


OutOfMemoryError.__module__ = "torch"


class FakeDemand:
    kind = "GPU"
    workers_per_claim = MOST
    first_workers = 1


class FakeClaim:
    """A claim without Ray."""

    def __init__(self) -> None:
        self.demand = FakeDemand()
        self.num_workers = self.room = 1
        self.is_released = False


class FakeSeating:
    """Gives out numbers, as `Placement` does."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.on: dict[int, Any] = {}

    def widen(self, claim: Any, room: int) -> dict[int, Any]:
        new = {next(self._numbers): claim for _ in range(room - claim.num_workers)}
        claim.num_workers += len(new)
        claim.room = room
        self.on |= new
        return new

    def narrow(self, claim: Any, room: int) -> tuple[int, ...]:
        claim.room = room
        leaving = tuple(sorted(self.on)[room - 1 :])
        for place in leaving:
            del self.on[place]
        return leaving


BUSY = 0.95


class Play:
    """One card, whose workers the test plays."""

    def __init__(self, utilization: float | None = None, *, is_mps: bool = False) -> None:
        self.seating, self.claim = FakeSeating(), FakeClaim()
        self.told: list[ResizeRequested] = []
        self.cards = SharedGpus(
            self.seating,  # type: ignore[arg-type]
            lambda _: None,
            lambda event, _: self.told.append(event),  # type: ignore[arg-type]
            None if is_mps else lambda _worker, _since, _until, take: take(utilization),
        )
        self._attempts = itertools.count()
        assert self.move_in(0) == (1, True)

    def move_in(self, place: int) -> Any:
        return self.cards.moved_in(place, self.claim)  # type: ignore[arg-type]

    def send(self, number: int, place: int = 0, *, is_rank: bool = False) -> tuple[int, Part]:
        attempt_id = next(self._attempts)
        part = Part(0, 0, b"", 1, number, 1, is_call=False, name="train", is_rank=is_rank)
        (sent,) = self.cards.sent(place, self.claim, attempt_id, [part])  # type: ignore[arg-type]
        return attempt_id, sent

    def run(
        self,
        number: int,
        peak: float,
        place: int = 0,
        *,
        is_out: bool = False,
        is_rank: bool = False,
    ) -> SliceResult:
        """Let an item come back that needed so much [GiB]."""
        sent = self.send(number, place, is_rank=is_rank)
        return self.come_back(sent, peak, place, is_out=is_out)

    def come_back(
        self, sent: tuple[int, Part], peak: float, place: int = 0, *, is_out: bool = False
    ) -> SliceResult:
        attempt_id, part = sent
        number = part.start
        failures = {number: Failure(OutOfMemoryError("CUDA out of memory"), None)} if is_out else {}
        result = SliceResult(number, 1, LocalValues([None]), 0, failures, array("d", [1.0]), 1.0)
        result.peak_memory_bytes = int(peak * GIBIBYTE) or None
        own = CONTEXT_BYTES if peak else 0
        weight = GpuLoad(CARD, own, own, own, 0.0)
        seat = type("Seat", (), {"place": place, "claim": self.claim})()
        self.cards.came_back(0, seat, attempt_id, [result], weight)
        self.last_part = part
        return result

    @property
    def seats(self) -> int:
        return self.claim.room


def test_a_card_grows_as_its_items_come_back() -> None:
    """One item makes two workers, two more make four; then it is full."""
    play = Play()
    for number in range(20):
        play.run(number, 3)
    assert [len(event.add) for event in play.told] == [1, 2]
    assert play.seats == 4


def test_workers_have_their_part_of_the_memory_from_the_next_call_on() -> None:
    """All of it as long as they are alone."""
    play = Play()
    assert play.send(0)[1].turn == (1.0, False)
    play.run(1, 3)
    assert play.send(2)[1].turn == (fraction_for(2, CARD), False)


def test_items_without_the_gpu_say_nothing() -> None:
    """A pool that never uses its GPUs stays as it is."""
    play = Play()
    for number in range(10):
        play.run(number, 0)
    assert play.told == []


def test_nothing_known_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where NVML is of no help each GPU keeps one worker, and the user learns why."""
    play = Play()
    for number in range(3):
        attempt_id, _ = play.send(number)
        result = SliceResult(number, 1, LocalValues([None]), 0, {}, array("d", [1.0]), 1.0)
        result.peak_memory_bytes = GIBIBYTE
        seat = type("Seat", (), {"place": 0, "claim": play.claim})()
        play.cards.came_back(0, seat, attempt_id, [result], GpuLoad())
    assert play.told == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "workers_per_gpu=2" in caplog.text


def test_what_does_not_fit_beside_others_runs_again_alone_and_the_card_shrinks() -> None:
    """The item is told to run again; when it has come back, its need counts."""
    play = Play()
    for number in range(4):
        play.run(number, 3)
    play.move_in(1)
    result = play.run(9, 3.6, place=1, is_out=True)
    assert result.crowded_out == (9,)
    assert play.told[-1] == ResizeRequested(leave=(3,))  # a quarter was too little
    assert play.send(10)[1].turn == (fraction_for(4, CARD), False)  # whoever leaves is still there
    play.run(9, 14)
    assert play.last_part.turn is not None
    assert play.last_part.turn[1]
    assert play.told[-1] == ResizeRequested(leave=(1, 2))
    assert play.seats == 1
    assert not play.send(9)[1].turn[1]  # type: ignore[index]  # that it was to run alone is forgotten


def test_what_does_not_fit_alone_has_failed() -> None:
    """First the other workers are sent away; then it is tried once more, and that is all."""
    play = Play()
    for number in range(4):
        play.run(number, 3)
    told = [play.run(9, 3.6, is_out=True).crowded_out for _ in range(TRIES_ALONE + 1)]
    assert told == [(9,), (9,), ()]
    assert play.seats == 1


def test_an_item_that_was_alone_anyway_is_not_tried_again() -> None:
    """Where one worker has the card, there is nothing to be gained."""
    play = Play()
    assert play.run(0, 15.9, is_out=True).crowded_out == ()


def test_ranks_are_not_tried_again() -> None:
    """The others of their gang do not come back to run with them; nor is a rank's part of the card
    taken for all of it.
    """
    play = Play()
    play.run(0, 3)
    assert play.run(1, 3, is_out=True, is_rank=True).crowded_out == ()
    assert play.seats == 2


def test_a_busy_card_does_not_grow() -> None:
    """By the telemetry of its node."""
    play = Play(BUSY)
    for number in range(5):
        play.run(number, 1)
    assert play.told == []


def test_a_busy_card_may_grow_where_workers_compute_at_the_same_time() -> None:
    """With MPS, kernels of several processes run beside each other."""
    play = Play(BUSY, is_mps=True)
    for number in range(5):
        play.run(number, 1)
    assert play.seats == 4


def test_it_grows_again_when_the_large_item_is_long_ago() -> None:
    """What the last items have needed counts, not what any item ever needed."""
    play = Play()
    play.run(0, 14)
    assert play.told == []
    for number in range(1, 40):
        play.run(number, 3)
    assert play.seats > 1


def test_a_size_that_the_user_has_set_stays() -> None:
    """`resize` is the last word, but for items that do not fit."""
    play = Play()
    with play.cards.sizing():  # which lasts until the workers are up
        play.run(0, 1)
    for number in range(1, 5):
        play.run(number, 1)
    assert play.told == []


def test_a_size_that_could_not_be_had_changes_nothing() -> None:
    play = Play()
    with pytest.raises(ResourceError), play.cards.sizing():
        raise ResourceError("there is no room", requested=3, available=1, holders=())
    play.run(0, 3)
    assert [len(event.add) for event in play.told] == [1]


def test_places_that_cannot_be_had_are_not_tried_for_ever() -> None:
    """Where a worker does not come up beside others, its card has found its number."""
    play = Play()
    play.run(0, 3)
    (place,) = play.told[0].add
    play.claim.num_workers -= 1  # its setup has failed: it needs more than there is
    play.cards.left(place, play.claim, is_lost=False)  # type: ignore[arg-type]
    for number in range(1, 9):
        play.run(number, 3)
    assert len(play.told) == 1
    assert play.seats == 1


def test_after_the_loss_of_a_machine_as_many_cards_are_claimed_as_were_lost() -> None:
    """Not as many as there were workers on them."""
    play = Play()
    for number in range(4):
        play.run(number, 3)
    for place in range(4):
        play.claim.num_workers -= 1
        play.claim.is_released = play.claim.num_workers == 0
        play.cards.left(place, play.claim, is_lost=True)  # type: ignore[arg-type]
    assert play.cards.regain(4, lambda most: list(range(7, 7 + most))) == [7]
    assert play.cards.regain(4, lambda most: [most]) == []


def test_what_the_user_has_given_up_is_not_claimed_again() -> None:
    """Its machine is still there."""
    play = Play()
    play.claim.num_workers, play.claim.is_released = 0, True
    play.cards.left(0, play.claim, is_lost=False)  # type: ignore[arg-type]
    assert play.cards.regain(1, lambda most: [most]) == []


def test_nobody_comes_while_something_runs_that_may_take_the_room_for_itself() -> None:
    """What is sent from then on leaves room; the next worker comes when the last that need not has
    come back.
    """
    play = Play()
    before = play.send(0)
    play.run(1, 3)
    assert play.told == []
    assert play.send(2)[1].turn == (fraction_for(2, CARD), False)
    play.come_back(before, 1)
    assert [len(event.add) for event in play.told] == [1]


def test_the_room_is_given_back_if_what_runs_has_needed_it() -> None:
    play = Play()
    play.run(0, 3)
    (place,) = play.told[0].add
    play.move_in(place)
    before = play.send(1, place)
    for number in (2, 3):
        play.run(number, 3)
    assert play.send(4)[1].turn == (fraction_for(4, CARD), False)
    play.come_back(before, 5, place)
    assert play.send(5)[1].turn == (fraction_for(2, CARD), False)
    assert play.seats == 2


# --- turns ----------------------------------------------------------------------------------------


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTurns:
    """Return the turns of this process on a simulated card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    return GpuTurns(SimulatedGpus(tmp_path / "gpus", 1), "0", 1.0, lambda: tmp_path)


def test_an_instance_of_a_divided_card_may_have_slashes_in_its_name(tmp_path: Path) -> None:
    name = "MIG-GPU-11111111-2222-3333-4444-555555555555/1/0"
    turns = GpuTurns(SimulatedGpus(tmp_path / "gpus", 1), name, 1.0, lambda: tmp_path)
    turns.begin(part_with(share=1.0))
    turns.end()
    assert len([*tmp_path.glob("gpu-MIG-*.lock")]) == 1


def part_with(*, is_alone: bool = False, is_rank: bool = False, share: float = 0.25) -> Part:
    return Part(
        0,
        0,
        b"",
        1,
        0,
        1,
        is_call=False,
        is_rank=is_rank,
        turn=(1.0 if is_alone else share, is_alone),
    )


def is_free(path: Path, operation: int) -> bool:
    """Whether another process could have a lock now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_ordinary_items_share_and_one_that_is_alone_does_not(
    turns: GpuTurns, tmp_path: Path
) -> None:
    """Until they have ended."""
    lock = tmp_path / "gpu-0.lock"
    turns.begin(part_with())
    assert is_free(lock, fcntl.LOCK_SH)
    assert not is_free(lock, fcntl.LOCK_EX)
    turns.end()
    turns.begin(part_with(is_alone=True))
    assert not is_free(lock, fcntl.LOCK_SH)
    turns.end()
    assert is_free(lock, fcntl.LOCK_EX)


def test_the_limit_is_lifted_for_what_runs_alone(turns: GpuTurns) -> None:
    """And holds again afterwards."""
    seen = []
    for part in (part_with(), part_with(is_alone=True), part_with()):
        turns.begin(part)
        seen.append(turns.limit)
        turns.end()
    assert seen == [0.25, 1.0, 0.25]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[str, int], Any]]:
    """Let another process hold a lock, until it is told to end."""
    context = multiprocessing.get_context("fork")
    started: list[Any] = []

    def hold(name: str, operation: int) -> Any:
        has, may_end = context.Event(), context.Event()

        def keep() -> None:
            descriptor = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, operation)
            has.set()
            may_end.wait(300)

        process = context.Process(target=keep, daemon=True)
        process.start()
        started.append((process, may_end))
        assert has.wait(300)
        return may_end

    yield hold
    for process, may_end in started:
        may_end.set()
        process.join(300)


def test_newcomers_let_first_who_waits_to_be_alone_but_not_for_ever(
    turns: GpuTurns, other: Callable[[str, int], Any], tmp_path: Path
) -> None:
    """Somebody stands in the door; who is inside may wait for the newcomer, so that comes in all
    the same.
    """
    del turns
    other("gpu-0.door", fcntl.LOCK_EX)
    newcomer = GpuTurns(
        SimulatedGpus(tmp_path / "gpus"), "0", 1.0, lambda: tmp_path, patience_s=0.2
    )
    newcomer.begin(part_with())
    newcomer.end()


def test_ranks_do_not_stand_in_the_door(turns: GpuTurns, other: Callable[[str, int], Any]) -> None:
    """Those of their gang that are inside wait for them."""
    other("gpu-0.door", fcntl.LOCK_EX)
    turns.begin(part_with(is_rank=True))
    turns.end()


def test_the_wait_ends_with_the_process_that_is_waited_for(
    turns: GpuTurns, other: Callable[[str, int], Any]
) -> None:
    """However it ends: the kernel lets go of its locks."""
    other("gpu-0.lock", fcntl.LOCK_SH).set()
    turns.begin(part_with(is_alone=True))
    turns.end()


def test_the_wait_can_be_interrupted(turns: GpuTurns, other: Callable[[str, int], Any]) -> None:
    """As a cancellation does it: by a signal, whose handler raises."""
    import signal

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    other("gpu-0.lock", fcntl.LOCK_SH)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):  # noqa: PT012 - it may come between the two
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            turns.begin(part_with(is_alone=True))
        turns.end()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_worker_weighs_what_its_process_has(turns: GpuTurns, tmp_path: Path) -> None:
    """And what of that is no tensor's: its context."""
    gpus = SimulatedGpus(tmp_path / "gpus")
    gpus.change(0, used_bytes=2 * GIBIBYTE)
    turns.begin(part_with(share=1.0))
    held = gpus.allocate(3 * GIBIBYTE)
    weight = turns.weigh()
    assert weight is not None
    assert weight.own_bytes == held.num_bytes + SIMULATED_CONTEXT
    assert weight == GpuLoad(
        CARD, weight.own_bytes + 2 * GIBIBYTE, weight.own_bytes, SIMULATED_CONTEXT, 0.0
    )
    assert turns.weigh() is None  # it was just asked
    turns.end()


def test_a_broken_inventory_weighs_nothing(turns: GpuTurns, tmp_path: Path) -> None:
    """Nothing is made up."""
    SimulatedGpus(tmp_path / "gpus").break_down()
    weight = turns.weigh()
    assert weight is not None
    assert weight.total_bytes is None
