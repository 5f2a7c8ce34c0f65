"""How pools are shared out: addressed choices, whole numbers in proportion, Dirichlet proportions
(docs/determinism.md).
"""

import math

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.errors import DataError

Positions = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ATTEMPTS = 100  # each is accepted with a probability above 0.95, so 100 in a row are not refused


def smallest(stream: int, seed: int, device: int, items: Positions, count: int) -> Positions:
    """The `count` items with the smallest addressed draws, in ascending order."""
    items = items.astype(np.int64)
    keys = draws.unit(draws.address(seed, stream, np.array([device]), items))
    return np.sort(items[np.argsort(keys, kind="stable")[:count]])


def shuffled(seed: int, items: Positions) -> Positions:
    return items[np.argsort(draws.unit(draws.address(seed, draws.SHUFFLE, items)), kind="stable")]


def parts(weights: Floats, total: int) -> Positions:
    """Whole numbers that sum to `total`, in proportion to `weights`."""
    bounds = np.rint(np.cumsum(weights) / weights.sum() * total).astype(np.int64)
    bounds[-1] = total
    return np.asarray(np.diff(bounds, prepend=0))


def cut(items: Positions, weights: Floats) -> list[Positions]:
    """The items in consecutive pieces, in proportion to `weights`."""
    return np.split(items, np.cumsum(parts(weights, len(items)))[:-1])


def fill(weights: Floats, total: int, room: Positions) -> Positions:
    """`parts`, but none above its `room`; what does not fit goes to the others in proportion."""
    counts = np.zeros_like(room)
    while (left := total - int(counts.sum())) > 0:
        free = counts < room
        still = np.where(free, weights, 0.0)
        counts += np.minimum(
            parts(still if still.sum() > 0 else free.astype(np.float64), left), room - counts
        )
    return counts


def proportions(seed: int, alpha: float, rows: int, columns: int) -> Floats:
    """`rows` independent draws of Dirichlet(alpha, ..., alpha) over `columns` parts; each row sums
    to 1.
    """
    logs = _log_gamma(seed, alpha, rows, columns)
    weights = np.exp(
        logs - logs.max(axis=1, keepdims=True)
    )  # by logarithms, for at a small alpha the variates themselves are 0
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _log_gamma(seed: int, alpha: float, rows: int, columns: int) -> Floats:
    """Logarithms of Gamma(alpha) variates by Marsaglia and Tsang (2000): propose d v, v = (1 + c
    x)^3 with x normal, until accepted.

    Below alpha = 1, Gamma(alpha) is Gamma(alpha + 1) times u^(1 / alpha), u uniform.
    """
    row, column = (
        part.ravel() for part in np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    )
    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    logs = np.empty(rows * columns)
    pending = np.arange(rows * columns)
    for attempt in range(ATTEMPTS):
        u, angle, accept = (
            _units(seed, row[pending], column[pending], attempt, part) for part in range(3)
        )
        x = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * angle)
        v = np.maximum(1 + c * x, 1e-300) ** 3
        taken = (1 + c * x > 0) & (
            np.log(accept) < x**2 / 2 + d - d * v + d * np.log(np.maximum(v, 1e-300))
        )
        logs[pending[taken]] = np.log(d * v[taken])
        pending = pending[~taken]
        if not len(pending):
            break
    else:
        raise DataError(
            f"no Gamma variate of alpha={alpha} after {ATTEMPTS} attempts; use another seed"
        )
    if alpha < 1:
        logs += np.log(_units(seed, row, column, 0, 3)) / alpha
    return logs.reshape(rows, columns)


def _units(seed: int, row: Positions, column: Positions, attempt: int, part: int) -> Floats:
    return draws.unit(
        draws.address(seed, draws.GAMMA, row, column, np.array([attempt]), np.array([part]))
    )
