"""What the cloud computes: eqs. (5) and (6), mixing matrices (Assumption 3) and the bound on eta_z
(Assumption 4(ii)).
"""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm import cloud
from fedbcd.algorithm.projection import Ball, Box, Projection, Simplex
from fedbcd.errors import ConfigError
from support.clouds import cloud_round, first_b_weights
from support.exploring import examples
from support.rounding import ROUNDED_64

EXACT = examples(20)
seeds = st.integers(0, 2**20)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def doubly_stochastic(draw: st.DrawFn, largest: int = 6) -> Tensor:
    """Birkhoff: every doubly stochastic matrix is a convex combination of permutations."""
    servers = draw(st.integers(1, largest))
    permutations = draw(st.lists(st.permutations(range(servers)), min_size=1, max_size=5))
    raw = draw(
        st.lists(st.integers(1, 100), min_size=len(permutations), max_size=len(permutations))
    )
    matrix = torch.zeros(servers, servers, dtype=torch.float64)
    for permutation, weight in zip(permutations, raw, strict=True):
        matrix += weight / sum(raw) * torch.eye(servers, dtype=torch.float64)[list(permutation)]
    return matrix


# ------------------------------------------------------------------------------------------------
# equations
def test_mixing_is_the_weighted_sum_of_each_row() -> None:
    """Eq. (6a): w_n = sum_m a_nm z_m, by hand."""
    weights = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    assert cloud.mix(torch.tensor([[0.0, 8.0], [4.0, 0.0]]), weights).tolist() == [
        [1.0, 6.0],
        [3.0, 2.0],
    ]


def test_the_relative_step_goes_part_of_the_way_to_the_mean() -> None:
    """Eqs. (5) and (6b), SPEC item 4: z <- w - eta_z (w - m), by hand: 8 - 0.5 (8 - 2) = 5."""
    assert float(cloud.server_step(torch.tensor(8.0), torch.tensor(2.0), 0.5)) == 5.0


def test_the_absolute_step_is_as_printed() -> None:
    """Eq. (6b): 8 - 0.125 (1 (8 - 2) + 3 (8 - 4)) = 5.75, with x = (2, 4), gamma = (1, 3)."""
    stepped = cloud.server_step_absolute(
        torch.tensor(8.0), torch.tensor(1 * 2.0 + 3 * 4.0), 4.0, 0.125
    )
    assert float(stepped) == 5.75


@EXACT
@given(
    seed=seeds,
    gamma=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8),
    step=st.floats(0.01, 1.0),
)
def test_relative_and_absolute_agree(seed: int, gamma: list[float], step: float) -> None:
    """SPEC item 4: eta_abs = eta_z / sum gamma_i; 'the two must agree in a test'. The sum is
    written out as in eq. (6b).
    """
    x, w, weights = (
        normal(seed, len(gamma), 5),
        normal(seed + 1, 5),
        torch.tensor(gamma, dtype=torch.float64),
    )
    absolute = step / float(weights.sum())
    printed = w - absolute * sum(float(g) * (w - x_i) for g, x_i in zip(weights, x, strict=True))
    relative = cloud.server_step(w, weights @ x / weights.sum(), step)
    torch.testing.assert_close(
        cloud.server_step_absolute(w, weights @ x, float(weights.sum()), absolute),
        printed,
        rtol=0,
        atol=1e-12,
    )
    torch.testing.assert_close(relative, printed, rtol=0, atol=1e-12)


def test_step_one_replaces_the_model_by_the_mean() -> None:
    """FedAvg's and FedProx's average is the step of length 1."""
    w, m = normal(0, 3), normal(1, 3)
    torch.testing.assert_close(cloud.server_step(w, m, 1.0), m, rtol=0, atol=ROUNDED_64)


@pytest.mark.parametrize("iterations", [1, 2, 3, 7])
def test_cloud_iterations_repeat_mixing_and_stepping(iterations: int) -> None:
    """Algorithm 1, lines 17-22: K_z iterations, each mixes then steps."""
    z, m, weights = normal(0, 4, 3), normal(1, 4, 3), first_b_weights(4, (0, 2, 3))
    expected = z
    for _ in range(iterations):
        expected = 0.5 * (weights @ expected) + 0.5 * m
    torch.testing.assert_close(
        cloud_round(z, weights, m, 0.5, iterations), expected, rtol=0, atol=ROUNDED_64
    )


