"""Starts, inspects and ends clusters by Ray's own launcher, and opens SSH tunnels to them.

Only a cluster's SSH must be open to this machine. The launcher's output goes to standard error.

Source: `ray.autoscaler.sdk`; Ray's `autoscaler/_private/{commands,command_runner}.py`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from raypool.cluster import aws, gcp, packages
from raypool.cluster.checks import check_file
from raypool.cluster.connect import make_token
from raypool.cluster.documents import launcher_document, read_documents
from raypool.cluster.launcher_file import CLIENT_PORT, TOKEN
from raypool.cluster.machines import OF_PROVIDERS, catalogue
from raypool.errors import CloudError
from raypool.profiles import DASHBOARD_PORT, Profile

TUNNEL_S = 30.0  # for a tunnel to open
TOKEN_MODE = "export RAY_AUTH_MODE=token"
SEES_RAY = "cat /proc/[0-9]*/comm 2>/dev/null | grep -qx gcs_server"  # a head of Ray runs there
OPEN = "raypool: open"

# What an interactive shell says without a terminal; ~/.bashrc needs one that is interactive.
NOISE = ("bash: cannot set terminal process group", "bash: no job control in this shell")


class _NotThereError(CloudError):
    """There is no such cluster."""


def up(path: str | Path) -> None:
    """Start a cluster, or change a running one as its file says; return once its head is ready.

    The Ray of a running cluster is restarted, which ends what runs there. The file is checked
    first, and the token that it copies to the machines is made, readable by its owner only.

    Raises:
        CloudError: The file is wrong, or Ray's launcher has failed.
    """
    from ray.autoscaler import sdk

    content = _content(path)
    check_file(path)
    if warning := _prepare_packages(path, content):
        click.echo(f"warning: {warning}", err=True)
    if token := _token(content):
        make_token(token)
        if "RAY_AUTH_TOKEN" in os.environ:
            click.echo(
                f"RAY_AUTH_TOKEN is ignored: the cluster's token is in {token}.",
                err=True,
            )
    file = Path(path).resolve()
    # the files that it copies are named as seen from its folder
    try:
        with _launching(path), contextlib.chdir(file.parent):
            # Ray's cache names what an earlier run found in the cloud, and which may be gone
            sdk.create_or_update_cluster(str(file), no_config_cache=True)
    except CloudError as error:
        if content["provider"].get("type") == "gcp":
            raise CloudError(f"{error} {gcp.OS_LOGIN}") from error
        raise


def _prepare_packages(path: str | Path, content: dict[str, Any]) -> str | None:
    """Make the wheel, and make sure that all packages can be installed; return a warning."""
    mounts = content.get("file_mounts") or {}
    if (lock := mounts.get(packages.LOCK)) is None:
        return None
    wheel = None
    for here in mounts.values():
        if here.startswith(f"{packages.CACHE}/"):
            wheel = packages.make_wheel()
            if (wanted := Path(here).name) != wheel.name:
                raise CloudError(
                    f"{path} installs {wanted}, but this machine has {wheel.name}: both must be"
                    " the same. Rewrite the file with `raypool cluster init --force`."
                )
    commands = "\n".join(content.get("setup_commands") or ())
    python = re.search(r"uv venv\b.* --python (\S+)", commands)
    lock = Path(path).parent / lock
    return packages.check_installable(lock, wheel, python[1] if python else None)


def is_running(path: str | Path) -> bool:
    """Whether a cluster has a running head; on premises, whether any Ray runs on that machine.

    Raises:
        CloudError: The provider, or the machine on premises, does not answer.
    """
    from ray.autoscaler import sdk

    content = _content(path)
    if _is_on_premises(content):
        return _has_ray(path, _head(path, content))
    try:
        with _launching(path):
            sdk.get_head_node_ip(str(path))
    except _NotThereError:
        return False
    return True


def status(path: str | Path) -> str:
    """Return the `ray status` of a cluster, and its cost.

    Raises:
        CloudError: The cluster does not run, or does not answer.
    """
    from ray.autoscaler import sdk

    content = _content(path)
    if _is_on_premises(content):
        head = _head(path, content)
        if not _has_ray(path, head):
            raise _no_ray(path, head)
        done = head.run(_in_shell(f"{TOKEN_MODE} PYTHONWARNINGS=ignore; ray status"))
        if done.returncode:
            words = " ".join(_said(done).split())
            raise CloudError(f"{path}: the Ray on {head.host} does not answer: {words}.")
        return done.stdout
    with _launching(path):
        said = sdk.run_on_cluster(str(path), cmd=f"{TOKEN_MODE}; ray status", with_output=True)
    text = said.decode() if isinstance(said, bytes) else str(said)
    try:
        cost = _cost(path, content)
    except CloudError as error:
        cost = f"The cost is unknown: {error}"
    return f"{text.strip()}\n\n{cost}"


def _cost(path: str | Path, content: dict[str, Any]) -> str:
    """Return a sentence on the cost of the running machines, as far as the catalogue knows."""
    from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

    from raypool.ray_private import _get_node_provider, prepare_config

    cloud = content["provider"].get("type")
    rented = {"gcp": gcp.rented, "aws": aws.rented}.get(cloud)
    if rented is None:
        return f"raypool has no prices for {cloud}."
    known = catalogue(OF_PROVIDERS[cloud])
    with _launching(path):
        config = prepare_config(content)
        provider = _get_node_provider(config["provider"], config["cluster_name"])
        counts = collections.Counter(
            provider.node_tags(node).get(TAG_RAY_USER_NODE_TYPE, "")
            for node in provider.non_terminated_nodes({})
        )
    total = 0.0
    parts: list[str] = []
    unknown: list[str] = []
    for name, count in counts.items():
        if name not in config["available_node_types"]:  # of an earlier file
            unknown.append(f"{count} {name}")
            continue
        machine, gpu, gpus, is_spot = rented(config["available_node_types"][name]["node_config"])
        has = f" with {gpus} {gpu}" if gpu else ""
        what = f"{count} {name} ({machine}{has}{', spot' if is_spot else ''})"
        price = known.price(machine, gpu, gpus, is_spot)
        total += count * (price or 0)
        (unknown if price is None else parts).append(what)
    prices = known.prices
    about = (
        f"About ${total:.2f} an hour for {', '.join(parts)}: list prices of {prices['date']} in"
        f" {prices['region']}, without disks and traffic."
    )
    rest = f"No price is known for {', '.join(unknown)}."
    return "\n".join([about] * bool(parts) + [rest] * bool(unknown))


def down(path: str | Path) -> None:
    """Shut down a cluster and release its machines; those on premises stay, without Ray.

    Raises:
        CloudError: Ray's launcher has failed, and machines may be left, which cost money. On
            premises: Ray could not be stopped on some machines.
    """
    from ray.autoscaler import sdk

    content = _content(path)
    if _is_on_premises(content):
        _stop_everywhere(path, content)
        return
    with _launching(path):
        sdk.teardown_cluster(str(path))


# --- on premises ----------------------------------------------------------------------------------
#
# Ray's launcher knows the head of such a cluster only by a file in /tmp of the machine that has
# started it: after a restart, or from another machine, it finds nothing to end, and reports
# success. So these clusters are reached by the addresses in their files.


def _is_on_premises(content: dict[str, Any]) -> bool:
    return bool(content["provider"].get("type") == "local")


def _has_ray(path: str | Path, head: Login) -> bool:
    done = head.run(SEES_RAY)
    if done.returncode == UNREACHABLE:
        words = " ".join(done.stderr.split())
        raise CloudError(
            f"{path}: SSH cannot reach the head, {head.host}: {words}. Try `ssh"
            f" {head.user}@{head.host}`."
        )
    return done.returncode == 0


def _no_ray(path: str | Path, head: Login) -> CloudError:
    return CloudError(
        f"{path}: Ray is not running on the head, {head.host}. `raypool cluster up {path}` starts"
        " it."
    )


def _in_shell(script: str) -> str:
    """Return the command that runs a script as in a login."""
    return f"bash --login -i -c {shlex.quote(script)}"


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith(NOISE))


def _stop_everywhere(path: str | Path, content: dict[str, Any]) -> None:
    """Stop Ray on all machines, by commands on their head: only that may be reachable from here."""
    # Its own Ray ends first: it would start the others again.
    head = _head(path, content)
    first, *others = hosts = [content["provider"]["head_ip"], *content["provider"]["worker_ips"]]
    stop = _in_shell("ray stop")
    key = "-i ~/ray_bootstrap_key.pem " if head.key else ""  # where Ray's launcher has put it
    # standard output is for the hosts that are done, standard error for Ray's messages
    steps = [f"{stop} >&2 && echo {shlex.quote(first)}"]
    for host in others:
        ssh = f"ssh {key}{' '.join(OPTIONS)} {shlex.quote(f'{head.user}@{host}')}"
        steps.append(f"({ssh} {shlex.quote(stop)} >&2 && echo {shlex.quote(host)}) &")
    done = head.run("\n".join([*steps, "wait"]))
    click.echo(_said(done), err=True)
    if left := [host for host in hosts if host not in done.stdout.split()]:
        raise CloudError(
            f"{path}: Ray could not be stopped on {', '.join(left)}, and may still run there; the"
            " messages are above. Check that SSH works (to workers, from the head), and run"
            f" `raypool cluster down {path}` again."
        )


# --- input and output of Ray's launcher -----------------------------------------------------------


def _content(path: str | Path) -> dict[str, Any]:
    """Return the content of a file for Ray's launcher, or raise a CloudError."""
    return dict(launcher_document(read_documents(path), path).content)


