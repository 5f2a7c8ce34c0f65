"""E[tau_(k)] of n in closed form, with which the quadrature is compared."""

import math
from decimal import Decimal, localcontext

from fedbcd.errors import ConfigError
from fedbcd.planner.order_statistics import check_above_zero, check_rank


def expected_exponential(mean: float, k: int, n: int) -> float:
    """mean (1/n + 1/(n-1) + ... + 1/(n-k+1)): the gaps between order statistics are exponential."""
    check_rank(k, n)
    check_above_zero(mean=mean)
    return mean * math.fsum(1 / j for j in range(n - k + 1, n + 1))


def expected_uniform(low: float, high: float, k: int, n: int) -> float:
    """low + (high - low) k / (n + 1)."""
    check_rank(k, n)
    if not 0 <= low <= high < math.inf:
        raise ConfigError(f"low={low}, high={high} must satisfy 0 <= low <= high, and be finite")
    return low + (high - low) * k / (n + 1)


def expected_weibull(shape: float, scale: float, k: int, n: int) -> float:
    """scale Gamma(1 + 1/shape) n C(n-1, k-1) sum_i (-1)^i C(k-1, i) (n-k+1+i)^-(1 + 1/shape), i = 0
    .. k-1.

    The terms are larger than their sum by about 3^n, so they are added in decimal arithmetic with
    as many more digits.
    """
    check_rank(k, n)
    check_above_zero(shape=shape, scale=scale)
    with localcontext() as context:
        context.prec = 40 + n // 2 + len(str(n))
        power = -(1 + 1 / Decimal(shape))
        terms = (
            (-1) ** i * math.comb(k - 1, i) * Decimal(n - k + 1 + i) ** power for i in range(k)
        )
        total = float(n * math.comb(n - 1, k - 1) * sum(terms, Decimal(0)))
    return scale * math.gamma(1 + 1 / shape) * total
