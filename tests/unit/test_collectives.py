"""The collectives, over ranks that are threads of this process, against NumPy and plain Python."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from raypool.channel.exchange import LocalExchange
from raypool.errors import (
    CollectiveError,
    InvalidTypeError,
    InvalidValueError,
    SerializationError,
    TaskCancelled,
)
from raypool.spmd import group as group_module
from raypool.spmd import wire
from raypool.spmd.context import SpmdContext
from raypool.spmd.failures import is_disconnect
from raypool.spmd.group import Assignment, join, leave
from raypool.spmd.transport import distributed, in_thread


class Crew:
    """Ranks: each a thread with a group of its own."""

    def __init__(self, size: int, exchange: LocalExchange) -> None:
        self.size = size
        self._exchange = exchange
        self._number = 0

    def run(self, *fns: Callable[[SpmdContext], Any]) -> list[Any]:
        """Call functions on all ranks, in one group; return what the last one returns, or an
        exception, in rank order.
        """
        self._number += 1
        results: list[Any] = [None] * self.size

        def rank_does(rank: int) -> None:
            place = Assignment(rank, self.size, rank, self.size, self._number, True, False, "k")
            try:
                for fn in fns:
                    group = join(place, self._exchange)
                    results[rank] = fn(SpmdContext(group))
                    group.end()
            except BaseException as error:
                results[rank] = error
            finally:
                leave()

        threads = [threading.Thread(target=rank_does, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "ranks wait for ever"
        return results

    def well(self, *fns: Callable[[SpmdContext], Any]) -> list[Any]:
        """Do the same where nothing may go wrong."""
        results = self.run(*fns)
        for error in sorted(
            (result for result in results if isinstance(result, BaseException)), key=is_disconnect
        ):
            raise error
        return results


@pytest.fixture(scope="module")
def crew_of() -> Iterator[Callable[[int], Crew]]:
    exchanges: list[LocalExchange] = []

    @functools.cache
    def make(size: int) -> Crew:
        exchanges.append(LocalExchange())
        return Crew(size, exchanges[-1])

    yield make
    for exchange in exchanges:
        exchange.close()


@pytest.fixture(scope="module", params=[wire.MAX_INLINE_BYTES, 0], ids=["in words", "apart"])
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the memory of small values travel in the words, or by itself as that of large ones
    does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_INLINE_BYTES", request.param)
        yield


@pytest.fixture(scope="module", params=[1, 2, 3])
def workers(request: pytest.FixtureRequest, crew_of: Callable[[int], Crew]) -> Crew:
    return crew_of(request.param)


@pytest.fixture(scope="module")
def trio(crew_of: Callable[[int], Crew]) -> Crew:
    return crew_of(3)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
            return False
        # float8 has no equal
        return a.shape == b.shape and bool(
            torch.equal(a.to(torch.complex128), b.to(torch.complex128))
        )
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and np.array_equal(a, b)
        )
    return type(a) is type(b) and bool(a == b)


MAKE: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.arange(6.0).reshape(2, 3) + i,
    "scalar tensor": lambda i: torch.tensor(float(i)),
    "empty tensor": lambda i: torch.empty(0, 3),
    "transposed": lambda i: (torch.arange(6).reshape(2, 3) + i).T,
    "bfloat16": lambda i: torch.full((5,), float(i), dtype=torch.bfloat16),
    "int16": lambda i: torch.full((5,), i, dtype=torch.int16),
    "float8": lambda i: torch.full((5,), float(i)).to(torch.float8_e4m3fn),
    "complex": lambda i: torch.full((2,), complex(i, 1)),
    "conjugated": lambda i: torch.full((2,), complex(i, 1)).conj(),
    "large tensor": lambda i: torch.full((300_000,), float(i)),
    "array": lambda i: np.arange(6).reshape(2, 3) + i,
    "strided array": lambda i: np.arange(12)[::2] + i,
    "zero-dimensional array": lambda i: np.array(i * 1.5),
    "dates": lambda i: np.array([i], "M8[D]"),
    "texts": lambda i: np.array(["a", "bcd" * i]),
    "big-endian": lambda i: np.array([i, 2], ">i4"),
    "objects in an array": lambda i: np.array([i, None], object),
    "number": lambda i: i,
    "nested": lambda i: {"a": [i, (i, None)], "b": "x" * i},
    "large value": lambda i: ["x" * 5000, i],
    "nothing": lambda i: None,
}


def use_all(ctx: SpmdContext, make: Callable[[int], Any]) -> dict[str, Any]:
    """Send a value of some kind in all ways; each rank has one of its own."""
    last = ctx.world_size - 1
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    own = make(ctx.rank)
    results = {
        "all_gather": ctx.all_gather(own),
        "gather": ctx.gather(own, dst=last),
        "broadcast": ctx.broadcast(own if ctx.rank == last else None, src=last),
        "scatter": ctx.scatter(
            [make(rank) for rank in range(ctx.world_size)] if ctx.rank == 0 else None, src=0
        ),
        "ring": ctx.send_receive(own, dst=right, src=left),
        "own": own,
    }
    if ctx.rank == 0 and last > 0:
        ctx.send(own, dst=last)
    return results | ({"received": ctx.receive(src=0)} if ctx.rank == last > 0 else {})


def test_values_of_every_kind_arrive_as_they_were(limit: None, workers: Crew) -> None:
    last = workers.size - 1
    for rank, by_kind in enumerate(
        workers.well(lambda ctx: {kind: use_all(ctx, make) for kind, make in MAKE.items()})
    ):
        for kind, got in by_kind.items():
            everybody = [MAKE[kind](rank) for rank in range(workers.size)]
            assert all(map(same, got["all_gather"], everybody)), kind
            assert (got["gather"] is None) == (rank != last), kind
            assert all(map(same, got["gather"] or everybody, everybody)), kind
            assert same(got["broadcast"], everybody[last]), kind
            assert same(got["scatter"], everybody[rank]), kind
            assert same(got["ring"], everybody[rank - 1]), kind
            assert same(got["own"], everybody[rank]), kind
            assert same(got.get("received", everybody[0]), everybody[0]), kind


NUMPY = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
DTYPES = [
    "float64",
    "float32",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "bool",
    "complex64",
    "complex128",
]


@settings(max_examples=25)
@given(
    data=st.data(),
    size=st.sampled_from([2, 3]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(NUMPY)),
)
def test_reductions_are_those_of_numpy(
    limit: None, crew_of: Callable[[int], Crew], data: Any, size: int, dtype: str, op: str
) -> None:
    if dtype.startswith("complex"):
        op = "sum"
    shape = data.draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    # Whole numbers, so that the order in which floats are added does not matter.
    arrays = [
        np.asarray(data.draw(npst.arrays("int64", shape, elements=st.integers(0, 4)))).astype(dtype)
        for _ in range(size)
    ]
    if dtype.startswith("complex"):
        arrays = [np.asarray(array * (1 + 2j)) for array in arrays]
    expected = functools.reduce(NUMPY[op], arrays)

    def body(ctx: SpmdContext) -> Any:
        array = arrays[ctx.rank].copy()
        array.flags.writeable = False
        tensor = torch.from_numpy(arrays[ctx.rank].copy())
        x, y = tensor.clone(), tensor.clone()
        results = [ctx.all_reduce(array, op), ctx.reduce(array, 1, op)]
        if dtype != "uint16":  # which torch itself cannot add
            assert ctx.all_reduce(x, op) is x
            results += [x, ctx.reduce(y, 1, op)]
            assert results[-1] is y if ctx.rank == 1 else same(y, tensor)
        assert same(array, arrays[ctx.rank])
        return [result if result is None else np.asarray(result) for result in results]

    workers = crew_of(size)
    for rank, results in enumerate(workers.well(body)):
        for which, result in enumerate(results):
            assert result is None if which % 2 and rank != 1 else same(result, np.asarray(expected))


@pytest.mark.parametrize("op", ["min", "max"])
def test_the_minimum_and_maximum_with_nan_are_nan(limit: None, trio: Crew, op: str) -> None:
    parts = torch.arange(1000.0).remainder(7).repeat(3, 1)
    parts[:, :9].fill_diagonal_(torch.nan, wrap=True)
    expected = parts.amin(0) if op == "min" else parts.amax(0)
    assert 0 < expected.isnan().sum() < 1000

    def body(ctx: SpmdContext) -> None:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            own = parts[ctx.rank].to(dtype)
            results = [ctx.all_reduce(own.clone(), op), ctx.reduce(own.clone(), 1, op)]
            if dtype != torch.bfloat16:  # NumPy has none
                results.append(torch.from_numpy(ctx.all_reduce(own.numpy(), op)))
            for result in results:
                if result is not None:
                    torch.testing.assert_close(result, expected.to(dtype), equal_nan=True)

    trio.well(body)


def test_means(limit: None, workers: Crew) -> None:
    mean = (workers.size + 1) / 2

    def body(ctx: SpmdContext) -> Any:
        own = ctx.rank + 1
        return [
            ctx.all_reduce(torch.full((2,), float(own)), "mean"),
            ctx.all_reduce(np.full(2, own), "mean"),
            ctx.all_reduce(np.full(2, own, "float32"), "mean"),
            ctx.all_reduce(own, "mean"),
            ctx.all_reduce(torch.full((2,), complex(own, own)), "mean"),
            # whose sum no float16 can hold
            ctx.all_reduce(torch.full((2,), 60_000.0).half(), "mean"),
            ctx.all_reduce(np.full(2, 60_000.0, "float16"), "mean"),
        ]

    pair = torch.full((2,), complex(mean, mean))
    for results in workers.well(body):
        assert all(
            map(
                same,
                results,
                [
                    torch.full((2,), mean),
                    np.full(2, mean),
                    np.full(2, mean, "float32"),
                    mean,
                    pair,
                    torch.full((2,), 60_000.0).half(),
                    np.full(2, 60_000.0, "float16"),
                ],
            )
        )


def test_functions_fold_in_rank_order(limit: None, workers: Crew) -> None:
    def body(ctx: SpmdContext) -> Any:
        return [
            ctx.all_reduce(str(ctx.rank), operator.add),
            ctx.all_reduce([ctx.rank]),
            ctx.all_reduce(torch.tensor([ctx.rank]), lambda a, b: 10 * a + b),
            ctx.all_reduce(np.array([ctx.rank]), lambda a, b: 10 * a + b),
            ctx.reduce((ctx.rank,), 0, operator.add),
            ctx.all_reduce(torch.ones(ctx.world_size, 1), lambda a, b: torch.cat([a, b])),
        ]

    order = list(range(workers.size))
    number = int("".join(map(str, order)))
    for rank, (text, numbers, tensor, array, pair, stacked) in enumerate(workers.well(body)):
        assert text == "".join(map(str, order))
        assert numbers == order
        assert tensor.item() == array.item() == number
        assert pair == (tuple(order) if rank == 0 else None)
        assert stacked.shape == (workers.size**2, 1)


def test_floats_are_the_same_on_every_rank_to_the_last_bit(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> Any:
        return ctx.all_reduce(torch.rand(100_001)), ctx.all_reduce(0.1 * 3**ctx.rank)

    results = trio.well(body)
    assert all(torch.equal(x, results[0][0]) and number == results[0][1] for x, number in results)


def test_tensors_are_changed_in_place_and_nothing_else_is(limit: None, trio: Crew) -> None:
    def body(ctx: SpmdContext) -> None:
        wide = torch.zeros(4, 6)
        part = wide[:, ::2]
        part += ctx.rank
        assert ctx.all_reduce(part) is part
        assert wide.eq(torch.tensor([3.0, 0.0] * 3)).all()
        target = torch.zeros(2, 3).T
        assert (
            ctx.broadcast(torch.ones(3, 2) if ctx.rank == 0 else target, src=0) is target
            or ctx.rank == 0
        )
        assert ctx.rank == 0 or target.eq(1).all()
        weight = torch.nn.Parameter(torch.ones(2))
        assert ctx.all_reduce(weight) is weight
        assert weight.is_leaf == weight.detach().eq(3).all()
        value, array = [ctx.rank], np.ones(2)
        assert ctx.all_gather(value)[ctx.rank] is not value
        assert not np.shares_memory(ctx.broadcast(array, src=0), array)
        # whose elements share their memory
        ctx.broadcast(torch.ones(1).expand(3) if ctx.rank == 0 else None, src=0)

    trio.well(body)


def test_an_open_chain_of_large_tensors(workers: Crew) -> None:
    def body(ctx: SpmdContext) -> Any:
        right, left = (
            (ctx.rank + 1 if ctx.rank + 1 < ctx.world_size else None),
            (ctx.rank - 1 if ctx.rank else None),
        )
        return ctx.send_receive(torch.full((1_000_000,), ctx.rank), dst=right, src=left)

    assert [x if x is None else x[-1].item() for x in workers.well(body)] == [
        None,
        *range(workers.size - 1),
    ]


def test_messages_overtake_none(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> Any:
        for i in range(20 if ctx.rank == 0 else 0):
            ctx.send(torch.full((i * 100,), i) if i % 2 else "x" * i * 100, dst=1)
        return [len(ctx.receive(src=0)) for _ in range(20 if ctx.rank == 1 else 0)]

    assert trio.well(body) == [[], list(range(0, 2000, 100)), []]


# --- what cannot work -----------------------------------------------------------------------------

WRONG: dict[str, Callable[[SpmdContext], Any]] = {
    "is in barrier": lambda ctx: ctx.all_reduce(1) if ctx.rank else ctx.barrier(),
    "tensor (1,)": lambda ctx: ctx.all_reduce(torch.ones(1 + ctx.rank)),
    "an int64 array (2,)": lambda ctx: ctx.reduce(
        np.ones(2, "int64" if ctx.rank else "int32"), dst=0
    ),
    "a Python value": lambda ctx: ctx.all_reduce(1.0 if ctx.rank else np.ones(1)),
    "from rank 1": lambda ctx: ctx.broadcast(1, src=ctx.rank),
    "to rank 2": lambda ctx: ctx.gather(1, dst=ctx.rank),
    "with op='max'": lambda ctx: ctx.all_reduce(1, "max" if ctx.rank else "min"),
    "with a function": lambda ctx: ctx.all_reduce(1, operator.add if ctx.rank else "sum"),
    "but rank 2 passed a float32 tensor (3,)": lambda ctx: ctx.broadcast(
        torch.ones(3 if ctx.rank == 2 else 2), src=0
    ),
    "but ranks 1 and 2 passed a float32 tensor (2,)": lambda ctx: ctx.broadcast(
        torch.ones(2) if ctx.rank else "a text", src=0
    ),
    "scatters 2 parts to 3 ranks": lambda ctx: ctx.scatter([1, 2], src=1),
    "scatters no list of parts": lambda ctx: ctx.scatter(None, src=1),
}


def test_all_ranks_get_the_same_error_and_can_go_on(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> Any:
        errors = []
        for fn in WRONG.values():
            with pytest.raises(CollectiveError) as caught:
                fn(ctx)
            errors.append((str(caught.value), caught.value.missing, ctx.all_reduce(1)))
        return errors

    results = trio.well(body)
    assert results == [results[0]] * 3
    for text, (said, missing, reduced) in zip(WRONG, results[0], strict=True):
        assert (text in said, missing, reduced) == (True, (), 3), said


def test_a_rank_that_ends_while_others_wait_is_found_out(trio: Crew) -> None:
    results = trio.run(lambda ctx: None if ctx.rank == 1 else (ctx.barrier(), ctx.all_reduce(1)))
    assert {(type(result), result.missing) for result in results} == {(CollectiveError, (1,))}
    assert str(results[0]).startswith(
        "Rank 1 has ended, ranks 0 and 2 wait for it in barrier (the 1st collective of this call)."
    )
    assert not any(map(is_disconnect, results))


@pytest.mark.parametrize(
    "wait", [lambda ctx: ctx.receive(src=0), lambda ctx: ctx.send_receive(1, dst=0, src=0)]
)
def test_a_rank_that_ends_without_a_message_is_found_out(
    trio: Crew, wait: Callable[[SpmdContext], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "LOOK_AGAIN_S", 0.05)
    results = trio.run(lambda ctx: wait(ctx) if ctx.rank == 1 else None)
    assert (results[1].missing, is_disconnect(results[2])) == ((0,), True)
    assert str(results[1]).startswith("Rank 0 has ended, and rank 1 waits for it in ")


def test_an_exchange_with_two_ranks_watches_the_one_that_it_waits_for(
    trio: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the one that sends to it, which may end then, and at last the one that it sends to."""
    monkeypatch.setattr(group_module, "LOOK_AGAIN_S", 0.05)
    wait, seen, may_come = group_module.Group._still_waiting, [], threading.Event()

    def waits(group: group_module.Group, waited_s: float) -> None:
        if group.rank == 1 and group._has_ended(0):
            seen.append(waited_s)
        if len(seen) > 2 * group_module.LOOKS:
            may_come.set()
        try:
            wait(group, waited_s)
        except CollectiveError:
            may_come.set()
            raise

    def chain(ctx: SpmdContext) -> Any:
        if ctx.rank == 2:
            assert may_come.wait(300)
        right, left = (1, 2, None)[ctx.rank], (None, 0, 1)[ctx.rank]
        return ctx.send_receive(ctx.rank, dst=right, src=left)

    with monkeypatch.context() as patch:
        patch.setattr(group_module.Group, "_still_waiting", waits)
        assert trio.well(chain) == [None, 0, 1]

    def nobody_receives(ctx: SpmdContext) -> None:
        if ctx.rank == 1:
            ctx.send_receive(1, dst=2, src=0)
        elif ctx.rank == 0:
            ctx.send(0, dst=1)
            ctx.barrier()

    assert trio.run(nobody_receives)[1].missing == (2,)


