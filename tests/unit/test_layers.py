"""Imports point downwards, and each kind of foreign package stands where DESIGN.md says."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "raypool"

# From the top down; a module may import from its own layer and from those below.
LAYERS = [
    ["__main__", "cli"],
    ["cli_cluster", "cli_doctor", "cli_jobs", "cli_submit", "cli_sweep"],
    ["cli_errors", "cli_pipes"],
    ["interop"],
    ["batch_run"],
    ["batches"],
    ["job"],
    ["doctor", "demo", "testing", "journal.replaying"],
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
    ["sweep_files", "targets"],
    ["results", "checkpoint", "options", "shared", "waiting", "gathered", "metric_buffer"],
    ["views.report", "views.charts", "views.timeline"],
    ["views.curves"],
    ["views.cells", "views.console", "views.kernel", "views.lanes", "views.words", "journal.files"],
    ["profiles"],
    ["left_globals", "by_value"],
    ["reports", "feed", "futures", "task", "queues", "queue_away", "queue_home", "store", "engine.exchange", "folders"],
    ["core", "lean_future"],
    ["devices"],
    ["counts", "errors", "tables", "captured", "users_code"],
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
    "engine.own_memory",
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
    "train.managed",
    "train.managed_ranks",
}
"""They are imported by what needs torch or Ray Train anyway, and by nothing else."""

HEAVY = {"torch", "pandas", "sklearn", "matplotlib"}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found.append((name.removesuffix(".__init__"), ast.parse(path.read_text())))
    return found


@functools.cache
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


def test_imports_point_downwards() -> None:
    """The face of the package names everything; all other modules know only what is below them."""
    upward = [
        f"{module}: {name}"
        for module, tree in modules()
        if module != "__init__"
        for name in imports(tree)
        if name.startswith("raypool.") and layer_of(name.removeprefix("raypool.")) < layer_of(module)
    ]
    assert not upward


def test_ray_and_torch_are_imported_only_where_they_may() -> None:
    wrong = []
    for module, tree in modules():
        if not (module in RAY_MAY_STAND_IN or module.startswith(("train.", "cloud."))):
            wrong += [f"{module}: {name}" for name in imports(tree) if name.partition(".")[0] == "ray"]
        if module != "demo" and module not in IN_WORKERS:
            wrong += [f"{module}: {name}" for name in top_level_imports(tree) if name.partition(".")[0] in HEAVY]
    assert not wrong


def test_users_and_workers_do_not_wait_for_imports_that_they_do_not_need() -> None:
    code = """if True:
        import sys
        import raypool
        print(sorted({'ray', 'torch', 'pandas', 'numpy', 'rich', 'click'} & set(sys.modules)))
        import raypool.engine.worker
        print(sorted({'raypool.pool', 'raypool.core.scheduler'} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
