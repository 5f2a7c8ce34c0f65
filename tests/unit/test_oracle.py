"""The oracle against arithmetic done by hand. Expected numbers are written out, not computed by the
code under test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle import (
    ARRIVAL,
    AVAILABLE,
    BATCH,
    PROCESS,
    STEPS,
    Problem,
    Result,
    Settings,
    Simulation,
    address,
    below,
    mix,
    run,
    unit,
)
from support.rounding import ROUNDED_64

SEED = 7
NEVER = 1000.0


def quadratic(servers: list[list[int]], targets: dict[int, float], **changes: Any) -> Problem:
    """Device i minimises (x - target_i)^2 / 2 over one real number; the set X is everything."""
    base: dict[str, Any] = {
        "servers": servers,
        "sizes": dict.fromkeys(targets, 4),
        "gradient": lambda i, x, samples: x - targets[i],
        "start": np.array([0.0]),
        "project": lambda x: x,
    }
    return Problem(**(base | changes))


def settings(**changes: Any) -> Settings:
    """One full gradient step per activation, one time unit each; every device arrives after one
    time unit.
    """
    base: dict[str, Any] = {
        "algorithm": "fedbcd",
        "cloud": "sync",
        "first": 1,
        "active": 1,
        "available": 1,
        "offline_limit": 4,
        "penalty": dict.fromkeys(range(20), 1.0),
        "device_step": 0.1,
        "momentum": 0.0,
        "server_step": 0.5,
        "steps": (1, 1),
        "batch": None,
        "cloud_iterations": 1,
        "rounds": 1,
        "seed": SEED,
        "arrival_quantile": lambda u: 1.0,
        "step_quantile": lambda u: 1.0,
    }
    return Settings(**(base | changes))


def arrivals(
    table: dict[tuple[int, int], float], default: float = NEVER
) -> Callable[[float], float]:
    """An arrival quantile that gives (device, phase) the delay of the table: it recognises the
    draw's address.
    """
    known = {unit(address(SEED, ARRIVAL, *key)): delay for key, delay in table.items()}
    return lambda u: known.get(u, default)


def available_order(devices: list[int], round_: int) -> list[int]:
    """The devices by their AVAILABLE draw, smallest first."""
    return sorted(devices, key=lambda i: address(SEED, AVAILABLE, i, round_) >> 12)


def exponential(mean: float) -> Callable[[float], float]:
    """The quantile function of an exponential distribution."""
    return lambda u: -mean * float(np.log1p(-u))


def scalars(models: list[np.ndarray] | tuple[np.ndarray, ...]) -> list[float]:
    """Models of one number as plain floats."""
    return [float(model[0]) for model in models]


# ---- draws ----


def test_address_without_parts_is_the_published_splitmix64_sequence() -> None:
    """SplitMix64 seeded with 0 gives these words; h = mix(seed + (stream + 1) * G)."""
    assert [address(0, s) for s in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert mix(0) == 0


def test_address_folds_in_each_part_as_uint64_arithmetic_does() -> None:
    """For p in (p1, p2, ...): h = mix(h + (p + 1) * G), everything modulo 2^64."""

    def scramble(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(h ^ (h >> np.uint64(31)))

    golden = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    h = scramble(np.array([2**63 + 5], dtype=np.uint64) + np.uint64(4) * golden)
    for part in (0, 41, 3):
        h = scramble(h + np.uint64(part + 1) * golden)
    assert address(2**63 + 5, 3, 0, 41, 3) == int(h[0])


def test_below_and_unit_use_the_high_bits() -> None:
    """below(h, n) = ((h >>> 32) * n) >>> 32; unit(h) = ((h >>> 12) + 0.5) * 2^-52."""
    assert [below(0, 10), below(2**63, 10), below(2**64 - 1, 10)] == [0, 5, 9]
    assert [unit(0), unit(2**63), unit(2**12)] == [2.0**-53, 0.5 + 2.0**-53, 1.5 * 2.0**-52]


def test_batch_of_a_step_is_drawn_at_device_session_step_slot() -> None:
    """Slot r of the mini-batch is sample below(h, n_i) of device i, addressed by device, session,
    step, slot.
    """
    seen: list[list[int]] = []

    def gradient(i: int, x: np.ndarray, samples: list[int] | None) -> np.ndarray:
        seen.append(samples or [])
        return np.zeros_like(x)

    problem = quadratic([[3]], {3: 0.0}, sizes={3: 50}, gradient=gradient)
    run(problem, settings(batch=4, rounds=2, steps=(2, 2)))
    places = [(session, step) for session in (0, 1) for step in (0, 1)]
    assert seen == [
        [(address(SEED, BATCH, 3, *p, r) >> 32) * 50 >> 32 for r in range(4)] for p in places
    ]


def test_steps_and_step_time_of_an_activation_come_from_their_addresses() -> None:
    """K_i = low + below(h, high - low + 1); tau_i = arrival_i + K_i * Exp (one draw, times K_i)."""
    result = run(
        quadratic([[3]], {3: 0.0}), settings(rounds=3, steps=(1, 5), step_quantile=lambda u: u)
    )
    now = 0.0
    for number, entry in enumerate(result.activations):
        k = 1 + ((address(SEED, STEPS, 3, number) >> 32) * 5 >> 32)
        now += 1.0 + k * ((address(SEED, PROCESS, 3, number) >> 12) + 0.5) / 2**52
        assert entry[0] == pytest.approx(now)
        assert entry[1:] == (3, number, k)
    assert result.clock == result.activations[-1][0]


# ---- FedBCD ----


def test_fedbcd_by_hand_with_momentum_that_crosses_rounds() -> None:
    """SPEC 2-4: ex = x + zeta (x - x_prev); g = gradient(ex) + gamma (ex - z); z <- z - eta_z (z -
    m).
    """
    one = settings(momentum=0.9, steps=(2, 2))
    first = run(quadratic([[0]], {0: 1.0}), one)
    # 0 -> ex 0, g -1 -> 0.1 -> ex 0.19, g -0.81 + 0.19 -> 0.252; z = 0.252 / 2
    assert scalars([first.x_prev[0], first.x[0], first.z[0]]) == pytest.approx(
        [0.1, 0.252, 0.126], abs=ROUNDED_64
    )
    second = run(quadratic([[0]], {0: 1.0}), settings(momentum=0.9, steps=(2, 2), rounds=2))
    # ex 0.3888, g -0.3484 -> 0.42364; ex 0.578116, g 0.030232 -> 0.5750928; z = 0.126 + (0.5750928
    # - 0.126) / 2
    assert scalars([second.x_prev[0], second.x[0]]) == pytest.approx(
        [0.42364, 0.5750928], abs=ROUNDED_64
    )
    assert scalars(second.z) == pytest.approx([0.3505464], abs=ROUNDED_64)
    assert second.clock == 6.0  # two rounds of arrival 1 and two steps of 1
    assert scalars([z for (z,) in second.trace]) == pytest.approx(
        [0.126, 0.3505464], abs=ROUNDED_64
    )


def test_every_step_is_projected() -> None:
    """SPEC 3: projection P_X after every step, so the second step starts from the bound."""
    problem = quadratic([[0]], {0: 1.0}, project=lambda x: np.clip(x, -0.05, 0.05))
    result = run(problem, settings(momentum=0.0, steps=(2, 2)))
    assert scalars([result.x_prev[0], result.x[0]]) == [0.05, 0.05]


def test_m_counts_inactive_members_with_their_last_copy_and_weighs_by_penalty() -> None:
    """SPEC 5: all members Q_n, with the server's last copy of x_i for the inactive ones."""
    early = arrivals({(0, 0): 1.0, (1, 1): 1.0})
    problem = quadratic([[0, 1]], {0: 1.0, 1: -1.0})
    result = run(problem, settings(rounds=2, arrival_quantile=early, penalty={0: 1.0, 1: 3.0}))
    # round 0: x_0 = 0.1, x_1 = 0: m = 0.1 / 4, z = 0.0125. round 1: x_1 = -0.1 (1 - 3 * 0.0125) =
    # -0.09625
    assert scalars([result.x[0], result.x[1]]) == pytest.approx([0.1, -0.09625], abs=ROUNDED_64)
    m = (0.1 - 3 * 0.09625) / 4
    assert scalars(result.z) == pytest.approx([0.0125 + 0.5 * (m - 0.0125)], abs=ROUNDED_64)


