"""The folder of a run: a checkpoint is there as a whole or not at all, old ones go, the last and
the best stay.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import InvalidTypeError, InvalidValueError
from raypool.train.checkpoints import (
    CompleteCheckpoint,
    best,
    check_name,
    commit,
    copy_in,
    free_name,
    latest,
    list_kept,
    next_index,
    open_partial,
    prune,
    remove_partials,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def keep(run_dir: Path, text: str = "weights", name: str | None = None, **metrics: Any) -> Path:
    """Make a checkpoint with one file."""
    partial = open_partial(run_dir, name, "token")
    (partial.path / "model").write_text(text)
    return commit(partial, metrics, attempt=1)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def losses(run_dir: Path) -> list[Any]:
    return [kept.metrics["loss"] for kept in list_kept(run_dir)]


# --- one checkpoint -------------------------------------------------------------------------------


def test_a_checkpoint_is_a_folder_with_a_json_beside_it(run_dir: Path) -> None:
    path = keep(run_dir, "abc", loss=0.5)
    assert names(run_dir) == ["checkpoint_000001", "checkpoint_000001.json"]
    assert (path / "model").read_text() == "abc"
    assert list_kept(run_dir) == [CompleteCheckpoint(1, path, {"loss": 0.5})]
    assert list_kept(str(run_dir)) == list_kept(run_dir)
    record = json.loads((run_dir / "checkpoint_000001.json").read_text())
    assert record.pop("time") > 1e9
    assert record == {"index": 1, "attempt": 1, "metrics": {"loss": 0.5}, "path": None}


def test_nobody_else_may_look_into_the_folder_of_a_run(run_dir: Path) -> None:
    keep(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_folder_that_is_not_there_has_no_checkpoints(run_dir: Path) -> None:
    assert list_kept(run_dir) == []
    assert latest(run_dir) is None
    assert best(run_dir, "loss", "min") is None
    assert prune(run_dir, 1, None, "min") == []
    remove_partials(run_dir)
    assert next_index(run_dir) == 1
    assert not run_dir.exists()


def test_numbers_go_on(run_dir: Path) -> None:
    for _ in range(3):
        keep(run_dir)
    (run_dir / "checkpoint_000007").mkdir()  # somebody has deleted the json
    (run_dir / "checkpoint_of_mine").mkdir()
    assert keep(run_dir).name == "checkpoint_000008"
    assert keep(run_dir, name="named").name == "named"
    assert [kept.index for kept in list_kept(run_dir)] == [1, 2, 3, 8, 9]
    assert keep(run_dir).name == "checkpoint_000010"


def test_the_order_is_that_of_the_numbers_not_of_the_names(run_dir: Path) -> None:
    for name in ("b", "c", "a", None, "checkpoint_000002"):
        keep(run_dir, name=name)
    assert [kept.path.name for kept in list_kept(run_dir)] == [
        "b",
        "c",
        "a",
        "checkpoint_000004",
        "checkpoint_000002",
    ]
    last = latest(run_dir)
    assert last is not None
    assert last.path.name == "checkpoint_000002"


def test_nothing_is_replaced_by_one_of_the_same_name(run_dir: Path) -> None:
    keep(run_dir, "old", name="last", loss=2)
    path = keep(run_dir, "new", name="last", loss=1)
    assert path.name == "last-000002"
    assert [(kept.path / "model").read_text() for kept in list_kept(run_dir)] == ["old", "new"]
    # its folder was never there
    (run_dir / "lost.json").write_text('{"index": 9, "metrics": {}, "path": null}')
    assert keep(run_dir, name="lost", loss=3).name == "lost"
    assert [(kept.index, kept.metrics["loss"]) for kept in list_kept(run_dir)] == [
        (1, 2),
        (2, 1),
        (3, 3),
    ]


def test_one_that_stays_elsewhere_is_noted(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    partial = open_partial(run_dir, None, "token")
    assert commit(partial, {"loss": 1}, 2, str(elsewhere)) == elsewhere
    assert list_kept(run_dir) == [CompleteCheckpoint(1, elsewhere, {"loss": 1})]
    assert names(run_dir) == ["checkpoint_000001.json"]
    keep(run_dir)
    assert prune(run_dir, 1, None, "min") == [elsewhere]
    assert elsewhere.is_dir()
    assert len(list_kept(run_dir)) == 1


def test_one_kept_in_place_moves_with_its_run(run_dir: Path, tmp_path: Path) -> None:
    """So does one of an earlier raypool that noted where it was, as long as it is there."""
    place = run_dir / "mine" / "epoch 1"
    place.mkdir(parents=True)
    assert commit(open_partial(run_dir, None, "token"), {}, 1, str(place)) == place
    old = {"index": 7, "metrics": {}, "path": str(place)}
    (run_dir / "old.json").write_text(json.dumps(old))
    assert [kept.path for kept in list_kept(run_dir)] == [place, place]
    moved = run_dir.rename(tmp_path / "moved")
    assert [kept.path for kept in list_kept(moved)] == [moved / "mine" / "epoch 1"]


def test_names_that_are_no_folder() -> None:
    for name in ["", ".hidden", "a/b", "/tmp/x", "..", "a\0b"]:
        with pytest.raises(InvalidValueError, match="checkpoint_dir_name"):
            check_name(name)


def test_names_that_are_folders() -> None:
    for name in (None, "epoch-3", "epoch=3.loss=0.1", "checkpoint_000001"):
        check_name(name)
    with pytest.raises(InvalidTypeError, match="checkpoint_dir_name=3 is a int"):
        check_name(3)  # type: ignore[arg-type]


def test_a_name_with_dots(run_dir: Path) -> None:
    path = keep(run_dir, name="epoch=3.loss=0.1", loss=0.1)
    assert list_kept(run_dir) == [CompleteCheckpoint(1, path, {"loss": 0.1})]


def test_metrics_that_json_cannot_take_are_left_out(run_dir: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    keep(
        run_dir,
        loss=math.nan,
        array=np.arange(2),
        number=np.float32(0.5),
        some=[1, None, {"a": (2, 3)}],
        thing=object(),
        circle=circle,
    )
    (kept,) = list_kept(run_dir)
    assert math.isnan(kept.metrics.pop("loss"))
    assert kept.metrics == {"array": [0, 1], "number": 0.5, "some": [1, None, {"a": [2, 3]}]}


# --- files ----------------------------------------------------------------------------------------


def test_files_are_copied_with_their_folders(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "deeper").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a").write_bytes(bytes(range(256)) * 5000)
    (source / "deep" / "deeper" / "b").write_text("b")
    (source / ".hidden").write_text("h")
    (source / "link").symlink_to(source / "a")
    target.mkdir()
    copy_in(source, target, 0)
    assert (
        (target / "a").read_bytes() == (target / "link").read_bytes() == (source / "a").read_bytes()
    )
    assert not (target / "link").is_symlink()
    assert (target / "deep" / "deeper" / "b").read_text() == "b"
    assert (target / "empty").is_dir()
    assert names(target) == [".hidden", "a", "deep", "empty", "link"]


def test_files_of_several_ranks_come_together(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for rank in range(3):
        source = tmp_path / f"source-{rank}"
        (source / "shards").mkdir(parents=True)
        (source / "shards" / f"{rank}").write_text(f"{rank}")
        (source / "same").write_text("same")
        copy_in(source, target, rank)
    assert names(target) == ["same", "shards"]
    assert names(target / "shards") == ["0", "1", "2"]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "target").mkdir()
    with pytest.raises(FileNotFoundError, match="broken"):
        copy_in(tmp_path / "source", tmp_path / "target", 0)


# --- what was interrupted -------------------------------------------------------------------------


def test_what_is_not_complete_is_no_checkpoint(run_dir: Path) -> None:
    keep(run_dir, loss=1)
    open_partial(run_dir, None, "token")
    (run_dir / "checkpoint_000003").mkdir()  # without a json
    # without a folder
    (run_dir / "checkpoint_000004.json").write_text('{"index": 4, "metrics": {}, "path": null}')
    assert losses(run_dir) == [1]
    last = latest(run_dir)
    assert last is not None
    assert last.index == 1


@pytest.mark.parametrize("step", ["os.fsync", "Path.replace"])
def test_a_crash_in_the_middle(run_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever the last thing was that was done: the checkpoint before it is the latest, and the
    next run tidies up.
    """
    keep(run_dir, loss=1)
    with monkeypatch.context() as patch:
        if step == "os.fsync":
            patch.setattr(os, "fsync", _crash)
        else:
            replace = Path.replace
            patch.setattr(
                Path, "replace", lambda self, to: replace(self, to) if self.is_file() else _crash()
            )
        with pytest.raises(KeyboardInterrupt):
            keep(run_dir, loss=2)
    assert losses(run_dir) == [1]
    remove_partials(run_dir)
    assert [name for name in names(run_dir) if not name.endswith(".json")] == ["checkpoint_000001"]
    keep(run_dir, loss=3)
    assert losses(run_dir) == [1, 3]


