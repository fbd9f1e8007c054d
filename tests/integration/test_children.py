"""Processes that are started by `multiprocessing`: those of a task, which run what the script
defines, and managers.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raypool import ParallelPool, parpool
from tests.conftest import Gate


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


SPAWNED = """
import multiprocessing
from dataclasses import dataclass
from raypool import parpool

@dataclass
class Item:
    value: int

def double(item):
    return Item(2 * item.value)

def main():
    with parpool(1, quiet=True) as pool:
        print(pool.parfor(double, [Item(1), Item(2)])[:])

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=main)
    process.start()
    process.join()
"""


def test_a_pool_in_a_spawned_process_runs_the_functions_of_the_script(tmp_path: Path) -> None:
    """There the script has another name, which workers do not know."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "[Item(value=2), Item(value=4)]\n", done.stderr


def end_a_busy_child(gate: Gate) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=gate.wait)
    child.start()
    child.terminate()
    child.join()
    return child.exitcode


def test_a_busy_child_on_slurm_can_be_ended(ray_session: None, gate: Gate) -> None:
    """Workers, and what they fork, ignore Slurm's SIGTERM."""
    with parpool(1, env={"RAYPOOL_SLURM": "1"}, quiet=True) as pool:
        assert pool.parfeval(end_a_busy_child, gate).result(300) == -9