def test_relative_step_agrees_with_equation_5_and_repeats_k_z_times() -> None:
    """SPEC 4: eta_abs = eta_z / sum gamma_i, and the two forms must agree; SPEC 6: K_z
    iterations.
    """
    gamma = {0: 0.5, 1: 2.0, 2: 1.5}
    problem = quadratic([[0, 1], [2]], {0: 1.0, 1: -3.0, 2: 2.0}, start=np.array([0.4]))
    result = run(problem, settings(active=2, penalty=gamma, cloud_iterations=3, server_step=0.3))
    z = 0.4
    for _ in range(3):
        z -= (0.3 / 4.0) * sum(gamma[i] * (z - float(result.x[i][0])) for i in gamma)
    assert scalars(result.z) == pytest.approx([z, z], abs=ROUNDED_64)


def test_sync_cloud_waits_for_all_servers_and_lists_them_in_order() -> None:
    """Sync-cloud: the coordinator waits for all servers, applies (5), broadcasts z."""
    slow_first = arrivals({(0, 0): 5.0, (1, 0): 2.0}, default=1.0)
    result = run(
        quadratic([[0], [1]], {0: 1.0, 1: 3.0}), settings(rounds=2, arrival_quantile=slow_first)
    )
    assert result.mixes == [(6.0, (0, 1)), (8.0, (0, 1))]
    assert [entry[:2] for entry in result.activations] == [(3.0, 1), (6.0, 0), (8.0, 0), (8.0, 1)]


