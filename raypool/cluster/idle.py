"""Shuts an unused cluster down: `python -m raypool.cluster.idle --minutes 60`, on its head.

A cluster is in use while a job of Ray's has not ended: a script, a submitted job (also one that
waits), or a connection through Ray Client, and so any pool. The files that raypool writes start
this watcher. It deletes all machines through their provider, the head last, so that it also works
when the machine that started the cluster is gone.

Source: Ray 2.60, `dashboard/modules/job/job_head.py` (the list of jobs has every driver, but for
Ray's own) and `autoscaler/_private/monitor.py` (the head has what it needs to make and end machines
in ~/ray_bootstrap_config.yaml).
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND

from raypool.cluster.jobs import Dashboard
from raypool.cluster.launcher_file import TOKEN
from raypool.errors import CloudError
from raypool.profiles import DASHBOARD_PORT, Profile

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

logger = logging.getLogger("raypool.cluster.idle")

LOOK_S = 30.0  # between looks at the cluster's jobs
CONFIG = "~/ray_bootstrap_config.yaml"
RUNNING = "~/.raypool-idle.pid"  # has the process of the newest watcher: each `up` starts another


def last_use(jobs: Iterable[JobDetails], now: float) -> float:
    """Return when a job last ran [Unix time, s]: `now` if one runs or waits, 0 if none ever did."""
    return max(
        (job.end_time / 1000 if job.end_time and job.status.is_terminal() else now for job in jobs),
        default=0.0,
    )


def watch(minutes: float, find_jobs: Callable[[], Iterable[JobDetails]]) -> bool:
    """Wait until the cluster has been unused for this many minutes; return whether to shut it down.

    `find_jobs` returns the cluster's jobs.
    """
    mark = Path(RUNNING).expanduser()
    mark.write_text(str(os.getpid()), encoding="utf-8")
    used_at = time.time()
    while time.time() - used_at < minutes * 60:
        time.sleep(min(LOOK_S, minutes * 60))
        if mark.read_text(encoding="utf-8") != str(os.getpid()):
            return False  # a newer watcher has its own number of minutes
        try:
            used_at = max(used_at, last_use(find_jobs(), time.time()))
        except (CloudError, RuntimeError, OSError) as error:
            # A dashboard may be slow beside work that runs. Without a head's Ray nothing runs.
            if any(each.info["name"] == "gcs_server" for each in psutil.process_iter(["name"])):
                used_at = time.time()
                logger.warning("The jobs are unknown, so the cluster counts as in use: %s", error)
    return True


def shut_down(config: Path) -> None:
    """Delete all machines of this head's cluster, this one last."""
    from raypool.ray_private import _get_node_provider

    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    # else its autoscaler makes machines again
    subprocess.run(["ray", "stop"], check=False)
    while True:
        try:
            provider = _get_node_provider(content["provider"], content["cluster_name"])
            [*heads] = provider.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})
            workers = [node for node in provider.non_terminated_nodes({}) if node not in heads]
            logger.warning("Deleting %d workers and the head.", len(workers))
            provider.terminate_nodes(workers)  # before the head, whose end ends this process
            provider.terminate_nodes(heads)
            return
        except Exception:  # whatever the provider's library raises: machines cost money
            logger.exception(
                "Not all machines could be deleted; the others are still billed. Trying again in"
                " %g s.",
                LOOK_S,
            )
        time.sleep(LOOK_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Watch this head's cluster until it is shut down, or another watcher takes over."""
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.idle", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--minutes", type=float, required=True, help="time without use before shutdown [min]"
    )
    parser.add_argument("--config", default=CONFIG, help="cluster file on the head")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    profile = Profile(jobs_address=f"http://127.0.0.1:{DASHBOARD_PORT}", token_file=TOKEN)
    if watch(options.minutes, lambda: Dashboard(profile).list_jobs()):
        shut_down(Path(options.config).expanduser())


if __name__ == "__main__":
    main()
