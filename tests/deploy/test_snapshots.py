"""A recovery from a snapshot and the events after it gives what a recovery from all events gives;
what does not fit is not used.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbcd.engines.deploy.roles import snapshot
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.protocol import Server
from fedbcd.protocol.messages import Started, UpdateRequested
from fedbcd.spec import RunSpec
from support.deployments import CASES, AnyRole, Town, Unkind, federation


def state(role: AnyRole) -> dict[str, Any]:
    """All that a role has, in memory and on disk."""
    packed: dict[str, Any] = json.loads(
        snapshot.take(role._parts(), role.store.length, role._clock.last)
    )
    tensors = {name: role.store.tensor(name).tolist() for name in sorted(role.store.names())}
    own = {name: getattr(role, name).tolist() for name in ("x", "prev", "z") if hasattr(role, name)}
    return packed | {
        "tensors": tensors,
        "own": own,
        "sum": role._sum.vector().tolist() if isinstance(role, ServerRole) else None,
    }


def without_snapshot(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.commit(facts={"snapshot": ""})
    store.close()


@pytest.mark.parametrize("case", [*CASES])
def test_recovered_from_a_snapshot_is_recovered_from_the_beginning(
    case: str, folder: Path, towns: list[Town]
) -> None:
    algorithm, cloud = CASES[case]
    town = Town(
        folder / "town", RunSpec(algorithm, cloud, active=1, joins={1: 1, 8: 1}), federation()
    )
    towns.append(town)
    unkind = Unkind(town, 3, changes=0.02)
    unkind.play(4)
    compared = 0
    for actor in town.actors:
        town.kill(actor)
        shutil.copytree(town.folder / actor, folder / "copy" / actor)
        without_snapshot(folder / "copy" / actor)
        compared += FileStore(town.folder / actor, read_only=True).facts.get("snapshot") is not None
        short, whole = (
            town._opened(actor, FileStore(place / actor))
            for place in (town.folder, folder / "copy")
        )
        try:
            assert state(short) == state(whole)
        finally:
            short.close()
            whole.close()
    assert compared > 1


def short_life(folder: Path, towns: list[Town]) -> Town:
    town = Town(folder / "town", RunSpec(*CASES["fedbcd-async"], active=2), federation())
    towns.append(town)
    Unkind(town, 5).play(8)
    return town


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data | {"version": 2},
        lambda data: data | {"number": 10_000},
        lambda data: data | {"state": {"machine": data["state"]["machine"]}},
        lambda data: data["state"]["machine"].pop("phase") and data,
        lambda data: data["state"]["machine"].update(state={"state": "NOWHERE"}) or data,
        lambda data: data["state"]["machine"].update(_last={"heap": []}) or data,
        lambda _: [],
    ],
    ids=["version", "ahead", "parts", "attributes", "state", "kind", "no object"],
)
def test_a_snapshot_of_another_form_is_not_used(
    change: Callable[[Any], Any], folder: Path, towns: list[Town]
) -> None:
    town = short_life(folder, towns)
    expected = state(town.restart("server/0"))
    town.kill("server/0")
    store = FileStore(town.folder / "server/0")
    store.commit(facts={"snapshot": json.dumps(change(json.loads(store.facts["snapshot"])))})
    store.close()
    assert state(town.open("server/0")) == expected


def test_nothing_but_plain_state_can_be_in_a_snapshot() -> None:
    machine = Server(0, [0, 1], 1)
    machine.handle(Started())
    machine.handle(UpdateRequested(device=1, activation=0))
    other = Server(0, [0, 1], 1)
    parts: Callable[[Server], snapshot.Parts] = lambda m: {"machine": (m, snapshot.names_of(m))}  # noqa: E731
    assert snapshot.put_back(parts(other), snapshot.take(parts(machine), 2, 0.5), 2) == (2, 0.5)
    assert vars(other) == vars(machine)
    machine.model = torch.zeros(1)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a Tensor cannot be part of a snapshot"):
        snapshot.take(parts(machine), 2, 0.5)


def test_a_recovery_handles_no_more_events_than_lie_between_two_snapshots(
    folder: Path, towns: list[Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    town = short_life(folder, towns)
    handled: list[int] = []
    whole = Role._recover

    def counted(role: Role) -> None:
        apply = role._apply
        seen: list[int] = []
        role._apply = lambda number, *step: seen.append(number) or apply(number, *step)  # type: ignore
        whole(role)
        handled.append(len(seen))

    monkeypatch.setattr(Role, "_recover", counted)
    lengths = [town.restart(actor).store.length for actor in town.actors]
    assert max(lengths) > 2 * Role.SNAPSHOT_EVERY
    assert max(handled) < Role.SNAPSHOT_EVERY
