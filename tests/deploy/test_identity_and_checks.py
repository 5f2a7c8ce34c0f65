"""Who is who, and what is turned down: a refused letter is named and has changed nothing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.blueprint import Blueprint, OwnData
from fedbcd.engines.deploy.roles.checks import TrustLimits
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import (
    ConfigError,
    DataError,
    LocalProtocolError,
    ProtocolError,
    RecordError,
    Refused,
)
from fedbcd.protocol import DeviceState
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    DeviceLeft,
    GlobalUpdated,
    Isolated,
    Mixed,
    Restored,
    RetryDue,
    ServerReady,
    Started,
    Trained,
    UpdateRequested,
    Uploaded,
    Woke,
)
from fedbcd.spec import RunSpec
from support.deployments import CASES, Town, Unkind, federation


@pytest.fixture
def town(folder: Path, towns: list[Town]) -> Town:
    """Async-cloud; every device has finished some activations, and nothing is on its way."""
    found = Town(folder / "town", RunSpec(*CASES["fedbcd-async"], active=2), federation())
    towns.append(found)
    Unkind(found, 0, loss=0, repeat=0, death=0, fail=0, give_up=0).play(6)
    found.drain()
    return found


def device(town: Town, number: int = 0) -> DeviceRole:
    role = town.roles[f"device/{number}"]
    assert isinstance(role, DeviceRole)
    return role


def server(town: Town, number: int = 0) -> ServerRole:
    role = town.roles[f"server/{number}"]
    assert isinstance(role, ServerRole)
    return role


def hello_of(town: Town, number: int = 0, **changes: Any) -> dict[str, Any]:
    return device(town, number).hello() | changes


# ------------------------------------------------------------------------------------------------
# identity
def test_a_device_that_went_on_where_it_was_is_left_alone(town: Town) -> None:
    town.restart("device/0")
    assert town.post == []
    assert not server(town).machine.is_restoring(0)


def test_a_device_whose_disk_was_lost_gets_its_last_contribution_back(town: Town) -> None:
    before, contributed = device(town).machine.activation, device(town).kept["x"].clone()
    assert before > 0
    Unkind(town, 0).lose_disk("device/0")
    town.drain()
    machine = device(town).machine
    assert (machine.activation, machine.incarnation, machine.session) == (before, 1, 1 << 32)
    assert torch.equal(device(town).kept["x"], contributed)
    assert torch.equal(device(town).kept["x_prev"], contributed[: town.blueprint.size_P])
    assert not server(town).machine.is_restoring(0)
    town.restart("device/0")
    assert town.post == []
    town.replayed()


def test_a_device_from_an_old_backup_is_recognised_by_its_counter(town: Town) -> None:
    here = device(town).machine.activation
    letters = server(town).greet("device/0", hello_of(town, activation=here - 1), town.tick())
    assert [type(letter.event) for letter in letters] == [Restored]
    event = letters[0].event
    assert isinstance(event, Restored)
    assert event.activation == here


def test_a_device_whose_acknowledgement_was_lost_is_in_step(town: Town) -> None:
    here = device(town).machine.activation
    assert (
        server(town).greet(
            "device/0", hello_of(town, activation=here - 1, uploading=True), town.tick()
        )
        == []
    )


def test_a_device_that_dials_while_it_is_acknowledged_is_in_step(town: Town) -> None:
    """Its hello is made beside the role's thread: what it says of before and after the
    acknowledgement must not read as an old backup.
    """
    assert server(town).greet("device/0", hello_of(town, uploading=True), town.tick()) == []
    role = device(town)
    machine, reads = role.machine, list[str]()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            reads.append(name)
            return getattr(machine, name)

    role.machine = Watched()  # type: ignore[assignment]
    role.hello()
    role.machine = machine
    assert reads.index("state") < reads.index("activation")


@pytest.mark.parametrize("store", [{}, {"store": "another"}], ids=["known", "unknown"])
def test_a_server_refuses_a_device_that_is_ahead_of_it(store: dict[str, str], town: Town) -> None:
    """Whatever is put in step now would lose what was acknowledged: the server's store is an old
    one.
    """
    here, length = device(town).machine.activation, server(town).store.length
    for ahead, words in (
        (
            {"activation": here + 1},
            (
                rf"has finished {here + 1} activations .* server/0 knows of {here} and 0: its store"
                r" is empty or an old one"
            ),
        ),
        ({"incarnation": 1}, "was put in step 1 times"),
    ):
        with pytest.raises(Refused, match=words) as refused:
            server(town).greet("device/0", hello_of(town, **ahead, **store), town.tick())
        assert refused.value.reason == "ahead"
    assert server(town).store.length == length
    assert not server(town).machine.is_restoring(0)


def new_server(town: Town, folder: Path) -> ServerRole:
    return ServerRole.open(FileStore(folder / "new", begin=True), town.blueprint, 0)


def test_a_server_with_an_empty_store_refuses_those_that_have_a_history_and_serves_nobody(
    town: Town, folder: Path
) -> None:
    empty = new_server(town, folder)
    with pytest.raises(
        Refused,
        match=r"its store is empty or an old one\. Put the newest store of server/0 back",
    ):
        empty.greet("device/0", hello_of(town), 0.0)
    fresh = {"activation": 0, "uploading": False}
    assert empty.greet("device/0", hello_of(town, **fresh), 0.0) == []
    assert (
        empty.greet("device/0", hello_of(town, **fresh, store="another"), 0.0) == []
    )  # it lost a disk on which nothing had happened
    with pytest.raises(
        LocalProtocolError, match=r"cannot handle UpdateRequested.* while not started"
    ):
        empty.receive(
            Letter("device/0", "server/0", UpdateRequested(device=0, activation=0), None, 0.0), 0.0
        )
    empty.welcome(1.0)
    assert (empty.machine.phase, empty.store.length) == (0, 1)
    assert empty.welcome(2.0) == []  # once is enough
    assert empty.store.length == 1
    empty.close()


def test_a_device_keeps_its_model_where_a_server_would_put_an_older_one_in_its_place(
    town: Town,
) -> None:
    """As a server of another version might that has lost its store. One that knows as much, or
    more, may.
    """
    role = device(town)
    here, x, length = role.machine.activation, role.kept["x"], role.store.length
    assert here > 0
    old = Restored(incarnation=1, activation=here - 1, session=1 << 32, model="z/0/0")
    words = (
        f"server/0 wants to put device/0 back to activation {here - 1}, but has acknowledged {here}"
    )
    with pytest.raises(Refused, match=words) as refused:
        role.receive(
            Letter("server/0", "device/0", old, torch.zeros(650), town.tick()), town.tick()
        )
    assert refused.value.reason == "older"
    assert (role.kept["x"] is x, role.store.length, role.machine.incarnation) == (True, length, 0)
    newer = replace(old, activation=here + 1)
    role.receive(Letter("server/0", "device/0", newer, torch.zeros(650), town.tick()), town.tick())
    assert (role.machine.activation, role.machine.incarnation) == (here + 1, 1)
    role.receive(
        Letter("server/0", "device/0", old, torch.ones(650), town.tick()), town.tick()
    )  # a late copy is only answered
    assert torch.equal(role.kept["x"], torch.zeros(650))


def test_who_does_not_belong_here_is_refused(town: Town) -> None:
    for guest in ("device/8", "device/99"):
        with pytest.raises(Refused, match=f"{guest} is no member of server/0"):
            server(town).greet(guest, hello_of(town), town.tick())
    town.tell("server/0", DeviceLeft(device=0))
    with pytest.raises(Refused, match="device/0 is no member"):
        server(town).greet("device/0", hello_of(town), town.tick())


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"store": "a"},
        {"store": "a", "activation": "many", "incarnation": 0, "uploading": False},
    ],
)
def test_a_hello_that_says_too_little_is_refused(hello: dict[str, Any], town: Town) -> None:
    with pytest.raises(Refused, match="does not say how far it is"):
        server(town).greet("device/0", {"run": device(town).hello()["run"], **hello}, town.tick())
    with pytest.raises(Refused, match="belongs to a deployment with other settings"):
        server(town).greet("device/0", hello, town.tick())


IMPOSSIBLE = [
    *({"activation": value} for value in (math.inf, math.nan, -1, 1.0, True, "1", [1], 1 << 60)),
    *({"incarnation": value} for value in (math.inf, None)),
    *({"store": value} for value in ("", "a" * 65, "../../x", 5)),
    {"uploading": "yes"},
]


def test_a_hello_that_cannot_be_true_is_refused_and_breaks_nothing(town: Town) -> None:
    """Infinity is a number in Python's JSON; the server must not stumble over it."""
    for lie in IMPOSSIBLE:
        with pytest.raises(Refused, match="does not say how far it is"):
            server(town).greet("device/0", hello_of(town, **lie), town.tick())
    assert server(town).greet("device/0", hello_of(town), town.tick()) == []
    coordinator = town.roles["coordinator"]
    assert isinstance(coordinator, CoordinatorRole)
    for lie in (
        {"phase": math.inf},
        {"phase": -2},
        {"phase": True},
        {"store": "a b"},
        {"store": None},
    ):
        with pytest.raises(Refused, match="does not say how far it is"):
            coordinator.greet("server/0", server(town).hello() | lie, town.tick())


