"""The group of a rank: meetings with the other ranks, their discovery, and torch's default group.

A worker keeps its group from call to call, by thread: a worker is a thread, in its own process on
Ray, in this process with "threads".
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from datetime import timedelta
from typing import Any, NamedTuple

from raypool.errors import CollectiveError, InvalidValueError, RaypoolError
from raypool.spmd.failures import is_disconnect
from raypool.spmd.transport import (
    FOR_EVER,
    GlooTransport,
    NcclTransport,
    NoTransport,
    distributed,
    in_thread,
    sever,
)
from raypool.spmd.watch import ENDED, LOOK_S, RankWatch, Whereabouts, begun_collectives, progress
from raypool.spmd.wire import BEGIN, END, Header, Packer, find_disagreement, ordinal
from raypool.task import current_task
from raypool.worker.folders import folder_of_process, make_private
from raypool.worker.running import ExchangeClient, before_thread_ends, environment, note_here

logger = logging.getLogger("raypool")

LONG_WAIT_S = 60.0
"""A rank that has waited this long says so once [s]."""

LOOK_AGAIN_S, LOOKS = 1.0, 3
"""A rank that waits for a message checks at this interval [s] whether its sender has ended, and
gives up after this many such findings in a row: the last message may be under way."""

FAREWELL_S = 2.0
"""Connections stay open this long after a good end [s]: closing one drops data that the other side
has not read yet."""

MAX_RETIRED = 8
"""The greatest number of groups that stay open for that: each takes descriptors and threads."""

ONE_TO_ONE = frozenset({"send", "receive", "send_receive"})


class AtHand(NamedTuple):
    """The operation that a rank is in, its number in this call, and the other rank (None: all)."""

    operation: str
    number: int
    peer: int | None


class Group:
    """One rank's side of a group of ranks."""

    def __init__(
        self, assignment: Assignment, transport: NoTransport | GlooTransport, packer: Packer
    ) -> None:
        self.assignment = assignment
        self.transport = transport
        self.packer = packer
        self.address = LOOPBACK
        self.store: Any = None
        self.world: Any = None
        self.nccl: NcclTransport | None = None
        self.has_nccl = False  # whether torch's default group of these ranks has NCCL
        self.interfaces: dict[str, str] = {}  # variables that say which network to use
        self.at_hand: AtHand | None = None
        self.master = (LOOPBACK, 0)
        self.tf_addresses: list[str] = []  # of all ranks, once somebody has asked for them
        self._num_worlds = 0
        self._num_calls = 0
        self._meetings = 0  # in this call
        self._count = 0  # operations in this call
        self._has_said = self._is_ending = self._has_ended_well = False
        self._looks = self._seen_ended = 0
        self._began = self._since = 0.0  # of this call, and of the current wait (Unix time [s])
        self.mismatch: CollectiveError | None = None
        self._watch: RankWatch | None = None  # of the current call
        self._bell: threading.Event | None = None  # wakes the thread that looks
        if isinstance(transport, GlooTransport):
            # weakly, because a retired transport outlives its group
            still_waiting = weakref.WeakMethod(self._still_waiting)

            def waiting(waited_s: float) -> None:
                method = still_waiting()
                if method is not None:
                    method(waited_s)

            transport.waiting = waiting

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.assignment.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.assignment.world_size

    @property
    def device(self) -> Any:
        """The `torch.device` of this rank."""
        return current_task().device

    # --- meetings ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Meet at the beginning of a call, and make torch's default group if any lacks it."""
        self._num_calls += 1
        self._meetings = self._count = 0
        self._is_ending = self._has_ended_well = False
        self.at_hand = self.mismatch = None
        self._began = time.time()
        if not isinstance(self.transport, GlooTransport):  # a single rank has nobody to meet
            if not self._has_world():
                self.make_world()
            return
        self.transport.call = self._num_calls
        with self._in("the beginning of the call"):
            has_process = self.assignment.has_process
            own = int(self._has_world()), _torch_groups().group_count if has_process else 0
            headers = self._meet(Header(0, BEGIN, shape=own))
            if any(header.operation != BEGIN for header in headers):
                raise CollectiveError(
                    "A rank has used the context of an earlier call, which has ended."
                )
            if has_process:
                _torch_groups().group_count = max(header.shape[1] for header in headers)
            if not all(header.shape[0] for header in headers):
                self.make_world()

    def end(self) -> None:
        """Meet at the end of a call; a CollectiveError tells that others are in a collective."""
        self._is_ending, self.at_hand, self._since = True, None, time.time()
        if self.nccl is not None:
            import torch

            torch.cuda.synchronize()  # what this rank has sent last may still be on its way
        with self._in("the end of the call"):
            self.meet(Header(0, END))
        self._is_ending, self._has_ended_well = False, True

    def meet(self, header: Header) -> list[Header]:
        """Send the header of this rank; return those of all, or raise the same error everywhere."""
        self._meetings += 1
        headers = self._meet(header._replace(number=self._meetings))
        disagreement = find_disagreement(headers)
        if disagreement is not None:
            raise CollectiveError(disagreement.text, missing=disagreement.missing)
        return headers

    def _meet(self, header: Header) -> list[Header]:
        secret = self.packer.secret
        return [Header.read(entry, secret) for entry in self.transport.meet(header.write(secret))]

    @contextmanager
    def operation(self, name: str, peer: int | None = None) -> Iterator[None]:
        """Note the operation that this rank is in."""
        self._count += 1
        self.at_hand, self._since = AtHand(name, self._count, peer), time.time()
        self._has_said, self._looks, self._seen_ended = False, 0, 0
        with self._in(f"{name} (the {ordinal(self._count)} operation of this call)"):
            try:
                yield
            except RaypoolError:  # raised by raypool itself: the rank has left the operation
                self.at_hand = None
                raise
        # not in a `finally`: the report of any other error says where the rank was
        self.at_hand = None

    def finish(self, works: Sequence[Any], dst: int | None) -> None:
        """Wait, within an operation, until another rank has received messages."""
        assert self.at_hand is not None
        self.at_hand, self._since = self.at_hand._replace(peer=dst), time.time()
        self._looks = self._seen_ended = 0
        self.transport.finish(works)

    @contextmanager
    def _in(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_disconnect(error):
                raise
            raise CollectiveError(
                f"Rank {self.rank} was in {what} when the connection to another rank broke. Most"
                " likely that rank has failed.",
            ) from error

    def _still_waiting(self, waited_s: float) -> None:
        if self.mismatch is not None:
            raise self.mismatch
        if self._is_ending:
            # ranks that wait for a message learn that none will come; a quick end never gets here
            if not self._has_ended(self.rank):
                self.store.set(self._ended_key(self.rank), b"1")
            return
        at_hand = self.at_hand
        if at_hand is None:
            return
        if at_hand.operation in ONE_TO_ONE and at_hand.peer is not None:
            self._see_peer(at_hand, at_hand.peer, waited_s)
        if waited_s > LONG_WAIT_S and not self._has_said:
            self._has_said = True
            logger.warning(
                "Rank %d has waited for %s in %s (operation %d of this call) since %s. Unless"
                " they are only slower, their code does not call it.",
                self.rank,
                "the other ranks" if at_hand.peer is None else f"rank {at_hand.peer}",
                at_hand.operation,
                at_hand.number,
                time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s)),
            )

    def _see_peer(self, at_hand: AtHand, peer: int, waited_s: float) -> None:
        """Check at times whether the other rank has ended."""
        if waited_s < (self._looks + 1) * LOOK_AGAIN_S:
            return
        self._looks += 1
        self._seen_ended = self._seen_ended + 1 if self._has_ended(peer) else 0
        if self._seen_ended < LOOKS:
            return
        raise CollectiveError(
            f"Rank {peer} has ended, and rank {self.rank} waits for it in {at_hand.operation} (the"
            f" {ordinal(at_hand.number)} operation of this call). Every receive needs a send on the"
            " other rank, and every send a receive.",
            missing=(peer,),
        )

    def _has_ended(self, rank: int) -> bool:
        return bool(self.store.check([self._ended_key(rank)]))

    def _ended_key(self, rank: int) -> str:
        return f"ended/{self._num_calls}/{rank}"

    # --- ranks that cannot meet -------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch, in a thread, for ranks that wait for each other in different places."""
        if self.world is None or not isinstance(self.transport, GlooTransport) or not progress():
            yield
            return
        place = self.assignment
        watch = RankWatch(
            place.rank,
            place.world_size,
            self.store,
            self._num_calls,
            place.mismatch_timeout_s,
            self._moves,
            self._place,
        )
        self._watch = watch
        if self._bell is None:  # one thread for all calls, which sleeps through short ones
            self._bell = threading.Event()
            thread = threading.Thread(
                target=self._watch_calls, args=(self._bell,), name="raypool-watch", daemon=True
            )
            Context().run(thread.start)  # outside the task of this call, which it outlives
        if watch.pause_s < LOOK_S:
            self._bell.set()
        try:
            yield
        finally:
            self._watch = None

    def _watch_calls(self, bell: threading.Event) -> None:
        while self._bell is not None:
            watch = self._watch
            bell.wait(LOOK_S if watch is None else watch.pause_s)
            bell.clear()
            if watch is None or watch.is_over or self._watch is not watch:
                continue
            try:
                verdict = watch.look(time.monotonic())
            except RuntimeError:  # the store went with rank 0: connections tell
                watch.is_over = True
                continue
            except Exception:
                logger.exception("The watch for ranks that cannot meet has failed, for this call.")
                watch.is_over = True
                continue
            if verdict is not None and self._watch is watch:
                watch.is_over = True
                self.mismatch = CollectiveError(verdict[0], missing=verdict[1])
                # In raypool's own wait the rank raises that itself, once in a slice. In torch's it
                # waits in native code, which only a closed group ends.
                if watch.is_stuck and self.at_hand is None and not self._is_ending:
                    with suppress(RuntimeError):
                        close_world(self.world)

    def _moves(self) -> str:
        # torch's record alone has no messages
        return f"{self._count} {self._is_ending} {self.at_hand} {progress()}"

    def _place(self) -> Whereabouts:
        at_hand = AtHand(ENDED, 0, None) if self._is_ending else self.at_hand
        begun = begun_collectives(self._began)
        if at_hand is None:
            return Whereabouts(begun=begun)
        return Whereabouts(*at_hand, self._since, begun)

    # --- torch's default group --------------------------------------------------------------------

    def _has_world(self) -> bool:
        return not self.assignment.has_process or (
            self.world is not None and is_registered(self.world)
        )

    def make_world(self) -> None:
        """Make torch's default group, and discard the one before."""
        if self.world is not None:
            close_world(self.world)
        self._num_worlds += 1
        store = distributed().PrefixStore(f"world/{self._num_worlds}", self.store)
        # torch makes a new group the default one; `shown` undoes this, also if the thread below is
        # abandoned
        with environment(self.interfaces), shown(None):
            self.world = in_thread(
                lambda: make_world(store, self.rank, self.world_size, self.has_nccl), discard_world
            )
        self.nccl = NcclTransport(self.world) if self.has_nccl else None

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Show torch's default group and the environment of a rank to the user's function."""
        place = self.assignment
        if not place.has_process:  # others share the process, and neither can be shown to one rank
            yield
            return
        # A worker with a GPU sees no other, and code that is written for torchrun takes LOCAL_RANK
        # for the number of its device.
        local = (0, 1) if self.device.type == "cuda" else (place.local_rank, place.local_world_size)
        values = {
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(local[0]),
            "LOCAL_WORLD_SIZE": str(local[1]),
            **self.interfaces,
        }
        # a context sets TF_CONFIG on request
        with environment(values, "TF_CONFIG"), shown(self.world):
            yield

    def close(self) -> None:
        """Close all connections; ranks that wait for this one fail at once."""
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.set()
        if self._has_ended_well:  # no rank waits, but the last message may not be read everywhere
            _retire(self.transport, self.store)
        else:
            self.transport.sever()
        if self.world is not None:
            with suppress(RuntimeError, ValueError):  # the user may have destroyed it already
                close_world(self.world)
        self.world = self.nccl = self.store = None
        self.transport = _Closed()


_retired: deque[tuple[float, NoTransport | GlooTransport, Any]] = deque()
"""Groups left after a good end: when, their connections and stores (others may still ask those)."""

_retiring = threading.Lock()  # of workers in threads, and of the thread that closes


def _retire(transport: NoTransport | GlooTransport, store: Any) -> None:
    """Keep a few connections open for a moment."""
    with _retiring:
        is_first = not _retired  # else the thread that closes them runs already
        _retired.append((time.monotonic(), transport, store))
        if len(_retired) > MAX_RETIRED:
            _retired.popleft()
    if is_first:
        threading.Thread(target=_close_retired, name="raypool-farewell", daemon=True).start()


def _close_retired() -> None:
    while _retired:  # read without the lock: at worst two of these threads run
        time.sleep(FAREWELL_S / 4)
        with _retiring:
            while _retired and time.monotonic() - _retired[0][0] > FAREWELL_S:
                _retired.popleft()


@atexit.register  # gloo's own threads must end before the process does
def _close_all_retired() -> None:
    with _retiring:
        _retired.clear()


CALL_HAS_ENDED = (
    "This call has ended, and its context with it. Use the context of a call only while it runs."
)


class _Closed(NoTransport):
    """The connections of a closed group."""

    def meet(self, slot: bytes) -> list[bytes]:
        """Refuse: the group is closed."""
        raise InvalidValueError(CALL_HAS_ENDED)


# --- joining and leaving a group ------------------------------------------------------------------

_here = threading.local()  # a worker is a thread


def leave_other(assignment: Assignment) -> None:
    """Leave the group of the call before, if this call needs another."""
    group: Group | None = getattr(_here, "group", None)
    if assignment.stays_warm and group is not None and group.assignment.number != assignment.number:
        leave()


def join(assignment: Assignment, way: ExchangeClient | None) -> Group:
    """Return this worker's group, that of the call before or a new one; waits for the others."""
    group: Group | None = getattr(_here, "group", None)
    if not assignment.stays_warm:
        # not kept: a rank may have made the call, whose thread has a group already
        group = connect(assignment, way)
    elif group is not None and group.assignment.number == assignment.number:
        group.assignment = assignment  # each call has its own key for the value
    else:
        leave()
        group = _here.group = connect(assignment, way)
        before_thread_ends(leave)
    group.begin()
    return group


