"""The protocol of a backend, which runs user code for the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from raypool.channel.records import Function, NodeDevices, NodeGpus, Part
from raypool.core.messages import Event, Signal
from raypool.worker.running import ExchangeClient

Post = Callable[[Event, Any], None]
"""How a backend tells the driver, from any thread, that something has happened.

The second argument does not reach the core: `WorkerInfo` with `WorkerReady`, a text with
`WorkerLost`, a list of `SliceResult` with `AttemptFinished` and `AttemptNarrowed` (whose reports
the driver fills in).
"""


class Backend(Protocol):
    """Runs workers in places; only `claim` and `close` may block, results are posted.

    Attributes:
        is_ending: Whether the pool takes no more work, so that its resources will be released. The
            engine sets it.
        has_cleanups: Whether constants of the pool have a cleanup. The pool sets it.
    """

    is_ending: bool
    has_cleanups: bool

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim as many places as possible, from `least` to `most` (both None: all).

        Raises:
            ResourceError: There are fewer than `least`, even after `start_timeout_s`; none is kept.
        """

    def sizing(self) -> AbstractContextManager[None]:
        """Return a context in which the backend does not change the pool's size.

        Afterwards it does not make up for nodes that it lost before.
        """

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start a worker in a place, replacing any other, and call the setups in it.

        Posts `WorkerReady` when they have returned, else `WorkerLost`.
        """

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """End the worker in a place, and release the place unless it is kept for another worker."""

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Make a value ready to travel; in a trial, only check that it can.

        Raises:
            SerializationError: It cannot be pickled; the message names `what` and the variable.
        """

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Call a worker with parts and the functions that they name.

        Posts `AttemptFinished` or `WorkerLost`, and perhaps `AttemptNarrowed` before: then an
        attempt that was sent to wait for this one (`behind` it) does not begin.
        """

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Pass a wish for the slices of a task in a call on to their worker.

        `Signal.CANCEL` ends them at once, or keeps them from starting. If they still run after
        `cancel_grace_s`, the worker is killed; once all its processes have ended, `WorkerLost` is
        posted, with `LossReason.STOPPED`.
        """

    def devices(self) -> list[NodeDevices]:
        """Return the GPUs of the machines that have workers, within seconds; from any thread."""

    def node_of(self, place: int) -> str | None:
        """Return the node of a place; None if there is only this machine."""

    def gpu_readings(self, take: Callable[[NodeGpus], object]) -> None:
        """Pass the last readings of the workers' GPUs to `take`; from any thread.

        `take` is called in another thread, once for each machine with GPUs that answers.
        """

    def find_way(self) -> ExchangeClient:
        """Return the way to the exchange that the pool's processes share; from any thread."""

    def close(self) -> None:
        """End everything; values that were not fetched stay within reach."""
