"""Looks at this machine for `raypool doctor`: measures what the checks of `doctor` judge.

Nothing is started but two short Python processes, which import Ray and torch: a library that crashes harms nobody here. No CUDA
context is made, and nothing is left.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from raypool import doctor
from raypool.backends.ray.session import folder_of_ray
from raypool.cloud.tokens import token_path
from raypool.doctor import Driver, Finding, Import
from raypool.errors import RaypoolError
from raypool.gpus.devices import Inventory, usable_cpus
from raypool.gpus.nvml import load_pynvml
from raypool.gpus.table import NVIDIAS, gpus_here
from raypool.profile_files import nearest_file

IMPORT_TIMEOUT_S = 120.0
"""On a busy machine with a slow disk torch takes a minute [s]."""

RAY = """
import json, ray
told = dict(version=ray.__version__)
try:
    from ray._private import utils
    from ray._common.utils import get_system_memory
    total, free = get_system_memory(), utils.estimate_available_memory()
    told.update(total=total, free=free, store=utils.resolve_object_store_memory(free))
except Exception:
    pass
print(json.dumps(told))
"""
"""Ray's own reckoning of this machine, with what a cgroup leaves of it. Private names, checked on Ray 2.60; ours does without."""

TORCH = """
import json, torch
from torch import cuda
told = dict(version=torch.__version__, cuda=torch.version.cuda, available=cuda.is_available(), archs=cuda.get_arch_list())
print(json.dumps(told))
"""

HEAD_PORTS = (6379, 8265, 10001)
"""Of `ray start --head`: its store of states, the dashboard, and the server for other machines."""

CHOOSERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

NVIDIA, DISPLAY = "0x10de", "0x03"
"""The maker, and the class, by which the kernel knows such GPUs on the PCI bus."""


def examine(inventory: Inventory | None = None, load_nvml: Callable[[], Any] = load_pynvml) -> Iterator[Finding]:
    """Look at this machine, and yield what is found, in the order in which it is to be read.

    Args:
        inventory: Who knows the GPUs. None: this machine.
        load_nvml: Returns the module that speaks to NVML.

    Example:
        >>> next(examine()).check
        'Python'
    """
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield from _tried("packages", lambda: [_packages()])
    ray = imported(RAY)
    yield doctor.judge_import("ray", ray)
    torch = imported(TORCH)
    yield doctor.judge_import("torch", torch)
    yield from _tried("GPUs", lambda: _devices(torch, inventory or NVIDIAS, load_nvml))
    memory = psutil.virtual_memory()
    told = ray.told
    yield doctor.judge_memory(told.get("free", memory.available), told.get("total", memory.total))
    yield from _tried("shared memory", lambda: [doctor.judge_shared_memory(_free("/dev/shm"), told.get("store"))])
    yield from _tried("Ray's files", lambda: [_disk(folder_of_ray())])
    yield doctor.judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from _tried("ports", lambda: [_ports()])
    yield from _tried("settings", _settings)