def test_a_server_that_lost_its_store_or_has_an_old_one_is_refused(town: Town) -> None:
    coordinator = town.roles["coordinator"]
    assert isinstance(coordinator, CoordinatorRole)
    hello = server(town).hello()
    assert coordinator.greet("server/0", hello, town.tick()) == []
    with pytest.raises(Refused, match="server/0 comes with another store than before"):
        coordinator.greet("server/0", hello | {"store": "new"}, town.tick())
    with pytest.raises(Refused, match="server/0 is in phase -1, but has reported phase"):
        coordinator.greet("server/0", hello | {"phase": -1}, town.tick())
    with pytest.raises(
        Refused,
        match=(
            r"server/0 is in phase 99, but phase \d+ is the latest .*: its store is empty or an"
            r" old one"
        ),
    ) as refused:
        coordinator.greet("server/0", hello | {"phase": 99}, town.tick())
    assert refused.value.reason == "ahead"
    with pytest.raises(Refused, match="does not say how far it is"):
        coordinator.greet("server/0", {"run": hello["run"]}, town.tick())
    with pytest.raises(Refused, match="there is no server/3; this deployment has 3 servers"):
        coordinator.greet("server/3", hello, town.tick())


def test_a_server_is_known_by_its_store_from_its_welcome_on(town: Town, folder: Path) -> None:
    """It may have served its devices since, though it has reported nothing yet."""
    coordinator = CoordinatorRole.open(FileStore(folder / "new", begin=True), town.blueprint)
    hello = server(town).hello() | {"phase": -1, "iteration": 0}
    coordinator.check_guest("server/0", hello)
    assert coordinator.store.facts.get("store/0") is None  # to check is not to welcome
    assert coordinator.greet("server/0", hello, town.tick()) == []
    with pytest.raises(
        Refused, match="what its devices have contributed is in the old one: put that back"
    ):
        coordinator.greet("server/0", hello | {"store": "new"}, town.tick())
    coordinator.close()


