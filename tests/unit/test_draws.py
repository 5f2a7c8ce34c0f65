"""Addressed draws: the bits of docs/determinism.md, the same from Python integers, NumPy and
torch.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fedbcd.algorithm import draws
from support.exploring import examples

MODULUS = 1 << 64
EXACT = examples(30)
seeds = st.integers(-(2**70), 2**70)
parts = st.lists(st.integers(0, 2**40), min_size=1, max_size=5)


def mix_as_written(h: int) -> int:
    """`mix` of docs/determinism.md, word for word, on plain integers modulo 2^64."""
    h ^= h >> 30
    h = h * 0xBF58476D1CE4E5B9 % MODULUS
    h ^= h >> 27
    h = h * 0x94D049BB133111EB % MODULUS
    return h ^ (h >> 31)


def address_as_written(seed: int, stream: int, *address: int) -> int:
    """`address` of docs/determinism.md, word for word."""
    golden = 0x9E3779B97F4A7C15
    h = mix_as_written((seed + (stream + 1) * golden) % MODULUS)
    for part in address:
        h = mix_as_written((h + (part + 1) * golden) % MODULUS)
    return h


def unsigned(h: int) -> int:
    return h % MODULUS


def arrays(numbers: list[int]) -> list[np.ndarray]:
    return [np.array([n], dtype=np.int64) for n in numbers]


def tensors(numbers: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([n]) for n in numbers]


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic against equal expectations; its mean is (bins - 1), its variance 2 (bins
    - 1).
    """
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def is_plausible(statistic: float, freedom: int) -> bool:
    """Within six standard deviations of what uniform counts give, on either side."""
    return abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


def test_the_streams_have_the_numbers_of_the_determinism_page() -> None:
    names = (
        draws.BATCH,
        draws.STEPS,
        draws.ARRIVAL,
        draws.PROCESS,
        draws.AVAILABLE,
        draws.LABELS,
        draws.SAMPLES,
    )
    assert names == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("seed", "stream", "address", "bits"),
    [
        (0, draws.BATCH, (0, 0, 0, 0), 0xF2A11B6519DF9DD3),
        (0, draws.STEPS, (0, 0), 0x3EDFBA9281257392),
        (1, draws.ARRIVAL, (17, 3), 0x1DC700BF3D8DDF1E),
        (-1, draws.SAMPLES, (99, 59_999), 0x242329EB480DEEEE),
    ],
)
def test_known_bits_never_change(
    seed: int, stream: int, address: tuple[int, ...], bits: int
) -> None:
    """Frozen values: every recorded run depends on them."""
    assert (
        draws.address_one(seed, stream, *address)
        == bits
        == address_as_written(seed, stream, *address)
    )


def test_the_mixer_is_splitmix64() -> None:
    """With no further parts, streams 0, 1, 2, ... are the published outputs of SplitMix64 for seed
    1234567.
    """
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [draws.address_one(1234567, stream) for stream in range(5)] == published


@EXACT
@given(seed=seeds, stream=st.integers(1, 7), address=parts)
def test_integers_numpy_and_torch_give_the_bits_of_the_definition(
    seed: int, stream: int, address: list[int]
) -> None:
    expected = address_as_written(seed, stream, *address)
    from_numpy = draws.address(seed, stream, *arrays(address))
    from_torch = draws.address(seed, stream, *tensors(address))
    assert draws.address_one(seed, stream, *address) == expected
    assert [unsigned(int(h)) for h in from_numpy] == [expected]
    assert [unsigned(int(h)) for h in from_torch] == [expected]


def test_parts_of_an_address_broadcast() -> None:
    grid = draws.address(5, draws.BATCH, np.arange(3)[:, None], np.arange(4)[None, :])
    assert grid.shape == (3, 4)
    assert [[unsigned(int(h)) for h in row] for row in grid] == [
        [address_as_written(5, 1, i, j) for j in range(4)] for i in range(3)
    ]


