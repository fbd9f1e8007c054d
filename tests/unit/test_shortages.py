"""What nodes could give, what is said if that is too little, and which cards are of no use; without
Ray.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raypool import ResourceError
from raypool.backends.ray.claims import Claim, Survey
from raypool.backends.ray.demand import Demand, Need, name_of
from raypool.backends.ray.shortages import lacking, said_of, too_few
from raypool.gpus.devices import GpuDevice
from raypool.gpus.simulated import SimulatedGpus

GIB = 2**30


def node(
    name: str = "", labels: dict[str, str] | None = None, **resources: float
) -> dict[str, Any]:
    """A node as Ray describes it."""
    resources = {key.replace("_type_", "_type:"): amount for key, amount in resources.items()}
    names = {
        "NodeName": name or "10.0.0.1",
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "lab",
    }
    return {**names, "NodeID": "a1", "Labels": labels or {}, "Resources": resources}


def demand(labels: dict[str, str] | None = None, share: int = 1, **bundle: float) -> Demand:
    bundle = {key.replace("_type_", "_type:"): amount for key, amount in bundle.items()}
    return Demand("GPU", bundle.get("GPU", 0.0), bundle, share, 1.0, 0.0, 0, labels or {}, share)


TOO_FEW = [
    (2, [1, 1], (), r"has 2\)\. Each worker needs 2 GPU on one node, but the largest has 1\. R"),
    (1, [0, 0], (), r"has 0\)\. Connect to a cluster with a GPU, or request none .*\(gpus=0\)\.$"),
    (1, [1, 0], ("x",), r"has 1\)\. Held by: x\. Wait until the programs that hold them end, or "),
    (1, [1, 0], (), r"has 1\)\. Wait until the programs that hold them end"),
]


@pytest.mark.parametrize(("each", "cards", "names", "words"), TOO_FEW)
def test_the_next_step_fits_what_is_missing(
    each: float, cards: list[int], names: tuple[str, ...], words: str, monkeypatch: Any
) -> None:
    """Waiting is of use only where others hold what would be enough."""
    nodes = [node(GPU=number) for number in cards]
    monkeypatch.setattr("raypool.backends.ray.shortages.living_nodes", lambda: nodes)
    monkeypatch.setattr("raypool.backends.ray.shortages.holders", lambda: names)
    error = too_few(Need(demand(GPU=each), 1, 1), 0, {}, None)
    assert re.search(words, str(error)), error


def claim(host: str, *cards: GpuDevice, share: int = 1) -> Claim:
    return Claim(None, demand(share=share, GPU=1.0), host=host, cards=cards)  # type: ignore[arg-type]


CLAIMS = [
    (demand(GPU=1), node(GPU=3, CPU=1), 3),
    (demand(GPU=1, CPU=2), node(GPU=3, CPU=5), 2),
    (demand(GPU=2), node(GPU=3), 1),
    (demand(GPU=1), node(CPU=8), 0),
    (demand({"market": "!spot"}, GPU=1), node(labels={"market": "spot"}, GPU=3), 0),
    (demand({"market": "!spot"}, GPU=1), node(GPU=3), 3),
    (demand(GPU=1, accelerator_type_H100=0.001), node(GPU=3, accelerator_type_H100=1), 3),
    (demand(GPU=1, accelerator_type_H100=0.001), node(GPU=3, accelerator_type_T4=1), 0),
]


def test_how_many_claims_a_node_could_hold() -> None:
    for wanted, there, fits in CLAIMS:
        assert wanted.fits(there) == fits


LACKING = [
    (demand(GPU=1), None),
    (demand(GPU=99), None),  # of what is scarce, somebody counts
    (
        demand(GPU=1, CPU=99),
        (
            r"No node of the cluster is large enough for a worker: CPU: requested 99, the largest"
            r" has 8\."
        ),
    ),
    (
        demand({"market": "cattle"}, GPU=1),
        r"No node has the label market=cattle; there are market=reserved, market=spot\.",
    ),
    (demand({"room": "3"}, GPU=1), r"No node has the label room=3; none has a label room\."),
    (
        demand({"market": "spot", "zone": "a"}, GPU=1),
        r"No node has all of the labels market=spot, zone=a\.",
    ),
    (
        demand(GPU=1, accelerator_type_L4=0.001),
        r"No node has an accelerator of type L4; there are: H100, T4\.",
    ),
    (
        demand({"market": "spot"}, GPU=1, accelerator_type_T4=0.001),
        r"of type T4; there are: H100\.",
    ),
    (demand({"market": "spot"}, CPU=8), r"CPU: requested 8, the largest has 4\."),
]


def test_what_no_node_has() -> None:
    for wanted, words in LACKING:
        nodes = [
            node(labels={"market": "spot"}, GPU=2, CPU=4, accelerator_type_H100=1),
            node(labels={"market": "reserved", "zone": "a"}, GPU=1, CPU=8, accelerator_type_T4=1),
        ]
        said = lacking(wanted, nodes)
        assert (said is None) if words is None else re.search(words, said or "")


def test_what_nodes_are_called() -> None:
    """By the name that somebody gave them; Ray's own is the address."""
    assert [name_of(node("head")), name_of(node())] == ["head", "lab"]


