"""A plugin for CPython's own tests of executors: our pools stand where they look for those of
`concurrent.futures`.

In threads ours stands for `ThreadPoolExecutor`, on Ray for `ProcessPoolExecutor` with the start
method "spawn". Only what their modules have imported is exchanged; the standard library stays as it
is for everybody else.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import threading
from concurrent import futures
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import raypool
from tests.suites import stand_ins

SUITE = "test.test_concurrent_futures"

IN_SCRIPT = """
from tests.suites import executors as _executors
_executors.exchange_everywhere()
"""
"""What the scripts that these tests start begin with."""


class ThreadPoolExecutor:
    """Opens one of ours, as the standard one is opened, with its threads under the standard
    name.
    """

    def __new__(
        cls, max_workers: int | None = None, thread_name_prefix: str = "", **initializer: Any
    ) -> Any:
        before = set(threading.enumerate())
        pool = stand_ins.open_pool(max_workers, **initializer)
        pool._threads = {
            thread for thread in set(threading.enumerate()) - before if "worker" in thread.name
        }
        return pool


class ProcessPoolExecutor:
    """Opens one of ours, as the standard one is opened, but with two workers at most; these are
    Ray's, whatever the context.
    """

    def __new__(
        cls, max_workers: int | None = None, mp_context: Any = None, **initializer: Any
    ) -> Any:
        return stand_ins.open_pool(max_workers and min(max_workers, 2), retries=0, **initializer)


def exchanged() -> dict[str, Any]:
    """Return what stands for what.

    Where a worker's death breaks a standard executor for good, only its call is lost here; where
    there is an error of pickle's, ours says what it was that could not be sent.
    """
    if not stand_ins.is_on_ray():
        return {"ThreadPoolExecutor": ThreadPoolExecutor}
    return {
        "ProcessPoolExecutor": ProcessPoolExecutor,
        "BrokenProcessPool": raypool.WorkerLostError,
        "PicklingError": raypool.SerializationError,
    }


def exchange_everywhere() -> None:
    """Let a script get ours from `concurrent.futures`."""
    stand_ins.start()
    vars(futures).update(exchanged())


def exchange_in(module: ModuleType) -> None:
    """Let a module of these tests use ours."""
    ours = exchanged()
    for name in ours.keys() & vars(module).keys():
        setattr(module, name, ours[name])
    if hasattr(module, "futures"):
        standard = {
            name: getattr(futures, name)
            for name in {*futures.__all__, "process", "thread"}
            if hasattr(futures, name)
        }
        module.futures = SimpleNamespace(**standard | ours)
    for mixin, name in {
        "ThreadPoolMixin": "ThreadPoolExecutor",
        "ProcessPoolSpawnMixin": "ProcessPoolExecutor",
    }.items():
        if hasattr(module, mixin) and name in ours:
            getattr(module, mixin).executor_type = ours[name]
    if hasattr(module, "assert_python_ok"):
        run = module.assert_python_ok
        module.assert_python_ok = lambda flag, script: run(flag, IN_SCRIPT + script, **os.environ)


def pytest_configure() -> None:
    stand_ins.start()
    suite = importlib.import_module(SUITE)
    exchange_in(suite)
    for found in pkgutil.iter_modules(getattr(suite, "__path__", [])):
        exchange_in(importlib.import_module(f"{SUITE}.{found.name}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about other executors, or about `Future` alone."""
    prefix = "ProcessPoolSpawn" if stand_ins.is_on_ray() else "ThreadPool"
    ours = [
        item for item in items if item.parent is not None and item.parent.name.startswith(prefix)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours
