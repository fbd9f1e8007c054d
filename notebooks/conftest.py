"""For `pytest --nbmake notebooks`: on a busy machine a notebook takes longer than other tests may."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(300))
