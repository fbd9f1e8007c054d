"""Functions that the command line names: found as Python would find them, or an error that names
those near.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raypool import InvalidTypeError, InvalidValueError
from raypool.cli.inputs import check_takes_whole, find_function

SWEEP = """
import helpers_of_targets

LIMIT = 3

def train(config):
    return helpers_of_targets.double(config["lr"])

class Trainer:
    @staticmethod
    def run(config): ...

def keywords(lr, width): ...

if __name__ == "__main__":
    raise SystemExit("the main block runs")
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Give a way to write modules into the folder in which the test runs; none of them stays
    imported.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    before = set(sys.modules)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write("sweep_of_targets.py", SWEEP)
    write("helpers_of_targets.py", "def double(x):\n    return 2 * x\n")
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


Write = Callable[[str, str], Path]


def test_a_module_of_this_folder_is_found_as_by_python_m(write: Write) -> None:
    assert find_function("sweep_of_targets:train")({"lr": 2}) == 4
    assert find_function("sweep_of_targets:Trainer.run").__qualname__ == "Trainer.run"


def test_a_file_is_found_with_those_beside_it_and_workers_find_them_too(
    write: Write, tmp_path: Path
) -> None:
    write(
        "deep/file_of_targets.py",
        "import beside_of_targets\ndef train(config):\n    return beside_of_targets.x\n",
    )
    write("deep/beside_of_targets.py", "x = 7\n")
    assert find_function("deep/file_of_targets.py:train")({}) == 7
    assert os.environ["PYTHONPATH"] == str(tmp_path / "deep")


def test_a_module_of_a_package_is_found(write: Write) -> None:
    write("package_of_targets/__init__.py", "")
    write(
        "package_of_targets/small.py",
        "from . import __name__ as name\ndef train(config): return name\n",
    )
    assert find_function("package_of_targets.small:train")({}) == "package_of_targets"
    with pytest.raises(
        InvalidValueError,
        match=r"no known parent package.* Use its full name instead: package.module:function",
    ):
        find_function("package_of_targets/small.py:train")


NOT_THERE = [
    ("sweep_of_targets", "does not name a module and a function. Write module:function"),
    ("sweep_of_targets:", "does not name a module and a function"),
    (":train", "does not name a module and a function"),
    (
        ".train:main",
        r"'.train' is neither a module \(package.train\) nor a file \(folder/train.py\).$",
    ),
    (
        "./sweep_of_targets:train",
        r"nor a file \(folder/train.py\). Did you mean ./sweep_of_targets.py:train?",
    ),
    (
        "sweep_of_target:train",
        "There is no module 'sweep_of_target'.* Did you mean sweep_of_targets?",
    ),
    ("sweep_of_targets.more:train", "There is no module 'sweep_of_targets.more'"),
    (
        "sweep_of_target.py:train",
        "There is no file 'sweep_of_target.py'. Did you mean sweep_of_targets.py?",
    ),
    ("missing/train.py:train", "There is no file 'missing/train.py'.$"),
    ("sweep_of_targets:trian", "sweep_of_targets has no function 'trian'. Did you mean train?"),
    ("sweep_of_targets:fit", "Choose from: Trainer, keywords, train."),
    ("os:sep.foo", "os has no function 'sep.foo'.$"),
    ("sweep_of_targets:LIMIT.real.go", "has no function 'LIMIT.real.go'.$"),
    ("sweep_of_targets:Trainer.go", r"has no function 'Trainer.go'. Choose from: run."),
]


def test_what_is_not_there_is_said_with_what_is_near(write: Write) -> None:
    for target, words in NOT_THERE:
        with pytest.raises(InvalidValueError, match=words):
            find_function(target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sweep_of_targets:LIMIT", "sweep_of_targets:LIMIT is 3, which is not callable"),
        (
            "sweep_of_targets:keywords",
            r"keywords\(lr, width\) cannot be called with one argument, the configuration",
        ),
    ],
)
def test_what_cannot_be_called_with_a_configuration_is_refused(
    write: Write, target: str, words: str
) -> None:
    with pytest.raises(InvalidTypeError, match=words):
        find_function(target)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero, in line 2 of .*broken_of_targets.py"),
        (
            "import nothing_of_this_name\n",
            "ModuleNotFoundError: No module named 'nothing_of_this_name', in line 1",
        ),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("def train(:\n", "SyntaxError: .*broken_of_targets.py, line 1"),
    ],
)
@pytest.mark.parametrize("target", ["broken_of_targets:train", "broken_of_targets.py:train"])
def test_a_module_that_cannot_be_imported_says_why_and_where(
    write: Write, target: str, text: str, words: str
) -> None:
    write("broken_of_targets.py", text)
    with pytest.raises(InvalidValueError, match=f"cannot be imported: {words}"):
        find_function(target)


def test_this_folder_comes_first_also_where_it_is_on_the_path_already(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("elsewhere/module_of_two_folders.py", "def train(config): return 'elsewhere'\n")
    write("module_of_two_folders.py", "def train(config): return 'here'\n")
    monkeypatch.setattr(sys, "path", [str(Path("elsewhere").resolve()), str(Path.cwd()), *sys.path])
    assert find_function("module_of_two_folders:train")({}) == "here"


def test_a_module_with_the_name_of_one_that_is_imported_is_refused(write: Write) -> None:
    assert find_function("random:choice") is random.choice
    file = write("random.py", "def choice(config): ...\n")
    with pytest.raises(
        InvalidValueError,
        match=(
            rf"'random' is the name of {random.__file__}, which .* and of {file}. Rename the file"
        ),
    ):
        find_function("random:choice")


def test_a_package_beside_a_file_of_its_name_is_found_as_by_python(write: Write) -> None:
    write("both_of_targets/__init__.py", "def train(config): return 'package'\n")
    write("both_of_targets.py", "def train(config): return 'file'\n")
    assert find_function("both_of_targets:train")({}) == "package"


def test_a_function_that_wants_one_value_gets_no_whole_configuration() -> None:
    def train(lr: float, epochs: int = 3) -> None: ...

    def right(config: object) -> None: ...

    with pytest.raises(
        InvalidTypeError,
        match=(
            r"would get the whole configuration \(a dict\) as lr.*def train\(config\).*config\['lr'\]"
        ),
    ):
        check_takes_whole(train, [{"width": 8}, {"lr": 0.1}])
    check_takes_whole(train, [{"width": 8, "epochs": 3}])
    check_takes_whole(right, [{"config": "a.yaml"}])
    check_takes_whole(print, [{"sep": ""}])
    check_takes_whole(max, [{"lr": 0.1}])


def test_a_file_with_the_name_of_another_module_is_refused(write: Write) -> None:
    write("elsewhere/pytest.py", "def train(config): ...\n")
    with pytest.raises(InvalidValueError, match=r"'pytest' is the name of .*Rename the file"):
        find_function("elsewhere/pytest.py:train")
    write("train.v2.py", "def train(config): ...\n")
    with pytest.raises(InvalidValueError, match="a module name cannot contain a dot"):
        find_function("train.v2.py:train")
