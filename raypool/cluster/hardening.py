"""Closes a file for Ray's launcher that somebody else wrote: token, dashboard, health checks.

The text is edited at the places of its entries, so that comments and layout stay.
"""

from __future__ import annotations

import re

import yaml

from raypool.cluster.documents import Document, documents_of, launcher_document
from raypool.cluster.launcher_file import (
    HEALTH_CHECKS,
    START,
    TOKEN,
    head_commands,
    worker_commands,
)
from raypool.cluster.on_prem import OLD_AUTOSCALER
from raypool.errors import CloudError

HOST = re.compile(r"""(--dashboard-host(?:=|\s+)\\?["']?)([^\s"'\\]+)""")
"""The option with the dashboard's address, in quotes or not, as the text of a file has it."""

PREFIX = r"([A-Za-z_]\w*=[^\s;&|]*\s+)*"
"""Variables that a shell's command sets for one program."""


def hardened(text: str, name: str) -> str:
    r"""Return the text of a cluster's file, which errors call `name`, with a token required.

    Raises:
        CloudError: It is not one file for Ray's launcher, or has no command that starts Ray.

    Example:
        >>> text = "provider: {type: aws}\nworker_start_ray_commands: [ray start --address=a]"
        >>> print(hardened(text, "cluster.yaml").splitlines()[1])
        worker_start_ray_commands: [export RAY_AUTH_MODE=token; ray start --address=a]
    """
    if not text.endswith("\n"):
        text += "\n"  # entries are added at the end
    document = launcher_document(documents_of(text, name), name)
    content = document.content
    edits: dict[tuple[int, int], str] = {}  # by place: an alias stands for an earlier one
    missing = ""
    for entry, is_head in (("head_start_ray_commands", True), ("worker_start_ray_commands", False)):
        node = _value(document, entry)
        if node is None:
            # without the watcher for preemption: these machines may have no raypool
            starts = head_commands() if is_head else worker_commands("")
            missing += yaml.safe_dump({entry: starts}, width=1000)
            continue
        commands = node.value if isinstance(node, yaml.SequenceNode) else []
        spans = [(each.start_mark.index, each.end_mark.index) for each in commands]
        starting = [span for span in spans if _start_in(text[slice(*span)]) >= 0]
        if not starting:
            raise CloudError(f"{document.place_of((entry,))}: no command there starts Ray.")
        is_local = is_head and content["provider"].get("type") == "local"
        for span in starting:  # what is inserted needs no quotes
            edits.setdefault(span, _closed(text[slice(*span)], is_head, is_local))
    if TOKEN not in (content.get("file_mounts") or {}):
        start, end, new = _mount(document, len(text))
        edits[start, end] = new
    text += missing
    # from the end, so that the places of the other edits stay right
    for (start, end), new in sorted(edits.items(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _start_in(command: str) -> int:
    """Return where a shell's command starts Ray, comments aside; -1: nowhere."""
    return _blanked(command).find(START)


def _blanked(command: str) -> str:
    """Return a command with blanks in place of lines that are comments."""
    return re.sub(r"^[ \t]*#.*$", lambda found: " " * len(found[0]), command, flags=re.MULTILINE)


def _value(document: Document, entry: str) -> yaml.Node | None:
    """Return the node of a top-level entry, None without one."""
    pairs = document.node.value if isinstance(document.node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == entry), None)


def asks_for_token(command: str) -> bool:
    """Whether the Ray that a shell's command starts requires a token.

    Example:
        >>> asks_for_token("export RAY_AUTH_MODE=token; ray start --head")
        True
        >>> asks_for_token("RAY_AUTH_MODE=token; ray start --head")
        False
    """
    # Each command has its own shell: what another one sets does not count.
    before = re.split(r"\bunset\b[^;&|]*\bRAY_AUTH", _blanked(command).partition(START)[0])[-1]
    modes = re.findall(r"\bRAY_AUTH_MODE=[\"']?(\w*)", before)
    is_exported = re.search(
        rf"\bexport\s[^;&|\n]*RAY_AUTH_MODE|\bRAY_AUTH_MODE=[^\s;&|]+\s+{PREFIX}$", before
    )
    return modes[-1:] == ["token"] and is_exported is not None


def open_host(command: str) -> str | None:
    """Return the address at which a dashboard listens, None for the loopback (the default)."""
    hosts = [host for _, host in HOST.findall(_blanked(command))]
    return next((host for host in hosts if host not in ("127.0.0.1", "localhost")), None)


def _closed(command: str, is_head: bool, is_local: bool) -> str:
    """Return a command that starts Ray with a token, and a head's dashboard on the loopback."""
    wanted = [] if asks_for_token(command) else ["RAY_AUTH_MODE=token"]
    if open_host(command):
        command = HOST.sub(r"\g<1>127.0.0.1", command)
    at = _start_in(command)
    before, start, after = command[:at], START, command[at + len(START) :]
    if is_head:
        settings = [*HEALTH_CHECKS, *([OLD_AUTOSCALER] if is_local else [])]
        wanted += [each for each in settings if each.partition("=")[0] not in before]
    # Variables right before `ray start` are its own, and win over exported ones.
    prefix = re.search(f"{PREFIX}$", before)
    assert prefix is not None
    own = re.sub(r"\bRAY_AUTH_MODE=\S+", "RAY_AUTH_MODE=token", prefix[0])
    export = f"export {' '.join(wanted)}; " if wanted else ""
    return f"{before[: prefix.start()]}{export}{own}{start}{after}"


def _mount(document: Document, end: int) -> tuple[int, int, str]:
    """Return the edit that lets the launcher copy the token."""
    node = _value(document, "file_mounts")
    entry = f"{TOKEN}: {TOKEN}"
    if node is None:
        return end, end, f"\nfile_mounts:\n  {entry}\n"
    start = node.start_mark
    if not isinstance(node, yaml.MappingNode):  # empty
        return start.index, node.end_mark.index, f" {{{entry}}}"
    if node.flow_style:
        return start.index + 1, start.index + 1, f"{entry}{', ' if node.value else ''}"
    return start.index, start.index, f"{entry}\n{' ' * start.column}"
