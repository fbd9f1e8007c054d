"""The Python of the guides that needs a cluster: docs/tour.md, docs/clusters.md.

The cluster is a head on this machine. Where a document has numbers of machines, and the id of a
job, the tests put in those that there are; nothing else of it is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks_of

ABOVE = """
def train(width):
    return {"width": width}

def sweep(widths):
    import raypool
    return list(raypool.gcp().parfor(train, widths))

configs = [8, 32]
"""
"""What the documents have defined above, in short."""


def python_of(document: str, heading: str) -> str:
    [block] = [block for block in blocks_of(document, "python") if block.heading == heading]
    return block.code


def run(code: str, folder: Path, timeout_s: float = 500) -> str:
    """Run a script, with a home of its own and the working tree's raypool, and return what it
    printed.
    """
    (folder / "script.py").write_text(code)
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(head: Any, tmp_path: Path) -> Path:
    """Give a folder with the profile that the documents call "raypool"; its cluster has two
    workers.
    """
    lines = [
        f"address = {head.client!r}",
        f"jobs_address = {head.url!r}",
        f"token_file = {str(head.token_file)!r}",
    ]
    (tmp_path / "raypool.toml").write_text("\n".join(["[profiles.raypool]", *lines, ""]))
    return tmp_path


def on_two(code: str) -> str:
    """Let a cluster of two workers be enough."""
    changed, count = re.subn(r"(parpool\(|pool=)\d+", r"\g<1>2", code)
    assert count
    return changed


@pytest.mark.parametrize(
    "heading", ["Work from a notebook", "From nothing to a pool on Google Cloud"]
)
def test_a_pool_from_a_notebook(folder: Path, heading: str) -> None:
    code = python_of("docs/clusters.md", heading)
    assert run(f"{ABOVE}\n{on_two(code)}\nprint(list(results))", folder).endswith(
        "[{'width': 8}, {'width': 32}]\n"
    )


def test_the_tour(folder: Path) -> None:
    """docs/tour.md hands in a job beside its pool, and fetches what came of it."""
    code = on_two(python_of("docs/tour.md", "On a cluster"))
    code, count = re.subn(
        r"^find_job\(.*\)\.fetch_outputs\(\)", r"outputs = \g<0>", code, flags=re.MULTILINE
    )
    assert count == 1
    assert run(f"{ABOVE}\n{code}\nprint(list(results) == outputs, outputs)", folder).endswith(
        "True [{'width': 8}, {'width': 32}]\n"
    )


def test_a_job(folder: Path) -> None:
    code = on_two(python_of("docs/clusters.md", "Jobs that outlive the laptop"))
    hand_in, then, fetch = code.partition('raypool.find_job("raypool_4f0c21a8b6e94d13"')
    assert then
    job = run(f"{ABOVE}\n{hand_in}", folder).split()[-1]
    outputs = run(
        f'import raypool\nprint(raypool.find_job("{job}"{fetch.rstrip().partition("#")[0]})', folder
    )
    assert outputs == "[{'width': 8}, {'width': 32}, {'width': 128}]\n"
