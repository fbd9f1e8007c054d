"""joblib runs on every kind of pool as on its own workers: results, order, errors, time-outs, and
Parallel in Parallel.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_backend, parallel_config

import raypool
from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    ResourceError,
    SerializationError,
    WorkerLostError,
    current_task,
    gcp,
    parpool,
    register_joblib,
    search,
)
from raypool.futures import Future
from raypool.interop.joblib_backend import ParallelWork

pytestmark = pytest.mark.semantics


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_joblib()


@pytest.fixture
def config(pool: ParallelPool) -> Iterator[dict[str, Any]]:
    """Let joblib use the pool that the tests share."""
    with parallel_config("raypool", pool=pool) as config:
        yield config


class Refused(Exception):
    """An exception of a user's."""


def refuse(text: str) -> None:
    raise Refused(text)


def square(x: int) -> int:
    return x * x


def worker_of(_: int = 0) -> int:
    return current_task().worker


def pass_gate(gate: Any, index: int) -> int:
    if index == 0:
        gate.wait()
    return index


# --- results --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_results_come_in_order_on_any_number_of_workers(config: Any) -> None:
    for n_jobs, batch_size in ((None, "auto"), (-1, 1), (-2, 7), (1, "auto"), (2, 1), (3, 7)):
        assert Parallel(n_jobs, batch_size=batch_size)(delayed(square)(x) for x in range(20)) == [
            x * x for x in range(20)
        ]


def test_many_short_tasks_are_all_run_once(config: Any) -> None:
    for pre_dispatch in ("all", "2 * n_jobs"):
        assert Parallel(pre_dispatch=pre_dispatch)(delayed(square)(x) for x in range(3000)) == [
            x * x for x in range(3000)
        ]


def test_results_come_as_a_generator(config: Any) -> None:
    results = Parallel(return_as="generator")(delayed(square)(x) for x in range(10))
    assert next(results) == 0
    assert list(results) == [x * x for x in range(1, 10)]
    unordered = Parallel(return_as="generator_unordered")(delayed(square)(x) for x in range(10))
    assert sorted(unordered) == [x * x for x in range(10)]