def _crash(*args: Any, **keywords: Any) -> None:
    raise KeyboardInterrupt


def test_a_json_that_cannot_be_read_hides_only_its_own(run_dir: Path) -> None:
    for loss in (1, 2, 3):
        keep(run_dir, loss=loss)
    notes = run_dir / "checkpoint_000002.json"
    for text in (
        "",
        "{",
        "[]",
        "null",
        '{"index": 2}',
        '{"index": "2", "metrics": {}}',
        '{"index": 2, "metrics": 3}',
        "\xff\x00",
    ):
        notes.write_text(text, encoding="latin-1")
        assert losses(run_dir) == [1, 3]
    notes.unlink()
    notes.mkdir()  # the system refuses to read it, whoever asks
    assert losses(run_dir) == [1, 3]
    keep(run_dir, loss=4)
    assert losses(run_dir) == [1, 3, 4]


def test_other_files_in_the_folder_are_left_alone(run_dir: Path) -> None:
    keep(run_dir)
    (run_dir / "config.json").write_text('{"index": 1, "metrics": {}}')
    (run_dir / "notes.txt").write_text("mine")
    (run_dir / ".mine").mkdir()
    before = names(run_dir)
    open_partial(run_dir, None, "token")
    remove_partials(run_dir)
    prune(run_dir, 1, None, "min")
    assert names(run_dir) == before
    assert len(list_kept(run_dir)) == 1


