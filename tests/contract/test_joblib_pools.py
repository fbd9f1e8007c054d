"""The pools that joblib's backend opens for itself: how large they are, who uses them, and when
they end.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import joblib
import pytest
from joblib import Parallel, delayed, parallel_config

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    ResourceError,
    WorkerResources,
    current_task,
    gcp,
    parpool,
    register_joblib,
)
from raypool.engine.engine import _engines

in_this_process = pytest.mark.parametrize("profile", ["threads", "inline"])


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_joblib()


@pytest.fixture(autouse=True)
def nobody_is_warned() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def square(x: int) -> int:
    return x * x


def opened_by(config: dict[str, Any]) -> ParallelPool:
    """Return the pool that the backend of a block has opened."""
    pool = config["backend"]._source._opened
    assert isinstance(pool, ParallelPool)
    return pool


def num_open() -> int:
    gc.collect()  # what was left in cycles is no pool that is open
    return sum(not engine.is_over for engine in _engines)


def meet(num_tasks: int, n_jobs: int, **settings: Any) -> list[int]:
    """Let so many tasks wait for each other, so that each needs a worker; return the numbers of the
    workers.
    """
    barrier = threading.Barrier(num_tasks)

    def work() -> int:
        barrier.wait(300)
        return current_task().worker

    return sorted(
        Parallel(n_jobs, batch_size=1, **settings)(delayed(work)() for _ in range(num_tasks))
    )


# --- how large they are ---------------------------------------------------------------------------


def test_a_single_worker_that_was_opened_for_joblib_is_used() -> None:
    with parallel_config("raypool", profile="threads", num_workers=1, quiet=True):
        assert Parallel()(delayed(lambda: current_task().worker)() for _ in range(4)) == [0] * 4


def test_it_grows_with_n_jobs_and_never_shrinks() -> None:
    with parallel_config("raypool", profile="threads", quiet=True) as config:
        assert meet(2, 2) == [0, 1]
        pool = opened_by(config)
        assert meet(5, 5) == [0, 1, 2, 3, 4]
        assert joblib.effective_n_jobs(-1) == 5
        assert joblib.effective_n_jobs(2) == 2
        assert meet(5, -1) == [0, 1, 2, 3, 4]
        assert opened_by(config) is pool
        assert pool.num_workers == 5


@pytest.mark.ci
@pytest.mark.usefixtures("ray_session", "by_value")
def test_on_ray_it_grows_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    # it does without a claim that comes late
    monkeypatch.setattr("raypool.backends.ray.claims.SETTLE_S", 300.0)
    with parallel_config(
        "raypool", quiet=True, resources=WorkerResources(gpus=0), start_timeout_s=300
    ) as config:
        assert Parallel(2)(delayed(square)(x) for x in range(4)) == [0, 1, 4, 9]
        assert opened_by(config).num_workers == joblib.effective_n_jobs(-1) == 2
        assert Parallel(3)(delayed(square)(x) for x in range(4)) == [0, 1, 4, 9]
        assert opened_by(config).num_workers == joblib.effective_n_jobs(-1) == 3
        with pytest.warns(
            UserWarning, match="n_jobs=40 is more than the pool's number of workers, 4"
        ):
            assert Parallel(40)(delayed(square)(x) for x in range(4)) == [0, 1, 4, 9]
        assert Parallel(50)(delayed(square)(x) for x in range(4)) == [
            0,
            1,
            4,
            9,
        ], "where there is no room it goes on as it is"
        assert opened_by(config).num_workers == 4


@pytest.mark.parametrize(
    ("opening", "size"),
    [
        ({"num_workers": 2}, 2),
        ({"resources": [WorkerResources(gpus=0), WorkerResources(gpus=0)]}, 2),
    ],
)
def test_it_keeps_the_size_that_was_said(opening: dict[str, Any], size: int) -> None:
    with parallel_config("raypool", profile="threads", quiet=True, **opening) as config:
        assert meet(2, 2) == [0, 1]
        with pytest.warns(
            UserWarning, match="n_jobs=3 is more than the pool's number of workers, 2"
        ):
            assert Parallel(3)(delayed(square)(x) for x in range(4)) == [0, 1, 4, 9]
        assert opened_by(config).num_workers == size


def test_it_may_have_an_initializer(marks: Any) -> None:
    with parallel_config(
        "raypool", profile="threads", quiet=True, initializer=marks.add, initargs=("began",)
    ):
        assert meet(2, 2) == [0, 1]
        assert meet(3, 3) == [0, 1, 2]
    assert marks.count("began") == 3


def test_the_warning_names_the_line_that_calls_joblib() -> None:
    with (
        parpool(2, profile="threads", quiet=True) as pool,
        pytest.warns(UserWarning, match="n_jobs=5") as caught,
    ):
        Parallel(5, backend="raypool", pool=pool)(delayed(square)(x) for x in range(4))
    with (
        parpool(2, profile="threads", quiet=True),
        parallel_config("raypool"),
        pytest.warns(UserWarning, match="n_jobs=5") as more,
    ):
        joblib.effective_n_jobs(5)
    assert {warning.filename for warning in [*caught, *more]} == {__file__}


# --- who uses them --------------------------------------------------------------------------------


@in_this_process
def test_it_is_no_current_pool(profile: str) -> None:
    before = gcp(create=False)
    with parallel_config("raypool", profile=profile, quiet=True) as config:
        assert Parallel(2)(delayed(square)(x) for x in range(5)) == [0, 1, 4, 9, 16]
        assert not opened_by(config).is_closed
        assert gcp(create=False) is before


def test_its_end_does_not_end_the_work_of_another_thread(
    make_gate: Callable[[], Any], eventually: Any
) -> None:
    begun, gate = make_gate(), make_gate()

    def work(index: int) -> int:
        begun.open()
        gate.wait()
        return index

    def in_its_own_pool() -> None:
        results.extend(
            Parallel(2, backend="raypool", profile="threads", num_workers=2, quiet=True)(
                delayed(work)(x) for x in range(2)
            )
        )

    results: list[int] = []
    current, num_before = gcp(create=False), num_open()
    first = threading.Thread(target=in_its_own_pool)
    first.start()
    begun.wait()
    assert gcp(create=False) is current, (
        "so another thread's Parallel uses a pool of its own, which ends with nothing else"
    )
    gate.open()
    first.join(300)
    assert results == [0, 1]
    assert eventually(lambda: num_open() == num_before)


def test_a_parallel_that_names_the_backend_again_uses_that_of_its_block() -> None:
    with parallel_config("raypool", profile="threads", quiet=True) as config:
        assert meet(2, 2, backend="raypool") == [0, 1]
        num_before = num_open()
        pool = opened_by(config)
        assert meet(3, 3, backend="raypool") == [0, 1, 2]
        assert opened_by(config) is pool
        assert num_open() == num_before


# --- when they end --------------------------------------------------------------------------------


@in_this_process
def test_a_pool_that_was_opened_for_joblib_ends_with_the_block(
    profile: str, eventually: Any
) -> None:
    with parallel_config("raypool", profile=profile, num_workers=2, quiet=True) as config:
        assert Parallel()(delayed(square)(x) for x in range(5)) == [0, 1, 4, 9, 16]
        pool = opened_by(config)
        Parallel()(delayed(square)(x) for x in range(5))
        assert opened_by(config) is pool  # the same for all of the block
        assert not pool.is_closed
    del config
    assert eventually(lambda: pool.is_closed)


def test_a_pool_that_a_single_parallel_has_opened_ends_with_it(eventually: Any) -> None:
    before = num_open()
    numbers = (delayed(square)(x) for x in range(5))
    assert Parallel(n_jobs=2, backend="raypool", profile="threads", quiet=True)(numbers) == [
        0,
        1,
        4,
        9,
        16,
    ]
    assert eventually(lambda: num_open() == before)


def test_wrong_arguments_for_a_pool_are_refused_before_the_first_parallel() -> None:
    with pytest.raises(InvalidValueError, match="no such profile"):
        parallel_config("raypool", profile="no such profile")
    with pytest.raises(InvalidTypeError, match=r"parpool\(\) has no argument 'worker'"):
        parallel_config("raypool", worker=1)


def test_an_error_in_opening_a_pool_has_no_exception_of_joblibs_as_its_context() -> None:
    with (
        parallel_config("raypool", profile="threads", num_workers=10**9),
        pytest.raises(ResourceError, match="requested 1000000000") as caught,
    ):
        Parallel()(delayed(square)(x) for x in range(5))
    assert caught.value.__context__ is None


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="Python 3.12.0 and 3.12.1 start no thread then"
)
def test_it_works_in_a_thread_that_outlives_the_main_one(run_python: Any) -> None:
    """The interpreter closes all executors of threads then, and the last threads end after that."""
    done = run_python("""
        import concurrent.futures.thread as executors
        import threading
        import time

        from joblib import Parallel, delayed

        from raypool import parpool, register_joblib

        register_joblib()
        pool = parpool(2, profile="threads", quiet=True)

        def late():
            while not executors._shutdown:
                time.sleep(0.01)
            for batch_size in ("auto", 1):
                print(Parallel(backend="raypool", pool=pool, batch_size=batch_size)(delayed(pow)(x, 2) for x in range(50))[-1])

        threading.Thread(target=late).start()
        """)
    assert done.stdout.split() == ["2401", "2401"]