# --- cards that are of no use ---------------------------------------------------------------------


def card(index: int, free: int | None, total: int | None = 16) -> GpuDevice:
    used = None if free is None or total is None else (total - free) * GIB
    return GpuDevice(
        index=index, total_bytes=None if total is None else total * GIB, used_bytes=used
    )


@pytest.fixture
def survey(tmp_path: Path) -> Survey:
    return Survey(SimulatedGpus(tmp_path, 0), 8 * GIB)


def test_which_cards_are_crowded(survey: Survey) -> None:
    """What is not known counts as free; of two cards of a worker each counts."""
    claims = [
        claim("a", card(0, 7)),
        claim("a", card(1, 8)),
        claim("b", card(0, None)),
        claim("b", card(1, 9), card(2, 0)),
        claim("c"),
    ]
    assert [survey.is_crowded(entry) for entry in claims] == [True, False, False, True, False]
    cards = "GPU 0 of a (7.0 of 16.0 GiB free), GPU 2 of b (0.0 of 16.0 GiB free)"
    assert (
        said_of(survey.crowd(claims), survey.min_free_bytes)
        == f"Left out, because min_free_memory_bytes requires 8.0 GiB: {cards}."
    )
    assert said_of({}, survey.min_free_bytes) == ""


def test_each_card_is_named_once(survey: Survey, caplog: pytest.LogCaptureFixture) -> None:
    kept, crowded = [claim("a", card(0, 9)), claim("a", card(1, None))], [claim("a", card(2, 1))]
    for _ in range(3):
        survey.tell(kept, crowded)
    assert [record.getMessage() for record in caplog.records] == [
        "Left out, because min_free_memory_bytes requires 8.0 GiB: GPU 2 of a (1.0 of 16.0 GiB free).",
        "The free memory of GPU 1 of a is unknown; min_free_memory_bytes counts it as free.",
    ]
    survey.tell([], [claim("a", card(3, 1))])
    assert "GPU 3 of a" in caplog.text
    assert "GPU 2 of a" not in caplog.records[-1].getMessage()


def test_how_many_workers_a_card_could_hold_at_all(survey: Survey) -> None:
    """Half a gibibyte each, for CUDA alone."""
    for share, total in ((1, 0), (2, 1), (32, 16), (99, None)):
        survey.check_sharing([claim("a", card(0, None, total), share=share)])
    for share, total, most in ((3, 1, 2), (64, 16, 32)):
        words = rf"{share} workers cannot share GPU 0 of a: {total}\.0 GiB / {share} = "
        with pytest.raises(ResourceError, match=words) as caught:
            survey.check_sharing([claim("a", card(0, None, total), share=share)])
        assert (caught.value.requested, caught.value.available) == (share, most)
