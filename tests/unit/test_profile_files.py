"""Profiles that stand in files: which file counts, and what is said of one that is wrong."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    Profile,
    Slurm,
    Tls,
    WorkerResources,
    parpool,
)
from raypool.profile_files import line_of, named_profile, resolve_profile

Write = Callable[..., Path]

LAB = """
# the machine in the cellar
[profiles.lab]
address = "10.0.0.7:6379"
gpus = [0, 2]
env = {NCCL_DEBUG = "INFO"}
start_timeout_s = 5
idle_timeout_s = 600.5
cancel_grace_s = 1
retries = 0
quiet = true
trace = "events.jsonl"

[profiles.lab.resources]
gpus = 0.5
memory_bytes = 2_000_000
accelerator_type = "T4"
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Give a way to write files under the folder in which the test runs."""
    work = tmp_path / "project" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)

    def write(text: str, name: str = "raypool.toml", folder: str = ".") -> Path:
        path = (work / folder / name).resolve()
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


# --- what a file says -----------------------------------------------------------------------------


def test_all_fields_can_stand_in_a_file(write: Write) -> None:
    write(LAB)
    assert named_profile("lab") == Profile(
        address="10.0.0.7:6379",
        resources=WorkerResources(gpus=0.5, memory_bytes=2_000_000, accelerator_type="T4"),
        gpus=(0, 2),
        env={"NCCL_DEBUG": "INFO"},
        start_timeout_s=5,
        idle_timeout_s=600.5,
        cancel_grace_s=1,
        retries=0,
        quiet=True,
        trace=str(Path.cwd() / "events.jsonl"),
    )


def test_single_fields_are_replaced(write: Write) -> None:
    write(LAB)
    profile = resolve_profile("lab", {"gpus": [1], "address": None})
    assert (profile.gpus, profile.address, profile.retries) == ((1,), None, 0)


def test_a_pool_by_the_name_of_its_profile(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        '[profiles.mine]\nbackend = "threads"\nquiet = true\nresources = [{gpus = 0}, {gpus = 0},'
        " {cpus = 2}]"
    )
    with parpool(profile="mine") as pool:
        assert pool.num_workers == 3
        assert list(pool.parfor(abs, [-1, 2])) == [1, 2]
    with pytest.raises(InvalidValueError, match=r"asks for 2, but .* describes 3 workers"):
        parpool(2, profile="mine")
    assert capsys.readouterr().out == ""


def test_a_cluster_with_paths_beside_the_file(write: Write, tmp_path: Path) -> None:
    write("""
    [profiles.far]
    address = "ray://127.0.0.1:10001"
    token_file = "~/token"
    working_dir = "../code"
    packages = ["scikit-learn>=1.5"]
    tls = {certificate = "tls/me.crt", key = "/keys/me.key", authority = "tls/ca.crt"}
    """)
    profile = named_profile("far")
    folder = Path.cwd()
    assert (profile.token_file, profile.working_dir) == (
        str(Path.home() / "token"),
        str(folder / "../code"),
    )
    assert profile.tls == Tls(
        certificate=f"{folder}/tls/me.crt", key="/keys/me.key", authority=f"{folder}/tls/ca.crt"
    )
    assert profile.packages == ("scikit-learn>=1.5",)
    assert profile.is_remote


def test_an_allocation_of_slurm(write: Write) -> None:
    """Its fields stand beside those of every profile; a wrong one has its line, and a suggestion
    from both.
    """
    write("""
    [profiles.hpc]
    kind = "slurm"
    partition = "gpu"
    gpus_per_node = "a100:4"
    retries = 0
    folder = "jobs"
    """)
    profile = named_profile("hpc")
    assert profile.retries == 0
    assert profile.slurm == Slurm(
        partition="gpu", gpus_per_node="a100:4", folder=str(Path.cwd() / "jobs")
    )
    write('[profiles.hpc]\nkind = "slurm"\npartitoin = "gpu"')
    with pytest.raises(InvalidValueError, match=r"line 3: .* Did you mean partition\?"):
        named_profile("hpc")
    write('[profiles.hpc]\nkind = "slurm"\nnodes = 0')
    with pytest.raises(InvalidValueError, match="line 3: nodes must be at least 1, not 0"):
        named_profile("hpc")
    write('[profiles.hpc]\nkind = "pbs"')
    with pytest.raises(InvalidValueError, match="line 2: there is no kind of profile 'pbs'"):
        named_profile("hpc")


@pytest.mark.parametrize(
    "text",
    [
        "[profiles.mixed]\nresources = [{gpus = 0}, {gpus = 0}, {gpus = 1}]",
        "[profiles.mixed]\nresources = [\n  {gpus = 0},\n  {gpus = 0},\n  {gpus = 1},\n]",
        (
            "[profiles.mixed]\n[[profiles.mixed.resources]]\ngpus ="
            " 0\n[[profiles.mixed.resources]]\ngpus = 0\n[[profiles.mixed.resources]]\ngpus = 1"
        ),
    ],
)
def test_resources_of_each_worker(write: Write, text: str) -> None:
    write(text)
    assert named_profile("mixed").listed == (
        WorkerResources(gpus=0),
        WorkerResources(gpus=0),
        WorkerResources(gpus=1),
    )


def test_functions_are_imported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "class Cache:\n    @staticmethod\n    def load(): pass\ndef leave(): pass",
        name="raypool_test_hooks.py",
    )
    write(
        '[profiles.x]\nsetup = "raypool_test_hooks:Cache.load"\nteardown ='
        ' "raypool_test_hooks:leave"'
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    profile = named_profile("x")
    hooks = sys.modules.pop("raypool_test_hooks")
    assert (profile.setup, profile.teardown) == (hooks.Cache.load, hooks.leave)


# --- which file counts ----------------------------------------------------------------------------


def test_a_file_further_up_is_found(write: Write) -> None:
    write('[profiles.x]\naddress = "up"', folder="../..")
    assert named_profile("x").address == "up"


def test_the_nearest_file_with_profiles_wins_whole(write: Write) -> None:
    write('[profiles.x]\naddress = "up"\n[profiles.y]', folder="..")
    write("# no profiles in here")
    write("[tool.other]\nx = 1", name="pyproject.toml")
    assert named_profile("x").address == "up"
    write('[tool.raypool.profiles.x]\naddress = "here"', name="pyproject.toml")
    assert named_profile("x").address == "here"
    with pytest.raises(InvalidValueError, match="no profile 'y'"):
        named_profile("y")


def test_raypool_toml_goes_before_pyproject_toml(write: Write) -> None:
    write('[tool.raypool.profiles.x]\naddress = "pyproject"', name="pyproject.toml")
    write('[profiles.x]\naddress = "raypool"')
    assert named_profile("x").address == "raypool"


def test_what_other_tools_say_in_pyproject_toml_is_theirs(write: Write) -> None:
    write(
        '[project]\nname = "x"\n[tool.black]\nprofiles = 3\n[tool.raypool.profiles."a'
        ' b"]\nretries = 5',
        name="pyproject.toml",
    )
    assert named_profile("a b").retries == 5


def test_a_folder_that_has_the_name_of_a_file(write: Write) -> None:
    Path("raypool.toml").mkdir()
    write("[profiles.x]", folder="..")
    assert named_profile("x") == Profile()


def test_a_working_directory_that_is_gone(write: Write) -> None:
    gone = Path.cwd() / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert named_profile("threads").backend == "threads"
    with pytest.raises(InvalidValueError, match="no profile 'lab'"):
        named_profile("lab")


# --- what is said of a name that is not there -----------------------------------------------------


def test_a_missing_profile_names_those_that_exist(write: Write) -> None:
    with pytest.raises(
        InvalidValueError,
        match=r"There is no profile 'cluster'. Choose from: local, threads, inline\.",
    ):
        parpool(profile="cluster")
    path = write("[profiles.lab]\n[profiles.farm]")
    with pytest.raises(
        InvalidValueError,
        match=r"Choose from: local, threads, inline, lab, farm. To define one, add a table .* to .*raypool.toml",
    ) as caught:
        parpool(profile="cluster")
    assert str(path) in str(caught.value)


# --- what is said of a file that is wrong ---------------------------------------------------------


WRONG = [
    (
        "[profiles.x]\n\n# so many\nnum_gpus = 2",
        4,
        InvalidValueError,
        "no field 'num_gpus'. Did you mean resources?",
    ),
    (
        "[profiles.x]\nresources.gpus = 1\nresources.ram = 2",
        3,
        InvalidValueError,
        "no field 'ram'. Choose from: gpus, cpus, mem",
    ),
    (
        "[profiles.x.resources]\ngpus = -1",
        2,
        InvalidValueError,
        "WorkerResources.gpus=-1. is negative",
    ),
    (
        "[profiles.x]\nresources = [\n  {gpus = 1},\n  {gpu = 1},\n]",
        2,
        InvalidValueError,
        "no field 'gpu'",
    ),
    (
        "[profiles.x]\n[[profiles.x.resources]]\ngpus = 1\n[[profiles.x.resources]]\ngpus = '1'",
        5,
        InvalidTypeError,
        "gpus='1'. is not a number",
    ),
    (
        "[profiles.x]\nresources = {cpus = 1, gpus = inf}",
        2,
        InvalidValueError,
        "WorkerResources.gpus=inf. is infinite",
    ),
    ("[profiles.x]\nresources = []", 2, InvalidValueError, "describes no worker"),
    (
        "[profiles.x]\nresources = [1, 2]",
        2,
        InvalidTypeError,
        "is not a table, nor a list of tables",
    ),
    ("[profiles.x]\nenv = {\n", 2, InvalidValueError, "not valid TOML"),
    ("[profiles.x]\nretries = '3'", 2, InvalidTypeError, "retries must be an integer, not '3'"),
    (
        "[profiles.x]\nretries = 3\nidle_timeout_s = true",
        3,
        InvalidTypeError,
        "idle_timeout_s=True is not a number",
    ),
    ("[profiles.x]\nenv = {A = 1}", 2, InvalidTypeError, "environment variables are strings"),
    ("[profiles.x.env]\nA = 'a'\nB = 5", 3, InvalidTypeError, "'B': 5"),
    ("[profiles.x]\ngpus = [0, 0]", 2, InvalidValueError, "GPU 0 is listed twice"),
    (
        "[profiles.x]\nbackend = 'mpi'",
        2,
        InvalidValueError,
        "is not one of ray, threads, inline",
    ),
    (
        "[profiles.x]\nbackend = [\n'ray',\n]",
        2,
        InvalidValueError,
        "is not one of ray, threads, inline",
    ),
    ("[profiles.x]\naddress = 2026-11-21", 2, InvalidTypeError, "not the address of a Ray cluster"),
    (
        "[profiles.x]\nsetup = 'load'",
        2,
        InvalidTypeError,
        'names no function. Write "module:function"',
    ),
    (
        "[profiles.x]\nteardown = 3",
        2,
        InvalidTypeError,
        'names no function. Write "module:function"',
    ),
    (
        "[profiles.x]\nsetup = 'no_such_module_here:load'",
        2,
        InvalidValueError,
        "could not be imported: ModuleNotFoundError",
    ),
    (
        "[profiles.x]\nsetup = 'os.path:no_such'",
        2,
        InvalidValueError,
        "could not be imported: AttributeError",
    ),
    (
        "[profiles.x]\nsetup = 'os.path:join'",
        2,
        InvalidTypeError,
        "cannot be called without arguments",
    ),
    ("[profiles.x]\nsetup = 'os:sep'", 2, InvalidTypeError, "is not callable"),
    (
        "\n[profiles.x]\ngpus = [0]\nresources = {gpus = 2}",
        2,
        InvalidValueError,
        "resources.gpus gives each worker 2",
    ),
    (
        "\n[profile.x]\ngpus = [0]",
        2,
        InvalidValueError,
        "there is no setting 'profile'. Did you mean profiles?",
    ),
    (
        "[profiles.x]\ntls = {key = 'k', certificate = 'c'}",
        2,
        InvalidValueError,
        "tls lacks authority",
    ),
    ("[profiles.x.tls]\nca = 'k'", 2, InvalidValueError, "tls has no field 'ca'"),
    ("[profiles.x.tls]\nkey = 3", 2, InvalidTypeError, "key=3 is not the path"),
    (
        "[profiles.x]\npackages = 'torch'",
        2,
        InvalidTypeError,
        "packages must be a list of packages for pip, .* not 'torch'",
    ),
    (
        "[profiles.x]\nkind = 'slurm'\nnotice_s = '120'",
        3,
        InvalidTypeError,
        "notice_s='120' is not a number of seconds",
    ),
    (
        "[profiles.x]\nkind = 'slurm'\nfolder = 3",
        3,
        InvalidTypeError,
        "folder=3 is not the path of a folder",
    ),
    ("[profiles.x]\ninventory = 'x'", 2, InvalidTypeError, "inventory='x' is not an inventory"),
    ("profiles = 3", 1, InvalidTypeError, "profiles is not a table"),
    ("[profiles]\nx = 3", 2, InvalidTypeError, "profile 'x' is not a table"),
]


def test_a_file_that_is_wrong(write: Write) -> None:
    for text, line, error, words in WRONG:
        path = write(text)
        with pytest.raises(error, match=words) as caught:
            parpool(profile="x")
        assert str(path) in str(caught.value)
        assert f"line {line}" in str(caught.value)


def test_built_in_profiles_cannot_be_redefined(write: Write) -> None:
    path = write("[profiles.x]\nretries = 1\n[profiles.threads]\nretries = 5")
    with pytest.raises(
        InvalidValueError, match=f"{path}, line 3: the profile 'threads' is built in"
    ):
        parpool(2, profile="threads")
    with pytest.raises(InvalidValueError, match=rf"inline, x\. .*{path}"):
        parpool(2, profile="y")
    assert named_profile("x").retries == 1
    assert named_profile("inline").retries == 2


def test_the_default_profile(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the nearest file, for `parpool()` and whatever else names no profile."""
    path = write('default = "lab"\n[profiles.lab]\nbackend = "threads"\nretries = 7')
    parpool(2).shutdown()
    assert "2 workers (threads of this process)" in capsys.readouterr().out
    assert resolve_profile(None, {}).retries == 7
    assert resolve_profile("threads", {}).retries == 2
    write('default = "inline"')  # a file need not have profiles of its own
    assert resolve_profile(None, {}).backend == "inline"
    write("[profiles.lab]\nretries = 7")
    assert resolve_profile(None, {}) == Profile()
    for text, error, words in [
        ('# ours\ndefault = "labs"\n[profiles.lab]', InvalidValueError, "Did you mean lab?"),
        ("# ours\ndefault = 3", InvalidTypeError, "default=3 is not the name of a profile"),
        ('\ndefault = "lab"\n[profiles.lab]\nretrys = 1', InvalidValueError, "mean retries"),
        ("\nlab] = 3", InvalidValueError, "not valid TOML"),
    ]:
        write(text)
        with pytest.raises(error, match=f"{path}.*{re.escape(words)}"):
            parpool(2, quiet=True)


