"""How loops are shown, on the real thing: a pseudo-terminal, the kernel of a notebook, a log file,
and GPUs of a pool on Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raypool import load_results, parpool
from raypool.channel.gpu_usage import samples_in
from raypool.channel.records import GpuReading, NodeGpus
from raypool.gpus.simulated import CONTEXT_BYTES, SimulatedGpus

GIBIBYTE = 2**30

DURATION = r"[\d:]+(?:\.\d)?(?: s)?"
"""A time as it is shown, such as 8 s, 8.3 s or 1:15."""

TRAIN = """
import pathlib, time
import raypool
from raypool import parpool, report

def train(number):
    report(epoch=number, loss=1 / (number + 1))
    time.sleep(0.1)  # of shorter items some are sent ahead, and a worker is said to be at the newest
    gives_up_at = time.monotonic() + 600
    while number >= {held} and not pathlib.Path({gate!r}).exists() and time.monotonic() < gives_up_at:
        time.sleep(0.01)
    if number == 3:
        raise ValueError("36 channels cannot be divided into <8> groups")

pool = parpool(4, profile="threads", quiet=True)
"""
"""Item 3 fails, and those from number `held` on wait until the gate is open."""


# --- a terminal -----------------------------------------------------------------------------------


def on_terminal(
    code: str, keys: bytes = b"", watch: Callable[[Callable[[], str]], object] = lambda shown: None
) -> str:
    """Return what a program writes to a terminal of 24 lines of 100 characters, on which these keys
    are pressed.

    While it runs, `watch` is given a way to ask for what has been written so far.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.write(leader, keys)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        # a Ray in this process has set that one
        env={**os.environ, "TERM": "xterm-256color", "PYTHONBREAKPOINT": ""},
        start_new_session=True,
    )
    os.close(follower)
    parts: list[bytes] = []

    def shown() -> str:
        return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux says so when nobody has it open any more
            while part := os.read(leader, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        watch(shown)
        assert process.wait(500) == 0, shown()
    finally:
        process.kill()
        process.wait()
        reader.join(300)
        os.close(leader)
    return shown()


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown)


def test_a_picture_on_a_terminal(gate: Any, eventually: Callable[..., bool]) -> None:
    """Each worker has a line while the loop runs; at the end the first line is left, and the cursor
    is there again.
    """
    patterns = [
        rf"train [━╸╺]+ 8 of 24, 1 failed  {DURATION}, about {DURATION} left",
        *(
            rf"worker {worker} +\d done +{DURATION}  item \d+  epoch=\d+, loss=0\.\d+"
            for worker in range(4)
        ),
        r"item 3 failed: ValueError: 36 channels cannot be divided into <8> groups",
    ]

    def see(shown: Callable[[], str]) -> None:
        def missing() -> list[str]:
            return [pattern for pattern in patterns if not re.search(pattern, plain(shown()))]

        assert eventually(lambda: not missing()), (missing(), shown())
        gate.open()

    code = TRAIN.format(held=8, gate=str(gate.path))
    code += "pool.parfor(train, range(24), on_error='collect', chunk_size=1)\nprint('after')"
    shown = on_terminal(code, watch=see)
    assert re.search(rf"train ━+ 24 of 24, 1 failed  {DURATION} *\nafter\n$", plain(shown))
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    # What stands on the terminal at the end is that line and what follows: all others were wiped
    # out.
    assert "\x1b[2K" in shown


def test_two_loops_at_once_on_a_terminal() -> None:
    """The first has the picture; the lines of the second go above it."""
    code = """
import threading
from raypool import parpool
pool = parpool(2, profile="threads", quiet=True)
second = lambda: pool.parfor(abs, range(3), progress=True, name="second")
def items():
    yield 1
    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    yield 2
pool.parfor(abs, items(), name="first")
"""
    text = plain(on_terminal(code))
    assert re.search(
        rf"^raypool: second: 3 of 3 done, [\d,.]+/(s|min), in {DURATION}$", text, re.MULTILINE
    )
    assert re.search(rf"first ━+ 2 of 2  {DURATION}\s*$", text)


