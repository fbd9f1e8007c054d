"""What it costs to show a loop of eight workers that report twenty times a second: how much more its process takes than without.

Each view in a process of its own, with what it draws on: a terminal that somebody reads, the kernel of a notebook, a log file.
The workers are threads that sleep, so that there is little else that takes time. A cost
is the difference of two CPU times, with the view and without, so noise can make it negative.
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
from pathlib import Path

from benchmarks.measuring import ROOT, Line

TARGET_PERCENT = 1.0

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
        Line("live view", f"8 workers, {where}", "1 % of a core", "%", values, target=TARGET_PERCENT)
        for where, values in shares.items()
    ]


def measure(around, view, stream):
    """Return what part of a core a view takes in each round [%]; `around` is the program that runs the loops, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shares"
        code = LOOPS.format(view=view, path=str(path))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "IPYTHONDIR": folder}
        subprocess.run([sys.executable, "-c", *around, code], env=environment, cwd=ROOT, stderr=stream, check=True)
        return json.loads(path.read_text())


@contextlib.contextmanager
def terminal():
    """Open a terminal of 40 lines of 140 characters, of which a thread reads what is written there."""
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
