"""What a shell command sets before it starts Ray."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
KEYWORDS = ("then", "do", "else", "{", "!", "exec", "env", "command")
"""What may stand before a command, which then is one all the same."""


def starts_of_ray(command: str) -> list[dict[str, str]]:
    """Return, for each `ray start` in a command, the environment variables that it gets from what stands before it there.

    Each of a launcher's commands is run by a shell of its own, so another one sets nothing for it.

    Raises:
        ValueError: A quotation is not closed.

    Example:
        >>> starts_of_ray("export A=1 B=2; export A=3; C=4; D=5 ray start --head")
        [{'A': '3', 'B': '2', 'D': '5'}]
        >>> starts_of_ray("ray start; export A=1")
        [{}]
        >>> starts_of_ray("ray stop")
        []
    """
    return list(_starts(command, {}, set()))


def starts_in(commands: Iterable[str]) -> list[dict[str, str]]:
    """Return the same of several commands; those that no shell can read are passed over."""
    starts = []
    for command in commands:
        with contextlib.suppress(ValueError):
            starts += starts_of_ray(command)
    return starts


def _starts(command: str, values: dict[str, str], exported: set[str]) -> Iterator[dict[str, str]]:
    for words in _simple_commands(command):
        own, rest = _assignments(words)
        if not rest:
            values |= own
        elif rest[0] == "export":
            given, names = _assignments(rest[1:])
            values |= given
            exported |= {*given, *names}
        elif rest[0] == "unset":
            exported -= set(rest[1:])
        else:
            given = {name: values[name] for name in sorted(exported) if name in values} | own
            yield from _starts_in(rest, given)


def _starts_in(words: list[str], given: dict[str, str]) -> Iterator[dict[str, str]]:
    """Give the starts of Ray in a simple command: also in `nohup ray start`, and in `bash -c "ray start"`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.rpartition("/")[2] == "ray" and following == "start":
            yield given
        elif re.search(r"\bray\s+start\b", word):
            yield from _starts(word, dict(given), set(given))


def _assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that words begin with, and the words after them."""
    values: dict[str, str] = {}
    for number, word in enumerate(words):
        assignment = ASSIGNMENT.fullmatch(word)
        if assignment:
            values[assignment[1]] = assignment[2]
        elif word not in KEYWORDS:
            return values, words[number:]
    return values, []


def _simple_commands(command: str) -> Iterator[list[str]]:
    """Give the simple commands that a command is made of, as words."""
    lexer = shlex.shlex(command.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";&|()"):
            yield words
            words = []
        else:
            words.append(word)
    yield words
