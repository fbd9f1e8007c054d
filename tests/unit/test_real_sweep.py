"""The sweep of the benchmarks is the demo's, and whoever comes to other scores is found, whatever
the turn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypool.cli import demo

pytestmark = pytest.mark.long


def test_the_networks_are_those_of_the_demo(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = benchmark_of("sweeps.digits")
    assert digits.EPOCHS == demo.EPOCHS
    wanted = {
        (config["width"], config["lr"]) for config in demo.CONFIGS if config["network"] == "mlp"
    }
    assert {(config["width"], config["lr"]) for config in digits.CONFIGS} == wanted
    assert len({config["seed"] for config in digits.CONFIGS}) == len(digits.CONFIGS) == 24
    threads = torch.get_num_threads()
    for module in (digits, demo):
        monkeypatch.setattr(module, "EPOCHS", 3)
    monkeypatch.setattr(demo.current_task().__class__, "device", torch.device("cpu"))
    config = digits.CONFIGS[12]
    try:
        mine = digits.train(config)
        torch.manual_seed(config["seed"])
        theirs = demo.train({"network": "mlp", **config}, demo.load_digits())
    finally:
        torch.set_num_threads(threads)
    assert mine == theirs["accuracy"]
    assert theirs["parameters"] == sum(
        weights.numel() for weights in digits.network(config["width"]).parameters()
    )


def test_other_scores_in_any_turn_are_found(benchmark_of: Any) -> None:
    sweep, wrong = benchmark_of("bench_sweep"), benchmark_of("contest").WrongAnswersError
    same = {"raypool": [[0.9, 0.8], [0.9, 0.8]], "joblib": [[0.9, 0.8]]}
    sweep.check_same(same)
    for name, turns in (
        ("joblib", [[0.8, 0.9], [0.9, 0.8]]),
        ("raypool", [[0.9, 0.8], [0.9, 0.7]]),
    ):
        with pytest.raises(wrong, match=rf"^other scores .*: {name}, turn \d$"):
            sweep.check_same({**same, name: turns})


def test_a_store_of_which_ray_tells_nothing_is_not_called_empty(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    memory = benchmark_of("bench_memory")
    monkeypatch.setattr(ray, "put", lambda _: object())
    monkeypatch.setattr(memory, "used_bytes", lambda: 0)
    monkeypatch.setattr(memory, "WITHIN_S", 0.0)
    with pytest.raises(memory.StaleFiguresError, match="what is left is not known"):
        memory.until_empty(0)
