"""The state of a run as the live page shows it: its folder, read again and again."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raypool.channel.feed import MAX_EXACT, Feed, fields_of, text_of_file
from raypool.channel.gpu_usage import GPU_USAGE, GpuSample, samples_in
from raypool.errors import JournalError
from raypool.journal.files import DIARY, METRICS, Damaged
from raypool.journal.live import NOTES, actions_in, live_of, notes_in
from raypool.journal.lock import is_in_use, is_running
from raypool.journal.opening import Contents
from raypool.journal.reading import (
    ItemRecord,
    JournalTail,
    entries_of,
    is_training,
    newest_run,
    opened,
    parts_of,
    positions_of,
    read_contents,
    report_in,
    results_of,
    runs_below,
    runs_of,
    version_of,
)
from raypool.journal.rows import DATABASE, Stored, StoredAt, words_of
from raypool.journal.schema import Row
from raypool.journal.trials import STUDY
from raypool.results import Results, collector_paused
from raypool.views.drawing import (
    PALETTE,
    PLAIN,
    STEPS,
    Cell,
    cell,
    columns,
    evenly,
    short,
    thinned,
)
from raypool.views.report import MARKS, best_of, note_on_table, table_of, traceback_of
from raypool.worker.folders import checkpoint_time

MAX_VALUE_BYTES = 1024 * 1024
"""A larger item or value is not opened: a page has no use for it [bytes]."""

MAX_GPU_POINTS = 300
"""The most points of a GPU."""

MAX_OUTPUT = 100_000
"""The most of an item's output that is shown, the newest [characters]."""

IGNORED = {"failed": ("failed",), "all": ("finished", "failed")}
"""By `rerun`: which outcomes of earlier calls do not count."""

BRIEF_REST = 9
"""After `Brief` has read a running run, it rests for this many times as long: a tenth of a core."""

State = dict[str, Any]
"""The state of a run, ready for JSON; lists and dicts in it are never changed."""


class ItemReports:
    """The numbers that an item has reported, as columns with NaN where there is none.

    As in `load_results`, the reports of a call whose outcome was replaced are left out.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._forget()

    def _forget(self) -> None:
        self.times = array("d")
        self.runs = array("q")
        self.attempts = array("q")
        self.numbers: dict[str, array[float]] = {}
        self.last: dict[str, Any] = {}

    def read(self, path: Path, runs: range | None) -> bool:
        """Read new lines of the item's file; return whether there were reports in them.

        `runs`: those that led to the item's newest outcome, if it has one.
        """
        if runs is not None and self.runs and self.runs[-1] < runs.start:
            self._forget()
        try:
            if path.stat().st_size == self._offset:
                return False
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # no report yet, or the folder was just removed
            return False
        lines = data.decode(errors="replace").split("\n")
        lines.pop()  # the end of the last line may follow
        self._offset += data.rfind(b"\n") + 1
        found = [report for line in lines if (report := report_in(line, 0)) is not None]
        kept = [each for each in found if runs is None or each[0] >= runs.start]
        for run, (seconds, _, attempt, metrics) in kept:
            # it runs again, after its newest outcome
            if runs is not None and run >= runs.stop and self.runs and self.runs[-1] < runs.stop:
                self._forget()
            self._add(run, seconds, attempt, metrics)
        return bool(kept)

    def _add(self, run: int, seconds: float, attempt: int, metrics: Mapping[str, Any]) -> None:
        num_before = len(self.times)
        self.times.append(seconds)
        self.runs.append(run)
        self.attempts.append(attempt)
        for name, value in metrics.items():
            if value is None:
                continue
            self.last[name] = value
            # by type, as JSON has them: a bool is no number
            if (type(value) is float and not math.isnan(value)) or (
                type(value) is int and abs(value) <= MAX_EXACT
            ):
                if (column := self.numbers.get(name)) is None:
                    column = self.numbers[name] = array("d")
                column.extend([math.nan] * (num_before - len(column)))
                column.append(value)

    def column(self, name: str) -> Sequence[float]:
        """Return the values of a metric, one for each report."""
        column = self.numbers.get(name, array("d"))
        return [*column, *[math.nan] * (len(self.times) - len(column))]

    def curve(self, metric: str, step: str, most: int) -> dict[str, Any]:
        """Return the curve of a metric over a step, or over the reports' numbers without one."""
        y = self.column(metric)
        x = self.column(step) if step else range(len(y))
        places = [
            at for at, point in enumerate(zip(x, y, strict=True)) if all(map(math.isfinite, point))
        ]
        curve: dict[str, list[float | None]] = {"x": [], "y": []}
        before = None
        for place in thinned([y[at] for at in places], most):
            at = places[place]
            if before is not None and (self.runs[at], self.attempts[at]) != (
                self.runs[before],
                self.attempts[before],
            ):
                curve["x"].append(None)
                curve["y"].append(None)
            curve["x"].append(x[at])
            curve["y"].append(y[at])
            before = at
        return curve


