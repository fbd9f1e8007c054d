"""What a task keeps in its folder for checkpoints, the next attempt finds: with every kind of
pool.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    current_task,
    load_checkpoint,
    save_checkpoint,
)
from raypool.worker.folders import LOCK, UrlStorage

pytestmark = pytest.mark.semantics


class NotYetError(Exception):
    """Raised to run again."""


@pytest.mark.everywhere
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
    assert view.parfeval(train, 4).result(300) == (3, 12)


@pytest.mark.semantics
@pytest.mark.processes
def test_each_item_has_a_folder_of_its_own_that_only_its_user_can_read(pool: ParallelPool) -> None:
    def look(item: int) -> tuple[str, int, bool]:
        folder = current_task().checkpoint_dir
        is_empty = not any(folder.iterdir())
        (folder / "note").touch()
        return (
            str(folder),
            stat.S_IMODE(folder.stat().st_mode),
            is_empty and folder == current_task().checkpoint_dir,
        )

    first, second = list(pool.parfor(look, range(4))), list(pool.parfor(look, range(4)))
    assert len({folder for folder, _, _ in first + second}) == 8
    assert {mode for _, mode, _ in first} == {0o700}
    assert all(is_right for _, _, is_right in first + second)


def test_temporary_folders_go_with_the_pool(make_pool: Any, eventually: Any) -> None:
    with make_pool(1) as pool:
        folder = Path(pool.parfeval(lambda: str(current_task().checkpoint_dir)).result(300))
        assert folder.is_dir()
    assert eventually(lambda: not folder.parent.parent.exists())


@pytest.mark.semantics
@pytest.mark.processes
def test_a_forked_child_has_the_folder_of_its_task(pool: ParallelPool) -> None:
    def ask() -> bool:
        folder = current_task().checkpoint_dir
        child = os.fork()
        if child == 0:
            os._exit(
                0
                if current_task().checkpoint_dir == folder
                and save_checkpoint(1) == folder / "checkpoint.pt"
                else 1
            )
        return os.waitpid(child, 0)[1] == 0 and load_checkpoint() == 1

    assert pool.parfeval(ask).result(300)


@pytest.mark.semantics
@pytest.mark.processes
def test_loops_in_a_task_have_folders_that_are_not_those_of_other_loops(pool: ParallelPool) -> None:
    def outer(item: int) -> list[str]:
        inner = list(pool.parfor(lambda _: str(current_task().checkpoint_dir), range(2)))
        again = list(pool.parfor(lambda _: str(current_task().checkpoint_dir), range(2)))
        return [*inner, *again, str(current_task().checkpoint_dir)]

    folders = [folder for each in pool.parfor(outer, range(2)) for folder in each]
    assert len(set(folders)) == len(folders) == 10


@pytest.mark.everywhere
def test_a_call_goes_on_from_where_an_equal_one_was(
    pool: ParallelPool, make_pool: Any, tmp_path: Path
) -> None:
    """In another pool, too, wherever that keeps its own copy."""

    def train(name: str, *, rate: float) -> int:
        state = load_checkpoint() or {"step": 0}
        save_checkpoint({"step": state["step"] + 1})
        (current_task().checkpoint_dir / "log.txt").write_text(f"{name} {rate} {state['step']}")
        return int(state["step"])

    def use(pool: ParallelPool, step: int) -> None:
        for where in (str(tmp_path / "folder"), (tmp_path / "url").as_uri()):
            view = pool.options(checkpoints=where)
            assert view.parfeval(train, "a", rate=0.1).result(300) == step
            assert view.parfeval(train, "b", rate=0.1).result(300) == step

    use(pool, 0)
    use(pool, 1)
    if not make_pool.is_in_processes:
        with make_pool(1) as other:
            use(other, 2)
    last = 1 if make_pool.is_in_processes else 2
    for kind in ("folder", "url"):
        assert sorted(file.read_text() for file in (tmp_path / kind).rglob("log.txt")) == [
            f"a 0.1 {last}",
            f"b 0.1 {last}",
        ]
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.everywhere
def test_what_is_saved_counts_although_the_task_fails_and_what_it_writes_last_too(
    pool: ParallelPool, tmp_path: Path
) -> None:
    def train() -> None:
        (current_task().checkpoint_dir / "last.txt").write_text("here")
        raise NotYetError

    with pytest.raises(NotYetError):
        pool.options(checkpoints=(tmp_path / "kept").as_uri()).parfeval(train).result(300)
    assert [file.read_text() for file in (tmp_path / "kept").rglob("last.txt")] == ["here"]


@pytest.mark.semantics
@pytest.mark.processes
def test_a_place_that_cannot_be_written_is_the_error_of_the_item(
    pool: ParallelPool, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    future = pool.options(checkpoints=f"{tmp_path.as_uri()}/file/kept").parfeval(
        lambda: save_checkpoint(1)
    )
    with pytest.raises(OSError, match="file"):
        future.result(300)
    assert pool.parfeval(lambda: 1).result(300) == 1


@pytest.mark.parametrize("step", ["read", "write"])
def test_a_copy_that_cannot_be_fetched_or_uploaded_leaves_nothing_on_this_machine(
    make_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def train() -> None:
        load_checkpoint()
        save_checkpoint(torch.zeros(3))

    def refuse(*_: Any) -> None:
        raise OSError("the network is down")

    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    with make_pool(1) as pool:
        view = pool.options(checkpoints=(tmp_path / "kept").as_uri())
        view.parfeval(train).result(300)
        monkeypatch.setattr(UrlStorage, step, refuse)
        with pytest.raises(OSError, match="the network is down"):
            view.parfeval(train).result(300)
        (temporary,) = (tmp_path / "here").iterdir()
        assert [path.name for path in temporary.iterdir()] == [LOCK]


@pytest.mark.arguments
def test_where_checkpoints_are_kept_is_a_folder_or_a_url(
    pool: ParallelPool, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match="is a file"):
        pool.options(checkpoints=tmp_path / "file")
    for nowhere in ("", "s3://", "://x"):
        with pytest.raises(InvalidValueError, match="is incomplete"):
            pool.options(checkpoints=nowhere)
    with pytest.raises(
        InvalidTypeError, match="checkpoints must be the path of a folder or a URL, not 3"
    ):
        pool.options(checkpoints=3)
