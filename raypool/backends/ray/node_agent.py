"""The agent of a node: an actor that stops workers there, watches GPUs and passes messages on.

It is an actor beside the workers, since a busy worker answers no calls. It claims no resources.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import struct
import termios
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import ray

from raypool.backends.ray.mps import Mps, MpsState
from raypool.channel.exchange import Exchange
from raypool.channel.records import GpuReading
from raypool.core.messages import Signal
from raypool.gpus.devices import GpuDevice, Inventory
from raypool.gpus.table import gpus_here
from raypool.worker.folders import TemporaryFolder, token_of
from raypool.worker.interrupts import AT_HAND, NOTHING, SIGNALS, STOP_SIGNAL, WHOLE, WISH

FIRST_LOOK_S = 0.02
LONGEST_LOOK_S = 0.5
"""Pauses between looks whether a worker has read a wish; until then it is signaled again [s]."""

BY_ITSELF_S = 0.5
"""How long Ray has to end a worker's process before it is killed [s]."""

GONE_TIMEOUT_S = 10.0
"""How long a killed process, and its memory on the GPU, may take to vanish [s]."""

STEADY_S = 1.0
"""GPU memory that has not changed for this long, but is not back, is in use by others [s]."""

MEMORY_LOOK_S = 0.2
"""How often the memory of a worker that has a limit is measured [s]."""

MARK = "RAYPOOL_WORKER"
"""An environment variable by which the children of a worker that has crashed are found."""

OFFERED = -1
"""Stands for a worker's id in the mailbox, for offers to queues."""

MAILBOX_BYTES = 64 * 1024 * 1024
"""When so much waits for the driver, workers wait before they send more."""


class WorkerProcess(NamedTuple):
    """A worker's process, with the descriptors of its `ProcessGuard`'s pipe and board.

    `mark`: what its children find in `MARK`. `memory_used`: the memory in use on its GPUs before it
    used them [bytes]; None: unknown.
    """

    pid: int
    pipe: int
    board: int
    mark: str
    memory_used: int | None = None


