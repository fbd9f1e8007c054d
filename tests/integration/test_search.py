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

folder, kill_at = Path(os.environ["FOLDER"]), int(os.environ["KILL_AT"])
steps, lock = 0, threading.Lock()

def step(what):  # the process dies at a step of any kind: in a trial, before and after a tell
    global steps
    with lock:
        steps += 1
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(what) + "\\n")
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

def train(config):
    file = current_task().checkpoint_dir / "epoch.json"
    epoch = json.loads(file.read_text()) if file.exists() else 0
    while epoch < 9 and not current_task().should_stop:
        step(["epoch", config["x"], epoch])
        report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
        epoch += 1
        file.with_suffix(".new").write_text(json.dumps(epoch))
        file.with_suffix(".new").replace(file)
    return {"accuracy": config["x"] * epoch}

tell = optuna.Study.tell

def told(study, number, *args, **kwargs):
    step(["tells", number])
    tell(study, number, *args, **kwargs)
    step(["told", number])

optuna.Study.tell = told
with parpool(2, profile="threads", quiet=True) as pool:
    found = pool.search(
        train, {"x": search.uniform(0, 1)}, metric="accuracy", num_trials=9, seed=4,
        run_dir=folder / "run", stop=search.halving(max_epochs=9),
    )
assert found.to_frame()["error"].isna().all(), found.to_frame()["error"].dropna().iloc[0]
trials = [(t.number, t.params["x"], t.state.name) for t in found.study.trials]
print(json.dumps({"trials": trials, "best": found.best.config, "epochs": found.best.score}))
"""


@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.long), 11])
def test_a_driver_that_is_killed_again_and_again(
    start_python: Callable[..., Any], tmp_path: Path, steps: int
) -> None:
    num_kills = 0
    while True:
        process = start_python(SEARCH, FOLDER=str(tmp_path), KILL_AT=str(steps + num_kills % 2))
        done = process.finish(300)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        num_kills += 1
        assert num_kills < 60, "it gets on between two kills"
    assert num_kills >= (20 if steps == 2 else 3)
    outcome = json.loads(done.stdout)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [number for number, *_ in outcome["trials"]] == list(range(9))
    assert {state for *_, state in outcome["trials"]} == {"COMPLETE", "PRUNED"}
    assert len({x for _, x, _ in outcome["trials"]}) == 9
    told = Counter(number for what, number, *_ in log if what == "told")
    assert max(told.values()) == 1
    epochs = Counter((x, epoch) for what, x, *rest in log if what == "epoch" for epoch in rest)
    # a kill repeats at most the epoch of each of the two workers
    assert sum(epochs.values()) - len(epochs) <= 2 * num_kills
    assert outcome["best"]["x"] == max(x for _, x, _ in outcome["trials"])


def test_the_page_runs(run_python: Callable[..., Any], tmp_path: Path) -> None:
    (block,) = blocks_of("docs/search.md", "python")
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{block.code}")
    assert "<SearchResults of 27 trials: " in done.stdout
    assert "BestTrial(number=" in done.stdout
    assert "complete" in done.stdout
    assert (tmp_path / "digits.html").stat().st_size > 100_000