def test_sync_cloud_of_one_server_is_async_cloud_of_one_server() -> None:
    """For the Sync-cloud update, it is equivalent to fix |V| = 1."""
    problem = quadratic([[0, 1, 2]], {0: 1.0, 1: -2.0, 2: 0.5})
    same = {"rounds": 6, "active": 2, "momentum": 0.9, "steps": (1, 5), "cloud_iterations": 2}
    clock = {"arrival_quantile": exponential(2.0), "step_quantile": exponential(1.0)}
    results = [
        run(problem, settings(cloud=cloud, **same, **clock))
        for cloud in ("sync", "async", "rigorous")
    ]
    for other in results[1:]:
        assert other.mixes == results[0].mixes
        assert other.activations == results[0].activations
        assert scalars(other.z) == pytest.approx(scalars(results[0].z), abs=ROUNDED_64)


# ---- Async-cloud ----


def test_async_mixes_the_first_b_and_leaves_the_others_alone() -> None:
    """When B are waiting the coordinator mixes those B and answers those B only."""
    problem = quadratic([[0], [1], [2]], {0: 1.0, 1: 2.0, 2: 3.0})
    early = arrivals({(0, 0): 3.0, (1, 0): 9.0, (2, 0): 2.0})
    result = run(problem, settings(cloud="async", first=2, arrival_quantile=early))
    assert result.mixes == [(4.0, (2, 0))]
    # w = 0; x_0 = 0.1 and x_2 = 0.3, each server steps halfway to its own m_n; server 1's device
    # has not uploaded
    assert scalars(result.z) == pytest.approx([0.05, 0.0, 0.15], abs=ROUNDED_64)
    assert scalars([result.x[1]]) == [0.0]


def test_async_keeps_a_waiting_server_ahead_of_later_ones_and_mixes_current_models() -> None:
    """A server that finished but was not among the B stays in the queue, ahead of later ones."""
    problem = quadratic([[0], [1], [2]], {0: 1.0, 1: 2.0, 2: 3.0})
    early = arrivals(
        {(0, 0): 1.0, (1, 0): 2.0, (2, 0): 3.0, (0, 1): 4.0, (1, 1): 1.5, (2, 1): 1.0, (1, 2): 1.0}
    )
    result = run(problem, settings(cloud="async", first=2, rounds=3, arrival_quantile=early))
    # (0, 1) at 3; server 2 waits from 4, server 1 comes at 3 + 2.5; server 2 is back at 5.5 + 2,
    # server 0 at 3 + 5
    assert result.mixes == [(3.0, (0, 1)), (5.5, (2, 1)), (7.5, (2, 1))]
    after_one, after_two = scalars(result.trace[0]), scalars(result.trace[1])
    assert after_one == pytest.approx([0.05, 0.1, 0.0], abs=ROUNDED_64)
    # x_2 = 0.3; x_1 = 0.2 - 0.1 (-1.8 + 0.1) = 0.37; w = (0 + 0.1) / 2
    assert after_two == pytest.approx([0.05, 0.21, 0.175], abs=ROUNDED_64)


