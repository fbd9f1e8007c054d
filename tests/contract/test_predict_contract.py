"""A model over data of any size, on all workers (MATLAB's minibatchpredict and scores2label)."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import threading
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    SerializationError,
    TaskTimeoutError,
    current_task,
)
from raypool.train import predict
from raypool.train.data import mapped

pytestmark = pytest.mark.semantics

Pair = namedtuple("Pair", ["double", "negative"])


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Compute here as workers do: with one thread, so that sums are made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model() -> nn.Module:
    """Make a model whose output tells whether it is in training: batch norm, dropout, and work in
    place.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.5),
        nn.ReLU(inplace=True),
        nn.Linear(16, 3),
    )
    model(torch.randn(64, 4))  # so that there are running statistics
    return model


def inputs(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 4)).astype(np.float32)


def alone(model: nn.Module, x: np.ndarray, size: int) -> np.ndarray:
    """Return what one process makes of it, with the same mini-batches."""
    model = copy.deepcopy(model).eval()
    with torch.inference_mode():
        batches = [model(torch.tensor(x[first : first + size])) for first in range(0, len(x), size)]
        return torch.cat(batches).numpy() if batches else np.empty((0, 3), np.float32)


class Numbers(Dataset):
    """A Dataset of the user's own, of pairs."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.x[index], index


class Stream(IterableDataset):
    """A Dataset without an end."""

    def __iter__(self) -> Any:
        return itertools.count()


# --- every size, every kind of data ---------------------------------------------------------------


@pytest.mark.everywhere
def test_the_same_as_in_one_process_to_the_last_bit(pool: ParallelPool) -> None:
    model = make_model()
    for count, size in ((0, 3), (1, 1), (2, 1000), (7, 8), (8, 8), (9, 8), (50, 3), (50, 1000)):
        x = inputs(count)
        outputs = pool.predict(model, x, mini_batch_size=size)
        assert isinstance(outputs, np.ndarray)
        assert outputs.dtype == np.float32
        np.testing.assert_array_equal(outputs, alone(model, x, size))


@pytest.mark.semantics
@pytest.mark.processes
def test_a_model_of_the_user_stays_as_it_is(pool: ParallelPool) -> None:
    model, x = make_model(), inputs(20)
    model[2].eval()  # part of it is frozen
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    before = x.copy()

    outputs = pool.predict(model, torch.from_numpy(x))

    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())
    np.testing.assert_array_equal(x, before)
    assert not outputs.requires_grad
    # an ordinary tensor, not one of inference mode
    (outputs * nn.Parameter(torch.ones(3))).sum().backward()


@pytest.mark.everywhere
def test_every_kind_of_data(pool: ParallelPool) -> None:
    model, x = make_model(), inputs(21)
    expected = alone(model, x, 128)
    tensor = torch.from_numpy(x)
    targets = torch.arange(21)
    for data in (x, pd.DataFrame(x, columns=list("abcd")), x[::-1].copy()[::-1], (x,)):
        outputs = pool.predict(model, data)
        assert type(outputs) is np.ndarray
        np.testing.assert_array_equal(outputs, expected)
    kinds = [
        tensor,
        nn.Parameter(tensor),
        TensorDataset(tensor),
        TensorDataset(tensor, targets),
        Subset(TensorDataset(tensor, targets), range(21)),
        Numbers(x),
        Subset(Numbers(x), range(21)),
        list(tensor),
        list(x),
        [(row, 0) for row in x],
    ]
    for data in kinds:
        outputs = pool.predict(model, data)
        assert type(outputs) is torch.Tensor
        np.testing.assert_array_equal(outputs.numpy(), expected)


def test_no_samples_have_the_shape_of_some(pool: ParallelPool) -> None:
    model = make_model()
    assert pool.predict(model, inputs(0)).shape == (0, 3)
    assert pool.predict(model, torch.empty(0, 4)).shape == (0, 3)
    assert pool.predict(model, Numbers(inputs(0))).shape == (0,)
    assert pool.predict(model, []).shape == (0,)
    assert pool.classify(model, inputs(0)).tolist() == []
    assert pool.classify(model, [], labels=["a", "b", "c"]).tolist() == []


def test_numbers_become_the_type_of_the_model(pool: ParallelPool) -> None:
    linear, x = nn.Linear(4, 2), np.ones((5, 4))
    assert pool.predict(linear, x).dtype == np.float32
    assert pool.predict(copy.deepcopy(linear).double(), x.astype(np.float32)).dtype == np.float64
    assert pool.predict(copy.deepcopy(linear).bfloat16(), torch.ones(5, 4)).dtype == torch.bfloat16
    assert pool.predict(copy.deepcopy(linear).bfloat16(), x).dtype == np.float32, (
        "NumPy has no such type"
    )
    assert pool.predict(copy.deepcopy(linear).bfloat16(), torch.ones(5, 4).bfloat16()).shape == (
        5,
        2,
    )
    assert pool.predict(nn.Embedding(10, 3), np.arange(10)).shape == (
        10,
        3,
    ), "whole numbers stay what they are"
    assert pool.predict(nn.Identity(), x).dtype == np.float64, (
        "without weights there is no type to take"
    )
    assert pool.predict(nn.Identity(), np.array([True, False])).dtype == bool


def test_several_inputs_and_several_outputs(pool: ParallelPool) -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return a + b, {"difference": a - b, "both": Pair(2 * a, -b)}

    a, b = np.arange(20.0), np.ones(20)
    for size in (1, 6, 100):
        total, rest = pool.predict(Two(), (a, b), mini_batch_size=size)
        assert total.tolist() == (a + 1).tolist()
        assert rest["difference"].tolist() == (a - 1).tolist()
        assert rest["both"].double.tolist() == (2 * a).tolist()
        assert type(rest["both"].negative) is np.ndarray
    pairs = [((torch.tensor(x), torch.tensor(y)), 0) for x, y in zip(a, b, strict=True)]
    total, _ = pool.predict(Two(), pairs)
    assert total.tolist() == (a + 1).tolist()


def test_a_function_in_place_of_a_model(pool: ParallelPool) -> None:
    outputs = pool.predict(lambda x: x.sum(1), np.arange(12).reshape(6, 2), mini_batch_size=4)
    assert outputs.tolist() == [1, 5, 9, 13, 17, 21]
    assert pool.predict(functools.partial(torch.mul, 2), torch.arange(3)).tolist() == [0, 2, 4]


# --- output ---------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_output_is_called_where_the_model_is(pool: ParallelPool, make_pool: Any) -> None:
    model, x = make_model(), inputs(50)
    best = pool.predict(model, x, mini_batch_size=8, output=lambda y: y.argmax(1))
    np.testing.assert_array_equal(best, alone(model, x, 8).argmax(1))

    workers = pool.predict(
        model, x, mini_batch_size=8, output=lambda y: (os.getpid(), threading.current_thread().name)
    )
    pids = set(workers[0])
    assert len(workers[0]) == 7
    assert (os.getpid() in pids) is not make_pool.is_in_processes


@pytest.mark.everywhere
def test_what_it_returns_can_be_changed_and_used_in_a_training(pool: ParallelPool) -> None:
    (row,) = pool.predict(nn.Linear(4, 3), torch.ones(1, 4), output=list)
    row += 1
    weight = torch.ones(3, requires_grad=True)
    (row * weight).sum().backward()
    assert torch.equal(weight.grad, row)


def test_what_is_no_array_comes_as_a_list(pool: ParallelPool) -> None:
    x = np.arange(10)
    names = pool.predict(
        nn.Identity(),
        x,
        mini_batch_size=3,
        output=lambda y: [f"number {each}" for each in y.tolist()],
    )
    assert names == [f"number {each}" for each in range(10)], "lists are joined"
    sums = pool.predict(nn.Identity(), x, mini_batch_size=3, output=lambda y: float(y.sum()))
    assert sums == [3.0, 12.0, 21.0, 9.0], "one for each mini-batch"
    assert pool.predict(nn.Identity(), x, mini_batch_size=3, output=lambda y: y.sum()).tolist() == [
        3,
        12,
        21,
        9,
    ]
    kinds = pool.predict(
        nn.Identity(), x, mini_batch_size=5, output=lambda y: None if y[0] == 0 else "five"
    )
    assert kinds == [None, "five"]


def test_outputs_of_several_kinds_are_a_list_however_they_were_computed(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an entry for each mini-batch, whether they shared calls or not."""
    kinds: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "none": (lambda y: y if y[0] % 4 else None, [None, [2, 3], None, [6, 7], None, [10, 11]]),
        "keys": (
            lambda y: {"n": len(y), **({"first": y[0]} if y[0] % 4 else {})},
            [{"n": 2, "first": first} if first else {"n": 2} for first in (0, 2, 0, 6, 0, 10)],
        ),
        "lengths": (
            lambda y: (1,) if y[0] % 4 else (1, y.sum()),
            [(1, 1), (1,), (1, 9), (1,), (1, 17), (1,)],
        ),
        "same keys": (lambda y: {"y": y, "n": len(y)}, {"y": list(range(12)), "n": [2] * 6}),
    }
    for together in (1, 2, 6):
        monkeypatch.setattr(predict, "_batches_per_call", lambda *_, count=together: count)
        for name, (output, expected) in kinds.items():
            outputs = pool.predict(
                nn.Identity(), torch.arange(12), mini_batch_size=2, output=output
            )
            assert plain(outputs) == expected, name


