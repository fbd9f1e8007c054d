"""The command line for the machine: `raypool doctor`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from raypool.cli_pipes import echo

if TYPE_CHECKING:
    from raypool.doctor import Finding
    from raypool.gpus.devices import Inventory

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "is_json", is_flag=True, help="As JSON: a list with check, state, fact and advice of each.")
@click.pass_obj
def doctor(inventory: Inventory | None, is_json: bool) -> None:
    """Look for what keeps pools from running well on this machine.

    Each check is ok, a warning (pools work, but not as well as they could) or a problem, with what to do about it. Nothing is
    started, and no CUDA context is made. Ends with 1 if there is a problem.
    """
    from raypool.checkup import examine

    findings = []
    for finding in examine(inventory):
        findings.append(finding)
        if not is_json:
            _say(finding)
    counts = Counter(finding.state for finding in findings)
    if is_json:
        _print_json(findings)
    else:
        echo(f"problems: {counts['problem']}, warnings: {counts['warning']}, ok: {counts['ok']}")
    raise SystemExit(1 if counts["problem"] else 0)


def _say(finding: Finding) -> None:
    click.secho(f"{finding.state:8}", fg=COLORS[finding.state], nl=False)
    echo(f" {finding.check:14} {finding.fact}")
    if finding.advice is not None:
        echo(f"{'':23} {finding.advice}")


def _print_json(findings: list[Finding]) -> None:
    import json

    echo(json.dumps([finding._asdict() for finding in findings], indent=2))
