"""What Ray's launcher does, with clouds that are fakes: its own code, but ssh and rsync only say what they would run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


class Shell:
    """Stands in for the module `subprocess` where Ray runs ssh and rsync; `lines` are what it was to run."""

    PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
    CalledProcessError = subprocess.CalledProcessError

    def __init__(self) -> None:
        self.lines: list[str] = []

    def check_call(self, command: list[str], **_: Any) -> int:
        self.lines.append(" ".join(command))
        return 0

    call = check_call

    def check_output(self, command: list[str], **_: Any) -> bytes:
        self.lines.append(" ".join(command))
        return b"up"


class Cluster:
    """A cluster as Ray's launcher sees it: `config` is what it has made of the file."""

    def __init__(self, content: dict[str, Any]) -> None:
        from ray.autoscaler._private import commands, providers

        providers._clear_provider_cache()
        self.config = commands._bootstrap_config(content, no_config_cache=True)
        self.provider = providers._get_node_provider(self.config["provider"], self.config["cluster_name"])

    def up(self, file: Path) -> Shell:
        """Make the head."""
        from ray.autoscaler._private import commands

        shell = Shell()
        commands.get_or_create_head_node(self.config, str(file), False, False, True, None, _runner=shell)
        return shell

    def add_workers(self, node_type: str, count: int) -> None:
        """Make workers, as the autoscaler on the head does."""
        from ray.autoscaler import tags

        labels = {
            tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER,
            tags.TAG_RAY_USER_NODE_TYPE: node_type,
            tags.TAG_RAY_NODE_NAME: f"ray-{self.config['cluster_name']}-worker",
            tags.TAG_RAY_NODE_STATUS: tags.STATUS_UNINITIALIZED,
            tags.TAG_RAY_LAUNCH_CONFIG: "x",
        }
        self.provider.create_node(self.config["available_node_types"][node_type]["node_config"], labels, count)

    def workers(self) -> list[str]:
        from ray.autoscaler import tags

        return self.provider.non_terminated_nodes({tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER})
