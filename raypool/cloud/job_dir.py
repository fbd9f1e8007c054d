"""Where a training job's outputs go: `--job-dir`."""

from __future__ import annotations

import re

BUCKETS = {
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
}
"""How buckets may be called.

Source: Google Cloud Storage, "About Cloud Storage buckets"; Amazon S3, "General purpose bucket naming rules".
"""


def why_not(job_dir: str) -> str | None:
    """Return what is wrong with a job's folder, None if nothing can be seen to be.

    Whether it can be written to shows on the cluster, before the script starts there.

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
