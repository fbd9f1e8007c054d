"""Checks of files before money is spent: for Ray's launcher, for Kubernetes, and of training jobs.

A file for the launcher is checked by Ray's own schema first, then by rules for entries that Ray
accepts although they cannot work or are open to everybody, finally by Ray's own preparation of the
file, without making anything.

Source: Ray's `autoscaler/ray-schema.json`, `autoscaler/_private/util.py` and
`autoscaler/*/defaults.yaml`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import json
import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path

from jsonschema import Draft7Validator

from raypool.cluster import (
    aws,
    gcp,
    hardening,
    job_files,
    kubernetes,
    on_prem,
    packages,
    skypilot,
)
from raypool.cluster.documents import (
    PLACEHOLDER,
    Document,
    Findings,
    form,
    nearest,
    read_documents,
    texts,
)
from raypool.cluster.launcher_file import START, TOKEN
from raypool.errors import CloudError

PROVIDERS: dict[str, Callable[[Findings], None]] = {
    "gcp": gcp.check,
    "aws": aws.check,
    "local": on_prem.check,
}
HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"


def check_file(path: str | Path, *, trust: bool = False) -> tuple[str, ...]:
    """Check the documents of a file, as far as this machine can know.

    The cluster that `kubectl` reaches checks a manifest for Kubernetes, in a dry run.

    Args:
        path: The file.
        trust: Leave out warnings of machines, GPUs and zones that raypool's catalogues lack.

    Returns:
        Warnings: machines that the (dated) catalogue lacks, and checks that could not be made.

    Raises:
        CloudError: The file is unreadable, empty or wrong; the message has all mistakes with their
            lines. `.warnings`, if present, has the warnings.
    """
    documents = [document for document in read_documents(path) if document.content is not None]
    if not documents:
        raise CloudError(f"{path} is empty. `raypool cluster init` writes a cluster file.")
    is_for_kubernetes = any(kubernetes.is_manifest(document.content) for document in documents)
    warnings: list[str] = []
    problems = []
    for document in documents:
        content = document.content
        is_object = isinstance(content, dict) and "apiVersion" in content
        if is_for_kubernetes and is_object and not kubernetes.is_manifest(content):
            continue  # an object of Kubernetes itself beside the cluster: a Secret, a Service
        try:
            warnings += check(document, trust=trust)
        except CloudError as error:
            problems.append(str(error))
            warnings += vars(error)["warnings"]
        lock = Findings(document).at("file_mounts", packages.LOCK)
        if isinstance(lock, str):
            try:
                packages.lock_lines(Path(path).parent / lock)
            except CloudError as error:
                problems.append(str(error))
    if problems:
        raise CloudError("\n".join(problems), warnings=tuple(warnings))
    return (*warnings, *(kubernetes.ask(path) if is_for_kubernetes else ()))


def check(document: Document, *, trust: bool = False) -> tuple[str, ...]:
    """Check a document of any kind, and return warnings, as `check_file` does."""
    content = document.content
    findings = Findings(document, trust)
    for keys, text in texts(content):
        if packages.takes_raypool_by_name(text):
            findings.add(packages.BY_NAME, *keys)
    if kubernetes.is_manifest(content):
        findings.check_filled_in()
        kubernetes.check(findings)
    elif skypilot.is_task(content):
        skypilot.check(findings)
    elif job_files.is_training(content):
        return job_files.read(document, trust=trust).notes
    elif isinstance(content, dict) and ("provider" in content or "cluster_name" in content):
        _check_launcher(findings)
    else:
        findings.add(
            "this is not a cluster or job: it must have a provider (Ray's launcher), an"
            " apiVersion (Kubernetes), a trainingInput (training job) or a run (SkyPilot).",
        )
    return findings.finish()


def _check_launcher(findings: Findings) -> None:
    """Note mistakes in a file for Ray's launcher."""
    findings.check_schema(_schema())
    if findings.problems:
        return  # the next checks rely on the types of entries
    provider = findings.at("provider", "type")
    if provider not in PROVIDERS:
        from raypool.ray_private import _NODE_PROVIDERS

        if provider not in _NODE_PROVIDERS:
            near = nearest(str(provider), PROVIDERS)
            findings.add(f"Ray has no provider {provider!r}{near}", "provider", "type")
            return
        text = f"raypool has no rules for {provider}: only Ray checked its settings."
        findings.doubt(text, "provider", "type")
    findings.check_filled_in()
    for name, entry in (findings.at("available_node_types") or {}).items():
        least, most = entry.get("min_workers", 0), entry.get("max_workers")
        if most is not None and least > most:
            text = f"min_workers ({least}) is more than max_workers ({most})."
            findings.add(text, "available_node_types", name, "min_workers")
    _check_files(findings)
    _check_commands(findings)
    if provider in PROVIDERS:
        PROVIDERS[provider](findings)
    if not findings.problems:
        _ask_ray(findings)


