"""Drawn delays of a deployment are the simulation's own, and a log says what a deployment cost
beyond them.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedbcd.engines.deploy.local.account import account
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.pace import Drawn, Real
from fedbcd.experiments.job import Job, parse
from fedbcd.protocol.messages import (
    Activated,
    Failed,
    OfflineDue,
    OfflineTrained,
    OpenPhase,
    Train,
    Trained,
    Woke,
    number_of,
)
from fedbcd.record.eventlog import LogReader, Transition
from fedbcd.schedule.availability import AvailableDevices
from fedbcd.schedule.times import Times
from support.processes import job

SCALE = 0.25
FREE = {"name": "fedbcd-i", "steps": [1, 2], "offline_time": "free"}


def _simulated(folder: Path, **changes: Any) -> tuple[Job, list[Transition]]:
    (one,) = parse(
        job(federation={"servers": 2, "devices": 4, "active": 2}, run={"rounds": 4}, **changes)
    )
    one.run(folder, on_notice=lambda _: None)
    return one, list(LogReader(folder / "events.jsonl"))


def _pool(one: Job, active: int) -> AvailableDevices:
    return AvailableDevices(one.method, active, one.spec.seed, one.spec.availability)


def _pace(one: Job, device: int) -> Drawn:
    each = one.federation.devices
    members = range(device // each * each, (device // each + 1) * each)
    return Drawn(device, members, _pool(one, one.active), _times(one), SCALE)


def _times(one: Job) -> Times:
    return one.spec.times(one.make_federation())


UNEQUAL = {
    "classes": [{"servers": [1], "step": 5.0}, {"share": 0.5, "arrival": 2.0}],
    "day": {"period": 9.0, "night": 4.0},
    "bandwidth": {"up": 1e4},
    "dropout": 0.3,
}


@pytest.mark.parametrize(
    ("clock", "length"),
    [({}, {"steps": [1, 2]}), (UNEQUAL, {"steps": [1, 2]}), ({}, {"epochs": [1, 2]})],
    ids=["alike", "unequal", "epochs"],
)
def test_arrivals_and_work_are_those_of_the_simulation(
    tmp_path: Path, clock: Any, length: dict[str, Any]
) -> None:
    algorithm = {"name": "fedbcd", "batch": 4, **length}
    one, steps = _simulated(tmp_path / "run", clock=clock, algorithm=algorithm)
    opened: dict[int, tuple[float, int]] = {}  # server -> when, and which phase
    let_in: dict[int, tuple[float, Any]] = {}
    freed_at = {0: 0.0, 1: 0.0}  # server -> when it last lost a device
    compared, lost = 0, 0
    for step in steps:
        for command in step.commands:
            if isinstance(command, OpenPhase):
                opened[number_of(step.actor)] = (step.time, command.phase)
        if not step.actor.startswith("device/"):
            continue
        device = number_of(step.actor)
        began, phase = opened[device // 4]
        match step.event:
            case Woke():
                asks = _pace(one, device).arrival(phase, 0, SCALE * began)
                freed = SCALE * (freed_at[device // 4] - began)  # in a place that became free
                assert max(asks or 0.0, freed) == pytest.approx(SCALE * (step.time - began))
            case Activated():
                let_in[device] = step.time, step.commands[0]
            case Trained():
                since, work = let_in[device]
                took = _pace(one, device).work(work, SCALE * since)
                assert took == pytest.approx(SCALE * (step.time - since))
                compared += 1
            case Failed():
                number = step.commands[0].message.activation  # type: ignore[attr-defined]
                assert _pace(one, device).lost_after(number) is not None
                lost, freed_at[device // 4] = lost + 1, step.time
    assert (lost > 0) == bool(clock)
    assert compared >= 16


def test_offline_rounds_fall_to_the_same_devices(tmp_path: Path) -> None:
    one, steps = _simulated(tmp_path / "run", algorithm={**FREE, "available": 3})
    first = {
        number_of(step.actor)
        for step in steps
        if isinstance(step.event, OfflineDue) and step.time == 0.0
    }
    assert first == {device for device in range(8) if _pace(one, device).trains_offline(0)}
    assert all(
        (_pace(one, device).arrival(0, 0, 0.0) is None) == (device not in first)
        for device in range(8)
    )


def test_a_device_that_joins_late_is_available_now_and_then() -> None:
    (one,) = parse(job(algorithm={**FREE, "available": 2}))
    late = Drawn(3, range(3), _pool(one, 1), Times(one.spec.clock, one.spec.seed, []), SCALE)
    available = [late.trains_offline(round_) for round_ in range(100)]
    assert 30 <= sum(available) <= 70
    assert [late.arrival(0, round_, 0.0) is not None for round_ in range(100)] == available


def test_a_real_device_asks_at_once_and_takes_as_long_as_it_takes() -> None:
    work = Train(activation=0, session=0, model="z/0")
    assert (Real().arrival(3, 1, 0.0), Real().work(work, 0.0)) == (0.0, 0.0)
    assert (Real().trains_offline(2), Real().rest(0, 0, 0.0)) == (False, None)


@pytest.mark.parametrize("clock", [{}, UNEQUAL], ids=["alike", "unequal"])
def test_offline_rounds_that_take_time_begin_and_end_as_in_the_simulation(
    tmp_path: Path, clock: Any
) -> None:
    """After each piece of work a timer begins; none begins another piece before it is over."""
    one, steps = _simulated(
        tmp_path / "run",
        algorithm={"name": "fedbcd-i", "steps": [1, 2], "offline_limit": 2},
        clock=clock,
    )
    machines = {i: [0.0, 0, 0] for i in range(8)}  # idle since, sessions, activations
    began: dict[int, tuple[float, Any]] = {}
    in_a_row: Counter[int] = Counter()
    for step in steps:
        if not step.actor.startswith("device/"):
            continue
        device = number_of(step.actor)
        idle, session, activation = machines[device]
        pace = _pace(one, device)
        match step.event:
            case OfflineDue():
                rest = pace.rest(session, activation, SCALE * idle)
                assert SCALE * (step.time - idle) == pytest.approx(rest)
                began[device] = step.time, step.commands[0]
            case OfflineTrained():
                since, work = began.pop(device)
                assert SCALE * (step.time - since) == pytest.approx(pace.work(work, SCALE * since))
                machines[device] = [step.time, session + 1, activation]
                in_a_row[device] += 1
            case Woke():
                assert device not in began, "it is busy until its offline round ends"
            case Trained() | Failed():
                machines[device] = [step.time, session, activation + 1]
                in_a_row[device] = 0
    assert max(in_a_row.values()) == 2
    assert sum(session for _, session, _ in machines.values()) > 16


@pytest.mark.parametrize("clock", [{}, UNEQUAL], ids=["alike", "unequal"])
def test_a_simulation_costs_nothing_beyond_its_own_clock(tmp_path: Path, clock: Any) -> None:
    """The account of a log whose clock is exact: no overhead, and as many uploads as there were."""
    one, steps = _simulated(tmp_path / "run", cloud={"name": "async", "first": 1}, clock=clock)
    found = account(
        tmp_path / "run" / "events.jsonl",
        _times(one),
        Deploy(time_scale=1.0),
    )
    assert found["phase_overhead_s"] == pytest.approx(0.0, abs=1e-9)
    assert found["round_overhead_s"] == pytest.approx(0.0, abs=1e-9)
    assert found["activations"] == sum(
        1 for step in steps if "Uploaded" in type(step.event).__name__
    )