def test_a_debugger_stops_in_the_function_of_the_user() -> None:
    """A picture would take its prompt away, so there is none where the loop runs serially."""
    code = """
from raypool import parpool
def work(item):
    breakpoint()
    return item
pool = parpool(profile="inline", quiet=True)
assert list(pool.parfor(work, [7])) == [7]
"""
    shown = on_terminal(code, keys=b"p item + 1\nc\n")
    assert "(Pdb) " in shown
    assert re.search(r"^8$", shown, re.MULTILINE)
    assert "\x1b[2K" not in shown


def test_a_search_of_scikit_learn_on_a_terminal(gate: Any, eventually: Callable[..., bool]) -> None:
    """It has the picture of a loop: joblib says how many fits there are when all are handed in."""
    patterns = [
        rf"_fit_and_score [━╸╺]+ 6 of 12  {DURATION}",
        *(rf"worker {worker} +\d done +{DURATION}  item [67]" for worker in range(2)),
    ]

    def see(shown: Callable[[], str]) -> None:
        assert eventually(lambda: all(re.search(each, plain(shown())) for each in patterns)), (
            shown()
        )
        gate.open()

    shown = on_terminal(SEARCH.format(gate=str(gate.path)), watch=see)
    assert re.search(rf"_fit_and_score ━+ 12 of 12  {DURATION} *\n{{'depth': 5}}\n$", plain(shown))


SEARCH = """
import pathlib, time
from joblib import parallel_config
from raypool import parpool, register_joblib
from sklearn.base import BaseEstimator
from sklearn.model_selection import GridSearchCV

class Model(BaseEstimator):
    def __init__(self, depth=0):
        self.depth = depth
    def fit(self, features, labels):
        time.sleep(0.15)  # joblib and the pool put shorter fits together, as their times turn out
        gives_up_at = time.monotonic() + 600
        while self.depth >= 3 and not pathlib.Path({gate!r}).exists() and time.monotonic() < gives_up_at:
            time.sleep(0.01)
    def score(self, features, labels):
        return self.depth

register_joblib()
search = GridSearchCV(Model(), {{"depth": range(6)}}, cv=2, pre_dispatch="all")
with parpool(2, profile="threads", quiet=True), parallel_config("raypool"):
    print(search.fit([[0]] * 4, [0, 1] * 2).best_params_)
"""
"""The fits of the last three depths wait until the gate is open."""


# --- a notebook -----------------------------------------------------------------------------------

RUN_CELLS = """
import json, pathlib, sys, tempfile
import nbclient, nbformat, traitlets.config

updates = {}

class Client(nbclient.NotebookClient):
    def process_message(self, message, cell, index):
        if message["header"]["msg_type"] == "update_display_data":
            times = updates.setdefault(message["content"]["transient"]["display_id"], [])
            times.append(message["header"]["date"].timestamp())
            if len(times) >= 3:
                pathlib.Path(sys.argv[2]).touch()
        return super().process_message(message, cell, index)

cells = [nbformat.v4.new_code_cell(source) for source in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
with tempfile.TemporaryDirectory() as folder:  # its name is short: those of sockets may not be long
    config = traitlets.config.Config(KernelManager=dict(transport="ipc", ip=folder + "/kernel"))
    client = Client(notebook, timeout=400, config=config)
    with client.setup_kernel():
        outputs = [list(client.execute_cell(cells[number], number).outputs) for number in json.loads(sys.argv[3])]
print(json.dumps([list(updates.values()), outputs]))
"""


