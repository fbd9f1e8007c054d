"""The standard `map`: the results of calls in the order of their arguments, each brought here when somebody asks for it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from raypool.counts import whole_number
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.futures import Future

P = ParamSpec("P")
T = TypeVar("T")


class MapResults(Iterator[T], Generic[T]):
    """What `PoolView.map` returns.

    It goes on after a call that has failed. What is left is cancelled by `close`, when the time is up, and when nobody holds it
    any more after the first result.

    Args:
        submit: Hands in the call with these arguments.
        rows: The arguments of each call.
        timeout: When `next` stops waiting [s], from now; None: never.
        buffersize: So many calls are handed in ahead of the results; None: all, now.

    Raises:
        SerializationError: The arguments of a call cannot be sent; none of the calls is left.
    """

    def __init__(
        self,
        submit: Callable[[tuple[Any, ...]], Future[T]],
        rows: Iterator[tuple[Any, ...]],
        timeout: float | None,
        buffersize: int | None,
    ) -> None:
        self._has_begun = False
        self._futures: deque[Future[T]] = deque()
        self._timeout = timeout
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        self._calls: Iterator[Future[T]] = map(submit, rows)  # holds the pool and the user's iterables
        self._why: Exception | None = None  # raised where the next call would have been
        try:
            while (buffersize is None or len(self._futures) < buffersize) and self._hand_in():
                pass
        except BaseException:
            self.close()
            raise

    def _hand_in(self) -> bool:
        """Hand in the next call; return whether there was one."""
        count = len(self._futures)
        self._futures.extend(itertools.islice(self._calls, 1))  # no Ctrl-C can come between: a call that is not in here is lost
        if len(self._futures) == count:
            self._calls = iter(())
            return False
        return True

    def __next__(self) -> T:
        self._has_begun = True
        try:
            self._hand_in()
        except Exception as error:  # of the user's iterable, or since nothing can be handed in any more
            self._calls, self._why = iter(()), error
        except BaseException:  # Ctrl-C: a row that was drawn in this instant would be missing without a word
            self.close()
            raise
        if not self._futures:
            self._raise_end()
        future = self._futures.popleft()
        try:
            return future.result(None if self._ends_at is None else self._ends_at - time.monotonic())
        except StopIteration as error:
            raise RuntimeError("A call of map raised StopIteration, which would end the loop over the results.") from error
        except TimeoutError as error:
            if error is future.error:  # the call's own
                raise
            self._futures.appendleft(future)
            self.close()
            raise TimeoutError(
                f"A result of map had not come {self._timeout:g} s after the call of map. What was left is cancelled."
            ) from None
        except BaseException:
            if not future.done():  # Ctrl-C
                self._futures.appendleft(future)
                self.close()
            raise
        finally:
            del self, future  # the traceback of an error would hold them, and what is left is cancelled when nobody does

    def _raise_end(self) -> NoReturn:
        why, self._why = self._why, None
        try:
            raise StopIteration if why is None else why
        finally:
            del why

    def close(self) -> None:
        """Cancel what is left; nothing more comes."""
        self._calls, self._why = iter(()), None
        while self._futures:
            self._futures.pop().cancel()  # the last first, as `cancel_each` does; if Ctrl-C comes, the rest is still here

    def __del__(self) -> None:
        if self._has_begun:
            self.close()


def unless_interrupted(submit: Callable[P, Future[T]]) -> Callable[P, Future[T]]:
    """Let Ctrl-C in a call that runs while it is handed in end the handing in: it means all the calls."""

    def submit_unless(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = submit(*args, **kwargs)
        try:
            if isinstance(future.error, KeyboardInterrupt):
                raise future.error
            return future
        finally:
            del future  # the traceback of its error would hold it

    return submit_unless


def checked_buffersize(chunksize: Any, buffersize: Any) -> int | None:
    """Return `buffersize` as Python's `int`; raise the error for a size that the standard library would refuse too."""
    if not isinstance(chunksize, int) and whole_number(chunksize) is None:  # it takes True
        raise InvalidTypeError(f"chunksize must be an integer. It is {chunksize!r}.")
    if chunksize < 1:
        raise InvalidValueError(f"chunksize must be >= 1. It is {chunksize!r}.")
    if buffersize is None:
        return None
    if not isinstance(buffersize, int) and whole_number(buffersize) is None:
        raise InvalidTypeError(f"buffersize must be an integer or None. It is {buffersize!r}.")
    if buffersize < 1:
        raise InvalidValueError(f"buffersize must be None or > 0. It is {buffersize!r}.")
    return int(buffersize)
