"""What CUDA_VISIBLE_DEVICES lets a process see: as torch reads it, and by a plain model of what
NVIDIA says of instances.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.cuda
from hypothesis import example, given
from hypothesis import strategies as st

from raypool.gpus.devices import GpuDevice, VisibleGpu, is_order_known, visible_amd, visible_gpus

UUIDS = ["GPU-aa11", "GPU-aa12", "GPU-ab11", "GPU-c111", "GPU-c112"]
NUMBERS = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(
        [
            "",
            " ",
            "-1",
            "+1",
            "1gpu2",
            "2ampere",
            "0 ",
            " 2",
            "x",
            "GPU-aa11",
            "MIG-1",
            "00",
            "01",
            "-0",
            "1 2",
            "0x1",
        ]
    ),
)
NAMES = st.one_of(
    st.sampled_from(UUIDS),
    st.sampled_from(
        [
            "GPU-aa",
            "GPU-ab",
            "GPU-c11",
            "GPU-aa1",
            "GPU-",
            "GPU-nobody",
            "0",
            " GPU-ab11",
            "GPU-ab11 ",
            "",
            "MIG-1",
        ]
    ),
)
CARDS = st.integers(0, 5).map(
    lambda count: [GpuDevice(index=i, name="H", uuid=UUIDS[i], mig=()) for i in range(count)]
)


def see(text: str | None, cards: list[GpuDevice], **others: str) -> list[int | None]:
    environ = {**others, **({} if text is None else {"CUDA_VISIBLE_DEVICES": text})}
    return [gpu.index for gpu in visible_gpus(environ, cards)]


def as_torch_sees(text: str, cards: list[GpuDevice]) -> list[int]:
    """Return what torch makes of it, with the names of these cards."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": text}):
        listed = torch.cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        return torch.cuda._transform_uuid_to_ordinals(listed, [str(card.uuid) for card in cards])
    return next(
        (listed[:place] for place, number in enumerate(listed) if number >= len(cards)), listed
    )


@given(st.lists(NUMBERS, max_size=5).map(",".join), CARDS)
@example("0,2,-1,1", [GpuDevice(index=i, name="H", uuid=UUIDS[i], mig=()) for i in range(3)])
@example("1,1", [GpuDevice(index=i, name="H", uuid=UUIDS[i], mig=()) for i in range(3)])
@example("", [GpuDevice(index=0, name="H", uuid=UUIDS[0], mig=())])
def test_numbers_mean_what_torch_takes_them_for(text: str, cards: list[GpuDevice]) -> None:
    assert see(text, cards) == as_torch_sees(text, cards)


@given(st.lists(NAMES, max_size=4), st.sampled_from(UUIDS), CARDS)
def test_uuids_mean_what_torch_takes_them_for(
    names: list[str], first: str, cards: list[GpuDevice]
) -> None:
    text = ",".join([first, *names])
    assert see(text, cards) == as_torch_sees(text, cards)


@given(CARDS, st.data())
def test_each_uuid_may_be_as_short_as_it_is_still_unique(
    cards: list[GpuDevice], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(cards))))
    whole = [str(cards[index].uuid) for index in order]
    short = []
    for uuid in whole:
        least = next(
            size
            for size in range(5, 9)
            if sum(str(card.uuid).startswith(uuid[:size]) for card in cards) == 1
            or size == len(uuid)
        )
        short.append(uuid[: data.draw(st.integers(least, len(uuid)))])
    assert see(",".join(short), cards) == see(",".join(whole), cards) == list(order)


@given(CARDS, st.data())
def test_what_is_visible_is_a_beginning_of_what_is_named(
    cards: list[GpuDevice], data: st.DataObject
) -> None:
    entries = data.draw(st.lists(st.integers(0, 7), unique=True, max_size=6))
    seen = see(",".join(map(str, entries)), cards)
    assert seen == entries[: len(seen)]
    assert len(seen) == len(entries) or entries[len(seen)] >= len(cards)
    assert see(None, cards) == [card.index for card in cards]


@st.composite
def divided(draw: st.DrawFn) -> list[GpuDevice]:
    """Cards of which some are divided into instances."""
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return [
        GpuDevice(
            index=i,
            name="H",
            uuid=UUIDS[i],
            mig=tuple(f"MIG-{i}{letter}" for letter in "abc"[:count]),
        )
        for i, count in enumerate(counts)
    ]