class ItemTable(NamedTuple):
    """The table of items. `last`: the columns of the metrics' last values, by metric."""

    columns: list[dict[str, Any]]
    rows: list[list[Cell]]
    mark: int
    last: dict[str, int]
    problem: str | None
    summary: State
    results: Results[Any]


class RunReader:
    """Reads a run's folder as often as it is asked, in one thread at a time.

    Args:
        folder: The folder; nothing need be in it yet.
        why_not: Why nobody can act on the run; None: they can, while it runs.
    """

    def __init__(self, folder: Path, why_not: str | None = None) -> None:
        self.folder = folder
        self._why_not = why_not
        self._tail = JournalTail(folder)
        self._first_run: list[Row] = []
        self._entries: list[ItemRecord] = []
        self._num_now = 0  # of the entries, the first ones: the items of the newest call
        self._runs: dict[str, range] = {}
        self._attempts: list[list[Any]] = []
        self._files: dict[str, tuple[Any, Any]] = {}  # by name: version and content
        self._forget()

    def _forget(self) -> None:
        self._reports: dict[str, ItemReports] = {}
        self._settled: dict[str, int] = {}  # by item: the outcome after which nothing came
        self._values: dict[tuple[str, StoredAt | None], Any] = {}
        self._metrics: dict[str, None] = {}
        self._table: ItemTable | None = None

    @collector_paused()
    def look(self) -> State:
        """Return the state of the run now."""
        # first: an ended run has all outcomes
        is_now = is_any_running(self.folder)
        problem, is_new = None, False
        try:
            is_new = self._tail.read()
            problem = self._tail.problem
        except JournalError as error:
            problem = str(error)
        if is_new:
            contents = self._tail.contents
            self._entries = entries_of(contents)
            self._num_now = num_now(contents)
            self._runs = {} if (self.folder / STUDY).exists() else runs_of(contents)
            first_run = self._tail.contents["runs"][:1]
            if first_run != self._first_run:  # the folder was removed, and used again
                self._first_run = first_run
                self._forget()
        is_study_new = self._content(STUDY, lambda: None)[1]
        live = live_of(self.folder) if is_now else None
        running = {entry["item"] for entry in (live or {}).get("running", ())}
        changed = self._read_reports(running)
        table = self._table
        if self._entries and (is_new or is_study_new or table is None or changed is None):
            table = self._table = self._made_table()
            numbers = {entry.key: index for index, entry in enumerate(self._entries)}
            self._attempts = [
                [
                    *(numbers[stored.key], stored.attempt, stored.worker),
                    *(stored.status, stored.started_at, stored.duration_s),
                ]
                for stored in map(Stored._make, self._tail.contents["attempts"])
                if stored.key in numbers
            ]
        elif table is not None and changed:
            table = self._table = self._with_last(table, changed)
        return self._state(table, live, running, is_now, problem)

    # --- parts of the state -----------------------------------------------------------------------

    def _read_reports(self, running: set[int]) -> list[int] | None:
        """Read new reports; return the items that have some, or None if a metric is new."""
        changed, num_metrics = [], len(self._metrics)
        for index, (key, _, stored) in enumerate(self._entries):
            n = 0 if stored is None else stored.n
            if n and self._settled.get(key) == n and index not in running:
                continue
            reports = self._reports.get(key) or ItemReports()
            if reports.read(self.folder / "items" / key / METRICS, self._runs.get(key)):
                self._reports[key] = reports
                self._metrics |= dict.fromkeys(reports.numbers)
                changed.append(index)
            elif n:
                self._settled[key] = n
        return changed if len(self._metrics) == num_metrics else None

    def _made_table(self) -> ItemTable:
        entries = self._entries
        feed = Feed()
        for index, entry in enumerate(entries):
            reports = self._reports.get(entry.key)
            if reports is not None and reports.times:
                feed.add_row((reports.times[-1], index, reports.attempts[-1], reports.last))
        items = self._opened([(entry.key, entry.item) for entry in entries])
        values = self._opened([(entry.key, entry.value) for entry in entries])
        damaged = [value for value in (*items, *values) if isinstance(value, Damaged)]
        contents = self._tail.contents
        results = results_of(self.folder, contents, entries, items, values, lambda: feed)
        story = results._story()
        config = columns(story.frame, story.configs)
        made = table_of(story, config)
        names = [column["name"] for column in made["columns"]]
        return ItemTable(
            made["columns"],
            [list(row) for row in zip(*made["cells"], strict=True)],
            names.index(made["mark"]),
            {
                name.removeprefix("last "): at
                for at, name in enumerate(names)
                if made["columns"][at]["kind"] == "reported"
            },
            f"{len(damaged):,} values cannot be read. {damaged[0]}" if damaged else None,
            {
                "title": results._name,
                "metric": story.metric,
                "best": best_of(story, config),
                "table_note": note_on_table(story),
            },
            results,
        )

    def _opened(self, places: list[tuple[str, StoredAt | None]]) -> list[Any]:
        """Return values with all that a table shows of them, each opened once."""
        new = [place for place in dict.fromkeys(places) if place not in self._values]
        small = [
            place for place in new if place[1] is None or (place[1].size or 0) <= MAX_VALUE_BYTES
        ]
        self._values |= dict.fromkeys(new)
        self._values |= zip(small, map(_plain, opened(self.folder, small)), strict=True)
        return [self._values[place] for place in places]

    def _with_last(self, table: ItemTable, changed: Iterable[int]) -> ItemTable:
        """Return the table with the newest values of these items."""
        rows = [*table.rows]
        for index in changed:
            rows[index] = row = [*rows[index]]
            last = self._reports[self._entries[index].key].last
            for name, at in table.last.items():
                # the table renames a metric that has the name of one of its columns
                row[at] = short(last.get(name, last.get(name.removeprefix("reported_"))))
        return table._replace(rows=rows)

    def _state(
        self,
        table: ItemTable | None,
        live: Mapping[str, Any] | None,
        running: set[int],
        is_now: bool,
        problem: str | None,
    ) -> State:
        state = state_of(self.folder, is_now, problem is None or table is not None)
        if table is not None and table.problem is not None:
            problem = f"{problem} {table.problem}" if problem else table.problem
        started_at, duration_s = _times(self._tail.contents, is_now)
        actions = self._content("actions.jsonl", lambda: _clean(actions_in(self.folder)))[0] or []
        cancelled = _cancelled(actions, started_at or 0.0)
        rows = [] if table is None else self._marked(table, running, cancelled, is_now, live or {})
        # while a call runs, items that only earlier ones had do not count
        counted = rows[: self._num_now] if is_now else rows
        counts = Counter(row[table.mark] for row in counted if table is not None)
        total = (live or {}).get("total") or (None if is_now else len(rows))
        if is_now and total is not None and total > len(counted):
            counts["waiting"] += total - len(counted)
        why_not = self._why_not
        if why_not is None and not is_now:
            why_not = "The run has ended, so nothing can be done with its items."
            if state == "interrupted":
                why_not = "The process of the run is gone. Run the same script again to resume."
        elif why_not is None and live is None:
            why_not = "The process of the run does not answer yet."
        keys = {entry.key: index for index, entry in enumerate(self._entries)}
        notes = self._content(NOTES, lambda: notes_in(self.folder))[0] or {}
        return {
            "title": self.folder.name,
            "state": state,
            "is_running": is_now,
            "can_act": why_not is None,
            "can_note": self._why_not is None,
            "why_not": why_not,
            "problem": None if state == "empty" else problem,
            "total": total,
            "counts": dict(counts),
            "started_at": started_at,
            "duration_s": duration_s,
            **dict.fromkeys(("metric", "best", "table_note")),
            **({} if table is None else table.summary),
            "columns": [] if table is None else table.columns,
            "rows": rows,
            "metrics": [name for name in self._metrics if name not in STEPS],
            "steps": [name for name in STEPS if name in self._metrics],
            "live": _clean(live),
            "attempts": self._attempts,
            "gpus": self._content(GPU_USAGE, lambda: _gpus(samples_in(self.folder)))[0] or [],
            "actions": actions,
            "notes": {str(keys[key]): note for key, note in notes.items() if key in keys},
            "colors": MARKS,
            "palette": PALETTE,
        }

    def _marked(
        self,
        table: ItemTable,
        running: set[int],
        cancelled: set[int],
        is_now: bool,
        live: Mapping[str, Any],
    ) -> list[list[Cell]]:
        """Return the rows, with the statuses of items that run, wait or were cancelled."""
        ignored = IGNORED.get(live.get("rerun", ""), ())
        rows = []
        for index, row in enumerate(table.rows):
            status = row[table.mark]
            stored = self._entries[index].stored
            is_waiting = is_now and index < self._num_now
            if index in running:
                status = "running"
            elif is_waiting and status in ignored and stored and stored.run < live["run"]:
                status = "cancelled" if index in cancelled else "waiting"
            elif status in ("missing", "unfinished"):
                status = "cancelled" if index in cancelled else "waiting" if is_waiting else status
            if status != row[table.mark]:
                row = [*row]
                row[table.mark] = status
            rows.append(row)
        return rows

    def _content(self, name: str, read: Callable[[], Any]) -> tuple[Any, bool]:
        """Return what a file has, read again if it has changed, and whether it has."""
        version = version_of(self.folder / name)
        before = self._files.get(name)
        if version is None or (before is not None and before[0] == version):
            return (None if version is None or before is None else before[1]), False
        self._files[name] = version, read()
        return self._files[name][1], True

    # --- what is asked for one by one -------------------------------------------------------------

    @property
    def num_items(self) -> int:
        """The number of the items that are known."""
        return len(self._entries)

    def key(self, item: int) -> str:
        """Return the key of an item, which stays the same in later calls."""
        return self._entries[item].key

    def curves(self, items: Iterable[int], metric: str, step: str, most: int) -> State:
        """Return the curves of items, those without a point left out."""
        found = {
            str(item): self._reports[self.key(item)].curve(metric, step, most)
            for item in items
            if item < self.num_items and self.key(item) in self._reports
        }
        return {item: curve for item, curve in found.items() if curve["x"]}

    def item(self, item: int) -> State:
        """Return all that is known of an item."""
        entry, table, contents = self._entries[item], self._table, self._tail.contents
        folder = self.folder / "items" / entry.key
        config, differs, text, traceback = {}, {}, None, None
        if table is not None:
            row = table.rows[item]
            best = (
                None if table.summary["best"] is None else table.rows[table.summary["best"]["item"]]
            )
            for at, column in enumerate(table.columns):
                if column["kind"] == "config":
                    config[column["name"]] = row[at]
                    if best is not None and best[at] != row[at]:
                        differs[column["name"]] = [row[at], best[at]]
                elif (column["kind"], column["name"]) == ("run", "error"):
                    text = row[at]
            if (error := table.results._errors.get(item)) is not None:
                traceback = traceback_of(error)
        reports = self._reports.get(entry.key)
        return {
            "config": config,
            "differs_from_best": differs,
            "metrics": {}
            if reports is None
            else {name: short(value) for name, value in reports.last.items()},
            "error": text,
            "traceback": traceback,
            "output": text_of_file(folder / DIARY)[-MAX_OUTPUT:],
            "attempts": [
                {
                    "attempt": stored.attempt,
                    "status": stored.status,
                    "started_at": stored.started_at,
                    "duration_s": stored.duration_s,
                    "worker": stored.worker,
                    "gpu": stored.gpu,
                    "host": stored.host,
                    "error": words_of(stored),
                }
                for stored in map(Stored._make, contents["attempts"])
                if stored.key == entry.key
            ],
            "checkpoint": str(folder / "checkpoint")
            if checkpoint_time(str(folder), "checkpoint") is not None
            else None,
        }


