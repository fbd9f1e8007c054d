"""The command line for the machine: `raypool doctor`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from raypool.cli_pipes import echo

if TYPE_CHECKING:
    from raypool.gpus.devices import Inventory

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "is_json", is_flag=True, help="As JSON: a list with check, state, fact and advice of each.")
@click.pass_obj
def doctor(inventory: Inventory | None, is_json: bool) -> None:
    """Check this machine for problems.

    Each check is ok, a warning (pools work, but not as well as they could) or a problem, with what to do about it. Nothing is
    started, and no CUDA context is made. Ends with 1 if there is a problem.
    """
    from raypool.doctor import examine

    findings = []
    for finding in examine(inventory):
        findings.append(finding)
        if not is_json:
            click.secho(f"{finding.state:8}", fg=COLORS[finding.state], nl=False)
            echo(f" {finding.check:14} {finding.fact}" + (f"\n{'':23} {finding.advice}" if finding.advice else ""))
    counts = Counter(finding.state for finding in findings)
    if is_json:
        echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        echo(f"problems: {counts['problem']}, warnings: {counts['warning']}, ok: {counts['ok']}")
    raise SystemExit(1 if counts["problem"] else 0)
