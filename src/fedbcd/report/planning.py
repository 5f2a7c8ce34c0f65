"""The planner on a run's own arrivals: how long a round would take for every B. Needs scipy, which takes a second to load."""

from typing import Any

import numpy as np

from fedbcd.errors import FedBCDError
from fedbcd.report.view import RunRecord

FEWEST = 10  # phases that ended; fewer say little


def plan_view(record: RunRecord) -> dict[str, Any] | None:
    """Expected round times for every B from the phases of this run; None where there are too few, or all take no time."""
    from fedbcd.planner.plan import make_plan
    from fedbcd.planner.server_time import Observed, RecordedTime

    story, servers = record.story, len(record.identity.get("servers", []))
    if story is None or servers < 2:
        return None
    ended, opened = np.asarray(story.phases.ended), np.asarray(story.phases.opened)
    counted = (ended >= 0) | (opened < story.now)
    observed = Observed((np.where(ended >= 0, ended, story.now) - opened)[counted], (ended >= 0)[counted])
    if int(observed.ended.sum()) < FEWEST:
        return None
    try:
        plan = make_plan({int(record.identity.get("active", 1)): RecordedTime(observed)}, servers)
    except FedBCDError:
        return None
    rows = plan.rows
    return {
        "servers": servers,
        "phases": int(observed.ended.sum()),
        "first": [row.first for row in rows],
        "round_time": [row.round_time for row in rows],
        "error": [row.error for row in rows],
        "fresh": [row.order_statistic for row in rows],
        "updates": [row.first / row.round_time for row in rows],
        "staleness": [row.staleness for row in rows],
        "staleness_high": [row.staleness_high for row in rows],
    }
