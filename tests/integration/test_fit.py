"""`pool.fit` on real ranks: it comes to what one process comes to, and every rank to the same.

One process is a loop in plain torch here, with whole mini-batches; only the order of the samples is
taken from raypool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from raypool import ParallelPool, parpool
from raypool.errors import InvalidValueError, TrainingError
from raypool.train.data import order_of
from raypool.train.fit import prepare_fit
from raypool.train.fit_loop import Measure, measure_loop
from raypool.train.runs import RunOptions
from raypool.train.training_options import TrainingOptions

WAIT_S = 300.0
"""The first training in a worker imports torch and Ray Train, which takes long where much else
runs.
"""

NUM_SAMPLES = 130
BATCH = 32


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()


def make_norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(3)
    return make_model()


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(
        NUM_SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return inputs, inputs.sum(1, keepdim=True).sin()


def options(**changes: Any) -> TrainingOptions:
    return TrainingOptions(
        **{
            "mini_batch_size": BATCH,
            "max_epochs": 3,
            "learning_rate": 0.02,
            "report_every": 1,
            **changes,
        }
    )


def train_alone(
    model: nn.Module,
    data: Any,
    optimizer: Any,
    *,
    epochs: int = 3,
    accumulate: int = 1,
    clip: Any = None,
) -> Any:
    """Train in one process, with whole mini-batches; return the model and the loss of each
    iteration.
    """
    model = copy.deepcopy(model)
    optimizer = optimizer(model.parameters())
    losses = []
    for epoch in range(epochs):
        order = order_of(NUM_SAMPLES, "every-epoch", 0, epoch)
        steps = NUM_SAMPLES // (BATCH * accumulate)
        for group in order[: steps * BATCH * accumulate].view(steps, accumulate, BATCH):
            total = 0.0
            for chosen in group:
                loss = mse_loss(model(data[0][chosen]), data[1][chosen]) / accumulate
                loss.backward()
                total += loss.item()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return model, losses


def assert_same_model(ours: nn.Module, theirs: nn.Module, atol: float = 1e-12) -> None:
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=atol
    )


def train_and_show(config: dict[str, Any]) -> Any:
    """Train as `pool.fit` does; return this rank's own parameters and buffers, and how many samples
    it took of a mini-batch.
    """
    from raypool.train.fit_loop import RankTraining, ranks_here

    training = RankTraining(config["fit"], ranks_here(config["fit"]))
    training.run()
    return training._learner.module.state_dict(), training._learner.share.size


def ranks_of(
    pool: ParallelPool, model: Any, data: Any, options: TrainingOptions, workers: int = 3
) -> Any:
    """Train on so many workers; return the states of all ranks, and their shares."""
    call = prepare_fit(model, data, mse_loss, options, pool.workers[:workers])
    return zip(
        *pool.train(train_and_show, call.config, workers=call.ranks).result(WAIT_S).values,
        strict=True,
    )


# --- equal to one process -------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgdm": (
        {"optimizer": "sgdm"},
        lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        {},
    ),
    "adam, loads": (
        {"optimizer": "adam", "worker_load": [3, 1, 1]},
        lambda params: torch.optim.Adam(params, lr=0.02),
        {},
    ),
    "adamw, an idle worker": (
        {"optimizer": "adamw", "weight_decay": 0.1, "worker_load": [5, 0, 2]},
        lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
        {},
    ),
    "clipped": (
        {"clip_gradient_norm": 0.5, "worker_load": [1, 2, 4]},
        lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        {"clip": 0.5},
    ),
    "accumulated": (
        {"accumulate_steps": 2, "clip_gradient_norm": 0.1, "worker_load": [2, 1, 1]},
        lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        {"accumulate": 2, "clip": 0.1},
    ),
    "an optimizer of one's own": (
        {"optimizer": torch.optim.RMSprop, "weight_decay": 0.1},
        lambda params: torch.optim.RMSprop(params, lr=0.02, weight_decay=0.1),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_process(pool: ParallelPool, model: nn.Module, data: Any, case: str) -> None:
    changes, optimizer, how = CASES[case]
    result = pool.fit(model, data, mse_loss, options(**changes)).result(WAIT_S)
    alone, losses = train_alone(model, data, optimizer, **how)
    assert_same_model(result.model, alone)
    assert result.metrics_frame["loss"].tolist() == pytest.approx(losses, rel=1e-9)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert not result.model.training
    assert result.values[0] == {
        "epochs": 3,
        "steps": len(losses),
        "dropped_samples": NUM_SAMPLES % (BATCH * how.get("accumulate", 1)),
        "ended_by": "max_epochs",
    }


@pytest.mark.parametrize("load", [None, [4, 1, 2]])
def test_all_ranks_end_with_the_same_bits(pool: ParallelPool, data: Any, load: Any) -> None:
    """With running statistics, and first parameters that each rank would draw differently."""

    def draw() -> nn.Module:
        torch.seed()
        return make_norm_model()

    states, shares = ranks_of(pool, draw, data, options(worker_load=load, optimizer="adam"))
    assert shares == ((11, 11, 10) if load is None else (18, 5, 9))
    for state in states[1:]:
        torch.testing.assert_close(dict(state), dict(states[0]), rtol=0, atol=0)
    assert states[0]["1.running_mean"].abs().max() > 0


def test_running_statistics_are_those_of_all_samples(pool: ParallelPool, data: Any) -> None:
    """One step from the same parameters, momentum 1: the statistics are those of the whole
    mini-batch, but for the factor of n / (n - 1) that torch takes for each rank's own samples."""
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 1)).double()
    changes = {
        "mini_batch_size": NUM_SAMPLES,
        "max_epochs": 1,
        "worker_load": [2, 1],
        "shuffle": "never",
    }
    (state, _), (size, _) = ranks_of(pool, model, data, options(**changes), workers=2)
    parts = data[0].split([size, NUM_SAMPLES - size])
    whole = data[0].mean(0)
    variance = sum(
        len(part) / NUM_SAMPLES * (part.var(0) + (part.mean(0) - whole) ** 2) for part in parts
    )
    torch.testing.assert_close(state["0.running_mean"], whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state["0.running_var"], variance, rtol=0, atol=1e-12)