# --- which stay -----------------------------------------------------------------------------------


def test_the_best(run_dir: Path) -> None:
    for loss in (3.0, 1.0, 2.0, 1.0, math.nan, "low", None, math.inf):
        keep(run_dir, loss=loss, same=1)
    keep(run_dir)  # without the metric
    indexes = [
        best(run_dir, metric, mode)
        for metric, mode in (("loss", "min"), ("loss", "max"), ("same", "max"), ("none", "min"))
    ]
    assert [kept and kept.index for kept in indexes] == [4, 1, 8, None]


def test_only_numbers_that_are_none_have_no_best(run_dir: Path) -> None:
    keep(run_dir, loss=math.nan)
    assert best(run_dir, "loss", "min") is None


@pytest.mark.parametrize(
    ("keep_so_many", "metric", "mode", "left"),
    [
        (None, None, "min", [5, 1, 4, 2, 3]),
        (9, None, "min", [5, 1, 4, 2, 3]),
        (2, None, "min", [2, 3]),
        (1, None, "min", [3]),
        (2, "loss", "min", [1, 2, 3]),  # the two best, and the last
        (2, "loss", "max", [5, 4, 3]),
        (3, "loss", "min", [1, 2, 3]),
        (2, "none", "min", [5, 1, 4, 2, 3]),
    ],
)
def test_prune(
    run_dir: Path, keep_so_many: int | None, metric: str | None, mode: str, left: list[int]
) -> None:
    for loss in (5, 1, 4, 2, 3):
        keep(run_dir, loss=loss)
    gone = prune(run_dir, keep_so_many, metric, mode)
    assert losses(run_dir) == left
    assert len(gone) == 5 - len(left)
    assert not any(path.exists() for path in gone)
    assert len(names(run_dir)) == 2 * len(left)


def test_prune_takes_those_first_that_cannot_be_rated(run_dir: Path) -> None:
    for loss in (2.0, math.nan, None, 1.0, math.nan):
        keep(run_dir, loss=loss)
    prune(run_dir, 2, "loss", "min")
    assert [kept.index for kept in list_kept(run_dir)] == [1, 4, 5]


def test_prune_step_by_step_keeps_the_best_of_all(run_dir: Path) -> None:
    for loss in (5, 1, 4, 2, 3):
        keep(run_dir, loss=loss)
        prune(run_dir, 1, "loss", "min")
    assert losses(run_dir) == [1, 3]
    top = best(run_dir, "loss", "min")
    assert top is not None
    assert top.metrics == {"loss": 1}


def test_a_crash_while_pruning_leaves_no_half_of_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loss in (1, 2, 3):
        keep(run_dir, loss=loss)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _crash)
        with pytest.raises(KeyboardInterrupt):
            prune(run_dir, 1, None, "min")
    assert losses(run_dir) == [2, 3]
    remove_partials(run_dir)
    prune(run_dir, 1, None, "min")
    assert losses(run_dir) == [3]
    assert [name for name in names(run_dir) if not name.endswith(".json")] == ["checkpoint_000003"]


def test_a_name_that_is_taken_gets_the_number(tmp_path: Path) -> None:
    """So it is in both lanes: Ray Train would put a second checkpoint of a name into the folder of
    the first.
    """
    assert free_name(tmp_path, "best", 1) == "best"
    (tmp_path / "best").mkdir()
    assert free_name(tmp_path, "best", 2) == "best-000002"
    (tmp_path / "last.json").write_text('{"accuracy": 0.9}')
    assert free_name(tmp_path, "last", 3) == "last-000003", "the file is the user's"
