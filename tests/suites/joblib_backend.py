"""A plugin for joblib's own tests of `Parallel`: our backend stands where they look for loky, and
is the default as that is.

The tests that are about joblib's other backends are left out.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.suites import stand_ins
from tests.suites.recorder import note

SUITE = "joblib.test.test_parallel"
OTHERS = {"multiprocessing", "sequential", "threading", "spawn"}
"""Backends that are joblib's own, by name."""

IN_SCRIPT = """
import runpy
from tests.suites import joblib_backend, stand_ins
joblib_backend.exchange()
stand_ins.start()
pool = stand_ins.open_pool(2)
"""
"""What the scripts that these tests start begin with."""


def exchange() -> Any:
    """Put our backend in place of loky's; return its class."""
    from joblib.parallel import BACKENDS

    from raypool.interop.joblib_backend import RaypoolBackend

    BACKENDS["loky"] = RaypoolBackend
    return RaypoolBackend


def run_script(command: list[str], timeout: float | None = None, **expected: Any) -> None:
    """Run a script of theirs as they do, with our backend, and in time for a Ray of its own to come
    up.
    """
    from joblib.testing import check_subprocess_call

    _, first, *rest = command
    script = rest[0] if first == "-c" else f"runpy.run_path({first!r}, run_name='__main__')"
    check_subprocess_call([sys.executable, "-c", IN_SCRIPT + script], timeout=300, **expected)


def pytest_configure(config: pytest.Config) -> None:
    stand_ins.start()
    # first: these tests ask how many workers there are when they are imported
    config.stash[POOL] = stand_ins.open_pool(4)
    backend = exchange()
    suite = importlib.import_module(SUITE)
    suite.LokyBackend = backend
    suite.check_subprocess_call = run_script


POOL = pytest.StashKey[Any]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if is_about_another(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def is_about_another(item: pytest.Item) -> bool:
    """Whether a test is about a backend, and not about ours."""
    from joblib.parallel import BACKENDS

    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    named = [value for name, value in item.callspec.params.items() if "backend" in name]
    if not named:
        return False
    if any(value in ("multiprocessing", "spawn") for value in named):
        return True
    return not any(value in (None, "loky") or type(value) is BACKENDS["loky"] for value in named)


def pytest_sessionfinish(session: pytest.Session) -> None:
    pool = session.config.stash[POOL]
    note(tasks=pool.statistics().finished)
    pool.shutdown(cancel_futures=True)
