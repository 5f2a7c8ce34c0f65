"""Devices that come late and devices that go: docs/determinism.md, section 2, point 1."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.setup import make_machines, make_numbers, make_reader
from fedbcd.errors import ConfigError
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.rounding import U
from support.runs import BCD, BCDI, DEVICES, LOGISTIC, OUTGROWN, SERVERS, federation, outgrown

pytestmark = pytest.mark.filterwarnings("ignore:.*never mixes:fedbcd.errors.DivergenceWarning")

HOMES = [list(range(4 * n, 4 * n + 4)) for n in range(SERVERS)]
CLOUDS: dict[str, fb.Cloud] = {
    "sync": fb.SyncCloud(),
    "async": fb.AsyncCloud(first=2),
    "async-1": fb.AsyncCloud(first=1),
    "rigorous": fb.RigorousCloud(first=2),
}


def _train(algorithm: fb.Algorithm, cloud: fb.Cloud, rounds: int, **options: Any) -> fb.Run:
    return fb.train(
        federation(LOGISTIC),
        algorithm,
        cloud=cloud,
        rounds=rounds,
        active=options.pop("active", 2),
        **options,
    )


def _events_of(folder: Path, actor: str) -> list[str]:
    """Names of the events that an actor handled."""
    steps = map(json.loads, (folder / "events.jsonl").read_text().splitlines()[1:])
    return [next(iter(step["event"])) for step in steps if step.get("on") == actor]


# ------------------------------------------------------------------------------------------------
# joins
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_late_device_starts_from_its_servers_model_exactly(cloud: str, tmp_path: Path) -> None:
    joined = 0
    for device in (1, 6, 11, 12):
        out = tmp_path / str(device)
        before = _train(BCD, CLOUDS[cloud], 3, active=1, joins={device: 3})
        after = _train(BCD, CLOUDS[cloud], 4, active=1, joins={device: 3}, out=out)
        if "Activated" not in _events_of(
            out, f"device/{device}"
        ):  # it has joined, but was not the first to arrive
            joined += 1
            assert torch.equal(after.personal_NF[device], before.global_VF[device // 4])
    assert joined >= 2


def test_a_late_device_has_no_momentum_and_takes_part_from_its_round_on(tmp_path: Path) -> None:
    """All four members of a server are active in every round, so the joining one trains in the
    round in which it joins.
    """
    late = _train(BCD, fb.SyncCloud(), 3, active=3, joins={2: 2}, out=tmp_path)
    assert _events_of(tmp_path, "device/2").count("Trained") <= 1
    plain = [
        event
        for device in (0, 1, 3)
        for event in _events_of(tmp_path, f"device/{device}")
        if event == "Trained"
    ]
    assert len(plain) + _events_of(tmp_path, "device/2").count("Trained") == 9
    assert late.history.last.activations == 36


@pytest.mark.parametrize("algorithm", [BCD, BCDI], ids=lambda a: a.name)
def test_a_late_device_is_neither_heard_nor_evaluated_before(
    algorithm: fb.Algorithm, tmp_path: Path
) -> None:
    run = _train(algorithm, fb.AsyncCloud(first=2), 4, joins={5: 9}, out=tmp_path)
    assert _events_of(tmp_path, "device/5") == []
    assert sorted(run.personal_scores) == [device for device in range(DEVICES) if device != 5]
    assert torch.equal(run.personal_NF[5], _start(run))


def test_a_late_device_trains_offline_as_soon_as_it_has_joined(tmp_path: Path) -> None:
    """FedBCD-I with everybody available."""
    algorithm = fb.FedBCDI(device_step=0.05, batch=8, available=4, offline_time="free")
    _train(algorithm, fb.SyncCloud(), 6, joins={5: 4}, out=tmp_path)
    assert _events_of(tmp_path, "device/5")[:2] == ["OfflineDue", "OfflineTrained"]
    assert _events_of(tmp_path, "device/5").count("OfflineDue") == 2
    assert _events_of(tmp_path, "device/4").count("OfflineDue") == 6


# ------------------------------------------------------------------------------------------------
# leaves
@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("algorithm", [BCD, BCDI], ids=lambda a: a.name)
def test_a_device_that_leaves_keeps_its_model_and_is_heard_no_more(
    algorithm: fb.Algorithm, cloud: str
) -> None:
    before = _train(algorithm, CLOUDS[cloud], 3)
    after = _train(algorithm, CLOUDS[cloud], 7, leaves={0: 3, 9: 3})
    for device in (0, 9):
        assert torch.equal(after.personal_NF[device], before.personal_NF[device])
        assert device not in after.personal_scores
    assert after.summary["rounds"] == 7


def test_with_a_step_of_one_the_global_model_is_the_mean_of_the_present_members() -> None:
    """Relative form with eta_z = 1: z = m, the mean over Q_n. Absent devices are those that left or
    have not joined yet.
    """
    algorithm = fb.FedBCD(device_step=0.05, batch=8, server_step=1.0)
    for rounds, absent in ((2, {7, 8}), (4, {7}), (6, {0, 7, 13}), (9, {0, 13})):
        run = _train(algorithm, fb.SyncCloud(), rounds, joins={7: 7, 8: 3}, leaves={0: 5, 13: 4})
        present = [device for device in range(DEVICES) if device not in absent]
        mean = run.personal_NF[present].double().mean(0)
        assert float((run.global_VF[0].double() - mean).abs().max()) < 4 * U * float(
            run.personal_NF.abs().max()
        )  # w + (m - w), m rounded


def _simulations(spec: RunSpec) -> Iterator[tuple[Simulation, Any]]:
    """The state after every round."""
    numbers = make_numbers(spec, federation(LOGISTIC), torch.device("cpu"))
    reader = make_reader(spec, federation(LOGISTIC))
    driver = Driver(make_machines(spec, federation(LOGISTIC)), reader)
    schedule = Schedule(
        method_of(spec.algorithm), spec.clock, spec.seed, 2, spec.joins, spec.leaves
    )
    simulation = Simulation(driver, schedule)
    while simulation.round < 12:
        numbers.play(next(simulation))
        yield simulation, numbers


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_sums_of_servers_are_those_of_their_present_members_after_every_round(
    cloud: str,
) -> None:
    """Decision 3 of the architecture, with devices coming and going, some of them in the middle of
    an activation.
    """
    gamma = [0.5 + 0.1 * device for device in range(DEVICES)]
    algorithm = fb.FedBCD(device_step=0.05, batch=8, penalty=gamma)
    joins, leaves = {3: 2, 6: 5}, {0: 1, 5: 2, 8: 3, 12: 4, 9: 6}
    for simulation, numbers in _simulations(
        RunSpec(algorithm, CLOUDS[cloud], active=2, joins=joins, leaves=leaves)
    ):
        for server in simulation.machines.servers:
            weights = torch.tensor(
                [gamma[device] for device in server.members], dtype=torch.float64
            )
            total = weights @ numbers.personal_NF[list(server.members)].double()
            assert numbers.sums.weight_V[server.server] == pytest.approx(
                float(weights.sum()), rel=1e-12
            )
            assert float((numbers.sums.total_VU[server.server] - total).abs().max()) < 1e-10


# ------------------------------------------------------------------------------------------------
# leaving while chosen
def _schedule(
    algorithm: fb.Algorithm, cloud: fb.Cloud, active: int, leaves: Mapping[int, int], rounds: int
) -> tuple[Machines, "Spy"]:
    """The schedule alone, without numbers."""
    limit = algorithm.offline_limit if isinstance(algorithm, fb.FedBCDI) else None
    machines = Machines(HOMES, cloud, active, 1, limit)
    spy = Spy()
    simulation = Simulation(
        Driver(machines, None, spy),
        Schedule(method_of(algorithm), fb.Clock(), 0, active, {}, leaves),
    )
    while simulation.round < rounds:
        spy.starts.append(len(spy.steps))
        simulation.play_round()
    return machines, spy


class Spy:
    """A log that keeps (actor, event name, command names), and where each round starts."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Any, list[Any]]] = []
        self.starts: list[int] = []

    def append(self, time: float, actor: str, event: Any, commands: list[Any]) -> None:
        self.steps.append((actor, event, commands))

    def names(self, actor: str, first: int = 0) -> list[str]:
        return [type(event).__name__ for who, event, _ in self.steps[first:] if who == actor]


