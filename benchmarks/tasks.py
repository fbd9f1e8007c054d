"""What the workers run: importable functions, so that every pool sends a name and no pool sends
code.
"""

import os
import queue
import time
import uuid
from pathlib import Path

import numpy as np

from raypool import report


def nothing(_item=None):
    return None


def same(item):
    return item


def rest(seconds):
    time.sleep(seconds)
    return seconds


def array_of(number_and_size):
    """Return an array of so many bytes, full of a number."""
    number, num_bytes = number_and_size
    return np.full(num_bytes // 8, number, np.int64)


def ends_of(array):
    """Return what tells an array from others: how long it is, its first number and its last."""
    return len(array), int(array[0]), int(array[-1])


def reports(count):
    """Report as fast as possible; return the cost of a call [us]."""
    started = time.perf_counter()
    for step in range(count):
        report(step=step, loss=0.5)
    return (time.perf_counter() - started) / count * 1e6


def steps_with_reports(count, step_s):
    """Do something for a while, and report, again and again; return the cost of each report
    [us].
    """
    costs = []
    for step in range(count):
        until = time.perf_counter() + step_s
        while (now := time.perf_counter()) < until:
            pass
        report(step=step, loss=0.5)
        costs.append((time.perf_counter() - now) * 1e6)
    return costs


def puts(count):
    """Put the same into a queue of this process; return the cost of a call [us]."""
    entries = queue.Queue()
    started = time.perf_counter()
    for step in range(count):
        entries.put((time.time(), {"step": step, "loss": 0.5}))
    return (time.perf_counter() - started) / count * 1e6


def train_reports(count):
    """Report by Ray Train, in its local mode; return the cost of a call [us]."""
    import logging

    import ray.train
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    logging.getLogger("ray.train").setLevel("WARNING")

    def loop(config):
        started = time.perf_counter()
        for step in range(config["count"]):
            ray.train.report({"step": step, "loss": 0.5})
        ray.train.report({"took_s": time.perf_counter() - started})

    run = TorchTrainer(
        loop, train_loop_config={"count": count}, scaling_config=ScalingConfig(num_workers=0)
    ).fit()
    return run.metrics["took_s"] / count * 1e6


def now():
    """Return when it runs (Unix time [s])."""
    return time.time()


def count_for_ever():
    number = 0
    while True:
        number += 1


def first_of(array, _item=None):
    return int(array[0])


class Bare:
    """An actor with nothing in it."""

    def call(self, _item=None):
        """Do nothing."""
        return None

    def pid(self):
        """Return which process this is."""
        return os.getpid()

    def first(self, array):
        """Return the first number of an array."""
        return first_of(array)

    def rest(self, seconds):
        """Sleep; return when that began and ended (Unix time [s])."""
        started = time.time()
        time.sleep(seconds)
        return started, time.time()


def put_many(messages, count):
    """Put small messages into a queue of whatever kind."""
    for step in range(count):
        messages.put({"step": step, "loss": 0.5})


def send_many(orders, messages):
    """Put as many messages as is ordered, until nothing is."""
    while count := orders.get():
        put_many(messages, count)


class Sender:
    """An actor that puts messages into a queue."""

    def put_many(self, messages, count):
        """Put them."""
        put_many(messages, count)


def wait_for(path):
    """Return when there is a file."""
    while not Path(path).exists():
        time.sleep(0.01)


def begin_and_rest(path, seconds):
    """Say in a file which process this is, and sleep; who finds the file returns at once."""
    try:
        with open(path, "x") as file:  # noqa: PTH123
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return "again"
    time.sleep(seconds)
    return "once"


MODEL = None


def build_model(folder, seconds, num_bytes):
    """Make what is expensive to make, for all that this process runs; leave a file for each
    time.
    """
    global MODEL
    Path(folder, uuid.uuid4().hex).touch()
    time.sleep(seconds)
    MODEL = np.arange(num_bytes // 8)


def use_model(number):
    """Look something up in the model."""
    return int(MODEL[number])
