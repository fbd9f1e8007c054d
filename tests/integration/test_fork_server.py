"""Workers that are forked from a process with torch: each is as separate as a process of its own."""

from __future__ import annotations

import json
from typing import Any

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
    }

def profile(**changes):
    changes = {"fork_server": True, "setup": begun, **changes}
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


def test_what_cannot_be_a_fork_is_a_process(run_python: Any) -> None:
    code = """
with parpool(1, profile=profile(fork_server=False)) as pool:
    print(json.dumps(pool.parfeval(parent).result()))
with parpool(1, profile=profile(env={"OMP_PROC_BIND": "false"})) as pool:
    print(json.dumps(pool.parfeval(parent).result() is not None))
    with parpool(1, profile=profile(env={"OMP_PROC_BIND": "true"})) as other:
        print(json.dumps(other.parfeval(parent).result()))
        print(other.parfeval(lambda: os.environ["OMP_PROC_BIND"]).result())
with parpool(1, profile=profile(preload=["colorsys"])) as pool:
    print(pool.parfeval(lambda: "torch" in sys.modules or "colorsys" in sys.modules).result())
"""
    done = run_python(WORKERS + code)
    assert done.stdout.splitlines()[-5:] == ["null", "true", "null", "true", "True"]
    assert done.stderr.count("no memory: OMP_PROC_BIND cannot change in a fork.") == 1


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
    head = "import os, tempfile\nfifo = tempfile.mkdtemp() + '/gate'\nos.mkfifo(fifo)\n"
    run_python(head + WORKERS + code)
