"""Reads the inputs of commands: configurations (CSV, JSON lines, YAML), and functions by name."""

from __future__ import annotations

import csv
import functools
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from raypool.channel.users_code import importing
from raypool.errors import CloudError, InvalidTypeError, InvalidValueError, did_you_mean, read_text

Config = dict[str, Any]


def read_configs(path: Path) -> list[Config]:
    r"""Return the configurations in a file, each a dict.

    Of a CSV file, the first line names the columns, and each further line is a configuration. A
    column becomes numbers or booleans if all its cells can, else text; a number without a point or
    an exponent is an integer. An empty cell is None; a line with too few cells is an error. In JSON
    lines each line is an object. A YAML file is a list of mappings, with the numbers of YAML 1.2:
    1e-3 is one, 1:30 is text.

    Args:
        path: The file; its name ends in .csv, .jsonl, .yaml or .yml.

    Raises:
        InvalidValueError: It cannot be read, is empty, or has anything but configurations; the
            message has the line.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "configs.csv"
        >>> _ = file.write_text("network,width,lr\ncnn,8,1e-3\nmlp,32,\n")
        >>> read_configs(file)
        [{'network': 'cnn', 'width': 8, 'lr': 0.001}, {'network': 'mlp', 'width': 32, 'lr': None}]
    """
    parse = PARSERS.get(path.suffix.lower())
    if parse is None:
        raise InvalidValueError(
            f"{path} must end in {', '.join(PARSERS)}. Rename it to match its format."
        )
    configs = parse(read_text(path, InvalidValueError), str(path))
    if not configs:
        raise InvalidValueError(f"{path} contains no configurations.")
    return configs


# --- tables ---------------------------------------------------------------------------------------


def _from_csv(text: str, name: str) -> list[Config]:
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    header: list[str] = []
    rows = []
    try:
        for row in filter(None, reader):
            place = f"{name}, line {reader.line_num}"
            if not header:
                header = _checked_header([cell.strip() for cell in row], place)
            elif len(row) != len(header):
                missing = ", ".join(header[len(row) :])
                hint = "Put cells that contain a comma in quotation marks."
                if missing:
                    hint = f"An empty cell (None) needs its comma, too: {missing} is missing."
                raise InvalidValueError(
                    f"{place}: {len(row)} cells for {len(header)} columns. {hint}"
                )
            else:
                rows.append(row)
    except csv.Error as error:
        raise InvalidValueError(
            f"{name}, line {reader.line_num}: this is not valid CSV: {error}."
        ) from None
    columns = map(_typed, zip(*rows, strict=True))
    return [dict(zip(header, row, strict=True)) for row in zip(*columns, strict=True)]


BOOLEANS = {"true": True, "false": False}

INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # Python refuses to read longer ones
NUMBER = re.compile(
    r"[+-]?([0-9]{1,4000}(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE
)


def _typed(cells: Sequence[str]) -> list[Any]:
    """Return the cells of a column as booleans or numbers if all can be; None for empty ones."""
    plain = [cell.strip().lower() for cell in cells]
    filled = [cell for cell in plain if cell not in ("", "nan")]
    read: Callable[[str], Any] | None = None
    if all(cell in BOOLEANS for cell in filled):
        read = BOOLEANS.__getitem__
    elif all(map(NUMBER.fullmatch, filled)):
        # each by itself: a run that continues with more lines knows the others by their values
        read = _number
    return [
        None if key in ("", "nan") else cell if read is None else read(key)
        for cell, key in zip(cells, plain, strict=True)
    ]


def _number(cell: str) -> float:
    return int(cell) if INTEGER.fullmatch(cell) else float(cell)


def _checked_header(header: list[str], place: str) -> list[str]:
    if len(header) == 1 and (other := next((mark for mark in ";\t" if mark in header[0]), None)):
        raise InvalidValueError(
            f"{place}: the columns are separated by {other!r}. Separate them with commas."
        )
    for number, column in enumerate(header, 1):
        if not column:
            raise InvalidValueError(
                f"{place}: column {number} has no name. The first line must name all columns;"
                " pandas writes such a file with to_csv(path, index=False)."
            )
        if _is_number(column):
            raise InvalidValueError(
                f"{place}: {column!r} is not a column name. The first line must name the columns."
            )
    _refuse_twice(header, place)
    return header


