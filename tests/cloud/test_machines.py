"""What can be rented: AI Platform's table, AWS's own data, what holds for all catalogues, what is
said of what cannot be.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from raypool.cli.main import main
from raypool.cluster.machines import (
    NAMES,
    Catalogue,
    Machine,
    catalogue,
    choose_zone,
)
from raypool.errors import CloudError

AI_PLATFORM, GCE, AWS = (catalogue(name) for name in ("ai-platform-2021", "gce", "aws"))
CATALOGUES = [AI_PLATFORM, GCE, AWS]


def common(known: Catalogue, places: str, *kinds: str) -> set[str]:
    """Return the zones, or regions, that have GPUs of all these kinds."""
    return set.intersection(*(set(getattr(known.gpu(kind), places)) for kind in kinds))


# --- AI Platform Training -------------------------------------------------------------------------

# The document's own table: machine; then how many K80, P4, P100, T4 and V100 it may have.
TABLE = """
n1-standard-4  | 1, 2, 4, 8 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 8
n1-standard-8  | 1, 2, 4, 8 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 8
n1-standard-16 | 2, 4, 8    | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 2, 4, 8
n1-standard-32 | 4, 8       | 2, 4    | 2, 4    | 2, 4    | 4, 8
n1-standard-64 |            | 4       |         | 4       | 8
n1-standard-96 |            | 4       |         | 4       | 8
n1-highmem-2   | 1, 2, 4, 8 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 8
n1-highmem-4   | 1, 2, 4, 8 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 8
n1-highmem-8   | 1, 2, 4, 8 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 8
n1-highmem-16  | 2, 4, 8    | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 2, 4, 8
n1-highmem-32  | 4, 8       | 2, 4    | 2, 4    | 2, 4    | 4, 8
n1-highmem-64  |            | 4       |         | 4       | 8
n1-highmem-96  |            | 4       |         | 4       | 8
n1-highcpu-16  | 2, 4, 8    | 1, 2, 4 | 1, 2, 4 | 1, 2, 4 | 2, 4, 8
n1-highcpu-32  | 4, 8       | 2, 4    | 2, 4    | 2, 4    | 4, 8
n1-highcpu-64  | 8          | 4       | 4       | 4       | 8
n1-highcpu-96  |            | 4       |         | 4       | 8
"""
FIXED = {
    "a2-highgpu-1g": 1,
    "a2-highgpu-2g": 2,
    "a2-highgpu-4g": 4,
    "a2-highgpu-8g": 8,
    "a2-megagpu-16g": 16,
}


def rows() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    for line in TABLE.strip().splitlines():
        machine, *cells = (cell.strip() for cell in line.split("|"))
        counts = [tuple(map(int, cell.split(", "))) if cell else () for cell in cells]
        yield (
            machine,
            dict(zip(("K80", "P4", "P100", "T4", "V100"), counts, strict=True)) | {"A100": ()},
        )
    for machine, count in FIXED.items():
        yield machine, dict.fromkeys(("K80", "P4", "P100", "T4", "V100"), ()) | {"A100": (count,)}


def test_the_table_of_ai_platform_has_all_its_rows() -> None:
    assert len(list(rows())) == 22
    gpus = {
        machine
        for machine in AI_PLATFORM.machines
        if any(AI_PLATFORM.allowed(machine, gpu) for gpu in AI_PLATFORM.gpus) and "_" not in machine
    }
    assert gpus == {machine for machine, _ in rows()}


def test_limits_give_the_table_of_ai_platform() -> None:
    for machine, counts in rows():
        assert {kind: AI_PLATFORM.allowed(machine, kind) for kind in counts} == counts, machine


LEGACY = [
    ("standard_gpu", "K80", 1, "n1-standard-8"),
    ("complex_model_m_gpu", "K80", 4, "n1-standard-16"),
    ("complex_model_l_gpu", "K80", 8, "n1-standard-32"),
    ("standard_p100", "P100", 1, "n1-standard-8"),
    ("complex_model_m_p100", "P100", 4, "n1-standard-16"),
    ("standard_v100", "V100", 1, "n1-standard-8"),
    ("large_model_v100", "V100", 1, "n1-highmem-8"),
    ("complex_model_m_v100", "V100", 4, "n1-standard-16"),
    ("complex_model_l_v100", "V100", 8, "n1-standard-32"),
    ("standard", None, 0, "n1-standard-4"),
    ("complex_model_l", None, 0, "n1-highcpu-32"),
]


def test_legacy_names_stand_for_machines_that_can_have_these_gpus() -> None:
    for machine, gpu, gpus, compute in LEGACY:
        shape = AI_PLATFORM.machine(machine)
        assert (shape.gpu, shape.gpus, shape.compute) == (gpu, gpus, compute)
        AI_PLATFORM.check(machine, gpu, gpus)
        if gpu is not None:
            AI_PLATFORM.check(compute, gpu, gpus)
        like = GCE.machine(compute)
        assert (shape.vcpus, shape.memory_gb) == (like.vcpus, like.memory_gb)


REGIONS = """
    us-west1 us-west2 us-central1 us-east1 us-east4 northamerica-northeast1 southamerica-east1 europe-west1 europe-west2
    europe-west4 asia-south1 asia-southeast1 asia-east1 asia-northeast1 asia-northeast3 australia-southeast1
