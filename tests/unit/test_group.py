"""Ranks with a process each: how they find each other, torch's default group, the environment, and
what happens when one goes.

Each test is a program of its own, which forks its ranks: what they change is theirs.
"""

from __future__ import annotations

import json
import select
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Started

pytestmark = pytest.mark.ci

PRELUDE = """
import multiprocessing, os, signal, sys, threading, time, traceback, warnings
from multiprocessing.managers import BaseManager

import torch
import torch.distributed as dist

from raypool.channel.exchange import LocalExchange
from raypool.errors import CollectiveError
from raypool.spmd.context import SpmdContext
from raypool.spmd.group import Assignment, is_disconnect, join, leave

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks; no thread is in the middle of something here
torch.set_num_threads(1)


class Exchanges(BaseManager):
    pass


Exchanges.register("Exchange", LocalExchange)


class Way:
    def __init__(self, exchange):
        self.ask = exchange.ask

    def pack(self, value, what):
        import pickle
        return pickle.dumps(value)


def assignment(rank, size, number=1, key="k"):
    return Assignment(rank, size, rank, size, number, True, True, key)


def call(place, way, fn):
    group = join(place, way)
    try:
        with group.visible():
            value = fn(SpmdContext(group))
            group.end()
        return value
    except BaseException:
        leave()
        raise


def each(queue, fn, rank, *args):
    try:
        queue.put((rank, fn(rank, *args)))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise


def run(size, fn):
    with Exchanges() as exchanges:
        way = Way(exchanges.Exchange())
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        ranks = [context.Process(target=each, args=(queue, fn, rank, size, way)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        results = dict(queue.get() for _ in ranks)
        for rank in ranks:
            rank.join()
        print(results)
        return [results[rank] for rank in range(size)]
"""


