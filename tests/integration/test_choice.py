"""Which GPUs a pool takes, where it may not take any: chosen ones, those with enough memory, those
of certain nodes.

On Ray with three GPUs that do not exist; an inventory of simulated cards knows them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from raypool import (
    ParallelPool,
    ResourceError,
    StartupError,
    WorkerResources,
    current_task,
    parpool,
)
from raypool.backends.ray import claims
from raypool.gpus.simulated import SimulatedGpus

pytestmark = [pytest.mark.usefixtures("ray_session", "by_value")]

GIB = 2**30

HALF = WorkerResources(gpus=0.5)


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", 3)


def gpus_of(pool: ParallelPool) -> list[int | None]:
    return [worker.gpu for worker in pool.workers]


def see() -> tuple[int | None, str]:
    """What a task sees of its device."""
    return current_task().gpu, os.environ["CUDA_VISIBLE_DEVICES"]


# --- nobody has another's -------------------------------------------------------------------------


def test_two_chosen_gpus_and_nothing_on_the_third(gpus: SimulatedGpus) -> None:
    """Scenario 1, by the cards themselves: tasks use 0 and 2, each its own, and 1 stays empty;
    again after `delete()`.
    """

    def use(_: int) -> tuple[int | None, list[int]]:
        gpus.allocate(GIB)
        return current_task().gpu, [
            card.index for card in gpus.devices() if os.getpid() in gpus.held_by_process(card.index)
        ]

    for chosen in ([0, 2], [2, 0]):
        with parpool(gpus=chosen, inventory=gpus, quiet=True) as pool:
            assert gpus_of(pool) == chosen
            assert [worker.gpu_uuid for worker in pool.workers] == [
                gpus.devices()[gpu].uuid for gpu in chosen
            ]
            assert pool.parfeval_on_all(use, 0).result(300) == [(gpu, [gpu]) for gpu in chosen]
            assert all(seen == [gpu] for gpu, seen in pool.parfor(use, range(8)))
            assert gpus.devices()[1].processes == ()
            with parpool(inventory=gpus, quiet=True) as rest:
                assert gpus_of(rest) == [1]


def test_chosen_gpus_while_there_are_not_cores_for_all(gpus: SimulatedGpus) -> None:
    """The four cores suffice for the workers of two of the three GPUs, whichever these are."""
    for chosen in ([2], [2, 1]):
        resources = WorkerResources(cpus=2)
        with parpool(gpus=chosen, resources=resources, inventory=gpus, quiet=True) as pool:
            assert gpus_of(pool) == chosen
            assert pool.parfeval_on_all(see).result(300) == [(gpu, str(gpu)) for gpu in chosen]
    resources = WorkerResources(cpus=3)
    with pytest.raises(ResourceError, match=r"GPU [\d, ]+: free, but the rest .*\(1 GPU, 3 CPU\)"):
        parpool(gpus=[0, 2], resources=resources, start_timeout_s=5, inventory=gpus, quiet=True)


@pytest.mark.long
def test_as_many_workers_as_cards_each_with_another(gpus: SimulatedGpus) -> None:
    """Scenario 2: N different devices, by UUID; and two pools never share one."""
    with (
        parpool(1, inventory=gpus, quiet=True) as first,
        parpool(inventory=gpus, quiet=True) as rest,
    ):
        workers = first.workers + rest.workers
        assert {worker.gpu_uuid for worker in workers} == {card.uuid for card in gpus.devices()}
        assert [worker.gpu_name for worker in workers] == ["Simulated GPU"] * 3
        seen = first.parfeval_on_all(see).result(300) + rest.parfeval_on_all(see).result(300)
        assert sorted(seen) == [(0, "0"), (1, "1"), (2, "2")]


@pytest.mark.long
def test_two_processes_that_choose_at_once(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Each holds for a moment what the other wants, again and again, and both get what they
    want.
    """

    code = f"""
    from raypool import parpool
    for _ in range(3):
        with parpool(gpus=[1], address="{ray.get_runtime_context().gcs_address}", quiet=True) as pool:
            print(pool.workers[0].gpu)
    """
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(run_python, code, PYTHONWARNINGS="ignore")
        rounds = 0
        while rounds < 3 or not other.done():
            with parpool(gpus=[2, 0], quiet=True) as pool:
                assert gpus_of(pool) == [2, 0]
            rounds += 1
        assert other.result().stdout.split() == ["1"] * 3, other.result().stdout