def test_a_strangers_file_names_no_default(write: Write) -> None:
    path = write('default = "lab"\n[profiles.lab]\nbackend = "threads"')
    path.chmod(0o666)
    with pytest.raises(InvalidValueError, match=f"{path}, line 1: the file belongs to another"):
        parpool(2, quiet=True)
    assert resolve_profile("lab", {}).backend == "threads"  # asked for by name
    path.chmod(0o644)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(InvalidValueError, match="belongs to another user"):
            parpool(2, quiet=True)
    else:
        assert resolve_profile(None, {}).backend == "threads"


def test_the_line_in_pyproject_toml(write: Write) -> None:
    path = write("[tool]\nraypool = 5\n", name="pyproject.toml")
    with pytest.raises(InvalidTypeError, match=f"{path}, line 2: raypool is not a table"):
        parpool(profile="x")
    path = write('[project]\nname = "x"\n\n[tool.raypool]\nprofile = 3\n', name="pyproject.toml")
    with pytest.raises(InvalidValueError, match=f"{path}, line 5: there is no setting 'profile'"):
        parpool(profile="x")
    write('[tool.raypool.profiles.x]\ndescription = """\nretries = 1\n"""\n', name="pyproject.toml")
    with pytest.raises(InvalidValueError, match="line 2: a profile has no field 'description'"):
        parpool(profile="x")


