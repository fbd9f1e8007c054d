"""Clusters on premises, of existing machines: writes the file for Ray's launcher, and checks one.

Source: Ray's `autoscaler/_private/local/config.py` and `node_provider.py`, and "Launching an
On-Premise Cluster" in its documentation.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Any

from jsonschema import Draft7Validator

from raypool.cluster import launcher_file
from raypool.cluster.documents import PLACEHOLDER, Findings, form
from raypool.cluster.plan import ClusterPlan

# Ray's newer autoscaler counts the head of such a cluster as a worker: the last worker never comes.
OLD_AUTOSCALER = "RAY_enable_autoscaler_v2=0"

# a name has a letter, so that a mistyped address does not pass as one
HOST = rf"(?=.*[A-Za-z])[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|(?s:{PLACEHOLDER}.*)"

_NAME = form(
    "[A-Za-z0-9][-A-Za-z0-9_.]*",
    "contain only letters, digits, dashes and dots: files are named after it",
)
_PROVIDER = {
    "required": ["head_ip", "worker_ips"],
    "properties": {"type": {}, "head_ip": {}, "worker_ips": {}, "external_head_ip": {}},
    "additionalProperties": False,
}
FILE = Draft7Validator({"properties": {"cluster_name": _NAME, "provider": _PROVIDER}})


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return a file for Ray's launcher.

    All hosts belong to the cluster from beginning to end.
    """
    head, *workers = plan.hosts or ("<address of the head>", "<address of a worker>")
    commands = launcher_file.commands(plan)
    stop, start = commands["head_start_ray_commands"]
    return {
        "cluster_name": plan.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": launcher_file.login(plan),
        "min_workers": len(workers),
        "max_workers": len(workers),
        **commands,
        "head_start_ray_commands": [stop, start.replace("export ", f"export {OLD_AUTOSCALER} ", 1)],
    }


def check(findings: Findings) -> None:
    """Note mistakes in a file whose entries have the right types."""
    findings.check_schema(FILE)
    for name in ("head_node_type", "available_node_types", "docker"):
        if findings.at(name):
            findings.add(f"{name} is for rented machines. Leave it out (type: local).", name)
    provider = findings.within("provider")
    workers = provider.at("worker_ips") or ()
    for name in ("min_workers", "max_workers"):
        count = findings.at(name)
        text = f"{name} is {count}, but worker_ips has {len(workers)}:"
        # Ray takes what fits, and says so in a log at most
        if count is not None and count > len(workers):
            findings.add(f"{text} it must not be more.", name)
        elif count is not None and name == "max_workers" and count < len(workers):
            findings.add(f"{text} the others would remain unused.", name)
    for command in findings.at("head_start_ray_commands") or ():
        before, start, _ = command.partition(launcher_file.START)
        if start and OLD_AUTOSCALER not in before:
            findings.doubt(
                "Ray leaves out one of the workers. `raypool cluster harden` adds `export"
                f" {OLD_AUTOSCALER};` before `ray start`.",
                "head_start_ray_commands",
            )
    _check_hosts(provider, len(workers))


def _check_hosts(provider: Findings, num_workers: int) -> None:
    seen: set[object] = set()
    for keys in (("head_ip",), *(("worker_ips", number) for number in range(num_workers))):
        host = provider.at(*keys)
        name = host if isinstance(host, str) else ""
        address = None
        with contextlib.suppress(ValueError):  # it may be a host name
            address = ipaddress.ip_address(name)
        if host is not None and address is None and not re.fullmatch(HOST, name):
            provider.add(f"{host!r} is not an address, such as 10.0.0.7, or a host name.", *keys)
        elif host in seen:
            provider.add(
                f"{host} appears twice. List each machine once, including the head.", *keys
            )
        # a cluster of one machine may be called so
        elif num_workers and (name == "localhost" or (address and address.is_loopback)):
            provider.add(
                f"{host} is each machine's name for itself. Use the address that the others see.",
                *keys,
            )
        else:
            seen.add(host)
