"""How a driver may end, and that nothing of its pool outlives it (scenario 9; for Ctrl-C see
test_interrupts.py).
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raypool.backends.ray.session import is_forked
from tests.leaks import name_of

GONE_WITHIN_S = 300.0
"""Measured on two quiet cores: 0.6 s after a normal end, 4 s after SIGKILL (Ray's own node manager
has to notice it).
"""

BEGIN = """
import os, sys, time
from pathlib import Path
from raypool import parpool

def hold():
    time.sleep(600)

pool = parpool(2, quiet=True)
"""


def driver(body: str) -> str:
    return BEGIN + body


def check_nothing_is_left(started: Any, eventually: Callable[..., bool]) -> None:
    left = [(process.pid, name_of(process)) for process in started.family()]
    assert eventually(lambda: not started.family(), GONE_WITHIN_S), left


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param("pool.parfor(abs, range(100))", 0, marks=pytest.mark.long),
        (
            "from raypool.engine import engine\nengine.EXIT_GRACE_S = 0.1\n"
            "futures = [pool.submit(hold) for _ in range(5)]",
            0,
        ),
        ("future = pool.submit(hold)\nraise LookupError('the driver fails')", 1),
    ],
    ids=["open pool", "pending futures", "exception"],
)
def test_a_driver_that_ends_by_itself(
    start_python: Any, eventually: Any, body: str, status: int
) -> None:
    """It neither waits for what runs nor leaves it running."""
    started = start_python(driver(body))

    done = started.finish()

    assert done.returncode == status, done.stderr
    assert ("the driver fails" in done.stderr) == (status == 1)
    assert status == 1 or done.stderr == ""
    check_nothing_is_left(started, eventually)


EVERY_VERB = """
from raypool import parpool
def meet(context):
    return context.all_reduce(1)
with parpool(2, profile=PROFILE, quiet=True) as pool:
    print(list(pool.spmd(meet)), list(pool.parfor(abs, [-1, -2])), end=" ")
    print(pool.parfeval(abs, -3).result(), pool.train(lambda: 4).result().values[0])
"""


@pytest.mark.parametrize(
    "profile", [pytest.param("inline", marks=pytest.mark.quick), "threads", "local"]
)
def test_a_script_ends_well(run_python: Any, profile: str) -> None:
    """Whatever it has used: native code in threads, of torch's groups, may abort a process that
    ends.
    """
    for _ in range(2 if profile == "threads" else 1):
        done = run_python(EVERY_VERB.replace("PROFILE", repr(profile)))
        assert done.stdout == "[2, 2] [1, 2] 3 4\n"
        assert done.stderr == ""


AFTER_A_POOL = """
import hashlib, joblib, multiprocessing, os, random, sys, warnings
from raypool import parpool, register_joblib
from raypool.backends.ray.session import without_helpers
import ray
warnings.simplefilter("ignore")  # Python 3.12 and newer warn of any fork beside threads
register_joblib()

def state():
    return random.getstate(), sys.excepthook, os.environ.get("PYTHONBREAKPOINT")

def in_native_code():
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)

