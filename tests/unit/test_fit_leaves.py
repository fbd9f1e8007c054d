"""`pool.fit` in this process, whose machine is about to go in the midst of an epoch: it goes on
from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402

from raypool import RunOptions, TrainingOptions, parpool  # noqa: E402
from raypool.train import fit_loop  # noqa: E402
from raypool.train.checkpoints import list_kept  # noqa: E402
from raypool.worker.running import note_here  # noqa: E402

INPUTS = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Model(nn.Linear):
    """Hears of the end of its machine in some of its steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__(3, 1, dtype=torch.float64)
        self.steps = steps

    def forward(self, inputs: Any) -> Any:
        global _step
        _step += 1
        if _step in self.steps:
            note = note_here()
            assert note is not None
            note.leave()
        return super().forward(inputs)


_step = 0


def fit(folder: Path, *steps: int, **changes: Any) -> Any:
    global _step
    _step = 0
    torch.manual_seed(0)
    options = TrainingOptions(
        max_epochs=2, mini_batch_size=4, report_every=1, learning_rate=0.1, **changes
    )
    with parpool(profile="inline", quiet=True, retries=3) as pool:
        return pool.fit(
            Model(*steps),
            (INPUTS, INPUTS.sum(1, keepdim=True)),
            mse_loss,
            options,
            run_options=RunOptions(run_dir=folder),
        ).result()


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_loop, "LOOK_S", 0.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_goes_on_from_the_very_step(tmp_path: Path, accumulate: int) -> None:
    changes = {"accumulate_steps": accumulate}
    whole = fit(tmp_path / "whole", **changes)
    result = fit(tmp_path / "run", 3, 9 * accumulate, **changes)
    frame = result.metrics_frame
    assert frame["step"].tolist() == whole.metrics_frame["step"].tolist()
    assert frame["attempt"].max() == 3
    assert torch.equal(result.model.weight, whole.model.weight)
    assert result.ended_by == "max_epochs"
    kept = [each.index for each in list_kept(tmp_path / "whole")]
    assert kept == [2], "one for each epoch, of which the last stays"


def test_what_ends_before_it_has_looked_has_ended(tmp_path: Path) -> None:
    """In the last step there is nothing to save."""
    result = fit(tmp_path, 20)
    assert result.metrics_frame["attempt"].tolist() == [1] * 20
    assert result.ended_by == "max_epochs"
