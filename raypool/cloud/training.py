"""What a training job needs, whoever said it: its machines, where its outputs go, what runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raypool.cloud.plan import ClusterPlan, NodeGroup

GROUPS = {"master": "head", "worker": "worker", "parameterServer": "parameter-server", "evaluator": "evaluator"}
"""What the roles of a training job are called as groups of machines; nodes have it as their label "raypool/role"."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training job that has been checked.

    Args:
        groups: Its machines, the master first; the others are always as many as their `most`.
        region: Where they are to be ("us-central1"); None: nobody has said.
        name: What it is called; None: nobody has said.
        job_dir: Where its outputs go; None: nobody has said.
        module: The Python module to run; None: nobody has said.
        args: What that is given.
        notes: Which of its settings change nothing, and why.
    """

    groups: tuple[NodeGroup, ...]
    region: str | None = None
    name: str | None = None
    job_dir: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of GPU that are asked for, each once.

        Example:
            >>> workers = NodeGroup(name="worker", machine="n1-standard-8", gpu="T4", gpus=2, least=3, most=3)
            >>> training = Training(groups=(NodeGroup(name="head", machine="n1-standard-4"), workers))
            >>> training.kinds, training.machines, training.gpus
            (('T4',), 4, 6)
        """
        return tuple(dict.fromkeys(group.gpu for group in self.groups if group.gpu is not None))

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return 1 + sum(group.most for group in self.groups[1:])

    @property
    def gpus(self) -> int:
        """How many GPUs they have together."""
        head, *workers = self.groups
        return head.gpus + sum(group.gpus * group.most for group in workers)

    def plan(
        self, *, name: str, project: str | None, zone: str, spot: bool = False, packages: tuple[str, ...] = ()
    ) -> ClusterPlan:
        """Return the cluster that the job runs on.

        Args:
            name: What to call the cluster.
            project: The project that pays; None: to be filled in.
            zone: Where; see `raypool.cloud.machines.choose_zone`.
            spot: Whether the provider may take machines back; never the master's.
            packages: What is installed on every machine.
        """
        head, *workers = self.groups
        return ClusterPlan(
            name=name,
            provider="gcp",
            head=head,
            workers=tuple(replace(group, spot=spot) for group in workers),
            project=project,
            zone=zone,
            packages=packages,
        )
