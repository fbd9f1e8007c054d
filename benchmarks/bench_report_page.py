"""What the page of a loop costs: `Results.report` of 10,000 items, each of which has reported ten
times, how large it is, and how long a browser takes to open it.

Measured in a fresh process, the first page with all that has to be imported for it; and in a fresh
Chromium that has no GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measuring import Line, fresh_process
from tests.integration.browser import CHROMIUM, DRIVER, started

ITEMS = 10_000
REPORTS = 10
ROUNDS = 3
MAX_S = 5.0
MAX_MB = 10.0
MAX_OPEN_S = 2.0

REPORT = f"""
import sys, time
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
started = time.perf_counter()
path = results.report(sys.argv[1])
print(time.perf_counter() - started, path.stat().st_size / 1e6)
"""

OPENED = """
const done = arguments[0];
const shown = performance.getEntriesByType("navigation")[0].loadEventEnd;
const look = () => window.Plotly ? requestAnimationFrame(() => done([shown, performance.now()])) : setTimeout(look, 5);
look();
"""
"""When the table was there, and when charts could be drawn [ms since the page was asked for]."""


def opened_s(path):
    with started() as browser:
        browser.get(path.as_uri())
        return [milliseconds / 1000 for milliseconds in browser.execute_async_script(OPENED)]


def run():
    area = f"report, {ITEMS:,} items"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        said = [
            [float(number) for number in fresh_process(REPORT, path).split()] for _ in range(ROUNDS)
        ]
        written, sizes = map(list, zip(*said, strict=True))
        lines = [
            Line(area, "the page is written", f"{MAX_S:g} s", "s", written, target=MAX_S),
            Line(area, "the page is", f"{MAX_MB:g} MB", "MB", sizes, target=MAX_MB),
        ]
        if CHROMIUM and DRIVER:
            opened = [opened_s(path) for _ in range(ROUNDS)]
            shown, ready = map(list, zip(*opened, strict=True))
            within = f"{MAX_OPEN_S:g} s"
            lines += [
                Line(area, "Chromium shows the table", within, "s", shown, target=MAX_OPEN_S),
                Line(area, "Chromium can draw charts", within, "s", ready, target=MAX_OPEN_S),
            ]
    return lines
