"""The attempts of a training: when another one is made, from where it begins, and what is said at
the end. Without a pool.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypool.channel.feed import Feed
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    LossReason,
    PoolClosedError,
    ResourceError,
    SpmdError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
)
from raypool.futures import Future
from raypool.options import Options
from raypool.train.checkpoints import RankEnd, TrainingAttempt
from raypool.train.controller import Controller, RankPlaces, start_run
from raypool.train.runs import RunOptions, TrainingResult, TrainingRun, run_folder

WAIT_S = 60.0


def lost(rank: int = 1, reason: LossReason = LossReason.EXIT) -> SpmdError:
    why = WorkerLostError("Worker 1 was killed.", reason=reason, attempts=1)
    return SpmdError(
        f"Rank {rank} of fit failed: Worker 1 was killed.", failures={rank: why}, first_rank=rank
    )


def failed(error: BaseException, rank: int = 0) -> SpmdError:
    return SpmdError(
        f"Rank {rank} of fit failed: {error}.", failures={rank: error}, first_rank=rank
    )


class ScriptedLane:
    """Does in each attempt what the script says: returns the ends of the ranks, raises, or waits
    for the test.
    """

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.plans: list[TrainingAttempt] = []
        self.crews: list[tuple[int, Any]] = []
        self.options: list[Options] = []
        self.attempts: list[Future[Any]] = []
        self.begun = threading.Semaphore(0)

    def begin(
        self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options
    ) -> Future[Any]:
        self.plans.append(plan)
        self.crews.append((size, places))
        self.options.append(options)
        attempt: Future[Any] = Future(
            "attempt", on_ask=lambda future: future.cancelled() and future.notify_cancelled()
        )
        attempt.feed = Feed()
        self.attempts.append(attempt)
        does = self.script.pop(0)
        if does == "cannot begin":
            raise PoolClosedError("The pool was shut down.")
        if does != "waits in the queue":
            attempt.start()
            attempt.started_at = datetime.now(UTC)
        if isinstance(does, BaseException):
            attempt.set_exception(does)
        elif isinstance(does, list):
            attempt.feed.add_row((1.0, 0, plan.attempt, {"loss": 0.5}))
            attempt.set_result(does)
        self.begun.release()
        return attempt


def an_engine(check_open: Callable[[], None] = lambda: None) -> Any:
    profile = SimpleNamespace(backend="threads", start_timeout_s=WAIT_S)
    driver = SimpleNamespace(is_own_thread=False, is_forked=False)
    return SimpleNamespace(profile=profile, helpers=set(), check_open=check_open, driver=driver)


def train(
    lane: ScriptedLane,
    folder: Path,
    options: Options | None = None,
    numbers: Any = (0, 1),
    places: Any = None,
    **kept: Any,
) -> TrainingRun:
    run = TrainingRun("fit", folder)
    kept_options = RunOptions(run_dir=folder, **kept)
    engine = an_engine()
    crew = RankPlaces(2, places, numbers if callable(numbers) else lambda: numbers, engine)
    return start_run(
        run, Controller(run, lane, crew, options or Options(), kept_options, None), engine
    )


def keep_checkpoint(folder: Path, index: int, **metrics: float) -> Path:
    path = folder / f"checkpoint_{index:06}"
    path.mkdir(parents=True)
    (path / "model").write_text("m")
    entry = {"index": index, "metrics": metrics, "time": 1.0, "attempt": 1}
    (folder / f"checkpoint_{index:06}.json").write_text(json.dumps(entry))
    return path


ENDS = [RankEnd("zero", {"loss": 0.5}), RankEnd("one", None)]


def test_the_result_of_a_training(tmp_path: Path) -> None:
    run = train(ScriptedLane(ENDS), tmp_path / "new")
    result = run.result(WAIT_S)
    assert result.values == ["zero", "one"]
    assert result.metrics == {"loss": 0.5}
    assert result.metrics_frame[["rank", "attempt", "loss"]].values.tolist() == [[0, 1, 0.5]]
    assert (result.checkpoint, result.best_checkpoint, result.path) == (None, None, None)
    assert (run.state, run.attempts) == ("finished", 1)
    assert run.started_at is not None
    assert run.finished_at is not None


def test_a_lost_worker_is_worth_another_attempt_from_the_last_checkpoint(tmp_path: Path) -> None:
    path = keep_checkpoint(tmp_path, 7, loss=0.1)
    lane = ScriptedLane(lost(), ENDS)
    result = train(lane, tmp_path, best_metric="loss").result(WAIT_S)
    assert [plan.attempt for plan in lane.plans] == [1, 2]
    assert lane.plans[1].start == str(path)
    assert result.checkpoint is not None
    assert result.checkpoint.path == result.best_checkpoint.path == str(path)  # type: ignore[union-attr]
    assert result.path == tmp_path
    assert result.metrics_frame["attempt"].tolist() == [2]


def test_a_named_checkpoint_is_where_it_begins_unless_the_folder_has_one(tmp_path: Path) -> None:
    other = keep_checkpoint(tmp_path / "other", 1)
    lane = ScriptedLane(ENDS)
    train(lane, tmp_path / "new", start_from=other).result(WAIT_S)
    assert lane.plans[0].start == str(other)
    own = keep_checkpoint(tmp_path / "new", 3)
    lane = ScriptedLane(ENDS)
    train(lane, tmp_path / "new", start_from=other).result(WAIT_S)
    assert lane.plans[0].start == str(own)


def test_a_training_that_had_ended_before_still_says_how(tmp_path: Path) -> None:
    keep_checkpoint(tmp_path, 7, loss=0.1)
    lane = ScriptedLane([])
    lane.script = [failed(KeyError("x"))]
    with pytest.raises(TrainingError) as caught:
        train(lane, tmp_path).result(WAIT_S)
    assert caught.value.result.metrics == {"loss": 0.1}


def test_as_many_attempts_as_retries_allow(tmp_path: Path) -> None:
    lane = ScriptedLane(lost(), lost(), lost())
    begin = lane.begin

    def begin_and_keep(*args: Any) -> Future[Any]:
        if len(lane.plans) == 1:
            keep_checkpoint(tmp_path, 1)
        return begin(*args)

    lane.begin = begin_and_keep  # type: ignore[method-assign]
    run = train(lane, tmp_path, Options(retries=2))
    with pytest.raises(
        TrainingError,
        match=r"It was attempt 3\. Resume from its last checkpoint, .*checkpoint_000001",
    ) as caught:
        run.result(WAIT_S)
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.__cause__, WorkerLostError)
    assert caught.value.result.checkpoint is not None
    assert run.state == "failed"


def test_a_machine_that_was_taken_back_is_charged_to_nobody(tmp_path: Path) -> None:
    """Also with retries=0; what fails otherwise is charged as ever."""
    taken = [lost(reason=LossReason.PREEMPTED)] * 5
    lane = ScriptedLane(*taken, ENDS)
    assert train(lane, tmp_path, Options(retries=0)).result(WAIT_S).values == ["zero", "one"]
    assert [plan.attempt for plan in lane.plans] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TrainingError, match="It was attempt 3"):
        train(ScriptedLane(lost(), taken[0], lost()), tmp_path, Options(retries=1)).result(WAIT_S)


@pytest.mark.parametrize("reason", [LossReason.PREEMPTED, LossReason.NODE])
def test_workers_on_machines_that_are_gone_are_waited_for(
    tmp_path: Path, reason: LossReason
) -> None:
    there = [0]
    lane = ScriptedLane(lost(reason=reason), ENDS)
    threading.Timer(0.3, there.append, [7]).start()
    assert train(lane, tmp_path, numbers=lambda: tuple(there)).result(WAIT_S).values == [
        "zero",
        "one",
    ]
    assert lane.crews == [(2, None), (2, None)]
    assert there == [0, 7]


def test_an_attempt_that_waits_for_workers_on_a_machine_that_is_gone(tmp_path: Path) -> None:
    """That the machine is gone is known after the loss: such an attempt ends before it begins, and
    costs nothing.
    """
    there = [0, 1]
    gone = ResourceError("Requested 2, available 1.", requested=2, available=1, holders=())
    lane = ScriptedLane(lost(reason=LossReason.NODE), "waits in the queue", lost(), ENDS)
    run = train(lane, tmp_path, Options(retries=2), numbers=lambda: tuple(there))
    assert lane.begun.acquire(timeout=WAIT_S)
    assert lane.begun.acquire(timeout=WAIT_S)
    there.remove(1)
    lane.attempts[1].start()
    lane.attempts[1].set_exception(gone)
    threading.Timer(0.3, there.append, [7]).start()
    assert run.result(WAIT_S).values == ["zero", "one"]
    assert there == [0, 7]


def test_a_lost_machine_explains_one_attempt_without_room(tmp_path: Path) -> None:
    """If all workers are there, something else takes the room: that is the error."""
    gone = ResourceError("No core is free.", requested=1, available=0, holders=())
    lane = ScriptedLane(lost(reason=LossReason.NODE), gone, gone)
    with pytest.raises(TrainingError, match="No core is free") as caught:
        train(lane, tmp_path, Options(retries=1)).result(WAIT_S)
    assert caught.value.__cause__ is gone
    assert len(lane.plans) == 3


def test_a_signal_handler_may_ask_a_training_to_stop(tmp_path: Path) -> None:
    """Also one that interrupts a thread that looks at the attempts."""
    run, has_asked = TrainingRun("fit", tmp_path), threading.Event()

    def look() -> None:
        with run._adopting:
            run.request_stop()
        has_asked.set()

    threading.Thread(target=look, daemon=True).start()
    assert has_asked.wait(WAIT_S)


def test_they_are_not_waited_for_where_others_are_enough(tmp_path: Path) -> None:
    lane = ScriptedLane(lost(reason=LossReason.PREEMPTED), ENDS)
    train(
        lane, tmp_path, numbers=lambda: (0, 1) if len(lane.plans) == 0 else (0,), min_workers=1
    ).result(WAIT_S / 2)
    assert lane.crews == [(2, None), (1, None)]


def test_what_the_loop_raises_is_not_tried_again_unless_named(tmp_path: Path) -> None:
    lane = ScriptedLane(failed(OSError("disk")), ENDS)
    with pytest.raises(TrainingError, match="disk") as caught:
        train(lane, tmp_path).result(WAIT_S)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(lane.plans) == 1
    lane = ScriptedLane(failed(OSError("disk")), ENDS)
    assert train(lane, tmp_path, Options(retry_on=(OSError,))).result(WAIT_S).values == [
        "zero",
        "one",
    ]


def test_the_time_limit_is_one_for_all_attempts(tmp_path: Path) -> None:
    lane = ScriptedLane(
        lost(), failed(TaskTimeoutError("it had not ended after timeout_s=98.2345"))
    )
    run = train(lane, tmp_path, Options(timeout_s=100.0))
    with pytest.raises(TaskTimeoutError, match=r"after timeout_s=100\.") as caught:
        run.result(WAIT_S)
    assert isinstance(caught.value.result, TrainingResult)  # type: ignore[attr-defined]
    assert lane.options[0].timeout_s == 100.0
    assert 0 < lane.options[1].timeout_s < 100.0  # type: ignore[operator]


def test_a_training_whose_time_is_up_does_not_run_again(tmp_path: Path) -> None:
    """Whatever `retry_on` names: no time is left."""
    lane = ScriptedLane(failed(TaskTimeoutError("it had not ended after timeout_s=100")), ENDS)
    run = train(lane, tmp_path, Options(timeout_s=100.0, retry_on=(Exception,)))
    with pytest.raises(TaskTimeoutError):
        run.result(WAIT_S)
    assert run.attempts == 1


def test_fewer_workers_are_enough_if_that_was_said(tmp_path: Path) -> None:
    there = [0, 1]
    lane = ScriptedLane(lost(), ENDS)
    first_begin = lane.begin

    def begin(*args: Any) -> Future[Any]:
        attempt = first_begin(*args)
        there[:] = [0]
        return attempt

    lane.begin = begin  # type: ignore[method-assign]
    train(lane, tmp_path, numbers=lambda: there, min_workers=1).result(WAIT_S)
    assert [size for size, _ in lane.crews] == [2, 1]


def test_workers_that_are_gone_before_it_begins(tmp_path: Path) -> None:
    there = [3, 5]
    gone = ResourceError("Requested 2, available 1.", requested=2, available=1, holders=())
    lane = ScriptedLane("waits in the queue", ENDS)
    run = train(lane, tmp_path, numbers=lambda: there, places=(5, 3), min_workers=1)
    assert lane.begun.acquire(timeout=WAIT_S)
    there[:] = [5]
    lane.attempts[0].start()
    lane.attempts[0].set_exception(gone)
    run.result(WAIT_S)
    assert lane.crews == [(2, (5, 3)), (1, (5,))]


def test_without_the_workers_that_it_needs(tmp_path: Path) -> None:
    gone = ResourceError("Requested 2, available 1.", requested=2, available=1, holders=())
    with pytest.raises(TrainingError, match="Requested 2, available 1") as caught:
        train(ScriptedLane(gone), tmp_path, numbers=[0]).result(WAIT_S)
    assert isinstance(caught.value.__cause__, ResourceError)
    with pytest.raises(
        TrainingError, match=r"lost a worker for good: requested 2, available 1\. .*min_workers=1"
    ):
        train(ScriptedLane(lost(), gone), tmp_path, numbers=[0]).result(WAIT_S)


def test_cancelled_while_it_waits_and_while_it_runs(tmp_path: Path) -> None:
    for does in ("waits in the queue", "runs"):
        lane = ScriptedLane(does)
        run = train(lane, tmp_path)
        assert run.state == ("queued" if does == "waits in the queue" else "running")
        assert run.cancel()
        assert run.state == "cancelled"
        assert lane.attempts[0].cancelled()
        with pytest.raises(CancelledError):
            run.result(WAIT_S)


def test_an_attempt_that_somebody_cancels_ends_the_training(tmp_path: Path) -> None:
    lane = ScriptedLane("runs")
    run = train(lane, tmp_path)
    lane.attempts[0].cancel()
    with pytest.raises(CancelledError):
        run.result(WAIT_S)


def test_a_wish_to_stop_reaches_the_next_attempt_too(tmp_path: Path) -> None:
    lane = ScriptedLane("runs", "runs")
    run = train(lane, tmp_path)
    assert run.request_stop()
    assert lane.attempts[0].stop_requested
    lane.attempts[0].set_exception(lost())
    assert lane.begun.acquire(timeout=WAIT_S)
    assert lane.begun.acquire(timeout=WAIT_S)
    while not lane.attempts[1].stop_requested and not run.done():
        pass  # it is told right after the attempt was made; the test has a time limit
    lane.attempts[1].set_result(ENDS)
    assert run.result(WAIT_S).values == ["zero", "one"]
    assert not run.request_stop()


def test_a_result_of_which_nothing_can_be_made_is_not_lost(tmp_path: Path) -> None:
    run = TrainingRun("fit", tmp_path)

    def finish(result: TrainingResult) -> TrainingResult:
        raise KeyError("no such layer")

    engine = an_engine()
    controller = Controller(
        run,
        ScriptedLane(ENDS),
        RankPlaces(2, None, lambda: (0, 1), engine),
        Options(),
        RunOptions(),
        finish,
    )
    start_run(run, controller, engine)
    with pytest.raises(
        TrainingError, match=r"has finished, but .* KeyError: 'no such layer'"
    ) as caught:
        run.result(WAIT_S)
    assert caught.value.result.values == ["zero", "one"]


def test_a_folder_that_cannot_be_read_is_no_reason_to_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = ScriptedLane("runs")
    run = train(lane, tmp_path)

    def stale(folder: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("raypool.train.controller.latest", stale)
    lane.attempts[0].set_exception(failed(KeyError("x")))
    with pytest.raises(SpmdError) as caught:
        run.result(WAIT_S)
    assert "Stale file handle" in caught.value.__notes__[0]


def test_a_folder_is_one_trainings_own(tmp_path: Path) -> None:
    lane = ScriptedLane("runs")
    run = train(lane, tmp_path / "a")
    with pytest.raises(InvalidValueError, match="in use by the training 'fit', which is running"):
        train(ScriptedLane(ENDS), tmp_path / "b" / ".." / "a")
    lane.attempts[0].set_result(ENDS)
    run.result(WAIT_S)
    with pytest.raises(PoolClosedError):
        train(ScriptedLane("cannot begin"), tmp_path / "a")
    train(ScriptedLane(ENDS), tmp_path / "a").result(WAIT_S)
    assert repr(run) == "<TrainingRun 'fit': finished>"


HOLDER = """
    import sys, time
    from pathlib import Path
    from raypool.journal.lock import RunLock
    from raypool.train.runs import LOCK
    lock = RunLock(Path({folder!r}), LOCK)
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_folder_is_one_processes_own(tmp_path: Path, start_python: Callable[..., Any]) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    other = start_python(HOLDER.format(folder=str(folder)))
    assert other.process.stdout.readline() == "held\n"
    with pytest.raises(
        InvalidValueError,
        match=rf"run_dir={folder} is in use by process {other.pid} on .*, since 20",
    ):
        train(ScriptedLane(ENDS), folder)
    other.clean_up()
    assert train(ScriptedLane(ENDS), folder).result(WAIT_S).path is None
    assert folder.is_dir()


