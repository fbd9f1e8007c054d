"""Training jobs: what their files ask for, and all that is refused of them, with the place and what
would be right.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import googleapiclient
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypool.cluster import begin, job_files
from raypool.cluster.documents import documents_of
from raypool.cluster.job_files import Training, overridden
from raypool.cluster.machines import catalogue, choose_zone, region_of
from raypool.cluster.plan import NodeGroup
from raypool.errors import CloudError

DOCUMENTED = """\
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-highcpu-16
  masterConfig:
    acceleratorConfig:
      count: 4
      type: NVIDIA_TESLA_T4
  workerCount: 9
  workerType: n1-highcpu-16
  workerConfig:
    acceleratorConfig:
      count: 4
      type: NVIDIA_TESLA_T4
  parameterServerCount: 3
  parameterServerType: n1-highmem-8
"""
"""The example of the document that describes such files."""


def read(text: str) -> Training:
    [document] = documents_of(text, "config.yaml")
    return job_files.read(document)


def custom(**settings: Any) -> str:
    """Return the file of a job whose machines are said; JSON is YAML."""
    return json.dumps(
        {"trainingInput": {"scaleTier": "CUSTOM", "masterType": "n1-standard-4", **settings}}
    )


def gpus(count: Any, kind: Any = "NVIDIA_TESLA_T4") -> dict[str, Any]:
    return {"acceleratorConfig": {"count": count, "type": kind}}


@functools.cache
def api() -> Mapping[str, Any]:
    """Return Google's own description of the API that took such files."""
    folder = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
    schemas: Mapping[str, Any] = json.loads((folder / "ml.v1.json").read_text())["schemas"]
    return {
        name.removeprefix("GoogleCloudMlV1__"): schema["properties"]
        for name, schema in schemas.items()
        if "properties" in schema
    }


# --- what files ask for ---------------------------------------------------------------------------


def test_the_documented_job_is_thirteen_machines_with_forty_gpus() -> None:
    training = read(DOCUMENTED)
    t4 = {"gpu": "T4", "gpus": 4}
    assert training.groups == (
        NodeGroup(name="head", machine="n1-highcpu-16", **t4),
        NodeGroup(name="worker", machine="n1-highcpu-16", least=9, most=9, **t4),
        NodeGroup(name="parameter-server", machine="n1-highmem-8", least=3, most=3),
    )
    assert (training.machines, training.gpus, training.kinds, training.notes) == (
        13,
        40,
        ("T4",),
        (),
    )


def test_the_settings_that_we_know_are_googles_and_none_is_missing() -> None:
    assert set(api()["TrainingInput"]) == set(job_files.TRAINING["properties"])
    assert set(api()["ReplicaConfig"]) == set(job_files.ROLE["properties"])
    assert set(job_files.SCHEMA.schema["properties"]) <= set(api()["Job"])
    assert {"CUSTOM", *job_files.TIERS} < set(api()["TrainingInput"]["scaleTier"]["enum"])


def test_every_gpu_of_the_api_is_known_in_both_spellings() -> None:
    kinds = [
        kind for kind in api()["AcceleratorConfig"]["type"]["enum"] if kind.startswith("NVIDIA")
    ]
    assert len(kinds) == 6
    for kind in kinds:
        spellings = {
            catalogue("ai-platform-2021").gpu(name).name
            for name in (kind, kind.lower().replace("_", "-"))
        }
        assert spellings == {kind.removeprefix("NVIDIA_TESLA_")}


def test_all_spellings_of_a_gpu_ask_for_the_same() -> None:
    for kind in ("nvidia-tesla-t4", "T4"):
        assert read(DOCUMENTED.replace("NVIDIA_TESLA_T4", kind)) == read(DOCUMENTED)


