"""The paper's Algorithms 1 and 2, line by line, with numbers small enough to check by hand.

One device owns one number: g_i(x) = x^2 / 2, so the gradient at x is x. All hand numbers are exact
in binary.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import fedbcd as fb
from fedbcd.algorithm.device import Iterates, aspg_step, extrapolate, penalty_step
from support.clouds import cloud_round, first_b_weights
from support.methods import session
from support.rounding import ROUNDED_64


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def rows(x: float, previous: float) -> Iterates:
    return Iterates(number(x), number(previous))


def activation(algorithm: fb.Algorithm, begin: Iterates, steps: int, anchor: float) -> Iterates:
    """K_i = `steps` on g_i(x) = x^2 / 2, with z_n = `anchor`."""
    return session(algorithm, begin, number(anchor), [steps])


def offline_round(
    algorithm: fb.Algorithm, begin: Iterates, steps: int, anchor: float = 0.0
) -> Iterates:
    return session(algorithm, begin, number(anchor), [steps], offline=True)


def values(state: Iterates) -> tuple[float, float]:
    return float(state.x_NP), float(state.prev_NP)


FREE = fb.NoProjection()


# ------------------------------------------------------------------------------------------------
# Algorithm 1, device
def test_line_8_extrapolates_along_the_last_move() -> None:
    """Eq. (4a), Algorithm 1, line 8: x_ex = x + zeta (x - x_prev) = 3 + 0.5 (3 - 1)."""
    assert float(extrapolate(number(3.0), number(1.0), 0.5)) == 4.0


def test_line_9_descends_on_cost_and_penalty_and_projects() -> None:
    """Eq. (4b), Algorithm 1, line 9: 4 - 0.25 (2 + 2 (4 - 1)) = 2, then P_X onto [-1.5, 1.5]."""
    arguments = (number(2.0), number(1.0), 2.0, 0.25)
    assert float(aspg_step(number(4.0), *arguments, FREE)) == 2.0
    assert float(aspg_step(number(4.0), *arguments, fb.Box(-1.5, 1.5))) == 1.5


def test_line_1_starts_without_momentum() -> None:
    """Line 1: x_i(-1,0) = x_i(-1,-1) = x(0). The first step is plain gradient descent: 4 - 0.25 (4
    + 1 (4 - 0)) = 2.
    """
    with_momentum, without = (
        fb.FedBCD(device_step=0.25, momentum=m, projection=FREE) for m in (0.5, 0.0)
    )
    assert values(activation(with_momentum, rows(4.0, 4.0), 1, 0.0)) == (2.0, 4.0)
    assert values(activation(without, rows(4.0, 4.0), 1, 0.0)) == (2.0, 4.0)


def test_lines_6_to_10_repeat_k_times() -> None:
    """K_i = 2: 4 -> 2, then ex = 2 + 0.5 (2 - 4) = 1 and x = 1 - 0.25 (1 + 1) = 0.5; x_prev is the
    iterate before.
    """
    fedbcd = fb.FedBCD(device_step=0.25, momentum=0.5, projection=FREE)
    assert values(activation(fedbcd, rows(4.0, 4.0), 2, 0.0)) == (0.5, 2.0)


def test_line_5_goes_on_where_the_last_activation_stopped() -> None:
    """Line 5: x_i(t,0) and x_i(t,-1) are the last two iterates of the last activation; one step,
    then another, is K_i = 2.
    """
    fedbcd = fb.FedBCD(device_step=0.25, momentum=0.5, projection=FREE)
    first = activation(fedbcd, rows(4.0, 4.0), 1, 0.0)
    assert values(activation(fedbcd, first, 1, 0.0)) == (0.5, 2.0)


def test_line_9_projects_every_iterate_not_only_the_last() -> None:
    """With X = [1, 9] the first step ends at 2, the second at 0.5 -> 1, the third starts at ex = 1
    + 0.5 (1 - 2) -> 1.
    """
    fedbcd = fb.FedBCD(device_step=0.25, momentum=0.5, projection=fb.Box(1.0, 9.0))
    assert values(activation(fedbcd, rows(4.0, 4.0), 2, 0.0)) == (1.0, 2.0)
    assert values(activation(fedbcd, rows(4.0, 4.0), 3, 0.0)) == (1.0, 1.0)


# ------------------------------------------------------------------------------------------------
# Algorithm 1, cloud
def test_lines_19_and_20_mix_then_step() -> None:
    """Eq. (6): z = (0, 4) mixed by 1/2 gives w = 2; with m = (6, 2) and eta_z = 0.5 relative, z =
    (2 + 2, 2 + 0).
    """
    z = cloud_round(
        torch.tensor([[0.0], [4.0]]), first_b_weights(2, (0, 1)), torch.tensor([[6.0], [2.0]]), 0.5
    )
    assert z.flatten().tolist() == [4.0, 2.0]


def test_lines_17_to_22_repeat_k_z_times() -> None:
    """A second iteration mixes (4, 2) to 3 and steps to 3 - 0.5 (3 - 6) = 4.5 and 3 - 0.5 (3 - 2) =
    2.5.
    """
    z = cloud_round(
        torch.tensor([[0.0], [4.0]]),
        first_b_weights(2, (0, 1)),
        torch.tensor([[6.0], [2.0]]),
        0.5,
        iterations=2,
    )
    assert z.flatten().tolist() == [4.5, 2.5]


# ------------------------------------------------------------------------------------------------
# Algorithm 2
def test_algorithm_2_line_9_has_no_penalty() -> None:
    """Offline: x = 4 - 0.25 * 4 = 3 for every gamma_i and z_n, then ex = 3 + 0.5 (3 - 4) = 2.5 and
    x = 2.5 * 0.75.
    """
    free = fb.FedBCDI(device_step=0.25, momentum=0.5, projection=FREE)
    for anchor, gamma in ((0.0, 1.0), (100.0, 5.0)):
        fedbcd_i = replace(free, penalty=gamma)
        assert values(offline_round(fedbcd_i, rows(4.0, 4.0), 1, anchor)) == (
            3.0,
            4.0,
        )
        assert values(offline_round(fedbcd_i, rows(4.0, 4.0), 2, anchor)) == (
            1.875,
            3.0,
        )


def test_algorithm_2_line_16_moves_towards_the_server() -> None:
    """x <- P_X(x - gamma_i (x - z_n)): 4 - 0.25 (4 - 0) = 3, then P_X onto [-2, 2]."""
    assert float(penalty_step(number(4.0), number(0.0), 0.25, FREE)) == 3.0
    assert float(penalty_step(number(4.0), number(0.0), 0.25, fb.Box())) == 2.0


@pytest.mark.parametrize(
    ("momentum", "expected"), [("kept", (1.0, 3.0)), ("pull", (1.0, 2.0)), ("restart", (1.0, 1.0))]
)
def test_algorithm_2_lines_14_to_18_repeat_k_times(
    momentum: str, expected: tuple[float, float]
) -> None:
    """K_i = 3, gamma_i = 0.5, z_n = 0: 8 -> 4 -> 2 -> 1. x - x_prev was 8 - 10 = -2; the three
    readings of what it is then.
    """
    fedbcd_i = fb.FedBCDI(
        momentum=0.9, penalty=0.5, projection=FREE, momentum_after_contact=momentum
    )
    assert values(activation(fedbcd_i, rows(8.0, 10.0), 3, 0.0)) == expected


def test_algorithm_2_offline_rounds_go_on_with_the_momentum_of_offline_training() -> None:
    """Line 5 after line 18: x = 2 with x - x_prev = 8 - 6 as before the contact, so ex = 3 and x =
    2.25.
    """
    fedbcd_i = fb.FedBCDI(device_step=0.25, momentum=0.5, penalty=0.5, projection=FREE)
    pulled = activation(fedbcd_i, rows(8.0, 6.0), 2, 0.0)
    assert values(pulled) == (2.0, 0.0)
    assert values(offline_round(fedbcd_i, pulled, 1, 0.0)) == (2.25, 2.0)


# ------------------------------------------------------------------------------------------------
# baselines
def test_fedprox_takes_aspg_steps_with_its_penalty() -> None:
    """SPEC item 8: FedProx is ASPG with a penalty towards z, from x = x_prev = z: 4 - 0.25 (4 + 5 *
    0) = 3.
    """
    fedprox = fb.FedProx(device_step=0.25, momentum=0.5, projection=FREE)
    assert values(activation(fedprox, rows(4.0, 4.0), 1, 4.0)) == (3.0, 4.0)
    # ex = 3 + 0.5 (3 - 4) = 2.5; 2.5 - 0.25 (2.5 + 5 (2.5 - 4)) = 3.75
    assert values(activation(fedprox, rows(4.0, 4.0), 2, 4.0)) == (3.75, 3.0)


def test_fedavg_takes_plain_steps_without_momentum_or_penalty() -> None:
    """SPEC item 8: FedAvg is plain SGD (zeta = 0) from z: 4 -> 3 -> 2.25."""
    fedavg = fb.FedAvg(device_step=0.25, projection=FREE)
    assert values(activation(fedavg, rows(99.0, 99.0), 2, 4.0))[0] == 2.25


# ------------------------------------------------------------------------------------------------
# lines 13-15, the rest
@dataclass
class Seen:
    """What a run looked like after each round, by stopping it there."""

    personal: list[Tensor] = field(default_factory=list)
    servers: list[Tensor] = field(default_factory=list)


class OneNumber(torch.nn.Module):
    """Predicts the same number for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x))


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2 / 2).mean()


