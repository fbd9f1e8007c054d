"""What the site is made of: the reference has every public name once, and the names in running text
are known.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
from collections import Counter
from types import ModuleType

import pytest

import raypool
from tests.documents import ROOT

NAMED = Counter(
    re.findall(
        r"^::: (raypool\.\S+)$",
        "\n".join(path.read_text() for path in ROOT.glob("docs/api/*.md")),
        re.MULTILINE,
    )
)


def test_the_reference_has_every_public_name_once() -> None:
    assert max(NAMED.values()) == 1
    assert {f"raypool.{name}" for name in raypool.__all__} <= set(NAMED)


def test_every_guide_and_notebook_is_on_the_site() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("*.md")]:
        assert f" {path.relative_to(ROOT).as_posix()}\n" in settings


@pytest.fixture(scope="module")
def names() -> ModuleType:
    """Load what puts links around names."""
    spec = importlib.util.spec_from_file_location("site_names", ROOT / "docs/site/names.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_example(names: ModuleType) -> None:
    assert doctest.testmod(names) == doctest.TestResults(failed=0, attempted=1)


def test_what_a_name_leads_to(names: ModuleType) -> None:
    leads_to = {
        "parpool": "raypool.parpool",
        "parpool(4, gpus=[0, 2])": "raypool.parpool",
        "raypool.report": "raypool.report",
        "report": None,
        "gpu": None,
        "parfor": "raypool.ParallelPool.parfor",
        "pool.map": "raypool.ParallelPool.map",
        "job.cancel()": "raypool.Future.cancel",
        "job.done()": "raypool.Future.done",
        "job.set_result(1)": None,
        "RunOptions.keep_checkpoints": "raypool.RunOptions",
        "pool.no_such_thing": None,
        "WorkerLostError": "raypool.WorkerLostError",
        "concurrent.futures.Future": None,
        "x = 1": None,
    }
    assert {code: names.identifier_of(code) for code in leads_to} == leads_to
