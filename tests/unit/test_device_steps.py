"""What a device computes, for one model and for stacks: eq. (4) and the penalty steps of
FedBCD-I.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fedbcd.algorithm.device import (
    Iterates,
    Work,
    aspg,
    aspg_step,
    extrapolate,
    penalty_step,
    penalty_steps,
)
from fedbcd.algorithm.projection import Ball, Box, NoProjection, Projection, Simplex, TensorBoxes
from support.exploring import examples
from support.rounding import ROUNDED_64

EXACT = examples(25)
N, P = 4, 6
SETS: dict[str, Projection] = {
    "none": NoProjection(),
    "box": Box(-0.5, 0.5),
    "ball": Ball(1.0),
    "simplex": Simplex(1.0),
    "tensor boxes": TensorBoxes(((2, -1.0, 1.0), (4, 0.0, 0.5))),
}
Gradient = Callable[[int, Tensor], Tensor]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_gradient(seed: int, scale: float = 1.0) -> Gradient:
    """A different random gradient in each step; row r of step k is the same whoever else is in the
    stack.
    """
    return lambda k, ex: scale * normal(seed + k, N, P)[: len(ex)]


def quadratic_gradient(centre_NP: Tensor) -> Gradient:
    """Of g_i(x) = ||x - centre_i||^2 / 2."""
    return lambda _, ex: ex - centre_NP[: len(ex)]


def work_of(
    steps: list[int], gradient: Gradient, anchor: Tensor | None, penalty: float = 0.5
) -> Work:
    return Work(steps, gradient, anchor, torch.full((len(steps), 1), penalty, dtype=torch.float64))


def start(seed: int, projection: Projection) -> Iterates:
    """A feasible start without momentum."""
    x = projection.project(normal(seed, N, P))
    return Iterates(x, x.clone())


# ------------------------------------------------------------------------------------------------
# one step
def test_without_a_difference_there_is_no_momentum() -> None:
    """Eq. (4a) with x = x_prev: the first step has no momentum, exactly."""
    x = normal(0, N, P)
    assert torch.equal(extrapolate(x, x.clone(), 0.9), x)


@EXACT
@given(seed=st.integers(0, 2**20), momentum=st.floats(0.0, 0.999))
def test_extrapolation_goes_on_by_a_fraction_of_the_last_move(seed: int, momentum: float) -> None:
    """Eq. (4a): x_ex = x + zeta (x - x_prev)."""
    x, previous = normal(seed, N, P), normal(seed + 1, N, P)
    torch.testing.assert_close(
        extrapolate(x, previous, momentum), x + momentum * (x - previous), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("name", SETS)
def test_one_model_and_a_stack_take_the_same_step(name: str) -> None:
    ex, gradient, anchor = normal(1, N, P), normal(2, N, P), normal(3, N, P)
    penalty = torch.tensor([[0.1], [0.5], [1.0], [2.0]], dtype=torch.float64)
    stacked = aspg_step(ex.clone(), gradient, anchor, penalty, 0.3, SETS[name])
    for i in range(N):
        alone = aspg_step(ex[i].clone(), gradient[i], anchor[i], float(penalty[i]), 0.3, SETS[name])
        torch.testing.assert_close(stacked[i], alone, rtol=0, atol=ROUNDED_64)


def test_a_step_changes_none_of_its_arguments_but_the_extrapolated_point() -> None:
    ex, gradient, anchor = normal(1, N, P), normal(2, N, P), normal(3, N, P)
    copies = [t.clone() for t in (ex, gradient, anchor)]
    aspg_step(ex.clone(), gradient, anchor, 0.7, 0.1, Box())
    penalty_step(ex, anchor, 0.7, Box())
    assert all(torch.equal(a, b) for a, b in zip((ex, gradient, anchor), copies, strict=True))


def test_without_an_anchor_the_penalty_does_not_matter() -> None:
    """Algorithm 2, line 9: offline steps have no penalty."""
    ex, gradient = normal(1, N, P), normal(2, N, P)
    assert torch.equal(
        aspg_step(ex.clone(), gradient, None, 0.0, 0.1, Box()),
        aspg_step(ex.clone(), gradient, None, 99.0, 0.1, Box()),
    )


@EXACT
@given(seed=st.integers(0, 2**20), name=st.sampled_from(sorted(SETS)), penalty=st.floats(0.01, 1.0))
def test_a_penalty_step_never_moves_away_from_a_feasible_anchor(
    seed: int, name: str, penalty: float
) -> None:
    """Algorithm 2, line 16, for gamma_i <= 1: the distance to z_n shrinks by the factor 1 - gamma_i
    at least.
    """
    x, anchor = (SETS[name].project(normal(seed + k, N, P)) for k in (0, 1))
    before, after = (
        (x - anchor).norm(dim=1),
        (penalty_step(x, anchor, penalty, SETS[name]) - anchor).norm(dim=1),
    )
    assert bool((after <= (1 - penalty) * before + 1e-12).all())


def test_a_penalty_step_with_penalty_one_arrives() -> None:
    x, anchor = normal(1, N, P), normal(2, N, P).clamp(-2, 2)
    torch.testing.assert_close(penalty_step(x, anchor, 1.0, Box()), anchor, rtol=0, atol=ROUNDED_64)


# ------------------------------------------------------------------------------------------------
# whole rounds
@pytest.mark.parametrize("name", SETS)
@EXACT
@given(
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_the_model_is_feasible_after_every_step(
    name: str, seed: int, scale: float, momentum: float
) -> None:
    """Algorithm 1, line 9: P_X after every step, whatever the gradients are. Every step is seen by
    stopping after it.
    """
    projection = SETS[name]
    begin, anchor = start(seed, projection), projection.project(normal(seed + 1, N, P))
    for steps in range(1, 5):
        work = work_of([steps] * N, drawn_gradient(seed + 2, scale), anchor)
        online = aspg(begin, work, 0.3, momentum, projection)
        offline = aspg(begin, work._replace(anchor_NP=None), 0.3, momentum, projection)
        pulled = penalty_steps(offline, work, projection)
        assert all(projection.contains(rows.x_NP) for rows in (online, offline, pulled))
        assert all(
            projection.contains(rows.prev_NP) for rows in (online, offline)
        )  # momentum that is kept may point out of X


def test_rows_with_fewer_steps_stop_changing() -> None:
    """K_i(t) differs between devices; a stack must not take a step too many for any of them."""
    begin, anchor = start(1, Box()), normal(2, N, P)
    together = aspg(begin, work_of([5, 3, 3, 1], drawn_gradient(7), anchor), 0.1, 0.9, Box())
    for row, steps in enumerate([5, 3, 3, 1]):
        alone = aspg(begin, work_of([steps] * N, drawn_gradient(7), anchor), 0.1, 0.9, Box())
        torch.testing.assert_close(together.x_NP[row], alone.x_NP[row], rtol=0, atol=ROUNDED_64)
        torch.testing.assert_close(
            together.prev_NP[row], alone.prev_NP[row], rtol=0, atol=ROUNDED_64
        )


def test_only_rows_still_at_work_are_asked_for_gradients() -> None:
    asked: list[tuple[int, int]] = []

    def gradient(k: int, ex: Tensor) -> Tensor:
        asked.append((k, len(ex)))
        return torch.zeros_like(ex)

    aspg(start(1, Box()), work_of([4, 3, 1, 1], gradient, None), 0.1, 0.9, Box())
    assert asked == [(0, 4), (1, 2), (2, 2), (3, 1)]


def test_gradients_are_taken_at_the_extrapolated_point() -> None:
    """Algorithm 1, line 9: the gradient at x_ex, not at x."""
    seen: list[Tensor] = []

    def gradient(_: int, ex: Tensor) -> Tensor:
        seen.append(ex.clone())
        return torch.ones_like(ex)

    begin = Iterates(torch.full((1, 1), 1.0), torch.full((1, 1), 0.5))
    aspg(begin, Work([1], gradient, None, torch.zeros(1, 1)), 0.1, 0.5, NoProjection())
    assert [float(ex) for ex in seen] == [1.25]


@pytest.mark.parametrize("split", [1, 2, 3])
def test_two_rounds_from_kept_rows_are_one_longer_round(split: int) -> None:
    """SPEC item 2: momentum crosses activations, so K steps may be cut into two activations
    anywhere.
    """
    begin, anchor = start(3, Box()), normal(4, N, P)
    gradient = drawn_gradient(9)
    whole = aspg(begin, work_of([4] * N, gradient, anchor), 0.2, 0.9, Box())
    first = aspg(begin, work_of([split] * N, gradient, anchor), 0.2, 0.9, Box())
    second = aspg(
        first,
        work_of([4 - split] * N, lambda k, ex: gradient(k + split, ex), anchor),
        0.2,
        0.9,
        Box(),
    )
    assert torch.equal(second.x_NP, whole.x_NP)
    assert torch.equal(second.prev_NP, whole.prev_NP)


def test_forgetting_the_last_iterate_gives_another_model() -> None:
    """Guards the test above: momentum that does not cross activations is visible."""
    begin, work = start(3, Box()), work_of([2] * N, drawn_gradient(9), normal(4, N, P))
    first = aspg(begin, work, 0.2, 0.9, Box())
    kept, forgotten = (
        aspg(rows, work, 0.2, 0.9, Box()) for rows in (first, Iterates(first.x_NP, first.x_NP))
    )
    assert not torch.allclose(kept.x_NP, forgotten.x_NP)


def test_rounds_leave_their_rows_alone() -> None:
    begin = start(3, Box())
    copies = [t.clone() for t in begin]
    aspg(begin, work_of([3] * N, drawn_gradient(1), normal(4, N, P)), 0.2, 0.9, Box())
    penalty_steps(begin, work_of([3] * N, drawn_gradient(1), normal(4, N, P)), Box())
    assert all(torch.equal(a, b) for a, b in zip(begin, copies, strict=True))


def test_the_momentum_of_offline_training_is_kept_over_a_contact() -> None:
    """x_prev moves with x: x - x_prev is what it was before the penalty steps, so the pull is no
    momentum.
    """
    begin, anchor = (
        Iterates(*(normal(seed, N, P).clamp(-2, 2) for seed in (3, 5))),
        normal(4, N, P).clamp(-2, 2),
    )
    for k in (1, 2, 3):
        after = penalty_steps(begin, work_of([k] * N, drawn_gradient(0), anchor, 0.3), Box())
        torch.testing.assert_close(
            after.x_NP - after.prev_NP, begin.x_NP - begin.prev_NP, rtol=0, atol=ROUNDED_64
        )


def test_momentum_that_is_kept_may_be_kept_step_by_step() -> None:
    """Two contacts of one step each are one contact of two."""
    begin, anchor = (
        Iterates(*(normal(seed, N, P).clamp(-2, 2) for seed in (3, 5))),
        normal(4, N, P).clamp(-2, 2),
    )
    one, two = (work_of([k] * N, drawn_gradient(0), anchor, 0.3) for k in (1, 2))
    twice, at_once = (
        penalty_steps(penalty_steps(begin, one, Box()), one, Box()),
        penalty_steps(begin, two, Box()),
    )
    assert torch.equal(twice.x_NP, at_once.x_NP)
    torch.testing.assert_close(twice.prev_NP, at_once.prev_NP, rtol=0, atol=ROUNDED_64)


def test_the_pull_as_momentum_ends_with_the_last_iterate_but_one_in_x_prev() -> None:
    """What version 0.1.0 did."""
    begin, anchor = start(3, Box()), normal(4, N, P).clamp(-2, 2)
    after = {
        k: penalty_steps(begin, work_of([k] * N, drawn_gradient(0), anchor, 0.3), Box(), "pull")
        for k in (1, 2, 3)
    }
    assert torch.equal(after[1].prev_NP, begin.x_NP)
    assert torch.equal(after[2].prev_NP, after[1].x_NP)
    assert torch.equal(after[3].prev_NP, after[2].x_NP)


def test_momentum_that_restarts_is_nothing() -> None:
    after = penalty_steps(
        start(3, Box()), work_of([3] * N, drawn_gradient(0), normal(4, N, P), 0.3), Box(), "restart"
    )
    assert torch.equal(after.prev_NP, after.x_NP)


def test_a_pull_that_is_momentum_overshoots_z_and_one_that_is_not_does_not() -> None:
    """At rest (no gradient, no momentum) and away from z_n, what follows a contact must not pass
    z_n.
    """
    rest, anchor = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    size: dict[str, float] = {}
    for momentum in ("kept", "pull", "restart"):
        pulled = penalty_steps(
            Iterates(rest, rest), work_of([3], drawn_gradient(0), anchor, 0.2), Box(), momentum
        )
        on = aspg(pulled, work_of([20], lambda _, ex: torch.zeros_like(ex), None), 0.1, 0.9, Box())
        size[momentum] = float(on.x_NP)
    assert size["kept"] == size["restart"] == pytest.approx(0.8**3, abs=ROUNDED_64)
    assert size["pull"] < 0


def test_penalty_rows_with_fewer_steps_stop_changing() -> None:
    begin, anchor = start(3, Box()), normal(4, N, P)
    together = penalty_steps(begin, work_of([4, 2, 2, 1], drawn_gradient(0), anchor, 0.3), Box())
    for row, steps in enumerate([4, 2, 2, 1]):
        alone = penalty_steps(begin, work_of([steps] * N, drawn_gradient(0), anchor, 0.3), Box())
        assert torch.equal(together.x_NP[row], alone.x_NP[row])
        assert torch.equal(together.prev_NP[row], alone.prev_NP[row])


def test_enough_steps_reach_the_minimiser_of_cost_and_penalty() -> None:
    """Eq. (3a): argmin g_i(x) + gamma_i/2 ||x - z_n||^2 over X; for a quadratic g_i it is P_X of a
    weighted mean.
    """
    centre, anchor, gamma = normal(1, N, P), normal(2, N, P), 0.5
    rows = aspg(
        start(3, Box(-0.5, 0.5)),
        work_of([300] * N, quadratic_gradient(centre), anchor, gamma),
        0.3,
        0.5,
        Box(-0.5, 0.5),
    )
    torch.testing.assert_close(
        rows.x_NP, ((centre + gamma * anchor) / (1 + gamma)).clamp(-0.5, 0.5), rtol=0, atol=1e-10
    )


def test_each_row_has_its_own_penalty() -> None:
    """gamma_i is per device."""
    penalty = torch.tensor([[0.1], [1.0], [3.0], [10.0]], dtype=torch.float64)
    anchor = normal(2, N, P)
    work = Work(
        [200] * N, quadratic_gradient(torch.zeros(N, P, dtype=torch.float64)), anchor, penalty
    )
    rows = aspg(start(3, NoProjection()), work, 0.08, 0.5, NoProjection())
    torch.testing.assert_close(rows.x_NP, penalty * anchor / (1 + penalty), rtol=0, atol=1e-6)
