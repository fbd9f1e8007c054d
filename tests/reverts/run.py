"""Revert bug fixes one by one in a scratch clone, and say which lane catches each: python -m
tests.reverts.run [commit ...]

`fixes.json` names the fixes and the files whose tests are about them; `patches` brings each bug
back. If a patch no longer applies, make it again by hand, as long as the bug can exist in the code
of today.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LANES = {"make test": "not ci and not long", ".ci/run": "ci and not long"}
NOTHING_FAILED = (0, 5)
"""Exit statuses of pytest: all passed, and no test in this lane."""


def caught_by(tree: Path, files: list[str]) -> tuple[str, str]:
    """Return the first lane in which something fails, and what; two empty texts if nothing does."""
    there = [file for file in dict.fromkeys(files) if (tree / file).exists()]
    for lane, marks in LANES.items() if there else ():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "100",
            "-m",
            marks,
        ]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        try:
            done = subprocess.run(
                [*command, *there],
                cwd=tree,
                env=env,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return lane, "hangs"
        if done.returncode not in NOTHING_FAILED:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return lane, failed[0] if failed else f"ends with status {done.returncode}"
    return "", ""


def main(commits: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        for fix in json.loads((HERE / "fixes.json").read_text()):
            if commits and fix["commit"] not in commits:
                continue
            subprocess.run(["git", "reset", "-q", "--hard"], cwd=tree, check=True)
            patch = HERE / "patches" / f"{fix['commit']}.patch"
            applied = subprocess.run(
                ["git", "apply", "--3way", str(patch)], cwd=tree, capture_output=True, check=False
            )
            lane, what = (
                caught_by(tree, fix["files"])
                if applied.returncode == 0
                else ("the patch does not apply", "")
            )
            print(
                f"| {fix['commit']} | {fix['fixed']} | {lane or 'SLIPS THROUGH'} | {what} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
