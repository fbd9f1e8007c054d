"""`ray start` on a node whose workers are forks: `python -m raypool.backends.ray.ray_start ...`.

For nodes that raypool starts without a pool, such as those of a Slurm job. The arguments are those
of `ray start`; `RAY_TMPDIR` is a private folder. Ray reports no usage. See `fork_server`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from raypool.backends.ray import fork_client, fork_server
from raypool.profiles import Profile


def main(words: Sequence[str]) -> None:
    """Start Ray, and exit as `ray start` does."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # its option sets it later, when forks differ
    modules = fork_server.installed(Profile().preload)
    reason = fork_server.obstacle(modules)
    if reason is None:
        # before Ray is imported, which takes as long as what the server imports
        path = fork_server.serve(Path(os.environ["RAY_TMPDIR"]), modules, {})
        os.environ[fork_client.SERVER] = path
        from raypool.ray_private import parameter

        parameter.RayParams = functools.partial(
            parameter.RayParams, setup_worker_path=fork_client.__file__
        )
    else:
        sys.stdout.write(f"raypool: {fork_server.NOT_FORKED % reason}\n")
    sys.argv = ["ray", "start", *words]
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
