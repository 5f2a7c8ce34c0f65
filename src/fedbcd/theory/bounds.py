"""Theorem 1 and its lemmas as numbers: every constant as a function of the problem's constants.

The proof fixes K_x = K_z = 1 and a constant, common eta_z, and so do the bounds. Where a printed
formula and its derivation differ, the derivation is followed; docs/errata.md lists each place, and
a test shows each by numbers.

letters      V = |V|, Q = max |Q_n|, gamma = max gamma_i, L = max L_i, D = D_X, omega = zeta sqrt(1
+ rho eta_x), kappa = 1 - omega^2
paper_*      the path of the paper: C_1..C_10, B_1, B_2, C, A_1, A_2 (B_1 and B_2 turn out to grow
with T, see errata 7)
*_bound      what the corrected derivation gives for the mean of each certificate over rounds
0..T-1, for every T; with one server (Sync-cloud) at the rate of Remark 5
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

from fedbcd.errors import ConfigError
from fedbcd.theory.mixing import MixingRate, ScheduleMemory


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The constants of a federation and its settings; the letter of each is in the comment."""

    servers: int  # |V|
    members: int  # |Q|, devices of the largest server
    penalty: float  # gamma, the largest gamma_i
    smoothness: float  # L, the largest L_i, on the set extended by momentum
    nonconvexity: float = (
        0.0  # rho, the largest rho_i: f_i + rho/2 ||x||^2 is convex; 0 if every g_i is convex
    )
    diameter: float  # D_X, of the feasible set
    gradient: float  # D_g, the largest ||grad g_i|| on X
    excess: float  # Delta*, twice the sum over devices of f_i at the start minus its minimum
    # max ||z_m(0) - c|| for any one point c; 0 when all servers start alike, as in Algorithm 1
    start: float = 0.0
    noise: float = 0.0  # sigma / sqrt(R); 0 for exact gradients
    device_step: float  # eta_x
    momentum: float = 0.0  # zeta
    server_step: float  # eta_z as printed (absolute), the same for all servers
    mixing: (
        MixingRate | ScheduleMemory
    )  # theta and beta, or the memory of one schedule (with start = 0)
    period: int = 1  # p, every device is active at least once in p rounds

    def __post_init__(self) -> None:
        for name in ("servers", "members", "period"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in ("penalty", "smoothness", "diameter", "device_step", "server_step"):
            if not 0 < getattr(self, name) < math.inf:
                why = (
                    "; all bounds hold D_X, so there are none without a compact X"
                    if name == "diameter"
                    else ""
                )
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be a finite number above 0{why}"
                )
        for name in ("nonconvexity", "gradient", "excess", "start", "noise", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be a finite number, 0 or more"
                )
        if self.start and isinstance(self.mixing, ScheduleMemory):
            raise ConfigError(
                f"start={self.start:g} must be 0 with the memory of a schedule; use lemma_rate for"
                " servers that start apart"
            )
        self._check_steps()

    def _check_steps(self) -> None:
        """Assumption 4."""
        of_devices = device_step_limit(self.smoothness, self.penalty), "1/(L + gamma)", "4(i)"
        of_servers = server_step_limit(self.penalty, self.members), "1/(gamma |Q|)", "4(ii)"
        for name, (limit, is_, part) in {
            "device_step": of_devices,
            "server_step": of_servers,
        }.items():
            if getattr(self, name) > limit * (1 + 1e-12):
                raise ConfigError(
                    f"{name}={getattr(self, name):g} exceeds {limit:g} = {is_}; Assumption {part}"
                    " asks for at most that"
                )
        limit = momentum_limit(self.nonconvexity, self.device_step)
        if self.momentum >= limit:
            raise ConfigError(
                f"momentum={self.momentum:g} must be below {limit:g} = 1/sqrt(1 + rho eta_x), by"
                " Assumption 4(iii)"
            )

    @property
    def omega(self) -> float:
        """omega of Assumption 4(iii), as small as the momentum allows: zeta sqrt(1 + rho eta_x)."""
        return self.momentum * math.sqrt(1 + self.nonconvexity * self.device_step)

    @property
    def kappa(self) -> float:
        """1 - omega^2: what momentum leaves of a step's progress."""
        return 1.0 - self.omega**2


# ------------------------------------------------------------------------------------------------
# Assumption 4
def device_step_limit(smoothness: float, penalty: float) -> float:
    """Assumption 4(i): eta_x <= 1/(L_i + gamma_i)."""
    return 1.0 / (smoothness + penalty)


def server_step_limit(penalty: float, members: int) -> float:
    """Assumption 4(ii): eta_z <= 1/(max gamma_i max |Q_n|)."""
    return 1.0 / (penalty * members)


