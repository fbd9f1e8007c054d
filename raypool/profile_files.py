"""Profiles by name: the built-in ones, and those in raypool.toml or pyproject.toml.

::

    # raypool.toml; in pyproject.toml its tables are [tool.raypool] and [tool.raypool.profiles.lab]
    default = "lab"

    [profiles.lab]
    address = "10.0.0.7:6379"
    resources = {gpus = 0.5}
    setup = "mylab.workers:load_cache"

    [profiles.hpc]
    kind = "slurm"
    partition = "gpu"
    gpus_per_node = 4

    [profiles.my-cluster]
    address = "ray://127.0.0.1:10001"
    token_file = "~/.ray/auth_token"
    working_dir = "."

Paths of a profile in a file are relative to the folder of that file.
"""

from __future__ import annotations

import functools
import operator
import os
import stat
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    RaypoolError,
    did_you_mean,
    read_text,
)
from raypool.profiles import Profile, Slurm, Tls, WorkerResources

BUILT_IN = {
    "local": Profile(),
    "threads": Profile(backend="threads"),
    "inline": Profile(backend="inline"),
}

T = TypeVar("T")

Keys = tuple[str | int, ...]
"""The path of an entry in a file: names in tables, numbers in lists."""

FILES: dict[str, Keys] = {"raypool.toml": (), "pyproject.toml": ("tool", "raypool")}
"""The files that may have profiles, the one that counts first, and the table around them."""


SETTINGS = ("default", "profiles")


def resolve_profile(profile: str | Profile | None, changes: Mapping[str, Any]) -> Profile:
    """Return the profile of this name with single fields replaced; None: the default profile.

    Raises:
        InvalidValueError: There is no such profile, or its file is wrong.
        InvalidTypeError: There is no such field, or one has the wrong type.

    Example:
        >>> resolve_profile("threads", {"retries": 0}).retries
        0
    """
    if profile is None:
        profile = default_profile()
    elif isinstance(profile, str):
        profile = named_profile(profile)
    if not isinstance(profile, Profile):
        raise InvalidTypeError(f"profile must be a name or a Profile, not {profile!r}.")
    known = [entry.name for entry in fields(Profile)]
    for name in changes:
        if name not in known:
            hint = did_you_mean(name, ["num_workers", *known])
            raise InvalidTypeError(f"parpool() has no argument {name!r}.{hint}")
    return replace(profile, **changes)


def default_profile() -> Profile:
    """Return the profile that the nearest file calls its default, or "local".

    Raises:
        InvalidValueError: A file on the way cannot be read, so its default is unknown; or there is
            no such profile.
        InvalidTypeError: The default is not a name, or a field of its profile has the wrong type.
    """
    file = nearest_file()
    if file is None or file.default is None:
        return BUILT_IN["local"]
    keys = (*file.within, "default")
    status = file.path.stat()
    # nobody has asked for this file: one that a stranger left above the folder must not decide on
    # which cluster work runs, and which function it begins with
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
        file.refuse(
            InvalidValueError,
            keys,
            "the file belongs to another user, or others can write to it, so it cannot set the"
            ' default profile. Pass one, such as parpool(profile="local").',
        )
    if not isinstance(file.default, str):
        file.refuse(
            InvalidTypeError, keys, f"default={file.default!r} is not the name of a profile."
        )
    try:
        return named_profile(file.default)
    except InvalidValueError as error:
        if file.default in file.profiles:
            raise  # of one of its fields
        file.refuse(InvalidValueError, keys, str(error))


