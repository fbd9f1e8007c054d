"""CPython's own tests of `multiprocessing.Pool`, on Ray; those in threads are in
tests/integration/test_cpython_pool.py.

| counted on Python 3.11 to 3.13 | pass | fail as expected | seconds |
|---|---|---|---|
| Ray | 28 | 2 | 60 |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.suites.installed import needs

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), needs("test._test_multiprocessing")]


def test_on_ray(run_suite: Callable[..., Any]) -> None:
    run_suite(
        "pool_cases",
        [str(Path(__file__).with_name("pool_cases.py"))],
        "ray",
        least_passed=25,
        limit_s=600,
        expected={
            "TestErrors::test_unpickleable_result": (
                "a result that the standard pool cannot send, a lambda, arrives here"
            ),
            "TestLifetime::test_pool_worker_lifetime": (
                "it calls private methods of the standard pool"
            ),
        },
        left_out={
            "worker_finalization_via_atexit": (
                "it is about the standard pool, in a process of its own"
            )
        },
        options=["--noconftest", "-o", "python_files=pool_cases.py"],
    )
