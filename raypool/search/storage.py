"""Where the trials of a search are kept: storages that cannot be reached for a while, what samplers
see of them, and the space that a folder was made for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.errors import JournalError
from raypool.journal.files import write_file

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, TrialState

logger = logging.getLogger("raypool")

WAIT_S = 60.0
"""How long the storage of a study may be out of reach [s]."""

PAUSE_S = 0.2

SPACE = "space.json"
"""The file in the folder of a search with its space."""


def undoing(undo: Callable[..., Any], *args: Any) -> contextlib.ExitStack:
    """Return a context that calls `undo(*args)` at its end."""
    # a generator of `contextmanager` would set attributes of the user's exceptions: some refuse
    stack = contextlib.ExitStack()
    stack.callback(undo, *args)
    return stack


def patient(study: optuna.Study, run_dir: Path | None) -> contextlib.ExitStack:
    """Let all calls of a study's storage wait while that is locked or out of reach."""
    storage = study._storage  # private, but samplers, pruners and trials use it as well
    study._storage = PatientStorage(storage, study.study_name, run_dir)  # type: ignore[assignment]
    return undoing(setattr, study, "_storage", storage)


def stoppable(study: optuna.Study) -> contextlib.ExitStack:
    """Let `study.stop()`, which callbacks and some samplers call, only set the study's flag."""
    # private: there is no public way outside of `Study.optimize`
    local = study._thread_local
    local.in_optimize_loop, study._stop_flag = True, False
    return undoing(setattr, local, "in_optimize_loop", False)


class PatientStorage:
    """A storage of Optuna's whose calls are repeated, for a minute, while they fail."""

    def __init__(self, storage: Any, name: str, run_dir: Path | None) -> None:
        self._storage, self._name, self._run_dir = storage, name, run_dir
        self._waiting: Container[int] = ()

    @contextlib.contextmanager
    def showing(self, waiting: Container[int]) -> Iterator[None]:
        """Show a sampler the trials with these numbers, which wait at a rung, as pruned.

        It learns nothing from the scores of running trials.
        """
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = ()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of the study, or those in these states."""
        from optuna.trial import TrialState

        call = functools.partial(self._call, self._storage.get_all_trials, study_id, deepcopy)
        found: list[FrozenTrial]
        if not self._waiting or (states is not None and TrialState.PRUNED not in states):
            found = call(states)
            return found
        shown = []
        for trial in call():
            if trial.number in self._waiting:
                trial = copy.copy(trial)
                trial.state = TrialState.PRUNED
            if states is None or trial.state in states:
                shown.append(trial)
        return shown

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from optuna.exceptions import StorageInternalError

        gives_up_at = None
        while True:
            try:
                return method(*args, **kwargs)
            except (StorageInternalError, OSError) as error:
                reason = getattr(error.__cause__, "orig", None) or error.__cause__ or error
                if gives_up_at is None:
                    gives_up_at = time.monotonic() + WAIT_S
                    logger.warning(
                        "The storage of study %r cannot be used (%s). raypool tries again for"
                        " %g s; running trials continue.",
                        self._name,
                        reason,
                        WAIT_S,
                    )
                if time.monotonic() >= gives_up_at:
                    step = "Then call again."
                    if self._run_dir is not None:
                        step = "Then call again with the same run_dir: no finished trial is lost."
                    raise JournalError(
                        f"The storage of study {self._name!r} could not be used for {WAIT_S:g} s"
                        f" ({reason}). Another process may hold a lock, or the file or server may"
                        f" be gone. {step}",
                        run_dir=str(self._run_dir or ""),
                    ) from error
            time.sleep(PAUSE_S)


def check_space(
    run_dir: Path, distributions: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Note the space of a search in its folder, or make sure that it is the same as before.

    Raises:
        JournalError: It is another one.
    """
    from optuna.distributions import distribution_to_json

    space = {name: json.loads(distribution_to_json(each)) for name, each in distributions.items()}
    space = {name: json.dumps(value) for name, value in {**space, **constants}.items()}
    path = run_dir / SPACE
    try:
        known = {name: json.dumps(value) for name, value in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        text = ",\n ".join(f"{json.dumps(name)}: {value}" for name, value in space.items())
        write_file(path, f"{{{text}}}\n".encode())
        return
    for name in {**known, **space}:
        before, now = (described(given.get(name)) for given in (known, space))
        if before != now:
            raise JournalError(
                f"{run_dir} holds trials of another space: {name!r} was {before} there, and is"
                f" {now} in this call. Use the same space, or another run_dir.",
                run_dir=str(run_dir),
            )


def described(text: str | None) -> str:
    """Return a range as Optuna prints it, or a value, or "missing"."""
    from optuna.distributions import json_to_distribution

    if text is None:
        return "missing"
    return str(json_to_distribution(text)) if text.startswith("{") else text