def _refuse_twice(names: Iterable[Any], place: str) -> None:
    """Make sure that no name appears twice: the second would silently win."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidValueError(
                f"{place}: the name {name!r} appears twice. Use each name once."
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.lower().lstrip("+-") not in ("nan", "inf", "infinity")


# --- lists ----------------------------------------------------------------------------------------


def _from_json_lines(text: str, name: str) -> list[Config]:
    configs = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            config = json.loads(line, object_pairs_hook=functools.partial(_json_object, place))
        except InvalidValueError:
            raise
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(
                f"{place}: this is not valid JSON: {error}. Each line must be an object."
            ) from None
        if not isinstance(config, dict):
            raise InvalidValueError(
                f'{place}: {config!r:.100} is not an object, such as {{"lr": 0.1}}.'
            )
        configs.append(config)
    return configs


def _json_object(place: str, pairs: list[tuple[str, Any]]) -> Config:
    _refuse_twice((key for key, _ in pairs), place)
    return dict(pairs)


YAML_1_2 = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    "merge": "<<",
}
"""How values other than text are written; the first that fits counts. Source: YAML 1.2.2, 10.3.2,
the core schema; `<<` is from YAML 1.1. PyYAML follows YAML 1.1, in which 010 is 8, 1:30 is 90 and
off is false, but 1e-3 is text."""


def _from_yaml(text: str, name: str) -> list[Config]:
    from raypool.cluster.documents import documents_of

    try:
        documents = documents_of(text, name, _yaml_loader())
    except CloudError as error:
        raise InvalidValueError(str(error)) from None
    if len(documents) > 1:
        raise InvalidValueError(
            f"{name} has {len(documents)} YAML documents. Put all configurations into one list."
        )
    if not documents or documents[0].content is None:
        return []
    content = documents[0].content
    if not isinstance(content, list):
        raise InvalidValueError(
            f"{name} is a {type(content).__name__}, not a list. Begin each configuration with a"
            " dash."
        )
    for number, config in enumerate(content):
        if not isinstance(config, dict):
            line = documents[0].line_of((number,))
            raise InvalidValueError(
                f"{name}, line {line}: {config!r:.100} is not a mapping, such as lr: 0.1."
            )
    return content


def _yaml_loader() -> Any:
    """Return a loader with the numbers of YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {}  # none of PyYAML's
    for kind, pattern in YAML_1_2.items():
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z"), None
        )

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)

    def number(loader: Any, node: Any) -> float:
        return float(re.sub(r"(?i)\.(?=inf|nan)", "", loader.construct_scalar(node)))

    Loader.add_constructor("tag:yaml.org,2002:int", integer)
    Loader.add_constructor("tag:yaml.org,2002:float", number)
    return Loader


PARSERS: dict[str, Callable[[str, str], list[Config]]] = {
    ".csv": _from_csv,
    ".jsonl": _from_json_lines,
    ".yaml": _from_yaml,
    ".yml": _from_yaml,
}
"""How files are read, by how their names end."""


# --- functions by name: "module:function", or "file.py:function" ----------------------------------