def one_number_federation(targets: list[float], servers: int) -> fb.Federation:
    """Device i owns one sample: g_i(x) = (x - targets[i])^2 / 2."""
    devices = [(torch.zeros(1, 1), torch.tensor([target])) for target in targets]
    return fb.Federation(OneNumber, half_square, devices, servers)


def history_of(federation: fb.Federation, algorithm: fb.Algorithm, rounds: int) -> Seen:
    seen = Seen()
    for count in range(1, rounds + 1):
        run = fb.train(federation, algorithm, rounds=count, active=1, dtype=torch.float64)
        seen.personal.append(run.personal_NF.flatten())
        seen.servers.append(run.global_VF.flatten())
    return seen


ALL_AT_ONCE = fb.FedBCD(batch="all", steps=(1, 1), device_step=0.25, momentum=0.5, projection=FREE)


def test_line_14_leaves_inactive_devices_alone() -> None:
    """Lines 13-15: x_i(t+1) = x_i(t) for i not in Q_n(t): with one active device, exactly one model
    moves per round.
    """
    seen = history_of(one_number_federation([0.0, 1.0, 2.0, 3.0], 1), ALL_AT_ONCE, 4)
    before = torch.full((4,), 4.0, dtype=torch.float64)
    for after in seen.personal:
        assert int((after != before).sum()) == 1
        before = after


