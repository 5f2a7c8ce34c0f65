"""Expected order statistics of server times: E[tau_(k)], the k-th smallest of N independent tau_n
("Latency analysis", eqs. (7)-(8)).

A distribution is a frozen continuous one of scipy.stats, or an `Empirical` sample. In all of this F
is its distribution function, F^-1 its quantile function, and tau_(k) has the law of F^-1(U) with U
~ Beta(k, N - k + 1).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import integrate, special, stats

from fedbcd.algorithm import draws
from fedbcd.errors import ConfigError
from fedbcd.schedule.delays import (
    Constant,
    Delay,
    Exponential,
    Floats,
    Gamma,
    LogNormal,
    Trace,
    Uniform,
    Weibull,
)

PRECISION = 1e-9  # relative, of the quadrature
PANELS: Floats = np.array([0.0, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 600])


class Empirical:
    """A recorded sample as a distribution: each of its values is equally likely, or as likely as
    its weight says.
    """

    def __init__(self, values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> None:
        found = np.asarray(values, dtype=np.float64).ravel()
        if found.size == 0:
            raise ConfigError("an empirical sample needs at least one value; it is empty")
        if not np.isfinite(found).all():
            raise ConfigError("an empirical sample must be finite numbers; remove what is not")
        order = np.argsort(found, kind="stable")
        weight = (
            np.ones(found.size) if weights is None else np.asarray(weights, dtype=np.float64)[order]
        )
        self.values: Floats = found[order]
        self.share: Floats = np.concatenate(
            [[0.0], np.cumsum(weight) / weight.sum()]
        )  # F, before the first value and at each
        self.share[-1] = 1.0

    def mean(self) -> float:
        return float(np.diff(self.share) @ self.values)

    def std(self) -> float:
        return math.sqrt(float(np.diff(self.share) @ (self.values - self.mean()) ** 2))

    def support(self) -> tuple[float, float]:
        return float(self.values[0]), float(self.values[-1])

    def ppf(self, u: npt.ArrayLike) -> Floats:
        """F^-1(u): the smallest value whose share of the sample, with all below it, is at least
        u.
        """
        return np.asarray(
            self.values[np.searchsorted(self.share[1:], np.asarray(u, dtype=np.float64))]
        )


Distribution: TypeAlias = Any  # a frozen continuous distribution of scipy.stats, or Empirical


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number that was sampled, with its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal approximation: mean and variance."""

    mean: float
    variance: float


def distribution_of(delay: Delay) -> Distribution:
    match delay:
        case Exponential():
            return stats.expon(scale=delay.mean)
        case Weibull():
            return stats.weibull_min(delay.shape, scale=delay.scale)
        case LogNormal():
            return stats.lognorm(delay.sigma, scale=delay.median)
        case Gamma():
            return stats.gamma(delay.shape, scale=delay.scale)
        case Uniform():
            return stats.uniform(delay.low, delay.high - delay.low)
        case Constant():
            return Empirical([delay.value])
        case Trace():
            return Empirical(delay.values)
    raise ConfigError(f"{delay!r} has no known distribution; sample it instead")


# ------------------------------------------------------------------------------------------------
# exactly
def expected(distribution: Distribution, k: int, n: int) -> float:
    """E[tau_(k)] of `n`: exact for a sample, by quadrature to nine digits for a distribution of
    scipy.
    """
    return float(expected_all(distribution, np.array([k]), n)[0])


