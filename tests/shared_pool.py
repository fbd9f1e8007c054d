"""The pool on Ray that tests share, so that only tests about opening, closing or killing a pool
open one.
"""

from __future__ import annotations

from pathlib import Path

from raypool import ParallelPool, current_task, parpool


class SharedPool:
    """The pool on Ray that tests share: three workers, each with a GPU that does not exist."""

    def __init__(self) -> None:
        self._pool: ParallelPool | None = None
        self.folder: Path | None = None
        """Where it keeps temporary files, as long as it is open."""

    def open(self) -> ParallelPool:
        """Return it; a test that has closed it, or has failed, has left the next one a new pool."""
        from tests.leaks import poll  # it imports this module

        if self._pool is None or self._pool.is_closed:
            self._pool = parpool(3, start_timeout_s=300, quiet=True)
            # What a first call starts in the driver (the threads of the exchange, say) stays as
            # long as the pool.
            assert list(self._pool.spmd(lambda context: context.all_reduce(1))) == [3, 3, 3]
            self.folder = Path(
                self._pool.parfeval(lambda: str(current_task().checkpoint_dir)).result(300)
            ).parent.parent
            assert poll(self.is_at_rest)  # a result may be there a moment before its worker is idle
        return self._pool

    @property
    def size(self) -> int:
        """How many workers it has now, each in a placement group."""
        return 0 if self._pool is None or self._pool.is_closed else self._pool.num_workers

    def is_at_rest(self) -> bool:
        """Whether nothing is left to do, and all workers are up."""
        pool = self._pool
        return (
            pool is None
            or pool.is_closed
            or (not pool.busy and {worker.state for worker in pool.workers} == {"idle"})
        )

    def close(self) -> None:
        """End it, and wait until Ray has all GPUs back."""
        from tests.leaks import poll

        pool, self._pool, self.folder = self._pool, None, None
        if pool is not None and not pool.is_closed:
            import ray

            pool.delete()
            assert poll(
                lambda: ray.available_resources().get("GPU") == ray.cluster_resources()["GPU"]
            )


shared = SharedPool()
