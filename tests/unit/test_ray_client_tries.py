"""A server of Ray Client that dies as it is started is asked for again; whatever else Ray refuses
is said at once.
"""

from __future__ import annotations

import pytest

from raypool.backends.ray.session import CLIENT_TRIES, _init_at

FAILED = (
    "Initialization failure from server:\nRuntimeError: Starting Ray client server failed. See"
    " ray_client_server_23000.err."
)
ZOMBIE = (
    "Initialization failure from server:\npsutil.ZombieProcess: PID still exists but it's a zombie"
    " (pid=9904)"
)
GONE = (
    "Initialization failure from server:\npsutil.NoSuchProcess: process no longer exists (pid=9904)"
)


class Head:
    """A Ray that refuses so often, in these words, and takes the next who come."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)
        self.asked = 0

    def init(self, address: str, **options: object) -> None:
        self.asked += 1
        if self.refusals:
            raise ConnectionAbortedError(self.refusals.pop(0))


@pytest.mark.parametrize("words", [FAILED, ZOMBIE, GONE], ids=["failed", "zombie", "gone"])
def test_a_server_that_died_as_it_was_started_is_asked_for_again(words: str) -> None:
    head = Head(words, words)
    _init_at(head, "ray://head:10001", {})
    assert head.asked == CLIENT_TRIES == 3


def test_a_head_on_which_all_servers_die_is_given_up() -> None:
    head = Head(*[ZOMBIE] * CLIENT_TRIES)
    with pytest.raises(ConnectionError, match="zombie"):
        _init_at(head, "ray://head:10001", {})
    assert head.asked == CLIENT_TRIES


def test_what_will_not_pass_is_said_at_once() -> None:
    head = Head("Initialization failure from server:\nRuntimeEnvSetupError: no such folder")
    with pytest.raises(ConnectionError, match="no such folder"):
        _init_at(head, "ray://head:10001", {})
    assert head.asked == 1
