"""What tests of clouds share: Ray's launcher, where the machines that a pretended cloud has made
cannot be logged in to.
"""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest


class Shell:
    """Stands in for `subprocess` where Ray's launcher runs ssh and rsync: notes what is run, and
    all of it goes well.

    Attributes:
        commands: What was run.
    """

    PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
    CalledProcessError = subprocess.CalledProcessError

    def __init__(self) -> None:
        self.commands: list[str] = []

    def _note(self, command: Any) -> None:
        self.commands.append(command if isinstance(command, str) else " ".join(command))

    def check_call(self, command: Any, *args: Any, **kwargs: Any) -> int:
        self._note(command)
        return 0

    call = check_call

    def check_output(self, command: Any, *args: Any, **kwargs: Any) -> bytes:
        self._note(command)
        return b"it is up"

    def Popen(self, command: Any, *args: Any, **kwargs: Any) -> Ended:
        self._note(command)
        return Ended()


class Ended:
    """A process that has ended well, without a word."""

    returncode = 0

    def __init__(self) -> None:
        self.stdout, self.stderr = io.StringIO(), io.StringIO()

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def communicate(self, *args: Any, **kwargs: Any) -> tuple[str, str]:
        return "", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def shell() -> Shell:
    """Give what stands in for ssh and rsync: `get_or_create_head_node(..., _runner=shell)`."""
    return Shell()


@pytest.fixture
def providers() -> Iterator[None]:
    """Keep Ray from taking the provider of one test for that of another: it remembers them by their
    configuration.
    """
    from ray.autoscaler._private.providers import _clear_provider_cache

    _clear_provider_cache()
    yield
    _clear_provider_cache()


@pytest.fixture(autouse=True)
def kubectl(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], None]:
    """Have no test ask a real Kubernetes; give what says how `kubectl` answers, as a shell's
    commands.
    """
    script = tmp_path_factory.mktemp("bin") / "kubectl"
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def answers(commands: str) -> None:
        script.write_text(f"#!/bin/sh\n{commands}\n")
        script.chmod(0o755)

    answers("exit 1")
    return answers