LEGACY = [
    ("standard_gpu", "n1-standard-8", "K80", 1),
    ("complex_model_m_gpu", "n1-standard-16", "K80", 4),
    ("complex_model_l_gpu", "n1-standard-32", "K80", 8),
    ("standard_p100", "n1-standard-8", "P100", 1),
    ("complex_model_m_p100", "n1-standard-16", "P100", 4),
    ("standard_v100", "n1-standard-8", "V100", 1),
    ("large_model_v100", "n1-highmem-8", "V100", 1),
    ("complex_model_m_v100", "n1-standard-16", "V100", 4),
    ("complex_model_l_v100", "n1-standard-32", "V100", 8),
    ("complex_model_m", "n1-highcpu-16", None, 0),
]


def test_legacy_machines_are_made_of_compute_engines() -> None:
    for legacy, machine, gpu, count in LEGACY:
        training = read(
            custom(
                masterType=legacy,
                workerType=legacy,
                workerCount=2,
                parameterServerType="standard",
                parameterServerCount=1,
            )
        )
        assert [(group.machine, group.gpu, group.gpus) for group in training.groups[:2]] == [
            (machine, gpu, count)
        ] * 2
        assert training.groups[2].machine == "n1-standard-4"
        assert training.gpus == 3 * count


def test_basic_gpu_is_one_machine_with_a_k80() -> None:
    training = read("trainingInput: {scaleTier: BASIC_GPU, region: us-east1}")
    assert training.groups == (NodeGroup(name="head", machine="n1-standard-8", gpu="K80", gpus=1),)
    assert (training.machines, training.region) == (1, "us-east1")


def test_todays_machines_are_taken_where_a_file_names_them() -> None:
    training = read(custom(masterType="g2-standard-24", masterConfig=gpus(2, "NVIDIA_L4")))
    assert (training.groups[0].gpu, training.gpus) == ("L4", 2)
    assert read(custom(masterType="a2-highgpu-2g")).gpus == 2, "which it always comes with"


def test_what_else_a_file_says_is_kept() -> None:
    training = read("""
        jobId: census_1
        labels: {owner: me}
        trainingInput:
          scaleTier: CUSTOM
          masterType: n1-standard-4
          masterConfig: {diskConfig: {bootDiskSizeGb: 500, bootDiskType: pd-ssd}}
          evaluatorCount: "2"
          evaluatorType: n1-standard-8
          region: europe-west4
          jobDir: gs://bucket/census
          pythonModule: trainer.task
          args: ["--steps", "100"]
          runtimeVersion: "2.11"
        """)
    assert (training.name, training.module, training.args) == (
        "census_1",
        "trainer.task",
        ("--steps", "100"),
    )
    assert (training.job_dir, training.region) == ("gs://bucket/census", "europe-west4")
    assert training.groups[0].disk_gb == 500
    assert training.groups[1] == NodeGroup(
        name="evaluator", machine="n1-standard-8", least=2, most=2
    )
    [note] = training.notes
    assert note.startswith("config.yaml, line 14: runtimeVersion is not used")


MACHINES = sorted(
    name for name, machine in catalogue("ai-platform-2021").machines.items() if not machine.compute
)


