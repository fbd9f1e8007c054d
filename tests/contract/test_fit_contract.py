"""What `pool.fit` promises in every kind of pool. On Ray it trains on all workers, else on one: the
model is the same.
"""

from __future__ import annotations

import collections
import copy
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import raypool
from raypool import ParallelPool, parpool, report
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError, TrainingError
from raypool.train.runs import RunOptions
from raypool.train.training_options import TrainingOptions
from raypool.worker.running import note_here

pytestmark = pytest.mark.semantics

WAIT_S = 300.0
"""The first training in a worker imports torch and Ray Train, which takes long where much else
runs.
"""

INPUTS = np.random.default_rng(0).normal(size=(50, 4))
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


@pytest.fixture(scope="module")
def alone() -> Iterator[ParallelPool]:
    """A pool of this process."""
    with parpool(1, profile="inline", quiet=True) as pool:
        yield pool


def options(**changes: Any) -> TrainingOptions:
    return TrainingOptions(
        **{"mini_batch_size": 12, "max_epochs": 2, "learning_rate": 0.05, **changes}
    )


def fit(
    pool: ParallelPool,
    data: Any = (INPUTS, TARGETS),
    run_options: RunOptions | None = None,
    **changes: Any,
) -> Any:
    return pool.fit(make_model, data, mse_loss, options(**changes), run_options=run_options).result(
        WAIT_S
    )


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=1e-12
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam", "schedule": "cosine", "warmup_steps": 2},
        {"worker_load": [2, 1, 0], "clip_gradient_norm": 0.2, "accumulate_steps": 2},
        {"scale_batch": "per_worker", "mini_batch_size": 4, "shuffle": "never"},
        {"strategy": "fsdp", "shuffle": "once"},
    ],
    ids=["adam", "loads", "per worker", "fsdp"],
)
def test_the_same_options_give_the_same_model(
    pool: ParallelPool, alone: ParallelPool, changes: dict[str, Any]
) -> None:
    if changes.get("scale_batch"):
        alone_changes = {**changes, "scale_batch": None, "mini_batch_size": 12}
    else:
        alone_changes = {**changes, "worker_load": None}
    ours, theirs = fit(pool, **changes), fit(alone, **alone_changes)
    assert_same(ours.model, theirs.model)
    assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"])
    assert ours.metrics_frame["epoch"].tolist() == [0, 1]
    assert ours.metrics_frame["rank"].tolist() == [0, 0]


@pytest.mark.everywhere
def test_the_model_comes_back_ready_to_use(pool: ParallelPool) -> None:
    torch.manual_seed(0)
    given = make_model()
    before = copy.deepcopy(given.state_dict())
    result = pool.fit(given, (INPUTS, TARGETS), mse_loss, options()).result(WAIT_S)
    assert type(result.model) is nn.Sequential
    assert not result.model.training
    assert all(
        parameter.device.type == "cpu" and parameter.requires_grad
        for parameter in result.model.parameters()
    )
    torch.testing.assert_close(dict(given.state_dict()), dict(before), rtol=0, atol=0)
    assert given.training


@pytest.mark.threads
def test_the_model_trained_is_that_of_the_call(make_gate: Any) -> None:
    """Whatever becomes of it while it waits and trains."""
    gate, given = make_gate(), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()

    def loss(outputs: Any, targets: Any) -> Any:
        gate.wait()
        return mse_loss(outputs, targets)

    with parpool(1, profile="threads", quiet=True) as pool:
        run = pool.fit(given, (INPUTS, TARGETS), loss, options())
        given[0], given[1] = nn.Linear(4, 9), nn.Linear(9, 1)
        gate.open()
        model = run.result(WAIT_S).model
    assert [each.out_features for each in model] == [5, 1]
    assert model[0].weight.dtype == torch.float64


