"""Ctrl-C in the instant in which work is handed in: nobody has a future of it yet, so it is
cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from raypool import ParallelPool
from raypool.core.messages import TaskSubmitted
from raypool.interop.multiprocessing import Pool

pytestmark = pytest.mark.threads

Hang = Callable[..., Any]

VERBS: dict[str, Callable[[ParallelPool, Hang], object]] = {
    "parfeval": lambda pool, hang: pool.parfeval(hang),
    "parfeval_on_all": lambda pool, hang: pool.parfeval_on_all(hang),
    "parfor": lambda pool, hang: pool.parfor(hang, range(3)),
    "parfor of a generator": lambda pool, hang: pool.parfor(hang, iter(range(3))),
    "map": lambda pool, hang: pool.map(hang, range(3)),
    "spmd": lambda pool, hang: pool.spmd(hang),
    "spmd_async": lambda pool, hang: pool.spmd_async(hang),
    "Pool": lambda pool, hang: Pool(initializer=hang, pool=pool),
    "Pool.apply": lambda pool, hang: Pool(pool=pool).apply(hang),
    "Pool.map": lambda pool, hang: Pool(pool=pool).map(hang, range(3), 1),
}
OF_ONE_TASK = {"parfeval", "parfor", "parfor of a generator", "spmd", "spmd_async", "Pool.apply"}
CASES = [
    (verb, number) for verb in VERBS for number in (1, 2) if number == 1 or verb not in OF_ONE_TASK
]


@pytest.mark.parametrize(("verb", "number"), CASES)
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")
def test_what_is_being_handed_in_is_cancelled(
    pool: ParallelPool,
    gate: Any,
    eventually: Any,
    check_pool: Any,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    number: int,
) -> None:
    """Python looks for Ctrl-C after each call of C code: the task is with the driver then, its
    number known to nobody.
    """
    inbox = pool._engine.driver._inbox
    put, user, count = inbox.put, threading.current_thread(), 0

    def put_and_press(message: Any) -> None:
        nonlocal count
        put(message)
        if not isinstance(message[0], TaskSubmitted) or threading.current_thread() is not user:
            return
        count += 1
        if count == number:
            monkeypatch.setattr(inbox, "put", put)
            raise KeyboardInterrupt

    monkeypatch.setattr(inbox, "put", put_and_press)
    with pytest.raises(KeyboardInterrupt):
        VERBS[verb](pool, lambda *_: gate.wait())
    assert eventually(lambda: not pool.busy)
    check_pool(pool)
