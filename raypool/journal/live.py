"""A run that is watched: its live state, the actions asked for, and notes, as files in its folder.

A watcher touches `watch/wanted` for as long as it looks. The driver then writes `watch/live.json`
and takes what is in `watch/requests`. All of it works between machines with a common file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from raypool.errors import InvalidValueError, JournalError
from raypool.journal.files import append, distrust, make_folder
from raypool.journal.lock import is_alive
from raypool.worker.folders import write_file

WATCH = "watch"
"""The folder for watchers in the folder of a run."""

LIVE = "live.json"

NOTES = "notes.json"

ACTIONS = ("stop", "cancel", "rerun", "first", "stop_all")
"""All but the last are about one item."""

FRESH_S = 10.0
"""How long a sign of a watcher counts at the driver, and one of the driver at a watcher [s]."""

LOOK_S = 1.0
"""How often, at most, the driver looks for a watcher, and writes its state for one [s]."""

REST = 100
"""The driver rests for this many times as long as it computed to write its state: 1% of a core."""

LONGEST_REST_S = 5.0
"""A watcher takes an older state for a sign that the driver is gone (`FRESH_S`) [s]."""

MAX_REQUEST_BYTES = 64 * 1024
"""The size of a request [bytes]; a larger file is not read."""

TOO_LATE = "the loop has ended"


class Request(NamedTuple):
    """An action that a user asks for; `item` is None for the whole loop."""

    id: str
    action: str
    item: int | None
    user: str
    asked_at: float


# --- the driver's side ----------------------------------------------------------------------------


class WatchedRun:
    """What the driver does for watchers of a run. One thread uses it; no file disturbs the loop.

    Args:
        run_dir: The folder of the run.
        describe: Returns the state of the loop.
        act: Carries out a request. Returns "done", a sentence why not, or None to be asked again.
        clock: A monotonic clock [s].
    """

    def __init__(
        self,
        run_dir: Path,
        describe: Callable[[], Mapping[str, Any]],
        act: Callable[[Request], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / WATCH
        self._describe = describe
        self._act = act
        self._clock = clock
        self._touched_ns: int | None = None
        self._wanted_until = self._look_at = self._write_at = -1.0
        self._pending: list[Request] = []
        for request in self._new_requests():  # of an earlier call with the folder
            self._record(request, TOO_LATE)

    def look(self) -> bool:
        """Serve watchers, if it is time; return whether there are any."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            with contextlib.suppress(OSError):  # nobody has watched this run yet
                touched_ns = (self._folder / "wanted").stat().st_mtime_ns
                # a change counts, and not the time: machines' clocks differ
                is_left = self._touched_ns is None and time.time() - touched_ns / 1e9 > FRESH_S
                if touched_ns != self._touched_ns and not is_left:
                    self._wanted_until = now + FRESH_S
                self._touched_ns = touched_ns
        if now >= self._wanted_until:
            return False
        if now >= self._write_at:
            started = time.thread_time()
            about = {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
            data = json.dumps(about | {**self._describe()}, default=str).encode()
            with contextlib.suppress(OSError):  # a full disk, say
                write_file(self._folder / LIVE, data, is_lasting=False)
            took_s = time.thread_time() - started
            self._write_at = now + min(max(LOOK_S, REST * took_s), LONGEST_REST_S)
        self._pending += self._new_requests()
        for request in list(self._pending):
            outcome = self._act(request)
            if outcome is not None:
                self._pending.remove(request)
                self._record(request, outcome)
        return True

    def close(self) -> None:
        """Answer what is left after the end of the loop, and remove its live state."""
        for request in [*self._pending, *self._new_requests()]:
            self._record(request, self._act(request) or TOO_LATE)
        with contextlib.suppress(OSError):  # readers ignore an old one
            (self._folder / LIVE).unlink(missing_ok=True)

    def _new_requests(self) -> Iterator[Request]:
        """Yield the requests in the folder and remove them; those that cannot be are recorded."""
        folder = self._folder / "requests"
        try:
            if distrust(self._folder) or distrust(folder):
                return
            # names that begin with a dot are files that are still being written
            paths = sorted(folder.glob("[!.]*.json"))
        except OSError:  # nobody has asked for anything yet
            return
        for path in paths:
            outcome = ""
            try:
                request = read_request(path)
            except (OSError, ValueError) as error:
                outcome = f"{path.name} is no request: {error}"
                request = Request(path.stem, "", None, "", time.time())
            try:
                path.unlink()
            except OSError:  # it would be carried out again and again
                continue
            if outcome:
                self._record(request, outcome)
            else:
                yield request

    def _record(self, request: Request, outcome: str) -> None:
        entry = {**request._asdict(), "done_at": time.time(), "outcome": outcome}
        with contextlib.suppress(OSError):  # on a full disk; the action is done all the same
            line = json.dumps(entry).encode() + b"\n"
            append(self._run_dir / "actions.jsonl", line, is_lines=True)


def read_request(path: Path) -> Request:
    """Read a request.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none, or belongs to another user.
    """
    # somebody may have put a link there, or a pipe, which would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise ValueError(f"it belongs to user {status.st_uid}")
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_REQUEST_BYTES:
            raise ValueError(f"it is no small file ({status.st_size:,} bytes)")
        entry = json.loads(file.read(MAX_REQUEST_BYTES))
    try:
        request = Request(**entry)
        check_action(request.action, request.item)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return request


def check_action(action: Any, item: Any) -> None:
    """Make sure that there is such an action.

    Raises:
        InvalidValueError: There is none, or it needs an item, or takes none.
    """
    is_item = isinstance(item, int) and not isinstance(item, bool) and item >= 0
    if action not in ACTIONS or not (item is None if action == "stop_all" else is_item):
        raise InvalidValueError(
            f"action={action!r} with item={item!r} is none of {', '.join(ACTIONS)}, which take the"
            " number of an item, except for the last one."
        )


# --- a watcher's side -----------------------------------------------------------------------------


def live_of(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the live state of a run; None without a fresh one, or if its process is gone.

    The driver begins to write it at most two seconds after `want`.
    """
    path = Path(run_dir) / WATCH / LIVE
    try:
        if distrust(path):
            return None
        live = json.loads(path.read_bytes())
        is_fresh = time.time() - live["time"] < FRESH_S
        # of a process of another machine nothing is known
        is_gone = live["host"] == socket.gethostname() and not is_alive(live["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return live if is_fresh and not is_gone else None


def want(run_dir: str | os.PathLike[str]) -> None:
    """Note that somebody watches a run now; to be repeated every two seconds.

    Raises:
        JournalError: The folder belongs to another user.
        OSError: It cannot be written.
    """
    (_folder_of(run_dir) / "wanted").touch(mode=0o600)


def ask(run_dir: str | os.PathLike[str], action: str, item: int | None = None) -> str:
    """Ask the driver of a run for an action; return the id that `actions_in` has it under.

    Args:
        run_dir: The folder of the run.
        action: "stop" (a running item is to end at its next report), "cancel", "rerun" (a failed or
            cancelled item), "first" (a waiting item runs next) or "stop_all" (what runs finishes,
            and nothing else starts).
        item: The number of the item; None for "stop_all".

    Raises:
        InvalidValueError: There is no such action.
        JournalError: The folder belongs to another user.
        OSError: It cannot be written.
    """
    check_action(action, item)
    requests = _folder_of(run_dir) / "requests"
    make_folder(requests)
    # in the order of their names
    request_id = f"{time.time_ns():016x}-{uuid.uuid4().hex[:8]}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a uid without a name
        user = f"user {os.getuid()}"
    request = Request(request_id, action, item, user, time.time())
    data = json.dumps(request._asdict()).encode()
    write_file(requests / f"{request_id}.json", data, is_lasting=False)
    want(run_dir)
    return request_id


def actions_in(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the actions that were asked for, the oldest first, each with its "outcome"."""
    try:
        lines = (Path(run_dir) / "actions.jsonl").read_bytes().splitlines()
    except OSError:  # there were none
        return []
    actions = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off by a crash
            entry = json.loads(line)
            if isinstance(entry, dict) and {*Request._fields, "done_at", "outcome"} <= entry.keys():
                actions.append(entry)
    return actions


def _folder_of(run_dir: str | os.PathLike[str]) -> Path:
    """Return the folder for watchers, made if necessary."""
    folder = Path(run_dir) / WATCH
    owner = folder.parent.stat().st_uid
    if owner != os.getuid():
        raise JournalError(
            f"{run_dir} belongs to user {owner}. Only its owner can watch it live and act on it.",
            run_dir=str(run_dir),
        )
    make_folder(folder)
    return folder


# --- stars and notes, which people give items on the live page ------------------------------------


class Note(TypedDict):
    """What people noted of an item."""

    star: bool
    text: str


def notes_in(run_dir: Path) -> dict[str, Note]:
    """Return the notes in a run's folder by the keys of the items; {} if they cannot be read."""
    try:
        notes = json.loads((run_dir / NOTES).read_bytes())
        return {
            str(key): {"star": bool(note["star"]), "text": str(note["text"])}
            for key, note in notes.items()
        }
    # there are none yet, or somebody has edited the file
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_note(run_dir: Path, key: str, changed: Mapping[str, bool | str]) -> None:
    """Change fields of the note of an item; the others stay as they are.

    Raises:
        OSError: It cannot be written.
    """
    # two servers may write at once
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        notes = notes_in(run_dir)
        note = {"star": False, "text": "", **notes.get(key, {}), **changed}
        write_file(run_dir / NOTES, json.dumps({**notes, key: note}).encode())
    finally:
        os.close(descriptor)
