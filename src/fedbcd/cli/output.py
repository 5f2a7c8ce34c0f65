"""What all commands share: options of the same name, sentences and tables on the screen, and the
one object that `--json` asks for. All that is printed goes through here, to the letter: nothing
that somebody has written (a title, a path, a section in brackets) is markup.
"""

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from fedbcd.own import names_code

console = Console(stderr=True)
INTERRUPTED = 130  # exit code after Ctrl-C
SHORTEST = 12  # columns of a title that is cut
VERBOSE: set[str] = set()  # holds a word once --verbose is given

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


def talk(quiet: bool, verbose: bool) -> None:
    """How much is said beside results: nothing but errors, what is usual, or all there is."""
    console.quiet = quiet
    VERBOSE.clear()
    VERBOSE.update({"verbose"} if verbose else ())


def screen_for(as_json: bool) -> Console:
    """Where results are shown: with --json, stdout is left to the object."""
    return console if as_json else Console()


def say(sentence: str, screen: Console | None = None, style: str = "", end: str = "\n") -> None:
    """Print a sentence; to stderr, if nothing else is said."""
    where = console if screen is None else screen
    how: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
    where.print(sentence, style=style or None, end=end, **how)


def waiting(sentence: str) -> AbstractContextManager[Status]:
    """Something that turns while there is nothing else to see."""
    return console.status(Text(sentence))


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


# ------------------------------------------------------------------------------------------------
# tables
class Grid(Table):
    """A table that loses nothing but the ends of titles: where it is too wide, words go on in the
    next line, titles are cut, and numbers stay whole; if need be, lines are longer than the screen.
    """

    titles: Collection[str] = ()
    words: Collection[str] = ()

    def add_row(self, *cells: Any, **how: Any) -> None:
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        for column, text in zip(self.columns, texts, strict=True):
            if str(column.header) not in (*self.titles, *self.words):
                column.min_width = max(column.min_width or 0, text.cell_len)
        super().add_row(*texts, **how)

    def fit(self, width: int) -> None:
        """Cut titles by what the table is too wide, and let columns move closer."""
        too_wide = self._natural_width() - width
        self.collapse_padding = too_wide > 0
        for column in self.columns if too_wide > 0 else ():
            if str(column.header) in self.titles:
                wide = max(text.cell_len for text in _texts(column))
                column.max_width = max(SHORTEST, wide - max(0, self._natural_width() - width))

    def _natural_width(self) -> int:
        wide = Console(width=10_000)
        return self.__rich_measure__(wide, wide.options).maximum


def _texts(column: Column) -> list[Text]:
    return [Text(str(column.header)), *(cell for cell in column.cells if isinstance(cell, Text))]


def table_of(
    *names: str,
    title: str | None = None,
    titles: Collection[str] = (),
    words: Collection[str] = (),
    plain: bool = False,
) -> Grid:
    """An empty table. Its columns hold numbers, which are aligned to the right, but those of
    `titles`, which may be cut, and of `words`, which may go on in the next line. `plain`: without
    lines.
    """
    table = Grid(
        title=None if title is None else Text(title),
        title_justify="left",
        header_style="bold",
        box=None if plain else box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(names),
    )
    table.titles, table.words = titles, words
    for name in names:
        text = name in titles or name in words
        table.add_column(
            Text(name),
            justify="left" if text else "right",
            no_wrap=name in titles,
            overflow="ellipsis" if name in titles else "fold",
        )
    return table


def show(table: Grid, screen: Console) -> None:
    """Print a table whole, whatever the width."""
    table.fit(screen.width)
    screen.print(table, crop=False, no_wrap=False, overflow="ignore", markup=False, highlight=False)
