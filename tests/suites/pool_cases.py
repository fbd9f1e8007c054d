"""CPython's own tests of `multiprocessing.Pool`, in whose place ours stands: for a pytest of its
own, and its plugin.
"""

from __future__ import annotations

import functools
import multiprocessing
import unittest
from typing import Any

from test import _test_multiprocessing as theirs

from raypool import WorkerResources
from raypool.interop.multiprocessing import Pool
from tests.suites import stand_ins

ON_RAY = functools.partial(Pool, resources=WorkerResources(gpus=0))


def pytest_configure() -> None:
    stand_ins.start()


class TestPool(theirs._TestPool, unittest.TestCase):
    """What a pool does."""

    TYPE = "processes"
    Pool: Any = staticmethod(ON_RAY)

    # Their functions are found by name, and their own classes are mixins.
    _test_traceback = theirs._TestPool._test_traceback
    _test_wrapped_exception = theirs._TestPool._test_wrapped_exception


class OfTheStandardName:
    """What finds our pool under the name of the standard one."""

    TYPE = "processes"

    def setUp(self) -> None:
        self.addCleanup(setattr, multiprocessing, "Pool", multiprocessing.Pool)
        multiprocessing.Pool = ON_RAY


class TestErrors(OfTheStandardName, theirs._TestPoolWorkerErrors, unittest.TestCase):
    """What becomes of errors in workers."""


class TestLifetime(OfTheStandardName, theirs._TestPoolWorkerLifetime, unittest.TestCase):
    """Workers whose processes are replaced after some tasks."""
