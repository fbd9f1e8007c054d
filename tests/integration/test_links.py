"""NCCL's settings are in every worker before NCCL starts (scenario 43)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from raypool import ParallelPool, WorkerResources, parpool

pytestmark = pytest.mark.usefixtures("shared_pool")

SETTINGS = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "WARN"}


def note_environment() -> None:
    sys.raypool_test_seen = dict(os.environ)


def test_they_are_there_from_the_beginning() -> None:
    """Also in a worker that replaces another: NCCL reads them when it starts."""
    settings = {**SETTINGS, "NCCL_IB_DISABLE": "0"}
    with parpool(
        2,
        env=SETTINGS,
        fast_multinode=True,
        setup=note_environment,
        resources=WorkerResources(gpus=0),
        quiet=True,
    ) as pool:
        pool.options(retries=0, worker=0).parfeval(os._exit, 3).exception(300)
        seen = pool.parfeval_on_all(lambda: [sys.raypool_test_seen, dict(os.environ)]).result(300)
        in_group = pool.spmd(lambda context: {name: os.environ[name] for name in settings})
        assert list(in_group) == [settings] * 2
    for environ in (environ for both in seen for environ in both):
        assert environ.items() >= settings.items()


BEFORE_TORCH = """
import importlib.abc, json, os, sys
from raypool import parpool

def watch_for_torch():
    seen = {"at_setup": dict(os.environ), "torch_was_there": "torch" in sys.modules}

    class Watch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "torch":
                seen.setdefault("at_import", dict(os.environ))

    sys.meta_path.insert(0, Watch())
    sys.raypool_test_seen = seen

def import_torch():
    import torch
    return sys.raypool_test_seen

settings = json.loads(os.environ["SETTINGS"])
with parpool(2, env=settings, setup=watch_for_torch, fork_server=False, quiet=True) as pool:
    pool.options(retries=0, worker=0).parfeval(os._exit, 3).exception(300)
    for seen in pool.parfeval_on_all(import_torch).result(300):
        assert not seen["torch_was_there"]
        assert all(seen[when].items() >= settings.items() for when in ("at_setup", "at_import"))
"""


def test_without_a_fork_server_they_are_there_before_torch_is(run_python: Any) -> None:
    run_python(BEFORE_TORCH, SETTINGS=json.dumps(SETTINGS))


def test_nobody_is_told_anything_unasked(pool: ParallelPool) -> None:
    names = pool.parfeval(lambda: [name for name in os.environ if name.startswith("NCCL_")]).result(
        300
    )
    assert names == [name for name in os.environ if name.startswith("NCCL_")]