def momentum_limit(nonconvexity: float, device_step: float) -> float:
    """Assumption 4(iii): zeta <= omega/sqrt(1 + rho_i eta_x) for some omega < 1, so zeta must stay
    below this.
    """
    return 1.0 / math.sqrt(1.0 + nonconvexity * device_step)


def stable_step_limit(curvature: float, momentum: float) -> float:
    """The step beyond which extrapolated gradient steps grow along a direction while this is its
    curvature (L_i + gamma_i at most).

    x+ = (1 - eta c)(x + zeta (x - x_prev)) is stable for eta c < (2 + 2 zeta)/(1 + 2 zeta). Beyond
    it iterates bounce between borders of X.
    """
    return (2 + 2 * momentum) / ((1 + 2 * momentum) * curvature)


# ------------------------------------------------------------------------------------------------
# Lemmas 1 and 2: one step
def largest_move(problem: Problem) -> float:
    """How far one exact step can move a personal model: (1 + eta_x rho) zeta D_X + eta_x (D_g +
    gamma D_X).

    The printed bound has zeta D_X, by an argument that takes the extrapolated point for one of X.
    It holds so for convex g_i only.
    """
    p = problem
    return (1 + p.device_step * p.nonconvexity) * p.momentum * p.diameter + p.device_step * (
        p.gradient + p.penalty * p.diameter
    )


def device_slack(
    problem: Problem, last_move: float, noise: float = 0.0, apart: float = 0.0
) -> float:
    """Lemma 1: ||x+ - x||^2 / (2 eta_x) <= f_i(x, zbar) - f_i(x+, zbar) + this, where x moved by
    `last_move` before; `noise` is ||delta_i||, `apart` is ||zbar - z_n||.
    """
    p = problem
    behind = p.momentum**2 * (1 / p.device_step + p.nonconvexity) / 2 * last_move**2
    return behind + (largest_move(p) + p.device_step * noise) * (noise + p.penalty * apart)


def cloud_slack(problem: Problem, squares: float) -> float:
    """Lemma 2: eta_z/(2 V) ||sum gamma_i (zbar - x_i)||^2 <= sum_i f_i(x_i, zbar) - sum_i f_i(x_i,
    zbar+) + this; `squares` is sum_n ||zbar - z_n||^2.
    """
    return problem.server_step * (problem.penalty * problem.members) ** 2 / 2 * squares


# ------------------------------------------------------------------------------------------------
# consensus lemma
@dataclass(frozen=True)
class Consensus:
    """C_1 to C_6 of the consensus lemma; `total` bounds sum_t ||zbar - z_n||, `squares` bounds
    sum_t ||zbar - z_n||^2, t = 0..T-1.
    """

    c1: float
    c2: float
    c3: float
    c4: float
    c5: float
    c6: float
    total: float
    squares: float


def consensus(problem: Problem, rounds: int) -> Consensus:
    """The consensus lemma for T = `rounds`: C_1 + eta_z T C_2, and C_3 + eta_z T C_4 + eta_z C_5 +
    eta_z^2 T C_6.

    C_5 has the factor 2 of the term 2 eta_z, and C_6 the squares of D_X and |Q|, that the last
    steps of the printed proof drop.
    """
    push = (
        problem.penalty * problem.diameter * problem.members
    )  # a server step moves z_n by at most eta_z gamma D |Q|
    if isinstance(problem.mixing, ScheduleMemory):
        return _consensus_of_schedule(problem.mixing, push, problem.server_step, rounds)
    theta, beta = problem.mixing.theta, problem.mixing.beta
    v, z, step = problem.servers, problem.start, problem.server_step
    ones, squares = _geometric(beta, rounds), _geometric(beta**2, rounds)
    c1 = theta * v * ones * z
    c2 = 2 * push + theta * push * v / (1 - beta)
    c3 = (theta * v * z) ** 2 * squares
    c4 = 2 * theta * v * push * theta * v / (1 - beta**2) * z
    c5 = 4 * theta * v * push * ones * z
    c6 = push**2 * (
        (theta * v) ** 2 / (1 - beta**2)
        + (2 * beta * (theta * v) ** 2 / (1 - beta) + 4 * theta * v) / (1 - beta)
        + 4
    )
    total = c1 + step * rounds * c2
    return Consensus(
        c1, c2, c3, c4, c5, c6, total, c3 + step * rounds * c4 + step * c5 + step**2 * rounds * c6
    )