@given(divided(), st.data())
def test_a_process_has_one_instance_and_nothing_beside_it(
    cards: list[GpuDevice], data: st.DataObject
) -> None:
    instances = {name: card.index for card in cards for name in card.mig or ()}
    kind = data.draw(st.sampled_from(["unset", "numbers", "uuids", "instances"]))
    entries: list[str] = {
        "unset": [str(card.index) for card in cards],
        "numbers": [str(card.index) for card in data.draw(st.permutations(cards))],
        "uuids": [str(card.uuid) for card in data.draw(st.permutations(cards))],
        "instances": data.draw(st.permutations(sorted(instances))),
    }[kind]
    environ = {} if kind == "unset" else {"CUDA_VISIBLE_DEVICES": ",".join(entries)}
    seen = visible_gpus(environ, cards)
    # The model: what each entry stands for, its first instance or the whole; the first instance
    # hides all else.
    plain = []
    for entry in entries:
        card = next(
            card for card in cards if entry in (str(card.index), card.uuid, *(card.mig or ()))
        )
        name = entry if entry.startswith("MIG-") else next(iter(card.mig or ()), None)
        plain.append(VisibleGpu(card.index, name))
    first = next((gpu for gpu in plain if gpu.mig), None)
    assert list(seen) == ([first] if first else plain)


def test_instances_are_known_by_the_names_of_old_drivers() -> None:
    cards = [GpuDevice(index=i, uuid=UUIDS[i], mig=(f"MIG-{i}",) if i else ()) for i in range(2)]
    for name in ("MIG-1", "MIG-GPU-aa12/1/0", "MIG-GPU-aa12/9/9"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": name}, cards) == (VisibleGpu(1, name),)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-GPU-zz/1/0,MIG-1"}, cards) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-1"}, cards) == ()


@given(st.sampled_from(["GPU-aa11", "MIG-1", "GPU-aa11,GPU-aa12"]), st.integers(1, 3))
def test_what_nobody_knows_is_not_guessed(text: str, count: int) -> None:
    cards = [GpuDevice(index=index) for index in range(count)]
    seen = visible_gpus({"CUDA_VISIBLE_DEVICES": text}, cards)
    assert {gpu.index for gpu in seen} == {None}
    assert len(seen) == len(text.split(","))


def test_numbers_of_unlike_cards_are_known_only_if_cuda_counts_as_nvidia_smi_does() -> None:
    cards = [
        GpuDevice(index=0, name="L4"),
        GpuDevice(index=1, name="H200"),
        GpuDevice(index=2, name="L4"),
    ]
    assert see("0,1", cards) == [None, None]
    assert see("0,1", cards, CUDA_DEVICE_ORDER="FASTEST_FIRST") == [None, None]
    assert see("0,1", cards, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1]
    assert sorted(filter(None, see("2,1,0", cards))) == [1, 2]  # all of them, in whatever order
    assert see(None, cards) == [0, 1, 2]
    assert not is_order_known({}, [GpuDevice(index=0), GpuDevice(index=1)])
    assert is_order_known({}, [GpuDevice(index=0)])


@given(
    st.integers(0, 6),
    st.lists(st.integers(0, 6), max_size=4),
    st.lists(st.integers(0, 6), max_size=4),
)
def test_hip_chooses_among_what_rocr_leaves(count: int, rocr: list[int], hip: list[int]) -> None:
    def left(of: list[int], numbers: list[int]) -> list[int]:
        if len(set(numbers)) < len(numbers):
            return []
        kept = []
        for number in numbers:
            if number >= len(of):
                break
            kept.append(of[number])
        return kept

    text = {
        "ROCR_VISIBLE_DEVICES": ",".join(map(str, rocr)),
        "HIP_VISIBLE_DEVICES": ",".join(map(str, hip)),
    }
    assert visible_amd(text, count) == tuple(left(left(list(range(count)), rocr), hip))
    alias = {"CUDA_VISIBLE_DEVICES": text["HIP_VISIBLE_DEVICES"]}
    assert visible_amd(alias, count) == tuple(left(list(range(count)), hip))
    assert visible_amd({**alias, "HIP_VISIBLE_DEVICES": "0"}, count) == tuple(range(min(count, 1)))
    assert visible_amd({}, count) == tuple(range(count))


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_which_amd_gpus_uuids_stand_for_is_not_known(name: str) -> None:
    assert visible_amd({name: "GPU-DEADBEEFDEADBEEF"}, 2) is None
