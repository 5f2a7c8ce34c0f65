"""What one device, or one server, can do to the models of all others: nothing, by an upload or a
report that is out of range.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbcd as fb
from faultsim.world import spoilt
from fedbcd.algorithm.interpret import Registers
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.checks import TrustLimits, check_reach, check_weight, check_within
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import NumericalError, Refused
from fedbcd.protocol import DeviceState
from fedbcd.protocol.messages import (
    Absorb,
    Acknowledged,
    Activated,
    Declined,
    DeviceJoined,
    DeviceLeft,
    Failed,
    OfflineDue,
    Restored,
    RetryDue,
    Send,
    ServerReady,
    Trained,
    Uploaded,
    Withdrawn,
    Woke,
)
from fedbcd.record.eventlog import LogReader
from fedbcd.spec import RunSpec
from support.deployments import BCD, BCDI, Town, Unkind, federation
from support.timelines import check_timeline

FREE = fb.NoProjection()
BOXED = replace(BCD, projection=fb.Box())
ASYNC = fb.AsyncCloud(first=1)


def town_of(
    folder: Path,
    towns: list[Town],
    algorithm: fb.Algorithm,
    cloud: fb.Cloud = ASYNC,
    active: int = 2,
    **more: Any,
) -> Town:
    town = Town(
        folder / "town",
        RunSpec(
            algorithm,
            cloud,
            active=active,
            joins=more.pop("joins", {}),
            uploads=more.pop("uploads", ()),
        ),
        federation(),
        **more,
    )
    towns.append(town)
    town.start()
    return town


def device(town: Town, number: int = 0) -> DeviceRole:
    role = town.roles[f"device/{number}"]
    assert isinstance(role, DeviceRole)
    return role


def server(town: Town, number: int = 0) -> ServerRole:
    role = town.roles[f"server/{number}"]
    assert isinstance(role, ServerRole)
    return role


def to_training(town: Town, number: int = 0) -> None:
    """Until the device has been let in; phases that are in the way are played."""
    for _ in range(20):
        town.tell(f"device/{number}", Woke())
        town.drain()
        if device(town, number).machine.state is DeviceState.TRAINING:
            return
        for other in server(town).machine.members:
            if other != number:
                activation(town, other)
    raise AssertionError("it was never let in")


def activation(town: Town, number: int) -> None:
    town.tell(f"device/{number}", Woke())
    town.drain()
    town.work(f"device/{number}")
    town.drain()


def play_phase(town: Town) -> None:
    for number in server(town).machine.members:
        activation(town, number)


def upload(town: Town, number: int, x: Tensor) -> None:
    """The device ends its work with this model, whatever it has computed."""
    role = device(town, number)
    done = role.compute()
    done = replace(done, kept={**done.kept, "x": x}, upload=x)
    town.do(role.actor, lambda: role.finish(done, town.tick()))


def state(role: DeviceRole) -> tuple[Any, ...]:
    return (
        role.machine.activation,
        role.machine.state,
        *(vector.tolist() for vector in role.kept.values()),
    )


# ------------------------------------------------------------------------------------------------
# an upload that is refused
@pytest.mark.parametrize("crash", ["", "device/0", "server/0"])
@pytest.mark.parametrize(
    ("projection", "reason", "words"),
    [(fb.Box(), "outside", "value 3 of the model is 1e"), (FREE, "far", "reach_limit")],
)
def test_an_upload_out_of_range_is_undone_and_the_device_goes_on(
    projection: fb.Projection, reason: str, words: str, crash: str, folder: Path, towns: list[Town]
) -> None:
    town = town_of(folder, towns, replace(BCD, projection=projection))
    activation(town, 0)
    to_training(town)
    role, home = device(town), server(town)
    before, z, total = state(role), home.z.clone(), home._sum.total.clone()
    bad = role.kept["x"].clone()
    bad[3] = 1e30
    upload(town, 0, bad)
    if crash == "device/0":
        town.restart(crash)
    town.tell("device/0", RetryDue())
    town.deliver(town.post.pop(0))
    if crash == "server/0":
        town.restart(crash)  # its answer is lost with it
        town.tell("device/0", RetryDue())
    town.drain()
    assert {failed.reason for failed in town.declined} == {reason}
    assert words in str(town.declined[0])
    role, home = device(town), server(town)
    assert state(role) == (before[0] + 1, DeviceState.IDLE, *before[2:])
    assert home.machine.last_of(0) == before[0]
    assert torch.equal(home.z, z)
    assert torch.equal(home._sum.total, total)
    town.restart("device/0")
    assert state(device(town)) == (before[0] + 1, DeviceState.IDLE, *before[2:])
    assert {"before/x", "before/x_prev"}.isdisjoint(device(town).store.names())
    to_training(town)
    town.work("device/0")
    town.drain()
    assert device(town).machine.activation == before[0] + 2
    assert len(town.declined) <= 3  # copies
    sessions = [
        c.session
        for step in device(town).store.transitions()
        for c in step.commands
        if hasattr(c, "session")
    ]
    assert len({*sessions}) == len(sessions)
    town.replayed()


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (lambda m: m.index_fill(0, torch.tensor([3]), 2**31 - 1), "range", "integers are at most"),
        (lambda m: m.index_fill(0, torch.tensor([0]), -(2**31)), "range", "value 0 of the upload"),
        (lambda m: m.long(), "shape", "it must be (650,) of torch.int32"),
        (lambda m: m.float(), "shape", "torch.float32; it must be"),
        (lambda m: m[:9], "shape", "shape (9,)"),
    ],
)
def test_integers_that_cannot_be_are_refused_and_leave_nothing(
    spoil: Callable[[Tensor], Tensor], reason: str, words: str, folder: Path, towns: list[Town]
) -> None:
    town = town_of(folder, towns, BCD, uploads=(fb.Integers(),))
    activation(town, 0)
    to_training(town)
    role, total = device(town), server(town)._sum.total.clone()
    before, done = state(role), role.compute()
    assert done.upload is not None
    done = replace(done, upload=spoil(done.upload))
    town.do(role.actor, lambda: role.finish(done, town.tick()))
    town.drain()
    assert [failed.reason for failed in town.declined] == [reason]
    assert words in str(town.declined[0])
    assert state(role) == (before[0] + 1, DeviceState.IDLE, *before[2:])
    assert torch.equal(server(town)._sum.total, total)
    play_phase(town)
    town.replayed()


@pytest.mark.parametrize(("value", "reason"), [(1e300, "finite"), (float("nan"), "finite")])
def test_a_contribution_that_is_no_model_does_not_replace_one(
    value: float, reason: str, folder: Path, towns: list[Town]
) -> None:
    """Finite in float64, but no model in float32; and none at all."""
    town = town_of(folder, towns, BCD, uploads=(fb.Integers(),))
    activation(town, 0)
    role = device(town)
    before = state(role)
    restored = Restored(incarnation=1, activation=1, session=1 << 32, model="x/0/0")
    given = torch.full((650,), value, dtype=torch.float64)
    with pytest.raises(Refused) as refused:
        role.receive(Letter("server/0", role.actor, restored, given, town.now), town.tick())
    assert refused.value.reason == reason
    assert state(role) == before


def test_the_first_activation_is_undone_to_the_start(folder: Path, towns: list[Town]) -> None:
    town = town_of(folder, towns, BOXED)
    to_training(town)
    upload(town, 0, torch.full((650,), 3.0))
    town.restart("device/0")
    town.tell("device/0", RetryDue())
    town.drain()
    assert torch.equal(device(town).kept["x"], town.blueprint.start)
    town.replayed()


@pytest.mark.parametrize(
    "cloud", [fb.SyncCloud(), ASYNC, fb.RigorousCloud(first=3)], ids=lambda cloud: cloud.name
)
def test_rounds_go_on_beside_a_device_whose_uploads_are_all_refused(
    cloud: fb.Cloud, folder: Path, towns: list[Town]
) -> None:
    """All members are to be active, so every phase would wait for it. It is refused once a phase,
    no more.
    """
    town = town_of(folder, towns, replace(BCD, projection=FREE), cloud, active=3)
    for _ in range(4):
        for number in range(9):
            town.tell(f"device/{number}", Woke())
        town.drain()
        for number in range(9):
            if number == 0 and device(town).work is not None:
                upload(town, 0, torch.full((650,), -1e30))
            else:
                town.work(f"device/{number}")
        town.drain()
    phases = [server(town, n).machine.phase for n in range(3)]
    assert min(phases) == 4
    assert len(town.declined) == 4
    assert all(float(server(town, n).z.abs().max()) < 1 for n in range(3))
    town.replayed()


def test_a_baseline_starts_from_z_again(folder: Path, towns: list[Town]) -> None:
    town = town_of(
        folder, towns, fb.FedAvg(device_step=0.05, batch=4, projection=FREE), fb.SyncCloud()
    )
    to_training(town)
    upload(town, 0, torch.full((650,), 1e30))
    town.drain()
    assert [failed.reason for failed in town.declined] == ["far"]
    for _ in range(3):
        for number in range(9):
            activation(town, number)
    assert town.rounds >= 2
    assert float(server(town).z.abs().max()) < 1
    town.replayed()


def test_what_0_1_0_was_uploading_when_it_was_stopped_is_left_as_it_is(
    folder: Path, towns: list[Town]
) -> None:
    """It had set nothing aside."""
    town = town_of(folder, towns, BOXED)
    to_training(town)
    upload(town, 0, torch.full((650,), 3.0))
    role = device(town)
    for name in ("before/x", "before/x_prev"):
        role.store.drop(name)
    role.store.commit()
    town.drain()
    assert role.machine.state is DeviceState.IDLE
    assert float(role.kept["x"][0]) == 3.0


def test_a_device_that_is_put_in_step_gets_its_last_contribution_not_what_was_refused(
    folder: Path, towns: list[Town]
) -> None:
    town = town_of(folder, towns, BOXED)
    activation(town, 0)
    good = device(town).kept["x"].clone()
    to_training(town)
    upload(town, 0, torch.full((650,), 3.0))
    town.drain()
    Unkind(town, 0).lose_disk("device/0")
    town.drain()
    assert torch.equal(device(town).kept["x"], good)
    assert device(town).machine.activation == 2
    activation(town, 0)
    town.replayed()


# ------------------------------------------------------------------------------------------------
# honest devices pass
class Line(nn.Module):
    """Linear regression from far away."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        for tensor in self.layer.parameters():
            nn.init.constant_(tensor, at)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


