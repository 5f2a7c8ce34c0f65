"""The pure functions of `fedbcd.theory`, against brute force."""

import math
from dataclasses import replace

import pytest
import torch

from fedbcd.errors import ConfigError
from fedbcd.theory import assumptions
from fedbcd.theory.assumptions import Bias, Smoothness, Verdict
from fedbcd.theory.bounds import (
    Problem,
    consensus,
    paper_accumulation,
    paper_theorem,
    stable_step_limit,
)
from fedbcd.theory.certificates import (
    gap_on_ball,
    gap_on_box,
    gap_on_simplex,
    penalised_gradient,
    pull,
    spread,
)
from fedbcd.theory.curvature import Curvature, curvature, softmax_smoothness
from fedbcd.theory.mixing import (
    activation_period,
    connection_period,
    cut_off,
    lemma_rate,
    mixing_matrices,
    schedule_memory,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------
# certificates
def test_the_gap_on_a_box_is_that_of_the_worst_corner() -> None:
    gradient, x = normal(5, 4), normal(5, 4, seed=1).clamp(-1, 2)
    corners = torch.tensor(
        [[(-1.0, 2.0)[k >> b & 1] for b in range(4)] for k in range(16)], dtype=torch.float64
    )
    worst = torch.stack([((x - corner) * gradient).sum(1) for corner in corners]).amax(0)
    assert torch.allclose(gap_on_box(gradient, x, -1.0, 2.0), worst)
    low, high = torch.full((4,), -1.0).double(), torch.full((4,), 2.0).double()
    assert torch.allclose(gap_on_box(gradient, x, low, high), worst)


def test_the_gap_on_a_ball_and_on_a_simplex_is_not_exceeded_and_is_reached() -> None:
    gradient, x = normal(6), normal(6, seed=1) / 10
    points = normal(5000, 6, seed=2)
    inside = 2 * points / points.norm(dim=1, keepdim=True)
    found = float(gap_on_ball(gradient, x, 2.0))
    assert float(((x - inside) @ gradient).max()) <= found
    assert math.isclose(found, float((x + 2 * gradient / gradient.norm()) @ gradient))
    x = torch.softmax(points[0], 0) * 3
    vertices = 3 * torch.eye(6, dtype=torch.float64)
    assert math.isclose(
        float(gap_on_simplex(gradient, x, 3.0)), float(((x - vertices) @ gradient).max())
    )


def test_the_gap_is_zero_at_a_constrained_minimum_only() -> None:
    x = torch.tensor([1.0, -1.0, 0.0])
    gradient = torch.tensor([-3.0, 2.0, 0.0])  # wants out of the box
    assert float(gap_on_box(gradient, x, -1.0, 1.0)) == 0.0
    assert float(gap_on_box(-gradient, x, -1.0, 1.0)) == 10.0
    assert float(gap_on_box(torch.zeros(3), x, -math.inf, math.inf)) == 0.0
    assert float(gap_on_box(gradient, x, -math.inf, math.inf)) == math.inf


def test_pull_and_spread_are_as_defined() -> None:
    x, z, gamma = (
        normal(7, 3),
        normal(4, 3, seed=1),
        torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    direct = (gamma[:, None] * (z.mean(0) - x)).sum(0).square().sum()
    assert math.isclose(pull(gamma @ x, float(gamma.sum()), z.mean(0)), float(direct))
    assert torch.allclose(spread(z), (z - z.mean(0)).norm(dim=1))
    assert torch.equal(penalised_gradient(x[0], x[1], z[0], 2.0), x[0] + 2.0 * (x[1] - z[0]))


# ------------------------------------------------------------------------------------------------
# curvature
@pytest.mark.parametrize("shift", [0.0, -3.0, 3.0])
def test_the_ends_of_a_spectrum_are_found_from_products_alone(shift: float) -> None:
    raw = normal(60, 60)
    matrix = (raw + raw.T) / 10 + shift * torch.eye(60, dtype=torch.float64)
    values = torch.linalg.eigvalsh(matrix)
    found = curvature(lambda v: matrix @ v, normal(60, seed=3), products=60, tolerance=1e-10)
    assert math.isclose(found.high, float(values[-1]), rel_tol=1e-6)
    assert math.isclose(found.low, float(values[0]), rel_tol=1e-6)
    rough = curvature(lambda v: matrix @ v, normal(60, seed=3), products=8)
    assert (
        float(values[0]) - 1e-9 <= rough.low <= rough.high <= float(values[-1]) + 1e-9
    )  # always from inside
    assert float((values - rough.high).abs().min()) <= rough.high_error + 1e-9
    assert float((values - rough.low).abs().min()) <= rough.low_error + 1e-9


@pytest.mark.parametrize("tolerance", [1e-3, 0.1])
@pytest.mark.parametrize("ends", [(-20.0, 100.0), (-100.0, 1.0), (-3.0, 3.0), (0.0, 50.0)])
def test_neither_end_is_given_out_before_it_is_known(
    ends: tuple[float, float], tolerance: float
) -> None:
    low, high = ends
    values = torch.cat(
        [
            (
                torch.linspace(1.5, 2, 200).double()
                if high > 2
                else torch.linspace(0, 0.3, 200).double()
            ),
            torch.tensor(ends),
        ]
    )
    found = curvature(lambda v: values * v, normal(202, seed=1), tolerance=tolerance)
    assert math.isclose(found.high, high, rel_tol=tolerance)
    assert abs(found.low - low) <= tolerance * max(abs(low), 0.1 * abs(high))
    assert found.is_known_to(tolerance)
    assert found.error <= tolerance * found.smoothness


def test_the_curvature_of_a_constant_is_zero() -> None:
    found = curvature(torch.zeros_like, normal(5))
    assert (found.low, found.high, found.low_error, found.high_error) == (0.0, 0.0, 0.0, 0.0)


def test_the_smoothness_of_softmax_regression_covers_its_hessians() -> None:
    inputs, targets = normal(20, 3), torch.arange(20) % 4
    padded = torch.cat([inputs, torch.ones(20, 1, dtype=torch.float64)], 1)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(padded @ flat.reshape(4, 4).T, targets)

    for seed in range(20):
        hessian = torch.autograd.functional.hessian(loss, normal(16, seed=seed) * seed / 5)
        assert float(torch.linalg.eigvalsh(hessian)[-1]) <= softmax_smoothness(inputs)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_beyond_the_stable_step_extrapolated_steps_grow(momentum: float) -> None:
    def end(step: float) -> float:
        x = previous = 1.0
        for _ in range(2000):
            ex = x + momentum * (x - previous)
            previous, x = x, ex - step * 3.0 * ex
        return abs(x)

    limit = stable_step_limit(3.0, momentum)
    assert end(0.99 * limit) < 1e-3 < 1e3 < end(1.01 * limit)


# ------------------------------------------------------------------------------------------------
# mixing
def test_p_is_the_longest_wait_with_both_ends_counted() -> None:
    assert activation_period([0, 1, 2, 3], 4) == 1
    assert activation_period([2], 4) == 3
    assert activation_period([0], 4) == 4
    assert activation_period([1, 5], 10) == 5
    assert activation_period([], 4) is None


def test_q_is_the_longest_time_until_all_servers_have_met() -> None:
    pair, rest = [(0, 1)], [(1, 2)]
    assert connection_period(3, [pair, rest] * 5) == 2
    assert connection_period(3, [pair, pair, rest, pair, pair, rest]) == 3
    assert (
        connection_period(3, [pair, rest, pair, pair, pair, pair]) == 5
    )  # the last four do not connect
    assert connection_period(3, [pair] * 9) is None
    assert connection_period(1, []) == 1
    assert cut_off(5, [(0, 3), (1, 4)]) == [[0, 3], [1, 4], [2]]


@pytest.mark.parametrize("seed", range(5))
def test_the_matrix_lemma_and_the_memory_cover_random_schedules(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixes = [tuple(torch.randperm(4, generator=generator)[:2].tolist()) for _ in range(60)]
    matrices = mixing_matrices(4, mixes)
    q = connection_period(4, [[(first[0], first[1])] for first in mixes])
    assert q is not None
    rate = lemma_rate(0.5, 4, q)
    memory = schedule_memory(matrices).memory
    for t in range(60):
        products, product = [], torch.eye(4, dtype=torch.float64)
        for ell in range(t - 1, 0, -1):
            product = product @ matrices[ell]
            products.append(product)
            assert float((product - 0.25).abs().max()) <= rate.theta * rate.beta ** (t - ell)
        direct = max(
            (sum(float((p[n] - 0.25).abs().sum()) for p in products) for n in range(4)), default=0.0
        )
        assert math.isclose(memory[t], direct, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lemma_rate(0.0, 4, 2), "c=0.0 must be above 0"),
        (lambda: lemma_rate(0.5, 4, 0), "q=0 must be 1 or more"),
        (lambda: schedule_memory([]), "at least one mixing matrix"),
    ],
)
def test_impossible_mixing_is_refused(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------
# bounds
def make(**changes: object) -> Problem:
    values: dict[str, object] = {
        "servers": 3,
        "members": 2,
        "penalty": 0.5,
        "smoothness": 1.5,
        "diameter": 2.0,
        "gradient": 1.0,
        "excess": 5.0,
        "start": 1.0,
        "device_step": 0.5,
        "momentum": 0.3,
        "server_step": 0.1,
        "mixing": lemma_rate(0.5, 3, 2),
    }
    return Problem(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [1, 2, 10, 300])
def test_the_consensus_constants_cover_the_sum_of_the_rounds(rounds: int) -> None:
    """The display above the lemma's first result, round by round, against C_1 to C_6."""
    p = make()
    theta, beta, v = p.mixing.theta, p.mixing.beta, p.servers  # type: ignore[union-attr]
    push = p.penalty * p.diameter * p.members
    each = [
        theta * beta**t * v * p.start
        + push * p.server_step * (theta * v * sum(beta ** (t - ell) for ell in range(1, t)) + 2)
        for t in range(rounds)
    ]
    found = consensus(p, rounds)
    assert sum(each) <= found.total
    assert sum(value**2 for value in each) <= found.squares
    # long after the start the bound on the sum is the sum itself, but for what beta has not yet
    # forgotten
    if rounds == 300:
        assert found.total <= 2 * sum(each)


def test_the_theorem_gathers_the_lemmas() -> None:
    rounds = 50_000
    p = make(server_step=0.2 / rounds**0.5, noise=0.2, period=2)
    acc, thm = paper_accumulation(p, rounds), paper_theorem(p, rounds)
    assert rounds >= acc.enough_rounds
    assert acc.device <= (acc.b1 / rounds**0.5 + acc.b2) * (1 + 1e-9)
    assert acc.cloud <= (acc.b1 / rounds**0.5 + acc.b2) * (1 + 1e-9)
    assert (thm.b1, thm.b2) == (acc.b1, acc.b2)
    assert consensus(p, rounds).total / rounds <= thm.c / rounds**0.5
    assert thm.a2 > 0 == paper_theorem(make(server_step=0.2 / rounds**0.5), rounds).a2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_step": 0.6}, r"device_step=0.6 exceeds 0.5 = 1/\(L \+ gamma\)"),
        ({"server_step": 1.1}, r"server_step=1.1 exceeds 1 = 1/\(gamma \|Q\|\)"),
        ({"momentum": 0.9, "nonconvexity": 2.0}, "momentum=0.9 must be below 0.707"),
        (
            {"diameter": math.inf},
            (
                "diameter=inf must be a finite number above 0; all bounds hold D_X, so there are"
                " none without a compact X"
            ),
        ),
        ({"noise": -1.0}, "noise=-1.0 must be a finite number, 0 or more"),
        ({"period": 0}, "period=0 must be 1 or more"),
        (
            {"mixing": schedule_memory(mixing_matrices(3, [(0, 1)]))},
            "start=1 must be 0 with the memory of a schedule",
        ),
    ],
)
def test_a_problem_outside_the_assumptions_is_refused_with_the_bound(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_schedule_shorter_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="the schedule has 1 rounds, fewer than T=5"):
        consensus(make(start=0.0, mixing=schedule_memory(mixing_matrices(3, [(0, 1)]))), 5)


