"""Decision 1 of the architecture: a round's cost follows the active devices, not the population.
Counted, not timed.
"""

from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.compute.tally import Tally
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.schedule.work import Reader
from support.methods import method_of
from support.runs import train

SERVERS, ACTIVE, ROUNDS = 4, 3, 5


def _play(
    devices: int, cloud: fb.Cloud, algorithm: fb.Algorithm | None = None
) -> tuple[Driver, list[int]]:
    """Some rounds of the schedule alone; transitions per round."""
    algorithm = algorithm or fb.FedBCD()
    homes = [part.tolist() for part in np.array_split(np.arange(devices), SERVERS)]
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    driver = Driver(Machines(homes, cloud, ACTIVE, 1, limit), Reader(cloud, SERVERS))
    simulation = Simulation(
        driver, Schedule(method_of(algorithm), fb.Clock(), seed=0, active=ACTIVE)
    )
    counts = []
    for _ in range(ROUNDS):
        before = driver.transitions
        simulation.play_round()
        counts.append(driver.transitions - before)
    return driver, counts


def test_a_hundred_times_the_devices_take_the_same_number_of_transitions() -> None:
    """Per activation six (woke, requested, activated, trained, uploaded, acknowledged); per server
    ready and updated.
    """
    per_round = SERVERS * (6 * ACTIVE + 2)
    for devices in (100, 10_000):
        _, counts = _play(devices, fb.SyncCloud())
        assert counts == [
            per_round + SERVERS,
            *[per_round] * (ROUNDS - 1),
        ]  # the first one also starts the servers


@pytest.mark.parametrize(
    "cloud", [fb.AsyncCloud(first=2), fb.RigorousCloud(first=2)], ids=lambda c: c.name
)
def test_on_asynchronous_clouds_as_well_a_round_costs_what_its_activations_cost(
    cloud: fb.Cloud,
) -> None:
    bound = SERVERS * (6 * ACTIVE + 3) * ROUNDS + SERVERS
    for devices in (100, 10_000):
        driver, counts = _play(devices, cloud)
        assert sum(counts) <= bound
        assert (
            sum(device.activation for device in driver.machines.devices.values())
            >= ROUNDS * 2 * ACTIVE - 2 * ACTIVE
        )


@pytest.mark.parametrize(
    "cloud",
    [fb.SyncCloud(), fb.AsyncCloud(first=2), fb.RigorousCloud(first=2)],
    ids=lambda c: c.name,
)
def test_idle_devices_have_no_machine(cloud: fb.Cloud) -> None:
    driver, _ = _play(10_000, cloud)
    spoken_to = driver.machines.devices
    assert 0 < len(spoken_to) <= SERVERS * ACTIVE * (ROUNDS + 1)
    assert all(
        device.activation > 0 or device.state.name != "IDLE" for device in spoken_to.values()
    )


def test_devices_that_train_offline_are_the_ones_that_cost() -> None:
    """FedBCD-I: each available device takes an offline round, so that part follows `available`,
    still not the population.
    """
    algorithm = fb.FedBCDI(available=10, offline_time="free")
    (_, small), (_, large) = (
        _play(devices, fb.SyncCloud(), algorithm) for devices in (100, 10_000)
    )
    assert sum(large) == pytest.approx(sum(small), rel=0.1)


def test_numbers_are_not_needed_for_a_schedule() -> None:
    """The handles that a `Reader` follows are those that the machines hold."""
    driver, _ = _play(100, fb.RigorousCloud(first=2))
    assert isinstance(driver.observer, Reader)
    assert driver.observer.held == [server.model for server in driver.machines.servers]


def test_no_round_looks_at_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to count them; their numbers are kept, as devices come and go."""
    members_of, take_reported = Tally.members_of, Tally.take_reported
    asked: list[int] = []

    def counted(self: Tally, server: int) -> list[int]:
        asked.append(server)
        return members_of(self, server)

    def checked(self: Tally) -> Any:
        assert self.members_V == [len(members_of(self, n)) for n in range(len(self.members_V))]
        return take_reported(self)

    monkeypatch.setattr(Tally, "members_of", counted)
    monkeypatch.setattr(Tally, "take_reported", checked)
    for case in ("fedbcd-sync", "fedbcd-async"):
        seen = []
        for rounds in (2, 8):
            asked.clear()
            train(case, rounds=rounds, looks=1, certify_every=0)
            seen.append(len(asked))
        assert seen[0] == seen[1], case
    train("fedbcd-sync", rounds=6, looks=1, joins={3: 2, 7: 4}, leaves={1: 3, 10: 5})