def plain(outputs: Any) -> Any:
    """Return outputs with lists and numbers in place of tensors."""
    if isinstance(outputs, torch.Tensor):
        return outputs.tolist()
    return mapped(plain, outputs)


def test_a_list_of_a_model_has_an_entry_for_each_sample(pool: ParallelPool) -> None:
    """Detection models give one: the boxes in a picture, of which there are now more, now fewer."""
    outputs = pool.predict(
        lambda x: [{"boxes": torch.zeros(int(n), 4)} for n in x], torch.arange(7), mini_batch_size=2
    )
    assert [len(output["boxes"]) for output in outputs] == list(range(7))


# --- classify -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_classes_are_numbers_or_labels(pool: ParallelPool) -> None:
    model, x = make_model(), inputs(50)
    expected = alone(model, x, 16).argmax(1)
    numbers = pool.classify(model, x, mini_batch_size=16)
    assert numbers.dtype == np.int64
    np.testing.assert_array_equal(numbers, expected)
    labels = pool.classify(
        model, torch.from_numpy(x), labels=["cat", "dog", "owl"], mini_batch_size=16
    )
    assert labels.tolist() == [["cat", "dog", "owl"][number] for number in expected]
    assert (
        pool.classify(model, x, labels=np.array([10, 20, 30]), mini_batch_size=16).tolist()
        == (10 * (expected + 1)).tolist()
    )
    images = torch.randn(6, 5, 2, 3)
    np.testing.assert_array_equal(
        pool.classify(nn.Identity(), images), images.argmax(1).numpy(), "of every pixel"
    )


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("shape", "labels", "kind", "words"),
    [
        ((6, 1), None, InvalidValueError, r"shape \(6, 1\).*single score"),
        ((6,), None, InvalidValueError, r"shape \(6,\)"),
        (
            (6, 3),
            ["a", "b"],
            InvalidValueError,
            "labels has 2 entries, but the model has 3 classes",
        ),
        ((6, 3), [["a", "b", "c"]], InvalidValueError, r"labels has the shape \(1, 3\)"),
        ((6, 3), [], InvalidValueError, r"labels has the shape \(0,\)"),
        ((6, 3), "abc", InvalidTypeError, "labels must be a list of class names, not 'abc'"),
        ((6, 3), 3, InvalidTypeError, "labels must be a list of class names, not 3"),
    ],
)
def test_scores_and_labels_have_to_fit(
    pool: ParallelPool, shape: tuple[int, ...], labels: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        pool.classify(nn.Identity(), torch.zeros(shape), labels=labels)


# --- what travels ---------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_model_is_shipped_to_each_worker_once_and_data_once_in_all(pool: ParallelPool) -> None:
    model = nn.Linear(1000, 1000)  # 4 MB
    x = np.ones((8000, 1000), np.float32)  # 32 MB
    with pool.transfer_bytes() as moved:
        pool.predict(model, x, mini_batch_size=100, output=lambda y: y[:, 0])
    model_bytes, data_bytes = 4_004_000, x.nbytes
    used = int((moved.to_frame()["sent_bytes"] > model_bytes).sum())
    assert used >= 2
    assert (
        data_bytes + used * model_bytes
        <= moved.total.sent_bytes
        <= data_bytes + used * model_bytes + 1_000_000
    )
    assert moved.total.received_bytes < 500_000, "output= leaves most of it there"


@pytest.mark.processes
def test_a_model_is_opened_once_in_a_worker(pool: ParallelPool, marks: Any) -> None:
    class Noting(nn.Module):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            marks.add(os.getpid())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    here = Noting()
    pool.predict(here, torch.arange(64), mini_batch_size=1)
    opened = [pid for pid in marks.all() if pid != str(os.getpid())]
    assert 1 <= len(opened) == len(set(opened)) <= 3


@pytest.mark.processes
def test_a_dataset_of_the_users_is_read_by_the_workers(pool: ParallelPool, marks: Any) -> None:
    class Noting(Numbers):
        def __getitem__(self, index: int) -> Any:
            marks.add(f"{index}-{os.getpid()}")
            return super().__getitem__(index)

    pool.predict(make_model(), Noting(inputs(30)), mini_batch_size=4)
    read = [mark.split("-") for mark in marks.all()]
    assert sorted(int(index) for index, _ in read) == list(range(30)), "each sample once"
    assert str(os.getpid()) not in {pid for _, pid in read}


@pytest.mark.concurrent
def test_all_workers_take_part_and_order_does_not_depend_on_them(
    pool: ParallelPool, make_gate: Callable[[], Any]
) -> None:
    gate = make_gate()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if int(x[0]) == 0:
                gate.wait()  # the first mini-batch comes last
            elif int(x[0]) >= 4:
                gate.open()
            return x

    workers = pool.predict(
        Waiting(),
        torch.arange(12),
        mini_batch_size=1,
        output=lambda y: [(int(y[0]), current_task().worker)],
    )
    assert [number for number, _ in workers] == list(range(12))
    assert len({worker for _, worker in workers}) >= 2


@pytest.mark.arguments
def test_the_model_is_on_the_device_of_the_worker(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown with a device that every machine has; with GPUs in tests/gpu."""
    monkeypatch.setattr(predict, "device_here", lambda: torch.device("meta"))
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    devices = pool.predict(model, inputs(20), mini_batch_size=5, output=lambda y: [str(y.device)])
    assert devices == ["meta"] * 4
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}, (
        "the caller's stays where it is"
    )
    assert not predict._on_gpu, "and nothing stays behind"


@pytest.mark.processes
def test_the_gpu_of_the_worker_is_freed(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    """The worker gets one more call for that, also if there was nothing to predict."""
    for count in (1, 0):
        before = pool.statistics().submitted
        pool.predict(make_model(), inputs(count))
        assert eventually(lambda before=before: pool.statistics().submitted == before + 2)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_part_of_a_pool_and_a_named_worker(pool: ParallelPool) -> None:
    part, _ = pool.partition(workers=[1])
    where = lambda y: [current_task().worker] * len(y)  # noqa: E731 - it travels
    assert set(part.predict(nn.Identity(), torch.arange(20), mini_batch_size=2, output=where)) == {
        1
    }
    assert set(
        pool.options(worker=2).predict(
            nn.Identity(), torch.arange(20), mini_batch_size=2, output=where
        )
    ) == {2}


@pytest.mark.semantics
@pytest.mark.processes
def test_within_a_task_it_runs_there(pool: ParallelPool) -> None:
    model, x = make_model(), inputs(20)

    def task() -> Any:
        from raypool import gcp

        torch.set_num_threads(1)
        return gcp().predict(model, x, mini_batch_size=8)

    np.testing.assert_array_equal(pool.parfeval(task).result(300), alone(model, x, 8))


# --- what goes wrong ------------------------------------------------------------------------------


class OwnError(Exception):
    """A user's."""


@pytest.mark.everywhere
def test_an_exception_is_the_users_own_and_says_at_which_samples(
    pool: ParallelPool, check_pool: Any
) -> None:
    def bad(x: Any) -> Any:
        if int(x.max()) >= 25:
            raise OwnError("too much")
        return x

    class Bad(Numbers):
        def __getitem__(self, index: int) -> Any:
            return bad(torch.tensor(index)), 0

    for model, data, output in (
        (bad, np.arange(40), None),
        (nn.Identity(), Bad(np.arange(40)), None),
        (nn.Identity(), np.arange(40), bad),
    ):
        with pytest.raises(OwnError, match="too much") as caught:
            pool.predict(model, data, mini_batch_size=10, output=output)
        notes = " ".join(caught.value.__notes__)
        assert "samples 20 to 29" in notes
        assert "predict, attempt 1" in notes
    check_pool(pool)


BAD_DATA: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (None, InvalidTypeError, "data is a NoneType"),
    "a text": ("text", InvalidTypeError, "data is a str"),
    "a mapping": ({"x": "text"}, InvalidTypeError, "data is a dict"),
    "a mapping of two lengths": (
        {"x": np.ones(3), "y": np.ones(4)},
        InvalidValueError,
        "3, 4 samples. A dict is",
    ),
    "a number": (5, InvalidTypeError, "data is a int"),
    "a number of NumPy's": (np.float32(5), InvalidTypeError, "data is a float32"),
    "an array of no dimension": (np.array(5.0), InvalidValueError, "single number"),
    "a tensor of no dimension": (torch.tensor(5.0), InvalidValueError, "single number"),
    "no inputs": ((), InvalidValueError, "has no input"),
    "inputs of two lengths": (
        (np.ones(3), np.ones(4)),
        InvalidValueError,
        "3, 4 samples.*targets do not belong",
    ),
    "an input that is a list": ((np.ones(3), [1, 2, 3]), InvalidTypeError, "An input is a list"),
    "texts": (np.array(["a", "b"]), InvalidTypeError, "which torch cannot convert to a tensor"),
    "objects": (np.array([None, 1]), InvalidTypeError, "array of object"),
    "a table of texts": (
        pd.DataFrame({"a": [1.0], "b": ["x"], "c": ["y"]}),
        InvalidTypeError,
        "not numbers: b, c",
    ),
    "an iterator": (iter([1, 2]), InvalidTypeError, "no samples by number"),
    "a loader": (
        DataLoader(TensorDataset(torch.ones(3))),
        InvalidTypeError,
        r"DataLoader.*its \.dataset",
    ),
    "a stream": (Stream(), InvalidTypeError, "Stream, which has no samples by number"),
}


@pytest.mark.arguments
@pytest.mark.parametrize("dtype", ["u2", "u4", "u8", ">i4", ">u2"])
def test_integers_of_any_kind_are_tokens_as_in_fit(pool: ParallelPool, dtype: str) -> None:
    model, tokens = nn.Embedding(9, 3), np.arange(8)
    expected = model(torch.from_numpy(tokens)).detach().numpy()
    assert (pool.predict(model, tokens.astype(dtype)) == expected).all()


@pytest.mark.arguments
def test_another_byte_order(pool: ParallelPool) -> None:
    assert pool.predict(nn.Identity(), np.arange(3, dtype=">f4")).tolist() == [0, 1, 2]


@pytest.mark.arguments
@pytest.mark.parametrize("what", BAD_DATA)
def test_data_that_is_none(pool: ParallelPool, what: str) -> None:
    data, kind, words = BAD_DATA[what]
    with pytest.raises(kind, match=words):
        pool.predict(nn.Identity(), data)


@pytest.mark.arguments
def test_samples_of_three_are_asked_about(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match="tuple of 3"):
        pool.predict(nn.Identity(), TensorDataset(torch.ones(4), torch.ones(4), torch.ones(4)))
    with pytest.raises(InvalidValueError, match="tuple of 3"):
        pool.predict(nn.Identity(), [(1, 2, 3)])


@pytest.mark.arguments
def test_a_size_that_is_none(pool: ParallelPool) -> None:
    for size, kind in (
        (0, InvalidValueError),
        (-1, InvalidValueError),
        (2.5, InvalidTypeError),
        (None, InvalidTypeError),
    ):
        with pytest.raises(kind, match="mini_batch_size"):
            pool.predict(nn.Identity(), np.ones(3), mini_batch_size=size)  # type: ignore[arg-type]


@pytest.mark.arguments
def test_a_model_that_is_none(pool: ParallelPool) -> None:
    for model in (None, 5, nn.Linear, "model", {"weight": 1}):
        with pytest.raises(InvalidTypeError, match="is not a model"):
            pool.predict(model, np.ones(3))
    with pytest.raises(InvalidTypeError, match="without a shape yet"):
        pool.predict(nn.LazyLinear(3), np.ones((3, 2)))
    with pytest.raises(InvalidTypeError, match="not callable"):
        pool.predict(nn.Identity(), np.ones(3), output=5)
    model = nn.Identity()
    model.lock = threading.Lock()
    with pytest.raises(InvalidTypeError, match=r"cannot be copied.*lock"):
        pool.predict(model, np.ones(3))


@pytest.mark.arguments
def test_outputs_that_are_none(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match=r"an output of shape \(\) for 3 samples"):
        pool.predict(lambda x: x.sum(), np.ones(3))
    with pytest.raises(InvalidValueError, match=r"shape \(1, 3\) for 3 samples"):
        pool.predict(lambda x: (x, x[None]), np.ones(3))
    with pytest.raises(InvalidValueError, match="2 entries for 3 samples"):
        pool.predict(lambda x: [1, 2], np.ones(3))
    with pytest.raises(InvalidTypeError, match="returns a NoneType"):
        pool.predict(lambda x: None, np.ones(3))
    with pytest.raises(InvalidValueError, match=r"shape \(1,\) in one, \(2,\) in another"):
        pool.predict(lambda x: torch.zeros(1, int(x[0])), np.arange(1, 3), mini_batch_size=1)


class Held(nn.Module):
    """A model that does not come to its end before somebody opens the gate."""

    def __init__(self, marks: Any, gate: Any) -> None:
        super().__init__()
        self.marks, self.gate = marks, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks.add("began")
        self.gate.wait()
        return x


@pytest.mark.concurrent
def test_it_can_be_cancelled_and_limited(
    pool: ParallelPool, marks: Any, make_gate: Any, check_pool: Any, eventually: Any
) -> None:
    with ThreadPoolExecutor(1) as executor:
        job = executor.submit(
            pool.predict, Held(marks, make_gate()), torch.arange(8), mini_batch_size=1
        )
        assert eventually(lambda: marks.count("began"))
        pool.cancel_all()
        with pytest.raises(CancelledError, match="prediction was cancelled"):
            job.result(300)
    with pytest.raises(TaskTimeoutError, match="predict"):
        pool.options(timeout_s=1.0).predict(
            Held(marks, make_gate()), torch.arange(8), mini_batch_size=4
        )
    check_pool(pool)


@pytest.mark.processes
def test_what_cannot_travel_is_named(pool: ParallelPool) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match="lock"):
        pool.predict(nn.Identity(), np.ones(3), output=lambda y: (lock, y))


@pytest.mark.arguments
def test_a_pool_that_was_shut_down(make_pool: Any) -> None:
    with make_pool(1) as pool:
        pass
    with pytest.raises(PoolClosedError):
        pool.predict(nn.Identity(), np.ones(3))


@pytest.mark.processes
def test_a_worker_that_dies_is_replaced_and_nothing_is_missing(
    pool: ParallelPool, marks: Any
) -> None:
    class Dying(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if 8 in x and not marks.all():
                marks.add("died")
                os._exit(3)
            return x

    assert pool.predict(Dying(), torch.arange(30), mini_batch_size=4).tolist() == list(range(30))
    assert marks.count("died") == 1


@pytest.mark.processes
def test_memory_stays_flat(pool: ParallelPool) -> None:
    """Of data that would not fit into the object store (200 MB), a piece at a time is there."""
    x = np.zeros((600, 500_000), np.float16)  # 600 MB of which nothing is touched

    outputs = pool.predict(lambda y: y[:, 0].float(), x, mini_batch_size=10)
    assert outputs.shape == (600,)
