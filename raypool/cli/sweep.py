"""The command line for sweeps: `raypool sweep`, and `ls`, `show`, `report`, `export` for runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from raypool.cli.output import INTERRUPTED, PREEMPTED, echo, errors_said, write_out
from raypool.errors import InvalidValueError, JournalError, PoolPreemptedError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from raypool.cli.inputs import Config
    from raypool.engine.durable import RunPart
    from raypool.results import Results

Command = TypeVar("Command", bound=Callable[..., Any])

ITEMS_PER_TASK = 4
"""How many items a task of a job array runs, unless it is told."""

FEW_ROWS = 10
"""The greatest number of rows that a sweep ends with."""

MOST_ROWS = 50
"""The greatest number of rows of `raypool show` on a terminal, unless it is told."""

MOST_ACTIONS = 5
"""The greatest number of actions of watchers that are named."""

MOST_FAILURES = 20
"""The greatest number of failed items that are named; others are counted."""


class RunFolder(click.Path):
    """The folder of a run. A leading ~ is the home folder, as in `parfor(run_dir=)`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder's path; values in it may need modules of the current folder."""
        if "" not in sys.path:
            sys.path.append("")
        home = os.path.expanduser(value)  # noqa: PTH111 - text stays text
        return super().convert(home, param, ctx)


class Repeatable(click.Command):
    """A command that can say how it was called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words, and parse them."""
        ctx.meta["raypool.call"] = shlex.join(["raypool", str(self.name), *args])
        return super().parse_args(ctx, args)


def _checked_url(context: click.Context, param: click.Parameter, url: str | None) -> str | None:
    from raypool.parallel_for import check_on_end

    with errors_said():
        check_on_end(url)
    return url


def _checked_watch(context: click.Context, param: click.Parameter, is_watched: bool) -> bool:
    from raypool.watch.watch_page import check_packages

    if is_watched:
        with errors_said(before_work=True):
            check_packages()
    return is_watched


