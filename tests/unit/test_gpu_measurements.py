"""What runs only where there is a GPU is tried here on the CPU: the record of the tests, and the
parts of the benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raypool import parpool
from raypool.gpus.nvml import NvmlInventory

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: on busy cores two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- make test-gpu --------------------------------------------------------------------------------

TESTS = """
    import pytest

    def test_good():
        pass

    @pytest.mark.parametrize("number", [1, 2])
    def test_bad(number):
        assert number == 1, "it is not 1"

    def test_elsewhere():
        pytest.skip("needs two GPUs")

    @pytest.fixture
    def broken():
        raise OSError("no card")

    def test_broken(broken):
        pass
"""


def test_the_record_says_how_each_test_went(benchmark_of: Any, tmp_path: Path) -> None:
    gpu_tests = benchmark_of("gpu_tests")
    (tmp_path / "test_it.py").write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    command = (
        sys.executable,
        "-m",
        "pytest",
        "test_it.py",
        "--junitxml=report.xml",
        "-p",
        "no:cacheprovider",
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=500)
    tests = gpu_tests.outcomes(tmp_path / "report.xml")
    assert {test["test"].rpartition(".")[2]: test["outcome"] for test in tests} == {
        "test_good": "passed",
        "test_bad[1]": "passed",
        "test_bad[2]": "failed",
        "test_elsewhere": "skipped",
        "test_broken": "error",
    }
    reasons = {test["outcome"]: test.get("reason", "") for test in tests}
    assert "it is not 1" in reasons["failed"]
    assert "needs two GPUs" in reasons["skipped"]
    assert "no card" in reasons["error"]
    assert all(test["duration_s"] >= 0 for test in tests)
    assert gpu_tests.summary(tests) == "2 passed, 1 failed, 1 error, 1 skipped"

    described = {"gpus": [{"name": "NVIDIA H200"}], "driver": "575.1"}
    path = gpu_tests.keep(tmp_path / "results", described, done.returncode, tests)
    assert path.name == "tests_on_nvidia_h200.json"
    assert json.loads(path.read_text()) == {"machine": described, "exit_status": 1, "tests": tests}


def test_what_it_ran_on_is_described(benchmark_of: Any) -> None:
    machine = benchmark_of("machine")
    described = {**machine.machine(), **machine.cards()}
    assert {
        "date",
        "commit",
        "driver",
        "cuda",
        "gpus",
        "torch",
        "ray",
        "raypool",
        "python",
        "system",
        "cores",
    } <= set(described)
    assert len(described["gpus"]) == len(NvmlInventory().devices())
    json.dumps(described)


@pytest.mark.skipif(bool(NvmlInventory().devices()), reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "said"),
    [("benchmarks.gpu_tests", "No test was run"), ("benchmarks gpu", "Nothing was measured")],
)
def test_without_a_gpu_it_says_so_and_fails(command: str, said: str) -> None:
    """A machine whose driver is broken must not look as if all were well."""
    whole = [sys.executable, "-m", *command.split()]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 1
    assert "There is no GPU here" in done.stderr
    assert said in done.stderr


def test_all_tests_of_gpus_are_marked() -> None:
    """Those are what `make test-gpu` runs."""
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert "pytest.mark.gpu" in path.read_text(), path.name


# --- make bench-gpu -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MLP", "small CNN"])
def test_the_small_trainings_learn(one_thread: None, benchmark_of: Any, name: str) -> None:
    before, after, _ = benchmark_of("small_trainings").train(0, name, steps=12)
    assert after < 0.9 * before


def test_logs_are_of_the_same_training(one_thread: None, benchmark_of: Any) -> None:
    """Each kind of log is of the same losses, so that what is compared is the log."""
    small = benchmark_of("small_trainings")
    with parpool(1, profile="threads", quiet=True) as pool:
        item, buffer = (pool.parfeval(way, "MLP", 12) for way in (small.by_item, small.by_buffer))
        assert min(item.result(), buffer.result()) > 0
        assert buffer.metrics["loss"].to_list() == item.metrics["loss"].to_list()
        assert buffer.metrics["step"].to_list() == list(range(12))


def test_transfers_are_timed(benchmark_of: Any) -> None:
    small = benchmark_of("small_trainings")
    for kind in ("pageable", "pinned", "through pinned"):
        assert small.transfer_us(2**20, kind, "meta") > 0


def test_the_table_says_what_several_at_once_are_worth(one_thread: None, benchmark_of: Any) -> None:
    bench = benchmark_of("bench_gpu")
    lines = bench.fillings({"profile": "threads"}, together=(1, 2), rounds=1, steps=2)
    assert [line.what for line in lines] == [
        *("MLP, one after another", "MLP, 2 at a time", "MLP, the best of these: 2 at a time"),
        *(
            "small CNN, one after another",
            "small CNN, 2 at a time",
            "small CNN, the best of these: 2 at a time",
        ),
    ], "where MPS does not start there is no line about it"
    assert [line.target for line in lines] == [None, None, 2, None, None, 2]
    assert all(line.values and line.values[0] > 0 for line in lines)
    assert {line.area for line in lines} == {
        f"8 small trainings on one GPU, {os.cpu_count()} cores"
    }


def test_the_best_is_held_against_the_target(benchmark_of: Any) -> None:
    bench = benchmark_of("bench_gpu")
    measured = {
        (1, False, "MLP"): [(800.0, 2**20), (820.0, 2**20)],
        (2, False, "MLP"): [(500.0, 2**20), (510.0, 2**20)],
        (8, False, "MLP"): [(600.0, 2**20), (610.0, 2**20)],
        (8, True, "MLP"): [(200.0, 2**21), (205.0, 2**20)],
    }
    *_, best = lines = bench.told("MLP", measured, alone=1)
    assert best.what == "MLP, the best of these: 8 at a time, MPS"
    assert best.ratios() == [4.0, 4.0]
    assert best.is_met() is True
    assert lines[-2].note == "2 MiB each"


def test_it_runs_on_workers_of_ray(ray_session: None, benchmark_of: Any) -> None:
    from ray import cloudpickle

    small, bench = benchmark_of("small_trainings"), benchmark_of("bench_gpu")
    cloudpickle.register_pickle_by_value(small)
    try:
        lines = bench.fillings({}, together=(1, 2), rounds=1, steps=3)
        assert len(lines) == 6
        with parpool(1, quiet=True) as pool:
            assert len(bench.logs(pool, steps=5, rounds=1)) == 4
            assert len(bench.transfers(pool, sizes=(2**20,), rounds=1)) == 2
    finally:
        cloudpickle.unregister_pickle_by_value(small)
