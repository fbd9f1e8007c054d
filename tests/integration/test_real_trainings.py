"""Real trainings, on real data: the examples, on two CPU workers, learn what they should, as one
process does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from raypool import RunOptions, TrainingOptions
from raypool.train.checkpoints import list_kept

ROOT = Path(__file__).parents[2]
ENOUGH = 0.97
"""So many of the images of digits are to be read right."""

DEADLINE_S = 250.0
"""On a quiet machine a training takes a second, and the first one some more [s]."""

Load = Callable[[str], Any]


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give two workers."""
    return two_workers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute here as the workers do, so that sums are formed in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [weights.detach() for weights in model.parameters()]


def train_alone(
    model: torch.nn.Module, data: Any, loss: Any, options: TrainingOptions, order: Any = None
) -> list[float]:
    """Do what `pool.fit` is to do, by hand, in this process; return the loss at each step."""
    kinds = {"sgdm": lambda p: torch.optim.SGD(p, options.learning_rate, momentum=options.momentum)}
    kinds["adam"] = lambda p: torch.optim.Adam(p, options.learning_rate)
    optimizer = kinds[options.optimizer](model.parameters())
    losses = []
    for epoch in range(options.max_epochs):
        if order is not None:
            order.set_epoch(epoch)
        for inputs, targets in DataLoader(
            data, options.mini_batch_size, sampler=order, drop_last=True
        ):
            value = loss(model(inputs), targets)
            optimizer.zero_grad()
            value.backward()
            if options.clip_gradient_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_gradient_norm)
            optimizer.step()
            losses.append(value.item())
    return losses


# --- digits, by a loop for Ray Train --------------------------------------------------------------


def final_state(result: Any) -> Any:
    return torch.load(Path(result.checkpoint.path, "state.pt"), weights_only=True)


@pytest.mark.long
def test_a_ray_train_loop_reads_digits(pool: Any, load: Load, tmp_path: Path) -> None:
    """On two workers as well as on one."""
    example = load("train_digits")
    reached = []
    for num_workers in (2, 1):
        options = RunOptions(
            run_dir=tmp_path / str(num_workers),
            keep_checkpoints=2,
            best_metric="accuracy",
            best_mode="max",
        )
        run = pool.train(
            example.train_loop, {"lr": 0.05, "epochs": 10}, workers=num_workers, run_options=options
        )
        result = run.result(DEADLINE_S)
        frame = result.metrics_frame
        assert list(frame["epoch"]) == list(range(10))
        assert set(frame["rank"]) == {0}
        assert frame["loss"].iloc[-1] < 0.1 * frame["loss"].iloc[0]
        assert result.metrics == {
            name: frame[name].iloc[-1] for name in ("epoch", "loss", "accuracy")
        }
        assert len(result.values) == num_workers
        best = torch.load(Path(result.best_checkpoint.path, "state.pt"), weights_only=True)
        net = example.make_net()
        net.load_state_dict(best["net"])
        assert example.accuracy(net, *example.load_data()[1]) == frame["accuracy"].max()
        reached.append(frame["accuracy"].iloc[-1])
    assert min(reached) >= ENOUGH
    assert reached[0] == pytest.approx(reached[1], abs=0.01)


def test_a_ray_train_loop_equals_one_process(pool: Any, load: Load, tmp_path: Path) -> None:
    """Two ranks with half a batch each, by Ray Train's functions; and torch alone, with whole
    batches in the same order.
    """
    example = load("train_digits")
    config = {"lr": 0.05, "epochs": 1}
    result = pool.train(
        example.train_loop, config, run_options=RunOptions(run_dir=tmp_path)
    ).result(DEADLINE_S)
    data = TensorDataset(*example.load_data()[0])
    torch.manual_seed(0)
    net = example.make_net()
    options = TrainingOptions(learning_rate=0.05, mini_batch_size=example.BATCH_SIZE, max_epochs=1)
    train_alone(
        net, data, cross_entropy, options, order=DistributedSampler(data, num_replicas=1, rank=0)
    )
    torch.testing.assert_close(
        final_state(result)["net"], dict(net.state_dict()), rtol=1e-4, atol=1e-5
    )


