"""Machines that a cloud takes back under an open pool: its notice, the watcher beside Ray, what
becomes of work (scenario 46).

Each cluster is Ray's own for tests; the metadata server is one of ours, the watcher the real one.
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.fake_metadata import FakeMetadata, serving
from tests.integration.test_nodes import CLUSTER

PREAMBLE = (
    CLUSTER
    + """
import subprocess
from raypool import save_checkpoint, load_checkpoint

def take_back(node):
    "Let the cloud say that it takes the machine of a node back, and the watcher there tell Ray."
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    words = [sys.executable, "-m", "raypool.cluster.preemption", "--cloud", "gcp", "--metadata", URL, "--node", node.node_id]
    watcher = subprocess.Popen(words, env=clean, stderr=subprocess.PIPE, text=True)
    mark("taken back")
    return watcher

def let_cluster_grow():
    "Let the cluster look as if Ray's autoscaler could add nodes."
    settings = {"max_workers": 1, "available_node_types": {"worker": {"resources": {"CPU": 2}}}}
    (folder.parent / "settings.yaml").write_text(json.dumps(settings))
    while_it_lives = f"import os, time\\nwhile os.getppid() == {os.getpid()}: time.sleep(0.1)"
    words = [sys.executable, "-c", while_it_lives, f"--autoscaling-config={folder.parent}/settings.yaml"]
    subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
)


@pytest.fixture
def metadata() -> Iterator[FakeMetadata]:
    with serving() as fake:
        yield fake


@pytest.fixture
def on_cluster(
    start_python: Any, tmp_path: Path, metadata: FakeMetadata, eventually: Any
) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run a script beside a cluster; give notice when it says so; return its facts, and what it has
    said.
    """

    def run(code: str, cores: int = 1) -> tuple[dict[str, Any], str]:
        folder = tmp_path / "marks"
        folder.mkdir()
        preamble = (
            PREAMBLE.replace("FOLDER", repr(str(folder)))
            .replace("CORES", str(cores))
            .replace("URL", repr(metadata.url))
        )
        started = start_python(
            preamble + textwrap.dedent(code),
            PYTHONWARNINGS="ignore",
            PYTHONPATH=str(Path(__file__).parents[2]),
        )
        eventually(lambda: (folder / "taken back").exists() or started.process.poll() is not None)
        metadata.preempted = "TRUE"
        done: subprocess.CompletedProcess[str] = started.finish()
        facts = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, done.stdout + done.stderr
        assert facts, done.stdout + done.stderr
        return json.loads(facts[-1]), done.stderr

    return run


def test_what_runs_on_a_machine_that_is_taken_back_saves_and_goes_on_elsewhere(
    on_cluster: Any, tmp_path: Path
) -> None:
    """Two that look at `should_stop`, and two that have a function called: each is at most once
    where it was, at no charge.
    """
    facts, words = on_cluster(f"""
    node = add(num_cpus=3)

    def look(number):
        done = load_checkpoint() or []
        mark(f"{{number}} on {{node_of()}}")
        while not marked("moved"):
            done.append(node_of())
            if current_task().should_stop:
                save_checkpoint(done)
                return "in vain"
            time.sleep(0.05)
        return done, current_task().attempt

    def be_called(number):
        done = load_checkpoint() or []
        is_over = threading.Event()
        def save():
            save_checkpoint(done)
            is_over.set()
        done.append(node_of())
        current_task().on_preempt(save)
        mark(f"{{number}} on {{node_of()}}")
        while not marked("moved") and not is_over.wait(0.05):
            done.append(node_of())
        return done, current_task().attempt

    with parpool(4, address=cluster.address, quiet=True, cancel_grace_s=1) as pool:
        view = pool.options(retries=1, checkpoints={str(tmp_path / "kept")!r})
        futures = [view.parfeval(fn, number) for number, fn in enumerate([look, look, be_called, be_called])]
        eventually(lambda: len(list(folder.glob("* on *"))) == 4)
        watched(2)
        add(num_cpus=3)
        watcher = take_back(node)
        eventually(lambda: len(list(folder.glob("* on *"))) == 4 + 3)
        mark("moved")
        facts["outcomes"] = [future.result(300) for future in futures]
        facts["gone"] = node.node_id
        kill(node)
        facts["watcher"] = watcher.wait(300)
        facts["said"] = watcher.stderr.read()
    end()
    """)
    gone = facts["gone"]
    assert [attempt for _, attempt in facts["outcomes"]] == [1] * 4
    moved = [done for done, _ in facts["outcomes"] if gone in done]
    assert len(moved) == 3, "they go on from what they have saved"
    for done in moved:
        first = next(index for index, place in enumerate(done) if place != gone)
        assert first > 0
        assert gone not in done[first:]
    assert facts["watcher"] == 0
    told = re.search(
        r"Compute Engine is about to preempt this spot machine, in (\d+) s", facts["said"]
    )
    heard = re.search(r"will shut down in (\d+) s", words)
    assert told
    assert heard
    assert max(int(told[1]), int(heard[1])) <= 25


FIT = """
import torch
from torch import nn
from raypool import RunOptions, TrainingOptions

inputs = torch.randn(320, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
data = inputs, inputs.sum(1, keepdim=True)
options = TrainingOptions(max_epochs=2, mini_batch_size=4, learning_rate=0.05, report_every=1)

class Model(nn.Sequential):
    def __init__(self, pause):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.pause = pause
    def forward(self, inputs):
        # only until it has gone on elsewhere: the notice must come before it ends
        time.sleep(0 if marked("moved") else self.pause)
        return super().forward(inputs)

def fit(pool, pause, **kinds):
    torch.manual_seed(0)
    return pool.fit(Model(pause).double(), data, nn.functional.mse_loss, options, **kinds)

def note(result):
    frame = result.metrics_frame
    facts["attempts"], facts["steps"] = frame["attempt"].unique().tolist(), frame["step"].astype(int).tolist()
    facts["ended by"] = result.ended_by

def has_same_model(one, other):
    return all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(one.model.parameters(), other.model.parameters()))
