"""Exports: the readers of other tools find the numbers that raypool has."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import psutil
import pytest
from click.testing import CliRunner

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    current_task,
    load_checkpoint,
    load_results,
    parallel_for,
    parpool,
    report,
    save_checkpoint,
    search,
)
from raypool.cli.main import main
from raypool.engine.loop import LoopWork
from raypool.loggers import (
    MlflowLogger,
    OptunaLogger,
    SweepLogger,
    TensorboardLogger,
    TrackioLogger,
    WandbLogger,
)
from raypool.watch.run_reader import RunReader

# --- readers --------------------------------------------------------------------------------------

Read = dict[int, tuple[dict[str, Any], str, dict[str, list[float]], float | None]]
"""What a tool knows of each item: parameters, state, curves, and the loss that it returned."""


def read_tensorboard(place: Path) -> Read:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    found: Read = {}
    for folder in place.iterdir():
        log = events.EventAccumulator(str(folder)).Reload()
        content = log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        start = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
        params = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
        curves = {tag: log.Scalars(tag) for tag in log.Tags()["scalars"]}
        assert all(
            [point.step for point in each] == [*range(len(each))] for each in curves.values()
        )
        values = {tag: [point.value for point in points] for tag, points in curves.items()}
        (result,) = values.pop("result/loss", [None])
        found[int(folder.name[5:])] = params, params.pop("status"), values, result
    return found


def read_optuna(place: Path) -> Read:
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{place}.db")
    assert study.best_trial.number == 0
    return {
        trial.number: (
            trial.params,
            trial.user_attrs["status"],
            {"loss": [trial.intermediate_values[step] for step in trial.intermediate_values]},
            trial.user_attrs.get("result/loss"),
        )
        for trial in study.trials
    }


def read_mlflow(place: Path) -> Read:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name(place.name).experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.status == "FINISHED"
    found: Read = {}
    for run in runs:
        if run is parent:
            continue
        tags, run_id = run.data.tags, run.info.run_id
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == tags["raypool.status"].upper()
        assert ("diverged" in tags.get("raypool.error", "")) == (run.info.status == "FAILED")
        files = {file.path for file in client.list_artifacts(run_id)}
        assert ("metrics.jsonl" in files) == ("loss" in run.data.metrics)
        curves = {}
        for name in run.data.metrics:
            points = client.get_metric_history(run_id, name)
            assert [point.step for point in points] == [*range(len(points))]
            curves[name] = [point.value for point in points]
        (result,) = curves.pop("result/loss", [None])
        item = int(run.info.run_name[5:])
        found[item] = run.data.params, tags["raypool.status"], curves, result
    return found


def read_wandb(place: Path) -> Read:
    import wandb

    wandb.teardown()  # else its process stays until this one ends
    found: Read = {}
    for path in Path("wandb").glob("offline-run-*/*.wandb"):
        params, summary, curves, name, project = {}, {}, {}, "", ""
        for record in wandb_records(path):
            if record.HasField("run"):
                name, project = record.run.display_name, record.run.project
                params = {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
            for each in record.summary.update:
                summary[each.key or each.nested_key[0]] = json.loads(each.value_json)
            for each in record.history.item:
                values = curves.setdefault(each.key or each.nested_key[0], [])
                values.append(json.loads(each.value_json))
        if project == place.name:
            curves = {name: curve for name, curve in curves.items() if not name.startswith("_")}
            del params["_wandb"]
            found[int(name[5:])] = params, summary["status"], curves, summary.get("result/loss")
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a file of wandb's: a log as LevelDB writes it, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the last piece of a record
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def read_trackio(place: Path) -> Read:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found: Read = {}
    for run in trackio.Api().runs(place.name):
        *rows, last = SQLiteStorage.get_logs(place.name, run.name)
        assert [row["step"] for row in rows] == [*range(len(rows))]
        params = {name: value for name, value in run.config.items() if name[0] != "_"}
        names = [name for name in rows[0] if name not in ("step", "timestamp")] if rows else []
        curves = {name: [row[name] for row in rows] for name in names}
        found[int(run.name[5:])] = params, last["status"], curves, last.get("result/loss")
    return found


# --- the same numbers -----------------------------------------------------------------------------


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train: one item has nothing to report, and one diverges."""
    for epoch in range(config["net"]["epochs"]):
        report(epoch=epoch, loss=config["lr"] / (epoch + 1), note="fine")
    if config["lr"] == 3:
        raise ValueError("diverged")
    return {"loss": config["lr"] / 8}


