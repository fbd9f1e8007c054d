"""Stands for nvidia-cuda-mps-control in tests: started with -d it forks a daemon, else it passes a
command on to that.

Tests copy it into a folder, under NVIDIA's name. The file `mode` beside it says what goes wrong:
"fails" (-d does), "serverless" (no server comes up), "stubborn" (neither the daemon nor its server
ends when it is told to).
"""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

PIPES = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "."))
LOGS = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "."))


def mode() -> str:
    path = Path(sys.argv[0]).parent / "mode"
    return path.read_text() if path.exists() else ""


def log(words: object) -> None:
    with (LOGS / "control.log").open("a") as file:
        file.write(f"{words}\n")


def fork(do: object) -> int:
    pid = os.fork()
    if pid == 0:
        do()  # type: ignore[operator]
        os._exit(0)
    return pid


def serve_cuda() -> None:
    """Be a server: clients would come to it."""
    os.closerange(3, 100)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode() == "stubborn" else signal.SIG_DFL)
    time.sleep(600)


def answer(command: str, servers: list[int]) -> str:
    log(command)
    words = command.split()
    if words[0] == "start_server" and mode() != "serverless":
        servers.append(fork(serve_cuda))
    elif words[0] == "get_server_list":
        return "".join(f"{pid}\n" for pid in servers)
    elif words[0] == "get_client_list":
        return (PIPES / "clients").read_text() if (PIPES / "clients").exists() else ""
    return ""


def daemon() -> None:
    """Listen, in a session of its own, until somebody says quit."""
    os.setsid()
    if os.fork():
        os._exit(0)
    log(
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
        f" {oct(PIPES.stat().st_mode & 0o777)}"
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode() == "stubborn" else signal.SIG_DFL)
    servers: list[int] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(PIPES / "control"))
        listener.listen()
        (PIPES / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
        while True:
            connection, _ = listener.accept()
            with connection:
                command = connection.recv(1000).decode().strip()
                if command.startswith("quit") and mode() != "stubborn":
                    log("quit")
                    break
                connection.sendall(answer(command, servers).encode())
    for pid in servers:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    log("quit")


def control() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(PIPES / "control"))
        connection.sendall(sys.stdin.readline().encode())
        connection.shutdown(socket.SHUT_WR)
        while words := connection.recv(1000):
            sys.stdout.write(words.decode())


def main() -> None:
    if sys.argv[1:] == ["-d"]:
        if mode() == "fails":
            sys.exit("An instance of this daemon is already running")
        os.waitpid(fork(daemon), 0)
        for _ in range(1000):
            if (PIPES / "nvidia-cuda-mps-control.pid").exists():
                break
            time.sleep(0.01)
    else:
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            control()


if __name__ == "__main__":
    main()
