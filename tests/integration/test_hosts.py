"""A pool over several machines that are namespaces: a cable is cut, a machine goes with notice,
another without (scenario 46).

And a stranger on their network, whom every port refuses (scenario 53).
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cloud.lab import Lab, give_token, is_allowed
from tests.conftest import Marks

pytestmark = [
    pytest.mark.skipif(
        not is_allowed(), reason="this machine lets nobody make namespaces, or has no `ip`"
    )
]

WORKERS = ("left", "right")

HEALTH = {  # as in the cluster files
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

SMALL = ("--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats")

QUIET = {"PYTHONWARNINGS": "ignore"}

PREAMBLE = """
import json, os, platform, sys, time
from collections import Counter
from pathlib import Path
from raypool import current_task, parpool

folder = Path(os.environ["MARKS"])
facts = {}

def eventually(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)
    return True

def mark(text):
    (folder / f"{text}#{os.getpid()} of {platform.node()}").touch()

def marked(text):
    return any(folder.glob(f"{text}#*"))

def sizes(pool, number):
    return eventually(lambda: pool.num_workers == number and all(worker.state == "idle" for worker in pool.workers))

def hosts(pool):
    return Counter(worker.host for worker in pool.workers)

def stay(i):
    "Run on, the first ones until the blow has fallen."
    mark(f"{i} on {platform.node()}")
    try:
        eventually(lambda: i >= 4 or marked("struck"))
    finally:
        mark(f"{i} leaves {platform.node()}")
    return i * i, platform.node(), current_task().attempt
"""


def start_ray(lab: Lab, name: str) -> subprocess.Popen[str]:
    """Let a host join the cluster."""
    return lab.start(
        name,
        "ray",
        "start",
        "--address=10.88.0.1:6379",
        "--num-gpus=2",
        *SMALL,
        **QUIET,
        RAY_AUTH_MODE="token",
    )


def has_joined(started: subprocess.Popen[str]) -> bool:
    out, err = started.communicate(timeout=500)
    return started.returncode == 0 or pytest.fail(f"{out}\n{err}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Switch on a head without GPUs, two machines with two each, and one that belongs to somebody
    else.
    """
    lab = Lab(tmp_path_factory.mktemp("lab"), ("head", *WORKERS, "stranger"))
    try:
        give_token([lab[name] for name in ("head", *WORKERS)])
        head = (
            "ray",
            "start",
            "--head",
            "--port=6379",
            "--num-gpus=0",
            "--dashboard-host=127.0.0.1",
            *SMALL,
        )
        lab.run("head", *head, **QUIET, **HEALTH, RAY_AUTH_MODE="token")
        assert all(map(has_joined, [start_ray(lab, name) for name in WORKERS]))
        yield lab
    finally:
        lab.close()


@pytest.fixture
def drive(lab: Lab, marks: Marks) -> Iterator[Callable[[str], Callable[[], dict[str, Any]]]]:
    """Begin a script on the head; what comes back waits for its end, and returns its facts."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> Callable[[], dict[str, Any]]:
        process = lab.python(
            "head", PREAMBLE + code + "\nprint(json.dumps(facts))", MARKS=str(marks.folder), **QUIET
        )
        started.append(process)

        def finish() -> dict[str, Any]:
            out, err = process.communicate(timeout=500)
            assert process.returncode == 0, f"{out}\n{err}\n{marks.all()}"
            return {**json.loads(out.splitlines()[-1]), "said": err}

        return finish

    yield begin
    for process in started:
        if not process.stdout or not process.stdout.closed:
            print(lab.end(process))  # of one that the test has given up


def rays_on(lab: Lab, name: str) -> list[str]:
    """Return which of Ray's processes a host has."""
    listing = (
        "import psutil; print(*[process.info['name'] for process in psutil.process_iter(['name'])])"
    )
    return [word for word in lab.run(name, sys.executable, "-c", listing).split() if "ray" in word]


