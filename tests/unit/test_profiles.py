"""Profiles and resources are checked when they are made, and say what is wrong."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from raypool import InvalidTypeError, InvalidValueError, Profile, Slurm, WorkerResources, parpool
from raypool.cluster.slurm import size_of
from raypool.profile_files import resolve_profile

REFUSED = [
    ({"gpus": [0, 0]}, InvalidValueError, "GPU 0 is listed twice"),
    ({"gpus": [-1]}, InvalidValueError, "GPU's index must be at least 0, not -1"),
    ({"gpus": []}, InvalidValueError, "selects no GPU"),
    ({"gpus": ["0"]}, InvalidTypeError, "GPU's index must be an integer, not '0'"),
    ({"gpus": [True]}, InvalidTypeError, "GPU's index must be an integer, not True"),
    ({"gpus": 3}, InvalidTypeError, "gpus must be a list of GPU indices"),
    ({"gpus": {}}, InvalidValueError, "selects no GPU"),
    ({"gpus": {"lab": []}}, InvalidValueError, "selects no GPU"),
    ({"gpus": {"lab": [1, 1]}}, InvalidValueError, "GPU 1 is listed twice"),
    ({"gpus": {"lab": 1}}, InvalidTypeError, "gpus must be a list of GPU indices"),
    ({"gpus": {3: [0]}}, InvalidTypeError, "contains 3, which is not the name of a machine"),
    (
        {"min_free_memory_bytes": 0},
        InvalidValueError,
        "min_free_memory_bytes must be at least 1, not 0",
    ),
    ({"min_free_memory_bytes": 8.5}, InvalidTypeError, "must be an integer, not 8.5"),
    ({"min_free_memory_bytes": True}, InvalidTypeError, "must be an integer, not True"),
    (
        {"min_free_memory_bytes": "auto"},
        InvalidTypeError,
        "min_free_memory_bytes must be an integer, not 'auto'",
    ),
    (
        {"max_leftover_bytes": "auto"},
        InvalidTypeError,
        "max_leftover_bytes must be an integer, not 'auto'",
    ),
    ({"start_timeout_s": 0}, InvalidValueError, "leaves no time"),
    ({"retries": -1}, InvalidValueError, "retries must be at least 0, not -1"),
    ({"retries": None}, InvalidTypeError, "retries must be an integer, not None"),
    ({"backend": "mpi"}, InvalidValueError, "'mpi' is not one of ray, threads, inline"),
    ({"resources": 2}, InvalidTypeError, "resources must be a WorkerResources"),
    ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, InvalidValueError, "Choose GPUs with gpus="),
    ({"color": "red"}, InvalidTypeError, "has no argument .color."),
    ({"resources": []}, InvalidValueError, "describes no worker"),
    ({"resources": [WorkerResources(), 3]}, InvalidTypeError, "resources contains 3"),
    ({"resources": "gpu"}, InvalidTypeError, "or a list of them, one for each worker"),
    (
        {"resources": {1: WorkerResources()}},
        InvalidTypeError,
        "or a list of them, one for each worker",
    ),
    (
        {"resources": [WorkerResources(gpus=1), WorkerResources(gpus=0.5)], "gpus": [0]},
        InvalidValueError,
        "has 2 kinds of workers with a GPU",
    ),
    (
        {"resources": [WorkerResources(gpus=0)] * 2, "gpus": [0]},
        InvalidValueError,
        "resources.gpus gives each worker 0",
    ),
    ({"setup": "load"}, InvalidTypeError, "setup='load' is not callable"),
    (
        {"setup": lambda config: None},
        InvalidTypeError,
        "setup=<lambda> cannot be called without arguments.*'config'",
    ),
    ({"teardown": 3}, InvalidTypeError, "teardown=3 is not callable"),
    ({"idle_timeout_s": 0}, InvalidValueError, "idle_timeout_s=0 would end workers"),
    ({"idle_timeout_s": "60"}, InvalidTypeError, "idle_timeout_s='60' is not a number of seconds"),
    ({"cancel_grace_s": -1}, InvalidValueError, "cancel_grace_s=-1 is negative"),
    ({"cancel_grace_s": None}, InvalidTypeError, "cancel_grace_s=None is not a number of seconds"),
    ({"start_timeout_s": float("nan")}, InvalidValueError, "leaves no time"),
    ({"address": 7}, InvalidTypeError, "address=7 is not the address"),
    (
        {"address": "http://head:8265"},
        InvalidValueError,
        "must be 'ray://HOST:10001' or 'HOST:6379'",
    ),
    (
        {"address": "ray://head:10001", "gpus": [0]},
        InvalidValueError,
        "GPUs of this machine, which is not a node of ray://head",
    ),
    ({"jobs_address": "127.0.0.1:8265"}, InvalidValueError, "is not a URL"),
    ({"jobs_address": 8265}, InvalidTypeError, "is not a URL"),
    ({"token_file": 7}, InvalidTypeError, "token_file=7 is not the path of a file"),
    ({"working_dir": True}, InvalidTypeError, "working_dir=True is not the path of a folder"),
    ({"tls": {"key": "k"}}, InvalidTypeError, "is not a Tls"),
    ({"slurm": {"nodes": 2}}, InvalidTypeError, "is not a Slurm"),
    ({"slurm": Slurm(), "address": "head:6379"}, InvalidValueError, "requests a new one"),
    ({"slurm": Slurm(), "backend": "threads"}, InvalidValueError, "is this process"),
    ({"packages": "torch"}, InvalidTypeError, "packages must be a list of packages for pip"),
    ({"packages": [""]}, InvalidValueError, "is not a package for pip"),
    ({"packages": [3]}, InvalidTypeError, "packages contains 3, which is not a package for pip"),
    ({"preload": "torch"}, InvalidTypeError, "preload must be a list of modules"),
    ({"quiet": "yes"}, InvalidTypeError, "quiet='yes' is not True or False"),
    (
        {"gpus": [0], "resources": WorkerResources(gpus=2)},
        InvalidValueError,
        "resources.gpus gives each worker 2",
    ),
]


def test_what_cannot_work_is_refused() -> None:
    for changes, error, words in REFUSED:
        with pytest.raises(error, match=words):
            resolve_profile("local", changes)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"gpus_per_node": "a100"}, InvalidTypeError, "must be a number or 'KIND:NUMBER'"),
        ({"sbatch": "--qos=long"}, InvalidTypeError, "sbatch must be a list of options"),
        ({"sbatch": ["qos=long"]}, InvalidValueError, "which is not an option"),
        ({"nodes": 0}, InvalidValueError, "nodes must be at least 1, not 0"),
        ({"time": 1.5}, InvalidTypeError, "must be a time limit"),
        ({"notice_s": 0}, InvalidValueError, "no time to save"),
        ({"notice_s": float("inf")}, InvalidValueError, "no time to save"),
        ({"partition": 3}, InvalidTypeError, "partition=3 is not a string"),
        ({"queue": "gpu"}, InvalidTypeError, "partition"),
    ],
)
def test_what_slurm_cannot_be_asked_is_refused(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Slurm(**fields)


ONE = WorkerResources(gpus=0.5)

SIZES = [
    (Profile(slurm=Slurm(gpus_per_node=4)), (8, 8), (2, 2, None)),
    (Profile(slurm=Slurm(gpus_per_node="a100:4", cpus_per_gpu=8)), (2, 9), (1, 3, 32)),
    (Profile(slurm=Slurm(gpus_per_node=2), resources=ONE), (8, 8), (2, 2, None)),
    (Profile(slurm=Slurm(gpus_per_node=2), workers_per_gpu=3), (7, 7), (2, 2, None)),
    (Profile(slurm=Slurm(gpus_per_node=2, nodes=3)), (None, None), (3, 3, None)),
    (Profile(slurm=Slurm(), resources=WorkerResources(cpus=2)), (8, 8), (1, 1, 16)),
    (Profile(slurm=Slurm(nodes=3)), (10, 10), (3, 3, 4)),
    (Profile(slurm=Slurm(gpus_per_node=1), resources=[ONE] * 3), (3, 3), (2, 2, None)),
]


@pytest.mark.parametrize(("profile", "workers", "size"), SIZES)
def test_the_size_of_an_allocation(
    profile: Profile, workers: tuple[int | None, int | None], size: tuple[int, int, int | None]
) -> None:
    assert size_of(profile, *workers) == size


def test_an_unknown_profile_names_those_that_exist() -> None:
    with pytest.raises(InvalidValueError, match="Choose from: local, threads, inline"):
        parpool(profile="cluster")


def test_a_profile_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="profile must be a name or a Profile, not"):
        parpool(profile=3)  # type: ignore[arg-type]


SHARES = [
    (None, 1),
    (0, 1),
    (1, 1),
    (2, 1),
    (0.5, 2),
    (0.33, 3),
    (0.25, 4),
    (1 / 3, 3),
    (0.167, 6),
    (1 / 7, 7),
]


def test_workers_per_gpu() -> None:
    for gpus, share in SHARES:
        assert WorkerResources(gpus=gpus).workers_per_gpu == share


ODD_PARTS = [
    (0.4, r" 0\.2 of it would lie idle\. .* 0\.5 \(2 on a GPU\) and 0\.333 \(3\)"),
    (0.6, r" 0\.4 of it would lie idle\. .* 1 \(1 on a GPU\) and 0\.5 \(2\)"),
    (0.3, r"0\.333 \(3 on a GPU\) and 0\.25 \(4\)"),
    (0.51, r"does not divide a GPU"),
    (0.00001, "is less than 0.0001"),
]


def test_a_part_that_does_not_divide_a_gpu() -> None:
    for gpus, words in ODD_PARTS:
        with pytest.raises(InvalidValueError, match=words):
            WorkerResources(gpus=gpus)
    with pytest.raises(InvalidValueError, match=r"\(cpus=1e-05\) is less than 0\.0001.* or 0\."):
        WorkerResources(cpus=0.00001)


def test_parts_may_be_rounded() -> None:
    """As one writes them, and as the message proposes them."""
    for share in range(2, 60):
        assert WorkerResources(gpus=1 / share).workers_per_gpu == share
        assert WorkerResources(gpus=float(f"{1 / share:.3g}")).workers_per_gpu == share


def test_resources_that_cannot_be() -> None:
    for bad in [{"gpus": -1}, {"cpus": -0.5}, {"memory_bytes": -1}, {"gpus": 1.5}]:
        with pytest.raises(InvalidValueError):
            WorkerResources(**bad)  # type: ignore[arg-type]


def test_numbers_may_be_numpys() -> None:
    profile = Profile(
        start_timeout_s=np.int64(600),
        idle_timeout_s=np.float32(0.5),
        cancel_grace_s=np.float32(2),
        resources=WorkerResources(gpus=np.float32(0.5)),
        slurm=Slurm(notice_s=np.int64(60)),
    )
    assert profile == Profile(
        start_timeout_s=600,
        idle_timeout_s=0.5,
        cancel_grace_s=2,
        resources=WorkerResources(gpus=0.5),
        slurm=Slurm(notice_s=60),
    )
    times = (profile.start_timeout_s, profile.idle_timeout_s, profile.cancel_grace_s)
    assert {type(time_s) for time_s in times} <= {int, float}, "NumPy's float32 sets no timer"
    with pytest.raises(InvalidTypeError, match="is not a number"):
        Profile(cancel_grace_s=np.bool_(True))  # type: ignore[arg-type]


def test_changes_replace_single_fields() -> None:
    base = Profile(start_timeout_s=5, retries=1)
    changed = resolve_profile(base, {"retries": 7, "gpus": [2, 0]})
    assert (changed.start_timeout_s, changed.retries, changed.gpus) == (5, 7, (2, 0))


def test_functions_that_can_be_called_without_arguments_are_taken() -> None:
    profile = Profile(
        setup=functools.partial(print, "up"), teardown=dict, idle_timeout_s=0.5, cancel_grace_s=0
    )
    assert callable(profile.setup)
    assert profile.teardown is dict


def test_resources_of_each_worker() -> None:
    cpu, gpu = WorkerResources(gpus=0), WorkerResources(gpus=1)
    profile = Profile(resources=[cpu, gpu, cpu], gpus=[2])
    assert profile.listed == (cpu, gpu, cpu)
    assert profile.kinds == (cpu, gpu)
    assert [profile.sized(*asked) for asked in [(None, None), (3, 3), (1, 5)]] == [(3, 3)] * 3
    for asked in [(2, 2), (4, 4), (1, 2), (4, 9)]:
        with pytest.raises(InvalidValueError, match="describes 3 workers"):
            profile.sized(*asked)
    assert Profile().listed == ()
    assert Profile().sized(2, 4) == (2, 4)
    assert resolve_profile(profile, {"resources": gpu}).sized(None, None) == (None, None)


def test_where_jobs_are_handed_in() -> None:
    assert (
        Profile().jobs_url == Profile(address="localhost:6379").jobs_url == "http://127.0.0.1:8265"
    )
    assert (
        Profile(address="ray://head:10001", jobs_address="https://head/ray").jobs_url
        == "https://head/ray"
    )
    with pytest.raises(
        InvalidValueError, match=r"The dashboard for jobs of ray://head:10001 .* set jobs_address"
    ):
        _ = Profile(address="ray://head:10001").jobs_url
