"""Expected order statistics: closed forms, quadrature, samples and sampling agree; the paper's
large-N formulas are near; bad input is named.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.planner.order_statistics import (
    Empirical,
    deviation,
    distribution_of,
    expected,
    expected_all,
    finite_support_reduction,
    large_n,
    large_n_reduction,
    limit_of,
    normal_approximation,
    reduction,
    sampled,
    weibull_reduction,
)
from support.closed_forms import expected_exponential, expected_uniform, expected_weibull

RANKS = [(1, 1), (1, 10), (3, 10), (10, 10), (1, 100), (50, 100), (100, 100)]
SAMPLE = np.random.default_rng(7).gamma(2.0, 1.5, 300)
KINDS = {
    "exponential": stats.expon(scale=2),
    "uniform": stats.uniform(1, 3),
    "weibull": stats.weibull_min(1.5, scale=2),
    "gamma": stats.gamma(2, scale=1.5),
    "lognormal": stats.lognorm(0.5, scale=2),
    "empirical": Empirical(SAMPLE),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("k", "n"), RANKS)
def test_quadrature_agrees_with_the_closed_forms_to_twelve_digits(k: int, n: int) -> None:
    assert expected(stats.expon(scale=2), k, n) == pytest.approx(
        expected_exponential(2.0, k, n), rel=1e-12
    )
    assert expected(stats.uniform(1, 3), k, n) == pytest.approx(
        expected_uniform(1.0, 4.0, k, n), rel=1e-12
    )
    for shape in (0.5, 0.7, 1.5, 4.0):
        exact = expected_weibull(shape, 3.0, k, n)
        assert expected(stats.weibull_min(shape, scale=3), k, n) == pytest.approx(exact, rel=1e-12)


def test_known_values() -> None:
    """By hand: harmonic sums, k/(n+1), 1/sqrt(pi) for the larger of two normals, and the largest of
    n Pareto variates.
    """
    assert expected_exponential(1.0, 3, 3) == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert expected_uniform(0.0, 1.0, 2, 3) == 0.5
    assert expected_weibull(1.0, 2.0, 2, 4) == pytest.approx(2 * (1 / 4 + 1 / 3))
    assert expected(stats.norm(), 2, 2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12)
    for tail in (1.05, 1.2, 3.0):
        largest = math.gamma(1 - 1 / tail) * math.gamma(11) / math.gamma(11 - 1 / tail)
        assert expected(stats.pareto(tail), 10, 10) == pytest.approx(largest, rel=1e-10)


@every_kind
def test_sampling_agrees_within_its_error(kind: str) -> None:
    for k, n in ((1, 10), (3, 10), (10, 10)):
        found = sampled(KINDS[kind], k, n, samples=20_000, seed=3)
        assert abs(found.value - expected(KINDS[kind], k, n)) < 4 * found.error
        assert found.error < 0.01 * found.value


@every_kind
def test_the_mean_over_all_ranks_is_the_mean(kind: str) -> None:
    assert expected_all(KINDS[kind], np.arange(1, 21), 20).mean() == pytest.approx(
        KINDS[kind].mean(), rel=1e-9
    )


def test_a_quantile_function_with_kinks_or_steps_is_integrated_too() -> None:
    triangle = stats.triang(0.3)
    assert expected_all(triangle, np.arange(1, 6), 5).mean() == pytest.approx(
        triangle.mean(), rel=1e-6
    )
    bars = stats.rv_histogram(np.histogram([1.0, 1.5, 4.0, 4.2, 4.4], bins=3))
    assert expected_all(bars, np.arange(1, 4), 3).mean() == pytest.approx(bars.mean(), rel=1e-6)


def test_an_empirical_sample_is_exact() -> None:
    """Two values, two draws: the larger is 1 with probability 1/4, otherwise 3."""
    assert expected(Empirical([3.0, 1.0]), 2, 2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert expected(Empirical([5.0]), 4, 9) == 5.0
    assert Empirical([1.0, 2.0, 3.0, 4.0]).ppf([0.0, 0.25, 0.26, 1.0]).tolist() == [
        1.0,
        1.0,
        2.0,
        4.0,
    ]


@pytest.mark.parametrize(
    "delay",
    [
        fb.Exponential(2.0),
        fb.Weibull(1.5, 2.0),
        fb.LogNormal(2.0, 0.5),
        fb.Gamma(2.0, 1.5),
        fb.Uniform(1, 4),
        fb.Constant(2),
        fb.Trace((1, 3)),
    ],
    ids=lambda d: d.name,
)
def test_a_delay_has_the_quantiles_of_its_distribution(delay: fb.Exponential) -> None:
    u = np.array([0.01, 0.3, 0.6, 0.99])
    assert distribution_of(delay).ppf(u) == pytest.approx(delay.quantile(u), rel=1e-9)


def test_the_error_of_the_normal_approximation_falls_with_n() -> None:
    for distribution in (stats.expon(), stats.gamma(2), stats.lognorm(0.5)):
        errors = [
            abs(
                normal_approximation(distribution, n // 2, n).mean
                - expected(distribution, n // 2, n)
            )
            for n in (10, 100, 1000)
        ]
        assert errors[0] > 5 * errors[1] > 25 * errors[2]


def test_the_variance_of_the_normal_approximation_is_that_of_samples() -> None:
    found = sampled(stats.expon(), 500, 1000, samples=4000)
    variance = found.error**2 * 4000
    assert normal_approximation(stats.expon(), 500, 1000).variance == pytest.approx(
        variance, rel=0.1
    )


@pytest.mark.parametrize("k", [0, 11])
def test_a_rank_that_is_not_there_is_named(k: int) -> None:
    for call in (
        lambda: expected(stats.expon(), k, 10),
        lambda: sampled(stats.expon(), k, 10),
        lambda: expected_exponential(1.0, k, 10),
        lambda: expected_uniform(0, 1, k, 10),
        lambda: expected_weibull(1.0, 1.0, k, 10),
        lambda: reduction(stats.expon(), k, 10),
        lambda: large_n_reduction(stats.expon(), k, 10),
    ):
        with pytest.raises(
            ConfigError, match=f"B={k} of 10 servers cannot be waited for; use 1 <= B <= 10"
        ):
            call()


@pytest.mark.parametrize(
    "distribution", [stats.cauchy(), stats.pareto(1.0), stats.pareto(0.5), stats.halfcauchy()]
)
def test_a_distribution_without_a_mean_is_named(distribution: object) -> None:
    for call in (expected, sampled, reduction, large_n_reduction):
        with pytest.raises(ConfigError, match="has no mean, so no expected round time"):
            call(distribution, 1, 3)


def test_other_bad_input_is_named() -> None:
    for call, words in (
        (lambda: Empirical([]), "needs at least one value"),
        (lambda: Empirical([1.0, math.nan]), "must be finite numbers"),
        (
            lambda: expected(stats.poisson(3), 1, 3),
            "is not a continuous distribution of scipy.stats",
        ),
        (lambda: sampled(stats.expon(), 1, 3, samples=1), "samples=1 must be 2 or more"),
        (lambda: normal_approximation(stats.expon(), 3, 3), "has no normal limit"),
        (lambda: normal_approximation(Empirical([1.0, 2.0]), 1, 2), "has no density"),
        (lambda: weibull_reduction(1.0, 1.0, 10), "beta=1.0 must be above 0 and below 1"),
        (lambda: weibull_reduction(1.0, 0.5, 1), "n=1 must be 2 or more"),
        (lambda: finite_support_reduction(stats.expon(), 0.5), "has no longest time"),
        (lambda: distribution_of(object()), "has no known distribution"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weibull_reduction(0, 0.3, 100), "shape=0 must be a finite number above 0"),
        (lambda: expected_weibull(0, 1, 1, 3), "shape=0 must be a finite number above 0"),
        (lambda: expected_weibull(1, -2, 1, 3), "scale=-2 must be a finite number above 0"),
        (lambda: expected_exponential(-1, 1, 3), "mean=-1 must be a finite number above 0"),
        (lambda: expected_uniform(5, 1, 1, 3), "low=5, high=1 must satisfy 0 <= low <= high"),
    ],
)
def test_parameters_that_cannot_be_are_named(call: Callable[[], float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


# ------------------------------------------------------------------------------------------------
# large N
@pytest.mark.parametrize(
    ("distribution", "off"),
    [
        (stats.expon(scale=2), 0.11),
        (stats.weibull_min(0.7, scale=2), 0.18),
        (stats.uniform(0, 4), 0.01),
    ],
)
def test_the_error_of_the_ratio_by_equation_8_is_told_at_n_200(
    distribution: Any, off: float
) -> None:
    """Far more than that of one order statistic, for F^-1(1 - 1/N) is no mean of the largest."""
    (found,) = large_n(distribution, [100], 200)
    exact = expected(distribution, 100, 200) / expected(distribution, 200, 200)
    assert found.exact == pytest.approx(exact, rel=1e-12)
    assert found.error == pytest.approx(found.ratio / exact - 1)
    assert found.error == pytest.approx(off, abs=0.006)
    assert found.deviation == pytest.approx(
        math.sqrt(normal_approximation(distribution, 100, 200).variance)
    )
    assert found.limit is not None
    assert found.limit_error == pytest.approx(found.limit / exact - 1)


def test_closed_forms_are_asked_of_the_law_they_are_for() -> None:
    assert limit_of(stats.weibull_min(c=0.7, scale=9), 30, 100) == weibull_reduction(0.7, 0.3, 100)
    assert limit_of(stats.expon(scale=3), 30, 100) == weibull_reduction(1.0, 0.3, 100)
    assert limit_of(stats.uniform(0, 4), 30, 100) == pytest.approx(0.3)
    assert limit_of(Empirical([1.0, 4.0]), 30, 100) == pytest.approx(1 / 4)
    assert limit_of(stats.expon(loc=1.0), 30, 100) is None
    assert limit_of(stats.gamma(2.0), 30, 100) is None
    assert limit_of(stats.uniform(0, 4), 100, 100) is None
    (sampled_only,) = large_n(Empirical([1.0, 4.0]), [30], 100, closed=False)
    assert sampled_only.limit is sampled_only.deviation is None


def test_the_deviation_of_one_server_time() -> None:
    assert deviation(stats.gamma(4.0, scale=3.0)) == pytest.approx(6.0)
    assert deviation(Empirical([1.0, 3.0])) == pytest.approx(1.0)
    assert deviation(stats.pareto(1.5)) is None
