"""What the page of a loop costs: `Results.report` of 10,000 items, each of which has reported ten
times, and how large it is.

Measured in a fresh process, the first page with all that has to be imported for it.
"""

from __future__ import annotations

from benchmarks.measuring import Line, fresh_process

ITEMS = 10_000
REPORTS = 10
ROUNDS = 3
MAX_S = 5.0
MAX_MB = 10.0

REPORT = f"""
import tempfile, time
from pathlib import Path
import numpy as np
import raypool

def train(config):
    for step in range({REPORTS}):
        raypool.report(step=step, loss=config["lr"] / (step + 1), accuracy=1 - config["lr"])
    return {{"loss": config["lr"] * config["depth"], "accuracy": 1 - config["lr"]}}

random = np.random.default_rng(0)
configs = [
    {{"lr": float(10 ** random.uniform(-4, -1)), "depth": int(random.integers(1, 9)), "width": int(2 ** random.integers(3, 9)),
      "optimizer": str(random.choice(["adam", "sgd"])), "dropout": float(random.random())}}
    for _ in range({ITEMS})
]
with raypool.parpool(4, profile="threads", quiet=True) as pool:
    results = pool.parfor(train, configs)
with tempfile.TemporaryDirectory() as folder:
    started = time.perf_counter()
    path = results.report(Path(folder) / "page.html")
    print(time.perf_counter() - started, path.stat().st_size / 1e6)
"""


def run():
    said = [[float(number) for number in fresh_process(REPORT).split()] for _ in range(ROUNDS)]
    area = f"report, {ITEMS:,} items"
    return [
        Line(
            area,
            "the page is written",
            f"{MAX_S:g} s",
            "s",
            [seconds for seconds, _ in said],
            target=MAX_S,
        ),
        Line(
            area, "the page is", f"{MAX_MB:g} MB", "MB", [size for _, size in said], target=MAX_MB
        ),
    ]
