"""Runs one item of a durable run again, alone, in this process, without changing the folder.

The function is imported by its name, in its current version. A script is imported from its file, so
code under `if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from raypool.channel.users_code import generators_of, importing
from raypool.errors import JournalError
from raypool.journal.files import Damaged, check_owner, check_run, load, read_file
from raypool.journal.fingerprints import changes, source_of
from raypool.journal.keys import FunctionSource, found
from raypool.journal.opening import Contents
from raypool.journal.provenance import code_change, code_of, recorded
from raypool.journal.reading import ItemRecord, entries_of, newest_run, positions_of, read_contents
from raypool.journal.rows import get_back, logger
from raypool.worker.folders import CheckpointFolders
from raypool.worker.runner import finished, seed_everything
from raypool.worker.running import TaskContext, item_seed, running


class Replay(NamedTuple):
    """An item of a run, ready to run again, with the number and attempt of its last run."""

    run_dir: Path
    key: str
    fn: Callable[[Any], Any]
    item: Any
    number: int
    attempt: int
    seed: int | None
    name: str

    def run(
        self, call: Callable[[Callable[[Any], Any], Any], Any] = lambda fn, item: fn(item)
    ) -> Any:
        """Call the function with the item, in a task context like the loop's; return its value.

        Args:
            call: How to call it: by a debugger, say.

        Raises:
            Exception: Any error that the function raised.
        """
        note = TaskContext(self.number, self.attempt, self.seed, 0, None, self.name)
        with self.copied_checkpoint() as folder:
            note.folders = CheckpointFolders(lambda: folder)
            note.checkpoints = (str(folder), {self.number: "checkpoint"})
            if self.seed is not None:
                seed_everything(item_seed(self.seed, self.number), generators_of(self.fn))
            token = running.set(note)
            try:
                return finished(call(self.fn, self.item))
            finally:
                running.reset(token)

    @contextlib.contextmanager
    def copied_checkpoint(self) -> Iterator[Path]:
        """Give a temporary folder with a copy of the item's checkpoint, named so."""
        with tempfile.TemporaryDirectory(prefix="raypool-replay-") as folder:
            original = self.run_dir / "items" / self.key / "checkpoint"
            if original.is_dir():
                shutil.copytree(original, Path(folder) / "checkpoint")
            yield Path(folder)


@contextlib.contextmanager
def replaying(run_dir: Path, item: str) -> Iterator[Replay]:
    """Find an item of a run and its function; in this context the run's script is `__main__`.

    Args:
        run_dir: The folder of the run.
        item: The number in the table of `load_results`, or the key (or how it begins; digits alone
            are a number).

    Raises:
        JournalError: There is no such run or item, or it, or its function, cannot be restored.
    """
    folder = run_dir.absolute()
    contents = read_contents(folder)
    try:
        check_run(folder)  # the journal names the script to load
    except Damaged as error:
        raise JournalError(
            f"No item of {folder} can be replayed: {error}.", run_dir=str(folder)
        ) from error
    entry = _entry(folder, entries_of(contents), item)
    run = newest_run(contents) if entry.stored is None else entry.stored.run
    source, seed = _about(folder, contents, run)
    with _as_script(source):
        try:
            fn = _function(folder, source)
            if entry.item is None:
                raise Damaged(f"item {entry.key} itself is lost")
            value = get_back(entry.item, folder, entry.key)
        except Damaged as error:
            raise JournalError(
                f"Item {item} of {folder} cannot be replayed: {error}.", run_dir=str(folder)
            ) from error
        _check_code(folder, run, source, fn)
        index = _index(contents, run, entry.key)
        attempt = 1 if entry.stored is None else entry.stored.attempt
        yield Replay(folder, entry.key, fn, value, index, attempt, seed, source.function)


