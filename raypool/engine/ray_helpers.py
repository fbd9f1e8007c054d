"""A Ray of our own without the processes that have nothing to do there: they take longer to come and go than all the others.

`ray.init` starts, and waits for, the server of a dashboard that is off; the autoscaler's monitor, where nothing can be added; and
one that reads all logs, to pass them on to a driver that has said that it does not want them. The agent of the dashboard has to
be there, and is Ray's small one, without servers of its own. `benchmarks/bench_start.py` says what that costs. The logs are
written all the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

SWITCHES = {"no_monitor": True, "include_log_monitor": False}
"""Ray's own, which `ray start` has as options; `ray.init` has no way to set them."""

NO_SERVER = b"127.0.0.1:0"
"""Where the dashboard's server would be. Whoever asks for it (Ray's State API) hears at once that nobody is there; Ray would look
for a missing address for 40 s."""


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """Let `ray.init` leave them out. Private names, checked on Ray 2.60; where one is missing, all are started."""
    try:
        from ray._private import node, parameter, utils
        from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD

        settings, start, why_small = parameter.RayParams, node.Node.start_api_server, utils.get_dashboard_dependency_error
    except (ImportError, AttributeError):
        yield
        return
    if not SWITCHES.keys() <= inspect.signature(settings).parameters.keys():
        yield
        return

    def leave_out(node: Any, *_: Any, **__: Any) -> None:
        """Do what is left of `Node.start_api_server`."""
        node._webui_url = ""
        node.get_gcs_client().internal_kv_put(DASHBOARD_ADDRESS.encode(), NO_SERVER, True, KV_NAMESPACE_DASHBOARD)

    parameter.RayParams = functools.partial(settings, **SWITCHES)
    node.Node.start_api_server = leave_out
    utils.get_dashboard_dependency_error = lambda: ImportError("nobody asks the agent of the dashboard anything")
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server, utils.get_dashboard_dependency_error = settings, start, why_small
