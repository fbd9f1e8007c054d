"""Nodes that are killed, drained and added under an open pool, and Ray itself killed (scenario 46).

Each cluster here is Ray's own for tests: nodes are processes of one machine, in a session of their
own.
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

PREAMBLE = """
import json, logging, os, signal, sys, threading, time
from pathlib import Path

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
folder = Path(FOLDER)
facts = {}

def eventually(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)
    return True

def mark(text):
    (folder / text).touch()

def marked(text):
    return (folder / text).exists()

def sizes(pool, number):
    return eventually(lambda: pool.num_workers == number and all(w.state == "idle" for w in pool.workers))
"""

CLUSTER = (
    PREAMBLE
    + """
from raypool.backends.ray.session import ENVIRONMENT, make_token, without_helpers
os.environ.update(ENVIRONMENT)
make_token()
without = without_helpers()
without.__enter__()  # as long as this process runs
import ray
from ray._private import state
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from raypool import current_task, parpool, PoolBrokenError, WorkerResources
from raypool.backends.ray import nodes as watch

watch.GROW_S = 0.5

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False})

def add(**resources):
    return cluster.add_node(include_dashboard=False, **resources)

def drain(node, seconds):
    deadline_ms = int((time.time() + seconds) * 1000) if seconds else 2**63 - 1
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    assert GcsClient(address=cluster.address).drain_node(node.node_id, reason, "the machine is wanted", deadline_ms)[0]

def kill(node):
    cluster.remove_node(node, allow_graceful=False)

def node_of():
    return ray.get_runtime_context().get_node_id()

def watched(number):
    "Wait until there are agents on so many nodes: one that is about to go takes no new ones."
    agents = lambda: [actor for actor in state.actors().values() if actor["ActorClassName"] == "NodeAgent"]
    return eventually(lambda: sum(actor["State"] == "ALIVE" for actor in agents()) == number)

def stay(number):
    '''Run until the door opens, or somebody interrupts it.'''
    mark(f"{number} on {node_of()}")
    try:
        eventually(lambda: marked("door"))
    finally:
        mark(f"{number} left {node_of()}")
    return number, current_task().attempt

def end():
    print(json.dumps(facts), flush=True)
    ray.shutdown()
    threading.Timer(10, os._exit, [0]).start()
    cluster.shutdown()
    os._exit(0)
"""
)


@pytest.fixture
def on_cluster(run_python: Run, tmp_path: Any) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run a script beside a cluster; return its facts, and what it has said."""

    def run(
        code: str, cores: int = 1, preamble: str = CLUSTER, **env: str
    ) -> tuple[dict[str, Any], str]:
        folder = tmp_path / "marks"
        folder.mkdir()
        code = preamble.replace("FOLDER", repr(str(folder))).replace(
            "CORES", str(cores)
        ) + textwrap.dedent(code)
        done = run_python(code, PYTHONWARNINGS="ignore", **env)
        facts = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert facts, done.stdout + done.stderr
        return json.loads(facts[-1]), done.stderr

    return run


# --- with notice ----------------------------------------------------------------------------------


def test_tasks_leave_a_node_that_is_about_to_go_and_the_pool_grows_again(on_cluster: Any) -> None:
    """What ran there is interrupted in time, runs again elsewhere, and no attempt is charged for
    it.
    """
    facts, words = on_cluster("""
    node = add(num_cpus=1)
    with parpool(2, address=cluster.address, quiet=True, retries=1, cancel_grace_s=15) as pool:
        futures = [pool.parfeval(stay, number) for number in range(2)]
        eventually(lambda: len(list(folder.glob(f"* on {node.node_id}"))) == 1 and len(list(folder.iterdir())) == 2)
        watched(2)
        drain(node, 20)  # it is interrupted 12 s before, with so long a grace
        gone_at = time.monotonic() + 20
        eventually(lambda: list(folder.glob(f"* left {node.node_id}")))
        facts["in time"] = time.monotonic() < gone_at
        mark("door")
        facts["values"] = [future.result(300) for future in futures]
        sizes(pool, 1)
        kill(node)
        facts["alone"] = set(pool.parfor(lambda i: node_of(), range(3))) == {node_of()}
        new = add(num_cpus=2)
        sizes(pool, 2)
        facts["again"] = set(pool.parfeval_on_all(node_of).result(300)) == {node_of(), new.node_id}
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    facts["groups"] = [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    with parpool(quiet=True) as pool:
        facts["all cores"] = pool.num_workers
    end()
    """)
    assert facts["in time"]
    assert facts["values"] == [[0, 1], [1, 1]]
    assert facts["alone"]
    assert facts["again"]
    assert facts["groups"] == []
    assert facts["all cores"] == 3
    assert "will shut down in" in words
    assert "The pool grows again: 1 more worker on" in words


