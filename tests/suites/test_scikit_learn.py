"""scikit-learn's own tests of searches and forests, in which all that is parallel runs on a pool of
ours.

| counted with scikit-learn 1.9, Python 3.11 and 3.13 | pass | fail as expected | seconds |
|---|---|---|---|
| threads | 471 | 2 | 110 |
| Ray (searches, 3.11 only) | 127 | 14 | 40 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.suites.installed import needs

SEARCH, FOREST = "sklearn.model_selection.tests.test_search", "sklearn.ensemble.tests.test_forest"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), needs(SEARCH)]


def test_in_threads(run_suite: Callable[..., Any]) -> None:
    run = run_suite(
        "scikit_learn_backend",
        [SEARCH, FOREST],
        "threads",
        least_passed=450,
        limit_s=1000,
        expected={
            "test_multi_metric_search_forwards_metadata": (
                "it looks for the caller on its own stack, as one thread has it"
            )
        },
    )
    assert run.notes["tasks"] > 10_000


def test_on_ray(run_suite: Callable[..., Any]) -> None:
    """Searches alone, since forests are made in threads everywhere; the same tests fail with
    loky.
    """
    away = "what it looks at happens in another process"
    run = run_suite(
        "scikit_learn_backend",
        [SEARCH],
        "ray",
        least_passed=120,
        limit_s=1000,
        expected={
            "test_grid_search_cv_splits_consistency": "a generator cannot be sent",
            "test_multi_metric_search_forwards_metadata": away,
            "test_search_callbacks_receive_search_instance": away,
            "test_searchcv_raise_warning_with_non_finite_score": away,
        },
    )
    assert run.notes["tasks"] > 1000