"""


def test_ai_platform_has_gpus_in_16_regions() -> None:
    assert len(REGIONS.split()) == 16
    assert {region for gpu in AI_PLATFORM.gpus for region in AI_PLATFORM.gpu(gpu).regions} == set(
        REGIONS.split()
    )


def test_kinds_that_are_all_in_a_region_may_share_none_of_its_zones() -> None:
    """The document's example: T4, K80 and P100 in us-central1."""
    kinds = ("T4", "K80", "P100")
    assert "us-central1" in common(AI_PLATFORM, "regions", *kinds)
    assert not [
        zone for zone in common(AI_PLATFORM, "zones", *kinds) if zone.startswith("us-central1")
    ]
    assert "us-central1-f" in common(AI_PLATFORM, "zones", "T4", "P100")


# --- AWS ------------------------------------------------------------------------------------------

[MOTO] = importlib.util.find_spec("moto").submodule_search_locations  # type: ignore[union-attr, misc]
RESOURCES = Path(MOTO) / "ec2" / "resources"

# How EC2 and Ray call the same GPU, where they do not agree.
RAYS_NAMES = {"RTX PRO Server 6000": "RTX-PRO-6000", "RTX PRO 4500": "RTX-PRO-4500"}


def described() -> dict[str, dict[str, Any]]:
    """What EC2's DescribeInstanceTypes has said."""
    with gzip.open(RESOURCES / "instance_types.json.gz") as file:
        types: dict[str, dict[str, Any]] = json.load(file)
    return types


def as_machine(name: str, said: dict[str, Any]) -> Machine:
    memory_gb = said["MemoryInfo"]["SizeInMiB"] / 1024
    if "GpuInfo" not in said:
        return Machine(name, said["VCpuInfo"]["DefaultVCpus"], memory_gb)
    [gpu] = said["GpuInfo"]["Gpus"]
    kind = RAYS_NAMES.get(gpu["Name"], gpu["Name"])
    if kind == "A100" and gpu["MemoryInfo"]["SizeInMiB"] > 41_000:
        kind = "A100-80G"
    return Machine(name, said["VCpuInfo"]["DefaultVCpus"], memory_gb, kind, gpu["Count"])


def test_machines_of_aws_are_as_amazon_describes_them() -> None:
    types = described()
    assert dict(AWS.machines) == {name: as_machine(name, types[name]) for name in AWS.machines}


def test_all_machines_of_aws_with_whole_nvidia_gpus_are_there() -> None:
    theirs = {
        name
        for name, said in described().items()
        if "GpuInfo" in said
        and said["GpuInfo"]["Gpus"][0]["Count"]
        and said["ProcessorInfo"]["SupportedArchitectures"] == ["x86_64"]
        and "metal" not in name
    }
    assert {name for name, machine in AWS.machines.items() if machine.gpus} == theirs
    assert len(theirs) > 50


def test_regions_of_aws_are_where_amazon_offers_the_machines() -> None:
    offers: dict[str, set[str]] = {name: set() for name in AWS.gpus}
    for path in (RESOURCES / "instance_type_offerings" / "region").glob("*.json.gz"):
        with gzip.open(path) as file:
            for offer in json.load(file):
                machine = AWS.machines.get(offer["InstanceType"])
                if machine is not None and machine.gpu is not None:
                    offers[machine.gpu].add(path.name.removesuffix(".json.gz"))
    assert {name: set(gpu.regions) for name, gpu in AWS.gpus.items()} == offers


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", CATALOGUES, ids=lambda known: known.name)
def test_catalogues_agree_with_themselves(known: Catalogue) -> None:
    assert known.sources
    for machine in known.machines.values():
        assert machine.vcpus > 0
        assert machine.memory_gb > 0
        assert (machine.gpu is None) == (machine.gpus == 0)
        assert machine.gpu is None or machine.gpu in known.gpus
    for gpu in known.gpus.values():
        is_fixed = any(machine.gpu == gpu.name for machine in known.machines.values())
        assert gpu.retired is not None or gpu.limits or is_fixed, f"nothing has {gpu.name}"
        assert {zone.rpartition("-")[0] for zone in gpu.zones} <= set(gpu.regions)
        assert [limit.gpus for limit in gpu.limits] == sorted(limit.gpus for limit in gpu.limits)


