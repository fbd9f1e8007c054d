"""How many workers a pool in this process may have: a bound, which is met before a thread has
started.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raypool import ResourceError, parpool
from raypool.backends import local
from raypool.backends.local import ThreadsBackend

MOST = 4
"""Nobody starts a thousand threads to see that one more is refused."""


@pytest.fixture(autouse=True, params=["threads", "inline"])
def profile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert local.MOST_WORKERS == 1024, "docs/integrations.md says so"
    monkeypatch.setattr(local, "MOST_WORKERS", MOST)
    return str(request.param)


@pytest.mark.parametrize("num_workers", [MOST + 1, (MOST + 1, MOST + 3), 10**9])
def test_more_are_refused_before_one_has_started(
    profile: str,
    num_workers: int | tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    started: list[object] = []
    for backend in (local.InlineBackend, ThreadsBackend):
        monkeypatch.setattr(backend, "start_worker", lambda *args: started.append(args))
    least = num_workers[0] if isinstance(num_workers, tuple) else num_workers
    before = threading.active_count()
    with pytest.raises(
        ResourceError,
        match=f"requested {least}, available {MOST}. A pool in this process can have {MOST}",
    ) as found:
        parpool(num_workers, profile=profile, quiet=True)
    assert (found.value.requested, found.value.available) == (least, MOST)
    assert started == []
    assert eventually(lambda: threading.active_count() <= before)


def test_of_a_range_that_goes_beyond_there_are_as_many_as_usual(profile: str) -> None:
    with parpool((1, 10**9), profile=profile, quiet=True) as pool:
        assert 1 <= pool.num_workers <= MOST


def test_a_pool_grows_up_to_the_bound_and_stays_as_it_is_beyond(profile: str) -> None:
    with parpool(2, profile=profile, quiet=True) as pool:
        with pytest.raises(ResourceError, match=f"requested {MOST - 1}, available {MOST - 2}"):
            pool.resize(MOST + 1)
        assert pool.num_workers == 2
        for num_workers in (MOST, 1, MOST):  # what was given back can be had again
            pool.resize(num_workers)
            assert pool.num_workers == num_workers
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
