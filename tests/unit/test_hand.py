"""What one has in hand comes to a device, and is the very same if it is there; `meta` stands for
another device than the CPU.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raypool import as_device, copy_to, cpu, gpu
from raypool.errors import InvalidTypeError, InvalidValueError

META = torch.device("meta")


class Pair(NamedTuple):
    """A named tuple, as datasets give them."""

    image: Any
    label: Any


@dataclass(frozen=True, slots=True)
class Sample:
    """A dataclass that cannot be changed."""

    image: Any
    label: Any = 3


@dataclass
class Derived:
    """A dataclass of which not everything is an argument."""

    image: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.image * 2


CONTAINERS = [
    lambda x: x,
    lambda x: [x, 1],
    lambda x: (x, "a"),
    lambda x: {"x": x, "n": None},
    lambda x: OrderedDict(x=x),
    lambda x: UserDict(x=x),
    lambda x: Pair(x, 1),
    Sample,
    Derived,
    lambda x: {"batch": [Pair(x, {"deep": (x, Sample(x))})]},
]


def tensors(x: Any) -> list[torch.Tensor]:
    """Return all tensors in one of these containers."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (dict, UserDict)):
        return [each for value in x.values() for each in tensors(value)]
    if isinstance(x, (list, tuple)):
        return [each for value in x for each in tensors(value)]
    if isinstance(x, (Sample, Derived)):
        return [each for name in x.__dataclass_fields__ for each in tensors(getattr(x, name))]
    return []


# --- as_device ------------------------------------------------------------------------------------


def test_what_is_there_already_is_the_very_object() -> None:
    for device in ["cpu", torch.device("cpu"), cpu()]:
        for pack in CONTAINERS:
            x = pack(torch.ones(2))
            assert as_device(x, device) is x
            assert as_device(x, device, pinned=True, non_blocking=True) is x, (
                "without a GPU both mean nothing"
            )


def test_what_is_elsewhere_comes() -> None:
    for pack in CONTAINERS:
        x = pack(torch.ones(2))
        moved = as_device(x, META)
        assert type(moved) is type(x)
        assert len(tensors(moved)) == len(tensors(x)) > 0
        assert {each.device for each in tensors(moved)} == {META}
        assert {each.device for each in tensors(x)} == {cpu()}, "the original is as it was"
        assert as_device(moved, META) is moved


def test_only_what_changes_is_new() -> None:
    there, elsewhere = torch.ones(2, device="meta"), torch.ones(2)
    x = {"a": [there, 1], "b": [elsewhere]}
    moved = as_device(x, META)
    assert moved["a"] is x["a"]
    assert moved["b"] is not x["b"]
    assert x["b"][0] is elsewhere


def test_what_is_in_it_twice_is_moved_once() -> None:
    x = torch.ones(2)
    moved = as_device([x, {"again": x}], META)
    assert moved[0] is moved[1]["again"]


def test_a_container_keeps_what_else_it_has() -> None:
    x = defaultdict(list, {"x": torch.ones(2)})
    moved = as_device(x, META)
    assert moved["new"] == []
    assert "new" not in x
    assert as_device(Sample(torch.ones(2), "cat"), META).label == "cat"
    assert list(as_device({"b": torch.ones(1), "a": torch.ones(1)}, META)) == ["b", "a"]


def test_tuples_of_torch_itself() -> None:
    largest = torch.ones(2, 3).max(dim=0)
    assert {each.device for each in as_device(largest, META)} == {META}
    assert type(as_device(largest, META)) is type(largest)
    size = torch.Size([2, 3])
    assert as_device(size, META) is size


def test_what_has_no_device_stays() -> None:
    x = [np.ones(2), "text", 1, None, {1, 2}, object(), Sample]
    assert as_device(x, META) is x


def test_a_model_is_moved_itself() -> None:
    """An optimizer that holds its parameters holds them still."""
    model = torch.nn.Linear(2, 3)
    assert as_device({"model": model}, META)["model"] is model
    assert {each.device for each in model.parameters()} == {META}


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = as_device(packed, META)
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device, moved.sorted_indices.device, moved.batch_sizes.device) == (
        META,
        META,
        cpu(),
    )
    assert as_device(packed, cpu()) is packed
    again = copy_to(packed, cpu())
    assert again.batch_sizes.tolist() == packed.batch_sizes.tolist()
    assert again.data.data_ptr() != packed.data.data_ptr()