def _token(content: dict[str, Any]) -> Path | None:
    """Return the local file that is copied to the machines as Ray's token; None without."""
    here = (content.get("file_mounts") or {}).get(TOKEN)
    return Path(here).expanduser() if isinstance(here, str) else None


def _head(path: str | Path, content: dict[str, Any]) -> Login:
    """Return how to log in on the head of a cluster, or raise a CloudError."""
    from ray.autoscaler import sdk

    if _is_on_premises(content):
        try:
            auth, provider = content["auth"], content["provider"]
            host = provider.get("external_head_ip") or provider["head_ip"]
            user, _ = auth["ssh_user"], provider["worker_ips"]
        except (KeyError, TypeError):
            raise CloudError(
                f"{path} does not list its machines. `raypool cluster validate {path}` shows its"
                " mistakes."
            ) from None
    else:
        with _launching(path):
            # with the key that the launcher has made, if it has
            auth = sdk.bootstrap_config(content)["auth"]
            host, user = sdk.get_head_node_ip(str(path)), auth["ssh_user"]
    return Login(user, host, key=auth.get("ssh_private_key"), proxy=auth.get("ssh_proxy_command"))


@contextlib.contextmanager
def _launching(path: str | Path) -> Iterator[None]:
    """Let Ray's launcher print to standard error, and raise its failure as one sentence."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # whatever a provider's library raises
        text = error.message if isinstance(error, click.ClickException) else str(error)
        words = " ".join(text.split()) or type(error).__name__
        if words.startswith("Head node of cluster"):
            raise _NotThereError(
                f"{path}: the cluster has no running head. `raypool cluster up {path}` starts it."
            ) from error
        raise CloudError(
            f"{path}: Ray's launcher failed: {words.rstrip('.')}. Its output is above."
        ) from error


# --- tunnels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tunnel:
    """An open tunnel to a cluster."""

    # How to reach the cluster through it, on this machine's loopback: its Ray Client (`address`)
    # and its jobs (`jobs_address`).
    profile: Profile
    ssh: subprocess.Popen[str]  # the process that keeps it open

    def wait(self) -> None:
        """Wait until it breaks, then raise a CloudError."""
        raise CloudError(
            f"The tunnel broke: {_last_words(self.ssh)}. `raypool cluster connect` opens another."
        )

    def as_toml(self, name: str) -> str:
        """Return the lines for raypool.toml."""
        keys = ("address", "jobs_address", "token_file")
        entries = [(key, getattr(self.profile, key)) for key in keys]
        lines = [f"{key} = {json.dumps(value)}" for key, value in entries if value]
        return "\n".join([f"[profiles.{json.dumps(name)}]", *lines])


@contextlib.contextmanager
def tunnel(path: str | Path) -> Iterator[Tunnel]:
    """Open a tunnel to the head of a cluster, until the context ends.

    Raises:
        CloudError: There is no such cluster, or no login on its head.
    """
    content = _content(path)
    head, token = _head(path, content), _token(content)
    client, jobs = _free_port(CLIENT_PORT), _free_port(DASHBOARD_PORT)
    ways = [
        f"-L127.0.0.1:{here}:127.0.0.1:{there}"
        for here, there in ((client, CLIENT_PORT), (jobs, DASHBOARD_PORT))
    ]
    # The script runs once both ports are ssh's, and ends with the connection: nothing is left,
    # however this process ends.
    command = head.command(f"{SEES_RAY} && echo {shlex.quote(OPEN)} && exec cat", "-T", *ways)
    pipe = subprocess.PIPE
    # in its own group, which `_end` ends as a whole
    ssh = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    profile = Profile(
        address=f"ray://127.0.0.1:{client}",
        jobs_address=f"http://127.0.0.1:{jobs}",
        token_file=str(token) if token else None,
    )
    try:
        _wait_open(ssh, path, head)
        yield Tunnel(profile, ssh)
    finally:
        _end(ssh)
        ssh.communicate()  # waits for its end, and closes its pipes


def _end(ssh: subprocess.Popen[str]) -> None:
    if ssh.returncode is None:  # else its id may be another process's by now
        with contextlib.suppress(ProcessLookupError):
            # its group: with a proxy command, another process makes the connection
            os.killpg(ssh.pid, signal.SIGTERM)


def _last_words(ssh: subprocess.Popen[str]) -> str:
    """Wait for the end of ssh, and return its messages."""
    assert ssh.stderr is not None
    return " ".join(ssh.stderr.read().split()) or f"ssh ended with status {ssh.wait()}"


def _wait_open(ssh: subprocess.Popen[str], path: str | Path, head: Login) -> None:
    """Wait until ssh says that the tunnel is open: another program may have opened the port."""
    assert ssh.stdout is not None
    # reading has no time limit: the end of ssh ends it
    timer = threading.Timer(TUNNEL_S, _end, (ssh,))
    timer.start()
    try:
        if any(line.rstrip() == OPEN for line in ssh.stdout):
            return
        code = ssh.wait()  # short: its output has ended
    finally:
        timer.cancel()
    if code == 1:  # of grep in SEES_RAY
        raise _no_ray(path, head)
    words = f"it did not answer by SSH within {TUNNEL_S:g} s" if code < 0 else _last_words(ssh)
    raise CloudError(
        f"{path}: the head, {head.host}, cannot be reached: {words}. `raypool cluster status`"
        " shows whether it runs."
    )


def _free_port(wanted: int) -> int:
    """Return a free port, this one if possible."""
    # if another program takes it before ssh does, ssh ends (ExitOnForwardFailure)
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return int(listener.getsockname()[1])
    raise CloudError("No port is free on this machine.")


# --- logins by SSH, as by Ray's launcher (`SSHOptions` in its `command_runner.py`) ----------------

UNREACHABLE = 255  # the exit status of ssh if it could not run the command

# Nobody knows the keys of machines that were made a minute ago, and addresses are used again. The
# other end may be silent for 15 s, and for 10 s at the beginning.
OPTIONS = (
    "-oBatchMode=yes",
    # a master that the user's configuration keeps would hold a tunnel's ports after its end
    "-oControlMaster=no",
    "-oControlPath=none",
    "-oConnectTimeout=10",
    "-oStrictHostKeyChecking=no",
    f"-oUserKnownHostsFile={os.devnull}",
    "-oLogLevel=ERROR",
    "-oExitOnForwardFailure=yes",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)


@dataclass(frozen=True)
class Login:
    """A login by SSH: the user and the machine's address; the file with the private key, and the
    command that makes the connection, None for ssh's own choice.
    """

    user: str
    host: str
    key: str | None = None
    proxy: str | None = None

    def command(self, script: str, *options: str) -> list[str]:
        """Return the command that runs a shell script there.

        Example:
            >>> Login("me", "10.0.0.1").command("uptime", "-T")[-3:]
            ['-T', 'me@10.0.0.1', 'uptime']
        """
        key = ["-i", str(Path(self.key).expanduser())] if self.key else []
        proxy = [f"-oProxyCommand={self.proxy}"] if self.proxy else []
        return ["ssh", *key, *OPTIONS, *proxy, *options, f"{self.user}@{self.host}", script]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script there to its end."""
        return subprocess.run(
            self.command(script),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
