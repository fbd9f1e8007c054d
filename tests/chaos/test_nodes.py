"""Machines of a cluster are killed, drained and added at random moments (scenario 46): every result
comes once, and is right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.seeds(1)]

PROGRAM = """
import os, random, threading, time
from raypool.backends.ray.session import ENVIRONMENT, make_token

os.environ.update(ENVIRONMENT)
make_token()

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from raypool import parpool

chance = random.Random(int(os.environ["SEED"]))
SIZE, ITEMS = 3, 120
spec = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=spec)
nodes = [cluster.add_node(**spec) for _ in range(SIZE - 1)]
story = []


def trouble():
    while not is_over.wait(chance.uniform(0.5, 4)):
        if nodes and (chance.random() < 0.6 or len(nodes) == SIZE - 1):
            node = nodes.pop(chance.randrange(len(nodes)))
            if chance.random() < 0.5:
                story.append("drained")
                deadline_ms = int((time.time() + 8) * 1000)
                GcsClient(cluster.address).drain_node(
                    node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "spot", deadline_ms
                )
                is_over.wait(chance.uniform(0, 6))
            story.append("killed")
            cluster.remove_node(node, allow_graceful=False)
        else:
            story.append("added")
            nodes.append(cluster.add_node(**spec))


def fn(item):
    threading.Event().wait(seconds[item])
    return item * item


seconds = [chance.choice([0.02, 0.2, 0.5]) for _ in range(ITEMS)]
is_over = threading.Event()
try:
    with parpool(SIZE, address=cluster.address, retries=100, quiet=True, trace=os.environ["TRACE"]) as pool:
        troubled = threading.Thread(target=trouble)
        troubled.start()
        results = pool.parfor(fn, range(ITEMS))
        futures = [pool.parfeval(fn, item) for item in range(20)]
        values = [future.result(300) for future in futures]
        is_over.set()
        troubled.join()
        assert results == [item * item for item in range(ITEMS)]
        assert values == [item * item for item in range(20)]
        print("complete", *story)
finally:
    is_over.set()
    if ray.is_initialized():
        ray.shutdown()
    cluster.shutdown()
"""


def test_a_loop_survives_machines_that_come_and_go(
    seed: int,
    start_python: Callable[..., Any],
    make_trace: Callable[[], Path],
    eventually: Callable[..., bool],
) -> None:
    process = start_python(PROGRAM, SEED=str(seed), TRACE=str(make_trace()))
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "complete" in done.stdout
    assert "killed" in done.stdout, "nothing has happened: the test shows nothing"
    assert eventually(lambda: not process.family()), process.family()
