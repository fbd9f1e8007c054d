"""How much larger a cluster can become by itself: what the file says that Ray's autoscaler was started with.

Source: Ray's `autoscaler/_private/monitor.py` (which reads that file, on the head), and "Configuring Autoscaling" in its
documentation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypool.engine.demands import Demand, Node, living_nodes
from raypool.engine.ray_calls import UNRECORDED

IS_NEW, IN_KUBERNETES = "RAY_enable_autoscaler_v2", "RAY_CLUSTER_NAME"
"""Variables of a head that KubeRay's operator has made, for a cluster that it grows."""

OPTION = "--autoscaling-config="

HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head."""

ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Growth:
    """What Ray's autoscaler may add to a cluster.

    Attributes:
        kinds: Descriptions of nodes, as `ray.nodes` has them, and how many of each there may be.
        most: So many in all; None: nobody here knows (where Kubernetes' operator grows the cluster).
    """

    kinds: tuple[tuple[Node, int], ...] = ()
    most: int | None = 0

    def holds(self, demand: Demand) -> int:
        """Return how many claims the cluster could hold if it were as large as it may become, and empty."""
        if self.most is None:
            return UNKNOWN
        there = sum(demand.fits(node) for node in living_nodes() if HEAD in node["Resources"])
        left = self.most
        for fits, count in sorted(((demand.fits(node), count) for node, count in self.kinds), reverse=True):
            there += min(count, left) * fits
            left -= min(count, left)
        return there


UNKNOWN = 10**6
"""As many as anybody asks for."""

NONE = Growth()


def growth() -> Growth:
    """Return what Ray's autoscaler may add to the cluster that is connected; nothing if it has none."""
    node = ray._private.worker.global_worker.node  # private, checked on Ray 2.60; None from outside
    if node is not None and node.is_head():
        return NONE  # this process has started it, without any
    heads = [node["NodeID"] for node in living_nodes() if HEAD in node["Resources"]]
    if not heads:
        return NONE
    there = NodeAffinitySchedulingStrategy(heads[0], soft=False)
    ask = ray.remote(num_cpus=0, scheduling_strategy=there, **UNRECORDED)(_settings_here)
    try:
        settings = ray.get(ask.remote(), timeout=ASK_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError):
        return NONE
    return NONE if settings is None else growth_of(settings)


def _settings_here() -> dict[str, Any] | None:
    """Return what the autoscaler on this machine was started with; {} if it is Kubernetes' operator's, None without one."""
    import yaml

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline():
                if word.startswith(OPTION):
                    content: dict[str, Any] = yaml.safe_load(Path(word.removeprefix(OPTION)).expanduser().read_text("utf-8"))
                    return content
    return {} if os.environ.get(IS_NEW) == "1" and IN_KUBERNETES in os.environ else None


def growth_of(settings: Mapping[str, Any]) -> Growth:
    """Return what may come, by what the autoscaler was started with.

    Example:
        >>> gpu = {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 4}
        >>> settings = {"head_node_type": "head", "max_workers": 3, "available_node_types": {"head": {}, "gpu": gpu}}
        >>> growth_of(settings)
        Growth(kinds=(({'Resources': {'CPU': 8, 'GPU': 1}, 'Labels': {}}, 4),), most=3)
    """
    if not settings:
        return Growth(most=None)
    most = int(settings.get("max_workers", 0))
    kinds = []
    for name, kind in settings.get("available_node_types", {}).items():
        if name != settings.get("head_node_type"):
            node = {"Resources": kind.get("resources", {}), "Labels": kind.get("labels", {})}
            kinds.append((node, int(kind.get("max_workers", most))))
    return Growth(tuple(kinds), most) if kinds else NONE