@settings(deadline=None)
@given(
    st.sampled_from(MACHINES),
    st.sampled_from(sorted(catalogue("ai-platform-2021").gpus)),
    st.integers(1, 17),
)
def test_a_machine_gets_the_gpus_that_the_catalogue_allows_and_no_others(
    machine: str, gpu: str, count: int
) -> None:
    text = custom(masterType=machine, masterConfig=gpus(count, gpu))
    if count in catalogue("ai-platform-2021").allowed(machine, gpu):
        assert read(text).groups[0].gpus == count
    else:
        with pytest.raises(CloudError, match=f"line 1: {machine} (cannot have|always comes with)"):
            read(text)


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "no mapping": ("[1, 2]", 1, "is not of type 'object'"),
    "nothing": ("{}", 1, "trainingInput is missing"),
    "nothing in it": (
        "trainingInput:",
        1,
        "trainingInput: None is not of type 'object'",
    ),
    "a list in it": (
        "trainingInput: [scaleTier]",
        1,
        "trainingInput: ['scaleTier'] is not of type 'object'",
    ),
    "misspelt outside": ("trainingInputs: {scaleTier: BASIC}", 1, "Did you mean trainingInput?"),
    "not indented": ("jobId: a\nscaleTier: BASIC", 1, "trainingInput is missing"),
    "misspelt": (
        "trainingInput:\n  scaleTier: BASIC\n  workerCounts: 3",
        3,
        "Did you mean workerCount or workerConfig?",
    ),
    "no tier": ("trainingInput: {region: us-east1}", 1, "scaleTier is missing"),
    "unknown tier": (
        "trainingInput:\n  scaleTier: STANDARD_1",
        2,
        "scaleTier is 'STANDARD_1'. Choose from: CUSTOM",
    ),
    "a TPU": ("trainingInput: {scaleTier: BASIC_TPU}", 1, "Did you mean BASIC_GPU or BASIC?"),
    "machines without CUSTOM": (
        "trainingInput:\n  scaleTier: BASIC_GPU\n  workerCount: 2",
        3,
        "workerCount needs scaleTier CUSTOM; BASIC_GPU is a single n1-standard-8",
    ),
    "no master": (
        "trainingInput: {scaleTier: CUSTOM}",
        1,
        "masterType is missing. Set the machine type, such as n1-highcpu-16",
    ),
    "a machine that is a number": (
        custom(masterType=8),
        1,
        "masterType: 8 is not of type 'string'",
    ),
    "workers without a kind": (custom(workerCount=2), 1, "workerType is missing"),
    "a kind without workers": (
        custom(workerType="n1-standard-4"),
        1,
        "workerType is set, but workerCount is not",
    ),
    "GPUs without workers": (
        custom(workerConfig=gpus(1)),
        1,
        "workerConfig is set, but workerCount is not",
    ),
    "workers, negative": (
        custom(workerCount=-2, workerType="n1-standard-4"),
        1,
        "workerCount is -2; it must be a whole number, 0 or more",
    ),
    "workers, a half": (
        custom(workerCount=1.5, workerType="n1-standard-4"),
        1,
        "workerCount is 1.5; it must be a whole number",
    ),
    "workers, true": (
        custom(workerCount=True, workerType="n1-standard-4"),
        1,
        "workerCount is True; it must be a whole number",
    ),
    "workers, a word": (
        custom(workerCount="many", workerType="n1-standard-4"),
        1,
        "workerCount is 'many'; it must be a whole number",
    ),
    "three T4": (
        DOCUMENTED.replace("count: 4", "count: 3", 1),
        5,
        "n1-highcpu-16 cannot have 3 T4, only 1, 2 or 4",
    ),
    "two V100 on 32 vCPUs": (
        custom(masterType="n1-standard-32", masterConfig=gpus(2, "NVIDIA_TESLA_V100")),
        1,
        "n1-standard-32 cannot have 2 V100, only 4 or 8. Machines with 2 V100 have up to 24 vCPUs and 156 GB",
    ),
    "K80 on 64 vCPUs": (
        custom(masterType="n1-standard-64", masterConfig=gpus(8, "NVIDIA_TESLA_K80")),
        1,
        "n1-standard-64 cannot have 8 K80. Machines with 8 K80 have up to 64 vCPUs and 208 GB",
    ),
    "two A100 on a machine with one": (
        custom(masterType="a2-highgpu-1g", masterConfig=gpus(2, "NVIDIA_TESLA_A100")),
        1,
        "it always comes with 1 A100. Machines with 2 A100: a2-highgpu-2g",
    ),
    "unknown GPU": (
        DOCUMENTED.replace("NVIDIA_TESLA_T4", "NVIDIA_TESLA_T5", 1),
        5,
        "There is no GPU 'NVIDIA_TESLA_T5'",
    ),
    "no count": (
        custom(masterConfig={"acceleratorConfig": {"type": "T4"}}),
        1,
        "count is missing",
    ),
    "no GPUs": (
        custom(masterConfig=gpus(0)),
        1,
        "count is 0; it must be a whole number, 1 or more",
    ),
    "half a GPU": (
        custom(masterConfig=gpus(0.5)),
        1,
        "count is 0.5; it must be a whole number, 1 or more",
    ),
    "no type": (
        custom(masterConfig={"acceleratorConfig": {"count": 1}}),
        1,
        "type is missing",
    ),
    "GPUs as a text": (
        custom(masterConfig={"acceleratorConfig": "4 T4"}),
        1,
        "acceleratorConfig: '4 T4' is not of type 'object'",
    ),
    "misspelt GPUs": (
        custom(masterConfig={"accelerator": {}}),
        1,
        "Did you mean acceleratorConfig?",
    ),
    "misspelt count": (
        custom(masterConfig={"acceleratorConfig": {"counts": 1, "type": "T4"}}),
        1,
        "Did you mean count?",
    ),
    "equipment as a list": (
        custom(masterConfig=[1]),
        1,
        "masterConfig: [1] is not of type 'object'",
    ),
    "two containers": (
        custom(masterConfig={"imageUri": "a"}, workerConfig={"imageUri": "b"}),
        1,
        "imageUri is 'b', but the master's is 'a': all must be the same",
    ),
    "GPUs on a legacy machine": (
        custom(masterType="standard_gpu", masterConfig=gpus(1)),
        1,
        "standard_gpu cannot have 1 T4: it always comes with 1 K80",
    ),
    "a disk of nothing": (
        custom(masterConfig={"diskConfig": {"bootDiskSizeGb": 0}}),
        1,
        "bootDiskSizeGb is 0; it must be a whole number, 1 or more",
    ),
    "hyperparameters": (
        custom(hyperparameters={"goal": "MAXIMIZE"}),
        1,
        "hyperparameters is not supported. In the script, call raypool.parfor",
    ),
    "a region that is a number": (
        DOCUMENTED + "  region: 7\n",
        16,
        "region: 7 is not of type 'string'",
    ),
    "a folder that is none": (
        DOCUMENTED + "  jobDir: bucket/run\n",
        16,
        "jobDir is 'bucket/run'; it must be gs://BUCKET/..., s3://BUCKET/...",
    ),
    "a bucket that is none": (
        DOCUMENTED + "  jobDir: gs://My_Bucket/run\n",
        16,
        "jobDir is 'gs://My_Bucket/run'; it must be gs://BUCKET/...",
    ),
    "arguments that are numbers": (
        DOCUMENTED + "  args: [--steps, 100]\n",
        16,
        "args is 100; it must be text: numbers need quotes",
    ),
    "twice": (
        DOCUMENTED + "  workerCount: 2\n",
        16,
        "'workerCount' appears twice (first in line 8)",
    ),
}


