"""What becomes of work that is pending when the interpreter ends: what is short is done, and
nothing is waited for long.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

BEGIN = """
import logging, time
from pathlib import Path
from raypool import parpool
from raypool.engine import engine

engine.EXIT_GRACE_S = {grace_s}

def touch(path):
    time.sleep(0.1)
    Path(path).touch()

logging.getLogger("raypool").setLevel(logging.ERROR)  # it may wait for a busy Ray, and say so
pool = parpool(1, profile={profile!r}, quiet=True, start_timeout_s=300)
logging.getLogger("raypool").setLevel(logging.NOTSET)
pool.submit(abs, -1).result()  # the worker is up: the time that is waited at the end is for the tasks
pool.submit(touch, "{folder}/first")
pool.submit(touch, "{folder}/second")
"""


@pytest.mark.parametrize(
    ("profile", "end"),
    [
        ("threads", "pool.shutdown(wait=False)"),
        ("threads", "raise SystemExit(0)"),
        pytest.param("local", "raise SystemExit(0)", marks=pytest.mark.ci),
    ],
)
def test_what_is_short_is_done(run_python: Any, tmp_path: Path, profile: str, end: str) -> None:
    # on a busy machine it may take longer than it is waited for at a usual end
    done = run_python(BEGIN.format(profile=profile, folder=tmp_path, grace_s=300) + end)
    assert (done.stdout, done.stderr) == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.ci
@pytest.mark.parametrize("profile", ["threads", "local"])
def test_what_takes_long_is_not_waited_for(run_python: Any, tmp_path: Path, profile: str) -> None:
    code = BEGIN.format(profile=profile, folder=tmp_path, grace_s=1)
    done = run_python(
        code + f"pool.submit(time.sleep, 600)\npool.submit(touch, '{tmp_path}/third')"
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert not (tmp_path / "third").exists()


def test_after_an_error_nothing_is_waited_for(start_python: Any, tmp_path: Path) -> None:
    code = BEGIN.format(profile="threads", folder=tmp_path, grace_s=300)
    # at a usual end there is time for that
    more = f"pool.submit(time.sleep, 60)\npool.submit(touch, '{tmp_path}/third')\n"
    done = start_python(code + more + "raise LookupError('the script fails')").finish()
    assert done.returncode == 1
    assert "the script fails" in done.stderr
    assert not (tmp_path / "third").exists()


@pytest.mark.ci
def test_after_sigterm_nothing_is_waited_for(start_python: Any, tmp_path: Path) -> None:
    code = BEGIN.format(profile="local", folder=tmp_path, grace_s=300)
    more = f"pool.submit(time.sleep, 60)\npool.submit(touch, '{tmp_path}/third')\n"
    done = start_python(
        code + more + "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    ).finish()
    assert done.returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "third").exists()


def test_after_the_end_no_work_is_taken(run_python: Any) -> None:
    code = """
    import atexit

    @atexit.register
    def run_last():
        try:
            pool.submit(abs, -1)
        except PoolClosedError as error:
            print(isinstance(error, RuntimeError), error)

    from raypool import PoolClosedError, parpool

    pool = parpool(1, profile="threads", quiet=True)
    """
    said = run_python(code).stdout
    assert said.startswith("True Python is exiting")
    assert "cannot schedule new futures after interpreter shutdown" in said
    assert run_python(code + "pool.shutdown()").stdout.startswith("True The pool was shut down"), (
        "by the user"
    )


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="Python 3.12.0 and 3.12.1 start no thread then"
)
def test_what_follows_is_done_although_its_thread_begins_late(
    run_python: Any, tmp_path: Path
) -> None:
    more = f"""
import atexit, threading
from raypool import after_each

may_end = threading.Event()
atexit.register(may_end.set)  # by then Python has waited for all threads

def save(_):
    pool._engine.driver.closed.wait()
    touch("{tmp_path}/saved")

after_each(pool.submit(may_end.wait), save)
"""
    code = BEGIN.format(profile="threads", folder=tmp_path, grace_s=300)
    assert run_python(code + more).stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "saved"}
