"""Checkpoints as files: whole or not at all, wherever they are kept, and whatever happens
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypool import InvalidTypeError, InvalidValueError, load_checkpoint, save_checkpoint
from raypool.worker import folders
from raypool.worker.folders import (
    LocalCopy,
    StoredFile,
    TemporaryFolder,
    UrlStorage,
    files_in,
    sees,
    token_of,
)

# --- one file -------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "epoch": 3,
        "history": [(0, 0.5), (1, float("inf"))],
    }
    file = save_checkpoint(state, tmp_path / "model.pt")
    loaded = load_checkpoint(file)
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert {name: loaded[name] for name in ("python", "epoch", "history")} == {
        name: state[name] for name in ("python", "epoch", "history")
    }
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none.pt") is None


UNLOADABLE = [[np.float64(1)], [np.ones(3)], [Path("a")], [torch.nn.Linear(1, 1)], [lambda: 1]]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    for state in UNLOADABLE:
        file = save_checkpoint(1, tmp_path / "a.pt")
        with pytest.raises(InvalidTypeError, match=r"a\.pt (was not|cannot be) saved.* Save "):
            save_checkpoint({"epoch": 1, "state": state}, file)
        assert load_checkpoint(file) == 1
        assert os.listdir(tmp_path) == ["a.pt"]


def test_a_file_that_could_run_code_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    for write in (
        lambda: torch.save(torch.nn.Linear(1, 1), file),
        lambda: file.write_bytes(pickle.dumps(os.getpid, protocol=2)),
    ):
        write()
        with pytest.raises(
            InvalidValueError, match=r"a\.pt contains more than .* loading it could run code"
        ):
            load_checkpoint(file)


def test_a_damaged_file_is_named_or_does_no_harm(tmp_path: Path) -> None:
    file = save_checkpoint({"weights": torch.arange(50.0), "epoch": 3}, tmp_path / "a.pt")
    whole = file.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(0, len(whole), 31)
    ]
    for data in damaged:
        file.write_bytes(data)
        with contextlib.suppress(InvalidValueError):
            assert len(load_checkpoint(file)) == 2
    file.write_bytes(b"")
    with pytest.raises(InvalidValueError, match=re.escape(f"{file} (0 bytes) is damaged")):
        load_checkpoint(file)


def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path) -> None:
    file = save_checkpoint(torch.zeros(3), tmp_path / "a.pt")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(torch.zeros(1_000_000), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(load_checkpoint(file), torch.zeros(3))
    assert os.listdir(tmp_path) == ["a.pt"]


# --- kept elsewhere -------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for the end of a process in the midst of something."""


class Fragile:
    """A storage whose caller is killed before its so-many-th step."""

    def __init__(self, storage: UrlStorage, steps: int) -> None:
        self._storage = storage
        self._steps = steps

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            self._steps -= 1
            if self._steps < 0:
                raise KilledError
            return getattr(self._storage, verb)(*args)

        return step


