"""Where a training job's outputs go, `--job-dir`: a folder in a bucket, or a path."""

from __future__ import annotations

import re
import uuid
from typing import Any

from raypool.errors import CloudError

BUCKETS = {
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
}
"""How buckets may be called.

Source: Google Cloud Storage, "About Cloud Storage buckets"; Amazon S3, "General purpose bucket naming rules".
"""

PATIENCE = {"gs": "?retry_limit_seconds=20", "s3": ""}
"""So long a bucket is asked again if it does not answer; Google's client would do so for a quarter of an hour."""


def why_not(job_dir: str) -> str | None:
    """Return what is wrong with a job's folder, None if nothing can be seen to be from here.

    Example:
        >>> why_not("gs://my-bucket/run-1"), why_not("/mnt/shared/run-1")
        (None, None)
        >>> why_not("gs:/my-bucket/run-1")
        "'gs:/my-bucket/run-1' is neither gs://BUCKET/..., s3://BUCKET/... nor a path that begins with /."
    """
    scheme, colon, rest = job_dir.partition("://")
    if colon and scheme in BUCKETS:
        bucket = rest.partition("/")[0]
        if BUCKETS[scheme].fullmatch(bucket):
            return None
        return f"{bucket!r} cannot be a bucket's name: three or more of a-z, 0-9, '-' and '.', a letter or digit at both ends."
    if job_dir.startswith("/"):
        return None
    return f"{job_dir!r} is neither gs://BUCKET/..., s3://BUCKET/... nor a path that begins with /."


def is_in_bucket(job_dir: str) -> bool:
    """Say whether a job's folder outlives the machines."""
    return "://" in job_dir


def try_out(job_dir: str) -> None:
    """Write a small file into a job's folder, and remove it again. The folder is made if it is not there.

    Raises:
        CloudError: It cannot be written to from this machine.
    """
    try:
        files, folder = _filesystem(job_dir)
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


def _filesystem(job_dir: str) -> tuple[Any, str]:
    """Return who knows a folder, and what it calls it."""
    from pyarrow import fs

    if not is_in_bucket(job_dir):
        return fs.LocalFileSystem(), job_dir.rstrip("/") or "/"
    files, folder = fs.FileSystem.from_uri(job_dir.rstrip("/") + PATIENCE[job_dir.partition("://")[0]])
    return files, folder
