"""What is installed on machines: this raypool, versions that go with it, and a torch and a driver
that know the GPUs.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from raypool.cli.main import main
from raypool.cluster import checks, cluster_file, launcher, packages
from raypool.cluster.plan import draft
from raypool.errors import CloudError

HOSTS = ("192.0.2.1", "192.0.2.2")

# Does what uv is asked for, offline: the environment sees the packages of the tests, but for the
# editable raypool among them, and only the wheel is installed.
UV = """#!/bin/sh -e
echo "uv $@" >> ~/asked
case "$1" in
venv)
    for last; do :; done
    {python} -m venv --without-pip "$last"
    cd "$last"/lib/python*/site-packages
    echo {site} > tests.pth ;;
pip)
    for last; do :; done
    while [ "$1" != -r ]; do shift; done
    grep -q '^torch==' "$2"
    {python} -m pip --python ~/raypool-venv/bin/python install -q --no-deps --no-index "$last"
    cd ~/raypool-venv/bin
    printf '#!%s/python\nfrom ray.scripts.scripts import main\nmain()\n' "$PWD" > ray
    chmod +x ray ;;
esac
"""

FIRST = """
import raypool
if __name__ == "__main__":
    print(raypool.__file__)
    with raypool.parpool(2, quiet=True, start_timeout_s=300) as pool:
        print(list(pool.parfor(lambda x: x * x, range(4))))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's home, with this machine's cache in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str) -> str:
    done = CliRunner().invoke(main, ["cluster", "init", "--force", *words])
    assert done.exit_code == 0, done.output
    return Path("cluster.yaml").read_text()


def run_as_ray_does(command: str, home: Path) -> str:
    words = ["bash", "--login", "-c", "-i", f"source ~/.bashrc; ({command})"]
    environment = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "RAY_raylet_start_wait_time_s": "300",  # beside other tests
    }
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
@pytest.mark.parametrize("provider", ["gcp", "aws", "on-prem"])
def test_the_first_pool_on_a_machine_is_of_the_raypool_that_is_here(
    home: Path, provider: str
) -> None:
    uv = home / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV.format(python=sys.executable, site=sysconfig.get_path("purelib")))
    uv.chmod(0o755)
    (home / ".bashrc").touch()
    content = yaml.safe_load(init("--provider", provider))
    packages.make_wheel()
    for there, here in content["file_mounts"].items():
        if there.startswith(packages.FOLDER):
            target = Path(there).expanduser()
            target.parent.mkdir(exist_ok=True)
            shutil.copy(Path(here).expanduser(), target)
    for command in content["setup_commands"] + content["head_setup_commands"]:
        run_as_ray_does(command, home)
    assert "--torch-backend=" in (home / "asked").read_text()
    (home / "first.py").write_text(FIRST)
    file, squares = run_as_ray_does("cd; python first.py", home).splitlines()
    assert file.startswith(str(home / "raypool-venv"))
    assert squares == "[0, 1, 4, 9]"


def test_the_same_package_makes_the_same_wheel(home: Path) -> None:
    """Another one would set up a running cluster anew."""
    first = packages.make_wheel().read_bytes()
    (home / ".cache/raypool" / packages.wheel_name()).unlink()
    os.utime(Path(packages.__file__))
    assert packages.make_wheel().read_bytes() == first


def pretend_installed(folder: Path, origin: dict[str, object] | None) -> None:
    info = folder / "raypool-0.1.0.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: raypool\nVersion: 0.1.0\nRequires-Dist: torch>=2.6\n"
    (info / "METADATA").write_text(text)
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b3c4"}},
            "raypool @ git+https://host/x.git@1a2b3c4",
        ),
        (
            {"url": "https://host/x.whl", "archive_info": {"hashes": {"sha256": "1a"}}},
            "raypool @ https://host/x.whl#sha256=1a",
        ),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "<address of a wheel of raypool"),
        (None, "<address of a wheel of raypool"),
    ],
)
def test_pods_get_the_commit_or_the_file_that_is_here_and_nothing_by_its_name(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: dict[str, object] | None,
    said: str,
) -> None:
    pretend_installed(home, origin)
    monkeypatch.syspath_prepend(home)
    assert said in init("--provider", "kubernetes")


def test_a_package_that_would_take_raypool_from_an_index_is_refused(home: Path) -> None:
    for package in ("raypool", "raypool==0.1.0", "raypool @ git+https://host/x.git@main"):
        words = ["cluster", "init", "--provider", "gcp", "--package", package]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert "anybody who registers the name could run code" in done.stderr
    assert not list(home.iterdir())


def test_a_package_replaces_the_one_of_its_name_however_that_is_spelled() -> None:
    lines = packages.default_packages("gcp", ["google_api_python_client==2.1"])
    assert [line for line in lines if "api" in line] == ["google_api_python_client==2.1"]
    with pytest.raises(CloudError, match=r"Name the package: 'NAME @ git\+https://host/x'"):
        packages.default_packages("gcp", ["git+https://host/x"])


