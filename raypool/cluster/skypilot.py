"""Tasks for SkyPilot, which rents machines on any of its clouds: writes one, and checks one.

The task installs raypool, starts its own Ray beside SkyPilot's, and runs a command on the
first machine, whose pools use all machines.

Source: SkyPilot 0.14, "Task YAML" and "Running Ray workloads" in its documentation (the variables
SKYPILOT_NODE_...; its own Ray listens elsewhere and must not be stopped), `sky/utils/schemas.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from jsonschema import Draft7Validator

from raypool.cluster import launcher_file, software
from raypool.cluster.documents import NO_CLIENT, Findings
from raypool.cluster.plan import ClusterPlan

COMMAND = "python train.py"  # unless the plan has another

TOKEN = "RAY_AUTH_TOKEN"

GPUS = {"A100-80G": "A100-80GB", "RTX-PRO-4500": "RTXPRO4500", "RTX-PRO-6000": "RTXPRO6000"}
"""SkyPilot's names of GPUs, where they differ from Ray's."""

RUN = """\
set -e
export PATH="$HOME/raypool-venv/bin:$PATH" RAY_AUTH_MODE=token
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
export RAY_ADDRESS="$head:{port}"
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  # the head may still be starting
  until ray start --disable-usage-stats --address="$RAY_ADDRESS"; do sleep 5; done
  exit
fi
export {health}
ray start --disable-usage-stats --head --port={port} --dashboard-host=127.0.0.1
python -m raypool.cluster.begin --machines "$SKYPILOT_NUM_NODES" -- -c pass
{command}
"""


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return the task of a plan: as many machines as its one group of workers has at most.

    Example:
        >>> from raypool.cluster.plan import NodeGroup
        >>> worker = NodeGroup(name="worker", gpu="T4", gpus=4, most=2, spot=True)
        >>> head = NodeGroup(name="head")
        >>> plan = ClusterPlan(name="lab", provider="sky", head=head, workers=(worker,))
        >>> task = write(plan)
        >>> task["num_nodes"], task["resources"]["accelerators"], task["resources"]["use_spot"]
        (2, {'T4': 4}, True)
    """
    [group] = plan.workers
    minutes = round(plan.idle_shutdown_minutes)
    resources: dict[str, Any] = {"disk_size": group.disk_gb, "use_spot": group.spot}
    if group.gpu:
        resources["accelerators"] = {GPUS.get(group.gpu, group.gpu): group.gpus}
    if minutes:
        resources["autostop"] = {"idle_minutes": minutes, "down": True}
    health = " ".join(launcher_file.HEALTH_CHECKS)
    mounts = launcher_file.package_mounts(plan)
    # without the last command: SkyPilot's own shells keep their PATH
    setup = ["set -e", *launcher_file.setup_commands(plan)[:-1]]
    return {
        "name": plan.name,
        "num_nodes": group.most,
        "resources": resources,
        "workdir": ".",
        "file_mounts": mounts,
        "secrets": {TOKEN: None},
        "setup": "\n".join(setup) + "\n",
        "run": RUN.format(port=launcher_file.PORT, health=health, command=plan.job or COMMAND),
    }


def is_task(content: object) -> bool:
    """Whether it is a task for SkyPilot."""
    return isinstance(content, dict) and "run" in content and "provider" not in content


def check(findings: Findings) -> None:
    """Note what SkyPilot refuses in a task, and what leaves Ray open."""
    findings.check_filled_in()
    if find_spec("sky") is None:
        findings.doubt(NO_CLIENT.format("skypilot"))
    else:
        from sky.utils import schemas

        findings.check_schema(Draft7Validator(schemas.get_task_schema()))
    run, setup = str(findings.at("run")), str(findings.at("setup"))
    if launcher_file.START in run and "RAY_AUTH_MODE=token" not in run:
        findings.doubt("Ray starts without a token: anyone who can reach it can run code.", "run")
    given = findings.at("resources", "accelerators")
    names = {theirs: ours for ours, theirs in GPUS.items()}
    for gpu in [given] if isinstance(given, str) else given if isinstance(given, dict) else ():
        name = str(gpu).partition(":")[0]  # "A100:8" is one form of it
        kind = names.get(name, name)
        if "--torch-backend=auto" in setup and software.why_no_kernels(kind, "cu130"):
            text = f"the newest torch has no kernels for {kind} GPUs. Use --torch-backend=cu126."
            findings.doubt(text, "setup")
