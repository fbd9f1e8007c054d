"""Which libraries have come with their tests."""

from __future__ import annotations

import importlib.util

import pytest


def needs(module: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a module is not installed; it is not imported."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ImportError:  # nor is what it is in
        is_there = False
    return pytest.mark.skipif(not is_there, reason=f"{module} is not installed")