@functools.cache
def _schema() -> Draft7Validator:
    """Return Ray's own schema, and rules that it lacks."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    file = Path(ray.origin).with_name("autoscaler") / "ray-schema.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    known = schema["properties"]
    known["min_workers"] = {"type": "integer", "minimum": 0}  # of machines on premises
    known["file_mounts"] = {"type": "object", "additionalProperties": {"type": "string"}}
    known["auth"]["required"] = ["ssh_user"]
    known["auth"]["properties"]["ssh_user"] = form(
        "[A-Za-z_][-A-Za-z0-9_.@]*", "be a user name, such as ubuntu"
    )
    return Draft7Validator(schema)


def _check_files(findings: Findings) -> None:
    """Check the files of this machine: those that are copied to the machines, and SSH's keys."""
    folder = Path(findings.document.name).parent
    for away, here in (findings.at("file_mounts") or {}).items():
        # `raypool cluster up` makes the first two, and `check_file` reads the lock file
        is_known = here == TOKEN or here.startswith(packages.CACHE) or away == packages.LOCK
        if is_known or here.startswith(PLACEHOLDER):
            continue
        if not (folder / Path(here).expanduser()).exists():
            text = f"{away} is copied from {here}, which does not exist here."
            findings.add(text, "file_mounts", away)
    for name in ("ssh_private_key", "ssh_public_key"):
        given = findings.at("auth", name)
        if not given or given.startswith(PLACEHOLDER):
            continue
        path = Path(given).expanduser()
        if not path.is_file():
            findings.add(f"{name} is {path}, which does not exist.", "auth", name)
        elif name == "ssh_private_key" and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            text = f"SSH refuses {path}, which others can read (mode {mode:o})."
            findings.add(f"{text} Run `chmod 600 {path}`.", "auth", name)


def _check_commands(findings: Findings) -> None:
    """Check that the commands for the machines are set, and require the token."""
    for name in ("setup_commands", HEAD, WORKER):
        if findings.at(name) is None:
            findings.doubt(
                f"{name} is missing, so Ray uses its defaults, which install an old version and"
                " open the dashboard to everybody. `raypool cluster harden` adds the commands"
                " that start Ray."
            )
    ports = []
    for name, port in ((HEAD, r"--port[= ](\d+)"), (WORKER, r"--address[= ]\S+?:(\d+)")):
        commands = findings.at(name) or ()
        starts = {number: text for number, text in enumerate(commands) if START in text}
        if commands and not starts:
            findings.add(f"{name} does not start Ray: `{START}` is missing.", name)
        for number, command in starts.items():
            entry = findings.within(name, number)
            _check_start(entry, command)
            if name == HEAD and "--autoscaling-config" not in command:
                entry.add(
                    "Ray does not read this file, so it never starts a worker. Add"
                    " `--autoscaling-config=~/ray_bootstrap_config.yaml` to `ray start`."
                )
        ports.append(re.search(port, "\n".join(starts.values())))
    head, worker = ports
    if head and worker and head[1] != worker[1]:
        text = f"the workers connect to port {worker[1]}, but the head listens on port {head[1]}."
        findings.add(text, WORKER)


def _check_start(entry: Findings, command: str) -> None:
    """Check that a command starts Ray with a token, and with a dashboard for this machine only."""
    if host := hardening.open_host(command):
        text = f"the dashboard, which accepts jobs, listens on {host} and is open to the network."
        entry.doubt(f"{text} `raypool cluster harden` closes it.")
    if not hardening.asks_for_token(command):
        entry.doubt(
            "Ray starts without a token: anyone who can reach it can run code. `raypool cluster"
            " harden` adds one (`export RAY_AUTH_MODE=token;` in the same command)."
        )
    elif TOKEN not in (entry.whole().at("file_mounts") or {}) and "RAY_AUTH_TOKEN" not in command:
        entry.add(
            f"Ray requires a token, but none is copied to the machines. Put `{TOKEN}: {TOKEN}`"
            " under file_mounts."
        )


def _ask_ray(findings: Findings) -> None:
    """Run Ray's own preparation of the file, which makes nothing, without its output."""
    from raypool.ray_private import prepare_config, validate_config

    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # a copy: Ray may change its entries
            validate_config(prepare_config(copy.deepcopy(findings.document.content)))
    except Exception as error:  # also KeyError, TypeError and AssertionError
        text = " ".join(str(error).split()) or type(error).__name__
        findings.add(f"Ray refuses this file: {type(error).__name__}: {text}")
    finally:
        logger.setLevel(level)
