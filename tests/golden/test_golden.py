"""What must not change by accident: the course of twenty scenarios, and the public names.

If a change is meant, `python -m tests.golden.scenarios` or `python -m tests.golden.public_api`
writes the files anew.
"""

from __future__ import annotations

import pytest

from tests.golden import public_api, scenarios


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_a_scenario_takes_its_course(name: str) -> None:
    assert scenarios.course(name) == (scenarios.TRACES / f"{name}.txt").read_text()


def test_the_public_names_are_as_before() -> None:
    assert public_api.described() == public_api.FILE.read_text()
