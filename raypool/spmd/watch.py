"""The watch for ranks that can never meet: one has ended, say, while another waits for it.

Torch's groups have no time limit here (see `transport.FOR_EVER`), and a slow rank may take any
time, so no rank counts as late by itself. Two ranks cannot meet if they wait for each other in
different places. Each rank has a thread that looks where the rank is, and writes this into the
group's store when the rank is stuck. The thread of rank 0 reads and judges the entries of all.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from raypool.spmd.wire import list_ranks, ordinal
from raypool.worker.running import this_process

logger = logging.getLogger("raypool")

LOOK_S = 5.0
"""Between two looks of a rank's thread [s]."""

WARN_S = 30.0
"""Ranks that have waited for each other this long are warned about once [s]."""

ENDED = "the end"
"""The meeting of ranks whose function has returned."""

HINT = (
    "All ranks must call the same collectives, equally often. Where one rank has more batches than"
    " another, use drop_last=True in the DataLoader or torch.distributed.algorithms.Join. Where a"
    " collective, a break or a return is under a condition, let all ranks take the same branch."
)


class Whereabouts(NamedTuple):
    """Where a rank is.

    `meeting`: the operation of raypool's own that it waits in ("ray.train.report"; `ENDED`), "" if
    none. `number`: of that operation in the call. `peer`: the only rank that it waits for; None:
    all. `since`: the start of the wait (Unix time [s]). `begun`: its collectives in torch's groups.
    """

    meeting: str = ""
    number: int = 0
    peer: int | None = None
    since: float = 0.0
    begun: Mapping[str, Begun] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether the rank waits for other ranks."""
        return bool(self.meeting) or any(each.pending for each in self.begun.values())

    def write(self) -> str:
        """Return a text for the store."""
        return json.dumps(self)

    @staticmethod
    def read(text: bytes) -> Whereabouts:
        """Return the whereabouts that a rank has written."""
        meeting, number, peer, since, begun = json.loads(text)
        return Whereabouts(
            meeting, number, peer, since, {name: Begun(*each) for name, each in begun.items()}
        )


class Mismatch(NamedTuple):
    """Two ranks that wait for each other.

    `waiting` is in collective `number` of a group of torch's, or in raypool's own (0).
    """

    waiting: int
    missing: int
    group: str
    number: int


def mismatches(places: Mapping[int, Whereabouts]) -> Iterator[Mismatch]:
    """Yield the pairs of ranks that can never meet."""
    for waiting, place in sorted(places.items()):
        for name, begun in place.begun.items():
            for rank in begun.ranks if begun.pending and not place.meeting else ():
                other = places.get(rank, NOWHERE)
                its = other.begun.get(name, Begun((), 0))
                # the next collectives of one group differ: gloo lets both ranks wait
                has_other = its.pending == begun.pending and its.operation != begun.operation
                # a rank in a meeting begins nothing else before the others arrive
                never_comes = (
                    bool(other.meeting)
                    and other.peer in (None, waiting)
                    and its.newest < begun.pending
                )
                if rank != waiting and (has_other or never_comes):
                    yield Mismatch(waiting, rank, name, begun.pending)
        if place.peer is not None:
            other = places.get(place.peer, NOWHERE)
            if other.meeting and (
                other.peer is None
                or (other.peer == waiting and other.meeting == place.meeting == "receive")
            ):
                yield Mismatch(waiting, place.peer, "", 0)


NOWHERE = Whereabouts()


class RankWatch:
    """The watch of one rank during one call.

    Args:
        rank: Its number.
        world_size: The number of ranks.
        store: The group's `torch.distributed.Store`.
        call: The number of the call in the group.
        limit_s: Ranks that have waited for each other this long fail [s]; None: never.
        progress: Returns a text that changes whenever the rank begins or ends a wait.
        place: Returns where the rank is.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it looks at, and whom it tells
        self,
        rank: int,
        world_size: int,
        store: Any,
        call: int,
        limit_s: float | None,
        progress: Callable[[], str],
        place: Callable[[], Whereabouts],
    ) -> None:
        self._rank, self._world_size, self._store, self._call = rank, world_size, store, call
        self._limit_s = limit_s
        self._progress, self._find_place = progress, place
        self._progress_before: str | None = None
        self._place: Whereabouts | None = None  # None: it is not stuck
        self._is_written = False  # the others read that this rank is stuck
        self._first_seen: dict[Mismatch, float] = {}
        self._has_warned = False
        self.is_over = False  # it need not look any more
        # often enough to keep a short limit
        self.pause_s = LOOK_S if limit_s is None else min(LOOK_S, max(limit_s / 4, 0.01))

    def look(self, now: float) -> tuple[str, tuple[int, ...]] | None:
        """Look once, at a monotonic time [s].

        Returns:
            Once a mismatch has lasted for the limit: its text, and the ranks that cannot come.
        """
        progress = self._progress()
        if progress != self._progress_before:
            self._progress_before, self._place = progress, None
        elif self._place is None:  # nothing began or ended since the last look
            self._place = self._find_place()
        if self.is_stuck != self._is_written:
            self._is_written = self.is_stuck
            place = self._place if self.is_stuck and self._place else NOWHERE
            self._store.set(self._key(self._rank), place.write())
        if self._rank == 0:  # one rank judges for all, so that all raise the same error
            self._judge(now)
        verdict = self._key("verdict")
        if not self._store.check([verdict]):
            return None
        text, missing = json.loads(self._store.get(verdict))
        return text, tuple(missing)

    @property
    def is_stuck(self) -> bool:
        """Whether the rank has waited for others since the last look."""
        return self._place is not None and self._place.is_stuck

    def _key(self, what: int | str) -> str:
        return f"watch/{self._call}/{what}"

    def _judge(self, now: float) -> None:
        places = {
            rank: Whereabouts.read(self._store.get(self._key(rank)))
            for rank in range(self._world_size)
            if self._store.check([self._key(rank)])  # `get` would wait for the rank to write
        }
        found = list(mismatches(places))
        self._first_seen = {each: self._first_seen.get(each, now) for each in found}
        if not found:
            return
        lasted_s = now - min(self._first_seen.values())
        told, limit_s = _told(places, found), self._limit_s
        warn_s = WARN_S if limit_s is None else min(WARN_S, limit_s / 2)
        if lasted_s >= warn_s and not self._has_warned:
            self._has_warned = True
            end = (
                "" if limit_s is None else f"; after mismatch_timeout_s={limit_s:g} the call fails"
            )
            _warn(f"{told}. They wait for each other{end}. {HINT}")
        if limit_s is not None and lasted_s >= limit_s:
            missing = sorted({each.missing for each in found})
            text = (
                f"{told}. They have waited for each other for mismatch_timeout_s={limit_s:g}."
                f" {HINT}"
            )
            self._store.set(self._key("verdict"), json.dumps((text, missing)))


