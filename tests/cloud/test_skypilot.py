"""Tasks for SkyPilot: its own schema takes them, and what they run ends in a pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import packages
from tests.cloud.test_packages import UV

PYTHON = os.environ.get("RAYPOOL_SKYPILOT") or (sys.executable if find_spec("sky") else None)
"""A Python that has skypilot, whose dependencies do not go with those of the tests."""

with_skypilot = pytest.mark.skipif(
    PYTHON is None, reason="skypilot is not installed, and RAYPOOL_SKYPILOT names no Python with it"
)

SCHEMAS = """
import json
from sky.utils import schemas
print(json.dumps([schemas.get_task_schema(), schemas.get_resources_schema()]))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["cluster", "init", "--provider", "sky", "--force", *words])
    assert done.exit_code == 0, done.output
    return yaml.safe_load(Path("cluster.yaml").read_text())


GIVEN = [
    (),
    ("--gpu", "A100-80G", "--gpus", "8", "--on-demand", "--max", "2"),
    ("--job", "python sweep.py --lr 0.1", "--idle-shutdown-minutes", "0"),
]


@with_skypilot
@pytest.mark.parametrize("words", GIVEN)
def test_skypilots_own_schema_takes_it(home: Path, words: tuple[str, ...]) -> None:
    content = init(*words)
    done = subprocess.run([str(PYTHON), "-c", SCHEMAS], capture_output=True, text=True, check=True)
    task, resources = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(content, task)
    jsonschema.validate(content["resources"], resources)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "num_nods": 1}, task)


def test_it_names_what_travels_and_validates(home: Path) -> None:
    content = init("--gpu", "V100", "--job", "python sweep.py")
    assert content["run"].endswith("\npython sweep.py\n")
    assert "--torch-backend=cu126" in content["setup"]
    assert "-r ~/raypool-packages/requirements.txt" in content["setup"]
    for there, here in content["file_mounts"].items():
        assert there.startswith(packages.FOLDER)
        assert Path(here).expanduser().exists()
    done = CliRunner().invoke(main, ["cluster", "validate", "cluster.yaml"])
    assert done.exit_code == 0, done.output
    open_run = content["run"].replace("RAY_AUTH_MODE=token", "")
    Path("cluster.yaml").write_text(yaml.safe_dump({**content, "run": open_run}))
    done = CliRunner().invoke(main, ["cluster", "validate", "cluster.yaml"])
    assert "starts without a token" in done.stderr
    Path("cluster.lock.txt").write_text("raypool==0.1.0\n")
    done = CliRunner().invoke(main, ["cluster", "validate", "cluster.yaml"])
    assert done.exit_code == 2
    assert "anybody who registers the name" in done.stderr


CAN_UNSHARE = subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode == 0

# Network, processes and /tmp/ray are its own, and end with it. A file that Ray leaves in /tmp/ray
# would make later programs on this machine look for a cluster that is gone.
MACHINE = ["unshare", "-Urn", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c"]
MACHINE += ['mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec "$@"', "machine"]
POOL = (
    "import raypool; pool = raypool.parpool(2, quiet=True, start_timeout_s=300);"
    " print(list(pool.parfor(abs, [-1, -2])))"
)


@pytest.mark.ci
@pytest.mark.skipif(not CAN_UNSHARE, reason="unshare -Urn is not allowed here")
def test_what_it_runs_ends_in_a_pool(home: Path) -> None:
    uv = home / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV.format(python=sys.executable, site=sysconfig.get_path("purelib")))
    uv.chmod(0o755)
    content = init("--job", f"python -c '{POOL}'", "--max", "1")
    (home / "raypool-packages").mkdir()
    for there, here in content["file_mounts"].items():
        shutil.copy(Path(here).expanduser(), Path(there).expanduser())
    script = home / "task.sh"
    script.write_text(f"ip link set lo up\n({content['setup']})\n{content['run']}")
    variables = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "RAY_AUTH_TOKEN": "a" * 64,
        "RAY_raylet_start_wait_time_s": "300",  # beside other tests
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
    }
    done = subprocess.run(
        [*MACHINE, "bash", str(script)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[1, 2]"
