"""What a deployment cost beyond what its clock model asks for: seconds per phase and per mix, from
its own log.

Without drawn delays there is no model to compare with; then only durations are reported.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbcd.algorithm.method import Method
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.timeouts import quantile
from fedbcd.record.timeline import NEVER, Timeline, read_timeline
from fedbcd.schedule.times import Times


def account(
    log: Path, times: Times, options: Deploy, method: Method | None = None
) -> dict[str, Any]:
    """`method` says how many steps were drawn as one, as a pass over a device's data."""
    timeline, _ = read_timeline(log)
    phases, visits, mixes = timeline.phases, timeline.visits, timeline.mixes
    done = [k for k, reported in enumerate(phases.reported) if reported]
    found: dict[str, Any] = {
        "activations": sum(time != NEVER for time in visits.uploaded),
        "round_s": _mean(np.diff([0.0, *mixes.time]).tolist()),
        "answer_s": _mean(_answers(timeline)),
        "phase_s": _mean([phases.ended[k] - phases.opened[k] for k in done]),
    }
    if options.time_scale is not None:
        found |= _beyond_draws(timeline, done, times, options.time_scale, method)
        found["round_overhead_s"] = round(
            found["round_overhead_s"] + found["answer_s"], 6
        )  # of the server that a mix waited for, and the mix
    return found


def _answers(timeline: Timeline) -> list[float]:
    """From the report that completed a mix to the next phase of a server, for every phase but the
    first of each server.
    """
    phases, last = timeline.phases, timeline.mixes.last_phase
    return [
        opened - (phases.ended[last[mixes - 1]] if mixes else 0.0)
        for number, opened, mixes in zip(phases.number, phases.opened, phases.mixes, strict=True)
        if number > 0
    ]


def _beyond_draws(
    timeline: Timeline, done: Sequence[int], times: Times, scale: float, method: Method | None
) -> dict[str, Any]:
    """What phases took beyond the drawn arrivals and work of the devices that they waited for, but
    for phases that let in a device on a request from an earlier one, ahead of its drawn arrival.
    """
    phases, visits = timeline.phases, timeline.visits
    due: dict[int, float] = defaultdict(float)
    ahead: set[int] = set()
    for k, (phase, device) in enumerate(zip(visits.phase, visits.device, strict=True)):
        if visits.asked[k] < phases.opened[phase]:
            ahead.add(phase)
        if visits.counted[k] == phase:
            opened, number = phases.opened[phase] / scale, np.array([phases.number[phase]])
            asks = float(times.arrivals(np.array([device]), number, opened)[0])
            if times.clock.dropout:  # it may have taken the place of one that was lost
                asks = max(asks, visits.admitted[k] / scale - opened)
            length, begins = max(visits.steps[k], 0), opened + asks
            if method is not None:
                length //= method.pass_of(device, offline=False)
            work = times.work_one(device, visits.activation[k], length, begins)
            due[phase] = max(due[phase], asks + work)
    beyond, last = (
        [phases.ended[k] - phases.opened[k] - scale * due[k] for k in chosen if k not in ahead]
        for chosen in (done, timeline.mixes.last_phase)
    )
    return {
        "phases_ahead_of_draws": len(ahead.intersection(done)),
        "phase_overhead_s": _mean(beyond),
        "phase_overhead_s_p95": _high(beyond),
        "round_overhead_s": _mean(last),
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6) if values else 0.0


def _high(values: list[float]) -> float:
    return round(quantile(values, 0.95), 6) if values else 0.0
