"""Every exception that Ray can raise says something about the worker, by one table."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ray import exceptions

from raypool import LossReason
from raypool.backends.ray.calls import RAY_FAILURES, loss_reason, loss_text

pytestmark = pytest.mark.quick

PUBLIC = sorted(
    (
        cls
        for name, cls in inspect.getmembers(exceptions, inspect.isclass)
        if not name.startswith("_")
    ),
    key=lambda cls: cls.__name__,
)
RAY_ERRORS = [cls for cls in PUBLIC if issubclass(cls, exceptions.RayError)]


def bare(cls: type[BaseException]) -> BaseException:
    """Make one without its constructor, which differs from class to class."""
    return cls.__new__(cls)


def test_every_public_exception_has_a_reason() -> None:
    assert all(isinstance(loss_reason(bare(cls)), LossReason) for cls in RAY_ERRORS)


def test_the_reasons_that_matter() -> None:
    reasons = {
        "ActorDiedError": LossReason.EXIT,
        "ActorUnavailableError": LossReason.NODE,
        "OutOfMemoryError": LossReason.OUT_OF_MEMORY,
        "NodeDiedError": LossReason.NODE,
        "WorkerCrashedError": LossReason.EXIT,
        "RuntimeEnvSetupError": LossReason.START,
        "ActorUnschedulableError": LossReason.START,
        "OwnerDiedError": LossReason.NODE,
        "ObjectReconstructionFailedError": LossReason.NODE,
        "RayTaskError": LossReason.UNKNOWN,
        "RaySystemError": LossReason.UNKNOWN,
    }
    assert {name: loss_reason(bare(getattr(exceptions, name))) for name in reasons} == reasons


def test_the_table_names_only_what_is_there() -> None:
    assert set(RAY_FAILURES) <= set(PUBLIC)
    assert len(RAY_ERRORS) > 30, "Ray's exceptions have moved"


def test_a_preempted_node_is_told_apart() -> None:
    error = bare(exceptions.ActorDiedError)
    error._preempted = True  # type: ignore[attr-defined]
    assert loss_reason(error) is LossReason.PREEMPTED


def test_an_actor_that_has_died_with_its_node() -> None:
    words = (
        "The actor died unexpectedly before finishing this task.\n\tpid: 7\nThe actor died because"
        " its node has died. Node Id: 7e"
    )
    assert loss_reason(exceptions.RayActorError("7", words)) is LossReason.EXIT
    error = bare(exceptions.ActorDiedError)
    error.error_msg = words  # type: ignore[attr-defined]
    assert str(error) == words
    assert loss_reason(error) is LossReason.NODE


def test_what_ray_says_is_put_shortly() -> None:
    meanings = {
        "The actor died ... \nThe actor died because its node has died. Node Id: 7e": (
            "its node has died"
        ),
        "... Worker exits with an exit code 3.": "its process ended with exit code 3",
        "... connection error code 2. End of file. ...": "its process was killed or crashed",
        "Something else.\nMore.": "Something else",
    }
    assert {said: loss_text(RuntimeError(said)) for said in meanings} == meanings


@pytest.mark.ci
def test_why_a_worker_has_died_is_known_however_late_ray_hears_of_it(run_python: Any) -> None:
    """Its control store may stand still on a busy machine: the machine of the worker has not gone
    because of that.
    """
    run_python("""
        import os, signal, time
        import psutil
        from raypool import LossReason, parpool

        with parpool(1, quiet=True, start_timeout_s=300) as pool:
            future = pool.options(retries=0).parfeval(time.sleep, 600)
            while not future.running():
                time.sleep(0.01)
            ours = psutil.Process().children(recursive=True)
            [store] = [process for process in ours if process.name() == "gcs_server"]
            store.suspend()
            os.kill(pool.workers[0].pid, signal.SIGKILL)
            time.sleep(3)
            store.resume()
            error = future.exception(300)
            assert error.reason is LossReason.EXIT, error
        """)