def leave() -> None:
    """Close this worker's group, if it has one. Ranks that wait for this one fail at once."""
    group: Group | None = getattr(_here, "group", None)
    _here.group = None
    if group is not None:
        group.close()


def connect(assignment: Assignment, way: ExchangeClient | None) -> Group:
    """Find the other ranks, wait for all, and make a group with them. Can be interrupted."""
    rank, world_size, has_process = assignment.rank, assignment.world_size, assignment.has_process
    if way is None or (world_size == 1 and not has_process):
        return Group(assignment, NoTransport(), Packer(b""))
    with ExitStack() as held:
        store, address, invitation = None, "", None
        if rank == 0:
            store, place, address = _open_store(assignment)
            port = 0
            if has_process:
                holder, port = hold_port(address)  # torch may listen there
                held.enter_context(holder)
            invitation = place, (address, port), secrets.token_bytes(32)
        said = _gpu_uuid(assignment), invitation
        met = way.ask("meet", assignment.number, rank, world_size, said)
        place, master, secret = met[0][1]
        if rank != 0:
            store, address = _join_store(assignment, place)

        def make() -> GlooTransport | NoTransport:
            if world_size == 1:
                return NoTransport()
            control = distributed().PrefixStore("control", store)
            return GlooTransport(control, rank, world_size, address)

        transport = in_thread(make, discard=lambda transport: transport.sever())
        group = Group(assignment, transport, Packer(secret, way if has_process else None))
        group.store, group.address, group.master = store, address, master
        weakref.finalize(group, held.pop_all().close)  # until then MASTER_PORT names the port
        uuids = {gpu_uuid for gpu_uuid, _ in met}
        # NCCL needs a separate GPU for each rank
        group.has_nccl = None not in uuids and len(uuids) == len(met)
        group.interfaces = interfaces_for(address)
    return group


