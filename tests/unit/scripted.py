"""A pool whose workers do what a test says: for what the driver makes of what it is told, whenever
that comes.

Nothing runs. Each call that goes out is shown to the test's script, which says what comes of it,
and after how many seconds of simulated time. What the user gets of that (results, futures,
warnings) is what tests look at.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from raypool import ParallelPool, Profile
from raypool.backends.base import Post
from raypool.channel.records import Failure, LocalValues, Part, SliceResult, WorkerInfo
from raypool.core import messages as m
from raypool.engine.engine import Engine
from raypool.errors import LossReason
from raypool.testing import VirtualClock

News = tuple[float, m.Event | None, Any]
"""What comes of a call: after how many seconds, the event, and what goes with it. Without an event:
a function to call then.
"""


class Call(NamedTuple):
    """A call that has gone out to a worker, to wait there for the one that it is `behind`, if
    any.
    """

    worker_id: int
    attempt_id: int
    parts: Sequence[Part]
    behind: int | None

    @property
    def items(self) -> list[Any]:
        """Its items, of all parts; of what is no loop, the first argument."""
        return [item for part in self.parts for item in items_of(part)]

    def finished(self, *results: SliceResult, after_s: float = 0.001) -> News:
        """Let it come back; without results, all of it is done."""
        return (
            after_s,
            m.AttemptFinished(self.worker_id, self.attempt_id, ()),
            list(results) or [done(part) for part in self.parts],
        )

    def narrowed(self, *results: SliceResult, kept: Sequence[int], after_s: float = 0.001) -> News:
        """Let the worker tell what is done of each part, and how many items after that it keeps."""
        return (
            after_s,
            m.AttemptNarrowed(self.worker_id, self.attempt_id, (), tuple(kept)),
            list(results),
        )

    def lost(
        self,
        reason: LossReason = LossReason.EXIT,
        *,
        was_idle: bool = False,
        after_s: float = 0.001,
    ) -> News:
        """Let its worker die."""
        return after_s, m.WorkerLost(self.worker_id, reason, was_idle), "it was killed"


def items_of(part: Part) -> list[Any]:
    """Return the items of a slice; of a call, the first argument."""
    return [item[0][0] if part.is_call else item for item in part.items]


def done(
    part: Part,
    count: int | None = None,
    *,
    item_s: float = 0.001,
    errors: dict[int, BaseException] | None = None,
) -> SliceResult:
    """Return the result of a slice of which so many items (None: all) are done: each gives itself,
    or the error at its place.
    """
    count = part.num_items if count is None else count
    failures = {part.start + place: Failure(error, None) for place, error in (errors or {}).items()}
    values = LocalValues(items_of(part)[:count])
    return SliceResult(
        part.start, count, values, 0, failures, array("d", [item_s] * count), 1000.0 + part.start
    )


Script = Callable[[Call], Iterable[News]]


def at_once(call: Call) -> Iterator[News]:
    """Let all calls come back at once, done."""
    yield call.finished()


class Workers:
    """The backend: notes what it is asked for, and does what the script says.

    Attributes:
        script: What comes of a call.
        calls: Those that went out, in their order.
        packs: Called with what is packed, just before a call goes out.
        signals: What running tasks were told.
    """

    def __init__(self, clock: VirtualClock, post: Post) -> None:
        self.script: Script = at_once
        self.calls: list[Call] = []
        self.packs: Callable[[Any], object] = id
        self.signals: list[m.SignalTask] = []
        self._clock = clock
        self._post = post

    def tell(self, news: News) -> None:
        """Let something happen now."""
        _, event, payload = news
        assert event is not None
        self._post(event, payload)

    def later(self, *news: News) -> None:
        """Let things happen while somebody waits."""
        for after_s, event, payload in news:
            self._clock.put_later(after_s, (event, payload))

    def claim(self, least: int | None, most: int | None) -> list[int]:
        return list(range(most or 1))

    def sizing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Any]) -> None:
        self._clock.put((m.WorkerReady(worker_id), WorkerInfo(place, "here", 1)))

    def vacate(self, place: int, *, keep: bool = False) -> None: ...

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Return the value; for the same function always the same text, so that how long it takes
        is known.
        """
        if callable(value):
            return str(id(value)).encode()
        self.packs(value)
        return value

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Any],
        behind: int | None,
    ) -> None:
        call = Call(worker_id, attempt_id, parts, behind)
        self.calls.append(call)
        self.later(*self.script(call))

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: m.Signal) -> None:
        self.signals.append(m.SignalTask(worker_id, attempt_id, task_id, wish))

    def devices(self) -> list[Any]:
        return []

    def node_of(self, place: int) -> str | None: ...

    def gpu_readings(self, take: Any) -> None: ...

    def find_way(self) -> Any: ...

    def close(self) -> None: ...


def scripted(num_workers: int, **changes: Any) -> tuple[ParallelPool, Workers]:
    """Open such a pool; `changes` are fields of its profile. Until a script says more, all calls
    come back done.
    """
    clock = VirtualClock()
    made: list[Workers] = []

    def make(post: Post, *_: Any) -> Workers:
        made.append(Workers(clock, post))
        return made[0]

    engine = Engine(Profile(backend="inline", **changes), clock, make)
    engine.add_workers(num_workers, num_workers)
    return ParallelPool(engine), made[0]