def test_many_sync_iterations_solve_the_server_problem() -> None:
    """Eq. (3b): the minimiser over z of sum gamma_i/2 ||z - x_i||^2 is the weighted mean."""
    m = normal(1, 1, 3)
    torch.testing.assert_close(
        cloud_round(normal(0, 1, 3), torch.eye(1), m, 0.5, 60), m, rtol=0, atol=ROUNDED_64
    )


# ------------------------------------------------------------------------------------------------
# special cases
def test_first_b_of_all_servers_is_the_plain_mean() -> None:
    """Async-cloud with B = |V|: a_nm = 1/|V|; every server gets w = mean."""
    z = normal(0, 5, 3)
    torch.testing.assert_close(
        cloud.mix(z, first_b_weights(5, (0, 1, 2, 3, 4))), z.mean(0).expand(5, 3)
    )
    torch.testing.assert_close(cloud.mean(z), z.mean(0))


def test_first_b_mixes_the_first_and_leaves_the_others() -> None:
    """Async-cloud: 'a_nm = 1/B for n, m in V(t), a_nn = 1 and a_nm = 0 for n, m not in V(t)'."""
    z = normal(0, 5, 3)
    mixed = cloud.mix(z, first_b_weights(5, (3, 1)))
    for n in (1, 3):
        torch.testing.assert_close(mixed[n], cloud.mean(z[[1, 3]]))
    for n in (0, 2, 4):
        assert torch.equal(mixed[n], z[n])


@EXACT
@given(servers=st.integers(1, 7), data=st.data())
def test_first_b_weights_are_doubly_stochastic(servers: int, data: st.DataObject) -> None:
    """Assumption 3(ii) holds for Async-cloud whoever comes first."""
    first = data.draw(
        st.lists(st.integers(0, servers - 1), unique=True, min_size=1, max_size=servers)
    )
    cloud.check_doubly_stochastic(first_b_weights(servers, tuple(first)))


def test_sync_cloud_is_mixing_on_one_point() -> None:
    """'For the Sync-cloud update, it is equivalent to fix |V| = 1': equal models stay equal under
    any mixing.
    """
    z = normal(0, 3).expand(4, 3)
    m = normal(1, 3).expand(4, 3)
    after = cloud_round(z, first_b_weights(4, (0, 1, 2, 3)), m, 0.5)
    torch.testing.assert_close(
        after, (z[0] - 0.5 * (z[0] - m[0])).expand(4, 3), rtol=0, atol=ROUNDED_64
    )


# ------------------------------------------------------------------------------------------------
# properties
@EXACT
@given(weights=doubly_stochastic(), seed=seeds)
def test_mixing_keeps_the_mean_of_all_servers(weights: Tensor, seed: int) -> None:
    """Assumption 3(ii): columns that sum to one keep zbar, whoever talks to whom."""
    cloud.check_doubly_stochastic(weights)
    z = normal(seed, len(weights), 4)
    torch.testing.assert_close(cloud.mix(z, weights).mean(0), z.mean(0), rtol=0, atol=1e-13)


@EXACT
@given(weights=doubly_stochastic(), seed=seeds)
def test_mixing_never_spreads_the_servers(weights: Tensor, seed: int) -> None:
    z = normal(seed, len(weights), 4)
    before, after = ((t - t.mean(0)).norm() for t in (z, cloud.mix(z, weights)))
    assert float(after) <= float(before) + 1e-13


@EXACT
@given(
    weights=doubly_stochastic(),
    seed=seeds,
    step=st.floats(0.01, 1.0),
    iterations=st.integers(1, 4),
    convex=st.sampled_from([Box(-0.5, 0.5), Ball(1.0), Simplex(1.0)]),
)
def test_global_models_stay_in_the_set(
    weights: Tensor, seed: int, step: float, iterations: int, convex: Projection
) -> None:
    """Fact 1: w_n and z_n 'always lie on X', without any projection on the servers."""
    z, m = (convex.project(normal(seed + k, len(weights), 4)) for k in (0, 1))
    assert convex.contains(cloud.mix(z, weights), tolerance=1e-13)
    assert convex.contains(cloud_round(z, weights, m, step, iterations), tolerance=1e-13)


@EXACT
@given(gamma=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6), seed=seeds)
def test_the_absolute_step_stays_in_the_set_up_to_its_bound(gamma: list[float], seed: int) -> None:
    """Fact 1 with Assumption 4(ii) at equality: z is a convex combination of w_n and the x_i."""
    bound = 1 / (max(gamma) * len(gamma))
    cloud.check_absolute_step(bound, max(gamma), len(gamma))
    x, w = Box(-1, 1).project(normal(seed, len(gamma), 4)), Box(-1, 1).project(normal(seed + 1, 4))
    weights = torch.tensor(gamma, dtype=torch.float64)
    z = cloud.server_step_absolute(w, weights @ x, float(weights.sum()), bound)
    assert Box(-1, 1).contains(z, tolerance=1e-13)