def a_cluster(home: Path, *more: str) -> Path:
    plan = draft("on-prem", hosts=HOSTS, packages=more)
    file = home / "folder" / "cluster.yaml"
    file.parent.mkdir()
    cluster_file.save(cluster_file.text_of(plan, "x", file.name), file, plan)
    return file


def test_what_cannot_be_installed_is_refused_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler import sdk

    begun: list[str] = []
    monkeypatch.setattr(sdk, "create_or_update_cluster", lambda *_, **__: begun.append(os.getcwd()))
    file = a_cluster(home)
    lock = cluster_file.lock_of(file)
    good = lock.read_text()

    def why_not(text: str | None) -> str:
        lock.unlink(missing_ok=True)
        if text is not None:
            lock.write_text(text)
        with pytest.raises(CloudError) as caught:
            launcher.up(file)
        return str(caught.value)

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    assert "No matching distribution found for" in why_not(good)
    assert "cluster.lock.txt could not be read" in why_not(None)
    assert "line 1: raypool is not on any package index" in why_not("raypool==0.1.0\n")
    assert "line 2: 'a b' is not a valid requirement" in why_not("# x\na b\n")
    text = file.read_text()
    file.write_text(text.replace("raypool-0.1.0-", "raypool-0.0.9-"))
    assert "but this machine has raypool-0.1.0" in why_not(good)
    file.write_text(text)
    assert not begun
    assert not (home / ".ray").exists()
    (home / "good.txt").write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    lock.write_text("# nothing but raypool's wheel, whose own needs pip would look up\n")
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    launcher.up(file)
    assert begun == [str(file.parent)], "where the lock file is found by its name"


OLD = [("gcp", "V100"), ("gcp", "P100"), ("gcp", "P4"), ("aws", "V100")]


@pytest.mark.parametrize(("provider", "gpu"), OLD)
def test_gpus_before_turing_get_a_driver_and_a_torch_that_know_them(
    home: Path, provider: str, gpu: str
) -> None:
    given = ["--project", "my-project"] if provider == "gcp" else []
    given += ["--gpus", "8"] if provider == "aws" else []
    text = init("--provider", provider, *given, "--gpu", gpu)
    assert "--torch-backend=cu126" in text
    if provider == "aws":
        assert "ubuntu/server/24.04" in text
        assert "linux-modules-nvidia-580-server-$(uname -r)" in " ".join(text.split())
        text = text.replace("<your image>", "ami-0123456789abcdef0")
        text = text.replace("<your security group>", "sg-0123456789abcdef0")
    else:
        assert "-nvidia-580" in text

    def found(old: str, new: str) -> tuple[str, str]:
        Path("cluster.yaml").write_text(text.replace(old, new))
        try:
            return "warned", "\n".join(checks.check_file("cluster.yaml"))
        except CloudError as error:
            return "refused", str(error)

    assert found("", "") == ("warned", "")
    how, why = found("cu126", "cu130")
    assert how == "refused"
    assert f"torch for cu130 has kernels for compute capability 7.5 to 12.0, but {gpu}" in why
    how, why = found(" --torch-backend=cu126", "")
    assert how == "warned"
    assert f"torch from PyPI has no kernels for {gpu} GPUs" in why
    if provider == "gcp":
        how, why = found("nvidia-580", "nvidia-595")
        assert how == "refused"
        assert f"{gpu} GPUs need driver 580 or older, but the image has 595" in why


def test_a_torch_without_any_build_for_a_gpu_is_refused(home: Path) -> None:
    words = ["cluster", "init", "--provider", "gcp", "--gpu", "V100", "--package", "torch==2.15.0"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert (
        "torch 2.15.0 has no build for V100 GPUs. torch 2.6 to before 2.15 has one" in done.stderr
    )


def test_every_row_of_the_table_has_a_source_and_a_date() -> None:
    file = resources.files("raypool.cluster").joinpath("catalogues", "software.toml")
    for rows in tomllib.loads(file.read_text()).values():
        for name, row in rows.items():
            assert row["source"], name
            assert isinstance(row["date"], datetime.date), name


def test_every_gpu_of_the_catalogues_has_its_row() -> None:
    from raypool.cluster import software
    from raypool.cluster.machines import catalogue

    for provider, name in (("gcp", "gce"), ("aws", "aws")):
        for gpu in catalogue(name).gpus.values():
            if gpu.retired is None:
                image = software.image(provider, [gpu.name])
                assert software.why_no_driver(gpu.name, image["driver"]) is None
                assert software.torch_build([gpu.name], "2.13.0") != software.AUTO, gpu.name
