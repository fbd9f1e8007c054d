"""What those are told who still want something of a driver that has failed."""

from __future__ import annotations

import pytest

from raypool.engine import verdicts


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ConnectionError("Client is shutting down."), "The connection to the cluster has ended: Client is shutting down. "),
        (KeyError(7), "This is a mistake in raypool"),
        (None, "This is a mistake in raypool"),
    ],
)
def test_a_connection_that_breaks_is_no_mistake_of_raypools(cause: Exception | None, words: str) -> None:
    error = verdicts.driver_failed(cause)
    assert words in str(error)
    assert error.__cause__ is cause