def _entry(folder: Path, entries: list[ItemRecord], item: str) -> ItemRecord:
    matches = [entry for entry in entries if entry.key == item]
    if not matches and item.isdecimal():  # a number, also where a key begins with it
        matches = entries[int(item) :][:1]
    elif not matches:
        matches = [entry for entry in entries if entry.key.startswith(item)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        fact = f"{len(matches)} items of {folder} have keys that begin with {item!r}. Pass more"
    elif entries:
        fact = f"There is no item {item} in {folder}, whose items are 0 to {len(entries) - 1}"
    else:
        fact = f"There is no item {item} in {folder}, which has no items"
    raise JournalError(f"{fact}.", run_dir=str(folder))


def _about(folder: Path, contents: Contents, run: int) -> tuple[FunctionSource, int | None]:
    """Return the function and seed of a call; of the newest, if its record is lost."""
    runs = {row[0]: row for row in contents["runs"] if row[3]}
    if not runs:
        raise JournalError(
            f"The journal in {folder} does not say where its function is defined.",
            run_dir=str(folder),
        )
    _, _, seed, source, *_ = runs.get(run) or runs[max(runs)]
    return FunctionSource.from_text(source), json.loads(seed)


def _check_code(folder: Path, run: int, source: FunctionSource, fn: Callable[[Any], Any]) -> None:
    """Warn if the code is not that of the call."""
    differences = []
    then, now = recorded(folder, run).get("code"), code_of(source)
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # of another version
        # a function of a notebook may have been in another repository than this directory
        if then and now and then["folder"] == now.folder and (text := code_change(then, now)):
            differences.append(text)
    if found := changes(source, source_of(fn)):
        differences.append(f"{source.function} {'; it '.join(found)}")
    if differences:
        logger.warning(
            "The replay may differ from the results in %s: %s.", folder, "; ".join(differences)
        )


def _index(contents: Contents, run: int, key: str) -> int:
    """Return the number that an item had in a call, or in the newest one that it was in."""
    numbers = {row[0] for row in contents["items"] if row[1] == key}
    for one in dict.fromkeys([run, *sorted({row[1] for row in contents["orders"]}, reverse=True)]):
        for position, number in positions_of(contents, one).items():
            if number in numbers:
                return position
    return 0


# --- the function ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_script(source: FunctionSource) -> Iterator[None]:
    """Find modules as the run did; afterwards restore `__main__`, which a script replaces."""
    path, main = list(sys.path), sys.modules["__main__"]
    sys.path.insert(0, str(Path.cwd()))
    if source.file:
        file, depth = Path(source.file), 1
        if not source.is_script:  # the folder from which the package can be imported
            depth = len(source.module.split(".")) + (file.name == "__init__.py")
        sys.path.insert(0, str(file.parents[min(depth, len(file.parents)) - 1]))
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules["__main__"] = main


def _function(folder: Path, source: FunctionSource) -> Callable[[Any], Any]:
    """Return the function of a run.

    Raises:
        Damaged: It cannot be restored.
    """
    if source.qualname is None:
        if source.digest is None:
            raise Damaged(f"{source.function} cannot be found by its name, nor pickled")
        path = folder / source.pickle_name
        check_owner(path)
        fn = load(read_file(path, path.stat().st_size, bytes.fromhex(source.digest)))
    else:
        try:
            with importing(source.file or source.module):
                module = (
                    _script(source) if source.is_script else importlib.import_module(source.module)
                )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = f" ({source.file})" if source.file else ""
            raise Damaged(
                f"{source.module}{where} cannot be imported ({type(error).__name__}: {error})"
            ) from error
        fn = found(module, source.qualname)
    if not callable(fn):
        raise Damaged(f"{source.module} no longer has a function {source.qualname}")
    return fn  # type: ignore[no-any-return]


def _script(source: FunctionSource) -> ModuleType:
    """Import a script under the name of its file, where its pickles find their classes."""
    spec = importlib.util.spec_from_file_location(source.module, source.file or "")
    if spec is None or spec.loader is None:
        raise ImportError(f"{source.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # before it runs: its dataclasses, say, look for their module there
    sys.modules[source.module] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