@pytest.mark.long
def test_a_cable_is_cut_under_a_loop_and_put_back(
    lab: Lab, drive: Any, marks: Marks, eventually: Any
) -> None:
    """Items move to the other machine, the pool is smaller; what was cut off ends by itself, and
    the pool grows again.
    """
    finish = drive("""
with parpool(4, address="10.88.0.1:6379", quiet=True, retries=1, cancel_grace_s=1) as pool:
    facts["before"] = hosts(pool)
    facts["cards"] = sorted(pool.parfeval_on_all(lambda: (platform.node(), os.environ["CUDA_VISIBLE_DEVICES"])).result(300))
    values = list(pool.parfor(stay, range(24), chunk_size=1))
    facts["values"] = [value for value, _, _ in values] == [i * i for i in range(24)]
    facts["again"] = sorted({attempt for i, (_, _, attempt) in enumerate(values) if i < 4})
    facts["where"] = sorted({host for _, host, _ in values[4:]})
    sizes(pool, 2)
    facts["after"] = hosts(pool)
    mark("smaller")
    sizes(pool, 4)
    facts["at last"] = hosts(pool)
""")
    assert eventually(lambda: sum(" on " in mark for mark in marks.all()) >= 4)
    lab.cut("right")
    marks.add("struck")
    assert eventually(lambda: marks.count("smaller"))
    lab.mend("right")
    assert eventually(lambda: not rays_on(lab, "right"))
    assert has_joined(start_ray(lab, "right"))
    facts = finish()
    assert facts["before"] == facts["at last"] == {"left": 2, "right": 2}
    assert facts["cards"] == [["left", "0"], ["left", "1"], ["right", "0"], ["right", "1"]]
    assert facts["values"]
    assert facts["again"] == [1, 2]
    assert facts["where"] == ["left"]
    assert facts["after"] == {"left": 2}


def test_one_machine_goes_with_notice_and_the_other_without(
    lab: Lab, drive: Any, marks: Marks, eventually: Any
) -> None:
    """What is drained costs no attempt, what is killed costs one, and the pool grows between; one
    is off then.
    """
    finish = drive("""
import ray
from ray._private import state
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2

def has_agent(node):
    agents = [actor for actor in state.actors().values() if actor["ActorClassName"] == "NodeAgent"]
    return any(actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == node for actor in agents)

def drain(host, seconds):
    [node] = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] == host]
    eventually(lambda: has_agent(node))  # a node that is about to go takes no new ones
    reason, deadline_ms = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + seconds) * 1000)
    assert GcsClient(address="10.88.0.1:6379").drain_node(node, reason, "the machine is wanted", deadline_ms)[0]

def four_that_stay(pool):
    futures = [pool.parfeval(stay, i) for i in range(4)]
    eventually(lambda: all(marked(f"{i} on *") for i in range(4)))
    return futures

with parpool(4, address="10.88.0.1:6379", quiet=True, retries=1, cancel_grace_s=8) as pool:
    futures = four_that_stay(pool)
    drain("left", 15)
    eventually(lambda: sum(marked(f"{i} leaves left") for i in range(4)) == 2)
    mark("struck")
    facts["drained"] = [future.result(300) for future in futures]
    sizes(pool, 2)
    facts["after"] = hosts(pool)
    mark("drained")
    sizes(pool, 4)
    for path in folder.iterdir():
        path.unlink()
    futures = four_that_stay(pool)
    mark("again")
    facts["killed"] = [future.result(300) for future in futures]
    sizes(pool, 2)
    facts["survivors"] = hosts(pool)
""")
    assert eventually(lambda: marks.count("drained")), marks.all()
    lab.kill("left")
    lab.boot("left")
    assert has_joined(start_ray(lab, "left"))
    assert eventually(lambda: marks.count("again")), marks.all()
    lab.kill("right")
    marks.add("struck")
    facts = finish()
    assert [value for value, _, _ in facts["drained"]] == [0, 1, 4, 9]
    assert {host for _, host, _ in facts["drained"]} == {"right"}
    assert {attempt for _, _, attempt in facts["drained"]} == {1}
    assert facts["after"] == {"right": 2}
    assert [value for value, _, _ in facts["killed"]] == [0, 1, 4, 9]
    assert {host for _, host, _ in facts["killed"]} == {"left"}
    assert sorted(attempt for _, _, attempt in facts["killed"]) == [1, 1, 2, 2]
    assert facts["survivors"] == {"left": 2}


# --- strangers ------------------------------------------------------------------------------------

LISTENERS = """
import json, psutil
found = [each for each in psutil.net_connections("inet") if each.status == "LISTEN"]
names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
print(json.dumps({
    each.laddr.port: names.get(each.pid, "one that has ended")
    for each in found if each.laddr.ip.removeprefix("::ffff:") != "127.0.0.1" and each.pid
}))
"""

