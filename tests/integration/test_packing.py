"""What is packed comes out as it went in, and what cannot be packed is named. Imports Ray, starts
none.
"""

from __future__ import annotations

import abc
import functools
import importlib
import logging
import math
import multiprocessing
import operator
import pickle
import sys
import threading
import tokenize
import tracemalloc
import types
from collections.abc import Callable
from os.path import basename
from pathlib import Path
from typing import Any, NewType, ParamSpec

import cloudpickle
import numpy as np
import pytest
import torch

from raypool import SerializationError
from raypool.backends.ray.packing import (
    BESIDE_BYTES,
    MAPPED_BYTES,
    SCRATCH_BYTES,
    Parcel,
    ParcelKeeper,
    dump,
    join,
    load,
    load_each,
    pack,
    unpack,
)

pytestmark = pytest.mark.quick

LARGE = MAPPED_BYTES  # elements, so some times that in bytes
lock = threading.Lock()


def through(value: object) -> object:
    """Send a value through a parcel, its buffers made read-only as those that are mapped from the
    object store.
    """
    parcel = dump(value)
    return load(
        Parcel(
            parcel.header,
            [memoryview(bytes(buffer.raw())) for buffer in parcel.buffers],
            parcel.refs,
        )
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
def test_tensors_keep_type_shape_and_values(dtype: torch.dtype) -> None:
    for shape in ((LARGE,), (4, LARGE // 2), (3,), (), (0, 5)):
        tensor = torch.randint(0, 2, shape).to(dtype)
        again = through(tensor)
        assert again.dtype is dtype
        assert again.shape == tensor.shape
        assert torch.equal(again, tensor)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_tensors_travel_that_torch_cannot_unpickle(dtype: torch.dtype) -> None:
    for length in (2, LARGE):
        tensor = torch.ones(length, 3).to(dtype).t()[1:]
        again = through({"w": tensor})["w"]  # type: ignore[index]
        assert again.dtype is dtype
        assert torch.equal(again, tensor)
        assert torch.equal(through([tensor[:, 0]])[0], tensor[:, 0])  # type: ignore[index]
    weight = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))
    again = through(weight)
    assert type(again) is torch.nn.Parameter
    assert again.requires_grad
    assert torch.equal(again.data, weight.data)


def test_a_large_tensor_travels_beside_the_pickle() -> None:
    parcel = dump(torch.zeros(1_000_000))
    assert len(parcel.header) < 2_000
    assert sum(buffer.raw().nbytes for buffer in parcel.buffers) == 4_000_000
    assert not parcel.is_small


def test_a_tensor_that_arrives_has_memory_of_its_own() -> None:
    tensor = torch.zeros(LARGE)
    again = through({"x": tensor})["x"]
    again.add_(1)
    assert float(tensor.sum()) == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(LARGE, 2).t(),
        torch.zeros(LARGE, 4)[:, 1:3],
        torch.zeros(2 * LARGE)[LARGE:],
        torch.nn.Parameter(torch.ones(LARGE)),
        torch.ones(LARGE, requires_grad=True),
        torch.ones(LARGE).to_sparse(),
        torch.zeros(LARGE, dtype=torch.complex64).conj(),
    ],
    ids=[
        "transposed",
        "columns",
        "half a storage",
        "parameter",
        "requires grad",
        "sparse",
        "conjugate",
    ],
)
def test_tensors_that_are_more_than_memory_travel_too(tensor: torch.Tensor) -> None:
    again = through(tensor)
    assert type(again) is type(tensor)
    assert again.requires_grad == tensor.requires_grad
    assert torch.equal(again.detach().to_dense(), tensor.detach().to_dense())


