"""The start of a training job on its cluster's head: `python -m raypool.cluster.begin ... --
train.py`.

It checks first that the output folder is writable, so that no training fails after hours, and
waits until all machines have joined, so that the script's pool has all GPUs. Then it becomes the
script, so that exit code and signals are the script's.

Source: AI Platform Training, "Using TF_CONFIG for distributed training": `cluster` has the
addresses of each role, `task` is this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raypool.cluster.connect import listens, living_nodes
from raypool.cluster.launcher_file import ROLE
from raypool.errors import CloudError

MACHINES_TIMEOUT_S = 1800.0  # starting and installing takes minutes, more in a full zone
LOOK_S = 1.0  # between two looks
ANSWER_S = 10.0  # for Ray to list its machines
CONNECT_S = 2.0  # for a connection to the head

# Google's client would retry for a quarter of an hour.
BUCKET_OPTIONS = {"gs": "?retry_limit_seconds=20", "s3": ""}

TF_PORT = 2222  # in the addresses of TF_CONFIG: nobody listens until the script starts a server
TF_NAMES = {"worker": "worker", "parameter-server": "ps", "evaluator": "evaluator"}
"""TensorFlow's names of groups of machines."""


def main(words: Sequence[str]) -> None:
    """Test the folder, wait for the machines, and become the script: Python's arguments after
    `--`.
    """
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.begin", description="Start a training job on its cluster."
    )
    parser.add_argument("--job-dir", help="folder that must be writable")
    parser.add_argument(
        "--machines", type=int, default=1, help="number of machines to wait for, including the head"
    )
    parser.add_argument("--chief", help="set TF_CONFIG, with this name of the master")
    options = parser.parse_args(words[:at])
    script = words[at + 1 :]
    if not script:
        parser.error("nothing to run: `-- SCRIPT` is missing")
    try:
        if options.job_dir is not None:
            try_out(options.job_dir)
        # also for the head alone: Ray answers before its node is there
        wait_until(options.machines, machines_there, MACHINES_TIMEOUT_S)
    except CloudError as error:
        sys.exit(f"raypool: {error}")
    if options.chief:
        machines = [
            (node.labels.get(ROLE, "head" if node.is_head_node else ""), node.node_manager_address)
            for node in _nodes()
        ]
        os.environ["TF_CONFIG"] = tf_config(machines, options.chief)
    os.execv(sys.executable, [sys.executable, *script])


def try_out(job_dir: str) -> None:
    """Write a small file into a job's folder, and remove it again. The folder is made if missing.

    Raises:
        CloudError: It cannot be written to from this machine.
    """
    from pyarrow import fs

    scheme, is_in_bucket, _ = job_dir.partition("://")
    try:
        if is_in_bucket:
            files, folder = fs.FileSystem.from_uri(job_dir.rstrip("/") + BUCKET_OPTIONS[scheme])
        else:
            files, folder = fs.LocalFileSystem(), job_dir.rstrip("/") or "/"
        files.create_dir(folder, recursive=True)
        place = f"{folder}/.raypool-{uuid.uuid4().hex}"
        with files.open_output_stream(place) as stream:
            stream.write(b"raypool tries whether it can write here\n")
        files.delete_file(place)
    except (OSError, ValueError) as error:
        raise CloudError(
            f"--job-dir {job_dir} cannot be written to from this machine: {error}. "
            "Make sure that it exists, and that the machines' account may write there."
        ) from error


def machines_there() -> int:
    """Return the number of machines of this job's cluster; 0 if Ray does not answer."""
    return len(_nodes())


def _nodes() -> list[Any]:
    # Not as a driver: when the first driver of a job ends, Ray removes the working folder, and the
    # script with it.
    from ray.exceptions import RaySystemError, RpcError

    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        raise CloudError(
            "RAY_ADDRESS is not set, so the cluster of this job is unknown. Ray sets it for its"
            " jobs."
        )
    try:
        # Ray's client would try an address without a listener for a minute
        listens(address, CONNECT_S)
        return list(living_nodes(address, ANSWER_S).values())
    except (OSError, RpcError, RaySystemError):  # still starting: `wait_until` asks again
        return []


def wait_until(machines: int, count: Callable[[], int], timeout_s: float) -> None:
    """Wait until this many machines have joined, according to `count`, and print the progress.

    Raises:
        CloudError: Some have not joined by the time limit [s].
    """
    deadline = time.monotonic() + timeout_s
    there, address = -1, os.environ.get("RAY_ADDRESS")
    while there < machines:
        if (now := count()) != there:
            there = now
            sys.stdout.write(f"raypool: {there} of {machines} machines have joined.\n")
            sys.stdout.flush()
        elif time.monotonic() <= deadline:
            time.sleep(LOOK_S)
        elif there:
            raise CloudError(
                f"{there} of {machines} machines have joined the Ray at {address} after"
                f" {timeout_s:g} s. On a cloud, `raypool cluster status` shows the others: the"
                " zone may be out of such machines, or your quota used up."
            )
        else:
            raise CloudError(
                f"Ray did not answer at {address} within {timeout_s:g} s. RAY_ADDRESS must be the"
                " address of the cluster's head, and Ray must be running there."
            )


def tf_config(machines: Iterable[tuple[str, str]], chief: str) -> str:
    """Return the TF_CONFIG of the master of a job.

    `machines` are groups and addresses; `chief` is TensorFlow's name of the master ("chief", or
    once "master").

    Example:
        >>> tf_config([("worker", "10.0.0.2"), ("head", "10.0.0.1")], "chief")
        '{"cluster": {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}, "task": {"type":...
    """
    names = {"head": chief, **TF_NAMES}
    cluster: dict[str, list[str]] = {chief: []}
    for group, address in sorted(machines):
        if group in names:
            cluster.setdefault(names[group], []).append(f"{address}:{TF_PORT}")
    return json.dumps({"cluster": cluster, "task": {"type": chief, "index": 0}})


if __name__ == "__main__":
    main(sys.argv[1:])
