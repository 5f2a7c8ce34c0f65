"""The three certificates of Theorem 1: how far the models of a moment are from a stationary point
of problem (2).

1. the first-order gap of a personal model, max over x_hat in X of <grad f_i(x_i, zbar), x_i -
   x_hat>: 0 if no way in X leads down. Where X is not compact it is infinite wherever the gradient
   is not 0, and the norm of the gradient mapping is taken in its place
2. the pull on the global model, || sum_n sum_i gamma_i (zbar - x_i) ||^2: 0 where zbar is the
   weighted mean of the personal models
3. the spread of the servers, || zbar - z_n ||: 0 where they agree

The worst x_hat is closed form on the sets below: <gradient, x_hat> is linear, so a corner, a pole
or a vertex minimises it. Rows of a stack are handled together; the last axis is the parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def penalised_gradient(
    gradient: Tensor, x: Tensor, anchor: Tensor, penalty: Tensor | float
) -> Tensor:
    """grad_x f_i(x, z) = grad g_i(x) + gamma_i (x - z), z = `anchor`."""
    return gradient + penalty * (x - anchor)


def gap_on_box(gradient: Tensor, x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """X = [low, high]: the worst x_hat is `low` where the gradient is positive, else `high`; both
    may be per coordinate.
    """
    terms = torch.where(gradient > 0, gradient * (x - low), gradient * (x - high))
    total: Tensor = torch.where(gradient == 0, 0.0, terms).double().sum(-1)
    return total


def gap_on_ball(gradient: Tensor, x: Tensor, radius: float) -> Tensor:
    """X = {||x|| <= radius}: the worst x_hat is -radius gradient / ||gradient||, so the gap is
    <gradient, x> + radius ||gradient||.
    """
    g = gradient.double()
    norm: Tensor = torch.linalg.vector_norm(g, dim=-1)
    return (g * x.double()).sum(-1) + radius * norm


def gap_on_simplex(gradient: Tensor, x: Tensor, total: float) -> Tensor:
    """X = {x >= 0, sum x = total}: the worst x_hat puts all mass where the gradient is smallest."""
    g = gradient.double()
    return (g * x.double()).sum(-1) - total * g.amin(-1)


def gradient_mapping(
    gradient: Tensor, x: Tensor, step: float, project: Callable[[Tensor], Tensor]
) -> Tensor:
    """|| x - P_X(x - step gradient) || / step: 0 where the gap is 0, whatever X; without X the norm
    of the gradient.
    """
    moved = x.double() - project(x.double() - step * gradient.double())
    norm: Tensor = torch.linalg.vector_norm(moved, dim=-1) / step
    return norm


def pull(weighted_sum: Tensor, weight: float, mean_z: Tensor) -> float:
    """|| sum gamma_i (zbar - x_i) ||^2 = || Gamma zbar - sum gamma_i x_i ||^2, with Gamma = sum
    gamma_i = `weight`.
    """
    return float((weight * mean_z.double() - weighted_sum.double()).square().sum())


def spread(z_VP: Tensor) -> Tensor:
    z = z_VP.double()
    distance: Tensor = torch.linalg.vector_norm(z - z.mean(0), dim=-1)
    return distance
