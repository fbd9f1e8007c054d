"""What is said of clusters that cannot be started, and of those that are not there. With real
machines: test_on_premises.py.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import cluster_file, kubernetes, launcher
from raypool.cluster.connect import make_token, token_path
from raypool.cluster.plan import draft
from raypool.errors import CloudError
from tests.cloud import fake_gce
from tests.cloud.ray_provider import Cluster


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the token, and what Ray's launcher notes down of a cluster, out of the home of whoever
    runs the tests.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write the file of a cluster on machines that nobody has."""
    path = tmp_path / "cluster.yaml"
    plan = draft("on-prem", hosts=("192.0.2.1", "192.0.2.2"))
    plan = replace(plan, packages=())  # test_packages.py is about these
    path.write_text(cluster_file.text_of(plan, "raypool", path.name))
    return path


def test_a_bad_file_is_refused_before_anything_is_made(file: Path, home: Path) -> None:
    file.write_text(file.read_text().replace("head_ip: 192.0.2.1", "head_ip: 192.0.2.2"))
    done = CliRunner().invoke(main, ["cluster", "up", str(file)])
    assert done.exit_code == 2
    assert "192.0.2.2 appears twice" in done.output
    assert not (home / ".ray").exists()


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        (None, "auth_token"),
        ("RAY_AUTH_TOKEN", "lab_token"),
        ("RAY_AUTH_TOKEN", "auth_token"),
        ("RAY_AUTH_TOKEN_PATH", "auth_token"),
    ],
)
def test_the_token_is_there_that_the_file_copies(
    file: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str | None,
    name: str,
) -> None:
    """Whatever the token is with which this machine's own Ray is reached."""
    from ray.autoscaler import sdk

    token = home / ".ray" / name
    if name != "auth_token":
        file.write_text(file.read_text().replace(": ~/.ray/auth_token", f": ~/.ray/{name}"))
        token.parent.mkdir()
        token.write_text("b" * 64)
    if variable:
        monkeypatch.setenv(variable, str(home / "elsewhere"))
    modes: list[int] = []
    monkeypatch.setattr(
        sdk, "create_or_update_cluster", lambda *_, **__: modes.append(token.stat().st_mode & 0o777)
    )
    launcher.up(file)
    assert modes == [0o600]
    assert len(token.read_text()) == 64
    assert not (home / "elsewhere").exists()
    assert (
        f"RAY_AUTH_TOKEN is ignored: the cluster's token is in {token}" in capsys.readouterr().err
    ) == (variable == "RAY_AUTH_TOKEN")


def lead(file: Path, proxy: str) -> Path:
    """Let ssh reach the head by a command."""
    content = yaml.safe_load(file.read_text())
    content["auth"]["ssh_proxy_command"] = proxy
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_head_that_cannot_be_reached(file: Path) -> None:
    lead(file, "false")
    for command in ("up", "status", "connect"):
        done = CliRunner().invoke(main, ["cluster", command, str(file)])
        assert done.exit_code == 1
        assert "the head, 192.0.2.1" in done.output


def test_an_end_that_reaches_nobody_has_failed(file: Path) -> None:
    done = CliRunner().invoke(main, ["cluster", "down", "--yes", str(lead(file, "false"))])
    assert done.exit_code == 1
    assert "could not be stopped on 192.0.2.1, 192.0.2.2, and may still run there" in done.output


# Ray leaves files open
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_cluster_in_a_cloud_is_there_when_its_head_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: object, providers: None
) -> None:
    gce = fake_gce.install(monkeypatch, home)
    file = home / "cluster.yaml"
    plan = draft("gcp", project=fake_gce.PROJECT, zone="us-central1-a", gpu="T4")
    file.write_text(cluster_file.text_of(replace(plan, packages=()), "raypool", file.name))
    assert not launcher.is_running(file)
    with pytest.raises(CloudError, match=f"`raypool cluster up {file}` starts it"):
        launcher.status(file)
    make_token()
    cluster = Cluster(yaml.safe_load(file.read_text()))
    cluster.up(file, shell)
    cluster.add_workers("worker", 2)
    assert len(gce.instances) == 3
    assert launcher.is_running(file)
    with monkeypatch.context() as patched:
        patched.setattr("ray.autoscaler.sdk.run_on_cluster", lambda *_, **__: b"Resources")
        said = launcher.status(file)
    # a head of 4 vCPUs and 16 GB; a T4, 4 vCPUs and 15 GB as a spot machine
    hourly = 4 * 0.031611 + 16 * 0.004237 + 2 * (0.175 + 4 * 0.006655 + 15 * 0.000892)
    assert said.startswith(f"Resources\n\nAbout ${hourly:.2f} an hour for 1 head (n2-standard-4), ")
    assert "2 worker (n1-standard-4 with 1 T4, spot): list prices of 2025-03-02 in us-c" in said


# A machine for as long as a connection: its own processes, and an SSH server that knows the key.
MACHINE = """
mount -t tmpfs tmpfs /run && mkdir /run/sshd && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && {begin}
exec {sshd} -i -f {home}/sshd_config
"""

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")