def test_two_workers_with_one_card_are_found_out(gpus: SimulatedGpus) -> None:
    """Whatever their indices are, the UUID tells."""
    gpus.change(1, uuid=gpus.devices()[0].uuid)
    with pytest.raises(StartupError, match="Workers 0 and 1 both see GPU 1 of"):
        parpool(gpus=[0, 1], inventory=gpus, quiet=True)


# --- cards that somebody else fills ---------------------------------------------------------------


def test_a_card_that_is_full_is_left_out_and_named(gpus: SimulatedGpus, caplog: Any) -> None:
    gpus.change(1, used_bytes=13 * GIB)
    with parpool(inventory=gpus, min_free_memory_bytes=8 * GIB, quiet=True) as pool:
        assert gpus_of(pool) == [0, 2]
        words = (
            r"Left out, because min_free_memory_bytes requires 8.0 GiB: GPU 1 of \S+ \(3.0 of 16.0 GiB"
            r" free\)"
        )
        assert [record for record in caplog.records if "Left out" in record.getMessage()] != []
        with pytest.raises(ResourceError, match=f"GPU: requested 1, available 0 .*{words}"):
            pool.resize(3)
        assert (
            len([record for record in caplog.records if "Left out" in record.getMessage()]) == 1
        ), "it is said once"
        gpus.change(1, used_bytes=0)
        pool.resize(3)
        assert gpus_of(pool) == [0, 2, 1]


def test_too_few_cards_have_enough_memory(gpus: SimulatedGpus) -> None:
    gpus.change(0, used_bytes=12 * GIB)
    gpus.change(2, used_bytes=16 * GIB)
    with pytest.raises(ResourceError) as caught:
        parpool(2, inventory=gpus, min_free_memory_bytes=8 * GIB, quiet=True)
    assert (caught.value.requested, caught.value.available, caught.value.holders) == (2, 1, ())
    for words in (
        "GPU: requested 2, available 1 (the cluster has 3)",
        "(4.0 of 16.0 GiB free)",
        "(0.0 of 16.0 GiB free)",
    ):
        assert words in str(caught.value)
    assert "Ask for at most 1" in str(caught.value)


class BackAtOnce(SimulatedGpus):
    """Cards whose memory others give back as soon as somebody has looked at it."""

    def find(self, device: str) -> Any:
        found = super().find(device)
        if found is not None:
            self.change(found.index, used_bytes=0)
        return found


def test_chosen_gpus_that_are_full(gpus: SimulatedGpus, caplog: Any) -> None:
    """Without a number of workers they are left out; with one they are missing."""
    gpus.change(1, used_bytes=12 * GIB)
    asked = {"inventory": gpus, "min_free_memory_bytes": 8 * GIB, "quiet": True}
    with parpool(gpus=[2, 1], **asked) as pool:
        assert gpus_of(pool) == [2]
        assert "GPU 1 of" in caplog.text
    with pytest.raises(
        ResourceError,
        match=r"requested 2, available 1\. Left out, .*GPU 1 .*4\.0 of 16\.0 GiB free",
    ):
        parpool(2, gpus=[2, 1], **asked)
    with pytest.raises(ResourceError, match=r"requested 1, available 0\. Left out, "):
        parpool(gpus=[1], **asked)
    asked["inventory"] = BackAtOnce(gpus._folder)
    with parpool(2, gpus=[2, 1], **asked) as pool:
        assert gpus_of(pool) == [2, 1], "memory that comes back at once is waited for"


@pytest.mark.long
def test_memory_of_which_nothing_is_known_counts_as_free(gpus: SimulatedGpus, caplog: Any) -> None:
    gpus.change(1, used_bytes=None)
    gpus.change(2, used_bytes=16 * GIB)
    with parpool(inventory=gpus, min_free_memory_bytes=8 * GIB, quiet=True) as pool:
        assert gpus_of(pool) == [0, 1]
    (said,) = [
        record.getMessage() for record in caplog.records if "is unknown" in record.getMessage()
    ]
    assert "GPU 1 of" in said
    assert "GPU 0" not in said
    gpus.break_down()
    with parpool(inventory=gpus, min_free_memory_bytes=8 * GIB, quiet=True) as pool:
        assert gpus_of(pool) == [0, 1, 2]


