"""Machines that a cloud takes back under an open pool: its notice, the watcher beside Ray, what becomes of work (scenario 46).

Each cluster is Ray's own for tests; the metadata server is one of ours, the watcher the real one.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.fake_metadata import FakeMetadata, serving
from tests.integration.test_nodes import CLUSTER

pytestmark = pytest.mark.timeout(240)

PREAMBLE = (
    CLUSTER
    + """
import subprocess
from raypool import save_checkpoint, load_checkpoint

def take_back(node):
    "Let the cloud say that it takes the machine of a node back, and the watcher there tell Ray."
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    words = [sys.executable, "-m", "raypool.cloud.preemption", "--cloud", "gcp", "--metadata", URL, "--node", node.node_id]
    watcher = subprocess.Popen(words, env=clean, stderr=subprocess.PIPE, text=True)
    mark("taken back")
    return watcher
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
    """Run a script beside a cluster; give notice when it says so; return its facts, and what it has said."""

    def run(code: str, cores: int = 1) -> tuple[dict[str, Any], str]:
        folder = tmp_path / "marks"
        folder.mkdir()
        preamble = PREAMBLE.replace("FOLDER", repr(str(folder))).replace("CORES", str(cores)).replace("URL", repr(metadata.url))
        started = start_python(
            preamble + textwrap.dedent(code), PYTHONWARNINGS="ignore", PYTHONPATH=str(Path(__file__).parents[2])
        )
        eventually(lambda: (folder / "taken back").exists() or started.process.poll() is not None, 100)
        metadata.preempted = "TRUE"
        done: subprocess.CompletedProcess[str] = started.finish(200)
        facts = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, done.stdout + done.stderr
        assert facts, done.stdout + done.stderr
        return json.loads(facts[-1]), done.stderr

    return run


@pytest.mark.slow
def test_what_runs_on_a_machine_that_is_taken_back_saves_and_goes_on_elsewhere(on_cluster: Any, tmp_path: Path) -> None:
    """Two that look at `should_stop`, and two that have a function called: each is at most once where it was, at no charge."""
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
        began = time.monotonic()
        eventually(lambda: len(list(folder.glob("* on *"))) == 4 + 3)
        facts["seconds"] = time.monotonic() - began
        mark("moved")
        facts["outcomes"] = [future.result(60) for future in futures]
        facts["gone"] = node.node_id
        kill(node)
        facts["watcher"] = watcher.wait(20)
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
    assert facts["seconds"] < 20, "within the half minute that Compute Engine gives"
    assert facts["watcher"] == 0
    assert "Compute Engine takes this spot machine back, in 2" in facts["said"]
    assert "is about to go, in 2" in words


@pytest.mark.long
@pytest.mark.parametrize("lane", ["warm", "managed"])
def test_fit_goes_on_elsewhere_from_the_very_step(on_cluster: Any, tmp_path: Path, lane: str) -> None:
    """In the midst of an epoch, with retries=0; the model is the one that it would have been."""
    facts, _ = on_cluster(
        f"""
    import torch
    from torch import nn
    from raypool import RunOptions, TrainingOptions

    node = add(num_cpus=2)
    inputs = torch.randn(320, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = inputs, inputs.sum(1, keepdim=True)
    options = TrainingOptions(max_epochs=2, mini_batch_size=4, learning_rate=0.05, report_every=1)

    class Model(nn.Sequential):
        def __init__(self, pause):
            super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.pause = pause
        def forward(self, inputs):
            time.sleep(self.pause)
            return super().forward(inputs)

    def model(pause):
        torch.manual_seed(0)
        return Model(pause).double()

    with parpool(2, address=cluster.address, quiet=True, retries=0, start_timeout_s=60) as pool:
        kept = RunOptions(run_dir={str(tmp_path / "run")!r})
        run = pool.fit(model(0.1), data, nn.functional.mse_loss, options, lane={lane!r}, run_options=kept)
        eventually(lambda: len(run.metrics) >= 5, 100)
        watched(2)
        add(num_cpus=2)
        watcher = take_back(node)
        began = time.monotonic()
        eventually(lambda: run.attempts == 2 or run.done(), 60)
        facts["seconds"] = time.monotonic() - began
        result = run.result(150)
        frame = result.metrics_frame
        facts["attempts"] = frame["attempt"].unique().tolist()
        facts["steps"] = frame["step"].astype(int).tolist()
        facts["ended by"] = result.ended_by
        kill(node)
        facts["watcher"] = watcher.wait(20)
        whole = pool.fit(model(0), data, nn.functional.mse_loss, options).result(100)
        facts["same"] = all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(result.model.parameters(), whole.model.parameters()))
    end()
    """,
        cores=0,
    )
    assert facts["attempts"] == [1, 2]
    assert facts["steps"] == list(range(160)), "each step once"
    assert facts["ended by"] == "max_epochs"
    assert facts["same"]
    assert facts["seconds"] < 25
    assert facts["watcher"] == 0