class Brief:
    """A few words on a run, for a list of runs; read again only if it has changed.

    Reading takes the whole journal, so while the run goes on there are long rests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[object, State] = (None, {})
        self._next_at = -math.inf

    def look(self) -> State:
        """Return them as they are now. From any thread."""
        folder = self._folder
        names = (DATABASE, f"{DATABASE}-wal", "journal.lock")
        is_now = is_any_running(folder)
        places = (folder, *parts_of(folder))
        version = [is_now, *(version_of(place / name) for place in places for name in names)]
        known, brief = self._known
        is_resting = is_now and time.monotonic() < self._next_at
        if version == known or (is_resting and brief["state"] == "running"):
            began = brief["started_at"] if is_now else None
            return brief if began is None else {**brief, "duration_s": time.time() - began}
        read_at = time.monotonic()
        counts: dict[str, int] = {}
        started_at, duration_s = None, 0.0
        # it has just begun, or is damaged: the list shows no counts
        with contextlib.suppress(JournalError):
            contents = read_contents(folder, lambda *_: None)
            entries = entries_of(contents)[: num_now(contents) if is_now else None]
            statuses = [entry.stored and entry.stored.status for entry in entries]
            counts = Counter(status or ("waiting" if is_now else "missing") for status in statuses)
            started_at, duration_s = _times(contents, is_now)
        brief = {
            "state": state_of(folder, is_now, started_at is not None),
            "counts": counts,
            "started_at": started_at,
            "duration_s": duration_s,
        }
        self._known = version, brief  # in one step: other threads look, too
        now = time.monotonic()
        self._next_at = now + BRIEF_REST * (now - read_at)
        return brief


def sweeps_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of this user's runs, except for trainings, below a folder."""
    for run in runs_below(folder):
        with contextlib.suppress(OSError):  # it was just deleted
            if run.stat().st_uid == os.getuid() and not is_training(run):
                yield run


