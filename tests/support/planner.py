"""What the tests of the planner share: schedules without numbers, under delays of every kind."""

from collections.abc import Callable

import numpy as np

import fedbcd as fb
from fedbcd.planner.record import Record
from fedbcd.planner.server_time import RecordedTime, observe
from fedbcd.schedule.arrays import Outline
from fedbcd.schedule.delays import Delay, Floats
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from support.methods import method_of

CLOCK = fb.Clock()
SAMPLE = tuple(np.random.default_rng(11).gamma(2.0, 1.5, 200).tolist())
DELAYS: dict[str, Delay] = {
    "exponential": fb.Exponential(2.0),
    "uniform": fb.Uniform(1.0, 4.0),
    "weibull": fb.Weibull(shape=1.5, scale=2.0),
    "gamma": fb.Gamma(shape=2.0, scale=1.5),
    "lognormal": fb.LogNormal(median=2.0, sigma=0.5),
    "empirical": fb.Trace(SAMPLE),
}


def simulation(
    servers: int,
    cloud: fb.Cloud,
    clock: fb.Clock = CLOCK,
    members: int = 10,
    active: int = 3,
    seed: int = 5,
    **options: object,
) -> Simulation:
    """A schedule alone: no tensor is touched."""
    homes = [list(range(n * members, (n + 1) * members)) for n in range(servers)]
    algorithm = options.get("algorithm", fb.FedBCD())
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    driver = Driver(Machines(homes, cloud, active, 1, limit), None, options.get("log"))
    sent = options.get("sent", (0.0, 0.0))
    return Simulation(driver, Schedule(method_of(algorithm), clock, seed, active, sent=sent))


COMPARED = 30  # rounds
AHEAD = 1_000  # arrivals that are drawn at once


def outline(simulation: Simulation, cloud: fb.Cloud) -> Outline:
    """The same schedule as arrays, at a fifth of the time."""
    homes = [server.members for server in simulation.machines.servers]
    found = Outline(homes, simulation.schedule, cloud)
    found._ahead = max(1, AHEAD // sum(map(len, homes)))
    return found


def mean_round(
    simulation: Simulation, rounds: int, warm: int, cloud: fb.Cloud | None = None
) -> float:
    """Of so many rounds after the first few. With its cloud, as arrays, after rounds in which these
    are compared with the events.
    """
    if cloud is None:
        return _mean(simulation, simulation.play_round, rounds, warm)
    arrays = outline(simulation, cloud)
    for _ in range(COMPARED):
        simulation.play_round()
        arrays.next_round()
        assert (arrays.round, arrays.now) == (simulation.round, simulation.now)
    return _mean(arrays, arrays.next_round, rounds, max(warm, COMPARED))


def _mean(
    player: Simulation | Outline, play: Callable[[], object], rounds: int, warm: int
) -> float:
    while player.round < warm:
        play()
    began, start = player.now, player.round
    while player.round < start + rounds:
        play()
    return (player.now - began) / (player.round - start)


def recorded(record: Record, active: int | None = None) -> RecordedTime:
    return RecordedTime(observe(record, active))


def recorded_times(record: Record, active: int | None = None) -> Floats:
    """Of the phases that ended."""
    observed = observe(record, active)
    return observed.times[observed.ended]