def run_cells(
    cells: list[str], gate: Path, folder: Path, order: Sequence[int] | None = None
) -> tuple[list[list[float]], list[list[dict[str, Any]]]]:
    """Run cells in a kernel, each once or in this order; open a gate when an output has been
    replaced three times.

    Return when each output was replaced [Unix s], by output, and the outputs of each run of a cell,
    as a saved notebook has them.
    """
    folders = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(folder))
    command = [
        sys.executable,
        "-c",
        RUN_CELLS,
        json.dumps(cells),
        str(gate),
        json.dumps(list(range(len(cells)) if order is None else order)),
    ]
    done = subprocess.run(
        command, env={**os.environ, **folders}, text=True, capture_output=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    updates, outputs = json.loads(done.stdout.splitlines()[-1])
    return updates, outputs


def page_of(outputs: list[dict[str, Any]]) -> list[str]:
    return [
        output["data"]["text/html"] for output in outputs if output["output_type"] == "display_data"
    ]


def test_pictures_in_a_notebook(tmp_path: Path, gate: Any) -> None:
    """Each is replaced in place, and its last state is in the saved notebook; cells and threads do
    not disturb each other.
    """
    cells = [
        TRAIN.format(held=8, gate=str(gate.path)),
        "results = pool.parfor(train, range(12), on_error='collect')",
        (
            "results = pool.parfor(train, range(4), on_error='collect', name='again');"
            " print('printed')"
        ),
        (
            "import threading\nloops = [threading.Thread(target=pool.parfor, args=(abs, range(3)),"
            " kwargs=dict(name=f'loop {i}')) for i in range(2)]\n[loop.start() for loop in loops];"
            " [loop.join() for loop in loops]; None"
        ),
        "try:\n    pool.parfor(train, [3])\nexcept ValueError as error:\n    print('raised')",
        "from tqdm import tqdm\nresults = pool.parfor(abs, range(5), progress=tqdm)",
        (
            "from joblib import Parallel, delayed\nraypool.register_joblib()\n"
            "values = Parallel(backend='raypool', verbose=1)(delayed(abs)(n) for n in range(3))"
        ),
        "pool.delete()",
    ]
    updates, (_, first, again, both, raised, bar, joblibs, _) = run_cells(
        cells, gate.path, tmp_path
    )
    (page,) = page_of(first)
    assert "12 of 12" in page
    assert "1 failed" in page
    assert "item 3 failed: ValueError: 36 channels cannot be divided into &lt;8&gt; groups" in page
    assert "worker" not in page
    assert "again" in page_of(again)[0]
    assert [output["text"] for output in again if output["output_type"] == "stream"] == [
        "printed\n"
    ]
    assert sorted(re.findall(r"loop \d", "".join(page_of(both)))) == ["loop 0", "loop 1"]
    assert "stopped" in page_of(raised)[0]
    assert "5/5" in "".join(output["text"] for output in bar)
    assert page_of(bar) == []
    assert "3 of 3" in page_of(joblibs)[0]
    *while_it_ran, _ = updates[0]  # the end is shown at once
    assert len(while_it_ran) >= 2
    assert all(later - earlier > 0.4 for earlier, later in itertools.pairwise(while_it_ran)), (
        "the eyes cannot follow"
    )
    every = [*first, *again, *both, *raised]
    assert all(output["output_type"] in ("display_data", "stream") for output in every)
    assert all(output.get("name") != "stderr" for output in every)


def test_a_cell_that_is_run_again_has_one_picture_again(tmp_path: Path) -> None:
    """The one of before is gone with the outputs of before, and nothing is left of it that would
    write into the new ones.
    """
    cells = [
        TRAIN.format(held=8, gate=""),
        "results = pool.parfor(train, range(8), on_error='collect'); print(len(results))",
        "pool.delete()",
    ]
    updates, (_, *runs, end) = run_cells(cells, tmp_path / "gate", tmp_path, order=[0, 1, 1, 1, 2])
    for outputs in runs:
        (page,) = page_of(outputs)
        assert "8 of 8" in page
        assert "1 failed" in page
        assert [
            (output["name"], output["text"])
            for output in outputs
            if output["output_type"] == "stream"
        ] == [("stdout", "8\n")]
        assert {output["output_type"] for output in outputs} == {"display_data", "stream"}
    assert end == []
    assert len(updates) == len(runs), "each run has replaced its own picture only"


# --- a log ----------------------------------------------------------------------------------------


def test_lines_in_a_log_file(start_python: Any, gate: Any) -> None:
    """Nobody looks at it meanwhile, so there is no escape code in it, and each line is whole,
    between those of others.
    """
    code = TRAIN.format(held=0, gate=str(gate.path))
    process = start_python(
        code
        + "pool.parfor(train, range(8), on_error='collect', progress=True)\npool.parfor(abs, [1])"
    )
    first = process.process.stderr.readline()
    gate.open()
    done = process.finish()
    assert done.returncode == 0
    assert re.fullmatch(rf"raypool: train: 0 of 8 done, after {DURATION}\n", first)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"raypool: train: 8 of 8 done, 1 failed, [\d,.]+/(s|min), in {DURATION}", last
    )
    assert "\x1b" not in first + done.stderr
    assert done.stdout == ""


