"""What `pool.fit` makes of its arguments before anything trains: who trains, on what, and what it
refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raypool.channel.records import WorkerInfo
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError
from raypool.train.data import ArraySamples, DatasetSamples, order_of, take_samples
from raypool.train.fit import FitCall, gradient_bytes, prepare_fit
from raypool.train.fit_loop import FitJob
from raypool.train.training_options import TrainingOptions

MSE = torch.nn.functional.mse_loss


def on_cpus(count: int) -> list[WorkerInfo]:
    return [WorkerInfo(index, "here", index) for index in range(count)]


def on_gpus(*gpus: int | None, host: str = "here") -> list[WorkerInfo]:
    return [
        WorkerInfo(index, host, index, () if gpu is None else (gpu,))
        for index, gpu in enumerate(gpus)
    ]


def prepare(
    workers: list[WorkerInfo], num_samples: int = 130, model: Any = None, **options: Any
) -> FitCall:
    data = torch.zeros(num_samples, 3), torch.zeros(num_samples, 1)
    return prepare_fit(
        model or torch.nn.Linear(3, 1), data, MSE, TrainingOptions(**options), workers
    )


def job_of(call: FitCall) -> FitJob:
    job: FitJob = call.config["fit"]
    return job


def shares(call: FitCall) -> list[int]:
    return [job_of(call).share(rank, len(call.ranks)).size for rank in range(len(call.ranks))]


# --- who trains -----------------------------------------------------------------------------------


def test_a_global_batch_is_shared_out() -> None:
    call = prepare(on_cpus(4), mini_batch_size=130)
    assert (call.ranks, shares(call), call.notes) == ([0, 1, 2, 3], [33, 33, 32, 32], [])
    assert shares(prepare(on_cpus(2), mini_batch_size=96, worker_load=[2, 1])) == [64, 32]


def test_a_worker_without_load_is_left_out_and_named() -> None:
    call = prepare(on_gpus(0, 1, 2, 3, 4), mini_batch_size=32, worker_load=[1, 1, 1, 0, 1])
    assert (call.ranks, shares(call)) == ([0, 1, 2, 4], [8, 8, 8, 8])
    assert "worker 3 (its load is 0)" in call.notes[0]
    assert "parpool(gpus=[0, 1, 2, 4])" in call.notes[0]
    assert "parpool(1)" in prepare(on_cpus(2), worker_load=[1, 0]).notes[0]


@pytest.mark.parametrize(
    ("execution", "gpus", "ranks"),
    [
        ("auto", (None, None), [0, 1]),
        ("auto", (None, 0, 1), [1, 2]),
        ("auto", (0, 0, 1), [0, 2]),
        ("cpu", (None, 0, 1), [0, 1, 2]),
        ("gpu", (None, 0, 1), [1]),
        ("multi-gpu", (None, 0, 1), [1, 2]),
    ],
)
def test_execution_says_who_trains(
    execution: str, gpus: tuple[int | None, ...], ranks: list[int]
) -> None:
    call = prepare(on_gpus(*gpus), mini_batch_size=10, execution=execution)
    assert call.ranks == ranks
    assert job_of(call).is_on_cpu == (execution == "cpu")
    idle = [index for index in range(len(gpus)) if index not in ranks]
    assert all(any(f"worker {index} (" in note for note in call.notes) for index in idle)
    assert idle or not any("Idle" in note for note in call.notes)


def test_the_same_index_on_two_machines_is_two_gpus() -> None:
    workers = [WorkerInfo(0, "a", 0, (0,)), WorkerInfo(1, "b", 0, (0,))]
    assert prepare(workers, mini_batch_size=10, execution="multi-gpu").ranks == [0, 1]


@pytest.mark.parametrize("execution", ["gpu", "multi-gpu"])
def test_gpus_that_are_not_there_are_an_error(execution: str) -> None:
    with pytest.raises(ResourceError, match="available 0, of 2 workers"):
        prepare(on_cpus(2), execution=execution)


@pytest.mark.parametrize("load", [[1], [1, 1, 1]])
def test_a_load_for_each_worker(load: list[int]) -> None:
    with pytest.raises(
        InvalidValueError, match=f"has {len(load)} numbers, but 2 workers may train .*: 0, 1"
    ):
        prepare(on_cpus(2), worker_load=load)


def test_a_load_for_each_worker_that_can_train() -> None:
    workers = on_gpus(None, 0, 1, None, 1)
    call = prepare(workers, mini_batch_size=96, worker_load=[2, 1])
    assert (call.ranks, shares(call)) == ([1, 2], [64, 32])
    for load in ([0, 2, 1, 0, 0], [1, 2, 0, 0, 5]):
        with pytest.raises(InvalidValueError, match=r"but 2 workers may train .*: 1, 2"):
            prepare(workers, worker_load=load)
    call = prepare(workers, mini_batch_size=96, worker_load=[0, 2, 1, 0, 0], execution="cpu")
    assert (call.ranks, shares(call)) == ([1, 2], [64, 32])


def test_fewer_ranks_than_planned_share_the_same_batch() -> None:
    job = job_of(prepare(on_cpus(3), mini_batch_size=96, worker_load=[4, 1, 1]))
    assert [job.share(rank, 3).size for rank in range(3)] == [64, 16, 16]
    assert [job.share(rank, 2).size for rank in range(2)] == [48, 48]
    assert job.share(0, 1).size == 96


# --- on what --------------------------------------------------------------------------------------


def test_a_scaled_batch_and_rate() -> None:
    """64 on one GPU are 256 on four; the rate is four times as high when that is asked for, and
    said.
    """
    plain = prepare(
        on_gpus(0, 1, 2, 3), 2560, mini_batch_size=64, scale_batch="per_worker", learning_rate=0.1
    )
    assert (job_of(plain).division.batch_size, shares(plain), job_of(plain).rate_scale) == (
        256,
        [64] * 4,
        1,
    )
    assert job_of(plain).course.warmup_steps == 0
    scaled = prepare(
        on_gpus(0, 1, 2, 3),
        2560,
        mini_batch_size=64,
        scale_batch="per_worker",
        scale_learning_rate="linear",
        learning_rate=0.1,
    )
    job = job_of(scaled)
    assert (job.rate_scale, job.course.warmup_steps, job.course.num_steps) == (4, 30, 300)
    assert 0.25 < job.course.factor(0) < 0.3
    assert job.course.factor(30) == 1
    assert "0.1 x 4 = 0.4, reached after 30 steps" in scaled.notes[0]
    assert (
        job_of(
            prepare(on_gpus(0), 2560, mini_batch_size=64, scale_batch="per_worker")
        ).division.batch_size
        == 64
    )


def test_what_is_left_over_is_said() -> None:
    call = prepare(on_cpus(2), 130, mini_batch_size=32)
    assert call.notes == [
        "Each epoch leaves out 2 of 130 samples, different ones each time: they do not fill a step"
        " of 32."
    ]
    assert (
        "different ones"
        not in prepare(on_cpus(2), 130, mini_batch_size=32, shuffle="once").notes[0]
    )
    assert prepare(on_cpus(2), 128, mini_batch_size=32).notes == []


def test_a_small_data_set_is_one_batch_and_that_is_said() -> None:
    call = prepare(on_cpus(2), 20, mini_batch_size=32, accumulate_steps=4)
    assert call.notes == [
        "There are 20 samples, so a mini-batch has as many, not 32.",
        "The samples make 1 mini-batches, so a step takes as many, not 4.",
    ]
    assert shares(call) == [10, 10]


@pytest.mark.parametrize(
    ("num_samples", "options", "message"),
    [
        (3, {}, "There are 3 samples for 4 workers.*more samples"),
        (
            100,
            {"mini_batch_size": 2},
            "mini-batch of 2 is less than one sample for each of 4 workers.*mini_batch_size",
        ),
        (100, {"mini_batch_size": 8, "worker_load": [1000, 1, 1, 1]}, "leaves nothing for worker"),
    ],
)
def test_nobody_trains_on_nothing(num_samples: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        prepare(on_cpus(4), num_samples, **options)


def test_the_orders_of_samples() -> None:
    assert order_of(5, "never", 0, 3).tolist() == [0, 1, 2, 3, 4]
    assert order_of(50, "once", 1, 0).tolist() == order_of(50, "once", 1, 7).tolist()
    each = [order_of(50, "every-epoch", 1, epoch).tolist() for epoch in range(3)]
    assert each[0] != each[1] != each[2]
    assert all(sorted(order) == list(range(50)) for order in each)
    assert (
        each[1]
        == order_of(50, "every-epoch", 1, 1).tolist()
        != order_of(50, "every-epoch", 2, 1).tolist()
    )


# --- the forms of data ----------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), index % 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def first_batch(data: Any, count: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    source = take_samples(data).open(torch.device("cpu"), dtype, 0)
    return next(iter(source.batches(torch.arange(count), [(0, count)])))


def test_arrays_have_the_models_type_and_tensors_their_own() -> None:
    inputs, targets = first_batch((np.ones((4, 2)), np.arange(4, dtype=np.int32)))
    assert (inputs.dtype, targets.dtype, targets.tolist()) == (
        torch.float32,
        torch.int64,
        [0, 1, 2],
    )
    inputs, targets = first_batch(
        (torch.ones(4, 2, dtype=torch.float64), torch.arange(4, dtype=torch.int32))
    )
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int32)
    assert (
        first_batch((torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4)))[0].dtype
        == torch.bfloat16
    )


def test_read_only_and_reversed_arrays_are_taken() -> None:
    array = np.arange(8.0).reshape(4, 2)
    array.flags.writeable = False
    assert first_batch((array[::-1], np.arange(4)[::-1].astype(">i8")))[0][0].tolist() == [6.0, 7.0]


def test_tables() -> None:
    frame = pd.DataFrame(
        {"a": [1, 2, 3], "label": pd.Categorical(["x", "y", "x"]), "b": [0.5, 1.5, 2.5]}
    )
    inputs, targets = first_batch((frame, "label"))
    assert (inputs.tolist(), targets.tolist(), targets.dtype) == (
        [[1, 0.5], [2, 1.5], [3, 2.5]],
        [0, 1, 0],
        torch.int64,
    )
    inputs, targets = first_batch(frame.drop(columns="label"))
    assert (inputs.tolist(), targets.tolist()) == ([[1], [2], [3]], [[0.5], [1.5], [2.5]])
    with pytest.raises(InvalidTypeError, match="column 'label' of data is of type category"):
        take_samples(frame)
    with pytest.raises(InvalidValueError, match="no column 'c'"):
        take_samples((frame, "c"))


def test_data_sets() -> None:
    assert isinstance(take_samples(Pairs()), DatasetSamples)
    assert isinstance(take_samples([(1.0, 2.0)] * 2), DatasetSamples)
    assert isinstance(take_samples(TensorDataset(torch.ones(3, 1), torch.ones(3))), ArraySamples)
    inputs, targets = first_batch(Pairs())
    assert (inputs.tolist(), targets.tolist()) == ([[0, 0], [1, 1], [2, 2]], [0, 1, 0])
    with pytest.raises(InvalidTypeError, match="is a Tensor, not a pair"):
        first_batch([torch.ones(2)] * 3)


class Rows:
    """As a data set of Hugging Face gives its samples: dicts of lists, or of tensors once it was
    asked for them.
    """

    def __init__(self, form: str | None = None) -> None:
        self.format = {"type": form}

    def with_format(self, form: str) -> Rows:
        return Rows(form)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"x": [float(index)] * 2, "text": "a", "label": index % 2, "size": float(index)}
        return {
            name: torch.tensor(value) if self.format["type"] and name != "text" else value
            for name, value in row.items()
        }


def test_several_inputs_and_targets() -> None:
    """Each is what it would be alone; a tuple of two is (inputs, targets) also where they are lists
    of numbers.
    """
    x, y = np.arange(4.0), torch.arange(4)
    inputs, targets = first_batch(((x, x[:, None]), {"a": y, "b": x}))
    assert (inputs[0].tolist(), inputs[1].shape, inputs[0].dtype) == (
        [0, 1, 2],
        (3, 1),
        torch.float32,
    )
    assert (targets["a"].tolist(), targets["b"].dtype) == ([0, 1, 2], torch.float32)
    assert first_batch(([1, 2, 3], [4, 5, 6]))[1].tolist() == [4, 5, 6]
    frame = pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6], "c": [0.5, 1.5, 2.5]})
    inputs, targets = first_batch((frame, ["a", "c"]))
    assert (inputs.tolist(), targets.tolist()) == ([[4], [5], [6]], [[1, 0.5], [2, 1.5], [3, 2.5]])
    with pytest.raises(InvalidValueError, match="no column 'd'"):
        take_samples((frame, ["a", "d"]))


def test_samples_that_are_dicts() -> None:
    inputs, targets = first_batch(Rows())
    assert (set(inputs), inputs["x"].tolist(), targets.tolist()) == (
        {"x", "text", "size"},
        [[0, 0], [1, 1], [2, 2]],
        [0, 1, 0],
    )
    assert first_batch((Rows(), "size"))[1].tolist() == [0, 1, 2]
    inputs, targets = first_batch((Rows(), ["size", "label"]))
    assert (set(inputs), targets["size"].tolist(), targets["label"].tolist()) == (
        {"x", "text"},
        [0, 1, 2],
        [0, 1, 0],
    )
    plain = [{"x": 1.5, "y": 2.5}] * 2
    assert first_batch((plain, "y"), 2)[0]["x"].dtype == torch.float32, "as the model has it"
    for data, words in (
        (plain, "of 'x', 'y', with no 'label'"),
        ((plain, "z"), "no 'z'"),
        ((plain, ["x", "y"]), "but targets"),
    ):
        with pytest.raises(InvalidValueError, match=f"{words}.*Pass the target"):
            first_batch(data, 2)


def test_what_a_loader_says_counts_unless_the_options_say_others() -> None:
    """Its batch size and order, its collate_fn and its sampler; without any of them the defaults
    are as they were.
    """

    def division(data: Any, **options: Any) -> Any:
        job = job_of(
            prepare_fit(torch.nn.Linear(2, 1), data, MSE, TrainingOptions(**options), on_cpus(1))
        )
        return job.division.batch_size, job.options.shuffle, len(job.samples)

    pairs = TensorDataset(torch.zeros(500, 2), torch.zeros(500, 1))
    assert division(pairs) == (128, "every-epoch", 500)
    assert division(DataLoader(pairs, 32)) == (32, "never", 500)
    assert division(DataLoader(pairs, 32, shuffle=True)) == (32, "every-epoch", 500)
    assert division(DataLoader(pairs, 32), mini_batch_size=64, shuffle=True) == (
        64,
        "every-epoch",
        500,
    )
    some = DataLoader(pairs, 4, sampler=SubsetRandomSampler(range(9)))
    assert division(some) == (4, "never", 9)
    assert division(DataLoader(pairs, 8, sampler=WeightedRandomSampler([1.0] * 500, 900))) == (
        8,
        "never",
        900,
    )
    with pytest.raises(InvalidValueError, match="shuffle='once' cannot be combined with a sampler"):
        division(some, shuffle="once")
    inputs, targets = first_batch(
        DataLoader(
            Pairs(), collate_fn=lambda batch: {"x": torch.ones(len(batch)), "label": [1, 2, 3]}
        )
    )
    assert (inputs["x"].tolist(), targets) == ([1, 1, 1], [1, 2, 3])


NO_DATA = [
    (lambda: (np.ones((3, 1)), np.ones(4)), InvalidValueError, "3 inputs and 4 targets"),
    (lambda: (np.ones((0, 1)), np.ones(0)), InvalidValueError, "no samples"),
    (lambda: (np.array(["a"]), np.ones(1)), InvalidTypeError, "type <U1, not numbers"),
    (lambda: (np.float64(1), np.ones(1)), InvalidValueError, "a single number"),
    (lambda: (torch.tensor(1.0), torch.ones(1)), InvalidValueError, "a single number"),
    (lambda: torch.ones(3), InvalidTypeError, "of type Tensor, without targets"),
    (lambda: np.ones(3), InvalidTypeError, "of type ndarray, without targets"),
    (lambda: pd.Series([1.0]), InvalidTypeError, "of type Series, without targets"),
    (lambda: Endless(), InvalidTypeError, "can only be iterated.*list\\(data\\).*pool.train"),
    (
        lambda: DataLoader(Endless()),
        InvalidTypeError,
        "of type Endless, which can only be iterated",
    ),
    (lambda: iter([(1.0, 2.0)]), InvalidTypeError, "can only be iterated"),
    (
        lambda: DataLoader(Pairs(), batch_size=None),
        InvalidTypeError,
        "Set the DataLoader.s batch_size",
    ),
    (
        lambda: DataLoader(Pairs(), batch_sampler=[[0, 1], [2]]),
        InvalidTypeError,
        "its own batch_sampler",
    ),
    (
        lambda: DataLoader(Pairs(), sampler=DistributedSampler(Pairs(), 2, 0)),
        InvalidTypeError,
        "Leave the sampler out",
    ),
    (lambda: DataLoader(Pairs(), sampler=Endless()), InvalidTypeError, "Endless, has no length"),
    (
        lambda: {"train": Pairs(), "test": Pairs()},
        InvalidTypeError,
        "a dict of 'train', 'test'. Pass one of its parts",
    ),
    (
        lambda: ((np.ones((3, 1)), np.ones((4, 1))), np.ones(3)),
        InvalidValueError,
        "3 and 4 inputs and 3 targets",
    ),
    (
        lambda: ([np.ones(3), np.zeros(3)], np.ones(3)),
        InvalidValueError,
        "2 inputs and 3 targets.*inputs are a tuple",
    ),
    (lambda: ((), np.ones(3)), InvalidValueError, "no inputs and 3 targets"),
    (lambda: None, InvalidTypeError, "of type NoneType"),
    (lambda: 7, InvalidTypeError, "of type int"),
    (list, InvalidValueError, "no samples"),
    (lambda: pd.DataFrame(), InvalidValueError, "no column"),
    (lambda: pd.DataFrame({"a": [1.0]}), InvalidValueError, "the target"),
]


def test_data_that_cannot_be_trained_on() -> None:
    for make, kind, message in NO_DATA:
        with pytest.raises(kind, match=message):
            take_samples(make())


# --- models and losses ----------------------------------------------------------------------------


def frozen() -> torch.nn.Module:
    return torch.nn.Linear(3, 1).requires_grad_(False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_trained(strategy: str) -> None:
    with pytest.raises(InvalidTypeError, match="'resnet' is a str"):
        prepare(on_cpus(2), model="resnet", strategy=strategy)
    with pytest.raises(InvalidTypeError, match="model=Linear cannot be called without arguments"):
        prepare(on_cpus(2), model=torch.nn.Linear, strategy=strategy)
    for model, message in (
        (torch.nn.Tanh(), "a Tanh, cannot be trained: it has no parameters"),
        (frozen(), "all its 2 parameters are frozen"),
        (torch.nn.LazyLinear(3), "'weight' of the model has no size yet"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            prepare(on_cpus(2), model=model, strategy=strategy)


def test_a_loss_that_cannot_be_called() -> None:
    with pytest.raises(InvalidTypeError, match="loss='mse' is not callable"):
        prepare_fit(
            torch.nn.Linear(1, 1),
            (torch.ones(2, 1), torch.ones(2, 1)),
            "mse",
            TrainingOptions(),
            on_cpus(1),
        )


def test_a_loss_that_is_a_class() -> None:
    with pytest.raises(InvalidTypeError, match=r"loss=MSELoss\(\)"):
        prepare_fit(
            torch.nn.Linear(1, 1),
            (torch.ones(2, 1), torch.ones(2, 1)),
            torch.nn.MSELoss,
            TrainingOptions(),
            on_cpus(1),
        )


@pytest.mark.parametrize(
    "loss",
    [torch.nn.MSELoss(reduction="sum"), functools.partial(MSE, reduction="none")],
    ids=["module", "partial"],
)
def test_a_loss_that_is_no_mean(loss: Any) -> None:
    with pytest.raises(InvalidValueError, match="reduction='mean'"):
        prepare_fit(
            torch.nn.Linear(1, 1),
            (torch.ones(2, 1), torch.ones(2, 1)),
            loss,
            TrainingOptions(),
            on_cpus(1),
        )


def test_a_loss_that_would_have_to_be_trained() -> None:
    """A frozen one is taken."""
    loss: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    data = torch.ones(2, 1), torch.ones(2, 1)
    prepare = functools.partial(prepare_fit, torch.nn.Linear(1, 1), data, loss)
    with pytest.raises(InvalidValueError, match=r"has 2 parameters .*'0.weight'.* into the model"):
        prepare(TrainingOptions(), on_cpus(1))
    loss.requires_grad_(False)
    assert job_of(prepare(TrainingOptions(), on_cpus(1))).loss is loss


def test_the_data_travel_once() -> None:
    data = (torch.zeros(9, 3), torch.zeros(9, 1))
    call = prepare(on_cpus(1), validation_data=data, patience=2)
    assert job_of(call).options.validation_data == ()
    assert len(job_of(call).validation or ()) == 9


def test_the_size_of_gradients() -> None:
    assert gradient_bytes(prepare(on_cpus(1)).config) == 16
    assert (
        gradient_bytes(prepare(on_cpus(1), model=lambda: torch.nn.Linear(3, 1).double()).config)
        == 32
    )
