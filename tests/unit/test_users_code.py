"""Which of the user's modules are loaded, and in which version: what this process runs, not what
its files say.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from raypool.channel import users_code
from raypool.channel.records import Failure, WorkerInfo
from raypool.channel.users_code import PATCHERS, Project, generators_of, is_installed
from raypool.core.model import Slice
from raypool.engine.work import described

NAME = "lab_of_users_code"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Give a module of the user's, as it was imported from a file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # Python notes there what it has loaded
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{NAME}.py").write_text("RATE = 0.1\ndef train():\n    return 'old'\n")
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def edit(module: ModuleType, source: str) -> None:
    path = Path(str(module.__file__))
    at = path.stat().st_mtime + 2  # Python compares whole seconds
    path.write_text(source)
    os.utime(path, (at, at))


def reload_it(module: ModuleType) -> None:
    importlib.reload(module)


def reload_by_autoreload(module: ModuleType) -> None:
    """As `%autoreload 2` does it, which patches functions and constants in place."""
    autoreload = pytest.importorskip("IPython.extensions.autoreload")
    assert PATCHERS & sys.modules.keys()
    reloader = _reloaders.setdefault(module.__name__, autoreload.ModuleReloader())
    reloader.check(check_all=True)


_reloaders: dict[str, object] = {}


@pytest.mark.parametrize("reload", [reload_it, reload_by_autoreload])
@pytest.mark.parametrize(
    "change",
    [
        "RATE = 0.1\ndef train():\n    return 'new'\n",
        "RATE = 0.2\ndef train():\n    return 'old'\n",
    ],
)
def test_a_version_is_what_is_loaded(
    lab: ModuleType, reload: Callable[[ModuleType], None], change: str
) -> None:
    """Not what stands in the file, which may have been edited only, or in which the reload has
    found a mistake.
    """
    reload(lab)  # autoreload takes note of what there is
    project = Project()
    first = project.look()
    assert first.versions[NAME].digest
    assert project.look() is first

    edit(lab, change)
    assert project.look() is first
    reload(lab)
    second = project.look()
    assert second.number > first.number
    assert second.versions[NAME].digest != first.versions[NAME].digest

    edit(lab, "def train(:\n")
    with contextlib.suppress(SyntaxError):
        reload(lab)
    assert project.look() is second
    _reloaders.clear()


@pytest.fixture
def without_patchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove those that other tests have imported: each look is a thorough one while they are."""
    for name in PATCHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("without_patchers")
def test_a_module_that_replaces_another_is_noticed(lab: ModuleType) -> None:
    """As in Python's own recipe for a file that is imported: it keeps its place in `sys.modules`,
    and modules that were imported later stay behind it.
    """
    sys.modules["imported_later"] = ModuleType("imported_later")
    project = Project()
    project.look()  # which may itself import something
    first = project.look().versions[NAME]
    edit(lab, "def train():\n    return 'new'\n")
    spec = importlib.util.spec_from_file_location(NAME, str(lab.__file__))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    assert project.look().versions[NAME].digest != first.digest
    del sys.modules["imported_later"]


@pytest.mark.usefixtures("without_patchers")
@pytest.mark.parametrize("error", [FileNotFoundError, KeyboardInterrupt])
def test_a_look_that_could_not_read_a_file_is_made_again(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """An editor writes it anew, or the user presses Ctrl-C."""

    def fail(*_: object, **__: object) -> None:
        raise error

    project = Project()
    project.look()  # which may itself import something
    first = project.look().versions[NAME]
    edit(lab, "def train():\n    return 'new'\n")
    importlib.reload(lab)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "open", fail)
        project.look()
    assert project.look().versions[NAME].digest != first.digest


def test_of_a_module_that_was_edited_before_anybody_looked_the_version_is_not_known(
    lab: ModuleType,
) -> None:
    """It is no version that a worker could have."""
    edit(lab, "RATE = 0.3\ndef train():\n    return 'edited'\n")
    assert Project().look().versions[NAME].digest == b""

    edit(lab, "RATE = 0.1\ndef train():\n    return 'old'\n")
    assert Project().look().versions[NAME].digest


