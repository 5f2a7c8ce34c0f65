"""The roles of the deployment, given the schedule of a simulation, end with the simulation's
models, bit for bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fedbcd as fb
from fedbcd.engines.deploy.roles.checks import TrustLimits
from fedbcd.errors import RecordError
from fedbcd.own import imports
from fedbcd.protocol.messages import (
    DeviceJoined,
    DeviceLeft,
    Event,
    OfflineDue,
    OfflineTrained,
    Restored,
    Resumed,
    RetryDue,
    Started,
    Trained,
    Uploaded,
    Woke,
    device_actor,
)
from fedbcd.record.eventlog import LogReader, Transition
from fedbcd.spec import RunSpec
from support.deployments import CASES, MODEL, Normed, Town, federation
from support.naive import CASES as OWN_CASES, lines, own
from support.runs import OUTGROWN, outgrown


def simulate(spec: RunSpec, data: fb.Federation, rounds: int, out: Path) -> fb.Run:
    return fb.train(
        data,
        spec,
        rounds=rounds,
        max_batch=1,
        evaluate_every=rounds,
        certify_every=0,
        out=out,
    )


def follow(town: Town, log: Path) -> None:
    """Let the roles do what the machines of a simulation did, in the same order."""
    for actor in town.actors:
        town.open(actor)
    for step in LogReader(log):
        _follow(town, step)


def _follow(town: Town, step: Transition) -> None:
    match step.event:
        case Trained() | OfflineTrained():
            town.work(step.actor)
        case Started():
            town.begin(step.actor)
        case Woke() | OfflineDue() | DeviceLeft():
            town.tell(step.actor, step.event)
        case DeviceJoined():
            town.late.discard(step.event.device)
            town.open(device_actor(step.event.device))  # not a member yet, so nobody greets it
            town.tell(step.actor, step.event)
            _carry_out(town)
        case _:
            index = next(
                k
                for k, letter in enumerate(town.post)
                if letter.to == step.actor and _is_same(letter.event, step.event)
            )
            town.deliver(town.post.pop(index))


def _is_same(here: Event, there: Event) -> bool:
    """A device that joined late has been put in step once, and its uploads say so."""
    uploads = isinstance(here, Uploaded) and isinstance(there, Uploaded)
    return here == (replace(there, model=here.model) if uploads else there)


def _carry_out(town: Town) -> None:
    """A device that has joined is sent its server's model; in simulation it simply has it."""
    while news := [letter for letter in town.post if isinstance(letter.event, Restored | Resumed)]:
        town.post = [letter for letter in town.post if letter not in news]
        for letter in news:
            town.deliver(letter)


def compare(
    spec: RunSpec,
    data: fb.Federation,
    rounds: int,
    folder: Path,
    towns: list[Town],
    **more: Any,
) -> dict[str, Any]:
    run = simulate(spec, data, rounds, folder / "simulation")
    town = Town(folder / "town", spec, data, **more)
    towns.append(town)
    follow(town, folder / "simulation" / "events.jsonl")
    end = town.replayed()
    assert end["digest"] == run.summary["digest"]
    assert end["rounds"] == rounds
    return end


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_on_every_cloud_ends_with_the_models_of_the_simulation(
    case: str, folder: Path, towns: list[Town]
) -> None:
    algorithm, cloud = CASES[case]
    compare(RunSpec(algorithm, cloud, active=2), federation(), 5, folder, towns)


@pytest.mark.parametrize(
    "case", ["fedbcd-sync", "fedbcd-async", "fedbcd-i-rigorous", "fedavg-sync"]
)
def test_with_joins_and_leaves(case: str, folder: Path, towns: list[Town]) -> None:
    algorithm, cloud = CASES[case]
    spec = RunSpec(algorithm, cloud, active=1, joins={1: 2, 8: 3}, leaves={0: 3, 5: 4})
    compare(spec, federation(), 6, folder, towns)


def test_servers_that_wait_for_as_many_as_they_like(folder: Path, towns: list[Town]) -> None:
    spec = RunSpec(*CASES["fedbcd-i-rigorous"], active=[1, 2, 2])
    compare(spec, federation(), 4, folder, towns)


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        ("fedbcd-sync", (fb.Integers(2.0**-12),)),
        ("fedbcd-i-rigorous", (fb.Clip(0.1), fb.Integers(2.0**-12))),
        ("fedbcd-async", (fb.Clip(0.1),)),
    ],
)
def test_layers_on_uploads(
    case: str, layers: tuple[Any, ...], folder: Path, towns: list[Town]
) -> None:
    """Also for devices that come and go, and in the order in which uploads arrive."""
    spec = RunSpec(*CASES[case], active=1, joins={1: 2}, leaves={0: 3}, uploads=layers)
    compare(spec, federation(), 4, folder, towns)
    sent = frozenset().union(*towns[0].blueprint.vectors.values())
    assert ((650, torch.int32) in sent) == (len(layers) == 2 or case == "fedbcd-sync")