class Watched:
    """A worker's process on this node: the head of a process group, with its children."""

    def __init__(self, process: WorkerProcess, gpus: Sequence[int], actor: Any) -> None:
        self.pid = process.pid
        self.mark = process.mark
        self.gpus = gpus
        self.actor = actor
        self.memory_used = process.memory_used
        # signaled through psutil: its number may be somebody else's one day
        self.process = psutil.Process(process.pid)
        self._pipe = os.open(f"/proc/{process.pid}/fd/{process.pipe}", os.O_WRONLY | os.O_NONBLOCK)
        self._board = os.open(f"/proc/{process.pid}/fd/{process.board}", os.O_RDONLY)

    def tell(self, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Put a wish into its pipe."""
        os.write(self._pipe, WISH.pack(attempt_id, task_id, SIGNALS.index(wish)))

    def wake(self) -> None:
        """Let it look into its pipe now."""
        self.process.send_signal(STOP_SIGNAL)

    @property
    def has_unread(self) -> bool:
        """Whether it has not read all wishes: it is in long native code, or imports a module."""
        return bool(struct.unpack("=i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))[0])

    @property
    def at_hand(self) -> tuple[int, int]:
        """Which attempt and task it is at; the task is `WHOLE` while it unpacks or packs."""
        attempt_id, task_id = AT_HAND.unpack(os.pread(self._board, AT_HAND.size, 0))
        return attempt_id, task_id

    def others(self) -> list[psutil.Process]:
        """Return its group and descendants, without itself.

        They are to be killed after it: its code would notice their end, and go on.
        """
        others = [] if self.is_alive else marked(self.mark)
        for process in psutil.process_iter():
            # its group may have outlived it
            with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended
                if process.pid != self.pid and os.getpgid(process.pid) == self.pid:
                    others.append(process)
        with contextlib.suppress(psutil.Error):  # it has ended
            others += self.process.children(recursive=True)
        return others

    def freeze(self) -> None:
        """Stop it until it is killed."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            self.process.suspend()

    def kill(self) -> None:
        """Kill the process itself."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            self.process.kill()

    @property
    def is_alive(self) -> bool:
        """Whether it is alive."""
        return _lives(self.process)

    def close(self) -> None:
        """Close its descriptors."""
        for descriptor in (self._pipe, self._board):
            os.close(descriptor)


class NodeAgent:
    """Watches over the workers of one pool on this node.

    Args:
        driver: Pid and start time of the driver's process, if it is on this node: everything here
            ends with it.
        inventory: Tells the GPUs of a machine.
        store_key: See `Exchange`.
    """

    def __init__(
        self, driver: tuple[int, float] | None, inventory: Inventory, store_key: str
    ) -> None:
        with contextlib.suppress(PermissionError):  # it is the head of a group already
            os.setpgid(0, 0)  # Ctrl-C in the driver's terminal is not for this process
        # SIGTERM ends it: Ray would let running calls return first, which `take` never does.
        # `signal.signal` is for main threads; SIG_DFL is a null pointer.
        ctypes.CDLL(None).signal(signal.SIGTERM, None)
        self._driver = driver
        self._telemetry = Telemetry(inventory)
        self._watched: dict[int, Watched | None] = {}  # by worker id; None: it had gone before
        self._marks: dict[int, str] = {}  # likewise
        self._mailbox: list[tuple[int, int, Any]] = []
        self._mailbox_bytes = 0
        self._has_mail = asyncio.Event()  # `take` waits for it, and `push` for the other
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_finished = False
        self._exchange = Exchange(self._pass_on, store_key)
        self._temporary = TemporaryFolder()
        self._tokens: dict[str, str | OSError] = {}  # of folders, from a driver elsewhere
        self._mps = Mps(self._temporary.path)
        self._mps_started: asyncio.Task[MpsState] | None = None

    async def watch(
        self, worker_id: int, process: WorkerProcess, gpus: Sequence[int], actor: Any
    ) -> None:
        """Take care of a worker from now on.

        Calls of an asynchronous actor may overtake each other: those about a worker take the answer
        to this one, so that Ray lets them wait for it.
        """
        if not self._watched:
            self._watch_driver()
        if worker_id in self._watched:
            return  # another agent was lost, and all workers are attached again
        self._watched[worker_id] = None
        self._marks[worker_id] = process.mark
        # it has gone already
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            self._watched[worker_id] = Watched(process, gpus, actor)
            self._telemetry.watch(gpus)

    def _watch_driver(self) -> None:
        if self._driver is None:
            return
        pid, created_at = self._driver
        self._driver = None
        # no such process on this machine, or Linux before 5.3: Ray ends what is here a little later
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            descriptor = os.pidfd_open(pid)
            if abs(psutil.Process(pid).create_time() - created_at) > 1:
                # another machine's numbers: the driver is connected from outside
                raise ProcessLookupError
            asyncio.get_running_loop().add_reader(descriptor, self._on_driver_gone)

    def _on_driver_gone(self) -> None:
        # at once: Ray will end this process too, and the children of workers would be left
        for watched in filter(None, self._watched.values()):
            others = watched.others()
            watched.kill()
            kill_all(others)
        os._exit(0)

    # --- end of workers ---------------------------------------------------------------------------

    async def signal(
        self, _: None, worker_id: int, attempt_id: int, task_id: int, wish: Signal, grace_s: float
    ) -> bool:
        """Pass on a wish for the slices of a task: to end them, now or early, or elsewhere.

        Returns:
            Whether a canceled one still runs after `grace_s`.
        """
        watched = self._watched.get(worker_id)
        if watched is None:
            return False
        is_cancel = wish is Signal.CANCEL
        deadline = time.monotonic() + grace_s
        pause_s = FIRST_LOOK_S
        try:
            watched.tell(attempt_id, task_id, wish)
            while True:
                watched.wake()
                while True:
                    await asyncio.sleep(min(pause_s, max(deadline - time.monotonic(), 0.001)))
                    pause_s = min(2 * pause_s, LONGEST_LOOK_S)
                    at_hand = watched.at_hand
                    is_running = at_hand[0] == attempt_id and at_hand[1] in (task_id, WHOLE)
                    if time.monotonic() > deadline:
                        return is_cancel and is_running
                    if watched.has_unread:
                        break  # signaled again: it was in native code, or imported a module
                    if not (is_cancel and is_running):
                        return False
        except (psutil.NoSuchProcess, BrokenPipeError):
            return False  # it is gone, and the call itself tells the driver

    async def oversee(self, _: None, worker_id: int, limit: int) -> int | None:
        """Wait until a worker's family uses more memory than this [bytes].

        Returns:
            How much it uses then; None when it has ended.
        """
        while (watched := self._watched.get(worker_id)) is not None and watched.is_alive:
            if await asyncio.to_thread(is_over, watched.pid, limit):
                return memory_used(watched.pid)
            await asyncio.sleep(MEMORY_LOOK_S)
        return None

    async def end(self, _: None, worker_id: int) -> None:
        """Kill the rest of a worker; return when nothing is left, not even on its GPU."""
        watched, mark = self._watched.pop(worker_id, None), self._marks.pop(worker_id, "")
        if watched is None:
            kill_all(marked(mark))
            return
        if self._mps.is_up and watched.at_hand != NOTHING:
            watched.freeze()  # else its code would notice, and go on
            await asyncio.to_thread(self._mps.terminate, family(watched.pid))
        others = watched.others()  # while it lives: without it, its children have other parents
        killed_at = time.monotonic()
        if watched.is_alive:
            ray.kill(watched.actor)  # else Ray would report a crash, at length
        while watched.is_alive and time.monotonic() < killed_at + GONE_TIMEOUT_S:
            if time.monotonic() > killed_at + BY_ITSELF_S:
                watched.kill()
            await asyncio.sleep(0.005)
        others += watched.others()  # made meanwhile
        kill_all(others)
        while any(map(_lives, others)) and time.monotonic() < killed_at + GONE_TIMEOUT_S:
            await asyncio.sleep(0.005)
        watched.close()
        self._telemetry.leave(watched.gpus)
        if watched.gpus and watched.memory_used is not None:
            read = functools.partial(self._telemetry.memory_used, watched.gpus)
            await memory_back(read, watched.memory_used)

    async def temporary(self) -> str:
        """Return the pool's temporary folder on this node, which ends with its processes here."""
        return str(self._temporary.path())

    async def token(self, folder: str) -> str | OSError:
        """Return a folder's token, by which workers elsewhere know whether they see it."""
        try:
            return await asyncio.to_thread(token_of, folder)
        except OSError as error:  # for the worker to raise: Ray would send another in its place
            return error

    async def learn(self, folder: str, token: str | OSError) -> None:
        """Note the token that the driver has found in a folder, or why it has found none."""
        self._tokens[folder] = token

    async def learned(self, folder: str) -> str | OSError | None:
        """Return the token that the driver has found; None if it has not looked."""
        return self._tokens.get(folder)

    # --- GPUs -------------------------------------------------------------------------------------

    async def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this node, whoever may use them."""
        return await self._telemetry.devices()

    async def gpu_readings(self) -> dict[int, GpuReading]:
        """Return the last readings of the workers' GPUs."""
        return self._telemetry.newest()

    async def utilization(self, gpu: int, since: float, until: float) -> float | None:
        """Return how busy a GPU was; see `Telemetry.utilization`."""
        return self._telemetry.utilization(gpu, since, until)

    async def mps(self, settings: Mapping[str, str]) -> MpsState:
        """Return the state of MPS for this node's workers; the first call starts it."""
        if self._mps_started is None:
            self._temporary.path()  # made here, not in two threads at once
            self._mps_started = asyncio.create_task(asyncio.to_thread(self._mps.start, settings))
        # others may still wait for it when this call is cancelled
        return await asyncio.shield(self._mps_started)

    # --- messages from workers --------------------------------------------------------------------

    async def push(self, worker_id: int, number: int, batch: bytes) -> None:
        """Take a batch from a worker, in order; return when there is room for more."""
        self._mailbox.append((worker_id, number, batch))
        self._mailbox_bytes += len(batch)
        self._has_mail.set()
        if self._mailbox_bytes > MAILBOX_BYTES:
            self._has_room.clear()
        # the worker's outbox waits for this answer; its tasks go on until that is full, too
        await self._has_room.wait()

    def _pass_on(self, queue: str, ticket: int, value: bytes) -> None:
        self._mailbox.append((OFFERED, ticket, (queue, value)))
        self._has_mail.set()

    async def take(
        self, answers: Sequence[tuple[int, str]] = ()
    ) -> list[tuple[int, int, Any]] | None:
        """Wait for messages and return them: (worker id, number of the batch, batch).

        Offers to a queue are (OFFERED, ticket, (queue, value)). None at the end, after `finish`.

        Args:
            answers: The outcomes of earlier offers: ticket, outcome.
        """
        for ticket, outcome in answers:
            await self._exchange.answer(ticket, outcome)
        # for as long as it takes: the driver has one such call open; `finish` ends the last
        await self._has_mail.wait()
        mail, self._mailbox, self._mailbox_bytes = self._mailbox, [], 0
        self._has_room.set()
        if self._is_finished:
            return mail or None
        self._has_mail.clear()
        return mail

    async def finish(self) -> None:
        """Note that all workers have ended, and stop their MPS."""
        if self._mps_started is not None:
            # first: once the driver hears the end below, it kills this process
            await asyncio.to_thread(self._mps.stop)
        self._is_finished = True
        self._has_mail.set()

    async def exchange(self, method: str, *args: Any) -> Any:
        """Call a method of the pool's exchange."""
        return await getattr(self._exchange, method)(*args)


async def memory_back(read: Callable[[], Awaitable[int | None]], before: int) -> None:
    """Wait until no more memory is in use than before [bytes], or it is unknown (None)."""
    # a GPU's driver takes its time after the end of a process
    used, since = await read(), time.monotonic()
    while used is not None and used > before and time.monotonic() < since + STEADY_S:
        await asyncio.sleep(0.02)
        now = await read()
        if now is None or now < used:
            used, since = now, time.monotonic()


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that a worker, and those it started, have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if process.environ().get(MARK, "") == mark != "":
                found.append(process)
    return found


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, but for resource trackers; they may take a moment.

    A resource tracker of `multiprocessing` removes what its processes have left in shared memory,
    and ends when they have.
    """
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            if not any("resource_tracker import main" in word for word in process.cmdline()):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# --- memory of worker processes -------------------------------------------------------------------


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_used(pid: int) -> int:
    """Return the memory that a process and its descendants have for themselves [bytes].

    Without files and shared memory (values in Ray's object store); what forked children share with
    their parent counts once.

    Source:
        Linux, proc(5): "Pss_Anon" in smaps_rollup; `is_over` first asks for "resident" less
        "shared" in statm, which is cheap.
    """
    return sum(map(_own, family(pid)))


def is_over(pid: int, limit: int) -> bool:
    """Return whether a process and its descendants use more memory than this [bytes]."""
    # the cheap question first
    return sum(map(_resident, family(pid))) > limit and memory_used(pid) > limit


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    members = [pid]
    for member in members:  # it grows meanwhile
        with contextlib.suppress(OSError):  # it has just ended
            for thread in Path(f"/proc/{member}/task").iterdir():
                members += map(int, (thread / "children").read_text().split())
    return members


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * PAGE_BYTES
    return 0


def _own(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has just ended, or the kernel is old
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


# --- use of a node's GPUs, read once a second while workers have them -----------------------------

LOOK_S = 1.0
"""How often the GPUs are read [s]; the driver averages over the last 1/6 s to 1 s."""

ANSWER_S = 3.0
"""How long to wait for the memory in use [s]."""

STALE_S = 5.0
"""Readings older than this are out of date: the GPUs' driver has stopped answering [s]."""

KEPT = 3600
"""How many readings of each GPU are kept: an hour."""


class Reading(NamedTuple):
    """The state of a GPU at some time [s since the epoch]; None: unknown."""

    taken_at: float
    utilization: float | None
    used_bytes: int | None
    total_bytes: int | None = None


class Telemetry:
    """Reads the GPUs of a node every `look_s` seconds; for one event loop."""

    def __init__(self, inventory: Inventory, look_s: float = LOOK_S) -> None:
        self._inventory = inventory
        self._look_s = look_s
        # a GPU's driver in trouble may take long to answer, and must not hold up the agent
        self._asking = ThreadPoolExecutor(1, "raypool-telemetry")
        self._users: Counter[int] = Counter()  # by GPU
        self._readings: dict[int, deque[Reading]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this node as they are now."""
        return await asyncio.get_running_loop().run_in_executor(
            self._asking, lambda: gpus_here(self._inventory)[0]
        )

    async def memory_used(self, gpus: Sequence[int]) -> int | None:
        """Return these GPUs' memory in use [bytes]; None if unknown, or not told in time."""
        if not gpus:
            return 0
        asked = asyncio.get_running_loop().run_in_executor(
            self._asking, self._inventory.memory_used, gpus
        )
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        except TimeoutError:  # its thread still waits for the GPU's driver
            return None

    def watch(self, gpus: Iterable[int]) -> None:
        """Read these GPUs from now on, until as many `leave` them."""
        self._users.update(gpu for gpu in gpus if gpu >= 0)
        if self._users and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def leave(self, gpus: Iterable[int]) -> None:
        """Stop reading GPUs that nobody else watches; their readings are kept."""
        self._users -= Counter(gpu for gpu in gpus if gpu >= 0)
        if not self._users and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            gpus = list(self._users)
            cards = await loop.run_in_executor(self._asking, self._inventory.load, gpus)
            now = time.time()
            for card in cards:
                reading = Reading(now, card.utilization, card.used_bytes, card.total_bytes)
                self.note(card.index, reading)
            await asyncio.sleep(self._look_s)

    def note(self, gpu: int, reading: Reading) -> None:
        """Add a reading of a GPU."""
        self._readings.setdefault(gpu, deque(maxlen=KEPT)).append(reading)

    def newest(self) -> dict[int, GpuReading]:
        """Return the last reading of each GPU, unless that is stale."""
        since = time.time() - STALE_S
        newest = {gpu: readings[-1] for gpu, readings in self._readings.items()}
        return {
            gpu: GpuReading(reading.used_bytes, reading.total_bytes, reading.utilization)
            for gpu, reading in newest.items()
            if reading.taken_at >= since and reading.used_bytes is not None
        }

    def utilization(self, gpu: int, since: float, until: float) -> float | None:
        """Return the part of the time between two times [s since the epoch] that a GPU computed, 0
        to 1; None: unknown.
        """
        rates = [
            reading.utilization
            for reading in self._readings.get(gpu, ())
            if since <= reading.taken_at <= until and reading.utilization is not None
        ]
        return fmean(rates) if rates else None
