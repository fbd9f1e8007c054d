"""Jobs on a real cluster, through nothing but its dashboard: what they are given, what they print,
and how they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from raypool import CloudError, Profile
from raypool.cli.main import main
from raypool.cluster import idle
from raypool.cluster.jobs import TIMEOUTS_S, Jobs

Poll = Callable[..., bool]


@pytest.fixture(scope="module")
def jobs(head: Any) -> Jobs:
    return Jobs(head.profile)


@pytest.fixture
def job_command(head: Any) -> Callable[..., Result]:
    """Give a way to call `raypool job ...` for the cluster."""

    def call(verb: str, *words: str) -> Result:
        which = ["--address", head.url, "--token-file", str(head.token_file)]
        return CliRunner().invoke(main, ["job", verb, *which, *words])

    return call


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def in_cluster(head: Any) -> list[psutil.Process]:
    """Return all processes of the cluster, and of its jobs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("RAY_AUTH_TOKEN_PATH") == str(head.token_file)
                and process.pid != os.getpid()
            ):
                found.append(process)
    return found


def command_lines(processes: list[psutil.Process]) -> list[str]:
    """Return those of the processes that have not ended meanwhile."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


# --- from the command line ------------------------------------------------------------------------

WORDS = ["--lr", "0.1", "a b", "it's", "--", "--follow", "$HOME", "*"]


def test_a_command_runs_as_it_was_given_and_its_exit_code_is_kept(
    job_command: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("ANSWER = 42")
    code = (
        "import os, sys, json, beside; print(json.dumps([sys.argv[1:], beside.ANSWER,"
        " os.environ['COLOUR']])); sys.exit(7)"
    )
    done = job_command(
        "submit",
        "--working-dir",
        str(tmp_path),
        "--env",
        "COLOUR=blue=green",
        "--name",
        "trial",
        "--",
        *python(code, *WORDS),
    )
    assert done.exit_code == 7, done.output
    # Ray's own words may be written after it, or over the end of its line
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("["))
    assert json.JSONDecoder().raw_decode(line)[0] == [WORDS, 42, "blue=green"]
    assert done.stderr.splitlines()[-1].endswith("failed, exit code 7")
    job_id = done.stderr.splitlines()[0]
    [info] = json.loads(job_command("status", "--json", job_id).stdout)
    assert (info["name"], info["state"], info["exit_code"]) == ("trial", "failed", 7)
    assert job_id in job_command("status").stdout
    assert json.dumps(WORDS) in job_command("logs", job_id).stdout
    again = job_command("logs", "--follow", job_id)
    assert (again.exit_code, again.stdout) == (7, done.stdout)
    assert job_command("stop", job_id).stdout == f"{job_id}: failed\n"


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["submit", "--gpus", "3", "--", "true"], 1, "GPU: requested 3, the largest node has 2"),
        (
            ["submit", "--cpus", "2", "--gpus", "2.5", "--", "true"],
            1,
            "CPU: requested 2, the largest node has 3; GPU: requested 2.5",
        ),
        (["submit", "--env", "COLOUR", "--", "true"], 2, "'COLOUR' is not NAME=VALUE"),
        (["submit", "--working-dir", "/nowhere", "--", "true"], 2, "/nowhere is not a folder"),
        (["submit"], 2, "COMMAND"),
        (["submit", "--profile", "mars", "--", "true"], 2, "There is no profile 'mars'"),
        (["status", "mars"], 1, "There is no job 'mars'"),
        (["logs", "mars/../.."], 1, "There is no job 'mars/../..'"),
        (["stop", "mars"], 1, "There is no job 'mars'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    job_command: Callable[..., Result], words: list[str], exit_code: int, said: str
) -> None:
    done = job_command(*words)
    assert (done.exit_code, said in done.output) == (exit_code, True), done.output


def test_the_log_comes_as_it_is_written_and_a_stop_lets_the_command_tidy_up(
    jobs: Jobs, job_command: Callable[..., Result], tmp_path: Path, head: Any
) -> None:
    tidied = tmp_path / "tidied"
    code = (
        "import pathlib, signal, sys, time\ndef tidy(*_):\n    pathlib.Path(sys.argv[1]).touch()\n "
        "   print('tidied')\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, tidy)\nprint('begun',"
        " flush=True)\ntime.sleep(600)"
    )
    job_id = jobs.submit(python(code, str(tidied)))
    log = jobs.follow(job_id)
    seen = ""
    while "begun\n" not in seen:
        seen += next(log)
    assert jobs.look(job_id).state == "running"
    assert not jobs.wait(job_id, timeout_s=0.1).has_ended
    token = head.token_file.read_text()
    assert not [line for line in command_lines(in_cluster(head)) if token in line]
    assert job_command("stop", job_id).stdout == f"{job_id}: cancelled\n"
    assert tidied.exists()
    assert "tidied" in "".join(log)
    assert jobs.look(job_id).exit_status == 1
    assert not [
        path
        for path in head.session.rglob("*")
        if path.is_file() and token in path.read_text(errors="replace")
    ]


def test_a_job_that_waits_is_really_stopped(
    jobs: Jobs, job_command: Callable[..., Result], eventually: Poll
) -> None:
    holder = jobs.submit(["sleep", "6000"], gpus=2)
    try:
        # until then it may be the other one that is first
        assert eventually(lambda: jobs.look(holder).state == "running", 300)
        waiter = jobs.submit(["sleep", "6000"], gpus=1, name="waiter")
        assert jobs.look(waiter).state == "queued"
        assert "It may be waiting for resources" in job_command("status", waiter).stdout
        known = {info.id for info in jobs.all()}
        assert job_command("stop", waiter).stdout == f"{waiter}: cancelled\n"
        assert jobs.look(waiter).state == "cancelled"
        assert {info.id for info in jobs.all()} == known  # the one that has done it is gone
    finally:
        assert jobs.stop(holder).state == "cancelled"
    after = jobs.submit(["true"], gpus=2)  # nothing of them holds a GPU any more
    assert jobs.wait(after, timeout_s=300).state == "finished"
    assert jobs.look(waiter).state == "cancelled"  # and it has not been begun since


@pytest.mark.long
def test_a_command_that_is_killed_ends_as_shells_say_it(jobs: Jobs) -> None:
    job_id = jobs.submit(["sh", "-c", "kill -9 $$"])
    info = jobs.wait(job_id, timeout_s=300)
    assert (info.state, info.exit_status) == ("failed", 137)


@pytest.mark.long
def test_ctrl_c_ends_the_looking_only(jobs: Jobs, head: Any, eventually: Poll) -> None:
    which = ["--address", head.url, "--token-file", str(head.token_file)]
    words = [
        "job",
        "submit",
        *which,
        "--",
        *python("import time; print('begun', flush=True); time.sleep(600)"),
    ]
    with subprocess.Popen(
        [str(Path(sys.executable).parent / "raypool"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line == "begun\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=500)
    job_id = said.splitlines()[0]
    try:
        assert process.returncode == 130
        assert f"raypool job logs --follow {job_id}" in said
        assert jobs.look(job_id).state == "running"
    finally:
        jobs.stop(job_id)


# --- connections ----------------------------------------------------------------------------------


def refusal(profile: Profile) -> str:
    with pytest.raises(CloudError) as caught:
        Jobs(profile)
    return str(caught.value)


def test_a_wrong_token_is_said_and_never_shown(
    head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0123456789" * 6)
    said = refusal(Profile(jobs_address=head.url, token_file=wrong))
    assert f"rejected the token in {wrong}" in said
    assert "0123456789" not in said
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789" * 6)
    said = refusal(Profile(jobs_address=head.url))
    assert "rejected the token in RAY_AUTH_TOKEN" in said
    assert "0123456789" not in said


def test_a_missing_token_is_said(
    head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    assert f"requires a token, but there is none in {tmp_path / 'none'}" in refusal(
        Profile(jobs_address=head.url)
    )
    assert "There is no token in /nowhere" in refusal(
        Profile(jobs_address=head.url, token_file="/nowhere")
    )


def test_a_token_is_found_where_ray_finds_it(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(head.token_file))
    assert Jobs(Profile(jobs_address=head.url)).dashboard.url == head.url


def test_no_setting_of_this_machine_leads_elsewhere_or_replaces_the_token(
    head: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password another")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3")
    dashboard = Jobs(head.profile).dashboard
    assert dashboard.get_address() == head.url
    assert isinstance(dashboard.list_jobs(), list)
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"


def test_who_does_not_answer_is_said_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No Ray dashboard answers at http://127.0.0.1:1" in refusal(
        Profile(jobs_address="http://127.0.0.1:1")
    )
    monkeypatch.setitem(TIMEOUTS_S, "GET", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in refusal(
            Profile(jobs_address=f"http://127.0.0.1:{silent.getsockname()[1]}")
        )


def test_whoever_is_no_dashboard_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        threading.Thread(target=answer, daemon=True).start()
        assert "is not a Ray dashboard" in refusal(
            Profile(jobs_address=f"http://127.0.0.1:{other.getsockname()[1]}")
        )


class Tunnel:
    """A way to a port that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()

    @staticmethod
    def _pass_on(near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError, ValueError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        raise OSError
                    other[ready].sendall(data)
        for end in (near, far):
            end.close()

    def cut(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def tunnel(head: Any) -> Iterator[Tunnel]:
    tunnel = Tunnel(int(head.url.rpartition(":")[2]))
    yield tunnel
    tunnel.close()


def test_a_tunnel_that_breaks_costs_no_line_and_repeats_none(
    tunnel: Tunnel, head: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    code = (
        "import pathlib, sys, time\n"
        "for i in range(500): print('line', i, flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
        "for i in range(500, 1000): print('line', i, flush=True)\n"
    )
    jobs = Jobs(Profile(jobs_address=f"http://127.0.0.1:{tunnel.port}", token_file=head.token_file))
    log = jobs.follow(jobs.submit(python(code, str(gate))))
    seen = ""
    while "line 499\n" not in seen:
        seen += next(log)
    tunnel.cut()
    gate.touch()
    seen += "".join(log)
    assert [line for line in seen.splitlines() if line.startswith("line")] == [
        f"line {i}" for i in range(1000)
    ]


def test_a_cluster_counts_as_used_until_its_job_has_ended(jobs: Jobs, tmp_path: Path) -> None:
    """For the watcher that deletes an unused cluster: it looks at the jobs that Ray knows."""

    def last_use() -> float:
        return idle.last_use(jobs.dashboard.list_jobs(), now=float("inf"))

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    running = jobs.submit(python(f"open({str(gate)!r}).read()"))
    assert last_use() == float("inf")
    gate.write_text("")
    jobs.wait(running)
    assert 0 < last_use() < float("inf")


def test_a_script_that_wants_tf_config_has_the_machines_in_it(jobs: Jobs) -> None:
    script = "import os; print(os.environ['TF_CONFIG'])"
    command = [sys.executable, "-m", "raypool.cluster.begin", "--chief", "chief", "--"]
    job = jobs.submit([*command, "-c", script])
    assert jobs.wait(job).exit_status == 0
    (line,) = (each for each in jobs.log(job).splitlines() if each.startswith("{"))
    found = json.loads(line)
    assert found["task"] == {"type": "chief", "index": 0}
    assert list(found["cluster"]) == ["chief"]
    assert len(found["cluster"]["chief"]) == 1
