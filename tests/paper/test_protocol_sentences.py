"""Sentences of the protocols that are about numbers and whole runs, and the assumptions that a run
can show.

Sentences about single messages have their tests in tests/unit/test_protocol_*.py and
tests/scenarios/test_transcripts.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.experiments.paper import PANELS, Setting
from fedbcd.protocol.messages import (
    Actor,
    Command,
    Event,
    MixModels,
    OfflineTrained,
    OpenPhase,
    Send,
    StepModel,
    Trained,
    number_of,
)
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from support.clouds import first_b_weights
from support.methods import method_of

SERVERS, MEMBERS = 4, 3
DEVICES = SERVERS * MEMBERS
FREE = fb.NoProjection()
BCD = fb.FedBCD(device_step=0.1, batch="all", projection=FREE)


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x))


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2 / 2).mean()


def federation() -> fb.Federation:
    """Device i owns i + 1 copies of one sample: g_i(x) = (x - i)^2 / 2."""
    devices = [(torch.zeros(i + 1, 1), torch.full((i + 1,), float(i))) for i in range(DEVICES)]
    return fb.Federation(OneNumber, half_square, devices, SERVERS)


def rounds_of(algorithm: fb.Algorithm, cloud: fb.Cloud, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """x and z after 1, 2, ... rounds, in float64."""
    runs = [
        fb.train(federation(), algorithm, cloud=cloud, rounds=t, active=2, dtype=torch.float64)
        for t in range(1, rounds + 1)
    ]
    return [(run.personal_NF[:, 0], run.global_VF[:, 0]) for run in runs]


@dataclass
class Diary:
    lines: list[tuple[Actor, Event, Sequence[Command]]] = field(default_factory=list)

    def append(self, time: float, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        self.lines.append((actor, event, commands))


def diary_of(
    algorithm: fb.Algorithm,
    cloud: fb.Cloud,
    rounds: int,
    servers: int = SERVERS,
    devices: int = MEMBERS,
    active: int = 1,
) -> Diary:
    """What everybody did, without numbers."""
    members = [list(range(n * devices, (n + 1) * devices)) for n in range(servers)]
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    diary = Diary()
    driver = Driver(Machines(members, cloud, active, 1, limit), None, diary)
    simulation = Simulation(driver, Schedule(method_of(algorithm), fb.Clock(), 5, active))
    for _ in range(rounds):
        simulation.play_round()
    return diary


def mean_of(x: Tensor, server: int) -> Tensor:
    return x[server * MEMBERS : (server + 1) * MEMBERS].mean()


# ------------------------------------------------------------------------------------------------
# Sync-cloud
def test_sync_servers_all_hold_what_equation_5_gives() -> None:
    """Sync-cloud (ii): 'executes (5) to obtain z(t+1) and broadcasts it back': one z, stepped
    towards all devices' mean.
    """
    z = torch.tensor(5.0, dtype=torch.float64)
    for x, after in rounds_of(BCD, fb.SyncCloud(), 5):
        z = z - 0.5 * (z - x.mean())
        assert after.tolist() == pytest.approx([float(z)] * SERVERS, abs=1e-13)


# ------------------------------------------------------------------------------------------------
# Async-cloud
def test_async_round_changes_the_first_b_by_their_mean_and_no_other() -> None:
    """Async-cloud (ii), (iii): 'w(t) = sum of z_n(t) / B', 'update z_n(t+1) by (6)', 'the other
    cloud servers simply have z_n(t+1) = z_n(t)'.
    """
    before = torch.full((SERVERS,), 5.0, dtype=torch.float64)
    for x, after in rounds_of(BCD, fb.AsyncCloud(first=2), 8):
        first = (after != before).nonzero()[:, 0].tolist()
        assert len(first) == 2
        w = before[first].mean()
        assert after[first].tolist() == pytest.approx(
            [float(w - 0.5 * (w - mean_of(x, n))) for n in first], abs=1e-13
        )
        before = after


def test_async_mixing_matrix_is_the_one_of_the_paper() -> None:
    """Async-cloud: 'a_nm = 1/B for n, m in V(t), a_nn = 1 and a_nm = 0' otherwise."""
    third = 1 / 3
    expected = [
        [third, 0, third, third],
        [0, 1, 0, 0],
        [third, 0, third, third],
        [third, 0, third, third],
    ]
    assert first_b_weights(4, (0, 2, 3)).tolist() == expected


# ------------------------------------------------------------------------------------------------
# rigorous
def test_rigorous_servers_take_one_step_for_every_round_mixed_or_alone() -> None:
    """Appendix A: 'the same eta is used on all cloud servers'; isolated ones 'use w_n(t) =
    z_n(t)'.
    """
    diary = diary_of(BCD, fb.RigorousCloud(first=2), 30)
    alone = mixed = 0
    for actor, _, commands in diary.lines:
        opened = [c for c in commands if isinstance(c, OpenPhase)]
        steps = [c for c in commands if isinstance(c, StepModel)]
        assert len(steps) == len([c for c in opened if c.phase > 0])
        for step in steps:
            alone += step.mixed == step.model
            mixed += step.mixed.startswith("w/")
            assert step.mixed == step.model or step.mixed.startswith("w/"), actor
    assert mixed == 60
    assert alone > 0


def test_rigorous_mixes_are_of_one_round() -> None:
    """Appendix A (i): 'only cloud-server models at round t will be accepted': after t steps a model
    is called z/n/t.
    """
    mixes = [
        c
        for _, _, commands in diary_of(BCD, fb.RigorousCloud(first=2), 30).lines
        for c in commands
        if isinstance(c, MixModels)
    ]
    assert [{int(model.rsplit("/", 1)[1]) for model in mix.models} for mix in mixes] == [
        {t} for t in range(30)
    ]


# ------------------------------------------------------------------------------------------------
# FedBCD-I
@pytest.mark.parametrize(
    "cloud",
    [fb.SyncCloud(), fb.AsyncCloud(first=2), fb.RigorousCloud(first=2)],
    ids=lambda c: c.name,
)
def test_nobody_trains_offline_more_often_in_a_row_than_the_limit(cloud: fb.Cloud) -> None:
    """FedBCD-I (ii): 'run a fixed rounds of updates without communication ... will stop training
    until it successfully gets activated'.
    """
    diary = diary_of(fb.FedBCDI(), cloud, 60, devices=10)
    in_a_row: dict[Actor, int] = defaultdict(int)
    most = 0
    for actor, event, _ in diary.lines:
        if isinstance(event, OfflineTrained):
            in_a_row[actor] += 1
            most = max(most, in_a_row[actor])
        elif isinstance(event, Trained):
            in_a_row[actor] = 0
    assert most == 4


def test_eight_of_ten_train_offline_in_a_round_and_the_active_are_among_them() -> None:
    """FedBCD-I (i), (ii): available devices train offline; 'Among them' are those that send their
    update requests.
    """
    diary = diary_of(fb.FedBCDI(offline_time="free"), fb.SyncCloud(), 1, devices=10, active=3)
    offline = {
        number_of(actor) for actor, event, _ in diary.lines if isinstance(event, OfflineTrained)
    }
    active = {number_of(actor) for actor, event, _ in diary.lines if isinstance(event, Trained)}
    assert (len(offline), len(active)) == (8 * SERVERS, 3 * SERVERS)
    assert active < offline


def test_devices_that_miss_the_phase_train_again_in_the_next_round() -> None:
    """FedBCD-I (ii): 'Edge devices that miss this phase will start the next round of local
    training'.
    """
    diary = diary_of(fb.FedBCDI(available=10, offline_time="free"), fb.SyncCloud(), 2, devices=10)
    trained = [
        number_of(actor) for actor, event, _ in diary.lines if isinstance(event, OfflineTrained)
    ]
    assert sorted(trained) == sorted([*range(10 * SERVERS)] * 2)


# ------------------------------------------------------------------------------------------------
# FedAvg, FedProx footnote
@pytest.mark.parametrize(
    "algorithm", [fb.FedAvg(projection=FREE), fb.FedProx(projection=FREE)], ids=lambda a: a.name
)
def test_with_a_consensus_algorithm_everybody_holds_z(algorithm: fb.Algorithm) -> None:
    """Footnote (ii): 'to obtain z(t+1) and broadcasts it back'; SPEC item 8: 'Every device then
    holds z'.
    """
    for x, z in rounds_of(algorithm, fb.SyncCloud(), 3):
        assert len({*x.tolist(), *z.tolist()}) == 1


def test_servers_hear_from_the_coordinator_once_per_round_on_the_sync_cloud() -> None:
    """Footnote (ii): 'the cloud servers become available again for the next round of update'."""
    diary = diary_of(fb.FedAvg(), fb.SyncCloud(), 7)
    for n in range(SERVERS):
        assert (
            sum(
                isinstance(c, OpenPhase)
                for actor, _, commands in diary.lines
                if actor == f"server/{n}"
                for c in commands
            )
            == 8
        )
        told = [
            c
            for actor, _, commands in diary.lines
            if actor == "coordinator"
            for c in commands
            if isinstance(c, Send)
        ]
        assert sum(c.to == f"server/{n}" for c in told) == 7


# ------------------------------------------------------------------------------------------------
# assumptions
def test_every_device_is_activated_again_and_again() -> None:
    """Assumption 1(i): 'activated at least once every p iterations'; with 3 of 10 at random, p = 60
    holds in 300 rounds.
    """
    diary, seen, round_ = (
        diary_of(BCD, fb.SyncCloud(), 300, servers=2, devices=10, active=3),
        defaultdict(lambda: [0]),
        0,
    )
    for actor, event, commands in diary.lines:
        if isinstance(event, Trained):
            seen[actor].append(round_)
        round_ += actor == "coordinator" and bool(commands)
    assert len(seen) == 20
    assert (
        max(
            b - a
            for rounds in seen.values()
            for a, b in zip(rounds, [*rounds[1:], 300], strict=True)
        )
        <= 60
    )


def test_the_servers_that_are_mixed_form_a_connected_graph_over_time() -> None:
    """Assumption 1(ii): the union of the graphs of q rounds 'is strongly connected'; B = 3 of 10
    servers, q = 40.
    """
    diary = diary_of(BCD, fb.AsyncCloud(first=3), 200, servers=10)
    mixes = [
        set(c.servers)
        for _, _, commands in diary.lines
        for c in commands
        if isinstance(c, MixModels)
    ]
    for start in range(0, 200, 40):
        reached, before = {0}, set()
        while reached != before:
            before = set(reached)
            reached |= {n for mix in mixes[start : start + 40] if mix & reached for n in mix}
        assert reached == set(range(10))


def test_mini_batch_gradients_are_unbiased_with_variance_falling_as_1_over_r() -> None:
    """Assumption 5 and Fact 2: the error has mean 0 and E||error||^2 = sigma^2 / R."""
    samples = torch.arange(50, dtype=torch.float64) ** 2 / 100
    ones = torch.zeros(20_000, dtype=torch.long)
    for batch in (1, 4, 16):
        slots = draws.batch_positions(
            1, ones, torch.arange(20_000), ones + 50, draws.grid(1, batch)
        )
        error = samples[slots[:, 0]].mean(1) - samples.mean()
        sigma2 = float(samples.var(correction=0))
        assert abs(float(error.mean())) < 5 * (sigma2 / batch / 20_000) ** 0.5
        assert float((error**2).mean()) == pytest.approx(sigma2 / batch, rel=0.05)


# ------------------------------------------------------------------------------------------------
# experiments
def test_personal_accuracy_is_on_ones_own_labels_and_global_accuracy_on_the_whole_test_set() -> (
    None
):
    """'edge devices test local models on test data that have the same diversity'; 'the whole test
    data set'.
    """
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, 4, 3, 30)
    whole = fb.Federation.from_partition(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        nn.functional.cross_entropy,
        data.train,
        split,
        2,
        test=data.test,
        transform=data.transform,
    )
    run = fb.train(whole, fb.FedBCD(device_step=0.1), rounds=5, active=1, measure="pooled-labels")
    inputs, targets = data.transform(data.test.inputs, torch.float32), data.test.targets

    def accuracy(model: nn.Module, chosen: Tensor) -> float:
        return float((model(inputs[chosen]).argmax(1) == targets[chosen]).double().mean())

    own = [
        accuracy(run.personal_model(i), torch.isin(targets, torch.tensor(split.labels[i])))
        for i in range(4)
    ]
    assert run.history.last.personal_accuracy == pytest.approx(sum(own) / 4)
    assert run.history.last.global_accuracy == pytest.approx(
        accuracy(run.global_model, torch.ones_like(targets, dtype=torch.bool))
    )


def test_every_panel_has_ten_servers_of_ten_devices() -> None:
    """'there are 10 cloud servers, each connected to 10 edge devices'."""
    jobs = [job for panel in PANELS.values() for job in panel(Setting()).jobs]
    assert {(job.federation.servers, job.federation.devices) for job in jobs} == {(10, 10)}