def _busy(spy: Spy, round_: int) -> list[int]:
    """Devices that are at work when a round starts."""
    busy = set()
    for actor, event, _ in spy.steps[: spy.starts[round_]]:
        if actor.startswith("device/"):
            device = int(actor.removeprefix("device/"))
            if type(event).__name__ == "Activated":
                busy.add(device)
            elif type(event).__name__ == "Trained":
                busy.discard(device)
    return sorted(busy)


@pytest.mark.parametrize("cloud", ["async", "async-1", "rigorous"])
@pytest.mark.parametrize("algorithm", [BCD, BCDI], ids=lambda a: a.name)
def test_a_device_that_leaves_in_the_middle_of_its_work_is_replaced(
    algorithm: fb.Algorithm, cloud: str
) -> None:
    _, undisturbed = _schedule(algorithm, CLOUDS[cloud], 2, {}, 6)
    tried = 0
    for round_ in range(1, 6):
        for device in _busy(undisturbed, round_):
            tried += 1
            machines, spy = _schedule(algorithm, CLOUDS[cloud], 2, {device: round_}, 30)
            left = spy.starts[round_]
            assert spy.names(f"device/{device}", left) == []
            server = machines.home[device]
            uploads = spy.names(f"server/{server}", left)
            assert uploads.count("DeviceLeft") == 1
            assert "Uploaded" in uploads  # another device took its place, and the server went on
            assert device not in machines.servers[server].members
    assert tried >= 3