# ------------------------------------------------------------------------------------------------
# assumptions
SEEN = Smoothness(
    {"at the start": {0: Curvature(-0.5, 1.0, 0.1, 0.1), 4: Curvature(-2.0, 3.0, 0.1, 0.2)}}
)
SAME = [1.0] * 5  # gamma_i


def test_a_step_fails_by_an_instance_holds_by_a_bound_and_is_otherwise_unknown() -> None:
    assert assumptions.device_step(0.5, SAME, SEEN).verdict is Verdict.FAILS
    assert assumptions.device_step(0.5, SAME, SEEN).remedy == "device_step <= 0.25"
    assert assumptions.device_step(0.2, SAME, SEEN).verdict is Verdict.UNKNOWN
    assert assumptions.device_step(0.2, SAME, None).verdict is Verdict.UNKNOWN
    bounded = Smoothness(SEEN.seen, bounds=[4.0, 1.0, 1.0, 1.0, 3.0], convex=True)
    assert assumptions.device_step(0.2, SAME, bounded).verdict is Verdict.HOLDS
    assert assumptions.smoothness(bounded).verdict is Verdict.HOLDS


def test_momentum_is_judged_by_the_nonconvexity_left_after_the_penalty() -> None:
    assert (
        assumptions.momentum(0.7, 0.1, SAME, SEEN).verdict is Verdict.HOLDS
    )  # below 1/sqrt(2): enough for any rho
    assert (
        assumptions.momentum(0.9, 0.1, SAME, SEEN).verdict is Verdict.UNKNOWN
    )  # rho = 1 asks for 0.953
    assert assumptions.momentum(0.96, 0.1, SAME, SEEN).verdict is Verdict.FAILS
    assert assumptions.momentum(0.96, 0.1, SAME, SEEN).remedy == "momentum < 0.953"
    assert assumptions.momentum(0.9, 0.1, SAME, None).verdict is Verdict.UNKNOWN


