"""Imports point downwards, and each kind of foreign package stands where DESIGN.md says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raypool"

# From the top down; a module may import from its own layer and from those below.
LAYERS = [
    ["cli"],
    ["cli_cluster", "cli_doctor", "cli_jobs", "cli_submit", "cli_sweep"],
    ["cli_errors", "cli_pipes"],
    ["interop"],
    ["batch_run"],
    ["batches"],
    ["job"],
    ["checkup", "demo", "testing", "journal.replaying"],
    ["simulation"],
    ["pool"],
    ["partition"],
    ["view"],
    ["training", "parfor"],
    ["loop", "mapping"],
    ["views"],
    ["train.scaling"],
    ["train.conductor"],
    ["train.run", "train.in_use", "train.warm", "train.managed"],
    ["train"],
    ["spmd.run"],
    ["spmd.composite", "spmd.rank"],
    ["spmd.context"],
    ["spmd"],
    ["engine.calls"],
    ["engine.engine"],
    ["engine"],
    ["cloud"],
    ["profile_files"],
    ["journal"],
    ["doctor", "sweep_files", "targets"],
    ["results", "checkpoint", "options", "shared", "waiting", "gathered", "metric_buffer"],
    ["views.report", "views.charts", "views.timeline"],
    ["views.curves"],
    ["views.cells", "views.kernel", "views.lanes", "views.words", "journal.files"],
    ["profiles"],
    ["profile_checks"],
    ["resources", "labels", "tls"],
    ["left_globals"],
    ["reports", "feed", "futures", "task", "queues", "queue_away", "queue_home", "store", "engine.exchange", "folders"],
    ["core", "reasons", "lean_future"],
    ["devices"],
    ["errors", "extras", "tables"],
]

RAY_MAY_STAND_IN = {
    "engine.agents",
    "engine.answers",
    "engine.node_agent",
    "engine.outside",
    "engine.quiet_import",
    "engine.ray_backend",
    "engine.ray_calls",
    "engine.ray_failures",
    "engine.ray_helpers",
    "engine.ray_nodes",
    "engine.ray_session",
    "engine.ray_values",
    "engine.seat",
    "engine.choosing",
    "engine.claims",
    "engine.demands",
    "engine.growth",
    "engine.shortages",
    "engine.survey",
    "engine.machine",  # asks Ray's accelerator managers of GPUs that are not NVIDIA's
    "engine.packing",
    "engine.worker",
}


IN_WORKERS = {
    "train.predict",
    "train.predictor",
    "train.samples",
    "train.session",
    "train.loop",
    "train.data",
    "train.batchnorm",
    "train.fit",
    "train.learner",
    "train.losses",
    "train.ranks",
    "train.snapshot",
    "train.spread",
    "train.guests",
    "train.managed",
}
"""They are imported by what needs torch or Ray Train anyway, and by nothing else."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def layer_of(module: str) -> int:
    best = max(
        ((len(entry), level) for level, layer in enumerate(LAYERS) for entry in layer if f"{module}.".startswith(f"{entry}.")),
        default=None,
    )
    assert best is not None, f"raypool.{module} stands in no layer: add it to LAYERS and to DESIGN.md"
    return best[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """All that is imported, also inside functions, but not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(ast.Module([node], []))


@pytest.mark.parametrize(("module", "tree"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_imports_point_downwards(module: str, tree: ast.Module) -> None:
    if module == "__init__":
        return  # the face of the package names everything
    own = layer_of(module)
    for name in imports(tree):
        if name.startswith("raypool."):
            target = name.removeprefix("raypool.")
            assert layer_of(target) >= own, f"raypool.{module} reaches up to {name}"


@pytest.mark.parametrize(("module", "tree"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_ray_and_torch_stand_where_they_may(module: str, tree: ast.Module) -> None:
    roots = {name.partition(".")[0] for name in imports(tree)}
    assert "ray" not in roots or module in RAY_MAY_STAND_IN or module.startswith(("train.", "cloud."))
    at_import = {name.partition(".")[0] for name in top_level_imports(tree)}
    if module != "demo" and module not in IN_WORKERS:
        assert not {"torch", "pandas", "sklearn", "matplotlib"} & at_import


def test_importing_raypool_imports_nothing_heavy() -> None:
    code = "import sys, raypool; print(sorted({'ray', 'torch', 'pandas', 'numpy', 'rich', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_worker_does_without_what_a_driver_needs() -> None:
    """Each process of a pool waits for its imports."""
    code = "import sys, raypool.engine.worker; print(sorted({'raypool.pool', 'raypool.core.scheduler'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_files_fit_into_one_sitting() -> None:
    long = {path.name: count for path in PACKAGE.rglob("*.py") if (count := len(path.read_text().splitlines())) > 400}
    assert not long, "over 400 lines: two rooms?"
