"""A real Slurm on machines that are namespaces: a login node with the controller, and two nodes
with two pretended GPUs each.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.cloud.lab import Lab

COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")

WHERE = "/usr/sbin:/usr/bin:/sbin:/bin"

MISSING = [name for name in COMMANDS if shutil.which(name, path=WHERE) is None]

REASON = (
    "wants root and Slurm: apt-get install --no-install-recommends slurmctld slurmd slurm-client"
    f" munge slurm-wlm-basic-plugins iproute2 (missing: {', '.join(MISSING) or 'root'}); and this"
    " checkout not in /tmp"
)

# on the hosts, another folder is mounted there
HIDDEN = Path("/tmp") in Path(sys.executable).parents

HAS_ALL = os.geteuid() == 0 and not MISSING and not HIDDEN

HOSTS = ("login", "n1", "n2")

CONFIGURATION = """
ClusterName=lab
SlurmctldHost=login(10.88.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={run}/controller
SlurmdSpoolDir={run}/spool.%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
{extra}
KillWait=10
InactiveLimit=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=n1 NodeAddr=10.88.0.2 CPUs=4 RealMemory=8000 Gres=gpu:t4:2
NodeName=n2 NodeHostname=n2 NodeAddr=10.88.0.3 CPUs=4 RealMemory=8000 Gres=gpu:t4:2
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=300
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10
"""

# names are looked up in a file: nobody answers for them here
SERVICE = """
printf '127.0.0.1 localhost\\n10.88.0.1 login\\n10.88.0.2 n1\\n10.88.0.3 n2\\n' >{{home}}/hosts
mount --bind {{home}}/hosts /etc/hosts && : >{{home}}/none && mount --bind {{home}}/none /etc/resolv.conf
mount -t tmpfs tmpfs /tmp && mkdir -m 1777 /tmp/ray
if [ {{name}} = login ]
then /usr/sbin/slurmctld -f {run}/slurm.conf -i -c
else
    # slurmd looks at control groups, though it uses none here; they were lost with this /sys
    if grep -q name=systemd /proc/self/cgroup
    then
        mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/systemd
        mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    else mount -t cgroup2 cgroup2 /sys/fs/cgroup
    fi
    /usr/sbin/slurmd -f {run}/slurm.conf -N {{name}}
fi
"""

GPUS = "NodeName=n[1-2] Name=gpu Type=t4 Count=2 File={run}/gpu[0-1]\n"

UP_S = 600.0
"""The end of every wait [s]: far more than a busy machine needs."""


class SlurmLab:
    """A cluster with Slurm: `login`, `n1` and `n2`.

    Args:
        folder: For everything, on the file system that all hosts share. Not in /tmp, which each
            host has for itself.
        extra: More lines of slurm.conf.
    """

    def __init__(self, folder: Path, extra: str = "") -> None:
        self.folder = folder
        run = self._run = folder / "run"
        for name in ("munge", "controller"):
            (run / name).mkdir(parents=True, mode=0o700)
        (run / "slurm.conf").write_text(CONFIGURATION.format(run=run, extra=extra))
        (run / "gres.conf").write_text(GPUS.format(run=run))
        for number in (0, 1):
            # devices, since Slurm gives no other files to a job: these are like /dev/null
            os.mknod(run / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (run / "munge" / "key").write_bytes(os.urandom(1024))
        (run / "munge" / "key").chmod(0o600)
        self._munged = subprocess.Popen(
            [
                *("/usr/sbin/munged", "--foreground", "--force"),
                *(f"--socket={run}/munge/socket", f"--key-file={run}/munge/key"),
                *(f"--log-file={run}/munge/log", f"--pid-file={run}/munge/pid"),
                *(f"--seed-file={run}/munge/seed", "--num-threads=2"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.lab: Lab | None = None
        try:
            until(lambda: (run / "munge" / "socket").exists())
            self.lab = Lab(folder, HOSTS, SERVICE.format(run=run), as_root=True)
            until(lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T") == "idle\nidle")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Switch everything off."""
        if self.lab is not None:
            self.lab.close()
        self._munged.kill()
        self._munged.wait()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a user on the login node."""
        return {
            "SLURM_CONF": f"{self._run}/slurm.conf",
            "PYTHONWARNINGS": "ignore",
            "PWD": str(self.folder),
        }

    def start(self, *command: str, host: str = "login", **env: str) -> subprocess.Popen[str]:
        """Start a program on the login node."""
        assert self.lab is not None
        inside = ["env", "-C", str(self.folder), *command]
        return self.lab.start(host, *inside, **{**self.env, **env})

    def run(self, *command: str, host: str = "login", **env: str) -> str:
        """Run a program on the login node to its end; return what it has printed."""
        process = self.start(*command, host=host, **env)
        assert self.lab is not None
        try:
            out, err = process.communicate(timeout=UP_S)
        except BaseException:
            self.lab.end(process)
            raise
        assert process.returncode == 0, f"{command}: {process.returncode}\n{out}\n{err}"
        return out.strip()

    def interrupt(self, process: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
        """Send a signal to a program that was started: Ctrl-C, unless another is given."""
        *_, last = psutil.Process(process.pid).children(recursive=True)
        last.send_signal(number)

    def python(self, file: Path, *words: str, host: str = "login") -> subprocess.Popen[str]:
        """Start a script on the login node."""
        return self.start(sys.executable, str(file), *words, host=host)


def until(is_so: object, limit_s: float = UP_S) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + limit_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.1)
