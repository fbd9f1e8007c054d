"""Bad input is one clear error at the call, and the pool goes on."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    RaypoolError,
    ResourceError,
    SerializationError,
    WorkerResources,
    fetch_next,
    fetch_outputs,
    parpool,
    wait,
)

lock = threading.Lock()

Cases = list[tuple[Any, type[Exception], str]]
"""What is given, the error, and what it says."""


# --- what is refused before anything runs, wherever that would be ---------------------------------


@pytest.fixture
def here() -> Iterator[ParallelPool]:
    """Give a pool in this process, which works afterwards."""
    with parpool(1, profile="inline", quiet=True) as pool:
        yield pool
        assert pool.parfor(abs, [-1, -2]) == [1, 2]


@pytest.mark.quick
def test_numbers_of_workers_that_cannot_be() -> None:
    cases: Cases = [
        (0, InvalidValueError, "num_workers must be at least 1, not 0"),
        (-2, InvalidValueError, "num_workers must be at least 1, not -2"),
        (1.5, InvalidTypeError, "must be an integer, not 1.5"),
        ("4", InvalidTypeError, "must be an integer, not '4'"),
        (True, InvalidTypeError, "must be an integer, not True"),
        ((3, 2), InvalidValueError, "the minimum is more than the max"),
        ((1, 2, 3), InvalidValueError, "not a pair"),
        ((0, 2), InvalidValueError, "must be at least 1, not 0"),
    ]
    for num_workers, error, words in cases:
        with pytest.raises(error, match=words) as caught:
            parpool(num_workers)
        assert isinstance(caught.value, RaypoolError)


@pytest.mark.quick
def test_what_cannot_be_called_or_gone_through(here: ParallelPool) -> None:
    for verb in ("parfor", "parfeval", "submit", "parfeval_on_all"):
        with pytest.raises(InvalidTypeError, match="3 is not callable"):
            getattr(here, verb)(3, [1])
    for items in (None, 3.5, object(), True):
        with pytest.raises(InvalidTypeError, match="is not iterable"):
            here.parfor(str, items)


@pytest.mark.quick
def test_arguments_of_parfor(here: ParallelPool, marks: Any) -> None:
    """They are refused before the loop runs, not after."""
    cases: Cases = [
        (
            {"on_error": "ignore"},
            InvalidValueError,
            "on_error must be 'stop', 'raise' or 'collect', not 'ignore'",
        ),
        ({"max_workers": -1}, InvalidValueError, "max_workers must be at least 0, not -1"),
        ({"max_workers": 1.5}, InvalidTypeError, "max_workers must be an integer, not 1.5"),
        ({"chunk_size": 0}, InvalidValueError, "chunk_size must be at least 1, not 0"),
        ({"seed": -1}, InvalidValueError, "seed must be at least 0, not -1"),
        ({"seed": "x"}, InvalidTypeError, "seed must be an integer, not 'x'"),
        ({"reduce": "sum"}, InvalidTypeError, "reduce"),
    ]
    for arguments, error, words in cases:
        with pytest.raises(error, match=words):
            here.parfor(marks.add, [1], **arguments)
    assert marks.all() == []


@pytest.mark.quick
def test_options(here: ParallelPool) -> None:
    cases: Cases = [
        ({"retries": -1}, InvalidValueError, "retries must be at least 0, not -1"),
        ({"retries": None}, InvalidTypeError, "retries must be an integer, not None"),
        ({"priority": "high"}, InvalidTypeError, "priority must be an integer, not 'high'"),
        ({"retry_on": ValueError("x")}, InvalidTypeError, "retry_on must be an exception type"),
        ({"name": 3}, InvalidTypeError, "name must be a string, not 3"),
        ({"speed": 3}, InvalidTypeError, "no argument 'speed'. Choose from: retries"),
    ]
    for options, error, words in cases:
        with pytest.raises(error, match=words):
            here.options(**options)


@pytest.mark.quick
def test_options_may_be_numpys_numbers(tmp_path: Path) -> None:
    """The trace, which is JSON, has them as Python's."""
    trace = tmp_path / "events.jsonl"
    with parpool(1, profile="inline", quiet=True, trace=trace) as pool:
        view = pool.options(timeout_s=np.int64(600), retry_delay_s=np.float32(0.5))
        assert view.parfeval(abs, -1).result(300) == 1
        with pytest.raises(InvalidTypeError, match="is not a number of seconds"):
            pool.options(timeout_s=np.bool_(True))
    assert '"timeout_s": 600' in trace.read_text()
    assert '"retry_delay_s": 0.5' in trace.read_text()


