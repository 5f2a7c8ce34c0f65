"""Layers on uploads: the same bits on every engine and in every order, members that come and go,
and what cannot be.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedbcd as fb
from fedbcd.algorithm.wire import Sender, Wire, exact_weights
from fedbcd.compute.numbers import Numbers
from fedbcd.config import dump_toml
from fedbcd.engines.run import explain_backend
from fedbcd.engines.setup import make_machines, make_numbers, make_reader, make_schedule
from fedbcd.errors import ConfigError, NumericalError, RecordError
from fedbcd.experiments.job import load_job, parse
from fedbcd.own import modules_of
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation
from fedbcd.schedule.work import Count, Round
from fedbcd.spec import RunSpec
from support.put_off import PutOff
from support.runs import CASES, LOGISTIC, federation, job_table, train

FINE = (fb.Integers(),)
COARSE = (fb.Clip(0.2), fb.Integers(2.0**-7))
GAMMA = tuple(0.1 + 0.07 * i for i in range(16))  # no sum of which is exact in float64
OPTIONS: dict[str, Any] = {
    "dtype": torch.float64,
    "certify_every": 0,
    "looks": 1,
    "model": LOGISTIC,
}


def z_of(run: fb.Run) -> bytes:
    return run.global_VF.numpy().tobytes()


def spec_of(case: str, **options: Any) -> RunSpec:
    algorithm, cloud = CASES[case]
    if algorithm.name == "fedbcd":
        algorithm = replace(algorithm, penalty=GAMMA)
    return RunSpec(algorithm, cloud, active=2, dtype=torch.float64, **options)


def rounds_of(spec: RunSpec, number: int) -> Iterator[Round]:
    data = federation(LOGISTIC)
    driver = Driver(make_machines(spec, data), make_reader(spec, data))
    events = Simulation(driver, make_schedule(spec, data))
    return (next(events) for _ in range(number))


def shuffled(round_: Round, seed: int) -> Round:
    """Its uploads in another order of arrival."""
    chance = random.Random(seed)
    work = [
        Count(tuple(chance.sample(part.uploads, len(part.uploads))))
        if isinstance(part, Count)
        else part
        for part in round_.work
    ]
    return replace(round_, work=tuple(work))


def played(spec: RunSpec, number: int = 5, seed: int | None = None) -> Numbers:
    numbers = make_numbers(spec, federation(LOGISTIC), torch.device("cpu"))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    for round_ in rounds_of(spec, number):
        numbers.play(round_ if seed is None else shuffled(round_, seed))
    numbers.settle()
    return numbers


# ------------------------------------------------------------------------------------------------
# the same bits
@pytest.mark.parametrize(
    ("case", "layers"),
    [("fedbcd-async", COARSE), ("fedbcd-i-sync", FINE), ("fedavg-sync", COARSE)],
)
def test_z_has_the_same_bits_from_events_arrays_files_and_a_run_resumed(
    case: str, layers: tuple[Any, ...], tmp_path: Path
) -> None:
    options = OPTIONS | {"uploads": layers}
    expected = z_of(train(case, **options))
    assert expected != z_of(train(case, **OPTIONS))
    assert z_of(train(case, ahead=True, **options)) == expected
    assert z_of(train(case, max_batch=1, state=tmp_path / "rows", **options)) == expected
    for ahead in (False, True):
        folder = tmp_path / str(ahead)
        train(case, ahead=ahead, out=folder, **options | {"rounds": 2})
        again = train(case, out=folder, resume=True, **options)
        assert z_of(again) == expected
        replayed = fb.replay(folder / "events.jsonl", federation(LOGISTIC))
        assert ahead or replayed["digest"] == again.digest


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-rigorous", "fedbcd-i-async"])
def test_the_order_of_arrival_leaves_no_bit_of_any_model(case: str) -> None:
    spec = spec_of(case, uploads=COARSE, joins={3: 2, 9: 1}, leaves={7: 2})
    digests = {played(spec, seed=seed).digest() for seed in (None, 0, 1)}
    assert len(digests) == 1
    plain = {played(replace(spec, uploads=()), seed=seed).digest() for seed in (None, 0, 1)}
    assert len(plain) > 1, "float64 sums see the order"


@pytest.mark.parametrize("case", ["fedbcd-async", "fedbcd-i-sync", "fedbcd-i-async"])
def test_work_put_off_until_its_server_steps_leaves_all_bits_at_every_look(case: str) -> None:
    spec = spec_of(case, uploads=FINE)
    late = PutOff(rounds_of(spec, 6))
    numbers = make_numbers(spec, federation(LOGISTIC), torch.device("cpu"))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    for round_ in late:
        numbers.play(round_)
        if round_.number % 3 == 0:
            numbers.play(late.settled())
            assert numbers.digest() == played(spec, round_.number).digest()


def test_with_compiled_code_the_sum_is_the_same_as_device_by_device() -> None:
    """The one trains in the memory of all models, the other makes copies."""
    spec = replace(spec_of("fedbcd-async", uploads=FINE), dtype=torch.float32)
    together, alone = played(spec), played(replace(spec, max_batch=1))
    assert float((together.global_VF() - alone.global_VF()).abs().max()) < 1e-5


# ------------------------------------------------------------------------------------------------
# contributions
def test_a_sum_is_that_of_what_its_members_have_to_the_last_unit() -> None:
    """sum gamma_i (x_i - x(0)), rounded device by device, also after some have come and gone."""
    spec = spec_of("fedbcd-sync", uploads=FINE, joins={3: 2, 6: 4}, leaves={1: 3, 9: 1})
    numbers = played(spec, number=6)
    start = make_numbers(spec, federation(LOGISTIC), torch.device("cpu")).global_VF()[0]
    expected = torch.zeros_like(start)
    weights = exact_weights(GAMMA)
    for device in set(range(16)) - {1, 9}:
        x = numbers.devices.tables["x"][device]
        expected += torch.round(weights[device] * (x - start) / 2.0**-20)
    assert torch.equal(numbers.sums.total_VU.sum(0), expected)
    assert sum(numbers.sums.weight_V) == sum(weights) - weights[1] - weights[9]


def test_what_a_clip_cuts_off_is_sent_later_where_members_count() -> None:
    layers = (fb.Clip(0.05), fb.Integers())
    spec = spec_of("fedbcd-sync", uploads=layers)
    numbers = make_numbers(spec, federation(LOGISTIC), torch.device("cpu"))
    bound, before = numbers.bound, numbers.devices.tables["sent"].clone()
    gaps = []
    for round_ in rounds_of(spec, 8):
        numbers.play(round_)
        now = numbers.devices.tables["sent"]
        for device in range(16):
            change = bound.sent_by(device, now[device]) - bound.sent_by(device, before[device])
            assert float(change.norm()) <= 0.05 + 650**0.5 * 2.0**-21 / bound.weights[device]
        before = now.clone()
    for device in range(16):
        gaps.append(
            float((bound.sent_by(device, before[device]) - numbers.personal(device, 0)).norm())
        )
    assert max(gaps) > 0.05, "some is still to be sent"


@dataclass(frozen=True)
class OwnBias:
    """FedBCD whose biases are nobody else's."""

    name: ClassVar[str] = "own-bias"

    def method(self, facts: Any) -> Any:
        return replace(fb.FedBCD(batch=4).method(facts), by_tensor={"*bias": 0.0, "*": 1.0})


