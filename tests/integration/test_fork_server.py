"""Workers that are forked from a process with torch: each is as separate as a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool.backends.ray import fork_server

HEAD = "import os, tempfile\nfifo = tempfile.mkdtemp() + '/gate'\nos.mkfifo(fifo)\n"

WORKERS = """
import json, os, signal, sys
from raypool import Profile, WorkerResources, parpool

def begun():
    global has_torch
    has_torch = "torch" in sys.modules

def parent():
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as line:
        return os.getppid() if b"fork_server.py" in line.read() else None

def facts(context):
    import multiprocessing, random, socket, stat, uuid
    import numpy, torch
    draws = [random.random(), numpy.random.rand(), torch.rand(1).item(), str(uuid.uuid4())]
    key = bytes(multiprocessing.current_process().authkey).hex()
    sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{fd}")]
    return {
        "parent": parent(), "has_torch": has_torch, "draws": [*draws, key],
        "threads": torch.get_num_threads(), "interrupt": signal.getsignal(signal.SIGCHLD) == 0,
        "mode": os.environ.get("MODE"), "server": os.environ.get("RAYPOOL_FORK_SERVER"),
        "group": os.getpgid(0) == os.getpid(),
        "oom_score_adj": open("/proc/self/oom_score_adj").read().strip(),
    }

def profile(**changes):
    changes = {"setup": begun, **changes}
    return Profile(quiet=True, resources=WorkerResources(cpus=0.5), **changes)
"""


def test_forks_share_torch_and_nothing_else(run_python: Any) -> None:
    code = """
with parpool(3, profile=profile(env={"MODE": "fast"})) as pool:
    print(json.dumps(list(pool.spmd(facts))))
"""
    workers = json.loads(run_python(WORKERS + code).stdout.splitlines()[-1])
    assert len({worker["parent"] for worker in workers} - {None}) == 1
    assert all(worker["has_torch"] and worker["mode"] == "fast" for worker in workers)
    for drawn in zip(*(worker["draws"] for worker in workers), strict=True):
        assert len(set(drawn)) == 3, "each fork draws its own"
    assert {worker["threads"] for worker in workers} == {1}, "as Ray gives it to the actor"
    assert all(worker["interrupt"] and worker["group"] for worker in workers)
    assert {worker["server"] for worker in workers} == {None}
    assert {worker["oom_score_adj"] for worker in workers} == {"1000"}, "as Ray wants it"


def test_what_cannot_be_a_fork_is_a_process(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    code = """
import logging
logging.basicConfig(level=logging.INFO)
with parpool(1, profile=profile(fork_server=False)) as pool:
    print(json.dumps(pool.parfeval(parent).result()))
with parpool(1, profile=profile(preload=["not_installed"])) as pool:
    print(json.dumps(pool.parfeval(parent).result()))
with parpool(1, profile=profile(preload=["ray"])) as pool:
    print(json.dumps(pool.parfeval(parent).result()))
with parpool(1, profile=profile(preload=["starts_a_thread"])) as pool:
    print(json.dumps(pool.parfeval(parent).result()))
with parpool(1, profile=profile()) as pool:
    print(json.dumps(pool.parfeval(parent).result() is not None))
with parpool(1, profile=profile(env={"OMP_PROC_BIND": "false"})) as pool:  # a base of its own
    print(json.dumps(pool.parfeval(parent).result() is not None))
    with parpool(1, profile=profile(env={"OMP_PROC_BIND": "true"})) as other:
        print(json.dumps(other.parfeval(parent).result()))
        print(other.parfeval(lambda: os.environ["OMP_PROC_BIND"]).result())
    with parpool(1, profile=profile(fork_server=False)) as other:
        print(json.dumps(other.parfeval(parent).result()))
with parpool(1, profile=profile(preload=["colorsys"])) as pool:
    print(pool.parfeval(lambda: "torch" in sys.modules or "colorsys" in sys.modules).result())
