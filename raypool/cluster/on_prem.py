"""Clusters on premises, of existing machines: writes the file for Ray's launcher, and checks one.

Source: Ray's `autoscaler/_private/local/config.py` and `node_provider.py`, and "Launching an
On-Premise Cluster" in its documentation.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from raypool.cluster import launcher_file
from raypool.cluster.documents import PLACEHOLDER, Findings
from raypool.cluster.plan import ClusterPlan

# Ray's newer autoscaler counts the head of such a cluster as a worker: the last worker never comes.
OLD_AUTOSCALER = "RAY_enable_autoscaler_v2=0"

PROVIDER = ("type", "head_ip", "worker_ips", "external_head_ip")

# a name has a letter, so that a mistyped address does not pass as one
HOST = rf"(?=.*[A-Za-z])[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|(?s:{PLACEHOLDER}.*)"

NOT_HERE = ("head_node_type", "available_node_types", "docker")
"""Entries for machines that are made."""


def write(plan: ClusterPlan, flags: Iterable[str] = ()) -> dict[str, Any]:
    """Return a file for Ray's launcher, with more options of `ray start` in `flags`.

    All hosts belong to the cluster from beginning to end.

    Example:
        >>> from raypool.cluster.plan import NodeGroup
        >>> head = NodeGroup(name="head")
        >>> hosts = ("10.0.0.1", "10.0.0.2")
        >>> plan = ClusterPlan(name="lab", provider="on-prem", head=head, workers=(), hosts=hosts)
        >>> write(plan)["provider"]
        {'type': 'local', 'head_ip': '10.0.0.1', 'worker_ips': ['10.0.0.2']}
    """
    head, *workers = plan.hosts or ("<address of the head>", "<address of a worker>")
    commands = launcher_file.commands(plan, flags)
    stop, start = commands["head_start_ray_commands"]  # no machines to delete, so no more
    return {
        "cluster_name": plan.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": (
            {"ssh_user": plan.ssh_user}
            | ({"ssh_private_key": plan.ssh_key} if plan.ssh_key else {})
        ),
        "min_workers": len(workers),
        "max_workers": len(workers),
        **commands,
        "head_start_ray_commands": [stop, start.replace("export ", f"export {OLD_AUTOSCALER} ", 1)],
    }


def check(findings: Findings) -> None:
    """Note mistakes in a file whose entries have the right types."""
    if findings.at(("provider", "coordinator_address")):
        text = (
            "coordinator_address is for clusters that share machines, unknown here; name head_ip"
            " and worker_ips."
        )
        findings.add(("provider", "coordinator_address"), text)
        return
    findings.check_keys(("provider",), PROVIDER)
    for name in NOT_HERE:
        if findings.at((name,)):
            findings.add(
                (name,),
                f"{name} is for machines that are made; these are there (type: local). Leave it"
                " out.",
            )
    findings.check_form(
        ("cluster_name",),
        "[A-Za-z0-9][-A-Za-z0-9_.]*",
        "cluster_name is {}; files are named after it: letters, digits, dashes and dots.",
    )
    _check_hosts(findings)
    there = len(findings.at(("provider", "worker_ips")) or ())
    for name in ("min_workers", "max_workers"):
        count = findings.at((name,))
        text = f"{name} is {count}, and worker_ips names {there}:"
        # Ray takes what fits, and says so in a log at most
        if count is not None and count > there:
            findings.add((name,), f"{text} that many at most.")
        elif count is not None and name == "max_workers" and count < there:
            findings.add((name,), f"{text} the others would never be used.")
    for command in findings.at(("head_start_ray_commands",)) or ():
        before, start, _ = command.partition(launcher_file.START)
        if start and OLD_AUTOSCALER not in before:
            text = (
                "Ray leaves out one of the workers. `raypool cluster harden` adds `export"
                f" {OLD_AUTOSCALER};` before `ray start`."
            )
            findings.doubt(("head_start_ray_commands",), text)


def _check_hosts(findings: Findings) -> None:
    head, workers = (findings.at(("provider", name)) for name in ("head_ip", "worker_ips"))
    for name, value, what in (
        ("head_ip", head, "the address of the machine that the others join"),
        ("worker_ips", workers, "a list with the addresses of the other machines, or []"),
    ):
        if value is None:
            findings.add(("provider",), f"{name} is missing in provider: {what}.")
    seen: set[object] = set()
    hosts = [(("head_ip",), head), *((("worker_ips", n), it) for n, it in enumerate(workers or ()))]
    for keys, host in hosts:
        name = host if isinstance(host, str) else ""
        address = None
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(name)
        wrong = None
        if host is not None and address is None and not re.fullmatch(HOST, name):
            wrong = f"{host!r} is neither an address, such as 10.0.0.7, nor the name of a machine."
        elif host in seen:
            wrong = (
                f"{host} is here for the second time: each machine is named once, also the head."
            )
        # one machine by itself may be called so
        elif workers and (name == "localhost" or (address and address.is_loopback)):
            wrong = f"{host} is each machine's own name for itself; name it as the others see it."
        if wrong is not None:
            findings.add(("provider", *keys), wrong)
        else:
            seen.add(host)