def test_async_repeats_mixing_then_step_k_z_times() -> None:
    """SPEC 6: K_z cloud iterations per round, each with mixing then step."""
    problem = quadratic([[0], [1]], {0: 1.0, 1: 2.0})
    result = run(problem, settings(cloud="async", first=2, cloud_iterations=2))
    # z = (0.05, 0.1); w = 0.075; halfway to x = (0.1, 0.2)
    assert scalars(result.z) == pytest.approx([0.0875, 0.1375], abs=ROUNDED_64)


@pytest.mark.parametrize("cloud", ["async", "rigorous"])
def test_mixing_alone_preserves_the_mean_of_the_server_models(cloud: str) -> None:
    """a_nm is doubly stochastic (Assumption 3): with eta_z = 0 the mean of z never changes, and z
    agrees in the end.
    """
    problem = quadratic([[0, 1], [2, 3], [4, 5]], {i: float(i) for i in range(6)})
    clock = {"arrival_quantile": exponential(2.0), "step_quantile": exponential(1.0)}
    simulation = Simulation(
        problem, settings(cloud=cloud, first=2, rounds=60, server_step=0.0, **clock)
    )
    for server, z in zip(simulation.servers, (1.0, 2.0, 6.0), strict=True):
        server.z = np.array([z])
    trace = [scalars(z) for z in simulation.run().trace]
    assert [sum(z) / 3 for z in trace] == pytest.approx([3.0] * 60, abs=1e-12)
    assert sorted(trace[0]) in ([1.5, 1.5, 6.0], [2.0, 3.5, 3.5], [1.0, 4.0, 4.0])
    assert trace[-1] == pytest.approx([3.0] * 3, abs=1e-3)


# ---- rigorous Async-cloud ----


def rigorous_result(rounds: int) -> Result:
    """Three servers, B = 2; server 2 is still in its phase of round 0 when rounds 0 and 1 have been
    mixed.
    """
    problem = quadratic([[0], [1], [2]], {0: 1.0, 1: 2.0, 2: 3.0})
    table = {(i, p): 1.0 for i in (0, 1) for p in (0, 1)} | {(i, 2): 10.0 for i in (0, 1)}
    table |= {(2, 0): 6.0, (2, 1): 1.0, (2, 2): 0.5}
    early = arrivals(table)
    return run(problem, settings(cloud="rigorous", first=2, rounds=rounds, arrival_quantile=early))


def test_rigorous_isolated_server_steps_alone_for_every_round_it_missed() -> None:
    """The rest get "isolate": each finishes its phase, then steps alone with w_n = z_n, then enters
    round t+1.
    """
    result = rigorous_result(3)
    # server 2: phase 0 ends at 7 and phase 1 at 9, both alone; phase 2 ends at 10.5 and is in time
    # for round 2
    assert result.mixes == [(2.0, (0, 1)), (4.0, (0, 1)), (15.0, (2, 0))]
    assert [entry for entry in result.activations if entry[1] == 2] == [
        (7.0, 2, 0, 1),
        (9.0, 2, 1, 1),
        (10.5, 2, 2, 1),
    ]
    x, z = 0.0, 0.0
    for _ in range(2):
        x = x - 0.1 * ((x - 3.0) + (x - z))
        z = z - 0.5 * (z - x)
    x = x - 0.1 * ((x - 3.0) + (x - z))
    other = scalars(result.trace[1])[0]
    assert scalars([result.x[2]]) == pytest.approx([x], abs=ROUNDED_64)
    assert scalars(result.z)[2] == pytest.approx(0.5 * ((z + other) / 2 + x), abs=ROUNDED_64)


