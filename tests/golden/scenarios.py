"""Twenty scenarios on pools in simulated time: what each pool does, step by step, is in a file that
must not change by accident.

`python -m tests.golden.scenarios` writes the files anew; look at the difference before you commit
it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from enum import Enum
from pathlib import Path
from typing import Any

from raypool import Composite, ParallelPool, RaypoolError
from raypool.engine.trace import read_trace
from raypool.testing import replay, sim_pool
from raypool.testing.simulation import FaultPlan

TRACES = Path(__file__).parent / "traces"

Outcome = dict[str, Any]

SCENARIOS: dict[str, Callable[[Path], Outcome]] = {}


def scenario(
    num_workers: int, plan: FaultPlan | None = None, **profile: Any
) -> Callable[[Callable[[ParallelPool], Any]], None]:
    """Add a scenario: a function of the pool that it is given, named as its file."""

    def add(play: Callable[[ParallelPool], Any]) -> None:
        def run(trace: Path) -> Outcome:
            with sim_pool(num_workers, plan, trace=trace, quiet=True, **profile) as pool:
                seen = play(pool)
                seen["statistics"] = pool.statistics()
            return seen

        SCENARIOS[play.__name__] = run

    return add


def double(x: int) -> int:
    return 2 * x


def fail_at_two(x: int) -> int:
    if x == 2:
        raise ValueError("two")
    return x


def ended(*futures: Any) -> list[Any]:
    """Wait for futures; return what each has given."""
    found = []
    for future in futures:
        try:
            found.append(future.result())
        except (RaypoolError, CancelledError, ValueError) as error:
            found.append(type(error).__name__)
    return found


# --- loops ----------------------------------------------------------------------------------------


@scenario(2)
def loop_of_four(pool: ParallelPool) -> Outcome:
    return {"results": list(pool.parfor(double, range(4)))}


@scenario(2, FaultPlan(item_s=0.001))
def loop_of_short_items(pool: ParallelPool) -> Outcome:
    """Calls grow as the items turn out to be short."""
    return {"sum": sum(pool.parfor(double, range(200)))}


@scenario(2)
def loop_over_a_generator(pool: ParallelPool) -> Outcome:
    return {"results": list(pool.parfor(double, (x for x in range(5)), chunk_size=2))}


@scenario(3)
def loop_on_two_of_three_workers(pool: ParallelPool) -> Outcome:
    return {"results": list(pool.parfor(double, range(5), max_workers=2))}


@scenario(2, FaultPlan(spread=0.0))
def loop_with_costs(pool: ParallelPool) -> Outcome:
    """The longest items go first."""
    return {"results": list(pool.parfor(double, range(5), cost=[1, 2, 5, 3, 4], chunk_size=1))}


@scenario(2)
def loop_that_collects_errors(pool: ParallelPool) -> Outcome:
    results = pool.parfor(fail_at_two, range(4), on_error="collect")
    return {
        "results": list(results),
        "errors": {index: str(error) for index, error in results.errors.items()},
    }


@scenario(2)
def loop_that_stops_at_an_error(pool: ParallelPool) -> Outcome:
    try:
        pool.parfor(fail_at_two, range(20), on_error="stop")
    except (RaypoolError, ValueError) as error:
        return {"raised": type(error).__name__}
    return {}


@scenario(2)
def loop_with_retries(pool: ParallelPool) -> Outcome:
    results = pool.options(retries=2, retry_on=ValueError).parfor(
        fail_at_two, range(4), on_error="collect"
    )
    return {"results": list(results)}


# --- workers die ----------------------------------------------------------------------------------


@scenario(3, FaultPlan(seed=3, p_loss=0.3))
def workers_die(pool: ParallelPool) -> Outcome:
    return {"results": list(pool.parfor(double, range(12), on_error="collect"))}


@scenario(2, FaultPlan(p_loss=1.0))
def every_call_kills_its_worker(pool: ParallelPool) -> Outcome:
    """One item after the other is given up, and the pool lives."""
    results = pool.options(retries=1).parfor(double, range(3), on_error="collect")
    return {"errors": {index: type(error).__name__ for index, error in results.errors.items()}}


@scenario(3, FaultPlan(seed=5, p_failed_start=0.4))
def workers_fail_to_start(pool: ParallelPool) -> Outcome:
    return {"results": list(pool.parfor(double, range(6)))}


@scenario(2, FaultPlan(seed=1, p_straggler=0.2, straggler_factor=50.0))
def stragglers(pool: ParallelPool) -> Outcome:
    """What waits behind a slow item is handed back, and goes elsewhere."""
    return {"results": list(pool.parfor(double, range(16)))}


# --- futures --------------------------------------------------------------------------------------


def together(pool: ParallelPool, submit: Callable[[], list[Any]]) -> list[Any]:
    """Let a function submit tasks of which none begins before all are submitted; otherwise each
    would run at once.
    """
    futures: list[Any] = []
    pool._engine.driver.do(lambda: futures.extend(submit()))
    return futures


@scenario(1)
def futures_with_priorities(pool: ParallelPool) -> Outcome:
    done: list[int] = []

    def submit() -> list[Any]:
        futures = [
            pool.options(priority=number % 3).parfeval(double, number) for number in range(6)
        ]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: done.append(number))
        return futures

    return {"results": ended(*together(pool, submit)), "order": done}


def cancel_others(pool: ParallelPool) -> Outcome:
    """When the second task ends, cancel the first, which runs, and the last, which is queued."""

    def submit() -> list[Any]:
        futures = [pool.parfeval(double, number) for number in range(5)]
        futures[1].add_done_callback(lambda _: [futures[0].cancel(), futures[4].cancel()])
        return futures

    futures = together(pool, submit)
    return {"results": ended(*futures), "replaced": [future.worker_replaced for future in futures]}


@scenario(2)
def cancelled_in_the_queue_and_while_running(pool: ParallelPool) -> Outcome:
    return cancel_others(pool)


@scenario(2, FaultPlan(p_stubborn=1.0, item_s=60.0))
def cancelled_and_stubborn(pool: ParallelPool) -> Outcome:
    """A call that does not end in time is ended with its worker."""
    return cancel_others(pool)


@scenario(1, FaultPlan(item_s=10.0, spread=0.0))
def out_of_time(pool: ParallelPool) -> Outcome:
    limited = pool.options(timeout_s=2.0)
    return {
        "results": ended(
            *together(pool, lambda: [limited.parfeval(double, 1), pool.parfeval(double, 2)])
        )
    }


@scenario(3)
def chosen_workers(pool: ParallelPool) -> Outcome:
    """One worker, all workers, a part of the pool, and a process that is used once."""
    one, rest = pool.partition(workers=[1])
    futures = together(
        pool,
        lambda: [
            *(pool.options(worker=2).parfeval(double, number) for number in range(3)),
            pool.parfeval_on_all(double, 3),
            *(one.parfeval(double, number) for number in range(4, 6)),
            *(rest.parfeval(double, number) for number in range(6, 8)),
            pool.options(fresh_process=True).parfeval(double, 8),
        ],
    )
    return {"results": ended(*futures)}


# --- ranks, sizes, ends ---------------------------------------------------------------------------


@scenario(3)
def ranks(pool: ParallelPool) -> Outcome:
    """Ranks run together, after the tasks before them, and end together when one of them fails."""
    futures = together(
        pool,
        lambda: [
            *(pool.parfeval(double, number) for number in range(4)),
            pool.spmd_async(lambda context: context.rank),
            pool.parfeval(double, 4),
            pool.spmd_async(lambda context: 1 // context.rank),
        ],
    )
    return {
        "results": [list(each) if isinstance(each, Composite) else each for each in ended(*futures)]
    }


@scenario(2)
def more_and_fewer_workers(pool: ParallelPool) -> Outcome:
    def submit() -> list[Any]:
        futures = [pool.parfeval(double, number) for number in range(8)]
        futures[4].add_done_callback(lambda _: pool.resize(1))
        return futures

    pool.resize(4)
    return {"results": ended(*together(pool, submit)), "workers": pool.num_workers}


@scenario(2)
def closed_with_work_left(pool: ParallelPool) -> Outcome:
    def submit() -> list[Any]:
        futures = [pool.parfeval(double, number) for number in range(6)]
        futures[0].add_done_callback(lambda _: pool.shutdown(wait=False, cancel_futures=True))
        return futures

    return {"results": ended(*together(pool, submit))}


# --- the files ------------------------------------------------------------------------------------


def course(name: str) -> str:
    """Play a scenario, and return its course: each event with its time, the commands that answer
    it, and what comes of it all.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        outcome = SCENARIOS[name](trace)
        times = [now for now, _ in read_trace(trace)]
        steps = replay(trace)
    lines = []
    for now, (event, commands) in zip(times, steps, strict=True):
        lines += [f"{now:.6f} {shown(event)}", *(f"    {shown(command)}" for command in commands)]
    lines += ["", *(f"{key}: {value}" for key, value in outcome.items())]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return an event or a command without what is as usual."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.6f}"
    if hasattr(value, "_asdict"):
        usual = value._field_defaults
        given = [
            f"{key}={shown(entry)}"
            for key, entry in value._asdict().items()
            if key not in usual or usual[key] != entry
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def written() -> Iterator[Path]:
    for name in SCENARIOS:
        path = TRACES / f"{name}.txt"
        path.write_text(course(name))
        yield path


if __name__ == "__main__":
    for path in written():
        print(path, len(path.read_text().splitlines()))