def test_a_ray_train_loop_goes_on_where_it_was(pool: Any, load: Load, tmp_path: Path) -> None:
    """Run again with the same folder and more epochs, it ends as one that was never interrupted."""
    example = load("train_digits")
    ends = []
    for folder, legs in (("whole", [4]), ("parts", [2, 4])):
        for epochs in legs:
            options = RunOptions(run_dir=tmp_path / folder)
            result = pool.train(
                example.train_loop, {"lr": 0.05, "epochs": epochs}, run_options=options
            ).result(DEADLINE_S)
        ends.append(result)
    whole, parts = ends
    assert list(parts.metrics_frame["epoch"]) == [2, 3]
    assert parts.metrics == whole.metrics
    torch.testing.assert_close(final_state(parts), final_state(whole), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")  # Ray warns of itself
def test_both_lanes_train_the_same(
    pool: Any, load: Load, coordinator: None, tmp_path: Path
) -> None:
    example = load("train_digits")
    results = []
    for lane in ("warm", "managed"):
        options = RunOptions(
            run_dir=tmp_path / lane, keep_checkpoints=2, best_metric="accuracy", best_mode="max"
        )
        run = pool.train(
            example.train_loop, {"lr": 0.05, "epochs": 4}, lane=lane, run_options=options
        )
        results.append(run.result(DEADLINE_S))
    warm, managed = results
    assert managed.metrics == warm.metrics
    columns = ["rank", "attempt", "epoch", "loss", "accuracy"]
    assert managed.metrics_frame[columns].equals(warm.metrics_frame[columns])
    torch.testing.assert_close(final_state(managed), final_state(warm), rtol=0, atol=0)
    best = [
        {kept.path: kept.index for kept in list_kept(each.path)}[Path(each.best_checkpoint.path)]
        for each in results
    ]
    assert best[0] == best[1]


# --- digits, by fit -------------------------------------------------------------------------------


def digits_options(**changes: Any) -> TrainingOptions:
    options = TrainingOptions(
        learning_rate=0.05, schedule="cosine", mini_batch_size=64, max_epochs=12
    )
    return replace(options, **changes)


def test_fit_reads_digits(pool: Any, load: Load) -> None:
    """On two workers as well as on one."""
    example = load("fit_digits")
    train_set, (images, digits) = example.load_data()
    options = digits_options(validation_data=(images, digits))
    reached = []
    for num_workers in (2, 1):
        result = pool.fit(
            example.make_net, train_set, cross_entropy, options, workers=num_workers
        ).result(DEADLINE_S)
        assert result.metrics["validation_loss"] < 0.2
        read = pool.classify(result.model, images)
        reached.append((read == digits.numpy()).mean())
    assert min(reached) >= ENOUGH
    assert reached[0] == pytest.approx(reached[1], abs=0.01)


@pytest.mark.parametrize("worker_load", [None, [2, 1]], ids=["equal shares", "2 to 1"])
def test_fit_equals_one_process(pool: Any, load: Load, worker_load: Any) -> None:
    """An epoch, step by step, and what comes out; in double precision nothing but rounding is
    between them.
    """
    example = load("fit_digits")
    (images, digits), _ = example.load_data()
    images = images.double()
    net = example.make_net().double()
    options = digits_options(
        schedule="none", shuffle="never", max_epochs=1, worker_load=worker_load, report_every=1
    )
    result = pool.fit(net, (images, digits), cross_entropy, options).result(DEADLINE_S)
    losses = train_alone(net, TensorDataset(images, digits), cross_entropy, options)
    frame = result.metrics_frame
    assert list(frame["loss"]) == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(parameters(result.model), parameters(net), rtol=1e-8, atol=1e-10)


# --- a language model, by fit and "fsdp" ----------------------------------------------------------


def text_options(**changes: Any) -> TrainingOptions:
    options = TrainingOptions(
        strategy="fsdp",
        optimizer="adam",
        learning_rate=3e-3,
        clip_gradient_norm=1.0,
        mini_batch_size=32,
    )
    return replace(options, **changes)


def test_a_language_model_in_shards_equals_one_process(pool: Any, load: Load) -> None:
    example = load("train_language_model")
    windows = example.Windows(example.load_text())
    windows.starts = windows.starts[: 8 * 32]  # eight steps
    torch.manual_seed(0)
    model = example.LanguageModel(len(windows.alphabet)).double()
    options = text_options(shuffle="never", max_epochs=2, report_every=1)
    result = pool.fit(model, windows, example.loss, options).result(DEADLINE_S)
    losses = train_alone(model, windows, example.loss, options)
    assert list(result.metrics_frame["loss"]) == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(parameters(result.model), parameters(model), rtol=1e-6, atol=1e-8)


def test_a_language_model_in_shards_learns(pool: Any, load: Load) -> None:
    """In an epoch it comes from knowing nothing of 85 characters to knowing more than how frequent
    each is.
    """
    example = load("train_language_model")
    windows = example.Windows(example.load_text())
    options = text_options(max_epochs=2, report_every=1)
    result = pool.fit(
        lambda: example.LanguageModel(len(windows.alphabet)), windows, example.loss, options
    ).result(DEADLINE_S)
    losses = list(result.metrics_frame["loss"])
    frequency = torch.bincount(windows.codes) / len(windows.codes)
    entropy = -(frequency * frequency.log()).sum().item()
    assert losses[0] > 4.0
    assert sum(losses[-5:]) / 5 < entropy - 0.2
    codes = example.write(result.model, windows[0][0].tolist()[:1], 20)
    assert all(0 <= code < len(windows.alphabet) for code in codes)


# --- as scripts -----------------------------------------------------------------------------------

LAST_LINES = {
    "train_digits": r"The best network reads \d\d\.\d% of the images right\.\n$",
    "fit_digits": r"\n\d\d\.\d% of the images were read right\.\n$",
    "train_language_model": r"\n(.|\n)+\n$",
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_what_a_script_prints(
    name: str, pool: Any, load: Load, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """In this pool, and with few epochs."""
    monkeypatch.setattr(load(name), "parpool", lambda num_workers: nullcontext(pool))
    monkeypatch.setenv("HOME", str(tmp_path))
    load(name).main(**{"epochs" if name == "train_digits" else "max_epochs": 2})
    printed = capsys.readouterr().out
    # a row for each epoch
    assert len(re.findall(r"^[01] .* \d\.\d+", printed, re.MULTILINE)) >= 2, printed
    assert re.search(LAST_LINES[name], printed), printed


@pytest.mark.long
@pytest.mark.parametrize("name", LAST_LINES)
def test_a_script_by_itself(name: str, run_python: Any, tmp_path: Path) -> None:
    """As a user runs it: with the Ray that it starts, and warnings are errors."""
    path = ROOT / "examples" / f"{name}.py"
    done = run_python(
        f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", HOME=str(tmp_path)
    )
    # after ten seconds there are lines about its progress
    assert all(line.startswith("raypool: fit: ") for line in done.stderr.splitlines()), done.stderr
    assert done.stdout.startswith("raypool: 2 workers on ")
    assert re.search(LAST_LINES[name], done.stdout)
