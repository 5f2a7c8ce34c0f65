"""Certificates while training: right, recorded, cheap to switch off, and without effect on the
run.
"""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.projection import on_bound
from fedbcd.compute.certify import (
    CALL_COST_SAMPLES,
    DEVICES,
    SHARE_OF_TRAINING,
    CertificateBudget,
    Certifier,
    gap,
    sample_of,
)
from fedbcd.engines.setup import make_numbers
from fedbcd.errors import BorderWarning, ConfigError, DivergenceWarning
from fedbcd.record.history import CERTIFICATES, FIRST_COLUMNS, History
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.runs import BCD, BCDI, LOGISTIC, federation, train

NAMES = ("gap", "worst_gap", "pull", "spread")


class Half:
    """A set of one's own, of which only the projection is known: no coordinate is above 0.5, and
    none below 0.2.
    """

    name = "half"

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(0.2, 0.5)

    def contains(self, x: torch.Tensor, tolerance: float = 0.0) -> bool:
        return bool(((x >= 0.2 - tolerance) & (x <= 0.5 + tolerance)).all())


def direct(
    run: fb.Run, devices: list[int], penalty: float = 1.0, bound: float | None = None
) -> dict[str, float]:
    """The certificates of a finished run, from its models and data by ordinary autograd; `bound` is
    that of a box.
    """
    fed, z = run.federation, run.global_VF.double()
    zbar = z.mean(0)
    gaps = []
    for device in devices:
        x = run.personal_NF[device].double()
        model = run.personal_model(device).double()
        nn.utils.vector_to_parameters(x, model.parameters())
        owned = fed.owned(device)
        loss = fed.loss(
            model(fed.transform(fed.pool.inputs[owned], torch.float64)), fed.pool.targets[owned]
        )
        gradient = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]
        )
        full = gradient + penalty * (x - zbar)
        gaps.append(
            float(
                full.norm() if bound is None else full @ (x - torch.where(full > 0, -bound, bound))
            )
        )
    pull = (penalty * (zbar - run.personal_NF.double())).sum(0).square().sum()
    return {
        "gap": sum(gaps) / len(gaps),
        "worst_gap": max(gaps),
        "pull": float(pull),
        "spread": float((z - zbar).norm(dim=1).max()),
    }


@pytest.mark.parametrize("bound", [None, 0.25])
@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedbcd-rigorous", "fedbcd-graph"])
def test_the_history_has_the_certificates_of_its_models(case: str, bound: float | None) -> None:
    """Without a compact X, the gap is the norm of the gradient."""
    chosen = fb.NoProjection() if bound is None else fb.Box(-bound, bound)
    run = train(
        case,
        rounds=4,
        evaluate_every=2,
        certify_devices=5,
        dtype=torch.float64,
        projection=chosen,
        on_notice=lambda _: None,
    )
    expected = direct(run, sample_of(range(16), 5), bound=bound)
    for name in NAMES:
        assert math.isclose(
            getattr(run.history.last, name), expected[name], rel_tol=1e-9, abs_tol=1e-12
        ), name
    assert all(math.isfinite(row.gap) and row.gap >= 0 for row in run.history)
    if case == "fedbcd-sync":
        assert run.history.last.spread == 0.0


def test_fedbcd_i_sums_all_members_and_not_only_the_active_ones() -> None:
    run = train(
        "fedbcd-i-async", rounds=3, evaluate_every=3, certify_devices=2, dtype=torch.float64
    )
    expected = direct(run, sample_of(range(16), 2), penalty=0.2)
    for name in NAMES:
        assert math.isclose(getattr(run.history.last, name), expected[name], rel_tol=1e-9), name


def test_baselines_have_none() -> None:
    row = train("fedprox-sync", rounds=2).history.last
    assert all(math.isnan(getattr(row, name)) for name in NAMES)


def test_the_interval_counts_evaluations_and_certificates_change_nothing() -> None:
    plain = train("fedbcd-async", rounds=6, evaluate_every=1, certify_every=0)
    certified = train("fedbcd-async", rounds=6, evaluate_every=1, certify_every=3)
    assert plain.digest == certified.digest
    assert all(math.isnan(row.gap) for row in plain.history)
    assert [math.isnan(row.gap) for row in certified.history] == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert plain.summary["certificate_share"] == 0.0
    assert 0 < certified.summary["certificate_share"] < 1


