"""A cluster as Ray's launcher and its autoscaler make it: their own code, with a cloud that is a
fake (see `shell`, too).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Cluster:
    """A cluster as Ray's launcher sees it: `config` is what it has made of the file."""

    def __init__(self, content: dict[str, Any]) -> None:
        from ray.autoscaler._private import commands, providers

        self.config = commands._bootstrap_config(content, no_config_cache=True)
        self.provider = providers._get_node_provider(
            self.config["provider"], self.config["cluster_name"]
        )

    def up(self, file: Path, shell: Any) -> None:
        """Make the head; what would be run there, `shell` notes."""
        from ray.autoscaler._private import commands

        commands.get_or_create_head_node(
            self.config, str(file), False, False, True, None, _runner=shell
        )

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
        self.provider.create_node(
            self.config["available_node_types"][node_type]["node_config"], labels, count
        )

    def workers(self) -> list[str]:
        from ray.autoscaler import tags

        return self.provider.non_terminated_nodes({tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER})
