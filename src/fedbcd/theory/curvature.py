"""L_i and rho_i of a function that is known by its Hessian-vector products: the ends of the
Hessian's spectrum at a point.

Shapes: R samples, D inputs of a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
# a convex function's low end is 0, of which no fraction can be asked: this part of the largest
# eigenvalue instead
LOW_FLOOR = 0.1


@dataclass(frozen=True)
class Curvature:
    """The ends of a Hessian's spectrum at one point, both inside the true spectrum; an eigenvalue
    is within the error of each.
    """

    low: float
    high: float
    low_error: float
    high_error: float

    @property
    def smoothness(self) -> float:
        """A lower bound on L_i: the largest absolute eigenvalue here."""
        return max(abs(self.low), abs(self.high))

    @property
    def error(self) -> float:
        """An eigenvalue is this close to `smoothness`, up to its sign."""
        return self.high_error if abs(self.high) >= abs(self.low) else self.low_error

    def is_known_to(self, tolerance: float) -> bool:
        """Whether both ends are known, each relative to its own size; a low end near 0, relative to
        a part of the largest.
        """
        low = max(abs(self.low), LOW_FLOOR * self.smoothness)
        return self.high_error <= tolerance * abs(self.high) and self.low_error <= tolerance * low

    @property
    def nonconvexity(self) -> float:
        """A lower bound on the weak convexity of g_i: how far below 0 the spectrum reaches here."""
        return max(0.0, -self.low)


def curvature(
    product: Product, start: Tensor, products: int = 40, tolerance: float = 1e-3
) -> Curvature:
    """The extreme eigenvalues of a symmetric matrix from at most `products` products with vectors.

    Power iteration that keeps what it has seen (Lanczos): the products of one start vector,
    orthogonalised, span a space in which the extreme eigenvalues show first. It stops once both are
    known to a relative `tolerance`, by the residuals of their Ritz pairs.
    """
    basis = [start.double() / torch.linalg.vector_norm(start.double())]
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(min(products, start.numel())):
        v = product(basis[-1].to(start.dtype)).double()
        diagonal.append(float(v @ basis[-1]))
        for _ in range(2):  # once is not enough in rounding
            for b in basis:
                v = v - (v @ b) * b
        rest = float(torch.linalg.vector_norm(v))
        found = _ends(diagonal, off, rest, torch.finfo(start.dtype).eps)
        if rest == 0.0 or found.is_known_to(tolerance):
            break
        off.append(rest)
        basis.append(v / rest)
    return found


def _ends(diagonal: list[float], off: list[float], rest: float, rounding: float) -> Curvature:
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for k, value in enumerate(off):
        small[k, k + 1] = small[k + 1, k] = value
    values, vectors = torch.linalg.eigh(small)
    residual = (
        rest * vectors[-1].abs() + rounding * values.abs().max()
    )  # products are no more exact than that
    return Curvature(float(values[0]), float(values[-1]), float(residual[0]), float(residual[-1]))


def softmax_smoothness(inputs_RD: Tensor) -> float:
    """A bound on L_i of multinomial logistic regression, for all weights: half the largest
    eigenvalue of the inputs' second moment.

    The Hessian is the mean of (diag(s) - s s^T) x (a a^T), and diag(s) - s s^T is at most 1/2 for
    every distribution s.
    """
    a = inputs_RD.reshape(len(inputs_RD), -1).double()
    a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype, device=a.device)], dim=1)
    gram = a @ a.T if len(a) < a.shape[1] else a.T @ a
    return 0.5 * float(torch.linalg.eigvalsh(gram)[-1]) / len(a)
