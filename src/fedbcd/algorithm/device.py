"""What a device computes: accelerated stochastic projected gradient (ASPG), eq. (4), and the
penalty steps of FedBCD-I.

Every function takes one model (P,) or a stack of models (N, P) alike.

Shapes: N devices, P parameters.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbcd.algorithm.optimizers import Optimizer
from fedbcd.algorithm.projection import Projection, project_

Gradient = Tensor | tuple[Tensor, ...]  # whole, or in pieces of columns
Contact = Literal["kept", "pull", "restart"]  # what the momentum is after the steps of the penalty


class Iterates(NamedTuple):
    """The state of some devices: x and x_prev, parameters only."""

    x_NP: Tensor
    prev_NP: Tensor


class Work(NamedTuple):
    """What the devices of one batch are to do. Rows are in descending order of `steps` (K_i)."""

    steps: list[int]
    gradient: Callable[
        [int, Tensor], Gradient
    ]  # (k, ex) -> gradients in step k of the first len(ex) rows, in memory of their own
    anchor_NP: Tensor | None  # z_n of each device's server; None takes steps without the penalty
    penalty: Tensor | float  # gamma_i: one for all, or (N, 1) or (N, P)
    pulls: Sequence[tuple[Tensor, Tensor | float]] = ()  # towards other models, as the two above
    linear_NP: Tensor | None = None  # a constant term of the gradient
    moves_P: Tensor | None = None  # parameters that steps may change; None: all
    decay: float = 0.0  # adds decay ex to the gradient

    def penalty_of(self, n: int) -> Tensor | float:
        """gamma_i of the first n rows."""
        return _of_rows(self.penalty, n)


def _of_rows(value: Tensor | float, n: int) -> Tensor | float:
    return value if isinstance(value, float) else value[:n]


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
    more: Tensor | None = None,
) -> Tensor:
    """Eq. (4b): x <- P_X(ex - eta_x (gradient + gamma_i (ex - z_n))), in the memory of `ex`.

    eta_x = `step`, gamma_i = `penalty`, z_n = `anchor`; `gradient` is the mini-batch gradient of
    g_i at ex, `more` what else there is of it. Without an anchor there is no penalty (Algorithm 2,
    line 9).

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
    if more is not None:
        ex.sub_(more, alpha=step)
    return project_(projection, ex)


def penalty_step(
    x: Tensor, anchor: Tensor, penalty: Tensor | float, projection: Projection
) -> Tensor:
    """Algorithm 2, line 16: x <- P_X(x - gamma_i (x - z_n))."""
    return project_(projection, torch.lerp(x, anchor, penalty))


def aspg(
    rows: Iterates, work: Work, step: float, momentum: float, projection: Projection
) -> Iterates:
    """Algorithm 1, lines 5-11 (with an anchor), and Algorithm 2, lines 5-11 (without), for a stack
    of devices.
    """

    def one_step(k: int, now: Iterates) -> Tensor:
        n = len(now.x_NP)
        given = k < 2  # x_prev is the caller's: as it came, or the x that came
        ex = (
            extrapolate(now.x_NP, now.prev_NP, momentum)
            if given
            else _extrapolate_(now.x_NP, now.prev_NP, momentum)
        )
        gradient, anchor = work.gradient(k, ex), None
        if work.anchor_NP is not None:
            anchor = work.anchor_NP[:n]
        more = _more_terms(work, ex)
        x = aspg_step(ex, gradient, anchor, work.penalty_of(n), step, projection, more)
        return x if work.moves_P is None else torch.where(work.moves_P, x, now.x_NP)

    return _steps(rows, work.steps, one_step)


def _more_terms(work: Work, ex: Tensor) -> Tensor | None:
    """Of the gradient at ex: constant ones, and pulls towards other models than z."""
    n = len(ex)
    terms = [_of_rows(penalty, n) * (ex - model[:n]) for model, penalty in work.pulls]
    if work.decay:
        terms.append(work.decay * ex)
    if work.linear_NP is not None:
        terms.append(work.linear_NP[:n])
    return sum(terms[1:], terms[0]) if terms else None


def optimized(
    rows: Iterates,
    work: Work,
    step_N1: Tensor,
    momentum: float,
    optimizer: Optimizer,
    projection: Projection,
) -> Iterates:
    """Steps x <- P_X(ex - eta_i direction), each device with a step of its own: of the whole
    gradient, pulls and all, an optimizer makes the direction.
    """

    def body(k: int, now: dict[str, Tensor]) -> dict[str, Tensor]:
        x, n = now["x"], len(now["x"])
        ex = extrapolate(x, now["prev"], momentum)
        found = work.gradient(k, ex)
        gradient = found if isinstance(found, Tensor) else torch.cat(found, dim=-1)
        if work.anchor_NP is not None:
            gradient = gradient + work.penalty_of(n) * (ex - work.anchor_NP[:n])
        more = _more_terms(work, ex)
        gradient = gradient if more is None else gradient + more
        state = {name: stack for name, stack in now.items() if name not in ("x", "prev")}
        direction, kept = optimizer.direction(k, gradient, state)
        after = project_(projection, ex - step_N1[:n] * direction)
        after = after if work.moves_P is None else torch.where(work.moves_P, after, x)
        return {"x": after, "prev": x, **kept}

    begun = {"x": rows.x_NP, "prev": rows.prev_NP, **optimizer.begin(rows.x_NP)}
    after = in_loop(begun, work.steps, body)
    return Iterates(after["x"], after["prev"])


def penalty_steps(
    rows: Iterates, work: Work, projection: Projection, momentum: Contact = "kept"
) -> Iterates:
    """Algorithm 2, lines 14-18, for a stack of devices, and what x - x_prev is after them.

    kept: what it was, so x_prev moves with x. pull: the last of these steps, so offline training
    goes on towards z_n and beyond. restart: nothing.
    """
    assert work.anchor_NP is not None

    def one_step(_: int, now: Iterates) -> Tensor:
        assert work.anchor_NP is not None
        n = len(now.x_NP)
        return penalty_step(now.x_NP, work.anchor_NP[:n], work.penalty_of(n), projection)

    after = _steps(rows, work.steps, one_step)
    if momentum == "kept":
        return Iterates(after.x_NP, after.x_NP - (rows.x_NP - rows.prev_NP))
    return after if momentum == "pull" else Iterates(after.x_NP, after.x_NP.clone())


def _steps(
    rows: Iterates, steps: list[int], one_step: Callable[[int, Iterates], Tensor]
) -> Iterates:
    """K_i steps each."""

    def body(k: int, now: dict[str, Tensor]) -> dict[str, Tensor]:
        at = Iterates(now["x"], now["prev"])
        return {"x": one_step(k, at), "prev": at.x_NP}

    after = in_loop({"x": rows.x_NP, "prev": rows.prev_NP}, steps, body)
    return Iterates(after["x"], after["prev"])


def in_loop(
    stacks: dict[str, Tensor],
    counts: Sequence[int],
    body: Callable[[int, dict[str, Tensor]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """`body`, as often for each row as `counts` says. Rows are in descending order of counts,
    so those still at work are the first n: fewer steps cost less.
    """
    finished: list[dict[str, Tensor]] = []
    now = stacks
    for k in range(counts[0]):
        n = sum(count > k for count in counts)
        if n < len(next(iter(now.values()))):
            finished.append({name: stack[n:] for name, stack in now.items()})
            now = {name: stack[:n] for name, stack in now.items()}
        now = body(k, now)
    if not finished:
        return now
    segments = [now, *reversed(finished)]
    return {name: torch.cat([s[name] for s in segments]) for name in now}
