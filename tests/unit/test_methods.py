"""The algorithms as values: their settings, the bounds on them, and whose model counts how
much.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.algorithm.method import Relative
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.algorithm.projection import PROJECTIONS
from fedbcd.config import choose
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from support.methods import method_of

Personal = type[fb.FedBCD] | type[fb.FedBCDI]
Kind = Any
PAPERS: list[Kind] = [fb.FedBCD, fb.FedBCDI, fb.FedProx, fb.FedAvg]
EVERY = [*PAPERS, fb.FineTuned, fb.Local]
PENALISED: list[Kind] = [fb.FedBCD, fb.FedBCDI, fb.FedProx]
PERSONAL: list[Personal] = [fb.FedBCD, fb.FedBCDI]
NOT_POSITIVE = [0.0, -1.0, math.nan, math.inf, -math.inf]

by_name: Any = lambda kind: getattr(kind, "name", repr(kind))  # noqa: E731
every_algorithm = pytest.mark.parametrize("kind", EVERY, ids=by_name)
penalised = pytest.mark.parametrize("kind", PENALISED, ids=by_name)
personal = pytest.mark.parametrize("kind", PERSONAL, ids=by_name)


def refused(kind: Kind, complaint: str, **setting: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**setting)
    for part in complaint.split("|"):
        assert part in str(caught.value), (part, str(caught.value))


# ------------------------------------------------------------------------------------------------
# defaults
def test_the_defaults_are_the_experiments() -> None:
    """SPEC, Experiments: eta_x 0.005, zeta 0.9, R 32, eta_z 0.5 (relative); gamma 1, 0.2 and 5; K_i
    on {1..5}. But for the box [-2, 2]: no weight is held back unless that is asked for.
    """
    for algorithm in (fb.FedBCD(), fb.FedBCDI(), fb.FedProx(), fb.FedAvg()):
        assert (algorithm.device_step, algorithm.batch, tuple(algorithm.steps)) == (
            0.005,
            32,
            (1, 5),
        )
        assert algorithm.projection == fb.NoProjection()
    assert [method_of(kind()).penalty for kind in PAPERS] == [
        1.0,
        0.2,
        5.0,
        0.0,
    ]
    assert [method_of(kind()).momentum for kind in PAPERS] == [
        0.9,
        0.9,
        0.9,
        0.0,
    ]
    for bcd in (fb.FedBCD(), fb.FedBCDI()):
        assert (bcd.server_step, bcd.server_step_form, bcd.cloud_iterations) == (0.5, "relative", 1)
    assert fb.FedBCDI().offline_limit == 4


def test_the_registry_knows_each_algorithm_by_its_name() -> None:
    assert {
        "fedbcd": fb.FedBCD,
        "fedbcd-i": fb.FedBCDI,
        "fedprox": fb.FedProx,
        "fedavg": fb.FedAvg,
        "fedavg-ft": fb.FineTuned,
        "local": fb.Local,
    } == ALGORITHMS


def test_who_counts_and_who_keeps_a_model() -> None:
    """SPEC items 5 and 8: FedBCD counts all members, the others the active; FedAvg and FedProx keep
    one model everywhere.
    """
    methods = [method_of(kind()) for kind in PAPERS]
    found = [(method.counts, method.has_personal, bool(method.offline)) for method in methods]
    assert found == [
        ("members", True, False),
        ("active", True, True),
        ("active", False, False),
        ("active", False, False),
    ]
    assert [method_of(kind()).step for kind in (fb.FedProx, fb.FedAvg)] == [Relative(1.0)] * 2


@every_algorithm
def test_an_algorithm_is_a_frozen_value(kind: Kind) -> None:
    algorithm = kind()
    assert algorithm == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.device_step = 1.0  # type: ignore[misc]
    assert dataclasses.replace(algorithm, device_step=0.5).device_step == 0.5
    with pytest.raises(ConfigError, match="device_step=-1"):
        dataclasses.replace(algorithm, device_step=-1)


@every_algorithm
@pytest.mark.parametrize(
    "projection",
    [
        fb.NoProjection(),
        fb.Box(0.0, 1.0),
        fb.Ball(2.0),
        fb.Simplex(3.0),
        fb.TensorBoxes(((2, -1.0, 1.0), (3, 0.0, 0.5))),
    ],
    ids=by_name,
)
def test_an_algorithm_survives_being_described(kind: Kind, projection: fb.Projection) -> None:
    algorithm = kind(device_step=0.25, batch="all", steps=(2, 3), projection=projection)
    assert projection.name in PROJECTIONS
    assert choose(ALGORITHMS, describe(algorithm), "algorithm") == algorithm


# ------------------------------------------------------------------------------------------------
# refusals
@every_algorithm
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_a_device_step_must_be_finite_and_above_zero(kind: Kind, value: float) -> None:
    refused(kind, f"device_step={value}|above 0", device_step=value)


@every_algorithm
@pytest.mark.parametrize("value", [0, -1, -32, 2.5, "every"])
def test_a_batch_is_a_whole_number_from_one_on_or_all(kind: Kind, value: float | str) -> None:
    refused(kind, "batch|'all'", batch=value)


@every_algorithm
@pytest.mark.parametrize("value", [(0, 5), (5, 1), (-1, 1), (0, 0)])
def test_steps_are_a_range_from_one_on(kind: Kind, value: tuple[int, int]) -> None:
    refused(kind, f"steps={list(value)}|1 <= low <= high", steps=value)


@every_algorithm
def test_epochs_are_a_range_in_place_of_steps(kind: Kind) -> None:
    refused(kind, "epochs=[0, 1]|1 <= low <= high", epochs=(0, 1))
    refused(kind, "steps=[1, 5] and epochs=[1, 2] both|keep one", steps=(1, 5), epochs=(1, 2))
    assert kind().steps == (1, 5)
    assert kind(epochs=(1, 2)).steps is None


@every_algorithm
def test_an_epoch_is_a_pass_over_the_data_of_a_device(kind: Kind) -> None:
    """Its time is counted in passes; penalty steps read no data, so these have none."""
    method = method_of(kind(epochs=(2, 2), batch=10), [5, 10, 11, 95])
    offline = bool(method.offline)
    found = [method.length(0, i, 0, None if offline else 0) for i in range(4)]
    assert found == [(2, 2), (2, 2), (2, 4), (2, 20)]
    assert method.lengths(offline=offline) == (2, 20)
    if offline:
        assert method.length(0, 3, 0, 0) == (2, 2)
    assert method_of(kind(epochs=(3, 3), batch="all"), [7]).length(0, 0, 0, 0) == (3, 3)


def test_the_penalty_loop_has_a_length_of_its_own() -> None:
    refused(fb.FedBCDI, "pull_steps=[3, 1]|1 <= low <= high", pull_steps=(3, 1))
    refused(fb.FedBCDI, "offline_time = 'none'|'timed', 'free'", offline_time="none")
    method = method_of(fb.FedBCDI(pull_steps=(7, 9)))
    drawn = [method.length(0, 0, 0, activation) for activation in range(40)]
    assert {steps for _, steps in drawn} == {7, 8, 9}
    assert method.length(0, 0, 0, None).steps <= 5
    assert method.lengths(offline=False) == (7, 9)


@penalised
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_a_penalty_must_be_finite_and_above_zero(kind: Kind, value: float) -> None:
    """Problem (2): gamma_i > 0."""
    refused(kind, f"penalty={value}|above 0", penalty=value)


@penalised
def test_each_of_several_penalties_is_checked(kind: Kind) -> None:
    refused(kind, "penalty=-0.5|above 0", penalty=[1.0, -0.5, 2.0])


@penalised
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_momentum_is_at_least_zero_and_below_one(kind: Kind, value: float) -> None:
    """Assumption 4(iii): zeta <= omega / sqrt(1 + rho_i eta_x) with omega < 1; eq. (4): zeta >=
    0.
    """
    refused(kind, f"momentum={value}|at least 0 and below 1", momentum=value)


@personal
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_a_server_step_must_be_finite_and_above_zero(kind: Kind, value: float) -> None:
    refused(kind, f"server_step={value}|above 0", server_step=value)


@personal
def test_a_relative_server_step_does_not_overshoot_the_mean(kind: Personal) -> None:
    refused(kind, "server_step=1.25|at most 1", server_step=1.25)
    assert kind(server_step=1.0).server_step == 1.0
    assert kind(server_step=1.25, server_step_form="absolute").server_step == 1.25, (
        "what it may be depends on the devices"
    )


@personal
def test_the_form_of_the_server_step_is_one_of_two(kind: Kind) -> None:
    says = "server_step_form = 'literal'|'relative', 'absolute'"
    refused(kind, says, server_step_form="literal")


@personal
@pytest.mark.parametrize("value", [0, -3])
def test_there_is_at_least_one_cloud_iteration(kind: Kind, value: int) -> None:
    refused(kind, f"cloud_iterations={value}|1 or more", cloud_iterations=value)


@pytest.mark.parametrize("value", [0, -1])
def test_at_least_one_device_is_available(value: int) -> None:
    refused(fb.FedBCDI, f"available={value}|1 or more", available=value)


@pytest.mark.parametrize("value", [0, -1])
def test_at_least_one_offline_round_is_allowed(value: int) -> None:
    refused(fb.FedBCDI, f"offline_limit={value}|1 or more|FedBCD", offline_limit=value)


@every_algorithm
def test_settings_are_given_by_name(kind: Kind) -> None:
    """Ten numbers in a row would be a trap."""
    with pytest.raises(ConfigError, match="by their names"):
        kind(0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "setting", [{"penalty": 1.0}, {"momentum": 0.5}, {"server_step": 0.5}, {"cloud_iterations": 2}]
)
def test_fedavg_has_no_penalty_momentum_or_server_step(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        fb.FedAvg(**setting)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# devices and weights
@pytest.mark.parametrize(
    ("members", "expected"), [(10, 8), (1, 1), (2, 2), (3, 2), (5, 4), (100, 80)]
)
def test_by_default_eight_of_ten_are_available(members: int, expected: int) -> None:
    """SPEC item 7: 'available: 8 of 10'."""
    assert method_of(fb.FedBCDI()).available_of(members) == expected


def test_as_many_are_available_as_asked_but_no_more_than_there_are() -> None:
    assert method_of(fb.FedBCDI(available=3)).available_of(10) == 3
    assert method_of(fb.FedBCDI(available=30)).available_of(10) == 10


def test_one_penalty_is_every_devices() -> None:
    gamma = method_of(fb.FedBCD(penalty=0.25)).penalties(4)
    assert gamma.tolist() == [0.25] * 4
    assert gamma.dtype == torch.float64


@pytest.mark.parametrize("given", [[0.5, 1.0, 2.0], (0.5, 1.0, 2.0)])
def test_devices_may_have_penalties_of_their_own(given: Sequence[float]) -> None:
    assert method_of(fb.FedProx(penalty=given)).penalties(3).tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("devices", [2, 4])
def test_as_many_penalties_as_devices_or_one(devices: int) -> None:
    with pytest.raises(
        ConfigError,
        match=f"penalty has 3 values for {devices} devices; give one for all or one each",
    ):
        method_of(fb.FedBCD(penalty=[0.5, 1.0, 2.0])).penalties(devices)


def test_personal_algorithms_weigh_by_penalty_and_the_baselines_by_data() -> None:
    """SPEC items 4 and 8: m = sum gamma_i x_i / sum gamma_i; FedAvg and FedProx average 'weighted
    by data size'.
    """
    sizes = [10, 20, 70]
    assert method_of(fb.FedBCD(penalty=[1.0, 2.0, 3.0]), sizes).weights(sizes) == [1.0, 2.0, 3.0]
    assert method_of(fb.FedBCDI(), sizes).weights(sizes) == [0.2] * 3
    for baseline in (fb.FedProx(), fb.FedAvg()):
        assert method_of(baseline, sizes).weights(sizes) == [10.0, 20.0, 70.0]


# ------------------------------------------------------------------------------------------------
# refused by training
def four_devices() -> fb.Federation:
    devices = [(torch.ones(2, 3) * k, torch.tensor([0, 1])) for k in range(4)]
    return fb.Federation(
        lambda: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, devices, 2
    )


@pytest.mark.parametrize(
    ("algorithm", "setting", "complaint"),
    [
        (fb.FedBCD(), {"active": 3}, "active=3 must be between 1 and 2"),
        (fb.FedBCD(), {"active": 0}, "active=0 must be between 1 and 2"),
        (fb.FedBCDI(available=1), {"active": 2}, "active=2 exceeds the 1 available"),
        (fb.FedBCD(penalty=[1.0, 2.0]), {}, "penalty has 2 values for 4 devices"),
        (
            fb.FedBCD(),
            {"cloud": fb.AsyncCloud(first=3)},
            "first=3 must be between 1 and the 2 servers",
        ),
        (
            fb.FedBCD(),
            {"cloud": fb.AsyncCloud(first=0)},
            "first=0 must be between 1 and the 2 servers",
        ),
        (fb.FedBCD(), {"max_batch": 0}, "max_batch=0 must be 1 or more"),
        (fb.FedBCD(), {"dtype": torch.int64}, "dtype=torch.int64 must be a floating-point dtype"),
    ],
)
def test_settings_that_contradict_the_federation_are_refused(
    algorithm: fb.Algorithm, setting: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fb.train(four_devices(), algorithm, rounds=1, **setting)


def test_fedavg_weighs_by_data_size_in_a_run() -> None:
    """SPEC item 8: z is the average of the active devices' models, weighted by data size; every
    device then holds z.
    """
    devices = [
        (torch.ones(size, 1), torch.full((size, 1), target))
        for size, target in ((1, 0.0), (3, 8.0))
    ]
    federation = fb.Federation(
        lambda: torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss, devices, 1
    )
    algorithm = fb.FedAvg(batch="all", steps=(1, 1), device_step=0.5, projection=fb.NoProjection())
    run = fb.train(federation, algorithm, rounds=1, active=2, dtype=torch.float64)
    assert float(run.global_VF) == pytest.approx(
        (1 * 0.0 + 3 * 8.0) / 4
    )  # a step of 0.5 on (w - target)^2 arrives at the target
    assert run.personal_NF.flatten().tolist() == [float(run.global_VF)] * 2


def test_a_projection_by_its_name_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        ConfigError,
        match=r"projection = 'box' has no project\(x\); give a value of fb\.NoProjection, fb\.Box,",
    ):
        fb.FedBCD(projection="box")  # type: ignore[arg-type]