def test_private_tensors_are_no_part_of_a_message() -> None:
    """However far z has gone in them, so that nothing of a clip's norm is theirs."""
    spec = RunSpec(OwnBias(), fb.AsyncCloud(2), active=2, dtype=torch.float64, uploads=COARSE)
    numbers = played(spec)
    contributions = numbers.devices.tables["sent"]
    assert isinstance(contributions, torch.Tensor)
    private = numbers.bound.private_F
    assert bool(contributions[:, ~private].any())
    assert not bool(contributions[:, private].any())


def test_the_norm_of_a_clip_does_not_depend_on_threads() -> None:
    long = torch.sin(torch.arange(200_000, dtype=torch.float64))
    found = set()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.add(fb.Clip(1.0).send(long, Sender(0, 0, 2.0)).numpy().tobytes())
    torch.set_num_threads(1)
    assert len(found) == 1
    assert float(fb.Clip(1.0).send(long, Sender(0, 0, 2.0)).norm()) == pytest.approx(2.0, rel=1e-12)


# ------------------------------------------------------------------------------------------------
# what cannot be
@dataclass(frozen=True)
class Signs:
    """A layer of somebody's own: only signs, one unit each."""

    unit: float = 0.01
    whole: ClassVar[bool] = True

    def send(self, message: torch.Tensor, sender: Sender) -> torch.Tensor:
        assert sender.activation >= -1
        return torch.sign(message) if sender.activation >= 0 else torch.round(message / self.unit)

    def read(self, total: torch.Tensor) -> torch.Tensor:
        return total * self.unit


