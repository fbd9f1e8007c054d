"""`raypool sweep --array`: a job array of Slurm, each task of which runs a few items.

The login node begins a run and writes a plan: the items of each task. Each task has its own
journal, a part of the run (`engine.durable.RunPart`). Readers add the parts; the next run takes
them over, and removes them with the plan. So a task of an older array, which may still be in the
queue, finds no plan of its run and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.channel.records import Function, function_name
from raypool.cli.output import echo
from raypool.cluster.slurm import FILE, job_file, named, new_folder, num_left, size_of, submit
from raypool.core.model import Slice
from raypool.engine.durable import RunPart
from raypool.engine.loop import LoopOptions
from raypool.errors import CloudError, InvalidValueError
from raypool.journal.files import make_folder
from raypool.journal.rows import PARTS
from raypool.parallel_for import new_loop
from raypool.profile_files import resolve_profile
from raypool.worker.folders import write_file

if TYPE_CHECKING:
    from raypool.cli.inputs import Config

PLAN = f"{PARTS}/plan.json"
"""The file in a run's folder with the number of the run, the items of each task, and the job."""


def submit_array(
    function: Callable[[Any], Any],
    items: list[Config],
    target: str,
    configs: Path,
    options: dict[str, Any],
) -> bool:
    """Submit an array for the items that must run; return whether there are any.

    Raises:
        InvalidValueError: The profile is not of Slurm, or there is a URL to notify.
        JournalError: The folder cannot be used.
        CloudError: Slurm refuses the array, or an earlier one has not ended.
    """
    profile = resolve_profile(options["profile"], {})
    if profile.slurm is None:
        raise InvalidValueError(
            '--array submits a job array to Slurm. Use a profile with kind = "slurm".'
        )
    if options["notify"] is not None:
        raise InvalidValueError(
            "--notify does not go with --array, which returns before the items run. Slurm can send"
            ' mail: sbatch = ["--mail-type=END"] in the profile.'
        )
    if options["watch"]:
        raise InvalidValueError(
            "--watch does not go with --array, which returns before the items run. Use `raypool"
            " watch` on their run directory."
        )
    run_dir = Path(options["run_dir"]).absolute()
    _refuse_second_array(run_dir)
    name, workers = function_name(function), options["workers"]
    how = LoopOptions(name, seed=options["seed"])
    loop = new_loop(function, Function(-1, None, name), how, run_dir, options["rerun"])
    with contextlib.closing(loop):
        numbers = loop.numbers(Slice(-1, 0, loop.take(items), 1))
    if not numbers:
        return False
    per_task = options["array"]
    tasks = [[*numbers[first : first + per_task]] for first in range(0, len(numbers), per_task)]
    make_folder(run_dir / PARTS)
    copy = run_dir / PARTS / f"configs{configs.suffix}"  # the user may edit the original meanwhile
    shutil.copyfile(configs, copy)
    plan = {"run": loop.run, "tasks": tasks}
    write_file(run_dir / PLAN, json.dumps(plan).encode())  # first: a task may start at once
    folder = new_folder(profile.slurm, f"array_{uuid.uuid4().hex[:16]}")
    size = size_of(profile, workers, workers)
    file = folder / FILE
    command = _task_command(target, copy, run_dir, loop.run, options)
    text = job_file(profile.slurm, size, command, name=name, requeue=True)
    write_file(file, text.encode())
    try:
        job = submit(file, f"--array=0-{len(tasks) - 1}", f"--output={folder}/%a.log")
    except BaseException:  # if Slurm took it all the same, its tasks find no plan, and end
        shutil.rmtree(run_dir / PARTS)
        raise
    write_file(run_dir / PLAN, json.dumps({**plan, "job": job}).encode())
    echo(
        f"Submitted Slurm job {job} for {len(numbers)} of {len(items)} items, {per_task} per task."
        f" {shlex.join(['raypool', 'show', options['run_dir']])} shows their results, {folder} has"
        " their output. When the job has ended, the same command submits missing and failed items.",
        err=True,
    )
    return True


def _refuse_second_array(run_dir: Path) -> None:
    """Make sure that no tasks of an earlier array are left."""
    with contextlib.suppress(FileNotFoundError, KeyError):  # no array, or it was interrupted
        job = json.loads((run_dir / PLAN).read_text())["job"]
        if count := num_left(job):
            raise CloudError(
                f"Slurm job {job} has not ended: {count} of its tasks for {run_dir} are queued or"
                f" running. Wait for them, or stop them with scancel {shlex.join(named(job))}."
            )


def _task_command(
    target: str, configs: Path, run_dir: Path, run: int, options: dict[str, Any]
) -> list[str]:
    """Return the command that each task of the array executes."""
    command = ["python", "-m", "raypool", "sweep", target, str(configs), f"--run-dir={run_dir}"]
    command += [f"--part-of={run}"]
    return command + [
        f"--{option}={options[option]}"
        for option in ("profile", "workers", "seed")
        if options[option] is not None
    ]


def part_of(run_dir: Path, run: int) -> RunPart:
    """Return the part of a run that this task of an array is to run.

    Raises:
        CloudError: There was another run since.
    """
    with contextlib.suppress(FileNotFoundError):  # the next run has removed it
        plan = json.loads((run_dir / PLAN).read_text())
        if plan["run"] == run:
            task = os.environ["SLURM_ARRAY_TASK_ID"]
            return RunPart(run_dir, task, run, plan["tasks"][int(task)])
    raise CloudError(f"Another run has used {run_dir} since this job was submitted.")
