"""`SafeConsole`, for all output of rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raypool.views.words import printable


class SafeConsole(Console):
    """Rich's console, with question marks for control characters in users' texts."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Return the safe segments."""
        # rich's own control codes are in separate segments
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