def named_profile(name: str) -> Profile:
    """Return the profile of this name: a built-in one, or one of the nearest file.

    Raises:
        InvalidValueError: There is none, or its file is wrong.
        InvalidTypeError: A field in the file has the wrong type.
    """
    try:
        file = nearest_file()
    except RaypoolError:
        if name not in BUILT_IN:
            raise
        file = None  # somebody's broken file is no reason to refuse what needs no file
    if file is not None and name in file.profiles:
        return file.profile(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    names = [*BUILT_IN, *([] if file is None else file.profiles)]
    hint = did_you_mean(name, names)
    raise InvalidValueError(
        f"There is no profile {name!r}.{hint} To define one, add a table [profiles.NAME] to"
        f" {'raypool.toml in this folder or a parent' if file is None else file.path}."
    )


def nearest_file() -> ProfileFile | None:
    """Return the first file with profiles, from the working directory upwards, if there is one.

    Raises:
        InvalidValueError: A file on the way cannot be read, or has other entries than profiles.
        InvalidTypeError: Its profiles are not tables.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return None
    for folder in (here, *here.parents):
        for name, within in FILES.items():
            # `Path.is_file` raises if the folder may not be searched
            if os.path.isfile(folder / name):  # noqa: PTH113
                file = _read(folder / name, within)
                # a pyproject.toml may have none; one further up may
                if file.profiles or file.default is not None:
                    return file
    return None


def _read(path: Path, within: Keys) -> ProfileFile:
    import tomllib  # in functions: most processes read no file

    text = read_text(path, InvalidValueError)
    try:
        content: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"{path} is not valid TOML: {error}.") from None
    for key in within:  # a pyproject.toml may have anything there, for other tools
        content = content.get(key, {}) if isinstance(content, dict) else {}
    given = content if isinstance(content, dict) else {}
    file = ProfileFile(path, text, within, given.get("profiles", {}), given.get("default"))
    file.check(content)
    return file


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file that may have profiles: tables by name, within the table `within`."""

    path: Path
    text: str
    within: Keys
    profiles: Mapping[str, Any]
    default: Any

    def check(self, content: Mapping[str, Any]) -> None:
        """Make sure that there is no unknown setting, and that each profile is a table."""
        if not isinstance(content, Mapping):
            self.refuse(InvalidTypeError, self.within, f"{self.within[-1]} is not a table.")
        for key in content:
            if key not in SETTINGS:
                self.refuse(
                    InvalidValueError,
                    (*self.within, key),
                    f"there is no setting {key!r}.{did_you_mean(key, SETTINGS)}",
                )
        if not isinstance(self.profiles, dict):
            self.refuse(
                InvalidTypeError, (*self.within, "profiles"), "profiles is not a table of profiles."
            )
        for name, table in self.profiles.items():
            keys = (*self.within, "profiles", name)
            if not isinstance(table, dict):
                self.refuse(InvalidTypeError, keys, f"profile {name!r} is not a table.")

    def profile(self, name: str) -> Profile:
        """Return a profile of this file.

        Raises:
            InvalidValueError: Its name is that of a built-in one; or a field is unknown, or has an
                invalid value.
            InvalidTypeError: A field has the wrong type.
        """
        keys = (*self.within, "profiles", name)
        # here, not in `check`: the other profiles of the file can be used
        if name in BUILT_IN:
            self.refuse(
                InvalidValueError,
                keys,
                f"the profile {name!r} is built in. Use another name.",
            )
        table = dict(self.profiles[name])
        kind = table.pop("kind", None)
        if kind is None:
            return self._made(Profile, table, keys, "a profile")
        if kind != "slurm":
            self.refuse(
                InvalidValueError,
                (*keys, "kind"),
                f'there is no kind of profile {kind!r}. Leave it out, or write kind = "slurm".',
            )
        names = [entry.name for entry in fields(Slurm)]
        asked = {key: table.pop(key) for key in names if key in table}
        slurm = self._made(Slurm, asked, keys, "slurm")
        return replace(self._made(Profile, table, keys, "a profile of Slurm"), slurm=slurm)

    def _made(self, cls: type[T], table: Mapping[str, Any], keys: Keys, what: str) -> T:
        """Make an object from a table."""
        own = fields(cls)  # type: ignore[arg-type]
        known = [each.name for each in own]
        required = [each.name for each in own if each.default is each.default_factory is MISSING]
        values: dict[str, Any] = {}
        for key, entry in table.items():
            at = (*keys, key)
            if key not in known:
                others = [entry.name for entry in fields(Slurm)] if "Slurm" in what else []
                hint = did_you_mean(key, [*known, *others])
                self.refuse(InvalidValueError, at, f"{what} has no field {key!r}.{hint}")
            values[key] = self._value(key, entry, at)
            # by itself: an error has its line then
            self._try(cls, {**dict.fromkeys(required, ""), key: values[key]}, at)
        if missing := [name for name in required if name not in values]:
            self.refuse(InvalidValueError, keys, f"{what} lacks {' and '.join(missing)}.")
        return self._try(cls, values, keys)

    def _try(self, cls: type[T], values: Mapping[str, Any], keys: Keys) -> T:
        try:
            return cls(**values)
        except (InvalidValueError, InvalidTypeError) as error:
            self.refuse(type(error), keys, str(error))

    def _value(self, key: str, entry: Any, keys: Keys) -> Any:
        """Return the value of an entry."""
        if key == "env" and isinstance(entry, dict):  # each by itself, as in `_made`
            for name, text in entry.items():
                self._try(Profile, {key: {name: text}}, (*keys, name))
        if key == "resources":
            if isinstance(entry, dict):
                return self._made(WorkerResources, entry, keys, "resources")
            if isinstance(entry, list) and all(isinstance(each, dict) for each in entry):
                return [
                    self._made(WorkerResources, each, (*keys, number), "resources")
                    for number, each in enumerate(entry)
                ]
            self.refuse(
                InvalidTypeError, keys, f"resources={entry!r} is not a table, nor a list of tables."
            )
        if key == "tls":
            if isinstance(entry, dict):
                return self._made(Tls, entry, keys, "tls")
            names = ", ".join(field.name for field in fields(Tls))
            self.refuse(InvalidTypeError, keys, f"tls={entry!r} is not a table with {names}.")
        paths = ("token_file", "working_dir", "folder", "trace", "certificate", "key", "authority")
        if key in paths and isinstance(entry, str):
            # an absolute path stays itself
            return str(self.path.parent / Path(entry).expanduser())
        return self._function(key, entry, keys) if key in ("setup", "teardown") else entry

    def _function(self, key: str, entry: Any, keys: Keys) -> Any:
        if not isinstance(entry, str) or ":" not in entry:
            self.refuse(
                InvalidTypeError,
                keys,
                f'{key}={entry!r} names no function. Write "module:function".',
            )
        import pkgutil

        try:
            return pkgutil.resolve_name(entry)
        except Exception as error:  # it imports a module of the user's
            self.refuse(
                InvalidValueError,
                keys,
                f"{key}={entry!r} could not be imported: {type(error).__name__}: {error}. It must"
                " be importable here and on the workers.",
                error,
            )

    def refuse(
        self, kind: type[RaypoolError], keys: Keys, text: str, cause: Exception | None = None
    ) -> NoReturn:
        """Raise an error that names the line of an entry."""
        raise kind(f"{self.path}, line {line_of(self.text, keys)}: {text}") from cause


def line_of(text: str, keys: Keys) -> int:
    r"""Return the line, from 1, in which the entry at `keys` of a TOML text begins.

    Example:
        >>> line_of("[a]\nb = 1\nc = [\n  2,\n]\n", ("a", "c"))
        3
    """
    import tomllib

    # The parser does not tell lines. But the text up to the end of a statement is valid by itself,
    # and the first such piece that has the entry ends with the statement that made it.
    lines = text.split("\n")
    begin = 1
    for number in range(1, len(lines) + 1):
        try:
            content: Any = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a statement
        try:
            functools.reduce(operator.getitem, keys, content)
        except (KeyError, IndexError, TypeError):
            begin = number + 1
        else:
            return begin
    return len(lines)
