"""YAML files with the line of each entry, and `Findings`: the mistakes and warnings of a check."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from jsonschema.protocols import Validator

from raypool.errors import CloudError, did_you_mean, read_text

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with it

Keys = tuple[str | int, ...]
"""The path to an entry: names in mappings, numbers in lists."""

PLACEHOLDER = "<"  # begins an entry to fill in: "<your project>"
WITHIN = re.compile(r"<(your|address of) [^<>]*>")  # a placeholder within a command
OPEN = "must be filled in."  # ends the messages about placeholders
NO_CLIENT = "{} is not installed here, so the names of settings were not checked."


@dataclass(frozen=True)
class Document:
    """One document of a YAML file."""

    name: str  # the file's name in messages; "" for none
    content: Any  # the document as plain values
    # The document as PyYAML's nodes, which have positions.
    node: yaml.Node = field(repr=False, compare=False)
    # Entries that options of the command line replaced, and these options.
    options: Mapping[Keys, str] = field(default_factory=dict)

    def line_of(self, keys: Keys) -> int:
        """Return the line, from 1, of the entry at `keys`, or of the nearest one above it."""
        node, line = self.node, self.node.start_mark.line
        for key in keys:
            entries = []
            if isinstance(node, yaml.MappingNode):
                entries = [entry for entry in node.value if entry[0].value == str(key)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
                entries = [(value, value) for value in node.value[key : key + 1]]
            if not entries:
                break
            line, node = entries[0][0].start_mark.line, entries[0][1]
        return line + 1

    def place_of(self, keys: Keys) -> str:
        """Return the place of the entry at `keys`: "cluster.yaml, line 3", or an option."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.options:
                return self.options[keys[:length]]
        return f"{self.name}, line {self.line_of(keys)}" if self.name else "The command line"


def read_documents(path: str | Path) -> list[Document]:
    """Return the documents of a file, as `documents_of` does."""
    return documents_of(read_text(Path(path), CloudError), str(path))


def launcher_document(documents: Sequence[Document], name: str | Path) -> Document:
    """Return the one document of a file for Ray's launcher, or raise a CloudError."""
    content = documents[0].content if len(documents) == 1 else None
    if not isinstance(content, dict) or not isinstance(content.get("provider"), dict):
        is_manifest = isinstance(content, dict) and "kind" in content
        hint = " `kubectl apply` starts a cluster on Kubernetes." if is_manifest else ""
        raise CloudError(f"{name} is not a file for Ray's launcher: it has no provider.{hint}")
    return documents[0]


def documents_of(text: str, name: str, kind: Any = Loader) -> list[Document]:
    r"""Return the documents of a YAML text, which errors call `name`.

    `kind` is the class of the loader, which decides what is a number.

    Raises:
        CloudError: It is not YAML, or a mapping has a key twice or a key that is not a string.

    Example:
        >>> [document] = documents_of("a:\n  b: 1\n", "some.yaml")
        >>> document.content, document.line_of(("a", "b"))
        ({'a': {'b': 1}}, 2)
    """
    if strange := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, strange.start()) + 1
        raise CloudError(
            f"{name}, line {line}: this is not valid YAML: the character {strange[0]!r} is not"
            " allowed."
        )
    loader = kind(text)
    documents = []
    try:
        while loader.check_node():
            node = cast("yaml.Node", loader.get_node())
            _check_keys(node, name)
            documents.append(Document(name, loader.construct_document(node), node))
    except yaml.MarkedYAMLError as error:
        at = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise CloudError(f"{name}{at}: this is not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CloudError(f"{name} is not valid YAML: {error}.") from None
    except RecursionError:
        raise CloudError(
            f"{name}: entries are nested too deep, or an entry contains itself (by an alias)."
        ) from None
    finally:
        loader.dispose()
    return documents


def _check_keys(node: yaml.Node, name: str) -> None:
    # YAML takes the last of two equal keys, and reads `on:` as true.
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            raise CloudError(
                f"{name}, line {line}: YAML does not read the name {key.value!r} as text. Put it"
                " in quotes."
            )
        if key.value in lines and key.value != "<<":  # several mappings may be merged
            raise CloudError(
                f"{name}, line {line}: {key.value!r} appears twice (first in line"
                f" {lines[key.value]}). Keep one of them."
            )
        lines[key.value] = line
    values = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in pairs]
    for value in values:
        _check_keys(value, name)


class Problem(NamedTuple):
    """A mistake in the entry at `keys`, with its correction."""

    keys: Keys
    text: str


