"""A program of a user's with mistakes, each of which type checkers must find."""

import raypool
from raypool import SpmdContext, TrainingOptions, parpool


def half(x: int) -> float:
    return x / 2


def add(a: str, b: float) -> str:
    return a + str(b)


def rank_of(context: SpmdContext) -> int:
    return context.rank


with parpool(2, profile="threads") as pool:
    pool.parfor(half, ["a"])  # wrong
    pool.parfor(str.upper, 3)  # wrong
    pool.parfor(half, range(3), workers=2)  # wrong
    pool.parfor(half, range(3), on_error="ignore")  # wrong
    pool.parfor(half, 3, reduce=add)  # wrong
    texts: list[str] = list(pool.parfor(half, range(3)))  # wrong
    pool.parfor(half, range(3))[0].upper()  # wrong
    pool.parfor(half, range(3))["x"]  # wrong
    pool.parfeval(half, "three")  # wrong
    pool.parfeval(half, 1, 3)  # wrong
    pool.submit(half, y=3)  # wrong
    pool.parfeval(half, 3).result().upper()  # wrong
    pool.spmd(rank_of)[0].upper()  # wrong
    raypool.parfor(half, ["a"])  # wrong
    raypool.parfeval(half, "three")  # wrong
    TrainingOptions(lr=0.1)  # wrong
