"""`raypool search`: a search from the command line, with its space in a TOML file."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raypool.cli.output import echo, errors_said
from raypool.cli.sweep import (
    FEW_ROWS,
    Repeatable,
    absolute,
    check_fits,
    resumable,
    run_options,
    show_fitting,
)
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    RaypoolError,
    TrainingError,
    did_you_mean,
    read_text,
)

if TYPE_CHECKING:
    from raypool.journal.replay import Replay
    from raypool.search.run import SearchResults

RANGES = ("uniform", "log_uniform", "int_uniform", "choice")


@click.command(cls=Repeatable)
@click.argument("target", metavar="MODULE:FUNCTION")
@click.argument("space", type=click.Path(path_type=Path))
@run_options("trial", "Seed the sampler and each trial's random numbers.")
@click.option(
    "--num-trials",
    type=click.IntRange(min=1),
    required=True,
    help="Number of trials, including those already in RUN_DIR.",
)
@click.option("--metric", help="Name of the score that the function reports or returns.")
@click.option(
    "--mode",
    type=click.Choice(["max", "min"]),
    help='Whether a higher or a lower score is better; default: by its name, such as "val_loss".',
)
@click.option(
    "--halving",
    type=click.IntRange(min=2),
    metavar="MAX_EPOCHS",
    help="Compare trials after 1, 3, 9, ... epochs and continue the best third, up to MAX_EPOCHS.",
)
@click.option(
    "--median", "is_median", is_flag=True, help="Stop trials worse than the others' median."
)
@click.option(
    "--cancel-grace",
    type=float,
    metavar="SECONDS",
    help="Cancel a stopped trial that still runs after this time.",
)
@click.option(
    "--workers-per-trial",
    type=click.IntRange(min=1),
    help="Train each trial on this many workers: the function is a loop for Ray Train.",
)
@click.option(
    "--until-seconds", type=float, metavar="SECONDS", help="End the search after this time."
)
@click.option(
    "--until-score", type=float, metavar="SCORE", help="End it at this score or a better one."
)
@click.option(
    "--until-patience",
    type=int,
    metavar="TRIALS",
    help="End it after this many trials in a row without a new best score.",
)
def search(target: str, space: Path, is_json: bool, **options: Any) -> None:
    """Search for the best configuration.

    MODULE:FUNCTION is the function, such as train:main or train.py:main; its only argument is a
    dict. SPACE is a TOML file with a range, a choice or a plain value for each name:

    \b
    lr = {log_uniform = [1e-5, 1e-1]}
    width = {int_uniform = [16, 512], log = true}
    kind = {choice = ["mlp", "cnn"]}
    epochs = 27

    Trials are kept in RUN_DIR; run the same command again to resume, or with more trials to
    continue. The table goes to standard output, everything else to standard error. Exit status: 0
    if there is a best trial, 1 if there is none, 2 for a usage error, 75 if all machines are about
    to shut down, 130 after Ctrl-C or if a watcher stopped it.
    """  # noqa: D301 - click leaves the lines after this character as they are
    from raypool import search as spaces
    from raypool.cli.inputs import find_function

    if options["halving"] is not None and options["is_median"]:
        raise click.UsageError("--halving and --median cannot be combined. Choose one.")
    run_dir: str = options["run_dir"]
    with contextlib.redirect_stdout(sys.stderr), errors_said():
        stop: Any = None
        if options["halving"] is not None:
            stop = spaces.halving(max_epochs=options["halving"])
        elif options["is_median"]:
            stop = spaces.median()
        limits = {name: options[f"until_{name}"] for name in spaces.Until._fields}
        stop_when = spaces.until(**limits) if {*limits.values()} != {None} else None
        ranges = read_space(space)
        place = absolute(run_dir)
        function = find_function(target)
        check_fits(function, place, options["seed"])
        from raypool.pool import parpool

        with (
            resumable(run_dir, options["num_trials"]),
            parpool(options["workers"], profile=options["profile"]) as pool,
        ):
            try:
                found = pool.search(
                    function,
                    ranges,
                    metric=options["metric"],
                    mode=options["mode"],
                    num_trials=options["num_trials"],
                    run_dir=place,
                    stop=stop,
                    stop_when=stop_when,
                    cancel_grace_s=options["cancel_grace"],
                    seed=options["seed"],
                    on_end=options["notify"],
                    watch=options["watch"],
                    workers_per_trial=options["workers_per_trial"],
                )
            except (RaypoolError, CancelledError):  # the latter if a watcher stopped it
                raise
            except Exception as error:  # of the function, in all trials
                from raypool.views.words import describe_error

                echo(f"All trials failed: {describe_error(error)}", err=True, color="red")
                echo(f"  {shlex.join(['raypool', 'replay', run_dir, '0', '--debug'])}", err=True)
                raise SystemExit(1) from None
    _show(found, run_dir, is_json)
    frame = found.to_frame()
    scores = frame.loc[frame["state"] != "failed", frame.columns[2]].astype(float)
    if not scores.abs().lt(math.inf).any():  # there is no best one
        raise SystemExit(1)


def _show(found: SearchResults, run_dir: str, is_json: bool) -> None:
    from raypool.views import tables

    frame = found.to_frame()
    if is_json:
        echo(tables.sweep_as_json(frame))
    else:
        score = str(frame.columns[2])
        show_fitting(frame[tables.columns_of(frame)].head(FEW_ROWS), (score, "state", "epochs"))
        if len(frame) > FEW_ROWS:
            echo(f"The {FEW_ROWS} best, of {len(frame):,} trials.", err=True)
    echo(f"{found.summary}. The trials are in {run_dir}.", err=True)


def replay_training(again: Replay, call: Callable[[Callable[[Any], Any], Any], Any]) -> Any:
    """Run a trial that is a training again, as its only rank; see `Replay.run`.

    Raises:
        Exception: Any error that the function raised.
    """
    from raypool.channel.users_code import generators_of
    from raypool.pool import parpool
    from raypool.train.runs import RunOptions
    from raypool.worker.runner import seed_everything
    from raypool.worker.running import item_seed

    def loop(config: Any) -> Any:
        if again.seed is not None:
            # the trial's seed, and from it that of its rank 0
            seed = item_seed(item_seed(again.seed, again.number), 0)
            seed_everything(seed, generators_of(again.fn))
        return call(again.fn, config)

    with again.copied_checkpoint() as folder, parpool(profile="inline", quiet=True) as pool:
        kept = RunOptions(run_dir=folder / "checkpoint", keep_checkpoints=1)
        try:
            return pool.train(loop, again.item, run_options=kept).result().values[0]
        except TrainingError as error:
            raise error.failures[error.first_rank or 0] from None


def read_space(path: Path) -> dict[str, Any]:
    r"""Return the search space in a TOML file.

    Raises:
        InvalidValueError: It cannot be read, or one of its ranges is wrong; the message names it.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "space.toml"
        >>> _ = file.write_text("lr = {log_uniform = [1e-5, 0.1]}\nepochs = 27\n")
        >>> read_space(file)["epochs"]
        27
    """
    from raypool import search as spaces

    text = read_text(path, InvalidValueError)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        names = re.findall(r"^\s*([^\s#=]+)\s*=", text, re.MULTILINE)
        twice = [name for name in names if names.count(name) > 1]
        if twice and "overwrite" in str(error):  # tomllib does not say which
            raise InvalidValueError(f"{path} defines {twice[0]} twice. Keep one line.") from None
        raise InvalidValueError(f"{path} is not TOML: {error}.") from None
    made = {}
    for name, value in table.items():
        if not isinstance(value, dict):
            made[name] = value
            continue
        kinds = [kind for kind in value if isinstance(value[kind], list)]
        if len(kinds) != 1 or kinds[0] not in RANGES:
            unknown = next((key for key in value if key not in RANGES), "")
            raise InvalidValueError(
                f"{path}: {name} must be a plain value or a range, such as"
                f" {name} = {{uniform = [0, 1]}}.{did_you_mean(unknown, RANGES)}"
            )
        others = {key: each for key, each in value.items() if key != kinds[0]}
        try:
            made[name] = getattr(spaces, kinds[0])(*value[kinds[0]], **others)
        except (InvalidTypeError, InvalidValueError, TypeError, ValueError) as error:
            raise InvalidValueError(f"{path}: {name}: {error}") from None
    return made
