"""Run the tests that need a GPU, and record how they went: `make test-gpu`.

The record says on which cards, with which versions, when, and of which commit; it is kept under
`results/`, one file for each kind of card. Without a GPU nothing was tested, so that the exit
status is 1, and no record is touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from benchmarks.machine import cards, machine, slug, why_not
from benchmarks.measuring import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MAX_REASON = 500
"""So much of why a test failed or was skipped is recorded [characters]."""


def main(arguments):
    reason = why_not()
    if reason is not None:
        sys.exit(f"{reason} No test was run, and nothing was recorded.")
    described = {**machine(), **cards()}
    print(
        f"on {', '.join(gpu['name'] for gpu in described['gpus'])}, driver {described['driver']}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        started = time.perf_counter()
        # A test that hangs is interrupted by a signal: the timeout's thread would end pytest, and
        # its report with it.
        command = (
            sys.executable,
            "-m",
            "pytest",
            "tests/gpu",
            "-m",
            "gpu",
            "--timeout-method=signal",
            f"--junitxml={report}",
        )
        status = subprocess.run((*command, *arguments), cwd=ROOT, check=False).returncode
        described["took_s"] = round(time.perf_counter() - started)
        if not report.exists():
            sys.exit(
                f"pytest was ended before it wrote its report (status {status}). Nothing was"
                " recorded."
            )
        tests = outcomes(report)
    path = keep(RESULTS, described, status, tests)
    print(f"recorded in {path.relative_to(ROOT)}: {summary(tests)}")
    sys.exit(status)


def outcomes(report):
    """Return what became of each test, by pytest's own report: its name, how it went, how long it
    took, and why.
    """
    found = []
    for case in ET.parse(report).iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = (
            {"failure": "failed", "error": "error", "skipped": "skipped"}[ends[0].tag]
            if ends
            else "passed"
        )
        entry = {
            "test": f"{case.get('classname')}.{case.get('name')}",
            "outcome": outcome,
            "duration_s": float(case.get("time", "nan")),
        }
        if ends:
            entry["reason"] = (ends[0].get("message") or "")[:MAX_REASON]
        found.append(entry)
    return found


def keep(folder, described, status, tests):
    """Write the record of a run; return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder
        / f"tests_on_{slug(described['gpus'][0]['name'] if described['gpus'] else None)}.json"
    )
    path.write_text(
        json.dumps({"machine": described, "exit_status": status, "tests": tests}, indent=1) + "\n"
    )
    return path


def summary(tests):
    """Return how many went how.

    Example:
        >>> summary([{"outcome": "passed"}, {"outcome": "skipped"}, {"outcome": "passed"}])
        '2 passed, 1 skipped'
    """
    counts = Counter(test["outcome"] for test in tests)
    return ", ".join(
        f"{counts[outcome]} {outcome}"
        for outcome in ("passed", "failed", "error", "skipped")
        if counts[outcome]
    ) or ("no test was run")


if __name__ == "__main__":
    main(sys.argv[1:])
