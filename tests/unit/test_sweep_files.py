"""Configurations in files: what they become, and what is said of a file that is wrong, with the
line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import InvalidValueError
from raypool.cli.inputs import read_configs

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Give a way to write a file."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def read(write: Write, name: str, content: str | bytes) -> list[dict[str, Any]]:
    return read_configs(write(name, content))


def test_cells_become_what_all_of_their_column_can_be(write: Write) -> None:
    configs = read(write, "a.csv", "n,lr,on,name,mixed\n1,1e-3,true,cnn,1\n2,1,False,NA,two\n")
    assert configs == [
        {"n": 1, "lr": 0.001, "on": True, "name": "cnn", "mixed": "1"},
        {"n": 2, "lr": 1, "on": False, "name": "NA", "mixed": "two"},
    ]
    assert [list(map(type, config.values())) for config in configs] == [
        [int, kind, bool, str, str] for kind in (float, int)
    ]


def test_one_more_number_changes_none_of_the_others(write: Write) -> None:
    """A sweep that continues knows its items by their values and types."""
    few, more = "lr\n1\n2\n", f"lr\n1\n2\n0.5\n{10**30}\n-inf\n"
    configs = read(write, "a.csv", more)
    assert configs[:2] == read(write, "a.csv", few)
    assert [repr(config["lr"]) for config in configs] == ["1", "2", "0.5", str(10**30), "-inf"]


def test_an_empty_cell_is_none_and_makes_no_number_of_an_integer(write: Write) -> None:
    configs = read(write, "a.csv", "width,on,name\n8,,x\n,true,\n")
    assert configs == [
        {"width": 8, "on": None, "name": "x"},
        {"width": None, "on": True, "name": None},
    ]
    assert type(configs[0]["width"]) is int


def test_a_missing_number_makes_no_text_of_a_column(write: Write) -> None:
    configs = read(write, "a.csv", f"lr,seed\n0.1,{2**64 - 1}\nnan,\n")
    assert configs == [{"lr": 0.1, "seed": 2**64 - 1}, {"lr": None, "seed": None}]


TABLES = [
    'lr, layers\n0.1, "64,32"\n\n0.2, "8"\n',
    '\N{BYTE ORDER MARK}lr,layers\r\n0.1,"64,32"\r\n0.2,8\r\n',
    '"lr ",layers\n0.1,"64,32"\n0.2,8',
]


def test_tables_as_spreadsheets_write_them(write: Write) -> None:
    for content in TABLES:
        assert read(write, "a.CSV", content) == [
            {"lr": 0.1, "layers": "64,32"},
            {"lr": 0.2, "layers": "8"},
        ]


NO_TABLES = [
    (
        "lr,width\n0.1,8\n\n0.2\n",
        "line 4: 1 cells for 2 columns. An empty cell.* needs its comma, too: width is missing",
    ),
    (
        "lr,width\n0.1,8,9\n",
        "line 2: 3 cells for 2 columns. Put cells that contain a comma in quotation marks",
    ),
    ('lr,width\n"0\n1",8\n1\n', "line 4: 1 cells"),
    (",lr\n0,0.1\n", r"line 1: column 1 has no name.* to_csv\(path, index=False\)"),
    (
        "0.1,8\n0.2,16\n",
        "line 1: '0.1' is not a column name. The first line must name the columns",
    ),
    ("lr,lr\n0.1,8\n", "line 1: the name 'lr' appears twice"),
    ("lr;width\n0.1;8\n", "line 1: the columns are separated by ';'. Separate them with commas"),
    ("lr\twidth\n0.1\t8\n", r"line 1: the columns are separated by '\\t'"),
    ('lr,width\n0.1,"8\n', "line 2: this is not valid CSV: unexpected end of data"),
    ("lr,width\n", "contains no configurations"),
    ("", "contains no configurations"),
]


def test_a_table_that_is_wrong_says_where(write: Write) -> None:
    for content, words in NO_TABLES:
        with pytest.raises(InvalidValueError, match=f"a.csv.*{words}"):
            read(write, "a.csv", content)


def test_json_lines(write: Write) -> None:
    content = '{"lr": 0.1, "layers": [8, 8]}\n\n{"lr": null, "name": "ä\u2028b"}\n'
    assert read(write, "a.jsonl", content) == [
        {"lr": 0.1, "layers": [8, 8]},
        {"lr": None, "name": "ä\u2028b"},
    ]


NO_JSON = [
    ('{"lr": 0.1}\n{"lr": }\n', "line 2: this is not valid JSON: Expecting value"),
    ("{'lr': 0.1}\n", "line 1: this is not valid JSON"),
    ('{"lr": 0.1}\n\n[1, 2]\n', r"line 3: \[1, 2\] is not an object"),
    ('{"lr": 0.1}\n{"lr": 0.1, "lr": 0.2}\n', "line 2: the name 'lr' appears twice"),
    ('{"net": {"width": 8, "width": 16}}\n', "line 1: the name 'width' appears twice"),
    ("[" * 100_000, "line 1: this is not valid JSON: maximum recursion depth"),
    ("\n \n", "contains no configurations"),
]


def test_json_lines_that_are_wrong_say_where(write: Write) -> None:
    for content, words in NO_JSON:
        with pytest.raises(InvalidValueError, match=f"a.jsonl.*{words}"):
            read(write, "a.jsonl", content)


@pytest.mark.parametrize("name", ["a.yaml", "a.yml"])
def test_yaml_has_the_numbers_of_today(write: Write, name: str) -> None:
    content = (
        "- {lr: 1e-3, width: 8, is_deep: true}\n- lr: 1.5E+2\n  name: 1e\n  layers: [8, 8]\n- {}\n"
    )
    assert read(write, name, content) == [
        {"lr": 0.001, "width": 8, "is_deep": True},
        {"lr": 150.0, "name": "1e", "layers": [8, 8]},
        {},
    ]


SCALARS = [
    ("0", 0),
    ("010", 10),
    ("-08", -8),
    ("+12", 12),
    ("0o17", 15),
    ("0x1F", 31),
    ("1_000", "1_000"),
    ("0b11", "0b11"),
    ("1:30", "1:30"),
    ("12:30:45", "12:30:45"),
    ("1:30.5", "1:30.5"),
    ("2026-11-22", "2026-11-22"),
    ("5.", 5.0),
    (".5", 0.5),
    ("-1.5e+3", -1500.0),
    ("1e3", 1000.0),
    ("1_0.5", "1_0.5"),
    (".", "."),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("inf", "inf"),
    ("nan", "nan"),
    ("true", True),
    ("True", True),
    ("TRUE", True),
    ("false", False),
    ("tRue", "tRue"),
    ("on", "on"),
    ("off", "off"),
    ("yes", "yes"),
    ("No", "No"),
    ("~", None),
    ("null", None),
    ("", None),
    ("=", "="),
    ("'010'", "010"),
    ("!!str 010", "010"),
    ("!!int '010'", 10),
    ("!!float 1", 1.0),
]


def test_what_is_no_text_in_yaml_is_what_version_1_2_says(write: Write) -> None:
    for text, value in SCALARS:
        (config,) = read(write, "a.yaml", f"- norm: {text}\n")
        assert (config["norm"], type(config["norm"])) == (value, type(value))


def test_names_in_yaml_are_text_where_values_would_be(write: Write) -> None:
    assert read(write, "a.yaml", "- {on: 1, y: 2, lr: .nan}\n")[0].keys() == {"on", "y", "lr"}
    assert math.isnan(read(write, "a.yaml", "- {lr: .NaN}\n")[0]["lr"])


def test_yaml_is_read_by_others_as_before(write: Write) -> None:
    import yaml

    before = yaml.safe_load("[010, 1:30, off, 2026-11-22, 1e-3]")
    read(write, "a.yaml", "- {lr: 1e-3}\n")
    assert yaml.safe_load("[010, 1:30, off, 2026-11-22, 1e-3]") == before
    assert before[:3] == [8, 90, False]


def test_what_a_mapping_takes_over_from_others_may_be_overridden(write: Write) -> None:
    content = (
        "- &base {lr: 0.1, width: 8}\n- &wide {<<: *base, width: 16}\n- {<<: *wide, width: 32}\n"
    )
    assert read(write, "a.yaml", content) == [{"lr": 0.1, "width": width} for width in (8, 16, 32)]


NO_YAML = [
    ("- lr: 0.1\n- [\n", "line 3: this is not valid YAML"),
    ("lr: 0.1\n", "is a dict, not a list. Begin each configuration with a dash"),
    ("0.1\n", "is a float, not a list"),
    ("- lr: 0.1\n- 0.2\n", "line 2: 0.2 is not a mapping"),
    ("- lr: 0.1\n---\n- lr: 0.2\n", "has 2 YAML documents. Put all configurations into one list"),
    (
        "- lr: !!python/object/apply:os.getcwd []\n",
        "line 1: this is not valid YAML: could not determine a constructor",
    ),
    (
        "- ä: 1\n- b: \x07\n",
        r"line 2: this is not valid YAML: the character '\\x07' is not allowed",
    ),
    ("- a: 1\n- lr: 0.1\n  lr: 0.2\n", r"line 3: 'lr' appears twice \(first in line 2\)"),
    ("- net: {width: 8, width: 16}\n", "line 1: 'width' appears twice"),
    ("- {1: a}\n", "line 1: YAML does not read the name '1' as text. Put it in quotes"),
    ("[" * 100_000, "entries are nested too deep"),
    ("- lr: !!int ten\n", "is not valid YAML: invalid literal for int"),
    ("[]\n", "contains no configurations"),
    ("# nothing\n", "contains no configurations"),
]


def test_yaml_that_is_wrong_says_where(write: Write) -> None:
    for content, words in NO_YAML:
        with pytest.raises(InvalidValueError, match=f"a.yaml.*{words}"):
            read(write, "a.yaml", content)


def test_files_that_are_nothing_of_this(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "c.csv"
    folder.mkdir()
    with pytest.raises(InvalidValueError, match=r"a.json must end in .csv, .jsonl, .yaml, .yml"):
        read(write, "a.json", "[]")
    with pytest.raises(InvalidValueError, match=r"b.csv could not be read: No such file"):
        read_configs(tmp_path / "b.csv")
    with pytest.raises(InvalidValueError, match="could not be read: Is a directory"):
        read_configs(folder)
    with pytest.raises(InvalidValueError, match="is not UTF-8"):
        read(write, "d.csv", b"name\n\xff\n")