def test_with_a_device_that_leaves_nothing_behind(folder: Path, towns: list[Town]) -> None:
    """The sum that is formed anew is the same, to the last bit, where a subtraction would leave
    another.
    """
    spec = RunSpec(OUTGROWN, fb.AsyncCloud(first=2), active=1, leaves={0: 3, 4: 5}, joins={1: 2})
    compare(spec, outgrown(), 9, folder, towns, limits=TrustLimits(reach=float("inf")))


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedprox-sync"])
def test_buffers_travel_with_the_model(case: str, folder: Path, towns: list[Town]) -> None:
    """Batch-norm statistics are averaged as parameters are, never penalised, stepped or
    projected.
    """
    algorithm, cloud = CASES[case]
    compare(RunSpec(algorithm, cloud, active=2), federation(Normed), 3, folder, towns)


@pytest.mark.parametrize("case", OWN_CASES)
def test_methods_of_other_people(case: str, folder: Path, towns: list[Town]) -> None:
    """Bundles of several parts, several sums, and uploads that are older than their phase."""
    with imports(allowed=True):
        compare(own(case), lines(), 6, folder, towns)


STAIRS = fb.Stairs(every=2, times=0.5)


@pytest.mark.parametrize(
    "algorithm",
    [
        fb.FedAvg(device_step=0.01, batch=4, optimizer=fb.Adam(), schedule=STAIRS),
        fb.FedBCDI(device_step=0.05, batch=4, weight_decay=0.1, schedule=STAIRS),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_other_steps(algorithm: fb.Algorithm, folder: Path, towns: list[Town]) -> None:
    """Sessions, by which schedules go, have the same numbers."""
    compare(RunSpec(algorithm, fb.AsyncCloud(first=2), active=2), federation(), 4, folder, towns)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples to which reading adds what it draws."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.inputs[k] + torch.rand(self.inputs[k].shape), self.targets[k]


def test_data_that_draw_when_they_are_read(folder: Path, towns: list[Town]) -> None:
    """A device by itself draws what it draws in a simulation of all."""
    plain = federation()
    data = [Noisy(*plain.pool.take(plain.owned(i))) for i in range(plain.devices)]
    lazy = fb.Federation(
        lambda: plain.make_model(0), plain.loss, data, plain.servers, transform=plain.transform
    )
    compare(RunSpec(*CASES["fedbcd-async"], active=2), lazy, 3, folder, towns)


def test_one_penalty_per_device_and_the_absolute_step(folder: Path, towns: list[Town]) -> None:
    gamma = [0.5 + 0.1 * device for device in range(9)]
    algorithm = fb.FedBCD(
        device_step=0.05, batch="all", penalty=gamma, server_step=0.05, server_step_form="absolute"
    )
    compare(RunSpec(algorithm, fb.AsyncCloud(first=2), active=2), federation(), 4, folder, towns)


def test_the_merged_log_is_a_log_of_the_simulation(folder: Path, towns: list[Town]) -> None:
    """The same transitions at every actor, in the same order; only the times are real ones."""
    algorithm, cloud = CASES["fedbcd-async"]
    compare(RunSpec(algorithm, cloud, active=2), federation(), 4, folder, towns)
    there, here = (
        list(LogReader(folder / name / "events.jsonl")) for name in ("simulation", "town")
    )
    assert [replace(step, time=0.0) for step in there] == [replace(step, time=0.0) for step in here]


def test_a_log_of_devices_that_trained_together_is_not_replayed_exactly(folder: Path) -> None:
    fb.train(federation(), CASES["fedbcd-sync"][0], rounds=1, out=folder, certify_every=0)
    with pytest.raises(
        RecordError, match=r"trained devices together \(max_batch=None\).*without --exact"
    ):
        fb.replay(folder / "events.jsonl", federation(MODEL), exact=True)


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize(
    "change", [DeviceLeft(device=2), DeviceJoined(device=1)], ids=["left", "joined"]
)
def test_sums_are_those_of_the_report_whoever_comes_or_goes_while_a_server_waits(
    change: DeviceLeft | DeviceJoined, crash: bool, folder: Path, towns: list[Town]
) -> None:
    """Sync-cloud: the report may be said again, with the same sum; the change counts in the next
    one.
    """
    town = Town(
        folder / "town", RunSpec(*CASES["fedbcd-sync"], active=1, joins={1: 1}), federation()
    )
    towns.append(town)
    town.start()
    _upload(town, 0)
    report = next(letter for letter in town.post if letter.to == "coordinator")
    town.tell("server/0", change)
    town.late.clear()
    town.post = [letter for letter in town.post if letter.to != "coordinator"]
    if crash:
        town.restart("server/0")
    town.tell("server/0", RetryDue())
    again = next(letter for letter in town.post if letter.to == "coordinator")
    assert again.event == report.event
    assert report.model is not None
    assert again.model is not None
    assert torch.equal(again.model, report.model)
    town.open("device/1")
    town.drain()
    for device in (3, 6):
        _upload(town, device)
        town.drain()
    assert town.rounds == 1
    _upload(town, 0)
    news = next(letter for letter in town.post if letter.to == "coordinator")
    assert news.model is not None
    assert float(news.model[-1]) == float(report.model[-1]) + (
        1.0 if isinstance(change, DeviceJoined) else -1.0
    )
    town.drain()
    town.replayed()


def _upload(town: Town, device: int) -> None:
    """One exchange of a device with its server, up to the acknowledgement."""
    actor = device_actor(device)
    town.tell(actor, Woke())
    while town.post and not any(letter.to == "coordinator" for letter in town.post):
        town.deliver(town.post.pop(0))
        town.work(actor)