def test_a_store_belongs_to_one_role_of_one_run(town: Town, folder: Path) -> None:
    town.kill("device/0")
    store = FileStore(folder / "town" / "device" / "0")
    with pytest.raises(RecordError, match="this store belongs to device/0, not to server/0"):
        ServerRole.open(store, town.blueprint, 0)
    other = Blueprint.of(replace(town.spec, seed=9), town.federation)
    with pytest.raises(RecordError, match="belongs to a run with other settings"):
        DeviceRole.open(store, other, 0, OwnData.of(town.federation, 0, 9))
    store.close()


def test_a_store_goes_on_with_its_own_settings_where_the_job_says_nothing(folder: Path) -> None:
    """Whatever the defaults are by then; what the job says otherwise is another run, and the store
    names the difference.
    """
    began, spec = (
        fb.FedBCD(batch=4, penalty=0.5, projection=fb.Box(-0.01, 0.01)),
        RunSpec(fb.FedBCD(batch=4), active=2),
    )
    here = federation()
    for algorithm in (began, spec.algorithm):
        store = FileStore(folder / "device", begin=True)
        role = DeviceRole.open(
            store,
            Blueprint.of(replace(spec, algorithm=algorithm), here),
            0,
            OwnData.of(here, 0, 0),
        )
        assert role.blueprint.algorithm == began
        assert float(role.kept["x"].abs().max()) == pytest.approx(0.01)
        role.close()
    store = FileStore(folder / "device")
    for said in (fb.FedBCD(batch=4, penalty=2.0), fb.FedBCD(batch=4, projection=fb.NoProjection())):
        with pytest.raises(
            RecordError,
            match=r"with other settings \(algorithm\.(penalty: 0\.5 there, 2\.0 here|projection)",
        ):
            DeviceRole.open(
                store,
                Blueprint.of(replace(spec, algorithm=said), here),
                0,
                OwnData.of(here, 0, 0),
            )
    store.close()


