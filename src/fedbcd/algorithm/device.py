"""What a device computes: accelerated stochastic projected gradient (ASPG), eq. (4), and the
penalty steps of FedBCD-I.

Every function takes one model (P,) or a stack of models (N, P) alike.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm.projection import Projection, project_

Gradient = Tensor | tuple[Tensor, ...]  # whole, or in pieces of columns
Contact = Literal["kept", "pull", "restart"]  # what the momentum is after the steps of the penalty


class Rows(NamedTuple):
    """The state of some devices: x and x_prev, parameters only."""

    x_NP: Tensor
    prev_NP: Tensor


class FusedSteps(Protocol):
    """Takes all steps of a session by itself."""

    def aspg(
        self,
        rows: Rows,
        anchor_NP: Tensor | None,
        step: float,
        momentum: float,
        projection: Projection,
    ) -> Rows:
        """As `aspg`."""
        ...

    def penalty_steps(
        self, rows: Rows, anchor_NP: Tensor, projection: Projection, momentum: Contact
    ) -> Rows:
        """As `penalty_steps`."""
        ...


class Work(NamedTuple):
    """What the devices of one batch are to do. Rows are in descending order of `steps` (K_i)."""

    steps: list[int]
    gradient: Callable[
        [int, Tensor], Gradient
    ]  # (k, ex) -> gradients in step k of the first len(ex) rows, in memory of their own
    anchor_NP: Tensor | None  # z_n of each device's server; None takes steps without the penalty
    penalty: Tensor | float  # gamma_i: one for all, or (N, 1)
    fused: FusedSteps | None = None  # instead of `gradient` and what is here

    def penalty_of(self, n: int) -> Tensor | float:
        """gamma_i of the first n rows."""
        return self.penalty if isinstance(self.penalty, float) else self.penalty[:n]


def extrapolate(x: Tensor, x_prev: Tensor, momentum: float) -> Tensor:
    """Eq. (4a): x_ex = x + zeta (x - x_prev), zeta = `momentum`."""
    return torch.lerp(x_prev, x, 1.0 + momentum)


def _extrapolate_(x: Tensor, x_prev: Tensor, momentum: float) -> Tensor:
    """`extrapolate` in the memory of x_prev, which nobody reads again."""
    return x_prev.lerp_(x, 1.0 + momentum)


def aspg_step(
    ex: Tensor,
    gradient: Gradient,
    anchor: Tensor | None,
    penalty: Tensor | float,
    step: float,
    projection: Projection,
) -> Tensor:
    """Eq. (4b): x <- P_X(ex - eta_x (gradient + gamma_i (ex - z_n))), in the memory of `ex`.

    eta_x = `step`, gamma_i = `penalty`, z_n = `anchor`; `gradient` is the mini-batch gradient of
    g_i at ex. Without an anchor there is no penalty (Algorithm 2, line 9).

    >>> from fedbcd.algorithm.projection import Box
    >>> x = torch.tensor([1.0, 3.0])
    >>> aspg_step(x, x.clone(), torch.zeros(2), penalty=1.0, step=0.25, projection=Box(-1, 1))
    tensor([0.5000, 1.0000])
    """
    if anchor is not None:
        ex.lerp_(anchor, step * penalty)  # ex - eta_x gamma_i (ex - z_n)
    column = 0
    for piece in (gradient,) if isinstance(gradient, Tensor) else gradient:
        stop = column + piece.shape[-1]
        ex[..., column:stop].sub_(piece, alpha=step)
        column = stop
    return project_(projection, ex)


def penalty_step(
    x: Tensor, anchor: Tensor, penalty: Tensor | float, projection: Projection
) -> Tensor:
    """Algorithm 2, line 16: x <- P_X(x - gamma_i (x - z_n))."""
    return project_(projection, torch.lerp(x, anchor, penalty))


def aspg(rows: Rows, work: Work, step: float, momentum: float, projection: Projection) -> Rows:
    """Algorithm 1, lines 5-11 (with an anchor), and Algorithm 2, lines 5-11 (without), for a stack
    of devices.
    """
    if work.fused is not None:
        return work.fused.aspg(rows, work.anchor_NP, step, momentum, projection)

    def one_step(k: int, now: Rows) -> Tensor:
        n = len(now.x_NP)
        given = k < 2  # x_prev is the caller's: as it came, or the x that came
        ex = (
            extrapolate(now.x_NP, now.prev_NP, momentum)
            if given
            else _extrapolate_(now.x_NP, now.prev_NP, momentum)
        )
        anchor = None if work.anchor_NP is None else work.anchor_NP[:n]
        return aspg_step(ex, work.gradient(k, ex), anchor, work.penalty_of(n), step, projection)

    return _steps(rows, work.steps, one_step)


def penalty_steps(
    rows: Rows, work: Work, projection: Projection, momentum: Contact = "kept"
) -> Rows:
    """Algorithm 2, lines 14-18, for a stack of devices, and what x - x_prev is after them.

    kept: what it was, so x_prev moves with x. pull: the last of these steps, so offline training
    goes on towards z_n and beyond. restart: nothing.
    """
    assert work.anchor_NP is not None
    if work.fused is not None:
        return work.fused.penalty_steps(rows, work.anchor_NP, projection, momentum)

    def one_step(_: int, now: Rows) -> Tensor:
        assert work.anchor_NP is not None
        n = len(now.x_NP)
        return penalty_step(now.x_NP, work.anchor_NP[:n], work.penalty_of(n), projection)

    after = _steps(rows, work.steps, one_step)
    if momentum == "kept":
        return Rows(after.x_NP, after.x_NP - (rows.x_NP - rows.prev_NP))
    return after if momentum == "pull" else Rows(after.x_NP, after.x_NP.clone())


def _steps(rows: Rows, steps: list[int], one_step: Callable[[int, Rows], Tensor]) -> Rows:
    """K_i steps each. Rows are in descending order of K_i, so those still at work are the first n:
    fewer steps cost less.
    """
    finished: list[Rows] = []
    now = rows
    for k in range(steps[0]):
        n = sum(count > k for count in steps)
        if n < len(now.x_NP):
            finished.append(Rows(now.x_NP[n:], now.prev_NP[n:]))
            now = Rows(now.x_NP[:n], now.prev_NP[:n])
        now = Rows(one_step(k, now), now.x_NP)
    if not finished:
        return now
    segments = [now, *reversed(finished)]
    return Rows(torch.cat([s.x_NP for s in segments]), torch.cat([s.prev_NP for s in segments]))
