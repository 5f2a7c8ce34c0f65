"""Tables as notebooks show them."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is words, the others are numbers."""
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    sides = ("left", *("right" for _ in cells[1:]))
    return (
        "<tr>"
        + "".join(
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        + "</tr>"
    )