"""


def test_fit_goes_on_elsewhere_from_the_very_step(on_cluster: Any, tmp_path: Path) -> None:
    """In the midst of an epoch, with retries=0, when the pool has its size again; the model is what
    it would have been.
    """
    facts, words = on_cluster(
        FIT
        + textwrap.dedent(f"""
    node = add(num_cpus=1)
    with parpool(2, address=cluster.address, quiet=True, retries=0) as pool:
        run = fit(pool, 0.5, run_options=RunOptions(run_dir={str(tmp_path / "run")!r}))
        eventually(lambda: len(run.metrics) >= 5)
        watched(2)
        watcher = take_back(node)
        eventually(lambda: list(Path({str(tmp_path / "run")!r}).glob("checkpoint_*.json")) or run.done())
        mark("moved")
        add(num_cpus=1)
        result = run.result(300)
        note(result)
        kill(node)
        facts["watcher"] = watcher.wait(300)
        sizes(pool, 2)
        facts["same"] = has_same_model(result, fit(pool, 0).result(300))
    end()
    """)
    )
    assert facts["attempts"] == [1, 2]
    assert facts["steps"] == list(range(160)), "each step once"
    assert facts["ended by"] == "max_epochs"
    assert facts["same"]
    assert facts["watcher"] == 0
    assert "The pool grows again" in words


@pytest.mark.long
def test_fit_on_a_single_machine_goes_on_when_there_is_another(
    on_cluster: Any, tmp_path: Path
) -> None:
    """It keeps what it has, and waits."""
    facts, words = on_cluster(
        FIT
        + textwrap.dedent(f"""
    let_cluster_grow()
    node = add(num_cpus=2)
    with parpool(2, address=cluster.address, quiet=True, retries=0) as pool:
        run = fit(pool, 0.5, run_options=RunOptions(run_dir={str(tmp_path / "run")!r}))
        eventually(lambda: len(run.metrics) >= 5)
        watcher = take_back(node)
        eventually(lambda: run.attempts == 2)
        kill(node)
        mark("moved")
        add(num_cpus=2)
        result = run.result(300)
        note(result)
        facts["watcher"] = watcher.wait(300)
        facts["same"] = has_same_model(result, fit(pool, 0).result(300))
    end()
    """),
        cores=0,
    )
    assert facts["attempts"] == [1, 2]
    assert facts["steps"] == list(range(160)), "each step once"
    assert facts["same"]
    assert facts["watcher"] == 0
    assert "Queued tasks wait for other nodes." in words


@pytest.mark.long
def test_what_is_handed_in_while_all_machines_go_begins_on_the_next(on_cluster: Any) -> None:
    facts, _ = on_cluster(
        FIT
        + textwrap.dedent("""
    def hear():
        mark(f"hears on {node_of()}")
        eventually(lambda: marked("moved") or current_task().should_stop)
        mark("heard")

    let_cluster_grow()
    node = add(num_cpus=2)
    with parpool(2, address=cluster.address, quiet=True, retries=0) as pool:
        fit(pool, 0).result(300)
        heard = pool.options(retries=1).parfeval(hear)
        eventually(lambda: marked(f"hears on {node.node_id}"))
        drain(node, 60)
        mark("taken back")
        eventually(lambda: marked("heard"))
        run = fit(pool, 0.5)
        mark("moved")
        other = add(num_cpus=2)
        heard.result(300)
        facts["heard there"] = marked(f"hears on {other.node_id}")
        facts["epochs"] = run.result(300).metrics_frame["epoch"].max().item()
        facts["attempts"] = run.attempts
        sizes(pool, 2)
        kill(node)
    end()
    """),
        cores=0,
    )
    assert facts == {"heard there": True, "epochs": 1, "attempts": 1}


LOOP = """
def loop():
    import ray.train
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    checkpoint = ray.train.get_checkpoint()
    first = 0 if checkpoint is None else int(Path(checkpoint.path, "step").read_text()) + 1
    for step in range(first, 40_000):
        info = ray.train.get_preemption_info()
        if info is not None:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step - 1))
                kept = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step - 1}, checkpoint=kept)
            return [info.preempted_ranks, info.preempted_node_ids, info.deadline_ms]
        time.sleep(0.05)
        mark(f"step {step}")
        if marked("moved"):
            return [first, size, node_of()]
"""


@pytest.mark.long
def test_a_loop_asks_ray_train_whose_machine_is_about_to_go(
    on_cluster: Any, tmp_path: Path
) -> None:
    """It goes on with those that are left, where these are enough."""
    facts, _ = on_cluster(
        "import tempfile"
        + LOOP
        + textwrap.dedent(f"""
    node = add(num_cpus=1)
    with parpool(2, address=cluster.address, quiet=True, retries=0) as pool:
        run = pool.train(loop, run_options=RunOptions(run_dir={str(tmp_path / "run")!r}, min_workers=1))
        eventually(lambda: marked("step 3"))
        watched(2)
        watcher = take_back(node)
        eventually(lambda: run.attempts == 2)
        mark("moved")
        facts["values"] = run.result(300).values
        facts["here"] = node_of()
        kill(node)
        facts["watcher"] = watcher.wait(300)
    end()
    """)
        .replace("RunOptions", "raypool.RunOptions")
        .replace("node = add", "import raypool\nnode = add")
    )
    ((first, size, where),) = facts["values"]
    assert first > 0
    assert size == 1
    assert where == facts["here"]
    assert facts["watcher"] == 0
