"""What is wrong with a file for Ray's launcher, whoever has the machines.

First what Ray's own schema says of each entry; then what Ray takes without a word although it cannot work, or leaves open to
everybody; at last Ray itself is asked, as it asks itself before it makes anything (`prepare_config`, `validate_config`).

Source: Ray's `autoscaler/ray-schema.json`, `autoscaler/_private/util.py` and `autoscaler/*/defaults.yaml`.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator

from raypool.cloud import aws_checks, gcp_checks, nodes, on_prem, schema_checks, shells
from raypool.cloud.documents import PLACEHOLDER, Document, Findings, Keys, nearest
from raypool.errors import CloudError

PROVIDERS: dict[str, Callable[[Findings], None]] = {
    "gcp": gcp_checks.check,
    "aws": aws_checks.check,
    "local": on_prem.check,
}
HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"
COMMANDS = ("setup_commands", HEAD, WORKER)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check(document: Document) -> None:
    """Make sure that a file for Ray's launcher can work.

    Raises:
        CloudError: It cannot; says all that is wrong, each with its line and what would be right.
    """
    findings = Findings(document)
    _check_names(findings, document.content)
    findings.refuse()
    schema_checks.check(findings, _schema())
    findings.refuse()  # what follows relies on entries being of the right kinds
    provider = findings.at(("provider", "type"))
    if provider not in PROVIDERS:
        findings.add(("provider", "type"), f"raypool knows no provider {provider!r}{nearest(str(provider), PROVIDERS)}")
        findings.refuse()
    findings.check_filled_in()
    _check_counts(findings)
    _check_login(findings)
    _check_copied(findings)
    _check_commands(findings)
    PROVIDERS[provider](findings)
    findings.refuse()
    _ask_ray(document)


@functools.cache
def _schema() -> Draft7Validator:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    schema["properties"]["min_workers"] = {"type": "integer", "minimum": 0}  # goes with machines on premises
    return Draft7Validator(schema)


def _check_names(findings: Findings, content: Any, keys: Keys = ()) -> None:
    """Note each name that YAML reads as something else: `1`, `on`."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        if isinstance(content, dict) and not isinstance(key, str):
            findings.add((*keys, key), f"YAML reads the name {key!r} as no text; put it in quotes.")
        else:
            _check_names(findings, value, (*keys, key))


def _check_counts(findings: Findings) -> None:
    """Look at who is the head, and at how many machines there are to be."""
    types = findings.at(("available_node_types",))
    if types is None:
        return
    head = findings.at(("head_node_type",))
    if head not in types:
        findings.add(("head_node_type",), f"head_node_type is {head!r}{nearest(str(head), types)}")
    most = findings.at(("max_workers",))
    if most is None:
        findings.add((), "max_workers is missing: Ray would make 2 workers at most, whatever the node types say.")
    least = {name: entry.get("min_workers", 0) for name, entry in types.items() if name != head}
    for name, entry in types.items():
        _check_range(findings, name, entry)
    if most is not None and sum(least.values()) > most:
        text = (
            f"max_workers is {most}, and the min_workers of all node types sum up to {sum(least.values())}; that much it must be."
        )
        findings.add(("max_workers",), text)


def _check_range(findings: Findings, name: str, entry: dict[str, Any]) -> None:
    keys = ("available_node_types", name)
    least, most = entry.get("min_workers", 0), entry.get("max_workers")
    if least < 0:
        findings.add((*keys, "min_workers"), f"min_workers is {least}; 0 is the least that it can be.")
    if most is not None and least > most:
        text = f"min_workers is {least}, more than max_workers, which is {most}: make one of them at most the other."
        findings.add((*keys, "min_workers"), text)


def _check_login(findings: Findings) -> None:
    user = findings.at(("auth", "ssh_user"))
    if not user:
        findings.add(("auth",), "auth says no ssh_user; it is who logs in on the machines, such as ubuntu.")
    elif not re.fullmatch(rf"{PLACEHOLDER}.*|[A-Za-z_][-A-Za-z0-9_.@]*", user):
        findings.add(("auth", "ssh_user"), f"ssh_user is {user!r}, which is no name of a user; one is like ubuntu.")
    for name in ("ssh_private_key", "ssh_public_key"):
        path = findings.at(("auth", name))
        if path and not path.startswith(PLACEHOLDER):
            _check_key(findings, ("auth", name), Path(path).expanduser())


