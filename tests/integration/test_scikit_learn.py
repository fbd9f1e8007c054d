"""scikit-learn on the workers of a pool: the same scores, whoever computes them. Its own tests run
in tests/suites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from joblib import parallel_config

from raypool import ParallelPool, parpool, register_joblib


@pytest.fixture(params=["threads", "shared"])
def pool(request: pytest.FixtureRequest) -> Iterator[ParallelPool]:
    register_joblib()
    if request.param == "shared":
        yield request.getfixturevalue("shared_pool")
        return
    with parpool(2, profile="threads", quiet=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    return features[:600], labels[:600]


def test_a_grid_search_finds_the_same(pool: ParallelPool, digits: tuple[Any, Any]) -> None:
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    def scores(n_jobs: int) -> Any:
        search = GridSearchCV(
            SVC(), {"C": [0.1, 1, 10], "gamma": [1e-3, 1e-2]}, cv=3, n_jobs=n_jobs
        ).fit(*digits)
        return search.best_params_, search.cv_results_["mean_test_score"]

    serial = scores(1)
    before = pool.statistics().finished
    with parallel_config("raypool", pool=pool):
        parallel = scores(-1)
    assert pool.statistics().finished > before
    assert parallel[0] == serial[0]
    np.testing.assert_array_equal(parallel[1], serial[1])


def test_a_forest_is_the_same(pool: ParallelPool, digits: tuple[Any, Any]) -> None:
    from sklearn.ensemble import RandomForestClassifier

    features, labels = digits
    serial = RandomForestClassifier(20, random_state=0, n_jobs=1).fit(features, labels)
    before = pool.statistics().finished
    with parallel_config("raypool", pool=pool):
        forest = RandomForestClassifier(20, random_state=0, n_jobs=-1).fit(features, labels)
        # which wants shared memory
        np.testing.assert_array_equal(
            forest.predict_proba(features), serial.predict_proba(features)
        )
    assert pool.statistics().finished > before


def test_a_search_over_forests_does_not_wait_for_itself(
    pool: ParallelPool, digits: tuple[Any, Any]
) -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    def best(n_jobs: int) -> Any:
        forest = RandomForestClassifier(5, random_state=0, n_jobs=2)
        # Threads add up the trees in any order, with or without us: that decides a tie in
        # "accuracy".
        search = GridSearchCV(
            forest, {"max_depth": [2, 6]}, scoring="neg_log_loss", cv=2, n_jobs=n_jobs
        )
        return search.fit(*digits).cv_results_["mean_test_score"]

    serial = best(1)
    with parallel_config("raypool", pool=pool):
        np.testing.assert_allclose(best(-1), serial, rtol=1e-9)
