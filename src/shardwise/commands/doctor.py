"""`shardwise doctor`: show what was found on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer


def command(
    ping: Annotated[bool, typer.Option(help="Start two ranks and let them talk.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print versions, backend, cores, memory, MPI library and a ping between two ranks."""
    from rich.console import Console
    from rich.table import Table

    from shardwise.runtime.doctor import examine, usable

    findings = examine(ping)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table(show_header=False, box=None)
        for finding in findings:
            table.add_row("" if finding.ok else "[red]![/red]", finding.name, finding.value)
        Console(soft_wrap=True).print(table)
    sys.exit(0 if usable(findings) else 1)
