"""What the tests of the planner share: schedules without numbers, under delays of every kind."""

import numpy as np

import fedbcd as fb
from fedbcd.schedule.delays import Delay
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation

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
    return Simulation(driver, Schedule(algorithm, clock, seed, active))


def mean_round(simulation: Simulation, rounds: int, warm: int) -> float:
    while simulation.round < warm:
        simulation.play_round()
    began, start = simulation.now, simulation.round
    while simulation.round < start + rounds:
        simulation.play_round()
    return (simulation.now - began) / (simulation.round - start)
