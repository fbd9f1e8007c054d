"""Finds random generators and models that a function captures.

A function takes a copy of each to its worker. Copies of a generator would give all workers the same
numbers, so each item seeds its own. A model that a function changes stays unchanged in the script,
so raypool warns.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel.users_code import is_users

if TYPE_CHECKING:
    import numpy as np


MOST_VALUES = 5_000
"""At most this many values are searched for a function."""

MOST_ENTRIES = 1_000
"""A list or dict with more entries is data, and not searched."""

INSIDE: Sequence[tuple[type, Sequence[str]]] = (
    (staticmethod, ["__func__"]),
    (classmethod, ["__func__"]),
    (types.MethodType, ["__func__", "__self__"]),
    # of a module's function the module, which leads nowhere
    (types.BuiltinMethodType, ["__self__"]),
    (property, ["fget"]),
)
"""The attributes in which such values hold others."""


class Generator(NamedTuple):
    """A generator, and the variable that leads to it."""

    name: str
    value: Any

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Seed it with these seeds."""
        if isinstance(self.value, random.Random):
            self.value.seed(seeds.generate_state(4).tobytes())
        elif _is_torchs(self.value):
            self.value.manual_seed(int(seeds.generate_state(2).view("u8")[0] >> 1))
        else:
            import numpy as np

            if isinstance(self.value, np.random.RandomState):
                kind = getattr(np.random, self.value.get_state(legacy=False)["bit_generator"])
                state = np.random.RandomState(kind(seeds)).get_state(legacy=False)
                self.value.set_state(state)
            else:
                # not only its state: `spawn` uses the seeds
                self.value.__setstate__(type(self.value)(seeds).__getstate__())

    def get_state(self) -> Any:
        """Return its state."""
        if isinstance(self.value, random.Random):
            return self.value.getstate()
        if _is_torchs(self.value):
            return self.value.get_state()
        if hasattr(self.value, "get_state"):  # NumPy's RandomState
            return self.value.get_state(legacy=False)
        return self.value.__getstate__()

    def set_state(self, state: Any) -> None:
        """Restore its state."""
        if isinstance(self.value, random.Random):
            self.value.setstate(state)
        elif _is_torchs(self.value) or hasattr(self.value, "set_state"):
            self.value.set_state(state)
        else:
            self.value.__setstate__(state)


def _is_torchs(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Generator)


def generators_of(fn: Any) -> list[Generator]:
    """Return the NumPy, torch and `random.Random` generators of a function, in a fixed order.

    They are searched in its global variables, closure, default arguments and partial arguments, in
    the object of a method, and from there in other functions and classes of the user's, lists,
    tuples and dicts. Global generators (`np.random.normal`) do not count, nor do those that a
    function makes or imports while it runs.
    """
    # those behind the functions of modules, which `seed_everything` seeds
    known: list[Any] = [random._inst]
    if (numpys := sys.modules.get("numpy.random")) is not None:
        known += [numpys.mtrand._rand, numpys.mtrand._rand._bit_generator]
    if (torch := sys.modules.get("torch")) is not None:
        known.append(torch.default_generator)
    found = []
    for name, generator in _search(fn, _generator_in):
        if all(generator is not other for other in known):
            known.append(generator)
            found.append(Generator(name, generator))
    return found


class CapturedModels:
    """The torch modules that a function captures, and the versions of their parameters."""

    def __init__(self, fn: Any) -> None:
        def model_in(value: Any) -> Any:
            return value if isinstance(value, sys.modules["torch"].nn.Module) else None

        models = _search(fn, model_in) if "torch" in sys.modules else ()
        self._models = [(name, model, _version(model)) for name, model in models]

    def changed(self) -> str | None:
        """Return, once, the variable (or class) of a model whose parameters were changed."""
        for name, model, version in self._models:
            if _version(model) != version:
                self._models = []
                return name or type(model).__name__
        return None


