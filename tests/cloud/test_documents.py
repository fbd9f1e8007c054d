"""YAML files that know where each entry stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from raypool.cluster.documents import Findings, documents_of, nearest, read_documents
from raypool.errors import CloudError

TEXT = """\
# A comment.
a:
  b: 1
  "c d": [x,
    {e: 2}]
---
f: 3
"""


def test_an_entry_is_found_where_it_stands_or_what_is_above_it() -> None:
    first, second = documents_of(TEXT, "file.yaml")
    lines = {
        (): 2,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c d"): 4,
        ("a", "c d", 0): 4,
        ("a", "c d", 1): 5,
        ("a", "c d", 1, "e"): 5,
    }
    assert {keys: first.line_of(keys) for keys in lines} == lines
    assert first.line_of(("a", "nothing", "below")) == 2
    assert second.line_of(("f",)) == 7


NO_YAML = [
    (
        "a: 1\nb: 2\na: 3\n",
        r"line 3: 'a' appears twice \(first in line 1\)",
    ),
    ("x:\n  - {a: 1, a: 2}\n", "line 2: 'a' appears twice"),
    ("a: [1\nb: 2\n", "line 2: this is not valid YAML"),
    ("a: !!python/object/apply:os.system [ls]\n", "line 1: this is not valid YAML"),
    ("a: \x00\n", "is not valid YAML"),
    ("a: &x [*x]\n", "nested too deep, or an entry contains itself"),
    ("a: 1\nb: &x {c: {d: *x}}\n", "nested too deep, or an entry contains itself"),
    ("[" * 3000 + "]" * 3000, "nested too deep"),
    ("a: 1\n2: b\n", "line 2: YAML does not read the name '2' as text. Put it in quotes."),
    ("a: *b\n", "line 1: this is not valid YAML"),
]


def test_what_is_no_yaml_is_refused_with_its_line() -> None:
    for text, said in NO_YAML:
        with pytest.raises(CloudError, match=r"file\.yaml.*" + said):
            documents_of(text, "file.yaml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match="could not be read: No such file"):
        read_documents(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(CloudError, match="is not UTF-8"):
        read_documents(tmp_path / "latin.yaml")


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_lines() -> None:
    first, _ = documents_of(TEXT, "file.yaml")
    findings = Findings(first)
    findings.finish()
    findings.add("no.", "a", "c d")
    findings.add("neither.", "a", "b")
    with pytest.raises(CloudError) as caught:
        findings.finish()
    assert str(caught.value) == "file.yaml, line 3: neither.\nfile.yaml, line 4: no."
    assert [problem.keys for problem in caught.value.problems] == [("a", "b"), ("a", "c d")]


def test_a_setting_that_is_misspelt_is_told_what_was_meant() -> None:
    [document] = documents_of("max_worker: 1\nzzz: 2\n", "file.yaml")
    findings = Findings(document)
    schema = {"properties": {"max_workers": {}, "provider": {}}, "additionalProperties": False}
    findings.check_schema(Draft7Validator(schema))
    texts = sorted(problem.text for problem in findings.problems)
    assert texts[0].endswith("Did you mean max_workers?")
    assert texts[1].endswith("Choose from: max_workers, provider.")
    assert nearest("", ["a"]) == ". Choose from: a."


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_whatever_stands_in_a_file_is_read_as_yaml_reads_it(content: object) -> None:
    text = yaml.safe_dump(content, allow_unicode=False)
    [document] = documents_of(text, "file.yaml")
    assert document.content == yaml.safe_load(text)
    for problem in (("a", 0), (0, "b"), ()):
        assert 1 <= document.line_of(problem) <= text.count("\n") + 1
