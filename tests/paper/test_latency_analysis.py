"""The paragraph "Latency analysis" of section "Sync-Cloud vs. Async-Cloud", eqs. (7) and (8),
sentence by sentence.
"""

import math

import numpy as np
import pytest
from scipy import stats

import fedbcd as fb
from fedbcd.planner.order_statistics import (
    Empirical,
    expected,
    finite_support_reduction,
    large_n_reduction,
    normal_approximation,
    reduction,
    sampled,
    weibull_reduction,
)
from fedbcd.planner.round_time import async_rounds
from fedbcd.planner.server_time import DeviceModel
from support.closed_forms import expected_exponential

KINDS = [
    stats.expon(scale=2),
    stats.uniform(0, 3),
    stats.weibull_min(1.5),
    stats.gamma(2),
    stats.lognorm(0.5),
]


def test_equation_7_is_the_ratio_of_expected_order_statistics() -> None:
    """'r_{B,N} := E[tau_(B)] / E[tau_(N)]': for exponential times a ratio of harmonic sums."""
    assert reduction(stats.expon(scale=7), 3, 10) == pytest.approx(
        expected_exponential(1, 3, 10) / expected_exponential(1, 10, 10)
    )
    assert reduction(stats.uniform(0, 5), 3, 10) == pytest.approx(3 / 10)
    for distribution in KINDS:
        below, top = (sampled(distribution, k, 10, samples=20_000) for k in (3, 10))
        assert reduction(distribution, 3, 10) == pytest.approx(below.value / top.value, rel=0.02)
        assert reduction(distribution, 10, 10) == 1.0


def test_more_servers_reduce_more() -> None:
    """'consider the fact that r_{B,N} <= r_{B,N-1}'."""
    for distribution in KINDS:
        ratios = [reduction(distribution, 3, n) for n in range(3, 30)]
        assert ratios == sorted(ratios, reverse=True)


def test_equation_8_large_n_the_middle_order_statistics_are_normal() -> None:
    """'tau_(beta N) ~ N(F^-1(beta), beta (1 - beta) / (N f(F^-1(beta))^2))'."""
    for distribution in KINDS:
        normal = normal_approximation(distribution, 600, 1000)
        exact = expected(distribution, 600, 1000)
        assert normal.mean == pytest.approx(exact, rel=2e-3)
        seen = np.partition(
            distribution.ppf(np.random.default_rng(1).random((2000, 1000))), 599, axis=1
        )[:, 599]
        assert seen.var() == pytest.approx(normal.variance, rel=0.15)
        assert stats.kstest((seen - seen.mean()) / seen.std(), "norm").statistic < 0.03


def test_equation_8_the_ratio_for_large_n() -> None:
    """'r <~ F^-1(beta) / F^-1(1 - 1/N), for N >> 1': from above, and nearer as N grows."""
    for distribution in KINDS:
        far, near = (
            large_n_reduction(distribution, n // 2, n) / reduction(distribution, n // 2, n)
            for n in (20, 2000)
        )
        assert 1 < near < far < 1.5


def test_with_unbounded_times_the_gain_is_infinite_but_slow() -> None:
    """'there is an infinite gain in latency asymptotically ... the rate is slow'."""
    ratios = [large_n_reduction(stats.expon(), n // 2, n) for n in (10, 10**3, 10**6, 10**12)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(math.log(2) / math.log(10**12), rel=1e-3)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_the_weibull_bound_with_its_sign_where_it_belongs(shape: float) -> None:
    """Printed: '-(ln(1-beta))^(1/k) (log N)^(-1/k)'; meant: (-ln(1-beta) / ln N)^(1/k), from F^-1.
    'irrespective of the scale'.
    """
    for scale in (1.0, 9.0):
        distribution = stats.weibull_min(shape, scale=scale)
        for n in (10, 100, 1000):
            assert weibull_reduction(shape, 0.3, n) == pytest.approx(
                large_n_reduction(distribution, round(0.3 * n), n), rel=1e-12
            )
            assert weibull_reduction(shape, 0.3, n) > reduction(distribution, round(0.3 * n), n)


def test_with_finite_support_the_reduction_saturates() -> None:
    """'the reduction saturates to F^-1(beta) / tau_max'."""
    for distribution in (stats.uniform(0, 3), stats.beta(2, 2), Empirical([1.0, 2.0, 4.0])):
        limit = finite_support_reduction(distribution, 0.5)
        assert reduction(distribution, 1000, 2000) == pytest.approx(limit, rel=0.05)
    assert finite_support_reduction(stats.uniform(0, 3), 0.5) == 0.5


def test_smaller_beta_means_shorter_rounds_and_fewer_server_steps_in_each() -> None:
    """'the smaller is the percentage of network nodes in each update beta the slower is the update
    progress per round'.
    """
    times_RC = DeviceModel(fb.Clock(), members=10, active=3).sample(8, 3000, seed=0)
    lasts = [async_rounds(times_RC, 10, first) for first in range(1, 11)]
    assert [rounds.mean for rounds in lasts] == sorted(rounds.mean for rounds in lasts)
    ages = [rounds.staleness for rounds in lasts[:-1]]
    assert ages == sorted(ages, reverse=True)


def test_servers_that_were_left_out_carry_on_so_later_rounds_are_shorter_than_equation_7_says() -> (
    None
):
    """The analysis lets all servers start together; the Async-cloud protocol (ii) does so in its
    first round only.
    """
    source = DeviceModel(fb.Clock(), members=10, active=3)
    times_RC = source.sample(24, 4000, seed=1)
    fresh = np.sort(times_RC.reshape(-1, 10), axis=1).mean(axis=0)
    for first in (1, 3, 5, 9):
        assert async_rounds(times_RC, 10, first).mean < fresh[first - 1]
    assert async_rounds(times_RC, 10, 10).mean == pytest.approx(fresh[-1])


def test_with_b_1_nobody_waits_so_a_round_lasts_the_nth_part_of_a_server_time() -> None:
    times_RC = DeviceModel(fb.Clock(), members=10, active=3).sample(24, 8000, seed=2)
    assert async_rounds(times_RC, 10, 1).mean == pytest.approx(times_RC.mean() / 10, rel=0.01)
