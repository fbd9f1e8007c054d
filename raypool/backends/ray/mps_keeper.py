"""Keeps NVIDIA's Multi-Process Service (MPS) up for a pool's workers on one machine, then ends it.

A program of its own, run by its path and without packages: the processes that want the service may
die at any time, and must not leave it behind. They hold a lock on a file; when nobody does any
more, the service is ended, killed if need be.

Usage: mps_keeper.py FOLDER PROGRAM; FOLDER has `pipe`, `log` and the file `users`, PROGRAM is
nvidia-cuda-mps-control. It prints "up" or the problem, and closes its output when all has ended.

Source:
    NVIDIA Multi-Process Service, release r580: "Appendix: Tools and Interface Reference" and its
    man page (nvidia-cuda-mps-control: start_server, get_server_list, quit).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

UP = "up"

START_TIMEOUT_S = 10.0
"""How long the daemon, and then its server, may take to start [s]."""

ASK_TIMEOUT_S = 5.0
"""How long the daemon may take to answer [s]."""

QUIT_S = 1
"""How long the server has to end by itself [s]; both are killed after twice that."""

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Control:
    """NVIDIA's control program, for the service with `pipe` and `log` in a folder."""

    def __init__(self, folder: Path, program: str) -> None:
        self._log = folder / "log"
        self._program = program

    def start(self) -> str | None:
        """Start the daemon and its server, and wait until they are up; return the problem."""
        deadline = time.monotonic() + START_TIMEOUT_S
        # not a pipe, which the daemon would keep open
        with (self._log / "start.log").open("w") as output:
            try:
                started = subprocess.run(
                    [self._program, "-d"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=START_TIMEOUT_S,
                    check=False,
                )
            # told to the agent: the workers can compute without the service
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"nvidia-cuda-mps-control -d failed, {error}"
        if started.returncode:
            return (
                "nvidia-cuda-mps-control -d failed with status"
                f" {started.returncode}{self._last_words('start.log')}"
            )
        self.ask(f"start_server -uid {os.getuid()}")
        while not any(word.isdigit() for word in self.ask("get_server_list").split()):
            if time.monotonic() > deadline:
                words_of_log = self._last_words("server.log") or self._last_words("control.log")
                return f"no MPS server started within {START_TIMEOUT_S:g} s{words_of_log}"
            time.sleep(0.05)
        return None

    def ask(self, command: str, environ: dict[str, str] | None = None) -> str:
        """Give the daemon a command; return its answer, "" if there is none."""
        try:
            done = subprocess.run(
                [self._program],
                input=command + "\n",
                capture_output=True,
                text=True,
                timeout=ASK_TIMEOUT_S,
                check=False,
                env=environ,
            )
        # it has died, or hangs: `start` gives up after its time, and `end` kills it
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout

    def _last_words(self, name: str) -> str:
        """Return the last line of a log, to follow a sentence."""
        with contextlib.suppress(OSError):  # there is no such log
            lines = (self._log / name).read_text(errors="replace").split("\n")
            return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        return ""


def wait_for_users(folder: Path) -> None:
    """Wait until nobody holds a lock on the file `users`."""
    with (folder / "users").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def end(control: Control) -> None:
    """End the service, whose processes this one has started or adopted."""
    control.ask(f"quit -t {QUIT_S}")
    deadline = time.monotonic() + 2 * QUIT_S
    while not _reaped() and time.monotonic() < deadline:
        time.sleep(0.02)
    while not _reaped():
        for entry in Path("/proc").iterdir():
            # no process, or one that has just ended
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.02)


def _reaped() -> bool:
    """Reap ended children; return whether none is left."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return False
    return True


def main(folder: Path, program: str) -> None:
    """Start the service, keep it up, and end it."""
    if os.fork():
        # not a child of the agent's: Ray ends the children of its processes with them
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopts the daemon and its server
    control = Control(folder, program)
    problem = control.start()
    sys.stdout.write((problem or UP).replace("\n", " ") + "\n")
    sys.stdout.flush()
    if problem is None:
        wait_for_users(folder)
    end(control)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
