"""The checks of `raypool doctor`: a table of functions that look for problems on this machine.

Only two short Python processes are started. They import Ray and torch, so that a library that
crashes does not end the command. No CUDA context is made, and nothing is left behind.
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
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from packaging.requirements import Requirement

from raypool.backends.ray import fork_server
from raypool.backends.ray.session import folder_of_ray
from raypool.cluster.connect import token_path
from raypool.errors import RaypoolError
from raypool.gpus.devices import GpuDevice, Inventory, usable_cpus
from raypool.gpus.nvml import load_pynvml
from raypool.gpus.table import NVIDIAS, gpus_here
from raypool.profile_files import nearest_file
from raypool.profiles import PINNING, Profile

IMPORT_TIMEOUT_S = 120.0
"""The time limit of an import [s]: torch may take a minute on a busy machine with a slow disk."""

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
"""Ray's own reckoning of this machine, with what a cgroup leaves of it. Private names, checked on
Ray 2.60; ours does without.
"""

TORCH = """
import json, threading, torch
from torch import cuda
told = dict(version=torch.__version__, cuda=torch.version.cuda)
told["threads"] = threading.active_count() - 1
told |= dict(available=cuda.is_available(), archs=cuda.get_arch_list())
print(json.dumps(told))
"""

NVML_ADVICE = {
    4: "Allow this user to use /dev/nvidia*.",  # no permission
    9: "Load it: sudo modprobe nvidia; if that fails, sudo dmesg shows why.",  # driver not loaded
    # no library
    12: "Install the driver. A container uses its host's driver: docker run --gpus all.",
    # library and kernel differ
    18: "The driver was updated while it was in use. Restart this machine.",
}
"""By the number of NVML's error."""

PCI = Path("/sys/bus/pci/devices")
"""The devices on the bus: the files vendor (0x10de: NVIDIA) and class (0x03...: a display) of each
are there without a driver.
"""

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")

SOCKET = "/12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""A socket of Ray below its folder, with a name of the usual length."""

MOST_SOCKET_LETTERS = 107
"""The greatest length of a socket's path (Linux, unix(7))."""

MOST_FILES, FEWEST_FILES = 65536, 4096
"""Ray raises the limit of open files to the first by itself, as far as it may; below the second it
warns.
"""

FEWEST_PORTS = 1000

HEAD_PORTS = (6379, 8265, 10001)
"""Of `ray start --head`: its store of states, the dashboard, and the server for other machines."""

State = Literal["ok", "warning", "problem"]

Judgment = tuple[State, str] | tuple[State, str, str]
"""A state, the fact, and advice unless the state is "ok"."""


class Finding(NamedTuple):
    """The result of a check, and advice.

    Attributes:
        check: The name of the check.
        state: "ok"; "warning": pools work, but not as well as they could; "problem": they, or parts
            of them, do not.
        fact: The observation.
        advice: A remedy, None if none is needed.
    """

    check: str
    state: State
    fact: str
    advice: str | None = None


class NvidiaDriver(NamedTuple):
    """NVIDIA's driver: its version, and the newest CUDA that it runs; or the number and text of
    NVML's error.
    """

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    code: int | None = None
    error: str = ""


class Import(NamedTuple):
    """Facts on an imported library, or why its import failed; and its last warning."""

    told: dict[str, Any]
    error: str = ""
    warning: str = ""


def imported(code: str) -> Import:
    """Run code that imports a library in another process; return the JSON of its last line."""
    arguments, limit_s = [sys.executable, "-c", code], IMPORT_TIMEOUT_S
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Import({}, f"it took longer than {limit_s:.0f} s")
    said = done.stderr.strip().splitlines()
    if done.returncode != 0:
        return Import({}, said[-1] if said else f"the process ended with status {done.returncode}")
    warnings = [line.partition("Warning: ")[2] for line in said if "Warning:" in line]
    try:
        return Import(
            json.loads(done.stdout.splitlines()[-1]), warning=warnings[-1] if warnings else ""
        )
    except (ValueError, IndexError):  # other code of the environment may print last, at its exit
        return Import({}, "its output could not be read")