def test_rigorous_server_has_not_stepped_before_its_phase_ends() -> None:
    """What is still under way at the end has not happened."""
    result = rigorous_result(2)
    assert scalars([result.z[2], result.x[2]]) == [0.0, 0.0]
    assert result.clock == 4.0


def test_rigorous_and_async_agree_when_all_servers_are_first() -> None:
    """With B = N nobody is ever isolated or left waiting."""
    problem = quadratic([[0, 1], [2, 3]], {i: float(i) for i in range(4)})
    clock = {"arrival_quantile": exponential(2.0), "step_quantile": exponential(1.0)}
    one, two = (
        run(problem, settings(cloud=c, first=2, rounds=5, **clock)) for c in ("async", "rigorous")
    )
    assert one.mixes == two.mixes
    assert scalars(one.z) == scalars(two.z)


# ---- FedBCD-I ----


def test_fedbcd_i_trains_without_penalty_then_pulls_towards_z() -> None:
    """SPEC 7: K_i steps with no penalty, then K_i penalty steps; x - x_prev stays what offline
    training has left.
    """
    two = settings(algorithm="fedbcd-i", penalty={0: 0.2}, momentum=0.5, steps=(2, 2))
    result = run(quadratic([[0]], {0: 1.0}), two)
    # offline: 0.1, ex 0.15 -> 0.235, which is 0.135 more; penalty: 0.188, 0.1504
    assert scalars([result.x_prev[0], result.x[0], result.z[0]]) == pytest.approx(
        [0.0154, 0.1504, 0.0752], abs=ROUNDED_64
    )
    assert result.activations == [(3.0, 0, 0, 2)]


@pytest.mark.parametrize(
    ("momentum", "x_prev"), [("kept", -0.02), ("pull", 0.1), ("restart", 0.08)]
)
def test_fedbcd_i_three_readings_of_the_momentum_after_a_contact(
    momentum: str, x_prev: float
) -> None:
    """K_i = 1: offline 0 -> 0.1, then one penalty step to 0.08."""
    one = settings(algorithm="fedbcd-i", penalty={0: 0.2}, momentum_after_contact=momentum)
    result = run(quadratic([[0]], {0: 1.0}), one)
    assert scalars([result.x_prev[0], result.x[0]]) == pytest.approx([x_prev, 0.08], abs=ROUNDED_64)


def test_fedbcd_i_projects_every_penalty_step() -> None:
    """A2.16: x <- P_X(x - gamma (x - z)); with gamma = 2 the step overshoots z and leaves the
    set.
    """
    problem = quadratic([[0]], {0: 1.0}, project=lambda x: np.clip(x, -0.02, 0.05))
    result = run(problem, settings(algorithm="fedbcd-i", penalty={0: 2.0}))
    assert scalars([result.x_prev[0], result.x[0]]) == pytest.approx([-0.07, -0.02], abs=ROUNDED_64)


def test_fedbcd_i_mean_counts_the_active_devices_only() -> None:
    """SPEC 5: FedBCD-I counts only the active ones Q_n(t); the other one has trained but its model
    stays at home.
    """
    early = arrivals({(0, 0): 1.0})
    both = settings(
        algorithm="fedbcd-i", available=2, arrival_quantile=early, penalty={0: 0.2, 1: 0.2}
    )
    result = run(quadratic([[0, 1]], {0: 1.0, 1: 5.0}), both)
    assert scalars([result.x[0], result.x[1], result.z[0]]) == pytest.approx(
        [0.08, 0.5, 0.04], abs=ROUNDED_64
    )


def test_fedbcd_i_suspends_a_device_after_its_offline_limit_until_it_is_activated() -> None:
    """A device trains offline at most 4 rounds in a row without contact, then waits."""
    trained: list[int] = []

    def gradient(i: int, x: np.ndarray, samples: list[int] | None) -> np.ndarray:
        trained.append(i)
        return np.zeros_like(x)

    problem = quadratic([[0, 1]], {0: 0.0, 1: 0.0}, gradient=gradient)
    early = arrivals({(0, p): 1.0 for p in range(6)} | {(1, 6): 1.0})
    counts = []
    for rounds in (4, 6, 7, 8):
        trained.clear()
        run(
            problem,
            settings(algorithm="fedbcd-i", available=2, rounds=rounds, arrival_quantile=early),
        )
        counts.append((trained.count(0), trained.count(1)))
    assert counts == [(4, 4), (6, 4), (7, 4), (8, 5)]


