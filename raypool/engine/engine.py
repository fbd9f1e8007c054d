"""The engine of a pool: its driver, its backend and the functions that workers know.

Also here: single calls, serial engines for work inside a task, and the end of all pools when the
interpreter exits or forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from raypool.backends.base import Backend, Post
from raypool.channel.constants import discard
from raypool.channel.hub import Hub
from raypool.channel.records import Function, Refusal, WorkerInfo, function_name
from raypool.channel.store import FindWay, ValueStore
from raypool.channel.traffic import Traffic
from raypool.channel.users_code import Project, Snapshot, generators_of
from raypool.core.messages import ResizeRequested, ShutdownRequested
from raypool.core.model import PoolState
from raypool.core.scheduler import Scheduler
from raypool.engine import explanations
from raypool.engine.driver import Driver
from raypool.engine.explanations import Tell
from raypool.engine.inbox import Inbox, InlineInbox, ThreadInbox
from raypool.engine.work import CallWork
from raypool.errors import (
    InvalidValueError,
    PoolBrokenError,
    PoolClosedError,
    ResourceError,
    SerializationError,
    StartupError,
)
from raypool.futures import Future, dispatcher
from raypool.gpus.nvml import NvmlInventory
from raypool.options import Options, Where
from raypool.profiles import Profile
from raypool.worker.running import in_task, this_process

if TYPE_CHECKING:
    from pathlib import Path

    from raypool.engine.trace import TraceWriter
    from raypool.watch.watch_page import WatchPage

KNOWN_BYTES = 1024 * 1024
"""The size of the pickled functions that are remembered, to know one that is called again."""

BY_VALUE = b"cloudpickle"
"""In the pickle of a function that has its code with it: of a script, a notebook or a closure."""

EXIT_GRACE_S = 5.0
"""The time for unfinished work when the interpreter exits normally [s]."""

EXIT_TIMEOUT_S = 10.0
"""The time for a pool to end after that, and then for `after_each` [s]."""

Call = Callable[[], object]

logger = logging.getLogger("raypool")


def say(text: str) -> None:
    """Print a line for the user, if the process has a standard output that somebody reads."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken, closed
        sys.stdout.write(f"raypool: {text}\n")
        sys.stdout.flush()


def as_is(value: Any) -> Any:
    """Return a value that does not travel."""
    return value


Key = tuple[bytes, int]
"""A pickled function, and the number of the snapshot of the user's modules at that time."""


class Known(NamedTuple):
    """The number of a function, and the function itself if workers are to keep it."""

    fn_id: int
    function: Function | None