# --- discovery of the ranks of a new group --------------------------------------------------------
#
# Torch makes groups through a store. Rank 0 opens one: a file that only this user can read if all
# ranks are on one machine, otherwise a TCP port. The ranks learn its address through the pool's
# exchange, which requires Ray's token. Strangers can write to a TCP store, so nothing from it is
# unpickled. Through the exchange the ranks also learn a secret, with which they sign their
# messages. Calls that wait in native code run in a thread, and only after all ranks have arrived.


STORE_TIMEOUT = timedelta(seconds=60)
"""One question to the store may take this long."""


class Assignment(NamedTuple):
    """The place of a worker in a group; plain data, made by the driver.

    `local_rank`, `local_world_size`: on its host. `number`: of the group, unique in the pool; a
    repeated number means the group of the call before. `is_one_host`: all ranks are on one machine,
    and all sockets listen on the loopback only. `has_process`: the rank has its own process, whose
    environment and default group may be set. `key`: of the rank's value. `stays_warm`: the worker
    keeps the group for the next call. `mismatch_timeout_s`: of the call's `Options`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    number: int
    is_one_host: bool
    has_process: bool
    key: str
    stays_warm: bool = True
    mismatch_timeout_s: float | None = None


def _gpu_uuid(assignment: Assignment) -> str | None:
    if not assignment.has_process or current_task().device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _open_store(assignment: Assignment) -> tuple[Any, Any, str]:
    """Return a new store, where the other ranks find it, and the address of this rank."""
    dist = distributed()
    if not assignment.has_process:
        store = dist.HashStore()
        return store, store, LOOPBACK
    if assignment.is_one_host:
        note = note_here()
        # in a folder that is removed with the pool; without its file the store would hang
        folder = (
            folder_of_process()
            if note is None or note.folders is None
            else note.folders.temporary()
        )
        file = str(make_private(folder / "groups") / uuid.uuid4().hex)
        return _store_in(file), file, LOOPBACK
    address = own_address()
    listener = socket.socket()  # torch's own would be open on every interface
    listener.bind((address, 0))
    listener.listen(128)  # all ranks may connect at once
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(address, port, None, True, STORE_TIMEOUT, **options)
    return store, (address, port), address


def _join_store(assignment: Assignment, place: Any) -> tuple[Any, str]:
    """Return the store that rank 0 has opened, and the address of this rank."""
    if not assignment.has_process:
        return place, LOOPBACK
    if assignment.is_one_host:
        return _store_in(place), LOOPBACK
    knock(place)
    store = in_thread(
        lambda: distributed().TCPStore(*place, None, False, STORE_TIMEOUT, wait_for_workers=False)
    )
    return store, own_address(towards=place)


def _store_in(file: str) -> Any:
    store = distributed().FileStore(file)
    store.set_timeout(STORE_TIMEOUT)
    return store


# --- addresses of this rank -----------------------------------------------------------------------


LOOPBACK = "127.0.0.1"

FAR_AWAY = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): the system picks an interface, nothing is sent."""

