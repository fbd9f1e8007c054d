"""What a coroutine says, piece by piece, for code that is none."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

SILENCE_S = 0.5
"""After so long without a piece there is an empty one [s]."""


def pieces_of(produce: Callable[[Callable[[str], object]], Awaitable[None]]) -> Iterator[str]:
    """Return what a coroutine puts, piece by piece, and "" each time that there is nothing for a while.

    It runs in a thread of its own, since a notebook has a loop in this one.
    """
    pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run() -> None:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await produce(pieces.put)

    def run_to_end() -> None:
        try:
            asyncio.run(run())
            pieces.put(None)
        except BaseException as error:
            pieces.put(error)

    threading.Thread(target=run_to_end, name="raypool-log", daemon=True).start()
    try:
        while (piece := _next(pieces)) is not None:
            yield piece
    finally:
        loop, task = begun.result()
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel) if task is not None else None


def _next(pieces: queue.SimpleQueue[str | BaseException | None]) -> str | None:
    try:
        piece = pieces.get(timeout=SILENCE_S)
    except queue.Empty:
        return ""
    if isinstance(piece, BaseException):
        raise piece
    return piece
