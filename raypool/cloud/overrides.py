"""Entries of a file that options of the command line say otherwise: these win, and errors name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypool.cloud.documents import Document, Keys, documents_of


@dataclass(frozen=True)
class Overridden(Document):
    """A document of which single entries were said otherwise, by options of the command line: these win.

    Attributes:
        options: The ways to these entries, with the options that gave them.
    """

    options: Mapping[Keys, str] = field(default_factory=dict)

    def place_of(self, keys: Keys) -> str:
        """Return where an entry was said: the option, or the line of the file; "the command line" if there is no file."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.options:
                return self.options[keys[:length]]
        return super().place_of(keys) if self.name else "The command line"


def overridden(document: Document | None, options: Mapping[str, tuple[Keys, Any]]) -> Overridden:
    """Return a document with some of its entries replaced.

    Args:
        document: The file's; None: there is none, and options say everything.
        options: The options that were given, each with the way to its entry and the value.

    Example:
        >>> [document] = documents_of("trainingInput: {scaleTier: CUSTOM, workerCount: 9}", "config.yaml")
        >>> changed = overridden(document, {"--worker-count": (("trainingInput", "workerCount"), -1)})
        >>> changed.content["trainingInput"]
        {'scaleTier': 'CUSTOM', 'workerCount': -1}
        >>> changed.place_of(("trainingInput", "workerCount")), changed.place_of(("trainingInput", "scaleTier"))
        ('--worker-count', 'config.yaml, line 1')
    """
    if document is None:
        [document] = documents_of("{}", "")
    content = document.content
    for keys, value in options.values():
        content = _replaced(content, keys, value)
    return Overridden(document.name, content, document.node, {keys: option for option, (keys, _) in options.items()})


def _replaced(content: Any, keys: Keys, value: Any) -> Any:
    """Return `content` with one entry replaced, and its own mappings as they were; what is no mapping is for `check` to tell."""
    if not keys:
        return value
    if not isinstance(content, dict) and content is not None:
        return content
    inner = {} if content is None else content
    return {**inner, keys[0]: _replaced(inner.get(keys[0]), keys[1:], value)}