@pytest.mark.parametrize("cloud", ["async", "async-1", "rigorous"])
def test_any_device_can_leave_at_any_time_and_every_phase_still_has_its_uploads(cloud: str) -> None:
    """All sixteen devices, several rounds: the run goes on, and each phase of each server ends with
    two uploads.
    """
    for device in range(DEVICES):
        for round_ in (1, 2, 4):
            machines, spy = _schedule(BCD, CLOUDS[cloud], 2, {device: round_}, 8)
            assert machines.coordinator.round >= 8
            for server in range(SERVERS):
                absorbed = 0
                for actor, _, commands in spy.steps:
                    if actor != f"server/{server}":
                        continue
                    for command in commands:
                        absorbed += type(command).__name__ == "Absorb"
                        if type(command).__name__ == "OpenPhase":
                            assert command.phase == 0 or absorbed == 2
                            absorbed = 0


def test_without_a_replacement_the_phase_ends_with_those_who_are_left() -> None:
    """All four members are needed; three of one server leave, one after the other."""
    machines, spy = _schedule(BCD, fb.AsyncCloud(first=1), 4, {0: 2, 1: 4, 2: 6}, 16)
    assert machines.servers[0].members == (3,)
    assert "Uploaded" in spy.names("server/0", spy.starts[7])


# ------------------------------------------------------------------------------------------------
# impossible
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"joins": {16: 2}}, r"joins\[16\]=2 must name a device below 16 and a round from 1 on"),
        ({"joins": {-1: 2}}, r"joins\[-1\]=2 must name a device below 16"),
        ({"joins": {3: 0}}, r"joins\[3\]=0 must name a device below 16 and a round from 1 on"),
        ({"leaves": {99: 2}}, r"leaves\[99\]=2 must name a device below 16"),
        ({"leaves": {3: 0}}, r"leaves\[3\]=0 must name"),
        ({"joins": {3: 4}, "leaves": {3: 4}}, "device 3 leaves in round 4 but joins in 4 only"),
        ({"joins": {3: 4}, "leaves": {3: 2}}, "device 3 leaves in round 2 but joins in 4 only"),
        (
            {"leaves": dict.fromkeys(range(4), 2)},
            "server 0 would be left without devices in round 2; keep at least one",
        ),
        ({"joins": dict.fromkeys(range(4, 8), 2)}, "server 1 would be left without devices"),
        (
            {"joins": {0: 3, 1: 3, 2: 3}},
            "active=2 must be between 1 and 1, the members of the smallest server",
        ),
    ],
)
def test_impossible_joins_and_leaves_are_refused_before_anything_is_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        _train(BCD, fb.SyncCloud(), 5, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def _start(run: fb.Run) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.federation.make_model(0).parameters()])


# ------------------------------------------------------------------------------------------------
# what a device leaves behind
def test_nothing_is_left_in_the_sum_of_a_device_that_has_gone(tmp_path: Path) -> None:
    """Beside its 1e9 a float64 sum has no room for what the others contribute with weights of
    1e-15; their models are formed into one anew.
    """
    run = fb.train(
        outgrown(), OUTGROWN, rounds=6, active=2, leaves={0: 2}, max_batch=1, out=tmp_path
    )
    assert torch.allclose(run.global_VF, torch.ones(2, 3), atol=0.2)
    assert fb.replay(tmp_path / "events.jsonl", outgrown())["digest"] == run.summary["digest"]


def test_nor_in_a_run_that_was_resumed_in_between(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "active": 2,
        "leaves": {0: 2, 4: 5},
        "joins": {5: 1},
        "max_batch": 1,
        "checkpoint_every": 1,
    }
    whole = fb.train(outgrown(), OUTGROWN, rounds=8, **options)
    for rounds in (3, 8):
        run = fb.train(
            outgrown(), OUTGROWN, rounds=rounds, out=tmp_path, resume=rounds > 3, **options
        )
    assert run.summary["digest"] == whole.summary["digest"]


def test_a_log_of_0_1_0_in_which_a_device_left_replays_as_it_was() -> None:
    """It subtracted what the device had contributed, and its z kept what rounding had lost by
    that.
    """
    seen: list[Driver] = []
    log = Path(__file__).parent / "v1-leaves.jsonl"
    found = fb.replay(log, outgrown(), on_step=lambda _, driver: seen.append(driver))
    assert found["rounds"] == 6
    z = seen[-1].numbers.global_VF()  # type: ignore[attr-defined]
    assert torch.allclose(z[0], torch.tensor([0.5623, 0.7085, 0.6053]), atol=1e-3)
