"""What a setup leaves in global variables, for functions that travel by value."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

from raypool.channel import by_value
from raypool.channel.by_value import call_setup, note_globals, share_left
from raypool.channel.records import function_name

SCRIPT = """
model, table, size, lock = None, {}, 3, object()

def load(value):
    global model
    model = value
    table["loaded"] = True

def look(*_):
    return model, table, size

def fail():
    load(1)
    raise ValueError
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give the functions of a script, in a process that counts as a worker."""
    monkeypatch.setattr("raypool.worker.running.this_process.is_worker", True)
    monkeypatch.setattr(by_value, "_left", {})
    names: dict[str, Any] = {"__name__": "__script__"}
    exec(SCRIPT, names)
    return names


def travelled(fn: Callable[..., Any]) -> Any:
    """Return a function as it arrives by value, with global variables of its own."""
    return cloudpickle.loads(cloudpickle.dumps(fn))


def test_they_see_what_it_has_bound_and_what_it_has_changed(script: dict[str, Any]) -> None:
    call_setup(functools.partial(travelled(script["load"]), 7))
    look = travelled(script["look"])
    assert look() == (None, {}, 3)
    share_left(look)
    assert look() == (7, {"loaded": True}, 3)


@pytest.mark.parametrize(
    "wrap", [functools.partial, lambda look: functools.wraps(look)(lambda: look())]
)
def test_also_through_what_is_wrapped_round_them(script: dict[str, Any], wrap: Any) -> None:
    call_setup(travelled(script["load"]), 7)
    look = travelled(script["look"])
    share_left(wrap(look))
    assert look()[0] == 7


class Empty:
    """Has a function in it, and is false."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self if self.fn is None else self.fn

    def __len__(self) -> int:
        return 0

    def __call__(self) -> Any:
        return self.fn()


def test_also_through_what_is_false(script: dict[str, Any]) -> None:
    call_setup(travelled(script["load"]), 7)
    look = travelled(script["look"])
    share_left(functools.update_wrapper(lambda: look(), Empty(look)))
    assert look()[0] == 7


class Proxy:
    """Has whatever one asks for."""

    def __getattr__(self, name: str) -> Proxy:
        return Proxy()

    def __call__(self) -> str:
        return "called"


@pytest.mark.parametrize("fn", [Proxy(), Empty(None)], ids=["every name", "itself"])  # type: ignore[arg-type]
def test_what_has_no_end_is_left_as_it_is(script: dict[str, Any], fn: Any) -> None:
    call_setup(travelled(script["load"]), 7)
    share_left(fn)
    assert function_name(fn) == type(fn).__name__


def test_what_it_only_read_is_that_of_the_call(script: dict[str, Any]) -> None:
    call_setup(travelled(script["look"]))
    script["table"]["new"], script["size"] = 1, 4
    look = travelled(script["look"])
    share_left(look)
    assert look() == (None, {"new": 1}, 4)


class Data:
    """Keeps something for itself when it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.length: int | None = None

    def __len__(self) -> int:
        self.length = self.length or len(self.name)
        return self.length


@pytest.mark.parametrize(
    ("name", "changed", "seen"),
    [
        ("model", None, "left"),
        ("table", "new", "new"),
        ("fail", None, "left"),
        ("fail", "new", "new"),
        ("unknown", "new", "new"),
    ],
)
def test_what_the_user_has_changed_since_is_the_users(
    script: dict[str, Any], name: str, changed: str | None, seen: str
) -> None:
    exec(f"def load():\n    global {name}\n    {name} = 'left'", script)
    exec(f"def look():\n    return {name}", script)
    call_setup(travelled(script["load"]))
    if changed is not None:
        script[name] = changed
    look = travelled(script["look"])
    share_left(look)
    assert look() == seen


def test_nor_is_that_overwritten_which_the_setup_has_read_only(script: dict[str, Any]) -> None:
    script["data"] = Data("old")
    exec("def load(): len(data)", script)
    exec("def look(): return data.name, data.length", script)
    call_setup(travelled(script["load"]))
    unchanged = travelled(script["look"])
    share_left(unchanged)
    assert unchanged() == ("old", 3)
    script["data"] = Data("other")
    look = travelled(script["look"])
    share_left(look)
    assert look() == ("other", None)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(1000.0),
        {"a": {1, "x"}, "b": [float("nan"), None]},
        Data("x"),
        3.5,
        float("nan"),
        math.sin,
        math,
        lambda: SCRIPT,
        Data,
    ],
    # equal in each process
    ids=["array", "dict", "Data", "float", "nan", "function of C", "module", "lambda", "class"],
)
def test_what_is_unchanged_is_known_again(script: dict[str, Any], value: Any) -> None:
    script["model"] = value
    call_setup(travelled(script["load"]), "left")
    look = travelled(script["look"])
    share_left(look)
    assert look()[0] == "left"


def test_also_if_it_came_through_the_object_store(script: dict[str, Any]) -> None:
    script["model"] = np.arange(1000.0)
    call_setup(travelled(script["load"]), "left")
    look = travelled(script["look"])
    look.__globals__["model"].flags.writeable = False
    share_left(look)
    assert look()[0] == "left"


def test_what_it_loads_is_not_pickled(script: dict[str, Any]) -> None:
    class Model:
        num_pickled = 0

        def __reduce__(self) -> Any:
            Model.num_pickled += 1
            return Model, ()

    model = Model()
    call_setup(travelled(script["load"]), model)
    look = travelled(script["look"])
    share_left(look)
    assert look()[0] is model
    assert Model.num_pickled == 0


def test_one_that_fails_has_left_something_too(script: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it says nothing
        call_setup(travelled(script["fail"]))
    look = travelled(script["look"])
    share_left(look)
    assert look()[0] == 1


def test_what_has_no_global_variables_is_called_as_it_is(script: dict[str, Any]) -> None:
    assert call_setup(divmod, 7, 2) == (3, 1)
    call_setup(travelled(script["load"]), 7)
    share_left(divmod)


def test_elsewhere_nothing_is_kept(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.worker.running.this_process.is_worker", False)
    call_setup(script["load"], 7)
    assert script["model"] == 7
    assert by_value._left == {}


def test_what_children_are_to_share_is_not_kept_for_them() -> None:
    """A worker forgets a function with its global variables, although processes that it starts
    would join these.
    """
    scope: dict[str, Any] = {"__name__": "a_script"}
    exec("class Large: pass\nlarge = Large()\ndef fn(): return large", scope)
    large = weakref.ref(scope["large"])
    note_globals(scope["fn"])
    scope.clear()
    gc.collect()
    assert large() is None
