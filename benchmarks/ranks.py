"""Ranks under each launcher, started once; they wait, and do what they are asked in their turn."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading

from benchmarks.measuring import ROOT, search_path

PATIENCE_S = 120
WAITING = "benchmarks.launchers.waiting"
ACCELERATE = ("--mixed_precision=no", "--dynamo_backend=no", "--num_machines=1")


def torchrun(size):
    """Return how Python starts so many ranks by torchrun."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]


def accelerate(size):
    """Return how Python starts so many ranks by Accelerate. On CPUs its `--cpu` starts several by
    MPI only, and this by torch.
    """
    several = ["--multi_gpu"] if size > 1 else []
    return ["-m", "accelerate.commands.launch", *several, f"--num_processes={size}", *ACCELERATE]


def plain(size):
    """Return how Python starts ranks that launch themselves."""
    return []


@contextlib.contextmanager
def waiting_ranks(start, size):
    """Have ranks started by `start(port)`; give a function that asks all of them the same, and
    returns what they answer.

    An answer is a list of numbers for each rank. The first call waits until they are there.
    """
    with contextlib.ExitStack() as stack:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(PATIENCE_S)
        for end in start(server.getsockname()[1]):
            stack.callback(end)
        stack.enter_context(server)  # closed first: then who has not been asked yet ends, too
        ranks = []

        def ask(*words):
            while len(ranks) < size:
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(PATIENCE_S)
                ranks.append(stack.enter_context(connection.makefile("rw")))
            for rank in ranks:
                print(*words, file=rank, flush=True)
            return [[float(number) for number in rank.readline().split()] for rank in ranks]

        yield ask


def by_program(launch, kind, size, num_threads=1):
    """Return a function that starts so many ranks of a kind by a launcher, and returns how to end
    them.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "OMP_NUM_THREADS": str(num_threads),
        "RANKS": str(size),
    }
    return lambda port: [_started([*launch(size), "-m", WAITING, kind, str(port)], environment)]


def by_hand(size, num_threads=1):
    """Return a function that starts so many ranks without a launcher, and returns how to end
    them.
    """

    def start(port):
        with socket.create_server(("127.0.0.1", 0)) as server:
            meeting = server.getsockname()[1]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}
        environment = {
            **os.environ,
            **shared,
            "PYTHONPATH": search_path(),
            "OMP_NUM_THREADS": str(num_threads),
        }
        program = ["-m", WAITING, "torchrun", str(port)]
        return [_started(program, {**environment, "RANK": str(rank)}) for rank in range(size)]

    return start


def _started(arguments, environment):
    folder = tempfile.TemporaryDirectory(prefix="raypool-benchmark-")  # torchrun leaves one behind
    command, environment = (
        [sys.executable, "-W", "ignore", *arguments],
        {
            **environment,
            "TMPDIR": folder.name,
        },
    )
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    return lambda: _end(process, folder)


def _end(process, folder):
    """Wait for it, as nobody asks it any more; end it if that does not help."""
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        process.wait()
    folder.cleanup()


def by_ray_train(size):
    """Return a function that starts so many ranks by Ray Train, on the Ray of this process, and
    returns how to end them.
    """

    def start(port):
        fit = threading.Thread(target=_fit, args=(size, port))
        fit.start()
        return [fit.join]

    return start


def _fit(size, port):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        # the cores are taken
        scaling = ScalingConfig(num_workers=size, resources_per_worker={"memory": 1})
        TorchTrainer(
            _wait,
            train_loop_config={"port": port},
            scaling_config=scaling,
            run_config=RunConfig(storage_path=folder),
        ).fit()


def _wait(config):
    from benchmarks.launchers.waiting import serve
    from benchmarks.trainings import in_ray

    serve(config["port"], in_ray)
