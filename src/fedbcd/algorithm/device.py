"""What a device computes: accelerated stochastic projected gradient (ASPG), eq. (4), and the penalty steps of FedBCD-I.

Every function takes one model (P,) or a stack of models (N, P) alike.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbcd.algorithm.projection import Projection


class Rows(NamedTuple):
    """The state of some devices: x and x_prev, parameters only."""

    x_NP: Tensor
    prev_NP: Tensor


class Work(NamedTuple):
    """What the devices of one batch are to do. Rows are in descending order of `steps` (K_i)."""

    steps: list[int]
    gradient: Callable[[int, Tensor], Tensor]  # (k, ex) -> mini-batch gradients in step k of the first len(ex) rows
    anchor_NP: Tensor | None  # z_n of each device's server; None takes steps without the penalty
    penalty_N1: Tensor  # gamma_i


def extrapolate(x: Tensor, x_prev: Tensor, momentum: float) -> Tensor:
    """Eq. (4a): x_ex = x + zeta (x - x_prev), zeta = `momentum`."""
    return torch.lerp(x_prev, x, 1.0 + momentum)


def aspg_step(ex: Tensor, gradient: Tensor, anchor: Tensor | None, penalty: Tensor | float, step: float, projection: Projection) -> Tensor:
    """Eq. (4b): x <- P_X(ex - eta_x (gradient + gamma_i (ex - z_n))), eta_x = `step`, gamma_i = `penalty`, z_n = `anchor`.

    `gradient` is the mini-batch gradient of g_i at ex. Without an anchor there is no penalty (Algorithm 2, line 9).

    >>> import torch
    >>> from fedbcd.algorithm.projection import Box
    >>> x = torch.tensor([1.0, 3.0])
    >>> aspg_step(x, gradient=x, anchor=torch.zeros(2), penalty=1.0, step=0.25, projection=Box(-1, 1))
    tensor([0.5000, 1.0000])
    """
    if anchor is not None:
        gradient = (ex - anchor).mul_(penalty).add_(gradient)
    return projection.project(torch.sub(ex, gradient, alpha=step))


def penalty_step(x: Tensor, anchor: Tensor, penalty: Tensor | float, projection: Projection) -> Tensor:
    """Algorithm 2, line 16: x <- P_X(x - gamma_i (x - z_n))."""
    return projection.project(x - penalty * (x - anchor))


def aspg(rows: Rows, work: Work, step: float, momentum: float, projection: Projection) -> Rows:
    """Algorithm 1, lines 5-11 (with an anchor), and Algorithm 2, lines 5-11 (without), for a stack of devices.

    Rows are in descending order of K_i, so those still at work are always the first n: devices with fewer steps cost less.
    """
    x_NP, prev_NP = rows.x_NP.clone(), rows.prev_NP.clone()
    for k in range(work.steps[0]):
        n = sum(count > k for count in work.steps)
        ex = extrapolate(x_NP[:n], prev_NP[:n], momentum)
        anchor = None if work.anchor_NP is None else work.anchor_NP[:n]
        new = aspg_step(ex, work.gradient(k, ex), anchor, work.penalty_N1[:n], step, projection)
        prev_NP[:n] = x_NP[:n]
        x_NP[:n] = new
    return Rows(x_NP, prev_NP)


def penalty_steps(rows: Rows, work: Work, projection: Projection) -> Rows:
    """Algorithm 2, lines 14-18, for a stack of devices; x_prev ends as the last iterate but one."""
    assert work.anchor_NP is not None
    x_NP, prev_NP = rows.x_NP.clone(), rows.prev_NP.clone()
    for k in range(work.steps[0]):
        n = sum(count > k for count in work.steps)
        new = penalty_step(x_NP[:n], work.anchor_NP[:n], work.penalty_N1[:n], projection)
        prev_NP[:n] = x_NP[:n]
        x_NP[:n] = new
    return Rows(x_NP, prev_NP)
