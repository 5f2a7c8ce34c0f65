"""The footnote on latency in "Sync-Cloud vs. Async-Cloud", sentence by sentence, on schedules
alone: no model is trained.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.protocol.messages import (
    Actor,
    Command,
    Event,
    OfflineTrained,
    OpenPhase,
    ServerReady,
    Trained,
    UpdateRequested,
    Woke,
    number_of,
)
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from support.methods import method_of

SERVERS, MEMBERS, SEED = 10, 10, 3


@dataclass
class Diary:
    """Every transition: when, who, what happened, what follows."""

    lines: list[tuple[float, Actor, Event, Sequence[Command]]] = field(default_factory=list)

    def append(self, time: float, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        self.lines.append((time, actor, event, commands))

    def times(self, kind: type[Event]) -> list[tuple[float, int, Event]]:
        return [
            (time, number_of(actor), event)
            for time, actor, event, _ in self.lines
            if type(event) is kind and "/" in actor
        ]


def schedule(
    rounds: int, cloud: fb.Cloud | None = None, active: int = 3, clock: fb.Clock | None = None
) -> tuple[Diary, list[float]]:
    """The diary of FedBCD on ten servers of ten devices, and the clock after each round."""
    servers = [list(range(n * MEMBERS, (n + 1) * MEMBERS)) for n in range(SERVERS)]
    diary, ends = Diary(), [0.0]
    machines = Machines(servers, cloud or fb.SyncCloud(), active, 1, None)
    simulation = Simulation(
        Driver(machines, None, diary),
        Schedule(method_of(fb.FedBCD()), clock or fb.Clock(), SEED, active),
    )
    for _ in range(rounds):
        simulation.play_round()
        ends.append(simulation.now)
    return diary, ends


def arrival(device: int, round_: int) -> float:
    u = draws.unit_one(SEED, draws.ARRIVAL, device, round_)
    return float(fb.Exponential(2.0).quantile(np.array([u]))[0])


def process(device: int, activation: int) -> float:
    u = draws.unit_one(SEED, draws.PROCESS, device, activation)
    return float(fb.Exponential(1.0).quantile(np.array([u]))[0])


def members(server: int) -> range:
    return range(server * MEMBERS, (server + 1) * MEMBERS)


@pytest.mark.parametrize(
    "cloud",
    [fb.SyncCloud(), fb.AsyncCloud(first=3), fb.RigorousCloud(first=3)],
    ids=lambda c: c.name,
)
def test_aggregation_takes_no_time(cloud: fb.Cloud) -> None:
    """'assume that server aggregation computation ... is negligible': time passes only where a
    device arrives or has worked.
    """
    diary, _ = schedule(8, cloud)
    now = 0.0
    for time, _, event, _ in diary.lines:
        assert time == now or isinstance(event, Woke | Trained)
        now = time


def test_every_arrival_is_exponential_with_mean_2_anew_each_round() -> None:
    """'each edge device simulates an inter-arrival time ... (with mean 2)'."""
    diary, ends = schedule(6)
    asked = defaultdict(dict)
    for time, device, _ in diary.times(Woke):
        asked[max(t for t, end in enumerate(ends) if end <= time)][device] = time
    for t in range(6):
        assert asked[t] == {
            device: pytest.approx(ends[t] + arrival(device, t)) for device in asked[t]
        }
    many = [arrival(device, t) for device in range(100) for t in range(200)]
    assert np.mean(many) == pytest.approx(2.0, abs=0.1)
    assert np.mean(np.array(many) > 2.0) == pytest.approx(np.exp(-1), abs=0.02)


@pytest.mark.parametrize("active", [3, 5, 6])
def test_a_server_takes_the_shortest_arrivals(active: int) -> None:
    """'edge devices that have the shortest arrival time (|Q_n(t)| is fixed for each experiment to
    3, 5 and 6)'.
    """
    diary, ends = schedule(4, active=active)
    for t in range(4):
        chosen = {device for time, device, _ in diary.times(Woke) if ends[t] <= time < ends[t + 1]}
        for n in range(SERVERS):
            assert chosen & set(members(n)) == set(
                sorted(members(n), key=lambda device: arrival(device, t))[:active]
            )


def test_the_number_of_steps_is_random_between_1_and_5() -> None:
    """'using a random number of epochs K_i(t) with range [1, 5]'."""
    diary, _ = schedule(40)
    steps = [event.steps for _, _, event in diary.times(Trained)]
    assert np.bincount(steps, minlength=6)[1:] / len(steps) == pytest.approx([0.2] * 5, abs=0.05)


def test_the_latency_of_a_device_is_arrival_plus_steps_times_one_processing_time() -> None:
    """'exponential distribution with mean 1'; 'tau_i = tau_i,arrival + K_i tau_i,process', one draw
    times K_i.
    """
    diary, ends = schedule(6)
    for time, device, event in diary.times(Trained):
        t = max(t for t, end in enumerate(ends) if end < time)
        assert time == pytest.approx(
            ends[t] + arrival(device, t) + event.steps * process(device, event.activation)
        )
    many = [process(device, activation) for device in range(100) for activation in range(200)]
    assert np.mean(many) == pytest.approx(1.0, abs=0.05)


def test_the_latency_of_a_server_is_that_of_its_slowest_active_device() -> None:
    """'tau_n = max over i in Q_n(t) of tau_i': the server reports in the moment its last device has
    finished.
    """
    diary, ends = schedule(6)
    done, reports = defaultdict(list), defaultdict(dict)
    for time, device, _ in diary.times(Trained):
        done[max(t for t, end in enumerate(ends) if end < time), device // MEMBERS].append(time)
    for time, actor, event, _ in diary.lines:
        if isinstance(event, ServerReady):
            assert actor == "coordinator"
            reports[event.phase][event.server] = time
    for t in range(6):
        assert reports[t] == {n: max(done[t, n]) for n in range(SERVERS)}


def test_a_sync_round_lasts_as_long_as_the_slowest_server_and_an_async_one_as_the_b_th() -> None:
    """Latency analysis: 'tau_SC = tau_(N) and tau_AC = tau_(B)', seen in the first round, where all
    servers start together.
    """
    diary, ends = schedule(1)
    reports = sorted(time for time, _, event, _ in diary.lines if isinstance(event, ServerReady))
    assert ends[1] == reports[-1]
    assert (
        schedule(1, fb.AsyncCloud(first=4))[1][1]
        == schedule(1, fb.RigorousCloud(first=4))[1][1]
        == reports[3]
    )


def test_other_distributions_are_the_same_clock() -> None:
    """The distributions are the user's choice: constant times make every round last arrival + 5 at
    most.
    """
    _, ends = schedule(3, clock=fb.Clock(fb.Constant(2.0), fb.Constant(1.0)))
    assert ends == [0.0, 7.0, 14.0, 21.0]


def test_a_request_costs_no_time_and_opens_no_phase() -> None:
    """'No delay is added to the TCP communication': a request is heard in the moment it is made."""
    diary, _ = schedule(2)
    woke = {(time, device) for time, device, _ in diary.times(Woke)}
    heard = {(time, event.device) for time, _, event in diary.times(UpdateRequested)}
    assert woke == heard
    assert not any(
        isinstance(c, OpenPhase)
        for _, _, event, commands in diary.lines
        if isinstance(event, UpdateRequested)
        for c in commands
    )


def test_a_few_slow_devices_strand_the_servers_that_wait_for_all() -> None:
    """ "most cloud servers are stranded by a few 'slow' activated edge devices": two of ten
    servers with steps twenty times as long hold up Sync-cloud, and the Async-cloud of five little.
    """
    slow = fb.Clock(classes=(fb.DeviceClass(servers=(8, 9), step=20.0),))
    last = {
        (cloud.name, clock == slow): schedule(40, cloud, clock=clock)[1][-1]
        for cloud in (fb.SyncCloud(), fb.AsyncCloud(first=5))
        for clock in (fb.Clock(), slow)
    }
    assert last["sync", True] > 6 * last["sync", False]
    assert last["async", True] < 1.7 * last["async", False]


def test_offline_rounds_that_cost_no_time_train_more_where_rounds_are_short() -> None:
    """Sessions of local training per device in 100 units of the clock (docs/spec.md, "Protocols"):
    one offline round in each round of the coordinator is far more work at B = 3 than on Sync-cloud;
    where it takes its time, less so. FedProx trains in activations only.
    """

    def sessions(kind: type[Event], algorithm: fb.Algorithm, cloud: fb.Cloud) -> float:
        method, diary = method_of(algorithm), Diary()
        servers = [[*members(n)] for n in range(SERVERS)]
        machines = Machines(servers, cloud, 3, 1, method.offline_limit)
        simulation = Simulation(
            Driver(machines, None, diary), Schedule(method, fb.Clock(), SEED, 3)
        )
        while simulation.now < 400:
            simulation.play_round()
        count = sum(type(event) is kind for _, _, event, _ in diary.lines)
        return count / (SERVERS * MEMBERS) / (simulation.now / 100)

    free, timed = fb.FedBCDI(offline_time="free"), fb.FedBCDI(offline_time="timed")
    found = [
        sessions(OfflineTrained, free, fb.AsyncCloud(first=3)),
        sessions(OfflineTrained, free, fb.SyncCloud()),
        sessions(OfflineTrained, timed, fb.AsyncCloud(first=3)),
        sessions(OfflineTrained, timed, fb.SyncCloud()),
        sessions(Trained, fb.FedProx(), fb.SyncCloud()),
    ]
    assert found == pytest.approx([13.9, 4.9, 11.0, 7.8, 2.2], rel=0.08)