def attempt(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__, "forked" in str(error)

def pools_in_a_forked_child():
    os.write(write, repr([
        attempt(lambda: parpool(1, quiet=True)),
        attempt(lambda: pool.submit(pow, 2, 3)),
        attempt(pool.store.keys)[0],
        attempt(lambda: list(parpool(1, profile="threads", quiet=True).parfor(abs, [-5]))),
        attempt(lambda: joblib.Parallel(2, backend="raypool")([joblib.delayed(os.getpid)()]) == [os.getpid()]),
    ]).encode())

before = state()
with parpool(1, quiet=True) as pool:  # starts its own Ray
    print("open", state() == before)
    pool.store["key"] = 1
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    child = fork.Process(target=in_native_code)
    child.start()
    begun.wait()
    child.terminate()
    child.join()
    print("child", child.exitcode)
    read, write = os.pipe()
    fork.Process(target=pools_in_a_forked_child).start()
    print(os.read(read, 10_000).decode(), pool.submit(pow, 2, 3).result(), pool.store["key"])
print("closed", state() == before)
with without_helpers():  # its usual agent is late on a busy machine, and it gives up
    ray.init(num_cpus=2, num_gpus=1, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
kept = ray.put(1)
with parpool(1, quiet=True) as pool:
    pass
print("the user's Ray", ray.is_initialized() and ray.get(kept))
"""


def test_a_pool_leaves_the_process_as_it_was(run_python: Any) -> None:
    """Its random numbers, what handles its breakpoints and exceptions, its forked children; and a
    Ray that it starts itself.
    """
    said = run_python(AFTER_A_POOL, PYTHONWARNINGS="ignore").stdout.splitlines()
    in_child = [("StartupError", True), ("PoolClosedError", True), "PoolClosedError", [5], True]
    assert said == ["open True", "child -15", f"{in_child} 8 1", "closed True", "the user's Ray 1"]


FORKED = """
import asyncio, os, signal, threading, warnings
from raypool import after_each, fetch_next, fetch_outputs, parpool
warnings.simplefilter("ignore")  # Python 3.12 and newer warn of any fork beside threads
gate = threading.Event()

def attempt(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__

async def awaited():
    return await future

with parpool(1, profile="threads", quiet=True) as pool:
    part, _ = pool.partition(workers=[0])
    future = part.parfeval(gate.wait)
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(100)  # if it hangs
        said = [
            attempt(future.result),
            attempt(lambda: fetch_next([future])),
            attempt(lambda: asyncio.run(awaited())),
            attempt(part.shutdown),
        ]
        os.write(write, repr(said).encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 10_000).decode())
    gate.set()
    print(future.result())
"""


def test_a_forked_child_does_not_wait_for_the_work_of_its_parent(run_python: Any) -> None:
    said = run_python(FORKED).stdout.splitlines()
    assert said == [f"{['PoolClosedError'] * 3 + [None]}", "True"]


def test_a_thread_that_the_kernel_leaves_out_of_a_listing_makes_no_fork(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does when another thread ends meanwhile: 1 of 300 listings of 3,000 threads."""
    whole, looks = Path.glob, itertools.count()

    def listed(folder: Path, pattern: str) -> Any:
        return [] if next(looks) == 0 else whole(folder, pattern)

    monkeypatch.setattr(Path, "glob", listed)
    assert not is_forked()
    assert next(looks) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended(
    start_python: Any, eventually: Any, make_gate: Any, how: signal.Signals
) -> None:
    """With tasks that run, a child of a worker, as a data loader's processes are; one that has left
    its group; and an orphan.
    """
    ready = make_gate()
    started = start_python(
        driver(f"""
def hold_with_child():
    import subprocess
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", parent, *sleeper])  # which leaves an orphan
    Path({str(ready.path)!r}).touch()
    time.sleep(600)

futures = [pool.submit(hold_with_child), *(pool.submit(hold) for _ in range(3))]
futures[0].result()
""")
    )
    ready.wait()
    assert len(started.family()) > 4
    # Ray's agents hide what tells the family
    processes = psutil.Process(started.process.pid).children(recursive=True)

    started.process.send_signal(how)

    assert eventually(lambda: not any(process.is_running() for process in processes))
    done = started.finish()
    assert done.returncode == (128 + how if how is signal.SIGTERM else -how)
    assert "SIGTERM received" not in done.stderr
    check_nothing_is_left(started, eventually)


def test_the_users_own_handler_of_sigterm_stays(run_python: Any) -> None:
    done = run_python("""
    import os, signal
    from raypool import parpool

    signal.signal(signal.SIGTERM, lambda number, frame: print("mine", flush=True))
    with parpool(1, quiet=True) as pool:
        os.kill(os.getpid(), signal.SIGTERM)
        print(pool.parfeval(abs, -1).result(300))
    """)
    assert done.stdout.split() == ["mine", "1"]


def test_a_driver_on_somebody_elses_ray_that_is_killed(
    ray_session: None, start_python: Any, eventually: Any, make_gate: Any
) -> None:
    """Its workers and claims go; that Ray, which is this process's own, stays."""
    ready = make_gate()
    address = ray.get_runtime_context().gcs_address
    started = start_python(
        f"""
import time
from pathlib import Path
from raypool import parpool
pool = parpool(2, address="{address}", quiet=True)
def hold():
    Path({str(ready.path)!r}).touch()
    time.sleep(600)
pool.submit(hold).result()
""",
        RAY_AUTH_MODE="token",
    )
    ready.wait()
    assert eventually(lambda: ray.available_resources().get("GPU") == 1)

    started.process.kill()

    assert eventually(lambda: ray.available_resources().get("GPU") == 3, GONE_WITHIN_S)
    check_nothing_is_left(started, eventually)


def test_forgotten_and_deleted_pools_leave_no_process(run_python: Any) -> None:
    """With Ray still there for another pool: workers go with their pool, also when nobody deletes
    it.
    """
    run_python("""
    import gc, os, time
    import psutil
    from raypool import parpool, WorkerResources

    def is_gone(pid):
        try:
            return psutil.Process(pid).status() == "zombie"
        except psutil.NoSuchProcess:
            return True

    def wait_gone(pids):
        deadline = time.monotonic() + 300
        while not all(map(is_gone, pids)):
            assert time.monotonic() < deadline, "workers are left"
            time.sleep(0.02)

    light = WorkerResources(cpus=0.1)
    keeper = parpool(1, resources=light, quiet=True)
    forgotten = parpool(2, resources=light, quiet=True)
    pids = [worker.pid for worker in forgotten.workers]
    future = forgotten.submit(os.getpid)
    del forgotten
    gc.collect()
    assert future.result(300) in pids
    wait_gone(pids)

    with parpool(2, resources=light, quiet=True) as deleted:
        pids = [worker.pid for worker in deleted.workers]
    wait_gone(pids)
    assert keeper.submit(abs, -1).result(300) == 1
    """)


def test_a_pool_that_was_opened_in_a_thread_that_has_ended(run_python: Any) -> None:
    """The kernel ends Ray's processes with the thread that has started them, if nobody takes
    care.
    """
    run_python("""
    import threading
    import psutil
    from raypool import parpool

    pools = []
    thread = threading.Thread(target=lambda: pools.append(parpool(1, quiet=True)))
    thread.start()
    thread.join()
    (pool,) = pools

    def is_raylet(child):
        try:
            return child.name() == "raylet"
        except psutil.NoSuchProcess:  # it has just ended
            return False

    raylet = list(filter(is_raylet, psutil.Process().children()))
    assert len(raylet) == 1, "Ray has ended with the thread"
    assert pool.submit(abs, -1).result(300) == 1
    pool.resize(1)
    pool.delete()
    with parpool(1, quiet=True) as again:
        assert again.submit(abs, -1).result(300) == 1
    """)


def test_ray_that_is_shut_down_under_a_pool(run_python: Any) -> None:
    """Nothing waits for ever, and no new Ray is started to clean up in, or to cancel in."""
    done = run_python("""
    import time
    from concurrent.futures import wait
    from raypool import parpool, report, RaypoolError
    import ray

    def last():
        report(began=1)
        time.sleep(600)

    pool = parpool(2, quiet=True)
    future = pool.submit(time.sleep, 600)
    ray.shutdown()
    error = future.exception(timeout=300)
    assert isinstance(error, RaypoolError), error
    for use in (lambda: pool.submit(abs, -1).result(300), lambda: list(pool.parfor(abs, [-1]))):
        try:
            use()
        except RaypoolError:
            continue
        raise AssertionError("there was no Ray to run it")
    pool.delete()
    assert not ray.is_initialized(), "a new Ray was started"

    pool = parpool(2, quiet=True)
    assert pool.submit(abs, -1).result(300) == 1
    future = pool.submit(last)
    while future.metrics.empty:
        time.sleep(0.01)
    ray.shutdown()
    assert future.cancel() or future.done()
    pool.cancel_all()
    assert not wait([future], timeout=300).not_done
    pool.delete()
    assert not ray.is_initialized(), "a new Ray was started"
    """)
    assert "Started" not in done.stderr


def test_a_cluster_that_is_left_and_joined_again_under_a_pool(head: Any, run_python: Any) -> None:
    """The pool's workers are gone, and nothing waits for answers over the new connection."""
    done = run_python(
        f"""
    import threading, time
    import ray
    from raypool import PoolBrokenError, PoolClosedError, WorkerLostError, WorkerResources, parpool

    def join():
        ray.init({head.address!r}, log_to_driver=False, logging_level="ERROR")

    def ask_store():
        try:
            pool.store.wait("never", 600)
        except PoolClosedError:
            told.append("closed")

    told = []
    cpus = WorkerResources(cpus=0.5)
    join()
    pool = parpool(1, quiet=True, resources=cpus)
    future = pool.submit(time.sleep, 600)
    pool.submit(abs, -1)
    asking = threading.Thread(target=ask_store)
    asking.start()
    ray.shutdown()
    join()
    print(future.exception(300))
    try:
        pool.submit(abs, -1).result(300)
    except PoolBrokenError as error:
        print(error)
    asking.join(300)
    assert told == ["closed"]
    pool.delete()
    with parpool(1, quiet=True, resources=cpus) as pool:
        assert pool.submit(abs, -1).result(300) == 1
    assert ray.is_initialized()
    """,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(head.token_file),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # else it looks for the head at another address
    )
    assert "Ray was shut down while the pool was open" in done.stdout
    assert "bug in raypool" not in done.stderr


def test_a_kernel_without_process_descriptors(run_python: Any, tmp_path: Path) -> None:
    """Linux before 5.3, as in RHEL 8: a cancelled task is interrupted, and its worker stays."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "def refuse(*_):\n"
        "    raise OSError(38, 'Function not implemented')\n"
        "os.pidfd_open = signal.pidfd_send_signal = refuse\n"
    )
    run_python(
        """
    import os, time
    from raypool import parpool, report

    def work():
        report(began=1)
        time.sleep(600)

    with parpool(1, quiet=True) as pool:
        pid = pool.submit(os.getpid).result(300)
        future = pool.submit(work)
        while future.metrics.empty:
            time.sleep(0.01)
        assert future.cancel()
        assert pool.submit(os.getpid).result(300) == pid
    """,
        PYTHONPATH=str(tmp_path),
    )


END_SLOWLY = """
    import ray

    def end_slowly(notice):
        # Shut Ray down; its core has ended, but it has not said so yet, while `notice` runs.
        class SlowlyEnding:
            def __init__(self, core):
                self.core = core

            def __getattr__(self, name):
                return getattr(self.core, name)

            def shutdown_driver(self):
                self.core.shutdown_driver()
                notice()

        worker = ray._private.worker.global_worker
        worker.core_worker = SlowlyEnding(worker.core_worker)
        ray.shutdown()
"""


def test_a_worker_that_is_lost_while_ray_shuts_down(run_python: Any) -> None:
    """Ray ends the process, with exit status 1, if a reference is dropped when its core has ended
    and it has not said so yet.
    """
    run_python(
        END_SLOWLY
        + """
    import threading, time
    from raypool import parpool

    pool = parpool(2, quiet=True)
    future = pool.submit(time.sleep, 600)

    def notice():
        assert future.exception(timeout=300) is not None
        time.sleep(0.5)  # other threads drop their references now

    end_slowly(notice)
    pool.delete()
    """
    )


def test_calls_that_are_overtaken_by_the_end_of_ray_start_no_other_ray(run_python: Any) -> None:
    """A call of the pool's, made when Ray was still there, reaches Ray when it has ended."""
    run_python(
        END_SLOWLY
        + """
    import itertools, threading, time
    from raypool import parpool
    from ray.actor import ActorMethod

    def talk():
        for number in itertools.count():
            print(number, flush=True)
            time.sleep(0.05)

    pool = parpool(2, quiet=True)
    talking = pool.submit(talk)
    pool.submit(abs, -1).result(300)
    call, late, ended = ActorMethod._remote, {}, threading.Event()

    def call_late(self, *args, **kwargs):
        event = late.get(threading.current_thread().name)
        if event is not None:
            event.set()
            assert ended.wait(300)
        return call(self, *args, **kwargs)

    late.update({"raypool-driver": threading.Event(), "raypool-agents": threading.Event()})
    ActorMethod._remote = call_late
    sent = pool.submit(abs, -1)
    for event in late.values():
        assert event.wait(300)

    def notice():
        ended.set()
        for future in (talking, sent):
            assert "Ray was shut down" in str(future.exception(timeout=300))

    end_slowly(notice)
    pool.delete()
    assert not ray.is_initialized()
    """
    )


def test_under_uv_run_tasks_write_into_the_folder_of_the_script(
    run_python: Any, tmp_path: Path
) -> None:
    """Ray would give them a copy of it; and a RAY_ADDRESS without an address is none."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "0"\n')
    (tmp_path / "train.py").write_text(
        "from pathlib import Path\nfrom raypool import parpool\n"
        "if __name__ == '__main__':\n"
        "    with parpool(1, quiet=True) as pool:\n"
        "        pool.parfor(lambda i: Path(f'model_{i}').touch(), 1)\n"
    )
    (tmp_path / "run").write_text(f"{sys.executable} train.py\n")
    code = f"""
    import subprocess
    uv = ["bash", "-c", "exec -a uv bash run"]
    subprocess.run(uv, cwd={str(tmp_path)!r}, check=True)
    """
    run_python(code, RAY_ADDRESS="")
    assert (tmp_path / "model_0").exists()
