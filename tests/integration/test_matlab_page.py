"""docs/matlab.md: the Python beside MATLAB's programs is one program, and runs on Ray with three
GPUs that do not exist.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.documents import blocks_of

PAGE = "docs/matlab.md"


@pytest.mark.usefixtures("ray_session")
def test_the_python_side_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "matlab"}
    try:
        for block in blocks_of(PAGE, "python"):
            exec(compile(block.code, f"{PAGE}, {block.heading}", "exec"), names)
    finally:
        if "pool" in names:
            names["pool"].delete()
    assert names["accuracy"] > 0.8
    assert names["results"].best("accuracy")["accuracy"] > 0.8
    assert names["total"] == pytest.approx(sum(1 / i for i in range(1, 1001)))
    assert names["points"] == [(i, i**2) for i in range(10)]
    assert len(set(names["losses"])) == 1, "the same on all ranks"
    assert names["losses"][0] < 2
    assert list(names["r"]) == pytest.approx(np.asarray(names["r"]))
    assert any(tmp_path.glob("runs/checkpoint_*"))


@pytest.mark.quick
def test_each_program_has_both_sides() -> None:
    for block, following in pairwise(blocks_of(PAGE)[1:]):
        assert {block.language, following.language} == {"matlab", "python"}
