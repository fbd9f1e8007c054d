"""Many models at once, one on each GPU: MATLAB's parpool, parfor and parfeval for people who train models in Python, on Ray.

>>> from raypool import parpool
>>> with parpool(2, profile="threads", quiet=True) as pool:
...     list(pool.parfor(lambda x: x + 1, [1, 2, 3]))
[2, 3, 4]
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from raypool.batches import batch, find_job
    from raypool.checkpoint import load_checkpoint, save_checkpoint
    from raypool.devices.hand import as_device, copy_to, cpu, gpu
    from raypool.engine.backend import WorkerInfo
    from raypool.engine.machine import gpu_device_count, gpu_device_table
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
    from raypool.interop.joblib import register_joblib
    from raypool.job import Job
    from raypool.journal.reading import load_results
    from raypool.metric_buffer import MetricBuffer
    from raypool.partition import PoolPart
    from raypool.pool import ParallelPool, Statistics, fit, gcp, parpool
    from raypool.profiles import Profile, Tls, WorkerResources
    from raypool.queue_home import Listener
    from raypool.queues import DataQueue
    from raypool.reports import report
    from raypool.results import Results
    from raypool.shared import Constant
    from raypool.spmd.composite import Composite
    from raypool.spmd.context import SpmdContext
    from raypool.store import ValueStore
    from raypool.task import CurrentTask, current_task
    from raypool.train.options import TrainingOptions
    from raypool.train.run import TrainingRun
    from raypool.train.runs import RunOptions, TrainingResult
    from raypool.train.scaling import ScalingReport, scaling_report
    from raypool.view import PoolView
    from raypool.waiting import after_all, after_each, fetch_next, fetch_outputs, wait

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


_HOMES = {
    "CloudError": "raypool.errors",
    "CollectiveError": "raypool.errors",
    "Composite": "raypool.spmd.composite",
    "CompositeError": "raypool.errors",
    "Constant": "raypool.shared",
    "CurrentTask": "raypool.task",
    "DataQueue": "raypool.queues",
    "Future": "raypool.futures",
    "InternalError": "raypool.errors",
    "InvalidTypeError": "raypool.errors",
    "InvalidValueError": "raypool.errors",
    "Job": "raypool.job",
    "JournalError": "raypool.errors",
    "Listener": "raypool.queue_home",
    "LossReason": "raypool.errors",
    "MetricBuffer": "raypool.metric_buffer",
    "ParallelPool": "raypool.pool",
    "PoolBrokenError": "raypool.errors",
    "PoolClosedError": "raypool.errors",
    "PoolPart": "raypool.partition",
    "PoolView": "raypool.view",
    "Profile": "raypool.profiles",
    "QueueClosedError": "raypool.errors",
    "RaypoolError": "raypool.errors",
    "RemoteTraceback": "raypool.errors",
    "ResourceError": "raypool.errors",
    "Results": "raypool.results",
    "RunOptions": "raypool.train.runs",
    "ScalingReport": "raypool.train.scaling",
    "SerializationError": "raypool.errors",
    "SpmdContext": "raypool.spmd.context",
    "SpmdError": "raypool.errors",
    "StartupError": "raypool.errors",
    "Statistics": "raypool.pool",
    "TaskCancelled": "raypool.errors",
    "TaskError": "raypool.errors",
    "TaskTimeoutError": "raypool.errors",
    "Tls": "raypool.profiles",
    "TrainingError": "raypool.errors",
    "TrainingOptions": "raypool.train.options",
    "TrainingResult": "raypool.train.runs",
    "TrainingRun": "raypool.train.run",
    "ValueStore": "raypool.store",
    "WorkerInfo": "raypool.engine.backend",
    "WorkerLostError": "raypool.errors",
    "WorkerResources": "raypool.profiles",
    "after_all": "raypool.waiting",
    "after_each": "raypool.waiting",
    "as_device": "raypool.devices.hand",
    "batch": "raypool.batches",
    "copy_to": "raypool.devices.hand",
    "cpu": "raypool.devices.hand",
    "current_task": "raypool.task",
    "fetch_next": "raypool.waiting",
    "fetch_outputs": "raypool.waiting",
    "find_job": "raypool.batches",
    "fit": "raypool.pool",
    "gcp": "raypool.pool",
    "gpu": "raypool.devices.hand",
    "gpu_device_count": "raypool.engine.machine",
    "gpu_device_table": "raypool.engine.machine",
    "load_checkpoint": "raypool.checkpoint",
    "load_results": "raypool.journal.reading",
    "parpool": "raypool.pool",
    "register_joblib": "raypool.interop.joblib",
    "report": "raypool.reports",
    "save_checkpoint": "raypool.checkpoint",
    "scaling_report": "raypool.train.scaling",
    "wait": "raypool.waiting",
}
"""Where each name is from. It is imported when somebody asks for it: each process of a pool begins with `import raypool`, and
those of workers need little of what a driver needs.
"""


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    if name == "errors":  # its names are in tracebacks, with this one before them
        return importlib.import_module("raypool.errors")
    raise AttributeError(f"module 'raypool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
