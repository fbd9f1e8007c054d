"""`raypool doctor`: what it makes of machines that are well, that are not, and that are like none
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from click.testing import CliRunner, Result

from raypool.cli import doctor
from raypool.cli.main import main
from raypool.gpus.devices import GpuDevice, GpuProcess

GIB = 2**30
IMPORT = doctor.imported
CARD = GpuDevice(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-0",
    total_bytes=80 * GIB,
    used_bytes=GIB,
    compute_capability=(9, 0),
    compute_mode="default",
)
FULL = replace(CARD, index=1, used_bytes=40 * GIB, processes=(GpuProcess(pid=7, used_bytes=None),))
SHUT = replace(CARD, index=2, compute_mode="prohibited")
SILENT = GpuDevice(index=3, name="C", uuid="GPU-3")
UNIFIED = replace(CARD, index=5, total_bytes=None, used_bytes=None)
OTHER_MAKER = GpuDevice(index=4, name="AMD GPU")

TORCH = """
import warnings
class version: cuda = {cuda!r}
class cuda:
    is_available = lambda: {available}
    get_arch_list = lambda: {archs}
__version__ = "2.9.0"
print("hello")
if {warning!r}: warnings.warn({warning!r})
"""

RAY = """
import sys
from types import SimpleNamespace as Names
utils = Names(estimate_available_memory=lambda: {free} * 2**30, resolve_object_store_memory=lambda free: {store} * 2**30)
sys.modules["ray._private"] = Names(utils=utils)
sys.modules["ray._common.utils"] = Names(get_system_memory=lambda: {total} * 2**30)
__version__ = "2.60.0"
"""


IMPORTS: dict[tuple[str, ...], doctor.Import] = {}
"""What has come of importing these texts: each takes a process, and most machines have the same."""


class Ill:
    """A machine, well at first: one H100, a driver for CUDA 12.4 and a torch for it. Its methods
    make it ill.
    """

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.patch, self.cards = home, monkeypatch, [CARD]
        self.library = Nvml()
        self.patch.setattr(doctor, "load_pynvml", lambda: self.library)
        self.patch.setattr(doctor, "imported", self.imported)
        self.patch.setattr(doctor, "PCI", home / "pci")
        self.patch.setattr(doctor, "KERNEL_DRIVER", home / "version")
        self.patch.chdir(home)
        for name in (
            *doctor.PINNING,
            "RAY_ADDRESS",
            "RAY_AUTH_TOKEN",
            "RAY_AUTH_TOKEN_PATH",
            "RAY_TMPDIR",
            "TMPDIR",
        ):
            self.patch.delenv(name, raising=False)
        self.patch.setenv("HOME", str(home))
        self.patch.setenv("PYTHONPATH", str(home))
        self.torch()
        self.ray()
        self.disk(50)
        self.files(1024, 1_000_000)

    def devices(self) -> list[GpuDevice]:
        return self.cards

    def imported(self, code: str) -> doctor.Import:
        text = (self.home / ("torch.py" if code == doctor.TORCH else "ray.py")).read_text()
        key = (code, text, str(doctor.IMPORT_TIMEOUT_S))
        if key not in IMPORTS:
            IMPORTS[key] = IMPORT(code)
        return IMPORTS[key]

    def env(self, name: str, value: str) -> None:
        self.patch.setenv(name, value)

    def gpus(self, *cards: GpuDevice) -> None:
        self.cards = list(cards)

    def torch(
        self,
        cuda: str | None = "12.4",
        available: bool = True,
        archs: str = "sm_80 sm_90",
        warning: str = "",
    ) -> None:
        self.write(
            "torch.py",
            TORCH.format(cuda=cuda, available=available, archs=archs.split(), warning=warning),
        )

    def ray(self, free: int = 9, total: int = 10, store: int = 1) -> None:
        self.write("ray.py", RAY.format(free=free, total=total, store=store))

    def write(self, name: str, text: str) -> None:
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        (self.home / name).write_text(text)

    def nvml(self, error: int, kernel: str = "", card: str = "") -> None:
        self.library.error, self.cards = error, []
        if kernel:
            self.write(
                "version",
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {kernel}\nGCC version:"
                " 12\n",
            )
        if card:
            # the second is its loudspeaker
            for address, kind in ((f"{card}.0", "0x030200"), (f"{card}.1", "0x040300")):
                self.write(f"pci/{address}/vendor", "0x10de\n")
                self.write(f"pci/{address}/class", f"{kind}\n")

    def disk(self, free: int) -> None:
        self.fails("shutil.disk_usage", SimpleNamespace(free=free * GIB, total=100 * GIB))

    def files(self, soft: int, hard: int) -> None:
        self.fails("resource.getrlimit", (soft, hard))

    def fails(self, name: str, answer: Any) -> None:
        """Let a function of the machine's return or raise this."""

        def call(*_: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        self.patch.setattr(f"raypool.cli.doctor.{name}", call)


class Nvml:
    """Stands for pynvml; its first call may raise."""

    NVMLError = pynvml.NVMLError
    error, users = 0, 0

    def nvmlInit(self) -> None:
        if self.error:
            raise pynvml.NVMLError(self.error)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ill:
    return Ill(tmp_path, monkeypatch)


def run(machine: Ill | None = None, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments], obj=machine)


