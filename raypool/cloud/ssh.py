"""Logging in on the machines of a cluster by SSH, as Ray's launcher does.

Source: `SSHOptions` in Ray's `autoscaler/_private/command_runner.py`.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

UNREACHABLE = 255
"""The exit status of ssh when it has not come to run the command."""

# As Ray's launcher has it: the keys of machines that were made a minute ago are known to nobody, and addresses are used again.
# The other end may be silent for 15 s, and for 10 s at the beginning.
_SETTINGS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "StrictHostKeyChecking": "no",
    "UserKnownHostsFile": os.devnull,
    "LogLevel": "ERROR",
    "ExitOnForwardFailure": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}

OPTIONS = tuple(f"-o{name}={value}" for name, value in _SETTINGS.items())


@dataclass(frozen=True)
class Login:
    """Who logs in, and where.

    Attributes:
        user: The user there.
        host: The machine's address.
        key: The file with the private key; None for what ssh takes by itself.
        proxy: The command that makes the connection; None for ssh's own.
    """

    user: str
    host: str
    key: str | None = None
    proxy: str | None = None

    def command(self, script: str, *options: str) -> list[str]:
        """Return the command that runs a script of the shell there.

        Example:
            >>> Login("me", "10.0.0.1").command("uptime", "-T")[-3:]
            ['-T', 'me@10.0.0.1', 'uptime']
        """
        key = ["-i", str(Path(self.key).expanduser())] if self.key else []
        proxy = [f"-oProxyCommand={self.proxy}"] if self.proxy else []
        return ["ssh", *key, *OPTIONS, *proxy, *options, f"{self.user}@{self.host}", script]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the shell there to its end."""
        return subprocess.run(self.command(script), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
