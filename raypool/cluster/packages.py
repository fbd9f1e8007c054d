"""The packages on a cluster's machines: this machine's raypool, and the versions it runs with.

raypool is not on any package index: anybody who registers the name could run code on the machines.
So its wheel is made from the package that runs here, and travels with the cluster's files. All
other packages are pinned, in a lock file beside the cluster's file.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import raypool
from raypool.errors import CloudError

FOLDER = "~/raypool-packages"  # of the lock file and the wheel, on machines
LOCK = f"{FOLDER}/requirements.txt"
CACHE = "~/.cache/raypool"  # of the wheel, on this machine

LAUNCHER_NEEDS = {"gcp": ("google-api-python-client",), "aws": ("boto3",)}
"""The packages that Ray's launcher needs for a provider, also on the head."""

RAY_EXTRAS = ("client", "default", "train")

BY_NAME = (
    "raypool is not on any package index: anybody who registers the name could run code on your"
    " machines. `raypool cluster init` writes files that install this machine's raypool. To"
    " install another, pin its commit (raypool @ git+https://...@COMMIT) or hash (raypool @"
    " https://...whl#sha256=...)."
)

# What pip says when it reaches no index.
UNREACHABLE = ("Retrying (", "Could not fetch URL", "NewConnectionError")


def default_packages(
    provider: str, more: Iterable[str] = (), is_image: bool = False
) -> tuple[str, ...]:
    """Return the packages for a provider's machines: raypool's dependencies in the versions here,
    those of the launcher, and `more`, which replace those of the same name.

    An image of the user's keeps its own torch and NumPy; only Ray must be the same as here.

    Raises:
        CloudError: One of `more` names no package, or takes raypool from an index.

    Example:
        >>> default_packages("aws", ["raypool"])
        Traceback (most recent call last):
        raypool.errors.CloudError: raypool is not on any package index: anybody who registers...
    """
    more = [*map(pinned, LAUNCHER_NEEDS.get(provider, ())), *more]
    if is_image:
        return (pinned("ray"), *more)
    lines = {}
    for line in metadata.requires("raypool") or ():
        needed = Requirement(line)
        if needed.marker is None:
            lines[canonicalize_name(needed.name)] = pinned(needed.name)
    for line in more:
        check_requirement(line)
        lines[canonicalize_name(Requirement(line).name)] = line
    return tuple(line for _, line in sorted(lines.items()))


def pinned(name: str) -> str:
    """Return the requirement for a package in its version here; without one if it is not here."""
    try:
        version = metadata.version(name).partition("+")[0]  # "2.13.0+cpu" is the build of here
    except metadata.PackageNotFoundError:
        return name
    extras = f"[{','.join(RAY_EXTRAS)}]" if name == "ray" else ""
    return f"{name}{extras}=={version}"


def version_of(name: str, lines: Iterable[str]) -> str:
    """Return the version of a package that requirements pin, else the one here."""
    for wanted in map(Requirement, lines):
        exact = re.fullmatch(r"==([^*,]+)", str(wanted.specifier))
        if wanted.name.lower() == name and exact:
            return exact[1]
    return metadata.version(name).partition("+")[0]


def check_requirement(line: str) -> None:
    """Raise a CloudError if a line of a lock file names no package, or takes raypool by name."""
    try:
        wanted = Requirement(line)
    except InvalidRequirement as error:
        at = f" Name the package: 'NAME @ {line}'." if "://" in line else ""
        raise CloudError(f"{line!r} is not a valid requirement for pip.{at}") from error
    if wanted.name.lower() == "raypool" and (wanted.url is None or not is_sealed(wanted.url)):
        raise CloudError(BY_NAME)


