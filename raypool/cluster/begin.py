"""The start of a training job on its cluster's head: `python -m raypool.cluster.begin ... --
train.py`.

First it checks that the folder for outputs is writable, instead of failing after hours of training.
Then it waits until all machines have joined, so that the script's pool has all GPUs. At last it
becomes the script, so that exit code and signals are the script's.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from raypool.errors import CloudError

MACHINES_TIMEOUT_S = 1800.0
"""The time for machines to join [s]: starting and installing takes minutes, more in a full zone."""

LOOK_S = 1.0
"""The interval of checks for machines [s]."""

ANSWER_S = 10.0
"""The time for Ray to list its machines [s]."""

CONNECT_S = 2.0
"""The time for a connection to the head [s]."""

BUCKET_PATIENCE = {"gs": "?retry_limit_seconds=20", "s3": ""}
"""Options that limit retries of a bucket; Google's client would retry for a quarter of an hour."""


def main(words: Sequence[str]) -> None:
    """Test the folder, wait for the machines, and become the script: Python's arguments after
    `--`.
    """
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.begin", description="Begin a training job on its cluster."
    )
    parser.add_argument("--job-dir", help="has to be writable from here")
    parser.add_argument(
        "--machines", type=int, default=1, help="so many have to be there, the head included"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=MACHINES_TIMEOUT_S,
        help="for so long they are waited for [s]",
    )
    options = parser.parse_args(words[:at])
    script = words[at + 1 :]
    if not script:
        parser.error("there is nothing to run: `-- SCRIPT` is missing")
    try:
        if options.job_dir is not None:
            try_out(options.job_dir)
        # also for the head alone: Ray answers before its node is there
        wait_until(options.machines, machines_there, options.timeout_s)
    except CloudError as error:
        sys.exit(f"raypool: {error}")
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
            files, folder = fs.FileSystem.from_uri(job_dir.rstrip("/") + BUCKET_PATIENCE[scheme])
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
    """Return the number of machines of this job's cluster; 0 if Ray does not answer.

    It does not connect as a driver: when the first driver of a job ends, Ray removes the working
    folder, and the script with it.
    """
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import RaySystemError, RpcError

    from raypool.cluster.connect import host_and_port
    from raypool.ray_private import GcsClient

    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        raise CloudError(
            "RAY_ADDRESS is not set, so the cluster of this job is unknown. A job of Ray has it."
        )
    try:
        # Ray's client would try an address without a listener for a minute
        socket.create_connection(host_and_port(address), CONNECT_S).close()
        nodes = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S).values()
    except (OSError, RpcError, RaySystemError):
        return 0
    return sum(node.state == GcsNodeInfo.ALIVE for node in nodes)


def wait_until(machines: int, count: Callable[[], int], timeout_s: float) -> None:
    """Wait until `machines` machines have joined, and print the progress.

    Args:
        machines: The expected number.
        count: Returns the current number.
        timeout_s: The time limit [s].

    Raises:
        CloudError: Some have not joined by then.

    Example:
        >>> wait_until(2, lambda: 2, timeout_s=10)
        raypool: 2 of 2 machines have joined.
    """
    deadline = time.monotonic() + timeout_s
    there = -1
    while there < machines:
        if (now := count()) != there:
            there = now
            sys.stdout.write(f"raypool: {there} of {machines} machines have joined.\n")
            sys.stdout.flush()
        elif time.monotonic() > deadline:
            raise CloudError(_why_missing(there, machines, timeout_s))
        else:
            time.sleep(LOOK_S)


def _why_missing(there: int, machines: int, timeout_s: float) -> str:
    address = os.environ.get("RAY_ADDRESS")
    if not there:
        return (
            f"No Ray has answered at {address} for {timeout_s:g} s. RAY_ADDRESS has to be the"
            " address of the cluster's head, and Ray has to run there."
        )
    return (
        f"{there} of {machines} machines have joined the Ray at {address} after {timeout_s:g} s. On"
        " a cloud, `raypool cluster status` shows what became of the others: the zone may have no"
        " more machines of this kind, or your quota may be used up."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
