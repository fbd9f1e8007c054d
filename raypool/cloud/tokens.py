"""The token that whoever connects to a Ray of ours has to show."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def token_path() -> Path:
    """Return where Ray's token lies."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def make_token(path: Path | None = None) -> None:
    """Create a token file, readable by its owner only; Ray would create it readable by all.

    Args:
        path: The file. None: where Ray on this machine looks for it, if the token is not in the environment.
    """
    if path is None:
        if "RAY_AUTH_TOKEN" in os.environ:
            return
        path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > 0:
        path.chmod(0o600)
        return
    # Written apart and then given its name, so that nobody ever reads half a token, and two who come at once agree on one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        if path.exists():
            draft.replace(path)  # it was empty
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
