"""From runs to figures: a table (CSV), a picture (PNG and SVG) with the spread over seeds as a
band, and the claims judged (JSON).
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedbcd.data.preview import drawn, new_figure
from fedbcd.experiments.claims import ClaimVerdict
from fedbcd.experiments.paper import Panel
from fedbcd.experiments.pictures import COLOURS, tidy
from fedbcd.experiments.pool import Result
from fedbcd.record.history import PERSONAL, History, in_words


def by_run(results: Sequence[Result]) -> dict[str, list[History]]:
    runs: dict[str, list[History]] = {}
    for result in results:
        runs.setdefault(result.job.title, []).append(result.history)
    return runs


def write_table(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [*dict.fromkeys(name for each in results for name in each.history.columns)]
        writer.writerow(("run", "seed", *columns))
        for result in results:
            of_run = (result.job.title, result.job.spec.seed)
            writer.writerows(
                (*of_run, *(row.get(name, math.nan) for name in columns)) for row in result.history
            )


def write_claims(verdicts: Sequence[ClaimVerdict], path: Path) -> None:
    path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")


@drawn
def draw_panel(panel: Panel, runs: Mapping[str, Sequence[History]], path: Path) -> None:
    """As PNG and SVG: a line per run, the mean over seeds, and their deviation as a band."""
    from matplotlib import rc_context

    count = len(panel.columns)
    figure, axes = new_figure((5.2 * count, 3.9), count, squeeze=False)
    measures = ", ".join(sorted({job.spec.chosen_measure for job in panel.jobs}))
    for place, column in zip(axes[0], panel.columns, strict=True):
        _draw_column(place, panel.axis, column, runs)
        place.set_ylabel(
            f"test: {in_words(column)}" + (f" ({measures})" if column == PERSONAL else "")
        )
    seeds = len(next(iter(runs.values())))
    figure.suptitle(
        f"{panel.title} (mean and spread of {seeds} seed{'s' if seeds > 1 else ''})", fontsize=11
    )
    axes[0][-1].legend(loc="lower right", frameon=False, fontsize=9)
    with rc_context({"svg.hashsalt": panel.name}):  # the same runs give the same bytes
        figure.savefig(path.with_suffix(".png"), dpi=130)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


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
