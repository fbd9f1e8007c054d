"""What a job of `raypool.batch` runs on its cluster: `python -m raypool.batch_run KEY`."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from raypool.batches import Call
from raypool.cloud.sealed import check_versions, make_outcome_path, seal, unseal
from raypool.engine.answers import pack_error
from raypool.engine.homes import filesystem
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
        place = call.outputs
        value = _value(call)
    except SystemExit as error:
        _leave_error(key, place, TaskError(f"The function has ended its process, with exit code {error.code}."))
        raise
    except BaseException as error:
        traceback.print_exc()
        _leave_error(key, place, error)
        return 1
    try:
        _leave(key, place, "value", snapshot(value, "a result back"))
    except Exception as error:
        traceback.print_exc()
        _leave_error(key, place, error)
        return 1
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
        return call.fn(*call.args)
    with parpool(call.pool, profile=call.profile):
        return call.fn(*call.args)


def _leave_error(key: str, place: str | None, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the log has it in any case
        _leave(key, place, "error", pack_error(error))


def _leave(key: str, place: str | None, kind: str, body: bytes) -> None:
    """Leave something where whoever wants it looks for it: all of it, or nothing."""
    pieces = seal(kind, body)
    if place is None:
        _write_whole(make_outcome_path(key), pieces)
        return
    files, root = filesystem(place, "outputs")
    with contextlib.suppress(NotImplementedError):
        files.create_dir(root, recursive=True)
    draft = f"{root}/{key}.{os.getpid()}"
    with files.open_output_stream(draft) as stream:
        for piece in pieces:
            stream.write(piece)
    files.move(draft, f"{root}/{key}")


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
