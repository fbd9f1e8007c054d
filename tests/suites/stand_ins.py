"""Pools for other libraries' tests, in the process that runs these: a few workers, in threads or on
a small Ray of their own.
"""

from __future__ import annotations

import os
from typing import Any

# what is in it is imported when it is used: at its end, a script is told of it in the order of the
# imports
import raypool

BACKEND = "RAYPOOL_SUITE_BACKEND"
"""Environment variable: "threads" or "ray"."""

ADDRESS = "RAYPOOL_SUITE_RAY"
"""Environment variable: where the Ray is that scripts, started by the tests, share with these."""


def is_on_ray() -> bool:
    return os.environ[BACKEND] == "ray"


def start() -> None:
    """Start a Ray, which ends with this process, if the workers are to be on one; or use the one
    that there is.
    """
    if not is_on_ray():
        return
    from raypool.backends.ray.session import ENVIRONMENT
    from raypool.cluster.connect import make_token

    os.environ.update(ENVIRONMENT)
    make_token()
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if ADDRESS in os.environ:
        ray.init(os.environ[ADDRESS], **quiet)
        return
    ray.init(
        "local",
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100_000_000,
        include_dashboard=False,
        **quiet,
    )
    os.environ[ADDRESS] = ray.get_runtime_context().gcs_address


def open_pool(num_workers: int | None, **changes: Any) -> raypool.ParallelPool:
    """Open a pool; on Ray there may be more workers than cores."""
    if not is_on_ray():
        return raypool.parpool(num_workers, profile="threads", quiet=True, **changes)
    return raypool.parpool(
        num_workers, quiet=True, resources=raypool.WorkerResources(gpus=0, cpus=0.01), **changes
    )
