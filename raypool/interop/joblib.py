"""`register_joblib`: joblib and packages built on it, such as scikit-learn, on a pool."""

from __future__ import annotations

from raypool.errors import check_installed


def register_joblib() -> None:
    """Make raypool known to joblib, as the backend "raypool".

    `joblib.parallel_config("raypool")` or `Parallel(backend="raypool")` runs on the current pool
    (`gcp`), or else on a pool opened for it alone, which ends with the `with` block or the
    `Parallel`. Both take the arguments of `parpool` for such a pool, as in
    `parallel_config("raypool", num_workers=4, gpus=[0, 1])`; or a pool, a part or a view of one:
    `parallel_config("raypool", pool=pool.options(retries=0))`.

    `n_jobs` counts workers: -1 means all (the default), -2 all but one; a number above theirs means
    all, with a warning. A pool opened for joblib grows with `n_jobs` while there is room, unless
    `num_workers` is given. With `n_jobs=1`, inside a task, and in a process forked from one that
    uses Ray (with a warning), joblib runs everything here, one after the other. With one worker,
    messages (`verbose`) and `pre_dispatch` count two jobs, since joblib does not use a backend with
    one; `joblib.effective_n_jobs()` is 1. A `Parallel` inside a task uses threads there, as with
    joblib's own processes.

    In a terminal or a notebook, calls that take more than a second show their progress as `parfor`
    does; with `verbose` every call does, also in a log file. The output and warnings of tasks on
    Ray appear on standard output as they arrive.

    Short tasks share calls to the workers, and are drawn further ahead than `pre_dispatch`, unless
    `batch_size` is a number. If a worker dies, the tasks of its call run again, up to `retries`
    times. A timeout (`Parallel(timeout=...)`) or an error stops running tasks. Arguments of
    `max_nbytes` or more (arrays, tensors and tables; by default 1 MB) travel once per `Parallel`:
    do not change them here meanwhile. The tasks of a batch share one copy of an argument: if they
    change it, set `batch_size=1`. `inner_max_num_threads` limits the threads of BLAS and OpenMP in
    each worker process. `temp_folder` and `mmap_mode` are not used.

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
