"""`raypool sweep` in this process: what it prints where, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raypool import ParallelPool, Results, load_results
from raypool.cli.main import main
from raypool.journal.lock import is_in_use
from raypool.testing import FaultPlan, sim_pool
from raypool.views.words import CONTROLS

MODULE = """
import math
from pathlib import Path

print("the module is imported")

def train(config):
    print("training", config)
    if config["width"] == 36:
        raise ValueError("36 is no multiple of 8")
    return {"accuracy": config["width"] / 100, "loss": math.inf, "curve": [0.5, math.nan]}

def mistaken(config):
    return config["widht"]

def interrupted(config):
    if config["width"] == 36 and not Path("mended").exists():
        raise KeyboardInterrupt
    return config["width"]

def indexed(config):
    return {"index": 9}

def narrow(width, epochs=3): ...

def other(config): ...
"""

RAISING = """
def fail(config):
    print(config)
    raise Error(str(list(config)) + "".join(config))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with a module and configurations; the module does not stay imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "module_of_sweep.py").write_text(MODULE)
    (tmp_path / "good.csv").write_text("width,lr\n8,0.1\n16,\n")
    (tmp_path / "bad.csv").write_text("width,lr\n8,0.1\n36,0.2\n16,0.3\n")
    yield tmp_path
    sys.modules.pop("module_of_sweep", None)


def sweep(function: str, configs: str, *options: str) -> Result:
    return CliRunner().invoke(
        main,
        [
            "sweep",
            f"module_of_sweep:{function}",
            configs,
            "--run-dir",
            "run",
            "--profile",
            "inline",
            *options,
        ],
    )


def test_all_well_ends_with_0_and_only_the_table_is_on_standard_output(folder: Path) -> None:
    done = sweep("train", "good.csv")
    assert done.exit_code == 0, done.output
    heading, first, second = (line.split() for line in done.stdout.splitlines())
    assert heading[:6] == ["index", "width", "lr", "accuracy", "loss", "curve"]
    assert first[:8] == ["0", "8", "0.1", "0.08", "inf", "[0.5,", "nan]", "finished"]
    assert second[:4] == ["1", "16", "-", "0.16"]
    said = done.stderr.splitlines()
    assert {"the module is imported", "raypool: 1 worker (inline in this process)"} <= set(said)
    assert said[-1] == "2 of 2 finished, 0 failed. The results are in run."
    assert load_results("run").to_frame()["accuracy"].tolist() == [0.08, 0.16]


def test_what_has_failed_is_named_with_how_to_look_at_it(folder: Path) -> None:
    done = sweep("train", "bad.csv")
    assert done.exit_code == 1
    assert "Failed: item 1 (width=36, lr=0.2): ValueError: 36 is no multiple of 8" in done.stderr
    (replay,) = (
        line.strip() for line in done.stderr.splitlines() if line.startswith("  raypool replay")
    )
    assert replay == "raypool replay run 1 --debug"
    again = CliRunner().invoke(main, shlex.split(replay.removesuffix(" --debug"))[1:])
    assert (again.exit_code, "ValueError: 36" in again.stderr) == (1, True)


EVIL = "\x1b]0;owned\x07\x1b[2Jlr\r\x9b31m\u202e"
"""Sets a window's title, clears the screen, goes back to the start of the line, sets a color and
turns letters round.
"""