"""
    done = run_python(WORKERS + code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    lines = done.stdout.splitlines()[-10:]
    assert lines == [*["null"] * 4, *["true"] * 2, "null", "true", "null", "True"]
    assert done.stderr.count("The fork server is not used") == 4
    for reason in (
        "none of the modules in preload= is installed",
        "a module of preload imports Ray",
        "a module of preload has started threads (1 run)",
        "the imported libraries have read other values of OMP_PROC_BIND",
    ):
        assert done.stderr.count(f"no memory: {reason}.") == 1


def test_a_client_of_another_raypool_gets_a_process(run_python: Any, tmp_path: Path) -> None:
    """raypool is updated in place while a pool runs."""
    code = f"""
import logging
logging.basicConfig(level=logging.INFO)
from raypool.backends.ray import fork_client
with open(fork_client.__file__) as own, open({str(tmp_path / "other.py")!r}, "w") as other:
    other.write(own.read().replace('"folder":', '"group": 0, "folder":'))
fork_client.__file__ = other.name
with parpool(1, profile=profile()) as pool:
    print(pool.parfeval(parent).result())
"""
    done = run_python(WORKERS + code)
    assert done.stdout.splitlines()[-1] == "None"
    assert "raypool has been updated since the fork server was started" in done.stderr


def test_forks_for_a_second_ray_have_the_gpus_that_are_visible_then(
    run_python: Any, tmp_path: Path
) -> None:
    code = f"""
from raypool.gpus.simulated import SimulatedGpus
gpus = SimulatedGpus({str(tmp_path)!r}, 4)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
parpool(profile=profile(), inventory=gpus).delete()
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
with parpool(profile=profile(), inventory=gpus) as pool:
    print([worker.gpu for worker in pool.workers], None in pool.parfeval_on_all(parent).result())
"""
    assert run_python(WORKERS + code).stdout == "[2, 3] False\n"


def test_workers_of_a_killed_server_work_on_and_new_ones_are_processes(run_python: Any) -> None:
    code = """
with parpool(2, profile=profile()) as pool:
    server = pool.parfeval(parent).result()
    slow = pool.parfeval(lambda: os.read(os.open(fifo, os.O_RDONLY), 1))
    os.kill(server, signal.SIGKILL)
    with open(fifo, "wb") as gate:
        gate.write(b"1")
    assert slow.result() == b"1"
    list(pool.parfor(lambda _: None, range(8)))
    pool.parfeval(os.kill, 0, 0)
    assert pool.options(fresh_process=True).parfeval(parent).result() is None
with parpool(1, profile=profile()) as pool:
    assert pool.parfeval(parent).result() not in (None, server), "the next Ray has its own"
"""
    run_python(HEAD + WORKERS + code)


USE = """
def load(_):
    import torch
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2)
    return sum(batch.sum().item() for batch, in loader)

def meet(context):
    import torch
    return context.all_reduce(torch.ones(2)).tolist()

def fit():
    import ray.train
    return ray.train.get_context().get_world_size()

def hang():
    os.close(os.open(fifo, os.O_WRONLY))
    signal.pause()

with parpool(2, profile=profile()) as pool:
    assert None not in pool.parfeval_on_all(parent).result()
    print(list(pool.parfor(load, range(2))), list(pool.spmd(meet)), pool.train(fit).result().values)
    pids = [worker.pid for worker in pool.workers]
    hung = pool.parfeval(hang)
    os.close(os.open(fifo, os.O_RDONLY))
    hung.cancel()
    pool.parfeval_on_all(abs, 1).result()
    print([worker.pid for worker in pool.workers] == pids)
"""


def test_data_loaders_groups_trainings_and_cancelling_work_in_forks(run_python: Any) -> None:
    done = run_python(HEAD + WORKERS + USE)
    assert done.stdout.splitlines() == ["[28, 28] [[2.0, 2.0], [2.0, 2.0]] [2, 2]", "True"]


RESUMED = """
import ray

