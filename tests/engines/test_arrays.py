"""The schedule as arrays is the event loop's schedule: same devices, sessions, steps, servers and
clock, round by round.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.algorithm.methods import Algorithm
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import (
    OfflineTrained,
    Pull,
    StepGlobal,
    StepModel,
    Train,
    Trained,
    number_of,
)
from fedbcd.schedule.arrays import Jobs, Outline, why_not_ahead
from fedbcd.schedule.delays import Clock, Exponential, Gamma, LogNormal, Uniform, Weibull
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from support.methods import method_of

FREE = fb.FedBCDI(offline_time="free")
SERVERS = [[n + 4 * k for k in range(7)] for n in range(4)]


class Recorder:
    """What the event loop asks for: (device, session, steps) of activations and of offline rounds,
    and who stepped.
    """

    def __init__(self) -> None:
        self.work: Counter[tuple[int, int, int]] = Counter()
        self.offline: Counter[tuple[int, int, int]] = Counter()
        self.stepped: list[int] = []
        self._at_work: dict[int, Train | Pull] = {}

    def apply(self, actor, event, commands) -> None:
        if isinstance(event, Trained):
            device = number_of(actor)
            self.work[(device, self._at_work.pop(device).session, event.steps)] += 1
        if isinstance(event, OfflineTrained):
            self.offline[(number_of(actor), event.session, event.steps)] += 1
        for command in commands:
            if isinstance(command, Train | Pull):
                self._at_work[number_of(actor)] = command
            if isinstance(command, StepModel):
                self.stepped.append(number_of(actor))
            if isinstance(command, StepGlobal):
                self.stepped += range(len(SERVERS))


def counted(jobs: Jobs | None) -> Counter[tuple[int, int, int]]:
    if jobs is None:
        return Counter()
    return Counter(
        (d, s, k)
        for d, s, k in zip(
            jobs.device.tolist(), jobs.session.tolist(), jobs.steps.tolist(), strict=True
        )
        if k
    )


CLOUDS = [fb.SyncCloud(), fb.AsyncCloud(first=1), fb.AsyncCloud(first=3), fb.AsyncCloud(first=4)]
CLOCKS = [
    Clock(),
    Clock(Uniform(0.0, 3.0), Weibull(0.7)),
    Clock(LogNormal(1.0, 1.5), Gamma(2.0)),
    Clock(Exponential(0.01), Exponential(5.0)),
    Clock(
        classes=(
            fb.DeviceClass(share=0.3, step=6.0, arrival=2.0),
            fb.DeviceClass(servers=(3,), step=4.0),
        ),
        speeds=LogNormal(1.0, 0.5),
        bandwidth=fb.Bandwidth(up=10.0, down=100.0),
    ),
]


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
@pytest.mark.parametrize(
    ("algorithm", "cloud"),
    [(fb.FedBCD(), cloud) for cloud in CLOUDS]
    + [
        (FREE, fb.SyncCloud()),
        (replace(FREE, available=3, offline_limit=2, pull_steps=(2, 3)), fb.SyncCloud()),
        (fb.FedProx(steps=(4, 4)), fb.SyncCloud()),
        (fb.FedBCD(epochs=(1, 3), batch=4), fb.AsyncCloud(first=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("active", [1, 3, 7])
def test_same_rounds_as_the_event_loop(
    algorithm: Algorithm, cloud: Cloud, clock: Clock, active: int
) -> None:
    schedule = Schedule(method_of(algorithm, range(1, 29)), clock, 11, active, sent=(8.0, 8.0))
    assert why_not_ahead(SERVERS, schedule, cloud) is None
    recorder = Recorder()
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    machines = Machines(SERVERS, cloud, active, 1, limit)
    simulation = Simulation(Driver(machines, recorder), schedule)
    outline = Outline(SERVERS, schedule, cloud)
    outline._ahead = 5  # several blocks
    work: Counter[tuple[int, int, int]] = Counter()
    offline: Counter[tuple[int, int, int]] = Counter()
    stepped: list[int] = []
    for round_ in range(40):
        simulation.play_round()
        planned = outline.next_round()
        work += counted(planned.jobs)
        offline += counted(planned.offline)
        stepped += planned.servers.tolist()
        assert outline.now == pytest.approx(simulation.now, rel=1e-15)
        assert outline.round == simulation.round == round_ + 1
        if round_ % 3 == 0:  # a look: also what was uploaded since
            work += counted(outline.settle())
            assert work == recorder.work
            assert outline.activations == sum(
                device.activation for device in machines.devices.values()
            )
    work += counted(outline.settle())
    assert work == recorder.work
    assert offline == recorder.offline
    if not cloud.sync:
        assert stepped == recorder.stepped


def test_jobs_come_server_by_server() -> None:
    planned = Outline(
        SERVERS, Schedule(method_of(fb.FedBCD()), Clock(), 0, 2), fb.SyncCloud()
    ).next_round()
    assert planned.jobs.server.tolist() == np.repeat(planned.servers, 2).tolist()
    assert sorted(planned.servers.tolist()) == [0, 1, 2, 3]
    assert planned.jobs.packed.shape == (4, 8)


def test_large_servers_are_not_sorted_whole() -> None:
    servers = [list(range(n * 300, (n + 1) * 300)) for n in range(2)]
    schedule = Schedule(method_of(fb.FedBCD()), Clock(), 3, 5)
    simulation = Simulation(
        Driver(Machines(servers, fb.SyncCloud(), 5, 1, None), recorder := Recorder()), schedule
    )
    outline = Outline(servers, schedule, fb.SyncCloud())
    for _ in range(5):
        simulation.play_round()
        work = counted(outline.next_round().jobs)
        assert work == recorder.work
        recorder.work.clear()


@pytest.mark.parametrize(
    ("change", "cloud", "reason"),
    [
        ({"joins": {1: 2}}, fb.SyncCloud(), "join"),
        ({}, fb.RigorousCloud(first=2), "rigorous"),
        ({"method": method_of(FREE)}, fb.AsyncCloud(first=2), "offline"),
        ({"method": method_of(fb.FedBCDI())}, fb.SyncCloud(), "take their time"),
        ({"clock": Clock(fb.Constant(1.0), Exponential(1.0))}, fb.SyncCloud(), "repeat"),
    ],
)
def test_what_needs_the_event_loop_is_said(change, cloud, reason) -> None:
    arguments = {
        "method": method_of(fb.FedBCD()),
        "clock": Clock(),
        "seed": 0,
        "active": 2,
    } | change
    assert reason in (why_not_ahead(SERVERS, Schedule(**arguments), cloud) or "")


def test_servers_of_different_sizes_need_the_event_loop() -> None:
    assert "different" in (
        why_not_ahead(
            [[0, 1], [2]], Schedule(method_of(fb.FedBCD()), Clock(), 0, 1), fb.SyncCloud()
        )
        or ""
    )
