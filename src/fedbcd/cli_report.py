"""The commands that show what a run did: `fedbcd report`. Thin, like `cli`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(stderr=True)


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file (default: report.html in the first folder).")] = None,
    plan: Annotated[bool, typer.Option(help="Add the planner's round times for every B, from the runs' own arrivals.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object on the last line.")] = False,
) -> None:
    """Write one HTML page on one or several runs: curves, devices, the protocol's timeline, where the time went, what to try next."""
    from fedbcd.report.page import write_report

    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    with console.status("reading ..."):
        count = write_report(runs, target, plan=plan, on_notice=_notice)
    screen = console if as_json else Console()
    screen.print(f"{count} {'run' if count == 1 else 'runs'} in {target}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"report": str(target), "runs": count}))


def _notice(text: str) -> None:
    console.print(f"note: {text}", markup=False, emoji=False, highlight=False, soft_wrap=True)
