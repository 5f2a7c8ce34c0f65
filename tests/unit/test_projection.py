"""Projections P_X (Assumption 2(i)): into X, no further than needed, and never pulling two points
apart.
"""

import json
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fedbcd.algorithm.projection import (
    PROJECTIONS,
    Ball,
    Box,
    NoProjection,
    Projection,
    Simplex,
    TensorBoxes,
)
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from support.exploring import examples

EXACT = examples(8)
P = 7
SETS: dict[str, Projection] = {
    "none": NoProjection(),
    "box": Box(-2.0, 2.0),
    "lopsided box": Box(0.5, 3.0),
    "ball": Ball(1.5),
    "simplex": Simplex(1.0),
    "heavy simplex": Simplex(4.0),
    "tensor boxes": TensorBoxes(((2, -1.0, 1.0), (0, 0.0, 1.0), (4, 0.0, 0.5), (1, -3.0, -2.0))),
}
DTYPES = [torch.float32, torch.float64]
every_set = pytest.mark.parametrize("name", SETS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
numbers = st.integers(0, 2**31)
scales = st.sampled_from([1e-3, 0.3, 1.0, 5.0, 100.0])


def cloud(seed: int, rows: int, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, P, generator=generator, dtype=torch.float64)).to(dtype)


def feasible_points(name: str, seed: int, rows: int) -> Tensor:
    """Points of X, made without the projection under test."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(rows, P, generator=generator, dtype=torch.float64)
    match SETS[name]:
        case Box(low, high):
            return low + u * (high - low)
        case Ball(radius):
            direction = torch.randn(rows, P, generator=generator, dtype=torch.float64)
            return direction / direction.norm(dim=1, keepdim=True) * radius * u[:, :1]
        case Simplex(total):
            weights = -torch.log(u)
            return weights / weights.sum(1, keepdim=True) * total
        case TensorBoxes(segments):
            bounds = torch.tensor(
                [(low, high) for length, low, high in segments for _ in range(length)],
                dtype=torch.float64,
            )
            return bounds[:, 0] + u * (bounds[:, 1] - bounds[:, 0])
    return 10 * (u - 0.5)


def slack(dtype: torch.dtype, *tensors: Tensor) -> float:
    """A few roundings at the size of the numbers involved."""
    return 64 * torch.finfo(dtype).eps * max([1.0, *(float(t.abs().max()) for t in tensors)])


def test_the_registry_knows_every_set_by_its_name() -> None:
    assert {
        "none": NoProjection,
        "box": Box,
        "ball": Ball,
        "simplex": Simplex,
        "tensor-boxes": TensorBoxes,
    } == PROJECTIONS
    assert all(isinstance(projection, Projection) for projection in SETS.values())


@every_set
@every_dtype
def test_the_test_points_are_in_the_set(name: str, dtype: torch.dtype) -> None:
    """`contains` and the points that the tests below compare with agree."""
    points = feasible_points(name, 1, 50).to(dtype)
    assert SETS[name].contains(points, tolerance=slack(dtype))


@every_set
@every_dtype
@EXACT
@given(seed=numbers, scale=scales)
def test_a_projected_point_is_in_the_set(
    name: str, dtype: torch.dtype, seed: int, scale: float
) -> None:
    """Assumption 2(i): iterates stay in X."""
    x = cloud(seed, 50, scale, dtype)
    projected = SETS[name].project(x)
    assert projected.shape == x.shape
    assert projected.dtype == dtype
    assert SETS[name].contains(projected)


@every_set
@every_dtype
@EXACT
@given(seed=numbers, scale=scales)
def test_projecting_twice_is_projecting_once(
    name: str, dtype: torch.dtype, seed: int, scale: float
) -> None:
    x = cloud(seed, 50, scale, dtype)
    once = SETS[name].project(x)
    torch.testing.assert_close(SETS[name].project(once), once, rtol=0, atol=slack(dtype, once))


@every_set
@every_dtype
def test_points_of_the_set_stay_where_they_are(name: str, dtype: torch.dtype) -> None:
    points = feasible_points(name, 3, 100).to(dtype)
    torch.testing.assert_close(
        SETS[name].project(points), points, rtol=0, atol=slack(dtype, points)
    )


@every_set
@EXACT
@given(seed=numbers, scale=scales)
def test_no_point_of_the_set_is_nearer(name: str, seed: int, scale: float) -> None:
    """P_X(x) is the nearest point of X: compared with 200 random points of X."""
    x = cloud(seed, 20, scale)
    distance = (SETS[name].project(x) - x).norm(dim=1)
    others = torch.cdist(
        x, feasible_points(name, seed + 1, 200), compute_mode="donot_use_mm_for_euclid_dist"
    )
    assert bool((distance <= others.min(1).values + slack(torch.float64, x)).all())


@every_set
@EXACT
@given(seed=numbers, scale=scales)
def test_the_error_makes_an_obtuse_angle_with_the_set(name: str, seed: int, scale: float) -> None:
    """The variational inequality of the nearest point: (x - P_X(x)) . (y - P_X(x)) <= 0 for every y
    in X.
    """
    x = cloud(seed, 20, scale)
    projected = SETS[name].project(x)
    towards = feasible_points(name, seed + 2, 200)[None] - projected[:, None]
    products = (towards * (x - projected)[:, None]).sum(-1)
    assert float(products.max()) <= 10 * slack(torch.float64, x)


@every_set
@every_dtype
@EXACT
@given(seed=numbers, scale=scales, gap=st.sampled_from([1e-2, 1.0, 20.0]))
def test_projections_do_not_pull_points_apart(
    name: str, dtype: torch.dtype, seed: int, scale: float, gap: float
) -> None:
    """Non-expansiveness, used in the proof of Theorem 1: ||P_X(x) - P_X(y)|| <= ||x - y||."""
    x = cloud(seed, 50, scale, dtype)
    y = x + cloud(seed + 1, 50, gap, dtype)
    before = (x.double() - y.double()).norm(dim=1)
    after = (SETS[name].project(x).double() - SETS[name].project(y).double()).norm(dim=1)
    assert bool((after <= before + slack(dtype, x, y)).all())


@every_set
@every_dtype
def test_a_stack_is_projected_row_by_row(name: str, dtype: torch.dtype) -> None:
    x = cloud(5, 6, 3.0, dtype)
    stacked = SETS[name].project(x)
    for k in range(len(x)):
        torch.testing.assert_close(
            SETS[name].project(x[k]), stacked[k], rtol=0, atol=slack(dtype, x)
        )
    torch.testing.assert_close(
        SETS[name].project(x.reshape(2, 3, P)).reshape(6, P), stacked, rtol=0, atol=slack(dtype, x)
    )


@every_set
def test_projecting_leaves_the_argument_alone(name: str) -> None:
    x = cloud(6, 3, 4.0)
    before = x.clone()
    SETS[name].project(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", [name for name in SETS if name != "none"])
def test_contains_is_false_if_one_row_is_outside(name: str) -> None:
    points = feasible_points(name, 4, 5)
    points[3, 2] += 10.0
    assert not SETS[name].contains(points)
    assert SETS[name].contains(points[:3], tolerance=1e-12)
    assert SETS[name].contains(points, tolerance=11.0)


# ------------------------------------------------------------------------------------------------
# hand numbers
def test_no_projection_is_the_identity() -> None:
    x = torch.tensor([1e30, -1e30])
    assert NoProjection().project(x) is x
    assert NoProjection().contains(x)


def test_the_box_clamps_and_is_the_papers_by_default() -> None:
    """Experiments: 'the box [-2, 2]'."""
    assert Box() == Box(-2.0, 2.0)
    assert json.dumps(describe(Box(-2, 2))) == json.dumps(
        describe(Box())
    )  # a record is hashed as it is written
    assert json.dumps(describe(Ball(1))) == json.dumps(describe(Ball(1.0)))
    assert Box().project(torch.tensor([-3.0, -2.0, 0.5, 2.0, 7.0])).tolist() == [
        -2.0,
        -2.0,
        0.5,
        2.0,
        2.0,
    ]


def test_the_box_may_be_open_on_one_side() -> None:
    assert Box(0.0, math.inf).project(torch.tensor([-1.0, 5.0])).tolist() == [0.0, 5.0]


def test_the_ball_scales_long_rows_and_leaves_short_ones() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(
        Ball(1.0).project(x), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
    )


def test_the_simplex_subtracts_one_threshold_and_clips() -> None:
    """By hand: [0.8, 0.6, -1] -> threshold 0.2 -> [0.6, 0.4, 0]; a far point goes to a corner."""
    x = torch.tensor([[0.8, 0.6, -1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor(
        [[0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64
    )
    torch.testing.assert_close(Simplex().project(x), expected)


@every_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_the_simplex_keeps_its_mass_for_many_parameters_far_away(
    dtype: torch.dtype, offset: float
) -> None:
    """Rounding must not grow with the number of parameters or with their size."""
    x = (offset + 1e-3 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert Simplex().contains(Simplex().project(x))


@every_dtype
def test_the_ball_keeps_its_radius_for_many_parameters(dtype: torch.dtype) -> None:
    x = torch.randn(3, 109_386, generator=torch.Generator().manual_seed(1), dtype=dtype)
    assert Ball(1.5).contains(Ball(1.5).project(x))


@every_set
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_does_not_become_an_error_here(name: str, value: float) -> None:
    """The engine names the device and the step; a projection must let NaN through, row by row."""
    x = torch.zeros(2, P)
    x[1, 3] = value
    projected = SETS[name].project(x)
    assert bool(torch.isfinite(projected[0]).all())
    if math.isnan(value):
        assert not bool(torch.isfinite(projected[1]).all())


def test_a_simplex_of_one_parameter_is_a_point() -> None:
    assert Simplex(2.0).project(torch.tensor([[-5.0], [7.0]])).tolist() == [[2.0], [2.0]]


def test_tensor_boxes_bound_each_tensor_by_its_own_box() -> None:
    boxes = TensorBoxes(((2, -1.0, 1.0), (1, 0.0, 5.0)))
    assert boxes.project(torch.tensor([-3.0, 0.5, -3.0])).tolist() == [-1.0, 0.5, 0.0]
    assert boxes.project(torch.tensor([[9.0, -9.0, 9.0]])).tolist() == [[1.0, -1.0, 5.0]]


def test_tensor_boxes_must_cover_the_whole_model() -> None:
    boxes = TensorBoxes(((2, -1.0, 1.0), (1, 0.0, 5.0)))
    for use in (boxes.project, boxes.contains):
        with pytest.raises(ConfigError, match="cover 3 parameters, the model has 4"):
            use(torch.zeros(4))


# ------------------------------------------------------------------------------------------------
# bad bounds
@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.0), (2.0, -2.0), (math.nan, 1.0), (0.0, math.nan)]
)
def test_a_box_without_inside_is_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=f"low={low} must be below high={high}"):
        Box(low, high)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_a_ball_without_a_finite_radius_above_zero_is_refused(radius: float) -> None:
    with pytest.raises(ConfigError, match=f"ball radius={radius}"):
        Ball(radius)


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf])
def test_a_simplex_without_a_finite_mass_above_zero_is_refused(total: float) -> None:
    with pytest.raises(ConfigError, match=f"simplex total={total}"):
        Simplex(total)


@pytest.mark.parametrize(
    "segment", [(-1, 0.0, 1.0), (3, 1.0, 1.0), (3, 1.0, 0.0), (3, math.nan, 0.0)]
)
def test_a_bad_tensor_box_is_refused_by_its_numbers(segment: tuple[int, float, float]) -> None:
    length, low, high = segment
    with pytest.raises(ConfigError, match=rf"length={length}, low={low}, high={high}"):
        TensorBoxes(((2, -1.0, 1.0), segment))
