"""What a job takes along and leaves: whether it is whole, and of which versions, is known before it is opened."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypool import CloudError
from raypool.cloud.sealed import Sealed, check_versions, seal, unseal


@given(st.binary(max_size=200), st.sampled_from(["call", "value", "error"]))
def test_what_was_sealed_comes_back(body: bytes, kind: str) -> None:
    sealed = unseal(b"".join(seal(kind, body)))
    assert (sealed.kind, bytes(sealed.body)) == (kind, body)
    check_versions(sealed)


@given(st.binary(min_size=1, max_size=50), st.data())
def test_nothing_that_was_changed_is_taken_for_whole(body: bytes, data: st.DataObject) -> None:
    line, body = seal("value", body)
    place = data.draw(st.integers(0, len(body) - 1))
    changed = bytearray(body)
    changed[place] ^= data.draw(st.integers(1, 255))
    cut = body[:place]
    for other in (bytes(changed), cut, body + b"x"):
        with pytest.raises(CloudError, match="have arrived"):
            unseal(line + other)


def test_what_is_something_else_is_said() -> None:
    for data in [b"", b"\n", b"A file is not found at: /tmp\n", b'{"kind": "va']:
        with pytest.raises(CloudError, match=f"{len(data)} bytes"):
            unseal(data)


@pytest.mark.parametrize(
    ("python", "raypool", "said"), [("3.9", None, "Python 3.9 there and"), (None, "0.0.9", "raypool 0.0.9 there and")]
)
def test_other_versions_are_refused(python: str | None, raypool: str | None, said: str) -> None:
    line, body = seal("call", b"x")
    header = json.loads(line)
    sealed = Sealed("call", memoryview(body), python or header["python"], raypool or header["raypool"])
    with pytest.raises(CloudError, match=said):
        check_versions(sealed)
