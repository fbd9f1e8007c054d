"""`raypool demo`: thirteen networks at once, trained on real images of handwritten digits.

`train` is the part that a user would write. The rest runs it on thirteen configurations, and shows
the results.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from raypool.errors import check_installed
from raypool.pool import parpool
from raypool.task import current_task
from raypool.views.console import SafeConsole

if TYPE_CHECKING:
    import pandas as pd


EPOCHS = 25
BATCH_SIZE = 64


class Digits(NamedTuple):
    """Images (N, 1, 8, 8), brightness 0 to 1, and what digit each one is (N)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mlp(width: int) -> nn.Module:
    """Return a network with two fully connected hidden layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def cnn(width: int) -> nn.Module:
    """Return a convolutional network; its channels are normalized in 8 groups, so the width is 8,
    16, 24, ...
    """
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, 10),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}

CONFIGS: list[dict[str, Any]] = [
    {"network": network, "width": width, "lr": lr}
    for network, width in (("mlp", 32), ("mlp", 128), ("cnn", 8), ("cnn", 32))
    for lr in (0.0003, 0.001, 0.01)
]
# so that you see one: 36 is no multiple of 8
MISTAKE = {"network": "cnn", "width": 36, "lr": 0.001}
CONFIGS.append(MISTAKE)


def train(config: dict[str, Any], digits: Digits) -> dict[str, Any]:
    """Train one network; return how well it reads digits that it was not trained on, after the last
    epoch.
    """
    torch.set_num_threads(1)  # the other cores are for the other workers
    device = current_task().device  # this worker's own GPU, or the CPU
    images, labels, test_images, test_labels = (part.to(device) for part in digits)
    model = NETWORKS[config["network"]](config["width"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    started = time.perf_counter()
    curve = []
    for _ in range(EPOCHS):
        total_loss = torch.zeros((), device=device)
        for batch in torch.randperm(len(images), device=device).split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.detach() * len(batch)
        curve.append(accuracy(model, test_images, test_labels))
    return {
        "accuracy": curve[-1],
        "loss": total_loss.item() / len(images),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "seconds": time.perf_counter() - started,
        "curve": curve,
    }


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of the images that the model reads right."""
    return int((model(images).argmax(dim=1) == labels).sum()) / len(labels)


def run(num_workers: int | None = None, profile: str = "local", out: Path = Path()) -> bool:
    """Train all networks at once; print the table, and write `results.csv` and
    `learning_curves.png`.

    Args:
        num_workers: See `parpool`.
        profile: See `parpool`.
        out: The folder to write to.

    Returns:
        Whether all items finished, except the intended failure.

    Raises:
        ModuleNotFoundError: A package that the demo needs is not installed.
    """
    check_installed("demo", "The demo", "sklearn", "matplotlib")
    out.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    say = partial(SafeConsole(highlight=False).print, soft_wrap=True)
    say(
        f"{len(CONFIGS)} networks learn to read {len(digits.train_images):,} images of handwritten"
        " digits."
    )
    with parpool(num_workers, profile=profile) as pool:
        results = pool.parfor(
            partial(train, digits=digits), CONFIGS, on_error="collect", seed=0, name="training"
        )
    if len(results.errors) == len(results):
        raise results.errors[0]

    # failed ones have none, and go last
    frame = results.to_frame().sort_values("accuracy", ascending=False)
    say(Padding(table(frame), (1, 0)))
    for index in results.errors:
        say(Text(f"Failed: {named(CONFIGS[index])}: {frame.error[index]}", style="red"))
    best = frame.iloc[0]
    say(
        f"Best: {named(best)}: {best.accuracy:.1%} of {len(digits.test_images)} other images read"
        " correctly.",
        style="bold green",
    )
    csv, picture = out / "results.csv", out / "learning_curves.png"
    frame.drop(columns="curve").convert_dtypes().to_csv(csv)
    draw(frame, picture)
    say(f"Wrote {csv} and {picture}", markup=False)
    return all(CONFIGS[index] is MISTAKE for index in results.errors)


def load_digits() -> Digits:
    """Return the 1,797 images of the UCI handwritten digits that scikit-learn ships, a fifth of
    them for the test.
    """
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    parts = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train_images, test_images, train_labels, test_labels = map(torch.as_tensor, parts)
    return Digits(train_images, train_labels, test_images, test_labels)


def named(config: Any) -> str:
    """Return a configuration in words."""
    return f"{config['network']}, width {config['width']}, lr {config['lr']:g}"


def table(frame: pd.DataFrame) -> Table:
    """Return the table to print: the best first, failures last."""
    shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for name in (
        "rank",
        "network",
        "width",
        "lr",
        "accuracy",
        "loss",
        "parameters",
        "seconds",
        "worker",
        "GPU",
        "status",
    ):
        shown.add_column(
            name, justify="left" if name in ("network", "status") else "right", no_wrap=True
        )
    for rank, (_, row) in enumerate(frame.iterrows(), 1):
        is_done = row.status == "finished"
        outcome = (
            f"{row.accuracy:.4f}",
            f"{row.loss:.4f}",
            f"{row.parameters:,.0f}",
            f"{row.seconds:.1f}",
        )
        shown.add_row(
            *(str(rank) if is_done else "", row.network, str(row.width), f"{row.lr:g}"),
            *(outcome if is_done else ("", "", "", f"{row.duration_s:.1f}")),
            *(str(row.worker), str(row.gpu) if row.notna().gpu else "-", row.status),
            style=None if is_done else "red",
        )
    return shown


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Draw the learning curves: a panel for each kind of network; the legends have the best network
    first.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    finished = frame[frame.status == "finished"]
    for network, axes in zip(NETWORKS, panels, strict=True):
        rows = finished[finished.network == network]
        widths, rates = sorted(set(rows.width)), sorted(set(rows.lr))
        for _, row in rows.iterrows():
            style = {
                "color": f"C{rates.index(row.lr)}",
                "linestyle": ("--", "-")[widths.index(row.width)],
            }
            axes.plot(
                range(1, EPOCHS + 1),
                row.curve,
                **style,
                label=f"{row.accuracy:.1%}  width {row.width}, lr {row.lr:g}",
            )
        axes.set(title=network.upper(), xlabel="epoch", xlim=(1, EPOCHS), ylim=(0.6, 1.005))
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", title="after the last epoch", alignment="left")
    panels[0].set_ylabel("test accuracy")
    figure.savefig(path, dpi=150)
