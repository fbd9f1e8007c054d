"""The README's ten lines, pasted into a Python prompt, on the Ray that raypool starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_ten_lines_at_a_prompt(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=block, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=True
    )
    assert "Error" not in done.stderr, done.stderr
    assert re.search(r"raypool: \d+ workers? on \S+: (CPU|GPU)", done.stdout)
    rows = re.findall(
        r"^ *(\d+) +(8|32|128) +(0\.\d+) +(\d\S+)", done.stdout.replace(">>> ", "").replace("... ", ""), re.MULTILINE
    )
    assert len(rows) == 9
    losses = [float(row[3]) for row in rows]
    assert losses == sorted(losses)
    assert losses[0] < 0.1