def test_a_folder_that_cannot_be_written_is_refused_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, folder = ScriptedLane(ENDS), tmp_path / "file" / "run"
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"run cannot be written \(Not a directory\)"):
        train(lane, folder)
    assert not lane.attempts
    # through Ray Client only the workers' machines may have the folder
    monkeypatch.setattr("raypool.backends.ray.client.is_far", lambda: True)
    assert train(lane, folder).result(WAIT_S).values == ["zero", "one"]


def test_a_folder_that_was_made_for_a_training_goes_if_it_keeps_nothing(tmp_path: Path) -> None:
    lane = ScriptedLane("runs")
    run = train(lane, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    lane.attempts[0].set_result(ENDS)
    assert run.result(WAIT_S).path is None
    assert not (tmp_path / "a" / "b").exists()


def test_a_checkpoint_that_led_nowhere_is_not_recommended(tmp_path: Path) -> None:
    keep_checkpoint(tmp_path, 1)
    with pytest.raises(TrainingError) as caught:
        train(ScriptedLane(failed(KeyError("x"))), tmp_path).result(WAIT_S)
    assert "goes on" not in str(caught.value)
    assert caught.value.result.checkpoint is not None


def test_a_pool_that_closes_between_attempts(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Worker 1 was killed"):
        train(ScriptedLane(lost(), "cannot begin"), tmp_path).result(WAIT_S)


def test_what_cannot_begin_fails_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(PoolClosedError):
        train(ScriptedLane("cannot begin"), tmp_path)


def test_running_duration_is_that_of_the_attempts(tmp_path: Path) -> None:
    lane = ScriptedLane("runs")
    run = train(lane, tmp_path)
    lane.attempts[0].started_at = datetime.now(UTC) - timedelta(seconds=5)
    assert run.running_duration_s is not None
    assert run.running_duration_s >= 5
    run.cancel()
    assert run.finished_at is not None
    ended_after = run.finished_at - lane.attempts[0].started_at
    assert run.running_duration_s == ended_after.total_seconds(), "it does not grow after the end"


def test_folders_have_readable_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("raypool.train.runs.RUNS", "raypool_runs")
    first, second = (run_folder(RunOptions(), "a loop/with <lambda>") for _ in range(2))
    assert first.parent == tmp_path / "raypool_runs"
    assert first.name.startswith("a-loop-with--lambda-")
    assert run_folder(RunOptions(), "<lambda>").name.startswith("lambda-2")
    assert first != second
    assert not first.exists()


CANNOT_WORK = [
    ("run_dir", 7, InvalidTypeError, "not a path"),
    ("run_dir", "", InvalidValueError, "is empty"),
    ("run_dir", "s3://bucket/run", InvalidValueError, "is a URL"),
    ("keep_checkpoints", 0, InvalidValueError, "must be at least 1, not 0"),
    ("keep_checkpoints", 1.5, InvalidTypeError, "must be an integer"),
    ("min_workers", 0, InvalidValueError, "must be at least 1, not 0"),
    ("best_metric", 3, InvalidTypeError, "not the name"),
    ("best_mode", "least", InvalidValueError, "best_mode must be 'min' or 'max', not"),
    (
        "start_from",
        3,
        InvalidTypeError,
        "must be the folder of a checkpoint or a ray.train.Checkpoint",
    ),
    ("start_from", "/nowhere/at/all", InvalidValueError, "no such folder"),
    ("start_from", "s3://bucket/run", InvalidValueError, "remote storage.*Copy it to one first"),
]


def test_options_that_cannot_work() -> None:
    for field, value, error, says in CANNOT_WORK:
        with pytest.raises(error, match=says):
            RunOptions(**{field: value})


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="the folder is empty"):
        RunOptions(start_from=tmp_path)
    bucket = SimpleNamespace(path="bucket/run", filesystem=SimpleNamespace(type_name="s3"))
    with pytest.raises(InvalidValueError, match="remote storage"):
        RunOptions(start_from=bucket)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidValueError, match="it is a file"):
        RunOptions(start_from=file)
    with pytest.raises(InvalidValueError, match="is a file"):
        RunOptions(run_dir=file)
