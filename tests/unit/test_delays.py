"""Distributions of times by their quantile functions: closed forms, means, and what is refused."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.config import choose
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.schedule.delays import DELAYS, Delay
from support.exploring import examples

EXACT = examples(30)
KINDS: dict[str, Delay] = {
    "exponential": fb.Exponential(2.0),
    "weibull": fb.Weibull(shape=0.7, scale=3.0),
    "lognormal": fb.LogNormal(median=2.0, sigma=0.5),
    "gamma": fb.Gamma(shape=2.5, scale=1.5),
    "uniform": fb.Uniform(1.0, 4.0),
    "constant": fb.Constant(2.5),
    "trace": fb.Trace((3.0, 1.0, 2.0, 2.0)),
    "traces": fb.Traces(((0, 3.0), (1, 1.0), (0, 2.0), (7, 2.0))),
}
every_delay = pytest.mark.parametrize("name", KINDS)
inside = st.floats(min_value=2.0**-53, max_value=1 - 2.0**-53)


def at(delay: Delay, u: float) -> float:
    return float(delay.quantile(np.array([u]))[0])


def test_the_registry_knows_each_distribution_by_its_name() -> None:
    assert list(DELAYS) == list(KINDS)
    assert all(type(delay) is DELAYS[name] for name, delay in KINDS.items())


@every_delay
def test_a_delay_survives_being_described(name: str) -> None:
    assert choose(DELAYS, describe(KINDS[name]), "clock.step") == KINDS[name]


# ------------------------------------------------------------------------------------------------
# closed forms
CUMULATIVE: dict[str, Callable[[float], float]] = {
    "exponential": lambda t: 1 - math.exp(-t / 2.0),
    "weibull": lambda t: 1 - math.exp(-((t / 3.0) ** 0.7)),
    "lognormal": lambda t: NormalDist().cdf(math.log(t / 2.0) / 0.5),
    "uniform": lambda t: (t - 1.0) / 3.0,
}


@pytest.mark.parametrize("name", CUMULATIVE)
@EXACT
@given(u=st.floats(1e-6, 1 - 1e-6))
def test_the_quantile_is_the_inverse_of_the_distribution_function(name: str, u: float) -> None:
    """F(F^-1(u)) = u, with F from its textbook form."""
    assert CUMULATIVE[name](at(KINDS[name], u)) == pytest.approx(u, rel=1e-9, abs=1e-12)


def test_quantiles_by_hand() -> None:
    """SPEC, Latency: the Weibull quantile is lambda (-ln(1 - u))^(1/k), with the minus sign inside
    the power.
    """
    assert at(fb.Exponential(2.0), 0.5) == pytest.approx(2 * math.log(2))
    assert at(fb.Weibull(shape=2.0, scale=3.0), 1 - math.exp(-4)) == pytest.approx(6.0)
    assert at(fb.Weibull(shape=1.0, scale=2.0), 0.3) == pytest.approx(at(fb.Exponential(2.0), 0.3))
    assert at(fb.LogNormal(median=2.0, sigma=0.5), 0.5) == pytest.approx(2.0)
    assert at(fb.LogNormal(median=2.0, sigma=0.5), NormalDist().cdf(1.0)) == pytest.approx(
        2 * math.exp(0.5)
    )
    assert at(fb.Uniform(1.0, 4.0), 0.25) == 1.75
    assert at(fb.Constant(2.5), 0.99) == 2.5


@every_delay
@EXACT
@given(u=inside, v=inside)
def test_quantiles_are_finite_times_that_grow_with_u(name: str, u: float, v: float) -> None:
    low, high = sorted((u, v))
    times = KINDS[name].quantile(np.array([low, high]))
    assert np.isfinite(times).all()
    assert 0 <= times[0] <= times[1]


@every_delay
@pytest.mark.parametrize("u", [2.0**-53, 1 - 2.0**-53])
def test_the_most_extreme_draws_have_finite_times(name: str, u: float) -> None:
    """The smallest and largest values of `draws.unit`."""
    assert 0 <= at(KINDS[name], u) < math.inf


@every_delay
def test_quantiles_are_elementwise_and_keep_the_shape(name: str) -> None:
    u = np.random.default_rng(0).random((3, 4)) * 0.98 + 0.01
    times = KINDS[name].quantile(u)
    assert times.shape == (3, 4)
    assert times.dtype == np.float64
    assert times[1, 2] == at(KINDS[name], u[1, 2])


# ------------------------------------------------------------------------------------------------
# Monte Carlo
MEANS = {
    "exponential": 2.0,
    "weibull": 3.0 * math.gamma(1 + 1 / 0.7),
    "lognormal": 2.0 * math.exp(0.5**2 / 2),
    "gamma": 2.5 * 1.5,
    "uniform": 2.5,
    "constant": 2.5,
    "trace": 2.0,
    "traces": 2.0,
}


@every_delay
@pytest.mark.parametrize("source", ["numpy", "addressed draws"])
def test_the_mean_of_many_draws_is_the_known_mean(name: str, source: str) -> None:
    count = 100_000
    sources = {
        "numpy": np.random.default_rng(7).random(count),
        "addressed draws": draws.unit(draws.address(7, draws.PROCESS, np.arange(count))),
    }
    times = KINDS[name].quantile(sources[source])
    assert abs(times.mean() - MEANS[name]) <= 6 * times.std() / count**0.5 + 1e-12


@pytest.mark.parametrize("name", ["exponential", "weibull", "lognormal", "uniform"])
def test_the_quantile_agrees_with_numpys_own_generators(name: str) -> None:
    rng = np.random.default_rng(3)
    theirs = {
        "exponential": lambda n: rng.exponential(2.0, n),
        "weibull": lambda n: 3.0 * rng.weibull(0.7, n),
        "lognormal": lambda n: rng.lognormal(math.log(2.0), 0.5, n),
        "uniform": lambda n: rng.uniform(1.0, 4.0, n),
    }[name](100_000)
    for u in (0.1, 0.5, 0.9):
        below = np.mean(theirs <= at(KINDS[name], u))
        assert abs(below - u) < 6 * (u * (1 - u) / 100_000) ** 0.5


# ------------------------------------------------------------------------------------------------
# trace
def test_a_trace_gives_each_recorded_value_its_share() -> None:
    trace = fb.Trace((5.0, 1.0, 3.0))
    u = np.array([0.1, 0.3, 0.4, 0.6, 0.7, 0.9])
    assert trace.quantile(u).tolist() == [1.0, 1.0, 3.0, 3.0, 5.0, 5.0]


@EXACT
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=9), u=inside)
def test_a_trace_only_gives_recorded_values(values: list[float], u: float) -> None:
    assert at(fb.Trace(tuple(values)), u) in values


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 1000, 1 << 16])
def test_the_largest_draw_is_the_last_value_of_a_trace(count: int) -> None:
    trace = fb.Trace(tuple(float(k) for k in range(count)))
    assert at(trace, 1 - 2.0**-53) == count - 1
    assert at(trace, 2.0**-53) == 0


def test_the_order_of_a_trace_does_not_matter() -> None:
    assert fb.Trace((3.0, 1.0, 2.0)) == fb.Trace((1.0, 2.0, 3.0))


# ------------------------------------------------------------------------------------------------
# refusals
BAD = [0.0, -1.0, math.inf, math.nan]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda v: fb.Exponential(v), "exponential mean"),
        (lambda v: fb.Weibull(shape=v), "weibull shape"),
        (lambda v: fb.Weibull(shape=1.0, scale=v), "weibull scale"),
        (lambda v: fb.Gamma(shape=v, scale=1.0), "gamma shape"),
        (lambda v: fb.Gamma(shape=1.0, scale=v), "gamma scale"),
        (lambda v: fb.LogNormal(median=v, sigma=1.0), "lognormal median"),
        (lambda v: fb.LogNormal(median=1.0, sigma=v), "lognormal sigma"),
    ],
    ids=["mean", "shape", "scale", "gamma-shape", "gamma-scale", "median", "sigma"],
)
def test_a_parameter_must_be_finite_and_above_zero(
    make: Callable[[float], Delay], place: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=f"{place}={value} must be a finite number above 0"):
        make(value)


@pytest.mark.parametrize(
    ("low", "high"),
    [(2.0, 2.0), (3.0, 1.0), (-1.0, 1.0), (0.0, math.inf), (math.nan, 1.0), (0.0, math.nan)],
)
def test_a_uniform_time_has_two_bounds_in_order(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=f"uniform low={low}, high={high}"):
        fb.Uniform(low, high)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_constant_time_is_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ConfigError, match=f"constant value={value}"):
        fb.Constant(value)
    assert at(fb.Constant(0.0), 0.5) == 0.0


@pytest.mark.parametrize(
    "values",
    [(-1.0, 2.0), (1.0, math.inf), (math.nan,), (1.0, math.nan, 2.0), (0.0, 1.0, math.nan)],
)
def test_recorded_times_are_finite_and_not_negative(values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="trace values must be finite and 0 or more"):
        fb.Trace(values)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trace values=\[\] is empty"):
        fb.Trace(())


# ------------------------------------------------------------------------------------------------
# clock
def test_the_clock_is_the_papers_by_default() -> None:
    """SPEC, Clock model: arrivals Exp(mean 2), one step Exp(mean 1)."""
    assert fb.Clock() == fb.Clock(arrival=fb.Exponential(2.0), step=fb.Exponential(1.0))


@pytest.mark.parametrize("shape", [0.05, 2.5, 30.0])
def test_a_gamma_draw_does_not_depend_on_its_batch(shape: float) -> None:
    u = np.random.default_rng(1).random(200)
    assert fb.Gamma(shape).quantile(u).tolist() == [at(fb.Gamma(shape), each) for each in u]


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 5.5, 30.0, 500.0])
def test_gamma_quantiles_are_those_of_scipy(shape: float) -> None:
    u = np.concatenate([np.linspace(1e-9, 1 - 1e-9, 501), [2.0**-53, 1 - 2.0**-53]])
    assert fb.Gamma(shape, 2.0).quantile(u) == pytest.approx(
        stats.gamma(shape, scale=2).ppf(u), rel=1e-13, abs=1e-250
    )
