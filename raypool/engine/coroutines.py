"""Functions with `async def` as tasks: what they return is run to its end."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import CoroutineType
from typing import Any

from raypool.errors import TaskCancelled
from raypool.worker.running import running

TICK_S = 0.1
"""In a thread, an interruption arrives when Python code runs; so often it does while the loop waits [s]."""


def finished(value: Any) -> Any:
    """Return what a function has returned; run a coroutine to its end in an event loop of its own, and return what that returns.

    Raises:
        TaskCancelled: The task was cancelled meanwhile, whatever the coroutine has made of that.
    """
    return _run(value) if type(value) is CoroutineType else value


def _run(coroutine: CoroutineType[Any, Any, Any]) -> Any:
    import asyncio  # which most need not wait for

    note = running.get()
    try:
        if asyncio._get_running_loop() is None:
            return _run_here(coroutine)
        with ThreadPoolExecutor(1) as other:  # a task that runs inline was handed in by a coroutine, whose loop has this thread
            return other.submit(copy_context().run, _run_here, coroutine).result()
    except BaseException as error:
        if note is None or note.shelter is None or not note.shelter.is_cancelled or isinstance(error, TaskCancelled):
            raise
        raise TaskCancelled from error  # asyncio has turned it into an error of its own


def _run_here(coroutine: CoroutineType[Any, Any, Any]) -> Any:
    import asyncio

    tasks: list[asyncio.Task[Any]] = []

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if threading.current_thread() is threading.main_thread():  # a signal wakes it up
            return await coroutine
        ticking = asyncio.create_task(_tick())
        ticking.add_done_callback(lambda _: task.cancel())  # it was interrupted in place of the other
        try:
            return await coroutine
        finally:
            ticking.cancel()

    with asyncio.Runner() as runner:
        try:
            return runner.run(main())
        except TaskCancelled:
            if tasks and tasks[0].cancel():  # it waits: what it waits for is cancelled first, as after Ctrl-C
                with contextlib.suppress(asyncio.CancelledError):
                    runner.get_loop().run_until_complete(tasks[0])
            raise


async def _tick() -> None:
    import asyncio

    while True:
        await asyncio.sleep(TICK_S)
