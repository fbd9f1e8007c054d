"""The pool of `raypool.interop.multiprocessing`: the workers that it opens, begins with, replaces
and ends.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from raypool import ParallelPool, WorkerResources, gcp
from raypool.interop.multiprocessing import Collector, Pool

from .conftest import START_S

pytestmark = pytest.mark.semantics

Maker = Callable[..., Pool]


@pytest.fixture
def make_mp(make_pool: Any, by_value: None) -> Maker:
    """Give the one that makes pools in the standard library's shape."""
    changes: dict[str, Any] = {}
    if make_pool.is_in_processes:
        changes = {"resources": WorkerResources(gpus=0), "start_timeout_s": START_S}
    return functools.partial(Pool, profile=make_pool.profile, **changes)


def raypool_threads() -> set[threading.Thread]:
    """Return the threads of all pools."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("raypool-")}


# --- how it begins --------------------------------------------------------------------------------

model: Any = None
settings: dict[str, int] = {"set": 0}
untouched = 1


def load(value: int) -> None:
    global model
    model = value
    settings["set"] += 1


def look(_: object = None) -> tuple[Any, int, int]:
    return model, settings["set"], untouched


def forget() -> None:
    global model
    model = None
    settings["set"] = 0


@pytest.mark.threads
def test_what_the_initializer_leaves_in_global_variables_is_there(make_mp: Maker) -> None:
    with make_mp(2, load, (7,)) as mp:
        assert mp.map(look, range(6), 1) == [(7, 2, 1)] * 6, "each worker has called it"
    assert model == 7
    forget()


@pytest.mark.processes
def test_so_it_is_in_processes_also_in_one_that_replaces_another(
    make_mp: Maker, marks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(number: int) -> Any:
        if number == 3 and not marks.count("died"):
            marks.add("died")
            os._exit(1)
        return model

    with make_mp(1, load, (7,)) as mp:
        assert mp.starmap(look, [(0,)]) == list(mp.imap(look, [0])) == [(7, 1, 1)]
        assert mp.apply(functools.partial(look, 1)) == mp.apply(lambda: look()) == (7, 1, 1)
        assert mp.map(work, range(6)) == [7] * 6
        assert model is None
        monkeypatch.setattr(sys.modules[__name__], "untouched", "new")
        assert mp.apply(lambda: (model, untouched)) == (
            7,
            "new",
        ), "other variables are those of the call"


def test_an_initializer_that_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        Pool(1, divmod, (1, 0), profile="inline")


@pytest.mark.threads
def test_there_may_be_more_workers_than_cores(make_mp: Maker) -> None:
    with make_mp(5) as mp, make_mp(2) as other:
        assert "pool_size=5" in repr(mp)
        assert other.map(abs, [-1]) == mp.map(abs, [-1]) == [1]


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Pool(1, profile="inline") as mp:
        mp.map(abs, [-1])
    assert capsys.readouterr() == ("", "")


# --- processes that are replaced ------------------------------------------------------------------


@pytest.mark.processes
def test_a_process_makes_so_many_tasks(make_mp: Maker) -> None:
    max_tasks = 3
    with make_mp(2, load, (7,), max_tasks) as mp:
        results = [mp.apply_async(lambda: (os.getpid(), model)) for _ in range(2 * max_tasks)]
        answers = [result.get(300) for result in results] + mp.map(
            lambda _: (os.getpid(), model), range(4), 2
        )
    chunks = answers[2 * max_tasks :]
    assert chunks[0] == chunks[1], "a chunk is one task"
    pids = [pid for pid, _ in answers[: 2 * max_tasks] + chunks[::2]]
    assert max(map(pids.count, pids)) <= max_tasks
    assert {value for _, value in answers} == {7}


@pytest.mark.processes
def test_pools_on_the_same_worker_count_tasks_of_their_own(pool: ParallelPool) -> None:
    one, _ = pool.partition(workers=[0])
    with Pool(pool=one, maxtasksperchild=100) as many, Pool(pool=one, maxtasksperchild=3) as few:
        pids = [many.apply(os.getpid) for _ in range(3)] + [few.apply(os.getpid) for _ in range(4)]
    assert set(pids[:6]) == {pids[0]}, "the tasks of the other one do not count"
    assert pids[6] != pids[0]


def test_elsewhere_that_means_nothing() -> None:
    with Pool(1, maxtasksperchild=1, profile="inline") as mp:
        assert mp.map(abs, range(10), 1) == list(range(10))


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.threads
def test_after_close_the_workers_end_when_all_is_done(make_mp: Maker, eventually: Any) -> None:
    before = raypool_threads()
    mp = make_mp(2)
    result = mp.map_async(abs, range(-20, 0), 1)
    results = mp.imap(abs, iter(range(100)))
    mp.close()
    mp.join()
    assert result.get(0) == list(range(20, 0, -1))
    assert list(results) == list(range(100))
    assert eventually(lambda: not raypool_threads() - before)


@pytest.mark.threads
def test_nobody_need_join(make_mp: Maker, gate: Any, eventually: Any) -> None:
    before = raypool_threads()
    mp = make_mp(1)
    result = mp.apply_async(gate.wait)
    mp.close()
    gate.open()
    assert eventually(lambda: not raypool_threads() - before)
    assert result.get(0) is None


@pytest.mark.threads
def test_terminate_ends_what_runs(make_mp: Maker, gate: Any, eventually: Any) -> None:
    before = raypool_threads()
    mp = make_mp(2)
    started = mp.imap_unordered(lambda number: number or gate.wait(), range(1000))
    assert next(started) == 1
    mp.terminate()
    mp.join()
    assert eventually(lambda: not raypool_threads() - before)


@pytest.mark.threads
def test_one_that_is_forgotten_says_so_and_ends(make_mp: Maker, eventually: Any) -> None:
    before = raypool_threads()
    mp = make_mp(1)
    assert mp.map(abs, [-1]) == [1]  # which does not hold it any more, so it is told of here
    pools = [mp]
    del mp
    with pytest.warns(
        ResourceWarning,
        match="unclosed running multiprocessing pool <.*Pool state=RUN pool_size=1>",
    ):
        pools.clear()
    gc.collect()
    assert eventually(lambda: not raypool_threads() - before)


@pytest.mark.threads
def test_one_that_has_ended_says_nothing(make_mp: Maker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make_mp(1) as mp:
            mp.map(abs, [1])
        del mp
        gc.collect()


@pytest.mark.threads
def test_results_keep_their_pool_and_no_longer(make_mp: Maker, eventually: Any) -> None:
    pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def make() -> Pool:
        mp = make_mp(1)
        pools.add(mp)
        return mp

    with warnings.catch_warnings():
        # raised in the collector's thread, as soon as it lets go of the pool
        warnings.simplefilter("ignore", ResourceWarning)
        assert make().map_async(abs, [-1]).get(300) == [1]
        assert list(make().imap(abs, iter([-1, -2]))) == [1, 2]
        assert eventually(lambda: not pools)


@pytest.mark.concurrent
@pytest.mark.parametrize(("verb", "num_calls"), [("map", 3), ("apply", 1)])
def test_ctrl_c_stops_what_runs(
    pool: ParallelPool,
    gate: Any,
    eventually: Any,
    check_pool: Any,
    press_ctrl_c: Any,
    verb: str,
    num_calls: int,
) -> None:
    def interrupt() -> None:
        if not eventually(
            lambda: pool.statistics().running == num_calls and not pool.statistics().queued
        ):
            gate.open()  # so that it fails instead of waiting
        else:
            press_ctrl_c()

    mp = Pool(pool=pool)
    presser = threading.Thread(target=interrupt)
    presser.start()
    calls = {
        "map": lambda: mp.map(lambda _: gate.wait(), range(3), 1),
        "apply": lambda: mp.apply(gate.wait),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[verb]()
    presser.join()
    assert eventually(lambda: not pool.busy), "it was cancelled, not waited for"
    mp.terminate()
    mp.join()
    check_pool(pool)


@pytest.mark.threads
@pytest.mark.parametrize("verb", ["map", "starmap", "apply"])
def test_so_does_ctrl_c_before_it_waits(
    pool: ParallelPool,
    gate: Any,
    eventually: Any,
    check_pool: Any,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypool.interop.multiprocessing.CallGroup", interrupt)
    mp = Pool(pool=pool)
    arguments: dict[str, Any] = {"map": ([1, 2, 3], 1), "starmap": ([(), ()],), "apply": ()}
    with pytest.raises(KeyboardInterrupt):
        getattr(mp, verb)(lambda *_: gate.wait(), *arguments[verb])
    assert eventually(lambda: not pool.busy), "what was handed in is cancelled"
    mp.terminate()
    mp.join()
    check_pool(pool)


@pytest.mark.threads
@pytest.mark.parametrize("verb", ["map", "apply", "imap"])
def test_and_ctrl_c_while_its_calls_are_noted(
    pool: ParallelPool, gate: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The pool would else wait for its end forever."""
    take_in = Collector.open

    def take_in_and_press(*arguments: Any) -> None:
        take_in(*arguments)
        raise KeyboardInterrupt

    mp = Pool(pool=pool)
    arguments: tuple[Any, ...] = () if verb == "apply" else ([1, 2, 3], 1)
    monkeypatch.setattr(Collector, "open", take_in_and_press)
    with pytest.raises(KeyboardInterrupt):
        getattr(mp, verb)(lambda *_: gate.wait(), *arguments)
    monkeypatch.setattr(Collector, "open", take_in)
    assert eventually(lambda: not pool.busy)
    assert mp.map(abs, [-1]) == [1]
    mp.close()
    assert eventually(lambda: not mp._collector.thread.is_alive())