CONNECT_TIMEOUT_S = 5.0
"""The first rank has to take a connection within this time [s]."""


def own_address(towards: tuple[str, int] = FAR_AWAY) -> str:
    """Return the address at which ranks on other machines reach this one.

    Args:
        towards: The address of another rank, if known.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)  # UDP: no packet is sent
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def interfaces_for(address: str) -> dict[str, str]:
    """Return the variables, unless set by the user, that name the interface to gloo and NCCL."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return {variable: name for variable in variables if variable not in os.environ}
    return {}


def hold_port(address: str) -> tuple[socket.socket, int]:
    """Find a free port; return a socket that holds it, and its number."""
    holder = socket.socket()
    # Until it is closed, the system assigns the port to no other socket. Torch can still listen
    # there, because both set SO_REUSEADDR and the holder does not listen.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder, int(holder.getsockname()[1])


def knock(address: tuple[str, int]) -> None:
    """Check that something listens at an address, or raise a ConnectionError."""
    try:  # torch's own store would try for its whole time limit, and cannot be interrupted
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(
            f"Rank 0 cannot be reached at {address[0]}:{address[1]}: {error}."
        ) from error


# --- torch's default group, and the environment, while a rank's function runs ---------------------
#
# Between calls both are hidden, so that other work on the worker finds them unchanged.


