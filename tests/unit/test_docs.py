"""What the documents say is true: their code runs, their links lead somewhere, their tables name
what there is.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

import raypool
from raypool.cli.main import main
from raypool.core import messages, model
from raypool.errors import InvalidTypeError
from raypool.interop.multiprocessing import Pool
from raypool.profile_files import named_profile
from tests.documents import DOCUMENTS, ROOT, Block, all_blocks, blocks_of, commands_of
from tests.turns import FIRST, LAST, TAKE_TURNS

README = {
    "Ten lines": "tests/integration/test_readme.py::test_the_ten_lines_at_a_prompt",
    "Resume": "tests/integration/test_readme.py::test_resume_and_fit",
    "One model on all GPUs": "tests/integration/test_readme.py::test_resume_and_fit",
}
TOUR = {
    "A sweep that is watched": (
        "tests/integration/test_readme.py::test_the_sweep_goes_as_it_is_told"
    ),
    "A sweep that survives": "tests/integration/test_readme.py::test_the_sweep_that_survives",
    "Every worker at once": "tests/integration/test_readme.py::test_every_worker_at_once",
    "One model on all workers": "tests/integration/test_readme.py::test_one_model_on_all_workers",
    "GPUs, seen and shared": "tests/integration/test_readme.py::test_gpus_seen_and_shared",
    "On a cluster": "tests/integration/test_guides.py::test_the_tour",
    "Behind other libraries": "tests/unit/test_docs.py::test_the_short_programs_run",
}
AT_HOME_RUNS = "tests/integration/test_integrations.py::test_the_code_runs"
CLUSTERS = {
    "Google Cloud, from nothing to a pool": (
        "tests/integration/test_guides.py::test_a_pool_from_a_notebook"
    ),
    "Jobs, and work that outlives the laptop": "tests/integration/test_guides.py::test_a_job",
    "Checked before money is spent": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
    "Machines": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
    "Machines that are taken back": "tests/cloud/test_clusters_doc.py::test_the_python_runs",
}
AT_HOME = {
    **dict.fromkeys(
        [
            "An Executor",
            "Where a pool is taken",
            "multiprocessing's Pool",
            "joblib and scikit-learn",
        ],
        AT_HOME_RUNS,
    ),
    **dict.fromkeys(["An HTML report", "While it runs"], AT_HOME_RUNS),
    "Command line": "tests/integration/test_integrations.py::test_the_prompt",
}
RUN_BY: dict[str, dict[str, str] | str] = {
    "README.md": README,
    "docs/calls.md": "tests/unit/test_docs.py::test_the_short_programs_run",
    "docs/tour.md": TOUR,
    "docs/integrations.md": AT_HOME,
    "docs/clusters.md": CLUSTERS,
    "docs/durable.md": "tests/unit/test_docs.py::test_the_code_about_durable_sweeps_runs",
    "docs/gpus.md": "tests/unit/test_docs.py::test_the_code_about_gpus_runs",
    "docs/matlab.md": "tests/integration/test_matlab_page.py::test_the_python_side_runs",
    "docs/several_gpus.md": (
        "tests/integration/test_scaling_report.py::test_the_page_on_several_gpus_is_true"
    ),
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
    ours = words[: words.index("--")] if "--" in words else words
    # "-accuracy" is a value: the column to sort by
    options = {word for word in ours if re.match(r"--|-\w$", word)}
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