def regression(start: float, goal: float) -> fb.Federation:
    """Nine devices whose own best weights are spread around `goal`."""
    chance = torch.Generator().manual_seed(0)
    data = []
    for number in range(9):
        inputs = torch.randn(12, 3, generator=chance)
        weights = goal * (1 + 0.1 * torch.randn(3, generator=chance))
        data.append((inputs, (inputs @ weights + goal + number)[:, None]))
    return fb.Federation(lambda: Line(start), nn.functional.mse_loss, data, servers=3)


@pytest.mark.parametrize(
    ("start", "goal"), [(0.0, 1e6), (0.0, 1e-6), (1e6, 0.0), (-1e6, 1e6), (1e12, 0.0)]
)
@pytest.mark.parametrize(
    "algorithm",
    [
        fb.FedBCD(device_step=0.2, batch="all", projection=FREE),
        fb.FedBCDI(device_step=0.2, batch="all", projection=FREE),
        fb.FedProx(device_step=0.2, batch="all", penalty=1.0, projection=FREE),
        fb.FedAvg(device_step=0.4, batch="all", projection=FREE),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_honest_training_from_far_away_is_never_refused(
    algorithm: fb.Algorithm, start: float, goal: float, folder: Path, towns: list[Town]
) -> None:
    """Nor to far away: the bound is relative to z_n, and where that is small, to entries of
    size 1.
    """
    town = Town(
        folder / "town", RunSpec(algorithm, fb.SyncCloud(), active=2), regression(start, goal)
    )
    towns.append(town)
    Unkind(town, 0, loss=0, repeat=0, death=0, fail=0, give_up=0).play(6)
    assert town.declined == []
    assert town.refused == []


@pytest.mark.parametrize(
    "projection", [fb.Box(-0.1, 0.1), fb.Ball(0.3), fb.Simplex(0.7)], ids=lambda p: p.name
)
def test_honest_models_on_the_boundary_of_x_are_never_refused(
    projection: fb.Projection, folder: Path, towns: list[Town]
) -> None:
    """Neither devices', which are projected in float32, nor servers', which are means of those."""
    algorithm = fb.FedBCD(device_step=5.0, batch="all", projection=projection, server_step=1.0)
    for number, cloud in enumerate((fb.SyncCloud(), ASYNC)):
        town = Town(folder / str(number), RunSpec(algorithm, cloud, active=3), federation())
        towns.append(town)
        Unkind(town, 0, loss=0, repeat=0, death=0, fail=0, give_up=0).play(8)
        assert town.declined == []
        assert town.refused == []


def test_the_rounding_allowance_is_no_more_than_rounding() -> None:
    x = torch.full((1000,), 2.0)
    check_within(x, fb.Box())
    with pytest.raises(
        Refused,
        match=(
            r"value 7 of the model is 2\.001, outside of the set X of this run, Box\(low=-2\.0, .*"
            r" by 0\.00099"
        ),
    ):
        check_within(torch.where(torch.arange(1000) == 7, 2.001, x), fb.Box())
    ball = fb.Ball(1.0)
    check_within(ball.project(torch.randn(1000)), ball)
    with pytest.raises(Refused, match="outside of the set X"):
        check_within(1.0001 * ball.project(torch.randn(1000)), ball)


def test_the_reach_is_relative_to_z_and_to_entries_of_size_one() -> None:
    near, limits = torch.zeros(100), TrustLimits(reach=10.0)
    check_reach(torch.full((100,), 9.9), near, limits)
    with pytest.raises(
        Refused,
        match=(
            r"the model is 101 away .* deploy.reach_limit = 10 allows 100; check the data .* or"
            r" raise the limit"
        ),
    ):
        check_reach(torch.full((100,), 10.1), near, limits)
    check_reach(torch.full((100,), 900.0), torch.full((100,), 100.0), limits)
    check_reach(torch.full((100,), 1e38), near, TrustLimits(reach=float("inf")))
    with pytest.raises(Refused, match="away from the model"):
        check_reach(torch.full((100,), 1e30), near, TrustLimits())


# ------------------------------------------------------------------------------------------------
# dismissals
@pytest.mark.parametrize("cloud", [fb.SyncCloud(), ASYNC], ids=lambda cloud: cloud.name)
def test_after_a_dismissal_nothing_of_the_device_is_left_in_the_sum(
    cloud: fb.Cloud, folder: Path, towns: list[Town]
) -> None:
    """With the bound switched off: 1e30 wipes what the others contribute from a float64. Their
    copies are still there.
    """
    town = town_of(
        folder,
        towns,
        replace(BCD, projection=FREE),
        cloud,
        active=1,
        limits=TrustLimits(reach=float("inf")),
    )
    for number in (1, 2):
        to_training(town, number)
        town.work(f"device/{number}")
        town.drain()
        for other in (3, 6):
            activation(town, other)
    to_training(town)
    upload(town, 0, torch.full((650,), 1e30))
    town.deliver(town.post.pop(0))  # no further: what comes of it, z_n ~ 1e29, is another matter
    home = server(town)
    assert float(home._sum.total.abs().max()) > 1e29
    town.tell("server/0", DeviceLeft(device=0))
    honest = sum(
        (home._copies.counted(number).double() for number in (1, 2)),
        torch.zeros(650, dtype=torch.float64),
    )
    assert torch.equal(home._sum.total, honest)
    assert home._sum.weight == 2.0
    town.restart("server/0")
    assert torch.equal(server(town)._sum.total, honest)


def test_dismissals_replay_to_the_same_bits(folder: Path, towns: list[Town]) -> None:
    """Weights that no float64 sums exactly, members that go and come back: deployment and replay
    form the same sums.
    """
    gamma = [0.1 + 0.7 * number for number in range(9)]
    town = town_of(
        folder, towns, replace(BCD, penalty=gamma, projection=FREE), fb.SyncCloud(), active=1
    )
    for change in (DeviceLeft(device=0), DeviceJoined(device=0), DeviceLeft(device=1), None):
        for number in range(9):
            activation(town, number)
        if change is not None:
            town.tell("server/0", change)
            town.drain()
    assert town.rounds >= 3
    town.replayed()


# ------------------------------------------------------------------------------------------------
# reports
def report(size: int = 651, weight: float = 3.0, value: float = 0.0, place: int = 5) -> Letter:
    vector = torch.zeros(size, dtype=torch.float64)
    vector[place], vector[-1] = value, weight
    ready = ServerReady(server=0, phase=0, iteration=0, model="s/0/0")
    return Letter("server/0", "coordinator", ready, vector, 0.0)


@pytest.mark.parametrize(
    ("projection", "letter", "reason"),
    [
        (FREE, report(weight=1e300), "weight"),
        (FREE, report(weight=3.1), "weight"),
        (FREE, report(weight=-3.0), "weight"),
        (FREE, report(weight=0.0), "weight"),
        (FREE, report(weight=float("nan")), "finite"),
        (FREE, report(value=1e300), "finite"),
        (FREE, report(value=1e30), "far"),
        (fb.Box(), report(value=7.0), "outside"),
        (FREE, report(value=float("inf")), "finite"),
    ],
)
def test_a_sum_that_no_devices_of_the_server_can_have_is_refused_and_changes_nothing(
    projection: fb.Projection, letter: Letter, reason: str, folder: Path, towns: list[Town]
) -> None:
    town = town_of(folder, towns, replace(BCD, projection=projection), fb.SyncCloud())
    coordinator = town.roles["coordinator"]
    assert isinstance(coordinator, CoordinatorRole)
    before = coordinator.store.length, coordinator.store.names()
    with pytest.raises(Refused) as refused:
        coordinator.receive(letter, town.tick())
    assert refused.value.reason == reason
    assert (coordinator.store.length, coordinator.store.names()) == before
    for number in range(9):
        activation(town, number)
    assert town.rounds == 1
    assert bool(torch.isfinite(coordinator.z).all())


@pytest.mark.parametrize(
    ("value", "reason"), [(1e30, "far"), (3.0, "outside"), (float("nan"), "finite")]
)
def test_a_model_that_a_server_reports_is_checked_as_an_upload_is(
    value: float, reason: str, folder: Path, towns: list[Town]
) -> None:
    projection: fb.Projection = FREE if reason == "far" else fb.Box()
    town = town_of(folder, towns, replace(BCD, projection=projection), ASYNC)
    coordinator = town.roles["coordinator"]
    ready = ServerReady(server=0, phase=0, iteration=0, model="z/0/0")
    with pytest.raises(Refused) as refused:
        coordinator.receive(
            Letter("server/0", "coordinator", ready, torch.full((650,), value), 0.0), town.tick()
        )
    assert refused.value.reason == reason
    for number in range(3):
        activation(town, number)
    assert town.rounds >= 1


def test_a_sum_of_nobody_is_zero(folder: Path, towns: list[Town]) -> None:
    """FedAvg: a phase in which every upload was refused."""
    town = town_of(
        folder,
        towns,
        fb.FedAvg(device_step=0.05, batch=4, projection=FREE),
        fb.SyncCloud(),
        active=3,
    )
    coordinator = town.roles["coordinator"]
    with pytest.raises(Refused, match="counts nobody, but is not 0"):
        coordinator.receive(report(weight=0.0, value=1.0), town.tick())
    for number in range(3):
        to_training(town, number)
    for number in range(3):
        upload(town, number, torch.full((650,), 1e30))
    town.drain()
    for number in range(3, 9):
        activation(town, number)
    assert town.rounds == 1
    assert float(server(town).z.abs().max()) < 1
    town.replayed()


def test_weights_of_any_choice_of_devices_pass() -> None:
    weights = [0.1] * 10
    for count in range(1, 11):
        check_weight(sum(weights[:count]), weights, everybody=True)
    check_weight(0.0, weights, everybody=False)
    with pytest.raises(Refused, match=r"add up to 0; those of its server's devices give 0\.1 to 1"):
        check_weight(0.0, weights, everybody=True)


def test_what_was_computed_and_is_not_finite_is_not_kept(folder: Path, towns: list[Town]) -> None:
    """It cannot come of what is taken; so it is a defect, and the role ends before anything is
    durable.
    """
    town = town_of(folder, towns, replace(BCD, projection=FREE), ASYNC)
    home = server(town)
    home._sum.total.fill_(float("inf"))
    length = home.store.length
    with pytest.raises(
        NumericalError,
        match=r"value 0 of z/0/1, which server/0 has computed, is inf; it is not kept",
    ):
        play_phase(town)
    assert "z/0/1" not in home.store.names()
    town.restart("server/0")
    assert bool(torch.isfinite(server(town).z).all())
    assert server(town).store.length > length
    town.drain()


# ------------------------------------------------------------------------------------------------
# training that gives nothing
def spoil(town: Town, number: int = 0) -> None:
    """The next computation of this device meets a loss that is not a number."""
    samples = device(town, number).local_work.trainer._samples
    assert isinstance(samples, fb.Samples)
    whole = samples.inputs.clone()
    samples.inputs.fill_(float("nan"))
    town.work(f"device/{number}")
    samples.inputs.copy_(whole)


class Scaled(nn.Module):
    """A model in which NaN inputs reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


def plain_town(folder: Path, towns: list[Town], algorithm: fb.Algorithm, active: int = 3) -> Town:
    town = Town(folder / "town", RunSpec(algorithm, ASYNC, active=active), regression(0.0, 1.0))
    towns.append(town)
    town.start()
    return town


@pytest.mark.parametrize("crash", [False, True])
def test_a_device_that_meets_a_loss_that_is_not_finite_drops_that_activation_and_goes_on(
    crash: bool, folder: Path, towns: list[Town]
) -> None:
    town = plain_town(folder, towns, fb.FedBCD(device_step=0.05, batch=4, projection=FREE))
    activation(town, 0)
    to_training(town)
    before = state(device(town))
    done = device(town).compute()
    assert isinstance(done.event, Trained)
    spoil(town)
    assert device(town).machine.state is DeviceState.WITHDRAWING
    if crash:
        town.post.clear()
        town.restart("device/0")
        town.tell("device/0", RetryDue())
    town.drain()
    assert state(device(town)) == (before[0] + 1, DeviceState.IDLE, *before[2:])
    for number in (1, 2):
        activation(town, number)
    assert server(town).machine.phase >= 2  # which did not wait for it
    to_training(town)
    town.work("device/0")
    town.drain()
    assert device(town).machine.activation == before[0] + 2
    assert town.refused == []
    town.replayed()


def test_an_offline_round_that_is_not_finite_is_dropped(folder: Path, towns: list[Town]) -> None:
    town = plain_town(
        folder, towns, fb.FedBCDI(device_step=0.05, batch=4, projection=FREE), active=2
    )
    town.tell("device/0", OfflineDue())
    town.work("device/0")
    before = state(device(town))
    town.tell("device/0", OfflineDue())
    spoil(town)
    assert state(device(town)) == before
    assert device(town).machine.offline == 2
    to_training(town)
    town.work("device/0")
    town.drain()
    assert device(town).machine.activation == 1
    town.replayed()


def test_why_it_failed_is_told(folder: Path, towns: list[Town]) -> None:
    town = plain_town(folder, towns, fb.FedBCD(device_step=1e30, batch=4, projection=FREE))
    to_training(town)
    done = device(town).compute()
    assert done.event == Failed(session=0)
    assert "use a smaller device_step (now 1e+30)" in done.trouble
    assert torch.equal(done.kept["x"], device(town).kept["x"])


def test_buffers_that_are_not_finite_are_not_uploaded(folder: Path, towns: list[Town]) -> None:
    town = town_of(folder, towns, BCD)
    to_training(town)
    role = device(town)
    whole = role.local_work.trainer.run

    def broken(*arguments: Any) -> Registers:
        after = whole(*arguments)
        after["x"][0, -1] = float("inf")
        return after

    role.local_work.trainer.run = broken  # type: ignore[method-assign]
    done = role.compute()
    assert done.event == Failed(session=0)
    assert done.trouble == "value 649 of the model of device/0 is inf after session 0"


# ------------------------------------------------------------------------------------------------
# under fire
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offline", [False, True])
def test_refusals_and_failures_under_fire_replay(
    seed: int, offline: bool, folder: Path, towns: list[Town]
) -> None:
    """Roles die, letters are lost, disks too; every fifth piece of work is too far or not a number.
    Nothing of it counts.
    """
    algorithm = replace(BCDI if offline else BCD, projection=FREE)
    town = town_of(folder, towns, algorithm, fb.AsyncCloud(first=2))
    town.close()
    unkind = Unkind(
        town, seed, lost_disks=0.0 if offline else 0.003, backups=0.0 if offline else 0.003
    )
    count = 0

    def work(actor: str) -> None:
        nonlocal count
        role = town.roles[actor]
        assert isinstance(role, DeviceRole)
        if role.work is None:
            return
        done, count = role.compute(), count + 1
        if count % 5 == 0 and isinstance(done.event, Trained):
            done = spoilt(done, 1e30)
        elif count % 5 == 1:
            done = replace(done, event=Failed(session=done.work.session), kept=role.kept)
        town.do(actor, lambda: role.finish(done, town.tick()))

    town.work = work  # type: ignore[method-assign]
    unkind.play(5)
    unkind.calm()
    for actor in town.actors:
        if (
            actor.startswith("device/")
            and device(town, int(actor[7:])).machine.state is DeviceState.UPLOADING
        ):
            town.tell(actor, RetryDue())
    town.drain()
    assert town.declined
    town.replayed()
    check_timeline(town.folder / "events.jsonl")
    steps = list(LogReader(town.folder / "events.jsonl"))
    over = {
        (c.to, c.message.activation)
        for s in steps
        for c in s.commands
        if isinstance(c, Send) and isinstance(c.message, Declined)
    }
    kept = {
        (c.to, c.message.activation)
        for s in steps
        for c in s.commands
        if isinstance(c, Send) and isinstance(c.message, Acknowledged)
    }
    counted = {
        (f"device/{c.device}", c.activation)
        for s in steps
        for c in s.commands
        if isinstance(c, Absorb)
    }
    assert over
    assert over.isdisjoint(kept)
    assert over.isdisjoint(counted)
    assert counted <= kept
    assert any(isinstance(step.event, Withdrawn) for step in steps)
    assert any(isinstance(step.event, Uploaded) for step in steps)
    assert any(isinstance(step.event, Activated) for step in steps)