def test_every_device_is_judged_with_its_own_penalty() -> None:
    """The steepest device here has the smallest penalty, and the least convex one the largest."""
    seen = Smoothness(
        {"here": {0: Curvature(-1.0, 40.0, 0.1, 0.2), 1: Curvature(-30.0, 31.0, 0.1, 0.2)}},
        bounds=[40.0, 31.0],
    )
    gamma = [1.0, 25.0]
    assert assumptions.device_step(1 / 56, gamma, seen).verdict is Verdict.HOLDS  # not 1/(40 + 25)
    assert (
        assumptions.device_step(1 / 56, gamma, replace(seen, bounds=())).verdict is Verdict.UNKNOWN
    )
    fails = assumptions.device_step(1 / 55, gamma, seen)
    assert fails.verdict is Verdict.FAILS
    assert fails.remedy == "device_step <= 0.0178"
    assert (
        "(rho_i = 5 +- 0.1)" in assumptions.momentum(0.9, 0.1, gamma, seen).found
    )  # of device 1: 30 - 25, not 30 - 1
    assert (
        assumptions.momentum(0.9, 0.1, [1.0, 60.0], seen).verdict is Verdict.UNKNOWN
    )  # rho_0 = 0, rho_1 = 0


def test_a_penalty_alone_can_be_too_large_for_the_step() -> None:
    """L_i is at least 0, so eta_x <= 1/gamma_i also on devices that were not looked at."""
    for known in (SEEN, None):
        finding = assumptions.device_step(0.1, [1.0, 1.0, 50.0, 1.0, 1.0], known)
        assert finding.verdict is Verdict.FAILS
        assert finding.remedy == "device_step <= 0.02"