def takes_raypool_by_name(command: str) -> bool:
    """Whether a shell's command installs raypool from a package index.

    Example:
        >>> takes_raypool_by_name("pip install -U raypool==0.1.0 timm")
        True
        >>> takes_raypool_by_name("uv pip install --reinstall-package raypool ~/raypool-1.whl")
        False
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True  # else a dash or an equals sign ends a word
    try:
        words = list(lexer)
    except ValueError:  # not a shell's quotes: the shell will say so
        return False
    installs = False
    for before, word in itertools.pairwise(["", *words]):
        installs = (installs or (before, word) == ("pip", "install")) and word[:1] not in "();<>|&"
        name, _, url = word.partition("@")
        is_wanted = re.fullmatch(r"raypool(\[.*\])?\s*([=<>~!].*)?", name) is not None
        if installs and is_wanted and not before.endswith("-package"):
            return "--hash" not in command and not is_sealed(url.strip()) and "<" not in url
    return False


def is_sealed(url: str) -> bool:
    """Whether a URL can give only one content: it has a commit, a hash, or is a local file's.

    Example:
        >>> is_sealed("git+https://host/x.git@1a2b3c4d"), is_sealed("git+https://host/x.git@main")
        (True, False)
        >>> is_sealed("https://host/x-1-py3-none-any.whl#sha256=ab12")
        True
    """
    if url.startswith("git+"):
        return re.search(r"@[0-9a-f]{7,64}(#|$)", url) is not None
    return url.startswith("file:") or re.search(r"#(.*&)?sha256=[0-9a-f]+", url) is not None


def ships_wheel(packages: Sequence[str]) -> bool:
    """Whether machines with these packages get the raypool of this machine."""
    return bool(packages) and all(Requirement(line).name.lower() != "raypool" for line in packages)


def wheel_name() -> str:
    """Return the name of the file with this raypool."""
    return f"raypool-{metadata.version('raypool')}-py3-none-any.whl"


def make_wheel() -> Path:
    """Write a wheel of the raypool that runs here, and return its path.

    The same files always make the same wheel, so that a running cluster is not set up again.
    """
    # From the package itself, not from its source: this needs no build tools and no network, and
    # ships what runs here, however it was installed, also with uncommitted changes.
    here = metadata.distribution("raypool")
    package, info = Path(raypool.__file__).parent, f"raypool-{here.version}.dist-info"
    files = {
        f"raypool/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    # in the folder of the source, what is found is its .egg-info
    told = here.read_text("METADATA") or here.read_text("PKG-INFO") or ""
    files[f"{info}/METADATA"] = told.encode()
    files[f"{info}/entry_points.txt"] = (here.read_text("entry_points.txt") or "").encode()
    tag = "Wheel-Version: 1.0\nGenerator: raypool\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/WHEEL"] = tag.encode()
    record = [f"{info}/RECORD,,"]
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()
    path = Path(CACHE).expanduser() / wheel_name()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")  # another process may make it just now
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    draft.replace(path)
    return path


def address() -> str | None:
    """Return the requirement for this raypool where no file can be copied; None without address.

    Source: PEP 610, `direct_url.json`.
    """
    text = metadata.distribution("raypool").read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    url = origin.get("url", "")
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    elif digest := origin.get("archive_info", {}).get("hashes", {}).get("sha256"):
        url = f"{url}#sha256={digest}"
    else:
        return None
    if folder := origin.get("subdirectory"):
        url += f"{'&' if '#' in url else '#'}subdirectory={folder}"
    return f"raypool @ {url}"


def lock_text(packages: Sequence[str], file: str) -> str:
    """Return the lock file of a cluster's file."""
    head = [
        f"# Packages for the machines of {file}, in the versions of the machine that wrote it.",
        "# Ray must be the same at both ends, and so should packages whose objects are sent.",
    ]
    return "\n".join([*head, *packages]) + "\n"


def lock_lines(path: Path) -> list[str]:
    """Return the requirements in a lock file.

    Raises:
        CloudError: It is missing, or a line names no package, or takes raypool from an index.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CloudError(
            f"The lock file {path} could not be read: {error.strerror}. `raypool cluster init`"
            " writes it beside the cluster's file; keep them together."
        ) from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition(" #")[0].strip()
        if not words or words.startswith("#"):
            continue
        try:
            check_requirement(words)
        except CloudError as error:
            raise CloudError(f"{path}, line {number}: {error}") from None
        lines.append(words)
    return lines


def check_installable(lock: Path, wheel: Path | None, python: str | None) -> str | None:
    """Let pip look up all packages of a lock file and a wheel, without installing any.

    `python` is their version of Python ("3.11"); None: the one here.

    Returns:
        A warning if pip could not look, else None.

    Raises:
        CloudError: The packages cannot be installed together for that Python.
    """
    lines = lock_lines(lock)
    if importlib.util.find_spec("pip") is None:
        return f"The packages of {lock} were not checked: pip is not installed here."
    flags = []
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python not in (None, here):
        # for another Python pip looks at wheels only
        flags = [f"--python-version={python}", "--only-binary=:all:", f"--target={lock.parent}"]
        lines = [line for line in lines if Requirement(line).url is None]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-input", "--retries=1", "--timeout=15", *flags, *lines]
    done = subprocess.run(
        [*command, *([str(wheel)] if wheel else [])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    if any(sign in done.stderr for sign in UNREACHABLE):
        return (
            f"The packages of {lock} were not checked: no package index can be reached from here."
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    said = [line for line in errors if "Ignored the following" not in line and "(from" not in line]
    words = " ".join(line.removeprefix("ERROR: ") for line in said) or done.stderr[-500:]
    raise CloudError(
        f"{lock}: pip cannot install these packages together for Python {python or here}: {words}"
        " Change the file, or rewrite it with `raypool cluster init --force`."
    )