def test_what_is_wrong_is_refused_with_its_line_and_what_would_be_right() -> None:
    wrong = {}
    for name, (text, line, right) in REFUSED.items():
        with pytest.raises(CloudError) as raised:
            read(text)
        told = [each for each in str(raised.value).splitlines() if right in each]
        if len(told) != 1 or not told[0].startswith(f"config.yaml, line {line}: "):
            wrong[name] = str(raised.value)
    assert not wrong


def test_all_that_is_wrong_is_told_at_once_by_line() -> None:
    text = (
        DOCUMENTED.replace("count: 4", "count: 3")
        .replace("workerCount: 9", "workerCount: -9")
        .replace("parameterServerCount: 3", "parameterServerCount: x")
    )
    with pytest.raises(CloudError) as raised:
        read(text)
    lines = [line.partition(":")[0] for line in str(raised.value).splitlines()]
    assert lines == [f"config.yaml, line {number}" for number in (5, 8, 11, 14)]


# --- where ----------------------------------------------------------------------------------------


def test_two_kinds_of_gpu_need_a_zone_that_has_both() -> None:
    both = {"workerCount": 1, "workerType": "n1-standard-8"}
    job = custom(masterConfig=gpus(1), workerConfig=gpus(1, "NVIDIA_TESLA_P4"), **both)
    zone = choose_zone(read(job).kinds, "us-central1", None)
    assert all(zone in catalogue("gce").gpu(kind).zones for kind in ("T4", "P4"))
    [note] = read(job.replace('{"scaleTier"', '{"region": "us-west1", "scaleTier"')).notes
    assert note.startswith("config.yaml, line 1: As of 2026-11-22, us-west1 has no P4 GPUs.")