def expected_all(distribution: Distribution, k: npt.NDArray[np.int64], n: int) -> Floats:
    for each in k.tolist():
        check_rank(each, n)
    check_mean(distribution)
    if isinstance(distribution, Empirical):
        return _expected_of_sample(distribution, k, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's, about quantiles too far out to matter
        return _integrated(distribution, k, n)


def _integrated(distribution: Distribution, k: npt.NDArray[np.int64], n: int) -> Floats:
    """Fixed panels with twice the points agree for a smooth quantile function; where they do not,
    panels are halved where it matters.
    """
    coarse, fine = (_panels(distribution, k, n, points) for points in (24, 48))
    for place in np.flatnonzero(~(np.abs(fine - coarse) <= PRECISION * np.abs(fine))):
        fine[place] = _halving(distribution, k[place : place + 1], n)
    return fine


def _expected_of_sample(sample: Empirical, k: npt.NDArray[np.int64], n: int) -> Floats:
    """sum_j x_j (P(tau_(k) <= x_j) - P(tau_(k) <= x_{j-1})), P(tau_(k) <= x_j) = I_{F(x_j)}(k, n -
    k + 1).
    """
    below = special.betainc(k[:, None], n - k[:, None] + 1, sample.share)
    return np.asarray(np.diff(below, axis=1) @ sample.values)


def _integrand(distribution: Distribution, k: npt.NDArray[np.int64], n: int, s: Floats) -> Floats:
    """E[F^-1(U)] = int_0^(1/2) F^-1(b(v)) + F^-1(1 - c(v)) dv, b and c the quantiles of U and of 1
    - U; here with v = exp(-s) / 2.

    In s the ends, where quantile functions grow without bound, are spread out.
    """
    v = np.exp(-s) / 2
    k = k[:, None].astype(np.float64)
    head = _finite(distribution.ppf(special.betaincinv(k, n - k + 1, v)))
    tail = _finite(distribution.isf(special.betaincinv(n - k + 1, k, v)))
    return (head + tail) * v


def _panels(distribution: Distribution, k: npt.NDArray[np.int64], n: int, points: int) -> Floats:
    """The integral over s by Gauss-Legendre on panels of doubling width."""
    node, weight = np.polynomial.legendre.leggauss(points)
    half = np.diff(PANELS)[:, None] / 2
    s = (PANELS[:-1, None] + half * (node + 1)).ravel()
    return np.asarray(_integrand(distribution, k, n, s) @ (half * weight).ravel())


def _halving(distribution: Distribution, k: npt.NDArray[np.int64], n: int) -> float:
    """The integral over s by adaptive quadrature: for quantile functions with kinks or steps."""

    def at(s: float) -> float:
        found = float(_integrand(distribution, k, n, np.array([s]))[0, 0])
        return (
            found if math.isfinite(found) else 0.0
        )  # the quantile function has given up: beyond 1e-16, of no weight

    parts = [
        integrate.quad(at, low, high, limit=500)[:2] for low, high in pairwise(PANELS.tolist())
    ]
    total, error = (math.fsum(column) for column in zip(*parts, strict=True))
    if not error <= 1e-5 * abs(total):
        raise ConfigError(
            f"E[tau_({k[0]})] of {_name(distribution)} does not settle; draw a sample of it and use"
            " Empirical"
        )
    return total


def _finite(values: npt.ArrayLike) -> Floats:
    """Where a quantile function gives up (beyond 1 - 1e-16, say), its last finite value: what is
    left out weighs less than rounding.
    """
    found = np.asarray(values, dtype=np.float64)
    last = np.where(np.isfinite(found), np.abs(found), 0).argmax(axis=1)
    return np.where(np.isfinite(found), found, found[np.arange(len(found)), last][:, None])


# ------------------------------------------------------------------------------------------------
# by sampling
def sampled(
    distribution: Distribution, k: int, n: int, samples: int = 10_000, seed: int = 0
) -> Estimate:
    check_rank(k, n)
    check_mean(distribution)
    if samples < 2:
        raise ConfigError(f"samples={samples} must be 2 or more, to tell the error")
    u = uniforms(seed, 0, samples, n)
    found = np.partition(distribution.ppf(u), k - 1, axis=1)[:, k - 1]
    return Estimate(float(found.mean()), float(found.std(ddof=1) / math.sqrt(samples)))


def uniforms(seed: int, part: int, rows: int, columns: int, begin: int = 0) -> Floats:
    """Addressed uniform numbers for planning, from row `begin` on: one row per time that is
    sampled.
    """
    row, column = np.arange(begin, begin + rows)[:, None], np.arange(columns)[None, :]
    return draws.unit(draws.address(seed, draws.PLANNING, np.array([[part]]), row, column))


# ------------------------------------------------------------------------------------------------
# large N, eq. (8)
def normal_approximation(distribution: Distribution, k: int, n: int) -> Normal:
    """Eq. (8): tau_(beta N) ~ N(F^-1(beta), beta (1 - beta) / (N f(F^-1(beta))^2)), beta = k / n
    below 1.
    """
    check_rank(k, n)
    if k == n:
        raise ConfigError(
            f"k={k} of {n} is the largest, which has no normal limit; use F^-1(1 - 1/N), as"
            " large_n_reduction does"
        )
    if isinstance(distribution, Empirical):
        raise ConfigError(
            "a sample has no density f, which the variance of eq. (8) needs; fit a distribution to"
            " it first"
        )
    beta = k / n
    middle = float(distribution.ppf(beta))
    return Normal(middle, beta * (1 - beta) / (n * float(distribution.pdf(middle)) ** 2))


def reduction(distribution: Distribution, first: int, n: int) -> float:
    """Eq. (7): r_{B,N} = E[tau_(B)] / E[tau_(N)], exactly; B = `first`."""
    below, top = expected_all(distribution, np.array([first, n]), n)
    return _ratio(below, top)


def large_n_reduction(distribution: Distribution, first: int, n: int) -> float:
    """Eq. (8): r_{beta N,N} is about F^-1(beta) / F^-1(1 - 1/N) for large N; at B = N, where beta
    is 1, both are the largest.
    """
    check_rank(first, n)
    check_mean(distribution)
    if first == n:
        return 1.0
    return _ratio(float(distribution.ppf(first / n)), float(distribution.ppf(1 - 1 / n)))


def weibull_reduction(shape: float, beta: float, n: int) -> float:
    """r <= about (-ln(1 - beta) / ln N)^(1/shape), whatever the scale. (The paper prints the minus
    sign outside the power.)
    """
    check_above_zero(shape=shape)
    _check_beta(beta)
    if n < 2:
        raise ConfigError(f"n={n} must be 2 or more: the bound divides by ln N")
    return float((-math.log1p(-beta) / math.log(n)) ** (1 / shape))


def finite_support_reduction(distribution: Distribution, beta: float) -> float:
    """With times in [0, tau_max], r tends to F^-1(beta) / tau_max."""
    _check_beta(beta)
    longest = float(distribution.support()[1])
    if not math.isfinite(longest):
        raise ConfigError(
            f"{_name(distribution)} has no longest time; r tends to 0 there, at the rate of"
            " large_n_reduction"
        )
    return _ratio(float(distribution.ppf(beta)), longest)


@dataclass(frozen=True, slots=True)
class LargeN:
    """The paper's analysis for large N beside the exact r of the same B and N."""

    first: int  # B
    middle: float  # F^-1(beta), the mean of eq. (8)'s normal law; B = N: F^-1(1 - 1/N)
    deviation: float | None  # and its standard deviation; None: B = N, or no density
    exact: float  # r_{B,N}, eq. (7)
    ratio: float  # r by eq. (8)
    error: float  # ratio / exact - 1
    limit: float | None  # the closed form of `limit_of`; None: there is none
    limit_error: float | None


def large_n(
    distribution: Distribution, firsts: Sequence[int], n: int, closed: bool = True
) -> tuple[LargeN, ...]:
    """What eq. (8) and the closed forms below it say of each B, and how far r by them is off;
    `closed`: it is the law itself, and no sample of it.
    """
    *below, top = expected_all(distribution, np.array([*firsts, n]), n)
    exact = [_ratio(each, top) for each in below]
    return tuple(
        _large_n(distribution, first, n, r, limit_of(distribution, first, n) if closed else None)
        for first, r in zip(firsts, exact, strict=True)
    )


def _large_n(
    distribution: Distribution, first: int, n: int, exact: float, limit: float | None
) -> LargeN:
    ratio = large_n_reduction(distribution, first, n)
    has_law = first < n and not isinstance(distribution, Empirical)
    law = normal_approximation(distribution, first, n) if has_law else None
    return LargeN(
        first,
        float(distribution.ppf(min(first / n, 1 - 1 / n))),
        None if law is None or not math.isfinite(law.variance) else math.sqrt(law.variance),
        exact,
        ratio,
        _off(ratio, exact),
        limit,
        None if limit is None else _off(limit, exact),
    )


def _off(ratio: float, exact: float) -> float:
    return ratio / exact - 1 if exact > 0 else 0.0


def limit_of(distribution: Distribution, first: int, n: int) -> float | None:
    """The closed form for this kind of times: Weibull (exponential: of shape 1), or what r
    saturates to on a finite support; None where the paper has none, and at B = N.
    """
    if first == n or n < 2:
        return None
    shape = _weibull_shape(distribution)
    if shape is not None:
        return weibull_reduction(shape, first / n, n)
    if not math.isfinite(float(distribution.support()[1])):
        return None
    return finite_support_reduction(distribution, first / n)


def _weibull_shape(distribution: Distribution) -> float | None:
    """Of Weibull times that begin at 0."""
    kind = getattr(getattr(distribution, "dist", None), "name", "")
    if kind not in ("weibull_min", "expon") or float(distribution.support()[0]) != 0.0:
        return None
    return 1.0 if kind == "expon" else float([*distribution.args, distribution.kwds.get("c")][0])


def deviation(distribution: Distribution) -> float | None:
    """sigma_tau, the standard deviation of one tau_n; None where it is infinite."""
    found = float(distribution.std())
    return found if math.isfinite(found) else None


# ------------------------------------------------------------------------------------------------
# checks
def check_rank(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ConfigError(f"B={k} of {n} servers cannot be waited for; use 1 <= B <= {n}")


def check_mean(distribution: Distribution) -> None:
    """Refuse a distribution without a finite mean, and one that is not continuous."""
    if isinstance(distribution, Empirical):
        return
    if not hasattr(distribution, "isf") or not hasattr(distribution, "pdf"):
        raise ConfigError(
            f"{_name(distribution)} is not a continuous distribution of scipy.stats; draw a sample"
            " of it and use Empirical"
        )
    mean = float(distribution.mean())
    if not math.isfinite(mean):
        raise ConfigError(
            f"{_name(distribution)} has no mean, so no expected round time; cut it off at a longest"
            " time, or use a recorded sample"
        )


def check_above_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} must be a finite number above 0")


def _check_beta(beta: float) -> None:
    if not 0 < beta < 1:
        raise ConfigError(
            f"beta={beta} must be above 0 and below 1, the share of servers that is waited for"
        )


def _ratio(below: float, top: float) -> float:
    return float(below / top) if top > 0 else 1.0


def _name(distribution: Distribution) -> str:
    kind = getattr(getattr(distribution, "dist", None), "name", type(distribution).__name__)
    named = [f"{key}={value:g}" for key, value in getattr(distribution, "kwds", {}).items()]
    arguments = [f"{value:g}" for value in getattr(distribution, "args", ())]
    return f"{kind}({', '.join(arguments + named)})"
