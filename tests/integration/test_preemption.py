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
