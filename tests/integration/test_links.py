"""NCCL's settings are in every worker before CUDA starts (scenario 43)."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from raypool import ParallelPool, WorkerResources, parpool

pytestmark = pytest.mark.usefixtures("shared_pool")

SETTINGS = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "WARN"}


def watch_for_torch() -> None:
    """Note what the environment is when torch is first asked for."""
    import importlib.abc

    seen: dict[str, Any] = {"at_setup": dict(os.environ), "torch_was_there": "torch" in sys.modules}

    class Watch(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "torch":
                seen.setdefault("at_import", dict(os.environ))

    sys.meta_path.insert(0, Watch())
    sys.raypool_test_seen = seen


def import_torch() -> dict[str, Any]:
    import torch

    assert torch is not None
    seen: dict[str, Any] = sys.raypool_test_seen
    return {**seen, "in_task": dict(os.environ)}


def test_they_are_there_before_torch_is() -> None:
    """Also in a worker that replaces another."""
    settings = {**SETTINGS, "NCCL_IB_DISABLE": "0"}
    with parpool(
        2,
        env=SETTINGS,
        fast_multinode=True,
        setup=watch_for_torch,
        resources=WorkerResources(gpus=0),
        quiet=True,
    ) as pool:
        pool.options(retries=0, worker=0).parfeval(os._exit, 3).exception(300)
        reports = pool.parfeval_on_all(import_torch).result(300)
        in_group = pool.spmd(lambda context: {name: os.environ[name] for name in settings})
        assert list(in_group) == [settings] * 2
    for report in reports:
        assert not report["torch_was_there"]
        for when in ("at_setup", "at_import", "in_task"):
            assert report[when].items() >= settings.items(), when


def test_nobody_is_told_anything_unasked(pool: ParallelPool) -> None:
    names = pool.parfeval(lambda: [name for name in os.environ if name.startswith("NCCL_")]).result(
        300
    )
    assert names == [name for name in os.environ if name.startswith("NCCL_")]