@pytest.mark.parametrize(
    ("uploads", "words"),
    [
        ([{"name": "clip", "norm": 0}], "norm=0.0 of a clip must be a finite number above 0"),
        ([{"name": "clip", "norm": float("inf")}], "norm=inf"),
        ([{"name": "integers", "scale": 0.001}], r"scale=0.001 .* such as 0.0009765625,"),
        ([{"name": "integers", "scale": -0.5}], "scale=-0.5 .* must be a power of two"),
        ([{"name": "integers", "scale": 0}], "must be a power of two"),
        ([{"name": "clop"}], r"uploads\[0\].name = 'clop' is unknown .*did you mean 'clip'"),
        ([{"name": "nowhere:Layer"}], r"uploads\[0\].name = 'nowhere:Layer' cannot be imported"),
        ([{"name": "fedbcd:FedBCD"}], r"uploads\[0\]=FedBCD.* has no whole; a layer is fb.Clip"),
        ([{"name": "integers"}, {"name": "clip", "norm": 1.0}], r"uploads\[0\]=.* put it last"),
        ({"name": "clip"}, "uploads = .* must be a list"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(uploads: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(job_table(**{"run.uploads": uploads}))


def test_one_layer_without_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a list of layers"):
        train("fedbcd-sync", uploads=fb.Clip(1.0))


@dataclass(frozen=True)
class Stale:
    """FedAvg whose weights fall with age."""

    name: ClassVar[str] = "stale"

    def method(self, facts: Any) -> Any:
        return replace(fb.FedAvg(batch=4).method(facts), discount=lambda age: 1 / (1 + age))


def test_layers_and_a_discount_by_staleness_are_refused() -> None:
    with pytest.raises(ConfigError, match="weighs them by their age: a weight is multiplied on"):
        RunSpec(Stale(), active=2, uploads=FINE).check(federation(LOGISTIC))


def test_integers_too_large_for_a_phase_name_device_value_and_remedy() -> None:
    """Four members of a server, of which all may count in a phase; sixteen devices in all."""
    words = r"of what device \d+ sends is .* in integers, beyond 5.36871e\+08,.* use a larger scale"
    with pytest.raises(NumericalError, match=words):
        train("fedbcd-sync", uploads=[fb.Integers(2.0**-40)])
    wire = Wire(FINE, torch.zeros(2), most=4, devices=16)
    with pytest.raises(NumericalError, match=r"value 1 of what device 3 .* beyond 5.6295e\+14"):
        wire.known(torch.tensor([0.0, 2.0**30]), Sender(3, -1, 1.0))


def test_a_layer_of_ones_own_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs_too.py").write_text("from test_wires import Signs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    path = tmp_path / "job.toml"
    layer = {"name": "theirs_too:Signs", "unit": 0.001}
    path.write_text(dump_toml(job_table(**{"run.uploads": [layer]})))
    run = load_job(path).run(tmp_path / "out")
    log = tmp_path / "out" / "events.jsonl"
    data = load_job(path).make_federation()
    assert modules_of(load_job(path).spec) == {"test_wires"}, "actors of Ray need it"
    with pytest.raises(RecordError, match=r"test_wires:Signs' is code that a record names"):
        fb.replay(log, data)
    assert fb.replay(log, data, trust=True)["digest"] == run.digest
    found = explain_backend(data, load_job(path).spec)
    assert any("may ask which activation" in choice.reason for choice in found)


def test_weights_are_rounded_so_that_their_sums_are_exact() -> None:
    weights = exact_weights(GAMMA)
    assert max(abs(a / b - 1) for a, b in zip(weights, GAMMA, strict=True)) < 2.0**-26
    assert sum(weights) == sum(reversed(weights))
    assert exact_weights([0.0, 3.0]) == [0.0, 3.0]


def test_without_layers_there_is_no_wire() -> None:
    numbers = make_numbers(spec_of("fedbcd-sync"), federation(LOGISTIC), torch.device("cpu"))
    assert numbers.bound.wire is None
    assert "uploads" not in spec_of("fedbcd-sync").identity(federation(LOGISTIC))
