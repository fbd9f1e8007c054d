"""Bad input is one clear error at the call, and the pool goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

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
    parpool,
)

lock = threading.Lock()


@pytest.fixture(scope="module")
def pool(ray_session: None, by_value: None) -> Iterator[ParallelPool]:
    with parpool(1, gpus=[1], quiet=True) as pool:
        yield pool


@pytest.fixture(autouse=True)
def pool_is_usable(pool: ParallelPool) -> Iterator[None]:
    yield
    assert pool.parfor(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize(
    ("num_workers", "error", "words"),
    [
        (0, InvalidValueError, "num_workers=0 is less than 1"),
        (-2, InvalidValueError, "num_workers=-2"),
        (1.5, InvalidTypeError, "1.5 is not a whole number"),
        ("4", InvalidTypeError, "'4' is not a whole number"),
        (True, InvalidTypeError, "True is not a whole number"),
        ((3, 2), InvalidValueError, "the least is more than the most"),
        ((1, 2, 3), InvalidValueError, "not a pair"),
        ((0, 2), InvalidValueError, "less than 1"),
    ],
)
def test_numbers_of_workers_that_cannot_be(num_workers: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        parpool(num_workers)
    assert isinstance(caught.value, RaypoolError)


def test_more_gpus_than_there_are(pool: ParallelPool) -> None:
    with pytest.raises(ResourceError, match=r"GPU: requested 5, available 3 \(the cluster has 3\)") as caught:
        parpool(5, start_timeout_s=2)
    assert (caught.value.requested, caught.value.available) == (5, 3)


def test_more_gpus_than_are_free_names_the_holder(pool: ParallelPool) -> None:
    with pytest.raises(ResourceError, match=r"GPU: requested 3, available 2 .*Held by: raypool in process \d+.*1 GPU") as caught:
        parpool(3, start_timeout_s=1)
    assert caught.value.holders


@pytest.mark.parametrize(
    ("gpus", "error", "words"),
    [
        ([0, 0], InvalidValueError, "GPU 0 is named twice"),
        ([0, 7], ResourceError, "GPU 7 does not exist here: this machine has 3"),
        ([0, 1, 2, 3], ResourceError, "GPU 3 does not exist here: this machine has 3"),
        ([0, 1], ResourceError, r"GPU 1 is in use: requested 2, available 1 \(free: 0, 2\)\. Held by: .*1 GPU"),
        ([-1], InvalidValueError, "negative"),
        ({"lab-9": [0, 2]}, ResourceError, "No node of the cluster is called 'lab-9', of which gpus= names GPU 0, 2"),
    ],
)
def test_gpus_that_cannot_be_had(
    pool: ParallelPool, gpus: Any, error: type[Exception], words: str, eventually: Callable[..., bool]
) -> None:
    import ray

    assert eventually(lambda: ray.available_resources().get("GPU") == 2), "what the test before had claimed is not back"
    if gpus == [0, 7]:
        words = "GPU 7"  # nobody knows whether it is the one that is held
    with pytest.raises(error, match=words):
        parpool(gpus=gpus, start_timeout_s=1)


@pytest.mark.parametrize("verb", ["parfor", "parfeval", "submit", "parfeval_on_all"])
def test_what_is_not_callable(pool: ParallelPool, verb: str) -> None:
    with pytest.raises(InvalidTypeError, match="3 is not callable"):
        getattr(pool, verb)(3, [1])


def test_a_function_that_cannot_be_pickled(pool: ParallelPool) -> None:
    def fn(x: int) -> Any:
        return lock, x

    with pytest.raises(SerializationError, match=r"the function fn to a worker: 'lock' \(a lock\)"):
        pool.parfor(fn, [1])
    with pytest.raises(SerializationError, match="'lock'"):
        pool.parfeval(fn, 1)


def test_an_argument_that_cannot_be_pickled(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match="argument 'handle' of max"):
        pool.parfeval(max, 1, handle=lock)
    with pytest.raises(SerializationError, match=r"argument 1 of max .*\['a'\]\[0\]"):
        pool.parfeval(max, 1, {"a": [lock]})


def test_an_item_that_cannot_be_pickled(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match=r"item 2 of \w+ to a worker: \['lock'\] \(a lock\)"):
        pool.parfor(str, [1, {"x": 2}, {"lock": lock}])
    with pytest.raises(SerializationError, match="item 1 of"):
        pool.parfor(str, ({"lock": lock} if i == 1 else i for i in range(3)))


@pytest.mark.parametrize("items", [None, 3.5, object(), True])
def test_items_that_are_not_iterable(pool: ParallelPool, items: Any) -> None:
    with pytest.raises(InvalidTypeError, match="is not iterable"):
        pool.parfor(str, items)


def test_a_generator_that_raises(pool: ParallelPool) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("no more data")

    with pytest.raises(LookupError, match="no more data") as caught:
        pool.parfor(str, items())
    assert hasattr(caught.value, "results")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"on_error": "ignore"}, InvalidValueError, "neither 'raise' nor 'collect'"),
        ({"max_workers": -1}, InvalidValueError, "max_workers=-1"),
        ({"max_workers": 1.5}, InvalidTypeError, "max_workers=1.5"),
        ({"chunk_size": 0}, InvalidValueError, "chunk_size=0"),
        ({"seed": -1}, InvalidValueError, "seed=-1"),
        ({"seed": "x"}, InvalidTypeError, "seed='x'"),
    ],
)
def test_arguments_of_parfor(pool: ParallelPool, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pool.parfor(str, [1], **arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"retries": -1}, InvalidValueError, "retries=-1"),
        ({"retries": None}, InvalidTypeError, "retries=None"),
        ({"priority": "high"}, InvalidTypeError, "priority='high'"),
        ({"retry_on": ValueError("x")}, InvalidTypeError, "not an exception type"),
        ({"name": 3}, InvalidTypeError, "name=3"),
        ({"speed": 3}, InvalidTypeError, "no option speed. There are: retries"),
    ],
)
def test_options(pool: ParallelPool, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pool.options(**options)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"start_timeout_s": "soon"}, InvalidTypeError, "start_timeout_s='soon'"),
        ({"start_timeout_s": 0}, InvalidValueError, "start_timeout_s=0"),
        ({"retries": "2"}, InvalidTypeError, "retries='2'"),
        ({"retries": -1}, InvalidValueError, "retries=-1"),
        ({"gpus": 1}, InvalidTypeError, "gpus=1"),
        ({"gpus": ["0"]}, InvalidTypeError, "'0' is not an integer"),
        ({"gpus": []}, InvalidValueError, "names no GPU"),
        ({"env": {"DEBUG": 1}}, InvalidTypeError, "DEBUG"),
        ({"env": 5}, InvalidTypeError, "env=5"),
        ({"trace": 5}, InvalidTypeError, "trace=5"),
        ({"resources": 2}, InvalidTypeError, "not a WorkerResources"),
        ({"speed": 1}, InvalidTypeError, "no field speed"),
        ({"profile": "lokal"}, InvalidValueError, "no profile 'lokal'.*local"),
        ({"profile": 3}, InvalidTypeError, "neither a name nor a Profile"),
    ],
)
def test_profiles_that_cannot_be(pool: ParallelPool, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parpool(1, **changes)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"gpus": -1}, InvalidValueError),
        ({"gpus": 1.5}, InvalidValueError),
        ({"gpus": "1"}, InvalidTypeError),
        ({"cpus": "2"}, InvalidTypeError),
        ({"memory_bytes": -1}, InvalidValueError),
    ],
)
def test_resources_that_cannot_be(pool: ParallelPool, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(fields))):
        WorkerResources(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"accelerator_type": "H100"}, "H100"),
        ({"memory_bytes": 10**15}, "memory"),
        ({"gpus": 4}, "GPU: requested 4, available 0"),
        ({"gpus": 0, "cpus": 64}, "CPU: requested 64, available 0"),
    ],
)
def test_what_no_node_has(pool: ParallelPool, fields: dict[str, Any], words: str) -> None:
    """It is known at once, and the error says what it is."""
    with pytest.raises(ResourceError, match=words):
        parpool(1, resources=WorkerResources(**fields), start_timeout_s=60)


def test_a_reduction_that_cannot_be_called(pool: ParallelPool, marks: Any) -> None:
    """It is refused before the loop runs, not after."""
    with pytest.raises(InvalidTypeError, match="reduce"):
        pool.parfor(marks.add, [1], reduce="sum")
    assert marks.all() == []


def test_a_future_as_an_argument(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match=r"argument 0 of abs.*Send its result"):
        pool.parfeval(abs, pool.parfeval(abs, 1))


def test_a_worker_that_is_not_there(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match=r"There is no worker 3\. There are: 0"):
        pool.options(worker=3).parfeval(abs, 1)


def test_no_items_is_an_empty_result(pool: ParallelPool) -> None:
    results = pool.parfor(str, [])
    assert len(results) == 0
    assert results == []
    assert results.to_frame().empty
    assert pool.parfor(str, iter(())) == []
    assert pool.parfor(str, 0) == []
    assert pool.parfor(max, [], reduce=max) is None


@pytest.mark.parametrize("gpus", [0.4, 0.51, -1, 1.5, 0.00001])
def test_parts_of_gpus_that_cannot_be(gpus: float) -> None:
    with pytest.raises(InvalidValueError, match=r"WorkerResources\(gpus="):
        WorkerResources(gpus=gpus)


def test_work_after_shutdown(ray_session: None) -> None:
    other = parpool(1, gpus=[0], quiet=True)
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


def test_resizing_to_what_is_not_there(pool: ParallelPool) -> None:
    with pytest.raises(ResourceError, match="the pool may use GPU 1 only"):
        pool.resize(2)
    with pytest.raises(InvalidValueError, match="num_workers=0"):
        pool.resize(0)
    with pytest.raises(InvalidTypeError, match="num_workers=None"):
        pool.resize(None)  # type: ignore[arg-type]


def test_a_future_that_is_none_of_ours(pool: ParallelPool, eventually: Callable[..., bool]) -> None:
    import concurrent.futures

    from raypool import fetch_next, fetch_outputs, wait

    for function in (fetch_next, fetch_outputs, wait):
        with pytest.raises(InvalidTypeError, match="not a future of a pool"):
            function([concurrent.futures.Future()])
    with pytest.raises(InvalidValueError, match="no future left to read"):
        fetch_next([])