def _tried(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what is found, also of a machine that is too ill, or too closed, to be looked at: the other checks go on."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(check, "warning", f"could not be looked at: {type(error).__name__}: {error}")


def _packages() -> Finding:
    installed: dict[str, str | None] = {}
    wanted = {}
    for text in importlib.metadata.requires("raypool") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        installed[requirement.name] = version
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wanted[requirement.name] = text
    return doctor.judge_packages(installed, wanted)


def imported(code: str) -> Import:
    """Run code that imports a library, in a process of its own, and return what it tells as JSON in its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Import({}, f"it took longer than {IMPORT_TIMEOUT_S:.0f} s")
    said = done.stderr.strip().splitlines()
    if done.returncode != 0:
        return Import({}, said[-1] if said else f"the process ended with status {done.returncode}")
    warnings = [line for line in said if "Warning:" in line]
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Import({}, "it does not say what it is")
    return Import(told, None, warnings[-1].partition("Warning: ")[2] if warnings else "")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _devices(torch: Import, inventory: Inventory, load_nvml: Callable[[], Any]) -> Iterator[Finding]:
    """Look at the GPUs, at what torch can do with them, and at the cores that there are for each."""
    driver = ask_driver(load_nvml)
    yield doctor.judge_driver(driver, _cards(), _kernel_driver())
    devices, seen = gpus_here(inventory)
    yield from doctor.judge_gpus(
        devices, seen, ", ".join(f"{name}={os.environ[name]}" for name in CHOOSERS if name in os.environ)
    )
    yield doctor.judge_torch(torch, driver, [gpu for gpu in devices if gpu.uuid is not None and gpu.index in seen])
    yield doctor.judge_cores(usable_cpus(), os.cpu_count() or 1, len(seen))


def ask_driver(load_nvml: Callable[[], Any] = load_pynvml) -> Driver:
    """Ask NVIDIA's driver for its version, and for the newest CUDA that it runs."""
    library = load_nvml()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return Driver(code=error.value, error=str(error))
    try:
        version = library.nvmlSystemGetDriverVersion()
        number = int(library.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is 12.4
    except library.NVMLError as error:
        return Driver(code=error.value, error=str(error))
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()
    return Driver(version.decode() if isinstance(version, bytes) else version, (number // 1000, number % 1000 // 10))


def _cards(bus: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the addresses of NVIDIA's GPUs on the PCI bus, driver or not."""
    return sorted(
        card.name
        for card in (bus.iterdir() if bus.is_dir() else ())
        if _text(card / "vendor").startswith(NVIDIA) and _text(card / "class").startswith(DISPLAY)
    )


def _kernel_driver(told: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the driver's part in the kernel; in the line of the open one an architecture comes before it."""
    found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", _text(told))
    return found and found[1]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# --- the machine ------------------------------------------------------------------------------------------------------


def _free(folder: str) -> int | None:
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else None


def _disk(folder: Path) -> Finding:
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    usage = shutil.disk_usage(there)
    return doctor.judge_disk(str(folder), usage.free, usage.total, os.access(there, os.W_OK | os.X_OK))


def _ports() -> Finding:
    loopback = None
    try:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
    except OSError as error:
        loopback = error.strerror
    first, last = map(int, (_text(Path("/proc/sys/net/ipv4/ip_local_port_range")) or "32768 60999").split())
    connections = [(one.laddr.port, one.status, one.pid) for one in psutil.net_connections("tcp") if one.laddr]
    used = {port for port, _, _ in connections if first <= port <= last}
    listening = {port: pid for port, status, pid in connections if status == psutil.CONN_LISTEN}
    taken = {port: _named(listening[port]) for port in HEAD_PORTS if port in listening}
    return doctor.judge_ports(loopback, last - first + 1 - len(used), last - first + 1, taken)


def _named(pid: int | None) -> str:
    try:
        return "another user" if pid is None else f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:
        return f"process {pid}"


def _settings() -> Iterator[Finding]:
    """Look at what pools read before they start: the file of profiles, the token, the address of a Ray."""
    try:
        file = nearest_file()
        yield Finding("profiles", "ok", "no file" if file is None else f"{file.path}: {', '.join(file.profiles)}")
    except RaypoolError as error:
        yield Finding("profiles", "problem", str(error))
    path = token_path()
    there: Sequence[Path] = [place for place in (path, *path.parents) if place.exists()]
    if "RAY_AUTH_TOKEN" not in os.environ and not os.access(there[0], os.W_OK):
        advice = "Name a file that can be written: export RAY_AUTH_TOKEN_PATH=..."
        yield Finding("Ray's token", "problem", f"{path} cannot be written", advice)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        fact = f"RAY_ADDRESS={address}: parpool() joins that Ray, and starts none here"
        yield Finding("Ray's address", "warning", fact, "unset RAY_ADDRESS, if that is not meant.")
