"""The user's own modules (neither installed packages nor the standard library) and their versions;
and the random generators and models that a function captures.

A worker imports modules from files, once. The driver's process may have other folders on
`sys.path`, and may have reloaded a module since. So it sends a `Snapshot` with its functions, and
the worker follows that.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import importlib.machinery
import importlib.util
import marshal
import operator
import os
import platform
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.errors import InvalidValueError

if TYPE_CHECKING:
    import numpy as np


INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, wherever they are."""

PATCHERS = frozenset({"IPython.extensions.deduperreload.deduperreload", "jurigged"})
"""Modules that change functions in place, without a reload, such as that of `%autoreload 2`."""

CONSTANTS = (int, float, complex, str, bytes)

PYC_HEADER_BYTES = 16

PATH_BYTES = 4096
"""The length of nearly all paths, at most [bytes]."""


_imported_for_function = ""  # the name of what is being imported


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Import a user's script or module to find a function: no pool may be opened meanwhile."""
    global _imported_for_function
    _imported_for_function = name
    try:
        yield
    finally:
        _imported_for_function = ""


def check_not_importing() -> None:
    """Make sure that no script opens a pool while raypool imports it: its loops would run again.

    Raises:
        InvalidValueError: One does.
    """
    if _imported_for_function:
        raise InvalidValueError(
            f"{_imported_for_function} opens a pool while raypool imports it to find a function."
            ' Put the lines that open the pool below `if __name__ == "__main__":`.'
        )


def is_users(module: str | None) -> bool:
    """Return whether a module, by name, is the user's own; true of one that is not imported."""
    # the second is the script in a process that multiprocessing has started
    if module is None or module in ("__main__", "__mp_main__") or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return isinstance(file, str) and not is_installed(file)


@functools.lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether a file or folder is that of an installed package or the standard library."""
    folder, name = os.path.split(file)
    # a process may have thousands of modules: following the links of each whole path is slow
    # (`Path.is_symlink` raises errors of folders that cannot be entered)
    if name in ("", os.curdir, os.pardir) or os.path.islink(file):  # noqa: PTH114
        return _is_library(_real(file))
    return _is_library(os.path.join(_real(folder), name))  # noqa: PTH118


@functools.lru_cache(4096)
def _real(path: str) -> str:
    return os.path.realpath(path)


@functools.lru_cache(4096)
def _is_library(path: str) -> bool:
    folder, name = os.path.split(path)
    return name in INSTALLED or path in _libraries() or (folder != path and _is_library(folder))


@functools.cache
def _libraries() -> frozenset[str]:
    """Return the folders of the standard library, of installed packages and of raypool itself."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(sysconfig.get_path(kind)) for kind in kinds]
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders += [folders[0].parent / zipped, Path(__file__).parents[1]]
    return frozenset(str(folder.resolve()) for folder in folders)


def folder_of(module: str) -> Path | None:
    """Return the folder on the path in which this process finds a module's package, or None."""
    package = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
        # within a package only if that is imported: else `find_spec` would import it
        if spec is None or (package in sys.modules and importlib.util.find_spec(module) is None):
            return None
    except (ImportError, ValueError):  # its parent is no package, or it is a script, without a spec
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return Path(places[0]).parent


# --- driver's side --------------------------------------------------------------------------------


class Version(NamedTuple):
    """Which source of a module is loaded, and how often it was reloaded."""

    digest: bytes  # empty: not known, since the file was changed after that
    reloads: int  # which counts too: a reload imports from other modules what these have then


class Snapshot(NamedTuple):
    """The user's modules that a process has loaded, by name, and where it would find others.

    `before`, `after`: the user's folders on its `sys.path`, around those of the standard library.
    `argv`: its arguments, since a task may be what parses those of the script.
    """

    number: int
    host: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    versions: Mapping[str, Version]
    argv: tuple[str, ...]


