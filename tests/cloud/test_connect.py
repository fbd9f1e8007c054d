"""What goes into the environment for a cluster, and comes out of it again; where the token does not
go.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

from raypool import CloudError, Profile, StartupError, Tls
from raypool.cluster import connect
from raypool.cluster.jobs import Dashboard

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Have an environment of a test's own, with a token in it."""
    with mock.patch.object(connect, "_replaced", {}), mock.patch.dict(os.environ):
        for name in [
            name
            for name in os.environ
            if name.startswith("RAY_") and ("TLS" in name or "AUTH" in name)
        ]:
            del os.environ[name]
        os.environ["RAY_AUTH_TOKEN"] = "the user's own"
        yield


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture
def profile(tmp_path: Path, token_file: Path) -> Profile:
    files = {name: tmp_path / name for name in ("certificate", "key", "authority")}
    for name, path in files.items():
        path.write_text(name)
    return Profile(token_file=token_file, tls=Tls(**files))


# --- the environment ------------------------------------------------------------------------------


def test_what_a_profile_put_there_goes_with_the_next(
    profile: Profile, token_file: Path, tmp_path: Path
) -> None:
    before = dict(os.environ)
    connect.prepare(profile)
    assert os.environ["RAY_USE_TLS"] == "1"
    assert os.environ["RAY_TLS_CA_CERT"] == str(tmp_path / "authority")
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token_file)
    assert "RAY_AUTH_TOKEN" not in os.environ
    connect.prepare(Profile(token_file=token_file))
    assert "RAY_USE_TLS" not in os.environ
    assert "RAY_TLS_CA_CERT" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "token"
    connect.prepare(Profile())
    assert dict(os.environ) == before


def test_what_the_user_has_set_meanwhile_stays(profile: Profile) -> None:
    connect.prepare(profile)
    os.environ["RAY_AUTH_TOKEN_PATH"] = "/another/token"
    connect.prepare(Profile())
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "/another/token"


def test_a_profile_with_a_file_that_is_not_there_changes_nothing(
    profile: Profile, tmp_path: Path
) -> None:
    before = dict(os.environ)
    (tmp_path / "authority").unlink()
    with pytest.raises(
        StartupError, match=r"tls.authority: .*/authority could not be read: No such file"
    ):
        connect.prepare(profile)
    assert dict(os.environ) == before


# --- the token ------------------------------------------------------------------------------------


def test_the_token_does_not_travel_unencrypted(token_file: Path) -> None:
    with pytest.raises(
        CloudError, match=r"would be sent to http://head.example:8265 unencrypted"
    ) as refused:
        Dashboard(Profile(jobs_address="http://head.example:8265", token_file=token_file))
    assert TOKEN not in str(refused.value)


def test_who_has_no_token_may_ask_anywhere(tmp_path: Path) -> None:
    del os.environ["RAY_AUTH_TOKEN"]
    os.environ["HOME"] = str(tmp_path)
    with pytest.raises(CloudError, match=r"No Ray dashboard answers at http://127.0.0.2:1"):
        Dashboard(Profile(jobs_address="http://127.0.0.2:1"))


def test_the_token_goes_nowhere_else(token_file: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/stranger")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(CloudError, match="redirects to another address"):
            Dashboard(
                Profile(
                    jobs_address=f"http://127.0.0.1:{server.server_port}", token_file=token_file
                )
            )
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [("/api/version", f"Bearer {TOKEN}")]
