"""Pictures of plans. They need matplotlib, which the extra `report` brings; without it there is no
picture, and a sentence says so.
"""

from pathlib import Path
from typing import Any

from fedbcd.data.preview import COLOURS, drawn, new_figure, tidy
from fedbcd.planner.pilots import Recommendation
from fedbcd.planner.plan import Plan


@drawn
def draw_plan(plan: Plan, recommendation: Recommendation | None, path: Path) -> None:
    """Round time and staleness against B and, with pilots, their scores against the clock."""
    panels = 2 if recommendation is None else 3
    figure, axes = new_figure((4.6 * panels, 3.8), panels)
    _round_times(axes[0], plan)
    _staleness(axes[1], plan)
    if recommendation is not None:
        _pilots(axes[2], recommendation)
    for each in axes:
        tidy(each)
    figure.savefig(path, dpi=130)


def _round_times(axes: Any, plan: Plan) -> None:
    actives = sorted({row.active for row in plan.rows})
    for colour, active in zip(COLOURS[1:] * len(actives), actives, strict=False):
        rows = [row for row in plan.rows if row.active == active]
        first, label = [row.first for row in rows], f"q = {active}"
        axes.errorbar(
            first,
            [r.round_time for r in rows],
            [r.error or 0.0 for r in rows],
            color=colour,
            label=f"{label}, a round",
            linewidth=2,
        )
        axes.plot(
            first,
            [r.order_statistic for r in rows],
            "--",
            color=colour,
            label=f"{label}, E[tau_(B)] of fresh servers",
            linewidth=1,
        )
    axes.set(
        title=f"{plan.cloud} cloud, {plan.servers} servers",
        xlabel="B, servers waited for",
        ylabel="clock time of a round",
        ylim=(0, None),
    )
    axes.legend(frameon=False, fontsize=8)


def _staleness(axes: Any, plan: Plan) -> None:
    rows = [
        row for row in plan.rows if row.active == plan.rows[0].active and row.first < plan.servers
    ]
    first = [row.first for row in rows]
    axes.plot(first, [row.staleness for row in rows], color=COLOURS[1], linewidth=2, label="mean")
    axes.plot(
        first,
        [row.staleness_high for row in rows],
        "--",
        color=COLOURS[1],
        linewidth=1,
        label="95 in 100 at most",
    )
    axes.set(
        title="servers left out of a mix",
        xlabel="B, servers waited for",
        ylabel="rounds since their last mix",
        ylim=(0, None),
    )
    axes.legend(frameon=False, fontsize=8)


def _pilots(axes: Any, recommendation: Recommendation) -> None:
    by_first = sorted(recommendation.pilots, key=lambda pilot: pilot.first)
    for colour, pilot in zip(COLOURS * len(by_first), by_first, strict=False):
        clock = recommendation.stops[: len(pilot.scores)]
        means = [sum(scores) / len(scores) for scores in pilot.scores]
        ends = [
            [m - min(s) for m, s in zip(means, pilot.scores, strict=True)],
            [max(s) - m for m, s in zip(means, pilot.scores, strict=True)],
        ]
        label = f"B = {pilot.first}" + (" (best)" if pilot.first == recommendation.first else "")
        axes.errorbar(
            clock,
            means,
            ends,
            fmt="o-",
            color=colour,
            label=label,
            linewidth=2,
            markersize=4,
            capsize=3,
        )
    axes.set(
        title="pilot runs, bars over seeds",
        xlabel="clock",
        ylabel=recommendation.by.replace("_", " "),
    )
    axes.legend(frameon=False, fontsize=8)