def known():
    return parent() is not None, "torch._dynamo" in sys.modules

def draw():
    return ray.ObjectRef.from_random().hex()

def begun_as():
    global at_start
    at_start = known()

def train():
    import ray.train, torch
    from ray.train.torch import prepare_model
    context = ray.train.get_context()
    model = prepare_model(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    ray.train.report({})
    is_first = not os.path.exists(fifo + ".killed")
    if context.get_world_rank() == 1 and is_first:
        open(fifo + ".killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return at_start

def report():
    import ray.train
    ray.train.report({})

with parpool(2, profile=profile(setup=begun_as)) as pool:
    new_process = pool.options(fresh_process=True)
    print(new_process.parfeval(known).result())
    pool.train(report).result()
    while not all(new_process.parfeval(known).result()):
        pass
    print(len({new_process.parfeval(draw).result() for _ in range(3)}))
    print(pool.train(train).result().values[1])
"""


def test_a_worker_in_place_of_a_killed_rank_has_imported_what_trainings_do(run_python: Any) -> None:
    done = run_python(HEAD + WORKERS + RESUMED)
    assert done.stdout.splitlines() == ["(True, False)", "3", "(True, True)"]


def test_workers_on_a_node_that_raypool_starts_for_drivers_are_forks(
    run_head: Callable[..., Any], run_python: Any, tmp_path: Path
) -> None:
    """As in a job of Slurm."""
    code = """
with parpool(2, profile=profile()) as pool:
    print(json.dumps(list(pool.spmd(facts))))
with parpool(1, profile=profile(fork_server=False)) as pool:
    print(pool.parfeval(parent).result())
"""
    with run_head(
        {"num-cpus": 2, "num-gpus": 0},
        {"RAY_TMPDIR": str(tmp_path)},
        ["raypool.backends.ray.ray_start"],
    ) as head:
        done = run_python(
            WORKERS + code,
            RAY_ADDRESS=head.address,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(head.token_file),
        )
    forked, plain = done.stdout.splitlines()[-2:]
    assert plain == "None"
    workers = json.loads(forked)
    assert len({worker["parent"] for worker in workers} - {None}) == 1
    assert all(worker["has_torch"] for worker in workers)


def test_a_base_that_uses_a_gpu_has_no_forks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fork_server, "OF_GPUS", (f"{tmp_path}/nvidia",))
    with (tmp_path / "nvidia0").open("w"):
        assert fork_server.flaw() == "a module of preload uses a GPU"
    assert fork_server.flaw() != "a module of preload uses a GPU"


@pytest.mark.long
def test_torch_compiles_in_a_fork(run_python: Any) -> None:
    code = """
def compiled():
    import torch
    return torch.compile(lambda x: torch.sin(x) + x)(torch.zeros(3)).tolist()

with parpool(1, profile=profile()) as pool:
    print(pool.parfeval(parent).result() is not None, pool.parfeval(compiled).result())
"""
    done = run_python(WORKERS + code, PYTHONWARNINGS="ignore")
    assert done.stdout.split(maxsplit=1) == ["True", "[0.0, 0.0, 0.0]\n"]


def test_a_worker_that_ends_at_the_same_time_as_its_client(run_python: Any) -> None:
    code = """
import os, selectors, socket
from raypool.backends.ray.fork_server import ForkServer

server = ForkServer(socket.create_server(("127.0.0.1", 0)), {}, "")
ours, theirs = socket.socketpair()
pid = os.fork()
if not pid:
    os._exit(0)
server._clients[ours], server._children[pid] = pid, ours
server._watch.register(ours, selectors.EVENT_READ)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
theirs.close()
reap, (owner, end) = server._reap, os.pipe()

def reap_and_end():
    reap()
    os.close(end)  # the owner ends

server._reap, server._owner = reap_and_end, owner
server._watch.register(owner, selectors.EVENT_READ)
print(server.run(), len(server._clients))
"""
    assert run_python(code).stdout == "None 0\n"