def num_now(contents: Contents) -> int:
    """Return how many of the first entries are items of the newest call."""
    return len({*positions_of(contents, newest_run(contents)).values()})


def is_any_running(folder: Path) -> bool:
    """Whether a process runs items of a run."""
    return any(map(is_running, (folder, *parts_of(folder))))


def state_of(folder: Path, is_now: bool, is_readable: bool) -> str:
    """Return what state a run is in, in a word."""
    if is_now:
        return "running"
    if not is_readable:
        return "unreadable" if (folder / DATABASE).exists() else "empty"
    return "interrupted" if any(map(is_in_use, (folder, *parts_of(folder)))) else "ended"


def _times(contents: Contents, is_now: bool) -> tuple[float | None, float]:
    """Return when the newest call began (Unix time [s]), and how long it has taken [s]."""
    runs = {row[0]: float(row[5]) for row in contents["runs"]}
    if not runs:
        return None, 0.0
    newest = max(runs)
    began = runs[newest]
    ends = [
        (stored.started_at or began) + (stored.duration_s or 0.0)
        for stored in map(Stored._make, contents["attempts"])
        if stored.run == newest
    ]
    return began, max((time.time() if is_now else max(ends, default=began)) - began, 0.0)


def _plain(value: Any, depth: int = 3) -> Any:
    """Return a value with all that a table shows of it, and no more."""
    if isinstance(value, (Damaged, numbers.Number)):
        return value
    fields = None if not depth or type(value) in PLAIN else fields_of(value)
    if fields is None:
        return cell(value)
    return {name: _plain(entry, depth - 1) for name, entry in fields.items()}