def test_where_all_nodes_go_the_pool_ends_and_the_same_call_resumes_elsewhere(
    on_cluster: Any, tmp_path: Any
) -> None:
    """One after the other, as Slurm preempts a job: what runs on either is told and saves, and
    nothing starts instead. Both nodes are on one host, and each has a GPU 0.
    """
    facts, words = on_cluster(
        f"""
    from raypool import load_checkpoint, save_checkpoint, PoolPreemptedError
    nodes = [add(num_cpus=1, num_gpus=1) for _ in range(2)]

    def work(item):
        done = load_checkpoint() or 0
        mark(f"{{item}} on {{node_of()}}, {{done}} done")
        eventually(lambda: marked("door") or current_task().should_stop)
        if not marked("door"):
            save_checkpoint(done + 1)
            mark(f"{{item}} was told")
        return item

    def begun(done):
        return sorted(int(path.name.split()[0]) for path in folder.glob(f"* on *, {{done}} done"))

    def take_back():
        eventually(lambda: len(begun(0)) == 2)
        watched(3)  # one on each node: those that are about to go take no new ones
        for number, node in enumerate(nodes, 1):
            drain(node, 600)
            eventually(lambda: len(list(folder.glob("* was told"))) == number)

    def loop(pool):
        return pool.parfor(work, range(5), run_dir={str(tmp_path / "run")!r}, on_error="collect")

    threading.Thread(target=take_back, daemon=True).start()
    with parpool(2, address=cluster.address, quiet=True) as pool:
        facts["gpus"] = [worker.gpu for worker in pool.workers]
        try:
            loop(pool)
        except PoolPreemptedError as error:
            facts["ended"] = str(error)
            facts["status"] = error.results.to_frame()["status"].tolist()
        facts["begun"] = begun(0)
        try:
            pool.parfeval(work, 0)
        except PoolPreemptedError:
            facts["refused"] = True
    nodes = [add(num_cpus=2, num_gpus=2)]
    mark("door")
    with parpool(2, address=cluster.address, quiet=True) as pool:
        facts["values"] = list(loop(pool))
    facts["resumed"] = begun(1)
    end()
    """,
        cores=0,
    )
    assert facts["gpus"] == [0, 0]
    ended = re.search(r"will shut down in (\d+) s, and no other node can come", facts["ended"])
    assert ended
    assert int(ended[1]) > 0, "the time was up"
    assert "0 of 5 items have finished" in facts["ended"]
    assert facts["status"] == ["cancelled"] * 5
    assert facts["begun"] == facts["resumed"] == [0, 1]
    assert facts["refused"]
    assert facts["values"] == [0, 1, 2, 3, 4]
    assert "Running tasks may finish; then the pool ends." in words


def test_where_the_node_of_the_script_goes_too_its_values_are_there_until_it_ends(
    on_cluster: Any, tmp_path: Any
) -> None:
    """Ray ends its processes on such a node as soon as nobody uses it."""
    facts, _ = on_cluster(f"""
    import torch
    from raypool import PoolPreemptedError, RunOptions, TrainingOptions
    nodes = [cluster.head_node, add(num_cpus=1)]

    class Model(torch.nn.Linear):
        def forward(self, inputs):
            time.sleep(0.05)  # it has to be told before it ends
            return super().forward(inputs)

    data = torch.ones(4000, 1), torch.ones(4000, 1)
    options = TrainingOptions(max_epochs=1000, mini_batch_size=4, report_every=1)
    with parpool(2, address=cluster.address, quiet=True) as pool:
        large = pool.parfeval(lambda: bytes(1_000_000))
        eventually(large.done)
        run = pool.fit(Model(1, 1), data, torch.nn.functional.mse_loss, options, run_options=RunOptions(run_dir={str(tmp_path / "run")!r}))
        eventually(lambda: len(run.metrics))
        watched(2)
        for node in nodes:
            drain(node, 600)
        facts["ended"] = type(run.exception(300)).__name__
        facts["bytes"] = len(large.result(300))
    end()
    """)
    assert facts == {"ended": "PoolPreemptedError", "bytes": 1_000_000}
    assert list((tmp_path / "run").glob("checkpoint_*.json")), "it has saved nothing"


