"""The protocol of a backend: what the driver asks of whatever runs user code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from raypool.channel.records import Function, GpuMemory, NodeDevices, Part
from raypool.core.messages import Event, Signal
from raypool.worker.running import ExchangeClient

Post = Callable[[Event, Any], None]
"""How a backend tells the driver that something has happened, from any thread.

The second argument goes with the event but not into the core: `WorkerInfo` with `WorkerReady`, a
text with `WorkerLost`, a list of `SliceResult` with `AttemptFinished` and `AttemptNarrowed` (whose
reports the driver fills in).
"""


class Backend(Protocol):
    """Runs workers in places. Every method returns at once, except `claim` and `close`; what
    happens then is posted.

    Attributes:
        is_ending: Whether the pool takes no more work: what it holds comes free by itself. The
            engine sets it.
    """

    is_ending: bool

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim places for workers: between `least` and `most`, as many as there are (both None:
        all there are).

        Raises:
            ResourceError: There are fewer than `least`, even after `start_timeout_s`. Nothing is
                kept then.
        """

    def sizing(self) -> AbstractContextManager[None]:
        """Return a context in which the size of the pool is set: the backend does not change it
        meanwhile.

        What it has lost before with nodes is not made up for after that.
        """

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start a worker in a place, instead of any that was there, and call these functions,
        without arguments, in it.

        Posts `WorkerReady` when they have returned, else `WorkerLost`.
        """

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """End what runs in a place and give the place back, unless it is to be kept for another
        worker.
        """

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Make a value ready to travel; in a trial, only make sure that it can.

        Raises:
            SerializationError: It cannot be pickled; `what` says what it is, the message names the
                variable.
        """

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Call a worker; posts `AttemptFinished` or `WorkerLost`. `functions` are those that the
        parts name.

        Before that, it may post `AttemptNarrowed` once. What was sent to wait for that attempt
        (`behind` it) is not begun then.
        """

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Pass on to a worker what somebody wants of the slices of a task in a call.

        With `Signal.CANCEL` they end at once, or are not begun. What has not ended after
        `cancel_grace_s` is killed with its
        worker: then `WorkerLost` is posted, with `LossReason.STOPPED`, when nothing of the worker
        is left.
        """

    def devices(self) -> list[NodeDevices]:
        """Return the GPUs of the machines that there are workers on, within seconds; from any
        thread.
        """

    def gpu_memory(self, take: Callable[[dict[int, GpuMemory]], object]) -> None:
        """Let `take` have, by worker, how much memory of its GPUs is in use: what the machines have
        seen last.

        It is called once for each machine with GPUs that answers, in another thread. From any
        thread.
        """

    def find_way(self) -> ExchangeClient:
        """Return the way to the exchange that the processes of the pool share; from any thread."""

    def close(self) -> None:
        """End everything that is left. Values that were not fetched stay within reach."""
