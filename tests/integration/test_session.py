"""The Ray that raypool starts: safe, quiet, and gone afterwards; and the one that it finds, which
stays (scenarios 2 and 4).

Each session here has a process of its own, with Ray's settings as a user has them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raypool import ParallelPool, WorkerResources, parpool
from raypool.gpus.devices import usable_cores

Run = Callable[..., subprocess.CompletedProcess[str]]

PREAMBLE = """
import json, os, sys, time
from pathlib import Path
import psutil

def listeners():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYPOOL_TEST_PROCESS") == os.environ["RAYPOOL_TEST_PROCESS"]:
                connections = process.net_connections("inet")
                found += [(process.name(), c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"]
        except psutil.Error:
            continue
    return found

def ports_of_children():
    "Those of Ray's agents have no environment to be known by: they have written their names over it."
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found.update((child.name(), c.laddr) for c in child.net_connections("inet") if c.status == "LISTEN")
        except psutil.Error:  # it has just ended
            continue
    return found

def tells_metrics(port):
    import socket
    try:
        with socket.create_connection(("127.0.0.1", port), 300) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
            return connection.recv(12).endswith(b" 200")
    except OSError:  # also of a worker that has just ended
        return False

def of_children(ask):
    "What a function says of each child that has not ended."
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != "zombie":
                found.append(ask(child))
        except psutil.Error:  # it has just ended
            continue
    return found

def watch_of(files):
    "What is open as standard input, output and error in the process that waits for the end of this one."
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if command[-1:] and command[-1].startswith("/") and str(files).startswith(command[-1]) and "flock" in command[-2]:
                return [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        except (psutil.Error, OSError):
            continue

STRANGER = '''
import sys
from ray._raylet import GcsClient
print("it was let in:", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 300))
'''

def ask_as_stranger(**env):
    import subprocess, ray
    command = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    return "let in" if "it was let in" in done.stdout else "refused" if "token" in done.stderr else done.stderr
"""


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def session(
    run_python: Run, code: str, **env: Any
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run a script that tells what it has seen in its last line."""
    done = run_python(PREAMBLE + textwrap.dedent(code), **env)
    return json.loads(done.stdout.splitlines()[-1]), done


# --- a session from its beginning to its end ------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the home of a user who has never used Ray."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(run_python: Run, home: Path) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run a user's first session."""
    code = """
    import numpy as np
    from raypool import StartupError, WorkerResources, parpool

    def talk(i):
        print("from a worker", i)
        print("on its stderr", i, file=sys.stderr)
        return os.nice(0)

    facts = {}
    with parpool() as pool:
        import ray
        facts["workers"] = [(worker.index, worker.gpu) for worker in pool.workers]
        facts["niceness"] = sorted(set(pool.parfor(talk, range(8))))
        facts["listeners"] = listeners()
        deadline = time.monotonic() + 300  # Ray's agents come up later
        while "ray::RuntimeEnvAgent" not in (ports := ports_of_children()):
            assert time.monotonic() < deadline
        facts["listeners"] += [(name, ip, port) for name, (ip, port) in ports.items()]
        facts["metrics"] = [name for name, (_, port) in ports.items() if tells_metrics(port)]
        files = Path(ray._private.worker._global_node.get_session_dir_path())
        facts["files"] = [str(files), files.parents[1].stat().st_mode & 0o777]
        facts["watch"] = watch_of(files)
        facts["commands"] = of_children(lambda child: " ".join(child.cmdline()))
        try:
            import ray.util.state
            ray.util.state.list_actors(address=ray.get_runtime_context().gcs_address)  # others may have a Ray here
        except Exception as error:
            facts["asked the dashboard"] = type(error).__name__
        facts["auth"] = [os.environ["RAY_AUTH_MODE"], pool.parfeval(os.environ.get, "RAY_AUTH_MODE").result()]
        facts["owner"] = ask_as_stranger()
        facts["stranger"] = ask_as_stranger(RAY_AUTH_MODE="disabled")
        facts["stranger with a token"] = ask_as_stranger(RAY_AUTH_TOKEN="0" * 64)
        fetched = pool.parfor(lambda i: np.full(500_000, i), range(3))
        held = pool.parfeval(np.arange, 500_000)
        failing = pool.parfeval(lambda: 1 / 0)
        pool.options(worker=0).parfeval(os._exit, 1).exception()
    facts["is Ray left"] = ray.is_initialized()
    facts["are its files left"] = [files.exists()]
    facts["values"] = [int(array.sum()) for array in fetched] + [int(held.result()[-1]), str(failing.exception())]
    deadline = time.monotonic() + 300  # Ray does not wait for all that it kills
    while len(children := of_children(psutil.Process.cmdline)) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    facts["children"] = [Path(word).name for words in children for word in words[1:2]]
    half = {"quiet": True, "resources": WorkerResources(cpus=0.5)}
    with parpool(1, **half) as pool:
        facts["again"] = list(pool.parfor(abs, [-1]))
        try:
            parpool(1, setup=lambda: 1 / 0, **half)
        except StartupError as error:
            facts["setup"] = str(error)
        later = Path(ray._private.worker._global_node.get_session_dir_path())
    facts["are its files left"] += [files.exists(), later.exists()]
    facts["values"] += [int(array.sum()) for array in fetched]
    print(json.dumps(facts))
    """
    return session(run_python, code, HOME=str(home))


@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="somebody has chosen GPUs")
def test_one_worker_for_each_core_or_gpu(first: Any) -> None:
    """Scenarios 2 and 4."""
    facts, _ = first
    if facts["workers"][0][1] is None:
        assert facts["workers"] == [[index, None] for index in range(usable_cores())]
    else:
        assert len({gpu for _, gpu in facts["workers"]}) == len(facts["workers"])


def test_one_line_is_printed_and_no_more(first: Any) -> None:
    """Not what the workers print, not Ray's own words, and nothing about a worker that dies and is
    replaced.
    """
    facts, done = first
    line, *rest = done.stdout.splitlines()
    count = len(facts["workers"])
    assert line.startswith(f"raypool: {count} worker")
    assert ", ready in " in line
    assert len(rest) == 1, done.stdout
    assert done.stderr == ""


def test_workers_are_not_niced(first: Any) -> None:
    assert first[0]["niceness"] == [os.nice(0)]


def test_all_ports_are_on_the_loopback(first: Any) -> None:
    listeners = first[0]["listeners"]
    assert len(listeners) >= 4, "the test has not seen Ray's ports"
    assert {name for name, _, _ in listeners} >= {"gcs_server", "raylet"}
    assert [entry for entry in listeners if not is_loopback(entry[1])] == []


def test_no_process_runs_that_has_nothing_to_do(first: Any) -> None:
    """No dashboard, nothing that scales, nobody who reads logs; and who asks the dashboard is told
    so, not kept waiting.
    """
    facts, _ = first
    said = "\n".join(facts["commands"])
    assert "gcs_server" in said, "the test has not seen Ray's processes"
    idle = ("dashboard.py", "monitor.py", "log_monitor.py", "ray::DashboardAgent")
    assert [name for name in idle if name in said] == []
    assert facts["asked the dashboard"] == "ServerUnavailable"


def test_who_has_no_token_is_refused(first: Any) -> None:
    facts, _ = first
    assert facts["auth"] == ["token", "token"]
    assert facts["owner"] == "let in", "the test can't tell who is refused"
    assert facts["stranger"] == "refused"
    assert facts["stranger with a token"] == "refused"


def test_the_token_is_for_its_owner_only(first: Any, home: Path) -> None:
    token = home / ".ray" / "auth_token"
    assert mode(token) == 0o600
    assert mode(token.parent) == 0o700
    assert len(token.read_text()) >= 32


def test_nobody_is_told_its_metrics(first: Any) -> None:
    assert first[0]["metrics"] == []


def test_what_watches_over_it_holds_nobodys_output(first: Any) -> None:
    """It outlives the driver, but a reader of the driver's output does not wait for it."""
    assert first[0]["watch"] == ["/dev/null"] * 3


def test_its_files_are_this_users_and_go_with_it(first: Any) -> None:
    facts, _ = first
    assert facts["files"][1] == 0o700, facts["files"]
    assert "division by zero" in facts["setup"]
    assert facts["are its files left"] == [False] * 3, "also after another Ray, and a failed setup"


def test_values_outlive_the_ray_that_made_them(first: Any) -> None:
    """Those that were fetched, those that only a future holds, and errors; also while the next Ray
    runs.
    """
    sums = [0, 500_000, 1_000_000]
    assert first[0]["values"] == [*sums, 499_999, "division by zero", *sums]


def test_ray_is_gone_with_the_last_pool_and_comes_again(first: Any) -> None:
    facts, _ = first
    assert facts["is Ray left"] is False
    assert facts["children"] == ["fork_server.py"], "the next Ray's workers are forked from it"
    assert facts["again"] == [1]


# --- other beginnings -----------------------------------------------------------------------------


@pytest.mark.ci
def test_a_command_called_raypool_outlives_its_pool(run_python: Run) -> None:
    """What ends the rest of a Ray spares its driver, which still has a log of it open; whatever it
    is called, and however long it goes on.
    """
    code = """
    import ctypes, json, os, psutil
    from raypool import parpool

    ctypes.CDLL(None).prctl(15, b"raypool")  # PR_SET_NAME: as the command is called
    with parpool(1, quiet=True):
        [folder] = {path for path in (os.readlink(f"/proc/self/fd/{fd.name}")
                    for fd in os.scandir("/proc/self/fd") if os.path.exists(fd.path))
                    if path.endswith("/.lock") and os.path.exists(path[:-5] + "session_latest")}
    watch = [process for process in psutil.process_iter(["cmdline"])
             if (process.info["cmdline"] or [""])[-1] == os.path.dirname(folder)]
    psutil.wait_procs(watch)
    print(json.dumps(len(watch)))
    """
    watches, _ = session(run_python, code)
    assert watches == 1


@pytest.mark.long
def test_ray_imported_first_and_a_token_that_others_can_read(
    run_python: Run, tmp_path: Path
) -> None:
    """What Ray has read from the environment when it was imported is put right; so is the file's
    mode.
    """
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text("a" * 64)
    token.chmod(0o644)
    code = """
    import ray
    from raypool import parpool
    with parpool(1) as pool:
        facts = {
            "listeners": listeners(), "owner": ask_as_stranger(), "stranger": ask_as_stranger(RAY_AUTH_MODE="disabled"),
            "niceness": pool.parfeval(os.nice, 0).result(),
        }
    print(json.dumps(facts))
    """

    facts, done = session(run_python, code, HOME=str(tmp_path))

    assert mode(token) == 0o600
    assert token.read_text() == "a" * 64
    assert len(facts["listeners"]) >= 4
    assert all(is_loopback(ip) for _, ip, _ in facts["listeners"])
    assert (facts["owner"], facts["stranger"]) == ("let in", "refused")
    assert facts["niceness"] == os.nice(0)
    assert done.stderr == ""


def test_a_ray_that_runs_in_this_process_is_used_and_left(shared_pool: ParallelPool) -> None:
    before = ray.get_runtime_context().get_node_id()
    with parpool(1, resources=WorkerResources(gpus=0), quiet=True) as pool:
        inside = pool.parfeval(
            lambda: __import__("ray").get_runtime_context().get_node_id()
        ).result(300)
    assert inside == before
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_node_id() == before


@pytest.mark.long
def test_a_ray_of_the_users_own_with_chosen_gpus(run_python: Run) -> None:
    """Ray's own numbers of GPUs count: with CUDA_VISIBLE_DEVICES=4,6 there are a GPU 4 and a GPU
    6.
    """
    code = """
    import ray
    ray.init(
        address="local", num_cpus=2, num_gpus=2, object_store_memory=100_000_000, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR",
    )
    from raypool import parpool, ResourceError
    look = lambda: os.environ["CUDA_VISIBLE_DEVICES"]
    facts = {}
    with parpool(quiet=True) as pool:
        facts["all"] = [[worker.gpu for worker in pool.workers], pool.parfeval_on_all(look).result()]
    with parpool(gpus=[6], quiet=True) as pool:
        facts["chosen"] = [[worker.gpu for worker in pool.workers], pool.parfeval_on_all(look).result()]
    try:
        parpool(gpus=[0], quiet=True)
    except ResourceError as error:
        facts["error"] = str(error)
    facts["is Ray left"] = ray.is_initialized()
    ray.shutdown()
    print(json.dumps(facts))
    """

    facts, _ = session(run_python, code, CUDA_VISIBLE_DEVICES="4,6")

    assert facts["all"] == [[4, 6], ["4", "6"]]
    assert facts["chosen"] == [[6], ["6"]]
    assert "There is no GPU 0 on this machine" in facts["error"]
    assert "4, 6" in facts["error"]
    assert facts["is Ray left"] is True


def test_a_cluster_at_an_address_is_used_and_left(
    ray_session: None, run_python: Run, eventually: Any
) -> None:
    """Another process joins the Ray of this one, takes two of its GPUs, and leaves."""
    address = ray.get_runtime_context().gcs_address
    code = f"""
    from raypool import parpool
    with parpool(2, address="{address}") as pool:
        facts = {{"gpus": pool.parfeval_on_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).result()}}
    import ray
    facts["is Ray left"] = ray.is_initialized()
    print(json.dumps(facts))
    """

    facts, done = session(run_python, code, RAY_AUTH_MODE="token")

    assert len(set(facts["gpus"])) == 2
    assert facts["is Ray left"] is False
    assert done.stdout.count("\n") == 2
    assert eventually(lambda: ray.available_resources().get("GPU") == 3)


def test_fetched_arrays_stay_as_they_are(run_python: Run) -> None:
    """Also where their memory was that of another Ray's store, or of an object in a full one; and
    where the cluster's store goes on, and uses that memory for others, after raypool or the user
    has connected to it.
    """
    code = """
    import numpy as np
    import ray
    from raypool import parpool, wait
    from raypool.backends.ray.session import ENVIRONMENT, make_token, without_helpers

    def fetch(pool, number):
        return pool.parfeval(np.full, 2_000_000, number).result()

    def content(array):
        return sorted(set(array.tolist()))

    fetched = []
    for number in range(1, 3):
        with parpool(1, quiet=True) as pool:
            fetched += content(fetch(pool, number))
    os.environ.update(ENVIRONMENT)
    make_token()
    with without_helpers():
        from ray.cluster_utils import Cluster
        cluster = Cluster(True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
    with parpool(1, address=cluster.address, quiet=True) as pool:
        held = [fetch(pool, number) for number in range(3, 9)]
        for number in range(9, 19):
            fetched += content(fetch(pool, number))
    with parpool(1, address=cluster.address, quiet=True) as pool:
        for number in range(19, 29):
            fetched += content(fetch(pool, number))
    ray.init(address=cluster.address, log_to_driver=False)
    with parpool(1, quiet=True) as pool:
        held.append(fetch(pool, 29))
    with parpool(1, quiet=True) as pool:
        held.append(fetch(pool, 30))
        address = held[-1].__array_interface__["data"][0]
        spans = [line.split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "plasma" in line]
        is_mapped = any(int(start, 16) <= address < int(stop.split()[0], 16) for start, stop, *_ in spans)
        unread = pool.parfeval(np.full, 2_000_000, 31)
        wait([unread])
    ray.shutdown()
    with parpool(1, address=cluster.address, quiet=True) as pool:
        for number in range(32, 42):
            fetched += content(fetch(pool, number))
    held.append(unread.result())
    cluster.shutdown()
    print(json.dumps({"fetched": fetched, "held": [content(array) for array in held], "is_mapped": is_mapped}))
    """

    facts, _ = session(run_python, code, PYTHONWARNINGS="ignore")

    assert facts["held"] == [[number] for number in [*range(3, 9), *range(29, 32)]]
    assert facts["fetched"] == [1, 2, *range(9, 29), *range(32, 42)]
    assert facts["is_mapped"]


def test_no_ray_at_the_address(run_python: Run) -> None:
    code = """
    from raypool import parpool, StartupError
    try:
        parpool(1, address="127.0.0.1:1")
    except StartupError as error:
        print(json.dumps({"error": str(error)}))
    """
    facts, _ = session(run_python, code)
    assert "127.0.0.1:1" in facts["error"]


def test_ray_does_not_come_up(run_python: Run) -> None:
    code = """
    from raypool import parpool, StartupError
    import ray
    def init(**options):
        raise Exception("The current node timed out during startup.")  # Ray's own words, and type
    ray.init = init
    try:
        parpool(1)
    except StartupError as error:
        print(json.dumps({"error": str(error)}))
    """
    facts, _ = session(run_python, code, PYTHONOPTIMIZE="2")
    assert (
        "could not be started or reached at this machine: The current node timed out"
        in facts["error"]
    )
    assert "PYTHONOPTIMIZE=2: use python -OO." in facts["error"]


def test_ray_starts_once_what_was_in_its_way_is_gone(run_python: Run) -> None:
    code = """
    import tempfile
    from raypool import parpool, StartupError
    errors = []
    def fail():
        try:
            parpool(1)
        except StartupError as error:
            errors.append(str(error))
    files = os.environ["RAY_TMPDIR"]
    os.chdir(tempfile.mkdtemp())
    Path.cwd().rmdir()
    fail()
    os.chdir("/")
    os.environ["RAY_TMPDIR"] = files + "/long" * 20
    fail()
    os.environ["RAY_TMPDIR"] = files
    with parpool(1) as pool:
        print(json.dumps([*errors, pool.parfeval(abs, -1).result()]))
    """
    (deleted, long, value), _ = session(run_python, code)
    assert "The current folder has been deleted" in deleted
    assert "Set RAY_TMPDIR" in long
    assert value == 1


def test_ctrl_c_while_ray_starts_leaves_nothing(run_python: Run) -> None:
    """Whether it comes as Ray starts its processes, or when they are all there."""
    code = """
    from raypool import parpool
    from raypool.backends.ray.session import folder_of_ray
    import ray
    from ray._private.node import Node

    def stop(*args, **options):
        raise KeyboardInterrupt

    def init_and_stop(*args, **options):
        init(*args, **options)
        stop()

    def open_and_look():
        try:
            parpool(1, quiet=True)
        except KeyboardInterrupt:
            opened = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
            held = [name for name in opened if name.startswith(str(folder_of_ray())) and "/.lock" in name]
            return [ray.is_initialized(), len(held), len(folders() - before)]

    def is_running(process):
        return process.name() in ("gcs_server", "raylet")

    def folders():
        return {*folder_of_ray().glob("*")}

    before, facts, init, start = folders(), {}, ray.init, Node.start_ray_processes
    Node.start_ray_processes = stop
    facts["early"] = open_and_look()
    Node.start_ray_processes, ray.init = start, init_and_stop
    facts["late"] = open_and_look()
    ray.init = init
    deadline = time.monotonic() + 300
    while any(of_children(is_running)) and time.monotonic() < deadline:
        time.sleep(0.1)
    facts["processes"] = any(of_children(is_running))
    with parpool(1, quiet=True) as pool:
        facts["next"] = pool.parfeval(abs, -1).result()
    print(json.dumps(facts))
    """
    facts, _ = session(run_python, code)
    fork_server = [False, 1, 1]
    assert facts == {"early": fork_server, "late": fork_server, "processes": False, "next": 1}


def test_what_a_half_started_ray_still_writes_is_removed(run_python: Run) -> None:
    """A process of it that lives on makes the folder again, after it was removed."""
    code = """
    import subprocess
    from raypool import parpool
    from raypool.backends.ray.session import folder_of_ray
    from ray._private.node import Node

    WRITE = 'exec 3> "$0/log"; while [ -e "$0" ]; do :; done; mkdir -p "$0/session/logs"; read line'

    def start(node, *args, **options):
        folders = {*folder_of_ray().glob("*")} - before
        (facts["folder"],) = [str(each) for each in folders if (each / "session_latest").is_symlink()]
        raylet = Path(facts["folder"], "raylet")
        raylet.symlink_to("/bin/sh")
        subprocess.Popen([raylet, "-c", WRITE, facts["folder"]], stdin=subprocess.PIPE)
        while not Path(facts["folder"], "log").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    def is_named():
        named = []
        for process in psutil.process_iter(["cmdline"]):
            named += [word for word in process.info["cmdline"] or () if word == facts["folder"]]
        return bool(named)

    before, facts = {*folder_of_ray().glob("*")}, {}
    Node.start_ray_processes = start
    try:
        parpool(1, quiet=True)
    except KeyboardInterrupt:
        pass
    deadline = time.monotonic() + 300
    while is_named() and time.monotonic() < deadline:
        time.sleep(0.1)
    print(json.dumps([is_named(), Path(facts["folder"]).exists()]))
    """
    (is_running, is_left), _ = session(run_python, code)
    assert not is_running
    assert not is_left


def test_a_home_that_cannot_be_written(run_python: Run) -> None:
    """There is no place for the token: the error says which file it is."""
    code = """
    from raypool import parpool, StartupError
    try:
        parpool(1)
    except StartupError as error:
        print(json.dumps({"error": str(error)}))
    """
    facts, _ = session(run_python, code, HOME="/dev/null")
    assert "/dev/null/.ray" in facts["error"]


# --- without Ray ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", ["one core", "SLURM"])
def test_only_the_cores_that_this_process_may_use(run_python: Run, allowed: str) -> None:
    """Scenario 4: an affinity mask and SLURM's share count; and neither Ray nor torch is
    imported.
    """
    code = f"""
    if {allowed!r} == "one core":
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    from raypool import parpool
    with parpool(profile="threads") as pool:
        facts = {{"workers": pool.num_workers, "values": list(pool.parfor(abs, range(5)))}}
    facts["imported"] = [name for name in ("ray", "torch") if name in sys.modules]
    print(json.dumps(facts))
    """
    env = {"SLURM_CPUS_PER_TASK": "1"} if allowed == "SLURM" else {}

    facts, done = session(run_python, code, **env)

    assert facts == {"workers": 1, "values": [0, 1, 2, 3, 4], "imported": []}
    assert done.stdout.splitlines()[0] == "raypool: 1 worker (threads of this process)"


def test_a_debugger_stops_in_the_function_itself(by_value: None) -> None:
    """Scenario 8: with profile="inline" and max_workers=0 the function runs on the caller's own
    stack.
    """
    import inspect

    def callers(_: int) -> list[str]:
        return [frame.function for frame in inspect.stack()]

    me = "test_a_debugger_stops_in_the_function_itself"
    with parpool(profile="inline", quiet=True) as pool:
        check_on_stack(pool, callers, me)


def check_on_stack(pool: ParallelPool, callers: Callable[[int], list[str]], me: str) -> None:
    assert me in pool.parfor(callers, [0])[0]
    assert me in pool.parfeval(callers, 0).result()
    assert me in pool.parfor(callers, [0], max_workers=0)[0]


OTHER_USER = """
import json, os, subprocess
import psutil
from raypool import parpool

def meet(context):
    import torch
    context.all_reduce(torch.ones(2))
    return [entry.path for entry in psutil.Process().open_files()]

with parpool(2, quiet=True) as pool:
    paths = {path for part in pool.spmd(meet) for path in part}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            paths |= {entry.path for entry in process.open_files()}
            paths |= {entry.laddr for entry in process.net_connections("unix") if entry.laddr.startswith("/")}
        except psutil.Error:
            pass
    ours = sorted(path for path in paths if path.startswith("/tmp/") and os.path.exists(path))
    can = "for path; do for how in -r -w -x; do test $how $path && echo $how $path; done; done"
    other = {"user": 65534, "group": 65534, "extra_groups": []}
    found = subprocess.run(["sh", "-c", can, "sh", *ours], **other, capture_output=True, text=True).stdout.splitlines()
    print(json.dumps([len(ours), found]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_open_nothing_that_a_pool_has_open(run_python: Any) -> None:
    """Neither logs and sockets of Ray, nor what ranks meet by."""
    number, found = json.loads(run_python(OTHER_USER, TMPDIR="/tmp", RAY_TMPDIR="/tmp").stdout)
    assert number > 10, "the test has seen nothing"
    assert found == []
