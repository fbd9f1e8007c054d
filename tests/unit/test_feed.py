"""What a task has said is all there, in order, and takes little memory."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import tracemalloc
from typing import Any

import psutil
import pytest

from raypool.channel import feed as feed_module
from raypool.channel.feed import (
    LAST_ITEMS,
    LOOP_TEXT_BYTES,
    RECENT_BYTES,
    ROWS_AT_ONCE,
    TEXT_BYTES,
    Feed,
    LoopFeed,
    Record,
    Row,
    Spool,
    read,
)


@pytest.fixture(autouse=True)
def spool(monkeypatch: pytest.MonkeyPatch) -> Spool:
    spool = Spool()
    monkeypatch.setattr(feed_module, "_spool", spool)
    return spool


def row(step: int, item: int = 0, attempt: int = 1, **metrics: Any) -> Row:
    return (float(step), item, attempt, {"step": step, **metrics})


def packed(*rows: Row) -> tuple[bytes, dict[int, tuple[int, dict[str, Any]]]]:
    return pickle.dumps(list(rows)), {rows[-1][1]: (rows[-1][2], rows[-1][3])}


def test_nothing_said_is_an_empty_table_with_its_columns() -> None:
    feed = Feed()
    assert list(feed.metrics(None)) == ["time", "attempt"]
    assert list(feed.metrics("item")) == ["time", "item", "attempt"]
    assert str(feed.metrics("item")["time"].dtype) == "datetime64[ns, UTC]"
    assert feed.text() == ""
    assert feed.last(0, 1) == {}


def test_rows_come_back_in_order_however_they_came() -> None:
    feed = Feed()
    feed.add_row(row(0))
    feed.add_rows(*packed(row(1), row(2)))
    for step in range(3, 3 + 2 * ROWS_AT_ONCE):
        feed.add_row(row(step))
    frame = feed.metrics(None)
    assert sorted(frame["step"]) == list(range(3 + 2 * ROWS_AT_ONCE))
    assert frame["step"].dtype == "int64"
    assert frame["time"].iloc[1].timestamp() == frame["step"].iloc[1]


def test_columns_stand_in_the_order_of_their_first_value_and_have_gaps() -> None:
    feed = Feed()
    feed.add_row((1.5, 0, 1, {"loss": 0.5}))
    feed.add_row((2.5, 0, 2, {"phase": "test", "accuracy": 1.0, "loss": 0.25}))
    frame = feed.metrics(None)
    assert list(frame) == ["time", "attempt", "loss", "phase", "accuracy"]
    assert frame["attempt"].tolist() == [1, 2]
    assert frame["accuracy"].isna().tolist() == [True, False]
    assert frame["phase"].tolist()[1] == "test"


def test_a_metric_may_be_called_like_a_column() -> None:
    feed = Feed()
    feed.add_row((1.0, 3, 1, {"time": 7, "item": "a", "attempt": 9}))
    assert feed.metrics("item")[
        ["item", "reported_time", "reported_item", "reported_attempt"]
    ].values.tolist() == [[3, 7, "a", 9]]
    assert list(feed.metrics(None)) == [
        "time",
        "attempt",
        "reported_time",
        "item",
        "reported_attempt",
    ]


def test_the_rows_of_a_loop_stand_in_the_order_of_its_items() -> None:
    feed = Feed()
    feed.add_rows(*packed(row(0, item=2), row(1, item=2, attempt=2)))
    feed.add_rows(*packed(row(5, item=0), row(4, item=0)))
    frame = feed.metrics("item")
    assert frame[["item", "attempt", "step"]].values.tolist() == [
        [0, 1, 5],
        [0, 1, 4],
        [2, 1, 0],
        [2, 2, 1],
    ]


def test_the_last_values_are_merged_within_an_attempt() -> None:
    feed = Feed()
    feed.add_row((0.0, 4, 1, {"loss": 3.0, "phase": "train"}))
    feed.add_rows(*packed((1.0, 4, 1, {"loss": 2.0, "phase": None})))  # None is a missing value
    assert feed.last(4, 1) == {"loss": 2.0, "phase": "train"}
    feed.add_row((2.0, 4, 2, {"loss": 9.0}))
    assert feed.last(4, 2) == {"loss": 9.0}
    assert feed.last(4, 1) == {}
    assert feed.last(5, 1) == {}


def test_the_last_values_of_so_many_items_are_known() -> None:
    feed = Feed()
    for item in range(LAST_ITEMS + 10):
        feed.add_row(row(item, item=item))
        feed.add_row(row(1, item=0))  # one goes on all the time
    assert feed.last(0, 1) == {"step": 1}
    assert feed.last(9, 1) == {}
    assert feed.last(LAST_ITEMS, 1) == {"step": LAST_ITEMS}


def test_memory_stays_flat() -> None:
    feed = Feed()
    rows, last = packed(*(row(step, loss=0.5) for step in range(500)))
    tracemalloc.start()
    try:
        for _ in range(1000):
            feed.add_rows(rows, last)
            feed.add_text("x" * 10_000)
            for step in range(10):
                feed.add_row(row(step, loss=0.25))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1_500_000 < 1000 * (len(rows) + 10_000)
    assert len(feed.metrics(None)) == 510_000


def test_what_was_printed_is_kept_from_its_end() -> None:
    feed = Feed()
    for number in range(300_000):
        feed.add_text(f"{number}\n")
    first, *lines = feed.text().splitlines()
    size = sum(len(f"{number}\n") for number in range(300_000))
    assert first == f"[raypool: the first {size - TEXT_BYTES:,} bytes are not kept]"
    assert lines[-1] == "299999"
    assert lines[1:] == [str(number) for number in range(300_000 - len(lines) + 1, 300_000)]
    assert sum(len(line) + 1 for line in lines) == TEXT_BYTES


def test_text_that_was_cut_elsewhere_counts_as_missing() -> None:
    feed = Feed()
    feed.add_text("end", num_missing=12_345)
    assert feed.text() == "[raypool: the first 12,345 bytes are not kept]\nend"


def test_any_text_can_be_kept() -> None:
    feed = Feed()
    feed.add_text("naïve 漢字 \ud800 \0")
    assert feed.text() == "naïve 漢字 \\ud800 \0"


def test_a_cut_within_a_character_is_no_error() -> None:
    feed = Feed()
    feed.add_text("漢" * TEXT_BYTES)
    assert feed.text().splitlines()[1] == "漢" * (TEXT_BYTES // 3)


def test_files_are_gone_with_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SEGMENT_BYTES", 4 * RECENT_BYTES)
    process = psutil.Process()
    before = process.num_fds()
    feeds = [Feed() for _ in range(20)]
    for _ in range(3):
        for feed in feeds:
            feed.add_rows(*packed(*(row(step) for step in range(2000))))
    assert before < process.num_fds() <= before + 60
    assert all(len(feed.metrics(None)) == 6000 for feed in feeds)
    del feed, feeds[1:]
    assert process.num_fds() <= before + 4
    assert len(feeds[0].metrics(None)) == 6000


@pytest.mark.parametrize("written", [0, 100])
def test_a_full_disk_costs_memory_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    write, is_full = os.pwrite, False

    def write_some(descriptor: int, data: bytes, offset: int) -> int:
        if is_full and not data[:written]:
            raise OSError(errno.ENOSPC, "No space left on device")
        if is_full and written:
            write(descriptor, data[:written], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    record = Record()
    texts = [os.urandom(RECENT_BYTES) for _ in range(9)]
    for number, text in enumerate(texts):
        is_full = 3 <= number < 6
        record.add(text)
    assert b"".join(read(record.parts())) == b"".join(texts)


def test_a_record_forgets_whole_pieces_from_the_front() -> None:
    record = Record()
    for number in range(4):
        record.add(bytes([number]) * RECENT_BYTES)
    assert record.forget(2 * RECENT_BYTES + 1) == RECENT_BYTES
    assert record.size == 3 * RECENT_BYTES
    assert b"".join(read(record.parts()))[0] == 1


def test_many_threads_may_write_and_read() -> None:
    feed = Feed()

    def work(item: int) -> None:
        for step in range(2000):
            feed.add_row(row(step, item=item))
            feed.add_text(f"{item}\n")

    threads = [threading.Thread(target=work, args=(item,)) for item in range(4)]
    for thread in threads:
        thread.start()
    lengths = []
    while any(thread.is_alive() for thread in threads):
        lengths.append(len(feed.metrics("item")))
    assert lengths == sorted(lengths)
    frame = feed.metrics("item")
    assert all(
        frame.loc[frame["item"] == item, "step"].tolist() == list(range(2000)) for item in range(4)
    )
    assert sorted(feed.text().split()) == sorted(
        str(item) for item in range(4) for _ in range(2000)
    )


def test_travels_with_all_that_is_in_it() -> None:
    feed = Feed()
    for step in range(5000):
        feed.add_row(row(step, item=step % 3))
    feed.add_text("x" * 2 * TEXT_BYTES)
    other = pickle.loads(pickle.dumps(feed))
    assert other.metrics("item").equals(feed.metrics("item"))
    assert other.text() == feed.text()
    other.add_row(row(1, item=9))
    assert len(other.metrics("item")) == 5001


def test_feeds_can_be_put_together() -> None:
    feeds = [Feed() for _ in range(3)]
    for number, feed in enumerate(feeds):
        for step in range(700):
            feed.add_row(row(step, number=number))
        feed.add_text(str(number) * 600_000)
    whole = Feed()
    for feed in feeds:
        whole.add_all_of(feed)
    frame = whole.metrics(None)
    assert frame[["number", "step"]].values.tolist() == [
        [number, step] for number in range(3) for step in range(700)
    ]
    assert whole.text().splitlines()[1] == "1" * (TEXT_BYTES - 600_000) + "2" * 600_000
    assert feeds[0].text() == "0" * 600_000


def test_a_forked_child_leaves_its_parents_file_alone() -> None:
    feed_module._new_spool()
    feed = Feed()
    texts = [f"{number:05}" * (RECENT_BYTES // 5) for number in range(10)]
    feed.add_text(texts[0])
    child = os.fork()
    if child == 0:
        others = Feed()
        for _ in range(20):
            others.add_text("child" * RECENT_BYTES)
        os._exit(0 if texts[0][:100] in feed.text() else 1)
    assert os.waitpid(child, 0)[1] == 0
    for text in texts[1:]:
        feed.add_text(text)
    assert feed.text() == "".join(texts)


def test_what_is_said_while_the_process_ends_stays_in_memory(spool: Spool) -> None:
    spool.add(b"before")
    assert spool._segment is not None
    spool._segment.file.close()  # as at the interpreter's end
    assert spool.add(b"after") == b"after"


# --- what the items of a loop print ---------------------------------------------------------------


def test_of_each_item_the_last_attempt_is_kept() -> None:
    """Also where text of an earlier attempt arrives late, from a worker that was lost."""
    feed = LoopFeed()
    for item, attempt, text in [
        (3, 1, "a"),
        (4, 1, "b"),
        (3, 2, "c"),
        (3, 1, "late"),
        (3, 2, "d\n"),
    ]:
        feed.add_text(text, 0, item, attempt)
    assert [feed.diary(item) for item in (3, 4, 5)] == ["cd\n", "b", ""]


def test_the_listener_of_a_loop_may_go_at_any_time() -> None:
    """In another thread, which does not wait for a text that just arrives."""
    heard: list[str] = []
    looks = iter([lambda _, text: heard.append(text), None])

    class Leaving(LoopFeed):
        on_text = property(lambda _: next(looks), lambda *_: None)  # type: ignore[assignment]

    Leaving().add_text("a\n")
    assert heard == ["a\n"]


def test_of_an_item_that_prints_much_the_newest_mebibyte_is_kept() -> None:
    feed = LoopFeed()
    for number in range(200_000):
        feed.add_text(f"line {number:06}\n", 0, 7, 1)
    feed.add_text("quiet\n", 0, 8, 1)
    first, *lines = feed.diary(7).splitlines()
    assert first == f"[raypool: the first {200_000 * 12 - TEXT_BYTES:,} bytes are not kept]"
    assert lines[-1] == "line 199999"
    assert sum(len(line) + 1 for line in lines) == TEXT_BYTES
    assert feed.diary(8) == "quiet\n"


def test_the_diaries_of_a_long_loop_take_bounded_memory() -> None:
    """100,000 items that print 2 KB each, in 40 writes: the newest 64 MiB stay, and the others say
    how much they have lost.
    """
    feed = LoopFeed()
    text = "x" * 49 + "\n"
    tracemalloc.start()
    try:
        for item in range(100_000):
            for _ in range(40):
                feed.add_text(text, 0, item, 1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.8 * LOOP_TEXT_BYTES
    assert feed.diary(99_999) == feed.diary(99_999 - LOOP_TEXT_BYTES // 2000 + 1) == 40 * text
    assert feed.diary(0) == "[raypool: the first 2,000 bytes are not kept]\n"


def test_one_long_text_takes_no_more_than_several() -> None:
    feed = LoopFeed()
    feed.add_text("early\n", item=0)
    feed.add_text("x" * (LOOP_TEXT_BYTES + 10) + "the end", item=1)
    assert feed.diary(0) == "early\n"
    assert feed.diary(1).endswith("xthe end")
    assert f"the first {LOOP_TEXT_BYTES + 17 - TEXT_BYTES:,} bytes are not kept" in feed.diary(1)
