"""Which functions workers keep when nobody calls them: those that they find by name, as long as few
bytes stand for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from raypool import Profile
from raypool.backends.local import InlineBackend
from raypool.engine.engine import KNOWN_BYTES, Engine
from raypool.engine.inbox import InlineInbox
from raypool.spmd.context import RankFunction


class Packing(InlineBackend):
    """A backend to which functions travel."""

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        return cloudpickle.dumps(value)


@pytest.fixture
def engine() -> Iterator[Engine]:
    profile = Profile(backend="inline")
    engine = Engine(profile, InlineInbox(), lambda post, hub, _: Packing(profile, post, hub.say))
    yield engine
    engine.shutdown(wait=True)


def test_a_function_with_code_goes_with_who_calls_it_and_comes_back_with_its_number(
    engine: Engine,
) -> None:
    """So its times stay known. Meanwhile it is one function for all who call it."""

    def ask() -> Any:
        return engine.function(lambda x: x + 1)

    function = ask()
    assert ask() is function
    number, watched = function.fn_id, weakref.ref(function)
    del function
    assert watched() is None
    assert ask().fn_id == number


def test_a_function_by_name_is_kept_until_others_take_the_room(engine: Engine) -> None:
    watched = weakref.ref(engine.function(len))
    assert watched() is not None

    for number in range(20):
        engine.function(functools.partial(len, bytes([number]) * (KNOWN_BYTES // 20)))
    assert watched() is None


def test_a_function_in_use_stays_one_when_others_take_its_room(engine: Engine) -> None:
    def ask(number: int) -> Any:
        return engine.function(functools.partial(len, bytes([number]) * (KNOWN_BYTES // 10)))

    functions = [ask(number) for number in range(20)]
    assert [ask(number) for number in range(20)] == functions


def test_what_is_around_a_users_function_is_kept_as_long_as_it(engine: Engine) -> None:
    """Else workers open the function of an `spmd` loop anew at each call, and collect garbage."""

    def own(context: Any) -> None:
        pass

    by_name, with_code = (weakref.ref(engine.function(RankFunction(fn), fn)) for fn in (len, own))
    assert by_name() is not None
    assert with_code() is None
