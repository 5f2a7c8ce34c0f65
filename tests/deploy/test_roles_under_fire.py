"""Real roles with real stores under a seeded network and power supply: what is left agrees with a
replay of what happened.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fedbcd as fb
from fedbcd.algorithm.wire import Layer
from fedbcd.engines.deploy.processes.failpoints import Failpoint
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Absorb, Acknowledged, MixModels, Restored, StepGlobal, Trained
from fedbcd.record.eventlog import LogReader
from fedbcd.spec import RunSpec
from support.deployments import CASES, Town, Unkind, federation

ROUNDS = 5
ONLINE = [
    case for case in CASES if not case.startswith("fedbcd-i")
]  # nothing is lost with a disk that servers do not know


def play(
    case: str,
    seed: int,
    folder: Path,
    towns: list[Town],
    joins: dict[int, int] | None = None,
    uploads: Sequence[Layer] = (),
    **faults: float,
) -> tuple[Unkind, dict[str, Any]]:
    algorithm, cloud = CASES[case]
    active = 1 if joins else 2
    spec = RunSpec(algorithm, cloud, active=active, joins=joins or {}, uploads=uploads)
    town = Town(folder / "town", spec, federation())
    towns.append(town)
    unkind = Unkind(town, seed, **faults)
    unkind.play(ROUNDS)
    unkind.calm()
    end = town.replayed()
    check_history(folder / "town" / "events.jsonl")
    return unkind, end


def check_history(log: Path) -> None:
    """Every acknowledged upload is counted once at most, and no sooner than it was acknowledged;
    rounds are numbered in order.
    """
    acknowledged: set[tuple[str, int]] = set()
    counted: Counter[tuple[str, int]] = Counter()
    rounds: list[int] = []
    for step in LogReader(log):
        for command in step.commands:
            if isinstance(getattr(command, "message", None), Acknowledged):
                acknowledged.add((command.to, command.message.activation))  # type: ignore[attr-defined]
            elif isinstance(command, Absorb):
                counted[f"device/{command.device}", command.activation] += 1
            elif isinstance(command, StepGlobal) or (
                isinstance(command, MixModels) and command.iteration == 0
            ):
                rounds.append(command.round)
    assert set(counted.values()) <= {1}
    assert set(counted) <= acknowledged
    assert rounds == [*range(len(rounds))]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_loss_copies_disorder_and_crashes(
    case: str, seed: int, folder: Path, towns: list[Town]
) -> None:
    unkind, end = play(case, seed, folder, towns)
    assert end["rounds"] >= ROUNDS
    assert unkind.deaths + unkind.town.stopped > 0


@pytest.mark.parametrize("case", CASES)
def test_a_gentle_network_needs_no_second_try(case: str, folder: Path, towns: list[Town]) -> None:
    unkind, _ = play(case, 0, folder, towns, loss=0, repeat=0, death=0, fail=0, give_up=0)
    assert unkind.town.refused == []


@pytest.mark.parametrize(
    "case", ["fedbcd-sync", "fedbcd-async", "fedbcd-rigorous", "fedbcd-i-async", "fedavg-sync"]
)
def test_devices_come_and_go_and_come_back(case: str, folder: Path, towns: list[Town]) -> None:
    play(case, 0, folder, towns, joins={1: 1, 8: 1}, changes=0.02)


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        ("fedbcd-async", {"joins": {1: 1, 8: 1}, "changes": 0.02}),
        ("fedbcd-sync", {"lost_disks": 0.01}),
        ("fedavg-sync", {"backups": 0.03}),
        ("fedbcd-i-async", {}),
    ],
)
def test_layers_on_uploads(
    case: str, faults: dict[str, Any], folder: Path, towns: list[Town]
) -> None:
    """Contributions outlive crashes, lost disks and old backups on both sides, or a replay would
    not have the bits of the stores.
    """
    unkind, _ = play(case, 1, folder, towns, uploads=(fb.Clip(0.1), fb.Integers()), **faults)
    assert unkind.deaths + unkind.town.stopped > 0


@pytest.mark.parametrize("case", ONLINE)
def test_devices_lose_their_disks(case: str, folder: Path, towns: list[Town]) -> None:
    play(case, 1, folder, towns, lost_disks=0.05)
    restored = [
        step
        for step in LogReader(folder / "town" / "events.jsonl")
        if isinstance(step.event, Restored)
    ]
    assert restored


@pytest.mark.parametrize("case", ONLINE)
def test_devices_come_back_from_old_backups(case: str, folder: Path, towns: list[Town]) -> None:
    play(case, 2, folder, towns, backups=0.03)
    steps = list(LogReader(folder / "town" / "events.jsonl"))
    assert any(isinstance(step.event, Restored) for step in steps)
    assert any(isinstance(step.event, Trained) for step in steps)


def test_lost_offline_rounds_are_named(folder: Path, towns: list[Town]) -> None:
    """FedBCD-I: only the device knew how often it had trained. The deployment goes on, but its log
    cannot be put together.
    """
    with pytest.raises(RecordError, match=r"no log has the offline rounds that upload .* rests on"):
        play("fedbcd-i-async", 0, folder, towns, lost_disks=0.02)


@pytest.mark.parametrize("point", Failpoint)
def test_a_role_may_die_at_every_place(point: Failpoint, folder: Path, towns: list[Town]) -> None:
    """Each place again and again, in every role, and nothing else goes wrong."""
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 7, loss=0, repeat=0, death=0, give_up=0, fail=0.1, points=(point,))
    unkind.play(ROUNDS)
    unkind.calm()
    if point is not Failpoint.AFTER_SEND:  # of the process around a role
        assert town.stopped > 3
    town.replayed()
    check_history(folder / "town" / "events.jsonl")
