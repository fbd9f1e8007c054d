"""A search whose driver is killed goes on: nothing is lost, and no trial is told twice."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks_of

SEARCH = """
import json, os, signal, sys, threading
import optuna
from pathlib import Path
from raypool import current_task, parpool, report, search
from raypool.search import run

folder, kill_at = Path(os.environ["FOLDER"]), int(os.environ["KILL_AT"])
steps, lock = 0, threading.Lock()

def step(what):  # the process dies at a step of any kind: in a trial, around a tell or a copy
    global steps
    with lock:
        steps += 1
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(what) + "\\n")
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

def train(config):
    file = current_task().checkpoint_dir / "epochs.json"
    epochs = json.loads(file.read_text()) if file.exists() else []  # the trial that ran each
    while len(epochs) < 9 and not current_task().should_stop:
        step(["epoch", current_task().index, len(epochs)])
        report(epoch=len(epochs), accuracy=config["x"] * (len(epochs) + 1))
        epochs.append(current_task().index)
        file.with_suffix(".new").write_text(json.dumps(epochs))
        file.with_suffix(".new").replace(file)
    return {"accuracy": config["x"] * len(epochs)}

tell, copy = optuna.Study.tell, run.copy_checkpoint

def told(study, number, *args, **kwargs):
    step(["tells", number])
    tell(study, number, *args, **kwargs)
    step(["told", number])

def copied(*args):
    step(["copies"])
    copy(*args)
    step(["copied"])

optuna.Study.tell, run.copy_checkpoint = told, copied
how = {
    "halving": {"stop": search.halving(max_epochs=9), "num_trials": 9},
    "population": {"stop": search.population(size=8, every=3, max_epochs=9)},
}
with parpool(2, profile="threads", quiet=True) as pool:
    found = pool.search(
        train, {"x": search.uniform(0, 1)}, metric="accuracy", seed=4, run_dir=folder / "run",
        **how[os.environ["HOW"]],
    )
assert found.to_frame()["error"].isna().all(), found.to_frame()["error"].dropna().iloc[0]
trials = [(t.number, t.params["x"], t.state.name) for t in found.study.trials]
parents = {t.number: t.user_attrs.get("raypool_parent") for t in found.study.trials}
kept = [json.loads(file.read_text()) for file in folder.glob("run/items/*/checkpoint/epochs.json")]
values = [epochs for _, epochs in sorted((epochs[-1], epochs) for epochs in kept)]
outcome = {"trials": trials, "parents": parents, "epochs": values, "best": found.best.config}
print(json.dumps(outcome))
"""


def killed_until_done(
    start_python: Callable[..., Any], folder: Path, how: str, steps: int
) -> tuple[Any, int]:
    """Kill the search again and again, after some steps; return its outcome and how often."""
    num_kills = 0
    while True:
        process = start_python(
            SEARCH, FOLDER=str(folder), KILL_AT=str(steps + num_kills % 2), HOW=how
        )
        done = process.finish(300)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        num_kills += 1
        assert num_kills < 60, "it gets on between two kills"
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    told = Counter(number for what, *rest in log if what == "told" for number in rest)
    assert max(told.values()) == 1
    epochs = Counter(tuple(rest) for what, *rest in log if what == "epoch")
    # a kill repeats at most the epoch of each of the two workers
    assert sum(epochs.values()) - len(epochs) <= 2 * num_kills
    return json.loads(done.stdout), num_kills


@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.long), 11])
def test_a_driver_that_is_killed_again_and_again(
    start_python: Callable[..., Any], tmp_path: Path, steps: int
) -> None:
    outcome, num_kills = killed_until_done(start_python, tmp_path, "halving", steps)
    assert num_kills >= (20 if steps == 2 else 3)
    assert [number for number, *_ in outcome["trials"]] == list(range(9))
    assert {state for *_, state in outcome["trials"]} == {"COMPLETE", "PRUNED"}
    assert len({x for _, x, _ in outcome["trials"]}) == 9
    assert outcome["best"]["x"] == max(x for _, x, _ in outcome["trials"])


@pytest.mark.parametrize("steps", [pytest.param(5, marks=pytest.mark.long), 17])
def test_a_population_whose_driver_is_killed_again_and_again(
    start_python: Callable[..., Any], tmp_path: Path, steps: int
) -> None:
    outcome, num_kills = killed_until_done(start_python, tmp_path, "population", steps)
    assert num_kills >= (20 if steps == 5 else 3)
    states = [state for *_, state in outcome["trials"]]
    assert states.count("COMPLETE") == 8
    taken = {int(child): lineage for child, lineage in outcome["parents"].items() if lineage}
    pruned = [number for number, state in enumerate(states) if state == "PRUNED"]
    assert sorted(replaced for _, replaced, _ in taken.values()) == pruned, "each by one other"
    assert sorted(taken) == list(range(8, len(states)))
    for trial, epochs in enumerate(outcome["epochs"]):
        assert states[trial] == "PRUNED" or len(epochs) == 9
        before = []
        if trial in taken:
            parent, _, rung = taken[trial]
            before = outcome["epochs"][parent][: 3 * (rung + 1)]
            assert len(before) == 3 * (rung + 1)
        assert epochs == before + [trial] * (len(epochs) - len(before)), (
            "the parent's, then its own"
        )


def test_the_page_runs(run_python: Callable[..., Any], tmp_path: Path) -> None:
    first, second, _ = blocks_of("docs/search.md", "python")
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{first.code}\n{second.code}")
    assert "<SearchResults of 27 trials: " in done.stdout
    assert "BestTrial(number=" in done.stdout
    assert "complete" in done.stdout
    assert "parent" in done.stdout
    assert (tmp_path / "digits.html").stat().st_size > 100_000


def test_the_page_trains_on_two_workers_per_trial(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    *_, block = blocks_of("docs/search.md", "python")
    code = block.code.replace("parpool(4)", "parpool(4, resources=WorkerResources(gpus=0))")
    done = run_python(f"""
import os, ray
from raypool import WorkerResources
os.chdir({str(tmp_path)!r})
ray.init(address="local", num_cpus=4, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
{code}
ray.shutdown()
""")
    assert "<SearchResults of 9 trials: " in done.stdout
    assert " complete" in done.stdout
    assert "failed" not in done.stdout
