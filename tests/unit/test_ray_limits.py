"""What the control store costs is read of the one process that it is, and of nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.long


def test_an_actors_share_is_what_the_control_store_has_grown(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    limits, looks = benchmark_of("bench_ray_limits"), iter([1_000_000, 1_800_000, 2_200_000])
    store = SimpleNamespace(
        name=lambda: "gcs_server", memory_full_info=lambda: SimpleNamespace(uss=next(looks))
    )
    children = [SimpleNamespace(name=lambda: "raylet"), store]
    monkeypatch.setattr(
        limits.psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: children)
    )
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda: 1))
    asked = SimpleNamespace(options=lambda num_cpus: SimpleNamespace(remote=lambda: actor))
    monkeypatch.setattr(ray, "remote", lambda _: asked)
    monkeypatch.setattr(ray, "get", len)
    monkeypatch.setattr(limits, "BATCHES", 2)
    assert limits.actors_memory() == [100.0, 50.0]
    children.append(store)
    with pytest.raises(RuntimeError, match="2 processes named gcs_server among 3"):
        limits.control_store_process()