def _consensus_of_schedule(
    mixing: ScheduleMemory, push: float, step: float, rounds: int
) -> Consensus:
    """The same from the display before the matrix convergence lemma: ||zbar(t) - z_n(t)|| <= eta_z
    gamma D |Q| (memory(t) + 2).
    """
    if len(mixing.memory) < rounds:
        raise ConfigError(
            f"the schedule has {len(mixing.memory)} rounds, fewer than T={rounds}; give one as long"
            " as the run"
        )
    reach = [memory + 2 for memory in mixing.memory[:rounds]]
    c2, c6 = push * sum(reach) / rounds, push**2 * sum(r**2 for r in reach) / rounds
    return Consensus(0.0, c2, 0.0, 0.0, 0.0, c6, step * rounds * c2, step**2 * rounds * c6)


def _geometric(ratio: float, terms: int) -> float:
    return float(terms) if ratio == 1 else (1 - ratio**terms) / (1 - ratio)


# ------------------------------------------------------------------------------------------------
# accumulation lemma
@dataclass(frozen=True)
class Accumulation:
    """C_7 to C_10, B_1 and B_2 of the accumulation lemma.

    `device` bounds the mean over t of ||x_i(t+1) - x_i(t)||^2 / eta_x^2, `cloud` that of ||sum
    gamma_i (zbar - x_i)||^2; both as the paper derives them, for every T; once T >=
    `enough_rounds`, B_1/sqrt(T) + B_2/sqrt(R) covers both.
    """

    c7: float
    c8: float
    c9: float
    c10: float
    b1: float
    b2: float
    device: float
    cloud: float
    enough_rounds: float


def paper_accumulation(problem: Problem, rounds: int) -> Accumulation:
    """The accumulation lemma for T = `rounds`, with d = eta_z sqrt(T); b2 is B_2/sqrt(R), for sigma
    enters through sigma/sqrt(R) only.

    Corrected: the noise term 2 sigma^2/R counts every device (V Q of them), and the momentum part
    of a move is (1 + eta_x rho) zeta D_X.
    """
    p, c = problem, consensus(problem, rounds)
    devices = p.servers * p.members
    move = largest_move(p) / p.device_step  # (1 + eta_x rho) zeta D/eta_x + D_g + gamma D
    weight = p.penalty**2 * p.servers * p.members**2
    c7 = 2 * p.penalty * devices * (move + p.noise) * c.c1 + weight * (c.c3 + p.server_step * c.c5)
    c8 = 2 * p.penalty * devices * (move + p.noise) * c.c2 + weight * c.c4
    c9 = weight * c.c6
    c10 = 2 * devices * move
    least, most = min(p.server_step, p.device_step), max(p.server_step, p.device_step)
    share = min(1 / p.servers, p.kappa) * least
    d = p.server_step * math.sqrt(rounds)
    floor = most * (2 * devices * p.noise**2 + p.noise * c10)
    sum_of_squares = (
        (p.excess + most * (c7 + d**2 * c9)) / rounds + most * d * c8 / math.sqrt(rounds) + floor
    )
    return Accumulation(
        c7,
        c8,
        c9,
        c10,
        b1=2 * most * d * c8 / share,
        b2=floor / share,
        device=sum_of_squares / (least * p.kappa),
        cloud=sum_of_squares * p.servers / least,
        enough_rounds=max((p.excess + most * (c7 + d**2 * c9)) / (most * d * c8), c.c1 / (d * c.c2))
        ** 2,
    )


# ------------------------------------------------------------------------------------------------
# Theorem 1
@dataclass(frozen=True)
class PaperTheorem:
    """A_1, A_2, B_1, B_2 and C as functions of T; a2 and b2 are A_2/R^(1/4) and B_2/sqrt(R)."""

    a1: float
    a2: float
    b1: float
    b2: float
    c: float


def paper_theorem(problem: Problem, rounds: int) -> PaperTheorem:
    """The constants of Theorem 1 along the paper's path, A_1 and A_2 from the last display of the
    proof, for T >= `enough_rounds`.

    The last display forgets the rounds in which a device is not active; p, the drift of zbar
    meanwhile and the rounds before the first activation are put back, so that gap <= A_1/T^(1/4) +
    A_2/R^(1/4) is what the derivation gives.
    """
    p, acc = problem, paper_accumulation(problem, rounds)
    c = 2 * p.server_step * math.sqrt(rounds) * consensus(problem, rounds).c2
    moves = _moves_factor(p) * math.sqrt(p.period)
    stale = _drift(p) + (p.period - 1) / rounds * _trivial_gap(p)
    a1 = (
        p.diameter * (moves * math.sqrt(acc.b1) + p.penalty * p.period * c / rounds**0.25)
        + stale * rounds**0.25
    )
    return PaperTheorem(a1, p.diameter * (moves * math.sqrt(acc.b2) + p.noise), acc.b1, acc.b2, c)


@dataclass(frozen=True)
class CertificateBounds:
    """Bounds on the mean of each certificate over the rounds 0..T-1, in expectation."""

    gap: float  # of every personal model
    pull: float  # || sum gamma_i (zbar - x_i) ||^2
    spread: float  # || zbar - z_n ||, of every server


