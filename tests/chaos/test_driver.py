"""The driver of a durable sweep is ended at random moments, and its workers too: what was there is
not lost, nor run again.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypool import JournalError, load_results, parpool
from raypool.task import current_task

SWEEP = """
import os, random, signal, threading, uuid
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever has started the tests may ignore it

from raypool import current_task, parpool, report

folder, generation = Path(os.environ["FOLDER"]), os.environ["GENERATION"]
address = os.environ.get("ADDRESS")


def fn(item):
    (folder / "begun" / f"{generation}-{item['number']}-{os.getpid()}-{uuid.uuid4().hex}").touch()
    report(number=item["number"], half=1)
    threading.Event().wait(item["seconds"])
    report(number=item["number"], half=2)
    if item["fails"]:
        raise ValueError(item["number"])
    return current_task().index, random.random(), bytes(item["size"])


items = eval((folder / "items").read_text())
options = {"address": address} if address else {"profile": "threads"}
with parpool(2, retries=100, quiet=True, trace=os.environ["TRACE"], **options) as pool:
    results = pool.parfor(fn, items, seed=7, on_error="collect", run_dir=folder / "run", rerun=os.environ["RERUN"])
print("complete", len(results), len(results.errors))
"""


def make_items(chance: random.Random, count: int) -> list[dict[str, Any]]:
    longest = chance.choice([0.02, 0.1, 0.3])
    return [
        {
            "number": number,
            "seconds": longest * chance.random() ** 2,
            "fails": chance.random() < 0.1,
            "size": chance.choice([0, 10, 3_000_000]) if chance.random() < 0.1 else 0,
        }
        for number in range(count)
    ]


def expected_values(items: list[dict[str, Any]]) -> list[Any]:
    """What the same sweep gives where nobody disturbs it."""

    def fn(item: dict[str, Any]) -> tuple[int, float, bytes]:
        return current_task().index, random.random(), bytes(item["size"])

    with parpool(profile="inline", quiet=True) as pool:
        return list(pool.parfor(fn, items, seed=7))


class Sweep:
    """One durable sweep, and those who have worked at it one after the other."""

    def __init__(self, folder: Path, chance: random.Random, count: int) -> None:
        self.folder = folder
        self.items = make_items(chance, count)
        self.expected = expected_values(self.items)
        self.rerun = chance.choice(["failed", "missing"])
        self.generation = 0
        (folder / "begun").mkdir()
        (folder / "items").write_text(repr(self.items))

    def start(self, start_python: Callable[..., Any], trace: Path, address: str | None) -> Any:
        self.generation += 1
        where = {
            "FOLDER": str(self.folder),
            "TRACE": str(trace),
            "RERUN": self.rerun,
            "GENERATION": str(self.generation),
        }
        return start_python(SWEEP, **where, **({} if address is None else {"ADDRESS": address}))

    def begun(self) -> list[tuple[int, int]]:
        """(item, process) of what the last driver has begun."""
        notes = [path.name.split("-") for path in (self.folder / "begun").iterdir()]
        return [
            (int(number), int(pid))
            for generation, number, pid, _ in notes
            if int(generation) == self.generation
        ]

    def stored(self) -> dict[int, str]:
        """What stands in the journal (status by item); each of them is right."""
        try:
            results = load_results(self.folder / "run")
        except JournalError:  # nobody has come as far as to begin it
            return {}
        if not len(results):  # it was begun, but no item was noted
            return {}
        rows = results.to_frame()
        seen = {}
        for place, (item, status) in enumerate(zip(rows["number"], rows["status"], strict=True)):
            if status == "missing":
                continue
            seen[int(item)] = status
            assert status == ("failed" if self.items[item]["fails"] else "finished")
            if status == "finished":
                assert results[place] == self.expected[item]
            else:
                assert (type(results.errors[place]), results.errors[place].args) == (
                    ValueError,
                    (item,),
                )
        assert rows["number"].is_unique, "an item stands there twice"
        return seen

    def check_not_again(self, before: dict[int, str]) -> None:
        """Nothing that was there when the last driver began was run by it."""
        kept = {
            item
            for item, status in before.items()
            if status == "finished" or self.rerun == "missing"
        }
        assert not kept & {item for item, _ in self.begun()}, "an item that was there has run again"


def workers_of(process: Any, sweep: Sweep) -> list[int]:
    """The processes, beside the driver, that have begun something and still run."""
    noted = {pid for _, pid in sweep.begun()} - {process.pid}
    if not noted:
        return []
    with contextlib.suppress(psutil.Error):
        return [
            pid
            for pid in noted
            if psutil.pid_exists(pid) and "ray" in " ".join(psutil.Process(pid).cmdline())
        ]
    return []


def strike(
    process: Any, begun: int, sweep: Sweep, chance: random.Random, eventually: Callable[..., bool]
) -> None:
    """End the driver when it has begun so many items, and a moment has passed; with 0, somewhere in
    its start.
    """
    assert eventually(lambda: len(sweep.begun()) >= begun or process.process.poll() is not None)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.process.wait(chance.uniform(0, 0.1 if begun else 3.0))
    process.process.send_signal(
        chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    )
    process.process.wait(300)


def play(
    sweep: Sweep, chance: random.Random, num_kills: int, start: Callable[[], Any], tools: Any
) -> None:
    eventually, make_killer = tools
    before: dict[int, str] = {}
    for _ in range(num_kills):
        process = start()
        with make_killer(chance, lambda process=process: workers_of(process, sweep), (0.2, 1.0), 2):
            strike(
                process,
                chance.randrange(len(sweep.items) - len(before) + 1),
                sweep,
                chance,
                eventually,
            )
        now = sweep.stored()
        assert set(now) >= set(before), "what was there is gone"
        sweep.check_not_again(before)
        before = now
    last = start().finish()
    assert last.returncode == 0, last.stderr
    assert last.stdout.split() == [
        "complete",
        str(len(sweep.items)),
        str(sum(item["fails"] for item in sweep.items)),
    ]
    sweep.check_not_again(before)
    assert sorted(sweep.stored()) == list(range(len(sweep.items)))


def check_metrics(sweep: Sweep) -> None:
    """What each item has reported in the attempt that counts is there once."""
    results = load_results(sweep.folder / "run")
    told, rows = results.metrics, results.to_frame()
    counted = Counter(zip(told["number"], told["half"], strict=True))
    assert all(counted[number, half] >= 1 for number in rows["number"] for half in (1, 2))


def test_a_sweep_survives_drivers_that_are_ended(
    seed: int,
    tmp_path: Path,
    start_python: Any,
    eventually: Any,
    make_killer: Any,
    make_trace: Callable[[], Path],
) -> None:
    chance = random.Random(seed)
    sweep = Sweep(tmp_path, chance, 60)
    play(
        sweep,
        chance,
        3,
        lambda: sweep.start(start_python, make_trace(), None),
        (eventually, make_killer),
    )
    check_metrics(sweep)


@pytest.mark.seeds(1)
def test_a_sweep_survives_drivers_and_workers_that_are_ended(
    ray_session: None,
    seed: int,
    tmp_path: Path,
    start_python: Any,
    eventually: Any,
    make_killer: Any,
    make_trace: Callable[[], Path],
) -> None:
    """On a Ray that stays, so that it also shows what a killed driver leaves behind there (see
    `nothing_is_left`).
    """
    import ray

    chance = random.Random(seed)
    sweep = Sweep(tmp_path, chance, 60)
    address = ray.get_runtime_context().gcs_address
    play(
        sweep,
        chance,
        3,
        lambda: sweep.start(start_python, make_trace(), address),
        (eventually, make_killer),
    )
    check_metrics(sweep)
