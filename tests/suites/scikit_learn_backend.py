"""A plugin for scikit-learn's own tests: whatever they run in parallel, on whichever number of
jobs, is run by a pool of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.suites import stand_ins
from tests.suites.recorder import note

POOL = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    import raypool

    stand_ins.start()
    raypool.register_joblib()
    config.stash[POOL] = stand_ins.open_pool(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    from joblib import parallel_config

    with parallel_config("raypool", pool=item.config.stash[POOL]):
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    pool = session.config.stash[POOL]
    note(tasks=pool.statistics().finished)
    pool.shutdown(cancel_futures=True)
