"""The schedule as arrays is the event loop's: as values, planned rounds are the rounds of events
whose work is put off until its server steps.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.algorithm.methods import Algorithm
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import ref, version_of
from fedbcd.schedule.arrays import Jobs, Outline, PlannedRound, why_not_ahead
from fedbcd.schedule.delays import Clock, Exponential, Gamma, LogNormal, Uniform, Weibull
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.schedule.work import (
    Count,
    Mix,
    Reader,
    Round,
    Sessions,
    Step,
    StepGlobal,
    first_models,
)
from support.methods import method_of
from support.put_off import PutOff

FREE = fb.FedBCDI(offline_time="free")
SERVERS = [[n + 4 * k for k in range(7)] for n in range(4)]


def events(schedule: Schedule, cloud: Cloud, limit: int | None, iterations: int = 1) -> PutOff:
    """The event loop, its work put off until its server steps."""
    machines = Machines(SERVERS, cloud, schedule.active, iterations, limit)
    driver = Driver(machines, Reader(cloud, len(SERVERS)))
    return PutOff(Simulation(driver, schedule))


def values(round_: Round) -> tuple[Any, ...]:
    """What a round asks for, in any order of devices: sessions, uploads, and the cloud's steps."""
    sessions = [
        (s.offline, s.device, s.session, s.steps, s.model)
        for part in round_.work
        if isinstance(part, Sessions)
        for s in part.sessions
    ]
    uploads = [each for part in round_.work if isinstance(part, Count) for each in part.uploads]
    steps = [part for part in round_.work if isinstance(part, Mix | Step | StepGlobal)]
    return sorted(sessions), sorted(uploads), steps


class Planned:
    """Planned rounds in the same words: they say which servers step, and that names the models."""

    def __init__(self, cloud: Cloud, iterations: int = 1) -> None:
        self.held = first_models(cloud, len(SERVERS))
        self._sync, self._iterations, self._round = cloud.sync, iterations, 0

    def round_(self, planned: PlannedRound) -> tuple[Any, ...]:
        sessions, uploads, _ = self.jobs(planned.jobs)
        if planned.offline is not None:
            for device, session, steps, _ in planned.offline.packed.T.tolist():
                sessions.append((True, device, session, steps, None))
        steps = self._stepped_globally() if self._sync else self._mixed(planned.servers.tolist())
        self._round += 1
        return sorted(sessions), uploads, steps

    def jobs(self, jobs: Jobs | None) -> tuple[Any, ...]:
        rows = [] if jobs is None else [row for row in jobs.packed.T.tolist() if row[2]]
        sessions = [(False, *row[:3], self.held[row[3]]) for row in rows]
        return sorted(sessions), sorted((row[3], row[0], 0) for row in rows), []

    def _stepped_globally(self) -> list[Any]:
        before, after = self.held[0], ref("z", self._round + 1)
        self.held = [after] * len(SERVERS)
        return [StepGlobal(self._iterations, before, after)]

    def _mixed(self, servers: list[int]) -> list[Any]:
        found: list[Any] = []
        for k in range(self._iterations):
            mixed = ref("w", self._round, k)
            models = tuple(self.held[n] for n in servers)
            found.append(Mix(models, (mixed,) * len(servers), None))
            for n in servers:
                self.held[n] = ref("z", n, version_of(self.held[n]) + 1)
                found.append(Step(n, mixed, self.held[n]))
        return found


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
        (fb.FedAvg(), fb.SyncCloud()),
        (fb.FedBCD(epochs=(1, 3), batch=4, cloud_iterations=2), fb.AsyncCloud(first=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("active", [1, 3, 7])
def test_same_rounds_as_the_event_loop(
    algorithm: Algorithm, cloud: Cloud, clock: Clock, active: int
) -> None:
    schedule = Schedule(method_of(algorithm, range(1, 29)), clock, 11, active, sent=(8.0, 8.0))
    assert why_not_ahead(SERVERS, schedule, cloud) is None
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    iterations = schedule.method.cloud_iterations
    played = events(schedule, cloud, limit, iterations)
    outline, arrays = Outline(SERVERS, schedule, cloud), Planned(cloud, iterations)
    outline._ahead = 5  # several blocks
    for number in range(1, 41):
        round_, planned = next(played), outline.next_round()
        assert values(round_) == arrays.round_(planned)
        assert outline.now == planned.clock == pytest.approx(round_.clock, rel=1e-15)
        assert (outline.round, outline.activations) == (number, round_.activations)
        if number % 3 == 1:  # a look: also what was uploaded since
            late = played.settled()
            assert values(late) == arrays.jobs(outline.settle())
            assert outline.activations == late.activations


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
    machines = Machines(servers, fb.SyncCloud(), 5, 1, None)
    simulation = Simulation(Driver(machines, Reader(fb.SyncCloud(), 2)), schedule)
    outline = Outline(servers, schedule, fb.SyncCloud())
    for _ in range(5):
        jobs = outline.next_round().jobs.packed.T.tolist()
        sessions = (row[1:4] for row in values(next(simulation))[0])
        assert [*sessions] == sorted(tuple(row[:3]) for row in jobs)


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


def test_servers_with_a_q_of_their_own_need_the_event_loop() -> None:
    schedule = Schedule(method_of(fb.FedBCD()), Clock(), 0, (1, 2))
    assert "uploads" in (why_not_ahead(SERVERS, schedule, fb.SyncCloud()) or "")


def test_servers_of_different_sizes_need_the_event_loop() -> None:
    assert "different" in (
        why_not_ahead(
            [[0, 1], [2]], Schedule(method_of(fb.FedBCD()), Clock(), 0, 1), fb.SyncCloud()
        )
        or ""
    )