class Project:
    """Takes snapshots of this process, from any thread; a new one only after a change."""

    def __init__(self) -> None:
        self._modules = Modules()
        self._lock = threading.Lock()  # any thread may submit work
        self._newest = Snapshot(0, platform.node(), (), (), {}, ())
        self._seen: Any = None  # the path, current folder and arguments of the newest one
        self._current_folder = _current_folder()

    def look(self) -> Snapshot:
        """Return the newest snapshot."""
        # for each call: quick if nothing has changed
        with self._lock:
            here = self._current_folder() if "" in sys.path else None
            versions = self._modules.versions()
            newest = self._newest
            if (sys.path, here, sys.argv) != self._seen or versions is not newest.versions:
                path, argv = [*sys.path], [*sys.argv]
                folder = None if here is None else os.fsdecode(here)
                before, after = _sorted_folders(path, folder)
                new = newest._replace(
                    before=before, after=after, versions=versions, argv=tuple(argv)
                )
                self._seen = None  # a look that is interrupted is made again
                # one that is as before keeps its number
                self._newest = new._replace(number=newest.number + (new != newest))
                self._seen = path, here, argv
            return self._newest


def _current_folder() -> Callable[[], bytes | None]:
    """Return a function that returns the current folder; None if somebody has removed it."""
    import ctypes  # imported late: only a pool on Ray needs it

    getcwd = ctypes.PyDLL(None).getcwd
    getcwd.restype = ctypes.c_char_p
    memory = ctypes.create_string_buffer(PATH_BYTES)

    def find() -> bytes | None:
        # `os.getcwd` releases Python's lock, and the driver's thread would run before each call
        here: bytes | None = getcwd(memory, PATH_BYTES)
        if here is None:  # its path is longer, or it was removed
            with contextlib.suppress(FileNotFoundError):
                here = os.getcwdb()  # noqa: PTH109
        return here

    return find


