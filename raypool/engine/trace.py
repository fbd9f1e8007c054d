"""Traces: the scheduler's events as JSON lines, which `raypool.testing.replay` runs again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.errors import LossReason

EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(m.Event)}


class TraceWriter:
    """Appends events to a file, one line each, flushed, after a line with the settings."""

    def __init__(self, path: str | PathLike[str], **settings: float | None) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed with the pool
        self._file.write(json.dumps({"settings": settings}) + "\n")
        self._file.flush()

    def __call__(self, now: float, event: m.Event) -> None:
        """Write one event."""
        self._file.write(encode(now, event) + "\n")
        self._file.flush()  # at once: the next thing may be a crash, which it is to explain

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def encode(now: float, event: m.Event) -> str:
    """Return an event and its time as one line of JSON."""
    return json.dumps({"now": now, "event": type(event).__name__, **_plain(event)})


def decode(line: str) -> tuple[float, m.Event]:
    """Return the time and the event of a line.

    Example:
        >>> decode(encode(1.5, m.WorkerLost(3, LossReason.NODE)))
        (1.5, WorkerLost(worker_id=3, reason=<LossReason.NODE: 'node lost'>, was_idle=False))
    """
    fields = json.loads(line)
    now, kind = fields.pop("now"), fields.pop("event")
    if kind == "TaskSubmitted":
        spec = fields["spec"]
        if spec["places"] is not None:  # JSON has no tuples
            spec["places"] = tuple(spec["places"])
        fields["spec"] = TaskSpec(**spec)
    elif kind in ("WorkerLost", "PlaceLost"):
        fields["reason"] = LossReason(fields["reason"])
    elif kind in ("AttemptFinished", "AttemptNarrowed"):
        if kind == "AttemptNarrowed":
            fields["kept"] = tuple(fields["kept"])
        fields["reports"] = tuple(
            Report(**{**report, **{name: tuple(report[name]) for name in ("retry", "again")}})
            for report in fields["reports"]
        )
    elif kind == "ResizeRequested":
        fields |= {name: tuple(fields[name]) for name in ("add", "leave")}
    return now, EVENTS[kind](**fields)


def read_trace(path: str | Path) -> Iterator[tuple[float, m.Event]]:
    """Yield the events of a file; a last line that was cut off by a crash is left out."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and not line.startswith('{"settings"'):
                yield decode(line)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings at the beginning of a file; none if a crash has cut them off."""
    with Path(path).open(encoding="utf-8") as file:
        line = file.readline()
    settings: dict[str, Any] = json.loads(line).get("settings", {}) if line.endswith("\n") else {}
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "_asdict"):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value