def test_nothing_that_users_have_named_gives_the_terminal_orders(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of columns and jobs, values, and errors about them come without control characters."""
    (folder / "evil.jsonl").write_text(json.dumps({EVIL: EVIL, "width": 36}))
    (folder / "module_of_sweep.py").write_text(
        f"class Error(Exception): ...\nError.__name__ = {EVIL!r}\n{RAISING}"
    )
    info = SimpleNamespace(
        id="j1", name=EVIL, state="failed", message=EVIL, exit_code=1, submitted_at=None
    )
    monkeypatch.setattr(
        "raypool.cli.job._jobs", lambda *_, **__: SimpleNamespace(look=lambda _: info)
    )
    commands = [
        "sweep module_of_sweep:fail evil.jsonl --run-dir run --profile inline",
        "replay run 0",
        "job status j1",
        f"sweep {EVIL.strip()}:fail evil.jsonl --run-dir run",
    ]
    for command in commands:
        done = CliRunner().invoke(main, command.split(" "), color=True)
        # that it has failed is said in red
        own = done.output.replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert "owned" in own, command
        assert not CONTROLS.search(own), (command, own)


def test_json_is_one_document_and_nothing_else(folder: Path) -> None:
    done = sweep("train", "bad.csv", "--json", "--seed", "1")
    assert done.exit_code == 1
    rows = json.loads(done.stdout, parse_constant=pytest.fail)
    assert [row["index"] for row in rows] == [0, 1, 2]
    wanted = {
        "width": 8,
        "lr": 0.1,
        "accuracy": 0.08,
        "loss": None,
        "curve": [0.5, None],
        "status": "finished",
        "error": None,
    }
    assert wanted.items() <= rows[0].items()
    assert (rows[1]["status"], rows[1]["error"]) == ("failed", "ValueError: 36 is no multiple of 8")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("header", "function", "number"),
    [
        ("index", "train", "item number"),
        ("index,item number", "train", "item number 2"),
        ("lr", "indexed", "item number"),
    ],
)
def test_the_number_of_an_item_is_in_json_whatever_columns_are_called(
    folder: Path, header: str, function: str, number: str
) -> None:
    cells = "7" + ",7" * header.count(",")
    (folder / "named.csv").write_text(f"width,{header}\n8,{cells}\n36,{cells}\n")
    rows = json.loads(sweep(function, "named.csv", "--json").stdout)
    assert [next(iter(row.items())) for row in rows] == [(number, 0), (number, 1)]
    assert [row["index"] for row in rows] == ([7, 7] if "index" in header else [9, 9])


def test_a_name_that_the_configuration_lacks_is_said_with_those_that_it_has(folder: Path) -> None:
    done = sweep("mistaken", "good.csv")
    assert done.exit_code == 1
    assert "KeyError: 'widht'. The configuration has no 'widht'. Did you mean width?" in done.stderr


def test_many_failures_are_counted(folder: Path) -> None:
    (folder / "many.csv").write_text("width\n" + "36\n" * 60)
    done = sweep("train", "many.csv")
    assert done.stderr.count("Failed: ") == 20
    [command] = re.findall(r"and 40 more: (.*) lists them all\.", done.stderr)
    shown = CliRunner().invoke(main, shlex.split(command)[1:])
    assert shown.stdout.count("36 is no multiple") == 60, shown.output
    assert len(done.stdout.splitlines()) == 11
    [command] = re.findall(r"The first 10, of 60 items\. (.*) shows them all\.", done.stderr)
    shown = CliRunner().invoke(main, shlex.split(command)[1:])
    assert (len(shown.stdout.splitlines()), shown.stderr) == (61, "")


def test_a_long_sweep_ends_with_its_best_items(folder: Path) -> None:
    (folder / "many.csv").write_text("width\n" + "\n".join(map(str, range(40, 80))) + "\n")
    done = sweep("train", "many.csv")
    _, *rows = done.stdout.splitlines()
    assert [row.split()[1] for row in rows] == [str(width) for width in range(79, 69, -1)]
    assert "The 10 best by accuracy, of 40 items. raypool show run --top 40 sh" in done.stderr


def test_the_same_command_goes_on(folder: Path) -> None:
    assert sweep("interrupted", "bad.csv").exit_code == 130
    done = sweep("interrupted", "bad.csv", "--rerun", "missing", "--json")
    assert done.exit_code == 130
    Path("mended").touch()
    done = CliRunner().invoke(main, shlex.split(done.stderr.splitlines()[-1])[1:])
    assert done.exit_code == 0, done.output
    assert [(row["value"], row["status"]) for row in json.loads(done.stdout)] == [
        (n, "finished") for n in (8, 36, 16)
    ]


def test_ctrl_c_keeps_what_has_finished_and_says_how_to_go_on(folder: Path) -> None:
    done = sweep("interrupted", "bad.csv")
    assert (done.exit_code, done.stdout) == (130, "")
    assert (
        done.stderr.splitlines()[-2]
        == "Interrupted: 1 of 3 items finished; their results are in run. To run the others:"
    )
    assert load_results("run")[0] == 8
    assert not is_in_use(folder / "run")


def test_ctrl_c_after_the_last_item_denies_no_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = ParallelPool.__exit__

    def interrupted(pool: ParallelPool, *error: Any) -> None:
        close(pool, *error)
        raise KeyboardInterrupt

    monkeypatch.setattr(ParallelPool, "__exit__", interrupted)
    done = sweep("train", "good.csv")
    said = "Interrupted. The results of any finished items are in run."
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, said)
    assert load_results("run").to_frame()["status"].tolist() == ["finished"] * 2


def test_where_all_machines_go_the_same_command_resumes_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan(item_s=1.0, preempted_s=0.0)
    monkeypatch.setattr("raypool.pool.parpool", lambda *_, **__: sim_pool(1, plan))
    for number in (1, 2):
        done = sweep("other", "bad.csv")
        assert (done.exit_code, done.stdout) == (75, "")
        assert (
            done.stderr.splitlines()[-2]
            == f"Preempted: {number} of 3 items finished; their results are in run. To run the"
            " others on other machines:"
        )
    assert sweep("other", "bad.csv").exit_code == 0


WRONG_USE = [
    (
        ["module_of_sweep:trian", "good.csv"],
        "module_of_sweep has no function 'trian'. Did you mean train?",
    ),
    (
        ["module_of_sweep:narrow", "good.csv"],
        "narrow(width, epochs=3) would get the whole configuration (a dict) as width",
    ),
    (["module_of_swep:train", "good.csv"], "Did you mean module_of_sweep"),
    (["module_of_sweep:train", "none.csv"], "none.csv could not be read: No such file"),
    (
        ["module_of_sweep:train", "good.csv", "--profile", "nowhere"],
        "There is no profile 'nowhere'",
    ),
    (["module_of_sweep:train", "good.csv", "--workers", "0"], "0 is not in the range x>=1"),
    (
        ["module_of_sweep:train", "good.csv", "--rerun", "some"],
        "'some' is not one of 'failed', 'missing', 'all'",
    ),
    (["module_of_sweep:train", "good.csv", "--run-dir", "good.csv"], "is a file"),
    (["module_of_sweep:train", "good.csv", "--run-dir", ""], "run_dir is empty"),
    (["module_of_sweep:train", "good.csv", "--run-dir", "s3://bucket/run"], "is a URL"),
    (["module_of_sweep:train"], "Missing argument 'CONFIGS'"),
]


def test_wrong_use_ends_with_2_and_does_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr("raypool.pool.open_engine", lambda *given, **_: opened.append(given))
    for arguments, words in WRONG_USE:
        before = sorted(folder.iterdir())
        done = CliRunner().invoke(
            main, ["sweep", "--run-dir", "run", "--profile", "inline", *arguments]
        )
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in " ".join(done.stderr.split())
        assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before
        assert not opened


def test_the_folder_of_another_sweep_is_wrong_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep("train", "good.csv").exit_code == 0
    monkeypatch.setattr("raypool.pool.open_engine", lambda *_, **__: pytest.fail("a pool opened"))
    for done, words in (
        (sweep("other", "good.csv"), "belongs to module_of_sweep.train; this call runs module_of"),
        (sweep("train", "good.csv", "--seed", "1"), "was made with seed=None; this call has seed"),
    ):
        assert done.exit_code == 2
        assert words in " ".join(done.stderr.split())
    assert len(load_results("run")) == 2


def test_more_threads_than_a_process_should_have_are_wrong_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.backends.local.MOST_WORKERS", 3)
    done = sweep("train", "good.csv", "--profile", "threads", "--workers", "4")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Workers: requested 4, available 3." in " ".join(done.stderr.split())
    assert not (folder / "run").exists()


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_a_module_that_changes_the_folder_does_not_move_the_run(folder: Path, command: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/moving.py").write_text(
        "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
        "def main(config):\n    return {'loss': config['width'], 'cwd': os.getcwd()}\n"
    )
    (folder / "space.toml").write_text("width = {choice = [8, 16]}")
    given = (
        ["space.toml", "--num-trials=2", "--metric=loss"] if command == "search" else ["good.csv"]
    )
    words = [command, "sub/moving.py:main", *given, "--run-dir=runs/x", "--profile=inline"]
    done = CliRunner().invoke(main, words)
    sys.modules.pop("moving", None)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1].endswith(" are in runs/x.")
    found = load_results(folder / "runs/x")
    assert [value["cwd"] for value in found] == [str(folder / "sub")] * 2


def test_a_run_dir_is_asked_for(folder: Path) -> None:
    done = CliRunner().invoke(main, ["sweep", "module_of_sweep:train", "good.csv"])
    assert (done.exit_code, "Missing option '--run-dir'" in done.stderr) == (2, True)


# --- the report -----------------------------------------------------------------------------------


def report(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def test_a_report_is_written_where_it_is_wanted(folder: Path) -> None:
    sweep("train", "bad.csv")
    done = report("run", "--out", "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["Wrote", "page.html"]
    assert "36 is no multiple of 8" in Path("page.html").read_text()
    assert report("run").stdout.split() == ["Wrote", "sweep.html"]


NO_REPORT = [
    (["nowhere"], "nowhere: it does not exist."),
    (["empty"], "There is no run in"),
    (["run", "--out", "empty"], "is a directory"),
    (["run", "--out", "page.txt"], ".html"),
]


def test_a_report_that_cannot_be_is_wrong_use(folder: Path) -> None:
    (folder / "empty").mkdir()
    sweep("train", "good.csv")
    for arguments, words in NO_REPORT:
        done = report(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in " ".join(done.stderr.split())


def test_a_report_that_cannot_be_made_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep("train", "good.csv")

    def fail(error: Exception) -> Any:
        def report(*_: Any, **__: Any) -> None:
            raise error

        return report

    with monkeypatch.context() as patched:
        patched.setattr("raypool.errors.find_spec", lambda name: None)
        done = report("run")
    assert (done.exit_code, done.stderr) == (
        1,
        "Error: A report needs plotly and itables and Jinja2, which are not installed: pip install"
        ' "raypool[plots]"\n',
    )
    monkeypatch.setattr(Results, "report", fail(OSError(28, "No space left on device")))
    assert (
        report("run").stderr == "Error: sweep.html could not be written: No space left on device.\n"
    )


# --- the command itself ---------------------------------------------------------------------------


def test_what_it_needs_is_imported_when_it_is_needed() -> None:
    heavy = {"ray", "torch", "pandas", "numpy", "rich", "yaml", "psutil"}
    code = f"import sys, raypool.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"


SWEEP = "sweep module_of_sweep:train good.csv --run-dir run --profile inline"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (SWEEP, 0),
        pytest.param(f"{SWEEP} 2>&1", 0, marks=pytest.mark.ci),
        pytest.param(f"{SWEEP.replace('good', 'bad')} --json", 1, marks=pytest.mark.ci),
        pytest.param("gpus", 0, marks=pytest.mark.ci),
        ("--help", 0),
    ],
)
def test_a_reader_that_goes_changes_nothing_of_how_a_command_ends(
    folder: Path, arguments: str, status: int
) -> None:
    done = piped(f"from raypool.cli.main import main; main()' {arguments}", folder)
    assert (done.returncode, "Traceback" in done.stderr, "BrokenPipe" in done.stderr) == (
        status,
        False,
        False,
    )
    assert "sweep" not in arguments or len(load_results("run")) in (2, 3)


def test_a_job_whose_reader_has_gone_is_followed_no_longer(folder: Path) -> None:
    code = """
import itertools, types
from raypool.cli.job import _follow_to_end
from raypool.cli.output import readers_may_go
with readers_may_go():
    _follow_to_end(types.SimpleNamespace(follow=lambda job: itertools.repeat("epoch\\n")), "job", {})
"""
    assert piped(f"{code}'", folder).returncode == 141


def piped(code_and_arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python into a pipe whose reader goes at once."""
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -c '{code_and_arguments} | true"
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
    )
