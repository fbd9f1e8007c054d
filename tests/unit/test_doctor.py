"""`raypool doctor`: what it makes of machines that are well, that are not, and that are like none here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest
from click.testing import CliRunner, Result

from raypool import checkup
from raypool.cli import main
from raypool.doctor import (
    MISMATCH,
    NO_LIBRARY,
    NO_PERMISSION,
    NOT_LOADED,
    Driver,
    Finding,
    Import,
    judge_cores,
    judge_disk,
    judge_driver,
    judge_gpus,
    judge_import,
    judge_memory,
    judge_open_files,
    judge_packages,
    judge_ports,
    judge_shared_memory,
    judge_torch,
)
from raypool.gpus.devices import GpuDevice, GpuProcess

GIB = 2**30
DRIVER = Driver("550.54.15", (12, 4))
CARD = GpuDevice(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-0",
    total_bytes=80 * GIB,
    used_bytes=GIB,
    compute_capability=(9, 0),
    compute_mode="default",
)


def torch(**told: Any) -> Import:
    return Import({"version": "2.9.0", "cuda": "12.4", "available": True, "archs": ["sm_80", "sm_90"], **told})


# --- GPUs, drivers, torch ---------------------------------------------------------------------------------------------


TORCHES = [
    (torch(), DRIVER, None, None),
    (torch(cuda="12.8"), DRIVER, None, None),  # any CUDA 12 runs on a driver for 12
    (torch(archs=["sm_80", "compute_80"]), DRIVER, None, None),  # what is made when it runs
    (torch(cuda=None, available=False), DRIVER, "built without CUDA, so that 1 GPU", "download.pytorch.org/whl/cu12"),
    (
        torch(cuda="13.0", available=False),
        DRIVER,
        "built for CUDA 13.0; the driver runs CUDA up to 12.4",
        "Update the driver",
    ),
    (torch(available=False), DRIVER, "torch sees no GPU; torch 2.9.0 was built for CUDA 12.4", "nvidia-smi"),
    (torch(available=False)._replace(warning="unknown error"), DRIVER, "torch sees no GPU: unknown error", "nvidia-smi"),
    (torch(available=False), Driver(), "which CUDA the driver runs is unknown", "nvidia-smi"),
    (
        torch(archs=["sm_80", "sm_100a"]),
        DRIVER,
        r"has no code for GPU 0 \(NVIDIA H100, 9.0\); it has sm_80",
        "leave them out",
    ),
    (Import({}, "ImportError: no"), DRIVER, "cannot be imported", None),
]


def test_torch_against_the_driver_and_the_cards() -> None:
    for found, driver, words, advice in TORCHES:
        finding = judge_torch(found, driver, [CARD])
        check(finding, "ok" if words is None else "problem", words or "built for CUDA 12", advice)


def check(finding: Finding, state: str, words: str, advice: str | None = None) -> None:
    assert finding.state == state, finding
    assert re.search(words, finding.fact), finding
    assert (advice is None) or (finding.advice is not None and advice in finding.advice), finding


def test_torch_without_a_gpu_is_well() -> None:
    check(judge_torch(torch(cuda=None, available=False), Driver(code=NO_LIBRARY), []), "ok", "no GPU")


DRIVERS = [
    (DRIVER, ["0000:41:00.0"], "550.54.15", "ok", "550.54.15, which runs CUDA up to 12.4", None),
    (Driver(code=NO_LIBRARY, error="not found"), [], None, "ok", "none, and no GPU", None),
    (
        Driver(code=NO_LIBRARY, error="not found"),
        ["0000:41:00.0"],
        None,
        "problem",
        "at 0000:41:00.0",
        "docker run --gpus all",
    ),
    (Driver(code=NO_LIBRARY, error="not found"), [], "550.1", "problem", "in the kernel is 550.1", "docker run --gpus all"),
    (Driver(code=MISMATCH, error="mismatch"), ["a"], "550.1", "problem", "mismatch; in the kernel is 550.1", "Restart"),
    (Driver(code=NOT_LOADED, error="not loaded"), ["a"], None, "problem", "not loaded", "modprobe"),
    (Driver(code=NO_PERMISSION, error="no"), ["a"], None, "problem", "does not answer", "/dev/nvidia"),
    (Driver(code=999, error="unknown"), ["a"], None, "problem", "unknown", "nvidia-smi"),
]


def test_the_driver() -> None:
    for driver, cards, kernel, state, words, advice in DRIVERS:
        check(judge_driver(driver, cards, kernel), state, words, advice)


class Library:
    """Stands for pynvml; its first call may raise."""

    NVMLError = pynvml.NVMLError

    def __init__(self, error: int | None = None, version: str | bytes = "550.54.15") -> None:
        self.error, self.version, self.users = error, version, 0

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040


def test_the_driver_is_asked_by_its_library() -> None:
    library = Library(version=b"550.54.15")
    assert checkup.ask_driver(lambda: library) == DRIVER
    assert library.users == 0
    assert [pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_DRIVER_NOT_LOADED] == [MISMATCH, NOT_LOADED]
    assert [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION] == [NO_LIBRARY, NO_PERMISSION]
    driver = checkup.ask_driver(lambda: Library(MISMATCH))
    assert (driver.version, driver.code) == (None, MISMATCH)
    assert "mismatch" in driver.error.lower()


def test_cards_that_are_hidden_full_prohibited_or_silent() -> None:
    full = GpuDevice(
        index=1,
        name="A",
        uuid="GPU-1",
        total_bytes=80 * GIB,
        used_bytes=40 * GIB,
        processes=(GpuProcess(pid=7, used_bytes=None),),
    )
    shut = GpuDevice(index=2, name="B", uuid="GPU-2", total_bytes=GIB, used_bytes=0, compute_mode="prohibited")
    silent = GpuDevice(index=3, name="C", uuid="GPU-3")
    others = GpuDevice(index=4, name="AMD GPU")
    cards = [CARD, full, shut, silent, others]
    summary, *found = judge_gpus(cards, [0, 1, 2, 3, 4], "")
    assert (summary.state, summary.fact) == ("ok", "0 NVIDIA H100, 1 A, 2 B, 3 C, 4 AMD GPU")
    assert [finding.check for finding in found] == ["GPU 1", "GPU 2", "GPU 3"]
    check(found[0], "warning", "40.0 GiB of 80.0 GiB are in use, by process 7", "parpool(gpus=[...])")
    check(found[1], "warning", "prohibited", "nvidia-smi -i 2 -c DEFAULT")
    check(found[2], "warning", "does not answer", "dmesg")
    (chosen,) = judge_gpus(cards, [0], "CUDA_VISIBLE_DEVICES=0")
    check(chosen, "ok", "visible here, by CUDA_VISIBLE_DEVICES=0: 0")
    (hidden,) = judge_gpus(cards, [], "CUDA_VISIBLE_DEVICES=")
    check(hidden, "warning", "none is visible here, by CUDA_VISIBLE_DEVICES=", "Change CUDA_VISIBLE_DEVICES=")
    assert judge_gpus([], [], "") == [Finding("GPUs", "ok", "none")]


def test_cards_on_the_bus_are_seen_without_a_driver(tmp_path: Path) -> None:
    for address, vendor, kind in (("0000:41:00.0", "0x10de", "0x030200"), ("0000:41:00.1", "0x10de", "0x040300")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{kind}\n")
    assert checkup._cards(tmp_path) == ["0000:41:00.0"]  # the other one is its loudspeaker
    assert checkup._cards(tmp_path / "none") == []


KERNELS = [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)", "570.86.15"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build  (dvs-builder@U16)", "570.86.15"),
    ("NVRM version: something else", None),
]


def test_the_driver_in_the_kernel_closed_and_open(tmp_path: Path) -> None:
    for line, version in KERNELS:
        (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
        assert checkup._kernel_driver(tmp_path / "version") == version
        assert checkup._kernel_driver(tmp_path / "none") is None


# --- the machine ------------------------------------------------------------------------------------------------------


def test_cores_memory_and_shared_memory() -> None:
    check(judge_cores(64, 64, 8), "ok", "64 of 64")
    check(judge_cores(2, 64, 8), "warning", "2 of 64 may be used here, for 8 GPUs", "--cpus-per-task")
    check(judge_memory(5 * GIB, 10 * GIB), "ok", "5.0 GiB of 10.0 GiB are free")
    check(judge_memory(GIB // 2, 10 * GIB), "warning", "0.5 GiB of 10.0 GiB", "95 %")
    check(judge_shared_memory(10 * GIB, 9 * GIB), "ok", "10.0 GiB are free in /dev/shm, and the object store would take 9.0 GiB")
    check(judge_shared_memory(GIB // 16, 9 * GIB), "warning", "0.1 GiB are free", "docker run --shm-size=11g")
    check(judge_shared_memory(GIB, None), "ok", "1.0 GiB")
    check(judge_shared_memory(None, GIB), "problem", "there is no /dev/shm", "mount")


DISKS = [
    ("/tmp/ray", 50, True, "ok", "50.0 GiB of 100.0 GiB are free where /tmp/ray is"),
    ("/tmp/ray", 9, True, "warning", "9.0 GiB of 100.0 GiB"),
    ("/tmp/ray", 4, True, "problem", "4.0 GiB of 100.0 GiB"),
    ("/tmp/ray", 50, False, "problem", "/tmp/ray cannot be written"),
    ("/scratch/" + "x" * 60 + "/ray", 50, True, "problem", "has 73 letters, and the sockets there allow 34"),
]


def test_the_disk_of_rays_files() -> None:
    for folder, free, is_writable, state, words in DISKS:
        finding = judge_disk(folder, free * GIB, 100 * GIB, is_writable)
        check(finding, state, words, None if state == "ok" else "RAY_TMPDIR")


def test_the_folder_of_rays_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "imported", lambda code: torch())
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for variable, folder in (("TMPDIR", "/tmp/a"), ("RAY_TMPDIR", "/tmp/b")):  # the second counts first
        monkeypatch.setenv(variable, folder)
        (finding,) = (found for found in checkup.examine() if found.check == "Ray's files")
        assert finding.fact.endswith(f"are free where {folder}/ray-{os.getuid()} is")


def test_open_files_and_ports() -> None:
    check(judge_open_files(1024, 1_000_000), "ok", "1,024, which Ray raises to 65,536")
    check(judge_open_files(1024, 2048), "warning", "2,048 at most, and Ray asks for 4,096", "ulimit -n 65536")
    check(judge_open_files(1024, -1), "ok", "65,536")
    check(judge_open_files(-1, -1), "ok", "no limit")
    check(judge_ports(None, 28_000, 28_232, {}), "ok", "28,000 of 28,232 are free on the loopback, and those of a head")
    check(judge_ports(None, 500, 28_232, {}), "warning", "500 of 28,232", "ip_local_port_range")
    check(judge_ports(None, 28_000, 28_232, {6379: "redis (7)"}), "warning", r"6379 by redis \(7\)", "ray start --head")
    check(judge_ports("Cannot assign", 28_000, 28_232, {}), "problem", "Cannot assign", "ip link set lo up")


def test_packages_and_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    check(judge_packages({"a": "1", "b": "2"}, {}), "ok", "all 2")
    found = {"loky": "3.3", "rich": None}
    check(
        judge_packages(found, {"loky": "loky>=3.4", "rich": "rich>=13"}),
        "problem",
        "loky is 3.3, rich is missing",
        "'loky>=3.4' 'rich>=13'",
    )
    check(judge_import("torch", torch()), "ok", "2.9.0, built for CUDA 12.4")
    check(judge_import("ray", Import({}, "ImportError: libfoo")), "problem", "ImportError: libfoo", "--force-reinstall ray")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["click>=9999", "nothing-of-this-name", "x; extra == 'dev'"])
    finding = checkup._packages()
    check(
        finding, "problem", rf"click is {importlib.metadata.version('click')}, nothing-of-this-name is missing", "'click>=9999'"
    )


def test_a_library_that_crashes_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.imported("import nothing_of_this_name").error == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert checkup.imported("import os; os.abort()").error == "the process ended with status -6"
    said = checkup.imported("import warnings; warnings.warn('too old'); print('hello'); print('{\"a\": 1}')")
    assert said == Import({"a": 1}, None, "too old")
    assert checkup.imported("pass").error == "it does not say what it is"
    monkeypatch.setattr(checkup, "IMPORT_TIMEOUT_S", 0.01)
    assert checkup.imported("while True: pass").error == "it took longer than 0 s"


def test_a_ray_without_the_names_that_are_looked_at_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("__version__ = '99.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    check(judge_import("ray", checkup.imported(checkup.RAY)), "ok", "99.0")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import neither Ray nor torch: seconds each."""
    told = {"version": "2.9.0", "total": 10 * GIB, "free": 9 * GIB, "store": 1}
    monkeypatch.setattr(checkup, "imported", lambda code: torch(**told))


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_machine_with_a_problem_ends_with_1(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ask_driver", lambda load: Driver(code=MISMATCH, error="Driver/library version mismatch"))
    done = doctor()
    assert (done.exit_code, done.stderr) == (1, "")
    assert "problem  NVIDIA driver  does not answer: Driver/library version mismatch" in done.stdout
    assert "                        The driver was updated while it was in use. Restart this machine." in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("problems: 1, warnings: ")
    found = {finding["check"]: finding for finding in json.loads(doctor("--json").stdout)}
    assert found["NVIDIA driver"]["state"] == "problem"
    assert set(found["cores"]) == {"check", "state", "fact", "advice"}
    assert {
        "Python",
        "packages",
        "ray",
        "torch",
        "GPUs",
        "torch on GPUs",
        "ports",
        "shared memory",
        "Ray's files",
        "open files",
    } <= set(found)


def test_settings_that_are_in_the_way(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raypool.toml").write_text("[profiles.lab\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/proc/token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    found = {finding["check"]: finding for finding in json.loads(doctor("--json").stdout)}
    assert "raypool.toml is not valid TOML" in found["profiles"]["fact"]
    assert found["Ray's address"]["state"] == "warning"
    if os.geteuid() != 0:  # who may do everything
        assert found["Ray's token"]["state"] == "problem"


def test_what_cannot_be_looked_at_keeps_nothing_else_from_it(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    before = [finding.check for finding in checkup.examine()]
    for holder, name in ((importlib.metadata, "requires"), (checkup.shutil, "disk_usage"), (checkup.psutil, "net_connections")):
        monkeypatch.setattr(holder, name, closed)
    findings = {finding.check: finding for finding in checkup.examine()}
    assert list(findings) == before
    for name in ("packages", "shared memory", "Ray's files", "ports"):
        check(findings[name], "warning", "could not be looked at: PermissionError: .*Permission denied")
    monkeypatch.setattr(checkup, "gpus_here", closed)
    assert {"GPUs", "memory", "open files"} <= {finding.check for finding in checkup.examine()}


def test_who_has_a_port_of_a_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(checkup, "HEAD_PORTS", (port,))
        check(checkup._ports(), "warning", rf"{port} by .*\({os.getpid()}\)")


@pytest.mark.ci
def test_this_machine_is_looked_at_and_nothing_is_left() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = doctor("--json")
    findings = json.loads(done.stdout)
    assert done.exit_code == any(finding["state"] == "problem" for finding in findings)
    assert {finding["check"] for finding in findings if finding["state"] == "ok"} >= {"Python", "packages", "ray", "torch"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