class Measured:
    """Facts that several checks use, each measured once."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    @cached_property
    def ray(self) -> Import:
        """Ray, as it is installed here."""
        return imported(RAY)

    @cached_property
    def torch(self) -> Import:
        """Torch, as it is installed here."""
        return imported(TORCH)

    @cached_property
    def driver(self) -> NvidiaDriver:
        """NVIDIA's driver, by its library."""
        library = load_pynvml()
        try:
            library.nvmlInit()
            try:
                version = library.nvmlSystemGetDriverVersion()
                number = int(library.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is 12.4
            finally:
                with contextlib.suppress(library.NVMLError):  # the facts, or the first error, count
                    library.nvmlShutdown()
        except library.NVMLError as error:
            return NvidiaDriver(code=error.value, error=str(error))
        return NvidiaDriver(
            version.decode() if isinstance(version, bytes) else version,
            (number // 1000, number % 1000 // 10),
        )

    @cached_property
    def gpus(self) -> tuple[list[GpuDevice], Sequence[int | None]]:
        """All GPUs, and the indices of those that a process started here sees (None: may be
        any).
        """
        return gpus_here(self.inventory)


CHECKS: dict[str, Callable[[Measured], Iterator[Judgment]]] = {}
"""The checks by name; a check yields nothing if it does not apply."""


def check(name: str) -> Callable[[Callable[[Measured], Iterator[Judgment]]], None]:
    """Add a function to the checks."""
    return partial(CHECKS.__setitem__, name)


def examine(inventory: Inventory | None = None) -> Iterator[Finding]:
    """Run all checks of this machine, and yield their findings in order.

    Args:
        inventory: The source of GPUs. None: this machine.

    Example:
        >>> next(examine()).check
        'Python'
    """
    machine = Measured(inventory or NVIDIAS)
    for name, look in CHECKS.items():
        try:
            for state, fact, *advice in look(machine):
                yield Finding(name, state, fact, advice[0] if advice and state != "ok" else None)
        except Exception as error:  # one check's failure does not stop the others
            yield Finding(name, "warning", f"could not be checked: {type(error).__name__}: {error}")


# --- Python and its packages ----------------------------------------------------------------------


@check("Python")
def _python(_: Measured) -> Iterator[Judgment]:
    yield "ok", f"{platform.python_version()}, {sys.executable}"


@check("packages")
def _packages(_: Measured) -> Iterator[Judgment]:
    requirements = [Requirement(text) for text in importlib.metadata.requires("raypool") or ()]
    required = [
        one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})
    ]
    wrong = {}
    for requirement in required:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong[f"'{requirement.name}{requirement.specifier}'"] = (
                f"{requirement.name} is {version or 'missing'}"
            )
    if wrong:
        yield "problem", ", ".join(wrong.values()), "pip install " + " ".join(wrong)
    else:
        yield "ok", f"all {len(required)} required packages have supported versions"


def _import(name: Literal["ray", "torch"], machine: Measured) -> Iterator[Judgment]:
    found: Import = getattr(machine, name)
    if found.error:
        advice = f"Reinstall it: pip install --force-reinstall {name}"
        yield "problem", f"cannot be imported: {found.error}", advice
    else:
        cuda = found.told.get("cuda")
        yield "ok", found.told["version"] + (f", built for CUDA {cuda}" if cuda else "")


check("ray")(partial(_import, "ray"))
check("torch")(partial(_import, "torch"))


@check("worker start")
def _worker_start(machine: Measured) -> Iterator[Judgment]:
    """Tell whether workers can be forked from a process with torch, else why not."""
    preload = Profile.preload if not machine.torch.error else ()
    reason = fork_server.obstacle(fork_server.installed(preload))
    threads = machine.torch.told.get("threads", 0)
    if reason is None and threads:
        reason = f"importing torch starts threads ({threads} run)"
    if reason is None:
        yield "ok", "workers can be forked from a process that has imported torch"
    else:
        yield "ok", f"workers are plain processes, which start more slowly: {reason}"