def _version(model: Any) -> int:
    """Return a number that grows when the parameters change."""
    try:
        # a fused optimizer does not count versions, but leaves gradients
        return sum(
            parameter._version + (parameter.grad is not None) for parameter in model.parameters()
        )
    except Exception:  # tensors that were made in inference mode have no version
        return 0


def _search(fn: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Yield what `pick` returns for values that a function captures, with their variables."""
    # by id; a value in here stays alive, so that no other gets its id
    seen: dict[int, Any] = {}
    left = deque([("", fn)])
    while left and len(seen) < MOST_VALUES:
        name, value = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        try:
            picked = pick(value)
            parts = [] if picked is not None else list(_parts(value, pick))
        except Exception:  # a proxy of something that is not there yet, say
            continue
        left.extend((inner or name, part) for inner, part in parts)
        if picked is not None:
            yield name, picked


def _generator_in(value: Any) -> Any:
    """Return the generator that a value is, if it is one; of NumPy's, the bit generator."""
    if isinstance(value, random.Random):
        # the system's has no seed
        return None if isinstance(value, random.SystemRandom) else value
    numpys = sys.modules.get("numpy.random")
    if numpys is not None:
        if isinstance(value, numpys.Generator):
            return value.bit_generator
        if isinstance(value, (numpys.RandomState, numpys.BitGenerator)):
            return value
    return value if _is_torchs(value) else None


def _parts(value: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, with the names of variables."""
    for kind, attributes in INSIDE:
        if isinstance(value, kind):
            yield from (("", getattr(value, attribute)) for attribute in attributes)
            return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"argument {number}", part) for number, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        yield from (("", part) for part in parts if len(value) <= MOST_ENTRIES)
    elif isinstance(value, type):
        kinds = value.__mro__ if is_users(value.__module__) else ()
        yield from (
            entry for kind in kinds if is_users(kind.__module__) for entry in vars(kind).items()
        )
    elif not isinstance(value, types.ModuleType):
        yield from _parts_of_object(value, pick)


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield "", vars(fn).get("__wrapped__")
    yield from zip(
        reversed(fn.__code__.co_varnames[: fn.__code__.co_argcount]),
        reversed(fn.__defaults__ or ()),
        strict=False,
    )
    yield from (fn.__kwdefaults__ or {}).items()
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    if not is_users(fn.__module__):
        return
    for first, *others in variables_of(fn.__code__):
        value: Any = fn.__globals__.get(first)
        is_in_module = bool(others) and isinstance(value, types.ModuleType)
        for name in others:
            value = vars(value).get(name) if isinstance(value, types.ModuleType) else value
        yield others[-1] if is_in_module else first, value


def _parts_of_object(value: Any, pick: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    kind, own = type(value), getattr(value, "__dict__", {})
    if is_users(kind.__module__):
        slots = [
            name
            for base in kind.__mro__
            for name in getattr(base, "__slots__", ())
            if isinstance(name, str)
        ]
        yield from own.items()
        yield from ((name, getattr(value, name, None)) for name in slots)
        yield "", kind
    else:  # of a library's object only what is searched for, in its own attributes
        yield from (
            (name, part)
            for name, part in own.items()
            if pick(part) is not None or name == "__wrapped__"
        )


@functools.lru_cache(1024)
def variables_of(code: types.CodeType) -> Sequence[tuple[str, ...]]:
    """Return the global variables that code reads, each with the attributes read of it."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            found.pop(chain, None)
            chain = (*chain, step.argval)
        elif step.opname != "EXTENDED_ARG":
            chain = ()
        if chain:
            found[chain] = None
    for constant in code.co_consts:  # functions in it
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(variables_of(constant)))
    return tuple(found)


def changed_model(name: str, model: str) -> str:
    """Return the warning about a function that has changed a model that it captures."""
    return (
        f"{name} has changed {model}, a model that it captures. Each worker has its own copy: the"
        " model in this process is unchanged, and an item sees the changes of earlier items on its"
        " worker. Make the model in the function, or return it (or its state_dict())."
    )
