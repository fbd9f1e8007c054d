"""Processes that are started by `multiprocessing`: those of a task, which run what the script
defines, and managers.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from typing import Any

import pytest
import torch

from raypool import ParallelPool


class Data(torch.utils.data.Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def keep(number: int) -> None:
    global kept
    kept = number


def add(number: int) -> int:
    return kept + number


kept = 0


def use_children(how: str) -> list[Any]:
    context = multiprocessing.get_context(how)
    loader = torch.utils.data.DataLoader(
        Data(2), 2, num_workers=1, multiprocessing_context=context, collate_fn=lambda x: sum(x)
    )
    with concurrent.futures.ProcessPoolExecutor(1, context, keep, (10,)) as executor:
        made = executor.submit(Data, 5).result()
        return [*loader, executor.submit(add, 3).result(), isinstance(made, Data), made.size]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_they_are_given_what_the_script_defines_and_send_it_back(
    shared_pool: ParallelPool, how: str
) -> None:
    """Data loaders and executors in a task run the script's functions and classes; what an
    initializer has set is there.
    """
    assert shared_pool.parfeval(use_children, how).result() == [1, 13, True, 5]


def take_a_turn(shared: Any, queue: Any) -> int:
    with shared["lock"]:
        shared["turns"] += 1
    number: int = queue.get()
    return number


def test_proxies_of_a_manager_reach_what_they_stand_for(shared_pool: ParallelPool) -> None:
    """A manager's queue and what is got from its dictionary work in a task, though the manager asks
    for a key.
    """
    with multiprocessing.Manager() as manager:
        shared, queue = manager.dict(turns=0), manager.Queue()
        shared["lock"] = manager.Lock()
        for number in range(2):
            queue.put(number)
        assert sorted(shared_pool.map(take_a_turn, [shared] * 2, [queue] * 2)) == [0, 1]
        assert shared["turns"] == 2