def make_world(store: Any, rank: int, world_size: int, has_nccl: bool) -> Any:
    """Make torch's default group, once all ranks have arrived: it waits in native code."""
    import torch

    dist = distributed()
    store.set(f"names/{rank}", str(_torch_groups().group_count))
    counts = (int(store.get(f"names/{other}")) for other in range(world_size))
    _torch_groups().group_count = max(counts)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=FOR_EVER,
        # With the device NCCL connects all ranks at once. Else it would connect pairs at their
        # first message, each waiting for the other, and ranks that send in a ring would wait
        # forever.
        device_id=torch.device("cuda", torch.cuda.current_device()) if has_nccl else None,
    )
    return dist.group.WORLD


def swap_default(group: Any) -> Any:
    """Make a group torch's default one, None for none; return the one before."""
    from torch.distributed import distributed_c10d

    before = distributed().group.WORLD
    # torch has no public way to hide its default group; its own `init_process_group` uses this one
    distributed_c10d._update_default_pg(group)
    return before


def _torch_groups() -> Any:
    """Return torch's registry of groups, for whose content it has no public way.

    Its `group_count` names the next group, by which name the ranks find each other. The counts
    differ if one worker has made a group by itself, or was interrupted while it made one.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def is_registered(world: Any) -> bool:
    """Whether torch still knows a group: the user may have called `destroy_process_group`."""
    return world in _torch_groups().pg_map


_closing = threading.Lock()  # the thread of the watch may close the same group


def close_world(world: Any) -> None:
    """Close torch's default group and all made from it; every wait in one, on any rank, fails."""
    from torch.distributed import distributed_c10d

    dist = distributed()
    # dropping our references is not enough: others may live on in the frames of a traceback
    with _closing:
        if not is_registered(world):
            return
        swap_default(world)  # what follows ends the default group, and all made from it
        try:
            for group in list(_torch_groups().pg_map):
                _sever_gloo(group)
            if "nccl" in dist.get_backend_config(world):
                # destroying waits for what runs on the GPU, which waits for the others
                distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        finally:
            swap_default(None)


