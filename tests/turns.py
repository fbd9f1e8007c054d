"""Which process runs which tests, where pytest-xdist runs them in several: `make test` has two.

The tests of a file stay together, for the sake of what they share. Files whose tests need much of a
machine take turns: one process has them all, one after the other. What takes long comes first, so
that all processes end at about the same time. Files that want the GPUs for themselves come before
those that use the shared pool, which would have to be opened again and again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TAKE_TURNS = {
    "tests/cloud/test_launcher.py",  # machines by SSH
    "tests/cloud/test_on_premises.py",
    "tests/integration/test_batch.py",  # the head of test_jobs.py
    "tests/integration/test_integrations.py",
    # Ray Client, whose proxies on one machine all give out ports from 23000 on
    "tests/integration/test_client.py",
    "tests/integration/test_growth.py",  # hosts that are namespaces
    "tests/integration/test_guides.py",
    "tests/integration/test_hosts.py",
    "tests/integration/test_jobs.py",
    "tests/integration/test_live_view.py",
    "tests/integration/test_nodes.py",  # clusters of several nodes
    "tests/integration/test_preemption.py",
    "tests/integration/test_report_page.py",  # a browser
    "tests/integration/test_site.py",
    "tests/integration/test_watch_page.py",
    "tests/chaos/test_nodes.py",
    "tests/faults/test_catalogue.py",  # memory that runs out
    "tests/faults/test_leaks.py",
}

FIRST = (
    "tests/notebooks/",
    "tests/property/",
    "tests/integration/test_fork_server.py",
    "tests/integration/test_interrupts.py",
    "tests/integration/test_life.py",
    "tests/integration/test_readme.py",
    "tests/integration/test_search.py",
    "tests/integration/test_train_nodes.py",
    "tests/unit/test_types.py",
)
"""Files that take most of a minute or more; none of them uses the shared pool."""

LAST = ("tests/unit/", "raypool/")
"""Folders of files that take seconds."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """Return when a test has its turn: the lower, the sooner."""
    file = file_of(nodeid)
    return (
        0
        if file in TAKE_TURNS
        else 1
        if file.startswith(FIRST)
        else 3
        if file.startswith(LAST)
        else 2
    )


class Turns(LoadScopeScheduling):
    """Hands out files, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return "take turns" if file in TAKE_TURNS else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Give away what a process that has ended leaves, but for the test that it ended in, which
        would end others too.

        xdist 3.8 would also give away the files that are done: whoever gets one waits for tests
        that there are not.
        """
        left = {
            file: tests
            for file, tests in self.assigned_work.pop(node).items()
            if not all(tests.values())
        }
        if not left:
            return None
        tests = next(iter(left.values()))
        crashed: str = next(nodeid for nodeid, is_done in tests.items() if not is_done)
        tests[crashed] = True
        self.workqueue = OrderedDict(
            {file: tests for file, tests in left.items() if not all(tests.values())}
            | self.workqueue
        )
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Take in what a process says that there is to run; one that was started later has to say
        the same.
        """
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            raise RuntimeError("The tests have changed while they ran.")

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a file to a process. It may have ended in this instant: then others get it when that
        is known here.
        """
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Give files to a process until it has two tests: it begins the last one only once it knows
        of a next, or of the end.
        """
        if node not in self.registered_collections:
            return  # it was started in place of another, and has not said yet what there is to run
        super()._reschedule(node)
        while (
            self.workqueue
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            self._assign_work_unit(node)


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    without = {file_of(item.nodeid) for item in items if wants_the_gpus(item)}
    return sorted(items, key=lambda item: (rank(item.nodeid), file_of(item.nodeid) not in without))


def wants_the_gpus(item: pytest.Item) -> bool:
    """Return whether the shared pool is closed for a test: see `nothing_is_left` in
    tests/leaks.py.
    """
    names = getattr(item, "fixturenames", ())
    return "ray_session" in names and "shared_pool" not in names
