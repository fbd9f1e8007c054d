"""Time limits for tests that have failed: pytest-timeout sets them none any more, and a pool may
wait for what is lost.
"""

from __future__ import annotations

from typing import Any

import pytest

TIME = pytest.StashKey[Any]()
"""What pytest-timeout was told about a test."""


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[TIME] = settings


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Give a test that has failed as much time once more, to clean up: pytest-timeout would set it
    no more limit.
    """
    if isinstance(node, pytest.Item) and TIME in node.stash:
        node.config.hook.pytest_timeout_set_timer(item=node, settings=node.stash[TIME])
