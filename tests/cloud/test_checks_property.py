"""Whatever stands in a file, it is taken or refused with a place: no check falls over it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raypool.cluster import checks
from raypool.cluster.documents import documents_of
from raypool.errors import CloudError
from tests.cloud.test_checks import TEXTS

CONTENTS = {kind: yaml.safe_load(text) for kind, text in TEXTS.items()}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "<x>", "1", "T4", "a/b:c"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["x", "type", "name"]) | st.integers(0, 1), inner, max_size=2
        )
    ),
    max_leaves=4,
)


def places(content: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every entry."""
    entries = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    return [keys, *(place for key, value in entries for place in places(value, (*keys, key)))]


def spoilt(content: Any, keys: tuple[Any, ...], value: Any, is_left_out: bool) -> Any:
    if not keys:
        return value
    content = copy.deepcopy(content)
    *above, last = keys
    entry = content
    for key in above:
        entry = entry[key]
    if is_left_out:
        del entry[last]
    else:
        entry[last] = value
    return content


@pytest.mark.parametrize("kind", CONTENTS)
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_stands_in_a_file(kind: str, data: st.DataObject) -> None:
    content = CONTENTS[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(places(content)[1:] or [()]))
        content = spoilt(content, where, data.draw(VALUES), data.draw(st.booleans()))
    try:
        [document] = documents_of(yaml.safe_dump(content, sort_keys=False), "file.yaml")
        checks.check(document)
    except CloudError as error:
        for line in str(error).splitlines():
            assert re.match(r"file\.yaml(, line \d+)?: ", line), line
