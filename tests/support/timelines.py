"""A log read a second time, slowly and apart from the fold under test: each fact by its own search
over all lines.
"""

from pathlib import Path

from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Activated,
    MixModels,
    OpenPhase,
    Send,
    ServerReady,
    StepGlobal,
    Trained,
    UpdateRequested,
    device_actor,
    number_of,
)
from fedbcd.record.eventlog import LogReader, Transition
from fedbcd.record.timeline import MISSING, NEVER, Timeline, read_timeline


def check_timeline(log: Path) -> Timeline:
    """Every phase, every counted visit and every mix of a log is in its timeline, and no more."""
    steps = list(LogReader(log, unfinished=True))
    timeline, _ = read_timeline(log, unfinished=True)
    raw = Timeline()
    for line in log.read_bytes().splitlines()[1 : len(steps) + 1]:
        raw.take(line)
    assert (raw.phases, raw.visits, raw.mixes) == (
        timeline.phases,
        timeline.visits,
        timeline.mixes,
    )
    assert (raw.servers, raw.devices, raw.events) == (
        timeline.servers,
        timeline.devices,
        timeline.events,
    )
    places = _check_phases(steps, timeline)
    _check_visits(steps, timeline, places)
    _check_mixes(steps, timeline)
    return timeline


def _check_phases(steps: list[Transition], timeline: Timeline) -> dict[tuple[int, int], int]:
    """The place of each phase in the columns, by server and number."""
    opened = [
        (number_of(step.actor), command.phase, k)
        for k, step in enumerate(steps)
        for command in step.commands
        if isinstance(command, OpenPhase)
    ]
    phases = timeline.phases
    assert [(server, number) for server, number, _ in opened] == list(
        zip(phases.server, phases.number, strict=True)
    )
    for place, (server, number, k) in enumerate(opened):
        after = [later for n, _, later in opened if n == server and later > k]
        reports = [
            step.time
            for step in steps
            for c in step.commands
            if isinstance(c, Send) and isinstance(c.message, ServerReady)
            if (c.message.server, c.message.phase, c.message.iteration) == (server, number, 0)
        ]
        released = steps[after[0]].time if after else NEVER
        assert phases.opened[place] == steps[k].time
        assert phases.released[place] == released
        assert phases.ended[place] == (reports[0] if reports else released)
        assert phases.reported[place] == bool(reports)
    return {(server, number): place for place, (server, number, _) in enumerate(opened)}


def _check_visits(
    steps: list[Transition], timeline: Timeline, places: dict[tuple[int, int], int]
) -> None:
    visits = timeline.visits
    present: dict[str, int] = {}  # server -> its phase
    found = {
        (visits.device[v], visits.activation[v]): v
        for v in range(len(visits))
        if visits.counted[v] != MISSING
    }
    counted = 0
    for k, step in enumerate(steps):
        for command in step.commands:
            if isinstance(command, OpenPhase):
                present[step.actor] = command.phase
            if isinstance(command, Absorb):
                counted += 1
                v = found[command.device, command.activation]
                phase = places[number_of(step.actor), present[step.actor]]
                assert visits.counted[v] == phase
                _check_visit(steps[: k + 1], command, timeline, v)
    assert counted == len(found)


def _check_visit(before: list[Transition], absorb: Absorb, timeline: Timeline, v: int) -> None:
    """What the lines until its upload counted say of one visit."""
    visits, device = timeline.visits, absorb.device
    admitted = [
        step.time
        for step in before
        for c in step.commands
        if isinstance(c, Send) and c.to == device_actor(device)
        if isinstance(c.message, Activated) and c.message.activation == absorb.activation
    ]
    asked = [
        step.time
        for step in before
        if isinstance(step.event, UpdateRequested)
        and (step.event.device, step.event.activation) == (device, absorb.activation)
    ]
    trained = [
        step.event.steps
        for step in before
        if isinstance(step.event, Trained) and step.actor == device_actor(device)
        if step.event.activation == absorb.activation
    ]
    assert visits.admitted[v] in admitted
    assert visits.asked[v] in asked
    assert visits.asked[v] <= visits.admitted[v] <= visits.uploaded[v] <= before[-1].time
    assert visits.steps[v] in {*trained, MISSING}
    if len(asked) == len(admitted) == 1:
        assert [visits.steps[v]] == trained[-1:]


def _check_mixes(steps: list[Transition], timeline: Timeline) -> None:
    mixes = timeline.mixes
    everyone = sorted(set(timeline.phases.server))
    expected = [
        (step.time, list(c.servers) if isinstance(c, MixModels) else everyone)
        for step in steps
        if step.actor == COORDINATOR
        for c in step.commands
        if isinstance(c, StepGlobal) or (isinstance(c, MixModels) and c.iteration == 0)
    ]
    assert expected == [(time, mixes.members(k)) for k, time in enumerate(mixes.time)]