def test_without_bounds_on_x_statements_lapse_and_nothing_fails() -> None:
    finding = assumptions.compactness(math.inf)
    assert finding.verdict is Verdict.LAPSES
    assert "Theorem 1" in finding.found
    assert "norm of the gradient mapping" in finding.found
    assert assumptions.compactness(3.0).verdict is Verdict.HOLDS


def test_gradients_that_may_be_biased_are_not_said_to_be_unbiased() -> None:
    clear = Bias(
        ("batch normalisation",), ("group normalisation",), measured=0.18, error=0.002, gradient=2.4
    )
    assert assumptions.noise(1.0, 32, 4, clear).verdict is Verdict.FAILS
    assert "0.18 on a gradient of length 2.4" in assumptions.noise(1.0, 32, 4, clear).found
    chance = replace(clear, measured=0.01)
    assert assumptions.noise(1.0, 32, 4, chance).verdict is Verdict.UNKNOWN
    assert assumptions.noise(1.0, 32, 4, Bias(("dropout",), ())).verdict is Verdict.UNKNOWN
    assert assumptions.noise(1.0, 32, 4).verdict is Verdict.HOLDS


def test_a_step_that_fails_does_not_vouch_for_the_momentum() -> None:
    steep = Smoothness(
        {"here": {0: Curvature(-1.0, 1.0, 0.01, 0.01), 1: Curvature(-44.0, 50.0, 0.1, 0.2)}}
    )
    fails = assumptions.device_step(0.05, SAME, steep).verdict is Verdict.FAILS
    assert fails
    for zeta in (0.6, 0.72):
        finding = assumptions.momentum(zeta, 0.05, SAME, steep, fails)
        assert finding.verdict is Verdict.FAILS
        assert "less than 0.563 here (rho_i = 43 +- 0.1)" in finding.found
    calm = assumptions.momentum(0.5, 0.05, SAME, steep, fails)
    assert calm.verdict is Verdict.UNKNOWN
    assert calm.remedy == "momentum < 0.707 is always enough once 4(i) holds"
    assert assumptions.momentum(0.5, 0.05, SAME, None, step_fails=False).verdict is Verdict.HOLDS
    assert "1 to 50 +- 0.2 here" in assumptions.smoothness(steep).found


