"""The notice that a loop has ended: a call of the user's function, or a POST to a webhook."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypool.results import Results
from raypool.views.words import describe_error, duration

TIMEOUT_S = 10.0
"""How long a webhook may take to answer [s]."""

logger = logging.getLogger("raypool")


def notify(
    on_end: Callable[[Any], object] | str,
    found: Any,
    label: str,
    run_dir: Path | None,
    duration_s: float,
    error: BaseException | None,
) -> None:
    """Notify about the end of a loop; a failure is only logged.

    Args:
        on_end: The function or URL.
        found: The loop's `Results`, or the `SearchResults` with them.
        label: The loop's name.
        run_dir: Its folder.
        duration_s: How long it took [s].
        error: What it raises.
    """
    is_url = isinstance(on_end, str)
    try:
        if isinstance(on_end, str):
            results = found if isinstance(found, Results) else found.results
            post(on_end, summary(results, label, run_dir, duration_s, error))
        else:
            on_end(found)
    except Exception as problem:
        # without the URL: whoever knows it can post there
        logger.warning(
            "%s of %s failed, which does not change its results: %s.",
            "The notification about the end" if is_url else "on_end",
            label,
            describe_error(problem),
            exc_info=None if is_url else problem,
        )
    except BaseException:
        if error is None:  # a second Ctrl-C does not replace the error
            raise


def summary(
    results: Results[Any],
    label: str,
    run_dir: Path | None,
    duration_s: float,
    error: BaseException | None,
) -> dict[str, Any]:
    """Return the object that a webhook gets."""
    is_cancelled = isinstance(error, (KeyboardInterrupt, concurrent.futures.CancelledError))
    state = "finished" if error is None else "cancelled" if is_cancelled else "failed"
    finished, failed = results._counts["finished"], len(results.errors)
    first = error if error is not None else next(iter(results.errors.values()), None)
    return {
        # which Slack, Mattermost and others show
        "text": f"{label} {state} after {duration(duration_s)}: {finished:,} of {len(results):,}"
        f" items finished, {failed:,} failed",
        "label": label,
        "state": state,
        "items": len(results),
        "finished": finished,
        "failed": failed,
        "duration_s": round(duration_s, 3),
        "run_dir": None if run_dir is None else str(run_dir),
        "error": None if first is None else describe_error(first),
    }


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it without the body."""

    def redirect_request(self, *args: Any) -> None:
        """Follow none."""


def post(url: str, body: dict[str, Any]) -> None:
    """Post JSON to a URL; raise OSError if that fails or takes too long."""
    headers = {"Content-Type": "application/json", "User-Agent": "raypool"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer: concurrent.futures.Future[None] = concurrent.futures.Future()

    def send() -> None:
        try:
            with urllib.request.build_opener(NoRedirects).open(request, timeout=TIMEOUT_S):
                answer.set_result(None)
        except BaseException as error:  # else the caller would wait for the whole time limit
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # else its connection would be open until the next collection
            answer.set_exception(error)

    # urllib's limit is for each read, of which a slow server needs many
    threading.Thread(target=send, name="raypool webhook", daemon=True).start()
    try:
        answer.result(TIMEOUT_S)
    except TimeoutError:
        raise TimeoutError(f"it has not answered within {TIMEOUT_S:g} s") from None
