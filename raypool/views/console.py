"""`SafeConsole`, for all output of rich: users' texts cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raypool.views.words import printable


class SafeConsole(Console):
    """Rich's console, on which control characters in texts are question marks."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Return what is drawn; rich's own control codes are in segments of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