def test_another_thread_may_import_meanwhile(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Importing(dict[str, ModuleType]):
        """Modules, of which one more is there after each look at the last one."""

        def __reversed__(self) -> Iterator[str]:
            found = super().__reversed__()
            self[f"imported_meanwhile_{len(self)}"] = ModuleType("other")
            return found

    project = Project()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", Importing(sys.modules))
        sys.modules.pop(NAME)
        assert NAME not in project.look().versions
        sys.modules[NAME] = lab
        assert NAME in project.look().versions


def test_packages_are_not_looked_into() -> None:
    versions = Project().look().versions
    assert __name__ in versions
    assert not {"pytest", "numpy", "os", "raypool", "raypool.pool"} & versions.keys()


def test_a_module_may_have_an_equality_of_its_own(lab: ModuleType) -> None:
    class Lazy(ModuleType):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

    project = Project()
    project.look()  # it may import modules itself
    before = project.look()
    sys.modules[NAME] = Lazy(NAME)
    vars(sys.modules[NAME]).update(vars(lab))
    assert project.look().number > before.number


def test_the_current_folder_may_be_removed_and_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    project = Project()
    assert project.look().before[:2] == (str(here), str(tmp_path))
    here.rmdir()
    assert project.look().before[0] == str(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert project.look().before[:2] == (str(tmp_path.parent), str(tmp_path))
    monkeypatch.setattr(users_code, "PATH_BYTES", 4)  # its path is longer
    assert Project().look().before[:2] == (str(tmp_path.parent), str(tmp_path))


def test_what_is_installed_is_where_links_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation may be a link to the user's folder, or to one file of it."""
    packages, project = tmp_path / "venv" / "site-packages", tmp_path / "project"
    packages.mkdir(parents=True)
    project.mkdir()
    (tmp_path / "short").symlink_to(packages)
    (packages / "linked").symlink_to(project)
    (packages / "linked.py").symlink_to(project / "linked.py")
    (project / "vendored.py").symlink_to(packages / "vendored.py")
    monkeypatch.chdir(project)
    installed = [tmp_path / "short" / "a.py", packages / "a" / "b.py", packages, tmp_path / "short"]
    installed += [project / "vendored.py", Path("../short/a.py"), Path(os.__file__)]
    users = [packages / "linked" / "a.py", packages / "linked.py", project / "a.py", Path("a.py")]
    assert [is_installed(str(path)) for path in (*installed, *users)] == [True] * 7 + [False] * 4
    assert is_installed(f"{packages}/")
    assert not is_installed("../short/..")
    assert not is_installed("a" * 300), "too long for a name"


def test_the_error_for_a_module_that_is_only_here_says_what_to_do(lab: ModuleType) -> None:
    def note(name: str) -> list[str]:
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        described(
            Failure(error, "Traceback ..."), "item 0", Slice(0, 0, 1, 1), WorkerInfo(0, "lab-3", 1)
        )
        return error.__notes__[1:]

    (words,) = note(NAME)
    assert f"{NAME} in {Path(str(lab.__file__)).parent}, workers on lab-3 do not" in words
    assert "working_dir=" in words
    assert note("numpy") == [
        "raypool: numpy is installed here, but not on lab-3. Install the same version there, or"
        " add it to packages=."
    ]
    assert note("no_such_module") == []


def test_generators_are_found_while_another_thread_imports_numpy_and_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = random.Random()
    for name in ("numpy.random", "torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # it has no names yet
    assert [found.value for found in generators_of(lambda: own.random())] == [own]


class Lazy:
    """An object of a framework that is not set up."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("settings are not configured")


def test_a_global_that_does_not_say_what_it_is(lab: ModuleType) -> None:
    lab.current = weakref.proxy(Lazy())  # type: ignore[attr-defined]  # it is dead already
    lab.settings = Lazy()  # type: ignore[attr-defined]
    assert NAME in Project().look().versions
