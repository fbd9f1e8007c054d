"""Starts, looks after and ends clusters by Ray's own launcher, and makes the way to them: a tunnel by SSH.

Nothing of a cluster but SSH need be open to this machine. What the launcher says of its work goes to the standard error.

Source: `ray.autoscaler.sdk`; Ray's `autoscaler/_private/{commands,command_runner}.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from raypool.cloud.checks import check_file
from raypool.cloud.documents import read_documents
from raypool.cloud.nodes import CLIENT_PORT, DASHBOARD_PORT
from raypool.cloud.tokens import make_token, token_path
from raypool.errors import CloudError
from raypool.profiles import Profile

TUNNEL_S = 30.0
"""How long a tunnel may take to be there [s]."""

TOKEN_MODE = "export RAY_AUTH_MODE=token"

# As Ray's launcher has it: the keys of machines that were made a minute ago are known to nobody, and addresses are used again.
# The other end may be silent for 15 s.
SSH_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "no",
    "UserKnownHostsFile": os.devnull,
    "LogLevel": "ERROR",
    "ExitOnForwardFailure": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}


def up(path: str | Path) -> None:
    """Start a cluster, or change one that runs into what its file says; return when its head is there.

    The file is checked before, and there is a token then: `~/.ray/auth_token`, readable by its owner only.

    Raises:
        CloudError: Something is wrong with the file, or Ray's launcher has failed.
    """
    from ray.autoscaler import sdk

    check_file(path)
    _content(path)
    make_token()
    with _launching(path):
        sdk.create_or_update_cluster(str(path), no_config_cache=True)


def status(path: str | Path) -> str:
    """Return what a cluster says of its machines: which there are, which are coming, what is in use.

    Raises:
        CloudError: It is not there, or does not answer.
    """
    from ray.autoscaler import sdk

    _content(path)
    with _launching(path):
        said = sdk.run_on_cluster(str(path), cmd=f"{TOKEN_MODE}; ray status", with_output=True)
    return said.decode() if isinstance(said, bytes) else str(said)


def down(path: str | Path) -> None:
    """End a cluster, and give its machines back; those on premises stay, without Ray.

    Raises:
        CloudError: Ray's launcher has failed: machines may be left, which cost money.
    """
    from ray.autoscaler import sdk

    content = _content(path)
    if content["provider"]["type"] == "local":
        _stop_everywhere(path, content)
    with _launching(path):
        sdk.teardown_cluster(str(path))


def _stop_everywhere(path: str | Path, content: dict[str, Any]) -> None:
    """Stop Ray on all machines on premises, from their head: the launcher stops it on the head only.

    The head's comes first, for it would start the others again.
    """
    from ray.autoscaler import sdk

    auth = content["auth"]
    key = "-i ~/ray_bootstrap_key.pem " if auth.get("ssh_private_key") else ""
    stop = shlex.quote("bash --login -i -c 'ray stop'")
    hosts = [f"{auth['ssh_user']}@{host}" for host in content["provider"]["worker_ips"]]
    ssh = [f"ssh {key}{' '.join(_options())} {shlex.quote(host)} {stop} &" for host in hosts]
    with contextlib.suppress(CloudError), _launching(path):  # without its head, a worker ends by itself after a minute
        sdk.run_on_cluster(str(path), cmd=" ".join(["ray stop;", *ssh, "wait"]))


def _options() -> list[str]:
    return [f"-o{name}={value}" for name, value in SSH_OPTIONS.items()]


def _content(path: str | Path) -> dict[str, Any]:
    """Return what stands in a file for Ray's launcher.

    Raises:
        CloudError: It is of another kind.
    """
    documents = read_documents(path)
    content = documents[0].content if documents else None
    if not isinstance(content, dict) or not isinstance(content.get("provider"), dict):
        hint = " A cluster on Kubernetes is made by `kubectl apply`." if isinstance(content, dict) and "kind" in content else ""
        raise CloudError(f"{path} is no file for Ray's launcher: it says no provider.{hint}")
    return content


@contextlib.contextmanager
def _launching(path: str | Path) -> Iterator[None]:
    """Let Ray's launcher speak to the standard error, and say in one sentence what has become of it."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # whatever a provider's library raises
        text = error.message if isinstance(error, click.ClickException) else str(error)
        words = " ".join(text.split()) or type(error).__name__
        raise CloudError(f"{path}: Ray's launcher has failed: {words}. What it has done until then stands above.") from error


