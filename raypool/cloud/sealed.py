"""Values on their way to a job and back: bytes behind a line that says what they are, who has written them, and how many.

So a reader knows that they are whole, and that this Python can open them, before it unpickles anything.

**There** they go as a module of the job's runtime environment: handed in through the dashboard with the job, like the user's own
code, and not in its command or its variables, which the dashboard shows.

**Back** only the dashboard's port leads. It streams files of the folder of Ray's logs, as they are, to those who have the token:
100 MB in one to two seconds. So what a job leaves is a file on the node where it ran, in a folder of its own that only the user
of Ray can enter, and in the folder of logs there is nothing but a link to that folder, which Ray follows, and which those who
collect logs do not. Printing it into the job's log instead, or into that of a second job, would show it to everybody who reads
logs, would keep it in them, and would be a third larger. An actor that keeps it would need a port that a tunnel to the dashboard
does not have. Who wants it to outlive the cluster names a place in a bucket.

Source: Ray's `dashboard/modules/log/log_agent.py` (StreamLog and _resolve_filename, which follows links on purpose) and
`dashboard/modules/state/state_head.py` (get_logs).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from raypool.errors import CloudError
from raypool.folders import make_private

FOLDER = "raypool-outputs"

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Sealed(NamedTuple):
    """Bytes, `kind` of which they are, and the versions of Python and raypool that have written them."""

    kind: str
    body: memoryview
    python: str
    raypool: str


def seal(kind: str, body: bytes) -> tuple[bytes, bytes]:
    """Return the line, and the bytes that follow it."""
    digest = hashlib.sha256(body).hexdigest()
    line = {"kind": kind, "bytes": len(body), "sha256": digest, "python": PYTHON, "raypool": version("raypool")}
    return json.dumps(line).encode() + b"\n", body


def unseal(data: bytes | bytearray) -> Sealed:
    r"""Return what was sealed.

    Raises:
        CloudError: It is not whole.

    Example:
        >>> unseal(b"".join(seal("value", b"abc"))).kind
        'value'
        >>> unseal(b"".join(seal("value", b"abc"))[:-1])
        Traceback (most recent call last):
        raypool.errors.CloudError: Of 3 bytes 2 have arrived.
    """
    end = data.find(b"\n")
    try:
        line = json.loads(bytes(data[: max(end, 0)]))
    except ValueError:
        raise CloudError(f"What has arrived ({len(data)} bytes) is not what was sent.") from None
    body = memoryview(data)[end + 1 :]
    if len(body) != line["bytes"]:
        raise CloudError(f"Of {line['bytes']} bytes {len(body)} have arrived.")
    if hashlib.sha256(body).hexdigest() != line["sha256"]:
        raise CloudError(f"The {line['bytes']} bytes that have arrived are not those that were sent.")
    return Sealed(line["kind"], body, line["python"], line["raypool"])


def check_versions(sealed: Sealed) -> None:
    """Make sure that what was sealed there can be opened here: functions travel as code of one version of Python.

    Raises:
        CloudError: Python or raypool is of another version here.
    """
    here = {"Python": PYTHON, "raypool": version("raypool")}
    there = {"Python": sealed.python, "raypool": sealed.raypool}
    if here != there:
        words = ", ".join(
            f"{name} {number} there and {here[name]} here" for name, number in there.items() if number != here[name]
        )
        raise CloudError(
            f"A function and its outputs travel between the same versions only: {words}. Install the same on both sides."
        )


def outcome_path(key: str) -> str:
    """Return where what a job leaves lies within the folder of Ray's logs on its node, by the key of its call.

    See `make_outcome_path`.
    """
    return f"{FOLDER}/{key}"


def make_outcome_path(key: str) -> Path:
    """Make the place, on this node, for what a job leaves; return its path. It goes with the session of Ray's.

    The bytes lie in a folder of the session's that only this user can enter, beside its logs, among which there is a link to it.
    """
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())  # there is no public way to it
    folder = make_private(session / FOLDER)
    with contextlib.suppress(FileExistsError):
        (session / "logs" / FOLDER).symlink_to(f"../{FOLDER}", target_is_directory=True)
    return folder / key
