"""Which workers are of which kind, and who of each kind is idle."""

from __future__ import annotations

from raypool.core.model import Bench, Worker


class Squads:
    """The workers by kind: how many there are, and the idle ones where there are several kinds."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # of the workers that are up
        self.is_mixed = False
        self._benches: dict[int, Bench] = {}

    def enlist(self, worker: Worker, kind: int, workers: dict[int, Worker], idle: dict[int, None]) -> None:
        """Note of what kind a worker is that has come up, beside these, some of which are idle."""
        worker.kind = kind
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if not self.is_mixed and len(self.counts) > 1:
            self.is_mixed = True
            for number in idle:
                self.seat(workers[number])

    def dismiss(self, worker: Worker) -> None:
        """Note that a worker has gone."""
        kind = worker.kind
        if kind is None:
            return
        self.counts[kind] -= 1
        if self.counts[kind] == 0:
            del self.counts[kind]
            self.is_mixed = len(self.counts) > 1

    def seat(self, worker: Worker) -> None:
        """Note that a worker has become idle."""
        if worker.kind is not None:
            bench = self._benches.get(worker.kind)
            if bench is None:
                bench = self._benches[worker.kind] = Bench()
            bench.seat(worker)

    def first_idle(self, workers: dict[int, Worker], idle: dict[int, None]) -> dict[int, Worker]:
        """Return the idle worker of each kind that is in the lowest place."""
        numbers = {kind: bench.first(idle) for kind, bench in self._benches.items()}
        return {kind: workers[number] for kind, number in numbers.items() if number is not None}
