"""A server whose disk is lost, or old, goes on under a new generation: its devices contribute
again, nothing counts twice, and the merged log replays to the models on disk.
"""

import shutil
from pathlib import Path

import pytest

from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.rebuild import rebuild
from fedbcd.engines.deploy.roles.recovery import recover
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import FedBCDError, RecordError, Refused
from fedbcd.protocol.messages import COORDINATOR, GlobalUpdated, Mixed, Recalled, Restored
from fedbcd.record.timeline import read_timeline
from fedbcd.spec import RunSpec
from support.deployments import CASES, Town, Unkind, federation

SERVER = "server/0"


def recovered(town: Town, backup: Path | None) -> int:
    """The server comes up with a backup, or with nothing, brought up from its coordinator's log."""
    town.kill(SERVER)
    shutil.rmtree(town.folder / SERVER)
    if backup is not None:
        shutil.copytree(backup, town.folder / SERVER)
    known = FileStore(town.folder / COORDINATOR, read_only=True)
    role = town._opened(SERVER, FileStore(town.folder / SERVER, begin=backup is None))
    assert isinstance(role, ServerRole)
    try:
        return recover(role, known, town.tick())
    finally:
        role.close()
        known.close()


def copied(town: Town, place: Path) -> Path:
    town.kill(SERVER)
    shutil.copytree(town.folder / SERVER, place)
    town.restart(SERVER)
    return place


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("fedbcd-sync", True),
        ("fedbcd-async", True),
        ("fedbcd-async", False),
        ("fedbcd-i-async", True),
        ("fedavg-sync", False),
        ("twice-async", True),
    ],
)
def test_a_server_goes_on_from_an_older_store(
    case: str, old: bool, folder: Path, towns: list[Town]
) -> None:
    """From a backup, or from an empty disk."""
    algorithm, cloud = CASES[case]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 7, death=0.0, fail=0.0)
    unkind.play(2)
    backup = copied(town, folder / "backup") if old else None
    go_on(unkind, 3)
    before = {device: town.roles[device].machine.activation for device in ("device/0", "device/1")}
    recovered(town, backup)
    town.restart(SERVER)
    server = town.roles[SERVER]
    assert isinstance(server, ServerRole)
    assert server.machine.generation == 1
    go_on(unkind, 3)
    unkind.calm()
    assert not any(server.machine.is_awaited(device) for device in server.machine.members)
    for device, activation in before.items():
        assert town.roles[device].machine.activation >= activation
        log = [step.event for step in town.roles[device].store.transitions()]
        assert any(isinstance(event, Recalled) for event in log)
    town.replayed()
    read_timeline(town.folder / "events.jsonl")  # as reports and dashboards do


def go_on(unkind: Unkind, rounds: int) -> None:
    """So many rounds more; who was turned away tries again."""
    town = unkind.town
    goal = town.rounds + rounds
    for k in range(20_000):
        if town.rounds >= goal:
            return
        if k % 50 == 0:
            for actor in town.actors:
                if actor.startswith("device/"):
                    town.connect(actor)
        unkind._step()
    raise AssertionError(f"only {town.rounds} of {goal} rounds")


def test_on_the_rigorous_cloud_only_the_newest_store_will_do(
    folder: Path, towns: list[Town]
) -> None:
    """There a server takes steps alone, of which its coordinator hears nothing."""
    algorithm, cloud = CASES["fedbcd-rigorous"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    Unkind(town, 7, death=0.0, fail=0.0).play(2)
    backup = copied(town, folder / "backup")
    with pytest.raises(RecordError, match="so nobody knows its log; put its newest store back"):
        recovered(town, backup)


def beginning(folder: Path, towns: list[Town], rounds: int) -> tuple[Town, Unkind]:
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 7, death=0.0, fail=0.0)
    unkind.play(rounds)
    return town, unkind


def tell_round(town: Town) -> None:
    """As the coordinator does before it gives any answer of a round."""
    for actor, role in town.roles.items():
        if isinstance(role, ServerRole):
            assert actor.startswith("server/")
            role.coordinator.told(town.rounds)


def test_every_server_notices_a_coordinator_that_is_rolled_back_by_a_mix(
    folder: Path, towns: list[Town]
) -> None:
    """Also those that were in none of the mixes since; in 0.1.0 these went on with it, and the
    round count went back.
    """
    town, unkind = beginning(folder, towns, 2)
    town.kill(COORDINATOR)
    shutil.copytree(town.folder / COORDINATOR, folder / "old")
    town.restart(COORDINATOR)
    go_on(unkind, 1)
    tell_round(town)
    shutil.move(town.folder / COORDINATOR, folder / "newest")
    town.kill(COORDINATOR)
    shutil.copytree(folder / "old", town.folder / COORDINATOR)
    town.refused = []
    town.restart(COORDINATOR)
    assert len(town.refused) == 3
    assert all("has told of round" in sentence for sentence in town.refused)
    town.kill(COORDINATOR)
    shutil.rmtree(town.folder / COORDINATOR)
    shutil.move(folder / "newest", town.folder / COORDINATOR)
    town.restart(COORDINATOR)
    assert len(town.refused) == 3
    go_on(unkind, 1)
    unkind.calm()
    town.replayed()