def test_fedbcd_i_available_devices_have_the_smallest_draws_and_alone_are_candidates() -> None:
    """A server's available devices are the members with the smallest unit(h); candidates are the
    available members.
    """
    devices = [0, 1, 2, 3, 4]
    problem = quadratic([devices], dict.fromkeys(devices, 1.0))
    s = settings(
        algorithm="fedbcd-i", available=3, active=2, rounds=4, penalty=dict.fromkeys(devices, 0.2)
    )
    result = run(problem, s)
    for t in range(4):
        asked = {i for time, i, _, _ in result.activations if time == 2.0 * (t + 1)}
        assert asked == set(sorted(available_order(devices, t)[:3])[:2])


def test_fedbcd_i_offline_rounds_go_on_until_the_device_asks_but_not_while_it_is_busy() -> None:
    """Available devices that are not busy take one offline round in each coordinator round."""
    trained: list[int] = []

    def gradient(i: int, x: np.ndarray, samples: list[int] | None) -> np.ndarray:
        trained.append(i)
        return x - float(i)

    problem = quadratic([[0], [1]], {0: 0.0, 1: 1.0}, gradient=gradient)
    # server 0 mixes alone at 2, 4, 6, 8; device 1 asks at 5 and is busy until 6.5, which is after
    # the mix at 6
    early = arrivals({(0, p): 1.0 for p in range(4)} | {(1, 0): 5.0})
    one_step = {unit(address(SEED, PROCESS, 1, 0)): 1.5}
    clock = {"arrival_quantile": early, "step_quantile": lambda u: one_step.get(u, 1.0)}
    base = {"algorithm": "fedbcd-i", "cloud": "async", "penalty": {0: 0.2, 1: 0.2}}
    waiting = run(problem, settings(**base, rounds=3, **clock))
    # offline rounds 0, 1, 2 (at 0, 2, 4): 1 - 0.9^3; the activation under way at 6 has not happened
    assert scalars([waiting.x[1]]) == pytest.approx([1 - 0.9**3], abs=ROUNDED_64)
    trained.clear()
    done = run(problem, settings(**base, rounds=4, **clock))
    assert trained.count(1) == 3  # not in round 3, which starts at 6
    assert scalars([done.x[1], done.x_prev[1]]) == pytest.approx(
        [0.8 * (1 - 0.9**3), 0.8 * (1 - 0.9**3) - (0.9**2 - 0.9**3)], abs=ROUNDED_64
    )
    assert (6.5, 1, 0, 1) in done.activations


def test_fedbcd_i_activation_uses_the_steps_of_the_latest_session() -> None:
    """The penalty steps of an activation use K_i of the device's latest session."""
    s = settings(algorithm="fedbcd-i", steps=(1, 5), rounds=6, penalty={0: 0.2})
    result = run(quadratic([[0]], {0: 1.0}), s)
    expected = [1 + below(address(SEED, STEPS, 0, session), 5) for session in range(6)]
    assert [k for _, _, _, k in result.activations] == expected


# ---- baselines ----


def test_fedavg_weighs_the_active_models_by_data_size_and_every_device_then_holds_z() -> None:
    """SPEC 8: z <- average of the active devices' models, weighted by data size. Every device then
    holds z.
    """
    problem = quadratic([[0, 1], [2]], {0: 1.0, 1: 9.0, 2: 2.0}, sizes={0: 100, 1: 50, 2: 300})
    early = arrivals({(0, 0): 1.0, (2, 0): 1.0})
    one = settings(algorithm="fedavg", momentum=0.9, steps=(2, 2), arrival_quantile=early)
    result = run(problem, one)
    # plain SGD: 0.1, 0.19 and 0.2, 0.38; device 1 has no weight as it is not active
    z = (100 * 0.19 + 300 * 0.38) / 400
    everything = [*result.z, *result.x.values(), *result.x_prev.values()]
    assert scalars(everything) == pytest.approx([z] * 8, abs=ROUNDED_64)


