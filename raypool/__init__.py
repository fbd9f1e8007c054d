"""Many models at once, one on each GPU: MATLAB's parpool, parfor and parfeval for people who train models in Python, on Ray.

>>> from raypool import parpool
>>> with parpool(2, profile="threads", quiet=True) as pool:
...     list(pool.parfor(lambda x: x + 1, [1, 2, 3]))
[2, 3, 4]
"""

import importlib
import typing

from raypool.engine.backend import WorkerInfo
from raypool.errors import (
    CloudError,
    CollectiveError,
    CompositeError,
    InternalError,
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    LossReason,
    PoolBrokenError,
    PoolClosedError,
    QueueClosedError,
    RaypoolError,
    RemoteTraceback,
    ResourceError,
    SerializationError,
    SpmdError,
    StartupError,
    TaskCancelled,
    TaskError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
)
from raypool.futures import Future
from raypool.partition import PoolPart
from raypool.pool import ParallelPool, Statistics, fit, gcp, parpool
from raypool.profiles import Profile
from raypool.queue_home import Listener
from raypool.queues import DataQueue
from raypool.reports import report
from raypool.resources import WorkerResources
from raypool.results import Results
from raypool.shared import Constant
from raypool.store import ValueStore
from raypool.task import CurrentTask, current_task
from raypool.tls import Tls
from raypool.view import PoolView
from raypool.waiting import after_all, after_each, fetch_next, fetch_outputs, wait

if typing.TYPE_CHECKING:
    from raypool.batches import batch, find_job
    from raypool.checkpoint import load_checkpoint, save_checkpoint
    from raypool.devices.hand import as_device, copy_to, cpu, gpu
    from raypool.engine.machine import gpu_device_count, gpu_device_table
    from raypool.interop.joblib import register_joblib
    from raypool.job import Job
    from raypool.journal.reading import load_results
    from raypool.metric_buffer import MetricBuffer
    from raypool.spmd.composite import Composite
    from raypool.spmd.context import SpmdContext
    from raypool.train.options import TrainingOptions
    from raypool.train.run import TrainingRun
    from raypool.train.runs import RunOptions, TrainingResult
    from raypool.train.scaling import ScalingReport, scaling_report

__version__ = "0.1.0"

__all__ = [
    "CloudError",
    "CollectiveError",
    "Composite",
    "CompositeError",
    "Constant",
    "CurrentTask",
    "DataQueue",
    "Future",
    "InternalError",
    "InvalidTypeError",
    "InvalidValueError",
    "Job",
    "JournalError",
    "Listener",
    "LossReason",
    "MetricBuffer",
    "ParallelPool",
    "PoolBrokenError",
    "PoolClosedError",
    "PoolPart",
    "PoolView",
    "Profile",
    "QueueClosedError",
    "RaypoolError",
    "RemoteTraceback",
    "ResourceError",
    "Results",
    "RunOptions",
    "ScalingReport",
    "SerializationError",
    "SpmdContext",
    "SpmdError",
    "StartupError",
    "Statistics",
    "TaskCancelled",
    "TaskError",
    "TaskTimeoutError",
    "Tls",
    "TrainingError",
    "TrainingOptions",
    "TrainingResult",
    "TrainingRun",
    "ValueStore",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerResources",
    "after_all",
    "after_each",
    "as_device",
    "batch",
    "copy_to",
    "cpu",
    "current_task",
    "fetch_next",
    "fetch_outputs",
    "find_job",
    "fit",
    "gcp",
    "gpu",
    "gpu_device_count",
    "gpu_device_table",
    "load_checkpoint",
    "load_results",
    "parpool",
    "register_joblib",
    "report",
    "save_checkpoint",
    "scaling_report",
    "wait",
]


_LAZY = {
    "Composite": "raypool.spmd.composite",
    "Job": "raypool.job",
    "MetricBuffer": "raypool.metric_buffer",
    "RunOptions": "raypool.train.runs",
    "ScalingReport": "raypool.train.scaling",
    "SpmdContext": "raypool.spmd.context",
    "TrainingOptions": "raypool.train.options",
    "TrainingResult": "raypool.train.runs",
    "TrainingRun": "raypool.train.run",
    "as_device": "raypool.devices.hand",
    "batch": "raypool.batches",
    "copy_to": "raypool.devices.hand",
    "cpu": "raypool.devices.hand",
    "find_job": "raypool.batches",
    "gpu": "raypool.devices.hand",
    "gpu_device_count": "raypool.engine.machine",
    "gpu_device_table": "raypool.engine.machine",
    "load_checkpoint": "raypool.checkpoint",
    "load_results": "raypool.journal.reading",
    "register_joblib": "raypool.interop.joblib",
    "save_checkpoint": "raypool.checkpoint",
    "scaling_report": "raypool.train.scaling",
}
"""What only some need is imported when they ask for it: all else should not wait for it."""


def __getattr__(name: str) -> typing.Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'raypool' has no attribute {name!r}")
