"""Ray's own launcher on machines that are namespaces, with an SSH server on each (scenario 52)."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool.cluster import cluster_file, on_prem
from raypool.cluster.packages import default_packages
from raypool.cluster.plan import ClusterPlan, NodeGroup
from tests.cloud.lab import Lab
from tests.cloud.test_packages import UV

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")

HAS_ALL = (
    os.geteuid() == 0
    and SSHD
    and shutil.which("rsync")
    and shutil.which("ssh")
    and shutil.which("ip")
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not HAS_ALL,
        reason="wants root, sshd, ssh, rsync and ip: apt-get install openssh-server rsync iproute2",
    ),
]

HOSTS = ("laptop", "head", "left", "right")

# Each host sees a table of users in which root's home is its own: that is where SSH, and what it
# starts, look.
SERVICE = """
sed 's#^root:.*#root:x:0:0:root:{home}:/bin/bash#' /etc/passwd >{home}/passwd && mount --bind {home}/passwd /etc/passwd
mkdir -p /run/sshd && /usr/sbin/sshd -f {home}/sshd_config -E {home}/sshd.log
"""

SSHD_CONFIG = """
HostKey {keys}/host
AuthorizedKeysFile {keys}/id.pub
StrictModes no
UsePAM no
MaxStartups 50
"""

FLAGS = "--num-cpus=2 --num-gpus=2 --object-store-memory=80000000"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Switch on a laptop and three machines, all of which can be reached by SSH with one key."""
    folder = tmp_path_factory.mktemp("hosts")
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    for name in ("id", "host"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True
        )

    def furnish(home: Path) -> None:
        (home / "sshd_config").write_text(SSHD_CONFIG.format(keys=keys))
        (home / ".bashrc").write_text(
            f"export PATH={Path(sys.executable).parent}:$PATH RAY_USAGE_STATS_ENABLED=0"
            " PYTHONWARNINGS=ignore\n"
        )
        (home / ".bash_profile").write_text(". ~/.bashrc\n")
        uv = home / ".local/bin/uv"
        uv.parent.mkdir(parents=True)
        uv.write_text(UV.format(python=sys.executable, site=sysconfig.get_path("purelib")))
        uv.chmod(0o755)

    lab = Lab(folder, HOSTS, SERVICE, as_root=True, furnish=furnish)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="module")