@pytest.mark.long
def test_without_a_deadline_what_runs_is_left_to_its_end(on_cluster: Any) -> None:
    facts, _ = on_cluster("""
    node = add(num_cpus=1)
    with parpool(2, address=cluster.address, quiet=True) as pool:
        futures = [pool.parfeval(stay, number) for number in range(2)]
        eventually(lambda: len(list(folder.iterdir())) == 2)
        drain(node, None)
        eventually(lambda: pool.num_workers == 1)
        facts["later"] = pool.parfeval(node_of)
        mark("door")
        facts["values"] = [future.result(300) for future in futures]
        facts["later"] = facts["later"].result(300) == node_of()
        facts["runs"] = len(list(folder.glob("* on *")))
        sizes(pool, 1)
    end()
    """)
    assert facts == {"values": [[0, 1], [1, 1]], "later": True, "runs": 2}


@pytest.mark.long
def test_the_table_of_gpus_is_of_all_nodes_that_there_are_workers_on(on_cluster: Any) -> None:
    """Each node's agent tells of its own; a node that has gone has no rows. (Here both are this
    machine, with the same cards.)
    """
    facts, _ = on_cluster("""
    from raypool.gpus.simulated import SimulatedGpus
    gpus = SimulatedGpus(folder / "gpus", 2)
    node = add(num_cpus=1)
    with parpool(2, address=cluster.address, inventory=gpus, resources=WorkerResources(gpus=0), quiet=True) as pool:
        watched(2)
        facts["both"] = pool.device_table()["uuid"].tolist()
        kill(node)
        sizes(pool, 1)
        facts["one"] = pool.device_table()["uuid"].tolist()
    end()
    """)
    cards = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(2)]
    assert facts == {"both": cards * 2, "one": cards}


# --- without --------------------------------------------------------------------------------------


def test_a_node_that_is_killed_under_a_loop(on_cluster: Any) -> None:
    """Items that were there run again; the pool is smaller, says so, and grows when a node comes;
    never beyond what it was.
    """
    facts, words = on_cluster("""
    node = add(num_cpus=2)
    with parpool(3, address=cluster.address, quiet=True, retries=1) as pool:
        def fn(i):
            mark(f"{i} begins")
            time.sleep(0.2 if marked("killed") else 1)
            return i * i
        def strike():
            eventually(lambda: len(list(folder.glob("* begins"))) >= 5)
            kill(node)
            mark("killed")
        thread = threading.Thread(target=strike)
        thread.start()
        facts["values"] = pool.parfor(fn, range(20), chunk_size=1) == [i * i for i in range(20)]
        thread.join()
        sizes(pool, 1)
        add(num_cpus=1)
        sizes(pool, 2)
        add(num_cpus=4)
        sizes(pool, 3)
        facts["nodes"] = len(set(pool.parfeval_on_all(node_of).result(300)))
        facts["more"] = pool.parfor(fn, range(9), chunk_size=1) == [i * i for i in range(9)]
        time.sleep(4 * watch.GROW_S)  # it could try to grow once more
        facts["size"] = pool.num_workers
    end()
    """)
    assert facts == {"values": True, "nodes": 3, "more": True, "size": 3}
    assert "is lost" in words
    assert words.count("The pool grows again") == 2


@pytest.mark.long
def test_where_another_node_has_room_the_workers_go_there(on_cluster: Any) -> None:
    facts, _ = on_cluster("""
    first = add(num_cpus=1)
    with parpool(2, address=cluster.address, quiet=True) as pool:
        spare = add(num_cpus=1)
        kill(first)
        eventually(lambda: pool.statistics().workers_lost == 1)
        sizes(pool, 2)
        facts["there"] = set(pool.parfeval_on_all(node_of).result(300)) == {node_of(), spare.node_id}
    end()
    """)
    assert facts == {"there": True}


@pytest.mark.long
def test_a_pool_that_was_made_smaller_does_not_grow(on_cluster: Any) -> None:
    facts, words = on_cluster("""
    node = add(num_cpus=2)
    with parpool(3, address=cluster.address, quiet=True) as pool:
        kill(node)
        sizes(pool, 1)
        pool.resize(1)
        add(num_cpus=2)
        time.sleep(4 * watch.GROW_S)
        facts["size"] = pool.num_workers
        pool.resize(2)
        facts["larger"] = len(pool.parfeval_on_all(node_of).result(300))
    end()
    """)
    assert facts == {"size": 1, "larger": 2}
    assert "grows again" not in words