# --- GPUs -----------------------------------------------------------------------------------------


@check("NVIDIA driver")
def _driver(machine: Measured) -> Iterator[Judgment]:
    driver, kernel = machine.driver, _text(KERNEL_DRIVER).partition("\n")[0]
    cards = sorted(
        card.name
        for card in (PCI.iterdir() if PCI.is_dir() else ())
        if _text(card / "vendor").startswith("0x10de") and _text(card / "class").startswith("0x03")
    )
    if driver.code is None:
        yield "ok", f"{driver.version}, which supports CUDA up to {_dotted(driver.cuda)}"
    elif driver.code == 12 and not cards and not kernel:
        yield "ok", "no driver and no NVIDIA GPU: pools run on CPU cores"
    else:
        fact = f"does not answer: {driver.error}" + (f"; the kernel has {kernel}" if kernel else "")
        fact += f"; {len(cards)} NVIDIA GPU(s) found at {', '.join(cards)}" if cards else ""
        yield "problem", fact, NVML_ADVICE.get(driver.code, "Run nvidia-smi for details.")


@check("GPUs")
def _gpus(machine: Measured) -> Iterator[Judgment]:
    devices, seen = machine.gpus
    said = ", ".join(f"{name}={os.environ[name]}" for name in PINNING if name in os.environ)
    names = ", ".join(f"{gpu.index} {gpu.name or 'unknown'}" for gpu in devices)
    if not devices:
        yield "ok", "none"
    elif not seen:
        said = said or "the environment"
        yield (
            "warning",
            f"{names}; {said} hides all of them",
            f"Change {said} to use them.",
        )
    else:
        numbers = ", ".join("?" if index is None else str(index) for index in seen)
        yield "ok", names + (f"; visible with {said}: {numbers}" if said else "")
    for gpu in devices:
        # little is known of GPUs that are not NVIDIA's
        if gpu.index not in seen or gpu.uuid is None:
            continue
        if gpu.compute_mode == "prohibited":
            advice = f"Allow work on it: sudo nvidia-smi -i {gpu.index} -c DEFAULT."
            yield "warning", f"GPU {gpu.index} has the compute mode 'prohibited'", advice
        elif gpu.total_bytes is None or gpu.used_bytes is None:
            if gpu.compute_mode is None and gpu.temperature_c is None:
                advice = "Run sudo dmesg | grep -i xid to see why; it may need a reset."
                yield "warning", f"GPU {gpu.index} does not answer", advice
            else:
                fact = "its driver does not report its memory (unified memory, or MIG)"
                yield "ok", f"GPU {gpu.index}: {fact}"
        elif gpu.used_bytes > gpu.total_bytes / 10:
            pids = ", ".join(str(process.pid) for process in gpu.processes or ())
            fact = f"GPU {gpu.index}: {_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are in use"
            advice = "Wait for that to end, or leave this GPU out: parpool(gpus=[...])."
            yield "warning", fact + (f", by process {pids}" if pids else ""), advice