def _sever_gloo(group: Any) -> None:
    import torch

    dist = distributed()
    with suppress(RuntimeError):  # the group has no backend for CPUs
        gloo = group._get_backend(torch.device("cpu"))
        gloo = getattr(gloo, "wrapped_pg", gloo)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(gloo, dist.ProcessGroupGloo):
            sever(gloo)


_now_shown: Any = None


@contextmanager
def shown(world: Any) -> Iterator[None]:
    """Make a group torch's default one for a while, None for none."""
    global _now_shown
    before, outer = distributed().group.WORLD, _now_shown
    try:
        swap_default(world)
        _now_shown = world
        yield
    finally:
        swap_default(before)
        _now_shown = outer


def discard_world(world: Any) -> None:
    """Close a group that was made too late."""
    if distributed().group.WORLD is world:  # torch has made it the default one
        swap_default(_now_shown)
    _sever_gloo(world)


_own_world: Any = None
"""This process's own group of one rank; torch's default one as long as somebody has it."""

_num_holders = 0
_holding = threading.Lock()  # calls in several threads share it


def alone_in_torch() -> Any:
    """Return a group of this process alone, torch's default one if that is possible.

    `hide_world` has to follow, where that is possible too.
    """
    global _own_world, _num_holders
    dist = distributed()
    with _holding:
        if not dist.is_initialized():
            if _own_world is not None and is_registered(_own_world):
                swap_default(_own_world)
            else:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                _own_world = dist.group.WORLD
            _num_holders = 0  # if any are left, the user has destroyed their group
        if dist.group.WORLD is _own_world:
            _num_holders += 1
            return _own_world
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def hide_world(world: Any) -> None:
    """Let a group from `alone_in_torch` be the default one no longer, unless others have it, too.

    It stays open: models of DDP may belong to it.
    """
    global _num_holders
    with _holding:
        if world is _own_world:
            _num_holders -= 1
            if _num_holders == 0 and distributed().group.WORLD is world:
                swap_default(None)
