"""A server holds O(parameters), whatever the number of its devices; roles come back quickly;
nobody's disk grows for ever.
"""

import gc
import time
from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.protocol.messages import (
    DeviceLost,
    Mixed,
    Started,
    UpdateRequested,
    Uploaded,
    upload_ref,
)
from fedbcd.spec import RunSpec
from support.deployments import Town, Unkind, federation

ALGORITHM = fb.FedBCD(device_step=0.05, batch=4)


def lone_server(folder: Path, devices: int) -> tuple[ServerRole, Blueprint]:
    """One server of two, which hears from all its devices."""
    module, spec = federation().make_model(0), RunSpec(ALGORITHM, fb.AsyncCloud(first=1))
    blueprint = Blueprint.make(
        spec, devices, [[*range(devices)], [devices]], [12] * (devices + 1), module
    )
    role = ServerRole.open(FileStore(folder, begin=True), blueprint, 0)
    if role.machine.phase < 0:
        role.tell(Started(), 0.0)
    return role, blueprint


def phase(role: ServerRole, devices: int) -> None:
    """Every device uploads once, and the coordinator answers."""
    size, activation = role.blueprint.size_F, role.machine.phase
    for device in range(devices):
        role.receive(
            Letter(
                f"device/{device}",
                role.actor,
                UpdateRequested(device=device, activation=activation),
                None,
                0.0,
            ),
            1.0,
        )
        upload = Uploaded(
            device=device, activation=activation, model=upload_ref(device, activation, 0)
        )
        role.receive(
            Letter(f"device/{device}", role.actor, upload, torch.full((size,), device / 7), 0.0),
            1.0,
        )
    mixed = Mixed(phase=activation, iteration=0, model=f"w/{activation}/0")
    role.receive(Letter("coordinator", role.actor, mixed, torch.ones(size), 0.0), 1.0)


def bytes_of_tensors() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


@pytest.mark.parametrize("again", [False, True], ids=["running", "recovered"])
def test_the_memory_of_a_server_does_not_grow_with_its_devices(again: bool, folder: Path) -> None:
    held: list[float] = []
    for devices in (4, 120):
        before = bytes_of_tensors()
        role, blueprint = lone_server(folder / str(devices), devices)
        phase(role, devices)
        phase(role, devices)
        if again:
            role.close()
            role, blueprint = lone_server(folder / str(devices), devices)
        held.append((bytes_of_tensors() - before) / (4 * blueprint.size_F))
        role.close()
        del role, blueprint
    assert held[1] <= held[0] + 1
    assert held[1] < 10  # x(0) as a module and flat, z, the sum, one upload


def test_the_disk_of_a_server_holds_one_contribution_per_device(folder: Path) -> None:
    role, _ = lone_server(folder, 6)
    for _ in range(5):
        phase(role, 6)
    names = role.store.names()
    assert sorted(names) == sorted([*(f"x/{device}/4" for device in range(6)), "total", "z/0/5"])
    assert len(list((folder / "tensors").iterdir())) == len(names)
    role.close()


def test_a_model_that_a_lost_device_may_ask_for_is_kept(folder: Path) -> None:
    role, _ = lone_server(folder, 3)
    phase(role, 3)
    sent = role.z.clone()
    ask = Letter("device/2", role.actor, UpdateRequested(device=2, activation=1), None, 0.0)
    role.receive(ask, 1.0)
    role.tell(DeviceLost(device=2, activation=1), 1.0)
    role.machine.active = 1
    phase(role, 1)
    assert role.machine.model == "z/0/2"
    assert "z/0/1" in role.store.names()
    (letter,) = role.receive(ask, 1.0)
    assert letter.model is not None
    assert torch.equal(letter.model, sent)
    role.receive(
        Letter("device/2", role.actor, Uploaded(device=2, activation=1, model="x/2/1"), sent, 0.0),
        1.0,
    )
    assert "z/0/1" not in role.store.names()
    role.close()


def test_recovery_after_thousands_of_events_is_quick(folder: Path) -> None:
    role, _ = lone_server(folder, 50)
    for _ in range(40):
        phase(role, 50)
    expected, events = (role.z.clone(), role._sum.vector(), role.hello()), role.store.length
    role.close()
    began = time.process_time()
    role, _ = lone_server(folder, 50)
    seconds = time.process_time() - began
    assert events > 4000
    assert seconds < 5  # 0.1 s where it was measured
    assert torch.equal(role.z, expected[0])
    assert torch.equal(role._sum.vector(), expected[1])
    assert role.hello() == expected[2]
    role.close()


def test_no_store_grows_with_rounds_but_for_its_log(folder: Path, towns: list[Town]) -> None:
    town = Town(folder / "town", RunSpec(ALGORITHM, fb.AsyncCloud(first=2), active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 3)
    unkind.play(25)
    unkind.calm()
    for actor, role in town.roles.items():
        most = {"d": 3, "s": 2 + 3 + 3 + 3, "c": 3 + 3}[
            actor[0]
        ]  # x, x_prev, z; z, sum, held and granted; reports and answers
        assert len(role.store.names()) <= most, (actor, role.store.names())
        assert len(list((folder / "town" / actor / "tensors").iterdir())) == len(role.store.names())