@pytest.mark.threads
def test_verbose_asks_for_lines_about_the_progress(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Parallel()(delayed(square)(x) for x in range(4))
    assert "raypool" not in capsys.readouterr().err
    Parallel(verbose=1)(delayed(square)(x) for x in range(4))
    assert "raypool: square: 4 of 4 done, " in capsys.readouterr().err
    generator = Parallel(verbose=1, batch_size=1, return_as="generator")(
        [delayed(square if x < 3 else refuse)(x) for x in range(4)]  # it has a length
    )
    with pytest.raises(Refused):
        list(generator)
    last = r"raypool: square: [1-4] of 4 done, 1 failed, stopped, "
    assert re.search(last, capsys.readouterr().err)


@pytest.mark.processes
def test_output_and_warnings_of_tasks_are_shown_as_they_arrive(
    config: Any, capsys: pytest.CaptureFixture[str], gate: Any, eventually: Any
) -> None:
    shown = ""

    def is_shown(text: str) -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return text in shown

    def train(x: int) -> None:
        print("training", x)
        if x:
            gate.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{x} has not converged", stacklevel=1)
        print("end of", x, end="")

    results = Parallel(return_as="generator", batch_size=1)(delayed(train)(x) for x in range(2))
    assert eventually(lambda: is_shown("training 1\n"))
    assert "end of 1" not in shown
    gate.open()
    assert list(results) == [None, None]
    for text in ("training 0\n", "UserWarning: 1 has not converged\n", "end of 0\n", "end of 1\n"):
        assert is_shown(text)
        assert shown.count(text) == 1


@pytest.mark.threads
def test_an_unordered_generator_does_not_wait_for_the_slowest(config: Any, gate: Any) -> None:
    results = Parallel(return_as="generator_unordered", batch_size=1)(
        delayed(pass_gate)(gate, index) for index in range(6)
    )
    assert sorted(next(results) for _ in range(5)) == [1, 2, 3, 4, 5]
    gate.open()
    assert next(results) == 0


@pytest.mark.threads
def test_two_generators_of_one_block_do_not_disturb_each_other(config: Any, gate: Any) -> None:
    first = Parallel(return_as="generator", batch_size=1)(
        delayed(pass_gate)(gate, index) for index in range(12)
    )
    assert Parallel()(delayed(square)(x) for x in range(30)) == [x * x for x in range(30)]
    gate.open()
    assert list(first) == list(range(12))


@pytest.mark.threads
def test_the_generator_of_tasks_is_drawn_from_as_tasks_end(
    config: Any, gate: Any, eventually: Any
) -> None:
    drawn = []

    def tasks() -> Iterator[Any]:
        for index in range(100):
            drawn.append(index)
            yield delayed(pass_gate)(gate, 0)

    results = Parallel(n_jobs=2, batch_size=1, pre_dispatch=4, return_as="generator")(tasks())
    assert eventually(lambda: len(drawn) >= 4)
    assert len(drawn) <= 6
    gate.open()
    assert len(list(results)) == len(drawn) == 100


def test_what_a_worker_has_not_begun_in_time_goes_to_others(
    config: Any, marks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each call runs one task, and hands back the rest
    monkeypatch.setattr("raypool.interop.joblib_backend.CALL_LIMIT_S", 0.0)

    def work(index: int) -> int:
        marks.add(index)
        return index

    assert Parallel(2)(delayed(work)(index) for index in range(150)) == list(range(150))
    assert len(marks.all()) == 150


# --- which workers --------------------------------------------------------------------------------


def test_the_current_pool_is_used() -> None:
    with parpool(2, profile="inline", quiet=True) as pool, parallel_config("raypool"):
        Parallel()(delayed(square)(x) for x in range(4))
        assert gcp() is pool
        assert pool.statistics().finished > 0
        assert joblib.effective_n_jobs() == joblib.effective_n_jobs(-1) == pool.num_workers
        assert joblib.effective_n_jobs(-2) == 1


def test_parallel_backend_and_parallel_take_a_pool_too(pool: ParallelPool) -> None:
    before = pool.statistics().finished
    with parallel_backend("raypool", pool=pool, n_jobs=2):
        assert Parallel()(delayed(square)(x) for x in range(4)) == [0, 1, 4, 9]
    between = pool.statistics().finished
    assert Parallel(n_jobs=2, backend="raypool", pool=pool)(
        delayed(square)(x) for x in range(4)
    ) == [0, 1, 4, 9]
    assert before < between < pool.statistics().finished


@pytest.mark.threads
def test_a_part_of_a_pool_is_used_alone(pool: ParallelPool) -> None:
    part, _ = pool.partition(workers=[1, 2])
    with parallel_config("raypool", pool=part):
        assert joblib.effective_n_jobs(-1) == 2
        assert set(Parallel(batch_size=1)(delayed(worker_of)() for _ in range(10))) <= {1, 2}


@pytest.mark.threads
def test_fewer_jobs_than_workers_run_at_once(
    config: Any, make_gate: Any, marks: Any, eventually: Any
) -> None:
    gate = make_gate()

    def note(index: int) -> int:
        marks.add(index)
        gate.wait()
        return index

    results = Parallel(n_jobs=2, batch_size=1, return_as="generator")(
        delayed(note)(index) for index in range(6)
    )
    assert eventually(lambda: len(marks.all()) == 2)
    assert len(marks.all()) == 2
    gate.open()
    assert list(results) == list(range(6))


def test_more_jobs_than_workers_mean_all_workers_and_one_warning(config: Any) -> None:
    with pytest.warns(
        UserWarning,
        match=r"n_jobs=40 is more than the pool.s number of workers, 3: all of them are used",
    ):
        assert Parallel(n_jobs=40)(delayed(square)(x) for x in range(5)) == [0, 1, 4, 9, 16]
    # and says nothing
    assert Parallel(n_jobs=40)(delayed(square)(x) for x in range(5)) == [0, 1, 4, 9, 16]


def test_a_single_job_runs_here(config: Any) -> None:
    assert (
        Parallel(n_jobs=1)(delayed(threading.get_ident)() for _ in range(2))
        == [threading.get_ident()] * 2
    )


@pytest.mark.threads
def test_a_single_worker_is_used(make_pool: Any) -> None:
    with make_pool(1), parallel_config("raypool"):
        assert joblib.effective_n_jobs() == joblib.effective_n_jobs(-1) == 1
        here = threading.get_ident()
        for n_jobs in (None, -1, -3):
            assert here not in Parallel(n_jobs, batch_size=1)(
                delayed(threading.get_ident)() for _ in range(5)
            )
        with pytest.warns(UserWarning, match="the pool.s number of workers, 1"):
            assert here not in Parallel(n_jobs=2)(delayed(threading.get_ident)() for _ in range(40))
        with Parallel(return_as="generator") as parallel:
            for _ in range(2):
                assert here not in set(parallel(delayed(threading.get_ident)() for _ in range(5)))


model = None


def load_model() -> None:
    global model
    model = "loaded"


@pytest.mark.processes
def test_what_a_setup_leaves_in_global_variables_is_there(make_pool: Any, by_value: None) -> None:
    with make_pool(1, setup=load_model) as pool, parallel_config("raypool"):
        assert list(pool.spmd(lambda context: (model, context.rank))) == [("loaded", 0)]
        assert pool.train(lambda config: model).result(300).values == ["loaded"]
        for size in (None, 1):
            found = pool.search(
                lambda config: {"loaded": 1.0}[model],
                {"x": search.uniform(0, 1)},
                num_trials=1,
                workers_per_trial=size,
            )
            assert found.best.score == 1.0
        assert Parallel()(delayed(lambda x: (model, x))(x) for x in range(3)) == [
            ("loaded", x) for x in range(3)
        ]
    assert model is None


@pytest.mark.threads
def test_all_workers_but_one_may_be_a_single_one(
    make_pool: Any, make_gate: Any, marks: Any, eventually: Any
) -> None:
    gate = make_gate()

    def note(index: int) -> tuple[int, int]:
        marks.add(index)
        gate.wait()
        return index, current_task().worker

    with make_pool(2), parallel_config("raypool"):
        results = Parallel(n_jobs=-2, batch_size=1, return_as="generator")(
            delayed(note)(index) for index in range(4)
        )
        assert eventually(lambda: marks.all())
        assert len(marks.all()) == 1
        gate.open()
        assert [index for index, _ in results] == list(range(4))


@pytest.mark.processes
def test_a_single_worker_that_dies_is_replaced(pool: ParallelPool, marks: Any) -> None:
    def die_once(index: int) -> int:
        if index == 2 and not marks.count("died"):
            marks.add("died")
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    part, _ = pool.partition(workers=[0])
    with parallel_config("raypool", pool=part):
        assert Parallel(batch_size=1)(delayed(die_once)(index) for index in range(4)) == list(
            range(4)
        )


def test_parallel_in_parallel_on_a_single_worker_ends(make_pool: Any) -> None:
    def innermost(number: int) -> int:
        return sum(Parallel(n_jobs=2, backend="raypool")(delayed(square)(x) for x in range(number)))

    def inner(number: int) -> int:
        return sum(Parallel(n_jobs=2)(delayed(innermost)(x) for x in range(number)))

    with make_pool(1), parallel_config("raypool"):
        assert Parallel()(delayed(innermost)(number) for number in range(4)) == [0, 0, 1, 5]
        assert Parallel()(delayed(inner)(number) for number in range(4)) == [0, 0, 0, 1]


@pytest.mark.arguments
def test_what_cannot_work_is_refused(make_pool: Any) -> None:
    with make_pool(2) as pool:
        with pytest.raises(InvalidTypeError, match="pool=3 is not a pool"):
            parallel_config("raypool", pool=3)
        with pytest.raises(InvalidValueError, match="a pool, and num_workers to open another"):
            parallel_config("raypool", pool=pool, num_workers=3)
        with (
            parallel_config("raypool", pool=pool.partition(workers=[])[0]),
            pytest.raises(ResourceError, match="no workers"),
        ):
            Parallel()(delayed(square)(x) for x in range(5))
    with parallel_config("raypool", pool=pool), pytest.raises(PoolClosedError):
        Parallel()(delayed(square)(x) for x in range(5))


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_an_error_is_raised_as_itself(config: Any, pool: ParallelPool, check_pool: Any) -> None:
    for return_as in ("list", "generator", "generator_unordered"):
        tasks = [
            delayed(square)(2),
            delayed(refuse)("no"),
            *[delayed(square)(x) for x in range(10)],
        ]
        with pytest.raises(Refused, match="no") as caught:
            list(Parallel(return_as=return_as)(tasks))
        assert any("refuse" in note or "square" in note for note in caught.value.__notes__)
        check_pool(pool)


@pytest.mark.processes
def test_the_traceback_of_the_worker_is_the_cause(config: Any) -> None:
    with pytest.raises(Refused) as caught:
        Parallel(batch_size=1)(delayed(refuse)("no") for _ in range(3))
    assert "in refuse" in str(caught.value.__cause__)


@pytest.mark.concurrent
def test_an_error_stops_what_runs(
    config: Any, pool: ParallelPool, marks: Any, check_pool: Any
) -> None:
    def spin() -> None:
        marks.add("spinning")
        while True:
            pass

    def fail() -> None:
        while not marks.count("spinning"):
            pass
        raise Refused("enough")

    with pytest.raises(Refused, match="enough"):
        Parallel(batch_size=1)([delayed(spin)(), delayed(fail)(), delayed(spin)()])
    check_pool(pool)


@pytest.mark.concurrent
@pytest.mark.parametrize("return_as", ["list", "generator"])
def test_a_time_out_stops_what_runs(
    config: Any, pool: ParallelPool, return_as: str, check_pool: Any
) -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises((multiprocessing.TimeoutError, TimeoutError)):
        list(Parallel(timeout=0.2, return_as=return_as)(delayed(spin)() for _ in range(4)))
    check_pool(pool)


@pytest.mark.concurrent
def test_a_generator_of_results_that_is_given_up_stops_what_runs(
    config: Any, pool: ParallelPool, check_pool: Any
) -> None:
    def spin(index: int) -> int:
        while index > 0:
            pass
        return index

    results = Parallel(return_as="generator", batch_size=1)(
        delayed(spin)(index) for index in range(6)
    )
    assert next(results) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # joblib says what was given up
        del results
    check_pool(pool)


def test_an_error_in_the_generator_of_tasks_is_raised(config: Any) -> None:
    def tasks(error: type[BaseException]) -> Iterator[Any]:
        yield from (delayed(square)(x) for x in range(50))
        raise error("in the generator")

    for error in (Refused, SystemExit, KeyboardInterrupt):
        with pytest.raises(error, match="in the generator"):
            Parallel(batch_size=1)(tasks(error))


@pytest.mark.processes
@pytest.mark.parametrize("position", [0, 200])
def test_what_cannot_be_sent_is_named(
    config: Any, pool: ParallelPool, position: int, check_pool: Any
) -> None:
    arguments: list[Any] = [1] * 300
    arguments[position] = threading.Lock()
    with pytest.raises(SerializationError, match=r"Cannot send argument 0 of id to a worker.*lock"):
        Parallel()(delayed(id)(argument) for argument in arguments)
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"'lock' \(a lock\)"):
        Parallel()(delayed(lambda _: lock)(x) for x in range(3))
    check_pool(pool)


@pytest.mark.processes
def test_a_value_that_cannot_come_back_is_an_error(config: Any) -> None:
    with pytest.raises(SerializationError, match="lock"):
        Parallel()(delayed(threading.Lock)() for _ in range(4))


@pytest.mark.processes
def test_tasks_run_again_when_their_worker_dies(
    config: Any, pool: ParallelPool, marks: Any, check_pool: Any
) -> None:
    def die_once(index: int) -> int:
        if index == 3 and not marks.count("died"):
            marks.add("died")
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    assert Parallel(batch_size=1)(delayed(die_once)(index) for index in range(8)) == list(range(8))
    check_pool(pool)


@pytest.mark.processes
def test_tasks_that_kill_their_workers_fail(
    config: Any, pool: ParallelPool, check_pool: Any
) -> None:
    with parallel_config("raypool", pool=pool.options(retries=0)), pytest.raises(WorkerLostError):
        Parallel(batch_size=1)(
            delayed(os.kill)(0, signal.SIGKILL) if x == 1 else delayed(square)(x) for x in range(4)
        )
    check_pool(pool)


# --- Parallel in Parallel -------------------------------------------------------------------------


def test_parallel_in_parallel_ends(config: Any) -> None:
    def inner(number: int, backend: str | None) -> int:
        return sum(Parallel(n_jobs=2, backend=backend)(delayed(square)(x) for x in range(number)))

    for backend in (None, "raypool", "threading", "sequential"):
        sums = Parallel()(delayed(inner)(number, backend) for number in range(6))
        assert sums == [sum(x * x for x in range(n)) for n in range(6)]


@pytest.mark.everywhere
def test_parallel_three_deep_ends(config: Any) -> None:
    def innermost(number: int) -> int:
        return sum(Parallel(n_jobs=2, backend="raypool")(delayed(square)(x) for x in range(number)))

    def inner(number: int) -> int:
        return sum(Parallel(n_jobs=2)(delayed(innermost)(x) for x in range(number)))

    assert Parallel(batch_size=1)(delayed(inner)(number) for number in (3, 3, 3, 3)) == [1] * 4


@pytest.mark.semantics
@pytest.mark.processes
def test_parallel_in_a_loop_of_the_pools_runs_in_turn(pool: ParallelPool) -> None:
    def inner(number: int) -> list[int]:
        raypool.register_joblib()
        with parallel_config("raypool"):
            return Parallel(n_jobs=2)(delayed(square)(x) for x in range(number))

    assert list(pool.parfor(inner, range(4))) == [[], [0], [0, 1], [0, 1, 4]]


@pytest.mark.threads
def test_parallel_in_the_callback_of_a_future_is_refused(
    pool: ParallelPool, call_back: Any
) -> None:
    error = call_back(
        lambda _: Parallel(backend="raypool", n_jobs=2, pool=pool)(
            delayed(square)(x) for x in range(4)
        )
    )
    assert type(error) is InvalidValueError
    assert "callback of a future" in str(error)


# --- what travels ---------------------------------------------------------------------------------


class Large:
    """Something large that counts how often it is pickled."""

    def __init__(self, times: list[int]) -> None:
        self.nbytes = 2 << 20
        self.times = times

    def __reduce__(self) -> Any:
        self.times.append(1)
        return Large, ([],)


@pytest.mark.processes
def test_a_large_argument_travels_once_for_all_tasks(config: Any) -> None:
    times: list[int] = []
    large = Large(times)
    assert (
        Parallel(batch_size=1)(delayed(_kind)(x, large=large) for x in range(12)) == ["Large"] * 12
    )
    assert len(times) == 1
    # it may have changed since
    Parallel(batch_size=1)(delayed(_kind)(x, large=large) for x in range(3))
    assert len(times) == 2
    Parallel(batch_size=1, max_nbytes=None)(delayed(_kind)(x, large=large) for x in range(3))
    assert len(times) == 5


@pytest.mark.processes
@pytest.mark.parametrize("max_nbytes", [None, "3M", "1M"])
def test_a_task_may_change_what_it_gets(config: Any, max_nbytes: str | None) -> None:
    arrays = [np.zeros(num_bytes, dtype=np.uint8) for num_bytes in (2 << 20, 4 << 20)]
    parallel = Parallel(max_nbytes=max_nbytes, batch_size=1)
    assert parallel(delayed(_changed)(*arrays) for x in range(3)) == [[1, 1]] * 3
    assert [int(array[0]) for array in arrays] == [0, 0]


def _changed(*arrays: Any) -> list[int]:
    for array in arrays:
        array += 1
    return [int(array[0]) for array in arrays]


@pytest.mark.processes
@pytest.mark.parametrize("max_nbytes", [None, 8])
def test_tasks_write_into_a_memmap(
    config: Any, max_nbytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines that have its file."""

    def fill(out: Any, index: int) -> None:
        out[index] = index + 1

    out = np.memmap(tmp_path / "out", dtype="f8", mode="w+", shape=(4, 2))
    parallel = Parallel(max_nbytes=max_nbytes, batch_size=1)
    parallel(delayed(fill)(out[:, 0], x) for x in range(4))  # with gaps between its numbers
    parallel(delayed(fill)(out=out[:2, :], index=x) for x in range(2))
    assert out.tolist() == [[1, 1], [2, 2], [3, 0], [4, 0]]
    private = np.memmap(tmp_path / "out", dtype="f8", mode="c", shape=(4, 2))
    private[0] = 5  # not in the file
    assert parallel(delayed(np.sum)(each) for each in (private, private)) == [21, 21]

    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    with pytest.warns(RuntimeWarning, match=r"cannot write into the memmap of .*out: each"):
        parallel(delayed(fill)(out, x) for x in (2, 3))
    assert out[2:].tolist() == [[3, 0], [4, 0]]


@pytest.mark.processes
def test_what_cannot_be_sent_is_named_without_max_nbytes_too(config: Any) -> None:
    with pytest.raises(SerializationError, match=r"Cannot send argument 0 of id to a worker.*lock"):
        Parallel(max_nbytes=None)(delayed(id)(threading.Lock()) for _ in range(3))


def _kind(_: int, large: Any) -> str:
    return type(large).__name__


@pytest.mark.processes
def test_large_arguments_arrive_as_they_are(config: Any) -> None:
    import pandas as pd
    import scipy.sparse

    array = np.arange(300_000, dtype=float)
    for large in (array, pd.DataFrame({"x": array}), scipy.sparse.csr_array(array)):
        assert Parallel()(delayed(_total)(large, x) for x in range(5)) == [
            array.sum() + x for x in range(5)
        ]


def _total(values: Any, more: float) -> float:
    return float(np.asarray(values.sum()).sum()) + more


@pytest.mark.processes
def test_native_libraries_may_be_told_how_many_threads_to_use(pool: ParallelPool) -> None:
    def threads() -> set[int]:
        from threadpoolctl import threadpool_info

        np.ones((8, 8)) @ np.ones((8, 8))
        return {library["num_threads"] for library in threadpool_info()} | {
            int(os.environ["OMP_NUM_THREADS"])
        }

    before = pool.parfeval(threads).result(300)
    with parallel_config("raypool", pool=pool, inner_max_num_threads=2):
        assert Parallel(batch_size=1)(delayed(threads)() for _ in range(3)) == [{2}] * 3
    assert pool.parfeval(threads).result(300) == before


def test_without_joblib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.errors.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r'register_joblib needs joblib.*pip install "raypool\[joblib\]"'
    ):
        register_joblib()


def test_a_call_of_which_the_beginning_is_not_noted_yet_is_not_shown() -> None:
    """The driver notes the worker first."""
    future: Future[Any] = Future("square")
    future.start()
    future.worker = 0
    assert ParallelWork("square", lambda: lambda: [(future, None)]).running == {}
