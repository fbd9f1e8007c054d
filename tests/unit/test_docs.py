"""What the documents say is true: their code runs, their links lead somewhere, their tables name
what there is.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import raypool
from raypool.cli.main import main
from raypool.cli.search import read_space
from raypool.core import messages, model
from raypool.errors import InvalidTypeError
from raypool.interop.multiprocessing import Pool
from raypool.profile_files import named_profile
from tests.documents import DOCUMENTS, ROOT, Block, all_blocks, blocks_of, commands_of
from tests.turns import FIRST, LAST, TAKE_TURNS

README = {
    "A first program": "tests/integration/test_readme.py::test_the_ten_lines_at_a_prompt",
    "Resume": "tests/integration/test_readme.py::test_resume_and_fit",
    "One model on all GPUs": "tests/integration/test_readme.py::test_resume_and_fit",
}
TOUR = {
    "Watch and stop trainings live": (
        "tests/integration/test_readme.py::test_the_sweep_goes_as_it_is_told"
    ),
    "Resume an interrupted sweep": "tests/integration/test_readme.py::test_the_sweep_that_survives",
    "SPMD: run on every worker together": "tests/integration/test_readme.py::test_the_programs_of_the_tour",
    "Distributed training of one model": "tests/integration/test_readme.py::test_the_programs_of_the_tour",
    "GPUs: inspect and share": "tests/integration/test_readme.py::test_the_programs_of_the_tour",
    "On a cluster": "tests/integration/test_guides.py::test_the_tour",
    "Behind other libraries": "tests/unit/test_docs.py::test_the_short_programs_run",
}
AT_HOME_RUNS = "tests/integration/test_integrations.py::test_the_code_runs"
CLUSTERS = {
    "Work from a notebook": "tests/integration/test_guides.py::test_a_pool_from_a_notebook",
    "From nothing to a pool on Google Cloud": (
        "tests/integration/test_guides.py::test_a_pool_from_a_notebook"
    ),
    "Jobs that outlive the laptop": "tests/integration/test_guides.py::test_a_job",
    "Check a file before you pay": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
    "Machine types": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
    "Preemption and spot machines": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
}
AT_HOME = {
    **dict.fromkeys(
        [
            "An Executor",
            "Where a pool is taken",
            "multiprocessing's Pool",
            "joblib and scikit-learn",
            "Keras",
        ],
        AT_HOME_RUNS,
    ),
    **dict.fromkeys(["An HTML report", "Take results elsewhere", "While it runs"], AT_HOME_RUNS),
    "Command line": "tests/integration/test_integrations.py::test_the_prompt",
}
RUN_BY: dict[str, dict[str, str] | str] = {
    "README.md": README,
    "docs/calls.md": "tests/unit/test_docs.py::test_the_short_programs_run",
    "docs/tour.md": TOUR,
    "docs/integrations.md": AT_HOME,
    "docs/clusters.md": CLUSTERS,
    "docs/debug.md": "tests/unit/test_docs.py::test_the_code_about_debugging_runs",
    "docs/durable.md": "tests/unit/test_docs.py::test_the_code_about_durable_sweeps_runs",
    "docs/gpus.md": "tests/unit/test_docs.py::test_the_code_about_gpus_runs",
    "docs/matlab.md": "tests/integration/test_matlab_page.py::test_the_python_side_runs",
    "docs/search.md": "tests/integration/test_search.py::test_the_page_runs",
    "docs/several_gpus.md": (
        "tests/integration/test_scaling_report.py::test_the_page_on_several_gpus_is_true"
    ),
    "docs/slurm.md": "tests/cloud/test_slurm.py::test_the_page_runs",
    "docs/watch.md": "tests/integration/test_watch_server.py::test_the_page_on_the_live_page_runs",
    "docs/tutorials/first_sweep.md": "tests/unit/test_docs.py::test_the_first_sweep",
    "docs/tutorials/first_training.md": "tests/unit/test_docs.py::test_the_first_training",
    "docs/tutorials/from_a_loop_to_a_pool.md": (
        "tests/unit/test_docs.py::test_from_a_loop_to_a_pool"
    ),
    "docs/tutorials/from_matlab.md": "tests/unit/test_docs.py::test_from_matlab",
}
"""Which test runs the Python of a document: by heading, or all of it."""

INTERNALS = [ROOT / "DESIGN.md", *sorted(ROOT.glob("docs/internals/**/*.md"))]


def test_a_named_test_runs_each_block_of_python() -> None:
    there = {(block.document, block.heading) for block in all_blocks("python")}
    named = {
        (document, heading)
        for document, tests in RUN_BY.items()
        if isinstance(tests, dict)
        for heading in tests
    }
    assert named <= there
    assert set(RUN_BY) == {document for document, _ in there}
    for document, heading in there:
        tests = RUN_BY[document]
        file, name = (tests if isinstance(tests, str) else tests[heading]).split("::")
        text = (ROOT / file).read_text()
        assert name in {
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        }, name
        assert Path(document).name in text


def test_all_code_says_its_language() -> None:
    """So that nothing is left out: Python, commands and settings say what they are, and are
    tried.
    """
    assert {block.language for block in all_blocks()} == {
        "",
        "matlab",
        "python",
        "shell",
        "toml",
        "yaml",
    }
    code = re.compile(
        r"^(import |from \w+ import |>>> |\$ |raypool [a-z]|pip |\[[\w.]+\]$)", re.MULTILINE
    )
    assert not [str(block) for block in all_blocks("") if code.search(block.code)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(path: Path) -> None:
    """Files that are linked or named, commands with their options, verbs of pools: ours, and those
    of multiprocessing.
    """
    text = path.read_text()
    links = {
        path.parent / link
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        if not link.startswith("http")
    }
    named = re.findall(
        r"`((?:raypool|tests|benchmarks|notebooks|examples)/[\w/.-]+\.(?:py|md|json))`", text
    )
    missing = [
        str(file) for file in (*links, *(ROOT / name for name in named)) if not file.exists()
    ]
    verbs = set(re.findall(r"(?<![\w.])pool\.(?!py\b)([a-z_]+)", text))
    missing += [
        verb
        for verb in verbs
        if not hasattr(raypool.ParallelPool, verb) and not hasattr(Pool, verb)
    ]
    missing += [
        line for line in commands_of(path.relative_to(ROOT).as_posix()) if not has_its_options(line)
    ]
    assert not missing


@pytest.mark.parametrize("path", INTERNALS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_names_of_the_code_exist(path: Path) -> None:
    """Paths begin in the repository, in the package, or in the folder of the tests; names with "_"
    or a capital stand in code.
    """
    text = path.read_text()
    folders = (ROOT, ROOT / "raypool", ROOT / "tests")
    files = re.findall(r"`((?:[\w.-]+/)*(?:[\w.-]+\.py|[\w.-]+/))(?:::[^`]*)?`", text)
    names = re.findall(r"`(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)`", text)
    missing = [name for name in files if not any((folder / name).exists() for folder in folders)]
    missing += [
        name
        for name in names
        if ("_" in name or name != name.lower()) and name not in words_of_the_code()
    ]
    assert not missing


@functools.cache
def words_of_the_code() -> set[str]:
    files = [
        path
        for folder in ("raypool", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


def has_its_options(line: str) -> bool:
    """Whether a command of the documents, and its options, exist."""
    words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
    command: click.Command | None = main
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(0))
    if command is None:
        return False
    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    takes_value = {
        option
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
        for option in parameter.opts
    }
    ours = words[: words.index("--")] if "--" in words else words
    options = {
        word
        for before, word in zip(["", *ours], ours, strict=False)
        if word.startswith("-") and before not in takes_value  # the value may be "-accuracy"
    }
    return options <= known | {"--help", "--version"}


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for block in all_blocks()
        for name in re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


def test_profiles_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mylab").mkdir()
    Path("mylab/workers.py").write_text("def load_cache(): ...\n")
    for block in all_blocks("toml"):
        if block.document == "docs/search.md":
            Path("space.toml").write_text(block.code)
            assert set(read_space(Path("space.toml"))) == {"lr", "momentum", "width"}
            continue
        Path("raypool.toml").write_text(block.code)
        for name in tomllib.loads(block.code)["profiles"]:
            assert named_profile(name)


def test_the_examples_are_listed() -> None:
    listed = re.findall(
        r"^\| \[(\w+\.py)\]\(\1\) \|", (ROOT / "examples/README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("examples/*.py"))


def test_the_design_names_every_event_command_and_state() -> None:
    text = (ROOT / "DESIGN.md").read_text()
    names = [
        name
        for name, value in vars(messages).items()
        if isinstance(value, type) and value.__module__ == messages.__name__
    ]
    assert len(names) > 15
    states = [
        state.name
        for kind in (model.TaskState, model.WorkerState, model.PoolState)
        for state in kind
    ]
    missing = [name for name in (*names, *states) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def run_all(blocks: list[Block], name: str) -> None:
    """Run each as a script of its own, in this process; `name` is their `__name__`."""
    assert blocks
    for block in blocks:
        exec(compile(block.code, block.document, "exec"), {"__name__": name})


def test_the_short_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All of docs/calls.md, and what docs/tour.md runs on threads."""
    here = {
        heading for heading, test in TOUR.items() if test.endswith("::test_the_short_programs_run")
    }
    shown = [block for block in blocks_of("docs/tour.md", "python") if block.heading in here]
    run_all([*shown, *blocks_of("docs/calls.md", "python")], "__main__")
    printed = capsys.readouterr().out
    assert "1024" in printed
    assert "ZeroDivisionError" in printed
    assert "[1. 1.]" in printed
    assert "[8, 9]" in printed