def find_function(target: str) -> Callable[[Any], Any]:
    """Return the function of one argument with this name.

    The module is looked for in this folder first, as by `python -m`. The file is imported under its
    own name, with its folder on the import path, as by `python file.py`; code under `if __name__ ==
    "__main__":` does not run. Workers that start here find the same.

    Args:
        target: "module:function", "package.module:function" or "folder/file.py:function".

    Raises:
        InvalidValueError: It does not have that form; there is no such module, file or function
            (the message has similar names); or the module cannot be imported.
        InvalidTypeError: It is not a function of one argument.

    Example:
        >>> find_function("os.path:basename")("runs/a")
        'a'
        >>> find_function("os.path:basenam")
        Traceback (most recent call last):
        raypool.errors.InvalidValueError: os.path has no function 'basenam'. Did you mean basename?
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidValueError(
            f"{target!r} does not name a module and a function. Write module:function, such as"
            " train:main."
        )
    if not place.endswith(".py") and ("/" in place or not all(place.split("."))):
        near = f" Did you mean {place}.py:{name}?" if Path(f"{place}.py").is_file() else ""
        raise InvalidValueError(
            f"{place!r} is neither a module (package.train) nor a file (folder/train.py).{near}"
        )
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    function: Callable[[Any], Any] = _member(module, name, place)
    _check_call(function, target)
    return function


def _module(name: str) -> ModuleType:
    """Import a module by its name."""
    _look_in(Path.cwd())
    try:
        with importing(name):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        parent, _, last = error.name.rpartition(".")
        # without a package: all top-level modules
        paths = getattr(sys.modules.get(parent), "__path__", []) if parent else None
        known = [each.name for each in pkgutil.iter_modules(paths) if each.name[:1] != "_"]
        raise InvalidValueError(
            f"There is no module {error.name!r} in {Path.cwd()} or among the installed"
            f" ones.{did_you_mean(last, known)}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _broken(name, error) from error
    if "." not in name:
        path = Path(f"{name}.py").resolve()
        _refuse_another(module, path, path.with_suffix("") / "__init__.py")
    return module


def _refuse_another(module: ModuleType, path: Path, *also: Path) -> None:
    """Refuse a file if a module of its name was imported from elsewhere, but for `also`."""
    file = getattr(module, "__file__", None)
    origin = None if file is None else Path(file).resolve()
    if path.is_file() and origin not in (path, *also):
        raise InvalidValueError(
            f"{path.stem!r} is the name of {origin or 'a module of Python'}, which was imported"
            f" first, and of {path}. Rename the file."
        )


def _file(path: Path) -> ModuleType:
    """Import a file under its own name."""
    if not path.is_file():
        there = path.parent.glob("*.py") if path.parent.is_dir() else ()
        raise InvalidValueError(
            f"There is no file {str(path)!r}."
            f"{did_you_mean(path.name, sorted(other.name for other in there))}"
        )
    path = path.resolve()
    if "." in path.stem:
        raise InvalidValueError(
            f"{path.name!r} cannot be imported: a module name cannot contain a dot. Rename the"
            " file."
        )
    _look_in(path.parent)
    # Workers of a Ray started here search the current folder anyway, but not this one.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if path.parent != Path.cwd() and str(path.parent) not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(path.parent), *filter(None, others)])
    try:
        with importing(path.name):
            module = importlib.import_module(path.stem)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: a script may end while it is imported
        raise _broken(path.name, error) from error
    _refuse_another(module, path)
    return module


def _look_in(folder: Path) -> None:
    """Let modules be found in a folder before all others."""
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def _broken(name: str, error: BaseException) -> InvalidValueError:
    """Return the error for a module whose import fails, with the module's own lines."""
    foreign = (
        __file__,
        importlib.__file__,
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    )
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in foreign
    ]
    where = f", in line {own[-1].lineno} of {own[-1].filename}" if own else ""
    hint = (
        " Use its full name instead: package.module:function."
        if "no known parent package" in str(error)
        else ""
    )
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return InvalidValueError(f"{name} cannot be imported: {said}{where}.{hint}")


def _member(module: ModuleType, name: str, place: str) -> Any:
    """Return the attribute of a module with this name, which may have dots."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            there = getattr(value, "__dict__", {})  # a text or a number has none
            functions = [
                key for key, entry in there.items() if callable(entry) and not key.startswith("_")
            ]
            raise InvalidValueError(
                f"{place} has no function {name!r}.{did_you_mean(part, sorted(functions))}"
            )
        value = getattr(value, part)
    if not callable(value):
        raise InvalidTypeError(f"{place}:{name} is {value!r:.100}, which is not callable.")
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
            f"{target}{signature} cannot be called with one argument, the configuration (a dict)."
            " Write def train(config), and read values from it: config['lr']."
        ) from None


def check_takes_whole(function: Callable[[Any], Any], configs: Iterable[Mapping[str, Any]]) -> None:
    """Make sure that a function expects a whole configuration, not one of its values.

    Raises:
        InvalidTypeError: Its parameter has the name of such a value.

    Example:
        >>> def train(lr, epochs=3): ...
        >>> check_takes_whole(train, [{"lr": 0.1, "epochs": 5}])
        Traceback (most recent call last):
        raypool.errors.InvalidTypeError: train(lr, epochs=3) would get the whole configuration (...
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return
    first = next(iter(signature.parameters), None)
    if first != "config" and any(first in config for config in configs):
        name = getattr(function, "__name__", "train")
        raise InvalidTypeError(
            f"{name}{signature} would get the whole configuration (a dict) as {first}, which is"
            f" one of its values. Write def {name}(config), and read values from it:"
            f" config[{first!r}]."
        )
