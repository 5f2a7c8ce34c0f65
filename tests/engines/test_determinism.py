"""docs/determinism.md, section by section: a run is a pure function of its configuration and its
seed.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.compute.numbers import Numbers
from fedbcd.engines.setup import make_machines, make_numbers, make_reader
from fedbcd.protocol.messages import Actor, Command, Event
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.schedule.work import Reader
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.runs import (
    BCD,
    BCDI,
    CASES,
    LOGISTIC,
    federation,
    largest_difference,
    log_lines,
    train,
)

pytestmark = pytest.mark.usefixtures("both_ways")

ROUNDING = 1e-5  # docs/determinism.md, section 3: float32, 30 rounds of at most five steps


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_gives_the_same_digest_and_another_seed_another(case: str) -> None:
    first, again, other = (train(case, seed=seed) for seed in (3, 3, 4))
    assert first.digest == again.digest
    assert first.history == again.history
    assert first.summary["clock"] == again.summary["clock"]
    assert other.digest != first.digest
    assert other.summary["clock"] != first.summary["clock"]


def test_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = train("fedbcd-i-async")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert train("fedbcd-i-async").digest == first.digest


@cache
def _of_batch_size(case: str, max_batch: int | None, folder: Path) -> tuple[fb.Run, list[str]]:
    out = folder / f"{case}-{max_batch}"
    return train(case, rounds=30, max_batch=max_batch, evaluate_every=10, out=out), log_lines(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch-sizes")


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-i-async", "fedbcd-rigorous"])
def test_batch_size_changes_no_event_and_numbers_by_rounding_only(
    case: str, max_batch: int, folder: Path
) -> None:
    """Section 3: 'the same schedule and the same draws, and numbers that differ by rounding
    only'.
    """
    run, lines = _of_batch_size(case, max_batch, folder)
    together, expected = _of_batch_size(case, None, folder)
    assert lines == expected
    for column in ("round", "clock", "activations"):
        assert run.history.column(column) == together.history.column(column)
    assert largest_difference(run, together) < ROUNDING


class Eager:
    """Trains every device at once when its work ends, instead of all that is due at a mix."""

    def __init__(self, reader: Reader, numbers: Numbers) -> None:
        self.reader, self.numbers = reader, numbers

    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        self.reader.apply(actor, event, commands)
        self.numbers.play(self.reader.take(0, 0.0, 0))


@pytest.mark.parametrize("algorithm", [BCD, BCDI], ids=lambda a: a.name)
def test_one_at_a_time_the_digest_does_not_depend_on_when_work_is_done(
    algorithm: fb.Algorithm,
) -> None:
    """Section 3: max_batch=1 'gives a digest that does not depend on batching'. One upload per
    phase: sums have one order only.
    """
    cloud = fb.AsyncCloud(first=2)
    lazy = fb.train(federation(), algorithm, cloud=cloud, rounds=12, active=1, max_batch=1)
    spec = RunSpec(algorithm, cloud, active=1, max_batch=1)
    numbers = make_numbers(spec, federation(), torch.device("cpu"))
    eager = Eager(make_reader(spec, federation()), numbers)
    driver = Driver(make_machines(spec, federation()), eager)
    simulation = Simulation(driver, Schedule(method_of(algorithm), spec.clock, seed=0, active=1))
    while simulation.round < 12:
        simulation.play_round()
    assert numbers.digest() == lazy.digest


@pytest.mark.parametrize("max_batch", [1, None])
def test_dropout_repeats_bit_for_bit(max_batch: int | None) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))

    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        options = {"max_batch": max_batch, "certify_every": 1}
        runs.append(train("fedbcd-sync", rounds=3, model=model, **options))
    assert runs[0].digest == runs[1].digest
    gaps = [run.history.column("gap") for run in runs]
    assert gaps[0] == gaps[1], "certificates draw from a generator of their own"
    assert min(gaps[0]) > 0


class Stubborn(nn.Module):
    """A model that asks for the value of a number, which vmap cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.dropout(x.flatten(1)))
        return y if y.sum().item() > 0 else y + 0.0