# --- the way there ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tunnel:
    """A way to a cluster that is open.

    Attributes:
        profile: How to reach the cluster by it, on this machine's loopback.
        ssh: Who keeps it open.
    """

    profile: Profile
    ssh: subprocess.Popen[str]

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            CloudError: It has broken.
        """
        raise CloudError(f"The tunnel has broken: {_last_words(self.ssh)}. `raypool cluster connect` opens another.")

    def as_toml(self, name: str) -> str:
        """Return what goes into raypool.toml."""
        profile = self.profile
        entries = {"address": profile.address, "jobs_address": profile.jobs_address, "token_file": profile.token_file}
        return "\n".join([f"[profiles.{json.dumps(name)}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())])


@contextlib.contextmanager
def tunnel(path: str | Path) -> Iterator[Profile]:
    """Open a tunnel to the head of a cluster, for as long as the context is.

    Returns:
        How to reach the cluster meanwhile: its Ray Client (`address`) and its jobs (`jobs_address`), on this machine's loopback.

    Raises:
        CloudError: There is no such cluster, or its head does not take us in.
    """
    with open_tunnel(path) as opened:
        yield opened.profile


@contextlib.contextmanager
def open_tunnel(path: str | Path) -> Iterator[Tunnel]:
    """Do as `tunnel`, for who wants to know when it breaks."""
    client, jobs = _free_port(CLIENT_PORT), _free_port(DASHBOARD_PORT)
    command = _ssh(path, {client: CLIENT_PORT, jobs: DASHBOARD_PORT})
    ssh = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    address, url = f"ray://127.0.0.1:{client}", f"http://127.0.0.1:{jobs}"
    try:
        _wait_open(ssh, path, (client, jobs))
        yield Tunnel(Profile(address=address, jobs_address=url, token_file=str(token_path())), ssh)
    finally:
        ssh.terminate()
        ssh.communicate()


def _last_words(ssh: subprocess.Popen[str]) -> str:
    """Wait for the end of ssh, and return what it has said."""
    assert ssh.stderr is not None
    return " ".join(ssh.stderr.read().split()) or f"ssh has ended with status {ssh.wait()}"


def _ssh(path: str | Path, ports: dict[int, int]) -> list[str]:
    """Return the command that leads ports of this machine to ports of the head."""
    from ray.autoscaler import sdk

    content = _content(path)
    with _launching(path):
        auth = sdk.bootstrap_config(content)["auth"]  # with the key that the launcher has made, if it has
        head = sdk.get_head_node_ip(str(path))
    key = ["-i", str(Path(auth["ssh_private_key"]).expanduser())] if auth.get("ssh_private_key") else []
    proxy = [f"-oProxyCommand={auth['ssh_proxy_command']}"] if auth.get("ssh_proxy_command") else []
    ways = [f"-L127.0.0.1:{here}:127.0.0.1:{there}" for here, there in ports.items()]
    return ["ssh", "-N", *key, *_options(), *proxy, *ways, f"{auth['ssh_user']}@{head}"]


def _wait_open(ssh: subprocess.Popen[str], path: str | Path, ports: tuple[int, ...]) -> None:
    deadline = time.monotonic() + TUNNEL_S
    while not all(map(_is_open, ports)):
        if ssh.poll() is not None:
            words = _last_words(ssh)
            raise CloudError(f"{path}: there is no way to the head: {words}. Look whether it runs: `raypool cluster status`.")
        if time.monotonic() > deadline:
            raise CloudError(f"{path}: there is no way to the head: it has not answered by SSH within {TUNNEL_S:g} s.")
        time.sleep(0.05)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def _free_port(wanted: int) -> int:
    """Return this port, if nobody has it, else another."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return int(listener.getsockname()[1])
    raise CloudError("No port is free on this machine.")
