"""What may keep pools from running well on a machine: each check is a function of what was measured; `checkup` measures it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raypool.gpus.devices import GpuDevice

GIB = 2**30

State = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """What was found out about something, and what to do about it.

    Attributes:
        check: What was looked at.
        state: "ok"; "warning": pools work, but not as well as they could; "problem": they, or part of them, do not.
        fact: What is so.
        advice: What to do, None if there is nothing.
    """

    check: str
    state: State
    fact: str
    advice: str | None = None


class Import(NamedTuple):
    """What has come of importing a library in a process of its own: what that said of it, or why it could not."""

    told: dict[str, Any]
    error: str | None = None
    warning: str = ""


class Driver(NamedTuple):
    """NVIDIA's driver: its version, and the newest CUDA that it runs; or the number and text of NVML's error."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    code: int | None = None
    error: str = ""


# --- Python and its packages ------------------------------------------------------------------------------------------


def judge_packages(installed: Mapping[str, str | None], wanted: Mapping[str, str]) -> Finding:
    """Compare the versions of packages with those that raypool needs.

    Args:
        installed: Their versions, None for one that is not there.
        wanted: What raypool needs of each, for pip; those whose versions do not do.

    Example:
        >>> judge_packages({"click": "8.1", "loky": None}, {"loky": "loky>=3.4"})
        Finding(check='packages', state='problem', fact='loky is missing', advice="pip install 'loky>=3.4'")
    """
    if not wanted:
        return Finding("packages", "ok", f"all {len(installed)} that raypool needs are there, in versions that do")
    said = ", ".join(f"{name} is {installed[name] or 'missing'}" for name in wanted)
    return Finding("packages", "problem", said, "pip install " + " ".join(f"'{text}'" for text in wanted.values()))


def judge_import(name: str, found: Import) -> Finding:
    """Say whether a library can be imported."""
    if found.error is not None:
        return Finding(
            name, "problem", f"cannot be imported: {found.error}", f"Install it anew: pip install --force-reinstall {name}"
        )
    built = f", built for CUDA {found.told['cuda']}" if found.told.get("cuda") else ""
    return Finding(name, "ok", f"{found.told['version']}{built}")


# --- GPUs -------------------------------------------------------------------------------------------------------------

NO_PERMISSION, NOT_LOADED, NO_LIBRARY, MISMATCH = 4, 9, 12, 18
"""Numbers of NVML's errors."""

ADVICE = {
    NO_PERMISSION: "Give this user the right to use /dev/nvidia*.",
    NOT_LOADED: "Load it: sudo modprobe nvidia; if that fails, sudo dmesg says why.",
    NO_LIBRARY: "Install the driver; a container gets it from its machine: docker run --gpus all.",
    MISMATCH: "The driver was updated while it was in use. Restart this machine.",
}


def judge_driver(driver: Driver, cards: Sequence[str], kernel: str | None = None) -> Finding:
    """Say how NVIDIA's driver is.

    Args:
        driver: What NVML says.
        cards: The addresses of NVIDIA's GPUs on the PCI bus.
        kernel: The version of the part of the driver that is in the kernel.

    Example:
        >>> judge_driver(Driver("550.54.15", (12, 4)), ["0000:41:00.0"]).fact
        '550.54.15, which runs CUDA up to 12.4'
    """
    check = "NVIDIA driver"
    if driver.code is None:
        cuda = f", which runs CUDA up to {_dotted(driver.cuda)}" if driver.cuda is not None else ""
        return Finding(check, "ok", f"{driver.version or 'unknown'}{cuda}")
    if driver.code == NO_LIBRARY and not cards and kernel is None:
        return Finding(check, "ok", "none, and no GPU of NVIDIA's: pools run on cores")
    there = f"; {len(cards)} GPU(s) of NVIDIA's are there, at {', '.join(cards)}" if cards else ""
    part = f"; in the kernel is {kernel}" if kernel is not None else ""
    advice = ADVICE.get(driver.code, "nvidia-smi may say more.")
    return Finding(check, "problem", f"does not answer: {driver.error}{part}{there}", advice)


def judge_torch(torch: Import, driver: Driver, gpus: Sequence[GpuDevice]) -> Finding:
    """Say whether torch can use NVIDIA's GPUs: what it was built for against what the driver runs and what the GPUs are.

    Args:
        torch: What it told: `version`, `cuda` that it was built for, whether it is `available`, the `archs` that it has code for.
        driver: What NVML says.
        gpus: The GPUs that processes started here may use.
    """
    check = "torch on GPUs"
    if torch.error is not None:
        return Finding(check, "problem", "torch cannot be imported")
    if not gpus:
        return Finding(check, "ok", "no GPU of NVIDIA's to be used")
    version, cuda, archs = torch.told["version"], torch.told["cuda"], torch.told["archs"]
    runs = f"the driver runs CUDA up to {_dotted(driver.cuda)}" if driver.cuda else "which CUDA the driver runs is unknown"
    if not torch.told["available"]:
        return _blind(torch, driver, runs, len(gpus))
    strange = [gpu for gpu in gpus if gpu.compute_capability is not None and not _has_code(archs, gpu.compute_capability)]
    if strange:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name}, {_dotted(gpu.compute_capability)})" for gpu in strange)
        fact = f"torch {version} has no code for {names}; it has {', '.join(archs)}"
        advice = "Install a torch that has (https://pytorch.org), or leave them out: parpool(gpus=[...])."
        return Finding(check, "problem", fact, advice)
    return Finding(check, "ok", f"built for CUDA {cuda}; {runs}")


