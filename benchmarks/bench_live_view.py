"""What it costs to show a loop of eight workers that report twenty times a second: how much more
its process takes than without.

Each view has its own process and its own display: a terminal that somebody reads, the kernel
of a notebook, a log file. The workers are threads that sleep, so that there is little else that
takes time. A cost is the difference of two CPU times, with the view and without, so noise can make
it negative.

And what driving eight workers takes by itself: the CPU time of all threads of the process that runs
a loop of items of 50 ms over eight workers on Ray, as a share of the time that it lasts, without a
view; held against a loop over eight bare actors in the same process. The pool stays open meanwhile,
so what it takes while nothing runs is in both, and measured too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import ROOT, Line, fresh_process, in_turns
from benchmarks.own_ray import own_ray
from benchmarks.peers import bare_actors, raypool_peer
from benchmarks.tasks import rest

TARGET_PERCENT = 1.0
DRIVEN_WORKERS, ITEM_S = 8, 0.05

LOOPS = """
import json, pathlib, time
from raypool import parpool, report

def train(config):
    for epoch in range(10):
        time.sleep(0.05)
        report(epoch=epoch, loss=1 / (epoch + 1), accuracy=0.9)

def spent_s(progress):
    started = time.process_time()
    pool.parfor(train, [{{"network": "cnn", "width": index, "lr": 0.001}} for index in range(64)], progress=progress)
    return time.process_time() - started

shares = []
with parpool(8, profile="threads", quiet=True) as pool:
    pool.parfor(abs, range(8), progress={view})
    for _ in range(3):
        started, without_s = time.perf_counter(), spent_s(False)
        wall_s = time.perf_counter() - started
        shares.append(100 * (spent_s({view}) - without_s) / wall_s)
pathlib.Path({path!r}).write_text(json.dumps(shares))
"""

DRIVEN = """
import json
from benchmarks.session import prepare_environment

if __name__ == "__main__":
    prepare_environment()
    from benchmarks.bench_live_view import driver_shares
    print(json.dumps(driver_shares()))
"""

IN_A_KERNEL = """
import sys, tempfile
import nbclient, nbformat, traitlets.config

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
with tempfile.TemporaryDirectory() as folder:
    config = traitlets.config.Config(KernelManager=dict(transport="ipc", ip=folder + "/kernel"))
    nbclient.NotebookClient(notebook, timeout=300, config=config).execute()
"""


def run():
    with tempfile.TemporaryFile() as log, terminal() as screen:
        shares = {
            "on a terminal": measure([], "None", screen),
            "in a notebook": measure([IN_A_KERNEL], "None", subprocess.DEVNULL),
            "as lines in a log": measure([], "True", log),
        }
    return [
        Line(
            "live view", f"8 workers, {where}", "1 % of a core", "%", values, target=TARGET_PERCENT
        )
        for where, values in shares.items()
    ] + driver_lines(json.loads(fresh_process(DRIVEN)))


def driver_lines(shares):
    """Return the lines about the process that drives eight workers."""
    area, what = "the driver, a loop of 50 ms items", f"{DRIVEN_WORKERS} workers, share of a core"
    return [
        Line(area, what, "a loop over bare actors", "%", shares["raypool"], shares["bare actors"]),
        Line(
            area,
            f"{DRIVEN_WORKERS} workers with nothing to do, share of a core",
            "",
            "%",
            shares["nothing"],
        ),
    ]


def driver_shares():
    """Return what part of a core this process takes in each round [%], by who drives eight workers
    on a Ray of its own.
    """
    items = [ITEM_S] * (10 * DRIVEN_WORKERS)
    with (
        own_ray(num_cpus=DRIVEN_WORKERS),
        raypool_peer(DRIVEN_WORKERS) as ours,
        bare_actors(DRIVEN_WORKERS) as theirs,
    ):
        ways = {"raypool": ours.map, "bare actors": theirs.unordered, "nothing": plainly}
        return in_turns(
            {name: lambda name=name: driver_share(name, ways[name], items) for name in ways}
        )


def plainly(_fn, items):
    """Run nothing for as long as the workers would take."""
    time.sleep(sum(items) / DRIVEN_WORKERS)
    return items


def driver_share(name, way, items):
    """Return what part of a core all threads of this process take while somebody runs items [%]."""
    started, spent_s = time.perf_counter(), time.process_time()
    answers = way(rest, items)
    spent_s, wall_s = time.process_time() - spent_s, time.perf_counter() - started
    if answers != items:
        raise WrongAnswersError(
            f"{name}: {answers[:3]} ... of {len(answers)}, and not {items[:3]} ... of {len(items)}"
        )
    return 100 * spent_s / wall_s


def measure(around, view, stream):
    """Return what part of a core a view takes in each round [%]; `around` is the program that runs
    the loops, if one does.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shares"
        code = LOOPS.format(view=view, path=str(path))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "IPYTHONDIR": folder,
        }
        subprocess.run(
            [sys.executable, "-c", *around, code],
            env=environment,
            cwd=ROOT,
            stderr=stream,
            check=True,
        )
        return json.loads(path.read_text())


@contextlib.contextmanager
def terminal():
    """Open a terminal of 40 lines of 140 characters, of which a thread reads what is written
    there.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))

    def read():
        with contextlib.suppress(OSError):  # Linux says so when nobody has it open any more
            while os.read(leader, 65536):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield follower
    finally:
        os.close(follower)
        reader.join()
        os.close(leader)