@pytest.mark.long
def test_both_cards_of_a_worker_need_the_memory(gpus: SimulatedGpus) -> None:
    gpus.change(1, used_bytes=12 * GIB)
    two = WorkerResources(gpus=2)
    with pytest.raises(ResourceError, match=r"GPU: requested 2, available 0 .*GPU 1 of"):
        parpool(1, resources=two, inventory=gpus, min_free_memory_bytes=8 * GIB, quiet=True)
    with parpool(
        1, resources=two, inventory=gpus, min_free_memory_bytes=3 * GIB, quiet=True
    ) as pool:
        assert [worker.gpus for worker in pool.workers] == [(0, 1)]


# --- what cannot be -------------------------------------------------------------------------------


def test_a_gpu_that_does_not_exist_is_not_waited_for(gpus: SimulatedGpus) -> None:
    """While others are held, only the inventory can tell that it is not one of these."""
    with parpool(1, gpus=[1], inventory=gpus, quiet=True):
        with pytest.raises(
            ResourceError,
            match=r"There is no GPU 5 on this machine, which has 3\. GPUs are numbered from 0",
        ):
            parpool(gpus=[0, 5], inventory=gpus, start_timeout_s=600, quiet=True)
        with pytest.raises(
            ResourceError,
            match=r"GPU 0, 1: requested 2, available 1 .*This process itself holds 1: ",
        ):
            parpool(gpus=[0, 1], inventory=gpus, start_timeout_s=600, quiet=True)


def test_a_gpu_that_does_not_exist_is_held_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the inventory knows no GPU, the free ones and those of this process's pools are all."""
    monkeypatch.setattr(claims, "EXISTENCE_S", 300.0)  # on a slow machine Ray takes long
    options: dict[str, Any] = {"inventory": SimulatedGpus(tmp_path / "gpus", 0), "quiet": True}

    def is_refused(*chosen: int) -> None:
        with pytest.raises(ResourceError, match="There is no GPU 7 on this machine, which has 3"):
            parpool(gpus=chosen, start_timeout_s=60, **options)

    with parpool(gpus=[0, 2], **options):
        is_refused(7)
        is_refused(1, 7)
        with parpool(gpus=[1], **options):
            is_refused(7)


