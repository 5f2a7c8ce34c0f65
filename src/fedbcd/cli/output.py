"""What all commands share: options of the same name, sentences and tables on the screen, and the
one object that `--json` asks for.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedbcd.own import names_code

console = Console(stderr=True)
INTERRUPTED = 130  # exit code after Ctrl-C

Json = Annotated[bool, typer.Option("--json", help="Print one summary object on the last line.")]
Data = Annotated[
    Path | None, typer.Option(help="Where the files of the data set are, e.g. for MNIST.")
]
Workers = Annotated[
    int | None,
    typer.Option(help="Processes at a time (default: what cores and memory allow)."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import code that the record of a run names (package:Name)."),
]


def screen_for(as_json: bool) -> Console:
    """Where results are shown: with --json, stdout is left to the object."""
    return console if as_json else Console()


def say(sentence: str, screen: Console = console) -> None:
    """Print a sentence to the letter: whatever it quotes is no markup."""
    screen.print(sentence, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say_how_to_go_on(command: str, folder: Path, jobs: Sequence[dict[str, Any]]) -> None:
    """Who began a run trusts the code that its record names."""
    trust = "--trust " if names_code(jobs) else ""
    say(f"stopped. Go on with: {command} --resume {trust}--out {shlex.quote(str(folder))}")


def note(text: str) -> None:
    say(f"note: {text}")


def print_json(as_json: bool, summary: Any) -> None:
    if as_json:
        print(json.dumps(summary))


def say_where(drawn: bool, screen: Console, sentence: str = "") -> None:
    """Say where results are, and why there is no picture among them."""
    if sentence:
        say(sentence, screen)
    if not drawn:
        say("no picture was drawn: pip install 'fedbcd[report]' brings matplotlib", screen)


@contextmanager
def counting(total: int) -> Iterator[Callable[[Any], None]]:
    """A bar of runs that are done, and of the time that the others will take."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("runs", total=total)
        yield lambda _: progress.advance(bar)


def table_of(*names: str, title: str | None = None, **column: Any) -> Table:
    """An empty table; `column` says how each of its columns looks."""
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in names:
        table.add_column(name, **column)
    return table
