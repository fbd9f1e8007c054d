"""`raypool gpus`: what it shows of GPUs, of none, and of those of which little is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from raypool import gpu_device_table
from raypool.cli.main import main
from raypool.gpus.devices import GpuDevice
from raypool.gpus.simulated import SimulatedGpus

GIB = 2**30
UUID = "GPU-00000000-0000-0000-0000-000000000001"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    """Two cards; somebody computes on the second."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    gpus = SimulatedGpus(tmp_path / "gpus", 2)
    gpus.change(
        1,
        used_bytes=5 * GIB,
        utilization=0.75,
        processes=[{"pid": 7, "used_bytes": 4 * GIB}, {"pid": 8, "used_bytes": None}],
    )
    return gpus


def show(gpus: SimulatedGpus, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["gpus", *arguments], obj=gpus)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.output


def test_a_line_for_each_card_and_who_is_on_it(gpus: SimulatedGpus) -> None:
    heading, first, second, more, below = (
        " ".join(line.split()) for line in show(gpus).splitlines()
    )
    assert heading == "GPU name memory utilization temperature processes compute mode"
    assert first == "* 0 Simulated GPU 0.0 of 16.0 GiB 0 % 30 °C none default"
    assert second == "* 1 Simulated GPU 5.0 of 16.0 GiB 75 % 30 °C 7 (4.0 GiB) default"
    assert more == "8"
    assert below == "* is visible here: all are."


@pytest.mark.parametrize(
    ("visible", "marks", "said"),
    [
        (UUID, ["", "*"], f"* is visible here, because of CUDA_VISIBLE_DEVICES='{UUID}'."),
        ("", ["", ""], "None of them is visible here: CUDA_VISIBLE_DEVICES='' hides them."),
    ],
)
def test_those_that_are_visible_here_are_marked(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch, visible: str, marks: list[str], said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shown = show(gpus)
    cards = [line for line in shown.splitlines() if "Simulated" in line]
    assert ["*" if "*" in line else "" for line in cards] == marks
    assert said in shown


def test_what_is_not_known_is_said_to_be_unknown(
    gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.break_down()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    _, first, second, below = show(gpus).splitlines()
    assert first.split() == ["?", "0", *["unknown"] * 6]
    assert second.split() == ["?", "1", *["unknown"] * 6]
    assert f"CUDA_VISIBLE_DEVICES='{UUID}' does not say which GPUs these are" in below


def test_a_divided_card_shows_its_instances(tmp_path: Path, gpus: SimulatedGpus) -> None:
    gpus.change(1, mig=["MIG-1", "MIG-2"])
    lines = show(gpus).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["0", "*", "MIG-1", "MIG-2"]
    assert lines[-1].startswith("* is visible here: one instance of a divided GPU")


def test_json_says_all_that_the_table_says(gpus: SimulatedGpus) -> None:
    gpus.change(0, temperature_c=None, processes=None, name=None)
    rows = json.loads(show(gpus, "--json"))
    table = gpu_device_table(inventory=gpus)
    assert [list(row) for row in rows] == [list(table)] * 2
    assert (rows[0]["temperature_c"], rows[0]["processes"], rows[0]["name"]) == (None, None, None)
    assert rows[1] == {
        "index": 1,
        "name": "Simulated GPU",
        "uuid": UUID,
        "total_bytes": 16 * GIB,
        "used_bytes": 5 * GIB,
        "free_bytes": 11 * GIB,
        "utilization": 0.75,
        "temperature_c": 30.0,
        "processes": {"7": 4 * GIB, "8": None},
        "mig": [],
        "compute_mode": "default",
        "compute_capability": [9, 0],
        "is_selected": True,
    }


def test_a_machine_without_a_gpu_says_so_and_what_to_do(tmp_path: Path) -> None:
    none = SimulatedGpus(tmp_path, 0)
    assert show(none).startswith("No GPU found: no NVIDIA driver responds")
    assert "nvidia-smi" in show(none)
    assert json.loads(show(none, "--json")) == []


def test_a_name_in_brackets_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "Card [red]" in show(SimulatedGpus(tmp_path, [GpuDevice(index=0, name="Card [red]")]))


def test_this_machine_is_asked_by_default() -> None:
    done = CliRunner().invoke(main, ["gpus", "--json"])
    assert done.exit_code == 0
    assert [row["index"] for row in json.loads(done.output)] == gpu_device_table()["index"].tolist()
