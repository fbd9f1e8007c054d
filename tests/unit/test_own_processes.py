"""Tests in several processes at once: each sees what it has left behind itself, and nobody what is
another's; see `make test`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

CONFTEST = """
import functools
from tests import leaks
from tests.time_limits import pytest_exception_interact, pytest_timeout_set_timer
from tests.leaks import no_process_or_file_is_left, poll
from tests.turns import Turns

leaks.poll = functools.partial(poll, timeout_s=0.2)

def pytest_xdist_make_scheduler(config, log):
    return Turns(config, log)
"""

FILES = {
    "conftest": CONFTEST,
    "test_process": (
        """
import subprocess

def test_it_leaves_an_orphan():
    subprocess.run("sleep 100 > /dev/null 2>&1 & echo $! > pid.new; mv pid.new pid", shell=True, check=True)
"""
    ),
    "test_innocent": (
        """
from pathlib import Path
from tests.leaks import poll

def test_it_ends_while_the_orphan_is_there():
    assert poll(Path("pid").exists, timeout_s=300)
"""
    ),
    "test_file": (
        """
import os, tempfile
from pathlib import Path

def test_it_leaves_a_file():
    Path(tempfile.gettempdir(), "raypool-left").touch()
    Path("folders", os.environ["RAYPOOL_TEST_PROCESS"]).write_text(tempfile.gettempdir())
"""
    ),
    "test_end": (
        """
import os, subprocess
from pathlib import Path

def test_it_ends_its_process():
    Path("pid").write_text(str(subprocess.Popen(["sleep", "100"], start_new_session=True).pid))
    with Path("ends").open("a") as file:
        file.write("once ")
    os._exit(3)

def test_the_next_one_runs():
    Path("next").touch()
"""
    ),
}

Run = Callable[..., str]


@pytest.fixture
def run_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a way to run tests in two processes, apart from those that run here."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "folders").mkdir()
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it takes seconds
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "xdist",
        "-p",
        "pytest_timeout",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
    ]

    def run(*words: str, folder: Path = tmp_path) -> str:
        return subprocess.run(
            [*command, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=500,
            check=False,
        ).stdout

    return run


def test_what_is_left_is_found_by_whose_it_is(run_pytest: Run, tmp_path: Path) -> None:
    said = run_pytest("test_process.py", "test_innocent.py", "test_file.py")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "3 passed, 2 errors" in said
    assert "ERROR test_process.py::test_it_leaves_an_orphan" in said
    assert "['sleep', '100']" in said
    assert "ERROR test_file.py::test_it_leaves_a_file" in said
    (folder,) = (tmp_path / "folders").iterdir()
    assert not Path(folder.read_text()).exists(), "its temporary files go with it"


def test_a_test_that_ends_its_process_is_not_repeated_and_the_others_run(
    run_pytest: Run, tmp_path: Path, eventually: Any
) -> None:
    said = run_pytest("test_end.py")
    assert "FAILED test_end.py::test_it_ends_its_process" in said
    assert "1 failed, 1 passed" in said
    assert (tmp_path / "ends").read_text() == "once "
    assert (tmp_path / "next").exists()
    assert eventually(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text()))), (
        "what it has started goes at the end"
    )


def test_as_many_files_as_processes(run_pytest: Run, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"test_{number}.py").write_text("def test_it(): pass")
    assert "2 passed" in run_pytest("test_0.py", "test_1.py")


@pytest.mark.parametrize("ends", [(10,), (8, 9), (0, 1, 18, 19)])
def test_all_others_run_whenever_processes_end(
    run_pytest: Run, tmp_path: Path, ends: tuple[int, ...]
) -> None:
    """xdist 3.8 would hand out again the files that are done, and wait for ever for the tests of
    them that there are not.
    """
    for other in range(20):
        (tmp_path / f"test_{other:02}.py").write_text("def test_it(): pass")
    for number in ends:
        (tmp_path / f"test_{number:02}.py").write_text("import os\n\ndef test_it(): os._exit(3)")
    assert f"{len(ends)} failed, {20 - len(ends)} passed" in run_pytest(
        *(f"test_{other:02}.py" for other in range(20))
    )


def test_what_has_failed_may_not_clean_up_for_ever(run_pytest: Run, tmp_path: Path) -> None:
    code = """
import pytest, time

@pytest.fixture
def hangs():
    yield
    time.sleep(400)

def test_it(hangs):
    assert False
"""
    (tmp_path / "test_hangs.py").write_text(code)
    said = run_pytest("--timeout", "2", "--timeout-method", "thread", "test_hangs.py")
    assert "crashed while running 'test_hangs.py::test_it'" in said
