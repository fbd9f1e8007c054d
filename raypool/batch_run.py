"""What a job of `raypool.batch` runs on its cluster: `python -m raypool.batch_run KEY`."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import pickle
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raypool.batches import Call
from raypool.cloud.sealed import check_versions, make_outcome_path, seal, unseal
from raypool.engine.answers import pack_error
from raypool.engine.checkpoint_folders import filesystem
from raypool.engine.coroutines import finished
from raypool.engine.packing import snapshot
from raypool.engine.ray_session import join_ray
from raypool.errors import CloudError, TaskError
from raypool.job import CALL
from raypool.pool import parpool


def main(key: str) -> int:
    """Call what the module of this key brings, and leave what comes of it; return the exit code."""
    join_ray(None)
    place = None
    try:
        call = _call(key)
        if call.outputs is not None:
            _try_out(call.outputs, key)
        place = call.outputs
        body = snapshot(_value(call), "a result back")
    except SystemExit as error:
        _leave(key, place, "error", pack_error(TaskError(f"The function has ended its process, with exit code {error.code}.")))
        raise
    except BaseException as error:
        traceback.print_exc()
        _leave(key, place, "error", pack_error(error))
        return 1
    _leave(key, place, "value", body)
    return 0


def _call(key: str) -> Call:
    """Return what is to be called."""
    sealed = unseal(importlib.resources.files(f"{CALL}_{key}").joinpath("call").read_bytes())
    check_versions(sealed)
    try:
        call: Call = pickle.loads(sealed.body)
    except ImportError as error:
        raise CloudError(
            f"The function cannot be loaded on the cluster: {error}. Ship the folder that has the module with the profile's "
            "working_dir, or name the package in its packages."
        ) from error
    return call


def _value(call: Call) -> Any:
    if call.pool is None:
        return finished(call.fn(*call.args))
    with parpool(call.pool, profile=call.profile):
        return finished(call.fn(*call.args))


def _try_out(place: str, key: str) -> None:
    """Make sure that something can be left there, before hours of work depend on it.

    Raises:
        CloudError: It cannot.
    """
    try:
        files, name = _put(place, f"{key}.trial", (b"raypool tries whether it can write here\n",))
        files.delete_file(name)
    except Exception as error:
        raise CloudError(
            f"The function was not called: its outputs are to go to {place}, where the cluster cannot write: {error}. "
            "Make sure that the place exists, and that the account of the machines may write there."
        ) from error


def _leave(key: str, place: str | None, kind: str, body: bytes) -> None:
    """Leave something where whoever wants it looks for it, at the latest on the disk of this node."""
    pieces = seal(kind, body)
    if place is not None:
        try:
            _put(place, key, pieces)
        except Exception:
            traceback.print_exc()
            sys.stderr.write(f"raypool: {place} could be written to before, and cannot now; what comes is left on this node\n")
        else:
            return
    _write_whole(make_outcome_path(key), pieces)


def _put(place: str, name: str, pieces: Iterable[bytes]) -> tuple[Any, str]:
    """Write a file in a folder or at a URL, all of it or nothing; return who knows it, and what it calls it."""
    files, root = filesystem(place, "outputs")
    with contextlib.suppress(NotImplementedError):
        files.create_dir(root, recursive=True)
    draft = f"{root}/{name}.{os.getpid()}"
    with files.open_output_stream(draft) as stream:
        for piece in pieces:
            stream.write(piece)
    files.move(draft, f"{root}/{name}")
    return files, f"{root}/{name}"


def _write_whole(path: Path, pieces: tuple[bytes, ...]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
