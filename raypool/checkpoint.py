"""`save_checkpoint` and `load_checkpoint`: one file of a task's own, from which it goes on after it was ended in its midst."""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.folders import sync_folder
from raypool.task import current_task, note_here, unbroken

FILE = "checkpoint.pt"

PathLike = str | os.PathLike[str]


def save_checkpoint(state: Any, path: PathLike | None = None) -> Path:
    """Save something with `torch.save`, in one step: the file of before stays until the new one is complete, and on the disk.

    A task that is cancelled meanwhile ends when it is saved.

    Args:
        state: What `torch.load(weights_only=True)` gives back: tensors, numbers, texts, and lists and dicts of those, as all
            `state_dict()` are. Anything else is refused here, not when it is needed.
        path: The file; None: "checkpoint.pt" in the task's `current_task().checkpoint_dir`.

    Returns:
        The file.

    Raises:
        InvalidTypeError: There is something else in it. The file of before stays.
        OSError: It cannot be written: the disk is full, say. The file of before stays.

    Source:
        torch.save, torch.load; the order of temporary file, fsync and rename is that of LWN 457667, "Ensuring data reaches disk".

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = save_checkpoint({"epoch": 3}, folder + "/model.pt")
        ...     load_checkpoint(file)
        {'epoch': 3}
    """
    file = current_task().checkpoint_dir / FILE if path is None else Path(path)
    note = note_here()
    with unbroken(note):
        _write(state, file)
        if path is None and note is not None and note.folders is not None:
            note.folders.upload(note, note.index)
    return file


def load_checkpoint(path: PathLike | None = None, map_location: Any = "cpu") -> Any:
    """Return what was saved with `save_checkpoint`; None if there is no such file.

    Nothing in the file is executed: it is read with `weights_only=True`.

    Args:
        path: The file; None: "checkpoint.pt" in the task's `current_task().checkpoint_dir`.
        map_location: On which device its tensors are to be; see `torch.load`.

    Raises:
        InvalidValueError: The file is damaged, or has something in it that is not loaded for safety.
    """
    import torch

    file = current_task().checkpoint_dir / FILE if path is None else Path(path)
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged file makes torch do
        if _is_forbidden(error):
            raise InvalidValueError(
                f"The checkpoint {file} holds something else than tensors, numbers, texts, and lists and dicts of those "
                f"({_forbidden(error)}): it was not written by save_checkpoint, and code in it could run here. If you trust "
                "whoever has written it: torch.load(file, weights_only=False)."
            ) from error
        if "map_location" in str(error):  # it was saved on a device that is not here
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".") or "it ends too early"
        raise InvalidValueError(
            f"The checkpoint {file} ({file.stat().st_size:,} bytes) is damaged, or none of torch's: {reason}. "
            "Delete it to begin anew, or put a complete copy in its place."
        ) from error


def _write(state: Any, file: Path) -> None:
    """Write a file whole, or leave what is there as it is."""
    spare = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    with _removed(spare):
        descriptor = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            _dump(state, stream, file)
            stream.flush()
            os.fsync(descriptor)
        _check_loads(spare, file)
        spare.replace(file)
    sync_folder(file.parent)


class _Watched:
    """A stream that remembers why it could not be written: torch does not."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write something."""
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Write what waits to be written."""
        self._stream.flush()


def _dump(state: Any, stream: IO[bytes], file: Path) -> None:
    import torch

    watched = _Watched(stream)
    try:
        torch.save(state, watched)  # type: ignore[arg-type]  # it writes and flushes, and asks for nothing else
    except RuntimeError:
        if watched.error is not None:
            raise watched.error from None
        raise
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidTypeError(
            f"The checkpoint {file} cannot be saved: {error}. Save state_dict(), tensors, numbers and texts."
        ) from error


def _check_loads(spare: Path, file: Path) -> None:
    """Make sure that `load_checkpoint` will take a file; its tensors are not read."""
    import torch

    try:
        torch.load(spare, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InvalidTypeError(
            f"The checkpoint {file} was not saved: it could not be loaded again, since that executes no code of what is in it "
            f"({_forbidden(error)}). Save tensors, numbers and texts, in lists and dicts: float(x) for a NumPy number, "
            "torch.from_numpy(x) for an array, state_dict() for a model."
        ) from error


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "GLOBAL " in str(error)


def _forbidden(error: Exception) -> str:
    """Return the name of what torch does not load for safety."""
    words = str(error).split()
    return words[words.index("GLOBAL") + 1].strip(".,") if "GLOBAL" in words else "of a kind that torch does not name"


@contextlib.contextmanager
def _removed(spare: Path) -> Iterator[None]:
    """Remove a file if something goes wrong."""
    try:
        yield
    except BaseException:
        spare.unlink(missing_ok=True)
        raise