class Engine:
    """Runs a pool. It does not know the pool object, so that a forgotten pool can be collected.

    Args:
        profile: Where it runs.
        inbox: Where events for the driver arrive.
        make_backend: Makes the backend, given the driver's `post`, the hub, and the traffic
            counter.
        unpack: Undoes what the backend's `pack` does, on any worker.
    """

    def __init__(
        self,
        profile: Profile,
        inbox: Inbox,
        make_backend: Callable[[Post, Hub, Traffic], Backend],
        unpack: Callable[[Any], Any] = as_is,
    ) -> None:
        self.profile = profile
        self.constants: list[str] = []  # by key
        self._unpack = unpack
        self.hub = Hub()
        # without a thread, no timer would fire
        idle_timeout_s = profile.idle_timeout_s if inbox.is_threaded else None
        scheduler = Scheduler(profile.start_timeout_s, idle_timeout_s)
        self._trace: TraceWriter | None = None
        if profile.trace is not None:
            from raypool.engine.trace import TraceWriter

            self._trace = TraceWriter(
                profile.trace,
                start_timeout_s=profile.start_timeout_s,
                idle_timeout_s=idle_timeout_s,
            )
        self.driver = Driver(
            scheduler,
            inbox,
            self.hub,
            Tell(logger.warning, self._note, self._clean_up),
            self._trace,
        )
        self.traffic = Traffic()
        self.backend = make_backend(self.driver.post, self.hub, self.traffic)
        self.find_way: FindWay = self.backend.find_way
        # Those in use, by whoever holds them: when nobody does, workers forget the function, with
        # all that its global variables have come to hold there.
        self._functions: weakref.WeakValueDictionary[Key, Function] = weakref.WeakValueDictionary()
        # Those of late: they keep their number, and with it what is known of their pace.
        self._known: OrderedDict[Key, Known] = OrderedDict()
        self._known_bytes = 0
        self._project = Project() if profile.backend == "ray" else None
        self._function_ids = itertools.count()
        self._lock = threading.Lock()  # of the functions: any thread submits
        self._size_lock = threading.Lock()  # one thread at a time adds or removes workers
        self.is_closing = False
        self._why_closed = "The pool was shut down. Open another with parpool()."
        self.helpers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._has_noted = False
        self.run_dir: Path | None = None  # of the newest loop that has one
        self.pages: dict[Path, WatchPage] = {}  # live pages, by run
        self._searched: set[tuple[str, Any]] = set()  # functions, for generators of their own
        self.driver.start(self.backend)
        _engines.add(self)

    def _note(self, text: str) -> None:
        # once: a pool that is used now and then parks its workers again and again
        is_news, self._has_noted = not self._has_noted, True
        # threads have no memory that would be freed
        if is_news and not self.profile.quiet and self.profile.backend == "ray":
            say(text)

    def _clean_up(self) -> None:
        try:
            discard(self.constants)  # those used in this process
        except Exception:
            logger.exception("The cleanup of a constant failed.")
        for page in self.pages.values():
            page.close()

    def check_open(self) -> None:
        """Make sure that the pool still takes work.

        Raises:
            PoolClosedError: The pool was shut down, or its driver has ended.
            PoolBrokenError: No worker is left.
        """
        if self.driver.crash is not None:
            raise self.driver.crash_error()
        if self.driver.scheduler.state is PoolState.BROKEN:
            raise self.driver.preempted_error() or PoolBrokenError(
                "No worker of the pool is left or can be restarted. Open another with parpool()."
            )
        if self.is_closing or self.driver.closed.is_set():
            raise PoolClosedError(self._why_closed)

    def function(self, fn: Callable[..., Any], users: Callable[..., Any] | None = None) -> Function:
        """Return a function ready to be shipped: the same object for the same code and closure.

        `users`: the user's function in `fn`, if `fn` is raypool's own and holds nothing else.
        """
        users = fn if users is None else users
        name = function_name(fn)
        # every time: what it refers to may have changed since the last call
        packed = self.backend.pack(fn, f"the function {name}")
        project = self.project()
        with self._lock:
            if not isinstance(packed, bytes):
                return Function(next(self._function_ids), packed, name, project)
            key = packed, 0 if project is None else project.number
            known = self._known.get(key)
            function = (known and known.function) or self._functions.get(key)
            if known is not None:
                self._known.move_to_end(key)  # the first is forgotten first
                if function is not None:
                    return function
            if function is None:
                fn_id = next(self._function_ids) if known is None else known.fn_id
                function = self._functions[key] = Function(fn_id, packed, name, project)
            # workers keep one that they find by its name: its variables are its module's
            is_by_name = (
                isinstance(users, (types.FunctionType, types.BuiltinFunctionType, type))
                and BY_VALUE not in packed
            )
            self._known[key] = Known(function.fn_id, function if is_by_name else None)
            self._known_bytes += len(packed) if known is None else 0
            while self._known_bytes > KNOWN_BYTES:
                (oldest, _), _ = self._known.popitem(last=False)
                self._known_bytes -= len(oldest)
            return function

    def project(self) -> Snapshot | None:
        """Return the user's modules as they are now; None if the workers are in this process."""
        return None if self._project is None else self._project.look()

    def anew(self, function: Function) -> Function:
        """Return a function under another number: each worker opens it again."""
        fn_id = next(self._function_ids)
        return Function(fn_id, function.packed, function.name, function.project)

    def warn_of_generators(self, fn: Callable[..., Any]) -> None:
        """Warn, once for a function, of random generators that it uses: each worker has copies."""
        name = function_name(fn)
        key = name, getattr(fn, "__code__", None)
        # in this process there are no copies: items draw in turn, as in a loop without a pool
        if self.profile.backend != "ray" or key in self._searched:
            return
        self._searched.add(key)
        found = generators_of(fn)
        if found:
            logger.warning(
                "%s draws from %s, and each worker has its own copy of it: different workers draw"
                " the same random numbers, and the next run draws others. Use parfor with seed=0,"
                " which seeds it for each item, or create the generator in the function, seeded by"
                " its item or rank.",
                name,
                ", ".join(
                    dict.fromkeys(f"the generator {generator.name}".rstrip() for generator in found)
                ),
            )

    @functools.cached_property
    def store(self) -> ValueStore:
        """The value store that the pool and its tasks share."""
        return ValueStore(self.find_way())

    def opener(self, value: Any, what: str) -> Callable[[], Any]:
        """Return a small function that gives this value wherever it is called; it is shipped once.

        Raises:
            SerializationError: The value cannot travel.
        """
        return functools.partial(self._unpack, self.backend.pack(value, what))

    def add_workers(self, least: int | None, most: int | None) -> None:
        """Claim places and start workers in them; return when they are up.

        Raises:
            ResourceError: There are fewer places than `least`.
            SerializationError: The setup cannot be sent.
            StartupError: Fewer workers than `least` came up (None: than were claimed).
        """
        if self.driver.is_own_thread:
            raise InvalidValueError(
                "A pool cannot grow in the callback of a future: it would wait for itself. Use a"
                " thread."
            )
        if self.profile.setup is not None and not self.driver.setups:
            # not in `__init__`: after an error here, the caller shuts the engine down
            self.driver.setups.append(self.function(self.profile.setup))
        places = self.backend.claim(least, most)
        # before the event: a failure that nobody waits for is a warning instead
        self.driver.arrivals.expect(places)
        self.driver.post(ResizeRequested(add=tuple(places)))
        failed = self.driver.arrivals.wait(places, self.profile.start_timeout_s)
        if self.driver.crash is not None:
            raise self.driver.crash_error()
        needed = len(places) if least is None else least
        if len(places) - len(failed) < needed:
            place, why = next(iter(failed.items()))
            logs = None
            if self.profile.backend == "ray" and not isinstance(why, Refusal):
                from raypool.backends.ray.session import keep_logs

                kept = keep_logs()
                logs = (
                    "the logs of Ray, /tmp/ray/session_latest/logs on its machines"
                    if kept is None
                    else f"the logs of Ray in {kept}"
                )
            raise StartupError(explanations.not_started(len(failed), len(places), place, why, logs))
        self.driver.arrivals.let_go(failed)  # they are tried again: what becomes of that is news
        for place, why in failed.items():
            logger.warning(
                "Worker %d did not start: %s. The number of workers is %d.",
                place,
                why,
                self.driver.scheduler.workers.size,
            )
        self.driver.barrier()  # it tells of an arrival before it has handled it
        self._check_devices()

    def _check_devices(self) -> None:
        """Raise the error if two workers that should have a whole GPU see the same one."""
        if self.profile.workers_per_gpu is not None or any(
            kind.workers_per_gpu > 1 for kind in self.profile.kinds
        ):
            return
        seen: dict[Any, int] = {}
        for worker in self.workers():
            node = self.backend.node_of(worker.index)
            for gpu, device in zip(worker.gpus, worker.devices, strict=True):
                # two nodes of Ray on one host (jobs of Slurm) may both count their GPUs from 0
                key = device if isinstance(device, str) else (node, device)
                other = seen.setdefault(key, worker.index)
                if other != worker.index:
                    raise StartupError(
                        f"Workers {other} and {worker.index} both see GPU {gpu} of {worker.host}."
                        " Something overrides the CUDA_VISIBLE_DEVICES that Ray sets for its"
                        " workers. Check the environment in which Ray was started."
                    )

    def resize(self, num_workers: int) -> None:
        """Give the pool this many workers; return when they are up.

        Raises:
            ResourceError: There are fewer.
            StartupError: One did not start.
        """
        with self._sizing() as size:
            workers = self.driver.scheduler.workers
            if num_workers < size or workers.retiring:  # some of these may stay
                self.driver.post(ResizeRequested(size=num_workers))
                self.driver.barrier()  # `num_workers` is the new size on return
            more = num_workers - workers.size
            if more > 0:
                try:
                    self.add_workers(more, more)
                except ResourceError:
                    self.driver.post(ResizeRequested(size=size))
                    raise

    def grow(self, most: int) -> None:
        """Give the pool this many workers, or on Ray as many as fit; return when they have started.

        Raises:
            ResourceError: There is no room for a single one more.
            StartupError: None of them came up.
        """
        with self._sizing() as size:
            if (more := most - size) > 0:
                self.add_workers(1 if self.profile.backend == "ray" else more, more)

    @contextlib.contextmanager
    def _sizing(self) -> Iterator[int]:
        """Give the size of the pool, which no other thread changes meanwhile."""
        # the driver's thread must not wait for one that waits for it
        lock = contextlib.nullcontext() if self.driver.is_own_thread else self._size_lock
        with lock, self.backend.sizing():
            self.driver.barrier()  # the size counts what was asked for before
            yield self.driver.scheduler.workers.size

    @property
    def is_over(self) -> bool:
        """Whether the pool takes no more work."""
        return (
            self.is_closing
            or self.driver.closed.is_set()
            or self.driver.scheduler.state is PoolState.BROKEN
        )

    def workers(self) -> list[WorkerInfo]:
        """Return the workers as they are now."""
        workers = self.driver.scheduler.workers
        infos = []
        for place in sorted(workers.places.values(), key=lambda place: place.place):
            worker = workers.by_id.get(place.worker_id)
            info = self.driver.infos.get(place.place) or WorkerInfo(place.place, "", 0)
            infos.append(info.with_state(worker.state.value if worker is not None else "lost"))
        return infos

    def shutdown(
        self, wait: bool, cancel_queued: bool = False, cancel_running: bool = False
    ) -> None:
        """Take no more work; end when all work is done."""
        if wait and not (
            cancel_queued
            or cancel_running
            or self.is_closing
            or self.driver.is_own_thread
            or in_task()
        ):
            # they submit the rest of unfinished work, which would be refused from here on
            for thread in list(self.helpers):
                if thread is not threading.current_thread() and thread.is_alive():
                    thread.join()
        self.is_closing = self.backend.is_ending = True
        if not self.driver.closed.is_set():
            self.driver.post(ShutdownRequested(cancel_queued, cancel_running))
        if wait and not self.driver.is_own_thread and not in_task():
            # without a limit: work may take long, and a driver that fails sets it, too
            self.driver.closed.wait()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forget_all() -> None:
    # in a child: the driver and Ray's threads did not come along
    for engine in list(_engines):
        engine.is_closing = engine.driver.is_forked = True
        engine._why_closed = (
            "The pool works only in the process that opened it, and this process was forked from"
            " that. Start it with spawn (multiprocessing.get_context('spawn')), or open a pool"
            " here: parpool(profile='threads')."
        )
        # a new one: another thread may have held the lock in the old one
        engine.driver.closed = threading.Event()
        engine.driver.closed.set()
    _engines.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _end_all() -> None:
    """End all pools when the interpreter exits; no process may stay on a GPU."""
    # The standard library's executors wait here for all submitted work, however long it takes. Here
    # it has a few seconds, and none after an error, Ctrl-C or SIGTERM.
    engines = list(_engines)
    deadline = time.monotonic() + EXIT_GRACE_S
    for engine in engines:
        if not engine.is_over:
            engine._why_closed = (
                "Python is exiting and has closed the pool: it cannot schedule new futures after"
                " interpreter shutdown. Submit all work before the script ends, and join the"
                " threads that submit more."
            )
    # the interpreter sets `last_type` after an uncaught exception, but not after SystemExit
    if not (hasattr(sys, "last_type") or this_process.is_terminated):
        for engine in engines:
            engine.shutdown(wait=False)
        for engine in engines:
            engine.driver.closed.wait(deadline - time.monotonic())
    for engine in engines:
        engine.shutdown(wait=False, cancel_queued=True, cancel_running=True)
        engine.driver.closed.wait(EXIT_TIMEOUT_S)
    # calls of `after_each` that came only now: Python waits for no thread any more
    dispatcher.finish(EXIT_TIMEOUT_S)