def _blind(torch: Import, driver: Driver, runs: str, num_gpus: int) -> Finding:
    """Say why torch does not see the GPUs that there are."""
    version, cuda = torch.told["version"], torch.told["cuda"]
    check = "torch on GPUs"
    if not cuda:
        series = f"cu{driver.cuda[0]}..." if driver.cuda else "cu..."
        fact = f"torch {version} was built without CUDA, so that {num_gpus} GPU(s) cannot be used; {runs}"
        index = f"https://download.pytorch.org/whl/{series}"
        return Finding(check, "problem", fact, f"pip install torch --index-url {index}, which https://pytorch.org says in full.")
    built = f"torch {version} was built for CUDA {cuda}; {runs}"
    if driver.cuda is not None and int(cuda.partition(".")[0]) > driver.cuda[0]:
        return Finding(check, "problem", built, f"Update the driver, or install a torch for CUDA {driver.cuda[0]}.")
    said = f": {torch.warning}" if torch.warning else ""
    return Finding(check, "problem", f"torch sees no GPU{said}; {built}", "nvidia-smi shows what the driver sees.")


def judge_gpus(devices: Sequence[GpuDevice], seen: Sequence[int | None], said: str) -> list[Finding]:
    """Say which GPUs there are, and of each what keeps it from being used.

    Args:
        devices: Those of this machine.
        seen: The indices of those that a process started here sees, None for one that may be any.
        said: The variables of the environment that choose them.
    """
    if not devices:
        return [Finding("GPUs", "ok", "none")]
    names = ", ".join(f"{gpu.index} {gpu.name or 'unknown'}" for gpu in devices)
    if not seen:
        advice = f"Change {said or 'the environment'}, if they are to be used."
        return [Finding("GPUs", "warning", f"{names}; none is visible here, by {said or 'the environment'}", advice)]
    chosen = f"; visible here, by {said}: {', '.join('?' if i is None else str(i) for i in seen)}" if said else ""
    return [Finding("GPUs", "ok", names + chosen), *_trouble(devices, seen)]


def _trouble(devices: Sequence[GpuDevice], seen: Sequence[int | None]) -> Iterable[Finding]:
    for gpu in devices:
        if gpu.index not in seen or gpu.uuid is None:  # of those that are not NVIDIA's little is known
            continue
        check = f"GPU {gpu.index}"
        if gpu.total_bytes is None or gpu.used_bytes is None:
            yield Finding(
                check, "warning", "does not answer", "sudo dmesg | grep -i xid says what it has met; it may need a reset."
            )
        elif gpu.compute_mode == "prohibited":
            yield Finding(
                check,
                "warning",
                "its compute mode is prohibited",
                f"sudo nvidia-smi -i {gpu.index} -c DEFAULT lets work run there.",
            )
        elif gpu.used_bytes > gpu.total_bytes / 10:
            pids = ", ".join(str(process.pid) for process in gpu.processes or ())
            fact = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are in use{f', by process {pids}' if pids else ''}"
            yield Finding(check, "warning", fact, "Wait for the end of that, or leave this GPU out: parpool(gpus=[...]).")