def test_a_gpu_that_is_given_back_late_exists(
    tmp_path: Path, eventually: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at the free ones does not see it; a later one does, and so GPU 7 is none."""
    monkeypatch.setattr(claims, "EXISTENCE_S", 300.0)  # on a slow machine Ray takes long
    gate, holds = tmp_path / "gate", tmp_path / "holds"

    @ray.remote(num_gpus=1, num_cpus=0)
    def hold() -> None:
        holds.touch()
        while not gate.exists():
            time.sleep(0.01)

    def num_ended() -> int:
        return sum(each["state"] == "REMOVED" for each in ray.util.placement_group_table().values())

    options: dict[str, Any] = {"inventory": SimulatedGpus(tmp_path / "gpus", 0), "quiet": True}
    with parpool(gpus=[0, 2], **options), ThreadPoolExecutor(1) as threads:
        held = hold.remote()
        assert eventually(holds.exists)
        before = num_ended()
        attempt = threads.submit(parpool, gpus=[1, 7], start_timeout_s=60, **options)
        assert eventually(lambda: num_ended() > before)  # the first look is over
        gate.touch()
        with pytest.raises(ResourceError, match="There is no GPU 7 on this machine, which has 3"):
            attempt.result()
        ray.get(held)


def test_a_pool_of_any_gpus_is_named_at_once(
    gpus: SimulatedGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs to look for what it holds: the inventory knows all, or nobody can tell."""
    monkeypatch.setattr(claims, "EXISTENCE_S", 3600.0)
    for inventory in (gpus, SimulatedGpus(tmp_path / "none", 0)):
        options: dict[str, Any] = {"inventory": inventory, "quiet": True}
        with parpool(1, **options), pytest.raises(ResourceError, match="This process itself holds"):
            parpool(gpus=[0, 1, 2], start_timeout_s=3600, **options)


def test_chosen_gpus_that_somebody_else_holds(
    gpus: SimulatedGpus, caplog: pytest.LogCaptureFixture
) -> None:
    """They are waited for, which is said, and then it is said which are free."""
    other = placement_group([{"GPU": 1}])
    ray.get(other.ready(), timeout=300)
    try:
        words = (
            r"In use: GPU (0|1|2); requested 3, available 2 \(free: \d, \d\)\. Held by: a"
            r" placement group \(1 GPU\)"
        )
        with pytest.raises(ResourceError, match=words):
            # a first look at those that are free may take some of it on a busy machine
            parpool(gpus=[0, 1, 2], inventory=gpus, start_timeout_s=12, quiet=True)
        assert re.search(
            r"Waiting for GPU \d, at most start_timeout_s=12\. Held by: a placement group \(1"
            r" GPU\)",
            caplog.text,
        )
    finally:
        remove_placement_group(other)


def test_more_workers_on_a_card_than_it_can_hold(gpus: SimulatedGpus) -> None:
    gpus.change(0, total_bytes=GIB)
    words = (
        r"4 workers cannot share GPU 0 .*: 1\.0 GiB / 4 = 0\.25 GiB for each, .* 0\.5 GiB per"
        r" process\..* at most 2"
    )
    with pytest.raises(ResourceError, match=words) as caught:
        parpool(4, resources=WorkerResources(gpus=0.25), inventory=gpus, quiet=True)
    assert (caught.value.requested, caught.value.available) == (4, 2)


@pytest.mark.long
def test_as_many_workers_on_a_card_as_it_can_hold_and_on_one_of_unknown_size(
    gpus: SimulatedGpus,
) -> None:
    gpus.change(0, total_bytes=GIB)
    with parpool(2, gpus=[0], resources=HALF, inventory=gpus, quiet=True) as pool:
        assert gpus_of(pool) == [0, 0]
    gpus.break_down()
    with parpool(
        4, gpus=[0], resources=WorkerResources(gpus=0.25), inventory=gpus, quiet=True
    ) as pool:
        assert gpus_of(pool) == [0] * 4


def test_nodes_of_a_kind_that_nobody_has() -> None:
    """It is known without waiting."""
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"labels": {"room": "cellar"}},
            r"No node has the label room=cellar; none has a label room\. Change labels=",
        ),
        ({"accelerator_type": "H100"}, r"No node has an accelerator of type H100; there are: none"),
    ]
    for (resources, words), gpus in itertools.product(cases, (None, [0])):
        with pytest.raises(ResourceError, match=words) as caught:
            parpool(
                1,
                resources=WorkerResources(gpus=1, **resources),
                gpus=gpus,
                start_timeout_s=600,
                quiet=True,
            )
        assert caught.value.available == 0


def test_a_machine_that_is_not_there() -> None:
    with pytest.raises(
        ResourceError,
        match=(
            r"No node of the cluster is called 'lab-9', as in gpus= \(GPU 0, 2\)\. There are:"
            r" \S+ \("
        ),
    ):
        parpool(gpus={"lab-9": [0, 2]}, quiet=True)


def test_this_machine_by_name(gpus: SimulatedGpus) -> None:
    import platform

    with parpool(gpus={platform.node(): [2, 1]}, inventory=gpus, quiet=True) as pool:
        assert gpus_of(pool) == [2, 1]
        with pytest.raises(
            ResourceError, match=rf"the pool may use GPU 2, 1 of {platform.node()} only"
        ):
            pool.resize(3)
    import ray

    (node,) = [node for node in ray.nodes() if node["Alive"]]
    with pytest.raises(ResourceError, match="are the same machine"):
        parpool(gpus={platform.node(): [0], node["NodeID"]: [1]}, quiet=True)


# --- a Ray that was told which GPUs it has, and a cluster -----------------------------------------

PREAMBLE = """
import json, logging, os, sys, threading, time
from pathlib import Path
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
from raypool import ResourceError, WorkerResources, current_task, parpool
from raypool.gpus.simulated import SimulatedGpus
cards = SimulatedGpus(Path(FOLDER), 6)
facts = {}

def see():
    return [current_task().gpu, os.environ["CUDA_VISIBLE_DEVICES"]]

def eventually(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)

def attempt(**options):
    try:
        parpool(quiet=True, **options).delete()
    except ResourceError as error:
        return str(error)
"""

