"""What tests that run the examples share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def load(ray_session: None) -> Iterator[Callable[[str], ModuleType]]:
    """Load examples, so that their functions travel to the workers as those of a user's script do."""
    from ray import cloudpickle

    loaded: dict[str, ModuleType] = {}

    def load_once(name: str) -> ModuleType:
        if name not in loaded:
            spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
            assert spec
            assert spec.loader
            module = loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)
        return loaded[name]

    yield load_once
    for name, module in loaded.items():
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[name]


@pytest.fixture(scope="module")
def coordinator(ray_session: None) -> Iterator[None]:
    """Have Ray's autoscaling coordinator now: the first training in the managed lane makes it, and then it stays."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator

    handle = get_or_create_autoscaling_coordinator()
    yield
    del handle
