"""Checkpoints where machines do not see the same folders, and a real training that goes on after it
was killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# HOME is a path by which every process sees another folder: the driver's agent its own, a worker
# the one that it has gone to.
ELSEWHERE = """
    import os, platform
    from pathlib import Path
    from raypool.backends.ray.session import ENVIRONMENT, make_token
    os.environ.update(ENVIRONMENT)
    make_token()
    import ray
    from ray.cluster_utils import Cluster
    from raypool import InvalidValueError, WorkerResources, current_task, load_checkpoint, parpool, save_checkpoint

    os.chdir(os.environ["HERE"])
    HOME = "/proc/self/cwd/" + os.environ["NAME"]

    def go_elsewhere():
        os.chdir(os.environ["ELSEWHERE"])

    def train():
        import torch
        state = load_checkpoint() or {"step": 0, "weights": torch.zeros(2)}
        save_checkpoint({"step": state["step"] + 1, "weights": state["weights"] + 1})
        (current_task().checkpoint_dir / "last.txt").write_text(str(state["step"]))
        if state["step"] < 2:
            os._exit(1)
        return state["step"], str(current_task().checkpoint_dir), sorted(os.listdir(current_task().checkpoint_dir))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False)
        kind = WorkerResources(gpus=0)
        with parpool(1, address=cluster.address, resources=kind, setup=go_elsewhere, quiet=True) as pool:
            try:
                pool.options(checkpoints=HOME).parfeval(train).result(300)
            except InvalidValueError as error:
                for part in (HOME, platform.node(), "Use a folder that all machines share, or a URL"):
                    assert part in str(error), error
            else:
                raise AssertionError("it has begun without its checkpoints")
            assert not os.listdir(os.environ["ELSEWHERE"])
            view = pool.options(checkpoints=Path(os.environ["HERE"], "url").as_uri(), retries=2)
            step, folder, files = view.parfeval(train).result(300)
            assert (step, files) == (2, ["checkpoint.pt", "last.txt"])
            assert view.parfeval(train).result(300)[0] == 3
            assert not Path(folder).exists()
            (kept,) = Path(os.environ["HERE"]).rglob("checkpoint.pt")
            assert load_checkpoint(kept)["weights"].tolist() == [4, 4]
            assert not list(Path(os.environ["HERE"]).rglob("*.partial"))
        print("done")
    finally:
        ray.shutdown()
        cluster.shutdown()
"""


def test_a_machine_that_does_not_see_the_folder_says_so_and_a_url_is_seen(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    assert (
        "done"
        in run_python(ELSEWHERE, NAME="kept", HERE=str(here), ELSEWHERE=str(elsewhere)).stdout
    )


TRAINING = """
    import os, time
    import torch
    from raypool import current_task, load_checkpoint, parpool, save_checkpoint

    def train(epochs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        data = torch.randn(64, 4)
        first = 0
        if (state := load_checkpoint()) is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            first = state["epoch"] + 1
        for epoch in range(first, epochs):
            for batch in data[torch.randperm(64)].split(16):
                optimizer.zero_grad()
                (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean().backward()
                optimizer.step()
            save_checkpoint(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                    "epoch": epoch,
                }
            )
            print("epoch", epoch, flush=True)
            if epoch == int(os.environ.get("IS_KILLED_BY", epochs)):
                time.sleep(600)
        return {name: value.tolist() for name, value in model.state_dict().items()}

    with parpool(1, profile="threads", quiet=True) as pool:
        print(pool.options(checkpoints=os.environ["KEPT"]).parfeval(train, int(os.environ["EPOCHS"])).result())
"""


def test_a_training_that_is_killed_and_goes_on_gives_the_same_weights(
    start_python: Callable[..., Any], run_python: Callable[..., Any], tmp_path: Path
) -> None:
    whole = run_python(TRAINING, KEPT=str(tmp_path / "whole"), EPOCHS="60").stdout.splitlines()
    # it is killed somewhere from 20 on, and waits for that at 40
    killed = start_python(TRAINING, KEPT=str(tmp_path / "killed"), EPOCHS="60", IS_KILLED_BY="40")
    for line in killed.process.stdout:
        if line.startswith("epoch 20"):
            os.kill(killed.pid, signal.SIGKILL)
    resumed = run_python(TRAINING, KEPT=str(tmp_path / "killed"), EPOCHS="60").stdout.splitlines()
    assert 0 < sum(line.startswith("epoch") for line in resumed) < 60
    assert resumed[-1] == whole[-1]
