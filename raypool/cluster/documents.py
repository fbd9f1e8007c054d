"""YAML files with the line of each entry, and `Findings`, the mistakes and warnings of a check."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from jsonschema.protocols import Validator

from raypool.errors import CloudError, did_you_mean

# the parser in C, if PyYAML was built with it
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Keys = tuple[str | int, ...]
"""The path to an entry: names in mappings, numbers in lists."""

PLACEHOLDER = "<"
"""The beginning of a placeholder: "<your project>"."""

WITHIN = re.compile(r"<(your|address of) [^<>]*>")
"""A placeholder within a text, such as a command."""

DEEPEST = 100  # levels of entries in each other

OPEN = "is still to be filled in."
"""The end of messages on placeholders."""


@dataclass(frozen=True)
class Document:
    """One document of a YAML file.

    Attributes:
        name: The file's name in messages.
        content: As plain values.
        node: The content as PyYAML's nodes, with positions.
    """

    name: str
    content: Any
    node: yaml.Node = field(repr=False, compare=False)

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
                break  # there is no such entry: the one above it is nearest
            line, node = entries[0][0].start_mark.line, entries[0][1]
        return line + 1

    def place_of(self, keys: Keys) -> str:
        """Return the place of the entry at `keys` for an error: "cluster.yaml, line 3"."""
        return f"{self.name}, line {self.line_of(keys)}"


def read_documents(path: str | Path) -> list[Document]:
    """Return the documents of a file, as `documents_of` does."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CloudError(f"{path} could not be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CloudError(f"{path} is not UTF-8: {error}.") from None
    return documents_of(text, str(path))


def documents_of(text: str, name: str) -> list[Document]:
    r"""Return the documents of a YAML text, which errors call `name`.

    Raises:
        CloudError: It is not YAML; a mapping has a key twice, or one that is no text; or an entry
            is part of itself.

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
            _check_keys(node, name, set())
            documents.append(Document(name, loader.construct_document(node), node))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise CloudError(f"{name}{line}: this is not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CloudError(f"{name} is not valid YAML: {error}.") from None
    except RecursionError:
        raise CloudError(f"{name}: entries are nested too deep.") from None
    finally:
        loader.dispose()
    return documents


def _check_keys(node: yaml.Node, name: str, above: set[int]) -> None:
    """Refuse what YAML accepts: duplicate keys, of which it takes the last, and the like."""

    def refuse(at: yaml.Node, text: str) -> None:
        raise CloudError(f"{name}, line {at.start_mark.line + 1}: {text}")

    if len(above) > DEEPEST:
        refuse(node, f"entries are nested too deep: more than {DEEPEST} in each other.")
    if id(node) in above:
        refuse(node, "what stands here is a part of itself, by an alias. Write it out.")
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                refuse(key, f"YAML reads the name {key.value!r} as no text. Put it in quotes.")
            if key.value in lines and key.value != "<<":  # a mapping may be merged from several
                refuse(
                    key,
                    f"{key.value!r} stands here for the second time (the first is in line"
                    f" {lines[key.value]}). Keep one of them.",
                )
            lines[key.value] = key.start_mark.line + 1
    for child in children:
        _check_keys(child, name, above | {id(node)})


@dataclass(frozen=True)
class Problem:
    """A mistake in an entry: the place, and the text with a correction."""

    keys: Keys
    text: str

    @property
    def is_open(self) -> bool:
        """Whether it is only a placeholder."""
        return self.text.endswith(OPEN)


class Findings:
    """The mistakes and doubts that a check finds in a document.

    All mistakes are raised together: what cannot work. Doubts are warnings.

    Args:
        document: The document.
        trusts: Whether machines, GPUs and zones that the dated catalogues lack are no doubt.

    Example:
        >>> [document] = documents_of("workers: -1", "some.yaml")
        >>> findings = Findings(document)
        >>> findings.add(("workers",), "workers is -1; 0 or more would do.")
        >>> findings.finish()
        Traceback (most recent call last):
        raypool.errors.CloudError: some.yaml, line 1: workers is -1; 0 or more would do.
    """

    def __init__(self, document: Document, trusts: bool = False) -> None:
        self.document = document
        self._trusts = trusts
        self.problems: list[Problem] = []
        self.doubts: list[Problem] = []

    def add(self, keys: Keys, text: str) -> None:
        """Note a mistake in an entry, with a correction."""
        if (problem := Problem(keys, text)) not in self.problems:  # two schemas may say the same
            self.problems.append(problem)

    def doubt(self, keys: Keys, text: str) -> None:
        """Note a possible mistake in an entry."""
        self.doubts.append(Problem(keys, text))

    def unlisted(self, keys: Keys, text: str) -> None:
        """Note an entry that a dated catalogue lacks: it may be newer."""
        if not self._trusts:
            self.doubt(keys, text)

    def check_keys(self, keys: Keys, known: Iterable[str]) -> None:
        """Note unknown names in the mapping at `keys`."""
        names = list(known)
        for key in self.at(keys) or ():
            if key not in names:
                self.add((*keys, key), f"there is no setting {key!r}{nearest(str(key), names)}")

    def check_filled_in(self) -> None:
        """Note each placeholder."""
        for keys, text in texts(self.document.content):
            names = {found[0] for found in WITHIN.finditer(text)}
            for name in {text} if text.startswith(PLACEHOLDER) else names:
                self.add(keys, f"{name} {OPEN}")

    def check_form(self, keys: Keys, form: str, text: str) -> None:
        """Note an entry that has not this form and is no placeholder; {} in `text` is the entry."""
        entry = self.at(keys)
        if not re.fullmatch(f"{form}|{PLACEHOLDER}.*", str(entry)):
            self.add(keys, text.format(repr(entry)))

    def check_schema(self, schema: Validator, keys: Keys = ()) -> None:
        """Note violations of a JSON schema in the entry at `keys`."""
        for error in schema.iter_errors(self.at(keys)):
            at = (*keys, *error.absolute_path)
            name = next((key for key in reversed(at) if isinstance(key, str)), "the file")
            allowed: Any = error.validator_value
            if error.validator == "additionalProperties":  # say which names there are
                self.check_keys(at, cast("dict[str, Any]", error.schema).get("properties", {}))
            elif error.validator == "enum":
                near = nearest(str(error.instance), map(str, allowed))
                self.add(at, f"{name} is {error.instance!r}{near}")
            else:
                self.add(at, f"{name}: {error.message}.")

    def at(self, keys: Keys) -> Any:
        """Return the entry at `keys`, None if there is none."""
        content = self.document.content
        for key in keys:
            try:
                content = content[key]
            except (KeyError, IndexError, TypeError):
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
        '. There are: a, b.'
    """
    return f".{did_you_mean(name, known)}"


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