class Partly(nn.Module):
    """It has a parameter that its output does not depend on, as one process would not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def test_parameters_that_are_not_used(pool: ParallelPool, data: Any) -> None:
    model = Partly().double()
    result = pool.fit(model, data, mse_loss, options()).result(WAIT_S)
    alone, _ = train_alone(
        model, data, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)
    )
    assert_same_model(result.model, alone)


class Sometimes(nn.Module):
    """It leaves a layer out in one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call
        self.first, self.middle, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = self.first(x)
        return self.last(x if self.calls == self.call else self.middle(x))


def test_a_layer_that_is_left_out_now_and_then(pool: ParallelPool, data: Any) -> None:
    """It is said, with what to do; even in the last step, which DDP does not notice."""
    model: Any = Sometimes(3).double()
    for changes in ({}, {"max_epochs": 1, "mini_batch_size": NUM_SAMPLES // 3}):
        run = pool.fit(model, data, mse_loss, options(**changes))
        with pytest.raises(TrainingError, match=r"left out the parameter 'middle.*never uses"):
            run.result(WAIT_S)
    # the second half of a step
    run = pool.fit(Sometimes(4).double(), data, mse_loss, options(accumulate_steps=2))
    with pytest.raises(TrainingError) as raised:
        run.result(WAIT_S)
    assert "never uses" in " ".join(raised.value.__cause__.__notes__)
    model.unused = nn.Parameter(torch.zeros(()))
    result = pool.fit(model, data, mse_loss, options()).result(WAIT_S)
    alone, _ = train_alone(
        model, data, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)
    )
    assert_same_model(result.model, alone)


class Recomputed(nn.Module):
    """Its middle layer is computed again in the backward pass, which hides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))


def test_layers_behind_a_reentrant_checkpoint(pool: ParallelPool, data: Any) -> None:
    model = Recomputed().double()
    result = pool.fit(model, data, mse_loss, options()).result(WAIT_S)
    alone, _ = train_alone(
        model, data, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)
    )
    assert_same_model(result.model, alone)


def test_the_model_that_was_given_stays_as_it_was(
    pool: ParallelPool, model: nn.Module, data: Any
) -> None:
    before = copy.deepcopy(model.state_dict())
    result = pool.fit(model, data, mse_loss, options(max_epochs=1)).result(WAIT_S)
    assert_same_model(model, copy.deepcopy(model))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert model.training
    assert result.model is not model


# --- FSDP -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Layers in a list, and one parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x).sum(-1, keepdim=True)


class Deep(nn.Module):
    """Most of it is in a list of layers within a layer, whose attention has a part that is never
    called.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.encoder(x[:, None])[:, 0])


CLIPPED = {"clip_gradient_norm": 0.1, "accumulate_steps": 2}


