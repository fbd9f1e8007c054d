"""`WatchPage`: the live page of a run, as `ParallelPool.watch` returns it."""

from __future__ import annotations

import html
import json
import os
import secrets
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from raypool.errors import JournalError, check_installed
from raypool.views.notebook import in_notebook

STOP_S = 5.0
"""How long a server may take to end before it is killed [s]."""

# not `-m`: the driver may have found raypool in a folder that only it knows
SERVE = """
import json, sys
wanted = json.load(sys.stdin)
sys.path[:] = wanted["path"]
from raypool.watch.server import serve_for
serve_for(wanted)
"""


class WatchPage:
    """The live page of a run; a notebook shows it in a frame.

    It is served until it is closed, its pool is closed, or this process ends.

    Attributes:
        url: Its address. Anyone on this machine who has it can see the run and act on it.
        run_dir: The folder of the run.

    Raises:
        JournalError: The folder belongs to another user.
        ModuleNotFoundError: A package is missing; it comes with `raypool[watch]`.
    """

    def __init__(self, run_dir: Path) -> None:
        check_can_watch(run_dir)
        self.run_dir = run_dir
        token = secrets.token_urlsafe(32)
        # Made here: the port is known, and early requests wait until the server takes them.
        with listen() as listener:
            self.url = url_of(listener, token)
            wanted = {
                "path": list(map(str, sys.path)),
                "folder": str(run_dir),
                "listener": listener.fileno(),
                "token": token,
                "parent": os.getpid(),
            }
            # Not a thread, which would hold up the driver while it reads the run. In a new session,
            # so that Ctrl-C ends the loop and not the page.
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                text=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:  # other users can read arguments
            json.dump(wanted, pipe)
        self._stop = weakref.finalize(self, _stop, self._process, os.getpid())

    @property
    def is_closed(self) -> bool:
        """Whether the page is no longer served."""
        return self._process.poll() is not None

    def show(self) -> None:
        """Show the page in a notebook; anywhere else, print its address on standard error."""
        if not in_notebook():
            sys.stderr.write(f"{announcement(self.url)}\n")
        else:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Serve the page no longer. The run goes on."""
        self._stop()

    def __repr__(self) -> str:
        return f"<WatchPage of {self.run_dir}: {'closed' if self.is_closed else self.url}>"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        url = html.escape(self.url)
        return (
            f'<a href="{url}" target="_blank">{html.escape(str(self.run_dir))}</a><br>'
            f'<iframe src="{url}" width="100%" height="800" style="border: 1px solid #888">'
            "</iframe>"
        )


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:  # a forked child
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # without a limit: SIGKILL cannot be ignored


def check_packages() -> None:
    """Raise ModuleNotFoundError if a package of the extra `watch` is missing."""
    check_installed("watch", "The live page", "starlette", "uvicorn", "plotly", "itables")


def check_can_watch(folder: Path) -> None:
    """Make sure that a folder can be watched here; it need not exist yet.

    Raises:
        JournalError: It belongs to another user.
        ModuleNotFoundError: A package is missing.
    """
    check_packages()
    try:
        owner = folder.stat().st_uid
    except OSError:
        return
    if owner != os.getuid():
        raise JournalError(
            f"{folder} belongs to user {owner}. Only its owner can watch it.", run_dir=str(folder)
        )


def listen(port: int = 0) -> socket.socket:
    """Return a socket that listens on the loopback; port 0 is any free one.

    Raises:
        OSError: The port is in use.
    """
    listener = socket.socket()
    try:
        # else a port cannot be used again for a minute after its page was closed
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, token: str) -> str:
    """Return the address of a page."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"


def announcement(url: str) -> str:
    """Return the lines that tell where a page is, also from another machine."""
    text = f"Live page: {url}"
    if "SSH_CONNECTION" in os.environ:
        port = url.split(":")[2].partition("/")[0]
        text += (
            "\nTo open it on your own machine, run there:"
            f" ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        )
    return text
