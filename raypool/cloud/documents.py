"""YAML files whose entries know where they stand: what is wrong with one is said with its line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from raypool.errors import CloudError

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Keys = tuple[str | int, ...]
"""The way to an entry: names in mappings, numbers in lists."""

PLACEHOLDER = "<"
"""What begins so is still to be filled in: "<your project>"."""

MOST_ENTRIES = 100_000
DEEPEST = 100

OPEN = "is still to be filled in."
"""The end of what is said of it."""


@dataclass(frozen=True)
class Document:
    """One document of a YAML file.

    Attributes:
        name: What to call the file.
        content: What stands in it, as Python's plain values.
        node: The same with the places, as PyYAML has it.
    """

    name: str
    content: Any
    node: yaml.Node = field(repr=False, compare=False)

    def line_of(self, keys: Keys) -> int:
        """Return the line, from 1, of the entry at `keys`, or of what is nearest above it."""
        node, line = self.node, self.node.start_mark.line
        for key in keys:
            entry = _entry(node, key)
            if entry is None:
                break
            line, node = entry
        return line + 1

    def place_of(self, keys: Keys) -> str:
        """Return where the entry at `keys` stands, for an error to begin with: "cluster.yaml, line 3"."""
        return f"{self.name}, line {self.line_of(keys)}"


def _entry(node: yaml.Node, key: str | int) -> tuple[int, yaml.Node] | None:
    """Return the line, from 0, and the node of an entry, None if there is none."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value == str(key):
                return name.start_mark.line, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark.line, node.value[key]
    return None


def read_documents(path: str | Path) -> list[Document]:
    """Return the documents of a file.

    Raises:
        CloudError: It cannot be read, or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CloudError(f"{path} could not be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CloudError(f"{path} is not UTF-8: {error}.") from None
    return documents_of(text, str(path))


def documents_of(text: str, name: str) -> list[Document]:
    r"""Return the documents of a text.

    Args:
        text: YAML.
        name: What to call it in errors.

    Raises:
        CloudError: It is not YAML; a mapping has a key twice, of which YAML would take the last; an entry is part of itself; or
            there are more entries than anybody writes.

    Example:
        >>> [document] = documents_of("a:\n  b: 1\n", "some.yaml")
        >>> document.content, document.line_of(("a", "b"))
        ({'a': {'b': 1}}, 2)
    """
    loader = Loader(text)
    documents = []
    try:
        while loader.check_node():
            node = cast("yaml.Node", loader.get_node())
            _check_nodes(node, name)
            documents.append(Document(name, loader.construct_document(node), node))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise CloudError(f"{name}{line}: this is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CloudError(f"{name} is not YAML: {error}.") from None
    except RecursionError:
        raise CloudError(f"{name}: entries are nested too deep.") from None
    finally:
        loader.dispose()
    return documents


def _check_nodes(root: yaml.Node, name: str) -> None:
    """Refuse what YAML takes, and what cannot be meant: an alias may stand for an entry that is above it, or for very many."""
    waiting: list[tuple[yaml.Node, tuple[int, ...]]] = [(root, ())]
    count = 0
    while waiting:
        node, above = waiting.pop()
        line = node.start_mark.line + 1
        if id(node) in above:
            raise CloudError(f"{name}, line {line}: what stands here is a part of itself, by an alias. Write it out.")
        if len(above) > DEEPEST:
            raise CloudError(f"{name}, line {line}: entries are nested too deep: {DEEPEST} in each other.")
        count += 1
        if count > MOST_ENTRIES:
            raise CloudError(f"{name} has more than {MOST_ENTRIES} entries, aliases written out. No cluster needs so many.")
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node, name)
        waiting += [(child, (*above, id(node))) for child in _children(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse_twice(node: yaml.MappingNode, name: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in lines:
                first = lines[key.value] + 1
                text = f"{key.value!r} stands here for the second time (the first is in line {first}). Keep one of them."
                raise CloudError(f"{name}, line {key.start_mark.line + 1}: {text}")
            lines[key.value] = key.start_mark.line


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with an entry: where, what, and what would be right."""

    keys: Keys
    text: str

    @property
    def is_open(self) -> bool:
        """Whether it is only that something is still to be filled in."""
        return self.text.endswith(OPEN)


class Findings:
    """What is found to be wrong with a document; all of it is told at once.

    Example:
        >>> [document] = documents_of("workers: -1", "some.yaml")
        >>> findings = Findings(document)
        >>> findings.add(("workers",), "workers is -1; 0 or more would do.")
        >>> findings.refuse()
        Traceback (most recent call last):
        raypool.errors.CloudError: some.yaml, line 1: workers is -1; 0 or more would do.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._problems: list[Problem] = []

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)

    def add(self, keys: Keys, text: str) -> None:
        """Note what is wrong with an entry, and what would be right."""
        self._problems.append(Problem(keys, text))

    def check_keys(self, keys: Keys, known: Iterable[str]) -> None:
        """Note each entry of the mapping at `keys` whose name is not known."""
        names = list(known)
        for key in self.at(keys) or ():
            if key not in names:
                self.add((*keys, key), f"there is no setting {key!r}{nearest(str(key), names)}")

    def check_filled_in(self) -> None:
        """Note each entry that is still to be filled in."""
        for keys, text in texts(self._document.content):
            if text.startswith(PLACEHOLDER):
                self.add(keys, f"{text} {OPEN}")

    def at(self, keys: Keys) -> Any:
        """Return what stands there, None if nothing does."""
        content = self._document.content
        for key in keys:
            try:
                content = content[key]
            except (KeyError, IndexError, TypeError):
                return None
        return content

    def refuse(self) -> None:
        """Raise, if anything is wrong.

        Raises:
            CloudError: It says all that is; `.problems` has each with its place (`keys`, `text`).
        """
        if not self._problems:
            return
        ordered = sorted(self._problems, key=lambda problem: self._document.line_of(problem.keys))
        lines = [f"{self._document.place_of(each.keys)}: {each.text}" for each in ordered]
        raise CloudError("\n".join(lines), problems=tuple(ordered))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that says what else could have been meant.

    Example:
        >>> nearest("max_worker", ["max_workers", "provider"])
        '. Did you mean max_workers?'
        >>> nearest("zone", ["a", "b"])
        '. There are: a, b.'
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2)
    return f". Did you mean {' or '.join(near)}?" if near else f". There are: {', '.join(names)}."


def texts(content: Any, keys: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Give every text in an entry, with the way to it.

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