def test_line_20_counts_every_member_with_its_last_copy() -> None:
    """Line 20 sums over Q_n, not Q_n(t) (SPEC item 5): z <- z - eta_z (z - mean of all x_i)."""
    seen = history_of(one_number_federation([0.0, 1.0, 2.0, 3.0], 1), ALL_AT_ONCE, 4)
    z = 4.0
    for personal, server in zip(seen.personal, seen.servers, strict=True):
        z = z - 0.5 * (z - float(personal.mean()))
        assert float(server) == pytest.approx(z, abs=ROUNDED_64)


def test_algorithm_2_line_24_counts_the_active_only() -> None:
    """Algorithm 2, line 24 sums over Q_n(t): with one active device and eta_z = 1, z is that
    device's model.
    """
    algorithm = fb.FedBCDI(
        batch="all", steps=(1, 1), device_step=0.25, server_step=1.0, projection=FREE
    )
    seen = history_of(one_number_federation([0.0, 1.0, 2.0, 3.0], 1), algorithm, 3)
    for personal, server in zip(seen.personal, seen.servers, strict=True):
        assert float((personal - float(server)).abs().min()) < ROUNDED_64


def test_one_activation_by_hand_through_the_whole_package() -> None:
    """One device, one step: x = 4 - 0.25 (4 - 0 + 1 (4 - 4)) = 3, then z = 4 - 0.5 (4 - 3) =
    3.5.
    """
    run = fb.train(one_number_federation([0.0], 1), ALL_AT_ONCE, rounds=1, dtype=torch.float64)
    assert float(run.personal_NF) == 3.0
    assert float(run.global_VF) == 3.5


def test_two_activations_by_hand_through_the_whole_package() -> None:
    """Then ex = 3 + 0.5 (3 - 4) = 2.5, x = 2.5 - 0.25 (2.5 + 1 (2.5 - 3.5)) = 2.125, z = 3.5 - 0.5
    (3.5 - 2.125) = 2.8125.
    """
    run = fb.train(one_number_federation([0.0], 1), ALL_AT_ONCE, rounds=2, dtype=torch.float64)
    assert float(run.personal_NF) == 2.125
    assert float(run.global_VF) == 2.8125