@pytest.mark.quick
def test_profiles_and_resources_that_cannot_be() -> None:
    """More of them are in tests/unit/test_profiles.py."""
    cases: Cases = [
        ({"start_timeout_s": "soon"}, InvalidTypeError, "start_timeout_s='soon'"),
        ({"retries": "2"}, InvalidTypeError, "retries must be an integer, not '2'"),
        ({"env": {"DEBUG": 1}}, InvalidTypeError, "DEBUG"),
        ({"env": 5}, InvalidTypeError, "env=5"),
        ({"trace": 5}, InvalidTypeError, "trace=5"),
        ({"profile": "lokal"}, InvalidValueError, "no profile 'lokal'.*local"),
    ]
    for changes, error, words in cases:
        with pytest.raises(error, match=words):
            parpool(1, **changes)
    fields: Cases = [
        *(
            ({"gpus": gpus}, InvalidValueError, r"WorkerResources\(gpus=")
            for gpus in (0.4, 0.51, -1, 1.5, 0.00001)
        ),
        ({"gpus": "1"}, InvalidTypeError, "gpus"),
        ({"cpus": "2"}, InvalidTypeError, "cpus"),
        ({"memory_bytes": -1}, InvalidValueError, "memory_bytes"),
    ]
    for values, error, words in fields:
        with pytest.raises(error, match=words):
            WorkerResources(**values)


@pytest.mark.quick
def test_a_generator_that_raises(here: ParallelPool) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("no more data")

    with pytest.raises(LookupError, match="no more data") as caught:
        here.parfor(str, items())
    assert hasattr(caught.value, "results")


@pytest.mark.quick
def test_no_items_is_an_empty_result(here: ParallelPool) -> None:
    results = here.parfor(str, [])
    assert len(results) == 0
    assert results == []
    assert results.to_frame().empty
    assert here.parfor(str, iter(())) == []
    assert here.parfor(str, 0) == []
    assert here.parfor(max, [], reduce=max) is None


@pytest.mark.quick
def test_a_future_that_is_none_of_ours() -> None:
    for function in (fetch_next, fetch_outputs, wait):
        with pytest.raises(InvalidTypeError, match="not a future of a pool"):
            function([concurrent.futures.Future()])
    with pytest.raises(InvalidValueError, match="the list of futures is empty"):
        fetch_next([])


@pytest.mark.quick
def test_work_after_shutdown() -> None:
    other = parpool(1, profile="inline", quiet=True)
    other.delete()
    other.delete()
    for call in (
        lambda: other.parfor(abs, [1]),
        lambda: other.parfeval(abs, 1),
        lambda: other.submit(abs, 1),
        lambda: other.parfeval_on_all(abs, 1),
        lambda: other.resize(2),
        lambda: other.constant(3),
    ):
        with pytest.raises(PoolClosedError, match="parpool"):
            call()
    assert other.workers == []


# --- on Ray ---------------------------------------------------------------------------------------


@pytest.fixture
def pool_is_usable(pool: ParallelPool) -> Iterator[None]:
    yield
    assert pool.parfor(abs, [-1, -2]) == [1, 2]


