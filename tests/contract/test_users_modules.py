"""Workers find and run the modules of the script that opened the pool: those on its path, in the
versions that it has loaded.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raypool import ParallelPool

pytestmark = [pytest.mark.processes, pytest.mark.quick]

Write = Callable[[str, str], ModuleType]

names = (f"lab_{os.getpid()}_{number}" for number in itertools.count())


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into a folder that was put on the path, and import it; or edit it, and reload
    it.
    """
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, source: str) -> ModuleType:
        edit(tmp_path / f"{name}.py", source)
        written.append(name)
        return (
            importlib.reload(sys.modules[name])
            if name in sys.modules
            else importlib.import_module(name)
        )

    yield write
    for name in written:
        sys.modules.pop(name, None)


def edit(path: Path, source: str) -> None:
    """Replace a file; Python takes one of the same size that was written in the same second for the
    old one.
    """
    before = path.stat().st_mtime if path.exists() else 0
    path.write_text(source)
    if before:
        os.utime(path, (before + 2, before + 2))
    importlib.invalidate_caches()


def test_a_folder_that_was_put_on_the_path_is_on_that_of_workers(
    pool: ParallelPool, write: Write
) -> None:
    """Also after the workers have started, and before installed packages."""
    lab = write(
        next(names),
        "import sys\ndef where(_):\n    return sys.path.index(__file__.rpartition('/')[0])\n",
    )

    assert (
        list(pool.parfor(lab.where, 3)) == [sys.path.index(str(Path(str(lab.__file__)).parent))] * 3
    )


def test_a_reloaded_module_is_reloaded_in_workers(pool: ParallelPool, write: Write) -> None:
    """With what others have imported from it, and only then: a file that was edited is not what
    this process runs.
    """
    helper_name, lab_name = next(names), next(names)
    helper = write(helper_name, "RATE = 1\ndef f():\n    return 'old'\n")
    source = (
        f"import os\nfrom {helper_name} import RATE, f\ndef train():\n    return f(), RATE,"
        " os.getpid()\n"
    )
    lab = write(lab_name, source)
    before = pool.parfeval_on_all(lab.train).result()

    edit(Path(str(helper.__file__)), "RATE = 2\ndef f():\n    return 'edited'\n")
    edited = pool.parfeval_on_all(lab.train).result()
    importlib.reload(helper)
    after = pool.parfeval_on_all(lab.train).result()
    edit(Path(str(helper.__file__)), "RATE = 3\ndef f():\n    return 'both'\n")
    importlib.reload(helper)
    importlib.reload(lab)
    both = pool.parfeval_on_all(lab.train).result()

    assert edited == before
    assert [word for word, *_ in after] == ["edited"] * 3
    assert [(word, rate) for word, rate, _ in both] == [("both", 3)] * 3


def test_a_worker_with_a_constant_is_replaced_where_a_module_was_reloaded(
    pool: ParallelPool, write: Write
) -> None:
    """Its value would stay one of the old class."""
    source = (
        "import os\nclass Net:\n    pass\ndef train(net):\n    return isinstance(net.value, Net),"
        " {!r}, os.getpid()\n"
    )
    lab = write(next(names), source.format("old"))
    net = pool.constant(lab.Net)
    before = pool.parfeval_on_all(lab.train, net).result()

    write(lab.__name__, source.format("edited"))
    is_one, version, pid = pool.parfeval(lab.train, net).result()

    assert is_one, (version, pid, before)
    assert version == "edited"
    assert pid not in [pid for *_, pid in before]


def test_a_worker_with_a_setup_is_replaced_where_a_module_was_reloaded(
    make_pool: Any, write: Write
) -> None:
    """What the setup has left in the module would be lost; the new worker has it, and stays."""
    source = """
import os
model = None
def init():
    global model
    model = {0!r}
def train(_):
    return model, {0!r}, os.getpid()
"""
    lab = write(next(names), source.format("old"))
    with make_pool(1, setup=lab.init) as pool:
        ((model, version, pid),) = pool.parfor(lab.train, 1)
        assert (model, version) == ("old", "old")

        write(lab.__name__, source.format("edited"))
        runs = [value for _ in range(2) for value in pool.parfor(lab.train, 1)]

    assert [(model, version) for model, version, _ in runs] == [("edited", "edited")] * 2
    assert pid != runs[0][2] == runs[1][2]


def test_a_new_worker_that_imports_an_edited_module_is_warned_of(
    pool: ParallelPool, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    lab = write(next(names), "def train():\n    return 'old'\n")
    assert pool.parfeval(lab.train).result() == "old"

    edit(Path(str(lab.__file__)), "def train():\n    return 'edited'\n")

    assert pool.options(fresh_process=True).parfeval(lab.train).result() == "edited"
    assert f"another version of the module {lab.__name__} than this process" in caplog.text


def test_a_task_may_parse_the_options_of_the_script(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epochs in ("5", "6"):
        monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", epochs])
        assert pool.submit(lambda: __import__("sys").argv).result(300) == sys.argv


@pytest.mark.threads
@pytest.mark.quick
def test_an_import_in_a_thread_is_not_torn(
    make_pool: Any, make_gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled meanwhile ends when the import has; other tasks, and the script
    itself, can import the module.
    """
    monkeypatch.syspath_prepend(tmp_path)
    name, inside, goes_on = next(names), make_gate(), make_gate()
    (tmp_path / f"{name}.py").write_text(f"""
import time
from pathlib import Path
Path({str(inside.path)!r}).touch()
while not Path({str(goes_on.path)!r}).exists():
    time.sleep(0.01)
whole = True
""")

    def use() -> None:
        importlib.import_module(name)
        while True:
            time.sleep(0.01)

    with make_pool(2, cancel_grace_s=300) as pool:
        future = pool.submit(use)
        inside.wait()
        assert future.cancel()
        # the driver has passed the cancellation on before it handed out this
        assert pool.submit(abs, -1).result(300) == 1
        goes_on.open()
        assert importlib.import_module(name).whole
    del sys.modules[name]
