"""A tour of raypool: one loop over three items on two simulated workers, and the code that it
passes through.

`python -m raypool.testing.tour` prints every event that the scheduler gets, every command that it
returns, and below each the file and the function that handles it.
docs/internals/first_ten_minutes.md walks through its output. Time is simulated, so it prints
the same on every machine.

The tour changes nothing in raypool: Python itself reports each function call to a guide
(`sys.setprofile`). The functions that the guide points out are named here as objects; if one of
them is renamed, the tour fails instead of leaving it out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import raypool
from raypool.core.scheduler import Scheduler
from raypool.engine.driver import Driver
from raypool.engine.engine import Engine
from raypool.engine.loop import LoopWork
from raypool.parallel_for import LoopRun
from raypool.testing import SimBackend, sim_pool
from raypool.worker.runner import run_parts

PACKAGE = Path(raypool.__file__).parent


def square(x: int) -> int:
    """Stand in for your function."""
    return x * x


# What the guide reports besides events and commands, with the arguments that are worth reading.
STATIONS: dict[CodeType, tuple[str, ...]] = {
    Engine.function.__code__: ("fn",),
    LoopRun.run.__code__: (),
    Driver.submit.__code__: (),
    SimBackend.run.__code__: ("worker_id", "attempt_id"),
    run_parts.__code__: ("attempt_id",),
    square.__code__: ("x",),
    LoopWork.settle.__code__: (),
    LoopWork.end.__code__: (),
}

HANDLE = Scheduler.handle.__code__
CARRY_OUT = Driver._carry_out.__code__


class Guide:
    """Prints what passes. Python calls it whenever a function is called (`sys.setprofile`)."""

    def __init__(self) -> None:
        # the first function that this one calls handles what was printed last
        self._asked: CodeType | None = None

    def __call__(self, frame: FrameType, what: str, _: Any) -> None:
        """Print a call that the tour is about."""
        if what != "call" or frame.f_back is None:
            return
        code, values = frame.f_code, frame.f_locals
        if code is HANDLE:
            print(f"\nevent at {values['now']:.1f} s: {short(values['event'])}")
            self._asked = code
        elif code is CARRY_OUT:
            print(f"command: {short(values['command'])}")
            self._asked = code
        elif frame.f_back.f_code is self._asked:
            print(f"    {place(code)}")
            self._asked = None
        elif code in STATIONS:
            arguments = ", ".join(f"{name}={short(values[name])}" for name in STATIONS[code])
            print(f"        {place(code)}({arguments})")


def place(code: CodeType) -> str:
    """Return where a function is: its file in the package, and its name."""
    return f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()}  {code.co_qualname}"


def short(value: Any) -> str:
    """Return an event or a command in one line, without the fields that have their default
    values.
    """
    if hasattr(value, "_asdict"):
        fields = value._asdict().items()
        given = [
            f"{name}={short(field)}"
            for name, field in fields
            if field != value._field_defaults.get(name, ...)
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, float):
        return f"{value:.3g}"
    return value.__name__ if callable(value) else str(value)


def main() -> None:
    """Open a pool, run a loop, close the pool."""
    before = sys.getprofile()
    sys.setprofile(Guide())
    try:
        print("# pool = sim_pool(2)")
        pool = sim_pool(2)
        print("\n# results = pool.parfor(square, [1, 2, 3])")
        results = pool.parfor(square, [1, 2, 3])
        print("\n# pool.shutdown()")
        pool.shutdown()
    finally:
        sys.setprofile(before)
    print(f"\n# list(results) == {list(results)}")


if __name__ == "__main__":
    main()
