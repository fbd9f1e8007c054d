"""Finds a function that the command line names: "module:function", or "file.py:function"."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError


def find_function(target: str) -> Callable[[Any], Any]:
    """Return the function of one argument that is named so.

    The module is looked for in this folder first, as by `python -m`. The file is imported under its own name, with its folder to
    find others in, as by `python file.py`; what stands under `if __name__ == "__main__":` does not run. Workers that start here
    find the same.

    Args:
        target: "module:function", "package.module:function" or "folder/file.py:function".

    Raises:
        InvalidValueError: It is not of that form; there is no such module, file or function, and names near it are said; or the
            module cannot be imported.
        InvalidTypeError: It is no function, or not one of one argument.

    Example:
        >>> find_function("os.path:basename")("runs/a")
        'a'
        >>> find_function("os.path:basenam")
        Traceback (most recent call last):
        raypool.errors.InvalidValueError: os.path has no function 'basenam'. Did you mean basename?
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidValueError(f"{target!r} does not say which function of which module. Write module:function, as train:main.")
    if not place.endswith(".py") and ("/" in place or not all(place.split("."))):
        near = f" Did you mean {place}.py:{name}?" if Path(f"{place}.py").is_file() else ""
        raise InvalidValueError(f"{place!r} is no name of a module, as package.train, and no file, as folder/train.py.{near}")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    function: Callable[[Any], Any] = _member(module, name, place)
    _check_call(function, target)
    return function


def _module(name: str) -> ModuleType:
    """Import a module by its name."""
    _look_in(Path.cwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        parent, _, last = error.name.rpartition(".")
        raise InvalidValueError(
            f"There is no module {error.name!r}, here in {Path.cwd()} or installed.{_near(last, _modules_of(parent))}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _broken(name, error) from error
    if "." not in name:
        _refuse_another(module, name, Path(f"{name}.py").resolve())
    return module


def _refuse_another(module: ModuleType, name: str, path: Path) -> None:
    """Make sure that a file of this folder is not passed over for a module that Python has imported already under its name."""
    if path.is_file() and _origin(module) not in (path, path.with_suffix("") / "__init__.py"):
        raise InvalidValueError(
            f"{name!r} is the name of {_origin(module) or 'a module of Python'}, which was imported first, and of {path}. "
            "Give the file another name."
        )


def _origin(module: ModuleType) -> Path | None:
    """Return the file that a module was read from, if it was read from one."""
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def _file(path: Path) -> ModuleType:
    """Import a file under its own name."""
    if not path.is_file():
        there = path.parent.glob("*.py") if path.parent.is_dir() else ()
        raise InvalidValueError(f"There is no file {str(path)!r}.{_near(path.name, [other.name for other in there])}")
    path = path.resolve()
    if "." in path.stem:
        raise InvalidValueError(
            f"{path.name!r} cannot be the name of a module: there is a dot in it. Give the file another name."
        )
    _look_in(path.parent)
    _let_workers_look_in(path.parent)
    try:
        module = importlib.import_module(path.stem)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _broken(path.name, error) from error
    other = _origin(module)
    if other != path:
        raise InvalidValueError(
            f"{path.name!r} cannot be imported: {path.stem!r} is also the name of {other or 'a module of Python'}. "
            "Give the file another name."
        )
    return module


def _look_in(folder: Path) -> None:
    """Let modules be found in a folder before all others."""
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def _let_workers_look_in(folder: Path) -> None:
    """Let the workers of a Ray that starts here find modules in a folder; in this one, where we are, they look anyway."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder != Path.cwd() and str(folder) not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, others)])


def _broken(name: str, error: BaseException) -> InvalidValueError:
    """Return what to say of a module that raises when it is imported; its own lines are what the user can mend."""
    foreign = (__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in foreign]
    where = f", in line {own[-1].lineno} of {own[-1].filename}" if own else ""
    hint = " Name it by its package instead: package.module:function." if "no known parent package" in str(error) else ""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return InvalidValueError(f"{name} cannot be imported: {said}{where}.{hint}")


def _member(module: ModuleType, name: str, place: str) -> Any:
    """Return what a module has under a name, which may have dots."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            there = getattr(value, "__dict__", {})  # a text or a number has none
            functions = [key for key, entry in there.items() if callable(entry) and not key.startswith("_")]
            raise InvalidValueError(f"{place} has no function {name!r}.{_near(part, functions)}")
        value = getattr(value, part)
    if not callable(value):
        raise InvalidTypeError(f"{place}:{name} is {value!r:.100}, and not a function, so that it cannot be called.")
    return value


def _check_call(function: Callable[..., Any], target: str) -> None:
    """Make sure that a function can be called with one argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return
    try:
        signature.bind({})
    except TypeError:
        raise InvalidTypeError(
            f"{target}{signature} cannot be called with one argument, the configuration, which is a dict. "
            "Write it as def train(config), and take what it needs from there: config['lr']."
        ) from None


def check_takes_whole(function: Callable[[Any], Any], configs: Iterable[Mapping[str, Any]]) -> None:
    """Make sure that a function does not want one value of a configuration where it gets the configuration.

    Raises:
        InvalidTypeError: Its parameter is called as such a value is.

    Example:
        >>> def train(lr, epochs=3): ...
        >>> check_takes_whole(train, [{"lr": 0.1, "epochs": 5}])
        Traceback (most recent call last):
        raypool.errors.InvalidTypeError: train(lr, epochs=3) would get the whole configuration, a dict, as lr, ...
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return
    first = next(iter(signature.parameters), None)
    if first != "config" and any(first in config for config in configs):
        name = getattr(function, "__name__", "train")
        raise InvalidTypeError(
            f"{name}{signature} would get the whole configuration, a dict, as {first}, which is a value in it. "
            f"Write it as def {name}(config), and take what it needs from there: config[{first!r}]."
        )


def _modules_of(package: str) -> list[str]:
    """Return the names of the modules in a package; of none, those that can be imported from here."""
    paths = getattr(sys.modules.get(package), "__path__", []) if package else None
    return [module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_")]


def _near(name: str, others: Iterable[str]) -> str:
    """Return what to say of names that are near a name; if none is, and there are few, of all."""
    known = sorted(set(others))
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" There are: {', '.join(known)}." if 0 < len(known) <= 10 else ""