def _has_code(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether one of the codes in a library runs on a GPU: machine code on the same major version, PTX on all that are newer."""
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch)
        if match is None:
            continue
        made_for = (int(match[2]), int(match[3]))
        if made_for <= capability and (match[1] == "compute" or made_for[0] == capability[0]):
            return True
    return False


# --- the machine ------------------------------------------------------------------------------------------------------


def judge_cores(usable: int, total: int, num_gpus: int) -> Finding:
    """Say how many cores a cgroup, an affinity mask or SLURM leaves.

    Example:
        >>> judge_cores(2, 64, 8)[1:3]
        ('warning', '2 of 64 may be used here, for 8 GPUs')
    """
    fact = f"{usable} of {total} may be used here"
    if usable < num_gpus:
        advice = "Each worker needs one: give the container or the job more (docker run --cpus, sbatch --cpus-per-task)."
        return Finding("cores", "warning", f"{fact}, for {num_gpus} GPUs", advice)
    return Finding("cores", "ok", fact)


def judge_memory(available: int, total: int) -> Finding:
    """Say how much memory is left; from 95 % on Ray ends workers."""
    fact = f"{_gib(available)} of {_gib(total)} are free"
    if available < 0.1 * total:
        return Finding(
            "memory", "warning", fact, "Ray ends workers when 95 % are in use: end something, or give the container more."
        )
    return Finding("memory", "ok", fact)


def judge_shared_memory(free: int | None, store: int | None) -> Finding:
    """Compare what is free in /dev/shm with the object store that Ray would make there.

    Example:
        >>> judge_shared_memory(64 * 2**20, 9 * 2**30)[1:3]
        ('warning', '0.1 GiB are free in /dev/shm, and the object store would take 9.0 GiB')
    """
    check = "shared memory"
    if free is None:
        return Finding(check, "problem", "there is no /dev/shm", "Mount it: mount -t tmpfs tmpfs /dev/shm.")
    fact = f"{_gib(free)} are free in /dev/shm"
    if store is None:
        return Finding(check, "ok", fact)
    fact += f", and the object store would take {_gib(store)}"
    if free >= store:
        return Finding(check, "ok", fact)
    advice = (
        f"Ray puts it on the disk, which is slow. Make room: docker run --shm-size={store / 1e9 + 1:.0f}g, or remove old files."
    )
    return Finding(check, "warning", fact, advice)


SOCKET = "/12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""A name as long as those of the sockets of a Ray below its folder."""

MOST_SOCKET_LETTERS = 107
"""The name of a socket may be so long (Linux, unix(7))."""


def judge_disk(folder: str, free: int, total: int, is_writable: bool) -> Finding:
    """Say how the disk is on which Ray keeps its files."""
    check = "Ray's files"
    fact = f"{_gib(free)} of {_gib(total)} are free where {folder} is"
    elsewhere = "Name another folder, with a short name: export RAY_TMPDIR=/var/tmp."
    if not is_writable:
        return Finding(check, "problem", f"{folder} cannot be written", elsewhere)
    if len(folder.encode()) + len(SOCKET) > MOST_SOCKET_LETTERS:
        most = MOST_SOCKET_LETTERS - len(SOCKET)
        return Finding(
            check, "problem", f"{folder} has {len(folder.encode())} letters, and the sockets there allow {most}", elsewhere
        )
    if free < 0.05 * total:
        return Finding(check, "problem", fact, f"Ray writes nothing to a disk that is 95 % full. Make room. {elsewhere}")
    if free < 0.1 * total or free < GIB:
        return Finding(check, "warning", fact, f"Ray writes nothing to a disk that is 95 % full. Make room. {elsewhere}")
    return Finding(check, "ok", fact)


FEWEST_FILES = 4096
"""Below this Ray warns; it raises the limit by itself as far as it may."""


def judge_open_files(soft: int, hard: int) -> Finding:
    """Say how many files a process may have open; below 0 there is no limit.

    Example:
        >>> judge_open_files(1024, 65536)[1:3]
        ('ok', '1,024, which Ray raises to 65,536')
    """
    if soft < 0:
        return Finding("open files", "ok", "no limit")
    reached = max(soft, 65536 if hard < 0 else min(hard, 65536))
    if reached < FEWEST_FILES:
        advice = "Raise it: ulimit -n 65536, docker run --ulimit nofile=65536, or LimitNOFILE= of the service."
        return Finding("open files", "warning", f"{reached:,} at most, and Ray asks for {FEWEST_FILES:,}", advice)
    return Finding("open files", "ok", f"{soft:,}" + (f", which Ray raises to {reached:,}" if reached > soft else ""))


FEWEST_PORTS = 1000


def judge_ports(loopback: str | None, free: int, total: int, taken: Mapping[int, str]) -> Finding:
    """Say whether there are ports for Ray: a pool's own Ray takes free ones of the loopback, a head has some of its own.

    Args:
        loopback: Why nothing can listen on 127.0.0.1, None if it can.
        free: How many ports are free of those that the system gives out.
        total: How many there are of these.
        taken: Who has the ports of a head, by port.
    """
    if loopback is not None:
        advice = "Ray's processes talk to each other there: bring the loopback up (ip link set lo up)."
        return Finding("ports", "problem", f"nothing can listen on 127.0.0.1: {loopback}", advice)
    fact = f"{free:,} of {total:,} are free on the loopback"
    if free < FEWEST_PORTS:
        return Finding("ports", "warning", fact, "Widen the range: sysctl net.ipv4.ip_local_port_range='15000 65000'.")
    if taken:
        said = ", ".join(f"{port} by {who}" for port, who in taken.items())
        advice = "Pools of this machine do not need these; `ray start --head` does, or others by its options."
        return Finding("ports", "warning", f"{fact}; of those of a head are taken: {said}", advice)
    return Finding("ports", "ok", f"{fact}, and those of a head")


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version or ()))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
