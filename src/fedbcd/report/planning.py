"""The planner on a run's own arrivals: how long a round would take for every B. Needs scipy, which
takes a second to load.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbcd.errors import FedBCDError
from fedbcd.report.view import RunRecord

FEWEST = 10  # phases that ended; fewer say little
MOST_PHASES = 5_000  # the latest; more make a plan slower and hardly better
MOST_FIRSTS = 20  # values of B in a plan; with more servers, this number evenly spread
AGAIN_S = 20.0  # between two plans of a run that goes on


@dataclass(frozen=True)
class PhaseTimes:
    """How long the phases of a run took, or had taken when the log stopped, and who there is."""

    times: npt.NDArray[np.float64]
    ended: npt.NDArray[np.bool_]
    servers: int


def arrivals_of(record: RunRecord) -> PhaseTimes | None:
    """The phases of a run as the planner wants them; None where there are too few."""
    timeline, servers = record.timeline, len(record.identity.get("servers", []))
    if timeline is None or servers < 2:
        return None
    opened, ended = (
        np.array(column[-MOST_PHASES:])
        for column in (timeline.phases.opened, timeline.phases.ended)
    )
    counted = (ended >= 0) | (opened < timeline.now)
    times = (np.where(ended >= 0, ended, timeline.now) - opened)[counted]
    done = (ended >= 0)[counted]
    return PhaseTimes(times, done, servers) if int(done.sum()) >= FEWEST else None


def plan_view(arrivals: PhaseTimes | None) -> dict[str, Any] | None:
    """Expected round times for every B; None without arrivals, or where all take no time."""
    from fedbcd.planner.plan import make_plan
    from fedbcd.planner.server_time import Observed, RecordedTime

    if arrivals is None:
        return None
    servers = arrivals.servers
    firsts = sorted({round(1 + k * (servers - 1) / (MOST_FIRSTS - 1)) for k in range(MOST_FIRSTS)})
    try:
        plan = make_plan(
            {1: RecordedTime(Observed(arrivals.times, arrivals.ended))},
            servers,
            firsts=firsts,
        )
    except FedBCDError:
        return None
    rows = plan.rows
    return {
        "servers": servers,
        "phases": int(arrivals.ended.sum()),
        "first": [row.first for row in rows],
        "round_time": [row.round_time for row in rows],
        "error": [row.error for row in rows],
        "fresh": [row.order_statistic for row in rows],
        "updates": [row.first / row.round_time for row in rows],
        "staleness": [row.staleness for row in rows],
        "staleness_high": [row.staleness_high for row in rows],
    }


class Planned:
    """The plan of a run that goes on: made anew now and then, one at a time; those who ask
    meanwhile get the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = -AGAIN_S
        self._phases = -1
        self._plan: dict[str, Any] | None = None

    def plan(self, arrivals: PhaseTimes | None) -> dict[str, Any] | None:
        phases = 0 if arrivals is None else len(arrivals.times)
        due = phases != self._phases and time.monotonic() - self._made >= AGAIN_S
        if due and self._lock.acquire(blocking=False):
            try:
                self._plan = plan_view(arrivals)
                self._phases, self._made = phases, time.monotonic()
            finally:
                self._lock.release()
        return self._plan