# ------------------------------------------------------------------------------------------------
# refusals
@pytest.mark.parametrize(
    ("matrix", "complaint"),
    [
        ([[0.5, 0.5], [0.6, 0.5]], "row 1 of the mixing matrix sums to 1.1"),
        ([[0.5, 0.5], [0.5, 0.4]], "row 1 of the mixing matrix sums to 0.9"),
        (
            [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
            "column 0 of the mixing matrix sums to 2",
        ),
        ([[0.5, 0.5], [0.0, 1.0]], r"column \d of the mixing matrix sums to (0.5|1.5)"),
        ([[1.5, -0.5], [-0.5, 1.5]], "negative entry, -0.5"),
        ([[1.0, 0.0]], r"shape \(1, 2\); it must be servers x servers"),
        ([[math.nan, 0.5], [0.5, 0.5]], "row 0 of the mixing matrix sums to nan"),
    ],
)
def test_a_matrix_that_is_not_doubly_stochastic_is_refused_by_row_or_column(
    matrix: list[list[float]], complaint: str
) -> None:
    """Assumption 3(ii)."""
    with pytest.raises(ConfigError, match=complaint):
        cloud.check_doubly_stochastic(torch.tensor(matrix, dtype=torch.float64))


def test_a_vector_is_not_a_mixing_matrix() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2,\)"):
        cloud.check_doubly_stochastic(torch.tensor([1.0, 0.0]))


def test_a_cloud_round_refuses_a_matrix_that_would_lose_mass() -> None:
    with pytest.raises(ConfigError, match="Assumption 3"):
        cloud_round(normal(0, 2, 3), torch.tensor([[0.5, 0.4], [0.5, 0.6]]), normal(1, 2, 3), 0.5)


def test_the_papers_step_taken_literally_is_refused_with_its_bound() -> None:
    """SPEC item 4, 'a trap': eta_z = 0.5 with gamma = 1 and ten devices breaks eta_z <= 1/(gamma
    max|Q_n|) = 0.1.
    """
    with pytest.raises(
        ConfigError, match=r"server_step=0.5 in absolute form exceeds 0.1 = .*Assumption 4\(ii\)"
    ):
        cloud.check_absolute_step(0.5, 1.0, 10)
    cloud.check_absolute_step(0.1, 1.0, 10)


@pytest.mark.parametrize("step", [0.11, 0.19, 0.21])
def test_a_refused_step_is_said_to_diverge_only_beyond_twice_the_bound(step: float) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"Theorem 1 promises nothing: .* may carry z past .*; beyond 0\.2, .* it diverges; use"
            r" server_step <= 0\.1"
        ),
    ):
        cloud.check_absolute_step(step, 1.0, 10)


def after_ten_rounds(step: float) -> float:
    """z = 1 and ten devices with gamma_i = 1 whose models stay at 0."""
    z = torch.tensor(1.0, dtype=torch.float64)
    for _ in range(10):
        z = cloud.server_step_absolute(z, torch.zeros_like(z), 10.0, step)
    return float(z)


def test_the_literal_step_does_diverge() -> None:
    """Why it is refused: 1 - eta_z sum gamma_i = -4, so each round takes z four times as far from
    the devices' mean.
    """
    assert after_ten_rounds(0.5) == (-4.0) ** 10


def test_between_one_and_two_times_the_bound_z_overshoots_and_beyond_that_it_diverges() -> None:
    assert after_ten_rounds(0.15) == pytest.approx(0.5**10)
    assert after_ten_rounds(0.19) == pytest.approx(0.9**10)
    assert after_ten_rounds(0.21) == pytest.approx(1.1**10)
    overshot = cloud.server_step_absolute(torch.tensor(1.0), torch.tensor(0.0), 10.0, 0.15)
    assert float(overshot) == pytest.approx(
        -0.5
    )  # past the mean, so z need not be in X although all x_i and z were (Fact 1)


def ten_devices_per_server(servers: int) -> fb.Federation:
    devices = [(torch.ones(2, 1) * k, torch.ones(2, 1)) for k in range(10 * servers)]
    return fb.Federation(lambda: nn.Linear(1, 1), nn.functional.mse_loss, devices, servers)