@check("torch on GPUs")
def _torch_on_gpus(machine: Measured) -> Iterator[Judgment]:
    """Compare the CUDA and the GPUs of torch's build with the driver's and this machine's."""
    devices, seen = machine.gpus
    gpus = [gpu for gpu in devices if gpu.uuid is not None and gpu.index in seen]
    torch, newest = machine.torch, machine.driver.cuda
    if torch.error:
        yield "problem", "torch cannot be imported"
        return
    if not gpus:
        yield "ok", "no NVIDIA GPU can be used here"
        return
    name, cuda, archs = f"torch {torch.told['version']}", torch.told["cuda"], torch.told["archs"]
    runs = (
        f"the driver supports CUDA up to {_dotted(newest)}"
        if any(newest)
        else "the CUDA versions of the driver are unknown"
    )
    lacking = [
        gpu
        for gpu in gpus
        if gpu.compute_capability is not None and not _has_code(archs, gpu.compute_capability)
    ]
    if not cuda:
        index = f"https://download.pytorch.org/whl/cu{newest[0] or ''}..."
        advice = f"pip install torch --index-url {index} (see https://pytorch.org)."
        yield (
            "problem",
            f"{name} was built without CUDA, so {len(gpus)} GPU(s) cannot be used; {runs}",
            advice,
        )
    elif not torch.told["available"] and any(newest) and int(cuda.partition(".")[0]) > newest[0]:
        advice = f"Update the driver, or install PyTorch for CUDA {newest[0]}."
        yield "problem", f"{name} was built for CUDA {cuda}; {runs}", advice
    elif not torch.told["available"]:
        said = f": {torch.warning}" if torch.warning else ""
        fact = f"torch sees no GPU{said}; {name} was built for CUDA {cuda}; {runs}"
        yield "problem", fact, "nvidia-smi shows the GPUs that the driver sees."
    elif lacking:
        strange = ", ".join(
            f"GPU {gpu.index} ({gpu.name}, {_dotted(gpu.compute_capability)})" for gpu in lacking
        )
        advice = (
            "Install a PyTorch that does (https://pytorch.org), or leave these GPUs out:"
            " parpool(gpus=[...])."
        )
        yield (
            "problem",
            f"{name} does not support {strange}; it supports {', '.join(archs)}",
            advice,
        )
    else:
        yield "ok", f"built for CUDA {cuda}; {runs}"


