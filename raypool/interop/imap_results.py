"""What `imap` and `imap_unordered` of `raypool.interop.multiprocessing.Pool` return, and the thread that draws for them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from raypool.futures import Future
from raypool.gathered import cancel_each
from raypool.interop.async_results import Collector, outcome_of

T = TypeVar("T")


class IMapIterator(Iterator[T], Generic[T]):
    """The results of `imap` or `imap_unordered`: brought here one by one, while a thread draws from the iterable.

    When nobody holds it any more, what was drawn runs on and its results are thrown away. If results were taken from it, a
    generator is drawn no further; if none were, all of it is, as of a list.

    Args:
        drawing: Who hands in the calls.

    Source:
        multiprocessing.pool.IMapIterator.

    Example:
        >>> import itertools
        >>> from raypool.interop.multiprocessing import Pool
        >>> with Pool(2, profile="threads") as pool:
        ...     results = pool.imap(abs, itertools.count(-2))
        ...     next(results), results.next(timeout=10)
        (2, 1)
    """

    def __init__(self, drawing: Drawing[T]) -> None:
        self._drawing = drawing
        self._has_begun = False

    def __next__(self) -> T:
        try:
            return self.next()
        finally:
            del self  # the traceback of an error would hold it

    def next(self, timeout: float | None = None) -> T:
        """Return the next result; wait for it at most `timeout` seconds.

        What the iterable has raised comes after the results of what it gave before; and so does the `UnpicklableError` of an
        item that cannot be sent. After a call that has failed, the results of the next ones follow.

        Raises:
            StopIteration: There are no more.
            multiprocessing.TimeoutError: It is not there by then; the calls go on.
            Exception: What the call has raised, as itself; its cause is the remote traceback.
        """
        self._has_begun = True
        try:
            return self._drawing.take(timeout)
        finally:
            del self  # the traceback of an error would hold it

    def __del__(self) -> None:
        self._drawing.forget(self._has_begun)


class Drawing(Generic[T]):
    """Draws from an iterable in a thread of its own, and hands in a call for each entry.

    Args:
        pool: Kept from being collected until all has ended.
        collector: Who is told when all has ended.
        submit: Hands in the call for an entry of `calls`.
        calls: What the calls are made with, drawn one by one.
        is_chunked: Each call gives a list of results, not one.
        is_ordered: The results come in the order of the calls, not in that in which they end.
        most_ahead: So many calls are handed in at most beyond those of which the results were taken; None: any number.

    Raises:
        ValueError: The pool was closed.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        pool: object,
        collector: Collector,
        submit: Callable[[Any], Future[Any]],
        calls: Iterator[Any],
        *,
        is_chunked: bool,
        is_ordered: bool,
        most_ahead: int | None,
    ) -> None:
        self._pool: object = pool
        self._collector = collector
        self._is_chunked = is_chunked
        self._is_ordered = is_ordered
        self._most_ahead = most_ahead
        self._is_as_taken = most_ahead is not None
        self._changed = threading.Condition()
        self._pending: OrderedDict[Future[Any], None] = OrderedDict()
        self._ready: deque[Future[Any]] = deque()
        self._values: deque[T] = deque()  # of the last call that was taken
        self._why: BaseException | None = None  # raised after what was drawn before
        self._is_drawn = False  # nothing more is handed in
        self._is_forgotten = False  # nobody takes results
        collector.open(self)
        threading.Thread(target=self._draw, args=(submit, calls), name="raypool-imap", daemon=True).start()

    # --- the thread that draws ----------------------------------------------------------------------------------------

    def _draw(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> None:
        why = None
        try:
            while self._wait_for_room() and self._hand_in(submit, calls):
                pass
        except BaseException as error:  # of the user's iterable, or of an item that cannot be sent
            why = error
        try:
            self._end(why)
        finally:
            del self, submit, calls, why  # the traceback of the error would hold them, and by them the pool

    def _wait_for_room(self) -> bool:
        """Wait until another call may be handed in; False if none may."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_drawn or self._has_room())
            return not self._is_drawn

    def _has_room(self) -> bool:
        return self._most_ahead is None or len(self._pending) + len(self._ready) < self._most_ahead

    def _hand_in(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> bool:
        """Hand in the next call; False if there is none, or nobody wants any more of them."""
        try:
            entry = next(calls, self)
            if entry is self:
                return False
            future = submit(entry)  # it may take its time, in which results are taken
            with self._changed:
                is_wanted = not self._is_drawn
                self._pending[future] = None
            future.add_done_callback(self._note)
            if not is_wanted:
                future.cancel()
            return is_wanted
        finally:
            del self, submit, calls

    def _note(self, future: Any) -> None:
        with self._changed:
            if self._is_ordered:
                while self._pending and (first := next(iter(self._pending))).done():
                    self._move(first)
            elif future in self._pending:
                self._move(future)
            self._changed.notify_all()
            is_ended = self._is_drawn and not self._pending
        if is_ended:
            self._collector.note_ended(self)

    def _move(self, future: Future[Any]) -> None:
        del self._pending[future]
        if not self._is_forgotten:
            self._ready.append(future)

    def _end(self, why: BaseException | None) -> None:
        """Hand in nothing more, and raise `why` where the next result would have been."""
        with self._changed:
            if not self._is_drawn:
                self._is_drawn, self._why = True, None if self._is_forgotten else why
            self._changed.notify_all()
            is_ended = not self._pending
        if is_ended:  # otherwise the last call says so; the thread that draws may wait in the iterable for ever
            self._collector.note_ended(self)

    # --- for the pool -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let go of the pool."""
        self._pool = None

    def hurry(self) -> None:
        """Draw all that is left, however far ahead."""
        with self._changed:
            if not self._is_forgotten:
                self._most_ahead = None
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand in nothing more."""
        self._end(concurrent.futures.CancelledError("The pool was terminated before all of the iterable was drawn."))

    def cancel(self) -> None:
        """Hand in nothing more, and cancel what has not ended."""
        self.stop()
        cancel_each(list(self._pending))

    # --- for the iterator ---------------------------------------------------------------------------------------------

    def take(self, timeout: float | None) -> T:
        """Do what `IMapIterator.next` says."""
        with self._changed:
            if not self._changed.wait_for(self._has_next, timeout):
                raise multiprocessing.TimeoutError(f"The next result had not come after {timeout:g} s; the work goes on.")
            if self._values:
                return self._values.popleft()
            if not self._ready:
                self._raise_end()
            future = self._ready.popleft()
            self._changed.notify_all()
        try:
            values = outcome_of(future) if self._is_chunked else [outcome_of(future)]
        except StopIteration as error:
            raise RuntimeError("A call of imap raised StopIteration, which would end the loop over the results.") from error
        finally:
            del future
        with self._changed:
            self._values.extend(values)
            return self._values.popleft()

    def _has_next(self) -> bool:
        return bool(self._values or self._ready or (self._is_drawn and not self._pending))

    def _raise_end(self) -> NoReturn:
        why, self._why = self._why, None
        try:
            raise StopIteration if why is None else why
        finally:
            del why  # it would hold itself, by its traceback

    def forget(self, has_begun: bool) -> None:
        """Throw the results away, since nobody takes them any more; draw no more of a generator of which some were taken."""
        with self._changed:
            self._is_forgotten = True
            self._ready.clear()
            self._values.clear()
            self._why = None
            self._changed.notify_all()
        if has_begun and self._is_as_taken:
            self._end(None)
