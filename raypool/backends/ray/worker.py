"""The actor of a worker on Ray (`PoolWorker`), and what its process needs around it.

`WorkerFolders` are its machine's folders, `WorkerLink` is its connection to the pool, and `pin`
limits the process to its GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import pickle
import platform
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from multiprocessing import popen_fork
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import psutil
import ray

from raypool.backends.ray import fork_client, mps
from raypool.backends.ray.calls import answer_to, given_gpus
from raypool.backends.ray.node_agent import MARK, WorkerProcess, kill_all
from raypool.backends.ray.packing import (
    Fetched,
    Packed,
    Parcel,
    ParcelKeeper,
    Sendable,
    dump,
    join,
    load,
    pack_narrowed,
    pack_results,
    snapshot,
    unpack,
)
from raypool.channel import capture
from raypool.channel.by_value import call_setup, note_globals, share_left, teach_multiprocessing
from raypool.channel.capture import Forwarder, Levels
from raypool.channel.constants import discard_all, is_any_here
from raypool.channel.hub import Outbox
from raypool.channel.queues import LOOK_AGAIN_S
from raypool.channel.records import Part, Refusal, WorkerInfo, function_name
from raypool.channel.users_code import CapturedModels, Follower, Snapshot, reload_all
from raypool.errors import InvalidValueError, TaskError, WorkerLostError
from raypool.gpus.devices import Inventory, index_of, prefer_fast_links, uuid_of
from raypool.gpus.memory import kept
from raypool.gpus.sharing import fraction_for
from raypool.worker.folders import CheckpointFolders, hold, sees
from raypool.worker.gpu_memory import GpuMemoryCare, LeftoverMemory
from raypool.worker.gpu_turns import GpuLoad, GpuTurns, Sharing
from raypool.worker.interrupts import ProcessGuard, terminate
from raypool.worker.runner import (
    HandBack,
    NarrowedCall,
    OpenCall,
    RawResult,
    Surroundings,
    Watch,
    run_parts,
    set_up,
)
from raypool.worker.running import let_notes_travel, this_process

COLLECT_BYTES = 16 * 1024 * 1024
"""A process that has grown by this much collects garbage when it forgets a function, even if a call
waits.
"""

DRAIN_TIMEOUT_S = 2.0
"""How long an ending worker waits for its last messages to be sent [s]."""

TRACKERS = tuple(
    f"{package}.resource_tracker"
    for package in ("multiprocessing", "joblib.externals.loky.backend", "loky.backend")
)
"""Modules with a process that removes what nobody has unlinked: shared memory and semaphores."""

TRACKERS_TIMEOUT_S = 2.0
"""How long an ending worker waits for these processes [s]."""

NEXT_HOME_S = 10.0
"""How long a worker waits for the next home agent [s]: seconds, unless the machine has gone."""

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class News(NamedTuple):
    """News for a worker; None if nothing has changed.

    New functions and those to forget, the driver's modules, log levels and warning filters.
    """

    functions: dict[int, Packed]
    stale: Sequence[int]
    project: Snapshot | None
    levels: Levels | None
    filters: tuple[bytes, ...] | None


def pack_call(
    attempt_id: int, parts: Sequence[Part], news: News, is_spent: bool, behind: int | None
) -> Parcel:
    """Pack a call for `PoolWorker.run`.

    `is_spent`: the worker has asked to be replaced, and is to run this nevertheless. `behind`: the
    call that this one waits for.
    """
    functions, stale, project, levels, filters = news
    # one pickle of plain tuples: Ray would take each argument, and each named tuple, by itself
    told = (
        functions,
        stale,
        project and tuple(project),
        None if levels is None else tuple(levels),
        filters,
    )
    call = (attempt_id, [tuple(part) for part in parts], told, is_spent, behind)
    if all(isinstance(part.items, bytes) for part in parts) and all(
        isinstance(fn, bytes) for fn in functions.values()
    ):
        return Parcel(pickle.dumps(call, protocol=5), [], [])
    return dump(call)


class CallAnswer(NamedTuple):
    """The status of a call, as `PoolWorker.run` returns it, without large values.

    Attributes:
        slices: Their outcomes, from `pack_results`.
        said: The newest batch of reports and output, with its number; before it, one on its way.
        fetched_bytes: How much was read from the object store.
        load: The load of a shared GPU.
        header: The values, if they are small.
        leftover: GPU memory left, if too much.
        other_modules: Modules unlike the driver's: name, file, host.
        changed_models: Functions that changed a captured model, with its name.
    """

    slices: list[Sendable]
    said: list[tuple[int, bytes]]
    fetched_bytes: int
    load: GpuLoad | None
    header: bytes | None
    leftover: LeftoverMemory | None
    other_modules: list[tuple[str, str, str]]
    changed_models: list[tuple[str, str]]


class Introduction(NamedTuple):
    """Who a worker is, and how to reach its process.

    `mps_problem`: why it does without MPS, if that was wanted. `fork_problem`: why it is no fork
    of the fork server.
    """

    info: WorkerInfo
    process: WorkerProcess
    node_id: str
    mps_problem: str | None = None
    fork_problem: str | None = None


class PoolWorker:
    """The actor of one worker. Its methods run in the process's main thread, one after the other.

    Args:
        index: Its number in the pool.
        worker_id: The number of this process among all that the pool starts.
        inventory: Tells the GPUs of a machine.
        sharing: How it shares its GPU with other workers, if it does.
        max_leftover_bytes: How much GPU memory its tasks may leave allocated.
    """

    def __init__(
        self,
        index: int,
        worker_id: int,
        inventory: Inventory,
        sharing: Sharing | None,
        max_leftover_bytes: int | None,
    ) -> None:
        this_process.is_worker = True
        teach_multiprocessing()
        let_notes_travel()
        with contextlib.suppress(PermissionError):  # it is the head of a group already
            os.setpgid(0, 0)  # so that its children can be ended with it
        # and those of its children, which would be init's otherwise
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        capture.install()
        self._forwarder = Forwarder()
        self._warning_filters = WarningFilters()
        sys.breakpointhook = refuse_breakpoint
        os.environ.pop("PYTHONBREAKPOINT", None)  # Ray's, for children of this process
        self._worker_id = worker_id
        self._inventory = inventory
        self._guard = ProcessGuard()
        if "RAYPOOL_SLURM" in os.environ:
            # Slurm sends SIGTERM to every process when it takes the nodes back: the launcher of
            # Ray has blocked it, and tasks are told otherwise. Not blocked for what tasks start.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            # forked children ignore it as well, and `Pool` would wait for them forever
            popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]
        else:
            signal.signal(signal.SIGTERM, terminate)
        self._sharing = sharing
        self._max_leftover_bytes = max_leftover_bytes
        self._upkeep: GpuMemoryCare | None = None
        self._is_spent = False  # it has said that it is to be replaced
        self._turns: GpuTurns | None = None
        self._agents = Succession()
        self._folders = WorkerFolders()
        self._outbox = Outbox(self._push)
        self._packed: dict[int, Packed] = {}  # functions that were not called yet
        self._functions: dict[int, Callable[..., Any]] = {}
        self._last_id = -1  # of the function that ran last
        self._models: dict[int, CapturedModels] = {}  # of each of these
        self._process = psutil.Process()
        self._used_bytes = self._process.memory_info().rss  # after the last collection
        self._keeper = ParcelKeeper()
        self._follower = Follower()
        self._outdated: list[ModuleType] = []  # modules that the driver has in another version
        self._is_set_up = False  # what a setup has made may be in modules
        # Where workers share a GPU, the driver weighs each call as a whole.
        self._early = HandBack(Watch(), self._tell_early) if sharing is None else None
        self._info = WorkerInfo(index, platform.node(), os.getpid())

    def introduce(self, agent: Any, project: Snapshot | None) -> Introduction | str:
        """Check that this process sees exactly the GPUs that it was given.

        `project` is the driver's modules; `agent` starts MPS, unless it is None.

        Returns:
            Who it is, or the problem.
        """
        prefer_fast_links(os.environ)
        if project is not None:
            self._follower.follow(project)
        given = given_gpus()
        problem = pin(given, os.environ)
        if problem is not None:
            return problem
        mps_problem = _enter_mps(agent) if agent is not None else None
        found = [self._inventory.find(device) for device in given]
        pairs = list(zip(given, found, strict=True))
        self._info = WorkerInfo(
            self._info.index,
            self._info.host,
            self._info.pid,
            tuple(itertools.starmap(index_of, pairs)),
            tuple(filter(None, itertools.starmap(uuid_of, pairs))),
            found[0].name if found and found[0] is not None else None,
        )
        before = self._inventory.memory_used(self._info.gpus)  # the setup may use them
        if given:
            total_bytes = found[0].total_bytes if found[0] is not None else None
            self._upkeep = GpuMemoryCare(
                self._inventory.allocator(), self._info, total_bytes, self._max_leftover_bytes
            )
            if self._sharing is not None:
                share = fraction_for(self._sharing.num_workers, total_bytes)
                self._upkeep.share = share
                if share < 1:
                    self._inventory.allocator().limit(share)
                if self._sharing.takes_turns:
                    folder = self._folders.temporary
                    self._turns = GpuTurns(self._inventory, given[0], share, folder)
        mark = os.environ[MARK] = uuid.uuid4().hex
        process = WorkerProcess(os.getpid(), self._guard.pipe, self._guard.board, mark, before)
        fork_problem = os.environ.pop(fork_client.REFUSED, None)
        node_id = ray.get_runtime_context().get_node_id()
        return Introduction(self._info, process, node_id, mps_problem, fork_problem)

    def attach(self, here: tuple[Any, str, int], home: tuple[Any, str, int], is_far: bool) -> None:
        """Take the agent of this node, and the home agent, which has the pool's exchange.

        Called again with others when they have died. `is_far`: the driver is on neither's machine.
        """
        self._agents = Succession(*here)
        homes = self._agents if home == here else Succession(*home)
        self._folders.attach(self._agents, homes, is_far)
        this_process.link = WorkerLink(self._worker_id, self._outbox, homes)

    def _push(self, number: int, batch: bytes) -> None:
        agents = self._agents  # once: `attach` may set another meanwhile
        agent = agents.newest
        try:
            ray.get(agent.push.remote(self._worker_id, number, batch))
        except ray.exceptions.RayActorError:
            agents.find_next(agent, 0)  # it is called again
            raise

    def set_up(self, setups: Sequence[Any]) -> Refusal | None:
        """Call the setups, which are a parcel.

        Returns:
            The problem, if one has failed.
        """
        self._is_set_up = True
        try:
            set_up(
                [functools.partial(call_setup, unpack(setup)) for setup in load(Parcel(*setups))],
                self._info,
            )
        except (Exception, SystemExit) as error:  # the user's code must not end the actor
            words = "".join(traceback.format_exception_only(error)).strip()
            return Refusal(f"setup= or initializer= raised {words}")
        if self._upkeep is not None:
            self._upkeep.begin_anew()
        return None

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def run(self, call: bytes, refs: Sequence[Any] = ()) -> tuple[bytes, tuple[Any, ...] | None]:
        """Run a call, packed by `pack_call`.

        Returns:
            A pickled `CallAnswer`, and the values if they are large: separate objects, so that the
            driver reads the first only, and a large value stays in the object store until somebody
            asks.
        """
        fetched_before = Fetched.num_bytes
        attempt_id, fields, told, is_known, behind = load(Parcel(call, [], list(refs)))
        functions, stale, project, levels, filters = told
        parts = [Part(*entries) for entries in fields]
        del call, refs, fields, told
        self._guard.begin_call(attempt_id)
        if levels is not None:
            self._forwarder.heed(Levels(*levels))
        self.forget(stale, is_idle=False)
        self._packed.update(functions)
        if project is not None:
            self._follower.follow(Snapshot(*project))
            self._outdated = self._follower.outdated()
        if filters is not None:
            self._warning_filters.follow(filters)  # their categories may be in the driver's modules
        must_run = is_known or parts[0].is_rank
        if self._outdated and not self._renew_modules(must_run or bool(kept.treasures)):
            self._is_spent = True
        is_too_late = self._is_spent and not must_run  # the driver had sent it before it knew that
        if is_too_late or (self._early is not None and self._early.is_behind(behind)):
            results = [RawResult(part.start) for part in parts]
        else:
            results = self._run_parts(attempt_id, parts)
        parcel = join([value for result in results for value in result.values])
        self._keeper.release()  # Ray takes what is returned before it calls again
        slices = pack_results(results)
        for result in results:
            # each exception holds what its function had, and the result, which holds it
            result.discard()
        del results
        leftover = self._settle(parts)
        said, fetched = self._outbox.answer(), Fetched.num_bytes - fetched_before
        load_now = None if self._turns is None else self._turns.weigh()
        header, large = (parcel.header, None) if parcel.is_small else (None, parcel.for_ray())
        others = self._follower.others() if not self._outdated else ()
        # in the order of `CallAnswer`; plain, since the pickle of a named tuple takes 2 us more
        answer = (
            slices,
            said,
            fetched,
            load_now,
            header,
            leftover,
            [(*other, self._info.host) for other in others],
            self._changed_models(parts),
        )
        self._guard.end_call()
        return pickle.dumps(answer, protocol=5), large

    def _renew_modules(self, must_run: bool) -> bool:
        """Reload outdated modules; False if this process is to be replaced instead."""
        # a reload would lose what a setup left in modules, and mix up classes of constants
        if (self._is_set_up or is_any_here()) and not must_run:
            return False
        try:
            reload_all(self._outdated)
        except Exception:
            if not must_run:
                return False  # a new process imports it, and each item fails if that does
        self._outdated = []
        return True

    def _run_parts(self, attempt_id: int, parts: Sequence[Part]) -> list[RawResult]:
        here = Surroundings(
            self._info,
            self._function,
            unpack,
            self._guard,
            self._outbox.say,
            self._keeper,
            folders=self._folders,
            upkeep=self._upkeep,
            turns=self._turns,
            early=self._early,
        )
        return run_parts(attempt_id, parts, here)

    def _tell_early(self, call: OpenCall, narrowed: NarrowedCall) -> None:
        # the answer will have all of it once more, in case this gets lost
        self._outbox.send("early", narrowed.attempt_id, pack_narrowed(narrowed))

    def _settle(self, parts: Sequence[Part]) -> LeftoverMemory | None:
        """Handle GPU memory that a call has left; return it if it is too much."""
        if this_process.is_retired or self._outdated:
            self._is_spent = True
            return LeftoverMemory("", None, is_spent=True)
        if self._upkeep is None:
            return None
        fn_id, name = parts[0].fn_id, parts[0].name
        fn = self._functions.get(fn_id)
        leftover = self._upkeep.settle(function_name(fn) if fn is not None else str(name))
        self._is_spent = leftover is not None and leftover.is_spent
        return leftover

    def _changed_models(self, parts: Sequence[Part]) -> list[tuple[str, str]]:
        """Return the functions that have changed a model that they capture, with its name, once."""
        changed = []
        for fn_id in {part.fn_id for part in parts}:
            model = self._models[fn_id].changed() if fn_id in self._models else None
            if model is not None:
                changed.append((function_name(self._functions[fn_id]), model))
        return changed

    def _function(self, fn_id: int) -> Callable[..., Any]:
        fn = self._functions.get(fn_id)
        if fn is None:
            self._last_id = -1  # if it was forgotten, it is another object now
            with kept.on_purpose():
                fn = self._functions[fn_id] = unpack(self._packed[fn_id])
                share_left(fn)
            self._models[fn_id] = CapturedModels(fn)
            del self._packed[fn_id]
        if fn_id != self._last_id:
            note_globals(fn)
            self._last_id = fn_id
        return fn

    def forget(self, fn_ids: Sequence[int], is_idle: bool = True) -> None:
        """Drop functions that will not be called again, and everything that they hold."""
        if not fn_ids:
            return
        for fn_id in fn_ids:
            for known in (self._functions, self._packed, self._models):
                known.pop(fn_id, None)
        used = self._process.memory_info().rss
        # Functions and their globals refer to each other: only the collector frees these. It takes
        # 0.1 s in a process with torch, so before a call only where the process has grown.
        if is_idle or used > self._used_bytes + COLLECT_BYTES:
            gc.collect()
            used = self._used_bytes = self._process.memory_info().rss
        self._used_bytes = min(self._used_bytes, used)

    def wind_up(self, teardowns: Sequence[Packed]) -> str | None:
        """Clean up constants and call the teardown; return the traceback of a failure."""
        problems = []

        def tear_down() -> None:
            for teardown in teardowns:
                unpack(teardown)()

        try:
            for chore in (discard_all, tear_down):  # each, whatever the other raises
                try:
                    set_up([chore], self._info)
                except (Exception, SystemExit) as error:  # the driver warns of it
                    problems.append("".join(traceback.format_exception(error)))
        finally:
            self._outbox.drain(DRAIN_TIMEOUT_S)
        stop_trackers()
        return "\n".join(problems) or None


def stop_trackers() -> None:
    """Stop the resource trackers, which then clean up: Ray kills them with this process."""
    found = [sys.modules[name]._resource_tracker for name in TRACKERS if name in sys.modules]
    running = [tracker for tracker in found if tracker._fd is not None]
    if not running:
        return
    # a tracker waits until all its users have ended; torch's handler would raise at their ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_all(psutil.Process().children(recursive=True))

    def stop() -> None:
        for tracker in running:
            with contextlib.suppress(ChildProcessError):  # another process has started it
                tracker._stop()

    # in a thread: a detached process may still use a tracker, which then does not end
    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(TRACKERS_TIMEOUT_S)


def refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    """Raise an error where a task calls `breakpoint()`: Ray would silently wait for a debugger."""
    raise TaskError(
        "breakpoint() was reached in a task on Ray, which has no terminal. Call the function with"
        " profile='inline', or run one item of a saved run in pdb: raypool replay RUN_DIR ITEM"
        " --debug."
    )


def name_of_agent(names: str, number: int) -> str:
    """Return the name of an agent, of which its node has had `number`."""
    return f"{names}-{number}"


class Succession:
    """The agents of a node, of which `newest` is the last that is known.

    The pool announces the next by a call, which this actor takes only after its task: until then,
    it is found by its name.
    """

    def __init__(self, newest: Any = None, names: str = "", number: int = 0) -> None:
        self.newest = newest
        self._names = names
        self._number = number

    def find_next(self, died: Any, timeout_s: float) -> None:
        """Find the successor of an agent, unless another thread has."""
        deadline = time.monotonic() + timeout_s
        while self.newest is died and ray.is_initialized():
            number = self._number + 1  # first: two threads that find the same count it once
            with contextlib.suppress(ValueError):  # there is none yet
                self.newest = ray.get_actor(name_of_agent(self._names, number))
                self._number = number
                return
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_AGAIN_S)


class WorkerFolders(CheckpointFolders):
    """The folders of a worker's machine, of which the agents know."""

    def __init__(self) -> None:
        super().__init__(self._temporary_of_node)
        self._agents = self._homes = Succession()
        self._is_far = False
        self._temporary: Path | None = None

    def attach(self, agents: Succession, homes: Succession, is_far: bool) -> None:
        """Take the agents of this node and the home agents; `is_far`: not the driver's machine."""
        self._agents, self._homes, self._is_far = agents, homes, is_far

    def _temporary_of_node(self) -> Path:
        if self._temporary is None:
            self._check_may_ask()
            self._temporary = Path(answer_to(self._agents.newest.temporary.remote()))
            hold(self._temporary)  # else it could go with the agent, before this process ends
        return self._temporary

    def check_shared(self, folder: str) -> None:
        """Raise an error unless this machine and the driver's see the same folder.

        Raises:
            OSError: The driver's machine cannot make the folder.
            InvalidValueError: This is another folder, or none.
        """
        if self._agents is self._homes and not self._is_far:  # the same machine
            return
        self._check_may_ask()
        home = self._homes.newest
        asked = home.learned.remote(folder) if self._is_far else home.token.remote(folder)
        token = answer_to(asked)
        if isinstance(token, OSError):
            raise token
        if token is not None and sees(folder, token):
            return
        where = (
            "which is outside of the cluster"
            if self._is_far
            else "and that machine does not share it with this one"
        )
        raise InvalidValueError(
            f"This item runs on the machine {platform.node()}, where its checkpoints cannot be"
            f" kept: {folder} is a folder of the machine that opened the pool, {where}. Use a"
            " folder that all machines share, or a URL:"
            " pool.options(checkpoints='s3://bucket/folder'), also beside a run_dir."
        )

    def _check_may_ask(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidValueError(
                "A forked child process (such as a DataLoader's) cannot find its task's"
                " checkpoints. Read current_task().checkpoint_dir in the task itself first."
            )


class WorkerLink:
    """This process's connection to its pool: an `ExchangeClient` that also sends messages.

    `send` returns at once, unless far too much is on its way. `send_latest` is for queues that keep
    the newest values. `drain` waits until what was sent has arrived; `flush` sends what waits.
    """

    def __init__(self, worker_id: int, outbox: Outbox, homes: Succession) -> None:
        self.worker_id = worker_id
        self.send, self.send_latest, self.drain = outbox.send, outbox.send_latest, outbox.drain
        self.flush = outbox.send_now
        self._homes = homes

    def pack(self, value: Any, what: str) -> bytes:
        """Pickle a value as it is now."""
        return snapshot(value, what)

    def unpack(self, packed: bytes) -> Any:
        """Return the value that was pickled."""
        return pickle.loads(packed)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the pool's exchange and wait for its answer; a cancelled task need not.

        Raises:
            WorkerLostError: The exchange's process has died.
            PoolClosedError: The pool has ended.
        """
        home = self._homes.newest
        try:
            return answer_to(home.exchange.remote(method, *args))
        except WorkerLostError:
            self._homes.find_next(home, NEXT_HOME_S)  # what is tried again at once is to find it
            raise


def _enter_mps(agent: Any) -> str | None:
    """Let this process use MPS, started by the agent if need be; return why it does not."""
    if mps.is_chosen(os.environ):
        return None
    try:
        state = ray.get(agent.mps.remote(mps.settings(os.environ)), timeout=mps.ANSWER_S)
    except ray.exceptions.RayError as error:  # also no answer in time; it can do without MPS
        return f"the agent of its node has not answered ({type(error).__name__})"
    return mps.enter(state, os.environ)


def pin(given: Sequence[str], environ: MutableMapping[str, str]) -> str | None:
    """Make exactly these devices visible before anything touches CUDA; return the problem."""
    # CUDA would count the fastest first, Ray and nvidia-smi do not
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    names = map(str.strip, environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    visible = list(filter(None, names))
    if not given or not visible:
        # Ray lets a worker without a GPU see them all, and sets nothing where it was told to set
        # nothing.
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)
    elif list(given) != visible:
        return (
            f"it was given GPU {', '.join(given)}, but something has set"
            f" CUDA_VISIBLE_DEVICES={','.join(visible)} there"
        )
    return None


# --- the script's filters for warnings, in its workers too; they travel with calls when changed ---

Filter: TypeAlias = tuple[Any, ...]
"""An entry of `warnings.filters`."""

PYTHONS_OWN: tuple[Filter, ...] = (
    ("default", None, DeprecationWarning, "__main__", 0),
    ("ignore", None, DeprecationWarning, None, 0),
    ("ignore", None, PendingDeprecationWarning, None, 0),
    ("ignore", None, ImportWarning, None, 0),
    ("ignore", None, ResourceWarning, None, 0),
)

with warnings.catch_warnings():  # while this is imported: it must not happen in a thread
    warnings.resetwarnings()
    # there is no public way to read them
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    _begun_with = (*warnings.filters, *PYTHONS_OWN)
    # what nobody has set in the script: `python -W` is about one process, and workers have
    # PYTHONWARNINGS themselves

_seen: list[Filter] = []
_packed: tuple[bytes, ...] = ()


def filters_here() -> tuple[bytes, ...]:
    """Return the script's filters, pickled; the same object as long as none has changed."""
    global _seen, _packed
    if warnings.filters != _seen:
        _seen = list(warnings.filters)
        packed = []
        for each in _seen:
            if each not in _begun_with:
                with contextlib.suppress(Exception):  # only this process can make its category, say
                    packed.append(snapshot(each, "a filter for warnings"))
        _packed = tuple(packed)
    return _packed


class WarningFilters:
    """Keeps this worker's filters up to date with the script's."""

    def __init__(self) -> None:
        self._begun_with = list(warnings.filters)
        self._taken: list[Filter] = []

    def follow(self, packed: Sequence[bytes]) -> None:
        """Take the script's filters; those that a setup or task has set here come first."""
        before, self._taken = self._taken, []
        for each in packed:
            with contextlib.suppress(Exception):  # a category of a module that is not here
                self._taken.append(pickle.loads(each))
        later = [
            each
            for each in warnings.filters
            if each not in (*before, *self._taken, *self._begun_with)
        ]
        warnings.resetwarnings()  # so that what has been warned of is looked at again
        filters: Any = warnings.filters
        filters.extend([*later, *self._taken, *self._begun_with])