def _clean(value: Any) -> Any:
    """Return plain data that JSON can hold: without NaN, and with short texts."""
    if isinstance(value, dict):
        return {name: _clean(entry) for name, entry in value.items()}
    return [_clean(entry) for entry in value] if isinstance(value, list) else cell(value)


def _cancelled(actions: Iterable[State], since: float) -> set[int]:
    """Return the items cancelled in a call: they have no outcome, as the next call runs them."""
    found = set()
    for action in actions:
        if action["outcome"] == "done" and action["asked_at"] >= since:
            if action["action"] == "cancel":
                found.add(action["item"])
            elif action["action"] == "rerun":
                found.discard(action["item"])
    return found


def _gpus(samples: Sequence[GpuSample]) -> list[State]:
    """Return the samples of the newest call, by GPU."""
    newest = max((sample.run for sample in samples), default=0)
    by_gpu: dict[tuple[str, int], list[GpuSample]] = {}
    for sample in samples:
        if sample.run == newest:
            by_gpu.setdefault((sample.host, sample.gpu), []).append(sample)
    gpus = []
    for (host, gpu), found in sorted(by_gpu.items()):
        kept = evenly(found, MAX_GPU_POINTS)
        gpus.append(
            {
                "host": host,
                "gpu": gpu,
                "total_bytes": found[-1].total_bytes,
                "time": [sample.time for sample in kept],
                "utilization": [sample.utilization for sample in kept],
                "used_bytes": [sample.used_bytes for sample in kept],
            }
        )
    return gpus
