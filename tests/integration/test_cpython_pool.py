"""The tests that the interpreter brings for its own `multiprocessing.Pool`, run against ours; on
Ray, tests/suites runs them.
"""

from __future__ import annotations

import functools
import unittest
import warnings
from typing import Any

import pytest

from raypool.interop.multiprocessing import Pool

try:
    with warnings.catch_warnings():
        # those of modules that will be removed, of which these tests are full
        warnings.simplefilter("ignore")
        from test import _test_multiprocessing as theirs
except ImportError:
    pytest.skip("this Python comes without its tests", allow_module_level=True)


class TestInThreads(theirs._TestPool, unittest.TestCase):
    """With workers that are threads of this process, as those of
    `multiprocessing.pool.ThreadPool`.
    """

    TYPE = "threads"
    Pool: Any = staticmethod(functools.partial(Pool, profile="threads"))