@pytest.mark.parametrize(
    ("make", "changes"),
    [(make_model, CLIPPED), (Tied, CLIPPED), (Deep, {"worker_load": [3, 2, 1]})],
)
def test_fsdp_equals_one_process(
    pool: ParallelPool, data: Any, make: Any, changes: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    model = make().double()
    result = pool.fit(
        model,
        data,
        mse_loss,
        options(
            strategy="fsdp", optimizer="adam", validation_data=(data[0][:4], data[1][:4]), **changes
        ),
    ).result(WAIT_S)
    how = {
        "accumulate": changes.get("accumulate_steps", 1),
        "clip": changes.get("clip_gradient_norm"),
    }
    alone, losses = train_alone(
        model, data, lambda params: torch.optim.Adam(params, lr=0.02), **how
    )
    # Attention's biases of keys have no gradient but what is rounded, which differs between
    # processors; Adam makes it larger.
    assert_same_model(result.model, alone, 1e-9)
    assert result.metrics_frame["loss"].tolist() == pytest.approx(losses, rel=1e-9)
    with torch.no_grad():
        assert result.metrics["validation_loss"] == pytest.approx(
            mse_loss(alone(data[0][:4]), data[1][:4]).item(), rel=1e-9
        )


# --- validation, patience, stopping ---------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 130])
def test_the_validation_loss_is_that_of_all_samples(
    pool: ParallelPool, data: Any, count: int
) -> None:
    held_out = data[0][:count] + 0.5, data[1][:count]
    changes = {"validation_data": held_out, "validation_frequency": 2, "report_every": None}
    result = pool.fit(make_norm_model, data, mse_loss, options(**changes)).result(WAIT_S)
    with torch.no_grad():
        loss = mse_loss(result.model(held_out[0]), held_out[1]).item()
    assert result.metrics["validation_loss"] == pytest.approx(loss, rel=1e-9)
    assert result.metrics_frame["validation_loss"].notna().tolist() == [False, True, True]
    assert result.metrics["dropped_samples"] == 2


def test_a_sample_that_fills_up_a_validation_does_not_count(
    pool: ParallelPool, model: nn.Module, data: Any
) -> None:
    """Not even one whose loss is infinite if it is alone."""
    targets = data[1][:5].clone()
    targets[0] = 100.0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(outputs, targets) / (targets < 100).any()

    changes = {"validation_data": (data[0][:5], targets), "mini_batch_size": 4, "max_epochs": 1}
    alone, together = (
        pool.fit(model, data, loss, options(**changes), workers=count).result(WAIT_S)
        for count in (1, 2)
    )
    assert together.metrics["validation_loss"] == pytest.approx(alone.metrics["validation_loss"])


def test_patience_ends_a_training_that_gets_no_better(
    pool: ParallelPool, model: nn.Module, data: Any
) -> None:
    """The better it knows the targets, the worse it is at their opposites."""
    changes = {
        "validation_data": (data[0], -data[1]),
        "patience": 2,
        "max_epochs": 20,
        "optimizer": "adam",
    }
    result = pool.fit(model, data, mse_loss, options(**changes)).result(WAIT_S)
    validated = result.metrics_frame["validation_loss"].dropna()
    assert validated.is_monotonic_increasing
    assert result.values[0]["ended_by"] == "patience"
    assert result.values[0]["epochs"] == 3


def test_an_output_function_ends_all_ranks_at_the_same_step(
    pool: ParallelPool, model: nn.Module, data: Any
) -> None:
    result = pool.fit(
        model, data, mse_loss, options(output_fn=lambda metrics: metrics["step"] == 5)
    ).result(WAIT_S)
    assert (
        result.values
        == [{"epochs": 1, "steps": 6, "dropped_samples": 2, "ended_by": "output_fn"}] * 3
    )
    alone, _ = train_alone(
        model, data, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9), epochs=2
    )
    assert len(result.metrics_frame) == 6
    assert (result.model[0].weight - alone[0].weight).abs().max() > 0