@pytest.mark.long
def test_a_pool_that_loses_its_only_node_waits_for_another(on_cluster: Any) -> None:
    facts, _ = on_cluster(
        """
    node = add(num_cpus=2)
    with parpool(2, address=cluster.address, quiet=True, start_timeout_s=300) as pool:
        futures = [pool.parfeval(stay, number) for number in range(4)]
        eventually(lambda: len(list(folder.iterdir())) == 2)
        kill(node)
        eventually(lambda: pool.statistics().workers_lost == 2)
        mark("door")
        new = add(num_cpus=2)
        facts["values"] = [future.result(300)[0] for future in futures]
        facts["there"] = pool.parfeval(node_of).result(300) == new.node_id
        sizes(pool, 2)
    end()
    """,
        cores=0,
    )
    assert facts == {"values": [0, 1, 2, 3], "there": True}


@pytest.mark.long
def test_workers_of_several_kinds_are_each_made_up_for(on_cluster: Any) -> None:
    """A list of resources, two workers on one GPU: what was lost of them comes again."""
    facts, _ = on_cluster("""
    kinds = [WorkerResources(gpus=0)] + [WorkerResources(gpus=0.5)] * 2
    node = add(num_cpus=0, num_gpus=1)
    with parpool(resources=kinds, address=cluster.address, quiet=True) as pool:
        kill(node)
        sizes(pool, 1)
        add(num_cpus=0, num_gpus=1)
        sizes(pool, 3)
        facts["gpus"] = sorted(len(worker.gpus) for worker in pool.workers)
    end()
    """)
    assert facts == {"gpus": [0, 1, 1]}


def test_the_gpu_of_a_lost_node_is_made_up_for_with_as_many_workers_as_fit(
    on_cluster: Any,
) -> None:
    facts, _ = on_cluster("""
    node, other = add(num_cpus=0, num_gpus=1), add(num_cpus=0, num_gpus=1)
    with parpool(2, address=cluster.address, quiet=True, workers_per_gpu="auto") as pool:
        kill(node)
        sizes(pool, 1)
        add(num_cpus=0, num_gpus=1)
        facts["is there again"] = sizes(pool, 2)
    end()
    """)
    assert facts == {"is there again": True}


@pytest.mark.long
def test_a_call_on_all_workers_when_a_node_is_lost(on_cluster: Any) -> None:
    """It ends, as when any rank is lost, and the pool goes on with the others."""
    facts, _ = on_cluster("""
    from raypool import SpmdError
    node = add(num_cpus=1)
    def rank(context):
        mark(f"rank {context.rank}")
        context.barrier()
        return stay(context.rank)
    with parpool(2, address=cluster.address, quiet=True) as pool:
        future = threading.Thread(target=lambda: facts.update(error=spmd()))
        def spmd():
            try:
                pool.spmd(rank)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        future.start()
        eventually(lambda: len(list(folder.glob("* on *"))) == 2)
        kill(node)
        future.join(300)
        sizes(pool, 1)
        facts["after"] = pool.parfeval(node_of).result(300) == node_of()
    end()
    """)
    assert facts["after"]
    assert facts["error"].startswith("SpmdError")


@pytest.mark.long
def test_a_node_is_drained_under_a_durable_loop(on_cluster: Any, tmp_path: Any) -> None:
    """Every outcome is there once, and no item is charged."""
    facts, _ = on_cluster(f"""
    node = add(num_cpus=2)
    def fn(i):
        mark(f"{{i}} begins")
        eventually(lambda: marked("drained") or i < 4)
        time.sleep(0.3)
        return i, current_task().attempt
    with parpool(3, address=cluster.address, quiet=True, retries=2, cancel_grace_s=1) as pool:
        def strike():
            eventually(lambda: len(list(folder.glob("* begins"))) >= 6)
            watched(2)
            drain(node, 5)
            eventually(lambda: pool.num_workers == 1)
            mark("drained")
        thread = threading.Thread(target=strike)
        thread.start()
        facts["values"] = list(pool.parfor(fn, range(16), chunk_size=1, run_dir={str(tmp_path / "run")!r}))
        thread.join()
    end()
    """)
    assert facts["values"] == [[i, 1] for i in range(16)]


# --- Ray itself -----------------------------------------------------------------------------------