@pytest.mark.parametrize(
    ("servers", "chosen"),
    [(1, fb.SyncCloud()), (2, fb.AsyncCloud(first=1)), (2, fb.RigorousCloud(first=2))],
)
def test_training_refuses_the_literal_step_before_it_begins(servers: int, chosen: fb.Cloud) -> None:
    """Assumption 4(ii) through the public call: 'server_step=0.5' names the bound 0.1 and both ways
    out.
    """
    algorithm = fb.FedBCD(server_step=0.5, server_step_form="absolute", penalty=1.0)
    with pytest.raises(
        ConfigError, match=r"exceeds 0.1 .*use server_step <= 0.1, or server_step_form='relative'"
    ):
        fb.train(ten_devices_per_server(servers), algorithm, cloud=chosen, rounds=1)


def test_the_sync_cloud_counts_all_devices_in_the_bound() -> None:
    """Eq. (5) sums over the devices of all servers, so two servers of ten allow 0.05 only."""
    algorithm = fb.FedBCD(server_step=0.1, server_step_form="absolute", penalty=1.0)
    with pytest.raises(ConfigError, match=r"exceeds 0.05 = "):
        fb.train(ten_devices_per_server(2), algorithm, cloud=fb.SyncCloud(), rounds=1)


def test_devices_that_join_later_count_in_the_bound() -> None:
    """Assumption 4(ii) asks for the largest |Q_n|, and a joined device is in the sum of eq. (5)."""
    algorithm = fb.FedBCD(server_step=1 / 9, server_step_form="absolute", penalty=1.0)
    with pytest.raises(ConfigError, match=r"exceeds 0.1 = "):
        fb.train(ten_devices_per_server(1), algorithm, rounds=1, joins={9: 3})


def test_training_gives_the_same_models_in_both_forms() -> None:
    """SPEC item 4, through the public call: eta_abs = eta_z / sum gamma_i, with a gamma per
    device.
    """
    gamma = [0.2 + 0.1 * k for k in range(10)]
    relative = fb.FedBCD(penalty=gamma, server_step=0.4, batch=2)
    absolute = fb.FedBCD(
        penalty=gamma, server_step=0.4 / sum(gamma), server_step_form="absolute", batch=2
    )
    one, other = (
        fb.train(ten_devices_per_server(1), a, rounds=5, dtype=torch.float64)
        for a in (relative, absolute)
    )
    torch.testing.assert_close(one.global_VF, other.global_VF, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.personal_NF, other.personal_NF, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cloud", [fb.AsyncCloud(first=2), fb.RigorousCloud(first=2)])
def test_the_papers_step_as_printed_is_a_relative_one_of_three_tenths(cloud: fb.Cloud) -> None:
    """FedBCD-I with eta_z 0.5, gamma 0.2 and three active devices, in eq. (6b) as it is printed."""
    absolute = fb.FedBCDI(server_step=0.5, server_step_form="absolute", batch=2, device_step=1e-3)
    relative = fb.FedBCDI(server_step=0.3, batch=2, device_step=1e-3)
    one, other = (
        fb.train(ten_devices_per_server(3), a, cloud=cloud, active=3, rounds=8, dtype=torch.float64)
        for a in (relative, absolute)
    )
    torch.testing.assert_close(one.global_VF, other.global_VF, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.personal_NF, other.personal_NF, rtol=0, atol=1e-12)


def test_training_refuses_a_graph_that_is_not_doubly_stochastic() -> None:
    graph = fb.GraphCloud([[0.5, 0.5], [0.2, 0.8]])
    with pytest.raises(ConfigError, match=r"column 0 of the mixing matrix sums to 0\.7"):
        fb.train(ten_devices_per_server(2), fb.FedBCD(), cloud=graph, rounds=1)


@pytest.mark.filterwarnings("ignore::fedbcd.errors.BorderWarning")
@pytest.mark.filterwarnings("ignore::fedbcd.errors.DivergenceWarning")
def test_training_keeps_global_models_in_the_set() -> None:
    """Fact 1 in a run: projections happen on devices only, yet every z_n is in X."""
    algorithm = fb.FedBCD(device_step=0.5, batch=2, projection=fb.Box(-0.3, 0.3))
    run = fb.train(ten_devices_per_server(2), algorithm, cloud=fb.AsyncCloud(first=1), rounds=8)
    assert fb.Box(-0.3, 0.3).contains(run.global_VF, tolerance=1e-7)
    assert fb.Box(-0.3, 0.3).contains(run.personal_NF)
