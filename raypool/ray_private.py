"""Every private name that raypool imports from Ray, and its purpose: an update of Ray begins here.

Private attributes of Ray's objects are where the objects are: actors' ids and the connection of Ray
Client in `backends/ray/client.py` and `session.py`, `JobSubmissionClient._do_request` in
`cluster/jobs.py`, and the scripts that `cli/doctor.py` and `cluster/jobs.py` run in other
processes.

All were checked on Ray 2.60. A name is imported when it is first used, so this module costs
nothing, and if a Ray lacks one, only the code that uses it fails (or does without, where it says
so).

>>> from raypool.ray_private import GCS_STORAGE_MAX_SIZE
>>> GCS_STORAGE_MAX_SIZE
536870912
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """The module that has a name, or is called so itself; and why no public one suffices."""

    module: str
    reason: str


NAMES = {
    # --- Ray of this process ----------------------------------------------------------------------
    "worker": PrivateName(
        "ray._private.worker",
        "Its `global_worker` knows the node, the store and dead actors, its `_global_node` the"
        " session's folder; public calls would start a Ray, or need a dashboard. Its"
        " `print_to_stdstream` prints about workers that die.",
    ),
    "state": PrivateName(
        "ray._private.state",
        "Actors, jobs and draining nodes: the public state API needs a dashboard.",
    ),
    "ray_constants": PrivateName(
        "ray._private.ray_constants",
        "What Ray has read from the environment as it was imported, and names of its settings.",
    ),
    "node": PrivateName(
        "ray._private.node",
        "Starts the dashboard's server: `ray.init` has no way to leave that out.",
    ),
    "parameter": PrivateName(
        "ray._private.parameter", "Options of `ray start` that `ray.init` does not have."
    ),
    "services": PrivateName(
        "ray._private.services",
        "Starts an agent that nobody asks, and waits for this machine's node, looking once a"
        " second.",
    ),
    "utils": PrivateName(
        "ray._private.utils",
        "Imports what the dashboard's agent needs; sets the number of threads of a worker.",
    ),
    "auto_init_hook": PrivateName(
        "ray._private.auto_init_hook",
        "Its `enable_auto_connect` says whether a call starts a Ray where none is: public, but only"
        " for the whole process, and read as Ray is imported.",
    ),
    "Config": PrivateName("ray._raylet", "Reads Ray's settings from the environment again."),
    "AuthenticationTokenLoader": PrivateName("ray._raylet", "Reads the token again."),
    "get_accelerator_manager_for_resource": PrivateName(
        "ray._private.accelerators",
        "GPUs that are not NVIDIA's.",
    ),
    # --- Ray on another machine -------------------------------------------------------------------
    "GcsClient": PrivateName(
        "ray._raylet",
        "Asks a control store without joining its cluster, and drains nodes.",
    ),
    "init_grpc_channel": PrivateName(
        "ray._private.grpc_utils",
        "Asks a server of Ray Client whether it is there, with token and TLS.",
    ),
    "GCS_STORAGE_MAX_SIZE": PrivateName(
        "ray._private.runtime_env.packaging",
        "How large a working_dir may be [bytes].",
    ),
    "_dir_travel": PrivateName(
        "ray._private.runtime_env.packaging",
        "Which files of a working_dir travel: .gitignore and .rayignore.",
    ),
    "_NODE_PROVIDERS": PrivateName(
        "ray.autoscaler._private.providers",
        "Which providers Ray's launcher knows.",
    ),
    "_get_node_provider": PrivateName(
        "ray.autoscaler._private.providers",
        "Which machines a cluster has, and to delete them from its head.",
    ),
    "prepare_config": PrivateName(
        "ray.autoscaler._private.util", "Ray's own check of a cluster's file."
    ),
    "validate_config": PrivateName(
        "ray.autoscaler._private.util", "Ray's own check of a cluster's file."
    ),
    # --- Ray Train --------------------------------------------------------------------------------
    "device_manager": PrivateName(
        "ray.air._internal.device_manager", "The device that Ray Train gives a rank."
    ),
    "StorageContext": PrivateName(
        "ray.train.v2._internal.execution.storage",
        "The folder of a run, as `ray.train.report` sees it.",
    ),
    "LocalTrainFnUtils": PrivateName(
        "ray.train.v2._internal.execution.train_fn_utils",
        "What `ray.train` finds in a loop that the warm lane runs.",
    ),
    "DistributedTrainFnUtils": PrivateName(
        "ray.train.v2._internal.execution.train_fn_utils",
        "What `ray.train` finds in a rank of the managed lane: ours is asked by `ray.train.report`"
        " first.",
    ),
    "get_train_fn_utils": PrivateName(
        "ray.train.v2._internal.execution.train_fn_utils", "Likewise."
    ),
    "set_train_fn_utils": PrivateName(
        "ray.train.v2._internal.execution.train_fn_utils", "Likewise."
    ),
    "ControllerCallback": PrivateName(
        "ray.train.v2._internal.execution.callback",
        "The only way to hear who the controller is.",
    ),
    "ReportCallback": PrivateName(
        "ray.train.v2._internal.execution.callback",
        "The only way to hear which checkpoints were kept.",
    ),
    "WorkerGroupCallback": PrivateName(
        "ray.train.v2._internal.execution.callback",
        "The only way to reach the ranks before they begin.",
    ),
    "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME": PrivateName(
        "ray.train.v2._internal.constants",
        "The file by which Ray Train knows the checkpoints of earlier runs in a folder.",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'raypool.ray_private' has no attribute {name!r}")
    path = NAMES[name].module
    module = importlib.import_module(path)
    return module if path.endswith(f".{name}") else getattr(module, name)