def test_every_part_of_an_address_matters_and_so_does_their_order() -> None:
    base = draws.address_one(0, draws.BATCH, 1, 2, 3, 4)
    others = {
        draws.address_one(1, draws.BATCH, 1, 2, 3, 4),
        draws.address_one(0, draws.STEPS, 1, 2, 3, 4),
        draws.address_one(0, draws.BATCH, 0, 2, 3, 4),
        draws.address_one(0, draws.BATCH, 1, 2, 3, 5),
        draws.address_one(0, draws.BATCH, 2, 1, 3, 4),
        draws.address_one(0, draws.BATCH, 1, 2, 3),
    }
    assert len(others | {base}) == 7


def test_ten_thousand_addresses_have_ten_thousand_hashes() -> None:
    h = draws.address(0, draws.ARRIVAL, np.arange(100)[:, None], np.arange(100)[None, :])
    assert np.unique(h).size == 10_000


# ------------------------------------------------------------------------------------------------
# below, unit
EXTREMES = [
    0,
    1,
    (1 << 12) - 1,
    (1 << 31),
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    MODULUS - 1,
]


@EXACT
@given(h=st.integers(0, MODULUS - 1), bound=st.integers(1, 2**31))
def test_below_is_the_definition_and_in_range_at_every_hash_and_bound(h: int, bound: int) -> None:
    expected = ((h >> 32) * bound) >> 32
    signed = h - MODULUS if h >> 63 else h
    assert 0 <= expected < bound
    assert draws.below(np.array([signed]), bound).tolist() == [expected]
    assert draws.below(torch.tensor([signed]), bound).tolist() == [expected]


@pytest.mark.parametrize("h", EXTREMES)
def test_below_stays_in_range_at_extreme_hashes(h: int) -> None:
    signed = np.array([h - MODULUS if h >> 63 else h])
    for bound in (1, 2, 3, 2**31 - 1, 2**31):
        assert 0 <= int(draws.below(signed, bound)[0]) < bound


def test_below_takes_a_bound_per_element() -> None:
    h = draws.address(0, draws.BATCH, torch.arange(1000))
    bounds = torch.arange(1000) % 7 + 1
    values = draws.below(h, bounds)
    assert bool(((values >= 0) & (values < bounds)).all())
    assert values.tolist() == [int(draws.below(h[k : k + 1], int(bounds[k]))) for k in range(1000)]


@pytest.mark.parametrize("h", EXTREMES)
def test_unit_is_strictly_between_zero_and_one_at_extreme_hashes(h: int) -> None:
    """Quantile functions are finite only strictly inside (0, 1)."""
    value = float(draws.unit(np.array([h - MODULUS if h >> 63 else h]))[0])
    assert 0.0 < value < 1.0
    assert value == ((h >> 12) + 0.5) * 2.0**-52


@EXACT
@given(seed=seeds, stream=st.integers(1, 7), address=parts)
def test_unit_one_is_unit_of_the_address(seed: int, stream: int, address: list[int]) -> None:
    assert draws.unit_one(seed, stream, *address) == float(
        draws.unit(draws.address(seed, stream, *arrays(address)))[0]
    )


# ------------------------------------------------------------------------------------------------
# uniformity
@pytest.mark.parametrize("bound", [2, 5, 10, 60])
def test_below_is_close_to_uniform(bound: int) -> None:
    values = draws.below(draws.address(0, draws.BATCH, np.arange(60_000)), bound)
    assert is_plausible(chi_square(np.bincount(values, minlength=bound)), bound - 1)


