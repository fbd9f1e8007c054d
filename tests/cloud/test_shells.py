"""What Ray is started with is what a shell starts it with: bash is the oracle."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from raypool.cloud.shells import starts_in, starts_of_ray

COMMANDS = [
    "export MODE=token; ray start",
    "export MODE=token MODE=disabled; ray start",
    "MODE=token; ray start",
    "MODE=token ray start --head",
    "MODE=token; export MODE; ray start",
    "export MODE; MODE=token; ray start",
    "export MODE=x; MODE=token ray start && ray start",
    "export MODE=token; unset MODE; ray start",
    "ray start; export MODE=token",
    "echo MODE=token; ray start",
    "ulimit -n 64; export 'MODE=token' OTHER=\"a b\"; ray start --x=1 2>&1 | cat",
    "if true; then export MODE=token; fi; ray start",
    "true && export MODE=token && nohup ray start",
    "env MODE=token ray start",
    "export MODE=token; bash -c 'ray start; export MODE=x; ray start'",
    "export MODE=token\nray start",
    "export MODE=token; \\\n  ray start",
    "ray stop",
]


def test_what_ray_is_started_with_is_what_bash_starts_it_with(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text('#!/bin/bash\n[ "$1" = start ] && env >> ~/starts && echo -- >> ~/starts || true\n')
    (tmp_path / "ray").chmod(0o755)
    seen = tmp_path / "starts"
    wrong = {}
    for command in COMMANDS:
        seen.write_text("")
        subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
        starts = [dict(line.split("=", 1) for line in start.splitlines()) for start in seen.read_text().split("--\n")[:-1]]
        wanted = [{name: each[name] for name in ("MODE", "OTHER") if name in each} for each in starts]
        if starts_of_ray(command) != wanted:
            wrong[command] = (starts_of_ray(command), wanted)
    assert not wrong


def test_what_no_shell_can_read() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        starts_of_ray("echo 'x; ray start")
    assert starts_in(["echo 'x; ray start", "A=1 ray start"]) == [{"A": "1"}]