CLUSTER = (
    PREAMBLE
    + """
from raypool.backends.ray.session import ENVIRONMENT, make_token, without_helpers
os.environ.update(ENVIRONMENT)
make_token()
without = without_helpers()
without.__enter__()  # as long as this process runs
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "node_name": "head"})

def add(name, *gpus, **options):
    "All nodes are on one machine: each is told which of its cards it has."
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return cluster.add_node(num_cpus=1, num_gpus=len(gpus), include_dashboard=False, node_name=name, env_vars=env, **options)

def node_of():
    return next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())

def where():
    return [node_of(), current_task().gpu]

def end():
    print(json.dumps(facts), flush=True)
    ray.shutdown()
    threading.Timer(10, os._exit, [0]).start()
    cluster.shutdown()
    os._exit(0)
"""
)


@pytest.fixture
def run_script(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Run a script in a process of its own, beside a cluster if it is to; return its facts."""

    def run(code: str, preamble: str = CLUSTER, **env: str) -> dict[str, Any]:
        script = preamble.replace("FOLDER", repr(str(tmp_path / "cards"))) + textwrap.dedent(code)
        done = run_python(script, PYTHONWARNINGS="ignore", **env)
        facts = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert facts, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(facts[-1])
        return {**found, "said": done.stderr}

    return run


def test_chosen_gpus_of_each_machine(run_script: Any) -> None:
    """They come in the order in which they are named; those of a machine that was lost come back
    with it.
    """
    facts = run_script("""
    a, b = add("a", 0, 1, 2), add("b", 3, 4)
    options = {"address": cluster.address, "inventory": cards}
    with parpool(gpus={"b": [4], "a": [2, 0]}, cancel_grace_s=1, quiet=True, **options) as pool:
        facts["all"] = pool.parfeval_on_all(where).result(300)
        facts["held"] = attempt(gpus={"a": [1, 2]}, start_timeout_s=0.5, **options)
        cluster.remove_node(b, allow_graceful=False)
        eventually(lambda: pool.num_workers == 2)
        facts["left"] = sorted(pool.parfeval_on_all(where).result(300))
        add("b", 3, 4)
        eventually(lambda: pool.num_workers == 3 and all(worker.state == "idle" for worker in pool.workers))
        facts["back"] = sorted(pool.parfeval_on_all(where).result(300))
    facts["none here"] = attempt(gpus=[0], **options)
    facts["not there"] = attempt(gpus={"b": [3, 4, 5]}, **options)
    facts["which"] = attempt(gpus={"127.0.0.1": [0]}, **options)
    end()
    """)
    assert facts["all"] == [["b", 4], ["a", 2], ["a", 0]]
    assert (
        "GPU 1 of a, 2 of a: requested 2, available 1 (the cluster has 5). This process itself"
        " holds 3:" in facts["held"]
    )
    assert facts["left"] == [["a", 0], ["a", 2]]
    assert facts["back"] == [["a", 0], ["a", 2], ["b", 4]]
    assert (
        "There is no GPU 0 on this machine, which has none. Other machines have GPUs: list them, as in"
        " gpus={'a': [0]}." in facts["none here"]
    )
    assert "There is no GPU 5 on b, which has 2" in facts["not there"]
    assert "3 nodes of the cluster are called '127.0.0.1'" in facts["which"]


@pytest.mark.long
def test_nodes_with_labels(run_script: Any) -> None:
    """What Ray makes of them, and what is said of them, agree."""
    facts = run_script("""
    add("a", 0, labels={"market": "spot"}), add("b", 1, 2, labels={"market": "reserved"}), add("c", 3)
    options = {"address": cluster.address, "inventory": cards}
    for number, wanted in (1, "spot"), (3, "!spot"), (3, "in(spot, reserved)"), (1, "!in(spot, reserved)"):
        resources = WorkerResources(gpus=1, labels={"market": wanted})
        with parpool(number, resources=resources, quiet=True, **options) as pool:
            facts[wanted] = sorted(pool.parfeval_on_all(where).result(300))
    spot = WorkerResources(gpus=1, labels={"market": "spot"})
    facts["too many"] = attempt(num_workers=2, resources=spot, **options)  # known at once, without waiting
    facts["nobody"] = attempt(resources=WorkerResources(gpus=1, labels={"market": "cattle"}), **options)
    facts["elsewhere"] = attempt(gpus={"b": [1]}, resources=spot, **options)
    end()
    """)
    assert facts["spot"] == [["a", 0]]
    assert facts["!spot"] == [["b", 1], ["b", 2], ["c", 3]]
    assert facts["in(spot, reserved)"] == [["a", 0], ["b", 1], ["b", 2]]
    assert facts["!in(spot, reserved)"] == [["c", 3]]
    assert "GPU: requested 2, available 1 (the requested nodes have 1)." in facts["too many"]
    assert (
        "No node has the label market=cattle; there are market=reserved, market=spot."
        in facts["nobody"]
    )
    assert facts["elsewhere"].startswith(
        "b: No node has the label market=spot; there are market=reserved."
    )


@pytest.mark.parametrize(
    "visible",
    [
        pytest.param("2,0", marks=pytest.mark.long),
        "GPU-00000000-0000-0000-0000-000000000002,GPU-00000000-0000-0000-0000-000000000000",
    ],
)
def test_a_ray_that_was_told_which_gpus_it_has(run_script: Any, visible: str) -> None:
    """By indices and by UUIDs; indices are those of the machine, whatever Ray and CUDA call
    them.
    """
    facts = run_script(
        """
    import ray
    from raypool.backends.ray.session import without_helpers
    with without_helpers():
        ray.init(address="local", num_cpus=2, num_gpus=2, object_store_memory=100_000_000, include_dashboard=False,
            log_to_driver=False, logging_level="ERROR")
    with parpool(quiet=True, inventory=cards) as pool:
        facts["all"] = sorted(pool.parfeval_on_all(see).result(300))
    with parpool(gpus=[2], quiet=True, inventory=cards) as pool:
        facts["chosen"] = pool.parfeval_on_all(see).result(300)
    facts["other"] = attempt(gpus=[1], inventory=cards)
    facts["full"] = attempt(num_workers=2, inventory=cards, min_free_memory_bytes=2**40)
    cards.break_down()
    facts["dark"] = attempt(gpus=[2], inventory=cards)
    facts["any"] = attempt(inventory=cards)
    ray.shutdown()
    print(json.dumps(facts))
    """,
        PREAMBLE,
        CUDA_VISIBLE_DEVICES=visible,
    )
    second, first = visible.split(",")
    assert facts["all"] == [[0, first], [2, second]]
    assert facts["chosen"] == [[2, second]]
    assert "There is no GPU 1 on this machine, which has 2, numbered 0, 2." in facts["other"]
    assert "GPU 0 of" in facts["full"]
    assert "GPU 2 of" in facts["full"]
    assert facts["any"] is None, "unknown GPUs differ by their names"
    if visible == "2,0":
        assert facts["dark"] is None, "an index stands for itself"
    else:
        assert "GPU 2 could not be identified" in facts["dark"]


def test_chosen_gpus_of_a_ray_that_is_started_for_the_pool(run_script: Any) -> None:
    """Scenario 1: what the inventory knows of, and the environment leaves of it, is what the new
    Ray has.
    """
    code = """
    with parpool(gpus=[0, 2], inventory=cards, quiet=True) as pool:
        facts["chosen"] = pool.parfeval_on_all(see).result(300)
        with parpool(inventory=cards, quiet=True) as rest:
            facts["rest"] = sorted(rest.parfeval_on_all(see).result(300))
    import ray
    facts["is Ray left"] = ray.is_initialized()
    print(json.dumps(facts))
    """
    facts = run_script(code, PREAMBLE, CUDA_VISIBLE_DEVICES="0, 2, 4")
    assert facts["chosen"] == [[0, "0"], [2, " 2"]]
    assert facts["rest"] == [[4, " 4"]]
    assert facts["is Ray left"] is False


@pytest.mark.long
def test_instances_of_one_card_are_different_devices(run_script: Any) -> None:
    facts = run_script(
        """
    import ray
    ray.init(address="local", num_cpus=2, num_gpus=2, object_store_memory=100_000_000, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR")
    cards.change(1, mig=["MIG-a", "MIG-b"])
    with parpool(quiet=True, inventory=cards) as pool:
        facts["workers"] = sorted([worker.gpu, worker.gpu_uuid] for worker in pool.workers)
        facts["seen"] = sorted(pool.parfeval_on_all(see).result(300))
    ray.shutdown()
    print(json.dumps(facts))
    """,
        PREAMBLE,
        CUDA_VISIBLE_DEVICES="MIG-a,MIG-b",
    )
    assert facts["workers"] == facts["seen"] == [[1, "MIG-a"], [1, "MIG-b"]]
