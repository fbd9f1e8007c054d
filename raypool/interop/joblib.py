"""`register_joblib`: joblib, and packages built on it such as scikit-learn, on the workers of a
pool.
"""

from __future__ import annotations

from raypool.errors import check_installed


def register_joblib() -> None:
    """Make raypool known to joblib, as the backend "raypool": `joblib.parallel_config("raypool")`,
    `Parallel(backend="raypool")`.

    What `joblib.Parallel` runs then runs on the workers of the current pool (`gcp`); if there is
    none, of one that is opened for it, that nobody else uses, and that ends with the `with` block
    or the `Parallel`. Both take what `parpool` takes, `parallel_config("raypool", num_workers=4,
    gpus=[0, 1])`, and open such a pool; or a pool, a part or a view of one:
    `parallel_config("raypool", pool=pool.options(retries=0))`.

    `n_jobs` counts workers: -1 are all of them, -2 all but one, and all are used where it is not
    said. A pool that is opened for joblib grows with `n_jobs` while there is room, unless
    `num_workers` is said. More than there are means all, with a warning, since no result depends on
    it. With `n_jobs=1`, inside a task, and in a process that was forked from one that uses Ray
    (with a warning), joblib runs everything in turn where it is. A pool of a single worker is used
    as any other: its messages (`verbose`) and `pre_dispatch` count two jobs then, since joblib asks
    no backend that has one; `joblib.effective_n_jobs()` is 1. A `Parallel` inside a task of another
    uses threads there, as with joblib's own processes.

    Short tasks share calls to the workers, and are drawn further ahead than `pre_dispatch` says,
    unless `batch_size` is a number. If a worker dies, the tasks of its call run again, up to
    `retries` times. A time-out (`Parallel(timeout=...)`) and an error stop what runs. Arguments of
    `max_nbytes` or more (arrays, tensors and tables; 1 MB unless joblib is told otherwise) travel
    once for each `Parallel` call, however many tasks take them: do not change them here meanwhile.
    A task may change what it gets. `inner_max_num_threads` limits the threads of BLAS and OpenMP in
    each worker, where workers are processes. joblib's files in memory (`temp_folder`, `mmap_mode`)
    are not used.

    Raises:
        ModuleNotFoundError: joblib is not installed.

    Source:
        joblib 1.6, Parallel, parallel_config and register_parallel_backend.

    Example:
        >>> from joblib import Parallel, delayed, parallel_config
        >>> from raypool import parpool, register_joblib
        >>> register_joblib()
        >>> with parpool(2, profile="threads", quiet=True), parallel_config("raypool"):
        ...     Parallel()(delayed(pow)(number, 2) for number in range(4))
        [0, 1, 4, 9]
    """
    check_installed("joblib", "register_joblib", "joblib")
    from joblib import register_parallel_backend

    from raypool.interop.joblib_backend import RaypoolBackend

    register_parallel_backend("raypool", RaypoolBackend)