def _told(places: Mapping[int, Whereabouts], found: list[Mismatch]) -> str:
    """Say which ranks are where, and since when."""
    since: dict[str, float] = {}
    ranks: dict[str, list[int]] = {}
    for rank in sorted({each.waiting for each in found} | {each.missing for each in found}):
        place = places[rank]
        at = place.since
        if place.meeting == ENDED:
            deed = "ended at"
        elif place.meeting:
            nth = ordinal(place.number)
            deed = f"been in {place.meeting} (the {nth} operation of this call) since"
        else:
            group = next(each.group for each in found if rank in (each.waiting, each.missing))
            at = place.begun[group].since
            deed = f"been in torch.distributed.{place.begun[group].operation} since"
        ranks.setdefault(deed, []).append(rank)
        since[deed] = min(at, since.get(deed, at))
    text = ", and ".join(
        f"{list_ranks(its)} {'has' if len(its) == 1 else 'have'} {deed}"
        f"{time.strftime(' %H:%M:%S', time.localtime(since[deed]))}"
        for deed, its in ranks.items()
    )
    return text[0].upper() + text[1:]


def _warn(text: str) -> None:
    """Warn in the process that opened the pool, where the user sees it."""
    way = this_process.link
    if way is None:
        logger.warning("%s", text)
    else:
        way.send("warning", None, text)


# --- torch's collectives --------------------------------------------------------------------------


class Begun(NamedTuple):
    """A rank's collectives in one of torch's groups.

    `ranks`: all ranks of the group. `newest`: the number of the last collective. `pending`: that of
    the oldest one that is not done, 0 if all are; `operation`, `since`: its name and begin (Unix
    time [s]).
    """

    ranks: tuple[int, ...]
    newest: int
    pending: int = 0
    operation: str = ""
    since: float = 0.0


def begun_collectives(since: float) -> dict[str, Begun]:
    """Return this process's collectives since a time (Unix time [s]), by backend and group."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    ranks = {
        name: tuple(sorted(world.pg_group_ranks.get(group, ())))
        for group, name in list(world.pg_names.items())
    }
    found: dict[str, Begun] = {}
    for dump in _flight_records(is_whole=True):
        for entry in json.loads(dump).get("entries", ()):
            name, at = entry["process_group"][0], entry["time_created_ns"] / 1e9
            # the ring also has those of earlier calls, and of groups that are gone
            if entry["is_p2p"] or at < since or name not in ranks:
                continue
            number = entry["collective_seq_id"]
            backend, _, operation = entry["profiling_name"].partition(":")
            key = f"{backend} {name}"  # each backend of a group counts by itself
            begun = found.get(key, Begun(ranks[name], 0))._replace(newest=number)
            if not begun.pending and not entry["retired"]:
                begun = begun._replace(pending=number, operation=operation, since=at)
            found[key] = begun
    return found


def progress() -> str:
    """Return a text that changes with each begin and end of a collective; "" without a record."""
    return "".join(
        str(json.loads(dump).get("pg_status") or "") for dump in _flight_records(is_whole=False)
    )


def _flight_records(is_whole: bool) -> Iterator[bytes]:
    """Yield the records of torch's flight recorders: of gloo, of NCCL."""
    # Torch 2.13 writes each collective into a ring of some 2,000 entries. It has no public way to
    # read that in the process itself.
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield dump(includeCollectives=is_whole, onlyActive=False)
