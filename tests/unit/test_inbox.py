"""Whoever hands in one thing after the other lets the driver begin."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raypool.engine import inbox
from raypool.engine.inbox import BURST, InlineInbox, ThreadInbox


def sleeping(sleep: Any) -> SimpleNamespace:
    """Stand for `time` in the module alone: other threads of this process sleep as ever."""
    return SimpleNamespace(sleep=sleep, monotonic=time.monotonic)


def test_a_burst_gives_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, gave_way_at = ThreadInbox(), []
    monkeypatch.setattr(
        inbox, "time", sleeping(lambda seconds: gave_way_at.append(messages._queue.qsize()))
    )
    for _ in range(3 * BURST):
        messages.put((None, print))
        messages.give_way()
    assert gave_way_at == [BURST]


def test_single_messages_do_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, gave_way_at = ThreadInbox(), []
    monkeypatch.setattr(inbox, "time", sleeping(gave_way_at.append))
    for _ in range(3 * BURST):
        messages.put((None, print))
        messages.give_way()
        messages.get(None)
    assert gave_way_at == []


def test_without_a_thread_nobody_is_there_to_begin() -> None:
    messages = InlineInbox()
    for _ in range(2 * BURST):
        messages.put((None, print))
        messages.give_way()
    assert messages.get(None) == (None, print)
