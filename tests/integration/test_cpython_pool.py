"""The tests that the interpreter brings for its own `multiprocessing.Pool`, run against ours; on
Ray, tests/suites runs them.
"""

from __future__ import annotations

import functools
import gc
import unittest
import warnings
import weakref
from typing import Any

import pytest

from raypool.interop.multiprocessing import Pool
from tests.leaks import poll

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

    def test_release_task_refs(self) -> None:
        """Theirs gives threads a tenth of a second to let go of things, which may be too little."""
        things = [theirs.CountedObject() for _ in range(10)]
        references = [weakref.ref(thing) for thing in things]
        self.pool.map(theirs.identity, things)
        del things

        def are_gone() -> bool:
            gc.collect()
            return not any(reference() is not None for reference in references)

        assert poll(are_gone)
        assert theirs.CountedObject.n_instances == 0
