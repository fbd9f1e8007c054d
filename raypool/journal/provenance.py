"""Where the results of a run come from: the code, command, packages and GPUs of each call.

`provenance/N.json` in the run's folder has what the journal lacks about call N. Uncommitted changes
are in a file beside it, named by its content, so that equal ones of several calls are kept once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import pwd
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from raypool.gpus.nvml import NvmlInventory, nvml
from raypool.journal.files import digest
from raypool.journal.keys import FunctionSource
from raypool.journal.schema import Row
from raypool.worker.folders import write_file

FOLDER = "provenance"

GIT_S = 5.0
"""How long git may take [s]."""

MAX_DIFF_BYTES = 1_000_000
"""Longer uncommitted changes are cut [bytes]."""

MAX_NAMES = 20
"""The most files that are named to people."""


# --- writing --------------------------------------------------------------------------------------


def record(run_dir: Path, run: int, source: FunctionSource) -> None:
    """Write down where the results of a call come from, as far as that is known."""
    about: dict[str, Any] = {"command": masked(sys.orig_argv), "python": platform.python_version()}
    for name, find in (
        ("code", lambda: code_of(source)),
        ("user", lambda: pwd.getpwuid(os.geteuid()).pw_name),
        ("packages", _packages),
        ("gpus", _gpus),
    ):
        with contextlib.suppress(Exception):  # no entry for this user, a broken package or driver
            about[name] = find()
    with contextlib.suppress(OSError):  # a full disk: no result depends on it
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)  # no parents: the run's folder may be gone
        if (code := about.get("code")) is not None:
            about["code"] = code.as_json()
            if code.diff:  # first: the other file names it
                write_file(folder / f"{code.name}.diff", code.diff)
        write_file(folder / f"{run}.json", json.dumps(about, indent=1).encode())


def _packages() -> dict[str, str]:
    """Return the versions of the installed packages that are imported, and of Ray and torch."""
    # importlib.metadata takes 0.3 s for this, while the loop waits for Python's lock
    modules = {name.partition(".")[0] for name in [*sys.modules]} | {"ray", "torch"}
    modules -= sys.stdlib_module_names
    found: dict[str, str] = {}
    for folder in (folder for place in sys.path for folder in Path(place).glob("*.*-info")):
        name, version, *_ = f"{folder.stem}-".split("-")
        if name in modules or not modules.isdisjoint(_modules_in(folder)):
            found.setdefault(name, version)
    return dict(sorted(found.items()))


@functools.cache
def _modules_in(folder: Path) -> set[str]:
    """Return the modules of a package: python_dateutil has dateutil."""
    for name in ("top_level.txt", "RECORD"):
        with contextlib.suppress(OSError):  # not every package has both files
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
            return {line.partition(",")[0].partition("/")[0].removesuffix(".py") for line in lines}
    return set()


def _gpus() -> dict[str, Any]:
    with nvml() as library:
        driver = None if library is None else library.nvmlSystemGetDriverVersion()
    return {
        "names": [gpu.name for gpu in NvmlInventory().devices()],
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
    }


SECRET = (
    r"[\w-]*(?:token|secrets?|passw(?:or)?d|passphrase|credentials?|webhook|notify"
    r"|(?:api|access|private)[_-]?key)(?![a-z])[\w-]*"
)
"""A name whose value is a secret; --tokenizer and --max-tokens are none."""

SECRETS = (
    (re.compile(rf"(?i)({SECRET}['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]+"), r"\1***"),
    (re.compile(r"(://)[^/@\s]+@"), r"\1***@"),  # the password in a URL
    # tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, Google; JSON web tokens; hex keys
    (
        re.compile(
            r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|AIza|eyJ)[\w.-]{12,}"
            r"|\b[0-9a-fA-F]{32,}\b"
        ),
        "***",
    ),
)


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command without what looks like a secret.

    Example:
        >>> masked(["train.py", "--api-key", "a1", "HF_TOKEN=b2", "--tokenizer", "bert"])
        ['train.py', '--api-key', '***', 'HF_TOKEN=***', '--tokenizer', 'bert']
    """
    return [
        "***"
        if re.fullmatch(f"(?i)-{SECRET}", before) and not word.startswith("-")
        else functools.reduce(lambda text, secret: secret[0].sub(secret[1], text), SECRETS, word)
        for before, word in itertools.pairwise(["", *words])
    ]


# --- code -----------------------------------------------------------------------------------------


class Code(NamedTuple):
    """The state of a git repository; `changed` is None where git took too long to tell."""

    folder: str
    commit: str
    changed: list[str] | None
    untracked: list[str]
    diff: bytes

    @property
    def name(self) -> str:
        """The name of the changes, by their content; "" without any."""
        return digest(self.diff).hex()[:12] if self.diff else ""

    def as_json(self) -> dict[str, Any]:
        """Return all but the changes themselves."""
        is_cut = len(self.diff) == MAX_DIFF_BYTES
        return {**self._asdict(), "diff": self.name, "is_cut": is_cut}


