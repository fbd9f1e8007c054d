"""NVIDIA's Multi-Process Service: a program that acts as its daemon does is started, used and
ended, whoever dies.

On Ray: tests/integration/test_mps.py; with NVIDIA's own: tests/gpu/test_mps.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from raypool.backends.ray import mps, mps_keeper
from raypool.backends.ray.mps import Mps, MpsState
from raypool.worker.folders import TemporaryFolder

FAKE = Path(__file__).parents[1] / "fake_mps.py"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Give a program that is called as NVIDIA's, in a folder of its own."""
    path = tmp_path / "bin" / mps.PROGRAM
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text()}")
    path.chmod(0o700)
    return path


@pytest.fixture
def temporary() -> Iterator[TemporaryFolder]:
    folder = TemporaryFolder()
    yield folder
    folder.remove()


@pytest.fixture
def service(temporary: TemporaryFolder) -> Iterator[Mps]:
    service = Mps(temporary.path)
    yield service
    service.stop()


def start(service: Mps, program: Path, tmp_path: Path) -> MpsState:
    settings = {"PATH": f"{program.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return service.start(settings, usual=tmp_path / "nowhere")


def processes(folder: Path) -> list[psutil.Process]:
    """Return what of the service is alive: the daemon, its server and the keeper."""
    found = []
    for process in psutil.process_iter():
        try:
            pipes = process.environ().get(mps.PIPES)
            if pipes == str(folder / "pipe") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def said(folder: Path) -> list[str]:
    return (folder / "log" / "control.log").read_text().splitlines()


def test_it_is_started_and_ended(
    service: Mps, program: Path, tmp_path: Path, temporary: TemporaryFolder
) -> None:
    """Its files are the user's only, it sees all GPUs, and nothing of it is there when `stop`
    returns.
    """
    state = start(service, program, tmp_path)
    folder = temporary.path() / "mps"
    assert state == MpsState(str(folder))
    assert said(folder)[:2] == [
        "CUDA_VISIBLE_DEVICES=None 0o700",
        f"start_server -uid {os.getuid()}",
    ]
    assert len(processes(folder)) == 3
    service.stop()
    assert processes(folder) == []
    assert said(folder)[-1] == "quit"


AGENT = """
import sys, time
from pathlib import Path
from raypool.backends.ray.mps import Mps
from raypool.worker.folders import TemporaryFolder
temporary = TemporaryFolder()
service = Mps(temporary.path)
print(service.start({"PATH": sys.argv[1]}, usual=Path("nowhere")).folder, flush=True)
time.sleep(60)
"""

WORKER = """
import os, sys, time
from raypool.backends.ray import mps
environ = {}
assert mps.enter(mps.MpsState(sys.argv[1]), environ) is None
print(environ, flush=True)
time.sleep(60)
"""


def run(code: str, argument: str) -> tuple[subprocess.Popen[str], str]:
    """Run some code in a process of its own; return that, and the line that it has printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, argument], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_it_stays_as_long_as_a_worker_uses_it(
    program: Path, eventually: Callable[..., bool]
) -> None:
    """Its agent may have died, and another taken its place. When all have died nothing is left, not
    even the folder.
    """
    agent, text = run(AGENT, f"{program.parent}:{os.environ['PATH']}")
    folder = Path(text)
    worker, found = run(WORKER, text)
    with agent, worker:
        assert found == str({mps.PIPES: f"{folder}/pipe", mps.LOGS: f"{folder}/log"})
        agent.kill()
        agent.wait()
        environ = {**os.environ, **mps.variables(folder)}
        answer = subprocess.run(
            [program],
            input="get_server_list\n",
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(answer.stdout) in [process.pid for process in processes(folder)]
        worker.kill()
    assert eventually(lambda: processes(folder) == [] and not folder.exists())


@pytest.mark.ci
def test_what_does_not_end_is_killed(
    service: Mps, program: Path, tmp_path: Path, temporary: TemporaryFolder
) -> None:
    (program.parent / "mode").write_text("stubborn")
    start(service, program, tmp_path)
    assert len(processes(temporary.path() / "mps")) == 3
    service.stop()
    assert processes(temporary.path() / "mps") == []


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (
            "fails",
            (
                "nvidia-cuda-mps-control -d failed with status 1: An instance of this daemon is"
                " already running"
            ),
        ),
        pytest.param(
            "serverless",
            "no MPS server started within 10 s: get_server_list",
            marks=pytest.mark.long,
        ),
    ],
)
def test_why_it_could_not_be_started(
    mode: str, problem: str, service: Mps, program: Path, tmp_path: Path, temporary: TemporaryFolder
) -> None:
    """What it has said last is the reason, and nothing of it is left."""
    (program.parent / "mode").write_text(mode)
    assert start(service, program, tmp_path) == MpsState(None, problem)
    assert processes(temporary.path() / "mps") == []
    service.terminate([1])  # there is nobody who could be asked


def test_without_the_program(service: Mps, tmp_path: Path) -> None:
    state = service.start({"PATH": str(tmp_path)}, usual=tmp_path)
    assert state == MpsState(None, "nvidia-cuda-mps-control is not on its PATH")
    assert "take turns, because nvidia-cuda-mps-control" in mps.turns("lab-3", str(state.problem))


def test_one_that_is_there_for_everybody_is_used(
    service: Mps, program: Path, tmp_path: Path, temporary: TemporaryFolder
) -> None:
    """CUDA finds it by itself; a dead one does not count, though its number may be another
    process's now, nor a file that is no number.
    """
    start(service, program, tmp_path)
    usual = temporary.path() / "mps" / "pipe"
    assert Mps(lambda: tmp_path).start({"PATH": str(program.parent)}, usual) == MpsState(None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for text in (str(os.getpid()), str(ended.pid), "", "x"):
        (usual / f"{mps.PROGRAM}.pid").write_text(text)
        assert not mps.runs_in(usual)


def test_processes_that_are_killed_have_nothing_on_their_gpus_before(
    service: Mps, program: Path, tmp_path: Path, temporary: TemporaryFolder
) -> None:
    """NVIDIA: a client that dies in the midst of its work may take others with it. Only clients are
    named to the daemon.
    """
    start(service, program, tmp_path)
    folder = temporary.path() / "mps"
    (folder / "pipe" / "clients").write_text("11\n12\n13\n")
    service.terminate([12, 99])
    (server,) = [line.split()[1] for line in said(folder) if line.startswith("get_client_list")]
    assert said(folder)[-1] == f"terminate_client {server} 12"


def test_what_somebody_has_chosen_is_left_alone() -> None:
    assert mps.is_chosen({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})
    assert not mps.is_chosen({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"})
    environ: dict[str, str] = {}
    assert mps.enter(MpsState(None, "it rains"), environ) == "it rains"
    assert environ == {}


def test_the_keeper_needs_no_package() -> None:
    """It runs by its path, isolated: wherever raypool comes from, also by Ray's runtime
    environment.
    """
    python = [sys.executable, "-I", "-S", "-c"]
    code = (
        f"import runpy; runpy.run_path({mps_keeper.__file__!r}, run_name='keeper'); import sys;"
        " print('raypool' in sys.modules)"
    )
    assert (
        subprocess.run([*python, code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
