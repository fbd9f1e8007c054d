"""joblib's own tests of `Parallel` (`joblib.test.test_parallel`), with our backend in the place of
loky, and as the default.

| counted with joblib 1.6, Python 3.11 to 3.13 | pass | fail as expected | seconds |
|---|---|---|---|
| threads | 214 | 24 | 50 |
| Ray (3.11 only) | 236 | 44 | 100 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.suites.installed import needs

SUITE = "joblib.test.test_parallel"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), needs(SUITE)]

ALL_WORKERS = "all workers are used where n_jobs is not said"
MANAGER = "workers lack the key of a Manager's proxies"
NO_FILES = "joblib's files in memory are not used"
PRIVATE = "it looks at private fields of joblib's backends"
THREADS = "workers that are threads share memory, so that prefer and require have them too"

EXPECTED = {
    "test_backend_batch_statistics_reset": PRIVATE,
    "test_error_capture": PRIVATE,
    "test_auto_memmap_on_arrays_from_generator": NO_FILES,
    "test_memmapping_leaks": NO_FILES,
    "test_effective_n_jobs_None[None-parallel_backend]": ALL_WORKERS,
    "test_effective_n_jobs_None[None-parallel_config]": ALL_WORKERS,
    "test_nested_backend_in_sequential": ALL_WORKERS,
    "test_multiple_generator_call_separated_gc": (
        "two calls share a pool, of which loky lets the second fail"
    ),
    "test_nested_parallel_warnings[threading-loky-True]": "ours runs in a thread without a warning",
    "test_nested_parallelism_limit": "our backend has another name",
    "test_parallel_pickling": "threads pickle nothing, and on Ray it is a SerializationError",
    "test_parallel_with_interactively_defined_bound_method_loky": (
        "it looks for the names of loky's processes in the log"
    ),
}

EITHER = dict.fromkeys(
    ["test_abort_backend", "test_multiple_generator_call", "test_multiple_generator_call_managed"],
    "it may take so many seconds and no more",
)


def test_in_threads(run_suite: Callable[..., Any]) -> None:
    run = run_suite(
        "joblib_backend",
        [SUITE],
        "threads",
        least_passed=200,
        limit_s=800,
        expected=EXPECTED
        | {
            "test_backend_hinting_and_constraints": THREADS,
            "test_invalid_backend_hinting_and_constraints": THREADS,
        },
        either=EITHER,
        left_out={
            "threadpool_limitation": "it is about the native threads of processes",
            "initializer": "it is about processes",
        },
    )
    assert run.notes["tasks"] > 1000


def test_on_ray(run_suite: Callable[..., Any]) -> None:
    run = run_suite(
        "joblib_backend",
        [SUITE],
        "ray",
        least_passed=200,
        limit_s=1500,
        expected=EXPECTED
        | {
            "test_initializer_not_reused": MANAGER,
            "test_initializer_reused": MANAGER,
            "test_threadpool_limitation_in_child_override": (
                "workers have the environment that they were started with"
            ),
        },
        either=EITHER,
    )
    assert run.notes["tasks"] > 1000
