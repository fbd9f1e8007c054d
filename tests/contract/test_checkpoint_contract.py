"""What a task keeps in its folder for checkpoints, the next attempt finds: with every kind of pool."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from raypool import ParallelPool, current_task, load_checkpoint, save_checkpoint


class NotYetError(Exception):
    """Raised to run again."""


def test_an_item_that_runs_again_finds_what_it_had_saved(pool: ParallelPool) -> None:
    def train(item: int) -> tuple[int, int]:
        state = load_checkpoint() or {"step": 0, "weights": torch.zeros(3)}
        save_checkpoint({"step": state["step"] + 1, "weights": state["weights"] + item})
        if current_task().attempt < 3:
            raise NotYetError
        state = load_checkpoint()
        return state["step"], int(state["weights"][0])

    view = pool.options(retries=2, retry_on=NotYetError)
    assert list(view.parfor(train, [5, 6, 7])) == [(3, 15), (3, 18), (3, 21)]
    assert view.parfeval(train, 4).result(60) == (3, 12)


def test_each_item_has_a_folder_of_its_own_that_only_its_user_can_read(pool: ParallelPool) -> None:
    def look(item: int) -> tuple[str, int, bool]:
        folder = current_task().checkpoint_dir
        is_empty = not any(folder.iterdir())
        (folder / "note").touch()
        return str(folder), stat.S_IMODE(folder.stat().st_mode), is_empty and folder == current_task().checkpoint_dir

    first, second = list(pool.parfor(look, range(4))), list(pool.parfor(look, range(4)))
    assert len({folder for folder, _, _ in first + second}) == 8
    assert {mode for _, mode, _ in first} == {0o700}
    assert all(is_right for _, _, is_right in first + second)


def test_temporary_folders_go_with_the_pool(make_pool: Any, eventually: Any) -> None:
    with make_pool(1) as pool:
        folder = Path(pool.parfeval(lambda: str(current_task().checkpoint_dir)).result(60))
        assert folder.is_dir()
    assert eventually(lambda: not folder.parent.parent.exists())


def test_a_forked_child_has_the_folder_of_its_task(pool: ParallelPool) -> None:
    def ask() -> bool:
        folder = current_task().checkpoint_dir
        child = os.fork()
        if child == 0:
            os._exit(0 if current_task().checkpoint_dir == folder and save_checkpoint(1) == folder / "checkpoint.pt" else 1)
        return os.waitpid(child, 0)[1] == 0 and load_checkpoint() == 1

    assert pool.parfeval(ask).result(60)


def test_loops_in_a_task_have_folders_that_are_not_those_of_other_loops(pool: ParallelPool) -> None:
    def outer(item: int) -> list[str]:
        inner = list(pool.parfor(lambda _: str(current_task().checkpoint_dir), range(2)))
        again = list(pool.parfor(lambda _: str(current_task().checkpoint_dir), range(2)))
        return [*inner, *again, str(current_task().checkpoint_dir)]

    folders = [folder for each in pool.parfor(outer, range(2)) for folder in each]
    assert len(set(folders)) == len(folders) == 10


def test_outside_a_pool_there_is_a_folder_too() -> None:
    assert current_task().checkpoint_dir.is_dir()
    assert current_task().checkpoint_dir == current_task().checkpoint_dir


@pytest.fixture(autouse=True)
def no_file_of_this_process() -> Any:
    """Let each test find this process's own folder empty."""
    yield
    for file in current_task().checkpoint_dir.iterdir():
        file.unlink()
