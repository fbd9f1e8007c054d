"""Which process runs which tests, where pytest-xdist runs them in several: `make test` has two.

The tests of a file stay together, for the sake of what they share. Files whose tests need much of a machine take turns: one
process has them all, one after the other. What takes long comes first, so that all processes end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

TAKE_TURNS = {
    "tests/cloud/test_launcher.py",  # machines by SSH
    "tests/cloud/test_on_premises.py",
    "tests/integration/test_at_home.py",
    "tests/integration/test_growth.py",  # hosts that are namespaces
    "tests/integration/test_hosts.py",
    "tests/integration/test_live_view.py",
    "tests/integration/test_nodes.py",  # clusters of several nodes
    "tests/integration/test_preemption.py",
    "tests/integration/test_report_page.py",  # a browser
    "tests/integration/test_site.py",
    "tests/chaos/test_nodes.py",
    "tests/faults/test_catalogue.py",  # memory that runs out
    "tests/faults/test_leaks.py",
}

FIRST = ("tests/notebooks/", "tests/property/")
"""Folders of single files that take minutes, among the long tests."""

LAST = ("tests/unit/", "raypool/")
"""Folders of files that take seconds."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """Return when a test has its turn: the lower, the sooner."""
    file = file_of(nodeid)
    return 0 if file in TAKE_TURNS else 1 if file.startswith(FIRST) else 3 if file.startswith(LAST) else 2


class Turns(LoadScopeScheduling):
    """Hands out files, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return "take turns" if file in TAKE_TURNS else file

    def remove_node(self, node: object) -> str | None:
        """Let nobody repeat the test in which a process has ended: xdist 3.8 would, until it has no more processes to start."""
        crashed = super().remove_node(node)  # type: ignore[arg-type]
        for unit in self.workqueue.values():
            if crashed in unit:
                unit[crashed] = True
        return crashed


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    return sorted(items, key=lambda item: rank(item.nodeid))