LOCAL = (
    PREAMBLE
    + """
import psutil
import numpy as np
from raypool import parpool, PoolBrokenError, WorkerLostError

def children():
    "Those that have not ended, and their names; but for the one that workers are forked from."
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            is_base = child.ppid() == os.getpid() and "fork_server.py" in " ".join(child.cmdline())
            if child.status() != "zombie" and not is_base:
                found.append((child, child.name()))
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return found

def rays(name):
    return [child for child, its_name in children() if its_name == name]

def left():
    return [name for _, name in children()]

def stay(number):
    mark(f"{number} runs")
    eventually(lambda: marked("door"))
    return number

def what_becomes_of(futures):
    return sorted({type(future.exception(400)).__name__ for future in futures})
"""
)


@pytest.mark.parametrize(
    ("name", "words"), [("gcs_server", "control store (GCS)"), ("raylet", "(the raylet) has died")]
)
def test_ray_on_this_machine_is_killed(on_cluster: Any, name: str, words: str) -> None:
    """Everything that is pending fails within seconds, with words that say so; another pool can be
    opened.
    """
    facts, said = on_cluster(
        f"""
    pool = parpool(2, quiet=True)
    large = pool.parfeval(np.ones, 1_000_000)
    eventually(large.done)
    futures = [pool.parfeval(stay, number) for number in range(4)]
    eventually(lambda: len(list(folder.iterdir())) == 2)
    for process in rays("{name}"):
        process.kill()
    facts["ends"] = what_becomes_of(futures)
    facts["words"] = str(futures[0].exception())
    try:
        pool.parfor(stay, range(3))
    except Exception as error:
        facts["later"] = type(error).__name__
    pool.delete()
    try:
        facts["large"] = large.result(300).sum()
    except Exception as error:
        facts["large"] = type(error).__name__
    with parpool(1, quiet=True) as other:
        facts["other"] = other.parfeval(abs, -1).result(300)
        del pool
        facts["other again"] = other.parfeval(abs, -2).result(300)
    eventually(lambda: not left())  # Ray does not wait for all that it kills
    facts["left"] = left()
    print(json.dumps(facts))
    """,
        preamble=LOCAL,
    )
    assert facts["ends"] == ["PoolBrokenError"]
    assert words in facts["words"]
    assert "parpool()" in facts["words"]
    assert facts["later"] == "PoolBrokenError"
    assert facts["large"] == (1_000_000 if name == "gcs_server" else "TaskError")
    assert (facts["other"], facts["other again"]) == (1, 2)
    assert facts["left"] == []
    assert "the pool is closed" in said


@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.long)])
def test_ray_on_this_machine_is_stopped(on_cluster: Any, name: str) -> None:
    """As by a debugger, or on a machine that swaps: time limits hold, the pool ends, and another
    can be opened.
    """
    facts, _ = on_cluster(
        f"""
    pool = parpool(2, quiet=True, cancel_grace_s=1)
    short = pool.options(timeout_s=3, retries=0)
    pool.parfor(abs, range(4))
    for process in rays("{name}"):
        process.suspend()
    facts["ends"] = what_becomes_of([short.parfeval(os._exit, 3), short.parfeval(stay, 1), short.parfeval(stay, 2)])
    pool.delete()
    with parpool(1, quiet=True) as other:
        facts["other"] = other.parfeval(abs, -1).result(300)
    eventually(lambda: not left())  # Ray does not wait for all that it kills
    facts["left"] = left()
    print(json.dumps(facts))
    """,
        preamble=LOCAL,
        RAY_gcs_rpc_server_reconnect_timeout_s="20",
    )
    assert set(facts["ends"]) <= {"WorkerLostError", "TaskTimeoutError", "PoolBrokenError"}
    assert facts["other"] == 1
    assert facts["left"] == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("gcs_server", "has not answered"),
        pytest.param("raylet", "considers this machine dead", marks=pytest.mark.long),
    ],
)
def test_ray_of_a_cluster_is_killed_under_the_driver(on_cluster: Any, end: str, words: str) -> None:
    """A control store could come again: it is waited for, but not until Ray ends this process."""
    facts, _ = on_cluster(
        f"""
    add(num_cpus=1)
    pool = parpool(2, address=cluster.address, quiet=True)
    futures = [pool.parfeval(stay, number) for number in range(4)]
    eventually(lambda: len(list(folder.iterdir())) == 2)
    cluster.head_node.kill_{end}()
    facts["ends"] = sorted({{type(future.exception(300)).__name__ for future in futures}})
    facts["words"] = str(futures[0].exception())
    pool.delete()
    end()
    """,
        RAY_gcs_rpc_server_reconnect_timeout_s="20",
    )
    assert facts["ends"] == ["PoolBrokenError"]
    assert words in facts["words"]