def run_options(item: str, seeds: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `raypool sweep` and `raypool search`."""
    options = [
        click.option(
            "--run-dir",
            type=RunFolder(file_okay=False),
            required=True,
            help=f"Folder for all {item}s: created if missing, resumed if it exists.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Number of workers. Default: one per GPU; without a GPU, one per physical core.",
        ),
        click.option(
            "--profile",
            help="Where to run: local, threads, inline or a profile of raypool.toml."
            "  [default: the default of raypool.toml, else local]",
        ),
        click.option("--seed", type=click.IntRange(min=0), help=seeds),
        click.option(
            "--watch",
            is_flag=True,
            callback=_checked_watch,
            help="Show the run on a live page, and print its address.",
        ),
        click.option(
            "--notify",
            metavar="URL",
            callback=_checked_url,
            help="At the end, post a summary to this webhook, as JSON.",
        ),
        click.option(
            "--json",
            "is_json",
            is_flag=True,
            help=f"Print the table as JSON: a list with one object per {item}.",
        ),
    ]
    return lambda command: functools.reduce(lambda made, add: add(made), options[::-1], command)


@click.command(cls=Repeatable)
@click.argument("target", metavar="MODULE:FUNCTION")
@click.argument("configs", type=click.Path(path_type=Path))
@run_options("item", "Seed each item's random numbers, the same in every run.")
@click.option(
    "--rerun",
    type=click.Choice(["failed", "missing", "all"]),
    default="failed",
    show_default=True,
    help=(
        "Which items to run if RUN_DIR has results: failed and missing ones, only missing ones, or"
        " all."
    ),
)
@click.option(
    "--array",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=ITEMS_PER_TASK,
    metavar="[N]",
    help=(
        "Slurm: submit a job array, and return at once. Each of its tasks runs N items,"
        f" {ITEMS_PER_TASK} if N is left out."
    ),
)
@click.option("--part-of", type=int, hidden=True)  # the run of which this is a task
def sweep(target: str, configs: Path, is_json: bool, **options: Any) -> None:
    """Call a function once for each configuration in a file.

    MODULE:FUNCTION is the function, such as train:main or train.py:main; its only argument is a
    dict. CONFIGS is a file: .csv, whose first line names the columns; .jsonl, with one object per
    line; or .yaml, a list of mappings.

    Finished results are kept in RUN_DIR; run the same command again to resume. The table goes to
    standard output, everything else to standard error. Exit status: 0 if all items finished, 1 if
    some failed or were cancelled, 2 for a usage error, 75 if all machines are about to shut down,
    130 after Ctrl-C or if a watcher stopped it.
    """
    from raypool.cli.inputs import check_takes_whole, find_function, read_configs

    run_dir: str = options["run_dir"]
    place: str | RunPart = run_dir
    workers, profile, rerun = options["workers"], options["profile"], options["rerun"]
    items: list[Config] = []
    with contextlib.redirect_stdout(sys.stderr), errors_said():
        items = read_configs(configs)
        folder = place = absolute(run_dir)
        function = find_function(target)
        check_takes_whole(function, items)
        num_items = len(items)
        if options["array"] is not None:
            from raypool.cli.sweep_array import submit_array

            if submit_array(function, items, target, configs, options):
                raise SystemExit(0)
            workers, profile = None, "inline"  # no item has to run
        is_part = options["part_of"] is not None
        if not is_part:
            check_fits(function, folder, options["seed"])
        else:
            from raypool.cli.sweep_array import part_of

            place = part_of(Path(folder), options["part_of"])
            # after a requeue a failed item has had its turn
            num_items, rerun = len(place.items), "missing"
        from raypool.pool import parpool

        with resumable(run_dir, num_items, is_part), parpool(workers, profile=profile) as pool:
            results: Results[Any] = pool.parfor(
                function,
                items,
                on_error="collect",
                run_dir=place,
                rerun=rerun,
                seed=options["seed"],
                on_end=options["notify"],
                watch=options["watch"],
            )
    if is_json:
        from raypool.views import tables

        echo(tables.sweep_as_json(tables.numbered(results.to_frame())))
    elif not is_part:
        _show_best(results, run_dir)
    _say_failures(results.errors, items, run_dir)
    num_failed = len(results.errors)
    # items of other parts of the run count as cancelled here
    num_cancelled = results._counts["cancelled"] - (len(items) - num_items)
    cancelled = f", {num_cancelled} cancelled" if num_cancelled else ""
    echo(
        f"{num_items - num_failed - num_cancelled} of {num_items} finished, {num_failed}"
        f" failed{cancelled}. The results are in {run_dir}.",
        err=True,
    )
    raise SystemExit(1 if num_failed or num_cancelled else 0)


@contextlib.contextmanager
def resumable(run_dir: str, total: int, is_part: bool = False) -> Iterator[None]:
    """On an interruption, print how to resume, and exit; a part of an array is requeued."""
    call = click.get_current_context().meta["raypool.call"]
    try:
        yield
    except (KeyboardInterrupt, CancelledError, PoolPreemptedError) as error:
        is_preempted = isinstance(error, PoolPreemptedError)
        if (partial := getattr(error, "results", None)) is not None:
            num_finished = partial._counts["finished"]
            if (trials := partial._trials) is not None:  # a part of a trial may have finished
                num_finished = sum(state in ("complete", "pruned") for state in trials.states)
            elsewhere = " on other machines" if is_preempted else ""
            echo(
                f"{'Preempted' if is_preempted else 'Interrupted'}: {num_finished} of {total} items"
                f" finished; their results are in {run_dir}."
                + ("" if is_part else f" To run the others{elsewhere}:\n  {call}"),
                err=True,
            )
        elif is_preempted:
            raise
        else:  # while the pool opened, or closed after the last item
            echo(f"Interrupted. The results of any finished items are in {run_dir}.", err=True)
        raise SystemExit(PREEMPTED if is_preempted else INTERRUPTED) from None


def absolute(run_dir: str) -> str:
    """Return a run's folder, for use after the import of a module that changes the current one."""
    from raypool.parallel_for import check_run_dir

    check_run_dir(run_dir)
    return os.path.abspath(run_dir)  # noqa: PTH100 (links stay)


def check_fits(function: Callable[[Any], Any], run_dir: str, seed: int | None) -> None:
    """Make sure, before a pool starts, that the folder is not another sweep's."""
    from raypool.journal.journal import check_same
    from raypool.journal.keys import function_key
    from raypool.journal.reading import read_contents

    folder = Path(run_dir)
    try:
        contents = read_contents(folder)
    except JournalError:  # a new run, or one for the loop itself to repair or to refuse
        return
    check_same(folder, contents, function_key(function), seed)


def _show_best(results: Results[Any], run_dir: str) -> None:
    """Print the table of a short sweep, or the best items of a longer one."""
    from raypool.results import best_first
    from raypool.views import tables

    is_short = len(results) <= FEW_ROWS
    frame, metric = (results.to_frame(), None) if is_short else best_first(results)
    frame = tables.numbered(frame)
    kept = () if metric is None else (metric,)
    show_fitting(frame[tables.columns_of(frame)].head(FEW_ROWS), kept)
    if not is_short:
        which = f"The first {FEW_ROWS}" if metric is None else f"The {FEW_ROWS} best by {metric}"
        all_rows = shlex.join(["raypool", "show", run_dir, "--top", str(len(frame))])
        echo(f"{which}, of {len(frame):,} items. {all_rows} shows them all.", err=True)


def show_fitting(frame: pd.DataFrame, kept: Collection[str]) -> None:
    """Print a table of results; in a narrow terminal columns after the first may be left out, not
    these.
    """
    from raypool.results import RUN_COLUMNS
    from raypool.views import tables

    names = sorted(map(str, frame), key=RUN_COLUMNS.__contains__)
    leaving = [name for name in names[:0:-1] if name not in kept]
    _say_left_out(tables.show_sweep(frame, leaving))


def _say_left_out(columns: list[str]) -> None:
    """Print the names of the columns that had no room, the last of which went first."""
    if columns:
        echo(f"The terminal is too narrow for {', '.join(columns[::-1])}.", err=True)


def _say_failures(errors: dict[int, BaseException], items: list[Config], run_dir: str) -> None:
    """Print the failed items, and how to replay them."""
    from raypool.views.words import describe_error, describe_item

    for index, error in itertools.islice(errors.items(), MOST_FAILURES):
        config = items[index]
        what = f"Failed: item {index} ({describe_item(config)}): {describe_error(error)}"
        # the usual KeyError: the configuration lacks an entry
        wanted = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(wanted, str) and wanted not in config:
            near = did_you_mean(wanted, map(str, config))
            what += f". The configuration has no {wanted!r}.{near}"
        echo(what, err=True, color="red")
        echo(f"  {shlex.join(['raypool', 'replay', run_dir, str(index), '--debug'])}", err=True)
    if len(errors) > MOST_FAILURES:
        shown = shlex.join(["raypool", "show", run_dir, "--failed", "--top", str(len(errors))])
        echo(f"and {len(errors) - MOST_FAILURES:,} more: {shown} lists them all.", err=True)


@click.command()
@click.argument(
    "folder",
    type=RunFolder(exists=True, file_okay=False, path_type=Path),
    default=Path(),
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON: a list with one object per run.")
def ls(folder: Path, is_json: bool) -> None:
    """List the saved runs below a folder, newest first.

    FOLDER is the current folder by default. `raypool sweep` and parfor(run_dir=...) write saved
    runs, and so do train and fit with their first checkpoint.
    """
    from raypool.journal.reading import runs_below, summary_of
    from raypool.views import tables

    summaries = []
    for run in runs_below(folder.absolute()):
        try:
            summaries.append(summary_of(run))
        except JournalError as error:
            echo(f"{run} was skipped: {error}", err=True)
    summaries.sort(key=lambda summary: summary.started_at, reverse=True)
    if is_json:
        echo(tables.runs_as_json(summaries))
    elif summaries:
        _say_left_out(tables.show_runs(summaries, folder))
    else:
        echo(f"There are no saved runs below {folder.resolve()}.", err=True)


@click.command()
@click.argument("run_dir", type=RunFolder(file_okay=False, path_type=Path))
@click.option(
    "--sort",
    metavar="COLUMN",
    help="Sort by this column: numbers, texts or times, smallest first; -COLUMN: largest first.",
)
@click.option("--top", type=click.IntRange(min=1), help="Number of rows to show.")
@click.option(
    "--failed", "is_failed", is_flag=True, help="Show only failed items, with their errors."
)
@click.option("--columns", metavar="A,B", help="Show only these columns.")
@click.option(
    "--csv",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a CSV file; - is standard output.",
)
@click.option("--parquet", type=click.Path(dir_okay=False), metavar="FILE", help="Write Parquet.")
@click.option(
    "--provenance",
    "is_provenance",
    is_flag=True,
    help="Show code, command, packages and GPUs of each call with RUN_DIR instead of the table.",
)
@click.option(
    "--json", "is_json", is_flag=True, help="Print JSON: a list with one object per item or call."
)
def show(run_dir: Path, sort: str | None, top: int | None, **options: Any) -> None:
    """Show the table of a saved run, which may still be running.

    RUN_DIR is the folder given to `raypool sweep`, parfor, train or fit. The table of a training
    has its reports up to the last checkpoint. Prints up to 50 rows (--top changes that), on a
    terminal only with the columns that fit. --csv, --parquet and --json write all rows and columns.
    """
    from raypool.results import collector_paused, ranked
    from raypool.views import tables

    files = {kind: options[kind] for kind in ("csv", "parquet") if options[kind] is not None}
    if files.get("csv") == "-" and options["is_json"]:
        raise click.UsageError("--csv - and --json both write to standard output. Choose one.")
    if options["is_provenance"]:
        _show_provenance(run_dir, {"sort": sort, "top": top, **options})
        return
    with errors_said(), collector_paused():
        frame = _table_of(run_dir, options["is_failed"])
        num_items, usual = len(frame), tables.columns_of(frame)
        if options["is_failed"]:
            # a trial that returned no score has failed, too
            mark = "state" if frame.columns[0] == "trial" else "status"
            frame = frame[frame[mark] == "failed"]
            usual = [name for name in tables.columns_of(frame) if name != mark] + ["error"]
        chosen = _named(frame, options["columns"])
        if sort is not None and not frame.empty:
            frame = ranked(frame, sort)
        rows = frame.head(top) if top is not None else frame
        everything = rows[chosen or [*rows]]
        for kind, path in files.items():
            _write(everything, kind, path)
        if options["is_json"]:
            echo(tables.sweep_as_json(everything))
        elif not files and frame.empty:
            none = f"None of the {num_items:,} items of {run_dir} failed."
            echo(none if num_items else f"The table of {run_dir} is still empty.", err=True)
        elif not files:
            shown = rows.head(top or MOST_ROWS)
            kept = chosen or ["error", (sort or "").removeprefix("-")]
            show_fitting(shown[chosen or usual], kept)
            if rest := len(rows) - len(shown):
                echo(f"and {rest:,} more: --top {len(rows)} shows them all.", err=True)
            _say_actions(run_dir)


def _say_actions(run_dir: Path) -> None:
    """Print what watchers did, in a line; of many actions the last ones."""
    from raypool.journal.live import actions_in

    actions = actions_in(run_dir)
    if not actions:
        return
    said = []
    for action in actions[-MOST_ACTIONS:]:
        item = "" if action["item"] is None else f" {action['item']}"
        moment = datetime.fromtimestamp(action["done_at"]).isoformat(" ", "minutes")
        outcome = "" if action["outcome"] == "done" else f": {action['outcome']}"
        said.append(f"{action['action'] or 'unknown'}{item} ({action['user']}, {moment}{outcome})")
    before = "..., " if len(actions) > len(said) else ""
    s = "s" if len(actions) > 1 else ""
    echo(f"{len(actions)} action{s} from `raypool watch`: {before}{', '.join(said)}", err=True)


def _show_provenance(run_dir: Path, options: dict[str, Any]) -> None:
    """Print where the results of each call with a run's folder come from."""
    from raypool.journal.provenance import facts_of
    from raypool.journal.reading import calls_in, is_training

    if any(options[name] for name in options.keys() - {"is_provenance", "is_json"}):
        raise click.UsageError("--provenance shows no table; only --json goes with it.")
    with errors_said():
        if is_training(run_dir):
            raise InvalidValueError(f"{run_dir} is a training, which records no provenance.")
        calls = calls_in(run_dir)
    if options["is_json"]:
        echo("[" + ",\n ".join(map(json.dumps, calls)) + "]")
        return
    for call in calls:
        lines = [f"  {title:12}{fact}" for title, fact in facts_of(call).items()]
        echo("\n".join([f"call {call['run']}", *lines]))


@click.command()
@click.argument("run_dir", type=RunFolder(file_okay=False, path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["tensorboard", "mlflow", "wandb", "trackio", "optuna", "csv", "parquet"]),
    required=True,
)
@click.option(
    "--output",
    "--project",
    "place",
    required=True,
    help="The folder for TensorBoard, the file for Parquet and CSV (- is standard output), MLflow's"
    " experiment, the project of W&B or Trackio, or the URL of Optuna's storage"
    " (sqlite:///study.db).",
)
@click.option("--metric", help="With --to optuna: name of the score, such as loss or accuracy.")
@click.option(
    "--mode",
    type=click.Choice(["max", "min"]),
    help="Whether a higher or a lower score is better.  [default: inferred from --metric]",
)
def export(run_dir: Path, target: str, place: str, **score: Any) -> None:
    """Write a saved run, which may still be running, for another tool.

    RUN_DIR is the folder given to `raypool sweep` or parfor. CSV and Parquet are the table of
    `raypool show`. The others get the parameters, metrics, results and state of each item. MLflow
    is found by MLFLOW_TRACKING_URI. W&B writes offline runs into the folder wandb, for `wandb
    sync`.
    """
    from raypool.journal.reading import load_results

    if (target == "optuna") != (score["metric"] is not None):
        raise click.UsageError("--metric is required with --to optuna, and not allowed otherwise.")
    with errors_said():
        if target in ("csv", "parquet"):
            _write(_table_of(run_dir, is_failed=False), target, place)
            return
        results = load_results(run_dir)
        try:
            getattr(results, f"to_{target}")(place, **(score if target == "optuna" else {}))
        except InvalidValueError:  # the name of the score does not tell the mode
            raise
        except Exception as error:  # of the other tool
            raise click.ClickException(f"--to {target}: {error}") from error


def _write(frame: pd.DataFrame, kind: str, path: str) -> None:
    """Write a table to a file; to standard output if that is called -."""
    from raypool.views import tables

    columns = tables.as_file_columns(frame)
    if (kind, path) == ("csv", "-"):
        write_out(columns.to_csv(index=False).rstrip("\n"))
        return
    try:
        getattr(columns, f"to_{kind}")(path, index=False)
    except (OSError, ImportError) as error:
        raise click.ClickException(f"{path} could not be written: {error}.") from error


def _table_of(run_dir: Path, is_failed: bool) -> pd.DataFrame:
    """Return the items of a saved run, or the reports of a training; their numbers come first."""
    from raypool.journal.reading import is_training, load_results, reports_of
    from raypool.views import tables

    if not is_training(run_dir):
        results = load_results(run_dir)
        if (trials := results._trials) is None:
            return tables.numbered(results.to_frame())
        echo(f"{len(results):,} trials: {trials.summary}", err=True)
        return results.to_frame()
    if is_failed:
        raise InvalidValueError(
            f"{run_dir} is a training, and --failed shows failed items of sweeps and searches."
            " Leave it out to see the training's reports."
        )
    return reports_of(run_dir)


def _named(frame: pd.DataFrame, columns: str | None) -> list[str]:
    """Return the columns in a list with commas, after that of the item's number."""
    names = [name.strip() for name in (columns or "").split(",") if name.strip()]
    # a column that is named twice is shown once
    names = [*dict.fromkeys([str(frame.columns[0]), *names])] if names else []
    for name in names:
        if name not in frame:
            known = map(str, frame)
            raise InvalidValueError(f"There is no column {name!r}.{did_you_mean(name, known)}")
    return names


@click.command()
@click.argument("run_dir", type=RunFolder(file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("sweep.html"),
    show_default=True,
    help="The file to write; an existing file is replaced.",
)
def report(run_dir: Path, out: Path) -> None:
    """Write an HTML report of a saved run, which may still be running.

    RUN_DIR is the folder given to `raypool sweep`, `raypool search` or parfor. The report has the
    best item, the importance of its fields, the table, learning curves, a timeline and how well the
    run scaled. It is one file that opens offline.
    """
    from raypool.journal.reading import load_results

    with errors_said():
        results = load_results(run_dir)
        try:
            results.report(out)
        except OSError as error:
            raise click.ClickException(
                f"{out} could not be written: {error.strerror or error}."
            ) from error
    echo(f"Wrote {out}")


@click.command()
@click.argument(
    "folder",
    metavar="[RUN_DIR | FOLDER]",
    type=RunFolder(exists=True, file_okay=False, path_type=Path),
    default=Path(),
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of the page; if it is in use, a free one is used instead.  [default: any free one]",
)
@click.option("--read-only", "is_read_only", is_flag=True, help="Disable actions and notes.")
@click.option(
    "--open",
    "is_opened",
    is_flag=True,
    help="Open the page in a browser. Other users of this machine can then see its address, with"
    " the secret, in the list of processes: leave this out where you do not trust them.",
)
def watch(folder: Path, port: int | None, is_read_only: bool, is_opened: bool) -> None:
    """Show a saved run, or all runs below a folder, on a live page.

    The page shows the table, curves, workers, GPUs, output and errors of each run while it goes on,
    and can stop, cancel and rerun items. It is served on this machine only, at an address with a
    secret, until Ctrl-C.
    """
    import secrets
    import webbrowser

    from raypool.watch import watch_page

    folder = folder.absolute()
    with errors_said():
        watch_page.check_can_watch(folder)
    from raypool.watch.run_reader import sweeps_below
    from raypool.watch.server import RunsFolder, WatchServer

    first = next(sweeps_below(folder), None)
    if first is None:
        raise click.UsageError(
            f"There are no saved runs of sweeps or searches below {folder}. `raypool sweep` and"
            " parfor(run_dir=...) write them."
        )
    try:
        listener = watch_page.listen(port or 0)
    except OSError as error:
        echo(f"Port {port} cannot be used: {error.strerror}. Using another one.", err=True)
        listener = watch_page.listen()
    token = secrets.token_urlsafe(32)
    url = watch_page.url_of(listener, token)
    server = WatchServer(listener, RunsFolder(folder, first == folder, is_read_only), token)
    echo(f"{watch_page.announcement(url)}\nCtrl-C closes the page; the runs continue.")
    if is_opened:
        webbrowser.open(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its own shutdown
        server.run(sockets=[listener])