@pytest.mark.quick
def test_more_gpus_than_there_are_and_than_are_free(pool: ParallelPool) -> None:
    """What can never be is known at once; who holds what is missing now is named."""
    with pytest.raises(
        ResourceError, match=r"GPU: requested 5, available \d \(the cluster has 3\)"
    ) as caught:
        parpool(5, start_timeout_s=2)
    assert caught.value.requested == 5
    with pytest.raises(
        ResourceError,
        match=(
            r"requested 2, available 0 .*This process itself holds 3: the pool opened at"
            r" .*\.py:\d+, `.*parpool\("
        ),
    ) as caught:
        parpool(2, start_timeout_s=600)
    assert (caught.value.requested, caught.value.available) == (2, 0)
    assert caught.value.holders
    with pytest.raises(ResourceError, match=r"GPU: requested \d, available 0"):
        pool.resize(4)


@pytest.mark.quick
def test_what_no_node_has(pool: ParallelPool) -> None:
    """It is known at once, whatever start_timeout_s, and the error says what it is."""
    for fields, words in (
        ({"accelerator_type": "H100"}, "H100"),
        ({"memory_bytes": 10**15}, "memory"),
        ({"gpus": 4}, "GPU: requested 4, available 0"),
        ({"gpus": 0, "cpus": 64}, "CPU: requested 64, available 0"),
    ):
        with pytest.raises(ResourceError, match=words):
            parpool(1, resources=WorkerResources(**fields), start_timeout_s=600)


def test_gpus_that_cannot_be_had(pool: ParallelPool) -> None:
    cases: Cases = [
        ([0, 0], InvalidValueError, "GPU 0 is listed twice"),
        # nobody knows whether it is one of those that are held
        ([0, 7], ResourceError, "GPU 0, 7: requested 2, available 0"),
        ([0, 1, 2, 3], ResourceError, "There is no GPU 3 on this machine, which has 3"),
        (
            [0, 1],
            ResourceError,
            (
                r"GPU 0, 1: requested 2, available 0 .*This process itself holds 3: the pool"
                r" opened at "
            ),
        ),
        (
            {"lab-9": [0, 2]},
            ResourceError,
            r"No node of the cluster is called 'lab-9', as in gpus= \(GPU 0, 2\)",
        ),
    ]
    for gpus, error, words in cases:
        with pytest.raises(error, match=words):
            parpool(gpus=gpus, start_timeout_s=600)


@pytest.mark.quick
@pytest.mark.usefixtures("pool_is_usable")
def test_a_function_that_cannot_be_pickled(pool: ParallelPool) -> None:
    def fn(x: int) -> Any:
        return lock, x

    with pytest.raises(SerializationError, match=r"the function fn to a worker: 'lock' \(a lock\)"):
        pool.parfor(fn, [1])
    with pytest.raises(SerializationError, match="'lock'"):
        pool.parfeval(fn, 1)


@pytest.mark.quick
@pytest.mark.usefixtures("pool_is_usable")
def test_an_argument_that_cannot_be_pickled(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match="argument 'handle' of max"):
        pool.parfeval(max, 1, handle=lock)
    with pytest.raises(SerializationError, match=r"argument 1 of max .*\['a'\]\[0\]"):
        pool.parfeval(max, 1, {"a": [lock]})


@pytest.mark.quick
@pytest.mark.usefixtures("pool_is_usable")
def test_an_item_that_cannot_be_pickled(pool: ParallelPool) -> None:
    with pytest.raises(
        SerializationError, match=r"item 2 of \w+ to a worker: \['lock'\] \(a lock\)"
    ):
        pool.parfor(str, [1, {"x": 2}, {"lock": lock}])
    with pytest.raises(SerializationError, match="item 1 of"):
        pool.parfor(str, ({"lock": lock} if i == 1 else i for i in range(3)))


@pytest.mark.quick
@pytest.mark.usefixtures("pool_is_usable")
def test_a_future_as_an_argument(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match=r"argument 0 of abs.*Send its result"):
        pool.parfeval(abs, pool.parfeval(abs, 1))


@pytest.mark.quick
def test_a_worker_that_is_not_there(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match=r"There is no worker 3, only 0"):
        pool.options(worker=3).parfeval(abs, 1)
    for size, error in ((0, InvalidValueError), (None, InvalidTypeError)):
        with pytest.raises(error, match=f"num_workers must be .*, not {size}"):
            pool.resize(size)  # type: ignore[arg-type]