KNOCK = """
import http.client, json, sys
import grpc

METHODS = [
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/AddJob",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.ReporterService/GetTraceback",
]
PAGES = [
    ("GET", "/"),
    ("GET", "/logs"),
    ("POST", "/api/jobs/"),
    ("POST", "/api/job_agent/jobs/"),
    ("POST", "/get_or_create_runtime_env"),
    ("POST", "/delete_runtime_env_if_possible"),
]

def call(host, port, method, headers):
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=120, metadata=[(name.lower(), value) for name, value in headers.items()])
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

def ask(host, port, way, page, headers):
    connection = http.client.HTTPConnection(host, port, timeout=120)
    body, headers = (b"{}", {"Content-Type": "application/json", **headers}) if way == "POST" else (None, headers)
    try:
        connection.request(way, page, body=body, headers=headers)
        answer = connection.getresponse()
        return "metrics" if answer.status == 200 and answer.read().startswith(b"# HELP") else answer.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

TOKENS = {"none": {}, "wrong": {"Authorization": "Bearer " + "f" * 64}, "right": {"Authorization": "Bearer " + sys.argv[2]}}

def knock(host, port, headers):
    if ask(host, port, "GET", "/", headers) is None:
        return [call(host, port, method, headers) for method in METHODS]
    return [ask(host, port, way, page, headers) for way, page in PAGES]

answers = [
    [host, port, name, {token: knock(host, int(port), headers) for token, headers in TOKENS.items()}]
    for host, ports in json.loads(sys.argv[1]).items()
    for port, name in ports.items()
]
print(json.dumps(answers))
"""


WITH_PORTS = {
    "raylet",
    "ray::PoolWorker",
    "ray::NodeAgent",
    "ray::RuntimeEnvAgent",
    "ray::DashboardAgent",
}


def listeners(lab: Lab, name: str) -> dict[str, str]:
    """Return who listens on a host, by port, where others can reach it; what Ray's processes do is
    left out of their names.
    """
    found: dict[str, str] = json.loads(lab.run(name, sys.executable, "-c", LISTENERS))
    return {port: title.partition(".")[0] for port, title in found.items()}


def test_a_stranger_is_refused_at_every_port(
    lab: Lab, drive: Any, marks: Marks, eventually: Any
) -> None:
    """Without the token, or with a wrong one. Only how busy a machine is can be read; the dashboard
    cannot even be reached.

    The last one: with the right token, to see that it opens the ports, come empty messages too, at
    which a raylet of Ray ends.
    """
    finish = drive("""
with parpool((1, 4), address="10.88.0.1:6379", quiet=True) as pool:
    mark("open")
    eventually(lambda: marked("looked"))
""")
    assert eventually(lambda: marks.count("open"))
    assert eventually(lambda: set(listeners(lab, "left").values()) >= WITH_PORTS), listeners(
        lab, "left"
    )
    ports = {lab[name].address: listeners(lab, name) for name in ("head", "left")}
    token = lab["head"].home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    answers = json.loads(
        lab.run("stranger", sys.executable, "-c", KNOCK, json.dumps(ports), token.read_text())
    )
    marks.add("looked")
    finish()
    # 10001 too, unless Ray Client's server has ended as Ray came up slowly
    assert "6379" in {port for _, port, _, _ in answers}
    assert "8265" not in {port for _, port, _, _ in answers}
    for host, port, name, said in answers:
        assert is_refusal(said) or tells_metrics_only(said), (host, port, name, said)


def is_refusal(said: dict[str, list[Any]]) -> bool:
    """Whether only who has the right token gets an answer."""
    if isinstance(said["none"][0], int):
        return (
            set(said["none"]) == {401}
            and set(said["wrong"]) == {403}
            and not {401, 403} & set(said["right"])
        )
    is_shut = all(
        {"UNAUTHENTICATED"} <= set(said[token]) <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}
        for token in ("none", "wrong")
    )
    return is_shut and "UNAUTHENTICATED" not in said["right"]


def tells_metrics_only(said: dict[str, list[Any]]) -> bool:
    return said["none"] == said["wrong"] == said["right"] and set(said["none"]) == {"metrics", 405}
