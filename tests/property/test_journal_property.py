"""Whatever is damaged in a journal: it opens, all that it gives back is right, and what is lost is
said.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypool import load_results
from raypool.journal.journal import Journal
from raypool.journal.keys import content_key
from raypool.journal.plain import decode, encode
from raypool.journal.rows import Outcome
from raypool.journal.schema import PAGE_BYTES

FILES = ("journal.sqlite", "journal.sqlite-wal")


class Sample(NamedTuple):
    """A journal as it is found after `kill -9`: some of it in the database, some in its log."""

    files: dict[str, bytes]
    values: dict[str, Any]
    items: dict[str, Any]


def outcome(number: int) -> Outcome:
    key = f"{number:024x}"
    facts = {
        "started_at": 1000.0 + number,
        "duration_s": float(number),
        "worker": number % 4,
        "host": "here",
    }
    if number % 7 == 3:
        return Outcome(key, 1, "failed", error=ValueError(f"number {number}"), **facts)
    # a set is a pickle
    value = {"loss": number / 8, "name": f"model {number}"} if number % 5 else (number, {number})
    return Outcome(key, 1, "finished", value=value, **facts)


def make_sample(folder: Path) -> Sample:
    outcomes = [outcome(number) for number in range(60)]
    items = {one.key: {"lr": index / 4} for index, one in enumerate(outcomes)}
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        journal.note_items((key, index, item) for index, (key, item) in enumerate(items.items()))
        assert not journal.write(outcomes[:45])
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        journal.note_items((key, index, item) for index, (key, item) in enumerate(items.items()))
        for start in range(45, 60, 5):
            assert not journal.write(outcomes[start : start + 5])
        files = {name: (folder / name).read_bytes() for name in FILES}
    values = {one.key: one.value if one.error is None else str(one.error) for one in outcomes}
    return Sample(files, values, items)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Give a folder that costs nothing to write to, where there is one."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def sample(memory: Path) -> Sample:
    return make_sample(memory / "sample")


def lay_out(sample: Sample, folder: Path, name: str, data: bytes) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for other, content in {**sample.files, name: data}.items():
        path = folder / other
        path.write_bytes(content)
        path.chmod(0o600)
    return folder


def check(sample: Sample, folder: Path, said: Callable[[], list[str]], where: str) -> None:
    """Open a damaged journal in both ways, and see that what comes out is right."""
    results = load_results(folder)
    frame_status = [row.status for row in results._rows]
    right_items = {json.dumps(item): key for key, item in sample.items.items()}
    for index, status in enumerate(frame_status):
        if results._items[index] is None:
            continue  # its outcome is there, the item itself is lost
        key = right_items[json.dumps(results._items[index])]
        if status == "finished":
            assert results[index] == sample.values[key], where
        elif status == "failed":
            assert str(results.errors[index]) == sample.values[key], where
    said_before = len(said())
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        stored = journal.stored()
        for key, one in stored.items():
            found = str(journal.error(one)) if one.status == "failed" else journal.value(one)
            assert found == sample.values[key], where
        lost = [key for key in sample.values if key not in stored]
        if lost:
            assert len(said()) > said_before, (
                f"{where}: {len(lost)} are lost, and nobody has said so"
            )
        assert not journal.write([Outcome(key, 1, "finished", value="again") for key in lost]), (
            where
        )
    caught = len(said())
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        assert set(journal.stored()) == set(sample.values), where
    assert len(said()) == caught, f"{where}: {said()[caught:]}"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "raypool")
    return lambda: [record.message for record in caplog.records]


def positions(data: bytes, count: int | None) -> list[int]:
    """Return where something stands; of the empty space, which is all the same, a place here and
    there.
    """
    there = [position for position, byte in enumerate(data) if byte or position % 101 == 0]
    return there if count is None else random.Random(0).sample(there, min(count, len(there)))


def flips(data: bytes, count: int | None) -> Iterator[tuple[str, bytes]]:
    for position in positions(data, count):
        yield (
            f"byte {position}",
            data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :],
        )


def small_changes(data: bytes, count: int | None) -> Iterator[tuple[str, bytes]]:
    for position in positions(data, count):
        yield (
            f"byte {position} plus 1",
            data[:position] + bytes([(data[position] + 1) % 256]) + data[position + 1 :],
        )


def cuts(data: bytes, count: int | None) -> Iterator[tuple[str, bytes]]:
    for position in positions(data, count):
        yield f"cut at {position}", data[:position]


def blots(data: bytes, count: int | None) -> Iterator[tuple[str, bytes]]:
    noise = random.Random(1).randbytes(4096)
    for position in positions(data, count):
        size = (1, 16, 512, 4096)[position % 4]
        for what, blot in (("zeros", bytes(size)), ("noise", noise[:size])):
            yield (
                f"{size} bytes of {what} at {position}",
                (data[:position] + blot + data[position + size :])[: len(data)],
            )


DAMAGES = [flips, small_changes, blots]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_journal_opens_and_gives_only_what_is_right(name, damage, sample, memory, said):
    for where, data in damage(sample.files[name], 25):
        check(sample, lay_out(sample, memory / "damaged", name, data), said, f"{name}, {where}")


@pytest.mark.parametrize("name", FILES)
def test_a_journal_that_was_cut_off_opens_and_gives_only_what_is_right(name, sample, memory, said):
    for where, data in cuts(sample.files[name], 25):
        folder = lay_out(sample, memory / "cut", name, data)
        if name == "journal.sqlite-wal":
            check_beginning(sample, folder, said, f"{name}, {where}")
        else:
            check(sample, folder, said, f"{name}, {where}")


def check_beginning(
    sample: Sample, folder: Path, said: Callable[[], list[str]], where: str
) -> None:
    """Of a log that ends early SQLite has written no more, as far as anybody can tell; only what
    lacks in between is missed.
    """
    said_before = len(said())
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        stored = journal.stored()
        for key, one in stored.items():
            found = str(journal.error(one)) if one.status == "failed" else journal.value(one)
            assert found == sample.values[key], where
    assert set(list(sample.values)[:45]) <= set(stored), where
    if set(stored) != set(list(sample.values)[: len(stored)]):
        assert len(said()) > said_before, where


def test_old_frames_of_a_log_are_no_damage_but_an_overwritten_one_is(memory, said):
    """In each round less is written before the process is killed: frames of earlier logs remain."""
    folder, written = memory / "rounds", 0
    for count in (20, 9, 4, 1):
        with Journal.open(folder, "sweeps.train", seed=7) as journal:
            assert len(journal.stored()) == written
            for number in range(written, written + count):
                assert not journal.write([outcome(number)])
            found = Sample({name: (folder / name).read_bytes() for name in FILES}, {}, {})
        written += count
        name, log = FILES[1], found.files[FILES[1]]
        lay_out(found, folder, name, log)
    with Journal.open(folder, "sweeps.train", seed=7) as journal:
        assert len(journal.stored()) == written
    assert not said()

    frame = 24 + PAGE_BYTES
    frames = [log[start : start + frame] for start in range(32, len(log), frame)]
    newest = max(at for at, data in enumerate(frames) if data[8:16] == log[16:24])
    start, end = 32 + newest * frame, 32 + (newest + 1) * frame
    assert 0 < newest < len(frames) - 1
    for first in range(start, start + 16):
        for blot in (bytes(frame), b"\xff" * frame):
            data = log[:first] + blot[: end - first] + log[end:]
            num_said = len(said())
            with Journal.open(lay_out(found, folder, name, data), "sweeps.train", seed=7) as left:
                assert len(left.stored()) == written - 1
            assert len(said()) > num_said, first - start


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("damage", [*DAMAGES, cuts])
@pytest.mark.parametrize("name", FILES)
def test_every_byte_of_a_journal_may_be_damaged(name, damage, sample, memory, said, caplog):
    for where, data in damage(sample.files[name], None if damage is flips else 1000):
        folder = lay_out(sample, memory / "every", name, data)
        if damage is cuts and name == "journal.sqlite-wal":
            check_beginning(sample, folder, said, f"{name}, {where}")
        else:
            check(sample, folder, said, f"{name}, {where}")
        caplog.clear()


# --- plain data and keys --------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, types, order and NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


@given(values)
def test_plain_data_comes_back_exactly(value):
    text = encode(value)
    if text is not None:
        assert same(decode(text), value)


@given(st.dictionaries(st.text(), scalars), st.randoms())
def test_keys_do_not_depend_on_the_order_of_a_dict(value, rng):
    pairs = list(value.items())
    rng.shuffle(pairs)
    assert content_key(dict(pairs), "it") == content_key(value, "it")


@given(values, values)
def test_what_differs_has_another_key(one, other):
    if type(one) is type(other) and repr(one) == repr(other):
        assert content_key(one, "it") == content_key(other, "it")
    elif content_key(one, "it") == content_key(other, "it"):
        assert one == other or same(one, other)  # dicts in another order


CODE = """
import sys
from raypool.journal.keys import content_key
for line in sys.stdin:
    print(content_key(eval(line), "it"), flush=True)
"""


@pytest.fixture(scope="module")
def others() -> Iterator[list[subprocess.Popen[str]]]:
    """Give other processes that make keys of what they are told, each with other hashes of
    strings.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env={"PYTHONHASHSEED": seed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    yield processes
    for process in processes:
        process.communicate()


nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nested | st.frozensets(st.text() | st.integers() | st.tuples(st.text(), st.text())))
def test_keys_are_the_same_in_other_processes(others, value):
    keys = {content_key(value, "it")}
    for process in others:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(ascii(value) + "\n")
        process.stdin.flush()
        keys.add(process.stdout.readline().strip())
    assert len(keys) == 1