class Findings:
    """The mistakes and doubts that a check finds in a document.

    A mistake cannot work; all are raised together. A doubt is a warning.

    Args:
        document: The document.
        trusts: Whether to leave out warnings about machines, GPUs and zones that the dated
            catalogues lack.
    """

    def __init__(self, document: Document, trusts: bool = False) -> None:
        self.document = document
        self._trusts = trusts
        self._keys: Keys = ()
        self.problems: list[Problem] = []
        self.doubts: list[Problem] = []

    def within(self, *keys: str | int) -> Findings:
        """Return the same findings for the entry at `keys`, from which all keys then count."""
        inner = copy.copy(self)  # with the same lists
        inner._keys = (*self._keys, *keys)
        return inner

    def whole(self) -> Findings:
        """Return the same findings for the whole document."""
        outer = copy.copy(self)
        outer._keys = ()
        return outer

    def add(self, text: str, *keys: str | int) -> None:
        """Note a mistake in the entry at `keys`, with a correction."""
        problem = Problem((*self._keys, *keys), text)
        if problem not in self.problems:  # two schemas may say the same
            self.problems.append(problem)

    def doubt(self, text: str, *keys: str | int) -> None:
        """Note a possible mistake in the entry at `keys`."""
        self.doubts.append(Problem((*self._keys, *keys), text))

    def unlisted(self, text: str, *keys: str | int) -> None:
        """Note an entry that a dated catalogue lacks: it may be newer."""
        if not self._trusts:
            self.doubt(text, *keys)

    def check_filled_in(self) -> None:
        """Note each placeholder."""
        for keys, text in texts(self.document.content):
            names = {found[0] for found in WITHIN.finditer(text)}
            for name in {text} if text.startswith(PLACEHOLDER) else names:
                self.add(f"{name} {OPEN}", *keys)

    def check_schema(self, schema: Validator) -> None:
        """Note where the entry violates a JSON schema.

        The keyword "must" of a schema has the rule in words: "be a whole number".
        """
        for error in schema.iter_errors(self.at()):
            at = tuple(error.absolute_path)
            names = [key for key in (*self._keys, *at) if isinstance(key, str)]
            name = names[-1] if names else "the file"
            rule = cast("dict[str, Any]", error.schema)
            if error.validator == "additionalProperties":
                known = rule.get("properties", {})
                for key in cast("dict[str, Any]", error.instance).keys() - known.keys():
                    self.add(f"there is no setting {key!r}{nearest(str(key), known)}", *at, key)
            elif error.validator == "enum":
                near = nearest(str(error.instance), map(str, cast("Any", error.validator_value)))
                self.add(f"{name} is {error.instance!r}{near}", *at)
            elif error.validator == "required":
                missing = error.message.split("'")[1]
                must = rule.get("properties", {}).get(missing, {}).get("must")
                end = f"; it must {must}." if must else "."
                self.add(f"{missing} is missing in {name}{end}", *at)
            elif "must" in rule:
                self.add(f"{name} is {error.instance!r}; it must {rule['must']}.", *at)
            else:
                self.add(f"{name}: {error.message}.", *at)

    def at(self, *keys: str | int) -> Any:
        """Return the entry at `keys`, None if there is none."""
        content = self.document.content
        for key in (*self._keys, *keys):
            try:
                content = content[key]
            except (KeyError, IndexError, TypeError):  # a user's file has any type anywhere
                return None
        return content

    def finish(self) -> tuple[str, ...]:
        """Return the doubts, in the order of lines.

        Raises:
            CloudError: There are mistakes: one per line of the message, and in `.problems` (`keys`,
                `text`). `.warnings` has the doubts.
        """
        for found in (self.problems, self.doubts):
            found.sort(key=lambda problem: self.document.line_of(problem.keys))
        told, warnings = (
            tuple(f"{self.document.place_of(each.keys)}: {each.text}" for each in found)
            for found in (self.problems, self.doubts)
        )
        if self.problems:
            raise CloudError("\n".join(told), problems=tuple(self.problems), warnings=warnings)
        return warnings


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence, with similar names.

    Example:
        >>> nearest("max_worker", ["max_workers", "provider"])
        '. Did you mean max_workers?'
        >>> nearest("zone", ["a", "b"])
        '. Choose from: a, b.'
    """
    return f".{did_you_mean(name, known)}"


def form(pattern: str, must: str) -> dict[str, str]:
    """Return a JSON schema for texts of a form, and placeholders; `must` has the form in words."""
    return {"type": "string", "pattern": rf"^({pattern}\Z|{PLACEHOLDER})", "must": must}


def texts(content: Any, keys: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Yield every text in an entry, with the path to it.

    Example:
        >>> list(texts({"a": ["x", 1], "b": {"c": "y"}}))
        [(('a', 0), 'x'), (('b', 'c'), 'y')]
    """
    if isinstance(content, str):
        yield keys, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from texts(value, (*keys, key))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from texts(value, (*keys, number))
