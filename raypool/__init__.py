"""Many models at once, one on each GPU: MATLAB's parpool, parfor and parfeval for people who train
models in Python, on Ray.

>>> from raypool import parpool
>>> with parpool(2, profile="threads", quiet=True) as pool:
...     list(pool.parfor(lambda x: x + 1, [1, 2, 3]))
[2, 3, 4]
"""

import importlib.util
import typing

if typing.TYPE_CHECKING:
    from raypool.batches import Job, batch, find_job
    from raypool.channel.constants import Constant
    from raypool.channel.feed import MetricsReport
    from raypool.channel.queues import DataQueue, Listener
    from raypool.channel.records import WorkerInfo
    from raypool.channel.store import ValueStore
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
        PoolPreemptedError,
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
    from raypool.futures import Future, after_all, after_each, fetch_next, fetch_outputs, wait
    from raypool.gpus.handover import as_device, copy_to, cpu, gpu
    from raypool.gpus.table import gpu_device_count, gpu_device_table
    from raypool.interop.joblib import register_joblib
    from raypool.journal.reading import load_results
    from raypool.pool import (
        ParallelPool,
        PoolPart,
        PoolView,
        Statistics,
        classify,
        fit,
        gcp,
        parfeval,
        parfor,
        parpool,
        predict,
    )
    from raypool.profiles import Profile, Slurm, Tls, WorkerResources
    from raypool.results import Results
    from raypool.spmd.composite import Composite
    from raypool.spmd.context import SpmdContext
    from raypool.task import (
        CurrentTask,
        MetricBuffer,
        current_task,
        load_checkpoint,
        report,
        save_checkpoint,
    )
    from raypool.train.runs import RunOptions, TrainingResult, TrainingRun
    from raypool.train.scaling import ScalingReport, scaling_report
    from raypool.train.training_options import TrainingOptions

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
    "MetricsReport",
    "ParallelPool",
    "PoolBrokenError",
    "PoolClosedError",
    "PoolPart",
    "PoolPreemptedError",
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
    "Slurm",
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
    "classify",
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
    "parfeval",
    "parfor",
    "parpool",
    "predict",
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
    "Constant": "raypool.channel.constants",
    "CurrentTask": "raypool.task",
    "DataQueue": "raypool.channel.queues",
    "Future": "raypool.futures",
    "InternalError": "raypool.errors",
    "InvalidTypeError": "raypool.errors",
    "InvalidValueError": "raypool.errors",
    "Job": "raypool.batches",
    "JournalError": "raypool.errors",
    "Listener": "raypool.channel.queues",
    "LossReason": "raypool.errors",
    "MetricBuffer": "raypool.task",
    "MetricsReport": "raypool.channel.feed",
    "ParallelPool": "raypool.pool",
    "PoolBrokenError": "raypool.errors",
    "PoolClosedError": "raypool.errors",
    "PoolPreemptedError": "raypool.errors",
    "PoolPart": "raypool.pool",
    "PoolView": "raypool.pool",
    "Profile": "raypool.profiles",
    "QueueClosedError": "raypool.errors",
    "RaypoolError": "raypool.errors",
    "RemoteTraceback": "raypool.errors",
    "ResourceError": "raypool.errors",
    "Results": "raypool.results",
    "RunOptions": "raypool.train.runs",
    "ScalingReport": "raypool.train.scaling",
    "SerializationError": "raypool.errors",
    "Slurm": "raypool.profiles",
    "SpmdContext": "raypool.spmd.context",
    "SpmdError": "raypool.errors",
    "StartupError": "raypool.errors",
    "Statistics": "raypool.pool",
    "TaskCancelled": "raypool.errors",
    "TaskError": "raypool.errors",
    "TaskTimeoutError": "raypool.errors",
    "Tls": "raypool.profiles",
    "TrainingError": "raypool.errors",
    "TrainingOptions": "raypool.train.training_options",
    "TrainingResult": "raypool.train.runs",
    "TrainingRun": "raypool.train.runs",
    "ValueStore": "raypool.channel.store",
    "WorkerInfo": "raypool.channel.records",
    "WorkerLostError": "raypool.errors",
    "WorkerResources": "raypool.profiles",
    "after_all": "raypool.futures",
    "after_each": "raypool.futures",
    "as_device": "raypool.gpus.handover",
    "batch": "raypool.batches",
    "classify": "raypool.pool",
    "copy_to": "raypool.gpus.handover",
    "cpu": "raypool.gpus.handover",
    "current_task": "raypool.task",
    "fetch_next": "raypool.futures",
    "fetch_outputs": "raypool.futures",
    "find_job": "raypool.batches",
    "fit": "raypool.pool",
    "gcp": "raypool.pool",
    "gpu": "raypool.gpus.handover",
    "gpu_device_count": "raypool.gpus.table",
    "gpu_device_table": "raypool.gpus.table",
    "load_checkpoint": "raypool.task",
    "load_results": "raypool.journal.reading",
    "parfeval": "raypool.pool",
    "parfor": "raypool.pool",
    "parpool": "raypool.pool",
    "predict": "raypool.pool",
    "register_joblib": "raypool.interop.joblib",
    "report": "raypool.task",
    "save_checkpoint": "raypool.task",
    "scaling_report": "raypool.train.scaling",
    "wait": "raypool.futures",
}
"""Where each name is from. It is imported when somebody asks for it: each process of a pool begins
with `import raypool`, and those of workers need little of what a driver needs.
"""


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    # the names of errors are in tracebacks, with this one before them
    if name in ("errors", "search"):
        return importlib.import_module(f"raypool.{name}")
    hint = ""
    # an import asks for a module before it imports it
    if not name.startswith("_") and importlib.util.find_spec(f"raypool.{name}") is None:
        errors = importlib.import_module("raypool.errors")
        pool = dir(importlib.import_module("raypool.pool").ParallelPool)
        hint = errors.attribute_hint(name) or (
            f" Did you mean pool.{name}?" if name in pool else errors.did_you_mean(name, __all__)
        )
    raise AttributeError(f"module 'raypool' has no attribute {name!r}.{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
