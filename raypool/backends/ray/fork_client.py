"""Takes the place of Ray's `setup_worker.py`: asks the fork server for a worker, and stands for it.

Ray's raylet starts this file as a script, with the words of a worker, in an environment with
`RAYPOOL_FORK_SERVER`, the path of the server's socket. Without a server, or if that refuses, it
becomes what Ray would have started. It imports little: each worker waits for it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys

SERVER = "RAYPOOL_FORK_SERVER"
"""The variable with the path of the server's socket; a pool without forks sets it for workers."""

REFUSED = "RAYPOOL_NOT_FORKED"
"""The variable that tells a plain worker why it is one."""

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

OOM_SCORE = "/proc/self/oom_score_adj"
"""What Ray raises for its workers: they end first where the machine runs out of memory."""

FORK_S = 60.0
"""How long the server may take; it has to import its modules first [s]."""


def main(words: list[str]) -> None:
    """Have a worker forked, and live as long as it."""
    path = os.environ.pop(SERVER, "")
    try:
        with open(OOM_SCORE) as score:
            oom_score_adj = score.read()
        request = {
            **understood(words),
            "folder": os.getcwd(),
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "oom_score_adj": oom_score_adj,
        }
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(FORK_S)
        server.connect(path)
        body = json.dumps(request).encode()
        streams = array.array("i", [0, 1, 2])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        server.sendmsg([struct.pack("q", len(body))], rights)
        server.sendall(body)
        lines = server.makefile("rb")
        answer = json.loads(lines.readline() or '{"refused": "the fork server has ended"}')
        if "refused" in answer:
            raise ValueError(answer["refused"])
        worker = os.pidfd_open(answer["pid"])
        with contextlib.suppress(OSError), open(OOM_SCORE, "w") as score:
            score.write("0")  # it has no memory: its worker is to go first
    except (OSError, ValueError) as reason:
        if str(reason):  # else its pool wants no forks, and need not be told
            os.environ[REFUSED] = str(reason)
        script = next(word for word in words if word.endswith("default_worker.py"))
        setup = os.path.join(os.path.dirname(script), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *words])
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: signal.pidfd_send_signal(worker, number))
    server.settimeout(None)  # the worker lives as long as its pool
    last = lines.readline()
    if not last:  # the server was killed; the worker goes on
        select.select([worker], [], [])
        os._exit(1)
    status = json.loads(last)["status"]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def understood(words: list[str]) -> dict[str, object]:
    """Return the words of a Python worker, and its variables.

    Raises:
        ValueError: It needs more, such as a container.
    """
    context = next((word[len(CONTEXT) :] for word in words if word.startswith(CONTEXT)), "")
    wanted = json.loads(context or "{}")
    variables = wanted.pop("env_vars", None) or {}
    if wanted.pop("py_executable", sys.executable) != sys.executable or any(wanted.values()):
        raise ValueError("the worker's runtime environment has more than environment variables")
    if SERVER in variables:
        raise ValueError  # its pool does not want a fork
    if any("$" in value for value in variables.values()):
        raise ValueError("an environment variable of the worker refers to another ($NAME)")
    if f"{LANGUAGE}PYTHON" not in words or not words[0].endswith("default_worker.py"):
        raise ValueError("Ray asked for a worker of another kind")
    return {
        "words": [word for word in words if not word.startswith((CONTEXT, LANGUAGE))],
        "variables": {**os.environ, **variables},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
