"""Closes a file for Ray's launcher that somebody else wrote: token, dashboard, health checks.

The text is edited at the places of its entries, so that comments and layout stay.
"""

from __future__ import annotations

import json
import re

import yaml

from raypool.cluster.documents import Document, documents_of
from raypool.cluster.launcher_file import (
    HEALTH_CHECKS,
    START,
    TOKEN,
    head_commands,
    worker_commands,
)
from raypool.cluster.on_prem import OLD_AUTOSCALER
from raypool.errors import CloudError


def hardened(text: str, name: str) -> str:
    r"""Return the text of a cluster's file that asks everybody for a token.

    Args:
        text: The file's.
        name: What errors call it.

    Raises:
        CloudError: It is not one file for Ray's launcher, or has no command that starts Ray.

    Example:
        >>> text = "provider: {type: aws}\nworker_start_ray_commands: [ray start --address=a]"
        >>> print(hardened(text, "cluster.yaml").splitlines()[1])
        worker_start_ray_commands: ["export RAY_AUTH_MODE=token; ray start --address=a"]
    """
    documents = documents_of(text, name)
    content = documents[0].content if documents else None
    if len(documents) != 1 or not isinstance(content, dict) or "provider" not in content:
        raise CloudError(f"{name} is no file for Ray's launcher: it says no provider.")
    [document] = documents
    edits = []
    for entry, is_head in (("head_start_ray_commands", True), ("worker_start_ray_commands", False)):
        node = _value(document, entry)
        if node is None:
            # without the watcher for preemption: these machines may have no raypool
            starts = head_commands() if is_head else worker_commands("")
            edits.append((len(text), len(text), yaml.safe_dump({entry: starts}, width=1000)))
            continue
        commands = node.value if isinstance(node, yaml.SequenceNode) else []
        starting = [each for each in commands if START in str(each.value)]
        if not starting:
            raise CloudError(f"{document.place_of((entry,))}: no command there starts Ray.")
        is_local = is_head and content["provider"].get("type") == "local"
        for each in starting:
            safe = _closed(each.value, is_head, is_local)
            if safe != each.value:
                # JSON's strings are YAML's
                edits.append((each.start_mark.index, each.end_mark.index, json.dumps(safe)))
    if TOKEN not in (content.get("file_mounts") or {}):
        edits.append(_mount(document, len(text)))
    for start, end, new in sorted(edits, reverse=True):
        # a block's end mark is that of the next entry
        gap = re.search(r"\s*\Z", text[start:end])
        end -= len(gap[0]) if gap and start < end else 0
        text = text[:start] + new + text[end:]
    return text


def _value(document: Document, entry: str) -> yaml.Node | None:
    """Return the node of an entry at the top, None without one."""
    pairs = document.node.value if isinstance(document.node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == entry), None)


def _closed(command: str, is_head: bool, is_local: bool) -> str:
    """Return a command that starts Ray with a token, and a head's dashboard on the loopback."""
    wanted = ["RAY_AUTH_MODE=token"]
    if is_head:
        wanted += [f"{name}={value}" for name, value in HEALTH_CHECKS.items()]
        command = re.sub(r"\s--dashboard-host[= ]\S+", "", command)
        command = re.sub(r"(--head\b)", r"\1 --dashboard-host=127.0.0.1", command, count=1)
    if is_local:
        wanted.append(OLD_AUTOSCALER)
    before, start, after = command.partition(START)
    before = re.sub(r"\bRAY_AUTH_MODE=(?!token\b)\S*", "RAY_AUTH_MODE=token", before)
    missing = [each for each in wanted if each.partition("=")[0] not in before]
    if "RAY_AUTH_MODE" in before and "export" not in before:
        missing.insert(0, wanted[0])
    export = f"export {' '.join(missing)}; " if missing else ""
    return f"{before}{export}{start}{after}"


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