def test_server_steps_must_be_small_and_equal() -> None:
    assert assumptions.server_step({"a": 0.1}, 1.0, 10, 100).verdict is Verdict.HOLDS
    assert (
        assumptions.server_step({"a": 0.5}, 1.0, 10, 100).remedy
        == "server_step <= 0.1 in absolute form"
    )
    assert (
        "differs between servers"
        in assumptions.server_step({"a": 0.1, "b": 0.05}, 1.0, 10, 100).found
    )


def test_devices_and_servers_that_are_left_out_are_named() -> None:
    never = assumptions.activation({0: [1, 3], 1: []}, {0: 4, 1: 4}, "planned")
    assert never.verdict is Verdict.FAILS
    assert "1 of 2 devices never active in 4 rounds (planned): 1" in never.found
    apart = assumptions.connectivity(4, [[(0, 1)], [(2, 3)]], "planned")
    assert apart.verdict is Verdict.FAILS
    assert "{0, 1}; {2, 3}" in apart.found
    assert "[2, 3]" in apart.remedy


def test_matrices_are_judged_by_self_weights_and_sums() -> None:
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert [f.verdict for f in assumptions.mixing_weights([swap])] == [Verdict.FAILS, Verdict.HOLDS]
    half = torch.tensor([[0.5, 0.5], [0.4, 0.6]], dtype=torch.float64)
    first, second = assumptions.mixing_weights([half])
    assert first.found == "c = 0.4"
    assert second.verdict is Verdict.FAILS
    assert "off 1 by 0.1" in second.found


def test_sets_and_noise() -> None:
    assert assumptions.compactness(4.0).verdict is Verdict.HOLDS
    assert assumptions.compactness(math.inf).verdict is Verdict.LAPSES
    assert assumptions.compactness(None).verdict is Verdict.UNKNOWN
    assert "sigma/sqrt(R) = 0.5" in assumptions.noise(2.0, 16, 3).found
    assert "exact" in assumptions.noise(None, None, 3).found
    assert assumptions.noise(None, 16, 3).verdict is Verdict.HOLDS
