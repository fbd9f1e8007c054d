"""A future of the results of several futures: they are brought here when somebody asks, in the
thread of who asks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest

from raypool import Future
from raypool.channel.records import Missing
from raypool.futures import Deferred, gather


class Fetched:
    """The values of a call, of which it is known how often they were asked for."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.num_asked = 0

    def get(self) -> list[Any]:
        self.num_asked += 1
        return self.values


def ended(values: Fetched) -> Future[Any]:
    future: Future[Any] = Future("part")
    future.set_result(Deferred(values, 0))
    return future


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future("part")
    future.set_exception(error)
    return future


def cancelled() -> Future[Any]:
    future: Future[Any] = Future("part")
    future.cancel()
    return future


def from_loop(future: Future[Any]) -> Any:
    async def ask() -> Any:
        return await asyncio.wrap_future(future)

    return asyncio.run(ask())


WAYS: list[Callable[[Future[Any]], Any]] = [
    lambda future: future.result(0),
    lambda future: next(iter(concurrent.futures.as_completed([future], 0))).result(),
    from_loop,
    lambda future: future._get_snapshot()[2],  # which is how asyncio asks from Python 3.14 on
]


@pytest.mark.parametrize("ask", WAYS)
def test_values_are_brought_when_somebody_asks(ask: Callable[[Future[Any]], Any]) -> None:
    values = [Fetched("a"), Fetched("b")]
    whole = gather([ended(each) for each in values], "all")
    assert (whole.done(), whole.state, whole.error) == (True, "finished", None)
    assert concurrent.futures.wait([whole], 0).done == {whole}
    assert [each.num_asked for each in values] == [0, 0]
    assert ask(whole) == ["a", "b"]
    assert whole.result() is whole.result()
    assert whole.exception() is None


@pytest.mark.parametrize("error", [LookupError("one"), KeyboardInterrupt("one")])
def test_it_fails_with_the_first_error_without_a_value_being_brought(error: BaseException) -> None:
    values = Fetched("a")
    whole = gather([ended(values), failed(error), cancelled()], "all")
    assert (whole.state, whole.error, whole.exception()) == ("failed", error, error)
    assert whole._get_snapshot() == (True, False, None, error)
    assert values.num_asked == 0
    with pytest.raises(type(error), match="one"):
        whole.result()


def test_a_cancelled_part_is_an_error_too() -> None:
    whole = gather([cancelled(), failed(LookupError("later"))], "all")
    assert type(whole.exception()) is concurrent.futures.CancelledError
    assert not whole.cancelled()


@pytest.mark.parametrize("ask", WAYS[:3])
def test_a_value_that_cannot_be_opened_is_an_error(ask: Callable[[Future[Any]], Any]) -> None:
    lost = OSError("no such class here")
    whole = gather([ended(Fetched("a")), ended(Fetched(Missing(lost)))], "all")
    with pytest.raises(OSError, match="no such class"):
        ask(whole)
    assert (whole.state, whole.error, whole.exception()) == ("failed", lost, lost)


def test_one_that_is_cancelled_while_it_ends_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Future[Any]):
        """It is looked at when all have ended: just then somebody cancels the whole."""

        @property
        def error(self) -> None:
            whole.cancel()

        def result(self, timeout: float | None = None) -> None:
            whole.cancel()

    part = Late("part")
    whole = gather([part], "all")
    part.set_result(1)
    assert whole.cancelled()
    assert caplog.text == ""