def test_a_model_that_cannot_be_vectorised_says_so_and_repeats_bit_for_bit() -> None:
    notices: list[str] = []
    digests = {
        train("fedbcd-i-async", rounds=3, model=Stubborn, on_notice=notices.append).digest
        for _ in range(2)
    }
    assert len(digests) == 1
    assert len(notices) == 2
    assert notices[0].startswith(
        "this model cannot be vectorised, so devices train one after another ("
    )


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-i-async", "fedbcd-rigorous"])
def test_how_often_one_looks_and_saves_does_not_change_the_digest(
    case: str, tmp_path: Path
) -> None:
    plain = train(case, rounds=8, evaluate_every=8)
    for every, save in ((1, 8), (3, 1), (8, 2)):
        run = train(
            case,
            rounds=8,
            evaluate_every=every,
            checkpoint_every=save,
            out=tmp_path / f"{every}-{save}",
        )
        assert run.digest == plain.digest
        assert run.history.last == plain.history.last


def test_the_rows_of_the_history_are_those_that_were_asked_for() -> None:
    assert train("fedbcd-sync", rounds=7, evaluate_every=3).history.column("round") == [0, 3, 6, 7]
    until = fb.train(federation(LOGISTIC), BCD, until_clock=60.0, evaluate_every=1)
    assert until.history[-2].clock < 60.0 <= until.history.last.clock


def test_the_uniform_matrix_is_the_async_cloud_that_waits_for_all() -> None:
    uniform = fb.GraphCloud([[0.25] * 4] * 4)
    graph = fb.train(federation(), BCD, cloud=uniform, rounds=8, active=2)
    waiting = fb.train(federation(), BCD, cloud=fb.AsyncCloud(first=4), rounds=8, active=2)
    assert graph.digest == waiting.digest
    assert graph.history == waiting.history


@pytest.mark.filterwarnings("ignore::fedbcd.errors.DivergenceWarning")
def test_time_varying_matrices_are_used_in_turn() -> None:
    """Assumption 3: a_nm(t) may vary with the round. With server_step 0+, z after a mix is the
    mixed model.
    """
    pairs = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
    across = [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]
    one, two = (
        fb.train(federation(), BCD, cloud=fb.GraphCloud(m), rounds=1, active=2)
        for m in (pairs, [pairs, across])
    )
    assert one.digest == two.digest
    one, two = (
        fb.train(federation(), BCD, cloud=fb.GraphCloud(m), rounds=2, active=2)
        for m in (pairs, [pairs, across])
    )
    assert one.summary["clock"] == two.summary["clock"]
    assert one.digest != two.digest
    # After `pairs`, then `across`, every server's w is the mean of all four; z_n differs by server
    # n's own step only.
    still = fb.FedBCD(device_step=0.05, batch=8, server_step=1e-12)
    run = fb.train(federation(), still, cloud=fb.GraphCloud([pairs, across]), rounds=2, active=2)
    assert run.history.last.disagreement < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_servers_disagree_on_asynchronous_clouds_only(case: str) -> None:
    run = train(case, rounds=5, evaluate_every=1)
    disagreement = run.history.column("disagreement")
    if CASES[case][1].sync:
        assert disagreement == [0.0] * 6
    else:
        assert disagreement[0] == 0.0
        # before anybody has trained, all uploads of FedBCD-I are x(0)
        assert all(value > 0 for value in disagreement[2:])


def test_the_log_ends_with_the_number_of_its_lines_and_the_digest(tmp_path: Path) -> None:
    run = train("fedbcd-async", out=tmp_path)
    end = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["end"]
    assert end == {
        "transitions": len(log_lines(tmp_path)),
        "rounds": 6,
        "clock": run.summary["clock"],
        "digest": run.digest,
    }
