"""Which benchmarks there are, in the order of the page; each is the `run` of a module
`bench_<name>`.
"""

from __future__ import annotations

SUITE = {
    "peers": "Beside the peers: short items",
    "peers_long": "Beside the peers: long items",
    "peers_data": "Beside the peers: large data",
    "sweep": "A real sweep",
    "peers_start": "Beside the peers: beginning and end",
    "peers_setup": "Beside the peers: expensive set-up",
    "peers_faults": "Beside the peers: cancelled, killed, without end",
    "many": "Beside the peers: calls that wait",
    "memory": "What stays in memory",
    "start": "Until something runs",
    "parfor": "An item of a loop",
    "futures": "A future",
    "gap": "Between two tasks",
    "skew": "One long item among short ones",
    "cancel": "Cancelling",
    "closure": "A large array for all tasks",
    "report": "Reporting",
    "queue": "Queues",
    "spmd": "Every worker at once",
    "train": "One model on all workers",
    "launchers": "One training by each launcher",
    "durable": "Sweeps that survive",
    "search": "Searches",
    "search_digits": "A search with real networks",
    "joblib": "Behind joblib",
    "live_view": "Loops, shown and driven",
    "report_page": "A page of results",
    "watch": "A live page",
    "cloud": "Files of clusters, and the command line",
    "devices": "Looking at GPUs",
    "telemetry": "Looking at GPUs all the time",
    "scheduler": "The scheduler by itself",
    "ray_limits": "What one driver costs on Ray",
    "one_driver": "How far one driver goes",
    "two_level": "More workers than one driver serves",
}
"""The name of each, and its heading."""

SHORT = (
    "peers",
    "start",
    "parfor",
    "futures",
    "gap",
    "skew",
    "cancel",
    "closure",
    "report",
    "queue",
    "joblib",
    "live_view",
    "report_page",
)
"""What `make bench` runs: ten minutes on two cores."""

ON_RAY = frozenset(
    {
        "parfor",
        "futures",
        "gap",
        "skew",
        "cancel",
        "closure",
        "report",
        "queue",
        "spmd",
        "train",
        "durable",
        "joblib",
    }
)
"""Those that take part in one session on Ray. The others are in processes of their own, and come
first.
"""

ON_GPU = "gpu"
"""By itself, on a machine that has one."""

MATRICES = frozenset(
    {
        "peers",
        "sweep",
        "peers_long",
        "peers_data",
        "peers_start",
        "peers_setup",
        "peers_faults",
        "many",
        "launchers",
        "search_digits",
    }
)
"""Those of many systems: the page has a row for each of these, and no row for each line."""