def test_a_stop_gives_the_model_as_it_is(
    pool: ParallelPool, model: nn.Module, data: Any, gate: Any, eventually: Any
) -> None:
    path = str(gate.path)

    def wait(metrics: dict[str, Any]) -> None:
        import os
        import time

        while metrics["step"] == 5 and not os.path.exists(path):
            time.sleep(0.01)

    run = pool.fit(model, data, mse_loss, options(output_fn=wait, max_epochs=10_000))
    assert eventually(lambda: len(run.metrics) >= 5, WAIT_S)
    run.request_stop()
    gate.open()
    result = run.result(WAIT_S)
    ends = result.values
    assert ends[0]["ended_by"] == "request_stop"
    assert ends == [ends[0]] * 3
    assert 5 <= ends[0]["steps"] < 10_000 * (NUM_SAMPLES // BATCH)
    assert result.model is not None


# --- checkpoints ----------------------------------------------------------------------------------


class Noisy(nn.Module):
    """It draws while it trains, has running statistics, and state of the optimizer to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        ).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def step_down(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam", "schedule": "cosine", "warmup_steps": 3, "patience": 3},
        {"schedule": step_down, "accumulate_steps": 2},
        {"optimizer": "adam", "strategy": "fsdp"},
    ],
    ids=["cosine", "own schedule", "fsdp"],
)
def test_a_training_goes_on_as_if_it_had_not_stopped(
    pool: ParallelPool, data: Any, tmp_path: Path, changes: Any
) -> None:
    """To the last bit on two ranks. With more, DDP's first iteration adds gradients in another
    order than those after it.
    """
    changes = {
        **changes,
        "validation_data": (data[0][:20], data[1][:20]),
        "checkpoint_every": 2,
        "max_epochs": 5,
    }
    whole = pool.fit(Noisy, data, mse_loss, options(**changes), workers=2).result(WAIT_S)

    def stop(metrics: dict[str, Any]) -> bool:
        return metrics["epoch"] == 2

    kept = RunOptions(run_dir=tmp_path / "run")
    stopped = pool.fit(
        Noisy, data, mse_loss, options(**changes, output_fn=stop), workers=2, run_options=kept
    ).result(WAIT_S)
    assert stopped.values[0]["epochs"] == 2
    rest = pool.fit(Noisy, data, mse_loss, options(**changes), workers=2, run_options=kept).result(
        WAIT_S
    )
    assert_same_model(rest.model, whole.model, 0)
    assert rest.metrics["loss"] == whole.metrics["loss"]
    assert rest.metrics["learning_rate"] == whole.metrics["learning_rate"]
    assert rest.metrics_frame["epoch"].min() == 2


def test_a_checkpoint_of_another_model_is_refused(
    pool: ParallelPool, model: nn.Module, data: Any, tmp_path: Path
) -> None:
    kept = RunOptions(run_dir=tmp_path / "run")
    first = pool.fit(
        model, data, mse_loss, options(max_epochs=1, checkpoint_every=1), run_options=kept
    ).result(WAIT_S)
    others = {
        "'0.weight' has the shape \\(8, 6\\) in it, and \\(9, 6\\) here": (
            nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 1)).double()
        ),
        "it has no '4.weight'": nn.Sequential(*make_model(), nn.Linear(1, 1)).double(),
        "it has '2.weight', which is not here": (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 1)).double()
        ),
    }
    for message, other in others.items():
        run = pool.fit(
            other, data, mse_loss, options(), run_options=RunOptions(start_from=first.checkpoint)
        )
        with pytest.raises(TrainingError, match=message) as raised:
            run.result(WAIT_S)
        assert isinstance(raised.value.__cause__, InvalidValueError)


@pytest.mark.parametrize("content", [b"not at all", None])
def test_what_is_no_checkpoint_is_refused(
    pool: ParallelPool, model: nn.Module, data: Any, tmp_path: Path, content: Any
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / ("weights.bin" if content is None else "training.pt")).write_bytes(content or b"")
    message = (
        "it has no training.pt in it, but weights.bin" if content is None else "it cannot be read"
    )
    run = pool.fit(model, data, mse_loss, options(), run_options=RunOptions(start_from=folder))
    with pytest.raises(TrainingError, match=message):
        run.result(WAIT_S)


def test_other_options_are_refused(
    pool: ParallelPool, model: nn.Module, data: Any, tmp_path: Path
) -> None:
    kept = RunOptions(run_dir=tmp_path / "run")
    pool.fit(
        model, data, mse_loss, options(max_epochs=1, checkpoint_every=1), run_options=kept
    ).result(WAIT_S)
    for changes in ({"schedule": step_down}, {"precision": "fp16"}, {"strategy": "fsdp"}):
        with pytest.raises(TrainingError, match="was made with"):
            pool.fit(model, data, mse_loss, options(**changes), run_options=kept).result(WAIT_S)


# --- precision, data sets, learning rates ---------------------------------------------------------


@pytest.mark.parametrize(("precision", "strategy"), [("bf16", "ddp"), ("fp16", "fsdp")])
def test_reduced_precision_learns(
    pool: ParallelPool, data: Any, precision: str, strategy: str
) -> None:
    single = tuple(tensor.float() for tensor in data)
    changes = {
        "precision": precision,
        "strategy": strategy,
        "max_epochs": 15,
        "clip_gradient_norm": 1.0,
        "optimizer": "adam",
    }
    result = pool.fit(
        lambda: make_model().float(),
        single,
        mse_loss,
        options(report_every=None, **changes),
        workers=2,
    ).result(WAIT_S)
    losses = result.metrics_frame["loss"]
    assert losses.iloc[-1] < 0.8 * losses.iloc[0]
    assert all(tensor.dtype == torch.float32 for tensor in result.model.state_dict().values())


class Digits(torch.utils.data.Dataset[Any]):
    """Samples that are made when they are asked for; the input is a dict."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=generator, dtype=torch.float64)}, index % 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, sample: Any) -> Any:
        return self.layer(sample["x"])


def test_a_data_set_gives_what_arrays_give(pool: ParallelPool) -> None:
    from_set = pool.fit(Classifier, Digits(), cross_entropy, options()).result(WAIT_S).model
    alone = (
        parpool(1, profile="inline", quiet=True)
        .fit(Classifier, Digits(), cross_entropy, options())
        .result(WAIT_S)
        .model
    )
    assert_same_model(from_set, alone)


def test_a_scaled_learning_rate_is_reported(
    pool: ParallelPool, model: nn.Module, data: Any
) -> None:
    changes = {
        "mini_batch_size": 10,
        "scale_batch": "per_worker",
        "scale_learning_rate": "linear",
        "warmup_steps": 2,
    }
    result = pool.fit(model, data, mse_loss, options(**changes)).result(WAIT_S)
    rates = result.metrics_frame["learning_rate"].tolist()
    assert rates == pytest.approx([0.02 * (1 + 2 / 2), *[0.06] * 11])
    assert result.metrics["dropped_samples"] == 10


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, targets: (outputs - targets) ** 2, "a tensor of shape"),
        (lambda outputs, targets: 3.0, "has returned a float"),
        (
            lambda outputs, targets: mse_loss(outputs, targets[:, 0]),
            "different shapes: Using a target size",
        ),
        (
            lambda outputs, targets: mse_loss(outputs.detach(), targets),
            "does not depend on the model's parameters",
        ),
    ],
)
def test_losses_that_are_none(
    pool: ParallelPool, model: nn.Module, data: Any, loss: Any, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        pool.fit(model, data, loss, options()).result(WAIT_S)


def test_steps_are_measured(pool: ParallelPool, model: nn.Module, data: Any) -> None:
    call = prepare_fit(model, data, mse_loss, options(accumulate_steps=2), pool.workers)
    for is_synchronized in (True, False):
        config = {
            "config": call.config,
            "measure": Measure(num_steps=5, num_warm_up=1, is_synchronized=is_synchronized),
        }
        values = pool.train(measure_loop, config).result(WAIT_S).values
        assert [len(seconds) for seconds in values] == [5] * 3
        assert min(map(min, values)) > 0


def test_models_whose_parameters_are_of_many_kinds(pool: ParallelPool, data: Any) -> None:
    """Channels last, flags, and nothing at all: rank 0's are everybody's."""

    def draw() -> nn.Module:
        torch.seed()
        model = nn.Sequential(
            nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(4, 1)
        ).double()
        model.to(memory_format=torch.channels_last)
        model.register_buffer("flags", torch.rand(9) > 0.5)
        model.register_buffer("nothing", torch.zeros(0))
        return model

    states, _ = ranks_of(pool, draw, data, options(max_epochs=1))
    for state in states[1:]:
        torch.testing.assert_close(dict(state), dict(states[0]), rtol=0, atol=0)


def test_a_loss_that_is_no_number_ends_it(
    pool: ParallelPool, model: nn.Module, data: Any, tmp_path: Path
) -> None:
    changes = {"learning_rate": 1e300, "checkpoint_every": 1, "max_epochs": 50}
    result = pool.fit(
        model, data, mse_loss, options(**changes), run_options=RunOptions(run_dir=tmp_path / "run")
    ).result(WAIT_S)
    assert result.values[0]["ended_by"] == "loss is nan"
    assert result.values[0]["steps"] < 10
    assert result.checkpoint is None
