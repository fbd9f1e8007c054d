"""Other libraries' own tests, run against raypool, and compared with what is expected of them.

Each suite runs in a pytest of its own, with a plugin from this folder that puts our pools in the
place of the library's; their code is used as it is installed. A test that fails without being
listed fails ours, as does a listed one that passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.suites import recorder, stand_ins

HERE = Path(__file__).parent

collect_ignore = [path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")]
"""What has no examples in it, and is in part for the other pytest."""

TEST_S = 120
"""How long one of their tests may take [s]."""

STUCK = "from pytest-timeout"
"""What is said of a test that took longer: nobody expects that."""


@dataclass
class Run:
    """What has become of a suite."""

    ended: dict[str, str] = field(default_factory=dict)  # the outcome of each test
    last: dict[str, str] = field(default_factory=dict)  # the last lines of those that failed
    running: str | None = None  # what it was at when it was ended
    notes: dict[str, Any] = field(default_factory=dict)  # what a plugin has said besides

    def take(self, line: dict[str, Any]) -> None:
        if "begun" in line:
            self.running = line["begun"]
        elif "ended" in line:
            self.running = None
            if self.ended.get(line["ended"]) != "failed":  # one that fails at its end, too
                self.ended[line["ended"]] = line["outcome"]
                self.last[line["ended"]] = line["last"]
        else:
            self.notes.update(line)

    def count(self, outcome: str) -> int:
        return sum(other == outcome for other in self.ended.values())


def reason_in(reasons: Mapping[str, str], name: str) -> str | None:
    """Return what is said of a test, by its name, or by that of all its parameters."""
    return reasons.get(name, reasons.get(name.partition("[")[0]))


def differences(run: Run, expected: Mapping[str, str], either: Mapping[str, str]) -> list[str]:
    """Return how a run differs from what is expected of it, in words."""
    found = []
    for name, outcome in run.ended.items():
        reason = reason_in(expected, name)
        is_listed = (reason or reason_in(either, name)) is not None and STUCK not in run.last[name]
        if outcome == "failed" and not is_listed:
            found.append(f"{name} fails:\n    " + run.last[name].replace("\n", "\n    "))
        elif outcome == "passed" and reason is not None:
            found.append(f"{name} passes; take it from the list of those that fail ({reason}).")
    known = {*run.ended, *(name.partition("[")[0] for name in run.ended)}
    found += [
        f"{name} is listed, and there is no such test." for name in {*expected, *either} - known
    ]
    return found


@pytest.fixture
def run_suite(start_python: Any, tmp_path: Path) -> Callable[..., Run]:
    """Give `run_suite(plugin, tests, backend, ...)`, which runs a suite and compares it with what
    is expected.
    """

    def run(
        plugin: str,
        tests: Sequence[str],
        backend: str,
        *,
        least_passed: int,
        limit_s: float,
        expected: Mapping[str, str],
        either: Mapping[str, str] = {},
        left_out: Mapping[str, str] = {},
        options: Sequence[str] = (),
    ) -> Run:
        """Run `tests` of an installed package with a plugin of this folder.

        Args:
            plugin: Its name.
            tests: Modules or files.
            backend: "threads" or "ray".
            least_passed: If fewer pass, something is wrong with the suite and not with a single
                test.
            limit_s: How long it may take [s].
            expected: Why tests fail, by their names, or by those of all their parameters.
            either: Why tests may fail, or not.
            left_out: Why tests do not run, by words that their names have.
            options: Others of pytest's.
        """
        record = tmp_path / "record.jsonl"
        record.touch()
        plugins = [
            "-p",
            "tests.suites.recorder",
            "-p",
            f"tests.suites.{plugin}",
            "-p",
            "no:cacheprovider",
        ]
        settings = [
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            f"--timeout={TEST_S}",
            "--timeout-method=signal",
        ]
        chosen = ["-k", " and ".join(f"not {word}" for word in left_out)] if left_out else []
        # Python 3.11 cannot parse what it has compiled after some errors, which other styles need
        show = ["-q", "--tb=native"]
        arguments = [*plugins, *settings, *chosen, *show, *options, "--pyargs", *tests]
        # From elsewhere, or it would find our fixtures; and not in this Python, which makes an
        # error of each warning.
        command = [sys.executable, "-m", "pytest", *arguments]
        process = start_python(
            f"import os; os.chdir({str(tmp_path)!r}); os.execv({sys.executable!r}, {command!r})",
            PYTHONPATH=os.pathsep.join(
                filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parents[1])])
            ),
            **{recorder.RECORD: str(record), stand_ins.BACKEND: backend},
        )
        is_late = False
        try:
            done = process.finish(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            for relative in process.family():
                relative.kill()
            done = process.finish()
        outcome = Run()
        for line in record.read_text().splitlines():
            outcome.take(json.loads(line))
        found = differences(outcome, expected, either)
        said = "\n".join(done.stdout.splitlines()[-30:] + done.stderr.splitlines()[-30:])
        if is_late:
            found.insert(
                0, f"It was not done in {limit_s:g} s, and was at {outcome.running}.\n{said}"
            )
        elif done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            found.insert(
                0, f"It ended with {done.returncode}, and was at {outcome.running}.\n{said}"
            )
        if outcome.count("passed") < least_passed:
            found.append(f"Only {outcome.count('passed')} tests pass, of at least {least_passed}.")
        print(
            f"{plugin}, {backend}: {outcome.count('passed')} pass, {outcome.count('failed')} fail"
            " as expected"
        )
        if found:
            pytest.fail("\n".join(found), pytrace=False)
        return outcome

    return run