def _check_key(findings: Findings, keys: Keys, path: Path) -> None:
    name = keys[-1]
    if not path.is_file():
        findings.add(keys, f"{name} is {path}, and there is no such file.")
    elif name == "ssh_private_key" and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        findings.add(keys, f"{path} can be read by others (mode {mode:o}), and SSH takes no such key: `chmod 600 {path}`.")


def _check_copied(findings: Findings) -> None:
    """Look at the files that go to the machines; only the token is made when the cluster is."""
    for away, here in (findings.at(("file_mounts",)) or {}).items():
        keys = ("file_mounts", away)
        if not isinstance(here, str):
            findings.add(keys, f"{away} is to be copied from {here!r}; it must be the path of a file or folder here.")
        elif here != nodes.TOKEN and not here.startswith(PLACEHOLDER) and not Path(here).expanduser().exists():
            findings.add(keys, f"{away} is to be copied from {here}, and there is no such file or folder here.")


def _check_commands(findings: Findings) -> None:
    """Look at what is run on the machines: that it is said at all, and that nobody gets in without the token."""
    for name in COMMANDS:
        if findings.at((name,)) is None:
            text = (
                f"{name} is missing: Ray would take its own, which installs an old version and opens the dashboard to everybody."
            )
            findings.add((), f"{text} `raypool cluster init` writes good ones.")
    for name in (HEAD, WORKER):
        if findings.at((name,)) is not None:
            _check_starts(findings, name)
    _check_ports(findings)


def _check_starts(findings: Findings, name: str) -> None:
    """Look at how Ray is started. Each command is run by a shell of its own: what another sets does not count."""
    starts = 0
    for number, text in enumerate(findings.at((name,))):
        try:
            environments = shells.starts_of_ray(text)
        except ValueError as error:
            findings.add((name, number), f"no shell can read this command: {error}.")
            return
        starts += len(environments)
        for environment in environments:
            _check_start(findings, (name, number), text, environment)
    if not starts:
        findings.add((name,), f"{name} does not start Ray: `ray start` is missing.")


def _check_start(findings: Findings, keys: Keys, text: str, environment: dict[str, str]) -> None:
    """Look at a command that starts Ray, with the environment that Ray gets there."""
    has_token = environment.get("RAY_AUTH_MODE", "").lower() == "token"
    if not has_token:
        right = "Put `export RAY_AUTH_MODE=token;` before `ray start`, into the same command"
        findings.add(keys, f"Ray is started without a token: whoever reaches it can run code. {right}.")
    elif nodes.TOKEN not in (findings.at(("file_mounts",)) or {}) and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(
        environment
    ):
        mount = f"`{nodes.TOKEN}: {nodes.TOKEN}`"
        findings.add(keys, f"Ray wants a token, and none is copied to the machines. Put {mount} under file_mounts.")
    if keys[0] == HEAD and "--autoscaling-config" not in text:
        option = "--autoscaling-config=~/ray_bootstrap_config.yaml"
        findings.add(keys, f"Ray is not told of this file, so no worker is ever made. Add `{option}` to `ray start`.")
    host = re.search(r"--dashboard-host[= ][\"']?([^\s\"';]+)", text)
    if host and host[1] not in LOOPBACK and not has_token:
        right = "`--dashboard-host=127.0.0.1`; `raypool cluster connect` makes a tunnel to it"
        findings.add(keys, f"the dashboard listens at {host[1]} without a token: anybody may submit jobs. Right: {right}.")


def _check_ports(findings: Findings) -> None:
    head = re.search(r"ray start.*--port[= ](\d+)", "\n".join(findings.at((HEAD,)) or ()))
    worker = re.search(r"--address[= ]\S+?:(\d+)", "\n".join(findings.at((WORKER,)) or ()))
    if head and worker and head[1] != worker[1]:
        findings.add((WORKER,), f"the workers look for the head at port {worker[1]}, and it listens at {head[1]}.")


def _ask_ray(document: Document) -> None:
    """Have Ray itself look, as it does before it makes anything.

    Raises:
        CloudError: Ray refuses it.
    """
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        with _quiet():
            validate_config(prepare_config(copy.deepcopy(document.content)))
    except Exception as error:  # also KeyError, TypeError and AssertionError
        text = " ".join(str(error).split()) or type(error).__name__
        raise CloudError(f"{document.name}: Ray refuses this file: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray from telling what it fills in."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