def test_data_of_another_size_than_declared_are_refused(town: Town, folder: Path) -> None:
    data = OwnData.of(town.federation, 1, 0)
    short = replace(
        data, samples=type(data.samples)(data.samples.inputs[:5], data.samples.targets[:5])
    )
    store = FileStore(folder / "short", begin=True)
    with pytest.raises(DataError, match="device 1 has 5 samples, but the deployment counts on 12"):
        DeviceRole.open(store, town.blueprint, 1, short)
    store.close()


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"storage": torch.bfloat16}])
def test_other_dtypes_than_float32_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a deployment computes and stores float32 only"):
        Blueprint.of(replace(RunSpec(*CASES["fedbcd-sync"]), **change), federation())


# ------------------------------------------------------------------------------------------------
# checks
GOOD = torch.zeros(650)
UPLOADED = Uploaded(device=0, activation=0, model="x/0/0")


def _letters() -> list[tuple[str, Letter, str]]:
    bad = GOOD.clone()
    bad[3] = float("nan")
    upload = Letter("device/0", "server/0", UPLOADED, GOOD, 0.0)
    return [
        ("address", replace(upload, to="server/1"), "a letter for server/1 to server/0"),
        ("identity", replace(upload, sender="device/1"), "which only device/0 may say"),
        (
            "identity",
            Letter("device/0", "server/0", Mixed(phase=0, iteration=0, model="w/0/0"), GOOD, 0.0),
            "only coordinator may say",
        ),
        (
            "identity",
            Letter("server/1", "server/0", Isolated(phase=0), None, 0.0),
            "only coordinator may say",
        ),
        ("event", replace(upload, event=Woke()), "which takes no Woke from the network"),
        ("event", replace(upload, event=Started()), "takes no Started"),
        ("event", replace(upload, event=Trained(activation=0, steps=1)), "takes no Trained"),
        (
            "range",
            replace(upload, event=replace(UPLOADED, activation=-1)),
            "activation=-1; it must be from 0 to 2",
        ),
        (
            "range",
            replace(upload, event=replace(UPLOADED, activation=1 << 60)),
            "activation=1152921504606846976",
        ),
        ("clock", replace(upload, clock=float("inf")), "the letter was sent at inf"),
        ("clock", replace(upload, clock=float("nan")), "the letter was sent at nan"),
        ("model", replace(upload, model=None), "the letter has no model; 650 values"),
        ("shape", replace(upload, model=GOOD[:-1]), r"shape \(649,\).*must be \(650,\)"),
        ("shape", replace(upload, model=GOOD.double()), "of torch.float64"),
        ("shape", replace(upload, model=GOOD[None]), r"shape \(1, 650\)"),
        ("finite", replace(upload, model=bad), "value 3 of the model is nan"),
    ]


@pytest.mark.parametrize(("reason", "letter", "words"), _letters())
def test_what_cannot_be_used_is_refused_and_changes_nothing(
    reason: str, letter: Letter, words: str, town: Town
) -> None:
    role = server(town)
    before = (role.store.length, role.z.clone(), role.hello(), role.store.names())
    with pytest.raises(Refused, match=words) as refused:
        role.receive(letter, town.now)
    assert refused.value.reason == reason
    after = (role.store.length, role.z, role.hello(), role.store.names())
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]


