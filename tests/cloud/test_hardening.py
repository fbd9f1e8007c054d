"""`raypool cluster harden`: files that others wrote, Ray's own examples among them."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import checks
from raypool.cluster.hardening import asks_for_token, hardened, open_host

SPEC = find_spec("ray")
assert SPEC is not None
RAYS = {
    name: Path(str(SPEC.origin)).parent / "autoscaler" / name / "defaults.yaml"
    for name in ("aws", "azure", "gcp")
}
MINIMAL = """\
# mine
cluster_name: lab
provider:
    type: aws
    region: us-west-2
available_node_types:
    ray.head.default:
        resources: {}
        node_config:
            InstanceType: m5.large  # small
head_node_type: ray.head.default
"""
BLOCK = """\
cluster_name: lab
provider: {type: local, head_ip: a, worker_ips: [b]}
auth: {ssh_user: me}
file_mounts:
    /data: /tmp
    # the end of them
setup_commands: []
worker_start_ray_commands: [unset RAY_AUTH_MODE; A=1 RAY_AUTH_MODE=disabled ray start --address=$RAY_HEAD_IP:6379]  # all
head_start_ray_commands:
    - ray stop
    # starts it
    - >-
      ray start --head --dashboard-host 0.0.0.0 --port=6379
      --autoscaling-config=~/ray_bootstrap_config.yaml
"""


def harden(file: Path, text: str) -> dict[str, object]:
    file.write_text(text)
    done = CliRunner().invoke(main, ["cluster", "harden", str(file)])
    assert done.exit_code == 0, done.output
    return yaml.safe_load(file.read_text())


def open_ends(file: Path) -> list[str]:
    return [said for said in checks.check_file(file) if "token" in said or "dashboard" in said]


@pytest.mark.parametrize("name", RAYS)
def test_rays_own_examples_pass_with_warnings_and_are_closed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    text = RAYS[name].read_text().replace("project_id: null", "project_id: my-project")
    file.write_text(text)
    assert len(open_ends(file)) == 3, "both start Ray without a token, and the dashboard is open"
    content = harden(file, text)
    assert not open_ends(file)
    assert "RAY_health_check_period_ms=1000" in str(content["head_start_ray_commands"])
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert set(comments) <= set(file.read_text().splitlines())
    again = file.read_text()
    assert harden(file, again) == content
    assert file.read_text() == again


def test_what_is_missing_is_added_and_the_rest_stays(tmp_path: Path) -> None:
    file = tmp_path / "minimal.yaml"
    content = harden(file, MINIMAL)
    assert file.read_text().startswith(MINIMAL)
    assert content["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert not any("start_ray" in said for said in checks.check_file(file))
    has_mounts = MINIMAL + "file_mounts: {}"
    assert harden(file, has_mounts) == content, "though its last line does not end"


def test_any_form_of_an_entry_is_closed_and_comments_stay(tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    content = harden(file, BLOCK)
    assert content["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token", "/data": "/tmp"}
    assert not open_ends(file)
    assert "RAY_enable_autoscaler_v2=0" in file.read_text(), "else Ray leaves out a worker"
    [worker] = content["worker_start_ray_commands"]
    assert worker.startswith(
        "unset RAY_AUTH_MODE; export RAY_AUTH_MODE=token; A=1 RAY_AUTH_MODE=token"
    )
    for comment in ("    # the end of them", "    # starts it", "]  # all"):
        assert comment in file.read_text()
    start = BLOCK[BLOCK.index(">-") :]
    quoted = '"ray start --head --autoscaling-config=~/x.yaml --dashboard-host=0.0.0.0"\n'
    [_, head] = harden(file, BLOCK.replace(start, quoted))["head_start_ray_commands"]
    assert head.endswith("--dashboard-host=127.0.0.1")
    assert not open_ends(file)


@pytest.mark.parametrize("host", ['="0.0.0.0"', " '0.0.0.0'", "  0.0.0.0", "=0.0.0.0"])
def test_an_open_dashboard_is_closed_however_it_is_written(host: str) -> None:
    start = f"ray start --head --dashboard-host{host}"
    assert open_host(start) == "0.0.0.0"
    file = (
        f"provider: {{type: aws}}\nhead_start_ray_commands:\n  - |\n    # ray start:\n    {start}\n"
    )
    [command] = yaml.safe_load(hardened(file, "cluster.yaml"))["head_start_ray_commands"]
    assert open_host(command) is None
    assert asks_for_token(command)
    assert command.startswith("# ray start:\nexport RAY_AUTH_MODE=token ")
    assert not asks_for_token("# export RAY_AUTH_MODE=token\nray start --head")


def test_commands_that_an_alias_repeats_are_closed_once() -> None:
    file = """
        provider: {type: aws}
        head_start_ray_commands: &start [ray start --head]
        worker_start_ray_commands: *start
    """
    content = yaml.safe_load(hardened(textwrap.dedent(file), "cluster.yaml"))
    [command] = content["worker_start_ray_commands"]
    assert command.count("RAY_AUTH_MODE=token") == 1
    assert command.endswith("; ray start --head")


def test_a_file_of_raypools_own_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "gcp.yaml"
    done = CliRunner().invoke(
        main,
        ["cluster", "init", "--provider", "gcp", "--project", "my-project", "--out", str(file)],
    )
    assert done.exit_code == 0, done.output
    text = file.read_text()
    harden(file, text)
    assert file.read_text() == text


def test_no_file_for_the_launcher_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("apiVersion: ray.io/v1\n")
    done = CliRunner().invoke(main, ["cluster", "harden", str(file)])
    assert done.exit_code == 1
    assert "is not a file for Ray's launcher" in done.output
    assert file.read_text() == "apiVersion: ray.io/v1\n"
    file.write_bytes(b"cluster_name: caf\xe9\n")
    done = CliRunner().invoke(main, ["cluster", "harden", str(file)])
    assert "is not UTF-8" in done.output
