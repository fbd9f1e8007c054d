"""The files of clusters that come with raypool, and what they are made from: `python -m
tests.cloud.examples` makes them anew.
"""

from __future__ import annotations

from pathlib import Path

from raypool.cluster import packages
from raypool.cluster.cluster_file import lock_of, text_of
from raypool.cluster.plan import draft

ROOT = Path(__file__).parents[2]
INIT = "raypool cluster init --provider"
TRAIN = "python train.py"

PLANS = {
    "cluster.yaml": (draft("gcp", python="3.11"), f"{INIT} gcp"),
    "cloud_examples/aws.yaml": (draft("aws", python="3.11"), f"{INIT} aws"),
    "cloud_examples/on_prem.yaml": (
        draft("on-prem", python="3.11"),
        f"{INIT} on-prem",
    ),
    "cloud_examples/sky.yaml": (draft("sky", python="3.11"), f"{INIT} sky"),
    "cloud_examples/kubernetes/raycluster.yaml": (
        draft("kubernetes", python="3.11"),
        f"{INIT} kubernetes",
    ),
    "cloud_examples/kubernetes/rayjob.yaml": (
        draft("kubernetes", python="3.11", job=TRAIN),
        f"{INIT} kubernetes --job '{TRAIN}'",
    ),
}


def texts() -> dict[str, str]:
    """Return what stands in each file, and in the lock file beside it."""
    found = {}
    for name, (plan, command) in PLANS.items():
        file = Path(name)
        found[name] = text_of(plan, command, file.name)
        if lock_of(file).name in found[name]:
            found[str(lock_of(file))] = packages.lock_text(plan.packages, file.name)
    return found


if __name__ == "__main__":
    for name, text in texts().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
