"""Counts processor cores."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many physical cores this process may use.

    Affinity masks and cgroup limits are respected (by loky), and so is the share that SLURM gave to this task.
    """
    import loky

    cores = int(loky.cpu_count(only_physical_cores=True))
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min(cores, int(slurm))) if slurm.isdigit() else max(1, cores)


def usable_cpus() -> int:
    """Return how many logical CPUs this process may use, by the same rules."""
    import loky

    return max(usable_cores(), int(loky.cpu_count())) if not os.environ.get("SLURM_CPUS_PER_TASK") else usable_cores()