def found(machine: Ill) -> list[dict[str, str]]:
    findings: list[dict[str, str]] = json.loads(run(machine, "--json").stdout)
    return findings


def closed(machine: Ill, name: str) -> None:
    machine.fails(name, PermissionError(13, "Permission denied"))


CLOSED = "could not be checked: PermissionError: .*Permission denied"

NEEDS = ["click>=9999", "nothing-of-this-name", "x; extra == 'dev'"]

BLIND = "torch sees no GPU: unknown error; torch 2.9.0 was built for CUDA 12.4"

ILLNESSES: list[tuple[str, str, Callable[[Ill], Any], str, str]] = [
    (
        "packages",
        "problem",
        lambda m: m.fails("importlib.metadata.requires", NEEDS),
        "of-this-name is missing",
        "'click>=9999'",
    ),
    ("packages", "warning", lambda m: closed(m, "importlib.metadata.requires"), CLOSED, ""),
    (
        "ray",
        "problem",
        lambda m: m.write("ray.py", "import libfoo"),
        "No module named 'libfoo'",
        "--force-reinstall ray",
    ),
    (
        "ray",
        "problem",
        lambda m: m.write("ray.py", "raise SystemExit(3)"),
        "the process ended with status 3",
        "",
    ),
    # without the names that are looked at
    ("ray", "ok", lambda m: m.write("ray.py", "__version__ = '99.0'"), "99.0", ""),
    (
        "torch",
        "problem",
        lambda m: m.write("torch.py", "import os; os.abort()"),
        "the process ended with status -6",
        "",
    ),
    (
        "torch",
        "problem",
        lambda m: m.patch.setattr(doctor, "IMPORT_TIMEOUT_S", 1e-3),
        "it took longer than 0 s",
        "",
    ),
    (
        "torch",
        "problem",
        lambda m: m.write("torch.py", "import os; os._exit(0)"),
        "its output could not be read",
        "",
    ),
    ("worker start", "ok", lambda m: None, "forked from a process that has imported torch", ""),
    (
        "worker start",
        "ok",
        lambda m: m.write(
            "torch.py",
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            + TORCH.format(cuda="12.4", available=True, archs=[], warning=""),
        ),
        r"plain processes, which start more slowly: importing torch starts threads \(1 run\)",
        "",
    ),
    ("NVIDIA driver", "ok", lambda m: None, "550.54.15, which supports CUDA up to 12.4", ""),
    ("NVIDIA driver", "ok", lambda m: m.nvml(12), "no driver and no NVIDIA GPU", ""),
    (
        "NVIDIA driver",
        "problem",
        lambda m: m.nvml(12, card="a"),
        r"; 1 NVIDIA GPU\(s\) found at a.0$",
        "docker run --gpus",
    ),
    (
        "NVIDIA driver",
        "problem",
        lambda m: m.nvml(12, kernel="550.1"),
        "the kernel has .* 550.1$",
        "docker run --gpus all",
    ),
    (
        "NVIDIA driver",
        "problem",
        lambda m: m.nvml(18, "550.1", "a"),
        "mismatch.; the kernel has .* 550.1; 1 NVIDIA",
        "Restart",
    ),
    ("NVIDIA driver", "problem", lambda m: m.nvml(9, card="a"), "Not Loaded", "modprobe"),
    ("NVIDIA driver", "problem", lambda m: m.nvml(4, card="a"), "does not answer", "/dev/nvidia"),
    ("NVIDIA driver", "problem", lambda m: m.nvml(999), "Unknown", "nvidia-smi"),
    ("GPUs", "ok", lambda m: m.gpus(), "none", ""),
    ("GPUs", "ok", lambda m: m.gpus(CARD, OTHER_MAKER), "0 NVIDIA H100, 4 AMD GPU", ""),
    (
        "GPUs",
        "ok",
        lambda m: m.env("CUDA_VISIBLE_DEVICES", "0"),
        "visible with CUDA_VISIBLE_DEVICES=0: 0",
        "",
    ),
    (
        "GPUs",
        "warning",
        lambda m: m.env("CUDA_VISIBLE_DEVICES", ""),
        "CUDA_VISIBLE_DEVICES= hides all",
        "Change CUDA_VIS",
    ),
    (
        "GPUs",
        "warning",
        lambda m: m.gpus(FULL),
        "GPU 1: 40.0 GiB of 80.0 GiB are in use, by process 7",
        "parpool",
    ),
    (
        "GPUs",
        "warning",
        lambda m: m.gpus(SHUT),
        "GPU 2 has the compute mode 'prohibited'",
        "nvidia-smi -i 2 -c DEFAULT",
    ),
    ("GPUs", "warning", lambda m: m.gpus(SILENT), "GPU 3 does not answer", "dmesg"),
    ("GPUs", "ok", lambda m: m.gpus(UNIFIED), "GPU 5: its driver does not report its memory", ""),
    ("GPUs", "warning", lambda m: closed(m, "gpus_here"), CLOSED, ""),
    ("torch on GPUs", "ok", lambda m: m.nvml(12), "no NVIDIA GPU", ""),
    # any CUDA 12 runs on a driver for 12
    ("torch on GPUs", "ok", lambda m: m.torch("12.8"), "12.8; .*up to 12.4", ""),
    # what is made when it runs
    ("torch on GPUs", "ok", lambda m: m.torch(archs="sm_80 compute_80"), "built for", ""),
    (
        "torch on GPUs",
        "problem",
        lambda m: m.torch(None, False),
        "built without CUDA, so 1 GPU",
        "download.pytorch.org/whl/cu12",
    ),
    (
        "torch on GPUs",
        "problem",
        lambda m: m.torch("13.0", False),
        "for CUDA 13.0; .* up to 12.4",
        "Update the driver",
    ),
    (
        "torch on GPUs",
        "problem",
        lambda m: m.torch(available=False, warning="unknown error"),
        BLIND,
        "nvidia-smi",
    ),
    (
        "torch on GPUs",
        "problem",
        lambda m: m.torch(archs="sm_80 sm_100a"),
        r"does not support GPU 0 \(NVIDIA H100, 9.0\); it supports sm_80",
        "out",
    ),
    (
        "torch on GPUs",
        "problem",
        lambda m: m.write("torch.py", "1 / 0"),
        "torch cannot be imported",
        "",
    ),
    (
        "cores",
        "warning",
        lambda m: m.fails("usable_cpus", 0),
        "^0 of .* are usable, for 1 GPUs",
        "--cpus-per-task",
    ),
    ("memory", "ok", lambda m: None, "9.0 GiB of 10.0 GiB are free", ""),
    ("memory", "warning", lambda m: m.ray(free=0), "0.0 GiB of 10.0 GiB are free", "95 %"),
    (
        "shared memory",
        "ok",
        lambda m: None,
        "50.0 GiB are free in /dev/shm; Ray's object store needs 1.0 GiB",
        "",
    ),
    (
        "shared memory",
        "warning",
        lambda m: m.ray(store=60),
        "50.0 GiB are free",
        "docker run --shm-size=65g",
    ),
    (
        "shared memory",
        "problem",
        lambda m: m.fails("shutil.disk_usage", FileNotFoundError()),
        "there is no /dev/shm",
        "mount",
    ),
    (
        "Ray's files",
        "ok",
        lambda m: m.env("TMPDIR", "/tmp/a"),
        f"50.0 GiB of 100.0 GiB .* on the disk of /tmp/a/ray-{os.getuid()}",
        "",
    ),
    ("Ray's files", "warning", lambda m: m.disk(9), "9.0 GiB of 100.0 GiB", "RAY_TMPDIR"),
    ("Ray's files", "problem", lambda m: m.disk(4), "4.0 GiB of 100.0 GiB", "RAY_TMPDIR"),
    (
        "Ray's files",
        "problem",
        lambda m: m.fails("os.access", False),
        "cannot be written",
        "RAY_TMPDIR",
    ),
    (
        "Ray's files",
        "problem",
        lambda m: m.env("TMPDIR", "/" + "x" * 60),
        "characters; its sockets allow 34",
        "RAY_TMPDIR",
    ),
    ("Ray's files", "warning", lambda m: closed(m, "shutil.disk_usage"), CLOSED, ""),
    ("open files", "ok", lambda m: None, "1,024, which Ray raises to 65,536", ""),
    ("open files", "ok", lambda m: m.files(1024, resource.RLIM_INFINITY), "raises to 65,536", ""),
    ("open files", "ok", lambda m: m.files(-1, -1), "no limit", ""),
    (
        "open files",
        "warning",
        lambda m: m.files(1024, 2048),
        "2,048 at most, but Ray requests 4,096",
        "ulimit -n 65536",
    ),
    (
        "ports",
        "warning",
        lambda m: m.patch.setattr(doctor, "FEWEST_PORTS", 10**6),
        "local ports are free",
        "ip_local_port_range",
    ),
    (
        "ports",
        "problem",
        lambda m: m.fails("socket.socket", OSError(99, "Cannot assign")),
        "Cannot assign",
        "ip link set lo up",
    ),
    ("ports", "warning", lambda m: closed(m, "psutil.net_connections"), CLOSED, ""),
    (
        "profiles",
        "problem",
        lambda m: m.write("raypool.toml", "[profiles.lab\n"),
        "raypool.toml is not valid TOML",
        "",
    ),
    (
        "Ray's token",
        "problem",
        lambda m: m.fails("os.access", False),
        "auth_token cannot be written",
        "RAY_AUTH_TOKEN_PATH",
    ),
    (
        "Ray's address",
        "warning",
        lambda m: m.env("RAY_ADDRESS", "10.0.0.7:6379"),
        "joins that Ray",
        "Unset RAY_ADDRESS",
    ),
]


