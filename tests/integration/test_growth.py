"""Ray's real autoscaler, whose nodes are processes, makes a cluster larger for a pool, and smaller
after it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cloud.lab import Lab, give_token, is_allowed

pytestmark = [
    pytest.mark.skipif(
        not is_allowed(), reason="this machine lets nobody make namespaces, or has no `ip`"
    )
]

HEAD_ID = "f" * 51 + "00000"

HEAD_TYPE = "ray.head.default"  # so the provider of nodes that are processes calls it

ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "PYTHONWARNINGS": "ignore",
    "RAY_AUTH_MODE": "token",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_NODE_TYPE_NAME": HEAD_TYPE,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "RAY_enable_autoscaler_v2": "1",
}

COMMANDS = [
    f"{each}_commands"
    for each in (
        "initialization",
        "setup",
        "head_setup",
        "worker_setup",
        "head_start_ray",
        "worker_start_ray",
    )
]

SETTINGS = {
    "cluster_name": "growing",
    "provider": {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": HEAD_ID,
    },
    "max_workers": 3,
    "idle_timeout_minutes": 0.1,
    "upscaling_speed": 10,
    "head_node_type": HEAD_TYPE,
    "available_node_types": {
        HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 1, "object_store_memory": 80_000_000},
            "node_config": {},
            "max_workers": 3,
        },
    },
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "cluster_synced_files": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    **{name: [] for name in COMMANDS},
}

DRIVER = """
import json, logging, sys, time
import ray
from raypool import ResourceError, parpool

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
facts = {}

def alive():
    return sum(node["Alive"] for node in ray.nodes())

def number(count):
    return parpool(count, address="10.88.0.1:6379", quiet=True, start_timeout_s=300)

begun = time.monotonic()
ray.init("10.88.0.1:6379", log_to_driver=False, logging_level="ERROR")
facts["before"] = alive()
try:
    number(4)
except ResourceError as error:
    facts["never"] = str(error)
with number(3) as pool:
    facts["large"] = alive()
    facts["values"] = list(pool.parfor(lambda i: i * i, range(12)))
    facts["nodes"] = len(set(pool.parfeval_on_all(lambda: ray.get_runtime_context().get_node_id()).result(300)))
grown = time.monotonic()
while alive() > 1:
    assert time.monotonic() - grown < 300, "the nodes stay"
    time.sleep(0.2)
facts["after"] = alive()
facts["seconds"] = [round(grown - begun, 1), round(time.monotonic() - grown, 1)]
print(json.dumps(facts))
"""


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Switch on a machine with a head whose autoscaler may add three nodes with a core each.

    They have no GPUs: all are one machine in truth, so their GPUs would have the same numbers,
    which a pool refuses.
    """
    lab = Lab(tmp_path_factory.mktemp("lab"), ("head",))
    try:
        give_token([lab["head"]])
        settings = lab["head"].home / "settings.json"
        settings.write_text(json.dumps(SETTINGS))
        head = (
            "--head",
            "--port=6379",
            "--num-cpus=0",
            "--object-store-memory=80000000",
            "--include-dashboard=false",
        )
        lab.run(
            "head",
            "ray",
            "start",
            *head,
            "--disable-usage-stats",
            f"--autoscaling-config={settings}",
            **ENVIRONMENT,
        )
        yield lab
    finally:
        lab.close()


@pytest.mark.long
def test_a_cluster_grows_for_a_pool_and_shrinks_after_it(lab: Lab) -> None:
    """More than it can ever have is refused at once; what it can have is waited for, and this is
    said.
    """
    driver = lab.python("head", DRIVER, PYTHONWARNINGS="ignore", RAY_AUTH_MODE="token")
    try:
        out, said = driver.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        pytest.fail(lab.end(driver))
    assert driver.returncode == 0, f"{out}\n{said}"
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert facts["before"] == 1
    assert facts["never"].startswith(
        "CPU: requested 4, available 0; with all nodes that its autoscaler may add"
    )
    assert "would have 3" in facts["never"]
    assert facts["large"] == 4
    assert facts["nodes"] == 3
    assert facts["values"] == [i * i for i in range(12)]
    assert facts["after"] == 1
    assert "The cluster has no nodes for 3 CPU yet; its autoscaler is adding them" in said