@pytest.mark.parametrize("per_round", [500.0, 4000.0, 1e6])
@pytest.mark.parametrize("rounds", [20, 200, 2000])
def test_by_default_the_counted_work_stays_under_its_share(per_round: float, rounds: int) -> None:
    ration = CertificateBudget([60] * 100, per_round)
    taken: list[int] = []
    for round_ in range(0, rounds + 1, rounds // 20):
        taken.append(ration.devices(range(100), round_, sum(map(bool, taken))))
        assert (
            sum(ration.cost(range(100), count) for count in taken if count)
            <= SHARE_OF_TRAINING * round_ * per_round
        )
    assert set(taken) <= {0, DEVICES}
    assert ration.devices_at_the_end(range(100), rounds, sum(map(bool, taken))) >= 1
    if per_round == 1e6:
        assert taken == [0] + [DEVICES] * 20


def test_a_short_run_has_them_in_its_summary_and_a_long_one_in_rows() -> None:
    short = train("fedbcd-sync", rounds=4, dtype=torch.float64)
    assert all(math.isnan(row.gap) for row in short.history)
    found, expected = short.summary["certificates"], direct(short, sample_of(range(16), 1))
    for name in NAMES:
        assert math.isclose(found[name], expected[name], rel_tol=1e-9), name
    per_round = 5 * CALL_COST_SAMPLES + 3 * 8 * 8
    rounds = math.ceil(4.5 * DEVICES * (CALL_COST_SAMPLES + 30) / SHARE_OF_TRAINING / per_round)
    long = train("fedbcd-sync", rounds=rounds, evaluate_every=rounds // 8)
    certified = [math.isfinite(row.gap) for row in long.history]
    assert not certified[0]
    assert 3 <= sum(certified) <= 4 < len(certified)
    assert long.summary["certificate_share"] < 0.25  # about 0.02; the machine may be busy


def test_none_are_taken_where_none_are_wanted() -> None:
    assert train("fedbcd-sync", rounds=2, certify_every=0).summary["certificates"] == {}
    assert train("fedprox-sync", rounds=2).summary["certificates"] == {}


def test_a_model_with_dropout_keeps_the_users_generator() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5))

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    run = train("fedbcd-sync", rounds=2, model=model, certify_every=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert math.isfinite(run.history.last.gap)


def test_a_device_without_an_exact_gradient_is_left_out_of_the_gap() -> None:
    """Batch normalisation cannot pass a single sample."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(n, 4, generator=generator), torch.arange(n) % 2) for n in (1, 8)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    run = fb.train(
        fb.Federation(model, nn.functional.cross_entropy, data, 1),
        fb.FedBCD(batch=4),
        rounds=2,
        certify_devices=2,
    )
    assert math.isfinite(run.history.last.gap)
    assert run.history.last.gap == run.history.last.worst_gap
    alone = fb.train(
        fb.Federation(model, nn.functional.cross_entropy, data[:1], 1),
        fb.FedBCD(batch=4),
        rounds=1,
        certify_every=1,
    )
    assert math.isnan(alone.history.last.gap)
    assert math.isfinite(alone.history.last.pull)


def test_the_gap_falls_on_a_convex_problem() -> None:
    algorithm = fb.FedBCD(device_step=0.05, batch="all", momentum=0.5)
    run = fb.train(
        federation(LOGISTIC), algorithm, rounds=60, active=2, evaluate_every=30, certify_every=1
    )
    first, *_, last = run.history.column("gap")
    assert last < first / 2


@pytest.mark.parametrize(
    ("projection", "expected"),
    [
        (fb.Box(-1, 1), 1.5 + 0.5),
        (fb.TensorBoxes(((1, -1, 1), (1, 0, 3))), 1.5 + 0.5 * 3.0),
        (fb.Ball(2.0), 0.5 + 2 * 1.25**0.5),
        (fb.Simplex(3.0), 0.5 + 3 * 0.5),
        (fb.NoProjection(), 1.25**0.5),  # no gap without a compact X: the norm of the gradient
        (fb.Box(-math.inf, 0.25), 1.25**0.5),
        (fb.Box(0.25, math.inf), 0.75 * 2**0.5),
        (Half(), (0.9**2 + 0.6**2) ** 0.5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_set_with_a_closed_form_has_its_gap(
    projection: fb.Projection, expected: float
) -> None:
    x, gradient = torch.tensor([0.5, 0.0]).double(), torch.tensor([1.0, -0.5]).double()
    assert math.isclose(gap(projection, gradient, x, step=1 / 3), expected)


def test_certificates_survive_a_resume(tmp_path: Path) -> None:
    often: dict[str, Any] = {"evaluate_every": 2, "certify_every": 1}
    whole = train("fedbcd-async", rounds=6, out=tmp_path / "whole", **often)
    train("fedbcd-async", rounds=4, out=tmp_path / "parts", **often)
    resumed = train("fedbcd-async", rounds=6, out=tmp_path / "parts", resume=True, **often)
    assert resumed.history == whole.history
    assert math.isfinite(whole.history.last.pull)
    assert fb.Run.load(tmp_path / "whole", federation()).history == whole.history


def test_tables_and_rows_from_before_certificates_still_load(tmp_path: Path) -> None:
    old = FIRST_COLUMNS[: -len(CERTIFICATES)]
    path = tmp_path / "history.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([old, (1, 2.5, 3, 0.1, 0.2, 0.3, 0.4, 0.5)])
    row = History.read_csv(path).last
    assert row.distance == 0.5
    assert math.isnan(row.gap)
    of_checkpoint = History.of_plain([[row[name] for name in old]])  # as they held it before
    assert of_checkpoint.last == row
    assert math.isnan(row.spread)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"certify_every": -1}, "certify_every=-1"), ({"certify_devices": 0}, "certify_devices=0")],
)
def test_impossible_intervals_are_refused(option: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train("fedbcd-sync", rounds=1, **option)


def test_the_sample_is_spread_over_the_devices() -> None:
    assert sample_of(range(100), 4) == [0, 25, 50, 75]
    assert sample_of([3, 5], 8) == [3, 5]


# ------------------------------------------------------------------------------------------------
# warnings
def notices(algorithm: fb.Algorithm, cloud: fb.Cloud | None = None) -> list[str]:
    found: list[str] = []
    fb.train(
        federation(LOGISTIC), algorithm, cloud=cloud, rounds=1, active=2, on_notice=found.append
    )
    return found


def test_a_sound_run_starts_without_a_word() -> None:
    assert notices(BCD) == []


def test_a_step_that_may_be_too_large_is_named_before_the_run() -> None:
    (text,) = notices(fb.FedBCD(device_step=50.0))
    assert text.startswith("device_step=50 may be too large: on 16 samples of device ")
    assert " at the start the curvature is L=" in text
    assert "Assumption 4(i) asks for at most" in text


def test_what_is_said_of_a_step_is_true_of_a_run_that_gets_on() -> None:
    """The curvature at the start is not that of the whole run: with a step beyond its limit this
    one fits its data.
    """
    said: list[str] = []
    algorithm = fb.FedBCD(
        device_step=4.0, momentum=0.0, penalty=0.01, batch="all", projection=fb.NoProjection()
    )
    run = fb.train(
        federation(LOGISTIC), algorithm, rounds=40, active=4, looks=2, on_notice=said.append
    )
    assert run.history.last.personal_accuracy > 0.9
    (text,) = said
    assert "may" in text
    assert "will" not in text
    assert "diverge" not in text


def test_the_device_with_the_largest_penalty_is_among_those_looked_at() -> None:
    gamma = (1.0,) * 7 + (400.0,) + (1.0,) * 8
    (text,) = notices(fb.FedBCD(device_step=0.05, penalty=gamma))
    assert "samples of device 7 at the start" in text
    assert "gamma=400" in text


def test_without_a_listener_python_warns_at_the_call() -> None:
    with pytest.warns(DivergenceWarning, match="may be too large") as caught:
        fb.train(federation(LOGISTIC), fb.FedBCD(device_step=50.0), rounds=1, active=2)
    assert [record.filename for record in caught] == [__file__]


@pytest.mark.parametrize("cloud", [fb.AsyncCloud(first=1), fb.RigorousCloud(first=1)])
def test_servers_that_mix_alone_are_named_before_the_run(cloud: fb.Cloud) -> None:
    (text,) = notices(BCD, cloud)
    assert (
        text == f"the {cloud.name} cloud with first=1 never mixes: none of the 4 servers hears of"
        " another; use first=2 or more"
    )
    assert notices(BCD, fb.AsyncCloud(first=2)) == []


@pytest.mark.parametrize(
    "algorithm", [BCD, BCDI, fb.FedAvg(device_step=0.05, batch=8)], ids=lambda a: a.name
)
def test_weights_on_the_border_of_a_set_that_was_asked_for_are_counted(
    algorithm: fb.Algorithm,
) -> None:
    """Before the first step, where initial weights are cut, and of the models at the end."""
    found: list[str] = []
    tight = replace(algorithm, projection=fb.Box(-0.05, 0.05))
    run = fb.train(federation(LOGISTIC), tight, rounds=2, active=2, on_notice=found.append)
    before, after = found
    assert re.match(
        r"before the first step \d+ of 650 weights \(\d+\.\d%\) of the global model sit on the"
        r" border",
        before,
    )
    x = run.personal_NF if method_of(algorithm).has_personal else run.global_VF[:1]
    count = int((x.abs() >= 0.05).sum())
    assert after.startswith(f"{count:,} of {x.numel():,} weights ({count / x.numel():.1%}) of ")
    assert ("the models of 16 devices" in after) == method_of(algorithm).has_personal
    assert (
        "Box(low=-0.05, high=0.05), which may hold them back; a wider set, or none, lets them go on"
        in after
    )
    assert run.summary["notices"] == [after]


@pytest.mark.parametrize(
    ("projection", "held"),
    [
        (fb.NoProjection(), None),
        (fb.Simplex(1.0), None),
        (fb.Box(-1, 1), [[True, False, False], [False, True, False]]),
        (fb.Box(-1, math.inf), [[True, False, False], [False, False, False]]),
        (fb.TensorBoxes(((1, -2, 2), (2, 0, 3))), [[False, True, False], [False, False, True]]),
        (fb.Ball(1.25), [[True, True, True], [False, False, False]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_set_holds_back(projection: fb.Projection, held: list[list[bool]] | None) -> None:
    found = on_bound(projection, torch.tensor([[-1.0, 0.0, 0.75], [0.5, 1.0, 0.0]]))
    assert (None if found is None else found.tolist()) == held


def test_a_run_without_a_projection_has_no_border() -> None:
    assert notices(fb.FedAvg(device_step=0.05, batch=8)) == []
    with pytest.warns(BorderWarning, match="sit on the border") as caught:
        fb.train(
            federation(LOGISTIC), replace(BCD, projection=fb.Box(-0.05, 0.05)), rounds=1, active=2
        )
    assert [record.filename for record in caught] == [__file__, __file__]


def test_servers_that_never_meet_are_named_before_the_run() -> None:
    apart = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
    (text,) = notices(BCD, fb.GraphCloud(apart))
    assert text.startswith(
        "the mixing graph is disconnected: servers [2, 3] never hear of servers [0, 1]"
    )


def test_more_available_devices_than_there_are_is_said_before_the_run() -> None:
    (text,) = notices(fb.FedBCDI(device_step=0.05, available=9))
    assert text.startswith("available=9, but no server has more than 4 devices")


def test_penalty_steps_that_grow_are_named_before_the_run() -> None:
    (text,) = notices(fb.FedBCDI(device_step=0.05, penalty=2.5))
    assert text.startswith(
        "penalty=2.5: each of FedBCD-I's penalty steps ends 1.5 times as far from the server's"
        " model as it began"
    )


def test_the_certifier_counts_its_time() -> None:
    fed = federation(LOGISTIC)
    numbers = make_numbers(RunSpec(BCD, active=2), fed, torch.device("cpu"))
    certifier = Certifier(numbers, fed.sizes)
    certifier.certificates(range(16))
    assert certifier.seconds > 0
