"""A number of workers to a GPU, on Ray, with cards that do not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from raypool import ParallelPool, current_task, parpool
from raypool.gpus.simulated import SimulatedGpus

GIBIBYTE = 2**30

pytestmark = [pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    """Return three cards of 16 GiB."""
    return SimulatedGpus(tmp_path_factory.mktemp("gpus"), 3)


@pytest.fixture(scope="module")
def pool(free_gpus: None, cards: SimulatedGpus) -> Iterator[ParallelPool]:
    """Give six workers on them."""
    with parpool(inventory=cards, workers_per_gpu=2, quiet=True) as pool:
        yield pool


def test_all_cards_get_as_many_workers(pool: ParallelPool) -> None:
    """Ray would fill one card after the other; and a worker is a process."""
    assert Counter(worker.gpu for worker in pool.workers) == {0: 2, 1: 2, 2: 2}
    assert len({worker.pid for worker in pool.workers}) == 6


def test_who_wants_more_than_its_part_harms_nobody_else(
    pool: ParallelPool, cards: SimulatedGpus
) -> None:
    """All hold what they may have, at the same time; then all ask for more, and fail by
    themselves.
    """

    def ask_for_much(spmd: object) -> tuple[int, str, int]:
        import torch

        held = cards.allocate(7 * GIBIBYTE)
        spmd.barrier()
        try:
            cards.allocate(2 * GIBIBYTE)
        except torch.OutOfMemoryError as error:
            words = str(error)
        else:
            words = ""
        spmd.barrier()
        return current_task().gpu, words, held.num_bytes

    answers = list(pool.spmd(ask_for_much))
    assert Counter(gpu for gpu, _, _ in answers) == {0: 2, 1: 2, 2: 2}
    assert all(
        "out of memory" in words and num_bytes == 7 * GIBIBYTE for _, words, num_bytes in answers
    )