@pytest.mark.parametrize(
    ("check", "state", "fall_ill", "fact", "advice"),
    ILLNESSES,
    ids=[f"{check} {number}" for number, (check, *_) in enumerate(ILLNESSES)],
)
def test_what_is_wrong_is_said(
    machine: Ill, check: str, state: str, fall_ill: Callable[[Ill], Any], fact: str, advice: str
) -> None:
    fall_ill(machine)
    finding = [entry for entry in found(machine) if entry["check"] == check][-1]
    assert finding["state"] == state, finding
    assert re.search(fact, finding["fact"]), finding
    assert advice in (finding["advice"] or ""), finding
    assert (finding["advice"] is None) or state != "ok"
    assert machine.library.users == 0


def test_the_folder_of_rays_files(machine: Ill) -> None:
    machine.env("TMPDIR", "/tmp/a")
    machine.env("RAY_TMPDIR", "/tmp/b")  # this one counts first
    (finding,) = (entry for entry in found(machine) if entry["check"] == "Ray's files")
    assert finding["fact"].endswith(f"are free on the disk of /tmp/b/ray-{os.getuid()}")


def test_a_machine_that_is_closed_is_still_looked_at(machine: Ill) -> None:
    before = [entry["check"] for entry in found(machine)]
    for name in (
        "importlib.metadata.requires",
        "shutil.disk_usage",
        "psutil.net_connections",
        "gpus_here",
    ):
        closed(machine, name)
    assert [entry["check"] for entry in found(machine)] == before