def test_another_profile_that_is_wrong_is_no_reason_to_refuse_this_one(write: Write) -> None:
    write("[profiles.x]\nretries = 1\n[profiles.y]\ncolor = 1")
    assert named_profile("x").retries == 1


def test_a_broken_file_does_not_touch_the_built_in_profiles(write: Write) -> None:
    write("[profiles.x", folder="..")
    with parpool(2, profile="threads", quiet=True) as pool:
        assert pool.num_workers == 2
    with pytest.raises(InvalidValueError, match="not valid TOML"):
        parpool(2, profile="x")


def test_a_folder_above_that_may_not_be_searched(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("[profiles.x]\nretries = 1", folder="..")
    stat = os.stat

    def refused(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if path in (Path.cwd() / "raypool.toml", tmp_path / "raypool.toml"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *given, **named)

    monkeypatch.setattr(os, "stat", refused)
    assert named_profile("x").retries == 1
    with pytest.raises(InvalidValueError, match="no profile 'y'"):
        named_profile("y")
    with parpool(2, profile="threads", quiet=True) as pool:
        assert pool.num_workers == 2


def test_a_file_with_a_byte_order_mark(write: Write) -> None:
    """Editors on Windows write one."""
    write("\ufeff[profiles.x]\nretries = 1")
    assert named_profile("x").retries == 1


def test_files_that_are_no_text(write: Write) -> None:
    path = write("")
    path.write_bytes(b"[profiles.x]\naddress = '\xff'")
    with pytest.raises(InvalidValueError, match="is not UTF-8"):
        named_profile("x")


def test_the_cause_of_an_import_that_fails_is_kept(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("1 / 0", name="raypool_test_broken.py")
    write("[profiles.x]\nsetup = 'raypool_test_broken:f'")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(InvalidValueError, match="ZeroDivisionError") as caught:
        named_profile("x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_lines_are_those_that_an_editor_shows() -> None:
    text = '[a]\nb = """\n\u2028\n"""\n"c.d" = 1\n[[e]]\n[[e]]\nf.g = 1\n'
    assert [
        line_of(text, keys)
        for keys in [("a",), ("a", "b"), ("a", "c.d"), ("e", 1), ("e", 1, "f", "g")]
    ] == [1, 2, 5, 7, 8]