def test_the_code_about_durable_sweeps_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_all(blocks_of("docs/durable.md", "python"), "durable")
    printed = capsys.readouterr().out
    assert re.search(r"^3 +0.4 +0.216 +finished$", printed, re.MULTILINE)
    assert len(re.findall(r"^\d+ .* (0|1|2) +0\.\d+$", printed, re.MULTILINE)) == 2 * 12, (
        "three steps of each of four, shown twice"
    )


def test_the_code_about_gpus_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Also on a machine without one."""
    run_all(blocks_of("docs/gpus.md", "python"), "gpus")
    printed = capsys.readouterr().out
    assert len(re.findall(r"^[01] +0\.\d+$", printed, re.MULTILINE)) == 2, "a loss of each training"
    assert f"[{16 * 2**30}, {4 * 2**30}]" in printed


def test_a_future_says_that_it_cannot_travel() -> None:
    import pickle

    with pytest.raises(InvalidTypeError, match="belongs to the process that made it"):
        pickle.dumps(raypool.Future("x"))


def test_what_has_its_turn_apart_from_others_is_there() -> None:
    assert [name for name in (*TAKE_TURNS, *FIRST, *LAST) if not (ROOT / name).exists()] == []


TUTORIALS = "docs/tutorials/{}.md"


@pytest.fixture
def follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Go through a page as a reader does, and compare what it shows with what is printed.

    Blocks of Python share their variables; one that begins with `# name.py` is saved as that file
    too. A block without a language shows lines that the block above it prints, and a comment
    beside `print` shows its line; after "(Pdb)" the block has what the reader types. Numbers that `varying` matches may differ.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def run(block: Block, variables: dict[str, Any], typed: str) -> str:
        capsys.readouterr()
        if block.language == "python":
            if file := re.match(r"# (\w+\.py)\n", block.code):
                Path(file[1]).write_text(block.code)
            exec(compile(block.code, block.document, "exec"), variables)
            return capsys.readouterr().out
        calls = [shlex.split(line)[1:] for line in block.code.splitlines()]
        if typed:  # pytest has the debugger's input and output in this process
            command = [sys.executable, "-m", "raypool", *calls[0]]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                command, input=typed, capture_output=True, text=True, timeout=120, env=env
            )
            return done.stderr + done.stdout
        return "".join(CliRunner().invoke(main, call).output for call in calls)

    def go(document: str, varying: str = r"\d+\.\d+") -> str:
        variables: dict[str, Any] = {"__name__": "tutorial"}
        blocks = [block for block in blocks_of(document) if block.language != "matlab"]
        everything = ""
        for block, below in zip(blocks, [*blocks[1:], None], strict=True):
            if not block.language:
                continue
            shown = below.code if below and not below.language else ""
            typed = "".join(f"{line}\n" for line in re.findall(r"^\(Pdb\) (.*)$", shown, re.M))
            shown = re.sub(r"^(\(Pdb\)) .*\n", r"\1 ", shown, flags=re.MULTILINE)
            printed = run(block, variables, typed).replace(str(tmp_path), "/home/me")
            beside = re.findall(r"^print\(.*\)  # (.+)$", block.code, re.MULTILINE)
            shows = Counter(alike(line, varying) for line in [*shown.splitlines(), *beside])
            assert shows <= Counter(alike(line, varying) for line in printed.splitlines()), block
            everything += printed
        return everything

    yield go
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def alike(text: str, varying: str) -> str:
    """Return a text without what may differ: times, numbers that vary, and white space."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "<time>", text)
    return " ".join(re.sub(varying, "<number>", text).split())