def test_a_message_that_was_given_up_does_not_meet_one_of_the_next_call(
    trio: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "LOOK_AGAIN_S", 0.05)

    def give_up(ctx: SpmdContext) -> None:
        if ctx.rank == 0:
            with pytest.raises(CollectiveError, match="has ended"):
                ctx.receive(src=1)
            with pytest.raises(CollectiveError, match="has ended"):
                ctx.send("stale", dst=2)

    def exchange(ctx: SpmdContext) -> Any:
        if ctx.rank == 2:
            return ctx.receive(src=0)
        if ctx.rank == 1:
            return [ctx.send(text, dst=0) for text in "ab"]
        ctx.send("fresh", dst=2)
        return ctx.receive(src=1), ctx.receive(src=1)

    assert trio.well(give_up, exchange) == [("a", "b"), [None, None], "fresh"]


def test_ranks_that_are_none(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> None:
        for call in (ctx.reduce, ctx.broadcast, ctx.gather, ctx.scatter, ctx.send):
            with pytest.raises(
                InvalidValueError, match=r"=7 is not a rank of this call: ranks are 0 to 2."
            ):
                call(1, 7)
        with pytest.raises(InvalidTypeError, match=r"dst=1.0 is a float"):
            ctx.send(1, 1.0)
        with pytest.raises(InvalidValueError, match="is this rank itself"):
            ctx.send_receive(1, dst=ctx.rank, src=None)
        ctx.barrier()

    trio.well(body)


def test_operations_that_are_none(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> None:
        with pytest.raises(
            InvalidValueError,
            match="op must be 'sum', 'product', 'min', 'max', 'mean' or a function of two values, not 'average'",
        ):
            ctx.all_reduce(1, "average")
        with pytest.raises(InvalidTypeError, match=r"mean of torch\.int64"):
            ctx.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
        with pytest.raises(InvalidTypeError, match="no order"):
            ctx.reduce(np.ones(2, complex), 0, "min")
        with pytest.raises(InvalidTypeError, match="on meta"):
            ctx.all_gather(torch.ones(2, device="meta"))
        ctx.barrier()

    trio.well(body)


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_values_that_cannot_travel(trio: Crew) -> None:
    results = trio.run(lambda ctx: ctx.all_gather(threading.Lock() if ctx.rank == 1 else 1))
    assert isinstance(results[1], SerializationError)
    assert "The lock for all_gather cannot be sent to other ranks" in str(results[1])
    assert is_disconnect(results[0])
    results = trio.run(lambda ctx: ctx.all_gather(Unreadable() if ctx.rank == 1 else 1))
    assert {str(result)[:66] for result in results} == {
        "The value that rank 1 sent in all_gather cannot be unpickled here:"
    }


def test_after_a_value_that_cannot_be_opened_the_ranks_can_go_on(trio: Crew) -> None:
    """A rank that has caught the error has received, and sent, all that the others wait for."""

    def body(ctx: SpmdContext) -> Any:
        right, left = (ctx.rank + 1) % 3, (ctx.rank - 1) % 3
        value = Unreadable() if ctx.rank == 1 else bytes(20_000_000) + bytes([ctx.rank])
        caught = []
        for call in (
            lambda: ctx.gather(value, dst=0),
            lambda: ctx.all_gather(value),
            lambda: ctx.all_reduce(value, max),
            lambda: ctx.send_receive(value, dst=right, src=left)[-1],
            lambda: ctx.send_receive(ctx.rank, dst=right, src=left),
        ):
            try:
                caught.append(call())
            except SerializationError:
                caught.append("an error")
        return caught

    every = "an error"
    assert trio.well(body) == [
        [every, every, every, 2, 2],
        [None, every, every, 0, 0],
        [None, every, every, every, 1],
    ]


def test_a_long_wait_is_told(
    trio: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_module, "LONG_WAIT_S", 0.01)
    told = threading.Event()
    monkeypatch.setattr(
        caplog.handler, "emit", lambda record: (caplog.records.append(record), told.set())
    )
    trio.well(lambda ctx: (told.wait(300) if ctx.rank == 0 else None, ctx.barrier()))
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        "has waited for the other ranks in barrier (operation 1 of this call) since" in text
        for text in messages
    )
    assert len(messages) <= 3


def test_what_needs_a_process_and_what_comes_too_late_say_so(trio: Crew) -> None:
    def body(ctx: SpmdContext) -> SpmdContext:
        for ask in (lambda: ctx.process_group, ctx.tf_config, ctx.jax_options):
            with pytest.raises(
                InvalidValueError, match="The 3 ranks of this call are threads of one process"
            ):
                ask()

        return ctx

    kept = trio.well(body)
    with pytest.raises(InvalidValueError, match="This call has ended"):
        kept[0].barrier()


# --- interruptions --------------------------------------------------------------------------------


def test_torchs_default_group_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted between the change and what follows."""
    swap, world, before = group_module.swap_default, Mock(rank=lambda: 0), distributed().group.WORLD

    def swap_and_interrupt(group: Any) -> None:
        swap(group)
        if group is world:
            raise TaskCancelled

    monkeypatch.setattr(group_module, "swap_default", swap_and_interrupt)
    with pytest.raises(TaskCancelled), group_module.shown(world):
        pytest.fail("it was interrupted before")
    assert distributed().group.WORLD is before


def test_what_a_thread_has_made_too_late_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted as the thread has just begun."""
    start, discarded = threading.Thread.start, []

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        thread.join(300)
        raise TaskCancelled

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(TaskCancelled):
        in_thread(lambda: "a group", discard=discarded.append)
    assert discarded == ["a group"]