FORGE = """
import json

for line in sys.stdin:
    code, said = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        signal.alarm(400)  # one that hangs takes none of the others with it
        exec(code)
        break  # it ends as any program does
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forge() -> Iterator[Started]:
    """Start what the programs are forked from: torch, which takes seconds to import, is there
    already.
    """
    forge = Started(PRELUDE + FORGE, {}, stdin=subprocess.PIPE)
    yield forge
    forge.process.stdin.close()
    forge.clean_up()


@pytest.fixture
def ranks(forge: Started, tmp_path: Path) -> Callable[[str], None]:
    """Run a program after the prelude: `run(size, fn)` calls `fn(rank, size, way)` in a process for
    each rank.
    """

    def start(code: str) -> None:
        said = tmp_path / "said"
        print(json.dumps([textwrap.dedent(code), str(said)]), file=forge.process.stdin, flush=True)
        has_ended = select.select([forge.process.stdout], [], [], 500)[0]
        status = forge.process.stdout.readline() if has_ended else "none within 500 s"
        assert status == "0\n", f"exit status {status}\n{said.read_text()}"

    return start


def test_the_default_group_and_the_environment_are_there_while_the_function_runs(ranks) -> None:
    ranks("""
        NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

        def body(ctx):
            x = torch.ones(3)
            dist.all_reduce(x)
            assert ctx.process_group is dist.group.WORLD
            assert int(os.environ["MASTER_PORT"]) > 0
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            os.environ["TF_CONFIG"] = "of the call"
            return [os.environ[name] for name in NAMES], x.tolist(), dist.get_rank(), dist.get_world_size(), dist.get_backend()

        def rank_does(rank, size, way):
            os.environ["RANK"] = "before"
            value = call(assignment(rank, size), way, body)
            assert not dist.is_initialized()
            assert os.environ["RANK"] == "before"
            assert not {"WORLD_SIZE", "MASTER_ADDR", "TF_CONFIG", "GLOO_SOCKET_IFNAME"} & set(os.environ)
            leave()
            return value

        assert run(2, rank_does) == [([str(r), "2", str(r), "2", "127.0.0.1"], [2.0] * 3, r, 2, "gloo") for r in range(2)]
    """)


def test_a_warm_group_serves_again_and_a_new_number_makes_a_new_one(ranks) -> None:
    ranks("""
        def rank_does(rank, size, way):
            seen = []
            for number in (1, 1, 2):
                seen.append(call(assignment(rank, size, number, key=str(len(seen))), way, lambda ctx: ctx.process_group))
            assert seen[0] is seen[1] and seen[0] is not seen[2]
            assert not dist.is_initialized()
            value = call(assignment(rank, size, 2), way, lambda ctx: ctx.all_reduce(ctx.rank))
            leave()
            return value

        assert run(2, rank_does) == [1, 1]
    """)


def test_a_watch_that_fails_does_so_for_its_call_only(ranks) -> None:
    ranks("""
        from raypool.spmd import group as groups

        class Watch(groups.RankWatch):
            def __init__(self, *args):
                super().__init__(*args)
                self.pause_s = 0.01

            def look(self, now):
                looked, fails = self.course
                looked.set()
                if fails:
                    raise ValueError("of the first call")

        def rank_does(rank, size, way):
            groups.RankWatch = Watch
            group = join(assignment(rank, size), way)
            for fails in (True, False):
                Watch.course = looked, _ = threading.Event(), fails
                with group.watched():
                    assert looked.wait(300)
            group.end()  # the other rank may still be making its connections
            leave()

        assert run(2, rank_does) == [None, None]
    """)


def test_a_group_that_the_user_destroys_on_one_rank_is_made_anew_on_all(ranks) -> None:
    ranks("""
        def spoil(ctx):
            if ctx.rank == 0:
                dist.destroy_process_group()
            return ctx.all_reduce(1)  # the context's own transport are none of torch's business

        def use(ctx):
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item()

        def rank_does(rank, size, way):
            values = [call(assignment(rank, size), way, fn) for fn in (use, spoil, use, use)]
            leave()
            return values

        assert run(2, rank_does) == [[2.0, 2, 2.0, 2.0]] * 2
    """)


def test_the_user_may_set_torch_up_himself(ranks) -> None:
    ranks("""
        def own(ctx):
            dist.destroy_process_group()
            dist.init_process_group("gloo")  # by the environment
            x = torch.ones(1)
            dist.all_reduce(x)
            ctx.barrier()  # gloo drops what a rank has not read yet when another one closes the connection
            dist.destroy_process_group()
            return x.item()

        def rank_does(rank, size, way):
            values = [call(assignment(rank, size), way, own) for _ in range(2)]
            leave()
            return values

        assert run(2, rank_does) == [[2.0, 2.0]] * 2
    """)


def test_a_group_that_was_there_before_is_there_again_afterwards(ranks) -> None:
    ranks("""
        def rank_does(rank, size, way):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            before = dist.group.WORLD
            assert call(assignment(rank, size), way, lambda ctx: dist.get_world_size()) == 2
            assert dist.group.WORLD is before
            return dist.get_world_size()

        assert run(2, rank_does) == [1, 1]
    """)


def test_ranks_that_wait_for_one_that_leaves_fail_at_once(ranks) -> None:
    """Also while the traceback of the error holds a model of DDP's, and it the group."""
    ranks("""
        from torch.nn.parallel import DistributedDataParallel
        errors = []

        BLOCKED = [
            lambda ctx, mine: ctx.barrier(),
            lambda ctx, mine: dist.all_reduce(torch.ones(3)),
            lambda ctx, mine: dist.all_reduce(torch.ones(3), group=mine),
            lambda ctx, mine: ctx.receive(src=0),
            lambda ctx, mine: ctx.send_receive(torch.ones(10_000_000), dst=0, src=0),
        ]

        def rank_does(rank, size, way):
            seen = []
            for number, wait in enumerate(BLOCKED):
                def body(ctx):
                    mine = dist.new_group(list(range(ctx.world_size)))
                    model = DistributedDataParallel(torch.nn.Linear(2, 2))
                    ctx.barrier()
                    if ctx.rank == 0:
                        raise ValueError("mine")
                    wait(ctx, mine)

                try:
                    call(assignment(rank, size, number), way, body)
                except Exception as error:
                    errors.append(error)
                    seen.append((type(error).__name__, is_disconnect(error)))
            return seen

        first, *others = run(3, rank_does)
        assert first == [("ValueError", False)] * 5
        assert others == [[(name, True) for name in ["CollectiveError", *["RuntimeError"] * 2, *["CollectiveError"] * 2]]] * 2
    """)