def test_names_of_gpus_are_rays_own() -> None:
    import ray.util.accelerators.accelerators as rays

    theirs = {getattr(rays, name) for name in dir(rays) if name.isupper()}
    ours = {gpu for known in CATALOGUES for gpu in known.gpus}
    assert ours - theirs == {"RTX-PRO-4500"}, "which Ray has no name for yet"


@given(data=st.data())
def test_what_is_allowed_passes_and_nothing_else_does(data: st.DataObject) -> None:
    known = data.draw(st.sampled_from(CATALOGUES))
    machine = data.draw(st.sampled_from(list(known.machines)))
    gpu = data.draw(
        st.sampled_from([gpu.name for gpu in known.gpus.values() if gpu.retired is None])
    )
    gpus = data.draw(st.integers(1, 17))
    if gpus in known.allowed(machine, gpu):
        known.check(machine, gpu, gpus)
    else:
        with pytest.raises(CloudError, match=machine):
            known.check(machine, gpu, gpus)


@given(data=st.data())
def test_a_smaller_machine_may_have_all_that_a_larger_one_may(data: st.DataObject) -> None:
    known = data.draw(st.sampled_from([AI_PLATFORM, GCE]))
    attachable = [machine for machine in known.machines.values() if machine.name.startswith("n1-")]
    small, large = data.draw(st.sampled_from(attachable)), data.draw(st.sampled_from(attachable))
    if small.vcpus <= large.vcpus and small.memory_gb <= large.memory_gb:
        for gpu in known.gpus.values():
            if gpu.retired is None:
                assert set(known.allowed(large.name, gpu.name)) <= set(
                    known.allowed(small.name, gpu.name)
                )


@given(data=st.data())
def test_places_that_are_named_have_the_gpus(data: st.DataObject) -> None:
    known = data.draw(st.sampled_from(CATALOGUES))
    kinds = [gpu.name for gpu in known.gpus.values() if gpu.retired is None]
    some = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    for place in common(known, "zones", *some) | common(known, "regions", *some):
        known.check_place(place, *some)


@given(name=st.text(max_size=20))
def test_no_name_whatever_does_anything_but_be_refused(name: str) -> None:
    for known in CATALOGUES:
        if name not in known.machines:
            with pytest.raises(CloudError, match="There is no machine"):
                known.machine(name)


# --- what is said of what cannot be ---------------------------------------------------------------


IMPOSSIBLE = [
    (
        "n1-standard-8",
        "T4",
        3,
        "n1-standard-8 cannot have 3 T4, only 1, 2 or 4. No machine has 3 T4; 1, 2 or 4 are possible.",
    ),
    (
        "n1-standard-32",
        "V100",
        2,
        "n1-standard-32 cannot have 2 V100, only 4 or 8. Machines with 2 V100 have up to 24 vCPUs and 156 GB.",
    ),
    (
        "n1-standard-64",
        "K80",
        8,
        ("n1-standard-64 cannot have 8 K80. Machines with 8 K80 have up to 64 vCPUs and 208 GB."),
    ),
    (
        "a2-highgpu-1g",
        "A100",
        2,
        (
            "a2-highgpu-1g cannot have 2 A100: it always comes with 1 A100. Machines with 2"
            " A100: a2-highgpu-2g."
        ),
    ),
    ("a2-highgpu-1g", None, 0, "a2-highgpu-1g always comes with 1 A100, but none is requested."),
    (
        "n1-standard-8",
        "A100",
        1,
        ("n1-standard-8 cannot have 1 A100. Machines with 1 A100: a2-highgpu-1g."),
    ),
    (
        "standard",
        "T4",
        1,
        "standard cannot have 1 T4. Machines with 1 T4 have up to 24 vCPUs and 156 GB.",
    ),
    (
        "n1-standard-8",
        "T5",
        1,
        (
            "There is no GPU 'T5' in the catalogue of 2021-03-18. Choose from: K80, P4, P100, T4,"
            " V100, A100."
        ),
    ),
    (
        "n1-standart-8",
        "T4",
        1,
        (
            "There is no machine 'n1-standart-8' in the catalogue of 2021-03-18. Did you mean"
            " n1-standard-8 or n1-standard-4?"
        ),
    ),
]


def test_what_cannot_be_is_refused_saying_what_would_do() -> None:
    for machine, gpu, gpus, said in IMPOSSIBLE:
        with pytest.raises(CloudError) as caught:
            AI_PLATFORM.check(machine, gpu, gpus)
        assert str(caught.value) == said


