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
    name: f"raypool.{module}"
    for module, names in {
        "batches": "Job batch find_job",
        "channel.constants": "Constant",
        "channel.feed": "MetricsReport",
        "channel.queues": "DataQueue Listener",
        "channel.records": "WorkerInfo",
        "channel.store": "ValueStore",
        "errors": (
            "CloudError CollectiveError CompositeError InternalError InvalidTypeError "
            "InvalidValueError JournalError LossReason PoolBrokenError PoolClosedError "
            "PoolPreemptedError QueueClosedError RaypoolError RemoteTraceback ResourceError "
            "SerializationError SpmdError StartupError TaskCancelled TaskError "
            "TaskTimeoutError TrainingError WorkerLostError"
        ),
        "futures": "Future after_all after_each fetch_next fetch_outputs wait",
        "gpus.handover": "as_device copy_to cpu gpu",
        "gpus.table": "gpu_device_count gpu_device_table",
        "interop.joblib": "register_joblib",
        "journal.reading": "load_results",
        "pool": (
            "ParallelPool PoolPart PoolView Statistics classify fit gcp parfeval parfor "
            "parpool predict"
        ),
        "profiles": "Profile Slurm Tls WorkerResources",
        "results": "Results",
        "spmd.composite": "Composite",
        "spmd.context": "SpmdContext",
        "task": "CurrentTask MetricBuffer current_task load_checkpoint report save_checkpoint",
        "train.runs": "RunOptions TrainingResult TrainingRun",
        "train.scaling": "ScalingReport scaling_report",
        "train.training_options": "TrainingOptions",
    }.items()
    for name in names.split()
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
