"""A job on a cluster, as it is seen from another process."""

from __future__ import annotations

import contextlib
import pickle
from concurrent.futures import CancelledError
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raypool.cloud.sealed import Sealed, outcome_path, unseal
from raypool.errors import CloudError, RemoteTraceback, SerializationError, TaskError
from raypool.views.words import one_line

if TYPE_CHECKING:
    from raypool.cloud.jobs import JobInfo, Jobs

FETCH_TIMEOUT_S = 600
"""How long outputs may take on their way from another node to the dashboard [s]."""

ATTEMPTS = 3
"""So often a transfer that breaks off is begun."""

CALL = "raypool_call"
"""What the module is called, but for its key, that takes a call to a job; and what its key is called in the job's metadata."""

OUTPUTS = "raypool_outputs"
"""What is noted with a job whose outputs lie elsewhere than on its cluster."""


class Job:
    """A job on a cluster, from `batch` or `find_job`. Whatever it is asked, it asks the cluster."""

    def __init__(self, jobs: Jobs, info: JobInfo) -> None:
        self._jobs = jobs
        self._info = info
        self._outcome: tuple[Any, BaseException | None] | None = None

    @property
    def id(self) -> str:
        """Its id: with that, and the profile, another process finds it."""
        return self._info.id

    @property
    def name(self) -> str:
        """What it was called."""
        return self._info.name

    @property
    def state(self) -> str:
        """Where it is: "queued", "running", "finished", "failed" or "cancelled"."""
        return self._look().state

    @property
    def submitted_at(self) -> datetime | None:
        """When it was handed in."""
        return self._info.submitted_at

    @property
    def finished_at(self) -> datetime | None:
        """When it ended, None before."""
        return self._look().finished_at

    @property
    def exit_code(self) -> int | None:
        """With what its process has ended, negative after a signal; None before, and if it never began."""
        return self._look().exit_code

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with, None if it has not ended or ended well."""
        return self._fetch()[1] if self.state == "failed" else None

    @property
    def diary(self) -> str:
        """What the function has printed so far, and whatever else its process has; what workers print stands in their futures.

        Source:
            MATLAB R2025b, diary of a parallel.Job.
        """
        # Two lines are Ray's own; the second is written late, so that what a quick one prints may stand before it.
        text = self._jobs.log(self.id).replace(f"Running entrypoint for job {self.id}: {self._info.command}\n", "", 1)
        first, _, rest = text.partition("\n")
        return rest if first.endswith("-- Runtime env is setting up.") else text

    @property
    def outputs_at(self) -> str:
        """Where its outputs lie, or will: the folder or URL that was given, else where on its node."""
        place = self._info.metadata.get(OUTPUTS)
        if place is not None:
            return f"{place}/{self._key()}"
        return f"{outcome_path(self._key())} in the folder of Ray's session on node {self._look().node or 'of the head'}"

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        if not self._info.has_ended:
            self._info = self._jobs.wait(self.id, timeout_s)
        return self._info.has_ended

    def fetch_outputs(self, timeout_s: float | None = None) -> Any:
        """Return what the function returned, waiting for it at most so long.

        Raises:
            TimeoutError: It has not ended by then; it goes on.
            concurrent.futures.CancelledError: It was cancelled.
            Exception: What the function raised, as itself; the traceback there is its cause.
            TaskError: It ended otherwise: its process was killed, or never began.
            SerializationError: What it returned cannot be opened here.
            CloudError: Its cluster does not answer, or does not have the outputs any more.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"Job {self.id} ({self.name}) has not ended after timeout_s={timeout_s:g}; it goes on.")
        if self._info.state == "cancelled":
            raise CancelledError(f"Job {self.id} ({self.name}) was cancelled.")
        value, error = self._fetch()
        if error is not None:
            raise error
        return value

    def cancel(self) -> bool:
        """End it, whether it waits or runs; return whether it had not ended by itself.

        Raises:
            CloudError: The cluster does not answer, or the job does not end.
        """
        if self._look().has_ended:
            return self._info.state == "cancelled"
        self._info = self._jobs.stop(self.id)
        return self._info.state == "cancelled"

    def __repr__(self) -> str:
        return f"<Job {self.id} ({one_line(self.name)}): {self._info.state}>"

    def _look(self) -> JobInfo:
        if not self._info.has_ended:
            self._info = self._jobs.look(self.id)
        return self._info

    def _key(self) -> str:
        key = self._info.metadata.get(CALL)
        if key is None:
            raise CloudError(
                f"Job {self.id} has no outputs: it was not handed in by raypool.batch. What it printed is in its diary."
            )
        return key

    def _fetch(self) -> tuple[Any, BaseException | None]:
        """Return what has come of it: a value, or an exception."""
        if self._outcome is None:
            sealed = self._sealed()
            self._outcome = (None, self._unsaid()) if sealed is None else self._opened(sealed)
        return self._outcome

    def _sealed(self) -> Sealed | None:
        """Return what it has left; None if it could leave nothing."""
        key, place = self._key(), self._info.metadata.get(OUTPUTS)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return unseal(self._read(key, place))
            except FileNotFoundError:
                if self._info.exit_code == 0:
                    where = f"{place}/{key}" if place is not None else f"node {self._info.node} of {self._jobs.dashboard.url}"
                    raise CloudError(
                        f"The outputs of job {self.id} are not there any more: it has put them on {where}."
                    ) from None
                return None
            except CloudError as error:
                if attempt == ATTEMPTS or getattr(error, "status", None) is not None:
                    raise
        raise AssertionError

    def _read(self, key: str, place: str | None) -> bytes | bytearray:
        """Read what lies on the disk of its node, or at the place that was given: on the node if that had failed there."""
        try:
            return self._read_from_node(key)
        except (FileNotFoundError, CloudError) as error:
            if place is None:
                raise
            not_there = error
        try:
            return read(place, key)
        except FileNotFoundError:
            raise not_there from None

    def _read_from_node(self, key: str) -> bytearray:
        if self._info.node is None:
            raise FileNotFoundError
        query = {"node_id": self._info.node, "filename": outcome_path(key), "lines": -1, "timeout": FETCH_TIMEOUT_S}
        data = bytearray()
        try:
            for piece in self._jobs.dashboard.pieces("/api/v0/logs/file", **query):
                data += piece
        except CloudError as error:
            if getattr(error, "status", None) == 500 and "not found" in str(error):
                raise FileNotFoundError from error
            raise
        return data

    def _opened(self, sealed: Sealed) -> tuple[Any, BaseException | None]:
        from raypool.engine.answers import unpack_failure

        if sealed.kind == "error":
            error, text = unpack_failure(bytes(sealed.body))
            with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
                error.add_note(f"raypool: job {self.id} ({self.name})")
                if error.__cause__ is None and text is not None:
                    error.__cause__ = RemoteTraceback(text)
            return None, error
        try:
            return pickle.loads(sealed.body), None
        except Exception as error:
            raise SerializationError(
                f"The outputs of job {self.id} have arrived but cannot be unpickled here ({type(error).__name__}: {error}). "
                f"Their classes must be importable in this process too; they were made by Python {sealed.python}.",
                what="the outputs of a job",
            ) from error

    def _unsaid(self) -> TaskError:
        """Return the error for one that has left nothing."""
        printed = self.diary.strip().splitlines()
        if self._info.exit_code is None:
            return TaskError(f"Job {self.id} ({self.name}) could not be started: {self._info.message.strip()}")
        if any("No module named 'raypool'" in line or "No module named raypool" in line for line in printed):
            hint = "Raypool is not installed there: install it on the cluster, or name it in the profile's packages."
        else:
            hint = "Something has killed it, or ended its process. It printed last: " + " / ".join(printed[-3:])
        return TaskError(
            f"Job {self.id} ({self.name}) has ended with exit code {self._info.exit_code} and has left nothing. {hint}"
        )


def read(place: str, key: str) -> bytes:
    """Read what a job has left in a folder or at a URL.

    Raises:
        FileNotFoundError: Nothing is there.
        CloudError: It cannot be read.
    """
    from raypool.engine.checkpoint_folders import filesystem

    files, root = filesystem(place, "outputs")
    try:
        with files.open_input_stream(f"{root}/{key}") as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CloudError(f"The outputs at {place}/{key} cannot be read: {error}.", status=None) from error
