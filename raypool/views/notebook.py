"""The live display of a loop in a notebook: HTML below the cell, updated in place."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from html import escape
from typing import Any

from raypool.views.lines import line
from raypool.views.status import LoopStatus, Rows, WorkerRow
from raypool.views.words import duration

STYLES = {"": "", "bold": "font-weight: bold", "dim": "opacity: 0.65", "red": "color: #d43b3b"}

CELL = "text-align: left; padding: 0 1em 0 0; border: none; white-space: nowrap"
NUMBER = CELL.replace("left", "right")
CUT = CELL + "; max-width: 28em; overflow: hidden; text-overflow: ellipsis"
"""The style of a cell cut to one line: a display of changing height would make the page jump."""


def notebook_shell() -> Any:
    """Return IPython's shell in the kernel of a notebook; None anywhere else."""
    if "IPython" not in sys.modules:  # a kernel has imported it
        return None
    from IPython import get_ipython

    shell: Any = get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return notebook_shell() is not None


class NotebookView:
    """Shows a loop in the output of a cell; see `View`."""

    interval_s = 0.5

    def __init__(self) -> None:
        self._display_id = uuid.uuid4().hex  # its own: no other cell overwrites the last state
        self._is_there = False
        self._shown = ""

    def show(self, status: LoopStatus) -> None:
        """Show the loop."""
        self._put(status, page(status, status.rows(sys.maxsize)))

    def end(self, status: LoopStatus) -> None:
        """Show the end of the loop."""
        if status.is_begun:
            self._put(status, page(status, Rows([], "")))

    def _put(self, status: LoopStatus, html: str) -> None:
        from IPython.display import display

        if html == self._shown:
            return
        # the text is for frontends that show no HTML
        content: dict[str, Any] = {"text/html": html, "text/plain": line(status)}
        display(  # type: ignore[no-untyped-call]
            content, raw=True, display_id=self._display_id, update=self._is_there
        )
        self._is_there, self._shown = True, html


def page(status: LoopStatus, rows: Rows) -> str:
    """Return a loop as HTML."""
    value = ""  # an indeterminate bar, as the total is unknown
    if status.total is not None or status.is_over:
        value = f' max="{status.total or 1}" value="{status.num_settled if status.total else 1}"'
    parts = (
        _text(status.label, "bold"),
        f'<progress{value} style="width: 16em; vertical-align: middle"></progress>',
        "".join(_text(text, style) for text, style in status.counts()),
        _text(status.times(), "dim"),
    )
    body = " &nbsp;".join(parts) + "".join(_line(text, "") for text in status.lines if text)
    if rows.shown:
        has_memory = any(row.memory for row in rows.shown)
        table = "".join(f"<tr>{''.join(_cells(row, has_memory))}</tr>" for row in rows.shown)
        body += (
            '<table style="margin: 0.3em 0 0 1em; border: none; font-size:'
            f' inherit">{table}</table>'
        )
    if rows.others:
        body += _line(rows.others, "dim")
    if status.last_failure is not None:
        body += _line(status.last_failure, "red")
    return (
        '<div style="font-size: 90%; font-variant-numeric: tabular-nums; overflow:'
        f' hidden">{body}</div>'
    )


def _cells(row: WorkerRow, has_memory: bool) -> Iterator[str]:
    yield _cell(f"worker {row.worker}")
    yield _cell(f"{row.num_done:,} done", style=NUMBER)
    if has_memory:
        yield _cell(row.memory, style=NUMBER)
    yield _cell("" if row.running_s is None else duration(row.running_s), style=NUMBER)
    yield _cell(_text("idle", "dim") if row.running_s is None else escape(row.items), is_html=True)
    yield _cell(row.values, style=CUT)
    yield _cell(_text(row.description, "dim"), is_html=True, style=CUT)


def _cell(content: str, *, is_html: bool = False, style: str = CELL) -> str:
    return f'<td style="{style}">{content if is_html else escape(content)}</td>'


def _line(text: str, style: str) -> str:
    return f'<div style="margin-left: 1em; {STYLES[style]}">{escape(text)}</div>'


def _text(text: str, style: str) -> str:
    return f'<span style="{STYLES[style]}">{escape(text)}</span>' if style else escape(text)