def test_a_zone_that_is_said_is_taken_and_one_that_cannot_be_chosen_is_to_be_said() -> None:
    assert choose_zone(("T4", "V100"), None, "us-east4-z") == "us-east4-z"
    with pytest.raises(CloudError, match="us-central1-a is not in the region us-east1"):
        choose_zone(("T4",), "us-east1", "us-central1-a")
    with pytest.raises(
        CloudError, match=r"No zone of us-east5 is known.* a zone with T4: .* with --zone"
    ):
        choose_zone(("T4",), "us-east5", None)
    with pytest.raises(CloudError, match="No region is set"):
        choose_zone(("T4",), None, None)


GCE = catalogue("gce")


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([gpu.name for gpu in GCE.gpus.values() if gpu.retired is None]),
        max_size=3,
        unique=True,
    ),
    st.sampled_from(sorted({region for gpu in GCE.gpus.values() for region in gpu.regions})),
)
def test_a_zone_that_is_chosen_has_all_kinds_and_is_in_its_region(
    kinds: list[str], region: str
) -> None:
    zones = (set(GCE.gpu(kind).zones) for kind in kinds or ("T4",))
    having = sorted(zone for zone in set.intersection(*zones) if region_of(zone) == region)
    try:
        zone = choose_zone(tuple(kinds), region, None)
    except CloudError:
        assert not having
    else:
        assert zone == having[0]


# --- options that win -----------------------------------------------------------------------------


def test_options_win_over_the_file_entry_by_entry() -> None:
    options = {
        "--worker-count": (("trainingInput", "workerCount"), 2),
        "--worker-accelerator": (
            ("trainingInput", "workerConfig", "acceleratorConfig"),
            {"count": 1, "type": "nvidia-tesla-t4"},
        ),
    }
    training = job_files.read(overridden(documents_of(DOCUMENTED, "config.yaml")[0], options))
    assert [(group.gpus, group.most) for group in training.groups] == [(4, 0), (1, 2), (0, 3)]


def test_what_an_option_says_wrongly_is_told_of_the_option() -> None:
    options = {
        "--worker-accelerator": (
            ("trainingInput", "workerConfig", "acceleratorConfig"),
            {"count": 3, "type": "T4"},
        )
    }
    with pytest.raises(
        CloudError, match=r"^--worker-accelerator: n1-highcpu-16 cannot have 3 T4, only 1, 2 or 4"
    ):
        job_files.read(overridden(documents_of(DOCUMENTED, "config.yaml")[0], options))


def test_an_option_cannot_hide_a_file_that_is_none() -> None:
    options = {"--worker-count": (("trainingInput", "workerCount"), 2)}
    with pytest.raises(CloudError, match=r"^config.yaml, line 1: trainingInput: 5 is not of type"):
        job_files.read(overridden(documents_of("trainingInput: 5", "config.yaml")[0], options))


def test_options_do_not_change_the_document_that_they_are_laid_over() -> None:
    [document] = documents_of(DOCUMENTED, "config.yaml")
    overridden(document, {"--region": (("trainingInput", "region"), "us-east1")})
    assert "region" not in document.content["trainingInput"]


# --- where outputs go -----------------------------------------------------------------------------


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    begin.try_out(f"{tmp_path}/new/run")
    assert list((tmp_path / "new/run").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CloudError,
        match=(
            rf"--job-dir {tmp_path}/file/run cannot be written to from this machine: .*Not a"
            r" directory"
        ),
    ):
        begin.try_out(f"{tmp_path}/file/run")