def test_a_table_of_classes(pool: ParallelPool) -> None:
    frame = pd.DataFrame(INPUTS, columns=list("abcd")).assign(label=(TARGETS[:, 0] > 0).astype(int))
    changes = {"max_epochs": 20, "learning_rate": 0.1, "optimizer": "adam"}
    run = pool.fit(lambda: nn.Linear(4, 2), frame, cross_entropy, options(**changes))
    model = run.result(WAIT_S).model
    assert model.weight.dtype == torch.float32
    outputs = model(torch.tensor(INPUTS, dtype=torch.float32))
    assert (outputs.argmax(1).numpy() == frame["label"]).mean() > 0.9


def test_the_callers_random_numbers_stay_as_they_were(pool: ParallelPool) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    fit(pool)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


@pytest.mark.threads
def test_workers_0_is_this_process(make_gate: Any) -> None:
    gate = make_gate()
    with parpool(1, profile="threads", quiet=True) as pool:
        pool.parfeval(gate.wait)  # so that a training on the worker would wait
        run = pool.fit(make_model, (INPUTS, TARGETS), mse_loss, options(), workers=0)
        assert run.result(WAIT_S).model is not None
        gate.open()


def test_what_differs_from_the_options_is_said_unless_progress_is_off(
    alone: ParallelPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool with quiet=True hides only the line about what was started."""
    alone.fit(make_model, (INPUTS, TARGETS), mse_loss, options()).result(WAIT_S)
    assert "raypool: Each epoch leaves out 2 of 50 samples" in capsys.readouterr().out
    alone.fit(make_model, (INPUTS, TARGETS), mse_loss, options(), progress=False).result(WAIT_S)
    assert not capsys.readouterr().out


@pytest.mark.threads
def test_a_worker_that_is_about_to_leave_does_not_train(
    make_gate: Any, eventually: Callable[..., bool]
) -> None:
    gate = make_gate()
    with parpool(2, profile="threads", quiet=True) as pool:
        stays = pool.options(worker=1).parfeval(gate.wait)
        assert eventually(stays.running)
        leaves = pool.parfeval(gate.wait)
        assert eventually(leaves.running)
        pool.resize(1)  # worker 0 goes, after what it runs: worker 1 has a task that must be there
        run = pool.fit(make_model, (INPUTS, TARGETS), mse_loss, options())
        gate.open()
        assert run.result(WAIT_S).model is not None


class Two(nn.Module):
    """A model of two inputs, called as `forward` names them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(a) + self.second(b)
        return result


@pytest.mark.processes
def test_inputs_in_any_form_train_the_same_model(pool: ParallelPool) -> None:
    """As a tuple, by name, from samples that are dicts, from a loader that pads; the trained model
    predicts from each.
    """
    a, b = INPUTS[:, :2], INPUTS[:, 2:]
    rows = [
        {"b": y, "a": x, "name": "row", "label": t} for x, y, t in zip(a, b, TARGETS, strict=True)
    ]

    class Encoding(collections.UserDict[str, Any]):
        """What tokenizers give; a process that loads cannot pickle it, as one of a script."""

    def padded(batch: Any) -> Any:
        return Encoding(
            {
                name: torch.stack([torch.tensor(row[name]).float() for row in batch])
                for name in ("a", "b", "label")
            }
        )

    forms = [
        ((a, b), TARGETS),
        ({"b": b, "a": a}, TARGETS),
        [((x, y), t) for x, y, t in zip(a, b, TARGETS, strict=True)],
        rows,
        DataLoader(rows, 12, shuffle=True, collate_fn=padded, num_workers=2),  # type: ignore[arg-type]
    ]
    models = [
        pool.fit(Two, data, mse_loss, options(max_epochs=1)).result(WAIT_S).model for data in forms
    ]
    for model in models[1:]:
        torch.testing.assert_close(dict(model.state_dict()), dict(models[0].state_dict()))
    only = [{"image": x, "label": t} for x, t in zip(a, TARGETS, strict=True)]
    model = (
        pool.fit(lambda: nn.Linear(2, 1), only, mse_loss, options(max_epochs=1))
        .result(WAIT_S)
        .model
    )
    np.testing.assert_allclose(pool.predict(model, only), pool.predict(model, a), rtol=1e-5)
    outputs = pool.predict(models[0], (a, b))
    np.testing.assert_allclose(pool.predict(models[0], rows), outputs, rtol=1e-5)
    np.testing.assert_allclose(pool.predict(models[0], {"b": b, "a": a}), outputs, rtol=1e-5)


class Bags(nn.Module):
    """Its input is a list: a table for each sample, of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, bags: list[torch.Tensor], more: Any = None) -> torch.Tensor:
        assert isinstance(bags, list)
        assert more is None
        return torch.stack([self.layer(bag).mean(0) for bag in bags])


def test_a_list_of_the_users_collate_fn_is_one_input(alone: ParallelPool) -> None:
    """Whatever the number of samples: the model may take as many arguments, but means others."""
    rows = [(torch.tensor(INPUTS[i : i + 1 + i % 3]), TARGETS[i]) for i in range(7)]

    def listed(batch: Any) -> Any:
        return [x for x, _ in batch], torch.tensor(np.stack([y for _, y in batch]))

    for size in (1, 2, 3):
        data: Any = DataLoader(rows, size, collate_fn=listed)  # type: ignore[arg-type]
        changes = {"max_epochs": 1, "mini_batch_size": None, "validation_data": data}
        result = alone.fit(Bags, data, mse_loss, options(**changes)).result(WAIT_S)
        with torch.no_grad():
            loss = mse_loss(result.model([x for x, _ in rows]), listed(rows)[1]).item()
        assert result.metrics["validation_loss"] == pytest.approx(loss)


class Halves(torch.utils.data.Sampler[int]):
    """One half of the samples, then the other; what it draws depends on nothing but the
    generators.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter((torch.randperm(24) + 24 * (self.epoch % 2)).tolist())


@pytest.mark.semantics
@pytest.mark.processes
def test_a_sampler_orders_the_samples_the_same_on_all_ranks(
    pool: ParallelPool, alone: ParallelPool, tmp_path: Any
) -> None:
    """Also where a training goes on from a checkpoint."""
    data = DataLoader(
        TensorDataset(torch.tensor(INPUTS), torch.tensor(TARGETS)), 12, sampler=Halves()
    )
    kept = RunOptions(run_dir=tmp_path / "run")
    fit(pool, data, kept, max_epochs=1, checkpoint_every=1)
    assert_same(fit(pool, data, kept, checkpoint_every=1).model, fit(alone, data).model)
    seen = fit(alone, (INPUTS[:24], TARGETS[:24]), max_epochs=1, validation_data=data).metrics
    assert seen["validation_loss"] != seen["loss"]


@pytest.mark.semantics
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_goes_on_from_a_checkpoint(
    pool: ParallelPool, alone: ParallelPool, tmp_path: Any, strategy: str
) -> None:
    """Also one that was made by another number of ranks. With a folder, each epoch makes one."""
    kept, changes = (
        RunOptions(run_dir=tmp_path / "run"),
        {
            "strategy": strategy,
            "optimizer": "adam",
        },
    )
    fit(alone, run_options=kept, max_epochs=2, **changes)
    rest = fit(pool, run_options=kept, max_epochs=4, **changes)
    assert rest.metrics_frame["epoch"].tolist() == [2, 3]
    assert_same(rest.model, fit(pool, max_epochs=4, optimizer="adam").model)
    done = fit(alone, run_options=kept, max_epochs=4, **changes)
    assert_same(done.model, rest.model)


@pytest.mark.parametrize("size", [6, 24])
def test_it_goes_on_with_other_mini_batches(pool: ParallelPool, tmp_path: Any, size: int) -> None:
    """Each epoch that is left is a whole one, with the learning rates that it would have had."""
    kept, changes = RunOptions(run_dir=tmp_path), {"schedule": "linear", "max_epochs": 4}
    stop = {"output_fn": lambda metrics: metrics["epoch"] == 1}
    assert fit(pool, run_options=kept, **changes, **stop).metrics["step"] == 2 * 4 - 1
    rest = fit(pool, run_options=kept, mini_batch_size=size, **changes).metrics_frame
    steps = 50 // size
    assert rest["step"].tolist() == [8 + steps - 1, 8 + 2 * steps - 1]
    assert (rest["loss"] > 0).all()
    whole = fit(pool, mini_batch_size=size, **changes).metrics_frame
    assert rest["learning_rate"].tolist() == whole["learning_rate"].tolist()[2:]


def test_ray_train_ends_its_own_workers_on_a_machine_that_is_about_to_go(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that returned would count as done."""
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: "soon")
    result = fit(pool)
    assert (result.ended_by, result.values[0]["epochs"]) == ("max_epochs", 2)


@pytest.mark.parametrize("every", [1, 3])
def test_a_machine_that_is_about_to_go_is_noticed_with_one_step_per_epoch(
    pool: ParallelPool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    changes = {"mini_batch_size": 50, "max_epochs": 4}
    whole, notes = fit(pool, **changes), iter([False, True])

    def look() -> Any:
        note_here().has_heard = is_going = next(notes, False)
        return "soon" if is_going else None

    monkeypatch.setattr("ray.train.get_preemption_info", look)
    monkeypatch.setattr("raypool.train.fit_loop.LOOK_S", 0)  # at each step
    kept = RunOptions(run_dir=tmp_path)
    result = fit(pool, run_options=kept, checkpoint_every=every, **changes)
    assert result.metrics_frame["epoch"].tolist() == [0, 1, 2, 3]
    assert result.metrics_frame["attempt"].tolist() == [1, 1, 2, 2]
    assert_same(result.model, whole.model)


@pytest.mark.threads
def test_a_stop_and_a_machine_that_is_about_to_go_in_one_epoch(
    monkeypatch: pytest.MonkeyPatch, eventually: Any, caplog: Any
) -> None:
    runs: queue.Queue[Any] = queue.Queue()

    def look() -> Any:
        note = note_here()
        runs.get(timeout=WAIT_S).request_stop()
        assert eventually(lambda: note.should_stop, WAIT_S)
        note.has_heard = True
        return "soon"

    monkeypatch.setattr("ray.train.get_preemption_info", look)
    with parpool(1, profile="threads", quiet=True) as pool:
        kept = RunOptions(best_metric="loss")
        run = pool.fit(make_model, (INPUTS, TARGETS), mse_loss, options(), run_options=kept)
        runs.put(run)
        result = run.result(WAIT_S)
    assert (result.ended_by, result.values[0]["steps"], run.attempts) == ("request_stop", 1, 1)
    assert result.model is not None
    assert "best_metric" not in caplog.text, "of a checkpoint that is only to resume from"


@pytest.mark.semantics
@pytest.mark.processes
def test_a_training_that_is_stopped_can_go_on_from_there(
    pool: ParallelPool, alone: ParallelPool, tmp_path: Any
) -> None:
    stops = {
        "output_fn": lambda metrics: metrics["epoch"] == 2,
        "checkpoint_every": 2,
        "max_epochs": 5,
    }
    stopped = fit(pool, run_options=RunOptions(run_dir=tmp_path), **stops)
    assert (stopped.ended_by, stopped.values[0]["epochs"]) == ("output_fn", 3)
    assert stopped.metrics["epoch"] == 2
    assert len(stopped.metrics_frame) == 3
    gone_on = fit(pool, run_options=RunOptions(run_dir=tmp_path), checkpoint_every=2, max_epochs=5)
    assert gone_on.metrics_frame["epoch"].tolist() == [3, 4]
    assert_same(gone_on.model, fit(alone, max_epochs=5).model)


@pytest.mark.semantics
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_best_model_or_the_last(pool: ParallelPool, tmp_path: Any, strategy: str) -> None:
    """It gets worse from the third epoch on; the best is not forgotten where a training goes on
    from a checkpoint.
    """

    def worse_and_worse(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 1.0 if epoch < 3 else 30.0
        )

    changes = {
        "validation_data": (INPUTS, TARGETS),
        "schedule": worse_and_worse,
        "checkpoint_every": 1,
        "strategy": strategy,
    }
    for kind in ("last", "best"):
        kept = RunOptions(run_dir=tmp_path / kind)
        first = fit(pool, run_options=kept, max_epochs=4, output_model=kind, **changes)
        second = fit(pool, run_options=kept, max_epochs=5, output_model=kind, **changes)
        losses = [*first.metrics_frame["validation_loss"], *second.metrics_frame["validation_loss"]]
        assert losses[-1] > min(losses)
        loss = mse_loss(second.model(torch.tensor(INPUTS)), torch.tensor(TARGETS)).item()
        assert loss == pytest.approx(losses[-1] if kind == "last" else min(losses), rel=1e-9)


@pytest.mark.semantics
@pytest.mark.processes
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_loss_that_the_ranks_cannot_share_exactly_is_said(
    pool: ParallelPool, caplog: Any, precision: str
) -> None:
    def some_ignored(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, ignore_index=0)

    def model() -> nn.Module:
        return nn.Linear(4, 2)

    classes = np.arange(50) % 3 // 2
    changes = options(max_epochs=1, precision=precision)
    for loss, is_said in ((cross_entropy, False), (some_ignored, True)):
        caplog.clear()
        pool.fit(model, (INPUTS, classes), loss, changes).result(WAIT_S)
        assert ("not the plain mean" in caplog.text) is (
            is_said and pool.workers[0].pid != os.getpid()
        )


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loss_that_is_a_sum_trains_as_on_one_worker_or_not_at_all(pool: ParallelPool) -> None:
    def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).sum()

    run = pool.fit(make_model, (INPUTS, TARGETS), summed, options(max_epochs=1))
    if pool.workers[0].pid == os.getpid():  # "threads" and "inline" have one rank
        assert run.result(WAIT_S).ended_by == "max_epochs"
        return
    with pytest.raises(TrainingError, match="returns the sum over its samples"):
        run.result(WAIT_S)
    assert run.metrics.empty


def test_options_hold_where_a_checkpoint_was_made_with_others(
    alone: ParallelPool, tmp_path: Any
) -> None:
    models = []
    for number, weight_decay in enumerate((0.0, 0.5)):
        kept = RunOptions(run_dir=tmp_path / str(number))
        fit(alone, run_options=kept, max_epochs=1, checkpoint_every=1)
        models.append(fit(alone, run_options=kept, max_epochs=3, weight_decay=weight_decay).model)
    plain, decayed = (
        sum(each.square().sum().item() for each in model.parameters()) for model in models
    )
    assert decayed < 0.9 * plain


def test_a_new_run_from_a_checkpoint_judges_by_its_own_validations(
    alone: ParallelPool, tmp_path: Any
) -> None:
    """On other data, whose losses are never as low: neither patience nor the best model is that of
    the run before. The same run resumed has both.
    """
    others = INPUTS, TARGETS + 10
    changes = {"patience": 2, "output_model": "best", "max_epochs": 5}
    first = fit(
        alone,
        run_options=RunOptions(run_dir=tmp_path),
        validation_data=(INPUTS, TARGETS),
        **changes,
    )
    changes["max_epochs"] = 9
    start, own = RunOptions(start_from=first.checkpoint), RunOptions(run_dir=tmp_path)
    result, rest = (
        fit(alone, others, run_options=kept, validation_data=others, learning_rate=1e-3, **changes)
        for kept in (start, own)
    )
    losses = result.metrics_frame["validation_loss"].tolist()
    assert result.metrics_frame["epoch"].tolist() == [5, 6, 7, 8]
    assert losses == sorted(losses, reverse=True)
    assert min(losses) > first.metrics["validation_loss"]
    with torch.no_grad():
        loss = mse_loss(result.model(torch.tensor(INPUTS)), torch.tensor(others[1])).item()
    assert loss == pytest.approx(losses[-1])
    assert rest.ended_by == "patience"
    assert_same(rest.model, first.model)


def test_the_best_since_it_is_wanted(alone: ParallelPool, tmp_path: Any) -> None:
    """A run without that has kept no model of its lowest loss, which no later one reaches."""

    def uphill(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 1.0 if epoch < 3 else -0.1
        )

    kept = RunOptions(run_dir=tmp_path)
    changes = {"validation_data": (INPUTS, TARGETS), "schedule": uphill}
    first = fit(alone, run_options=kept, max_epochs=3, **changes)
    result = fit(alone, run_options=kept, max_epochs=6, output_model="best", **changes)
    losses = result.metrics_frame["validation_loss"].tolist()
    assert first.metrics["validation_loss"] < losses[0] < losses[-1]
    with torch.no_grad():
        loss = mse_loss(result.model(torch.tensor(INPUTS)), torch.tensor(TARGETS)).item()
    assert loss == pytest.approx(losses[0])


def test_a_start_from_a_checkpoint_that_leaves_no_epoch_is_said(
    alone: ParallelPool, tmp_path: Any, caplog: Any
) -> None:
    own = RunOptions(run_dir=tmp_path)
    first = fit(alone, run_options=own)
    fit(alone, run_options=own)
    assert "No epoch" not in caplog.text, "of a run that is complete"
    result = fit(alone, run_options=RunOptions(start_from=first.checkpoint))
    assert "No epoch was trained: the checkpoint of start_from has 2 epochs" in caplog.text
    assert result.values[0].keys() == first.values[0].keys()


def test_how_often_it_reports_changes_no_model(alone: ParallelPool) -> None:
    """Also where a schedule follows the loss: it is given that of the epoch."""

    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    noisy = TARGETS + np.random.default_rng(1).normal(size=TARGETS.shape)
    changes = {"schedule": plateau, "max_epochs": 12, "mini_batch_size": 5}
    results = [fit(alone, (INPUTS, noisy), report_every=every, **changes) for every in (None, 1, 4)]
    for result in results[1:]:
        assert_same(result.model, results[0].model)
    assert results[0].metrics["learning_rate"] < 0.05


def test_numbers_of_numpy_do_not_spoil_a_checkpoint(alone: ParallelPool, tmp_path: Any) -> None:
    """Neither those of the options nor those that a schedule computes or counts with."""

    def cosine(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(0.1 * epoch))

    def milestones(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 3]))

    number = np.float64(0.05)
    cases: list[dict[str, Any]] = [
        {"learning_rate": number, "weight_decay": number, "momentum": number},
        {"schedule": cosine, "optimizer": "adam"},
        {"schedule": milestones},
    ]
    for index, changes in enumerate(cases):
        kept = RunOptions(run_dir=tmp_path / str(index))
        fit(alone, run_options=kept, max_epochs=2, **changes)
        rest = fit(alone, run_options=kept, max_epochs=4, **changes)
        assert rest.metrics_frame["epoch"].tolist() == [2, 3]
        assert_same(rest.model, fit(alone, max_epochs=4, **changes).model)


def test_what_could_not_be_loaded_again_is_no_checkpoint(
    alone: ParallelPool, tmp_path: Any
) -> None:
    """It is said when the first is made, not when it is needed."""
    kept = RunOptions(run_dir=tmp_path)
    with pytest.raises(TrainingError, match=r"Unnamed.*get_extra_state") as raised:
        alone.fit(
            lambda: WithSet(4, 1).double(), (INPUTS, TARGETS), mse_loss, options(), run_options=kept
        ).result(WAIT_S)
    assert isinstance(raised.value.__cause__, InvalidTypeError)
    assert raised.value.result.checkpoint is None


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_a_momentum_that_a_schedule_moves_goes_on(
    alone: ParallelPool, tmp_path: Any, kind: str
) -> None:
    def schedule(optimizer: Any) -> Any:
        if kind == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=12)
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.02, step_size_up=3)

    changes, kept = {"schedule": schedule}, RunOptions(run_dir=tmp_path)
    fit(alone, run_options=kept, max_epochs=2, **changes)
    rest = fit(alone, run_options=kept, max_epochs=4, **changes)
    assert_same(rest.model, fit(alone, max_epochs=4, **changes).model)


@pytest.mark.parametrize(("first", "second"), [("adam", "sgdm"), ("adamw", "adam")])
def test_another_optimizer_than_a_checkpoint_was_made_with(
    alone: ParallelPool, tmp_path: Any, first: str, second: str
) -> None:
    kept = RunOptions(run_dir=tmp_path)
    fit(alone, run_options=kept, optimizer=first)
    with pytest.raises(TrainingError, match="was made with the optimizer Adam"):
        fit(alone, run_options=kept, optimizer=second, max_epochs=3)


def test_floats_of_a_tensor_dataset_become_the_type_of_the_model(alone: ParallelPool) -> None:
    """As those of any data set; whole numbers and other floats stay as they are."""
    data = TensorDataset(torch.tensor(INPUTS), torch.tensor(TARGETS))
    for each in (data, DataLoader(data, 12)):
        run = alone.fit(lambda: nn.Linear(4, 1), each, mse_loss, options())
        assert run.result(WAIT_S).model.weight.dtype == torch.float32
    halves = TensorDataset(torch.tensor(INPUTS).half(), torch.tensor(TARGETS))
    with pytest.raises(TrainingError, match="dtype"):
        alone.fit(lambda: nn.Linear(4, 1), halves, mse_loss, options()).result(WAIT_S)


def test_a_loss_that_is_no_number_ends_it_and_is_said(pool: ParallelPool, caplog: Any) -> None:
    result = fit(pool, (np.full((50, 4), np.nan), TARGETS), checkpoint_every=1)
    assert result.ended_by == "loss is nan"
    assert result.checkpoint is None
    assert "because its loss is NaN" in caplog.text


def test_what_it_was_trained_on_it_predicts(pool: ParallelPool) -> None:
    table = pd.DataFrame(
        {"a": [1, 2, 3, 4] * 5, "b": [True, False] * 10, "y": np.linspace(0, 1, 20)}
    )
    model = pool.fit(nn.Linear(2, 1), table, mse_loss, options(max_epochs=1)).result(WAIT_S).model
    assert pool.predict(model, table[["a", "b"]]).shape == (20, 1)


class WithMore(nn.Linear):
    """It keeps something in its state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": np.float64(3)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Unnamed:
    """Something that torch does not load for safety."""


class WithSet(nn.Linear):
    """It keeps that in its state."""

    def get_extra_state(self) -> Any:
        return Unnamed()

    def set_extra_state(self, state: Any) -> None:
        assert isinstance(state, Unnamed)


def test_without_a_pool_one_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ParallelPool] = []

    def open_inline() -> ParallelPool:
        opened.append(parpool(1, profile="inline", quiet=True))
        return opened[-1]

    monkeypatch.setattr("raypool.pool.parpool", open_inline)
    monkeypatch.setattr("raypool.pool._opened", [])
    monkeypatch.setattr("raypool.pool._made_here", None)
    for _ in range(2):
        assert (
            raypool.fit(make_model, (INPUTS, TARGETS), mse_loss, options()).result(WAIT_S).ended_by
            == "max_epochs"
        )
    (pool,) = opened
    pool.delete()


@pytest.mark.semantics
@pytest.mark.processes
def test_a_model_with_more_than_tensors_in_its_state(pool: ParallelPool) -> None:
    model = (
        pool.fit(lambda: WithMore(4, 1).double(), (INPUTS, TARGETS), mse_loss, options())
        .result(WAIT_S)
        .model
    )
    assert model.seen == 3


def test_its_progress_is_shown_while_somebody_waits_for_it() -> None:
    """Also of one whose loss reports something before the first epoch is over."""
    has_reported, is_shown, bars = threading.Event(), threading.Event(), []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.said = [desc, total]
            bars.append(self)
            is_shown.set()

        def update(self, step: int) -> None:
            self.said.append(step)

    def loss(ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        report(scale=1.0)
        has_reported.set()
        assert is_shown.wait(WAIT_S)
        return mse_loss(ours, target)

    with parpool(1, profile="threads", quiet=True) as pool:
        run = pool.fit(make_model, (INPUTS, TARGETS), loss, options(max_epochs=3), progress=Bar)
        assert has_reported.wait(WAIT_S)
        assert run.result(WAIT_S).metrics["epoch"] == 2
    (bar,) = bars
    assert bar.said[:2] == ["fit", 3]
    assert sum(bar.said[2:]) == 3


@pytest.mark.arguments
def test_what_cannot_work_is_refused_at_the_call(pool: ParallelPool) -> None:
    data = INPUTS, TARGETS
    with pytest.raises(InvalidTypeError, match="options=\\{\\} is a dict"):
        pool.fit(make_model, data, mse_loss, {})  # type: ignore[arg-type]
    for kept, message in (
        ({"best_metric": "los"}, "'los' is not reported by fit. Did you mean loss?"),
        ({"best_metric": "validation_loss"}, "validation_loss with validation_data="),
    ):
        with pytest.raises(InvalidValueError, match=message):
            pool.fit(make_model, data, mse_loss, run_options=RunOptions(**kept))  # type: ignore[arg-type]
    rare = options(validation_data=data, validation_frequency=3, checkpoint_every=2)
    kept_by = RunOptions(keep_checkpoints=2, best_metric="validation_loss")
    with pytest.raises(
        InvalidValueError, match="every 3 epochs, but a checkpoint is saved every 2"
    ):
        pool.fit(make_model, data, mse_loss, rare, lane="managed", run_options=kept_by)
    with pytest.raises(InvalidValueError, match="'warm' or 'managed', not 'Warm'"):
        pool.fit(make_model, data, mse_loss, lane="Warm")
    with pytest.raises(InvalidTypeError, match="progress must be True"):
        pool.fit(make_model, data, mse_loss, progress=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="model=3"):
        pool.fit(3, data, mse_loss)
    with pytest.raises(InvalidTypeError, match="loss=None is not callable"):
        pool.fit(make_model, data, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="50 inputs and 49 targets"):
        pool.fit(make_model, (INPUTS, TARGETS[1:]), mse_loss)
    with pytest.raises(InvalidValueError, match="2 numbers, but 3 workers"):
        pool.fit(make_model, data, mse_loss, options(worker_load=[1, 1]))
    with pytest.raises(InvalidValueError, match="There are 2 samples for 3 workers"):
        pool.fit(make_model, (INPUTS[:2], TARGETS[:2]), mse_loss)
    with pytest.raises(InvalidValueError, match="no parameters"):
        pool.fit(nn.ReLU(), data, mse_loss, options(strategy="fsdp"))
    assert fit(pool).model is not None


@pytest.mark.semantics
@pytest.mark.processes
def test_gpus_that_are_not_there(pool: ParallelPool) -> None:
    for execution in ("gpu", "multi-gpu"):
        if any(worker.gpu is not None for worker in pool.workers):
            assert fit(pool, execution=execution).values
        else:
            with pytest.raises(ResourceError, match="available 0, of 3 workers"):
                fit(pool, execution=execution)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_function_that_makes_no_model(pool: ParallelPool) -> None:
    with pytest.raises(TrainingError, match="returned a dict"):
        pool.fit(dict, (INPUTS, TARGETS), mse_loss, options()).result(WAIT_S)


@pytest.mark.semantics
@pytest.mark.processes
def test_an_error_of_the_users(pool: ParallelPool) -> None:
    def loss(outputs: Any, targets: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(TrainingError, match="mine") as raised:
        pool.fit(make_model, (INPUTS, TARGETS), loss, options()).result(WAIT_S)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
