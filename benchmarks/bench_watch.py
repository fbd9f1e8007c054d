"""The live page of a sweep: how soon it is there, what it costs the driver, and whether its memory
stays flat.

The sweep runs on Ray in a separate process: 200 items with 1,000 reports of five metrics each.
The last two go on reporting ten times a second while they are watched, each from one of two
workers. Each page has a new server, so all reports are read again. The driver's share of a core is
its processor time while a page is open, less that of as long a time without one. Memory is the
page's JavaScript heap after a collection, at the end of two minutes, beside that of the beginning.
`python -m benchmarks.bench_watch 3600` shows it once a minute, for an hour.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.measuring import ROOT, Line
from raypool import load_results
from raypool.journal.live import FRESH_S
from tests.integration.browser import CHROMIUM, DRIVER, started

ROUNDS = 3
LOOK_S = 20.0
OPEN_S = 120.0
MANY = 10_000

SWEEP = """
import sys, time
from raypool import current_task, parpool, report

def train(config):
    def say(step):
        report(step=step, **{name: config["lr"] / (step + 1) for name in ("a", "b", "c", "d", "e")})

    for step in range(1000):
        say(step)
    while config["item"] >= 198 and not current_task().should_stop:
        step += 1
        say(step)
        time.sleep(0.1)

if __name__ == "__main__":
    configs = [{"item": item, "lr": 1 / (item + 1)} for item in range(200)]
    with parpool(2, quiet=True) as pool:
        pool.parfor(train, configs, run_dir=sys.argv[1], progress=False)
"""

LONG = f"""
import sys
from raypool import parpool, report

def train(config):
    report(loss=1 / (1 + config["item"]))
    return config

with parpool(4, profile="threads", quiet=True) as pool:
    configs = [{{"item": item, "lr": 0.1}} for item in range({MANY})]
    pool.parfor(train, configs, run_dir=sys.argv[1], progress=False)
"""

SHOWN = "return document.querySelectorAll('#items tbody tr td').length > 20"


def run():
    if not (CHROMIUM and DRIVER):
        return []
    shown, costs, growth, long = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        with sweep(run_dir) as driver:
            for number in range(ROUNDS):
                time.sleep(FRESH_S + 2)  # after that the driver knows that nobody watches
                alone_s = used_s(driver)
                with server(run_dir) as address, started() as browser:
                    shown.append(opened_s(browser, address))
                    costs.append(100 * (used_s(driver) - alone_s) / LOOK_S)
                    if number == 0:
                        before = heap_bytes(browser)
                        time.sleep(OPEN_S)
                        growth.append(heap_bytes(browser) / before)
        run_dir = Path(folder, "long")
        subprocess.run([sys.executable, "-c", LONG, run_dir], cwd=ROOT, check=True)
        for _ in range(ROUNDS):
            with server(run_dir) as address, started() as browser:
                long.append(opened_s(browser, address))
    area = "the live page, 200 items, 1,000 reports of five metrics each"
    return [
        Line(area, "the table is there", "2 s", "s", shown, target=2.0),
        Line(area, "the driver's share of a core", "1 %", "%", costs, target=1.0),
        Line(area, "its memory after two minutes", "at first", "x", growth, target=1.1),
        Line(f"the live page, {MANY:,} items", "the table is there", "2 s", "s", long, target=2.0),
    ]


@contextlib.contextmanager
def sweep(run_dir):
    """Give the process of a sweep that has two items left, which go on."""
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(run_dir)], cwd=ROOT)
    try:
        while (
            not run_dir.exists()
            or load_results(run_dir).to_frame()["status"].eq("finished").sum() < 198
        ):
            assert process.poll() is None
            time.sleep(1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def server(run_dir):
    """Give the address of a page."""
    command = [sys.executable, "-m", "raypool", "watch", str(run_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def used_s(process):
    """Return how much processor time a process takes in `LOOK_S` [s]."""
    before = process.cpu_times()
    time.sleep(LOOK_S)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def opened_s(browser, address):
    """Open the page; return when its table was there [s]."""
    begun = time.perf_counter()
    browser.get(address)
    while not browser.execute_script(SHOWN):
        time.sleep(0.02)
    return time.perf_counter() - begun


def heap_bytes(browser):
    browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    return browser.execute_script("return performance.memory.usedJSHeapSize")


def show_memory(seconds):
    """Print the memory of a page once a minute [MB]."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        with sweep(run_dir), server(run_dir) as address, started() as browser:
            opened_s(browser, address)
            for minute in range(int(seconds) // 60 + 1):
                print(f"{minute} min: {heap_bytes(browser) / 1e6:.1f} MB", flush=True)
                time.sleep(60)


if __name__ == "__main__":
    show_memory(float(sys.argv[1]))