def test_a_model_trains_after_the_journey() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 1)
    )
    again = through(model)
    again(torch.randn(8, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())
    for name, value in model.state_dict().items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(value, again.state_dict()[name])


def test_functions_by_name_and_by_value() -> None:
    factor = 3
    assert unpack(pack(basename, "f"))("/a/b") == "b"
    assert unpack(pack(lambda x: factor * x, "f"))(2) == 6
    assert len(pack(basename, "f")) < 60


def test_built_in_functions() -> None:
    for fn in (operator.neg, math.sqrt, len, np.array):
        assert pack(fn, "f") == pickle.dumps(fn, protocol=5)
        assert unpack(pack(fn, "f")) is fn
    assert unpack(pack(torch.add, "f")) is torch.add
    assert unpack(pack([1, 2].count, "f"))(2) == 1
    assert unpack(pack([lambda: 3].pop, "f"))()() == 3  # a method, of something that has no name


def test_a_call_with_plain_arguments_is_a_plain_pickle() -> None:
    call = [((1, "a", None), {})]
    assert pack(call, "call") == pickle.dumps(call, protocol=5)
    assert unpack(pack([((1,), {"x": [2]})], "call")) == [((1,), {"x": [2]})]


def local_things() -> dict[str, Any]:
    """Return what travels by value, as all of a script does."""
    event = threading.Event()

    class Splitter(abc.ABC):  # noqa: B024 - as users write them
        def __init__(self) -> None:
            self.rows = (i for i in range(3))

        def run(self) -> int:
            return sum(self.rows)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.ReLU(), Gated())

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = threading.Lock()

    class LeavesItsLock:
        def __init__(self) -> None:
            self.lock, self.parts = threading.Lock(), {"a": [Splitter()]}

        def __getstate__(self) -> dict[str, Any]:
            return {"parts": self.parts}

    def waits() -> None:
        event.wait()

    def calls_one_that_waits() -> None:
        waits()

    def has_a_default(x: int, gate: Any = event) -> None: ...

    return {key: value for key, value in locals().items() if key != "event"}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda _: lambda: lock, "'lock' (a lock) used by <lambda>"),
        (lambda _: {"a": [1, {"b": lock}]}, "['a'][1]['b'] (a lock)"),
        (lambda _: (1, lock), "[1] (a lock)"),
        (lambda _: lock, "a lock"),
        (lambda _: {lock}, "a lock"),
        (lambda _: threading.Event(), "a threading.Event"),
        (lambda _: {"log": logging.StreamHandler()}, "['log'] (a logging.StreamHandler)"),
        (lambda _: types.SimpleNamespace(gate=lock), "'gate' (a lock) of SimpleNamespace"),
        (lambda has: has["waits"], "'event' (a threading.Event) used by waits"),
        (lambda has: has["calls_one_that_waits"], "'event' (a threading.Event) used by waits"),
        (lambda has: has["has_a_default"], "'gate' (a threading.Event) used by has_a_default"),
        (lambda has: has["Splitter"](), "'rows' (a generator) of Splitter"),
        (lambda has: has["Splitter"]().run, "'rows' (a generator) of Splitter"),
        (lambda has: has["LeavesItsLock"](), "parts['a'][0].rows (a generator) of LeavesItsLock"),
        (lambda has: has["Net"](), "layers.1.gate (a lock) of Net"),
        (
            lambda _: functools.partial(sorted, 1, lock, key=""),
            "args[1] (a lock) of a partial of sorted",
        ),
        (lambda _: functools.partial(sorted, key=lock), "'key' (a lock) of a partial of sorted"),
        (
            lambda has: functools.partial(has["waits"], 1),
            "'event' (a threading.Event) used by waits",
        ),
    ],
)
def test_the_culprit_is_named(make: Callable[[dict[str, Any]], object], name: str) -> None:
    """The error names the innermost variable that the user knows, and no private part of somebody
    else's object.
    """
    with pytest.raises(SerializationError) as caught:
        pack(make(local_things()), "the thing")
    assert str(caught.value).startswith(
        f"Cannot send the thing to a worker: {name} cannot be pickled ("
    )
    assert caught.value.what == name
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    "make",
    [
        multiprocessing.Lock,
        multiprocessing.Queue,
        lambda: multiprocessing.Value("i"),
        multiprocessing.Pipe,
    ],
)
def test_what_only_children_inherit_is_refused_with_what_to_use_instead(
    make: Callable[[], object],
) -> None:
    with pytest.raises(SerializationError, match=r"raypool\.DataQueue .* pool\.store"):
        pack(functools.partial(print, make()), "the initializer")


