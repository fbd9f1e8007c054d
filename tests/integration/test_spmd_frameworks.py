"""Scripts of other frameworks in a pool: the examples, on two CPU workers, come to what one process
comes to.

All share one pool, and with it one warm group: that each leaves it as it was is part of what is
tested.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypool import ParallelPool, WorkerResources, parpool

ROOT = Path(__file__).parents[2]
TORCH_EXAMPLES = ["spmd_ddp", "spmd_fsdp2", "spmd_tensor_parallel", "spmd_pipeline"]

Load = Callable[[str], Any]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where a package is not installed, without importing it here: that is for the
    workers.
    """
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


@pytest.fixture(scope="module")
def pool(ray_session: None, by_value: None) -> Iterator[ParallelPool]:
    """Two workers without a GPU."""
    with parpool(2, resources=WorkerResources(gpus=0), quiet=True) as pool:
        yield pool


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that tensors are the same but for the order in which sums were formed, and that they
    say something.
    """
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    tensors = theirs.values() if isinstance(theirs, dict) else theirs
    assert all(tensor.abs().max() > 1e-4 for tensor in tensors)


def assert_learned(losses: list[float], losses_alone: list[float]) -> None:
    """Check the losses at each step."""
    assert losses == pytest.approx(losses_alone, rel=1e-9)
    assert losses[-1] < losses[0]


# --- torch ----------------------------------------------------------------------------------------


def test_ddp_equals_one_process(pool: ParallelPool, load: Load) -> None:
    example = load("spmd_ddp")
    losses_alone, parameters_alone = example.train_alone(20)
    for losses, parameters in pool.spmd(example.train, 20):
        assert_learned(losses, losses_alone)
        assert_same(parameters, parameters_alone)


def test_fsdp2_equals_one_process(pool: ParallelPool, load: Load) -> None:
    example = load("spmd_fsdp2")
    losses_alone, parameters_alone = example.train_alone(10)
    results = list(pool.spmd(example.train, 10))
    for losses, parameters, _ in results:
        assert_learned(losses, losses_alone)
        assert_same(parameters, parameters_alone)
    total = sum(weights.numel() for weights in parameters_alone)
    held = [held for _, _, held in results]
    assert sum(held) == total
    assert held == pytest.approx([total / 2, total / 2], rel=0.01)


def test_tensor_parallel_equals_one_process(pool: ParallelPool, load: Load) -> None:
    example = load("spmd_tensor_parallel")
    outputs_alone, gradients_alone = example.train_alone()
    for outputs, gradients, held in pool.spmd(example.train):
        assert_same([outputs], [outputs_alone])
        assert_same(gradients, gradients_alone)
        assert held == {
            "up.weight": (32, 16),
            "up.bias": (32,),
            "down.weight": (16, 32),
            "down.bias": (16,),
        }


def test_a_mesh_of_two_dimensions_equals_one_process(pool: ParallelPool, load: Load) -> None:
    """In `pool.train`, on two by two workers of its own."""
    example = load("train_mesh")
    losses_alone, parameters_alone = example.train_alone(10)
    with parpool(4, resources=WorkerResources(gpus=0, cpus=0.5), quiet=True) as four:
        result = four.train(example.train_loop, {"steps": 10}).result(300)
    total = sum(weights.numel() for weights in parameters_alone)
    for held, parameters in result.values:
        assert held < 0.3 * total
        assert_same(parameters, parameters_alone)
    assert losses_alone[-1] < losses_alone[0]


def test_pipeline_equals_one_process(pool: ParallelPool, load: Load) -> None:
    example = load("spmd_pipeline")
    loss_alone, gradients_alone = example.train_alone()
    (no_loss, first), (loss, last) = pool.spmd(example.train)
    assert no_loss is None
    assert loss == pytest.approx(loss_alone, rel=1e-9)
    assert len(first) == len(last)
    assert_same([*first, *last], gradients_alone)


def identity(ctx: Any) -> tuple[int, int]:
    """Return which process and which group this is."""
    return os.getpid(), id(ctx.process_group)


def test_one_group_serves_them_all(
    pool: ParallelPool, load: Load, monkeypatch: Any, capsys: Any
) -> None:
    """Each script as a user runs it, but in this pool: it prints what it says, and the group is the
    same at the end.
    """
    before = list(pool.spmd(identity))
    for name in TORCH_EXAMPLES:
        monkeypatch.setattr(load(name), "parpool", lambda num_workers: nullcontext(pool))
        load(name).main()
        *_, last_line = capsys.readouterr().out.splitlines()
        assert "by " in last_line
        assert float(last_line.split("by ")[1].split(" at most.")[0]) < 1e-9
    assert list(pool.spmd(identity)) == before


@pytest.mark.long
def test_a_script_by_itself(run_python: Any) -> None:
    """As a user runs it: with the Ray that it starts, and warnings are errors."""
    path = ROOT / "examples/spmd_ddp.py"
    done = run_python(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert done.stderr == ""
    assert done.stdout.startswith("raypool: 2 workers on ")
    assert done.stdout.endswith(" at most.\n")


# --- others ---------------------------------------------------------------------------------------


def check_descent(results: Any, alone: Any) -> None:
    """Check the losses and weights that every rank has returned."""
    losses_alone, weights_alone = alone
    for *_, losses, weights in results:
        assert_learned(losses, losses_alone)
        np.testing.assert_allclose(weights, weights_alone, rtol=1e-9)


@needs("tensorflow")
def test_tensorflow_equals_one_process(pool: ParallelPool, load: Load) -> None:
    """Also with the strategy of an earlier call, and with one that is made anew, which finds the
    addresses as they were.
    """
    example = load("spmd_tensorflow")
    for _ in range(2):
        strategies = pool.spmd(example.connect)
        assert list(pool.spmd(lambda _, strategy: strategy.num_replicas_in_sync, strategies)) == [
            2,
            2,
        ]
        for _ in range(2):
            check_descent(pool.spmd(example.train, strategies, 10), example.train_alone(10))
    assert list(pool.spmd(lambda ctx: ctx.all_reduce(1))) == [2, 2]


@needs("jax")
def test_jax_equals_one_process(pool: ParallelPool, load: Load) -> None:
    """Also in the next call: the workers are warm, and JAX connects again."""
    example = load("spmd_jax")
    for _ in range(2):
        results = list(pool.spmd(example.train, 10))
        assert [num_devices for num_devices, *_ in results] == [2, 2]
        check_descent(results, example.train_alone(10))
    assert list(pool.spmd(lambda ctx: ctx.all_reduce(1))) == [2, 2]