def test_the_first_sweep(follow: Callable[..., str]) -> None:
    """docs/tutorials/first_sweep.md: which network is the best may differ between CPUs."""
    printed = follow(TUTORIALS.format("first_sweep"), r"-?\d+(\.\d+)?")
    assert printed.count("<Results of 12 items: 11 finished, 1 failed>") == 2
    assert re.search(r"^9 +32 +100\.00 +NaN +failed$", printed, re.MULTILINE)
    assert "{9: ArithmeticError('the training diverges in epoch 0')}" in printed
    assert re.search(r"^digits +digits\.train +12 +finished, 1 failed", printed, re.MULTILINE)
    assert float(re.findall(r"'accuracy': (\S+)}", printed)[0]) > 0.85
    assert Path("sweep.html").stat().st_size > 10_000


def test_the_first_training(follow: Callable[..., str]) -> None:
    """docs/tutorials/first_training.md."""
    printed = follow(TUTORIALS.format("first_training"))
    assert float(re.findall(r"(\S+)% right", printed)[0]) > 70


def test_from_a_loop_to_a_pool(follow: Callable[..., str]) -> None:
    """docs/tutorials/from_a_loop_to_a_pool.md: the loop and the pool give the same."""
    printed = follow(TUTORIALS.format("from_a_loop_to_a_pool"))
    assert printed.count("[0.859 0.941 0.97  0.662]") == 2


def test_from_matlab(follow: Callable[..., str]) -> None:
    """docs/tutorials/from_matlab.md."""
    printed = follow(TUTORIALS.format("from_matlab"), r"(?!)")
    assert printed.splitlines()[0] == "[0.962, 0.965, 0.955, 0.941]"


def test_the_code_about_debugging_runs(
    follow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/debug.md, with the debugger's session."""
    stops: list[str] = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: stops.append(threading.current_thread().name)
    )
    assert follow("docs/debug.md").count("(Pdb)") == 3
    assert stops == [threading.main_thread().name]
