"""A program of a user's that type checkers must accept; `assert_type` is checked by them, not run."""

import functools
import operator
from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
import pandas as pd

import raypool
from raypool import Composite, Future, Results, SpmdContext, TrainingRun, parpool


def half(x: int) -> float:
    return x / 2


def train(config: dict[str, Any]) -> dict[str, float]:
    return {"loss": config["lr"]}


def scale(rate: float) -> float:
    return rate * 2


def perhaps(x: int) -> str | None:
    return str(x) if x else None


async def fetch(x: int) -> str:
    return str(x)


@functools.cache
def remembered(x: int) -> float:
    return x / 2


class Model:
    def __call__(self, x: int) -> bool:
        return x > 0


def add(a: float, b: float) -> float:
    return a + b


def collect(parts: list[float], x: float) -> list[float]:
    return [*parts, x]


def rank_of(context: SpmdContext, start: int = 0) -> int:
    return start + context.rank


with parpool(2, profile="threads") as pool:
    # loops
    assert_type(pool.parfor(half, range(3)), Results[float])
    assert_type(pool.parfor(half, [1, 2])[0], float)
    assert_type(pool.parfor(half, [1, 2])[1:], list[float])
    assert_type(list(pool.parfor(half, 3, on_error="collect", run_dir="runs/a")), list[float])
    assert_type(pool.parfor(train, [{"lr": 0.1}, {"lr": 0.2}]), Results[dict[str, float]])
    assert_type(pool.parfor(train, pd.DataFrame({"lr": [0.1]})), Results[dict[str, float]])
    assert_type(pool.parfor(lambda config: int(config["lr"]), pd.DataFrame()), Results[int])
    assert_type(pool.parfor(scale, np.linspace(0, 1, 5)), Results[float])
    assert_type(pool.parfor(lambda x: x * 2, range(3)), Results[int])
    assert_type(pool.parfor(lambda x: x * 2, 3), Results[int])
    assert_type(pool.parfor(perhaps, [1]), Results[str | None])
    assert_type(pool.parfor(fetch, [1, 2]), Results[str])
    assert_type(pool.parfor(fetch, 2), Results[str])
    assert_type(pool.parfor(remembered, [1]), Results[float])
    assert_type(pool.parfor(functools.partial(half), [1]), Results[float])
    assert_type(pool.parfor(Model(), [1]), Results[bool])
    assert_type(pool.parfor(str, [1, 2]), Results[str])
    assert_type(pool.parfor(half, (x for x in [1, 2]), chunk_size=2), Results[float])
    assert_type(pool.options(retries=0).parfor(half, [1]), Results[float])
    pool.parfor(train, [{"lr": 0.1}]).best("loss")["lr"]

    # folded
    assert_type(pool.parfor(half, [1, 2], reduce=max), float)
    assert_type(pool.parfor(half, [1, 2], reduce=add), float)
    start: list[float] = []
    assert_type(pool.parfor(half, [1, 2], reduce=collect, init=start), list[float])
    pool.parfor(half, 3, reduce=operator.add)
    pool.parfor(half, 3, reduce=lambda a, b: a + b)

    # single calls
    assert_type(pool.parfeval(half, 3), Future[float])
    assert_type(pool.parfeval(half, 3).result(), float)
    assert_type(pool.submit(half, x=3), Future[float])
    assert_type(pool.parfeval(fetch, 3), Future[str])
    assert_type(pool.parfeval(remembered, 3), Future[float])
    assert_type(pool.parfeval_on_all(half, 3), Future[list[float]])
    assert_type(list(pool.map(half, [1, 2])), list[float])
    futures = [pool.parfeval(half, x) for x in range(3)]
    assert_type(raypool.fetch_next(futures), tuple[int, float])
    assert_type(raypool.fetch_next(futures[0]), tuple[int, float])
    assert_type(raypool.after_each(futures, str), list[Future[str]])
    assert_type(raypool.after_all(futures, len), Future[int])

    # all workers at once, one model
    assert_type(pool.spmd(rank_of), Composite[int])
    assert_type(pool.spmd(rank_of, 3)[1], int)
    assert_type(pool.spmd(rank_of)[:1], list[int])
    assert_type(list(pool.spmd(rank_of)), list[int])
    assert_type(pool.spmd_async(rank_of).result(), Composite[int])
    pool.spmd(lambda context, start: context.all_reduce(start), pool.spmd(rank_of))
    assert_type(pool.train(print), TrainingRun)

# on the current pool
assert_type(raypool.parfor(half, range(3)), Results[float])
assert_type(raypool.parfor(half, range(3), reduce=max), float)
assert_type(raypool.parfeval(half, 3), Future[float])
work: Callable[[int], float] = half
assert_type(raypool.parfor(work, [1]), Results[float])
assert_type(raypool.load_results("runs/a"), Results[Any])
