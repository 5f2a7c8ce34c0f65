"""Curves of accuracy. Needs matplotlib, which the extra `report` brings; without it there is no
picture, and a sentence says so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbcd.data.preview import COLOURS, drawn, new_figure, tidy
from fedbcd.engines.result import Run
from fedbcd.record.history import History


@drawn
def draw_curves(histories: Mapping[str, History], path: Path) -> None:
    """Personal and global accuracy against the clock, one line per run."""
    figure, (left, right) = new_figure((10, 4), 2, sharey=True)
    for axes, column, title in (
        (left, "personal_accuracy", "Personal models, each on its own labels"),
        (right, "global_accuracy", "Global model, on all labels"),
    ):
        _panel(axes, histories, column, title)
    left.set_ylabel("test accuracy")
    right.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


@drawn
def draw_personal(scores: Mapping[str, Sequence[float]], path: Path) -> None:
    """How personal accuracy is spread over the devices: a histogram per run."""
    figure, axes = new_figure((6, 3.6))
    for colour, (name, values) in zip(COLOURS * len(scores), scores.items(), strict=False):
        axes.hist(values, bins=[k / 40 for k in range(41)], label=name, color=colour, alpha=0.6)
    axes.set(xlabel="test accuracy on the device's own labels", ylabel="devices")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def draw_run(name: str, run: Run, folder: Path) -> None:
    draw_curves({name: run.history}, folder / "curves.png")
    draw_personal({name: list(run.personal_scores.values())}, folder / "personal.png")


def _panel(axes: Any, histories: Mapping[str, History], column: str, title: str) -> None:
    for colour, (name, history) in zip(COLOURS * len(histories), histories.items(), strict=False):
        axes.plot(
            history.column("clock"), history.column(column), label=name, color=colour, linewidth=2
        )
    axes.set_title(title, fontsize=11)
    axes.set(xlabel="clock", ylim=(0, 1))
    tidy(axes)
