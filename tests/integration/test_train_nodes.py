"""A training on a machine that is lost without a word: nobody knows at first that it is the machine
(scenario 46).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_nodes import CLUSTER

HEALTH = {  # as in the cluster files
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

LOST = """
import ray.train
from raypool import RunOptions

def loop():
    import tempfile
    start, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        start = json.loads((Path(checkpoint.path) / "step").read_text()) + 1
    for step in range(start, 6):
        if step == 3 and current_task().attempt == 1:
            mark(f"{os.getpid()} at three on {node_of()}")
            eventually(lambda: marked("struck"))
        with tempfile.TemporaryDirectory() as kept:
            (Path(kept) / "step").write_text(str(step))
            ray.train.report({"step": step}, ray.train.Checkpoint.from_directory(kept))
    return start

def lose(node):
    "Let a machine be lost, of which its raylet says nothing; return what is left of it."
    on = lambda actor: actor["Address"]["NodeID"] == node.node_id and actor["ActorClassName"] == "NodeAgent"
    [agent] = [actor for actor in state.actors().values() if on(actor)]
    [worker] = [int(path.name.split()[0]) for path in folder.glob(f"* at three on {node.node_id}")]
    raylets = [raylet.process.pid for raylet in node.all_processes["raylet"]]
    if HOW == "its processes end":  # Ray hears of the agent's end first
        os.kill(agent["Pid"], signal.SIGKILL)
        eventually(lambda: state.actors(agent["ActorID"])["State"] == "DEAD")
    for pid in raylets:
        os.kill(pid, signal.SIGSTOP)
    if HOW == "its processes end":
        os.kill(worker, signal.SIGKILL)
        return raylets
    silent = [worker, agent["Pid"]]
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    return raylets + silent

node = add(num_cpus=1)
with parpool(2, address=cluster.address, quiet=True) as pool:
    run = pool.options(retries=1).train(loop, run_options=RunOptions(run_dir=folder / "run"))
    eventually(lambda: len(list(folder.glob("* at three on *"))) == 2)
    eventually(lambda: len(run.metrics) == 3)  # what has not travelled yet goes with the machine
    watched(2)
    rest = lose(node)
    mark("struck")
    eventually(lambda: pool.num_workers == 1)
    new = add(num_cpus=1)
    result = run.result(300)
    facts["starts"], facts["steps"] = result.values, result.metrics_frame["step"].tolist()
    sizes(pool, 2)
    facts["on"] = sorted(pool.parfeval_on_all(node_of).result(300)) == sorted([node_of(), new.node_id])
    for pid in rest:
        os.kill(pid, signal.SIGKILL)
end()
"""


@pytest.mark.parametrize(
    "how", [pytest.param("its processes end", marks=pytest.mark.long), "it falls silent"]
)
def test_a_machine_is_lost_and_the_training_goes_on_with_another(
    run_python: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    """Ranks beside it may see connections break before anybody knows why; the next attempt may be
    made before, too.
    """
    (folder := tmp_path / "marks").mkdir()
    code = (
        CLUSTER.replace("FOLDER", repr(str(folder))).replace("CORES", "1")
        + f"HOW = {how!r}\n"
        + LOST
    )
    done = run_python(code, PYTHONWARNINGS="ignore", **HEALTH)
    facts = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert facts, done.stdout + done.stderr
    assert json.loads(facts[-1]) == {"starts": [3, 3], "steps": [*range(6)], "on": True}