def open_engine(
    profile: Profile,
    find_way: FindWay | None = None,
    workers: tuple[int | None, int | None] = (None, None),
) -> Engine:
    """Return the engine for a profile, without workers yet.

    Args:
        profile: Where it runs.
        find_way: Leads to the store of another pool that is to be used; "inline" only.
        workers: The least and the greatest number of workers that are to come.
    """
    if profile.backend == "inline":
        from raypool.backends.local import InlineBackend

        return Engine(
            profile,
            InlineInbox(),
            lambda post, hub, _: InlineBackend(profile, post, hub.say, find_way=find_way),
        )
    if profile.backend == "threads":
        from raypool.backends.local import ThreadsBackend
        from raypool.gpus.devices import usable_cores

        return Engine(
            profile,
            ThreadInbox(),
            lambda post, hub, _: ThreadsBackend(profile, post, hub.say, usable_cores()),
        )
    from raypool.backends.ray.session import join_ray, leave_ray

    # NVML's Ray finds by itself
    own = None if isinstance(profile.inventory, NvmlInventory) else profile.inventory
    # before anything imports Ray, which reads its settings then
    profile = join_ray(profile, own, workers)
    try:
        from raypool.backends.ray.backend import RayBackend
        from raypool.backends.ray.packing import unpack

        atexit.unregister(_end_all)
        # Ray has registered its own end by now; ours has to come before that
        atexit.register(_end_all)
        return Engine(profile, ThreadInbox(), functools.partial(RayBackend, profile), unpack)
    except BaseException:
        leave_ray(lambda _: None)
        raise