# --- the GPUs of a pool on Ray --------------------------------------------------------------------


class Cards(SimulatedGpus):
    """Simulated cards whose driver can hang."""

    def devices(self) -> Any:
        while (self._folder / "hangs").exists():
            threading.Event().wait(0.01)
        return super().devices()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory, by_value: None) -> Cards:
    return Cards(tmp_path_factory.mktemp("gpus"), 2)


@pytest.mark.usefixtures("ray_session")
def test_the_memory_of_the_gpus_as_it_is(
    gpus: Cards, eventually: Callable[..., bool], make_gate: Any
) -> None:
    """From what the agents see once a second; nobody waits for them, and none is asked twice at a
    time.
    """
    told: list[NodeGpus] = []
    with parpool(2, gpus=[0, 1], inventory=gpus, quiet=True) as pool:
        ask = pool._engine.backend.gpu_readings
        held, end = make_gate(), make_gate()

        def hold() -> None:
            kept = gpus.allocate(2 * GIBIBYTE)
            held.open()
            end.wait()
            del kept

        future = pool.options(worker=1).parfeval(hold)
        held.wait()

        def is_seen() -> bool:
            ask(told.append)
            return bool(told) and told[-1].readings == {
                0: GpuReading(0, 16 * GIBIBYTE, 0.0),
                1: GpuReading(2 * GIBIBYTE + CONTEXT_BYTES, 16 * GIBIBYTE, 0.0),
            }

        assert eventually(is_seen), told
        assert dict(told[-1].workers) == {0: (0,), 1: (1,)}
        end.open()
        future.result(300)
        (gpus._folder / "hangs").touch()
        try:
            assert eventually(lambda: ask(told.append) or told[-1].readings == {}), (
                "what was seen long ago is not how it is now"
            )
        finally:
            (gpus._folder / "hangs").unlink()
    length = len(told)
    ask(told.append)
    assert len(told) == length, "a pool that has ended says nothing"


@pytest.mark.usefixtures("ray_session")
def test_the_report_of_a_run_has_its_gpus_over_time(gpus: Cards, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train(item: int) -> None:
        kept = gpus.allocate((2 + 2 * item) * GIBIBYTE)
        gives_up_at = time.monotonic() + 300
        with gpus.computing(0.5):
            while time.monotonic() < gives_up_at and min(num_points(run).values()) < 3:
                time.sleep(0.05)
        del kept

    def num_points(run: Path) -> dict[int, int]:
        gpus = [sample.gpu for sample in samples_in(run) if sample.utilization]
        return {gpu: gpus.count(gpu) for gpu in (0, 1)}

    with parpool(2, gpus=[0, 1], inventory=gpus, quiet=True) as pool:
        pool.parfor(train, [0, 1], run_dir=run)
    page = load_results(run).report(tmp_path / "page.html").read_text()

    found = re.search(r'<script type="application/json" id="story">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    lines = json.loads(found[1])["gpus"]["data"]
    assert [line["name"] for line in lines] == ["GPU 0", "GPU 1"] * 2
    assert max(lines[0]["y"]) == max(lines[1]["y"]) == 50.0
    context = CONTEXT_BYTES / GIBIBYTE
    most = sorted(max(line["y"]) for line in lines[2:])
    assert most == [pytest.approx(2 + context, 0.001), pytest.approx(4 + context, 0.001)]
