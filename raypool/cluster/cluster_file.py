"""Cluster files as text, with comments for their readers and editors; and saving them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from raypool.cluster import aws, checks, gcp, kubernetes, on_prem, packages, skypilot
from raypool.cluster.documents import OPEN, PLACEHOLDER, documents_of, texts
from raypool.cluster.launcher_file import FAST_NETWORKS
from raypool.cluster.plan import ClusterPlan, Provider
from raypool.errors import CloudError

COMMENTS = {
    "provider": "Provider and location.",
    "auth": "SSH login to the machines.",
    "min_workers": "Minimum number of machines besides the head.",
    "max_workers": "Maximum number of machines besides the head.",
    "idle_timeout_minutes": "Machines without work for this long are released.",
    "head_node_type": (
        "The machine that the others join; it starts them when there is work, and releases idle"
        " ones."
    ),
    "available_node_types": (
        "Machine types: the resources that Ray may use, the numbers of machines, and their"
        " settings."
    ),
    "file_mounts": (
        "Copied to each machine: the packages to install and, for Ray's launcher, the token that"
        " clients must present."
    ),
    "num_nodes": "Number of machines, all of one type.",
    "secrets": "The token that clients of Ray must present; `sky launch --secret` sets it.",
    "setup": "Installs the packages in a separate environment, the same on every machine.",
    "run": "Starts Ray with the token, beside SkyPilot's, then the command on the first machine.",
    "initialization_commands": (
        "Installs the packages in a separate environment, the same on every machine."
    ),
    "head_start_ray_commands": (
        "Starts Ray with the token; the dashboard listens on localhost only, and machines silent"
        " for 8 s are dropped. In a cloud, a watcher deletes all machines, including this one,"
        " after this many minutes without a job, pool or client."
    ),
    "worker_start_ray_commands": "Starts Ray on each worker.",
}
"""The comments above entries of a launcher's file."""

WHAT = {
    "gcp": "A cluster of machines with GPUs on Google Cloud, for Ray's launcher.",
    "aws": "A cluster of machines with GPUs on AWS, for Ray's launcher.",
    "on-prem": "A cluster of existing machines, for Ray's launcher.",
    "kubernetes": "A cluster of pods with GPUs, for KubeRay.",
    "sky": "A task on machines with GPUs, in any cloud that SkyPilot supports.",
}

WRITERS: dict[Provider, Callable[[ClusterPlan], dict[str, Any]]] = {
    "gcp": gcp.write,
    "aws": aws.write,
    "on-prem": on_prem.write,
    "kubernetes": kubernetes.write,
    "sky": skypilot.write,
}

NEXT = {
    "kubernetes": "kubectl apply -f {}",
    # in the command itself, other users of this machine would see the token
    "sky": f"export {skypilot.TOKEN}=$(openssl rand -hex 32);"
    f" sky launch {{}} --secret {skypilot.TOKEN}",
}
"""The commands that start what a file describes, where that is not `raypool cluster up`."""

WIDTH = 128


def text_of(
    plan: ClusterPlan,
    command: str,
    file: str,
    warn: Callable[[str], object] = lambda text: None,
    trust: bool = False,
) -> str:
    """Return the text of a cluster's file.

    Args:
        plan: The cluster.
        command: The command line, for the comment.
        file: The name of the file.
        warn: Called with each warning.
        trust: Leave out warnings of machines that the (dated) catalogues lack.

    Raises:
        CloudError: The plan is impossible, or the file has mistakes other than placeholders.
    """
    plan = replace(plan, lock=lock_of(Path(file)).name)
    content = WRITERS[plan.provider](plan)
    names = dict.fromkeys(
        name
        for _, text in texts(content)
        for name in re.findall(rf"{PLACEHOLDER}[a-z][^<>]*>", text)
    )
    fill_in = [f"Fill in {', '.join(names)}."] if names else []
    if names and plan.provider == "aws":
        fill_in += aws.header(plan)
    if kubernetes.RAYPOOL in names:
        fill_in.append(
            "Make the wheel with `pip wheel --no-deps .` in raypool's folder; `sha256sum` prints"
            " its hash."
        )
    if any(group.machine.startswith(FAST_NETWORKS) for group in plan.groups):
        fill_in.append("These machines communicate over TCP: EFA and GPUDirect are not configured.")
    header = [
        WHAT[plan.provider],
        "Made by:",
        f"    {command}",
        *fill_in,
        "Then:",
        f"    raypool cluster validate {shlex.quote(file)}",
        f"    {NEXT.get(plan.provider, 'raypool cluster up {}').format(shlex.quote(file))}",
    ]
    if plan.provider == "kubernetes" and plan.job is None:
        header += kubernetes.how_to_connect(plan.name)
    text = render(content, header)
    [document] = documents_of(text, file)
    try:
        warnings = checks.check(document, trust=trust)
    except CloudError as error:
        found = vars(error)
        if wrong := [
            problem.text for problem in found["problems"] if not problem.text.endswith(OPEN)
        ]:
            raise CloudError("\n".join(wrong)) from error  # without lines: nobody has seen them yet
        warnings = found["warnings"]
    for warning in warnings:
        warn(warning)
    return text


def lock_of(file: Path) -> Path:
    """Return the lock file that belongs to a cluster's file."""
    return file.with_suffix(".lock.txt")


def save(text: str, file: Path, plan: ClusterPlan, is_forced: bool = False) -> None:
    """Write a cluster's file, and its lock file if it has one, or raise a CloudError.

    An existing file is replaced only if forced: it may be needed to end a running cluster.
    """
    # Written under another name first, so that a failed write leaves no half file.
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        if is_forced:
            draft.replace(file)
        else:
            os.link(draft, file)  # unlike `replace`, fails if it exists
        if lock_of(file).name in text:
            lock_of(file).write_text(packages.lock_text(plan.packages, file.name), encoding="utf-8")
        if plan.provider == "sky" and packages.ships_wheel(plan.packages):
            packages.make_wheel()  # nothing of raypool's runs when the task is launched
    except FileExistsError:
        end = "perhaps for a running cluster. Choose another file with --out"
        raise CloudError(f"{file} already exists, {end}.") from None
    except OSError as error:
        raise CloudError(
            f"{file} could not be written: {error.strerror}. Choose another place with --out."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            draft.unlink(missing_ok=True)


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, since an edit of one entry must not change others, and texts of several
    lines as lines.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def render(document: Mapping[str, Any], header: Iterable[str]) -> str:
    """Return the text of a file with this document, and these lines in a comment at its top.

    Example:
        >>> print(render({"cluster_name": "lab", "max_workers": 2}, ["Made by hand."]), end="")
        # Made by hand.
        <BLANKLINE>
        cluster_name: lab
        <BLANKLINE>
        # Maximum number of machines besides the head.
        max_workers: 2
    """
    # a value may have line ends in it
    lines = [part for line in header for part in line.splitlines()]
    text = "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"
    for key, value in document.items():
        comment = textwrap.wrap(COMMENTS.get(key, ""), 100)
        text += "\n" * bool(comment) + "".join(f"# {line}\n" for line in comment)
        text += yaml.dump(
            {key: value}, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True
        )
    return text.rstrip("\n") + "\n"