def test_spellings_of_gpus() -> None:
    spellings = {
        "T4": ("T4", "t4", "nvidia-tesla-t4", "NVIDIA_TESLA_T4", "Tesla T4"),
        "L4": ("nvidia-l4",),
        "A100": ("NVIDIA_TESLA_A100",),
        "A100-80G": ("nvidia-a100-80gb",),
        "H100": ("nvidia-h100-80gb",),
    }
    assert {kind: {GCE.gpu(name).name for name in names} for kind, names in spellings.items()} == {
        kind: {kind} for kind in spellings
    }
    assert GCE.gpu("t4").accelerator == "nvidia-tesla-t4"


def test_k80s_are_gone() -> None:
    with pytest.raises(
        CloudError, match=r"K80 GPUs have not been available since 2024-05-01\. Choose from: T4, "
    ):
        GCE.gpu("K80")


ELSEWHERE = [
    (
        GCE,
        "us-central1-c",
        ("T4", "B200"),
        "As of 2026-11-22, us-central1-c has no B200 GPUs. Nearby: us-central1-b.",
    ),
    (
        GCE,
        "africa-south1-a",
        ("V100",),
        "As of 2026-11-22, africa-south1-a has no V100 GPUs. `raypool cluster machines",
    ),
    (GCE, "us-west2", ("H100",), "As of 2026-11-22, us-west2 has no H100 GPUs."),
    (AWS, "eu-west-3", ("A100",), f"As of {AWS.date}, eu-west-3 has no A100 GPUs."),
]


def test_a_place_without_the_gpu_is_refused() -> None:
    for known, place, kinds, said in ELSEWHERE:
        with pytest.raises(CloudError) as caught:
            known.check_place(place, *kinds)
        assert str(caught.value).startswith(said)


def test_where_nothing_is_known_of_a_gpu_nothing_is_refused() -> None:
    assert not GCE.gpu("RTX-PRO-6000").zones
    GCE.check_place("us-central1-a", "RTX-PRO-6000")


def test_there_is_no_other_catalogue() -> None:
    with pytest.raises(CloudError, match="There is no catalogue 'azure'"):
        catalogue("azure")


# --- raypool cluster machines ---------------------------------------------------------------------


def run(*args: str) -> str:
    result = CliRunner().invoke(main, ["cluster", "machines", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_cli_lists_machines_that_may_have_a_gpu() -> None:
    lines = run("--gpu", "V100", "--catalogue", "ai-platform-2021").splitlines()
    assert lines[0].split() == ["machine", "vCPUs", "memory", "GPUs"]
    assert "n1-standard-32           32   120 GB  4 or 8 V100" in [line.rstrip() for line in lines]
    assert not any(line.startswith("a2-") for line in lines)
    assert lines[-2].startswith("V100 GPUs are in asia-east1-c, ")
    assert (
        lines[-1]
        == "This is catalogue ai-platform-2021 as of 2021-03-18: providers change their machines."
    )


def test_cli_lists_all_machines() -> None:
    for name in NAMES:
        known = catalogue(name)
        shown = [line.split()[0] for line in run("--catalogue", name).splitlines()]
        assert [machine for machine in shown if machine in known.machines] == list(known.machines)


def test_cli_gives_json() -> None:
    said = json.loads(run("--json", "--gpu", "nvidia-l4"))
    assert said["date"] == str(GCE.date)
    assert {"name": "g2-standard-24", "vcpus": 24, "memory_gb": 96, "gpus": {"L4": [2]}} in said[
        "machines"
    ]
    assert said["gpus"][0]["zones"] == list(GCE.gpu("L4").zones)


def test_cli_refuses_a_gpu_that_is_not_there() -> None:
    result = CliRunner().invoke(main, ["cluster", "machines", "--gpu", "T5"])
    assert result.exit_code == 2
    assert (
        "There is no GPU 'T5' in the catalogue of 2026-11-22. Choose from: T4, P4, "
        in result.output
    )


def test_errors_about_places_name_what_there_is_instead() -> None:
    with pytest.raises(CloudError, match=r"no T4 GPUs\. Nearby: us-west1-a, us-west1-b\.$"):
        GCE.check_place("us-west1-c", "T4")
    with pytest.raises(CloudError, match=r"not in the region us-east1\. Leave one of them out\.$"):
        choose_zone(("T4",), "us-east1", "us-central1-a")
    with pytest.raises(CloudError, match="RTX-PRO-6000: none"):
        choose_zone(("T4", "RTX-PRO-6000"), "us-central1", None)
