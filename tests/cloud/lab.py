"""Several machines on one: hosts that are namespaces, with a network of their own between them, and
nothing that needs root.

A lab is a namespace for users, processes, mounts and the network, which holds a switch. Each host
is a namespace within it: an address of its own, its own processes, name, home, /tmp/ray and
/dev/shm. Who is in a lab sees nothing of this machine's network. The first process of the lab, and
of each host, waits for the end of its standard input: however a test ends, all of it goes, and with
its first process every other; nothing has to be tidied up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

BOOT_S = 120.0
"""A host boots in some hundredths of a second; only on a machine that is very busy does it take
this long [s].
"""

NAMESPACES = ("--net", "--mount", "--pid", "--uts")

SWITCH = """
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip link set lo up && ip link add switch type bridge && ip link set switch up && ip addr add 10.88.0.254/24 dev switch
echo up && exec cat
"""

CABLE = """
ip netns add {name} && ip link add {name} type veth peer name eth0 netns {name} && ip link set {name} master switch up
ip -n {name} link set lo up && ip -n {name} addr add {address}/24 dev eth0 && ip -n {name} link set eth0 up
ip -n {name} route add default via 10.88.0.254
"""  # the route is how Ray finds its own address: nothing is sent along it

HOST = """
mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && hostname {name}
{service}
echo up && exec env --ignore-signal=CHLD cat  # who adopts orphans, and lets them go when they end
"""


@functools.cache
def is_allowed() -> bool:
    """Whether this machine lets its users make namespaces, and has what it takes to join them."""
    try:
        made = subprocess.run(
            [*_LAB, "sh", "-c", "ip link add switch type bridge"],
            capture_output=True,
            timeout=BOOT_S,
            check=False,
        )
    except FileNotFoundError:
        return False
    return made.returncode == 0


_LAB = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)


def _is_first(pid: int) -> bool:
    """Whether a process is the first of a namespace of its own."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return re.search(r"^NSpid:.*\t1$", status, re.MULTILINE) is not None


def _first_process(command: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start what begins a namespace; return it, and the process that is the first in there, as it
    is numbered out here.
    """
    outer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert outer.stdout is not None
    assert outer.stderr is not None
    if outer.stdout.readline() != "up\n":
        outer.kill()
        raise AssertionError(outer.stderr.read())
    # the service of a host has left processes, too, and some of them are about to end
    first = next(
        child.pid
        for child in psutil.Process(outer.pid).children(recursive=True)
        if _is_first(child.pid)
    )
    return outer, first


@dataclass
class Host:
    """A machine of a lab: its name and address, its home, and the number of its first process, None
    while it is off.
    """

    name: str
    address: str
    home: Path
    outer: subprocess.Popen[str] | None = field(default=None, repr=False)
    first: int | None = None

    @property
    def env(self) -> dict[str, str]:
        """What every process there has in its environment: nothing of this machine's but the way to
        its programs.
        """
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {
            "HOME": str(self.home),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
        }


class Lab:
    """Hosts on a switch.

    Args:
        folder: Where they have their homes.
        names: What they are called; their addresses are 10.88.0.1 and so on.
        service: A shell command that each runs when it boots.
        as_root: Without a namespace for users, for what wants to be the real root (sshd does).
        furnish: Puts into the home of each what belongs there.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        service: str = "true",
        *,
        as_root: bool = False,
        furnish: Callable[[Path], object] = bool,
    ) -> None:
        self._service = service
        self._enter: tuple[str, ...] = () if as_root else ("--user", "--preserve-credentials")
        Path("/tmp/ray").mkdir(exist_ok=True)
        lab = tuple(
            word for word in _LAB if not (as_root and word in ("--user", "--map-root-user"))
        )
        self._outer, self._first = _first_process([*lab, "sh", "-ec", SWITCH])
        self.hosts = {
            name: Host(name, f"10.88.0.{number}", folder / name)
            for number, name in enumerate(names, 1)
        }
        for host in self.hosts.values():
            host.home.mkdir(mode=0o700)
            furnish(host.home)
            self._on_switch(CABLE.format(name=host.name, address=host.address))
            self.boot(host.name)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _into(self, first: int, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(first), *self._enter, *namespaces]

    def _on_switch(self, script: str) -> None:
        command = [*self._into(self._first, "--net", "--mount", "--pid"), "sh", "-ec", script]
        subprocess.run(command, check=True, timeout=BOOT_S, capture_output=True)

    # --- what befalls a host ----------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Switch a host on."""
        host = self.hosts[name]
        begin = [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-ec",
        ]
        script = HOST.format(
            name=name, service=self._service.format(name=name, home=host.home, address=host.address)
        )
        within = [
            *self._into(self._first, "--net", "--mount", "--pid"),
            "ip",
            "netns",
            "exec",
            name,
        ]
        host.outer, host.first = _first_process([*within, *begin, script])

    def kill(self, name: str) -> None:
        """End all processes of a host at once."""
        host = self.hosts[name]
        if host.first is not None and host.outer is not None:
            os.kill(host.first, signal.SIGKILL)
            host.outer.communicate(timeout=BOOT_S)
            host.first = None

    def cut(self, name: str) -> None:
        """Pull the cable of a host: nobody is told."""
        self._on_switch(f"ip link set {name} down")

    def mend(self, name: str) -> None:
        """Put the cable of a host back."""
        self._on_switch(f"ip link set {name} up")

    def close(self) -> None:
        """Switch everything off."""
        for name in self.hosts:
            self.kill(name)
        os.kill(self._first, signal.SIGKILL)
        self._outer.communicate(timeout=BOOT_S)

    # --- what runs there --------------------------------------------------------------------------

    def start(self, name: str, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a program on a host."""
        host = self.hosts[name]
        assert host.first is not None, f"{name} is off"
        inside: Mapping[str, str] = {**host.env, **env}
        words = [
            *self._into(host.first, *NAMESPACES),
            "env",
            "-i",
            *(f"{key}={value}" for key, value in inside.items()),
            *command,
        ]
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def end(self, process: subprocess.Popen[str], number: int = signal.SIGKILL) -> str:
        """End what was started on a host, by a signal; return what it has printed, and said, that
        nobody has read.
        """
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        return "\n".join(process.communicate(timeout=BOOT_S))

    def run(self, name: str, *command: str, timeout_s: float = 500.0, **env: str) -> str:
        """Run a program on a host to its end; return what it has printed."""
        process = self.start(name, *command, **env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            self.end(process)
            raise
        assert process.returncode == 0, (
            f"{' '.join(command)} on {name}: exit status {process.returncode}\n{out}\n{err}"
        )
        return out

    def python(self, name: str, code: str, **env: str) -> subprocess.Popen[str]:
        """Start Python on some code on a host."""
        return self.start(name, sys.executable, "-c", code, **env)


def give_token(hosts: Sequence[Host]) -> str:
    """Give all hosts one token, readable by its owner only."""
    token = secrets.token_hex(32)
    for host in hosts:
        folder = host.home / ".ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(
            os.open(folder / "auth_token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
        ) as file:
            file.write(token)
    return token