def test_ranks_that_wait_for_one_that_is_killed_fail_at_once(ranks) -> None:
    ranks("""
        import tempfile
        joined = tempfile.TemporaryDirectory()

        def body(ctx):
            open(os.path.join(joined.name, str(ctx.rank)), "w").close()
            if ctx.rank == 0:
                while len(os.listdir(joined.name)) < 3:  # who is killed earlier is missed by those that make the group
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.all_reduce(torch.ones(3))

        def rank_does(rank, size, way):
            if rank == 0 and os.fork():
                return None
            try:
                call(assignment(rank, size), way, body)
            except CollectiveError as error:
                return str(error), is_disconnect(error)

        for rank, (text, is_one) in enumerate(run(3, rank_does)[1:], start=1):
            assert text.startswith(f"Rank {rank} was in all_reduce (") and is_one
    """)


def test_a_rank_that_waits_can_be_interrupted_and_leaves_at_once(ranks) -> None:
    ranks("""
        class Cancelled(BaseException):
            pass

        def cancel(*_):
            raise Cancelled

        def body(ctx):
            if ctx.rank == 0:
                time.sleep(600)  # in no collective
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            ctx.all_reduce(torch.ones(3))

        def rank_does(rank, size, way):
            signal.signal(signal.SIGALRM, cancel)
            try:
                call(assignment(rank, size), way, body)
            except Cancelled:
                return "cancelled"

        results = {}
        with Exchanges() as exchanges:
            way = Way(exchanges.Exchange())
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            both = [context.Process(target=each, args=(queue, rank_does, rank, 2, way)) for rank in range(2)]
            [process.start() for process in both]
            assert queue.get() == (1, "cancelled")
            both[1].join()
            both[0].kill()
            both[0].join()
    """)


def test_nothing_listens_outside_this_machine(ranks) -> None:
    ranks("""
        import psutil

        def body(ctx):
            ctx.barrier()
            listening = [entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == "LISTEN"]
            return sorted({address.ip for address in listening})

        def rank_does(rank, size, way):
            value = call(assignment(rank, size), way, body)
            leave()
            return value

        assert {ip for ips in run(2, rank_does) for ip in ips} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    """)


def test_what_other_libraries_are_told(ranks) -> None:
    ranks("""
        import json

        def body(ctx):
            config = ctx.tf_config()
            assert json.loads(os.environ["TF_CONFIG"]) == config
            return config, ctx.jax_options()

        def rank_does(rank, size, way):
            value = call(assignment(rank, size), way, body)
            assert "TF_CONFIG" not in os.environ
            leave()
            return value

        (first, jax), (second, other) = run(2, rank_does)
        assert first["cluster"] == second["cluster"] and len(set(first["cluster"]["worker"])) == 2
        assert [config["task"] for config in (first, second)] == [{"type": "worker", "index": r} for r in range(2)]
        assert jax == {**other, "process_id": 0} and jax["num_processes"] == 2 and ":" in jax["coordinator_address"]
    """)


def test_a_context_outside_a_pool_has_a_group_of_its_own(ranks) -> None:
    ranks("""
        ctx = SpmdContext()
        assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.device.type) == (0, 1, 0, 1, "cpu")
        assert ctx.process_group is dist.group.WORLD and dist.get_world_size() == 1
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        dist.destroy_process_group()

        def rank_does(rank, size, way):
            def body(ctx):
                own = SpmdContext().process_group
                return dist.get_world_size(own), SpmdContext().all_reduce(3)

            value = call(assignment(rank, size), way, body)
            leave()
            return value

        assert run(2, rank_does) == [(1, 3)] * 2
    """)


def test_a_program_that_fails_is_seen_and_the_next_one_runs(ranks) -> None:
    with pytest.raises(AssertionError, match=r"exit status 1(?s:.)*ZeroDivisionError"):
        ranks("run(1, lambda rank, size, way: None) and 1 / 0")
    ranks("sys.exit(0)")