def test_a_machine_with_a_problem_ends_with_1(machine: Ill) -> None:
    machine.nvml(18)
    done = run(machine)
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    place = next(
        number
        for number, line in enumerate(lines)
        if line.startswith("problem  NVIDIA driver  does not answer: ")
    )
    assert (
        lines[place + 1]
        == f"{'':24}The driver was updated while it was in use. Restart this machine."
    )
    assert lines[-1].startswith("problems: 1, warnings: ")


def test_who_has_a_port_of_a_head_is_named(machine: Ill) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        machine.patch.setattr(doctor, "HEAD_PORTS", (port,))
        (finding,) = (entry for entry in found(machine) if entry["check"] == "ports")
    assert finding["state"] == "warning"
    assert re.search(rf"{port} by .*\({os.getpid()}\)", finding["fact"])


def children() -> set[int]:
    """Return what was started here, without what a Ray beside this test has started in turn."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if not any(parent.name() == "raylet" for parent in child.parents()):
                found.add(child.pid)
    return found


@pytest.mark.ci
def test_this_machine_is_looked_at_and_nothing_is_left() -> None:
    before = children()
    done = run(None, "--json")
    findings = json.loads(done.stdout)
    assert done.exit_code == any(finding["state"] == "problem" for finding in findings)
    assert {finding["check"] for finding in findings if finding["state"] == "ok"} >= {
        "Python",
        "packages",
        "ray",
        "torch",
    }
    assert children() <= before
