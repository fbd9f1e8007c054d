"""Values that every worker has one of (scenario 16): shipped or built once, cleaned up once."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from raypool import Constant, InvalidTypeError, ParallelPool, PoolClosedError, SerializationError

pytestmark = pytest.mark.semantics


class Traced:
    """A large thing that notes down whenever it is packed."""

    def __init__(self, marks: Any, array: Any) -> None:
        self.marks = marks
        self.array = array

    def __reduce__(self) -> Any:
        self.marks.add("packed")
        return Traced, (self.marks, self.array)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_builder_runs_once_on_each_worker_and_so_does_its_cleanup(
    make_pool: Any, marks: Any
) -> None:
    def build() -> list[int]:
        marks.add(f"built by {os.getpid()}")
        return [1, 2, 3]

    def clean(value: list[int]) -> None:
        assert value == [1, 2, 3]
        marks.add(f"cleaned by {os.getpid()}")

    with make_pool(2) as pool:
        table = pool.constant(build, cleanup=clean)
        pids = set(pool.parfeval_on_all(lambda: sum(table.value) and os.getpid()).result(300))
        assert list(pool.parfor(lambda i: table.value[i % 3] * i, range(50))) == [
            (i % 3 + 1) * i for i in range(50)
        ]
        assert pool.parfeval(lambda constant, i: constant.value[i], table, 2).result(300) == 3
        assert marks.all() == sorted(f"built by {pid}" for pid in pids)
    assert marks.all() == sorted(
        f"{what} by {pid}" for pid in pids for what in ("built", "cleaned")
    )


def test_only_who_has_used_it_cleans_up(make_pool: Any, marks: Any) -> None:
    with make_pool(2) as pool:
        used = pool.constant(lambda: 5, cleanup=lambda _: marks.add("cleaned"))
        pool.constant(lambda: marks.add("built"), cleanup=lambda _: marks.add("cleaned"))
        assert pool.parfeval(lambda: used.value).result(300) == 5
    assert marks.all() == ["cleaned"]


@pytest.mark.everywhere
def test_a_value_is_shipped_once_however_many_use_it(
    pool: ParallelPool, make_pool: Any, marks: Any
) -> None:
    data = pool.constant(Traced(marks, np.arange(1_000_000.0)))

    first = pool.parfor(lambda i: float(data.value.array[i]), range(60), chunk_size=2)
    second = pool.parfor(lambda i: -float(data.value.array[i]), range(60))

    assert list(first) == list(range(60))
    assert list(second) == [-i for i in range(60)]
    assert marks.count("packed") == (1 if make_pool.is_in_processes else 0)


@pytest.mark.everywhere
def test_a_builder_that_fails_is_tried_again(pool: ParallelPool, marks: Any) -> None:
    def build() -> int:
        marks.add("tried")
        if len(marks.all()) == 1:
            raise ConnectionError("no data yet")
        return 7

    table = pool.constant(build)
    with pytest.raises(ConnectionError, match="no data yet"):
        pool.parfeval(lambda: table.value).result(300)
    assert pool.parfeval(lambda: table.value).result(300) == 7


@pytest.mark.processes
def test_a_worker_that_replaces_another_builds_it_anew(pool: ParallelPool) -> None:
    table = pool.constant(os.getpid)
    first = pool.options(worker=1).parfeval(lambda: table.value).result(300)
    pool.options(worker=1, retries=0).parfeval(os._exit, 1).exception(300)
    second = pool.options(worker=1).parfeval(lambda: (table.value, os.getpid())).result(300)
    assert second[0] == second[1] != first


@pytest.mark.processes
def test_a_worker_that_a_smaller_pool_gives_back_cleans_up(
    make_pool: Any, marks: Any, eventually: Any
) -> None:
    with make_pool(2) as pool:
        table = pool.constant(
            os.getpid, cleanup=lambda pid: marks.add(f"cleaned by {os.getpid()}, made by {pid}")
        )
        pids = pool.parfeval_on_all(lambda: table.value).result(300)
        pool.resize(1)
        assert eventually(lambda: len(marks.all()) == 1)
    assert marks.all() == sorted(f"cleaned by {pid}, made by {pid}" for pid in pids)


@pytest.mark.processes
def test_a_worker_whose_call_was_cancelled_cleans_up(
    make_pool: Any, gate: Any, marks: Any, eventually: Any
) -> None:
    with make_pool(1, cancel_grace_s=300) as pool:
        table = pool.constant(1, cleanup=lambda _: marks.add("cleaned"))

        def use() -> None:
            marks.add(table.value)
            gate.wait()

        future = pool.parfeval(use)
        assert eventually(lambda: marks.all() == ["1"])
        future.cancel()
    assert marks.all() == ["1", "cleaned"]


@pytest.mark.everywhere
def test_a_cleanup_that_fails_keeps_no_other_from_being_done(
    make_pool: Any, marks: Any, caplog: Any
) -> None:
    def fail(value: int) -> None:
        marks.add("failed")
        raise ValueError("on purpose")

    with make_pool(1, teardown=lambda: marks.add("torn down")) as pool:
        tables = [
            pool.constant(lambda: 1, cleanup=fail),
            pool.constant(lambda: 2, cleanup=lambda _: marks.add("cleaned")),
        ]
        assert pool.parfeval(lambda: [table.value for table in tables]).result(300) == [1, 2]
    assert marks.all() == ["cleaned", "failed", "torn down"]
    assert "on purpose" in caplog.text


def test_several_constants_are_told_apart(pool: ParallelPool) -> None:
    """And one may be built from another."""
    first = pool.constant(lambda: [1, 2, 3])
    second = pool.constant(lambda: sum(first.value))
    assert pool.parfor(lambda i: second.value + i, range(5)) == [6, 7, 8, 9, 10]
    tables = [pool.constant({"number": number}) for number in range(5)]
    assert list(
        pool.parfor(lambda i: [table.value["number"] for table in tables][i], range(5))
    ) == list(range(5))


def test_a_forked_child_builds_what_a_thread_of_its_parent_was_building(run_python: Any) -> None:
    run_python("""
        import os, signal, threading, warnings
        from raypool import parpool
        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of any fork beside threads
        building, end, parent = threading.Event(), threading.Event(), os.getpid()

        def build():
            if os.getpid() == parent:
                building.set()
                end.wait(300)
            return os.getpid()

        with parpool(1, profile="threads", quiet=True) as pool:
            table = pool.constant(build)
            job = pool.parfeval(lambda: table.value)
            assert building.wait(300)
            child = os.fork()
            if child == 0:
                signal.alarm(100)  # ends it if it waits for that thread, which it does not have
                os._exit(0 if table.value == os.getpid() else 1)
            status = os.waitpid(child, 0)[1]
            end.set()
            assert os.waitstatus_to_exitcode(status) == 0
            assert job.result(300) == parent
        """)


@pytest.mark.arguments
def test_constants_that_cannot_be(make_pool: Any) -> None:
    with make_pool(1) as pool, pytest.raises(InvalidTypeError, match="cleanup=5"):
        pool.constant(1, cleanup=5)
    with pytest.raises(PoolClosedError):
        pool.constant(1)
    with pytest.raises(InvalidTypeError, match=r"pool\.constant"):
        Constant(dict)


@pytest.mark.processes
def test_a_value_that_cannot_travel_is_refused_at_the_call(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match="lock") as caught:
        pool.constant({"lock": threading.Lock()})
    assert isinstance(caught.value, pickle.PicklingError), "as other pools raise it"