def test_what_the_machine_refuses_changes_nothing(town: Town) -> None:
    role = server(town)
    length, names = role.store.length, role.store.names()
    for letter in (
        Letter(
            "device/0", "server/0", Uploaded(device=0, activation=77, model="x/0/77"), GOOD, 0.0
        ),
        Letter("device/0", "server/0", UpdateRequested(device=0, activation=77), None, 0.0),
        Letter("coordinator", "server/0", GlobalUpdated(phase=77, model="z/78"), GOOD, 80_000.0),
    ):
        with pytest.raises(ProtocolError):
            role.receive(letter, town.now)
    assert (role.store.length, role.store.names()) == (length, names)
    town.tell("server/0", DeviceLeft(device=0))
    *_, step = role.store.transitions()
    assert step.time < 100  # what was refused has not moved the clock either


def test_a_device_listens_to_its_own_server_only(town: Town) -> None:
    for event in (Activated(activation=0, model="z/1/0"), Acknowledged(activation=0)):
        with pytest.raises(Refused, match="only server/0 may say"):
            device(town).receive(Letter("server/1", "device/0", event, GOOD, 0.0), town.now)


def test_sums_are_checked_as_sums(folder: Path) -> None:
    """Sync-cloud: one float64 vector, one longer than a model; the norm bound is for the mean of
    which it is the sum.
    """
    blueprint = Blueprint.of(RunSpec(*CASES["fedbcd-sync"], active=2), federation())
    coordinator = CoordinatorRole.open(
        FileStore(folder, begin=True), blueprint, TrustLimits(norm=20.0, beyond_norm="refuse")
    )
    ready = Letter(
        "server/0",
        "coordinator",
        ServerReady(server=0, phase=0, iteration=0, model="s/0/0"),
        GOOD,
        0.0,
    )
    with pytest.raises(Refused, match=r"must be \(651,\) of torch.float64"):
        coordinator.receive(ready, 1.0)
    with pytest.raises(Refused, match=r"the model has norm 25\.4951, above the bound 20"):
        coordinator.receive(replace(ready, model=torch.ones(651, dtype=torch.float64)), 1.0)
    third = torch.cat(
        [torch.ones(650, dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)]
    )
    assert coordinator.receive(replace(ready, model=third), 1.0) == []
    coordinator.close()


def test_a_norm_beyond_the_bound_is_remarked_on_or_refused(town: Town) -> None:
    role, said = server(town), list[tuple[str, str]]()
    role.warn = lambda peer, sentence: said.append((peer, sentence))
    letter = Letter("device/0", "server/0", UPLOADED, torch.ones(650), 0.0)
    role.limits = TrustLimits(norm=2.0)
    role.receive(letter, town.tick())  # a late copy, so it is acknowledged
    assert said == [("device/0", "the model has norm 25.4951, above the bound 2")]
    role.limits = TrustLimits(norm=2.0, beyond_norm="refuse")
    with pytest.raises(Refused, match=r"the model has norm 25\.4951, above the bound 2"):
        role.receive(letter, town.tick())


@pytest.mark.parametrize(
    "wrong", [{"norm": 0.0}, {"norm": float("inf")}, {"beyond_norm": "ignore"}, {"reach": 0.0}]
)
def test_limits_that_cannot_be_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrustLimits(**wrong)


def test_events_of_the_network_cannot_be_told(town: Town) -> None:
    with pytest.raises(LocalProtocolError, match="device/0 cannot be told"):
        device(town).tell(Acknowledged(activation=0), 0.0)


def test_to_say_it_again_leaves_no_trace(town: Town) -> None:
    length = device(town).store.length
    for _ in range(3):
        town.tell("device/0", RetryDue())
    assert device(town).store.length == length


def test_work_that_was_overtaken_is_left_out(town: Town) -> None:
    """The server puts a device in step while it trains in another thread."""
    role = device(town)
    while role.machine.state is not DeviceState.TRAINING:
        town.tell("device/0", Woke())
        for other in range(9):
            town.tell(f"device/{other}", Woke())
        town.drain()
        for other in range(1, 9):
            town.work(f"device/{other}")
        town.drain()
    done = role.compute()
    machine = server(town).machine
    last = machine.last_of(0)
    assert last is not None
    restored = Restored(incarnation=1, activation=last + 1, session=1 << 32, model=f"x/0/{last}")
    role.receive(Letter("server/0", "device/0", restored, GOOD, town.now), town.tick())
    assert role.work is None
    assert role.finish(done, town.tick()) == []
    assert torch.equal(role.kept["x"], GOOD)
