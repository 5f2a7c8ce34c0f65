"""Curves of scores. Needs matplotlib, which the extra `report` brings; without it there is no
picture, and a sentence says so.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbcd.data.preview import COLOURS, drawn, new_figure, tidy
from fedbcd.engines.result import Run
from fedbcd.record.history import History, Scored, in_words


@drawn
def draw_curves(histories: Mapping[str, History], path: Path) -> None:
    """By the first measure, personal and global models against the clock, one line per run."""
    figure, (left, right) = new_figure((10, 4), 2, sharey=True)
    measure = next(iter(histories.values())).first_measure
    parts: list[tuple[Any, Scored, str]] = [
        (left, "personal", "Personal models, each on its own test samples"),
        (right, "global", "Global model, on the common ones"),
    ]
    for axes, scored, title in parts:
        _panel(axes, histories, (scored, measure), title)
    left.set_ylabel(f"test {in_words(measure)}")
    right.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


@drawn
def draw_personal(scores: Mapping[str, Sequence[float]], measure: str, path: Path) -> None:
    """How a score is spread over the devices: a histogram per run."""
    figure, axes = new_figure((6, 3.6))
    finite = [v for values in scores.values() for v in values if math.isfinite(v)]
    low, high = min([0.0, *finite]), max([1.0, *finite])
    bins = [low + (high - low) * k / 40 for k in range(41)]
    for colour, (name, values) in zip(COLOURS * len(scores), scores.items(), strict=False):
        axes.hist(values, bins=bins, label=name, color=colour, alpha=0.6)
    axes.set(xlabel=f"test {in_words(measure)} on the device's own samples", ylabel="devices")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def draw_run(name: str, run: Run, folder: Path) -> None:
    draw_curves({name: run.history}, folder / "curves.png")
    scores = {name: list(run.personal_scores.values())}
    draw_personal(scores, run.history.first_measure, folder / "personal.png")


def _panel(axes: Any, histories: Mapping[str, History], of: tuple[Scored, str], title: str) -> None:
    within = True
    for colour, (name, history) in zip(COLOURS * len(histories), histories.items(), strict=False):
        scores = history.scores(*of)
        within &= all(0 <= score <= 1 for score in scores if math.isfinite(score))
        axes.plot(history.column("clock"), scores, label=name, color=colour, linewidth=2)
    axes.set_title(title, fontsize=11)
    axes.set(xlabel="clock", **({"ylim": (0, 1)} if within else {}))
    tidy(axes)