def code_of(source: FunctionSource) -> Code | None:
    """Return the state of the repository of a function, else of the working directory."""
    folder = None if source.file is None else Path(source.file).parent
    return (None if folder is None else _code_in(folder)) or _code_in(Path())


def _code_in(folder: Path) -> Code | None:
    deadline = time.monotonic() + GIT_S
    head = _git(folder, deadline, "rev-parse", "--show-toplevel", "HEAD")
    if head is None:  # no git, no repository, or no commit
        return None
    root, _, commit = head.decode(errors="replace").rstrip("\n").rpartition("\n")
    status = _git(folder, deadline, "status", "--porcelain", "-z", "--no-renames")
    diff = _git(folder, deadline, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if status is None or diff is None:
        return Code(root, commit, None, [], b"")
    entries = status.decode(errors="replace").split("\0")[:-1]
    return Code(
        root,
        commit,
        [entry[3:] for entry in entries if not entry.startswith("??")],
        [entry[3:] for entry in entries if entry.startswith("??")],
        diff,
    )


def _git(folder: Path, deadline: float, *words: str) -> bytes | None:
    """Return the beginning of what git prints; None if it fails or takes too long."""
    # no lock that the user's own git would meet, no program of the repository's configuration
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    command += ["-c", "diff.relative=false", "-c", "diff.noprefix=false", *words]
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the loop
        )
    except OSError:
        return None

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)  # also children, which may have its pipe

    alarm = threading.Timer(max(deadline - time.monotonic(), 0.0), end)
    alarm.start()
    with process:
        assert process.stdout is not None
        output = process.stdout.read(MAX_DIFF_BYTES)
        is_cut = len(output) == MAX_DIFF_BYTES
        if is_cut:
            end()
    alarm.cancel()
    alarm.join()
    return output if is_cut or process.returncode == 0 else None


def code_change(old: Mapping[str, Any], new: Code) -> str | None:
    """Return how a repository differs from that of a call, for a sentence; None if it does not."""
    is_known = old["changed"] is not None and new.changed is not None
    if old["commit"] == new.commit and (not is_known or old["diff"] == new.name):
        return None
    then, now = (
        f"commit {commit[:10]}{' with uncommitted changes' if has_diff else ''}"
        for commit, has_diff in ((old["commit"], old["diff"]), (new.commit, new.diff))
    )
    if then == now:
        return f"they are from {then}, and those changes are different now"
    return f"they are from {then}, not {now}"


# --- reading --------------------------------------------------------------------------------------


def recorded(run_dir: Path, run: int) -> dict[str, Any]:
    """Return what was recorded about a call, {} if nothing was."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((run_dir / FOLDER / f"{run}.json").read_bytes())
        return about if isinstance(about, dict) else {}
    return {}


def calls_of(run_dir: Path, runs: Iterable[Row]) -> list[dict[str, Any]]:
    """Return what is known about each call, from its row in `runs` and its record."""
    return [
        {
            **recorded(run_dir, run),
            "run": run,
            "function": function,
            "seed": json.loads(seed),
            "started_at": datetime.fromtimestamp(started_at, UTC).isoformat(),
            "host": host,
            "pid": pid,
            "raypool": version,
        }
        for run, function, seed, _, _, started_at, host, pid, version in runs
    ]


def facts_of(call: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known about a call as texts, by their titles."""
    started = f"{call['started_at'][:19].replace('T', ' ')} UTC"
    facts = {"started": started, "function": call["function"]}
    if call["seed"] is not None:
        facts["seed"] = str(call["seed"])
    user = f"{call['user']}@" if "user" in call else ""
    facts["host"] = f"{user}{call['host']}, process {call['pid']}"
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # of another version
        facts["command"] = shlex.join(call["command"])
        if code := call.get("code"):
            facts["commit"] = f"{code['commit']} in {code['folder']}"
            if code["changed"] is None:
                facts["uncommitted"] = f"unknown: git took more than {GIT_S:g} s"
            elif code["changed"]:
                cut = f", the first {MAX_DIFF_BYTES // 10**6} MB" if code["is_cut"] else ""
                kept = f"; {FOLDER}/{code['diff']}.diff{cut}" if code["diff"] else ""
                facts["uncommitted"] = f"{_named(code['changed'])}{kept}"
            if code["untracked"]:
                facts["untracked"] = _named(code["untracked"])
        versions = {"Python": call["python"], **call.get("packages", {})}
        facts["packages"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        if (gpus := call.get("gpus")) and gpus["names"]:
            counts = Counter(map(str, gpus["names"])).items()
            names = ", ".join(f"{count} x {name}" for name, count in counts)
            facts["GPUs"] = f"{names}, driver {gpus['driver']}"
    return facts


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - MAX_NAMES:,} more" if len(files) > MAX_NAMES else ""
    return ", ".join(files[:MAX_NAMES]) + more