def test_unit_is_close_to_uniform() -> None:
    values = draws.unit(
        draws.address(3, draws.ARRIVAL, np.arange(300)[:, None], np.arange(200)[None, :]).reshape(
            -1
        )
    )
    assert is_plausible(chi_square(np.histogram(values, bins=50, range=(0.0, 1.0))[0]), 49)
    assert abs(values.mean() - 0.5) < 6 * (1 / 12 / values.size) ** 0.5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, draws.BATCH, 0), (0, draws.BATCH, 1)),  # neighbouring devices
        ((0, draws.BATCH, 0), (1, draws.BATCH, 0)),  # neighbouring seeds
        ((0, draws.ARRIVAL, 0), (0, draws.PROCESS, 0)),  # two streams
    ],
)
def test_draws_at_neighbouring_addresses_are_independent(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    """Assumption 5 asks for independent samples: pairs fill an 8 x 8 table evenly."""
    count = np.arange(40_000)
    a, b = (
        draws.below(draws.address(seed, stream, np.array([device]), count), 8)
        for seed, stream, device in (one, other)
    )
    assert is_plausible(chi_square(np.bincount(8 * a + b, minlength=64)), 63)


def test_successive_draws_of_one_device_are_uncorrelated() -> None:
    values = draws.unit(draws.address(0, draws.BATCH, np.array([4]), np.arange(50_000)))
    for lag in (1, 2, 32):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 6 / 50_000**0.5


# ------------------------------------------------------------------------------------------------
# steps
def test_steps_cover_low_to_high_evenly() -> None:
    """SPEC item 1: K_i(t) is uniform on {1..5} per activation."""
    counts = np.bincount(
        [draws.steps(0, device, session, 1, 5) for device in range(50) for session in range(100)],
        minlength=6,
    )
    assert counts[0] == 0
    assert counts.size == 6
    assert is_plausible(chi_square(counts[1:]), 4)


def test_steps_of_a_single_value_are_that_value() -> None:
    assert {draws.steps(9, device, 0, 3, 3) for device in range(20)} == {3}


def test_steps_are_low_plus_below_of_their_address() -> None:
    h = address_as_written(7, draws.STEPS, 3, 11)
    assert draws.steps(7, 3, 11, 2, 9) == 2 + (((h >> 32) * 8) >> 32)


# ------------------------------------------------------------------------------------------------
# batches
@EXACT
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 50), st.integers(1, 600)),
        min_size=1,
        max_size=6,
    ),
    steps=st.integers(1, 5),
    batch=st.integers(1, 8),
)
def test_the_batches_of_a_row_do_not_depend_on_the_other_rows(
    rows: list[tuple[int, int, int]], steps: int, batch: int
) -> None:
    """Batching devices together must not change what any of them sees."""
    device, session, size = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = draws.batch_positions(1, device, session, size, draws.grid(steps, batch))
    assert together.shape == (len(rows), steps, batch)
    for k in range(len(rows)):
        alone = draws.batch_positions(
            1, device[k : k + 1], session[k : k + 1], size[k : k + 1], draws.grid(steps, batch)
        )
        assert torch.equal(together[k], alone[0])
        assert int(alone.min()) >= 0
        assert int(alone.max()) < rows[k][2]


def test_more_steps_leave_the_earlier_batches_as_they_were() -> None:
    arguments = (torch.tensor([2, 5]), torch.tensor([0, 3]), torch.tensor([60, 7]))
    assert torch.equal(
        draws.batch_positions(0, *arguments, draws.grid(2, 4)),
        draws.batch_positions(0, *arguments, draws.grid(5, 4))[:, :2],
    )


def test_batch_slots_are_below_of_device_session_step_slot() -> None:
    """docs/determinism.md: slot r of the mini-batch is sample below(h, n_i) of device i."""
    positions = draws.batch_positions(
        4, torch.tensor([6]), torch.tensor([2]), torch.tensor([37]), draws.grid(3, 5)
    )
    expected = [
        [(address_as_written(4, draws.BATCH, 6, 2, k, r) >> 32) * 37 >> 32 for r in range(5)]
        for k in range(3)
    ]
    assert positions[0].tolist() == expected


def test_batches_are_drawn_with_replacement() -> None:
    """Assumption 5: independent samples, so a small device repeats some within a batch."""
    positions = draws.batch_positions(
        0, torch.tensor([0]), torch.tensor([0]), torch.tensor([4]), draws.grid(1, 64)
    )
    assert set(positions.flatten().tolist()) == {0, 1, 2, 3}