def test_fedprox_starts_each_activation_from_z_without_old_momentum() -> None:
    """SPEC 8: an activated device starts from z, with x_prev = z; FedProx: ASPG with penalty
    towards z.
    """
    s = settings(algorithm="fedprox", momentum=0.9, steps=(2, 2), rounds=2, penalty={0: 5.0})
    result = run(quadratic([[0]], {0: 1.0}), s)
    # round 0: 0.1; ex 0.19, g -0.81 + 0.95 -> 0.176. round 1: 0.2584; ex 0.33256, g -0.66744 +
    # 0.7828 -> 0.321024
    assert scalars([z for (z,) in result.trace]) == pytest.approx([0.176, 0.321024], abs=ROUNDED_64)


def test_on_an_async_cloud_servers_of_baselines_step_before_they_are_mixed() -> None:
    """SPEC 8: z_n is the average of its active devices, then that of the servers of the mix."""
    s = settings(algorithm="fedavg", cloud="async", first=2)
    result = run(quadratic([[0], [1]], {0: 1.0, 1: 3.0}), s)
    assert scalars(result.z) == pytest.approx([(0.1 + 0.3) / 2] * 2, abs=ROUNDED_64)


# ---- members that come and go ----


def test_joining_device_starts_from_z_and_counts_in_m_from_then_on() -> None:
    """Devices that join in round t start from their server's z (x = x_prev = z_n)."""
    early = arrivals({(0, 0): 1.0, (0, 1): 1.0})
    result = run(
        quadratic([[0, 1]], {0: 1.0, 1: 0.0}),
        settings(rounds=2, joins={1: 1}, arrival_quantile=early),
    )
    # round 0: x_0 = 0.1, m = 0.1 (device 1 absent), z = 0.05; round 1: x_0 = 0.1 - 0.1 (-0.9 +
    # 0.05) = 0.185
    assert scalars([result.x[1], result.x_prev[1]]) == pytest.approx([0.05, 0.05], abs=ROUNDED_64)
    m = (0.185 + 0.05) / 2
    assert scalars(result.z) == pytest.approx([0.05 + 0.5 * (m - 0.05)], abs=ROUNDED_64)


def test_leaving_device_is_dropped_from_m_and_keeps_its_model() -> None:
    """Devices that leave are dropped; a personal model never stops being the device's own."""
    problem = quadratic([[0, 1]], {0: 1.0, 1: -1.0})
    result = run(problem, settings(active=2, rounds=2, leaves={1: 1}))
    # round 0: 0.1 and -0.1, z = 0; round 1: one candidate suffices, x_0 = 0.1 - 0.1 (-0.9 + 0.1) =
    # 0.18, z = 0.09
    assert scalars([result.x[0], result.x[1], result.z[0]]) == pytest.approx(
        [0.18, -0.1, 0.09], abs=ROUNDED_64
    )
    assert result.mixes == [(2.0, (0,)), (4.0, (0,))]


def test_leaving_while_selected_is_refused_in_async_clouds() -> None:
    """The oracle does not define a leave of a device that is currently selected."""
    problem = quadratic([[0], [1]], {0: 1.0, 1: 1.0})
    early = arrivals({(0, 0): 1.0, (1, 0): 9.0})
    with pytest.raises(NotImplementedError, match="device 1"):
        run(problem, settings(cloud="async", rounds=2, leaves={1: 1}, arrival_quantile=early))


@pytest.mark.parametrize("cloud", ["sync", "async", "rigorous"])
def test_server_without_members_ends_its_phase_at_once_and_makes_no_step(cloud: str) -> None:
    """A phase needs just as many uploads as there are candidates; an empty sum moves nothing."""
    result = run(quadratic([[0], []], {0: 1.0}), settings(cloud=cloud, first=2))
    assert result.mixes == [(2.0, (0, 1) if cloud == "sync" else (1, 0))]
    assert scalars(result.z) == pytest.approx(
        [0.05, 0.05 if cloud == "sync" else 0.0], abs=ROUNDED_64
    )
