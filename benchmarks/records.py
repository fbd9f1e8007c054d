"""What was measured is kept: a file for each benchmark, with every raw number, from which the page
is made.
"""

from __future__ import annotations

import ast
import json

from benchmarks.measuring import ROOT, Line

RESULTS = ROOT / "benchmarks" / "results"


def keep(name, title, text, lines, described, duration_s):
    """Keep what a benchmark has found, in place of what it found before; return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "title": title,
        "text": text,
        "machine": described,
        "duration_s": duration_s,
        "lines": [line.record() for line in lines],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def kept(name):
    """Return the record of a benchmark, its lines as `Line`s; None if there is none."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    return {**record, "lines": [Line.of_record(entry) for entry in record["lines"]]}


def duration_s(name):
    """Return how long a benchmark took when it was last measured [s], None if that is not known."""
    return (kept(name) or {}).get("duration_s")


def described_by(name):
    """Return what a benchmark says of itself: the text of its module."""
    tree = ast.parse((ROOT / "benchmarks" / f"bench_{name}.py").read_text())
    return ast.get_docstring(tree)
