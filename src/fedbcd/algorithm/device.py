"""What a device computes: accelerated stochastic projected gradient (ASPG), eq. (4), and the penalty steps of FedBCD-I.

Every function takes one model (P,) or a stack of models (N, P) alike.
"""

from collections.abc import Callable

from torch import Tensor

from fedbcd.algorithm.projection import Projection


def extrapolate(x: Tensor, x_prev: Tensor, momentum: float) -> Tensor:
    """Eq. (4a): x_ex = x + zeta (x - x_prev), zeta = `momentum`."""
    return x + momentum * (x - x_prev)


def aspg_step(
    ex: Tensor, gradient: Tensor, anchor: Tensor | None, penalty: Tensor | float, step: float, projection: Projection
) -> Tensor:
    """Eq. (4b): x <- P_X(ex - eta_x (gradient + gamma_i (ex - z_n))), eta_x = `step`, gamma_i = `penalty`, z_n = `anchor`.

    `gradient` is the mini-batch gradient of g_i at ex. Without an anchor there is no penalty (Algorithm 2, line 8).

    >>> import torch
    >>> from fedbcd.algorithm.projection import Box
    >>> x = torch.tensor([1.0, 3.0])
    >>> aspg_step(x, gradient=x, anchor=torch.zeros(2), penalty=1.0, step=0.25, projection=Box(-1, 1))
    tensor([0.5000, 1.0000])
    """
    if anchor is not None:
        gradient = gradient + penalty * (ex - anchor)
    return projection.project(ex - step * gradient)


def penalty_step(x: Tensor, anchor: Tensor, penalty: Tensor | float, projection: Projection) -> Tensor:
    """Algorithm 2, line 16: x <- P_X(x - gamma_i (x - z_n))."""
    return projection.project(x - penalty * (x - anchor))


def aspg(
    x_NP: Tensor,
    prev_NP: Tensor,
    steps: list[int],
    gradient: Callable[[int, Tensor], Tensor],
    anchor_NP: Tensor | None,
    penalty_N1: Tensor,
    step: float,
    momentum: float,
    projection: Projection,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1, lines 5-11 (with an anchor), and Algorithm 2, lines 5-11 (without), for a stack of devices.

    `steps` is K_i per row, in descending order, so that the rows still at work are always the first n: devices with fewer
    steps cost less. `gradient(k, ex)` is the mini-batch gradient of the first len(ex) rows in step k. Returns (x, x_prev).
    """
    x_NP, prev_NP = x_NP.clone(), prev_NP.clone()
    for k in range(steps[0]):
        n = sum(count > k for count in steps)
        ex = extrapolate(x_NP[:n], prev_NP[:n], momentum)
        anchor = None if anchor_NP is None else anchor_NP[:n]
        new = aspg_step(ex, gradient(k, ex), anchor, penalty_N1[:n], step, projection)
        prev_NP[:n] = x_NP[:n]
        x_NP[:n] = new
    return x_NP, prev_NP


def penalty_steps(
    x_NP: Tensor, prev_NP: Tensor, steps: list[int], anchor_NP: Tensor, penalty_N1: Tensor, projection: Projection
) -> tuple[Tensor, Tensor]:
    """Algorithm 2, lines 14-18, for a stack of devices with K_i = `steps`, in descending order. Returns (x, x_prev)."""
    x_NP, prev_NP = x_NP.clone(), prev_NP.clone()
    for k in range(steps[0]):
        n = sum(count > k for count in steps)
        new = penalty_step(x_NP[:n], anchor_NP[:n], penalty_N1[:n], projection)
        prev_NP[:n] = x_NP[:n]
        x_NP[:n] = new
    return x_NP, prev_NP
