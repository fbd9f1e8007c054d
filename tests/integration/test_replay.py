"""`raypool replay`: one item again, as it ran, and nothing of the run changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raypool import load_results, parpool
from raypool.cli.main import main
from raypool.journal.keys import content_key

SWEEP = """
import random
from dataclasses import dataclass

import raypool

@dataclass(frozen=True)
class Config:
    lr: float

def train(config):
    assert isinstance(config, Config)
    task = raypool.current_task()
    counter = task.checkpoint_dir / "counter"
    counter.write_text(str(int(counter.read_text()) + 1) if counter.exists() else "1")
    if config.lr > 2:
        raise ValueError("too large")
    return task.index, random.random(), counter.read_text()

if __name__ == "__main__":
    print("the main block runs")
    with raypool.parpool(2, profile="threads", quiet=True) as pool:
        pool.parfor(train, [Config(float(i)) for i in range(4)], run_dir="run", seed=3, on_error="collect")
"""


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a sweep that a script has run."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.py").write_text(SWEEP)
    subprocess.run(
        [sys.executable, "sweep.py"], cwd=folder, check=True, capture_output=True, timeout=500
    )
    return folder / "run"


def test_an_item_of_a_script_runs_again_as_it_did(swept):
    before = contents(swept)
    number, drawn, _ = load_results(swept)[1]
    done = replay(swept, 1)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"({number}, {drawn!r}, '2')\n"  # on a copy of its checkpoints
    assert "the main block runs" not in done.output
    assert "Config(lr=1.0)" in done.stderr
    assert contents(swept) == before


def test_an_item_that_fails_shows_where(swept):
    done = replay(swept, 3)
    assert done.exit_code == 1
    assert 'raise ValueError("too large")' in done.stderr
    assert "ValueError: too large" in done.stderr
    assert "replaying.py" not in done.stderr


def test_an_item_that_exits_shows_where(tmp_path):
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda _: sys.exit(), [1], run_dir=tmp_path, on_error="collect")
    done = replay(tmp_path, 0)
    assert done.exit_code == 1
    assert "SystemExit" in done.stderr
    assert "in <lambda>" in done.stderr


def test_an_item_can_be_called_by_its_key(swept):
    keys = sorted(path.name for path in (swept / "items").iterdir())
    assert replay(swept, keys[0]).exit_code in (0, 1)
    assert keys[0] in replay(swept, keys[0][:8]).stderr


def test_digits_are_a_number_even_if_a_key_begins_with_them(tmp_path):
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(abs, range(60), run_dir=tmp_path)
    keys = [content_key(item, "it") for item in range(60)]
    key = next(key for key in keys if key[:2].isdecimal() and int(key[:2]) > 59)
    done = replay(tmp_path, key[:2])
    assert done.exit_code == 2
    assert f"There is no item {key[:2]} in {tmp_path}, whose items are 0 to 59" in done.stderr
    assert replay(tmp_path, key).stdout == f"{keys.index(key)}\n"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("99", "There is no item 99 in {}, whose items are 0 to 3."),
        ("zz", "There is no item zz in {}, whose items are 0 to 3."),
        ("", "4 items of {} have keys that begin with ''. Pass more."),
    ],
)
def test_an_item_that_is_not_there_is_an_error(swept, item, words):
    done = replay(swept, item)
    assert done.exit_code == 2
    assert done.stderr.endswith(f"Error: {words.format(swept)}\n")


def test_a_script_that_opens_a_pool_when_it_is_imported(tmp_path):
    """Its loop would run once more, in the same folder."""
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP.replace('if __name__ == "__main__":', "if True:"))
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
    before = contents(tmp_path / "run")
    done = replay(tmp_path / "run", 0)
    assert done.exit_code == 2
    assert "sweep.py opens a pool while raypool imports it" in " ".join(done.output.split())
    assert contents(tmp_path / "run") == before


def test_a_folder_without_a_run_is_an_error(tmp_path):
    assert "There is no run in" in replay(tmp_path, 0).output
    assert replay(tmp_path / "missing", 0).exit_code == 2


def test_the_debugger_stops_at_the_function_and_where_it_raises(swept):
    command = [
        sys.executable,
        "-c",
        "from raypool.cli.main import main; main()",
        "replay",
        str(swept),
        "3",
        "--debug",
    ]
    typed = "p config.lr\ncontinue\np config.lr + 1\nquit\n"
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "(Pdb) 3.0" in done.stdout
    assert "(Pdb) 4.0" in done.stdout


def test_what_has_changed_since_is_said(swept, tmp_path):
    script = swept.parent / "sweep.py"
    text = script.read_text()
    try:
        script.write_text(text.replace("def train", "def other"))
        done = replay(swept, 1)
        assert (done.exit_code, "no longer has a function train" in done.output) == (2, True)
        script.write_text("1 / 0")
        done = replay(swept, 1)
        assert (done.exit_code, "cannot be imported (ZeroDivisionError" in done.output) == (2, True)
        script.unlink()
        assert "cannot be imported (FileNotFoundError" in replay(swept, 1).output
    finally:
        script.write_text(text)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_a_module_is_imported_by_its_name(tmp_path, kind):
    package = tmp_path / "here" / "models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "small.py").write_text(f"{kind} train(x):\n    return x * 2\n")
    (tmp_path / "sweep.py").write_text(
        "import raypool, models.small\n"
        "with raypool.parpool(2, profile='threads', quiet=True) as pool:\n"
        "    pool.parfor(models.small.train, [1, 2], run_dir='run')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "here")}
    subprocess.run([sys.executable, "sweep.py"], cwd=tmp_path, env=env, check=True, timeout=500)
    done = replay(tmp_path / "run", 1)
    assert done.stdout == "4\n", done.output
    for name in ("models.small", "models"):
        del sys.modules[name]


def test_a_function_without_a_name_is_kept_with_the_run(tmp_path):
    factor = 3
    with parpool(2, profile="threads", quiet=True) as pool:
        pool.parfor(lambda x: x * factor, [1, 2, {3}.pop()], run_dir=tmp_path / "run")
    assert replay(tmp_path / "run", 2).stdout == "9\n"
    (pickled,) = (tmp_path / "run").glob("function-*.pkl")
    pickled.write_bytes(b"something else")
    done = replay(tmp_path / "run", 2)
    assert (done.exit_code, "has changed since it was written" in done.output) == (2, True)


def test_an_item_of_an_older_run_has_the_function_of_that_run(tmp_path):
    with parpool(2, profile="threads", quiet=True) as pool:
        pool.parfor(lambda x: x + 1, [10], run_dir=tmp_path / "run")
        pool.parfor(lambda x: x + 2, [10, 20], run_dir=tmp_path / "run")
    assert [replay(tmp_path / "run", item).stdout for item in (0, 1)] == ["11\n", "22\n"]
