"""docs/errata.md by numbers: each place where a printed formula and its derivation differ, or a
step does not follow.
"""

import math

import torch

from fedbcd.theory.bounds import (
    Problem,
    certificate_bounds,
    consensus,
    device_slack,
    largest_move,
    paper_accumulation,
)
from fedbcd.theory.mixing import MixingRate, lemma_rate


def problem(**changes: float) -> Problem:
    """A small convex problem that meets every assumption."""
    values = {
        "servers": 4,
        "members": 3,
        "penalty": 0.5,
        "smoothness": 1.0,
        "diameter": 4.0,
        "gradient": 3.0,
        "excess": 10.0,
        "device_step": 0.5,
        "momentum": 0.5,
        "server_step": 0.05,
        "mixing": lemma_rate(0.5, 4, 2),
        "period": 3,
    }
    return Problem(**(values | changes))  # type: ignore[arg-type]


def test_1_the_weibull_ratio_as_printed_is_not_a_real_number() -> None:
    """SPEC, latency: r <= (-ln(1 - beta) / ln N)^(1/k), from the quantile function lambda (-ln(1 -
    u))^(1/k).
    """
    beta, n, shape, scale = 0.3, 100, 1.5, 2.0
    printed = -(complex(math.log(1 - beta)) ** (1 / shape)) * math.log(n) ** (-1 / shape)
    assert abs(printed.imag) > 0.01
    corrected = (-math.log(1 - beta) / math.log(n)) ** (1 / shape)

    def quantile(u: float) -> float:
        return float(scale * (-math.log(1 - u)) ** (1 / shape))

    assert math.isclose(corrected, quantile(beta) / quantile(1 - 1 / n))


def test_2_c6_as_printed_is_too_small_once_the_set_is_large() -> None:
    """Two servers that mix evenly, whose devices sit at opposite ends of X: sum ||zbar - z_n||^2
    grows with D^2 |Q|^2, not with D |Q|.
    """
    diameter, members, gamma, rounds = 1e6, 10, 1.0, 50
    step = 0.5 / (gamma * members)
    devices = torch.tensor([diameter / 2, -diameter / 2], dtype=torch.float64)
    z, squares = torch.zeros(2, dtype=torch.float64), 0.0
    for _ in range(rounds):
        squares += float((z[0] - z.mean()) ** 2)
        w = z.mean().expand(2)
        z = w - step * gamma * members * (w - devices)
    p = problem(
        servers=2,
        members=members,
        penalty=gamma,
        diameter=diameter,
        device_step=0.1,
        server_step=step,
        mixing=lemma_rate(0.5, 2, 1),
    )
    printed = step**2 * rounds * consensus(p, rounds).c6 / (diameter * members)
    assert squares > printed
    assert squares <= consensus(p, rounds).squares


def test_3_c5_as_printed_has_lost_a_factor_two() -> None:
    """The last factor of b(t) ends in 2 eta_z, so its part of the sum is 2 (1 - beta^T)/(1 - beta);
    print has half of that.
    """
    p, rounds = problem(start=1.0), 7
    theta, beta = p.mixing.theta, p.mixing.beta
    push = p.penalty * p.diameter * p.members
    part = sum(2 * theta * beta**t * p.servers * p.start * push * 2 for t in range(rounds))
    printed = 2 * theta * p.servers * push * (1 - beta**rounds) / (1 - beta) * p.start
    assert math.isclose(part, 2 * printed)
    assert math.isclose(part, consensus(p, rounds).c5)


