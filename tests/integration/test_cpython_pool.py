"""The tests that the interpreter brings for its own `multiprocessing.Pool`, run against ours."""

from __future__ import annotations

import functools
import unittest
import warnings
from typing import Any

import pytest

from raypool import WorkerResources
from raypool.interop.multiprocessing import Pool

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of modules that will be removed, of which these tests are full
        from test import _test_multiprocessing as theirs
except ImportError:
    pytest.skip("this Python comes without its tests", allow_module_level=True)


class Named(theirs._TestPool):
    """The functions that these tests hand to the pool are found by their names, wherever this module is."""

    _test_traceback = theirs._TestPool._test_traceback
    _test_wrapped_exception = theirs._TestPool._test_wrapped_exception


class TestInThreads(Named, unittest.TestCase):
    """With workers that are threads of this process, as those of `multiprocessing.pool.ThreadPool`."""

    TYPE = "threads"
    Pool: Any = staticmethod(functools.partial(Pool, profile="threads"))


ON_RAY = functools.partial(Pool, resources=WorkerResources(gpus=0))


@pytest.mark.long
@pytest.mark.usefixtures("ray_session")
class TestOnRay(Named, unittest.TestCase):
    """With workers that are processes."""

    TYPE = "processes"
    Pool: Any = staticmethod(ON_RAY)


@pytest.fixture
def ours(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests find our pool under the name of the standard one."""
    monkeypatch.setattr("multiprocessing.Pool", ON_RAY)


@pytest.mark.usefixtures("ours")
class TestErrors(theirs._TestPoolWorkerErrors, unittest.TestCase):
    """What becomes of errors in workers."""

    TYPE = "processes"

    @pytest.mark.skip("a result that the standard pool cannot send, a lambda, arrives here")
    def test_unpickleable_result(self) -> None: ...


@pytest.mark.long
@pytest.mark.usefixtures("ours")
class TestLifetime(theirs._TestPoolWorkerLifetime, unittest.TestCase):
    """Workers whose processes are replaced after some tasks."""

    TYPE = "processes"

    @pytest.mark.skip("it calls private methods of the standard pool; test_multiprocessing_workers.py has one of its own")
    def test_pool_worker_lifetime(self) -> None: ...

    @pytest.mark.skip("it is about the standard pool, in a process of its own")
    def test_worker_finalization_via_atexit_handler_of_multiprocessing(self) -> None: ...