def serial_engine(
    find_way: FindWay | None = None, setup: Call | None = None, teardown: Call | None = None
) -> Engine:
    """Return an engine that runs everything here, at once: in a task, or for `max_workers=0`.

    It uses the store of that task, or the one that `find_way` leads to; `setup` and `teardown` are
    what it begins and ends with.

    Raises:
        StartupError: `setup` has failed.
    """
    engine = open_engine(Profile(backend="inline", setup=setup, teardown=teardown), find_way)
    try:
        engine.add_workers(1, 1)
    except BaseException:
        engine.shutdown(wait=False, cancel_queued=True, cancel_running=True)
        raise
    return engine


# --- single calls ---------------------------------------------------------------------------------


T = TypeVar("T")


def submit_call(
    engine: Engine,
    fn: Callable[..., T] | Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    where: Where,
) -> Future[T]:
    """Submit a call; return its future. It warns of random generators, once for a function.

    Args:
        engine: The engine of the pool.
        fn: The function; one for many calls may be made ready before, and has no checkpoints.
        args: Its arguments.
        kwargs: Those by name.
        options: How the call is treated.
        where: The workers that may run it.

    Raises:
        SerializationError: The function or an argument cannot be sent; it names the variable.
        PoolClosedError: The pool was shut down.
    """
    if isinstance(fn, Function):
        function = fn
    else:
        function = engine.function(fn)
        if not function.is_searched:
            function.is_searched = True
            engine.warn_of_generators(fn)
    pack, name = engine.backend.pack, function.name
    try:
        call = pack([(args, kwargs)], f"the arguments of {name}")
    except SerializationError:
        for place, value in [*enumerate(args), *kwargs.items()]:
            pack(value, f"argument {place!r} of {name}")  # raises the error that names it
        raise
    work = CallWork(function, call, Future(options.name or name), options.retry_on)
    if options.checkpoints is not None and function is not fn:
        # imported late: only calls with checkpoints need it
        from raypool.journal.keys import content_key

        key = content_key((fn, args, kwargs), f"the call of {name}")
        work.checkpoints = str(options.checkpoints), (f"calls/{key}/checkpoint",)
    engine.driver.submit(work, options.spec(function.fn_id, where), work.future)
    return work.future