def test_a_model_in_shared_memory_arrives_as_a_copy_with_a_warning() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1)).share_memory()
    with pytest.warns(
        RuntimeWarning, match=r"share_memory\(\) arrives in another process as a copy"
    ):
        pack(model, "it")


def test_a_builtin_travels_by_its_name() -> None:
    assert unpack(pack(open, "it")) is open


LAZY = """
import importlib

def __getattr__(name):
    return importlib.import_module("no_such_package_" + name)

def adder(n):
    def add(x):
        return x + n
    return add

class Numbers:
    @staticmethod
    def double(x):
        return 2 * x
"""


def test_functions_in_a_module_that_imports_what_it_lacks_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_of_packing.py").write_text(LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    lazy = importlib.import_module("lazy_of_packing")
    try:
        add, double = (
            unpack(pack(fn, "a function")) for fn in (lazy.adder(2), lazy.Numbers.double)
        )
        assert (add(3), double(3)) == (5, 6)
    finally:
        del sys.modules["lazy_of_packing"]


def test_a_function_whose_package_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may load a plugin from its file, under a name that no import would find."""
    plugin = types.ModuleType("no_such_package.plugin")
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    exec("def work(): pass", vars(plugin))
    with pytest.raises(SerializationError, match="the function work"):
        pack(plugin.work, "the function work")


def test_a_function_without_a_module_travels_while_others_go_by_value() -> None:
    cloudpickle.register_pickle_by_value(operator)
    try:
        cached = unpack(pack(functools.lru_cache({3: 4}.get), "a function"))
    finally:
        cloudpickle.unregister_pickle_by_value(operator)
    assert cached(3) == 4


def test_what_a_script_decorates_travels() -> None:
    """Cached functions and properties, functions that dispatch by type and typed decorators travel
    with what uses them.
    """
    parameters, user_id = ParamSpec("parameters"), NewType("user_id", int)

    @functools.lru_cache(maxsize=7)
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    @functools.singledispatch
    def kind(value: object) -> str:
        return "object"

    @kind.register
    def _(value: int) -> str:
        return "int"

    def typed(fn: Callable[parameters, Any]) -> Callable[parameters, Any]:
        def inner(*args: parameters.args, **kwargs: parameters.kwargs) -> Any:
            return fn(*args, **kwargs)

        return inner

    class Setup:
        @functools.cached_property
        def made(self) -> object:
            return object()

        @functools.cache  # noqa: B019 - as users write them
        def name(self) -> str:
            return "setup"

    @typed
    def train() -> tuple[object, ...]:
        setup = Setup()
        return fibonacci(20), kind(1), kind("1"), setup.made is setup.made, setup.name(), user_id(3)

    fibonacci(10), kind(1)
    for annotated in (typed, typed(train)):
        # not a string, as in a script without the import
        annotated.__annotations__ = {"args": parameters.args, "fn": user_id}
    again, cached = unpack(pack((train, fibonacci), "it"))
    assert again() == train() == (6765, "int", "object", True, "setup", 3)
    assert cached.cache_info() == (
        18,
        21,
        7,
        7,
    ), "it is the very function that the other calls, with a cache of its own"
    assert cached.cache_parameters() == {"maxsize": 7, "typed": False}
    of_module = tokenize._compile  # type: ignore[attr-defined]
    assert unpack(pack(of_module, "it")) is of_module, "that of a module travels by its name"


# --- the values of a call -------------------------------------------------------------------------


def kept(values: list[Any], keeper: ParcelKeeper | None = None) -> Parcel:
    """Keep values as a worker does, each secured before the next; return what travels."""
    keeper = keeper or ParcelKeeper()
    parcels = []
    for value in values:
        keeper.secure()
        parcels.append(keeper.keep(value))
    return join(parcels)


def arrived(parcel: Parcel) -> list[Any]:
    """Return what comes out on the other side, by way of what Ray does with it."""
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(parcel.for_ray(), protocol=5, buffer_callback=buffers.append)
    mapped = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    return load_each(Parcel(*pickle.loads(header, buffers=mapped)))


def in_band_bytes(parcel: Parcel) -> int:
    """Return how much of a parcel Ray would pickle."""
    return len(pickle.dumps(parcel.for_ray(), protocol=5, buffer_callback=lambda _: False))


@pytest.mark.parametrize("num_bytes", [BESIDE_BYTES, 1_000_000, 4_000_000])
def test_the_arrays_of_a_call_travel_beside_its_pickle(num_bytes: int) -> None:
    arrays = [np.full(num_bytes, number, np.uint8) for number in range(3)]
    parcel = kept([arrays[0], {"weights": arrays[1], "loss": 0.5}, arrays[2]])
    assert in_band_bytes(parcel) < 2_000
    assert parcel.num_bytes - 3 * num_bytes < 2_000
    first, second, third = arrived(parcel)
    assert second["loss"] == 0.5
    for array, again in zip(arrays, (first, second["weights"], third), strict=True):
        assert np.array_equal(again, array)
        assert again.flags.writeable


def test_so_do_long_pickles() -> None:
    texts = [["x" * 1_000_000], ["y" * 500_000, 3], "short"]
    parcel = kept(texts)
    assert in_band_bytes(parcel) < 2_000
    assert arrived(parcel) == texts


@pytest.mark.parametrize("num_bytes", [200_000, 2_000_000, 2 * SCRATCH_BYTES // 3])
def test_what_runs_later_does_not_change_what_was_kept(num_bytes: int) -> None:
    keeper, shared, parcels = ParcelKeeper(), np.zeros(num_bytes, np.uint8), []
    for number in range(3):
        keeper.secure()
        shared[:] = number
        parcels.append(keeper.keep(shared))
    assert [int(again[-1]) for again in arrived(join(parcels))] == [0, 1, 2]


def test_the_last_value_of_a_call_is_not_copied_before_it_travels() -> None:
    first, last = np.zeros(LARGE), np.zeros(LARGE)
    parcel = kept([first, last])
    memory = [np.frombuffer(buffer, np.uint8) for buffer in parcel.buffers]
    assert not np.shares_memory(memory[0], first)
    assert np.shares_memory(memory[1], last)


def test_the_next_call_has_the_memory_for_copies_again() -> None:
    keeper = ParcelKeeper()
    places = []
    for _ in range(2):
        parcel = kept([np.zeros(SCRATCH_BYTES // 2, np.uint8), 0], keeper)
        places.append(np.frombuffer(parcel.buffers[0], np.uint8).ctypes.data)
        keeper.release()
    assert places[0] == places[1]


def test_a_small_array_that_arrives_has_memory_of_its_own() -> None:
    parcel = dump(np.zeros(BESIDE_BYTES))
    again = load(parcel)
    again[0] = 1
    assert np.frombuffer(parcel.buffers[0])[0] == 0


def test_a_read_only_array_stays_read_only() -> None:
    array = np.zeros(BESIDE_BYTES)
    array.flags.writeable = False
    assert not through(array).flags.writeable


def test_a_trial_copies_nothing() -> None:
    value = [np.zeros(10_000_000, np.uint8), bytes(10_000_000)]
    tracemalloc.start()
    try:
        assert pack(value, "it", is_trial=True) == b""
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(SerializationError, match="a lock"):
        pack([*value, lock], "it", is_trial=True)
