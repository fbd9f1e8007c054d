"""Type checkers know what the verbs take and return, where raypool is installed in editable mode."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("user_scripts")

CHECKERS = {
    "mypy": ["mypy", "--strict", "--python-executable", sys.executable, "--config-file="],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.ci
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_finds_the_mistakes_and_nothing_else(checker: str, tmp_path: Path) -> None:
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)  # away from this repository
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker], "accepted.py", "rejected.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "PYTHONPATH": ""},
        timeout=800,
        check=False,
    )
    found = re.findall(r"(\w+\.py):(\d+)[:\d]*(?: -)? error: ", done.stdout)
    lines = (SCRIPTS / "rejected.py").read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert marked
    assert {(script, int(number)) for script, number in found} == {
        ("rejected.py", number) for number in marked
    }, done.stdout + done.stderr