def with_sshd(test: Any) -> Any:
    """Mark a test that connects to a machine."""
    return pytest.mark.ci(has_sshd(test))


has_sshd = pytest.mark.skipif(
    os.geteuid() != 0 or not SSHD, reason="wants root and sshd: apt-get install openssh-server"
)


def machine(file: Path, home: Path, begin: str = "true") -> Path:
    """Let the head of a file be a machine that is there."""
    for name in ("id", "host"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True
        )
    (home / ".bash_profile").write_text(
        f"export PATH={Path(sys.executable).parent}:$PATH PYTHONWARNINGS=ignore\n"
    )
    config = [
        "HostKey {0}/host",
        "AuthorizedKeysFile {0}/id.pub",
        "StrictModes no",
        "UsePAM no",
        "SetEnv HOME={0}",
    ]
    (home / "sshd_config").write_text("\n".join(config).format(home) + "\n")
    (home / "machine").write_text(MACHINE.format(begin=begin, sshd=SSHD, home=home))
    content = yaml.safe_load(
        lead(
            file, f"unshare --mount --pid --fork --mount-proc --kill-child sh -e {home}/machine"
        ).read_text()
    )
    content["auth"] |= {"ssh_user": "root", "ssh_private_key": str(home / "id")}
    file.write_text(yaml.safe_dump(content))
    return file


@with_sshd
@pytest.mark.parametrize("command", ["status", "connect"])
def test_a_head_on_which_no_ray_runs(file: Path, home: Path, command: str) -> None:
    done = CliRunner().invoke(main, ["cluster", command, str(machine(file, home))])
    assert done.exit_code == 1
    assert (
        f"Ray is not running on the head, 192.0.2.1. `raypool cluster up {file}` starts it"
        in done.output
    )


@with_sshd
def test_whom_an_end_has_not_reached_is_said(file: Path, home: Path) -> None:
    """Nothing on this machine says that the cluster was ever started: the addresses are those in
    the file.
    """
    done = CliRunner().invoke(main, ["cluster", "down", "--yes", str(machine(file, home))])
    assert done.exit_code == 1
    assert "Ray could not be stopped on 192.0.2.2, and may still run there" in done.output


RUNS = (
    "cp $(command -v sleep) {0}/gcs_server && {{ {0}/gcs_server 60 >/dev/null 2>&1 </dev/null & }}"
)
"""A process that is called as Ray's on a head is."""


@with_sshd
def test_a_cluster_that_runs_is_not_started_anew_unasked(file: Path, home: Path) -> None:
    done = CliRunner().invoke(
        main, ["cluster", "up", str(machine(file, home, RUNS.format(home)))], input="n\n"
    )
    assert done.exit_code == 1
    assert "is already running. Restart its Ray, and end everything that runs there?" in done.output
    assert not (home / ".ray").exists()


@with_sshd
def test_a_tunnel_shows_the_token_that_the_file_copies(
    file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "elsewhere"))
    with launcher.tunnel(machine(file, home, RUNS.format(home))) as opened:
        profile = opened.profile
        assert profile.token_file == str(home / ".ray" / "auth_token")
        host, port = str(profile.jobs_address).removeprefix("http://").split(":")
        socket.create_connection((host, int(port)), 5).close()


def test_a_stranger_at_the_port_is_not_taken_for_the_tunnel(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He would be shown the token."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setattr(launcher, "_free_port", lambda _: stranger.getsockname()[1])
        monkeypatch.setattr(launcher, "TUNNEL_S", 0.1)
        with (
            pytest.raises(CloudError, match="did not answer by SSH within"),
            launcher.tunnel(lead(file, "sleep 60")),
        ):
            pass


def test_files_that_are_not_for_the_launcher(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text(cluster_file.render(kubernetes.write(draft("kubernetes", gpu="T4")), []))
    for function in (launcher.up, launcher.down, launcher.status):
        with pytest.raises(
            CloudError,
            match=r"is not a file for Ray's launcher.*`kubectl apply` starts a cluster on Kubernetes",
        ):
            function(path)


def test_the_token_is_its_owners_only() -> None:
    make_token()
    token = token_path().read_text()
    assert len(token) == 64
    assert token_path().stat().st_mode & 0o777 == 0o600
    assert token_path().parent.stat().st_mode & 0o777 == 0o700
    token_path().chmod(0o644)
    make_token()
    assert token_path().stat().st_mode & 0o777 == 0o600
    assert token_path().read_text() == token


@pytest.mark.skipif(shutil.which("ssh") is None, reason="wants ssh")
def test_a_tunnel_is_its_own_connection(tmp_path: Path) -> None:
    """A master that the user's configuration keeps would hold its ports after its end."""
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  ControlMaster auto\n  ControlPath {tmp_path}/%C\n  ControlPersist yes\n"
    )
    command = launcher.Login("me", "10.0.0.1").command("uptime", "-G", "-F", str(config))
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "controlmaster false" in shown
    assert not any(line.startswith("controlpath") for line in shown)