def test_gradients_flow_back() -> None:
    x = torch.ones(2, requires_grad=True)
    copy_to([x], cpu())[0].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    assert as_device(x, META).requires_grad


# --- copy_to --------------------------------------------------------------------------------------


def test_a_copy_has_memory_of_its_own() -> None:
    for pack in CONTAINERS:
        x = pack(torch.ones(2))
        before = copy.deepcopy(x)
        copied = copy_to(x, cpu())
        assert type(copied) is type(x)
        assert copied is not x
        for mine, other in zip(tensors(copied), tensors(x), strict=True):
            assert mine.data_ptr() != other.data_ptr()
            assert mine.equal(other)
        copied_once = {each.data_ptr(): each for each in tensors(copied)}
        for each in copied_once.values():
            each.zero_()
        assert all(
            mine.equal(other) for mine, other in zip(tensors(x), tensors(before), strict=True)
        )


def test_a_copy_can_be_elsewhere() -> None:
    for pack in CONTAINERS:
        x = pack(torch.ones(2))
        assert {each.device for each in tensors(copy_to(x, META))} == {META}
        there = as_device(x, META)
        assert not {id(each) for each in tensors(copy_to(there, META))} & {
            id(each) for each in tensors(there)
        }


def test_containers_and_arrays_are_copied_too() -> None:
    x = {"list": [1], "array": np.zeros(2), "name": "a", "empty": {}}
    copied = copy_to(x, cpu())
    copied["list"].append(2)
    copied["array"] += 1
    copied["empty"]["new"] = 1
    assert x["list"] == [1]
    assert x["array"].tolist() == [0, 0]
    assert x["empty"] == {}


def test_a_model_is_copied() -> None:
    model = torch.nn.Linear(2, 3)
    copied = copy_to(model, cpu())
    with torch.no_grad():
        copied.weight.zero_()
    assert model.weight.abs().sum() > 0
    assert isinstance(copied.weight, torch.nn.Parameter)
    assert {each.device for each in copy_to(model, META).parameters()} == {META}
    assert model.weight.device == cpu()


def test_views_become_whole() -> None:
    """A row that is shown a thousand times takes a thousand rows once it is a copy: each can be
    changed by itself.
    """
    rows = copy_to(torch.ones(3).expand(4, 3), cpu())
    rows[0] = 0
    assert rows.sum() == 9


# --- devices --------------------------------------------------------------------------------------


def test_operands_on_two_devices_raise() -> None:
    """Torch does not move them by itself, so what nobody has moved is an error; moved, they are
    operands.
    """
    x, y = torch.ones(2), torch.ones(2, device="meta")
    for operation in (torch.add, torch.mul, torch.dot):
        with pytest.raises(RuntimeError, match="device"):
            operation(x, y)
        assert operation(as_device(x, y.device), y).device == META


def test_what_is_no_device_is_an_error() -> None:
    for device in ["gpu0", "", None, 1.5, "cuda:x"]:
        for bring in (as_device, copy_to):
            with pytest.raises(InvalidValueError, match="is not a device"):
                bring(torch.ones(1), device)


def test_a_gpu_that_does_not_exist_is_an_error() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        InvalidValueError, match=rf"gpu\({count}\) does not exist: this process sees "
    ):
        gpu(count)
    with pytest.raises(InvalidValueError, match=r"gpu\(-1\) does not exist"):
        gpu(-1)
    for bring in (as_device, copy_to):
        with pytest.raises(
            InvalidValueError, match=rf"cuda:{count} does not exist: this process sees "
        ):
            bring(torch.ones(1), f"cuda:{count}")
    for wrong in (True, 1.0, "0"):
        with pytest.raises(InvalidTypeError, match="takes the number of a GPU"):
            gpu(wrong)  # type: ignore[arg-type]


def test_no_cuda_context_is_made(run_python: Any) -> None:
    """The test has its own process, since other tests use the GPU."""
    run_python("""
        import torch
        from raypool import as_device, copy_to, cpu, gpu

        as_device([torch.ones(1)], cpu())
        copy_to([torch.ones(1)], cpu(), pinned=not torch.cuda.is_available())
        count = torch.cuda.device_count()
        assert [gpu(i) for i in range(count)] == [torch.device("cuda", i) for i in range(count)]
        assert not torch.cuda.is_initialized()
    """)