def _has_code(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether one of the codes in a library runs on a GPU."""
    # Machine code runs on the same major version, PTX on all that are newer.
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch)
        if (
            match
            and (int(match[2]), int(match[3])) <= capability
            and (match[1] == "compute" or int(match[2]) == capability[0])
        ):
            return True
    return False


# --- the machine ----------------------------------------------------------------------------------


@check("cores")
def _cores(machine: Measured) -> Iterator[Judgment]:
    """Report the number of cores that a cgroup, an affinity mask or SLURM leaves."""
    usable, num_gpus = usable_cpus(), len(machine.gpus[1])
    fact = f"{usable} of {os.cpu_count() or 1} are usable" + (
        f", for {num_gpus} GPUs" if num_gpus else ""
    )
    advice = (
        "Each worker needs one. Raise the limit of the container or the job (docker run --cpus,"
        " sbatch --cpus-per-task)."
    )
    yield "warning" if usable < num_gpus else "ok", fact, advice


@check("memory")
def _memory(machine: Measured) -> Iterator[Judgment]:
    memory, told = psutil.virtual_memory(), machine.ray.told
    free, total = told.get("free", memory.available), told.get("total", memory.total)
    fact = f"{_gib(free)} of {_gib(total)} are free"
    advice = (
        "Ray kills workers when 95 % is in use. Stop processes, or raise the container's limit."
    )
    yield "warning" if free < 0.1 * total else "ok", fact, advice


@check("shared memory")
def _shared_memory(machine: Measured) -> Iterator[Judgment]:
    """Compare the free space in /dev/shm with the object store that Ray would make there."""
    store = machine.ray.told.get("store")
    try:
        free = shutil.disk_usage("/dev/shm").free
    except FileNotFoundError:
        yield "problem", "there is no /dev/shm", "Mount it: mount -t tmpfs tmpfs /dev/shm."
        return
    fact = f"{_gib(free)} are free in /dev/shm" + (
        "" if store is None else f"; Ray's object store needs {_gib(store)}"
    )
    room = f"docker run --shm-size={(store or 0) / 1e9 + 1:.0f}g, or remove old files."
    yield (
        "warning" if free < (store or 0) else "ok",
        fact,
        f"Ray then puts it on disk, which is slow. Free some space: {room}",
    )


@check("Ray's files")
def _rays_files(_: Measured) -> Iterator[Judgment]:
    folder = folder_of_ray()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    usage = shutil.disk_usage(there)
    letters, most = len(os.fsencode(folder)), MOST_SOCKET_LETTERS - len(SOCKET)
    elsewhere = "Choose another folder with a short name: export RAY_TMPDIR=/var/tmp."
    fact = f"{_gib(usage.free)} of {_gib(usage.total)} are free on the disk of {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        yield "problem", f"{folder} cannot be written", elsewhere
    elif letters > most:
        yield (
            "problem",
            f"{folder} has {letters} characters; its sockets allow {most}",
            elsewhere,
        )
    else:
        is_full, is_low = (
            usage.free < 0.05 * usage.total,
            usage.free < max(0.1 * usage.total, 2**30),
        )
        advice = f"Ray does not write to a disk that is 95 % full. Free some space. {elsewhere}"
        yield "problem" if is_full else "warning" if is_low else "ok", fact, advice


@check("open files")
def _open_files(_: Measured) -> Iterator[Judgment]:
    # "unlimited" is -1
    soft, hard = (
        sys.maxsize if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    reached = max(soft, min(hard, MOST_FILES))
    if soft == sys.maxsize:
        yield "ok", "no limit"
    elif reached < FEWEST_FILES:
        advice = (
            "Raise it: ulimit -n 65536, docker run --ulimit nofile=65536, or LimitNOFILE= of the"
            " service."
        )
        yield "warning", f"{reached:,} at most, but Ray requests {FEWEST_FILES:,}", advice
    else:
        yield "ok", f"{soft:,}" + (f", which Ray raises to {reached:,}" if reached > soft else "")


@check("ports")
def _ports(_: Measured) -> Iterator[Judgment]:
    """Check ports: a pool's own Ray takes free local ones, a head uses fixed ones."""
    try:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
    except OSError as error:
        advice = (
            "Ray's processes communicate through it: bring up the loopback interface (ip link set"
            " lo up)."
        )
        yield "problem", f"nothing can listen on 127.0.0.1: {error.strerror}", advice
        return
    first, last = map(
        int, (_text(Path("/proc/sys/net/ipv4/ip_local_port_range")) or "32768 60999").split()
    )
    connections = [
        (one.laddr.port, one.status, one.pid) for one in psutil.net_connections("tcp") if one.laddr
    ]
    total = last - first + 1
    free = total - len({port for port, _, _ in connections if first <= port <= last})
    listening = {port: pid for port, status, pid in connections if status == psutil.CONN_LISTEN}
    taken = [f"{port} by {_named(listening[port])}" for port in HEAD_PORTS if port in listening]
    fact = f"{free:,} of {total:,} local ports are free"
    if free < FEWEST_PORTS:
        yield "warning", fact, "Widen the range: sysctl net.ipv4.ip_local_port_range='15000 65000'."
    elif taken:
        advice = (
            "Pools on this machine do not need these ports. `ray start --head` does, unless its"
            " options name others."
        )
        yield "warning", f"{fact}; ports of a Ray head in use: {', '.join(taken)}", advice
    else:
        yield "ok", f"{fact}, including those of a Ray head"


def _named(pid: int | None) -> str:
    try:
        return "another user" if pid is None else f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:  # it has just ended, or this user may not look at it
        return f"process {pid}"


# --- profiles, token and address ------------------------------------------------------------------


@check("profiles")
def _profiles(_: Measured) -> Iterator[Judgment]:
    try:
        file = nearest_file()
        yield "ok", "no file" if file is None else f"{file.path}: {', '.join(file.profiles)}"
    except RaypoolError as error:
        yield "problem", str(error)


@check("Ray's token")
def _token(_: Measured) -> Iterator[Judgment]:
    path = token_path()
    there = next(place for place in (path, *path.parents) if place.exists())
    if "RAY_AUTH_TOKEN" not in os.environ and not os.access(there, os.W_OK):
        yield (
            "problem",
            f"{path} cannot be written",
            "Choose a writable file: export RAY_AUTH_TOKEN_PATH=...",
        )


@check("Ray's address")
def _address(_: Measured) -> Iterator[Judgment]:
    if address := os.environ.get("RAY_ADDRESS"):
        fact = f"RAY_ADDRESS={address}: parpool() joins that Ray instead of starting one"
        yield "warning", fact, "Unset RAY_ADDRESS if you do not want that."


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version or ()))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # missing without a driver, or hidden in a container
        return ""
