"""From runs to figures: a table (CSV), a picture (PNG and SVG) with the spread over seeds as a
band, and the claims judged (JSON).
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbcd.data.preview import COLOURS, drawn, figure_of, save_figure, tidy
from fedbcd.experiments.claims import ClaimVerdict
from fedbcd.experiments.paper import Panel
from fedbcd.experiments.pool import Result
from fedbcd.record.history import PERSONAL, History, in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def by_run(results: Sequence[Result]) -> dict[str, list[History]]:
    runs: dict[str, list[History]] = {}
    for result in results:
        runs.setdefault(result.name, []).append(result.history)
    return runs


def write_table(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [*dict.fromkeys(name for each in results for name in each.history.columns)]
        writer.writerow(("run", "seed", *columns))
        for result in results:
            of_run = (result.name, result.spec.seed)
            writer.writerows(
                (*of_run, *(row.get(name, math.nan) for name in columns)) for row in result.history
            )


def write_claims(verdicts: Sequence[ClaimVerdict], path: Path) -> None:
    path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")


@drawn
def draw_panel(panel: Panel, runs: Mapping[str, Sequence[History]], path: Path) -> None:
    """As PNG and SVG: a line per run, the mean over seeds, and their deviation as a band."""
    from matplotlib import rc_context

    figure, axes = _bands(runs, panel.columns, panel.axis)
    measures = ", ".join(sorted({job.spec.chosen_measure for job in panel.jobs}))
    for place, column in zip(axes, panel.columns, strict=True):
        label = f"test: {in_words(column)}"
        place.set_ylabel(label + (f" ({measures})" if column == PERSONAL else ""))
    figure.suptitle(f"{panel.title} ({_seeds(runs)})", fontsize=11)
    with rc_context({"svg.hashsalt": panel.name}):  # the same runs give the same bytes
        figure.savefig(path.with_suffix(".png"), dpi=130)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def draw_bands(
    runs: Mapping[str, Sequence[History]],
    columns: Sequence[str],
    axis: str,
    path: str | Path | None = None,
) -> "Figure":
    """The same of any runs, as a figure, also written where a path is given."""
    figure, axes = _bands(runs, columns, axis)
    for place, column in zip(axes, columns, strict=True):
        place.set_ylabel(in_words(column))
    figure.suptitle(_seeds(runs), fontsize=11)
    if path is not None:
        save_figure(figure, path)
    return figure


def _seeds(runs: Mapping[str, Sequence[History]]) -> str:
    seeds = len(next(iter(runs.values())))
    return f"mean and spread of {seeds} seed{'s' if seeds > 1 else ''}"


def _bands(
    runs: Mapping[str, Sequence[History]], columns: Sequence[str], axis: str
) -> tuple["Figure", Any]:
    """A panel for each column."""
    figure, axes = figure_of((5.2 * len(columns), 3.9), len(columns), squeeze=False)
    for place, column in zip(axes[0], columns, strict=True):
        _draw_column(place, axis, column, runs)
    axes[0][-1].legend(loc="lower right", frameon=False, fontsize=9)
    return figure, axes[0]


def _draw_column(axes: Any, axis: str, column: str, runs: Mapping[str, Sequence[History]]) -> None:
    for number, (title, histories) in enumerate(runs.items()):
        again, place = divmod(number, len(COLOURS))
        colour, line = COLOURS[place], ("-", "--")[again % 2]
        grid, curves = on_one_grid(histories, axis, column)
        mean, spread = curves.mean(0), curves.std(0)
        axes.plot(grid, mean, line, label=title, color=colour, linewidth=1.8)
        axes.fill_between(grid, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(in_words(axis))
    tidy(axes)


def on_one_grid(histories: Sequence[History], axis: str, column: str) -> tuple[Any, Any]:
    """Curves of several seeds at common points of the axis, by straight lines between looks:
    (points,), (seeds, points).
    """
    end = min(h.column(axis)[-1] for h in histories)
    grid = np.linspace(0.0, end, max(len(h) for h in histories))
    return grid, np.array([np.interp(grid, h.column(axis), h.column(column)) for h in histories])
