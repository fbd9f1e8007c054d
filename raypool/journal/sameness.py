"""Whether a call goes on with what a folder was made for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from raypool.errors import JournalError
from raypool.journal.opening import Contents
from raypool.journal.schema import MAX_TEXT_BYTES
from raypool.journal.source import Source

logger = logging.getLogger("raypool")


def check_same(folder: Path, contents: Contents, function: str, seed: int | None) -> None:
    """Make sure that a folder was made for this function and seed.

    Raises:
        JournalError: It was not.
    """
    if not contents["runs"]:
        return
    _, known_function, known_seed, *_ = contents["runs"][-1]
    known_seed = json.loads(known_seed)
    if known_function != function[:MAX_TEXT_BYTES]:
        raise JournalError(
            f"{folder} holds what became of {known_function}; this call is for {function}. Give each function its own folder.",
            run_dir=str(folder),
        )
    if known_seed != seed:
        raise JournalError(
            f"{folder} was made with seed={known_seed}; this call has seed={seed}, which gives other values. "
            f"Give seed={known_seed}, or another folder.",
            run_dir=str(folder),
        )


def check_held(folder: Path, contents: Contents, source: Source | None) -> None:
    """See whether a function holds what it held in the run before.

    Raises:
        JournalError: It is given other arguments: what it returns is something else then.
    """
    known = next((Source.from_text(row[3]) for row in reversed(contents["runs"]) if row[3]), None)
    if known is None or source is None:
        return
    if known.given is not None and source.given is not None and known.given != source.given:
        raise JournalError(
            f"{folder} was made by {source.function} with {known.words or 'no arguments'} given by functools.partial; "
            f"this call gives it {source.words or 'none'}. Give another folder; load_results reads what is in this one.",
            run_dir=str(folder),
        )
    if known.held is not None and source.held is not None and known.held != source.held:
        logger.warning(
            "%s holds other values (in a partial, a closure, defaults, or the object that it belongs to) than when %s was made, "
            "or is another lambda. What is there stays as it is: rerun='all' or another folder gives new results.",
            source.function,
            folder,
        )