def test_4_the_noise_of_every_device_counts() -> None:
    """sum_n sum_i E ||delta_i||^2 is |V| |Q| sigma^2/R; the printed 2 sigma^2/R is that of a single
    device.
    """
    sigma_over_root_r, devices = 0.3, 12
    delta = (
        torch.randn(
            4000, devices, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        * sigma_over_root_r
        / 5**0.5
    )
    measured = float(2 * delta.square().sum((1, 2)).mean())
    assert measured > 10 * 2 * sigma_over_root_r**2
    quiet, noisy = (
        problem(momentum=0.0, gradient=0.0),
        problem(momentum=0.0, gradient=0.0, noise=sigma_over_root_r),
    )
    with_noise = paper_accumulation(noisy, 100)
    rest = with_noise.c10 * sigma_over_root_r  # the part that is linear in sigma
    share = min(1 / 4, noisy.kappa) * min(noisy.device_step, noisy.server_step)
    squared = with_noise.b2 * share / max(noisy.device_step, noisy.server_step) - rest
    assert math.isclose(squared, 2 * devices * sigma_over_root_r**2)
    assert paper_accumulation(quiet, 100).b2 == 0


def test_5_the_extrapolated_point_need_not_lie_in_x() -> None:
    """The proof of ||x - x+|| <= zeta D + eta (D_g + gamma D) bounds ||ex - x+||, grad g(ex) and ex
    - z as if ex were in X.
    """
    x, previous, zeta = 1.0, -1.0, 0.5  # X = [-1, 1], D = 2
    ex = x + zeta * (x - previous)
    assert (
        abs(ex - max(-1.0, min(1.0, ex))) > 0
    )  # with a zero gradient, ||ex - x+|| <= eta ||gradient|| = 0 fails
    assert abs(ex) > 1.0  # grad of x^2/2 at ex is above its largest value on X
    assert abs(ex - -1.0) > 2.0  # ||ex - z|| is above D


def value(
    x: torch.Tensor, hessian: torch.Tensor, slope: torch.Tensor, gamma: float, z: torch.Tensor
) -> float:
    return float(x @ hessian @ x / 2 + slope @ x + gamma / 2 * (x - z).square().sum())


def test_5_the_corrected_move_holds_for_nonconvex_costs() -> None:
    """||x+ - x|| <= (1 + eta rho) zeta D + eta (D_g + gamma D): I - eta grad f is (1 + eta
    rho)-Lipschitz, and x = P(x). Lemma 1 holds with it.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        raw = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        hessian, slope = raw + raw.T, torch.randn(3, generator=generator, dtype=torch.float64)
        values = torch.linalg.eigvalsh(hessian)
        smooth, gamma = float(values.abs().max()), 0.3
        rho = max(0.0, -float(values[0]) - gamma)
        step = 1 / (smooth + gamma)
        zeta = 0.99 / math.sqrt(1 + rho * step)
        x, previous, z = (
            2 * torch.rand(3, 3, generator=generator, dtype=torch.float64) - 1
        ).unbind()
        corners = torch.tensor(
            [[a, b, c] for a in (-1.0, 1.0) for b in (-1.0, 1.0) for c in (-1.0, 1.0)],
            dtype=torch.float64,
        )
        largest = float((corners @ hessian + slope).norm(dim=1).max())
        ex = x + zeta * (x - previous)
        after = (ex - step * (hessian @ ex + slope + gamma * (ex - z))).clamp(-1, 1)
        p = problem(
            penalty=gamma,
            smoothness=smooth,
            nonconvexity=rho,
            diameter=2 * 3**0.5,
            gradient=largest,
            device_step=step,
            momentum=zeta,
        )
        assert float((after - x).norm()) <= largest_move(p)
        fall = value(x, hessian, slope, gamma, z) - value(after, hessian, slope, gamma, z)
        left = float((after - x).square().sum() / (2 * step)) - fall
        assert left <= device_slack(p, float((x - previous).norm())) + 1e-12


def test_6_without_self_weights_connected_servers_need_not_agree() -> None:
    """Assumptions 1(ii) and 3 as printed allow two servers that swap models for ever; the matrix
    lemma (c = 1, q = 1) is then false.
    """
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    rate = lemma_rate(1.0, 2, 1)
    product = torch.linalg.matrix_power(swap, 200)
    assert float((product - 0.5).abs().max()) == 0.5 > rate.theta * rate.beta**200


def test_7_b1_and_b2_grow_with_the_root_of_t() -> None:
    """They divide by eta_min = min(eta_x, eta_z) and eta_z = d/sqrt(T), so B_1/sqrt(T) does not
    fall; keeping the steps apart repairs it.
    """
    d, few, many = 0.5, 10_000, 1_000_000
    short, long = (problem(server_step=d / math.sqrt(t)) for t in (few, many))
    assert math.isclose(
        paper_accumulation(long, many).b1 / paper_accumulation(short, few).b1, 10, rel_tol=1e-6
    )
    falls = certificate_bounds(long, many).pull / certificate_bounds(short, few).pull
    assert math.isclose(falls, 0.1, rel_tol=0.05)
    noisy = [
        paper_accumulation(problem(server_step=d / math.sqrt(t), noise=0.1), t).b2
        for t in (few, many)
    ]
    assert math.isclose(noisy[1] / noisy[0], 10, rel_tol=1e-6)


def test_7_the_batch_must_grow_as_t_not_as_its_square_root() -> None:
    """B_1/sqrt(T) + B_2/sqrt(R): the repaired bound on the pull has sqrt(T) sigma^2/R, which is at
    most 1/sqrt(R) if R >= T. With R = sqrt(T) it does not fall at all.
    """
    d, sigma, times = 0.5, 2.0, (10**16, 10**18)

    def pull(t: int, batch: float) -> float:
        noise = sigma / math.sqrt(batch)
        return certificate_bounds(problem(server_step=d / math.sqrt(t), noise=noise), t).pull

    for batch, falls in ((math.sqrt, 1.0), (float, 0.1)):
        few, many = (pull(t, batch(t)) for t in times)
        assert math.isclose(many / few, falls, rel_tol=0.1)
    fixed = [pull(t, 32) for t in times]
    assert math.isclose(fixed[1] / fixed[0], 10, rel_tol=0.1)  # and with R = 32 it grows


def test_7_the_repaired_gap_falls_as_the_root_of_t() -> None:
    d, few, many = 0.5, 10_000, 1_000_000
    short, long = (problem(server_step=d / math.sqrt(t)) for t in (few, many))
    assert math.isclose(
        certificate_bounds(long, many).gap / certificate_bounds(short, few).gap, 0.1, rel_tol=0.05
    )
    assert math.isclose(
        certificate_bounds(long, many).spread / certificate_bounds(short, few).spread,
        0.1,
        rel_tol=1e-6,
    )


def test_8_rounds_without_activation_count_too() -> None:
    """One server, two devices on [-1, 1] with g = 0. Device 0 is active in round 0 only, device 1
    pulls z away from it.

    The last display of the proof bounds the mean gap of device 0 by its moves and by ||zbar -
    z_n||, which are 0 from then on.
    """
    gamma, step, rounds, diameter = 1.0, 0.1, 400, 2.0
    z, still, puller = 0.0, 0.0, 1.0
    gap = 0.0
    for _ in range(rounds):
        gradient = gamma * (still - z)
        gap += abs(gradient) * (1 if gradient < 0 else 1 + still)
        z = z - step * gamma * ((z - still) + (z - puller))
    moves = spread = 0.0  # device 0 stands at its optimum in round 0, and there is one server
    assert gap / rounds > 0.4 > 4 * diameter * moves + gamma * diameter * spread
    p = problem(
        servers=1,
        members=2,
        penalty=gamma,
        smoothness=1.0,
        diameter=diameter,
        gradient=0.0,
        excess=0.0,
        momentum=0.0,
        server_step=step,
        mixing=MixingRate(1.0, 1e-9),
        period=rounds,
    )
    assert gap / rounds <= certificate_bounds(p, rounds).gap


def test_9_the_start_counts_by_its_differences_only() -> None:
    """Servers that start alike, far from 0, agree for ever if nothing pulls: C_1 and C_3 with max
    ||z_m(0)|| are valid but empty.
    """
    mixing = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    z = mixing @ torch.full((3, 1), 1e6, dtype=torch.float64)
    assert float((z - z.mean()).abs().max()) < 1e-6
    assert consensus(problem(start=0.0), 10).c1 == 0 < consensus(problem(start=1e6), 10).c1