@pytest.fixture(params=["pyarrow", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UrlStorage]:
    """Give a place behind a URL, as either of the packages knows it that can."""
    if request.param == "pyarrow":
        yield UrlStorage((tmp_path / "home").as_uri())
    else:
        import fsspec

        yield UrlStorage("memory://home")
        fsspec.filesystem("memory").rm("/home", recursive=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder."""
    return {file: (folder / file).read_bytes() for file in files_in(folder)}


def test_what_is_uploaded_is_what_others_fetch(
    storage: UrlStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PIECE_BYTES", 1000)
    one = LocalCopy(storage, "a/checkpoint", tmp_path / "one")
    assert contents(one.folder) == {}
    (one.folder / "deep" / "er").mkdir(parents=True)
    (one.folder / "deep" / "er" / "x.bin").write_bytes(os.urandom(2500))
    (one.folder / "empty").touch()
    (one.folder / "round").write_bytes(bytes(2000))
    (one.folder / ".y.partial").touch()
    one.upload()
    two = LocalCopy(storage, "a/checkpoint", tmp_path / "two")
    (one.folder / ".y.partial").unlink()
    assert contents(two.folder) == contents(one.folder)

    (two.folder / "deep" / "er" / "x.bin").write_bytes(b"new")
    (two.folder / "empty").unlink()
    two.upload()
    assert contents(LocalCopy(storage, "a/checkpoint", tmp_path / "three").folder) == contents(
        two.folder
    )
    assert contents(LocalCopy(storage, "b/checkpoint", tmp_path / "other").folder) == {}


def test_only_what_has_changed_is_uploaded(storage: UrlStorage, tmp_path: Path) -> None:
    copy = LocalCopy(storage, "a", tmp_path / "one")
    for name in ("old", "new"):
        (copy.folder / name).write_text("1")
    copy.upload()
    sent: list[str] = []

    class Noting:
        def __getattr__(self, verb: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                sent.append(args[2] if verb == "write" else verb)
                return getattr(storage, verb)(*args)

            return call

    again = LocalCopy(Noting(), "a", tmp_path / "two")  # type: ignore[arg-type]  # it passes on whatever is asked
    sent.clear()
    again.upload()
    assert sent == [], "it was fetched just now"
    (again.folder / "new").write_text("2")
    again.upload()
    again.upload()
    assert [name for name in sent if name in ("old", "new")] == ["new"], "once"
    assert contents(LocalCopy(storage, "a", tmp_path / "three").folder) == {
        "old": b"1",
        "new": b"2",
    }


def test_whoever_is_killed_while_uploading_leaves_the_old_version_or_the_new(
    storage: UrlStorage, tmp_path: Path
) -> None:
    first = LocalCopy(storage, "a", tmp_path / "first")
    for name in ("x", "y"):
        (first.folder / name).write_text("old")
    first.upload()
    old, new = contents(first.folder), {"x": b"new", "z": b"new"}
    for steps in range(9):
        copy = LocalCopy(storage, "a", tmp_path / f"killed-{steps}")
        for name in contents(copy.folder):
            (copy.folder / name).unlink()
        for name, data in new.items():
            (copy.folder / name).write_bytes(data)
        copy._storage = Fragile(storage, steps)  # type: ignore[assignment]  # it passes on whatever is asked
        try:
            copy.upload()
        except KilledError:
            assert contents(LocalCopy(storage, "a", tmp_path / f"after-{steps}").folder) == old
        else:
            break
    else:
        pytest.fail("it has never come to its end")
    assert contents(LocalCopy(storage, "a", tmp_path / "after").folder) == new


def test_an_attempt_that_was_given_up_replaces_nothing(storage: UrlStorage, tmp_path: Path) -> None:
    late, new = (
        LocalCopy(storage, "a", tmp_path / "late"),
        LocalCopy(storage, "a", tmp_path / "new"),
    )
    (late.folder / "x").write_text("late")
    version = storage.begin("a")
    storage.write("a", version, "x", [b"late"])
    (new.folder / "x").write_text("new")
    new.upload()
    with pytest.raises(OSError, match="another attempt"):
        storage.publish("a", version, {"x": StoredFile(4, version)})
    assert contents(LocalCopy(storage, "a", tmp_path / "after").folder) == {"x": b"new"}


def test_a_machine_finds_out_whether_it_sees_a_folder(tmp_path: Path) -> None:
    token = token_of(str(tmp_path / "folder"))
    assert token_of(str(tmp_path / "folder")) == token
    assert sees(str(tmp_path / "folder"), token)
    assert not sees(str(tmp_path / "folder"), token_of(str(tmp_path / "other")))
    assert not sees(str(tmp_path / "nothing"), token)


def test_a_url_that_nobody_knows_is_named() -> None:
    with pytest.raises(
        InvalidValueError, match="checkpoints='nothing://x/y' cannot be used from here"
    ):
        UrlStorage("nothing://x/y")


# --- temporary folders ----------------------------------------------------------------------------


def test_a_temporary_folder_goes_with_its_process_however_that_ends(
    tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    code = (
        "import os, signal; from raypool import current_task; print(current_task().checkpoint_dir,"
        " flush=True); "
    )
    code += "assert current_task().checkpoint_dir.is_dir(); "
    for end in ("pass", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"):
        done = subprocess.run(
            [sys.executable, "-c", code + end],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        folder = Path(done.stdout.strip())
        assert folder.is_absolute()
        assert eventually(lambda folder=folder: not folder.parent.exists())


def test_a_temporary_folder_can_be_asked_for_again() -> None:
    temporary = TemporaryFolder()
    folder = temporary.path()
    assert folder == temporary.path()
    assert folder.stat().st_mode & 0o777 == 0o700
    temporary.remove()
    assert not folder.exists()
    assert temporary.path().is_dir()
    temporary.remove()