def _sorted_folders(
    path: Sequence[Any], here: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's folders on a path, before and after the standard library's.

    `here` stands for the entry "", unless it is None.
    """
    found: tuple[list[str], list[str]] = ([], [])
    is_after = False
    for entry in path:
        folder = here if entry == "" else entry
        # no folder: a name for a finder, or the current folder, which has been removed
        if not isinstance(folder, str) or folder.startswith("__editable__"):
            continue
        if is_installed(folder):
            is_after = True
        else:
            # with links in it, as it was written
            found[is_after].append(os.path.abspath(folder))  # noqa: PTH100
    return tuple(found[0]), tuple(found[1])


# --- loaded modules -------------------------------------------------------------------------------


def _newest_import() -> tuple[int, str]:
    """Return values that every import changes: the number of modules, and the last one."""
    try:
        last = next(reversed(sys.modules))
    except RuntimeError:  # another thread imports: the next look finds a change
        last = ""
    return len(sys.modules), last


class Loaded(NamedTuple):
    """A module as it was loaded."""

    module: types.ModuleType
    spec: Any  # a reload gives it another
    stat: tuple[int, int]  # of its file: time [ns] and size
    contents: list[Any]
    version: Version


class Modules:
    """Knows the versions of loaded modules of the user; it reads a file once for each version."""

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}
        self._versions: dict[str, Version] = {}
        # as the last look found them, to see quickly that nothing has changed
        self._newest: Any = None
        self._loading: list[str] = []  # modules that are being imported
        self._last_spec: Any = None
        self._names: tuple[str, ...] = ()
        self._objects: list[Any] = []
        self._is_settled = False  # nothing has to be looked at again unless these change

    def versions(self) -> Mapping[str, Version]:
        """Return them by name, imported ones first; the same object if nothing has changed."""
        modules = sys.modules
        newest = _newest_import()
        last_spec = getattr(modules.get(newest[1]), "__spec__", None)
        # A reload moves its module to the end, with another spec: there is no need to look at
        # hundreds of specs in each call. Not `==`: these specs are equal.
        if (
            self._is_settled
            and newest == self._newest
            and last_spec is self._last_spec
            and all(map(operator.is_, map(modules.get, self._names), self._objects))
        ):
            return self._versions
        self._is_settled = False  # a look that is interrupted is made again
        is_patched = not modules.keys().isdisjoint(PATCHERS)
        is_settled = not is_patched
        changed = [
            (name, known, module)
            for name, known in self._loaded.items()
            if (module := modules.get(name)) is not known.module
            or module.__spec__ is not known.spec
            or (is_patched and _is_edited(known))
        ]
        for name, known, module in changed:
            if module is None:
                del self._loaded[name]
                self._versions = {**self._versions}  # a copy: snapshots have the old one
                del self._versions[name]
            elif module is known.module and _ids(_contents(module)) == _ids(known.contents):
                self._loaded[name] = known._replace(spec=module.__spec__)  # its reload has failed
            else:  # its file may be absent for a moment
                is_settled &= self._take(name, module, known.version.reloads + 1)
        loading = []
        for name in list(modules) if newest != self._newest else self._loading:
            module = modules.get(name)
            if module is not None and name not in self._loaded and is_users(name):
                if _is_loading(module):
                    loading.append(name)
                self._take(name, module, 0)
        self._newest, self._loading = newest, loading
        self._last_spec = last_spec
        self._names = tuple(self._loaded)
        self._objects = [each.module for each in self._loaded.values()]
        self._is_settled = is_settled and not loading
        return self._versions

    def _take(self, name: str, module: types.ModuleType, reloads: int) -> bool:
        """Note a module as it was loaded, if it comes from a file; return whether it does."""
        loaded = _loaded(module, reloads)
        if loaded is not None:
            self._loaded[name] = loaded
            self._versions = {**self._versions, name: loaded.version}
        return loaded is not None


def _is_loading(module: types.ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _loaded(module: types.ModuleType, reloads: int) -> Loaded | None:
    """Return a module that was loaded just now; None if it comes from no file of Python code."""
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    if spec is None or not file or not file.endswith(".py") or _is_loading(module):
        return None
    try:
        with Path(file).open("rb") as opened:
            about, source = os.fstat(opened.fileno()), opened.read()
    except OSError:  # removed since it was imported
        return None
    digest = _digest(source) if _is_as_loaded(module, about, source) else b""
    stat, version = (about.st_mtime_ns, about.st_size), Version(digest, reloads)
    return Loaded(module, spec, stat, _contents(module), version)


def _digest(source: bytes) -> bytes:
    import hashlib

    return hashlib.blake2b(source, digest_size=8).digest()


def _is_as_loaded(module: types.ModuleType, about: os.stat_result, source: bytes) -> bool:
    """Return whether a file is as it was when a module was loaded; True if that is not known."""
    # Python has noted its time and size in the compiled file then
    cached = getattr(module, "__cached__", None)
    if (
        type(module.__loader__) is not importlib.machinery.SourceFileLoader
        or sys.dont_write_bytecode
        or not cached
    ):
        return True
    try:
        compiled = Path(cached).read_bytes()
    except OSError:  # Python may not have been allowed to write it
        return True
    flags, seconds, size = (
        int.from_bytes(compiled[start : start + 4], "little") for start in (4, 8, 12)
    )
    if (
        flags
        or (seconds, size) == (int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
        # then Python could not renew it, and it may be of an older source
        or not os.access(cached, os.W_OK)
    ):
        return True
    try:  # a checkout may have written the same file again
        return bool(
            marshal.loads(compiled[PYC_HEADER_BYTES:])
            == compile(source, str(module.__file__), "exec", dont_inherit=True)
        )
    except Exception:  # the source has an error by now, say
        return False


def _contents(module: types.ModuleType) -> list[Any]:
    """Return the objects in a module that a change of it replaces."""
    # not their ids, which later objects may get
    found: list[Any] = []
    for name, value in list(vars(module).items()):
        if name.startswith("__"):  # the import system's own, which a reload that fails changes too
            continue
        kind = type(value)  # `isinstance` would ask the value: a dead weak reference raises
        if issubclass(kind, type) and value.__module__ == module.__name__:
            found += [_code_in(part) for part in list(vars(value).values())]
        # a model would stay in memory
        if issubclass(kind, (types.FunctionType, type, *CONSTANTS)):
            found.append(_code_in(value))
    return found


def _code_in(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value.__code__ if isinstance(value, types.FunctionType) else value


def _ids(values: list[Any]) -> list[int]:
    return list(map(id, values))


def _is_edited(known: Loaded) -> bool:
    """Return whether the file of a module has changed since it was loaded."""
    try:
        about = os.stat(str(known.module.__file__))  # noqa: PTH116 - for each call
    except OSError:  # removed: what is loaded still counts
        return False
    return (about.st_mtime_ns, about.st_size) != known.stat


# --- worker's side --------------------------------------------------------------------------------


class Follower:
    """Lets this process find and run the same modules as another, if it has the same files."""

    def __init__(self) -> None:
        self._modules = Modules()
        self._snapshot: Snapshot | None = None
        self._reloads: dict[str, int] = {}  # of the other process, when a module was loaded here
        self._newest: Any = None
        self._added: set[str] = set()  # to the path

    def follow(self, snapshot: Snapshot) -> None:
        """Follow a snapshot, and take its path if it is of this machine."""
        if self._snapshot is not None:
            for name, version in self._snapshot.versions.items():
                if name in sys.modules:
                    self._reloads.setdefault(name, version.reloads)
        self._snapshot, self._newest = snapshot, None
        sys.argv = list(snapshot.argv)
        if snapshot.host == platform.node():
            own = [entry for entry in sys.path if entry not in self._added]
            folders = (*snapshot.before, *snapshot.after)
            self._added = set(folders).difference(own)
            others = [entry for entry in own if entry not in snapshot.before]
            sys.path[:] = [
                *snapshot.before,
                *others,
                *(entry for entry in snapshot.after if entry not in own),
            ]
        # a module may have been written since this process looked into its folder
        importlib.invalidate_caches()

    def outdated(self) -> list[types.ModuleType]:
        """Return modules that the other process has reloaded from files that are here too.

        Imported ones come first.
        """
        found, different = [], self._different()
        for name, wanted in ({} if self._snapshot is None else self._snapshot.versions).items():
            is_older = self._reloads.get(name, wanted.reloads) < wanted.reloads
            module = sys.modules.get(name)
            if module is None or not (is_older or name in different):
                continue
            with contextlib.suppress(OSError):  # its file is gone, say
                if _digest(Path(str(module.__file__)).read_bytes()) == wanted.digest:
                    found.append(module)
                    self._reloads[name] = wanted.reloads
        return found

    def others(self) -> list[tuple[str, str]]:
        """Return the modules of other versions loaded since the last call, and their files."""
        if (newest := _newest_import()) == self._newest:
            return []
        self._newest = newest
        return [(name, str(sys.modules[name].__file__)) for name in self._different()]

    def _different(self) -> list[str]:
        """Return the modules that come from another source than in the other process."""
        wanted = {} if self._snapshot is None else self._snapshot.versions
        here = self._modules.versions()
        return [
            name
            for name, version in wanted.items()
            if name in here and here[name].digest != version.digest
        ]


def reload_all(modules: Iterable[types.ModuleType]) -> None:
    """Reload modules, and rebind the names that other modules of the user imported from them.

    Raises:
        Exception: One of them has raised it.
    """
    for module in modules:
        before = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (types.FunctionType, type))
        }
        importlib.reload(module)
        new = {id(value): vars(module).get(name, value) for name, value in before.items()}
        for name, other in sys.modules.copy().items():
            if other is not module and is_users(name):
                # an object in the place of a module may refuse
                with contextlib.suppress(Exception):
                    for key, value in list(vars(other).items()):
                        if id(value) in new:
                            vars(other)[key] = new[id(value)]


def different_module(name: str, file: str, host: str) -> str:
    """Return the warning about a module of which workers on a machine run another version."""
    return (
        f"Workers on {host} run another version of the module {name} than this process: {file}"
        " there differs from the version imported here. If it was edited since, call"
        f" importlib.reload({name}) here. If that machine has its own copy, update it, or let"
        " working_dir= send it."
    )


# --- what a function captures ---------------------------------------------------------------------
#
# A function takes a copy of each captured value to its worker. Copies of a generator would give all
# workers the same numbers, so each item seeds its own. A model that a function changes stays
# unchanged in the script, so raypool warns.

MOST_VALUES = 5_000
"""At most this many values are searched for a function."""

MOST_ENTRIES = 1_000
"""A list or dict with more entries is data, and not searched."""

INSIDE: Sequence[tuple[type, Sequence[str]]] = (
    (staticmethod, ["__func__"]),
    (classmethod, ["__func__"]),
    (types.MethodType, ["__func__", "__self__"]),
    # of a module's function the module, which leads nowhere
    (types.BuiltinMethodType, ["__self__"]),
    (property, ["fget"]),
)
"""The attributes in which such values hold others."""


class Generator(NamedTuple):
    """A generator, and the variable that leads to it."""

    name: str
    value: Any

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Seed it with these seeds."""
        if isinstance(self.value, random.Random):
            self.value.seed(seeds.generate_state(4).tobytes())
        elif _is_torchs(self.value):
            self.value.manual_seed(int(seeds.generate_state(2).view("u8")[0] >> 1))
        else:
            import numpy as np

            if isinstance(self.value, np.random.RandomState):
                kind = getattr(np.random, self.value.get_state(legacy=False)["bit_generator"])
                state = np.random.RandomState(kind(seeds)).get_state(legacy=False)
                self.value.set_state(state)
            else:
                # not only its state: `spawn` uses the seeds
                self.value.__setstate__(type(self.value)(seeds).__getstate__())

    def get_state(self) -> Any:
        """Return its state."""
        if isinstance(self.value, random.Random):
            return self.value.getstate()
        if _is_torchs(self.value):
            return self.value.get_state()
        if hasattr(self.value, "get_state"):  # NumPy's RandomState
            return self.value.get_state(legacy=False)
        return self.value.__getstate__()

    def set_state(self, state: Any) -> None:
        """Restore its state."""
        if isinstance(self.value, random.Random):
            self.value.setstate(state)
        elif _is_torchs(self.value) or hasattr(self.value, "set_state"):
            self.value.set_state(state)
        else:
            self.value.__setstate__(state)


def _is_torchs(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    # another thread may be importing it just now: then it lacks the name
    return hasattr(torch, "Generator") and isinstance(value, torch.Generator)


def _numpys_random() -> Any:
    """Return `numpy.random` if it is completely imported; else None."""
    module = sys.modules.get("numpy.random")
    return module if hasattr(module, "RandomState") else None


def generators_of(fn: Any) -> list[Generator]:
    """Return the NumPy, torch and `random.Random` generators of a function, in a fixed order.

    They are searched in its global variables, closure, default arguments and partial arguments, in
    the object of a method, and from there in other functions and classes of the user's, lists,
    tuples and dicts. Global generators (`np.random.normal`) do not count, nor do those that a
    function makes or imports while it runs.
    """
    # those behind the functions of modules, which `seed_everything` seeds
    known: list[Any] = [random._inst]
    if (numpys := _numpys_random()) is not None:
        known += [numpys.mtrand._rand, numpys.mtrand._rand._bit_generator]
    known.append(getattr(sys.modules.get("torch"), "default_generator", None))
    found = []
    for name, generator in _search(fn, _generator_in):
        if all(generator is not other for other in known):
            known.append(generator)
            found.append(Generator(name, generator))
    return found


class CapturedModels:
    """The torch modules that a function captures, and the versions of their parameters."""

    def __init__(self, fn: Any) -> None:
        def model_in(value: Any) -> Any:
            return value if isinstance(value, sys.modules["torch"].nn.Module) else None

        models = _search(fn, model_in) if "torch" in sys.modules else ()
        self._models = [(name, model, _version(model)) for name, model in models]

    def changed(self) -> str | None:
        """Return, once, the variable (or class) of a model whose parameters were changed."""
        for name, model, version in self._models:
            if _version(model) != version:
                self._models = []
                return name or type(model).__name__
        return None


def _version(model: Any) -> int:
    """Return a number that grows when the parameters change."""
    try:
        # a fused optimizer does not count versions, but leaves gradients
        return sum(
            parameter._version + (parameter.grad is not None) for parameter in model.parameters()
        )
    except Exception:  # tensors that were made in inference mode have no version
        return 0


def _search(fn: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Yield what `pick` returns for values that a function captures, with their variables."""
    # by id; a value in here stays alive, so that no other gets its id
    seen: dict[int, Any] = {}
    left = deque([("", fn)])
    while left and len(seen) < MOST_VALUES:
        name, value = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        try:
            picked = pick(value)
            parts = [] if picked is not None else list(_parts(value, pick))
        except Exception:  # a proxy of something that is not there yet, say
            continue
        left.extend((inner or name, part) for inner, part in parts)
        if picked is not None:
            yield name, picked


def _generator_in(value: Any) -> Any:
    """Return the generator that a value is, if it is one; of NumPy's, the bit generator."""
    if isinstance(value, random.Random):
        # the system's has no seed
        return None if isinstance(value, random.SystemRandom) else value
    numpys = _numpys_random()
    if numpys is not None:
        if isinstance(value, numpys.Generator):
            return value.bit_generator
        if isinstance(value, (numpys.RandomState, numpys.BitGenerator)):
            return value
    return value if _is_torchs(value) else None


def _parts(value: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, with the names of variables."""
    for kind, attributes in INSIDE:
        if isinstance(value, kind):
            yield from (("", getattr(value, attribute)) for attribute in attributes)
            return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"argument {number}", part) for number, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        yield from (("", part) for part in parts if len(value) <= MOST_ENTRIES)
    elif isinstance(value, type):
        kinds = value.__mro__ if is_users(value.__module__) else ()
        yield from (
            entry for kind in kinds if is_users(kind.__module__) for entry in vars(kind).items()
        )
    elif not isinstance(value, types.ModuleType):
        yield from _parts_of_object(value, pick)


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield "", vars(fn).get("__wrapped__")
    yield from zip(
        reversed(fn.__code__.co_varnames[: fn.__code__.co_argcount]),
        reversed(fn.__defaults__ or ()),
        strict=False,
    )
    yield from (fn.__kwdefaults__ or {}).items()
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    if not is_users(fn.__module__):
        return
    for first, *others in variables_of(fn.__code__):
        value: Any = fn.__globals__.get(first)
        is_in_module = bool(others) and isinstance(value, types.ModuleType)
        for name in others:
            value = vars(value).get(name) if isinstance(value, types.ModuleType) else value
        yield others[-1] if is_in_module else first, value


def _parts_of_object(value: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    kind, own = type(value), getattr(value, "__dict__", {})
    if is_users(kind.__module__):
        slots = [
            name
            for base in kind.__mro__
            for name in getattr(base, "__slots__", ())
            if isinstance(name, str)
        ]
        yield from own.items()
        yield from ((name, getattr(value, name, None)) for name in slots)
        yield "", kind
    else:  # of a library's object only what is searched for, in its own attributes
        yield from (
            (name, part)
            for name, part in own.items()
            if pick(part) is not None or name == "__wrapped__"
        )


@functools.lru_cache(1024)
def variables_of(code: types.CodeType) -> Sequence[tuple[str, ...]]:
    """Return the global variables that code reads, each with the attributes read of it."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            found.pop(chain, None)
            chain = (*chain, step.argval)
        elif step.opname != "EXTENDED_ARG":
            chain = ()
        if chain:
            found[chain] = None
    for constant in code.co_consts:  # functions in it
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(variables_of(constant)))
    return tuple(found)


def changed_model(name: str, model: str) -> str:
    """Return the warning about a function that has changed a model that it captures."""
    return (
        f"{name} has changed {model}, a model that it captures. Each worker has its own copy: the"
        " model in this process is unchanged, and an item sees the changes of earlier items on its"
        " worker. Make the model in the function, or return it (or its state_dict())."
    )