def test_every_server_notices_an_empty_coordinator_in_its_first_phase_too(
    folder: Path, towns: list[Town]
) -> None:
    town, _ = beginning(folder, towns, 0)
    shutil.rmtree(town.folder / COORDINATOR)
    town.refused = []
    town.restart(COORDINATOR)
    assert len(town.refused) == 3
    assert all("another store than before" in sentence for sentence in town.refused)
    for server in ("server/0", "server/1", "server/2"):
        assert not town.roles[COORDINATOR].store.facts.get(f"store/{server[-1]}")


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedbcd-graph", "fedavg-sync"])
def test_a_coordinator_is_rebuilt_from_what_its_servers_know(
    case: str, folder: Path, towns: list[Town]
) -> None:
    """Also where answers were lost with it: whoever waits for one is mixed anew."""
    algorithm, cloud = CASES[case]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 5, loss=0.2, death=0.0, fail=0.0)
    unkind.play(3)
    before = town.rounds
    unkind.loss, answers = 0.0, [a for a in town.post if isinstance(a.event, Mixed | GlobalUpdated)]
    if answers:  # one of the last round has arrived, the others are lost
        town.deliver(answers[0])
    town.post.clear()
    for n in range(3):  # there was a round more, of which nobody has heard an answer
        server = town.roles[f"server/{n}"]
        assert isinstance(server, ServerRole)
        server.coordinator.told(before + 1)
    rebuilt(town)
    town.refused = []
    town.restart(COORDINATOR)
    assert not town.refused
    assert town.rounds == before
    go_on(unkind, 3)
    unkind.calm()
    town.replayed()


@pytest.mark.parametrize("case", ["fedbcd-rigorous", "twice-async"])
def test_where_servers_know_too_little_of_a_mix_the_coordinator_is_not_rebuilt(
    case: str, folder: Path, towns: list[Town]
) -> None:
    algorithm, cloud = CASES[case]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    town.start()
    with pytest.raises(RecordError, match="put the coordinator's newest store back"):
        rebuilt(town)


def rebuilt(town: Town) -> None:
    town.kill(COORDINATOR)
    shutil.rmtree(town.folder / COORDINATOR)
    role = town._opened(COORDINATOR, FileStore(town.folder / COORDINATOR, begin=True))
    assert isinstance(role, CoordinatorRole)
    servers = [FileStore(town.folder / f"server/{n}", read_only=True) for n in range(3)]
    rebuild(role, servers, town.tick())
    for store in (role, *servers):
        store.close()


def test_what_a_server_knows_of_its_coordinator_outlives_it(
    folder: Path, towns: list[Town]
) -> None:
    town, _ = beginning(folder, towns, 3)
    server = town.roles[SERVER]
    assert isinstance(server, ServerRole)
    known = server.coordinator.round
    again = town.restart(SERVER)
    assert isinstance(again, ServerRole)
    assert again.coordinator.round == known > 0
    with pytest.raises(Refused, match="does not say how far it is"):
        again.coordinator.meet({"store": "a", "round": -1})


# ------------------------------------------------------------------------------------------------
# two at once, and the operator's machine
def test_a_server_and_one_of_its_devices_lose_their_disks(folder: Path, towns: list[Town]) -> None:
    """The device begins at its server's model, the others keep theirs, the log replays."""
    town, unkind = beginning(folder, towns, 2)
    backup = copied(town, folder / "backup")
    go_on(unkind, 3)
    recovered(town, backup)
    town.kill("device/0")
    shutil.rmtree(town.folder / "device/0")
    server = town.restart(SERVER)
    town.restart("device/0")
    go_on(unkind, 3)
    unkind.calm()
    assert isinstance(server, ServerRole)
    assert server.machine.contributors == [0, 1, 2]
    given = [step.event for step in town.roles["device/0"].store.transitions()]
    assert any(isinstance(event, Restored) and event.model.startswith("z/") for event in given)
    town.replayed()


def test_a_server_and_the_coordinator_lose_their_disks(folder: Path, towns: list[Town]) -> None:
    """With an old copy of the coordinator nobody goes on, and devices keep what they have."""
    town, unkind = beginning(folder, towns, 2)
    town.kill(COORDINATOR)
    shutil.copytree(town.folder / COORDINATOR, folder / "old")
    town.restart(COORDINATOR)
    go_on(unkind, 3)
    tell_round(town)
    models = {a: role.kept["x"] for a, role in town.roles.items() if isinstance(role, DeviceRole)}
    town.kill(COORDINATOR)
    shutil.rmtree(town.folder / COORDINATOR)
    shutil.copytree(folder / "old", town.folder / COORDINATOR)
    recovered(town, None)
    town.refused, town.post = [], []
    server, _ = town.restart(SERVER), town.restart(COORDINATOR)
    assert sum("has told of round" in sentence for sentence in town.refused) == 2
    assert isinstance(server, ServerRole)
    for actor, model in models.items():
        device = town.roles[actor]
        assert isinstance(device, DeviceRole)
        assert device.kept["x"] is model


def test_without_its_key_an_authority_lets_those_go_on_who_have_certificates(
    tmp_path: Path,
) -> None:
    """It issues and revokes nothing; a new one is another."""
    authority = Authority.create(tmp_path / "certs")
    for identity in ("coordinator", "server/0"):
        authority.issue(identity)
    (tmp_path / "certs" / "ca.key").unlink()
    with pytest.raises(FedBCDError, match=r"ca\.key"):
        Authority(tmp_path / "certs").issue("device/0")
    mine, peer = (Credentials(tmp_path / "certs", name) for name in ("coordinator", "server/0"))
    assert mine.objection(peer.certificate) is None
    Authority.create(tmp_path / "new").issue("server/0")
    other = Credentials(tmp_path / "new", "server/0")
    assert mine.objection(other.certificate) is not None