def certificate_bounds(problem: Problem, rounds: int) -> CertificateBounds:
    """What the corrected derivation gives for T = `rounds`; it holds for every T.

    With eta_z = d/sqrt(T), exact gradients and a common start, all three fall as T^-1/2: the gap
    faster than the T^-1/4 of the theorem. With one server (Remark 5) eta_z need not fall with T:
    the pull is at most Delta*/(eta_z T), and the gap falls as T^-1/2.
    """
    p = problem
    spread = 0.0 if p.servers == 1 else consensus(p, rounds).total / rounds
    progress = total_progress(p, rounds)
    pull = p.servers * progress / (p.server_step * rounds)
    mean_square_move = (
        2 * p.period * progress / (p.kappa * p.device_step * rounds)
    )  # of ||x+ - x||/eta_x, rounds of waiting included
    gap = p.diameter * (
        _moves_factor(p) * math.sqrt(mean_square_move) + p.penalty * p.period * spread + p.noise
    )
    drift = _drift(p, math.sqrt(pull) / p.servers + p.penalty * p.members * spread)
    gap += drift + (p.period - 1) / rounds * _trivial_gap(p)
    return CertificateBounds(gap, pull, spread)


def telling_rounds(problem: Problem, rounds: int) -> dict[str, int | None]:
    """From which T on each certificate's bound says something, that is, falls below what any points
    of X satisfy; None: for no T up to 1e18, as with a noise that is too large.

    eta_z = d/sqrt(T) with the d of T = `rounds`; with one server eta_z stays. `problem` has a rate
    of mixing, not the memory of a schedule.
    """
    d_squared = problem.server_step**2 * rounds
    least = math.ceil(
        d_squared / server_step_limit(problem.penalty, problem.members) ** 2 * (1 - 1e-12)
    )
    alone = problem.servers == 1
    trivial = asdict(trivial_bounds(problem))

    def says(name: str, t: int) -> bool:
        step = problem.server_step if alone else math.sqrt(d_squared / t)
        bound = certificate_bounds(replace(problem, server_step=step), t)
        return bool(getattr(bound, name) < trivial[name])

    return {name: _least(partial(says, name), 1 if alone else least) for name in trivial}


def _least(holds: Callable[[int], bool], low: int, most: int = 10**18) -> int | None:
    """The least number from `low` on for which something holds that goes on holding."""
    high = low = max(1, low)
    while not holds(high):
        if high > most:
            return None
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def trivial_bounds(problem: Problem) -> CertificateBounds:
    """What any points of X satisfy, whatever was done to them: the yardstick for whether a bound
    says anything.
    """
    p = problem
    return CertificateBounds(
        _trivial_gap(p), (p.penalty * p.servers * p.members * p.diameter) ** 2, p.diameter
    )


def total_progress(problem: Problem, rounds: int) -> float:
    """W(T), the right side of: sum_i kappa/2 eta_x sum_t ||x+ - x||^2/eta_x^2 + eta_z/V sum_t
    ||pull||^2 <= W(T).

    As in the accumulation lemma, but each block keeps its own step, and the cross terms 2 ||x+ -
    x|| (gamma ||zbar - z_n|| + ||delta||) are split by Young's inequality, so that squares of
    ||zbar - z_n|| appear (they add up to a constant) and not the distances themselves.
    """
    p = problem
    squares = 0.0 if p.servers == 1 else consensus(p, rounds).squares
    young = (
        4 if p.noise > 0 else 2
    ) / p.kappa  # half of kappa goes to the one cross term, or a quarter to each of two
    devices = p.servers * p.members
    from_devices = young * p.device_step * devices * (rounds * p.noise**2 + p.penalty**2 * squares)
    return p.excess + from_devices + 2 * cloud_slack(p, p.servers * squares)


def _moves_factor(p: Problem) -> float:
    """(L + gamma + 1/eta_x) eta_x (1 + zeta): a step and the momentum behind it, in units of ||x+ -
    x||/eta_x. At most the printed 4.
    """
    return (1 + p.device_step * (p.smoothness + p.penalty)) * (1 + p.momentum)


def _drift(p: Problem, mean_push: float = math.inf) -> float:
    """What zbar moves between two activations of a device, as it enters the gap: at most p - 1
    moves, each of eta_z times the mean push of a server, which is at most gamma |Q| D.
    """
    push = min(mean_push, p.penalty * p.members * p.diameter)
    return p.penalty * p.diameter * (p.period - 1) * p.server_step * push


def _trivial_gap(p: Problem) -> float:
    """The gap of any point of X: at most ||grad f_i|| D_X."""
    return (p.gradient + p.penalty * p.diameter) * p.diameter