@pytest.mark.threads
@pytest.mark.parametrize("is_lent", [True, False])
def test_ctrl_c_ends_an_initializer(
    make_mp: Maker,
    pool: ParallelPool,
    gate: Any,
    marks: Any,
    eventually: Any,
    check_pool: Any,
    press_ctrl_c: Any,
    is_lent: bool,
) -> None:
    def hang() -> None:
        marks.add("hangs")
        gate.wait()
        marks.add("went on")

    def interrupt() -> None:
        if eventually(lambda: marks.count("hangs")):
            press_ctrl_c()
        gate_opens.wait(300)
        gate.open()  # so that it fails instead of waiting

    gate_opens = threading.Event()
    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        Pool(initializer=hang, pool=pool) if is_lent else make_mp(1, hang)
    assert eventually(lambda: not pool.busy)
    assert not marks.count("went on")
    gate_opens.set()
    presser.join()
    check_pool(pool)


@pytest.mark.threads
@pytest.mark.parametrize("end", ["close", "terminate", "del"])
def test_what_a_pool_was_lent_with_ends_with_it(
    make_pool: Any, marks: Any, eventually: Any, end: str
) -> None:
    with make_pool(1) as pool:
        mp = Pool(initializer=marks.add, initargs=("began",), pool=pool)
        pool.resize(2)
        assert marks.count("began") == 2
        collector = mp._collector
        if end == "del":
            pools = [mp]
            del mp
            with pytest.warns(ResourceWarning):
                pools.clear()
            gc.collect()
        else:
            getattr(mp, end)()
        assert eventually(lambda: not collector.thread.is_alive())
        pool.resize(3)
        assert pool.num_workers == 3
        assert marks.count("began") == 2


@pytest.mark.threads
def test_one_that_fails_leaves_a_lent_pool_as_it_was(make_pool: Any, check_pool: Any) -> None:
    with make_pool(1) as pool:
        with pytest.raises(ZeroDivisionError):
            Pool(initializer=divmod, initargs=(1, 0), pool=pool)
        pool.resize(2)
        check_pool(pool)


def test_it_is_no_current_pool() -> None:
    """Its end would be that of others' work, who have not opened it."""
    before = gcp(create=False)
    with Pool(1, profile="inline") as mp:
        assert mp.map(abs, [-1]) == [1]
        assert gcp(create=False) is before
