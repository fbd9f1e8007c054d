"""The Ray that things are measured on: one of this process's own, quiet, with the same settings for
all.
"""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def own_ray(object_store_memory=500_000_000, **settings):
    """Start a Ray, and end it."""
    import ray

    ray.init(
        address="local",
        object_store_memory=object_store_memory,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        **settings,
    )
    try:
        yield
    finally:
        ray.shutdown()