CONFIGS = [
    {"lr": lr, "net": {"epochs": epochs}, "kind": f"net {epochs}"}
    for lr, epochs in ((1.0, 4), (2.0, 0), (3.0, 5))
]

Target = tuple[Callable[[Path], SweepLogger], Callable[[Path], str], Callable[[Path], Read]]

TARGETS: dict[str, Target] = {
    "tensorboard": (TensorboardLogger, str, read_tensorboard),
    "optuna": (
        lambda place: OptunaLogger(f"sqlite:///{place}.db", "loss", "min"),
        lambda place: f"sqlite:///{place}.db",
        read_optuna,
    ),
    "mlflow": (lambda place: MlflowLogger(place.name), lambda place: place.name, read_mlflow),
    "wandb": (lambda place: WandbLogger(place.name), lambda place: place.name, read_wandb),
    "trackio": (lambda place: TrackioLogger(place.name), lambda place: place.name, read_trackio),
}
"""By tool: a live logger, `raypool export --output`, and a reader of what is in a place."""


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow, with SQLAlchemy 2.1
@pytest.mark.parametrize(
    "target",
    [
        "tensorboard",
        "optuna",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("mlflow", "wandb", "trackio")),
    ],
)
def test_readers_find_the_same_numbers(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loop that was logged live, and of its saved run."""
    pytest.importorskip(target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    make, output, read = TARGETS[target]
    with parpool(2, profile="threads", quiet=True) as pool:
        results = pool.parfor(
            train, CONFIGS, on_error="collect", run_dir="run", loggers=[make(tmp_path / "live")]
        )
    words = ["export", "run", "--to", target, "--output", output(tmp_path / "saved")]
    words += ["--metric", "loss"] * (target == "optuna")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    frame, metrics = results.to_frame(), results.metrics
    assert frame["status"].tolist() == ["finished", "finished", "failed"]
    names = ["loss"] if target == "optuna" else ["epoch", "loss"]  # Optuna has the score's curve
    for place in ("live", "saved"):
        found = read(tmp_path / place)
        assert sorted(found) == [0, 1, 2]
        for item, (params, state, curves, result) in found.items():
            row, reports = frame.loc[item], metrics[metrics["item"] == item]
            wanted = {"lr": row["lr"], "net.epochs": row["net"]["epochs"], "kind": row["kind"]}
            # MLflow keeps texts, and TensorBoard floats
            assert {name: type(wanted[name])(value) for name, value in params.items()} == wanted
            assert (state, result) == (row["status"], None if pd.isna(row["loss"]) else row["loss"])
            assert {name: curve for name, curve in curves.items() if curve} == {
                name: pytest.approx(reports[name].tolist()) for name in names if len(reports)
            }


# --- a loop and its loggers -----------------------------------------------------------------------


def test_a_logger_that_fails_warns_once_and_the_loop_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An item that never ran is cancelled."""
    (tmp_path / "file").touch()
    loggers = [
        TensorboardLogger(tmp_path / "file"),
        OptunaLogger(f"sqlite:///{tmp_path}/study.db", "value", "max"),
    ]
    with parpool(profile="inline", quiet=True) as pool, pytest.raises(ZeroDivisionError):
        pool.parfor(lambda x: 1 / x, [2, 0, 4], name="thirds", loggers=loggers)
    (warning,) = [each.message for each in caplog.records if each.name == "raypool"]
    assert "TensorboardLogger failed: NotADirectory" in warning
    trials = optuna.load_study(study_name="thirds", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [trial.params for trial in trials] == [{"item": 2}, {"item": 0}, {"item": 4}]
    assert [trial.value for trial in trials] == [0.5, None, None]
    states = [trial.user_attrs["status"] for trial in trials]
    assert states == ["finished", "failed", "cancelled"]


class Kept(SweepLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _begin(self, *begun: Any) -> Any:
        self.seen.append(begun[:2])
        return begun[0]

    def _log(self, *logged: Any) -> None:
        run, step, _, metrics = logged
        self.seen.append((run, step, metrics))

    def _end(self, run: Any, outcome: Any) -> None:
        assert outcome.ended_at > 0
        self.seen.append((run, outcome.status, outcome.values))


@pytest.mark.parametrize("where", ["_begin", "_log", "_end", "catch_up"])
def test_ctrl_c_in_a_logger_leaves_no_item_open(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(x: int) -> int:
        report(loss=x)
        return x

    class Last(Kept):
        def close(self) -> None:
            self.seen.append("closed")

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopWork if where == "catch_up" else Kept, where, interrupted)
    loggers = [Last(), Last()]
    with parpool(profile="inline", quiet=True) as pool, pytest.raises(KeyboardInterrupt):
        pool.parfor(work, [5, 6], loggers=loggers)
    for kept in loggers:
        *seen, last = kept.seen
        assert last == "closed"
        ends = [entry for entry in seen if isinstance(entry[1], str)]
        assert ends == [(0, "finished", {"result/value": 5}), (1, "cancelled", {})]


def test_a_trial_of_a_search_ends_once(tmp_path: Path) -> None:
    """A trial that continues after a rung is one run, also when a later call continues it."""

    def train(config: dict[str, Any]) -> float:
        first = load_checkpoint() or 0
        for epoch in range(first, 9):
            if config["x"] == 6 and epoch == 2 and not (tmp_path / "again").exists():
                (tmp_path / "again").touch()
                raise KeyboardInterrupt
            report(step=epoch, epoch=epoch, accuracy=config["x"] * epoch)
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break
        return float(config["x"] * epoch)

    def call(kept: Kept) -> None:
        with parpool(profile="inline", quiet=True) as pool:
            pool.search(
                train,
                {"x": search.int_uniform(1, 6)},
                metric="accuracy",
                num_trials=6,
                sampler=optuna.samplers.GridSampler({"x": [*range(1, 7)]}, seed=0),
                stop=search.halving(max_epochs=9),
                run_dir=tmp_path / "run",
                loggers=[kept],
            )

    first, second = Kept(), Kept()
    with pytest.raises(KeyboardInterrupt):
        call(first)
    call(second)
    for kept in (first, second):
        begun = [entry[0] for entry in kept.seen if isinstance(entry[1], dict)]
        ended = [entry[0] for entry in kept.seen if isinstance(entry[1], str)]
        assert sorted(begun) == sorted(ended)
        assert len(set(ended)) == len(ended), "once"
    assert [entry[2] for entry in second.seen if entry[:2] == (1, "finished")] == [
        {"result/value": 6.0}
    ], "that of its last part"


def climb(config: dict[str, Any]) -> float:
    """Train from the checkpoint on; the score is best at first."""
    score = 0.0
    for epoch in range(load_checkpoint() or 0, 9):
        score = config["x"] - epoch / 10
        report(step=epoch, epoch=epoch, accuracy=score)
        if current_task().should_stop:
            save_checkpoint(epoch + 1)
            break
    return score


def halved(
    pool: ParallelPool,
    fn: Callable[[dict[str, Any]], float],
    folder: Path,
    loggers: list[SweepLogger],
    num_trials: int,
) -> Any:
    return pool.search(
        fn,
        {"x": search.int_uniform(1, num_trials)},
        metric="accuracy",
        num_trials=num_trials,
        sampler=optuna.samplers.GridSampler({"x": [*range(1, num_trials + 1)]}, seed=0),
        stop=search.halving(max_epochs=9),
        run_dir=folder,
        loggers=loggers,
    )


def test_optuna_takes_no_pruned_trial_for_the_best(tmp_path: Path) -> None:
    """Live, and from the saved run."""
    live, saved = (f"sqlite:///{tmp_path}/{name}.db" for name in ("live", "saved"))
    with parpool(profile="inline", quiet=True) as pool:
        found = halved(pool, climb, tmp_path / "run", [OptunaLogger(live, "accuracy", "max")], 9)
    load_results(tmp_path / "run").to_optuna(saved, "accuracy")
    states = [state.upper() for state in found.to_frame().sort_values("trial")["state"]]
    assert set(states) == {"COMPLETE", "PRUNED"}
    for storage in (live, saved):
        study = optuna.load_study(study_name=None, storage=storage)
        assert [trial.state.name for trial in study.trials] == states
        assert study.best_value == found.study.best_value


def files_open_in(folder: Path) -> list[str]:
    found = [file.path for file in psutil.Process().open_files()]
    return [path for path in found if Path(path).is_relative_to(folder)]


def test_trials_that_wait_at_a_rung_keep_no_file_of_tensorboard_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_for, "TICK_S", 0.0)  # loggers hear of each part at once
    place, num_open = tmp_path / "tb", []

    def train(config: dict[str, Any]) -> float:
        num_open.append(len(files_open_in(place)))
        return climb(config)

    with parpool(profile="inline", quiet=True) as pool:
        halved(pool, train, tmp_path / "run", [TensorboardLogger(place)], 9)
    assert max(num_open) <= 1
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for folder in place.iterdir():
        log = events.EventAccumulator(str(folder)).Reload()
        steps = [point.step for point in log.Scalars("accuracy")]
        assert steps == [*range(len(steps))]
        assert len(log.Scalars("result/value")) == 1


def test_a_logger_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    class Failing(TensorboardLogger):
        def _log(self, *logged: Any) -> None:
            super()._log(*logged)
            raise OSError("no space left on the device")

    failing = Failing(tmp_path)
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda x: report(loss=x), [1.0], loggers=[failing])
    assert [*tmp_path.glob("item-0/*")]
    assert files_open_in(tmp_path) == []


def test_steps_and_names(tmp_path: Path) -> None:
    """A reported step counts; what is no number becomes a text. Restored items are not logged."""

    def work(config: dict[str, Any]) -> dict[str, Any]:
        report(step=10, loss=0.5)
        report(loss=0.25)
        return {"acc": {"val": 0.5, "huge": 10**400}, "note": "good"}

    items = [{"layers": [8, 8], "net": {"act": None}}, {"layers": 8}]
    with parpool(profile="inline", quiet=True) as pool:
        for count in (1, 2):
            kept = Kept()
            pool.parfor(work, items[:count], run_dir=tmp_path / "run", loggers=[kept])
            item = count - 1
            assert kept.seen == [
                (item, [{"layers": "[8, 8]", "net.act": None}, {"layers": 8}][item]),
                (item, 10, {"loss": 0.5}),
                (item, 1, {"loss": 0.25}),
                (item, "finished", {"result/acc.val": 0.5}),
            ]
        with pytest.raises(InvalidTypeError, match="is not a list of loggers"):
            pool.parfor(work, [1], loggers=Kept())  # type: ignore[call-overload]


@pytest.mark.parametrize(("profile", "max_workers"), [("inline", None), ("threads", 0)])
def test_loggers_are_called_in_the_thread_of_a_loop_that_runs_there(
    profile: str, max_workers: int | None, tmp_path: Path
) -> None:
    """Not in the one that writes the journal; and while the loop runs."""
    threads: dict[int, int] = {}

    class Threads(Kept):
        def _begin(self, *begun: Any) -> Any:
            threads[begun[0]] = threading.get_ident()
            return super()._begin(*begun)

    def work(item: int) -> int:
        report(loss=item)
        if item == 3:
            assert threads.get(0) == threading.get_ident(), "logged before the loop has ended"
            raise ValueError(item)
        return item

    kept = Threads()
    with parpool(profile=profile, quiet=True) as pool:
        results = pool.parfor(
            work,
            range(4),
            run_dir=tmp_path,
            loggers=[kept],
            on_error="collect",
            max_workers=max_workers,
            chunk_size=1,
        )
    assert str(results.errors) == "{3: ValueError(3)}"
    assert {*threads.values()} == {threading.get_ident()}
    ends = [entry[:2] for entry in kept.seen if isinstance(entry[1], str)]
    assert ends == [(0, "finished"), (1, "finished"), (2, "finished"), (3, "failed")]


def test_integers_that_floats_would_round(tmp_path: Path) -> None:
    """Optuna's ranges, and TensorBoard's parameters, are floats. A failed export can be repeated."""
    storage, seeds = f"sqlite:///{tmp_path}/study.db", [2**63 + 1, 2**64 - 1, 10**30, 5]
    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(
            lambda config: {"loss": 0.5},
            [{"seed": seed} for seed in seeds],
            name="seeds",
            loggers=[TensorboardLogger(tmp_path / "live")],
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypool.loggers._space_of", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            results.to_optuna(storage, "loss")
    results.to_optuna(storage, "loss")
    study = optuna.load_study(study_name="seeds", storage=storage)
    assert [trial.params["seed"] for trial in study.trials] == seeds
    results.to_tensorboard(tmp_path / "saved")
    for place in ("live", "saved"):
        found = read_tensorboard(tmp_path / place)
        assert [str(found[item][0]["seed"]) for item in range(4)] == [*map(str, seeds[:3]), "5.0"]


@pytest.mark.parametrize("is_one_failed", [False, True])
def test_a_duration_of_numpy_is_no_number(is_one_failed: bool, tmp_path: Path) -> None:
    """Although NumPy has it among its integers."""

    def work(x: int) -> dict[str, Any]:
        if x == 2 and is_one_failed:
            raise ValueError
        return {"score": x, "took": np.timedelta64(x, "s")}

    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(work, range(3), on_error="collect", run_dir=tmp_path / "run")
    assert results.to_frame()["took"][1] == np.timedelta64(1, "s")
    best = results.best("score")
    assert best.name == 2 - is_one_failed
    with pytest.raises(InvalidValueError, match="took"):
        results.best("took", "min")
    assert "score" in results._repr_html_()
    results.report(tmp_path / "report.html")
    results.to_tensorboard(tmp_path / "tb")
    assert RunReader(tmp_path / "run").look()["best"]["item"] == best.name


def test_a_relative_folder_of_tensorboard_is_that_where_the_logger_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    loggers = [TensorboardLogger("curves")]
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(lambda _: os.chdir(tmp_path / "other"), 2, loggers=loggers)
    assert sorted(path.name for path in (tmp_path / "curves").iterdir()) == ["item-0", "item-1"]


def test_watchers_see_what_a_fold_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.parallel_for.TICK_S", 0.0)
    kept = Kept()
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(abs, iter([-1, -2]), reduce=max, loggers=[kept], progress=True)
    ends = [entry for entry in kept.seen if "finished" in entry]
    assert ends == [(0, "finished", {"result/value": 1}), (1, "finished", {"result/value": 2})]


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(abs, [-1], run_dir="run")

    def export(*words: str) -> str:
        done = CliRunner().invoke(main, ["export", "run", "--to", *words])
        return f"{done.exit_code}: {done.output}"

    assert export("csv", "--output", "-").startswith("0: index,item,value,status")
    assert "--metric is required with --to optuna" in export(
        "optuna", "--output", "sqlite:///study.db"
    )
    words = ["optuna", "--output", "sqlite:///study.db", "--metric", "value"]
    assert "2: " in (unknown := export(*words))
    assert "'value' does not say whether small or large numbers are good" in unknown
    words += ["--mode", "max"]
    unknown = export(*words[:-3], "valeu", *words[-2:])
    assert "No item has reported or returned 'valeu'" in unknown
    assert "Did you mean value?" in unknown
    assert export(*words).startswith("0: "), "no study is in the way"
    again = export(*words)
    assert again.startswith("1: ")
    assert "--to optuna: Another study" in again