def file(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the file of the cluster, with pretended GPUs."""
    path = tmp_path_factory.mktemp("file") / "cluster.yaml"
    hosts = tuple(lab[name].address for name in HOSTS[1:])
    key = str(lab["laptop"].home.parent / "keys" / "id")
    worker = NodeGroup(name="worker", least=2, most=2)
    plan = ClusterPlan(
        name="lab",
        provider="on-prem",
        head=NodeGroup(name="head"),
        workers=(worker,),
        hosts=hosts,
        ssh_user=getpass.getuser(),
        ssh_key=key,
        packages=default_packages("on-prem"),
    )
    content = on_prem.write(plan)
    for role in ("head", "worker"):
        content[f"{role}_start_ray_commands"][1] += f" {FLAGS}"
    text = cluster_file.render(content, ["Made by a test."])
    cluster_file.save(text, path, plan)
    return path


# The laptop has a token of its own for its own Ray, which has nothing to do with the cluster.
OWN = {"PYTHONWARNINGS": "ignore", "RAY_AUTH_TOKEN": "a" * 64}


def raypool(lab: Lab, *words: str, timeout_s: float = 120.0) -> str:
    """Run a command of raypool's on the laptop."""
    return lab.run("laptop", "raypool", *words, timeout_s=timeout_s, **OWN)


POOL = """
import json, os, platform
from raypool import parpool

os.chdir(os.environ["HOME"])
with parpool(6, profile="raypool", quiet=True) as pool:
    print(json.dumps(sorted(pool.parfeval_on_all(lambda: (platform.node(), os.environ["CUDA_VISIBLE_DEVICES"])).result(300))))
    print(pool.parfeval(lambda: __import__("raypool").__file__).result(300))
    assert list(pool.parfor(lambda i: i * i, range(30))) == [i * i for i in range(30)]
"""

TRAINING = """
import json, os, platform, time
from pathlib import Path
from raypool import RunOptions, current_task, parpool

marks = Path(os.environ["MARKS"])

def loop():
    import tempfile
    import ray.train
    start, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        start = json.loads((Path(checkpoint.path) / "step").read_text()) + 1
    for step in range(start, 6):
        if step == 3 and current_task().attempt == 1:
            (marks / f"at three on {platform.node()}").touch()
            while not (marks / "struck").exists():
                time.sleep(0.05)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "step").write_text(str(step))
            ray.train.report({"step": step}, ray.train.Checkpoint.from_directory(folder))
    return start

with parpool(4, address=os.environ["HEAD"], quiet=True, start_timeout_s=300) as pool:
    run = pool.options(retries=1).train(loop, run_options=RunOptions(run_dir=marks / "run"))
    while len(run.metrics) < 3 and not run.done():
        time.sleep(0.05)
    (marks / "heard").touch()  # what has not travelled yet goes with the machine
    result = run.result(300)
    facts = {"starts": result.values, "steps": result.metrics_frame["step"].tolist()}
    print(json.dumps({**facts, "hosts": [worker.host for worker in pool.workers]}))
"""


def test_a_cluster_is_started_used_and_ended(
    lab: Lab, file: Path, eventually: Any, tmp_path: Path
) -> None:
    """All GPUs are used from the laptop, a training survives the loss of a machine, and nothing is
    left at the end.
    """
    assert "The head is running" in raypool(lab, "cluster", "up", str(file))
    # where Ray's launcher has noted down that there is a cluster
    lab.run("laptop", "rm", "/tmp/ray/cluster-lab.state")
    with pytest.raises(AssertionError, match="is already running"):
        raypool(lab, "cluster", "up", str(file))
    assert eventually(lambda: "/6.0 GPU" in raypool(lab, "cluster", "status", str(file)), 120)
    for name in HOSTS:
        token = lab[name].home / ".ray" / "auth_token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
    use_from_laptop(lab, file)
    facts, struck = train_and_strike(lab, tmp_path, eventually)
    assert facts["starts"] == [3] * 4
    assert facts["steps"] == list(range(6))
    assert struck not in facts["hosts"]
    with pytest.raises(
        AssertionError,
        match=rf"could not be stopped on {lab[struck].address}, and may still run there",
    ):
        raypool(lab, "cluster", "down", "--yes", str(file))
    for name in HOSTS[1:]:
        if name != struck:
            assert eventually(lambda name=name: "raylet" not in lab.run(name, "ps", "-A")), lab.run(
                name, "ps", "-A"
            )
    with pytest.raises(
        AssertionError, match=f"Ray is not running on the head, {lab['head'].address}"
    ):
        raypool(lab, "cluster", "connect", str(file))


def use_from_laptop(lab: Lab, file: Path) -> None:
    """Use all GPUs of the cluster by the tunnel and the profile that `raypool cluster connect`
    gives.
    """
    connect = lab.start("laptop", "raypool", "cluster", "connect", str(file), **OWN)
    try:
        assert connect.stdout is not None
        profile = [connect.stdout.readline() for _ in range(4)]
        assert profile[0] == '[profiles."raypool"]\n'
        (lab["laptop"].home / "raypool.toml").write_text("".join(profile))
        try:
            out = lab.run(
                "laptop", sys.executable, "-c", POOL, timeout_s=120, PYTHONWARNINGS="ignore"
            )
        except AssertionError as error:
            # now and then the first server that Ray Client starts dies as it is forked
            if "Starting Ray client server failed" not in str(error):
                raise
            out = lab.run(
                "laptop", sys.executable, "-c", POOL, timeout_s=120, PYTHONWARNINGS="ignore"
            )
        *_, cards, there = out.splitlines()
        assert json.loads(cards) == [[name, card] for name in HOSTS[1:] for card in "01"]
        assert "/raypool-venv/" in there, "the wheel that was copied there"
    finally:
        lab.end(connect, signal.SIGINT)


def train_and_strike(lab: Lab, marks: Path, eventually: Any) -> tuple[dict[str, Any], str]:
    """Train on four of the six GPUs, and switch a machine off in the midst of it; return the facts,
    and which machine.
    """
    head = f"{lab['head'].address}:6379"
    driver = lab.python(
        "head",
        TRAINING,
        MARKS=str(marks),
        HEAD=head,
        PYTHONWARNINGS="ignore",
        RAY_AUTH_MODE="token",
    )
    if not eventually(
        lambda: (marks / "heard").exists() and len(list(marks.glob("at three on *"))) >= 2
    ):
        pytest.fail(lab.end(driver))
    struck = next(name for name in ("right", "left") if (marks / f"at three on {name}").exists())
    lab.kill(struck)
    (marks / "struck").touch()
    out, err = driver.communicate(timeout=500)
    assert driver.returncode == 0, f"{out}\n{err}"
    return json.loads(out.splitlines()[-1]), struck
