"""Theorem 1 and its lemmas on problems whose constants are known, run by the real engine on the
rigorous Async-cloud (about 30 s in all).

Bounds hold for the mean over rounds 0..T-1, for every T; rates are fitted over runs with eta_z =
d/sqrt(T) each.
"""

import math
from functools import cache

import pytest
import torch

from fedbcd.theory.bounds import (
    CertificateBounds,
    certificate_bounds,
    consensus,
    paper_accumulation,
    paper_theorem,
    total_progress,
    trivial_bounds,
)
from fedbcd.theory.mixing import lemma_rate
from support.known_problems import FIRST, KNOWN, SERVERS, Known, Trace, trace

HORIZONS = (128, 512)
CASES = [(name, exact) for name in KNOWN for exact in (True, False)]
IDS = [f"{name}-{'exact' if exact else 'stochastic'}" for name, exact in CASES]


@cache
def known(name: str) -> Known:
    return KNOWN[name]()


@cache
def run(name: str, rounds: int, batch: int | None, reach: float = 1.0) -> Trace:
    return trace(known(name), rounds, batch, reach)


def _batch(exact: bool, rounds: int) -> int | None:
    """The theorem's T and R terms fall together when the batch grows with T."""
    return None if exact else rounds


@pytest.mark.parametrize(("name", "exact"), CASES, ids=IDS)
def test_measured_certificates_stay_under_the_bounds_for_all_t(name: str, exact: bool) -> None:
    rounds = HORIZONS[-1]
    batch = None if exact else 4
    result = run(name, rounds, batch)
    gap, pull, spread = result.running_means()
    for mixing in result.mixing():
        problem = known(name).problem(result.server_step, batch, mixing, result.period)
        for t in range(1, rounds + 1):
            bound = certificate_bounds(problem, t)
            assert float(gap[t - 1]) <= bound.gap
            assert float(pull[t - 1]) <= bound.pull
            assert float(spread[t - 1]) <= bound.spread


@pytest.mark.parametrize(("name", "exact"), CASES, ids=IDS)
def test_the_lemmas_hold_along_the_way(name: str, exact: bool) -> None:
    """Both sums of the consensus lemma, both means of the accumulation lemma, and W(T), the sum
    that the repaired proof bounds.
    """
    rounds = HORIZONS[-1]
    batch = None if exact else 4
    result = run(name, rounds, batch)
    for mixing in result.mixing():
        problem = known(name).problem(result.server_step, batch, mixing, result.period)
        for t in (1, 2, 3, 10, 100, rounds):
            spread, moves, pull = result.spread_TV[:t], result.moves_TN[:t], result.pull_T[:t]
            lemma, accumulated = consensus(problem, t), paper_accumulation(problem, t)
            assert float(spread.sum(0).max()) <= lemma.total
            assert float(spread.square().sum(0).max()) <= lemma.squares
            assert float(moves.mean(0).max()) <= accumulated.device
            assert float(pull.mean()) <= accumulated.cloud
            done = problem.kappa / 2 * problem.device_step * float(
                moves.sum()
            ) + problem.server_step / SERVERS * float(pull.sum())
            assert done <= total_progress(problem, t)


def test_the_papers_constants_cover_the_run_once_t_is_large_enough() -> None:
    """A_1/T^(1/4), B_1/sqrt(T) and C/sqrt(T), with the constants corrected: valid where T is above
    the lemma's threshold.
    """
    result = run("quadratic", HORIZONS[-1], None)
    problem = known("quadratic").problem(
        result.server_step, None, lemma_rate(1 / FIRST, SERVERS, result.connection), result.period
    )
    t = result.rounds
    theorem = paper_theorem(problem, t)
    gap, pull, spread = (float(mean[-1]) for mean in result.running_means())
    assert gap <= theorem.a1 / t**0.25
    assert spread <= theorem.c / t**0.5
    accumulated = paper_accumulation(problem, t)
    assert pull <= max(theorem.b1 / t**0.5, accumulated.cloud)


@pytest.mark.parametrize("name", list(KNOWN))
def test_with_the_memory_of_the_schedule_the_bounds_say_something(name: str) -> None:
    """Small d, exact gradients: all three bounds fall below what compactness alone gives, and are
    not reached.
    """
    rounds = HORIZONS[-1]
    result = run(name, rounds, None, reach=0.05)
    problem = known(name).problem(result.server_step, None, result.mixing()[1], result.period)
    bound, trivial = certificate_bounds(problem, rounds), trivial_bounds(problem)
    measured = CertificateBounds(*(float(mean[-1]) for mean in result.running_means()))
    assert measured.gap < bound.gap < trivial.gap
    assert measured.pull < bound.pull < trivial.pull
    assert measured.spread < bound.spread < trivial.spread


@pytest.mark.parametrize(("name", "exact"), CASES, ids=IDS)
def test_the_certificates_fall_at_least_as_fast_as_the_theorem_says(name: str, exact: bool) -> None:
    """T^-1/4, T^-1/2 and T^-1/2, with R = T for mini-batches; 0.05 is left to the fit. p and q are
    those of the longest run all along.

    Servers start alike, so the spread is 0 at first. Its rate is that of the rounds after that
    warm-up.
    """
    means = {}
    for rounds in HORIZONS:
        r = run(name, rounds, _batch(exact, rounds))
        assert (r.period, r.connection) == (7, 9)
        means[rounds] = torch.stack(
            [r.gap_TN.mean(0).max(), r.pull_T.mean(), r.spread_TV[48:].mean(0).max()]
        )
    few, many = HORIZONS
    rates = -torch.log(means[many] / means[few]) / math.log(many / few)
    assert float(rates[0]) >= 0.25
    assert float(rates[1]) >= 0.5 - 0.05
    assert float(rates[2]) >= 0.5 - 0.05


@pytest.mark.parametrize("name", list(KNOWN))
def test_with_a_fixed_batch_certificates_level_off_lower_for_larger_batches(name: str) -> None:
    """The R terms: A_2/R^(1/4) for the gap and B_2/sqrt(R) for the pull, at T = 128."""
    means = {
        batch: [float(mean[-1]) for mean in run(name, 128, batch).running_means()]
        for batch in (4, 64)
    }
    rates = [
        math.log(small / large) / math.log(16)
        for small, large in zip(means[4], means[64], strict=True)
    ]
    assert rates[0] >= 0.25
    assert rates[1] >= 0.5
