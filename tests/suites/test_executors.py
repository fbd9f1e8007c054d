"""CPython's own tests of executors (`test.test_concurrent_futures`), of which a pool is one.

| counted on Python 3.11 and 3.13 | pass | fail as expected | seconds |
|---|---|---|---|
| threads | 36 (3.11), 37 (3.13) | 7 | 44 |
| Ray | 20 (3.11), 23 (3.13) | 13 | 210 |

A Python that has come without these tests takes those that `PYTHONPATH` leads to: a folder with the
whole package `test`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.suites.installed import needs

SUITE = "test.test_concurrent_futures"
DEADLOCK = "ProcessPoolSpawnExecutorDeadlockTest"


pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), needs(SUITE)]


def test_in_threads(run_suite: Callable[..., Any]) -> None:
    run_suite(
        "executors",
        [SUITE],
        "threads",
        least_passed=35,
        limit_s=600,
        expected={
            "ThreadPoolFailingInitializerTest::test_initializer": (
                "parpool raises it, and not the first result"
            ),
            "ThreadPoolExecutorTest::test_default_workers": (
                "there is one worker for each GPU, or core"
            ),
            "ThreadPoolExecutorTest::test_idle_thread_reuse": (
                "all workers are started with the pool"
            ),
            "ThreadPoolShutdownTest::test_thread_names_assigned": (
                "parpool gives threads no name of the caller's"
            ),
            "ThreadPoolShutdownTest::test_thread_names_default": "threads have names of ours",
            "ThreadPoolExecutorTest::test_max_workers_negative": (
                "parpool calls the number num_workers, and so does its message"
            ),
            "ThreadPoolShutdownTest::test_submit_after_interpreter_shutdown": (
                "it is a PoolClosedError, which is a RuntimeError"
            ),
        },
        either=dict.fromkeys(
            [
                "ThreadPoolExecutorTest::test_map_timeout",
                "ThreadPoolWaitTests::test_first_completed",
                "ThreadPoolWaitTests::test_first_exception_some_already_complete",
                "ThreadPoolWaitTests::test_timeout",
            ],
            "it expects a thread to begin within so many seconds",
        ),
        left_out={
            "threads_terminate": "it counts threads, five instead of three, and hangs when it fails"
        },
    )


def test_on_ray(run_suite: Callable[..., Any]) -> None:
    """What is about processes; what is about futures is the same in threads."""
    run_suite(
        "executors",
        [SUITE],
        "ray",
        least_passed=20,
        limit_s=1500,
        expected={
            "ProcessPoolSpawnFailingInitializerTest::test_initializer": (
                "their log queue cannot travel to Ray's workers"
            ),
            "ProcessPoolSpawnProcessPoolExecutorTest::test_max_workers_negative": (
                "parpool calls the number num_workers"
            ),
            "ProcessPoolSpawnProcessPoolExecutorTest::test_ressources_gced_in_workers": (
                "workers lack a Manager's key"
            ),
            "ProcessPoolSpawnProcessPoolExecutorTest::test_traceback": (
                "the remote traceback is of a class of ours"
            ),
            "ProcessPoolSpawnProcessPoolShutdownTest::test_interpreter_shutdown": (
                "what workers print goes to Ray's files here"
            ),
            "ProcessPoolSpawnProcessPoolShutdownTest::test_submit_after_interpreter_shutdown": (
                "it is a PoolClosedError"
            ),
            f"{DEADLOCK}::test_error_at_task_pickle": (
                "what cannot be sent fails at the call, and not with the result"
            ),
            f"{DEADLOCK}::test_error_at_task_unpickle": (
                "the error is raised as itself, and the worker goes on"
            ),
            f"{DEADLOCK}::test_error_during_result_unpickle_in_result_handler": (
                "it is a SerializationError; the pool goes on"
            ),
            f"{DEADLOCK}::test_exit_during_result_unpickle_in_result_handler": (
                "it is a SerializationError; the pool goes on"
            ),
            f"{DEADLOCK}::test_exit_during_func_exec_on_worker": (
                "to exit ends the worker, which is replaced"
            ),
            f"{DEADLOCK}::test_exit_during_result_pickle_on_worker": (
                "to exit ends the worker, which is replaced"
            ),
            f"{DEADLOCK}::test_shutdown_deadlock_pickle": "it looks at private fields",
        },
        left_out={
            "Wait": "it is about futures",
            "AsCompleted": "it is about futures",
            "processes_terminate": "it counts processes in private fields",
            "context_manager_shutdown": "it looks at processes in private fields",
            "del_shutdown": "it looks at private fields",
            "shutdown_no_wait": "it looks at private fields",
            "idle_process_reuse": "it counts processes in private fields",
            "killed_child": "it takes the process to kill from private fields",
            "saturation": "it counts processes in private fields",
            "max_tasks": "there is no max_tasks_per_child, but fresh_process",
            "max_workers_too_large": "it is about Windows",
            "hang_gh83386": "the standard executor hangs",
            "python_finalization_error": "it exchanges private functions of threading",
        },
    )
